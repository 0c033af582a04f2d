"""Durable records: what a pipeline pool writes to its journal, and what it finds there after a restart.

Bodies are not written, so nothing is run again by itself: what was unfinished when the process ended reads ``stale``,
and submitting it once more, with the same idempotency key, runs it afresh. A completed key gives its stored result.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from headgate.errors import TaskFailed
from headgate.stores.codec import canonical
from headgate.stores.port import Done, Entry, ErrorText, Journal, StoredTask
from headgate.tasks.idempotency import work_of
from headgate.tasks.model import PLAIN, TERMINAL, Dropped, Failure, Moment, TaskRecord, TaskStatus, Terms


class Records:
    """The journal of one pool, in words of tasks."""

    __slots__ = ("_digests", "_journal", "_last", "_seated")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._digests: dict[str, str] = {}  # of the work behind each idempotency key
        self._last: tuple[Any, str] = (None, "")  # the last function, and its name
        self._seated: set[TaskRecord] = set()  # the entry of their submit says already that they run

    # -- writing -------------------------------------------------------------------------------------------------------

    def submitted(self, task: TaskRecord, *, seated: bool, done: Done) -> None:
        """It is accepted if this becomes durable; `seated` if it starts then."""
        entry: Entry = {"kind": "submit", "at": task.moment.wall, "task": task.number, "about": self._about(task)}
        if seated:
            self._seated.add(task)
            entry["running"] = True
        self._journal.append(entry, done)

    def started(self, task: TaskRecord, at: float) -> None:
        """It runs."""
        if task in self._seated:
            self._seated.discard(task)
        else:
            self._journal.append({"kind": "start", "at": at, "task": task.number, "attempt": task.attempt})

    def requeued(self, task: TaskRecord, at: float) -> None:
        """An attempt has ended, and another will follow."""
        self._journal.append({"kind": "requeue", "at": at, "task": task.number})

    def ended(self, task: TaskRecord, status: TaskStatus, at: float, done: Done | None = None) -> None:
        """Its terminal state."""
        entry: Entry = {"kind": "end", "at": at, "task": task.number, "status": status}
        outcome = task.outcome
        if status == "completed":
            entry["result"] = outcome
        elif isinstance(outcome, Failure):
            entry["error"] = _told(outcome)
        elif isinstance(outcome, Dropped):
            entry["reason"], entry["policy"] = outcome
        self._seated.discard(task)
        self._journal.append(entry, done)

    def beat(self, at: float) -> None:
        """What runs, still runs."""
        self._journal.append({"kind": "beat", "at": at})

    async def close(self) -> None:
        """When everything is durable, let go of the journal."""
        await self._journal.flush()
        self._journal.close()

    def abandon(self) -> None:
        """Let go of the journal now."""
        self._journal.close()

    # -- idempotency ---------------------------------------------------------------------------------------------------

    def same_work(self, key: str, task: TaskRecord) -> bool:
        """Is this the work that was submitted under this key? True when nobody can tell."""
        known, given = self._digests.get(key, ""), digest_of(task.fn, task.args)
        return not known or not given or known == given

    def _about(self, task: TaskRecord) -> dict[str, Any]:
        terms = task.terms
        if task.fn is not self._last[0]:
            self._last = task.fn, work_of(task.fn, ())[0]
        about: dict[str, Any] = {"fn": self._last[1]}
        if task.priority:
            about["priority"] = task.priority
        if task.partition is not None:  # else it has no key either
            for name, value in (("key", task.key), ("partition", task.partition)):
                if value is not None:
                    about[name] = value if isinstance(value, (str, int)) else str(value)
        if terms is not PLAIN:
            if terms.labels:
                about["labels"] = {label: _plain(value) for label, value in terms.labels.items()}
            if terms.idempotency_key is not None:
                self._digests[terms.idempotency_key] = digest = digest_of(task.fn, task.args)
                about |= {"idempotency_key": terms.idempotency_key, "window": terms.window, "digest": digest}
        return about

    # -- reading -------------------------------------------------------------------------------------------------------

    def loaded(self) -> Iterator[tuple[StoredTask, Terms, TaskStatus]]:
        """The tasks of former runs, oldest first. What was not finished is stale."""
        for stored in self._journal.tasks:
            about = stored["about"]
            key = about.get("idempotency_key")
            if key is not None:
                self._digests[key] = about.get("digest", "")
            terms = Terms(
                idempotency_key=key, window=about.get("window", "until_success"), labels=about.get("labels") or None
            )
            yield stored, terms, _status(stored["status"])


def restore(task: TaskRecord, stored: StoredTask) -> None:
    """Give a task of a former run its outcome and its times."""
    task.attempt = stored["attempt"]
    task.started = None if stored["started_at"] is None else Moment(0.0, stored["started_at"])
    task.ended = None if stored["finished_at"] is None else Moment(0.0, stored["finished_at"])
    error = stored["error"]
    if stored["status"] == "completed":
        task.outcome = stored["result"]
    elif error is not None:
        failed = TaskFailed(f"{task.label} failed in a former run with {error['type']}: {error['text']}")
        if error["traceback"]:
            failed.add_note(error["traceback"])
        task.outcome = Failure(failed, None)
    elif stored["reason"] is not None:
        task.outcome = Dropped(stored["reason"], stored["policy"] or "")


def digest_of(fn: Any, args: tuple[Any, ...]) -> str:
    """A digest of the work that is the same in every process; "" when there is none.

    Of the canonical JSON where there is one: a pickle of equal values may differ from run to run (the order of a set,
    which strings are one object).
    """
    name, given = work_of(fn, args)
    text = canonical(given)
    data = text.encode() if text is not None else _pickled(given)
    return hashlib.blake2b(name.encode() + b"\0" + data, digest_size=16).hexdigest() if data else ""


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True  # without the memo, which tells equal objects from the same object
    try:
        pickler.dump(value)
    except Exception:
        return b""
    return buffer.getvalue()


def _status(status: str) -> TaskStatus:
    known: dict[str, TaskStatus] = {terminal: terminal for terminal in TERMINAL}
    return known.get(status, "stale")


def _told(failure: Failure) -> ErrorText:
    kind = type(failure.error)
    try:
        text = str(failure.error)
    except Exception:
        text = "(its text could not be made)"
    lines = traceback.format_exception(kind, failure.error, failure.traceback)
    return {"type": f"{kind.__module__}:{kind.__qualname__}", "text": text, "traceback": "".join(lines)[-20_000:]}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def described(about: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a pool, as values that JSON knows."""
    return {name: _plain(value) for name, value in about.items()}
