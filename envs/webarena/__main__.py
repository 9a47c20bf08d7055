"""`python -m envs.webarena`: play a task in the terminal."""

from envs.common import command_line
from envs.webarena.env import WebArena
from envs.webarena.tasks import NUM_OFFICIAL

if __name__ == "__main__":
    command_line(WebArena, "envs.webarena", task_index=NUM_OFFICIAL)
