"""Opening a large journal: finding the lines of each task without reading them whole.

A pool that opens its journal wants to know of 100,000 tasks which key they hold, and hardly ever what they returned. So
`scan` keeps the lines of a task as they are, and reads off them only how the task stands. A line whose checksum fits is
as it was written, so its beginning is enough; all others are read whole. `StoredTasks` folds the lines of one task into
a `StoredTask` when somebody asks for it.

The price: a task costs about as many bytes of memory as it has in the file. Keeping places in the file instead would
cost less, and a compaction, a closed pool and a failing disk would all have to be thought of for each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, overload

from headgate.stores.codec import Codec, decode
from headgate.stores.jsonl.journal import UNFINISHED, End, History, fold_lines, kept_numbers, submitted, take, walk
from headgate.stores.jsonl.lines import CRC_SIZE, window_of
from headgate.stores.port import StoredTask
from headgate.stores.result_types import LOADED, ResultTypes

_BEGINNING: Final = re.compile(
    rb'\{"kind":"(submit|start|requeue|end)","at":(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?),"task":(\d+)'
    rb'(?:,"status":"([a-z]+)")?(?:,"window":("[a-z_]*"|[^,}]+))?[,}]'
)
_WORDS: Final[dict[bytes, str]] = {
    word.encode(): word
    for word in ("completed", "failed", "cancelled", "rejected", "expired", "stale", "queued", "running")
}
_said: Final = lru_cache(256)(json.loads)
"""The same few windows stand in every line."""


class _Found:
    """The lines of one task, and its status."""

    __slots__ = ("at", "lines", "status", "window")

    def __init__(self, lines: bytes, status: str, window: Any) -> None:
        self.lines: bytes = lines
        self.status: str = status
        self.window: Any = window
        """How long it holds its idempotency key; None when it has none."""
        self.at: float = 0.0
        """When the task ended, in Unix seconds."""


class Scan:
    """The tasks of a journal by their lines, as `scan` found them."""

    def __init__(self) -> None:
        self.history: History = History(unwritten=True)
        """What the journal says, without the tasks."""
        self._tasks: dict[int, _Found] = {}

    def unfinished(self) -> list[int]:
        """The numbers of the tasks that have not ended."""
        return [number for number, found in self._tasks.items() if found.status in UNFINISHED]

    def kept(self, keep: int, now: float, codec: Codec) -> StoredTasks:
        """The tasks that must be remembered."""
        tasks = self._tasks
        ends = (
            End(number, found.status, found.at, found.window)
            for number, found in tasks.items()
            if found.status not in UNFINISHED
        )
        numbers = kept_numbers(tasks, ends, keep, now)
        return StoredTasks([tasks[number].lines for number in numbers], codec)

    def take(self, raw: bytes, intact: bool | None) -> bool:
        """Read one line; returns whether it could be read."""
        found = _BEGINNING.match(raw) if intact else None
        if found is None:
            return self._take_whole(raw)
        kind, at, digits, end, window = found.groups()
        number = int(digits)
        if kind == b"submit":
            if window is None and b'"idempotency_key"' in raw:
                return self._take_whole(raw)
            runs = raw.endswith(b',"running":true', 0, -CRC_SIZE)
            if not runs and b'"running":' in raw:
                return self._take_whole(raw)  # somewhere inside, and perhaps not ours
            status = "running" if runs else "queued"
            self._tasks[number] = _Found(raw, status, None if window is None else _said(window))
            return True
        if kind == b"end" and end not in _WORDS:
            return self._take_whole(raw)
        task = self._tasks.get(number)
        if task is None:
            task = self._tasks[number] = _Found(b"", "queued", None)
        if task.status in UNFINISHED:
            task.lines += raw
            if kind == b"end":
                task.status, task.at = _WORDS[end], float(at)
                if window is not None and task.window is not None:
                    task.window = _said(window)
            else:
                task.status = "running" if kind == b"start" else "queued"
        return True

    def _take_whole(self, raw: bytes) -> bool:
        """The same by reading all of it, with the code that folds."""
        try:
            content = json.loads(raw.decode())
            number = content.get("task")
            known = self._tasks.get(number) if type(number) is int else None
            scratch = History()
            if known is not None:
                scratch.tasks[number] = {**submitted(number, 0.0, {}), "status": known.status}
            take(scratch, content)
        except Exception:  # see `journal.fold`
            return False
        if scratch.writer is not None:
            self.history.writer = scratch.writer
        for number, task in scratch.tasks.items():
            if content["kind"] == "submit":
                self._tasks[number] = _Found(raw, task["status"], window_of(task["about"]))
            elif known is None or known.status in UNFINISHED:
                found = known or self._tasks.setdefault(number, _Found(b"", "queued", None))
                found.lines += raw
                found.status, found.at = task["status"], task["finished_at"] or 0.0
                if found.window is not None:
                    found.window = content.get("window", found.window)
        return True


def scan(lines: Iterable[bytes]) -> Scan:
    """Find the tasks of a journal. Each line comes with its newline. See `journal.fold`."""
    found = Scan()
    walk(found.history, lines, found.take)
    return found


class Brief(NamedTuple):
    """What a pool must know of every task that it finds."""

    task: int
    status: str
    finished_at: float | None
    about: Mapping[str, Any]


class StoredTasks(Sequence[StoredTask]):
    """Tasks as their lines, by number. Each is read when it is asked for, and again when it is asked for again."""

    __slots__ = ("_codec", "_tasks", "types")

    def __init__(self, tasks: Sequence[bytes], codec: Codec) -> None:
        self._tasks = tasks
        self._codec: Codec = codec
        self.types: ResultTypes = LOADED
        """Finds the classes of results."""

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> StoredTask: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredTask]: ...
    def __getitem__(self, index: int | slice) -> StoredTask | list[StoredTask]:
        if isinstance(index, slice):
            return [self._read(lines) for lines in self._tasks[index]]
        return self._read(self._tasks[index])

    def __iter__(self) -> Iterator[StoredTask]:
        return map(self._read, self._tasks)

    def __repr__(self) -> str:
        return f"<{len(self)} stored tasks>"

    def briefs(self) -> Iterator[Brief]:
        """What is known of each without decoding its result."""
        for lines in self._tasks:
            yield _brief(lines)

    def _read(self, lines: bytes) -> StoredTask:
        task = fold_lines(lines)
        return {**task, "result": decode(task["result"], codec=self._codec, types=self.types)}


def _brief(lines: bytes) -> Brief:
    """Of the first line of a task and the beginning of its last, where they are as usual."""
    found = _BEGINNING.match(lines, lines.rfind(b"\n", 0, -1) + 1)
    if found is not None and found[1] == b"end" and found[4] in _WORDS and lines.startswith(b'{"kind":"submit"'):
        about = json.loads(lines[: lines.index(b"\n")]).get("about", {})
        if found[5] is not None:
            about = {**about, "window": _said(found[5])}
        return Brief(int(found[3]), _WORDS[found[4]], float(found[2]), about)
    task = fold_lines(lines)
    return Brief(task["task"], task["status"], task["finished_at"], task["about"])
