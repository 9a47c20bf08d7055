"""The horizon: the maximum number of turns per episode, and how ScalingInter-RL raises it.

The paper's argument: with a long horizon an untrained agent explores badly, because most of its
long trajectories fail and the few rewards are spread over thousands of tokens. With a short one it
learns quickly and then stops improving, because the harder tasks need more turns. ScalingInter-RL
(arXiv 2509.08755) starts with few turns and allows more as training proceeds:

    τ_t ~ π_θ(τ | K_t ≤ h_t)              a trajectory of step t has K_t turns, at most h_t
    h_t = rounds[min(⌊(t − 1) / Δ⌋, n − 1)]       t = 1, 2, 3, …

with rounds = (h¹ ≤ h² ≤ … ≤ hⁿ) and Δ = steps_scaling_inter. For rounds 10 20 30 and Δ = 100:

    step      1 ……… 100   101 ……… 200   201 ………
    rounds        10            20           30          and 30 from then on

The cap is both a curriculum and an incentive to be brief. A trajectory that is cut keeps only the
reward it has earned so far, so in each group the samples that finish in time get the higher
returns. The agent learns to avoid detours while episodes are still cheap: an episode that never
finishes costs three times as much at 30 rounds as at 10.

Left: settings of the released scripts (all with GRPO). Right: success rates that the paper reports
for other schedules, all on deep search:

    environment   fixed horizon    rounds @ Δ             deep search (7B), % success
    TextCraft          30          10 20 30 @ 100             5  8 10 @ 100   38.3
    BabyAI             20           6 13 20 @ 100             5  8 10 @  75   37.8
    SciWorld           20          10 20 30 @ 100             5  8 10 @ 125   38.5
    SearchQA            5           5  8 10 @ 100             3  8 13 @ 100   36.8
    WebArena           15           8 12 15 @  80             8 10 12 @ 100   37.6
                                                              5 10 15 @ 100   39.1
                                                              5  7  9 @ 100   37.8

With the growing horizon instead of the fixed one, the paper's 7B model improves from 89 to 91 % on
TextCraft, from 92.2 to 96.7 % on BabyAI and from 50.5 to 57.0 % on SciWorld. The success rates on
the right are single runs on 400 questions, where differences of two points are noise.

The horizon depends only on the step number (`rounds_at`), and the only state is the number of
finished steps. A resumed run therefore has the same horizons as an uninterrupted one. Steps and
rounds are integers counted from 1.

Run:   python train.py --env textcraft --rounds-scheduler scaling_inter_stepwise \\
           --rounds 10 20 30 --steps-scaling-inter 100
Read next: rollout.py, which plays the episodes. Lesson: tutorials/04_horizon.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class RoundsScheduler(ABC):
    """Counts finished steps; a subclass defines how many rounds each step allows.

    `train.py` calls `rounds_at`. In your own loop:

    >>> scheduler = StepRoundsScheduler(steps_scaling_inter=2, rounds=[10, 20, 30])
    >>> horizons = []
    >>> for _ in range(6):
    ...     horizons.append(scheduler.get_rounds())  # cap for the coming step
    ...     scheduler.step()                         # the step is finished
    >>> horizons
    [10, 10, 20, 20, 30, 30]
    """

    def __init__(self) -> None:
        self.global_steps = 0  # finished steps; the next one has number global_steps + 1

    @abstractmethod
    def rounds_at(self, step: int) -> int:
        """Maximum number of turns in training step `step` (1, 2, ...); ValueError if step < 1."""

    def get_rounds(self) -> int:
        """Maximum number of turns in the coming step."""
        return self.rounds_at(self.global_steps + 1)

    def step(self) -> None:
        """Count one more finished training step."""
        self.global_steps += 1

    def set_global_steps(self, num_steps: int) -> None:
        """Set the number of finished steps when a run is resumed; ValueError if it is negative."""
        if num_steps < 0:
            raise ValueError(f"set_global_steps({num_steps!r}): expected an integer >= 0")
        self.global_steps = num_steps

    def state_dict(self) -> dict[str, int]:
        """The number of finished steps. The rounds are options of the run and are not saved."""
        return {"global_steps": self.global_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the step at which `state_dict()` was called."""
        self.set_global_steps(state["global_steps"])


class FixedRoundsScheduler(RoundsScheduler):
    """The same maximum number of turns at every step."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = _check_rounds([rounds])[0]

    def rounds_at(self, step: int) -> int:
        _check_step(step)
        return self.rounds


class StepRoundsScheduler(RoundsScheduler):
    """ScalingInter-RL: move to the next entry of `rounds` every `steps_scaling_inter` steps.

    >>> scheduler = StepRoundsScheduler(steps_scaling_inter=100, rounds=[10, 20, 30])
    >>> [scheduler.rounds_at(step) for step in (1, 100, 101, 200, 201, 5000)]
    [10, 10, 20, 20, 30, 30]
    >>> StepRoundsScheduler(100, [30, 20, 10], any_order=True).rounds_at(101)
    20

    Raises ValueError if `rounds` is empty, decreases (unless `any_order`) or has an entry below 1,
    or if `steps_scaling_inter` is below 1.
    """

    def __init__(
        self, steps_scaling_inter: int, rounds: Sequence[int], any_order: bool = False
    ) -> None:
        super().__init__()
        if steps_scaling_inter < 1:
            raise ValueError(
                f"--steps-scaling-inter {steps_scaling_inter} must be an integer >= 1: "
                "it is the number of training steps with the same horizon"
            )
        self.steps_scaling_inter = steps_scaling_inter  # Δ
        self.rounds = _check_rounds(rounds, any_order)  # h¹ ≤ h² ≤ … ≤ hⁿ

    def rounds_at(self, step: int) -> int:
        _check_step(step)
        phase = (step - 1) // self.steps_scaling_inter  # ⌊(t − 1) / Δ⌋
        return self.rounds[min(phase, len(self.rounds) - 1)]


def make_scheduler(kind: str, rounds: Sequence[int], steps_scaling_inter: int) -> RoundsScheduler:
    """The scheduler for `--rounds-scheduler KIND --rounds ... --steps-scaling-inter N`."""
    if kind != "fixed":
        return StepRoundsScheduler(steps_scaling_inter, rounds, any_order=kind == "stepwise")
    if len(_check_rounds(rounds)) > 1:
        flags = f"--rounds {' '.join(map(str, rounds))} with --rounds-scheduler fixed"
        raise ValueError(f"{flags}: give one number, or choose scaling_inter_stepwise")
    return FixedRoundsScheduler(rounds[0])


def _check_rounds(rounds: Sequence[int], any_order: bool = False) -> tuple[int, ...]:
    if not rounds:
        raise ValueError("--rounds is empty; give at least one number of turns")
    flags = f"--rounds {' '.join(map(str, rounds))}"
    if min(rounds) < 1:
        raise ValueError(f"{flags} must be integers >= 1: an episode needs at least one turn")
    if list(rounds) != sorted(rounds) and not any_order:
        reason = "ScalingInter-RL only widens the horizon (stepwise takes any order)"
        raise ValueError(f"{flags} must not decrease; {reason}")
    return tuple(rounds)


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"rounds_at({step!r}): training steps are integers counted from 1")
