"""Carries the messages of one pool about one shared state: one under way at a time, sent again until it is answered.

`Sharer` decides what is said and what an answer means; everything around that is here: a message that waits for the one
before it, a lease that was lost meanwhile, a store that cannot be reached or cannot write, a state that cannot be used,
a forked child, a pool that is gone.

The answers come in the thread of the store, and are passed on to where the sharer lives. A pool has no end: it is
dropped. So nothing here holds the sharer: the store holds a listener, which holds the link weakly. When the link is
gone, the listener notices at its next call, and says that the pool has left.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import PoolClosed, StoreFormatTooNew, StoreUnreachable, StoreWriteFailed
from headgate.sharing.protocol import Kind, Message, Reply, exchange
from headgate.sharing.states import ClockOffset, SharedState, Step, timed

CONNECT: Final = 10.0
"""Seconds that the constructor of a pool waits for its store."""

_ONCE: Final = 1.0
"""Seconds for which a sharer that was told to look, and has not looked yet, is not told again."""

Then: TypeAlias = Callable[[BaseException | None], object]
"""Called when a message was answered, or with the reason why it was not."""


class Sharer(Protocol):
    """What one pool shares. All but `carry_out` and `warn` are called with the lock held."""

    def message(self, now: float, *, looks: bool) -> Any | None:
        """What is to be told; None: nothing, or not yet. `looks`: an answer is wanted in any case."""
        ...

    def take(self, said: Any, told: Any, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        """Take the answer to a message. Not `is_current`: the lease was lost since, so what was granted is not ours.

        Returns whether there may be something to tell now.
        """
        ...

    def failed(self, said: Any, error: BaseException) -> None:
        """Note that a message may not have arrived: it is to be told again."""

    def forget(self, now: float, *, forked: bool = False) -> None:
        """Hold nothing any more: this process takes part under a new id, or is a forked child."""

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        """Note that the store does not answer, or does again. Without `why` nobody need hear of it."""

    def carry_out(self) -> None:
        """Do what follows from the last calls. Without the lock, and before anything else is sent."""

    def warn(self, what: str) -> None:
        """Log this. Called once for each text."""


class Answer:
    """Blocks a thread until a message was answered. A `Then`."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._error: BaseException | None = None

    def __call__(self, error: BaseException | None) -> None:
        self._error = error
        self._came.set()

    def wait(self) -> BaseException | None:
        """Return when the answer is there, or why there is none. StoreUnreachable if neither comes."""
        if not self._came.wait(CONNECT):
            raise StoreUnreachable(
                f"the store did not answer within {CONNECT:g} s", remedy="Look for what holds it up, then try again."
            )
        return self._error


