"""Warm start: demonstrations are encoded as sampling encodes, and only actions are learned."""

import json
from dataclasses import replace

import pytest
import torch
from fakes import FakePool, ScriptedEngine
from toy_env import fresh_process_state

import warmstart
from chat import ChatTemplate
from config import complete, options
from data import demonstrate, to_agenttraj
from envclient import StepResult, connect, local_server
from envs import load_tasks
from envs.textcraft.env import TextCraft
from models import PolicyModel, load_policy, load_tokenizer
from rollout import RolloutRequest, RolloutSettings, collect
from scale import distributed
from scale.default_models import resolve_model
from scale.lora import add_lora
from update import Learner

TASKS = load_tasks("textcraft", split="train")
SETTINGS = warmstart.SftSettings(num_demonstrations=8, batch_size=4)


@pytest.fixture(scope="module")
def tiny():
    return resolve_model("tiny")


@pytest.fixture(scope="module")
def chat(tiny):
    return ChatTemplate(load_tokenizer(tiny))


@pytest.fixture(scope="module")
def records():
    return warmstart.demonstrations("textcraft", list(TASKS), count=8, seed=0)


def actions_of(record):
    return [turn["value"] for turn in record["conversations"] if turn["from"] == "gpt"]


# --- Demonstrations ------------------------------------------------------------------------------


def test_demonstrations_solve_their_task_and_cover_the_sub_tasks_in_equal_parts(records):
    assert len(records) == 8
    by_id = {task.task_id: task for task in TASKS}
    subtasks = [by_id[record["item_id"]].subtask for record in records]
    assert sorted(subtasks) == sorted(["depth 1", "depth 2", "depth 3", "depth 4"] * 2)
    for record in records:
        world, index = TextCraft(), by_id[record["item_id"]].task_index
        first = next(t["value"] for t in record["conversations"] if t["from"] == "human")
        # Depth 4 has one training task: its second demonstration has the next seed.
        assert any(first == world.reset(index, seed) for seed in (0, 1))
        for text in actions_of(record):
            _, _, terminated, _, info = world.step(world.parse(text))
        assert terminated
        assert info["success"]


def test_demonstrations_repeat_by_seed_and_reuse_tasks_with_another_one_when_all_are_used():
    one = [task for task in TASKS if task.subtask == "depth 4"][:1]
    first = warmstart.demonstrations("textcraft", one, count=3, seed=5)
    assert first == warmstart.demonstrations("textcraft", one, count=3, seed=5)
    texts = [record["conversations"][1]["value"] for record in first]
    assert len(set(texts)) == 3  # the world's seed differs, and with it its text


def test_an_oracle_that_needs_too_long_demonstrates_nothing():
    deep = next(task for task in TASKS if task.subtask == "depth 4")
    with local_server("textcraft") as url, connect("textcraft", url) as client:
        assert demonstrate(client, deep, seed=0, max_turns=1) is None
        assert demonstrate(client, deep, seed=0) is not None


# --- Encoding: one path for sampling and for demonstrations (traps 6 and 8) ----------------------


def test_a_demonstration_is_encoded_exactly_as_the_same_episode_is_when_sampled(chat, records):
    record = max(records, key=lambda r: len(actions_of(r)))
    task = next(t for t in TASKS if t.task_id == record["item_id"])
    world, script = TextCraft(), iter(actions_of(record))

    def play(task_index, turn, text):
        return StepResult(*world.step(world.parse(text)))

    class Pool(FakePool):
        env = "textcraft"

        def client(self, avoid=()):
            client = super().client(avoid)
            client.prompt = TextCraft.PROMPT
            return client

    pool = Pool(play, on_reset=lambda index: world.reset(index, seed=0))
    engine = ScriptedEngine(lambda name, prompt: chat.action(next(script)))
    request = RolloutRequest(task, group_id=0, sample=0, seed=0, step=1, max_rounds=50)
    settings = RolloutSettings(max_tokens_per_turn=200, max_trajectory_tokens=4000)
    (sampled,) = collect(engine, pool, chat, [request], settings)
    handler = warmstart.from_agenttraj(chat, record)
    assert sampled.success
    assert len(handler.turns) > 3
    assert handler.input_ids == sampled.input_ids
    assert handler.loss_mask == sampled.loss_mask
    assert handler.messages == sampled.messages


