"""T60, T61: what the lines of a journal say, what of it is kept, and what a reader may say of it. No disk, no loop."""

from __future__ import annotations

import json
from itertools import compress, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.stores import Entry
from headgate.stores.jsonl.compaction import wanted
from headgate.stores.jsonl.journal import Bad, Header, decoded, fold, kept, last_writer, unfinished, viewed
from headgate.stores.jsonl.lines import Writer, beat_line, entry_line, file_name, header_line, open_line, stale_line
from headgate.stores.jsonl.scanner import scan
from tests.conftest import SCALE
from tests.support.stores.support import end, lives, numbers, statuses, submit

HEADER = header_line("p", {"name": "p"}, "json")
OPENED = open_line(Writer(4711, "mill", 500.0), {})


def journal(*entries: Entry) -> list[bytes]:
    return [HEADER, OPENED, *map(entry_line, entries)]


# -- folding ----------------------------------------------------------------------------------------------------------


def test_t60_a_life_folds_into_one_task() -> None:
    history = fold(
        journal(
            submit(1, {"idempotency_key": "k"}, at=1.0),
            {"kind": "start", "at": 2.0, "task": 1, "attempt": 1},
            {"kind": "requeue", "at": 3.0, "task": 1},
            {"kind": "start", "at": 4.0, "task": 1, "attempt": 2},
            end(1, at=5.0, result=(1,)),
        )
    )
    assert history.header is not None
    assert history.header.pool_id == "p"
    assert history.writer == Writer(4711, "mill", 500.0)
    assert history.newest_at == 500.0
    assert history.tasks[1] == {
        "task": 1,
        "about": {"idempotency_key": "k"},
        "status": "completed",
        "submitted_at": 1.0,
        "attempt": 2,
        "started_at": 4.0,
        "finished_at": 5.0,
        "result": {"$tuple": [1]},
        "error": None,
        "reason": None,
        "policy": None,
    }


def test_t60_the_first_end_is_the_end() -> None:
    again: list[Entry] = [{"kind": "start", "at": 9.0, "task": 1, "attempt": 7}, end(1, "failed", at=9.0)]
    history = fold(journal(*lives(1), *again))
    assert (history.tasks[1]["status"], history.tasks[1]["attempt"]) == ("completed", 0)


def test_t60_a_number_whose_submit_is_lost_is_still_taken() -> None:
    assert statuses(fold(journal(end(7, "failed"))).tasks.values()) == {7: "failed"}


@pytest.mark.parametrize(
    "bad",
    [
        b"\0" * 40 + b"\n",
        b"\n",
        b"{}\n",
        b"7\n",
        b'{"kind":"submit","at":1.0}\n',
        b'{"kind":"submit","at":"soon","task":9}\n',
        b'{"kind":"submit","at":1.0,"task":true}\n',
        b'{"kind":"submit","at":1.0,"task":9,"about":3}\n',
        b'{"kind":"start","at":1.0,"task":1,"attempt":"x"}\n',
        b'{"kind":"end","at":1.0,"task":1}\n',
        b'{"kind":"dance","at":1.0,"task":1}\n',
        b'{"kind":"end","at":1.0,"task":1,"status":"x"' + b"[" * 100_000 + b"\n",
        b'\xff{"kind":"beat","at":1.0}\n',
    ],
)
def test_t62_a_bad_line_is_passed_over_and_those_after_it_count(bad: bytes) -> None:
    lines = journal(submit(1), submit(2))
    history = fold([*lines[:-1], bad, lines[-1]])
    assert statuses(history.tasks.values()) == {1: "queued", 2: "queued"}
    assert history.skipped == [Bad(4, len(bad))]
    assert history.torn == []
    assert history.size == sum(map(len, lines)) + len(bad)

    history = fold([*lines, bad, bad])
    assert history.skipped == [Bad(5, len(bad)), Bad(6, len(bad))]
    assert history.torn == []
    assert history.size == sum(map(len, lines)) + 2 * len(bad), "they stay in the file"


def test_t62_a_line_without_its_newline_was_never_acknowledged() -> None:
    lines = journal(submit(1), submit(2))
    history = fold([*lines[:-1], lines[-1][:-1]])
    assert numbers(history.tasks.values()) == [1]
    assert history.torn == [Bad(4, len(lines[-1]) - 1)]


