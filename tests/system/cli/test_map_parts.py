"""The parts of `headgate map` that decide: book, journal, sources, ids, figures. No loop, no process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate import TaskPool
from headgate.cli.batch.book import Book
from headgate.cli.batch.encoding import Unwritable, encoder_of
from headgate.cli.batch.ids import Ids, entries, entry, hash_of
from headgate.cli.batch.journal import (
    START,
    About,
    Early,
    Place,
    Reached,
    Recovered,
    Sizes,
    Span,
    State,
    about_line,
    early_line,
    ranges,
    read,
    recover,
    state_line,
    synced_line,
)
from headgate.cli.batch.meter import Durations, Rate, duration
from headgate.cli.batch.pooled import Pooled
from headgate.cli.batch.screen import Progress, show, summary
from headgate.cli.batch.sources import Item, Lines, open_source
from headgate.cli.output import WrongCall
from headgate.tasks.events import AUDIT
from headgate.testing import virtual

ABOUT = About("jobs:f", "abc", "in.jsonl", 10, 20, ("jsonl", "jsonl"))


def place(index: int) -> Place:
    return (index, index, 10 * index, index)


def items(first: int, end: int) -> list[Item]:
    return [Item(number + 1, place(number), place(number + 1), {"id": number}, None) for number in range(first, end)]


def recovered(lines: list[bytes], out: bytes, *, boot: str | None = "b", changed: float = 0.0) -> Recovered:
    """How a run goes on with this journal and these results."""
    found = read(lines)
    assert found is not None

    def sums(start: Sizes, end: Sizes) -> Sizes:
        return crc32(out[start[0] : end[0]]), 0, 0

    return recover(found.reached, ["out", "failed", "ids"], (len(out), 0, 0), sums, boot=boot, changed=changed)


class Run:
    """A run over numbers, with files that are bytes, and a journal of lines."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.out = b""
        self.lines = [about_line(ABOUT), state_line(State(), 0, boot="b", at=0.0)]

    def go(self, chance: random.Random, *, ordered: bool, steps: int) -> bool:
        """Go on for some steps, and stop as a killed process does. True: all is done."""
        found, how = read(self.lines), recovered(self.lines, self.out)
        assert found is not None
        assert how.problem is None, how
        journal = found.journal(how.state)
        state = journal.state
        self.out = self.out[: state.out]
        self.lines = [about_line(ABOUT), state_line(state, 0, boot="b", at=0.0)]
        self.lines += [early_line(one) for one in journal.early.values()]
        book = Book(state, encoder_of("jsonl"), ordered=ordered, window=7, early=journal.early.values())
        first, number, flying = state.main.low[0], 0, []
        for _ in range(steps):
            move = chance.random()
            if move < 0.5 and len(flying) < 5:
                if book.needs_more and first < self.count:
                    end = min(self.count, first + chance.randrange(1, 6))
                    book.add(items(first, end))
                    first = end
                if (item := book.take()) is not None:
                    flying.append(item)
                elif first == self.count and not flying and book.needs_more:
                    self._write_what_fits(book, number, 60)
                    return True
            elif move < 0.9 and flying:
                item = flying.pop(chance.randrange(len(flying)))
                book.succeeded(item, item.record["id"], 0.1)
            elif 0.9 <= move < 0.97:
                number = self._write(book, number)
            elif move >= 0.97:
                number = self._write_what_fits(book, number, chance.choice((1, 3, 60)))
        if book.pending:
            self._write(book, number, chance.random())
        return False

    def _write(self, book: Book, number: int, share: float = 1.0) -> int:
        """Write what is pending. With a share below 1 the process is killed meanwhile."""
        if book.pending:
            group = book.group()
            lines = [early_line(one) for one in group.early]
            lines.append(state_line(group.state, number + 1, (crc32(group.out), 0, 0), boot="b", at=0.0))
            self.lines += lines
            self.out += group.out if share == 1 else group.out[: int(share * len(group.out))]
            assert share < 1 or len(self.out) == group.state.out
            book.written(group)
        return number + 1

    def _write_what_fits(self, book: Book, number: int, room: int) -> int:
        """Write as much as a disk has room for that is nearly full."""
        for early in (False, True):
            book.take_back()
            if book.offer(room, early=early):
                number = self._write(book, number)
        return number


