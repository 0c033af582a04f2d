"""The event stream: typed, frozen, and free when nobody listens."""

from __future__ import annotations

import json
import logging
from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest

import headgate
from headgate import InvalidType, subscribe
from headgate.core.events import Event
from headgate.core.topics import topic_named
from headgate.testing import capture_events, virtual
from tests.support.resources.support import always, by_id, ident, keys, rate_limited


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened(Event):
    name: ClassVar[str] = "happened"
    topic: ClassVar[str] = "test.things"

    what: object


def emit(what: object = 1, topic: str = "test.things") -> None:
    topic_named(topic).emit(Happened(at=12.5, what=what))


def test_a_subscriber_hears_its_topic_and_those_below_until_it_leaves() -> None:
    heard: list[str] = []
    leave = [
        subscribe(lambda event: heard.append("all")),
        subscribe(lambda event: heard.append("test"), "test"),
        subscribe(lambda event: heard.append("test.things"), "test.things"),
        subscribe(lambda event: heard.append("tes"), "tes"),
        subscribe(lambda event: heard.append("other"), "test.thing"),
    ]
    emit()
    assert heard == ["all", "test", "test.things"]
    for unsubscribe in leave:
        unsubscribe()
        unsubscribe()
    emit()
    assert len(heard) == 3


def test_a_topic_nobody_listens_to_has_no_listeners() -> None:
    topic = topic_named("test.quiet")
    assert topic.listeners == ()
    unsubscribe = subscribe(print, "test.quiet")
    assert len(topic.listeners) == 1
    unsubscribe()
    assert topic.listeners == ()
    assert topic_named("test.quiet") is topic


def test_events_are_frozen_and_become_plain_dicts() -> None:
    event = Happened(at=1.0, what={"deep": (1, {2}), 3: object})
    with pytest.raises(FrozenInstanceError):
        event.at = 2.0  # type: ignore[misc]
    told = event.to_dict()
    assert (told["name"], told["topic"], told["at"]) == ("happened", "test.things", 1.0)
    assert told["what"]["deep"] == [1, [2]]
    json.dumps(told)


def test_a_listener_that_raises_is_logged_and_the_next_still_hears(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("listener")

    first, second = subscribe(broken, "test"), subscribe(heard.append, "test")
    emit()
    first()
    second()
    assert len(heard) == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "broken failed on the event 'happened'" in caplog.text


async def async_listener(event: Event) -> None:
    raise AssertionError("never called")


@pytest.mark.parametrize(("callback", "topic"), [(3, None), (print, 3), (async_listener, None)])
def test_bad_subscriptions_are_refused(callback: object, topic: object) -> None:
    with pytest.raises(InvalidType):
        subscribe(callback, topic)  # type: ignore[arg-type]


@virtual
async def test_an_unobserved_pool_makes_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, **fields: object) -> None:
        raise AssertionError("an event was made")

    monkeypatch.setattr(headgate.resources.events.ResourceAcquired, "__init__", refuse)
    monkeypatch.setattr(headgate.resources.events.ResourceReleased, "__init__", refuse)
    monkeypatch.setattr(headgate.resources.events.RunFinished, "__init__", refuse)
    assert await keys("a").run(ident) == "a"


@virtual
async def test_every_transition_is_one_event() -> None:
    import asyncio

    pool = keys("a", "b", name="p", strategy="primary_backup")
    with capture_events("resources") as events:
        await pool.run(by_id(a=rate_limited(), b="ok"), retry_delay=0)
        await asyncio.sleep(30)
        await pool.run(ident)
        await pool.disable("a")
        await pool.enable("a")
        await pool.add("c", 1)  # type: ignore[arg-type]
        await pool.remove("c")
    assert events.names == [
        "resource_acquired",
        "resource_cooled",
        "resource_released",
        "resource_acquired",
        "resource_released",
        "run_finished",
        "resource_recovered",
        "resource_acquired",
        "resource_released",
        "run_finished",
        "resource_disabled",
        "resource_enabled",
        "resource_added",
        "resource_removed",
    ]
    for event in events:
        assert event.to_dict()["pool"] == "p"
        json.dumps(event.to_dict())
    cooled = events[1].to_dict()
    assert (cooled["seconds"], cooled["consecutive"], cooled["reason"]) == (30.0, 1, "rate limited")
    assert events[2].to_dict()["outcome"] == "cooldown"
    assert events[5].to_dict()["attempts"] == 2


@virtual
async def test_a_failed_run_is_reported_with_its_outcome() -> None:
    pool = keys("a")
    with capture_events("resources.run") as events:
        for outcome in (ValueError("mine"), rate_limited()):
            with pytest.raises(Exception):  # noqa: B017, PT011
                await pool.run(always(outcome))
        with pytest.raises(headgate.PoolExhausted):
            await pool.run(ident)
    told = [(event.to_dict()["outcome"], event.to_dict()["attempts"]) for event in events]
    assert told == [("error", 1), ("exhausted", 1), ("exhausted", 0)]
