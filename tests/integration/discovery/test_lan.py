"""LanDiscovery: multicast DNS, on loopback and between network namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest

import headgate
from headgate import ChannelOptions, DiscoveryFailed, InvalidArgument, InvalidType, LanDiscovery
from headgate.discovery import lan, lan_liveness
from headgate.discovery.lan_liveness import Beacon, lives
from headgate.discovery.lan_records import MAX_WORKERS, TYPE, Place, announcement_of, name_of
from headgate.testing import check_discovery
from tests.support.discovery.support import PATIENCE, Events, subscribed, worker

zeroconf = pytest.importorskip("zeroconf", reason="pip install headgate[lan]")
pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("lan_program.py")


def here(namespace: str | None = None) -> LanDiscovery:
    """A discovery whose workers are on loopback, which is said, and so not warned about."""
    return LanDiscovery(namespace, advertise_host="127.0.0.1")


def fresh() -> str:
    """A namespace that no other test of this machine has."""
    return f"test-{os.urandom(8).hex()}"


def test_w65_lan_discovery_conforms() -> None:
    check_discovery(here)


# -- construction -----------------------------------------------------------------------------------------------------


def test_w65_an_equal_namespace_means_equal_lan_discoveries_and_none_a_unique_one() -> None:
    assert LanDiscovery("a") == LanDiscovery("a", advertise_host="10.0.0.1")
    assert hash(LanDiscovery("a")) == hash(LanDiscovery("a"))
    assert LanDiscovery("a") != LanDiscovery("b")
    assert LanDiscovery() != LanDiscovery()
    assert LanDiscovery("a") != headgate.LocalDiscovery("a")
    unique = LanDiscovery(advertise_host="10.0.0.1")
    assert pickle.loads(pickle.dumps(unique)) == unique
    assert repr(LanDiscovery("a")) == "LanDiscovery('a')"
    assert isinstance(unique, headgate.DiscoveryLike)


@pytest.mark.parametrize("wildcard", ["", " ", "0.0.0.0", "::", "[::]", "*", "0:0:0:0:0:0:0:0"])
def test_w62a_a_wildcard_is_refused_at_construction_and_from_a_callable_when_it_publishes(wildcard: str) -> None:
    with pytest.raises(InvalidArgument, match="advertise_host"):
        LanDiscovery("a", advertise_host=wildcard)
    discovery = LanDiscovery("a", advertise_host=lambda: wildcard)
    with pytest.raises(InvalidArgument, match="advertise_host"):
        discovery.advertised("10.0.0.1:80")


def test_w62a_advertise_host_is_a_string_or_a_callable_that_is_called_once() -> None:
    calls: list[int] = []

    def host() -> str:
        calls.append(1)
        return "10.9.8.7"

    discovery = LanDiscovery("a", advertise_host=host)
    assert not calls
    assert discovery.advertised("0.0.0.0:80") == discovery.advertised("127.0.0.1:80") == "10.9.8.7:80"
    assert len(calls) == 1
    for name, expected in [("fd00::7", "[fd00::7]:80"), ("[fd00::7]", "[fd00::7]:80"), ("gpu-3.lan", "gpu-3.lan:80")]:
        assert LanDiscovery("a", advertise_host=name).advertised("0.0.0.0:80") == expected
    for wrong in (7, b"x", ["h"]):
        with pytest.raises(InvalidType):
            LanDiscovery("a", advertise_host=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidType):
        LanDiscovery("a", advertise_host=lambda: 7).advertised("0.0.0.0:80")  # type: ignore[arg-type,return-value]


def test_w62a_a_concrete_host_is_advertised_as_it_is_and_loopback_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = LanDiscovery("a")
    for address in ("10.0.0.1:80", "[fd00::1]:80", "gpu-3.lan:80"):
        assert discovery.advertised(address) == address
    for address in ("127.0.0.1:80", "[::1]:80", "localhost:80"):
        with pytest.warns(RuntimeWarning, match="other machines cannot reach"):
            assert discovery.advertised(address) == address
    monkeypatch.setattr(lan, "_routable_host", lambda: "10.1.1.1")
    assert discovery.advertised("0.0.0.0:80") == discovery.advertised("[::]:80") == "10.1.1.1:80"
    monkeypatch.setattr(lan, "_routable_host", lambda: "127.0.0.1")
    with pytest.warns(RuntimeWarning, match="advertise_host"):
        discovery.advertised("0.0.0.0:80")
    with pytest.raises(InvalidArgument, match="LocalDiscovery"):
        discovery.advertised("unix:/x")


def test_w62a_the_default_is_an_address_of_this_machine() -> None:
    host = lan._routable_host()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind((host, 0))  # else it is not ours
    assert LanDiscovery.bind_host == "0.0.0.0"


def test_without_zeroconf_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = here("a")
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(DiscoveryFailed, match=r"pip install 'headgate\[lan\]'"):
        LanDiscovery("a")

    async def main() -> None:
        with pytest.raises(DiscoveryFailed, match="zeroconf"):
            await anext(discovery.subscribe())  # type: ignore[arg-type]
        with pytest.raises(DiscoveryFailed, match="zeroconf"):
            await discovery.publisher.__aenter__()
        with pytest.raises(DiscoveryFailed, match="not entered"):
            await discovery.publisher.publish("worker-added", worker())

    asyncio.run(main())


def test_zeroconf_is_imported_when_it_is_used() -> None:
    code = "import sys, headgate; headgate.LanDiscovery('a'); print('zeroconf' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_w62_options_and_all_other_fields_arrive() -> None:
    full = worker(
        address="10.0.0.1:80",
        tags=frozenset({"gpu"}),
        secure=True,
        options=ChannelOptions(keepalive_time_ms=1500, compression="gzip"),
        extra={"text": "\u00fc" * 2000},
    )

    async def main() -> None:
        discovery = LanDiscovery(fresh())
        async with discovery.publisher as publisher, subscribed(discovery) as events:
            await publisher.publish("worker-added", full)
            assert (await events.next()).metadata == full
            with pytest.raises(InvalidArgument, match="6144"):
                await publisher.publish("worker-added", worker("w-2", address="h:1", extra={"text": "x" * 7000}))

    asyncio.run(main())


def test_w65_an_update_may_change_the_host() -> None:
    async def main() -> None:
        discovery = LanDiscovery(fresh())
        async with discovery.publisher as publisher, subscribed(discovery) as events:
            for number in range(3):
                await publisher.publish("worker-added", worker(address=f"10.0.0.{number}:80"))
                event = await events.next()
                assert event.type == ("worker-updated" if number else "worker-added")
            await publisher.publish("worker-added", worker("w-2", address="10.0.0.1:80"))
            assert await events.types(1) == [("added", "w-2")]

    asyncio.run(main())


# -- other processes --------------------------------------------------------------------------------------------------


class Program:
    """lan_program.py in another process."""

    def __init__(self, *args: str, before: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, "-W", "ignore::RuntimeWarning", str(PROGRAM), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PROGRAM.parents[2],
        )
        assert self.says() == {"said": "listening" if args[0] == "listen" else "announced"}

    def says(self) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        said: dict[str, Any] = json.loads(line)
        return said

    def until(self, type: str, uid: str, **about: object) -> dict[str, Any]:
        """The next line about this; others are passed over."""
        while True:
            said = self.says()
            if (said["type"], said["uid"]) == (type, uid) and about.items() <= said.items():
                return said

    def end(self) -> None:
        _, said = self.process.communicate("\n", timeout=PATIENCE)
        assert (self.process.returncode, said) == (0, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_w62_a_killed_publisher_of_the_lan_is_known_within_3_s(scale: float) -> None:
    namespace = fresh()
    with Program("listen", namespace) as listener:
        for _ in range(max(2, int(10 * scale))):
            with Program("publish", namespace, "127.0.0.1:5000", "w-1", "w-2") as publisher:
                listener.until("added", "w-1")
                listener.until("added", "w-2")
                time.sleep(0.5)  # until it is connected; one that dies before that takes two seconds more
                publisher.process.kill()
                killed = time.time()
                assert listener.until("dropped", "w-1")["at"] - killed < 3.0
                assert listener.until("dropped", "w-2")["at"] - killed < 3.0


def test_w65_a_drop_from_another_process_and_the_exit_of_a_re_announcer() -> None:
    namespace = fresh()
    with Program("listen", namespace) as listener, Program("publish", namespace, "127.0.0.1:5000", "w-1") as owner:
        listener.until("added", "w-1")
        time.sleep(2.1)  # an owner of two seconds objects; a younger one gives way to a newer
        with Program("again", namespace, "127.0.0.1:6000", "w-1", "w-2") as again:
            listener.until("updated", "w-1", by="again", address="127.0.0.1:6000")
            listener.until("added", "w-2")
            again.end()
        listener.until("dropped", "w-2")
        with Program("listen", namespace) as late:
            assert late.until("added", "w-1")["by"] == "again"
        with Program("drop", namespace, "-", "w-1") as dropping:
            listener.until("dropped", "w-1")
            dropping.end()
        with Program("publish", namespace, "127.0.0.1:5000", "w-3"):
            assert listener.says()["uid"] == "w-3", "the owner has stopped answering for it"
        owner.end()


def test_w62_what_is_announced_can_be_found_by_any_dns_sd_program() -> None:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    async def main() -> None:
        discovery = LanDiscovery(fresh(), advertise_host="127.0.0.1")
        async with discovery.publisher as publisher:
            await publisher.publish("worker-added", worker(address="127.0.0.1:5000"))
            other = AsyncZeroconf()
            try:
                info = AsyncServiceInfo(TYPE, name_of(discovery.namespace, "w-1"))
                assert await info.async_request(other.zeroconf, 10_000)
                assert (info.port, info.parsed_addresses()) == (5000, ["127.0.0.1"])
                assert info.properties[b"txtvers"] == b"1"
            finally:
                await other.async_close()

    asyncio.run(main())


# -- records that somebody made up ------------------------------------------------------------------------------------


@contextmanager
def sender() -> Iterator[Any]:
    """A function that sends TXT records, with the names they are for, as packets of multicast DNS."""
    from zeroconf import DNSOutgoing, DNSPointer, DNSText

    def send(records: list[tuple[str, bytes]]) -> None:
        out = DNSOutgoing(0x8400)
        for name, text in records:
            out.add_answer_at_time(DNSPointer(TYPE, 12, 1, 4500, name), 0)
            out.add_answer_at_time(DNSText(name, 16, 0x8001, 4500, text), 0)
        for packet in out.packets():
            sending.sendto(packet, ("224.0.0.251", 5353))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        yield send


def fake(namespace: str, number: int) -> tuple[str, bytes]:
    metadata = worker(f"fake-{number}", address="127.0.0.1:9", extra={"filler": "x" * 200})
    return name_of(namespace, metadata.uid), announcement_of(metadata, f"nobody-{number}", 9, 1).text


def resident() -> int:
    """Bytes of memory of this process; 0 where that cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def test_w62_a_flood_of_records_costs_bounded_memory(scale: float) -> None:
    count = max(2 * MAX_WORKERS, int(10_000 * scale))

    async def flood(namespace: str, events: Events) -> None:
        found = {"w-real": True}
        many = asyncio.Event()

        async def read() -> None:
            async for event in events.stream:
                found[event.metadata.uid] = event.type != "worker-dropped"
                assert len(found) % 100 or sum(found.values()) <= MAX_WORKERS
                if len(found) > 2 * MAX_WORKERS:
                    many.set()

        reading = asyncio.ensure_future(read())
        with sender() as send:
            first = 0
            async with asyncio.timeout(4 * PATIENCE):
                while first < count or not many.is_set():  # packets are lost when this machine has much to do
                    send([fake(namespace, number) for number in range(first, first + 10)])
                    first += 10
                    await asyncio.sleep(0.002)
        assert found["w-real"], "a worker that is known to live is not pushed out"
        reading.cancel()
        await asyncio.wait((reading,))

    async def main() -> None:
        discovery = here(fresh())
        async with discovery.publisher as publisher:
            stream = discovery.subscribe()
            events = Events(stream)
            await publisher.publish("worker-added", worker("w-real"))
            assert await events.types(1) == [("added", "w-real")]
            await asyncio.sleep(0.5)  # its publisher is asked meanwhile
            before = resident()
            await flood(discovery.namespace, events)
            assert resident() - before < 100_000_000
            async with subscribed(discovery) as late:
                await publisher.publish("worker-added", worker("w-new"))
                uids = set()
                while not {"w-real", "w-new"} <= uids:
                    uids.add((await late.next()).metadata.uid)
            await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_w62a_malformed_records_are_ignored() -> None:
    async def main() -> None:
        discovery = here(fresh())
        namespace = discovery.namespace
        name, text = fake(namespace, 1)
        other, _ = fake(namespace, 2)
        planted = [
            (name, b""),
            (name, b"\0"),
            (name, b"\xff"),
            (name, b"\5h0={}"),
            (name, text[:-40]),
            (name, text.replace(b'"port":9', b'"port":-')),
            (name, text.replace(b"127.0.0.1:9", b"127.0.0.1:x")),
            (other, text),  # the record of another worker
        ]
        async with discovery.publisher as publisher, subscribed(discovery) as events:
            waiting = asyncio.ensure_future(events.next())
            with sender() as send:
                for one in planted:
                    send([one])
                    await asyncio.sleep(0.01)
                send([fake(namespace, 3)])  # so that all before it have arrived
                assert (await waiting).metadata.uid == "fake-3"
            await publisher.publish("worker-added", worker())
            assert ("added", "w-1") in await events.types(1)

    asyncio.run(main())


