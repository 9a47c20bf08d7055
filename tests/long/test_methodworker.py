"""sft.py, dpo.py and agentevol.py: each learns, and runs on two processes."""

import json
from pathlib import Path

import pytest
from methods_toy import PROGRAMS, left_by, run, settings
from test_distributed import launch
from test_methodworker import url
from toy_env import flags, read_metrics

__all__ = ["url"]  # a fixture
pytestmark = pytest.mark.long
PREFERRING = {"steps": 20, "iterations": 4, "group_size": 8, "min_gap": 0.1, "mini_batch_size": 32}
PREFERRING |= {"learning_rate": 3e-3, "learning_rate_decay_steps": 1000, "tasks_per_iteration": 8}


@pytest.mark.parametrize(
    ("method", "changes", "margin"),
    [
        # Random text earns 0.5; three seeds of each gained what stands behind it.
        ("sft", {"steps": 20, "num_demonstrations": 16, "hold_out": 0.0}, 0.2),  # 0.35 to 0.45
        ("dpo", PREFERRING, 0.2),  # three seeds: training returns from 0.48 to 0.86, 0.86, 0.78
        ("agentevol", {"steps": 30, "iterations": 2, "num_demonstrations": 16}, 0.08),
    ],
)
def test_the_return_rises(method, changes, margin, tmp_path, url):
    """Trap 2."""
    changes |= {"max_tokens_per_turn": 6, "eval_every": changes["steps"], "eval_samples": 4}
    changes |= {"eval_start_samples": 4, "deterministic": False, "engine": "transformers"}
    values = settings(method, tmp_path, url, **changes)
    assert run(method, values) == 0
    files = sorted((Path(values["run_dir"]) / "eval").glob("step_*.json"))
    before, after = (json.loads(p.read_text())["overall"]["return_mean"] for p in files)
    assert after - before > margin, (before, after)


@pytest.mark.parametrize("method", PROGRAMS)
def test_two_processes_play_and_learn_as_one(method, tmp_path, url):
    """The first iteration is the same, up to the order of sums; the second begins with weights that
    differ in their last digits."""
    left = {}
    for ranks in (1, 2):
        values = settings(method, tmp_path / str(ranks), url, steps=2, eval_every=2)
        if ranks == 1:
            assert run(method, values) == 0
        else:
            code, _, stderr = launch("tests/start_method.py", method, *flags(**values))
            assert code == 0, stderr
        left[ranks] = left_by(values["run_dir"])["kept"], read_metrics(values["run_dir"])
    (one, first), (two, second) = left[1], left[2]
    assert two.keys() == one.keys()
    for name in (name for name in one if "001.jsonl" in name):
        lines = [[json.loads(line) for line in kept[name].splitlines()] for kept in (one, two)]
        for a, b in zip(*lines, strict=True):
            for part in ("ref_chosen", "ref_rejected"):
                assert b.pop(part, 0.0) == pytest.approx(a.pop(part, 0.0), rel=1e-5)
            assert a == b
    for name, value in first[0].items():
        assert second[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