@example(seed=60, orders=[True, False])  # what was early is written by a run that does not care for the order
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), orders=st.lists(st.booleans(), min_size=1, max_size=6))
def test_c11_any_stops_write_every_record_once(seed: int, orders: list[bool]) -> None:
    chance = random.Random(seed)
    run = Run(60)
    for ordered in orders:
        run.go(chance, ordered=ordered, steps=chance.randrange(1, 120))
    while not run.go(chance, ordered=orders[-1], steps=400):
        pass
    written = [int(line) for line in run.out.split()]
    assert sorted(written) == list(range(60))
    if all(orders):
        assert written == list(range(60))


def test_c11_c12_what_is_early_is_not_done_again() -> None:
    book = Book(State(), encoder_of("jsonl"))
    book.add(items(0, 5))
    first, second, third = book.take(), book.take(), book.take()
    assert first is not None and second is not None and third is not None  # noqa: PT018
    book.succeeded(third, "c", 0.1)
    book.failed(second, ValueError("no"), 0.1)
    group = book.group()
    assert (group.state.main.low, group.state.out) == (START, 0)
    again = Book(group.state, encoder_of("jsonl"), early=group.early)
    again.add(items(0, 5))
    taken = [item.index for item in iter(again.take, None)]
    assert taken == [0, 3, 4]


def test_c12_a_window_bounds_what_is_begun_behind_a_slow_record() -> None:
    for ordered in (True, False):
        book = Book(State(), encoder_of("jsonl"), ordered=ordered, window=4)
        book.add(items(0, 100))
        taken = list(iter(book.take, None))
        assert len(taken) == 4
        book.succeeded(taken[3], 3, 0.1)
        assert (book.take() is None) == ordered, "in order it waits for the first; else there is room"
        book.succeeded(taken[0], 0, 0.1)
        assert book.take() is not None


@pytest.mark.parametrize("ordered", [True, False])
def test_c13_c15_what_was_read_is_not_done_before_it_is_finished_and_written(ordered: bool) -> None:
    book = Book(State(), encoder_of("jsonl"), ordered=ordered)
    book.add(items(0, 10))
    taken = list(iter(book.take, None))
    assert (book.done, book.finished_share) == ((0, 0), 0.0)
    book.succeeded(taken[3], 3, 0.1)
    book.failed(taken[4], ValueError("no"), 0.1)
    assert (book.done, book.unwritten_count, book.finished_share) == ((0, 0), 2, 0.2)
    book.written(book.group())
    assert (book.done, book.unwritten_count) == ((1, 1), 0)
    for item in (*taken[:3], *taken[5:]):
        book.succeeded(item, 0, 0.1)
    assert (book.done, book.unwritten_count, book.finished_share) == ((1, 1), 8, 1.0)
    book.written(book.group())
    assert book.done == (9, 1)


def test_c12_the_state_is_small_behind_a_record_that_never_ends() -> None:
    book = Book(State(), encoder_of("jsonl"), ordered=False)
    book.add(items(0, 5000))
    stuck = book.take()
    assert stuck is not None
    while (item := book.take()) is not None:
        book.succeeded(item, 1, 0.1)
    state = book.state()
    assert (state.main.low, state.main.seen, state.main.open) == (START, place(5000), ((0, 1),))
    assert len(state_line(state, 1, boot=None, at=0.0)) < 400


def journal_of(*outs: bytes, boot: str | None = "b", synced: int | None = None) -> list[bytes]:
    """A journal of groups that were written one after the other, a second each."""
    size, lines = 0, [about_line(ABOUT), state_line(State(), 0, boot=boot, at=0.0)]
    for number, out in enumerate(outs, 1):
        size += len(out)
        lines.append(state_line(State(out=size), number, (crc32(out), 0, 0), boot=boot, at=float(number)))
    return lines if synced is None else [*lines, synced_line(synced)]


