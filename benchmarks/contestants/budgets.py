"""The contestants of `budget.py`: at most LIMIT tasks at a time in several processes, each as its documents say.

- headgate: a pool with `scope="tenant"` on a store, fair among tenants.
- DBOS: a queue with `global_concurrency`; each process has an executor id of its own. It looks for work every second,
  which its documents let one change: "dbos-often" looks every 50 ms.
- procrastinate: a `lock` lets one job at a time run, so LIMIT locks let LIMIT of them run; "procrastinate-workers" has
  no lock, but a single job at a time in each of the processes, which is the same limit while nobody starts another.
- pgqueuer: `concurrency_limit` of an entrypoint, which holds for all workers.
- count: what one writes by hand. A row for each running task; count them under a lock, insert if there is room, and
  notify those who wait. No order, and what a killed process held is held for ever.

None of the peers knows fairness among tenants in one limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from budget import LIMIT, TENANTS, Part, Tally

Opened = Callable[[str, int, Tally], AbstractAsyncContextManager[Part]]


# -- headgate ---------------------------------------------------------------------------------------------------------


def _ours(open_store: Callable[[str], Any]) -> Opened:
    @asynccontextmanager
    async def opened(place: str, number: int, tally: Tally) -> AsyncIterator[Part]:
        import headgate

        store = open_store(place)
        options: dict[str, Any] = {"scope": "tenant", "scope_id": "bench", "store": store}
        fair = headgate.fair_round_robin("tenant_id")

        async def work() -> None:
            tally.ran()

        async def submit(tasks: int) -> None:
            # All at once, as the peers' batches are: `await submit` would wait for a slot while the queue is empty.
            handles = [pool.submit_nowait(work, tenant_id=TENANTS[task % len(TENANTS)]) for task in range(tasks)]
            for handle in handles:
                await handle

        async def timed(seconds: float) -> tuple[float, float]:
            begun = time.monotonic()
            await asyncio.sleep(seconds)
            return begun, time.monotonic()

        async def hand_over(tasks: int, seconds: float) -> list[tuple[float, float]]:
            handles = [single.submit_nowait(timed, seconds, tenant_id=f"of-{number}") for _ in range(tasks)]
            return [await handle for handle in handles]

        async def keep_busy(until: float, seconds: float) -> list[tuple[float, float]]:
            ran: list[tuple[float, float]] = []

            async def one_after_the_other() -> None:
                while time.monotonic() < until:
                    ran.append(await (await pool.submit(timed, seconds, tenant_id=f"of-{number}")))

            await asyncio.gather(*(one_after_the_other() for _ in range(LIMIT)))
            return ran

        try:
            async with headgate.TaskPool("budget", max_concurrent=LIMIT, queue=fair, **options) as pool:
                async with headgate.TaskPool("single", max_concurrent=1, queue=fair, **options) as single:
                    yield Part(submit, hand_over, keep_busy)
        finally:
            store.close()

    return opened


def _sqlite(path: str) -> Any:
    from headgate import SqliteStore

    return SqliteStore(path)


def _postgres(dsn: str) -> Any:
    from headgate import PostgresStore

    return PostgresStore(dsn)


# -- peers ------------------------------------------------------------------------------------------------------------


def _dbos(interval: float) -> Opened:
    @asynccontextmanager
    async def opened(place: str, number: int, tally: Tally) -> AsyncIterator[Part]:
        from dbos import DBOS

        DBOS(
            config={
                "name": "budget",
                "system_database_url": place,
                "application_version": "1",
                "executor_id": f"process-{number}",
                "run_admin_server": False,
                "log_level": "ERROR",
            }
        )

        @DBOS.workflow(name="work")
        def work(tenant: str) -> None:
            tally.ran()

        await asyncio.to_thread(DBOS.launch)
        queue = await DBOS.register_queue_async("budget", global_concurrency=LIMIT, polling_interval_sec=interval)

        def submit_all(tasks: int) -> None:
            for task in range(tasks):
                queue.enqueue(work, TENANTS[task % len(TENANTS)])

        async def submit(tasks: int) -> None:
            await asyncio.to_thread(submit_all, tasks)

        try:
            yield Part(submit)
        finally:
            await asyncio.to_thread(DBOS.destroy)

    return opened


def _procrastinate(locks: bool) -> Opened:
    @asynccontextmanager
    async def opened(place: str, number: int, tally: Tally) -> AsyncIterator[Part]:
        from procrastinate import App, PsycopgConnector

        app = App(connector=PsycopgConnector(conninfo=place))

        @app.task(queue="budget", name="work")
        async def work(tenant: str) -> None:
            tally.ran()

        async def submit(tasks: int) -> None:
            jobs = [{"tenant": TENANTS[task % len(TENANTS)]} for task in range(tasks)]
            if not locks:
                await work.batch_defer_async(*jobs)
                return
            for slot in range(LIMIT):
                await work.configure(lock=f"slot-{slot}").batch_defer_async(*jobs[slot::LIMIT])

        async with app.open_async():
            worker = asyncio.create_task(
                app.run_worker_async(concurrency=LIMIT if locks else 1, install_signal_handlers=False)
            )
            try:
                yield Part(submit)
            finally:
                await _ended(worker)

    return opened


@asynccontextmanager
async def _pgqueuer(place: str, number: int, tally: Tally) -> AsyncIterator[Part]:
    import asyncpg
    from pgqueuer import PgQueuer

    logging.getLogger("pgqueuer").setLevel(logging.ERROR)
    # A connection for jobs that are run and one for those that are submitted: it allows one statement at a time.
    running, submitting = await asyncpg.connect(place), await asyncpg.connect(place)
    pool, queue = PgQueuer.from_asyncpg_connection(running), PgQueuer.from_asyncpg_connection(submitting)

    @pool.entrypoint("work", concurrency_limit=LIMIT)
    async def work(job: Any) -> None:
        tally.ran()

    async def submit(tasks: int) -> None:
        payloads: list[bytes | None] = [TENANTS[task % len(TENANTS)].encode() for task in range(tasks)]
        assert queue.queries is not None
        await queue.queries.enqueue(["work"] * tasks, payloads, [0] * tasks)

    worker = asyncio.create_task(pool.run())
    try:
        yield Part(submit)
    finally:
        pool.shutdown.set()
        await _ended(worker)
        for connection in (running, submitting):
            connection.terminate()


@asynccontextmanager
async def _count(place: str, number: int, tally: Tally) -> AsyncIterator[Part]:
    import asyncpg

    freed = asyncio.Event()

    async def listening(connection: Any) -> None:
        await connection.add_listener("freed", lambda *_: freed.set())

    async with asyncpg.create_pool(place, min_size=LIMIT + 1, max_size=LIMIT + 1) as pool, pool.acquire() as ears:
        await listening(ears)

        async def take(connection: Any) -> int | None:
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock(1)")
                if await connection.fetchval("SELECT count(*) FROM running") >= LIMIT:
                    return None
                taken: int = await connection.fetchval("INSERT INTO running DEFAULT VALUES RETURNING id")
                return taken

        async def work(connection: Any) -> None:
            freed.clear()
            while (slot := await take(connection)) is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.1):  # a notification may be lost
                        await freed.wait()
                freed.clear()
            tally.ran()
            async with connection.transaction():
                await connection.execute("DELETE FROM running WHERE id = $1", slot)
                await connection.execute("NOTIFY freed")

        async def worker(tasks: int) -> None:
            async with pool.acquire() as connection:
                for _ in range(tasks):
                    await work(connection)

        async def submit(tasks: int) -> None:
            async with asyncio.TaskGroup() as group:
                for place in range(LIMIT):
                    group.create_task(worker(len(range(place, tasks, LIMIT))))

        yield Part(submit)


async def _ended(worker: asyncio.Task[None]) -> None:
    worker.cancel()
    with suppress(asyncio.CancelledError):
        await worker


# -- set-up -----------------------------------------------------------------------------------------------------------


async def prepare(name: str, dsn: str) -> None:
    """Make the tables of a peer, once, before its processes start."""
    import asyncpg

    match name:
        case "dbos" | "dbos-often":
            from dbos import run_dbos_database_migrations

            await asyncio.to_thread(run_dbos_database_migrations, dsn)
        case "procrastinate" | "procrastinate-workers":
            from procrastinate import App, PsycopgConnector

            async with App(connector=PsycopgConnector(conninfo=dsn)).open_async() as app:
                await app.schema_manager.apply_schema_async()
        case "pgqueuer":
            from pgqueuer.db import AsyncpgDriver
            from pgqueuer.queries import Queries

            connection = await asyncpg.connect(dsn)
            await Queries(AsyncpgDriver(connection)).install()
            await connection.close()
        case "count":
            connection = await asyncpg.connect(dsn)
            await connection.execute("CREATE TABLE running (id bigserial PRIMARY KEY)")
            await connection.close()


OPENED: dict[str, Opened] = {
    "sqlite": _ours(_sqlite),
    "postgres": _ours(_postgres),
    "dbos": _dbos(1.0),
    "dbos-often": _dbos(0.05),
    "procrastinate": _procrastinate(locks=True),
    "procrastinate-workers": _procrastinate(locks=False),
    "pgqueuer": _pgqueuer,
    "count": _count,
}
