"""`python -m envs.textcraft`: play a task in the terminal."""

from envs.common import command_line
from envs.textcraft.env import TextCraft

if __name__ == "__main__":
    command_line(TextCraft, "envs.textcraft", task_index=140)
