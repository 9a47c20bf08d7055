"""What a policy writes besides actions: a plan before the first, a reflection after a failure.

Every turn of the policy is sampled in the same way; its `kind` says where it goes. An *act* goes to
the environment, which answers it. A plan and a reflection go nowhere: their texts stay in the
sequence, where all later turns see them, and the policy is told to go on.

    plain      act act act ...
    plan       plan act act act ...
    reflect    act act act (failed) reflect act act act ...     the task starts again from its reset

All sampled tokens have loss_mask 1, also those of plans and reflections: the return of the episode
is their only teacher. All that is written here has loss_mask 0.

An attempt ends with the episode, or after `max_rounds` acts. A second attempt is not paid again for
progress that the first one made, so an act earns only what exceeds the best attempt before:

    r = max(0, score of this attempt after the act - best score of all earlier acts)

The rewards of a trajectory then still sum to 0..1.

The rollout (rollout.py) and the evaluation over a chat server (sampling/chatapi.py) call the same
two methods: `opening` for the first text, `next_text` after each turn of the policy.

Sources: Plan-and-Solve (https://arxiv.org/abs/2305.04091); Reflexion, which does not train
(https://arxiv.org/abs/2303.11366). Read next: evaluate.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envclient import EnvClient, StepResult
from trajectory import Trajectory, Turn

Name = Literal["plain", "plan", "reflect"]
PLAN = "First write a short plan of the steps to take. Do not act yet."
ACT = "Now act, one turn after the other."
REFLECT = "This attempt has failed. Write in a sentence or two why, and what to do instead."
AGAIN = "The task starts again."


@dataclass(frozen=True)
class Agent:
    """Which turns a policy has, and what it reads between them.

    Args:
        attempts: of `reflect`, at the same task.
    """

    name: Name = "plain"
    attempts: int = 1

    def opening(self, trajectory: Trajectory, observation: str) -> str:
        """Begin a trajectory; returns the first text that the policy reads."""
        if self.name == "plan":
            trajectory.next_kind = "plan"
        return self.first_text(observation)

    def first_text(self, observation: str) -> str:
        """The first observation, and for `plan` the request for a plan."""
        return f"{observation}\n{PLAN}" if self.name == "plan" else observation

    def next_text(
        self, trajectory: Trajectory, turn: Turn, client: EnvClient, task_index: int
    ) -> str | None:
        """Send the policy's turn where it belongs. Returns the text that it reads next, or None if
        the trajectory has ended. Raises EnvError."""
        t = trajectory
        if turn.kind != "act":
            t.next_kind = "act"
            turn.observation_text = ACT
            if turn.kind == "reflect":
                turn.observation_text = f"{AGAIN}\n{client.reset(task_index, t.seed)}"
            return turn.observation_text
        best = t.total_return
        result = client.step(turn.action_text)
        is_running = take_result(t, turn, result)
        if self.attempts > 1:
            turn.reward = max(0.0, client.score - best)
        num_reflections = sum(turn.kind == "reflect" for turn in t.turns)
        if not is_running and not t.success and num_reflections + 1 < self.attempts:
            t.resume("reflect")
            turn.observation_text += f"\n{REFLECT}"
            is_running = True
        return turn.observation_text if is_running else None


PLAIN = Agent()


def make(name: Name, attempts: int) -> Agent:
    """The agent with this name; only `reflect` has several attempts."""
    return Agent(name, attempts if name == "reflect" else 1)


def take_result(trajectory: Trajectory, turn: Turn, result: StepResult) -> bool:
    """Record the environment's answer to an act. End the trajectory if the episode is over or the
    turn limit is reached; returns whether the trajectory continues."""
    turn.observation_text, turn.reward = result.observation, float(result.reward)
    turn.parse_error = result.info.get("parse_error")
    if (anchor := result.info.get("anchor")) is not None:  # from a server
        turn.anchor = str(anchor)
    elif result.is_refusal or result.info.get("failed"):  # the state stays the same
        before = trajectory.turns[:-1]
        turn.anchor = before[-1].state_after if before else ""
    trajectory.success = success = bool(result.info.get("success"))
    if result.terminated:
        trajectory.stop("success" if success else "failure", success)
    elif result.truncated:
        trajectory.stop("env_limit", success)
    elif trajectory.num_acts >= trajectory.max_rounds:
        trajectory.stop("max_rounds", success)
    return trajectory.stop_reason is None
