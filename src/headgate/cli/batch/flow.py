"""Between the input, a runner and the output: hands out records, and writes what is finished, in groups.

Results are written 50 ms after they are finished at the latest, together with all others of that time. So a kill costs
what is in flight and the results of those 50 ms, and a million quick records cost few writes. Once a second, while
something is written, a thread waits for the disk.

When a write fails, no more records are handed out. Results of calls that run are paid for, so they are written as far
as there is room, in ever smaller groups, and what has no room is tried again when the last call has ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headgate.cli.batch.book import Book
from headgate.cli.batch.output import Output, WriteFailed
from headgate.cli.batch.sources import Item, Source
from headgate.core.clock import clock
from headgate.core.threads import Threads

GROUP = 0.05
"""Seconds until a result is written."""
_LARGE = 1 << 20  # bytes that are written at once
_SYNC = 1.0  # seconds between two waits for the disk
TURN = 0.02
"""Seconds for which records that never wait may hold the event loop: signals and progress need it too."""


class Flow:
    """Feeds a runner, and takes what it gives back. Belongs to one event loop."""

    def __init__(self, source: Source, book: Book, output: Output) -> None:
        self.book: Book = book
        self.stopping: bool = False
        """No more records are handed out."""
        self.failure: BaseException | None = None
        """What ended the run, if it could not go on."""
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when no more records are handed out."""
        self.is_unsynced: bool = False
        """The disk did not confirm what was written."""
        self._source = source
        self._output = output
        self._is_exhausted = False
        self._reading: asyncio.Future[list[Item]] | None = None
        self._threads = Threads("headgate map")
        self._loop = asyncio.get_running_loop()
        self._is_refused = False  # a write has failed
        self._timer: asyncio.TimerHandle | None = None
        self._syncing: asyncio.Future[Any] | None = None
        self._next_sync = clock.now() + _SYNC

    # -- records -------------------------------------------------------------------------------------------------------

    def take(self) -> Item | None:
        """Take the next record; None: see `more`."""
        book = self.book
        while not self.stopping:
            item = book.take()
            if item is not None:
                return item
            if not book.needs_more or self._is_exhausted or self._source.is_slow:
                break
            self._add(self._source.batch())
            if book.pending.size > _LARGE:  # of records that are done without a call
                self.write()
        self._note()
        return None

    async def more(self) -> bool:
        """After `take` gave nothing: wait for a slow source. False: nothing comes, before others are done."""
        if self.stopping or self._is_exhausted or not self.book.needs_more or self._reading is not None:
            return False
        reading = self._reading = self._loop.run_in_executor(self._threads, self._source.batch)
        await asyncio.wait((reading, self.stopped), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            return False  # nobody waits for the thread: it may read for ever
        self._reading = None
        self._add(reading.result())
        return True

    @property
    def is_over(self) -> bool:
        """Whether no record will be handed out any more."""
        return self.stopping or (self.book.needs_more and self._is_exhausted) or self.book.is_at_limit

    @property
    def is_complete(self) -> bool:
        """Whether all records that are wanted are done."""
        return self.failure is None and not self.book.open_count and (self._is_exhausted or self.book.is_at_limit)

    def _add(self, items: list[Item]) -> None:
        if items:
            self.book.add(items)
        else:
            self._is_exhausted = True

    async def write_kept(self) -> None:
        """Write what the journal keeps for the output, as far as its turn has come, before anything is called.

        It is what the last run had no room for. If there still is none, the next calls would be paid for and lost.
        """
        book = self.book
        while book.has_early and not self.stopping and book.pass_over_done() and not self._is_exhausted:
            if not self._source.is_slow:
                self._add(self._source.batch())
            elif not await self.more():
                break
            if book.pending.size > _LARGE:
                self.write()
        self.write()

    # -- results -------------------------------------------------------------------------------------------------------

    def succeeded(self, item: Item, result: Any, seconds: float, attempts: int = 1) -> None:
        """Take the result of a record."""
        self.book.succeeded(item, result, seconds, attempts)
        if self._timer is None or self.book.pending.size > _LARGE:
            self._note()

    def failed(self, item: Item, error: BaseException, seconds: float, attempts: int = 1) -> None:
        """Take the failure of a record."""
        self.book.failed(item, error, seconds, attempts)
        self._note()

    def stop(self) -> None:
        """Hand out no more records."""
        self.stopping = True
        if not self.stopped.done():
            self.stopped.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the run: it cannot go on."""
        self.failure = self.failure or error
        self.stop()

    def write(self) -> None:
        """Write what is pending now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_refused:
            self._write_what_fits()
        elif self.book.pending:
            if not self._write_all():
                self._write_what_fits()
            elif self._syncing is None and clock.now() >= self._next_sync:
                self._start_sync()

    def _write_all(self) -> bool:
        group = self.book.group()
        try:
            self._output.write(group)
        except WriteFailed as error:
            self._is_refused = True
            self.fail(error)
            return False
        self.book.written(group)
        return True

    def _write_what_fits(self) -> None:
        """Write what is done in ever smaller groups: in its place, or else as early results."""
        book = self.book
        for early in (False, True):
            most = 1 << 20
            book.take_back()
            while most and self._output.can_retry and (offered := book.offer(most, early=early)):
                if not self._write_all():
                    book.take_back()
                    most = min(most, offered) // 2

    async def finish(self) -> None:
        """Write everything, and wait for the disk."""
        try:
            self.write()
            await self._wait_for_sync()
            if not self.is_unsynced:
                self._start_sync()
                await self._wait_for_sync()
        finally:
            self._threads.shutdown(wait=self._reading is None)

    def _note(self) -> None:
        """See to it that what is pending is written soon."""
        if self.book.pending.size > _LARGE:
            self.write()
        elif self._timer is None and self.book.pending:
            self._timer = self._loop.call_later(GROUP, self.write)

    def _start_sync(self) -> None:
        self._syncing = self._loop.run_in_executor(self._threads, self._output.sync)
        self._syncing.add_done_callback(self._synced)

    async def _wait_for_sync(self) -> None:
        if self._syncing is not None:
            await asyncio.wait((self._syncing,))

    def _synced(self, ended: asyncio.Future[int]) -> None:
        self._syncing = None
        self._next_sync = clock.now() + _SYNC
        try:
            number = ended.result()
        except WriteFailed as error:  # once only: the next sync would succeed, and confirm what the disk has lost
            self.is_unsynced = True
            self.fail(error)
            return
        try:
            self._output.synced(number)
            if self._output.is_long and not self._is_refused:
                self.write()  # a new journal says nothing of what is pending
                if not self._is_refused:
                    self._output.begin_journal(self.book.saved, self.book.early())
        except WriteFailed as error:
            self.fail(error)