def test_the_loss_is_on_the_actions_with_their_end_of_turn_and_on_nothing_else(chat, records):
    for record in records:
        handler = warmstart.from_agenttraj(chat, record)
        learned = [i for i, mask in zip(handler.input_ids, handler.loss_mask, strict=True) if mask]
        expected = [i for text in actions_of(record) for i in chat.action(text)]
        assert learned == expected
        assert learned.count(chat.end_of_turn) == len(actions_of(record))


def test_a_turn_without_loss_stays_in_the_sequence_and_out_of_the_loss(chat, records):
    record = json.loads(json.dumps(max(records, key=lambda r: len(actions_of(r)))))
    whole = warmstart.from_agenttraj(chat, record)
    gpt = [turn for turn in record["conversations"] if turn["from"] == "gpt"]
    gpt[1]["loss"] = False
    partial = warmstart.from_agenttraj(chat, record)
    assert partial.input_ids == whole.input_ids
    start, end = whole.turns[1].action_span
    assert not any(partial.loss_mask[start:end])
    assert partial.loss_mask[:start] + partial.loss_mask[end:] == (
        whole.loss_mask[:start] + whole.loss_mask[end:]
    )


def test_an_agenttraj_conversation_survives_import_and_export(chat, records):
    for record in records:
        handler = warmstart.from_agenttraj(chat, record)
        assert to_agenttraj(handler.task_id, handler.messages) == record


def test_agentgyms_opening_by_human_and_gpt_is_prompt_and_not_learned(chat):
    turns = [
        {"from": "human", "loss": None, "value": "You are to craft."},
        {"from": "gpt", "loss": False, "value": "OK."},
        {"from": "human", "loss": None, "value": "Goal: craft stick."},
        {"from": "gpt", "loss": True, "value": "Action: get 1 stick"},
        {"from": "human", "loss": None, "value": "Got 1 stick"},
    ]
    handler = warmstart.from_agenttraj(chat, {"item_id": "textcraft_0", "conversations": turns})
    assert [m["role"] for m in handler.messages] == ["user", "assistant", "user", "assistant"]
    assert [t.action_text for t in handler.turns] == ["Action: get 1 stick"]
    learned = sum(handler.loss_mask)
    assert learned == len(chat.action("Action: get 1 stick"))


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([("human", None), ("gpt", None)], "conversation x has no gpt turn with loss"),
        ([("human", None), ("gpt", True), ("gpt", True)], "turn 2 is from gpt, expected human"),
        (
            [("human", None), ("gpt", True), ("human", None), ("human", None), ("gpt", True)],
            "turn 3 is from human, expected gpt",
        ),
    ],
)
def test_conversations_that_cannot_be_learned_from_are_named(chat, turns, message):
    record = {
        "item_id": "x",
        "conversations": [{"from": who, "loss": loss, "value": "go"} for who, loss in turns],
    }
    with pytest.raises(ValueError, match=message):
        warmstart.from_agenttraj(chat, record)


def test_demonstrations_over_the_token_limit_are_left_out_and_counted(chat, records, capsys):
    lengths = sorted(len(warmstart.from_agenttraj(chat, r).input_ids) for r in records)
    settings = replace(SETTINGS, max_trajectory_tokens=lengths[5])
    batch = warmstart.encode(chat, records, settings, pad_id=0)
    assert sorted(batch.lengths.tolist()) == [n for n in lengths if n <= lengths[5]]
    out = f"{len(records) - len(batch)} of {len(records)} demonstrations have more than"
    assert out in capsys.readouterr().out
    with pytest.raises(ValueError, match="--max-trajectory-tokens 3 leaves no demonstration"):
        warmstart.encode(chat, records, replace(SETTINGS, max_trajectory_tokens=3), pad_id=0)


