"""Several worlds in one run: whose turn it is, what is each one's own, what the log says of it."""

import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_env import flags, fresh_process_state, read_metrics, train_main

import agentevol
import warmstart
from advantages import reinforce_plus_plus, whiten_each
from config import (
    complete,
    evaluation_horizons,
    held_out_tasks,
    horizons_of,
    in_each,
    options,
    tasks_of,
)
from data import Manner, demonstrations_for
from envs import get_env, settings_of
from evaluate import settings_of_run
from reporting.plots import read_run
from rollout import draw, drawn
from run.worker import plan

WORLDS = """
from toy_env import Letters


class Near(Letters):
    "Letters of the first half, in two turns."

    NAME = "near"
    LAPTOP = {"tasks": "train", "eval_tasks": "test", "rounds": (2,), "group_size": 2}

    @staticmethod
    def say(thought, action):
        return action


class Far(Near):
    "Letters of the first quarter, in three turns, which pay a tenth."

    NAME = "far"
    NUM_TURNS = 3
    PROMPT = [{"role": "system", "content": "Write first letters."}]
    LAPTOP = {"tasks": "train", "eval_tasks": "test", "rounds": (3,), "group_size": 4}

    def reset(self, task_index, seed=0):
        self.earned = 0.0
        return super().reset(task_index, seed)

    def step(self, action):
        observation, _, ended, truncated, info = super().step(action)
        letters = [c for c in action if not c.isspace()]
        reward = sum(c in "abcdefg" for c in letters) / max(len(letters), 1) / self.NUM_TURNS
        self.earned += reward
        info["success"] = ended and self.earned >= 0.9
        return observation, 0.1 * reward, ended, truncated, info
"""
TWIN = """

class Twin(Near):
    ID_PREFIXES = ("near",)
    NAME = "twin"
"""
NAMES = ("mixed_worlds:Near", "mixed_worlds:Far")
LOCAL = ("near=local", "far=local")


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    """Two worlds outside the project, with their id lists; their names."""
    (tmp_path / "mixed_worlds.py").write_text(WORLDS)
    (tmp_path / "ids").mkdir()
    for name in ("near", "far"):
        for split, indices in (("train", range(5)), ("test", range(5, 8))):
            ids = [{"item_id": f"{name}_{index}"} for index in indices]
            (tmp_path / "ids" / f"{name}_{split}.json").write_text(json.dumps(ids))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "mixed_worlds", raising=False)
    return NAMES


def a_run(folder, **changes):
    return flags(
        **{
            "env": NAMES,
            "env_addr": LOCAL,
            "model": "tiny",
            "warm_start": "never",
            "engine": "transformers",
            "steps": 2,
            "tasks_per_step": 3,
            "env_weights": (2, 1),
            "max_tokens_per_turn": 4,
            "max_trajectory_tokens": 128,
            "eval_every": 0,
            "save_every": 1,
            "run_dir": str(folder),
        }
        | changes
    )


def played(folder, name):
    lines = (folder / "trajectories" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- Whose turn it is -----------------------------------------------------------------------------


@given(
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=3),
    per_turn=st.integers(1, 7),
    key=st.text(max_size=3),
)
def test_each_world_plays_all_its_tasks_before_one_comes_again(worlds, per_turn, key):
    """Against counters that walk from the first position to the last."""
    counts, weights = [count for count, _ in worlds], [weight for _, weight in worlds]
    taken = [pair for turn in range(1, 9) for pair in drawn(turn, counts, per_turn, key, weights)]
    assert len(taken) == 8 * per_turn
    for start in range(0, len(taken) - sum(weights) + 1, sum(weights)):
        dealt = Counter(world for world, _ in taken[start : start + sum(weights)])
        assert [dealt[world] for world in range(len(worlds))] == weights
    for world, count in enumerate(counts):
        own = [index for each, index in taken if each == world]
        for start in range(0, len(own) - count + 1, count):
            assert sorted(own[start : start + count]) == list(range(count))


def test_one_worlds_draws_do_not_depend_on_there_being_others():
    alone = [index for turn in range(1, 7) for _, index in drawn(turn, [5], 2, "0")]
    beside = [pair for turn in range(1, 7) for pair in drawn(turn, [5, 3], 4, "0", [1, 1])]
    assert [index for world, index in beside if world == 0] == alone


def test_a_request_has_the_horizon_of_its_world(worlds):
    config = options("+".join(worlds), env_addr=LOCAL)
    tasks = tasks_of(config)
    requests = draw(4, tasks, 6, 2, 0, 4, horizons_of(config), (2, 1))
    assert Counter(r.task.env for r in requests) == {"near": 8, "far": 4}
    assert {(r.task.env, r.max_rounds) for r in requests} == {("near", 2), ("far", 3)}
    assert requests == draw(4, tasks, 6, 2, 0, 4, horizons_of(config), (2, 1))


# --- What is each one's own -----------------------------------------------------------------------


