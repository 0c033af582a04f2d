"""Records of workers: what is written can be read, and what cannot be true is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import ChannelOptions, InvalidArgument, WorkerMetadata
from headgate.discovery.records import (
    MAX_BYTES,
    checked_address,
    decoded,
    encoded,
    from_record,
    joined_address,
    split_address,
    to_record,
)
from tests.conftest import SCALE
from tests.support.discovery.support import worker

FULL = worker(
    tags=frozenset({"gpu", "a b"}),
    secure=True,
    options=ChannelOptions(max_concurrent_streams=3, compression="gzip"),
    extra={"zone": "b", "cards": [1, 2.5, None, {"x": "\u00fc"}]},
)
GOOD = to_record(FULL)


def test_w60_metadata_becomes_json_and_back() -> None:
    for metadata in (FULL, worker(), worker(extra=MappingProxyType({"a": 1})), worker(address="unix:/run/x/worker")):
        assert from_record(json.loads(json.dumps(to_record(metadata)))) == metadata
        assert from_record(decoded(encoded(to_record(metadata)))) == metadata


def test_w65_hash_is_by_uid_and_equality_by_all_fields() -> None:
    one, other = worker(extra={"a": 1}), worker(extra={"a": 2})
    assert hash(one) == hash(other)
    assert one != other
    assert one == replace(other, extra={"a": 1})


def test_fields_of_a_later_release_are_ignored() -> None:
    assert from_record({**GOOD, "colour": "red", "options": {"max_concurrent_streams": 3, "new": 1}}).uid == FULL.uid
    assert from_record({"uid": "a", "address": "h:1", "version": "1"}) == worker("a", address="h:1", pid=0)


@pytest.mark.parametrize(
    "change",
    [
        {"uid": ""},
        {"uid": None},
        {"uid": 7},
        {"uid": "x" * 257},
        {"uid": "a\nb"},
        {"address": "nowhere"},
        {"address": "host:"},
        {"address": "host:0"},
        {"address": "host:65536"},
        {"address": "host:99999999"},
        {"address": ":80"},
        {"address": "::1:80"},
        {"address": "unix:relative"},
        {"address": "h" * 600 + ":80"},
        {"address": ["h:80"]},
        {"pid": -1},
        {"pid": True},
        {"pid": 2**40},
        {"pid": "1"},
        {"version": None},
        {"version": "1" * 65},
        {"tags": "gpu"},
        {"tags": ["x"] * 65},
        {"tags": [1]},
        {"tags": [""]},
        {"tags": {"a": 1}},
        {"secure": 1},
        {"secure": "yes"},
        {"options": []},
        {"options": {"max_concurrent_streams": 0}},
        {"options": {"compression": "zip"}},
        {"options": {"keepalive_time_ms": "1"}},
        {"extra": []},
        {"extra": "x"},
    ],
    ids=str,
)
def test_a_bad_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        from_record({**GOOD, **change})


@pytest.mark.parametrize("record", [None, 1, "x", [], [GOOD]])
def test_a_record_is_an_object(record: object) -> None:
    with pytest.raises(InvalidArgument):
        from_record(record)
    with pytest.raises(InvalidArgument):
        decoded(json.dumps(record).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\\ud800"}',
        b"[" * 16_000,
        b'{"a":' * 3000,
        b'{"a": ' + b"9" * 6000 + b"}",
        b"{" + b" " * MAX_BYTES + b"}",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        from_record(decoded(data))


@pytest.mark.parametrize(
    "extra",
    [
        {"a": object()},
        {"a": float("nan")},
        {1: "a"},
        {"a": (1, 2)},
        {"a": "\ud800"},
        {"a": "x" * MAX_BYTES},
        {"a": b"x"},
    ],
    ids=lambda extra: repr(extra)[:20],
)
def test_what_would_arrive_changed_is_refused_when_it_is_announced(extra: dict[Any, Any]) -> None:
    with pytest.raises(InvalidArgument):
        to_record(worker(extra=extra))


def test_tags_are_counted_when_they_are_announced() -> None:
    to_record(worker(tags=frozenset(map(str, range(64)))))
    with pytest.raises(InvalidArgument, match="64"):
        to_record(worker(tags=frozenset(map(str, range(65)))))


def test_addresses_are_split_and_joined() -> None:
    for host, port, address in [("h", 1, "h:1"), ("::1", 80, "[::1]:80"), ("fe80::1%eth0", 80, "[fe80::1%eth0]:80")]:
        assert joined_address(host, port) == address
        assert split_address(address) == (host, port)
    assert checked_address("unix:/a b") == "unix:/a b"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100 if SCALE >= 1 else 30)
@given(st.dictionaries(st.sampled_from([*GOOD, "more"]), values) | st.just(GOOD))
def test_any_json_is_a_worker_or_refused(record: dict[str, Any]) -> None:
    try:
        metadata = from_record({**GOOD, **record})
    except InvalidArgument:
        return
    assert isinstance(metadata, WorkerMetadata)
    assert from_record(to_record(metadata)) == metadata


@settings(max_examples=200)
@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(decoded(data), dict)
    except InvalidArgument:
        pass
