"""pairs.py: who is compared with whom, what is left out and counted, and what of it is learned."""

import json
import random
from collections import Counter
from itertools import combinations

import pytest
from fakes import byte_tokenizer, draw, ids_of, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from chat import ChatTemplate
from conversations import read_conversations, to_agenttraj
from pairs import (
    Pair,
    PairSettings,
    encode_pairs,
    from_agentgym,
    pairs_of,
    pairs_of_experts,
    read_pairs,
    to_agentgym,
    why_left_out,
)
from scale.prefix import opening_length
from trajectory import RolloutHandler

ALL = PairSettings(min_gap=0.0, min_return=-10.0, pairs_per_task=10**6)


@pytest.fixture(scope="module")
def words():
    return ChatTemplate(word_tokenizer())


@pytest.fixture(scope="module")
def letters():
    return ChatTemplate(byte_tokenizer())


def played(task, texts, earned=None, observation="dark", prompt="rules"):
    """An episode: `texts` are actions and answers in turn, "open, bright, light"."""
    roles = ("assistant", "user") * 20
    said = [{"role": r, "content": t} for r, t in zip(roles, texts.split(", "), strict=False)]
    opening = [{"role": "system", "content": prompt}, {"role": "user", "content": observation}]
    record = to_agenttraj(task, opening + said)
    return record if earned is None else record | {"return": earned}


def texts_of(record):
    return ", ".join(turn["value"] for turn in record["conversations"][2:])


def shown(pairs):
    return [(p.task_id, texts_of(p.chosen), texts_of(p.rejected), p.gap) for p in pairs]


def pairs_and_counts(*sources, **options):
    counts: Counter[str] = Counter()
    make = pairs_of if len(sources) == 1 else pairs_of_experts
    return make(*sources, PairSettings(**options), counts), dict(counts)


# ------------------------------------------------------------------------------------- by hand


def test_three_tries_at_one_task_by_hand():
    tries = [
        played("t", "take, dark, go", 0.0),
        played("t", "open, dark, light", 1.0),
        played("t", "open, dark, home", 0.5),
    ]
    best, middle, worst = "open, dark, light", "open, dark, home", "take, dark, go"
    pairs, counts = pairs_and_counts(tries)
    assert shown(pairs)[0] == ("t", best, worst, 1.0)
    assert sorted(shown(pairs)[1:]) == [("t", middle, worst, 0.5), ("t", best, middle, 0.5)]
    assert counts == {}
    pairs, counts = pairs_and_counts(tries, min_gap=0.75)
    assert (shown(pairs), counts) == ([("t", best, worst, 1.0)], {"gap": 2})
    pairs, counts = pairs_and_counts(tries, min_return=1.0)
    assert [pair[:3] for pair in shown(pairs)] == [("t", best, worst), ("t", best, middle)]
    assert counts == {"low return": 1}
    pairs, counts = pairs_and_counts(tries, pairs_per_task=1)
    assert (shown(pairs), counts) == ([("t", best, worst, 1.0)], {"over pairs per task": 2})


def test_who_opens_otherwise_is_no_partner():
    tries = [
        played("a", "open", 1.0),
        played("a", "go", 0.0, observation="bright"),  # another seed's world
        played("a", "take", 0.0, prompt="home"),  # told something else
        played("b", "light", 0.0),  # another task that opens alike
    ]
    pairs, counts = pairs_and_counts(tries)
    assert (pairs, counts) == ([], {"no partner": 4})


def test_who_played_under_another_seed_is_no_partner_though_it_opens_alike():
    tries = [
        played("a", text, earned) | {"seed": seed}
        for text, earned, seed in (("open", 1.0, 7), ("go", 0.0, 7), ("take", 0.0, 8))
    ]
    pairs, counts = pairs_and_counts(tries)
    assert (shown(pairs), counts) == ([("a", "open", "go", 1.0)], {"two seeds": 2})
    expert = [played("a", "light", 1.0)]  # of a seed that nobody noted
    assert len(pairs_of_experts(expert, tries, PairSettings(), Counter())) == 2


def test_worlds_of_one_task_share_what_it_may_have():
    tries = [
        played("a", "open", 1.0),
        played("a", "go", 0.0),
        played("a", "light", 1.0, observation="bright"),
        played("a", "wait", 0.4, observation="bright"),
    ]
    pairs, counts = pairs_and_counts(tries, pairs_per_task=1)
    assert shown(pairs) == [("a", "open", "go", 1.0)]
    assert counts == {"over pairs per task": 1}


