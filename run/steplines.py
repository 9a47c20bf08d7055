"""How a run is doing: its best evaluation, what the sentinels remember, the steered KL coefficient.

What a run knows of itself beside its weights, and must know again when it is resumed:

    best, best_step    the best held-out success (0..1), and after how many steps it was measured;
                       of sft.py that plays nothing, minus the held-out loss
    evaluated_step     the last evaluation that the two, and the sentinels, know of
    sentinels          the past that a step is judged by (reporting/sentinels.py)
    kl_controller      β of the KL penalty (losses.py)

Read next: reporting/sentinels.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from losses import FixedKLController
from reporting.sentinels import Alarm, Sentinels


@dataclass
class Progress:
    """Fed with every step's metrics and every evaluation, in order; its state is JSON.

    Attributes:
        run_path, start: the run's folder and the model it began with, for the messages.
        kl_controller: fixed or adaptive; None: the method has none.
    """

    run_path: Path
    start: str
    kl_controller: FixedKLController | None = None
    sentinels: Sentinels = field(default_factory=Sentinels)
    best: float | None = None
    best_step: int | None = None
    evaluated_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        steered = {"kl_controller": self.kl_controller.state_dict()} if self.kl_controller else {}
        return steered | {
            "best": self.best,
            "best_step": self.best_step,
            "evaluated_step": self.evaluated_step,
            "sentinels": self.sentinels.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; what else a checkpoint's state holds is left alone.

        Raises:
            KeyError, TypeError, ValueError: it lacks a field, or one is not what it was.
        """
        if self.kl_controller:
            self.kl_controller.load_state_dict(state["kl_controller"])
        self.sentinels.load_state_dict(state["sentinels"])
        self.best, self.best_step = state["best"], state["best_step"]
        self.evaluated_step = state["evaluated_step"]

    def note_evaluation(self, step: int, score: float) -> None:
        """Held-out success (0..1), or what counts as it, after `step`; as good as the best is not
        better."""
        self.evaluated_step = step
        if self.best is None or score > self.best:
            self.best, self.best_step = score, step

    def watch(
        self, step: int, metrics: Mapping[str, Any], on_collapse: str
    ) -> tuple[list[Alarm], str | None]:
        """
        Show a step to the sentinels.

        Args:
            on_collapse: off, warn or stop.
        Returns: what to say, and why the run must stop, if it must.
        """
        alarms = self.sentinels.check(step, metrics)
        if on_collapse == "off":
            return [], None
        stops = [alarm.message for alarm in alarms if alarm.severity == "stop"]
        if not stops or on_collapse == "warn":
            return alarms, None
        return alarms, (
            f"stopped after step {step}, the run is collapsing: {stops[0]}; {self._best_so_far()}; "
            "--resume with --on-collapse warn goes on all the same"
        )

    def begin_anew(self) -> None:
        """What is watched begins from other weights: its past says nothing about it."""
        self.sentinels = Sentinels()

    def _best_so_far(self) -> str:
        if self.best_step is None:
            return (
                "nothing was evaluated (--eval-every 0), so that no checkpoint is known as the best"
            )
        if self.best_step == 0:
            return f"the best policy so far is the one it began with, {self.start}"
        link = self.run_path / "checkpoints/best"
        return f"the best checkpoint is {link} (step {self.best_step})"
