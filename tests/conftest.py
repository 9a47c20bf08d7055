"""Fixtures that several files of tests share."""

import hypothesis
import pytest

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bm25s():
    return pytest.importorskip("bm25s", reason="make setup ENV=searchqa")