def test_of_equal_returns_nobody_is_better_even_where_any_gap_will_do():
    tries = [played("a", text, 0.5) for text in ("open", "go", "take")]
    assert pairs_and_counts(tries, min_gap=0.0) == ([], {"no partner": 1})
    tries.append(played("a", "light", 0.6))
    pairs, counts = pairs_and_counts(tries, min_gap=0.0)
    assert (len(pairs), counts) == (3, {"gap": 3})


def test_a_return_that_lacks_a_rounding_error_is_enough():
    tries = [played("a", "open", 0.6 + 0.39999999999999997 - 1e-16), played("a", "go", 0.0)]
    pairs, _ = pairs_and_counts(tries, min_gap=1.0, min_return=1.0)
    assert len(pairs) == 1


def test_equal_texts_with_different_returns_are_no_preference():
    pairs, counts = pairs_and_counts([played("a", "open", 1.0), played("a", "open", 0.0)])
    assert (pairs, counts) == ([], {"equal texts": 1})
    # The world told them apart, not the policy.
    tries = [played("a", "open, bright, go", 1.0), played("a", "open, dark, go", 0.0)]
    assert pairs_and_counts(tries) == ([], {"equal texts": 1})
    # An answer to the last action is not in the sequence.
    tries = [played("a", "open, bright", 1.0), played("a", "open, dark", 0.0)]
    assert pairs_and_counts(tries) == ([], {"equal texts": 1})


def test_a_pair_that_says_what_another_says_is_left_out():
    tries = [played("a", text, e) for text, e in (("open", 1.0), ("go", 0.0), ("go", 0.25))]
    pairs, counts = pairs_and_counts(tries)
    assert (shown(pairs), counts) == ([("a", "open", "go", 1.0)], {"gap": 1, "equal texts": 1})
    # Neither does an answer to the last action make a difference: it is not in the sequence.
    tries = [played("a", f"go, {answer}", 0.0) for answer in ("dark", "bright")]
    pairs, counts = pairs_and_counts([*tries, played("a", "open", 1.0)])
    assert (len(pairs), counts) == (1, {"gap": 1, "equal texts": 1})


def test_what_another_pair_says_is_left_out_also_where_the_gap_differs():
    tries = [played("a", text, e) for text, e in (("open", 1.0), ("go", 0.0), ("go", 0.25))]
    pairs, counts = pairs_and_counts(tries, min_gap=0.3)
    assert (shown(pairs), counts) == ([("a", "open", "go", 1.0)], {"gap": 1, "equal texts": 1})


def test_groups_of_unequal_length_by_hand():
    tries = [played("a", f"open, dark, {text}", 0.0) for text in ("go", "wait", "no")]
    tries += [played("a", "light", 1.0), played("b", "light", 1.0)]
    tries += [played("c", "light", 1.0), played("c", "wait", 0.9)]
    pairs, counts = pairs_and_counts(tries, pairs_per_task=2)
    assert [pair.task_id for pair in pairs] == ["a", "a"]
    assert counts == {"gap": 3 + 1, "over pairs per task": 1, "no partner": 1}


def test_what_has_no_return_is_named():
    with pytest.raises(ValueError, match='conversation b has no "return"; expected one'):
        pairs_and_counts([played("a", "open", 1.0), played("b", "go")])
    with pytest.raises(ValueError, match='conversation b: "return" is nan, expected a finite'):
        pairs_and_counts([played("b", "go", float("nan"))])
    with pytest.raises(ValueError, match="conversation a has no gpt turn with loss"):
        pairs_and_counts([to_agenttraj("a", [{"role": "user", "content": "dark"}]) | {"return": 1}])


def test_no_conversations_make_no_pairs():
    assert pairs_and_counts([]) == ([], {})
    assert pairs_and_counts([], []) == ([], {})


# ------------------------------------------------------------------------------------- experts


def test_an_expert_is_preferred_to_what_the_policy_did():
    expert = [played("a", "light"), played("b", "light"), played("d", "take")]
    experience = [
        played("a", "go", 0.0),
        played("a", "light", 1.0),  # as the expert did
        played("b", "go", 0.0, observation="bright"),
        played("c", "go", 0.0),
        played("d", "wait", 1.0),
    ]
    pairs, counts = pairs_and_counts(expert, experience)
    assert shown(pairs) == [("a", "light", "go", None), ("d", "take", "wait", None)]
    assert counts == {"equal texts": 1, "no partner": 3}  # b twice, and c


