"""Pictures of the whole: one training step (03), and what each of several processes holds (06)."""

import ast
import re
from pathlib import Path

from runtime.distributed import deal
from tutorials.pictures.svg import Sheet

ROOT = Path(__file__).resolve().parents[2]


def banners() -> list[str]:
    """The seven of train.py, as they stand there: "1 horizon", ..."""
    source = (ROOT / "train.py").read_text(encoding="utf-8")
    return re.findall(r"^ +# -{20,} (\d [\w ,-]+)$", source, re.MULTILINE)


# What each banner does, and what it hands to the next.
STEPS = (
    ("how many turns may the agent take?", "max_rounds"),
    ("sampler and worlds take turns", "trajectories: ids, masks, log-probs, rewards"),
    ("what does the trainer say of the same ids?", "old_log_probs, ref_log_probs, values"),
    ("what came after a token, against a baseline", "advantages, returns"),
    ("make good tokens likelier, a little", "new weights"),
    ("hand them to the sampler, compare", "the two agree, or the run stops"),
    ("a row, held-out success, a checkpoint", "the next step"),
)


def loop() -> Sheet:
    """Lesson 03: the seven banners of a step, and who gives what to whom."""
    sheet = Sheet(
        900,
        696,
        "One training step: seven banners, the worlds to the left, the models to the right",
    )
    sheet.write(24, 30, "One step of train.py", size=15, bold=True)
    for x, words in ((24, "worlds and files"), (300, "the step"), (680, "models")):
        sheet.write(x, 56, words, "soft", 12)
    left, width, height, pitch = 300.0, 300.0, 46.0, 88.0
    tops = [70 + pitch * n for n in range(7)]
    for top, name, (does, gives) in zip(tops, banners(), STEPS, strict=True):
        sheet.box(left, top, width, height, "action", radius=6)
        sheet.write(left + 14, top + 20, name, "action", 13.5, bold=True)
        sheet.write(left + 14, top + 37, does, "action", 11.5)
        x = left + 40
        sheet.line([(x, top + height), (x, top + pitch - 1)], arrow=True)
        sheet.write(x + 10, top + height + 25, gives, "soft", 11)

    def party(x: float, top: float, bottom: float, name: str, *more: str) -> None:
        sheet.box(x, top, 196, bottom - top, "box", radius=6)
        sheet.write(x + 14, top + 20, name, "box", 12.5, bold=True)
        for n, words in enumerate(more):
            sheet.write(x + 14, top + 37 + 15 * n, words, "soft", 11)

    def arrow(y: float, x0: float, x1: float, words: str, both: bool = False) -> None:
        sheet.line([(x0, y), (x1, y)], arrow=True)
        if both:
            sheet.line([(x1, y), (x0, y)], arrow=True)
        if words:
            sheet.write((x0 + x1) / 2, y - 5, words, "soft", 10.5, "middle")

    x0, x1, x2, x3 = 220.0, left, left + width, 680.0
    party(24, tops[0], tops[0] + 62, "tasks", "a list of ids; drawn by the", "step's number alone")
    sheet.line(
        [(x0, tops[0] + 40), (260, tops[0] + 40), (260, tops[1] + 10), (x1, tops[1] + 10)],
        arrow=True,
    )
    party(
        24,
        tops[1],
        tops[2] - 12,
        "environment servers",
        "one session a trajectory;",
        "action text in, observation",
        "and reward out",
    )
    arrow(tops[1] + 32, x0, x1, "HTTP", both=True)
    party(
        24,
        tops[6] - 40,
        tops[6] + 46,
        "run directory",
        "metrics, trajectories,",
        "evaluations, checkpoints,",
        "reward.png",
    )
    arrow(tops[6] + 24, x1, x0, "files")

    party(
        x3,
        tops[1] - 14,
        tops[1] + 48,
        "sampler",
        "a copy of the weights, built",
        "to generate (vLLM)",
    )
    arrow(tops[1] + 24, x2, x3, "ids", both=True)
    party(
        x3,
        tops[2] - 2,
        tops[3] - 28,
        "reference, critic",
        "frozen start, for a KL term;",
        "PPO's critic, updated in 5 too",
    )
    arrow(tops[2] + 14, x3, x2, "")
    party(
        x3,
        tops[3] - 8,
        tops[4] + 46,
        "policy and optimizer",
        "the weights that learn, and",
        "Adam's two moments of each;",
        "scored in 3, moved in 5,",
        "copied in 6",
    )
    sheet.line(
        [(x3, tops[3] + 8), (640, tops[3] + 8), (640, tops[2] + 34), (x2, tops[2] + 34)], arrow=True
    )
    arrow(tops[4] + 24, x2, x3, "gradient")
    right = 888.0
    sheet.line(
        [
            (x2, tops[5] + 24),
            (right, tops[5] + 24),
            (right, tops[1] + 24),
            (x3 + 196, tops[1] + 24),
        ],
        arrow=True,
    )
    sheet.write(left + width + 30, tops[5] + 19, "weights, a parameter at a time", "soft", 10.5)
    return sheet


