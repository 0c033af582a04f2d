"""R07: a resource's value is in no message, repr, log, event, snapshot or traceback of ours."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import traceback
from typing import Any

import pytest

from headgate import CooldownResource, DisableResource, InvalidType, PoolExhausted, Resource, ResourcePool
from headgate.testing import capture_events, settle, virtual
from tests.support.resources.support import Gate, always

SECRET = "sk-planted-9f8e7d6c"


class Key:
    """A value whose repr and str shout the secret."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def __repr__(self) -> str:
        return self.secret

    __str__ = __repr__


@pytest.fixture(params=["text", "object"])
def value(request: pytest.FixtureRequest) -> Any:
    return SECRET if request.param == "text" else Key(SECRET)


def test_r07_through_a_whole_life_of_a_pool(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("headgate").addHandler(handler)
    caplog.set_level(logging.DEBUG)

    def note(*things: object) -> None:
        said.extend(f"{thing!r} {thing}" for thing in things)

    def hook(*change: Any) -> None:
        note(*change)
        raise RuntimeError("hook")

    @virtual
    async def live() -> None:
        pool = ResourcePool(
            {"a": value, "b": Resource("b", value, 1, tags=["x"])}, on_state_change=hook, classify=lambda outcome: "odd"
        )
        gate = Gate()
        with capture_events() as events:
            calls = [asyncio.create_task(pool.run(gate, retry_delay=0, timeout=50)) for _ in range(4)]
            await settle()
            note(pool, pool.snapshot(), pool.stats(), *pool._engine.rotation.members.values())
            gate.finish(0, CooldownResource(5, "busy"))
            await settle()
            gate.finish(1, DisableResource("revoked"))
            await asyncio.sleep(60)
            results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    note(result, getattr(result, "attempts", None))
                    said.append("".join(traceback.format_exception(result)))
            for wrong in (lambda r: 3, lambda r: value, lambda r: r):
                try:
                    await pool.run(wrong, wait_for_capacity=True)  # type: ignore[arg-type, return-value]
                except (InvalidType, PoolExhausted) as error:
                    note(error)
                    said.append("".join(traceback.format_exception(error)))
            await pool.reconcile({"a": value, "c": value})
            await pool.remove("c")
            note(*events)
            said.extend(json.dumps(event.to_dict()) for event in events)

    live()
    for arguments in (
        {"resources": value},
        {"resources": [Resource("a", value), Resource("a", value)]},
        {"resources": {"b": Resource("a", value)}},
        {"resources": {7: value}},
        {"resources": [value], "strategy": "odd"},
    ):
        try:
            ResourcePool(**arguments)
        except (ValueError, TypeError) as error:
            note(error)
            said.append("".join(traceback.format_exception(error)))
    try:
        Resource(value, "swapped")
    except ValueError as error:
        note(error)
    logging.getLogger("headgate").removeHandler(handler)
    everything = "\n".join([*said, log.getvalue(), caplog.text])
    assert "hook" in everything
    assert "cools down" in everything
    assert SECRET not in everything


@virtual
async def test_r07_an_operations_own_message_is_its_own_affair() -> None:
    pool = ResourcePool({"a": SECRET})
    with pytest.raises(ValueError, match=SECRET):
        await pool.run(always(ValueError(SECRET)))
