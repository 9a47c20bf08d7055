"""Fixtures that several files of tests share."""

import pytest


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bm25s():
    return pytest.importorskip("bm25s", reason="make setup ENV=searchqa")
