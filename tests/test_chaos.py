"""Nothing wrong is trained on, whatever happens between client and server (tests/chaos.py)."""

import json

import chaos
import pytest
from chaos import FAULTS, PLAYED, UNNOTICED, Found, measure

from envs import settings_of


def skip_without(env):
    if settings_of(env).package:
        pytest.importorskip(settings_of(env).package)


@pytest.mark.parametrize("env", ["textcraft", "babyai"])
def test_with_all_faults_and_a_restart_what_enters_the_loss_happened_so(env):
    skip_without(env)
    found = measure(env, num_episodes=100, num_restarts=1)
    assert found.corrupted == 0, found
    assert found.in_loss >= 50 and found.solved > 0 and found.restarts == 1, found
    assert len(found.faults) > len(FAULTS) / 2, found


@pytest.mark.parametrize("rates", [UNNOTICED, PLAYED], ids=["crossed answers", "unasked steps"])
def test_what_the_seal_and_the_turn_are_for_is_trained_on_without_them(rates):
    found = measure("textcraft", num_episodes=60, num_restarts=0, rates=rates)
    assert found.corrupted == 0 and found.in_loss >= 10, found
    found = measure("textcraft", num_episodes=60, num_restarts=0, rates=rates, is_sealed=False)
    assert found.corrupted > 0, found


def test_without_faults_nothing_is_lost():
    found = measure("textcraft", num_episodes=20, num_restarts=0, rates={})
    assert (found.lost, found.corrupted, found.faults) == (0, 0, {"none": found.faults["none"]})


def test_by_hand_it_writes_what_it_found_and_where(tmp_path, monkeypatch, capsys):
    def found(env, episodes, restarts, is_sealed):
        return Found(env, episodes, 9, 0 if is_sealed else 4, 1, 5, restarts, 2.5)

    monkeypatch.setattr(chaos, "measure", found)
    out = tmp_path / "chaos.json"
    assert chaos.main(["10", "1", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {"date", "versions", "git_commit", "hardware", "command"} <= written.keys()
    assert [(r["env"], r["is_sealed"], r["corrupted"]) for r in written["rollouts"]] == [
        ("textcraft", True, 0),
        ("textcraft", False, 4),
        ("babyai", True, 0),
        ("babyai", False, 4),
    ]
    assert written["rollouts"][0]["episodes"] == 10 and written["rates"] == FAULTS
    monkeypatch.setattr(chaos, "measure", lambda *asked, is_sealed: found(*asked, False))
    assert chaos.main(["10", "1", "--out", str(out)]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("env", ["textcraft", "babyai"])
def test_a_thousand_episodes_and_twenty_restarts(env):
    skip_without(env)
    found = measure(env, num_episodes=1000, num_restarts=20)
    print(found)
    assert found.corrupted == 0 and found.restarts == 20 and found.in_loss >= 500, found
    assert found.faults.keys() == {*FAULTS, "none"}
