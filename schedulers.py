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

The horizon depends only on the step number. A resumed run therefore has the same horizons as an
uninterrupted one. Steps and rounds are integers counted from 1.

Run:   python train.py --env textcraft --rounds-scheduler scaling_inter_stepwise \\
           --rounds 10 20 30 --steps-scaling-inter 100
Read next: rollout.py, which plays the episodes. Lesson: tutorials/04_horizon.md.
"""

from __future__ import annotations

from collections.abc import Sequence


def rounds_at(step: int, rounds: Sequence[int], steps_scaling_inter: int) -> int:
    """Maximum number of turns in training step `step` (1, 2, ...). A fixed horizon is a schedule
    with a single entry.

    >>> [rounds_at(step, [10, 20, 30], 100) for step in (1, 100, 101, 200, 201, 5000)]
    [10, 10, 20, 20, 30, 30]
    """
    phase = (step - 1) // steps_scaling_inter  # ⌊(t − 1) / Δ⌋
    return rounds[min(phase, len(rounds) - 1)]


def check_schedule(kind: str, rounds: Sequence[int]) -> None:
    """Raise ValueError if --rounds does not fit `--rounds-scheduler KIND`."""
    flags = f"--rounds {' '.join(map(str, rounds))}"
    if not rounds or min(rounds) < 1:
        raise ValueError(f"{flags}: give one or more integers >= 1; an episode needs a turn")
    if kind == "fixed" and len(rounds) > 1:
        hint = "give one number, or choose scaling_inter_stepwise"
        raise ValueError(f"{flags} with --rounds-scheduler fixed: {hint}")
    if kind != "fixed" and len(rounds) == 1:
        raise ValueError(f"{flags} never changes; give --rounds several values")
    if kind == "scaling_inter_stepwise" and list(rounds) != sorted(rounds):
        reason = "ScalingInter-RL only widens the horizon (stepwise takes any order)"
        raise ValueError(f"{flags} must not decrease; {reason}")
