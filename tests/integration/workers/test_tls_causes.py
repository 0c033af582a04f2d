"""Strangers at a worker's port: refused before anything is unpickled, told why, and no trouble to others."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import re
import socket
import ssl
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from headgate import WorkerCredentials, __version__
from headgate.workers.protocol import tls_causes
from headgate.workers.protocol.client_session import ClientSession
from headgate.workers.protocol.tls_causes import Refusal, why_refused
from headgate.workers.protocol.transport import dial, grpc
from headgate.workers.protocol.wire import CONVERSE, STOP
from headgate.workers.protocol.wire import wire_pb2 as wire
from tests.ports import number_of, reserved_port
from tests.support.cli.support import worker
from tests.support.workers.certificates import DAY, Authority, Pair
from tests.support.workers.support import run, until, wait_until
from tests.support.workers.tls_support import call, serving, tls_worker

CA, OTHER = Authority(), Authority("another CA")


def made(pair: Pair, ca: bytes = CA.cert, **options: Any) -> WorkerCredentials:
    return WorkerCredentials(ca, *pair, **options)


GOOD = made(CA.good)
ONE_WAY = made(CA.good, mutual=False)
ANONYMOUS = WorkerCredentials(CA.cert, b"", b"", mutual=False)
EXPIRED = made(CA.issue(end=-DAY / 2))
NOT_YET = made(CA.issue(start=DAY / 2))
ELSEWHERE = made(CA.issue("workers.example", "192.0.2.7"))

REFUSED = {
    "no certificate": (GOOD, ANONYMOUS, "no certificate", "this client shows none", "mutual=True"),
    "mutual against one-way": (GOOD, ONE_WAY, "no certificate", "wants a certificate of its clients", "mutual=False"),
    "client of another CA": (GOOD, made(OTHER.good), "wrong CA", "refused this client's certificate", "same ca_cert"),
    "worker with another CA for clients": (
        made(CA.good, OTHER.cert),
        GOOD,
        "wrong CA",
        "it trusts another CA",
        "same ca_cert",
    ),
    "worker of another CA": (
        made(OTHER.good, OTHER.cert),
        GOOD,
        "wrong CA",
        "not of the CA that this client trusts",
        "same ca_cert",
    ),
    "expired client": (GOOD, EXPIRED, "expired", "this client's certificate, which has expired", "new certificate"),
    "expired worker": (EXPIRED, GOOD, "expired", "of the worker at .* has expired", "headgate certs check"),
    "expired CA": (
        made((old := Authority("old", start=-2 * DAY, end=-DAY)).good, old.cert),
        made(old.good, old.cert),
        "expired",
        "or its CA, has expired",
        "new certificate",
    ),
    "client too early": (GOOD, NOT_YET, "not yet valid", "which is not valid yet", "clock"),
    "worker too early": (NOT_YET, GOOD, "not yet valid", "is not valid yet", "clock"),
    "wrong name": (ELSEWHERE, GOOD, "wrong name", r"for workers.example, 192.0.2.7, not for 127.0.0.1", "identity="),
    "wrong identity": (
        GOOD,
        made(CA.good, identity="workers.example"),
        "wrong name",
        "not for workers.example",
        "--name workers.example",
    ),
    "plain worker": (None, GOOD, "plaintext", "speaks no TLS, and the client has credentials", "with credentials"),
    "plain client": (GOOD, None, "needs TLS", "speaks TLS only, and the client has no credentials", "from_files"),
    "plain client, one-way": (ONE_WAY, None, "needs TLS", "speaks TLS only", "from_files"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_w71_whoever_is_refused_learns_why(case: str) -> None:
    worker, client, kind, text, remedy = REFUSED[case]

    async def main() -> None:
        async with serving(worker) as (address, handler):
            assert await call(address, client, 5) == "UNAVAILABLE"
            assert handler.calls == 0, "it never came so far"
            for _ in range(5):  # what is found must not depend on who is quicker
                why = await why_refused(address, client)
                assert why is not None
                assert why.kind == kind, why
                assert re.search(text, why.text), why
                assert remedy in why.remedy
                assert why.permanent is (kind != "not yet valid")
                assert str(why) == f"{why.text}. {why.remedy}"
                assert "PRIVATE" not in repr(why)
            if worker is not None and client is not None and worker is GOOD:
                assert await call(address, GOOD) == "answered"  # and others are served as before

    run(main)


@pytest.mark.parametrize(
    ("worker", "client"),
    [
        (GOOD, GOOD),
        (ONE_WAY, ANONYMOUS),
        (ONE_WAY, GOOD),
        (None, None),
        (ELSEWHERE, made(CA.good, identity="workers.example")),
        (GOOD, made(CA.good, CA.cert + OTHER.cert)),
    ],
)
def test_w71_nothing_is_found_where_nothing_is_wrong(
    worker: WorkerCredentials | None, client: WorkerCredentials | None
) -> None:
    async def main() -> None:
        async with serving(worker) as (address, _):
            assert await call(address, client) == "answered"
            for _ in range(5):
                assert await why_refused(address, client) is None

    run(main)


def test_w71_renewed_certificates_are_judged_as_they_are_now(tmp_path: Path) -> None:
    files = CA.issue(end=-DAY / 2).write(tmp_path, CA.cert)
    ours = WorkerCredentials.from_files(*files, reload=True)

    async def main() -> None:
        async with serving(GOOD) as (address, _):
            why = await why_refused(address, ours)
            assert why is not None
            assert why.kind == "expired"
            CA.good.write(tmp_path, CA.cert)
            await ours.refreshed()
            assert await why_refused(address, ours) is None

    run(main)


# -- what is no worker ------------------------------------------------------------------------------------------------


@contextmanager
def listener(answer: Callable[[socket.socket], None] | None = None) -> Iterator[str]:
    """Something that listens and is no worker."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                with one:
                    if answer is None:
                        over.wait(20)
                    else:
                        one.settimeout(20)
                        try:
                            answer(one)
                        except OSError:
                            pass

        thread = threading.Thread(target=serve)
        thread.start()

        def end() -> None:
            over.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()

        stack.callback(end)
        yield f"127.0.0.1:{server.getsockname()[1]}"


