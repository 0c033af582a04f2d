"""Rate limits in headers: every family, garbage of every kind, answers out of order."""

from __future__ import annotations

import math
import os
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headgate.integrations.rate_limits import Limit, RateLimits, may_be_spent, read_rate_limits
from headgate.resources.http_times import YEAR

NOW = 1_800_000_000.0
"""2027-01-15T08:00:00Z"""
EXAMPLES = settings(max_examples=max(50, int(500 * float(os.environ.get("HEADGATE_SCALE", "0.1")))))


def limits_of(headers: object) -> dict[str, Limit]:
    read = read_rate_limits(headers, NOW)
    return {} if read is None else {limit.name: limit for limit in read.limits}


# -- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"Retry-After": "6m0s"}, 360.0),
        ({"Retry-After": formatdate(NOW + 90, usegmt=True)}, 90.0),
        ({"Retry-After": formatdate(NOW - 90, usegmt=True)}, 0.0),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        ([(b"Retry-After", b"7")], 7.0),
        ({"Retry-After": ["7", "8"]}, 7.0),
        ({"Retry-After": 7}, 7.0),
        (httpx.Headers({"Retry-After": "7"}), 7.0),
    ],
)
def test_h11_retry_after(headers: object, seconds: float) -> None:
    assert read_rate_limits(headers, NOW) == RateLimits(retry_after=seconds)


def test_h11_openais_family_has_durations_of_go() -> None:
    headers = {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "6m0s",
    }
    assert limits_of(headers) == {
        "requests": Limit("requests", 60, 59, 1.0),
        "tokens": Limit("tokens", 150_000, 0, 360.0),
    }
    read = read_rate_limits(headers, NOW)
    assert read is not None
    assert read.wait == 360.0, "the limit that is spent decides"


def test_h11_anthropics_family_has_dates() -> None:
    headers = {
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-remaining": "0",
        "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:30Z",
        "anthropic-ratelimit-input-tokens-limit": "40000",
        "anthropic-ratelimit-input-tokens-remaining": "39000",
        "anthropic-ratelimit-input-tokens-reset": "2027-01-15T08:00:01+00:00",
        "anthropic-ratelimit-output-tokens-reset": "2027-01-15T07:59:59Z",
    }
    assert limits_of(headers) == {
        "requests": Limit("requests", 50, 0, 30.0),
        "input_tokens": Limit("input_tokens", 40_000, 39_000, 1.0),
        "output_tokens": Limit("output_tokens", None, None, 0.0),
    }


def test_l02_mistrals_family_names_its_windows() -> None:
    headers = {
        "x-ratelimit-limit-req-minute": "720",
        "x-ratelimit-remaining-req-minute": "717",
        "x-ratelimit-limit-tokens-minute": "5000000",
        "x-ratelimit-remaining-tokens-minute": "4999911",
        "x-ratelimit-remaining-tokens-month": "9000",
        "x-ratelimit-tokens-query-cost": "52",
    }
    assert limits_of(headers) == {
        "requests/minute": Limit("requests/minute", 720, 717, None, 60.0),
        "tokens/minute": Limit("tokens/minute", 5_000_000, 4_999_911, None, 60.0),
        "tokens/month": Limit("tokens/month", None, 9000, None, 30 * 86400.0),
    }
    by_size = {
        "ratelimitbysize-limit": "500000",
        "ratelimitbysize-remaining": "0",
        "ratelimitbysize-reset": "24",
        "x-ratelimitbysize-limit-month": "10000000",
        "x-ratelimitbysize-remaining-month": "70",
    }
    assert limits_of(by_size) == {
        "tokens": Limit("tokens", 500_000, 0, 24.0),
        "tokens/month": Limit("tokens/month", 10_000_000, 70, None, 30 * 86400.0),
    }
    assert may_be_spent([(name.encode(), value.encode()) for name, value in by_size.items()])


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("x-ratelimit-remaining-requests-day", Limit("requests/day", None, 7, None, 86400.0)),  # Cerebras
        ("x-ratelimit-remaining-tokens-hour", Limit("tokens/hour", None, 7, None, 3600.0)),
        ("x-ratelimit-remaining-tokens-prompt", Limit("input_tokens", None, 7)),  # Fireworks
        ("x-ratelimit-remaining-tokens-generated", Limit("output_tokens", None, 7)),
        ("x-ratelimit-remaining-input-tokens-minute", Limit("input_tokens/minute", None, 7, None, 60.0)),
        ("x-ratelimit-remaining-tokens", Limit("tokens", None, 7)),  # Azure, which names no limit
        ("anthropic-priority-input-tokens-remaining", None),
        ("anthropic-ratelimit-output-tokens-remaining", Limit("output_tokens", None, 7)),
        ("x-ratelimit-remaining-tokens-fortnight", None),
        ("x-ratelimit-remaining-images", None),
    ],
)
def test_l02_names_of_limits_say_what_is_counted_and_how_long(name: str, limit: Limit | None) -> None:
    assert limits_of({name: "7"}) == ({} if limit is None else {limit.name: limit})


