"""Collapse sentinels: rules that detect a collapsing run and stop it before more is lost.

In reinforcement learning the policy produces its own training data, so a policy that gets worse
samples worse data, learns from it and gets worse still. Published runs of this kind of trainer
collapsed after 100 to 300 steps: the gradient norm rose to 8e8 and then to NaN, the entropy fell to
0, one token was repeated up to the limit, or actions no longer parsed. A sentinel is a rule that is
checked after every step:

    level    the value xₖ of step k is compared with two limits: warn, and the stricter stop
    streak   cₖ = cₖ₋₁ + 1 if xₖ is at the limit or beyond, else 0;   cₖ = cₖ₋₁ if xₖ is missing
    alarm    warn when the warn streak reaches `warn_after`, and not again during that streak
             stop at every step whose stop streak is `stop_after` or longer

So one noisy step never stops a run. Most limits are relative to the run's own past, since a healthy
entropy is 0.08 nats for one model and 1.5 for another. No rule detects a policy that gives the same
fluent answer to every task (arXiv 2604.06268); only the success rate shows that.

    >>> sentinels = Sentinels()
    >>> sentinels.check(40, {"eval/avg": 0.55})
    []
    >>> sentinels.check(60, {"eval/avg": 0.12})[0].severity, sentinels.check(70, {})
    ('warn', [])
    >>> sentinels.check(80, {"eval/avg": 0.15})[0].severity
    'stop'

Read next: run/session.py, which checks each step and stops the run.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True)
class Rule:
    """The two limits of a sentinel, how many measurements in a row must reach them, and advice."""

    warn: float
    stop: float
    warn_after: int
    stop_after: int
    advice: str
    falls: bool = False  # small values are bad, instead of large ones
    min_fall: float = 0.0  # a smaller fall below the best never raises an alarm

    def limits(self, times: float = 1.0, plus: float = 0.0) -> tuple[float, float]:
        """The warn and stop limits in the unit of the measured value."""
        return self.warn * times + plus, self.stop * times + plus

    def limits_below(self, best: float) -> tuple[float, float]:
        """The limits as shares of the best value so far. While the best is less than `min_fall`
        they are below 0, so a policy that starts near 0 raises no alarm."""
        highest = best - self.min_fall
        return min(self.warn * best, highest), min(self.stop * best, highest)


# "Recorded" refers to runs of 60 steps (recipes/results): three healthy RL seeds, imitation, and a
# control with shuffled rewards that fell from 55 % to 12 %. The other numbers are judgement calls.
RULES = {
    # Gradient norm relative to the median of the last 20. Recorded: at most 2.3 (RL) and 4.3
    # (imitation). Clipping makes one spike harmless, so only three in a row stop the run.
    "grad_norm": Rule(10, 100, 1, 3, "lower --learning-rate or --max-grad-norm"),
    # Mini-batches skipped in a step. One step can be bad luck; after three the model is broken.
    "non_finite": Rule(
        1, 1, 1, 3, "lower --learning-rate; check whether sampler/log_prob_diff_max rose first"
    ),
    # Entropy relative to the initial entropy (median of the first 10 steps). Recorded: 0.30 (RL);
    # imitation fell to 0.095 while held-out success rose, so low entropy alone is not a collapse.
    "entropy_floor": Rule(
        0.1, 0.01, 3, 5, "raise --entropy-coef or lower --learning-rate", falls=True
    ),
    # Entropy minus the initial entropy, in nats; at +x the policy chooses among e^x times as many
    # tokens. Recorded: +0.15.
    "entropy_explosion": Rule(
        1, 3, 3, 5, "lower --entropy-coef or --learning-rate, or raise --kl-loss-coef"
    ),
    # KL of one step's update, in nats per token. PPO implementations aim at 0.01 to 0.02; at 1 the
    # clip no longer helps. One extreme token can dominate this mean, so only three in a row stop.
    "approx_kl": Rule(0.1, 1, 1, 3, "lower --learning-rate, --ppo-epochs or --clip-ratio"),
    # KL to the reference, in nats per token; at 10 the reference finds a sampled token
    # e^10 times less likely than the policy does.
    "kl": Rule(1, 10, 3, 5, "raise --kl-loss-coef or lower --learning-rate"),
    # Largest KL to the reference of a single token (k3); at 1000 its gradient is -1000. A healthy
    # run of recipes/demo.json with --kl-loss-coef 0.001 had at most 67, with a mean KL of 0.2.
    "kl_max": Rule(1e3, 1e5, 3, 5, "set --kl-clamp 10, or lower --learning-rate"),
    # Share of turns cut at their token limit, minus that share in the first 10 steps.
    "cut_turns": Rule(0.2, 0.5, 3, 5, "raise --max-tokens-per-turn or lower --learning-rate"),
    # Median tokens of a turn, relative to the first 10 steps. A public run fell from 60 to 12 and
    # still improved, so a fall stops a run only when its turns are almost empty.
    "short_turns": Rule(0.2, 0.02, 3, 5, "raise --entropy-coef or --kl-loss-coef", falls=True),
    "long_turns": Rule(3, 10, 3, 5, "lower --learning-rate or raise --kl-loss-coef"),
    # Share of sampled tokens in 4-grams that occurred earlier in the same action. TextCraft's
    # oracle has 0.01 with a word vocabulary and 0.25 with characters; a looping action is near 1.
    "repeated_tokens": Rule(
        0.3, 0.6, 2, 3, "read the trajectories; lower --learning-rate or raise --kl-loss-coef"
    ),
    # Share of actions that parse, relative to the best median of 5 steps so far.
    "valid_actions": Rule(
        *(0.7, 0.3, 2, 5),
        "read the trajectories; lower --learning-rate, or raise --kl-loss-coef, or "
        "--max-tokens-per-turn if actions are cut short",
        falls=True,
        min_fall=0.2,  # a smaller fall can be noise in a step of 20 to 200 turns
    ),
    # Held-out success relative to the best so far. Recorded: at worst 0.88 (healthy); 0.88, 0.82,
    # 0.32, 0.22 (shuffled). It takes two evaluations in a row to stop.
    "held_out": Rule(
        *(0.75, 0.5, 1, 2, "lower --learning-rate; check that the rewards mean success"),
        falls=True,
        min_fall=0.1,  # half the 95 % interval of the recipes' 252 samples
    ),
    # Success rate of a step in which all returns of each group are equal. A policy that solves all
    # tasks is healthy; one that never solved any has nothing to lose and is not stopped. If 5 % of
    # attempts succeed, all 64 samples fail in 4 % of steps, so 5 in a row do not happen by chance.
    "no_signal": Rule(
        *(0.05, 0.05, 5, 20),
        "lower --learning-rate if success was higher before; otherwise use easier --subtasks, a "
        "--warm-start or a larger --group-size",
        falls=True,
    ),
}
MIN_GRAD_NORM = 0.1  # smallest median used; 10 times this is --max-grad-norm, where clipping begins
RECENT_GRAD_NORMS, MIN_GRAD_NORMS = 20, 5  # window of the median; no check with fewer than 5
FIRST_STEPS = 10  # number of steps whose median is the start of a run
RECENT_RATES = 5  # window of a median, so that one lucky step does not become the best


@dataclass(frozen=True)
class Alarm:
    """An alarm that one rule raises at one step."""

    name: str  # a key of RULES
    value: float  # the measured value, in the metric's unit
    limit: float  # the limit it reached, in the same unit
    severity: Literal["warn", "stop"]
    message: str  # one line: the value, its limits and what to do


Reading = tuple[str, float, tuple[float, float], str]  # rule, value, its two limits, description


@dataclass
class Sentinels:
    """Checks all rules. Call `check` with the metrics of every training step, in order. The fields
    are the complete state: a run resumed with them raises the same alarms as an uninterrupted one.
    """

    warn_streaks: dict[str, int] = field(default_factory=dict)
    stop_streaks: dict[str, int] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)  # the last 20
    entropies: list[float] = field(default_factory=list)  # the first 10
    cut_rates: list[float] = field(default_factory=list)  # the first 10
    turn_lengths: list[float] = field(default_factory=list)  # the first 10
    valid_rates: list[float] = field(default_factory=list)  # the last 5
    success_rates: list[float] = field(default_factory=list)  # the last 5
    best_valid: float = 0.0
    best_success: float = 0.0
    best_held_out: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; it survives a round trip through JSON."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises TypeError for fields that this version does not have."""
        vars(self).update(vars(Sentinels(**copy.deepcopy(dict(state)))))

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms of one step, or of one evaluation. A metric that is missing, None or not
        finite is ignored, except that a non-finite loss or gradient norm counts as a skipped
        mini-batch."""
        alarms = [self._judge(step, reading) for reading in self._readings(metrics)]
        return [alarm for alarm in alarms if alarm]

    def _readings(self, metrics: Mapping[str, Any]) -> Iterator[Reading]:
        """Compare each metric with the run's history, then add it to the history."""
        finite = _finite(metrics)
        if norm := finite.get("policy/grad_norm"):  # 0: every mini-batch was skipped
            if len(self.grad_norms) >= MIN_GRAD_NORMS:
                recent = max(median(self.grad_norms), MIN_GRAD_NORM)
                text = f"gradient norm {norm:.3g}, recent median {recent:.3g}"
                yield "grad_norm", norm, RULES["grad_norm"].limits(times=recent), text
            self.grad_norms = [*self.grad_norms, norm][-RECENT_GRAD_NORMS:]

        skipped = _skipped(metrics, finite)
        if skipped is not None:
            plural = "es" * (skipped > 1)
            text = f"{skipped:g} mini-batch{plural} skipped because loss or gradient was not finite"
            yield "non_finite", skipped, RULES["non_finite"].limits(), text
        if skipped:  # the means are incomplete, so an entropy of 0 would not show a collapse
            finite = {name: v for name, v in finite.items() if not name.startswith("policy/")}
        for entropy, start in _with_start(self.entropies, finite.get("policy/entropy")):
            text = f"entropy {entropy:.3g} nats, initially {start:.3g}"
            low, high = RULES["entropy_floor"], RULES["entropy_explosion"]
            yield "entropy_floor", entropy, low.limits(times=start), text
            yield "entropy_explosion", entropy, high.limits(plus=start), text
        for cut, start in _with_start(self.cut_rates, finite.get("train/cut_turn_rate")):
            text = f"{cut:.1%} of the turns are cut at their token limit, initially {start:.1%}"
            yield "cut_turns", cut, RULES["cut_turns"].limits(plus=start), text
        for length, start in _with_start(self.turn_lengths, finite.get("train/turn_tokens_median")):
            text = f"the median turn has {length:g} tokens, initially {start:g}"
            for name in ("short_turns", "long_turns"):
                yield name, length, RULES[name].limits(times=start), text

        for name, metric, text in (
            ("approx_kl", "policy/approx_kl", "nats/token of KL from one step's update"),
            ("kl", "policy/kl", "nats/token of KL to the reference"),
            ("kl_max", "policy/kl_max", "nats of KL to the reference at a single token"),
            ("repeated_tokens", "train/repeated_token_rate", "of the sampled tokens are repeats"),
        ):
            if metric in finite:
                yield name, finite[metric], RULES[name].limits(), f"{finite[metric]:.3g} {text}"

        if "train/parse_error_rate" in finite:
            valid = 1 - finite["train/parse_error_rate"]
            limits = RULES["valid_actions"].limits_below(self.best_valid)
            text = f"{valid:.1%} of the actions parse, {self.best_valid:.1%} at best"
            yield "valid_actions", valid, limits, text
            self.best_valid = _best(self.best_valid, self.valid_rates, valid)

        if "eval/avg" in finite:
            held_out = finite["eval/avg"]
            limits = RULES["held_out"].limits_below(self.best_held_out)
            text = f"{held_out:.1%} held-out success, {self.best_held_out:.1%} at best"
            yield "held_out", held_out, limits, text
            self.best_held_out = max(self.best_held_out, held_out)

        groups, zero_variance, success = (
            finite.get(f"train/{name}")
            for name in ("groups", "groups_zero_variance", "success_rate")
        )
        if groups and zero_variance is not None and success is not None:  # not all were lost
            value = success if zero_variance >= groups else math.inf  # inf: healthy
            warn_at, stop_at = RULES["no_signal"].limits()
            limits = (warn_at, stop_at if self.best_success > stop_at else -math.inf)
            text = f"{success:.1%} success, {self.best_success:.1%} at best, and the returns of "
            yield "no_signal", value, limits, f"{text}each group are equal"
            self.best_success = _best(self.best_success, self.success_rates, success)

    def _judge(self, step: int, reading: Reading) -> Alarm | None:
        """Update the streaks of one rule; returns its alarm, if any."""
        name, value, (warn_at, stop_at), text = reading
        rule, warns, stops = RULES[name], self.warn_streaks, self.stop_streaks
        for streaks, limit in ((warns, warn_at), (stops, stop_at)):
            is_bad = value <= limit if rule.falls else value >= limit
            streaks[name] = streaks.get(name, 0) + 1 if is_bad else 0
        text = f"step {step}: {name}: {text} "
        if stops[name] >= rule.stop_after:
            text += f"(stops: {stops[name]} in a row at {stop_at:.3g}); {rule.advice}; "
            text += "start a new run from --model RUN/checkpoints/best"
            return Alarm(name, value, stop_at, "stop", text)
        if warns[name] == rule.warn_after:
            stop = f"stops after {rule.stop_after} in a row at {stop_at:.3g}"
            text += f"(warns at {warn_at:.3g}, {stop if math.isfinite(stop_at) else 'never stops'})"
            return Alarm(name, value, warn_at, "warn", f"{text}; {rule.advice}")
        return None


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics with finite values, as floats (from numbers or one-element tensors)."""
    numbers = {name: float(value) for name, value in metrics.items() if value is not None}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _skipped(metrics: Mapping[str, Any], finite: Mapping[str, float]) -> float | None:
    """Number of skipped mini-batches; None if there was no update."""
    skipped = sum(finite.get(f"{part}/skipped_steps", 0.0) for part in ("policy", "critic"))
    for name in ("policy/loss", "policy/grad_norm"):
        if metrics.get(name) is not None and name not in finite:
            return max(skipped, 1.0)
    is_update = finite.get("policy/optimizer_steps") or finite.get("policy/grad_norm")
    return skipped if skipped or is_update else None


def _with_start(first: list[float], value: float | None) -> Iterator[tuple[float, float]]:
    """(value, median of the first values); nothing while the first values are collected."""
    if value is not None and len(first) < FIRST_STEPS:
        first.append(value)
    elif value is not None:
        yield value, median(first)


def _best(best: float, recent: list[float], rate: float) -> float:
    """Add `rate` to the recent rates; returns the best median of 5 so far."""
    recent.append(rate)
    del recent[:-RECENT_RATES]
    return max(best, median(recent)) if len(recent) == RECENT_RATES else best
