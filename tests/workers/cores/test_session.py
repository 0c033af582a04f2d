"""S40a, B52, S45: the conversation of a client with a worker, without a loop and without a transport.

First what the head of `session.py` says, state by state; then what the other side may not say; last random walks of
several conversations, beside a naive model (`conversation.py`), with limits so small that all of them are met.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headgate.errors import RpcError
from headgate.workers import session
from headgate.workers.model import FunctionForm
from headgate.workers.session import Answer, Begun, ClientSession, ConversationBroken, Outgoing, WorkerSession
from headgate.workers.wire.wire_pb2 import (
    Call,
    Chunk,
    Definition,
    Hello,
    Pulse,
    Refusal,
    Refused,
    Result,
    ToClient,
    ToWorker,
    Welcome,
)
from tests.conftest import SCALE
from tests.workers.cores.conversation import ENDS, REFUSALS, Pair, Work, World, form_of, noise

INLINE, MESSAGE = 100, 400
NAMED = FunctionForm("jobs.add:1", "jobs", "add", b"digest", "cpython-311", file="jobs.py")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can reach with a handful of bytes."""
    limits = {"INLINE": INLINE, "MESSAGE": MESSAGE, "OUTBOX": 1000, "KEPT": 30, "CROWD": 3}
    for name, value in limits.items():
        monkeypatch.setattr(session, name, value)


def opened() -> tuple[ClientSession, WorkerSession]:
    """Both ends, after the handshake."""
    client, worker = ClientSession(1, "client", "1.0"), WorkerSession("w1", "1.0", form_of)
    assert worker.greet(carried(client.hello(), ToWorker))
    assert client.welcomed(carried(worker.take(), ToClient)) is None
    return client, worker


def carried(message: Any, kind: Any) -> Any:
    """As it arrives."""
    assert message is not None
    return kind.FromString(message.SerializeToString())


def told(client: ClientSession, worker: WorkerSession) -> tuple[list[Begun], list[int]]:
    """All that the client has to say arrives."""
    begun, cancels = [], []
    while (message := client.take()) is not None:
        more, gone = worker.receive(carried(message, ToWorker))
        begun += more
        cancels += gone
    return begun, cancels


def heard(client: ClientSession, worker: WorkerSession) -> list[Answer]:
    """All that the worker has to say arrives."""
    answers = []
    while (message := worker.take()) is not None:
        answers += client.receive(carried(message, ToClient))
    return answers


def call(size: int = 10, form: FunctionForm = NAMED, task: int = 1, **more: Any) -> Outgoing:
    return Outgoing(task, form, noise(task, size), **more)


def by_value(size: int, name: str = "f", **more: Any) -> FunctionForm:
    return FunctionForm(f"__main__.{name}:1", value=noise(name, size), **more)


def kinds(answers: Sequence[Answer]) -> list[tuple[Outgoing, str]]:
    return [(answer.call, answer.kind) for answer in answers]


# -- unsent, sent, answered -------------------------------------------------------------------------------------------


def test_s40a_an_unsent_call_stands_in_the_outbox() -> None:
    client, _ = opened()
    one = call(10)
    client.submit(one)
    assert (one.number, client.waiting, client.sent) == (0, 1, {})
    assert client.outbox == 10 + session._FRAME
    assert kinds(client.broken()) == [(one, "unsent")]
    assert one.arguments == noise(1, 10), "it can be sent elsewhere as it is"
    assert (client.outbox, client.waiting, client.take()) == (0, 0, None)


def test_s40a_calls_may_be_submitted_before_the_stream_is_open() -> None:
    client = ClientSession(1, "client", "1.0")
    one, two = call(), call(2 * session.INLINE)
    client.submit(one)
    client.submit(two)
    assert client.take() is None, "nothing is sent before the welcome"
    assert client.welcomed(ToClient(refused=Refused(reason="no"))) == "no"
    assert sorted(kind for _, kind in kinds(client.broken())) == ["unsent", "unsent"]


def test_s40a_a_call_is_sent_when_its_message_was_taken() -> None:
    client, _ = opened()
    one = call()
    client.submit(one)
    message = client.take()
    assert message is not None
    assert [frame.number for frame in message.calls] == [one.number]
    assert (client.sent, client.waiting, client.outbox) == ({one.number: one}, 1, 0)
    assert one.arguments == b"", "nobody needs them any more"
    assert client.take() is None
    assert kinds(client.broken()) == [(one, "lost")], "the worker may have begun it"


@pytest.mark.usefixtures("small")
def test_s40a_a_call_whose_chunks_are_on_the_way_is_unsent() -> None:
    for taken in range(4):  # none, some, all of the chunks
        client, worker = opened()
        one = call(3 * INLINE)
        client.submit(one)
        for _ in range(taken):
            message = client.take()
            assert message is not None
            assert worker.receive(carried(message, ToWorker)) == ([], [])
        assert (one.number, client.sent, client.waiting) == (0, {}, 1)
        assert client.outbox == 3 * INLINE + session._FRAME, "it counts whole until it is sent"
        assert kinds(client.broken()) == [(one, "unsent")]
        assert one.arguments == noise(1, 3 * INLINE)
    client, worker = opened()
    client.submit(call(3 * INLINE))
    begun, _ = told(client, worker)
    assert [got.arguments for got in begun] == [noise(1, 3 * INLINE)]
    assert [kind for _, kind in kinds(client.broken())] == ["lost"]


