"""Scripted stand-ins that tests of the rollout share: tokenizers, an engine, an environment."""

import functools
import threading
from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
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
    """Every word of WORDS and the line break are one id each; spaces are nothing."""
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
    """Ids of the words of `text`; <e> is the end of turn."""
    return word_tokenizer().encode(text.replace("<e>", "<|im_end|>"), add_special_tokens=False)


def byte_tokenizer(
    chat_template: str | None = CHATML,
    special: tuple[str, ...] = CHATML_SPECIAL,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
    bos: str | None = None,
) -> PreTrainedTokenizerFast:
    """One id a byte, and one for each special token: any text, and nothing merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    by_bytes = Tokenizer(models.BPE(vocab, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_bytes,
        eos_token=eos,
        pad_token=pad,
        bos_token=bos,
        additional_special_tokens=list(special),
        chat_template=chat_template,
    )


def draw(handler: RolloutHandler, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The trajectory's tokens in order, [bracketed] where loss_mask is 1."""
    names = {"<|im_start|>": "<s>", "<|im_end|>": "<e>", "\n": "⏎"}
    drawn = []
    for token, mask in zip(tokenizer.convert_ids_to_tokens(handler.input_ids), handler.loss_mask):
        name = names.get(token, token)
        drawn.append(f"[{name}]" if mask else name)
    return drawn


# ----------------------------------------------------------------------------------- engine


class ScriptedEngine:
    """`answer(request_id, prompt_ids)` returns what is sampled, cut as an engine would.

    The n-th id of an answer has log-prob -(n + 1) / 8. A request is decoded until
    `is_ready(request_id)`; `on_poll()` runs first in each poll and may raise.
    """

    def __init__(
        self,
        answer: Callable[[str, list[int]], list[int]],
        is_ready: Callable[[str], bool] = lambda request_id: True,
        on_poll: Callable[[], None] = lambda: None,
        max_open: int | None = None,
    ) -> None:
        self.max_open = max_open
        self.answer, self.is_ready, self.on_poll = answer, is_ready, on_poll
        self.asked: list[tuple[str, list[int], SamplingSettings]] = []
        self.aborted = False
        self._running: dict[str, Generation] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request_id: str, prompt_ids: list[int], sampling: SamplingSettings) -> None:
        assert request_id not in self._running, f"{request_id} submitted twice"
        prompt_ids = list(prompt_ids)
        self.asked.append((request_id, prompt_ids, sampling))
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
        done = [name for name in self._running if self.is_ready(name)]
        return [self._running.pop(name) for name in done]

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
    """A StepResult in one line; `success` unless said otherwise is a full reward at the end."""
    info = {"success": terminated and reward >= 1.0, "score": reward, **info}
    return StepResult(observation, reward, terminated, truncated, info)


class FakeClient:
    """One session of FakePool; used after close() it fails as a real one does."""

    prompt = ({"role": "system", "content": "rules"},)
    base_url = "http://fake"

    def __init__(self, pool: "FakePool") -> None:
        self.pool, self.task_index, self.num_turns = pool, -1, 0

    def reset(self, task_index: int, seed: int = 0) -> str:
        self.task_index, self.num_turns = task_index, 0
        return self.pool.on_reset(task_index)

    def step(self, text: str) -> StepResult:
        self.num_turns += 1
        result = self.pool.play(self.task_index, self.num_turns, text)
        if self not in self.pool.open:
            raise self.pool.closed_error
        return result

    def state(self) -> dict:
        return self.pool.on_state(self.task_index, self.num_turns)

    def close(self) -> None:
        with self.pool.lock:
            self.pool.open.discard(self)


class FakePool:
    """An environment written as functions, which may raise; turns are counted from 1.

    `play(task_index, turn, text)` is a step; `on_open()` runs while a session is being opened.
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

    def of(self, world: str) -> "FakePool":
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
    """Tasks 0, 1, ...; each is a group of `num_samples`."""
    return [
        RolloutRequest(Task(f"fake_{i}", i, "easy"), i, k, seed=i, step=step, max_rounds=max_rounds)
        for i in range(num_tasks)
        for k in range(num_samples)
    ]


def settings_of(**options: object) -> RolloutSettings:
    """Roomy settings; every loss is an error unless said otherwise."""
    defaults = {"max_tokens_per_turn": 16, "max_trajectory_tokens": 400}
    return RolloutSettings(**{**defaults, "max_env_failures": 1.0, **options})
