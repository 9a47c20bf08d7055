"""Which of several environment servers is used next: load, failures, and when to try again.

An address that cannot be reached is left alone for back_off_s, twice as long after each further
failure, up to max_back_off_s; then one client tries it while the others go elsewhere. A full one
(429) is left alone for a moment. A server that has worked may be on its way back, so it is waited
for; an address at which nobody has ever listened is a mistake, and is told at once.

Read next: envclient.py, whose pool of clients asks here.
"""

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from envs.exchange import checked_url
from envs.http import (
    BACK_OFF_S,
    AllServersDown,
    EnvConnectionError,
    EnvError,
    EnvTimeout,
    TooManySessions,
)
from envs.local import LOCAL

UNREACHABLE = (EnvConnectionError, EnvTimeout)


@dataclass(eq=False)
class Address:
    """One server, as its clients have found it."""

    url: str
    load: int = 0  # clients, those that are still opening their session too
    num_open: int = 0  # sessions
    num_failures: int = 0  # since it last worked
    retry_at: float = 0.0  # time.monotonic() from when on it may be used
    is_probed: bool = False  # after failures one client at a time tries it
    last_error: EnvError | None = None
    has_worked: bool = False
    is_checked: bool = False  # it serves this world
    is_sealing: bool = False  # an answer of it had a seal, so that each must (envs/seal.py)

    def tries_at_close(self) -> int | None:
        """How often to tell it that a session is over: not while it hangs, once while it is down,
        else as often as anything (None)."""
        if time.monotonic() >= self.retry_at:
            return None
        return 0 if isinstance(self.last_error, EnvTimeout) else 1


class Addresses:
    """The servers of a pool; shared by all threads.

    Arguments:
        dead_wait_s: how long `pick` waits, in seconds, for servers that have worked before.
        busy_wait_s: how long it waits where one is full.

    Raises ValueError for no address, one that is no URL, or the same twice.
    """

    def __init__(
        self,
        env: str,
        urls: Sequence[str],
        *,
        dead_wait_s: float,
        busy_wait_s: float,
        back_off_s: float,
        max_back_off_s: float,
    ) -> None:
        self.all = [Address(u if u == LOCAL else checked_url(u, "--env-addr")) for u in urls]
        if not self.all or len({a.url for a in self.all}) < len(self.all):
            raise ValueError(f"--env-addr {' '.join(urls)}: give each server's address once")
        self.env, self.dead_wait_s, self.busy_wait_s = env, dead_wait_s, busy_wait_s
        self.back_off_s, self.max_back_off_s = back_off_s, max_back_off_s
        self._is_closed = False
        self._changed = threading.Condition()  # guards every address

    def pick(self, started: float, avoid: Collection[str] = ()) -> Address:
        """Wait for an address that may be used and count a client to it.

        Args:
            avoid: addresses to take only where no other may be used.
        Raises:
            TooManySessions, AllServersDown: none can be used, and has not been since `started`
                (time.monotonic()) for as long as it was to be waited for; or `close` was called.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                usable = [a for a in self.all if now >= a.retry_at and not a.is_probed]
                if self._is_closed:
                    raise self._nothing_usable()
                if usable:
                    address = min(usable, key=lambda a: (a.url in avoid, a.load))
                    address.load += 1
                    address.is_probed = address.num_failures > 0
                    return address
                give_up_at = started + self._patience()
                if now >= give_up_at:
                    raise self._nothing_usable()
                wake_at = [a.retry_at for a in self.all if not a.is_probed]
                self._changed.wait(min([give_up_at, *wake_at]) - now)

    def note_success(self, address: Address) -> None:
        """A client has opened its session."""
        with self._changed:
            address.num_failures, address.is_probed, address.last_error = 0, False, None
            address.retry_at, address.has_worked = 0.0, True
            address.num_open += 1
            self._changed.notify_all()

    def note_failure(self, address: Address, error: EnvError) -> None:
        """Leave the address alone for a while if the error is the server's, not one session's."""
        is_down = isinstance(error, UNREACHABLE)
        is_down |= error.url.endswith(("/create", "/health")) and error.status != 429
        with self._changed:
            now = time.monotonic()
            address.last_error = error
            if isinstance(error, TooManySessions):
                address.retry_at = max(address.retry_at, now + BACK_OFF_S)
            elif is_down and now >= address.retry_at:  # many notice one crash: count it once
                address.num_failures += 1
                pause = self.back_off_s * 2 ** min(address.num_failures - 1, 20)
                address.retry_at = now + min(pause, self.max_back_off_s)

    def release(self, address: Address, has_opened: bool) -> None:
        """A client is closed."""
        with self._changed:
            address.load -= 1
            address.num_open -= has_opened
            if not has_opened:  # whoever waits may try now
                address.is_probed = False
            self._changed.notify_all()

    def is_in_use(self) -> bool:
        """Whether there are sessions of ours, which may end and leave room for another."""
        with self._changed:
            return any(address.num_open for address in self.all)

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _patience(self) -> float:
        if any(isinstance(a.last_error, TooManySessions) for a in self.all):
            return self.busy_wait_s
        nobody = all(not a.has_worked and isinstance(a.last_error, UNREACHABLE) for a in self.all)
        return 0.0 if nobody else self.dead_wait_s

    def _nothing_usable(self) -> EnvError:
        errors = [address.last_error for address in self.all]
        where = ", ".join(address.url for address in self.all)
        if self._is_closed:
            return AllServersDown("the pool is closed", where)
        full = [str(error) for error in errors if isinstance(error, TooManySessions)]
        if full:  # and who waits for it gets a place, whatever has become of the others
            what = f"full for {self.busy_wait_s:g} s; raise --max-sessions or add servers"
            down = [a.url for a in self.all if isinstance(a.last_error, UNREACHABLE)]
            what += f" (down: {', '.join(down)})" if down else ""
            return TooManySessions(what, where, 429, full[0])
        lines = "".join(
            f"\n  {address.url} ({address.num_failures} failures): {address.last_error}"
            for address in self.all
        )
        return AllServersDown(f"no {self.env} server can be used; last errors:{lines}", where)
