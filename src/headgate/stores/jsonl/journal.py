"""The meaning of the lines of a journal, and how reading them gives the state of each task.

A journal is a file of JSON objects, one to a line. The first line names the format and the pool, every run of the pool
adds one of kind "open", and after it come the entries of `port.Entry` as they happened:

    {"headgate":"journal","format":1,"pool_id":"p-1","codec":"json","about":{"name":"pr-review"},"crc":"..."}
    {"kind":"open","at":1764028800.0,"pid":4711,"host":"mill","about":{"name":"pr-review"},"crc":"..."}
    {"kind":"submit","at":1764028801.2,"task":1,"about":{"idempotency_key":"pr-7"},"running":true,"crc":"..."}
    {"kind":"end","at":1764028803.9,"task":1,"status":"completed","result":42,"crc":"..."}

`fold` reads lines into a `History`. Nothing else knows what they mean, but for `scanning`, which finds the lines of
each task without reading them whole, and `compaction`, which copies the lines of the tasks that are still wanted and
leaves out the others.

The format is still 1 since lines have checksums: an older release reads them as they are, and does not compare.

What a broken file means
------------------------
A line is whole when it ends in a newline, its checksum fits (if it has one), and it reads as one of these objects. An
entry is acknowledged after its group is on the disk, and groups follow each other, so after a crash only the last group
can be broken, and nobody was told that it was there. A last line without its newline is therefore cut off: what is
written next would become part of it. Any other broken line is a block that the disk lost or changed, of that group or
of an older one, or was edited by hand: the lines around it are still good, so they count, and it is passed over, with a
warning. It stays in the file, also at the end, until the file is compacted: somebody may be able to mend it.

Finished once, finished for ever: entries of a task after its first "end" change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from headgate.core.key_windows import holds_key
from headgate.stores.codec import Codec, decode
from headgate.stores.jsonl.lines import FORMAT, HEAD, OPEN, Writer, is_intact, window_of
from headgate.stores.port import StoredTask

UNFINISHED: Final = frozenset({"queued", "running"})


class Header(NamedTuple):
    """The first line of a journal."""

    format: int
    pool_id: str
    is_intact: bool = True
    """Does its checksum fit, if it has one?"""


class Bad(NamedTuple):
    """A line that cannot be read."""

    line: int
    """The number of the line; the first is 1."""
    size: int
    """The length of the line in bytes."""
    is_damaged: bool = False
    """Is its checksum wrong? Else it cannot be read at all."""


@dataclass(slots=True)
class History:
    """The contents of a journal after reading all its lines."""

    header: Header | None = None
    """None: this is no journal, or one that was never written whole."""
    unwritten: bool = False
    """Nothing, or the torn beginning of a first line."""
    writer: Writer | None = None
    stale_after: float | None = None
    """What the writer's pool was made with, if it said."""
    tasks: dict[int, StoredTask] = field(default_factory=dict)
    """By number. Their results are still encoded."""
    newest_at: float = float("-inf")
    """When the last thing happened."""
    beat_at: float = float("-inf")
    """When the writer last reported that it is alive."""
    lines: int = 0
    size: int = 0
    """Bytes up to the end of the last line that has one."""
    skipped: list[Bad] = field(default_factory=list)
    """Bad lines that are passed over."""
    torn: list[Bad] = field(default_factory=list)
    """The last line, if it has no end, or a first one that is no header."""


# -- reading ----------------------------------------------------------------------------------------------------------


def fold(lines: Iterable[bytes]) -> History:
    """Read a journal from its first line on. Each line comes with its newline; one without is torn.

    Stops after a header of a newer format, or one that is none.
    """
    history = History(unwritten=True)
    walk(history, lines, lambda raw, _: _took(history, raw))
    return history


def fold_lines(lines: bytes) -> StoredTask:
    """The one task that these lines are about. They have been read before, and were good."""
    history = History()
    for raw in lines.split(b"\n")[:-1]:
        take(history, json.loads(raw))
    (task,) = history.tasks.values()
    return task


def walk(history: History, lines: Iterable[bytes], took: Callable[[bytes, bool | None], bool]) -> None:
    """Note in `history` which lines are good and which are bad.

    `took` is given each line after the first whose checksum is not wrong, and whether it fits (None: it has none). It
    says whether it could read the line.
    """
    number = 0
    for number, raw in enumerate(lines, 1):
        if number == 1:
            history.header = _header(raw)
            history.unwritten = not raw.endswith(b"\n") and HEAD.startswith(raw.rstrip(b"\0")[: len(HEAD)])
            if history.header is None or history.header.format > FORMAT:
                history.torn.append(Bad(1, len(raw)))
                break
            if not history.header.is_intact:
                history.skipped.append(Bad(1, len(raw), is_damaged=True))
        elif not raw.endswith(b"\n"):
            history.torn.append(Bad(number, len(raw)))
            continue
        elif (intact := is_intact(raw)) is False or not took(raw, intact):
            history.skipped.append(Bad(number, len(raw), intact is False))
        history.size += len(raw)
    history.lines = number


def last_writer(lines: Iterable[bytes]) -> Writer | None:
    """Who opened it last. Quicker than `fold`, for one who has only this question."""
    opened = [raw for raw in lines if raw.startswith(OPEN)]
    history = History()
    return history.writer if opened and _took(history, opened[-1]) else None


