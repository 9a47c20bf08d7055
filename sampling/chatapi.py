"""
Play an environment with a model behind an OpenAI-compatible chat server.

The server receives messages and returns text, without token ids or log-probs. This is enough to
evaluate a model, but not to train it. So this file has a short episode loop over messages:

    messages = PROMPT + [first observation]
    repeat at most max_rounds times:
        text        = POST /chat/completions {model, messages, max_tokens, temperature, seed}
        observation = env.step(text)
        messages   += [assistant: text, user: observation]

Each episode runs in a separate thread. Trajectories are written in the same format as those of a
local model, with null in the token fields (`input_ids`, `loss_mask`, `rollout_log_probs`).

    429, 408, 409, 5xx, time-out, connection      retried with back-off (`Retry-After` is honoured);
    lost, an answer without a chat completion     if all retries fail, lost as `engine_error`
    400 or 413 about the length of the context    the conversation is full: stop_reason `length`
    400 or 422 in the middle of an episode        a filter refused the text: `engine_error`
    any other 4xx (key, model name, option), 3xx  would fail for every request: the run stops
    no server ever answered at the address        the run stops
    an answer without text                        treated as "": an unparsable action, reward 0
    the environment server fails                  as in rollout.py: up to 3 resets, one restart
                                                  per episode, then `env_error`

Read next: evaluate.py, which turns trajectories into numbers (`--api-base`).
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
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
    masked,
    parse,
    proxy_of,
)
from rollout import (
    NUM_RESETS,
    RolloutRequest,
    RolloutSettings,
    check_failures,
    sampling_seed,
    state_of,
)
from trajectory import Trajectory, Turn

RETRIED_4XX = (408, 409, 429)
FIRST_WAIT_S, MAX_WAIT_S, MAX_RETRY_AFTER_S = 0.5, 8.0, 60.0  # before a retry
NEWER_LIMIT = "max_completion_tokens"  # the name of max_tokens for OpenAI's reasoning models
MIN_KEY_LENGTH = 16  # a shorter key may be a placeholder ("EMPTY") that the model also writes
LENGTH_WORDS = ("context", "too long", "maximum length")  # in a refusal: the context is full


class ApiError(EngineError):
    """The chat server gave no usable answer, even after the retries."""


class ApiRefused(ApiError):
    """The server will refuse every request like this one (key, model name, option)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # HTTP status, if there was an answer


class ContextFull(ApiError):
    """The conversation no longer fits the model's context."""


class Stopped(Exception):
    """The run was stopped while this episode was waiting."""


