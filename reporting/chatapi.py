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

Each episode runs in a thread of its own and waits for nobody. It is written as the same line as a
trajectory of tokens, with the token fields (`input_ids`, `loss_mask`, `rollout_log_probs`) null.

What can go wrong, and what becomes of it:

    429, 408, 5xx, time-out, connection lost,     asked again with back-off (`Retry-After` counts);
    an answer that is not a chat completion       then the trajectory is lost: `engine_error`
    400 or 413 about the length of the context    the conversation is full: stop_reason `length`
    any other 4xx (key, model name, option)       nothing will go better for the next: the run stops
    an answer without text                        the model said "": an unparsable action, reward 0
    the environment server fails                  as in rollout.py: a reset is tried 3 times, an
                                                  episode once more from its reset; then `env_error`

The reference's evaluation (AgentGym-RL, `verl/agent_trainer/main_generation.py`) needs the weights
on its own GPUs; a model behind a server cannot be measured with it.

Run:        .venv/bin/python evaluate.py --env textcraft --api-base http://127.0.0.1:8000 \\
                --api-model NAME --api-key-env OPENAI_API_KEY
Read next:  evaluate.py, which turns trajectories into numbers
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import requests

from envclient import EnvClient, EnvError, EnvPool
from rollout import NUM_TRIES, RolloutRequest, RolloutSettings, TooManyEnvFailures, sampling_seed
from trajectory import Trajectory, Turn

MAX_WAIT_S = 60.0  # no single back-off is longer, whatever the server asks for


class ApiError(RuntimeError):
    """The chat server did not give a usable answer, also not when asked again."""


class ApiRefused(ApiError):
    """The server will refuse every request like this one (key, model name, option)."""


class ContextFull(ApiError):
    """The conversation no longer fits the model's context."""


class Stopped(Exception):
    """The run is being stopped while this episode waits."""


@dataclass
class ChatApi:
    """
    POST /chat/completions with time-outs and a bounded number of retries.

    Attributes:
        base_url: what an OpenAI client takes as base_url; a bare http://host:port gets /v1.
        api_key: sent as bearer token; never logged.
        timeout_s: seconds for one answer.
        max_retries: further attempts after the first.
        backoff_s: wait before the first retry in seconds; doubles with each, with ±50 % jitter.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    max_retries: int = 6
    backoff_s: float = 1.0
    stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def url(self) -> str:
        base = self.base_url.rstrip("/")
        return base + ("" if urlsplit(base).path else "/v1") + "/chat/completions"

    def complete(
        self, messages: list[dict[str, str]], max_tokens: int, temperature: float, seed: int
    ) -> str:
        """
        The model's next message; "" if it has no text.

        Raises: ContextFull, ApiRefused (see there), ApiError after the last retry.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        problem = ""
        for attempt in range(self.max_retries + 1):
            wait_s = self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)
            try:
                answer = requests.post(
                    self.url, json=body, timeout=self.timeout_s, auth=self._authorize
                )
            except requests.RequestException as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.ok:
                    text = _message_text(answer)
                    if text is not None:
                        return text
                status = answer.status_code
                problem = f"HTTP {status}: {' '.join(answer.text[:300].split())}"
                if status in (400, 413) and _is_about_length(answer.text):
                    raise ContextFull(f"{self.url} answered {problem}")
                if 400 <= status < 500 and status not in (408, 429):
                    raise ApiRefused(f"{self.url} answered {problem}")
                wait_s = _retry_after(answer) or wait_s
            if attempt < self.max_retries and self.stopped.wait(min(wait_s, MAX_WAIT_S)):
                raise Stopped
        raise ApiError(f"{self.url} gave no answer in {self.max_retries + 1} attempts; {problem}")

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # NOTE: given as a header, the key would lose against an entry for this host in ~/.netrc.
        if self.api_key:
            request.headers["Authorization"] = f"Bearer {self.api_key}"
        return request


def _message_text(answer: requests.Response) -> str | None:
    """The text of a chat completion, "" if its content is null; None if it is no completion."""
    try:
        content = answer.json()["choices"][0]["message"].get("content")
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return content if isinstance(content, str) else ""


def _is_about_length(body: str) -> bool:
    return any(word in body.lower() for word in ("context", "too long", "maximum length"))


def _retry_after(answer: requests.Response) -> float:
    """Seconds of a Retry-After header; 0.0 when there is none (or a date)."""
    value = answer.headers.get("Retry-After", "")
    return float(value) if value.replace(".", "", 1).isdigit() else 0.0


