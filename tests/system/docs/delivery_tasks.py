"""Experiments for the table of tasks in docs/delivery.md: one for each row, in the order of the rows."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import headgate
from headgate import Resource, ResourcePool, TaskPool, WorkerPool, routine
from headgate.stores import read_journal
from tests.support.workers.support import alive, environment, lines, pids, read_line, until
from tests.system.docs import delivery_jobs as jobs
from tests.system.docs.delivery_lab import TASKS, Lab, begun, ended, kill, shows, tell, untell, until_begun

tasks = partial(shows, TASKS)
Keys = ResourcePool[Any]


def keys(*names: str, **options: Any) -> Keys:
    """Keys in this order of preference; "a" and "b", if none are named."""
    limit = options.pop("max_in_flight", None)
    found = [Resource(name, f"secret-{name}", max_in_flight=limit) for name in names or ("a", "b")]
    return ResourcePool(found, strategy="primary_backup", **options)


def combined_pool(lab: Lab, chosen: Keys, **options: Any) -> TaskPool:
    """A pool with keys and workers."""
    return TaskPool(max_concurrent=8, resources=chosen, workers=lab.pool, **options)


def unused(chosen: Keys) -> bool:
    """Is nothing known about the keys, and is none in use?"""
    stats = chosen.stats()
    return (stats.successes, stats.cooldowns, stats.disables, stats.in_flight) == (0, 0, 0, 0)


async def cool(chosen: Keys, seconds: float) -> None:
    """Have the only key rest for so long."""

    async def limited(key: Resource[Any]) -> None:
        raise headgate.CooldownResource(seconds, "429")

    with suppress(headgate.PoolExhausted):
        await chosen.run(limited, max_attempts=1)


async def fails_and_repeats(lab: Lab, fn: Any, error_type: type[BaseException], *args: Any, options: Any = None) -> Any:
    """Fails so, with `retries=1` after a second attempt; and nothing is learned about the key. How often it has run."""
    runs = []
    for retries in (0, 1):
        await lab.rested()
        chosen, path = keys("a"), lab.file()
        async with combined_pool(lab, chosen) as pool:
            handle = await pool.submit(fn, path, *args, retries=retries, **(options or {}))
            assert type(await lab.outcome(handle)) is error_type
            assert (handle.status, handle.snapshot().attempt) == ("failed", retries + 1)
        assert unused(chosen), "nothing is learned about the key"
        runs.append(len(begun(path)))
    return runs


# -- its key ----------------------------------------------------------------------------------------------------------


@tasks("its key cools: `CooldownResource`")
async def key_cools(lab: Lab) -> None:
    chosen, path = keys(), lab.file()
    async with combined_pool(lab, chosen) as pool:
        handle = await pool.submit(jobs.refuses, path, {"a": "cooldown"}, max_attempts=1, retries=0)
        assert await lab.outcome(handle) == "b"
        assert (handle.snapshot().attempt, len(begun(path)), ended(path)) == (2, 2, ["to its end"])
        assert chosen.stats().resources["a"].status == "cooling_down"
        path = lab.file()
    async with combined_pool(lab, keys()) as pool:
        last = await pool.submit(jobs.refuses, path, {"a": "blink", "b": "blink"}, max_attempts=1, retries=3)
        error = await lab.outcome(last)
        assert (type(error), error.reason) == (headgate.PoolExhausted, "attempts")
        assert len(begun(path)) == 10


@tasks("it raises `RetryOperation`")
async def asks_for_another_attempt(lab: Lab) -> None:
    chosen, path = keys(), lab.file()
    async with combined_pool(lab, chosen) as pool:
        handle = await pool.submit(jobs.refuses, path, {"a": "retry"}, retries=0)
        assert await lab.outcome(handle) == "b"
        assert (handle.snapshot().attempt, len(begun(path)), ended(path)) == (2, 2, ["to its end"])
        assert chosen.stats().resources["a"].status == "healthy"
        path = lab.file()
        last = await pool.submit(jobs.refuses, path, {"a": "retry", "b": "retry"}, max_attempts=1, retries=3)
        error = await lab.outcome(last)
        assert (type(error), error.reason) == (headgate.PoolExhausted, "attempts")
        assert len(begun(path)) == 1


@tasks("its key is disabled: `DisableResource`")
async def key_is_disabled(lab: Lab) -> None:
    chosen, path = keys(), lab.file()
    async with combined_pool(lab, chosen) as pool:
        handle = await pool.submit(jobs.refuses, path, {"a": "disable"})
        assert await lab.outcome(handle) == "b"
        assert (handle.snapshot().attempt, len(begun(path))) == (2, 2)
        path = lab.file()
        error = await lab.outcome(await pool.submit(jobs.refuses, path, {"b": "disable"}, retries=3))
        assert (type(error), error.reason, len(begun(path))) == (headgate.PoolExhausted, "no_eligible", 1)
    chosen = keys()
    async with combined_pool(lab, chosen) as pool:
        path = lab.file()
        error = await lab.outcome(await pool.submit(jobs.refuses, path, {"a": "disable"}, max_attempts=1))
        assert (type(error), error.reason, len(begun(path))) == (headgate.PoolExhausted, "attempts", 1)


@tasks("all keys that it could use are cooling or in use")
async def keys_cool(lab: Lab) -> None:
    chosen = keys("a", max_in_flight=1)
    async with combined_pool(lab, chosen) as pool:
        first = await pool.submit(jobs.waits_for_a_file, lab.path)
        await until_begun(lab.path)
        path = lab.file()
        queued = await pool.submit(jobs.returns, path, max_attempts=1)
        assert (queued.status, pool.snapshot().active) == ("queued", 1)
        tell(lab.path)
        assert [await first, await lab.outcome(queued)] == ["a", "result"]
        assert (queued.snapshot().attempt, len(begun(path))) == (1, 1)
        await cool(chosen, 0.3)
        path = lab.file()
        queued = await pool.submit(jobs.returns, path, max_attempts=1)
        assert (queued.status, pool.snapshot().active) == ("queued", 0)
        assert await lab.outcome(queued) == "result"
        assert (queued.snapshot().attempt, len(begun(path))) == (1, 1)


@tasks("all keys that it could use are disabled or removed")
async def keys_are_dead(lab: Lab) -> None:
    for end in ("disable", "remove"):
        chosen = keys("a")
        async with combined_pool(lab, chosen) as pool:
            await cool(chosen, 60)
            path = lab.file()
            queued = await pool.submit(jobs.returns, path, retries=3)
            assert queued.status == "queued"
            await getattr(chosen, end)("a")
            later = await pool.submit(jobs.returns, path, retries=3)
            for handle in (queued, later):
                error = await lab.outcome(handle)
                assert (type(error), error.reason) == (headgate.PoolExhausted, "no_eligible")
            assert begun(path) == []


# -- siblings ---------------------------------------------------------------------------------------------------------


async def with_an_older(lab: Lab, fn: Any, *args: Any, here: bool = False, **options: Any) -> tuple[Any, str]:
    """Run it beside an older use of its key, which finds the key limited; its handle, when it has ended."""
    path, chosen = lab.file(), keys(cancel_siblings=options.pop("cancel_siblings", True))
    async with combined_pool(lab, chosen) if not here else TaskPool(max_concurrent=8, resources=chosen) as pool:
        first = await pool.submit(jobs.older, path)
        await until(lambda: "older a" in lines(path))
        handle = await pool.submit(fn, path, *args, **options)
        await until_begun(path)
        tell(path)
        assert await first == "b"
        tell(path, "end")
        await lab.outcome(handle)
    return handle, path


SIBLING = "an older use of its key finds the key limited or dead (*sibling cancelled*)"


@tasks(SIBLING)
async def sibling(lab: Lab) -> None:
    handle, path = await with_an_older(lab, jobs.younger, "raise", max_attempts=1)
    assert (await handle, handle.snapshot().attempt) == ("b", 1)
    assert (len(begun(path)), "finally" in ended(path)) == (2, True)


@tasks(SIBLING)
async def sibling_with_a_cancelled_error_of_its_own(lab: Lab) -> None:
    handle, path = await with_an_older(lab, jobs.younger, "replace", max_attempts=1)
    assert (await lab.outcome(handle), handle.snapshot().attempt) == ("b", 1)
    assert (len(begun(path)), "finally" in ended(path)) == (2, True)


@tasks(SIBLING)
async def sibling_with_a_cancelled_error_of_its_own_here(lab: Lab) -> None:
    """The same without workers."""
    handle, path = await with_an_older(lab, jobs.younger, "replace", here=True, max_attempts=1)
    assert (await lab.outcome(handle), handle.snapshot().attempt) == ("b", 1)
    assert (len(begun(path)), "finally" in ended(path)) == (2, True)


@tasks(
    "the same, and it is a plain function in a thread, "
    "or catches the CancelledError and returns or raises something else"
)
async def sibling_that_goes_on(lab: Lab) -> None:
    handle, path = await with_an_older(lab, jobs.younger_in_a_thread)
    assert (await handle, len(begun(path)), handle.snapshot().attempt) == ("a", 1, 1)
    handle, path = await with_an_older(lab, jobs.younger, "return")
    assert (await handle, len(begun(path)), handle.snapshot().attempt) == ("caught", 1, 1)
    handle, path = await with_an_older(lab, jobs.replaces)
    assert (type(await lab.outcome(handle)), len(begun(path))) == (LookupError, 1)
    handle, path = await with_an_older(lab, jobs.younger, "fail", retries=1)
    assert (await handle, len(begun(path)), handle.snapshot().attempt) == ("b", 2, 2)


# -- its worker, its pools --------------------------------------------------------------------------------------------


@tasks("its worker is lost")
async def worker_is_lost(lab: Lab) -> None:
    assert await fails_and_repeats(lab, jobs.dies, headgate.WorkerLost) == [1, 2]
    await lab.rested()
    async with combined_pool(lab, keys()) as pool:
        path = lab.file()
        handle = await pool.submit(jobs.dies_once, path, retries=1)
        assert (await handle, handle.snapshot().attempt, len(begun(path))) == ("a", 2, 2)
    await lab.rested()


@tasks("its worker is lost")
async def worker_is_lost_beside_others(lab: Lab) -> None:
    """A task that always kills its worker takes nobody along who has a retry left."""
    await lab.rested()
    async with combined_pool(lab, keys()) as pool:
        culprit = await pool.submit(jobs.dies_when_told, lab.path, retries=2)
        paths = [lab.file() for _ in range(6)]
        beside = [await pool.submit(jobs.waits, path, 0.3, retries=2) for path in paths]
        await asyncio.gather(*(until_begun(path) for path in (lab.path, *paths)))
        tell(lab.path)
        assert await asyncio.gather(*beside) == ["result"] * 6
        assert type(await lab.outcome(culprit)) is headgate.WorkerLost
    assert len(begun(lab.path)) == 3
    assert all(1 <= len(begun(path)) <= 3 for path in paths)
    await lab.rested()


@tasks("no worker is ready, or every worker refuses", apart=True)
async def no_worker_takes_it(lab: Lab) -> None:
    hook = jobs.factory(jobs.refuse_where_told(lab.path))
    async with WorkerPool(spawn=2, worker=hook) as workers:
        here = Lab(Path(lab.path), workers)
        tell(lab.path, "refuse.all")
        assert await fails_and_repeats(here, jobs.returns, headgate.NoWorkersAvailable) == [0, 0]
    slow = lab.file()
    async with WorkerPool(spawn=1, worker=jobs.factory(jobs.Starting(slow))) as workers:
        workers._quorum_timeout = 0.2  # not from the beginning: starting may take longer
        tell(slow, "slow")
        kill(pids(workers)[0])
        await until(lambda: not pids(workers))
        path = lab.file()
        async with TaskPool(resources=keys(), workers=workers) as pool:
            handle = await pool.submit(jobs.returns, path, retries=1)
            assert type(await lab.outcome(handle)) is headgate.NoWorkersAvailable
            assert (handle.snapshot().attempt, begun(path)) == (2, [])
        untell(slow, "slow")
    lab.got |= here.got


@tasks("its WorkerPool is closed before it starts, or while it runs", apart=True)
async def workers_are_closed(lab: Lab) -> None:
    chosen, running, never = keys(), lab.file(), lab.file()
    async with WorkerPool(spawn=1, shutdown_timeout=0.1) as workers:
        pool = TaskPool(max_concurrent=4, resources=chosen, workers=workers)
        handles = [await pool.submit(jobs.waits, running, retries=retries) for retries in (0, 1)]
        await until_begun(running, 2)
    handles += [await pool.submit(jobs.returns, never, retries=retries) for retries in (0, 1)]
    for handle in handles:
        assert type(await lab.outcome(handle)) is headgate.PoolClosed
    assert [handle.snapshot().attempt for handle in handles] == [1, 2, 1, 2]
    assert (len(begun(running)), begun(never), unused(chosen)) == (2, [], True)
    await pool.close()


@tasks("its TaskPool is closed before it is submitted")
async def pool_is_closed(lab: Lab) -> None:
    async with combined_pool(lab, keys()) as pool:
        pass
    assert type(await lab.outcome(pool.submit(jobs.returns, lab.path, retries=1))) is headgate.PoolClosed
    assert begun(lab.path) == []


# -- it ends by itself ------------------------------------------------------------------------------------------------


@tasks("an argument, the value of its key or its result cannot be pickled")
async def cannot_be_pickled(lab: Lab) -> None:
    assert await fails_and_repeats(lab, jobs.returns, headgate.InvalidType, threading.Lock()) == [0, 0]
    assert await fails_and_repeats(lab, jobs.returns_a_lock, headgate.RemoteError) == [1, 2]
    chosen: Keys = ResourcePool([Resource("a", threading.Lock())])
    path = lab.file()
    async with combined_pool(lab, chosen) as pool:
        handle = await pool.submit(jobs.returns, path, retries=1)
        assert type(await lab.outcome(handle)) is headgate.InvalidType
        assert (handle.snapshot().attempt, begun(path), unused(chosen)) == (2, [], True)


@tasks("it calls `sys.exit()`, or raises KeyboardInterrupt, on a worker")
async def calls_sys_exit(lab: Lab) -> None:
    for fn in (jobs.exits, jobs.interrupts):
        for retries in (0, 1):
            chosen, path = keys("a"), lab.file()
            async with combined_pool(lab, chosen) as pool:
                handle = await pool.submit(fn, path, retries=retries)
                error = await lab.outcome(handle)
                assert type(error) is headgate.RoutineExited
                assert fn is jobs.interrupts or error.exit_code == 3
                assert (len(begun(path)), handle.snapshot().attempt) == (retries + 1, retries + 1)
            assert chosen.stats().successes == retries + 1, "the key counts as working"


@tasks("it raises any other exception of its own")
async def raises(lab: Lab) -> None:
    chosen = keys("a")
    async with combined_pool(lab, chosen) as pool:
        path = lab.file()
        handle = await pool.submit(jobs.raises, path)
        assert (type(await lab.outcome(handle)), len(begun(path))) == (LookupError, 1)
        assert chosen.stats().successes == 1, "the key counts as working"
        path = lab.file()
        handle = await pool.submit(jobs.fails_once, path, retries=1)
        assert (await lab.outcome(handle), len(begun(path)), handle.snapshot().attempt) == ("a", 2, 2)


# -- time and cancellation --------------------------------------------------------------------------------------------


@tasks("it runs longer than the `timeout` of `submit`")
async def timeout(lab: Lab) -> None:
    assert await fails_and_repeats(lab, jobs.waits, TimeoutError, options={"timeout": 0.6}) == [1, 2]


@tasks("it runs longer than the `timeout` of its `@routine`")
async def timeout_of_its_routine(lab: Lab) -> None:
    limited = routine(timeout=0.2)(jobs.waits)
    assert await fails_and_repeats(lab, limited, headgate.RoutineTimeout) == [1, 2]


@tasks("its `ttl` (until its first start) or its `deadline` comes while it is queued")
async def expires(lab: Lab) -> None:
    chosen = keys("a")
    async with combined_pool(lab, chosen) as pool:
        path = lab.file()
        handle = await pool.submit(
            jobs.refuses, path, {"a": "cooldown"}, deadline=time.monotonic() + 1.5, ttl=0.2, retries=2
        )
        await until(lambda: chosen.stats().cooldowns == 1 and handle.status == "queued")
        never = lab.file()
        queued = [await pool.submit(jobs.returns, never, ttl=0.2)]
        queued.append(await pool.submit(jobs.returns, never, deadline=time.monotonic() + 0.2))
        for one in (*queued, handle):
            assert type(await lab.outcome(one)) is headgate.TaskExpired
            assert one.status == "expired"
        assert (begun(never), len(begun(path))) == ([], 1)


@tasks("its `deadline` comes while it runs")
async def deadline(lab: Lab) -> None:
    chosen, path = keys("a"), lab.file()
    async with combined_pool(lab, chosen) as pool:
        handle = await pool.submit(jobs.waits, path, deadline=time.monotonic() + 1, retries=3)
        assert type(await lab.outcome(handle)) is TimeoutError
        assert (handle.status, len(begun(path)), ended(path)) == ("failed", 1, ["finally"])


@tasks("`cancel()`")
async def cancelled(lab: Lab) -> None:
    chosen, path, never = keys("a", max_in_flight=1), lab.file(), lab.file()
    async with combined_pool(lab, chosen) as pool:
        running = await pool.submit(jobs.waits, path, retries=3)
        await until_begun(path)
        queued = await pool.submit(jobs.returns, never, retries=3)
        for handle in (queued, running):
            assert handle.cancel()
            assert type(await lab.outcome(handle)) is headgate.TaskCancelled
            assert handle.status == "cancelled"
        assert (begun(never), len(begun(path)), ended(path)) == ([], 1, ["finally"])
    assert unused(chosen)


UNSTOPPABLE = (
    "`cancel()` or `timeout`, and what runs does not stop (a plain function; one that catches the CancelledError)"
)


@tasks(UNSTOPPABLE, apart=True)
async def does_not_stop(lab: Lab) -> None:
    async with WorkerPool(spawn=1) as workers:
        chosen, path = keys("a"), lab.file()
        async with TaskPool(max_concurrent=4, resources=chosen, workers=workers) as pool:
            late = await pool.submit(jobs.sleeps_in_a_thread, path, 9, timeout=1)
            limited = await pool.submit(routine(timeout=1)(jobs.sleeps_in_a_thread), path, 9)
            stopped = await pool.submit(jobs.sleeps_in_a_thread, path, 9)
            catches = await pool.submit(jobs.catches, lab.file())
            await until_begun(path, 3)
            assert stopped.cancel()
            await asyncio.sleep(1.5)
            assert catches.cancel()
            assert await lab.outcome(catches) == "caught"
            await asyncio.sleep(5.5)
            assert [one.status for one in (late, limited, stopped)] == ["running"] * 3
            assert (chosen.stats().in_flight, pool.snapshot().active) == (3, 3)
        assert ended(path) == ["to its end"] * 3, "the end of the block has waited"
        assert type(await lab.outcome(stopped)) is headgate.TaskCancelled
        assert type(await lab.outcome(late)) is TimeoutError
        assert type(await lab.outcome(limited)) is headgate.RoutineTimeout


@tasks(UNSTOPPABLE, apart=True, soak=True)
async def does_not_stop_until_its_worker_is_lost(lab: Lab) -> None:
    async with WorkerPool(spawn=1) as workers:
        chosen, path = keys("a"), lab.file()
        async with TaskPool(resources=chosen, workers=workers) as pool:
            stopped = await pool.submit(jobs.sleeps_in_a_thread, path, 60)
            [victim] = await until_begun(path)
            assert stopped.cancel()
            await asyncio.sleep(0.2)
            kill(victim)
            assert type(await lab.outcome(stopped)) is headgate.TaskCancelled
            assert chosen.stats().in_flight == 0


@tasks(UNSTOPPABLE, apart=True, soak=True)
async def does_not_stop_without_a_key(lab: Lab) -> None:
    async with WorkerPool(spawn=1) as workers, TaskPool(workers=workers) as pool:
        path = lab.file()
        stopped = await pool.submit(jobs.sleeps_in_a_thread, path, 8)
        await until_begun(path)
        assert stopped.cancel()
        assert type(await lab.outcome(stopped)) is headgate.TaskCancelled
        assert ended(path) == []


INTERRUPTED = """
import asyncio, sys
from headgate import Resource, ResourcePool, TaskPool, WorkerPool
from tests.system.docs import delivery_jobs as jobs
from tests.system.docs.delivery_lab import until_begun

