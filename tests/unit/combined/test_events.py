"""Events as listeners get them: values of their classes, however cheaply they were made."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from headgate import CooldownResource, Resource, ResourcePool, TaskPool, subscribe
from headgate.testing import virtual


@virtual
async def test_o02_events_are_frozen_and_equal_by_value_however_they_are_made() -> None:
    async def work(key: Resource[str], refused: list[str]) -> None:
        if not refused:
            refused.append(key.resource_id)
            raise CooldownResource(1)

    seen: list[Any] = []
    unsubscribe = subscribe(seen.append)
    keys = ResourcePool({"a": "value a", "b": "value b"})
    async with TaskPool("events", resources=keys, queue="fair_round_robin") as pool:
        await pool.run(work, [], key="ann")
    await keys.run(lambda key: work(key, ["none"]))
    unsubscribe()
    names = {"pool_submit", "pool_dequeue", "pool_requeue", "pool_finish", "resource_acquired", "resource_released"}
    assert {event.name for event in seen} >= {*names, "resource_cooled", "run_finished"}
    for event in seen:
        values = {field.name: getattr(event, field.name) for field in fields(event)}
        assert type(event)(**values) == replace(event) == pickle.loads(pickle.dumps(event)) == event
        assert hash(replace(event)) == hash(event)
        assert repr(event).startswith(f"{type(event).__name__}(at=")
        assert event != replace(event, at=event.at + 1)
        for change in (lambda one: setattr(one, "at", 0.0), lambda one: delattr(one, "at")):
            with pytest.raises(FrozenInstanceError):
                change(event)
        with pytest.raises((AttributeError, TypeError)):
            event.unknown = 1
