"""update.py: the number of steps, results that do not depend on splits, and bad numbers."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from two_ranks import make_policy

import update
from batching import Batch, cut_micro_batches
from config import Config, Objective
from models import CriticModel
from train import RLWorker, keep_num_steps
from update import Learner, score_critic, score_policy

LENGTHS = (12, 5, 9, 7, 12, 6)  # tokens of each row
POLICY_TOKENS = (8, 1, 3, 2, 1, 4)  # the last tokens of each row, which the policy sampled
WIDE = Objective(
    mini_batch_size=64,
    max_tokens_per_micro_batch=10_000,
    max_grad_norm=1e9,
    sampler_is_cap=0.0,
    share_prefix=False,
)


@pytest.fixture(autouse=True)
def fresh_process_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def learner_of(model, optimizer):
    return Learner(Accelerator(mixed_precision="no", cpu=True), model, optimizer)


@pytest.fixture(autouse=True)
def share_even_short_prefixes(monkeypatch):
    """The rows here are short, and speed does not matter."""
    monkeypatch.setattr(update, "MIN_SHARED", 0.0)


def make_critic():
    critic = CriticModel(make_policy().lm.base_model)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
    return critic


@pytest.fixture
def batch():
    """Two samples for each of three tasks, with different lengths and numbers of policy tokens."""
    generator = torch.Generator().manual_seed(0)
    rows, width = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(3, 64, (rows, width), generator=generator)
    ids[1::2, :2] = ids[::2, :2]  # the opening of a group
    mask = torch.zeros(rows, width)
    for row, (length, count) in enumerate(zip(LENGTHS, POLICY_TOKENS, strict=True)):
        mask[row, length - count : length] = 1
        ids[row, length:] = 0
    zeros = torch.zeros(rows, width)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    return Batch(ids, mask, zeros.clone(), zeros.clone(), torch.tensor(LENGTHS), groups)


@pytest.fixture
def advantages(batch):
    noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(2))
    return noise * batch.loss_mask


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def sgd(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


def log_probs_of(policy, batch):
    return score_policy(policy, batch, WIDE, "cpu")


def values_of(critic, batch, max_tokens=10_000):
    return score_critic(critic, batch, replace(WIDE, max_tokens_per_micro_batch=max_tokens), "cpu")


def policy_step(policy, optimizer, batch, advantages, objective, seed=0, loss_scale=1.0, **fields):
    """`update_policy` on the batch with these fields set."""
    batch = replace(batch, advantages=advantages, **fields)
    return update.update_policy(learner_of(policy, optimizer), batch, objective, seed, loss_scale)


def critic_step(critic, optimizer, batch, values, returns, objective):
    """`update_critic` on the batch with these fields set."""
    learner = learner_of(critic, optimizer)
    return update.update_critic(learner, replace(batch, values=values, returns=returns), objective)


def sgd_update(batch, advantages, objective, lr=1.0, **options):
    """(change of the policy's parameters in one update with SGD, its metrics)."""
    policy = make_policy()
    before = flat(policy)
    metrics = policy_step(policy, sgd(policy, lr), batch, advantages, objective, **options)
    return flat(policy) - before, metrics


class CountingSGD(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)


# --- Trap 3: ppo_epochs is read, but only one pass is made ----------------------------------------


@pytest.mark.parametrize(("epochs", "mini_batch", "steps"), [(1, 64, 1), (1, 4, 2), (3, 2, 9)])
def test_ppo_epochs_times_mini_batches_is_the_number_of_optimizer_steps(
    batch, advantages, epochs, mini_batch, steps
):
    policy = make_policy()
    optimizer = CountingSGD(policy.parameters(), lr=1e-3)
    visited = []
    policy.register_forward_hook(lambda module, args, out: visited.extend(args[0][:, 0].tolist()))
    objective = replace(WIDE, ppo_epochs=epochs, mini_batch_size=mini_batch)
    old = log_probs_of(make_policy(), batch)
    metrics = policy_step(policy, optimizer, batch, advantages, objective, old_log_probs=old)
    assert optimizer.num_steps == metrics["policy/optimizer_steps"] == steps
    assert objective.num_optimizer_steps(len(batch)) == steps
    assert sorted(visited) == sorted(batch.input_ids[:, 0].tolist() * epochs)
    critic = make_critic()
    optimizer = CountingSGD(critic.parameters(), lr=1e-3)
    critic_step(critic, optimizer, batch, values_of(critic, batch), advantages, objective)
    assert optimizer.num_steps == steps


def test_each_epoch_visits_rows_in_a_new_order_that_depends_on_the_seed(batch):
    objective = replace(WIDE, ppo_epochs=2, mini_batch_size=1)
    first, again, other = (list(update._mini_batches(batch, objective, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[:6] != first[6:]


def test_skipped_mini_batches_of_the_critic_are_counted(batch, advantages):
    critic = make_critic()
    values = values_of(critic, batch)
    objective = replace(WIDE, mini_batch_size=3)
    returns = advantages.masked_fill(batch.loss_mask.bool(), math.inf)
    before = flat(critic)
    metrics = critic_step(critic, sgd(critic), batch, values, returns, objective)
    assert metrics["critic/skipped_steps"] == 2 and torch.equal(flat(critic), before)


# --- Trap 14: a mean of the means of micro-batches would depend on the split ---------------------


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 14, 24, 40])
@pytest.mark.parametrize(("loss_agg", "ratio"), [("token-mean", "token"), ("seq-mean", "sequence")])
def test_any_micro_batch_split_gives_the_same_loss_and_gradient(
    batch, advantages, max_tokens, share_prefix, loss_agg, ratio
):
    """Trap 14: with a mean per micro-batch, the memory setting would change the training."""
    options = dict(
        old_log_probs=log_probs_of(make_policy(seed=1), batch),
        ref_log_probs=log_probs_of(make_policy(seed=2), batch),
    )
    objective = replace(WIDE, entropy_coef=0.1, kl_loss_coef=0.2, sampler_is_cap=2.0)
    objective = replace(objective, loss_agg=loss_agg, ratio=ratio)
    split = replace(objective, max_tokens_per_micro_batch=max_tokens, share_prefix=share_prefix)
    assert len(cut_micro_batches(batch, range(len(batch)), max_tokens, share_prefix)) > 1
    expected, expected_metrics = sgd_update(batch, advantages, objective, **options)
    actual, metrics = sgd_update(batch, advantages, split, **options)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)


def negative_gradient(batch, loss_of):
    """Minus the gradient of `loss_of(log_probs, entropy)`, from one forward pass over all rows."""
    policy = make_policy()
    loss_of(*policy(batch.input_ids, batch.loss_mask)).backward()
    return -torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_the_gradient_is_that_of_the_equation_and_not_a_mean_of_means(batch, advantages):
    """-1/N Σ A log π; with seq-mean, every trajectory has the same weight."""
    counts = batch.loss_mask.sum(-1)
    losses = {
        "token-mean": lambda x, _: -(x * advantages).sum() / counts.sum(),
        "seq-mean": lambda x, _: -((x * advantages).sum(-1) / counts).mean(),
    }
    expected = {name: negative_gradient(batch, loss_of) for name, loss_of in losses.items()}
    assert (expected["token-mean"] - expected["seq-mean"]).abs().max() > 1e-2
    for max_tokens in (1, 10_000):
        for loss_agg, step in expected.items():
            objective = replace(WIDE, max_tokens_per_micro_batch=max_tokens, loss_agg=loss_agg)
            actual, metrics = sgd_update(batch, advantages, objective)
            torch.testing.assert_close(actual, step, atol=1e-5, rtol=1e-5)
        seq_mean = (advantages.sum(-1) / counts).mean()  # every ratio is 1
        assert metrics["policy/loss"] == pytest.approx(-float(seq_mean), abs=1e-5)


def test_kl_and_entropy_are_averaged_like_the_clipped_term_but_logged_by_token(batch, advantages):
    ref, mask = log_probs_of(make_policy(seed=2), batch), batch.loss_mask
    means = {}

    def loss_of(log_probs, entropy):
        gap = torch.where(mask.bool(), ref - log_probs, 0.0)
        kl = gap.exp() - gap - 1  # k3
        for name, x in (("policy/kl", kl), ("policy/entropy", entropy)):
            means[name] = float((x.detach() * mask).sum() / mask.sum())
        by_token = (log_probs - log_probs.detach()).exp() * -advantages + 0.2 * kl - 0.3 * entropy
        return (torch.where(mask.bool(), by_token, 0.0).sum(-1) / mask.sum(-1)).mean()

    expected = negative_gradient(batch, loss_of)
    objective = replace(WIDE, entropy_coef=0.3, kl_loss_coef=0.2, loss_agg="seq-mean")
    for max_tokens in (1, 10_000):
        split = replace(objective, max_tokens_per_micro_batch=max_tokens)
        step, metrics = sgd_update(batch, advantages, split, ref_log_probs=ref)
        torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-5)
        assert {name: metrics[name] for name in means} == pytest.approx(means, rel=1e-4)


