"""`python -m envs.sciworld`: play a task in the terminal."""

from envs.common import command_line
from envs.sciworld.env import SciWorld

if __name__ == "__main__":
    command_line(SciWorld, "envs.sciworld", task_index=2936)
