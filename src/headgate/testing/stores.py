"""Checks whether a store keeps the contract of `headgate.stores.Store`, for stores of your own."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, TypedDict, Unpack, cast

from headgate.core.clock import clock
from headgate.errors import StoreLocked, StoreWriteFailed
from headgate.stores.codec import Opaque
from headgate.stores.port import Entry, ErrorText, Journal, Store, StoredTask

_PATIENCE: Final = 30.0  # real seconds until an answer that does not come is a failure

_RESULTS: Final = [
    None,
    True,
    42,
    2**70,
    -0.0,
    math.inf,
    "text \u00fc \U0001f600",
    "\ud800\udc00",
    b"\x00\xff",
    [1, [2, []]],
    (1, ("a",), ()),
    {"a": 1, "$set": [1], "": {}},
    {1: "int", False: "bool", (2, 3): None},
    {1, 2},
    frozenset({"a", frozenset()}),
    datetime(2024, 2, 29, 12, 30, 0, 7, UTC),
    Decimal("1.10"),
]

_FIELDS: Final = frozenset(StoredTask.__annotations__)


def check_store(make: Callable[[], Store]) -> None:
    """Use a store as a pool does; AssertionError at the first thing that breaks the contract.

    Each `make()` returns the store over the same place: what one has written, the next must find. Call it outside of an
    event loop. The journals it makes have names of their own, and are left where they are.
    """
    for check in _CHECKS:
        check(_Place(make, f"check-{check.__name__.strip('_')}-{clock.token()}"))


class _Place:
    """The journal of one pool, opened by a new store each time."""

    def __init__(self, make: Callable[[], Store], pool_id: str) -> None:
        self.make = make
        self.pool_id = pool_id

    @contextmanager
    def opened(self, *, keep: int = 1000, pool_id: str | None = None) -> Iterator[Journal]:
        about = {"name": "checked", "stale_after": 30.0}
        journal = self.make().open(self.pool_id if pool_id is None else pool_id, about, keep)
        try:
            yield journal
        finally:
            journal.close()

    def read(self, *, keep: int = 1000, pool_id: str | None = None) -> list[StoredTask]:
        with self.opened(keep=keep, pool_id=pool_id) as journal:
            return list(journal.tasks)

    def write(self, *entries: Entry, keep: int = 1000, pool_id: str | None = None) -> None:
        """Append these and wait until all are acknowledged."""
        with self.opened(keep=keep, pool_id=pool_id) as journal:
            _run(lambda checker: checker.append_all(journal, entries))


class _JournalChecker:
    """Appends entries, and watches how they are answered."""

    def __init__(self) -> None:
        self.complaints: list[str] = []

    def append(self, journal: Journal, entry: Entry) -> asyncio.Future[StoreWriteFailed | None]:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        answer: asyncio.Future[StoreWriteFailed | None] = loop.create_future()
        calls: list[object] = []
        inside = True

        def done(error: StoreWriteFailed | None) -> None:
            calls.append(error)
            complaints = {
                "before `append` returned: the caller is not ready to hear it": inside,
                "on another thread than that of the event loop": threading.get_ident() != thread,
                "twice": len(calls) > 1,
                f"with {error!r}": error is not None and not isinstance(error, StoreWriteFailed),
            }
            # Not raised here: whoever calls `done` need not let it through.
            self.complaints += [f"`done` was called {how}" for how, wrong in complaints.items() if wrong]
            if len(calls) == 1:
                loop.call_soon_threadsafe(answer.set_result, error)

        journal.append(entry, done)
        inside = False
        return answer

    async def append_all(self, journal: Journal, entries: Iterable[Entry]) -> None:
        for answer in [self.append(journal, entry) for entry in entries]:
            error = await answer
            assert error is None, f"an entry was refused: {error!r}"


def _run(work: Callable[[_JournalChecker], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        checker = _JournalChecker()
        try:
            async with asyncio.timeout(_PATIENCE):
                await work(checker)
        except TimeoutError:
            raise AssertionError(f"no answer within {_PATIENCE:.0f} s: `done` or `flush` waits for ever") from None
        await asyncio.sleep(0)  # for a second answer
        assert not checker.complaints, checker.complaints[0]

    asyncio.run(bounded())


class EndFields(TypedDict, total=False):
    """What an entry of the kind "end" may have besides the status, see `headgate.stores.port.Entry`."""

    result: object
    error: ErrorText
    reason: str
    policy: str


def submit(number: int, about: Mapping[str, Any] | None = None, *, at: float = 1000.0, **more: object) -> Entry:
    """Make an entry of the kind "submit", as a pool writes it; `more` may have fields that do not exist yet."""
    return cast(Entry, {"kind": "submit", "at": at, "task": number, "about": about or {}, **more})


def end(number: int, status: str = "completed", *, at: float = 2000.0, **more: Unpack[EndFields]) -> Entry:
    """Make an entry of the kind "end", as a pool writes it."""
    return cast(Entry, {"kind": "end", "at": at, "task": number, "status": status, **more})


def _only(tasks: list[StoredTask]) -> StoredTask:
    assert len(tasks) == 1, f"one task was written, {len(tasks)} were read: {tasks}"
    assert set(tasks[0]) == _FIELDS, f"a stored task has the fields {sorted(_FIELDS)}, got {sorted(tasks[0])}"
    return tasks[0]


def _expect(found: StoredTask, **fields: object) -> None:
    for name, value in fields.items():
        got = cast("dict[str, Any]", found)[name]
        assert got == value, f"task {found['task']}: {name} is {got!r}, {value!r} was written"


# -- the checks -------------------------------------------------------------------------------------------------------


def _a_new_journal(place: _Place) -> None:
    assert isinstance(place.make().shared, bool), "`shared` must be True or False"
    assert place.read() == [], "a journal that was never written must have no tasks"
    assert place.read() == [], "a journal that was only opened must have no tasks"


def _the_life_of_a_task(place: _Place) -> None:
    about = {"idempotency_key": "k", "window": 60.0, "labels": {"a": [1, None, "\u00fc"]}}
    place.write(
        submit(1, about, at=1.5),
        {"kind": "start", "at": 2.5, "task": 1, "attempt": 1},
        {"kind": "requeue", "at": 3.5, "task": 1},
        {"kind": "beat", "at": 4.0},
        {"kind": "start", "at": 4.5, "task": 1, "attempt": 2},
        end(1, at=5.5, result=(42,)),
    )
    task = _only(place.read())
    _expect(task, task=1, about=about, status="completed", submitted_at=1.5, attempt=2)
    _expect(task, started_at=4.5, finished_at=5.5, result=(42,), error=None, reason=None, policy=None)


def _ends_of_all_kinds(place: _Place) -> None:
    error: ErrorText = {"type": "builtins:ValueError", "text": "no\n\u00fc", "traceback": "line 1\nline 2"}
    place.write(
        submit(1, running=True),
        submit(2),
        submit(3),
        end(1, "failed", error=error),
        end(2, "rejected", reason="drop_oldest_queue_full", policy="drop_oldest"),
        end(3, "cancelled"),
        end(3, "completed", at=2001.0, result=1),
    )
    failed, rejected, cancelled = place.read()
    _expect(failed, status="failed", error=error, attempt=1, started_at=1000.0, result=None)
    _expect(rejected, status="rejected", reason="drop_oldest_queue_full", policy="drop_oldest", attempt=0)
    _expect(cancelled, status="cancelled", finished_at=2000.0, result=None, started_at=None)  # the first end counts


def _unfinished_tasks(place: _Place) -> None:
    place.write(submit(1), submit(2, running=True), submit(3), {"kind": "start", "at": 1001.0, "task": 3, "attempt": 1})
    statuses = [task["status"] for task in place.read()]
    assert statuses == ["queued", "running", "running"], f"the next owner reads what was written, got {statuses}"
    tasks = place.read()
    statuses = [task["status"] for task in tasks]
    assert statuses == ["stale"] * 3, f"opening ends the unfinished tasks of a former run as stale, got {statuses}"
    assert all(task["finished_at"] is not None for task in tasks), "a task that became stale has a `finished_at`"


def _order(place: _Place) -> None:
    numbers = [5, 1, 4, 2, 3]
    place.write(*map(submit, numbers), *(end(number, at=2000.0 - number) for number in numbers))
    found = [task["task"] for task in place.read()]
    assert found == [1, 2, 3, 4, 5], f"tasks are read by number, got {found}"


def _results(place: _Place) -> None:
    entries = [entry for n, result in enumerate(_RESULTS, 1) for entry in (submit(n), end(n, result=result))]
    place.write(*entries)
    for task, result in zip(place.read(), _RESULTS, strict=True):
        got = task["result"]
        shown = isinstance(result, set | frozenset) or repr(got) == repr(result)  # -0.0 == 0.0, and (1,) == (True,)
        same = type(got) is type(result) and got == result and shown
        assert same, f"{result!r} came back as {got!r}"


def _results_that_cannot_be_kept(place: _Place) -> None:
    place.write(submit(1), end(1, result=threading.Lock()), submit(2), end(2, result=[threading.Lock()]))
    for task in place.read():
        result = task["result"]
        assert isinstance(result, Opaque), f"what cannot be kept comes back as Opaque, got {result!r}"
        _expect(task, status="completed")


def _results_that_change(place: _Place) -> None:
    result, about = [1], {"labels": [1]}

    async def work(_: _JournalChecker) -> None:
        journal.append(submit(1, about))
        journal.append(end(1, result=result))
        result.append(2)
        about["labels"].append(2)
        await journal.flush()

    with place.opened() as journal:
        _run(work)
    task = _only(place.read())
    _expect(task, result=[1], about={"labels": [1]})


def _one_writer(place: _Place) -> None:
    store = place.make()
    with place.opened():
        for again in (store, place.make()):
            try:
                again.open(place.pool_id, {}, 1000).close()
            except StoreLocked:
                continue
            raise AssertionError("a journal was opened twice: the second must raise StoreLocked")
        assert place.read(pool_id=place.pool_id + "-other") == [], "the journal of another pool is not locked"
    store.open(place.pool_id, {}, 1000).close()


def _two_pools(place: _Place) -> None:
    ids = [f"{place.pool_id}{more}" for more in ("", "/x", "/X", "/../x", " \u00fc%", "-long" * 60)]
    for number, pool_id in enumerate(ids, 1):
        place.write(submit(number), pool_id=pool_id)
    for number, pool_id in enumerate(ids, 1):
        found = [task["task"] for task in place.read(pool_id=pool_id)]
        assert found == [number], f"pool {pool_id!r} wrote task {number} and read {found}: pools must not mix"


def _closing(place: _Place) -> None:
    journal = place.make().open(place.pool_id, {}, 1000)

    async def leave_without_waiting(_: _JournalChecker) -> None:
        for number in range(1, 101):
            journal.append(submit(number))

    async def append_late(checker: _JournalChecker) -> None:
        error = await checker.append(journal, submit(101))
        assert isinstance(error, StoreWriteFailed), f"`append` after `close` must tell StoreWriteFailed, told {error!r}"
        await journal.flush()

    _run(leave_without_waiting)
    journal.close()
    journal.close()
    _run(append_late)
    found = len(place.read())
    assert found == 100, f"100 entries were appended before `close`, {found} were read"


def _flushing(place: _Place) -> None:
    async def work(_: _JournalChecker) -> None:
        await journal.flush()
        for number in range(1, 11):
            journal.append(submit(number))
        await journal.flush()
        await asyncio.gather(journal.flush(), journal.flush())

    with place.opened() as journal:
        _run(work)
    assert len(place.read()) == 10, "what was appended and flushed must be there"


def _many_at_once(place: _Place) -> None:
    async def work(checker: _JournalChecker) -> None:
        async def one(number: int) -> None:
            await checker.append_all(journal, [submit(number, running=True)])
            await checker.append_all(journal, [end(number, result=number)])

        await asyncio.gather(*(one(number) for number in range(1, 501)))

    with place.opened() as journal:
        _run(work)
    found = [(task["task"], task["result"]) for task in place.read() if task["status"] == "completed"]
    assert found == [(number, number) for number in range(1, 501)], "every entry that was acknowledged must be there"


def _groups(place: _Place) -> None:
    """Entries that are appended together, where a journal can do that."""
    heard: list[StoreWriteFailed | None] = []

    async def work(checker: _JournalChecker) -> None:
        first = checker.append(journal, submit(1))
        together = [(entry, heard.append) for number in range(2, 52) for entry in (submit(number), end(number))]
        journal.append_all([*together, (submit(52), None)])
        last = checker.append(journal, end(52, result="last"))
        assert not heard, "`append_all` told `done` before it returned: the caller is not ready to hear it"
        assert (await first, await last) == (None, None)

    async def append_late(_: _JournalChecker) -> None:
        journal.append_all([(submit(60), heard.append)])
        await journal.flush()
        await asyncio.sleep(0)

    with place.opened() as journal:
        if not hasattr(journal, "append_all"):
            return
        _run(work)
    assert heard == [None] * 100, "each `done` of `append_all` must be told once"
    _run(append_late)
    assert isinstance(heard[-1], StoreWriteFailed), "`append_all` after `close` must tell StoreWriteFailed"
    found = [task["task"] for task in place.read()]
    assert found == list(range(1, 53)), f"entries of `append_all` are lost, or out of order: {found}"


def _keeping(place: _Place) -> None:
    held, free, last = range(1, 21), range(21, 1221), 1221
    for number in held:
        place.write(submit(number, {"idempotency_key": str(number)}), end(number, at=2000.0 + number), keep=5)
    place.write(
        *(entry for number in free for entry in (submit(number), end(number, "failed", at=3000.0 + number))), keep=5
    )
    place.write(submit(last), end(last, "cancelled", at=2500.0), keep=5)
    found = {task["task"] for task in place.read(keep=5)}
    assert found >= set(held), f"a task that holds its key must be kept, lost {sorted(set(held) - found)}"
    assert found >= set(free[-5:]), f"the newest `keep` ends must be kept, lost {sorted(set(free[-5:]) - found)}"
    assert last in found, "the highest number must be kept: the next run counts on from it"


_CHECKS: Final[tuple[Callable[[_Place], None], ...]] = (
    _a_new_journal,
    _the_life_of_a_task,
    _ends_of_all_kinds,
    _unfinished_tasks,
    _order,
    _results,
    _results_that_cannot_be_kept,
    _results_that_change,
    _one_writer,
    _two_pools,
    _closing,
    _flushing,
    _many_at_once,
    _groups,
    _keeping,
)
