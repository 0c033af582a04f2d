"""WorkerCredentials as values: what they accept, where they come from, and how they are renewed."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
from dataclasses import FrozenInstanceError
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

import headgate
from headgate import InvalidArgument, InvalidType, WorkerCredentials
from headgate.workers import credentials as module
from headgate.workers.credentials import Material
from headgate.workers.options import checked_credentials
from headgate.workers.protocol.transport import grpc
from tests.support.workers.certificates import Authority, encrypted
from tests.support.workers.support import run, until, wait_until

CA, OTHER = Authority(), Authority("another CA")
NEW = CA.issue(subject="the next")
PROVIDED: list[Any] = []


def provided() -> Any:
    """What a provider of a module returns: `PROVIDED` says."""
    [given] = PROVIDED
    if isinstance(given, BaseException):
        raise given
    return given


@pytest.fixture
def provide() -> Any:
    """Set what `provided` returns."""

    def set_to(given: Any) -> None:
        PROVIDED[:] = [given]

    set_to((CA.cert, *CA.good))
    yield set_to
    PROVIDED.clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("days", [1, 400, 30_000], ids=["soon", "later", "after 2050"])
@pytest.mark.parametrize("subject", ["worker", "w" * 60])
def test_w70b_credentials_say_when_their_certificate_expires(days: int, subject: str) -> None:
    pair = CA.issue(*(f"host-{number}.example.org" for number in range(30)), end=timedelta(days=days), subject=subject)
    chain = pair.cert + CA.cert
    wanted = x509.load_pem_x509_certificate(pair.cert).not_valid_after_utc.timestamp()
    assert WorkerCredentials(CA.cert, pair.key, chain).expires_at() == wanted
    with_text = b"Certificate:\n    Data:\n" + chain  # as `openssl x509 -text` writes it
    assert WorkerCredentials(CA.cert, pair.key, with_text).expires_at() == wanted
    assert WorkerCredentials(CA.cert, b"", b"", mutual=False).expires_at() is None


def test_w70b_the_expiry_is_that_of_the_certificate_that_was_renewed(tmp_path: Path) -> None:
    old, new = CA.issue(end=timedelta(days=1)), CA.issue(end=timedelta(days=90))
    ours = WorkerCredentials.from_files(*old.write(tmp_path, CA.cert), reload=True)
    before = ours.expires_at()
    new.write(tmp_path, CA.cert)
    assert before is not None
    wait_until(lambda: (ours.expires_at() or 0.0) > before + 80 * 86400)


def test_w70_credentials_are_frozen_values_and_at_the_root() -> None:
    ours = WorkerCredentials(CA.cert, *CA.good)
    assert headgate.WorkerCredentials is headgate.workers.WorkerCredentials is WorkerCredentials
    assert (ours.ca_cert, ours.worker_key, ours.worker_cert) == (CA.cert, CA.good.key, CA.good.cert)
    assert ours.mutual
    assert ours.identity is None
    assert ours == WorkerCredentials(ca_cert=CA.cert, worker_key=CA.good.key, worker_cert=CA.good.cert, mutual=True)
    assert hash(ours) == hash(WorkerCredentials(CA.cert, *CA.good))
    assert ours != WorkerCredentials(CA.cert, *CA.good, False)
    assert ours != WorkerCredentials(CA.cert, *CA.good, identity="workers")
    assert ours != WorkerCredentials(CA.cert, *NEW)
    with pytest.raises(FrozenInstanceError):
        ours.mutual = False  # type: ignore[misc]


def test_w70_the_properties_are_objects_of_grpc() -> None:
    for mutual in (True, False):
        ours = WorkerCredentials(CA.cert, *CA.good, mutual)
        assert isinstance(ours.server_credentials, grpc.ServerCredentials)
        assert isinstance(ours.client_credentials, grpc.ChannelCredentials)


def test_w70_the_key_is_in_no_repr(tmp_path: Path) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    secret = CA.good.key.decode().splitlines()[1][:20]
    for ours in (
        WorkerCredentials(CA.cert, *CA.good, identity="workers"),
        WorkerCredentials.from_files(*files, reload=True),
        WorkerCredentials.from_provider(lambda: (CA.cert, *CA.good)),
    ):
        for shown in (repr(ours), str(ours), f"{ours}", repr([ours]), repr(ours.material), f"{ours.source!r}"):
            assert "PRIVATE" not in shown
            assert secret not in shown
            assert len(shown) < 500
    with pytest.raises(InvalidArgument) as caught:
        WorkerCredentials(CA.cert, CA.good.key, OTHER.good.cert)
    assert secret not in str(caught.value)


def test_w70_a_client_of_one_way_tls_needs_no_certificate() -> None:
    ours = WorkerCredentials(CA.cert, b"", b"", mutual=False)
    assert isinstance(ours.client_credentials, grpc.ChannelCredentials)
    with pytest.raises(InvalidArgument, match="a worker needs a key and a certificate"):
        _ = ours.server_credentials


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((b"", *CA.good), InvalidArgument, "ca_cert is empty"),
        ((CA.cert, b"", CA.good.cert), InvalidArgument, "worker_key is empty"),
        ((CA.cert, CA.good.key, b""), InvalidArgument, "worker_cert is empty"),
        ((CA.cert, b"", b""), InvalidArgument, "worker_key is empty"),
        ((b"not pem", *CA.good), InvalidArgument, "ca_cert is not PEM"),
        ((CA.good.key, *CA.good), InvalidArgument, "ca_cert has no certificate"),
        ((CA.cert[:200], *CA.good), InvalidArgument, "ca_cert has no certificate"),
        ((CA.cert, CA.good.cert, CA.good.key), InvalidArgument, "worker_key or worker_cert cannot be read"),
        ((CA.cert, OTHER.good.key, CA.good.cert), InvalidArgument, "worker_key is not the key of worker_cert"),
        ((CA.cert, encrypted(CA.good.key), CA.good.cert), InvalidArgument, "worker_key has a password"),
        ((CA.cert, CA.good.key[:100], CA.good.cert), InvalidArgument, "worker_key or worker_cert cannot be read"),
        ((CA.cert.decode(), *CA.good), InvalidType, "ca_cert must be bytes"),
        ((CA.cert, None, CA.good.cert), InvalidType, "worker_key must be bytes"),
        ((CA.cert, *CA.good, 1), InvalidType, "mutual must be bool"),
        ((CA.cert, *CA.good, True, ""), InvalidArgument, "identity must be a name"),
        ((CA.cert, *CA.good, True, "host:80"), InvalidArgument, "identity must be a name"),
        ((CA.cert, *CA.good, True, b"name"), InvalidType, "identity must be a string"),
    ],
)
def test_w70_wrong_material_is_refused_with_what_to_do(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        WorkerCredentials(*given)


def test_w70_several_cas_are_several_certificates_in_one_file() -> None:
    assert WorkerCredentials(CA.cert + OTHER.cert, *CA.good).ca_cert.count(b"BEGIN") == 2


def test_w70a_the_key_is_written_to_no_disk_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no file in memory, a temporary one is used and removed."""
    import tempfile

    def refuse(*_: object) -> int:
        raise OSError("not here")

    made: list[str] = []
    make = tempfile.mkstemp

    def note(**options: Any) -> tuple[int, str]:
        fd, path = make(dir=tmp_path, **options)
        made.append(path)
        assert os.stat(path).st_mode & 0o777 == 0o600
        return fd, path

    if hasattr(os, "memfd_create"):
        monkeypatch.setattr(tempfile, "mkstemp", lambda **_: pytest.fail("a file on the disk"))
        WorkerCredentials(CA.cert, *CA.good)
        monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", note)
    WorkerCredentials(CA.cert, *CA.good)
    with pytest.raises(InvalidArgument):
        WorkerCredentials(CA.cert, OTHER.good.key, CA.good.cert)
    assert len(made) == 4
    assert list(tmp_path.iterdir()) == []


