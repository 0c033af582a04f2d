"""The thread of a store: it runs the steps of this process in transactions, renews its lease and wakes its listeners.

Pools on any thread and any event loop share one store, so a store has a thread and a loop of its own: a user's loop
that is blocked must not delay a heartbeat. `transact` only queues a step. The thread takes as many queued steps as the
store can run in one transaction, because a transaction costs more than twenty steps; each step gets the text that the
one before it left. A step that raises has changed nothing. If a transaction of several steps cannot be written, each of
them is tried once more alone, so that a single text that does not fit on the disk fails alone.

What differs between databases is behind `Backend`, four methods. A new kind of store is one module that implements it;
`sharing/memory.py` is the shortest.

The thread starts with the first use and is a daemon: a program that forgets to close its store ends all the same. In a
forked child there is no such thread: the child begins anew as another member at its first use. Steps that the parent
queued are the parent's; listeners stay.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, Protocol, TypeVar

from headgate.core.clock import clock
from headgate.core.redaction import log_exception
from headgate.errors import HeadgateError, InvalidType, PoolClosed, StoreUnreachable, StoreWriteFailed
from headgate.sharing.fork_guard import ForkGuard, never_free
from headgate.sharing.states import Listener, Outcome, Seen, Step

T = TypeVar("T")

_GRACE: Final = 1.0
"""Seconds that each of the last commands may take when a store is closed."""


class Call:
    """One queued step."""

    __slots__ = ("durable", "future", "has_begun", "key", "outcome", "step")

    def __init__(self, key: str, step: Step, durable: bool) -> None:
        self.key: str = key
        self.step: Step = step
        self.durable: bool = durable
        self.future: Future[Any] = Future()
        self.has_begun: bool = False
        self.outcome: Outcome | BaseException | None = None
        """What the step returned or raised, in a transaction that may still fail."""

    def begin(self) -> bool:
        """Let nobody cancel it any more. False if somebody has, or if `close` has given up waiting for it."""
        if self.future.done():
            return False
        if not self.has_begun:
            self.has_begun = self.future.set_running_or_notify_cancel()
        return self.has_begun

    def run(self, text: str | None, seen: Seen) -> Outcome | None:
        """Run the step. Returns its outcome if it changed the text."""
        self.outcome = None
        if not self.begin():
            return None
        self.outcome = outcome = _ran(self.step, text, seen)
        changed = isinstance(outcome, Outcome) and outcome.state is not None and outcome.state != text
        return outcome if changed else None  # type: ignore[return-value]  # mypy cannot see that it is an Outcome

    def fail(self, error: BaseException) -> None:
        """Tell that it failed, with an exception of its own: it may be raised in a thread of its own."""
        if self.begin():
            if isinstance(error, HeadgateError):
                copy = type(error)(*error.args, remedy=error.remedy)
                copy.__cause__ = error.__cause__
                error = copy
            self.outcome = error
            self.tell()

    def tell(self) -> None:
        """Tell how it ended, once."""
        try:
            if isinstance(self.outcome, Outcome):
                self.future.set_result(self.outcome.reply)
            elif self.outcome is not None:
                self.future.set_exception(self.outcome)
        except InvalidStateError:
            pass  # `close` has given up waiting for it

    @property
    def wakes(self) -> Sequence[str]:
        """The members that the step wants to be woken."""
        return tuple(self.outcome.wakes) if isinstance(self.outcome, Outcome) else ()


def _ran(step: Step, text: str | None, seen: Seen) -> Outcome | BaseException:
    try:
        outcome: object = step(text, seen)
    except StopIteration as error:  # a future refuses to carry it to an event loop
        mistake = RuntimeError("the step raised StopIteration")
        mistake.__cause__ = error
        return mistake
    except BaseException as error:
        return error
    if not isinstance(outcome, Outcome):
        return InvalidType(f"a step must return an Outcome, got {type(outcome).__name__}")
    if not isinstance(outcome.state, str | None):
        return InvalidType(f"the state of an Outcome must be a string or None, got {type(outcome.state).__name__}")
    if not isinstance(outcome.expires, float | int | None):
        return InvalidType(f"the expires of an Outcome must be a number or None, got {type(outcome.expires).__name__}")
    if outcome.wakes and not all(isinstance(member, str) for member in outcome.wakes):
        return InvalidType("the wakes of an Outcome must be ids of members")
    return outcome


class Backend(Protocol):
    """One kind of database. All methods are called on the thread of the store; `deadline` is read from any thread."""

    @property
    def deadline(self) -> float:
        """Until when the lease of this member stands for certain, on the monotonic clock of this process."""
        ...

    def together(self, calls: Sequence[Call]) -> int:
        """How many of these calls, from the first on, may run in one transaction: at least one."""
        ...

    async def commit(self, calls: Sequence[Call]) -> None:
        """Join if this process is no member yet, run these calls in one transaction, then wake whom they name.

        Raises an error of headgate if nothing was committed.
        """

    async def look(self) -> float:
        """Renew the lease, and find out who is gone. Returns in how many seconds to look again.

        Wakes all listeners if notifications may have been lost, and at least at every heartbeat.
        """
        ...

    async def leave(self, *, ends: bool) -> None:
        """Give up membership and close everything. `ends` says that the program ends."""

    def silence(self, timeout: float) -> HeadgateError:
        """The error for a store that has not answered for `timeout` seconds."""
        ...


class Listeners:
    """The listeners of one store, by key. They are called in the thread of the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, tuple[tuple[Listener], ...]] = {}
        self._broken: set[str] = set()

    def add(self, key: str, listener: Listener) -> Callable[[], None]:
        """Add a listener; returns what removes it."""
        entry = (listener,)  # the same listener may be there twice
        with self._lock:
            self._by_key[key] = (*self._by_key.get(key, ()), entry)

        def remove() -> None:
            with self._lock:
                left = tuple(one for one in self._by_key.pop(key, ()) if one is not entry)
                if left:
                    self._by_key[key] = left

        return remove

    def wake(self, key: str | None) -> None:
        """Tell the listeners of a key to look; all of them for None."""
        for (listener,) in self._all() if key is None else self._by_key.get(key, ()):
            _call(listener.woken)

    def lost(self) -> None:
        """Tell all that the lease was lost."""
        for (listener,) in self._all():
            _call(listener.lost)

    def cannot_reach(self, connection: str, error: Exception) -> None:
        """Tell all that the store cannot be reached, once until every connection works again."""
        if not self._broken:
            for (listener,) in self._all():
                _call(listener.unreachable, error)
        self._broken.add(connection)

    def reached(self, connection: str) -> None:
        """Note that a connection works again. What was told through the old one may be lost, so all must look."""
        self._broken.discard(connection)
        self.wake(None)

    def is_broken(self, connection: str) -> bool:
        """True after `cannot_reach`, until `reached`."""
        return connection in self._broken

    def forked(self) -> None:
        """In a forked child: another thread may have held the lock."""
        self._lock = threading.Lock()

    def _all(self) -> list[tuple[Listener]]:
        with self._lock:
            return [entry for entries in self._by_key.values() for entry in entries]


