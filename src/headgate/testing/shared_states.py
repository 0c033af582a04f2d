"""Checks whether a store keeps the contract of `headgate.sharing.states.SharedState`, for stores of your own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, Queue
from typing import Any, Final, Protocol

from headgate.core.clock import clock
from headgate.errors import PoolClosed
from headgate.sharing.states import Outcome, Seen, SharedState, Step

_PATIENCE: Final = 30.0
"""Real seconds until an answer that does not come is a failure."""

_MOMENT: Final = 0.5
"""Real seconds that a store has to queue a step while another one runs."""


class Member(SharedState, Protocol):
    """A member that can be closed."""

    def close(self) -> None:
        """Be gone. Twice is fine."""


def check_shared_state(make: Callable[[], Member]) -> None:
    """Use a shared state as pools do; AssertionError at the first thing that breaks the contract.

    Each `make()` returns a new member over the same place, as another process would be. Call it outside of an event
    loop. The keys it uses have names of their own, and their texts are left where they are.

    A store may run a step more than once, so the steps of these checks only count what was committed; steps of yours
    must be as pure. That a process which ends is gone, and one which is stopped is not, only real processes can show.
    """
    for check in _CHECKS:
        place = _Place(make, f"check-{check.__name__.strip('_')}-{clock.token()}")
        try:
            check(place)
            assert not place.lost, "`lost` was called, and the lease of no member was lost"
        finally:
            place.close()


class _Listener:
    """Counts what it is told."""

    def __init__(self, place: _Place, then: Callable[[], None] | None = None) -> None:
        self._place = place
        self._then = then
        self._calls = threading.Semaphore(0)
        self.count = 0

    def woken(self) -> None:
        self.count += 1
        if self._then is not None:
            self._then()
        self._calls.release()

    def lost(self) -> None:
        self._place.lost = True

    def unreachable(self, error: Exception) -> None:
        """Nothing: it may be for a moment."""

    def wait(self, why: str) -> None:
        """Return when it is woken once more."""
        assert self._calls.acquire(timeout=_PATIENCE), f"a listener was not woken within {_PATIENCE:.0f} s: {why}"


class _Place:
    """Members over one place, and a key for the check."""

    def __init__(self, make: Callable[[], Member], key: str) -> None:
        self._make = make
        self._members: list[Member] = []
        self.key = key
        self.lost = False

    def member(self) -> Member:
        member = self._make()
        self._members.append(member)
        member.connect(_PATIENCE)
        return member

    def close(self) -> None:
        for member in self._members:
            member.close()


def _answer(future: Future[Any]) -> Any:
    try:
        return future.result(_PATIENCE)
    except TimeoutError:
        if future.done():
            raise
        raise AssertionError(f"no answer within {_PATIENCE:.0f} s: the future of `transact` waits for ever") from None


def _ask(member: Member, key: str, step: Step, *, durable: bool = False) -> Any:
    return _answer(member.transact(key, step, durable=durable))


def _read(text: str | None, _: Seen) -> Outcome:
    return Outcome(None, text)


def _increment(text: str | None, _: Seen) -> Outcome:
    count = int(text or 0) + 1
    return Outcome(str(count), count)


def _write(text: str) -> Step:
    return lambda _, seen: Outcome(text, seen.member)


def _who(_: str | None, seen: Seen) -> Outcome:
    return Outcome(None, seen.member)


def _eventually(holds: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"{complaint} ({_PATIENCE:.0f} s were not enough)"
        time.sleep(0.005)  # nothing tells when this becomes true: a listener is one of the things that are checked


def _in_threads(*work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# -- the checks --------------------------------------------------------------------------------------------------------


def _a_member(place: _Place) -> None:
    member = place.member()
    assert isinstance(member, SharedState), "the methods of SharedState are missing"
    member.connect(_PATIENCE)
    assert member.deadline >= clock.now(), f"the lease of a new member must stand, `deadline` is {member.deadline}"
    names = [_ask(one, place.key, _who) for one in (member, place.member(), member)]
    assert names[0] != names[1], f"two members have the id {names[0]!r}"
    assert names[0] == names[2], f"a member must keep its id, it was {names[0]!r} and is {names[2]!r}"


def _texts_and_replies(place: _Place) -> None:
    member, key = place.member(), place.key
    assert _ask(member, key, _read) is None, "a key that was never written must have no text"
    reply = object()
    assert _ask(member, key, lambda _, seen: Outcome("a", reply)) is reply, "the future must get the reply of the step"
    assert _ask(member, key, _read) == "a", "a text that was written must be there"
    assert _ask(place.member(), key, _read) == "a", "another member must find the same text"
    assert _ask(member, key, lambda _, seen: Outcome(None)) is None, "a step without a reply gives None"
    assert _ask(member, key, _read) == "a", "a step that returns no text must leave the text as it is"
    assert _ask(member, key, lambda _, seen: Outcome("")) is None
    assert _ask(member, key, _read) == "", "an empty text is a text"
    assert _ask(member, key + "-other", _read) is None, "keys must not mix"


def _order(place: _Place) -> None:
    member, ran = place.member(), []

    def step(number: int) -> Step:
        def append(text: str | None, _: Seen) -> Outcome:
            ran.append(number)
            return Outcome(f"{text or ''}{number} ")

        return append

    numbers = range(100)
    futures = [member.transact(f"{place.key}-{number % 3}", step(number)) for number in numbers]
    for future in futures:
        _answer(future)
    first_runs = list(dict.fromkeys(ran))
    assert first_runs == [*numbers], f"steps of one member must run in the order in which they were given: {first_runs}"
    for rest in range(3):
        text, wanted = _ask(member, f"{place.key}-{rest}", _read), "".join(f"{n} " for n in numbers if n % 3 == rest)
        assert text == wanted, f"each step must get the text that the one before it left: {text!r}"


def _atomicity(place: _Place) -> None:
    members = [place.member() for _ in range(4)]

    def work(member: Member) -> None:
        for future in [member.transact(place.key, _increment) for _ in range(50)]:
            _answer(future)

    _in_threads(*(partial(work, member) for member in members))
    count = _ask(members[0], place.key, _read)
    assert count == "200", f"4 members incremented 50 times each, the text says {count}: a change was lost or run twice"


def _threads(place: _Place) -> None:
    member = place.member()
    replies: list[int] = []

    def work() -> None:
        for _ in range(25):
            replies.append(_ask(member, place.key, _increment))

    _in_threads(*[work] * 8)
    assert sorted(replies) == [*range(1, 201)], "8 threads shared one member, and a reply is missing or there twice"


def _event_loops(place: _Place) -> None:
    member = place.member()

    async def work() -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(member.transact(place.key, _increment)), _PATIENCE)

    assert asyncio.run(work()) == 1, "a future must work on an event loop"
    assert asyncio.run(work()) == 2, "a future must work on another event loop"


class _Refusal(Exception):
    pass


def _steps_that_raise(place: _Place) -> None:
    member, key = place.member(), place.key

    def refuse(text: str | None, _: Seen) -> Outcome:
        raise _Refusal(text)

    futures = [member.transact(key, step) for step in (_write("a"), refuse, _read, refuse, _increment_text)]
    for number, future in enumerate(futures):
        try:
            _answer(future)
        except _Refusal:
            assert number in (1, 3), "the exception of a step went to another"
        else:
            assert number not in (1, 3), "the exception of a step must be that of its future"
    found = _ask(member, key, _read)
    assert found == "aa", f"a step that raises changes nothing, and those around it count: {found!r}"


def _increment_text(text: str | None, _: Seen) -> Outcome:
    return Outcome(f"{text}a")


def _wakes(place: _Place) -> None:
    waker, member, key = place.member(), place.member(), place.key
    texts: Queue[Future[Any]] = Queue()
    listener = _Listener(place, lambda: texts.put(member.transact(key, _read)))
    other = _Listener(place)
    stop, stop_other = member.listen(key, listener), member.listen(key, other)
    name = _ask(member, key, _who)
    _ask(waker, key, lambda _, seen: Outcome("1", None, [name]))
    listener.wait("a step of another member named it in `wakes`")
    other.wait("both listeners of a key are woken")
    assert _comes(texts, "1"), "who is woken must find the text that woke it"
    stop()
    before = listener.count
    _ask(waker, key, lambda _, seen: Outcome("2", None, [name, "no member"]))
    other.wait("the other listener was stopped, this one was not")
    assert listener.count == before, "a listener that was stopped is not called"
    stop()
    stop_other()


def _comes(texts: Queue[Future[Any]], wanted: str) -> bool:
    """Is this among the texts that come? A listener may be woken too often, and find an older one first."""
    while True:
        try:
            if _answer(texts.get(timeout=_PATIENCE)) == wanted:
                return True
        except Empty:
            return False


def _many_wakes(place: _Place) -> None:
    """Two members answer each other by wake-ups alone."""
    one, two, key = place.member(), place.member(), place.key
    names = [_ask(one, key, _who), _ask(two, key, _who)]
    done = threading.Event()

    def turn(me: int) -> Step:
        def play(text: str | None, _: Seen) -> Outcome:
            count = int(text or 0)
            if count >= 100:
                return Outcome(None, True, [names[1 - me]])
            return Outcome(str(count + 1), False, [names[1 - me]]) if count % 2 == me else Outcome(None, False)

        return play

    def player(member: Member, me: int) -> Callable[[], None]:
        def over(future: Future[Any]) -> None:
            if future.exception() is None and future.result():
                done.set()

        return lambda: None if done.is_set() else member.transact(key, turn(me)).add_done_callback(over)

    stops = [member.listen(key, _Listener(place, player(member, me))) for me, member in enumerate((one, two))]
    _ask(one, key, turn(0))
    assert done.wait(_PATIENCE), f"a wake-up was lost at {_ask(one, key, _read)} of 100"
    for stop in stops:
        stop()


def _members_that_go(place: _Place) -> None:
    member, other = place.member(), place.member()
    name, other_name = _ask(member, place.key, _who), _ask(other, place.key, _who)

    def gone(_: str | None, seen: Seen) -> Outcome:
        return Outcome(None, [seen.is_gone(one) for one in (name, other_name)])

    assert _ask(member, place.key, gone) == [False, False], "members that live are not gone"
    listener = _Listener(place)
    stop = member.listen(place.key, listener)
    other.close()
    other.close()
    listener.wait("another member has gone")
    _eventually(lambda: _ask(member, place.key, gone) == [False, True], "a member that was closed must be gone")
    assert _ask(member, place.key, gone) == [False, True], "a member that is gone stays gone"
    assert _ask(place.member(), place.key, gone) == [False, True], "a new member must know who is gone"
    assert _ask(place.member(), place.key, _who) != other_name, "an id must not be given twice"
    stop()


def _time(place: _Place) -> None:
    members = [place.member(), place.member()]
    times = [_ask(members[n % 2], place.key, lambda _, seen: Outcome(None, seen.now)) for n in range(20)]
    assert times == sorted(times), f"`now` went back from one step to the next: {times}"
    assert abs(times[-1] - clock.wall()) < 86400, f"`now` must be Unix seconds, got {times[-1]!r}"


def _durable_texts(place: _Place) -> None:
    member = place.member()
    _ask(member, place.key, _write("kept"), durable=True)
    assert _ask(place.member(), place.key, _read, durable=True) == "kept"
    place.close()
    found = _ask(place.member(), place.key, _read, durable=True)
    assert found == "kept", f"a durable text must survive all members, found {found!r}"


def _odd_keys_and_texts(place: _Place) -> None:
    odd = ["", "'", '"', "%", "_", "\\", "a b", "/", "../x", "\u00fc", "\U0001f600", "\n", "x", "X", "x" * 1000]
    texts = {place.key + key: f"{key}\u00fc\U0001f600\n'\"\\" for key in odd}
    member = place.member()
    for key, text in texts.items():
        _ask(member, key, _write(text))
    for key, text in texts.items():
        found = _ask(place.member(), key, _read)
        assert found == text, f"key {key!r} was written with {text!r}, found {found!r}"


def _long_texts(place: _Place) -> None:
    member = place.member()
    for size in (100_000, 1, 100_001):
        _ask(member, place.key, _write("x" * size))
        found = _ask(place.member(), place.key, lambda text, _: Outcome(None, len(text or "")))
        assert found == size, f"a text of {size} characters came back with {found}"


def _cancelling(place: _Place) -> None:
    """A step that is queued behind another one is cancelled. A store that queues nothing has nothing to cancel."""
    member, release, began = place.member(), threading.Event(), threading.Event()
    queued: Queue[Future[Any]] = Queue()

    def block(_: str | None, seen: Seen) -> Outcome:
        began.set()
        release.wait(_PATIENCE)
        return Outcome("blocked")

    blocker = threading.Thread(target=lambda: _ask(member, place.key, block))
    asker = threading.Thread(target=lambda: queued.put(member.transact(place.key, _write("cancelled"))))
    blocker.start()
    try:
        assert began.wait(_PATIENCE), "a step was not run"
        asker.start()
        try:
            future: Future[Any] | None = queued.get(timeout=_MOMENT)
        except Empty:
            future = None
        was_cancelled = future is not None and future.cancel()
    finally:
        release.set()
        blocker.join()
        asker.join()
    if was_cancelled:
        found = _ask(member, place.key, _read)
        assert found == "blocked", f"a step that was cancelled must not be run, the text is {found!r}"


def _after_closing(place: _Place) -> None:
    member = place.member()
    _ask(member, place.key, _write("a"))
    member.close()
    try:
        _ask(member, place.key, _write("b"))
    except PoolClosed:
        pass
    else:
        raise AssertionError("`transact` after `close` must give PoolClosed")
    member.close()


_CHECKS: Final[tuple[Callable[[_Place], None], ...]] = (
    _texts_and_replies,
    _a_member,
    _order,
    _atomicity,
    _threads,
    _event_loops,
    _steps_that_raise,
    _wakes,
    _many_wakes,
    _members_that_go,
    _time,
    _durable_texts,
    _odd_keys_and_texts,
    _long_texts,
    _cancelling,
    _after_closing,
)