def test_s40a_an_answered_call_is_over() -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    assert worker.answer(one.number, "returned", b"result", swallowed=True)
    assert not worker.answer(one.number, "raised", b"again"), "one end is enough"
    assert heard(client, worker) == [Answer(one, "returned", b"result", True)]
    assert (client.waiting, client.sent) == (0, {})
    assert not client.cancel(one)
    assert client.take() is None, "there is nobody to be told"
    client.abandon(one)
    again = ToClient(results=[Result(number=one.number)], refusals=[Refusal(number=one.number)])
    assert client.receive(again) == []
    assert client.broken() == []
    assert worker.broken() == []


@pytest.mark.parametrize("kind", [*ENDS, *REFUSALS])
@pytest.mark.parametrize("size", [0, 5, INLINE, INLINE + 1, 5 * INLINE])
@pytest.mark.usefixtures("small")
def test_s40a_every_kind_of_answer_arrives(kind: Any, size: int) -> None:
    client, worker = opened()
    one, other = call(), call(task=2)
    client.submit(one)
    client.submit(other)
    told(client, worker)
    payload = noise(kind, size).hex()[:size].encode()
    assert worker.answer(one.number, kind, payload)
    assert heard(client, worker) == [Answer(one, kind, payload)]
    assert kinds(client.broken()) == [(other, "lost")]
    assert worker.broken() == [other.number], "that one runs for nobody"


def test_s40a_an_answer_after_the_break_finds_nobody() -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    worker.answer(one.number, "returned", b"late")
    late = worker.take()
    assert kinds(client.broken()) == [(one, "lost")]
    assert client.receive(carried(late, ToClient)) == []
    assert client.broken() == []
    assert (client.waiting, client.state) == (0, "over")


def test_s40a_a_worker_that_lost_its_client_answers_nobody() -> None:
    client, worker = opened()
    one, two = call(), call(task=2)
    client.submit(one)
    client.submit(two)
    told(client, worker)
    worker.answer(one.number, "returned", b"on its way")
    assert worker.broken() == [two.number]
    assert not worker.answer(two.number, "returned", b"for nobody")
    worker.started(two.number)
    worker.beat(0.0)
    worker.stopping()
    assert worker.take() is None


def test_s40a_a_message_after_the_break_begins_nothing() -> None:
    client, worker = opened()
    client.submit(call())
    message = client.take()
    worker.broken()
    assert worker.receive(carried(message, ToWorker)) == ([], [])
    assert worker.open == {}


def test_s40a_a_new_stream_is_a_new_session() -> None:
    old_client, old_worker = opened()
    first = call(form=by_value(10))
    old_client.submit(first)
    told(old_client, old_worker)
    old_client.broken()
    client, worker = opened()
    second = call(form=by_value(10), task=2)
    client.submit(second)
    begun, _ = told(client, worker)
    assert second.number == first.number == 1, "numbers begin anew"
    assert [got.function for got in begun] == [by_value(10)], "and so do definitions"
    old_worker.answer(first.number, "returned", b"of the old one")
    assert old_client.receive(carried(old_worker.take(), ToClient)) == []
    worker.answer(second.number, "returned", b"of the new one")
    assert heard(client, worker) == [Answer(second, "returned", b"of the new one")]


def test_s40a_a_call_of_another_session_is_nobody_here() -> None:
    """Numbers are a session's own: the same one means another call next door."""
    (here, worker), (there, _) = opened(), opened()
    mine, theirs = call(task=1), call(task=2)
    here.submit(mine)
    there.submit(theirs)
    told(here, worker)
    there.take()
    assert mine.number == theirs.number
    assert not here.cancel(theirs)
    assert here.take() is None, "its number is that of a call which nobody cancelled"
    here.abandon(theirs)
    worker.answer(mine.number, "returned", b"mine")
    assert heard(here, worker) == [Answer(mine, "returned", b"mine")]


# -- cancels ----------------------------------------------------------------------------------------------------------


def test_s40a_an_unsent_call_that_is_cancelled_is_gone() -> None:
    client, _ = opened()
    one = call()
    client.submit(one)
    assert client.cancel(one)
    assert (client.outbox, client.waiting, client.take()) == (0, 0, None)
    assert not client.cancel(one), "once"
    assert client.broken() == []


@pytest.mark.usefixtures("small")
def test_s40a_a_transfer_that_is_cancelled_is_forgotten_by_both() -> None:
    for taken in range(4):
        client, worker = opened()
        one, two = call(3 * INLINE, task=1), call(3 * INLINE, task=2)
        client.submit(one)
        for _ in range(taken):
            worker.receive(carried(client.take(), ToWorker))
        client.submit(two)
        assert client.cancel(one)
        assert client.outbox == 3 * INLINE + session._FRAME
        begun, _ = told(client, worker)
        assert [(got.task, got.arguments) for got in begun] == [(2, noise(2, 3 * INLINE))]
        assert worker._transfers._arriving == {}


def test_s40a_a_sent_call_that_is_cancelled_waits_for_the_worker() -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    for times in (1, 2):
        for _ in range(times):
            assert not client.cancel(one)
        assert told(client, worker) == ([], [one.number] * times), "told once for each time"
        assert client.waiting == 1
    worker.answer(one.number, "cancelled")
    assert not client.cancel(one)  # crosses the answer
    assert told(client, worker) == ([], []), "it has ended there"
    assert kinds(heard(client, worker)) == [(one, "cancelled")]


@pytest.mark.parametrize("size", [5, 3 * INLINE])
@pytest.mark.usefixtures("small")
def test_s40a_the_answer_of_an_abandoned_call_is_dropped(size: int) -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    client.abandon(one)
    assert client.waiting == 0
    worker.answer(one.number, "returned", noise(0, size))
    assert heard(client, worker) == []
    assert client._transfers._arriving == {}, "nor is it kept"
    assert client.broken() == []


