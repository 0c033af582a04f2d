"""Experiments for the table of calls in docs/delivery.md: one for each row, in the order of the rows."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import headgate
from headgate import RoundRobinLoadBalancer, WorkerLost, WorkerPool, routine
from tests.support.workers.support import alive, all_ready, environment, in_flight, pids, read_line, until, wait_until
from tests.system.docs import delivery_jobs as jobs
from tests.system.docs.delivery_lab import CALLS, Lab, begun, ended, kill, shows, tell, uid_of, untell, until_begun

calls = partial(shows, CALLS)


def again(fn: Any, retries: int = 2, **options: Any) -> Any:
    """A routine that may run three times."""
    return routine(retries=retries, **options)(fn)


async def both(lab: Lab, fn: Any, *args: Any) -> list[tuple[Any, int]]:
    """The outcome without `retries` and with them, each with how often it has run."""
    found = []
    for called in (routine(fn), again(fn)):
        path = lab.file()
        found.append((await lab.outcome(called(path, *args)), len(begun(path))))
    return found


# -- it ends by itself ------------------------------------------------------------------------------------------------


@calls("it returns")
async def returns(lab: Lab) -> None:
    assert await both(lab, jobs.returns) == [("result", 1), ("result", 1)]


@calls("it raises")
async def raises(lab: Lab) -> None:
    for error, runs in await both(lab, jobs.raises):
        assert (type(error), str(error.args[0]), runs) == (LookupError, "its own", 1)


@calls("it calls `sys.exit()`, or raises KeyboardInterrupt")
async def calls_sys_exit(lab: Lab) -> None:
    await lab.rested()
    before = pids(lab.pool)
    beside = asyncio.create_task(routine(jobs.waits)(lab.path, 1))
    for error, runs in await both(lab, jobs.exits):
        assert (type(error), error.exit_code, runs) == (headgate.RoutineExited, 3, 1)
    for error, runs in await both(lab, jobs.interrupts):
        assert (type(error), runs) == (headgate.RoutineExited, 1)
    assert await beside == "result"
    assert pids(lab.pool) == before


# -- what cannot travel -----------------------------------------------------------------------------------------------


async def touches_nobody(lab: Lab, value: Any, error_type: type[Exception]) -> None:
    path = lab.file()
    with headgate.testing.capture_events("workers") as events:
        for called in (routine(jobs.returns), again(jobs.returns)):
            error = await lab.outcome(called(path, value))
            assert type(error) is error_type
        assert "task_dispatched" not in events.names
    assert begun(path) == []


@calls("an argument cannot be pickled")
async def argument_cannot_be_pickled(lab: Lab) -> None:
    await touches_nobody(lab, threading.Lock(), headgate.InvalidType)


@calls("the value of a context variable cannot be pickled")
async def variable_cannot_be_pickled(lab: Lab) -> None:
    jobs.variable.set(threading.Lock())
    await touches_nobody(lab, None, headgate.InvalidType)


@calls("an argument is above `max_payload`")
async def argument_is_too_long(lab: Lab) -> None:
    async with WorkerPool(spawn=1, max_payload=100_000):
        await touches_nobody(lab, bytes(200_000), headgate.InvalidArgument)


@calls("an argument cannot be unpickled on the worker")
async def argument_cannot_be_unpickled(lab: Lab) -> None:
    for error, runs in await both(lab, jobs.returns, jobs.Local()):
        assert (type(error), runs) == (headgate.RemoteError, 0)
        assert "can be read only where it was made" in error.message


@calls("its result or its exception cannot be pickled, cannot be unpickled, or is above `max_payload`", apart=True)
async def answer_cannot_travel(lab: Lab) -> None:
    async with WorkerPool(spawn=1, max_payload=100_000):
        for fn, args, reason in (
            (jobs.returns_a_lock, (), "cannot be pickled"),
            (jobs.raises_a_lock, (), "it has a lock"),
            (jobs.returns_a_local, (), "cannot be read here"),
            (jobs.returns_bytes, (200_000,), "max_payload"),
            (jobs.raises_text, (200_000,), "max_payload"),
        ):
            for error, runs in await both(lab, fn, *args):
                assert (type(error), runs) == (headgate.RemoteError, 1), fn
                assert reason in error.message


@calls("a context variable that it set cannot be carried back")
async def variable_cannot_come_back(lab: Lab) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert await both(lab, jobs.sets_a_lock) == [("result", 1), ("result", 1)]
    assert [one.category for one in caught] == [headgate.ContextDecodeWarning] * 2
    assert jobs.variable.get() is None
    lab.got.add("ContextDecodeWarning")


# -- no pool, no worker -----------------------------------------------------------------------------------------------


async def in_context(context: contextvars.Context, called: Any) -> Any:
    return await asyncio.get_running_loop().create_task(called, context=context)


@calls("no pool is open around the call")
async def no_pool(lab: Lab) -> None:
    nothing = contextvars.Context()
    for called in (routine(jobs.returns), again(jobs.returns)):
        error = await lab.outcome(in_context(nothing, called(lab.path)))
        assert type(error) is headgate.NoActivePool
    assert begun(lab.path) == []


@calls("the pool is closed, or is closing", apart=True)
async def pool_is_closed(lab: Lab) -> None:
    def alone() -> Any:
        async def inside() -> Any:
            async with WorkerPool(spawn=1) as pool:
                context = contextvars.copy_context()
                await routine(jobs.returns)(lab.file())
                running = asyncio.create_task(routine(jobs.waits_for_a_file)(lab.path))
                await until_begun(lab.path)
                closing = asyncio.create_task(pool.__aexit__(None, None, None))
                await until(lambda: "closing" in repr(pool))
                errors = [await lab.outcome(called(never)) for called in both_ways]
                tell(lab.path)
                assert await running == "result", "what ran before went on"
                await closing
            errors += [await lab.outcome(in_context(context, called(never))) for called in both_ways]
            after = [await lab.outcome(called(never)) for called in both_ways]
            return errors, after

        return inside()

    never, both_ways = lab.file(), (routine(jobs.returns), again(jobs.returns))
    # In a context without the shared pool, so that none is open after the block.
    errors, after = await in_context(contextvars.Context(), alone())
    assert [type(error) for error in errors] == [headgate.PoolClosed] * 4
    assert [type(error) for error in after] == [headgate.NoActivePool] * 2
    assert begun(never) == []


@calls("a worker refuses it: the worker is stopping, or its backpressure hook says no or raises", apart=True)
async def refused_by_one(lab: Lab) -> None:
    async with WorkerPool(spawn=2, worker=jobs.factory(jobs.refuse_where_told(lab.path))) as pool:
        [one, other] = await all_ready(pool, 2)
        tell(lab.path, f"refuse.{one}")
        path = lab.file()
        for _ in range(4):
            assert await routine(jobs.returns)(path) == "result"
            assert await again(jobs.returns, retries=1)(path) == "result"
        assert begun(path) == [other] * 8
        untell(lab.path, f"refuse.{one}")
        path, last = lab.file(), lab.file()
        finishes = asyncio.create_task(routine(jobs.waits_for_a_file)(last))
        [stopping] = await until_begun(last)
        kill(stopping, signal.SIGTERM)
        found = [await routine(jobs.returns)(path) for _ in range(20)]
        assert (found, len(begun(path))) == (["result"] * 20, 20)
        await until(lambda: stopping not in pids(pool))
        path = lab.file()
        assert [await routine(jobs.returns)(path) for _ in range(4)] == ["result"] * 4
        assert stopping not in begun(path)
        tell(last)
        assert await finishes == "result"


@calls("every worker refuses it", apart=True)
async def refused_by_all(lab: Lab) -> None:
    async with WorkerPool(spawn=2, worker=jobs.factory(jobs.refuse_where_told(lab.path))) as pool:
        uids = [view.uid for view in pool.workers()]
        for word, reason in (("refuse.all", "hook refused"), ("raise", "hook raised LookupError")):
            tell(lab.path, word)
            for error, runs in await both(lab, jobs.returns):
                assert (type(error), runs) == (headgate.NoWorkersAvailable, 0)
                assert all(uid in error.message for uid in uids)
                assert error.message.count(reason) == 2


BLOCKED_BEFORE = "its worker is [blocked](#lost-or-only-blocked) before the call begins"


@calls(BLOCKED_BEFORE, apart=True, soak=True)
async def blocked_before_it_begins(lab: Lab) -> None:
    async with WorkerPool(spawn=2):
        for _ in range(4):
            await routine(jobs.returns)(lab.file())
        holder = asyncio.create_task(routine(jobs.holds_the_loop)(lab.path, 3))
        [held] = await until_begun(lab.path)
        path = lab.file()
        found = await asyncio.gather(*(routine(jobs.returns)(path) for _ in range(10)))
        assert (found, len(begun(path))) == (["result"] * 10, 10)
        assert held not in begun(path)
        assert await holder == "result"
    async with WorkerPool(spawn=1) as pool:
        pool._quorum_timeout = 1.0  # not from the beginning: starting may take longer
        held_path, path = lab.file(), lab.file()
        holder = asyncio.create_task(routine(jobs.holds_the_loop)(held_path, 4))
        await until_begun(held_path)
        outcomes = [lab.outcome(called(path)) for called in (routine(jobs.returns), again(jobs.returns))]
        assert [type(error) for error in await asyncio.gather(*outcomes)] == [headgate.NoWorkersAvailable] * 2
        assert await holder == "result"
        assert begun(path) == []
    async with WorkerPool(spawn=1) as pool:
        holder = asyncio.create_task(routine(jobs.holds_the_loop)(lab.file(), 2))
        await until(lambda: in_flight(pool))
        path = lab.file()
        assert await routine(jobs.returns)(path) == "result", "it waits"
        assert (holder.done(), len(begun(path))) == (True, 1)
        await holder


@calls(BLOCKED_BEFORE, apart=True, soak=True)
async def no_thread_place(lab: Lab) -> None:
    """Plain calls past their timeout hold all threads of one worker."""
    async with WorkerPool(spawn=2) as pool:
        [one, _] = await all_ready(pool, 2)
        holder = routine(timeout=0.2)(jobs.sleeps_in_a_thread)
        held = [asyncio.create_task(holder(lab.path, 15)) for _ in range(64)]
        errors = await asyncio.gather(*held, return_exceptions=True)
        assert ({type(error) for error in errors}, len(begun(lab.path))) == ({headgate.RoutineTimeout}, 64)
        await pool.resize(3)  # one worker has free places
        [fresh] = set(pids(pool)) - set(begun(lab.path))
        path = lab.file()
        found = await asyncio.gather(*(routine(jobs.sleeps_in_a_thread)(path, 0) for _ in range(6)))
        assert (found, set(begun(path))) == (["result"] * 6, {fresh})
        assert one != fresh


@calls("no worker is ready for `quorum_timeout` seconds", apart=True, soak=True)
async def no_worker_in_time(lab: Lab) -> None:
    async with WorkerPool(spawn=1, worker=jobs.factory(jobs.Starting(lab.path))) as pool:
        pool._quorum_timeout = 0.3  # not from the beginning: starting may take longer
        tell(lab.path, "slow")
        kill(pids(pool)[0])
        await until(lambda: not pids(pool))
        for error, runs in await both(lab, jobs.returns):
            assert (type(error), runs) == (headgate.NoWorkersAvailable, 0)
            assert "quorum_timeout" in error.message
        untell(lab.path, "slow")


@calls("it is not begun within `dispatch_timeout`", apart=True)
async def dispatch_timeout(lab: Lab) -> None:
    async with WorkerPool(spawn=1, worker=jobs.factory(jobs.delay(0.4))):
        for called in (routine(jobs.returns), again(jobs.returns)):
            path = lab.file()
            with headgate.RuntimeContext(dispatch_timeout=0.03):
                error = await lab.outcome(called(path))
            assert type(error) is headgate.DispatchTimeout
            assert isinstance(error, (headgate.NoWorkersAvailable, TimeoutError))
            assert await routine(jobs.returns)(lab.file()) == "result", "it had its turn, and did not begin"
            assert begun(path) == []
        chance, found = random.Random(4), set()
        for _ in range(15):
            path = lab.file()
            with headgate.RuntimeContext(dispatch_timeout=0.4 + chance.uniform(-0.005, 0.02)):
                result = await lab.outcome(routine(jobs.waits)(path, 0.05))
            found.add(str(result) if isinstance(result, str) else type(result).__name__)
            assert len(begun(path)) <= 1
            if begun(path):
                await until(lambda path=path: ended(path) == ["finally"])
        assert found <= {"result", "DispatchTimeout"}


@calls("no worker of the pool was ever ready: five end within 30 s while they start", apart=True, soak=True)
async def never_ready(lab: Lab) -> None:
    tell(lab.path, "broken")

    async def enter() -> None:
        async with WorkerPool(spawn=1, worker=jobs.factory(jobs.Starting(lab.path))):
            raise AssertionError("it was entered")

    error = await lab.outcome(enter())
    assert type(error) is headgate.WorkerStartFailed
    assert "the hook cannot be loaded" in str(error)


@calls("no worker is left, and new ones cannot be started", apart=True, soak=True)
async def none_is_left(lab: Lab) -> None:
    async with WorkerPool(spawn=1, worker=jobs.factory(jobs.Starting(lab.path))) as pool:
        tell(lab.path, "broken")
        kill(pids(pool)[0])
        await until(lambda: not pids(pool))
        for error, runs in await both(lab, jobs.returns):
            assert (type(error), runs) == (headgate.WorkerStartFailed, 0)
            assert "the hook cannot be loaded" in str(error)
        untell(lab.path, "broken")
        await all_ready(pool, 1, 35)
        assert await routine(jobs.returns)(lab.file()) == "result"


# -- its worker is lost -----------------------------------------------------------------------------------------------


@calls("its worker is lost before the call was sent", apart=True, soak=True)
async def lost_before_it_was_sent(lab: Lab) -> None:
    for fn in (routine(jobs.returns), again(jobs.returns, retries=1)):
        async with WorkerPool(spawn=2) as pool:  # lazy: nothing is connected
            [victim, other] = await all_ready(pool, 2)
            path = lab.file()
            kill(victim)
            wait_until(lambda victim=victim: not alive(victim))  # without a turn of the loop: nobody was told
            assert await asyncio.gather(fn(path), fn(path)) == ["result"] * 2
            assert len(begun(path)) == 2
            assert other in begun(path)


@calls("its worker is lost after the call was sent")
async def lost_afterwards(lab: Lab) -> None:
    pool = await lab.rested()
    in_part, whole, nothing = lab.file(), lab.file(), lab.file()
    call = asyncio.create_task(routine(jobs.waits)(in_part))
    [victim] = await until_begun(in_part)
    uid = uid_of(pool, victim)
    kill(victim)
    error = await lab.outcome(call)
    assert (type(error), error.worker, bool(error.task)) == (WorkerLost, uid, True)
    assert (len(begun(in_part)), ended(in_part)) == (1, [])
    await lab.rested()
    assert type(await lab.outcome(routine(jobs.dies)(whole))) is WorkerLost
    assert (len(begun(whole)), ended(whole)) == (1, ["to its end"])
    await lab.rested()
    for _ in range(4):
        await routine(jobs.returns)(lab.file())  # both are connected
    sleeping = pids(pool)
    for pid in sleeping:
        kill(pid, signal.SIGSTOP)
    sent = asyncio.create_task(routine(jobs.returns)(nothing))
    proxy: Any = pool._dispatchers[asyncio.get_running_loop()]
    await until(lambda: any(call.number for call in proxy._calls))  # sent, and read by nobody
    for pid in sleeping:
        kill(pid)
    assert type(await lab.outcome(sent)) is WorkerLost
    assert begun(nothing) == []
    await lab.rested()
    path = lab.file()
    assert await again(jobs.dies_once)(path) == "result"
    assert len(begun(path)) == len(set(begun(path))) == 2
    await lab.rested()
    path = lab.file()
    assert type(await lab.outcome(again(jobs.dies)(path))) is WorkerLost
    assert len(begun(path)) == 3
    await lab.rested()


@calls("its worker is lost after the call was sent")
async def lost_tells_how(lab: Lab) -> None:
    await lab.rested()
    error: Any = await lab.outcome(routine(jobs.dies)(lab.file()))
    assert (error.signal, error.exit_code) == (signal.SIGKILL, None)
    await lab.rested()
    error = await lab.outcome(routine(jobs.leaves)(lab.file()))
    assert (error.signal, error.exit_code) == (None, 7)
    await lab.rested()


@calls("its worker is lost after the call was sent")
async def lost_beside_others(lab: Lab) -> None:
    """A call that always kills its worker takes nobody along who has a retry left."""
    await lab.rested()
    culprit = asyncio.create_task(lab.outcome(again(jobs.dies_when_told)(lab.path)))
    paths = [lab.file() for _ in range(10)]
    beside = [asyncio.create_task(again(jobs.waits)(path, 0.3)) for path in paths]
    await asyncio.gather(*(until_begun(path) for path in (lab.path, *paths)))
    tell(lab.path)
    assert await asyncio.gather(*beside) == ["result"] * 10
    assert type(await culprit) is WorkerLost
    assert len(begun(lab.path)) == 3
    assert all(1 <= len(begun(path)) <= 3 for path in paths)
    await lab.rested()


@calls("its worker is lost during a stream")
async def stream_is_lost(lab: Lab) -> None:
    pool = await lab.rested()
    for options in ({}, {"prefetch": 4}):
        path = lab.file()
        stream = routine(**options)(jobs.items)(path, 3)
        assert [await anext(stream), await anext(stream)] == [0, 1]
        if options:
            await until(lambda path=path: "waits" in ended(path))  # it has made the third, ahead of its reader
            beside = lab.file()
            while begun(path)[0] not in begun(beside):  # and sent it: answers of one worker come in their order
                await asyncio.gather(*(routine(jobs.returns)(beside) for _ in range(2 * len(pids(pool)))))
        kill(begun(path)[0])
        await until(lambda path=path, pool=pool: begun(path)[0] not in pids(pool))
        if options:
            assert await anext(stream) == 2, "it had arrived"
        assert type(await lab.outcome(anext(stream))) is WorkerLost
        assert (len(begun(path)), "finally" in ended(path)) == (1, False)
        await lab.rested()
    with suppress(headgate.InvalidArgument):
        routine(retries=1)(jobs.items)
        raise AssertionError("retries= was accepted for a generator")


@calls("the result of a run that was given up arrives later", apart=True, soak=True)
async def late_result(lab: Lab) -> None:
    """A worker is stopped, lost after 10 s of silence, woken, and killed; what it sends meanwhile is discarded."""
    async with WorkerPool(spawn=2) as pool:
        await all_ready(pool, 2)
        path = lab.file()
        call = asyncio.create_task(again(jobs.waits)(path, 1))
        [victim] = await until_begun(path)
        kill(victim, signal.SIGSTOP)
        await until(lambda: len(begun(path)) == 2, 15)
        kill(victim, signal.SIGCONT)
        assert await call == "result"
        assert len(begun(path)) == 2
        await until(lambda: not alive(victim))
        await all_ready(pool, 2)
        assert await asyncio.gather(*(routine(jobs.returns)(path) for _ in range(20))) == ["result"] * 20


# -- timeouts and cancellation ----------------------------------------------------------------------------------------


@calls("it runs longer than its `timeout`")
async def timeout(lab: Lab) -> None:
    for retries in (0, 2):
        path = lab.file()
        error = await lab.outcome(again(jobs.waits, retries=retries, timeout=0.2)(path))
        assert (type(error), isinstance(error, TimeoutError)) == (headgate.RoutineTimeout, True)
        assert (len(begun(path)), ended(path)) == (1, ["finally"]), "it had ended on the worker"


@calls("it runs longer than its `timeout`", apart=True, soak=True)
async def timeout_and_a_slow_end(lab: Lab) -> None:
    async with WorkerPool(spawn=1):
        error = await within(7, lab.outcome(routine(timeout=0.2)(jobs.ends_slowly)(lab.path, 60)))
        assert type(error) is headgate.RoutineTimeout
        assert (len(begun(lab.path)), ended(lab.path)) == (1, [])


async def within(seconds: float, outcome: Any) -> Any:
    """The outcome, which comes in so many seconds. (The limit of the row, and two for a busy machine.)"""
    async with asyncio.timeout(seconds):
        return await outcome


UNSTOPPABLE = (
    "it runs longer than its `timeout` and cannot be stopped: "
    "a plain function, code that does not await, an argument that hangs while it is unpickled"
)


@calls(UNSTOPPABLE, apart=True, soak=True)
async def timeout_of_a_thread(lab: Lab) -> None:
    async with WorkerPool(spawn=1):
        short, long = lab.file(), lab.file()
        plain = again(jobs.sleeps_in_a_thread, timeout=0.2)
        waiting = asyncio.create_task(within(7.2, lab.outcome(plain(long, 8))))
        assert type(await lab.outcome(plain(short, 1))) is headgate.RoutineTimeout
        assert (len(begun(short)), ended(short)) == (1, ["to its end"])
        assert type(await waiting) is headgate.RoutineTimeout
        assert (len(begun(long)), ended(long)) == (1, [])
        await until(lambda: ended(long) == ["to its end"])


@calls(UNSTOPPABLE, apart=True, soak=True)
async def timeout_of_a_held_loop(lab: Lab) -> None:
    async with WorkerPool(spawn=1):
        path = lab.file()
        error = await within(7.2, lab.outcome(again(jobs.holds_the_loop, timeout=0.2)(path, 0.5)))
        assert (type(error), ended(path)) == (headgate.RoutineTimeout, ["to its end"])
        error = await within(7.2, lab.outcome(again(jobs.holds_the_loop, timeout=0.2)(lab.path, 8)))
        assert type(error) is headgate.RoutineTimeout
        await until(lambda: ended(lab.path) == ["to its end"])
        assert len(begun(lab.path)) == 1


@calls(UNSTOPPABLE, apart=True, soak=True)
async def timeout_of_an_argument(lab: Lab) -> None:
    async with WorkerPool(spawn=1):
        slow = routine(timeout=0.2)(jobs.returns)
        error = await within(7.2, lab.outcome(slow(lab.path, jobs.SlowToLoad(8))))
        assert type(error) is headgate.RoutineTimeout


@calls(
    "a module that it needs takes longer to import than its `timeout` and 3 s "
    "([slow imports](workers.md#slow-imports))",
    apart=True,
    soak=True,
)
async def timeout_of_an_import(lab: Lab) -> None:
    folder, name = Path(lab.path).parent, "delivery_slow_import"
    (folder / f"{name}.py").write_text(
        "import os, time\n"
        f"while os.getpid() != {os.getpid()} and not os.path.exists({lab.path + '.go'!r}):\n"
        "    time.sleep(0.01)\n"
        "async def returns(path):\n"
        "    with open(path, 'a') as file:\n"
        "        print('begun', os.getpid(), file=file)\n"
        "    return 'result'\n"
    )
    sys.path.insert(0, str(folder))
    try:
        slow = again(importlib.import_module(name).returns, timeout=0.2)
        async with WorkerPool(spawn=1):
            error = await within(7.2, lab.outcome(slow(lab.path)))
            assert (type(error), begun(lab.path)) == (headgate.RoutineTimeout, [])
            tell(lab.path)
            assert await slow(lab.path) == "result", "the import has ended"
            assert len(begun(lab.path)) == 1
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


@calls("its caller is cancelled")
async def caller_is_cancelled(lab: Lab) -> None:
    for called in (routine(jobs.waits), again(jobs.waits)):
        path = lab.file()
        call = asyncio.create_task(called(path))
        await until_begun(path)
        call.cancel()
        assert type(await lab.outcome(call)) is asyncio.CancelledError
        assert (len(begun(path)), ended(path)) == (1, ["finally"]), "it had ended on the worker"
        path = lab.file()
        call = asyncio.create_task(called(path))
        await asyncio.sleep(0)
        call.cancel()
        assert type(await lab.outcome(call)) is asyncio.CancelledError
        assert len(begun(path)) <= 1
        assert len(ended(path)) == len(begun(path))


@calls("its caller is cancelled", apart=True, soak=True)
async def caller_is_cancelled_and_it_ends_slowly(lab: Lab) -> None:
    async with WorkerPool(spawn=1):
        call = asyncio.create_task(routine(jobs.ends_slowly)(lab.path, 60))
        await until_begun(lab.path)
        call.cancel()
        assert type(await within(7, lab.outcome(call))) is asyncio.CancelledError
        assert (len(begun(lab.path)), ended(lab.path)) == (1, [])


@calls("its caller is cancelled, and it cannot be stopped", apart=True, soak=True)
async def caller_of_a_thread_is_cancelled(lab: Lab) -> None:
    async with WorkerPool(spawn=1):
        for seconds, at_once in ((1, ["to its end"]), (8, [])):
            path = lab.file()
            call = asyncio.create_task(again(jobs.sleeps_in_a_thread)(path, seconds))
            await until_begun(path)
            call.cancel()
            assert type(await within(7, lab.outcome(call))) is asyncio.CancelledError
            assert ended(path) == at_once
            await until(lambda path=path: ended(path) == ["to its end"])
            assert len(begun(path)) == 1


@calls("it catches the CancelledError of a timeout or of its caller, and returns or raises")
async def catches_it(lab: Lab) -> None:
    for fn, expected in ((jobs.catches, "caught"), (jobs.replaces, "instead")):
        for retries in (0, 2):
            by_caller, by_timeout = lab.file(), lab.file()
            call = asyncio.create_task(again(fn, retries=retries)(by_caller))
            await until_begun(by_caller)
            call.cancel()
            limited = again(fn, retries=retries, timeout=0.2)(by_timeout)
            for found in (await lab.outcome(call), await lab.outcome(limited)):
                assert (found if isinstance(found, str) else found.args[0]) == expected
            assert len(begun(by_caller)) == len(begun(by_timeout)) == 1


@calls("its caller is cancelled and its worker is lost")
async def cancelled_and_lost(lab: Lab) -> None:
    await lab.rested()
    for called in (routine(jobs.ends_slowly), again(jobs.ends_slowly)):
        path = lab.file()
        call = asyncio.create_task(called(path, 60))
        [victim] = await until_begun(path)
        call.cancel()
        await asyncio.sleep(0.05)
        kill(victim)
        assert type(await within(4, lab.outcome(call))) is asyncio.CancelledError
        await lab.rested()
        assert len(begun(path)) == 1


# -- its worker or its pool ends --------------------------------------------------------------------------------------


@calls(
    "its worker is stopped and does not wait for it: `resize` after `shutdown_timeout`, a second SIGINT",
    apart=True,
    soak=True,
)
async def worker_is_stopped(lab: Lab) -> None:
    async with WorkerPool(spawn=2, shutdown_timeout=0.2, loadbalancer=RoundRobinLoadBalancer()) as pool:
        for how in ("resize", "SIGINT"):
            await pool.resize(2)
            await all_ready(pool, 2)
            leaving = pool.workers()[-1].pid
            once_path, again_path, other = lab.file(), lab.file(), lab.file()
            tasks = {}
            for path, called in ((once_path, routine(jobs.waits)), (again_path, again(jobs.waits_for_a_file))):
                await _to(leaving, other)
                tasks[path] = asyncio.create_task(called(path))
                assert await until_begun(path) == [leaving]
            if how == "resize":
                await pool.resize(1)
            else:
                kill(leaving, signal.SIGINT)
                await until(lambda leaving=leaving: leaving not in pids(pool))
                kill(leaving, signal.SIGINT)
            error = await lab.outcome(tasks[once_path])
            assert type(error) is WorkerLost
            assert "was stopped" in error.message
            assert (len(begun(once_path)), ended(once_path)) == (1, ["finally"])
            assert leaving not in (await until_begun(again_path, 2))[1:]
            tell(again_path)
            assert await tasks[again_path] == "result"
            assert len(begun(again_path)) == 2


async def _to(pid: int, path: str) -> None:
    """Make short calls until the next one is this worker's turn: two take turns."""
    while True:
        before = len(begun(path))
        await routine(jobs.returns)(path)
        if begun(path)[before] != pid:
            return


