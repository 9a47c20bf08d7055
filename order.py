"""Which tasks or conversations a step takes: a pure function of the step, so that a resume cannot
lose its place.

    position(t, n) = (t - 1) · per_turn + n              n-th of turn t, turns counted from 1
    epoch, place   = divmod(position, count)
    index(t, n)    = order_epoch[place]                  order: shuffled by (key, epoch)

All are taken once before any is taken again, each time in another order. `drawn` goes on into the
next epoch within a turn, so that every step plays as many tasks; `portion` ends an epoch with a
smaller one. There is no cursor and no generator that a checkpoint could restore wrong.

Read next: train.py.
"""

from __future__ import annotations

import random


def drawn(turn: int, count: int, per_turn: int, key: str) -> list[int]:
    """Indices, of `count` there are, that the `turn`-th draw takes.

    >>> drawn(1, 4, 2, "0") + drawn(2, 4, 2, "0")  # an epoch
    [2, 1, 3, 0]
    >>> drawn(1, 2, 5, "0")  # more than there are: two epochs and a half
    [1, 0, 1, 0, 1]
    """
    positions = range((turn - 1) * per_turn, turn * per_turn)
    epochs = {position // count for position in positions}
    orders = {epoch: _order_of(epoch, count, key) for epoch in epochs}
    return [orders[position // count][position % count] for position in positions]


def portion(turn: int, count: int, per_turn: int, key: str) -> tuple[list[int], float]:
    """Indices that the `turn`-th step of an optimizer takes, and the epochs that are done with it.
    Every epoch has as many steps; the last of each takes what is left.

    >>> [portion(turn, 5, 2, "0")[0] for turn in (1, 2, 3)], portion(3, 5, 2, "0")[1]
    ([[2, 3], [4, 1], [0]], 1.0)
    """
    epoch, place = divmod(turn - 1, -(-count // per_turn))
    taken = _order_of(epoch, count, key)[place * per_turn : (place + 1) * per_turn]
    return taken, epoch + (place * per_turn + len(taken)) / count


def _order_of(epoch: int, count: int, key: str) -> list[int]:
    return random.Random(f"{key}/{epoch}").sample(range(count), count)
