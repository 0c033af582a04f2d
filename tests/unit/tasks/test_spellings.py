"""T04: every way to say which queue and which backpressure, and every way to say it wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest

from headgate import (
    Backpressure,
    InvalidArgument,
    QueueStrategy,
    TaskPool,
    backpressure_queue,
    fail_fast,
    fair_round_robin,
    fair_share,
    fifo,
    lifo,
    pool_get,
    pool_list,
    priority,
    ring_buffer,
)
from headgate.testing import run

POLICIES = ("block_submitter", "drop_oldest", "drop_newest", "drop_fair", "fail_submitter", "refuse_fair")


@pytest.fixture(autouse=True)
def leaves_no_pool_behind() -> Iterator[None]:
    yield
    for pool in pool_list():
        run(pool.close(cancel=True))


def queue_of(queue: Any) -> dict[str, Any]:
    return dict(TaskPool(queue=queue).snapshot().queue)


def backpressure_of(backpressure: Any) -> dict[str, Any]:
    return dict(TaskPool(backpressure=backpressure).snapshot().backpressure)


@pytest.mark.parametrize(
    ("queue", "kind"),
    [
        (fifo(), "fifo"),
        (lifo(), "lifo"),
        (priority(), "priority"),
        (fair_round_robin(), "fair_round_robin"),
        (fair_share("key"), "fair_share"),
        ("fifo", "fifo"),
        ("lifo", "lifo"),
        ("priority", "priority"),
        ("fair_round_robin", "fair_round_robin"),
        ({"kind": "fifo"}, "fifo"),
        (MappingProxyType({"kind": "lifo"}), "lifo"),
        (QueueStrategy().fifo(), "fifo"),
        (QueueStrategy.fifo(), "fifo"),
        (QueueStrategy().priority(), "priority"),
        (QueueStrategy().lifo(), "lifo"),
        (QueueStrategy().fifo, "fifo"),
        (QueueStrategy().priority, "priority"),
        (QueueStrategy.lifo, "lifo"),
        (QueueStrategy().fair_round_robin, "fair_round_robin"),
        (fifo, "fifo"),
    ],
)
def test_t04_a_queue_by_object_name_dict_or_namespace(queue: Any, kind: str) -> None:
    assert queue_of(queue)["kind"] == kind


@pytest.mark.parametrize(
    ("queue", "key"),
    [
        (fair_round_robin(), "key"),
        (fair_round_robin("tenant_id"), "tenant_id"),
        (fair_round_robin(key="tenant_id"), "tenant_id"),
        ({"kind": "fair_round_robin", "key": "tenant_id"}, "tenant_id"),
        ("fair_round_robin", "key"),
        (QueueStrategy().fair_round_robin("tenant_id"), "tenant_id"),
        (QueueStrategy.fair_round_robin("tenant_id"), "tenant_id"),
        (fair_share("tenant_id"), "tenant_id"),
    ],
)
def test_t04_a_fair_queue_says_by_which_key(queue: Any, key: str) -> None:
    assert queue_of(queue)["key"] == key


@pytest.mark.parametrize("bad", ["filo", "", "FIFO", 3, None, [], {"kind": "filo"}, {}, object()])
def test_t04_an_unknown_queue_names_the_choices(bad: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TaskPool("wrong", queue=bad)
    for name in ("fifo", "priority", "lifo", "fair_round_robin"):
        assert name in str(caught.value)
    assert pool_get("wrong") is None


@pytest.mark.parametrize("bad", [{"kind": "fifo", "key": "x"}, {"kind": "fair_round_robin", "keys": "x"}])
def test_t04_a_queue_with_options_it_does_not_have(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        TaskPool(queue=bad)


@pytest.mark.parametrize(
    "option",
    [
        "priority",
        "idempotency_key",
        "window",
        "timeout",
        "ttl",
        "deadline",
        "retries",
        "delay",
        "wait_timeout",
        "cost",
        "labels",
    ],
)
def test_t10_a_fairness_key_is_no_other_option(option: str) -> None:
    with pytest.raises(InvalidArgument, match=option):
        fair_round_robin(option)
    with pytest.raises(InvalidArgument, match=option):
        fair_share(option)
    with pytest.raises(InvalidArgument, match=option):
        TaskPool(queue={"kind": "fair_round_robin", "key": option})


@pytest.mark.parametrize("bad", ["", "  ", "tenant id", "7up", None, 3])
def test_t10_a_fairness_key_can_be_written_as_a_keyword(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        fair_round_robin(bad)


@pytest.mark.parametrize(
    ("backpressure", "shown"),
    [
        (None, {"kind": "unbounded"}),
        ("unbounded", {"kind": "unbounded"}),
        ({"kind": "unbounded"}, {"kind": "unbounded"}),
        ("fail_fast", {"kind": "fail_fast"}),
        (fail_fast(), {"kind": "fail_fast"}),
        (fail_fast, {"kind": "fail_fast"}),
        ({"kind": "fail_fast"}, {"kind": "fail_fast"}),
        (Backpressure().fail_fast(), {"kind": "fail_fast"}),
        (Backpressure.fail_fast(), {"kind": "fail_fast"}),
        (Backpressure().fail_fast, {"kind": "fail_fast"}),
        (ring_buffer(5), {"kind": "ring_buffer", "capacity": 5}),
        (Backpressure().ring_buffer(5), {"kind": "ring_buffer", "capacity": 5}),
        ({"kind": "ring_buffer", "capacity": 5}, {"kind": "ring_buffer", "capacity": 5}),
        (backpressure_queue(5), {"kind": "queue", "max_depth": 5, "on_full": "block_submitter"}),
        (backpressure_queue(max_depth=5), {"kind": "queue", "max_depth": 5, "on_full": "block_submitter"}),
        ({"kind": "queue", "max_depth": 100}, {"kind": "queue", "max_depth": 100, "on_full": "block_submitter"}),
        (
            {"kind": "queue", "max_depth": 100, "on_full": "drop_oldest"},
            {"kind": "queue", "max_depth": 100, "on_full": "drop_oldest"},
        ),
        (
            Backpressure().queue(100, "fail_submitter"),
            {"kind": "queue", "max_depth": 100, "on_full": "fail_submitter"},
        ),
        (Backpressure.queue(100), {"kind": "queue", "max_depth": 100, "on_full": "block_submitter"}),
    ],
)
def test_t04_backpressure_by_object_name_dict_or_namespace(backpressure: Any, shown: dict[str, Any]) -> None:
    assert backpressure_of(backpressure) == shown


@pytest.mark.parametrize("on_full", POLICIES)
def test_t04_every_policy_of_a_full_queue(on_full: Any) -> None:
    assert backpressure_of(backpressure_queue(2, on_full))["on_full"] == on_full
    assert backpressure_of(backpressure_queue(2, on_full=on_full))["on_full"] == on_full


@pytest.mark.parametrize("bad", ["drop", "", None, 3, "BLOCK_SUBMITTER"])
def test_t04_an_unknown_on_full_names_the_choices(bad: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backpressure_queue(3, bad)
    assert all(name in str(caught.value) for name in POLICIES)
    if bad is not None:  # in a descriptor that counts as not given
        with pytest.raises(InvalidArgument):
            TaskPool(backpressure={"kind": "queue", "max_depth": 3, "on_full": bad})


@pytest.mark.parametrize("bad", ["block", "", 5, [], {"max_depth": 3}, {"kind": "box"}, object(), True])
def test_t04_an_unknown_backpressure_names_the_choices(bad: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TaskPool("wrong", backpressure=bad)
    assert all(name in str(caught.value) for name in ("queue", "ring_buffer", "fail_fast", "unbounded"))
    assert pool_get("wrong") is None


@pytest.mark.parametrize("depth", [0, -1, 1.5, "many", None, True])
def test_t04_a_depth_is_a_whole_number_of_at_least_one(depth: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_depth"):
        backpressure_queue(depth)
    with pytest.raises(InvalidArgument, match="capacity"):
        ring_buffer(depth)
    with pytest.raises(InvalidArgument, match="max_depth"):
        TaskPool(backpressure={"kind": "queue", "max_depth": depth})
    with pytest.raises(InvalidArgument, match="capacity"):
        TaskPool(backpressure={"kind": "ring_buffer", "capacity": depth})


@pytest.mark.parametrize("bad", ["queue", "ring_buffer", {"kind": "queue"}, {"kind": "fail_fast", "max_depth": 3}])
def test_t04_backpressure_with_too_little_or_too_much(bad: Any) -> None:
    with pytest.raises(InvalidArgument):
        TaskPool("wrong", backpressure=bad)
    assert pool_get("wrong") is None


def test_t04_strategies_and_policies_are_frozen_values() -> None:
    assert fifo() == fifo()
    assert fair_round_robin("a") != fair_round_robin("b")
    assert backpressure_queue(3) == backpressure_queue(3)
    with pytest.raises(AttributeError):
        backpressure_queue(3).max_depth = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "bad", [{"weights": 3}, {"weights": {"a": 0}}, {"weights": {"a": -1}}, {"cost": 0}, {"cost": "x"}]
)
def test_t23_weights_and_costs_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgument, TypeError)) as caught:
        fair_share("tenant_id", **bad)
    assert "weight" in str(caught.value) or "cost" in str(caught.value)
