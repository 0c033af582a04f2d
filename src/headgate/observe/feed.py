"""The last events of this process, for those who look on, within a budget.

Most topics have few events: health of resources, ends of workers, actions of people. What happens to tasks can be tens
of thousands of events a second, and making them costs more than anything else that looking on costs. So tasks are
listened to only while somebody asks for them, and only for a number of events at a time; then the listener goes until
the next look, and the feed says how it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from headgate.core.events import Event
from headgate.core.redaction import redact
from headgate.core.topics import subscribe

KEPT: Final = 500
BUDGET: Final = 200
"""Events of tasks that are heard between two looks."""
RARE: Final = ("resources.health", "resources.members", "tasks.pools", "workers.lifecycle", "observe.actions")
FREQUENT: Final = ("lifecycle.pool.audit", "workers.tasks")
_WIDEST: Final = 500


class Feed:
    """Keeps the last events, each with a number."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """How many events of each name there were, of the rare topics: of tasks not all are heard."""
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._lock = threading.RLock()  # the collector may run a destructor that emits, in the middle of `since`
        self._number = 0
        self._budget_left = 0
        self._listeners_to_tasks = 0
        self._stops: list[Callable[[], None]] = []
        self._stops_tasks: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to listen."""
        self._stops = [subscribe(self._on_event, topic) for topic in RARE]

    def stop(self) -> None:
        """Stop listening."""
        with self._lock:
            stops, self._stops, self._listeners_to_tasks = self._stops, [], 0
        for stop in stops:
            stop()
        self._unsubscribe_tasks()

    def abandon(self) -> None:
        """In a forked child: listen no more. The lock may be held by a thread that is not there."""
        self._lock = threading.RLock()
        self.stop()

    def want_tasks(self, wanted: bool) -> None:
        """Note that one more, or one less, wants to hear of tasks."""
        with self._lock:
            self._listeners_to_tasks = max(0, self._listeners_to_tasks + (1 if wanted else -1))
        if not self._listeners_to_tasks:
            self._unsubscribe_tasks()

    def renew_budget(self) -> None:
        """Begin a new budget: called with each look."""
        if not self._listeners_to_tasks:
            return
        self._budget_left = BUDGET
        with self._lock:
            if self._stops_tasks or not self._stops:
                return
            self._stops_tasks = [subscribe(self._on_task_event, topic) for topic in FREQUENT]

    def since(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of the last event, and those after `number`, oldest first."""
        with self._lock:
            kept = list(self._events)  # one operation: an event that comes later, from a destructor too, is not in it
        return kept[-1]["seq"] if kept else 0, [event for event in kept if event["seq"] > number]

    def _unsubscribe_tasks(self) -> None:
        with self._lock:
            stops, self._stops_tasks = self._stops_tasks, []
        for stop in stops:
            stop()

    def _on_task_event(self, event: Event) -> None:
        self._budget_left -= 1
        if self._budget_left < 0:
            self._unsubscribe_tasks()
            return
        self._keep(event)

    def _on_event(self, event: Event) -> None:
        with self._lock:
            self.counts[event.name] = self.counts.get(event.name, 0) + 1
        self._keep(event)

    def _keep(self, event: Event) -> None:
        told = {name: _cut(value) for name, value in event.to_dict().items()}
        with self._lock:
            self._number = told["seq"] = self._number + 1
            self._events.append(told)


def _cut(value: object) -> object:
    if isinstance(value, str):
        text = redact(value)
        return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."
    if isinstance(value, dict):
        return {str(name)[:_WIDEST]: _cut(item) for name, item in list(value.items())[:50]}
    return [_cut(item) for item in value[:50]] if isinstance(value, (list, tuple)) else value