def test_where_both_have_returns_they_decide():
    expert = [played("a", "light", 1.0), played("a", "open", 0.5), played("b", "light", 1.0)]
    experience = [played("a", "go", 0.0), played("a", "wait", 0.7), played("b", "go", 1.0)]
    pairs, counts = pairs_and_counts(expert, experience, min_return=0.75)
    assert shown(pairs) == [("a", "light", "go", 1.0)]
    assert counts == {"gap": 2, "low return": 1, "no partner": 1}


def test_what_an_expert_did_is_not_compared_with_another_expert():
    expert = [played("a", "light", 1.0), played("a", "open", 0.0)]
    assert pairs_and_counts(expert, []) == ([], {"no partner": 1})


# ------------------------------------------------------------------------------------- properties

RETURNS = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0])
TRIES = st.lists(
    st.builds(
        lambda task, observation, actions, earned: played(
            task, ", ".join(actions), earned, observation
        ),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["dark", "bright"]),
        st.lists(st.sampled_from(["go", "open"]), min_size=1, max_size=3),
        RETURNS,
    ),
    max_size=12,
)
SETTINGS = st.builds(
    PairSettings,
    min_gap=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    min_return=st.sampled_from([-1.0, 0.0, 0.5]),
    pairs_per_task=st.integers(0, 4),
    seed=st.integers(0, 3),
)


def opening_of(record):
    return record["conversations"][:2]


@given(TRIES, SETTINGS)
def test_every_pair_is_of_one_task_one_opening_and_a_gap(tries, settings):
    counts: Counter[str] = Counter()
    pairs = pairs_of(tries, settings, counts)
    for pair in pairs:
        chosen, rejected = pair.chosen, pair.rejected
        assert chosen in tries and rejected in tries
        assert pair.task_id == chosen["item_id"] == rejected["item_id"]
        assert opening_of(chosen) == opening_of(rejected)
        assert pair.gap == chosen["return"] - rejected["return"]
        assert pair.gap > 0 and pair.gap >= settings.min_gap
        assert chosen["return"] >= settings.min_return
        assert chosen["conversations"] != rejected["conversations"]
    per_task = Counter(pair.task_id for pair in pairs)
    assert all(count <= settings.pairs_per_task for count in per_task.values())
    said = [json.dumps([p.chosen["conversations"], p.rejected["conversations"]]) for p in pairs]
    assert len(set(said)) == len(said)
    for task in per_task:
        gaps = [pair.gap for pair in pairs if pair.task_id == task]
        assert gaps == sorted(gaps, reverse=True)


@given(TRIES, SETTINGS)
def test_every_comparison_is_a_pair_or_counted_once(tries, settings):
    counts: Counter[str] = Counter()
    pairs = pairs_of(tries, settings, counts)
    groups: dict[str, list] = {}
    for record in tries:
        key = json.dumps([record["item_id"], opening_of(record)])
        groups.setdefault(key, []).append(record["return"])
    with_a_better = [g for g in groups.values() if len(set(g)) > 1]
    compared = sum(len(list(combinations(group, 2))) for group in with_a_better)
    assert counts["no partner"] == len(groups) - len(with_a_better)
    assert len(pairs) + counts.total() - counts["no partner"] == compared


@given(TRIES, SETTINGS, st.randoms(use_true_random=False))
def test_the_order_of_what_is_given_changes_nothing(tries, settings, rng):
    first: Counter[str] = Counter()
    second: Counter[str] = Counter()
    shuffled = rng.sample(tries, len(tries))
    assert pairs_of(tries, settings, first) == pairs_of(shuffled, settings, second)
    assert first == second
    first.clear(), second.clear()
    others, experts = rng.sample(tries, len(tries)), rng.sample(tries, len(tries))
    assert pairs_of_experts(tries, tries, settings, first) == pairs_of_experts(
        experts, others, settings, second
    )
    assert first == second


def test_a_task_chooses_among_equals_by_seed_whatever_else_there_is():
    tries = [played("a", f"{x}, dark, go", 1.0) for x in ("open", "light", "take", "home")]
    tries += [played("a", f"{x}, dark, no", 0.0) for x in ("open", "light", "take", "home")]
    alone, _ = pairs_and_counts(tries, seed=1)
    others = [played("0", "go", 1.0), played("0", "no", 0.0)]
    together, _ = pairs_and_counts(others + tries, seed=1)
    assert [pair for pair in together if pair.task_id == "a"] == alone
    choices = {json.dumps(shown(pairs_and_counts(tries, seed=s)[0])) for s in range(8)}
    assert len(choices) > 4


TEXTS = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n\r\u2028\ufeff'), max_size=8
)


