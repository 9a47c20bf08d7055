"""
Play an environment with a model behind an OpenAI-compatible chat server.

Such a server takes messages and returns text: no token ids, no log-probs. Nothing can be trained on
that, but everything can be measured, so this file has a short episode loop over messages:

    messages = PROMPT + [first observation]
    repeat at most max_rounds times:
        text        = POST /chat/completions {model, messages, max_tokens, temperature, seed}
        observation = env.step(text)
        messages   += [assistant: text, user: observation]

Each episode runs in a thread of its own. A trajectory is written as the same line as one of token
ids, with the token fields (`input_ids`, `loss_mask`, `rollout_log_probs`) null.

    429, 408, 409, 5xx, time-out, connection      asked again with back-off (`Retry-After` counts);
    lost, an answer that is no chat completion    then the trajectory is lost: `engine_error`
    400 or 413 about the length of the context    the conversation is full: stop_reason `length`
    400 or 422 in the middle of an episode        what was said there, a filter: `engine_error`
    any other 4xx (key, model name, option), 3xx  will fail for every request: the run stops
    nobody has ever answered at the address       the same
    an answer without text                        the model said "": an unparsable action, reward 0
    the environment server fails                  as in rollout.py: a reset is tried 3 times, an
                                                  episode once more from its reset; then `env_error`

Read next: evaluate.py, which turns trajectories into numbers (`--api-base`).
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from urllib.parse import urlsplit

import httpx

from engines import EngineError
from envclient import EnvClient, EnvError, EnvPool
from envs.http import (
    JSON_HEADERS,
    Answer,
    ConnectionLost,
    ExchangeError,
    HttpClient,
    checked_url,
    parse,
    proxy_of,
)
from rollout import (
    NUM_TRIES,
    RolloutRequest,
    RolloutSettings,
    check_failures,
    sampling_seed,
    state_of,
    take_result,
)
from trajectory import Trajectory, Turn

MAY_PASS = (408, 409, 429)  # of the 4xx: asked again
FIRST_WAIT_S, MAX_WAIT_S, MAX_RETRY_AFTER_S = 0.5, 8.0, 60.0  # before another try
NEWER_LIMIT = "max_completion_tokens"  # what OpenAI's reasoning models call max_tokens
LENGTH_WORDS = ("context", "too long", "maximum length")  # in a refusal: the conversation is full


class ApiError(EngineError):
    """The chat server gave no usable answer, also not when asked again."""


class ApiRefused(ApiError):
    """The server will refuse every request like this one (key, model name, option)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of the answer, if there was one


class ContextFull(ApiError):
    """The conversation no longer fits the model's context."""


class Stopped(Exception):
    """The run is stopped while this episode waits."""