def test_w62_a_publisher_that_does_not_answer_is_forgotten() -> None:
    """Its beacon refuses, and nobody answers for it by multicast DNS."""

    async def main() -> None:
        discovery = here(fresh())
        async with subscribed(discovery) as events:
            waiting = asyncio.ensure_future(events.next())
            await asyncio.sleep(0.1)
            with sender() as send:
                send([fake(discovery.namespace, 1)])
            assert (await waiting).type == "worker-added"
            assert (await events.next()).type == "worker-dropped"

    asyncio.run(main())


# -- the beacon -------------------------------------------------------------------------------------------------------


def test_a_beacon_tells_its_session_and_nothing_else() -> None:
    async def main() -> None:
        beacon = Beacon("session-1", "127.0.0.1")
        try:
            assert await lives(Place("127.0.0.1", beacon.port, "session-1"))
            assert not await lives(Place("127.0.0.1", beacon.port, "session-2"))
            assert not await lives(Place("127.0.0.1", 0, "session-1"))
            reader, writer = await asyncio.open_connection("127.0.0.1", beacon.port)
            assert await reader.readline() == b"session-1\n"
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        finally:
            beacon.close()
        assert not await lives(Place("127.0.0.1", beacon.port, "session-1"))

    asyncio.run(main())


def test_a_beacon_has_a_bounded_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lan_liveness, "MAX_CONNECTIONS", 3)

    async def main() -> None:
        beacon = Beacon("s", "127.0.0.1")
        streams = [await asyncio.open_connection("127.0.0.1", beacon.port) for _ in range(4)]
        async with asyncio.timeout(PATIENCE):
            assert await streams[3][0].read() == b"s\n", "told, and sent away"
        beacon.close()
        for _, writer in streams:
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["::1", ""])
def test_a_beacon_listens_where_workers_are(host: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")

    async def main() -> None:
        beacon = Beacon("s", host or "10.0.0.1")
        try:
            assert await lives(Place("::1", beacon.port, "s"))
            assert await lives(Place("127.0.0.1", beacon.port, "s")) == (host == "")
        finally:
            beacon.close()

    asyncio.run(main())


# -- two machines -----------------------------------------------------------------------------------------------------


def _ip(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *args], capture_output=True, text=True, check=False)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 and fd77::1, 10.77.0.2 and fd77::2."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not installed")
    token = os.urandom(3).hex()
    names = (f"hg-{token}-1", f"hg-{token}-2")
    with ExitStack() as stack:
        for name in names:
            made = _ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
            stack.callback(_ip, "netns", "del", name)
        cable = [f"hg{token}{end}" for end in (1, 2)]
        made = _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        if made.returncode:
            pytest.skip(f"no pair of virtual interfaces: {made.stderr.strip()}")
        for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
            for args in (
                ("link", "set", end, "netns", name),
                ("-n", name, "link", "set", end, "name", "eth0"),
                ("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0"),
                ("-n", name, "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"),
                ("-n", name, "link", "set", "lo", "up"),
                ("-n", name, "link", "set", "eth0", "up"),
            ):
                done = _ip(*args)
                assert not done.returncode or "IPv6" in done.stderr, (args, done.stderr)
        yield names