def test_c11_a_journal_is_read_up_to_its_first_torn_line() -> None:
    first, second = State(out=1), State(out=2, main=Span(place(2), place(3), ((2, 3),)), columns=("a",))
    lines = [
        about_line(ABOUT),
        state_line(first, 1, boot="b", at=0.0),
        state_line(second, 2, (5, 6, 7), boot="b", at=1.0),
    ]
    whole = [Reached(first, (0, 0, 0), "b", 0.0), Reached(second, (5, 6, 7), "b", 1.0)]
    for torn in ([], [lines[1][:-1]], [synced_line(2)[:-1]]):
        found = read([*lines, *torn])
        assert found is not None
        assert (found.about, found.reached) == (ABOUT, whole)
    damaged = lines[2].replace(b'"out":2', b'"out":3')
    found = read([*lines[:2], damaged, lines[2]])
    assert found is not None
    assert found.reached == whole[:1]
    assert read([damaged]) is None
    assert read([lines[0]]) is None, "it is written together with the first state"
    assert read([]) is None


def test_c11_after_a_kill_a_state_counts_if_its_results_are_there() -> None:
    lines = journal_of(b"a\n", b"bb\n", b"ccc\n")
    for out, size in ((b"a\nbb\nccc\n", 9), (b"a\nbb\nccc", 5), (b"a\nbb\n", 5)):
        assert recovered(lines, out) == Recovered(State(out=size))
    for out in (b"a\nbb", b"", b"a\nbb\nccd\n", b"a\nbc\nccc\n"):
        how = recovered(lines, out)
        assert how.problem is not None
        assert how.is_hopeless, "nothing that a kill does"


@pytest.mark.parametrize("boot", ["another", None])
def test_c11_after_a_power_cut_what_verifies_counts(boot: str | None) -> None:
    lines = journal_of(b"a\n", b"bb\n", b"ccc\n", synced=1)
    for out, size in ((b"a\nbb\nccc\n", 9), (b"a\nbb\n\0\0\0\0", 5), (b"a\n\0\0\0ccc\n", 2), (b"a\nb", 2)):
        assert recovered(lines, out, boot=boot) == Recovered(State(out=size))
    how = recovered(lines, b"\n", boot=boot)
    assert how.problem is not None
    assert how.is_hopeless, "it was synced"


def test_c15_results_that_the_journal_does_not_know_are_a_problem() -> None:
    lines, out = journal_of(b"a\n", b"bb\n", b"ccc\n", synced=1), b"a\nbb\nccc\n"
    for cut in range(3, 5):  # behind the first and the second group
        how = recovered(lines[:cut], out)
        assert how.problem is not None
        assert "out has 9 bytes, and its journal knows of" in how.problem
        assert not how.is_hopeless
    cut_long_ago = recovered(lines[:3], out, boot="another", changed=100.0)
    assert cut_long_ago.problem is not None
    power_cut = recovered(lines[:3], out, boot="another", changed=5.0)
    assert power_cut.problem is None
    assert power_cut.note is not None
    assert (power_cut.state, power_cut.note.endswith("the records of the rest run again")) == (State(out=2), True)


def test_c15_a_journal_cut_at_any_byte_is_a_problem_if_the_output_has_more() -> None:
    lines, out = journal_of(b"a\n", b"bb\n", b"ccc\n", synced=3), b"a\nbb\nccc\n"
    data = b"".join(lines)
    for size in range(len(data)):
        cut = data[:size].splitlines(keepends=True)
        if data[:size].count(b"\n") < 2:
            assert read(cut) is None, size
        elif size < len(data) - len(lines[-1]):
            assert recovered(cut, out).problem is not None, size
        else:  # only the line is torn that says that the disk has all
            assert recovered(cut, out) == Recovered(State(out=9)), size


