"""Command lines: one dataclass is one command line, one mistake is one line on stderr.

Every field of a config dataclass is a flag, its docstring the help text (tyro reads the words,
runtime/usage.py explains them). Misuse exits with 2 and a line that says what was got and what to
do; a caller in a script can show it, a person can act on it.

Read next: `config.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from config import (
    Config,
    Misuse,
    Options,
    RunConfig,
    complete,
    preset_of,
    refusing,
    with_preset,
)
from run.errors import complain
from runtime import usage
from runtime.checks import check, check_given, check_here, remarks
from runtime.prompts import with_prompt
from runtime.saved import as_kept, check_goes_on, check_unchanged, options_from, saved_config

ConfigType = TypeVar("ConfigType")


def parse_command_line(
    config_class: type[ConfigType],
    argv: Sequence[str] | None,
    prog: str,
    default: ConfigType | None = None,
    description: str | None = None,
) -> ConfigType:
    """A config dataclass from the command line.

    Args:
        argv: arguments without the program's name; None takes those of this process.
        default: values of the flags that are not given; None: the dataclass's own.
    Raises:
        SystemExit: code 2 after one line on stderr (tyro by itself explains a mistake in a box of
            several lines), code 0 after --help.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(words):
        about = description or (config_class.__doc__ or "").split("\n\n")[0]
        print(usage.help_text(config_class, prog, about, default))
        raise SystemExit(0)
    import tyro

    box = io.StringIO()
    options: dict[str, Any] = {"default": default} if default is not None else {}
    try:
        with contextlib.redirect_stderr(box):
            found = tyro.cli(config_class, prog=prog, args=words, **options)
            if usage.has_empty_list(config_class, words):  # which tyro takes
                raise SystemExit
            return found
    except SystemExit:
        text = box.getvalue().split("│ ──")[0]  # above the rule; the first line is a title
        said = " ".join(line.strip("│╭╮╰╯─ ") for line in text.splitlines()[1:])
        problem = usage.problem(config_class, words) or said or "unusable arguments"
        complain(prog, f"{problem}; see --help")
        raise SystemExit(2) from None


def training_options(
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    kind: type[Options] = Config,  # type: ignore[assignment]
    check_own: Callable[[Options], None] = lambda config: None,
) -> Options:
    """The options of train.py, or of another method's program, complete and checked. No torch is
    needed for that.

    Args:
        kind: the method's options.
        check_own: raises Misuse for what only this method can be asked.

    Raises:
        Misuse: one line that says what to do.
        SystemExit: what tyro ends with, see `parse_command_line`.
    """
    words = joined(sys.argv[1:] if argv is None else argv)
    given = usage.named(kind, words)
    config = parse_command_line(kind, words, prog, starting_from(words, kind), description)
    if config.resume:  # what is not given again is what the run was started with
        saved = saved_config(config.run_dir, kind)
        config = as_kept(parse_command_line(kind, words, prog, saved), given)
        check_unchanged(config, saved)
        check_goes_on(config)
        given.clear()
    asked = config = with_prompt(config)
    with refusing():
        config = complete(config)
    check(config)
    check_given(asked, given)
    check_own(config)
    check_here(config)
    return config if config.resume else as_kept(config)


def joined(argv: Sequence[str]) -> list[str]:
    """The words with several worlds as one.

    >>> joined(["--env", "textcraft", "babyai", "--resume"])
    ['--env', 'textcraft+babyai', '--resume']
    """
    words = list[str]()
    for name, values in usage.words_of(argv):
        several = name == "--env" and len(values) > 1
        words += ([name] if name else []) + (["+".join(values)] if several else values)
    return words


def say_remarks(config: RunConfig, argv: Sequence[str] | None) -> None:
    """Print what is allowed and perhaps not meant; of several processes the first does."""
    if int(os.environ.get("RANK", 0)) == 0:
        words = joined(sys.argv[1:] if argv is None else argv)
        for line in remarks(config, usage.named(type(config), words)):
            print(f"note: {line}", flush=True)


# What decides how many steps an epoch takes.
COUNTED = {"data", "epochs", "mini_batch_size", "num_demonstrations", "hold_out", "min_return"}
COUNTED |= {"env", "tasks", "split", "subtasks"}


def starting_from(
    argv: Sequence[str],
    kind: type[Options] = Config,  # type: ignore[assignment]
) -> Options:
    """The values of what a command line does not name: those of --config, then of a preset."""
    given = {name: words[0] for name, words in usage.named(kind, argv).items() if words}
    file, saved = given.get("config"), dict[str, Any]()
    if file is not None:
        if "preset" in given:
            raise Misuse("--config and --preset both say where to start from; give one")
        saved = options_from(file, kind) | {"config": file}
        if "steps" in kind.may_be_zero and COUNTED & given.keys():
            saved.pop("steps", None)  # as many as the other run's epochs took
    asked = saved | given
    env, model = asked.get("env", Config.env), asked.get("model")
    with refusing():
        return replace(with_preset(asked.get("preset") or preset_of(model), env, kind), **saved)
