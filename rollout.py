"""Multi-turn rollouts: the event-driven loop that grows many trajectories at once.

If all trajectories advanced in rounds (generate for all, step all environments, again), every round
would last as long as its slowest environment. Here an environment's answer goes back to the engine
the moment it arrives, and the engine decodes whatever is there:

        ┌── a generation ends ──> env.step in a thread ──> observation ids appended ──┐
        │                                                                             │
      engine (continuous batching) <───────────── submit the longer prompt ───────────┘

Budgets are checked while rolling: a trajectory that reaches `max_trajectory_tokens` stops with
`length` before the action that was cut is played, so tokens that training never sees earn nothing.

What the policy caused (an action that cannot be parsed, a wrong one, a text that is too long) earns
0 and is learned from. What it cannot have caused (a server that dies, a time-out) is retried; then
the trajectory is marked `env_error`, left out of the loss and of its group, and counted.

At the end of the file: which tasks a step plays, a pure function of the step.

Read first: `trajectory.py`. Read next: `envclient.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from chat import ChatTemplate
from engines import Engine, EngineError, Generation, SamplingSettings
from envclient import EnvClient, EnvError, EnvPool, EnvPools, StepResult, TooManySessions
from envs import Task, tasks_by_env
from run.errors import TooManyEnvFailures
from trajectory import LOST, RolloutHandler, Trajectory, Turn

# Resets before an episode is given up; one that fails in the middle of a step starts over once.
NUM_TRIES = 3
THREAD_NAME = "rollout"  # what a thread's name begins with
IDLE_WAIT_S = 0.2  # how long to sleep at a time when the engine has nothing to do


@dataclass(frozen=True)
class RolloutRequest:
    """One trajectory to roll: its group, which sample of its task, the environment's seed, and how
    many turns it may take."""

    task: Task
    group_id: int
    sample: int
    seed: int
    step: int
    max_rounds: int

    def heading(self, env: str) -> dict[str, Any]:
        """What a `Trajectory` of this request begins with."""
        return {
            "trajectory_id": f"s{self.step:06d}-t{self.group_id:04d}-k{self.sample:02d}",
            "step": self.step,
            "env": env,
            "task_id": self.task.task_id,
            "subtask": self.task.subtask,
            "group_id": self.group_id,
            "seed": self.seed,
            "max_rounds": self.max_rounds,
        }


@dataclass(frozen=True)
class RolloutSettings:
    """Budgets and limits of a rollout; each request has its own horizon."""

    max_tokens_per_turn: int
    max_trajectory_tokens: int  # the prompt included
    temperature: float = 1.0
    seed: int = 0
    env_workers: int = 64  # environment calls in flight at a time
    max_env_failures: float = 0.2  # share of lost trajectories above which the run stops
    record_state: bool = False
    weight_version: int = 0  # the sampler's weights are those after this step; noted


@dataclass
class RolloutLog:
    """What happened in one `collect`, also when it ended early."""

    on_end: Callable[[RolloutHandler], None] = lambda handler: None  # called in collect's thread
    ended: list[RolloutHandler] = field(default_factory=list)  # in the order in which they ended
    seconds: float = 0.0
    engine_idle_s: float = 0.0  # the engine had no request while episodes were open
    generated_tokens: int = 0

    def end(self, handler: RolloutHandler) -> None:
        self.ended.append(handler)
        self.on_end(handler)


def sampling_seed(seed: int, step: int, task_id: str, sample: int, turn: int) -> int:
    """63 bits that depend on what is sampled, never on rank, thread or order of arrival."""
    key = f"{seed}/{step}/{task_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def collect(
    engine: Engine,
    pool: EnvPool | EnvPools,
    chat: ChatTemplate,
    requests: Sequence[RolloutRequest],
    settings: RolloutSettings,
    log: RolloutLog | None = None,
) -> list[RolloutHandler]:
    """Roll all requests to their end; one trajectory per request, in the order of the requests.

    Args:
        log: filled in; after an exception or Ctrl-C it holds what had ended, after an EngineError
            also the trajectories that were being sampled, as `engine_error`.
    Raises:
        EngineError: the sampler failed; running requests were dropped.
        TooManyEnvFailures: more than `settings.max_env_failures` of the trajectories were lost.
    """
    log = log if log is not None else RolloutLog()
    calls = _EnvCalls(min(settings.env_workers, len(requests) or 1))
    episodes = [_Episode(pool, chat, r, settings, calls.stopping) for r in requests]
    generating: dict[str, _Episode] = {}
    num_open = len(episodes)
    waiting = iter(episodes)  # with more open the engine's cache would forget them between turns
    began = time.perf_counter()
    try:
        for episode in islice(waiting, engine.max_open):
            calls.reset(episode)
        while num_open:
            # 1. Environments that have answered: submit the next prompt, or close the episode.
            for episode in calls.answered(log, wait=not generating):
                if episode.crash:
                    raise episode.crash
                if episode.must_restart:
                    calls.reset(episode)
                    continue
                sampling = episode.next_request()
                if sampling is None:
                    num_open -= 1
                    log.end(episode.handler)
                    for following in islice(waiting, 1):
                        calls.reset(following)
                    continue
                name = episode.handler.trajectory_id
                generating[name] = episode
                engine.submit(name, episode.handler.next_prompt(), sampling)
            # 2. A piece of decoding; every finished turn goes to its environment at once.
            for generation in engine.poll():
                episode = generating.pop(generation.request_id)
                log.generated_tokens += len(generation.token_ids)
                episode.take(generation)
                calls.act(episode)
    except BaseException as error:
        with contextlib.suppress(Exception):  # it may be the engine that has failed
            engine.abort()
        if isinstance(error, EngineError):
            for episode in generating.values():
                episode.fail("engine_error", error)
        noted = {id(handler) for handler in log.ended}
        for episode in episodes:  # also those whose last answer is still in the queue
            if episode.handler.stop_reason and id(episode.handler) not in noted:
                log.end(episode.handler)
        raise
    finally:
        log.seconds += time.perf_counter() - began
        calls.shutdown()
        if num_open:
            calls.stopping.set()
            for episode in episodes:
                episode.close()
    handlers = [episode.handler for episode in episodes]
    check_failures(handlers, settings.max_env_failures)
    return handlers


class _EnvCalls:
    """Calls to environments, in threads; `answered` returns the episodes whose call is done.

    Two thread pools: a reset waits while a server is full (429), and must not block the steps that
    will free a session.
    """

    def __init__(self, num_threads: int) -> None:
        self.stopping = threading.Event()  # the loop ended early: open no more sessions
        self._resets = ThreadPoolExecutor(num_threads, THREAD_NAME)
        self._steps = ThreadPoolExecutor(num_threads, THREAD_NAME)
        self._answers: queue.SimpleQueue[_Episode] = queue.SimpleQueue()

    def reset(self, episode: _Episode) -> None:
        self._resets.submit(self._work, episode, episode.reset)

    def act(self, episode: _Episode) -> None:
        self._steps.submit(self._work, episode, episode.act)

    def _work(self, episode: _Episode, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # a bug in a thread must surface in the loop
            episode.crash = error
        if self.stopping.is_set():  # all sessions were closed, and this call may have opened one
            episode.close()
        self._answers.put(episode)

    def answered(self, log: RolloutLog, wait: bool) -> list[_Episode]:
        """All episodes whose call is done; with `wait`, as soon as there is one."""
        ready: list[_Episode] = []
        if wait:
            began = time.perf_counter()
            while not ready:  # short waits, so that Ctrl-C is noticed
                try:
                    ready.append(self._answers.get(timeout=IDLE_WAIT_S))
                except queue.Empty:
                    continue
            log.engine_idle_s += time.perf_counter() - began
        while not self._answers.empty():
            ready.append(self._answers.get())
        return ready

    def shutdown(self) -> None:
        for threads in (self._resets, self._steps):
            threads.shutdown(wait=False, cancel_futures=True)


def state_of(client: EnvClient) -> dict[str, Any] | None:
    """The state as people see it, or None if the server has none (AgentGym's) or fails to show it:
    the turn was played all the same."""
    with contextlib.suppress(EnvError):
        return client.state()
    return None


def take_result(trajectory: Trajectory, turn: Turn, result: StepResult) -> bool:
    """Note the environment's answer to `turn` and end the trajectory if that ends it; whether it
    goes on."""
    turn.observation_text, turn.reward = result.observation, float(result.reward)
    turn.parse_error = result.info.get("parse_error")
    success = bool(result.info.get("success"))
    if result.terminated:
        trajectory.stop("success" if success else "failure", success)
    elif result.truncated:
        trajectory.stop("env_limit", success)
    elif len(trajectory.turns) >= trajectory.max_rounds:
        trajectory.stop("max_rounds", success)
    return trajectory.stop_reason is None


def check_failures(
    trajectories: Sequence[Trajectory], limit: float, total: int | None = None
) -> None:
    """Raise TooManyEnvFailures if more than the share `limit` of `total` (None: of these) was lost
    to the infrastructure. Checked per environment, so that losing a small one is noticed."""
    envs = dict.fromkeys(t.env for t in trajectories)
    for env in envs:
        of_env = [t for t in trajectories if t.env == env]
        lost = [t for t in of_env if t.stop_reason in LOST]
        num_asked = len(of_env) if total is None else total
        if len(lost) > limit * num_asked:
            where = f" of {env}" if len(envs) > 1 else ""
            raise TooManyEnvFailures(
                f"{len(lost)} of {num_asked} trajectories{where} were lost to the environment, "
                f"more than --max-env-failures {limit:.0%}; last error: {lost[-1].error}"
            )


class _Episode:
    """One trajectory in the making and its environment session. `reset` and `act` run in a thread
    and touch nothing shared; `next_request` and `take` run in the loop."""

    def __init__(
        self,
        pools: EnvPool | EnvPools,
        chat: ChatTemplate,
        request: RolloutRequest,
        settings: RolloutSettings,
        stopping: threading.Event,
    ) -> None:
        self.pool = pools.of(request.task.env)
        self.chat, self.request, self.settings = chat, request, settings
        self.stopping = stopping
        self.client: EnvClient | None = None
        self.crash: BaseException | None = None
        self.restarts_left, self.must_restart = 1, False
        self.failed: set[str] = set()  # servers that have lost a session of this episode
        self.submitted_at = 0.0
        self.handler = self._new_handler()

    def _new_handler(self) -> RolloutHandler:
        heading = self.request.heading(self.pool.env)
        return RolloutHandler(**heading, weight_version=self.settings.weight_version)

    def reset(self) -> None:
        """Open a session on a healthy server and reset it. Tries up to NUM_TRIES servers, those
        that failed this episode last; waits for full ones while sessions of ours may end."""
        self.handler, self.must_restart = self._new_handler(), False
        left = NUM_TRIES
        while left and not self.stopping.is_set():
            left -= 1
            try:
                self.client = self.pool.client(avoid=self.failed)
                index, seed = self.request.task.task_index, self.request.seed
                observation = self.client.reset(index, seed=seed)
                self.handler.start(self.chat, self.client.prompt, observation)
                if self.settings.record_state:
                    self.handler.first_state = state_of(self.client)
                return
            except EnvError as error:
                self.give_up_session()
                left += isinstance(error, TooManySessions) and self.pool.is_in_use()
                if not left:
                    self.fail("env_error", error)

    def act(self) -> None:
        """Play the turn that was just sampled and append the environment's answer."""
        handler, turn = self.handler, self.handler.turns[-1]
        if handler.stop_reason:  # the token budget ended inside this turn: it is not played
            self.close()
            return
        assert self.client is not None  # reset succeeded, or there would be no turn
        began = time.perf_counter()
        try:
            result = self.client.step(turn.action_text)
            turn.env_s = time.perf_counter() - began
            if self.settings.record_state:
                turn.state = state_of(self.client)
        except EnvError as error:
            self.give_up_session()  # now, or a full server could deadlock
            if self.restarts_left:
                self.restarts_left -= 1
                self.must_restart = True  # by the loop, in the pool where waiting is allowed
            else:
                self.fail("env_error", error)
            return
        if take_result(handler, turn, result):
            room = self.settings.max_trajectory_tokens - 2  # a token of an answer, its end-of-turn
            if not handler.add_observation(self.chat, result.observation, room):
                handler.stop("length", bool(result.info.get("success")))
        if handler.stop_reason:
            self.close()

    def next_request(self) -> SamplingSettings | None:
        """How to sample the next turn, or None when the trajectory has ended."""
        handler, s = self.handler, self.settings
        # One id is kept back for the end-of-turn that a cut turn gets.
        room = s.max_trajectory_tokens - len(handler.input_ids) - 1
        if not handler.stop_reason and room < 1:  # the first observation alone is over the budget
            handler.stop("length")
            self.close()
        if handler.stop_reason:
            return None
        self.submitted_at = time.perf_counter()
        r = self.request
        return SamplingSettings(
            max_tokens=min(s.max_tokens_per_turn, room),
            temperature=s.temperature,
            seed=sampling_seed(s.seed, r.step, r.task.task_id, r.sample, len(handler.turns)),
            stop_token_ids=self.chat.stop_token_ids,
        )

    def take(self, generation: Generation) -> None:
        """Append a finished generation; decide whether the budget, not the policy, ended it."""
        handler, s = self.handler, self.settings
        turn = handler.add_action(self.chat, generation.token_ids, generation.log_probs)
        turn.generate_s = time.perf_counter() - self.submitted_at
        out_of_budget = len(generation.token_ids) < s.max_tokens_per_turn
        if generation.finish_reason == "length" and out_of_budget:
            handler.stop("length")

    def give_up_session(self) -> None:
        """The session failed: take the next one from another server, if there is one."""
        if self.client is not None:
            self.failed.add(self.client.base_url)
        self.close()

    def close(self) -> None:
        client, self.client = self.client, None  # in one step: the loop and a thread may both close
        if client is not None:
            client.close()

    def fail(self, reason: str, error: Exception) -> None:
        """End the trajectory as lost to the infrastructure."""
        self.close()
        self.handler.error = " ".join(str(error).split())
        self.handler.stop(reason)


# ------------------------------------------------------------- which tasks a step plays, in order
#
#     position(t, n) = (t - 1) · size + n                  n-th task of draw t, counted from 1
#     epoch, place   = divmod(position, count)
#     index(t, n)    = order_epoch[place]                  order: shuffled by (key, epoch)
#
# All tasks are taken once before any is taken again, each epoch in another order. There is no
# cursor and no generator that a checkpoint could restore wrong. With several environments positions
# are dealt out to them, and each counts its own: weights 2, 1 give a a b a a b ...


def draw_indices(
    t: int, counts: Sequence[int], size: int, key: str, weights: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """(environment, index in its list) of each task that the `t`-th draw takes. A draw may go on
    into the next epoch, so that every step plays as many tasks.

    Args:
        counts: tasks of each environment.
        weights: how many tasks of each environment follow one another; none: one of each.

    >>> [index for t in (1, 2) for _, index in draw_indices(t, [4], 2, "0")]  # an epoch
    [2, 1, 3, 0]
    >>> [index for _, index in draw_indices(1, [2], 5, "0")]  # two epochs and a half
    [1, 0, 1, 0, 1]
    >>> draw_indices(1, [4, 2], 6, "0", [2, 1])
    [(0, 2), (0, 1), (1, 1), (0, 3), (0, 0), (1, 0)]
    """
    dealt = _round_of(len(counts), weights)
    orders: dict[tuple[int, int], list[int]] = {}
    taken = []
    for position in range((t - 1) * size, t * size):
        env = dealt[position % len(dealt)]
        epoch, place = divmod(_times(env, position, dealt), counts[env])
        if (env, epoch) not in orders:
            orders[env, epoch] = _order_of(epoch, counts[env], key)
        taken.append((env, orders[env, epoch][place]))
    return taken


def epochs(t: int, counts: Sequence[int], size: int, weights: Sequence[int] = ()) -> list[float]:
    """How often each environment's tasks have been taken once the `t`-th draw is done.

    >>> epochs(1, [4, 2], 6, [2, 1])
    [1.0, 1.0]
    """
    dealt = _round_of(len(counts), weights)
    return [_times(env, t * size, dealt) / count for env, count in enumerate(counts)]


def portion(t: int, count: int, size: int, key: str) -> tuple[list[int], float]:
    """Indices of the conversations or pairs that the `t`-th step learns, at most `size`, and
    the epochs done after it. The steps of an epoch have equal sizes: a step is a mean over its
    rows, so a single row in a last step would count as much as `size` elsewhere.

    >>> [portion(t, 5, 4, "0")[0] for t in (1, 2)], portion(2, 5, 4, "0")[1]
    ([[2, 3], [4, 1, 0]], 1.0)
    """
    steps = -(-count // size)
    epoch, place = divmod(t - 1, steps)
    first, end = place * count // steps, (place + 1) * count // steps
    return _order_of(epoch, count, key)[first:end], epoch + end / count


def _round_of(num_envs: int, weights: Sequence[int]) -> list[int]:
    """The environments as positions are dealt to them, over and over."""
    weights = weights or [1] * num_envs
    return [env for env, weight in enumerate(weights) for _ in range(weight)]


def _times(env: int, position: int, dealt: Sequence[int]) -> int:
    """How many of the positions before this one are the environment's."""
    rounds, rest = divmod(position, len(dealt))
    return rounds * dealt.count(env) + dealt[:rest].count(env)


def _order_of(epoch: int, count: int, key: str) -> list[int]:
    return random.Random(f"{key}/{epoch}").sample(range(count), count)


def draw(
    t: int,
    tasks: Sequence[Task],
    num_tasks: int,
    group_size: int,
    seed: int,
    step: int,
    horizons: Mapping[str, int],
    weights: Sequence[int] = (),
) -> list[RolloutRequest]:
    """The requests of the `t`-th draw, named by `step`; all samples of a group share the
    environment's seed. A task that comes twice in a draw goes on counting its samples, because the
    sampler's random numbers depend on step, task and sample alone.

    Args:
        horizons: most turns in each environment.
        weights: of the environments, in the order in which `tasks` names them.
    """
    by_env = list(tasks_by_env(tasks).values())
    requests, first, num_before = [], (t - 1) * num_tasks, Counter[str]()
    pairs = draw_indices(t, [len(tasks) for tasks in by_env], num_tasks, str(seed), weights)
    for n, (env, index) in enumerate(pairs):
        task, env_seed = by_env[env][index], seed * 1_000_003 + first + n
        k = num_before[task.task_id]
        num_before[task.task_id] += group_size
        requests += [
            RolloutRequest(task, n, sample, env_seed, step, horizons[task.env])
            for sample in range(k, k + group_size)
        ]
    return requests


def all_samples(
    tasks: Sequence[Task], samples: int, seed: int, step: int, horizons: Mapping[str, int]
) -> list[RolloutRequest]:
    """The requests of an evaluation: every task `samples` times, all with one environment seed."""
    return [
        RolloutRequest(task, group, sample, seed, step, horizons[task.env])
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]


def share_of(requests: Sequence[RolloutRequest], rank: int, ranks: int) -> list[RolloutRequest]:
    """The requests of one process: all samples of every `ranks`-th task of each environment, so
    that no process has a slow environment to itself.

    >>> tasks = [Task(f"t{n}", n, "", env) for n, env in enumerate(["quick", "slow"] * 2)]
    >>> requests = draw(1, tasks, 4, 1, 0, 1, {"quick": 3, "slow": 3})
    >>> [sorted(r.task.env for r in share_of(requests, rank, 2)) for rank in (0, 1)]
    [['quick', 'slow'], ['quick', 'slow']]
    """
    env_of = {r.group_id: r.task.env for r in requests}
    in_turn = sorted(env_of, key=lambda group: (env_of[group], group))
    groups = set(in_turn[rank::ranks])
    return [r for r in requests if r.group_id in groups]