# -- two lanes --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_b52_what_is_ready_leaves_as_one_message() -> None:
    client, worker = opened()
    calls = [call(0, task=task) for task in range(1, 11)]
    for one in calls:
        client.submit(one)
    message = client.take()
    assert message is not None
    assert [frame.task for frame in message.calls] == list(range(1, 11))
    worker.receive(carried(message, ToWorker))
    for one in calls:
        worker.answer(one.number, "returned", b"")
    reply = worker.take()
    assert reply is not None
    assert [frame.number for frame in reply.results] == [one.number for one in calls]
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_b52_a_message_ends_when_it_is_long_enough() -> None:
    client, worker = opened()
    for task in range(1, 10):
        client.submit(call(INLINE, task=task))
    per_message = -(-MESSAGE // (INLINE + session._FRAME))
    message = client.take()
    assert message is not None
    assert len(message.calls) == per_message
    begun, _ = worker.receive(carried(message, ToWorker))
    begun += told(client, worker)[0]
    assert [got.task for got in begun] == list(range(1, 10))
    for got in begun:
        worker.answer(got.number, "returned", noise(0, INLINE))
    reply = worker.take()
    assert reply is not None
    assert len(reply.results) == per_message
    assert len(heard(client, worker)) == 9 - per_message


@pytest.mark.usefixtures("small")
def test_b52_the_functions_in_a_message_count_to_its_length() -> None:
    """Each of them travels whole, so two that fill a message each must not share one."""
    client, _ = opened()
    for task in range(1, 6):
        client.submit(call(0, by_value(MESSAGE, f"f{task}"), task))
    message = client.take()
    assert message is not None
    assert sum(len(one.value) for one in message.definitions) < 2 * MESSAGE


@pytest.mark.usefixtures("small")
def test_b52_a_small_call_waits_for_one_chunk() -> None:
    client, worker = opened()
    client.submit(call(10 * INLINE, task=1))
    message = client.take()
    assert message is not None
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE]
    client.submit(call(5, task=2))
    message = client.take()
    assert message is not None
    assert [frame.task for frame in message.calls] == [2]
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE], "and the transfer goes on beside it"
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_b52_a_small_answer_waits_for_one_chunk() -> None:
    client, worker = opened()
    for task in (1, 2):
        client.submit(call(task=task))
    told(client, worker)
    worker.answer(1, "returned", noise(0, 10 * INLINE))
    message = worker.take()
    assert message is not None
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE]
    worker.answer(2, "returned", b"small")
    message = worker.take()
    assert message is not None
    assert [result.number for result in message.results] == [2]
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE]


@pytest.mark.usefixtures("small")
def test_b52_transfers_take_turns() -> None:
    client, worker = opened()
    client.submit(call(4 * INLINE, task=1))
    client.take()
    client.submit(call(2 * INLINE, task=2))
    client.submit(call(3 * INLINE, task=3))
    turns, done = [], []
    while (message := client.take()) is not None:
        turns += [chunk.transfer for chunk in message.chunks]
        done += [frame.task for frame in message.calls]
    first, second, third = turns[:3]
    assert turns == [first, second, third, first, second, third, first, third]
    assert done == [2, 1, 3]
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_b52_the_frame_follows_its_last_chunk() -> None:
    client, worker = opened()
    client.submit(call(2 * INLINE + 1))
    messages = []
    while (message := client.take()) is not None:
        messages.append([*(len(chunk.data) for chunk in message.chunks), *("call" for _ in message.calls)])
    assert messages == [[INLINE], [INLINE], [1], ["call"]]
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_b52_what_just_fits_travels_in_one_piece() -> None:
    client, _ = opened()
    client.submit(call(INLINE, task=1))
    client.submit(call(INLINE + 1, task=2))
    message = client.take()
    assert message is not None
    assert [(frame.task, len(frame.arguments)) for frame in message.calls] == [(1, INLINE)]
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE]


@pytest.mark.usefixtures("small")
def test_b52_a_few_small_calls_may_wait_for_others() -> None:
    client, worker = opened()
    assert client.can_wait
    calls = [call(0, task=task) for task in (1, 2, 3)]
    for one in calls[:2]:
        client.submit(one)
        assert client.can_wait
    client.submit(calls[2])
    assert not client.can_wait, "a crowd"
    told(client, worker)
    client.submit(call(INLINE, task=4))
    assert not client.can_wait, "bytes enough"
    told(client, worker)
    assert client.can_wait
    client.cancel(calls[0])
    assert not client.can_wait, "a cancel is urgent"
    told(client, worker)
    client.introduce("pool", [])
    assert not client.can_wait, "so is this"
    told(client, worker)
    client.submit(call(3 * INLINE, task=5))
    client.take()
    assert not client.can_wait, "a transfer goes on"


@pytest.mark.usefixtures("small")
def test_b52_a_long_outbox_says_that_it_is_full() -> None:
    client, _ = opened()
    while not client.full:
        assert client.outbox < session.OUTBOX
        client.submit(call(3 * INLINE))
    assert client.outbox >= session.OUTBOX
    while client.take() is not None:
        pass
    assert not client.full


# -- functions --------------------------------------------------------------------------------------------------------


def test_b52_a_function_is_defined_once() -> None:
    client, worker = opened()
    value = by_value(20, "v", fresh=True, thread=True)
    defined = []
    for task, form in enumerate([NAMED, value, NAMED, value, NAMED._replace(thread=True)], 1):
        client.submit(call(form=form, task=task))
        message = client.take()
        defined.append([form_of(one) for one in message.definitions])  # type: ignore[union-attr]
        begun, _ = worker.receive(carried(message, ToWorker))
        assert [got.function for got in begun] == [form]
    assert defined == [[NAMED], [value], [], [], [NAMED._replace(thread=True)]]


