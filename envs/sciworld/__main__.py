"""`python -m envs.sciworld`: play in the terminal; `--write-ids` writes the id lists again."""

from envs.common import command_line
from envs.sciworld.env import SciWorld
from envs.sciworld.splits import write_ids

if __name__ == "__main__":
    command_line(SciWorld, "sciworld", task_index=2936, write_ids=write_ids)
