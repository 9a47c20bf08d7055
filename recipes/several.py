"""Two environments in one run: TextCraft's goals of depth 1 and the laboratory's mazes.

    python train.py --config recipes/several.json --tasks-per-step 16
                    --env recipes.several:Craft recipes.several:Maze

The model, recipes/starts/tiny-several, has 3M parameters and has imitated a careless teacher in
both environments. `--normalize-per-env` whitens advantages within each environment. To train in
only one environment, use `--env recipes.several:Craft --tasks-per-step 8`.

RL does not train on the held-out crafting goals and mazes (recipes/ids). Result: RESULTS.md.
"""

from pathlib import Path
from typing import ClassVar

from envs.babyai.env import BabyAI
from envs.textcraft.env import TextCraft
from recipes.common import read_json

FOLDER = Path(__file__).resolve().parent


class Craft(TextCraft):
    """TextCraft with the short prompt of the model's demonstrations."""

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
