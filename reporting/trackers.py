"""`--log-to tensorboard wandb trackio`: the curves of a run in a dashboard, while it runs.

A tracker gets each step's row, the run's options and the name of its folder, and nothing else: no
code, git state, host or console. A resumed run continues the same curve, under the id in
<run>/trackers.json. A tracker that fails during the run is left out, with one line. The packages
are optional.

    tensorboard   <run>/tensorboard/      tensorboard --logdir runs
    wandb         <run>/wandb/, and the service unless WANDB_MODE=offline
    trackio       trackio's own folder (TRACKIO_DIR), or where TRACKIO_SPACE_ID says

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
Tracker = tuple[Callable[[int, Values], None], Callable[[], None]]  # send, close


class TrackerError(RuntimeError):
    """A tracker does not start; the message says why."""


def start(
    name: str, run_dir: Path, run_id: str, config: Values, resume_step: int | None
) -> Tracker:
    """Start one of the three libraries; raises whatever they raise."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```", 0)

        def send(step: int, values: Values) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return send, writer.close
    common = {"project": PROJECT, "config": dict(config), "resume": "allow"}
    if name == "wandb":
        import wandb

        off = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats")
        settings = wandb.Settings(
            host="hidden",
            console="off",
            save_code=False,
            x_save_requirements=False,
            x_disable_machine_info=True,
            **dict.fromkeys(off, True),
        )
        run = wandb.init(
            name=run_dir.name, id=run_id, dir=str(run_dir), settings=settings, **common
        )
        run.define_metric("*", step_metric="step")  # wandb's own count of rows only ever grows
        return lambda step, values: run.log({"step": step, **values}), run.finish
    import trackio

    without = dict.fromkeys(("embed", "auto_log_cpu", "auto_log_gpu"), False)
    run = trackio.init(name=f"{run_dir.name}-{run_id}", **common, **without)
    return lambda step, values: run.log(dict(values), step=step), run.finish


class Trackers:
    """The trackers of one run. Raises: TrackerError if one does not start."""

    def __init__(
        self, names: Sequence[str], run_dir: Path, config: Values, resume_step: int | None = None
    ) -> None:
        self.trackers: dict[str, Tracker] = {}
        path = run_dir / "trackers.json"
        if names and not path.exists():
            write_json(path, {"id": secrets.token_hex(4)})
        options = json.loads(json.dumps(config, default=str))
        for name in names:
            try:
                run_id = json.loads(path.read_text())["id"]
                self.trackers[name] = start(name, run_dir, run_id, options, resume_step)
            except Exception as error:  # others' packages may raise anything
                self.close()
                raise TrackerError(f"--log-to {name} does not start: {_line(error)}") from error

    def send(self, step: int, values: Values) -> None:
        """The row of a step, or more of it; only numbers are sent."""
        numbers = {name: v for name, v in values.items() if isinstance(v, int | float)}
        for name, (send, _) in list(self.trackers.items()):
            try:
                send(step, numbers)
            except Exception as error:
                print(f"--log-to {name} failed and is left out: {_line(error)}", flush=True)
                del self.trackers[name]

    def close(self) -> None:
        while self.trackers:
            name, (_, close) = self.trackers.popitem()
            try:
                close()
            except Exception as error:
                print(f"--log-to {name} did not close: {_line(error)}", flush=True)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
