"""The chat template turns messages into token ids. Sampling, training and demonstrations share it.

A tokenizer's template renders a list of messages as one string. Rendering the conversation again
at every turn would be wrong for training: decoding sampled ids and encoding the text again can give
different ids, and some templates rewrite earlier messages (Qwen3 removes the thinking). The prompt
of a turn would then differ from the tokens that the policy saw and wrote in earlier turns.

`ChatTemplate` therefore extracts the text between turns only once. A trajectory then grows by
appending three kinds of pieces:

    opening      start of the conversation | first observation | tail, up to the assistant's turn
    action       the ids that the policy sampled, unchanged
    observation  the template's text after an action | observation | the same tail

For ChatML (Qwen, SmolLM2) the pieces are

    <|im_start|>system⏎ ... <|im_end|>⏎<|im_start|>user⏎ | OBS | <|im_end|>⏎<|im_start|>assistant⏎
    sampled ids ... <|im_end|>
    ⏎<|im_start|>user⏎ | OBS | <|im_end|>⏎<|im_start|>assistant⏎

To find them, the class renders a conversation of markers and cuts the result at the markers.

Text from an environment is untrusted. If a web page contains `<|im_end|>`, this text becomes plain
characters and not the control token, provided that the tokenizer marks the token as special.

Read next: `batching.py`, which turns trajectories into tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

USER, ASSISTANT, SECOND = "⟦first observation⟧", "⟦first action⟧", "⟦second observation⟧"


def is_encodable(text: str) -> bool:
    """False if the text contains half of a surrogate pair: JSON allows it, tokenizers reject it."""
    return text.isascii() or text.encode("utf-8", "ignore").decode() == text


class ChatTemplate:
    """A tokenizer's chat template, cut into the pieces between messages.

    Attributes:
        end_of_turn: id that ends an assistant turn; the policy samples it to stop.
        stop_token_ids: `end_of_turn`, the tokenizer's end-of-sequence id and `more_stops`
            (models.stop_ids_of). Sampling ends at any of them; the action text excludes it.

    Raises:
        ValueError: the template cannot be cut, because it has no end-of-turn token or because it
            rewrites message contents.
    """

    def __init__(self, tokenizer: Any, more_stops: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        # NOTE: each call sets a switch inside the tokenizer: recognise control tokens or not.
        # Threads that share a tokenizer would change it for each other, so plain text uses a copy.
        self._plain = copy.deepcopy(tokenizer)
        added_tokens = tokenizer.added_tokens_decoder.values()
        specials = (str(token) for token in added_tokens if token.special)
        self._control_texts = {*tokenizer.all_special_tokens, *specials}
        self.plain("")  # set the switch of the copy now, before any thread uses it
        history = [
            {"role": "user", "content": USER},
            {"role": "assistant", "content": ASSISTANT},
            {"role": "user", "content": SECOND},
        ]
        text = self._render(history)
        try:
            separator = text[text.index(ASSISTANT) + len(ASSISTANT) : text.index(SECOND)]
            self._tail = self._control(text[text.index(SECOND) + len(SECOND) :])
        except ValueError as error:
            raise ValueError(
                "the chat template drops or rewrites message contents, so it cannot be used here"
            ) from error
        ids = self._control(separator)
        special_ids = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        if not ids or ids[0] not in special_ids:
            raise ValueError(
                "the chat template must end an assistant turn with a control token, but ends it "
                f"with {separator!r}"
            )
        self.end_of_turn, self._separator = ids[0], ids[1:]
        stops = {self.end_of_turn, tokenizer.eos_token_id, *more_stops}
        self.stop_token_ids = tuple(sorted(stops - {None}))

    def opening(self, prompt: list[dict[str, str]], observation: str) -> list[int]:
        """Ids from the start of the sequence to the beginning of the assistant's first turn.

        Args:
            prompt: messages before the first observation (system, or user and assistant).
            observation: the environment's first text.
        """
        untrusted = {USER: observation}  # marker in the rendered chat -> text
        messages = []
        for i, message in enumerate(prompt):
            if any(token in message["content"] for token in self._control_texts):
                untrusted[f"⟦turn {i}⟧"] = message["content"]
                message = message | {"content": f"⟦turn {i}⟧"}
            messages.append(message)
        text = self._render([*messages, {"role": "user", "content": USER}])
        parts = re.split(f"({'|'.join(map(re.escape, untrusted))})", text)
        encoded = (self.plain(untrusted[p]) if p in untrusted else self._control(p) for p in parts)
        return [token for ids in encoded for token in ids]

    def observation(self, text: str) -> list[int]:
        """Ids from after the end-of-turn token to the beginning of the assistant's next turn."""
        return self._separator + self.plain(text) + self._tail

    def action(self, text: str) -> list[int]:
        """Ids of an action given as text (a demonstration), including the end-of-turn token."""
        return [*self.plain(text), self.end_of_turn]

    def plain(self, text: str) -> list[int]:
        """Ids of untrusted text. Control tokens in it are encoded as ordinary characters."""
        return self._plain.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text_of(self, action_ids: list[int]) -> str:
        """Text of an action, without its stop token."""
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
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"the chat template rejects this chat: {reason}") from error

        if messages[0]["role"] != "system":
            return render(messages)
        first, second, *later = messages
        # Templates without a system role raise a jinja error or leave the message out.
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
            return render([joined, *later])
        except Exception as error:
            raise problem or error from None
