"""W26: a pool whose workers cannot be started for a while lives on, says what it tries next, and recovers.

Forks fail for real where that can be had (a limit on processes binds other users than root), and by a flag otherwise:
while the file is there, `os.fork` fails in the keeper and in its fork servers as it does when the system has no more
processes to give.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import NoWorkersAvailable, WorkerPool, WorkerStartFailed
from headgate.testing import capture_events, no_leaks
from headgate.workers.processes import keeper_client, restarts
from tests.integration.workers import attack_jobs
from tests.integration.workers.test_fork_server import fork_server_of, keeper_of
from tests.support.workers import jobs
from tests.support.workers.support import (
    PATIENCE,
    alive,
    all_ready,
    environment,
    keeper_client_of,
    pids,
    run,
    states,
    until,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, fork servers and limits of other processes"),
]

FAULT = """
import os
def fork(real=os.fork):
    if os.path.exists({flag!r}):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()
os.fork = fork
"""


class Flag:
    """A file that is there, or not."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def raise_(self) -> None:
        self.path.touch()

    def lower(self) -> None:
        self.path.unlink()


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flag:
    """While it is raised, no keeper and no fork server can fork."""
    flag = Flag(tmp_path / "no-forks")
    plant(FAULT, flag.path, monkeypatch.setattr)
    return flag


