"""Plays a plan from whatever page the browser shows now.

A plan says for each step on which pages it applies and what to do there, by the roles and names of
the accessibility tree. The oracle looks only at the current page, as the policy does. So it does
not matter how the page was reached: after a wrong move it plays the step that applies to the wrong
page, or goes back to the task's start.
"""

from collections.abc import Sequence
from typing import NamedTuple

from envs import OracleLost
from envs.webarena.actions import Action
from envs.webarena.tree import HEIGHT, Node, Page


class Step(NamedTuple):
    """One step of a plan: where it applies and what to do there.

    The oracle plays the LAST step of the plan whose place is the current page and whose element is
    on it. It scrolls to an element outside the viewport, and clears a field before it types. A
    field that holds the text already needs no step, unless the step also presses Enter.
    """

    goal: str  # the thought: "I click Orders."
    place: str  # public URL: host, path and these parameters of the query; "": any page
    verb: str  # click, fill, type (fill and press Enter), choose, goto, stop
    role: str = ""  # of the element; a step without an element has none
    name: str = ""
    text: str = ""  # to enter, to choose; the address of goto, the answer of stop

    def applies(self, page: Page) -> bool:
        return page.is_at(self.place or page.url)


def next_move(page: Page, plan: Sequence[Step], start_url: str, previous: str) -> tuple[str, str]:
    """A thought and the next action of the plan, or the way back to its start. Raises OracleLost if
    the start does not help.

    Args:
        start_url: the task's, as the policy sees it.
        previous: the action that was played last; "" at the start.
    """
    for step in reversed(plan):
        if step.applies(page) and (action := _action(page, step, previous)):
            return step.goal, str(action)
    back = str(Action("goto", text=start_url))
    if previous == back:
        raise OracleLost("no step of the plan applies to the page on which the task starts")
    return "This page does not help, so I go back to the start.", back


def _action(page: Page, step: Step, previous: str) -> Action | None:
    """What to do for a step now; None if there is nothing to do on this page."""
    node = page.find(step.role, step.name)
    if step.role and not node:
        return None
    if step.verb in ("goto", "stop"):
        return Action(step.verb, text=step.text)
    if not node or (step.verb in ("fill", "choose") and node.value == step.text):
        return None
    if not node.element_id:
        return _scroll_to(node)
    if step.verb == "click":
        return Action("click", node.element_id)
    if step.verb == "choose":
        return Action("select", node.element_id, step.text)
    if not node.value:
        return Action("type", node.element_id, step.text, enter=step.verb == "type")
    if not node.states.get("focused"):
        return Action("click", node.element_id)
    if node.value == step.text:
        return Action("press", text="Enter")
    # A click in a field removes the selection, so this takes two actions.
    clear = str(Action("press", text="Control+a"))
    return Action("press", text="Backspace" if previous == clear else "Control+a")


def _scroll_to(node: Node) -> Action | None:
    """The action that brings a node closer; None if it has no box or is inside the viewport."""
    _, top, _, height = node.box
    if not height:
        return None
    if top >= HEIGHT or top + height <= 0:
        return Action("scroll", text="down" if top > 0 else "up")
    if top < 0 or top + height > HEIGHT:  # cut by the edge; these keys move by less than a screen
        return Action("press", text="PageUp" if top < 0 else "PageDown")
    return None
