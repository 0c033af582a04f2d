"""Collects the events that are emitted in a block, for tests."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

from headgate.core.events import Event
from headgate.core.topics import subscribe

__all__ = ["Captured", "capture_events"]

E = TypeVar("E", bound=Event)


class Captured(list[Event]):
    """Events in the order they happened."""

    @property
    def names(self) -> list[str]:
        """The names of the events, in order."""
        return [event.name for event in self]

    @property
    def last(self) -> Event:
        """Return the newest event; AssertionError: there is none."""
        if not self:
            raise AssertionError("no event was captured")
        return self[-1]

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one type, or of its subclasses."""
        return [event for event in self if isinstance(event, kind)]

    def __repr__(self) -> str:
        return f"<Captured {len(self)} event{'s' * (len(self) != 1)}{': ' if self else ''}{', '.join(self.names)}>"


@contextmanager
def capture_events(topic: str | None = None) -> Generator[Captured, None, None]:
    """Collect what is emitted inside the block, of `topic` and those below it, or all: ``with ... as events:``."""
    events = Captured()
    unsubscribe = subscribe(events.append, topic)
    try:
        yield events
    finally:
        unsubscribe()
