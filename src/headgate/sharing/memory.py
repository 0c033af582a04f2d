"""A shared store in memory: for tests, and as the shortest `Backend` to read.

Every member plays another process. `MemoryBackend` runs below `Transactions`, on the thread of a store, as every other
backend does. `SharedMemory.member()` needs no thread: a step runs at once, in the thread that asks for it, so tests in
virtual time can use it.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from headgate.core.clock import clock
from headgate.errors import LeaseLost, PoolClosed, StoreUnreachable
from headgate.sharing.states import Listener, Seen, Step
from headgate.sharing.transactions import Call, Host


class Woken(Protocol):
    """A member that can be told to look."""

    def wake(self, key: str | None) -> None:
        """Tell the listeners of a key to look; all of them for None."""


class SharedMemory:
    """The place where the texts are: what a database is to others."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.members: dict[str, Woken] = {}
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

    def new_id(self, member: Woken) -> str:
        """Give a member an id that none had before."""
        with self.lock:
            self._made += 1
            name = f"m{self._made}"
            self.members[name] = member
            return name

    def remove(self, member: str) -> None:
        """Let a member be gone, and tell the others to look."""
        with self.lock:
            self.members.pop(member, None)
            others = list(self.members.values())
        self.call(partial(other.wake, None) for other in others)

    def commit(self, calls: Sequence[Call], member: str) -> list[Callable[[], None]]:
        """Run these calls as a member, in one transaction. Returns what wakes those that they name."""
        with self.lock:
            seen = Seen(clock.wall(), member, lambda one: one not in self.members)
            for call in calls:
                if (outcome := call.run(self.texts.get(call.key), seen)) is not None and outcome.state is not None:
                    self.texts[call.key] = outcome.state
                    self.expiries.pop(call.key, None)
                    if call.durable and outcome.expires is not None:
                        self.expiries[call.key] = outcome.expires
                    self.sweep(seen.now)
            named = [(one, call.key) for call in calls for one in call.wakes if one in self.members]
            return [partial(self.members[one].wake, key) for one, key in named]

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


class MemoryBackend:
    """One member of a `SharedMemory`, for `Transactions`."""

    @property
    def deadline(self) -> float:
        """Infinite: a member lives exactly as long as its process."""
        return math.inf

    def __init__(self, place: SharedMemory, host: Host) -> None:
        self._place = place
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._id = ""

    def together(self, calls: Sequence[Call]) -> int:
        """All of them."""
        return len(calls)

    async def commit(self, calls: Sequence[Call]) -> None:
        """Run these calls, then wake whom they name."""
        if not self._id:
            self._id = self._place.new_id(self)
        self._place.call(self._place.commit(calls, self._id))

    async def look(self) -> float:
        """Do nothing: memory loses no notification."""
        return 3600.0

    async def leave(self, *, ends: bool) -> None:
        """Be gone."""
        self._place.remove(self._id)

    def wake(self, key: str | None) -> None:
        """Have the listeners look, on the thread of this member."""
        try:
            self._loop.call_soon_threadsafe(self._host.listeners.wake, key)
        except RuntimeError:
            pass  # that thread has ended

    def silence(self, timeout: float) -> StoreUnreachable:
        """The error for a place whose lock another member holds."""
        return StoreUnreachable(f"memory did not answer within {timeout:g} s")


class MemoryState:
    """One member of a `SharedMemory`."""

    def __init__(self, place: SharedMemory) -> None:
        self._place = place
        self._listeners: dict[str, list[Listener]] = {}
        self._held_back: list[Call] | None = None
        self.is_closed: bool = False
        self.deadline: float = math.inf
        self.id: str = place.new_id(self)
        """The id under which it takes part."""

    def connect(self, timeout: float) -> None:
        """Do nothing: memory always answers."""

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Run a step now, unless the member is cut off."""
        call = Call(key, step, durable)
        if self._held_back is not None:
            self._held_back.append(call)
        else:
            self._run(call)
        return call.future

    def _run(self, call: Call) -> None:
        if self.is_closed:
            call.fail(PoolClosed("this member is closed", remedy="Make another with `member()`."))
            return
        wakes = self._place.commit([call], self.id)
        call.tell()
        self._place.call(wakes)

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key."""
        listeners = self._listeners.setdefault(key, [])
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def wake(self, key: str | None) -> None:
        """Tell the listeners of a key to look, or all of them, unless the member is cut off."""
        for one in [key] if key is not None else list(self._listeners):
            if self._held_back is None:
                for listener in list(self._listeners.get(one, ())):
                    listener.woken()

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
        for call in held:
            self._run(call)
        self.wake(None)

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
