"""W50: messages of a session stay below the limit of their length, whatever they carry."""

from __future__ import annotations

from typing import Any

import pytest

from headgate import ChannelOptions
from headgate.workers.model import FunctionForm
from headgate.workers.options import LEAST_MESSAGE
from headgate.workers.protocol.bulk import INLINE, BulkPayload
from headgate.workers.protocol.client_session import ClientSession
from headgate.workers.protocol.message_lengths import lengths_of
from headgate.workers.protocol.messages import MESSAGE, Outgoing, Peer
from headgate.workers.protocol.wire.wire_pb2 import ToClient, ToWorker
from headgate.workers.protocol.worker_session import WorkerSession

LIMITS = [
    LEAST_MESSAGE,
    *(pytest.param(n, marks=pytest.mark.soak) for n in (1_500_000, LEAST_MESSAGE + 1, 4 * LEAST_MESSAGE)),
]


def opened(longest: int) -> tuple[ClientSession, WorkerSession]:
    """Both ends of a session whose messages may have so many bytes."""
    client = ClientSession(1, "client", "1.0")
    worker = WorkerSession("w", "1.0", lambda definition: definition, longest)  # type: ignore[arg-type, return-value]
    assert worker.greet(client.hello())
    welcome = worker.take()
    assert welcome is not None
    assert client.welcomed(ToClient.FromString(welcome.SerializeToString())) is None
    return client, worker


def form(number: int = 0, value: bytes = b"") -> FunctionForm:
    return FunctionForm(
        f"some.module:function_{number}:12", "some.module", f"function_{number}", file="x" * 80, value=value
    )


def sent(client: ClientSession, worker: WorkerSession) -> list[int]:
    """Have everything go to the worker, and return how many bytes each message had."""
    sizes: list[int] = []
    while (message := client.take()) is not None:
        data = message.SerializeToString()
        sizes.append(len(data))
        worker.receive(ToWorker.FromString(data))
        back = worker.take()
        if back is not None:
            client.receive(ToClient.FromString(back.SerializeToString()))
    return sizes


def answered(client: ClientSession, worker: WorkerSession) -> tuple[list[int], list[Any]]:
    sizes, answers = [], []
    while (message := worker.take()) is not None:
        data = message.SerializeToString()
        sizes.append(len(data))
        answers += client.receive(ToClient.FromString(data))
        forth = client.take()
        if forth is not None:
            worker.receive(ToWorker.FromString(forth.SerializeToString()))
    return sizes, answers


@pytest.mark.parametrize("longest", LIMITS)
def test_w50_messages_to_a_worker_are_never_longer_than_the_limit(longest: int) -> None:
    client, worker = opened(longest)
    for number in range(20):
        client.submit(Outgoing(number, form(), BulkPayload(b"b" * 700_000)))
    for number in range(20_000):
        client.submit(
            Outgoing(number, form(number % 500), b"a" * 10, 1.5, "client-of-some-name/123456", tenant="t" * 40)
        )
    for number in range(40):
        context = b"c" * (client.lengths.extra // 2)
        client.submit(
            Outgoing(number, form(number + 500, b"v" * (client.lengths.extra // 2)), b"a" * INLINE, context=context)
        )
    client.introduce("pool", [Peer(f"w-{number:010}", f"unix:/run/user/1000/{number:040}") for number in range(4000)])
    sizes = sent(client, worker)
    assert max(sizes) <= longest
    assert len(worker.open) == 20_060


@pytest.mark.parametrize("longest", LIMITS)
def test_w50_messages_to_a_client_are_never_longer_than_the_limit(longest: int) -> None:
    client, worker = opened(longest)
    count = 20_060
    calls = [Outgoing(number, form(), b"") for number in range(count)]
    for call in calls:
        client.submit(call)
    sent(client, worker)
    extra = worker.lengths.extra
    for call in calls[:20]:
        worker.answer(call.number, "returned", BulkPayload(b"b" * 700_000))
    for call in calls[20:60]:
        worker.answer(call.number, "returned", b"r" * INLINE, context=b"c" * extra)
    for call in calls[60:10_000]:
        worker.started(call.number)
        worker.answer(call.number, "returned", b"r" * 10)
    for call in calls[10_000:]:
        worker.answer(call.number, "not_started", b"its task loop is held by somebody for quite a while")
    worker.beat(1.0, 7, "tag", [(call.number, 3.25) for call in calls[:2000]])
    sizes, answers = answered(client, worker)
    assert max(sizes) <= longest
    assert len(answers) == count
    assert sum(len(answer.payload) for answer in answers[:20]) > 0


def test_w50_what_cannot_fit_is_refused_before_it_is_sent_and_the_others_go() -> None:
    client = ClientSession(1, "client", "1.0")
    long = Outgoing(1, form(1, b"v" * LEAST_MESSAGE), b"")
    bulky = Outgoing(2, form(2), BulkPayload(b"b" * 700_000), context=b"c" * LEAST_MESSAGE)
    short = Outgoing(3, form(3), b"")
    for call in (long, bulky, short):
        client.submit(call)
    worker = WorkerSession("w", "1.0", lambda definition: definition, LEAST_MESSAGE)  # type: ignore[arg-type, return-value]
    worker.greet(client.hello())
    welcome = worker.take()
    assert welcome is not None
    assert client.welcomed(welcome) is None
    answers = client.unsendable()
    assert [(answer.call, answer.kind) for answer in answers] == [(long, "exhausted"), (bulky, "exhausted")]
    assert b"do not fit into a message of at most 1,048,576 bytes" in bytes(answers[0].payload)  # type: ignore[arg-type]
    sent(client, worker)
    assert [begun.task for begun in worker.open.values()] == [3]
    assert (client.outbox, client.apart) == (0, 0)


def test_w50_without_a_limit_messages_are_as_long_as_before() -> None:
    lengths = lengths_of(0)
    assert lengths == (0, 0, 0)
    assert lengths.refusal(10**9, 10**9) == ""
    assert lengths.has_room_for_chunk(ToWorker())
    client, worker = opened(0)
    assert client.lengths == worker.lengths == lengths
    assert lengths_of(64 * LEAST_MESSAGE).frames == MESSAGE
    assert lengths_of(1).frames > 0, "whatever a worker says"


def test_w50_the_limit_is_the_smaller_one_of_both() -> None:
    assert ChannelOptions().max_message == 0
    assert ChannelOptions(max_receive_message_length=3_000_000).max_message == 3_000_000
    assert ChannelOptions(3_000_000, 2_000_000).max_message == 2_000_000


def test_w53_the_age_limit_of_a_connection_is_told_in_the_first_answer() -> None:
    client = ClientSession(1, "client", "1.0")
    worker = WorkerSession("w", "1.0", lambda definition: definition)  # type: ignore[arg-type, return-value]
    worker.greet(client.hello(), max_age_ms=1500)
    welcome = worker.take()
    assert welcome is not None
    assert client.welcomed(welcome) is None
    assert client.max_age == 1.5
    client, _ = opened(0)
    assert client.max_age == 0.0, "without one nothing is said"