def test_each_world_keeps_its_lists_and_horizon_and_shares_the_rest(worlds):
    config = options("+".join(worlds), env_addr=("far=local", "near=http://a:1", "near=http://b:1"))
    near, far = in_each(config)
    assert (near.rounds, far.rounds) == ((2,), (3,))
    assert (near.env_addr, far.env_addr) == (("http://a:1", "http://b:1"), ("local",))
    assert (near.tasks, near.eval_tasks) == ("train", "test")
    assert near.group_size == far.group_size == config.group_size == 4, "the largest"
    assert [t.task_id for t in tasks_of(config)][4:6] == ["near_4", "far_0"]
    assert Counter(t.env for t in held_out_tasks(config)) == {"near": 3, "far": 3}
    assert horizons_of(replace(config, rounds=(7,))) == {"near": 7, "far": 7}
    assert evaluation_horizons(replace(config, eval_rounds=9)) == {"near": 9, "far": 9}
    lines = plan(config, "runs/x", 10, 6)
    assert "at most 2 (mixed_worlds:Near) and 3 (mixed_worlds:Far) turns" in lines[0]


def test_a_world_alone_sees_its_options_unchanged():
    config = complete(options("textcraft"))
    assert in_each(config) == [config]
    address = replace(config, env_addr=("textcraft=http://a:1",))
    assert complete(address).env_addr == ("http://a:1",)


def test_two_worlds_that_call_a_task_the_same_are_refused(worlds, tmp_path):
    twin = (tmp_path / "mixed_worlds.py").read_text() + TWIN
    (tmp_path / "mixed_worlds.py").write_text(twin)
    shutil.copy(tmp_path / "ids" / "near_train.json", tmp_path / "ids" / "twin_train.json")
    both = options(f"{NAMES[0]}+mixed_worlds:Twin")
    with pytest.raises(ValueError, match="near and twin both have a task near_0;"):
        tasks_of(both)


def test_of_what_a_preset_leaves_open_the_other_worlds_number_holds(worlds, monkeypatch):
    own = {"eval_rounds": 4, **settings_of(NAMES[1]).laptop}
    monkeypatch.setattr(get_env(NAMES[1]), "LAPTOP", own)
    assert options("+".join(worlds)).eval_rounds == 4


def test_demonstrations_are_of_every_world_under_its_own_prompt(worlds):
    config = options("+".join(worlds), env_addr=LOCAL)
    shown = demonstrations_for(config, 4, seed=0)
    assert Counter(record["item_id"].partition("_")[0] for record in shown) == {"near": 4, "far": 4}
    prompts = {r["item_id"][:3]: r["conversations"][0]["value"] for r in shown}
    assert prompts == {"nea": "Write letters.", "far": "Write first letters."}


# --- A batch of several worlds --------------------------------------------------------------------


def test_whitening_each_world_leaves_none_louder_than_another():
    """Against a slow loop; and a world of one token, or of equal ones, says nothing."""
    torch.manual_seed(0)
    x, mask = torch.randn(7, 5, dtype=torch.float64), torch.rand(7, 5) < 0.6
    worlds = ["a", "b", "a", "c", "b", "d", "d"]
    x[1] *= 100
    x[3], mask[3] = torch.nan, False
    x[5:] = 3.0
    whitened = whiten_each(x.float(), mask, worlds)
    for world in "abcd":
        rows = [row for row, name in enumerate(worlds) if name == world]
        values = [float(x[row, t]) for row in rows for t in range(5) if mask[row, t]]
        got = [float(whitened[row, t]) for row in rows for t in range(5) if mask[row, t]]
        if len(set(values)) < 2:
            assert not any(got)
            continue
        mean = sum(values) / len(values)
        spread = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
        assert got == pytest.approx([(v - mean) / spread for v in values], abs=1e-5)
    assert not whitened[~mask].any()


def test_a_quiet_world_is_heard_where_each_is_whitened_by_itself():
    """REINFORCE++ whitens over the batch: a world of small returns counts for what it pays."""
    mask, rewards = torch.ones(4, 1), torch.tensor([[0.0], [1.0], [0.0], [0.01]])
    mixed, _ = reinforce_plus_plus(rewards, mask, gamma=1.0)
    apart = whiten_each(mixed, mask, ["loud", "loud", "quiet", "quiet"])
    assert mixed[3] - mixed[2] < 0.02 * (mixed[1] - mixed[0])
    assert apart[3] - apart[2] == pytest.approx(float(apart[1] - apart[0]), rel=1e-3)


# --- Whole runs -----------------------------------------------------------------------------------


