"""Pictures of the whole: one training step (03), and what each of several processes holds (06)."""

import ast
import re
from pathlib import Path

from scale.distributed import deal
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


# Beside the step: x, top, height, name, what it is.
PARTIES = (
    (24, 70, 62, "tasks", "a list of ids; drawn by the\nstep's number alone"),
    (24, 158, 76, "environment servers", "one session a trajectory;\naction text in, observation\n"
     "and reward out"),
    (24, 558, 86, "run directory", "metrics, trajectories,\nevaluations, checkpoints,\nreward.png"),
    (680, 144, 62, "sampler", "a copy of the weights, built\nto generate (vLLM)"),
    (680, 244, 62, "reference, critic", "frozen start, for a KL term;\n"
     "PPO's critic, updated in 5 too"),
    (680, 326, 142, "policy and optimizer", "the weights that learn, and\n"
     "Adam's two moments of each;\nscored in 3, moved in 5,\ncopied in 6"),
)  # fmt: skip
# From point to point, and the words over the middle of a straight one.
ARROWS = (
    ("", (220, 110), (260, 110), (260, 168), (300, 168)),  # tasks to 2
    ("HTTP", (220, 190), (300, 190)),
    ("", (300, 190), (220, 190)),
    ("ids", (600, 182), (680, 182)),
    ("", (680, 182), (600, 182)),
    ("", (680, 260), (600, 260)),  # reference and critic to 3
    ("", (680, 342), (640, 342), (640, 280), (600, 280)),  # policy to 3
    ("gradient", (600, 446), (680, 446)),
    ("", (600, 534), (888, 534), (888, 182), (876, 182)),  # 6 to the sampler
    ("files", (300, 622), (220, 622)),
)


def loop() -> Sheet:
    """Lesson 03: the seven banners of a step, and who gives what to whom."""
    title = "One training step: seven banners, the worlds to the left, the models to the right"
    sheet = Sheet(900, 696, title)
    sheet.write(24, 30, "One step of train.py", size=15, bold=True)
    for x, words in ((24, "worlds and files"), (300, "the step"), (680, "models")):
        sheet.write(x, 56, words, "soft", 12)
    for n, (name, (does, gives)) in enumerate(zip(banners(), STEPS, strict=True)):
        top = 70 + 88 * n
        sheet.box(300, top, 300, 46, "action", radius=6)
        sheet.write(314, top + 20, name, "action", 13.5, bold=True)
        sheet.write(314, top + 37, does, "action", 11.5)
        sheet.line([(340, top + 46), (340, top + 87)], arrow=True)
        sheet.write(350, top + 71, gives, "soft", 11)
    for x, top, height, name, words in PARTIES:
        sheet.box(x, top, 196, height, "box", radius=6)
        sheet.write(x + 14, top + 20, name, "box", 12.5, bold=True)
        for n, line in enumerate(words.split("\n")):
            sheet.write(x + 14, top + 37 + 15 * n, line, "soft", 11)
    for words, *points in ARROWS:
        sheet.line(points, arrow=True)
        if words:
            (x0, y), (x1, _) = points
            sheet.write((x0 + x1) / 2, y - 5, words, "soft", 10.5, "middle")
    sheet.write(630, 529, "weights, a parameter at a time", "soft", 10.5)
    return sheet


# ------------------------------------------------------------------------------------ 06: the ranks

RANKS_AT = (190.0, 545.0)  # x of the two columns


