"""losses.py: formulas checked on paper and in slow loops; masks, splits, gradients, errors."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batching import row_weights
from config import Objective
from losses import (
    entropy_from_logits,
    imitation_loss,
    kl_estimate,
    kl_penalized_rewards,
    masked_mean,
    masked_sum,
    policy_loss,
    policy_objective,
    sampler_is_weights,
    value_loss,
)


def log(*numbers):
    """One row of log-probs from probabilities, so tests can be written in terms of ratios."""
    return torch.tensor([numbers], dtype=torch.float64).log()


def ones_row(num_tokens):
    return torch.ones(1, num_tokens, dtype=torch.float64)


def random_batch(seed=0, rows=6, length=10, dtype=torch.float64):
    """(log_probs, old_log_probs, advantages, loss_mask) with many ratios outside the clip range."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=g, dtype=dtype) - 0.1
    new = old + 0.5 * torch.randn(rows, length, generator=g, dtype=dtype)
    advantages = torch.randn(rows, length, generator=g, dtype=dtype)
    return new, old, advantages, (torch.rand(rows, length, generator=g) < 0.6).long()


# -------------------------------------------------------------------- worked examples of the clip
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "reason"),
    [
        (1.0, 2.0, -2.0, -2.0, "at the old policy, the loss and its slope in log π are -A"),
        (1.1, 2.0, -2.2, -2.2, "the clip is not active"),
        (1.5, 2.0, -2.4, 0.0, "a good token is not pushed above 1.2"),
        (0.5, 2.0, -1.0, -1.0, "a good token that became unlikely is pushed back up"),
        (0.5, -2.0, 1.6, 0.0, "a bad token is not pushed below 0.8"),
        (1.5, -2.0, 3.0, 3.0, "a bad token that became likely is pushed down without a clip"),
        (3.0, 0.0, 0.0, 0.0, "without an advantage there is no gradient"),
    ],
)
def test_the_ppo_clip_is_one_sided_for_either_sign(ratio, advantage, loss, gradient, reason):
    log_probs = log(ratio).requires_grad_()
    actual = policy_loss(log_probs, log(1.0), torch.full((1, 1), advantage).double(), ones_row(1))
    (slope,) = torch.autograd.grad(actual.loss, log_probs)
    assert actual.loss.item() == pytest.approx(loss), reason
    assert slope.item() == pytest.approx(gradient), reason
    assert actual.clip_frac.item() == (1.0 if gradient == 0 and advantage else 0.0), reason


def test_the_upper_clip_ratio_moves_only_the_upper_end():
    """DAPO: at ratio 1.25 a good token is still pushed up, and at 0.75 a bad one is clipped."""
    for ratio, advantage, gradient in ((1.25, 2.0, -2.5), (1.3, 2.0, 0.0), (0.75, -2.0, 0.0)):
        log_probs = log(ratio).requires_grad_()
        advantages = torch.full((1, 1), advantage).double()
        loss = policy_loss(log_probs, log(1.0), advantages, ones_row(1), 0.2, clip_ratio_high=0.28)
        (slope,) = torch.autograd.grad(loss.loss, log_probs)
        assert slope.item() == pytest.approx(gradient)


def test_gspo_clips_a_trajectory_as_a_whole():
    """Ratios 2 and 0.5 have the geometric mean 1, so neither token is clipped, and each has half of
    the slope; with 2 and 2 both are."""
    for ratios, gradient in (((2.0, 0.5, 9.0), [-0.5, -0.5, 0.0]), ((2.0, 2.0, 9.0), [0.0] * 3)):
        log_probs = log(*ratios).requires_grad_()
        mask = torch.tensor([[1, 1, 0]])
        loss = policy_loss(log_probs, log(1.0, 1.0, 1.0), ones_row(3), mask, by_sequence=True).loss
        (slopes,) = torch.autograd.grad(loss, log_probs)
        assert slopes[0].tolist() == pytest.approx(gradient)


