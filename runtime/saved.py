"""A run's options as it keeps them, and read back from there: for `--resume` and `--config`.

A run may go on from another folder, and must find there what it began with. So what an option names
is kept where the folder does not matter: files and folders by their whole path, a prompt as its
text (runtime/prompts.py).

Read first: `config.py`, the options.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from config import (
    SMALL_MODELS,
    Config,
    Misuse,
    Options,
    RunConfig,
    flag,
    refusing,
    with_one_horizon,
)
from envs import id_lists, name_of_list
from runtime.prompts import with_prompt

# How far, where and how much at a time: what a resumed run may change.
CHANGEABLE = {
    *("steps", "learning_rate_decay_steps", "env_addr", "run_dir", "resume", "save_every"),
    *("keep_last", "record_state"),
    *("engine_url", "engine_devices", "on_collapse", "stop_at", "log_to"),
    *("max_tokens_per_micro_batch", "gradient_checkpointing", "precision"),
}
LISTS_OF_FILES = ("data", "pairs", "expert", "experience")  # of methods that learn from them
NAMES_FILES = ("tasks", "eval_tasks", "model", "warm_start", "prompt", *LISTS_OF_FILES)
OF_ONE_RUN = {"config", "run_dir", "resume"}  # what another run does not take over


def as_kept(config: Options, names: Collection[str] = NAMES_FILES) -> Options:
    """The options with what they name kept for other folders; a second time changes nothing.

    Args:
        names: the options to do so with; others stay as they are.
    Raises:
        Misuse: there is no such id list or prompt.
    """
    changes: dict[str, Any] = {}
    with refusing():
        for name in {"tasks", "eval_tasks"} & set(names):
            if (file := getattr(config, name)) is not None:
                changes[name] = name_of_list(config.env, file)
    for name in {"model", "warm_start"} & set(names):
        folder = getattr(config, name)
        if folder not in (*SMALL_MODELS, "auto", "never") and Path(folder).expanduser().is_dir():
            # Where a link leads now: checkpoints/best of a run that goes on will be another.
            changes[name] = os.path.realpath(Path(folder).expanduser())
    for name in {*LISTS_OF_FILES} & set(names):
        if given := getattr(config, name, ()):
            changes[name] = tuple(os.path.abspath(Path(each).expanduser()) for each in given)
    config = replace(config, **changes)
    return with_prompt(config) if "prompt" in names else config


def saved_config(
    run_dir: str | None,
    kind: type[Options] = Config,  # type: ignore[assignment]
) -> Options:
    """The options that the run in `run_dir` was started with.

    Args:
        kind: the method's options; RunConfig: those that all methods share, of a run of any.
    Raises:
        Misuse: no --run-dir was given, it holds no run, or another method's.
    """
    if not run_dir:
        raise Misuse("--resume needs --run-dir, the run to go on with")
    path = Path(run_dir) / "config.json"
    if not path.exists():
        raise Misuse(f"--run-dir {run_dir} holds no run to resume")
    try:
        method, found = _options_in(path.read_text(encoding="utf-8"))
        if kind is RunConfig:
            found = {n: v for n, v in found.items() if n in RunConfig.__dataclass_fields__}
        elif method != kind.method:
            raise Misuse(f"--run-dir {run_dir} holds a run of {method}, not of {kind.program}")
        values = _checked(found, str(path), kind)
    except (OSError, ValueError) as error:
        if isinstance(error, Misuse):
            raise
        raise Misuse(
            f"{path} is not the config.json of a run ({error}); put its copy back, or start anew"
        ) from None
    config = kind(**values)
    for name in {"tasks", "eval_tasks"} & values.keys():  # files were kept by their whole path
        kept = getattr(config, name)
        if kept and kept in id_lists(config.env) and Path(kept).exists():
            raise Misuse(
                f"{path} means {config.env}'s own list by {flag(name)} {kept}, and in this folder "
                "lies a file of that name, which would be read: resume from another folder"
            )
    return replace(config, run_dir=run_dir, resume=True)


def options_from(file: str, kind: type[RunConfig] = Config) -> dict[str, Any]:
    """The options in a run's config.json, or in a JSON object of options, for a new run. Of another
    method's run those that both have and `kind` leaves to others.

    Raises:
        Misuse: it cannot be read, or holds what no option of this version can be.
    """
    try:
        method, found = _options_in(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise Misuse(f"--config {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise Misuse(f"--config {file} is not a run's config.json ({error})") from error
    if method != kind.method:
        own = RunConfig.__dataclass_fields__.keys() - kind.keeps
        found = {name: value for name, value in found.items() if name in own}
        found = with_one_horizon(found, kind)
    values = _checked(found, f"--config {file}", kind)
    return {name: value for name, value in values.items() if name not in OF_ONE_RUN}


def _options_in(text: str) -> tuple[str, dict[str, Any]]:
    """The method and its options; ValueError if `text` is not JSON that holds any."""
    content = json.loads(text)
    options = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(options, dict) or not options:
        raise ValueError("it holds no options")
    return str(content.get("method", Config.method)), options


def _checked(options: dict[str, Any], where: str, kind: type[RunConfig]) -> dict[str, Any]:
    """The options with the types that they must have; Misuse where they are others."""
    import pydantic

    unknown = sorted(options.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise Misuse(
            f"{where} holds what is no option of this version: {', '.join(unknown)}; leave it "
            "out, or use the version that wrote it"
        )
    try:
        text = json.dumps(options)
        config = pydantic.TypeAdapter(kind).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise Misuse(f"{where}: {first['loc'][0]} {first['input']!r}: {first['msg']}") from None
    return {name: getattr(config, name) for name in options}


def check_unchanged(given: RunConfig, saved: RunConfig) -> None:
    """Raise Misuse for an option given on resume that the run was not started with."""
    if other := " ".join(map(flag, changed(given, saved))):
        raise Misuse(f"--resume keeps the run's own options; leave out {other}, or start a new run")


def changed(given: RunConfig, saved: RunConfig) -> list[str]:
    """Options that a run must not change and that these have otherwise than the saved ones."""
    return [
        f.name
        for f in fields(given)
        if (f.name not in CHANGEABLE or f.name in given.fixed)
        and getattr(given, f.name) != getattr(saved, f.name)
    ]


def check_goes_on(config: RunConfig) -> None:
    """Raise Misuse for a --steps that a resumed run has left behind."""
    names = [path.name for path in Path(config.run_dir or "").glob("checkpoints/step_*")]
    steps = [int(m.group(1)) for name in names if (m := re.fullmatch(r"step_(\d+)", name))]
    done = max(steps, default=0)
    if config.steps < done:
        raise Misuse(
            f"--steps {config.steps}: {done} steps of this run are done; give {done} or more"
        )


def files_teach(method: str, options: Mapping[str, Any]) -> bool:
    """Whether a run learns from files alone; AgentEvol's begin a set that it then plays for."""
    return method != "agentevol" and any(options.get(name) for name in LISTS_OF_FILES)
