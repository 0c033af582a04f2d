"""How messages are carried: one under way, sent again, after a lost lease, without a store. H02, H04, G06, G20, G21."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from headgate.errors import PoolClosed, StoreUnreachable, StoreWriteFailed
from headgate.sharing.link import Link, send_due
from headgate.sharing.memory import MemoryState, SharedMemory
from headgate.sharing.states import ClockOffset
from tests.support.sharing.spending import SHARED_BUDGET, Allowed, Spending


class Wallet:
    """Spends what it is granted. Implements `sharing.link.Sharer`, and notes what it was asked."""

    def __init__(self, store: Any, lock: threading.RLock | None = None) -> None:
        self.spent = self.granted = self.wants = 0.0
        self.left: float | None = None
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.lock = threading.RLock() if lock is None else lock
        self.link = Link(self, store, "budget", SHARED_BUDGET, "it spends nothing more", lock=self.lock)

    def want(self, amount: float) -> None:
        self.wants = amount
        self.link.send()

    def message(self, now: float, *, looks: bool) -> Spending | None:
        assert self.lock._is_owned()  # type: ignore[attr-defined]
        self.notes.append("message")
        return Spending(10.0, self.spent, self.wants) if looks or self.wants else None

    def take(self, said: Spending, told: Allowed, offset: ClockOffset, now: float, *, is_current: bool) -> bool:
        self.notes.append("take" if is_current else "late")
        if is_current:
            self.granted, self.left = told.granted, told.left
            self.wants = 0.0 if said.wants == self.wants else self.wants
        return False

    def failed(self, said: Spending, error: BaseException) -> None:
        self.notes.append("failed")

    def forget(self, now: float, *, forked: bool = False) -> None:
        self.notes.append("forget")
        self.granted = self.spent = 0.0

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None:
        self.notes.append(f"alone {type(why).__name__}" if alone else "not alone")

    def carry_out(self) -> None:
        assert not self.lock._is_owned()  # type: ignore[attr-defined]

    def warn(self, what: str) -> None:
        self.warnings.append(what)


class Slow:
    """A store that answers when it is told to."""

    def __init__(self, member: MemoryState) -> None:
        self.member = member
        self.asked: list[tuple[Future[Any], Any]] = []
        self.deadline = member.deadline
        self.is_closed = False

    def connect(self, timeout: float) -> None: ...

    def listen(self, key: str, listener: Any) -> Any:
        return self.member.listen(key, listener)

    def transact(self, key: str, step: Any, *, durable: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((future, lambda: self.member.transact(key, step)))
        return future

    def answer(self, error: Exception | None = None) -> None:
        future, ask = self.asked.pop(0)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(ask().result(0))


@pytest.fixture
def store() -> Slow:
    return Slow(SharedMemory().member())


def test_h01_a_message_waits_for_the_answer_to_the_one_before(store: Slow) -> None:
    one = Wallet(store)
    one.link.send(looks=True)
    assert not store.asked, "nothing is sent before it starts"
    one.link.start()
    for amount in (1.0, 2.0, 3.0):
        one.want(amount)
    assert len(store.asked) == 1
    store.answer()
    assert len(store.asked) == 1, "one for all that happened meanwhile"
    store.answer()
    assert not store.asked
    assert one.granted == 3.0


def test_h01_a_pool_that_has_nothing_to_tell_sends_nothing_until_it_is_woken(store: Slow) -> None:
    one = Wallet(store)
    one.link.start()
    store.answer()
    one.link.send()
    assert not store.asked
    store.member.wake(None)
    assert len(store.asked) == 1
    store.answer()


def test_g01_whoever_waits_for_an_answer_gets_that_of_the_next_message_though_one_is_under_way(store: Slow) -> None:
    """A pool is woken while it is made: the message that follows must not be taken for its first."""
    one, came = Wallet(store), list[BaseException | None]()
    one.link.start()
    one.link.send(looks=True, then=came.append)
    store.answer()
    assert not came, "that message was made before"
    store.answer()
    assert came == [None]


def test_g21_whoever_waits_for_an_answer_is_told_why_there_is_none(store: Slow) -> None:
    one, came = Wallet(store), list[BaseException | None]()
    one.link.start(came.append)
    store.answer(StoreWriteFailed("the disk is full"))
    one.link.send(looks=True)
    one.link.send(looks=True, then=came.append)
    store.member.cut_off()
    one.link.abandon()
    one.link.send(looks=True, then=came.append)
    assert [type(error).__name__ for error in came] == ["StoreWriteFailed", "LeaseLost", "PoolClosed"]


def test_g21_whoever_waits_for_an_answer_is_told_although_taking_it_raised(store: Slow) -> None:
    class Broken(Wallet):
        def carry_out(self) -> None:
            raise ArithmeticError("a defect")

    one, came = Broken(store), list[BaseException | None]()
    one.link.start(came.append)
    store.answer()
    assert came == [None]
    assert not one.link.is_busy


def test_g06_a_link_that_is_abandoned_takes_no_answer(store: Slow) -> None:
    one = Wallet(store)
    one.link.start()
    one.link.abandon()
    store.answer()
    assert "take" not in one.notes


def test_g15_a_last_message_is_counted_before_its_sender_leaves() -> None:
    place = SharedMemory()
    one, other = Wallet(place.member()), Wallet(place.member())
    one.link.start()
    other.link.start()
    one.link.leave(Spending(10.0, 0.0, 4.0)).result(0)
    other.link.send(looks=True)
    assert other.left == 6.0, "granted, and then gone: it counts as spent"


def test_g20_the_answer_to_a_message_of_a_lost_lease_grants_nothing_and_it_asks_again(store: Slow) -> None:
    one = Wallet(store)
    one.link.start()
    store.answer()
    one.want(4.0)
    store.member.lose()
    store.answer()
    assert "late" in one.notes
    assert one.granted == 0.0
    assert len(store.asked) == 1
    store.answer()
    assert one.granted == 4.0


def test_h04_a_store_that_cannot_be_reached_is_told_once_and_so_is_its_return(store: Slow) -> None:
    one = Wallet(store)
    one.link.start()
    store.answer(StoreUnreachable("no answer"))
    store.member.cut_off()
    assert [note for note in one.notes if "alone" in note] == ["alone StoreUnreachable"]
    assert not one.link.is_reachable
    store.member.reconnect()
    store.answer()
    assert [note for note in one.notes if "alone" in note] == ["alone StoreUnreachable", "not alone"]
    assert one.link.is_reachable


def test_h04_what_could_not_be_stored_is_told_again_and_warned_of_once(store: Slow) -> None:
    one = Wallet(store)
    one.link.start()
    for _ in range(3):
        store.answer(StoreWriteFailed("the disk is full"))
        store.member.wake(None)
    store.answer()
    assert one.notes.count("failed") == 3
    assert len(one.warnings) == 1
    assert "the disk is full" in one.warnings[0]


def test_h04_a_store_that_was_closed_ends_the_sharing_in_silence(store: Slow) -> None:
    one = Wallet(store)
    one.link.start()
    store.is_closed = True
    store.answer(PoolClosed("the store is closed"))
    assert one.link.is_stopped
    assert one.warnings == []
    one.want(3.0)
    assert not store.asked


def test_g24_a_state_of_a_newer_release_ends_the_sharing_with_a_warning() -> None:
    place = SharedMemory()
    place.texts["budget"] = '{"v": 99}'
    one = Wallet(place.member())
    one.link.start()
    assert one.link.is_stopped
    (said,) = one.warnings
    assert "newer" in said
    assert said.endswith("it spends nothing more")
    assert place.texts["budget"] == '{"v": 99}'


def test_g24_an_unreadable_state_is_begun_anew_with_a_warning() -> None:
    place = SharedMemory()
    place.texts["budget"] = "garbage"
    one = Wallet(place.member())
    one.link.start()
    assert "unreadable" in one.warnings[0]
    one.want(4.0)
    assert one.granted == 4.0


def test_h01_what_one_process_takes_the_others_hear_of() -> None:
    place = SharedMemory()
    one, other = Wallet(place.member()), Wallet(place.member())
    one.link.start()
    other.link.start()
    one.want(4.0)
    assert (one.granted, other.left) == (4.0, 6.0)


def test_h01_a_pool_that_is_dropped_leaves_when_the_store_next_wakes_it() -> None:
    place = SharedMemory()
    member = place.member()
    one, other = Wallet(member), Wallet(place.member())
    one.link.start()
    other.link.start()
    one.want(4.0)
    del one
    gc.collect()
    member.wake(None)
    other.link.send(looks=True)
    assert other.left == 6.0, "what it held counts as spent"
    assert place.texts["budget"].count("/") == 1


def test_h01_what_is_noted_with_the_lock_held_is_sent_when_it_is_not(store: Slow) -> None:
    one = Wallet(store)
    one.link.start()
    store.answer()
    with one.lock:
        one.wants = 2.0
        one.link.note()
        one.link.send()
        assert not store.asked, "the lock is held: a finaliser may have called"
        one.link.note()
    send_due()
    assert len(store.asked) == 1
    store.answer()
    assert one.granted == 2.0


def test_g06_a_forked_child_takes_part_as_another_and_has_nothing_of_its_parent() -> None:
    place = SharedMemory()
    store = Slow(place.member())
    one = Wallet(store)
    one.link.start()
    store.answer()
    one.want(4.0)
    store.answer()
    assert one.granted == 4.0
    one.link.after_fork()
    assert one.granted == 0.0
    store.member = place.member()
    one.want(1.0)
    store.answer()
    assert (one.granted, one.left) == (1.0, 5.0)