def test_with_a_ratio_of_the_row_each_token_keeps_its_advantage_and_weight():
    """GSPO-token: at ratio 1 the gradient is that of a ratio per token."""
    log_probs, mask = log(0.3, 0.2, 0.5, 0.9).requires_grad_(), torch.ones(1, 4)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]]).double()
    weights = torch.tensor([[2.0, 1.0, 0.5, 0.1]]).double()
    slopes = [
        torch.autograd.grad(
            policy_loss(
                *(log_probs, log_probs.detach(), advantages, mask),
                is_weights=weights,
                by_sequence=by_sequence,
            ).loss,
            log_probs,
        )[0]
        for by_sequence in (False, True)
    ]
    torch.testing.assert_close(*slopes)
    assert slopes[0][0].tolist() == pytest.approx([-0.5, -0.25, 0.125, 0.025])


# ----------------------------------------------------------------- slow loops from the papers
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(0.1, None), (0.2, 0.28), (0.5, 0.5)]),
    st.booleans(),
    st.booleans(),
)
def test_policy_loss_equals_equation_7_written_as_a_loop(seed, clip, is_weighted, by_sequence):
    """Also with DAPO's upper clip ratio, and with GSPO's ratio of a row."""
    new, old, advantages, loss_mask = random_batch(seed)
    weights = torch.rand_like(new) * 2 if is_weighted else torch.ones_like(new)
    total, clipped, tokens = 0.0, 0, 0
    low, high = clip[0], clip[1] or clip[0]
    for b, t in loss_mask.nonzero().tolist():
        positions = loss_mask[b].nonzero().flatten().tolist() if by_sequence else [t]
        log_ratio = sum((new[b, i] - old[b, i]).item() for i in positions) / len(positions)
        ratio, a = math.exp(log_ratio), advantages[b, t].item()
        clipped_ratio = min(max(ratio, 1 - low), 1 + high)
        total -= weights[b, t].item() * min(ratio * a, clipped_ratio * a)
        clipped += clipped_ratio * a < ratio * a
        tokens += 1
    actual = policy_loss(
        new,
        old,
        advantages,
        loss_mask,
        clip[0],
        is_weights=weights if is_weighted else None,
        clip_ratio_high=clip[1],
        by_sequence=by_sequence,
    )
    assert actual.loss.item() == pytest.approx(total / tokens)
    assert actual.clip_frac.item() == pytest.approx(clipped / tokens)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.2, 0.5, math.inf]))
def test_value_loss_equals_its_definition_written_as_a_loop(seed, value_clip):
    values, old_values, returns, loss_mask = random_batch(seed)
    total, clipped, tokens = 0.0, 0, 0
    for b, t in loss_mask.nonzero().tolist():
        v, v_old, r = values[b, t].item(), old_values[b, t].item(), returns[b, t].item()
        v_clip = min(max(v, v_old - value_clip), v_old + value_clip)
        total += 0.5 * max((v - r) ** 2, (v_clip - r) ** 2)
        clipped += (v_clip - r) ** 2 > (v - r) ** 2
        tokens += 1
    actual = value_loss(values, old_values, returns, loss_mask, value_clip)
    assert actual.loss.item() == pytest.approx(total / tokens)
    assert actual.clip_frac.item() == pytest.approx(clipped / tokens)


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "reason"),
    [
        (0.25, 0.5 * 0.75**2, -0.75, "near the old value, the plain squared error counts"),
        (0.75, 0.5 * 0.5**2, 0.0, "far towards the target, the clipped error counts"),
        (-0.75, 0.5 * 1.75**2, -1.75, "away from the target, the larger plain error counts"),
    ],
)
def test_the_value_clip_stops_only_steps_towards_the_target(value, loss, gradient, reason):
    """Old value 0, target 1, clip 0.5: v_clip = 0.5 for v = 0.75."""
    values = torch.full((1, 1), value, dtype=torch.float64, requires_grad=True)
    actual = value_loss(values, torch.zeros_like(values), torch.ones_like(values), ones_row(1))
    (slope,) = torch.autograd.grad(actual.loss, values)
    assert actual.loss.item() == pytest.approx(loss), reason
    assert slope.item() == pytest.approx(gradient), reason
    assert actual.clip_frac.item() == (gradient == 0.0), reason