def test_a_run_plays_measures_and_logs_every_world(worlds, tmp_path, capsys):
    folder = tmp_path / "run"
    argv = a_run(folder, eval_every=2, eval_samples=1, normalize_per_env=True)
    assert train_main(argv) == 0
    said = capsys.readouterr().out
    assert "held-out success in near" in said and "held-out success in far" in said
    lines = played(folder, "step_000001")
    shares = Counter(line["env"] for line in lines)
    assert shares == {NAMES[0]: 8, NAMES[1]: 4}, "two tasks and one, four samples each"
    assert {(line["env"], line["max_rounds"], len(line["turns"])) for line in lines} == {
        (NAMES[0], 2, 2),
        (NAMES[1], 3, 3),
    }
    systems = {line["env"]: line["messages"][0]["content"] for line in lines}
    assert systems == {NAMES[0]: "Write letters.", NAMES[1]: "Write first letters."}
    row = read_metrics(folder)[-1]
    for name in ("train/return_mean", "train/turns_mean"):
        assert row[f"{name}/near"] != row[f"{name}/far"]
    assert row["horizon/max_rounds"] == 3
    assert (row["horizon/max_rounds/near"], row["horizon/max_rounds/far"]) == (2, 3)
    assert row["eval/avg"] == pytest.approx(fmean([row["eval/avg/near"], row["eval/avg/far"]]))
    summary = json.loads((folder / "eval" / "step_000002.json").read_text())
    assert [row["items"] for row in summary["worlds"].values()] == [3, 3]
    drawn = read_run(folder)
    assert drawn.envs() == ["far", "near"]
    assert [step for step, _ in drawn.held_out_in("far")] == [0, 2]
    for name in NAMES:  # as they were trained on: each world's mean is 0
        own = [line for line in lines if line["env"] == name and line["used_in_loss"]]
        assert own and fmean(a for line in own for a in says(line)) == pytest.approx(0, abs=1e-3)


def says(line):
    """A trajectory's advantages at its policy tokens."""
    spans = [turn["action_span"] for turn in line["turns"]]
    return [line["advantages"][t] for start, end in spans for t in range(start, end)]


def test_a_run_that_is_stopped_goes_on_with_the_same(worlds, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, steps in ((whole, 4), (cut, 2)):
        words = a_run(folder, steps=steps, learning_rate_decay_steps=0, deterministic=True)
        assert train_main(without(words, "--engine")) == 0
    assert train_main(["--resume", "--run-dir", str(cut), "--steps", "4"]) == 0
    assert (whole / "metrics.jsonl").read_bytes() == (cut / "metrics.jsonl").read_bytes()


def without(words, flag):
    """A command line without an option and its one value."""
    at = words.index(flag)
    return [*words[:at], *words[at + 2 :]]


def test_a_run_of_several_worlds_is_evaluated_in_one_of_them(worlds, tmp_path):
    folder = tmp_path / "run"
    assert train_main(a_run(folder, steps=1)) == 0
    with pytest.raises(ValueError, match="name one, --env mixed_worlds:Near or mixed_worlds:Far"):
        settings_of_run(str(folder), set())
    own = settings_of_run(str(folder), {"env"}, NAMES[1])
    assert (own.env, own.max_rounds) == (NAMES[1], (3,))


def test_evolution_explores_every_world(worlds, tmp_path):
    words = a_run(
        tmp_path / "run",
        steps=2,
        iterations=1,
        tasks_per_iteration=3,
        group_size=2,
        num_demonstrations=2,
        min_return=0.001,
        keep_per_task=1,
    )
    with fresh_process_state():
        assert agentevol.command_line(without(words, "--tasks-per-step")) == 0
    file = tmp_path / "run" / "evolving" / "iteration_001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = Counter((line["origin"], line["item_id"].partition("_")[0]) for line in lines)
    assert {world for _, world in kept} == {"near", "far"} and len(kept) == 4, kept


@pytest.mark.long
def test_the_return_rises_in_both(worlds, tmp_path):
    """One pays a tenth of what the other does, for half of its letters."""
    folder = tmp_path / "run"
    argv = a_run(
        folder,
        steps=18,
        env_weights=(1, 1),
        tasks_per_step=4,
        group_size=8,
        max_tokens_per_turn=6,
        learning_rate=3e-3,
        learning_rate_decay_steps=0,
        save_every=1000,
        normalize_per_env=True,
    )
    assert train_main(argv) == 0
    rows = read_metrics(folder)
    for world, scale in (("near", 1.0), ("far", 0.1)):
        returns = [row[f"train/return_mean/{world}"] / scale for row in rows]
        assert fmean(returns[-5:]) - fmean(returns[:5]) > 0.1, (world, returns)


def test_a_warm_start_shows_each_world_in_the_manner_of_a_run_of_its_own(monkeypatch, tmp_path):
    """TextCraft's oracle as the start that comes with the project had it, BabyAI's as ever."""
    asked = {}

    def demonstrations(env, tasks, count, seed, urls, manner):
        asked[env] = manner
        return []

    monkeypatch.setattr("demonstrations.demonstrations", demonstrations)
    monkeypatch.setattr(warmstart, "resolve_model", lambda name: name)
    monkeypatch.setattr(warmstart, "warm_start", lambda model, env, show, *settings: show())
    config = complete(options("textcraft+babyai", model="smollm2-135m"))
    warmstart.start_model(config, accelerator=None)
    assert asked == {"textcraft": Manner(slips=0.3, thoughts=False), "babyai": Manner()}
