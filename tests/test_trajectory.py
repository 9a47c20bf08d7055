"""trajectory.py alone: it refuses what would break its promise. How it grows: test_rollout.py."""

import doctest
import json
import struct

import pytest
from fakes import ids_of, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st

import trajectory
from chat import ChatTemplate
from trajectory import RolloutHandler, Trajectory, Turn, from_line, round_floats

SYSTEM = [{"role": "system", "content": "rules"}]


@pytest.fixture(scope="module")
def chat():
    """A template over a tokenizer with one id a word."""
    return ChatTemplate(word_tokenizer())


def handler_of(**fields):
    """A bare trajectory."""
    given = {"trajectory_id": "s1-t0-k0", "step": 1, "env": "fake", "task_id": "fake_0"}
    given |= {"subtask": "easy", "group_id": 0, "seed": 0, "max_rounds": 3}
    return RolloutHandler(**{**given, **fields})


def test_a_prompt_that_is_not_a_prefix_of_the_sequence_is_an_error(chat):
    handler = handler_of()
    handler.start(chat, SYSTEM, "dark")
    handler.next_prompt()
    handler.add_action(chat, ids_of("light<e>"), [-1.0, -1.0])
    handler.check()
    handler.input_ids[3] = ids_of("home")[0]
    with pytest.raises(RuntimeError, match="a prompt of 15 ids is not a prefix"):
        handler.stop("failure")
    del handler.input_ids[-1]
    with pytest.raises(RuntimeError, match=r"different lengths \[16, 17\]"):
        handler.check()


@pytest.mark.parametrize(("ids", "log_probs"), [([], []), ([5, 6], [-1.0])])
def test_sampled_ids_without_a_log_prob_each_are_refused(chat, ids, log_probs):
    with pytest.raises(ValueError, match="s1-t0-k0: . sampled ids.* log-probs"):
        handler_of().add_action(chat, ids, log_probs)


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(trajectory).failed == 0


def test_a_line_of_a_file_is_the_trajectory_again(chat):
    handler = handler_of()
    handler.start(chat, SYSTEM, "dark")
    handler.next_prompt()
    turn = handler.add_action(chat, ids_of("light<e>"), [-1.5, -0.25])
    turn.reward, turn.observation_text, turn.state = 0.5, "home", {"lamp": [1, None]}
    handler.advantages = [0.0] * len(handler.input_ids)
    handler.stop("success", success=True)
    line = json.loads(json.dumps(handler.to_line()))
    again = from_line(line)
    assert isinstance(again, RolloutHandler)
    assert again.to_line() == handler.to_line()
    assert again.turns == handler.turns
    again.check()


def test_a_line_without_tokens_is_a_trajectory_again():
    t = Trajectory("s1-t0-k0", 1, "fake", "fake_0", "easy", 0, 7, 3)
    t.turns.append(Turn(None, "light", "home", 0.5))
    t.stop("max_rounds")
    again = from_line(json.loads(json.dumps(t.to_line())))
    assert type(again) is Trajectory
    assert again == t


@pytest.mark.parametrize(
    "change", [{"colour": "red"}, {"turns": [{"action": "x"}]}, {"step": None}]
)
def test_a_line_that_is_none_is_refused(change):
    line = handler_of().to_line() | change
    if change == {"step": None}:
        del line["step"]
    with pytest.raises(ValueError, match="s1-t0-k0 is not a valid trajectory line"):
        from_line(line)


@given(st.lists(st.floats(-1e4, 0, width=32, allow_subnormal=False), max_size=20))
def test_a_log_prob_is_read_back_to_a_millionth_and_written_again_the_same(numbers):
    again = json.loads(json.dumps(round_floats(numbers)))
    assert again == pytest.approx(numbers, rel=1e-6, abs=0)
    assert round_floats(again) == again


def test_a_line_of_text_holds_short_numbers_and_no_blanks(chat):
    (log_prob,) = struct.unpack("f", struct.pack("f", -0.1))  # what a sampler says: float32
    handler = handler_of()
    handler.start(chat, SYSTEM, "dark")
    handler.add_action(chat, ids_of("light<e>"), [log_prob, -12.000000953674316])
    handler.advantages = [0.0] * 15 + [1 / 3, 1e-9]
    handler.stop("success", success=True)
    text = handler.to_json()
    zeros = "0," * 15
    assert f'"rollout_log_probs":[{zeros}-0.1,-12.0]' in text
    assert f'"advantages":[{zeros}0.3333333,1e-09]' in text
    assert '"advantage":0.1666667,' in text  # mean over the policy's tokens
    assert text.endswith("}\n") and text.count("\n") == 1
    assert from_line(json.loads(text)).to_line() == handler.to_line()
    assert handler.rollout_log_probs[-2] == log_prob, "what is trained on stays as it is"
