"""SciWorld: elementary-school science in a house of ten places. The world is env.py."""

from envs.sciworld.env import SciWorld
from envs.sciworld.env import SciWorld as World

__all__ = ["SciWorld", "World"]
