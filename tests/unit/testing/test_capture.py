"""Captured events read as a story."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from headgate.core.events import Event
from headgate.core.topics import topic_named
from headgate.errors import InvalidType
from headgate.testing import Captured, capture_events


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Event):
    name: ClassVar[str] = "opened"
    topic: ClassVar[str] = "door"


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked(Event):
    name: ClassVar[str] = "locked"
    topic: ClassVar[str] = "door.lock"
    key: str


def happen(*events: Event) -> None:
    for event in events:
        topic = topic_named(event.topic)
        if topic.listeners:
            topic.emit(event)


OPENED, LOCKED = Opened(at=1.0), Locked(at=2.0, key="brass")


def test_events_are_kept_in_order() -> None:
    with capture_events() as events:
        happen(OPENED, LOCKED)
    assert events == [OPENED, LOCKED]
    assert events.names == ["opened", "locked"]
    assert events.last is LOCKED
    assert events.of(Locked)[0].key == "brass"
    assert events.of(Event) == [OPENED, LOCKED]


def test_a_topic_holds_those_below_it_and_no_others() -> None:
    with capture_events("door") as door, capture_events("door.lock") as lock, capture_events("window") as window:
        happen(OPENED, LOCKED)
    assert (door.names, lock.names, window.names) == (["opened", "locked"], ["locked"], [])


def test_nothing_is_heard_outside_the_block() -> None:
    with capture_events() as events:
        pass
    happen(OPENED)
    with pytest.raises(LookupError), capture_events() as others:
        raise LookupError
    happen(OPENED)
    assert events == others == []
    assert topic_named("door").listeners == ()


def test_clear_begins_anew() -> None:
    with capture_events() as events:
        happen(OPENED)
        events.clear()
        happen(LOCKED)
    assert events.names == ["locked"]


def test_the_last_of_nothing() -> None:
    with pytest.raises(AssertionError, match="no event was captured"):
        _ = Captured().last


def test_repr_tells_the_story() -> None:
    assert repr(Captured()) == "<Captured 0 events>"
    assert repr(Captured([OPENED])) == "<Captured 1 event: opened>"
    assert repr(Captured([OPENED, LOCKED])) == "<Captured 2 events: opened, locked>"


def test_a_bad_topic_is_refused() -> None:
    with pytest.raises(InvalidType, match="topic"), capture_events(3):  # type: ignore[arg-type]
        pass
