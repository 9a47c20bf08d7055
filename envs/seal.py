"""An answer names its question: how a client notices one that is old, changed, or somebody else's.

Between a trainer and a world stand proxies, tunnels and load balancers. What they lose is noticed;
an answer that belongs to another session, or to an earlier turn, reads like any other and would be
trained on. So two headers go with the wire's formats:

    Episode-Turn: 9f0c41d2a7e3b586-3    of a request: the episode, and how many of its steps have
                                        been played; the client draws the name at each /reset
    Answer-Seal: 5c1d90aa37f2e4b8       of its answer: a digest of both, as the server saw them

    seal = blake2b(method, path, turn, status, blake2b(request body), blake2b(answer body))

The server keeps the name that /reset brought and plays a /step only if it is the next one of that
episode, 409 otherwise: a request that was sent twice, or names the wrong session, moves no world.
The client computes the seal of what it sent and of what it read, and believes nothing else.

It guards against accidents; there is no secret in it. AgentGym's servers send no seal, so that with
them none of this can be noticed; its clients send no turn, and are answered as they know it.

Whether an address seals is learnt from its answers, and never forgotten: once one had a seal, all
must, from every client of the pool, until the run ends. A server of ours that restarts goes on as
before; one of AgentGym's in its place is refused, by name, as the checks would be off from then on
and nobody told; one of ours in the place of AgentGym's is checked from its first answer.

Read next: envs/sessions.py, where `follows` is asked; envclient.py, the other end.
"""

import secrets
from hashlib import blake2b

from starlette.types import ASGIApp, Message, Receive, Scope, Send

TURN_HEADER, SEAL_HEADER = "Episode-Turn", "Answer-Seal"
TURN_PATTERN = r"^[0-9a-f]{16}-[0-9]{1,9}$"


class Turns:
    """A client's side: where its episode stands, as its requests say it.

    >>> turns = Turns()
    >>> turns.played += 1
    >>> str(turns)[16:]
    '-1'
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Another episode, under a name that no other has."""
        self.episode, self.played = secrets.token_hex(8), 0

    def __str__(self) -> str:
        return f"{self.episode}-{self.played}"


def episode_of(turn: str | None) -> str | None:
    """The episode that a request of this turn is of; None without one, as of AgentGym's clients."""
    return turn.partition("-")[0] if turn else None


def follows(turn: str | None, episode: str | None, num_played: int) -> bool:
    """Is a step that says `turn` the next one of the session's episode?

    >>> follows("9f0c41d2a7e3b586-3", "9f0c41d2a7e3b586", 3), follows(None, None, 3)
    (True, True)
    """
    return turn == (f"{episode}-{num_played}" if episode else None)


def seal(method: str, path: str, turn: str, sent: bytes, status: int, answered: bytes) -> str:
    """The digest of a request and its answer, 16 hexadecimal digits.

    Args:
        path: with its query, as it stands in the request line.
        sent, answered: the bodies.
    """
    return _seal(method, path, turn, _digest(sent), status, _digest(answered))


def problem(expected: str, found: str | None, status: int, is_sealing: bool) -> str:
    """What is wrong with an answer, or "" for nothing that could be noticed.

    Args:
        expected, found: the seal of what was sent and read; the one that came with it, if any.
        is_sealing: an earlier answer from this address had a seal, so that this one must.
    """
    if found is not None:
        return "" if found == expected else "this is not the answer to what was asked"
    # Who stands in between may say that it is full or that the server is down: nothing is learnt
    # from either.
    if is_sealing and status != 429 and status < 500:
        return (
            "this answer does not come from the environment's server: it has no seal, and answers "
            "from this address had one"
        )
    return ""


def _digest(body: bytes) -> str:
    return blake2b(body, digest_size=8).hexdigest()


def _seal(method: str, path: str, turn: str, sent: str, status: int, answered: str) -> str:
    return _digest(f"{method} {path} {turn} {sent} {status} {answered}".encode())


class Sealed:
    """ASGI middleware: answers that were asked with a turn carry a seal.

    Bodies are digested as they pass, so that a request too large to be kept is sealed as well.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = TURN_HEADER.lower().encode()
        turn = next((value for key, value in scope.get("headers", ()) if key == name), None)
        if scope["type"] != "http" or turn is None:
            await self.app(scope, receive, send)
            return
        sent, answered = blake2b(digest_size=8), bytearray()
        start: Message = {}

        async def receive_and_digest() -> Message:
            message = await receive()
            sent.update(message.get("body", b""))
            return message

        async def send_sealed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            answered.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            path = scope["raw_path"].decode("latin-1")
            if scope["query_string"]:
                path += "?" + scope["query_string"].decode("latin-1")
            what = (scope["method"], path, turn.decode("latin-1"), sent.hexdigest())
            digest = _seal(*what, start["status"], _digest(bytes(answered)))
            start["headers"] = [*start["headers"], (SEAL_HEADER.lower().encode(), digest.encode())]
            await send(start)
            await send({"type": "http.response.body", "body": bytes(answered)})

        await self.app(scope, receive_and_digest, send_sealed)