# --------------------------------------------------------------- garbage on masked tokens
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ["policy", "value", "k1", "k2", "k3"])
def test_trap_4_garbage_on_masked_tokens_reaches_neither_loss_nor_gradient(name, garbage):
    """Trap 4: multiplying by the mask keeps NaN (NaN · 0 = NaN), which spoils the full batch."""

    def run(batch):
        current = batch[0].clone().requires_grad_()
        if name == "policy":
            out = policy_loss(current, *batch[1:], is_weights=batch[1].exp())
        elif name == "value":
            out = value_loss(current, *batch[1:])
        else:
            out = (masked_mean(kl_estimate(current, batch[1], name, batch[3]), batch[3]),)
        out[0].backward()
        return torch.stack([*out]).detach(), current.grad

    clean = random_batch()
    masked = clean[3] == 0
    dirty = [x.masked_fill(masked, garbage) for x in clean[:3]] + [clean[3]]
    expected, expected_gradient = run(clean)
    actual, actual_gradient = run(dirty)
    assert torch.equal(actual, expected) and torch.equal(actual_gradient, expected_gradient)
    assert (actual_gradient[masked] == 0).all()


def test_garbage_on_masked_tokens_does_not_reach_weights_or_rewards():
    new, old, rewards, loss_mask = random_batch()
    masked = loss_mask == 0
    weights = sampler_is_weights(new.masked_fill(masked, math.nan), old, loss_mask, cap=2.0)
    assert weights.isfinite().all() and (weights[masked] == 0).all()
    actual = kl_penalized_rewards(rewards, new.masked_fill(masked, math.inf), old, loss_mask, 0.1)
    assert actual.isfinite().all()
    assert masked_sum(new.masked_fill(masked, math.nan), loss_mask).isfinite()


@pytest.mark.parametrize("position", range(3))
def test_nan_on_a_policy_token_gives_a_nan_loss_and_no_error(position):
    """The training loop checks for it and skips the step. Hiding it would train on garbage."""
    *inputs, loss_mask = random_batch()
    b, t = loss_mask.nonzero()[0].tolist()
    inputs[position][b, t] = math.nan
    assert policy_loss(*inputs, loss_mask).loss.isnan()
    assert value_loss(*inputs, loss_mask).loss.isnan()


# ------------------------------------------------------------------------------ gradients
def test_the_gradient_flows_only_through_the_current_policy_and_critic():
    batch = random_batch()
    current, old, targets = (x.clone().requires_grad_() for x in batch[:3])
    weights = torch.ones_like(old, requires_grad=True)
    policy_loss(current, old, targets, batch[3], is_weights=weights).loss.backward()
    value_loss(current, old, targets, batch[3]).loss.backward()
    kl_estimate(current, old, "k3").sum().backward()
    assert current.grad is not None
    assert old.grad is None and targets.grad is None and weights.grad is None
    assert not sampler_is_weights(current, old, batch[3], 2.0).requires_grad
    assert not kl_penalized_rewards(targets, current, old, batch[3], 0.1).requires_grad


# ------------------------------------------------------------------------------------- KL
def test_kl_estimators_by_hand():
    """π = 0.5, π_ref = 0.25: log r = −log 2."""
    actual = {k: kl_estimate(log(0.5), log(0.25), k).item() for k in ("k1", "k2", "k3")}
    expected = {"k1": math.log(2), "k2": 0.5 * math.log(2) ** 2, "k3": -0.5 + math.log(2)}
    assert actual == pytest.approx(expected)


