"""`--log-to tensorboard wandb trackio`: the curves of a run in a dashboard, while it runs.

A run's own record is metrics.jsonl and timings.jsonl. A tracker gets a copy, one row per step, with
the run's options and the name of its folder, and nothing else: no code, git state, host or console.

    tensorboard   <run>/tensorboard/      tensorboard --logdir runs
    wandb         <run>/wandb/, and the service unless WANDB_MODE=offline
    trackio       trackio's own folder (TRACKIO_DIR), or where TRACKIO_SPACE_ID says

A resumed run continues the same curve: <run>/trackers.json keeps the run's id and the last step
that each tracker has, so that steps which a crash has taken back are not sent twice (TensorBoard
forgets them itself). The packages are optional. A tracker that fails during the run is left out,
with one line: no curve is worth a training run.

Read next: reporting/metrics.py, which sends.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from run.files import write_json

PROJECT = "agentgym-rl"

Values = Mapping[str, Any]
Send = Callable[[int, Values], None]


class TrackerError(RuntimeError):
    """A tracker does not start; the message says why."""


def start_tensorboard(
    run_dir: Path, run_id: str, config: Values, resume_step: int | None
) -> tuple[Send, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    purge = None if resume_step is None else resume_step + 1
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
    writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", 0)

    def send(step: int, values: Values) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send, writer.close


def start_wandb(
    run_dir: Path, run_id: str, config: Values, resume_step: int | None
) -> tuple[Send, Callable[[], None]]:
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
    about = {"project": PROJECT, "name": run_dir.name, "id": run_id, "config": dict(config)}
    run = wandb.init(**about, resume="allow", dir=str(run_dir), settings=settings)
    run.define_metric("*", step_metric="step")  # wandb's own count of rows only ever grows
    return lambda step, values: run.log({"step": step, **values}), run.finish


def start_trackio(
    run_dir: Path, run_id: str, config: Values, resume_step: int | None
) -> tuple[Send, Callable[[], None]]:
    import trackio

    about = {"project": PROJECT, "name": f"{run_dir.name}-{run_id}", "config": dict(config)}
    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    run = trackio.init(**about, **quiet, resume="allow")
    return lambda step, values: run.log(dict(values), step=step), run.finish


START = {"tensorboard": start_tensorboard, "wandb": start_wandb, "trackio": start_trackio}


class Trackers:
    """The trackers of one run; none for the processes that do not write.

    Raises: TrackerError if one does not start.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        config: Values | None = None,
        resume_step: int | None = None,
    ) -> None:
        self.path = run_dir / "trackers.json"
        self.trackers: dict[str, tuple[Send, Callable[[], None]]] = {}
        if not names:
            return
        saved = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.run_id: str = saved.get("id", secrets.token_hex(4))
        self.sent: dict[str, int] = saved.get("sent", {})  # name -> the last step that it has
        options = json.loads(json.dumps(config or {}, default=str))
        for name in names:
            try:
                self.trackers[name] = START[name](run_dir, self.run_id, options, resume_step)
            except Exception as error:  # others' packages may raise anything
                self.close()
                raise TrackerError(f"--log-to {name} does not start: {_line(error)}") from error
        if resume_step is not None and "tensorboard" in self.sent:  # it has forgotten later steps
            self.sent["tensorboard"] = min(self.sent["tensorboard"], resume_step)
        self._save()

    def send(self, step: int, values: Values) -> None:
        """The row of a step, to the trackers that do not have it yet; only numbers are sent."""
        self._send(step, values, [n for n in self.trackers if self.sent.get(n, 0) < step])

    def amend(self, step: int, values: Values) -> None:
        """More values of a step that was sent."""
        self._send(step, values, list(self.trackers))

    def close(self) -> None:
        while self.trackers:
            name, (_, close) = self.trackers.popitem()
            try:
                close()
            except Exception as error:
                print(f"--log-to {name} did not close: {_line(error)}", flush=True)

    def _send(self, step: int, values: Values, names: Sequence[str]) -> None:
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float)) and k != "step"}
        for name in names:
            try:
                self.trackers[name][0](step, numbers)
                self.sent[name] = max(step, self.sent.get(name, 0))
            except Exception as error:
                print(f"--log-to {name} failed and is left out: {_line(error)}", flush=True)
                del self.trackers[name]
        if names:
            self._save()

    def _save(self) -> None:
        write_json(self.path, {"id": self.run_id, "sent": self.sent})


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
