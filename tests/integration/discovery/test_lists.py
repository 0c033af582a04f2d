"""StaticDiscovery and DnsDiscovery: workers of which only the address is known."""

from __future__ import annotations

import asyncio
import errno
import logging
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import headgate
from headgate import DiscoveryFailed, DnsDiscovery, InvalidArgument, InvalidType, StaticDiscovery
from headgate.discovery import OwnDiscovery
from headgate.discovery.dns_client import AAAA, A, NoAnswer, answers, query
from headgate.testing import check_discovery
from tests.support.discovery.support import PATIENCE, subscribed, worker

pytestmark = pytest.mark.integration


def test_w65_the_discovery_inside_a_process_conforms() -> None:
    made: dict[str, OwnDiscovery] = {}
    check_discovery(lambda namespace: made.setdefault(namespace, OwnDiscovery()))


def test_w65_static_and_dns_conform_where_they_can() -> None:
    """They cannot announce: late and independent subscribers, filters, equality, and the refusal are checked."""
    check_discovery(lambda namespace: StaticDiscovery(["10.0.0.1:80", "[::1]:80", worker()]))
    check_discovery(lambda namespace: DnsDiscovery("workers.test", resolver=_two))


def _two(host: str) -> list[str]:
    return ["10.0.0.1", "::1"]


# -- a list -----------------------------------------------------------------------------------------------------------


def test_w63_a_static_list_gives_stable_workers() -> None:
    full = worker("w-9", tags=frozenset({"own"}))

    async def main() -> None:
        discovery = StaticDiscovery(
            ["10.0.0.1:80", "[::1]:81", "unix:/x", "10.0.0.1:80", full], secure=True, tags=["t"]
        )
        async with subscribed(discovery) as events:
            found = [(await events.next()).metadata for _ in range(4)]
        assert [one.address for one in found] == ["10.0.0.1:80", "[::1]:81", "unix:/x", "127.0.0.1:5000"]
        assert [one.uid for one in found] == ["static-10.0.0.1:80", "static-[::1]:81", "static-unix:/x", "w-9"]
        assert found[3] == full
        for one in found[:3]:
            assert (one.secure, one.tags, one.version, one.pid) == (True, {"t"}, headgate.__version__, 0)
        assert discovery == pickle.loads(pickle.dumps(discovery))
        assert discovery != StaticDiscovery(["10.0.0.1:80"])

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [[], ["nowhere"], ["host:0"], ["unix:x"]])
def test_w63_a_list_that_cannot_work_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument):
        StaticDiscovery(wrong)


@pytest.mark.parametrize("wrong", ["host:80", None, [80], 7])
def test_w63_a_list_of_something_else_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidType):
        StaticDiscovery(wrong)


def test_w63_nothing_can_be_announced_to_a_list() -> None:
    async def main() -> None:
        for discovery in (StaticDiscovery(["h:1"]), DnsDiscovery("h")):
            assert not discovery.publishes
            async with discovery.publisher as publisher:
                with pytest.raises(DiscoveryFailed, match="cannot be announced"):
                    await publisher.publish("worker-added", worker())
                with pytest.raises(InvalidArgument):
                    await publisher.publish("worker-lost", worker())  # type: ignore[arg-type]

    asyncio.run(main())


# -- a name server ----------------------------------------------------------------------------------------------------


def two_sockets() -> tuple[socket.socket, socket.socket]:
    """A socket for UDP and one that listens, with the same port: one that is free for both."""
    while True:
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            udp.bind(tcp.getsockname())
        except OSError as error:
            udp.close()
            tcp.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return udp, tcp


