"""One `headgate map`: opens what it needs, runs, stops at signals, and tells how it went."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from headgate.cli.batch.book import Book, Fields
from headgate.cli.batch.encoding import encoder_of
from headgate.cli.batch.flow import Flow
from headgate.cli.batch.functions import find_function
from headgate.cli.batch.ids import Ids
from headgate.cli.batch.journal import Journal, State
from headgate.cli.batch.keys import ATTEMPTS, ERRORS, read_keys
from headgate.cli.batch.lanes import Lanes
from headgate.cli.batch.meter import Tally
from headgate.cli.batch.output import Files, Output, Paths, Stdout, WriteFailed
from headgate.cli.batch.parquet import check_installed, make_parquet
from headgate.cli.batch.pooled import Pooled
from headgate.cli.batch.resuming import Resumed, about_of, compare_shape, resumed
from headgate.cli.batch.screen import Progress, kept_line, show, summary
from headgate.cli.batch.sources import FailedSource, Source, format_of, open_source
from headgate.cli.output import WrongCall, say
from headgate.core.clock import clock

if TYPE_CHECKING:
    from headgate.resources.model import ResourceSnapshot
    from headgate.resources.pool import ResourcePool

WINDOW = 1000
"""How many records may be begun and not written: in order, behind a slow one; with fairness, in the queue."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says."""

    function: str
    input: str
    out: str
    input_format: str | None = None
    out_format: str | None = None
    max_concurrent: int = 10
    workers: int | None = None
    keys: Sequence[str] = ()
    fair: str | None = None
    priority: str | None = None
    id: str | None = None
    cost: str | None = None
    reserve: str | None = None
    retries: int = 0
    limit: int | None = None
    ordered: bool = True
    restart: bool = False
    go_on: bool = False
    """Although the function or the input has changed."""
    retry_failed: bool = False


@dataclass(slots=True)
class Ending:
    """How a run ended."""

    figures: dict[str, Any]
    lines: list[str]
    """The summary for people."""
    failure: BaseException | None
    """Why it could not go on."""
    is_unsynced: bool
    """The disk did not confirm what was written last."""
    signal: int | None
    at_once: bool
    """What was running was left alone: the process is to end now."""