def test_credentials_of_a_call_are_checked() -> None:
    ours = WorkerCredentials(CA.cert, *CA.good)
    assert checked_credentials(ours) is ours
    assert checked_credentials(None) is None
    with pytest.raises(InvalidType, match="credentials must be WorkerCredentials, got dict"):
        checked_credentials({})


# -- files, pickles ---------------------------------------------------------------------------------------------------


def test_w70a_files_are_given_as_strings_or_paths(tmp_path: Path) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    for paths in (files, [os.fspath(path) for path in files]):
        assert WorkerCredentials.from_files(*paths) == WorkerCredentials(CA.cert, *CA.good)
        assert WorkerCredentials.from_files(*paths, False).mutual is False
    named = WorkerCredentials.from_files(ca_path=files[0], key_path=files[1], cert_path=files[2], identity="workers")
    assert named.identity == "workers"
    assert WorkerCredentials.from_files(files[0], None, None, mutual=False).worker_key == b""


def test_w70a_files_that_cannot_be_read_raise_as_open_does(tmp_path: Path) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        WorkerCredentials.from_files(files[0], tmp_path / "nowhere", files[2])
    files[1].chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)  # to whom modes mean something
        with pytest.raises(PermissionError):
            WorkerCredentials.from_files(*files)
    finally:
        if is_root:
            os.seteuid(0)
    for wrong in (None, 3, b"bytes", ""):
        with pytest.raises((InvalidType, InvalidArgument), match="ca_path must be a path"):
            WorkerCredentials.from_files(wrong, *files[1:])  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="cert_path must be a path"):
        WorkerCredentials.from_files(files[0], files[1], None)


