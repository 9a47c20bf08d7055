"""scale/room.py: a run that cannot fit is refused before anything is loaded."""

from dataclasses import replace

import pytest
import torch

import models
from config import Config, Misuse, with_preset
from runtime.cli import parse_command_line
from runtime.find_model import model_config
from runtime.methods import DpoConfig, SftConfig
from scale import room
from scale.default_models import resolve_model
from scale.memory import CPU_CACHE_AT_MOST, GIB, GPU_HEAD_BYTES, Shape, cpu_cache_bytes, shape_of
from scale.room import Room, check_room, cpu_room, needed, sampler_share

LAPTOP = with_preset("laptop")
QWEN_3B = Shape("3B", 151936, 2048, 11008, 36, 16, 2)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def machine(gib, free=None, is_gpu=False):
    what = "the GPU" if is_gpu else "this machine"
    return Room(gib * GIB, (gib if free is None else free) * GIB, what, is_gpu)


def bytes_of(config, is_gpu=False, shape=None):
    return needed(config, shape or shape_of("", model_config(config.model)), is_gpu)


def test_the_laptops_run_needs_what_it_was_seen_to_take(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    need = bytes_of(replace(LAPTOP, max_tokens_per_micro_batch=1024))
    assert need.state == pytest.approx(16 * 134.5e6, rel=0.01)
    assert 7.5e9 < need.peak < 10e9  # 9.1 GB were seen
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 ")
    assert 7.2e9 < bytes_of(LAPTOP).peak < 8.6e9  # 7.2 and 7.8 GB in recipes/results/worlds


def test_beside_the_trainer_the_sampler_takes_what_is_left_when_it_wakes(monkeypatch):
    """The weights, moments and reference of 3B are 46 GiB: half of an 80 GB card is not free."""
    monkeypatch.setattr(room, "shape_of", lambda *_: QWEN_3B)
    paper = with_preset("paper")
    held = bytes_of(paper, True, QWEN_3B).held
    assert held == pytest.approx(16 * QWEN_3B.parameters)  # 20 bytes each, less the gradients' 4
    for gib in (79.1, 94.0):
        share = sampler_share(paper, machine(gib, is_gpu=True))
        copies = 2 * QWEN_3B.parameters  # autocast's, as the trainer scores after a sync
        assert 0.25 < share < 0.5 and held + copies + share * gib * GIB < 0.95 * gib * GIB
    assert sampler_share(paper, machine(140.0, is_gpu=True)) == 0.5
    assert sampler_share(paper, machine(24.0)) == 0.5  # no card: nobody asks
    adapters = replace(paper, lora_rank=16)  # whose merged weights autocast does not keep
    assert sampler_share(adapters, machine(24.0, is_gpu=True)) > 0.4
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = sampler_share(paper, machine(40.0, is_gpu=True))
    gathered = 4 * QWEN_3B.root_parameters  # FSDP's, of policy and reference
    assert two == pytest.approx(1 - (room.MARGIN * held / 2 + gathered) / (40 * GIB) - room.CONTEXT)


def test_what_stays_on_a_card_while_the_sampler_sleeps_is_counted(monkeypatch):
    """An H200 held 81 GB in an update of 76 by the formula: CUDA's own, graphs, torch's cache."""
    monkeypatch.setattr(room, "shape_of", lambda *_: QWEN_3B)
    monkeypatch.setattr(room, "model_config", lambda name: {})
    paper = with_preset("paper")
    peak = bytes_of(paper, True, QWEN_3B).peak / GIB
    assert check_room(paper, machine(peak / 0.94, is_gpu=True)) is None
    assert "memory may not suffice" in check_room(paper, machine(peak + 1, is_gpu=True))


def test_a_sampler_that_never_sleeps_and_a_pair_that_is_never_parted_are_counted():
    paper = with_preset("paper")
    vllm, plain = (
        bytes_of(replace(paper, engine=engine), True, QWEN_3B)
        for engine in ("vllm", "transformers")
    )
    assert plain.peak - vllm.peak == pytest.approx(2 * QWEN_3B.parameters)
    pair = replace(DpoConfig(), max_trajectory_tokens=4096, max_tokens_per_micro_batch=1024)
    two_rows = replace(SftConfig(), max_trajectory_tokens=4096, max_tokens_per_micro_batch=8192)
    assert bytes_of(pair, True, QWEN_3B).peak == bytes_of(two_rows, True, QWEN_3B).peak


def test_tcmalloc_loses_less_between_buffers(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with_the_c_librarys = bytes_of(LAPTOP).peak
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 ")
    assert bytes_of(LAPTOP).peak < 0.8 * with_the_c_librarys


def test_enough_is_not_mentioned_little_is_a_line_and_too_little_is_refused():
    peak = bytes_of(LAPTOP).peak / GIB
    assert check_room(LAPTOP, machine(2 * peak)) is None
    for near in (machine(2 * peak, free=0.9 * peak), machine(0.9 * peak)):
        said = check_room(LAPTOP, near)
        assert "memory may not suffice" in said and "try --" in said
    with pytest.raises(Misuse, match="out of memory before it begins") as error:
        check_room(LAPTOP, machine(0.7 * peak))
    assert "\n" not in str(error.value)


def test_what_is_advised_fits():
    """The words of the refusal, given, are not refused."""
    tight = machine(0.7 * bytes_of(LAPTOP).peak / GIB)
    with pytest.raises(Misuse, match=r"try --(max-tokens-per-micro-batch|gradient|lora)") as error:
        check_room(LAPTOP, tight)
    words = str(error.value).rpartition("try ")[2].split()
    values = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            values[word[2:].replace("-", "_")] = True if after.startswith("--") else int(after)
    check_room(replace(LAPTOP, **values), tight)


def test_where_nothing_helps_a_smaller_model_is_the_advice():
    with pytest.raises(Misuse, match="take a smaller --model$"):
        check_room(LAPTOP, machine(1))


@pytest.mark.parametrize(
    "smaller",
    [
        dict(max_tokens_per_micro_batch=1536),
        dict(gradient_checkpointing=True),
        dict(lora_rank=16),
        dict(engine_url=("http://a:1",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_gpu", [False, True])
def test_what_is_said_to_take_less_takes_less(smaller, is_gpu):
    changes = {"max_trajectory_tokens": 1536, "gradient_checkpointing": False}
    c = replace(with_preset("paper"), **changes)
    less = bytes_of(replace(c, **smaller), is_gpu, QWEN_3B).peak
    more = bytes_of(c, is_gpu, QWEN_3B).peak
    assert less < more or (is_gpu and "engine_url" in smaller and less == more)


def test_a_critic_and_a_reference_are_counted():
    plain, ppo, kl = (
        bytes_of(replace(LAPTOP, **changes)).state
        for changes in ({}, {"algorithm": "ppo"}, {"kl_coef": 0.1})
    )
    assert ppo == 2 * plain
    assert kl == pytest.approx(plain * 20 / 16)


def test_cards_share_the_state_and_processes_of_a_machine_do_not_share_its_memory(monkeypatch):
    c = with_preset("paper")
    alone, alone_here = bytes_of(c, True, QWEN_3B), bytes_of(LAPTOP)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert bytes_of(c, True, QWEN_3B).state == alone.state / 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert bytes_of(LAPTOP).state == alone_here.state
    assert bytes_of(LAPTOP).peak > 2 * alone_here.peak


def test_the_papers_run_fits_a_large_card_and_only_as_layers_are_computed_again(monkeypatch):
    monkeypatch.setattr(room, "shape_of", lambda *_: QWEN_3B)
    monkeypatch.setattr(room, "model_config", lambda name: {})
    c = with_preset("paper")
    assert check_room(c, machine(79, is_gpu=True)) is None
    with pytest.raises(Misuse, match=r"the GPU has 84.8 GB; try --gradient-checkpointing$"):
        check_room(replace(c, gradient_checkpointing=False), machine(79, is_gpu=True))
    with pytest.raises(Misuse, match=r"try --lora-rank 16 --max-tokens-per-micro-batch 10752$"):
        check_room(c, machine(45, is_gpu=True))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("gib", [20, 30, 45, 60, 79, 100])
def test_what_is_advised_is_what_fits_and_names_nothing_that_is_on(monkeypatch, gib, checkpointing):
    monkeypatch.setattr(room, "shape_of", lambda *_: QWEN_3B)
    monkeypatch.setattr(room, "model_config", lambda name: {})
    c = replace(with_preset("paper"), gradient_checkpointing=checkpointing)
    said = room.advice(c, machine(gib, is_gpu=True))
    if not said.startswith("try "):
        assert said == "take a smaller --model, or more cards"
        return
    values = parse_command_line(Config, said.split()[1:], "train.py", c)
    assert values != c and needed(values, QWEN_3B, True).peak <= gib * GIB
    assert ("--gradient-checkpointing" in said) <= (not checkpointing)


def test_the_slice_of_logits_that_is_counted_is_the_one_that_is_taken(monkeypatch):
    """scale/memory.py and scale/room.py import no torch, and so not models.py's numbers."""
    assert models.HEAD_BYTES == {"cpu": room.CPU_HEAD_BYTES}
    taken = []

    class Asked(dict):
        def get(self, device, otherwise):
            taken.append(otherwise)  # where no limit is named, as for a GPU
            return otherwise

    monkeypatch.setattr(models, "HEAD_BYTES", Asked())
    policy = models.load_policy(resolve_model("tiny"))
    taken.clear()  # loading scores a few tokens
    policy(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 1]]))
    assert taken == [GPU_HEAD_BYTES]


def test_a_model_of_another_kind_is_let_pass(monkeypatch):
    monkeypatch.setattr(room, "model_config", lambda name: {"n_embd": 768, "n_layer": 12})
    assert check_room(Config(model="gpt2"), machine(0.001)) is None
    assert shape_of("moe", model_config("tiny") | {"num_experts": 8}) is None


def test_the_memory_is_the_machines_or_its_containers_where_that_is_less(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 6000000 kB\n",
        "proc/self/cgroup": "0::/user/mine\n",
        "sys/fs/cgroup/user/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.current": "5\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_room(tmp_path) == Room(8_192_000_000, 6_144_000_000, "this machine", False)
    group = tmp_path / "sys/fs/cgroup/user/mine"
    group.mkdir()
    (group / "memory.max").write_text("4000000000\n")
    (group / "memory.current").write_text("1000000000\n")
    assert cpu_room(tmp_path) == Room(4_000_000_000, 3_000_000_000, "this container", False)
    (tmp_path / "proc/meminfo").unlink()
    assert cpu_room(tmp_path) is None


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float32", 2)])
def test_the_sampler_on_a_cpu_gets_what_its_trajectories_need_and_no_more(dtype, factor):
    """Of the 135M model: 23 kB a token in bfloat16."""
    shape = shape_of("smollm2-135m", model_config("smollm2-135m"))
    token = 4 * 30 * 3 * 64 * factor
    assert cpu_cache_bytes(shape, 1536, 64, dtype) == 64 * 1536 * token // 4
    longest = cpu_cache_bytes(shape, 100_000, 1, dtype)
    assert longest > 100_000 * token  # one sequence fits, however long it may be
    tiny = shape_of("tiny", model_config("tiny"))
    token = 4 * 4 * 2 * 64 * factor  # 128 trajectories of the laboratory, if none ends early:
    assert cpu_cache_bytes(tiny, 3072, 64, dtype) >= min(128 * 3072 * token, GIB // 2)
    assert cpu_cache_bytes(None, 1536, 64, dtype) == CPU_CACHE_AT_MOST