def _call(tell: Callable[..., None], *args: object) -> None:
    try:
        tell(*args)
    except Exception:  # against the contract; the others must hear all the same
        log_exception("headgate.stores", "a listener of a store failed")


class Host:
    """What a backend finds on the thread of its store."""

    def __init__(self, listeners: Listeners) -> None:
        self.listeners: Listeners = listeners
        self.stir: asyncio.Event = asyncio.Event()
        """Set it to have `Backend.look` called now."""
        self.closing: asyncio.Event = asyncio.Event()
        """Set when the store is being closed."""


class Transactions:
    """Implements `SharedState` above a backend, for one process."""

    def __init__(
        self,
        name: str,
        place: str,
        make: Callable[[Host], Backend],
        *,
        normal: Callable[[str], str] = lambda key: key,
        at_exit: float = 10.0,
    ) -> None:
        """`name` is that of the thread, and `place` tells people where the store is.

        `make` is called in the thread when the store is first used. `normal` gives a key as the backend stores it.

        `at_exit` is how many seconds the end of the program waits at most for a store that nobody closed.
        """
        self.at_exit: float = at_exit
        self._name = name
        self._place = place
        self._make = make
        self._normal = normal
        self.listeners: Listeners = Listeners()
        self.is_closed: bool = False
        """Has `close` been called?"""
        self._ends = False
        self._guard = ForkGuard(self._forked)
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._running: list[Call] = []
        self._waiting: set[Future[Any]] = set()  # of `call`
        self._is_idle = False
        self._arrived = asyncio.Event()
        self._loop: asyncio.SelectorEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._host: Host | None = None
        self._backend: Backend | None = None

    def _forked(self) -> None:
        """In a forked child: leave everything of the parent alone. Freeing a connection would close the parent's."""
        for thing in (self._loop, self._backend):
            if thing is not None:
                never_free(thing)
        self.listeners.forked()
        self._begin()

    # -- from any thread -----------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """Until when the lease stands for certain; minus infinity while there is none."""
        backend = self._backend
        return -math.inf if backend is None or self.is_closed else backend.deadline

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        """Queue a step."""
        if not isinstance(key, str):
            raise InvalidType(f"key must be a string, got {type(key).__name__}")
        call = Call(self._normal(key), step, durable)
        with self._lock:
            try:
                loop = self._started()
            except PoolClosed as error:
                call.fail(error)
                return call.future
            self._calls.append(call)
            was_idle, self._is_idle = self._is_idle, False
            if was_idle:
                loop.call_soon_threadsafe(self._arrived.set)
        return call.future

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        """Tell this listener what happens to a key, from now on."""
        if self.is_closed:
            raise self._closed()
        return self.listeners.add(self._normal(key), listener)

    def connect(self, timeout: float) -> None:
        """Return when the store has answered; block this thread until then."""
        future = self.transact("", _nothing)
        try:
            future.result(None if math.isinf(timeout) else timeout)
        except TimeoutError:
            future.cancel()
            backend = self._backend
            if backend is None:
                raise StoreUnreachable(f"{self._place} did not answer within {timeout:g} s") from None
            raise backend.silence(timeout) from None

    def call(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> Future[T]:
        """Await `work(backend)` on the thread of the store. PoolClosed if that ends before."""
        future: Future[T] = Future()

        async def run() -> None:
            try:
                result = await work(self._backend)
            except asyncio.CancelledError:
                future.set_exception(self._closed())
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        tasks: list[asyncio.Task[None]] = []  # the loop holds tasks weakly
        future.add_done_callback(self._waiting.discard)
        with self._lock:
            try:
                loop = self._started()
                self._waiting.add(future)
                loop.call_soon_threadsafe(lambda: tasks.append(loop.create_task(run())))
            except (PoolClosed, RuntimeError):  # the thread has ended, or cannot start
                future.set_exception(self._closed())
        return future

    def close(self, timeout: float, *, ends: bool = False) -> None:
        """Run what is queued, leave, and end the thread; wait at most `timeout` seconds. Twice is fine.

        `ends` says that the program ends.
        """
        with self._lock:
            self._ends = self._ends or ends
            self.is_closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        try:
            loop.call_soon_threadsafe(self._shut)
        except RuntimeError:
            return  # it has ended
        if thread is threading.current_thread():
            return
        thread.join(timeout)
        if timeout > 0 and thread.is_alive():
            self._refuse()

    def stop(self) -> None:
        """Do what `close` does without waiting, and without a lock: the collector may call it anywhere."""
        self.is_closed = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._shut)
            except RuntimeError:
                pass  # it has ended

    def post(self, callback: Callable[[Any], object]) -> None:
        """Call this with the backend in the thread of the store, if there is one: nothing is started for it."""

        def called() -> None:
            if self._backend is not None:
                callback(self._backend)

        with self._lock:
            if self._loop is not None and not self.is_closed:
                self._loop.call_soon_threadsafe(called)

    def _started(self) -> asyncio.SelectorEventLoop:
        """The loop of the thread, which is started if there is none. With the lock held."""
        if self.is_closed:
            raise self._closed()
        if self._loop is not None:
            return self._loop
        with self._guard:
            loop = asyncio.SelectorEventLoop()
        thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, or there are no more threads
            loop.close()
            raise PoolClosed(f"the thread of the store cannot be started: {error}", remedy="Try again.") from None
        self._loop, self._thread = loop, thread
        return loop

    def _refuse(self) -> None:
        with self._lock:
            calls, self._calls = [*self._running, *self._calls], []
        for call in calls:
            call.fail(self._closed())

    def _closed(self) -> PoolClosed:
        return PoolClosed(f"{self._place} is closed", remedy="Make a new store.")

    # -- in the thread of the store ------------------------------------------------------------------------------------

    def _run(self, loop: asyncio.SelectorEventLoop) -> None:
        try:
            loop.run_until_complete(self._main())
        except BaseException:
            log_exception("headgate.stores", "a defect in a shared store: its thread has ended")
        finally:
            self.is_closed = True  # whatever ended it: nobody would run what comes
            loop.run_until_complete(_end_others())
            loop.close()
            self._refuse()
            for future in list(self._waiting):  # posted, and not begun
                if not future.done():
                    future.set_exception(self._closed())
            self.listeners.wake(None)  # whoever is alone would not ask, and goes on with what it holds no more

    async def _main(self) -> None:
        self._host = host = Host(self.listeners)
        self._backend = backend = self._make(host)
        tasks = [asyncio.ensure_future(work(backend, host)) for work in (self._serve, self._beat)]
        closing = asyncio.ensure_future(host.closing.wait())
        ended, _ = await asyncio.wait([closing, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # a defect ends the thread, and everybody who waits hears of it
        self._arrived.set()
        host.stir.set()
        await asyncio.wait(tasks, timeout=_GRACE)
        await backend.leave(ends=self._ends)
        await asyncio.wait(tasks, timeout=_GRACE)

    def _shut(self) -> None:
        if self._host is not None:
            self._host.closing.set()
        else:
            asyncio.get_running_loop().call_soon(self._shut)  # the thread has just begun

    async def _serve(self, backend: Backend, host: Host) -> None:
        """Run steps until the store is closed and nothing is queued."""
        while True:
            with self._lock:
                count = backend.together(self._calls) if self._calls else 0
                self._running, self._calls = self._calls[:count], self._calls[count:]
                self._is_idle = not count
                self._arrived.clear()
            if count:
                await self._commit(backend, self._running)
                self._running = []
                await asyncio.sleep(0)  # a backend may never wait, and heartbeats and wake-ups have their turn too
            elif host.closing.is_set():
                return
            else:
                await self._arrived.wait()

    async def _commit(self, backend: Backend, calls: Sequence[Call]) -> None:
        """Run these calls in one transaction, and tell everybody how that ended."""
        try:
            await backend.commit(calls)
        except asyncio.CancelledError:  # the store is closed, and its server did not answer in time
            for call in calls:
                call.fail(self._closed())
            raise
        except HeadgateError as error:
            if len(calls) > 1 and isinstance(error, StoreWriteFailed):
                for call in calls:
                    await self._commit(backend, [call])
            else:
                for call in calls:
                    call.fail(error)
        except Exception as error:  # a defect: whoever waits must hear of it, and the others must go on
            log_exception("headgate.stores", "a defect in a shared store: a transaction failed")
            for call in calls:
                call.fail(StoreWriteFailed(f"the transaction failed: {type(error).__name__}: {error}"))
        else:
            for call in calls:
                call.tell()

    async def _beat(self, backend: Backend, host: Host) -> None:
        """Let the backend look when it wants to, until the store is closed; after a failure at least each second."""
        pause = 1.0
        while not host.closing.is_set():
            host.stir.clear()
            try:
                pause = await backend.look()
                if self.listeners.is_broken("heartbeat"):
                    self.listeners.reached("heartbeat")
            except Exception as error:
                if not isinstance(error, HeadgateError):
                    log_exception("headgate.stores", "a defect in a shared store: a heartbeat failed")
                self.listeners.cannot_reach("heartbeat", error)
                pause = min(pause, 1.0)  # a short lease wants to be renewed as often as before
            try:
                async with asyncio.timeout(pause):
                    await host.stir.wait()
            except TimeoutError:
                pass


def _nothing(text: str | None, seen: Seen) -> Outcome:
    return Outcome(None)


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # transports that were aborted close their sockets in the next turn


_living: weakref.WeakSet[Transactions] = weakref.WeakSet()
"""Every store of this process. One whose thread runs is kept alive by that."""


@atexit.register
def _close_all() -> None:
    """Let a program that forgot to close its stores still write what is queued, and leave nothing behind."""
    began, living = clock.now(), list(_living)
    for transactions in living:
        transactions.close(0.0, ends=True)
    for transactions in living:
        transactions.close(max(0.0, began + transactions.at_exit - clock.now()), ends=True)
