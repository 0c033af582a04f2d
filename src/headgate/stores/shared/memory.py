"""A shared state in memory: for tests, and as the shortest implementation of `SharedState` to read.

Every `member()` plays another process. A step runs at once, in the thread that asks for it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from headgate.core.clock import clock
from headgate.core.shared_state import Listener, Outcome, Seen, Step
from headgate.errors import LeaseLost, PoolClosed


class SharedMemory:
    """The place where the texts are: what a database is to others."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.members: dict[str, MemoryState] = {}
        """The members that are not gone, by id."""
        self.expiries: dict[str, float] = {}
        """When texts may be deleted, by key."""
        self.lock: threading.RLock = threading.RLock()
        self._wakes: deque[Callable[[], None]] = deque()
        self._is_waking = False
        self._made = 0

    def member(self) -> MemoryState:
        """Take part as one more member."""
        return MemoryState(self)

    def sweep(self, now: float) -> None:
        """Delete texts that have expired."""
        for key in [key for key, expires in self.expiries.items() if expires < now]:
            del self.expiries[key]
            self.texts.pop(key, None)

    def new_id(self, state: MemoryState) -> str:
        """Give a member an id that none had before."""
        with self.lock:
            self._made += 1
            name = f"m{self._made}"
            self.members[name] = state
            return name

    def remove(self, member: str) -> None:
        """Let a member be gone, and tell the others to look."""
        with self.lock:
            self.members.pop(member, None)
            others = list(self.members.values())
        self.call(other.wake_all for other in others)

    def call(self, wakes: Iterable[Callable[[], None]]) -> None:
        """Call these one after the other: a listener that answers with a step must not be called inside of another."""
        with self.lock:
            self._wakes.extend(wakes)
            if self._is_waking:
                return
            self._is_waking = True
        while True:
            with self.lock:
                if not self._wakes:
                    self._is_waking = False
                    return
                wake = self._wakes.popleft()
            try:
                wake()
            except BaseException:
                self._is_waking = False
                raise


class MemoryState:
    """One member of a `SharedMemory`."""

    def __init__(self, place: SharedMemory) -> None:
        self._place = place
        self._listeners: dict[str, list[Listener]] = {}
        self._held_back: list[Callable[[], None]] | None = None
        self.is_closed: bool = False
        self.deadline: float = math.inf
        self.id: str = place.new_id(self)
        """The id under which it takes part."""

    def connect(self, timeout: float) -> None:
        """Do nothing: memory always answers."""

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Run a step now, unless the member is cut off."""
        future: Future[Any] = Future()
        if self._held_back is not None:
            self._held_back.append(lambda: self._run(key, step, future, durable))
        else:
            self._run(key, step, future, durable)
        return future

    def _run(self, key: str, step: Step, future: Future[Any], durable: bool) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self.is_closed:
            future.set_exception(PoolClosed("this member is closed", remedy="Make another with `member()`."))
            return
        place = self._place
        with place.lock:
            seen = Seen(clock.wall(), self.id, lambda member: member not in place.members)
            try:
                outcome: Outcome = step(place.texts.get(key), seen)
            except BaseException as error:
                future.set_exception(error)
                return
            if outcome.state is not None:
                place.texts[key] = outcome.state
                place.expiries.pop(key, None)
                if durable and outcome.expires is not None:
                    place.expiries[key] = outcome.expires
                place.sweep(seen.now)
            woken = [place.members[one] for one in outcome.wakes if one in place.members]
        future.set_result(outcome.reply)
        place.call(partial(state.wake, key) for state in woken)

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key."""
        listeners = self._listeners.setdefault(key, [])
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def wake(self, key: str) -> None:
        """Tell the listeners of a key to look, unless the member is cut off."""
        if self._held_back is None:
            for listener in list(self._listeners.get(key, ())):
                listener.woken()

    def wake_all(self) -> None:
        """Tell all listeners to look."""
        for key in list(self._listeners):
            self.wake(key)

    # -- what a test does to it ----------------------------------------------------------------------------------------

    def hold_up(self) -> None:
        """Answer nothing until `reconnect`, without saying why."""
        self._held_back = []

    def cut_off(self) -> None:
        """Let nothing through to the place, or from it, until `reconnect`."""
        self.hold_up()
        for listeners in self._listeners.values():
            for listener in list(listeners):
                listener.unreachable(LeaseLost("cut off by a test"))

    def reconnect(self) -> None:
        """Run what was held back, and look again."""
        held, self._held_back = self._held_back or [], None
        for run in held:
            run()
        self.wake_all()

    def lose(self) -> None:
        """Lose the lease: the old id is gone, and the member has a new one."""
        old = self.id
        self.id = self._place.new_id(self)
        self._place.remove(old)
        for listeners in self._listeners.values():
            for listener in list(listeners):
                listener.lost()

    def close(self) -> None:
        """Be gone, as a process that has ended."""
        self.is_closed = True
        self._listeners.clear()
        self._place.remove(self.id)
