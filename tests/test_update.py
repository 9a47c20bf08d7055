"""The passes of one training step: steps counted, splits that do not matter, bad numbers."""

import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import Qwen2Config, Qwen2ForCausalLM

import update
from batching import Batch, cut_micro_batches
from config import Objective
from models import CriticModel, PolicyModel
from train import keep_num_steps
from update import Learner, score_critic, score_policy

LENGTHS = (12, 5, 9, 7, 12, 6)  # tokens of each row
POLICY_TOKENS = (8, 1, 3, 2, 1, 4)  # of which the policy sampled the last ones
WIDE = Objective(
    mini_batch_size=64,
    max_tokens_per_micro_batch=10_000,
    max_grad_norm=1e9,
    sampler_is_cap=0.0,
    share_prefix=False,
)
OPTIONS = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def fresh_process_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def learner_of(model, optimizer):
    return Learner(Accelerator(mixed_precision="no", cpu=True), model, optimizer)


@pytest.fixture(autouse=True)
def share_whatever_there_is(monkeypatch):
    """The rows here are short; where sharing pays is a matter of speed."""
    monkeypatch.setattr(update, "MIN_SHARED", 0.0)


def make_policy(seed=0):
    torch.manual_seed(seed)
    return PolicyModel(Qwen2ForCausalLM(Qwen2Config(**OPTIONS, **HEADS, initializer_range=0.3)))


def make_critic():
    critic = CriticModel(make_policy().lm.base_model)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
    return critic


@pytest.fixture
def batch():
    """Two samples of each of three tasks, different in length and in how much the policy wrote."""
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


def policy_step(
    policy,
    optimizer,
    batch,
    advantages,
    objective,
    old_log_probs=None,
    ref_log_probs=None,
    seed=0,
    signal_share=1.0,
):
    """`update_policy` on the batch with these added."""
    added = dict(advantages=advantages, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    learner = learner_of(policy, optimizer)
    return update.update_policy(learner, replace(batch, **added), objective, seed, signal_share)


def critic_step(critic, optimizer, batch, values, returns, objective):
    """`update_critic` on the batch with these added."""
    learner = learner_of(critic, optimizer)
    return update.update_critic(learner, replace(batch, values=values, returns=returns), objective)


def moved(batch, advantages, objective, lr=1.0, **options):
    """(how far one update with SGD moves the policy's parameters, its metrics)."""
    policy = make_policy()
    before = flat(policy)
    metrics = policy_step(policy, sgd(policy, lr), batch, advantages, objective, **options)
    return flat(policy) - before, metrics


class CountingSGD(torch.optim.SGD):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)


# --- Trap 3: ppo_epochs is read, and one pass is taken whatever it says ---------------------------


@pytest.mark.parametrize(("epochs", "mini_batch", "steps"), [(1, 64, 1), (1, 4, 2), (3, 2, 9)])
def test_ppo_epochs_times_mini_batches_is_the_number_of_optimizer_steps(
    batch, advantages, epochs, mini_batch, steps
):
    policy = make_policy()
    optimizer = CountingSGD(policy.parameters(), lr=1e-3)
    seen = []
    policy.register_forward_hook(lambda module, args, out: seen.extend(args[0][:, 0].tolist()))
    objective = replace(WIDE, ppo_epochs=epochs, mini_batch_size=mini_batch)
    old = log_probs_of(make_policy(), batch)
    metrics = policy_step(policy, optimizer, batch, advantages, objective, old)
    assert optimizer.num_steps == metrics["policy/optimizer_steps"] == steps
    assert objective.num_optimizer_steps(len(batch)) == steps
    assert sorted(seen) == sorted(batch.input_ids[:, 0].tolist() * epochs)


def test_each_epoch_meets_the_rows_in_another_order_and_a_seed_repeats_it(batch, advantages):
    def order_of(seed):
        policy, seen = make_policy(), []
        policy.register_forward_hook(lambda module, args, out: seen.append(args[0][0].tolist()))
        objective = replace(WIDE, ppo_epochs=2, mini_batch_size=1)
        old = log_probs_of(make_policy(), batch)
        policy_step(policy, sgd(policy, 0.0), batch, advantages, objective, old, None, seed)
        return seen

    first = order_of(1)
    assert first == order_of(1)
    assert first != order_of(2)
    assert first[:6] != first[6:]


