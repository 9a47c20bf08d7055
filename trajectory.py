"""A trajectory records one episode as tokens, with the author and log-probability of each token.

The environment writes observations (o) and the policy answers with actions (a). Their tokens are
stored in three lists of equal length:

    input_ids          o₀ o₀ o₀  a₀ a₀ <end>  o₁ o₁  a₁ a₁ a₁   the model's input
    loss_mask           0  0  0   1  1   1     0  0   1  1  1   1: sampled by the policy
    rollout_log_probs   0  0  0   •  •   •     0  0   •  •  •   log μ, recorded when sampling

Two rules keep these lists exact; published systems have broken both:
  * Token ids in, token ids out. Sampled ids are appended as they are, never decoded and
    re-encoded. Every prompt sent to the engine is therefore a prefix of the final sequence, and
    `check()` verifies this for every trajectory.
  * loss_mask is 1 on sampled tokens only. If a turn is cut at `max_tokens_per_turn`, we append the
    end-of-turn token ourselves, with mask 0.

Read next: `advantages.py`, which turns the rewards of a trajectory into a learning signal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from chat import ChatTemplate

STOP_REASONS = {
    "success": "the policy solved the task",
    "failure": "the environment ended the episode unsolved",
    "max_rounds": "cut at the schedule's turn limit",
    "env_limit": "cut at the environment's own limit",
    "length": "cut at the token budget of a trajectory",
    "env_error": "the environment server failed; not in the loss",
    "engine_error": "the sampling engine failed; not in the loss",
}
LOST = ("env_error", "engine_error")  # the infrastructure failed, not the policy
FLOAT_FIELDS = ("rollout_log_probs", "advantages")
LIST_FIELDS = ("input_ids", "loss_mask", *FLOAT_FIELDS)
TOKEN_FIELDS = (*LIST_FIELDS, "weight_version")
DIGITS = 7  # significant digits in files
# Computed from the other fields, for listing trajectories.
DERIVED_FIELDS = ("return", "num_turns", "num_tokens", "parse_errors", "advantage")
UNSAVED = ("next_kind", "num_cut_turns", "_prompts")  # fields that are not written to files


def returns_by_group(trajectories: Iterable[Trajectory]) -> dict[int, list[float]]:
    returns: dict[int, list[float]] = {}
    for t in trajectories:
        returns.setdefault(t.group_id, []).append(t.total_return)
    return returns


def are_equal(returns: Sequence[float]) -> bool:
    """True if a group's returns are equal up to float32 rounding (rewards added in another order
    can round differently); see also `advantages._group_is_constant`.

    >>> are_equal([0.1 + 0.2, 0.3]), are_equal([0.3, 0.31])
    (True, False)
    """
    return max(returns) - min(returns) <= 1e-7 + 1e-6 * abs(max(returns))


@dataclass
class Turn:
    """One exchange: the policy's action and the environment's answer to it."""

    action_span: tuple[int, int]  # [start, end) in input_ids, sampled tokens only
    action_text: str
    observation_text: str = ""  # empty if the observation did not fit into the token budget
    reward: float = 0.0  # of this turn only
    parse_error: str | None = None
    anchor: str | None = None  # the state after the turn, if the environment reports it
    advice: str | None = None  # with --teacher oracle, what the oracle would have written instead
    kind: str = "act"  # or "plan" or "reflect", which no environment answers (agents.py)
    generate_s: float = 0.0
    env_s: float = 0.0
    state: dict[str, Any] | None = None  # what the viewer draws; set by --record-state

    @property
    def state_after(self) -> str:
        """A text that is equal for equal states of the environment after this turn: what it
        reports, by default the observation; "" at the start of the task, before the first act."""
        if self.kind != "act":
            return ""
        return self.observation_text if self.anchor is None else self.anchor


@dataclass
class Trajectory:
    """One episode: its task and turn limit, the messages and turns, and how it ended."""

    trajectory_id: str
    step: int
    env: str
    task_id: str
    subtask: str
    group_id: int
    seed: int
    max_rounds: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    terminated: bool = False
    truncated: bool = False
    stop_reason: str | None = None
    used_in_loss: bool = False
    error: str | None = None  # message of the failure, for stop reasons in LOST
    first_state: dict[str, Any] | None = None  # before the first turn; set by --record-state
    next_kind: str = field(default="act", repr=False)  # of the turn that the policy writes next

    @property
    def num_acts(self) -> int:
        """Turns of the latest attempt that went to the environment."""
        latest = takewhile(lambda turn: turn.kind != "reflect", reversed(self.turns))
        return sum(turn.kind == "act" for turn in latest)

    def resume(self, kind: str) -> None:
        """Go on after the end of an attempt, with a turn of another kind."""
        self.stop_reason, self.terminated, self.truncated = None, False, False
        self.next_kind = kind

    def stop(self, reason: str, success: bool = False) -> None:
        """End the trajectory: `terminated` if the task is over, `truncated` if it was cut short."""
        self.stop_reason, self.success = reason, success
        self.terminated = reason in ("success", "failure")
        self.truncated = not self.terminated

    @property
    def total_return(self) -> float:
        """Sum of the turns' rewards, 0..1."""
        return sum((turn.reward for turn in self.turns), 0.0)

    @property
    def is_valid(self) -> bool:
        """False if the episode did not end or was lost; statistics leave out such trajectories."""
        return self.stop_reason not in (None, *LOST)

    def to_line(self) -> dict[str, Any]:
        """One line of `trajectories/*.jsonl` as a dict: short fields, then messages and turns, then
        token lists (null if the trajectory has no tokens)."""
        line = {name: value for name, value in vars(self).items() if name not in UNSAVED}
        line |= {name: line.get(name) for name in TOKEN_FIELDS}
        texts = {"messages": line.pop("messages"), "turns": [asdict(turn) for turn in self.turns]}
        texts["first_state"] = line.pop("first_state")
        del line["turns"]
        tokens = {name: line.pop(name) for name in LIST_FIELDS}
        rounded = {n: round_floats(tokens[n]) for n in FLOAT_FIELDS if tokens[n] is not None}
        return line | self._derived_fields(tokens) | texts | tokens | rounded

    def _derived_fields(self, tokens: dict[str, Any]) -> dict[str, Any]:
        """Fields shown when listing trajectories; `advantage` is the mean over policy tokens."""
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
        """`to_line` as compact JSON, ending with a newline."""
        return json.dumps(self.to_line(), ensure_ascii=False, separators=(",", ":")) + "\n"


