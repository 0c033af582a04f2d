"""`headgate workers` and `headgate doctor`: who is there, and what is wrong when nobody is."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cli_jobs
import pytest

import headgate
from headgate.core.clock import clock
from headgate.workers.protocol.transport import bind, grpc, make_server
from headgate.workers.protocol.wire import STATUS
from headgate.workers.protocol.wire.wire_pb2 import StatusReply
from tests.ports import number_of, reserved_port
from tests.support.cli.support import (
    PATIENCE,
    Worker,
    begins,
    calling,
    command,
    environment,
    run,
    run_here,
    until,
    worker,
)

pytestmark = pytest.mark.integration


class Place:
    """A runtime directory of a test, and a namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"XDG_RUNTIME_DIR": str(folder)}

    def worker(self, *arguments: str) -> Any:
        return worker(self.folder, *arguments, env=self.env)

    def run(self, *arguments: str) -> Any:
        """Here, or as a process while the loop of this thread is used by a test."""
        here = threading.current_thread() is threading.main_thread()
        return (run_here if here else run)(*arguments, env=self.env)

    def list(self, *arguments: str) -> list[dict[str, Any]]:
        ran = self.run("workers", "--json", *arguments)
        assert ran.returncode == 0, ran.stderr
        listed: list[dict[str, Any]] = json.loads(ran.stdout)
        return listed

    def doctor(self, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        """The exit code, and what was found by the first word of its name."""
        ran = self.run("doctor", "--json", *arguments)
        assert ran.returncode in (0, 1), ran.stderr
        return ran.returncode, {one["name"].split()[0]: one for one in json.loads(ran.stdout)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return Place(folder)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("certs") / "good"
    assert run("certs", str(folder)).returncode == 0
    return folder


@pytest.fixture(scope="module")
def other_certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("certs") / "other"
    assert run("certs", str(folder)).returncode == 0
    return folder


def uids(listed: list[dict[str, Any]]) -> set[str]:
    return {one["uid"] for one in listed}


def test_c01_workers_are_listed_with_their_load(place: Place, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with place.worker("--tag", "gpu") as one, place.worker("--bind", "127.0.0.1:0") as other:
        with place.worker("--namespace", "elsewhere") as apart:
            assert uids(place.list()) == {one.ready["uid"], other.ready["uid"]}
            assert uids(place.list("--namespace", "elsewhere")) == {apart.ready["uid"]}

        async def main() -> list[dict[str, Any]]:
            async with calling(one.metadata) as call:
                running = await begins(call, cli_jobs.wait_for, str(go), began=tmp_path / "began")
                listed = await asyncio.to_thread(place.list)
                go.touch()
                await running
                return listed

        [found] = [found for found in asyncio.run(main()) if found["uid"] == one.ready["uid"]]
        assert found["address"] == one.ready["address"]
        assert found["pid"] == one.process.pid
        assert (found["load"], found["clients"], found["finished"]) == (1, 1, 0)
        assert (found["tags"], found["version"], found["secure"]) == (["gpu"], headgate.__version__, False)
        assert (found["admitted"], found["reason"]) == (True, None)
        assert 0 <= found["age"] < 10 * PATIENCE

        printed = run("workers", env=place.env).stdout
        head, *rows = printed.splitlines()
        assert head.split()[:7] == ["uid", "address", "state", "load", "clients", "version", "tags"]
        assert len(rows) == 2
        assert "\x1b" not in printed


def test_c01_nobody_there_is_an_empty_list_and_said_on_stderr(place: Place) -> None:
    ran = run("workers", "--json", env=place.env)
    assert (ran.returncode, ran.stdout) == (0, "[]\n")
    assert "no workers in the namespace 'default'" in ran.stderr


def test_c01_a_worker_is_dropped_before_it_has_stopped(place: Place, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with place.worker() as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                running = await begins(call, cli_jobs.wait_for, str(go), began=tmp_path / "began")
                started.signal(signal.SIGTERM)
                await asyncio.to_thread(started.until_logged, "got SIGTERM")
                await asyncio.to_thread(until, lambda: not place.list())
                assert started.process.poll() is None
                go.touch()
                assert await running == "seen"

        asyncio.run(main())
        assert started.wait() == 0


def test_c01_a_killed_worker_is_not_listed(place: Place) -> None:
    with place.worker() as started:
        started.signal(signal.SIGKILL)
        started.wait()
    assert place.list() == []


def test_c01_why_a_worker_is_not_used(place: Place, certs: Path, other_certs: Path) -> None:
    with place.worker("--cert-dir", str(certs)) as started:
        assert started.ready["secure"] is True
        assert started.ready["address"].startswith("127.0.0.1:")
        [plain] = place.list()
        assert (plain["admitted"], plain["load"]) == (False, None)
        assert (
            plain["reason"]
            == "it has credentials, and a pool without credentials uses insecure workers only: pass credentials="
        )
        [trusted] = place.list("--cert-dir", str(certs))
        assert (trusted["admitted"], trusted["load"]) == (True, 0)
        [wrong] = place.list("--cert-dir", str(other_certs))
        assert wrong["admitted"] is False
        assert "CA" in wrong["reason"]
        assert wrong["remedy"]
    with place.worker("--bind", "127.0.0.1:0"):
        [plain] = place.list("--cert-dir", str(certs))
        assert plain["reason"] == "it has no credentials, and a pool with credentials uses secure workers only"


def test_c01_the_row_of_a_listed_worker_tells_whether_it_serves_tls(place: Place, certs: Path) -> None:
    """Nobody announces what a listed address serves: what the connection shows counts, not what the client has."""
    listed = ("--none", "--bind", "127.0.0.1:0")
    with place.worker(*listed, "--cert-dir", str(certs)) as secure, place.worker(*listed) as plain:
        [found] = place.list(secure.ready["address"])
        assert ("speaks TLS only" in found["reason"], found["secure"]) == (True, True)
        [found] = place.list(plain.ready["address"], "--cert-dir", str(certs))
        assert (found["admitted"], found["secure"]) == (False, False), found["reason"]


# -- workers that are not what they seem ------------------------------------------------------------------------------


class Impostor(grpc.GenericRpcHandler):  # type: ignore[misc]
    """What answers a Status request with these bytes; None: it does not know that request."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.reply) if details.method == STATUS else None

    async def reply(self, request: bytes, context: Any) -> bytes:
        if self.answer is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return self.answer or b""


@asynccontextmanager
async def impostor(answer: bytes | None) -> AsyncIterator[str]:
    """The address of an impostor."""
    server = make_server(Impostor(answer))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


def status(**changes: Any) -> bytes:
    told = {"uid": "w-1", "version": "0.1.0", "oldest": 1, "newest": 1, "now": clock.wall(), "started_at": clock.wall()}
    return bytes(StatusReply(**{**told, **changes}).SerializeToString())


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with reserved_port() as unheard:
        yield f"127.0.0.1:{number_of(unheard)}"


def test_c01_workers_that_are_old_unreachable_or_of_another_version_are_told(
    place: Place, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place.folder))

    async def main() -> list[dict[str, Any]]:
        discovery = headgate.LocalDiscovery("default")
        async with impostor(None) as old, impostor(status(oldest=7, newest=9)) as far, impostor(b"\xff") as odd:
            base = headgate.WorkerMetadata("old", old, 1, headgate.__version__)
            async with discovery.publisher as publisher:
                for metadata in (
                    base,
                    replace(base, uid="far", address=far),
                    replace(base, uid="odd", address=odd),
                    replace(base, uid="gone", address=nobody),
                    replace(base, uid="version", version="9.1.2"),
                    replace(base, uid="unreadable", version="latest"),
                ):
                    await publisher.publish("worker-added", metadata)
                return await asyncio.to_thread(place.list)

    listed = {one["uid"]: one for one in asyncio.run(main())}
    assert listed["old"]["admitted"]
    assert listed["old"]["load"] is None
    assert "release that cannot tell its load" in listed["old"]["reason"]
    assert listed["far"]["reason"] == "it speaks protocols 7 to 9, we speak 1 to 1"
    assert not listed["odd"]["admitted"]
    assert listed["gone"]["reason"].startswith("nothing listens at 127.0.0.1:")
    assert listed["version"]["reason"] == (
        f"its version 9.1.2 is not compatible with {headgate.__version__}: the first numbers differ"
    )
    assert listed["unreadable"]["reason"] == "its version 'latest' cannot be read"
    assert {uid for uid, one in listed.items() if one["admitted"]} == {"old"}


def test_c01_w63_workers_at_addresses_and_of_a_host_name_are_listed(place: Place, nobody: str) -> None:
    with place.worker("--none", "--bind", "127.0.0.1:0", "--tag", "gpu", "--metrics-port", "0") as there:
        address = there.ready["address"]
        one, other = place.list(address, nobody)
        assert (one["uid"], one["pid"], one["tags"]) == (there.ready["uid"], there.ready["pid"], ["gpu"])
        assert (one["admitted"], one["load"], one["metrics_port"]) == (True, 0, there.ready["metrics_port"])
        assert (other["admitted"], other["version"], other["metrics_port"]) == (False, None, None)
        assert other["reason"].startswith("nothing listens at")
        port = address.rpartition(":")[2]
        assert there.ready["uid"] in [found["uid"] for found in place.list("--dns", f"localhost:{port}")]
        printed = place.run("workers", address, nobody)
        assert str(there.ready["metrics_port"]) in printed.stdout
        code, found = place.doctor("--dns", f"localhost:{port}")
        assert found["worker"]["state"] == "ok" or code, found
        ran = place.run("doctor", address, nobody)
        assert ran.returncode == 1
        assert f"worker {address}" in ran.stdout
        assert f"worker {nobody}" in ran.stdout


def test_c01_a_name_that_is_not_known_and_a_choice_of_two_are_refused(place: Place) -> None:
    ran = place.run("workers", "--dns", "nobody.invalid:7070")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "nobody.invalid cannot be looked up" in ran.stderr
    code, found = place.doctor("--dns", "nobody.invalid:7070")
    assert (code, found["name"]["state"]) == (1, "wrong")
    for words in (("127.0.0.1:1", "--lan"), ("127.0.0.1:1", "--dns", "localhost"), ("--dns", "a:b"), ("nowhere",)):
        assert place.run("workers", *words).returncode == 2, words


def test_c01_w60_the_port_of_the_metrics_is_announced(place: Place) -> None:
    with place.worker("--metrics-port", "0") as one, place.worker() as other:
        listed = {found["uid"]: found["metrics_port"] for found in place.list()}
        assert listed == {one.ready["uid"]: one.ready["metrics_port"], other.ready["uid"]: None}


def test_c01_w72_doctor_accepts_two_cas_in_one_file(
    place: Place, certs: Path, other_certs: Path, tmp_path: Path
) -> None:
    both = tmp_path / "both"
    both.mkdir(mode=0o700)
    for name in ("worker-cert.pem", "worker-key.pem"):
        (both / name).write_bytes((certs / name).read_bytes())
        (both / name).chmod(0o600)
    (both / "ca-cert.pem").write_bytes(
        (other_certs / "ca-cert.pem").read_bytes() + (certs / "ca-cert.pem").read_bytes()
    )
    assert place.run("certs", "check", str(both)).returncode == 0
    _, found = place.doctor("--cert-dir", str(both))
    assert found["certificates"]["state"] == "ok"


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_c01_doctor_finds_a_healthy_machine_and_its_workers(place: Place) -> None:
    with place.worker() as started:
        code, found = place.doctor()
        assert code == 0, found
        assert {"open", "sockets", "runtime", "shared", "multicast", "announcing", "worker"} <= set(found)
        assert started.ready["uid"] in found["worker"]["name"]
        code, found = place.doctor(started.ready["address"])
        assert (code, found["socket"]["state"], found["worker"]["state"]) == (0, "ok", "ok")
        printed = run("doctor", started.ready["address"], env=place.env)
        assert printed.stdout.startswith("ok ")


def test_c01_doctor_names_who_does_not_listen(place: Place, nobody: str, tmp_path: Path) -> None:
    code, found = place.doctor(nobody)
    assert code == 1
    assert found["worker"]["text"].startswith("nothing listens at")
    assert found["worker"]["remedy"]
    code, found = place.doctor(f"unix:{tmp_path}/nobody")
    assert (code, found["socket"]["remedy"]) == (1, "Start the worker.")
    path = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    code, found = place.doctor(f"unix:{path}")
    assert (code, "its worker has died" in found["socket"]["text"]) == (1, True)
    (tmp_path / "file").touch()
    assert place.doctor(f"unix:{tmp_path}/file")[0] == 1
    code, found = place.doctor(f"{'x' * 70}:80")
    assert (code, "is not known" in found["name"]["text"]) == (1, True)


def test_c01_doctor_names_permissions(place: Place, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    code, found = place.doctor(f"unix:{shared}/socket")
    assert (code, "others can write" in found["socket"]["text"]) == (1, True)
    (place.folder / "headgate").mkdir()
    (place.folder / "headgate").chmod(0o755)
    code, found = place.doctor()
    assert code == 1
    assert "mode 0755, so others can enter it" in found["runtime"]["text"]
    assert "announcing" not in found


def test_c01_doctor_names_limits(place: Place) -> None:
    ran = subprocess.run(
        ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command("doctor", "--json")],
        capture_output=True,
        text=True,
        env=environment(place.env),
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    found = {one["name"]: one for one in json.loads(ran.stdout)}
    assert found["open files"]["text"] == "a process may open 200 files"
    assert "ulimit -n" in found["open files"]["remedy"]


def test_c01_doctor_names_the_cause_of_tls(place: Place, certs: Path, other_certs: Path) -> None:
    with place.worker("--none", "--bind", "127.0.0.1:0", "--cert-dir", str(certs)) as secure:
        address = secure.ready["address"]
        code, found = place.doctor(address, "--cert-dir", str(certs))
        assert (code, found["certificates"]["state"], found["worker"]["state"]) == (0, "ok", "ok")
        assert "with TLS" in found["worker"]["text"]
        code, found = place.doctor(address)
        assert (code, "TLS" in found["worker"]["text"]) == (1, True)
        code, found = place.doctor(address, "--cert-dir", str(other_certs))
        assert (code, "CA" in found["worker"]["text"]) == (1, True)
        code, found = place.doctor(address.replace("127.0.0.1", "127.0.0.2"), "--cert-dir", str(certs))
        assert code == 1
    with place.worker("--none", "--bind", "127.0.0.1:0") as plain:
        code, found = place.doctor(plain.ready["address"], "--cert-dir", str(certs))
        assert (code, "TLS" in found["worker"]["text"]) == (1, True)


@contextmanager
def silence() -> Iterator[str]:
    """The address of somebody who accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_c01_doctor_names_somebody_who_does_not_answer(place: Place) -> None:
    with silence() as address:
        code, found = place.doctor(address)
    assert (code, found["worker"]["state"]) == (1, "wrong")
    assert found["worker"]["remedy"]


def test_c01_doctor_names_clocks_that_differ(place: Place) -> None:
    async def main() -> tuple[int, dict[str, dict[str, str]]]:
        async with impostor(status(now=clock.wall() + 3600, started_at=clock.wall())) as address:
            return await asyncio.to_thread(place.doctor, address)

    code, found = asyncio.run(main())
    assert code == 1
    assert found["clock"]["text"].endswith("s ahead of ours")
    assert "NTP" in found["clock"]["remedy"]


def test_c01_doctor_names_protocols_that_differ(place: Place) -> None:
    async def main() -> tuple[int, dict[str, dict[str, str]]]:
        async with impostor(status(oldest=7, newest=9)) as address:
            return await asyncio.to_thread(place.doctor, address)

    code, found = asyncio.run(main())
    assert (code, "it speaks protocols 7 to 9" in found["worker"]["text"]) == (1, True)


def test_c01_a_worker_takes_rotated_certificates(place: Place, certs: Path, tmp_path: Path) -> None:
    """The files of --cert-dir are read again: a client of a new CA is served without a restart."""
    import shutil

    folder = tmp_path / "rotating"
    shutil.copytree(certs, folder)
    with place.worker("--none", "--bind", "127.0.0.1:0", "--cert-dir", str(folder)) as started:
        assert place.doctor(started.ready["address"], "--cert-dir", str(folder))[0] == 0
        new = tmp_path / "new"
        assert run("certs", str(new)).returncode == 0
        for path in new.iterdir():
            path.replace(folder / path.name)
        _until_well(place, started, folder)


def _until_well(place: Place, started: Worker, folder: Path) -> None:
    deadline = clock.now() + PATIENCE
    while (found := place.doctor(started.ready["address"], "--cert-dir", str(folder)))[0]:
        assert clock.now() < deadline, found


def on_terminal(*arguments: str, env: dict[str, str]) -> str:
    """What a command writes to a terminal."""
    import os
    import pty

    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment({"TERM": "xterm", **env})
        ) as process:
            os.close(theirs)
            written = b""
            try:
                while data := os.read(ours, 65536):
                    written += data
            except OSError:  # how Linux says that nobody writes here any more
                pass
            process.wait(PATIENCE)
    finally:
        os.close(ours)
    return written.decode()


def test_c01_a_terminal_gets_colours_unless_no_color_is_set(place: Place) -> None:
    with place.worker() as started:
        for arguments, plains in (
            (["doctor", started.ready["address"]], [{"NO_COLOR": "1"}]),
            (["workers"], [{"NO_COLOR": "1"}, {"TERM": "dumb"}]),
        ):
            coloured = on_terminal(*arguments, env=place.env)
            assert "\x1b[" in coloured
            assert started.ready["uid"] in coloured.replace("\r\n", "")
            for plain in plains:
                assert "\x1b[" not in on_terminal(*arguments, env={**place.env, **plain})


@pytest.fixture
def network() -> Iterator[list[str]]:
    """What to write before a command that is to run in a network of its own."""
    name = f"headgate-{clock.token()[:6]}"
    within = ["ip", "netns", "exec", name]
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made: {getattr(error, 'stderr', error)!r}")
    try:
        subprocess.run([*within, "ip", "link", "set", "lo", "up", "multicast", "on"], check=True, capture_output=True)
        subprocess.run(
            [*within, "ip", "route", "add", "224.0.0.0/4", "dev", "lo"],
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )
        yield within
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)


def test_c01_w62_workers_of_the_network_are_found_and_leave_it(place: Place, network: list[str], certs: Path) -> None:
    pytest.importorskip("zeroconf")
    shared = ["--lan", "--namespace", "net", "--cert-dir", str(certs)]

    def ask(*arguments: str) -> Any:
        ran = subprocess.run(
            [*network, *command(*arguments, *shared, "--json")],
            capture_output=True,
            text=True,
            env=environment(place.env),
            timeout=PATIENCE,
            check=False,
        )
        return ran.returncode, json.loads(ran.stdout)

    with subprocess.Popen(
        [*network, *command("worker", *shared, "--advertise", "127.0.0.1", "--tag", "gpu")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(place.env),
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["secure"], ready["tags"]) == (True, ["gpu"])
        assert ready["address"].startswith("127.0.0.1:")
        try:
            listed: list[dict[str, Any]] = []
            # On a busy machine an answer may come after those who asked have gone.
            until(lambda: listed.extend(ask("workers")[1]) or listed)
            [found] = listed
            assert (found["uid"], found["admitted"], found["load"]) == (ready["uid"], True, 0)
            assert found["tags"] == ["gpu"]

            def is_found() -> bool:
                code, checks = ask("doctor")
                assert code == 0, checks
                return {"announcing", f"worker {ready['uid']}"} <= {one["name"] for one in checks}

            until(is_found)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert ask("workers")[1] == []
