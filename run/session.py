"""A session carries a run from start to end: resume, log, evaluate, save and stop safely.

The four programs define what a training step does; this file turns steps into a run:

    open       lock the directory, handle Ctrl-C, SIGTERM and SIGHUP, make a `Worker`
    restore    with --resume: load the newest checkpoint and cut the logs back to it
    each step  evaluate when due, log, check for collapse, save when due
    end        close; after Ctrl-C or an error, save first and print the command to resume

Read next: `run/checkpoint.py`. Lesson: tutorials/07_checkpoint_and_resume.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, Generic, TypeVar

from safetensors import SafetensorError

from config import RunConfig, notes, read_command_line
from envs import env_name, names_of
from reporting.logs import ALARMS, read_log, require_steps, truncate_log
from reporting.metrics import MetricsLogger, by_env
from reporting.sentinels import Sentinels
from reporting.trackers import Trackers
from run import checkpoint, progress, rundir
from run.clock import Clock, clear_frames
from run.errors import CheckpointError, Misuse, RunFailed, TrainingError, print_error
from run.files import weights_digest
from run.worker import Worker
from scale import distributed
from scale.memory import check_memory

NOT_TRAINING = ("time/eval_s", "time/save_s")  # phases that time/cpu_s leaves out
EVALUATED = ("best", "best_step", "evaluated_step")  # attributes of a session, saved and restored
WorkerType = TypeVar("WorkerType", bound=Worker)
Options = TypeVar("Options", bound=RunConfig)


@contextlib.contextmanager
def open_session(
    config: Options,
    make_worker: Callable[[Options, rundir.Run, contextlib.ExitStack, StopRequests], WorkerType],
) -> Iterator[Session[WorkerType]]:
    """Start or resume the run that the options describe; yields its session.

    Raises:
        Misuse: an option, or a file that it names, cannot work; no run directory is left behind.
        KeyboardInterrupt: Ctrl-C was pressed; everything is saved.
    """
    check_memory(config)
    for note in notes(config):
        distributed.say(f"note: {note}")
    distributed.join()
    run = rundir.open_run(config)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stack.callback(progress.heading, "")
        stop = stack.enter_context(StopRequests())
        try:
            worker = make_worker(config, run, stack, stop)
            session = Session(config, run, worker, stop)
            session.restore()
        except BaseException as error:
            run.discard()
            if isinstance(error, KeyboardInterrupt):
                distributed.say("\nstopped before training began; run the same command to restart")
            raise
        stack.callback(session.logger.close)
        run.save_tokenizer(worker.tokenizer)
        try:
            yield session
        except BaseException as error:
            session.save_before_exit(error)
            if isinstance(error, KeyboardInterrupt):
                distributed.barrier()
            raise
        distributed.barrier()


class Session(Generic[WorkerType]):
    """An open run: its worker, its logs, its progress and its checkpoints.

    Attributes:
        completed_step, saved_step: the last step that was logged, and the last with a checkpoint.
        best, best_step: the best held-out success (0..1) and its step. If sft.py never plays,
            `best` is minus the held-out loss.
        evaluated_step: step of the last evaluation counted in `best` and the sentinels.
        failure: an error to raise after the current step is saved (`saving_on_failure`).
    """

    logger: MetricsLogger

    def __init__(
        self, config: RunConfig, run: rundir.Run, worker: WorkerType, stop: StopRequests
    ) -> None:
        self.config, self.run, self.worker, self.stop = config, run, worker, stop
        self.completed_step = self.saved_step = 0
        self.failure: BaseException | None = None
        self.sentinels = Sentinels()
        self.best: float | None = None
        self.best_step: int | None = None
        self.evaluated_step: int | None = None
        self.frozen: dict[str, str] = {}  # digests of the weights that a resume reads again
        every = config.eval_every if worker.eval_tasks else 0
        eval_steps = [n for n in range(1, config.steps + 1) if is_due(n, every, config.steps)]
        self.time_left = progress.TimeLeft(config.steps, eval_steps)

    def restore(self) -> None:
        """Open the logs; with --resume, go back to the newest checkpoint first. Then sync the
        sampler, which also wakes it, so that a sync that cannot work is noticed before any step."""
        c, path, writes = self.config, self.run.path, self.run.writes
        frozen = self.worker.frozen_weights.items()
        self.frozen = {role: weights_digest(Path(folder)) for role, folder in frozen}
        if c.resume:
            self.load_checkpoint()
        if c.plays:
            self.worker.sync(self.completed_step)
        resume_step = self.completed_step if c.resume else None
        columns = progress.columns_of(c.method, [env_name(name) for name in names_of(c.env)])

        def open_logs() -> None:
            require_steps(path / "metrics.jsonl", self.completed_step)
            self.run.drop_after(self.completed_step)
            trackers = Trackers(c.log_to, path, asdict(c), resume_step)
            truncate_log(path / ALARMS, self.completed_step)
            (path / ALARMS).touch()  # an empty file: no alarms yet
            self.logger = MetricsLogger(path, resume_step, True, trackers, columns)

        self.logger = MetricsLogger(path, writes=False)
        distributed.run_on_rank_0("opening the logs", open_logs)
        if c.resume:
            for timings in read_log(path / "timings.jsonl") if writes else ():
                self.time_left.note(timings)
            self.tidy_up()
            distributed.say(f"resumed after step {self.completed_step}")
        self.note_completed(self.completed_step)

    def load_checkpoint(self) -> None:
        """Load the newest checkpoint, if there is one."""
        worker = self.worker
        worker.sleep_sampler()  # on a GPU the optimizer's state needs the sampler's memory
        if loaded := checkpoint.load_newest(self.run.path, self.identity(), worker.parts()):
            self.completed_step, state = loaded
            self.saved_step = self.completed_step
            try:
                self.load_state_dict(state)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise TrainingError(
                    f"the checkpoint of step {self.completed_step} in {self.run.path} was saved "
                    f"by another version of this program ({error!r}): resume with that version, "
                    "or start a new run"
                ) from error
            saved = state.get("frozen", self.frozen)  # older checkpoints have none
            for role, digest in self.frozen.items():
                if digest and saved.get(role) != digest:
                    folder = worker.frozen_weights[role]
                    raise TrainingError(
                        f"the weights in {folder} have changed since this run began, but "
                        "resuming needs the original ones: put them back, or start a new run"
                    )

    def steps_left(self) -> Iterator[int]:
        """The remaining steps, counted from 1. Stops when held-out success reaches --stop-at."""
        stop_at = self.config.stop_at
        self.note_completed(self.completed_step)  # it may have been evaluated since
        for step in range(self.completed_step + 1, self.config.steps + 1):
            if stop_at is not None and self.best is not None and self.best >= stop_at:
                distributed.say(f"held-out success {self.best:.1%} has reached --stop-at {stop_at}")
                self.save_completed()
                return
            seconds = self.time_left.after(step - 1)
            time_left = "" if seconds is None else f", {progress.duration(seconds)} left"
            progress.heading(f"step {step}/{self.config.steps}{time_left}")
            yield step

    def note_completed(self, step: int) -> None:
        """Remember the session's state after `step`. Until the weights change, a checkpoint of this
        state can be saved at any time."""
        self.completed_step, self.completed_state = step, self.state_dict()
        self.worker.has_new_weights = False

    @contextlib.contextmanager
    def saving_on_failure(self) -> Iterator[None]:
        """Put this around work after which the weights can be new, so that no update is lost.

        With new weights, an error is kept until `finish_step` has logged and saved the step, and
        the resumed run goes on after it. With the old weights, the error is raised at once:
        `open_session` saves the completed steps, and the resumed run repeats this one.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if not self.worker.has_new_weights or not distributed.is_known_to_all(error):
                raise
            clear_frames(error)  # of a failed pass
            self.failure = error

    # Evaluation

    def evaluate_start(self) -> None:
        """Evaluate before the first step, or repeat an evaluation that was interrupted."""
        step, c = self.completed_step, self.config
        if not is_due(step, c.eval_every, c.steps) or self.evaluated_step == step:
            return
        progress.heading(f"step {step}/{c.steps}")
        clock = Clock()
        metrics = self.evaluate(step)
        self.time_left.note({"time/eval_s": clock.total()})
        collapse = self.watch(step, metrics)
        if step:
            self.logger.amend(step, metrics)
            self.tidy_up()
        if collapse:
            raise TrainingError(collapse)

    def evaluate_if_due(self, step: int, clock: Clock) -> dict[str, float]:
        """`evaluate`; if Ctrl-C or a failure interrupts it, the resumed run evaluates again."""
        is_eval_step = is_due(step, self.config.eval_every, self.config.steps)
        if is_eval_step and not self.failure and not self.stop.agreed():
            interruptible = contextlib.suppress(KeyboardInterrupt)
            with self.saving_on_failure(), interruptible, clock("time/eval_s"):
                return self.evaluate(step)
        return {}

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure the current policy on held-out tasks; details go to eval/ and trajectories/.
        Returns the metrics at the first of --eval-temperatures."""
        if not self.worker.eval_tasks:
            return {}
        first, *others = self.config.evaluation_temperatures
        rows = self.measure(step, first)
        for temperature in others:
            self.measure(step, temperature, f"temperature_{temperature:g}")
        metrics = {
            **by_env("eval/avg", {env: row["avg"]["value"] for env, row in rows.items()}, fmean),
            **by_env("eval/pass", {env: row["pass"]["value"] for env, row in rows.items()}, fmean),
            **by_env("eval/return_mean", {e: row["return_mean"] for e, row in rows.items()}, fmean),
        }
        self.note_evaluation(step, metrics["eval/avg"])
        return metrics

    def measure(self, step: int, temperature: float, name: str = "") -> dict[str, dict[str, Any]]:
        """Play the held-out tasks at one temperature and write the results, in files with this
        name if it is not the first temperature. Returns the row of each environment."""
        folder, suffix = (f"eval/{name}", f"_{name}") if name else ("eval", "")
        summary, trajectories = self.worker.evaluate(step, temperature)
        self.run.write_json(f"{folder}/step_{step:06d}.json", summary)
        self.run.write_trajectories(f"eval_{step:06d}{suffix}", trajectories)
        rows = {env_name(env): row for env, row in summary["worlds"].items()}
        # Checked per environment, so that losing a small one is noticed.
        if missing := {task.env for task in self.worker.eval_tasks} - rows.keys():
            raise TrainingError(
                f"step {step}: all held-out trajectories of {' and '.join(sorted(missing))} were "
                f"lost; the last error is: {summary['lost']['last_error']}"
            )
        for env, row in rows.items():
            avg, in_env = row["avg"], f" in {env}" if len(rows) > 1 else ""
            samples = f"{summary['samples']} sample{'s' * (summary['samples'] > 1)}"
            samples += f" at temperature {temperature:g}" if name else ""
            distributed.say(
                f"step {step}: held-out success{in_env} {avg['value']:.1%} "
                f"[{avg['low']:.1%}, {avg['high']:.1%}], {row['items']} tasks x {samples}"
            )
        return rows

    def note_evaluation(self, step: int, score: float) -> None:
        """Record the score after `step`; an equal score does not replace the best."""
        self.evaluated_step = step
        if self.best is None or score > self.best:
            self.best, self.best_step = score, step

    # The end of a step

    def finish_step(self, step: int, metrics: dict[str, Any], clock: Clock) -> None:
        """Log the step, save when due and print its row; raise if the run must end here.

        Raises:
            TrainingError: the run is collapsing, with --on-collapse stop.
            KeyboardInterrupt: Ctrl-C was pressed during the step.
            Exception: something failed after the step had changed the weights.
        """
        # Log before saving: a resumed run drops log lines from after its checkpoint.
        self.logger.log(step, metrics)
        collapse = self.watch(step, metrics)
        self.note_completed(step)
        is_save_step = is_due(step, self.config.save_every, self.config.steps)
        if is_save_step or self.best_step == step or collapse or self.failure:
            with clock("time/save_s"):
                self.save()
        timings = clock.values | {
            "time/step_s": clock.total(),
            "time/cpu_s": sum(s for phase, s in clock.cpu_s.items() if phase not in NOT_TRAINING),
            "memory/peak_bytes": clock.peak_bytes(),
        }
        self.time_left.note(timings)
        self.logger.show_step(step, metrics, timings, self.config.steps, self.time_left.after(step))
        if collapse:
            raise TrainingError(collapse)
        if self.failure:
            raise self.failure
        if self.stop.agreed():
            raise KeyboardInterrupt

    def watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Check a step for collapse and print the alarms. Returns the reason to stop the run, or
        None."""
        relevant = {n: v for n, v in metrics.items() if n not in self.config.ignored_by_sentinels}
        alarms = self.sentinels.check(step, relevant)  # even if off: --resume can switch them on
        if self.config.on_collapse == "off":
            return None
        for alarm in alarms:
            distributed.say(f"{alarm.severity}: {alarm.message}")
            row = {"severity": alarm.severity, "name": alarm.name, "text": alarm.message}
            self.run.add_line(ALARMS, {"step": step} | row)
        stops = [alarm.message for alarm in alarms if alarm.severity == "stop"]
        if not stops or self.config.on_collapse == "warn":
            return None
        best = "no checkpoint is known to be better than the initial model"
        if self.best_step:
            folder = f"{self.run.path}/checkpoints/best"
            best = f"the best checkpoint is {folder} (step {self.best_step})"
        return (
            f"stopped after step {step} because the run is collapsing: {stops[0]}; {best}; "
            "to continue anyway, use --resume with --on-collapse warn"
        )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The session's own state, saved as JSON beside weights and optimizers."""
        state = {name: part.state_dict() for name, part in self.worker.stateful.items()}
        state["sentinels"] = self.sentinels.state_dict()
        return state | {name: getattr(self, name) for name in ("frozen", *EVALUATED)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self.worker.stateful.items():
            part.load_state_dict(state[name])
        self.sentinels.load_state_dict(state["sentinels"])
        for name in EVALUATED:
            setattr(self, name, state[name])

    def identity(self) -> dict[str, Any]:
        """Options that must be the same in a checkpoint and in the run that resumes it."""
        c = self.config
        return {"algorithm": c.name, "model": c.model, "lora_rank": c.lora_rank}

    def save(self) -> None:
        """Save a checkpoint of the last completed step. Collective."""
        worker, step = self.worker, self.completed_step
        state = self.identity() | self.completed_state
        with progress.phase("saving"):
            checkpoint.save(self.run.path, step, worker.export, worker.parts(), state)
        self.saved_step = step
        self.tidy_up()

    def save_completed(self) -> None:
        """Save a checkpoint of the last completed step, unless it has one already."""
        if self.completed_step > self.saved_step or not checkpoint.steps_saved(self.run.path):
            self.save()

    def save_before_exit(self, error: BaseException) -> None:
        """Save the completed steps, if the weights are theirs, and print how to resume."""
        has_steps = self.completed_step or isinstance(error, KeyboardInterrupt)
        if not has_steps or not distributed.is_known_to_all(error):  # saving is collective
            return
        clear_frames(error)
        if not self.worker.has_new_weights and not isinstance(error, CheckpointError):
            self.save_completed()
        saved = f"the last checkpoint is of step {self.saved_step}"
        if self.saved_step == self.completed_step:
            saved = "a checkpoint is saved"
        distributed.say(
            f"\nstopped after step {self.completed_step}; {saved}. "
            f"Resume with:\n  {self.run.resume_command()}"
        )

    def tidy_up(self) -> None:
        """Point checkpoints/best at the best step, and delete old checkpoints."""

        def work() -> None:
            try:
                if self.best_step in checkpoint.steps_saved(self.run.path):
                    checkpoint.mark_best(self.run.path, self.best_step)
                else:  # a link that remains would name the next checkpoint of its step
                    (self.run.path / "checkpoints" / "best").unlink(missing_ok=True)
                checkpoint.prune(self.run.path, self.config.keep_last)
            except OSError as error:  # for example, another program has opened an old checkpoint
                distributed.say(f"note: old checkpoints could not be deleted: {error}")

        distributed.run_on_rank_0("tidying up checkpoints", work)


def is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)


