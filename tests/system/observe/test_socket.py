"""`publish()`: who can connect, what is answered, what is done, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import headgate
from headgate.observe import Publication, actions, publish, publishing, sockets
from headgate.observe.events import ActionTaken
from headgate.observe.lines import LONGEST_REQUEST, encoded
from headgate.observe.listeners import Listener
from headgate.observe.programs import Program as Connection
from headgate.observe.programs import Refused, programs
from headgate.observe.publishing import MOST_CLIENTS
from headgate.observe.sampler import Sampler
from tests.support.cli.support import run_here
from tests.system.observe.conftest import Program
from tests.system.observe.support import PATIENCE, SECRET, eventually

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of its own, with a path that is too long for a socket."""
    path = tmp_path / ("long" * 20)
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def published(program: Program) -> Iterator[Publication]:
    publication = publish()
    assert publish() is publication, "a second call changes nothing"
    yield publication
    publication.close()
    publication.close()


@pytest.fixture
def connection(published: Publication) -> Iterator[Connection]:
    [connection] = programs(os.getpid())
    with connection:
        yield connection


def pool_of(seen: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [view for view in seen["pools"] if view["name"] == name]
    return found


def test_o10_a_program_answers_what_its_pools_do(program: Program, connection: Connection) -> None:
    seen = connection.ask("snapshot")
    assert (seen["pid"], seen["schema"]) == (os.getpid(), 1)
    tasks = pool_of(seen, program.pool.name)
    assert (tasks["active"], tasks["queued"], tasks["failed"]) == (2, 2, 1)
    assert pool_of(connection.ask("hello"), program.pool.name)["active"] == 2
    assert "tenants" not in pool_of(connection.ask("hello"), program.pool.name)
    told = connection.ask("story", task=f"{program.pool.name}/1")
    assert "failed: ValueError: refused by <key-" in told
    assert SECRET not in json.dumps(seen) + told


def test_o10_the_socket_is_of_this_user_alone(published: Publication) -> None:
    assert stat.S_IMODE(os.stat(published.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(published.path)).st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_o10_another_user_cannot_connect(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10)\n"
        "try:\n"
        '    s.connect(sys.argv[1]); s.sendall(b\'{"v":1,"id":1,"ask":"hello"}\\n\')\n'
        "    print(s.recv(100) or 'closed')\n"
        "except ConnectionError: print('closed')\n"
        "except OSError as error: print(type(error).__name__)\n"
    )

    def as_nobody(path: str) -> str:
        other = ["/usr/bin/env", "-i", "python3", "-c", code, path]
        ran = subprocess.run(
            other, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, cwd="/", check=True
        )
        return ran.stdout.strip()

    with tempfile.TemporaryDirectory(prefix="hgt-", dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        publication = publish()
        try:
            assert as_nobody(publication.path) == "PermissionError"
            for folder in (short, f"{short}/headgate", f"{short}/headgate/programs"):
                os.chmod(folder, 0o755)
            assert as_nobody(publication.path) == "PermissionError", "the mode of the socket says no too"
            os.chmod(publication.path, 0o666)
            assert as_nobody(publication.path) == "closed", "and the program asks who it is"
        finally:
            for folder in (f"{short}/headgate/programs", f"{short}/headgate", short):
                os.chmod(folder, 0o700)
            publication.close()


def test_o10_actions_are_done_on_the_pools_loop_and_told(program: Program, connection: Connection) -> None:
    told: list[ActionTaken] = []
    stop = headgate.subscribe(told.append, "observe.actions")
    name, keys = program.pool.name, program.keys
    running = pool_of(connection.ask("snapshot"), name)["running"][0]["number"]
    assert connection.ask("act", action="cancel", target=f"{name}/{running}") == f"{name}#{running} is cancelled"
    eventually(lambda: program.pool.snapshot().cancelled == 1)
    connection.ask("act", action="disable", target="key-1", pool=keys.name)
    assert keys.snapshot()["key-1"]["status"] == "disabled"
    connection.ask("act", action="enable", target="key-2", pool=keys.name)
    assert keys.snapshot()["key-2"]["status"] == "healthy"
    connection.ask("act", action="resize", target="7", pool=name)
    assert program.pool.max_concurrent == 7
    [failure] = pool_of(connection.ask("snapshot"), name)["failures"]
    assert failure["can_retry"]
    assert "runs again as" in connection.ask("act", action="retry", target=failure["id"])
    eventually(lambda: program.pool.snapshot().failed == 2)
    with pytest.raises(Refused, match="was retried already"):
        connection.ask("act", action="retry", target=failure["id"])
    number = next(one.number for one in headgate.registry.pools("tasks") if one.name == name)
    assert "takes no more tasks" in connection.ask("act", action="drain", target=f"#{number}")
    eventually(lambda: pool_of(connection.ask("snapshot"), name)["state"] == "closing")
    stop()
    assert [(one.action, one.outcome, one.origin) for one in told if "retried already" not in one.outcome] == [
        (action, "done", "terminal") for action in ("cancel", "disable", "enable", "resize", "retry", "drain")
    ]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"action": "cancel", "target": "nonsense"}, "names no task"),
        ({"action": "cancel", "target": "no pool/3"}, "no such pool"),
        ({"action": "cancel", "target": "@pool/2", "pool": "no pool"}, "no such pool"),
        ({"action": "retry", "target": "@pool/2"}, "cannot be retried"),
        ({"action": "cancel", "target": "@pool/1"}, "has ended already"),
        ({"action": "cancel", "target": "@pool/99999"}, "is not known"),
        ({"action": "disable", "target": "key-77"}, "no pool here has the resource"),
        ({"action": "resize", "target": "0", "pool": "@pool"}, "from 1 to"),
        ({"action": "resize", "target": "many", "pool": "@pool"}, "from 1 to"),
        (
            {"action": "resize", "target": "3", "pool": "@keys"},
            "is a pool of resources, and this is done to pools of tasks",
        ),
        ({"action": "explode", "target": "x"}, "is no action"),
        ({"action": ["cancel"], "target": "x"}, "must be a text"),
        ({"action": "cancel", "target": "x" * 2000}, "must be a text"),
    ],
)
def test_o10_what_cannot_be_done_is_refused_with_its_reason(
    program: Program, connection: Connection, asked: dict[str, Any], words: str
) -> None:
    asked = {
        name: value.replace("@pool", program.pool.name).replace("@keys", program.keys.name)
        if isinstance(value, str)
        else value
        for name, value in asked.items()
    }
    with pytest.raises(Refused, match=words):
        connection.ask("act", **asked)
    assert connection.ask("hello")["pid"] == os.getpid(), "the connection goes on"


