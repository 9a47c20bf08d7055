"""The chat template turns messages into token ids. Sampling, training and demonstrations share it.

A tokenizer's template renders a list of messages as one string. Rendering the conversation again
at every turn would be wrong for training: decoding sampled ids and encoding the text again can give
different ids, and some templates rewrite earlier messages (Qwen3 removes the thinking, Mistral 0.3
moves the system text to the last user message). The prompt of a turn would then differ from the
tokens that the policy saw and wrote in earlier turns.

`ChatTemplate` therefore extracts the text between turns only once. A trajectory then grows by
appending three kinds of pieces:

    opening      start of the conversation | first observation | tail, up to the assistant's turn
    action       the ids that the policy sampled, unchanged
    observation  the template's text after an action | observation | the same tail

For ChatML (Qwen, SmolLM2) the pieces are

    <|im_start|>system⏎ ... <|im_end|>⏎<|im_start|>user⏎ | OBS | <|im_end|>⏎<|im_start|>assistant⏎
    sampled ids ... <|im_end|>
    ⏎<|im_start|>user⏎ | OBS | <|im_end|>⏎<|im_start|>assistant⏎

To find them, the class renders a conversation of markers and cuts the result at the markers. Some
templates begin an answer in the history differently from the end of the prompt. Then
    the prompt opens a thought (Qwen3.5, DeepSeek-R1): a demonstration without one closes it first.
        The closing mark must be known: only <think> may stay open
    the history has an empty thought (GLM 4.5): such a demonstration writes it, the policy may think
    the history has a blank (Llama 2, Mistral): it belongs to the action
    the history has other text (gpt-oss: <|channel|>final<|message|>): it ends every prompt. So
        gpt-oss answers without analysis

Text from an environment is untrusted. If a web page contains `<|im_end|>`, this text becomes plain
characters and not the control token. Control tokens are those that the tokenizer marks as special,
and all added tokens in the template's own text. Marks that are ordinary text can be imitated (Llama
2's [INST]), but not the token that ends a turn. Contents are never trimmed.

Read next: `batching.py`, which turns trajectories into tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any

Piece = tuple[str, str]  # a text and the role of its author; "" for the template's own text

OPEN, CLOSE = "<think>", "</think>"
ANCHOR = "⟧"
# <think></think>, <|START_THINKING|><|END_THINKING|>, <|channel>thought<channel|>, or the end only
CLOSED = re.compile(r"([A-Za-z]{3,})\W+(thought\W+)?(\w*[_:])?\1\W*$|</think>\s*$")
OWN = re.compile(r"(?i)think|tool_call")  # control tokens that the policy may write in an action
SAMPLE = ("Goal: a log.", "Thought: easy.\nAction: get 1 log", "Got 1 log.", "go on", "Yes.")


class ChatTemplate:
    """A tokenizer's chat template, cut into the pieces between messages.

    Attributes:
        end_of_turn: id that ends an assistant turn; the policy samples it to stop.
        stop_token_ids: `end_of_turn`, the tokenizer's end-of-sequence id and `more_stops`
            (models.stop_ids_of). Sampling ends at any of them; the action text excludes it.

    Raises:
        ValueError: the template fails, has no end-of-turn token, rewrites contents, changes with
            the turn or prompt, opens an unknown thought; or pieces have other ids than the whole.
    """

    def __init__(self, tokenizer: Any, more_stops: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._known_ids = lru_cache(64)(partial(tokenizer.encode, add_special_tokens=False))
        added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        added |= zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        # Gemma's line breaks are added tokens, too, but they control nothing.
        self._marks = {mark: i for mark, i in added.items() if mark.strip("▁ \t\r\n")}
        roles = ("user", "assistant", "user", "assistant", "user")
        history = [{"role": r, "content": c} for r, c in zip(roles, SAMPLE, strict=True)]
        pieces = self._pieces(history)
        start, before, separator, *more, tail = [text for text, role in pieces if not role]
        if more != [before, separator]:
            parts = f"{[before, separator]} around one action, {more} around the next"
            raise ValueError(f"the chat template changes from turn to turn: {parts}")
        self._cut_separator(separator)
        self._cut_tail(before, tail)
        stops = {self.end_of_turn, tokenizer.eos_token_id, *more_stops}
        self.stop_token_ids = tuple(sorted(stops - {None}))
        system = {"role": "system", "content": "rules"}
        pieces += self._pieces([system, *history])
        template = self._lead + "".join(text for text, role in pieces if not role)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= {*tokenizer.all_special_ids}
        special -= {tokenizer.unk_token_id} & {*self._ids_of("\U000ffffd\U00013000")}  # [UNK]
        self._control = {i: m for m, i in self._marks.items() if i in special or m in template}
        if short := [mark for mark in self._control.values() if len(mark) == 1]:
            raise ValueError(f"the control token {short[0]!r} has one character, but needs two")
        for prompt in ([], history[:2], [system]):
            self.opening(prompt, SAMPLE[0])
        self._check_encoding(start)

    def opening(self, prompt: list[dict[str, Any]], observation: str) -> list[int]:
        """Ids from the start of the sequence to the beginning of the assistant's first turn.

        Args:
            prompt: messages before the first observation (system, or user and assistant). The
                first can have "tools", descriptions of functions for the template.
            observation: the environment's first text.
        Raises:
            ValueError: the template rejects these messages, drops the tools, or ends the prompt in
                another way.
        """
        *pieces, (end, _) = self._pieces([*prompt, {"role": "user", "content": observation}])
        if end != self._prompt_end:
            raise ValueError(f"the chat template ends prompts with {end!r} or {self._prompt_end!r}")
        return self._encode([*pieces, (self._tail, "")])

    def observation(self, text: str) -> list[int]:
        """Ids from after the end-of-turn token to the beginning of the assistant's next turn."""
        return self._encode([(self._header, ""), (text, "user"), (self._tail, "")], self._end)

    def action(self, text: str) -> list[int]:
        """Ids of an action given as text (a demonstration), including the end-of-turn token.

        Raises:
            ValueError: the action has a thought, but not exactly one, closed and at its start; or
                the prompt ends with a thought that is closed.
        """
        lead = self._lead
        if marks := re.findall(f"{OPEN}|{CLOSE}", text):
            text = text.lstrip()
            if marks != [OPEN, CLOSE] or not text.startswith(OPEN):
                raise ValueError(f"expected one {OPEN}...{CLOSE} at the start: {text!r:.60}")
            if self._tail.rstrip().endswith(CLOSE):
                raise ValueError("the chat template closes the thought: remove it from the data")
            lead = self._lead_of_thought
            text = text.removeprefix(OPEN).lstrip("\n") if self._thought else text
        pieces = [(lead, ""), (text, "assistant"), (self._trail, "")]
        return [*self._encode(pieces, self._tail), self.end_of_turn]

    def plain(self, text: str) -> list[int]:
        """Ids of untrusted text. Control tokens in it are encoded as ordinary characters."""
        return self._encode([(text, "user")], ANCHOR)

    def text_of(self, action_ids: list[int]) -> str:
        """Text of an action, without its stop token and without the template's text around an
        action. If the prompt opened the action's thought, the text begins with `<think>`, too."""
        end = len(action_ids) - (1 if action_ids and action_ids[-1] in self.stop_token_ids else 0)
        text = self.tokenizer.decode(action_ids[:end], skip_special_tokens=False)
        text = text.removesuffix(self._trail)
        if text.startswith(self._lead):
            return text[len(self._lead) :]
        return self._thought + text.removeprefix(self._lead_of_thought)

    def is_action(self, ids: Sequence[int]) -> bool:
        """Whether an action may have these ids: they have no control token except for the marks of
        a thought or a call and a stop token at the end."""
        inner = ids[:-1] if ids[-1] in self.stop_token_ids else ids
        return all(OWN.search(self._control.get(token, OPEN)) for token in inner)

    # ------------------------------------------------------------------------ cutting the template

    def _cut_separator(self, separator: str) -> None:
        """trail | end of turn | header: the text between an action and the next observation."""
        marks = sorted(self._marks, key=len, reverse=True)
        end = re.search("|".join(map(re.escape, marks)) or "(?!)", separator)
        if end is None or separator[: end.start()].strip():
            raise ValueError(
                "the chat template must end an assistant turn with a control token, but ends it "
                f"with {separator!r}"
            )
        self._trail, self._end, self._header = separator.partition(end[0])
        self.end_of_turn = self._marks[self._end]

    def _cut_tail(self, before: str, tail: str) -> None:
        """tail | lead: the text between an observation and an action. The prompt ends with the
        tail, and the policy writes the lead. `before` is this text in the history, `tail` is it in
        the generation prompt."""
        self._prompt_end, self._thought, lead = tail, "", ""
        rest = iter(before)
        is_shown = all(letter in rest for letter in tail if letter.strip())  # in this order
        if tail.rstrip().endswith(OPEN):
            self._thought = tail[tail.rindex(OPEN) :]
            blank = self._thought[len(OPEN) :]
            lead = blank + CLOSE + 2 * blank
        elif before.startswith(tail) and OPEN in before[len(tail) :]:
            lead = before[len(tail) :]
        elif not (is_shown or CLOSED.search(tail)):
            raise ValueError(f"the prompt opens something that this program cannot close: {tail!r}")
        elif not tail.startswith(before):
            tail = before
        # A blank belongs to the first token of the text after it.
        self._tail = tail if self._thought else tail.rstrip(" ")
        self._lead = tail[len(self._tail) :] + lead
        self._lead_of_thought = "" if self._thought else self._lead.partition(OPEN)[0]

    def _pieces(self, messages: list[dict[str, Any]]) -> list[Piece]:
        """Render messages. Returns the template's texts and the contents, which alternate."""
        contents = [(message["content"], message["role"]) for message in messages]
        n = next(n for n in count() if not any(f"⟦text {n}." in text for text, _ in contents))
        markers = {f"⟦text {n}.{i}⟧": content for i, content in enumerate(contents)}
        tools = messages[0].get("tools")
        chat = [{"role": role, "content": m} for m, (_, role) in markers.items()]
        text = self._render(chat, tools)
        if dropped := [t for t in tools or () if t["function"]["name"] not in text]:
            name = dropped[0]["function"]["name"]
            raise ValueError(f"the chat template drops tools: {name} is not in the prompt")
        texts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
        if not {*markers} <= {*texts}:
            raise ValueError("the chat template drops or rewrites message contents")
        return [markers.get(text, (text, "")) for text in texts]

    def _render(self, messages: list[dict[str, str]], tools: list[Any] | None = None) -> str:
        def render(chat: list[dict[str, str]]) -> str:
            try:
                return self.tokenizer.apply_chat_template(
                    chat, tools=tools, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # a template is a program that comes with the model
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                raise ValueError(
                    f"the chat template of {self.tokenizer.name_or_path} rejects a chat: {reason}"
                ) from error

        if messages[0]["role"] != "system":
            return render(messages)
        first, second, *later = messages
        # Templates without a system role raise a jinja error, or change or leave out the message.
        problem = None
        try:
            text = render(messages)
            if first["content"].strip() in text:
                return text
        except ValueError as error:
            problem = error
        joined = second | {"content": f"{first['content']}\n\n{second['content']}"}
        try:
            return render([joined, *later])
        except ValueError as error:
            raise problem or error from None

    # ------------------------------------------------------------------------------ encoding pieces

    def _check_encoding(self, start: str) -> None:
        """ValueError if the pieces of a conversation have other ids than the whole."""
        lead = "why" + self._lead if self._thought else self._lead
        text = start + SAMPLE[0]
        ids = self._encode([(text + self._tail, "")])
        for action, observation in zip(SAMPLE[1::2], SAMPLE[2::2], strict=True):
            text += f"{self._tail}{lead}{action}{self._trail}{self._end}{self._header}{observation}"
            ids += self.action(self._thought + lead + action if self._thought else action)
            ids += self.observation(observation)
        if ids != self._ids_of(text + self._tail):
            raise ValueError(
                f"the tokenizer {self.tokenizer.name_or_path} encodes the pieces of a conversation "
                "differently from the whole: it adds blanks, or a token crosses the prompt's end"
            )

    def _encode(self, pieces: Sequence[Piece], context: str = "") -> list[int]:
        """Ids of pieces that follow each other and a context. Control tokens in a content become
        ordinary characters, except for the marks of a thought in an action."""
        ids = self._ids_of("".join(text for text, _ in pieces), context)
        trusted = [piece for piece in pieces if piece[1] in ("", "assistant")]
        marks = [i for text, role in trusted for i in self._marks_in(text, role, is_own=True)]
        if [i for i in ids if i in self._control] == marks:
            return ids
        ids = []  # a content contains the text of a control token
        for text, role in pieces:
            for part in self._cut(text, role):
                ids += self._ids_of(part, context)
                context = ANCHOR if role or not ids else self._control.get(ids[-1], ANCHOR)
        return ids

    def _marks_in(self, text: str, role: str, is_own: bool) -> list[int]:
        """Control tokens in a text that its author may write, or those that the author may not."""
        ids = [i for i in self._ids_of(text) if i in self._control]
        own = {i for i in ids if OWN.search(self._control[i])}
        may_write = {"": {*ids}, "assistant": own}.get(role, set())
        return [i for i in ids if (i in may_write) == is_own]

    def _cut(self, text: str, role: str) -> list[str]:
        """Cut a content so that no part has a control token that its author may not write."""
        marks = [self._control[i] for i in {*self._marks_in(text, role, is_own=False)}]
        if not marks or len(text) == 1:
            return [text]
        cuts = (f"(?<={re.escape(mark[0])})(?={re.escape(mark[1:])})" for mark in marks)
        parts = re.split("|".join(cuts), text)
        if len(parts) == 1:  # the tokenizer's normalization makes the mark
            return list(text)
        return [small for part in parts for small in self._cut(part, role)]

    def _ids_of(self, text: str, context: str = "") -> list[int]:
        """Ids of a text after a context. Encoded alone, some tokenizers would put a blank before it
        (SentencePiece's dummy prefix). If a token would cross the border, the context is replaced
        by a character that merges with nothing."""
        for before in (context, ANCHOR, ""):
            skipped, ids = self._known_ids(before), self._known_ids(before + text)
            if ids[: len(skipped)] == skipped:
                break
        return ids[len(skipped) :]
