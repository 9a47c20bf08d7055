"""Trackers send a run's metrics to a dashboard: `--log-to tensorboard wandb trackio`.

A tracker receives each step's row, the run's options and the name of its folder. It receives no
code, git state, host name or console output. A resumed run reads its id from <run>/trackers.json
and continues the same curve. If a tracker fails during the run, the run prints one line and
continues without it. The packages are optional.

    tensorboard   <run>/tensorboard/; view it with: tensorboard --logdir runs
    wandb         <run>/wandb/, and the online service unless WANDB_MODE=offline
    trackio       trackio's own folder (TRACKIO_DIR), or the space TRACKIO_SPACE_ID

Read next: reporting/metrics.py, which sends the rows.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from run.errors import RunFailed, one_line
from run.files import write_json

PROJECT = "agentgym-rl"
Values = Mapping[str, Any]
Tracker = tuple[Callable[[int, Values], None], Callable[[], None]]  # send, close


class TrackerError(RunFailed):
    """A tracker cannot start; the message says why."""


def start(
    name: str, run_dir: Path, run_id: str, config: Values, resume_step: int | None
) -> Tracker:
    """Start one of the three trackers; any exception from its library is passed on."""
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
        run.define_metric("*", step_metric="step")  # wandb's own counter cannot go back on resume
        return lambda step, values: run.log({"step": step, **values}), run.finish
    import trackio

    disabled = dict.fromkeys(("embed", "auto_log_cpu", "auto_log_gpu"), False)
    run = trackio.init(name=f"{run_dir.name}-{run_id}", **common, **disabled)
    return lambda step, values: run.log(dict(values), step=step), run.finish


class Trackers:
    """The trackers of one run. Raises TrackerError if one cannot start."""

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
            except Exception as error:  # these packages can raise anything
                self.close()
                raise TrackerError(f"--log-to {name} cannot start: {one_line(error)}") from error

    def send(self, step: int, values: Values) -> None:
        """Send the numbers in a step's row. A later call can add values to the same step."""
        numbers = {name: v for name, v in values.items() if isinstance(v, int | float)}
        for name, (send, _) in list(self.trackers.items()):
            try:
                send(step, numbers)
            except Exception as error:
                print(f"--log-to {name} failed and is now off: {one_line(error)}", flush=True)
                del self.trackers[name]

    def close(self) -> None:
        while self.trackers:
            name, (_, close) = self.trackers.popitem()
            try:
                close()
            except Exception as error:
                print(f"--log-to {name} could not be closed: {one_line(error)}", flush=True)
