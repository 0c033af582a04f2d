"""T34: what a pool tells about its tasks, to listeners and to a file."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headgate import (
    InvalidArgument,
    TaskPool,
    backpressure_queue,
    pool_get,
    ring_buffer,
    subscribe,
)
from headgate.tasks import PoolAuditFailed, PoolAuditLost, PoolDequeue, PoolDrop, PoolFinish, PoolSubmit
from headgate.tasks.runtime.audit import AuditFile
from headgate.testing import capture_events, virtual
from tests.support.tasks.support import AUDIT, Flaky, Gate, broken, quick, slow

WALL = 1_700_000_000.0  # when every virtual run begins


@virtual
async def test_t34_submit_dequeue_finish_with_all_their_fields() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool("told", max_concurrent=2) as pool:
            first = await pool.submit(slow, 10, key="acme", priority=7)
            await pool.submit(slow, 10)
            await asyncio.sleep(4)
            queued = await pool.submit(slow, 1)
    mine = [event for event in events if event.task_id == first.id]
    assert [event.name for event in mine] == ["pool_submit", "pool_dequeue", "pool_finish"]
    for event in mine:
        assert (event.topic, event.pool_id, event.pool) == (AUDIT, pool.id, "told")
    submit, dequeue, finish = mine
    assert isinstance(submit, PoolSubmit)
    assert (submit.key, submit.priority, submit.queue_depth, submit.at) == ("acme", 7, 0, WALL)
    assert isinstance(dequeue, PoolDequeue)
    assert (dequeue.queued_for, dequeue.attempt, dequeue.at) == (0.0, 1, WALL)
    assert isinstance(finish, PoolFinish)
    assert (finish.status, finish.attempt, finish.ran_for, finish.error) == ("completed", 1, 10.0, None)
    assert finish.at == WALL + 10
    late = [event for event in events if event.task_id == queued.id]
    assert (late[0].queue_depth, late[1].queued_for) == (1, 6.0)


@virtual
async def test_t34_slots_are_numbered_and_never_shared() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool(max_concurrent=3) as pool:
            for number in range(20):
                await pool.submit(slow, 1 + number % 4)
    taken: dict[int, str] = {}
    for event in events:
        if isinstance(event, PoolDequeue):
            assert event.slot not in taken
            taken[event.slot] = event.task_id
        elif isinstance(event, PoolFinish):
            taken = {slot: task for slot, task in taken.items() if task != event.task_id}
    assert taken == {}
    assert len({event.slot for event in events.of(PoolDequeue)}) == 3


@pytest.mark.parametrize(
    ("backpressure", "policy", "reason"),
    [
        (backpressure_queue(2, "drop_oldest"), "drop_oldest", "drop_oldest_queue_full"),
        (backpressure_queue(2, "drop_newest"), "drop_newest", "drop_newest_queue_full"),
        (backpressure_queue(2, "drop_fair"), "drop_fair", "drop_fair_queue_full"),
        (ring_buffer(2), "ring_buffer", "ring_buffer_drop_oldest"),
    ],
)
@virtual
async def test_t34_a_drop_tells_everything(backpressure: Any, policy: str, reason: str) -> None:
    async with TaskPool("dropping", backpressure=backpressure) as pool:
        gate = Gate()
        await pool.submit(gate.wait)
        await asyncio.sleep(5)
        with capture_events(AUDIT) as events:
            handles = [await pool.submit(quick) for _ in range(3)]
            [drop] = events.of(PoolDrop)
        gate.open()
    newest = policy == "drop_newest"
    assert (drop.name, drop.topic) == ("pool_drop", AUDIT)
    assert (drop.pool_id, drop.pool) == (pool.id, "dropping")
    assert drop.task_id == handles[-1 if newest else 0].id
    assert drop.replacement_id == (None if newest else handles[-1].id)
    assert (drop.reason, drop.policy) == (reason, policy)
    assert (drop.queue_depth, drop.max_depth) == (2, 2)
    assert drop.at == WALL + 5


@virtual
async def test_t34_every_end_is_told_once() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool(backpressure=ring_buffer(3)) as pool:
            handles = {
                "cancelled": await pool.submit(slow, 60),
                "rejected": await pool.submit(quick),
                "expired": await pool.submit(quick, ttl=1),
                "failed": await pool.submit(broken),
                "completed": await pool.submit(quick),
            }
            await asyncio.sleep(5)
            handles["cancelled"].cancel()
    ends = events.of(PoolFinish)
    assert {event.task_id: event.status for event in ends} == {one.id: status for status, one in handles.items()}
    assert len(ends) == 5
    of = {event.status: event for event in ends}
    assert (of["failed"].error, of["completed"].error) == ("LookupError", None)
    assert of["expired"].ran_for is None
    assert of["cancelled"].ran_for == 5


@virtual
async def test_t34_every_attempt_is_a_dequeue() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool() as pool:
            await (await pool.submit(Flaky(2).run, retries=2))
    assert [event.attempt for event in events.of(PoolDequeue)] == [1, 2, 3]
    assert len(events.of(PoolSubmit)) == len(events.of(PoolFinish)) == 1


@virtual
async def test_t34_refused_submits_tell_nothing() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool(backpressure="fail_fast") as pool:
            await pool.submit(slow, 1)
            told = len(events)
            with pytest.raises(Exception, match="POL-002"):
                await pool.submit(quick)
            assert len(events) == told


@virtual
async def test_t34_events_are_frozen_and_know_themselves_as_dicts() -> None:
    with capture_events(AUDIT) as events:
        async with TaskPool("told") as pool:
            await pool.submit(quick, key=("a", 1))
    for event in events:
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.at = 0  # type: ignore[misc]
        told = event.to_dict()
        assert (told["name"], told["topic"], told["pool"]) == (event.name, AUDIT, "told")
        json.dumps(told)


@virtual
async def test_t34_a_listener_that_raises_stops_nothing() -> None:
    def listener(event: Any) -> None:
        raise LookupError("listener")

    unsubscribe = subscribe(listener, AUDIT)
    try:
        async with TaskPool() as pool:
            assert await (await pool.submit(quick)) == "done"
            assert await (await pool.submit(quick)) == "done"
    finally:
        unsubscribe()


# -- audit= ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_t34_audit_writes_json_lines(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    @virtual
    async def check() -> None:
        with capture_events(AUDIT) as events:
            async with TaskPool("told", backpressure=ring_buffer(1), audit=kind(path)) as pool:
                for _ in range(4):
                    await pool.submit(slow, 1, key="k", priority=2)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines == [event.to_dict() for event in events]
        assert {line["name"] for line in lines} == {"pool_submit", "pool_dequeue", "pool_drop", "pool_finish"}

    check()


def test_t34_audit_needs_no_listener_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    @virtual
    async def once() -> None:
        async with TaskPool(audit=path) as pool:
            await pool.submit(quick)

    once()
    once()
    names = [json.loads(line)["name"] for line in path.read_text().splitlines()]
    assert names == ["pool_submit", "pool_dequeue", "pool_finish"] * 2


def test_t34_an_audit_file_that_cannot_be_opened_makes_no_pool(tmp_path: Path) -> None:
    with pytest.raises((InvalidArgument, OSError)):
        TaskPool("unheard", audit=tmp_path)
    assert pool_get("unheard") is None


def test_t34_lines_are_there_while_the_pool_runs(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    @virtual
    async def check() -> None:
        async with TaskPool(audit=path) as pool:
            await (await pool.submit(quick))
            assert len(path.read_text().splitlines()) == 3

    check()


# -- a full disk ---------------------------------------------------------------------------


@virtual
async def test_t34_a_full_disk_is_told_once_and_at_the_end_with_the_number_of_lost_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with capture_events("tasks.pools") as told, capture_events(AUDIT) as events:
        async with TaskPool("told", audit="/dev/full") as pool:
            for number in range(5):
                assert await (await pool.submit(quick, number)) == number
            assert [record.getMessage() for record in caplog.records] == [
                "told: the audit file /dev/full misses events from now on: [Errno 28] No space left on device"
            ]
    assert len(events) == 15
    [failed], [lost] = told.of(PoolAuditFailed), told.of(PoolAuditLost)
    assert (failed.path, lost.path, lost.count, failed.pool) == ("/dev/full", "/dev/full", 15, "told")
    assert os.strerror(errno.ENOSPC) in failed.error
    assert [record.getMessage() for record in caplog.records][1:] == [
        "told: 15 events are not in the audit file /dev/full"
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@virtual
async def test_t34_a_full_disk_does_not_hide_what_the_block_raised() -> None:
    async def fail() -> None:
        async with TaskPool("told", audit="/dev/full") as pool:
            await pool.submit(quick)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await fail()
    assert pool_get("told") is None


@virtual
async def test_t34_a_pool_that_told_nothing_lost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with TaskPool(audit="/dev/full"):
        pass
    assert caplog.records == []


class ScarceFile:
    """A file on a disk that has room for so many bytes."""

    def __init__(self) -> None:
        self.content = b""
        self.room = 0
        self.close_fails = False

    def write(self, data: bytes) -> int:
        taken = data[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.content += taken
        self.room -= len(taken)
        return len(taken)

    def close(self) -> None:
        if self.close_fails:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def scarce_audit(tmp_path: Path) -> tuple[AuditFile, ScarceFile]:
    audit, file = AuditFile(tmp_path / "audit.jsonl"), ScarceFile()
    audit._file.close()
    audit._file = file  # type: ignore[assignment]
    return audit, file


@pytest.mark.parametrize("room", range(25))
def test_t34_a_disk_that_is_full_at_any_byte_leaves_whole_lines_when_there_is_room_again(
    tmp_path: Path, room: int
) -> None:
    audit, file = scarce_audit(tmp_path)
    lines = [f"line {number}" for number in range(3)]
    file.room = room
    firsts = [audit.append(line) for line in lines]
    assert sum(firsts) == (room < 21)
    lost = audit.lost
    file.room = 1000
    assert not audit.append("line 3")
    assert not audit.close()
    assert audit.lost == lost == max(0, 3 - -(-room // 7))
    assert file.content.decode().splitlines() == [*lines[: 3 - lost], "line 3"]


def test_t34_a_line_that_is_never_completed_is_lost(tmp_path: Path) -> None:
    audit, file = scarce_audit(tmp_path)
    file.room = 3
    assert audit.append("line 0")
    assert audit.lost == 0
    assert not audit.close()
    assert audit.lost == 1


def test_t34_a_disk_that_tells_only_at_the_end_is_told_too(tmp_path: Path) -> None:
    audit, file = scarce_audit(tmp_path)
    file.room, file.close_fails = 1000, True
    assert not audit.append("line 0")
    assert audit.close()
    assert isinstance(audit.error, OSError)


FULL = """
import asyncio, json, sys
from pathlib import Path
from headgate import TaskPool

async def quick():
    pass

async def main(path, ballast):
    async with TaskPool("told", audit=path) as pool:
        await (await pool.submit(quick))
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except OSError:
                pass
        for _ in range(100):
            await (await pool.submit(quick))
        ballast.unlink()
        await (await pool.submit(quick))

path = Path(sys.argv[1]) / "audit.jsonl"
asyncio.run(main(path, path.with_name("ballast")))
lines = [json.loads(line) for line in path.read_text().splitlines()]
print(102 * 3 - len(lines))
"""


@pytest.mark.integration
def test_t34_a_file_system_that_is_full(tmp_path: Path) -> None:
    """In a mount namespace of its own, so that nothing is left mounted whatever happens."""
    small = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1"'
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    command = [unshare, "-Urm", "sh", "-c", small, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount" in done.stderr:
        pytest.skip(f"mounting is not permitted: {done.stderr}")
    warnings = done.stderr.splitlines()
    assert (done.returncode, len(warnings)) == (0, 2), done.stderr
    assert "No space left on device" in warnings[0]
    assert f"told: {int(done.stdout)} events are not in the audit file" in warnings[1]
    assert 200 < int(done.stdout) < 303