def plant(fault: str, flag: Path, setattr: Callable[[object, str, str], None]) -> None:
    """Have keepers and fork servers run this before they begin."""
    fault = fault.format(flag=str(flag))
    for name, before in (("_KEEP", "keeper.main("), ("_KEEP_WITH_FORK_SERVER", "main(c,"), ("_BOOT", "from importlib")):
        code: str = getattr(keeper_client, name)
        assert before in code
        setattr(keeper_client, name, code.replace(before, f"\n{fault}\n{before}", 1))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers are told after five failures in a row, however quickly they came; and they come quickly."""
    monkeypatch.setattr(restarts, "PATIENCE", 0.0)
    monkeypatch.setattr(restarts, "FIRST", 0.01)


def failures(events: Any) -> list[Any]:
    return [event for event in events if event.name == "worker_not_started"]


async def kill_all(pool: WorkerPool) -> None:
    killed = pids(pool)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not set(killed) & set(states(pool)))


def test_w26_a_pool_that_cannot_fork_for_a_while_lives_on(flag: Flag, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            keeper, server = keeper_of(pool), fork_server_of(pool)
            [lost, healthy] = pids(pool)
            flag.raise_()
            with capture_events("workers") as events:
                os.kill(lost, signal.SIGKILL)
                await until(lambda: len(failures(events)) >= 5)
                assert states(pool) == {healthy: "ready"}
                assert await jobs.pid() == healthy
                assert (keeper_of(pool), fork_server_of(pool)) == (keeper, server)
                assert alive(keeper)
                pauses = [event.retry_in for event in failures(events)[:5]]
                assert pauses == sorted(pauses)
                assert pauses[0] < pauses[-1]
                await kill_all(pool)
                call = asyncio.create_task(jobs.add(1, 2))
                seen = len(failures(events))
                await until(lambda: len(failures(events)) > seen)
                assert not call.done(), "it waits for a worker"
                assert pool.workers() == []
                flag.lower()
                assert await call == 3
            await all_ready(pool, 2)
            assert (keeper_of(pool), fork_server_of(pool)) == (keeper, server)

    with no_leaks(grace=3), caplog.at_level(logging.INFO, "headgate.workers"):
        run(main)
    said = [record.getMessage() for record in caplog.records if "did not start" in record.getMessage()]
    assert "Resource temporarily unavailable" in said[0]
    assert "try 1 in a row" in said[0]
    assert "the next try is in 0.05 s" in said[0]
    assert any("workers start again" in record.getMessage() for record in caplog.records)


def test_w26_callers_without_a_worker_are_told_the_cause_until_starting_works(flag: Flag, impatient: None) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            flag.raise_()
            await kill_all(pool)
            for _ in range(2):
                with pytest.raises(WorkerStartFailed, match="Resource temporarily unavailable") as caught:
                    await jobs.add(1, 2)
                assert "no worker is left" in str(caught.value)
            assert pool.workers() == []
            flag.lower()
            await all_ready(pool, 2)
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w26_a_call_that_waited_its_time_is_told_why_there_was_no_worker(flag: Flag) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            flag.raise_()
            await kill_all(pool)
            with headgate.RuntimeContext(dispatch_timeout=0.3):
                with pytest.raises(NoWorkersAvailable, match="Resource temporarily unavailable"):
                    await jobs.add(1, 2)

    run(main)


def test_w26_starts_that_fail_never_end_a_pool_that_has_a_worker(
    planted: Callable[[str], Any], tmp_path: Path, impatient: None
) -> None:
    module = planted("os.path.exists(FLAG) and os._exit(77)")

    async def main() -> None:
        async with WorkerPool(spawn=2, worker=module.worker) as pool:
            (tmp_path / "flag").touch()
            [lost, healthy] = pids(pool)
            with capture_events("workers") as events:
                os.kill(lost, signal.SIGKILL)
                await until(lambda: len(failures(events)) >= restarts.DEATHS + 1)
            assert "exit code 77" in failures(events)[-1].reason
            assert pids(pool) == [healthy]
            assert [await jobs.pid() for _ in range(3)] == [healthy] * 3
            hooks = [name for name in os.listdir(keeper_client_of(pool).directory) if name.endswith(".hook")]
            assert hooks == [], "nothing piles up"
            (tmp_path / "flag").unlink()
            await all_ready(pool, 2)

    run(main)


def test_w26_a_pool_of_which_some_workers_start_is_entered(
    planted: Callable[[str], Any], tmp_path: Path, impatient: None
) -> None:
    module = planted("os.path.getsize(COUNT) > 2 * len('import\\n') and not os.path.exists(FLAG) and os._exit(9)")

    async def main() -> None:
        async with WorkerPool(spawn=4, worker=module.worker) as pool:
            assert len(pids(pool)) in (1, 2), "the third and all after it fail; two may count at once"
            assert await jobs.pid() in pids(pool)
            (tmp_path / "flag").touch()
            await all_ready(pool, 4)

    run(main)


def test_w26_resize_tells_that_starting_keeps_failing(flag: Flag, impatient: None) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            [pid] = pids(pool)
            flag.raise_()
            with pytest.raises(WorkerStartFailed, match=r"1 of 3 workers.*Resource temporarily unavailable"):
                await pool.resize(3)
            assert await jobs.pid() == pid
            flag.lower()
            await all_ready(pool, 3)

    run(main)


def test_w26_a_pool_that_never_had_a_worker_is_given_up(flag: Flag, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match="5th to do so"):
            async with WorkerPool(spawn=2):
                pytest.fail("it was entered")

    flag.raise_()
    with no_leaks(grace=3):
        run(main)
    assert "no further try" in caplog.records[-1].getMessage()


def test_w26_a_worker_alone_that_cannot_be_made_says_why(flag: Flag) -> None:
    async def main() -> None:
        worker = headgate.LocalWorker()
        flag.raise_()
        with pytest.raises(WorkerStartFailed, match="Resource temporarily unavailable"):
            await worker.start()
        flag.lower()
        await worker.start()
        await worker.stop()

    with no_leaks(grace=3):
        run(main)


@pytest.mark.cold
def test_w26_a_keeper_that_cannot_be_replaced_is_tried_again(monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    real, short = subprocess.Popen, [True]

    def popen(*args: Any, **kwargs: Any) -> Any:
        if short[0]:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*args, **kwargs)

    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            before = pids(pool)
            monkeypatch.setattr(subprocess, "Popen", popen)
            os.kill(keeper_of(pool), signal.SIGKILL)
            await until(lambda: pool.workers() == [])
            with pytest.raises(WorkerStartFailed, match="Resource temporarily unavailable"):
                await jobs.add(1, 2)
            assert pool.workers() == [], "none that is dead is listed"
            assert not any(map(alive, before))
            short[0] = False
            await all_ready(pool, 2)
            assert await jobs.add(1, 2) == 3

    with no_leaks(grace=3):
        run(main)


def test_w26_a_dead_worker_is_not_ready_although_its_keeper_says_nothing() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            [lost, healthy] = pids(pool)
            keeper = keeper_of(pool)
            os.kill(keeper, signal.SIGSTOP)
            try:
                os.kill(lost, signal.SIGKILL)
                await until(lambda: states(pool) == {lost: "lost", healthy: "ready"})
            finally:
                os.kill(keeper, signal.SIGCONT)
            await all_ready(pool, 2)

    run(main)


@pytest.mark.parametrize("path", ["usual", "relative"])
def test_w26_a_folder_that_was_removed_ends_no_replacement(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if path == "relative":  # with which no Python starts in a folder that is gone
        monkeypatch.setenv("PYTHONPATH", "modules", prepend=os.pathsep)

    async def replaced(pool: WorkerPool) -> None:
        await kill_all(pool)
        await all_ready(pool, 1)

    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            shutil.rmtree(folder)
            await replaced(pool)
            assert await jobs.add(1, 2) == 3
            with pytest.raises(FileNotFoundError):
                await attack_jobs.surroundings("PATH")  # there is no current folder
            assert "cannot be entered" in capfd.readouterr().err
            os.kill(fork_server_of(pool) or 0, signal.SIGKILL)
            await replaced(pool)
            assert "cannot be entered" in capfd.readouterr().err, "a program, not a fork"
            os.kill(keeper_of(pool), signal.SIGKILL)
            await until(lambda: pids(pool) == [])
            await all_ready(pool, 1)
            folder.mkdir()
            await replaced(pool)
            assert (await attack_jobs.surroundings("PATH"))[1] == str(folder), "it is there again"

    run(main)


def test_w26_an_interpreter_that_is_gone_for_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            with monkeypatch.context() as gone, capture_events("workers") as events:
                gone.setattr(sys, "executable", str(tmp_path / "python"))
                [lost, healthy] = pids(pool)
                os.kill(lost, signal.SIGKILL)
                await until(lambda: len(failures(events)) >= 2)
                assert "No such file" in failures(events)[0].reason
                assert await jobs.pid() == healthy
            await all_ready(pool, 2)

    with no_leaks(grace=3):
        run(main)


# -- the system itself has no more to give ----------------------------------------------------------------------------


def descriptors(pid: int) -> set[int]:
    return set(map(int, os.listdir(f"/proc/{pid}/fd")))


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.soak), {"max_tasks_per_worker": 1000}], ids=["plain", "limits"]
)
def test_w26_a_keeper_short_of_descriptors_leaks_none_and_goes_on(options: dict[str, Any]) -> None:
    """Also if it listens to more of them than its limit allows now, as it does to workers whose life has limits."""

    async def main() -> None:
        async with WorkerPool(spawn=2, **options) as pool:
            keeper = keeper_of(pool)
            usual, hard = resource.prlimit(keeper, resource.RLIMIT_NOFILE)
            before = len(descriptors(keeper))
            [lost, healthy] = pids(pool)
            with capture_events("workers") as events:
                resource.prlimit(keeper, resource.RLIMIT_NOFILE, (3, hard))
                os.kill(lost, signal.SIGKILL)
                await until(lambda: failures(events))
                left = descriptors(keeper)
                for limit in [number for number in range(100) if number not in left][1:5]:  # room for 1, 2, 3, 4
                    resource.prlimit(keeper, resource.RLIMIT_NOFILE, (limit, hard))
                    seen = len(failures(events))
                    await until(lambda seen=seen: len(failures(events)) > seen)
                assert "Too many open files" in failures(events)[0].reason
                assert descriptors(keeper) == left, "nothing is left of the tries"
                assert await jobs.pid() == healthy
            resource.prlimit(keeper, resource.RLIMIT_NOFILE, (usual, hard))
            await all_ready(pool, 2)
            assert len(descriptors(keeper)) <= before + 1, "one more for a worker that was ready just now"
            assert keeper_of(pool) == keeper

    run(main)


def test_w26_a_fork_server_short_of_descriptors_is_no_obstacle() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            server = fork_server_of(pool)
            assert server is not None
            _, hard = resource.prlimit(server, resource.RLIMIT_NOFILE)
            resource.prlimit(server, resource.RLIMIT_NOFILE, (max(descriptors(server)) + 2, hard))
            await kill_all(pool)
            await all_ready(pool, 1)
            assert await jobs.add(1, 2) == 3
            assert fork_server_of(pool) == server

    run(main)


REAL = """
import asyncio, os, signal, sys
from pathlib import Path
import headgate
from headgate.testing import capture_events
from tests.support.workers import jobs
from tests.integration.workers import test_restarts
from tests.support.workers.support import all_ready, pids, until
from tests.integration.workers.test_fork_server import keeper_of, fork_server_of

