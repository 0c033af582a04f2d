"""R07, W43: a canary is the value of a resource, everything that can be said is said, and the canary is nowhere in it.

The exceptions that callers get are theirs and stay as they are. All else is ours: events, log records, stories, audit
files, journals, and the reprs of snapshots, handles and pools.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import CooldownResource, Resource, ResourcePool, TaskPool, WorkerPool, pool_wait, subscribe
from headgate.stores import JsonLinesStore
from headgate.tasks import TaskPool as PlainTaskPool
from headgate.testing import no_leaks, virtual
from tests.integration.combined import canary_jobs
from tests.integration.combined.canary_jobs import HOWS, Account
from tests.support.combined.combined_support import Apart
from tests.support.workers.support import run

VALUES: dict[str, Callable[[str], Any]] = {
    "text": lambda name: f"sk-CANARY-{name}-0123456789",
    "odd text": lambda name: f'it\'s CANARY\n"{name}"\t\\ é\n-----CANARY ends-----',
    "of a file": lambda name: f"sk-CANARY-{name}-0123456789\n",
    "bytes": lambda name: f"sk-CANARY-{name}-".encode() + b"\xff\x00'\"",
    "mapping": lambda name: {"id": "me", "token": [f"CANARY-{name}-token"]},
    "dataclass": lambda name: Account("somebody", f"CANARY-{name}-password"),
    "proxy": lambda name: f"http://user:CANARY-{name}@proxy.example:8080",
}
VALUE = pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
FEW = ("text", "bytes", "dataclass")
FEW_VALUES = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=kind, marks=() if kind in FEW else pytest.mark.soak) for kind, make in VALUES.items()],
)
"""Of tasks and on workers the same is said again: the others are tried with a resource pool."""


class Heard:
    """All that headgate says while a test runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: list[str] = []
        self.log = io.StringIO()

    def hear(self, event: Any) -> None:
        self.words.append(f"{event!r} {event} {json.dumps(event.to_dict())}")

    def look(self, *things: Any) -> None:
        for thing in things:
            self.words.append(f"{thing!r} {thing}")
            for name in ("snapshot", "story", "stats"):
                method = getattr(thing, name, None)
                if callable(method):
                    self.words.append(f"{method()!r} {method()}")

    def check(self, *words: str) -> str:
        files = [path.read_bytes().decode(errors="replace") for path in self.folder.rglob("*") if path.is_file()]
        everything = "\n".join([*self.words, self.log.getvalue(), *files])
        for word in words:
            assert word in everything, f"{word!r} was expected: else this test hears nothing"
        at = everything.find("CANARY")
        assert at < 0, everything[max(0, at - 1500) : at + 300]
        return everything


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    folder = tmp_path / "written"
    folder.mkdir()
    heard = Heard(folder)
    handler = logging.StreamHandler(heard.log)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s %(args)r"))
    logger = logging.getLogger("headgate")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    unsubscribe = subscribe(heard.hear)
    yield heard
    unsubscribe()
    logger.removeHandler(handler)
    logger.setLevel(before)


def keys_of(make: Callable[[str], Any], *names: str, **options: Any) -> ResourcePool[Any]:
    return ResourcePool({name: make(name) for name in names or ("a", "b")}, **options)


async def outcome(awaitable: Any) -> Any:
    """What it returns or raises: the caller's affair, so it is not looked at."""
    try:
        return await awaitable
    except Exception as error:
        return error


# -- here --------------------------------------------------------------------------------------------------------------