@pytest.mark.parametrize(("size", "sizes"), [(4, [3, 3]), (5, [3, 3]), (6, [6]), (2, [2, 2, 2])])
def test_mini_batches_have_equal_sizes(batch, size, sizes):
    """A small last mini-batch would get as large a step as a full one."""
    objective = replace(WIDE, mini_batch_size=size)
    mini_batches = list(update._mini_batches(batch, objective, seed=0))
    assert [len(rows) for rows in mini_batches] == sizes == sorted(sizes)
    assert sorted(row for rows in mini_batches for row in rows) == list(range(6))
    assert len(mini_batches) == objective.num_optimizer_steps(6)


def test_with_seq_mean_a_trajectory_has_the_same_weight_in_every_mini_batch(batch, advantages):
    objective = replace(WIDE, mini_batch_size=2, loss_agg="seq-mean")
    old = log_probs_of(make_policy(), batch)
    _, metrics = sgd_update(batch, advantages, objective, lr=0.0, old_log_probs=old)
    seq_mean = (advantages.sum(-1) / batch.loss_mask.sum(-1)).mean()  # three steps of two rows
    assert metrics["policy/optimizer_steps"] == 3
    assert metrics["policy/loss"] == pytest.approx(-float(seq_mean), abs=1e-5)


def test_the_critics_update_does_not_depend_on_the_split(batch, advantages):
    def step(max_tokens):
        critic = make_critic()
        before = flat(critic)
        objective = replace(WIDE, max_tokens_per_micro_batch=max_tokens, value_clip=100.0)
        old = values_of(critic, batch)
        metrics = critic_step(critic, sgd(critic), batch, old, advantages, objective)
        return flat(critic) - before, metrics

    expected, expected_metrics = step(10_000)
    actual, metrics = step(14)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 24, 10_000])
