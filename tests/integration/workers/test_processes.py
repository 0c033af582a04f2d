"""W33 and the like, with real processes: nothing outlives its parent, and nothing is left of a pool that was left."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import fcntl
import gc
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import WorkerPool, WorkerStartFailed
from headgate.testing import no_leaks
from headgate.workers.processes import keeper_client
from tests.support.workers import jobs
from tests.support.workers.support import (
    MARK,
    PATIENCE,
    alive,
    all_ready,
    born,
    command,
    descendants,
    environment,
    lines,
    marked,
    parent_of,
    pids,
    read_line,
    run,
    script,
    until,
    wait_until,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]

try:
    import uvloop
except ImportError:
    uvloop = None
else:
    uvloop.new_event_loop().close()  # libuv opens a pipe of its own, once for the process: not a leak of any test

GONE_WITHIN = 2.0
PARENT = Path(__file__).with_name("doomed_parent.py")


class Parent:
    """A program with a pool, and a mark on everything it starts."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.seen: dict[int, str] = {}
        """When each was born: a pid may have been given to another since."""
        self.spare: set[int] = set()
        self.process = subprocess.Popen(
            [sys.executable, str(PARENT), variant, str(folder)],
            env=environment(**{MARK: self.mark}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> None:
        """Wait till it says so, and look whom there is."""
        assert self.process.stdout is not None
        first, *told = read_line(self.process.stdout).split()
        assert first == "ready"
        self.see(*map(int, told))
        first, *told = read_line(self.process.stdout).split()
        assert first == "spare"
        self.spare |= set(map(int, told))
        self.look()
        assert len(self.seen) >= 2, "a keeper and a worker"

    def look(self) -> set[int]:
        self.see(*descendants(self.pid) - self.spare)
        return self.left()

    def see(self, *pids: int) -> None:
        for pid in pids:
            if when := born(pid):
                self.seen.setdefault(pid, when)

    def left(self) -> set[int]:
        found = {pid for pid, when in self.seen.items() if born(pid) == when} | marked(self.mark)
        return found - self.spare - {self.pid}

    def send(self, number: signal.Signals) -> None:
        self.look()
        self.process.send_signal(number)

    def check_that_all_are_gone(self, end: float | None = None) -> None:
        """Within the time that the specification gives, from now on; or until then."""
        end = end or time.monotonic() + GONE_WITHIN
        while left := self.left():
            assert time.monotonic() < end, f"left behind: {[(pid, command(pid)) for pid in left]}"
            time.sleep(0.01)

    def clean(self) -> None:
        for pid in self.left() | (self.spare & marked(self.mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def doomed(tmp_path: Path, runtime: Path) -> Iterator[Callable[[str], Parent]]:
    parents: list[Parent] = []

    def start(variant: str) -> Parent:
        folder = tmp_path / str(len(parents))
        folder.mkdir()
        parents.append(Parent(variant, folder))
        return parents[-1]

    yield start
    for parent in parents:
        parent.clean()


# -- the parent is killed ---------------------------------------------------------------------------------------------


@pytest.mark.cold
def test_w33_a_killed_parent_leaves_no_descendant(doomed: Callable[[str], Parent], scale: float) -> None:
    """Side by side: a worker that does not end by itself is given a second."""
    variants = ("gil", "stopped", "family", "forked", *(["busy"] if scale >= 1 else []))
    parents = [doomed(variant) for variant in variants]
    for parent in parents:
        parent.ready()
    for parent in parents:
        parent.send(signal.SIGKILL)
        parent.process.wait(PATIENCE)
    end = time.monotonic() + GONE_WITHIN
    for parent in parents:
        parent.check_that_all_are_gone(end)
        assert all(alive(pid) for pid in parent.spare), "what the parent itself started is not ours to end"
    assert sum(len(parent.spare) for parent in parents) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.soak
def test_w33_whatever_the_parent_dies_of(doomed: Callable[[str], Parent], number: signal.Signals) -> None:
    parent = doomed("busy" if number != signal.SIGINT else "idle")
    parent.ready()
    parent.send(number)
    parent.process.wait(PATIENCE)
    parent.check_that_all_are_gone()


@pytest.mark.parametrize("variant", [pytest.param("os._exit", marks=pytest.mark.soak), "raising"])
def test_w33_however_the_parent_ends(doomed: Callable[[str], Parent], variant: str) -> None:
    parent = doomed(variant)
    assert parent.process.stdout is not None
    told = read_line(parent.process.stdout).split()
    parent.see(*map(int, told[1:]))
    parent.process.wait(PATIENCE)
    parent.check_that_all_are_gone()
    assert parent.process.returncode == (1 if variant == "raising" else 5)


@pytest.mark.soak  # of its ends the test above has the distinct ones
def test_w33_a_parent_killed_at_any_moment_leaves_no_descendant(doomed: Callable[[str], Parent], scale: float) -> None:
    """Also while it starts its keeper, its workers, or stops them."""
    chance = random.Random(2)
    for round_ in range(max(4, int(60 * scale**1.2))):
        parent = doomed("churning")
        if round_ % 2:  # the moments of the first start are short: half of all rounds go there
            assert parent.process.stdout is not None
            assert read_line(parent.process.stdout) == "ready"
        end = time.monotonic() + chance.uniform(0, 0.7)
        while time.monotonic() < end:
            parent.look()
            time.sleep(0.01)  # its children need the processor too; who is not seen is found by the mark
        parent.send(signal.SIGKILL)
        parent.process.wait(PATIENCE)
        parent.check_that_all_are_gone()


def test_w33_a_crash_leaves_files_only_until_the_next_start(
    doomed: Callable[[str], Parent], runtime: Path, tmp_path: Path
) -> None:
    """Everything is killed in one go, so that nobody is left to clean up."""
    parent = doomed("busy")
    parent.ready()
    assert files(runtime) != [], "its sockets are where they are looked for"
    keeper = min(parent.seen, key=lambda pid: parent_of(pid) != parent.pid)
    for pid in (parent.pid, keeper, *(set(parent.seen) - {keeper})):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    parent.process.wait(PATIENCE)
    wait_until(lambda: not parent.left(), 2)
    done = script(START_AND_STOP, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert files(runtime) == []


DIES_WHILE_IT_STARTS = """
import asyncio, os, headgate
from headgate.workers.processes import keeper_client
def dies(*args, **kwargs):
    os.kill(os.getpid(), 9)
{place} = dies
async def main():
    async with headgate.WorkerPool(spawn=1):
        pass
asyncio.run(main())
"""


@pytest.mark.parametrize("place", ["os.rename", "keeper_client.fcntl.flock", "keeper_client._locked"])
def test_w33_a_client_killed_while_it_starts_leaves_files_only_until_the_next_start(
    runtime: Path, tmp_path: Path, place: str
) -> None:
    done = script(DIES_WHILE_IT_STARTS.format(place=place), tmp_path)
    assert done.returncode == -9
    [left] = os.listdir(runtime)
    assert left.startswith(keeper_client.NEW)
    keeper_client.sweep(str(runtime))
    assert os.listdir(runtime) == []


def test_w33_folders_of_clients_that_are_starting_are_not_swept(runtime: Path) -> None:
    kept = [runtime / f"{keeper_client.NEW}held", runtime / f"{keeper_client.NEW}full", runtime / "headgate-other"]
    for path in kept:
        path.mkdir()
    (runtime / f"{keeper_client.NEW}full" / "something").touch()
    (runtime / f"{keeper_client.NEW}link").symlink_to(kept[2])
    with open(kept[0] / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keeper_client.sweep(str(runtime))
        assert sorted(os.listdir(runtime)) == sorted([*(path.name for path in kept), f"{keeper_client.NEW}link"])


def test_w33_starts_and_sweeps_at_the_same_moment_do_not_disturb_each_other(runtime: Path, scale: float) -> None:
    made: list[str] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def start() -> None:
        try:
            for _ in range(max(20, int(200 * scale))):
                directory, lock = keeper_client.make_directory()
                made.append(directory)
                assert os.path.isfile(os.path.join(directory, "lock"))
                os.close(lock)
        except BaseException as error:
            failed.append(error)

    def sweep() -> None:
        while not ended.is_set():
            keeper_client.sweep(str(runtime))

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    starters = [threading.Thread(target=start) for _ in range(3)]
    for thread in (*sweepers, *starters):
        thread.start()
    for thread in starters:
        thread.join()
    ended.set()
    for thread in sweepers:
        thread.join()
    assert failed == []
    assert len(set(made)) == len(made)
    keeper_client.sweep(str(runtime))
    assert os.listdir(runtime) == []


# -- the worker is killed ---------------------------------------------------------------------------------------------


def test_w33_what_a_routine_started_ends_with_its_worker_or_its_pool() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            one = await jobs.family()
            other = await jobs.family()
            started = {*one.values(), *other.values()}
            assert len(started) == 8
            workers = pids(pool)
            # Only the one's: a daemon does not end with the worker of somebody else.
            victim = parent_of(one["child"])
            assert victim in workers
            os.kill(victim, signal.SIGKILL)
            await until(lambda: not any(alive(pid) for pid in one.values()), GONE_WITHIN)
            assert all(alive(pid) for pid in other.values())
        await until(lambda: not any(alive(pid) for pid in started), GONE_WITHIN)

    run(main)


# -- nothing is left --------------------------------------------------------------------------------------------------


START_AND_STOP = """
import asyncio, headgate
from tests.support.workers import jobs
async def main():
    async with headgate.WorkerPool(spawn=1):
        print(await jobs.add(1, 2), flush=True)
asyncio.run(main())
"""


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if not path.is_dir())


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_w33_pools_opened_and_closed_many_times_leave_nothing(runtime: Path, scale: float) -> None:
    async def once() -> None:
        async with WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    async def main() -> None:
        for _ in range(2):
            await once()
        async with no_leaks(grace=3):  # within one loop
            before = native_threads()
            for _ in range(max(3, int(40 * scale**1.2))):
                await once()
            await until(lambda: native_threads() <= before + 2)
        assert files(runtime) == []

    with no_leaks(grace=3):
        run(main, patience=120)
    assert files(runtime) == []
    with no_leaks(grace=3):
        for _ in range(max(2, int(30 * scale**1.2))):  # and in a loop each
            run(once)
    assert files(runtime) == []


def test_w33_a_pool_with_killed_workers_leaves_nothing(runtime: Path) -> None:
    before = set(descendants(os.getpid()))  # multiprocessing may have left its own helper

    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            for _ in range(3):
                killed = (await all_ready(pool, 2))[0]
                os.kill(killed, signal.SIGKILL)
                await until(lambda killed=killed: killed not in pids(pool))  # another may be there at once
            await all_ready(pool, 2)
            assert len(set(descendants(os.getpid())) - before) == 4, "the keeper, the fork server and two workers"
        async with no_leaks(grace=3):
            pass

    with no_leaks(grace=3):
        run(main)
    assert files(runtime) == []


def test_w52_sockets_lie_in_a_folder_that_is_ours_alone(runtime: Path) -> None:
    def look() -> None:
        found = [path for path in runtime.rglob("*") if path.is_socket()]
        assert found
        for path in found:
            assert len(os.fsencode(path)) <= 100
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert path.parent.stat().st_uid == os.getuid()

    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            look()
            for view in pool.workers():
                assert "unix" in view.address

    run(main)


def test_w52_a_runtime_folder_with_a_long_name_is_no_obstacle(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runtime / ("long" * 30)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def main() -> None:
        async with WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    run(main)
    assert files(runtime) == []


def test_w52_a_runtime_folder_that_is_not_there_is_no_obstacle(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "missing"))

    async def main() -> None:
        async with WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w33_an_abandoned_pool_object_costs_nothing() -> None:
    with no_leaks():
        for _ in range(50):
            WorkerPool(spawn=2)
        gc.collect()


# -- several loops ----------------------------------------------------------------------------------------------------


def test_w52_loops_in_several_threads_have_their_own_pools(scale: float) -> None:
    results: list[Any] = []

    async def main(number: int) -> None:
        async with WorkerPool(spawn=1) as pool:
            got = await asyncio.gather(*(jobs.add(number, n) for n in range(200)))
            assert got == [number + n for n in range(200)]
            results.append(await jobs.pid() in pids(pool))

    def body(number: int) -> None:
        try:
            run(lambda: main(number))
        except BaseException as error:
            results.append(error)

    with no_leaks(grace=3):
        for _ in range(max(1, int(5 * scale))):
            threads = [threading.Thread(target=body, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert results == [True] * len(results)
    assert len(results) >= 3


def test_w52_one_pool_serves_several_loops() -> None:
    async def call(count: int) -> list[int]:
        return list(await asyncio.gather(*(jobs.pid() for _ in range(count))))

    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            assert set(await call(10)) == set(pids(pool))
            for _ in range(2):
                context = contextvars.copy_context()
                results: list[Any] = []

                def elsewhere(context: contextvars.Context = context, results: list[Any] = results) -> None:
                    try:
                        results.append(context.run(run, lambda: call(10)))
                    except BaseException as error:
                        results.append(error)

                threads = [threading.Thread(target=elsewhere)]
                threads[0].start()
                mine = []
                while threads[0].is_alive():
                    mine += await call(2)
                threads[0].join()
                assert set(mine) | set(pids(pool)) == set(pids(pool))
                assert [set(one) if isinstance(one, list) else one for one in results] == [set(pids(pool))]

    with no_leaks(grace=3):
        run(main)


@pytest.mark.skipif(uvloop is None, reason="pip install headgate[speed]")
def test_w52_on_uvloop() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            assert set(await asyncio.gather(*(jobs.pid() for _ in range(10)))) == set(pids(pool))
            with pytest.raises(jobs.KeywordOnly):
                await jobs.fails(jobs.KeywordOnly, field="f")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# -- workers that cannot start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("import headgate_that_is_not_there", "headgate_that_is_not_there"),
        pytest.param("os._exit(77)", "77", marks=pytest.mark.soak),
        ("os.kill(os.getpid(), 9)", r"9|KILL"),
    ],
    ids=["missing module", "exiting", "killed"],
)
def test_w26_a_crash_on_import_names_its_cause(planted: Callable[[str], Any], body: str, cause: str) -> None:
    module = planted(body)

    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match=cause) as caught:
            async with WorkerPool(spawn=1, worker=module.worker):
                pytest.fail("it was entered")
        assert caught.value.remedy in str(caught.value)
        async with no_leaks(grace=3):
            pass

    with no_leaks(grace=3):
        run(main)


@pytest.mark.cold
def test_w26_a_library_that_breaks_on_import_is_named(tmp_path: Path) -> None:
    """Found first on the parent's own path, which its workers share."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "grpc.py").write_text("raise RuntimeError('planted fault')")
    code = """
        import asyncio, sys
        import cloudpickle, grpc, headgate
        from tests.support.workers import jobs
        sys.path.insert(0, sys.argv[1] if len(sys.argv) > 1 else "broken")
        async def main():
            try:
                async with headgate.WorkerPool(spawn=1):
                    print(await jobs.add(1, 2))
            except headgate.WorkerStartFailed as error:
                print("told" if "planted fault" in str(error) else error)
        asyncio.run(main())
    """
    done = script(textwrap.dedent(code), tmp_path)
    assert (done.returncode, done.stdout) == (0, "told\n")


@pytest.mark.cold
@pytest.mark.parametrize("kind", ["missing", "not executable", "another program"])
def test_w26_an_interpreter_that_cannot_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "python"
    if kind != "missing":
        path.write_text("#!/bin/sh\nexit 3\n")
        path.chmod(0o700 if kind == "another program" else 0o600)
    monkeypatch.setattr(sys, "executable", str(path))

    async def main() -> None:
        with pytest.raises(WorkerStartFailed) as caught:
            async with WorkerPool(spawn=1):
                pytest.fail("it was entered")
        assert str(path) in str(caught.value) or "3" in str(caught.value)

    with no_leaks(grace=3):
        run(main)


def test_w26_a_folder_that_is_gone_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has its parent's folder: it may have been removed since."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.rmtree(folder)

    async def main() -> None:
        try:
            async with WorkerPool(spawn=1):
                assert await jobs.add(1, 2) == 3
        except WorkerStartFailed as error:
            assert "gone" in str(error) or "directory" in str(error)  # noqa: PT017 - either way is fine

    run(main)


# -- a worker's standard streams --------------------------------------------------------------------------------------


def test_w30_what_a_routine_prints_is_seen(tmp_path: Path) -> None:
    code = """
        import asyncio, sys, headgate
        @headgate.routine
        async def speak():
            print("from a routine", flush=True)
            print("in anger", file=sys.stderr, flush=True)
        async def main():
            async with headgate.WorkerPool(spawn=1):
                await speak()
        asyncio.run(main())
    """
    done = script(textwrap.dedent(code), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "from a routine\n", "in anger\n")


def test_w31_ctrl_c_is_answered_by_the_parent_and_says_little(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole foreground group; a worker's traceback is nobody's business."""
    code = """
        import asyncio, os, headgate
        from tests.support.workers import jobs
        async def main():
            async with headgate.WorkerPool(spawn=2, shutdown_timeout=0.5):
                print("ready", flush=True)
                await asyncio.gather(*(jobs.slow(60) for _ in range(4)))
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    path = tmp_path / "main.py"
    path.write_text(textwrap.dedent(code))
    with subprocess.Popen(
        [sys.executable, str(path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert read_line(process.stdout) == "ready"
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert read_line(process.stdout, 20) == "interrupted"
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == b""
    wait_until(lambda: not any(alive(pid) for pid in below), GONE_WITHIN)


def test_marks_are_found_however_deep_and_nowhere_else() -> None:
    mark = uuid.uuid4().hex
    assert marked(mark) == set()
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], env=environment(**{MARK: mark}), stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        grandchild = int(read_line(process.stdout))
        wait_until(lambda: marked(mark) == {process.pid, grandchild})
        assert descendants(process.pid) == {grandchild}
        assert parent_of(grandchild) == process.pid
        os.kill(grandchild, signal.SIGKILL)
        process.wait(PATIENCE)
        assert lines("no such file") == []
    assert marked(mark) == set()