LOOP_IS_HELD = (
    "its worker is replaced because its loop is held: for `max_overdue` (30) seconds by calls past their own "
    "`timeout`, or for `max_blocked` seconds by any call"
)


@calls(LOOP_IS_HELD, apart=True, soak=True)
async def loop_is_held(lab: Lab) -> None:
    for options, limit in (({"max_blocked": 2}, 0.0), ({"max_overdue": 7}, 0.2)):
        async with WorkerPool(spawn=1, **options) as pool:
            [victim] = pids(pool)
            held, once_path, again_path = lab.file(), lab.file(), lab.file()
            beside = asyncio.create_task(routine(jobs.waits)(once_path))
            retried = asyncio.create_task(again(jobs.waits_for_a_file)(again_path))
            await asyncio.gather(until_begun(once_path), until_begun(again_path))
            holder = routine(timeout=limit or None)(jobs.holds_the_loop)(held, 60)
            error = await within(25, lab.outcome(holder))
            assert type(error) is (headgate.RoutineTimeout if limit else WorkerLost)
            assert type(await within(25, lab.outcome(beside))) is WorkerLost
            await until(lambda path=again_path: len(begun(path)) == 2)
            tell(again_path)
            assert await retried == "result"
            assert victim not in pids(pool)
            assert (len(begun(held)), ended(held), len(begun(once_path))) == (1, [], 1)


