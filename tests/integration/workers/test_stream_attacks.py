"""What broke streams, sizes and fork servers once: each of these was a hang, a leak, lost items or wrong data."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from headgate import RoutineTimeout, WorkerPool
from headgate.testing import no_leaks
from tests.integration.workers import attack_jobs, size_jobs
from tests.support.workers import jobs
from tests.support.workers.support import (
    Shared,
    alive,
    environment,
    in_flight,
    lines,
    pids,
    run,
    script,
    until,
    wait_until,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="as it is on Linux")


# -- prefetch ---------------------------------------------------------------------------------------------------------


def test_w10_after_a_throw_it_runs_ahead_as_before(shared: Shared) -> None:
    async def main() -> None:
        async with aclosing(attack_jobs.blocks()) as stream:
            assert (await anext(stream))[0] == 0
            await asyncio.sleep(0.2)
            async with asyncio.timeout(10):
                assert (await stream.athrow(LookupError()))[0] == 1000
                assert [(await anext(stream))[0] for _ in range(30)] == list(range(1001, 1031))

    shared(main)


@pytest.mark.parametrize("how", ["aclose", "drop", "refused"])
def test_w10_one_that_awaits_ahead_of_its_consumer_is_closed_at_once(shared: Shared, log: str, how: str) -> None:
    async def main() -> None:
        stream = attack_jobs.falls_silent(log)
        assert await anext(stream) == 1
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            if how == "aclose":
                await stream.aclose()
            elif how == "refused":
                with pytest.raises(ValueError, match="prefetch"):
                    await stream.asend(3)
            del stream
            await until(lambda: Path(log).exists() and in_flight(shared.pool) == 0)

    shared(main)


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_w05_a_generator_that_goes_on_after_cancellations_loses_no_item(shared: Shared, scale: float) -> None:
    async def main() -> None:
        stream = attack_jobs.survives()
        seen = [await anext(stream)]
        for turn in range(int(20 + 200 * scale)):
            step = asyncio.create_task(anext(stream))
            await asyncio.sleep(turn % 7 * 0.001)
            step.cancel()
            seen.append(await step)
        assert seen == list(range(len(seen)))
        await stream.aclose()

    shared(main, 60)


@pytest.mark.parametrize("size", [10, 300_000, 20_000_000])
def test_w05_a_cancellation_does_not_overtake_the_value_it_follows(shared: Shared, size: int) -> None:
    async def main() -> None:
        stream = attack_jobs.hears()
        await anext(stream)
        step = asyncio.create_task(stream.asend(bytes(size)))
        await asyncio.sleep(0)
        step.cancel()
        assert await step in ([size, "cancelled"], ["cancelled"])
        await stream.aclose()

    shared(main)


@pytest.fixture
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait half a second for what does not end. That it is five is shown in `test_failures`."""
    monkeypatch.setattr("headgate.workers.client.dispatcher.CONFIRMATION", 0.5)
    monkeypatch.setattr("headgate.workers.client.connection.CONFIRMATION", 0.5)


@pytest.mark.usefixtures("soon_given_up")
def test_w06_one_that_was_given_up_is_closed_when_it_yields(shared: Shared, log: str) -> None:
    async def main() -> None:
        stream = attack_jobs.goes_on_too_long(log)
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(stream)
        await until(lambda: Path(log).exists())

    shared(main)


@pytest.mark.usefixtures("soon_given_up")
def test_w08_a_later_step_that_disobeys_its_timeout_is_not_waited_for(shared: Shared) -> None:
    async def main() -> None:
        stream = attack_jobs.disobeys()
        await anext(stream)
        with pytest.raises(RoutineTimeout):
            await anext(stream)

    shared(main)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_w05_in_a_thread_streams_end_as_anywhere(shared: Shared, log: str) -> None:
    async def main() -> None:
        assert await attack_jobs.reads_in_a_thread(log) == [*range(10), 2], "the `finally` was waited for, both times"

    shared(main)


# -- whoever goes away ------------------------------------------------------------------------------------------------


