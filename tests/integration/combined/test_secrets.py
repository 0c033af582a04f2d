"""R07 on the line: the value of a resource is in nothing that headgate says, writes or shows, whatever goes wrong."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    CooldownResource,
    DisableResource,
    PoolExhausted,
    Resource,
    ResourcePool,
    RetryOperation,
    TaskPool,
    WorkerPool,
    backpressure_queue,
    fair_round_robin,
    pool_wait,
    subscribe,
)
from headgate.core.events import Event
from headgate.stores import JsonLinesStore
from headgate.testing import no_leaks, settle, virtual
from tests.integration.combined import combined_jobs
from tests.support.combined.combined_support import Apart, noted, tell
from tests.support.workers.support import lines, run, script, until

SECRET = "sk-SECRET-9f8e7d6c"


class Shouting:
    """A value whose repr and str are the secret."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __repr__(self) -> str:
        return self.secret

    __str__ = __repr__


class Unpicklable(Shouting):
    """And one that cannot travel."""

    def __init__(self, secret: str) -> None:
        super().__init__(secret)
        self.lock = threading.Lock()


class Said:
    """All that headgate says while a test runs: events, logs, files, errors, and what it is shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: list[str] = []
        self.events: list[Event] = []
        self.log = io.StringIO()

    def note(self, *things: object) -> None:
        for thing in things:
            self.words.append(f"{thing!r}\n{thing}")
            if isinstance(thing, BaseException):
                self.words.append("".join(traceback.format_exception(thing)))
                self.words.extend(getattr(thing, "__notes__", ()))
                self.words.append(repr(getattr(thing, "attempts", None)))

    def look(self, pool: TaskPool, keys: ResourcePool[Any], *handles: Any) -> None:
        """At all that can be looked at."""
        self.note(pool, pool.snapshot(), pool.stats(), keys, keys.snapshot(), keys.stats())
        for handle in handles:
            self.note(handle, handle.snapshot(), handle.story(), handle.snapshot().error)

    async def ends(self, pool: TaskPool, keys: ResourcePool[Any], *handles: Any) -> list[str]:
        """Wait for all, and note how they ended."""
        found = await pool_wait(list(handles))
        for handle in handles:
            try:
                await handle
            except Exception as error:
                self.note(error)
        self.look(pool, keys, *handles)
        return [end.status for end in found]

    def everything(self) -> str:
        told = [f"{event!r} {event} {json.dumps(event.to_dict())}" for event in self.events]
        files = [path.read_bytes().decode(errors="replace") for path in self.folder.rglob("*") if path.is_file()]
        return "\n".join([*self.words, *told, self.log.getvalue(), *files])

    def check(self, *others: str) -> None:
        """Something was said, and the secret was not."""
        everything = self.everything()
        for word in others:
            assert word in everything, f"{word!r} was expected in what was said: else this test sees nothing"
        at = everything.find("SECRET")
        assert at < 0, everything[max(0, at - 500) : at + 200]


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Said]:
    folder = tmp_path / "written"
    folder.mkdir()
    said = Said(folder)
    handler = logging.StreamHandler(said.log)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s %(args)r"))
    logger = logging.getLogger("headgate")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    unsubscribe = subscribe(said.events.append)
    yield said
    unsubscribe()
    logger.removeHandler(handler)
    logger.setLevel(before)


VALUES: dict[str, Callable[[], Any]] = {"text": lambda: SECRET, "object": lambda: Shouting(SECRET)}
VALUE = pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)


def secret_keys(make: Callable[[], Any], *names: str, **options: Any) -> ResourcePool[Any]:
    return ResourcePool([Resource(name, make()) for name in names], strategy="primary_backup", **options)


def by_key(**outcomes: BaseException) -> Any:
    async def work(key: Resource[Any]) -> str:
        await asyncio.sleep(1)
        if key.resource_id in outcomes:
            raise outcomes[key.resource_id]
        return key.resource_id

    return work


async def slow(key: Resource[Any], seconds: float) -> str:
    await asyncio.sleep(seconds)
    return key.resource_id


async def fails(key: Resource[Any]) -> None:
    raise LookupError("nothing there")


# -- without workers ---------------------------------------------------------------------------------------------------


@VALUE
def test_r07_through_a_whole_life_of_a_line(make: Callable[[], Any], said: Said) -> None:
    @virtual(limit=10_000)
    async def live() -> None:
        keys = secret_keys(make, "a", "b", "c", max_attempts=2)
        async with TaskPool(
            "line",
            max_concurrent=3,
            queue=fair_round_robin("tenant_id"),
            backpressure=backpressure_queue(6, "drop_newest"),
            resources=keys,
            audit=said.folder / "audit.jsonl",
        ) as pool:
            spent = await pool.submit(by_key(a=CooldownResource(5, "busy"), b=DisableResource("revoked")))
            sibling = await pool.submit(slow, 10, tenant_id="acme")
            late = await pool.submit(slow, 100, timeout=3, tenant_id="acme", retries=1)
            expired = await pool.submit(slow, 1, ttl=0.5)
            stopped = await pool.submit(slow, 100)
            failed = await pool.submit(fails, retries=2)
            nowhere = await pool.submit(slow, 1, tags=["nowhere"])
            many = [await pool.submit(slow, 1) for _ in range(8)]
            said.look(pool, keys, spent, sibling, late, expired, stopped, failed)
            await asyncio.sleep(4)
            stopped.cancel()
            said.look(pool, keys, sibling, stopped)
            everybody = [spent, sibling, late, expired, stopped, failed, nowhere, *many]
            statuses = await said.ends(pool, keys, *everybody)
            assert {"completed", "failed", "rejected"} <= set(statuses)

    live()
    said.check("revoked", "cools down", "pool_requeue", "PoolExhausted", "LookupError", "nowhere")


@VALUE
def test_r07_streams_that_fail_and_are_left(make: Callable[[], Any], said: Said) -> None:
    async def items(key: Resource[Any], outcomes: dict[Any, BaseException]) -> AsyncGenerator[str, None]:
        if (key.resource_id, 0) in outcomes:
            raise outcomes[key.resource_id, 0]
        yield key.resource_id
        if key.resource_id in outcomes:
            raise outcomes[key.resource_id]
        yield key.resource_id

    @virtual(limit=10_000)
    async def live() -> None:
        keys = secret_keys(make, "a", "b", "c", "d")
        async with TaskPool(resources=keys, audit=said.folder / "audit.jsonl") as pool:
            for outcomes in (
                {("a", 0): CooldownResource(1000, "busy"), "b": DisableResource("revoked")},
                {"c": LookupError("torn")},
                {("c", 0): RetryOperation("status 502"), "d": RetryOperation("status 503")},
            ):
                stream = pool.stream(items, outcomes)
                try:
                    async for item in stream:
                        said.note(item, stream)
                        said.look(pool, keys, *pool._executor.scheduler.unfinished())
                except Exception as error:
                    said.note(error)
            stream = pool.stream(items, {})
            said.note(await anext(stream), stream)
            await stream.aclose()
            said.look(pool, keys)

    live()
    said.check("revoked", "torn", "busy", "status 502")


@VALUE
def test_r07_journals_and_stories_after_a_restart(make: Callable[[], Any], said: Said) -> None:
    def durable() -> tuple[TaskPool, ResourcePool[Any]]:
        keys = secret_keys(make, "a", "b")
        store = JsonLinesStore(said.folder / "journals")
        return TaskPool("work", scope="pipeline", pipeline_id="p", store=store, resources=keys), keys

    async def quickly(key: Resource[Any], number: int) -> int:
        if key.resource_id == "a":
            raise CooldownResource(100, "busy")
        if number == 2:
            raise LookupError("nothing there")
        return number

    async def main() -> None:
        for _ in range(2):
            pool, keys = durable()
            async with pool:
                handles = [
                    await pool.submit(quickly, n, idempotency_key=f"key {n}", window="forever") for n in range(4)
                ]
                assert await said.ends(pool, keys, *handles) == ["completed", "completed", "failed", "completed"]

    asyncio.run(main())
    said.check("key 3", "nothing there")
    assert list((said.folder / "journals").glob("*.jsonl")), "there is a journal to look into"


@VALUE
def test_r07_options_and_calls_that_are_wrong(make: Callable[[], Any], said: Said) -> None:
    @virtual(limit=10_000)
    async def live() -> None:
        keys = secret_keys(make, "a")
        wrong: list[dict[str, Any]] = [
            {"tags": 3},
            {"exclude": 3},
            {"affinity": []},
            {"max_attempts": 0},
            {"max_attempts": "x"},
            {"tagz": ["x"]},
        ]
        for arguments in ({"resources": [make()]}, {"resources": {"a": make()}}, {"resources": Resource("a", make())}):
            with pytest.raises(TypeError) as caught:
                TaskPool(**arguments)  # type: ignore[arg-type]
            said.note(caught.value)
        async with TaskPool(resources=keys) as pool:
            for options in wrong:
                with suppress(Exception):
                    try:
                        said.note(await pool.submit(slow, 1, **options))
                    except Exception as error:
                        said.note(error)
                        raise
            handle = await pool.submit(slow)  # an argument is missing: Python's own TypeError
            said.note(await pool_wait(handle), handle.story())
            await settle()
            said.look(pool, keys)

    live()
    said.check("resources", "tagz", "max_attempts")


@virtual
async def test_r07_the_task_itself_may_say_what_it_likes() -> None:
    async def tells(key: Resource[str]) -> None:
        raise ValueError(key.value)

    async with TaskPool(resources=ResourcePool({"a": SECRET})) as pool:
        with pytest.raises(ValueError, match=SECRET):
            await (await pool.submit(tells))


# -- with workers ------------------------------------------------------------------------------------------------------


@pytest.mark.integration
@VALUE
def test_r07_tasks_on_workers_of_every_fate(shared: Apart, make: Callable[[], Any], said: Said, log: str) -> None:
    async def main() -> None:
        keys = secret_keys(make, "a", "b", max_attempts=2)
        async with TaskPool(
            max_concurrent=5, resources=keys, workers=shared.pool, audit=said.folder / "audit.jsonl"
        ) as pool:
            elder = await pool.submit(combined_jobs.elder, log, 0.2)
            await noted(log, "elder begun a")
            younger = await pool.submit(combined_jobs.younger, log)
            await noted(log, "younger begun a")
            stopped = await pool.submit(combined_jobs.endless, log)
            late = await pool.submit(combined_jobs.endless, log, timeout=0.3)
            failed = await pool.submit(combined_jobs.fails, retries=1)
            locked = await pool.submit(combined_jobs.returns_a_lock)
            argument = await pool.submit(combined_jobs.by_key, threading.Lock())
            said.look(pool, keys, elder, younger, stopped, late)
            said.note(*shared.pool.workers(), shared.pool)
            tell(log)
            await until(lambda: "cancelled a" in lines(log))
            stopped.cancel()
            statuses = await said.ends(pool, keys, elder, younger, stopped, late, failed, locked, argument)
            assert statuses == ["completed", "completed", "cancelled", "failed", "failed", "failed", "failed"]
            outcomes: combined_jobs.Outcomes = {
                "a": (combined_jobs.QuotaGone, ("acme",), {"retry": 60}),
                "b": (combined_jobs.Revoked, (), {"by": "ops"}),
            }
            await until(lambda: {one["status"] for one in keys.snapshot().values()} == {"healthy"})
            spent = await pool.submit(combined_jobs.by_key, outcomes, max_attempts=1)
            assert await said.ends(pool, keys, spent) == ["failed"]
            with pytest.raises(PoolExhausted):
                await spent

    shared(main)
    said.check("quota of acme", "revoked by ops", "sibling", "task_dispatched", "returns_a_lock")


@pytest.mark.integration
def test_r07_a_value_that_cannot_be_pickled(shared: Apart, said: Said) -> None:
    async def main() -> None:
        keys = secret_keys(lambda: Unpicklable(SECRET), "a")
        async with TaskPool(resources=keys, workers=shared.pool) as pool:
            handles = [await pool.submit(fn) for fn in (combined_jobs.show, combined_jobs.show_plainly)]
            assert await said.ends(pool, keys, *handles) == ["failed", "failed"]
            try:
                async for _ in pool.stream(combined_jobs.where):
                    raise AssertionError("it cannot travel")
            except Exception as error:
                assert not isinstance(error, AssertionError)  # noqa: PT017 - what it is, is another test's
                said.note(error)
            said.look(pool, keys)

    shared(main)
    said.check("pickle")


class BreaksThere(Shouting):
    """A value that travels and cannot be loaded on a worker."""

    def __init__(self, secret: str) -> None:
        super().__init__(secret)
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.pid:
            raise RuntimeError("it breaks there")


@pytest.mark.integration
def test_r07_a_value_that_cannot_be_loaded_there(shared: Apart, said: Said) -> None:
    async def main() -> None:
        keys = secret_keys(lambda: BreaksThere(SECRET), "a")
        async with TaskPool(resources=keys, workers=shared.pool) as pool:
            handle = await pool.submit(combined_jobs.show)
            assert await said.ends(pool, keys, handle) == ["failed"]

    shared(main)
    said.check("it breaks there")


@pytest.mark.integration
def test_r07_workers_that_are_killed_or_not_open(what_grpc_opens_once: None, said: Said, log: str) -> None:
    async def main() -> None:
        keys = secret_keys(VALUES["object"], "a", "b")
        async with WorkerPool(spawn=1) as workers:
            async with TaskPool(max_concurrent=2, resources=keys, workers=workers) as pool:
                lost = await pool.submit(combined_jobs.dies, log)
                assert await said.ends(pool, keys, lost) == ["failed"]
                again = await pool.submit(combined_jobs.dies_once, log + "2", retries=1)
                assert await said.ends(pool, keys, again) == ["completed"]
        async with TaskPool(resources=keys, workers=workers) as closed:
            try:
                handle = await closed.submit(combined_jobs.show)
            except Exception as error:
                said.note(error)
            else:
                assert await said.ends(closed, keys, handle) == ["failed"]

    with no_leaks(files=False, threads=False):
        run(main)
    said.check("WorkerLost", "is lost")


@pytest.mark.integration
@VALUE
def test_r07_routines_below_use(shared: Apart, make: Callable[[], Any], said: Said) -> None:
    async def main() -> None:
        keys = secret_keys(make, "a", "b")
        ask = keys.use(retry_delay=0)(combined_jobs.by_key_by_routine)
        ask_wrongly = keys.use(retry_delay=0)(combined_jobs.show_by_routine)
        outcomes: combined_jobs.Outcomes = {"a": (combined_jobs.QuotaGone, ("acme",), {"retry": 60})}
        said.note(await ask(outcomes), keys, keys.stats())
        outcomes["b"] = (LookupError, ("nothing there",), {})
        for call in (ask(outcomes), ask_wrongly(threading.Lock())):
            with pytest.raises(Exception, match=r".") as caught:
                await call
            said.note(caught.value)

    shared(main)
    said.check("quota of acme", "nothing there")


PROGRAM = """
import asyncio
import logging
import os
import sys
import headgate

logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)

async def works(key, n):
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    logging.getLogger("mine").info("logged on a worker")
    if key.resource_id == "a":
        raise headgate.CooldownResource(60, "busy")
    if n == 2:
        raise LookupError("nothing there")
    if n == 3:
        os._exit(3)
    if n == 4:
        await asyncio.sleep(3600)
    return n

async def pages(key):
    yield key.resource_id
    raise headgate.DisableResource("revoked")

async def main():
    secret = os.environ["PLANTED"]
    keys = headgate.ResourcePool({"a": secret, "b": secret}, strategy="primary_backup")
    headgate.subscribe(lambda event: print(event, event.to_dict()))
    async with headgate.WorkerPool(spawn=1) as workers, headgate.TaskPool(
        max_concurrent=1, resources=keys, workers=workers
    ) as pool:
        handles = [await pool.submit(works, n, timeout=0.5 if n == 4 else None) for n in range(5)]
        await headgate.pool_wait(handles)
        for handle in handles:
            print(handle.story(), handle.snapshot(), pool, keys)
        async for page in pool.stream(pages):
            print(page)

asyncio.run(main())
"""


@pytest.mark.integration
def test_r07_what_a_program_and_its_workers_print(tmp_path: Path) -> None:
    """All of it at DEBUG, and with asyncio's own debug mode, which prints the arguments of callbacks."""
    told = script(PROGRAM, tmp_path, PLANTED=SECRET, PYTHONASYNCIODEBUG="1")
    printed = told.stdout + told.stderr
    assert told.returncode == 1, "the last stream raises, and Python prints the traceback"
    words = ("DisableResource", "revoked", "LookupError", "WorkerLost", "busy", "pool_requeue", "logged on a worker")
    for word in words:
        assert word in printed, printed
    at = printed.find("SECRET")
    assert at < 0, printed[max(0, at - 500) : at + 200]