def kind_of(address: str, credentials: WorkerCredentials | None, timeout: float = 10.0) -> Refusal:
    async def main() -> Refusal | None:
        return await why_refused(address, credentials, timeout)

    why: Refusal | None = run(main)
    assert why is not None
    return why


@pytest.mark.parametrize("client", [GOOD, None], ids=["TLS", "plain"])
def test_w71_nobody_listens(client: WorkerCredentials | None, tmp_path: Path) -> None:
    with reserved_port() as unheard:
        for address in (f"127.0.0.1:{number_of(unheard)}", f"unix:{tmp_path}/s"):
            why = kind_of(address, client)
            assert why.kind == "no listener"
            assert f"nothing listens at {address}" in why.text
            assert not why.permanent
    why = kind_of("no-such-host.invalid:80", client)
    assert why.kind in ("no listener", "no answer")


@pytest.mark.parametrize("client", [GOOD, None], ids=["TLS", "plain"])
def test_w71_nobody_answers(client: WorkerCredentials | None) -> None:
    with listener() as address:
        why = kind_of(address, client, 0.3)
    assert why.kind == "no answer"
    assert not why.permanent


def test_w71_a_lookup_that_hangs_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hang(*_: object) -> None:
        gate.wait(30)

    monkeypatch.setattr(tls_causes, "probe", hang)
    try:
        assert kind_of("far-away.example:80", GOOD, 0.1).kind == "no answer"
    finally:
        gate.set()


def _old_tls(one: socket.socket) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as old as that
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    tls_causes.load_pair(context, GOOD.material)
    with context.wrap_socket(one, server_side=True) as tls:
        tls.recv(1)


