"""
Play an environment with a model that hides behind an OpenAI-compatible chat server.

Such a server takes messages and returns text: no token ids, no log-probs. Nothing can be trained
on that, but everything can be measured, and a table of results wants the model next to GPT or
Gemini. So this file has its own short episode loop over messages:

    messages = PROMPT + [first observation]
    repeat at most max_rounds times:
        text        = POST /chat/completions {model, messages, max_tokens, temperature, seed}
        observation = env.step(text)
        messages   += [assistant: text, user: observation]

Each episode runs in a thread of its own and waits for nobody. How it goes on after a step, and how
many may be lost, is decided where it is for a trajectory of tokens (`rollout.take_result`,
`rollout.check_failures`), and it is written as the same line, with the token fields (`input_ids`,
`loss_mask`, `rollout_log_probs`) null.

What can go wrong, and what becomes of it:

    429, 408, 409, 5xx, time-out, connection      asked again with back-off (`Retry-After` counts);
    lost, an answer that is no chat completion    then the trajectory is lost: `engine_error`
    400 or 413 about the length of the context    the conversation is full: stop_reason `length`
    400 or 422 in the middle of an episode        what was said there, a filter: `engine_error`
    any other 4xx (key, model name, option), 3xx  nothing will go better for the next: the run stops
    nobody at the address, ever                   the same
    an answer without text                        the model said "": an unparsable action, reward 0
    the environment server fails                  as in rollout.py: a reset is tried 3 times, an
                                                  episode once more from its reset; then `env_error`

An answer is bounded in bytes and in total time, as every server's (envs/exchange.py).

Read next: evaluate.py, which turns trajectories into numbers (`--api-base`).
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai

from engines import EngineError
from envclient import EnvClient, EnvError, EnvPool
from envs.http import Line, Lost, TimedOut, Unbelievable, checked_url, parse, proxy_of
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

MAY_PASS = (408, 409, 429)  # of the 4xx; the client asks again
NUM_IDLE = 64  # connections that are kept for the next turns
NEWER = "max_completion_tokens"  # what OpenAI's reasoning models call max_tokens, and say so
LENGTH_WORDS = ("context", "too long", "maximum length")  # in a refusal: the conversation is full


class ApiError(EngineError):
    """The chat server did not give a usable answer, also not when asked again."""


class ApiRefused(ApiError):
    """The server will refuse every request like this one (key, model name, option)."""

    status: int | None = None  # of the answer, if there was one


class ContextFull(ApiError):
    """The conversation no longer fits the model's context."""


class Stopped(Exception):
    """The run is being stopped while this episode waits."""