def categorical(seed=0):
    """All V values of one token: logits with gradient, log π and log π_ref, (1, V) each."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 6, generator=g, dtype=torch.float64).requires_grad_()
    ref = torch.randn(1, 6, generator=g, dtype=torch.float64).log_softmax(-1)
    return logits, logits.log_softmax(-1), ref


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    _, log_p, ref = categorical()
    p = log_p.exp()
    true_kl = (p * (log_p - ref)).sum()
    torch.testing.assert_close((p * kl_estimate(log_p, ref, estimator)).sum(), true_kl)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k1", lambda log_p, ref: 0.0 * log_p.sum()),
        ("k2", lambda log_p, ref: (log_p.exp() * (log_p - ref)).sum()),
        ("k3", lambda log_p, ref: (ref.exp() * (ref - log_p)).sum()),
    ],
)
def test_as_a_loss_k1_does_nothing_k2_is_reverse_and_k3_forward_kl(estimator, divergence):
    """The trap: an unbiased estimate of KL is not an unbiased estimate of its gradient."""
    logits, log_p, ref = categorical()
    loss = (log_p.exp().detach() * kl_estimate(log_p, ref, estimator)).sum()  # E over samples
    (actual,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence(log_p, ref), logits)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_a_token_that_the_policy_has_eliminated_is_finite(estimator):
    """Trap 32: exp(100) overflows; a clamp behind it would give a gradient of 0 · inf = NaN."""
    log_probs = torch.tensor([[-100.0]], requires_grad=True)
    kl = kl_estimate(log_probs, torch.zeros(1, 1), estimator).clamp(max=10.0)
    kl.sum().backward()
    assert kl.isfinite().all() and log_probs.grad.isfinite().all()


def test_kl_in_the_reward_is_subtracted_only_on_policy_tokens():
    """Trap 1: a misplaced reward is kept in place, so the estimators will reject it."""
    token_rewards = torch.tensor([[0.0, 2.0, 1.0]]).double()
    loss_mask = torch.tensor([[1, 0, 1]])
    actual = kl_penalized_rewards(
        token_rewards, log(0.5, 0.9, 0.5), log(0.25, 0.1, 0.5), loss_mask, 0.1
    )
    assert actual[0].tolist() == pytest.approx([-0.1 * math.log(2), 2.0, 1.0])


# -------------------------------------------------------------------------------- entropy
def test_entropy_by_hand():
    assert entropy_from_logits(torch.zeros(2, 3, 8)).flatten().tolist() == pytest.approx(
        [math.log(8)] * 6
    )
    assert entropy_from_logits(log(0.5, 0.25, 0.25)).item() == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_entropy_is_stable_at_large_logits_and_over_a_large_vocabulary(dtype):
    """A sum of 50,000 equal terms in bf16 would stop growing long before the end."""
    uniform = entropy_from_logits(torch.full((1, 50_000), 300.0, dtype=dtype))
    assert uniform.dtype == torch.float32
    assert uniform.item() == pytest.approx(math.log(50_000), rel=1e-5)
    certain = torch.full((1, 50_000), -3e4, dtype=dtype)
    certain[0, 7] = 3e4
    assert entropy_from_logits(certain).item() == 0.0


def test_forbidden_tokens_have_no_entropy_and_no_gradient():
    logits = torch.tensor([[0.0, -math.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad.isfinite().all()


# ------------------------------------------------------------- the loss of an optimizer step
def batch_of(ref=None):
    """Three policy tokens: ratios 1, 1.5, 0.5; the sampler's log-probs above, below and equal."""
    return SimpleNamespace(
        old_log_probs=log(0.4, 0.4, 0.2, 0.5),
        rollout_log_probs=log(0.5, 0.1, 0.2, 0.1),
        ref_log_probs=ref,
        advantages=torch.tensor([[1.0, 1.0, -2.0, 7.0]]).double(),
        loss_mask=torch.tensor([[1, 1, 1, 0]]),
    )


POLICY = log(0.4, 0.6, 0.1, 0.9), torch.tensor([[1.0, 2.0, 3.0, 9.0]]).double()  # with entropies
CLIPPED = [0.8 * 1.0, 2.0 * 1.2, -1.0 * 2 * 0.8]  # w · min(ρA, clip(ρ)A); w = 0.8, cap 2, 1