# --- Training ------------------------------------------------------------------------------------


def test_the_loss_falls_and_its_first_value_is_the_mean_over_action_tokens(tiny, chat, records):
    batch = warmstart.encode(chat, records, SETTINGS, pad_id=0)
    policy = load_policy(tiny)
    settings = replace(SETTINGS, learning_rate=3e-3, batch_size=8, max_tokens=600)
    with fresh_process_state(), torch.no_grad():
        log_probs, _ = policy(batch.input_ids, batch.loss_mask)
        expected = -float(log_probs.sum() / batch.loss_mask.sum())
    seen = []
    with fresh_process_state():
        losses = warmstart.imitate(
            learner_of(policy), batch, settings, steps=8, on_step=seen.append
        )
    assert seen == losses
    assert len(losses) == 8
    assert losses[0] == pytest.approx(expected, rel=0.01)  # bfloat16, and cut into micro-batches
    assert losses[-1] < losses[0] - 1.5  # from ln 1024 = 6.9 nats


def learner_of(policy):
    accelerator = distributed.make_accelerator("bf16")
    learning = [p for p in policy.parameters() if p.requires_grad]
    return Learner(accelerator, policy, torch.optim.AdamW(learning, lr=1.0, weight_decay=0.0))


def test_the_loop_is_that_of_plain_gradient_descent_written_out(tiny, chat, records):
    """Two steps against the literal loop: one forward over the rows, a mean over action tokens,
    clip, a rate that falls to a tenth."""
    batch = warmstart.encode(chat, records, SETTINGS, pad_id=0)
    settings = replace(SETTINGS, batch_size=3, learning_rate=1e-2)
    ours, plain = load_policy(tiny), load_policy(tiny)
    start = torch.cat([p.detach().flatten() for p in plain.parameters()])
    with fresh_process_state():
        losses = warmstart.imitate(learner_of(ours), batch, settings, steps=2)
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(settings.seed))
    for step, loss_of_step in enumerate(losses):
        part = batch.rows(order[3 * step : 3 * step + 3].tolist())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_probs, _ = plain(part.input_ids, part.loss_mask)
        loss = -(log_probs * part.loss_mask).sum() / part.loss_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - 0.9 * step / 2)
        optimizer.step()
        optimizer.zero_grad()
        assert loss_of_step == pytest.approx(float(loss.detach()), rel=0.02)
    # Adam turns a gradient near 0 into a whole step, one way or the other by rounding.
    ours, plain = (torch.cat([p.flatten() for p in m.parameters()]) - start for m in (ours, plain))
    assert torch.cosine_similarity(ours, plain, dim=0) > 0.98


def test_what_demonstrations_have_in_common_is_computed_once_and_nothing_else_changes(
    tiny, chat, records, monkeypatch
):
    """The instructions: packed, they are read once a step, and the losses are the same."""
    batch = warmstart.encode(chat, records, SETTINGS, pad_id=0)
    policies = {share: load_policy(tiny, share) for share in (True, False)}
    seen = {True: 0, False: 0}
    forward = PolicyModel.forward

    def counting(self, input_ids, *arguments):
        seen[share] += input_ids.numel()
        return forward(self, input_ids, *arguments)

    monkeypatch.setattr(PolicyModel, "forward", counting)
    losses = {}
    for share in (True, False):
        settings = replace(SETTINGS, share_prefix=share, batch_size=4, max_tokens=10_000)
        with fresh_process_state():
            accelerator = distributed.make_accelerator("no")
            policy = policies[share]
            optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
            learner = Learner(accelerator, policy, optimizer)
            losses[share] = warmstart.imitate(learner, batch, settings, steps=3)
    assert losses[True] == pytest.approx(losses[False], abs=1e-3)
    assert seen[True] < 0.9 * seen[False]


