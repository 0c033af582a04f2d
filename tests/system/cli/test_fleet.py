"""Programs and workers that know each other by nothing but a namespace: found, killed, restarted, across networks."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fleet_jobs
import pytest

from headgate import LocalDiscovery, StaticDiscovery, WorkerCredentials, WorkerPool, registry
from tests.support.cli.support import HERE, PATIENCE, command, worker
from tests.support.workers.support import run

pytestmark = pytest.mark.integration


def fresh() -> str:
    """A namespace that nobody else uses."""
    return LocalDiscovery().namespace


def test_w61_w60_two_programs_find_each_other_by_a_namespace(tmp_path: Path) -> None:
    namespace = fresh()
    with worker(tmp_path, "--namespace", namespace) as one, worker(tmp_path, "--namespace", namespace) as two:
        program = [sys.executable, str(HERE / "fleet_jobs.py"), namespace, "50"]
        told = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, cwd=HERE, check=False)
        assert (told.stderr, told.returncode) == ("", 0)
        assert set(map(int, told.stdout.split())) <= {one.process.pid, two.process.pid}

        async def main() -> None:
            async with WorkerPool(discovery=LocalDiscovery(namespace), quorum=2, lazy=False):
                calls = (fleet_jobs.where() for _ in range(50))
                assert set(await asyncio.gather(*calls)) == {one.process.pid, two.process.pid}
                assert await fleet_jobs.nested(4) == {one.process.pid, two.process.pid}

        run(main)


class Load:
    """Callers that go on until they are told to stop. A call that fails, fails the test."""

    def __init__(self, routine: Any, callers: int = 8) -> None:
        self.done = 0
        self.pids: set[int] = set()
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._call(routine)) for _ in range(callers)]

    async def _call(self, routine: Any) -> None:
        while not self._stop:
            self.pids.add(await routine())
            self.done += 1

    async def more(self, calls: int) -> None:
        """Wait until so many calls more have been done."""
        end = self.done + calls
        while self.done < end:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def until_on(self, pid: int) -> None:
        """Wait until calls run on this worker."""
        while pid not in self.pids:
            await self.more(1)

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)


def test_w61_w41_a_worker_that_is_killed_and_started_again_under_load_fails_no_call(
    tmp_path: Path, scale: float
) -> None:
    namespace = fresh()

    async def main() -> None:
        with ExitStack() as stack:
            there = stack.enter_context(worker(tmp_path, "--namespace", namespace))
            async with WorkerPool(discovery=LocalDiscovery(namespace)):
                load = Load(fleet_jobs.somewhere)
                for _ in range(max(1, int(20 * scale**1.5))):
                    await load.until_on(there.process.pid)
                    os.kill(there.process.pid, signal.SIGKILL)
                    there = stack.enter_context(worker(tmp_path, "--namespace", namespace))
                await load.until_on(there.process.pid)
                await load.stop()

    run(main, patience=4 * PATIENCE)


def test_w31_w35_a_rolling_restart_of_all_workers_under_load_fails_no_call_without_retries(
    tmp_path: Path, scale: float
) -> None:
    namespace = fresh()

    async def main() -> None:
        with ExitStack() as stack:
            fleet = [
                stack.enter_context(worker(tmp_path, "--namespace", namespace)) for _ in range(3 if scale >= 1 else 2)
            ]
            async with WorkerPool(discovery=LocalDiscovery(namespace)):
                load = Load(fleet_jobs.where)
                for _ in range(max(1, int(5 * scale))):
                    for at, old in enumerate(fleet):
                        fleet[at] = stack.enter_context(worker(tmp_path, "--namespace", namespace))
                        await load.until_on(fleet[at].process.pid)
                        old.signal(signal.SIGTERM)
                        assert await asyncio.to_thread(old.wait) == 0
                        await load.more(20)
                await load.stop()

    run(main, patience=4 * PATIENCE)


def test_w31_w40a_a_call_that_was_sent_before_its_worker_was_heard_to_stop_goes_elsewhere(tmp_path: Path) -> None:
    namespace = fresh()

    async def main() -> None:
        with worker(tmp_path, "--namespace", namespace) as old, worker(tmp_path, "--namespace", namespace) as new:
            async with WorkerPool(discovery=LocalDiscovery(namespace), quorum=2, lazy=False):
                pids = {old.process.pid, new.process.pid}
                assert set(await asyncio.gather(*(fleet_jobs.where() for _ in range(10)))) == pids
                old.signal(signal.SIGTERM)
                time.sleep(0.5)  # noqa: ASYNC251 - this loop cannot hear it
                calls = await asyncio.gather(*(fleet_jobs.where() for _ in range(10)))
                assert set(calls) == {new.process.pid}
                assert await asyncio.to_thread(old.wait) == 0

    run(main)


def test_w31_a_client_that_hears_nothing_does_not_keep_a_worker_from_stopping(tmp_path: Path) -> None:
    namespace = fresh()
    with worker(tmp_path, "--namespace", namespace) as there:
        program = [sys.executable, str(HERE / "fleet_jobs.py"), namespace, "1", "stay"]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=HERE) as client:
            assert client.stdout is not None
            try:
                assert int(client.stdout.readline()) == there.process.pid
                client.send_signal(signal.SIGSTOP)
                there.signal(signal.SIGTERM)
                assert there.wait() == 0
            finally:
                client.kill()


def seen() -> dict[str, int]:
    """How many workers the only pool here expects, has and has lost."""
    [pool] = registry.pools("workers")
    look = pool.view()
    assert look is not None
    return {name: getattr(look.state, name) for name in ("expected", "ready", "lost", "losses")}


def test_w67_w61_a_worker_that_was_killed_is_missed_until_another_takes_its_place(tmp_path: Path) -> None:
    namespace = fresh()

    async def main() -> None:
        with worker(tmp_path, "--namespace", namespace) as one, worker(tmp_path, "--namespace", namespace) as two:
            async with WorkerPool(discovery=LocalDiscovery(namespace)) as pool:
                await fleet_jobs.where()
                await polled(lambda: seen() == {"expected": 2, "ready": 2, "lost": 0, "losses": 0})
                os.kill(one.process.pid, signal.SIGKILL)
                await polled(lambda: seen() == {"expected": 2, "ready": 1, "lost": 1, "losses": 1})
                assert "1 ready, 1 lost" in repr(pool)
                await polled(lambda: len(pool.workers()) == 1)
                assert seen() == {"expected": 2, "ready": 1, "lost": 1, "losses": 1}, "its discovery has dropped it"
                with worker(tmp_path, "--namespace", namespace) as three:
                    await polled(lambda: seen() == {"expected": 2, "ready": 2, "lost": 0, "losses": 1})
                    two.signal(signal.SIGTERM)
                    assert await asyncio.to_thread(two.wait) == 0
                    await polled(lambda: seen() == {"expected": 1, "ready": 1, "lost": 0, "losses": 1})
                    assert await fleet_jobs.where() == three.process.pid

    run(main, patience=2 * PATIENCE)


def test_w67_w63_a_worker_at_a_listed_address_that_was_killed_is_counted_once_for_all_event_loops(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        with worker(tmp_path, "--none", "--bind", "127.0.0.1:0") as there:
            async with WorkerPool(discovery=StaticDiscovery([there.ready["address"]])):
                assert await fleet_jobs.where() == there.process.pid
                called, over = threading.Event(), threading.Event()

                async def elsewhere() -> None:
                    assert await fleet_jobs.where() == there.process.pid
                    called.set()
                    await asyncio.to_thread(over.wait)

                context = contextvars.copy_context()
                other = asyncio.create_task(asyncio.to_thread(context.run, asyncio.run, elsewhere()))
                try:
                    assert await asyncio.to_thread(called.wait, PATIENCE)
                    assert seen() == {"expected": 1, "ready": 1, "lost": 0, "losses": 0}
                    os.kill(there.process.pid, signal.SIGKILL)
                    await polled(lambda: seen() == {"expected": 1, "ready": 0, "lost": 1, "losses": 1})
                finally:
                    over.set()
                await other
                assert seen()["losses"] == 1

    run(main)


def test_w63_a_call_that_waits_has_a_restarted_worker_at_a_listed_address_tried_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.workers.client.candidates.PAUSES", (600.0,))

    async def main() -> None:
        with ExitStack() as stack:
            there = stack.enter_context(worker(tmp_path, "--none", "--bind", "127.0.0.1:0"))
            address = there.ready["address"]
            async with WorkerPool(discovery=StaticDiscovery([address])):
                assert await fleet_jobs.where() == there.process.pid
                there.signal(signal.SIGTERM)
                assert await asyncio.to_thread(there.wait) == 0
                await polled(lambda: seen()["ready"] == 0)
                again = stack.enter_context(worker(tmp_path, "--none", "--bind", address))
                assert await fleet_jobs.where() == again.process.pid
                assert seen() == {"expected": 1, "ready": 1, "lost": 0, "losses": 0}, "it said that it would stop"

    run(main)


async def polled(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, and say what is there if it stays false."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, seen()
        await asyncio.sleep(0.01)


def test_w66_w33_many_pools_in_one_process_leave_nothing_behind(tmp_path: Path, scale: float) -> None:
    """`no_leaks` looks for threads, files and children after each test."""
    namespace = fresh()

    async def main() -> None:
        async def one() -> None:
            async with WorkerPool(discovery=LocalDiscovery(namespace)):
                assert await fleet_jobs.where() == there.process.pid

        for _ in range(max(2, int(20 * scale))):
            await asyncio.gather(*(one() for _ in range(10)))

    with worker(tmp_path, "--namespace", namespace) as there:
        run(main, patience=4 * PATIENCE)
        before = len(os.listdir("/proc/self/fd"))
        run(main, patience=4 * PATIENCE)
        limit = time.monotonic() + PATIENCE
        while len(os.listdir("/proc/self/fd")) > before:  # gRPC closes sockets in threads of its own
            assert time.monotonic() < limit, os.listdir("/proc/self/fd")
            time.sleep(0.01)


# -- credentials ------------------------------------------------------------------------------------------------------


def test_w70_credentials_of_the_command_line_are_those_of_the_library(tmp_path: Path) -> None:
    subprocess.run(command("certs", str(tmp_path / "c")), check=True, capture_output=True)
    paths = [tmp_path / "c" / f"{name}.pem" for name in ("ca-cert", "worker-key", "worker-cert")]
    credentials = WorkerCredentials.from_files(*paths)
    namespace = fresh()
    with worker(
        tmp_path, "--namespace", namespace, "--bind", "127.0.0.1:0", "--cert-dir", str(tmp_path / "c")
    ) as started:

        async def main() -> None:
            async with WorkerPool(discovery=LocalDiscovery(namespace), credentials=credentials):
                assert await fleet_jobs.where() == started.process.pid

        run(main)