def test_scores_do_not_depend_on_the_split_and_are_zero_on_other_tokens(
    batch, max_tokens, share_prefix
):
    policy, objective = make_policy().eval(), replace(WIDE, share_prefix=share_prefix)
    objective = replace(objective, max_tokens_per_micro_batch=max_tokens)
    expected = policy(batch.input_ids, batch.loss_mask)[0].detach()
    scores = score_policy(policy, batch, objective, "cpu")
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert (scores[batch.loss_mask == 0] == 0).all()
    assert (scores[batch.loss_mask == 1] < 0).all()
    colder = score_policy(policy, batch, replace(objective, temperature=0.5), "cpu")
    assert not torch.allclose(colder, scores)


# --- Trap 4: 0/0 in one trajectory gives a NaN gradient, and the step is taken without a check ---


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_never_reaches_the_optimizer(batch, advantages, bad):
    advantages[0, LENGTHS[0] - 1] = bad
    step, metrics = sgd_update(batch, advantages, replace(WIDE, max_tokens_per_micro_batch=14))
    assert (step == 0).all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["policy/optimizer_steps"], metrics["policy/skipped_steps"]) == (0, 1)
    assert metrics["policy/grad_norm"] == 0.0


def test_a_gradient_that_is_not_finite_never_reaches_the_optimizer(batch, advantages):
    policy = make_policy()
    before = flat(policy)
    next(policy.parameters()).register_hook(lambda gradient: gradient * math.inf)
    optimizer = torch.optim.AdamW(policy.parameters())
    metrics = policy_step(policy, optimizer, batch, advantages, WIDE)
    assert (metrics["policy/optimizer_steps"], metrics["policy/skipped_steps"]) == (0, 1)
    assert torch.equal(flat(policy), before)
    assert not optimizer.state  # the moments are not changed either


