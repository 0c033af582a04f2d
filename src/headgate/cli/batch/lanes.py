"""Runs a function over records in this process, without pools: nothing is scarce but time.

A lane is an asyncio Task that takes a record, calls the function, gives back the result, and takes the next. Before it
calls, it starts the next lane, which gets its turn when the function waits for something. So a function that never
waits is called by few lanes, without a Task for each record (benchmarks/map.py), and one that waits runs in as many
lanes as allowed.

A lane whose context was changed, or whose Task was cancelled by somebody, ends, and another takes its place: no record
sees what another has set.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, NamedTuple

from headgate.cli.batch.flow import TURN, Flow
from headgate.cli.batch.sources import Item
from headgate.core.clock import clock
from headgate.core.threads import Threads

_SHORTEST, _LONGEST = 0.002, 0.02  # seconds that a thread should be busy before it is given more records
_MOST = 256  # records that a thread is given at a time


class Lanes:
    """Calls a function for many records at a time."""

    def __init__(self, flow: Flow, fn: Callable[[Any], Any], most: int, retries: int, *, threads: bool) -> None:
        self._flow = flow
        self._fn = fn
        self._most = most
        self._tries = retries + 1
        self._drive = self._call_in_thread if threads else self._call_here
        self._threads = Threads("headgate map") if threads else None
        self._context = copy_context()
        self._lanes: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] | None = None
        self._is_ended = False

    async def run(self) -> None:
        """Run until no record is left, or the flow is stopped and what runs is done."""
        self._over = asyncio.get_running_loop().create_future()
        self._start_lane()
        try:
            await self._over
        finally:
            self._is_ended = True
            for lane in self._lanes:
                lane.cancel()
            if self._threads is not None:
                self._threads.shutdown(wait=self._over.done())

    def _start_lane(self) -> None:
        lane = asyncio.Task(self._drive(), name="headgate map", context=self._context.copy())
        self._lanes.add(lane)
        lane.add_done_callback(self._ended)

    def _ended(self, lane: asyncio.Task[None]) -> None:
        self._lanes.discard(lane)
        if not lane.cancelled() and (error := lane.exception()) is not None:
            self._flow.fail(error)
        if not self._lanes and self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def _call_here(self) -> None:
        """Call an async function, one record after the other."""
        flow, fn, now, most, lanes = self._flow, self._fn, clock.now, self._most, self._lanes
        clean = copy_context()
        until = now() + TURN
        while True:
            item = flow.take()
            if item is None:
                if await flow.more():
                    continue
                return
            if len(lanes) < most:
                self._start_lane()
            began = now()
            try:
                result = await fn(item.record)
            except (Exception, asyncio.CancelledError, SystemExit) as error:
                self._raise_at_end(error)
                await self._try_again(item, error, now() - began)
            else:
                flow.succeeded(item, result, now() - began)
            if now() > until:
                await asyncio.sleep(0)
                until = now() + TURN
            if copy_context() != clean or _is_cancelled():
                self._start_lane()
                return

    async def _try_again(self, item: Item, error: BaseException, seconds: float) -> None:
        """Call an async function again after a failure, if it may be."""
        for attempt in range(2, self._tries + 1):
            began = clock.now()
            try:
                result = await self._fn(item.record)
            except (Exception, asyncio.CancelledError, SystemExit) as again:
                self._raise_at_end(again)
                error, seconds = again, clock.now() - began
            else:
                self._flow.succeeded(item, result, clock.now() - began, attempt)
                return
        self._flow.failed(item, error, seconds, self._tries)

    def _raise_at_end(self, error: BaseException) -> None:
        """Let a cancellation through that is ours."""
        if self._is_ended:
            raise error

    async def _call_in_thread(self) -> None:
        """Call a plain function in a thread: with one record, or with several if they take no time."""
        loop, size = asyncio.get_running_loop(), 1
        while True:
            items = self._take(size)
            if not items:
                if await self._flow.more():
                    continue
                return
            if len(self._lanes) < self._most:
                self._start_lane()
            began = clock.now()
            for called in await loop.run_in_executor(self._threads, self._call_all, items):
                await self._give_back(called)
            busy = clock.now() - began
            size = min(2 * size, _MOST) if busy < _SHORTEST else max(1, size // 2) if busy > _LONGEST else size

    def _take(self, count: int) -> list[Item]:
        items: list[Item] = []
        while len(items) < count and (item := self._flow.take()) is not None:
            items.append(item)
        return items

    def _call_all(self, items: list[Item]) -> list[_Called]:
        """In a thread: call the function for each record, until the flow is stopped. What is left stays open."""
        done: list[_Called] = []
        for item in items:
            if self._flow.stopping and done:
                break
            done.append(self._call_one(item))
        return done

    def _call_one(self, item: Item) -> _Called:
        attempt = 0
        while True:
            attempt += 1
            began = clock.now()
            try:
                result = self._context.copy().run(self._fn, item.record)
            except (Exception, SystemExit) as error:
                if attempt == self._tries:
                    return _Called(item, error, True, clock.now() - began, attempt)
            else:
                return _Called(item, result, False, clock.now() - began, attempt)

    async def _give_back(self, called: _Called) -> None:
        item, outcome, failed, seconds, attempts = called
        if failed:
            self._flow.failed(item, outcome, seconds, attempts)
        elif inspect.isawaitable(outcome):  # of a plain function such as `lambda record: ask(record)`
            try:
                result = await outcome
            except (Exception, asyncio.CancelledError, SystemExit) as error:
                self._raise_at_end(error)
                self._flow.failed(item, error, seconds, attempts)
            else:
                self._flow.succeeded(item, result, seconds, attempts)
        else:
            self._flow.succeeded(item, outcome, seconds, attempts)


class _Called(NamedTuple):
    """How a call in a thread ended."""

    item: Item
    outcome: Any
    failed: bool
    seconds: float
    attempts: int


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