def test_c15_what_has_no_room_is_kept_as_early_result_or_offered_again() -> None:
    book = Book(State(), encoder_of("jsonl"))
    book.add(items(0, 4))
    taken = list(iter(book.take, None))
    for item, result in zip(taken, ["a" * 50, "b", "c" * 9, "d" * 20], strict=True):
        book.succeeded(item, result, 0.1)
    book.take_back()
    assert (book.unwritten_count, book.offer(2, early=True)) == (4, 2)
    group = book.group()
    assert (group.out, [one.index for one in group.early]) == (b"", [1, 2]), "the shortest"
    book.written(group)
    assert (book.done, book.unwritten_count) == ((2, 0), 2)
    assert book.offer(3, early=False) == 3
    book.take_back()
    assert book.offer(1, early=False) == 1
    book.written(book.group())
    assert (book.done, book.unwritten_count, book.saved.main.low) == ((3, 0), 1, place(1))


def test_c11_early_results_are_forgotten_when_their_turn_has_come() -> None:
    early = [Early(1, False, "x\n"), Early(5, True, "y\n"), Early(0, False, "z\n", retry=True)]
    state = State(main=Span(place(2), place(9), ((2, 9),)))
    lines = [about_line(ABOUT), *map(early_line, early), state_line(state, 1, boot="b", at=0.0)]
    found = read(lines)
    assert found is not None
    assert list(found.journal(state).early.values()) == [early[1]]


def test_c11_a_journal_of_a_newer_release_is_refused() -> None:
    newer = json.loads(about_line(ABOUT)[9:]) | {"format": 2}
    from headgate.cli.batch import journal as module

    with pytest.raises(WrongCall, match="newer release"):
        read([module.checked(newer)])


def test_c11_numbers_are_put_together_to_ranges() -> None:
    assert ranges([1, 2, 3, 7, 9, 10]) == ((1, 4), (7, 8), (9, 11))
    assert ranges([]) == ()


@settings(max_examples=50)
@given(text=st.binary(max_size=300), skipped=st.integers(0, 5))
def test_c10_c11_a_source_goes_on_anywhere_with_the_same_records(
    text: bytes, skipped: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "in"
    path.write_bytes(text.replace(b"a", b"\n").replace(b"b", b'"x"\n'))
    for kind in ("jsonl", "csv"):
        try:
            whole = list(all_of(str(path), kind, START))
        except WrongCall:
            continue  # two columns of one name
        if skipped < len(whole):
            rest = list(all_of(str(path), kind, whole[skipped].before))
            assert [(one.before, one.line, one.record) for one in rest] == [
                (one.before, one.line, one.record) for one in whole[skipped:]
            ]


def all_of(path: str, kind: str, start: Place) -> Iterator[Item]:
    source = open_source(path, kind, start)
    try:
        while batch := source.batch():
            yield from batch
    finally:
        source.close()


def test_c12_a_line_longer_than_a_block_is_one_record(tmp_path: Path) -> None:
    long = "x" * 700_000
    (tmp_path / "in").write_text(f'1\n"{long}"\r\n3', "utf-8")
    assert [item.record for item in all_of(str(tmp_path / "in"), "jsonl", START)] == [1, long, 3]
    lines = Lines(str(tmp_path / "in"))
    assert lines.take() == b"1\n"
    lines.close()


def test_c10_a_mark_of_utf8_at_the_begin_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf[1]\n")
    [item] = all_of(str(tmp_path / "in"), "jsonl", START)
    assert (item.record, item.fault) == ([1], None)


@given(st.sets(st.integers(1, 2**64 - 1), max_size=3000))
@settings(max_examples=10)
def test_c12_ids_are_found_again(numbers: set[int]) -> None:
    ids, known = Ids(), sorted(numbers)
    for line, number in enumerate(known, 1):
        assert ids.add(number, line) is None
    for line, number in enumerate(known, 1):
        assert ids.add(number, 0) == line
    assert len(ids) == len(known)
    assert list(entries(b"".join(entry(number, 3) for number in known))) == [(number, 3) for number in known]


def test_c12_ids_of_different_types_differ() -> None:
    assert len({hash_of(1), hash_of("1"), hash_of(None), hash_of([1])}) == 4
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})


