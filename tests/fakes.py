"""Fakes for tests of the rollout: tokenizers, an engine and an environment."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engines import Generation, SamplingSettings
from envclient import SessionLost, StepResult
from envs import Task
from rollout import RolloutRequest, RolloutSettings
from scale.default_models import CHATML
from trajectory import RolloutHandler

CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = "system user assistant rules dark lamp bright door open go north take light wait home no"


# ------------------------------------------------------------------------------- tokenizers


@functools.cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one id per word of WORDS and one for a line break; it drops spaces."""
    vocab = {word: i for i, word in enumerate([*CHATML_SPECIAL, "?", "\n", *WORDS.split()])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), "isolated"),
            pre_tokenizers.Split(Regex(" +"), "removed"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def ids_of(text: str) -> list[int]:
    """Ids of the words of `text`, in which <e> is the end-of-turn token."""
    return word_tokenizer().encode(text.replace("<e>", "<|im_end|>"), add_special_tokens=False)


def byte_tokenizer(
    chat_template: str | None = CHATML,
    special: tuple[str, ...] = CHATML_SPECIAL,
    eos: str = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """A tokenizer for any text, with one id per byte and one per special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    by_bytes = Tokenizer(models.BPE(vocab, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_bytes,
        eos_token=eos,
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
        chat_template=chat_template,
    )


TEMPLATES = Path(__file__).parent / "chat_templates"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def family_tokenizer(
    family: str, kind: str = "bytes", flagged: bool = True
) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of a public family and whole tokens for a few words.

    Args:
        kind: "bytes" as Qwen and Llama 3 have; or as SentencePiece makes it, which puts a blank
            before a text: "every" after each control token too, "first" at the beginning only.
        flagged: False: only the tokens that begin and end a sequence are marked as special.
    """
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    _, bos, eos, others = template[: template.index(" -#}") + 1].split(" | ")
    special = [token for token in (bos, eos, *others.split()) if token != "-"]
    blank = "Ġ" if kind == "bytes" else "▁"
    alphabet = [f"<0x{n:02X}>" for n in range(256)]
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = {
        (word[:n], word[n]): None
        for word in (f"{start}{word}" for start in (blank, "") for word in WORDS.split())
        for n in range(1, len(word))
    }
    tokens = ["<unk>", *alphabet, *(token for pair in merges for token in (*pair, "".join(pair)))]
    vocab = {token: n for n, token in enumerate(dict.fromkeys(tokens))}
    is_fallback = kind != "bytes"
    bpe = Tokenizer(models.BPE(vocab, [*merges], unk_token="<unk>", byte_fallback=is_fallback))
    if kind == "bytes":
        words = pre_tokenizers.Split(Regex(LETTERS), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
        bpe.decoder = decoders.ByteLevel()
    else:
        if kind == "every":
            blanks = [normalizers.Prepend(blank), normalizers.Replace(" ", blank)]
            bpe.normalizer = normalizers.Sequence(blanks)
        else:
            bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        to_text = [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse()]
        bpe.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
    for token in special:
        is_special = token in (bos, eos) or (flagged and "think" not in token)
        rstrip = family == "phi3" and token not in (bos, eos)  # as in Phi-3's tokenizer
        added = AddedToken(token, special=is_special, normalized=False, rstrip=rstrip)
        (bpe.add_special_tokens if is_special else bpe.add_tokens)([added])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=None if bos == "-" else bos,
        eos_token=eos,
        unk_token="<unk>",
        chat_template=template,
    )


def draw(handler: RolloutHandler, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The trajectory's tokens in order, [bracketed] where loss_mask is 1."""
    names = {"<|im_start|>": "<s>", "<|im_end|>": "<e>", "\n": "⏎"}
    drawing = []
    for token, mask in zip(tokenizer.convert_ids_to_tokens(handler.input_ids), handler.loss_mask):
        name = names.get(token, token)
        drawing.append(f"[{name}]" if mask else name)
    return drawing


# ----------------------------------------------------------------------------------- engine


class ScriptedEngine:
    """An engine that samples the ids that `answer(request_id, prompt_ids)` returns.

    Like a real engine, it stops at a stop token or at the limit. Token n (from 0) has log-prob
    -(n + 1) / 8. A request finishes when `is_ready(request_id)` is true. Each poll begins with
    `on_poll()`, which can raise.
    """

    def __init__(
        self,
        answer: Callable[[str, list[int]], list[int]],
        is_ready: Callable[[str], bool] = lambda request_id: True,
        on_poll: Callable[[], None] = lambda: None,
        max_open: int | None = None,
    ) -> None:
        self.max_open, self.num_samplers = max_open, 1
        self.answer, self.is_ready, self.on_poll = answer, is_ready, on_poll
        self.requests: list[tuple[str, list[int], SamplingSettings]] = []
        self.aborted = False
        self._running: dict[str, Generation] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request_id: str, prompt_ids: list[int], sampling: SamplingSettings) -> None:
        assert request_id not in self._running, f"{request_id} submitted twice"
        prompt_ids = list(prompt_ids)
        self.requests.append((request_id, prompt_ids, sampling))
        ids = []
        for token in self.answer(request_id, prompt_ids)[: sampling.max_tokens]:
            ids.append(token)
            if token in sampling.stop_token_ids:
                break
        reason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
        log_probs = [-(n + 1) / 8 for n in range(len(ids))]
        self._running[request_id] = Generation(request_id, ids, log_probs, reason)

    def poll(self) -> list[Generation]:
        self.on_poll()
        ready = [name for name in self._running if self.is_ready(name)]
        return [self._running.pop(name) for name in ready]

    def abort(self) -> None:
        self.aborted = True
        self._running.clear()


# ------------------------------------------------------------------------------ environment


def observe(
    observation: str,
    reward: float = 0.0,
    terminated: bool = False,
    truncated: bool = False,
    **info: object,
) -> StepResult:
    """A StepResult in one line. By default, `success` means a full reward at the end."""
    info = {"success": terminated and reward >= 1.0, "score": reward, **info}
    return StepResult(observation, reward, terminated, truncated, info)


class FakeClient:
    """One session of FakePool. After close() it fails like a real session."""

    prompt = ({"role": "system", "content": "rules"},)
    base_url = "http://fake"

    def __init__(self, pool: "FakePool") -> None:
        self.pool, self.task_index, self.num_turns = pool, -1, 0

    def reset(self, task_index: int, seed: int = 0) -> str:
        self.task_index, self.num_turns, self.score = task_index, 0, 0.0
        return self.pool.on_reset(task_index)

    def step(self, text: str) -> StepResult:
        self.num_turns += 1
        result = self.pool.play(self.task_index, self.num_turns, text)
        if self not in self.pool.open:
            raise self.pool.closed_error
        self.score += result.reward
        return result

    def state(self) -> dict:
        return self.pool.on_state(self.task_index, self.num_turns)

    def close(self) -> None:
        with self.pool.lock:
            self.pool.open.discard(self)


class FakePool:
    """An environment made of functions, which can raise. Turns are counted from 1.

    `play(task_index, turn, text)` is a step; `on_open()` runs while a session is opened.
    """

    env = "fake"

    def __init__(
        self,
        play: Callable[[int, int, str], StepResult],
        on_reset: Callable[[int], str] = lambda task_index: "dark",
        on_state: Callable[[int, int], dict] = lambda task_index, turn: {"turn": turn},
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self.play, self.on_reset, self.on_state, self.on_open = play, on_reset, on_state, on_open
        self.closed_error = SessionLost("the session is closed", "http://fake/step", 404)
        self.lock = threading.Lock()
        self.open: set[FakeClient] = set()
        self.num_opened = 0

    def for_env(self, env: str) -> "FakePool":
        return self

    def client(self, avoid=()) -> FakeClient:
        client = FakeClient(self)
        self.on_open()
        with self.lock:
            self.open.add(client)
            self.num_opened += 1
        return client


def requests_of(
    num_tasks: int, num_samples: int = 1, step: int = 1, max_rounds: int = 3
) -> list[RolloutRequest]:
    """Requests for tasks 0, 1, ..., with `num_samples` samples each."""
    return [
        RolloutRequest(Task(f"fake_{i}", i, "easy"), i, k, seed=i, step=step, max_rounds=max_rounds)
        for i in range(num_tasks)
        for k in range(num_samples)
    ]


def settings_of(**options: object) -> RolloutSettings:
    """Settings with generous limits."""
    defaults = {"max_tokens_per_turn": 16, "max_trajectory_tokens": 400}
    return RolloutSettings(**{**defaults, "max_env_failures": 1.0, **options})
