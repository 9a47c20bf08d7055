"""Screenshots of replay.py on the committed run of tutorial 11, for the README.

python tutorials/pictures/replay.py          needs Chromium (tests/chromium.py)
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from chromium import browser  # noqa: E402

RUN = "recipes/results/demo"
VIEWS = {
    "replay_overview.png": ("#/0", ".goes-wrong li", ()),
    "replay_trajectory.png": (
        "#/0/step_000028/40/2",
        ".picture .world",
        ("t", "ArrowLeft", "ArrowRight"),
    ),
}


def main() -> int:
    command = [sys.executable, "replay.py", RUN, "--port", "0", "--no-browser"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        base = server.stdout.readline().split()[1]
        try:
            with browser() as opened:
                page = opened.new_page(viewport={"width": 1280, "height": 860})
                for name, (route, there, keys) in VIEWS.items():
                    page.goto("about:blank")
                    page.goto(base + route)
                    page.wait_for_selector(there)
                    for key in keys:
                        page.keyboard.press(key)
                    page.wait_for_timeout(1000)
                    page.screenshot(path=str(Path(__file__).parent / name))
        finally:
            server.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
