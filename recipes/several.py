"""Two environments in one run: TextCraft's goals of depth 1 and the laboratory's mazes.

The model is recipes/starts/tiny-several, 3M parameters, which has imitated a careless teacher in
both. `--normalize-per-env` whitens advantages within each environment; one of the two alone is
`--env recipes.several:Craft --tasks-per-step 8`.

    python train.py --config recipes/several.json --tasks-per-step 16
                    --env recipes.several:Craft recipes.several:Maze

Held-out goals are crafting goals and mazes that RL does not play (recipes/ids). RESULTS.md says
what came of it.
"""

from pathlib import Path
from typing import ClassVar

from envs.babyai.env import BabyAI
from envs.textcraft.env import TextCraft
from recipes.common import read_json

FOLDER = Path(__file__).resolve().parent


class Craft(TextCraft):
    """TextCraft with its teacher's short prompt."""

    NAME = "craft"
    ID_PREFIXES = ("textcraft",)
    PROMPT: ClassVar = read_json(FOLDER / "starts/tiny-careless/prompt.json")
    LAPTOP: ClassVar = {"rounds": (3,)}


class Maze(BabyAI):
    """BabyAI with the laboratory's prompt and goals."""

    NAME = "maze"
    ID_PREFIXES = ("babyai",)
    PROMPT: ClassVar = read_json(FOLDER / "laboratory/prompt.json")
    LAPTOP: ClassVar = {"rounds": (4,)}