def test_t62_only_the_torn_beginning_of_a_header_is_unwritten() -> None:
    assert fold([]).unwritten
    for size in range(1, len(HEADER)):
        assert fold([HEADER[:size]]).unwritten
        assert fold([HEADER[:size] + b"\0" * 9]).unwritten
    assert not fold([HEADER]).unwritten
    for foreign in (b"hello", b"hello\n", b"{}\n", b'{"a":1}\n', b"\n", b"\0\n", HEADER[:9] + b"\n"):
        history = fold([foreign, OPENED])
        assert not history.unwritten
        assert history.header is None


def test_t62_nothing_after_a_newer_header_is_looked_at() -> None:
    newer = HEADER.replace(b'"format":1', b'"format":2')
    history = fold([newer, *journal(submit(1))[1:]])
    assert history.header is not None
    assert history.header.format == 2
    assert history.tasks == {}


def test_t62_the_last_writer() -> None:
    other = open_line(Writer(99, "dam", 600.0), {})
    assert last_writer([HEADER, OPENED, beat_line(1.0), other, beat_line(2.0)]) == Writer(99, "dam", 600.0)
    assert last_writer([HEADER]) is None
    assert last_writer([HEADER, other[:20]]) is None


def test_t60_whoever_opens_it_ends_what_was_left() -> None:
    lines = journal(submit(1), submit(2, running=True), *lives(3))
    tasks = fold(lines).tasks
    lines += [stale_line(number, 9.0) for number in unfinished(tasks.values())]
    after = fold(lines).tasks
    assert statuses(after.values()) == {1: "stale", 2: "stale", 3: "completed"}
    assert after[1]["finished_at"] == 9.0


# -- lines ------------------------------------------------------------------------------------------------------------


def test_t60b_a_line_never_fails() -> None:
    knot: dict[str, Any] = {"name": object(), "idempotency_key": "k", (1, 2): 3}
    knot["self"] = knot
    line = entry_line(submit(1, knot))
    about = fold([HEADER, line]).tasks[1]["about"]
    assert about["idempotency_key"] == "k"
    assert about["name"] == {"$opaque": "builtins.object"}


def test_t60_the_name_of_a_file_is_safe_and_its_own() -> None:
    ids = ["p", "P", "a/b", "..", ".", "", "a b", "\u00fc", "u\u0308", "\ud800", "%70", "x" * 150, "x" * 151, "x" * 152]
    names = [file_name(pool_id) for pool_id in ids]
    assert len({name.lower() for name in names}) == len(ids)
    assert all(len(name) < 240 and "/" not in name and name.isascii() and name.endswith(".jsonl") for name in names)
    assert file_name("pipeline:nightly") == "pipeline%3anightly.jsonl"


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_t14_what_holds_a_key_is_exempt_from_keep() -> None:
    def finished(number: int, status: str, **about: Any) -> list[Entry]:
        return [submit(number, about), end(number, status, at=float(number))]

    tasks = fold(
        journal(
            *finished(1, "completed", idempotency_key="a"),
            *finished(2, "completed", idempotency_key="b", window="while_active"),
            *finished(3, "failed", idempotency_key="c"),
            *finished(4, "failed", idempotency_key="d", window="forever"),
            *finished(5, "completed", idempotency_key="e", window=100.0),
            *finished(6, "completed", idempotency_key="f", window=90.0),
            *finished(7, "completed", idempotency_key="g", window="of a later release"),
            *finished(8, "completed", idempotency_key=None),
            submit(9),
            submit(10, running=True),
            *finished(11, "cancelled"),
            *finished(12, "cancelled"),
            *finished(13, "cancelled"),
        )
    ).tasks
    assert numbers(kept(tasks, 2, now=100.0)) == [1, 4, 5, 7, 9, 10, 12, 13]
    assert numbers(kept(tasks, 0, now=100.0)) == [1, 4, 5, 7, 9, 10, 13]  # the highest number stays
    assert numbers(kept(tasks, 99, now=100.0)) == list(range(1, 14))


def test_t50_the_newest_are_those_that_ended_last() -> None:
    tasks = fold(journal(submit(1), submit(2), submit(3), end(2, at=1.0), end(3, at=2.0), end(1, at=3.0))).tasks
    assert numbers(kept(tasks, 1, now=9.0)) == [1, 3]