def test_the_loss_of_a_step_and_its_metrics_by_hand():
    """Denominator 6, as if three more tokens were in another micro-batch. The signal share of 0.75
    only scales the clipped loss, and the logged loss does not contain it."""
    objective = Objective(entropy_coef=0.1, kl_loss_coef=0.5, kl_estimator="k2", sampler_is_cap=2)
    batch = batch_of(ref=log(0.2, 0.6, 0.4, 0.1))
    loss, metrics = policy_objective(*POLICY, batch, objective, 6, loss_scale=0.75)
    clipped, entropy = -sum(CLIPPED) / 6, (1 + 2 + 3) / 6
    kl = (0.5 * math.log(2) ** 2 + 0 + 0.5 * math.log(4) ** 2) / 6
    terms = -0.1 * entropy + 0.5 * kl
    assert loss.item() == pytest.approx(0.75 * clipped + terms)
    actual = {name: value.item() for name, value in metrics.items()}
    assert actual == pytest.approx(
        {
            "policy/loss": clipped + terms,
            "policy/entropy": entropy,
            "policy/kl": kl,
            "policy/clip_frac": 2 / 6,
            "policy/approx_kl": (0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 6,
            "policy/dual_clip_frac": 0,
            "policy/kl_clamp_frac": 0,
            "policy/log_ratio_clamp_frac": 0,
            "max:policy/kl_max": 4 - 1 - math.log(4),  # k3, although the loss has k2
            "sampler/log_prob_diff_mean": (math.log(1.25) + math.log(4)) / 6,
            "max:sampler/log_prob_diff_max": math.log(4),
            "sampler/is_weight_mean": (0.8 + 2 + 1) / 6,
        }
    )


@pytest.mark.parametrize(("cap", "weights"), [(0, None), (1, (0.8, 1, 1)), (5, (0.8, 4, 1))])
def test_a_step_corrects_for_the_sampler_unless_its_cap_is_0(cap, weights):
    _, metrics = policy_objective(*POLICY, batch_of(), Objective(sampler_is_cap=cap), 3)
    terms = [x / w for x, w in zip(CLIPPED, (0.8, 2, 1))]
    clipped = [x * w for x, w in zip(terms, weights or (1, 1, 1))]
    assert metrics["policy/loss"].item() == pytest.approx(-sum(clipped) / 3)
    assert ("sampler/is_weight_mean" in metrics) == (weights is not None)
    if weights:
        assert metrics["sampler/is_weight_mean"].item() == pytest.approx(sum(weights) / 3)


@pytest.mark.parametrize(
    ("clamp", "kl", "gradient"), [(0, math.exp(7) - 8, 1 - math.exp(7)), (10, 10, 0)]
)
def test_the_kl_clamp_removes_the_gradient_of_tokens_far_from_the_reference(clamp, kl, gradient):
    """Log ratios 7, 1 and 0. Without the clamp, the first token decides the step."""
    log_probs = torch.tensor([[-7.0, -1.0, 0.0, -90.0]]).double().requires_grad_()
    batch = batch_of(ref=torch.zeros(1, 4).double())
    batch.old_log_probs, batch.advantages = None, torch.zeros(1, 4).double()
    objective = Objective(kl_loss_coef=1.0, kl_clamp=clamp, sampler_is_cap=0)
    loss, metrics = policy_objective(log_probs, POLICY[1], batch, objective, 3)
    loss.backward()
    assert (3 * log_probs.grad[0]).tolist() == pytest.approx([gradient, 1 - math.e, 0, 0])
    assert metrics["policy/kl"].item() == pytest.approx((kl + math.e - 2) / 3)
    assert metrics["max:policy/kl_max"].item() == pytest.approx(math.exp(7) - 8)
    assert metrics["policy/kl_clamp_frac"] == pytest.approx(1 / 3 if clamp else 0)


# Ours for each case of tests/measure_trl.py of commit 444bc13, which wrote the numbers. TRL has no
# dual clip and corrects for no sampler here.
TRL_OPTIONS = {
    "grpo": {"loss_agg": "seq-mean", "kl_loss_coef": 0.1, "kl_estimator": "k3"},
    "tokens": {"kl_loss_coef": 0.1, "kl_estimator": "k3"},
    "dapo": {"clip_ratio_high": 0.28},
    "dr_grpo": {"loss_agg": "constant"},
    "gspo": {"loss_agg": "seq-mean", "ratio": "sequence", "clip_ratio": 0.05},
    "entropy": {"entropy_coef": 0.01},
    "rloo": {"loss_agg": "constant"},  # on-policy; TRL sums over a row's tokens
}


@pytest.mark.parametrize("name", TRL_OPTIONS)
def test_losses_and_gradients_equal_those_of_trl(name):
    data = json.loads((Path(__file__).parent / "data/trl.json").read_text())
    x = {key: torch.tensor(value) for key, value in data["input"].items()}
    objective = Objective(sampler_is_cap=0, dual_clip=0, **TRL_OPTIONS[name])
    log_probs, mask = x["log_probs"].requires_grad_(), x["loss_mask"]
    constant = 100.0 if objective.loss_agg == "constant" else None
    weighted = objective.loss_agg != "token-mean"
    batch = SimpleNamespace(
        old_log_probs=None if name == "rloo" else x["old_log_probs"],
        rollout_log_probs=x["old_log_probs"],
        ref_log_probs=x["ref_log_probs"] if objective.kl_loss_coef else None,
        advantages=x["advantages"][:, None].expand(mask.shape),
        loss_mask=mask,
    )
    weights = row_weights(mask, mask, constant) if weighted else None
    denominator = float(mask.sum())
    loss, _ = policy_objective(log_probs, x["entropy"], batch, objective, denominator, weights)
    loss.backward()
    scale = 100 if name == "rloo" else 1
    expected = data["cases"][name]
    torch.testing.assert_close(
        scale * log_probs.grad, torch.tensor(expected["gradient"]), atol=1e-6, rtol=1e-5
    )
    if name != "rloo":  # its value differs: TRL's row has one ratio, ours one per token
        assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)


