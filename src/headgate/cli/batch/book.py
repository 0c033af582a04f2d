"""The book of a run: which record is next, which are open, which are done, and what is to be written of them. Pure.

In order, a result waits until all earlier records are done; it is noted as early meanwhile, so that a run that is
killed need not do it again. As they finish, each is written at once, and the book remembers which records between the
first open one and the last begun one are open. Both are bounded by the window, so the book has a constant size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headgate.cli.batch.encoding import Encoder, Unwritable, failure_line
from headgate.cli.batch.ids import Ids, entry, hash_of
from headgate.cli.batch.journal import START, Early, Place, Span, State, ranges, whole
from headgate.cli.batch.meter import MOST_TENANTS, OTHERS, Tally
from headgate.cli.batch.sources import Item
from headgate.resources.costs import AnyCost, Cost


class Settled(NamedTuple):
    """A record that is done."""

    place: Place
    """In order: behind it; else before it."""
    line: bytes | None
    """What is written of it; None: nothing, because an earlier run has done it."""
    failed: bool
    cost: float
    id: bytes
    """Its entry in the file of ids."""


class Pending:
    """What is to be written with the next group.

    It holds lines and places, not records: thousands of those would be looked at by the collector of garbage again and
    again (benchmarks/map.py).
    """

    __slots__ = ("early", "lines", "more", "places", "size", "start")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        """In the order in which they are written."""
        self.places: list[Place] = []
        """Of each line, as `Settled` has them."""
        self.more: dict[int, Settled] = {}
        """By the number of the line: what is known of a record beyond these, unless it is only a result."""
        self.early: list[int] = []
        """Numbers of records that finished before their turn."""
        self.size: int = 0
        self.start: Place = START
        """In order: before the first line."""

    def __bool__(self) -> bool:
        return self.size > 0

    def settled(self) -> list[Settled]:
        """All of it, but early results."""
        plain = enumerate(zip(self.places, self.lines, strict=True))
        return [self.more.get(number) or Settled(place, line, False, 0.0, b"") for number, (place, line) in plain]


@dataclass(frozen=True, slots=True)
class Group:
    """What is written at once, and how far the run is then."""

    out: bytes
    failed: bytes
    ids: bytes
    early: list[Early]
    state: State


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
_ITEM = 256  # bytes, about, that a record takes while nothing is written of it


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
        self._open: dict[int, Place] = {}  # as they finish: what was handed out, and the place before it
        self._waiting: dict[int, Settled] = {}  # in order: what is done before its turn
        self._kept: set[int] = set()  # of those and of what is pending: what stands in the journal as early
        self._unwritten: list[Settled] = []  # as they finish: what was taken back
        self.saved: State = state
        """How far the run is as far as it is written."""

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
                self._open[index] = item.before
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
    def has_early(self) -> bool:
        """Whether the journal has results of an earlier run that were not met in the input yet."""
        return bool(self._early)

    def pass_over_done(self) -> bool:
        """Settle what an earlier run has finished, up to the first record that is to be run. True: `add` more first."""
        queue = self._queue
        while queue and not self.is_at_limit:
            item = queue[-1]
            if item.index not in self._early and not (item.index < self._known and self._is_done(item.index)):
                break
            if not self._ordered:
                self._open[item.index] = item.before
            queue.pop()
            self._seen = item.after
            self._was_done(item)
        return not queue

    @property
    def is_at_limit(self) -> bool:
        """Whether all records that are wanted were handed out, though there may be more."""
        return bool(self._queue) and self._limit is not None and self._queue[-1].index >= self._limit

    def _was_done(self, item: Item) -> bool:
        """Pass over a record that an earlier run has finished."""
        early = self._early.pop(item.index, None)
        if early is not None:
            self._name(item)
            self._kept.add(item.index)
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
        remedy = '--reserve needs a number of tokens, 0 or more, or {"input": number, "output": number}'
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
        index, name = item.index, b""
        if self._ids is not None and item.id is not None and line is not None and not self._retry:
            name = entry(hash_of(item.id), item.line)
        pending = self.pending
        if not self._ordered:
            del self._open[index]
            place = item.before
        elif index == self._turn:
            if not pending.lines:
                pending.start = self._low
            self._turn += 1
            self._low = place = item.after
        else:
            self._waiting[index] = Settled(item.after, line, failed, cost, name)
            if line is not None and index not in self._kept:
                pending.early.append(index)
                pending.size += len(line)
            return
        if failed or cost or name or line is None:
            self._write(place, line, failed, cost, name)
        else:  # as `_write` does (benchmarks/map.py)
            pending.lines.append(line)
            pending.places.append(place)
            pending.size += len(line)
        if self._waiting:
            self._write_waiting()

    def _write_waiting(self, most: int | None = None) -> int:
        """Have those written whose turn has come; returns how many."""
        count = 0
        while count != most and (waiting := self._waiting.pop(self._turn, None)) is not None:
            if not self.pending.lines:
                self.pending.start = self._low
            self._turn += 1
            self._low = waiting.place
            self._write(*waiting)
            count += 1
        return count

    def _write(self, place: Place, line: bytes | None, failed: bool, cost: float, name: bytes) -> None:
        pending = self.pending
        if line is None and (not self._ordered or not pending.lines):
            return  # nothing that could be taken back stands before it
        if failed or cost or name or line is None:
            pending.more[len(pending.lines)] = Settled(place, line, failed, cost, name)
        pending.lines.append(line or b"")
        pending.places.append(place)
        pending.size += _ITEM if line is None else len(line)

    # -- where less is written than is done ----------------------------------------------------------------------------

    def take_back(self) -> None:
        """Undo that something is pending: it could not be written. `offer` has it written in smaller groups."""
        pending, self.pending = self.pending, Pending()
        if not self._ordered:
            self._open.update((one.place[0], one.place) for one in pending.settled())
            self._unwritten += pending.settled()
        elif pending.lines:
            self._turn, self._low = pending.start[0], pending.start
            self._waiting.update((one.place[0] - 1, one) for one in pending.settled())

    def offer(self, most: int, *, early: bool) -> int:
        """Have some written of those that were taken back; returns how many.

        `early`: as results that wait for their turn, in the journal, which may have room where the output has none. Of
        those that have no order the shortest go first: so the most are kept.
        """
        if early:
            numbers = sorted(self._unkept(), key=lambda index: len(self._waiting[index].line or b""))[:most]
            self.pending.early = numbers
            self.pending.size += sum(len(self._waiting[index].line or b"") for index in numbers)
            return len(numbers)
        if self._ordered:
            return self._write_waiting(most)
        self._unwritten.sort(key=lambda one: len(one.line or b""))
        offered, self._unwritten = self._unwritten[:most], self._unwritten[most:]
        for one in offered:
            del self._open[one.place[0]]
            self._write(*one)
        return len(offered)

    @property
    def unwritten_count(self) -> int:
        """How many records are done and not written."""
        back = 1 if self._ordered else 0
        return sum(one.place[0] - back not in self._kept for one in self._not_written()) + len(self._unkept())

    def _not_written(self) -> list[Settled]:
        return [one for one in (*self.pending.settled(), *self._unwritten) if one.line is not None]

    def _unkept(self) -> list[int]:
        return [index for index, one in self._waiting.items() if one.line is not None and index not in self._kept]

    # -- what is to be remembered --------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """Behind the last record that was handed out."""
        return self._seen

    @property
    def done(self) -> tuple[int, int]:
        """How many results and failures are written, by earlier runs too, and with those that wait for their turn."""
        results, failures = self.kept
        return self.saved.results + results, self.saved.failures + failures

    @property
    def kept(self) -> tuple[int, int]:
        """How many results and failures are in the journal only: they wait for their turn, or for room."""
        kept = [one.failed for one in (*self._early.values(), *self._early_of_others)]
        if self._kept:
            back = 1 if self._ordered else 0
            kept += [one.failed for index, one in self._waiting.items() if index in self._kept]
            kept += [one.failed for one in self._not_written() if one.place[0] - back in self._kept]
        return len(kept) - sum(kept), sum(kept)

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
        return self.group().state

    def group(self) -> Group:
        """Return what is pending as it is written."""
        pending, before = self.pending, self.saved
        lines, failures, ids, cost = pending.lines, [], [], 0.0
        if pending.more:
            settled = pending.settled()
            lines = [one.line for one in settled if one.line is not None and not one.failed]
            failures = [one.line for one in settled if one.line is not None and one.failed]
            ids = [one.id for one in settled]
            cost = sum(one.cost for one in settled)
        out, failed, named = b"".join(lines), b"".join(failures), b"".join(ids)
        if lines and not before.out:
            out = self._encoder.header() + out
        span = self._now()
        state = replace(
            self._state,
            main=self._state.main if self._retry else span,
            retry=span if self._retry else self._state.retry,
            out=before.out + len(out),
            failed=before.failed + len(failed),
            ids=before.ids + len(named),
            results=before.results + len(lines),
            failures=before.failures + len(failures),
            cost=before.cost + cost,
            columns=self._encoder.columns,
        )
        return Group(out, failed, named, self.early(pending.early), state)

    def written(self, group: Group) -> None:
        """Forget what was pending: it is written."""
        if self._kept:
            back = 1 if self._ordered else 0
            self._kept.difference_update(place[0] - back for place in self.pending.places)
        self._kept.update(one.index for one in group.early)
        self.saved = group.state
        self.pending = Pending()

    def early(self, only: Iterable[int] | None = None) -> list[Early]:
        """Return the results that wait for their turn: all, or those of some records."""
        found = [] if only is not None else [*self._early_of_others, *self._early.values()]
        for index in self._waiting if only is None else only:
            one = self._waiting.get(index)
            if one is not None and one.line is not None:
                found.append(Early(index, one.failed, one.line.decode(), one.cost, self._retry))
        return found

    def _now(self) -> Span:
        if self._ordered:
            low = self._low
            undone = range(self._turn, self._seen[0])
            skipped = {index for index, one in self._waiting.items() if one.line is None}
            still_open = ranges(index for index in undone if index not in skipped) if skipped else whole(undone)
        else:
            numbers = sorted(self._open)
            low = self._open[numbers[0]] if numbers else self._seen
            still_open = ranges(numbers)
        return self._span.reached(low, self._seen, still_open)


def _amount(given: Any) -> AnyCost | None:
    """A number of tokens, or a Cost, also as {"input": 800, "output": 200}; None if it is neither."""
    if isinstance(given, Cost):
        return given
    if isinstance(given, Mapping) and given and given.keys() <= {"input", "output"}:
        parts = {name: _number(part) for name, part in given.items()}
        known = {name: part for name, part in parts.items() if part is not None}
        return Cost(**known) if known.keys() == parts.keys() else None
    return _number(given)


def _number(given: Any) -> float | None:
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
