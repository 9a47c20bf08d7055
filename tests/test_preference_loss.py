"""What the losses without a sampler promise: DPO, IPO and SLiC by hand, by loop and against TRL's
trainer; imitation with a weight for each trajectory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from losses import imitation_loss
from models import PolicyModel
from preferences import PREFERENCES, preference_loss

KINDS = list(PREFERENCES)
SETTINGS = [(kind, 0.0) for kind in KINDS] + [("sigmoid", 0.2)]  # and a smoothed one


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def with_h(*h):
    """Arguments of pairs with these h, all of it in the chosen trajectory; a gradient there."""
    zero = torch.zeros(len(h), dtype=torch.float64)
    return vector(*h).requires_grad_(), zero.clone().requires_grad_(), zero, zero


def random_pairs(seed=0, pairs=6, length=10, dtype=torch.float64):
    """Log-probs by token, (4, P, T): chosen, rejected and both of the reference; their mask.

    Those of a trajectory and of its reference share a mask: the first two rows of (2, P, T).
    """
    g = torch.Generator().manual_seed(seed)
    ref = -torch.rand(2, pairs, length, generator=g, dtype=dtype) - 0.1
    now = ref + torch.randn(2, pairs, length, generator=g, dtype=dtype)
    return torch.cat([now, ref]), (torch.rand(2, pairs, length, generator=g) < 0.6).long()


def summed(tokens, mask):
    """Log-probs of trajectories, (P,) four times: what preference_loss takes."""
    return [torch.where(mask[i % 2] > 0, tokens[i], 0.0).sum(-1) for i in range(4)]


# ------------------------------------------------------------------------------------ by hand
# Pair 1: chosen −1 against −3 of the reference, rejected −2 against −2: h = 2 − 0 = 2.
# Pair 2: chosen −4 against −3, rejected −1 against −3: h = −1 − 2 = −3. With β = 0.5, βh = 1, −1.5.
PAIRS = vector(-1, -4), vector(-2, -1), vector(-3, -3), vector(-2, -3)


@pytest.mark.parametrize(
    ("kind", "smoothing", "losses"),
    [
        # log(1 + e⁻¹) = 0.313262, log(1 + e¹·⁵) = 1.701413
        ("sigmoid", 0.0, (0.313262, 1.701413)),
        # 0.9 · 0.313262 + 0.1 · log(1 + e¹) = 0.281936 + 0.131326; 0.9 · 1.701413 + 0.1 · 0.201413
        ("sigmoid", 0.1, (0.413262, 1.551413)),
        ("ipo", 0.0, (1.0, 16.0)),  # 1/2β = 1: (2 − 1)² and (−3 − 1)²
        ("hinge", 0.0, (0.0, 2.5)),  # 1 − 1 and 1 + 1.5
    ],
)
def test_two_pairs_by_hand(kind, smoothing, losses):
    got = preference_loss(*PAIRS, 0.5, smoothing, kind)
    assert got.loss.item() == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert got.chosen_reward.item() == pytest.approx((0.5 * 2 - 0.5 * 1) / 2)
    assert got.rejected_reward.item() == pytest.approx((0 + 0.5 * 2) / 2)
    assert got.margin.item() == pytest.approx((1 - 1.5) / 2)
    assert got.accuracy.item() == 0.5


@pytest.mark.parametrize(("kind", "loss"), [("sigmoid", math.log(2)), ("ipo", 25), ("hinge", 1)])
def test_at_the_reference_nothing_is_preferred(kind, loss):
    """h = 0: log 2, (1/2β)² with β = 0.1, and 1; a margin of 0 is not yet right."""
    got = preference_loss(PAIRS[0], PAIRS[1], PAIRS[0], PAIRS[1], kind=kind)
    assert got.loss.item() == pytest.approx(loss)
    assert [x.item() for x in got[1:]] == [0, 0, 0, 0]


def test_swapping_a_pair_negates_its_margin_and_mirrors_its_loss():
    """f(−h): the loss of a pair and of its swap differ by βh, for log σ(x) − log σ(−x) = x."""
    plus, minus, ref_plus, ref_minus = PAIRS
    there = preference_loss(plus, minus, ref_plus, ref_minus, 0.5)
    back = preference_loss(minus, plus, ref_minus, ref_plus, 0.5)
    assert back.margin.item() == -there.margin.item()
    assert back.accuracy.item() == 1 - there.accuracy.item()
    assert (back.chosen_reward, back.rejected_reward) == (there[4], there[3])
    assert (back.loss - there.loss).item() == pytest.approx(there.margin.item())


def test_the_loss_does_not_fix_the_level_of_the_likelihoods():
    """Both trajectories a million times less likely: the same loss, and only the rewards tell."""
    plus, minus, *references = PAIRS
    before = preference_loss(plus, minus, *references)
    after = preference_loss(plus - math.log(1e6), minus - math.log(1e6), *references)
    assert after.loss.item() == pytest.approx(before.loss.item())
    assert after.margin.item() == pytest.approx(before.margin.item())
    lost = (before.chosen_reward - after.chosen_reward).item()
    assert lost == pytest.approx(0.1 * math.log(1e6))


# ------------------------------------------------------------------------- the slow loop, gradients
def slow_loop(tokens, mask, beta, smoothing, kind):
    """Loss, margin, accuracy and rewards of the equations, pair by pair and token by token."""
    log_sigmoid = lambda x: -math.log1p(math.exp(-x))  # noqa: E731
    tokens, (_, pairs, length) = tokens.tolist(), mask.shape
    totals = [0.0] * 5
    for p in range(pairs):
        ratio = [0.0, 0.0]
        for which in (0, 1):
            for t in range(length):
                if mask[which, p, t]:
                    ratio[which] += tokens[which][p][t] - tokens[which + 2][p][t]
        h = ratio[0] - ratio[1]
        if kind == "sigmoid":
            loss = -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)
        elif kind == "ipo":
            loss = (h - 1 / (2 * beta)) ** 2
        else:
            loss = max(0.0, 1 - beta * h)
        for i, x in enumerate((loss, beta * h, h > 0, beta * ratio[0], beta * ratio[1])):
            totals[i] += x / pairs
    return totals


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.1, 0.7]), st.sampled_from(SETTINGS))
def test_preference_loss_equals_its_equations_written_as_a_loop(seed, beta, setting):
    kind, smoothing = setting
    tokens, mask = random_pairs(seed)
    got = preference_loss(*summed(tokens, mask), beta, smoothing, kind)
    assert [x.item() for x in got] == pytest.approx(slow_loop(tokens, mask, beta, smoothing, kind))


@pytest.mark.parametrize(("kind", "smoothing"), SETTINGS)
def test_the_gradient_on_every_token_is_the_slope_of_the_loop(kind, smoothing):
    """Central differences of the loop, whose hinge is not at its kink anywhere here."""
    tokens, mask = random_pairs(3, pairs=3, length=4)
    inputs = tokens.clone().requires_grad_()
    preference_loss(*summed(inputs, mask), 0.3, smoothing, kind).loss.backward()
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        step = torch.zeros_like(tokens)
        step[tuple(index)] = 1e-5
        up, down = (slow_loop(tokens + s, mask, 0.3, smoothing, kind)[0] for s in (step, -step))
        assert inputs.grad[tuple(index)].item() == pytest.approx((up - down) / 2e-5, abs=1e-6)
    assert (inputs.grad[:2][mask == 0] == 0).all(), "observations teach nothing"
    assert (inputs.grad[2:] == 0).all(), "nor does the reference learn"


@pytest.mark.parametrize(("kind", "smoothing"), SETTINGS)
def test_gradients_match_finite_differences(kind, smoothing):
    plus, minus, *references = summed(*random_pairs(1))
    plus, minus = plus.requires_grad_(), minus.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: preference_loss(a, b, *references, 0.3, smoothing, kind, 9).loss, (plus, minus)
    )


def test_the_gradient_of_dpo_is_beta_times_how_wrong_the_implied_reward_is():
    """∂L/∂chosen = −β σ(−βh) / P (arXiv 2305.18290, section 4), and + for rejected."""
    plus, minus, *references = (x.clone().requires_grad_() for x in summed(*random_pairs()))
    preference_loss(plus, minus, *references, beta=0.4).loss.backward()
    h = (plus - references[0] - minus + references[1]).detach()
    torch.testing.assert_close(plus.grad, -0.4 * torch.sigmoid(-0.4 * h) / 6)
    torch.testing.assert_close(minus.grad, -plus.grad)


def test_the_references_carry_no_gradient_and_the_metrics_neither():
    inputs = [x.clone().requires_grad_() for x in summed(*random_pairs())]
    got = preference_loss(*inputs)
    got.loss.backward()
    assert inputs[2].grad is None and inputs[3].grad is None
    assert not any(x.requires_grad for x in got[1:])


@settings(deadline=None, max_examples=60)
@given(st.floats(-40, 40), st.floats(0.01, 5), st.sampled_from(KINDS))
def test_the_loss_falls_when_chosen_rises_and_rises_when_rejected_does(h, rise, kind):
    """The hinge rests from βh = 1 on; ipo aims at h = 1/2β and turns there: β = 0.01 is below."""
    beta = 0.01 if kind == "ipo" else 0.1
    a, b, *references = with_h(h)
    loss = lambda up, down: preference_loss(a + up, b + down, *references, beta, 0, kind).loss  # noqa: E731
    if kind == "hinge" and beta * h >= 1:
        assert loss(0, 0) == loss(rise, 0) == 0
        assert loss(0, rise) >= 0
    else:
        assert loss(rise, 0) < loss(0, 0) < loss(0, rise)


def test_ipo_aims_at_one_margin_and_pulls_back_from_beyond_it():
    """β = 0.25, so h = 2: slopes −2, 0 and +2 at h = 1, 2 and 3, shared by three pairs."""
    chosen, rejected, *references = with_h(1, 2, 3)
    preference_loss(chosen, rejected, *references, 0.25, kind="ipo").loss.backward()
    assert (3 * chosen.grad).tolist() == pytest.approx([-2, 0, 2])


@pytest.mark.parametrize("smoothing", [0.05, 0.2, 0.4])
def test_with_label_smoothing_the_minimum_is_where_the_odds_are_those_of_a_right_label(smoothing):
    """f′ = 0 at σ(βh) = 1 − ε; without smoothing no margin is enough."""
    best = math.log((1 - smoothing) / smoothing) / 0.1
    chosen, rejected, *references = with_h(best - 1, best, best + 1)
    preference_loss(chosen, rejected, *references, 0.1, smoothing).loss.backward()
    left, at, right = chosen.grad.tolist()
    assert left < -1e-5 and at == pytest.approx(0, abs=1e-12) and right > 1e-5
    got = preference_loss(*with_h(best), 0.1, smoothing).loss.item()
    e = smoothing
    assert got == pytest.approx(-(1 - e) * math.log(1 - e) - e * math.log(e)), "its entropy"


# --------------------------------------------------------------------------- large h, garbage
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "smoothing"), SETTINGS)
def test_saturated_pairs_stay_finite(kind, smoothing, dtype):
    """βh = ±10⁴, where log(sigmoid(x)) is −inf in float32 and its gradient NaN."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in with_h(1e4, -1e4)]
    got = preference_loss(*inputs, 1.0, smoothing, kind)
    got.loss.backward()
    assert all(x.isfinite() for x in got)
    assert inputs[0].grad.isfinite().all() and inputs[1].grad.isfinite().all()
    slope = 2 * inputs[0].grad  # of each pair
    if kind == "sigmoid":
        assert slope.tolist() == pytest.approx([smoothing, smoothing - 1])
        assert got.loss.item() == pytest.approx(1e4 / 2)  # ε · 10⁴ + (1 − ε) · 10⁴ over two pairs
    if kind == "hinge":
        assert slope.tolist() == [0, -1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", range(4))
def test_nan_shows_in_the_loss_without_an_error(kind, position):
    inputs = [x.clone() for x in PAIRS]
    inputs[position][0] = math.nan
    assert preference_loss(*inputs, kind=kind).loss.isnan()


# ------------------------------------------------------------- one denominator for any split
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 5), max_size=4, unique=True),
    st.sampled_from(SETTINGS),
)
def test_the_loss_does_not_depend_on_how_a_mini_batch_of_pairs_is_split(seed, cuts, setting):
    kind, smoothing = setting
    batch = [x.float() for x in summed(*random_pairs(seed))]
    bounds = [0, *sorted(cuts), 6]

    def run(slices):
        inputs = [x.clone().requires_grad_() for x in batch]
        sums = torch.zeros(5)
        for s in slices:
            got = preference_loss(*(x[s] for x in inputs), 0.1, smoothing, kind, denominator=6)
            got.loss.backward()
            sums += torch.stack([*got]).detach()
        return sums, torch.stack([x.grad for x in inputs[:2]])

    whole, split = run([slice(0, 6)]), run([slice(a, b) for a, b in zip(bounds, bounds[1:])])
    for x, y in zip(split, whole):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)
    alone = preference_loss(*batch, 0.1, smoothing, kind)
    torch.testing.assert_close(torch.stack([*alone]), whole[0], atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------ imitation, weighted
def demonstrations(seed=0, rows=5, length=8, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, length, generator=g, dtype=dtype) - 0.1
    mask = (torch.rand(rows, length, generator=g) < 0.6).long()
    return log_probs, mask, torch.rand(rows, generator=g, dtype=dtype) * 2


def test_weighted_imitation_by_hand():
    """Weights 2 and ½: −(2·(−1 − 2) + ½·(−4)) / 3 = 8/3: three tokens, whatever they weigh."""
    log_probs = vector(-1, -2, -4, -9).reshape(2, 2).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0]])
    loss = imitation_loss(log_probs, mask, 3, vector(2, 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(8 / 3)
    assert log_probs.grad.flatten().tolist() == pytest.approx([-2 / 3, -2 / 3, -0.5 / 3, 0])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([None, 17.0]))
def test_weighted_imitation_equals_its_definition_written_as_a_loop(seed, denominator):
    log_probs, mask, weights = demonstrations(seed)
    total, slope = 0.0, torch.zeros_like(log_probs)
    tokens = denominator or int(mask.sum())
    for b, t in mask.nonzero().tolist():
        total -= weights[b].item() * log_probs[b, t].item() / tokens
        slope[b, t] = -weights[b] / tokens
    inputs = log_probs.clone().requires_grad_()
    loss = imitation_loss(inputs, mask, denominator, weights)
    loss.backward()
    assert loss.item() == pytest.approx(total)
    torch.testing.assert_close(inputs.grad, slope)
    assert torch.autograd.gradcheck(lambda x: imitation_loss(x, mask, denominator, weights), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_of_1_is_no_weight_bit_for_bit(dtype):
    log_probs, mask, _ = demonstrations(dtype=dtype)
    got = {}
    for weights in (None, torch.ones(5, dtype=dtype)):
        inputs = log_probs.clone().requires_grad_()
        loss = imitation_loss(inputs, mask, 20, weights)
        loss.backward()
        got[weights is None] = (loss, inputs.grad)
    assert all(torch.equal(a, b) for a, b in zip(got[True], got[False]))
    assert got[True][0].dtype == dtype


def test_a_weight_of_0_teaches_nothing_and_still_counts_its_tokens():
    log_probs, mask, weights = demonstrations()
    weights[2] = 0
    inputs = log_probs.clone().requires_grad_()
    loss = imitation_loss(inputs, mask, None, weights)
    loss.backward()
    assert (inputs.grad[2] == 0).all() and (inputs.grad[1][mask[1] > 0] < 0).all()
    without = imitation_loss(
        log_probs[[0, 1, 3, 4]], mask[[0, 1, 3, 4]], None, weights[weights > 0]
    )
    rows = mask[[0, 1, 3, 4]].sum() / mask.sum()
    assert loss.item() == pytest.approx((without * rows).item())
    assert imitation_loss(log_probs, mask, None, torch.zeros(5)).item() == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weighted", [False, True])
def test_garbage_on_masked_tokens_reaches_neither_loss_nor_gradient(garbage, weighted):
    log_probs, mask, weights = demonstrations()
    weights[0] = 0  # 0 · NaN is NaN

    def run(log_probs):
        inputs = log_probs.clone().requires_grad_()
        loss = imitation_loss(inputs, mask, None, weights if weighted else None)
        loss.backward()
        return loss, inputs.grad

    clean, dirty = run(log_probs), run(log_probs.masked_fill(mask == 0, garbage))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))
    assert (dirty[1][mask == 0] == 0).all()


