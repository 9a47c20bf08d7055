"""`python -m envs.searchqa`: play a task in the terminal."""

from envs.common import command_line
from envs.searchqa.env import SearchQA
from envs.searchqa.questions import FIRST_FACTBOOK

if __name__ == "__main__":
    command_line(SearchQA, "envs.searchqa", task_index=FIRST_FACTBOOK)