class ChatApi:
    """POST /chat/completions with time-outs and a bounded number of retries.

    Args:
        base_url: as for an OpenAI client; /v1 is appended to a bare http://host:port.
        api_key: sent as bearer token; never logged, and masked where a server's answer is quoted.
        timeout_s: time limit for one complete answer, in seconds.
        max_retries: attempts after the first one; the waits before 8 retries total about 40 s.

    Raises: ValueError if base_url is not an address, or contains a user name, password or key.
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
        self.stopped = threading.Event()  # after this is set, no request is sent
        self._limit, self._key = "max_tokens", api_key
        self._has_answered = False
        self._headers = JSON_HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        # Use the certificates of a Python package, because a container may lack the system's.
        context = httpx.create_ssl_context() if base.startswith("https") else None
        proxy = proxy_of(base)
        self._http = HttpClient(base, timeout_s, proxy_url=proxy, ssl_context=context)

    def complete(
        self, messages: list[dict[str, Any]], max_tokens: int, temperature: float, seed: int
    ) -> str:
        """The model's next message; "" if it has no text.

        Raises: ContextFull, ApiRefused, ApiError after the last retry, Stopped.
        """
        tools = messages[0].get("tools")
        body = {
            "model": self.model,
            # Some servers refuse a message without text.
            "messages": [{"role": m["role"], "content": m["content"] or " "} for m in messages],
            "temperature": temperature,
            "seed": seed % 2**31,  # some servers accept only 31 bits
        } | ({"tools": tools} if tools else {})
        wait_s = 0.0
        for attempt in range(self.max_retries + 1):
            if self.stopped.wait(wait_s):
                raise Stopped
            wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.75, 1)
            limit = self._limit  # read only here: another thread may change it
            content = json.dumps(body | {limit: max_tokens}).encode()
            try:
                answer = self._http.ask("POST", "/chat/completions", content, self._headers)
            except ExchangeError as error:
                is_lost = isinstance(error, ConnectionLost)
                if is_lost and not self._has_answered and not self.stopped.is_set():
                    reason = "no server answers at this address; is it running? See --api-base"
                    raise ApiRefused(f"{self.url}: {reason}") from None
                problem = masked(str(error), self._key)
            else:
                self._has_answered = True
                text = message_text(answer)
                if text is not None:
                    is_word = len(self._key or "") < MIN_KEY_LENGTH
                    return text if is_word else masked(text, self._key)
                excerpt = masked(answer.text, self._key)[:300]
                problem = f"HTTP {answer.status}: {' '.join(excerpt.split())}"
                if answer.status == 400 and limit != NEWER_LIMIT and NEWER_LIMIT in answer.text:
                    self._limit = NEWER_LIMIT
                    return self.complete(messages, max_tokens, temperature, seed)
                self._raise_if_final(answer, problem)
                wait_s = retry_after(answer) or wait_s
        raise ApiError(f"{self.url} gave no usable answer in {attempt + 1} attempts; {problem}")

    def stop(self) -> None:
        """Send no more requests; end those that are running or wait for a retry."""
        self.stopped.set()
        self._http.abort()

    def _raise_if_final(self, answer: Answer, problem: str) -> None:
        """Raise an error unless a retry of the same request could succeed."""
        status, text = answer.status, answer.text.lower()
        if 300 <= status < 400:  # redirects are not followed: they would get the API key
            target = masked(answer.headers.get("Location", ""), self._key)[:300]
            problem += f" (a redirect to {target!r})"
        if status in (400, 413) and any(words in text for words in LENGTH_WORDS):
            raise ContextFull(f"{self.url} answered {problem}")
        if 300 <= status < 500 and status not in RETRIED_4XX:
            raise ApiRefused(f"{self.url} answered {problem}", status)


def message_text(answer: Answer) -> str | None:
    """The text of a chat completion; "" if its content is null, None for any other answer."""
    if answer.status != 200:
        return None
    try:
        message = parse(answer.body)["choices"][0]["message"]
        content = message.get("content")
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [(f["name"], f["arguments"] or "{}") for f in functions]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if isinstance(content, list):  # some servers send a list of parts; only some are text
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    text = content if isinstance(content, str) else ""
    # The server has taken the calls out of the text, with the arguments as a text of JSON.
    texts = ((n, data if isinstance(data, str) else json.dumps(data)) for n, data in calls)
    written = (f'{{"name": {json.dumps(name)}, "arguments": {text}}}' for name, text in texts)
    return "\n".join(filter(None, [text, *(f"<tool_call>\n{w}\n</tool_call>" for w in written)]))


def retry_after(answer: Answer) -> float | None:
    """Seconds to wait according to the server's Retry-After header, if it has a usable one."""
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
    # The seed for the chat server differs between the samples of a task.
    seed = sampling_seed(settings.seed, request.step, task.task_id, request.sample, turn=0)
    text_read = settings.agent.opening(t, client.reset(task.task_index, seed=request.seed))
    t.messages = [*client.prompt]
    t.first_state = state_of(client) if settings.record_state else None
    while True:
        t.messages.append({"role": "user", "content": text_read})
        start = time.perf_counter()
        try:
            text = api.complete(
                t.messages, settings.max_tokens_per_turn, settings.temperature, seed
            )
        except ContextFull as error:
            if not t.turns:  # even the first request does not fit
                hint = "a smaller --max-tokens-per-turn may help"
                raise ApiRefused(f"{error}; {hint}") from None
            return t.stop("length")
        except ApiRefused as error:
            if t.turns and error.status in (400, 422):  # a filter: only this episode fails
                raise ApiError(str(error)) from None
            raise
        env_start = time.perf_counter()
        t.messages.append({"role": "assistant", "content": text})
        turn = Turn(action_span=None, action_text=text, kind=t.next_kind)  # type: ignore[arg-type] # no tokens
        t.turns.append(turn)
        answer = settings.agent.next_text(t, turn, client, task.task_index)
        turn.generate_s, turn.env_s = env_start - start, time.perf_counter() - env_start
        if settings.record_state:
            turn.state = state_of(client)
        if answer is None:
            return
        text_read = answer


def collect_api(
    api: ChatApi,
    pool: EnvPool,
    requests: Sequence[RolloutRequest],
    settings: RolloutSettings,
    progress: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Like `rollout.collect`, but over messages; plays `settings.env_workers` episodes at a time.

    Args:
        api: stopped when this function returns or raises.
        progress: called in this thread with each trajectory that ends.
    Raises: ApiRefused, TooManyEnvFailures; unfinished episodes are dropped.
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
    """Play an episode, retrying it if a server fails. If the retries fail too, it ends as lost."""
    attempts_left = {"reset": NUM_RESETS, "step": 2, "complete": 1}
    used_urls: set[str] = set()
    while True:
        trajectory = Trajectory(**request.trajectory_fields(pool.env))
        try:
            with contextlib.closing(pool.client(avoid=used_urls)) as client:
                used_urls.add(client.base_url)
                run_api_episode(api, client, request, settings, trajectory)
                return trajectory
        except ApiRefused:
            raise
        except (EnvError, ApiError) as error:
            call = "step" if trajectory.messages else "reset"
            call = "complete" if isinstance(error, ApiError) else call
            attempts_left[call] -= 1
            if not attempts_left[call]:
                trajectory.error = " ".join(str(error).split())
                trajectory.stop("engine_error" if call == "complete" else "env_error")
                return trajectory