def test_a_critics_mini_batches_that_were_not_finite_are_counted(batch, advantages):
    critic = make_critic()
    values = values_of(critic, batch)
    objective = replace(WIDE, mini_batch_size=3)
    returns = advantages.masked_fill(batch.loss_mask.bool(), math.inf)
    before = flat(critic)
    metrics = critic_step(critic, sgd(critic), batch, values, returns, objective)
    assert metrics["critic/skipped_steps"] == 2 and torch.equal(flat(critic), before)


# --- Trap 14: a mean per micro-batch and then the mean of means depends on the split -------------


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 14, 24, 40])
@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean"])
def test_any_micro_batch_split_gives_the_same_loss_and_gradient(
    batch, advantages, max_tokens, share_prefix, loss_agg
):
    options = dict(
        old_log_probs=log_probs_of(make_policy(1), batch),
        ref_log_probs=log_probs_of(make_policy(2), batch),
    )
    objective = replace(WIDE, entropy_coef=0.1, kl_loss_coef=0.2, sampler_is_cap=2.0)
    objective = replace(objective, loss_agg=loss_agg)
    split = replace(objective, max_tokens_per_micro_batch=max_tokens, share_prefix=share_prefix)
    assert len(cut_micro_batches(batch, range(len(batch)), max_tokens, share_prefix)) > 1
    whole, whole_metrics = moved(batch, advantages, objective, **options)
    parts, parts_metrics = moved(batch, advantages, split, **options)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
    assert parts_metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)


def step_down(batch, loss_of):
    """Minus the gradient of `loss_of(log_probs, entropy)`, one forward over all rows."""
    policy = make_policy()
    loss_of(*policy(batch.input_ids, batch.loss_mask)).backward()
    return -torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_the_gradient_is_that_of_the_equation_and_not_a_mean_of_means(batch, advantages):
    """-1/N Σ A log π; with seq-mean every trajectory counts alike."""
    counts = batch.loss_mask.sum(-1)
    expected = {
        "token-mean": step_down(batch, lambda x, _: -(x * advantages).sum() / counts.sum()),
        "seq-mean": step_down(batch, lambda x, _: -((x * advantages).sum(-1) / counts).mean()),
    }
    assert (expected["token-mean"] - expected["seq-mean"]).abs().max() > 1e-2
    for max_tokens in (1, 10_000):
        for loss_agg, step in expected.items():
            objective = replace(WIDE, max_tokens_per_micro_batch=max_tokens, loss_agg=loss_agg)
            actual, metrics = moved(batch, advantages, objective)
            torch.testing.assert_close(actual, step, atol=1e-5, rtol=1e-5)
        even = (advantages.sum(-1) / counts).mean()  # every ratio is 1
        assert metrics["policy/loss"] == pytest.approx(-float(even), abs=1e-5)


def test_kl_and_entropy_are_averaged_as_the_clipped_term_is_and_logged_by_token(batch, advantages):
    ref, mask = log_probs_of(make_policy(2), batch), batch.loss_mask
    means = {}

    def loss_of(log_probs, entropy):
        gap = torch.where(mask.bool(), ref - log_probs, 0.0)
        kl = gap.exp() - gap - 1  # k3
        for name, x in (("policy/kl", kl), ("policy/entropy", entropy)):
            means[name] = float((x.detach() * mask).sum() / mask.sum())
        by_token = (log_probs - log_probs.detach()).exp() * -advantages + 0.2 * kl - 0.3 * entropy
        return (torch.where(mask.bool(), by_token, 0.0).sum(-1) / mask.sum(-1)).mean()

    expected = step_down(batch, loss_of)
    objective = replace(WIDE, entropy_coef=0.3, kl_loss_coef=0.2, loss_agg="seq-mean")
    for max_tokens in (1, 10_000):
        asked = replace(objective, max_tokens_per_micro_batch=max_tokens)
        step, metrics = moved(batch, advantages, asked, ref_log_probs=ref)
        torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-5)
        assert {name: metrics[name] for name in means} == pytest.approx(means, rel=1e-4)