@pytest.mark.parametrize(
    ("headers", "limit"),
    [
        (
            {"RateLimit": '"default";r=0;t=30', "RateLimit-Policy": '"default";q=100;w=60'},
            Limit("default", 100, 0, 30.0, 60.0),
        ),
        ({"RateLimit": "default;r=5;t=30"}, Limit("default", None, 5, 30.0)),
        ({"RateLimit": "limit=100, remaining=50, reset=30"}, Limit("requests", 100, 50, 30.0)),
        ({"RateLimit-Policy": '"burst";q=10;w=1;pk=:dHJpYWw:'}, Limit("burst", 10, None, None, 1.0)),
    ],
)
def test_h11_ietfs_headers(headers: object, limit: Limit) -> None:
    assert limits_of(headers) == {limit.name: limit}


def test_h11_several_policies_in_one_header_or_in_several() -> None:
    one = {"RateLimit": '"burst";r=1;t=1, "daily";r=900;t=3600'}
    several = [("RateLimit", '"burst";r=1;t=1'), ("ratelimit", '"daily";r=900;t=3600')]
    assert limits_of(one) == limits_of(several)
    assert limits_of(one).keys() == {"burst", "daily"}


def test_h11_what_the_server_asks_for_goes_before_resets() -> None:
    headers = {"retry-after": "2", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "60s"}
    read = read_rate_limits(headers, NOW)
    assert read is not None
    assert read.wait == 2.0


def test_h11_a_limit_with_something_left_asks_for_no_wait() -> None:
    headers = {"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "60s"}
    read = read_rate_limits(headers, NOW)
    assert read is not None
    assert read.wait is None


@pytest.mark.parametrize("wrong_by", [-7 * 86400, 0, 7 * 86400])
def test_h11_a_wrong_clock_does_no_harm_when_the_server_tells_its_time(wrong_by: float) -> None:
    headers = {
        "Date": formatdate(NOW, usegmt=True),
        "Retry-After": formatdate(NOW + 20, usegmt=True),
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2027-01-15T08:00:30Z",
    }
    read = read_rate_limits(headers, NOW + wrong_by)
    assert read == RateLimits(20.0, (Limit("tokens", None, 0, 30.0),))


# -- garbage ----------------------------------------------------------------------------------------------------------


class Hostile:
    def items(self) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "headers",
    [
        None,
        5,
        "retry-after: 5",
        b"",
        [],
        {},
        Hostile(),
        object(),
        [1, 2],
        [("retry-after",)],
        {"retry-after": None},
        {"retry-after": object()},
        {"retry-after": "-1"},
        {"retry-after": "nan"},
        {"retry-after": "1e999"},
        {"retry-after": 10**4000},
        {"retry-after": True},
        {"retry-after": "\u0661\u0662"},
        {"retry-after": "9" * 100_000},
        {"retry-after-ms": "-5"},
        {"x-ratelimit-reset-requests": "six minutes"},
        {"x-ratelimit-remaining-requests": ""},
        {"x-ratelimit-limit-bananas": "5"},
        {"anthropic-ratelimit-requests-reset": "2027-13-45T99:00:00Z"},
        {"anthropic-ratelimit-requests-reset": "8785h"},
        {"RateLimit": ",,,;;;==="},
        {"RateLimit": '"unclosed;r=5'},
        {"RateLimit": "limit=x, remaining=y"},
        {None: "5", 7: "8"},
    ],
)
def test_h11_garbage_gives_none(headers: object) -> None:
    assert read_rate_limits(headers, NOW) is None


def test_h11_garbage_beside_good_headers_spoils_nothing() -> None:
    headers = {"x-ratelimit-remaining-requests": "??", "x-ratelimit-limit-requests": "60", "retry-after": "later"}
    assert read_rate_limits(headers, NOW) == RateLimits(None, (Limit("requests", 60),))


def test_h11_less_than_nothing_left_is_nothing_left() -> None:
    assert limits_of({"x-ratelimit-remaining-tokens": "-1234"})["tokens"].is_spent