@pytest.mark.usefixtures("small")
def test_b52_the_longest_unused_value_is_forgotten_and_defined_again() -> None:
    client, worker = opened()
    forms = {name: by_value(12, name) for name in "abc"}
    forms["named"] = NAMED

    def use(names: str | list[str]) -> tuple[list[str], list[str]]:
        for name in names:
            client.submit(call(form=forms[name], task=ord(name[0])))
        message = client.take()
        assert message is not None
        begun, _ = worker.receive(carried(message, ToWorker))
        assert [got.function for got in begun] == [forms[name] for name in names]
        for got in begun:
            worker.answer(got.number, "returned")
        numbers.update((one.function, name) for one in message.definitions for name in forms if tag(name) == one.tag)
        return [numbers[one.function] for one in message.definitions], [numbers[one] for one in message.forgotten]

    numbers: dict[int, str] = {}
    tag = lambda name: forms[name].tag  # noqa: E731 - short, and used once
    assert use(["named"]) == (["named"], [])
    assert use("a") == (["a"], [])
    assert use("b") == (["b"], [])
    assert use("a") == ([], [])
    assert use("c") == (["c"], ["b"]), "36 bytes are more than 30"
    assert use("ac") == ([], [])
    assert use("b") == (["b"], ["a"]), "defined again"
    assert use("cab") == (["a"], ["c"]), "in a message that uses it, too"
    assert use(["named"]) == ([], []), "what is only named is never forgotten"
    assert sum(len(form.value) for form in worker._functions.values()) <= session.KEPT


@pytest.mark.usefixtures("small")
def test_b52_a_function_longer_than_all_that_is_kept_is_kept_alone() -> None:
    client, worker = opened()
    huge, little = by_value(50, "huge"), by_value(5, "little")
    told_of = []
    for task, form in enumerate([little, huge, huge, little, huge], 1):
        client.submit(call(form=form, task=task))
        message = client.take()
        assert message is not None
        begun, _ = worker.receive(carried(message, ToWorker))
        assert [got.function for got in begun] == [form]
        told_of.append((len(message.definitions), len(message.forgotten)))
        assert len(worker._functions) == 1
    assert told_of == [(1, 0), (1, 1), (0, 0), (1, 1), (1, 1)]


# -- signs ------------------------------------------------------------------------------------------------------------


def test_b52_started_pulse_peers_and_stopping_travel() -> None:
    client, worker = opened()
    one, two = call(tell_start=True), call(task=2, timeout=1.5, caller="client/1")
    client.submit(one)
    client.submit(two)
    client.introduce("pool", [("w2", "unix:b")])
    client.introduce("pool", [("w1", "unix:a")])
    begun, _ = told(client, worker)
    assert [(got.timeout, got.caller, got.tell_start) for got in begun] == [(0.0, "", True), (1.5, "client/1", False)]
    assert worker.peers == ("pool", [("w1", "unix:a")]), "what was said last"
    worker.started(one.number)
    worker.started(99)
    worker.beat(1.25, two.number, "tag")
    worker.stopping()
    assert heard(client, worker) == []
    assert (one.started, two.started) == (True, False)
    assert client.pulse == Pulse(tick_age=1250, number=two.number, tag="tag")
    assert client.state == "stopping"
    client.introduce("pool", [])
    told(client, worker)
    assert worker.peers == ("pool", [])
    for number in (one.number, two.number):
        worker.answer(number, "returned")
    assert len(heard(client, worker)) == 2, "what it has it finishes"


def test_b52_a_worker_that_stops_says_so_in_its_welcome() -> None:
    client, worker = ClientSession(1, "client", "1.0"), WorkerSession("w1", "1.0", form_of)
    assert worker.greet(client.hello(), stopping=True)
    assert client.welcomed(carried(worker.take(), ToClient)) is None
    assert client.state == "stopping"


# -- protocols --------------------------------------------------------------------------------------------------------

Ranges = tuple[int, int]


def shake(monkeypatch: pytest.MonkeyPatch, client_speaks: Ranges, worker_speaks: Ranges) -> tuple[Any, Any, str | None]:
    """A handshake of two releases."""

    def speak(speaks: Ranges) -> None:
        monkeypatch.setattr(session, "OLDEST", speaks[0])
        monkeypatch.setattr(session, "NEWEST", speaks[1])

    client, worker = ClientSession(1, "client", "1.0"), WorkerSession("w1", "2.0", form_of)
    speak(client_speaks)
    hello = carried(client.hello(), ToWorker)
    speak(worker_speaks)
    welcomed = worker.greet(hello)
    reply = carried(worker.take(), ToClient)
    speak(client_speaks)
    reason = client.welcomed(reply)
    assert welcomed is (reason is None)
    return client, worker, reason


@pytest.mark.parametrize(
    ("client_speaks", "worker_speaks", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 1), (1, 2), 1), ((1, 2), (2, 3), 2), ((2, 3), (1, 2), 2)],
)
def test_s45_neighbouring_releases_talk(
    monkeypatch: pytest.MonkeyPatch, client_speaks: Ranges, worker_speaks: Ranges, agreed: int
) -> None:
    client, worker, reason = shake(monkeypatch, client_speaks, worker_speaks)
    assert reason is None
    assert (client.state, worker.state, client.uid) == ("open", "open", "w1")
    one = call()
    client.submit(one)
    told(client, worker)
    worker.answer(one.number, "returned", b"fine")
    assert kinds(heard(client, worker)) == [(one, "returned")]
    hello = ToWorker(hello=Hello(oldest=client_speaks[0], newest=client_speaks[1]))
    monkeypatch.setattr(session, "OLDEST", worker_speaks[0])
    monkeypatch.setattr(session, "NEWEST", worker_speaks[1])
    another = WorkerSession("w1", "2.0", form_of)
    another.greet(hello)
    reply = another.take()
    assert reply is not None
    assert reply.welcome.protocol == agreed, "the newest that both speak"