@calls(LOOP_IS_HELD, apart=True, soak=True)
async def loop_is_held_for_half_a_minute(lab: Lab) -> None:
    async with WorkerPool(spawn=1) as pool:
        [victim] = pids(pool)
        path = lab.file()
        beside = asyncio.create_task(routine(jobs.waits)(path, 120))
        await until_begun(path)
        error = await lab.outcome(routine(timeout=0.2)(jobs.holds_the_loop)(lab.path, 90))
        assert type(error) is headgate.RoutineTimeout
        assert type(await within(40, lab.outcome(beside))) is WorkerLost
        assert victim not in pids(pool)


@calls(
    "its worker is replaced because calls past their own `timeout` hold all its threads for `max_overdue` (30) seconds",
    apart=True,
    soak=True,
)
async def thread_places_are_held(lab: Lab) -> None:
    async with WorkerPool(spawn=1, max_overdue=2) as pool:
        [victim] = pids(pool)
        held, path = lab.file(), lab.file()
        beside = asyncio.create_task(again(jobs.waits_for_a_file)(path))
        await until_begun(path)
        holder = routine(timeout=0.2)(jobs.sleeps_in_a_thread)
        holders = [asyncio.create_task(holder(held, 60)) for _ in range(32)]
        errors = await asyncio.gather(*holders, return_exceptions=True)
        assert {type(error) for error in errors} == {headgate.RoutineTimeout}
        await until(lambda: pids(pool) and victim not in pids(pool), 20)
        assert await routine(jobs.returns)(lab.file()) == "result"
        tell(path)
        assert (await lab.outcome(beside), begun(path)) == ("result", [victim])
        await until(lambda: not alive(victim), 20)


