"""Clients that are many, slow or silent: how many streams and connections there are, and how long they last."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from headgate.dashboard import Dashboard, app, connections, serve
from headgate.observe import metrics_server
from headgate.observe.metrics_server import MetricsServer
from tests.system.observe.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

FEW = 24


@pytest.fixture(scope="module")
def page() -> Iterator[Dashboard]:
    """A page whose clients have little time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_WITHIN", "READ_WITHIN"):
            patch.setattr(connections, name, 0.3)
        patch.setattr(app, "BODY_WITHIN", 0.3)
        with serve() as page:
            yield page


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def request(page: Dashboard, path: str, *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Origin: http://localhost"]
    return "\r\n".join([*lines, f"Authorization: Bearer {page.token}", *headers, "", ""]).encode()


def answer(page: Dashboard, path: str) -> bytes:
    with connect(page.port) as made:
        made.sendall(request(page, path, "Connection: close"))
        return whole(made)


def whole(made: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    got = b""
    try:
        while more := made.recv(65536):
            got += more
    except ConnectionError:
        pass
    return got


def reset(made: socket.socket) -> None:
    """Go away without a word: the other side gets a reset instead of an end."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


def is_free(page: Dashboard) -> bool:
    """Can a stream be opened?"""
    with connect(page.port) as made:
        made.sendall(request(page, "/api/stream"))
        return made.recv(12).endswith(b"200")


# -- streams -----------------------------------------------------------------------------------------------------------


def test_o25_of_many_streams_at_the_same_moment_sixteen_are_opened_and_their_slots_come_back() -> None:
    with serve() as page:

        async def statuses(most: int) -> tuple[list[bytes], list[asyncio.StreamWriter]]:
            made = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", page.port) for _ in range(most)))
            for _, writer in made:
                writer.write(request(page, "/api/stream?tasks=1"))
            lines = await asyncio.gather(*(reader.readline() for reader, _ in made))
            return [line.split()[1] for line in lines], [writer for _, writer in made]

        async def opened() -> int:
            seen, writers = await statuses(60)
            for number, writer in enumerate(writers):
                if number % 2:
                    writer.close()
                else:
                    reset(writer.get_extra_info("socket").dup())
                    writer.transport.abort()
            assert seen.count(b"200") + seen.count(b"503") == 60
            return seen.count(b"200")

        async def main() -> None:
            async with asyncio.timeout(PATIENCE):
                assert await opened() == app.MOST_STREAMS
                for _ in range(2):
                    while (again := await opened()) != app.MOST_STREAMS:
                        assert again < app.MOST_STREAMS, "some of the former are not noticed yet to be gone"
                        await asyncio.sleep(0.05)

        asyncio.run(main())


def test_o25_each_slot_of_a_stream_comes_back(page: Dashboard) -> None:
    for leave in (reset, socket.socket.close):
        with ExitStack() as stack:
            streams = []
            for _ in range(app.MOST_STREAMS):
                one = connect(page.port)
                streams.append(one)
                stack.callback(one.close)
                one.sendall(request(page, "/api/stream"))
                assert one.recv(12).endswith(b"200")
            assert not is_free(page)
            for one in streams:
                leave(one)
                eventually(lambda: is_free(page))


def test_o25_a_stream_whose_client_does_not_read_gives_its_slot_back(
    page: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SOONEST", 0.001)
    monkeypatch.setattr(app, "QUIET", 0.001)
    monkeypatch.setattr(app, "ALIVE", ": alive\n\n" + "x" * 100_000)
    with ExitStack() as stack:
        for _ in range(app.MOST_STREAMS):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.settimeout(PATIENCE)
            stack.enter_context(made)
            made.connect(("127.0.0.1", page.port))
            made.sendall(request(page, "/api/stream"))
        eventually(lambda: is_free(page))


# -- connections of the page -------------------------------------------------------------------------------------------


def dribbled(made: socket.socket, raw: bytes) -> bytes:
    """Send one byte now and then until the other side ends the connection; return what it said."""
    made.settimeout(0.02)
    for byte in raw:
        try:
            made.sendall(bytes([byte]))
            got = made.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            return b""
        made.settimeout(PATIENCE)
        return got + whole(made)
    raise AssertionError("all of it was taken")


def test_o25_a_head_that_comes_byte_by_byte_is_not_waited_for(page: Dashboard) -> None:
    with connect(page.port) as made:
        got = dribbled(made, request(page, "/", "X-Long: " + "x" * 2000))
    assert got.startswith(b"HTTP/1.1 408"), got
    assert json.loads(got.partition(b"\r\n\r\n")[2]) == {"error": "the request took too long to arrive"}
    assert re.search(rb"(?i)content-security-policy: default-src 'none'", got)


def test_o25_a_second_head_and_a_body_are_not_waited_for_either(page: Dashboard) -> None:
    with connect(page.port) as made:
        made.sendall(request(page, "/healthz"))
        eventually(lambda: made.recv(65536).endswith(b"ok\n"))
        assert b"408" in dribbled(made, request(page, "/", "X-Long: " + "x" * 2000))
    with connect(page.port) as made:
        made.sendall(request(page, "/api/act", "Content-Length: 9000", method="POST"))
        assert b" 408 " in dribbled(made, b" " * 9000)
    with connect(page.port) as made:  # answered, and then the body never comes
        made.sendall(request(page, "/healthz", "Content-Length: 9000"))
        assert whole(made).endswith(b"ok\n")


def test_o25_connections_that_say_nothing_do_not_last(page: Dashboard) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(page.port)) for _ in range(8)]
        assert all(whole(one).startswith(b"HTTP/1.1 408") for one in silent)


def test_o25_there_are_only_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", FEW)
    monkeypatch.setattr(connections, "HEAD_WITHIN", 60.0)  # `page` may have made it short
    with serve() as page:
        with ExitStack() as stack:
            first = [stack.enter_context(connect(page.port)) for _ in range(FEW)]
            got = {whole(stack.enter_context(connect(page.port)))[:12]}
            more = [stack.enter_context(connect(page.port)) for _ in range(4 * FEW)]
            got |= {whole(one)[:12] for one in more}
            assert got == {b"HTTP/1.1 503", b""}, "they are told, and if they are far too many not even that"
            assert select.select(first, [], [], 0)[0] == [], "those that were first are there"
        eventually(lambda: answer(page, "/healthz").endswith(b"ok\n"))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"\r\n" * 50_000,
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"\0" * 70_000,
    ],
)
def test_o25_what_is_no_http_is_refused_and_logged_by_nobody(
    page: Dashboard, garbage: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(page.port) as made:
        try:
            made.sendall(garbage)
        except ConnectionError:
            pass
        got = whole(made)
    assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 408")) or not got
    assert answer(page, "/healthz").endswith(b"ok\n")
    assert (caplog.records, capfd.readouterr().err) == ([], "")


def test_o25_an_upgrade_is_answered_as_a_request_without_one(page: Dashboard, caplog: pytest.LogCaptureFixture) -> None:
    with connect(page.port) as made:
        made.sendall(request(page, "/healthz", "Upgrade: websocket, h2c", "Connection: upgrade, close"))
        assert whole(made).endswith(b"ok\n")
    assert caplog.records == []


# -- the metrics of a worker -------------------------------------------------------------------------------------------


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setattr(metrics_server, "WITHIN", 0.3)
    monkeypatch.setattr(metrics_server, "MOST_CONNECTIONS", FEW)
    with closing(MetricsServer("127.0.0.1", 0, lambda: b"x" * 20_000_000, lambda: True)) as server:
        yield server


def is_served(server: MetricsServer) -> bool:
    with connect(server.port) as made:
        try:
            made.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        except ConnectionError:
            return False
        return whole(made).endswith(b"ok\n")


def test_o25_metrics_are_not_held_by_heads_that_come_byte_by_byte(
    metrics: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with connect(metrics.port) as made:
        assert dribbled(made, b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 2000) == b""
    assert is_served(metrics)
    assert capfd.readouterr().err == ""


def test_o25_metrics_have_few_connections_and_none_that_lasts(
    metrics: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(metrics.port)) for _ in range(2 * FEW)]
        assert not is_served(metrics), "too many are open"
        assert [whole(one) for one in silent] == [b""] * (2 * FEW)
        unread = [stack.enter_context(connect(metrics.port)) for _ in range(2)]
        for one in unread:  # one that never reads, and one that goes in the middle of the answer
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reset(unread[1])
        eventually(lambda: is_served(metrics))
        eventually(lambda: not metrics.connections)
    assert capfd.readouterr().err == ""