# ------------------------------------------------------------------------ Ctrl-C, a closed terminal


class StopRequests:
    """Handles Ctrl-C, SIGTERM (sent by job schedulers) and SIGHUP (sent when a terminal closes) at
    points where nothing is lost. Under `nohup`, SIGHUP stays ignored.

        with stop.allowed():    no weights change here: KeyboardInterrupt is raised at once
            roll_out()
        update()                the request is remembered
        if stop.agreed():       all processes get the same answer
            save()

    A second Ctrl-C exits at once, without saving; the other signals often come twice. A launcher
    passes Ctrl-C on, so its processes get it twice; under a launcher, two signals within a few
    seconds count as one request.
    """

    SAME_REQUEST_S = 3.0

    def __init__(self) -> None:
        self.is_requested = False
        self._is_allowed = False
        self._request_s = 0.0
        self._is_launched = "WORLD_SIZE" in os.environ

    def __enter__(self) -> StopRequests:
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        self._old_handlers = {s: signal.signal(s, self._on_signal) for s in signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Put this around work that can be interrupted."""
        if self.is_requested:
            raise KeyboardInterrupt
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def agreed(self) -> bool:
        """Whether any process has been asked to stop. Collective."""
        if any(distributed.gather(self.is_requested)) and not self.is_requested:
            # This process's signal may still be on its way.
            self.is_requested, self._request_s = True, time.monotonic()
        return self.is_requested

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.is_requested:
            is_recent = time.monotonic() - self._request_s < self.SAME_REQUEST_S
            if signum != signal.SIGINT or (is_recent and self._is_launched):
                return
            self._write("stopped without saving")
            os._exit(130)
        self.is_requested, self._request_s = True, time.monotonic()
        if distributed.rank() == 0:
            self._write("stopping; press Ctrl-C again to exit without saving")
        if self._is_allowed:
            raise KeyboardInterrupt

    def _write(self, line: str) -> None:
        """Print on stderr. In a signal handler, `print` could interrupt another `print`."""
        with contextlib.suppress(OSError):  # the terminal is closed
            os.write(sys.stderr.fileno(), f"\n{line}\n".encode())


# --------------------------------------------------------------------------------- the command line


@progress.output_that_can_close()
def command_line(
    argv: Sequence[str] | None,
    summary: str,
    kind: type[Options],
    train: Callable[[Options], rundir.Run],
) -> int:
    """Parse the command line, train and print where the results are; returns the exit code
    (run/errors.py)."""
    prog = kind.program
    try:
        config, remarks = read_command_line(argv, kind, summary)
        for remark in remarks:
            distributed.say(f"note: {remark}")
        run = train(config)
        distributed.say(where_to_look(run, config))
        distributed.leave()
        return 0
    except KeyboardInterrupt:
        distributed.leave()
        return 130
    except (Misuse, RunFailed, OSError, SafetensorError) as error:  # the last two: a full disk
        problem: Exception = error
    except RuntimeError as error:
        if not distributed.is_lost_contact(error):
            raise
        problem = RuntimeError(
            "lost contact with another process; it or its launcher prints why (exitcode -9: most "
            "likely out of memory)"
        )
    code = 2 if isinstance(problem, Misuse) else 1
    if distributed.rank() == 0:
        print_error(prog, problem)
    elif not distributed.is_known_to_all(problem):
        time.sleep(3)  # if rank 0 fails too, the launcher has ended this process by then
        print_error(prog, f"rank {distributed.rank()}: {problem}")
    if distributed.world_size() > 1:
        os._exit(code)  # an orderly close could hang if other processes are gone
    return code


def where_to_look(run: rundir.Run, config: RunConfig) -> str:
    """The last lines of a run: its first and last returns, and where to find the results."""
    env, *other_envs = names_of(config.env)
    # evaluate.py measures one environment at a time.
    env_option = f" --env {env}" if other_envs or not config.needs_environment else ""
    rows, path = read_log(run.path / "metrics.jsonl"), rundir.shell_word(run.path)
    means = [row["train/return_mean"] for row in rows if row.get("train/return_mean") is not None]
    has_played = any(run.path.glob("trajectories/*.jsonl"))
    lines = {
        "mean return": first_and_last(means),
        "curve": run.path / "reward.png",
        "episodes": f"{rundir.command_of('replay.py')} {path}" if has_played else None,
        "metrics": run.path / "metrics.jsonl",
        "evaluate": f"{rundir.command_of('evaluate.py')} --run {path}{env_option}",
    }
    words = [f"  {name:<14}{text}" for name, text in lines.items() if text]
    return "\n".join([f"done: {run.path}", *words])


def first_and_last(means: Sequence[float]) -> str | None:
    """
    >>> first_and_last([0.25, 0.5, 0.75, 0.75])
    '0.375 in the first 2 steps, 0.750 in the last 2'
    >>> first_and_last([0.25, 0.5])
    '0.250 in the first step, 0.500 in the last'
    """
    count = min(5, len(means) // 2)
    if not count:
        return None
    if count == 1:
        return f"{means[0]:.3f} in the first step, {means[-1]:.3f} in the last"
    first, last = fmean(means[:count]), fmean(means[-count:])
    return f"{first:.3f} in the first {count} steps, {last:.3f} in the last {count}"