class NameServer:
    """A name server on loopback that knows one name, over UDP and TCP."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.code = 0
        self.silent = False
        self.limit = 512  # bytes over UDP
        self.asked = threading.Semaphore(0)
        self._udp, self._tcp = two_sockets()
        self.port = self._tcp.getsockname()[1]
        self._threads = [threading.Thread(target=work) for work in (self._serve_udp, self._serve_tcp)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", self.port))
        socket.create_connection(("127.0.0.1", self.port)).close()
        for thread in self._threads:
            thread.join()
        self._udp.close()
        self._tcp.close()

    def _serve_udp(self) -> None:
        while True:
            data, sender = self._udp.recvfrom(4096)
            if not data:
                return
            self.asked.release()
            if not self.silent:
                answer = self.answer(data)
                if len(answer) > self.limit:
                    answer = answer[:2] + struct.pack(">H", 0x8180 | 0x0200) + answer[4:6] + b"\0" * 6 + data[12:-11]
                self._udp.sendto(b"\0\0nonsense", sender)  # of somebody else
                self._udp.sendto(answer, sender)

    def _serve_tcp(self) -> None:
        while True:
            asking, _ = self._tcp.accept()
            with asking:
                length = asking.recv(2)
                if not length:
                    return
                answer = self.answer(asking.recv(int.from_bytes(length, "big")))
                asking.sendall(len(answer).to_bytes(2, "big") + answer)

    def answer(self, data: bytes) -> bytes:
        end = data.index(b"\0", 12) + 5
        kind = struct.unpack_from(">H", data, end - 4)[0]
        family = socket.AF_INET if kind == A else socket.AF_INET6
        values = [socket.inet_pton(family, one) for one in self.addresses if (":" in one) == (kind == AAAA)]
        alias = b"\xc0\x0c" + struct.pack(">HHIH", 5, 1, 60, 3) + b"\1x\0"
        records = [b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 60, len(value)) + value for value in values]
        header = data[:2] + struct.pack(">5H", 0x8180 | self.code, 1, 1 + len(records), 0, 0)
        return header + data[12:end] + alias + b"".join(records)


@contextmanager
def name_server() -> Iterator[NameServer]:
    server = NameServer()
    try:
        yield server
    finally:
        server.close()


def test_w63_what_a_name_server_says_changes_becomes_added_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def main(server: NameServer) -> None:
        server.addresses = ["10.0.0.1", "10.0.0.2", "fd00::1"]
        nameserver = f"127.0.0.1:{server.port}"
        discovery = DnsDiscovery("workers.test", 7000, interval=0.02, secure=True, tags=("k",), nameserver=nameserver)
        async with subscribed(discovery) as events:
            first = [(await events.next()).metadata for _ in range(3)]
            assert [one.address for one in first] == ["10.0.0.1:7000", "10.0.0.2:7000", "[fd00::1]:7000"]
            assert {(one.secure, one.tags) for one in first} == {(True, frozenset({"k"}))}
            server.addresses = ["10.0.0.2", "10.0.0.3"]
            changes = sorted(await events.types(3))
            assert changes == [
                ("added", "static-10.0.0.3:7000"),
                ("dropped", "static-10.0.0.1:7000"),
                ("dropped", "static-[fd00::1]:7000"),
            ]
            server.code = 2
            waiting = asyncio.ensure_future(events.next())
            for _ in range(12):  # some failing lookups
                assert await asyncio.to_thread(server.asked.acquire, timeout=PATIENCE)
            assert not waiting.done(), "the last answer stays"
            server.addresses, server.code = [], 0
            assert (await waiting).type == "worker-dropped"
            assert (await events.next()).type == "worker-dropped"

    with name_server() as server, caplog.at_level(logging.WARNING, "headgate.discovery"):
        asyncio.run(main(server))
    [said] = [record.getMessage() for record in caplog.records]
    assert said == (
        "the addresses of workers.test cannot be looked up (NoAnswer: the name server says: server failure); "
        "the 2 workers of the last answer stay"
    )


def test_w63_an_answer_that_does_not_fit_into_a_datagram_is_asked_for_again_over_tcp() -> None:
    with name_server() as server:
        server.addresses = [f"10.0.{number // 200}.{number % 200}" for number in range(1000)]
        found = DnsDiscovery("workers.test", nameserver=f"127.0.0.1:{server.port}").addresses()
        assert found == {f"{address}:50051" for address in server.addresses}


def test_w63_a_lookup_that_hangs_holds_up_neither_the_loop_nor_its_end() -> None:
    free = threading.Event()

    def hangs(host: str) -> list[str]:
        free.wait(PATIENCE)
        return []

    async def main() -> None:
        async with subscribed(DnsDiscovery("workers.test", resolver=hangs)) as events:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(events.stream)

    asyncio.run(main())
    free.set()


def test_w63_a_resolver_may_fail_at_first_and_any_way(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[str] = []

    def resolver(host: str) -> list[str]:
        tries.append(host)
        if len(tries) < 4:
            raise ValueError("not yet")
        return ["10.0.0.1"]

    async def main() -> None:
        async with subscribed(DnsDiscovery("workers.test", interval=0.01, resolver=resolver)) as events:
            assert await events.types(1) == [("added", "static-10.0.0.1:50051")]

    with caplog.at_level(logging.WARNING, "headgate.discovery"):
        asyncio.run(main())
    assert len(caplog.records) == 1


def test_w63_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1:50051" in DnsDiscovery("localhost").addresses()
    with pytest.raises(OSError):  # noqa: PT011 - a gaierror of whatever number
        DnsDiscovery("no-such-host.invalid").addresses()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: DnsDiscovery(""), InvalidArgument),
        (lambda: DnsDiscovery(7), InvalidType),  # type: ignore[arg-type]
        (lambda: DnsDiscovery("h", 0), InvalidArgument),
        (lambda: DnsDiscovery("h", "80"), InvalidType),  # type: ignore[arg-type]
        (lambda: DnsDiscovery("h", interval=0), InvalidArgument),
        (lambda: DnsDiscovery("h", interval=None), InvalidArgument),  # type: ignore[arg-type]
        (lambda: DnsDiscovery("h", resolver=7), InvalidType),  # type: ignore[arg-type]
        (lambda: DnsDiscovery("h", nameserver=7), InvalidType),  # type: ignore[arg-type]
        (lambda: DnsDiscovery("h", nameserver="h:x"), InvalidArgument),
        (lambda: DnsDiscovery("h", tags="gpu"), InvalidType),
        (lambda: DnsDiscovery("h", secure=1), InvalidType),  # type: ignore[arg-type]
    ],
)
def test_w63_options_are_checked(make: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_w63_a_nameserver_may_be_given_without_its_port() -> None:
    found = [DnsDiscovery("h", nameserver=name).nameserver for name in ("10.0.0.1", "ns", "::1", "[::1]:54", "a:54")]
    assert found == ["10.0.0.1:53", "ns:53", "[::1]:53", "[::1]:54", "a:54"]
    discovery = DnsDiscovery("h", nameserver="ns")
    assert pickle.loads(pickle.dumps(discovery)) == discovery
    assert discovery != DnsDiscovery("h")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: b"\0\1" + data[2:],
        lambda data: data[:2] + b"\1\0" + data[4:],
        lambda data: data[:2] + b"\x81\x83" + data[4:],
        lambda data: data[:12] + b"\6" + data[13:],
        lambda data: data[:6] + b"\xff\xff" + data[8:],
        lambda data: data + b"\xc0",
    ],
)
def test_answers_that_are_none_are_refused(change: Callable[[bytes], bytes]) -> None:
    question = query(4711, "workers.test", A)
    good = question[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + question[12:-11]
    good += b"\xc0\x0c" + struct.pack(">HHIH", A, 1, 60, 4) + b"\x0a\0\0\1"
    assert answers(good, 4711, "workers.test", A) == ({"10.0.0.1"}, False)
    if change(good) == good + b"\xc0":  # what follows is not looked at
        assert answers(change(good), 4711, "WORKERS.test.", A) == ({"10.0.0.1"}, False)
        return
    with pytest.raises(NoAnswer):
        answers(change(good), 4711, "workers.test", A)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "\ud800"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(NoAnswer, match="no host name"):
        query(1, host, A)
