"""Durable records: what a pipeline pool writes to its journal, and what it finds there after a restart.

Bodies are not written, so nothing is run again by itself: what was unfinished when the process ended reads ``stale``,
and submitting it once more, with the same idempotency key, runs it afresh. A completed key gives its stored result.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import pickle
import pickletools
import traceback
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.core.key_windows import Window, checked_window
from headgate.core.redaction import redact
from headgate.errors import StoreWriteFailed, TaskFailed
from headgate.stores.codec import canonical
from headgate.stores.jsonl.scanner import Brief, StoredTasks
from headgate.stores.port import Done, Entry, ErrorText, Journal, StoredTask
from headgate.stores.result_types import LOADED, ResultTypes
from headgate.tasks.handle import TaskHandle
from headgate.tasks.model import PLAIN, TERMINAL, Dropped, Failure, Moment, Rare, TaskRecord, TaskStatus, Terms, Told
from headgate.tasks.scheduling.idempotency import difference, payload_name, work_of
from headgate.tasks.scheduling.states import Former

if TYPE_CHECKING:
    from headgate.tasks.runtime.executor import Executor


class Records:
    """The journal of one pool, in words of tasks."""

    __slots__ = ("_group", "_journal", "_last", "_tasks", "_types", "_works", "_written_running")

    def __init__(self, journal: Journal, types: ResultTypes = LOADED) -> None:
        self._journal = journal
        self._group: list[tuple[Entry, Done | None]] | None = None  # entries that are to be written together
        self._types = types
        self._tasks: Sequence[StoredTask] = ()  # of former runs
        self._works: dict[str, tuple[str, str]] = {}  # behind the keys of those: function and digest
        self._last: tuple[Any, str] = (None, "")  # the last function, and its name
        self._written_running: set[TaskRecord] = set()  # the entry of their submit says already that they run

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write all entries of this block in one group."""
        group = self._group = []
        try:
            yield
        finally:
            self._group = None
            self._append_all(group)

    def _append_all(self, group: list[tuple[Entry, Done | None]]) -> None:
        try:
            if hasattr(self._journal, "append_all"):
                self._journal.append_all(group)
            else:
                for entry, done in group:
                    self._journal.append(entry, done)
        except Exception as broken:  # a store that breaks its promise never to raise: nothing was acknowledged
            for _, done in group:
                if done is not None:
                    error = StoreWriteFailed(f"the store raised in append_all(): {broken!r}")
                    error.__cause__ = broken
                    done(error)

    def _append(self, entry: Entry, done: Done | None = None) -> None:
        if self._group is None:
            self._journal.append(entry, done)
        else:
            self._group.append((entry, done))

    def submitted(self, task: TaskRecord, *, has_slot: bool, done: Done) -> None:
        """Write down a task, which is accepted when this is durable; with `has_slot` it starts then."""
        entry: Entry = {"kind": "submit", "at": task.moment.wall, "task": task.number, "about": self._about(task)}
        if has_slot:
            self._written_running.add(task)
            entry["running"] = True
        self._append(entry, done)

    def started(self, task: TaskRecord, at: float) -> None:
        """Write down that an attempt of a task has begun."""
        if task in self._written_running:
            self._written_running.discard(task)
        else:
            self._append({"kind": "start", "at": at, "task": task.number, "attempt": task.attempt})

    def requeued(self, task: TaskRecord, at: float) -> None:
        """Write down that an attempt of a task has ended, and another will follow."""
        self._append({"kind": "requeue", "at": at, "task": task.number})

    @property
    def why_lost(self) -> Callable[[object], str] | None:
        """Why a result could not be given back after a restart, "" if it could; None if the store cannot tell."""
        return getattr(self._journal, "why_lost", None)

    def ended(
        self, task: TaskRecord, status: TaskStatus, at: float, done: Done | None = None, *, may_release: bool = False
    ) -> None:
        """Write down the terminal state of a task; with `may_release` also that it holds its key no longer."""
        entry: Entry = {"kind": "end", "at": at, "task": task.number, "status": status}
        outcome = task.outcome
        if status == "completed":
            entry["result"] = outcome
            if may_release and task.terms.idempotency_key is not None and task.terms.window == "while_active":
                entry["window"] = "while_active"
        elif status == "failed":
            entry["error"] = _told(outcome)
        elif status == "rejected":
            entry["reason"], entry["policy"] = outcome.reason, outcome.policy
        self._written_running.discard(task)
        self._append(entry, done)

    def beat(self, at: float) -> None:
        """Write down that this process lives, and so what runs still runs."""
        self._append({"kind": "beat", "at": at})

    async def close(self) -> None:
        """Let go of the journal when everything is durable."""
        await self._journal.flush()
        self._journal.close()

    def abandon(self) -> None:
        """Let go of the journal now."""
        self._journal.close()

    # -- idempotency ---------------------------------------------------------------------------------------------------

    def difference(self, key: str, task: TaskRecord) -> str:
        """What is not the same about this work and that of a former run; "" when nothing is, or nobody can tell."""
        fn, known = self._works.get(key, ("", ""))
        new, given = work_of(task.fn, task.args, task.terms.payload_id)
        return digest_difference(fn, known, new, given)

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
                    about[name] = value if type(value) in (str, int) else _text(value)
        if terms is not PLAIN:
            if terms.labels:
                about["labels"] = {label: _plain(value) for label, value in terms.labels.items()}
            if terms.idempotency_key is not None:
                digest = digest_of(*work_of(task.fn, task.args, terms.payload_id))
                about |= {"idempotency_key": terms.idempotency_key, "window": terms.window, "digest": digest}
                if terms.payload_id is not None:
                    about["payload_id"] = terms.payload_id
        return about

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """Is it known what was in the journal? If not, `found` reads it now, and may take long."""
        return getattr(self._journal, "is_read", True)

    def found(self) -> Iterator[tuple[Former, TaskStatus, Window, float | None]]:
        """The tasks of former runs, oldest first: key ("" for none) and place, status, window, end.

        What was not finished is stale.
        """
        self._tasks = tasks = self._journal.tasks
        if isinstance(tasks, StoredTasks):
            tasks.types = self._types
        briefs = tasks.briefs() if isinstance(tasks, StoredTasks) else map(_brief, tasks)
        for place, brief in enumerate(briefs):
            former = Former(_key(brief.about) or "", brief.task, place)
            yield former, _status(brief.status), _window(brief.about.get("window")), brief.finished_at

    def revived(self, place: int, owner: Executor) -> TaskHandle[Any]:
        """The record of the task of a former run that was found in this place."""
        stored = self._tasks[place]
        about, moment = stored["about"], Moment(0.0, stored["submitted_at"])
        key, labels = _key(about), about.get("labels")
        if key is not None:
            payload_id = about.get("payload_id")
            name = about.get("fn", "") if payload_id is None else payload_name(str(payload_id))
            self._works[key] = str(name), str(about.get("digest", ""))
        labels = labels if isinstance(labels, Mapping) and labels else None
        terms = Terms(idempotency_key=key, window=_window(about.get("window")), labels=labels)
        task: TaskHandle[Any] = TaskHandle(
            owner,
            stored["task"],
            None,
            (),
            None,
            moment,
            None,
            about.get("priority", 0),
            None,
            about.get("partition"),
            terms,
        )
        task.rare = Rare(key=about.get("key"))  # as it was stored, whatever the strategy is today
        restore(task, stored)
        task.status = _status(stored["status"])
        return task


