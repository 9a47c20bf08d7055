"""`--log-to tensorboard wandb trackio`: the curves of a run in somebody's dashboard, as it goes.

A run's own record is metrics.jsonl and timings.jsonl; a tracker gets a copy, one row for a step,
and of a run nothing else but its options and its folder's name: no code, no git state, no host, no
console. (wandb adds the time, its own and Python's version, and the kind of system.)

    tensorboard   <run>/tensorboard/      tensorboard --logdir runs
    wandb         <run>/wandb/, and the service unless WANDB_MODE=offline
    trackio       trackio's own folder (TRACKIO_DIR), or where TRACKIO_SPACE_ID says

A resumed run goes on with the same curve. What each tracker has got is kept in <run>/trackers.json;
steps that a crash has taken back are not sent a second time (TensorBoard forgets them itself), and
steps it lacks are sent from the log: also all of them, where `--log-to` comes with `--resume`.

The packages are optional, and imported when they are asked for. A tracker that fails in mid-run is
left out, in one line: no curve is worth a training run.

Read next: reporting/metrics.py, which sends.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from reporting.logs import read_log
from run.files import write_json

PROJECT = "agentgym-rl"

Values = Mapping[str, Any]


class TrackerError(RuntimeError):
    """A tracker does not start; one line says why, and what to do."""


class Tracker(Protocol):
    """One row of numbers for a step, drawn over `step`."""

    def send(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files; those of steps after `resume_step` are taken back."""

    def __init__(self, run_dir: Path, run_id: str, config: Values, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        self.writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", 0)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases. Steps are a column of their own: wandb's count of rows only ever grows."""

    def __init__(self, run_dir: Path, run_id: str, config: Values, resume_step: int | None) -> None:
        import wandb

        settings = wandb.Settings(
            host="hidden",
            disable_git=True,
            disable_code=True,
            save_code=False,
            console="off",
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self.run = wandb.init(
            project=PROJECT,
            name=run_dir.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """trackio, by default in files on this machine."""

    def __init__(self, run_dir: Path, run_id: str, config: Values, resume_step: int | None) -> None:
        import trackio

        self.run = trackio.init(
            project=PROJECT,
            name=f"{run_dir.name}-{run_id}",
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Path, str, Values, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Trackers:
    """The trackers of one run; none for the processes that do not write.

    Raises:
        TrackerError: one does not start.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        config: Values | None = None,
        resume_step: int | None = None,
    ) -> None:
        self.path = run_dir / "trackers.json"
        self.trackers: dict[str, Tracker] = {}
        if not names:
            return
        try:
            known = json.loads(self.path.read_text()) if self.path.exists() else {"sent": {}}
            self.run_id: str = known.get("id", secrets.token_hex(4))
            self.sent: dict[str, int] = dict(known["sent"])  # name -> the last step it has got
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrackerError(f"{self.path} is broken, remove it: {_line(error)}") from None
        options = json.loads(json.dumps(config or {}, default=str))
        rows = _rows(run_dir, resume_step) if resume_step else {}
        for name in names:
            try:
                self.trackers[name] = TRACKERS[name](run_dir, self.run_id, options, resume_step)
            except Exception as error:  # packages of others, which raise what they like
                self.close()
                raise TrackerError(f"--log-to {name} does not start: {_line(error)}") from error
            if name == "tensorboard" and resume_step is not None:
                self.sent[name] = min(self.sent.get(name, 0), resume_step)
        self._note()
        for step, values in rows.items():
            self.send(step, values)

    def send(self, step: int, values: Values) -> None:
        """A step's row, to the trackers that have not got it; what is no number is left out."""
        self._each(step, values, [name for name in self.trackers if self.sent.get(name, 0) < step])

    def amend(self, step: int, values: Values) -> None:
        """More of a step that was sent."""
        self._each(step, values, list(self.trackers))

    def close(self) -> None:
        for name in list(self.trackers):
            tracker = self.trackers.pop(name)
            try:
                tracker.close()
            except Exception as error:
                print(f"--log-to {name} did not close: {_line(error)}", flush=True)

    def _each(self, step: int, values: Values, names: Sequence[str]) -> None:
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and k != "step"}
        for name in names:
            try:
                self.trackers[name].send(step, numbers)
                self.sent[name] = max(step, self.sent.get(name, 0))
            except Exception as error:
                print(f"--log-to {name} failed and is left out: {_line(error)}", flush=True)
                del self.trackers[name]
        if names:
            self._note()

    def _note(self) -> None:
        write_json(self.path, {"id": self.run_id, "sent": self.sent})


def _rows(run_dir: Path, last_step: int) -> dict[int, dict[str, Any]]:
    """step -> what the logs say of it."""
    rows: dict[int, dict[str, Any]] = {}
    for name in ("metrics.jsonl", "timings.jsonl"):
        for row in read_log(run_dir / name) if (run_dir / name).exists() else []:
            if row["step"] <= last_step:
                rows.setdefault(row["step"], {}).update(row)
    return rows


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