def run_api_episode(
    api: ChatApi,
    client: EnvClient,
    task_index: int,
    trajectory: Trajectory,
    settings: RolloutSettings,
    sample_seed: int = 0,
) -> None:
    """
    Play one episode to its end and fill `trajectory`, from the start also when it was begun before.

    Args:
        client: an environment session of this episode alone.
        trajectory: names the env seed and the turn limit.
        settings: max_rounds, max_tokens_per_turn, temperature.
        sample_seed: sent to the chat server; differs between the samples of a task.
    Raises: EnvError when the environment fails, ApiError when the chat server does.
    """
    t = trajectory
    t.turns, t.messages = [], []
    observation = client.reset(task_index, seed=t.seed)
    t.messages = [*client.prompt]
    while True:
        t.messages.append({"role": "user", "content": observation})
        begin = time.perf_counter()
        try:
            text = api.complete(
                t.messages, settings.max_tokens_per_turn, settings.temperature, sample_seed
            )
        except ContextFull:
            return t.stop("length")
        generated = time.perf_counter()
        result = client.step(text)
        t.messages.append({"role": "assistant", "content": text})
        turn = Turn(
            action_span=None,  # type: ignore[arg-type]  # no token ids to point into
            action_text=text,
            observation_text=result.observation,
            reward=float(result.reward),
            parse_error=result.info.get("parse_error"),
            generate_s=generated - begin,
            env_s=time.perf_counter() - generated,
            state=client.state() if settings.record_state else None,
        )
        t.turns.append(turn)
        if result.terminated:
            success = bool(result.info.get("success"))
            return t.stop("success" if success else "failure", success)
        if result.truncated or len(t.turns) >= t.max_rounds:
            return t.stop("env_limit" if result.truncated else "max_rounds")
        observation = result.observation


def collect_api(
    api: ChatApi,
    pool: EnvPool,
    requests_: Sequence[RolloutRequest],
    settings: RolloutSettings,
    progress: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """
    `rollout.collect` over messages: every request played to its end, in the order of the requests.

    Args:
        progress: called with each trajectory as it ends, from this thread.
        settings: `env_workers` episodes are played at a time.
    Raises:
        ApiRefused: the chat server refuses such requests.
        TooManyEnvFailures: more than `settings.max_env_failures` of all trajectories are lost.
        Episodes under way are dropped in both cases.
    """
    trajectories = [Trajectory(**r.heading(pool.env, settings.max_rounds)) for r in requests_]
    api.stopped.clear()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
    for index in range(len(trajectories)):
        waiting.put(index)

    def work() -> None:
        while not api.stopped.is_set():
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            r = requests_[index]
            seed = sampling_seed(settings.seed, r.step, r.task.task_id, r.sample, turn=0)
            try:
                _play_with_retries(
                    api, pool, r.task.task_index, trajectories[index], settings, seed
                )
            except BaseException as error:  # must surface in the caller's thread, not hang it
                ended.put((index, error))
            else:
                ended.put((index, None))

    # Daemon threads: after Ctrl-C nobody waits for a chat server that takes minutes to answer.
    for _ in range(min(settings.env_workers, len(trajectories))):
        threading.Thread(target=work, daemon=True).start()
    num_lost = 0
    try:
        for _ in trajectories:
            index, error = ended.get()
            if error is not None:
                raise error
            if progress:
                progress(trajectories[index])
            num_lost += not trajectories[index].is_valid
            if num_lost > settings.max_env_failures * len(trajectories):
                raise TooManyEnvFailures(
                    f"{num_lost} of {len(trajectories)} trajectories are lost already, more than "
                    f"--max-env-failures {settings.max_env_failures:.0%}; "
                    f"last error: {trajectories[index].error}"
                )
    finally:
        api.stopped.set()
    return trajectories


def _play_with_retries(
    api: ChatApi,
    pool: EnvPool,
    task_index: int,
    trajectory: Trajectory,
    settings: RolloutSettings,
    sample_seed: int,
) -> None:
    """Play; what the servers lose is tried again, then marked with its stop_reason and error."""
    resets_left, restarts_left = NUM_TRIES - 1, 1
    while True:
        client = None
        try:
            client = pool.client()
            return run_api_episode(api, client, task_index, trajectory, settings, sample_seed)
        except EnvError as error:
            is_under_way = bool(trajectory.messages)
            if (restarts_left if is_under_way else resets_left) == 0:
                return _lose(trajectory, "env_error", error)
            restarts_left -= is_under_way
            resets_left -= not is_under_way
        except ApiRefused:
            raise
        except ApiError as error:
            return _lose(trajectory, "engine_error", error)
        finally:
            if client is not None:
                client.close()


def _lose(trajectory: Trajectory, reason: str, error: Exception) -> None:
    trajectory.stop(reason)
    trajectory.error = str(error)