@pytest.mark.parametrize(
    ("client_speaks", "worker_speaks"), [((1, 1), (2, 2)), ((2, 3), (1, 1)), ((1, 2), (3, 9)), ((7, 9), (5, 6))]
)
def test_s45_incompatible_protocols_are_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, client_speaks: Ranges, worker_speaks: Ranges
) -> None:
    client, worker, reason = shake(monkeypatch, client_speaks, worker_speaks)
    assert reason is not None
    for number in (*client_speaks, *worker_speaks):
        assert str(number) in reason
    assert "1.0" in reason, "which release the client is"
    assert "2.0" in reason, "and which the worker"
    assert (client.state, worker.state) == ("over", "over")
    assert (client.take(), worker.take()) == (None, None)


@pytest.mark.parametrize(
    "message",
    [
        ToWorker(),
        ToWorker(hello=Hello()),
        ToWorker(hello=Hello(client="somebody", version="3.0")),
        ToWorker(calls=[Call(number=1)], definitions=[Definition(function=1)]),
        ToWorker(cancels=[1], chunks=[Chunk(transfer=1, data=b"x")]),
    ],
)
def test_s45_a_first_message_without_hello_is_refused(message: ToWorker) -> None:
    worker = WorkerSession("w1", "1.0", form_of)
    assert not worker.greet(message)
    reply = worker.take()
    assert reply is not None
    assert "hello" in reply.refused.reason
    assert not reply.HasField("welcome")
    assert (worker.state, worker.open, worker.take()) == ("over", {}, None)
    assert worker.receive(ToWorker(definitions=[Definition(function=1)], calls=[Call(number=1, function=1)])) == (
        [],
        [],
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (ToClient(welcome=Welcome(protocol=99, uid="w1")), "99"),
        (ToClient(welcome=Welcome(uid="w1")), "unknown"),
        (ToClient(), "unknown"),
        (ToClient(results=[Result(number=1)], stopping=True), "unknown"),
        (ToClient(refused=Refused(reason="too old")), "too old"),
        (ToClient(refused=Refused()), "no reason"),
        (ToClient(refused=Refused(reason="no"), welcome=Welcome(protocol=1, uid="w1")), "no"),
    ],
)
def test_s45_a_client_uses_no_worker_that_it_cannot_talk_to(message: ToClient, said: str) -> None:
    client = ClientSession(1, "client", "1.0")
    one = call()
    client.submit(one)
    reason = client.welcomed(message)
    assert reason is not None
    assert said in reason
    assert (client.state, client.uid, client.take()) == ("over", "", None)
    assert client.receive(ToClient(results=[Result(number=1)])) == []
    assert kinds(client.broken()) == [(one, "unsent")]


def test_s45_the_hello_says_what_the_client_speaks() -> None:
    hello = ClientSession(7, "abc", "1.2").hello().hello
    assert (hello.oldest, hello.newest) == (session.OLDEST, session.NEWEST)
    assert (hello.epoch, hello.client, hello.version) == (7, "abc", "1.2")


def test_s45_nothing_is_heard_before_the_welcome() -> None:
    client = ClientSession(1, "client", "1.0")
    one = call()
    client.submit(one)
    early = ToClient(started=[1], results=[Result(number=1)], refusals=[Refusal(number=1)], stopping=True)
    assert client.receive(early) == []
    assert client.state == "opening"
    assert client.take() is None, "nothing is sent before the welcome"
    assert client.welcomed(ToClient(welcome=Welcome(protocol=1, uid="w1"))) is None
    assert client.state == "open"
    assert kinds(client.broken()) == [(one, "unsent")]


def test_s45_nothing_is_begun_before_the_hello() -> None:
    worker = WorkerSession("w1", "1.0", form_of)
    early = ToWorker(definitions=[Definition(function=1)], calls=[Call(number=1, function=1)], cancels=[1])
    assert worker.receive(early) == ([], [])
    assert (worker.open, worker.take(), worker.state) == ({}, None, "opening")
    assert worker.greet(ClientSession(1, "client", "1.0").hello())
    with pytest.raises(ConversationBroken, match="not defined"):
        worker.receive(ToWorker(calls=[Call(number=1, function=1)]))


def test_s45_a_second_hello_and_a_second_welcome_change_nothing() -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    assert worker.receive(ToWorker(hello=Hello(oldest=9, newest=9, client="other"))) == ([], [])
    assert (worker.state, worker.client, list(worker.open)) == ("open", "client", [one.number])
    assert client.receive(ToClient(welcome=Welcome(protocol=9, uid="w9"))) == []
    assert client.receive(ToClient(refused=Refused(reason="no"))) == []
    assert (client.state, client.uid, client.waiting) == ("open", "w1", 1)


# -- what may not be said ---------------------------------------------------------------------------------------------

