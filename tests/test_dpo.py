"""dpo.py: the loss by hand and as a loop, the choice of pairs, pair files, and updates with
different micro-batch sizes."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fakes import byte_tokenizer, ids_of, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import sampled_trajectory
from toy_env import fresh_process_state
from two_ranks import make_batch, make_policy

import dpo
import update
from chat import ChatTemplate
from config import Misuse, Objective
from conversations import read_records, record_of
from data import Example, encode, parts_of, to_agenttraj
from dpo import (
    PREFERENCES,
    DpoConfig,
    Pair,
    batch_of,
    format_pair,
    pairs_of,
    pairs_of_experts,
    parse_pair,
    preference_loss,
    read_pairs,
)
from scale import distributed
from scale.prefix import opening_length
from update import Learner, score_policy

KINDS = list(PREFERENCES)


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def random_pairs(seed=0, pairs=6, length=10, dtype=torch.float64):
    """Log-probs per token, (4, P, T): chosen, rejected, and the same two under the reference. And
    their mask (2, P, T), which a trajectory shares with its reference."""
    g = torch.Generator().manual_seed(seed)
    ref = -torch.rand(2, pairs, length, generator=g, dtype=dtype) - 0.1
    now = ref + torch.randn(2, pairs, length, generator=g, dtype=dtype)
    return torch.cat([now, ref]), (torch.rand(2, pairs, length, generator=g) < 0.6).long()


def summed(tokens, mask):
    """Log-probs of trajectories, four times (P,): the first arguments of preference_loss."""
    return [torch.where(mask[i % 2] > 0, tokens[i], 0.0).sum(-1) for i in range(4)]


# --- The loss by hand -----------------------------------------------------------------------------
# Pair 1: chosen −1, reference −3; rejected −2, reference −2: h = 2 − 0 = 2.
# Pair 2: chosen −4, reference −3; rejected −1, reference −3: h = −1 − 2 = −3.
# Pair 3: equal to the reference, h = 0. With β = 0.5, βh = 1, −1.5, 0. Accuracy needs βh > 0.
PAIRS = vector(-1, -4, -5), vector(-2, -1, -6), vector(-3, -3, -5), vector(-2, -3, -6)


@pytest.mark.parametrize(
    ("kind", "losses"),
    [
        # log(1 + e⁻¹) = 0.313262, log(1 + e¹·⁵) = 1.701413, log 2
        ("sigmoid", (0.313262, 1.701413, 0.693147)),
        ("ipo", (1.0, 16.0, 1.0)),  # 1/2β = 1: (2 − 1)², (−3 − 1)² and (0 − 1)²
        ("hinge", (0.0, 2.5, 1.0)),  # 1 − 1, 1 + 1.5 and 1 − 0
    ],
)
def test_three_pairs_by_hand(kind, losses):
    result = preference_loss(*PAIRS, 0.5, kind)
    assert result.loss.item() == pytest.approx(sum(losses) / 3, abs=1e-6)
    assert result.chosen_reward.item() == pytest.approx((0.5 * 2 - 0.5 * 1) / 3)
    assert result.rejected_reward.item() == pytest.approx((0 + 0.5 * 2) / 3)
    assert result.margin.item() == pytest.approx((1 - 1.5) / 3)
    assert result.accuracy.item() == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="sum the log-probs of a trajectory"):
        preference_loss(*([torch.zeros(2, 3)] * 4))


# --- The slow loop, gradients ---------------------------------------------------------------------


def slow_loop(tokens, mask, beta, kind):
    """Loss, margin, accuracy and rewards from their equations, by pair and token."""
    tokens, (_, pairs, length) = tokens.tolist(), mask.shape
    totals = [0.0] * 5
    for p in range(pairs):
        ratio = [0.0, 0.0]
        for side in (0, 1):
            for t in range(length):
                if mask[side, p, t]:
                    ratio[side] += tokens[side][p][t] - tokens[side + 2][p][t]
        h = ratio[0] - ratio[1]
        if kind == "sigmoid":
            loss = math.log1p(math.exp(-beta * h))
        elif kind == "ipo":
            loss = (h - 1 / (2 * beta)) ** 2
        else:
            loss = max(0.0, 1 - beta * h)
        for i, x in enumerate((loss, beta * h, h > 0, beta * ratio[0], beta * ratio[1])):
            totals[i] += x / pairs
    return totals


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.05, 0.1, 0.7]),
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 5), max_size=4, unique=True),
)
def test_the_loss_equals_a_loop_over_its_equations_for_every_split(seed, beta, kind, cuts):
    tokens, mask = random_pairs(seed)
    sums, bounds = torch.zeros(5, dtype=torch.float64), [0, *sorted(cuts), 6]
    for part in map(slice, bounds, bounds[1:]):
        inputs = (x[part] for x in summed(tokens, mask))
        sums += torch.stack([*preference_loss(*inputs, beta, kind, denominator=6)])
    assert sums.tolist() == pytest.approx(slow_loop(tokens, mask, beta, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_every_token_equals_central_differences_of_the_loop(kind):
    """No pair is at the kink of the hinge loss."""
    tokens, mask = random_pairs(3, pairs=3, length=4)
    inputs = tokens.clone().requires_grad_()
    result = preference_loss(*summed(inputs, mask), 0.3, kind)
    assert not any(x.requires_grad for x in result[1:])
    result.loss.backward()
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        step = torch.zeros_like(tokens)
        step[tuple(index)] = 1e-5
        up, down = (slow_loop(tokens + s, mask, 0.3, kind)[0] for s in (step, -step))
        assert inputs.grad[tuple(index)].item() == pytest.approx((up - down) / 2e-5, abs=1e-6)
    assert (inputs.grad[:2][mask == 0] == 0).all(), "observations have no gradient"
    assert (inputs.grad[2:] == 0).all(), "the reference has no gradient"


def test_saturated_pairs_stay_finite():
    """βh = ±10⁴, where log(sigmoid(x)) is −inf in float32 and its gradient NaN."""
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    result = preference_loss(chosen, *([torch.zeros(2)] * 3), 1.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1e4 / 2)  # (0 + 10⁴) over two pairs
    assert (2 * chosen.grad).tolist() == pytest.approx([0, -1])


# --- The update (trap 14) -------------------------------------------------------------------------


def make_learner(rank=0):
    accelerator = distributed.make_accelerator("no")
    model = distributed.shard(accelerator, make_policy(rank).train())
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Learner(accelerator, model, torch.optim.SGD(trainable, lr=1.0))


def weights_after(update_of, rank=0):
    with fresh_process_state(), mock.patch.object(update, "MIN_SHARED", 0.0):
        learner = make_learner(rank)
        metrics = update_of(learner)
        return metrics, {n: p.detach().clone() for n, p in learner.model.named_parameters()}


OBJECTIVE = Objective(mini_batch_size=64, max_grad_norm=1e9, share_prefix=False)
CUTS = [
    {"max_tokens_per_micro_batch": 10_000},
    {"max_tokens_per_micro_batch": 14},
    {"max_tokens_per_micro_batch": 40, "share_prefix": True},
    {"max_tokens_per_micro_batch": 10_000, "share_prefix": True},
]


def assert_equal(weights, expected):
    for name, weight in expected.items():
        largest = weight.abs().max()
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=float(1e-5 * largest))


def pair_batch():
    """Four pairs of different lengths. The rows of a pair share an opening of three tokens."""
    batch = make_batch().rows([0, 1, 2, 3, 5, 6, 9, 10])
    batch.group_ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    for row in range(0, 8, 2):
        batch.input_ids[row + 1, :3] = batch.input_ids[row, :3]
    batch.loss_mask[:, :4] = 0.0
    batch.loss_mask[:, 4] = 1.0
    generator = torch.Generator().manual_seed(5)
    batch.ref_sums = -torch.rand(8, generator=generator) * 40
    return batch


@pytest.mark.parametrize(
    ("kind", "changes", "rank"),
    [
        *(("sigmoid", cut, rank) for cut in CUTS for rank in (0, 4)),
        *((k, CUTS[1], 0) for k in KINDS),
    ],
)
def test_an_update_equals_a_slow_one_for_all_micro_batch_sizes(kind, changes, rank):
    batch, config = pair_batch(), DpoConfig(beta=0.2, loss=kind, sft_coef=0.3)
    metrics, weights = weights_after(
        lambda learner: dpo.prefer(learner, batch, replace(OBJECTIVE, **changes), config), rank
    )

    def slow_update(learner):
        sums, tokens = [], []
        for row in range(len(batch)):
            b = batch.rows([row])
            log_probs, _ = learner.model(b.input_ids, b.loss_mask, 1.0)
            policy_log_probs = [log_probs[0, t] for t in range(int(b.lengths)) if b.loss_mask[0, t]]
            sums.append(sum(policy_log_probs[1:], policy_log_probs[0]))
            tokens.append(len(policy_log_probs))
        losses = []
        for i in range(0, len(batch), 2):
            pair = [x.reshape(1) for x in (sums[i], sums[i + 1])]
            ref = [batch.ref_sums[i + k].reshape(1) for k in (0, 1)]
            losses.append(preference_loss(*pair, *ref, 0.2, kind).loss)
            losses[-1] = losses[-1] - 0.3 * sums[i] / tokens[i]
        loss = sum(losses) / len(losses)
        loss.backward()
        learner.optimizer.step()
        per_token = [-s / n for s, n in zip(sums[::2], tokens[::2], strict=True)]
        parts = {"chosen_log_prob": sums[::2], "rejected_log_prob": sums[1::2]}
        parts |= {"sft_loss": per_token}
        return float(loss.detach()), {n: float(sum(x).detach()) / 4 for n, x in parts.items()}

    (loss, means), expected = weights_after(slow_update, rank)
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
    for name, mean in means.items():
        assert metrics[f"preference/{name}"] == pytest.approx(mean, rel=1e-5), name
    assert metrics["policy/optimizer_steps"] == 1
    assert_equal(weights, expected)


def test_reference_sums_equal_the_scored_log_probs(monkeypatch):
    batch = pair_batch()
    rows_of = lambda pairs, _: batch.rows([r for n in pairs for r in (2 * n, 2 * n + 1)])  # noqa: E731
    monkeypatch.setattr(dpo, "batch_of", rows_of)
    is_stopped = False
    with fresh_process_state():
        worker = SimpleNamespace(
            device="cpu",
            config=DpoConfig(mini_batch_size=6),  # eight rows: parts of six and two
            stop=SimpleNamespace(agreed=lambda: is_stopped),
            pad_id=0,
            sleep_sampler=lambda: None,
            objective_for=lambda rows: replace(OBJECTIVE, mini_batch_size=rows),
            policy=make_learner(),
        )
        sums = dpo.reference_sums(worker, range(4))
        log_probs = score_policy(worker.policy.model, batch, OBJECTIVE, "cpu")
        assert sums.shape == (4, 2)
        torch.testing.assert_close(sums.flatten(), (log_probs * batch.loss_mask).sum(1))
        is_stopped = True  # Ctrl-C works between the parts
        with pytest.raises(KeyboardInterrupt):
            dpo.reference_sums(worker, range(4))


# --- Pairs by hand --------------------------------------------------------------------------------

ALL = DpoConfig(min_gap=0.0, min_return=-10.0, pairs_per_task=10**6)
WORDS = ChatTemplate(word_tokenizer())


def episode(task, texts, total=None, observation="dark", prompt="rules", **extra):
    """An episode whose `texts` are actions and answers in turn, e.g. "open, bright, light"."""
    roles = ("assistant", "user") * 20
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts.split(", "), strict=False)]
    opening = [{"role": "system", "content": prompt}, {"role": "user", "content": observation}]
    record = to_agenttraj(task, opening + messages, (len(messages) + 1) // 2) | extra
    return encode(WORDS, record if total is None else record | {"return": total})


def texts_of(example):
    return ", ".join(turn["value"] for turn in example.record["conversations"][2:])


def described(pairs):
    return [(p.task_id, texts_of(p.chosen), texts_of(p.rejected), p.gap) for p in pairs]


def pairs_and_counts(*sources, **options):
    counts: Counter[str] = Counter()
    make = pairs_of if len(sources) == 1 else pairs_of_experts
    return make(*sources, DpoConfig(**options), counts), dict(counts)


def test_three_episodes_of_one_task_by_hand():
    episodes = [
        episode("t", "take, dark, go", 0.0),
        episode("t", "open, dark, light", 1.0),
        episode("t", "open, dark, home", 0.5),
    ]
    best, middle, worst = "open, dark, light", "open, dark, home", "take, dark, go"
    pairs, counts = pairs_and_counts(episodes)
    assert described(pairs)[0] == ("t", best, worst, 1.0)
    assert sorted(described(pairs)[1:]) == [("t", middle, worst, 0.5), ("t", best, middle, 0.5)]
    assert counts == {}
    pairs, counts = pairs_and_counts(episodes, min_gap=0.75)
    assert (described(pairs), counts) == ([("t", best, worst, 1.0)], {"gap": 2})
    pairs, counts = pairs_and_counts(episodes, min_return=1.0)
    assert [pair[:3] for pair in described(pairs)] == [("t", best, worst), ("t", best, middle)]
    assert counts == {"low return": 1}
    pairs, counts = pairs_and_counts(episodes, pairs_per_task=1)
    assert (described(pairs), counts) == ([("t", best, worst, 1.0)], {"over pairs per task": 2})
    nearly = episode("t", "home", 0.6 + 0.39999999999999997 - 1e-16)
    pairs, _ = pairs_and_counts([nearly, episode("t", "go", 0.0)], min_gap=1.0, min_return=1.0)
    assert len(pairs) == 1, "a rounding error is not a difference"
    with pytest.raises(ValueError, match='conversation b has no "return"'):
        pairs_and_counts([*episodes, episode("b", "go")])


def test_episodes_with_two_seeds_are_not_compared_even_with_equal_openings():
    episodes = [
        episode("a", text, total, seed=seed)
        for text, total, seed in (("open", 1.0, 7), ("go", 0.0, 7), ("take", 0.0, 8))
    ]
    pairs, counts = pairs_and_counts(episodes)
    assert (described(pairs), counts) == ([("a", "open", "go", 1.0)], {"two seeds": 2})
    expert = [episode("a", "light", 1.0)]  # with an unknown seed
    assert len(pairs_of_experts(expert, episodes, DpoConfig(), Counter())) == 2


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("open", "open"),
        ("open, bright, go", "open, dark, go"),  # only the environment's answers differ
        ("open, bright", "open, dark"),  # the sequence ends with the last action
    ],
)
def test_equal_actions_with_different_returns_do_not_form_a_pair(better, worse):
    episodes = [episode("a", better, 1.0), episode("a", worse, 0.0)]
    assert pairs_and_counts(episodes) == ([], {"equal texts": 1})


def test_an_expert_is_preferred_to_the_policy():
    expert = [episode("a", "light"), episode("b", "light"), episode("d", "take")]
    experience = [
        episode("a", "go", 0.0),
        episode("a", "light", 1.0),  # like the expert
        episode("b", "go", 0.0, observation="bright"),
        episode("c", "go", 0.0),
        episode("d", "wait", 1.0),
    ]
    pairs, counts = pairs_and_counts(expert, experience)
    assert described(pairs) == [("a", "light", "go", None), ("d", "take", "wait", None)]
    assert counts == {"equal texts": 1, "no partner": 3}  # b twice, and c
    # If both have returns, the returns decide.
    expert = [episode("a", "light", 1.0), episode("a", "open", 0.5), episode("b", "light", 1.0)]
    experience = [episode("a", "go", 0.0), episode("a", "wait", 0.7), episode("b", "go", 1.0)]
    pairs, counts = pairs_and_counts(expert, experience, min_return=0.75)
    assert described(pairs) == [("a", "light", "go", 1.0)]
    assert counts == {"gap": 2, "low return": 1, "no partner": 1}
    assert pairs_and_counts(expert[:2], []) == ([], {"no partner": 1}), (
        "two experts are not compared"
    )


# --- Properties -----------------------------------------------------------------------------------

EPISODES = st.lists(
    st.builds(
        lambda task, observation, actions, total: episode(
            task, ", ".join(actions), total, observation
        ),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["dark", "bright"]),
        st.lists(st.sampled_from(["go", "open"]), min_size=1, max_size=3),
        st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]),
    ),
    max_size=12,
)
OPTIONS = st.builds(
    DpoConfig,
    min_gap=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    min_return=st.sampled_from([-1.0, 0.0, 0.5]),
    pairs_per_task=st.integers(0, 4),
    seed=st.integers(0, 3),
)


@settings(deadline=None)
@given(EPISODES, OPTIONS, st.randoms(use_true_random=False))
def test_every_comparison_is_either_a_valid_pair_or_counted_once(episodes, config, rng):
    counts: Counter[str] = Counter()
    pairs = pairs_of(episodes, config, counts)
    for pair in pairs:
        chosen, rejected = pair
        assert pair.task_id == chosen.task_id == rejected.task_id
        assert chosen.parts[0] == rejected.parts[0] and chosen.parts[1] != rejected.parts[1]
        assert pair.gap == chosen.total_return - rejected.total_return
        assert pair.gap > 0 and pair.gap >= config.min_gap
        assert chosen.total_return >= config.min_return
    per_task = Counter(pair.task_id for pair in pairs)
    assert all(count <= config.pairs_per_task for count in per_task.values())
    texts = [(p.chosen.parts, p.rejected.parts) for p in pairs]
    assert len(set(texts)) == len(texts)
    for task in per_task:
        gaps = [pair.gap for pair in pairs if pair.task_id == task]
        assert gaps == sorted(gaps, reverse=True)
    groups: dict = {}
    for example in episodes:
        key = (example.task_id, example.parts[0])
        groups.setdefault(key, []).append(example.total_return)
    unequal = [group for group in groups.values() if len(set(group)) > 1]
    num_compared = sum(len(list(combinations(group, 2))) for group in unequal)
    assert counts["no partner"] == len(groups) - len(unequal)
    assert len(pairs) + counts.total() - counts["no partner"] == num_compared
    other_counts: Counter[str] = Counter()
    shuffled = pairs_of(rng.sample(episodes, len(episodes)), config, other_counts)
    assert described(shuffled) == described(pairs) and other_counts == counts, "in any order"


def test_the_choice_among_equal_gaps_depends_only_on_seed_and_task():
    episodes = [episode("a", f"{x}, dark, go", 1.0) for x in ("open", "light", "take", "home")]
    episodes += [episode("a", f"{x}, dark, no", 0.0) for x in ("open", "light", "take", "home")]
    alone, _ = pairs_and_counts(episodes, seed=1)
    other_task = [episode("0", "go", 1.0), episode("0", "no", 0.0)]
    together, _ = pairs_and_counts(other_task + episodes, seed=1)
    assert [pair for pair in together if pair.task_id == "a"] == alone
    choices = {json.dumps(described(pairs_and_counts(episodes, seed=s)[0])) for s in range(8)}
    assert len(choices) > 4


def test_only_as_many_pairs_are_scored_as_the_steps_use():
    pairs = [Pair(episode(f"{n}", "go"), episode(f"{n}", "no")) for n in range(9)]
    config = DpoConfig(pairs=("x",), steps=2, mini_batch_size=4)
    sample = dpo.sample_for_steps(pairs, config, 0)
    assert len(sample) == 4 and sample == sorted(sample, key=pairs.index)
    assert dpo.sample_for_steps(pairs, replace(config, seed=1), 0) != sample
    assert dpo.sample_for_steps(pairs[:3], config, 0) == pairs[:3]


# --- Tokens (traps 6 and 22) ----------------------------------------------------------------------


def test_rows_contain_the_sampled_ids_also_if_pairs_come_from_files():
    chat = ChatTemplate(byte_tokenizer())
    first = sampled_trajectory(chat, 1, 1.0)
    second = sampled_trajectory(chat, 1, 0.0, "failure", last="Action: wait")
    pairs, _ = pairs_and_counts([Example(record_of(t), t) for t in (second, first)])
    two_pairs = batch_of([*pairs, *pairs], 0)
    assert two_pairs.group_ids.tolist() == [0, 0, 1, 1]
    assert opening_length(two_pairs.rows([2, 3])) >= first.turns[0].action_span[0]
    parsed = [parse_pair(json.loads(json.dumps(format_pair(pair))), "", chat) for pair in pairs]
    assert described(parsed) == described(pairs)
    for source in (pairs, parsed):
        batch = batch_of(source, 0)
        for b, handler in enumerate((first, second)):
            length = int(batch.lengths[b])
            assert batch.input_ids[b, :length].tolist() == handler.input_ids
            assert batch.loss_mask[b, :length].tolist() == handler.loss_mask


# --- Files ----------------------------------------------------------------------------------------

HUMAN = {"from": "human", "value": "dark"}


def gpt(*texts):
    names = ("gpt", "human") * 9
    return [{"from": name, "value": text} for name, text in zip(names, texts, strict=False)]


GOOD = {"id": "a", "prompt": [HUMAN], "chosen": gpt("open"), "rejected": gpt("go", "dark", "no")}
OTHER = GOOD | {"id": "b"} | {"chosen": gpt("light")}


def read(path, text, config=ALL):
    path.write_text(text)
    counts: Counter[str] = Counter()
    return read_pairs(WORDS, [path], config, counts), dict(counts)


SAME = {
    "plain texts": {"id": "a", "prompt": "dark", "chosen": "open", "rejected": "go"},
    "messages": {
        "item_id": "a",
        "prompt": [{"role": "user", "content": "dark"}],
        "chosen": [{"role": "assistant", "content": "open"}],
        "rejected": [{"role": "assistant", "content": "go"}],
    },
    "a whole conversation, and one in a record": {
        "chosen": [HUMAN, *gpt("open")],
        "rejected": {"item_id": "a", "conversations": [HUMAN, *gpt("go")]},
    },
    "a prompt that both sides repeat": {
        "item_id": "a",
        "prompt": "dark",
        "chosen": [{"role": "user", "content": "dark"}, {"role": "assistant", "content": "open"}],
        "rejected": [HUMAN, *gpt("go")],
    },
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_of_a_pair_gives_the_same_tokens(form):
    pair = parse_pair(SAME[form], "x", WORDS)
    expected = batch_of([parse_pair(GOOD | {"rejected": gpt("go")}, "x", WORDS)], 0)
    assert pair.task_id == "a"
    assert batch_of([pair], 0).input_ids.tolist() == expected.input_ids.tolist()
    assert batch_of([pair], 0).loss_mask.tolist() == expected.loss_mask.tolist()


def test_prompts_and_actions_with_weight_0_are_not_learned():
    prompt = [HUMAN, {"from": "gpt", "loss": True, "value": "home"}, HUMAN]
    first = {"role": "assistant", "content": "open", "weight": 0}
    turns = [first, {"role": "user", "content": "dark"}, {"role": "assistant", "content": "go"}]
    rejected = [*turns[:2], turns[2] | {"content": "no"}]
    for content, actions in (
        (GOOD | {"prompt": prompt}, "open<e>go<e>no<e>"),
        ({"prompt": "dark", "chosen": turns, "rejected": rejected}, "go<e>no<e>"),
    ):
        batch = batch_of([parse_pair(content, "x", WORDS)], 0)
        assert batch.input_ids[batch.loss_mask == 1].tolist() == ids_of(actions)


def test_returns_in_a_file_count_and_the_first_pairs_of_a_task_are_used(tmp_path):
    lines = [
        GOOD | {"chosen": gpt(text)} | dict(zip(("chosen_return", "rejected_return"), returns))
        for text, *returns in (
            *(("open", 1.0, 0.9), ("open", 0.4, -1.0), ("open", 1.0, 0.0)),
            ("light", 0.6),  # one return is not a gap
            ("wait", 0.1),  # but it can be below min_return
            ("home",),
        )
    ]
    config = DpoConfig(min_return=0.5, pairs_per_task=2)
    pairs, counts = read(tmp_path / "a.json", json.dumps(lines), config)
    assert [pair.gap for pair in pairs] == [1.0, None]
    assert counts == {"gap": 1, "low return": 2, "over pairs per task": 1}


def test_each_side_can_have_a_task_id_and_a_return():
    chosen, rejected = (episode("maze_7", text).record for text in ("open", "go"))
    sides = {"chosen": chosen | {"reward": 1.0}, "rejected": rejected | {"return": 0.25}}
    pair = parse_pair({"id": 17} | sides, "x", WORDS)
    assert (pair.task_id, pair.gap) == ("maze_7", 0.75)
    assert parse_pair(GOOD | {"id": 17, "item_id": "maze_7"}, "x", WORDS).task_id == "maze_7"


RECORDS = [episode("a", "open").record, episode("b", "go").record]
LIT = episode("a", "go", observation="bright").record
WRONG = [
    ({"prompt": 1, "text": 2}, "{'prompt': 1, 'text': 2}: expected {"),
    (dict(zip(("chosen", "rejected"), RECORDS)), "need the same item_id, not a and b"),
    (GOOD | {s: {"seed": s, "messages": "go"} for s in ("chosen", "rejected")}, "same seed"),
    (GOOD | {"chosen": "dark open", "rejected": "dark go"}, "both sides repeat the prompt"),
    (GOOD | {"chosen": {"conversations": gpt("open"), "score_weight": 1}}, "has score_weight"),
    (GOOD | {"messages": [{"role": "user", "content": "bright"}]}, "has messages, which"),
    ({"chosen": RECORDS[0], "rejected": LIT}, "must be equal before the first action"),
    (GOOD | {"prompt": [HUMAN, "b"]}, "expected text, or a list of"),
    (GOOD | {"chosen": gpt("open") + gpt("go")}, "chosen: conversation a: turn 2 is from gpt"),
    (GOOD | {"chosen": [HUMAN | {"value": "lit"}, *gpt("go")]}, "nor repeats the prompt"),
    (GOOD | {"rejected": [gpt("go")[0] | {"thinking": "no"}]}, "turn 1 has thinking"),
    (GOOD | {"system": "rules"}, "has system, which is not read"),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_an_error_names_the_problem_and_its_line(tmp_path, content, message):
    file = tmp_path / "a.jsonl"
    with pytest.raises(ValueError) as error:
        read(file, "\n".join(map(json.dumps, (GOOD, content, OTHER))))
    problem = str(error.value)
    assert problem.startswith(f"{file}, line 2") and message in problem and "\n" not in problem


def test_pairs_come_from_the_files_in_the_options(tmp_path, monkeypatch):
    monkeypatch.setattr(dpo, "chat_of", lambda config: WORDS)
    files = {name: (str(tmp_path / f"{name}.json"),) for name in ("pairs", "data", "a", "b")}
    openings = (("x", "dark"), ("y", "bright"))
    wins = [episode(task, "open", 1.0, text).record for task, text in openings]
    losses = [episode(task, "go", 0.0, text).record for task, text in openings]
    for name, content in (("pairs", [GOOD]), ("data", wins + losses), ("a", wins), ("b", losses)):
        Path(*files[name]).write_text(json.dumps(content))

    def pairs(**options):
        return dpo.load_pairs(DpoConfig(eval_every=0, **options))

    assert [pair.task_id for pair in pairs(pairs=files["pairs"])] == ["a"]
    for options in ({"data": files["data"]}, {"expert": files["a"], "experience": files["b"]}):
        assert [(pair.task_id, pair.gap) for pair in pairs(**options)] == [("x", 1.0), ("y", 1.0)]
    with pytest.raises(Misuse, match="0 pairs; left out: 2 no partner; a pair needs"):
        pairs(data=files["a"])
    with pytest.raises(Misuse, match="11 leaves none of the pairs; raise it"):
        pairs(pairs=files["pairs"], max_trajectory_tokens=11)  # only the chosen side fits


def test_the_examples_of_the_page_are_read(tmp_path):
    page = (Path(dpo.__file__).parent / "docs/data.md").read_text(encoding="utf-8")
    blocks = {part.split("\n")[0]: part for part in page.split("\n## ")}
    texts = {name: re.findall(r"```json\n(.*?)```", part, re.S) for name, part in blocks.items()}
    file = tmp_path / "data.json"
    file.write_text(f"[{','.join(texts['Conversations'])}]", encoding="utf-8")
    first, second = read_records([file])
    assert first["item_id"] == second["item_id"] == "maze_7" and first["return"] == 1
    assert len(parts_of(first)[0]) == 1 and len(parts_of(second)[0]) == 0
    file.write_text("\n".join(json.dumps(json.loads(text)) for text in texts["Pairs"]))
    chat, counts = ChatTemplate(byte_tokenizer()), Counter()
    pairs = read_pairs(chat, [file], DpoConfig(), counts)
    assert [pair.task_id[-2:] for pair in pairs] == ["_7", ":2", ":3"] and not counts


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"min_return": math.nan}, "--min-return nan must be finite"),
        ({"beta": 0.0}, "--beta 0.0 must be above 0"),
        ({"mini_batch_size": 5}, "--mini-batch-size 5 must be even"),
        ({"pairs": ("x",), "data": ("x",)}, "--pairs, --data and --expert are alternative"),
        ({"group_size": 1}, "--group-size 1 must be at least 2"),
        ({"steps": 5, "iterations": 2}, "--steps 5 is not a multiple of --iterations 2"),
        ({"pairs": ("nosuch.json",)}, "--pairs nosuch.json does not exist"),
    ],
)
def test_contradicting_options_are_refused(changes, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x").touch()
    with pytest.raises(Misuse, match=problem):
        DpoConfig(**changes).check()
    DpoConfig().check()