def test_a_skipped_mini_batch_does_not_affect_the_next(batch, advantages):
    """Two mini-batches, one with NaN: the update equals that of the other mini-batch."""
    pair = batch.rows([0, 2])
    healthy = advantages[[0, 2]]
    objective = replace(WIDE, mini_batch_size=1)
    poisoned = healthy.clone()
    poisoned[1, LENGTHS[2] - 1] = math.nan
    old = log_probs_of(make_policy(), pair)
    for seed in range(4):  # both orders of the mini-batches
        step, metrics = sgd_update(pair, poisoned, objective, old_log_probs=old, seed=seed)
        expected, alone = sgd_update(batch.rows([0]), healthy[:1], objective)
        torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-5)
        assert metrics["policy/entropy"] == pytest.approx(alone["policy/entropy"], rel=1e-5)
        assert (metrics["policy/optimizer_steps"], metrics["policy/skipped_steps"]) == (1, 1)


# --- Trap 12: with a warm-up of 0 steps, the first step has learning rate 0 ----------------------


def test_the_first_update_has_the_stated_learning_rate(batch, advantages):
    """Adam's first step is lr · sign(gradient), so the largest change equals lr."""
    policy = make_policy()
    before = flat(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    metrics = policy_step(policy, optimizer, batch, advantages, WIDE)
    assert (flat(policy) - before).abs().max().item() == pytest.approx(1e-3, rel=0.01)
    assert metrics["policy/learning_rate"] == 1e-3


def test_gradients_are_clipped_to_the_global_norm_and_logged_before_clipping(batch, advantages):
    free, metrics = sgd_update(batch, advantages, WIDE)
    assert metrics["policy/grad_norm"] == pytest.approx(free.norm().item(), rel=1e-3)
    limit = free.norm().item() / 10
    step, clipped = sgd_update(batch, advantages, replace(WIDE, max_grad_norm=limit))
    assert step.norm().item() == pytest.approx(limit, rel=1e-3)
    assert clipped["policy/grad_norm"] == pytest.approx(metrics["policy/grad_norm"], rel=1e-5)


# --- The terms of the objective ------------------------------------------------------------------


def test_old_log_probs_are_not_needed_if_there_is_one_optimizer_step(batch, advantages):
    old = log_probs_of(make_policy(), batch)
    implicit, metrics = sgd_update(batch, advantages, WIDE)
    explicit, expected_metrics = sgd_update(batch, advantages, WIDE, old_log_probs=old)
    torch.testing.assert_close(implicit, explicit, atol=1e-6, rtol=1e-5)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    assert metrics["policy/clip_frac"] == 0


def test_old_and_reference_log_probs_come_from_the_policy_and_from_its_frozen_copy(batch):
    policy, reference = (make_policy(seed=seed).eval() for seed in (0, 1))
    config = Config(share_prefix=False, kl_loss_coef=0.1, mini_batch_size=64)
    worker = SimpleNamespace(config=config, device="cpu", reference=reference, teacher=None)
    worker.policy, worker.critic = SimpleNamespace(model=policy), None
    RLWorker.score(worker, batch, config)
    assert batch.old_log_probs is None, "one optimizer step needs none"
    assert torch.equal(batch.ref_log_probs, log_probs_of(reference, batch))
    RLWorker.score(worker, batch, replace(config, mini_batch_size=2))
    assert torch.equal(batch.old_log_probs, log_probs_of(policy, batch))


@pytest.mark.parametrize("advantage", [-3.0, 3.0])
@pytest.mark.parametrize("log_ratio", [20.0, 100.0])
def test_one_token_with_a_huge_ratio_does_not_keep_the_others_from_learning(
    batch, advantages, log_ratio, advantage
):
    """Its gradient would be exp(20) times that of the others, or not finite."""
    row, column = 0, LENGTHS[0] - 1
    policy = make_policy()
    before = log_probs_of(policy, batch)
    old, advantages = before.clone(), advantages.clone()
    old[row, column] -= log_ratio
    advantages[row, column] = advantage
    without = advantages.clone()
    without[row, column] = 0.0
    objective = replace(WIDE, max_grad_norm=1.0)
    expected, _ = sgd_update(batch, without, objective, lr=1e-2, old_log_probs=old)
    metrics = policy_step(
        policy, sgd(policy, 1e-2), batch, advantages, objective, old_log_probs=old
    )
    torch.testing.assert_close(flat(policy) - flat(make_policy()), expected, atol=1e-6, rtol=1e-4)
    assert ((log_probs_of(policy, batch) - before) * without).sum() > 0
    num_tokens = sum(POLICY_TOKENS)
    if log_ratio > 20:  # at 20, it depends on rounding
        assert metrics["policy/log_ratio_clamp_frac"] == pytest.approx(1 / num_tokens)
    assert metrics["policy/dual_clip_frac"] == pytest.approx((advantage < 0) / num_tokens)
    assert metrics["policy/skipped_steps"] == 0


def test_the_critic_moves_towards_the_returns(batch):
    critic = make_critic()
    returns = batch.loss_mask * torch.linspace(0, 1, len(batch))[:, None]
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3, weight_decay=0.0)
    metrics = []
    for _ in range(40):
        old = values_of(critic, batch)
        metrics.append(critic_step(critic, optimizer, batch, old, returns, WIDE))
    assert metrics[-1]["critic/loss"] < 0.2 * metrics[0]["critic/loss"]
    assert metrics[-1]["critic/explained_variance"] > 0.8 > metrics[0]["critic/explained_variance"]


