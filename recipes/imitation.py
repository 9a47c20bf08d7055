"""The control that every claim of reinforcement learning needs: imitation, in the very same loop.

Evaluation, checkpoints, files and resume are train.py's own, and so is what takes the optimizer
step. The loss has the gradient that the policy's has where every advantage is 1 and π_old = π_θ,

    ∇ 1/N Σ ρ·1 = 1/N Σ ∇ log π_θ(token)          ρ = π_θ / stopgrad(π_θ)

so optimizer, clipping, precision and micro-batches are equal, and what differs is which tokens are
made likelier: those of a teacher, or of what the policy itself has just done right.

Read next: learns.py, miniature.py.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from batching import Batch
    from config import Config
    from data import Record
    from rollout import RolloutLog
    from run.clock import Clock
    from train import RLWorker as Worker

    Lesson = tuple[Batch | None, dict[str, Any], RolloutLog]
    LessonAt = Callable[[int, Clock], Lesson]  # what a step imitates, and what to log of it


def imitate(config: "Config", prepare: Callable[["Worker"], "LessonAt"]) -> None:
    """The loop of train.py with a lesson in place of advantages.

    Args: prepare: called once, before the first evaluation.
    """
    from run.clock import Clock
    from run.session import at_work, is_due
    from train import RLWorker

    with at_work(config, RLWorker) as session:
        worker = session.worker
        lesson_at = prepare(worker)
        session.evaluate_start()
        for step in session.steps_left():
            clock = Clock(vars(config))
            batch, metrics, log = lesson_at(step, clock)
            if batch is not None:
                with clock("time/update_s"):
                    metrics |= imitation_step(worker, step, batch)
            if is_due(step, config.eval_every, config.steps):
                worker.load_into_engine()
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock, log)


def imitation_step(worker: "Worker", step: int, batch: "Batch") -> dict[str, Any]:
    """One optimizer step on demonstrations; the metrics that a step of RL has too."""
    from losses import imitation_loss, masked_mean
    from update import forward_policy, optimize

    objective = replace(worker.config, share_prefix=False)  # as its result was made

    def loss_of(part: "Batch", denominator: float) -> tuple[Any, dict[str, Any]]:
        mask = part.loss_mask.to(worker.device)
        log_probs, entropy = forward_policy(worker.policy.model, part, objective, worker.device)
        loss = imitation_loss(log_probs, mask, denominator)
        return loss, {"loss": loss, "entropy": masked_mean(entropy, mask, denominator)}

    worker.set_learning_rates(step)
    metrics = optimize(worker.policy, batch, loss_of, objective, seed=step)
    found: dict[str, Any] = {f"policy/{name}": value for name, value in metrics.items()}
    return found | {"data/policy_tokens": int(batch.loss_mask.sum())}


def of_a_teacher(
    records: Callable[["Worker", int], list["Record"]], per_step: int
) -> Callable[["Worker"], "LessonAt"]:
    """Each step imitates demonstrations that no step before it saw.

    Args: records: (worker, how many) -> all that the run will need.
    Raises:
        SystemExit: there are fewer, or a step of them would be several of the optimizer's.
    """

    def prepare(worker: "Worker") -> "LessonAt":
        require_one_update(worker.config, per_step)
        count = worker.config.steps * per_step
        taught = records(worker, count)
        if len(taught) < count:
            raise SystemExit(f"only {len(taught)} of {count} demonstrations succeeded")

        def shown_at(step: int) -> list["Record"]:
            return taught[(step - 1) * per_step : step * per_step]

        return of_what_is_shown(shown_at, per_step)(worker)

    return prepare


def of_what_is_shown(
    shown_at: Callable[[int], list["Record"]], per_step: int
) -> Callable[["Worker"], "LessonAt"]:
    """Each step imitates what is shown at it, `per_step` demonstrations in one optimizer step.

    Raises:
        SystemExit: they would be several.
    """
    from rollout import RolloutLog
    from warmstart import SftSettings, batch_of

    def prepare(worker: "Worker") -> "LessonAt":
        require_one_update(worker.config, per_step)
        settings = SftSettings(max_trajectory_tokens=worker.config.max_trajectory_tokens)

        def lesson_at(step: int, clock: "Clock") -> "Lesson":
            with clock("time/rollout_s"):
                shown = shown_at(step)
            return batch_of(worker.chat, shown, settings, worker.pad_id), {}, RolloutLog()

        return lesson_at

    return prepare


def require_one_update(config: "Config", per_step: int) -> None:
    """Options under which a step on so many trajectories is one optimizer step, as rl's is."""
    if config.ppo_epochs != 1 or config.mini_batch_size < per_step:
        raise SystemExit(
            f"an imitation takes one optimizer step per step: --ppo-epochs 1 and --mini-batch-size "
            f"of at least {per_step}, not {config.ppo_epochs} and {config.mini_batch_size}"
        )


def of_its_own(worker: "Worker") -> "LessonAt":
    """Each step plays as train.py's does and imitates what succeeded: filtered imitation, which is
    RL with the return for an advantage and no baseline."""
    from batching import make_batch
    from reporting.metrics import summarize_trajectories
    from train import requests_of

    def lesson_at(step: int, clock: "Clock") -> "Lesson":
        requests = requests_of(step, worker.tasks, worker.config, worker.rounds_at(step))
        with clock("time/sync_s"):
            worker.load_into_engine()
        with clock("time/rollout_s"):
            played, log = worker.roll_out(requests)
        worker.run.write_trajectories(f"step_{step:06d}", played)
        solved = [t for t in played if t.is_valid and t.success]
        metrics = summarize_trajectories(played) | {"train/trajectories_used": len(solved)}
        return make_batch(solved, worker.pad_id) if solved else None, metrics, log

    return lesson_at
