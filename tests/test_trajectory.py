"""trajectory.py: invalid token lists are rejected, and a file holds the full trajectory.

Rollouts, in which trajectories grow turn by turn, are tested in test_rollout.py.
"""

import json
import struct

import pytest
from fakes import ids_of, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from chat import ChatTemplate
from trajectory import RolloutHandler, Trajectory, Turn, from_line, round_floats

SYSTEM = [{"role": "system", "content": "rules"}]


@pytest.fixture(scope="module")
def chat():
    """A chat template for a tokenizer with one id per word."""
    return ChatTemplate(word_tokenizer())


def handler_of(**fields):
    """A trajectory without tokens."""
    defaults = {"trajectory_id": "s1-t0-k0", "step": 1, "env": "fake", "task_id": "fake_0"}
    defaults |= {"subtask": "easy", "group_id": 0, "seed": 0, "max_rounds": 3}
    return RolloutHandler(**{**defaults, **fields})


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
def test_sampled_ids_need_one_log_prob_each(chat, ids, log_probs):
    with pytest.raises(ValueError, match="s1-t0-k0: . sampled ids.* log-probs"):
        handler_of().add_action(chat, ids, log_probs)


def test_a_line_of_a_file_restores_the_trajectory(chat):
    handler = handler_of()
    handler.start(chat, SYSTEM, "dark")
    handler.next_prompt()
    turn = handler.add_action(chat, ids_of("light<e>"), [-1.5, -0.25])
    turn.reward, turn.observation_text, turn.state = 0.5, "home", {"lamp": [1, None]}
    handler.advantages = [0.0] * len(handler.input_ids)
    handler.stop("success", success=True)
    line = json.loads(json.dumps(handler.to_line()))
    restored = from_line(line)
    assert isinstance(restored, RolloutHandler)
    assert restored.to_line() == handler.to_line()
    assert restored.turns == handler.turns
    restored.check()


def test_a_line_without_tokens_restores_a_plain_trajectory():
    t = Trajectory("s1-t0-k0", 1, "fake", "fake_0", "easy", 0, 7, 3)
    t.turns.append(Turn(None, "light", "home", 0.5))
    t.stop("max_rounds")
    restored = from_line(json.loads(json.dumps(t.to_line())))
    assert type(restored) is Trajectory
    assert restored == t


@pytest.mark.parametrize(
    "change", [{"colour": "red"}, {"turns": [{"action": "x"}]}, {"step": None}]
)
def test_an_invalid_line_is_refused(change):
    line = handler_of().to_line() | change
    if change == {"step": None}:
        del line["step"]
    with pytest.raises(ValueError, match="s1-t0-k0 is not a valid trajectory line"):
        from_line(line)


@given(st.lists(st.floats(-1e4, 0, width=32, allow_subnormal=False), max_size=20))
def test_rounding_changes_a_log_prob_by_at_most_a_millionth_and_only_once(numbers):
    restored = json.loads(json.dumps(round_floats(numbers)))
    assert restored == pytest.approx(numbers, rel=1e-6, abs=0)
    assert round_floats(restored) == restored


def test_a_line_of_text_has_short_numbers_and_no_spaces(chat):
    (log_prob,) = struct.unpack("f", struct.pack("f", -0.1))  # a float32, as from a sampler
    handler = handler_of()
    handler.start(chat, SYSTEM, "dark")
    handler.add_action(chat, ids_of("light<e>"), [log_prob, -12.000000953674316])
    handler.advantages = [0.0] * 15 + [1 / 3, 1e-9]
    handler.stop("success", success=True)
    text = handler.to_json()
    zeros = "0," * 15
    assert f'"rollout_log_probs":[{zeros}-0.1,-12.0]' in text
    assert f'"advantages":[{zeros}0.3333333,1e-09]' in text
    assert '"advantage":0.1666667,' in text  # mean over policy tokens
    assert text.endswith("}\n") and text.count("\n") == 1
    assert from_line(json.loads(text)).to_line() == handler.to_line()
    assert handler.rollout_log_probs[-2] == log_prob, "training must use unrounded numbers"
