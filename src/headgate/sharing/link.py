"""Carries the messages of one pool about one shared state: one under way at a time, sent again until it is answered.

`Sharer` decides what is said and what an answer means; everything around that is here: a message that waits for the one
before it, a lease that was lost meanwhile, a store that cannot be reached or cannot write, a state that cannot be used,
a forked child, a pool that is gone.

The answers come in the thread of the store. A pool has no end: it is dropped. So nothing here holds the sharer: the
store holds a listener, which holds the link weakly. When the link is gone, the listener notices at its next call, and
says that the pool has left.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Protocol

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import PoolClosed, StoreUnreachable
from headgate.sharing.protocol import Kind, Message, Reply, exchange
from headgate.sharing.states import ClockOffset, SharedState, Step, timed


class Sharer(Protocol):
    """What one pool shares. All but `carry_out` and `warn` are called with the lock held."""

    def message(self, now: float, *, looks: bool) -> Any | None:
        """What is to be told; None: nothing. `looks`: an answer is wanted in any case."""
        ...

    def take(self, said: Any, told: Any, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        """Take the answer to a message. Not `is_current`: the lease was lost since, so what was granted is not ours.

        Returns whether there may be something to tell now.
        """
        ...

    def failed(self, said: Any) -> None:
        """Note that a message may not have arrived: it is to be told again."""

    def forget(self, now: float, *, forked: bool = False) -> None:
        """Hold nothing any more: this process takes part under a new id, or is a forked child."""

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        """Note that the store does not answer, or does again. Without `why` nobody need hear of it."""

    def carry_out(self) -> None:
        """Do what follows from the last calls. Without the lock, in the thread of the store."""

    def warn(self, what: str) -> None:
        """Log this. Called once for each text."""


class Link:
    """Shares one state of a store for a sharer."""

    def __init__(
        self, sharer: Sharer, store: SharedState, key: str, kind: Kind[Any], lock: threading.RLock, lost: str
    ) -> None:
        """`lost` says what becomes of the sharer when the state cannot be shared any more.

        Nothing is sent before `start`.
        """
        self._sharer = weakref.ref(sharer)
        self._store = store
        self._key = key
        self._kind = kind
        self._lock = lock
        self._lost = lost
        self._token = clock.token()[:12]
        self._member: str | None = None  # the id of this process when it was last answered
        self._busy = True  # a message is under way
        self._looks = False  # an answer is wanted even if there is nothing to tell
        self._again = False  # something happened since the message was made
        self._leases_lost = 0
        self._unreachable = False
        self.is_stopped: bool = False
        """Is nothing shared any more?"""
        self._warned: set[str] = set()
        _living.add(self)

    @property
    def is_reachable(self) -> bool:
        """Whether the store answers, as far as is known."""
        return not self.is_stopped and not self._unreachable

    def start(self, then: Callable[[], object] | None = None) -> Callable[[], None]:
        """Take part, and call `then` when the first answer is there. Returns what stops listening."""
        leaving = _step(self._kind, Message(self._token, leaves=True))
        listener = _Listener(weakref.ref(self), self._store, self._key, leaving)
        listener.stop = self._store.listen(self._key, listener)
        with self._lock:
            self._busy = False
        self.send(looks=True, then=then)
        return listener.stop

    def note(self) -> None:
        """Have this sent by the next `send_due`. With the lock held."""
        _due.add(self)

    @property
    def is_due(self) -> bool:
        """Is there something to send that was not sent?"""
        return self in _due

    def send(self, *, looks: bool = False, then: Callable[[], object] | None = None) -> None:
        """Send what is to be told, unless a message is under way: then as soon as that is answered."""
        nested = self._lock._is_owned()  # type: ignore[attr-defined]  # a finaliser in the middle of a transition
        with self._lock:
            _due.discard(self)
            self._looks = self._looks or looks
            self._again = True
            sharer = self._sharer()
            if self._busy or self.is_stopped or nested or sharer is None:
                return
            self._again = False
            body = sharer.message(clock.now(), looks=self._looks)
            if body is None:
                return
            self._busy, self._looks = True, False
            message, lost = Message(self._token, self._member, body), self._leases_lost
        try:
            future = self._store.transact(self._key, _step(self._kind, message))
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(partial(_answered, weakref.ref(self), body, lost, then))

    # -- what the store tells ------------------------------------------------------------------------------------------

    def answered(self, said: Any, lost: int, future: Future[tuple[Reply, ClockOffset]]) -> None:
        """Take the answer to a message. `lost`: how many leases had been lost when it was sent."""
        sharer = self._sharer()
        if sharer is None:
            return
        try:
            reply, offset = future.result()
        except (Exception, CancelledError) as error:
            self._failed(sharer, said, error)
            return
        if not reply.is_usable:
            self._stop(sharer, f"its state in the store cannot be used: {reply.trouble}")
            return
        with self._lock:
            self._busy = False
            now, is_current = clock.now(), lost == self._leases_lost
            if self._unreachable:
                self._unreachable = False
                sharer.set_alone(now, alone=False)
            if is_current and self._member != reply.member:
                sharer.forget(now)
                self._member = reply.member
            again = sharer.take(said, reply.body, offset, now, is_current=is_current)
            again = again or self._again or not is_current or self.is_due
        sharer.carry_out()
        if reply.trouble is not None:
            self.warn(f"its state in the store was unreadable ({reply.trouble}) and is begun anew")
        self._warned.discard("failed")
        if again:
            self.send(looks=not is_current)

    def lease_lost(self) -> None:
        """Note that what this process held belongs to others."""
        if (sharer := self._sharer()) is not None:
            with self._lock:
                self._leases_lost += 1
                self._member = None
                sharer.forget(clock.now())
            sharer.carry_out()
            self.send(looks=True)

    def unreachable(self, error: Exception) -> None:
        """Go on with what is known."""
        if (sharer := self._sharer()) is not None:
            with self._lock:
                if not self._unreachable:
                    self._unreachable = True
                    sharer.set_alone(clock.now(), alone=True, why=error)
            sharer.carry_out()

    def after_fork(self) -> None:
        """Take part as a process of its own: what was granted is the parent's."""
        self._busy = self._again = False
        self._leases_lost += 1
        self._member = None
        if (sharer := self._sharer()) is not None:
            sharer.forget(clock.now(), forked=True)

    def _failed(self, sharer: Sharer, said: Any, error: BaseException) -> None:
        with self._lock:
            self._busy = False
            sharer.failed(said)
        if isinstance(error, PoolClosed):
            self._stop(sharer, None if self._is_over() else f"its store cannot be used: {redact(str(error))}")
        elif isinstance(error, StoreUnreachable):
            self.unreachable(error)
        elif "failed" not in self._warned:  # tried again with the next news, and when the store says to look
            self._warned.add("failed")
            self.warn(f"what it learned could not be stored: {redact(str(error))}")

    def _is_over(self) -> bool:
        """Whether the program closed the store, or ends. Otherwise a store is refused that could not start a thread."""
        return getattr(self._store, "is_closed", True) or not threading.main_thread().is_alive()

    def _stop(self, sharer: Sharer, why: str | None) -> None:
        """Share nothing any more, and warn of it; without a reason nobody needs to be warned."""
        with self._lock:
            self._busy, self.is_stopped = False, True
            sharer.set_alone(clock.now(), alone=True)
        sharer.carry_out()
        if why is not None:
            self.warn(f"{why}; {self._lost}")

    def warn(self, what: str) -> None:
        """Have the sharer log this, once."""
        sharer = self._sharer()
        if sharer is not None and what not in self._warned:
            self._warned.add(what)
            sharer.warn(what)