def test_explained_variance_is_over_policy_tokens_and_0_if_returns_are_equal(batch, advantages):
    critic, mask = make_critic(), batch.loss_mask.bool()
    values, returns = values_of(critic, batch), advantages
    metrics = critic_step(critic, sgd(critic, lr=0.0), batch, values, returns, WIDE)
    unexplained, total = (x[mask].var(correction=0) for x in (returns - values, returns))
    expected = float(1 - unexplained / total)
    assert metrics["critic/explained_variance"] == pytest.approx(expected, rel=1e-4)
    equal_returns = batch.loss_mask.clone()
    metrics = critic_step(critic, sgd(critic, lr=0.0), batch, values, equal_returns, WIDE)
    assert metrics["critic/explained_variance"] == 0.0


def test_metrics_are_means_or_maxima_over_the_mini_batches(batch, advantages):
    """The learning rate is 0, so each mini-batch can also be measured separately."""
    policy, objective = make_policy(), replace(WIDE, mini_batch_size=2)
    batch.advantages, batch.old_log_probs = advantages, log_probs_of(policy, batch)
    batch.rollout_log_probs = batch.old_log_probs + advantages / 10
    learner = learner_of(policy, sgd(policy, lr=0.0))
    total = update.update_policy(learner, batch, objective)
    parts = [
        update.update_policy(learner, batch.rows([row, row + 1]), objective) for row in (0, 2, 4)
    ]
    for name in ("policy/loss", "policy/entropy", "sampler/log_prob_diff_mean"):
        assert total[name] == pytest.approx(sum(part[name] for part in parts) / 3), name
    maxima = [part["sampler/log_prob_diff_max"] for part in parts]
    assert total["sampler/log_prob_diff_max"] == pytest.approx(max(maxima))
    assert min(maxima) < max(maxima)


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize(
    ("loss_agg", "share"),
    [("token-mean", sum(POLICY_TOKENS[:4]) / sum(POLICY_TOKENS)), ("seq-mean", 4 / 6)],
)
def test_leaving_out_a_group_without_signal_saves_work_and_does_not_change_the_step(
    batch, advantages, share_prefix, loss_agg, share
):
    advantages[4:] = 0.0  # both samples of the third task have the same return
    objective = replace(WIDE, share_prefix=share_prefix, loss_agg=loss_agg)
    expected, _ = sgd_update(batch, advantages, objective)
    part = batch.rows([0, 1, 2, 3])
    width = part.loss_mask.shape[1]
    step, metrics = sgd_update(part, advantages[:4, :width], objective, loss_scale=share)
    torch.testing.assert_close(step, expected, atol=1e-6, rtol=1e-5)
    unscaled, unscaled_metrics = sgd_update(part, advantages[:4, :width], objective)
    assert unscaled.norm() > 1.3 * expected.norm()
    assert metrics["policy/loss"] == unscaled_metrics["policy/loss"]  # a mean over trained tokens