class Loading:
    """Reads the journal of a pool: now, or in a thread if it is large and an event loop runs here."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._future: Future[None] = Future()

    def begin(self) -> Loading | None:
        """Begin to read. Returns None if there is nothing to wait for."""
        records = self._executor.records
        if records is None:
            return None
        if records.is_read or _get_running_loop() is None:
            self._load(records)
            return None
        self._future.set_running_or_notify_cancel()  # who waits for it may be cancelled, and it is not
        thread = Thread(target=self._in_thread, args=(records,), name=f"headgate open {self._executor.name}")
        try:
            thread.start()
        except RuntimeError:  # the machine has no more threads: then it is done here
            self._load(records)
            return None
        return self

    async def done(self) -> None:
        """Return when the journal is read; raise if it cannot be."""
        await asyncio.wrap_future(self._future)

    def is_over(self) -> bool:
        """Was the journal read, or could it not be?"""
        return self._future.done()

    def wait(self) -> None:
        """Block until the journal is read; raise if it cannot be."""
        self._future.result()

    def _in_thread(self, records: Records) -> None:
        """Until this is done nobody else looks at the states: submits and snapshots wait."""
        try:
            self._load(records)
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def _load(self, records: Records) -> None:
        highest, now, states = 0, Moment(clock.now(), clock.wall()), self._executor.states
        for former, status, window, finished_at in records.found():
            highest = max(highest, former.number)
            if not former.key or not states.load_key(former, status, window, finished_at, now):
                states.load(self._executor.revive(former.place), status, now)
        states.start_from(highest + 1)


def _brief(stored: StoredTask) -> Brief:
    return Brief(stored["task"], stored["status"], stored["finished_at"], stored["about"])


def _key(about: Mapping[str, Any]) -> str | None:
    key = about.get("idempotency_key")
    return key if isinstance(key, str) else None  # what a file says is not to be trusted


def restore(task: TaskRecord, stored: StoredTask) -> None:
    """Give a task of a former run its outcome and its times."""
    task.started = None if stored["started_at"] is None else Moment(0.0, stored["started_at"])
    task.attempt = stored["attempt"]
    task.ended = None if stored["finished_at"] is None else Moment(0.0, stored["finished_at"])
    if stored["status"] == "completed":
        task.outcome = stored["result"]
    elif stored["status"] == "failed":
        error: object = stored["error"]  # what a file says is not to be trusted
        told = error if isinstance(error, Mapping) else {}
        kind, text = told.get("type", "an unknown error"), told.get("text", "")
        failed = TaskFailed(f"{task.label} failed in a former run with {kind}: {text}")
        if told.get("traceback"):
            failed.add_note(str(told["traceback"]))
        task.outcome = Failure(failed, None, Told(str(kind), str(text)))
    elif stored["status"] == "rejected":
        task.outcome = Dropped(str(stored["reason"] or ""), str(stored["policy"] or ""))


def digest_difference(old: str, known: str, new: str, given: tuple[Any, ...]) -> str:
    """What is not the same about stored work, of which the name and a digest are known, and this (see `work_of`).

    "" when nothing is, or nobody can tell.
    """
    digest = digest_of(new, given)
    if not known or not digest or known == digest:
        return ""
    same_arguments = known == digest_of(old, given) if old else False
    how = f"of the old ones only a digest is stored, {known[:8]}, and that of the new ones is {digest[:8]}"
    return difference(old, new, same_arguments=same_arguments, arguments_differ=how)


def digest_of(name: str, given: tuple[Any, ...]) -> str:
    """A digest of the work (see `work_of`) that is the same in every process; "" when there is none.

    Of the canonical JSON where there is one: a pickle of equal values may differ from run to run (the order of a set,
    which strings are one object).
    """
    text = canonical(given)
    data = text.encode() if text is not None else _pickled(given)
    return hashlib.blake2b(name.encode() + b"\0" + data, digest_size=16).hexdigest() if data else ""


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True  # without the memo, which tells equal objects from the same object
    try:
        pickler.dump(value)
        data = buffer.getvalue()
        if any(code.name in ("EMPTY_SET", "FROZENSET") for code, _, _ in pickletools.genops(data)):
            return b""  # its order differs from process to process
    except Exception:
        return b""
    return data


def _status(status: str) -> TaskStatus:
    known: dict[str, TaskStatus] = {terminal: terminal for terminal in TERMINAL}
    return known.get(status, "stale")


def _told(failure: Failure) -> ErrorText:
    kind = type(failure.error)
    try:
        lines = "".join(traceback.format_exception(kind, failure.error, failure.traceback))
    except Exception:
        lines = ""
    text, lines = redact(_text(failure.error)), redact(lines)  # before they are cut: half a secret is not found
    return {"type": f"{kind.__module__}:{kind.__qualname__}", "text": text[:_LONGEST], "traceback": lines[-_LONGEST:]}


_LONGEST = 20_000


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"(a {type(value).__qualname__} that cannot be shown)"


def _window(window: object) -> Window:
    try:
        return checked_window(window)
    except Exception:  # of a later release, or no window at all
        return "until_success"


def _plain(value: object) -> object:
    return value if value is None or type(value) in (str, int, float, bool) else _text(value)


def described(about: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a pool, as values that JSON knows."""
    return {name: _plain(value) for name, value in about.items()}
