"""`publish()`: who can connect, what is answered, what is done, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate.observe import actions, publish, publishing, sockets
from headgate.observe.events import ActionTaken
from headgate.observe.lines import LONGEST_REQUEST, encoded
from headgate.observe.programs import Program as Connection
from headgate.observe.programs import Refused, programs
from headgate.observe.publishing import MOST_CLIENTS, Publication
from headgate.observe.sampler import Sampler
from tests.cli.support import run_here
from tests.observe.conftest import Program
from tests.observe.support import PATIENCE, SECRET, eventually

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


def test_o10_more_clients_than_the_limit_are_turned_away(published: Publication) -> None:
    connections = [sockets.connected(published.path, PATIENCE) for _ in range(MOST_CLIENTS)]
    try:
        for one in connections:
            assert one is not None
            one.sendall(encoded({"id": 1, "ask": "hello"}))
            assert one.recv(10)
        late = sockets.connected(published.path, PATIENCE)
        assert late is not None
        with late:
            assert late.recv(10) == b""
    finally:
        for one in connections:
            if one is not None:
                one.close()


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


def test_o10_a_program_that_ends_removes_its_socket_and_a_fork_is_not_the_program(tmp_path: Path) -> None:
    code = (
        "import os, headgate, headgate.observe, time\n"
        "headgate.observe.publish()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    time.sleep(0.3); os._exit(0)\n"
        "from headgate.observe import sockets\n"
        "print(len(sockets.paths()))\n"
        "headgate.observe.publish().close()\n"
        "made = sockets.connected(sockets.paths()[0], 1) if sockets.paths() else None\n"
        "print(made)\n"
        "os.waitpid(pid, 0)\n"
        "headgate.observe.publish()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert ran.stdout.split() == ["1", "None"]
    assert sockets.paths() == []


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


def test_o10_a_forked_child_is_not_observed_and_does_not_hang() -> None:
    code = (
        "import os, headgate, headgate.dashboard, headgate.observe, socket\n"
        "from headgate import ResourcePool\n"
        "import asyncio\n"
        "page = headgate.dashboard.serve(); headgate.observe.publish()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    pool = ResourcePool(['k'], name='child')\n"
        "    asyncio.run(pool.disable('resource-0'))\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "page.close()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert ran.stdout == "7\n"