def test_weighted_imitation_by_hand():
    """Weights 2 and ½: −(2·(−1 − 2) + ½·(−4)) / 3 = 8/3. The denominator ignores the weights."""
    log_probs = torch.tensor([[-1.0, -2.0], [-4.0, math.nan]]).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0]])
    loss = imitation_loss(log_probs, mask, 3, torch.tensor([2, 0.5]))
    loss.backward()
    assert loss.item() == pytest.approx(8 / 3)
    assert log_probs.grad.flatten().tolist() == pytest.approx([-2 / 3, -2 / 3, -0.5 / 3, 0])
    assert imitation_loss(log_probs.detach(), mask, 3).item() == pytest.approx(7 / 3)


# ---------------------------------------------------------------------------- bad inputs
x = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policy_loss(x, x, x[:, :1], x), r"advantages is \(2, 1\), expected \(2, 3\)"),
        (lambda: policy_loss(x, x[0], x, x), r"old_log_probs is \(3,\), expected \(2, 3\)"),
        (lambda: policy_loss(x, x, x, x[:1]), r"loss_mask is \(1, 3\), expected \(2, 3\)"),
        (lambda: policy_loss(x, x, x, x, is_weights=x[0]), r"is_weights is \(3,\), expected"),
        (lambda: value_loss(x, x, x[:, :1], x), r"returns is \(2, 1\), expected \(2, 3\)"),
        (lambda: kl_estimate(x, x[0], "k1"), r"ref_log_probs is \(3,\), expected \(2, 3\)"),
        (lambda: sampler_is_weights(x, x[0], x, cap=2), r"rollout_log_probs is \(3,\), expected"),
        (lambda: kl_penalized_rewards(x, x[0], x, x, 0.1), r"log_probs is \(3,\), expected"),
    ],
)
def test_an_error_names_the_wrong_shape_and_the_expected_one(call, message):
    with pytest.raises(ValueError, match=message):
        call()
