"""R10, R11: what a pool is made of, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headgate import InvalidArgument, InvalidType, Resource, ResourcePool, UnknownResource
from headgate.testing import run, virtual
from tests.support.resources.support import always, ident, keys


def test_r10_order_is_kept_and_no_loop_is_needed() -> None:
    assert list(keys("c", "a", "b").snapshot()) == ["c", "a", "b"]


@pytest.mark.parametrize(
    "given",
    [
        [Resource("a", 1), Resource("b", 2)],
        (Resource("a", 1), Resource("b", 2)),
        {"a": Resource("a", 1), "b": Resource("b", 2)},
        {"a": 1, "b": 2},
        {"a": 1, "b": Resource("b", 2)},
    ],
)
def test_r10_a_sequence_or_a_dict(given: Any) -> None:
    pool: ResourcePool[int] = ResourcePool(given, strategy="primary_backup")
    assert list(pool.snapshot()) == ["a", "b"]

    async def value(resource: Resource[int]) -> int:
        return resource.value

    assert run(lambda: pool.run(value)) == 1


def test_r10_plain_values_get_numbered_ids_never_derived_from_them() -> None:
    assert list(ResourcePool(["sk-aaa", "sk-bbb"]).snapshot()) == ["resource-0", "resource-1"]
    assert list(ResourcePool(["sk-aaa", Resource("b", "sk-bbb"), "sk-ccc"]).snapshot()) == [
        "resource-0",
        "b",
        "resource-2",
    ]


@pytest.mark.parametrize("given", ["sk-aaa", b"sk-aaa", {"sk-aaa"}, frozenset({"sk-aaa"}), 7, None])
def test_r10_what_has_no_order_or_is_no_collection_is_refused_without_showing_it(given: Any) -> None:
    with pytest.raises(InvalidType, match="resources must be a sequence or a mapping") as caught:
        ResourcePool(given)
    assert "sk-aaa" not in str(caught.value)


ok = [Resource("a", "sk-aaa")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resources": []}, "at least one resource"),
        ({"resources": {}}, "at least one resource"),
        ({"resources": [Resource("a", "sk-aaa"), Resource("a", "sk-bbb")]}, "Duplicate resource_id in pool: 'a'"),
        ({"resources": {"b": Resource("a", "sk-aaa")}}, "dict key 'b' does not match resource_id 'a'"),
        ({"resources": {"": "sk-aaa"}}, "resource_id must be a non-empty string, got an empty string"),
        ({"strategy": "random"}, "strategy must be one of 'round_robin', 'primary_backup'"),
        ({"strategy": "random"}, "got 'random'"),
        ({"strategy": 3}, "got 3"),
        ({"max_attempts": 0}, "max_attempts must be >= 1, got 0"),
        ({"max_attempts": math.nan}, "max_attempts must be >= 1, got nan"),
        ({"max_attempts": True}, "max_attempts must be >= 1, got True"),
        ({"max_attempts": "3"}, "max_attempts must be >= 1, got '3'"),
        ({"cooldown_table": ()}, "cooldown_table must contain at least one entry"),
        ({"cooldown_table": (1.0, -1.0)}, "cooldown_table entries must be finite and >= 0, got -1.0"),
        ({"cooldown_table": (math.inf,)}, "cooldown_table entries must be finite and >= 0, got inf"),
        ({"cooldown_table": (math.nan,)}, "cooldown_table entries must be finite and >= 0, got nan"),
        ({"cooldown_table": ("1",)}, "cooldown_table entries must be finite and >= 0, got '1'"),
    ],
)
def test_r11_bad_values_are_named_and_shown(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ResourcePool(**{"resources": ok, **arguments})
    assert message in str(caught.value)
    assert "sk-" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cooldown_table": 30.0}, "cooldown_table must be a sequence of seconds, got float"),
        ({"cooldown_table": "30"}, "cooldown_table must be a sequence of seconds, got str"),
        ({"cancel_siblings": 1}, "cancel_siblings must be bool, got int"),
        ({"probe_on_recovery": "yes"}, "probe_on_recovery must be bool, got str"),
        ({"on_state_change": "log"}, "on_state_change must be callable or None, got str"),
        ({"on_state_change": lambda: None}, "on_state_change must take (resource_id, old, new, seq)"),
        ({"classify": 3}, "classify must be callable or None, got int"),
    ],
)
def test_r11_wrong_kinds_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidType) as caught:
        ResourcePool(**{"resources": ok, **arguments})
    assert message in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_r11_a_strategy_class_instead_of_a_value_is_explained() -> None:
    from headgate.resources import weighted

    with pytest.raises(InvalidArgument, match="call it: a strategy is a value"):
        ResourcePool(ok, strategy=weighted)  # type: ignore[arg-type]


def test_r11_a_refused_pool_leaves_no_seat_behind() -> None:
    shared = Resource("a", 1)
    with pytest.raises(InvalidArgument):
        ResourcePool([shared], strategy="random")
    with pytest.raises(InvalidArgument):
        ResourcePool([shared, Resource("a", 2)])
    assert len(shared.sharing.members) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts must be >= 1, got 0"),
        ({"max_attempts": 1.5}, "max_attempts must be >= 1, got 1.5"),
        ({"retry_delay": -0.1}, "retry_delay must be >= 0 and finite, got -0.1"),
        ({"retry_delay": math.inf}, "retry_delay must be >= 0 and finite, got inf"),
        ({"retry_delay": math.nan}, "retry_delay must be >= 0 and finite, got nan"),
        ({"retry_delay": None}, "retry_delay must be >= 0 and finite, got None"),
        ({"deadline": math.inf}, "deadline must be a finite time.monotonic() value, got inf"),
        ({"deadline": math.nan}, "deadline must be a finite time.monotonic() value, got nan"),
        ({"deadline": -math.inf}, "deadline must be a finite time.monotonic() value, got -inf"),
        ({"deadline": "soon"}, "deadline must be a finite time.monotonic() value, got 'soon'"),
        ({"within": -1}, "within must be a finite number of seconds >= 0, got -1"),
        ({"within": 5, "deadline": 9}, "deadline and within are the same bound, got both (9 and 5)"),
        ({"timeout": 0}, "timeout must be a finite number of seconds > 0, got 0"),
        ({"timeout": -2}, "timeout must be a finite number of seconds > 0, got -2"),
        ({"timeout": math.inf}, "timeout must be a finite number of seconds > 0, got inf"),
    ],
)
def test_r11_r41_bad_options_of_a_call_are_named_and_shown(options: dict[str, Any], message: str) -> None:
    async def main() -> None:
        pool = keys("a")
        with pytest.raises(InvalidArgument) as caught:
            await pool.run(ident, **options)
        assert message in str(caught.value)
        with pytest.raises(InvalidArgument):
            pool.use(**options)
        assert pool.stats().attempts == 0

    run(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempt": 3}, "run() takes no option 'max_attempt'. Did you mean max_attempts?"),
        ({"colour": 3}, "run() takes no option 'colour'. Options are affinity, backoff, cost, deadline, exclude"),
        ({"request_id": 7}, "request_id must be a string or None, got int"),
        ({"tags": "gpu"}, "tags must be a collection of strings, got 'gpu'. Write tags=('gpu',)"),
        ({"exclude": 3}, "exclude must be a collection of strings, got int"),
        ({"wait_for_cooldown": 1}, "wait_for_cooldown must be bool, got int"),
        ({"wait_for_capacity": None}, "wait_for_capacity must be bool, got NoneType"),
        ({"isolate": "yes"}, "isolate must be bool, got str"),
    ],
)
def test_options_of_the_wrong_kind_are_named(options: dict[str, Any], message: str) -> None:
    async def main() -> None:
        with pytest.raises(InvalidType) as caught:
            await keys("a").run(ident, **options)
        assert message in str(caught.value)

    run(main)


@virtual
async def test_r11_an_unknown_id_is_named_with_those_there_are() -> None:
    pool = keys("a", "b")
    for call in (pool.enable, pool.disable, pool.remove):
        with pytest.raises(UnknownResource, match=r"unknown resource_id 'c': the pool has 'a', 'b'") as caught:
            await call("c")
        assert isinstance(caught.value, KeyError)


@virtual
async def test_r40_an_operation_that_returns_no_awaitable_is_refused_and_the_resource_stays_healthy() -> None:
    pool = keys("a")
    with pytest.raises(InvalidType, match=r"operation must return an Awaitable, got str\."):
        await pool.run(lambda resource: resource.value)  # type: ignore[arg-type, return-value]
    assert pool.snapshot()["a"]["status"] == "healthy"
    assert pool.snapshot()["a"]["in_flight"] == 0
    assert await pool.run(always("still here")) == "still here"
