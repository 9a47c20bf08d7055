"""recipes/hops.py: its arms are command lines of train.py, its table compares at equal turns."""

import pytest
from test_miniature import result, write

from envs import Task
from recipes import hops
from recipes.common import load_config


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
