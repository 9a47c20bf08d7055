"""Every algorithm learns: runs of train.py in an environment that rewards the letters a to m.

Random text earns about 0.5. The difference of two means over five steps has a standard error of
0.013, so the margin of 0.2 is more than ten standard errors. Over six seeds GRPO gained 0.40 to
0.49, and PPO, which must learn its critic first, 0.16 to 0.45. With seed 0, which this test uses,
PPO gained 0.30 to 0.37.
"""

import math
from statistics import fmean

import pytest
from toy_env import Letters, flags, options, read_metrics, serve, train_main

import agents

pytestmark = pytest.mark.long
MARGIN = 0.2


def mean_returns(tmp_path, env_class=Letters, **changes):
    if changes["algorithm"] == "ppo":
        changes["critic_learning_rate"] = 3e-3
    defaults = {"steps": 20, "tasks_per_step": 4, "group_size": 8, "max_tokens_per_turn": 6}
    defaults |= {"learning_rate": 3e-3, "learning_rate_decay_steps": 0, "save_every": 1000}
    with serve(env_class) as url:
        settings = options(tmp_path, url, **defaults | changes)
        assert train_main(flags(**settings)) == 0
    metrics = read_metrics(settings["run_dir"])
    # Trap 12: N steps are N updates, including the first and the last.
    assert len(metrics) == settings["steps"]
    num_updates = math.ceil(settings["tasks_per_step"] * settings["group_size"] / 64)
    for line in metrics:  # once all samples of a group succeed, there is nothing to learn
        updates = num_updates if line["train/trajectories_used"] else 0
        assert line["policy/optimizer_steps"] == updates
    return [line["train/return_mean"] for line in metrics]


def gain(returns):
    return fmean(returns[-5:]) - fmean(returns[:5])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "rloo", "reinforce_plus_plus", "gigpo"])
def test_the_return_rises(tmp_path, algorithm):
    """Trap 2: some estimators were never used."""
    returns = mean_returns(tmp_path, algorithm=algorithm)
    assert gain(returns) > MARGIN, [round(r, 2) for r in returns]


def test_nothing_is_learned_from_shuffled_rewards(tmp_path):
    returns = mean_returns(tmp_path, algorithm="grpo", shuffle_rewards=True)
    assert abs(gain(returns)) < MARGIN / 2, [round(r, 2) for r in returns]


def test_a_student_learns_from_a_teacher_on_its_own_turns(tmp_path):
    """The teacher is the result of a run with rewards; the student sees none."""
    (tmp_path / "student").mkdir()
    mean_returns(tmp_path, algorithm="grpo")
    teacher = str(tmp_path / "run/checkpoints/step_000020")
    returns = mean_returns(tmp_path / "student", algorithm="distill", teacher=teacher)
    kl = [line["policy/teacher_kl"] for line in read_metrics(tmp_path / "student/run")]
    assert gain(returns) > MARGIN, [round(r, 2) for r in returns]
    assert fmean(kl[-5:]) < fmean(kl[:5]) / 2, [round(x, 2) for x in kl]


class Secret(Letters):
    """The letters of one third of the alphabet are good. Which third depends on the seed, and only
    the answer to an action tells. So the mean return of any policy that has one attempt is 1/3, and
    with a second attempt that does not use the answer it is at most 2/3."""

    NUM_TURNS = 1
    THIRDS = ("abcdefghi", "jklmnopqr", "stuvwxyz")

    def reset(self, task_index, seed=0):
        super().reset(task_index, seed)
        self.good = self.THIRDS[seed % 3]
        return "get"

    def step(self, action):
        letters = "".join(action.lower().split())
        score = sum(c in self.good for c in letters) / max(len(letters), 1)
        info = {"success": score >= 0.9, "score": score}
        return f"{self.good[0]} " * 48, score, True, False, info


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("agent", "steps"), [("plain", 15), ("reflect", 30)])
def test_only_an_agent_that_reflects_learns_from_what_its_first_attempt_revealed(
    tmp_path, monkeypatch, agent, steps
):
    for name, text in {"REFLECT": "no", "AGAIN": "craft", "ACT": "get"}.items():
        monkeypatch.setattr(agents, name, text)  # words that `tiny` knows
    settings = {"tasks_per_step": 16, "max_tokens_per_turn": 1, "max_trajectory_tokens": 400}
    returns = mean_returns(
        tmp_path, Secret, algorithm="grpo", agent=agent, rounds=(1,), steps=steps, **settings
    )
    last = fmean(returns[-5:])
    assert last > 0.8 if agent == "reflect" else last < 0.5, [round(r, 2) for r in returns]
