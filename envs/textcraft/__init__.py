"""TextCraft: craft a Minecraft item from a list of recipes. The environment is in env.py."""

from envs.textcraft.env import TextCraft
from envs.textcraft.env import TextCraft as World

__all__ = ["TextCraft", "World"]