ENTRIES = st.lists(
    st.one_of(
        st.builds(
            submit,
            st.integers(1, 6),
            st.sampled_from([{}, {"idempotency_key": "k"}, {"labels": {"idempotency_key": "x", "window": 9.0}}])
            | st.sampled_from(["forever", "while_active", 5.0]).map(lambda w: {"idempotency_key": "k", "window": w}),
            at=st.floats(0, 20),
        ),
        st.builds(end, st.integers(1, 6), st.sampled_from(["completed", "failed", "stale"]), at=st.floats(0, 20)),
        st.builds(lambda task, at: {"kind": "start", "at": at, "task": task}, st.integers(1, 6), st.floats(0, 20)),
        st.builds(lambda at: {"kind": "beat", "at": at}, st.floats(0, 20)),
    ),
    max_size=30,
)


@settings(max_examples=max(60, int(2000 * SCALE**1.5)))
@given(ENTRIES, st.integers(0, 4), st.sampled_from(["ours", "sorted", "as it came"]))
def test_t62_compaction_keeps_what_must_be_kept_and_nothing_else(entries: list[Any], keep: int, hand: str) -> None:
    lines = journal(*entries)
    if hand == "sorted":  # as another tool would write them, with spaces and in another order
        lines[2:] = [json.dumps(json.loads(line), sort_keys=True).encode() + b"\n" for line in lines[2:]]
    elif hand == "as it came":
        lines[2:] = [json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries]
    before = fold(lines)
    after = fold([HEADER, OPENED, *compress(lines, wanted(lines, keep, 10.0))])
    assert after.tasks == {task["task"]: task for task in kept(before.tasks, keep, 10.0)}
    assert after.beat_at == before.beat_at


def test_t62_compaction_leaves_out_what_cannot_be_read() -> None:
    bad = [b"\0\n", b"[]\n", b'{"kind":"end","at":x,"task":3}\n']
    bad.append(b'{"kind":"submit","at":1.0,"task":3,"window":"idempotency_key"\n')
    lines = [*journal(submit(1)), *bad, *journal(submit(2))[2:]]
    assert wanted(lines, 9, 0.0) == [False, False, True, *[False] * len(bad), True]


# -- what a reader may say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "owned", "expected"),
    [
        (105.0, True, {1: "running", 2: "running", 3: "queued", 4: "completed"}),
        (135.0, True, {1: "stale", 2: "running", 3: "queued", 4: "completed"}),
        (155.0, True, {1: "stale", 2: "stale", 3: "stale", 4: "completed"}),
        (105.0, False, {1: "stale", 2: "stale", 3: "stale", 4: "completed"}),
    ],
)
def test_t61_signs_of_life_decide_what_reads_stale(now: float, owned: bool, expected: dict[int, str]) -> None:
    lines = [
        HEADER,
        *map(
            entry_line,
            [
                submit(1, at=100.0, running=True),
                submit(2, at=100.0),
                submit(3, at=100.0),
                submit(4, at=1.0),
                end(4, at=2.0),
                {"kind": "start", "at": 120.0, "task": 2},
            ],
        ),
    ]
    assert statuses(viewed(fold(lines), now, 30.0, owned=owned)) == expected


def test_t61_a_beat_is_a_sign_of_life_of_all_that_runs() -> None:
    lines = journal(submit(1, at=100.0, running=True))
    assert statuses(viewed(fold(lines), 200.0, 30.0, owned=True)) == {1: "stale"}
    lines.append(beat_line(190.0))
    assert statuses(viewed(fold(lines), 200.0, 30.0, owned=True)) == {1: "running"}


# -- checksums --------------------------------------------------------------------------------------------------------


def unchecked(line: bytes) -> bytes:
    """The line as older releases wrote it."""
    content = json.loads(line)
    del content["crc"]
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def test_t62_no_flipped_bit_of_a_line_changes_what_it_says() -> None:
    lines = journal(submit(1, {"idempotency_key": "k"}), end(1, result=1234567), *lives(2))
    good = fold(lines).tasks
    for line in (2, 3):
        for place, bit in product(range(len(lines[line])), range(8)):
            flipped = bytearray(lines[line])
            flipped[place] ^= 1 << bit
            found = fold([*lines[:line], *bytes(flipped).splitlines(keepends=True), *lines[line + 1 :]])
            noticed = found.skipped or found.torn
            assert found.tasks[2] == good[2] or place == len(lines[line]) - 1  # without its newline, the next is lost
            assert noticed or found.tasks[1] == good[1], flipped
            assert found.tasks.get(1) is None or found.tasks[1]["result"] in (None, 1234567)