class ChatApi:
    """POST /chat/completions with time-outs and a bounded number of retries.

    Args:
        base_url: what an OpenAI client takes as base_url; a bare http://host:port gets /v1.
        api_key: sent as bearer token; never logged.
        timeout_s: seconds for one answer, to its last byte.
        max_retries: further attempts after the first; 8 wait about 40 s in all.

    Raises: ValueError if the address is not one, or holds a user, a password or a key.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        max_retries: int = 8,
    ) -> None:
        base = checked_url(base_url, "--api-base")
        base += "" if urlsplit(base).path else "/v1"
        self.url, self.model, self.max_retries = f"{base}/chat/completions", model, max_retries
        self.stopped = threading.Event()  # once set, nothing is asked any more
        self._limit = "max_tokens"
        self._has_answered = False
        self._headers = JSON_HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        # Certificates that come with Python packages: a container may lack the system's.
        context = httpx.create_ssl_context() if base.startswith("https") else None
        proxy = proxy_of(base)
        self._http = HttpClient(base, timeout_s, proxy_url=proxy, ssl_context=context)

    def complete(
        self, messages: list[dict[str, str]], max_tokens: int, temperature: float, seed: int
    ) -> str:
        """The model's next message; "" if it has no text.

        Raises: ContextFull, ApiRefused, ApiError after the last retry, Stopped.
        """
        body = {
            "model": self.model,
            # Some servers refuse a message without text.
            "messages": [m | {"content": m["content"] or " "} for m in messages],
            "temperature": temperature,
            "seed": seed % 2**31,  # some servers' field is not wider
        }
        wait_s = 0.0
        for attempt in range(self.max_retries + 1):
            if self.stopped.wait(wait_s):
                raise Stopped
            wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.75, 1)
            limit = self._limit  # another thread may change it
            content = json.dumps(body | {limit: max_tokens}).encode()
            try:
                answer = self._http.ask("POST", "/chat/completions", content, self._headers)
            except ExchangeError as error:
                is_lost = isinstance(error, ConnectionLost)
                if is_lost and not self._has_answered and not self.stopped.is_set():
                    what = "nobody answers at this address; is the server running? See --api-base"
                    raise ApiRefused(f"{self.url}: {what}") from None
                problem = str(error)
            else:
                self._has_answered = True
                text = message_text(answer)
                if text is not None:
                    return text
                problem = f"HTTP {answer.status}: {' '.join(answer.text[:300].split())}"
                if answer.status == 400 and limit != NEWER_LIMIT and NEWER_LIMIT in answer.text:
                    self._limit = NEWER_LIMIT
                    return self.complete(messages, max_tokens, temperature, seed)
                self._raise_if_final(answer, problem)
                wait_s = retry_after(answer) or wait_s
        raise ApiError(f"{self.url} gave no answer in {attempt + 1} attempts; {problem}")

    def stop(self) -> None:
        """No more questions: what is asked, or waits for a retry, ends now."""
        self.stopped.set()
        self._http.abort()

    def _raise_if_final(self, answer: Answer, problem: str) -> None:
        """Raise unless the same request may pass later."""
        status, text = answer.status, answer.text.lower()
        if 300 <= status < 400:  # not followed: the key would go wherever the answer says
            problem += f" (it leads to {answer.headers.get('Location', '')[:300]!r})"
        if status in (400, 413) and any(words in text for words in LENGTH_WORDS):
            raise ContextFull(f"{self.url} answered {problem}")
        if 300 <= status < 500 and status not in MAY_PASS:
            raise ApiRefused(f"{self.url} answered {problem}", status)


def message_text(answer: Answer) -> str | None:
    """The text of a chat completion, "" if its content is null; None if it is not one."""
    if answer.status != 200:
        return None
    try:
        content = parse(answer.body)["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if isinstance(content, list):  # some servers send parts, of which text is one kind
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def retry_after(answer: Answer) -> float | None:
    """Seconds to wait, as the server says."""
    with contextlib.suppress(ValueError):
        seconds = float(answer.headers.get("Retry-After", ""))
        if 0 < seconds <= MAX_RETRY_AFTER_S:
            return seconds
    return None


# ---------------------------------------------------------------------------------------- episodes


def run_api_episode(
    api: ChatApi,
    client: EnvClient,
    request: RolloutRequest,
    settings: RolloutSettings,
    trajectory: Trajectory,
) -> None:
    """Play one episode to its end and fill `trajectory`.

    Raises: EnvError if the environment fails, ApiError if the chat server does, Stopped.
    """
    t, task = trajectory, request.task
    # For the chat server; it differs between the samples of a task.
    seed = sampling_seed(settings.seed, request.step, task.task_id, request.sample, turn=0)
    observation = client.reset(task.task_index, seed=request.seed)
    t.messages = [*client.prompt]
    t.first_state = state_of(client) if settings.record_state else None
    while True:
        t.messages.append({"role": "user", "content": observation})
        began = time.perf_counter()
        try:
            text = api.complete(
                t.messages, settings.max_tokens_per_turn, settings.temperature, seed
            )
        except ContextFull as error:
            if not t.turns:  # the request itself never fits
                raise ApiRefused(f"{error}; a smaller --max-tokens-per-turn may") from None
            return t.stop("length")
        except ApiRefused as error:
            if t.turns and error.status in (400, 422):  # a filter: concerns this episode alone
                raise ApiError(str(error)) from None
            raise
        generated = time.perf_counter()
        result = client.step(text)
        t.messages.append({"role": "assistant", "content": text})
        turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type] # no tokens
        turn.generate_s, turn.env_s = generated - began, time.perf_counter() - generated
        if settings.record_state:
            turn.state = state_of(client)
        t.turns.append(turn)
        if not take_result(t, turn, result):
            return
        observation = result.observation


def collect_api(
    api: ChatApi,
    pool: EnvPool,
    requests: Sequence[RolloutRequest],
    settings: RolloutSettings,
    progress: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """`rollout.collect` over messages, `settings.env_workers` episodes at a time.

    Args:
        api: is stopped when this returns or raises.
        progress: called with each trajectory as it ends, from this thread.
    Raises: ApiRefused, TooManyEnvFailures; episodes under way are dropped.
    """
    threads = ThreadPoolExecutor(settings.env_workers)
    try:
        futures = [threads.submit(_play_with_retries, api, pool, r, settings) for r in requests]
        finished: list[Trajectory] = []
        for future in as_completed(futures):
            finished.append(future.result())
            if progress:
                progress(finished[-1])
            check_failures(finished, settings.max_env_failures, total=len(requests))
    finally:
        api.stop()
        threads.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]


def _play_with_retries(
    api: ChatApi, pool: EnvPool, request: RolloutRequest, settings: RolloutSettings
) -> Trajectory:
    """Play; what a server loses is tried again, then marked with its stop_reason and error."""
    tries_left = {"reset": NUM_TRIES, "step": 2, "ask": 1}
    tried: set[str] = set()
    while True:
        trajectory = Trajectory(**request.heading(pool.env))
        try:
            with contextlib.closing(pool.client(avoid=tried)) as client:
                tried.add(client.base_url)
                run_api_episode(api, client, request, settings, trajectory)
                return trajectory
        except ApiRefused:
            raise
        except (EnvError, ApiError) as error:
            failed = "step" if trajectory.messages else "reset"
            failed = "ask" if isinstance(error, ApiError) else failed
            tries_left[failed] -= 1
            if not tries_left[failed]:
                trajectory.error = " ".join(str(error).split())
                trajectory.stop("engine_error" if failed == "ask" else "env_error")
                return trajectory
