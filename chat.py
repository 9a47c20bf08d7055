"""One encoding path: from messages to token ids, the same for sampling, for training and for
demonstrations.

A chat template turns messages into one string. Rendering the conversation again each turn is wrong
for training: sampled ids that are decoded and encoded again become other ids, and some templates
rewrite history (Qwen3 strips thinking), so the prompt drifts away from what the policy saw.

`ChatTemplate` therefore asks the tokenizer's template once what stands between turns, and from then
on a trajectory only grows by concatenation:

    opening      head of the render | first observation | tail up to where the assistant speaks
    action       the ids that the policy sampled, as sampled
    observation  what the template puts after a turn | observation | the same tail

For ChatML (Qwen, SmolLM2) the pieces are

    <|im_start|>system⏎ ... <|im_end|>⏎<|im_start|>user⏎ | OBS | <|im_end|>⏎<|im_start|>assistant⏎
    sampled ids ... <|im_end|>
    ⏎<|im_start|>user⏎ | OBS | <|im_end|>⏎<|im_start|>assistant⏎

They are found by rendering a conversation whose contents are markers and cutting the string at the
markers.

Text of an environment is untrusted: `<|im_end|>` written by a web page is encoded as plain
characters, not as the control token, if the tokenizer marks that token as special.

Read next: `batching.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

USER, ASSISTANT, SECOND = "⟦first observation⟧", "⟦first action⟧", "⟦second observation⟧"


def is_sound(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    return text.isascii() or text.encode("utf-8", "ignore").decode() == text


class ChatTemplate:
    """The pieces of a tokenizer's chat template.

    Attributes: end_of_turn: id that ends an assistant turn (what the policy must sample to stop).
        stop_token_ids: `end_of_turn`, the tokenizer's end-of-sequence id and `more_stops`
        (models.stop_ids_of): sampling ends at any of them, and none is part of what was said.

    Raises:
        ValueError: the template cannot be cut (an assistant turn has no end marker, or contents are
            rewritten).
    """

    def __init__(self, tokenizer: Any, more_stops: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        # NOTE: whether control tokens are recognised is a switch inside the tokenizer, set by each
        # call; threads that share one tokenizer flip it under each other. Plain text has its own.
        self._plain = copy.deepcopy(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        self._spelled = {*tokenizer.all_special_tokens, *(str(t) for t in added if t.special)}
        self.plain("")  # the first call sets the switch, before any thread is there
        history = [
            {"role": "user", "content": USER},
            {"role": "assistant", "content": ASSISTANT},
            {"role": "user", "content": SECOND},
        ]
        text = self._render(history)
        try:
            between = text[text.index(ASSISTANT) + len(ASSISTANT) : text.index(SECOND)]
            self._tail = self._control(text[text.index(SECOND) + len(SECOND) :])
        except ValueError as error:
            raise ValueError(
                "the chat template drops or rewrites message contents; it cannot be cut"
            ) from error
        ids = self._control(between)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        if not ids or ids[0] not in special:
            raise ValueError(
                "the chat template ends an assistant turn with no control token, but with "
                f"{between!r}"
            )
        self.end_of_turn, self._between = ids[0], ids[1:]
        stops = {self.end_of_turn, tokenizer.eos_token_id, *more_stops}
        self.stop_token_ids = tuple(sorted(stops - {None}))

    def opening(self, prompt: list[dict[str, str]], observation: str) -> list[int]:
        """Ids from the start of the sequence to where the assistant speaks first.

        Args:
            prompt: messages before the first observation (system, or user and assistant).
            observation: the environment's first text.
        """
        held = {USER: observation}  # marker in the render -> untrusted text
        messages = []
        for i, message in enumerate(prompt):
            if any(token in message["content"] for token in self._spelled):
                held[f"⟦turn {i}⟧"] = message["content"]  # untrusted too
                message = message | {"content": f"⟦turn {i}⟧"}
            messages.append(message)
        text = self._render([*messages, {"role": "user", "content": USER}])
        pieces = re.split(f"({'|'.join(map(re.escape, held))})", text)
        encoded = (self.plain(held[p]) if p in held else self._control(p) for p in pieces)
        return [token for ids in encoded for token in ids]

    def observation(self, text: str) -> list[int]:
        """Ids from behind the assistant's end-of-turn to where it speaks next."""
        return self._between + self.plain(text) + self._tail

    def action(self, text: str) -> list[int]:
        """Ids of an action given as text (a demonstration), its end-of-turn included."""
        return [*self.plain(text), self.end_of_turn]

    def plain(self, text: str) -> list[int]:
        """Ids of untrusted text: control tokens written in it become ordinary characters."""
        return self._plain.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text_of(self, action_ids: list[int]) -> str:
        """What the policy said, without its stop token."""
        end = len(action_ids) - (1 if action_ids and action_ids[-1] in self.stop_token_ids else 0)
        return self.tokenizer.decode(action_ids[:end], skip_special_tokens=False)

    def _control(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _render(self, messages: list[dict[str, str]]) -> str:
        def render(chat: list[dict[str, str]]) -> str:
            try:
                return self.tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True
                )
            except TemplateError as error:
                told = " ".join(str(error).split())[:200]
                raise ValueError(f"the chat template does not take this chat: {told}") from error

        if messages[0]["role"] != "system":
            return render(messages)
        first, second, *rest = messages
        # Templates without a system role raise an error of jinja's, or leave the message out.
        problem = None
        try:
            text = render(messages)
            if first["content"].strip() in text:
                return text
        except Exception as error:
            if not any(word in str(error).lower() for word in ("system", "role")):
                raise
            problem = error
        joined = {"role": "user", "content": f"{first['content']}\n\n{second['content']}"}
        try:
            return render([joined, *rest])
        except Exception as error:
            raise problem or error from None
