"""A network that does everything wrong, and the proof that nothing wrong is trained on.

    rollout.collect ── EnvPool ── Chaos (a proxy) ── python -m envs.server, killed again and again

The proxy takes requests off the wire one by one and draws a fault for each from a seeded generator,
by the rates of FAULTS; threads decide which request comes when, so that a seed repeats the mixture
and not the run. The policy is a script: an oracle that errs, told before the rollout what to say.

The property: every trajectory that enters a loss, its actions played again in a world of its own,
has the same observations and rewards. `measure` counts those that have not, and with `is_sealed`
off counts them again, so that the property is seen to be able to fail.

Run it:  PYTHONPATH=. python tests/chaos.py            1,000 episodes a world, 20 restarts
         PYTHONPATH=. python tests/chaos.py 100 2 --out /tmp/chaos.json     for a quick look
Read next: envs/seal.py, which makes it hold.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from fakes import ScriptedEngine, byte_tokenizer, settings_of

from chat import ChatTemplate
from envclient import EnvPool
from envs import ParseError, Task, get_env
from envs import http as envhttp
from envs.seal import Turns
from rollout import RolloutLog, RolloutRequest, collect
from run.processes import child

ROOT = Path(__file__).parent.parent
NAME = "chaos.json"  # in benchmarks/results
# Shares of requests. "before" and "after" say whether the server has seen the request by then.
FAULTS = {
    "drop before": 0.001,
    "drop after": 0.001,
    "delay": 0.01,
    "drip": 0.003,
    "hang": 0.0005,  # for longer than the client waits
    "twice": 0.002,  # the server gets it twice, the client the second answer
    "truncate": 0.001,  # and Content-Length says what is left
    "cut": 0.001,  # and it says what there was
    "garble request": 0.004,
    "garble answer": 0.004,
    "swap": 0.004,  # two clients get each other's answers
    "replay": 0.004,  # an old answer to a request for the same path
    "429 before": 0.001,
    "429 after": 0.001,
    "503 before": 0.001,
    "503 after": 0.001,
    "a page": 0.001,
}
# Only those after which an answer reads like any other.
UNNOTICED = {"swap": 0.04, "replay": 0.04}
# Only those after which the server has played what the client did not ask for, or does not know of.
PLAYED = {"twice": 0.04, "429 after": 0.04, "garble request": 0.04}
TIMEOUT_S = 3.0  # of the client
PAGE = b"<html><body>Please log in</body></html>"


# ------------------------------------------------------------------------------------ the network


class Chaos:
    """The proxy, in a thread; `url` is where clients find it, `upstream` where the server is."""

    def __init__(self, upstream: str, rates: dict[str, float], seed: int) -> None:
        self.upstream, self.rates, self.rng = upstream, rates, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._old: dict[bytes, deque[bytes]] = {}  # answers by path
        self._swapping: asyncio.Future[bytes] | None = None  # who waits for another's answer
        self._mine = b""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Chaos":
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection: its requests one after the other, each with its own fault."""
        ends = (OSError, asyncio.IncompleteReadError, ValueError, asyncio.CancelledError)
        with contextlib.closing(writer), contextlib.suppress(*ends):
            while True:
                request = await read_message(reader)
                names, weights = list(self.rates), list(self.rates.values())
                fault = self.rng.choices([*names, ""], [*weights, 1 - sum(weights)])[0]
                self.counts[fault or "none"] += 1
                answer = await self._answer(fault, request)
                await self._send(fault, answer, writer)

    async def _answer(self, fault: str, request: bytes) -> bytes:
        if fault == "drop before":
            raise OSError
        if fault.endswith(" before"):
            return canned(int(fault[:3]))
        if fault == "garble request":
            request = self._garbled(request)
        answer = await self._ask(request)
        if fault == "twice":
            answer = await self._ask(request)
        path = request.split(b" ")[1].partition(b"?")[0] if request.count(b" ") > 1 else b""
        old = self._old.setdefault(path, deque(maxlen=50))
        old.append(answer)
        if fault == "replay":
            return self.rng.choice(old)
        if fault == "swap":
            return await self._swapped(answer)
        if fault == "drop after":
            raise OSError
        if fault.endswith(" after"):
            return canned(int(fault[:3]))
        if fault == "a page":
            return with_body(b"HTTP/1.1 200 OK\r\nContent-Type: text/html", PAGE)
        return self._garbled(answer) if fault == "garble answer" else answer

    async def _send(self, fault: str, answer: bytes, writer: asyncio.StreamWriter) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        pieces, pause_s = [answer], 0.0
        if fault == "delay":
            await asyncio.sleep(self.rng.uniform(0, 0.2))
        elif fault == "hang":
            await asyncio.sleep(1.2 * TIMEOUT_S)
        elif fault == "drip":
            pieces, pause_s = [answer[i : i + 20] for i in range(0, len(answer), 20)], 0.01
        elif fault == "truncate":
            pieces = [with_body(head, body[: self.rng.randrange(len(body) + 1)])]
        elif fault == "cut":
            pieces = [answer[: self.rng.randrange(len(answer))]]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if fault in ("cut", "garble answer"):
            raise OSError  # hang up, or who reads the rest waits for it

    async def _ask(self, request: bytes) -> bytes:
        """The server's answer, over a connection of its own."""
        host, _, port = self.upstream.removeprefix("http://").partition(":")
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(request)
                return await read_message(reader)
            finally:
                writer.close()

    async def _swapped(self, answer: bytes) -> bytes:
        """Another client's answer, which gets this one; this one where none comes soon."""
        if self._swapping and not self._swapping.done():
            self._swapping.set_result(answer)
            return self._mine
        self._swapping, self._mine = asyncio.get_running_loop().create_future(), answer
        try:
            async with asyncio.timeout(0.3):
                return await self._swapping
        except TimeoutError:
            return answer

    def _garbled(self, message: bytes) -> bytes:
        """Some bytes are others: anywhere, or only in the body, where JSON is likely to survive."""
        changed = bytearray(message)
        begin = self.rng.choice((0, message.find(b"\r\n\r\n") + 4))
        for _ in range(self.rng.randint(1, 4)):
            place = self.rng.randrange(min(begin, len(changed) - 1), len(changed))
            likely = b"0123456789abcdefghijklmnopqrstuvwxyz"
            changed[place] = self.rng.choice((self.rng.choice(likely), self.rng.randrange(256)))
        return bytes(changed)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer: head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return head + (await reader.readexactly(int(length[1])) if length else b"")


