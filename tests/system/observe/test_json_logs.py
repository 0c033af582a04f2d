"""`headgate.observe.logging.json()`: one line of JSON for each record, with task and tenant."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import uuid
from pathlib import Path
from typing import Any

import pytest

from headgate import CooldownResource, Resource, ResourcePool, TaskPool, WorkerPool, subscribe
from headgate.observe import json_logs
from headgate.observe import logging as observed
from headgate.testing import virtual
from tests.system.observe import log_jobs
from tests.system.observe.support import SECRET

log = logging.getLogger("app.worker")


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@virtual
async def test_o32_every_record_of_a_task_carries_its_id_and_tenant() -> None:
    out = io.StringIO()
    stop = observed.json(out)

    def plain() -> None:
        log.warning("in a thread")

    async def helper() -> None:
        log.info("in a child")

    async def work() -> None:
        log.info("asked %s\nand more", "twice", extra={"model": "m-1", "odd": {1}})
        async with asyncio.TaskGroup() as group:
            group.create_task(helper())
        try:
            raise ValueError("inner")
        except ValueError:
            log.exception("it failed")

    async with TaskPool("o32", queue="fair_round_robin") as pool:
        first = await pool.submit(work, key="ann")
        await first
        log.info("outside")
        second = await pool.submit(plain, key="bob")
        await second
    stop()
    log.warning("after the end")
    told = lines(out.getvalue())
    assert [one["message"] for one in told] == [
        "asked twice\nand more", "in a child", "it failed", "outside", "in a thread"
    ]  # fmt: skip
    assert [(one.get("task_id"), one.get("tenant")) for one in told] == [
        *[(first.id, "ann")] * 3,
        (None, None),
        (second.id, "bob"),
    ]
    assert (told[0]["level"], told[0]["logger"], told[0]["model"]) == ("INFO", "app.worker", "m-1")
    assert "ValueError: inner" in told[2]["exception"]


@virtual
async def test_o32_no_value_of_a_resource_is_in_a_line() -> None:
    out = io.StringIO()
    stop = observed.json(out)

    async def work(key: Resource[str]) -> None:
        log.info("uses %s", key.value, extra={"key": key.value})
        raise CooldownResource(60, f"refused {key.value}")

    async with TaskPool("o32-secret", resources=ResourcePool([Resource("key-1", SECRET)], name="o32")) as pool:
        handle = await pool.submit(work, key="ann", ttl=1)
        await asyncio.sleep(5)
        handle.cancel()
    stop()
    assert SECRET not in out.getvalue()
    told = lines(out.getvalue())
    assert told[0]["message"] == "uses <key-1>"
    assert told[1]["logger"] == "headgate.resources"
    assert {one["task_id"] for one in told[:2]} == {handle.id}


@virtual
async def test_o32_what_a_timer_of_a_pool_logs_belongs_to_no_task() -> None:
    out, heard = io.StringIO(), []
    stop = observed.json(out)
    unsubscribe = subscribe(lambda event: heard.append((event.name, json_logs.current())), "resources.health")

    async def work(key: Resource[str], cools: bool) -> None:
        if cools:
            raise CooldownResource(60, "slow down")

    keys = ResourcePool([Resource("key-1", SECRET)], name="o32-timer")
    async with TaskPool("o32-timer", resources=keys, queue="fair_round_robin", max_concurrent=1) as pool:
        first = await pool.submit(work, True, key="ann")
        second = await pool.submit(work, False, key="bob")
        await asyncio.sleep(1)
        first.cancel()  # in whose code the pool began to wait for the key
        await second
    stop()
    unsubscribe()
    told = [
        (one["message"].partition(": ")[2][:13], one.get("task_id"), one.get("tenant")) for one in lines(out.getvalue())
    ]
    assert told == [("key-1 cools d", first.id, "ann"), ("key-1 is back", None, None)]
    assert heard[-1] == ("resource_recovered", (None, None)), "those who listen are in no task either"


@virtual
async def test_o32_a_cooldown_whose_end_a_task_notices_belongs_to_no_task() -> None:
    out = io.StringIO()
    stop = observed.json(out)
    keys = ResourcePool([Resource("key-1", SECRET)], name="o32-noticed")

    async def call() -> None:
        await asyncio.sleep(120)
        await keys.run(use)

    async def use(key: Resource[str]) -> None:
        log.info("used")

    async with TaskPool("o32-noticed", queue="fair_round_robin") as pool:
        handle = await pool.submit(call, key="ann")
        await keys.cool("key-1", 60, "by hand")
        await handle
    stop()
    told = [(one["message"].rpartition(": ")[2], one.get("task_id")) for one in lines(out.getvalue())]
    assert told == [("by hand", None), ("key-1 is back after its cooldown", None), ("used", handle.id)]


@virtual
async def test_o32_a_call_of_a_resource_pool_in_a_task_logs_as_the_task() -> None:
    out = io.StringIO()
    stop = observed.json(out)
    keys = ResourcePool([Resource("key-1", SECRET), Resource("key-2", SECRET[::-1])], name="o32-inner")

    async def use(key: Resource[str]) -> None:
        if key.resource_id == "key-1":
            raise CooldownResource(60, "slow down")

    async def call() -> None:
        await keys.run(use)

    async with TaskPool("o32-inner", queue="fair_round_robin") as pool:
        handle = await pool.submit(call, key="ann")
        await handle
    await keys.enable("key-1")
    await asyncio.sleep(60)  # a cooldown is logged once a minute
    await call()
    stop()
    inside, _, alone = lines(out.getvalue())
    assert (inside["task_id"], inside["tenant"]) == (handle.id, "ann")
    assert alone["task_id"], "the id of the call, if there is no task"
    assert "tenant" not in alone


def test_o32_records_that_cannot_be_formatted_are_lines_all_the_same() -> None:
    out = io.StringIO()
    stop = observed.json(out, level="WARNING", logger="o32.odd")
    odd = logging.getLogger("o32.odd")
    odd.propagate = False  # the handlers of pytest raise on such records
    odd.info("not shown")
    odd.warning("%d things", "no number")
    odd.warning("half a pair \ud83d")
    odd.warning("an id of one's own", extra={"call_id": frozenset({7})})
    stop()
    assert [one["message"] for one in lines(out.getvalue())] == [
        "'%d things' (its arguments do not fit)",
        "half a pair \ud83d",
        "an id of one's own",
    ]
    assert lines(out.getvalue())[-1]["call_id"] == "frozenset({7})"


@virtual
async def test_o32_what_the_caller_gives_stands_in_the_line() -> None:
    out, given = io.StringIO(), uuid.UUID(int=7)
    stop = observed.json(out, logger="o32.given")

    def work() -> None:
        logging.getLogger("o32.given").info("inside", extra={"tenant": "carl"})

    tell = logging.getLogger("o32.given").info
    tell("tenant", extra={"tenant": "ann"})
    tell("both", extra={"tenant": {"ann"}, "task_id": given})
    tell("numbers", extra={"a": float("nan"), "b": float("-inf"), "c": 10**5000, "d": 2**63, "e": 0.5, "f": True})
    async with TaskPool("o32-given", queue="fair_round_robin") as pool:
        handle = await pool.submit(work, key="bob")
        await handle
    stop()

    def no_json(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    told = [json.loads(line, parse_constant=no_json) for line in out.getvalue().splitlines()]
    assert [(one.get("task_id"), one.get("tenant")) for one in told] == [
        (None, "ann"),
        (str(given), "{'ann'}"),
        (None, None),
        (handle.id, "carl"),
    ]
    numbers = {name: told[2][name] for name in "abcdef"}
    assert numbers == {"a": "nan", "b": "-inf", "c": "a int", "d": 2**63, "e": 0.5, "f": True}


@pytest.mark.integration
def test_o32_a_record_of_a_worker_names_the_task_of_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "log"

    async def main() -> str:
        async with WorkerPool(spawn=1) as workers, TaskPool("o32-far", workers=workers) as pool:
            handle = await pool.submit(log_jobs.far, str(path), "hello", key="ann")
            await handle
            return handle.id

    task_id = asyncio.run(main())
    [told] = lines(path.read_text("utf-8"))
    assert (told["message"], told["task_id"], told["tenant"]) == ("far: hello", task_id, "ann")


@pytest.mark.integration
def test_o32_workers_write_lines_if_that_is_their_setup(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> str:
        async with WorkerPool(spawn=1, setup=observed.json) as workers, TaskPool("o32-setup", workers=workers) as pool:
            handle = await pool.submit(log_jobs.plain, "hello", key="ann")
            await handle
            return handle.id

    task_id = asyncio.run(main())
    [told] = [one for one in lines(capfd.readouterr().err) if one["logger"] == "jobs"]
    assert (told["message"], told["task_id"], told["tenant"]) == ("plain: hello", task_id, "ann")


@pytest.mark.integration
def test_o32_routines_that_a_task_calls_log_as_the_task(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> tuple[str, str, str]:
        async with WorkerPool(spawn=2, setup=observed.json) as workers:
            async with TaskPool("o32-here") as here, TaskPool("o32-there", workers=workers) as there:
                first = await here.submit(log_jobs.calls_all, key="ann")
                await first
                second = await there.submit(log_jobs.calls_all, key="bob")
                await second
            await log_jobs.outer("alone")
            return first.id, second.id, await log_jobs.has_a_pool()

    here, there, within = asyncio.run(main())
    told = [one for one in lines(capfd.readouterr().err) if one["logger"] == "jobs"]
    messages = {"outer", "outer 2", "outer 3", "thread", "stream", "gathered", "child"}
    for task_id, tenant in ((here, "ann"), (there, "bob")):
        of_task = [one for one in told if one["task_id"] == task_id]
        assert {one["message"] for one in of_task} == messages
        assert {one["tenant"] for one in of_task} == {tenant}
        assert len({one["call_id"] for one in of_task}) == len(messages), "each call has an id of its own"
    alone = sorted((one for one in told if "alone" in one["message"]), key=lambda one: str(one["message"]))
    assert [one["message"] for one in alone] == ["alone", "alone 2", "alone 3"]
    assert len({one["task_id"] for one in alone}) == 1, "the id of the outermost call, if there is no task"
    assert not any("tenant" in one for one in alone)
    assert ["call_id" in one for one in alone] == [False, True, True]
    [inside] = [one for one in told if one["message"] == "of the inner task"]
    assert (inside["task_id"], inside["tenant"]) == (within, "eve"), "the innermost task is the one that calls"