@calls("the pool's block is left while it runs", apart=True)
async def block_is_left(lab: Lab) -> None:
    for called in (routine(jobs.waits), again(jobs.waits)):
        finished, cut = lab.file(), lab.file()
        async with WorkerPool(spawn=1, shutdown_timeout=1.5):
            tasks = [asyncio.create_task(called(finished, 0.1)), asyncio.create_task(called(cut, 60))]
            await asyncio.gather(until_begun(finished), until_begun(cut))
        assert await tasks[0] == "result"
        assert type(await lab.outcome(tasks[1])) is headgate.PoolClosed
        assert (len(begun(finished)), len(begun(cut))) == (1, 1)
    path = lab.file()
    with suppress(asyncio.CancelledError):
        async with WorkerPool(spawn=1):
            call = asyncio.create_task(routine(jobs.waits)(path))
            await until_begun(path)
            raise asyncio.CancelledError
    assert type(await within(5, lab.outcome(call))) is headgate.PoolClosed
    assert len(begun(path)) == 1


@calls("the pool's block is left between two steps of a stream", apart=True, soak=True)
async def block_is_left_by_a_stream(lab: Lab) -> None:
    async with WorkerPool(spawn=1):
        stream = routine(jobs.items)(lab.path, None)
        assert await anext(stream) == 0
    assert (len(begun(lab.path)), ended(lab.path)) == (1, ["finally"])
    assert type(await lab.outcome(anext(stream))) is headgate.PoolClosed