def _header(raw: bytes) -> Header | None:
    try:
        content = json.loads(raw.decode())
        if content["headgate"] != "journal" or not raw.endswith(b"\n"):
            return None
        return Header(_whole(content["format"]), str(content["pool_id"]), is_intact(raw) is not False)
    except Exception:
        return None


def _took(history: History, raw: bytes) -> bool:
    try:
        take(history, json.loads(raw.decode()))
    except Exception:  # not JSON, or JSON that is none of ours: RecursionError, KeyError, TypeError ...
        return False
    return True


def take(history: History, content: dict[str, Any]) -> None:
    """One line. Everything that could fail comes before the first change."""
    kind, at, tasks = content["kind"], float(content["at"]), history.tasks
    if kind == "open":
        history.writer = Writer(_whole(content["pid"]), str(content["host"]), at)
        said = content.get("about", {}).get("stale_after")
        history.stale_after = float(said) if type(said) in (int, float) and said > 0 else None
    elif kind == "beat":
        history.beat_at = at
    elif kind == "submit":
        task = submitted(_whole(content["task"]), at, content.get("about", {}), running=content.get("running") is True)
        tasks[task["task"]] = task
    elif kind in ("start", "requeue", "end"):
        number = _whole(content["task"])
        # The line of its "submit" may be lost: its number must not be given to another task.
        task = tasks.get(number) or submitted(number, at, {})
        if task["status"] in UNFINISHED:
            _happen(task, content, at)
        tasks[number] = task
    else:
        raise ValueError(kind)
    history.newest_at = max(history.newest_at, at)


def submitted(number: int, at: float, about: Mapping[str, Any], *, running: bool = False) -> StoredTask:
    """Make a task with these fields."""
    return {
        "task": number,
        "about": dict(about),
        "status": "running" if running else "queued",
        "submitted_at": at,
        "attempt": 1 if running else 0,
        "started_at": at if running else None,
        "finished_at": None,
        "result": None,
        "error": None,
        "reason": None,
        "policy": None,
    }


def _happen(task: StoredTask, content: Mapping[str, Any], at: float) -> None:
    kind = content["kind"]
    if kind == "start":
        task["attempt"] = _whole(content.get("attempt", task["attempt"] + 1))
        task["status"] = "running"
        task["started_at"] = at
    elif kind == "requeue":
        task["status"] = "queued"
    else:
        task["status"] = str(content["status"])
        task["finished_at"] = at
        task["result"] = content.get("result")
        task["error"] = content.get("error")
        task["reason"] = content.get("reason")
        task["policy"] = content.get("policy")
        if "window" in content:
            task["about"] = {**task["about"], "window": content["window"]}


def _whole(number: object) -> int:
    if type(number) is not int:
        raise TypeError(number)
    return number


# -- what is wanted of it ---------------------------------------------------------------------------------------------


def unfinished(tasks: Iterable[StoredTask]) -> list[int]:
    """The numbers of those that have not ended."""
    return [task["task"] for task in tasks if task["status"] in UNFINISHED]


def decoded(tasks: Iterable[StoredTask], codec: Codec = "json") -> list[StoredTask]:
    """The tasks with their results as Python values."""
    return [{**task, "result": decode(task["result"], codec=codec)} for task in tasks]


def kept(tasks: Mapping[int, StoredTask], keep: int, now: float) -> list[StoredTask]:
    """Those that must be remembered, by number: unfinished, holding an idempotency key, or of the newest `keep`."""
    ends = [
        End(number, task["status"], task["finished_at"] or 0.0, window_of(task["about"]))
        for number, task in tasks.items()
        if task["status"] not in UNFINISHED
    ]
    return [tasks[number] for number in kept_numbers(tasks, ends, keep, now)]


def kept_numbers(tasks: Iterable[int], ends: Iterable[End], keep: int, now: float) -> list[int]:
    """The numbers of those that must be remembered, of these tasks, of which some have ended so.

    The highest number stays whatever it is: the next run counts on from it, and no number is given twice.
    """
    forgotten = forgettable(ends, keep, now) - {max(tasks, default=0)}
    return [number for number in sorted(tasks) if number not in forgotten]


class End(NamedTuple):
    """How a task ended, as far as it matters for how long it is remembered."""

    number: int
    status: str
    at: float
    window: Any
    """How long it holds its idempotency key; None when it has none."""


def forgettable(ends: Iterable[End], keep: int, now: float) -> set[int]:
    """The numbers of those that hold no key, without the `keep` newest."""
    spare = [end for end in ends if not _holds_key(end, now)]
    spare.sort(key=lambda end: (end.at, end.number))
    return {end.number for end in spare[: max(0, len(spare) - keep)]}


def _holds_key(end: End, now: float) -> bool:
    if end.window is None:
        return False
    try:
        return holds_key(end.window, end.status, end.at, now)
    except (KeyError, TypeError):  # a window of a later release
        return True


def viewed(history: History, now: float, stale_after: float, *, owned: bool) -> list[StoredTask]:
    """What one who does not own the journal may say of its tasks, by number. Results are still encoded.

    Nobody owns it: all that is unfinished is stale. Otherwise its signs of life decide, for what runs and what waits.
    """

    def status(task: StoredTask) -> str:
        if task["status"] not in UNFINISHED:
            return task["status"]
        if task["status"] == "queued":
            sign = history.newest_at
        else:
            sign = max(task["started_at"] or task["submitted_at"], history.beat_at)
        return task["status"] if owned and now - sign < stale_after else "stale"

    return [{**task, "status": status(task)} for _, task in sorted(history.tasks.items())]