def ranks() -> Sheet:
    """Lesson 06: two ranks, what each holds, and the three times that they meet."""
    page = (ROOT / "tutorials/06_from_one_process_to_many.md").read_text(encoding="utf-8")
    lengths, written = (
        ast.literal_eval(re.search(rf"^{name} = (\[[\d, ]+\])", page, re.MULTILINE)[1])
        for name in ("LENGTHS", "WRITTEN")
    )
    hands = deal(lengths, ranks=2)
    sheet = Sheet(900, 584, "Two ranks: what each holds alone, and what all get from each other")
    sheet.write(24, 30, "Who holds what: two ranks, one step", size=15, bold=True)
    columns = (190.0, 545.0)
    for n, x in enumerate(columns):
        sheet.box(x - 14, 46, 335, 520, "faint", radius=8)
        sheet.write(x, 68, f"rank {n}", size=13.5, bold=True)

    def row(y: float, name: str, *more: str) -> None:
        sheet.write(24, y + 14, name, size=12, bold=True)
        for n, words in enumerate(more):
            sheet.write(24, y + 29 + 14 * n, words, "soft", 10.5)

    def meet(y: float, words: str) -> None:
        sheet.line([(columns[0] + 40, y), (columns[1] + 270, y)], "action", 2)
        sheet.line([(columns[0] + 40, y), (columns[0] + 40, y + 14)], "action", 2, arrow=True)
        sheet.line([(columns[1] + 270, y), (columns[1] + 270, y + 14)], "action", 2, arrow=True)
        sheet.box(355, y - 10, 330, 20, "action")
        sheet.write(520, y + 4, words, "action", 11, "middle")

    def strip(x: float, y: float, n: int, whole: bool = True, again: bool = False) -> None:
        unit = 11.5
        role = ("prompt", "action") if whole and not again else ("box", "box")
        start = lengths[n] - written[n]
        sheet.box(x, y, start * unit, 13, role[0], radius=1, dashed=again)
        sheet.box(x + start * unit, y, written[n] * unit, 13, role[1], radius=1, dashed=again)
        note = f"row {n}" + (", again, its loss times 0" if again else "")
        sheet.write(x + lengths[n] * unit + 8, y + 11, note, "soft", 10.5)

    row(84, "rolls out", "apart: every", "other task, with", "all its samples")
    for n, x in enumerate(columns):
        sheet.box(x, 86, 145, 44, "observation", radius=5)
        sheet.write(x + 10, 104, "environment server", "observation", 11.5)
        sheet.write(x + 10, 121, f"tasks {n}, {n + 2}, {n + 4}, ...", "observation", 11)
        sheet.box(x + 160, 86, 145, 44, "box", radius=5)
        sheet.write(x + 170, 104, "sampler", "box", 11.5)
        sheet.write(x + 170, 121, "a copy of the weights", "box", 11)
    meet(154, "gather: trajectories, once a step")
    row(176, "trajectories", "all, everywhere:", "metrics and", "advantages are", "computed twice")
    for x in columns:
        for n in range(5):
            strip(x, 178 + 17 * n, n)
    row(288, "micro-batches", "its hand of", f"the deal: {hands[0]}", f"and {hands[1]}")
    for hand, x in zip(hands, columns, strict=True):
        for place, n in enumerate(hand):
            strip(x, 290 + 17 * place, n)
        for place in range(len(hand), max(map(len, hands))):
            cheapest = min(range(5), key=lengths.__getitem__)
            strip(x, 290 + 17 * place, cheapest, again=True)
    meet(362, "reduce-scatter: each gets its half of the summed gradient")
    row(386, "the policy", "weights, gradient,", "two moments:", "half of each one")
    for n, x in enumerate(columns):
        for line, name in enumerate(("weights", "gradient", "moments")):
            y = 386 + 22 * line
            for half in (0, 1):
                sheet.box(x + 110 * half, y, 110, 16, "action" if half == n else "faint", radius=1)
            sheet.write(x + 228, y + 12, name, "soft", 10.5)
    meet(462, "gather, a parameter at a time: weights for the samplers")
    row(484, "the samplers")
    for x in columns:
        sheet.box(x, 484, 305, 26, "box", radius=5)
        sheet.write(x + 10, 501, "the new weights, a whole copy", "box", 11)
    row(526, "files")
    for x, words in zip(
        columns,
        ("metrics, trajectories; its part of a checkpoint", "its part of a checkpoint"),
        strict=True,
    ):
        sheet.box(x, 526, 305, 26, "box", radius=5)
        sheet.write(x + 10, 543, words, "box", 11)
    return sheet