def test_no_gradient_reaches_the_weights():
    log_probs, mask, weights = demonstrations()
    log_probs.requires_grad_()
    weights.requires_grad_()
    imitation_loss(log_probs, mask, None, weights).backward()
    assert log_probs.grad is not None and weights.grad is None


# ------------------------------------------------------------------- against TRL's trainers
WORDS = [f"w{i}" for i in range(40)]
ROWS = [  # single-turn, of different lengths
    dict(prompt="w1 w2 w3", chosen=" w4 w5", rejected=" w6 w7 w8 w9 w10"),
    dict(prompt="w11", chosen=" w12 w13 w14 w15", rejected=" w16"),
    dict(prompt="w17 w18", chosen=" w19 w20 w21", rejected=" w22 w23 w24"),
]


@pytest.fixture
def trl(monkeypatch):
    """TRL, where it is installed; what it leaves behind in the process is taken back."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    reason = "pip install 'trl==1.16.*' datasets: not among the requirements"
    pytest.importorskip("datasets", reason=reason)
    module = pytest.importorskip("trl", reason=reason)
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    AcceleratorState._reset_state(reset_partial_state=True)


def tiny_model(seed):
    torch.manual_seed(seed)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))


def words_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<unk>", *WORDS])}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def trainer_of(trl, name, rows, folder, **settings):
    """A trainer of TRL's with a tiny model, and the batch that its own pipeline makes of rows."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    columns = {key: [row[key] for row in rows] for key in rows[0]}
    # A name of its own spares `datasets` the hashing of its content, as in benchmarks/.
    dataset = Dataset(InMemoryTable.from_pydict(columns), fingerprint=f"{name}_loss")
    config = getattr(trl, f"{name}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(rows),
        report_to="none",
        **settings,
    )
    trainer = getattr(trl, f"{name}Trainer")(
        model=tiny_model(0),
        args=config,
        train_dataset=dataset,
        processing_class=words_tokenizer(),
        **({"ref_model": tiny_model(1)} if name == "DPO" else {}),
    )
    trainer.model.train()
    return trainer, next(iter(trainer.get_train_dataloader()))


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def our_sums(trainer, batch):
    """What preference_loss takes, of the trainer's models and batch by our own forward pass."""
    sums = []
    for lm in (trainer.model, trainer.ref_model):
        policy = PolicyModel(lm, share_prefix=False)
        log_probs, _ = policy(batch["input_ids"], batch["completion_mask"])
        sums += masked_rows(log_probs, batch["completion_mask"]).chunk(2)  # chosen, rejected
    return sums


