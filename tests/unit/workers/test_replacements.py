"""How many workers are started and let go while some of them are replaced, against a small model of a pool."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.checks import memory_size
from headgate.workers.processes.replacements import missing, surplus


@pytest.mark.parametrize(
    ("size", "fresh", "expired", "count"),
    [
        (4, 0, 0, 4),  # at the start
        (4, 3, 0, 1),  # one has died
        (1, 0, 1, 1),  # the only one is replaced: the other comes first
        (1, 1, 1, 0),  # it is on its way
        (4, 0, 4, 1),  # all are to be replaced: one after the other
        (8, 0, 8, 2),
        (5, 0, 5, 2),
        (4, 2, 1, 2),  # one is to be replaced, and one has died
        (2, 1, 2, 0),  # the pool was made smaller
        (0, 0, 0, 0),
    ],
)
def test_w90_replacements_are_started_beside_what_they_replace(size: int, fresh: int, expired: int, count: int) -> None:
    assert missing(size, fresh, expired) == count


@pytest.mark.parametrize(
    ("size", "ready", "expired", "count"),
    [
        (1, 0, 1, 0),  # the other is not ready
        (1, 1, 1, 1),
        (4, 1, 4, 1),
        (4, 4, 1, 1),
        (2, 2, 3, 3),
        (1, 0, 3, 2),  # the pool was made smaller
    ],
)
def test_w90_a_worker_goes_when_another_is_ready(size: int, ready: int, expired: int, count: int) -> None:
    assert surplus(size, ready, expired) == count


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from(["expire", "ready", "die"]), st.integers(0, 99))))
def test_w90_a_pool_is_never_smaller_than_wanted_nor_much_larger(size: int, happenings: list[tuple[str, int]]) -> None:
    """Whatever happens in which order; and when nothing more happens, all that were to be replaced are."""
    workers = ["ready"] * size  # or "starting", "expired"

    def settle() -> None:
        for _ in range(surplus(size, workers.count("ready"), workers.count("expired"))):
            workers.remove("expired")
            assert workers.count("ready") + workers.count("expired") >= size, "one that was needed has gone"
        fresh = len(workers) - workers.count("expired")
        workers.extend(["starting"] * missing(size, fresh, workers.count("expired")))
        assert len(workers) <= size + math.ceil(size / 4)

    def happen(what: str, which: int) -> None:
        before = {"expire": "ready", "ready": "starting"}.get(what)
        able = [number for number, state in enumerate(workers) if before in (None, state)]
        if not able:
            return
        number = able[which % len(able)]
        if what == "die":
            del workers[number]
        else:
            workers[number] = {"expire": "expired", "ready": "ready"}[what]
        settle()

    for what, which in happenings:
        happen(what, which)
    while "starting" in workers:
        happen("ready", 0)
    assert workers == ["ready"] * size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 1_000_000),
        ("500MB", 500 * 2**20),
        ("500 mib", 500 * 2**20),
        ("512M", 512 * 2**20),
        ("1.5G", 3 * 2**29),
        ("2 GB", 2**31),
        ("1TiB", 2**40),
        ("4k", 4096),
        ("", None),
        ("M", None),
        ("0", None),
        ("0.5", None),
        ("-1G", None),
        ("nan", None),
        ("inf", None),
        ("10 apples", None),
        ("1e30", None),
    ],
)
def test_w90_sizes_of_memory_are_read_as_people_write_them(text: str, size: int | None) -> None:
    assert memory_size(text) == size