def inside(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


@pytest.mark.parametrize(
    ("bind", "advertised"),
    [
        pytest.param("0.0.0.0:5000", "10.77.0.2:5000", marks=pytest.mark.soak),
        ("[fd77::2]:5000", "[fd77::2]:5000"),
        pytest.param("10.77.0.2:5000", "10.77.0.2:5000", marks=pytest.mark.soak),
    ],
)
def test_w62_workers_of_another_machine_are_found_and_a_killed_one_is_known_within_3_s(
    machines: tuple[str, str], bind: str, advertised: str
) -> None:
    one, other = machines
    namespace = fresh()
    with Program("listen", namespace, before=inside(one)) as listener:
        with Program("publish", namespace, bind, "w-1", before=inside(other)) as publisher:
            assert listener.until("added", "w-1")["address"] == advertised
            with Program("listen", namespace, before=inside(one)) as late:
                assert late.until("added", "w-1")["address"] == advertised
            time.sleep(0.5)  # until it is connected
            publisher.process.kill()
            killed = time.time()
            assert listener.until("dropped", "w-1")["at"] - killed < 3.0
        with Program("publish", namespace, bind, "w-2", before=inside(other)) as publisher:
            listener.until("added", "w-2")
            publisher.end()
            listener.until("dropped", "w-2")


def test_w62_a_machine_that_is_cut_off_is_noticed(machines: tuple[str, str]) -> None:
    one, other = machines
    namespace = fresh()
    with Program("listen", namespace, before=inside(one)) as listener:
        with Program("publish", namespace, "0.0.0.0:5000", "w-1", before=inside(other)):
            listener.until("added", "w-1")
            time.sleep(1.0)  # until it is connected
            assert not _ip("-n", other, "link", "set", "eth0", "down").returncode
            cut = time.time()
            assert listener.until("dropped", "w-1")["at"] - cut < 30.0


def test_w62_namespaces_and_machines_do_not_mix(machines: tuple[str, str]) -> None:
    one, other = machines
    namespace = fresh()
    with Program("listen", namespace, before=inside(one)) as listener:
        with (
            Program("publish", fresh(), "0.0.0.0:5000", "w-1", before=inside(other)),
            Program("publish", namespace, "0.0.0.0:5000", "w-2", before=inside(other)),
        ):
            assert listener.says()["uid"] == "w-2"


def test_w62_an_unroutable_advertisement_warns() -> None:
    async def main() -> None:
        async with LanDiscovery(fresh()).publisher as publisher:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                await publisher.publish("worker-added", worker(address="127.0.0.1:5000"))
            assert [str(one.message)[:47] for one in caught] == ["a worker is announced at 127.0.0.1:5000, which "]

    asyncio.run(main())