@VALUE
def test_r07_in_nothing_that_a_resource_pool_says(make: Callable[[str], Any], heard: Heard) -> None:
    def classify(outcome: Any) -> Any:
        if isinstance(outcome, ValueError):
            raise LookupError(f"what is {outcome}?")
        return CooldownResource(0.01, f"{outcome}") if isinstance(outcome, KeyError) else None

    def hook(resource_id: str, *_: Any) -> None:
        raise ValueError(f"hook of {keys._engine.rotation.seats[resource_id].resource.value}")

    def listener(event: Any) -> None:
        raise ValueError(f"listener of {make('a')}")

    keys = keys_of(make, "a", "b", "c", classify=classify, on_state_change=hook)
    unsubscribe = subscribe(listener, "resources.run")

    @virtual(limit=10_000)
    async def live() -> None:
        for how in HOWS:
            error = await outcome(keys.run(lambda key, how=how: canary_jobs.here(key, how), retry_delay=0))
            heard.look(getattr(error, "attempts", None))
            await outcome(keys.use(retry_delay=0)(canary_jobs.here)(how))
            with suppress(Exception):
                async with keys.lease() as key:
                    canary_jobs.say(key, how)
            with suppress(Exception):
                async for _ in keys.stream(lambda key, how=how: canary_jobs.items(key, how), retry_delay=0):
                    heard.look(keys)
            await outcome(asyncio.to_thread(keys.run_sync, lambda key, how=how: canary_jobs.say(key, how)))
            await asyncio.sleep(1)
        await outcome(keys.run(canary_jobs.late, timeout=1))
        await outcome(keys.run(lambda key: canary_jobs.here(key, "disable")))
        heard.look(keys)

    live()
    unsubscribe()
    heard.check("rate limited", "was revoked", "the classifier of", "on_state_change callback failed", "listener")


@FEW_VALUES
@pytest.mark.parametrize("with_resources", [True, False], ids=["with resources", "without"])
def test_r07_in_nothing_that_a_task_pool_says(make: Callable[[str], Any], heard: Heard, with_resources: bool) -> None:
    """Without resources: the tasks themselves use the keys."""
    keys = keys_of(make)
    kind: Any = TaskPool if with_resources else PlainTaskPool

    def indirect(fn: Any) -> Any:
        async def task(*args: Any) -> Any:
            return await keys.run(lambda key: fn(key, *args), retry_delay=0)

        return fn if with_resources else task

    def callback(handle: Any) -> None:
        raise ValueError(f"callback of {make('a')}")

    @virtual(limit=10_000)
    async def live() -> None:
        more = {"resources": keys} if with_resources else {}
        async with kind("canaries", max_concurrent=2, audit=heard.folder / "audit.jsonl", **more) as pool:
            handles = []
            for how in HOWS:
                secret = make("a") if isinstance(make("a"), str) else None
                for retries in (0, 1):
                    handle = await pool.submit(
                        indirect(canary_jobs.here), how, retries=retries, key=secret, labels={"of": secret}
                    )
                    handle.on_end(callback)
                    handles.append(handle)
            handles.append(await pool.submit(indirect(canary_jobs.late), timeout=1))
            if with_resources:
                handles.append(await pool.submit(canary_jobs.plainly, "chain"))
                with suppress(Exception):
                    async for _ in pool.stream(canary_jobs.items, "text"):
                        heard.look(pool)
            heard.look(pool, *handles)
            await pool_wait(handles)
            heard.look(pool, *handles)
            await pool.submit(indirect(canary_jobs.here), "group")  # nobody sees it: the pool says so when it is closed
        heard.look(pool, *handles)

    live()
    heard.check("pool_requeue", "pool_unseen_failures", "a callback at the end of", "TaskSnapshot", "refused")


@FEW_VALUES
def test_r07_in_no_journal(make: Callable[[str], Any], heard: Heard) -> None:
    async def main() -> None:
        for _ in range(2):
            keys = keys_of(make)
            store = JsonLinesStore(heard.folder / "journals")
            async with TaskPool("work", scope="pipeline", pipeline_id="p", store=store, resources=keys) as pool:
                heard.look(pool)
                for how in ("text", "repr", "chain", "group", "cool", "retry"):
                    handle = await pool.submit(canary_jobs.here, how)
                    await pool_wait(handle)
                    heard.look(pool, handle)

    asyncio.run(main())
    heard.check("Indiscreet", "both with", "Traceback")


@virtual
async def test_r07_a_snapshot_is_silent_after_its_keys_are_gone() -> None:
    make = VALUES["text"]
    keys = keys_of(make)
    async with TaskPool(resources=keys) as pool:
        handle = await pool.submit(canary_jobs.here, "repr")
        seen = await pool_wait(handle)
        await keys.reconcile({"new": "sk-new"})
        await keys.add("late", "first value of it")
        del keys
        assert "CANARY" in str(seen.error), "the exception itself is as it is"
        assert "CANARY" not in f"{seen!r} {pool.snapshot()!r} {handle.story()}"