flag = Path(sys.argv[1])
test_restarts.plant(test_restarts.SHORTAGE, flag, setattr)

async def main():
    async with headgate.WorkerPool(spawn=2) as pool:
        keeper, server = keeper_of(pool), fork_server_of(pool)
        flag.touch()
        [lost, healthy] = pids(pool)
        with capture_events("workers") as events:
            os.kill(lost, signal.SIGKILL)
            await until(lambda: lost not in pids(pool))
            await until(lambda: len(pids(pool)) == 2 or events.names.count("worker_not_started") >= 4)
        if len(pids(pool)) == 2:
            sys.exit("not bound by limits")
        assert pids(pool) == [healthy] == [await jobs.pid()]
        flag.unlink()
        await all_ready(pool, 2)
        assert (keeper_of(pool), fork_server_of(pool)) == (keeper, server)
        print("lived on")

asyncio.run(main())
"""
SHORTAGE = """
import os, resource
def fork(real=os.fork):
    usual, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.path.exists({flag!r}):
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    try:
        return real()
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (usual, hard))
os.fork = fork
"""


BOUND_BY_LIMITS = """
import ctypes, os, sys
if os.getuid() == 0:  # root is not bound by a limit of processes: be somebody else, who may read what root may
    prctl = ctypes.CDLL(None).prctl
    for capability in (21, 24):  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
        prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
    os.setresuid(65534, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
"""A program that becomes the one it is given. Not a `preexec_fn`: that would fork here, where gRPC is in use."""


@pytest.mark.soak  # the other tests plant the same error
def test_w26_a_limit_of_processes_is_survived(tmp_path: Path) -> None:
    """Forks that really fail, with EAGAIN of the kernel."""
    done = subprocess.run(
        [sys.executable, "-c", BOUND_BY_LIMITS, textwrap.dedent(REAL), str(tmp_path / "flag")],
        env=environment(),
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    if "not bound by limits" in done.stderr:
        pytest.skip("nobody here is bound by a limit of processes")
    assert (done.returncode, done.stdout) == (0, "lived on\n"), done.stderr


def test_w26_a_fork_server_that_is_killed_is_made_anew() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            first = fork_server_of(pool)
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await kill_all(pool)
            await all_ready(pool, 1)
            await kill_all(pool)
            await all_ready(pool, 1)
            again = fork_server_of(pool)
            assert again not in (None, first)
            await kill_all(pool)
            await all_ready(pool, 1)
            assert fork_server_of(pool) == again

    with no_leaks(grace=3):
        run(main)
