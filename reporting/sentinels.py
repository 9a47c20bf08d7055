"""Collapse sentinels: notice that a run falls apart, and stop it before what it learned is lost.

Reinforcement learning feeds on its own output: a policy that gets worse samples worse data, learns
from it and gets worse still. Published runs of this kind of trainer collapsed after 100 to 300
steps: gradient norm 8e8, then NaN; entropy to 0; one token repeated to the limit; actions that no
longer parse. A sentinel is a rule that reads the log while it is written:

    level    value xₖ of step k against a limit: warn, or the stricter stop
    streak   cₖ = cₖ₋₁ + 1 if xₖ is at the level or beyond, else 0;   cₖ = cₖ₋₁ if xₖ is missing
    alarm    warn when its streak reaches `warn_after`: once, until a healthy step ends the streak
             stop at every step whose stop streak is `stop_after` or longer

So one noisy step never stops a run. Most limits are relative to the run's own past, since a healthy
entropy is 0.08 nats for one model and 1.5 for another. No rule here sees a policy that gives every
task the same fluent answer (arXiv 2604.06268); only success tells.

    >>> sentinels = Sentinels()
    >>> sentinels.check(40, {"eval/avg": 0.55})
    []
    >>> sentinels.check(60, {"eval/avg": 0.12})[0].severity, sentinels.check(70, {})
    ('warn', [])
    >>> sentinels.check(80, {"eval/avg": 0.15})[0].severity
    'stop'

Read next: run/session.py, which asks and acts.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True)
class Rule:
    """Where a sentinel warns and stops, after how many measured steps in a row, and what helps."""

    warn: float
    stop: float
    warn_after: int
    stop_after: int
    todo: str
    falls: bool = False  # small values are the bad ones
    min_fall: float = 0.0  # below the best; less is not an alarm

    def limits(self, times: float = 1.0, plus: float = 0.0) -> tuple[float, float]:
        """Both levels in the unit of what is measured."""
        return self.warn * times + plus, self.stop * times + plus

    def limits_below(self, best: float) -> tuple[float, float]:
        """Both levels as shares of the best; out of reach below 0 while the best is less than
        `min_fall`, since a policy that starts near 0 has not collapsed."""
        highest = best - self.min_fall
        return min(self.warn * best, highest), min(self.stop * best, highest)


# "Recorded" refers to runs of 60 steps (recipes/results): three healthy RL seeds, imitation, and a
# control with shuffled rewards that fell from 55 % to 12 %. Other numbers are a judgement.
RULES = {
    # Gradient norm, times the median of the last 20. Recorded: at most 2.3 (RL), 4.3 (imitation).
    # Clipping makes one spike harmless, so only three in a row stop.
    "grad_norm": Rule(10, 100, 1, 3, "lower --learning-rate or --max-grad-norm"),
    # Mini-batches skipped in a step. One is an accident; three steps in a row, the model is broken.
    "non_finite": Rule(
        1, 1, 1, 3, "lower --learning-rate; see whether sampler/log_prob_diff_max rose before"
    ),
    # Share of the entropy at the start, the median of the first 10. Recorded: 0.30 (RL); imitation
    # fell to 0.095 while held-out success rose: sharp is not yet collapsed.
    "entropy_floor": Rule(
        0.1, 0.01, 3, 5, "raise --entropy-coef or lower --learning-rate", falls=True
    ),
    # Nats above that start; e^x is how many times more tokens it wavers between. Recorded: +0.15.
    "entropy_explosion": Rule(
        1, 3, 3, 5, "lower --entropy-coef or --learning-rate, or raise --kl-loss-coef"
    ),
    # Nats per token that one step moved the policy. PPO implementations aim at 0.01 to 0.02; at 1
    # the clip no longer holds. One wild token can dominate this mean, hence three in a row.
    "approx_kl": Rule(0.1, 1, 1, 3, "lower --learning-rate, --ppo-epochs or --clip-ratio"),
    # Nats per token from the reference, to which at 10 the text is e^10 times less likely.
    "kl": Rule(1, 10, 3, 5, "raise --kl-loss-coef or lower --learning-rate"),
    # Share of sampled tokens in 4-grams that the same action had before. TextCraft's oracle: 0.01
    # in words, 0.25 in characters; a loop that fills the action: near 1 in any vocabulary.
    "repeated_tokens": Rule(
        0.3, 0.6, 2, 3, "read the trajectories; lower --learning-rate or raise --kl-loss-coef"
    ),
    # Actions that parse, as a share of the best median of 5.
    "valid_actions": Rule(
        *(0.7, 0.3, 2, 5),
        "read the trajectories; lower --learning-rate, or raise --kl-loss-coef, or "
        "--max-tokens-per-turn if actions are cut short",
        falls=True,
        min_fall=0.2,  # of 200 turns a step, or of 20: less may be noise
    ),
    # Share of the best evaluation. Recorded: at worst 0.88 (healthy); shuffled 0.88, 0.82, 0.32,
    # 0.22. Two evaluations in a row must agree.
    "held_out": Rule(
        *(0.75, 0.5, 1, 2, "lower --learning-rate; check that the rewards mean success"),
        falls=True,
        min_fall=0.1,  # half the 95 % interval of the recipes' 252 samples
    ),
    # Success rate of a step in which the samples of every group agree. A policy that solves all
    # tasks is healthy; one that never solved any has nothing to lose and is not stopped. At a true
    # success of 5 %, 64 samples all fail in 4 % of steps: never 5 in a row by chance.
    "no_signal": Rule(
        *(0.05, 0.05, 5, 20),
        "lower --learning-rate if it could do more before; if not, take easier --subtasks, a "
        "--warm-start or a larger --group-size",
        falls=True,
    ),
}
MIN_GRAD_NORM = 0.1  # lowest median; 10 times it is --max-grad-norm, below which nothing is cut
RECENT_GRAD_NORMS, NUM_GRAD_NORMS = 20, 5  # window of the median; no judgement on fewer than 5
FIRST_ENTROPIES = 10  # the start that later steps are compared with
RECENT_RATES = 5  # a median of 5: one lucky step does not set the standard


@dataclass(frozen=True)
class Alarm:
    """One sentinel's verdict on one step."""

    name: str  # a key of RULES
    value: float  # what was measured, in the metric's unit
    limit: float  # the level it reached, in the same unit
    severity: Literal["warn", "stop"]
    message: str  # one line: what was seen, against what, and what to do


