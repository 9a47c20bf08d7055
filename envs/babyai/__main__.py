"""`python -m envs.babyai`: play a task in the terminal."""

from envs.babyai.env import BabyAI
from envs.common import command_line

if __name__ == "__main__":
    command_line(BabyAI, "envs.babyai", task_index=0)