@pytest.mark.parametrize("shares", [False, True])
def test_leaving_out_groups_without_signal_keeps_the_number_of_steps(batch, advantages, shares):
    """Fewer steps, each scaled by the signal share, would count the missing groups twice: with
    three of four groups left out, the paper's setting would move a quarter as far."""
    advantages[2:] = 0.0  # the samples of the other tasks have the same return
    objective = replace(WIDE, share_prefix=shares, loss_agg="seq-mean", mini_batch_size=3)
    part = batch.rows([0, 1])
    width, small = part.loss_mask.shape[1], {"lr": 1e-3}  # so small that steps simply add up
    old = log_probs_of(make_policy(), batch)
    expected, _ = sgd_update(batch, advantages, objective, old_log_probs=old, **small)
    options = {"loss_scale": 2 / 6, "old_log_probs": old[:2, :width], **small}
    half, _ = sgd_update(part, advantages[:2, :width], objective, **options)
    objective, mini_batch_size = keep_num_steps(objective, 2, 6)
    assert mini_batch_size == 1.0
    step, metrics = sgd_update(part, advantages[:2, :width], objective, **options)
    assert metrics["policy/optimizer_steps"] == 2
    torch.testing.assert_close(step, expected, atol=2e-6, rtol=5e-3)
    torch.testing.assert_close(2 * half, expected, atol=2e-6, rtol=5e-3)


def test_a_batch_that_shares_too_little_is_padded_instead(batch, monkeypatch):
    """Three groups of two rows with openings of 2 tokens: sharing saves 6 of 51 tokens."""
    monkeypatch.setattr(update, "MIN_SHARED", 6 / 51)
    sharing = replace(WIDE, share_prefix=True)
    assert update.decide_sharing(sharing, batch) == sharing
    monkeypatch.setattr(update, "MIN_SHARED", 6.1 / 51)
    assert update.decide_sharing(sharing, batch) == WIDE
    assert update.decide_sharing(WIDE, batch) == WIDE


def test_the_samples_of_a_task_stay_in_one_mini_batch_if_they_fit(batch):
    """If a group were spread over mini-batches, few samples could share its opening."""
    objective = replace(WIDE, mini_batch_size=2, ppo_epochs=5)
    for rows in update._mini_batches(batch, objective, seed=3):
        assert len({int(batch.group_ids[row]) for row in rows}) == 1
    orders = {tuple(map(tuple, update._mini_batches(batch, objective, seed))) for seed in range(4)}
    assert len(orders) > 1