class _Listener:
    """What the store calls. Leaves when the link is gone."""

    def __init__(self, link: weakref.ref[Link], store: SharedState, key: str, leaving: Step) -> None:
        self._link = link
        self._store = weakref.ref(store)  # a store that only the pool holds is dropped with it
        self._key = key
        self._leaving = leaving
        self.stop: Callable[[], None] = _nothing

    def woken(self) -> None:
        link = self._link()
        if link is not None:
            link.send(looks=True)
        else:
            self._leave()

    def lost(self) -> None:
        link = self._link()
        if link is not None:
            link.lease_lost()

    def unreachable(self, error: Exception) -> None:
        link = self._link()
        if link is not None:
            link.unreachable(error)

    def _leave(self) -> None:
        stop, self.stop = self.stop, _nothing
        if stop is not _nothing:
            stop()
            store = self._store()
            if store is not None:
                store.transact(self._key, self._leaving)


def _nothing() -> None:
    pass


def _step(kind: Kind[Any], message: Message) -> Step:
    return timed(lambda text, seen: exchange(kind, text, seen, message), clock.now())


def _answered(
    link: weakref.ref[Link],
    said: Any,
    lost: int,
    then: Callable[[], object] | None,
    future: Future[tuple[Reply, ClockOffset]],
) -> None:
    known = link()
    if known is not None:
        known.answered(said, lost, future)
    if then is not None:
        then()


# -- what is to be sent soon, noted with the lock held and sent when it is not -----------------------------------------

_due: set[Link] = set()
_living: weakref.WeakSet[Link] = weakref.WeakSet()


def send_due() -> None:
    """Send what was noted. Not with a lock held."""
    while _due:
        try:
            link = _due.pop()
        except KeyError:
            return  # another thread was quicker
        link.send()


def _after_fork() -> None:
    _due.clear()
    for link in list(_living):
        link.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
