"""--prompt: other words before the first observation, checked, kept with the run."""

import json
from dataclasses import replace

import pytest

from config import Config, Misuse
from envclient import EnvPool
from envs import get_env
from envs.local import LOCAL
from runtime.prompts import prompt_of, reprompted, with_prompt

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = [SYSTEM, {"role": "user", "content": "Craft."}, {"role": "assistant", "content": "Yes."}]


def asked_with(tmp_path, text):
    file = tmp_path / "prompt"
    file.write_text(text, encoding="utf-8")
    return with_prompt(Config(prompt=str(file)))


def test_a_text_takes_the_place_of_the_worlds_instruction(tmp_path):
    config = asked_with(tmp_path, "Craft it.\n")
    assert prompt_of(config) == [{"role": "system", "content": "Craft it."}]


def test_a_list_of_messages_replaces_the_worlds(tmp_path):
    assert prompt_of(asked_with(tmp_path, json.dumps(ASKED))) == ASKED


def test_without_the_option_the_world_asks():
    assert prompt_of(with_prompt(Config())) is None


def test_what_is_kept_is_the_text_so_that_a_resume_needs_no_file_and_sees_a_change(tmp_path):
    config = asked_with(tmp_path, "Craft it.")
    (tmp_path / "prompt").unlink()
    assert "Craft it." in config.prompt
    assert with_prompt(config) is config
    assert config.prompt != asked_with(tmp_path, "Craft it now.").prompt


def test_clients_of_a_pool_say_the_prompt_that_it_was_given(tmp_path):
    with EnvPool("textcraft", [LOCAL], prompt=ASKED) as pool, pool.client() as client:
        assert pool.prompt == client.prompt == ASKED
    with EnvPool("textcraft", [LOCAL], prompt=None) as pool, pool.client() as client:
        assert pool.prompt == client.prompt == get_env("textcraft").PROMPT


def test_a_demonstration_is_shown_under_the_prompt_that_the_policy_will_read():
    told = {"from": "system", "loss": None, "value": get_env("textcraft").PROMPT[0]["content"]}
    played = [
        {"from": "human", "loss": None, "value": "Goal"},
        {"from": "gpt", "loss": True, "value": "get"},
    ]
    record = {"item_id": "textcraft_0", "conversations": [told, *played]}
    (shown,) = reprompted([record], "textcraft", ASKED)
    assert [turn["value"] for turn in shown["conversations"]] == [
        *("Be brief.", "Craft.", "Yes."),
        *("Goal", "get"),
    ]
    assert reprompted([record], "textcraft", None) == [record]
    assert record["conversations"][0] == told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("[", "begins like JSON and is none"),
        ("[" * 100_000, "is larger|is none"),
        ("[]", "expected a JSON list"),
        ("[1]", "expected a JSON list"),
        ('[{"role": "system"}]', "expected a JSON list"),
        ('[{"role": "system", "content": 3}]', "expected a JSON list"),
        ('[{"role": "system", "content": "\\ud83d"}]', "expected a JSON list"),
        ('[{"role": "user", "content": "a"}]', "the roles are user; expected"),
        (json.dumps([*ASKED, SYSTEM]), "the roles are"),
        ('[{"role": "tool", "content": "a"}]', "the roles are tool"),
        ("x" * 200_000, "is larger than 100000 bytes"),
    ],
)
def test_what_cannot_stand_before_an_observation_is_refused(tmp_path, text, said):
    with pytest.raises(Misuse, match=said) as error:
        asked_with(tmp_path, text)
    assert "--prompt" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for name in ("nosuch", "latin", "."):
        with pytest.raises(Misuse, match=f"--prompt .*{name}"):
            with_prompt(replace(Config(), prompt=str(tmp_path / name)))
