"""Metrics: the definition of every logged name, and the two files that a run writes them to.

Each file has one JSON object per step:

    metrics.jsonl   values that the seed determines: returns, losses, counts, but no times. With
                    `--deterministic` every run writes the same bytes, even if it was resumed
    timings.jsonl   seconds, tokens per second, bytes; different in every run

A value that is not finite is written as null. On resume both files are cut back to the checkpoint's
step. For one batch of trajectories i = 1..N with turns n = 1..N_i and tokens t:

    R_i                  = Σ_n r_{i,n}                     return: the sum of the turns' rewards
    return_mean          = (1/N) Σ_i R_i
    success_rate         = (1/N) Σ_i 1[the environment reports success]
    action_tokens_mean   = (1/N) Σ_i Σ_t loss_mask_{i,t}   only tokens that the policy sampled
    groups_zero_variance = |{g : R_i = R_j for all i, j in g}|    groups with zero GRPO advantage

N counts valid trajectories. A trajectory lost to an infrastructure failure (`env_error`,
`engine_error`) is left out of the means and counted in `train/env_failures` and `train/stop/*`.

Read next: run/session.py, which logs these numbers; reporting/plots.py, which draws them.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from envs import ENVS, env_name
from reporting.logs import read_log, truncate_log
from reporting.plots import plot
from reporting.trackers import Trackers
from run import progress
from run.files import flush, make_folder
from trajectory import LOST, STOP_REASONS, RolloutHandler, are_equal, returns_by_group

# Deterministic given the seed: metrics.jsonl.
METRICS: dict[str, str] = {
    # train/: this step's trajectories, sampled before the update. Means are over valid ones.
    "train/return_mean": "mean return (sum of rewards) of valid trajectories (0..1)",
    "train/success_rate": "share of valid trajectories that solved their task (0..1)",
    "train/turns_mean": "mean number of turns of a valid trajectory (turns)",
    "train/action_tokens_mean": "mean number of tokens sampled in a valid trajectory (tokens)",
    "train/trajectory_tokens_mean": "mean length of a valid trajectory, prompt included (tokens)",
    "train/parse_error_rate": "share of turns whose action could not be parsed (0..1)",
    "train/cut_turn_rate": "share of turns cut at their token limit (0..1)",
    "train/turn_tokens_median": "median number of tokens sampled in a turn (tokens)",
    "train/repeated_token_rate": "share of sampled tokens in 4-grams that already occurred in "
    "the turn (0..1)",
    "train/groups": "groups, i.e. tasks with at least one valid trajectory (count)",
    "train/groups_zero_variance": "groups in which all returns are equal (count)",
    "train/groups_mixed": "groups with solved and unsolved trajectories (count)",
    "train/trajectories_used": "trajectories in the loss; in agentevol.py, those added to the "
    "evolving set (count)",
    "train/env_failures": "trajectories lost to a failed environment server or sampler (count)",
    **{
        f"train/stop/{reason}": "share of all trajectories, including lost ones, that ended like "
        f"this: {why} (0..1)"
        for reason, why in STOP_REASONS.items()
    },
    "horizon/max_rounds": "turn limit of this step; with several environments, the largest (turns)",
    # policy/: means over policy tokens and over this step's optimizer steps.
    "policy/loss": "clipped policy loss (see --loss-agg) with KL and entropy terms (nats)",
    "policy/kl": "KL(policy || reference), estimated on sampled tokens, per policy token (nats)",
    "policy/kl_max": "largest KL of a single token (k3, before --kl-clamp) in the step (nats)",
    "policy/kl_clamp_frac": "share of policy tokens that --kl-clamp limits (0..1)",
    "policy/approx_kl": "KL(policy before this update || policy now), per policy token (nats)",
    "policy/entropy": "mean entropy of the next-token distribution at policy tokens (nats)",
    "policy/clip_frac": "share of policy tokens where the PPO clip was active (0..1)",
    "policy/dual_clip_frac": "share of policy tokens that --dual-clip limits (0..1)",
    "policy/log_ratio_clamp_frac": "share of policy tokens with a log ratio above 20 nats (0..1)",
    "policy/grad_norm": "global gradient norm before clipping, mean over optimizer steps (1)",
    "policy/learning_rate": "learning rate of the policy's last optimizer step (1)",
    "policy/optimizer_steps": "optimizer steps taken by the policy in this step (count)",
    "policy/skipped_steps": "mini-batches skipped: loss or gradient was not finite (count)",
    # preference/: only dpo.py; means over the step's pairs, before the update.
    "preference/sft_loss": "imitation loss of the chosen trajectories, per token, not yet "
    "multiplied by --sft-coef (nats)",
    "preference/margin": "reward of the chosen trajectory minus reward of the rejected one (nats)",
    "preference/accuracy": "share of pairs whose chosen trajectory has the higher reward (0..1)",
    "preference/chosen_reward": "beta · log(policy / reference) of the chosen trajectory (nats)",
    "preference/rejected_reward": "beta · log(policy / reference) of the rejected one (nats)",
    "preference/chosen_log_prob": "log-prob of the chosen trajectory's policy tokens (nats)",
    "preference/rejected_log_prob": "log-prob of the rejected trajectory's policy tokens (nats)",
    "critic/loss": "clipped value loss, per policy token (squared return)",
    "critic/clip_frac": "share of policy tokens where the value clip was active (0..1)",
    "critic/grad_norm": "global gradient norm of the critic before clipping (1)",
    "critic/skipped_steps": "critic mini-batches skipped: loss or gradient was not finite (count)",
    "critic/explained_variance": "1 - Var[returns - values] / Var[returns] at policy tokens (1)",
    "sampler/log_prob_diff_mean": "mean |sampler - recomputed| log-prob at policy tokens (nats)",
    "sampler/log_prob_diff_max": "largest |sampler - recomputed| log-prob in the step (nats)",
    "sampler/is_weight_mean": "mean truncated importance weight, trainer/sampler (1: on-policy)",
    "sync/log_prob_diff_mean": "|sampler - trainer| log-prob after the sync, worst text (nats)",
    "policy/teacher_kl": "distill: KL(policy || teacher), estimated on sampled tokens (nats/token)",
    "data/anchored_share": "gigpo: share of turns that began in a state of another turn (0..1)",
    "data/overlong_penalty": "mean of --overlong-penalty over the trajectories in the loss (0..1)",
    "data/epoch": "passes over the training data; with several environments, the minimum (epochs)",
    "data/task_uncertainty": "--task-sampling uncertain: mean p (1 - p) of the step's tasks; "
    "p is a task's success rate as estimated before the step (0..0.25)",
    "data/policy_tokens": "policy tokens in this step's loss (tokens)",
    "data/signal_share": "share of policy tokens (seq-mean: trajectories) kept for the loss (0..1)",
    "data/pairs": "preference pairs in the iteration that begins with this step (pairs)",
    "data/evolving": "size of the evolving set, in the iteration that begins with this step "
    "(trajectories)",
    "data/evolving_weight": "mean weight of a trajectory in the evolving set (demonstrations: 1)",
    # eval/: held-out tasks, mean over environments; intervals are in eval/step_*.json.
    "eval/avg": "avg@k on held-out tasks: mean share of a task's samples that solve it (0..1)",
    "eval/pass": "pass@k on held-out tasks: chance that any of k samples solves the task (0..1)",
    "eval/return_mean": "mean return of each held-out task, averaged over tasks (0..1)",
    "eval/loss": "sft.py: imitation loss of held-out conversations, per policy token (nats)",
}

# Different in every run: timings.jsonl.
TIMINGS: dict[str, str] = {
    "time/rollout_s": "wall time of sampling this step's trajectories (s)",
    "time/log_probs_s": "wall time of recomputing old and reference log-probs and values (s)",
    "time/advantages_s": "wall time of the advantage estimator (s)",
    "time/update_s": "wall time of all optimizer steps (s)",
    "time/sync_s": "wall time of copying the weights into the sampler and probing it (s)",
    "time/eval_s": "wall time of the held-out evaluation (s)",
    "time/save_s": "wall time of writing the checkpoint (s)",
    "time/step_s": "wall time of the step (s)",
    "time/cpu_s": "CPU time of rank 0 in the step, without evaluation and saving (s)",
    "rollout/generated_tokens_per_s": "sampled tokens per second of the rollout (tokens/s)",
    "rollout/engine_idle_share": "share of the rollout's time in which the sampler was idle (0..1)",
    "update/tokens_per_s": "tokens per second of the update, without padding (tokens/s)",
    "sync/bytes": "size of the weights sent to the sampler (bytes)",
    "memory/peak_bytes": "largest peak memory of rank 0 in any phase of the step (bytes)",
    "memory/rollout_bytes": "peak memory of rank 0 (its GPU or process) in the rollout (bytes)",
    "memory/log_probs_bytes": "peak memory of rank 0 while recomputing log-probs (bytes)",
    "memory/update_bytes": "peak memory of rank 0 in the update (bytes)",
    "memory/sync_bytes": "peak memory of rank 0 in the weight sync (bytes)",
}

# With several environments, these are also logged for each one, as name/ENVIRONMENT.
PER_ENV = (
    *("train/return_mean", "train/success_rate", "train/turns_mean", "horizon/max_rounds"),
    *("eval/avg", "eval/pass", "eval/return_mean"),
)
METRICS |= {f"{name}/{env}": f"in {env}: {METRICS[name]}" for name in PER_ENV for env in ENVS}

GLOSSARY: dict[str, str] = METRICS | TIMINGS
FILES = {"metrics.jsonl": METRICS, "timings.jsonl": TIMINGS}

NGRAM = 4  # length of the token sequences whose repetition is counted


def by_env(
    name: str, values: Mapping[str, Any], pool: Callable[[Iterable[Any]], Any]
) -> dict[str, Any]:
    """Metrics from one number per environment (None if unknown): the pooled number and, if there
    are several environments, the number of each.

    >>> by_env("eval/avg", {"textcraft": 0.25, "babyai": 0.75}, max)
    {'eval/avg': 0.75, 'eval/avg/textcraft': 0.25, 'eval/avg/babyai': 0.75}
    """
    per_env = {f"{name}/{env}": value for env, value in values.items()} if len(values) > 1 else {}
    numbers = [value for value in values.values() if value is not None]
    return {name: pool(numbers) if numbers else None} | per_env


def summarize_trajectories(
    trajectories: Sequence[RolloutHandler], envs: Sequence[str] = ()
) -> dict[str, float | int | None]:
    """The `train/*` metrics of one step; a mean over an empty list is None.

    Args:
        trajectories: all trajectories of the step, from every process, including invalid ones.
        envs: the run's environments; if there are several, every step has metrics for each.
    """
    valid = [t for t in trajectories if t.is_valid]
    turns = [turn for t in valid for turn in t.turns]
    actions = [t.input_ids[slice(*turn.action_span)] for t in valid for turn in t.turns]
    num_repeated = sum(map(num_repeated_tokens, actions))
    num_sampled = sum(map(len, actions))
    returns_of_group = returns_by_group(valid)
    outcomes_of_group: dict[int, set[bool]] = defaultdict(set)
    for t in valid:
        outcomes_of_group[t.group_id].add(t.success)
    stops = Counter(t.stop_reason for t in trajectories)
    metrics = outcomes(valid)
    for env in envs if len(envs) > 1 else ():
        env_metrics = outcomes([t for t in valid if env_name(t.env) == env])
        metrics |= {f"{name}/{env}": value for name, value in env_metrics.items()}
    return metrics | {
        "train/action_tokens_mean": _mean([sum(t.loss_mask) for t in valid]),
        "train/trajectory_tokens_mean": _mean([len(t.input_ids) for t in valid]),
        "train/parse_error_rate": _mean(
            [float(bool(turn.parse_error)) for turn in turns if turn.kind == "act"]
        ),
        "train/cut_turn_rate": sum(t.num_cut_turns for t in valid) / len(turns) if turns else None,
        "train/turn_tokens_median": median(map(len, actions)) if actions else None,
        "train/repeated_token_rate": num_repeated / max(num_sampled, 1),
        "train/groups": len(returns_of_group),
        "train/groups_zero_variance": sum(map(are_equal, returns_of_group.values())),
        "train/groups_mixed": sum(len(both) == 2 for both in outcomes_of_group.values()),
        "train/trajectories_used": sum(bool(t.used_in_loss) for t in trajectories),
        "train/env_failures": sum(stops[reason] for reason in LOST),
        **{
            f"train/stop/{reason}": stops[reason] / len(trajectories) if trajectories else None
            for reason in STOP_REASONS
        },
    }


def outcomes(valid: Sequence[RolloutHandler]) -> dict[str, float | int | None]:
    return {
        "train/return_mean": _mean([t.total_return for t in valid]),
        "train/success_rate": _mean([float(t.success) for t in valid]),
        "train/turns_mean": _mean([len(t.turns) for t in valid]),
    }


def num_repeated_tokens(action_ids: Sequence[int]) -> int:
    """Number of tokens in 4-grams (4 tokens in a row) that occurred earlier in the same action.
    The two occurrences can overlap.

    >>> num_repeated_tokens([7, 7, 7, 7, 7, 7, 7, 7])
    7
    >>> num_repeated_tokens([1, 2, 3, 4, 9, 1, 2, 3, 4, 8])
    4
    """
    earlier_ngrams: set[tuple[int, ...]] = set()
    positions: set[int] = set()  # of repeated tokens in the action
    for start in range(len(action_ids) - NGRAM + 1):
        ngram = tuple(action_ids[start : start + NGRAM])
        if ngram in earlier_ngrams:
            positions.update(range(start, start + NGRAM))
        earlier_ngrams.add(ngram)
    return len(positions)


def _mean(numbers: Sequence[float]) -> float | None:
    return math.fsum(numbers) / len(numbers) if numbers else None


class MetricsLogger:
    """Writes the two logs of a run, prints its table and draws its reward.png.

    Args:
        resume_step: the checkpoint's step; later lines are dropped. None: a new run.
        writes: False on all ranks but 0, which only check the names of metrics.
        trackers: receive a copy of each step's row, and are closed with the logger.
        columns: columns of the table.
    Raises: LogError if a line other than the last is not a JSON object with a step.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resume_step: int | None = None,
        writes: bool = True,
        trackers: Trackers | None = None,
        columns: progress.Columns = progress.COLUMNS,
    ) -> None:
        self.run_dir, self.writes = Path(run_dir), writes
        self._trackers, self._columns, self._rows_printed = trackers, columns, 0
        make_folder(self.run_dir)
        for name in FILES if writes else ():
            if resume_step is not None:
                truncate_log(self.run_dir / name, resume_step)
            (self.run_dir / name).touch()
        flush(self.run_dir)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Write a line of `metrics.jsonl`. Raises ValueError for a name that METRICS lacks."""
        self._append("metrics.jsonl", step, metrics)

    def amend(self, step: int, metrics: dict[str, Any]) -> None:
        """Add metrics to the last line of `metrics.jsonl`, which must be that of `step`. A resumed
        run needs this after it has repeated an interrupted evaluation."""
        if not self.writes:
            return
        path = self.run_dir / "metrics.jsonl"
        last_row = read_log(path)[-1]
        assert last_row.pop("step") == step, f"step {step} is not the last of {path}"
        truncate_log(path, step - 1, new_line=_line(path.name, step, last_row | metrics))
        self._show(step, metrics)

    def show_step(
        self,
        step: int,
        metrics: dict[str, Any],
        timings: dict[str, Any],
        last_step: int | None = None,
        left_s: float | None = None,
    ) -> None:
        """Write the step's line of `timings.jsonl`, print its row and redraw reward.png."""
        self._append("timings.jsonl", step, timings)
        if not self.writes:
            return
        if self._rows_printed % progress.HEADER_EVERY == 0:
            print(progress.table_header(self._columns))
        self._rows_printed += 1
        values = metrics | timings
        print(progress.table_row(step, values, last_step, left_s, self._columns), flush=True)
        progress.restart_interval()
        self._show(step, values)

    def close(self) -> None:
        if self._trackers:
            self._trackers.close()

    def _show(self, step: int, values: dict[str, Any]) -> None:
        plot(self.run_dir)
        if self._trackers:
            self._trackers.send(step, _numbers(values))

    def _append(self, name: str, step: int, values: dict[str, Any]) -> None:
        """Append a line and flush it to disk: after a crash, each checkpoint must have its line."""
        line = _line(name, step, values)
        if self.writes:
            with open(self.run_dir / name, "a", encoding="utf-8") as file:
                file.write(line)
            flush(self.run_dir / name)


def _line(file: str, step: int, values: dict[str, Any]) -> str:
    for name in values:
        is_of_an_env = file == "metrics.jsonl" and name.rpartition("/")[0] in PER_ENV
        if name not in FILES[file] and not is_of_an_env:
            raise ValueError(f"{name!r} is not a metric of {file}; define it in metrics.py first")
    return json.dumps({"step": step} | _numbers(values), allow_nan=False) + "\n"


def _numbers(values: dict[str, Any]) -> dict[str, float | int | None]:
    """JSON numbers from ints, floats or one-element tensors; None for non-finite values."""

    def number(value: Any) -> float | int | None:
        if value is None or isinstance(value, int):
            return value
        return float(value) if math.isfinite(value) else None

    return {name: number(value) for name, value in values.items()}
