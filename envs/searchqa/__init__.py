"""SearchQA: answer questions by searching a corpus. The environment is in env.py."""

from envs.searchqa.env import SearchQA
from envs.searchqa.env import SearchQA as World

__all__ = ["SearchQA", "World"]
