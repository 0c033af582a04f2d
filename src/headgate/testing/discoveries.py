"""Checks whether a discovery keeps the contract of `headgate.DiscoveryLike`, for discoveries of your own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from headgate.core.clock import clock
from headgate.discovery.port import DiscoveryEvent, DiscoveryLike, Filter
from headgate.errors import HeadgateError, InvalidArgument
from headgate.testing.leaks import no_leaks
from headgate.workers.model import WorkerMetadata
from headgate.workers.options import ChannelOptions

Make = Callable[[str], DiscoveryLike]

_PATIENCE: Final = 30.0


def check_discovery(make: Make, *, patience: float = _PATIENCE) -> None:
    """Announce workers and listen for them; AssertionError at the first thing that breaks the contract.

    Each `make(namespace)` returns the discovery of a namespace: two of an equal namespace find each other's workers.
    Every expected event must come within `patience` real seconds. Call it outside of an event loop.

    A discovery with the attribute ``publishes = False`` finds workers that others listed. It must find at least one in
    every namespace; what it tells its subscribers is checked, and that it refuses to announce workers.
    """
    publishes = getattr(make(clock.token()), "publishes", True)
    for check in _OF_ALL + (_OF_PUBLISHERS if publishes else _OF_LISTS):
        with no_leaks(grace=5.0):
            asyncio.run(check(_Place(make, f"check-{clock.token()}", patience)))


class _Place:
    """One namespace, and who listens there."""

    def __init__(self, make: Make, namespace: str, patience: float) -> None:
        self.make = make
        self.namespace = namespace
        self.patience = patience

    def discovery(self, suffix: str = "") -> DiscoveryLike:
        return self.make(self.namespace + suffix)

    @asynccontextmanager
    async def publisher(self, suffix: str = "") -> AsyncIterator[_Publisher]:
        async with self.discovery(suffix).publisher as publisher:
            yield _Publisher(publisher)

    @asynccontextmanager
    async def listener(self, filter: Filter | None = None, suffix: str = "") -> AsyncIterator[_Listener]:
        listener = _Listener(self.discovery(suffix).subscribe(filter), self.patience)
        try:
            yield listener
        finally:
            await listener.close()


class _Publisher:
    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    async def publish(self, type: Any, metadata: WorkerMetadata) -> None:
        await self._publisher.publish(type, metadata)

    async def add(self, *workers: WorkerMetadata) -> None:
        for worker in workers:
            await self.publish("worker-added", worker)

    async def drop(self, worker: WorkerMetadata) -> None:
        await self.publish("worker-dropped", worker)


class _Listener:
    """A subscription that is read all the time."""

    def __init__(self, events: AsyncIterator[DiscoveryEvent], patience: float) -> None:
        self.events: list[DiscoveryEvent] = []
        self.workers: dict[str, WorkerMetadata] = {}
        self._patience = patience
        self._news = asyncio.Event()
        self._stream = events
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for event in self._stream:
            uid = event.metadata.uid
            if event.type == "worker-added":
                assert uid not in self.workers, f"a worker that was there was added again: {event}"
            else:
                assert uid in self.workers, f"a worker that was not there was {event.type[7:]}: {event}"
            if event.type == "worker-dropped":
                del self.workers[uid]
            else:
                self.workers[uid] = event.metadata
            self.events.append(event)
            self._news.set()

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until what was told makes this true."""
        try:
            async with asyncio.timeout(self._patience):
                while not condition():
                    self._news.clear()
                    waiter = asyncio.ensure_future(self._news.wait())
                    await asyncio.wait((waiter, self._task), return_when=asyncio.FIRST_COMPLETED)
                    waiter.cancel()
                    if self._task.done():
                        self._task.result()
                        raise AssertionError(f"a subscription ended by itself; expected: {what}")
        except TimeoutError:
            told = "\n  ".join(map(str, self.events)) or "nothing"
            raise AssertionError(f"expected {what} within {self._patience:g} s, and was told:\n  {told}") from None

    async def until_workers(self, *expected: WorkerMetadata) -> None:
        wanted = {worker.uid: worker for worker in expected}
        await self.until(f"the workers {sorted(wanted)}", lambda: self.workers == wanted)

    async def next(self, type: str, worker: WorkerMetadata, after: int) -> None:
        """Wait for one event more than `after`, which must be this one."""
        await self.until(f"{type} of {worker.uid}", lambda: len(self.events) > after)
        assert self.events[after] == DiscoveryEvent(type, worker), (  # type: ignore[arg-type]
            f"expected {type} of {worker}, was told {self.events[after]}"
        )

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))
        await _close(self._stream)
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error


