"""Draws the pictures of the tutorials from what they are pictures of: real token ids, the project's
own estimators, the banners of train.py, the deal of a mini-batch, committed runs.

Run it: python -m tutorials.pictures.draw          writes tutorials/pictures/*.svg
tests/test_tutorials.py draws them again and compares: change the code, and the picture must follow.
"""

from pathlib import Path

from tutorials.pictures.health import health
from tutorials.pictures.system import loop, ranks
from tutorials.pictures.tokens import credit, mask

FOLDER = Path(__file__).resolve().parent
PICTURES = {"mask": mask, "credit": credit, "loop": loop, "ranks": ranks, "health": health}


def main() -> None:
    for name, draw in PICTURES.items():
        path = FOLDER / f"{name}.svg"
        path.write_text(draw().text(), encoding="utf-8")
        print(f"{path} ({path.stat().st_size / 1000:.1f} kB)")


if __name__ == "__main__":
    main()