@pytest.mark.parametrize(("size", "parts"), [(4, [3, 3]), (5, [3, 3]), (6, [6]), (2, [2, 2, 2])])
def test_mini_batches_are_of_equal_sizes(batch, size, parts):
    """A rest of a few rows would take as large a step as all the others together."""
    objective = replace(WIDE, mini_batch_size=size)
    found = list(update._mini_batches(batch, objective, seed=0))
    assert [len(rows) for rows in found] == parts == sorted(parts)
    assert sorted(row for rows in found for row in rows) == list(range(6))
    assert len(found) == objective.num_optimizer_steps(6)


def test_a_trajectory_counts_alike_in_every_mini_batch_however_long_its_neighbours_are(
    batch, advantages
):
    objective = replace(WIDE, mini_batch_size=2, loss_agg="seq-mean")
    old = log_probs_of(make_policy(), batch)
    _, metrics = moved(batch, advantages, objective, lr=0.0, old_log_probs=old)
    even = (advantages.sum(-1) / batch.loss_mask.sum(-1)).mean()  # three steps of two rows
    assert metrics["policy/optimizer_steps"] == 3
    assert metrics["policy/loss"] == pytest.approx(-float(even), abs=1e-5)


def test_the_critics_update_does_not_depend_on_the_split(batch, advantages):
    def step(max_tokens):
        critic = make_critic()
        before = flat(critic)
        objective = replace(WIDE, max_tokens_per_micro_batch=max_tokens, value_clip=100.0)
        old = values_of(critic, batch)
        metrics = critic_step(critic, sgd(critic), batch, old, advantages, objective)
        return flat(critic) - before, metrics

    whole, metrics = step(10_000)
    parts, parts_metrics = step(14)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
    assert parts_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 24, 10_000])
def test_scores_do_not_depend_on_the_split_and_are_zero_off_the_policys_tokens(
    batch, max_tokens, share_prefix
):
    policy, objective = make_policy().eval(), replace(WIDE, share_prefix=share_prefix)
    objective = replace(objective, max_tokens_per_micro_batch=max_tokens)
    expected = policy(batch.input_ids, batch.loss_mask)[0].detach()
    got = score_policy(policy, batch, objective, "cpu")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (got[batch.loss_mask == 0] == 0).all()
    assert (got[batch.loss_mask == 1] < 0).all()
    colder = score_policy(policy, batch, replace(objective, temperature=0.5), "cpu")
    assert not torch.allclose(colder, got)


# --- Trap 4: 0/0 in one trajectory, a NaN gradient, stepped without a check ----------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_never_reaches_the_optimizer(batch, advantages, bad):
    advantages[0, LENGTHS[0] - 1] = bad
    step, metrics = moved(batch, advantages, replace(WIDE, max_tokens_per_micro_batch=14))
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
    assert math.isfinite(metrics["policy/loss"])
    assert (metrics["policy/optimizer_steps"], metrics["policy/skipped_steps"]) == (0, 1)
    assert torch.equal(flat(policy), before)
    assert not optimizer.state  # no moment has seen it either


def test_a_skipped_mini_batch_leaves_nothing_behind_in_the_next(batch, advantages):
    """Two mini-batches, the second row poisoned: the update is that of the healthy one alone."""
    pair = batch.rows([0, 2])
    healthy = advantages[[0, 2]]
    objective = replace(WIDE, mini_batch_size=1)
    poisoned = healthy.clone()
    poisoned[1, LENGTHS[2] - 1] = math.nan
    old = log_probs_of(make_policy(), pair)
    for seed in range(4):  # whichever of the two comes first
        step, metrics = moved(pair, poisoned, objective, old_log_probs=old, seed=seed)
        alone, _ = moved(batch.rows([0]), healthy[:1], objective)
        torch.testing.assert_close(step, alone, atol=1e-5, rtol=1e-5)
        assert (metrics["policy/optimizer_steps"], metrics["policy/skipped_steps"]) == (1, 1)


# --- Trap 12: warm-up 0 gives lr 0 at the first step ---------------------------------------------