def test_w31_a_worker_that_is_told_to_stop_forgets_a_generator_that_rests(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            await attack_jobs.forget_after(0.5)  # instead of five seconds
            stream = attack_jobs.counts(log)
            await anext(stream)
            [before] = pids(pool)
            os.kill(before, signal.SIGTERM)
            async with asyncio.timeout(20):
                await until(lambda: before not in pids(pool), 15)
                assert await jobs.pid() != before
            assert lines(log)
            await stream.aclose()

    run(main)


WITHOUT_A_WORD = """
    import asyncio, os
    from headgate import WorkerPool
    from tests.integration.workers import attack_jobs
    held = []
    def elsewhere():
        loop = asyncio.new_event_loop()
        held.append(attack_jobs.counts(os.environ["HEADGATE_TEST_LOG"]))
        print(loop.run_until_complete(anext(held[0])))
        loop.close()
    async def main():
        async with WorkerPool(spawn=1):
            await asyncio.to_thread(elsewhere)
        with open(os.environ["HEADGATE_TEST_LOG"]) as log:
            print(log.read(), end="")
        try:
            await anext(held.pop())
        except RuntimeError as error:
            print(error)
    if __name__ == "__main__":
        asyncio.run(main())
"""


def test_w51_a_loop_that_is_closed_without_a_word_ends_its_generators_with_the_pool(tmp_path: Path, log: str) -> None:
    """In a program of its own: gRPC keeps what it had on that loop, and its thread, as long as the process lives."""
    done = script(textwrap.dedent(WITHOUT_A_WORD), tmp_path, HEADGATE_TEST_LOG=log)
    assert done.returncode == 0, done.stderr
    item, closed, refused = done.stdout.splitlines()
    assert (item, closed) == ("0", "closed")
    assert "another event loop" in refused


def test_w10_a_broadcast_leaves_out_a_worker_that_stops_and_gives_exceptions_that_were_returned() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            found = await pool.broadcast(attack_jobs.gives_an_error)
            assert [type(one) for one in found.values()] == [ValueError, ValueError]
            busy = asyncio.create_task(jobs.slow(1))
            await until(lambda: any(view.in_flight for view in pool.workers()))
            [stopping] = [view for view in pool.workers() if view.in_flight]
            os.kill(stopping.pid, signal.SIGTERM)
            await until(lambda: any(view.state == "stopping" for view in pool.workers()))
            assert stopping.uid not in await pool.broadcast(jobs.pid)
            assert await busy == "done"

    run(main)


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 300_000])
def test_w42_what_is_one_object_stays_one_however_long(shared: Shared, size: int) -> None:
    async def main() -> None:
        value = bytearray(size)
        cyclic: list[Any] = [bytes(size)]
        cyclic.append(cyclic)
        call = asyncio.create_task(attack_jobs.same(value, attack_jobs.Holder(value), cyclic))
        await asyncio.sleep(0)
        value[:] = b"\1" * size  # too late: arguments are copies
        assert await call == (True, True, 0)

    shared(main)


def test_w42_a_small_call_does_not_wait_for_a_long_argument(shared: Shared) -> None:
    async def main() -> None:
        ends: list[str] = []
        long = asyncio.create_task(jobs.echo(bytes(200_000_000)))
        long.add_done_callback(lambda _: ends.append("long"))
        await asyncio.sleep(0)
        for _ in range(4):
            await jobs.add(1, 2)
        ends.append("small")
        await long
        assert ends == ["small", "long"]

    shared(main, 60)


# -- fork servers -----------------------------------------------------------------------------------------------------

PROGRAM = """
    import asyncio, os
    from headgate import WorkerPool
    from tests.support.workers import jobs
    async def main():
        async with WorkerPool(spawn=2, quorum_timeout=20):
            print(await jobs.add(1, 2), flush=True)
    if __name__ == "__main__":
        asyncio.run(main())
"""


@linux
def test_w33_modules_of_the_current_folder_are_not_taken_for_ours(tmp_path: Path) -> None:
    """One named keeper.py that opens a pool would start itself for ever."""
    for name in ("keeper.py", "select.py", "fork_server.py", "memory.py"):
        (tmp_path / name).write_text("open('imported', 'a').write('x')\nraise SystemExit('not ours')\n")
    (tmp_path / "sub").mkdir()
    done = script(textwrap.dedent(PROGRAM), tmp_path / "sub", PYTHONPATH=os.getcwd())
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert not (tmp_path / "imported").exists()


