"""T60b: results keep value and type, or say that they could not."""

from __future__ import annotations

import base64
import enum
import json
import math
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, getcontext, localcontext
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.stores import Opaque, canonical, decode, encode
from headgate.stores.codec import text_of
from tests.conftest import SCALE


def round_trip(value: object, **options: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, **options))), **options)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type, all the way down; dicts in their order too."""
    if type(one) is not type(other):
        return False
    match one:
        case float() | complex():
            return repr(one) == repr(other)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return same(list(one.items()), list(other.items()))
        case set() | frozenset():
            rest = list(other)
            return len(one) == len(other) and all(any(same(a, b) for b in rest) for a in one)
        case Decimal():
            return one.as_tuple() == other.as_tuple()
        case datetime() | time():
            bare = one.replace(tzinfo=None) == other.replace(tzinfo=None) and one.fold == other.fold
            return bare and repr(one.tzinfo) == repr(other.tzinfo)
        case _:
            return bool(one == other)


FIXED = [UTC, timezone(timedelta(hours=-9, microseconds=3)), timezone(timedelta(hours=1), "CET")]
ZONES = st.sampled_from([None, *FIXED, ZoneInfo("Europe/Paris"), ZoneInfo("Australia/Lord_Howe")])
ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(["$", "$$tuple", "\ud800\udc00", "$opaque"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers() | st.integers(1990, 2010).map(lambda bits: -1 << bits),
    st.floats(),
    st.complex_numbers(),
    ANY_TEXT,
    st.binary(),
    st.dates(),
    st.datetimes(timezones=ZONES),
    st.times(timezones=ZONES),
    st.timedeltas(),
    st.decimals().filter(lambda number: not number.is_snan()),  # which has no hash
    st.uuids(),
)
KEYS = LEAVES | st.tuples(LEAVES) | st.frozensets(LEAVES, max_size=2)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(ANY_TEXT, inner, max_size=4),
        st.sets(KEYS, max_size=4),
        st.binary().map(bytearray),
    )


VALUES = st.recursive(LEAVES, containers, max_leaves=8)
EXAMPLES = settings(max_examples=max(60, int(1500 * SCALE**1.4)))


@EXAMPLES
@given(VALUES)
def test_t60b_what_comes_back_is_what_was_given(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip(value, codec="pickle"), value)
    assert text_of(value).isascii()
    assert "\n" not in text_of(value)


@EXAMPLES
@given(VALUES)
def test_t60b_the_canonical_text_survives_the_round_trip(value: Any) -> None:
    assert canonical(value) is not None
    assert canonical(round_trip(value)) == canonical(value)


def test_t60b_the_canonical_text_tells_values_apart() -> None:
    values = [0, False, 0.0, -0.0, "0", Decimal(0), b"0", bytearray(b"0"), (0,), [0], {0}, frozenset({0}), {0: 0}]
    values += [{"0": 0}, {"$tuple": [0]}, {"$$tuple": [0]}, None, "null", "", [], (), {}, set(), 0j]
    assert len({canonical(value) for value in values}) == len(values)


@EXAMPLES
@given(st.dictionaries(KEYS, LEAVES, max_size=5).flatmap(lambda d: st.tuples(st.just(d), st.permutations(list(d)))))
def test_t60b_the_canonical_text_knows_no_order_of_keys(case: tuple[dict[Any, Any], list[Any]]) -> None:
    value, order = case
    assert canonical({key: value[key] for key in order}) == canonical(value)


TAGS = ["$tuple", "$dict", "$set", "$str", "$int", "$float", "$datetime", "$time", "$opaque", "$pickle", "$new", "a"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(TAGS), inner),
    max_leaves=6,
)


@EXAMPLES
@given(JSON)
def test_t60b_decoding_never_raises(encoded: Any) -> None:
    decode(encoded)
    decode(encoded, codec="pickle")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (42, "42"),
        (True, "true"),
        (-0.0, "-0.0"),
        ("x", '"x"'),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ((1, b"x"), '{"$tuple":[1,{"$bytes":"eA=="}]}'),
        ({2, 10, 1}, '{"$set":[1,10,2]}'),
        ({"$set": 1}, '{"$$set":1}'),
        ({1: True, "1": None}, '{"$dict":[[1,true],["1",null]]}'),
        (math.nan, '{"$float":"nan"}'),
        (Decimal("1.50"), '{"$decimal":"1.50"}'),
        (UUID(int=1), '{"$uuid":"00000000-0000-0000-0000-000000000001"}'),
        (date(2024, 2, 29), '{"$date":"2024-02-29"}'),
        (datetime(2024, 2, 29, 1, fold=1), '{"$datetime":["2024-02-29T01:00:00",1,null]}'),  # noqa: DTZ001
        (
            datetime(2024, 2, 29, tzinfo=ZoneInfo("Europe/Paris")),
            '{"$datetime":["2024-02-29T00:00:00",0,"Europe/Paris"]}',
        ),
        (time(1, 2, tzinfo=timezone(timedelta(hours=1), "CET")), '{"$time":["01:02:00",0,[3600000000,"CET"]]}'),
        (timedelta(days=-1, seconds=2), '{"$timedelta":[-1,2,0]}'),
        (2**2000, '{"$int":"0x1' + "0" * 500 + '"}'),
    ],
)
def test_t60b_the_text_is_for_readers(value: object, text: str) -> None:
    assert text_of(value) == text
    assert same(decode(json.loads(text)), value)


def test_t60b_a_signalling_nan_is_kept() -> None:
    assert same(round_trip([Decimal("-sNaN123")]), [Decimal("-sNaN123")])


def test_t60b_an_int_too_long_for_a_decimal_is_kept() -> None:
    assert round_trip([10**5000]) == [10**5000]
    assert round_trip({-(10**5000): 1}) == {-(10**5000): 1}


# -- what cannot be kept ----------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    __slots__ = ()


class Odd(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        return timedelta(0)


class Explosive:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class Moved:
    """Pickled, and then gone."""


class Pair(NamedTuple):
    a: Any
    b: Any


def loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def doubling(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return value


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        (Word("x"), "tests.unit.stores.test_codec.Word"),
        (OrderedDict(), "collections.OrderedDict"),
        ([1, (2, {3: Word("x")})], "builtins.list"),
        ({Word("key"): 1}, "builtins.dict"),
        (datetime(2024, 1, 1, tzinfo=Odd()), "datetime.datetime"),
        (loop(), "builtins.list"),
        (nested(101), "builtins.list"),
        (nested(100_000), "builtins.list"),
        ("x" * 999_999, "builtins.str"),
        ([0] * 500_000, "builtins.list"),
        (b"x" * 750_000, "builtins.bytes"),
        (1 << 8_000_000, "builtins.int"),
        (Opaque("my.Type"), "my.Type"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)
def test_t60b_anything_else_is_opaque_as_a_whole(value: object, name: str) -> None:
    assert encode(value) == {"$opaque": name}
    assert round_trip(value) == Opaque(name)
    assert canonical(value) is None


@pytest.mark.parametrize("value", ["x" * 999_998, nested(100), [1] * 499_999])
def test_t60b_up_to_the_limits_all_is_kept(value: object) -> None:
    assert round_trip(value) == value
    assert len(text_of(value)) <= 1_000_000


def test_t60b_a_small_value_with_an_endless_text_is_opaque() -> None:
    assert encode(doubling(90)) == {"$opaque": "builtins.list"}


def test_t60b_a_zone_read_from_a_file_is_opaque() -> None:
    path = Path("/usr/share/zoneinfo/Europe/Paris")
    if not path.exists():
        pytest.skip("no zone files here")
    with path.open("rb") as file:
        zone = ZoneInfo.from_file(file, key="Europe/Paris")
    assert round_trip(datetime(2024, 1, 1, tzinfo=zone)) == Opaque("datetime.datetime")


def test_t60b_a_decimal_context_changes_nothing() -> None:
    with localcontext() as context:
        context.capitals = 0
        context.prec = 3
        assert text_of(Decimal("1.23456E+7")) == '{"$decimal":"1.23456E+7"}'
        assert same(round_trip(Decimal("1.23456E+7")), Decimal("1.23456E+7"))
    assert getcontext().capitals == 1


def test_t60b_an_unknown_tag_of_a_later_release_is_opaque() -> None:
    assert decode([1, {"$path": "x"}]) == Opaque("unreadable")


def test_t60b_the_canonical_text_is_the_same_in_every_process() -> None:
    code = (
        "from headgate.stores import canonical, encode\n"
        "value = {'b': {'x', 'y', 'z', ('t', 1)}, 'a': 1}\n"
        "print(canonical(value), encode(value))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


# -- pickles ----------------------------------------------------------------------------------------------------------


def test_t60b_pickle_only_for_what_json_cannot_hold() -> None:
    assert encode((42,), codec="pickle") == {"$tuple": [42]}
    assert round_trip(Pair(1, Colour.RED), codec="pickle") == Pair(1, Colour.RED)
    assert same(round_trip(nested(200), codec="pickle"), nested(200))


def test_t60b_a_pickle_is_opaque_to_a_json_store() -> None:
    encoded = encode(Pair(1, 2), codec="pickle")
    assert set(encoded) == {"$opaque", "$pickle"}
    assert decode(encoded) == Opaque("tests.unit.stores.test_codec.Pair")


def test_t60b_what_looks_like_a_pickle_is_only_text() -> None:
    forged = {"$pickle": "gASVAAAA", "$opaque": "x"}
    assert round_trip(forged, codec="pickle") == forged


@pytest.mark.parametrize("value", [lambda: None, Explosive(), [b"x" * 800_000, Colour.RED]])
def test_t60b_what_cannot_be_pickled_is_opaque(value: object) -> None:
    assert set(encode(value, codec="pickle")) == {"$opaque"}


def test_t60b_a_pickle_that_does_not_load_is_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(Moved(), codec="pickle")
    monkeypatch.delattr(sys.modules[__name__], "Moved")
    assert decode(encoded, codec="pickle") == Opaque("tests.unit.stores.test_codec.Moved")
    assert decode({"$opaque": "x", "$pickle": 7}, codec="pickle") == Opaque("x")
    with pytest.raises(AttributeError):
        pickle.loads(base64.b64decode(encoded["$pickle"]))