def test_imitation_trains_adapters_and_leaves_the_base_alone(tiny, chat, records):
    batch = warmstart.encode(chat, records, SETTINGS, pad_id=0)
    policy = load_policy(tiny)
    add_lora(policy.lm, rank=4, seed=0)
    base = {n: p.clone() for n, p in policy.named_parameters() if not p.requires_grad}
    settings = replace(SETTINGS, learning_rate=2e-2)
    with fresh_process_state():
        losses = warmstart.imitate(learner_of(policy), batch, settings, steps=6)
    assert losses[-1] < losses[0] - 0.3
    assert all(torch.equal(p, base[n]) for n, p in policy.named_parameters() if n in base)


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """A cache of its own, and a list of what was trained instead of training."""
    calls = []

    def train_to(folder, model, records, settings, accelerator):
        calls.append((model, settings))
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warmstart, "train_to", train_to)
    return calls


def warm(model, tasks, **changes):
    settings = replace(SETTINGS, **changes)
    return warm_on(model, tasks, settings, accelerator=None)


def warm_on(model, tasks, settings, accelerator):
    count, seed = settings.num_demonstrations, settings.seed

    def show():
        return warmstart.demonstrations("textcraft", tasks, count, seed)

    return warmstart.warm_start(model, "textcraft", show, settings, accelerator)


def test_a_warm_start_is_trained_once_for_each_model_data_and_settings(trained):
    tasks = TASKS[:4]
    first = warm("tiny", tasks)
    assert warm("tiny", tasks) == first
    assert len(trained) == 1
    others = {
        warm("smollm2-135m", tasks),
        warm("tiny", TASKS[4:8]),
        warm("tiny", tasks, epochs=1),
        warm("tiny", tasks, seed=1),
    }
    assert len(others | {first}) == len(trained) == 5


def test_a_warm_start_that_fails_leaves_nothing_in_the_cache(trained, monkeypatch, tmp_path):
    def fail(folder, **_):
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(warmstart, "train_to", fail)
    with pytest.raises(OSError, match="No space"):
        warm("tiny", TASKS[:4])
    assert [p for p in (tmp_path / "cache/warm_starts").rglob("*") if p.is_file()] == []


# --- Warm starts that come with the project -------------------------------------------------------


@pytest.fixture
def shipping(monkeypatch, tmp_path):
    """Adapters of `tiny` for four demonstrations, as if they came with the project."""
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(warmstart, "STARTS", tmp_path / "starts")
    settings = replace(SETTINGS, num_demonstrations=4, epochs=8, lora_rank=2, learning_rate=2e-2)
    records = warmstart.demonstrations("textcraft", TASKS[:4], 4, 0)
    with fresh_process_state():
        accelerator = distributed.make_accelerator("no")
        warmstart.train_to(tmp_path / "trained", "tiny", records, settings, accelerator)
    (tmp_path / "starts").mkdir()
    folder = (tmp_path / "trained/adapter").rename(tmp_path / "starts/tiny-textcraft")
    (tmp_path / "trained/sft.json").rename(folder / "sft.json")
    return tmp_path / "trained"


def test_a_warm_start_that_comes_with_the_project_is_not_trained(shipping, monkeypatch, capsys):
    monkeypatch.setattr(warmstart, "train_to", None)
    with fresh_process_state():
        settings = warmstart.settings_for("tiny", "textcraft")
        accelerator = distributed.make_accelerator("no")
        folder = warm_on("tiny", TASKS[:4], settings, accelerator)
    assert "comes with the project" in capsys.readouterr().out
    unpacked, trained, base = (
        load_policy(path).lm.state_dict() for path in (folder, str(shipping), resolve_model("tiny"))
    )
    for name, weight in trained.items():  # both are rounded to bfloat16, the adapters before
        moved = (weight - base[name]).abs().max()
        assert (unpacked[name] - weight).abs().max() <= 0.02 * moved + 2**-8 * weight.abs().max()
    assert any((trained[name] - base[name]).abs().max() > 1e-3 for name in trained)


def test_other_data_settings_or_models_are_trained_on(shipping, trained):
    settings = warmstart.settings_for("tiny", "textcraft")
    assert settings.lora_rank == 2
    assert warmstart.settings_for("tiny", "babyai") == warmstart.SftSettings()
    for tasks, chosen in ((TASKS[4:8], settings), (TASKS[:4], replace(settings, seed=1))):
        warm_on("tiny", tasks, chosen, accelerator=None)
    assert len(trained) == 2


