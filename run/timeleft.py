"""How long a run still takes, told from the steps that it has made.

    left after step t = (T - t) · median(recent steps, evaluation left out)
                        + evaluations still due · median(evaluations)
                        + explorations still due · median(explorations)

A median, since single steps are slow for reasons of their own (a checkpoint, a neighbour's job) and
the first ones warm up; of recent steps, since the horizon grows. An evaluation that was never timed
takes as long as a rollout of as many episodes. Where only some steps play before they learn (the
first of an iteration, in dpo.py and agentevol.py), that exploration is no part of a step's time.

Fed with the rows of timings.jsonl: those that a resumed run finds there make it as wise as it was.

Read next: `run/progress.py`, which says it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

RECENT = 10  # steps


class TimeLeft:
    """
    An estimate in seconds.

    Args:
        steps: number of the last step.
        evaluated: numbers of the steps that an evaluation follows.
        eval_share: episodes of an evaluation over those of a rollout.
        exploring: numbers of the steps that a rollout precedes; empty: it is a part of every step.
    """

    def __init__(
        self,
        steps: int,
        evaluated: Sequence[int],
        eval_share: float = 0.0,
        exploring: Sequence[int] = (),
    ) -> None:
        self.steps, self.evaluated, self.eval_share = steps, evaluated, eval_share
        self.exploring = exploring
        self.step_s, self.rollout_s = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)
        self.eval_s = deque[float](maxlen=RECENT)

    def note(self, timings: Mapping[str, Any]) -> None:
        """A step's row of timings.jsonl, or an evaluation alone."""
        evaluation = timings.get("time/eval_s")
        if evaluation is not None:
            self.eval_s.append(evaluation)
        if timings.get("time/step_s") is not None:
            rollout = timings.get("time/rollout_s") or 0.0
            apart = rollout if self.exploring else 0.0
            self.step_s.append(timings["time/step_s"] - (evaluation or 0.0) - apart)
            # Another step's is that of a resumed run, which reads what was explored before.
            if not self.exploring or timings.get("step") in self.exploring:
                self.rollout_s.append(rollout)

    def after(self, step: int) -> float | None:
        """
        Seconds from the end of `step` to the end of the run; None while no step was timed.

        >>> left = TimeLeft(steps=60, evaluated=[20, 40, 60])
        >>> for seconds in (90, 40, 42, 41, 300):
        ...     left.note({"time/step_s": seconds})
        >>> left.note({"time/step_s": 142, "time/eval_s": 100})
        >>> left.after(50)
        520.0
        """
        if not self.step_s:
            return None
        rollout = median(self.rollout_s or [0.0])
        evaluation = median(self.eval_s) if self.eval_s else self.eval_share * rollout
        evaluations = sum(at > step for at in self.evaluated)
        explorations = sum(at > step for at in self.exploring)
        learning = (self.steps - step) * median(self.step_s)
        return learning + evaluations * evaluation + explorations * rollout
