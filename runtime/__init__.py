"""What makes a run work anywhere and survive: processes, samplers elsewhere, files, signals.

To understand multi-turn RL nobody needs to read these; the files at the root use them.
"""

import importlib.util
import sys

if importlib.util.find_spec("anyio") is None:  # as every package of requirements.txt
    print(
        "the packages that this needs are not in this Python; `make setup` puts them into .venv, "
        "then `. .venv/bin/activate`",
        file=sys.stderr,
    )
    raise SystemExit(2)
