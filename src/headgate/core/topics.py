"""One event stream, many listeners.

Every transition of every pool emits one frozen event (`core.events`). Logging, metrics, traces and test captures
subscribe; nothing else in headgate reports what happens. A place that may emit asks ``if topic.listeners:`` first, so
an event nobody listens to is never made: an unobserved pool pays for one attribute read and one truth test.

Topics are dotted names, and a subscriber of ``"resources"`` hears ``"resources.health"`` too. Listeners run at once, in
the thread where the event happened, after the pool has let go of its lock: they may call the pool. One that raises is
logged and the next still hears. Subscribing swaps a tuple, so emitting takes no lock.
"""

from __future__ import annotations

import threading

from headgate.errors import InvalidType

TYPE_CHECKING = False  # typing's own, without importing typing: every program that uses headgate pays for this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from headgate.core.events import Event

    Listener: TypeAlias = Callable[[Any], object]  # not Event: one for a single topic may name what it gets there

__all__ = ["Topic", "subscribe", "topic_named"]


class Topic:
    """The listeners of one topic. Emitters hold it and test `listeners` before they make an event."""

    __slots__ = ("listeners", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.listeners: tuple[Listener, ...] = ()

    def emit(self, event: Event) -> None:
        """Tell every listener, in the order they subscribed."""
        for listener in self.listeners:
            try:
                listener(event)
            except BaseException as error:
                # A CancelledError of the listener's own must not end whoever emits. (By name: asyncio is not imported.)
                if not isinstance(error, Exception) and type(error).__name__ != "CancelledError":
                    raise
                _report(listener, event)

    def __repr__(self) -> str:
        return f"<Topic {self.name!r}, {len(self.listeners)} listeners>"


_lock = threading.RLock()  # the collector may run an unsubscribe in the middle of a subscribe
_topics: dict[str, Topic] = {}
_subscriptions: dict[object, tuple[Listener, str | None]] = {}


def topic_named(name: str) -> Topic:
    """The one topic of this name, made at first use."""
    with _lock:
        topic = _topics.get(name)
        if topic is None:
            topic = _topics[name] = Topic(name)
            _fill(topic)
        return topic


def subscribe(callback: Listener, topic: str | None = None) -> Callable[[], None]:
    """Call `callback(event)` for every event of `topic` and of those below it, or of all; returns ``unsubscribe``."""
    if not callable(callback):
        raise InvalidType(
            f"callback must be callable, got {type(callback).__name__}",
            remedy="Pass a function that takes one event.",
        )
    code = getattr(callback, "__code__", None)
    if code is not None and code.co_flags & 0x380:  # CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR
        raise InvalidType(
            f"callback must be a plain function, got the async function {callback.__qualname__}",
            remedy="Listeners run at once where the event happens: start a task in it, or put the event into a queue.",
        )
    if topic is not None and not isinstance(topic, str):
        raise InvalidType(
            f"topic must be a string or None, got {type(topic).__name__}",
            remedy='Name a topic, such as "resources.health", or leave it out to hear everything.',
        )
    ticket = object()
    with _lock:
        _subscriptions[ticket] = (callback, topic)
        _refill()

    def unsubscribe() -> None:
        with _lock:
            if _subscriptions.pop(ticket, None) is not None:
                _refill()

    return unsubscribe


def _refill() -> None:
    for topic in list(_topics.values()):
        _fill(topic)


def _fill(topic: Topic) -> None:
    topic.listeners = tuple(
        callback for callback, wanted in list(_subscriptions.values()) if wanted is None or _covers(wanted, topic.name)
    )


def _covers(wanted: str, name: str) -> bool:
    return name == wanted or name.startswith(wanted + ".")


def _report(listener: Listener, event: Event) -> None:
    from headgate.core.redaction import log_exception

    # By name: the repr of a bound method shows its whole object, which may hold secrets.
    name = getattr(listener, "__qualname__", type(listener).__qualname__)
    log_exception("headgate.events", "listener %s failed on the event %r", name, event.name)
