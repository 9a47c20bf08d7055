"""BabyAI: rooms, doors, keys and one instruction. The world is env.py."""

from envs.babyai.env import BabyAI

__all__ = ["BabyAI"]
