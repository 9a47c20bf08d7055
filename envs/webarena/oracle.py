"""Plays a plan from whatever page the browser shows now."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs.webarena.tree import Page


@dataclass(frozen=True)
class Step:
    """One step of a plan: where it applies and what to do there.

    The oracle plays the LAST step of the plan whose `when` holds and whose element is on the page
    (it scrolls to an element outside the viewport, and clears a field before it types). If no step
    applies, it opens the task's start URL, so the first step should apply there.

    acts: ("click", role, name) | ("type", role, name, text, "0" or "1" for Enter)
        | ("select", role, name, option) | ("press", key) | ("goto", public URL) | ("stop", answer)
    """

    goal: str  # the thought: "I open the first order."
    when: Callable[[Page], bool]  # see at(), shows(), holds(), both(), anywhere
    act: tuple[str, ...]


Plan = Sequence[Step]


def anywhere(page: Page) -> bool:
    return True


def at(path: str, **query: str) -> Callable[[Page], bool]:
    """The page's host and path are `path` ("onestopmarket.com/cart"), and each of these parameters
    of the query has this value; other parameters do not matter."""
    return lambda page: page.path == path and query.items() <= page.query.items()


def shows(role: str, name: str) -> Callable[[Page], bool]:
    """The page has this node, maybe outside the viewport."""
    return lambda page: page.find(role, name) is not None


def holds(role: str, name: str, value: str) -> Callable[[Page], bool]:
    """This field holds this text, or this combobox shows this option."""
    return lambda page: (node := page.find(role, name)) is not None and node.value == value


def checked(role: str, name: str) -> Callable[[Page], bool]:
    """This checkbox or radio button is checked."""
    return lambda page: (node := page.find(role, name)) is not None and node.is_checked


def both(*conditions: Callable[[Page], bool]) -> Callable[[Page], bool]:
    """All of these hold."""
    return lambda page: all(condition(page) for condition in conditions)


def next_move(page: Page, plan: Plan, start_url: str, previous: str) -> tuple[str, str]:
    """A thought and the next action of the plan, or the way back to its start.

    Args:
        start_url: the task's, as the policy sees it.
        previous: the action that was played last; "" at the start.
    """
    raise NotImplementedError