@linux
def test_w33_with_stderr_closed_a_pool_opens(tmp_path: Path) -> None:
    code = "import os\nos.close(2)\n" + textwrap.dedent(PROGRAM)
    done = script(code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "3\n")


@linux
def test_w33_signals_that_the_client_blocks_are_not_blocked_in_workers(tmp_path: Path) -> None:
    block = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD, signal.SIGINT])\n"
    began = time.monotonic()
    done = script(block + textwrap.dedent(PROGRAM), tmp_path)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert time.monotonic() - began < 15


@linux
def test_w26_a_fork_server_that_is_stopped_is_given_up() -> None:
    from tests.integration.workers.test_fork_server import fork_server_of

    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            server = fork_server_of(pool)
            assert server is not None
            os.kill(server, signal.SIGSTOP)
            os.kill(pids(pool)[0], signal.SIGKILL)
            async with asyncio.timeout(20):
                assert await jobs.add(1, 2) == 3

    with no_leaks(grace=3):
        run(main)


# -- processes that are short of something ----------------------------------------------------------------------------


@linux
def test_w42_a_worker_that_can_open_no_more_files_gets_its_argument_in_chunks() -> None:
    """It cannot read what is lent to it: that is no reason to fail, or to try again for ever."""

    async def main() -> None:
        value = os.urandom(3 * 2**20)
        async with WorkerPool(spawn=1) as pool:
            assert await jobs.echo(value) == value, "lent, as usual"
            assert await size_jobs.length(b"") == 0, "it is imported"
            await attack_jobs.opens_no_more()
            assert await size_jobs.length(value) == len(value)
            assert await size_jobs.length(value) == len(value)
            await attack_jobs.may_open_again()
            assert await jobs.echo(value) == value
            assert in_flight(pool) == 0

    run(main)


@linux
def test_w42_where_no_thread_can_start_it_is_copied_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMore(threading.Thread):
        def start(self) -> None:
            if self.name == "headgate copy":
                tried.append(self.name)
                raise RuntimeError("can't start new thread")
            super().start()

    tried: list[str] = []

    async def main() -> None:
        value = os.urandom(3 * 2**20)
        async with WorkerPool(spawn=1):
            assert await jobs.echo(b"warm") == b"warm"
            monkeypatch.setattr(threading, "Thread", NoMore)
            assert await jobs.echo(value) == value

    run(main)
    assert len(tried) == 2, "what is lent, and what is read"


HANGING = """
import os
import time

if os.environ.get("HEADGATE_TEST_HANG"):
    with open(os.environ["HEADGATE_TEST_HANG"], "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(100)
"""

STARTING = """
import asyncio
import os
import headgate

async def enter():
    async with headgate.WorkerPool(spawn=2):
        pass

async def main():
    log = os.environ["HEADGATE_TEST_HANG"] = os.environ["HEADGATE_TEST_LOG"]
    entering = asyncio.create_task(enter())
    while not os.path.exists(log):
        await asyncio.sleep(0.01)
    print("started", flush=True)  # this loop turns again, so what starts the keeper has returned
    await entering

asyncio.run(main())
"""


@linux
def test_w33_a_client_killed_before_its_keeper_is_one_leaves_nothing(tmp_path: Path, log: str) -> None:
    """The interpreter that is to become the keeper hangs as it starts: it cannot see by itself that nobody is left."""
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    (tmp_path / "main.py").write_text(STARTING)
    path = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    client = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")],
        env=environment(PYTHONPATH=path, HEADGATE_TEST_LOG=log),
        stdout=subprocess.PIPE,
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        [starting, *_] = wait_until(lambda: lines(log))
        assert alive(int(starting))
    finally:
        client.kill()
        client.communicate()
    wait_until(lambda: not any(alive(int(pid)) for pid in lines(log)), seconds=30)
