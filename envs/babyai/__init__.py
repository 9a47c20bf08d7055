"""BabyAI: rooms, doors, keys and one instruction. The world is env.py."""

from envs.babyai.env import BabyAI
from envs.babyai.env import BabyAI as World

__all__ = ["BabyAI", "World"]