DEFINED = Definition(function=1, tag="jobs.add:1")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (ToWorker(calls=[Call(number=5, function=1)]), "call 5 .* sent before"),
        (ToWorker(calls=[Call(number=4, function=1)]), "call 4 .* sent before"),
        (ToWorker(calls=[Call(function=1)]), "call 0 .* sent before"),
        (ToWorker(calls=[Call(number=6, function=1), Call(number=6, function=1)]), "call 6 .* sent before"),
        (ToWorker(calls=[Call(number=6, function=2)]), "function 2, which was not defined"),
        (ToWorker(calls=[Call(number=6)]), "function 0, which was not defined"),
        (ToWorker(calls=[Call(number=6, function=1, transfer=3)]), "transfer 3, of which nothing came"),
        (
            ToWorker(chunks=[Chunk(transfer=8, abandoned=True)], calls=[Call(number=6, function=1, transfer=8)]),
            "transfer 8, of which nothing came",
        ),
        (ToWorker(calls=[Call(number=6, function=1), Call(number=7, function=2)]), "function 2"),
    ],
)
def test_s40a_a_worker_ends_a_conversation_it_cannot_follow(message: ToWorker, said: str) -> None:
    worker = opened()[1]
    worker.receive(
        ToWorker(
            definitions=[DEFINED],
            calls=[Call(number=5, function=1)],
            chunks=[Chunk(transfer=8, data=b"begun")],
        )
    )
    with pytest.raises(ConversationBroken, match=said) as caught:
        worker.receive(message)
    assert isinstance(caught.value, RpcError)
    assert caught.value.remedy
    assert 5 in worker.broken(), "what runs is to be cancelled, and nothing of this message was begun"
    assert worker.receive(message) == ([], [])
    assert worker.broken() == []


def test_s40a_a_forgotten_function_may_not_be_called() -> None:
    worker = opened()[1]
    begun, _ = worker.receive(ToWorker(definitions=[DEFINED], calls=[Call(number=1, function=1)], forgotten=[1, 1, 77]))
    assert [got.function.tag for got in begun] == ["jobs.add:1"], "the message that forgets it may use it"
    with pytest.raises(ConversationBroken, match="not defined"):
        worker.receive(ToWorker(calls=[Call(number=2, function=1)]))


def test_s40a_cancels_of_unknown_calls_are_ignored() -> None:
    worker = opened()[1]
    worker.receive(ToWorker(definitions=[DEFINED], calls=[Call(number=1, function=1)]))
    assert worker.receive(ToWorker(cancels=[0, 1, 2, 1, 2**64 - 1])) == ([], [1, 1])


def answering() -> tuple[ClientSession, WorkerSession, list[Outgoing]]:
    client, worker = opened()
    calls = [call(task=task) for task in (1, 2, 3)]
    for one in calls:
        client.submit(one)
    told(client, worker)
    return client, worker, calls


def test_s40a_an_answer_whose_transfer_nobody_sent_breaks_the_conversation() -> None:
    client, _, calls = answering()
    with pytest.raises(ConversationBroken, match="transfer 4, of which nothing came"):
        client.receive(ToClient(results=[Result(number=2, transfer=4)]))
    assert kinds(client.broken()) == [(one, "lost") for one in calls]


def test_s40a_a_message_that_breaks_the_conversation_costs_no_call_its_outcome() -> None:
    """Answers that stand before the fault must not vanish with it: their callers would wait for ever."""
    client, _, calls = answering()
    first = Result(number=calls[0].number, payload=b"fine")
    try:
        answers = client.receive(ToClient(results=[first, Result(number=calls[1].number, transfer=4)]))
    except ConversationBroken:
        answers = []
    answers += client.broken()
    assert sorted(answer.call.task for answer in answers) == [1, 2, 3]


def test_s40a_answers_to_nobody_are_dropped() -> None:
    client, _, calls = answering()
    strange = ToClient(
        started=[0, 77],
        results=[Result(number=0), Result(number=77, payload=b"x")],
        refusals=[Refusal(number=78)],
        chunks=[Chunk(transfer=5, abandoned=True)],
    )
    assert client.receive(strange) == []
    assert client.waiting == 3
    assert not any(one.started for one in calls)


def test_s40a_a_second_answer_is_dropped() -> None:
    client, _, calls = answering()
    number = calls[0].number
    twice = ToClient(results=[Result(number=number, payload=b"1"), Result(number=number, payload=b"2")])
    twice.refusals.add(number=number)
    assert client.receive(twice) == [Answer(calls[0], "returned", b"1")]
    assert client.receive(twice) == []
    assert kinds(client.broken()) == [(one, "lost") for one in calls[1:]]


def test_s45_unknown_kinds_of_answers_are_taken_for_the_safe_ones() -> None:
    """A newer worker may know more kinds. A result means that it ran, a refusal that it did not."""
    client, _, calls = answering()
    message = ToClient()
    message.results.append(Result.FromString(Result(number=calls[0].number).SerializeToString() + b"\x10\x09"))
    message.refusals.append(Refusal.FromString(Refusal(number=calls[1].number).SerializeToString() + b"\x10\x09"))
    assert message.results[0].kind == message.refusals[0].why == 9
    assert kinds(client.receive(carried(message, ToClient))) == [(calls[0], "lost"), (calls[1], "not_started")]


def test_s45_what_a_newer_side_adds_is_ignored() -> None:
    client, worker, calls = answering()
    added = b"\x92\x03\x03new"  # field 50, a string
    assert worker.receive(ToWorker.FromString(ToWorker(cancels=[1]).SerializeToString() + added)) == ([], [1])
    result = ToClient(results=[Result(number=calls[0].number)]).SerializeToString()
    assert kinds(client.receive(ToClient.FromString(result + added))) == [(calls[0], "returned")]


numbers = st.integers(0, 6)
payloads = st.binary(max_size=3)
chunks = st.lists(st.builds(Chunk, transfer=numbers, data=payloads, abandoned=st.booleans()), max_size=2)
to_worker = st.builds(
    ToWorker,
    definitions=st.lists(st.builds(Definition, function=numbers, value=payloads), max_size=2),
    chunks=chunks,
    calls=st.lists(st.builds(Call, number=numbers, function=numbers, transfer=st.just(0) | numbers), max_size=3),
    cancels=st.lists(numbers, max_size=2),
    forgotten=st.lists(numbers, max_size=2),
)
to_client = st.builds(
    ToClient,
    started=st.lists(numbers, max_size=2),
    chunks=chunks,
    results=st.lists(
        st.builds(Result, number=numbers, transfer=st.just(0) | numbers, kind=st.integers(0, 4)), max_size=3
    ),
    refusals=st.lists(st.builds(Refusal, number=numbers, why=st.integers(0, 4)), max_size=2),
    stopping=st.booleans(),
)
fuzz = settings(max_examples=int(50 + 700 * SCALE), derandomize=SCALE < 1, deadline=None, database=None)


