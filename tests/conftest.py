"""Fixtures that several test files share."""

import hypothesis
import pytest

# On a busy machine an example can take long, which is not an error.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bm25s():
    return pytest.importorskip("bm25s", reason="make setup ENV=searchqa")


@pytest.fixture(scope="module")
def url():
    """The address of a server of OracleLetters."""
    from toy_env import OracleLetters, serve

    with serve(OracleLetters) as url:
        yield url
