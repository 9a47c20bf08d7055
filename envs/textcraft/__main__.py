"""`python -m envs.textcraft`: play in the terminal; `--write-ids` writes the id lists again."""

from envs.common import command_line
from envs.textcraft.env import TextCraft
from envs.textcraft.splits import write_ids

if __name__ == "__main__":
    command_line(TextCraft, "textcraft", task_index=140, write_ids=write_ids)