async def main(path):
    async with WorkerPool(spawn=1) as workers, TaskPool(resources=ResourcePool({"a": "x"}), workers=workers) as pool:
        handle = await pool.submit(jobs.sleeps_in_a_thread, path, 60)
        [pid] = await until_begun(path)
        print(pid, flush=True)
        await handle

asyncio.run(main(sys.argv[1]))
"""


@tasks(UNSTOPPABLE, apart=True, soak=True)
async def second_interrupt(lab: Lab) -> None:
    with started(INTERRUPTED, lab.path) as client:
        worker = int(await asyncio.to_thread(read_line, client.stdout))
        client.send_signal(signal.SIGINT)
        await asyncio.sleep(1)
        assert client.poll() is None
        client.send_signal(signal.SIGINT)
        await until(lambda: client.poll() is not None, 15)
        await until(lambda: not alive(worker))
    assert ended(lab.path) == []


def started(code: str, *args: str) -> Any:
    """A program of its own."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0)


DURABLE = """
import asyncio, sys
from headgate import ResourcePool, TaskPool, WorkerPool
from headgate.stores import JsonLinesStore
from tests.system.docs import delivery_jobs as jobs
from tests.system.docs.delivery_lab import until_begun

async def main(path):
    store = JsonLinesStore(path + ".journals")
    keys = ResourcePool({"a": "secret-a"})
    async with WorkerPool(spawn=1) as workers, TaskPool(
        "durable", scope="pipeline", pipeline_id="p", store=store, resources=keys, workers=workers
    ) as pool:
        handle = await pool.submit(jobs.waits, path, idempotency_key="once", retries=3)
        [pid] = await until_begun(path)
        print(pid, pool.id, flush=True)
        await handle

asyncio.run(main(sys.argv[1]))
"""