def test_o10_a_task_of_another_pool_than_the_named_one_is_refused(program: Program, connection: Connection) -> None:
    async def other() -> None:
        async with headgate.TaskPool("another pool of the program") as pool:
            with pytest.raises(Refused, match="is no task of the pool 'another pool of the program'"):
                connection.ask("act", action="cancel", target=f"{program.pool.name}/2", pool=pool.name)

    asyncio.run(other())
    assert program.pool.snapshot().cancelled == 0


@pytest.mark.parametrize(
    "garbage",
    [b"\n", b"no json\n", b"[1]\n", b'{"v": 99}\n', b"[" * 20_000 + b"\n", b"\xff\xfe\n", b"x" * (2 * LONGEST_REQUEST)],
)
def test_o10_garbage_ends_the_connection_and_nothing_else(published: Publication, garbage: bytes) -> None:
    connected = sockets.connected(published.path, PATIENCE)
    assert connected is not None
    with connected:
        try:
            connected.sendall(garbage)
            got = b"".join(iter(lambda: connected.recv(65536), b""))
        except ConnectionError:  # it has closed while there was more to read
            got = b'{"error"'
        assert b'"error"' in got
    [other] = programs(os.getpid())
    with other:
        assert other.ask("hello")["pid"] == os.getpid()