def masked_rows(log_probs, mask):
    return torch.where(mask > 0, log_probs, 0.0).sum(-1)


@pytest.mark.parametrize("observed", [False, True], ids=["single_turn", "observation_between"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_loss_of_trls_dpo_trainer(trl, tmp_path, kind, observed):
    """β, mean over pairs, sums over completion tokens, rewards: as TRL 1.16 has them, but for ipo,
    which there divides either log-ratio by the number of its completion tokens."""
    trainer, batch = trainer_of(trl, "DPO", ROWS, tmp_path, beta=0.3, loss_type=[kind])
    if observed:  # the second token after the prompt of each longer row is the world's
        mask = batch["completion_mask"]
        mask[(mask.cumsum(-1) == 2) & (mask.sum(-1, keepdim=True) > 2)] = 0
    theirs = trainer.compute_loss(trainer.model, batch)
    sums = our_sums(trainer, batch)
    if kind == "ipo":
        lengths = batch["completion_mask"].sum(-1).chunk(2)
        ours = preference_loss(*(x / lengths[i % 2] for i, x in enumerate(sums)), 0.3, kind=kind)
    else:
        ours = preference_loss(*sums, 0.3, kind=kind)
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    for a, b in zip(gradients(trainer.model, ours.loss), gradients(trainer.model, theirs)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    metrics = preference_loss(*sums, 0.3)[1:]
    names = ("rewards/margins", "rewards/accuracies", "rewards/chosen", "rewards/rejected")
    assert [x.item() for x in metrics] == pytest.approx([logged[n] for n in names], abs=1e-5)


def test_label_smoothing_is_that_of_trls_aot_loss_on_one_pair(trl, tmp_path):
    """TRL's "sigmoid" ignores label_smoothing. Its "aot" has our term, on h that are sorted first,
    which does nothing to a single pair."""
    trainer, batch = trainer_of(
        trl, "DPO", ROWS[:1], tmp_path, beta=0.3, loss_type=["aot"], label_smoothing=0.2
    )
    theirs = trainer.compute_loss(trainer.model, batch)
    ours = preference_loss(*our_sums(trainer, batch), 0.3, 0.2).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_imitation_is_the_loss_of_trls_sft_trainer(trl, tmp_path):
    """Mean over completion tokens of a global number of them; ours takes a mask, TRL's labels."""
    rows = [dict(prompt=row["prompt"], completion=row["chosen"]) for row in ROWS]
    trainer, batch = trainer_of(trl, "SFT", rows, tmp_path)
    mask = (batch["labels"] != -100).long()
    log_probs, _ = PolicyModel(trainer.model, share_prefix=False)(batch["input_ids"], mask)
    for tokens in (None, 20):
        theirs = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=tokens)
        ours = imitation_loss(log_probs, mask, tokens, torch.ones(len(rows)))
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        for a, b in zip(gradients(trainer.model, ours), gradients(trainer.model, theirs)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------ what is refused
x, p = torch.zeros(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: preference_loss(p, p[:1], p, p), r"\[\(2,\), \(1,\), \(2,\), \(2,\)\], expected"),
        (lambda: preference_loss(p, p, p, p[:1]), r"\(2,\), \(1,\)\], expected \(pairs,\) each"),
        (lambda: preference_loss(x, x, x, x), r"sum the log-probs of a trajectory over its policy"),
        (lambda: preference_loss(p[0], p[0], p[0], p[0]), r"\[\(\), .*expected \(pairs,\) each"),
        (lambda: preference_loss(p[:0], p[:0], p[:0], p[:0]), r"no pairs; skip a mini-batch that"),
        (lambda: preference_loss(p, p, p, p, beta=0.0), r"beta is 0.0; it must be positive and fi"),
        (lambda: preference_loss(p, p, p, p, beta=-1), r"beta is -1; it must be positive and fini"),
        (lambda: preference_loss(p, p, p, p, beta=math.inf), r"beta is inf; it must be positive a"),
        (lambda: preference_loss(p, p, p, p, beta=math.nan), r"beta is nan; it must be positive a"),
        (lambda: preference_loss(p, p, p, p, kind="dpo"), r"'dpo'; .* one of sigmoid, ipo, hinge"),
        (lambda: preference_loss(p, p, p, p, 0.1, 0.5), r"smoothing is 0.5; it must be in \[0, 0"),
        (lambda: preference_loss(p, p, p, p, 0.1, -0.1), r"smoothing is -0.1; it must be in \[0,"),
        (lambda: preference_loss(p, p, p, p, 0.1, math.nan), r"smoothing is nan; it must be in \["),
        (lambda: preference_loss(p, p, p, p, 0.1, 0.1, "ipo"), r"is 0.1; with ipo it must be 0"),
        (lambda: preference_loss(p, p, p, p, 0.1, 0.1, "hinge"), r"is 0.1; with hinge it must be"),
        (lambda: preference_loss(p, p, p, p, denominator=0), r"denominator is 0; .* the pairs of"),
        (lambda: preference_loss(p, p, p, p, denominator=-2), r"denominator is -2; it must be the"),
        (lambda: preference_loss(p, p, p, p, denominator=math.inf), r"denominator is inf; it must"),
        (lambda: imitation_loss(x, x[:, :1], 1), r"loss_mask is \(2, 1\), expected \(2, 3\)"),
        (lambda: imitation_loss(x, x, 1, p[:1]), r"weights is \(1,\), expected \(2,\): one for e"),
        (lambda: imitation_loss(x, x, 1, x), r"weights is \(2, 3\), expected \(2,\): one for each"),
        (lambda: imitation_loss(x, x, 1, p - 1), r"weights are \[-1.0, -1.0\]; each must be finit"),
        (lambda: imitation_loss(x, x, 1, p / 0), r"weights are \[nan, nan\]; each must be finite"),
        (lambda: imitation_loss(x, x, 1, (p + 1) / 0), r"weights are \[inf, inf\]; each must be f"),
        (lambda: imitation_loss(x, x, 0, p), r"denominator is 0; it must be the number of policy"),
    ],
)
def test_misuse_is_refused_with_what_was_got_and_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
