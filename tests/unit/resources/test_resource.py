"""R01-R07: names, the Resource, its fields, its secret."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

import headgate
from headgate import InvalidArgument, InvalidType, Resource
from headgate.resources import parse_retry_after
from headgate.testing import run
from tests.support.resources.support import ident, keys


def test_r01_the_seeds_names_are_here() -> None:
    from headgate.resources import CooldownResource, DisableResource, Pool, PoolExhausted, Resource

    assert Pool is headgate.ResourcePool
    assert PoolExhausted is headgate.PoolExhausted
    assert CooldownResource is headgate.CooldownResource
    assert DisableResource is headgate.DisableResource
    assert Resource[str]("k", "v").value == "v"
    assert Pool[str]([Resource("k", "v")]).snapshot().keys() == {"k"}


def test_r04_seven_fields_in_order_positional_or_keyword() -> None:
    positional = Resource("key-1", "sk", 4, "cooling_down", 12.5, 3.5, 2)
    named = Resource(
        resource_id="key-1",
        value="sk",
        max_in_flight=4,
        status="cooling_down",
        cooldown_until=12.5,
        last_acquired_at=3.5,
        consecutive_cooldown=2,
    )
    for resource in (positional, named):
        assert resource.resource_id == "key-1"
        assert resource.value == "sk"
        assert resource.max_in_flight == 4
        assert resource.status == "cooling_down"
        assert resource.cooldown_until == 12.5
        assert resource.last_acquired_at == 3.5
        assert resource.consecutive_cooldown == 2


def test_r04_the_defaults() -> None:
    resource = Resource("k", object())
    assert (resource.max_in_flight, resource.status, resource.cooldown_until) == (None, "healthy", 0.0)
    assert (resource.last_acquired_at, resource.consecutive_cooldown) == (0.0, 0)
    assert (resource.tags, resource.weight) == (frozenset(), 1.0)


def test_r04_tags_and_weight_are_keyword_only() -> None:
    resource = Resource("k", 1, tags=["gpu", "eu"], weight=2.5)
    assert resource.tags == {"gpu", "eu"}
    assert resource.weight == 2.5
    with pytest.raises(TypeError):
        Resource("k", 1, None, "healthy", 0.0, 0.0, 0, ["gpu"])  # type: ignore[misc]


@pytest.mark.parametrize("limit", [0, -1, math.nan, True, False, 1.5, "3", math.inf])
def test_r05_a_limit_below_one_nan_or_bool_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"max_in_flight must be >= 1 or None") as caught:
        Resource("k", "v", limit)
    assert repr(limit) in str(caught.value)


@pytest.mark.parametrize("resource_id", ["", None, 7, b"k"])
def test_r11_an_id_must_be_a_non_empty_string(resource_id: Any) -> None:
    with pytest.raises(InvalidArgument, match="resource_id must be a non-empty"):
        Resource(resource_id, "v")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("status", "ill", "status must be one of healthy, cooling_down, disabled, got 'ill'"),
        ("cooldown_until", math.nan, "cooldown_until must be a finite number, got nan"),
        ("last_acquired_at", "now", "last_acquired_at must be a finite number, got 'now'"),
        ("consecutive_cooldown", -1, "consecutive_cooldown must be a whole number >= 0, got -1"),
        ("consecutive_cooldown", True, "consecutive_cooldown must be a whole number >= 0, got True"),
        ("weight", 0, "weight must be > 0, got 0"),
        ("weight", math.inf, "weight must be a finite number, got inf"),
    ],
)
def test_r06_fields_that_cannot_work_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Resource("k", "v", **{field: value})  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("tags", ["gpu", 3, [1]])
def test_tags_must_be_strings_in_a_collection(tags: Any) -> None:
    with pytest.raises(InvalidType, match="tags must"):
        Resource("k", "v", tags=tags)


def test_r06_a_resource_constructed_disabled_or_cooling_is_honoured() -> None:
    async def main() -> None:
        pool = headgate.ResourcePool(
            [
                Resource("dead", 1, status="disabled"),
                Resource("resting", 2, status="cooling_down", cooldown_until=60.0, consecutive_cooldown=1),
                Resource("fine", 3),
            ],
            strategy="primary_backup",
        )
        assert await pool.run(ident) == "fine"
        snapshot = pool.snapshot()
        assert snapshot["dead"]["status"] == "disabled"
        assert snapshot["resting"]["cooldown_seconds_remaining"] == 60.0
        import asyncio

        await asyncio.sleep(60)
        assert await pool.run(ident) == "resting"

    run(main)


def test_r07_repr_tells_the_state_and_not_the_value() -> None:
    resource = Resource("key-1", "sk-very-secret", 3, tags=["eu"])
    assert repr(resource) == "<Resource 'key-1' healthy, 0 in flight, max_in_flight=3, tags=['eu']>"
    assert "sk-very-secret" not in repr(keys("a"))


def test_a_copy_of_a_resource_carries_its_fields_and_no_flights() -> None:
    async def main() -> None:
        pool = keys("a")
        async with pool.lease() as resource:
            for twin in (pickle.loads(pickle.dumps(resource)), copy.copy(resource)):
                assert (twin.resource_id, twin.value) == ("a", "secret-a")
                assert "0 in flight" in repr(twin)

    run(main)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0),
        ("1.5", 1.5),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("-3", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
        (None, None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 100.0),
        ("Thu, 01 Jan 1970 00:01:40", 100.0),
        ("Wed, 31 Dec 1969 00:00:00 GMT", 0.0),
        ("Thu, 99 Foo 1970 00:00:00 GMT", None),
        ("9" * 400, None),
    ],
)
def test_r15_retry_after_is_seconds_or_a_date_or_nothing(text: str | None, seconds: float | None) -> None:
    from headgate.core.clock import clock

    with clock.replaced(wall=lambda: 0.0):
        assert parse_retry_after(text) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("400ms", 0.4),
        ("6m0s", 360.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("1970-01-01T00:01:40Z", 100.0),
        ("6m 0s", None),
        ("6x", None),
        ("-5s", None),
        ("1_000", None),
        ("1700000000", None),  # a timestamp, taken as seconds, would retire the resource for 54 years
    ],
)
def test_r15_retry_after_may_be_a_duration(text: str, seconds: float | None) -> None:
    from headgate.core.clock import clock

    with clock.replaced(wall=lambda: 0.0):
        assert parse_retry_after(text) == seconds


def test_r15_what_is_not_text_gives_none() -> None:
    assert parse_retry_after(5) is None  # type: ignore[arg-type]