@pytest.mark.parametrize("garbage", [b"no json\n", b'{"v": 99}\n', b"x" * (2 * LONGEST_REQUEST)])
def test_o10_garbage_from_who_watches_ends_the_connection_too(
    published: Publication, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    connected = sockets.connected(published.path, PATIENCE)
    assert connected is not None
    with connected, connected.makefile("rb") as lines:
        connected.sendall(encoded({"id": 5, "ask": "watch"}))
        assert b'"history"' in lines.readline()
        connected.sendall(garbage)
        try:
            got = lines.read()
        except ConnectionError:  # it has closed while there was more to read
            got = b'{"error"'
        assert b'"error"' in got
    assert not [one for one in caplog.records if one.name == "headgate.observe"]


def test_o10_who_reads_nothing_is_left(published: Publication, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "SLOWEST", 0.2)
    deaf = sockets.connected(published.path, PATIENCE)
    assert deaf is not None
    with deaf:
        deaf.setblocking(False)
        request = encoded({"id": 1, "ask": "snapshot"}) * 100

        def is_left() -> bool:
            try:
                deaf.send(request)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            return False

        eventually(is_left)
    [other] = programs(os.getpid())
    with other:
        assert other.ask("hello")["pid"] == os.getpid()


def test_o10_a_program_that_fails_to_answer_says_so(
    program: Program, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Sampler) -> Any:
        raise ZeroDivisionError("made to fail")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "look", broken)
        with pytest.raises(Refused, match="something went wrong in the program"):
            connection.ask("snapshot")
    assert "made to fail" in caplog.text
    assert connection.ask("hello")["pid"] == os.getpid(), "the connection goes on"


def test_o10_who_watches_gets_looks_and_events(program: Program, published: Publication) -> None:
    connected = sockets.connected(published.path, PATIENCE)
    assert connected is not None
    with connected, connected.makefile("rb") as lines:
        connected.sendall(encoded({"id": 5, "ask": "watch", "tasks": True}))
        first = json.loads(lines.readline())
        assert any(len(points) >= 1 for points in first["ok"]["history"].values())
        look = json.loads(lines.readline())
        assert pool_of(look["look"], program.pool.name)["active"] == 2
        program.do(program.keys.disable("key-1"))
        names: list[str] = []
        while "resource_disabled" not in names:
            names += [event["name"] for event in json.loads(lines.readline())["events"]]


@pytest.fixture
def full(published: Publication) -> Iterator[list[socket.socket]]:
    """As many clients as a program takes."""
    with ExitStack() as stack:
        clients = []
        for _ in range(MOST_CLIENTS):
            client = sockets.connected(published.path, PATIENCE)
            assert client is not None
            clients.append(stack.enter_context(client))
            client.sendall(encoded({"id": 1, "ask": "hello"}))
            assert client.recv(10)
        yield clients


def test_o10_more_clients_than_the_limit_are_told_so(program: Program, full: list[socket.socket]) -> None:
    for _ in range(3):
        [late] = programs(os.getpid())
        with late, pytest.raises(Refused, match="the program has 32 clients, and takes no more"):
            late.ask("hello")
    ran = run_here("show", f"{program.pool.name}/1")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "the program has 32 clients" in ran.stderr
    assert "the program has 32 clients" in run_here("ps").stderr
    shown = run_here("top", "--once")
    assert (shown.returncode, "the program has 32 clients" in shown.stdout) == (1, True)

    def is_seen() -> bool:
        [seen] = programs(os.getpid())
        with seen:
            try:
                return bool(seen.ask("hello")["pid"] == os.getpid())
            except Refused:
                return False

    full.pop().close()
    eventually(is_seen)