Reading = tuple[str, float, tuple[float, float], str]  # rule, value, its two limits, in words


@dataclass
class Sentinels:
    """Give `check` the metrics of every training step, in order. The fields are the whole state: a
    run resumed with it raises exactly the alarms of an uninterrupted one."""

    warn_streaks: dict[str, int] = field(default_factory=dict)
    stop_streaks: dict[str, int] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)  # the last 20
    entropies: list[float] = field(default_factory=list)  # the first 10
    valid_rates: list[float] = field(default_factory=list)  # the last 5
    success_rates: list[float] = field(default_factory=list)  # the last 5
    best_valid: float = 0.0
    best_success: float = 0.0
    best_held_out: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint; JSON gives it back unchanged."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises TypeError for fields that this version does not have."""
        vars(self).update(vars(Sentinels(**copy.deepcopy(dict(state)))))

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms of one step, or of an evaluation alone. A metric that is missing, None or not
        finite was not measured, but a loss or gradient norm that is not finite counts as broken."""
        alarms = [self._judge(step, reading) for reading in self._readings(metrics)]
        return [alarm for alarm in alarms if alarm]

    def _readings(self, metrics: Mapping[str, Any]) -> Iterator[Reading]:
        """Each measurement against the run's past, which it then joins."""
        finite = _finite(metrics)
        if norm := finite.get("policy/grad_norm"):  # 0: every mini-batch was skipped
            if len(self.grad_norms) >= NUM_GRAD_NORMS:
                usual = max(median(self.grad_norms), MIN_GRAD_NORM)
                text = f"gradient norm {norm:.3g}, lately {usual:.3g}"
                yield "grad_norm", norm, RULES["grad_norm"].limits(times=usual), text
            self.grad_norms = [*self.grad_norms, norm][-RECENT_GRAD_NORMS:]

        skipped = _skipped(metrics, finite)
        if skipped is not None:
            text = f"{skipped:g} mini-batches skipped: their loss or gradient was not finite"
            yield "non_finite", skipped, RULES["non_finite"].limits(), text
        if skipped:  # means lack what came after the break: an entropy of 0 is not a collapse
            finite = {name: v for name, v in finite.items() if not name.startswith("policy/")}
        entropy = finite.get("policy/entropy")
        if entropy is not None and len(self.entropies) < FIRST_ENTROPIES:
            self.entropies.append(entropy)
        elif entropy is not None:
            start = median(self.entropies)
            text = f"entropy {entropy:.3g} nats, at the start {start:.3g}"
            low, high = RULES["entropy_floor"], RULES["entropy_explosion"]
            yield "entropy_floor", entropy, low.limits(times=start), text
            yield "entropy_explosion", entropy, high.limits(plus=start), text

        for name, metric, text in (
            ("approx_kl", "policy/approx_kl", "nats/token moved by one update"),
            ("kl", "policy/kl", "nats/token away from the reference"),
            ("repeated_tokens", "train/repeated_token_rate", "of sampled tokens are repeats"),
        ):
            if metric in finite:
                yield name, finite[metric], RULES[name].limits(), f"{finite[metric]:.3g} {text}"

        if "train/parse_error_rate" in finite:
            valid = 1 - finite["train/parse_error_rate"]
            limits = RULES["valid_actions"].limits_below(self.best_valid)
            text = f"{valid:.1%} of the actions parse, at best it was {self.best_valid:.1%}"
            yield "valid_actions", valid, limits, text
            self.best_valid = _best(self.best_valid, self.valid_rates, valid)

        if "eval/avg" in finite:
            held_out = finite["eval/avg"]
            limits = RULES["held_out"].limits_below(self.best_held_out)
            text = f"{held_out:.1%} held-out success, at best it was {self.best_held_out:.1%}"
            yield "held_out", held_out, limits, text
            self.best_held_out = max(self.best_held_out, held_out)

        groups, flat, success = (
            finite.get(f"train/{name}")
            for name in ("groups", "groups_zero_variance", "success_rate")
        )
        if groups and flat is not None and success is not None:  # otherwise all were lost
            value = success if flat >= groups else math.inf  # healthy with any signal
            warn_at, stop_at = RULES["no_signal"].limits()
            limits = (warn_at, stop_at if self.best_success > stop_at else -math.inf)
            text = f"{success:.1%} success and no group with signal, at best it was "
            yield "no_signal", value, limits, f"{text}{self.best_success:.1%}"
            self.best_success = _best(self.best_success, self.success_rates, success)

    def _judge(self, step: int, reading: Reading) -> Alarm | None:
        """Count the streaks of one rule."""
        name, value, (warn_at, stop_at), text = reading
        rule, warns, stops = RULES[name], self.warn_streaks, self.stop_streaks
        for streaks, limit in ((warns, warn_at), (stops, stop_at)):
            is_bad = value <= limit if rule.falls else value >= limit
            streaks[name] = streaks.get(name, 0) + 1 if is_bad else 0
        text = f"step {step}: {name}: {text} "
        if stops[name] >= rule.stop_after:
            text += f"(stops at {stop_at:.3g}, {stops[name]} in a row); {rule.todo}; "
            text += "go on in a new run from --model RUN/checkpoints/best"
            return Alarm(name, value, stop_at, "stop", text)
        if warns[name] == rule.warn_after:
            stop = f"stops at {stop_at:.3g} if {rule.stop_after} in a row"
            text += f"(warns at {warn_at:.3g}, {stop if math.isfinite(stop_at) else 'never stops'})"
            return Alarm(name, value, warn_at, "warn", f"{text}; {rule.todo}")
        return None


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that were measured, from numbers or one-element tensors."""
    numbers = {name: float(value) for name, value in metrics.items() if value is not None}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _skipped(metrics: Mapping[str, Any], finite: Mapping[str, float]) -> float | None:
    """Number of mini-batches that were not finite; None if there was no update."""
    skipped = sum(finite.get(f"{part}/skipped_steps", 0.0) for part in ("policy", "critic"))
    for name in ("policy/loss", "policy/grad_norm"):
        if metrics.get(name) is not None and name not in finite:
            return max(skipped, 1.0)
    tried = finite.get("policy/optimizer_steps") or finite.get("policy/grad_norm")
    return skipped if skipped or tried else None


def _best(best: float, recent: list[float], rate: float) -> float:
    """The best median of 5 rates, after `rate` has joined the recent ones."""
    recent.append(rate)
    del recent[:-RECENT_RATES]
    return max(best, median(recent)) if len(recent) == RECENT_RATES else best