def with_body(head: bytes, body: bytes) -> bytes:
    """The head with this body's length."""
    head = re.sub(rb"(?i)\r\ncontent-length:[^\r]*", b"", head)
    return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def canned(status: int) -> bytes:
    """What a proxy says of its own accord."""
    return with_body(b"HTTP/1.1 %d Sorry\r\nContent-Type: text/html" % status, PAGE)


@contextlib.contextmanager
def killable_server(env: str):
    """The address of a new server, which is killed at the end."""
    with child("envs.server", "--env", env, "--port", "0", cwd=ROOT) as process:
        found = process.wait_until(lambda: re.search(r"listening on (\S+)", process.stdout()), 60)
        try:
            yield found[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.process.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------- the policy


def script(env: str, task_index: int, seed: int, max_rounds: int) -> list[str]:
    """What the policy says in each turn: mostly the oracle's move, else a random or a silly one."""
    rng, world, said = random.Random(f"{env}/{task_index}/{seed}"), get_env(env)(), []
    world.reset(task_index, seed)
    for _ in range(max_rounds):
        said.append("I would rather not.")
        if rng.random() > 0.1:
            action = rng.choice(world.available_actions())
            if rng.random() > 0.2:
                with contextlib.suppress(RuntimeError):  # it may be lost after silly moves
                    action = world.oracle()[1]
            said[-1] = world.say("on I go", action)
            _, _, terminated, truncated, _ = world.step(world.parse(said[-1]))
            if terminated or truncated:
                break
    world.close()
    return said


def is_corrupted(env: str, handler) -> bool:
    """Not what a world of its own shows and pays for the same actions."""
    world = get_env(env)()
    first = world.reset(int(handler.task_id.rpartition("_")[2]), handler.seed)
    ended, seen = False, []
    for turn in handler.turns:
        if ended:
            return True  # it went on in a world that is over
        try:
            action = world.parse(turn.action_text)
        except ParseError as error:
            seen.append((str(error), 0.0))
            continue
        observation, reward, terminated, truncated, info = world.step(action)
        seen.append((observation, round(reward, 9)))  # as the wire has it
        ended = terminated or truncated
    world.close()
    has_solved = bool(handler.turns) and ended and bool(info["success"])
    read = [message["content"] for message in handler.messages if message["role"] == "user"]
    told = [(turn.observation_text, turn.reward) for turn in handler.turns]
    return (
        told != seen
        or read != [first, *(text for text, _ in seen)][: len(read)]
        or handler.success != has_solved
        or handler.terminated != ended
    )


# ------------------------------------------------------------------------------------ the measure


@dataclass
class Found:
    """What became of the episodes."""

    env: str
    episodes: int
    in_loss: int
    corrupted: int  # of those in the loss; must be 0
    lost: int
    solved: int
    restarts: int
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)  # of the lost ones


