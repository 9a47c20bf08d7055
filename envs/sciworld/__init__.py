"""SciWorld: elementary-school science in a house of ten places. The environment is in env.py."""

from envs.sciworld.env import SciWorld
from envs.sciworld.env import SciWorld as World

__all__ = ["SciWorld", "World"]
