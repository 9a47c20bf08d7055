"""sft.py, dpo.py and agentevol.py learn, and also run on two processes."""

import json
from pathlib import Path

import pytest
from methods_toy import PROGRAMS, results_of, run, settings
from test_distributed import launch
from toy_env import flags, read_metrics

pytestmark = pytest.mark.long
DPO_OPTIONS = {"steps": 20, "iterations": 4, "group_size": 8, "min_gap": 0.1, "mini_batch_size": 32}
DPO_OPTIONS |= {"learning_rate": 3e-3, "learning_rate_decay_steps": 1000, "tasks_per_iteration": 8}


@pytest.mark.parametrize(
    ("method", "changes", "margin"),
    [
        # Random text earns 0.5. The comments show the gains of three seeds.
        ("sft", {"steps": 20, "num_demonstrations": 16, "hold_out": 0.0}, 0.2),  # 0.35 to 0.45
        ("dpo", DPO_OPTIONS, 0.2),  # training returns from 0.48 to 0.86, 0.86 and 0.78
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
def test_two_processes_learn_the_same_as_one(method, tmp_path, url):
    """The first iteration is the same up to the order of sums. The second starts from weights that
    differ in their last digits."""
    results = {}
    for ranks in (1, 2):
        values = settings(method, tmp_path / str(ranks), url, steps=2, eval_every=2)
        if ranks == 1:
            assert run(method, values) == 0
        else:
            code, _, stderr = launch("tests/train_toy.py", method, *flags(**values))
            assert code == 0, stderr
        data = results_of(values["run_dir"])["data"]
        results[ranks] = data, read_metrics(values["run_dir"])
    (data_1, metrics_1), (data_2, metrics_2) = results[1], results[2]
    assert data_2.keys() == data_1.keys()
    for name in (name for name in data_1 if "001.jsonl" in name):
        lines = [[json.loads(line) for line in d[name].splitlines()] for d in (data_1, data_2)]
        for a, b in zip(*lines, strict=True):
            for part in ("ref_chosen", "ref_rejected"):
                assert b.pop(part, 0.0) == pytest.approx(a.pop(part, 0.0), rel=1e-5)
            assert a == b
    for name, value in metrics_1[0].items():
        assert metrics_2[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