NAMES = st.sampled_from(
    [
        "retry-after",
        "Retry-After-Ms",
        "Date",
        "RateLimit",
        "ratelimit-policy",
        *(
            f"x-ratelimit-{a}-{b}"
            for a in ("limit", "remaining", "reset")
            for b in ("requests", "tokens", "req-minute", "tokens-month")
        ),
        *(f"{a}ratelimitbysize-{b}" for a in ("", "x-") for b in ("limit", "remaining-minute", "reset")),
        *(
            f"anthropic-ratelimit-{b}-{a}"
            for a in ("limit", "remaining", "reset")
            for b in ("requests", "input-tokens")
        ),
    ]
)
NUMBERS = st.one_of(st.integers(), st.integers(-(10**40), 10**40), st.floats(), st.booleans())
UNITS = st.sampled_from(["h", "m", "s", "ms", "us", "fortnights", ""])
TEXTS = st.one_of(
    st.text(max_size=80),
    NUMBERS.map(str),
    st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
    st.floats(-1e10, 1e10).map(lambda moment: formatdate(moment, usegmt=True)),
    st.builds("{}{}{}{}".format, NUMBERS, UNITS, NUMBERS, UNITS),
    st.builds('"{}";r={};t={}, {};q={}'.format, st.text(max_size=5), NUMBERS, NUMBERS, UNITS, NUMBERS),
    st.builds("limit={}, remaining={},reset={}".format, NUMBERS, NUMBERS, NUMBERS),
)
VALUES = st.one_of(TEXTS, TEXTS.map(lambda text: text.encode("utf-8", "replace")), NUMBERS, st.none(), st.lists(TEXTS))
KEYS = st.one_of(NAMES, NAMES.map(str.encode), st.text(max_size=10), st.none(), st.integers())
HEADERS = st.one_of(
    st.dictionaries(KEYS, VALUES), st.lists(st.tuples(KEYS, VALUES)), st.lists(st.one_of(VALUES, KEYS)), VALUES
)


@given(HEADERS, st.floats(-1e12, 1e12))
@EXAMPLES
def test_h11_whatever_the_headers_are_nothing_raises_and_all_numbers_are_usable(headers: object, now: float) -> None:
    read = read_rate_limits(headers, now)
    if read is None:
        return
    assert read.limits or read.retry_after is not None
    durations = [read.retry_after, read.wait]
    for limit in read.limits:
        durations += [limit.reset_after, limit.window]
        for amount in (limit.limit, limit.remaining):
            assert amount is None or (math.isfinite(amount) and amount >= 0)
    for seconds in durations:
        assert seconds is None or 0 <= seconds <= YEAR


RAW = st.lists(st.tuples(NAMES.map(str.encode), TEXTS.map(lambda text: text.encode("latin-1", "replace"))))


@given(RAW, st.floats(0, 1e10))
@example([(b"x-ratelimit-remaining-tokens", b"1E-1"), (b"x-ratelimit-reset-tokens", b"6s")], 0.0)
@example([(b"anthropic-ratelimit-requests-remaining", b"5e-324"), (b"anthropic-ratelimit-requests-reset", b"6s")], 0.0)
@example([(b"RateLimit", b'1, "default";r=0;t=30')], 0.0)
@example([(b"RateLimit", b"1=1, remaining=0, reset=30")], 0.0)
@EXAMPLES
def test_h11_the_quick_look_misses_no_limit_that_is_spent(headers: list[tuple[bytes, bytes]], now: float) -> None:
    read = read_rate_limits(headers, now)
    if read is not None and read.spent_for is not None:
        assert may_be_spent(headers)


@pytest.mark.parametrize(
    ("name", "value", "may_be"),
    [
        (b"X-RateLimit-Remaining-Requests", b"0", True),
        (b"anthropic-ratelimit-tokens-remaining", b"0", True),
        (b"x-ratelimit-remaining-tokens", b"-3", True),
        (b"x-ratelimit-remaining-tokens", b" 7", True),  # a closer look will tell
        (b"RateLimit", b'"default";r=0;t=30', True),
        (b"x-ratelimit-remaining-tokens", b"1E-1", True),
        (b"x-ratelimit-remaining-tokens", b"7.5", True),
        (b"x-ratelimit-remaining-tokens", b"", True),
        (b"x-ratelimit-remaining-tokens", b"90000", False),
        (b"x-ratelimit-reset-tokens", b"0s", False),
        (b"x-ratelimit-limit-tokens", b"0", False),
        (b"ratelimit-policy", b'"default";q=0', False),
        (b"date", b"0", False),
    ],
)
def test_h11_the_quick_look(name: bytes, value: bytes, may_be: bool) -> None:
    assert may_be_spent([(b"a", b"b"), (name, value), (b"c", b"d")]) is may_be
