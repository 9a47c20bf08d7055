"""Runs `sft.py`, `dpo.py` or `agentevol.py` in the toy environment. Tests start this program,
also with a launcher, and kill it.

    python tests/start_method.py METHOD OPTIONS...
"""

import sys
from importlib import import_module
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from toy_env import OracleLetters, registered  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    with registered(OracleLetters):
        sys.exit(import_module(sys.argv[1]).command_line(sys.argv[2:]))