def test_w71_tls_that_is_too_old() -> None:
    with listener(_old_tls) as address:
        why = kind_of(address, GOOD)
    assert why.kind == "old TLS"
    assert "1.2" in why.remedy


def _tls_with_alerts(version: ssl.TLSVersion, ca: bytes) -> Callable[[socket.socket], None]:
    """A server that says why it refuses a certificate, as proxies do and gRPC does not."""

    def answer(one: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.maximum_version = version
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=ca.decode())
        tls_causes.load_pair(context, GOOD.material)
        with context.wrap_socket(one, server_side=True) as tls:
            tls.sendall(b"\0" * 9)

    return answer


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("ca", "client", "kind"),
    [
        (CA, ANONYMOUS, "no certificate"),
        (CA, EXPIRED, "expired"),
        (CA, NOT_YET, "not yet valid"),
        (CA, made(OTHER.good), "wrong CA"),
        (OTHER, GOOD, "wrong CA"),
    ],
)
def test_w71_alerts_of_tls_name_the_same_causes(
    version: ssl.TLSVersion, ca: Authority, client: WorkerCredentials, kind: str
) -> None:
    with listener(_tls_with_alerts(version, ca.cert)) as address:
        assert kind_of(address, client).kind == kind


def test_w71_other_servers_are_told_from_workers() -> None:
    def http(one: socket.socket) -> None:
        one.recv(100)
        one.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    def hang_up(one: socket.socket) -> None:
        one.recv(1)

    def babble(one: socket.socket) -> None:
        one.sendall(b"\x99" * 300)

    for answer in (http, babble):
        with listener(answer) as address:
            for client in (GOOD, None):
                refusal = kind_of(address, client)
                assert refusal.kind == "other"
                assert "speaks neither HTTP/2 nor TLS: it is no worker" in refusal.text
    with listener(hang_up) as address:
        assert kind_of(address, None).kind == "other"
        assert kind_of(address, GOOD).kind == "other"


