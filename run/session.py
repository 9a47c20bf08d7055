"""A run from its opening to its end: resumed, logged, evaluated, saved, stopped without loss.

`train.py`, `sft.py`, `dpo.py` and `agentevol.py` are what happens in a step; this file is what
makes a run out of steps:

    open       the directory, locked; Ctrl-C and SIGTERM heard; a `Worker`
    restore    with --resume, the newest checkpoint, and the logs cut back to it
    each step  log, look for collapse, evaluate and save where that is due
    end        close; after Ctrl-C save first, and say which command goes on

Read next: `run/checkpoint.py`. Lesson: tutorials/07_checkpoint_and_resume.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

from config import RunConfig
from engines import EngineError
from envs import env_name, names_of
from reporting.logs import ALARMS, LogError, read_log, require_steps, truncate_log
from reporting.metrics import MetricsLogger, by_world
from reporting.table import columns_of
from reporting.trackers import TrackerError, Trackers
from rollout import RolloutLog, TooManyEnvFailures
from run import checkpoint, rundir
from run import progress as phases
from run.clock import Clock
from run.errors import OutOfMemory, TrainingError
from run.files import marks_of
from run.interrupt import StopRequests
from run.steplines import Progress
from run.timeleft import TimeLeft
from run.worker import Worker
from runtime.methods import IteratedConfig
from scale import distributed
from scale.default_models import resolve_model
from scale.sync import SyncError

# clock.py makes an OutOfMemory of an engine that had no memory.
PLAYING_FAILED = (EngineError, OutOfMemory, distributed.RankError, TooManyEnvFailures, SyncError)
WorkerType = TypeVar("WorkerType", bound=Worker)
Options = TypeVar("Options", bound=RunConfig)


@contextlib.contextmanager
def at_work(
    config: Options,
    make_worker: Callable[[Options, rundir.Run, contextlib.ExitStack, StopRequests], WorkerType],
) -> Iterator[Session[WorkerType]]:
    """A session of the run that the options name, new or resumed.

    Args:
        make_worker: what the method works with, a `Worker`.
    Raises:
        Misuse: an option, or what it names, cannot work; no run is left behind.
        KeyboardInterrupt: after Ctrl-C, once all is saved.
    """
    distributed.join()
    run = rundir.open_run(config)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stack.callback(phases.heading, "")
        stop = stack.enter_context(StopRequests())
        try:
            worker = make_worker(config, run, stack, stop)
        except BaseException as error:  # nothing was trained: the same command starts it again
            run.discard()
            if isinstance(error, KeyboardInterrupt):
                distributed.say("\nstopped before training began; the same command starts it again")
            raise
        session = Session(config, run, worker, stop)
        try:
            session.restore()
        except (TrainingError, OSError):  # a tracker, logs that were there before
            run.discard()
            raise
        stack.callback(session.logger.close)
        run.keep_tokenizer(worker.tokenizer)
        try:
            yield session
        except KeyboardInterrupt:
            session.save_what_is_done()
            distributed.say(
                f"\nstopped after step {session.completed_step}, saved. Go on with:\n"
                f"  {run.resume_command()}"
            )
            distributed.meet()
            raise
        except PLAYING_FAILED:
            if session.weights_are_done and session.completed_step > session.saved_step:
                session.save_what_is_done()
                distributed.say(
                    f"\nwhat failed left the weights as step {session.completed_step} made them, "
                    f"saved. Go on with:\n  {run.resume_command()}"
                )
            raise
        distributed.meet()


class Session(Generic[WorkerType]):
    """A run that is open: what it has done, how it is doing, what of it is on disk."""

    logger: MetricsLogger

    def __init__(
        self, config: RunConfig, run: rundir.Run, worker: WorkerType, stop: StopRequests
    ) -> None:
        self.config, self.run, self.worker, self.stop = config, run, worker, stop
        self.completed_step = self.saved_step = 0
        self.weights_are_done = False  # those of the last step, and none of the next
        self.failure: Exception | None = None  # of what came after the step had been learned
        # A hub's id is a folder of its cache by now: the models have been loaded.
        self.start = marks_of(Path(resolve_model(worker.start)))
        self.progress = Progress(
            run_path=run.path, start=worker.start, kl_controller=worker.kl_controller
        )
        c, held_out = config, len(worker.eval_tasks) * config.eval_samples
        evaluated = [
            n for n in range(1, c.steps + 1) if held_out and is_due(n, c.eval_every, c.steps)
        ]
        exploring, episodes = range(0), c.episodes_per_step
        if isinstance(c, IteratedConfig):
            exploring = range(1, c.steps + 1, c.steps_per_iteration)
            episodes = c.tasks_per_iteration * c.group_size
        self.time_left = TimeLeft(c.steps, evaluated, held_out / max(episodes, 1), exploring)

    def restore(self) -> None:
        """Open the logs; with --resume, go back to the newest checkpoint."""
        path, worker = self.run.path, self.worker
        loaded = None
        if self.config.resume:
            worker.rest()  # on a GPU the optimizer's state needs the sampler's memory
            loaded = checkpoint.load_newest(path, self.identity(), worker.parts())
            if self.config.plays:  # compared: what is evaluated and explored next is not
                worker.sync_probed(loaded[0] if loaded else 0, worker.openings)
        if loaded:
            step, state = loaded
            try:
                self.progress.load_state_dict(state)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                file = checkpoint.folder_of(path, step) / checkpoint.STATE
                lacks = f"it lacks {error}; resume with the version that wrote it, or start anew"
                problem = lacks if isinstance(error, KeyError) else error
                raise TrainingError(f"{file} is not what this version writes: {problem}") from None
            began = state.get("start") or self.start
            if worker.returns_to_start and self.start and began != self.start:
                raise TrainingError(
                    f"{worker.start} holds other weights than when this run began, and it needs "
                    "those: put them back, or start anew"
                )
            self.completed_step = self.saved_step = step
        resume_step = self.completed_step if self.config.resume else None
        try:
            if loaded:
                check = partial(require_steps, path / "metrics.jsonl", self.completed_step)
                distributed.first("resuming", check)
            names = self.config.log_to if self.run.writes else ()
            trackers = Trackers(names, path, asdict(self.config), resume_step)
            writes, worlds = self.run.writes, [env_name(n) for n in names_of(self.config.env)]
            columns = columns_of(self.config.method, worlds)
            if writes:
                truncate_log(path / ALARMS, self.completed_step)
                (path / ALARMS).touch()  # empty: no alarm so far
            self.logger = MetricsLogger(path, resume_step, writes, trackers, columns)
        except (LogError, TrackerError) as error:
            raise TrainingError(str(error)) from None
        if loaded:
            for timings in read_log(path / "timings.jsonl") if self.run.writes else []:
                self.time_left.note(timings)
            self.tidy_up()
            distributed.say(f"resumed after step {self.completed_step}")

    def steps_left(self) -> Iterator[int]:
        """Numbers of the steps to do, counted from 1; what is said in one begins with it."""
        for step in range(self.completed_step + 1, self.config.steps + 1):
            if self.is_good_enough():
                return
            left = self.time_left.after(step - 1)
            rest = "" if left is None else f", {phases.duration(left)} left"
            phases.heading(f"step {step}/{self.config.steps}{rest}")
            yield step

    def is_good_enough(self) -> bool:
        """Whether held-out success has reached --stop-at; then there is a checkpoint to show."""
        wanted, best = self.config.stop_at, self.progress.best
        if wanted is None or best is None or best < wanted:
            return False
        distributed.say(f"held-out success {best:.1%} has reached --stop-at {wanted:g}")
        self.save_what_is_done()
        return True

    # What may fail before a step learns, and after it

    @contextlib.contextmanager
    def before_learning(self) -> Iterator[None]:
        """What fails in here has changed no weight: `at_work` saves the steps before it, where all
        processes know of it."""
        try:
            yield
        except Exception as error:
            self.weights_are_done |= _is_known(error)
            raise

    @contextlib.contextmanager
    def after_learning(self) -> Iterator[None]:
        """What fails in here fails a step that has been learned: it is logged and saved, then the
        run ends (`finish_step`), and what is missing is made up for when it is resumed."""
        try:
            yield
        except (*PLAYING_FAILED, TrainingError) as error:
            if not _is_known(error):
                raise
            self.failure = error

    # Evaluation

    def evaluate_start(self) -> None:
        """The evaluation that a new run begins with, or that a resumed one lacks: it was cut short
        by Ctrl-C, or no checkpoint knows of it."""
        step, c = self.completed_step, self.config
        if is_due(step, c.eval_every, c.steps) and self.progress.evaluated_step != step:
            phases.heading(f"step {step}/{c.steps}")
            clock = Clock()
            metrics = self.evaluate(step)
            self.time_left.note({"time/eval_s": clock.total()})
            collapse = self.watch(step, metrics)
            if step:
                self.logger.amend(step, metrics)
                self.mark_best()
            if collapse:
                raise TrainingError(collapse)

    def evaluate_if_due(self, step: int, clock: Clock) -> dict[str, float]:
        """`evaluate`; one that Ctrl-C cuts short, or that fails, is made up for when the run is
        resumed: the step that has been learned is saved first (`finish_step`)."""
        is_next = is_due(step, self.config.eval_every, self.config.steps) and not self.failure
        if is_next and not self.stop.agreed():
            cut_short = contextlib.suppress(KeyboardInterrupt)
            with self.after_learning(), cut_short, clock("time/eval_s"):
                return self.evaluate(step)
        return {}

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out success of the policy as it is now; details go to eval/ and trajectories/."""
        if not self.worker.eval_tasks:
            return {}
        summary, trajectories = self.worker.evaluate(step)
        self.run.write_json(f"eval/step_{step:06d}.json", summary)
        self.run.write_trajectories(f"eval_{step:06d}", trajectories)
        rows: dict[str, Any] = {env_name(env): row for env, row in summary["worlds"].items()}
        lacking = {task.env for task in self.worker.eval_tasks} - rows.keys()
        if lacking:
            of = f" of {' and '.join(sorted(lacking))}" if rows else ""
            raise TrainingError(
                f"step {step}: every held-out trajectory{of} was lost: "
                f"{summary['lost']['last_error']}"
            )
        for world, row in rows.items():
            avg, where = row["avg"], f" in {world}" if len(rows) > 1 else ""
            distributed.say(
                f"step {step}: held-out success{where} {avg['value']:.1%} "
                f"[{avg['low']:.1%}, {avg['high']:.1%}], "
                f"{row['items']} tasks x {summary['samples']} samples"
            )
        solved = {world: row["avg"]["value"] for world, row in rows.items()}
        passed = {world: row["pass"]["value"] for world, row in rows.items()}
        returns = {world: row["return_mean"] for world, row in rows.items()}
        metrics = by_world("eval/avg", solved, fmean) | by_world("eval/pass", passed, fmean)
        metrics |= by_world("eval/return_mean", returns, fmean)
        self.progress.note_evaluation(step, metrics["eval/avg"])
        return metrics

    # The end of a step

    def finish_step(
        self, step: int, metrics: dict[str, Any], clock: Clock, log: RolloutLog | None = None
    ) -> None:
        """Log, save where that is due, show; and end the run where it must not go on.

        Raises:
            TrainingError: the run is collapsing, and --on-collapse stop.
            KeyboardInterrupt: Ctrl-C came during the step.
            Whatever failed `after_learning`.
        """
        # Logged before saving: a resume drops lines that it has no checkpoint for.
        self.logger.log(step, metrics)
        self.completed_step = step
        collapse = self.watch(step, metrics)
        is_best = self.progress.best_step == step
        failed = self.failure
        if is_due(step, self.config.save_every, self.config.steps) or is_best or collapse or failed:
            with clock("time/save_s"):
                self.save(step)
        timings = clock.values | {
            "time/step_s": clock.total(),
            "memory/peak_bytes": clock.peak_bytes(),
        }
        if log is not None:
            seconds = max(log.seconds, 1e-9)
            timings |= {
                "rollout/generated_tokens_per_s": log.generated_tokens / seconds,
                "rollout/engine_idle_share": log.engine_idle_s / seconds,
            }
        self.time_left.note(timings | {"step": step})
        self.logger.show_step(step, metrics, timings, self.config.steps, self.time_left.after(step))
        if collapse:
            raise TrainingError(collapse)
        if failed:
            distributed.say(
                f"\nstep {step} was learned and is saved; what came after it failed. Go on with:\n"
                f"  {self.run.resume_command()}"
            )
            raise failed
        if self.stop.agreed():
            raise KeyboardInterrupt

    def watch(self, step: int, metrics: dict[str, Any]) -> str | None:
        """Say what the sentinels see in a step; why the run must stop, if it must."""
        seen = {n: v for n, v in metrics.items() if n not in self.config.unwatched}
        alarms, collapse = self.progress.watch(step, seen, self.config.on_collapse)
        for alarm in alarms:
            distributed.say(f"{alarm.severity}: {alarm.message}")
            kept = {"severity": alarm.severity, "name": alarm.name, "text": alarm.message}
            self.run.add_line(ALARMS, {"step": step} | kept)
        return collapse

    # Checkpoints

    def save(self, step: int) -> None:
        """A checkpoint of the state after `step`. Collective."""
        state = self.identity() | {"start": self.start} | self.progress.state_dict()
        with phases.phase("saving"), self.worker.room_to_save():
            parts = self.worker.parts()
            checkpoint.save(self.run.path, step, self.worker.export, parts, state)
        self.saved_step = step
        self.tidy_up()

    def save_what_is_done(self) -> None:
        """A checkpoint unless there is one of the last completed step."""
        done = self.completed_step
        if done > self.saved_step or not checkpoint.steps_saved(self.run.path):
            self.save(done)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes it must have in common."""
        c = self.config
        return {"algorithm": c.name, "model": c.model, "lora_rank": c.lora_rank}

    def tidy_up(self) -> None:
        """What follows a checkpoint's rename, and what a kill in between has left to do."""

        def prune() -> None:
            checkpoint.prune(self.run.path, self.config.keep_last)

        self.mark_best()
        distributed.first("pruning", prune)

    def mark_best(self) -> None:
        """Point checkpoints/best at the step whose evaluation is the best, if it was saved."""

        def mark() -> None:
            best = self.progress.best_step
            if best in checkpoint.steps_saved(self.run.path):
                checkpoint.mark_best(self.run.path, best)

        distributed.first("saving", mark)


def _is_known(error: Exception) -> bool:
    """Whether all processes know of it, and can save together. Some errors come of what all have
    gathered: each of them raises the same."""
    gathered = isinstance(error, TooManyEnvFailures | SyncError | TrainingError)
    return gathered or distributed.world_size() == 1 or distributed.is_known_to_all(error)


def is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)
