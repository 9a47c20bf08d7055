"""advantages.py: examples worked out on paper, slow loops, and properties of random batches."""

import math
import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantages import (
    ESTIMATORS,
    anchored_share,
    distill,
    gae,
    gae_by_turn,
    gigpo,
    grpo,
    reinforce_plus_plus,
    rloo,
    token_rewards_of,
    whitened,
)
from config import Config

# The batch of trap 1: two trajectories of two turns. Each turn has an action of two tokens and an
# observation of two. The first trajectory wins and gets its reward on the last action token.
LOSS_MASK = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0]] * 2)
REWARDS = torch.zeros(2, 8)
REWARDS[0, 5] = 1.0
SAME_TASK = torch.tensor([7, 7])
NO_VALUES = torch.zeros(2, 8)


def estimates(token_rewards, values, loss_mask, group_ids, gamma=1.0):
    """Every estimator on one batch: name -> (advantages, returns)."""
    return {
        "gae": gae(token_rewards, values, loss_mask, gamma=gamma, lam=0.9, whiten=False),
        "gae, whitened": gae(token_rewards, values, loss_mask, gamma=gamma, lam=0.9),
        "grpo": grpo(token_rewards, loss_mask, group_ids),
        "grpo, not scaled": grpo(token_rewards, loss_mask, group_ids, scale_by_std=False),
        "rloo": rloo(token_rewards, loss_mask, group_ids),
        "reinforce_plus_plus": reinforce_plus_plus(token_rewards, loss_mask, gamma=gamma),
    }


def assert_close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# ------------------------------------------------------------------------------- worked examples
@pytest.mark.parametrize(
    ("name", "advantage"),
    [("gae", 0.9354), ("reinforce_plus_plus", 0.9354), ("grpo", 0.7071), ("rloo", 1.0)],
)
def test_trap_1_a_win_reaches_every_policy_token_of_both_turns(name, advantage):
    """Trap 1: a reward on the last attended token, which is an observation, would be lost."""
    actual, _ = {
        "gae": lambda: gae(REWARDS, NO_VALUES, LOSS_MASK),
        "reinforce_plus_plus": lambda: reinforce_plus_plus(REWARDS, LOSS_MASK),
        "grpo": lambda: grpo(REWARDS, LOSS_MASK, SAME_TASK),
        "rloo": lambda: rloo(REWARDS, LOSS_MASK, SAME_TASK),
    }[name]()
    expected = torch.tensor([[advantage], [-advantage]]) * LOSS_MASK
    assert_close(actual, expected, tolerance=5e-5)


def test_gae_by_hand_steps_over_the_observation():
    """Three policy tokens around an observation; the critic's value there (99) must be ignored.

    γ = 0.5, λ = 0.5, V = 1, 2, 4, r = 0, 0, 8. From the end:
    δ₃ = 8 − 4 = 4                Â₃ = 4
    δ₂ = 0.5·4 − 2 = 0            Â₂ = 0 + 0.25·4 = 1
    δ₁ = 0.5·2 − 1 = 0            Â₁ = 0 + 0.25·1 = 0.25
    """
    loss_mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0]])
    token_rewards = torch.tensor([[0, 0, 0, 0, 0, 8.0, 0]])
    values = torch.tensor([[99, 1.0, 2, 99, 99, 4, 99]])
    actual, returns = gae(token_rewards, values, loss_mask, gamma=0.5, lam=0.5, whiten=False)
    assert actual.tolist() == [[0, 0.25, 1, 0, 0, 4, 0]]
    assert returns.tolist() == [[0, 1.25, 3, 0, 0, 8, 0]]


def test_reinforce_plus_plus_by_hand_discounts_policy_tokens_only():
    loss_mask = torch.tensor([[1, 1, 0, 0, 0, 1, 0]])
    token_rewards = torch.tensor([[0, 4.0, 0, 0, 0, 8, 0]])
    _, returns = reinforce_plus_plus(token_rewards, loss_mask, gamma=0.5)
    assert returns.tolist() == [[4, 8, 0, 0, 0, 8, 0]]  # 0.5·8 = 4; 4 + 0.5·8 = 8; 8