@dataclass
class RolloutHandler(Trajectory):
    """A trajectory that grows during its episode. All token lists have the same length.

    The engine always gets `input_ids` unchanged, so `check()` can prove that training uses exactly
    the prompts that the actions were sampled from.
    """

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    weight_version: int = 0
    advantages: list[float] | None = None
    # (length, hash) of each prompt sent
    _prompts: list[tuple[int, int]] = field(default_factory=list, repr=False)
    num_cut_turns: int = field(default=0, repr=False)  # at a token limit, not at a stop token

    def start(self, chat: ChatTemplate, prompt: list[dict[str, Any]], observation: str) -> None:
        """Begin the sequence with the environment's prompt and first observation."""
        self.messages = [*prompt, {"role": "user", "content": observation}]
        self._append(chat.opening(prompt, observation))

    def add_observation(self, chat: ChatTemplate, text: str, max_tokens: int | None = None) -> bool:
        """Append an observation; its tokens get loss_mask 0. Returns False and appends nothing if
        the sequence would exceed `max_tokens`."""
        ids = chat.observation(text)
        if max_tokens is not None and len(self.input_ids) + len(ids) > max_tokens:
            return False
        self.messages.append({"role": "user", "content": text})
        self._append(ids)
        return True

    def add_action(
        self, chat: ChatTemplate, token_ids: Sequence[int], log_probs: Sequence[float]
    ) -> Turn:
        """Append an action that the policy sampled; only its tokens get loss_mask 1.

        Raises:
            ValueError: token_ids and log_probs differ in length, or are empty.
        """
        if len(token_ids) != len(log_probs) or not token_ids:
            raise ValueError(
                f"{self.trajectory_id}: {len(token_ids)} sampled ids, {len(log_probs)} log-probs; "
                "give one log-prob per id, and at least one id"
            )
        start = len(self.input_ids)
        self.input_ids += token_ids
        self.loss_mask += [1] * len(token_ids)
        self.rollout_log_probs += log_probs
        turn = Turn((start, len(self.input_ids)), chat.text_of(list(token_ids)))
        turn.kind = self.next_kind
        if token_ids[-1] != chat.end_of_turn:  # cut by a limit: we end the turn for the policy
            self._append([chat.end_of_turn])
        self.messages.append({"role": "assistant", "content": turn.action_text})
        self.turns.append(turn)
        self.num_cut_turns += token_ids[-1] not in chat.stop_token_ids
        return turn

    def next_prompt(self) -> list[int]:
        """The prompt of the next action; `check` verifies later that its ids did not change."""
        self._prompts.append((len(self.input_ids), hash(tuple(self.input_ids))))
        return self.input_ids

    def check(self) -> None:
        """RuntimeError if the list lengths differ or a prompt is not a prefix of `input_ids`."""
        lengths = {len(self.input_ids), len(self.loss_mask), len(self.rollout_log_probs)}
        if len(lengths) != 1:
            raise RuntimeError(
                f"{self.trajectory_id}: the token lists have different lengths {sorted(lengths)}"
            )
        for length, digest in self._prompts:
            if hash(tuple(self.input_ids[:length])) != digest:
                raise RuntimeError(
                    f"{self.trajectory_id}: a prompt of {length} ids is not a prefix of input_ids"
                )

    def stop(self, reason: str, success: bool = False) -> None:
        super().stop(reason, success)
        self.check()

    @property
    def is_valid(self) -> bool:
        """Also False if the policy sampled no tokens, because there is nothing to learn from."""
        return super().is_valid and any(self.loss_mask)

    def _append(self, ids: list[int]) -> None:
        self.input_ids += ids
        self.loss_mask += [0] * len(ids)
        self.rollout_log_probs += [0.0] * len(ids)


# ------------------------------------------------------------------------------ files and formats


def round_floats(numbers: Sequence[float]) -> list[float]:
    """Round to 7 significant digits, which halves the file size.

    This changes a log-prob of -10 by at most 5e-6 nats, while sampler and trainer differ by 4e-3 in
    bfloat16. Training uses the unrounded numbers in memory.

    >>> round_floats([-0.10536051541566849, 0.0, -1.2345678e-09])
    [-0.1053605, 0, -1.234568e-09]
    """
    return [float(f"{x:.{DIGITS}g}") if x else 0 for x in numbers]


def from_line(line: dict[str, Any]) -> Trajectory:
    """The inverse of `to_line`: a RolloutHandler, or a Trajectory if the line has no tokens.

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
            f"{line.get('trajectory_id')} is not a valid trajectory line: {error}"
        ) from None