def test_t62_a_line_with_a_wrong_checksum_is_passed_over_and_one_without_counts() -> None:
    lines = journal(submit(1), end(1, result=42), *lives(2))
    damaged = lines[3].replace(b"42", b"43")
    history = fold([*lines[:3], damaged, *lines[4:]])
    assert history.skipped == [Bad(4, len(damaged), is_damaged=True)]
    assert statuses(history.tasks.values()) == {1: "queued", 2: "completed"}
    at_the_end = fold([*lines, damaged, damaged[:-1]])
    assert at_the_end.skipped == [Bad(7, len(damaged), is_damaged=True)]
    assert at_the_end.torn == [Bad(8, len(damaged) - 1)]
    assert at_the_end.size == sum(map(len, lines)) + len(damaged)
    assert wanted([*lines[:3], damaged, *lines[4:]], 9, 0.0) == [False, False, True, False, True, True]

    older = [unchecked(line) for line in lines]
    assert fold(older).tasks == fold(lines).tasks
    assert fold([*older[:3], older[3].replace(b"42", b"43")]).tasks[1]["result"] == 43


def test_t62_a_header_that_is_damaged_is_told_and_the_rest_counts() -> None:
    header = HEADER.replace(b'"name":"p"', b'"name":"q"')
    history = fold([header, *journal(submit(1))[1:]])
    assert history.header == Header(1, "p", is_intact=False)
    assert history.skipped == [Bad(1, len(header), is_damaged=True)]
    assert numbers(history.tasks.values()) == [1]


BAD = [b"\0\n", b"[]\n", b'{"kind":"end","at":1.0,"task":3}\n', b'{"kind":"end","at":1.0,"task":"3","status":"x"}\n']


@settings(max_examples=max(60, int(2000 * SCALE**1.5)))
@given(
    st.lists(
        st.tuples(
            ENTRIES.filter(bool).map(lambda entries: entries[0])
            | st.builds(submit, st.integers(1, 4), st.just({"labels": {"a": 1, "running": True}}))
            | st.builds(submit, st.integers(1, 4), running=st.booleans(), extra=st.just([1]))
            | st.builds(end, st.integers(1, 4), st.sampled_from(["completed", "odd one"]), result=st.just((1, "\n")))
            | st.builds(lambda task: {"kind": "requeue", "at": 1e22, "task": task}, st.integers(1, 4)),
            st.sampled_from(["ours", "ours", "ours", "older", "spaced", "damaged", "bad"]),
        ),
        max_size=25,
    ),
    st.integers(0, 4),
    st.integers(0, 30),
)
def test_t60_a_scan_finds_what_folding_finds(entries: list[Any], keep: int, torn: int) -> None:
    lines = [HEADER, OPENED]
    for number, (entry, hand) in enumerate(entries):
        line = entry_line(entry)
        if hand == "older":
            line = unchecked(line)
        elif hand == "spaced":
            line = json.dumps(json.loads(line), sort_keys=True).encode() + b"\n"
        elif hand == "damaged":
            line = line.replace(b'"at":', b'"at":1')
        elif hand == "bad":
            line = BAD[number % len(BAD)]
        lines.append(line)
    if torn and len(lines) > 2:
        lines[-1] = lines[-1][:-torn] or b"{"
    history, found = fold(lines), scan(lines)
    expected = decoded(kept(history.tasks, keep, 10.0))
    stored = found.kept(keep, 10.0, "json")
    assert list(stored) == expected
    assert [tuple(brief) for brief in stored.briefs()] == [
        (task["task"], task["status"], task["finished_at"], task["about"]) for task in expected
    ]
    assert sorted(found.unfinished()) == sorted(unfinished(history.tasks.values()))
    for field in ("header", "unwritten", "writer", "lines", "size", "skipped", "torn"):
        assert getattr(found.history, field) == getattr(history, field), field
