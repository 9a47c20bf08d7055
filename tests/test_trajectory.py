"""trajectory.py alone: it refuses what would break its promise. How it grows: test_rollout.py."""

import json

import pytest
from fakes import ids_of, word_tokenizer

from chat import ChatTemplate
from trajectory import RolloutHandler, Trajectory, Turn, from_line

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
    with pytest.raises(RuntimeError, match="a prompt of 15 ids is no"):
        handler.stop("failure")
    del handler.input_ids[-1]
    with pytest.raises(RuntimeError, match=r"different lengths \[16, 17\]"):
        handler.check()


@pytest.mark.parametrize(("ids", "log_probs"), [([], []), ([5, 6], [-1.0])])
def test_sampled_ids_without_a_log_prob_each_are_refused(chat, ids, log_probs):
    with pytest.raises(ValueError, match="s1-t0-k0: . sampled ids.* log-probs"):
        handler_of().add_action(chat, ids, log_probs)


def test_attention_and_positions_count_every_token(chat):
    handler = handler_of()
    handler.start(chat, SYSTEM, "dark")
    assert handler.attention_mask == [1] * 15
    assert handler.position_ids == list(range(15))


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
    with pytest.raises(ValueError, match="s1-t0-k0 is no line of a trajectory"):
        from_line(line)