def test_grpo_and_rloo_by_hand_on_groups_of_three_and_two():
    """Returns 0, 0, 3 | 1, 5: means 1 and 3, unbiased std √3 and √8."""
    loss_mask = torch.ones(5, 1)
    token_rewards = torch.tensor([[0.0], [1.0], [0.0], [5.0], [3.0]])
    group_ids = torch.tensor([4, 9, 4, 9, 4])
    actual, returns = grpo(token_rewards, loss_mask, group_ids)
    scores = [-1 / 3**0.5, -(0.5**0.5), -1 / 3**0.5, 0.5**0.5, 2 / 3**0.5]
    assert_close(actual[:, 0], torch.tensor(scores))
    assert returns.tolist() == token_rewards.tolist()
    actual, _ = grpo(token_rewards, loss_mask, group_ids, scale_by_std=False)
    assert actual[:, 0].tolist() == [-1, -2, -1, 2, 2]
    actual, _ = rloo(token_rewards, loss_mask, group_ids)  # 0 − 3/2, 1 − 5, 0 − 3/2, 5 − 1, 3 − 0
    assert actual[:, 0].tolist() == [-1.5, -4, -1.5, 4, 3]


# ------------------------------------------------------------------- slow loops from the papers
@st.composite
def batches(draw):
    """(token_rewards, values, loss_mask, group_ids): unequal groups, rows without policy tokens."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    group_ids = [10 * g for g, size in enumerate(sizes) for _ in range(size)]
    length = draw(st.integers(1, 9))
    number = st.sampled_from([-1.0, 0.0, 0.0, 0.25, 1.0])
    rows, rewards, values = [], [], []
    for _ in group_ids:
        mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        mask[draw(st.integers(0, length - 1))] = 1
        rows.append(mask)
        rewards.append([draw(number) if m else 0.0 for m in mask])
        # The critic's value of a masked token is arbitrary and must have no effect.
        values.append([draw(st.floats(-2, 2, width=32)) if m else math.nan for m in mask])
    for _ in range(draw(st.integers(0, 2))):  # episodes that did not start
        group_ids.append(draw(st.sampled_from([0, 999])))
        rows.append([0] * length)
        rewards.append([0.0] * length)
        values.append([math.nan] * length)
    order = draw(st.permutations(range(len(rows))))
    pick = lambda x: torch.tensor([x[i] for i in order])  # noqa: E731
    return pick(rewards), pick(values), pick(rows), pick(group_ids)


def slow_estimates(token_rewards, values, loss_mask, group_ids, gamma):
    """The definitions as sums over the policy tokens of a trajectory, without recursion.

    Rows come in any order (trap 22); rows without policy tokens belong to no group (trap 4).
    """
    policy = [[t for t, m in enumerate(row) if m] for row in loss_mask.tolist()]
    rewards, values = token_rewards.tolist(), values.tolist()
    zeros = [[0.0] * loss_mask.shape[1] for _ in policy]
    copy = lambda: [row[:] for row in zeros]  # noqa: E731
    gae_a, gae_r, to_go, grpo_a, dr_grpo_a, rloo_a, total = (copy() for _ in range(7))
    row_return = [sum(row) for row in rewards]
    for b, tokens in enumerate(policy):
        r = [rewards[b][t] for t in tokens]
        v = [values[b][t] for t in tokens] + [0.0]
        delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(r))]
        siblings = [
            row_return[j]
            for j in range(len(policy))
            if policy[j] and group_ids[j] == group_ids[b] and j != b
        ]
        for k, t in enumerate(tokens):
            gae_a[b][t] = sum((gamma * 0.9) ** (j - k) * delta[j] for j in range(k, len(r)))
            gae_r[b][t] = gae_a[b][t] + v[k]
            to_go[b][t] = sum(gamma ** (j - k) * r[j] for j in range(k, len(r)))
            group = [row_return[b], *siblings]
            dr_grpo_a[b][t] = row_return[b] - statistics.mean(group)
            grpo_a[b][t] = dr_grpo_a[b][t] / (statistics.stdev(group) + 1e-6)
            rloo_a[b][t] = row_return[b] - statistics.mean(siblings)
            total[b][t] = row_return[b]

    def slow_whiten(x):
        flat = [x[b][t] for b, tokens in enumerate(policy) for t in tokens]
        if len(flat) < 2:
            return copy()
        mean, scale = statistics.mean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
        return [
            [(u - mean) / scale if m else 0.0 for u, m in zip(row, mask, strict=True)]
            for row, mask in zip(x, loss_mask.tolist(), strict=True)
        ]

    pairs = {
        "gae": (gae_a, gae_r),
        "gae, whitened": (slow_whiten(gae_a), gae_r),
        "grpo": (grpo_a, total),
        "grpo, not scaled": (dr_grpo_a, total),
        "rloo": (rloo_a, total),
        "reinforce_plus_plus": (slow_whiten(to_go), to_go),
    }
    return {name: tuple(torch.tensor(x) for x in pair) for name, pair in pairs.items()}


def turns_in(mask):
    """[start, end) of each run of ones."""
    text = "".join(str(int(m)) for m in mask)
    return [match.span() for match in re.finditer("1+", text)]


@settings(deadline=None, max_examples=80)
@given(batches(), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.7]), st.data())
def test_turn_level_estimators_equal_loops_over_turns(batch, gamma, lam, data):
    rewards, values, mask, groups = batch
    number = st.integers(0, 1)
    starts = {(b, s): data.draw(number) for b, row in enumerate(mask) for s, _ in turns_in(row)}
    anchors = torch.zeros_like(mask)
    turns = []  # (row, start, end, return from here, advantage of GAE, V)
    for b, row in enumerate(mask):
        spans = turns_in(row)
        r = [rewards[b, s:e].sum().item() for s, e in spans]
        v = [values[b, s].item() for s, _ in spans] + [0.0]
        delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(r))]
        for k, (s, e) in enumerate(spans):
            anchors[b, s:e] = starts[b, s]
            later = range(k, len(r))
            to_go = sum(gamma ** (j - k) * r[j] for j in later)
            a = sum((gamma * lam) ** (j - k) * delta[j] for j in later)
            turns.append((b, s, e, to_go, a, v[k]))
    by_turn = torch.zeros_like(rewards)
    targets, same_state = by_turn.clone(), by_turn.clone()
    for b, s, e, to_go, a, v in turns:
        peers = [t[3] for t in turns if groups[t[0]] == groups[b] and starts[t[:2]] == starts[b, s]]
        spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
        by_turn[b, s:e], targets[b, s:e] = a, a + v
        if max(peers) - min(peers) > 1e-6:
            same_state[b, s:e] = (to_go - statistics.mean(peers)) / (spread + 1e-6)
    actual, returns = gae_by_turn(rewards, values, mask, gamma, lam, whiten=False)
    assert_close(actual, by_turn)
    assert_close(returns, targets)
    actual, _ = gae_by_turn(rewards, values, mask, gamma, lam)
    assert_close(actual, whitened(by_turn, mask.bool()), tolerance=1e-3)
    plain, _ = grpo(rewards, mask, groups)
    assert_close(gigpo(rewards, mask, groups, anchors, gamma)[0], plain + same_state, 2e-4)
    assert torch.equal(gigpo(rewards, mask, groups, anchors, gamma, weight=0.0)[0], plain)


def test_distillation_rewards_what_the_teacher_finds_likelier_than_the_student():
    student, teacher = (
        torch.tensor([[0.5, 0.25, math.nan]]).log(),
        torch.tensor([[0.25, 0.5, 1]]).log(),
    )
    advantages, _ = distill(student, teacher, torch.tensor([[1, 1, 0]]))
    assert_close(advantages, torch.tensor([[-math.log(2), math.log(2), 0.0]]))


def test_gigpo_by_hand():
    """Both samples pass through state 5 in their second turn; the first wins from there. Their
    first turns began in the same state, too, the third turn of the loser is alone in its state."""
    rewards = torch.tensor([[0.0, 0, 0, 1.0, 0, 0], [0.0, 0, 0, 0, 0, 0.0]])
    mask = torch.tensor([[1, 0, 1, 1, 0, 0], [1, 0, 1, 0, 1, 1]])
    anchors = torch.tensor([[0, 0, 5, 5, 0, 0], [0, 0, 5, 0, 7, 7]])
    advantages, _ = gigpo(rewards, mask, SAME_TASK, anchors, scale_by_std=False)
    assert advantages.tolist() == [[1.0, 0, 1.0, 1.0, 0, 0], [-1.0, 0, -1.0, 0, -0.5, -0.5]]
    assert anchored_share(mask, SAME_TASK, anchors) == 4 / 5


@settings(deadline=None, max_examples=80)
@given(batches(), st.sampled_from([1.0, 0.9, 0.0]))
def test_every_estimator_equals_the_sums_it_is_defined_by(batch, gamma):
    slow = slow_estimates(*batch, gamma)
    for name, (actual, returns) in estimates(*batch, gamma).items():
        assert_close(actual, slow[name][0], tolerance=2e-4)
        assert_close(returns, slow[name][1])


def test_the_table_gives_each_estimator_what_it_needs():
    rewards, values, mask, groups = REWARDS, torch.rand(2, 8), LOSS_MASK, SAME_TASK
    anchors = torch.tensor([[0, 0, 1, 1, 2, 2, 2, 2]]).expand(2, 8)
    batch = SimpleNamespace(token_rewards=rewards, values=values, loss_mask=mask, group_ids=groups)
    batch.anchor_ids = anchors
    batch.old_log_probs, batch.teacher_log_probs = values, 2 * values
    expected = {
        "distill": distill(values, 2 * values, mask),
        "gigpo": gigpo(rewards, mask, groups, anchors, 0.9, 0.5),
        "grpo": grpo(rewards, mask, groups),
        "ppo": gae(rewards, values, mask, 0.9, 0.8),
        "rloo": rloo(rewards, mask, groups),
        "reinforce_plus_plus": reinforce_plus_plus(rewards, mask, 0.9),
    }
    assert ESTIMATORS.keys() == expected.keys()
    config = Config(gamma=0.9, lam=0.8, gigpo_weight=0.5)
    for name, numbers in expected.items():
        actual = ESTIMATORS[name](batch, config)
        assert all(torch.equal(x, y) for x, y in zip(actual, numbers, strict=True))
    config = replace(config, scale_by_std=False, gae_unit="turn")
    expected = {
        "grpo": grpo(rewards, mask, groups, scale_by_std=False),
        "gigpo": gigpo(rewards, mask, groups, anchors, 0.9, 0.5, scale_by_std=False),
        "ppo": gae_by_turn(rewards, values, mask, 0.9, 0.8),
    }
    for name, numbers in expected.items():
        assert torch.equal(ESTIMATORS[name](batch, config)[0], numbers[0]), name


# ------------------------------------------------------------------------------------ properties


def test_float32_rounding_of_equal_returns_is_not_a_signal():
    """0.1 + 0.2 equals 0.3, but their last bits differ; divided by ε = 1e-6 that would count."""
    token_rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0]])
    assert token_rewards[0].double().sum() != token_rewards[1].double().sum()
    assert (grpo(token_rewards, torch.ones(2, 2), SAME_TASK)[0] == 0).all()
    assert (rloo(token_rewards, torch.ones(2, 2), SAME_TASK)[0] == 0).all()
    actual, _ = grpo(token_rewards + torch.tensor([[1e-3, 0.0]]).T, torch.ones(2, 2), SAME_TASK)
    assert actual.abs().min() > 0.7  # a small but real difference is kept


def test_inputs_are_not_changed_and_no_gradient_flows():
    values = torch.randn(2, 8, requires_grad=True)
    batch = (REWARDS, values, LOSS_MASK, SAME_TASK)
    before = [x.detach().clone() for x in batch]
    for pair in estimates(*batch).values():
        assert not any(x.requires_grad for x in pair)
    assert all(torch.equal(x, y) for x, y in zip(before, batch, strict=True))


# -------------------------------------------------------------------------------------- whiten


@pytest.mark.parametrize("loss_mask", [[1, 1, 1], [0, 1, 0], [0, 0, 0]])
def test_whitening_gives_zeros_if_there_is_no_variance(loss_mask):
    actual = whitened(torch.full((1, 3), 0.1), torch.tensor([loss_mask]).bool())
    assert actual.tolist() == [[0.0, 0.0, 0.0]]


def test_whitening_does_not_turn_noise_into_a_signal():
    """With 1e-8 under the root, differences of 1e-7 stay small instead of becoming ±1."""
    actual = whitened(torch.tensor([[0.0, 1e-7]]), torch.ones(1, 2).bool())
    assert actual.abs().max() < 1e-2


# ---------------------------------------------------------------------------- token_rewards_of
def test_trap_7_a_forced_end_of_turn_never_gets_the_reward():
    """If an action is cut at its length limit, we append its last token, with mask 0."""
    assert token_rewards_of([1.0], [(0, 3)], [1, 1, 0, 0]) == [0, 1.0, 0, 0]  # inside the span
    assert token_rewards_of([1.0], [(0, 2)], [1, 1, 0, 0]) == [0, 1.0, 0, 0]  # after it


def test_a_turn_without_policy_tokens_must_not_have_a_reward():
    assert token_rewards_of([0.0, 1.0], [(1, 1), (2, 3)], [0, 0, 1]) == [0, 0, 1.0]
    with pytest.raises(ValueError, match=r"turn 1 has reward 1.0 but no policy token in its act"):
        token_rewards_of([0.0, 1.0], [(0, 1), (1, 3)], [1, 0, 0])


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.floats(-1, 1)), max_size=6))
def test_token_rewards_sum_to_the_return_and_are_valid_for_an_estimator(turns):
    loss_mask, spans = [0], []
    for num_action, num_observation, _ in turns:
        spans.append((len(loss_mask), len(loss_mask) + num_action))
        loss_mask += [1] * num_action + [0] * num_observation
    token_rewards = token_rewards_of([reward for *_, reward in turns], spans, loss_mask)
    assert sum(token_rewards) == pytest.approx(sum(reward for *_, reward in turns))
    reinforce_plus_plus(torch.tensor([token_rewards]), torch.tensor([loss_mask]))


# ------------------------------------------------------------------------------------ bad inputs
@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "distill"])  # it reads no rewards
@pytest.mark.parametrize(
    ("token_rewards", "loss_mask", "message"),
    [
        (torch.zeros(2, 8), torch.ones(2, 7), r"token_rewards is \(2, 8\) and loss_mask is \(2, 7"),
        (torch.zeros(2), torch.ones(2), r"token_rewards is \(2,\) and loss_mask is \(2,\)"),
        (torch.zeros(2, 1), torch.full((2, 1), 0.5), "loss_mask must hold only 0 and 1"),
        (torch.tensor([[0.0], [math.nan]]), torch.ones(2, 1), r"\[1, 0\] is nan, but rewards"),
        (torch.tensor([[math.inf], [0.0]]), torch.ones(2, 1), r"\[0, 0\] is inf, but rewards"),
        (torch.tensor([[0.0, math.nan]]), torch.tensor([[1, 0]]), r"\[0, 1\] is nan, but rewards"),
        (torch.tensor([[0.5, -0.5]]), torch.tensor([[1, 0]]), r"\[0, 1\] is -0.5, but loss_mask"),
    ],
)  # fmt: skip
def test_every_estimator_names_the_token_it_refuses(name, token_rewards, loss_mask, message):
    """Also trap 1: a reward on a token that the policy did not write would be lost silently."""
    values = torch.zeros_like(token_rewards)
    batch = SimpleNamespace(
        token_rewards=token_rewards, values=values, loss_mask=loss_mask, group_ids=SAME_TASK
    )
    batch.anchor_ids = torch.zeros_like(loss_mask)
    with pytest.raises(ValueError, match=message):
        ESTIMATORS[name](batch, Config())


@pytest.mark.parametrize("estimator", [grpo, rloo])
@pytest.mark.parametrize(
    ("group_ids", "loss_mask", "message"),
    [
        ([3, 8], [[1], [1]], r"groups \[3, 8\] have one trajectory each"),
        ([7, 7], [[1], [0]], r"groups \[7\] have one trajectory each"),  # the second is empty
        ([1], [[1], [1]], r"group_ids must hold one integer per row, shape \(2,\); got \(1,\)"),
        ([7, 7, 7], [[1], [1]], "one integer per row"),
        ([0.0, 0.0], [[1], [1]], "one integer per row.*of torch.float32"),
    ],
)
def test_groups_without_a_baseline_and_ids_that_do_not_fit_are_refused(
    estimator, group_ids, loss_mask, message
):
    with pytest.raises(ValueError, match=message):
        estimator(torch.tensor([[1.0], [0.0]]), torch.tensor(loss_mask), torch.tensor(group_ids))


def test_gae_refuses_values_of_a_wrong_shape_or_not_finite_on_a_policy_token():
    with pytest.raises(ValueError, match=r"token_rewards is \(2, 8\) and values is \(2, 9\)"):
        gae(REWARDS, torch.zeros(2, 9), LOSS_MASK)
    values = torch.zeros(2, 8)
    values[1, 4] = math.nan
    with pytest.raises(ValueError, match=r"values\[1, 4\] is nan, but values must be finite"):
        gae(REWARDS, values, LOSS_MASK)
