"""A run's directory: what is found there is believed once it reads, and named when it does not."""

import json

import pytest

import config
from config import Misuse


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"config": null}', '{"config": [1]}', "\xff"]
)
def test_a_config_that_cannot_be_read_is_named_in_one_line(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(Misuse) as error:
        config.saved_config(str(tmp_path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_options_of_a_config_are_read_back(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"seed": 3, "rounds": [2, 4]}}))
    saved = config.saved_config(str(tmp_path))
    assert (saved.seed, saved.rounds, saved.resume) == (3, (2, 4), True)
