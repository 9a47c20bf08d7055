"""order.py: which tasks a step takes, beside what its own examples show."""

from envs import Task
from order import draw


def test_a_task_that_comes_twice_in_a_turn_has_samples_of_its_own():
    """By step, task and sample the sampler's random numbers are told apart (rollout.py)."""
    tasks = [Task(f"t_{n}", n, "", "textcraft") for n in range(3)]
    requests = draw(1, tasks, 7, 4, seed=0, step=1, horizons={"textcraft": 5})
    assert len({r.group_id for r in requests}) == 7
    assert len({(r.task.task_id, r.sample) for r in requests}) == len(requests) == 28
    once = draw(1, tasks, 3, 4, seed=0, step=1, horizons={"textcraft": 5})
    assert sorted({r.sample for r in once}) == [0, 1, 2, 3]
