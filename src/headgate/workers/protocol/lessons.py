"""Lessons about resources, written into the frames of a worker and read from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from headgate.core.checks import is_finite
from headgate.core.lessons import Lesson
from headgate.workers.protocol.wire.wire_pb2 import Lesson as Wired
from headgate.workers.protocol.wire.wire_pb2 import Result, Yield


def write_lessons(frame: Result | Yield, lessons: Iterable[Lesson]) -> None:
    """Add lessons to the end or to an item of a call."""
    for lesson in lessons:
        written = frame.lessons.add(resource=lesson.resource_id)
        if lesson.rest is not None:
            written.rest = lesson.rest
            if lesson.reason is not None:
                written.reason = lesson.reason
        if lesson.spent is not None:
            written.spent, read, made = lesson.spent
            if read is not None:
                written.input = read
            if made is not None:
                written.output = made
        if lesson.status is not None:
            written.status = lesson.status
        for name, value in lesson.headers:
            written.headers.add(name=name, value=value)


def length_of_lessons(frame: Result | Yield) -> int:
    """The bytes that the lessons of a frame take in its message."""
    return sum(lesson.ByteSize() for lesson in frame.lessons)


def lessons_of(written: Iterable[Wired]) -> Sequence[Lesson]:
    """Read the lessons of a frame. Numbers that no resource could have told are left out."""
    return [_read(lesson) for lesson in written]


def _read(lesson: Wired) -> Lesson:
    total = _number(lesson, "spent")
    return Lesson(
        lesson.resource,
        _number(lesson, "rest"),
        lesson.reason if lesson.HasField("reason") else None,
        None if total is None else (total, _number(lesson, "input"), _number(lesson, "output")),
        lesson.status if lesson.HasField("status") else None,
        tuple((header.name, header.value) for header in lesson.headers),
    )


def _number(lesson: Wired, name: Literal["rest", "spent", "input", "output"]) -> float | None:
    number: float = getattr(lesson, name)
    return number if lesson.HasField(name) and is_finite(number) and number >= 0 else None