async def _close(stream: AsyncIterator[DiscoveryEvent]) -> None:
    if (close := getattr(stream, "aclose", None)) is not None:
        await close()


_numbers = iter(range(1, 60_000))


def _worker(**fields: Any) -> WorkerMetadata:
    number = 1024 + next(_numbers)
    return WorkerMetadata(
        **{"uid": clock.token(), "address": f"127.0.0.1:{number}", "pid": 1, "version": "1", **fields}
    )


# -- what every discovery keeps ---------------------------------------------------------------------------------------


async def _equality(place: _Place) -> None:
    one, same, other = place.discovery(), place.discovery(), place.discovery("-other")
    assert one == same, "discoveries of an equal namespace must be equal"
    assert hash(one) == hash(same), "discoveries that are equal must have an equal hash"
    if getattr(one, "publishes", True):
        assert one != other, "discoveries of different namespaces must not be equal"


async def _a_subscription_can_be_closed_before_and_after_its_first_event(place: _Place) -> None:
    for _ in range(3):
        await _close(place.discovery().subscribe())
        async with place.listener():
            await asyncio.sleep(0)


# -- what discoveries that announce workers keep ----------------------------------------------------------------------


async def _late_subscribers_get_every_current_worker(place: _Place) -> None:
    workers = [_worker() for _ in range(5)]
    async with place.publisher() as publisher, place.listener() as early:
        await publisher.add(*workers)
        await early.until_workers(*workers)
        await publisher.drop(workers[0])
        await early.until_workers(*workers[1:])
        async with place.listener() as late:
            await late.until_workers(*workers[1:])
            assert {event.type for event in late.events} == {"worker-added"}


async def _subscribers_are_independent(place: _Place) -> None:
    first, second = _worker(), _worker()
    async with place.publisher() as publisher, place.listener() as one:
        async with place.listener() as other:
            await publisher.add(first)
            await one.until_workers(first)
            await other.until_workers(first)
        await publisher.add(second)
        await one.until_workers(first, second)
        assert other.workers == {first.uid: first}


async def _namespaces_do_not_mix(place: _Place) -> None:
    here, there = _worker(), _worker()
    async with place.publisher() as one, place.publisher("-other") as other:
        await one.add(here)
        await other.add(there)
        async with place.listener() as listener, place.listener(suffix="-other") as elsewhere:
            await listener.until_workers(here)
            await elsewhere.until_workers(there)


async def _announcing_again_is_an_update(place: _Place) -> None:
    worker = _worker(tags=frozenset({"a"}))
    changed = replace(worker, tags=frozenset({"b"}), address="127.0.0.1:1")
    async with place.publisher() as publisher, place.listener() as listener:
        await publisher.add(worker)
        await listener.next("worker-added", worker, 0)
        await publisher.add(changed)
        await listener.next("worker-updated", changed, 1)
        await publisher.publish("worker-updated", worker)
        await listener.next("worker-updated", worker, 2)
        await publisher.drop(worker)
        await listener.next("worker-dropped", worker, 3)
        await publisher.add(worker)
        await listener.next("worker-added", worker, 4)


async def _another_publisher_may_announce_again_and_drop(place: _Place) -> None:
    worker, other = _worker(), _worker()
    async with place.publisher() as first, place.listener() as listener:
        await first.add(worker)
        await listener.until_workers(worker)
        async with place.publisher() as second:
            await second.add(worker, other)
            await listener.until_workers(worker, other)
        await listener.until_workers(worker)  # what only the second had announced is gone, and nothing else
        async with place.publisher() as second:
            await second.drop(worker)
            await listener.until_workers()
            await first.add(other)
            await listener.until_workers(other)