def test_the_first_update_has_the_stated_learning_rate(batch, advantages):
    """Adam's first step is lr · sign(gradient), so the largest move is lr itself."""
    policy = make_policy()
    before = flat(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    metrics = policy_step(policy, optimizer, batch, advantages, WIDE)
    assert (flat(policy) - before).abs().max().item() == pytest.approx(1e-3, rel=0.01)
    assert metrics["policy/learning_rate"] == 1e-3


def test_gradients_are_clipped_to_the_global_norm_and_logged_before_clipping(batch, advantages):
    free, metrics = moved(batch, advantages, WIDE)
    assert metrics["policy/grad_norm"] == pytest.approx(free.norm().item(), rel=1e-3)
    limit = free.norm().item() / 10
    step, clipped = moved(batch, advantages, replace(WIDE, max_grad_norm=limit))
    assert step.norm().item() == pytest.approx(limit, rel=1e-3)
    assert clipped["policy/grad_norm"] == pytest.approx(metrics["policy/grad_norm"], rel=1e-5)


# --- The terms of the objective ------------------------------------------------------------------


def test_leaving_out_old_log_probs_is_exact_when_there_is_one_optimizer_step(batch, advantages):
    old = log_probs_of(make_policy(), batch)
    implicit, metrics = moved(batch, advantages, WIDE)
    explicit, same = moved(batch, advantages, WIDE, old_log_probs=old)
    torch.testing.assert_close(implicit, explicit, atol=1e-6, rtol=1e-5)
    assert metrics == pytest.approx(same, abs=1e-5)
    assert metrics["policy/clip_frac"] == 0


def test_the_critic_moves_towards_the_returns(batch):
    critic = make_critic()
    returns = batch.loss_mask * torch.linspace(0, 1, len(batch))[:, None]
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3, weight_decay=0.0)
    seen = []
    for _ in range(40):
        old = values_of(critic, batch)
        seen.append(critic_step(critic, optimizer, batch, old, returns, WIDE))
    assert seen[-1]["critic/loss"] < 0.2 * seen[0]["critic/loss"]
    assert seen[-1]["critic/explained_variance"] > 0.8 > seen[0]["critic/explained_variance"]


def test_explained_variance_is_over_policy_tokens_and_0_where_returns_are_equal(batch, advantages):
    critic, chosen = make_critic(), batch.loss_mask.bool()
    values, returns = values_of(critic, batch), advantages
    metrics = critic_step(critic, sgd(critic, lr=0.0), batch, values, returns, WIDE)
    left, whole = ((x[chosen]).var(correction=0) for x in (returns - values, returns))
    assert metrics["critic/explained_variance"] == pytest.approx(float(1 - left / whole), rel=1e-4)
    same = critic_step(critic, sgd(critic, lr=0.0), batch, values, batch.loss_mask.clone(), WIDE)
    assert same["critic/explained_variance"] == 0.0


def test_what_is_logged_of_several_mini_batches_is_the_mean_of_each_and_the_highest_of_all(
    batch, advantages
):
    """The policy stands still, so that each mini-batch can be measured by itself."""
    policy = make_policy()
    old = log_probs_of(policy, batch)
    batch.rollout_log_probs = old + advantages / 10

    def measured(part, size):
        return policy_step(
            policy,
            sgd(policy, lr=0.0),
            part,
            part.advantages,
            replace(WIDE, mini_batch_size=size),
            part.old_log_probs,
        )

    batch.advantages, batch.old_log_probs = advantages, old
    together = measured(batch, 2)
    alone = [measured(batch.rows([row, row + 1]), 2) for row in (0, 2, 4)]
    for name in ("policy/loss", "policy/entropy", "sampler/log_prob_diff_mean"):
        assert together[name] == pytest.approx(sum(each[name] for each in alone) / 3), name
    highest = [each["sampler/log_prob_diff_max"] for each in alone]
    assert together["sampler/log_prob_diff_max"] == pytest.approx(max(highest))
    assert min(highest) < max(highest)


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize(
    ("loss_agg", "share"),
    [("token-mean", sum(POLICY_TOKENS[:4]) / sum(POLICY_TOKENS)), ("seq-mean", 4 / 6)],
)
def test_leaving_out_a_group_without_signal_changes_the_cost_and_not_the_step(
    batch, advantages, share_prefix, loss_agg, share
):
    advantages[4:] = 0.0  # both samples of the third task returned the same
    objective = replace(WIDE, share_prefix=share_prefix, loss_agg=loss_agg)
    whole, _ = moved(batch, advantages, objective)
    kept = batch.rows([0, 1, 2, 3])
    width = kept.loss_mask.shape[1]
    step, metrics = moved(kept, advantages[:4, :width], objective, signal_share=share)
    torch.testing.assert_close(step, whole, atol=1e-6, rtol=1e-5)
    too_far, other = moved(kept, advantages[:4, :width], objective)
    assert too_far.norm() > 1.3 * whole.norm()
    assert metrics["policy/loss"] == other["policy/loss"]  # a mean over the tokens trained on


