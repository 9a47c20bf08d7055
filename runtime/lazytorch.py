"""torch, imported when it is first used.

Importing torch takes seconds, and a wrong option should be refused before that. config.py reads the
options from the files that they belong to (ESTIMATORS in advantages.py, Objective in losses.py), so
these take their torch from here: a stand-in that becomes the module when something asks it for an
attribute. Everything else imports torch as usual.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

__all__ = ["no_grad", "torch"]

P = ParamSpec("P")
R = TypeVar("R")


class _Promise:
    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("torch"), name)
        setattr(self, name, value)  # found at once from now on
        return value


if TYPE_CHECKING:
    import torch
else:
    torch = _Promise()


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """`@torch.no_grad()`, without asking torch for it at the time of the import."""

    @wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            return function(*args, **kwargs)

    return quiet
