"""train.select: which trajectories carry signal."""

import pytest
import torch

from advantages import grpo, whiten_each
from config import Config
from reporting.metrics import summarize_trajectories
from reporting.sentinels import Sentinels
from rollout import RolloutHandler
from train import select
from trajectory import Turn


def played(group_id, rewards, num_tokens=2):
    """A trajectory of a turn for each reward."""
    t = RolloutHandler("t", 1, "fake", "fake_0", "easy", group_id, 0, 3)
    length = num_tokens * len(rewards)
    t.input_ids, t.loss_mask, t.rollout_log_probs = [0] * length, [1] * length, [0.0] * length
    for n, reward in enumerate(rewards):
        t.turns.append(Turn((n * num_tokens, (n + 1) * num_tokens), "go", reward=reward))
    t.stop("failure", False)
    return t


def test_equal_scores_that_were_paid_in_other_parts_are_no_signal():
    """SciWorld pays as it goes: 0.1 + 0.2 is not 0.3, but nobody did better than anybody."""
    equal = [played(0, [0.1, 0.2]), played(0, [0.3])]
    other = [played(1, [0.1, 0.2]), played(1, [0.31])]
    used, _, counts = select([*equal, *other], Config())
    assert used == other and counts["data/signal_share"] == 6 / 12
    assert summarize_trajectories([*equal, *other])["train/groups_zero_variance"] == 1
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0]])
    advantages, _ = grpo(rewards, torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
    assert not advantages.any(), "as the estimator has it"


def test_whitening_within_a_world_sees_the_groups_that_say_nothing():
    """Without them their world's advantages were divided by a larger deviation, and then scaled
    down once more by the share of signal over all worlds."""
    trajectories = [played(0, [1.0]), played(0, [0.0]), *(played(1, [1.0]) for _ in range(4))]
    used, _, counts = select(trajectories, Config(normalize_per_env=True))
    assert used == trajectories and counts["data/signal_share"] == 1.0
    rewards = torch.zeros(6, 2)
    rewards[[0, 2, 3, 4, 5], 1] = 1.0
    groups = torch.tensor([0, 0, 1, 1, 1, 1])
    advantages, _ = grpo(rewards, torch.ones(6, 2), groups)
    whole = whiten_each(advantages, torch.ones(6, 2), ["a"] * 6)
    part = whiten_each(advantages[:2], torch.ones(2, 2), ["a"] * 2)
    assert whole[0, 0] > 1.5 * part[0, 0]


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_plus_plus"])
def test_equal_groups_are_no_silence_to_what_compares_no_groups(algorithm):
    """With one sample a task every group is equal: a run whose returns rose was stopped."""
    config = Config(algorithm=algorithm, group_size=1)
    step = {"train/groups": 8, "train/groups_zero_variance": 8}
    stopped = {}
    for name, unwatched in (("all", frozenset()), ("its own", config.unwatched)):
        watch = Sentinels()
        for n in range(60):
            row = step | {"train/success_rate": 0.125 if n < 8 else 0.0}
            seen = {key: value for key, value in row.items() if key not in unwatched}
            stopped[name] = [a.name for a in watch.check(n, seen) if a.severity == "stop"]
            if stopped[name]:
                break
    assert stopped == {"all": ["no_signal"], "its own": []}
    assert not Config(algorithm="grpo").unwatched
