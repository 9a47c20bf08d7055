"""Who asks with a turn gets a sealed answer, and a step that is not the next moves no world."""

import contextlib
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from test_envclient import FlakyServer

from envclient import AllServersDown, EnvError, EnvPool
from envs.seal import SEAL_HEADER, TURN_HEADER, Turns, problem, seal
from envs.server import create_app
from envs.textcraft.env import TextCraft
from run.processes import child

ROOT = Path(__file__).parents[1]

EPISODE = "0123456789abcdef"
BODY = {"id": 0, "data_idx": 31}


@pytest.fixture
def client():
    with TestClient(create_app("textcraft", first_id=0, max_body_bytes=1000)) as client:
        client.post("/create", json={})
        yield client


def turn(number, episode=EPISODE):
    return {TURN_HEADER: f"{episode}-{number}"}


def is_sealed(answer):
    """Its seal is that of what was sent and of what came."""
    sent = answer.request
    path = sent.url.raw_path.decode()
    expected = seal(
        sent.method,
        path,
        sent.headers[TURN_HEADER],
        sent.content,
        answer.status_code,
        answer.content,
    )
    return answer.headers[SEAL_HEADER] == expected


def play(client, number, action="inventory", episode=EPISODE):
    body = {"id": 0, "action": action}
    return client.post("/step", json=body, headers=turn(number, episode))


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/create", b"{}", 200),
        ("POST", "/reset", b'{"id": 0, "data_idx": 31}', 200),
        ("POST", "/reset", b'{"id": 0, "data_idx": -1}', 404),
        ("GET", "/observation?id=0", b"", 200),
        ("POST", "/step", b"{", 422),
        ("POST", "/step", b'{"id": 9, "action": "x"}', 404),
        ("POST", "/step", b'{"id": 0, "action": "' + b"x" * 5000 + b'"}', 413),
        ("POST", "/nowhere", b"{}", 404),
    ],
)
def test_every_answer_to_a_turn_is_sealed_errors_too(client, method, path, body, status):
    headers = turn(0) | {"Content-Type": "application/json"}
    answer = client.request(method, path, content=body, headers=headers)
    assert answer.status_code == status and is_sealed(answer)


def test_agentgyms_clients_get_no_seal_and_may_play(client):
    for path, body in (("/reset", BODY), ("/step", {"id": 0, "action": "inventory"})):
        answer = client.post(path, json=body)
        assert answer.status_code == 200 and SEAL_HEADER not in answer.headers


def test_the_seal_differs_with_everything_that_was_asked_and_answered():
    whole = ("POST", "/step", f"{EPISODE}-1", b"asked", 200, b"answered")
    seals = {seal(*whole)}
    for i, other in enumerate(("GET", "/reset", f"{EPISODE}-2", b"aske", 201, b"answere")):
        seals.add(seal(*whole[:i], other, *whole[i + 1 :]))
    seals.add(seal(*whole[:3], b"askedanswered", 200, b""))
    assert len(seals) == 8


def test_a_step_that_is_not_the_next_of_its_episode_is_409_and_moves_nothing(client):
    client.post("/reset", json=BODY, headers=turn(0))
    get = "get 4 crimson stem"
    assert play(client, 0, get).json()["observation"] == "Got 4 crimson stem"
    for answer in (
        play(client, 0, get),  # the same once more
        play(client, 2, get),  # one was lost
        play(client, 1, get, episode="f" * 16),  # a stranger
        client.post("/step", json={"id": 0, "action": get}),  # who does not say
    ):
        assert answer.status_code == 409 and "not the next turn" in answer.json()["error"]
    assert play(client, 1).json()["observation"].strip() == "Inventory: [crimson stem] (4)"


def test_another_reset_of_the_session_is_noticed_by_whoever_played_in_it(client):
    client.post("/reset", json=BODY, headers=turn(0))
    client.post("/reset", json=BODY | {"data_idx": 140}, headers=turn(0, "f" * 16))
    assert play(client, 0).status_code == 409
    assert play(client, 0, episode="f" * 16).status_code == 200


