"""T63: both stores keep the contract, and `check_store` tells of one that does not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headgate.core.files import Files
from headgate.errors import StoreWriteFailed
from headgate.stores import Done, Entry, JsonLinesStore, MemoryStore, StoredTask
from headgate.stores.memory import MemoryJournal
from headgate.testing import check_store
from tests.support.stores.support import NoSync


def test_t63_memory_keeps_the_contract() -> None:
    store = MemoryStore()
    check_store(lambda: store)


@pytest.mark.parametrize("codec", ["json", "pickle"])
def test_t63_json_lines_keep_the_contract(tmp_path: Path, codec: Any) -> None:
    files = Files() if codec == "json" else NoSync()
    check_store(lambda: JsonLinesStore(tmp_path, codec=codec, files=files))


class Wrapped:
    """A journal that passes everything on."""

    def __init__(self, inner: MemoryJournal) -> None:
        self.inner = inner

    @property
    def tasks(self) -> list[StoredTask]:
        return list(self.inner.tasks)

    def append(self, entry: Entry, done: Done | None = None) -> None:
        self.inner.append(entry, done)

    async def flush(self) -> None:
        await self.inner.flush()

    def close(self) -> None:
        self.inner.close()


class Hasty(Wrapped):
    def append(self, entry: Entry, done: Done | None = None) -> None:
        self.inner.append(entry)
        if done is not None:
            done(None)


class Stutterer(Wrapped):
    def append(self, entry: Entry, done: Done | None = None) -> None:
        self.inner.append(entry, done)
        if done is not None:
            asyncio.get_running_loop().call_soon(done, None)


class Stranger(Wrapped):
    def append(self, entry: Entry, done: Done | None = None) -> None:
        self.inner.append(entry)
        if done is not None:
            threading.Timer(0.01, done, [None]).start()


class Forgetful(Wrapped):
    """Loses what nobody waits for."""

    def append(self, entry: Entry, done: Done | None = None) -> None:
        if done is not None:
            self.inner.append(entry, done)


class Plain(Wrapped):
    """Results as JSON alone."""

    @property
    def tasks(self) -> list[StoredTask]:
        return json.loads(json.dumps(list(self.inner.tasks), default=list, skipkeys=True))


class Dreamer(Wrapped):
    """Encodes a result when it has time."""

    def append(self, entry: Entry, done: Done | None = None) -> None:
        asyncio.get_running_loop().call_soon(self.inner.append, entry, done)

    async def flush(self) -> None:
        await asyncio.sleep(0)


class Fragile(Wrapped):
    def close(self) -> None:
        if self.inner.is_closed:
            raise RuntimeError("closed twice")
        self.inner.close()


class Deaf(Wrapped):
    def append(self, entry: Entry, done: Done | None = None) -> None:
        self.inner.append(entry, done and (lambda _: done(None)))


class Shuffled(Wrapped):
    @property
    def tasks(self) -> list[StoredTask]:
        return sorted(self.inner.tasks, key=lambda task: task["finished_at"] or 0.0)


class Optimist(Wrapped):
    """Reads what a former run left unfinished as it was, for ever."""

    @property
    def tasks(self) -> list[StoredTask]:
        return [{**task, "status": task["status"].replace("stale", "queued")} for task in self.inner.tasks]


class Miser(Wrapped):
    """Forgets keys."""

    @property
    def tasks(self) -> list[StoredTask]:
        return list(self.inner.tasks)[-self.inner._keep :]


class Broken:
    """A store of such journals."""

    shared = False

    def __init__(self, kind: type[Wrapped]) -> None:
        self.kind = kind
        self.inner = MemoryStore()

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Any:
        return self.kind(self.inner.open(pool_id, about, keep))


class Unlocked(Broken):
    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Any:
        self.inner._open.clear()
        return super().open(pool_id, about, keep)


class Mixed(Broken):
    """One journal for all whose names begin alike."""

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Any:
        return super().open(pool_id.split("/")[0], about, keep)


class Fresh(Broken):
    """Remembers nothing."""

    def open(self, pool_id: str, about: Mapping[str, Any], keep: int) -> Any:
        self.inner._lines.clear()
        return super().open(pool_id, about, keep)


def test_t63_a_wrapped_store_passes() -> None:
    store = Broken(Wrapped)
    check_store(lambda: store)


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        (Broken(Hasty), "before `append` returned"),
        (Broken(Stutterer), "called twice"),
        (Broken(Stranger), "on another thread"),
        (Broken(Forgetful), "one task was written"),
        (Broken(Plain), "was written"),
        (Broken(Dreamer), "was written"),
        (Broken(Fragile), "closed twice"),
        (Broken(Deaf), "after `close` must tell StoreWriteFailed"),
        (Broken(Shuffled), "by number"),
        (Broken(Optimist), "ends the unfinished tasks of a former run"),
        (Broken(Miser), "holds its key must be kept"),
        (Unlocked(Wrapped), "opened twice"),
        (Mixed(Wrapped), "pools must not mix"),
        (Fresh(Wrapped), "one task was written"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.kind.__name__}" if isinstance(value, Broken) else "",
)
def test_t63_a_broken_store_is_told_why(store: Broken, complaint: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=complaint):
        check_store(lambda: store)


def test_t63_a_store_that_never_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(Wrapped):
        def append(self, entry: Entry, done: Done | None = None) -> None:
            self.inner.append(entry)

    monkeypatch.setattr("headgate.testing.stores._PATIENCE", 0.05)
    store = Broken(Mute)
    with pytest.raises(AssertionError, match="no answer"):
        check_store(lambda: store)


def test_t63_a_journal_in_memory_stays_small() -> None:
    async def work() -> None:
        journal = store.open("p", {}, 10)
        for number in range(1, 10_000):
            journal.append({"kind": "submit", "at": 1.0, "task": number})
            journal.append({"kind": "end", "at": float(number), "task": number, "status": "failed"})
        await journal.flush()
        journal.close()

    store = MemoryStore()
    asyncio.run(work())
    assert len(store._lines["p"]) < 1200
    assert [task["task"] for task in store.open("p", {}, 10).tasks] == list(range(9990, 10_000))


def test_t63_a_forgotten_journal_in_memory_is_not_locked() -> None:
    store = MemoryStore()
    store.open("p", {}, 10)
    store.open("p", {}, 10).close()


def test_t63_append_without_a_loop_is_fine_when_nobody_waits() -> None:
    store = MemoryStore()
    journal = store.open("p", {}, 10)
    journal.append({"kind": "submit", "at": 1.0, "task": 1})
    with pytest.raises(RuntimeError, match="no running event loop"):
        journal.append({"kind": "submit", "at": 1.0, "task": 2}, _ignore)
    journal.close()
    journal.append({"kind": "submit", "at": 1.0, "task": 3})
    assert [task["task"] for task in store.open("p", {}, 10).tasks] == [1]


def _ignore(_: StoreWriteFailed | None) -> None: ...