def test_the_default_run_finds_the_warm_start_that_comes_with_the_project(monkeypatch, tmp_path):
    """Its key is the texts of the demonstrations: a change of the world's words makes it stale."""
    found = []
    monkeypatch.setattr(warmstart, "resolve_model", lambda name: name)
    monkeypatch.setattr(warmstart, "build", lambda folder, make: found.append(make))
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    config = complete(options("textcraft", model="smollm2-135m"))
    warmstart.start_model(config, accelerator=None)
    assert found[0].func is warmstart.unpack, "make recipes/starts anew, see its README"


# --- The command line ----------------------------------------------------------------------------


def run(argv):
    with fresh_process_state():
        try:
            return warmstart.command_line([str(word) for word in argv])
        except SystemExit as stop:
            return stop.code


def test_the_command_writes_a_checkpoint_with_its_data_and_losses(tmp_path, capsys, chat, records):
    data, out = tmp_path / "data.json", tmp_path / "warm"
    data.write_text(json.dumps(records[:4]))
    argv = ["--model", "tiny", "--data", data, "--out", out, "--epochs", 1, "--batch-size", 2]
    assert run(argv) == 0
    assert f"saved {out}" in capsys.readouterr().out
    assert json.loads((out / "sft_data.json").read_text()) == records[:4]
    report = json.loads((out / "sft.json").read_text())
    assert len(report["losses"]) == 2
    assert report["settings"]["batch_size"] == 2
    load_policy(str(out))
    assert ChatTemplate(load_tokenizer(str(out))).end_of_turn == chat.end_of_turn


def content(text):
    def write(tmp_path):
        (tmp_path / "data.json").write_text(text)
        return ["--data", tmp_path / "data.json"]

    return write


def conversation(*speakers):
    turns = [{"from": who, "loss": who == "gpt", "value": "go"} for who in speakers]
    return content(json.dumps([{"item_id": "x", "conversations": turns}]))


MISUSE = {
    "unknown flag": (lambda _: ["--no-such-flag", "1"], "no-such-flag"),
    "unknown environment": (lambda _: ["--env", "nosuch"], "unknown environment 'nosuch'"),
    "unknown sub-task": (lambda _: ["--subtasks", "depth 9"], "unknown sub-task 'depth 9'"),
    "unknown model": (lambda p: ["--model", p / "nosuch", *content("[]")(p)], "nosuch"),
    "no such data": (lambda p: ["--data", p / "nosuch.json"], "nosuch.json"),
    "data that is no JSON": (content("{"), ""),
    "data without conversations": (content('[{"item_id": "textcraft_0"}]'), "conversations"),
    "data of one object": (content('{"item_id": "textcraft_0"}'), ""),
    "an unknown speaker": (conversation("tool", "human", "gpt"), "conversation x"),
    "an action before any observation": (conversation("gpt", "human"), "conversation x"),
    "no data": (content("[]"), ""),
    "no demonstrations": (lambda _: ["--num-demonstrations", "0"], ""),
    "no epochs": (lambda _: ["--epochs", "0"], "--epochs"),
    "empty batches": (lambda _: ["--batch-size", "0"], "--batch-size"),
    "slips in what is shown": (
        lambda _: ["--data", "x", "--slips", "0.3", "--tasks", "y"],
        "--slips, --tasks has no effect here: --data says what is shown",
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_line_and_leaves_nothing(tmp_path, capsys, case):
    arguments, message = MISUSE[case]
    argv, words = ["--model", "tiny", "--out", tmp_path / "out"], arguments(tmp_path)
    argv += [] if "--data" in words else ["--num-demonstrations", "2"]
    assert run([*argv, *words]) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "it/s" not in line and line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("warmstart.py: ")
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert run(["--model", "tiny", "--out", tmp_path / "out"]) == 2
    assert "exists; choose another folder" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
