"""The book of a run: which record is next, which are open, which are done, and what is to be written of them. Pure.

In order, a result waits until all earlier records are done; it is noted as early meanwhile, so that a run that is
killed need not do it again. As they finish, each is written at once, and the book remembers which records between the
first open one and the last begun one are open. Both are bounded by the window, so the book has a constant size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headgate.cli.batch.encoding import Encoder, Unwritable, failure_line
from headgate.cli.batch.ids import Ids, entry, hash_of
from headgate.cli.batch.journal import Early, Place, Span, State, ranges, whole
from headgate.cli.batch.meter import MOST_TENANTS, OTHERS, Tally
from headgate.cli.batch.sources import Item


@dataclass(slots=True)
class Pending:
    """What is to be written with the next group."""

    out: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    """Numbers of records that finished before their turn."""
    size: int = 0

    def __bool__(self) -> bool:
        return self.size > 0


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields of records and results mean something."""

    id: str | None = None
    tenant: str | None = None
    priority: str | None = None
    cost: str | None = None
    reserve: str | Callable[[Any], Any] | None = None
    """How many tokens a record reserves: a field, or a function of the record."""


PLAIN = Fields()


class Book:
    """Hands out records and takes their results."""

    def __init__(
        self,
        state: State,
        encoder: Encoder,
        *,
        retry: bool = False,
        ordered: bool = True,
        window: int = 1000,
        limit: int | None = None,
        fields: Fields = PLAIN,
        early: Iterable[Early] = (),
        ids: Ids | None = None,
    ) -> None:
        span = (state.retry if retry else state.main) or Span()
        self.pending: Pending = Pending()
        self.totals: Tally = Tally()
        """What this run did."""
        self.tenants: dict[str, Tally] = {}
        self._state = state
        self._retry = retry
        self._encoder = encoder
        self._ordered = ordered
        self._window = window
        self._limit = limit
        self._fields = fields
        self._ids = ids
        self._early = {one.index: one for one in early if one.retry == retry}
        self._early_of_others = [one for one in early if one.retry != retry]
        self._span = span
        self._is_done = span.is_done()
        self._known = span.seen[0]
        """Records from this number on are new: nothing of them is done."""
        self._is_plain = fields == Fields(cost=fields.cost)
        self._queue: list[Item] = []  # the next one last
        self._low: Place = span.low
        self._seen: Place = span.low
        self._turn = span.low[0]  # in order: the number of the record that is written next
        self._open: dict[int, Item] = {}  # as they finish: what was handed out
        self._waiting: dict[int, tuple[Item, bytes | None, bool, float]] = {}  # in order: what is done before its turn
        self._results, self._failures, self._cost = state.results, state.failures, state.cost
        self._sizes = [state.out, state.failed, state.ids]

    # -- handing out ---------------------------------------------------------------------------------------------------

    @property
    def needs_more(self) -> bool:
        """Whether the next batch of records is to be added."""
        return not self._queue

    def add(self, items: list[Item]) -> None:
        """Add the next records of the input."""
        items.reverse()
        self._queue = items

    def take(self) -> Item | None:
        """Take the next record that is to be run; None: there is none before `add`, or before others are done."""
        queue = self._queue
        while queue:
            item = queue[-1]
            index = item.index
            if self._limit is not None and index >= self._limit:
                return None
            if self._ordered:
                if index - self._turn >= self._window:
                    return None
            elif len(self._open) >= self._window:
                return None
            else:
                self._open[index] = item
            queue.pop()
            self._seen = item.after
            if index < self._known and self._was_done(item):
                continue
            if item.fault is not None:
                self.failed(item, item.fault, 0.0, attempts=0)
            elif self._is_plain or self._is_complete(item):
                return item
        return None

    @property
    def is_at_limit(self) -> bool:
        """Whether all records that are wanted were handed out, though there may be more."""
        return bool(self._queue) and self._limit is not None and self._queue[-1].index >= self._limit

    def _was_done(self, item: Item) -> bool:
        """Pass over a record that an earlier run has finished."""
        early = self._early.pop(item.index, None)
        if early is not None:
            self._name(item)
            self._settle(item, early.text.encode(), early.failed, early.cost)
            return True
        if not self._is_done(item.index):
            return False
        self._settle(item, None, False, 0.0)
        return True

    def _is_complete(self, item: Item) -> bool:
        """Read what the fields of a record say. False: it cannot be run, and is done."""
        fault = self._name(item)
        if fault is None and self._ids is not None and not self._retry:
            line = self._ids.add(hash_of(item.id), item.line)
            if line == 0:  # an earlier run over another input has done it
                self._settle(item, None, False, 0.0)
                return False
            if line is not None:
                fault = f"its {self._fields.id} {item.id!r} is that of line {line} too"
        if fault is None and self._fields.priority is not None:
            priority = self._field(item, self._fields.priority)
            if type(priority) is not int and not (isinstance(priority, str) and priority.lstrip("-").isdecimal()):
                fault = f"its {self._fields.priority} must be a whole number, got {priority!r}"
        if fault is None and self._fields.reserve is not None:
            fault = self._reserve(item, self._fields.reserve)
        if fault is not None:
            self.failed(item, ValueError(fault), 0.0, attempts=0)
        return fault is None

    def _reserve(self, item: Item, tokens: str | Callable[[Any], Any]) -> str | None:
        """Read how many tokens a record reserves; returns what is wrong with it."""
        remedy = "--reserve needs a number of tokens, 0 or more"
        if isinstance(tokens, str):
            if not isinstance(item.record, dict) or tokens not in item.record:
                return f"it has no field {tokens!r}: {remedy}"
            given, told = item.record[tokens], f"its {tokens}"
        else:
            try:
                given, told = tokens(item.record), "what the function returned for it"
            except Exception as error:
                return f"the function of --reserve failed on it: {type(error).__name__}: {error}"
        amount = _amount(given)
        if amount is None:
            return f"{told} is {given!r}: {remedy}"
        item.reserve = amount
        return None

    def _name(self, item: Item) -> str | None:
        fields = self._fields
        if fields.tenant is not None:
            tenant = self._field(item, fields.tenant)
            item.tenant = tenant if isinstance(tenant, (str, int)) else str(tenant)
        if fields.id is not None:
            item.id = self._field(item, fields.id)
            if item.id is None:
                return f"it has no field {fields.id!r}"
        return None

    def _field(self, item: Item, name: str) -> Any:
        return item.record.get(name) if isinstance(item.record, dict) else None

    # -- taking back ---------------------------------------------------------------------------------------------------

    def succeeded(self, item: Item, result: Any, seconds: float, attempts: int = 1) -> None:
        """Note the result of a record."""
        try:
            line = self._encoder.encode(result)
        except Unwritable as error:
            self.failed(item, str(error), seconds, attempts)
            return
        cost = 0.0 if self._fields.cost is None else _cost_of(result, self._fields.cost)
        tally = self.totals
        tally.done += 1
        tally.durations.add(seconds)
        if self._fields.tenant is not None or cost:
            self._tally(item, seconds, cost, failed=False)
        self._settle(item, line, False, cost)

    def failed(self, item: Item, error: BaseException | str, seconds: float, attempts: int = 1) -> None:
        """Note that a record has failed."""
        self.totals.failed += 1
        if attempts:
            self.totals.durations.add(seconds)
        self._tally(item, seconds if attempts else None, 0.0, failed=True)
        self._settle(item, failure_line(item, error, attempts), True, 0.0)

    def _tally(self, item: Item, seconds: float | None, cost: float, *, failed: bool) -> None:
        self.totals.cost += cost
        if self._fields.tenant is None:
            return
        name = str(item.tenant)
        if name not in self.tenants and len(self.tenants) >= MOST_TENANTS:
            name = OTHERS
        tally = self.tenants.setdefault(name, Tally())
        tally.done += not failed
        tally.failed += failed
        tally.cost += cost
        if seconds is not None:
            tally.durations.add(seconds)

    def _settle(self, item: Item, line: bytes | None, failed: bool, cost: float) -> None:
        """Write what is done, as soon as it may be written. `line` None: there is nothing to write."""
        if not self._ordered:
            del self._open[item.index]
            self._write(item, line, failed, cost)
        elif item.index == self._turn:
            self._turn += 1
            self._low = item.after
            self._write(item, line, failed, cost)
            if self._waiting:
                self._write_waiting()
        else:
            self._waiting[item.index] = (item, line, failed, cost)
            if line is not None:
                self.pending.early.append(item.index)
                self.pending.size += len(line)

    def _write_waiting(self) -> None:
        while (waiting := self._waiting.pop(self._turn, None)) is not None:
            self._turn += 1
            self._low = waiting[0].after
            self._write(*waiting)

    def _write(self, item: Item, line: bytes | None, failed: bool, cost: float) -> None:
        if line is None:
            return
        pending = self.pending
        if failed:
            pending.failed.append(line)
            self._failures += 1
        else:
            if not self._results and not self._sizes[0]:
                line = self._encoder.header() + line
            pending.out.append(line)
            self._results += 1
            self._cost += cost
        pending.size += len(line)
        if self._ids is not None and item.id is not None and not self._retry:
            pending.ids.append(entry(hash_of(item.id), item.line))

    # -- what is to be remembered --------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """Behind the last record that was handed out."""
        return self._seen

    @property
    def done(self) -> tuple[int, int]:
        """How many results and failures there are, with those of earlier runs, and those that wait for their turn."""
        waiting = [failed for _, line, failed, _ in self._waiting.values() if line is not None]
        failures = sum(waiting)
        return self._results + len(waiting) - failures, self._failures + failures

    @property
    def finished_share(self) -> float:
        """Which share of the records that were handed out has been finished."""
        handed_out = self._seen[0]
        running = self.open_count - len(self._waiting)
        return (handed_out - running) / handed_out if handed_out else 1.0

    @property
    def open_count(self) -> int:
        """How many records were handed out and are not written."""
        return self._seen[0] - self._turn if self._ordered else len(self._open)

    def state(self) -> State:
        """Return how far the run is when all that is pending is written."""
        pending, sizes = self.pending, self._sizes
        out, failed, ids = (
            size + sum(map(len, parts))
            for size, parts in zip(sizes, (pending.out, pending.failed, pending.ids), strict=True)
        )
        return replace(
            self._state,
            **{"retry" if self._retry else "main": self._now()},
            out=out,
            failed=failed,
            ids=ids,
            results=self._results,
            failures=self._failures,
            cost=self._cost,
            columns=self._encoder.columns,
        )

    def written(self, state: State) -> None:
        """Forget what was pending: it is written."""
        self._sizes = [state.out, state.failed, state.ids]
        self.pending = Pending()

    def early(self, only: Iterable[int] | None = None) -> list[Early]:
        """Return the results that wait for their turn: all, or those of some records."""
        found = [] if only is not None else [*self._early_of_others, *self._early.values()]
        for index in self._waiting if only is None else only:
            item, line, failed, cost = self._waiting.get(index, (None, None, False, 0.0))
            if item is not None and line is not None:
                found.append(Early(index, failed, line.decode(), cost, self._retry))
        return found

    def _now(self) -> Span:
        if self._ordered:
            low = self._low
            undone = range(self._turn, self._seen[0])
            skipped = {index for index, (_, line, _, _) in self._waiting.items() if line is None}
            still_open = ranges(index for index in undone if index not in skipped) if skipped else whole(undone)
        else:
            numbers = sorted(self._open)
            low = self._open[numbers[0]].before if numbers else self._seen
            still_open = ranges(numbers)
        return self._span.reached(low, self._seen, still_open)


def _amount(given: Any) -> float | None:
    """A number that is not negative, also one in text, as CSV has it; None if it is none."""
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        return None
    try:
        amount = float(given)
    except (ValueError, OverflowError):
        return None
    return amount if 0 <= amount < math.inf else None


def _cost_of(result: Any, name: str) -> float:
    found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else 0.0