def test_w71_a_certificate_that_is_not_for_clients_is_named() -> None:
    """A CA may sign certificates for servers only."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    servers_only = made(CA.issue(extension=x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])))

    async def main() -> None:
        async with serving(GOOD) as (address, _):
            assert await call(address, servers_only, 5) == "UNAVAILABLE"
            why = await why_refused(address, servers_only)
            assert why is not None
            assert why.kind == "other"
            assert "purpose" in why.text

    run(main)


# -- a worker's process -----------------------------------------------------------------------------------------------


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.fspath(self.path),)


def _attacks(folder: Path) -> Iterator[tuple[str, list[wire.ToWorker]]]:
    """Messages with a canary in every field of bytes, each field in a session of its own."""
    numbers = itertools.count()

    def canary(name: str) -> bytes:
        return pickle.dumps(Canary(folder / f"{name}-{next(numbers)}"))

    plain = wire.Definition(function=1, module="os", qualname="getpid")
    empty = pickle.dumps(((), {}))
    yield (
        "value",
        [
            wire.ToWorker(
                definitions=[wire.Definition(function=1, value=canary("value"), digest=b"1")],
                calls=[wire.Call(number=1, function=1, arguments=empty)],
            )
        ],
    )
    yield (
        "arguments",
        [wire.ToWorker(definitions=[plain], calls=[wire.Call(number=1, function=1, arguments=canary("arguments"))])],
    )
    yield (
        "context",
        [
            wire.ToWorker(
                definitions=[plain],
                calls=[wire.Call(number=1, function=1, arguments=empty, context=canary("context"))],
            )
        ],
    )
    data = canary("chunk")
    yield (
        "chunk",
        [
            wire.ToWorker(
                definitions=[plain],
                chunks=[wire.Chunk(transfer=1, data=data, layout=wire.Layout(pickle=len(data)))],
                calls=[wire.Call(number=1, function=1, transfer=1)],
            )
        ],
    )
    yield "step", [wire.ToWorker(steps=[wire.Step(number=1, payload=canary("step"), context=canary("step"))])]
    yield "token", [wire.ToWorker(hello=wire.Hello(probe=wire.Probe(token=canary("token"))))]


async def _attack(address: str, credentials: WorkerCredentials | None, messages: list[wire.ToWorker]) -> bool:
    """Send these after a greeting; whether the worker answered anything at all."""
    async with dial(address, credentials=credentials) as channel:
        try:
            stream = channel.stream_stream(CONVERSE)()
            await stream.write(ClientSession(1, "stranger", __version__, 0).hello(None).SerializeToString())
            for message in messages:
                await stream.write(message.SerializeToString())
            answers = 0
            async with asyncio.timeout(5):
                while isinstance(await stream.read(), bytes):
                    answers += 1
                    if answers == 2:  # the welcome, and whatever came of it
                        break
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            return False
    return True


STRANGERS = {"without a certificate": ANONYMOUS, "of another CA": made(OTHER.good), "in plain text": None}


@pytest.mark.integration
def test_w71_nothing_of_a_stranger_is_unpickled(tmp_path: Path) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    nest = tmp_path / "nest"
    nest.mkdir()
    assert {name for message in (wire.ToWorker, wire.Hello) for name in _bytes_fields(message.DESCRIPTOR)} == {
        *("Definition.digest", "Definition.value", "Chunk.data", "Call.arguments", "Call.context"),
        *("Step.payload", "Step.context", "Probe.token"),
    }, "a new field of bytes: have a canary in it"

    async def main(address: str) -> None:
        for stranger in STRANGERS.values():
            for _, messages in _attacks(nest):
                assert not await _attack(address, stranger, messages)
            async with dial(address, session=False, credentials=stranger) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(STOP)(wire.StopRequest().SerializeToString(), timeout=5)
        assert list(nest.iterdir()) == []
        for name, messages in _attacks(nest):
            if name in ("value", "arguments", "chunk"):  # whose canaries sing for a client that is trusted
                await _attack(address, GOOD, messages)
                await until(lambda name=name: list(nest.glob(f"{name}-*")))  # type: ignore[misc]

    with tls_worker(files) as (address, process):
        run(lambda: main(address), 60)
        assert process.poll() is None, "nobody could stop it"


def _bytes_fields(descriptor: Any, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    for field in descriptor.fields:
        if field.type == field.TYPE_BYTES:
            yield f"{descriptor.name}.{field.name}"
        elif field.message_type is not None and field.message_type.name not in seen:
            yield from _bytes_fields(field.message_type, seen | {descriptor.name})


LINES = {
    "without a certificate": (ANONYMOUS, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    "of another CA": (made(OTHER.good), "unable to get local issuer certificate"),
    "expired": (EXPIRED, "certificate has expired"),
    "too early": (NOT_YET, "certificate is not yet valid"),
    "in plain text": (None, "WRONG_VERSION_NUMBER"),
}


@pytest.mark.cold
@pytest.mark.integration
def test_w71_a_worker_that_stands_alone_says_why_it_refused_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC tells nobody but its log, which is stderr."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)  # which gRPC's import set here
    for name, data in (("ca-cert", CA.cert), ("worker-key", CA.good.key), ("worker-cert", CA.good.cert)):
        (tmp_path / f"{name}.pem").write_bytes(data)
    with worker(tmp_path, "--none", "--bind", "127.0.0.1:0", "--cert-dir", str(tmp_path)) as alone:

        async def main() -> None:
            for stranger, _ in LINES.values():
                assert await call(alone.ready["address"], stranger, 5) == "UNAVAILABLE"

        run(main)
        for _, text in LINES.values():
            alone.until_logged(text)
        alone.process.terminate()
        alone.wait()
    said = [line for line in alone.log.read_text().splitlines() if "Handshake failed" not in line]
    assert not [line for line in said if re.match(r"[IWEF]\d{4} ", line)], "gRPC says nothing else"


_POOL = """
import asyncio, sys
from pathlib import Path
from headgate import LocalDiscovery, WorkerCredentials, WorkerPool

