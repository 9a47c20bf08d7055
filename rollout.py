"""Multi-turn rollouts: an event-driven loop that plays many trajectories at once.

A simple loop would generate one turn for all trajectories, then step all environments, and repeat.
Every round would then last as long as its slowest environment. Here each environment's answer goes
to the engine as soon as it arrives, and the engine decodes all the prompts that it has:

        ┌── a generation ends ──> env.step in a thread ──> observation ids appended ──┐
        │                                                                             │
      engine (continuous batching) <───────────── submit the longer prompt ───────────┘

A trajectory that reaches `max_trajectory_tokens` stops with `length`, and the action cut off
by the limit is not played. So every reward belongs to tokens that training sees.

The policy's own mistakes (an action that is wrong, too long or unparsable) earn 0, and the policy
learns from them. Failures outside its control (a dead server, a time-out) are retried. If the retry
fails too, the trajectory is marked `env_error`, left out of the loss and of its group's baseline,
and counted.

The last sections choose a step's tasks: all of them in turn, as a pure function of the step number,
or those with the least certain outcome (--task-sampling uncertain).

Read first: `trajectory.py`. Read next: `envclient.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from agents import PLAIN, Agent
from chat import ChatTemplate
from engines import Engine, EngineError, Generation, SamplingSettings
from envclient import EnvClient, EnvError, EnvPool, EnvPools, StepOutsideEpisode, TooManySessions
from envs import Task, tasks_by_env
from run.errors import TooManyEnvFailures
from trajectory import LOST, RolloutHandler, Trajectory

NUM_RESETS = 3  # attempts to reset an episode; an episode whose step fails starts over once
THREAD_NAME = "rollout"  # prefix of the threads' names
IDLE_WAIT_S = 0.2  # longest single wait for an answer while the engine has nothing to do


@dataclass(frozen=True)
class RolloutRequest:
    """One trajectory to play: its task, its group, its number within the group, the environment's
    seed and the maximum number of turns."""

    task: Task
    group_id: int
    sample: int
    seed: int
    step: int
    max_rounds: int

    def trajectory_fields(self, env: str) -> dict[str, Any]:
        """The fields of the `Trajectory` that are known before it is played."""
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
    """Settings that all trajectories of a rollout share; the horizon is part of each request."""

    max_tokens_per_turn: int
    max_trajectory_tokens: int  # includes the prompt
    temperature: float = 1.0
    seed: int = 0
    env_workers: int = 64  # maximum number of simultaneous environment calls
    max_env_failures: float = 0.2  # share of lost trajectories above which the run stops
    record_state: bool = False
    weight_version: int = 0  # the training step that produced the sampler's weights; recorded
    agent: Agent = PLAIN
    ask_oracle: bool = False  # before each act, what it would do; recorded for --teacher oracle
    oracle_thoughts: bool = True


@dataclass
class RolloutLog:
    """A record of one `collect`, complete even if `collect` raises."""

    on_end: Callable[[RolloutHandler], None] = lambda handler: None  # called in collect's thread
    trajectories: list[RolloutHandler] = field(default_factory=list)  # in the order they ended
    seconds: float = 0.0
    engine_idle_s: float = 0.0  # time with open episodes but no request at the engine
    generated_tokens: int = 0

    def end(self, handler: RolloutHandler) -> None:
        self.trajectories.append(handler)
        self.on_end(handler)


def sampling_seed(seed: int, step: int, task_id: str, sample: int, turn: int) -> int:
    """A 63-bit seed for one turn. It does not depend on rank, thread or order of arrival."""
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
    """Play all requests to the end. Returns one trajectory per request, in the same order.

    Args:
        log: filled as episodes end. After an exception or Ctrl-C it holds the trajectories that had
            ended; after an EngineError also those being sampled, marked `engine_error`.
    Raises:
        EngineError: the sampler failed; its running requests were dropped.
        TooManyEnvFailures: more than `settings.max_env_failures` of the trajectories were lost.
    """
    log = log if log is not None else RolloutLog()
    calls = _EnvCalls(min(settings.env_workers, len(requests) or 1))
    episodes = [_Episode(pool, chat, r, settings, calls.stopping) for r in requests]
    generating: dict[str, _Episode] = {}
    num_open = len(episodes)
    # Open at most max_open: with more, the engine's cache would lose prefixes between turns.
    backlog = iter(episodes)
    start = time.perf_counter()
    try:
        for episode in islice(backlog, engine.max_open):
            calls.reset(episode)
        while num_open:
            # 1. For each environment that has answered, submit the next prompt or end the episode.
            for episode in calls.finished_episodes(log, wait=not generating):
                if episode.crash:
                    raise episode.crash
                if episode.must_restart:
                    calls.reset(episode)
                    continue
                sampling = episode.next_request()
                if sampling is None:
                    num_open -= 1
                    log.end(episode.handler)
                    for next_episode in islice(backlog, 1):
                        calls.reset(next_episode)
                    continue
                request_id = episode.handler.trajectory_id
                generating[request_id] = episode
                engine.submit(request_id, episode.handler.next_prompt(), sampling)
            # 2. Decode a little. Every finished turn goes to its environment immediately.
            for generation in engine.poll():
                episode = generating.pop(generation.request_id)
                log.generated_tokens += len(generation.token_ids)
                episode.add_generation(generation)
                calls.act(episode)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the engine itself may have failed
            engine.abort()
        if isinstance(error, EngineError):
            for episode in generating.values():
                episode.fail("engine_error", error)
        logged_ids = {id(handler) for handler in log.trajectories}
        for episode in episodes:  # includes episodes whose last answer is still in the queue
            if episode.handler.stop_reason and id(episode.handler) not in logged_ids:
                log.end(episode.handler)
        raise
    finally:
        log.seconds += time.perf_counter() - start
        calls.shutdown()
        if num_open:
            calls.stopping.set()
            for episode in episodes:
                episode.close()
    handlers = [episode.handler for episode in episodes]
    check_failures(handlers, settings.max_env_failures)
    return handlers


class _EnvCalls:
    """Calls environments in threads; `finished_episodes` returns the episodes whose call is done.

    Resets and steps have separate thread pools. A reset waits while a server is full (429), and it
    must not block the steps that will free a session.
    """

    def __init__(self, num_threads: int) -> None:
        self.stopping = threading.Event()  # set if the loop ends early: open no more sessions
        self._resets = ThreadPoolExecutor(num_threads, THREAD_NAME)
        self._steps = ThreadPoolExecutor(num_threads, THREAD_NAME)
        self._finished: queue.SimpleQueue[_Episode] = queue.SimpleQueue()

    def reset(self, episode: _Episode) -> None:
        self._resets.submit(self._work, episode, episode.reset)

    def act(self, episode: _Episode) -> None:
        self._steps.submit(self._work, episode, episode.act)

    def _work(self, episode: _Episode, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # a bug in a thread must surface in the loop
            episode.crash = error
        if self.stopping.is_set():  # this call may have opened a session after all were closed
            episode.close()
        self._finished.put(episode)

    def finished_episodes(self, log: RolloutLog, wait: bool) -> list[_Episode]:
        """All episodes whose call is done; with `wait`, blocks until there is at least one."""
        episodes: list[_Episode] = []
        if wait:
            start = time.perf_counter()
            while not episodes:  # short waits, so that Ctrl-C is noticed
                try:
                    episodes.append(self._finished.get(timeout=IDLE_WAIT_S))
                except queue.Empty:
                    continue
            log.engine_idle_s += time.perf_counter() - start
        while not self._finished.empty():
            episodes.append(self._finished.get())
        return episodes

    def shutdown(self) -> None:
        for threads in (self._resets, self._steps):
            threads.shutdown(wait=False, cancel_futures=True)


def state_of(client: EnvClient) -> dict[str, Any] | None:
    """The human-readable state, or None if the server has no /state (AgentGym's servers) or fails.
    The failure is ignored, because the turn itself was played."""
    with contextlib.suppress(EnvError):
        return client.state()
    return None


def check_failures(
    trajectories: Sequence[Trajectory], limit: float, total: int | None = None
) -> None:
    """Raise TooManyEnvFailures if more than the share `limit` of the trajectories was lost to the
    infrastructure. Checked per environment, so that losing a small one is noticed.

    Args:
        total: number of requested trajectories, if `trajectories` holds only some of them.
    """
    envs = dict.fromkeys(t.env for t in trajectories)
    for env in envs:
        env_trajectories = [t for t in trajectories if t.env == env]
        failures = [t for t in env_trajectories if t.stop_reason in LOST]
        num_requested = len(env_trajectories) if total is None else total
        if len(failures) > limit * num_requested:
            where = f" of {env}" if len(envs) > 1 else ""
            raise TooManyEnvFailures(
                f"{len(failures)} of {num_requested} trajectories{where} were lost to the "
                f"environment, more than --max-env-failures {limit:.0%}; last error: "
                f"{failures[-1].error}"
            )


class _Episode:
    """A trajectory that is being played, and its environment session. `reset` and `act` run in a
    thread and touch nothing shared; `next_request` and `add_generation` run in the loop."""

    def __init__(
        self,
        pools: EnvPool | EnvPools,
        chat: ChatTemplate,
        request: RolloutRequest,
        settings: RolloutSettings,
        stopping: threading.Event,
    ) -> None:
        self.pool = pools.for_env(request.task.env)
        self.chat, self.request, self.settings = chat, request, settings
        self.stopping = stopping
        self.client: EnvClient | None = None
        self.crash: BaseException | None = None
        self.restarts_left, self.must_restart = 1, False
        self.failed_urls: set[str] = set()  # servers that have lost a session of this episode
        self.submitted_at = 0.0
        self.advice: str | None = None  # the oracle's, for the next turn
        self.handler = self._new_handler()

    def _new_handler(self) -> RolloutHandler:
        fields = self.request.trajectory_fields(self.pool.env)
        return RolloutHandler(**fields, weight_version=self.settings.weight_version)

    def reset(self) -> None:
        """Open a session on a healthy server and reset it, in up to NUM_RESETS attempts. Servers
        that failed in this episode are tried last. If all servers are full while we have sessions
        open, the attempt does not count, because one of our sessions will end and make room."""
        self.must_restart = False
        attempts_left = NUM_RESETS
        while attempts_left and not self.stopping.is_set():
            attempts_left -= 1
            self.handler = self._new_handler()  # a failed attempt may have begun the other one
            try:
                self.client = self.pool.client(avoid=self.failed_urls)
                index, seed = self.request.task.task_index, self.request.seed
                observation = self.client.reset(index, seed=seed)
                opening = self.settings.agent.opening(self.handler, observation)
                self.handler.start(self.chat, self.client.prompt, opening)
                if self.settings.record_state:
                    self.handler.first_state = state_of(self.client)
                self.advice = self.oracle_text()
                return
            except EnvError as error:
                self.give_up_session()
                attempts_left += isinstance(error, TooManySessions) and self.pool.is_in_use()
                if not attempts_left:
                    self.fail("env_error", error)

    def act(self) -> None:
        """Play the turn that was just sampled and append the environment's answer. The agent
        records the reward and decides whether the episode is over (`agents.take_result`)."""
        handler, turn = self.handler, self.handler.turns[-1]
        if handler.stop_reason:  # the token budget cut this turn, so it is not played
            self.close()
            return
        assert self.client is not None  # there is a turn, so reset succeeded
        start = time.perf_counter()
        try:
            task_index = self.request.task.task_index
            text = self.settings.agent.next_text(handler, turn, self.client, task_index)
            turn.env_s = time.perf_counter() - start
            if self.settings.record_state:
                turn.state = state_of(self.client)
            self.advice = None if text is None else self.oracle_text()
        except EnvError as error:
            self.give_up_session()  # before waiting for a new one, or a full server could deadlock
            if self.restarts_left:
                self.restarts_left -= 1
                self.must_restart = True  # the loop restarts it in a reset thread
            else:
                self.fail("env_error", error)
            return
        if text is not None:
            limit = self.settings.max_trajectory_tokens - 2  # room for one token and an end-of-turn
            if not handler.add_observation(self.chat, text, limit):
                handler.stop("length", handler.success)
        if handler.stop_reason:
            self.close()

    def oracle_text(self) -> str | None:
        """What the oracle would write now; None if it is not asked, or knows no move."""
        if not self.settings.ask_oracle or self.handler.next_kind != "act":
            return None
        assert self.client is not None
        try:
            thought, action = self.client.oracle()
        except StepOutsideEpisode:
            return None
        return self.client.say(thought if self.settings.oracle_thoughts else "", action)

    def next_request(self) -> SamplingSettings | None:
        """Settings for sampling the next turn, or None if the trajectory has ended."""
        handler, s = self.handler, self.settings
        # One token is reserved for the end-of-turn that a cut turn gets.
        num_free = s.max_trajectory_tokens - len(handler.input_ids) - 1
        if not handler.stop_reason and num_free < 1:  # the opening already exceeds the budget
            handler.stop("length")
            self.close()
        if handler.stop_reason:
            return None
        self.submitted_at = time.perf_counter()
        r = self.request
        return SamplingSettings(
            max_tokens=min(s.max_tokens_per_turn, num_free),
            temperature=s.temperature,
            seed=sampling_seed(s.seed, r.step, r.task.task_id, r.sample, len(handler.turns)),
            stop_token_ids=self.chat.stop_token_ids,
        )

    def add_generation(self, generation: Generation) -> None:
        """Append the sampled turn; end the trajectory if its token budget cut the turn."""
        handler, s = self.handler, self.settings
        turn = handler.add_action(self.chat, generation.token_ids, generation.log_probs)
        turn.generate_s = time.perf_counter() - self.submitted_at
        turn.advice = self.advice
        out_of_budget = len(generation.token_ids) < s.max_tokens_per_turn
        if generation.finish_reason == "length" and out_of_budget:
            handler.stop("length")

    def give_up_session(self) -> None:
        """Close a session that failed and prefer other servers for the next one."""
        if self.client is not None:
            self.failed_urls.add(self.client.base_url)
        self.close()

    def close(self) -> None:
        client, self.client = self.client, None  # atomic: the loop and a thread can both close it
        if client is not None:
            client.close()

    def fail(self, reason: str, error: Exception) -> None:
        """End the trajectory as lost to the infrastructure."""
        self.close()
        self.handler.error = " ".join(str(error).split())
        self.handler.stop(reason)


# ------------------------------------------------------------- which tasks a step plays, in order
#
#     position(t, n) = (t - 1) · size + n                  n-th task (from 0) of draw t (from 1)
#     epoch, place   = divmod(position, count)
#     index(t, n)    = order_epoch[place]                  order: shuffled by (key, epoch)
#
# Every task is played once per epoch, and each epoch has a new order. There is no cursor or random
# generator that a checkpoint could restore wrongly. With several environments, positions are
# assigned to them in a fixed cycle (weights 2, 1 give a a b a a b ...), and each environment counts
# only its own positions.


def draw_indices(
    t: int, counts: Sequence[int], size: int, key: str, weights: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """(environment, index in its task list) of each task in the `t`-th draw. All draws have the
    same size, so a draw can run into the next epoch.

    Args:
        counts: number of tasks of each environment.
        weights: how many tasks of each environment come in a row; if empty, one.

    >>> [index for t in (1, 2) for _, index in draw_indices(t, [4], 2, "0")]  # an epoch
    [2, 1, 3, 0]
    >>> [index for _, index in draw_indices(1, [2], 5, "0")]  # two and a half epochs
    [1, 0, 1, 0, 1]
    >>> draw_indices(1, [4, 2], 6, "0", [2, 1])
    [(0, 2), (0, 1), (1, 1), (0, 3), (0, 0), (1, 0)]
    """
    cycle = _env_cycle(len(counts), weights)
    orders: dict[tuple[int, int], list[int]] = {}
    indices = []
    for position in range((t - 1) * size, t * size):
        env = cycle[position % len(cycle)]
        epoch, place = divmod(_num_earlier(env, position, cycle), counts[env])
        if (env, epoch) not in orders:
            orders[env, epoch] = _order_of(epoch, counts[env], key)
        indices.append((env, orders[env, epoch][place]))
    return indices


def num_epochs(
    t: int, counts: Sequence[int], size: int, weights: Sequence[int] = ()
) -> list[float]:
    """Passes over each environment's tasks after `t` draws.

    >>> num_epochs(1, [4, 2], 6, [2, 1])
    [1.0, 1.0]
    """
    cycle = _env_cycle(len(counts), weights)
    return [_num_earlier(env, t * size, cycle) / count for env, count in enumerate(counts)]


def portion(t: int, count: int, size: int, key: str) -> tuple[list[int], float]:
    """Indices of the conversations or pairs in the `t`-th step (at most `size`), and the number of
    epochs completed by then. Steps of an epoch differ in size by at most one. The loss is a mean
    over a step's rows, so a last step of one row would give this row the weight of `size` others.

    >>> [portion(t, 5, 4, "0")[0] for t in (1, 2)], portion(2, 5, 4, "0")[1]
    ([[2, 3], [4, 1, 0]], 1.0)
    """
    steps = -(-count // size)
    epoch, place = divmod(t - 1, steps)
    first, end = place * count // steps, (place + 1) * count // steps
    return _order_of(epoch, count, key)[first:end], epoch + end / count


def _env_cycle(num_envs: int, weights: Sequence[int]) -> list[int]:
    """The environments in the order in which positions are assigned to them, repeated forever."""
    weights = weights or [1] * num_envs
    return [env for env, weight in enumerate(weights) for _ in range(weight)]


def _num_earlier(env: int, position: int, cycle: Sequence[int]) -> int:
    """The number of earlier positions that belong to the environment."""
    num_cycles, remainder = divmod(position, len(cycle))
    return num_cycles * cycle.count(env) + cycle[:remainder].count(env)


def _order_of(epoch: int, count: int, key: str) -> list[int]:
    return random.Random(f"{key}/{epoch}").sample(range(count), count)


# ------------------------------------------------------- tasks whose outcome is least certain
#
#     p_i = (solved_i + 1/2) / (played_i + 1)       estimated success rate of task i
#     P(task i is drawn next) ∝ p_i (1 - p_i)       among the tasks not yet drawn in this step
#
# A group of k samples teaches GRPO and RLOO only if its outcomes differ, which has probability
# 1 - p^k - (1 - p)^k. Like p (1 - p), the variance of an outcome, this is largest at p = 1/2 and 0
# for a task that is always or never solved.


class TaskOutcomes:
    """How often each task was played and solved, as a dictionary from its id to [solved, played].

    Old counts are halved whenever a task is played again, because the policy has changed since.
    With the prior of half a success and half a failure (Jeffreys'), a new task has the largest
    variance. A task that failed 8 of 8 times has a fifth of it, and in groups of 8 no task has less
    than a ninth, so a task that always failed comes back when the policy may have become better.

    >>> outcomes = TaskOutcomes({"mixed": [4, 8], "failed": [0, 8], "solved": [8, 8]})
    >>> [round(outcomes.variance(task), 3) for task in ("new", "mixed", "failed", "solved")]
    [0.25, 0.25, 0.052, 0.052]
    """

    def __init__(self, counts: Mapping[str, Sequence[float]]) -> None:
        self.counts = dict(counts)

    def variance(self, task_id: str) -> float:
        """p (1 - p), where p is the task's estimated success rate."""
        solved, played = self.counts.get(task_id, (0, 0))
        p = (solved + 0.5) / (played + 1)
        return p * (1 - p)

    def update(self, trajectories: Sequence[Trajectory]) -> None:
        """Count a step's outcomes, except those of trajectories lost to the infrastructure."""
        successes: dict[str, list[bool]] = defaultdict(list)
        for t in trajectories:
            if t.is_valid:
                successes[t.task_id].append(t.success)
        for task_id, outcomes in successes.items():
            solved, played = self.counts.get(task_id, (0, 0))
            self.counts[task_id] = [solved / 2 + sum(outcomes), played / 2 + len(outcomes)]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}  # a copy, because the next step updates the counts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = dict(state["counts"])


def draw_uncertain(
    t: int, variances: Sequence[Sequence[float]], size: int, key: str, weights: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Like `draw_indices`, but each environment's tasks are drawn without replacement, with
    probability proportional to their variance. A draw that is larger than the list starts over.

    Every task gets an exponential arrival time whose rate is its variance v. The next to arrive is
    task i with probability v_i / Σ v, where the sum is over the tasks that have not yet arrived.

    Args:
        variances: p (1 - p) of each task of each environment.

    >>> draw_uncertain(1, [[0.25, 0.25, 1e-9, 0.25], [0.1, 0.1]], 4, "0", [3, 1])
    [(0, 1), (0, 3), (0, 0), (1, 0)]
    """
    generator = random.Random(f"{key}/uncertain/{t}")
    arrivals = [[generator.expovariate(v) for v in rates] for rates in variances]
    orders = [sorted(range(len(times)), key=times.__getitem__) for times in arrivals]
    queues = [iter(order * -(-size // len(order))) for order in orders]
    cycle = _env_cycle(len(variances), weights)
    envs = [cycle[position % len(cycle)] for position in range((t - 1) * size, t * size)]
    return [(env, next(queues[env])) for env in envs]


# ------------------------------------------------------------------------ the requests of a step


def draw_requests(
    t: int,
    tasks: Sequence[Task],
    num_tasks: int,
    group_size: int,
    seed: int,
    step: int,
    horizons: Mapping[str, int],
    weights: Sequence[int] = (),
    outcomes: TaskOutcomes | None = None,
) -> list[RolloutRequest]:
    """The requests of the `t`-th draw, labelled with `step`. All samples of a group share one
    environment seed. If a task is drawn twice, the second group continues the sample numbers,
    because the sampler's random numbers depend only on step, task and sample number.

    Args:
        horizons: maximum number of turns in each environment.
        weights: one per environment, in the order in which environments first appear in `tasks`.
        outcomes: if given, uncertain tasks are drawn more often; otherwise all are played in turn.
    """
    by_env = list(tasks_by_env(tasks).values())
    requests, first, num_samples = [], (t - 1) * num_tasks, Counter[str]()
    if outcomes:
        variances = [[outcomes.variance(task.task_id) for task in tasks] for tasks in by_env]
        pairs = draw_uncertain(t, variances, num_tasks, str(seed), weights)
    else:
        pairs = draw_indices(t, [len(tasks) for tasks in by_env], num_tasks, str(seed), weights)
    for n, (env, index) in enumerate(pairs):
        task, env_seed = by_env[env][index], seed * 1_000_003 + first + n
        k = num_samples[task.task_id]
        num_samples[task.task_id] += group_size
        requests += [
            RolloutRequest(task, n, sample, env_seed, step, horizons[task.env])
            for sample in range(k, k + group_size)
        ]
    return requests


def all_samples(
    tasks: Sequence[Task], samples: int, seed: int, step: int, horizons: Mapping[str, int]
) -> list[RolloutRequest]:
    """The requests of an evaluation: each task `samples` times, all with the same environment
    seed."""
    return [
        RolloutRequest(task, group, sample, seed, step, horizons[task.env])
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]


def share_of(requests: Sequence[RolloutRequest], rank: int, ranks: int) -> list[RolloutRequest]:
    """The requests of process `rank`: every `ranks`-th group of each environment, so that
    all processes share the work of a slow environment.

    >>> tasks = [Task(f"t{n}", n, "", env) for n, env in enumerate(["quick", "slow"] * 2)]
    >>> requests = draw_requests(1, tasks, 4, 1, 0, 1, {"quick": 3, "slow": 3})
    >>> [sorted(r.task.env for r in share_of(requests, rank, 2)) for rank in (0, 1)]
    [['quick', 'slow'], ['quick', 'slow']]
    """
    env_of = {r.group_id: r.task.env for r in requests}
    by_env = sorted(env_of, key=lambda group: (env_of[group], group))
    groups = set(by_env[rank::ranks])
    return [r for r in requests if r.group_id in groups]
