"""Pictures of single tokens: which the policy wrote (01), and what each is credited with (02)."""

import ast
from doctest import DocTestParser
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

from advantages import gae, grpo, token_rewards_of
from chat import ChatTemplate
from envs.textcraft.env import TextCraft
from models import load_tokenizer
from scale.default_models import resolve_model
from trajectory import RolloutHandler
from tutorials.pictures.svg import CHAR, Sheet

PAGES = Path(__file__).resolve().parents[1]


def given(page: str, name: str) -> Any:
    """The literal that a lesson binds with `>>> name = ...`, so that its picture is of the same.

    Raises:
        LookupError: it binds none.
    """
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    for example in DocTestParser().get_examples(text):
        if example.source.startswith(f"{name} = "):
            return ast.literal_eval(example.source.partition("=")[2].strip())
    raise LookupError(f"{page}.md binds nothing to {name}")


# ------------------------------------------------------------------------------------ 01: the mask


class Token(NamedTuple):
    text: str
    kind: str  # prompt (what the template and the world's rules say), observation, action
    mask: int


def episode() -> tuple[list[Token], RolloutHandler]:
    """The two turns of lesson 01, as real token ids; every token with who wrote it."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    chat, env = ChatTemplate(tokenizer), TextCraft()
    first = env.reset(task_index=31)
    trajectory = RolloutHandler("t", 1, "textcraft", "textcraft_31", "depth 1", 0, 0, max_rounds=5)
    trajectory.start(chat, TextCraft.PROMPT, first)
    kinds = _kinds(trajectory.input_ids, chat.plain(first))
    for text in given("01_one_trajectory", "said"):
        ids = chat.action(text)
        turn = trajectory.add_action(chat, ids, [-0.5] * len(ids))
        kinds += ["action"] * len(ids)
        observation, turn.reward, terminated, _, _ = env.step(env.parse(turn.action_text))
        if not terminated:
            before = len(trajectory.input_ids)
            trajectory.add_observation(chat, observation)
            kinds += _kinds(trajectory.input_ids[before:], chat.plain(observation))
    trajectory.stop("success", success=True)
    pieces = [
        tokenizer.decode([i]).replace("\n", "⏎").replace(" ", "·") for i in trajectory.input_ids
    ]
    tokens = [Token(*each) for each in zip(pieces, kinds, trajectory.loss_mask, strict=True)]
    return tokens, trajectory


def _kinds(ids: list[int], observed: list[int]) -> list[str]:
    """Of ids that hold an observation: which tokens are its own."""
    starts = (i for i in range(len(ids)) if ids[i : i + len(observed)] == observed)
    start = next(starts)
    end = start + len(observed)
    return ["observation" if start <= i < end else "prompt" for i in range(len(ids))]


def mask() -> Sheet:
    """Lesson 01: a trajectory as a strip of tokens, with the mask under it."""
    tokens, trajectory = episode()
    spans = [turn.action_span for turn in trajectory.turns]
    opening = spans[0][0]
    head, tail = 2, 19  # of the opening's tokens, how many are shown at its two ends
    captions = {0: f"the world's rules and the first observation: {opening} tokens"} | {
        start: f"action {n}: {end - start} tokens, sampled by the policy after reading {start}"
        for n, (start, end) in enumerate(spans, 1)
    }
    captions[spans[0][1]] = f"observation 1: {spans[1][0] - spans[0][1]} tokens with the template's"
    size, pad, left, right, pitch = 11.2, 3.0, 24.0, 876.0, 74.0
    sheet = Sheet(900, 398, "One trajectory as tokens: the mask is 1 on the policy's own, else 0")
    sheet.write(left, 30, "One trajectory, token by token", size=15, bold=True)
    for x, kind, label in (
        (left, "action", "the policy sampled it: loss_mask 1"),
        (left + 270, "observation", "the world said it: 0"),
        (left + 455, "prompt", "prompt and chat template: 0"),
    ):
        sheet.box(x, 45, 16, 14, kind)
        sheet.write(x + 22, 57, label)
    sheet.write(right, 57, "· space  ⏎ new line", "soft", 11, "end")
    x, y = left, 100.0
    ends: dict[int, float] = {}  # token -> where it ends
    for i, token in enumerate(tokens):
        if head <= i < opening - tail:
            if i == head:
                text = f"... {opening - tail - head} more, all 0 ..."
                sheet.write(x + 8, y + 15, text, "soft", 11.5)
                x += 8 + len(text) * 6
            continue
        width = len(token.text) * size * CHAR + 2 * pad
        starts_row = i in (opening, spans[0][1], spans[1][0])
        if x + width > right or (starts_row and x > left):
            x, y = left, y + (pitch if starts_row else 48)
        if i in captions:
            sheet.write(x, y - 7, captions[i], "sheet", 11.5)
        sheet.box(x, y, width, 21, token.kind)
        sheet.write(x + width / 2, y + 15, token.text, token.kind, size, "middle", mono=True)
        role = "action" if token.mask else "soft"
        sheet.write(
            *(x + width / 2, y + 35, str(token.mask), role, 10.5, "middle"),
            mono=True,
            bold=bool(token.mask),
        )
        x = ends[i] = x + width + 2
    x = ends[spans[-1][1] - 1] - 45
    sheet.line([(x, y + 58), (x, y + 40)], "action", arrow=True)
    text = f"the reward, {trajectory.total_return:g}, is put here"
    sheet.write(x - 8, y + 60, text, "action", 11.5, "end")
    return sheet


# ---------------------------------------------------------------------------------- 02: the credit


def credit() -> Sheet:
    """Lesson 02: how the reward of the last action becomes a number on every action token."""
    names = given("02_advantages", "drawn")
    spans, rewards = given("02_advantages", "spans"), given("02_advantages", "rewards")
    mask = torch.tensor([[int(c == "a") for c in row] for row in names])
    token_rewards = torch.tensor(
        [token_rewards_of(*each) for each in zip(rewards, spans, mask.tolist(), strict=True)]
    )
    values = torch.where(mask == 1, 0.5, 9.0)
    values[0, 4:6] = 0.8
    group = grpo(token_rewards, mask, torch.tensor([0, 0, 1, 1]))[0]
    judged = {
        lam: gae(token_rewards, values, mask, lam=lam, whiten=False)[0][0].tolist()
        for lam in (0.0, 0.5, 1.0)
    }
    sheet = Sheet(900, 640, "Credit across an observation: one number per trajectory, or per token")
    grid = Grid(sheet, left=210, width=82)
    sheet.write(
        24, 30, "Where does the credit for the last action's reward go?", size=15, bold=True
    )

    sheet.write(24, 58, "GRPO: the return against the group's, on every token", size=13, bold=True)
    for row, top, floor in ((0, 90, 165), (1, 188, 211)):
        grid.strip(top, names[row], f"A{row}: return {sum(rewards[row]):g}")
        grid.bars(floor, 45, group[row].tolist())
    grid.reward(90)
    returns = [sum(rewards[row]) for row in (0, 1)]
    sheet.write(24, 122, f"mean of the two {fmean(returns):g},", "soft", 11)
    sheet.write(24, 137, f"standard deviation {stdev(returns):.2f}", "soft", 11)

    sheet.line([(24, 275), (876, 275)], "faint")
    sheet.write(
        24, 301, "GAE: what the critic expected, token by token (γ = 1)", size=13, bold=True
    )
    y = 368.0
    grid.strip(y, names[0], "A0")
    grid.reward(y)
    tokens = [i for i, c in enumerate(names[0]) if c == "a"]
    for here, before in zip(tokens[:0:-1], tokens[-2::-1], strict=True):
        jump = 18 if here - before == 1 else 26
        sheet.arc((grid.middle(here) - 12, y - 3), (grid.middle(before) + 12, y - 3), jump)
    sheet.write(
        grid.middle(3), y - 35, "times λ per token, over the observation", "soft", 11, "middle"
    )
    sheet.write(24, y + 42, "critic's value V", "soft", 12)
    for i in tokens:
        sheet.write(grid.middle(i), y + 42, f"{values[0, i]:g}", "sheet", 12, "middle")
    for i in (3, 6):
        sheet.write(grid.middle(i), y + 42, "not asked", "soft", 11, "middle")
    notes = {0.0: "one token ahead", 0.5: "in between", 1.0: "return − V"}
    for n, (lam, numbers) in enumerate(judged.items()):
        base = y + 98 + n * 68
        sheet.write(24, base - 8, f"advantage, λ = {lam:g}", size=12)
        sheet.write(24, base + 7, notes[lam], "soft", 11)
        grid.bars(base, 70, numbers)
    return sheet


class Grid(NamedTuple):
    """Columns, one a token."""

    sheet: Sheet
    left: float
    width: float

    def middle(self, column: int) -> float:
        return self.left + (column + 0.5) * self.width

    def strip(self, y: float, row: str, label: str) -> None:
        """A trajectory drawn as in the lesson: p, a, o and . for padding."""
        kinds = {"p": "prompt", "a": "action", "o": "observation"}
        words = {"p": "prompt", "a": "action", "o": "observ."}
        self.sheet.write(24, y + 15, label, size=12, bold=True)
        for column, letter in enumerate(row):
            if letter in kinds:
                x = self.left + column * self.width
                self.sheet.box(x + 2, y, self.width - 4, 21, kinds[letter])
                self.sheet.write(
                    self.middle(column), y + 15, words[letter], kinds[letter], 11.5, "middle"
                )

    def reward(self, y: float) -> None:
        """The mark above the token that the reward of 1 is put on."""
        x = self.middle(5)
        self.sheet.write(x + 30, y - 14, "reward 1", "action", 11.5, bold=True)
        self.sheet.line([(x + 26, y - 18), (x + 8, y - 18), (x + 8, y - 2)], "action", arrow=True)

    def bars(self, base: float, scale: float, numbers: list[float]) -> None:
        """Advantages as bars on the line y = base; what is 0 by the mask has none."""
        end = self.left + len(numbers) * self.width
        self.sheet.line([(self.left, base), (end, base)], "faint", width=1)
        for column, number in enumerate(numbers):
            if not number:
                continue
            role, height = ("good", number * scale) if number > 0 else ("bad", -number * scale)
            top = base - height if number > 0 else base
            self.sheet.box(self.middle(column) - 14, top, 28, height, role, radius=1)
            label = top - 4 if number > 0 else top + height + 13
            text = f"{number:+.3g}".replace("-", "−")
            self.sheet.write(self.middle(column), label, text, role, 11.5, "middle", mono=True)