@fuzz
@given(messages=st.lists(to_worker, max_size=4))
def test_s40a_whatever_a_client_says_no_number_is_begun_twice(messages: list[ToWorker]) -> None:
    worker = opened()[1]
    begun: list[int] = []
    try:
        for message in messages:
            calls, cancels = worker.receive(message)
            begun += [got.number for got in calls]
            assert set(cancels) <= set(begun)
            assert list(worker.open) == begun
    except ConversationBroken:
        pass
    assert begun == sorted(set(begun))
    assert worker.broken()[: len(begun)] == begun
    for message in messages:
        assert worker.receive(message) == ([], [])
    assert worker.take() is None


@fuzz
@given(messages=st.lists(to_client, max_size=4))
def test_s40a_whatever_a_worker_says_each_call_ends_once(messages: list[ToClient]) -> None:
    client, _, calls = answering()
    answers: list[Answer] = []
    try:
        for message in messages:
            answers += client.receive(message)
            assert client.waiting == 3 - len(answers)
    except ConversationBroken:
        pass
    answers += client.broken()
    assert sorted(answer.call.task for answer in answers) == [one.task for one in calls]
    for message in messages:
        assert client.receive(message) == [], "garbage after the break"


# -- any interleaving -------------------------------------------------------------------------------------------------

LIMITS: list[dict[str, int]] = [
    {"INLINE": 60, "MESSAGE": 150, "OUTBOX": 400, "KEPT": 30, "CROWD": 3},
    {"INLINE": 4, "MESSAGE": 100, "OUTBOX": 300, "KEPT": 24, "CROWD": 2},
    {"INLINE": 8, "MESSAGE": 1, "OUTBOX": 100, "KEPT": 1, "CROWD": 2},
    {"INLINE": 30, "MESSAGE": 31, "OUTBOX": 200, "KEPT": 1000, "CROWD": 4},
]
FORMS = [
    NAMED,
    FunctionForm("jobs.sub:9", "jobs", "sub"),
    FunctionForm("jobs.sub:9", "jobs", "sub", thread=True),
    by_value(5, "five"),
    by_value(10, "ten"),
    by_value(10, "ten", fresh=True),
    by_value(14, "fourteen"),
    by_value(12, "twelve"),
    by_value(40, "forty"),
]
SIZES: list[Callable[[int], int]] = [
    lambda inline: 0,
    lambda inline: 1,
    lambda inline: inline,
    lambda inline: inline,
    lambda inline: inline + 1,
    lambda inline: 2 * inline,
    lambda inline: 3 * inline + 1,
]
CHOICES: dict[str, Sequence[Any]] = {
    "limits": LIMITS,
    "manner": ["fine", "fine", "fine", "fine", "stopping", "refusing"],
    "at": range(4),
    "nth": range(12),
    "form": FORMS,
    "size": SIZES,
    "several": [1, 1, 2, 5],
    "retries": [0, 0, 0, 1, 2],
    "moves": [0, 0, 1],
    "kind": [*ENDS, *ENDS, *REFUSALS],
    "swallowed": [False, False, True],
    "really": [False, False, False, True],
    "kept": [0, 0, 1, 3],
    "kept_back": [0, 0, 1, 3],
    "age": [0.0, 0.3, 2.0],
    "peers": [("", []), ("pool", [("w1", "unix:a")]), ("pool", [("w1", "unix:a"), ("w2", "unix:b")])],
}
COMMANDS: list[tuple[str, tuple[str, ...], Callable[[Any], object]]] = []

Command = Callable[..., None]


def drawn(names: Sequence[str]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(CHOICES[name]) for name in names}


def command(*names: str, when: Callable[[Any], object] = lambda self: True) -> Callable[[Command], Command]:
    """A rule of the machine and a step of the walks, with these choices as arguments."""

    def decorate(function: Command) -> Command:
        COMMANDS.append((function.__name__, names, when))
        return precondition(when)(rule(**drawn(names))(function))

    return decorate


