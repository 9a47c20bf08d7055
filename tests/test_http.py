"""envs/http.py: whatever a server sends, an exchange ends with an answer or one named error."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import envs.http
from envs.http import (
    ConnectionLost,
    ExchangeError,
    ExchangeTimeout,
    HttpClient,
    InvalidAnswer,
    checked_url,
    key_in,
    parse,
    proxy_of,
)

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def serve_bytes(*pieces, pause_s=0.0, keeps_open=False, requests=None):
    """The URL of a server that answers every request with these bytes, then closes the connection
    unless `keeps_open`. Appends the requests to `requests`."""
    requests = [] if requests is None else requests
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def handle(connection):
        with contextlib.suppress(OSError), connection:
            while request := connection.recv(1 << 16):
                requests.append(request)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause_s)
                if not keeps_open:
                    connection.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):  # raised when the listener is closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def response(body):
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (HEAD + b"\r\n" + b" " * 10_000_000, InvalidAnswer, "larger than 1048576"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", InvalidAnswer, "not HTTP"),
        (b"", ConnectionLost, "closed connection"),
        (HEAD + b"Content-Length: 700\r\n\r\n[1,2]", ConnectionLost, "IncompleteRead"),
        (CHUNKS + b"5\r\n[1", ConnectionLost, "Incomplete|Error"),
        (CHUNKS + b"-1\r\n" + b" " * 10_000_000, InvalidAnswer, "too large"),
    ],
    ids=["10 MB", "not HTTP", "connection closed", "truncated", "truncated in a chunk", "chunk -1"],
)
def test_a_bad_answer_is_one_named_error(answer, kind, message):
    with serve_bytes(answer) as url, pytest.raises(ExchangeError, match=message) as error:
        HttpClient(url, 20.0).ask("GET", "/")
    assert type(error.value) is kind and "\n" not in str(error.value)


def test_an_error_does_not_quote_a_part_of_the_key():
    headers = {"Authorization": "Bearer sk-0123456789"}
    answer = serve_bytes(b"x" * 180 + b"sk-0123456789")
    with answer as url, pytest.raises(InvalidAnswer, match="xxx[*]+") as error:
        HttpClient(url, 20.0).ask("GET", "/", headers=headers)
    assert "sk-" not in str(error.value)


@pytest.mark.parametrize(("start", "piece"), [(HEAD + b"\r\n", b"x"), (HEAD, b"X: y\r\n")])
def test_the_time_out_covers_the_complete_answer(start, piece):
    """A time-out of the socket would restart with every byte."""
    slow = serve_bytes(start, *[piece] * 90, pause_s=0.1)
    with slow as url, pytest.raises(ExchangeTimeout, match="no answer within 0.5 s"):
        HttpClient(url, 0.5).ask("GET", "/")


def test_threads_share_a_client_and_reuse_its_idle_connections(monkeypatch):
    with serve_bytes(response(b"{}"), keeps_open=True) as url, ThreadPoolExecutor(8) as threads:
        client = HttpClient(url, 20.0)
        answers = list(threads.map(lambda n: client.ask("GET", f"/{n}").body, range(100)))
        assert answers == [b"{}"] * 100 and 1 <= len(client._idle) <= 8
        num_idle = len(client._idle)
        client.ask("GET", "/")
        assert len(client._idle) == num_idle, "a connection is reused"
        monkeypatch.setattr("envs.http.IDLE_CONNECTION_S", 0.0)
        client.ask("GET", "/")
        assert len(client._idle) == 1, "connections that were idle for too long are closed"
        client.close()
    with serve_bytes(response(b"{}")) as url:  # closes a connection after its answer
        client = HttpClient(url, 20.0)
        for _ in range(3):
            assert client.ask("GET", "/").body == b"{}"
            while client._idle and not envs.http._is_readable(client._idle[0][1]):
                time.sleep(0.01)


def test_a_proxy_gets_the_complete_address_and_its_password():
    requests = []
    with serve_bytes(response(b"{}"), requests=requests) as proxy:
        proxy_url = proxy.replace("//", "//me:pa%20ss@")
        client = HttpClient("http://example.invalid", 5.0, proxy_url=proxy_url)
        assert client.ask("GET", "/v1").body == b"{}"
        client.close()
        with pytest.raises(ConnectionLost):  # this server does not speak TLS
            HttpClient("https://example.invalid", 5.0, proxy_url=proxy).ask("GET", "/v1")
    assert requests[0].startswith(b"GET http://example.invalid/v1 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic bWU6cGEgc3M=\r\n" in requests[0]
    assert requests[1].startswith(b"CONNECT example.invalid:443 HTTP/1.")


def test_the_proxy_comes_from_the_environment_variables_and_no_proxy_is_respected(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "localhost,.inside")
    assert proxy_of("https://api.example.com/v1") == "http://proxy:3128"
    assert proxy_of("https://a.inside/v1") is None
    assert proxy_of("http://api.example.com") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "brackets"),
        ('{"a":' * 65 + "1" + "}" * 65, "more than 64"),
        ('{"a": [NaN]}', "not a finite number"),
        ('{"a": 1e999}', "not a finite number"),
        ("", "Expecting value"),
    ],
)
def test_unusable_json_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text.encode())


def test_half_surrogate_pairs_are_replaced_everywhere_and_complete_ones_kept():
    text = r'{"a": ["\ud83d", {"b\udc00": "x \ud83d\ude00"}], "n": [1, 1.5, null]}'
    assert parse(text.encode()) == {"a": ["�", {"b�": "x 😀"}], "n": [1, 1.5, None]}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://me:s3cret@host:1", "--api-key-env"),
        ("https://host/v1?key=s3cret", "--api-key-env"),
        ("host:1", "expected http://HOST:PORT"),
        ("http://a b", "expected http://HOST:PORT"),
        ("http://h:99999", "expected http://HOST:PORT"),
    ],
)
def test_a_bad_address_is_an_error_that_does_not_repeat_its_secret(url, message):
    with pytest.raises(ValueError, match=f"--api-base.*{message}") as error:
        checked_url(url, "--api-base")
    assert "s3cret" not in str(error.value) and "\n" not in str(error.value)


def test_a_key_with_a_line_break_is_an_error_that_does_not_repeat_it(monkeypatch):
    """http.client's error for such a header quotes the header."""
    monkeypatch.setenv("SOME_KEY", "s3cret\n")
    with pytest.raises(ValueError, match="--api-key-env SOME_KEY: [^3]*$"):
        key_in("SOME_KEY")
