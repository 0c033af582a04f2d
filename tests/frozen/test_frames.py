"""Messages between client and worker: recorded bytes are understood as they were, and the same bytes are sent now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.frozen.frames import SCRIPTS, context_meaning, contexts, play, released, told
from tests.frozen.inside import NEWEST, OLDEST, ToClient, ToWorker
from tests.frozen.live import messages_of_a_client, talk_to_a_worker
from tests.frozen.support import recorded, same


def bytes_of(record: list[Any]) -> list[Any]:
    return [[one["to"], one["bytes"] if len(one["bytes"]) < 5000 else one["fields"]] for one in record]


def test_every_script_is_recorded() -> None:
    assert set(SCRIPTS) == set(recorded("frames/sessions.json"))


def test_the_protocols_that_were_spoken_are_spoken_still() -> None:
    oldest, newest = recorded("frames/protocols.json")
    assert oldest >= OLDEST
    assert newest <= NEWEST


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_same_bytes_are_sent(name: str) -> None:
    same(f"what {name} sends", bytes_of(play(name)), bytes_of(recorded("frames/sessions.json")[name]))


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_recorded_bytes_are_understood_as_they_were(name: str) -> None:
    then = recorded("frames/sessions.json")[name]
    now = play(name, then)
    same(f"what is heard in {name}", [one["heard"] for one in now], [one["heard"] for one in then])


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_recorded_bytes_have_the_recorded_fields(name: str) -> None:
    for one in recorded("frames/sessions.json")[name]:
        if one["to"] != "nobody":
            kind = ToWorker if one["to"] == "worker" else ToClient
            same(f"a message of {name}", told(kind.FromString(released(one["bytes"]))), one["fields"])


def test_contexts_are_sent_and_understood_as_they_were() -> None:
    then = recorded("frames/contexts.json")
    same("the meaning of recorded contexts", context_meaning(then["frames"]), then["meaning"])
    same("frames of contexts", contexts(), then["frames"])


@pytest.fixture(scope="module")
def live() -> Any:
    """With a real worker; in a fixture, because gRPC keeps what it opened first until the process ends."""
    return asyncio.run(talk_to_a_worker(recorded("frames/client.json")))


@pytest.mark.integration
def test_a_worker_answers_an_older_client_as_it_did(live: Any) -> None:
    same("what a worker says to recorded bytes", live["answers"], recorded("frames/live.json")["answers"])


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(recorded("frames/live.json")["calls"]))
def test_a_call_puts_the_same_frames_on_the_wire(name: str, live: Any) -> None:
    same(f"frames of a call {name}", live["calls"][name], recorded("frames/live.json")["calls"][name])


def test_a_client_sends_what_it_sent() -> None:
    same("what a client sends", messages_of_a_client(), recorded("frames/client.json"))
