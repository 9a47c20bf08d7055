"""BabyAI: rooms, doors, keys and one instruction. The environment is in env.py."""

from envs.babyai.env import BabyAI
from envs.babyai.env import BabyAI as World

__all__ = ["BabyAI", "World"]
