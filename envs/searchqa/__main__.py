"""`python -m envs.searchqa`: play in the terminal; `--write-questions` and `--write-ids` write our
questions and the id lists again, which is wanted in this order."""

from envs.common import command_line
from envs.searchqa.env import SearchQA
from envs.searchqa.questions import FIRST_OWN
from envs.searchqa.splits import write_ids


def write_questions() -> dict[str, int]:
    """Needs the corpus; asking and reading questions does not."""
    from envs.searchqa import generate, questions

    written = generate.write_questions()
    questions.forget()  # --write-ids comes after it, in the same process
    return written


if __name__ == "__main__":
    command_line(
        SearchQA,
        "searchqa",
        task_index=FIRST_OWN,
        write_questions=write_questions,
        write_ids=write_ids,
    )
