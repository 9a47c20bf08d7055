"""recipes/hops.py: its arms are command lines of train.py, its table compares at equal turns."""

import pytest
from test_miniature import result, write

from envs import Task, load_tasks
from recipes import hops
from recipes.common import load_config
from recipes.miniature_plan import read_results


@pytest.mark.parametrize("arm", hops.ARMS)
def test_every_arm_is_a_command_line_and_differs_in_its_horizon_alone(arm):
    config = load_config(hops.arguments_of(arm, 1, ["--group-size", "2"]))
    other = load_config(hops.arguments_of("long", 1, ["--group-size", "2"]))
    differing = {name for name in vars(config) if getattr(config, name) != getattr(other, name)}
    own = {"rounds", "steps", "rounds_scheduler", "steps_scaling_inter"}
    own |= {"learning_rate_decay_steps"}
    assert config.learning_rate_decay_steps == config.steps < config.eval_every
    assert differing <= own
    assert (config.tasks, config.eval_tasks, config.evaluation_rounds) == ("train", "test", 6)
    assert (config.seed, config.group_size) == (1, 2)
    assert config.rounds[0] == (6 if arm == "long" else 2)


def test_stepwise_plays_each_horizon_as_long():
    config = load_config(hops.arguments_of("stepwise", 0))
    assert config.rounds == (2, 4, 6) and config.steps == 3 * config.steps_scaling_inter


def test_the_table_reads_all_arms_at_the_turns_that_all_have_played(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is empty; run"):
        hops.report(tmp_path)
    write(tmp_path, *(result("stepwise", s, [0, 0], [2, 2], turns=(100, 200)) for s in (0, 1)))
    write(tmp_path, result("short", 0, [0, 0], [0, 2], turns=(150, 300)))
    ids = list(result("short", 0, [0, 0], [0, 2])["held_out"][0]["solved_in"])
    tasks = [Task(task_id, n, f"kind {n % 2}") for n, task_id in enumerate(ids)]
    monkeypatch.setattr(hops, "load_tasks", lambda *_: tasks)
    said = hops.report(tmp_path)
    assert "after 200 turns" in said and "| arm | seeds | kind 0 | kind 1 | all |" in said
    assert "| stepwise | 0 1 | 100.0" in said and "stepwise minus short" in said
    assert "stepwise minus long" not in said and "| long |" not in said


def test_the_page_says_what_the_committed_runs_came_to():
    page = (hops.ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert hops.report(hops.FOLDER) in page
    runs = read_results(hops.FOLDER)
    assert set(runs) == {("short", 0), ("long", 0), ("stepwise", 0)}, "the page speaks of one seed"
    kinds = {task.task_id: task.subtask for task in load_tasks("searchqa", "test")}

    def solved(arm, place, *names):
        found = runs[arm, 0]["held_out"][place]["solved_in"]
        return sum(bool(n) for i, (n,) in found.items() if not names or kinds[i] in names)

    two, one = ("bridge", "border"), "one hop"
    for said in (
        f"({solved('short', 0, one)} to {solved('short', -1, one)} of 100 at its own end)",
        f"the start answers {solved('short', 0, *two)}, the trained policy "
        f"{solved('short', -1, *two)}, though",
        f"`long` answers {solved('long', -1, *two)} of them, from {solved('long', 0, *two)}, and",
        f"ends at {solved('stepwise', -1)} of 350, where",
        f"`long` ends at {solved('long', -1)} and `short` at {solved('short', -1)}",
    ):
        assert said in page, said
    ends = [f"{runs[arm, 0]['curve'][-1]['turns']:,.0f}" for arm in hops.ARMS]
    assert f"The arms play {ends[0]}, {ends[1]} and {ends[2]} turns" in page
    hours = sorted(result["hours"] for result in runs.values())
    assert f"{hours[0]:.1f} to {hours[-1]:.1f} hours an arm" in page
