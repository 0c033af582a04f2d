"""Checks whether a placement keeps the contract of `headgate.workers.Placement`, for placements of your own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headgate.discovery.port import DiscoveryEvent
from headgate.testing.leaks import no_leaks
from headgate.workers.model import Limits, WorkerView
from headgate.workers.pool import WorkerPool
from headgate.workers.processes.exit_status import Ending
from headgate.workers.processes.placement import Launch, Placement, Retirement
from headgate.workers.processes.restarts import Trouble
from headgate.workers.routines import routine

Make = Callable[[int], Placement]

_PATIENCE: Final = 60.0
_TAG: Final = "check-placement"


def check_placement(make: Make, *, patience: float = _PATIENCE, keeps_connections: bool = False) -> None:
    """Have workers started, scaled, replaced and ended; AssertionError at the first thing that breaks the contract.

    Each `make(n)` returns a new placement for so many workers, which may listen where this process reaches them. What
    is expected of it must happen within `patience` real seconds. Call it outside of an event loop.

    With `keeps_connections` threads and open files may be left in this process, as by the client of a cluster.
    """
    for check in _CHECKS:
        with no_leaks(grace=5.0, threads=not keeps_connections, files=not keeps_connections):
            asyncio.run(check(make, patience))


class _Told:
    """An open placement, and what it tells its pool and its subscribers."""

    def __init__(self, placement: Placement, patience: float) -> None:
        self.placement = placement
        self.ready = 0
        self.ended: list[str] = []
        self.troubles: list[Trouble | None] = []
        self.events: list[tuple[str, str]] = []
        self.uids: set[str] = set()
        self._there: set[str] = set()
        self._patience = patience
        self._changed = asyncio.Event()
        self._following: asyncio.Future[None] | None = None

    def launch(self) -> Launch:
        return Launch(
            workers=self.placement.num_workers,
            tags=(_TAG,),
            limits=Limits(),
            stop_timeout=5.0,
            on_change=self._on_change,
            on_ended=self._on_ended,
            on_trouble=self._on_trouble,
        )

    def _on_change(self, ready: int) -> None:
        self.ready = ready
        self._changed.set()

    def _on_ended(self, uid: str, ending: Ending) -> None:
        assert isinstance(ending, Ending), f"on_ended is given an Ending, not a {type(ending).__name__}"
        assert uid not in self.ended, f"the end of {uid} was told twice"
        assert uid in self.uids, f"the end of {uid} was told, which never was a worker"
        self.ended.append(uid)
        self._changed.set()

    def _on_trouble(self, trouble: Trouble | None) -> None:
        self.troubles.append(trouble)
        self._changed.set()

    async def open(self) -> None:
        await self.placement.open(self.launch())
        self._following = asyncio.ensure_future(self._follow())
        self.views()

    async def _follow(self) -> None:
        async for event in self.placement.subscribe():
            self._note(event)

    def _note(self, event: DiscoveryEvent) -> None:
        uid = event.metadata.uid
        if event.type == "worker-added":
            assert uid not in self._there, f"{uid} was added twice"
            assert ("worker-dropped", uid) not in self.events, f"{uid} came back"
            assert event.metadata.address, f"{uid} was added without an address"
            self._there.add(uid)
        else:
            assert uid in self._there, f"{event.type} of {uid}, which was not there"
            if event.type == "worker-dropped":
                self._there.discard(uid)
        self.events.append((event.type, uid))
        self._changed.set()

    @property
    def there(self) -> int:
        return len(self._there)

    def views(self) -> list[WorkerView]:
        views = self.placement.workers()
        self.uids.update(view.uid for view in views)
        return views

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                while not condition():
                    self.views()
                    assert self._following is not None, "it is open"
                    if self._following.done():
                        self._following.result()
                        raise AssertionError(f"the subscription ended by itself; expected: {what}")
                    self._changed.clear()
                    await self._change()
        except TimeoutError:
            raise AssertionError(
                f"expected {what} within {self._patience:g} s; ready {self.ready}, ended {self.ended}, "
                f"events {self.events}, troubles {self.troubles}, workers {self.placement.workers()}"
            ) from None

    async def _change(self) -> None:
        """Wait until something was told; for a moment at most, since nobody is told what `workers()` returns."""
        try:
            async with asyncio.timeout(0.05):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def until_ready(self, count: int) -> None:
        await self.until(f"{count} workers that are ready", lambda: self.ready == count == len(self._there))
        views = self.views()
        assert len(views) == count, f"workers() tells of {len(views)} workers, {count} are ready"
        assert {view.state for view in views} == {"ready"}, f"workers() tells other states: {views}"
        assert {view.uid for view in views} == self._there, "workers() and subscribe() tell of different workers"
        assert all(_TAG in view.tags for view in views), "a worker does not have the tags of the launch"
        assert self.troubles, "on_trouble(None) tells that starting works"
        assert self.troubles[-1] is None, f"a start failed: {self.troubles[-1]}"

    async def until_gone(self, uid: str) -> None:
        await self.until(f"the end of {uid}", lambda: uid in self.ended)
        await self.until(f"that {uid} is dropped", lambda: ("worker-dropped", uid) in self.events)

    async def close(self, drained: Awaitable[object] | None = None) -> None:
        await self.placement.close(asyncio.sleep(0) if drained is None else drained)
        if self._following is not None:
            async with asyncio.timeout(self._patience):
                await self._following
        assert not self._there, f"it is closed and did not tell that {self._there} went"


# -- what every placement keeps. Few placements are opened: each may be processes on other machines --------------------


async def _from_opening_to_closing(make: Make, patience: float) -> None:
    placement = make(2)
    assert isinstance(placement, Placement), f"{placement!r} lacks a method of Placement"
    assert placement.num_workers in (2, None), f"made for 2 workers, it says {placement.num_workers}"
    told, drained = _Told(placement, patience), asyncio.Event()
    await told.open()
    try:
        assert placement.num_workers == 2, f"open, made for 2 workers, it says {placement.num_workers}"
        await told.until_ready(2)
        await _it_is_opened_once(told)
        await _it_scales_up_and_down(told)
        await _it_replaces_workers_that_are_retired(told)
    except BaseException:
        await placement.close(asyncio.sleep(0))
        raise
    closing = asyncio.ensure_future(told.close(drained.wait()))
    await asyncio.sleep(0.05)
    too_early, left = closing.done(), told.there
    drained.set()
    await closing
    assert not too_early, "close() did not wait until calls are drained"
    assert left == 1, "a worker went before calls were drained"


async def _it_is_opened_once(told: _Told) -> None:
    try:
        await told.placement.open(told.launch())
    except RuntimeError:
        return
    raise AssertionError("a placement must not be opened twice")


async def _it_scales_up_and_down(told: _Told) -> None:
    before = {view.uid for view in told.views()}
    await told.placement.scale(3)
    await told.until_ready(3)
    assert before < {view.uid for view in told.views()}, "a worker was replaced because others came"
    await told.placement.scale(1)
    assert len(told.views()) == 1, "scale() returned before those too many had left"
    await told.until_ready(1)


async def _it_replaces_workers_that_are_retired(told: _Told) -> None:
    told.placement.retire("w-unknown", "nobody knows it", "end")
    for how in _RETIREMENTS:
        [old] = (view.uid for view in told.views())
        told.placement.retire(old, "it is checked", how)
        await told.until_gone(old)
        await told.until_ready(1)
        assert old not in {view.uid for view in told.views()}, "a worker that was retired is still listed"
        told.placement.retire(old, "it is gone", "end")  # nothing happens


async def _it_closes_in_every_state(make: Make, patience: float) -> None:
    await make(1).close(asyncio.sleep(0))  # it was never opened
    told = _Told(make(1), patience)
    await told.open()
    try:
        await told.close(_fails())  # its worker is not ready yet
    except ZeroDivisionError:
        return
    raise AssertionError("close() must raise what `drained` raised")


async def _fails() -> None:
    raise ZeroDivisionError


async def _its_workers_run_routines(make: Make, patience: float) -> None:
    add = routine(_sum)
    async with asyncio.timeout(patience), WorkerPool(placement=make(1), quorum_timeout=patience) as pool:
        assert len(pool.workers()) == 1, f"of 1 worker there are {pool.workers()}"
        answers = await asyncio.gather(*(add(number, 1) for number in range(10)))
        assert answers == list(range(1, 11)), f"calls gave {answers}"


async def _sum(one: int, other: int) -> int:
    return one + other


_RETIREMENTS: Final[tuple[Retirement, ...]] = ("finish", "end", "unreachable")
_CHECKS: Final = (_from_opening_to_closing, _it_closes_in_every_state, _its_workers_run_routines)