def test_w70a_credentials_are_equal_after_a_round_trip(tmp_path: Path, provide: Any) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    for ours in (
        WorkerCredentials(CA.cert, *CA.good, identity="workers"),
        WorkerCredentials(CA.cert, b"", b"", mutual=False),
        WorkerCredentials.from_files(*files),
        WorkerCredentials.from_files(*files, False, reload=True),
        WorkerCredentials.from_provider(provided),
    ):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            other = pickle.loads(pickle.dumps(ours, protocol))
            assert other == ours
            assert hash(other) == hash(ours)
            assert other.source == ours.source


def test_w70b_pickled_credentials_are_read_again_where_they_arrive(tmp_path: Path) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    data = pickle.dumps(WorkerCredentials.from_files(*files, reload=True))
    NEW.write(tmp_path, CA.cert)

    async def main() -> None:
        arrived = pickle.loads(data)
        assert arrived.material == Material(CA.cert, *CA.good)
        assert (await arrived.refreshed()).material == Material(CA.cert, *NEW)

    run(main)


def test_w70b_relative_paths_mean_the_folder_where_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CA.good.write(tmp_path, CA.cert)
    monkeypatch.chdir(tmp_path)
    ours = WorkerCredentials.from_files("ca.pem", "key.pem", "cert.pem", reload=True)
    monkeypatch.chdir("/")
    NEW.write(tmp_path, CA.cert)

    async def main() -> None:
        assert (await ours.refreshed()).worker_cert == NEW.cert

    run(main)


# -- renewal ----------------------------------------------------------------------------------------------------------


def test_w70b_files_that_were_replaced_are_read_again(tmp_path: Path) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    ours, fixed = WorkerCredentials.from_files(*files, reload=True), WorkerCredentials.from_files(*files)

    async def main() -> None:
        assert await ours.refreshed() is ours
        NEW.write(tmp_path, CA.cert)
        new = await until_new(ours)
        assert new.material == Material(CA.cert, *NEW)
        assert new.source == ours.source
        assert ours.material == Material(CA.cert, *CA.good)  # a value does not change
        assert ours.newest == new.newest == new.material
        assert await fixed.refreshed() is fixed

    run(main)


async def until_new(ours: WorkerCredentials) -> WorkerCredentials:
    for _ in range(500):
        new = await ours.refreshed()
        if new.material != ours.material:
            return new
        await asyncio.sleep(0.02)
    raise AssertionError("nothing new came")