class ChatApi:
    """
    POST /chat/completions with time-outs and a bounded number of retries; for one `collect_api`.

    Args:
        base_url: what an OpenAI client takes as base_url; a bare http://host:port gets /v1.
        api_key: sent as bearer token; never logged.
        timeout_s: seconds for one answer, to its last byte.
        max_retries: further attempts after the first; 8 wait about 40 s in all.

    Raises ValueError for an address that is none, or that holds a user, a password or a key.
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
        self.url, self.model = f"{base}/chat/completions", model
        self.stopped = threading.Event()  # once set, nothing is asked any more
        self._limit = "max_tokens"
        # Without a key no header is sent; what stands in for it keeps OPENAI_API_KEY out.
        self._headers = {} if api_key else {"Authorization": openai.Omit()}
        transport = _BoundedTransport(base, timeout_s)
        self._client = _Client(
            base_url=base,
            api_key=api_key or "none",
            timeout=timeout_s,
            max_retries=max_retries,
            http_client=httpx2.Client(
                transport=transport,
                event_hooks={"response": [_must_be_completion]},
            ),
        )
        self._client.stopped, self._client.transport = self.stopped, transport

    def complete(
        self, messages: list[dict[str, str]], max_tokens: int, temperature: float, seed: int
    ) -> str:
        """
        The model's next message; "" if it has no text.

        Raises: ContextFull, ApiRefused (see there), ApiError after the last retry, Stopped.
        """
        if self.stopped.is_set():
            raise Stopped
        try:
            create: Any = self._client.chat.completions.with_raw_response.create
            answer = create(
                model=self.model,
                # Some servers refuse a message without text.
                messages=[m | {"content": m["content"] or " "} for m in messages],
                **{self._limit: max_tokens},
                temperature=temperature,
                seed=seed % 2**31,  # some servers' field is no wider
                extra_headers=self._headers,
            )
        except _NobodyThere:
            what = "nobody answers at this address; is the server running? See --api-base"
            raise ApiRefused(f"{self.url}: {what}") from None
        except openai.APIStatusError as error:
            status, body = error.status_code, error.response.text
            problem = f"HTTP {status}: {' '.join(body[:300].split())}"
            if 300 <= status < 400:
                problem += f" (it leads to {error.response.headers.get('location', '')[:300]!r})"
            is_about_length = any(words in body.lower() for words in LENGTH_WORDS)
            if status == 400 and NEWER in body and self._limit != NEWER:
                self._limit = NEWER
                return self.complete(messages, max_tokens, temperature, seed)
            if status in (400, 413) and is_about_length:
                raise ContextFull(f"{self.url} answered {problem}") from None
            if 300 <= status < 500 and status not in MAY_PASS:
                refused = ApiRefused(f"{self.url} answered {problem}")
                refused.status = status
                raise refused from None
            raise self._no_answer(error, problem) from None
        except openai.APIConnectionError as error:  # time-outs are of this kind
            cause = error.__cause__ or error
            raise self._no_answer(error, f"{type(cause).__name__}: {cause}") from None
        return str(answer.http_response.extensions["text"])

    def stop(self) -> None:
        """No more questions: what waits for a retry ends now."""
        self.stopped.set()
        self._client.close()

    def _no_answer(self, error: openai.APIError, problem: str) -> ApiError:
        attempts = int(error.request.headers.get("x-stainless-retry-count", 0)) + 1
        return ApiError(f"{self.url} gave no answer in {attempts} attempts; {problem}")


class _NobodyThere(Exception):
    """The first request found no server: that is a wrong address, not one that is starting anew."""


class _Client(openai.OpenAI):
    """The client of the `openai` package, less what it sends unasked; a stop ends its waits."""

    stopped: threading.Event
    transport: "_BoundedTransport"

    @property
    def default_headers(self) -> dict[str, str | openai.Omit]:
        # NOTE: its own describe this machine and hold OPENAI_ORG_ID, OPENAI_PROJECT_ID and
        # OPENAI_CUSTOM_HEADERS, secrets of another server perhaps.
        return {"Accept": "application/json", "Content-Type": "application/json"}

    def _sleep_for_retry(
        self, *, retries_taken: int, max_retries: int, options: Any, response: Any
    ) -> None:
        if self.transport.was_lost and not self.transport.has_answered:
            raise _NobodyThere
        headers = None if response is None else response.headers
        wait_s = self._calculate_retry_timeout(max_retries - retries_taken, options, headers)
        if self.stopped.wait(wait_s):
            raise Stopped


class _BoundedTransport(httpx2.BaseTransport):
    """What carries that client's requests: a Line, through the proxy of the user's environment."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        self.has_answered = self.was_lost = False
        self._line = Line(
            f"{parts.scheme}://{parts.netloc}",
            timeout_s,
            proxy_url=proxy_of(base_url),
            ssl_context=httpx2.create_ssl_context(),  # the certificates that httpx trusts
            maxsize=NUM_IDLE,
        )

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        # What httpx2 offers to undo is not asked for; the length is urllib3's to say.
        unwanted = ("accept-encoding", "content-length", "host", "connection")
        headers = {n: v for n, v in request.headers.items() if n not in unwanted}
        path = request.url.raw_path.decode()
        try:
            answer = self._line.ask(request.method, path, request.read(), headers)
        except TimedOut as error:
            raise httpx2.ReadTimeout(str(error)) from error
        except Lost as error:
            self.was_lost = True
            raise httpx2.ConnectError(str(error)) from error
        except Unbelievable as error:
            raise httpx2.DecodingError(str(error)) from error
        self.has_answered = True
        got = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers.items()]
        return httpx2.Response(answer.status, headers=got, content=answer.body)

    def close(self) -> None:
        self._line.hang_up()
        self._line.close()