@calls("a stream is closed by its reader, or is no longer referenced")
async def stream_is_closed(lab: Lab) -> None:
    path = lab.file()
    stream = routine(jobs.items)(path, None)
    assert await anext(stream) == 0
    await stream.aclose()
    assert (len(begun(path)), ended(path)) == (1, ["finally"])
    path = lab.file()
    stream = routine(jobs.items)(path, None)
    assert await anext(stream) == 0
    del stream
    gc.collect()
    await until(lambda: ended(path) == ["finally"])
    assert len(begun(path)) == 1


DOOMED = """
import asyncio, sys
from headgate import WorkerPool, routine
from tests.system.docs import delivery_jobs as jobs
from tests.system.docs.delivery_lab import until_begun

async def main(path):
    async with WorkerPool(spawn=1):
        call = asyncio.create_task(routine(retries=2)(jobs.waits)(path))
        [pid] = await until_begun(path)
        print(pid, flush=True)
        await call

asyncio.run(main(sys.argv[1]))
"""


@calls("the caller's process is killed", apart=True, soak=True)
async def caller_is_killed(lab: Lab) -> None:
    with subprocess.Popen(  # noqa: ASYNC220 - takes a moment
        [sys.executable, "-c", DOOMED, lab.path], env=environment(), stdout=subprocess.PIPE, bufsize=0
    ) as parent:
        assert parent.stdout is not None
        worker = int(await asyncio.to_thread(read_line, parent.stdout))
        parent.kill()
        killed = time.monotonic()
        await until(lambda: not alive(worker))
        assert time.monotonic() - killed < 2 + 2, "two seconds, and two for a busy machine"
        parent.wait()
    assert (begun(lab.path), set(ended(lab.path)) <= {"finally"}) == ([worker], True)