@pytest.mark.parametrize("shares", [False, True])
def test_and_of_several_mini_batches_as_many_are_left(batch, advantages, shares):
    """Fewer, each scaled by the share that is left, would count what is left out twice: with three
    of four groups silent the paper's setting moved a quarter as far."""
    advantages[2:] = 0.0  # the samples of the other tasks returned the same
    objective = replace(WIDE, share_prefix=shares, loss_agg="seq-mean", mini_batch_size=3)
    kept = batch.rows([0, 1])
    width, near = kept.loss_mask.shape[1], {"lr": 1e-3}  # where two steps are the sum of both
    old = log_probs_of(make_policy(), batch)
    whole, _ = moved(batch, advantages, objective, old_log_probs=old, **near)
    left = {"signal_share": 2 / 6, "old_log_probs": old[:2, :width], **near}
    half, _ = moved(kept, advantages[:2, :width], objective, **left)
    objective, each = keep_num_steps(objective, 2, 6)
    assert each == 1.0
    step, metrics = moved(kept, advantages[:2, :width], objective, **left)
    assert metrics["policy/optimizer_steps"] == 2
    torch.testing.assert_close(step, whole, atol=2e-6, rtol=5e-3)
    torch.testing.assert_close(2 * half, whole, atol=2e-6, rtol=5e-3)


@pytest.mark.parametrize("max_tokens", [14, 24, 10_000])
def test_the_padding_that_is_reported_is_that_of_the_passes(batch, advantages, max_tokens):
    """Of the mini-batches' own cuts, not of a cut of the whole batch that nobody made."""
    policy, cells = make_policy(), []
    policy.register_forward_hook(lambda module, args, out: cells.append(args[0].numel()))
    objective = replace(WIDE, mini_batch_size=2, max_tokens_per_micro_batch=max_tokens)
    old = log_probs_of(make_policy(), batch)
    policy_step(policy, sgd(policy), batch, advantages, objective, old, seed=3)
    assert update.padding_of(batch, objective, seed=3) == 1 - sum(LENGTHS) / sum(cells)
    assert update.padding_of(batch, replace(objective, share_prefix=True)) == 0.0


def test_a_batch_that_shares_too_little_is_padded_instead(batch, monkeypatch):
    """Openings of 2 tokens in 3 groups of two rows: 6 of 51 tokens are computed twice."""
    monkeypatch.setattr(update, "MIN_SHARED", 6 / 51)
    sharing = replace(WIDE, share_prefix=True)
    assert update.decide_sharing(sharing, batch) == sharing
    monkeypatch.setattr(update, "MIN_SHARED", 6.1 / 51)
    assert update.decide_sharing(sharing, batch) == WIDE
    assert update.decide_sharing(WIDE, batch) == WIDE


def test_the_samples_of_a_task_stay_in_one_mini_batch_where_they_fit(batch):
    """Spread over mini-batches, a group would share its opening with few of its samples."""
    objective = replace(WIDE, mini_batch_size=2, ppo_epochs=5)
    for rows in update._mini_batches(batch, objective, seed=3):
        assert len({int(batch.group_ids[row]) for row in rows}) == 1
    orders = {tuple(map(tuple, update._mini_batches(batch, objective, seed))) for seed in range(4)}
    assert len(orders) > 1