@st.composite
def any_pairs(draw):
    """Pairs with and without returns, with ids, of episodes of any texts, and a loss or none."""
    opening = [(who, None, draw(TEXTS)) for who in ("human", "gpt", "human")]
    item_id = draw(TEXTS.filter(bool) | st.integers(0, 9))

    def side(first):
        turns = opening + [("gpt", True, first)]
        for _ in range(draw(st.integers(0, 2))):
            turns += [("human", None, draw(TEXTS)), ("gpt", draw(st.booleans()), draw(TEXTS))]
        turns += [("human", None, draw(TEXTS))] * draw(st.integers(0, 1))
        said = [dict(zip(("from", "loss", "value"), turn, strict=True)) for turn in turns]
        said[3]["ids"] = draw(st.lists(st.integers(0, 99), max_size=3))
        return {"item_id": item_id, "conversations": said}

    chosen, rejected = side("a" + draw(TEXTS)), side("b" + draw(TEXTS))
    gap = None
    if draw(st.booleans()):
        chosen["return"], rejected["return"] = 0.5, draw(st.floats(-5, 0))
        gap = chosen["return"] - rejected["return"]
    return Pair(str(item_id), chosen, rejected, gap)


def observation_of(pair):
    return pair.chosen["conversations"][2]["value"]


@given(
    st.lists(any_pairs(), min_size=1, max_size=3, unique_by=observation_of),
    st.booleans(),
    st.booleans(),
)
def test_what_is_written_is_read_again(tmp_path_factory, pairs, as_list, is_ascii):
    contents = [to_agentgym(pair) for pair in pairs]
    assert [from_agentgym(content, "") for content in contents] == pairs
    dump = lambda each: json.dumps(each, ensure_ascii=is_ascii)  # noqa: E731
    file = tmp_path_factory.mktemp("pairs") / "pairs.json"
    file.write_text(dump(contents) if as_list else "\n".join(map(dump, contents)), "utf-8")
    counts: Counter[str] = Counter()
    assert read_pairs([file], ALL, counts) == pairs
    assert not counts


@given(TRIES, SETTINGS)
def test_the_pairs_of_a_run_are_the_same_from_their_file(tmp_path_factory, tries, settings):
    pairs = pairs_of(tries, settings, Counter())
    pairs += pairs_of_experts([played("e", "no")], [played("e", "wait", 0.0)], settings, Counter())
    if pairs:
        file = tmp_path_factory.mktemp("pairs") / "pairs.json"
        file.write_text(json.dumps(list(map(to_agentgym, pairs))))
        counts: Counter[str] = Counter()
        assert read_pairs([file], settings, counts) == pairs
        assert not counts


def test_files_that_note_what_is_not_learned_each_in_its_way_make_the_same_pair(tmp_path, words):
    expert, other = played("a", "take, dark, light"), played("a", "go, dark, wait, dark, no", 0.0)
    for turn in other["conversations"][:2]:
        turn["loss"] = False
    del other["conversations"][4]["loss"]  # an action of which nothing is said
    pairs, _ = pairs_and_counts([expert], [other])
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(list(map(to_agentgym, pairs))))
    read = read_pairs([file], ALL, Counter())
    both = [encode_pairs(words, each, 0) for each in (pairs, read)]
    assert both[0].loss_mask.tolist() == both[1].loss_mask.tolist()
    assert both[1].input_ids[both[1].loss_mask == 1].tolist() == ids_of("take<e>light<e>go<e>no<e>")
    assert read[0].rejected["conversations"][:2] == pairs[0].rejected["conversations"][:2]


# ------------------------------------------------------------------------------------- files

HUMAN = {"from": "human", "value": "dark"}


def gpt(*texts):
    names = ("gpt", "human") * 9
    return [{"from": name, "value": text} for name, text in zip(names, texts, strict=False)]


GOOD = {"id": "a", "prompt": [HUMAN], "chosen": gpt("open"), "rejected": gpt("go", "dark", "no")}
OTHER = GOOD | {"id": "b"} | {"chosen": gpt("light")}


def read(path, text, settings=ALL):
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    counts: Counter[str] = Counter()
    return read_pairs([path], settings, counts), dict(counts)


