"""W50, W50a, W53: options of connections and workers: what they refuse, that they are advertised and applied, how many
calls execute at a time, how long messages may be, and how sessions are replaced."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

import headgate
from headgate import (
    ChannelOptions,
    ContextDecodeWarning,
    DispatchTimeout,
    InvalidArgument,
    InvalidType,
    LocalWorker,
    NoWorkersAvailable,
    RoutineTimeout,
    WorkerOptions,
    WorkerPool,
)
from headgate.testing import capture_events
from headgate.workers.client import connection as connections
from headgate.workers.client import lifetime
from headgate.workers.client.connection import Connection
from headgate.workers.client.dispatcher import Dispatcher
from headgate.workers.processes.keeper_client import KeeperClient
from headgate.workers.protocol.transport import channel_options, dial, grpc, server_options
from tests.integration.workers import option_jobs
from tests.support.workers import jobs
from tests.support.workers.support import lines, pids, run, states, until

pytestmark = pytest.mark.integration

MIB = 1024 * 1024


def pool_with(
    options: WorkerOptions | ChannelOptions | None = None, spawn: int = 1, host: str | None = None, **more: Any
) -> WorkerPool:
    """A pool of workers with these options."""

    def worker(*tags: str, credentials: Any = None) -> LocalWorker:
        return LocalWorker(*tags, credentials=credentials, options=options, host=host)

    return WorkerPool(spawn=spawn, worker=worker, **more)


def at_most(count: int) -> ChannelOptions:
    return ChannelOptions(max_concurrent_streams=count)


def dispatcher_of(pool: WorkerPool) -> Dispatcher:
    return pool.__dispatcher__()


def connection_of(pool: WorkerPool) -> Connection:
    """The connection that calls of this loop go to, of a pool with one worker."""
    [connection] = dispatcher_of(pool).roster
    return connection


def sessions_of(pool: WorkerPool) -> int:
    """How many sessions are open from this loop, with those that only finish their calls."""
    dispatcher = dispatcher_of(pool)
    return sum(one.session.state == "open" for one in (*dispatcher.roster, *dispatcher.connections.gone))


def go(log: str) -> None:
    """Let `until_told` end."""
    Path(f"{log}.go").touch()


@contextmanager
def nobody_lost() -> Iterator[None]:
    with capture_events("workers.lifecycle") as events:
        yield
    names = [event.name for event in events]
    assert "worker_ready" in names
    assert not {"worker_lost", "worker_replaced"} & set(names)


# -- what options refuse ----------------------------------------------------------------------------------------------


def test_w50a_a_keepalive_below_the_minimum_ping_interval_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"keepalive_time_ms must be at least .*\(2000\), got 1999"):
        WorkerOptions(ChannelOptions(keepalive_time_ms=1999), http2_min_recv_ping_interval_without_data_ms=2000)
    with pytest.raises(InvalidArgument, match=r"got 3000 \(the default\)"):
        WorkerOptions(http2_min_recv_ping_interval_without_data_ms=3001)
    equal = WorkerOptions(ChannelOptions(keepalive_time_ms=2000), http2_min_recv_ping_interval_without_data_ms=2000)
    assert equal.min_ping_interval_ms == 2000
    assert WorkerOptions(http2_min_recv_ping_interval_without_data_ms=3000).min_ping_interval_ms == 3000
    assert WorkerOptions(ChannelOptions(keepalive_time_ms=7000)).min_ping_interval_ms == 7000, "it follows"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ChannelOptions(max_receive_message_length=MIB - 1), InvalidArgument, "max_receive_message_length"),
        (lambda: ChannelOptions(max_send_message_length=0), InvalidArgument, "max_send_message_length"),
        (lambda: ChannelOptions(keepalive_time_ms=0), InvalidArgument, "keepalive_time_ms"),
        (lambda: ChannelOptions(keepalive_timeout_ms=-1), InvalidArgument, "keepalive_timeout_ms"),
        (lambda: ChannelOptions(max_pings_without_data=-1), InvalidArgument, "max_pings_without_data"),
        (lambda: ChannelOptions(max_concurrent_streams=0), InvalidArgument, "max_concurrent_streams"),
        (lambda: ChannelOptions(compression="zip"), InvalidArgument, "'gzip', 'deflate' or None"),  # type: ignore[arg-type]
        (lambda: ChannelOptions(max_concurrent_streams=1.5), InvalidArgument, "max_concurrent_streams"),  # type: ignore[arg-type]
        (lambda: WorkerOptions(max_ping_strikes=-1), InvalidArgument, "max_ping_strikes"),
        (lambda: WorkerOptions(max_connection_idle_ms=0), InvalidArgument, "max_connection_idle_ms"),
        (lambda: WorkerOptions(max_connection_age_ms=0), InvalidArgument, "max_connection_age_ms"),
        (lambda: WorkerOptions(max_connection_age_grace_ms=0), InvalidArgument, "max_connection_age_grace_ms"),
        (lambda: WorkerOptions(channel={}), InvalidType, "channel must be ChannelOptions"),  # type: ignore[arg-type]
        (lambda: LocalWorker(options={}), InvalidType, "options must be WorkerOptions"),  # type: ignore[arg-type]
    ],
)
def test_w50a_bad_options_are_refused_where_they_are_made(
    make: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_w50_options_are_the_same_after_they_were_written_down() -> None:
    channel = ChannelOptions(2 * MIB, 3 * MIB, 9000, 8000, False, 5, 50, "gzip")
    assert ChannelOptions.from_dict(channel.to_dict()) == channel
    assert ChannelOptions.from_dict({**channel.to_dict(), "of_a_later_release": 1}) == channel


def test_w50_options_become_those_of_grpc() -> None:
    usual = dict(channel_options(None))
    assert usual == dict(channel_options(ChannelOptions()))
    assert usual["grpc.keepalive_time_ms"] == usual["grpc.keepalive_timeout_ms"] == 3000, "it is on"
    assert usual["grpc.keepalive_permit_without_calls"] == 1
    assert usual["grpc.max_receive_message_length"] == -1
    channel = ChannelOptions(2 * MIB, 3 * MIB, 9000, 8000, False, 5)
    chosen = dict(channel_options(channel))
    assert chosen["grpc.max_receive_message_length"] == 2 * MIB
    assert chosen["grpc.max_send_message_length"] == 3 * MIB
    assert chosen["grpc.keepalive_time_ms"] == 9000
    assert chosen["grpc.keepalive_timeout_ms"] == 8000
    assert chosen["grpc.keepalive_permit_without_calls"] == 0
    assert chosen["grpc.http2.max_pings_without_data"] == 5
    server = dict(server_options(WorkerOptions(channel, None, 2, 60_000, 70_000, 80_000)))
    assert server["grpc.max_receive_message_length"] == 2 * MIB
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] == 9000
    assert server["grpc.http2.max_ping_strikes"] == 2
    assert server["grpc.max_connection_idle_ms"] == 60_000
    assert server["grpc.max_connection_age_ms"] == 70_000
    assert server["grpc.max_connection_age_grace_ms"] == 80_000
    usual = dict(server_options(None))
    assert usual["grpc.http2.max_ping_strikes"] == 0
    assert not any("max_connection" in name for name in usual)


# -- advertised and applied -------------------------------------------------------------------------------------------


def test_w50_a_worker_advertises_the_options_of_its_channel_and_clients_connect_with_them() -> None:
    channel = ChannelOptions(keepalive_time_ms=5000, max_concurrent_streams=3)

    async def main() -> None:
        async with pool_with(WorkerOptions(channel, max_ping_strikes=2)) as pool:
            assert await jobs.add(1, 2) == 3
            [view] = pool.workers()
            assert view.metadata.options == channel
            assert connection_of(pool).metadata.options == channel
        worker = LocalWorker(options=channel)
        async with worker:
            assert worker.metadata is not None
            assert worker.metadata.options == channel
        async with pool_with(None) as pool:
            assert await jobs.add(1, 2) == 3
            [view] = pool.workers()
            assert view.metadata.options is None

    run(main)


def test_w50a_after_an_update_the_next_session_has_the_new_options() -> None:
    async def main() -> None:
        async with pool_with(ChannelOptions(keepalive_time_ms=5000)) as pool:
            assert await jobs.add(1, 2) == 3
            slow = asyncio.create_task(jobs.slow(0.5, "of the old session"))
            old = connection_of(pool)
            await until(lambda: old.session.sent)
            dispatcher = dispatcher_of(pool)
            updated = replace(old.metadata, options=ChannelOptions(keepalive_time_ms=6000))
            dispatcher.connections.admit(updated)
            await until(lambda: connection_of(pool) is not old)
            assert connection_of(pool).metadata.options == ChannelOptions(keepalive_time_ms=6000)
            assert await jobs.add(1, 2) == 3
            assert await slow == "of the old session"
            await until(lambda: sessions_of(pool) == 1)
            dispatcher.connections.admit(replace(updated, extra={"another": "note"}))
            assert connection_of(pool).metadata.extra == {"another": "note"}
            assert sessions_of(pool) == 1, "it is reached as before"

    run(main)


def test_w50_a_client_that_pings_more_often_than_the_worker_accepts_is_cut_off() -> None:
    async def main() -> None:
        strict = WorkerOptions(ChannelOptions(keepalive_time_ms=100_000), max_ping_strikes=1)
        async with pool_with(strict) as pool:
            assert await jobs.add(1, 2) == 3
            polite = connection_of(pool)
            happened: list[tuple[str, str]] = []
            eager = replace(polite.metadata, options=ChannelOptions(keepalive_time_ms=200))
            other = Connection(eager, 99, "eager", lambda one, what, why: happened.append((what, why)))
            other.open()
            await until(lambda: any(what == "lost" for what, _ in happened), 20.0)
            assert "Too many pings" in happened[-1][1]
            await other.close()
            assert connection_of(pool) is polite
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w50_a_connection_that_nobody_uses_is_closed_by_the_worker() -> None:
    async def main() -> None:
        async with LocalWorker(options=WorkerOptions(max_connection_idle_ms=300)) as worker:
            assert worker.metadata is not None
            async with dial(worker.metadata.address, session=False) as channel:
                assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
                await until(lambda: channel.get_state() is grpc.ChannelConnectivity.IDLE)
                assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"

    run(main)


def test_w50_the_example_of_the_seed_survives_a_minute_without_calls(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its times divided by ten unless the test has all the time, and then for as long as three pings take."""
    part = 1 if scale >= 1 else 10
    options = WorkerOptions(
        ChannelOptions(keepalive_time_ms=10_000 // part, keepalive_timeout_ms=5_000 // part, max_concurrent_streams=50),
        max_connection_idle_ms=300_000 // part,
        max_ping_strikes=2,
    )

    async def main() -> None:
        async with pool_with(options, spawn=2) as pool:
            before = [await jobs.pid() for _ in range(2)]
            monkeypatch.setattr(lifetime, "IDLE", 1000.0)
            for connection in dispatcher_of(pool).roster:
                connection.lifetime.end()  # the session itself is to stay open
            sessions = list(dispatcher_of(pool).roster)
            await asyncio.sleep(60 if part == 1 else 3.5)
            assert sorted([await jobs.pid() for _ in range(2)]) == sorted(before)
            assert list(dispatcher_of(pool).roster) == sessions
            assert [one.session.state for one in sessions] == ["open", "open"]

    with nobody_lost():
        run(main, 120.0)


# -- compression, and the length of messages --------------------------------------------------------------------------


class Relay:
    """Passes on what comes to a Unix socket, and counts the bytes."""

    def __init__(self, to: str) -> None:
        self.bytes = 0
        self._to = to.removeprefix("unix:")
        self._folder = tempfile.TemporaryDirectory(prefix="hg-")
        self.address = f"unix:{self._folder.name}/relay"
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._connected, self.address.removeprefix("unix:"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._folder.cleanup()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_unix_connection(self._to)
        self._tasks.append(asyncio.create_task(self._pass(reader, other_writer)))
        self._tasks.append(asyncio.create_task(self._pass(other_reader, writer)))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.bytes += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("compression", ["gzip", pytest.param("deflate", marks=pytest.mark.soak), None])
def test_w50_messages_are_compressed_in_both_directions(compression: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_SHARED_MEMORY", "0")

    async def main() -> None:
        async with pool_with(ChannelOptions(compression=compression)) as pool:
            assert await jobs.add(1, 2) == 3
            dispatcher, known = dispatcher_of(pool), connection_of(pool)
            metadata = known.metadata
            async with Relay(metadata.address) as relay:
                dispatcher.connections.admit(replace(metadata, address=relay.address))
                await until(lambda: connection_of(pool) is not known)
                before = relay.bytes
                assert await option_jobs.size_of(bytes(4 * MIB)) == 4 * MIB
                there = relay.bytes - before
                assert len(await option_jobs.zeros(4 * MIB)) == 4 * MIB
                back = relay.bytes - before - there
                if compression is None:
                    assert min(there, back) > 4 * MIB
                else:
                    assert max(there, back) < MIB
                connection = connection_of(pool)
                dispatcher.connections.admit(metadata)
                await until(lambda: connection_of(pool) is not connection)
                await until(lambda: sessions_of(pool) == 1)

    run(main)


@pytest.fixture(params=[*(pytest.param(way, marks=pytest.mark.soak) for way in ("shared memory", "chunks")), "TCP"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "chunks":
        monkeypatch.setenv("HEADGATE_SHARED_MEMORY", "0")
    return str(request.param)


def host_of(way: str) -> str | None:
    return "127.0.0.1" if way == "TCP" else None


NARROW = ChannelOptions(max_receive_message_length=MIB, max_send_message_length=MIB)


def test_w50_with_messages_of_a_mebibyte_long_payloads_and_many_calls_pass(way: str, scale: float) -> None:
    size, count = int(100_000_000 * max(scale, 0.1) ** 1.3), int(10_000 * max(scale, 0.1) ** 1.3)

    async def main() -> None:
        async with pool_with(NARROW, spawn=2, host=host_of(way)):
            long = random.Random(1).randbytes(size)
            echoed, *sums = await asyncio.gather(jobs.echo(long), *(jobs.add(number, 1) for number in range(count)))
            assert echoed == long
            assert sums == list(range(1, count + 1))
            nearly = b"x" * 250_000
            assert await asyncio.gather(*(option_jobs.size_of(nearly) for _ in range(40))) == [250_000] * 40
            assert await asyncio.gather(*(jobs.echo(nearly) for _ in range(40))) == [nearly] * 40
            assert await jobs.fib(6) == 8, "sessions between workers have the limit too"
            assert len(await jobs.apply(_calls_with_much, 40)) == 40

    with nobody_lost():
        run(main, 120.0)


async def _calls_with_much(count: int) -> list[int]:
    return await asyncio.gather(*(option_jobs.size_of(b"x" * 250_000) for _ in range(count)))


def test_w50_what_does_not_fit_into_a_message_is_refused_and_hurts_nobody() -> None:
    async def main() -> None:
        async with pool_with(NARROW) as pool:
            slow = asyncio.create_task(jobs.slow(0.5))
            long = random.Random(2).randbytes(2 * MIB)

            @headgate.routine
            async def holds_much() -> int:
                return len(long)

            with pytest.raises(NoWorkersAvailable, match="do not fit into a message of at most 1,048,576 bytes"):
                await holds_much()
            token = option_jobs.VARIABLE.set("v" * MIB)
            with pytest.raises(NoWorkersAvailable, match="do not fit into a message of at most 1,048,576 bytes"):
                await jobs.add(1, 2)
            option_jobs.VARIABLE.reset(token)
            with pytest.warns(ContextDecodeWarning, match="the room for them in a message is"):
                assert await option_jobs.variable_of(MIB) == MIB
            stream = option_jobs.ticks("a", 5)
            assert await anext(stream) == "a0"
            option_jobs.VARIABLE.set("v" * MIB)
            with pytest.raises(InvalidArgument, match=r"the room for them in a message is .*higher `max_receive"):
                await anext(stream)
            option_jobs.VARIABLE.set("")
            assert await slow == "done"
            assert len(pids(pool)) == 1

    with nobody_lost():
        run(main)


# -- how many execute at a time ---------------------------------------------------------------------------------------


def test_w50a_bursts_of_twice_the_limit_succeed_and_evict_nobody(scale: float) -> None:
    limit = 10

    async def main() -> None:
        async with pool_with(at_most(limit), spawn=2) as pool:
            before = pids(pool)
            for _ in range(max(5, int(50 * scale))):
                calls = [option_jobs.executes(number, 0.005) for number in range(2 * 2 * limit)]
                assert await asyncio.gather(*calls) == list(range(4 * limit))
            found = await pool.broadcast(option_jobs.most)
            assert set(found.values()) == {limit}
            assert pids(pool) == before

    with nobody_lost():
        run(main)


def test_w50_calls_above_the_limit_begin_in_the_order_in_which_they_came(log: str) -> None:
    async def main() -> None:
        async with pool_with(at_most(1)):
            await asyncio.gather(*(option_jobs.executes(number, 0.002, log) for number in range(50)))
            assert lines(log) == [str(number) for number in range(50)]
            assert await option_jobs.most() == 1

    run(main)


def test_w50_calls_that_call_others_do_not_deadlock_at_a_limit_of_one() -> None:
    async def main() -> None:
        async with pool_with(at_most(1), spawn=2):
            assert await asyncio.gather(*(jobs.fib(7) for _ in range(3))) == [13] * 3
            assert await asyncio.gather(*(option_jobs.sums(f"{n}-", 5) for n in range(5))) == [5] * 5
            assert await asyncio.gather(*(option_jobs.sums_in_a_thread(5) for _ in range(5))) == [5] * 5

    run(main)


def test_w50_generators_between_two_steps_do_not_count_and_their_steps_wait_for_their_turn() -> None:
    async def main() -> None:
        async with pool_with(at_most(1)):
            streams = [option_jobs.ticks(name, 20, 0.001) for name in "abcd"]
            for number in range(10):  # more of them than may execute, none of which ends
                assert [await anext(stream) for stream in streams] == [f"{name}{number}" for name in "abcd"]
                assert await option_jobs.executes(number) == number
            for number in range(10, 20):
                found = await asyncio.gather(*(anext(stream) for stream in streams))
                assert found == [f"{name}{number}" for name in "abcd"]
            assert await option_jobs.most() == 1

            async def all_of(stream: AsyncGenerator[str, None]) -> int:
                return len([item async for item in stream])

            assert await asyncio.gather(*(all_of(option_jobs.ticks_ahead(name, 50)) for name in "ab")) == [50, 50]
            assert await option_jobs.most() == 1
            for stream in streams:
                await stream.aclose()

    run(main)


def test_w50_a_generator_that_waits_for_its_turn_can_be_closed_and_cancelled(log: str) -> None:
    async def main() -> None:
        async with pool_with(at_most(1)) as pool:
            one, other = option_jobs.ticks("a", 3), option_jobs.ticks("b", 3)
            assert [await anext(one), await anext(other)] == ["a0", "b0"]
            held = asyncio.create_task(jobs.until_told(log, 1))
            await until(lambda: lines(log))
            step = asyncio.create_task(anext(one))
            await until(lambda: pool.workers()[0].in_flight == 3)
            await asyncio.sleep(0.1)
            assert not step.done()
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            await other.aclose()
            assert not held.done()
            go(log)
            assert await held == 1
            assert [item async for item in option_jobs.ticks("c", 2)] == ["c0", "c1"]
            assert await option_jobs.executes(7) == 7, "nothing has kept a place"

    run(main)


def test_w50_a_call_that_waits_can_be_cancelled_and_never_begins(log: str) -> None:
    async def main() -> None:
        async with pool_with(at_most(1)) as pool:
            held = asyncio.create_task(jobs.until_told(log, 1))
            await until(lambda: lines(log))
            waiting = [asyncio.create_task(option_jobs.executes(number, 0.0, log)) for number in range(100, 120)]
            await until(lambda: pool.workers()[0].in_flight == 21)
            await asyncio.sleep(0.05)
            for task in waiting[::2]:
                task.cancel()
            ended = await asyncio.gather(*waiting[::2], return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in ended)
            assert pool.workers()[0].in_flight == 11
            go(log)
            assert await asyncio.gather(*waiting[1::2]) == list(range(101, 120, 2))
            assert await held == 1
            assert lines(log)[1:] == [str(number) for number in range(101, 120, 2)]

    run(main)


def test_w50_timeouts_of_calls_that_wait_begin_with_the_call_and_dispatch_timeout_is_over(log: str) -> None:
    async def main() -> None:
        async with pool_with(at_most(1)):
            held = asyncio.create_task(jobs.until_told(log, 1))
            await until(lambda: lines(log))
            bounded = asyncio.create_task(option_jobs.bounded(5, 0.0))
            too_slow = asyncio.create_task(option_jobs.bounded(6, 60.0))
            started = time.monotonic()
            with pytest.raises(DispatchTimeout), headgate.RuntimeContext(dispatch_timeout=0.3):
                await option_jobs.executes(3, 0.0, log)
            assert time.monotonic() - started < 5.0
            await asyncio.sleep(1.2)  # longer than the timeout of those that wait
            assert not bounded.done()
            go(log)
            assert await bounded == 5
            with pytest.raises(RoutineTimeout):
                await too_slow
            assert await held == 1
            assert await option_jobs.executes(4, 0.0, log) == 4
            assert lines(log)[1:] == ["4"]

    run(main)


@pytest.mark.usefixtures("told_soon")
def test_w50_a_function_that_goes_on_after_its_timeout_keeps_no_place(log: str) -> None:
    async def main() -> None:
        async with pool_with(at_most(1)):
            with pytest.raises(RoutineTimeout):
                await option_jobs.stays_in_its_thread(log)
            assert await option_jobs.executes(1) == 1
            go(log)
            assert await option_jobs.executes_in_a_thread(2, 0.01) == 2
            await asyncio.gather(*(option_jobs.executes(number, 0.002) for number in range(10)))
            assert await option_jobs.most() == 1

    run(main)


def test_w50_calls_that_wait_on_a_worker_whose_loop_is_held_run_elsewhere(log: str) -> None:
    async def main() -> None:
        async with pool_with(at_most(1), spawn=2) as pool:
            first = asyncio.create_task(jobs.until_told(log, 1))
            await until(lambda: len(lines(log)) == 1)
            second = asyncio.create_task(jobs.until_told(log, 2))
            await until(lambda: len(lines(log)) == 2)
            waiting = [asyncio.create_task(option_jobs.executes(number)) for number in range(20)]
            dispatcher = dispatcher_of(pool)
            busy = next(iter(dispatcher.roster)).metadata.uid
            routine = jobs.holds_the_loop.__headgate_routine__  # type: ignore[attr-defined]
            for number in range(20, 40):
                waiting.append(asyncio.create_task(option_jobs.executes(number)))
            go(log)
            await asyncio.gather(first, second)
            holds = asyncio.create_task(dispatcher.call(routine, (f"{log}.holds", 4.0), {}, None, "", to=busy))
            await until(lambda: lines(f"{log}.holds"))
            more = [asyncio.create_task(option_jobs.executes(number)) for number in range(40, 60)]
            assert await asyncio.gather(*waiting, *more) == list(range(60))
            assert not holds.done()
            await holds
            assert await asyncio.gather(*(option_jobs.executes(number) for number in range(20))) == list(range(20))

    with nobody_lost():
        run(main)


def test_w50_calls_that_wait_on_a_worker_that_stops_run_elsewhere(log: str) -> None:
    async def main() -> None:
        async with pool_with(at_most(1), spawn=2, shutdown_timeout=0.3) as pool:
            held = [asyncio.create_task(jobs.until_told(log, number)) for number in range(2)]
            await until(lambda: len(lines(log)) == 2)
            waiting = [asyncio.create_task(option_jobs.executes(number)) for number in range(20)]
            await until(lambda: sum(view.in_flight for view in pool.workers()) == 22)
            resized = asyncio.create_task(pool.resize(1))  # what it runs is cancelled, and its callers are told
            await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
            go(log)
            assert await asyncio.gather(*waiting) == list(range(20))
            await resized
            await asyncio.gather(*held, return_exceptions=True)

    run(main)


def test_w50_a_worker_may_have_a_limit_for_all_clients_together(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = KeeperClient.spawn

    def with_limit(self: KeeperClient, uid: str, config: dict[str, Any], **options: Any) -> None:
        spawn(self, uid, {**config, "concurrency": 3}, **options)

    monkeypatch.setattr(KeeperClient, "spawn", with_limit)

    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            loops: list[Any] = []

            def elsewhere() -> None:
                loops.append(asyncio.run(burst()))

            async def burst() -> list[int]:
                return await asyncio.gather(*(option_jobs.executes(number, 0.005) for number in range(30)))

            await asyncio.gather(asyncio.to_thread(elsewhere), burst(), burst())
            assert loops == [list(range(30))]
            assert await option_jobs.most() == 3
            assert await jobs.fib(6) == 8
            assert len(pids(pool)) == 1

    run(main)


# -- sessions that are replaced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["shared memory", *(pytest.param(way, marks=pytest.mark.soak) for way in ("chunks", "TCP"))], indirect=True
)
def test_w53_no_call_fails_while_sessions_are_replaced_for_their_age(way: str, scale: float) -> None:
    options = WorkerOptions(max_connection_age_ms=1000)

    async def main() -> None:
        async with pool_with(options, spawn=2, host=host_of(way)) as pool:
            end = time.monotonic() + max(3.0, 30.0 * scale)
            long = random.Random(3).randbytes(3 * MIB)
            done = 0

            async def caller(number: int) -> None:
                nonlocal done
                while time.monotonic() < end:
                    match number % 4:
                        case 0:
                            assert await jobs.echo(long) == long
                            await asyncio.sleep(0.1 if scale >= 1 else 0.4)
                        case 1:
                            assert await jobs.slow(1.5, number) == number
                        case 2:
                            assert [item async for item in option_jobs.ticks("a", 3, 0.5)] == ["a0", "a1", "a2"]
                        case _:
                            assert await jobs.add(number, 1) == number + 1
                    done += 1
                    await asyncio.sleep(0.01 if scale >= 1 else 0.05)

            await asyncio.gather(*(caller(number) for number in range(16)))
            assert done > 20
            connections = list(dispatcher_of(pool).roster)
            assert {one.metadata.pid for one in connections} == set(pids(pool))
            assert min(one.session.epoch for one in connections) > 4, "there were several before"
            await until(lambda: sessions_of(pool) == 2)

    with nobody_lost():
        run(main, 120.0)


def test_w53_the_next_session_is_used_at_once_and_keeps_the_place_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with pool_with(WorkerOptions(max_connection_age_ms=1500), spawn=2) as pool:
            turns = [await jobs.pid() for _ in range(4)]
            assert turns[:2] == turns[2:]
            slow = [asyncio.create_task(jobs.slow(3.0, number)) for number in range(2)]
            old = list(dispatcher_of(pool).roster)
            await until(lambda: not set(old) & set(dispatcher_of(pool).roster), 20.0)
            assert [view.in_flight for view in pool.workers()] == [1, 1], "those of the old sessions too"
            assert sessions_of(pool) == 4
            assert [await jobs.pid() for _ in range(4)] == turns, "each keeps its turn"
            assert await asyncio.gather(*slow) == [0, 1]
            await until(lambda: not set(old) & dispatcher_of(pool).connections.gone)

    with nobody_lost():
        run(main)


def test_w53_a_worker_that_cannot_open_a_session_now_is_not_given_up(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A routine holds the interpreter's lock, so nobody there answers a new session."""

    async def main() -> None:
        async with pool_with(WorkerOptions(max_connection_age_ms=1000)) as pool:
            assert await jobs.add(1, 2) == 3
            old = connection_of(pool)
            with monkeypatch.context() as hasty:  # on a busy machine the others need more
                hasty.setattr(connections, "OPENING", 0.3)
                assert await jobs.holds_the_gil(log, 2.0)
            assert await jobs.add(1, 2) == 3
            await until(lambda: connection_of(pool) is not old, 20.0)
            assert await jobs.add(1, 2) == 3

    with nobody_lost():
        run(main)


def test_w34_w53_a_worker_whose_sessions_are_replaced_all_the_time_does_not_stay_blocked() -> None:
    """Each of them knows from the one before that the worker was blocked, and since when nobody has heard of it."""

    async def main() -> None:
        async with pool_with(WorkerOptions(max_connection_age_ms=1000)) as pool:
            assert await jobs.add(1, 2) == 3
            connection_of(pool).block()
            assert await jobs.add(1, 2) == 3

    with nobody_lost():
        run(main)


def test_w53_calls_on_a_connection_whose_grace_is_over_are_lost_and_the_worker_is_not() -> None:
    async def main() -> None:
        options = WorkerOptions(max_connection_age_ms=500, max_connection_age_grace_ms=300)
        async with pool_with(options) as pool:
            before = pids(pool)
            with pytest.raises(headgate.WorkerLost):
                await jobs.slow(20.0)
            assert await jobs.add(1, 2) == 3
            assert pids(pool) == before

    with nobody_lost():
        run(main)


def test_w53_a_session_without_calls_stays_open_for_a_minute() -> None:
    found = importlib.util.find_spec("headgate.workers.client.lifetime")  # as it is, not as these tests have it
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.IDLE == 60.0
    low, high = module.AGING
    assert 0.5 < low < high < 0.9, "before a server may close the connection"


@pytest.mark.parametrize("host", [None, pytest.param("127.0.0.1", marks=pytest.mark.soak)])
def test_w53_a_session_without_calls_closes_itself_and_the_next_call_opens_another(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "IDLE", 0.8)

    async def main() -> None:
        async with pool_with(spawn=2, host=host, lazy=False) as pool:
            assert await jobs.slow(1.6) == "done", "with calls it stays, however long they take"
            await until(lambda: sessions_of(pool) == 0)
            assert list(states(pool).values()) == ["ready", "ready"]
            assert len(dispatcher_of(pool).roster) == 2
            assert not any(one.is_begun for one in dispatcher_of(pool).roster)
            before = sorted(pids(pool))
            assert sorted([await jobs.pid() for _ in range(2)]) == before
            assert sessions_of(pool) == 2
            stream = option_jobs.ticks("a", 2)
            assert await anext(stream) == "a0"
            await until(lambda: sessions_of(pool) <= 1)
            await asyncio.sleep(1.0)
            assert sessions_of(pool) == 1, "the one with a generator stays"
            assert await anext(stream) == "a1"
            await stream.aclose()
            await until(lambda: sessions_of(pool) == 0)
            found = await pool.broadcast(jobs.pid)
            assert sorted(found.values()) == before

    with nobody_lost():
        run(main)


def test_w53_nothing_is_lost_when_a_call_comes_as_its_session_closes(
    monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr(lifetime, "IDLE", 0.01)

    async def main() -> None:
        async with pool_with(spawn=2) as pool:
            end = time.monotonic() + max(1.5, 30.0 * scale**1.5)
            chance = random.Random(5)

            async def caller(number: int) -> None:
                while time.monotonic() < end:
                    assert await jobs.add(number, 1) == number + 1
                    await asyncio.sleep(chance.uniform(0.005, 0.03))

            await asyncio.gather(*(caller(number) for number in range(2)))
            assert next(iter(dispatcher_of(pool).roster)).session.epoch > 10

    with nobody_lost():
        run(main, 120.0)


def test_w53_a_worker_that_is_killed_while_nobody_has_a_session_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "IDLE", 0.1)

    async def main() -> None:
        async with pool_with() as pool:
            [pid] = pids(pool)
            assert await jobs.pid() == pid
            await until(lambda: sessions_of(pool) == 0)
            os.kill(pid, signal.SIGKILL)
            assert await jobs.pid() != pid

    run(main)


def test_w53_timers_of_sessions_end_with_them() -> None:
    told: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        used: list[float | None] = [None]
        one = lifetime.Lifetime(loop, lambda: used[0], told.append)
        one.begin(0.1)
        await until(lambda: told)
        assert told == ["aging"]
        one.again()
        await until(lambda: len(told) == 2)
        one.end()
        one.again()
        await asyncio.sleep(0.3)
        assert told == ["aging", "aging"]

    run(main)
