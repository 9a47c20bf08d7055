"""One trajectory as token ids and masks: what was said, by whom, how likely it was when sampled.

The environment (o) and the policy (a) speak in turn, kept as token ids in lists of equal length:

    input_ids          o₀ o₀ o₀  a₀ a₀ <end>  o₁ o₁  a₁ a₁ a₁   what the model is fed
    loss_mask           0  0  0   1  1   1     0  0   1  1  1   1: sampled by the policy
    rollout_log_probs   0  0  0   •  •   •     0  0   •  •  •   log μ when it was drawn

Two rules make it exact, and each has broken a published system:
  * token ids in, token ids out. Sampled ids are appended as sampled; nothing is decoded and encoded
    again. Each prompt sent to the engine is therefore a prefix of the final sequence, and
    `check()` verifies that every time.
  * mask 1 only on sampled tokens. A turn cut at `max_tokens_per_turn` gets its end-of-turn appended
    with mask 0.

Read next: `advantages.py`, what its rewards become.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chat import ChatTemplate

STOP_REASONS = {
    "success": "the env ended it as solved",
    "failure": "the env ended it unsolved",
    "max_rounds": "the schedule's turn limit cut it",
    "env_limit": "the env's own limit cut it",
    "length": "the trajectory token budget cut it",
    "env_error": "the env server failed; not in the loss",
    "engine_error": "the sampling engine failed; not in the loss",
}
LOST = ("env_error", "engine_error")  # says nothing about the policy
FLOAT_FIELDS = ("rollout_log_probs", "advantages")
LIST_FIELDS = ("input_ids", "loss_mask", *FLOAT_FIELDS)
TOKEN_FIELDS = (*LIST_FIELDS, "weight_version")
DIGITS = 7  # of a number for one token, in files
# A line of a file begins with what is short, so that a list of trajectories reads the heads alone.
HEAD_END = ',"messages":'  # never inside a JSON string, whose quotes are escaped
# Computed from the other fields, for lists of trajectories.
DERIVED_FIELDS = ("return", "num_turns", "num_tokens", "parse_errors", "advantage")


def are_equal(returns: Sequence[float]) -> bool:
    """Whether a group's returns are all the same up to float32 rounding (advantages.py): rewards
    paid in parts are added in the order in which they came.

    >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.3, 0.31])
    (True, False)
    """
    return max(returns) - min(returns) <= 1e-7 + 1e-6 * abs(max(returns))


@dataclass
class Turn:
    """One exchange: the action the policy took and the environment's answer to it."""

    action_span: tuple[int, int]  # [start, end) in input_ids, sampled tokens only
    action_text: str
    observation_text: str = ""  # the answer; empty if the token budget ended inside the turn
    reward: float = 0.0  # this turn's increment
    parse_error: str | None = None
    generate_s: float = 0.0
    env_s: float = 0.0
    state: dict[str, Any] | None = None  # what people look at, with --record-state


@dataclass
class Trajectory:
    """One episode: who played what under which limit, what was said, how it ended."""

    trajectory_id: str
    step: int
    env: str
    task_id: str
    subtask: str
    group_id: int
    seed: int
    max_rounds: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    terminated: bool = False
    truncated: bool = False
    stop_reason: str | None = None
    used_in_loss: bool = False
    error: str | None = None  # what was lost, in words
    first_state: dict[str, Any] | None = None  # before the first turn, with --record-state

    def stop(self, reason: str, success: bool = False) -> None:
        """End the trajectory; `terminated` if the task is over, `truncated` if it was cut."""
        self.stop_reason, self.success = reason, success
        self.terminated = reason in ("success", "failure")
        self.truncated = not self.terminated

    @property
    def total_return(self) -> float:
        """Sum of the turns' rewards, 0..1."""
        return sum((turn.reward for turn in self.turns), 0.0)

    @property
    def is_valid(self) -> bool:
        """False when it did not end, or the infrastructure failed: it counts nowhere."""
        return self.stop_reason not in (None, *LOST)

    def to_line(self) -> dict[str, Any]:
        """One JSON object of `trajectories/*.jsonl`: short fields, messages and turns, then lists
        of tokens (null without any)."""
        line = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        line |= {name: line.get(name) for name in TOKEN_FIELDS}
        texts = {"messages": line.pop("messages"), "turns": [asdict(turn) for turn in self.turns]}
        texts["first_state"] = line.pop("first_state")
        del line["turns"]
        tokens = {name: line.pop(name) for name in LIST_FIELDS}
        rounded = {n: round_floats(tokens[n]) for n in FLOAT_FIELDS if tokens[n] is not None}
        return line | self._derived_fields(tokens) | texts | tokens | rounded

    def _derived_fields(self, tokens: dict[str, Any]) -> dict[str, Any]:
        """Fields for a list of trajectories; `advantage` is the mean over policy tokens."""
        ids, mask, advantages = (tokens[n] for n in ("input_ids", "loss_mask", "advantages"))
        values = [a for a, m in zip(advantages or (), mask or (), strict=False) if m]
        return {
            "return": self.total_return,
            "num_turns": len(self.turns),
            "num_tokens": None if ids is None else len(ids),
            "parse_errors": sum(turn.parse_error is not None for turn in self.turns),
            "advantage": round_floats([sum(values) / len(values)])[0] if values else None,
        }

    def to_json(self) -> str:
        """`to_line` as text, without blanks and with the end of the line."""
        return json.dumps(self.to_line(), ensure_ascii=False, separators=(",", ":")) + "\n"


