"""W05, W81: what a generator on a worker is to do next: its consumer's steps, and how far it may run ahead."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headgate.errors import RemoteError
from headgate.workers.protocol.bulk import BulkPayload
from headgate.workers.protocol.messages import Advance, Stepped
from headgate.workers.serialization.pickling import dump_thrown, dumps
from headgate.workers.server import generators
from headgate.workers.server.generators import Orders, advance
from tests.conftest import SCALE

AHEAD = 100
NEXT = ("next", None)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "AHEAD", AHEAD)


def asks(times: int = 1) -> Stepped:
    return Stepped(1, "next", times, b"")


def sends(value: Any) -> Stepped:
    return Stepped(1, "send", 0, dumps(value))


def throws(error: BaseException) -> Stepped:
    return Stepped(1, "throw", 0, dump_thrown(error))


CLOSE = Stepped(1, "close", 0, b"")


def given(orders: Orders, made: int = 0) -> int:
    """How many items it makes of itself, each of so many bytes."""
    count = 0
    while (order := orders.next()) is not None:
        assert order == NEXT
        orders.made(made)
        count += 1
        assert count < 1000
    return count


# -- credit -----------------------------------------------------------------------------------------------------------


def test_w05_a_generator_rests_until_it_is_asked() -> None:
    orders = Orders(0, {})
    assert orders.next() is None
    orders.put(asks())
    assert orders.next() == NEXT
    assert orders.next() is None
    orders.put(asks(3))
    orders.put(asks(2))
    assert given(orders) == 5, "as often as it was asked"
    assert orders.steps == 0, "only steps other than next are counted"


def test_w05_to_be_asked_without_a_number_is_to_be_asked_once() -> None:
    orders = Orders(0, {})
    orders.put(asks(0))
    assert given(orders) == 1


def test_w05_what_is_made_without_prefetch_is_not_counted() -> None:
    """It was asked for, however long it is."""
    orders = Orders(0, {})
    orders.put(asks(3))
    assert given(orders, made=10 * AHEAD) == 3


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_w05_with_prefetch_it_goes_ahead_by_so_many(prefetch: int) -> None:
    orders = Orders(prefetch, {})
    orders.made(1)  # the first one, which the call asked for
    assert given(orders, made=1) == prefetch
    orders.put(asks(2))
    assert given(orders, made=1) == 2, "as many as were taken"
    orders.put(asks())
    assert given(orders, made=1) == 1
    assert orders.steps == 0


def test_w05_it_goes_ahead_by_so_many_bytes() -> None:
    orders = Orders(500, {})
    orders.made(AHEAD // 4)
    assert given(orders, made=AHEAD // 4) == 3, "what is made fills it"
    orders.put(asks())
    assert given(orders, made=AHEAD // 4) == 1, "one was taken"
    orders.put(asks(4))
    assert given(orders, made=AHEAD // 4) == 4
    orders.put(asks(2))
    assert given(orders, made=1) == AHEAD // 4 * 2, "short ones in the room of long ones"


def test_w05_one_item_more_is_made_while_there_is_any_room() -> None:
    orders = Orders(50, {})
    orders.made(AHEAD - 1)
    assert orders.next() == NEXT
    orders.made(50 * AHEAD)
    assert orders.next() is None
    orders.put(asks())
    assert orders.next() is None, "the long one is still there"
    orders.put(asks())
    assert orders.next() == NEXT


def test_w05_an_item_longer_than_all_that_is_one_at_a_time() -> None:
    orders = Orders(5, {})
    for _ in range(4):
        orders.made(3 * AHEAD)
        assert orders.next() is None
        orders.put(asks())
        assert orders.next() == NEXT, "its consumer waits for it"


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
def test_w05_steps_go_before_what_nobody_waits_for(prefetch: int) -> None:
    """A step is taken where the generator is. Those of one consumer keep their order."""
    orders = Orders(prefetch, {})
    orders.put(asks(2))
    orders.put(sends("one"))
    orders.put(throws(ValueError("two")))
    orders.put(asks())
    orders.put(CLOSE)
    assert orders.next() == ("send", "one")
    assert orders.steps == 1
    what, error = orders.next() or NEXT
    assert (what, type(error), str(error)) == ("throw", ValueError, "two")
    assert orders.steps == 2
    assert orders.next() == ("close", None)
    assert orders.steps == 3
    assert given(orders) == prefetch, "what was asked for before is of no use"


@pytest.mark.parametrize("prefetch", [0, 3])
def test_w05_a_step_needs_no_room(prefetch: int) -> None:
    orders = Orders(prefetch, {})
    orders.made(10 * AHEAD)
    assert orders.next() is None
    orders.put(sends(5))
    assert orders.next() == ("send", 5)


@pytest.mark.parametrize("step", [sends(1), throws(ValueError())], ids=lambda step: step.advance)
def test_w05_after_a_step_it_goes_ahead_as_at_first(step: Stepped) -> None:
    """What was made before is of no use to its consumer, and takes no room."""
    orders = Orders(4, {})
    orders.made(AHEAD // 2)
    assert given(orders, made=AHEAD // 2) == 1
    orders.put(step)
    assert orders.next() is not None
    orders.made(1)
    assert given(orders, made=1) == 4
    orders.put(asks(5))
    assert given(orders, made=AHEAD // 2) == 2


@pytest.mark.parametrize("value", [None, 0, "text", b"x" * 600_000, [bytearray(b"y" * 600_000)]], ids=type)
def test_w05_what_is_sent_arrives(value: Any) -> None:
    orders = Orders(0, {})
    step = sends(value)
    if isinstance(step.payload, BulkPayload):
        buffers = [bytes(part) if part.readonly else bytearray(part) for part in step.payload.segments()[1:]]
        step = step._replace(payload=BulkPayload(step.payload.pickle, buffers, step.payload.lifted))
    orders.put(step)
    assert orders.next() == ("send", value)


@pytest.mark.parametrize("what", ["send", "throw"])
def test_w05_what_cannot_be_read_is_said_so(what: Advance) -> None:
    orders = Orders(0, {})
    orders.put(Stepped(1, what, 0, b"no pickle"))
    orders.put(CLOSE)
    with pytest.raises(RemoteError, match="could not be read on the worker") as caught:
        orders.next()
    assert caught.value.remedy
    assert caught.value.__cause__ is not None
    assert orders.steps == 1, "it was taken all the same: its consumer counts it"
    assert orders.next() == ("close", None)


def test_w05_nothing_is_read_to_close_it() -> None:
    orders = Orders(0, {})
    orders.put(CLOSE._replace(payload=b"no pickle"))
    assert orders.next() == ("close", None)


# -- context ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
def test_w81_contexts_are_kept_in_the_order_of_their_steps(prefetch: int) -> None:
    """They are all set before the generator goes on, so those of steps that were overtaken too."""
    orders = Orders(prefetch, {})
    assert orders.contexts == []
    steps = [asks(2), sends(1), asks(0), throws(ValueError()), sends(2), CLOSE, asks()]
    for nth, step in enumerate(steps):
        orders.put(step._replace(context=b"%d" % nth))
    assert orders.contexts == [b"%d" % nth for nth in range(len(steps))]


@pytest.mark.parametrize("step", [asks(), sends(1), throws(ValueError()), CLOSE], ids=lambda step: step.advance)
def test_w81_a_step_without_context_leaves_nothing_to_be_set(step: Stepped) -> None:
    orders = Orders(0, {})
    orders.put(step)
    assert orders.contexts == []
    orders.put(step._replace(context=b"set"))
    orders.put(step)
    assert orders.contexts == [b"set"]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_w81_contexts_stay_until_they_are_taken(prefetch: int) -> None:
    """Nothing else drops them: not what is made, nor a step that ends what was asked for, nor one that is no pickle."""
    orders = Orders(prefetch, {})
    orders.put(asks(2)._replace(context=b"1"))
    orders.made(10 * AHEAD)
    assert (orders.next() is None) is bool(prefetch)
    orders.put(throws(ValueError())._replace(context=b"2"))
    orders.put(Stepped(1, "send", 0, b"no pickle", b"3"))
    assert orders.next() is not None
    with pytest.raises(RemoteError):
        orders.next()
    given(orders)
    assert orders.contexts == [b"1", b"2", b"3"]
    orders.contexts.clear()
    given(orders)
    orders.put(asks())
    assert orders.next() == NEXT
    assert orders.contexts == [], "once"


def test_w81_a_context_wakes_nobody_twice_and_is_there_when_it_wakes() -> None:
    async def main() -> None:
        orders = Orders(0, {})
        waiting = asyncio.ensure_future(orders.wait())
        await asyncio.sleep(0)
        orders.put(asks()._replace(context=b"1"))
        orders.put(asks()._replace(context=b"2"))
        async with asyncio.timeout(5):
            await waiting
        assert orders.contexts == [b"1", b"2"]
        assert given(orders) == 2

    asyncio.run(main())


# -- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [asks(), sends(1), CLOSE], ids=lambda step: step.advance)
def test_w05_a_step_wakes_it(step: Stepped) -> None:
    async def main() -> None:
        orders = Orders(0, {})
        waiting = asyncio.ensure_future(orders.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        orders.put(step)
        orders.put(asks())  # nobody waits: nobody is woken twice
        async with asyncio.timeout(5):
            await waiting
        assert orders.next() is not None

    asyncio.run(main())


def test_w05_a_wait_may_be_cancelled_and_begun_again() -> None:
    async def main() -> None:
        orders = Orders(0, {})
        first = asyncio.ensure_future(orders.wait())
        await asyncio.sleep(0)
        first.cancel()
        orders.put(asks())  # before the wait has seen that
        with pytest.raises(asyncio.CancelledError):
            await first
        assert orders.next() == NEXT, "the step is not lost"
        second = asyncio.ensure_future(orders.wait())
        await asyncio.sleep(0)
        orders.put(asks())
        async with asyncio.timeout(5):
            await second

    asyncio.run(main())


# -- a consumer -------------------------------------------------------------------------------------------------------


class Consumer:
    """A generator without end, and whoever consumes it: asks and tells of room as `streams.Stream` does."""

    def __init__(self, prefetch: int, sizes: list[int], chance: random.Random) -> None:
        self.orders = Orders(prefetch, {})
        self.prefetch = prefetch
        self.sizes = sizes
        self.chance = chance
        self.transit: deque[Stepped] = deque()  # steps on their way to the worker
        self.items: deque[tuple[int, int]] = deque()  # that were made: steps taken before, and size
        self.waits = True
        self.sent = 0
        self.taken = 0
        self.told: list[bytes] = []  # contexts that it sent
        self.set: list[bytes] = []  # and those that were set before the generator was last advanced
        self._make()
        self._item()  # the answer to the call

    def _make(self) -> None:
        size = self.chance.choice(self.sizes)
        self.orders.made(size)
        self.items.append((self.orders.steps, size))
        ahead = [size for steps, size in self.items if steps == self.orders.steps]  # the others will be dropped
        assert len(ahead) <= self.prefetch + self.waits
        assert sum(ahead) <= AHEAD + max(self.sizes) or len(ahead) == 1 or self.sent, "after a throw: about so much"

    def work(self) -> bool:
        """The worker has a turn. Was there something to do?"""
        heard = bool(self.transit)
        if heard and self.chance.random() < 0.5:
            self.orders.put(self.transit.popleft())
        order = self.orders.next()
        if order is not None:
            self.set += self.orders.contexts
            self.orders.contexts.clear()
            assert self.set == self.told[: len(self.set)], "each of them once, in order"
            self._make()
        return order is not None or heard

    def _ask(self, step: Stepped) -> None:
        """With what has been set since the last time, if anything was."""
        if self.chance.random() < 0.5:
            step = step._replace(context=b"%d" % len(self.told))
            self.told.append(step.context)
        self.transit.append(step)

    def _item(self) -> int:
        self.waits = True
        while not self.items:
            assert self.work(), "its consumer waits for an item, and it rests"
        self.waits = False
        return self.items.popleft()[0]

    def next(self) -> None:
        self.taken += 1
        if self.taken * 2 > self.prefetch or self.taken >= len(self.items):
            taken, self.taken = self.taken, 0
            self._ask(asks(taken))
        self._item()
        assert self.prefetch or self.set == self.told, "what it set before is set there when the item is made"

    def throw(self) -> None:
        """It catches that, and goes on. What was fetched before the step is of no use."""
        self.sent += 1
        self.taken = 0
        self._ask(throws(ValueError()))
        while self._item() < self.sent:
            pass
        assert self.set == self.told, "what it set before the step was set there when it was taken"


SIZES = [[1], [1, 30], [30, 50], [90, 110], [300]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 4, 20])
def test_w05_a_consumer_that_asks_is_answered(prefetch: int, sizes: list[int]) -> None:
    """And it is never further ahead than it may be."""
    for seed in range(int(3 + 30 * SCALE)):
        chance = random.Random(seed)
        consumer = Consumer(prefetch, sizes, chance)
        for _ in range(200):
            for _ in range(chance.choice((0, 0, 1, 30))):
                consumer.work()
            consumer.next()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_w05_a_consumer_that_threw_is_answered(prefetch: int, sizes: list[int]) -> None:
    """What it dropped then is no longer ahead of it."""
    for seed in range(int(3 + 20 * SCALE)):
        chance = random.Random(seed)
        consumer = Consumer(prefetch, sizes, chance)
        for _ in range(100):
            for _ in range(chance.choice((0, 0, 1, 30))):
                consumer.work()
            if chance.random() < 0.2:
                consumer.throw()
            else:
                consumer.next()


# -- one step ---------------------------------------------------------------------------------------------------------


async def echo() -> AsyncGenerator[Any, Any]:
    got: Any = "first"
    while got != "stop":
        try:
            got = yield got
        except ValueError as error:
            got = error


def test_w05_a_step_is_what_it_is_locally() -> None:
    async def main() -> None:
        generator = echo()
        assert await advance(generator, ("next", None)) == "first"
        assert await advance(generator, ("send", 5)) == 5
        assert await advance(generator, ("next", None)) is None
        error = ValueError("x")
        assert await advance(generator, ("throw", error)) is error
        with pytest.raises(KeyError):
            await advance(generator, ("throw", KeyError("y")))
        with pytest.raises(StopAsyncIteration):
            await advance(generator, ("next", None))
        generator = echo()
        await advance(generator, ("next", None))
        with pytest.raises(StopAsyncIteration):
            await advance(generator, ("send", "stop"))
        generator = echo()
        await advance(generator, ("next", None))
        with pytest.raises(StopAsyncIteration):
            await advance(generator, ("close", None))
        with pytest.raises(StopAsyncIteration):
            await advance(generator, ("next", None))

    asyncio.run(main())
