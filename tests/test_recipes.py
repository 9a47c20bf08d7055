"""The recipes: what each arm runs, and the arithmetic of the reports on results made up by hand."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import toy_env

from config import Config, complete, horizons_of, tasks_of
from envs import load_tasks
from recipes import common, learns, learns_report, published, several, worlds
from train import requests_of
from warmstart import hash_of

GOALS = [f"textcraft_{n}" for n in range(10)]


def result(arm, seed, before, after, steps=20, test=None):
    """A result as `learns.py run` writes it, with these shares for ten goals."""

    def evaluation(step, shares):
        items = dict(zip(GOALS, shares, strict=False))
        mean = sum(items.values()) / len(items)
        return {"step": step, "items": items, "avg": {"value": mean, "low": 0.0, "high": 1.0}}

    held_out = [evaluation(0, before), evaluation(steps, after)]
    shown = {"arm": arm, "seed": seed, "steps": steps}
    return shown | {"held_out": held_out, "test": test or {}}


def write(folder, *results):
    for r in results:
        (folder / f"{r['arm']}-{r['seed']}.json").write_text(json.dumps(r))


# ------------------------------------------------------------------------------------------- arms


def test_arms_differ_in_nothing_but_what_they_are_named_after(tmp_path):
    rl = common.load_config(learns.arm_arguments("rl", 1, tmp_path))
    shuffled = common.load_config(learns.arm_arguments("shuffled", 1, tmp_path))
    differing = [name for name in vars(rl) if getattr(rl, name) != getattr(shuffled, name)]
    assert differing == ["shuffle_rewards"]
    assert shuffled.shuffle_rewards
    assert (rl.seed, rl.run_dir, rl.eval_every) == (1, str(tmp_path), 15)
    assert learns.arm_arguments("sft", 1, tmp_path) == learns.arm_arguments("rl", 1, tmp_path)


def test_an_episode_crafts_an_ingredient_if_it_crafts_before_or_without_the_goal():
    def episode(success, *observations, subtask="depth 2"):
        turns = [{"observation_text": text} for text in observations]
        return {"success": success, "subtask": subtask, "turns": turns}

    played = [
        episode(True, "Got 1 oak logs", "Crafted 4 minecraft:oak_planks", "Crafted 1 goal"),
        episode(True, "Got 4 oak planks", "Crafted 1 goal"),
        episode(False, "Crafted 4 minecraft:oak_planks"),
        episode(False, "Could not find oak planks"),
        episode(True, "Crafted 1 goal", subtask="depth 1"),
    ]
    assert published.crafted_ingredient(played) == {"depth 2": 2, "depth 1": 0}


def test_options_of_train_py_reach_every_arm_alike(tmp_path):
    for arm in learns.ARMS:
        arguments = learns.arm_arguments(arm, 0, tmp_path, ["--steps", "7"])
        assert common.load_config(arguments).steps == 7


@pytest.mark.parametrize("recipe", [learns, worlds])
def test_a_run_that_is_there_is_gone_on_with(tmp_path, monkeypatch, recipe):
    """A folder that holds a run is refused by train.py unless it is told to resume."""
    done = []
    name = "rl-3" if recipe is learns else "babyai-3"
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(recipe, "train", lambda words, run_dir, *more: done.append(more[0]))
    monkeypatch.setattr(recipe, "record", lambda run_dir, steps: {"steps": steps})
    monkeypatch.setattr(recipe, "write_result", lambda path, result: done.append(path.name))
    options = ["--runs", str(tmp_path), "--results", str(tmp_path), "--seed", "3"]
    own = ["--arm", "rl"] if recipe is learns else ["--env", "babyai"]
    assert recipe.main(["run", *options, *own, "--test-samples", "0", "--steps", "7"]) == 0
    assert done == [7, f"{name}.json"]


@pytest.mark.parametrize(
    ("method", "more", "steps"),
    [
        ("sft", [], 2 * 128 // 16),
        ("sft", ["--epochs", "3"], 3 * 128 // 16),
        ("sft", ["--data", "mine.jsonl", "--steps", "5"], 5),
        ("dpo", [], 18),
        ("agentevol", [], 12),
    ],
)
def test_the_default_run_of_a_method_is_its_own_programs(
    tmp_path, monkeypatch, method, more, steps
):
    done = []
    monkeypatch.setattr(common, "run", lambda words: done.append(words[1:]))
    monkeypatch.setattr(worlds, "record", lambda run_dir, steps: {"steps": steps})
    monkeypatch.setattr(worlds, "write_result", lambda *made: done.append(made))
    options = ["--runs", str(tmp_path), "--results", str(tmp_path), "--env", "textcraft"]
    (tmp_path / "mine.jsonl").touch()
    more = [word.replace("mine", str(tmp_path / "mine")) for word in more]
    assert worlds.main(["run", *options, "--method", method, *more]) == 0
    words, (path, result) = done
    assert words[0] == f"{method}.py" and words[-3] == str(steps) and "--epochs" not in words
    assert path == tmp_path / "worlds" / "methods" / f"{method}-textcraft-0.json"
    assert result == {"env": "textcraft", "seed": 0, "steps": steps, "method": method}


def test_steps_of_a_file_are_asked_for(tmp_path, capsys):
    """Nobody has counted its conversations yet."""
    (tmp_path / "mine.jsonl").touch()
    data = ["--data", str(tmp_path / "mine.jsonl"), "--runs", str(tmp_path)]
    assert worlds.main(["run", "--env", "textcraft", "--method", "sft", *data]) == 2
    assert "; give --steps" in capsys.readouterr().err


def test_an_unknown_arm_is_refused_with_the_names_that_exist(tmp_path):
    with pytest.raises(ValueError, match="--arm dpo is unknown; choose one of: rl sft shuffled"):
        learns.arm_arguments("dpo", 0, tmp_path)


def test_the_imitation_loss_has_the_gradient_of_the_policys_where_every_advantage_is_1():
    """What makes the sft arm comparable: the same learning rate and clipping mean the same."""
    import torch

    from losses import imitation_loss, policy_loss

    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.float32)
    log_probs = logits.log_softmax(-1)[..., 0] * mask
    count = float(mask.sum())
    surrogate = policy_loss(log_probs, log_probs.detach(), mask, mask, 0.2, count).loss
    (rl,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    imitated = imitation_loss(log_probs, mask, count)
    (ours,) = torch.autograd.grad(imitated, logits, retain_graph=True)
    (by_hand,) = torch.autograd.grad(-(log_probs * mask).sum() / count, logits)
    torch.testing.assert_close(ours, rl)
    torch.testing.assert_close(ours, by_hand)


class Shown(toy_env.Letters):
    """Letters whose oracle, which says what it thinks too, solves them."""

    @staticmethod
    def parse(model_text):
        return toy_env.Letters.parse(model_text.rpartition("Action:")[2])


def test_the_sft_arm_learns_from_demonstrations_and_goes_on_where_it_was(tmp_path, monkeypatch):
    import demonstrations

    monkeypatch.setattr(demonstrations, "cache_dir", lambda: tmp_path / "cache")
    with toy_env.serve(Shown) as url, toy_env.fresh_process_state():
        options = toy_env.options(tmp_path, url, eval_every=2, learning_rate=1e-3)
        config = complete(Config(**options))
        learns.train_sft(config)
        learns.train_sft(replace(config, steps=4, resume=True))
    rows = toy_env.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"]
    assert all(row["policy/optimizer_steps"] == 1 for row in rows)
    assert all(row["data/policy_tokens"] > 0 and row["policy/entropy"] > 0 for row in rows)
    kept = common.record(tmp_path / "run", 4)
    assert [evaluation["step"] for evaluation in kept["held_out"]] == [0, 2, 4]
    assert [point["step"] for point in kept["curve"]] == [1, 2, 3, 4]
    assert set(kept["curve"][0]) >= {"policy/loss", "policy/entropy", "policy/grad_norm"}


def test_the_sft_arm_is_run_for_each_learning_rate_and_the_better_one_stands(tmp_path, monkeypatch):
    shown = []
    ends = {"4e-05": 0.25, "0.0001": 0.75}

    def play(command):
        """What the inner process leaves behind."""
        config = learns.load_config(command[3:])
        shown.append(config)
        folder = Path(config.run_dir)
        (folder / "eval").mkdir(parents=True)
        about = {"config": {}, "command": "", "git_commit": "", "hardware": {}, "versions": {}}
        (folder / "config.json").write_text(json.dumps(about))
        for step, value in ((0, 0.5), (2, ends[f"{config.learning_rate:g}"])):
            avg = {"value": value, "low": 0.0, "high": 1.0}
            summary = {"step": step, "samples": 4, "overall": {"avg": avg, "pass": avg}}
            summary["items"] = {"textcraft_1": {"avg": value, "return_mean": value}}
            (folder / f"eval/step_{step:06d}.json").write_text(json.dumps(summary))

    monkeypatch.setattr(learns, "run", play)
    arguments = ["run", "--arm", "sft", "--steps", "2", "--test-samples", "0"]
    arguments += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    assert learns.main(arguments) == 0
    result = json.loads((tmp_path / "sft-0.json").read_text())
    assert result["chosen"] == "0.0001"
    assert {rate: avg["value"] for rate, avg in result["learning_rates"].items()} == ends
    assert result["held_out"][-1]["items"] == {"textcraft_1": 0.75}
    assert [config.on_collapse for config in shown] == ["off", "off"]


# ---------------------------------------------------------------------------------- report: learns


def test_seeds_are_averaged_within_a_goal_before_goals_are_resampled(tmp_path):
    write(
        tmp_path,
        result("rl", 0, [0.0] * 10, [1.0] * 10),
        result("rl", 1, [0.5] * 10, [0.5] * 10),
    )
    row = learns_report.analyse(learns_report.read_results(tmp_path))["arms"]["rl"]
    assert row["seeds"] == [0, 1]
    assert (row["before"]["value"], row["after"]["value"]) == (0.25, 0.75)
    assert row["difference"]["value"] == 0.5
    assert row["difference"]["items"] == 10
    assert row["per_seed"] == {"0": [0.0, 1.0], "1": [0.5, 0.5]}


def test_goals_that_one_seed_lost_are_left_out_of_the_pairing(tmp_path):
    short = result("rl", 1, [0.0] * 10, [1.0] * 10)
    del short["held_out"][1]["items"]["textcraft_3"]
    write(tmp_path, result("rl", 0, [0.0] * 10, [1.0] * 10), short)
    row = learns_report.analyse(learns_report.read_results(tmp_path))["arms"]["rl"]
    assert row["difference"]["items"] == 9


def test_a_gain_that_most_goals_share_is_certain_and_a_gain_of_one_goal_is_not():
    before = dict.fromkeys(GOALS, 0.25)
    most = common.difference(before, {g: 0.5 if n else 0.25 for n, g in enumerate(GOALS)})
    one = common.difference(before, {g: 0.25 if n else 1.0 for n, g in enumerate(GOALS)})
    assert most["low"] > 0
    assert one["value"] > 0
    assert one["low"] == 0


def test_rl_is_compared_with_each_control_after_training(tmp_path):
    write(
        tmp_path,
        result("rl", 0, [0.5] * 10, [0.9] * 10),
        result("rl", 1, [0.5] * 10, [0.1] * 10),  # which no control has: it counts on no side
        result("sft", 0, [0.5] * 10, [0.6] * 10),
        result("shuffled", 0, [0.5] * 10, [0.4] * 10),
    )
    against = learns_report.analyse(learns_report.read_results(tmp_path))["rl_minus"]
    assert {arm: round(d["value"], 6) for arm, d in against.items()} == {
        "sft": 0.3,
        "shuffled": 0.5,
    }


def test_the_report_names_every_run_that_is_missing_and_draws_what_is_there(tmp_path):
    write(
        tmp_path, result("rl", 0, [0.5] * 10, [0.9] * 10), result("sft", 2, [0.5] * 10, [0.6] * 10)
    )
    text = learns_report.report(tmp_path)
    assert "Not run: rl-1 rl-2 sft-0 sft-1 shuffled-0 shuffled-1 shuffled-2." in text
    assert "| rl | 0 | 10 | 50.0" in text
    assert "shuffled, after training" not in text
    assert (tmp_path / "learns.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["arms"]["rl"]["after"]["value"] == pytest.approx(0.9)
    assert learns_report.report(tmp_path) == text  # report.json is no result of a run


def test_the_published_split_is_reported_per_depth(tmp_path):
    ids = [task.task_id for task in load_tasks("textcraft", "test")]
    items = {task_id: float(n % 2) for n, task_id in enumerate(ids)}
    test = {"before": {"items": dict.fromkeys(items, 0.0)}, "after": {"items": items}}
    write(tmp_path, result("rl", 0, [0.5] * 10, [0.9] * 10, test=test))
    rows = learns_report.analyse(learns_report.read_results(tmp_path))["arms"]["rl"]["test"]
    sizes = {name: row["difference"]["items"] for name, row in rows.items()}
    assert sizes == {"depth 1": 31, "depth 2": 41, "depth 3": 25, "depth 4": 3, "all": 100}
    assert rows["all"]["difference"]["value"] == 0.5
    assert "| depth 4 | 3 |" in learns_report.report(tmp_path)


def test_runs_of_different_length_are_not_pooled(tmp_path):
    write(
        tmp_path,
        result("rl", 0, [0.5] * 10, [0.9] * 10, steps=60),
        result("rl", 1, [0.5] * 10, [0.9] * 10, steps=20),
    )
    with pytest.raises(ValueError, match=r"must not be pooled: steps 60 and 20"):
        learns_report.report(tmp_path)
    write(tmp_path, result("rl", 1, [0.5] * 10, [0.9] * 10, steps=60))
    write(tmp_path, result("sft", 1, [0.5] * 10, [0.9] * 10, steps=20))
    with pytest.raises(ValueError, match=r"mixes runs of \[20, 60\] steps; keep one length"):
        learns_report.report(tmp_path)


def test_runs_with_other_options_are_not_pooled_whatever_may_change_on_resume():
    first = {"steps": 5, "config": {"learning_rate": 1e-4, "seed": 0, "precision": "bf16"}}
    alike = {"steps": 5, "config": {"learning_rate": 1e-4, "seed": 1, "precision": "fp32"}}
    assert common.require_alike([first, alike]) == [first, alike]
    alike["config"]["learning_rate"] = 3e-4
    with pytest.raises(ValueError, match=r"not be pooled: learning_rate 0\.0001 and 0\.0003"):
        common.require_alike([first, alike])
    # What a file shows is not asked of the oracle: of how many it would be has no effect.
    shown = [{"steps": 5, "config": {"num_demonstrations": n, "data": ()}} for n in (128, 32)]
    with pytest.raises(ValueError, match="num_demonstrations 128 and 32"):
        common.require_alike(shown)
    for seed, each in enumerate(shown):
        each["config"]["data"] = (f"runs/own-{seed}-shown.json",)
    assert common.require_alike(shown) == shown


def test_a_run_is_gone_on_with_under_the_options_that_it_began_with_alone(tmp_path, monkeypatch):
    words = ["--env", "textcraft", "--model", "tiny", "--run-dir", str(tmp_path)]
    begun = common.planned(words)
    (tmp_path / "config.json").write_text(json.dumps({"config": vars(begun)}))
    ran = []
    monkeypatch.setattr(common, "run", ran.append)
    common.train(words, tmp_path, begun.steps)
    assert ran[0][-5:] == ["--resume", "--run-dir", str(tmp_path), "--steps", str(begun.steps)]
    monkeypatch.setattr(common, "steps_done", lambda _: begun.steps)  # complete: as strict
    common.train([*words, "--precision", "fp32"], tmp_path, begun.steps)
    with pytest.raises(ValueError, match=r"was begun with --learning-rate 4e-05: give the same"):
        common.train([*words, "--learning-rate", "1e-3"], tmp_path, begun.steps)
    assert len(ran) == 1


def test_lines_are_those_of_the_file_and_not_of_what_a_model_wrote(tmp_path):
    said = {"text": "one \u2028 two \x85 three"}
    (tmp_path / "step.jsonl").write_text(json.dumps(said, ensure_ascii=False) + "\n")
    assert common.read_lines(tmp_path / "step.jsonl") == [said]


def test_a_test_list_is_played_again_for_another_checkpoint_or_number_of_samples(
    tmp_path, monkeypatch
):
    played = []

    def play(command):
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        row = {"items": 1, "avg": {"value": 0.5}, "turns_mean": 1.0}
        about = {"overall": row, "subtasks": {}, "items": {}}
        (out / "eval.json").write_text(json.dumps(about))
        (out / "config.json").write_text(json.dumps({"command": command[1:]}))
        played.append(command)

    monkeypatch.setattr(published, "run", play)
    for model, samples in (("a", 1), ("a", 1), ("b", 1), ("b", 4), ("b", 4)):
        kept = published.evaluate_test_split("searchqa", model, tmp_path / "test", 0, samples)
        assert kept["samples"] == samples
    assert len(played) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["test"]


def test_a_report_without_results_says_what_to_run(tmp_path, capsys):
    assert learns.main(["report", "--results", str(tmp_path)]) == 2
    assert "run: python recipes/learns.py run --arm rl --seed 0" in capsys.readouterr().err


def test_evaluations_are_read_from_a_run_directory_in_order(tmp_path):
    (tmp_path / "eval").mkdir()
    avg = {"value": 0.5, "low": 0.2, "high": 0.8}
    for step in (10, 0):
        items = {"textcraft_1": {"avg": step / 20, "return_mean": step / 40}}
        summary = {"step": step, "samples": 4, "overall": {"avg": avg, "pass": avg}, "items": items}
        (tmp_path / f"eval/step_{step:06d}.json").write_text(json.dumps(summary))
    found = common.read_evaluations(tmp_path)
    assert [(e["step"], e["items"], e["returns"]) for e in found] == [
        (0, {"textcraft_1": 0.0}, {"textcraft_1": 0.0}),
        (10, {"textcraft_1": 0.5}, {"textcraft_1": 0.25}),
    ]


# ------------------------------------------------------------------------------------ other worlds


def write_world(folder, env, seed, before, after, steps=20):
    """A result as `worlds.py run` writes it, for the first tasks of the short test list."""
    file = f"envs/{env}/ids/{env}_simple_test.json"
    ids = [task.task_id for task in load_tasks(env, file=file)][: len(before)]
    made = result("rl", seed, before, after, steps)
    for evaluation in made["held_out"]:
        shares = evaluation["items"].values()
        evaluation["items"] = dict(zip(ids, shares, strict=True))
        evaluation["returns"] = {i: 0.8 * share + 0.2 for i, share in zip(ids, shares, strict=True)}
    made |= {"env": env, "config": {"eval_tasks": file}}
    (folder / "worlds").mkdir(exist_ok=True)
    (folder / "worlds" / f"{env}-{seed}.json").write_text(json.dumps(made))
    return ids


def test_other_worlds_are_reported_by_sub_task_with_seeds_pooled_by_task(tmp_path):
    before, after = [0.0, 0.5] * 5, [1.0, 0.5] * 5
    ids = write_world(tmp_path, "babyai", 0, before, after)
    write_world(tmp_path, "babyai", 1, before, before)
    lines = worlds.report(tmp_path).splitlines()
    assert (tmp_path / "worlds.png").stat().st_size > 5_000
    cells = [cell.strip() for cell in lines[-2].strip("|").split("|")]
    assert cells[:4] == ["babyai", "all", "0 1", "10"]
    assert cells[4].startswith("25.0 [")
    assert cells[5].startswith("50.0 [")
    assert cells[6].startswith("+25.0 [")
    subtasks = {task.task_id: task.subtask for task in load_tasks("babyai")[:4000]}
    returns = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert returns[:4] == ["babyai", "all: mean return", "0 1", "10"]
    assert returns[4].startswith("40.0 [") and returns[6].startswith("+20.0 [")
    counts = [line.split("|")[4].strip() for line in lines[2:-2]]
    assert sum(map(int, counts)) == 10
    assert len(counts) == len({subtasks[task_id] for task_id in ids})


def test_default_runs_of_the_other_methods_have_a_table_of_their_own(tmp_path):
    write_world(tmp_path, "babyai", 0, [0.0] * 10, [0.0] * 10)
    write_world(tmp_path / "worlds", "babyai", 0, [0.0, 0.5] * 5, [1.0, 0.5] * 5)
    (tmp_path / "worlds" / "worlds").rename(tmp_path / "worlds" / "methods")
    made = tmp_path / "worlds" / "methods" / "babyai-0.json"
    made.rename(made.with_name("dpo-babyai-0.json"))
    said = worlds.report(tmp_path)
    assert "\n| babyai | all | 0 | 10 | 0.0 [" in said
    assert "\n| `dpo.py --env babyai` | all | 0 | 20 | 10 | 25.0 [" in said


def test_runs_of_another_world_with_different_lengths_are_not_pooled(tmp_path):
    write_world(tmp_path, "babyai", 0, [0.0] * 5, [1.0] * 5)
    write_world(tmp_path, "babyai", 1, [0.0] * 5, [1.0] * 5, steps=30)
    with pytest.raises(ValueError, match=r"babyai: .* must not be pooled: steps 20 and 30"):
        worlds.report(tmp_path)


def test_a_report_on_other_worlds_without_results_says_what_to_run(tmp_path):
    with pytest.raises(ValueError, match=r"worlds.py run"):
        worlds.report(tmp_path)


# --- Two worlds in one run ------------------------------------------------------------------------


def test_the_lists_of_two_worlds_are_what_the_recipe_writes_and_share_no_goal(
    tmp_path, monkeypatch
):
    there = {path.name: path.read_text() for path in several.IDS.glob("*.json")}
    monkeypatch.setattr(several, "IDS", tmp_path)
    several.write_ids()
    assert {path.name: path.read_text() for path in tmp_path.glob("*.json")} == there
    for world in several.WORLDS:
        train, test = (json.loads(there[f"{world}_{side}.json"]) for side in ("train", "test"))
        assert not [each for each in test if each in train]


def test_every_arm_of_two_worlds_plays_eight_tasks_of_each_of_its_worlds_a_step(tmp_path):
    for arm, words in several.ARMS.items():
        base = ["--config", str(several.BASE), "--model", "tiny", *words]
        config = common.load_config([*base, "--run-dir", str(tmp_path / arm)])
        requests = requests_of(3, tasks_of(config), config, horizons_of(config))
        played = Counter(request.task.env for request in requests)
        assert set(played.values()) == {8 * config.group_size}
        assert set(played) == ({arm} if arm in several.WORLDS else set(several.WORLDS))
        assert config.mini_batch_size >= len(requests), "one optimizer step"


@pytest.mark.slow  # three minutes of play
def test_the_start_of_two_worlds_was_made_by_the_command():
    about = json.loads((common.ROOT / "recipes/starts/tiny-several/sft.json").read_text())
    shown, _ = several.demonstrate(several.CRAFTED, several.MAZES)
    assert about["records"] == hash_of(shown)
    assert json.loads(several.BASE.read_text())["model"] == "recipes/starts/tiny-several"


def test_what_the_page_says_of_two_worlds_is_what_their_runs_say():
    said = several.table(several.FOLDER)
    page = (common.ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert said in page

    def points(words):
        found = re.search(rf"{words}: ([+-][\d.]+) \(goals \[([+-][\d.]+), ([+-][\d.]+)\]", said)
        return found[1], float(found[2]) < 0 < float(found[3])

    alone, normal = (
        [points(f"{world}, {arm}") for world in several.WORLDS]
        for arm in ("mixed minus alone", "normalized minus mixed")
    )
    assert f"costs is {alone[0][0]} points in crafting and {alone[1][0]} in mazes" in page
    assert f"makes {normal[0][0]} and {normal[1][0]}, which one seed does not tell" in page
    assert all(has_0 for _, has_0 in alone + normal)
    mixed = json.loads((several.FOLDER / "mixed-0.json").read_text())
    goals = Counter(i.split("_")[0] for i in mixed["held_out"][-1]["solved_in"])
    assert f"The {goals['textcraft']} held-out crafting goals and {goals['babyai']} mazes" in page
    (craft,) = re.findall(r"\| craft \| mixed \|.*goals \[(-[\d.]+), ", said)
    assert -1 < float(craft) < 0, "barely"


def test_the_report_of_two_worlds_compares_each_with_itself_alone(tmp_path):
    for arm, craft, maze in (("mixed", 1, 0), ("craft", 0, None), ("maze", None, 1)):
        ended = {f"textcraft_{i}": [craft] for i in range(4) if craft is not None}
        ended |= {f"babyai_{i}": [maze] for i in range(4) if maze is not None}
        begun = {task_id: [int(arm == "craft")] for task_id in ended}
        held_out = [{"step": 0, "solved_in": begun}, {"step": 9, "solved_in": ended}]
        result = {"arm": arm, "seed": 0, "held_out": held_out}
        (tmp_path / f"{arm}-0.json").write_text(json.dumps(result))
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- miniature several -->\n<!-- end several -->\nb\n")
    text = several.report(tmp_path, page)
    assert text in page.read_text()
    assert "craft, mixed minus alone: +100.0" in text
    assert "| craft | mixed | 0 | 50.0" in text, "what both arms began with, which is the same"
    assert "| maze | mixed | 0 | 0.0" in text
    assert "maze, mixed minus alone: -100.0" in text