class Link:
    """Shares one state of a store for a sharer."""

    def __init__(
        self,
        sharer: Sharer,
        store: SharedState,
        key: str,
        kind: Kind[Any],
        lost: str,
        *,
        lock: threading.RLock | None = None,
        post: Callable[[Callable[[], object]], bool] | None = None,
    ) -> None:
        """`lost` says what becomes of the sharer when the state cannot be shared any more.

        `post` has something called where the sharer lives, and returns False if there is no such place yet; it must not
        hold the sharer. Without it that is the thread of the store, and `lock` protects the sharer.

        Nothing is sent before `start`.
        """
        self._sharer = weakref.ref(sharer)
        self._store = store
        self._key = key
        self._kind = kind
        self._given_lock = lock
        self._lock = threading.RLock() if lock is None else lock
        self._lost = lost
        self._post = _at_once if post is None else post
        self._token = clock.token()[:12]
        self._member: str | None = None  # the id of this process when it was last answered
        self._busy = True  # a message is under way
        self._looks = False  # an answer is wanted even if there is nothing to tell
        self._thens: list[Then] = []  # who waits for the answer to the next message
        self._is_behind = False  # something happened since the last message was made
        self.is_revoked: bool = False
        """Was the lease lost, and the sharer does not know yet? Set in the thread of the store."""
        self._leases_lost = 0
        self._unreachable = False
        self._woken_at = -math.inf  # when the sharer was told to look, if it has not looked since
        self.is_stopped: bool = False
        """Is nothing shared any more?"""
        self.has_left: bool = False
        """Was `leave` called?"""
        self._warned: set[str] = set()
        self._stop_listening = _nothing
        _living.add(self)

    @property
    def is_reachable(self) -> bool:
        """Whether the store answers, as far as is known."""
        return not self.is_stopped and not self._unreachable

    @property
    def is_busy(self) -> bool:
        """Whether a message is under way."""
        return self._busy

    def start(self, then: Then | None = None) -> None:
        """Take part, and call `then` when the first answer is there."""
        leaving = _step(self._kind, Message(self._token, leaves=True))
        listener = _Listener(weakref.ref(self), self._store, self._key, leaving)
        self._stop_listening = listener.stop = self._store.listen(self._key, listener)
        with self._lock:
            self._busy = False
        self.send(looks=True, then=then)

    def note(self) -> None:
        """Have this sent by the next `send_due`. With the lock held."""
        _due.add(self)

    @property
    def is_due(self) -> bool:
        """Is there something to send that was not sent?"""
        return self in _due

    def wait_for_next(self, then: Then) -> None:
        """Have this called when the next message that is made was answered."""
        with self._lock:
            if not self.is_stopped:
                self._thens.append(then)
                return
        then(PoolClosed("the store cannot be used any more"))

    def send(self, *, looks: bool = False, then: Then | None = None) -> None:
        """Send what is to be told, unless a message is under way: then as soon as that is answered."""
        nested = self._lock._is_owned()  # type: ignore[attr-defined]  # a finaliser in the middle of a transition
        if then is not None:
            self.wait_for_next(then)
        with self._lock:
            _due.discard(self)
            self._looks = self._looks or looks
            self._is_behind = True
            sharer = self._sharer()
            if self._busy or self.is_stopped or nested or sharer is None:
                return
            self._is_behind = False
            body = sharer.message(clock.now(), looks=self._looks)
            if body is None:
                return
            self._busy, self._looks = True, False
            thens, self._thens = self._thens, []
            message, lost = Message(self._token, self._member, body), self._leases_lost
        self._transact(message).add_done_callback(partial(_answered, weakref.ref(self), self._post, body, lost, thens))

    def _transact(self, message: Message) -> Future[tuple[Reply, ClockOffset]]:
        try:
            return self._store.transact(self._key, _step(self._kind, message))
        except Exception as error:
            future: Future[tuple[Reply, ClockOffset]] = Future()
            future.set_exception(error)
            return future

    def leave(self, body: Any = None) -> Future[tuple[Reply, ClockOffset]]:
        """Leave with a last message. Returns a future that is done when the store has answered it.

        If the store cannot write that, it is said again whenever the store says to look.
        """
        with self._lock:
            self.is_stopped = self.has_left = True
        future = self._transact(Message(self._token, self._member, body, leaves=True))
        future.add_done_callback(partial(_left, self._stop_listening))
        return future

    def abandon(self) -> None:
        """Stop sending and listening, without a last message."""
        with self._lock:
            self.is_stopped = True
        self._stop_listening()

    # -- what the store tells ------------------------------------------------------------------------------------------

    def answered(self, said: Any, lost: int, thens: list[Then], future: Future[tuple[Reply, ClockOffset]]) -> None:
        """Take the answer to a message. `lost`: how many leases had been lost when it was sent."""
        sharer = self._sharer()
        error: BaseException | None = None
        try:
            if sharer is not None and not self.is_stopped:
                try:
                    reply, offset = future.result()
                except (Exception, CancelledError) as failure:
                    error = failure
                    self._failed(sharer, said, failure)
                else:
                    error = self._take(sharer, said, lost, reply, offset)
        finally:  # also if what a sharer does with the answer raises: whoever waits would wait for ever
            for then in thens:
                then(error)

    def _take(
        self, sharer: Sharer, said: Any, lost: int, reply: Reply, offset: ClockOffset
    ) -> StoreFormatTooNew | None:
        if not reply.is_usable:
            error = StoreFormatTooNew(f"{reply.trouble}", remedy="Update headgate here, or use another store.")
            self._stop(sharer, f"its state in the store cannot be used: {reply.trouble}", error)
            return error
        with self._lock:
            self._busy = False
            now, is_current = clock.now(), lost == self._leases_lost
            if self._unreachable:
                self._unreachable = False
                sharer.set_alone(now, alone=False)
            if is_current and self._member != reply.member:
                sharer.forget(now)
                self._member, self.is_revoked = reply.member, False
            if sharer.take(said, reply.body, offset, now, is_current=is_current) or self.is_due or not is_current:
                self._is_behind = True
            self._looks = self._looks or not is_current
        sharer.carry_out()
        if reply.trouble is not None:
            self.warn(f"its state in the store was unreadable ({reply.trouble}) and is begun anew")
        self._warned.discard("failed")
        if self._is_behind:
            self.send()
        return None

    def woken(self) -> None:
        """Have the sharer look again, at most once a second until it has looked."""
        now = clock.now()
        if now >= self._woken_at + _ONCE:  # the place where the sharer lives may be gone since
            self._woken_at = now
            if not self._post(self._woken):
                self._woken_at = -math.inf

    def _woken(self) -> None:
        self._woken_at = -math.inf
        self.send(looks=True)

    def lease_lost(self) -> None:
        """Note that what this process held belongs to others."""
        with self._lock:
            self._leases_lost += 1
            self._member, self.is_revoked = None, True
        self._post(self._forget)

    def _forget(self) -> None:
        sharer = self._sharer()
        if sharer is not None and self.is_revoked:
            with self._lock:
                self.is_revoked = False
                sharer.forget(clock.now())
            sharer.carry_out()
            self.send(looks=True)

    def unreachable(self, error: Exception) -> None:
        """Go on with what is known."""
        self._post(partial(self._cannot_reach, error))

    def _cannot_reach(self, error: Exception) -> None:
        sharer = self._sharer()
        if sharer is not None:
            with self._lock:
                thens, self._thens = self._thens, []
                if not self._unreachable:
                    self._unreachable = True
                    sharer.set_alone(clock.now(), alone=True, why=error)
            sharer.carry_out()
            for then in thens:
                then(error)

    def after_fork(self) -> None:
        """Take part as a process of its own: what was granted is the parent's."""
        if self._given_lock is None:
            self._lock = threading.RLock()
        self._busy = self._is_behind = self.is_revoked = False
        self._woken_at = -math.inf
        self._thens.clear()
        self._leases_lost += 1
        self._member = None
        if (sharer := self._sharer()) is not None:
            sharer.forget(clock.now(), forked=True)

    def _failed(self, sharer: Sharer, said: Any, error: BaseException) -> None:
        with self._lock:
            self._busy = False
            sharer.failed(said, error)
        if isinstance(error, PoolClosed):
            why = None if self._is_over() else f"its store cannot be used: {redact(str(error))}"
            self._stop(sharer, why, error if why else None)
        elif isinstance(error, StoreUnreachable):
            self._cannot_reach(error)
        else:
            sharer.carry_out()
            if "failed" not in self._warned:  # tried again with the next news, and when the store says to look
                self._warned.add("failed")
                self.warn(f"what it learned could not be stored: {redact(str(error))}")

    def _is_over(self) -> bool:
        """Whether the program closed the store, or ends. Otherwise a store is refused that could not start a thread."""
        return getattr(self._store, "is_closed", True) or not threading.main_thread().is_alive()

    def _stop(self, sharer: Sharer, why: str | None, error: BaseException | None) -> None:
        """Share nothing any more, and warn of it; without a reason nobody needs to be warned."""
        with self._lock:
            self._busy, self.is_stopped = False, True
            thens, self._thens = self._thens, []
            sharer.set_alone(clock.now(), alone=True)
        sharer.carry_out()
        if why is not None:
            self.warn(f"{why}; {self._lost}")
        for then in thens:
            then(error or PoolClosed("the store was closed"))

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
        if link is not None and not link.has_left:
            link.woken()
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
        store = self._store()
        if store is not None:
            store.transact(self._key, self._leaving).add_done_callback(partial(_left, self.stop))


def _left(stop: Callable[[], None], future: Future[Any]) -> None:
    """Hear nothing more, unless the store could not write that the pool has left."""
    if future.cancelled() or not isinstance(future.exception(), StoreWriteFailed):
        stop()


def _nothing() -> None:
    pass


def _at_once(call: Callable[[], object]) -> bool:
    call()
    return True


def _step(kind: Kind[Any], message: Message) -> Step:
    return timed(lambda text, seen: exchange(kind, text, seen, message), clock.now())


def _answered(
    link: weakref.ref[Link],
    post: Callable[[Callable[[], object]], bool],
    said: Any,
    lost: int,
    thens: list[Then],
    future: Future[tuple[Reply, ClockOffset]],
) -> None:
    known = link()
    if known is not None:
        call = partial(known.answered, said, lost, thens, future)
        if not post(call):  # there is no place yet, and a thread waits for it
            call()


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
