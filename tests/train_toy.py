"""train.py in a process of its own that knows the toy world; what several processes are started on.

Before train.py's own arguments: --fail-on-rank N (its sampler breaks in the first rollout),
--kill-rank N (it is killed there).
"""

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from toy_env import registered  # noqa: E402

import train  # noqa: E402
import worker  # noqa: E402
from engines import EngineError  # noqa: E402


def main(argv: list[str]) -> int:
    if argv[0] in ("--fail-on-rank", "--kill-rank"):
        what, rank, argv = argv[0], argv[1], argv[2:]
        if os.environ["RANK"] == rank:

            def break_down(*_, **__):
                if what == "--kill-rank":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise EngineError("this rank's sampler broke")

            worker.collect = break_down
    with registered():
        return train.command_line(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
