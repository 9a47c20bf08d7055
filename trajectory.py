"""One trajectory as token ids and masks: what was said, by whom, how likely it was when sampled.

A multi-turn trajectory is an alternation of what the environment says (o) and what the policy says
(a), kept as token ids in lists of equal length:

    input_ids          o₀ o₀ o₀  a₀ a₀ <end>  o₁ o₁  a₁ a₁ a₁   what the model is fed
    loss_mask           0  0  0   1  1   1     0  0   1  1  1   1: sampled by the policy
    rollout_log_probs   0  0  0   •  •   •     0  0   •  •  •   log μ when it was drawn

Two rules make it exact, and each has broken a published system:
  * token ids in, token ids out. Sampled ids are appended as sampled; nothing is decoded and encoded
    again. Each prompt sent to the engine is therefore a prefix of the final sequence, which
    `check()` verifies every time.
  * mask 1 only on sampled tokens. A turn cut at `max_tokens_per_turn` gets its end-of-turn appended
    with mask 0.

Read next: `rollout.py`, the loop that grows many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chat import ChatTemplate
from metrics import LOST

TOKEN_FIELDS = ("input_ids", "loss_mask", "rollout_log_probs", "advantages", "weight_version")


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
        """One JSON object of `trajectories/*.jsonl`; fields about tokens are null without any."""
        line = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        turns = [asdict(turn) for turn in self.turns]
        return dict.fromkeys(TOKEN_FIELDS) | line | {"turns": turns, "return": self.total_return}


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

    def add_observation(self, chat: ChatTemplate, text: str) -> None:
        """Append what the environment said; its tokens get loss_mask 0."""
        self.messages.append({"role": "user", "content": text})
        self._append(chat.observation(text))

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
        """The ids to sample from now; remembered for `check`."""
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
                    f"{self.trajectory_id}: a prompt of {length} ids is no prefix of the sequence"
                )

    def stop(self, reason: str, success: bool = False) -> None:
        super().stop(reason, success)
        self.check()

    @property
    def attention_mask(self) -> list[int]:
        """1 on every token: padding exists only in batches, known there by length, not by id."""
        return [1] * len(self.input_ids)

    @property
    def position_ids(self) -> list[int]:
        return list(range(len(self.input_ids)))

    @property
    def is_valid(self) -> bool:
        """False also when the policy never spoke: there is nothing to learn from."""
        return super().is_valid and any(self.loss_mask)

    def _append(self, ids: list[int]) -> None:
        self.input_ids += ids
        self.loss_mask += [0] * len(ids)
        self.rollout_log_probs += [0.0] * len(ids)
