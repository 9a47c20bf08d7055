"""Which tasks or conversations a step takes: a pure function of the step, so that a resume cannot
lose its place.

    position(t, n) = (t - 1) · per_turn + n              n-th of turn t, turns counted from 1
    epoch, place   = divmod(position, count)
    index(t, n)    = order_epoch[place]                  order: shuffled by (key, epoch)

All are taken once before any is taken again, each time in another order. `drawn` goes on into the
next epoch within a turn, so that every step plays as many tasks; `portion` cuts each epoch into
equal steps. There is no cursor and no generator that a checkpoint could restore wrong.

With several worlds positions are dealt out to them, and each counts its own:

    weights 2, 1:    a a b a a b a ...        a world's n-th turn is its n-th position

    draw    requests for trajectories, as the rollout takes them

Read next: rollout.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs import Task, tasks_by_world


def drawn(
    turn: int, counts: Sequence[int], per_turn: int, key: str, weights: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """(world, index in its list) of each task that the `turn`-th draw takes.

    Args:
        counts: tasks that each world has.
        weights: how many tasks of each world follow one another; none: one of each.

    >>> [index for _, index in drawn(1, [4], 2, "0") + drawn(2, [4], 2, "0")]  # an epoch
    [2, 1, 3, 0]
    >>> [index for _, index in drawn(1, [2], 5, "0")]  # more than there are: two epochs and a half
    [1, 0, 1, 0, 1]
    >>> drawn(1, [4, 2], 6, "0", [2, 1])
    [(0, 2), (0, 1), (1, 1), (0, 3), (0, 0), (1, 0)]
    """
    dealt = _round_of(len(counts), weights)
    orders: dict[tuple[int, int], list[int]] = {}
    taken = []
    for position in range((turn - 1) * per_turn, turn * per_turn):
        world = dealt[position % len(dealt)]
        epoch, place = divmod(_times(world, position, dealt), counts[world])
        if (world, epoch) not in orders:
            orders[world, epoch] = _order_of(epoch, counts[world], key)
        taken.append((world, orders[world, epoch][place]))
    return taken


def epochs(
    turn: int, counts: Sequence[int], per_turn: int, weights: Sequence[int] = ()
) -> list[float]:
    """How often each world's tasks have been taken once the `turn`-th draw is done.

    >>> epochs(1, [4, 2], 6, [2, 1])
    [1.0, 1.0]
    """
    dealt = _round_of(len(counts), weights)
    return [_times(world, turn * per_turn, dealt) / count for world, count in enumerate(counts)]


def portion(turn: int, count: int, per_turn: int, key: str) -> tuple[list[int], float]:
    """Indices that the `turn`-th step of an optimizer takes, at most `per_turn`, and the epochs
    that are done with it. The steps of an epoch are of equal sizes: a step is a mean over what it
    takes, so that in a rest of one that one would count as much as `per_turn` elsewhere.

    >>> [portion(turn, 5, 4, "0")[0] for turn in (1, 2)], portion(2, 5, 4, "0")[1]
    ([[2, 3], [4, 1, 0]], 1.0)
    """
    steps = -(-count // per_turn)
    epoch, place = divmod(turn - 1, steps)
    first, end = place * count // steps, (place + 1) * count // steps
    return _order_of(epoch, count, key)[first:end], epoch + end / count


def _round_of(num_worlds: int, weights: Sequence[int]) -> list[int]:
    """The worlds as positions are dealt to them, over and over."""
    weights = weights or [1] * num_worlds
    return [world for world, weight in enumerate(weights) for _ in range(weight)]


def _times(world: int, position: int, dealt: Sequence[int]) -> int:
    """How many of the positions before this one are the world's."""
    rounds, rest = divmod(position, len(dealt))
    return rounds * dealt.count(world) + dealt[:rest].count(world)


def _order_of(epoch: int, count: int, key: str) -> list[int]:
    return random.Random(f"{key}/{epoch}").sample(range(count), count)


@dataclass(frozen=True)
class RolloutRequest:
    """One trajectory to roll: of which group, which sample of its task, the environment's seed, and
    how many turns it may take, which is a matter of the world and of the schedule."""

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


def draw(
    turn: int,
    tasks: Sequence[Task],
    num_tasks: int,
    group_size: int,
    seed: int,
    step: int,
    horizons: Mapping[str, int],
    weights: Sequence[int] = (),
) -> list[RolloutRequest]:
    """What is played at the `turn`-th time, named by `step`; all samples of a group share the
    environment's seed. A task that comes twice in a turn goes on counting its samples, which are
    what tells the random numbers of one from those of another.

    Args:
        horizons: most turns in each world.
        weights: of the worlds, in the order in which `tasks` names them.
    """
    by_world = list(tasks_by_world(tasks).values())
    counts = [len(own) for own in by_world]
    requests, first, before = [], (turn - 1) * num_tasks, Counter[str]()
    for n, (world, index) in enumerate(drawn(turn, counts, num_tasks, str(seed), weights)):
        task, env_seed = by_world[world][index], seed * 1_000_003 + first + n
        rounds, k = horizons[task.env], before[task.task_id]
        before[task.task_id] += group_size
        samples = range(k, k + group_size)
        requests += [RolloutRequest(task, n, k, env_seed, step, rounds) for k in samples]
    return requests


def share_of(requests: Sequence[RolloutRequest], rank: int, ranks: int) -> list[RolloutRequest]:
    """The requests of one process: all samples of every `ranks`-th task of each world. A rollout
    waits for the process that is done last, so none has the slow world for itself.

    >>> tasks = [Task(f"t{n}", n, "", env) for n, env in enumerate(["quick", "slow"] * 2)]
    >>> requests = draw(1, tasks, 4, 1, 0, 1, {"quick": 3, "slow": 3})
    >>> [sorted(r.task.env for r in share_of(requests, rank, 2)) for rank in (0, 1)]
    [['quick', 'slow'], ['quick', 'slow']]
    """
    world_of = {r.group_id: r.task.env for r in requests}
    in_turn = sorted(world_of, key=lambda group: (world_of[group], group))
    own = set(in_turn[rank::ranks])
    return [r for r in requests if r.group_id in own]