def _must_be_completion(response: httpx2.Response) -> None:
    """Another answer than a chat completion is asked again, like one that never came."""
    response.read()
    text = response.extensions["text"] = _message_text(response)
    if response.is_success and text is None:
        body = " ".join(response.text[:300].split())
        raise httpx2.DecodingError(f"no chat completion: {body}", request=response.request)


def _message_text(response: httpx2.Response) -> str | None:
    """The text of a chat completion, "" if its content is null; None if it is no completion."""
    try:
        content = parse(response.content)["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if isinstance(content, list):  # some servers' form: parts, of which texts are one kind
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


# ----------------------------------------------------------------------------------------------
# Episodes


def run_api_episode(
    api: ChatApi,
    client: EnvClient,
    request: RolloutRequest,
    settings: RolloutSettings,
    trajectory: Trajectory,
) -> None:
    """
    Play one episode to its end and fill `trajectory`, which is empty but for its heading.

    Args:
        client: an environment session of this episode alone.
        settings: max_tokens_per_turn, temperature, seed, record_state.
        trajectory: names the turn limit.
    Raises: EnvError when the environment fails, ApiError when the chat server does, Stopped.
    """
    t, task = trajectory, request.task
    # Sent to the chat server; differs between the samples of a task.
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
            if not t.turns:  # nothing was said yet: it is the request that does not fit, always
                raise ApiRefused(f"{error}; a smaller --max-tokens-per-turn may") from None
            return t.stop("length")
        except ApiRefused as error:
            if t.turns and error.status in (400, 422):  # what was said, a filter: this episode's
                raise ApiError(str(error)) from None
            raise
        generated = time.perf_counter()
        result = client.step(text)
        t.messages.append({"role": "assistant", "content": text})
        # No token ids to point into.
        turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type]
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
    """
    `rollout.collect` over messages: every request played to its end, in the order of the requests.

    Args:
        api: is stopped when this returns or raises.
        progress: called with each trajectory as it ends, from this thread.
        settings: `env_workers` episodes are played at a time.
    Raises:
        ApiRefused: the chat server refuses such requests.
        TooManyEnvFailures: more than `settings.max_env_failures` of all trajectories are lost.
        Episodes under way are dropped in both cases.
    """
    trajectories = [Trajectory(**r.heading(pool.env)) for r in requests]
    waiting: queue.SimpleQueue[tuple[RolloutRequest, Trajectory]] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Trajectory | BaseException] = queue.SimpleQueue()
    for pair in zip(requests, trajectories, strict=True):
        waiting.put(pair)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not api.stopped.is_set():
                request, trajectory = waiting.get_nowait()
                try:
                    _play_with_retries(api, pool, request, settings, trajectory)
                except BaseException as error:  # must surface in the caller's thread, not hang it
                    ended.put(error)
                else:
                    ended.put(trajectory)

    # Daemon threads: after Ctrl-C nobody waits for a chat server that takes minutes to answer.
    for _ in range(min(settings.env_workers, len(trajectories))):
        threading.Thread(target=work, daemon=True).start()
    finished: list[Trajectory] = []
    try:
        while len(finished) < len(trajectories):
            one = ended.get()
            if isinstance(one, BaseException):
                raise one
            finished.append(one)
            if progress:
                progress(one)
            check_failures(finished, settings.max_env_failures, total=len(trajectories))
    finally:
        api.stop()
    return trajectories


def _play_with_retries(
    api: ChatApi,
    pool: EnvPool,
    request: RolloutRequest,
    settings: RolloutSettings,
    trajectory: Trajectory,
) -> None:
    """Play; what the servers lose is tried again, then marked with its stop_reason and error."""
    tries_left = {"reset": NUM_TRIES, "step": 2, "ask": 1}
    tried: set[str] = set()
    while True:
        trajectory.turns, trajectory.messages = [], []
        try:
            with contextlib.closing(pool.client(avoid=tried)) as client:
                tried.add(client.base_url)
                return run_api_episode(api, client, request, settings, trajectory)
        except ApiRefused:
            raise
        except (EnvError, ApiError) as error:
            failed = "step" if trajectory.messages else "reset"
            failed = "ask" if isinstance(error, ApiError) else failed
            tries_left[failed] -= 1
            if not tries_left[failed]:
                trajectory.error = " ".join(str(error).split())
                return trajectory.stop("engine_error" if failed == "ask" else "env_error")