def ranks() -> Sheet:
    """Lesson 06: two ranks, what each holds, and the three times that they meet."""
    sheet = Sheet(900, 584, "Two ranks: what each holds alone, and what all get from each other")
    sheet.write(24, 30, "Who holds what: two ranks, one step", size=15, bold=True)
    for n, x in enumerate(RANKS_AT):
        sheet.box(x - 14, 46, 335, 520, "faint", radius=8)
        sheet.write(x, 68, f"rank {n}", size=13.5, bold=True)
    _name(sheet, 84, "rolls out", "apart: every", "other task, with", "all its samples")
    for n, x in enumerate(RANKS_AT):
        sheet.box(x, 86, 145, 44, "observation", radius=5)
        sheet.write(x + 10, 104, "environment server", "observation", 11.5)
        sheet.write(x + 10, 121, f"tasks {n}, {n + 2}, {n + 4}, ...", "observation", 11)
        sheet.box(x + 160, 86, 145, 44, "box", radius=5)
        sheet.write(x + 170, 104, "sampler", "box", 11.5)
        sheet.write(x + 170, 121, "a copy of the weights", "box", 11)
    _meet(sheet, 154, "gather: trajectories, once a step")
    _rows_of_a_mini_batch(sheet)
    _meet(sheet, 362, "reduce-scatter: each gets its half of the summed gradient")
    _name(sheet, 386, "the policy", "weights, gradient,", "two moments:", "half of each one")
    for n, x in enumerate(RANKS_AT):
        for line, name in enumerate(("weights", "gradient", "moments")):
            y = 386 + 22 * line
            for half in (0, 1):
                sheet.box(x + 110 * half, y, 110, 16, "action" if half == n else "faint", radius=1)
            sheet.write(x + 228, y + 12, name, "soft", 10.5)
    _meet(sheet, 462, "gather, a parameter at a time: weights for the samplers")
    new, part = "the new weights, a whole copy", "its part of a checkpoint"
    for y, name, held in (
        (484, "the samplers", (new, new)),
        (526, "files", (f"metrics, trajectories; {part}", part)),
    ):
        _name(sheet, y, name)
        for x, words in zip(RANKS_AT, held, strict=True):
            sheet.box(x, y, 305, 26, "box", radius=5)
            sheet.write(x + 10, y + 17, words, "box", 11)
    return sheet


def _name(sheet: Sheet, y: float, name: str, *more: str) -> None:
    """What a row of the picture is of."""
    sheet.write(24, y + 14, name, size=12, bold=True)
    for n, words in enumerate(more):
        sheet.write(24, y + 29 + 14 * n, words, "soft", 10.5)


def _meet(sheet: Sheet, y: float, words: str) -> None:
    """A collective: an arrow into both ranks."""
    left, right = RANKS_AT[0] + 40, RANKS_AT[1] + 270
    sheet.line([(left, y), (right, y)], "action", 2)
    for x in (left, right):
        sheet.line([(x, y), (x, y + 14)], "action", 2, arrow=True)
    sheet.box(355, y - 10, 330, 20, "action")
    sheet.write(520, y + 4, words, "action", 11, "middle")


def _rows_of_a_mini_batch(sheet: Sheet) -> None:
    """The lesson's five rows: on both ranks as trajectories, dealt out as micro-batches."""
    page = (ROOT / "tutorials/06_from_one_process_to_many.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^([A-Z]+) = (\[[\d, ]+\])", page, re.MULTILINE))
    lengths, written = (ast.literal_eval(found[name]) for name in ("LENGTHS", "WRITTEN"))
    hands = deal(lengths, ranks=2)
    cheapest = min(range(len(lengths)), key=lengths.__getitem__)
    unit = 11.5  # pixels of a token

    def strip(x: float, y: float, n: int, again: bool = False) -> None:
        read, wrote = ("box", "box") if again else ("prompt", "action")
        start = (lengths[n] - written[n]) * unit
        sheet.box(x, y, start, 13, read, radius=1, dashed=again)
        sheet.box(x + start, y, written[n] * unit, 13, wrote, radius=1, dashed=again)
        note = f"row {n}" + (", again, its loss times 0" if again else "")
        sheet.write(x + lengths[n] * unit + 8, y + 11, note, "soft", 10.5)

    everywhere = ("all, everywhere:", "metrics and", "advantages are", "computed twice")
    _name(sheet, 176, "trajectories", *everywhere)
    _name(sheet, 288, "micro-batches", "its hand of", f"the deal: {hands[0]}", f"and {hands[1]}")
    for x, hand in zip(RANKS_AT, hands, strict=True):
        for n in range(len(lengths)):
            strip(x, 178 + 17 * n, n)
        for place in range(max(map(len, hands))):
            y, has_one = 290 + 17 * place, place < len(hand)
            strip(x, y, hand[place] if has_one else cheapest, again=not has_one)