async def _the_end_of_a_publisher_drops_its_workers(place: _Place) -> None:
    workers = [_worker() for _ in range(3)]
    async with place.listener() as listener:
        for _ in range(2):  # a namespace that was left can be used again at once
            async with place.publisher() as publisher:
                await publisher.add(*workers)
                await listener.until_workers(*workers)
            await listener.until_workers()


async def _unknown_workers(place: _Place) -> None:
    known, unknown = _worker(), _worker()
    async with place.publisher() as publisher, place.listener() as listener:
        await publisher.drop(unknown)
        await publisher.add(known)
        await listener.until_workers(known)
        try:
            await publisher.publish("worker-updated", unknown)
        except HeadgateError:
            assert unknown.uid not in listener.workers, "an update that was refused was announced all the same"
        else:
            await listener.until_workers(known, unknown)
        for wrong in ("worker-changed", "", None):
            try:
                await publisher.publish(wrong, known)
            except InvalidArgument:
                continue
            raise AssertionError(f"publish({wrong!r}, ...) must raise InvalidArgument")


async def _a_filter_that_flips(place: _Place) -> None:
    plain = _worker()
    wanted = replace(plain, tags=frozenset({"wanted"}))
    always = _worker(tags=frozenset({"wanted"}))
    async with place.publisher() as publisher, place.listener(lambda worker: "wanted" in worker.tags) as listener:
        await publisher.add(plain, always)
        await listener.next("worker-added", always, 0)
        await publisher.add(wanted)
        await listener.next("worker-added", wanted, 1)
        await publisher.add(plain)
        await listener.until("worker-dropped of one that is not wanted now", lambda: len(listener.events) > 2)
        assert listener.events[2].type == "worker-dropped"
        assert listener.events[2].metadata.uid == plain.uid
        await publisher.drop(plain)
        await publisher.drop(always)
        await listener.next("worker-dropped", always, 3)


async def _metadata_arrives_as_it_was(place: _Place) -> None:
    worker = _worker(
        pid=4711,
        version="0.1.0",
        tags=frozenset({"gpu", "Zürich", "a b=c"}),
        secure=True,
        options=ChannelOptions(max_concurrent_streams=7, compression="gzip"),
        extra={"zone": "b", "cards": [1, 2.5, None, True], "nested": {"text": "x" * 900}},
    )
    bare = _worker()
    async with place.publisher() as publisher, place.listener() as listener:
        await publisher.add(worker, bare)
        await listener.until_workers(worker, bare)
        [arrived] = [event.metadata for event in listener.events if event.metadata.uid == worker.uid]
        assert arrived == worker
        assert hash(arrived) == hash(worker)
        assert isinstance(arrived.tags, frozenset)


# -- what discoveries keep that only find workers ---------------------------------------------------------------------


async def _every_subscriber_gets_every_worker(place: _Place) -> None:
    async with place.listener() as first:
        await first.until("at least one worker", lambda: bool(first.workers))
        async with place.listener() as late:
            await late.until("the same workers", lambda: late.workers == first.workers)
        one = next(iter(first.workers.values()))
        async with place.listener(lambda worker: worker != one) as others, place.listener(one.__eq__) as only:
            await only.until_workers(one)
            rest = {uid: worker for uid, worker in first.workers.items() if uid != one.uid}
            await others.until("the others", lambda: others.workers == rest)


async def _announcing_is_refused(place: _Place) -> None:
    async with place.publisher() as publisher:
        try:
            await publisher.add(_worker())
        except HeadgateError:
            return
    raise AssertionError("publish() must raise a HeadgateError, because publishes is False")


_Check = Callable[[_Place], Coroutine[Any, Any, None]]
_OF_ALL: Final[list[_Check]] = [_equality, _a_subscription_can_be_closed_before_and_after_its_first_event]
_OF_PUBLISHERS: Final[list[_Check]] = [
    _late_subscribers_get_every_current_worker,
    _subscribers_are_independent,
    _namespaces_do_not_mix,
    _announcing_again_is_an_update,
    _another_publisher_may_announce_again_and_drop,
    _the_end_of_a_publisher_drops_its_workers,
    _unknown_workers,
    _a_filter_that_flips,
    _metadata_arrives_as_it_was,
]
_OF_LISTS: Final[list[_Check]] = [_every_subscriber_gets_every_worker, _announcing_is_refused]
