"""data.py: what others have collected, what a run has sampled, and what an oracle shows."""

import json
from pathlib import Path

import pytest
from fakes import FakePool, ScriptedEngine
from toy_env import NAME, Letters, registered, serve

import data
from chat import ChatTemplate
from data import (
    Manner,
    candidates,
    demonstrate,
    demonstrations,
    encode,
    has_exact_ids,
    play_demonstrations,
    read_records,
    return_of,
    to_agenttraj,
)
from envclient import NotSupported, StepOutsideEpisode, StepResult, connect, local_server
from envs import OracleLost, load_tasks
from envs.common import action_line
from envs.textcraft.env import TextCraft
from models import load_tokenizer
from rollout import RolloutRequest, RolloutSettings, collect
from scale.default_models import resolve_model
from trajectory import RolloutHandler

PROMPT = [{"role": "system", "content": "You are to craft."}]


@pytest.fixture(scope="module")
def chat():
    return ChatTemplate(load_tokenizer(resolve_model("tiny")))


@pytest.fixture(autouse=True)
def own_cache(request, monkeypatch, tmp_path):
    if "chat" not in request.fixturenames:
        monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))


def said(number):
    """Messages of an episode of two turns."""
    texts = (f"Goal {number}.", "Action: look", "You see a log.", "Action: get 1 oak log")
    roles = ("user", "assistant") * 2
    return PROMPT + [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


RECORDS = [to_agenttraj(f"textcraft_{n}", said(n)) for n in range(7)]
GOOD = json.dumps(RECORDS[0])


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def lines_of(records):
    return "\n".join(map(json.dumps, records))


def read(*paths, **options):
    return list(read_records(paths, **options))


# --- Files ----------------------------------------------------------------------------------------

FORMS = {
    "a list": json.dumps,
    "a list, indented, between blanks": lambda records: f"\n {json.dumps(records, indent=2)}\n ",
    "a line each, and empty ones": lambda records: "\n\n".join(map(json.dumps, records)) + "\n\n",
    "with a byte-order mark": lambda records: "\ufeff" + json.dumps(records),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_holds_the_same(tmp_path, form):
    assert read(written(tmp_path / "a.json", FORMS[form](RECORDS))) == RECORDS
    assert read(written(tmp_path / "a.json", FORMS[form]([]))) == []


def test_messages_are_learned_unless_they_have_weight_0(tmp_path):
    messages = said(3)
    messages[2]["weight"] = 0
    file = written(tmp_path / "a.jsonl", lines_of([{"messages": said(1)}, {"messages": messages}]))
    first, second = read(file)
    assert [t["loss"] for t in first["conversations"]] == [False, False, True, False, True]
    assert [t["loss"] for t in second["conversations"]] == [False, False, False, False, True]


def test_a_record_without_an_id_is_a_task_of_its_own(tmp_path):
    """Also where a list stands on one line, and where shards in two folders have one name."""
    shards = [tmp_path / name / "train.json" for name in ("a", "b")]
    for shard in shards:
        shard.parent.mkdir()
        shard.write_text(json.dumps([{"messages": said(1)}] * 2))
    assert [r["item_id"] for r in read(shards[0])] == ["train.json:1", "train.json:2"]
    both = [r["item_id"] for r in read(*shards)]
    assert both == [f"{shard}:{place}" for shard in shards for place in (1, 2)]


def test_ids_seeds_and_returns_of_other_formats_are_kept(tmp_path):
    turns = RECORDS[0]["conversations"]
    records = [
        {"messages": said(1), "id": 7, "seed": 3, "return": 0.5},
        {"id": "x", "item_id": None, "conversations": turns},
        {"id": "x", "item_id": "y", "conversations": turns, "reward": 0},  # AgentGym's name
    ]
    found = read(written(tmp_path / "a.jsonl", lines_of(records)))
    assert [record["item_id"] for record in found] == ["7", "x", "y"]
    assert (found[0]["seed"], [return_of(r) for r in found]) == (3, [0.5, None, 0.0])


def test_records_are_chosen_by_their_returns(tmp_path):
    records = [
        RECORDS[0] | {"return": 1},
        RECORDS[1] | {"return": 0.25},
        {"messages": said(2), "return": 1 - 1e-12},  # a sum of increments
        RECORDS[3] | {"reward": 0.0},
    ]
    file = written(tmp_path / "a.jsonl", lines_of(records))
    assert len(read(file)) == 4
    assert [r["item_id"] for r in read(file, min_return=1.0)] == ["textcraft_0", "a.jsonl:3"]
    written(file, lines_of([*records, RECORDS[4]]))
    with pytest.raises(ValueError, match="line 5: --min-return needs a return in each record"):
        read(file, min_return=0.0)


def test_records_without_a_return_stay_as_they_are_byte_for_byte(tmp_path):
    """Warm starts are kept under the hash of their demonstrations."""
    text = json.dumps(RECORDS)
    assert json.dumps(read(written(tmp_path / "a.json", text))) == text


def with_turns(*turns, **more):
    turns = [dict(zip(("from", "loss", "value"), turn)) for turn in turns]
    return {"item_id": "x", "conversations": turns} | more


def with_ids(ids):
    record = with_turns(("human", None, "a"), ("gpt", True, "b"))
    record["conversations"][1]["ids"] = ids
    return record


OK = (("human", None, "a"), ("gpt", True, "b"))
WRONG = {
    "broken JSON": ('{"item_id": ', "not JSON"),
    "nested without end": ('{"a": ' + "[" * 100_000, "not JSON"),
    "a number of 5,000 digits": ('{"a": ' + "1" * 5000 + "}", "not JSON"),
    "no object": ("3", "'3': expected"),
    "another object": ('{"prompt": 1, "text": 2}', "['prompt', 'text']: expected"),
    "an unknown role": ('{"messages": [{"role": ["tool"]}]}', "message 0 has role ['tool']"),
    "an unknown speaker": (with_turns(({}, None, "a")), "conversation x: turn 0 must be from"),
    "a message without text": ('{"messages": [{"role": "user"}]}', "turn 0 must be from"),
    "a text in parts": (with_turns(("human", None, ["a"])), "join the texts of its parts"),
    "roles in conversations": ({"conversations": [{"role": "user"}]}, 'is named "messages"'),
    "an empty conversation": (with_turns(), "conversation x is empty"),
    "turns that do not alternate": (
        with_turns(*OK, ("gpt", True, "c")),
        "turn 2 is from gpt, expected human",
    ),
    "no turn with loss": (with_turns(("human", None, "a"), ("gpt", None, "b")), "no gpt turn"),
    "loss that is not marked": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "a"}]},
        'mark the turns to learn with "loss": true',
    ),
    "nothing before": (with_turns(("gpt", True, "a")), "no observation before"),
    "half a surrogate pair": (with_turns(("human", None, "\ud83d")), "half of a surrogate pair"),
    "half a trajectory": ('{"trajectory_id": "1", "turns": [1]}', "not a line of a run's"),
    **{
        f"ids {ids}": (with_ids(ids), "turn 1 has ids that are not a list of token ids")
        for ids in (["a"], [-1], 7, [True])
    },
    **{
        f"a return of {total}": (with_turns(*OK, **{"return": total}), '"return" is')
        for total in ("1", None, True, float("nan"), 10**400)
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_place(tmp_path, case):
    content, message = WRONG[case]
    text = content if isinstance(content, str) else json.dumps(content)
    file = written(tmp_path / "a.jsonl", f"{GOOD}\n{text}\n{GOOD}")
    with pytest.raises(ValueError) as error:
        read(file)
    problem = str(error.value)
    assert problem.startswith(f"{file}, line 2") and message in problem and "\n" not in problem
    if not isinstance(content, str):
        with pytest.raises(ValueError, match="item 2: "):
            read(written(file, f"[{GOOD}, {text}]"))


def test_what_cannot_be_asked_of_a_file_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"a.json, line 2 is not JSON"):
        read(written(tmp_path / "a.json", f"[{GOOD},\n{GOOD}"))
    with pytest.raises(ValueError, match="is it a run?"):
        read(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read(tmp_path / "b.jsonl")


# --- What a run has sampled (trap 6) --------------------------------------------------------------


def sampled(chat, number, reward, stop="success"):
    """A trajectory whose actions were sampled letter by letter: no tokenizer encodes them so."""
    handler = RolloutHandler(f"{number}", 1, "textcraft", f"textcraft_{number}", "", 0, 0, 2)
    _, opening, *turns = said(number)
    handler.start(chat, PROMPT, opening["content"])
    for turn in turns:
        if turn["role"] == "user":
            handler.add_observation(chat, turn["content"])
            continue
        ids = [i for letter in turn["content"] for i in chat.plain(letter)] + [chat.end_of_turn]
        handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.turns[-1].reward = reward
    handler.stop(stop)
    return handler


def run_of(path, *steps):
    for step, handlers in enumerate(steps, start=1):
        file = path / "trajectories" / f"step_{step:06d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        written(file, "".join(each.to_json() for each in handlers))
    return path


def test_what_a_policy_sampled_comes_back_with_the_very_ids(tmp_path, chat):
    handler = sampled(chat, 1, 1.0)
    (record,) = read(run_of(tmp_path / "run", [handler]))
    assert record == data.record_of(handler)
    assert (record["item_id"], record["return"], record["seed"]) == ("textcraft_1", 1.0, 0)
    example = encode(chat, record)
    again = example.trajectory
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.messages == handler.messages and not data.was_encoded_again(example)
    assert read(written(tmp_path / "kept.json", json.dumps([record]))) == [record]
    for turn in record["conversations"]:
        if "ids" in turn:
            turn["ids"] = chat.action("Other")
    other = encode(chat, record)
    assert len(other.trajectory.input_ids) < len(handler.input_ids)
    assert data.was_encoded_again(other)


@pytest.mark.parametrize(
    ("ids", "is_exact"), [("Action: look", True), ("Other", False), ([10**9], False), ([], False)]
)
def test_ids_are_taken_where_this_tokenizer_reads_them_as_the_text(chat, ids, is_exact):
    ids = chat.action(ids) if isinstance(ids, str) else ids
    turn = {"from": "gpt", "loss": True, "value": "Action: look", "ids": ids}
    assert has_exact_ids(chat, turn) == is_exact


def test_of_a_run_only_what_ended_earned_enough_and_was_trained_on(tmp_path, chat):
    second = sampled(chat, 2, 0.25, "failure")
    second.turns[0].reward = 0.1
    path = run_of(
        tmp_path / "run",
        [sampled(chat, 1, 1.0), second],
        [sampled(chat, 3, 1.0, "env_error"), sampled(chat, 4, 0.5)],
    )
    held_out = path / "trajectories" / "eval_000002.jsonl"
    written(held_out, sampled(chat, 5, 1.0).to_json())
    records = read(path)
    assert [r["item_id"] for r in records] == ["textcraft_1", "textcraft_2", "textcraft_4"]
    assert [r["return"] for r in records] == [1.0, 0.35, 0.5]
    assert [r["item_id"] for r in read(path, min_return=0.5)] == ["textcraft_1", "textcraft_4"]
    assert [r["item_id"] for r in read(held_out)] == ["textcraft_5"]  # asked for by name


@pytest.mark.parametrize(
    "damage", [{"messages": None}, {"input_ids": 5}, {"turns": 5}, {"turns": [5]}]
)
def test_a_damaged_line_of_a_run_is_named(tmp_path, chat, damage):
    line = json.loads(sampled(chat, 1, 1.0).to_json()) | damage
    with pytest.raises(ValueError, match="line 1: not a line of a run's trajectories"):
        read(written(tmp_path / "a.jsonl", json.dumps(line)))


def test_an_action_that_a_limit_cut_does_not_teach_to_stop_there(tmp_path, chat):
    handler = RolloutHandler("1", 1, "textcraft", "textcraft_1", "", 0, 0, 2)
    handler.start(chat, PROMPT, "Goal.")
    ids = chat.action("Action: get 1")[:-1]
    handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.stop("max_rounds")
    again = encode(chat, read(run_of(tmp_path / "run", [handler]))[0]).trajectory
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.loss_mask[-1] == 0


# --- One path for sampling and for demonstrations (traps 6 and 8) ---------------------------------


@pytest.fixture(scope="module")
def shown():
    return play_demonstrations("textcraft", load_tasks("textcraft", "train"), 8, 0)


def actions_of(record):
    return [turn["value"] for turn in record["conversations"] if turn["from"] == "gpt"]


def test_a_demonstration_is_encoded_exactly_as_the_same_episode_is_when_sampled(chat, shown):
    record = max(shown, key=lambda r: len(actions_of(r)))
    task = next(t for t in load_tasks("textcraft", "train") if t.task_id == record["item_id"])
    world, script = TextCraft(), iter(actions_of(record))

    def play(task_index, turn, text):
        return StepResult(*world.step(world.parse(text)))

    class Pool(FakePool):
        env = "textcraft"

        def client(self, avoid=()):
            client = super().client(avoid)
            client.prompt = TextCraft.PROMPT
            return client

    pool = Pool(play, on_reset=lambda index: world.reset(index, seed=0))
    engine = ScriptedEngine(lambda name, prompt: chat.action(next(script)))
    request = RolloutRequest(task, group_id=0, sample=0, seed=0, step=1, max_rounds=50)
    settings = RolloutSettings(max_tokens_per_turn=200, max_trajectory_tokens=4000)
    (sampled,) = collect(engine, pool, chat, [request], settings)
    handler = encode(chat, record).trajectory
    assert sampled.success and len(handler.turns) > 3
    assert handler.input_ids == sampled.input_ids
    assert handler.loss_mask == sampled.loss_mask
    assert handler.messages == sampled.messages
    assert to_agenttraj(handler.task_id, handler.messages) == record


def test_the_loss_is_on_the_actions_with_their_end_of_turn_and_on_nothing_else(chat, shown):
    for record in shown:
        handler = encode(chat, record).trajectory
        learned = [i for i, mask in zip(handler.input_ids, handler.loss_mask, strict=True) if mask]
        assert learned == [i for text in actions_of(record) for i in chat.action(text)]
        assert learned.count(chat.end_of_turn) == len(actions_of(record))


def test_a_turn_without_loss_stays_in_the_sequence_and_out_of_the_loss(chat, shown):
    record = json.loads(json.dumps(max(shown, key=lambda r: len(actions_of(r)))))
    whole = encode(chat, record).trajectory
    gpt = [turn for turn in record["conversations"] if turn["from"] == "gpt"]
    gpt[1]["loss"] = False
    partial = encode(chat, record).trajectory
    start, end = whole.turns[1].action_span
    assert partial.input_ids == whole.input_ids
    assert not any(partial.loss_mask[start:end])
    assert partial.loss_mask[:start] + partial.loss_mask[end:] == (
        whole.loss_mask[:start] + whole.loss_mask[end:]
    )


def test_agentgyms_opening_by_human_and_gpt_is_prompt_and_not_learned(chat):
    record = with_turns(
        ("human", None, "You are to craft."),
        ("gpt", False, "OK."),
        ("human", None, "Goal: craft stick."),
        ("gpt", True, "Action: get 1 stick"),
        ("human", None, "Got 1 stick"),
    )
    example = encode(chat, record)
    handler = example.trajectory
    assert [m["role"] for m in handler.messages] == ["user", "assistant", "user", "assistant"]
    assert [t.action_text for t in handler.turns] == ["Action: get 1 stick"]
    assert sum(handler.loss_mask) == len(chat.action("Action: get 1 stick"))
    opening, turns = example.parts
    assert [who for who, _ in opening] == ["human", "gpt", "human"]
    assert turns == (("gpt", "Action: get 1 stick"),)


# --- Oracles --------------------------------------------------------------------------------------


class Told(Letters):
    """Letters that are told by an action line, as an oracle's are."""

    parse = staticmethod(action_line)


def letters(count, urls, seed=0):
    return demonstrations(NAME, load_tasks(NAME), count, seed, urls)


def numbers_of(records):
    return [int(record["item_id"].rpartition("_")[2]) for record in records]


def test_an_oracle_is_asked_once_and_its_demonstrations_are_kept(tmp_path):
    with serve(Told) as url:
        first = letters(5, [url])
    with registered(Told):  # no server is left: what comes now comes from the disk
        assert letters(5, [url]) == first
    assert len(first) == 5
    (file,) = (tmp_path / "cache/demonstrations").rglob("agenttraj.json")
    assert read(file) == first
    assert actions_of(first[0]) == ["Thought: a is in the first half.\nAction: abc"] * 2


def test_other_tasks_counts_seeds_or_sources_are_played_anew(monkeypatch):
    played = []
    monkeypatch.setattr(
        data, "play_demonstrations", lambda *given: played.append(given) or [RECORDS[0]]
    )
    with registered():
        tasks = load_tasks(NAME)
        for given in (
            (tasks, 5, 0),
            (tasks, 5, 0),
            (tasks[1:], 5, 0),
            (tasks, 6, 0),
            (tasks, 5, 1),
        ):
            demonstrations(NAME, *given)
        assert len(played) == 4
        monkeypatch.setattr(data, "source_of", lambda env: "changed")
        demonstrations(NAME, tasks, 5, 0)
    assert len(played) == 5


def test_the_source_of_an_environment_is_all_its_files(monkeypatch):
    """Demonstrations of questions that were written anew are other ones."""
    hashes = {data.source_of("searchqa"), data.source_of("searchqa"), data.source_of("textcraft")}
    read_bytes, lines = Path.read_bytes, "questions.jsonl"
    monkeypatch.setattr(Path, "read_bytes", lambda p: b"" if p.name == lines else read_bytes(p))
    assert len(hashes | {data.source_of("searchqa")}) == 3


def test_an_oracle_that_needs_too_long_demonstrates_nothing():
    deep = next(task for task in load_tasks("textcraft", "train") if task.subtask == "depth 4")
    with local_server("textcraft") as url, connect("textcraft", url) as client:
        assert demonstrate(client, deep, seed=0, max_turns=1) is None
        assert demonstrate(client, deep, seed=0) is not None


class Unlucky(Told):
    """The oracle fails at every task with an even number."""

    def oracle(self):
        return "", "abc" if self.task_index % 2 else "xyz"


def test_failures_are_left_out_and_made_up_for_and_an_oracle_that_always_fails_ends():
    with serve(Unlucky) as url:
        found = play_demonstrations(NAME, load_tasks(NAME), 4, 0, [url])
        assert [number % 2 for number in numbers_of(found)] == [1] * 4
        with pytest.raises(ValueError, match="solved none of 12"):
            demonstrations(NAME, load_tasks(NAME, subtasks=["even"]), 3, 0, [url])


def test_the_same_episode_is_not_shown_twice():
    with serve(Told) as url:  # eight tasks, and the seed changes nothing
        assert len(play_demonstrations(NAME, load_tasks(NAME), 12, 0, [url])) == 8


class Lost(Told):
    """The oracle knows no move in odd tasks."""

    def oracle(self):
        if self.task_index % 2:
            raise OracleLost("no move is known")
        return super().oracle()


def test_an_oracle_that_is_lost_costs_its_task_and_nothing_else():
    with serve(Lost) as url:
        found = play_demonstrations(NAME, load_tasks(NAME), 4, 0, [url])
        assert [number % 2 for number in numbers_of(found)] == [0] * 4
        client = connect(NAME, url)
        client.reset(1)
        with pytest.raises(StepOutsideEpisode, match="no move is known"):
            client.oracle()
        assert client.step("Action: abc").reward > 0  # the episode is as it was
        client.close()


def test_sub_tasks_take_turns_and_a_task_comes_again_with_the_next_seed():
    with registered():
        pairs = list(candidates(load_tasks(NAME), count=4, seed=7))
    assert [task.subtask for task, _ in pairs] == ["even", "odd"] * 8
    assert len({(task.task_index, seed) for task, seed in pairs}) == 16
    assert [seed for _, seed in pairs] == [7] * 8 + [8] * 8


def test_a_server_without_an_oracle_is_named_and_nothing_is_kept(tmp_path, monkeypatch):
    def no_oracle(client):
        raise NotSupported("GET /oracle: 404", "http://x")

    monkeypatch.setattr("envclient.EnvClient.oracle", no_oracle)
    with serve(Told) as url, pytest.raises(NotSupported, match="/oracle"):
        letters(2, [url])
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


# --- Wrong moves that are shown and not imitated --------------------------------------------------


def test_slips_are_right_later_or_were_right_before_and_are_not_imitated():
    tasks = load_tasks("textcraft", "short_train")
    clean = play_demonstrations("textcraft", tasks, 24, 0)
    slipped = play_demonstrations("textcraft", tasks, 24, 0, manner=Manner(slips=0.4))
    assert [record["item_id"] for record in slipped] == [record["item_id"] for record in clean]
    assert all(turn["loss"] is not False for record in clean for turn in record["conversations"])
    wrong = failed = 0
    for record, model in zip(slipped, clean, strict=True):
        turns = record["conversations"]
        for place, turn in enumerate(turns):
            if turn["from"] == "gpt" and not turn["loss"]:
                wrong += 1
                assert turn["value"] in actions_of(model)
                answer = turns[place + 1]["value"] if place + 1 < len(turns) else ""
                failed += answer.startswith("Could not")
    assert wrong > 20 and failed > 0.3 * wrong, (wrong, failed)
    again = demonstrations("textcraft", tasks, 24, 0, manner=Manner(slips=0.4))
    assert again == slipped, "the same slips every time"
    assert demonstrations("textcraft", tasks, 24, 0) == clean, "kept apart"


class Open(Told):
    """The oracle spells out both letters, but the last ones, at any time, solve it."""

    def oracle(self):
        return "", "abc" if self.turn == 0 else "def"

    def step(self, action):
        observation, reward, ended, truncated, info = super().step(action)
        if action == "def":
            self.turn, ended, info = self.NUM_TURNS, True, {"success": True, "score": 1.0}
        return observation, reward, ended, truncated, info


def test_a_slip_that_solves_the_task_is_not_a_demonstration():
    """Its only move would not be imitated: nothing to learn from, and the file unreadable."""
    with serve(Open) as url:
        found = demonstrations(NAME, load_tasks(NAME), 5, 0, [url], manner=Manner(slips=0.6))
    turns = [[t for t in record["conversations"] if t["from"] == "gpt"] for record in found]
    assert found and all(any(turn["loss"] for turn in each) for each in turns)
    assert any(not turn["loss"] for each in turns for turn in each), "some slip and go on"
