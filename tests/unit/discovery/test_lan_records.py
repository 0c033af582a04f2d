"""What a LAN carries: TXT records, and how many workers of a namespace are kept. Without a network."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import ChannelOptions, InvalidArgument
from headgate.discovery.lan_records import (
    MAX_BYTES,
    TYPE,
    Announcement,
    Known,
    Place,
    announcement_of,
    from_text,
    name_of,
    prefix_of,
)
from tests.conftest import SCALE
from tests.support.discovery.support import worker


def announced(uid: str, session: str = "s", revision: int = 1) -> tuple[str, bytes]:
    return name_of("space", uid), announcement_of(worker(uid), session, 9, revision).text


def place(session: str) -> Place:
    return Place("127.0.0.1", 9, session)


def test_w62_a_record_travels_in_entries_of_at_most_255_bytes() -> None:
    full = worker(options=ChannelOptions(max_concurrent_streams=3), extra={"text": "\u00fc" * 2500})
    announcement = announcement_of(full, "s", 9, 7)
    assert from_text(announcement.text) == announcement
    assert (announcement.metadata, announcement.revision) == (full, 7)
    entries, at = [], 0
    while at < len(announcement.text):
        entries.append(announcement.text[at + 1 : at + 1 + announcement.text[at]])
        at += 1 + announcement.text[at]
    assert entries[0] == b"txtvers=1"
    assert max(map(len, entries)) < 255
    with pytest.raises(InvalidArgument, match=f"at most {MAX_BYTES}"):
        announcement_of(worker(extra={"text": "x" * MAX_BYTES}), "s", 9, 1)


def test_w62_names_fit_into_dns_and_namespaces_have_prefixes_of_their_own() -> None:
    name = name_of("space " * 30, "uid " * 30)
    assert len(name.removesuffix("." + TYPE)) <= 63
    assert name.startswith(prefix_of("space " * 30))
    assert prefix_of("a") != prefix_of("b")


@settings(max_examples=max(100, int(300 * SCALE)))
@given(st.binary(max_size=80), st.integers(0, 400), st.integers(0, 400))
def test_w62a_any_bytes_are_a_record_or_refused(noise: bytes, first: int, last: int) -> None:
    _, text = announced("w-1")
    for data in (noise, text[:first] + noise + text[last:]):
        try:
            assert isinstance(from_text(data), Announcement)
        except InvalidArgument:
            pass


def test_w62_only_so_many_workers_are_kept_and_those_that_live_stay() -> None:
    known = Known("space", most=10)
    for number in range(5):
        assert known.announced(*announced(f"real-{number}", "alive"), 0)
    known.answered(place("alive"))
    for number in range(1000):
        assert known.announced(*announced(f"fake-{number}", f"nobody-{number}"), 0)
        assert len(known.workers) <= 10
    kept = {news.metadata.uid for news in known.workers.values()}
    assert kept == {f"real-{number}" for number in range(5)} | {f"fake-{number}" for number in range(995, 1000)}
    assert known.announced(*announced("real-0", "alive", revision=2), 0), "an update needs no room"
    for number in range(5):
        known.announced(*announced(f"late-{number}", "alive"), 0)
    assert not known.announced(*announced("fake-x", "nobody"), 0), "all that are kept live"


def test_w62_older_records_and_those_of_others_change_nothing() -> None:
    known = Known("space")
    name, text = announced("w-1", revision=5)
    assert known.announced(name, text, 0)
    for revision in (4, 5):
        assert not known.announced(*announced("w-1", revision=revision), 0)
    assert not known.announced(name_of("space", "w-2"), text, 0), "the record of another worker"
    assert not known.announced(name_of("other", "w-1"), text, 0), "of another namespace"
    assert not known.withdrawn(*announced("w-1", revision=4), 0), "a goodbye that is late"
    assert known.withdrawn(name, text, 0)
    assert not known.withdrawn(name, text, 0)


def test_the_end_of_a_publisher_ends_its_workers_alone() -> None:
    known = Known("space")
    for uid, session in [("w-1", "a"), ("w-2", "b"), ("w-3", "a")]:
        known.announced(*announced(uid, session), 0)
    known.answered(place("a"))
    assert sorted(known.ended(place("a"), 0)) == sorted([name_of("space", "w-1"), name_of("space", "w-3")])
    assert not known.has_answered(place("a"))
    assert list(known.workers) == known.of(place("b")) == [name_of("space", "w-2")]


def test_a_packet_that_is_late_brings_no_worker_back() -> None:
    known = Known("space", most=5)
    name, text = announced("w-1", revision=5)
    known.announced(name, text, 0)
    known.withdrawn(name, text, 1)
    assert not known.announced(name, text, 2)
    assert known.revision(name) == 5
    assert known.announced(*announced("w-1", revision=6), 2)
    known.ended(place("s"), 3)
    assert not known.announced(*announced("w-1", revision=6), 4)
    assert known.announced(*announced("w-1", revision=6), 14), "a machine that was cut off is back"
    for number in range(100):
        known.announced(*announced(f"w-{number}", f"s-{number}"), 20)
        known.ended(place(f"s-{number}"), 20)
    assert len(known._gone) <= 6