FORMS = {
    "a list": lambda lines: json.dumps(lines),
    "a list, indented": lambda lines: json.dumps(lines, indent=1),
    "a line each": lambda lines: "\n".join(map(json.dumps, lines)),
    "with CRLF": lambda lines: "\r\n".join(map(json.dumps, lines)) + "\r\n",
    "with a byte-order mark": lambda lines: "\ufeff" + "\r\n".join(map(json.dumps, lines)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_pair_file_holds_the_same(tmp_path, form):
    pairs, counts = read(tmp_path / "pairs.json", FORMS[form]([GOOD, OTHER]))
    assert counts == {}
    assert [pair.task_id for pair in pairs] == ["a", "b"]
    assert pairs[0].gap is None
    assert pairs[0].chosen == {
        "item_id": "a",
        "conversations": [HUMAN, {"from": "gpt", "loss": True, "value": "open"}],
    }
    assert [turn["value"] for turn in pairs[0].rejected["conversations"]] == [
        *("dark", "go", "dark", "no")
    ]


SAME = {
    "plain texts": {"id": "a", "prompt": "dark", "chosen": "open", "rejected": "go"},
    "messages": {
        "item_id": "a",
        "prompt": [{"role": "user", "content": "dark"}],
        "chosen": [{"role": "assistant", "content": "open"}],
        "rejected": [{"role": "assistant", "content": "go"}],
    },
    "two whole conversations": {
        "id": "a",
        "chosen": [HUMAN, *gpt("open")],
        "rejected": [HUMAN, *gpt("go")],
    },
    "two records": {
        "chosen": played("a", "open") | {"conversations": [HUMAN, *gpt("open")]},
        "rejected": {
            "item_id": "a",
            "messages": [
                {"role": "user", "content": "dark"},
                {"role": "assistant", "content": "go"},
            ],
        },
    },
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_of_a_pair_is_the_same_to_a_model(tmp_path, words, form):
    pairs, _ = read(tmp_path / "a.json", json.dumps([SAME[form]]))
    assert [pair.task_id for pair in pairs] == ["a"]
    wanted = read(tmp_path / "b.json", json.dumps([GOOD | {"rejected": gpt("go")}]))[0]
    batches = [encode_pairs(words, each, 0) for each in (pairs, wanted)]
    assert batches[0].input_ids.tolist() == batches[1].input_ids.tolist()
    assert batches[0].loss_mask.tolist() == batches[1].loss_mask.tolist()


def test_what_the_prompt_shows_is_not_learned(tmp_path, words):
    prompt = [HUMAN, {"from": "gpt", "loss": True, "value": "home"}, HUMAN]
    messages = [
        {"role": "system", "content": "rules"},
        *({"role": role, "content": "dark"} for role in ("user", "assistant", "user")),
    ]
    lines = [GOOD | {"prompt": prompt}, GOOD | {"id": "b", "prompt": messages}]
    pairs, _ = read(tmp_path / "a.json", json.dumps(lines))
    batch = encode_pairs(words, pairs, 0)
    learned = batch.input_ids[batch.loss_mask == 1].tolist()
    assert learned == 2 * ids_of("open<e>go<e>no<e>")


def test_an_action_of_no_weight_is_not_learned(tmp_path, words):
    first = {"role": "assistant", "content": "open", "weight": 0}
    turns = [first, {"role": "user", "content": "dark"}, {"role": "assistant", "content": "go"}]
    pair = {
        "prompt": "dark",
        "chosen": turns,
        "rejected": [*turns[:2], turns[2] | {"content": "no"}],
    }
    pairs, _ = read(tmp_path / "a.json", json.dumps([pair]))
    assert pairs[0].task_id == "a.json:1"
    batch = encode_pairs(words, pairs, 0)
    assert batch.input_ids[batch.loss_mask == 1].tolist() == ids_of("go<e>no<e>")
    # Actions that are not learned are what the sides open with: here they differ.
    other = pair | {"rejected": [turns[0] | {"content": "no"}, *turns[1:]]}
    with pytest.raises(ValueError, match="line 1: chosen and rejected open with different prompts"):
        read(tmp_path / "a.json", json.dumps([other]))


def test_of_a_file_too_gaps_and_numbers_are_kept_to(tmp_path):
    def line(item_id, text, *earned):
        returns = zip(("chosen_return", "rejected_return"), earned, strict=False)
        return GOOD | {"id": item_id, "chosen": gpt(text)} | dict(returns)

    lines = [
        line("a", "open", 1.0, 0.9),
        line("a", "open", 0.0, 1.0),
        line("a", "open", 0.4, -1.0),
        line("a", "open", 1.0, 0.0),
        line("a", "open", 1.0, 0.0),
        line("a", "light", 0.6),  # one return is no gap
        line("a", "wait", 0.1),  # but may be too little for an example
        line("a", "home"),
        line("b", "home"),
        line("c", "take") | {"rejected": gpt("take")},
        line("c", "take"),
        line("d", "take"),  # the same under another name
    ]
    settings = PairSettings(min_return=0.5, pairs_per_task=2)
    pairs, counts = read(tmp_path / "a.json", json.dumps(lines), settings)
    assert [(pair.task_id, pair.gap) for pair in pairs] == [
        *(("a", 1.0), ("a", None), ("b", None), ("c", None))
    ]
    assert counts == {"gap": 2, "low return": 2, "equal texts": 3, "over pairs per task": 1}


def test_what_a_task_may_have_and_what_is_the_same_is_counted_over_all_files(tmp_path):
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file, texts in zip(files, (("open", "light"), ("open", "wait", "go on")), strict=True):
        lines = [GOOD | {"id": "a", "chosen": gpt(text)} for text in texts]
        file.write_text(json.dumps(lines))
    counts: Counter[str] = Counter()
    pairs = read_pairs(files, PairSettings(pairs_per_task=3), counts)
    assert [p.chosen["conversations"][1]["value"] for p in pairs] == ["open", "light", "wait"]
    assert counts == {"equal texts": 1, "over pairs per task": 1}


def test_both_sides_may_name_the_task_and_say_what_they_earned_as_conversations_do(tmp_path):
    sides = {"chosen": played("maze_7", "open"), "rejected": played("maze_7", "go")}
    for side, earned in (("chosen", {"reward": 1.0}), ("rejected", {"return": 0.25})):
        sides[side] = {k: v for k, v in sides[side].items() if k != "return"} | earned
    (pair,) = read(tmp_path / "x", json.dumps({"id": 17} | sides))[0]
    assert (pair.task_id, pair.gap) == ("maze_7", 0.75)
    named = GOOD | {"id": 17, "item_id": "maze_7"}
    assert read(tmp_path / "x", json.dumps(named))[0][0].task_id == "maze_7"


HALF = "\ud83d"
WRONG = {
    "broken JSON": ('{"id": ', "line 2 is no JSON"),
    "no object": ("3", 'line 2: 3: expected {"id", "prompt", "chosen", "rejected"}'),
    "another object": ('{"prompt": 1, "text": 2}', "['prompt', 'text']: expected {"),
    "nothing to reject": ({"prompt": "dark", "chosen": "open"}, "['prompt', 'chosen']: expected"),
    "two tasks": (
        {"chosen": played("a", "open"), "rejected": played("b", "go")},
        "a pair of two tasks (a, b), expected two trajectories of one",
    ),
    "sides of another task": (GOOD | {"chosen": {"item_id": "c"}}, "a pair of two tasks (a, c)"),
    "two prompts": (
        {"chosen": played("a", "open"), "rejected": played("a", "go", observation="bright")},
        "chosen and rejected open with different prompts, expected the same messages",
    ),
    "an empty prompt": (GOOD | {"prompt": []}, "prompt: it is empty, expected {"),
    "a prompt without a word": (GOOD | {"prompt": ""}, "prompt: it is empty, expected {"),
    "an empty chosen": (GOOD | {"chosen": []}, "chosen: it is empty, expected {"),
    "a chosen without a word": (GOOD | {"chosen": ""}, "chosen: it is empty, expected {"),
    "an empty rejected": (GOOD | {"rejected": None}, "rejected: it is empty, expected {"),
    "an empty record": (GOOD | {"rejected": {"conversations": []}}, "rejected: it is empty"),
    "a number": (GOOD | {"chosen": 3}, "chosen: 3: expected {"),
    "turns that are none": (GOOD | {"chosen": ["open"]}, "chosen: ['open']: expected {"),
    "a prompt of an action": (
        GOOD | {"prompt": [HUMAN, *gpt("go")]},
        "prompt: ends with a turn from 'gpt', expected human, the first observation",
    ),
    "no turn of gpt": (GOOD | {"chosen": [HUMAN]}, "chosen: turn 0 is from 'human', expected gpt"),
    "no turn of gpt in the whole": (
        {"chosen": [HUMAN], "rejected": [HUMAN, *gpt("go")]},
        "chosen: conversation a.jsonl:2 has no gpt turn with loss",
    ),
    "nothing before": ({"chosen": "open", "rejected": "go"}, "no observation stands before"),
    "nothing that is learned": (
        GOOD | {"rejected": [gpt("go")[0] | {"loss": None}]},
        "rejected: conversation a has no gpt turn with loss",
    ),
    "an unknown role": (
        GOOD | {"prompt": [{"role": "tool", "content": "x"}]},
        "prompt: message 0 has the role 'tool', not one of user, assistant, system",
    ),
    "an unknown speaker": (
        GOOD | {"rejected": [{"from": "robot", "value": "x"}]},
        "rejected: turn 0 is from 'robot', expected gpt",
    ),
    "an unknown speaker of the prompt": (
        GOOD | {"prompt": [{"from": ["robot"], "value": "x"}, HUMAN]},
        "chosen: conversation a: turn 0 must be from human, gpt or system",
    ),
    "a turn without a text": (
        GOOD | {"rejected": [{"from": "gpt"}]},
        "rejected: conversation a: turn 1 must be from human, gpt or system, with a value",
    ),
    "turns that do not alternate": (
        GOOD | {"chosen": gpt("open") + gpt("go")},
        "chosen: turn 1 is from 'gpt', expected human",
    ),
    "turns of a whole that do not alternate": (
        {"chosen": [HUMAN, *gpt("open"), *gpt("go")], "rejected": [HUMAN, *gpt("go")]},
        "chosen: conversation a.jsonl:2: turn 2 is from gpt, expected human",
    ),
    "half a surrogate pair": (
        GOOD | {"rejected": gpt(HALF)},
        "rejected: conversation a: turn 1 holds half",
    ),
    "half a pair in the prompt": (GOOD | {"prompt": HALF}, "turn 0 holds half of a surrogate pair"),
    "a return that is none": (
        GOOD | {"rejected_return": "high"},
        "rejected: conversation a: \"return\" is 'high', expected a finite number",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_line(tmp_path, case):
    content, message = WRONG[case]
    text = content if isinstance(content, str) else json.dumps(content)
    file = tmp_path / "a.jsonl"
    with pytest.raises(ValueError) as error:
        read(file, f"{json.dumps(GOOD)}\n{text}\n{json.dumps(OTHER)}")
    told = str(error.value)
    assert told.startswith(f"{file}, line 2") and message in told and "\n" not in told


def test_a_file_of_which_no_pair_is_left_is_refused_with_the_reasons(tmp_path):
    file = tmp_path / "a.json"
    equal = GOOD | {"rejected": GOOD["chosen"]}
    weak = GOOD | {"chosen_return": 0.2, "rejected_return": 0}
    with pytest.raises(ValueError) as error:
        read(file, json.dumps([equal, weak, equal]), PairSettings())
    assert str(error.value) == f"{file}: no pair left (2 equal texts, 1 gap)"
    for empty in ("[]", "", "\n\n"):
        with pytest.raises(ValueError, match=r"no pair left \(it is empty\)"):
            read(file, empty)
    with pytest.raises(OSError, match="missing"):
        read_pairs([tmp_path / "missing.json"], ALL, Counter())


def test_pairs_without_an_id_are_not_counted_as_of_one_task(tmp_path):
    rows = [{"prompt": f"p{n}", "chosen": "yes", "rejected": "no"} for n in range(9)]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), "\n".join(map(json.dumps, rows))):
        assert len(read(tmp_path / "a.json", text, PairSettings(pairs_per_task=2))[0]) == 9


def test_tries_of_a_file_under_other_seeds_are_no_pair(tmp_path):
    def one(text, earned, seed):
        said = (("user", "goal"), ("assistant", text))
        messages = [{"role": role, "content": content} for role, content in said]
        return {"messages": messages, "item_id": "a", "return": earned, "seed": seed}

    file = tmp_path / "a.jsonl"
    tries = [one("good", 1.0, 0), one("bad", 0.0, 1)]
    file.write_text("\n".join(map(json.dumps, tries)))
    assert pairs_of(read_conversations([file]), ALL, Counter()) == []
    file.write_text("\n".join(map(json.dumps, [*tries, one("worse", 0.0, 0)])))
    assert len(pairs_of(read_conversations([file]), ALL, Counter())) == 1


def test_what_was_left_out_is_told_in_words():
    assert (
        why_left_out(Counter({"equal texts": 3, "gap": 12, "too long": 0}))
        == "12 gap, 3 equal texts"
    )
    assert why_left_out(Counter()) == ""


# ------------------------------------------------------------------------------------- tensors


def test_a_pair_becomes_two_rows_by_hand(words):
    tries = [played("a", "open door, bright, light", 1.0), played("a", "wait", 0.0)]
    pairs, _ = pairs_and_counts(tries)
    batch = encode_pairs(words, pairs, 0)
    opening = "<s> system ⏎ rules <e> ⏎ <s> user ⏎ dark <e> ⏎ <s> assistant ⏎"
    chosen = "[open] [door] [<e>] ⏎ <s> user ⏎ bright <e> ⏎ <s> assistant ⏎ [light] [<e>]"
    rows = []
    for b in range(2):
        length = int(batch.lengths[b])
        row = RolloutHandler("", 0, "", "", "", 0, 0, 1)
        row.input_ids = batch.input_ids[b, :length].tolist()
        row.loss_mask = batch.loss_mask[b, :length].tolist()
        rows.append(" ".join(draw(row, words.tokenizer)))
    assert rows == [f"{opening} {chosen}", f"{opening} [wait] [<e>]"]
    assert not batch.loss_mask[1, int(batch.lengths[1]) :].any()


def test_rows_of_a_pair_are_neighbours_and_share_their_opening(letters):
    rng = random.Random(0)
    tries = [
        played(f"t{n}", ", ".join(["go"] * rng.choice([1, 3, 5])) + str(i), i / 2, "dark" * n)
        for n in range(1, 5)
        for i in range(3)
    ]
    pairs, _ = pairs_and_counts(tries, pairs_per_task=2)
    batch = encode_pairs(letters, pairs, 0)
    assert len(batch) == 16 and len(pairs) == 8
    assert batch.group_ids.tolist() == [i // 2 for i in range(16)]
    for i, pair in enumerate(pairs):
        turns = pair.chosen["conversations"]
        prompt = [{"role": "system", "content": turns[0]["value"]}]
        opening = letters.opening(prompt, turns[1]["value"])
        both = batch.rows([2 * i, 2 * i + 1])
        assert opening_length(both) >= len(opening)
        assert both.input_ids[:, : len(opening)].tolist() == [opening] * 2
        for row, record in enumerate((pair.chosen, pair.rejected)):
            learned = both.input_ids[row][both.loss_mask[row] == 1].tolist()
            assert learned == [
                token
                for turn in record["conversations"]
                if turn["from"] == "gpt"
                for token in letters.action(turn["value"])
            ]


def test_sides_that_do_not_open_alike_are_an_error_of_ours(words):
    pair = Pair("a", played("a", "go"), played("a", "go", observation="bright"))
    with pytest.raises(RuntimeError, match="pair a: its sides do not open with the same tokens"):
        encode_pairs(words, [pair], 0)


# ------------------------------------------------------------------------------------- of a run


def spelled(chat, task, text, earned, stop="success"):
    """A trajectory of a run, sampled letter by letter: no tokenizer encodes it so."""
    handler = RolloutHandler(f"{task}-{text}", 1, "fake", task, "", 0, 0, 2)
    handler.start(chat, [{"role": "system", "content": "rules"}], "dark")
    ids = [token for letter in text for token in chat.plain(letter)] + [chat.end_of_turn]
    handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.turns[-1].reward = earned
    handler.stop(stop)
    return handler


def run_of(path, *steps):
    for step, handlers in enumerate(steps, start=1):
        file = path / "trajectories" / f"step_{step:06d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(each.to_json() for each in handlers), encoding="utf-8")
    return path


def test_a_run_makes_pairs_over_its_steps_and_not_of_what_was_lost(tmp_path, letters):
    run = run_of(
        tmp_path / "run",
        [spelled(letters, "a", "open", 1.0), spelled(letters, "a", "lost", 0.0, "env_error")],
        [spelled(letters, "a", "go", 0.0, "failure"), spelled(letters, "b", "alone", 1.0)],
    )
    pairs, counts = pairs_and_counts(read_conversations([run]))
    assert shown(pairs) == [("a", "open", "go", 1.0)]
    assert counts == {"no partner": 1}


def test_the_very_ids_that_were_sampled_are_in_the_rows(tmp_path):
    from models import load_tokenizer
    from scale.default_models import resolve_model

    chat = ChatTemplate(load_tokenizer(resolve_model("tiny")))
    first = spelled(chat, "a", "Action: look", 1.0)
    second = spelled(chat, "a", "Action: get", 0.0, "failure")
    assert first.input_ids != chat.opening(first.messages[:1], "dark") + chat.action("Action: look")
    run = run_of(tmp_path / "run", [second, first])
    pairs, _ = pairs_and_counts(read_conversations([run]))
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps([to_agentgym(pair) for pair in pairs]))
    for source in (pairs, read_pairs([file], ALL, Counter())):
        batch = encode_pairs(chat, source, 0)
        for b, handler in enumerate((first, second)):
            length = int(batch.lengths[b])
            assert batch.input_ids[b, :length].tolist() == handler.input_ids
            assert batch.loss_mask[b, :length].tolist() == handler.loss_mask
