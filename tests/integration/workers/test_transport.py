"""Listening and connecting: TLS, one port, no port for strangers, and directories of Unix sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import ChannelOptions, InvalidArgument, InvalidType, WorkerCredentials, WorkerOptions
from headgate.workers.protocol import transport
from headgate.workers.protocol.addresses import is_loopback, parse_address
from headgate.workers.protocol.transport import bind, dial, grpc, make_server
from tests.support.workers.certificates import DAY, Authority, serial
from tests.support.workers.support import run
from tests.support.workers.tls_support import ECHO, REPEAT, Handler, call, eventually, idle_server, serving

CA = Authority()
OURS = WorkerCredentials(CA.cert, *CA.good)
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="hg-") as name:
        yield Path(name)


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]:0", "::1", 0),
        ("gpu-3.example.org:65535", "gpu-3.example.org", 65535),
        ("under_score:1", "under_score", 1),
        ("example.org.:1", "example.org.", 1),
    ],
)
def test_addresses_with_a_host(address: str, host: str, port: int) -> None:
    found = parse_address(address)
    assert found == (host, port)
    assert str(found) == address


def test_addresses_with_a_path() -> None:
    assert parse_address("unix:/run/x.sock") == parse_address("unix:///run/x.sock") == "/run/x.sock"


@pytest.mark.parametrize(
    "address",
    [
        *["", "host", ":80", "host:", "host:65536", "host:-1", "host:8 0", "host:http", "::1:80", "[::1]", "[x]:80"],
        *["dns:///host:80", "xds:///x:80", "ipv4:1.2.3.4:80", "http://host:80", "a/b:80", "user@host:80", "-h:80"],
        *["unix:", "unix:x.sock", "unix:/", "unix://host/x", "unix-abstract:x", "unix:/run/", "ho st:80", "\u0661:80"],
        "host:\u0661",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="is not the address of a worker"):
        parse_address(address)


def test_an_address_is_a_string() -> None:
    with pytest.raises(InvalidType):
        parse_address(80)


def test_loopback_is_known() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.9.1", "::1", "localhost", "::ffff:127.0.0.1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "192.168.1.1", "fe80::1", "::ffff:10.0.0.1"]))


# -- listening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [True, False])
@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_w70_both_ends_speak_tls(address: str, mutual: bool) -> None:
    ours = WorkerCredentials(CA.cert, *CA.good, mutual)

    async def main() -> None:
        async with serving(ours, address) as (bound, _):
            assert bound.rpartition(":")[0] == address.rpartition(":")[0]
            assert bound != address, "with the real port"
            assert await call(bound, ours) == "answered"

    run(main)


def test_w70_a_client_of_one_way_tls_is_anonymous() -> None:
    one_way = WorkerCredentials(CA.cert, *CA.good, mutual=False)
    anonymous = WorkerCredentials(CA.cert, b"", b"", mutual=False)

    async def main() -> None:
        async with serving(one_way) as (address, _):
            assert await call(address, anonymous) == "answered"
            assert await call(address, OURS) == "answered"  # who has a certificate need not hide it

    run(main)


def test_w70_the_name_that_is_checked_is_the_host_of_the_address() -> None:
    named = WorkerCredentials(CA.cert, *CA.issue("localhost"))

    async def main() -> None:
        async with serving(named) as (address, _):
            port = address.rpartition(":")[2]
            assert await call(f"localhost:{port}", OURS) == "answered"
            assert await call(f"127.0.0.1:{port}", OURS, 5) == "UNAVAILABLE"

    run(main)


def test_w70b_an_identity_is_checked_in_place_of_the_address() -> None:
    named = WorkerCredentials(CA.cert, *CA.issue("workers.example"))

    async def main() -> None:
        async with serving(named) as (address, handler):
            known = WorkerCredentials(CA.cert, *CA.good, identity="workers.example")
            assert await call(address, known) == "answered"
            other = WorkerCredentials(CA.cert, *CA.good, identity="others.example")
            assert await call(address, other, 5) == "UNAVAILABLE"
            assert await call(address, OURS, 5) == "UNAVAILABLE"
            assert handler.calls == 1

    run(main)


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="asks Linux which ports are open")
def test_w70a_a_worker_with_credentials_has_exactly_one_port_and_no_plain_text() -> None:
    async def main() -> None:
        before = _listening()
        async with serving(OURS) as (address, handler):
            [opened] = _listening() - before
            assert opened == int(address.rpartition(":")[2])
            assert await call(address, None, 5) == "UNAVAILABLE"
            with socket.create_connection(("127.0.0.1", opened), timeout=20) as plain:
                plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                assert not _everything(plain), "not a byte of HTTP/2"
            assert handler.calls == 0

    run(main)


def _listening() -> set[int]:
    """The TCP ports on which this process listens."""
    ours = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            ours.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    lines = [line for file in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]]
    parts = [line.split() for line in lines]
    return {int(one[1].rpartition(":")[2], 16) for one in parts if one[3] == "0A" and f"socket:[{one[9]}]" in ours}


def _everything(plain: socket.socket) -> bytes:
    data = b""
    try:
        while more := plain.recv(4096):
            data += more
    except ConnectionResetError:
        pass
    return data


def test_w70_old_tls_is_refused() -> None:
    def connect(address: str) -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # as old as that
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as plain, context.wrap_socket(plain) as tls:
            return tls.version()

    async def main() -> None:
        async with serving(WorkerCredentials(CA.cert, *CA.good, mutual=False)) as (address, _):
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asyncio.to_thread(connect, address)

    run(main)


def test_a_port_that_is_taken_is_an_os_error() -> None:
    async def main() -> None:
        async with serving(OURS) as (address, _):
            async with idle_server() as server:
                with pytest.raises(OSError, match="cannot listen on"):
                    bind(server, address, credentials=OURS)

    run(main)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "[2001:db8::1]:80"])
def test_w72_without_credentials_nobody_beyond_this_machine_is_served(address: str) -> None:
    async def main() -> None:
        async with idle_server() as server:
            with pytest.raises(InvalidArgument, match="without credentials would run the code of everybody") as caught:
                bind(server, address)
        for advice in ("credentials=", "headgate certs", "127.0.0.1", "insecure=True"):
            assert advice in caught.value.remedy

    run(main)


def test_w72_it_is_served_with_credentials_or_when_told_so() -> None:
    async def main() -> None:
        for credentials, insecure in ((OURS, False), (OURS, True), (None, True)):
            server = make_server(Handler())
            bound = bind(server, "0.0.0.0:0", credentials=credentials, insecure=insecure)
            await server.start()
            address = f"127.0.0.1:{bound.removeprefix('0.0.0.0:')}"
            assert await call(address, credentials) == "answered"
            if credentials is not None:  # which `insecure` does not take away
                assert await call(address, None, 5) == "UNAVAILABLE"
            await server.stop(0)

    run(main)


def test_w72_this_machine_is_served_without_credentials() -> None:
    async def main() -> None:
        for address in ("127.0.0.1:0", "localhost:0", "[::1]:0"):
            async with serving(None, address) as (bound, _):
                assert await call(bound, None) == "answered"

    run(main)


def test_w72_a_name_is_judged_by_what_it_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may call itself localhost and mean a network."""

    def look_up(*_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("10.0.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def main() -> None:
        async with idle_server() as server:
            with pytest.raises(InvalidArgument, match="without credentials"):
                bind(server, "localhost:0")

    run(main)


# -- options ----------------------------------------------------------------------------------------------------------


class _Recorder:
    """Notes with which options channels and servers are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        self.compression: Any = None
        for name in ("insecure_channel", "secure_channel", "server"):
            monkeypatch.setattr(grpc.aio, name, self._note)

    def _note(self, *_: Any, options: Any, compression: Any = None) -> Any:
        self.options, self.compression = dict(options), compression
        return self

    def add_generic_rpc_handlers(self, _: object) -> None:
        """As a server."""


def test_options_of_both_ends_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = _Recorder(monkeypatch)
    dial("127.0.0.1:1")
    assert recorded.options == {
        "grpc.use_local_subchannel_pool": 1,
        "grpc.enable_http_proxy": 0,
        "grpc.max_receive_message_length": -1,
        "grpc.max_send_message_length": -1,
        "grpc.enable_retries": 0,
        "grpc.keepalive_time_ms": 3000,
        "grpc.keepalive_timeout_ms": 3000,
        "grpc.http2.ping_timeout_ms": 3000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
    }
    dial("127.0.0.1:1", session=False)
    assert recorded.options == {"grpc.use_local_subchannel_pool": 1, "grpc.enable_http_proxy": 0}
    make_server(Handler())
    assert recorded.options == {
        "grpc.max_receive_message_length": -1,
        "grpc.max_send_message_length": -1,
        "grpc.http2.min_recv_ping_interval_without_data_ms": 500,
        "grpc.http2.min_ping_interval_without_data_ms": 500,
        "grpc.http2.max_ping_strikes": 0,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.so_reuseport": 0,
    }
    assert recorded.compression is None


def test_options_of_both_ends_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = _Recorder(monkeypatch)
    channel = ChannelOptions(
        max_receive_message_length=2**21,
        max_send_message_length=2**22,
        keepalive_time_ms=7000,
        keepalive_timeout_ms=5000,
        keepalive_permit_without_calls=False,
        max_pings_without_data=3,
        compression="gzip",
    )
    named = WorkerCredentials(CA.cert, *CA.good, identity="workers")
    dial("127.0.0.1:1", credentials=named, options=channel)
    given = recorded.options
    assert given["grpc.max_receive_message_length"] == 2**21
    assert given["grpc.max_send_message_length"] == 2**22
    assert given["grpc.keepalive_time_ms"] == 7000
    assert given["grpc.keepalive_timeout_ms"] == given["grpc.http2.ping_timeout_ms"] == 5000
    assert given["grpc.keepalive_permit_without_calls"] == 0
    assert given["grpc.http2.max_pings_without_data"] == 3
    assert given["grpc.ssl_target_name_override"] == "workers"
    assert recorded.compression == grpc.Compression.Gzip
    options = WorkerOptions(
        channel, max_ping_strikes=4, max_connection_idle_ms=1, max_connection_age_ms=2, max_connection_age_grace_ms=3
    )
    make_server(Handler(), options)
    given = recorded.options
    assert given["grpc.max_receive_message_length"] == 2**21
    assert given["grpc.http2.min_recv_ping_interval_without_data_ms"] == 7000
    assert given["grpc.http2.max_ping_strikes"] == 4
    assert given["grpc.max_connection_idle_ms"] == 1
    assert given["grpc.max_connection_age_ms"] == 2
    assert given["grpc.max_connection_age_grace_ms"] == 3
    assert recorded.compression == grpc.Compression.Gzip


def test_workers_are_reached_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    async def main() -> None:
        async with serving(OURS) as (address, _):
            assert await call(address, OURS) == "answered"

    run(main)


# -- Unix sockets -----------------------------------------------------------------------------------------------------


def test_w70a_a_unix_socket_is_plain_and_for_this_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        folder.chmod(0o755)  # others may look, not write

        async def main() -> None:
            async with serving(OURS, f"unix:{folder}/s") as (address, _):
                assert address == f"unix:{folder}/s"
                assert stat.S_IMODE(os.lstat(folder / "s").st_mode) == 0o600
                assert os.umask(0) == 0, "as it was"
                assert await call(address, OURS) == await call(address, None) == "answered"

        run(main)
    finally:
        os.umask(before)


def _refused(path: Path, text: str) -> None:
    async def main() -> None:
        async with idle_server() as server:
            with pytest.raises(PermissionError, match=text):
                bind(server, f"unix:{path}")
        with pytest.raises(PermissionError, match=text):
            dial(f"unix:{path}")

    run(main)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_w70a_a_directory_to_which_others_can_write_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    _refused(folder / "s", rf"others can write to .*mode {mode:04o}.*mkdir -m 700")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_w70a_a_directory_of_somebody_else_is_refused(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    _refused(folder / "s", f"belongs to the user {NOBODY}, not to 0")


def test_w70a_a_symbolic_link_in_place_of_the_directory_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(0o700)
    (folder / "link").symlink_to(folder / "real")
    _refused(folder / "link" / "s", "is a symbolic link")


def test_w70a_a_planted_link_or_file_in_place_of_the_socket_is_not_followed(folder: Path) -> None:
    (folder / "elsewhere").mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(os.fspath(folder / "elsewhere" / "s"))
        (folder / "s").symlink_to(folder / "elsewhere" / "s")
        _refused(folder / "s", "is not a socket of the user")
    (folder / "file").write_text("precious")
    _refused(folder / "file", "is not a socket of the user")
    assert (folder / "file").read_text() == "precious"
    if os.geteuid() == 0:
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(os.fspath(folder / "theirs"))
            os.chown(folder / "theirs", NOBODY, NOBODY)
            _refused(folder / "theirs", "is not a socket of the user")


def test_w70a_the_directory_is_checked_at_each_dial(folder: Path) -> None:
    async def main() -> None:
        async with serving(None, f"unix:{folder}/s") as (address, _):
            assert await call(address, None) == "answered"
            os.chmod(folder, 0o777)
            with pytest.raises(PermissionError):
                dial(address)
            os.chmod(folder, 0o700)
            assert await call(address, None) == "answered"

    run(main)


def test_a_socket_that_is_gone_is_no_matter_of_trust(folder: Path) -> None:
    async def main() -> None:
        assert await call(f"unix:{folder}/s", None, 5) == "UNAVAILABLE"
        assert await call(f"unix:{folder}/nowhere/s", None, 5) == "UNAVAILABLE"
        async with idle_server() as server:
            with pytest.raises(OSError, match="cannot listen on"):
                bind(server, f"unix:{folder}/nowhere/s")

    run(main)


# -- rotation ---------------------------------------------------------------------------------------------------------


def _served_serial(address: str) -> int:
    """The number of the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as plain, context.wrap_socket(plain) as tls:
        shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return serial(ssl.DER_cert_to_PEM_cert(shown).encode())


async def _serves(address: str, cert: bytes) -> bool:
    return await asyncio.to_thread(_served_serial, address) == serial(cert)


async def _answers(address: str, credentials: WorkerCredentials) -> bool:
    return await call(address, credentials, 5) == "answered"


async def _refuses(address: str, credentials: WorkerCredentials) -> bool:
    return not await _answers(address, credentials)


def test_w70b_certificates_are_rotated_under_load_and_no_call_fails(tmp_path: Path, scale: float) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    ours = WorkerCredentials.from_files(*files, reload=True)
    rotations = max(3, int(30 * scale))

    async def main() -> None:
        done = asyncio.Event()
        answered = talked = 0

        async def connect_again_and_again() -> None:
            nonlocal answered
            while not done.is_set():
                assert await call(address, await ours.refreshed()) == "answered"
                answered += 1

        async def talk() -> None:
            nonlocal talked
            async with dial(address, credentials=ours) as channel:
                stream = channel.stream_stream(REPEAT)()
                while not done.is_set():
                    await stream.write(b"x")
                    assert await stream.read() == b"x"
                    talked += 1
                    await asyncio.sleep(0.005)
                await stream.done_writing()

        async def both_went_on() -> bool:
            return min(talked, answered) > rotations

        async with serving(ours) as (address, _):
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(connect_again_and_again())
                group.create_task(talk())
                for _ in range(rotations):
                    pair = CA.issue()
                    pair.write(tmp_path, CA.cert)
                    await eventually(lambda pair=pair: _serves(address, pair.cert))  # type: ignore[misc]
                    assert (await ours.refreshed()).worker_cert == pair.cert
                await eventually(both_went_on)
                done.set()

    run(main, 60)


def test_w70b_the_ca_is_rotated_through_a_file_with_both(tmp_path: Path) -> None:
    new_ca = Authority("the next CA")
    files = CA.good.write(tmp_path, CA.cert)
    ours = WorkerCredentials.from_files(*files, reload=True)
    new = WorkerCredentials(CA.cert + new_ca.cert, *new_ca.good)

    async def main() -> None:
        async with serving(ours) as (address, _):
            assert await call(address, OURS) == "answered"
            assert await call(address, new, 5) == "UNAVAILABLE"
            files[0].write_bytes(CA.cert + new_ca.cert)
            await eventually(lambda: _answers(address, new))
            assert await call(address, OURS) == "answered"
            new_ca.good.write(tmp_path, new_ca.cert)
            await eventually(lambda: _refuses(address, OURS))
            assert await call(address, new) == "answered"

    run(main, 60)


def test_w70b_a_failed_renewal_does_not_disturb_a_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    ours = WorkerCredentials.from_files(*files, reload=True)

    async def main() -> None:
        async with serving(ours) as (address, _):
            for path in files:
                path.unlink()
            for _ in range(5):
                assert await call(address, OURS) == "answered"
                await asyncio.sleep(0.12)
        assert caplog.text.count("could not be renewed") == 1

    run(main)


def test_w70b_a_provider_that_hangs_does_not_disturb_a_worker() -> None:
    import threading

    gate = threading.Event()
    calls = 0

    def provider() -> tuple[bytes, bytes, bytes]:
        nonlocal calls
        calls += 1
        if calls > 1:
            gate.wait(30)
        return (CA.cert, *CA.good)

    ours = WorkerCredentials.from_provider(provider)

    async def main() -> None:
        try:
            async with serving(ours) as (address, _):
                loop = asyncio.get_running_loop()
                assert await call(address, OURS) == "answered"
                begun = loop.time()
                for _ in range(20):
                    assert await call(address, OURS) == "answered"
                assert loop.time() - begun < 8, "not half a second for each"
                assert calls == 2
        finally:
            gate.set()

    run(main)


def test_w70b_certificates_that_expire_do_not_end_what_runs(tmp_path: Path) -> None:
    """A session goes on when its certificate has expired: only new connections are refused."""
    short = CA.issue(start=-DAY, end=DAY / 24 / 3600 * 2)
    files = short.write(tmp_path, CA.cert)
    ours = WorkerCredentials.from_files(*files, reload=True)

    async def main() -> None:
        async with serving(ours) as (address, _):
            async with dial(address, credentials=OURS) as channel:
                echo = channel.unary_unary(ECHO)
                assert await echo(b"1", timeout=20) == b"1"
                await eventually(lambda: _refuses(address, OURS))
                assert await echo(b"2", timeout=20) == b"2"
                CA.issue().write(tmp_path, CA.cert)
                await eventually(lambda: _answers(address, OURS))

    run(main, 60)


def test_the_time_for_a_handshake_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_MS", 300)

    def wait(address: str) -> bytes:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            return _everything(silent)

    async def main() -> None:
        async with serving(OURS) as (address, _):
            assert await asyncio.to_thread(wait, address) == b""
        async with serving(None) as (address, _):
            await asyncio.to_thread(wait, address)  # it speaks first, and hangs up

    run(main)