class Conversations(RuleBasedStateMachine):
    """Calls on up to four streams at a time, each of which may break at any moment, one end before the other."""

    world: World

    @initialize(**drawn(["limits"]))
    def begin(self, limits: dict[str, int]) -> None:
        for name, value in limits.items():
            setattr(session, name, value)  # whoever runs this puts them back
        self.world = World()
        self.world.connect()
        self.chance = random.Random(0)

    def _pair(self, at: int, fits: Callable[[Pair], object] = lambda pair: True) -> Pair | None:
        pairs = [pair for pair in self.world.pairs if fits(pair)]
        return pairs[at % len(pairs)] if pairs else None

    def _work(self, nth: int) -> Work | None:
        works = [work for work in self.world.works if not work.outcomes]
        return works[nth % len(works)] if works else None

    @command("manner", when=lambda self: len(self.world.pairs) < 4)
    def connect(self, manner: Any) -> None:
        self.world.connect(manner)

    @command("at", "form", "size", "retries", "moves", "several")
    def submit(self, at: int, form: FunctionForm, size: Any, retries: int, moves: int, several: int) -> None:
        pair = self._pair(at, lambda pair: pair.takes_calls)
        for _ in range(several):
            work = self.world.make(form, size(session.INLINE), retries, moves)
            if pair is not None:
                self.world.place(work, pair)

    @command("at", "nth", when=lambda self: self.world.homeless)
    def place(self, at: int, nth: int) -> None:
        pair = self._pair(at, lambda pair: pair.takes_calls)
        if pair is not None:
            self.world.place(self.world.homeless[nth % len(self.world.homeless)], pair)

    @command("nth", "really")
    def cancel(self, nth: int, really: bool) -> None:
        work = self._work(nth)
        if really and work is not None:
            self.world.cancel(work)

    @command("nth", "really")
    def abandon(self, nth: int, really: bool) -> None:
        work = self._work(nth)
        if really and work is not None:
            self.world.abandon(work)

    @command("at", "peers")
    def introduce(self, at: int, peers: Any) -> None:
        pair = self._pair(at, lambda pair: not pair.client_over)
        if pair is not None:
            self.world.introduce(pair, peers)

    @command("at", "several")
    def client_takes(self, at: int, several: int) -> None:
        pair = self._pair(at)
        for _ in range(several if pair is not None else 0):
            assert pair is not None
            self.world.client_takes(pair)

    @command("at", "several")
    def worker_hears(self, at: int, several: int) -> None:
        for _ in range(several):
            if (pair := self._pair(at, lambda pair: pair.to_worker)) is not None:
                self.world.worker_hears(pair)

    @command("at", "nth", "kind", "size", "swallowed")
    def worker_answers(self, at: int, nth: int, kind: str, size: Any, swallowed: bool) -> None:
        pair = self._pair(at, lambda pair: pair.open)
        if pair is not None:
            number = list(pair.open)[nth % len(pair.open)]
            self.world.worker_answers(pair, number, kind, size(session.INLINE), swallowed)

    @command("at", "kind")
    def worker_answers_all(self, at: int, kind: str) -> None:
        pair = self._pair(at, lambda pair: pair.open)
        for number in list(pair.open) if pair is not None else ():
            assert pair is not None
            self.world.worker_answers(pair, number, kind, 3, False)

    @command("at", "nth", "kind")
    def worker_answers_again(self, at: int, nth: int, kind: str) -> None:
        """One that has ended, or was never there."""
        pair = self._pair(at)
        if pair is not None and nth not in pair.open:
            self.world.worker_answers(pair, nth, kind, 3, False)

    @command("at", "nth")
    def worker_starts(self, at: int, nth: int) -> None:
        if (pair := self._pair(at)) is not None:
            self.world.worker_starts(pair, nth)

    @command("at", "age", "nth")
    def worker_beats(self, at: int, age: float, nth: int) -> None:
        if (pair := self._pair(at, lambda pair: pair.open)) is not None:
            self.world.worker_beats(pair, age, nth)

    @command("at", "really")
    def worker_stops(self, at: int, really: bool) -> None:
        if really and (pair := self._pair(at)) is not None:
            self.world.worker_stops(pair)

    @command("at", "several")
    def worker_takes(self, at: int, several: int) -> None:
        pair = self._pair(at)
        for _ in range(several if pair is not None else 0):
            assert pair is not None
            self.world.worker_takes(pair)

    @command("at", "several")
    def client_hears(self, at: int, several: int) -> None:
        for _ in range(several):
            if (pair := self._pair(at, lambda pair: pair.to_client)) is not None:
                self.world.client_hears(pair)

    @command("at")
    def all_arrives(self, at: int) -> None:
        """A stream on which nothing waits."""
        pair = self._pair(at)
        if pair is None:
            return
        while self.world.client_takes(pair):
            pass
        while pair.to_worker:
            self.world.worker_hears(pair)
        while self.world.worker_takes(pair):
            pass
        while pair.to_client:
            self.world.client_hears(pair)

    @command("at", "kept", "kept_back", "really")
    def client_breaks(self, at: int, kept: int, kept_back: int, really: bool) -> None:
        if really and (pair := self._pair(at, lambda pair: not pair.client_over)) is not None:
            self.world.client_breaks(pair)
            self.world.lose(pair, kept, kept_back)

    @command("at", "kept", "kept_back", "really")
    def worker_breaks(self, at: int, kept: int, kept_back: int, really: bool) -> None:
        if really and (pair := self._pair(at, lambda pair: not pair.worker_over)) is not None:
            self.world.worker_breaks(pair)
            self.world.lose(pair, kept, kept_back)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.tidy()
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish(lambda: self.chance.choice(CHOICES["kind"]))


MOVES = {"submit": 3, "client_takes": 6, "worker_hears": 6, "worker_answers": 6, "worker_takes": 6, "client_hears": 6}


@pytest.mark.usefixtures("small")
def test_s40a_any_interleaving_leaves_each_call_in_one_outcome() -> None:
    run_state_machine_as_test(
        Conversations,
        settings=settings(
            max_examples=int(10 + 400 * SCALE),
            stateful_step_count=50,
            derandomize=SCALE < 1,
            deadline=None,
            report_multiple_bugs=False,  # one at a time: shrinking is the slow part
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


@pytest.fixture(params=range(int(10 + 300 * SCALE)))
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    return random.Random(request.param)


@pytest.mark.usefixtures("small")
def test_s40a_a_long_walk(chance: random.Random) -> None:
    """The same steps by plain chance: nothing is shrunk, and a second goes ten times as far."""
    machine = Conversations()
    machine.begin(chance.choice(LIMITS))
    machine.chance = chance
    weights = [MOVES.get(name) or chance.choice((0, 1, 1, 3)) for name, _, _ in COMMANDS]
    for name, names, when in chance.choices(COMMANDS, weights, k=600):
        if when(machine):
            getattr(machine, name)(**{one: chance.choice(CHOICES[one]) for one in names})
            machine.everything_adds_up()
    machine.teardown()
