"""WebArena: do tasks on web sites in a real browser. The environment is in env.py."""

from envs.webarena.env import WebArena
from envs.webarena.env import WebArena as World

__all__ = ["WebArena", "World"]
