"""`python -m envs.babyai`: play in the terminal; `--write-ids` writes the id lists again."""

from envs.babyai.env import BabyAI
from envs.babyai.splits import write_ids
from envs.common import command_line

if __name__ == "__main__":
    command_line(BabyAI, "babyai", task_index=0, write_ids=write_ids)