@virtual
async def test_r07_a_value_that_is_assigned_later_is_hidden_too() -> None:
    keys = keys_of(VALUES["text"], "a")
    async with TaskPool(resources=keys) as pool:

        async def rotates(key: Resource[str]) -> None:
            key.value = "CANARY-of-today"
            raise ValueError(f"{key.value} is refused")

        handle = await pool.submit(rotates)
        assert "ValueError('<a> is refused')" in repr(await pool_wait(handle))


# -- on workers --------------------------------------------------------------------------------------------------------


@pytest.mark.integration
@FEW_VALUES
def test_r07_w43_in_no_event_of_routines_below_run_and_use(
    shared: Apart, make: Callable[[str], Any], heard: Heard
) -> None:
    async def main() -> None:
        keys = keys_of(make)
        for fn in (canary_jobs.there, canary_jobs.there_plainly, canary_jobs.nested):
            for how in HOWS:
                error = await outcome(keys.run(lambda key, fn=fn, how=how: fn(key.value, how), retry_delay=0))
                assert "CANARY" not in str(getattr(error, "__notes__", [""])[-1]), "the note is ours"
                await outcome(keys.use(retry_delay=0)(fn)(how))
                await asyncio.sleep(0.02)  # what cools is back
        await outcome(keys.run(lambda key: canary_jobs.late_there(key.value)))
        error = await outcome(keys.run(lambda key: canary_jobs.cannot_travel(key.value)))
        assert isinstance(error, headgate.RemoteError)
        assert "CANARY" not in str(error)
        error = await outcome(keys.run(lambda key: canary_jobs.exits(key.value)))
        assert isinstance(error, headgate.RoutineExited)
        assert "CANARY" not in repr(error)
        with suppress(Exception):
            async for _ in keys.stream(lambda key: canary_jobs.items_there(key.value, "group")):
                heard.look(keys)
        with suppress(Exception):
            async with keys.lease() as key:
                await canary_jobs.there(key.value, "text")

    shared(main)
    heard.check("task_finished", "bad key", "wrapped", "refused")


@pytest.mark.integration
@FEW_VALUES
@pytest.mark.parametrize("with_resources", [True, False], ids=["with resources", "without"])
def test_r07_w43_in_nothing_that_is_said_of_tasks_on_workers(
    shared: Apart, make: Callable[[str], Any], heard: Heard, with_resources: bool
) -> None:
    async def main() -> None:
        keys = keys_of(make)
        given: tuple[Any, ...] = () if with_resources else (make("a"),)
        more = {"resources": keys} if with_resources else {}
        async with TaskPool(workers=shared.pool, max_concurrent=3, audit=heard.folder / "audit.jsonl", **more) as pool:
            handles = []
            for how in ("text", "repr", "chain", "group", "retry", "returned"):
                handles.append(await pool.submit(canary_jobs.here, *given, how, retries=1))
                handles.append(await pool.submit(canary_jobs.plainly, *given, how))
            handles.append(await pool.submit(canary_jobs.late, *given, timeout=0.1))
            with suppress(Exception):
                async for _ in pool.stream(canary_jobs.items, *given, "chain"):
                    heard.look(pool)
            await pool_wait(handles)
            heard.look(pool, *handles)

    shared(main)
    heard.check("task_finished", "pool_requeue", "bad key")


@pytest.mark.integration
def test_r07_in_nothing_that_is_said_of_a_lost_worker(what_grpc_opens_once: None, heard: Heard) -> None:
    async def main() -> None:
        keys = keys_of(VALUES["text"])
        async with WorkerPool(spawn=1) as workers:
            await outcome(keys.run(lambda key: canary_jobs.there(key.value, "lost")))
            async with TaskPool(resources=keys, workers=workers) as pool:
                handle = await pool.submit(canary_jobs.here, "lost")
                await pool_wait(handle)
                heard.look(pool, handle, workers)

    with no_leaks(files=False, threads=False):
        run(main)
    heard.check("WorkerLost", "is lost")
