"""W30, W34: routines that hold their loop, hold the GIL, or want to end the process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import (
    ChannelOptions,
    LocalWorker,
    RemoteError,
    RoutineExited,
    WorkerCredentials,
    WorkerOptions,
    WorkerPool,
)
from headgate.testing import Captured, capture_events
from tests.integration.workers import attack_jobs
from tests.support.workers import jobs
from tests.support.workers.support import Shared, alive, in_flight, lines, pids, run, states, times, until

pytestmark = pytest.mark.integration


async def begun_on(path: str) -> int:
    line = await until(lambda: next((line for line in lines(path) if line.startswith("begun ")), None))
    return int(line.split()[1])


class Log:
    """What was said, in this process and in its workers."""

    def __init__(self, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
        self._caplog = caplog
        self._capfd = capfd
        self._read = ""

    @property
    def text(self) -> str:
        out, err = self._capfd.readouterr()
        self._read += out + err
        return self._read + self._caplog.text


@pytest.fixture
def spoken(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Log:
    return Log(caplog, capfd)


@contextmanager
def nobody_is_lost() -> Iterator[Captured]:
    with capture_events("workers") as events:
        yield events
    assert "worker_lost" not in events.names
    assert "worker_stopped" not in events.names


# -- holding the loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hold", "inner"),
    [(jobs.holds_the_loop, "sleep_without_the_gil"), pytest.param(jobs.computes, "spin", marks=pytest.mark.soak)],
    ids=["sleeping", "computing"],
)
def test_w34_a_held_loop_is_named_and_calls_not_begun_go_elsewhere(
    log: str, spoken: Log, hold: Any, inner: str
) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            for _ in range(4):
                await jobs.pid()
            waiting = [asyncio.create_task(jobs.once(log + ".waiting", n, 0.3)) for n in range(2)]
            await until(lambda: len(lines(log + ".waiting")) == 2)
            with nobody_is_lost() as events:
                holder = asyncio.create_task(hold(log, 3.2))
                victim = await begun_on(log)
                # At once, so that some reach the worker before anybody knows that it is blocked.
                beside = [asyncio.create_task(jobs.noted_pid(log + ".beside", n)) for n in range(20)]
                assert victim not in await asyncio.gather(*beside)
                assert not holder.done(), "small calls did not wait for it"
                assert times(log + ".beside") == {str(n): 1 for n in range(20)}
                await until(lambda: states(pool)[victim] == "blocked")
                await until(lambda: "worker_blocked" in events.names)
                assert {await jobs.pid() for _ in range(6)} == set(pids(pool)) - {victim}
                assert not holder.done()
                assert await holder == victim
                assert await asyncio.gather(*waiting) == [0, 1]
                assert times(log + ".waiting") == {"0": 1, "1": 1}, "what had begun was not moved"
                await until(lambda: states(pool)[victim] == "ready")
                await until(lambda: "worker_unblocked" in events.names)
                assert victim in {await jobs.pid() for _ in range(4)}
            await until(lambda: hold.__name__ in spoken.text)
            assert inner in spoken.text, "with its stack"

    run(main)


def test_w34_calls_that_came_together_with_one_that_holds_the_loop_go_elsewhere(log: str) -> None:
    """They have Tasks on that loop, and have not begun."""

    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            for _ in range(4):
                await jobs.pid()
            with nobody_is_lost():
                holder = asyncio.create_task(jobs.holds_the_loop(log, 3.0))
                beside = [asyncio.create_task(jobs.noted_pid(log + ".beside", n)) for n in range(20)]
                goes_away = [asyncio.create_task(jobs.noted_pid(log + ".gone", n)) for n in range(2)]
                victim = await begun_on(log)
                [healthy] = set(pids(pool)) - {victim}
                for one in goes_away:
                    one.cancel()
                assert set(await asyncio.gather(*beside)) == {healthy}
                assert not holder.done()
                await asyncio.gather(holder, *goes_away, return_exceptions=True)
            assert sorted(lines(log + ".beside")) == sorted(map(str, range(20))), "each once"
            await until(lambda: set(states(pool).values()) == {"ready"})
            assert {await jobs.pid() for _ in range(4)} == {victim, healthy}
            assert in_flight(pool) == 0

    run(main)


def test_w34_a_held_gil_is_named_and_not_dead_and_calls_go_to_the_other(log: str, spoken: Log, scale: float) -> None:
    """Five seconds, and in the long run longer than any silence that means death."""
    seconds = max(5.0, 20 * scale)

    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            for _ in range(4):
                await jobs.pid()
            await pool.broadcast(attack_jobs.dumps_after, 3.0)
            with nobody_is_lost() as events:
                holder = asyncio.create_task(jobs.holds_the_gil_until_told(log))
                victim = await begun_on(log)
                held_from = time.monotonic()
                await until(lambda: states(pool)[victim] == "blocked", 20)
                other = set(pids(pool))
                assert len(other) == 1
                while time.monotonic() < held_from + seconds or "read_with_the_gil" not in spoken.text:
                    found = {await jobs.pid() for _ in range(20)}
                    assert found == other or states(pool)[victim] != "blocked"
                    assert alive(victim)
                    await asyncio.sleep(0.1)
                assert "Timeout (0:00:03)!" in spoken.text, "by faulthandler, with the stacks"
                assert not holder.done()
                jobs.tell_who_holds_the_gil(log)
                # The worker itself says it too, when it has a turn again.
                await until(lambda: "in read_with_the_gil" in spoken.text.partition(" had no turn for ")[2])
                jobs.tell_who_holds_the_gil(log)
                assert await holder == victim
                await until(lambda: states(pool)[victim] == "ready")
                assert victim in {await jobs.pid() for _ in range(4)}
            assert "worker_blocked" in events.names
            assert "worker_unblocked" in events.names

    run(main, patience=60)


def a_patient_worker(*tags: str, credentials: WorkerCredentials | None) -> LocalWorker:
    """Pings go unanswered while a process is stopped."""
    channel = ChannelOptions(keepalive_timeout_ms=60_000)
    return LocalWorker(*tags, credentials=credentials, options=WorkerOptions(channel=channel))


def test_w34_a_worker_that_was_stopped_while_it_computes_logs_its_stacks_itself(log: str, spoken: Log) -> None:
    """Its Python code runs on at once. faulthandler would read frames that change meanwhile, which ends the process."""

    async def main() -> None:
        async with WorkerPool(spawn=1, worker=a_patient_worker):
            await jobs.pid()
            with nobody_is_lost():
                computing = asyncio.create_task(jobs.computes_until_told(log))
                victim = await begun_on(log)
                os.kill(victim, signal.SIGSTOP)
                await asyncio.sleep(2.5)  # that long it has no turn
                os.kill(victim, signal.SIGCONT)
                await until(lambda: " had no turn for " in spoken.text)
                await until(lambda: "in computes_until_told" in spoken.text)
                jobs.note(f"{log}.told", "enough")
                assert await computing == victim
            assert "Timeout (" not in spoken.text

    run(main, patience=60)


def test_w34_a_worker_all_alone_that_is_blocked_makes_calls_wait(log: str, spoken: Log) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            await jobs.pid()
            with nobody_is_lost():
                holder = asyncio.create_task(jobs.holds_the_loop(log, 2.7))
                victim = await begun_on(log)
                early = [asyncio.create_task(jobs.noted_pid(log + ".early", n)) for n in range(5)]
                await until(lambda: states(pool)[victim] == "blocked")
                late = asyncio.create_task(jobs.pid())
                assert await holder == victim
                assert await asyncio.gather(*early) == [victim] * 5
                assert await late == victim
                assert times(log + ".early") == {str(n): 1 for n in range(5)}

    run(main)


def test_w34_threads_do_not_block_the_loop(shared: Shared, log: str, scale: float) -> None:
    async def main() -> None:
        holds = [jobs.holds_only_a_thread, jobs.sleeps_in_a_thread] * 2
        holds += [jobs.computes_in_a_thread] * (2 if scale >= 1 else 1)
        holders = [asyncio.create_task(hold(log, 1.6)) for hold in holds]
        await until(lambda: len(lines(log)) == len(holds))
        with nobody_is_lost() as events:
            while not all(holder.done() for holder in holders):
                assert set(await asyncio.gather(*(jobs.pid() for _ in range(4)))) == set(pids(shared.pool))
                await asyncio.sleep(0.02)
            await asyncio.gather(*holders)
        assert "worker_blocked" not in events.names

    shared(main)


@pytest.mark.parametrize("count", [1, 1000], ids=["once", "for long"])
def test_w34_a_worker_without_its_watchdog_thread_still_gives_signs_of_life(shared: Shared, count: int) -> None:
    async def main() -> None:
        with nobody_is_lost() as events:
            await shared.pool.broadcast(attack_jobs.no_watchdogs, count)
            await asyncio.gather(*(jobs.slow(2.6) for _ in range(2)))
            assert "worker_blocked" not in events.names
            await shared.pool.broadcast(attack_jobs.no_watchdogs, 0)

    shared(main)


def test_w34_a_loop_held_for_a_moment_is_not_blocked(shared: Shared, log: str) -> None:
    async def main() -> None:
        with nobody_is_lost() as events:
            await asyncio.gather(*(jobs.holds_the_loop(log, 0.3) for _ in range(2)))
            await jobs.pid()
        assert "worker_blocked" not in events.names

    shared(main)


# -- the server answers all the while ---------------------------------------------------------------------------------


async def health(address: str) -> bytes:
    import grpc.aio

    target = address if ":" in address else f"unix:{address}"
    async with grpc.aio.insecure_channel(target) as channel:
        return bytes(await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10))


def test_w30_health_is_answered_also_while_a_routine_computes(shared: Shared, log: str) -> None:
    serving = b"\x08\x01"

    async def main() -> None:
        for view in shared.pool.workers():
            assert await health(view.address) == serving
        holder = asyncio.create_task(jobs.computes(log, 0.8))
        victim = await begun_on(log)
        [address] = [view.address for view in shared.pool.workers() if view.pid == victim]
        assert await health(address) == serving
        assert not holder.done()
        await holder

    shared(main)


# -- wanting to end the process ---------------------------------------------------------------------------------------


ENDS = [
    jobs.exits,
    jobs.exits_after_a_turn,
    jobs.exits_in_a_thread,
    jobs.exits_in_a_child_task,
    jobs.exits_in_an_executor,
    jobs.interrupts,
    jobs.interrupts_after_a_turn,
    jobs.interrupts_in_a_thread,
    jobs.raises_generator_exit,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_w30_a_base_exception_ends_that_routine_only(shared: Shared, end: Any) -> None:
    async def main() -> None:
        before = states(shared.pool)
        beside = [asyncio.create_task(jobs.slow(1.0, n)) for n in range(4)]
        await until(lambda: in_flight(shared.pool) == 4)
        with nobody_is_lost():
            for _ in range(2):
                with pytest.raises((RoutineExited, GeneratorExit, RemoteError)) as caught:
                    async with asyncio.timeout(10):
                        await end()
                if "raises" not in end.__name__:
                    assert isinstance(caught.value, RoutineExited)
                    assert caught.value.exit_code == (3 if "exits" in end.__name__ else 130)
            assert await asyncio.gather(*beside) == [0, 1, 2, 3]
            assert {await jobs.pid() for _ in range(4)} == set(before)
        assert states(shared.pool) == before
        assert os.getpid() not in before

    shared(main)
