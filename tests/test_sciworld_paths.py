"""Retelling a solution, against a small world: two rooms, names that must be met before use."""

import pytest

from envs.sciworld.oracle import LOOK, as_shown, by_teleport, names, renamed, retell, things_of

OUTSIDE = (
    "Here you see: \n\ta baby mouse\n\ta parrot egg\n\ta cup (containing a substance called tea)"
)
GOLD = ["open door to outside", "go to outside", "focus on baby baby mouse", "wait1"]


class World:
    """`takes` maps what may be said to the score that it gives; the rest is not understood."""

    def __init__(self, takes, completed_at=100):
        self.takes, self.completed_at = takes, completed_at
        self.games: list[list[str]] = []

    def start(self):
        self.games.append([])
        return "Find the mouse outside.\nHere you see: \n\ta jug", self.play

    def play(self, action):
        self.games[-1].append(action)
        if action == LOOK:
            return OUTSIDE, 0, False
        if action.startswith(("open door to", "go to", "teleport to")):
            return "You move.", 0, False
        answer = self.takes.get(action, "No known action matches that input.")
        score = answer if isinstance(answer, int) else 0
        return (answer if isinstance(answer, str) else "Done."), score, score >= self.completed_at


def test_it_looks_before_the_first_thing_unseen_and_calls_it_what_was_shown():
    world = World({"focus on baby mouse": 100})
    told = retell(GOLD, world.start, at_most=10)
    assert told == [*GOLD[:2], LOOK, "focus on baby mouse"]  # and ends when the task is done
    assert len(world.games) == 1


def test_it_does_not_look_for_what_has_been_named_nor_twice_in_a_room():
    gold = ["pick up jug", "go to outside", "focus on baby baby mouse", "focus on unicorn"]
    takes = {"pick up jug": 10, "focus on baby mouse": 50, "focus on unicorn": 100}
    told = retell(gold, World(takes).start, at_most=10)
    expected = ["pick up jug", "go to outside", LOOK, "focus on baby mouse", "focus on unicorn"]
    assert told == expected


@pytest.mark.parametrize(
    "answer", ["No known action matches that input.", "Ambiguous request: 0", -100]
)
def test_a_shown_name_that_is_not_taken_or_fails_the_task_is_given_up(answer):
    world = World({"focus on baby mouse": answer, "focus on baby baby mouse": 100})
    told = retell(GOLD, world.start, at_most=10)
    assert told == [*GOLD[:2], LOOK, "focus on baby baby mouse"]
    assert len(world.games) == 2  # the task was begun anew


def test_names_stay_where_the_gold_path_answers_which_one_is_meant():
    gold = [*GOLD[:3], "0"]
    takes = {"focus on baby baby mouse": "Ambiguous request: 0 or 1?", "0": 100}
    told = retell(gold, World(takes).start, at_most=10)
    assert told == [*GOLD[:2], LOOK, "focus on baby baby mouse", "0"]


def test_the_gold_path_stays_if_the_retold_one_does_not_win_or_is_too_long():
    assert retell(GOLD, World({"focus on baby mouse": 99}).start, at_most=10) == GOLD
    assert retell(GOLD, World({"focus on baby mouse": 100}).start, at_most=3) == GOLD


def test_a_way_is_told_as_one_action_where_that_is_possible():
    takes = {"focus on baby mouse": 100}
    told = retell(GOLD, World(takes).start, at_most=10, can_teleport=True)
    assert told == ["teleport to outside", LOOK, "focus on baby mouse"]
    assert retell(GOLD, World(takes).start, at_most=10)[:2] == GOLD[:2]


def test_the_doors_stay_if_teleporting_does_not_lead_to_the_goal():
    class Doors(World):
        """Here the mouse is seen only by those who came through the door."""

        def play(self, action):
            came = any(played.startswith("go to ") for played in self.games[-1])
            self.takes = {"focus on baby mouse": 100 if came else 20}
            return super().play(action)

    world = Doors({})
    told = retell(GOLD, world.start, at_most=10, can_teleport=True)
    assert told == [*GOLD[:2], LOOK, "focus on baby mouse"] and len(world.games) == 2


def test_each_way_is_one_teleport_and_all_else_stays():
    path = ["open door to a", "go to a", "open door to b", "go to b", LOOK, "go to a", "open box"]
    assert by_teleport(path) == ["teleport to b", LOOK, "teleport to a", "open box"]
    assert by_teleport(["open door to a", "wait1"]) == ["open door to a", "wait1"]
    assert by_teleport([]) == []


def test_names_are_read_off_a_room():
    room = (
        "This room is called the kitchen. In it, you see: \n\tthe agent\n\ta sink, which is off. "
        "In the sink is: nothing.\n\ta flower pot 2 (containing a cherry tree in the adult stage, "
        "soil)\n\ta substance called soap\n\tan orange box (containing nothing)\n"
        "\ta thermometer, currently reading a temperature of 10 degrees celsius"
    )
    expected = {"agent", "sink", "flower pot 2", "cherry tree", "soap", "orange box", "thermometer"}
    assert expected <= names(room)


@pytest.mark.parametrize(
    ("name", "shown", "expected"),
    [
        ("mouse", {"mouse", "baby mouse"}, "mouse"),
        ("baby baby mouse", {"baby mouse"}, "baby mouse"),
        ("adult cherry tree", {"cherry tree"}, "cherry tree"),
        ("crocodile", {"crocodile egg", "cup"}, "crocodile egg"),
        ("egg parrot", {"parrot egg"}, "parrot egg"),
        ("egg parrot egg in inventory", {"parrot egg"}, "parrot egg"),
        (
            "flower pot 6 containing pea plant and soil in inventory",
            {"flower pot 6"},
            "flower pot 6",
        ),
        ("cup", {"glass cup", "paper cup"}, None),  # which one?
        ("cat", {"caterpillar"}, None),
    ],
)
def test_a_name_of_the_simulator_and_the_one_shown(name, shown, expected):
    assert as_shown(name, shown) == expected


def test_what_an_action_is_done_to():
    assert things_of("move egg in inventory to red box") == ["egg in inventory", "red box"]
    assert things_of("pick up jug") == ["jug"]
    for action in ("open door to kitchen", "go to kitchen", "wait1", "0", LOOK, "inventory"):
        assert things_of(action) == [] and renamed(action, {}) == action
    assert renamed("use lighter on cup", {"cup": "glass cup"}) == "use lighter on glass cup"