def test_w70b_files_replaced_one_after_the_other_warn_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = CA.good.write(tmp_path, CA.cert)
    ours = WorkerCredentials.from_files(*files, reload=True)

    async def main() -> None:
        files[1].write_bytes(NEW.key)
        reading = asyncio.ensure_future(ours.refreshed())
        await until(lambda: any(one.name == "headgate-credentials" for one in threading.enumerate()))
        files[2].write_bytes(NEW.cert)
        assert (await reading).material == Material(CA.cert, *NEW)

    run(main)
    assert warnings_of(caplog) == []


def test_w70b_a_failed_renewal_serves_the_old_and_warns_once_for_each_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLING", ())
    files = CA.good.write(tmp_path, CA.cert)
    ours = WorkerCredentials.from_files(*files, reload=True)

    async def again(times: int = 3) -> None:
        for _ in range(times):
            assert await ours.refreshed() is ours
            await asyncio.sleep(0.12)  # for as long as an answer counts as new

    async def main() -> None:
        files[2].unlink()
        await again()
        [missing] = warnings_of(caplog)
        assert "could not be renewed" in missing
        assert "FileNotFoundError" in missing
        files[2].write_bytes(OTHER.good.cert)
        await again()
        [_, mismatch] = warnings_of(caplog)
        assert "worker_key is not the key of worker_cert" in mismatch
        files[2].write_bytes(CA.good.cert)  # and now it works, so that the next failure is news again
        await again(1)
        files[2].unlink()
        await again()
        assert len(warnings_of(caplog)) == 3
        assert not any("PRIVATE" in text for text in warnings_of(caplog))

    run(main)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (RuntimeError("the vault is sealed"), "the vault is sealed"),
        ("a string", "it returned str"),
        ((CA.cert, CA.good.key), "it returned tuple"),
        ((CA.cert, OTHER.good.key, CA.good.cert), "worker_key is not the key"),
        ((CA.cert, "text", CA.good.cert), "worker_key must be bytes"),
    ],
)
def test_w70b_a_provider_that_fails_or_returns_nonsense_changes_nothing(
    provide: Any, caplog: pytest.LogCaptureFixture, given: Any, text: str
) -> None:
    ours = WorkerCredentials.from_provider(provided)

    async def main() -> None:
        provide(given)
        assert await ours.refreshed() is ours

    run(main)
    [warning] = warnings_of(caplog)
    assert text in warning


def test_w70b_a_provider_is_asked_once_a_second_at_most(provide: Any) -> None:
    asked: list[int] = []

    def count() -> Any:
        asked.append(1)
        return provided()

    ours = WorkerCredentials.from_provider(count)

    async def main() -> None:
        await asyncio.gather(*(ours.refreshed() for _ in range(50)))
        for _ in range(50):
            await ours.refreshed()

    run(main)
    assert len(asked) <= 5, "once when it was made, once now; more only if this took seconds"


def test_w70b_a_provider_must_be_a_plain_function(provide: Any) -> None:
    async def late() -> Any:
        return provided()

    with pytest.raises(InvalidType, match="it returned coroutine"):
        WorkerCredentials.from_provider(late)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="provider must be callable"):
        WorkerCredentials.from_provider(None)  # type: ignore[arg-type]


def test_w70b_a_slow_provider_never_blocks_the_loop(
    provide: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    gate, asked = threading.Event(), threading.Event()
    first = True

    def slow() -> Any:
        nonlocal first
        if not first:
            asked.set()
            gate.wait(30)
        first = False
        return provided()

    ours = WorkerCredentials.from_provider(slow)

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        try:
            assert await ours.refreshed() is ours  # after a wait
            assert asked.is_set()
            assert ticks >= 3, "the loop had its turns meanwhile"
            for _ in range(100):
                assert await ours.refreshed() is ours  # at once: it is late already
            assert ours.newest == ours.material
            assert [one.name for one in threading.enumerate()].count("headgate-credentials") == 1
            provide((CA.cert, *NEW))
            gate.set()
            assert (await until_new(ours)).material == Material(CA.cert, *NEW)
        finally:
            gate.set()
            ticking.cancel()

    run(main)
    assert [text for text in warnings_of(caplog) if "nothing came within 0.3 s" in text]
    assert len(warnings_of(caplog)) == 1