@dataclass
class RolloutHandler(Trajectory):
    """A trajectory as tokens, growing. All token lists have the same length.

    The engine is always sent `input_ids` as they are, so `check()` can prove that what was sampled
    from is what is trained on.
    """

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    weight_version: int = 0
    advantages: list[float] | None = None
    # (length, hash) of each prompt sent
    _prompts: list[tuple[int, int]] = field(default_factory=list, repr=False)

    def start(self, chat: ChatTemplate, prompt: list[dict[str, str]], observation: str) -> None:
        """Open the sequence with the environment's prompt and first observation."""
        self.messages = [*prompt, {"role": "user", "content": observation}]
        self._append(chat.opening(prompt, observation))

    def add_observation(self, chat: ChatTemplate, text: str, max_tokens: int | None = None) -> bool:
        """Append what the environment said; its tokens get loss_mask 0. False, with nothing
        appended, if the sequence would then have more than `max_tokens`."""
        ids = chat.observation(text)
        if max_tokens is not None and len(self.input_ids) + len(ids) > max_tokens:
            return False
        self.messages.append({"role": "user", "content": text})
        self._append(ids)
        return True

    def add_action(
        self, chat: ChatTemplate, token_ids: Sequence[int], log_probs: Sequence[float]
    ) -> Turn:
        """Append what the policy sampled; its tokens, and only they, get loss_mask 1.

        Raises:
            ValueError: token_ids and log_probs differ in length, or there are none.
        """
        if len(token_ids) != len(log_probs) or not token_ids:
            raise ValueError(
                f"{self.trajectory_id}: {len(token_ids)} sampled ids, {len(log_probs)} log-probs"
            )
        start = len(self.input_ids)
        self.input_ids += token_ids
        self.loss_mask += [1] * len(token_ids)
        self.rollout_log_probs += log_probs
        turn = Turn((start, len(self.input_ids)), chat.text_of(list(token_ids)))
        if token_ids[-1] != chat.end_of_turn:  # cut by a limit: closed for the policy, not by it
            self._append([chat.end_of_turn])
        self.messages.append({"role": "assistant", "content": turn.action_text})
        self.turns.append(turn)
        return turn

    def next_prompt(self) -> list[int]:
        """The ids to sample from now, remembered for `check`."""
        self._prompts.append((len(self.input_ids), hash(tuple(self.input_ids))))
        return self.input_ids

    def check(self) -> None:
        """RuntimeError unless the lists line up and every prompt sent is a prefix of the ids."""
        lengths = {len(self.input_ids), len(self.loss_mask), len(self.rollout_log_probs)}
        if len(lengths) != 1:
            raise RuntimeError(
                f"{self.trajectory_id}: token lists of different lengths {sorted(lengths)}"
            )
        for length, digest in self._prompts:
            if hash(tuple(self.input_ids[:length])) != digest:
                raise RuntimeError(
                    f"{self.trajectory_id}: a prompt of {length} ids is not a prefix of the ids"
                )

    def stop(self, reason: str, success: bool = False) -> None:
        super().stop(reason, success)
        self.check()

    @property
    def is_valid(self) -> bool:
        """False also when the policy never spoke: there is nothing to learn from."""
        return super().is_valid and any(self.loss_mask)

    def _append(self, ids: list[int]) -> None:
        self.input_ids += ids
        self.loss_mask += [0] * len(ids)
        self.rollout_log_probs += [0.0] * len(ids)


# ------------------------------------------------------------------------------ files and formats


def round_floats(numbers: Sequence[float]) -> list[float]:
    """Each with 7 significant digits, which halves the bytes. A log-prob of -10 moves by 5e-6 nats
    at most, where sampler and trainer differ by 4e-3 in bfloat16; training uses the numbers in
    memory, the file is for reading.

    >>> round_floats([-0.10536051541566849, 0.0, -1.2345678e-09])
    [-0.1053605, 0, -1.234568e-09]
    """
    return [float(f"{x:.{DIGITS}g}") if x else 0 for x in numbers]


def from_line(line: dict[str, Any]) -> Trajectory:
    """The trajectory that `to_line` wrote: a RolloutHandler, or without tokens a Trajectory.

    Raises:
        ValueError: a field is missing or unknown.
    """
    fields = {name: value for name, value in line.items() if name not in DERIVED_FIELDS}
    kind: type[Trajectory] = RolloutHandler
    if fields.get("input_ids") is None:
        kind = Trajectory
        fields = {name: value for name, value in fields.items() if name not in TOKEN_FIELDS}
    try:
        turns = [
            Turn(**turn | {"action_span": turn["action_span"] and tuple(turn["action_span"])})
            for turn in fields.pop("turns")
        ]
        return kind(**fields, turns=turns)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{line.get('trajectory_id')} is not a line of a trajectory: {error}"
        ) from None