def test_o10_a_client_that_asks_nothing_does_not_stay(published: Publication, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(client: socket.socket) -> bytes:
        return b"".join(iter(lambda: client.recv(65536), b""))

    monkeypatch.setattr(publishing, "NEXT_WITHIN", 0.2)
    asking, watching = (sockets.connected(published.path, PATIENCE) for _ in range(2))
    assert asking is not None
    assert watching is not None
    with asking, watching, watching.makefile("rb") as looks:
        watching.sendall(encoded({"id": 1, "ask": "watch"}))
        asking.sendall(encoded({"id": 1, "ask": "hello"}))
        got = whole(asking)
        assert b'"pid"' in got
        assert b"nothing was asked for 0.2 s" in got
        for _ in range(3):
            assert b'"id":1' in looks.readline(), "who watches stays"
    monkeypatch.setattr(publishing, "FIRST_WITHIN", 0.2)
    late = sockets.connected(published.path, PATIENCE)
    assert late is not None
    with late:
        assert b"nothing was asked for 0.2 s" in whole(late)


def test_o10_a_program_that_was_killed_leaves_nothing_that_is_seen(tmp_path: Path) -> None:
    code = (
        "import asyncio, headgate\n"
        "async def main():\n"
        "    async with headgate.TaskPool('killed') as pool:\n"
        "        print('ready', flush=True)\n"
        "        await pool.run(asyncio.sleep, 600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "HEADGATE_OBSERVE": "1"}, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        [seen] = programs()
        with seen:
            assert [view["name"] for view in seen.ask("hello")["pools"]] == ["killed"]
        other.kill()
        other.wait()
    assert len(sockets.paths()) == 1
    assert programs() == []
    assert sockets.paths() == []


def test_o10_who_looks_for_programs_takes_no_socket_away_from_one_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def looking(step: Any) -> Any:
        def wrapped(*given: Any) -> Any:
            done = step(*given)
            looked.append([sockets.connected(path, PATIENCE) for path in sockets.paths()])
            return done

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", looking(os.chmod))
        patch.setattr(Listener, "bind", looking(Listener.bind))
        publication = publish()
    try:
        assert looked == [[], []], "it is not to be seen before it listens"
        assert sockets.paths() == [publication.path]
        [seen] = programs()
        with seen:
            assert seen.ask("hello")["pid"] == os.getpid()
    finally:
        publication.close()
    assert os.listdir(sockets.folder()) == []


def test_o10_a_socket_that_never_became_ready_is_removed_when_it_is_old() -> None:
    old, young = (Path(sockets.folder(), f"{pid}-0123456789ab.unready") for pid in (1, 2))
    for one in (old, young):
        one.touch(mode=0o600)
    os.utime(old, (0, time.time() - sockets.OLD - 1))
    assert sockets.paths() == []
    assert os.listdir(sockets.folder()) == [young.name], "its program may be about to listen"


def test_o10_a_socket_that_cannot_be_made_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in ("chmod", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full)
            with pytest.raises(headgate.HeadgateError, match=r"could not be made at .*: No space.*Set XDG_RUNTIME_DIR"):
                publish()
        assert os.listdir(sockets.folder()) == []


def test_o10_a_program_that_ends_removes_its_socket() -> None:
    code = "from headgate.observe import publish, sockets; publish(); print(len(sockets.paths()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert ran.stdout == "1\n"
    assert sockets.paths() == []


class Forked(NamedTuple):
    """A program with a socket and a page, which forks when it is told to."""

    process: subprocess.Popen[bytes]
    path: str
    port: int
    token: str

    def fork(self) -> None:
        """Return when the child runs. It ends with the test, or when the program was killed and its input is closed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"f")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"forked\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


FORKING = """
import asyncio, os, signal
import headgate, headgate.dashboard, headgate.observe
page, published = headgate.dashboard.serve(), headgate.observe.publish()
print(published.path, page.port, page.token, flush=True)
os.read(0, 1)
if os.fork() == 0:
    pool = headgate.ResourcePool(["k"], name="child")
    asyncio.run(pool.disable("resource-0"))
    published.close()
    page.close()
    print("forked", flush=True)
    os.read(0, 1)
    os._exit(0)
signal.pause()
"""


@pytest.fixture
def forking() -> Iterator[Forked]:
    command = [sys.executable, "-c", FORKING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        path, port, token = process.stdout.readline().decode().split()
        yield Forked(process, path, int(port), token)
        process.kill()


def test_o10_a_forked_child_is_not_the_program_and_takes_nothing_from_it(forking: Forked) -> None:
    forking.fork()
    [seen] = programs()
    with seen:
        assert seen.ask("hello")["pid"] == forking.process.pid, "the child has closed only what is its own"
    with socket.create_connection(("127.0.0.1", forking.port), timeout=PATIENCE):
        pass
    forking.kill()
    assert programs() == [], "the child lives, and is not observed"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", forking.port), timeout=PATIENCE)


def test_o10_a_forked_child_keeps_nobody_connected_to_a_program_that_was_killed(forking: Forked) -> None:
    watching = sockets.connected(forking.path, PATIENCE)
    assert watching is not None
    with watching, socket.create_connection(("127.0.0.1", forking.port), timeout=PATIENCE) as browser:
        watching.sendall(encoded({"id": 1, "ask": "watch"}))
        head = f"GET /api/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {forking.token}\r\n\r\n"
        browser.sendall(head.encode())
        for one in (watching, browser):
            assert one.recv(1)
        forking.fork()
        forking.kill()
        for one in (watching, browser):
            for _ in iter(lambda one=one: one.recv(65536), b""):  # type: ignore[misc]
                pass


def test_o10_what_was_let_go_after_a_fork_closes_no_file_that_was_opened_later(runtime: Path) -> None:
    listener, path = sockets.listening()
    client = sockets.connected(path, PATIENCE)
    assert client is not None
    with client:
        connection, _ = listener.accept()
        numbers = {listener.fileno(), connection.fileno()}
        listener.abandon()
        assert client.recv(1) == b""
        files = [os.open(runtime, os.O_RDONLY) for _ in numbers]
        assert set(files) == numbers
        connection.close()
        listener.close()
        del connection, listener
        gc.collect()
        for file in files:
            os.close(file)


@pytest.mark.parametrize("folder", ["headgate", "headgate/programs"])
def test_o10_a_directory_that_others_can_enter_is_refused(runtime: Path, folder: str) -> None:
    (runtime / folder).mkdir(parents=True)
    for one in (runtime / "headgate", runtime / folder):
        one.chmod(0o700)
    (runtime / folder).chmod(0o755)
    with pytest.raises(headgate.HeadgateError, match=r"0755, so others can enter it.*mode 0700"):
        publish()


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o777, "0777, so others can write"), (0o720, "0720, so others"), (0o1777, ""), (0o755, ""), (0o500, "")],
)
def test_o10_a_directory_above_that_others_can_write_to_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, variable: str, mode: int, words: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv(variable, str(runtime))
    for folder in (f"headgate-{os.getuid()}", "headgate"):
        (runtime / folder).mkdir(mode=0o700)
    runtime.chmod(mode)
    try:
        if words:
            with pytest.raises(headgate.HeadgateError, match=f"{variable} is .*{words}.*Set {variable} to a directory"):
                publish()
            ran = run_here("ps")
            assert (ran.returncode, ran.stdout) == (1, "")
            assert words in ran.stderr
        else:
            publish().close()
    finally:
        runtime.chmod(0o700)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("folder", ["", "headgate", "headgate/programs"])
def test_o10_a_directory_of_another_user_is_refused(runtime: Path, folder: str) -> None:
    for one in (runtime / "headgate", runtime / "headgate" / "programs"):
        one.mkdir(mode=0o700)
    os.chown(runtime / folder, 65534, -1)
    with pytest.raises(headgate.HeadgateError, match=f"{runtime / folder},? .*belongs to user 65534.*XDG_RUNTIME_DIR"):
        publish()


def test_o10_a_loop_that_is_held_does_not_hold_who_asks(program: Program, connection: Connection) -> None:
    free = threading.Event()
    connection.ask("snapshot")
    program.loop.call_soon_threadsafe(free.wait)
    try:
        began = time.monotonic()
        view = pool_of(connection.ask("snapshot"), program.pool.name)
        assert view["held"]
        assert time.monotonic() - began < PATIENCE
    finally:
        free.set()
    asyncio.run(asyncio.sleep(0))


def test_o10_what_a_held_loop_was_asked_is_not_done_when_it_is_free(
    program: Program, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "PATIENCE", 0.2)
    free = threading.Event()
    program.loop.call_soon_threadsafe(free.wait)
    try:
        with pytest.raises(Refused, match="did not answer within"):
            connection.ask("act", action="resize", target="7", pool=program.pool.name)
    finally:
        free.set()
    program.do(asyncio.sleep(0.05))
    assert program.pool.max_concurrent == 2