@tasks("the client's process is killed", apart=True, soak=True)
async def client_dies(lab: Lab) -> None:
    with started(DURABLE, lab.path) as client:
        pid, pool_id = (await asyncio.to_thread(read_line, client.stdout)).split()
        client.kill()
        await until(lambda: not alive(int(pid)), 4)
        client.wait()
    journal = f"{lab.path}.journals"
    async with WorkerPool(spawn=1) as workers:
        store = headgate.stores.JsonLinesStore(journal)
        async with TaskPool(
            "durable", scope="pipeline", pipeline_id="p", store=store, resources=keys(), workers=workers
        ) as pool:
            assert pool.id == pool_id
            assert [task.status for task in pool.snapshot().tasks] == ["stale"]
            await asyncio.sleep(0.3)
            assert len(begun(lab.path)) == 1, "it is not run again by itself"
    assert [task["status"] for task in read_journal(journal, pool_id=pool_id)] == ["stale"]


# -- streams ----------------------------------------------------------------------------------------------------------


@tasks("one of these happens after a stream has given its first item", complete=False)
async def open_stream(lab: Lab) -> None:
    await lab.rested()
    for end in ("raises", "refused", "lost", "older"):
        chosen, path = keys(), lab.file()
        async with combined_pool(lab, chosen) as pool:
            if end == "older":
                first = await pool.submit(jobs.older, path)
                await until(lambda path=path: "older a" in lines(path))
            fn = jobs.refused_after if end == "refused" else jobs.items
            stream = pool.stream(fn, path, *(() if end == "refused" else (1,)), retries=3)
            assert await anext(stream) == 0
            following = asyncio.create_task(lab.outcome(anext(stream)))
            if end == "lost":
                kill(begun(path)[0])
            elif end == "older":
                await until(lambda path=path: "waits" in ended(path))
            tell(path)
            if end == "older":
                assert await first == "b"
            found = type(await following).__name__
            assert found == {"lost": "WorkerLost", "refused": "CooldownResource"}.get(end, "LookupError")
            assert len(begun(path)) == 1
            if end != "lost":
                await until(lambda path=path: "finally" in ended(path))
        await lab.rested()
    lab.got.discard("WorkerLost")
