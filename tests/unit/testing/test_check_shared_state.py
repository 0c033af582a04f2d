"""G02: `check_shared_state` passes what keeps the contract of SharedState, and says what others break."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.states import Listener, Outcome, Seen, Step
from headgate.testing import check_shared_state


def test_g02_a_shared_state_in_memory_keeps_the_contract() -> None:
    check_shared_state(SharedMemory().member)


class Wrapped:
    """A member that passes everything on."""

    def __init__(self, place: SharedMemory) -> None:
        self.place = place
        self.inner = MemoryState(place)

    @property
    def deadline(self) -> float:
        return self.inner.deadline

    def connect(self, timeout: float) -> None:
        self.inner.connect(timeout)

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        return self.inner.transact(key, step, durable=durable)

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        return self.inner.listen(key, listener)

    def close(self) -> None:
        self.inner.close()


class Changed(Wrapped):
    """Changes each step in some way."""

    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        return step(text, seen)

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        return self.inner.transact(key, lambda text, seen: self.change(step, text, seen), durable=durable)


class Racy(Wrapped):
    """Reads and writes in two transactions."""

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        found: list[Any] = []
        done = self.inner.transact(key, lambda text, seen: Outcome(None, found.extend([text, seen])))
        if done.exception() is not None:
            return done
        threading.Event().wait(0.0005)
        outcomes: list[Outcome] = []
        try:
            outcomes.append(step(*found))
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        return self.inner.transact(key, lambda text, seen: outcomes[0])


class Deaf(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        return step(text, seen)._replace(wakes=())


class Hasty(Wrapped):
    """Wakes before the text is there."""

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        woken: set[str] = set()

        def early(text: str | None, seen: Seen) -> Outcome:
            outcome = step(text, seen)
            woken.update(outcome.wakes)
            return Outcome(None)

        if self.inner.transact(key, early).exception() is None and woken:
            self.inner.transact(key, lambda _, seen: Outcome(None, None, woken))
        return self.inner.transact(key, lambda text, seen: step(text, seen)._replace(wakes=()))


class Immortal(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        return step(text, seen._replace(is_gone=lambda _: False))


class Gloomy(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        return step(text, seen._replace(is_gone=lambda _: True))


class Twins(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        return step(text, seen._replace(member="m1"))


class Backwards(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        Backwards.back = getattr(Backwards, "back", 0) + 1
        return step(text, seen._replace(now=seen.now - Backwards.back))

    back: int


class Monotonic(Changed):
    """Tells seconds since the start of the machine."""

    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        return step(text, seen._replace(now=1.0))


class Short(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        outcome = step(text, seen)
        return outcome._replace(state=outcome.state and outcome.state[:65536])


class Eraser(Changed):
    """Takes "no new text" for "no text"."""

    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        outcome = step(text, seen)
        return outcome._replace(state=outcome.state or "")


class Silent(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        return step(text, seen)._replace(reply=None)


class Swallowing(Changed):
    def change(self, step: Step, text: str | None, seen: Seen) -> Outcome:
        try:
            return step(text, seen)
        except Exception:
            return Outcome(None)


class HalfMade(Changed):
    """Leaves something of a step that raised."""

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        done = super().transact(key, step)
        if done.exception() is not None:
            self.inner.transact(key, lambda text, seen: Outcome(f"{text}?"))
        return done


class Repeating(Wrapped):
    """Commits each step twice."""

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        self.inner.transact(key, step)
        return self.inner.transact(key, step)


class Folding(Wrapped):
    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        return self.inner.transact(key.lower(), step)


class Stubborn(Wrapped):
    """Goes on telling a listener that was stopped."""

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        self.inner.listen(key, listener)
        return lambda: None


class Alone(Wrapped):
    """Tells one listener of a key only."""

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        self.inner._listeners.pop(key, None)
        return self.inner.listen(key, listener)


class Anxious(Wrapped):
    """Says that the lease is lost."""

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        listener.lost()
        return self.inner.listen(key, listener)


class Forgetful(Wrapped):
    """Forgets durable texts with the last member."""

    def close(self) -> None:
        self.inner.close()
        if not self.place.members:
            self.place.texts.clear()


class Undead(Wrapped):
    """Works after it was closed."""

    def close(self) -> None:
        other = MemoryState(self.place)
        self.inner.close()
        self.inner = other


class Ghost(Wrapped):
    """Never goes."""

    def close(self) -> None:
        self.inner._is_closed = True


class Expired(Wrapped):
    @property
    def deadline(self) -> float:
        return -1.0


class Mute(Wrapped):
    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        return Future()


class Queued(Wrapped):
    """Runs steps in a thread of its own, as a real store does."""

    def __init__(self, place: SharedMemory) -> None:
        super().__init__(place)
        self.calls: list[Callable[[], object]] = []
        self.changed = threading.Condition()
        self.is_closed = False
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        with self.changed:
            if not self.is_closed:
                self.calls.append(lambda: self.run(key, step, future))
                self.changed.notify()
                return future
        return self.inner.transact(key, step)

    def run(self, key: str, step: Step, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            self.finish(self.inner.transact(key, step), future)

    def finish(self, done: Future[Any], future: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)

    def next(self) -> Callable[[], object]:
        return self.calls.pop(0)

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.calls or self.is_closed)
                if not self.calls:
                    break
                call = self.next()
            call()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify()
        if self.thread is not threading.current_thread():
            self.thread.join()
        self.inner.close()


class Newest(Queued):
    """Runs the newest step first."""

    def next(self) -> Callable[[], object]:
        return self.calls.pop()


class Relentless(Queued):
    """Runs a step that was cancelled."""

    def run(self, key: str, step: Step, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            self.finish(self.inner.transact(key, step), future)
        else:
            self.inner.transact(key, step)


@pytest.mark.parametrize("kind", [Wrapped, Changed, Queued])
def test_g02_a_wrapped_shared_state_passes(kind: type[Wrapped]) -> None:
    place = SharedMemory()
    check_shared_state(lambda: kind(place))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Racy, "a change was lost"),
        (Deaf, "was not woken"),
        (Hasty, "must find the text that woke it"),
        (Immortal, "must be gone"),
        (Gloomy, "members that live are not gone"),
        (Twins, "two members have the id"),
        (Backwards, "went back"),
        (Monotonic, "must be Unix seconds"),
        (Short, "a text of 100000 characters came back"),
        (Eraser, "must find the same text"),
        (Silent, "must get the reply"),
        (Swallowing, "must be that of its future"),
        (HalfMade, "changes nothing"),
        (Repeating, "each step must get the text|run twice"),
        (Folding, "was written with"),
        (Stubborn, "a listener that was stopped"),
        (Alone, "was not woken"),
        (Anxious, "`lost` was called"),
        (Forgetful, "must survive all members"),
        (Undead, "must give PoolClosed"),
        (Ghost, "was not woken|must be gone"),
        (Expired, "the lease of a new member must stand"),
        (Mute, "no answer"),
        (Newest, "in the order in which they were given"),
        (Relentless, "must not be run"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_g02_a_broken_shared_state_is_told_why(
    kind: type[Wrapped], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.testing.shared_states._PATIENCE", 0.5)
    place = SharedMemory()
    with pytest.raises(AssertionError, match=complaint):
        check_shared_state(lambda: kind(place))
