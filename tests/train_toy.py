"""train.py, or `sft`, `dpo` or `agentevol` if that is the first argument, with the toy
environment, as a program that tests start, break and kill.

Options that come before train.py's arguments:
    --fail-on-rank N           rank N's sampler fails in the first rollout
    --kill-rank N              rank N is killed in the first rollout
    --kill-at PLACE STEP       the process sends itself SIGKILL at one of PLACES in that step
    --interrupt-at PLACE STEP  the process sends itself Ctrl-C there
"""

import functools
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
import torch.distributed.checkpoint.filesystem as dcp_files  # noqa: E402
from toy_env import OracleLetters, registered  # noqa: E402

import train  # noqa: E402
from engines import EngineError, TransformersEngine  # noqa: E402
from reporting import metrics  # noqa: E402
from reporting.metrics import MetricsLogger  # noqa: E402
from run import checkpoint, files  # noqa: E402
from run import worker as worker_module  # noqa: E402
from run.session import Session  # noqa: E402
from train import RLWorker as Worker  # noqa: E402

# Phase -> the function that it is. Phases nest; the innermost one counts.
PHASES = {
    "resuming": (Session, "restore"),
    "truncating": (metrics, "truncate_log"),
    "amending": (MetricsLogger, "amend"),
    "rollout": (Worker, "roll_out"),
    "update": (Worker, "update"),
    "evaluation": (Session, "evaluate"),
    "saving": (Session, "save"),
    "pruning": (checkpoint, "prune"),
}

# Place -> the phase (None: any), a function, and the number of its call that the signal precedes.
PLACES = {
    "in the rollout": ("rollout", TransformersEngine, "poll", 3),
    "between two optimizer steps": ("update", torch.optim.AdamW, "step", 4),
    "in the evaluation": ("evaluation", TransformersEngine, "poll", 2),
    "between the evaluation's two files": ("evaluation", files, "write_text", 2),
    "between logging and saving": (None, Session, "watch", 1),
    "in the middle of the optimizer's file": ("saving", dcp_files, "_write_item", 40),
    "before the checkpoint gets its name": ("saving", checkpoint, "finish_folder", 1),
    "while the best is marked": ("saving", os, "replace", 1),
    "in the middle of pruning": ("pruning", os, "unlink", 5),
    "between saving and the timings": (None, MetricsLogger, "show_step", 1),
    "while weights are restored": ("resuming", checkpoint, "load", 1),
    "while the log is truncated": ("truncating", os, "replace", 1),
    "while the log is amended": ("amending", metrics, "plot", 1),
}


class SignalSender:
    """Sends this process a signal when it reaches `place` in `step`.

    In a resumed process the step is 0 until its first rollout.
    """

    def __init__(self, number: signal.Signals, place: str, step: int) -> None:
        self.signal, self.target_step = number, step
        self.phase, owner, name, self.target_call = PLACES[place]
        self.step, self.calls, self.phases = 0, 0, ["between"]
        self.wrap(train, "requests_of", self.on_step)
        for phase, (phase_owner, phase_name) in PHASES.items():
            self.wrap(phase_owner, phase_name, self.on_phase, phase)
        self.wrap(owner, name, self.on_call)

    @staticmethod
    def wrap(owner, name, replacement, *arguments):
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return replacement(*arguments, function, *args, **kwargs)

        setattr(owner, name, wrapper)

    def on_step(self, function, step, *args):
        self.step, self.calls = step, 0
        return function(step, *args)

    def on_phase(self, phase, function, *args, **kwargs):
        self.phases.append(phase)
        try:
            return function(*args, **kwargs)
        finally:
            self.phases.pop()

    def on_call(self, function, *args, **kwargs):
        if self.step == self.target_step and self.phase in (None, self.phases[-1]):
            self.calls += 1
            if self.calls == self.target_call:
                os.kill(os.getpid(), self.signal)
        return function(*args, **kwargs)


def main(argv: list[str]) -> int:
    if argv[0] in ("--fail-on-rank", "--kill-rank"):
        option, rank, argv = argv[0], argv[1], argv[2:]
        if os.environ["RANK"] == rank:

            def fail(*_, **__):
                if option == "--kill-rank":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise EngineError("this rank's sampler broke")

            worker_module.collect = fail
    signals = {"--kill-at": signal.SIGKILL, "--interrupt-at": signal.SIGINT}
    if argv[0] in signals:
        SignalSender(signals[argv[0]], argv[1], int(argv[2]))
        argv = argv[3:]
    program = train
    if argv[0] in ("sft", "dpo", "agentevol"):
        program, argv = import_module(argv[0]), argv[1:]
    with registered(OracleLetters):
        return program.command_line(argv)


def main_in_fork(argv: list[str], out: str) -> None:
    """`main` in a forked process, in which all modules are already imported; prints to `out`."""
    with open(out, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    metrics.plot = lambda run_dir: (run_dir / "reward.png").touch()  # drawing takes a second
    sys.exit(main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