def test_c12_models_and_properties_that_raise() -> None:
    class Model:
        def model_dump(self, mode: str) -> Any:
            return {"mode": mode}

    class Bad(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no")

    encoder = encoder_of("jsonl")
    assert encoder.encode([Model()]) == b'[{"mode": "json"}]\n'
    with pytest.raises(Unwritable, match="no"):
        encoder.encode(Bad(a=1))
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(Unwritable):
        encoder.encode(circle)


def test_c13_percentiles_are_near() -> None:
    times = Durations()
    assert times.percentile(0.5) is None
    for number in range(1, 1001):
        times.add(number / 1000)
    for share in (0.5, 0.99):
        assert times.percentile(share) == pytest.approx(share, rel=0.07)
    extreme = Durations()
    for seconds in (0.0, 1e9):
        extreme.add(seconds)
    assert extreme.count == 2


def test_c13_rate_and_time_left() -> None:
    rate = Rate()
    assert (rate.per_second, rate.left) == (0.0, None)
    for second in range(100):
        rate.saw(float(second), 10 * second, second / 200)
    assert rate.per_second == pytest.approx(10)
    assert rate.left == pytest.approx(101)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123, "1.2 ms"), (0.85, "850 ms"), (3.14, "3.1 s"), (75, "75 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_c13_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def key(status: str, cooldown: float = 0.0) -> Any:
    return {"status": status, "in_flight": 2, "cooldown_seconds_remaining": cooldown}


def test_c13_one_line_in_ten_seconds_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"a": key("healthy"), "b": key("cooling_down", 12.3), "c": key("disabled")}

    @virtual
    async def play() -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        began = loop.time()
        progress = Progress(lambda: (int(10 * (loop.time() - began)), 1, (loop.time() - began) / 100), lambda: keys)
        shown = asyncio.ensure_future(show(progress))
        await asyncio.sleep(25)
        shown.cancel()
        await asyncio.wait((shown,))

    play()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "100 done, 1 failed, 10/s, 10%, 90 s left; a 2 in flight; b cools down 12 s; c disabled",
        "200 done, 1 failed, 10/s, 20%, 80 s left; a 2 in flight; b cools down 12 s; c disabled",
    ]


def test_c13_a_summary_stays_short() -> None:
    from headgate.cli.batch.meter import Tally

    figures = {"done": 5, "failed": 1, "run": 6, "seconds": 2.0, "p50": 0.1, "p99": 0.5, "cost": 1.5}
    tenants = {f"t{number}": Tally(done=number) for number in range(30)}
    lines = summary(figures, tenants, {"k": {"done": 2, "cooldowns": 3, "status": "cooling_down", "p50": None}})
    assert lines[0] == "5 done, 1 failed; this run: 6 records in 2.0 s (3/s), p50 100 ms, p99 500 ms, cost 1.5"
    assert lines[1] == "  tenant t29: 29 done"
    assert lines[11:] == ["  and 20 more tenants", "  key k: 2 done, 3 cooldowns, cooling down"]


def test_c11_a_later_run_keeps_what_an_earlier_one_knew_of_records_ahead() -> None:
    span = Span(place(2), place(20), ((2, 4), (10, 12)))
    assert span.reached(place(3), place(5), ((3, 4),)) == replace(span, low=place(3), open=((3, 4), (10, 12)))
    assert span.reached(place(3), place(11), ()) == replace(span, low=place(3), open=((11, 12),))
    assert span.reached(place(20), place(30), ((25, 26),)) == Span(place(20), place(30), ((25, 26),))


class StopsAtItsEnd:
    """A flow that is stopped in the turn in which its last record is taken."""

    def __init__(self) -> None:
        self.stopped = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self.stopped.done()

    def take(self) -> None:
        self.stopped.set_result(None)

    async def more(self) -> bool:
        return False


@virtual
async def test_c15_a_run_that_is_stopped_as_it_ends_leaves_no_listener() -> None:
    async with TaskPool("map", max_concurrent=1) as pool:
        flow: Any = StopsAtItsEnd()
        await Pooled(flow, str, pool, 0, fair=False, priority=None, has_keys=lambda: True).run()
        await asyncio.sleep(0)
        assert not AUDIT.listeners