async def main():
    credentials = WorkerCredentials.from_files(*sys.argv[1:])
    async with WorkerPool(spawn=1, discovery=LocalDiscovery(), credentials=credentials) as pool:
        print(pool.workers()[0].metadata.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.integration
@pytest.mark.parametrize(("verbosity", "lines"), [(None, 1), pytest.param("ERROR", 0, marks=pytest.mark.soak)])
def test_w71_a_worker_that_a_pool_started_says_why_it_refused_somebody(
    verbosity: str | None, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for each refusal, on the stderr that it shares with its program, unless that chose less."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity is not None:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    files, log = CA.good.write(tmp_path, CA.cert), tmp_path / "log"
    command = [sys.executable, "-c", _POOL, *map(str, files)]
    with log.open("wb") as stderr, subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=stderr, text=True) as pool:
        assert pool.stdout is not None
        address = pool.stdout.readline().strip()

        async def main() -> None:
            for stranger, text in LINES.values():
                assert await call(address, stranger, 5) == "UNAVAILABLE"
                await until(lambda text=text: log.read_text().count(text) == lines)  # type: ignore[misc]

        run(main)
        pool.communicate()
    assert pool.returncode == 0
    assert log.read_text().count("\n") == len(LINES) * lines, "and nothing else"


# -- floods -----------------------------------------------------------------------------------------------------------


def _connections(address: str, number: int, stack: ExitStack) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    return [stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(number)]


def _client_hello() -> bytes:
    """How a client of TLS begins."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    there = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), there).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return there.read()


def _is_closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while one.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.integration
def test_w71_floods_of_strangers_do_not_stop_others(tmp_path: Path, scale: float) -> None:
    """Silent connections, slow ones, random bytes, handshakes that stop half-way: calls of others go on."""
    files = CA.good.write(tmp_path, CA.cert)
    silent, slow = max(20, int(500 * scale)), max(5, int(100 * scale))

    async def health(channel: grpc.aio.Channel) -> None:
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=15) == b"\x08\x01"

    async def main(address: str, stack: ExitStack) -> None:
        async with dial(address, credentials=GOOD) as channel:
            await health(channel)
            quiet = await asyncio.to_thread(_connections, address, silent, stack)
            trickling = await asyncio.to_thread(_connections, address, slow, stack)
            halves = await asyncio.to_thread(_connections, address, slow, stack)
            [noisy] = await asyncio.to_thread(_connections, address, 1, stack)
            hello = _client_hello()
            for half in halves:
                half.sendall(hello[: len(hello) // 2])
            for one in halves[::2]:
                one.sendall(hello[len(hello) // 2 :])  # and never the next flight
            noise = asyncio.create_task(asyncio.to_thread(_send_noise, noisy))
            trickled = 0
            for step in range(60):
                for one in trickling:
                    try:
                        one.send(hello[step : step + 1])
                        trickled += 1
                    except OSError:
                        pass
                await health(channel)  # on a connection that there is
                if step % 5 == 0:
                    async with dial(address, credentials=GOOD) as another:  # and on a new one
                        await health(another)
                if all(_is_closed(one) for one in (*quiet, *trickling, *halves)):
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("a worker keeps connections that finish no handshake")
            await noise
            assert trickled >= slow
            await health(channel)

    with tls_worker(files, handshake_ms=2000) as (address, process), ExitStack() as stack:
        run(lambda: main(address, stack), 120)
        assert process.poll() is None
    if os.path.exists("/proc/self/fd"):
        wait_until(lambda: process.poll() is not None)


def _send_noise(one: socket.socket) -> None:
    try:
        one.sendall(os.urandom(1 << 20))
    except OSError:
        pass  # it was disconnected, as it should