class Job:
    """A run. What can be checked before it is checked when it is made."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self._formats = format_of(wishes.input, wishes.input_format), format_of(wishes.out, wishes.out_format)
        if "parquet" in self._formats:
            check_installed()
        if wishes.out == "-" and self._formats[1] == "parquet":
            raise WrongCall("Parquet cannot be written to stdout: give a file")
        self._keys = read_keys(wishes.keys, os.environ) if wishes.keys else None
        if self._keys is not None:
            self._keys.load_classifier()
        self._reserve = self._checked_reserve()
        self._function = find_function(wishes.function, 1 if self._keys is None else 2)
        self._about = about_of(self._function, wishes.input, self._formats, wishes.id)
        self._paths = Paths(wishes.out, self._formats[1])
        self._resources: ResourcePool[Any] | None = None
        self._by_key: dict[str, Tally] = {}
        self._signal: int | None = None
        self._signals = 0
        self._journal: Journal | None = None
        self._books: list[Book] = []
        self._flow: Flow | None = None
        self._failure: BaseException | None = None
        self._source: Source | None = None
        self._make_runner: Callable[[Flow], Lanes | Pooled] = self._in_lanes

    async def run(self) -> Ending:
        """Run until all is done, or until a second signal."""
        began = clock.now()
        loop = asyncio.get_running_loop()
        at_once: asyncio.Future[None] = loop.create_future()

        def signalled(number: int, frame: FrameType | None) -> None:
            self._signals += 1  # at once, also while the loop waits for stdout
            loop.call_soon_threadsafe(self._interrupted, number, at_once)

        before = [signal.signal(number, signalled) for number in _SIGNALS]
        work = asyncio.ensure_future(self._work())
        shown = asyncio.ensure_future(show(Progress(self._counts, self._states)))
        try:
            await asyncio.wait((work, at_once), return_when=asyncio.FIRST_COMPLETED)
        finally:
            shown.cancel()
            await asyncio.wait((shown,))
            for number, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(number, handler)
        complete = False
        if not work.done():
            if self._flow is not None:
                self._flow.write()
        else:
            try:
                complete = work.result()
            except OSError as error:
                self._failure = error
        return self._ending(complete, at_once=not work.done(), seconds=clock.now() - began)

    def _interrupted(self, number: int, at_once: asyncio.Future[None]) -> None:
        if self._signal is not None:
            if not at_once.done():
                at_once.set_result(None)
            return
        self._signal = number
        if self._flow is not None:
            self._flow.stop()
        say("stopping: what runs is finished; once more stops at once", sys.stderr)

    def _stopped(self, _: object) -> None:
        """Say at once why nothing more is begun: what runs may take long."""
        if self._flow is not None and isinstance(self._flow.failure, WriteFailed) and self._wishes.out != "-":
            say(f"stopping: {self._flow.failure}; what runs is finished, and kept if there is room", sys.stderr)

    # -- the work ------------------------------------------------------------------------------------------------------

    async def _work(self) -> bool:
        """Do the work; returns whether all of it is done."""
        wishes = self._wishes
        async with AsyncExitStack() as stack:
            if wishes.out == "-":
                await self._open_pools(stack)
                return await self._phase(
                    Stdout(_take_stdout(stack), 2, lambda: self._signals > 1), Journal(self._about)
                )
            if wishes.input != "-":
                self._paths.refuse_input(wishes.input)
            files = stack.enter_context(closing(Files(self._paths, with_ids=wishes.id is not None)))
            begun = self._begin(files)
            await self._open_pools(stack)
            journal = begun.journal
            if wishes.retry_failed or journal.state.retry is not None:
                done = await self._retry(files, journal)
                if wishes.retry_failed or not done:
                    return done
            ids = None if wishes.id is None else files.read_ids()
            complete = await self._phase(files, journal, ids=ids)
        if complete and self._formats[1] == "parquet":
            await asyncio.to_thread(make_parquet, self._paths.out, self._paths.final)
        return complete

    def _begin(self, files: Files) -> Resumed:
        """Begin a run, or go on with an earlier one."""
        wishes = self._wishes
        if wishes.restart:
            files.empty()
        found = files.found()
        if found is None:
            if wishes.retry_failed:
                raise WrongCall(f"nothing has failed yet: there is no run to {wishes.out}")
            begun = Resumed(Journal(self._about))
        else:
            compare_shape(found.about, self._about)
            journal, note = files.recovered(found, anyway=wishes.go_on)
            begun = resumed(journal, self._about, anyway=wishes.go_on, retry=wishes.retry_failed)
            if note is not None:
                begun.notes.append(note)
        for note in begun.notes:
            say(f"note: {note}", sys.stderr)
        self._journal = begun.journal
        files.begin(begun.journal)
        return begun

    async def _retry(self, files: Files, journal: Journal) -> bool:
        """Run the records again that have failed; returns whether all of them were."""
        early = list(journal.early.values())
        if journal.state.retry is None:
            if not journal.state.failed:
                say("nothing has failed", sys.stderr)
                return True
            journal.state = files.begin_retry(journal.state, early)
        if not await self._phase(files, journal, retry=True):
            return False
        journal.state = files.end_retry(self._books[-1].saved, self._books[-1].early())
        return True

    async def _phase(self, output: Output, journal: Journal, *, retry: bool = False, ids: Ids | None = None) -> bool:
        """Run over one input; returns whether all of it is done."""
        wishes, state = self._wishes, journal.state
        source = self._source = self._open_source(journal, retry=retry)
        try:
            book = Book(
                state,
                encoder_of(self._formats[1], state.columns),
                retry=retry,
                ordered=wishes.ordered,
                window=max(WINDOW, 4 * wishes.max_concurrent),
                limit=None if retry else wishes.limit,
                fields=Fields(wishes.id, wishes.fair, wishes.priority, wishes.cost, self._reserve),
                early=journal.early.values(),
                ids=ids,
            )
            self._books.append(book)
            flow = self._flow = Flow(source, book, output)
            await flow.write_kept()
            if self._signal is None and flow.failure is None:
                flow.stopped.add_done_callback(self._stopped)
                await self._make_runner(flow).run()
            await flow.finish()
            return flow.is_complete
        finally:
            source.close()

    def _open_source(self, journal: Journal, *, retry: bool) -> Source:
        span = journal.state.retry if retry else journal.state.main
        assert span is not None, "the retry has begun"
        if retry:
            return FailedSource(str(self._paths.retrying), span.low)
        return open_source(self._wishes.input, self._formats[0], span.low)

    # -- who runs it ---------------------------------------------------------------------------------------------------

    def _in_lanes(self, flow: Flow) -> Lanes:
        wishes, function = self._wishes, self._function
        return Lanes(flow, function.call, wishes.max_concurrent, wishes.retries, threads=not function.is_async)

    async def _open_pools(self, stack: AsyncExitStack) -> None:
        """Open the pools that the run needs."""
        wishes = self._wishes
        on_workers = wishes.workers is not None or self._function.is_routine
        if self._keys is None and not on_workers and wishes.fair is None and wishes.priority is None:
            return
        from headgate.tasks.pool import TaskPool
        from headgate.tasks.strategies import fair_round_robin, fifo, priority

        workers = None
        if on_workers:
            from headgate.workers.pool import WorkerPool

            workers = await stack.enter_async_context(WorkerPool(spawn=wishes.workers))
        if self._keys is not None:
            tries = wishes.retries + 1
            self._resources = self._keys.pool(max(ATTEMPTS, tries), max_errors=max(ERRORS, tries))
            stack.callback(self._watch_keys())
        queue = fair_round_robin() if wishes.fair is not None else fifo() if wishes.priority is None else priority()
        pool = TaskPool(
            "map",
            max_concurrent=wishes.max_concurrent,
            queue=queue,
            keep=0,
            resources=self._resources,
            workers=workers,
        )
        stack.push_async_callback(pool.close, cancel=True)
        self._make_runner = partial(
            Pooled,
            fn=self._function.call,
            pool=pool,
            retries=wishes.retries,
            fair=wishes.fair is not None,
            priority=wishes.priority,
            has_keys=lambda: any(key["status"] != "disabled" for key in self._states().values()),
        )

    def _checked_reserve(self) -> str | Callable[[Any], Any] | None:
        """Return the field that says how many tokens a record reserves, or the function of it."""
        given = self._wishes.reserve
        if given is None:
            return None
        if self._keys is None:
            raise WrongCall("--reserve reserves tokens of the quota of a key: it needs --keys")
        if not self._keys.have_tokens:
            form = 'quota = { tokens = 90000 } or "learn"'
            raise WrongCall(f"--reserve needs a quota of tokens, and no key has one: write {form} in the file of keys")
        if ":" not in given:
            return given
        function = find_function(given, 1, "the record (--reserve)")
        if function.is_async or function.is_routine:
            raise WrongCall(f"{given} cannot be async or a routine: --reserve calls it before a record is queued")
        return function.call

    def _watch_keys(self) -> Callable[[], None]:
        """Note how calls with each key end, and how long they take."""
        from headgate.core.topics import subscribe
        from headgate.resources.events import USAGE

        def released(event: Any) -> None:
            if event.name == "resource_released" and event.outcome in ("ok", "error"):
                tally = self._by_key.setdefault(event.usage.resource_id, Tally())
                tally.done += event.outcome == "ok"
                tally.failed += event.outcome == "error"
                tally.durations.add(event.duration)

        return subscribe(released, USAGE.name)

    # -- how it goes ---------------------------------------------------------------------------------------------------

    def _counts(self) -> tuple[int, int, float | None]:
        if not self._books or self._source is None:
            return 0, 0, None
        book, limit = self._books[-1], self._wishes.limit
        share = self._source.share(book.place)
        if limit is not None:
            share = max(share or 0.0, min(1.0, book.place[0] / limit))
        return *book.done, None if share is None else share * book.finished_share

    def _states(self) -> dict[str, ResourceSnapshot]:
        return {} if self._resources is None else self._resources.snapshot()

    def _ending(self, complete: bool, *, at_once: bool, seconds: float) -> Ending:
        flow, failure = self._flow, self._failure
        if flow is not None:
            failure = flow.failure or failure
        if isinstance(failure, WriteFailed) and failure.errno == errno.EINTR:
            failure = None  # the user has seen to it
        books = self._books
        written, (results, failures) = self._written()
        run = sum(book.totals.done + book.totals.failed for book in books)
        tenants: dict[str, Tally] = books[-1].tenants if books else {}
        keys = self._key_figures()
        figures: dict[str, Any] = {
            "complete": complete,
            "done": written.results + results,
            "failed": written.failures + failures,
            "written": written.results,
            "kept": results,
            "kept_failures": failures,
            "unwritten": books[-1].unwritten_count if books else 0,
            "run": run,
            "seconds": round(seconds, 3),
        }
        if books:
            figures |= {name: books[-1].totals.to_dict().get(name) for name in ("p50", "p99")}
            if cost := books[-1].saved.cost:
                figures["cost"] = round(cost, 9)
        lines = summary(figures, tenants, keys) if books else []
        if results + failures and self._wishes.out != "-":
            lines.insert(1, kept_line(figures, self._paths, has_room=not isinstance(failure, WriteFailed)))
        figures |= {"tenants": {name: tally.to_dict() for name, tally in tenants.items()}, "keys": keys}
        is_unsynced = flow is not None and flow.is_unsynced
        return Ending(figures, lines, failure, is_unsynced, self._signal, at_once)

    def _written(self) -> tuple[State, tuple[int, int]]:
        """What is in the files, and how many results and failures are in the journal only."""
        if self._books:
            return self._books[-1].saved, self._books[-1].kept
        if self._journal is None:
            return State(), (0, 0)
        failed = [one.failed for one in self._journal.early.values()]
        return self._journal.state, (len(failed) - sum(failed), sum(failed))

    def _key_figures(self) -> dict[str, Any]:
        if self._resources is None:
            return {}
        figures = {}
        for name, key in self._resources.stats().resources.items():
            told = self._by_key.get(name, Tally()).to_dict()
            figures[name] = {"status": key.status, "cooldowns": key.cooldowns, **told}
        return figures


def _take_stdout(stack: AsyncExitStack) -> int:
    """Keep stdout for results: what the function prints goes to stderr meanwhile."""
    before = sys.stdout

    def give_back() -> None:
        sys.stdout = before

    stack.callback(give_back)
    sys.stdout.flush()
    sys.stdout = sys.stderr
    return 1