def measure(
    env: str,
    num_episodes: int,
    num_restarts: int,
    seed: int = 0,
    is_sealed: bool = True,
    rates: dict[str, float] = FAULTS,
    workers: int = 32,
    max_rounds: int = 12,
    step_size: int = 50,
) -> Found:
    """Roll `num_episodes` through the proxy, `step_size` at once as in a training step, while the
    server is killed `num_restarts` times."""
    rng, num_tasks = random.Random(seed), get_env(env).num_tasks()
    requests = [
        RolloutRequest(Task(f"{env}_{index}", index, "any"), n, 0, n % 7, 1, max_rounds)
        for n, index in enumerate(rng.randrange(num_tasks) for _ in range(num_episodes))
    ]
    scripts = [script(env, r.task.task_index, r.seed, max_rounds) for r in requests]
    chat = ChatTemplate(byte_tokenizer())
    handlers, log, num_restarted, began = [], RolloutLog(), 0, time.monotonic()
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(contextlib.ExitStack())
        proxy = stack.enter_context(Chaos(running.enter_context(killable_server(env)), rates, seed))
        if not is_sealed:
            stack.enter_context(mock.patch.object(Turns, "__str__", return_value=""))
        stack.enter_context(mock.patch.object(envhttp, "BACK_OFF_S", 0.02))

        def answer(request_id: str, prompt_ids: list[int]) -> list[int]:
            turn = prompt_ids.count(chat.end_of_turn) // 2 - 1
            said = scripts[int(request_id[9:13])]
            return chat.action(said[min(turn, len(said) - 1)])

        def restart() -> None:
            """In the middle of the rollout, while episodes are open."""
            nonlocal num_restarted
            engine.asked.clear()
            if len(log.ended) * (num_restarts + 1) > num_episodes * (num_restarted + 1):
                num_restarted += 1
                running.close()
                proxy.upstream = running.enter_context(killable_server(env))

        engine = ScriptedEngine(answer, on_poll=restart)
        options = {"timeout_s": TIMEOUT_S, "dead_wait_s": 60.0, "back_off_s": 0.05}
        pool = stack.enter_context(EnvPool(env, [proxy.url], max_back_off_s=0.5, **options))
        settings = settings_of(
            max_tokens_per_turn=1000,
            max_trajectory_tokens=200_000,
            env_workers=workers,
        )
        for i in range(0, num_episodes, step_size):
            handlers += collect(engine, pool, chat, requests[i : i + step_size], settings, log)
    kept = [handler for handler in handlers if handler.is_valid]
    errors = Counter(re.sub(r"\d+", "N", h.error or "")[:90] for h in handlers if not h.is_valid)
    return Found(
        env,
        num_episodes,
        len(kept),
        sum(is_corrupted(env, handler) for handler in kept),
        num_episodes - len(kept),
        sum(handler.success for handler in kept),
        num_restarted,
        round(time.monotonic() - began, 1),
        dict(proxy.counts),
        dict(errors.most_common(8)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.common import Results, arguments

    parser = arguments(__doc__, None, NAME)
    parser.add_argument("episodes", nargs="?", type=int, default=1000)
    parser.add_argument("restarts", nargs="?", type=int, default=20)
    options = parser.parse_args(argv)
    results, rows = Results(options.out, NAME), list[dict[str, Any]]()
    for env in ("textcraft", "babyai"):
        for is_sealed in (True, False):
            found = measure(env, options.episodes, options.restarts, is_sealed=is_sealed)
            rows.append({"is_sealed": is_sealed} | vars(found))
            print(json.dumps(rows[-1]), flush=True)
            results.write({"timeout_s": TIMEOUT_S, "rates": FAULTS, "rollouts": rows})
    return int(any(row["corrupted"] for row in rows if row["is_sealed"]))


if __name__ == "__main__":
    sys.exit(main())