def test_the_next_episode_of_a_session_begins_at_turn_0(client):
    for episode in (EPISODE, "f" * 16):
        client.post("/reset", json=BODY, headers=turn(0, episode))
        assert [play(client, n, episode=episode).status_code for n in range(3)] == [200] * 3


def test_an_episode_without_a_name_is_not_played_by_a_step_with_one(client):
    client.post("/reset", json=BODY)
    assert play(client, 0).status_code == 409
    assert client.post("/step", json={"id": 0, "action": "inventory"}).status_code == 200


def test_a_step_that_the_server_refused_was_no_turn(client):
    client.post("/reset", json=BODY, headers=turn(0))
    assert play(client, 0, "x" * 5000).status_code == 413
    assert play(client, 0).status_code == 200


@pytest.mark.parametrize("value", ["", "0", "x" * 16 + "-0", EPISODE, EPISODE + "--1", "9" * 9999])
def test_a_turn_that_is_none_is_422(client, value):
    answer = client.post("/reset", json=BODY, headers={TURN_HEADER: value})
    assert answer.status_code == 422 and TURN_HEADER in answer.json()["error"]


@pytest.mark.parametrize(
    ("found", "status", "is_sealing", "noticed"),
    [
        ("right", 200, False, False),
        ("right", 500, True, False),
        ("wrong", 200, False, True),
        ("wrong", 429, True, True),
        (None, 200, False, False),  # AgentGym's server
        (None, 200, True, True),  # somebody else's page
        (None, 413, True, True),  # a proxy's limit, which is not the policy's fault
        (None, 404, True, True),
        (None, 429, True, False),  # who stands in between is busy,
        (None, 502, True, False),  # or finds nobody: true whoever says it
    ],
)
def test_what_a_client_believes(found, status, is_sealing, noticed):
    assert bool(problem("right", found, status, is_sealing)) is noticed


def test_no_two_episodes_have_one_name():
    turns = Turns()
    names = {turns.episode}
    for _ in range(1000):
        turns.begin()
        names.add(turns.episode)
    assert len(names) == 1001 and str(turns) == f"{turns.episode}-0"


def test_sealed_answers_are_as_they_were(client):
    plain = client.post("/reset", json=BODY)
    sealed = client.post("/reset", json=BODY, headers=turn(0))
    assert plain.json() == sealed.json()
    assert plain.json()["observation"] == TextCraft().reset(31)
    assert set(sealed.headers) - set(plain.headers) == {SEAL_HEADER.lower()}


# --- Another server at the same address ----------------------------------------------------------


@contextlib.contextmanager
def ours(port=0):
    """(address, port) of a server that seals."""
    words = ("--env", "textcraft", "--port", str(port))
    with child("envs.server", *words, cwd=ROOT) as server:
        found = server.wait_until(
            lambda: re.search(r"listening on (\S+:(\d+))", server.stdout()), timeout_s=60.0
        )
        yield found[1], int(found[2])


@contextlib.contextmanager
def agentgyms(port=0):
    """(address, port) of one that does not."""
    server = FlakyServer(port)
    try:
        yield server.url, server.port
    finally:
        server.close()


def pool_at(url):
    return EnvPool("textcraft", [url], timeout_s=10.0, dead_wait_s=2.0, back_off_s=0.05)


def test_an_address_that_has_sealed_is_not_believed_without():
    """The checks of a run never go off by themselves: it would train on what they are there for."""
    with contextlib.ExitStack() as first:
        url, port = first.enter_context(ours())
        with pool_at(url) as pool:
            client = pool.client()
            client.reset(31)
            first.close()
            with agentgyms(port):
                with pytest.raises(EnvError):
                    client.step("Action: inventory")
                with pytest.raises(AllServersDown, match="it has no seal, and answers from this"):
                    pool.client()


@pytest.mark.parametrize("before", [ours, agentgyms])
def test_a_server_of_ours_that_takes_over_is_checked_from_its_first_answer(before):
    with contextlib.ExitStack() as first:
        url, port = first.enter_context(before())
        with pool_at(url) as pool:
            pool.client().reset(31)
            first.close()
            with ours(port):
                assert pool.client().reset(31) == TextCraft().reset(31)
            with agentgyms(port), pytest.raises(AllServersDown, match="it has no seal"):
                pool.client()
