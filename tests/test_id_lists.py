"""envs.load_tasks: which id list a name means does not depend on where the program was started."""

import pytest

from envs import load_tasks


@pytest.mark.parametrize("world", ["textcraft", "babyai", "sciworld"])
def test_a_worlds_own_list_is_found_from_any_folder(world, tmp_path, monkeypatch):
    names = ("train", f"{world}_train", f"{world}_train.json", f"ids/{world}_train.json")
    expected = load_tasks(world, "train")
    monkeypatch.chdir(tmp_path)
    for name in names:
        assert load_tasks(world, file=name) == expected


def test_another_list_is_a_path_from_the_folder_one_is_in(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.json").write_text('[{"item_id": "textcraft_7"}]')
    monkeypatch.chdir(tmp_path)
    (task,) = load_tasks("textcraft", file="mine/train.json")
    assert task.task_index == 7
    monkeypatch.chdir(tmp_path / "mine")
    assert load_tasks("textcraft", file="../mine/train.json") == [task]


def test_a_list_that_is_in_neither_place_is_refused_with_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        load_tasks("textcraft", file="mine/train.json")
    assert str(error.value) == (
        f"cannot read the id list mine/train.json: no such file in {tmp_path}; "
        "lists of textcraft: family_test, family_train, short_test, short_train, test, train"
    )
    with pytest.raises(ValueError, match="id list /mine/train.json: no such file; lists of text"):
        load_tasks("textcraft", file="/mine/train.json")
