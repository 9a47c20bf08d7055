"""Fixtures that several test files share."""

import importlib
import os

import hypothesis
import pytest

# On a busy machine an example can take long, which is not an error.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

if os.environ.get("CI") == "true":  # a missing package is an error there
    pytest.importorskip = lambda name, **_: importlib.import_module(name)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def bm25s():
    return pytest.importorskip("bm25s", reason="make setup ENV=searchqa")


@pytest.fixture(scope="session")
def made_run(tmp_path_factory):
    """The folder of a small artificial run, which no test changes."""
    from made_run import make_run

    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def url():
    """The address of a server of OracleLetters."""
    from toy_env import OracleLetters, serve

    with serve(OracleLetters) as url:
        yield url
