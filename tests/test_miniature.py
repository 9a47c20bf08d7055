"""The paper in miniature: which runs are wanted, what is kept of them, how they are compared."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import toy_env

from config import Config, complete
from envs import OracleLost
from recipes import common, evidence, imitation, laboratory, miniature, miniature_report
from recipes import miniature_plan as plan

GOALS = [f"babyai_{index}" for index in laboratory.goals([40])]


def result(arm, seed, before, after, turns=(100, 200), hours=0.1):
    """A run of two steps, evaluated before and after; `before`, `after`: turns of each sample."""
    rows = [
        {"step": n, "turns": t, "failed_turns": t / 4, "tokens": 10 * t, "successes": n}
        | {"seconds": 10.0 * n, "train/groups": 4, "train/groups_zero_variance": 1}
        | {"train/success_rate": 0.1 * n}
        for n, t in enumerate(turns, start=1)
    ]
    held_out = [
        {"step": step, "solved_in": dict.fromkeys(GOALS, samples)}
        for step, samples in ((0, before), (2, after))
    ]
    return {"arm": arm, "seed": seed, "hours": hours, "curve": rows, "held_out": held_out}


def write(folder, *results):
    for r in results:
        common.write_json(folder / f"{r['arm']}-{r['seed']}.json", r)


# ----------------------------------------------------------------------------------------- the runs


@pytest.mark.parametrize("name", [n for n, arm in plan.ARMS.items() if arm.learner != "none"])
def test_every_arm_is_a_command_line_that_train_accepts_and_differs_where_it_says(name, tmp_path):
    def options(arm):
        return common.load_config(miniature.arguments_of(arm, 1, tmp_path))

    arm = plan.ARMS[name]
    ours, base = options(arm), options(plan.Arm(steps=arm.steps))
    differing = {n.replace("_", "-") for n in vars(ours) if getattr(ours, n) != getattr(base, n)}
    assert differing <= {word.removeprefix("--") for word in arm.words if word.startswith("--")}
    assert base.tasks.endswith("train.json") and base.eval_tasks.endswith("held_out.json")
    assert ours.evaluation_rounds == 16  # however they were trained


def test_first_seeds_of_all_arms_come_first_and_no_run_twice():
    runs = plan.wanted(["horizons", "controls", "noise"])
    assert len(runs) == len(set(runs)) == 5 * 3 + 2
    assert {seed for _, seed in runs[:5]} == {0} and runs[-1] == ("short", 4)


def test_an_estimator_waits_for_its_pilots_and_takes_the_rate_that_trains_best(tmp_path):
    pilots = [(plan.pilot("ppo", rate), rate) for rate in plan.RATES]
    for number, (name, _) in enumerate(pilots):
        assert plan.arm_of("ppo", plan.read_results(tmp_path)) is None
        pilot = result(name, plan.PILOT_SEED, [0], [0])
        pilot["curve"][-1]["train/success_rate"] = (0.3, 0.7, 0.5)[number]
        write(tmp_path, pilot)
    arm = plan.arm_of("ppo", plan.read_results(tmp_path))
    assert arm.words == (*plan.SHORT, *plan.rate_words("ppo", plan.RATES[1]))
    assert arm.steps == plan.ARMS["short"].steps
    assert "--critic-learning-rate" in arm.words


def test_grpo_at_the_laboratorys_own_rate_is_short_and_is_not_run_again(tmp_path):
    write(tmp_path, *(result("short", seed, [0], [seed]) for seed in plan.NOISE_SEEDS))
    for rate, success in zip(plan.RATES, (0.3, 0.7, 0.5), strict=True):
        assert not any(name == "grpo" for name, _ in plan.read_results(tmp_path))
        pilot = result(plan.pilot("grpo", rate), plan.PILOT_SEED, [0], [0])
        pilot["curve"][-1]["train/success_rate"] = success
        write(tmp_path, pilot)
    results = plan.read_results(tmp_path)
    found = plan.runs_behind("estimators", results)["grpo"]
    assert found == [results["short", seed] for seed in plan.SEEDS]
    own = common.load_config(miniature.arguments_of(plan.arm_of("grpo", results), 1, tmp_path))
    short = common.load_config(miniature.arguments_of(plan.ARMS["short"], 1, tmp_path))
    assert own == replace(short, on_collapse="warn")  # which those runs did not come to


def test_the_status_counts_what_is_missing_by_what_runs_took(tmp_path):
    write(
        tmp_path, result("short", 0, [0], [0], hours=0.5), result("long", 0, [0], [0], hours=0.25)
    )
    said = plan.status(["noise"], tmp_path)
    assert "| short | 0 | 1 2 3 4 | 30 |" in said and "2.0 hours" in said
    assert miniature.main(["status", "--results", str(tmp_path)]) == 0


def test_a_run_that_somebody_is_at_is_left_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr(miniature, "play", lambda *_: pytest.fail("somebody is at it"))
    with (
        miniature.marked(tmp_path / "a.lock") as ours,
        miniature.marked(tmp_path / "a.lock") as too,
    ):
        assert ours and not too
    monkeypatch.setattr(miniature, "wanted", lambda _: [("short", 0)])
    with miniature.marked(tmp_path / "short-0.lock"):
        miniature.run_missing(["noise"], tmp_path, tmp_path, [])


class Easy(toy_env.Letters):
    """What half of all random texts solve."""

    def step(self, action):
        observation, reward, ended, cut, info = super().step(action)
        return observation, reward, ended, cut, info | {"success": ended and self.score >= 0.5}


def test_own_successes_are_what_is_imitated_and_a_run_is_kept_and_gone_on_with(tmp_path):
    with toy_env.serve(Easy) as url, toy_env.fresh_process_state():
        options = toy_env.options(tmp_path, url, eval_every=2, learning_rate=1e-3)
        config = complete(Config(**options))
        imitation.imitate(config, imitation.of_its_own)
        imitation.imitate(replace(config, steps=4, resume=True), imitation.of_its_own)
    kept = miniature.record(tmp_path / "run", 4)
    assert [row["step"] for row in kept["curve"]] == [1, 2, 3, 4]
    assert [e["step"] for e in kept["held_out"]] == [0, 2, 4]
    per_step = config.tasks_per_step * config.group_size
    last = kept["curve"][-1]
    assert 0 < last["successes"] == sum(r["train/trajectories_used"] for r in kept["curve"])
    assert last["turns"] == 4 * per_step * 2  # two turns an episode
    assert last["failed_turns"] == last["turns"] - 2 * last["successes"]
    assert last["tokens"] > 0 and last["seconds"] > 0
    path = tmp_path / "run/timings.jsonl"  # a kill right behind a checkpoint costs a line
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] != 2))
    again = miniature.record(tmp_path / "run", 4)
    assert again["curve"][-1]["turns"] == last["turns"]
    with pytest.raises(SystemExit, match="expected 0 to 5"):
        miniature.record(tmp_path / "run", 5)


@pytest.mark.parametrize("words", [{"ppo_epochs": 2}, {"mini_batch_size": 7}])
def test_an_imitation_of_several_updates_a_step_is_refused_before_anything_is_shown(words):
    worker = SimpleNamespace(config=Config(**words))
    for prepare in (
        imitation.of_a_teacher(lambda *_: pytest.fail("asked for demonstrations"), 8),
        imitation.of_what_is_shown(lambda *_: pytest.fail("asked for demonstrations"), 8),
    ):
        with pytest.raises(SystemExit, match="--mini-batch-size of at least 8"):
            prepare(worker)


def test_the_teacher_shows_what_it_solved_and_a_step_shows_the_same_again():
    pytest.importorskip("minigrid", reason="make setup ENV=babyai")
    near, *_, middle = laboratory.goals([0])
    for index, horizon in ((near, 16), (middle, 6)):
        shown = miniature.teach([index], 5, horizon, random.Random("a step"))
        assert shown == miniature.teach([index], 5, horizon, random.Random("a step"))
        turns = [sum(t["from"] == "gpt" for t in record["conversations"]) for record in shown]
        assert len(shown) == 5 and max(turns) <= horizon
        assert {record["item_id"] for record in shown} == {f"babyai_{index}"}


def test_a_lost_oracle_is_left_out(monkeypatch):
    pytest.importorskip("minigrid", reason="make setup ENV=babyai")
    shows = iter([OracleLost("no way"), ({"item_id": "a"}, False), ({"item_id": "b"}, True)])

    def show(*_, **__):
        found = next(shows)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(laboratory, "show", show)
    assert miniature.teach([0], 1, 4, random.Random(0)) == [{"item_id": "b"}]


def test_a_run_that_is_there_is_gone_on_with(tmp_path, monkeypatch):
    """Reading its options must not be refused because its folder holds a run."""
    run_dir = tmp_path / "short-0"
    run_dir.mkdir()
    (run_dir / "config.json").write_text("{}")
    asked = []
    monkeypatch.setattr(miniature, "train", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(miniature, "record", lambda run_dir, steps: {"steps": steps})
    kept = miniature.play("short", plan.ARMS["short"], 0, tmp_path, [])
    assert kept == {"arm": "short", "seed": 0, "steps": plan.SHORT_STEPS}
    assert asked[0][1:] == (run_dir, plan.SHORT_STEPS)


# -------------------------------------------------------------------------------------- comparisons


def test_a_run_at_a_budget_lies_between_its_evaluations():
    run = result("long", 0, [0, 0, 0, 0], [3, 3, 0, 0])
    for budget, share in ((0, 0.0), (100, 0.25), (200, 0.5)):
        assert evidence.at(budget, "turns")(run) == dict.fromkeys(GOALS, share)
    with pytest.raises(ValueError, match="long-0 has not played 201 turns"):
        evidence.at(201, "turns")(run)


def test_a_difference_has_the_sign_of_the_first_and_pairs_by_seed():
    better = [result("a", s, [0], [2] if s else [0]) for s in (0, 1)]
    worse = [result("b", s, [0], [0]) for s in (1, 2)]
    end = evidence.end
    said = evidence.compare(better, worse, end, end)
    assert said.startswith("+100.0 (goals [")
    assert said.endswith("seeds -; of seed 1 alone)")  # one pair: no interval
    assert evidence.compare(better, worse[1:], end, end) == "- (no seed in common)"


def test_the_intervals_of_seeds_are_students():
    found = evidence.over_seeds([0.40, 0.50, 0.60])
    assert found["high"] - found["value"] == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert evidence.smallest_effect([0.4, 0.5, 0.6], 3) == pytest.approx(
        4.30 * 0.1 * (2 / 3) ** 0.5, rel=1e-2
    )


def test_the_report_draws_writes_between_its_markers_and_leaves_out_what_is_not_there(tmp_path):
    arms = {"short": [5, 0], "long": [9, 9], "stepwise": [3, 3]}
    arms |= {"rl": [2, 2], "imitation": [0, 3]}
    write(tmp_path, *(result(a, s, [0, 0], after) for a, after in arms.items() for s in (0, 1)))
    write(tmp_path, result("teacher", 0, [0, 4], [0, 4]))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- miniature horizons -->\nold\n<!-- end horizons -->\nafter\n")
    said = miniature_report.report(["horizons", "noise", "compute", "teacher"], tmp_path, page)
    text = page.read_text()
    assert "old" not in text and text.startswith("before\n") and text.endswith("-->\nafter\n")
    # long solved in 9 turns, stepwise in 3, short half of the samples in 5
    assert "| long | 2 | 0.0 [0.0, 30.8] | 0.0 [0.0, 30.8] | 100.0 [69.2, 100.0] |" in text
    assert "stepwise minus short, in 16 turns: +50.0" in text
    assert "stepwise minus long, in 4 turns: +100.0" in text
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "horizons.png",
        "compute.png",
        "teacher.png",
    }
    assert "rl minus its start: +100.0" in said and "rl minus imitation: +50.0" in said
    assert (
        "in 4 turns 50.0 [" in said and "in 4 turns: all goals +50.0 [" in said
    )  # the teacher's own
    again = miniature_report.report(["horizons"], tmp_path, page)
    assert again in said and page.read_text() == text
    assert "makes them" in miniature_report.report(["noise"], tmp_path / "none", page)


def test_the_page_says_what_the_results_say():
    """RESULTS.md between its markers, made again."""
    page = miniature_report.PAGE.read_text(encoding="utf-8")
    results = plan.read_results(plan.FOLDER)
    for name in plan.FIGURES:
        first, last = f"<!-- miniature {name} -->\n", f"\n<!-- end {name} -->"
        if first in page:
            runs = plan.runs_behind(name, results)
            table = page.partition(first)[2].partition(last)[0]
            assert table == "\n".join(miniature_report.TABLES[name](runs))
