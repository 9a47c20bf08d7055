"""Plays a plan from whatever page the browser shows now.

A plan says for each step on which pages it applies and what to do there, by the roles and names of
the accessibility tree. The oracle looks only at the current page, as the policy does. So it does
not matter how the page was reached: after a wrong move it plays the step that applies to the wrong
page, or goes back to the task's start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envs import OracleLost
from envs.webarena.actions import Action
from envs.webarena.tree import HEIGHT, Node, Page


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


def both(*conditions: Callable[[Page], bool]) -> Callable[[Page], bool]:
    return lambda page: all(condition(page) for condition in conditions)


def next_move(page: Page, plan: Sequence[Step], start_url: str, previous: str) -> tuple[str, str]:
    """A thought and the next action of the plan, or the way back to its start. Raises OracleLost if
    the start does not help.

    Args:
        start_url: the task's, as the policy sees it.
        previous: the action that was played last; "" at the start.
    """
    for step in reversed(plan):
        if step.when(page) and (action := _action(page, step.act, previous)):
            return step.goal, str(action)
    back = str(Action("goto", text=start_url))
    if previous == back:
        raise OracleLost("no step of the plan applies to the page on which the task starts")
    return "This page does not help, so I go back to the start.", back


def _action(page: Page, act: tuple[str, ...], previous: str) -> Action | None:
    """What to do for a step now; None if its element is not on the page."""
    kind, *fields = act
    if kind in ("press", "goto", "stop"):
        return Action(kind, text=fields[0])
    role, name, *rest = fields
    node = page.find(role, name)
    if node is None or not node.element_id:
        return _scroll_to(node)
    if kind == "click":
        return Action("click", node.element_id)
    if kind == "select":
        return Action("select", node.element_id, rest[0])
    text, enter = rest
    if not node.value:
        return Action("type", node.element_id, text, enter == "1")
    if not node.states.get("focused"):
        return Action("click", node.element_id)
    if node.value == text:
        return Action("press", text="Enter") if enter == "1" else None
    # A click in a field removes the selection, so this takes two actions.
    clear = str(Action("press", text="Control+a"))
    return Action("press", text="Backspace" if previous == clear else "Control+a")


def _scroll_to(node: Node | None) -> Action | None:
    """The action that brings a node closer; None if it has no box or is inside the viewport."""
    if node is None or not node.box[3]:
        return None
    _, top, _, height = node.box
    if top >= HEIGHT or top + height <= 0:
        return Action("scroll", text="down" if top > 0 else "up")
    if top < 0 or top + height > HEIGHT:  # cut by the edge; these keys move by less than a screen
        return Action("press", text="PageUp" if top < 0 else "PageDown")
    return None
