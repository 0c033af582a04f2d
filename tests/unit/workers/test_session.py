"""W40a, W52, W45, W81: the conversation of a client with a worker, without a loop and without a transport.

First what the head of `session.py` says, state by state; then what the other side may not say; last random walks of
several conversations, beside a naive model (`conversation.py`), with limits so small that all of them are met.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headgate.core.lessons import Lesson
from headgate.errors import RpcError
from headgate.workers.model import FunctionForm
from headgate.workers.protocol import bulk, client_session, worker_session
from headgate.workers.protocol.bulk import Borrowed, BulkPayload, ProtocolViolation
from headgate.workers.protocol.client_session import ClientSession
from headgate.workers.protocol.messages import Answer, Outgoing, Peer, Received, Stepped
from headgate.workers.protocol.wire.wire_pb2 import (
    Buffer,
    Call,
    Chunk,
    Credit,
    Definition,
    Hello,
    Layout,
    Loan,
    Probe,
    Pulse,
    Refusal,
    Refused,
    Result,
    Step,
    ToClient,
    ToWorker,
    Welcome,
    Yield,
)
from headgate.workers.protocol.worker_session import WorkerSession
from tests.conftest import SCALE
from tests.unit.workers.conversation import (
    ENDS,
    REFUSALS,
    SILENCE,
    Pair,
    Shape,
    SideName,
    Work,
    World,
    cut,
    form_of,
    limit,
    noise,
    on_the_wire,
    packed,
    plain,
    retained,
)

INLINE, MESSAGE, WINDOW, GRANT, LOANS = 100, 400, 400, 200, 2
NAMED = FunctionForm("jobs.add:1", "jobs", "add", b"digest", "cpython-311", file="jobs.py")
COUNTS = FunctionForm("jobs.count:5", "jobs", "count", generator=True)
CONTEXT = noise("context", 40)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test can reach with a handful of bytes."""
    limits = {"INLINE": INLINE, "MESSAGE": MESSAGE, "OUTBOX": 1000, "KEPT": 30, "CROWD": 3}
    limit({**limits, "WINDOW": WINDOW, "GRANT": GRANT, "LOANS": LOANS}, monkeypatch.setattr)


def opened(*, shares: bool = False) -> tuple[ClientSession, WorkerSession]:
    """Both ends, after the handshake."""
    client, worker = ClientSession(1, "client", "1.0"), WorkerSession("w1", "1.0", form_of)
    assert worker.greet(carried(client.hello(), ToWorker), shares=shares)
    assert client.welcomed(carried(worker.take(), ToClient)) is None
    if shares:
        client.can_read()
        assert worker.receive(carried(client.take(), ToWorker)) == SILENCE
    assert (client.bulk.shares, worker.bulk.shares) == (shares, shares)
    return client, worker


def carried(message: Any, kind: Any) -> Any:
    """As it arrives."""
    assert message is not None
    return kind.FromString(message.SerializeToString())


def all_of(take: Callable[[], Any]) -> Iterator[Any]:
    """Message after message, until there is none."""
    for _ in range(10_000):
        message = take()
        if message is None:
            return
        yield message
    pytest.fail("it has something to say for ever")


def told(client: ClientSession, worker: WorkerSession) -> Received:
    """All that the client has to say arrives, and the worker makes room for more of it."""
    everything = Received([], [], [])
    for message in all_of(client.take):
        for some, more in zip(everything, worker.receive(carried(message, ToWorker)), strict=True):
            some.extend(more)  # type: ignore[arg-type]
        if worker.bulk.has_notices:
            assert client.receive(carried(worker.take(), ToClient)) == []
    return everything


def heard(client: ClientSession, worker: WorkerSession) -> list[Answer]:
    """All that the worker has to say arrives."""
    answers = []
    for message in all_of(worker.take):
        answers += client.receive(carried(message, ToClient))
        if client.bulk.has_notices:
            assert worker.receive(carried(client.take(), ToWorker)) == SILENCE
    return answers


def same(answers: Sequence[Answer]) -> list[Any]:
    """To be compared, whichever way they came."""
    return [(answer.call, answer.kind, plain(answer.payload), *answer[3:]) for answer in answers]


def call(size: Shape = 10, form: FunctionForm = NAMED, task: int = 1, **more: Any) -> Outgoing:
    return Outgoing(task, form, packed(task, size), **more)


def by_value(size: int, name: str = "f", **more: Any) -> FunctionForm:
    return FunctionForm(f"__main__.{name}:1", value=noise(name, size), **more)


def kinds(answers: Sequence[Answer]) -> list[tuple[Outgoing, str]]:
    return [(answer.call, answer.kind) for answer in answers]


def test_w31_a_client_says_once_that_it_leaves() -> None:
    client, worker = opened()
    assert not worker.leaves
    worker.stopping()
    assert client.receive(carried(worker.take(), ToClient)) == []
    assert client.state == "stopping"
    assert client.take() is None
    client.leave()
    assert not client.can_wait
    assert worker.receive(carried(client.take(), ToWorker)) == SILENCE
    assert worker.leaves
    client.leave()
    assert client.take() is None


def test_w45_a_client_that_never_says_that_it_leaves_is_not_waited_for() -> None:
    worker = WorkerSession("w1", "1.0", form_of)
    assert worker.greet(ToWorker(hello=Hello(oldest=1, newest=1, client="of an older release")))
    assert worker.leaves


# -- unsent, sent, answered -------------------------------------------------------------------------------------------


def test_w40a_an_unsent_call_stands_in_the_outbox() -> None:
    client, _ = opened()
    one = call(10)
    client.submit(one)
    assert (one.number, client.waiting, client.sent) == (0, 1, {})
    assert client.outbox == 10 + client_session.FRAME
    assert kinds(client.broken()) == [(one, "unsent")]
    assert one.arguments == noise(1, 10), "it can be sent elsewhere as it is"
    assert (client.outbox, client.waiting, client.take()) == (0, 0, None)


def test_w40a_calls_may_be_submitted_before_the_stream_is_open() -> None:
    client = ClientSession(1, "client", "1.0")
    one, two = call(), call(2 * client_session.INLINE)
    assert isinstance(two.arguments, BulkPayload)
    client.submit(one)
    client.submit(two)
    assert client.take() is None, "nothing is sent before the welcome"
    assert client.welcomed(ToClient(refused=Refused(reason="no"))) == "no"
    assert sorted(kind for _, kind in kinds(client.broken())) == ["unsent", "unsent"]


def test_w40a_a_call_is_sent_when_its_message_was_taken() -> None:
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
def test_w40a_a_call_whose_chunks_are_on_the_way_is_unsent() -> None:
    for taken in range(4):  # none, some, all of the chunks
        client, worker = opened()
        one = call(3 * INLINE)
        client.submit(one)
        for _ in range(taken):
            message = client.take()
            assert message is not None
            assert worker.receive(carried(message, ToWorker)) == SILENCE
        assert (one.number, client.sent, client.waiting) == (0, {}, 1)
        assert (client.outbox, client.apart) == (client_session.FRAME, 3 * INLINE), "it counts whole until it is sent"
        assert kinds(client.broken()) == [(one, "unsent")]
        assert plain(one.arguments) == plain(packed(1, 3 * INLINE))
    client, worker = opened()
    client.submit(call(3 * INLINE))
    begun = told(client, worker).begun
    assert [plain(got.arguments) for got in begun] == [plain(packed(1, 3 * INLINE))]
    assert [kind for _, kind in kinds(client.broken())] == ["lost"]


def test_w40a_an_answered_call_is_over() -> None:
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
def test_w40a_every_kind_of_answer_arrives(kind: Any, size: int) -> None:
    client, worker = opened()
    one, other = call(), call(task=2)
    client.submit(one)
    client.submit(other)
    told(client, worker)
    data = noise(kind, size).hex()[:size].encode()
    payload = data if size <= INLINE else BulkPayload(data)
    assert worker.answer(one.number, kind, payload)
    (answer,) = heard(client, worker)
    reason = kind in REFUSALS  # which is text, and travels whole
    assert answer[:2] == (one, kind)
    assert plain(answer.payload) == (data if reason else plain(payload))
    assert kinds(client.broken()) == [(other, "lost")]
    assert worker.broken() == [other.number], "that one runs for nobody"


def test_w40a_an_answer_after_the_break_finds_nobody() -> None:
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


def test_w40a_a_worker_that_lost_its_client_answers_nobody() -> None:
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


def test_w40a_a_message_after_the_break_begins_nothing() -> None:
    client, worker = opened()
    client.submit(call())
    message = client.take()
    worker.broken()
    assert worker.receive(carried(message, ToWorker)) == SILENCE
    assert worker.open == {}


def test_w40a_a_new_stream_is_a_new_session() -> None:
    old_client, old_worker = opened()
    first = call(form=by_value(10))
    old_client.submit(first)
    told(old_client, old_worker)
    old_client.broken()
    client, worker = opened()
    second = call(form=by_value(10), task=2)
    client.submit(second)
    begun = told(client, worker).begun
    assert second.number == first.number == 1, "numbers begin anew"
    assert [got.function for got in begun] == [by_value(10)], "and so do definitions"
    old_worker.answer(first.number, "returned", b"of the old one")
    assert old_client.receive(carried(old_worker.take(), ToClient)) == []
    worker.answer(second.number, "returned", b"of the new one")
    assert heard(client, worker) == [Answer(second, "returned", b"of the new one")]


def test_w40a_a_call_of_another_session_is_nobody_here() -> None:
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


def test_w40a_an_unsent_call_that_is_cancelled_is_gone() -> None:
    client, _ = opened()
    one = call()
    client.submit(one)
    assert client.cancel(one)
    assert (client.outbox, client.apart, client.waiting, client.take()) == (0, 0, 0, None)
    assert not client.cancel(one), "once"
    assert client.broken() == []


@pytest.mark.usefixtures("small")
def test_w40a_a_transfer_that_is_cancelled_is_forgotten_by_both() -> None:
    for taken in range(4):
        client, worker = opened()
        one, two = call(3 * INLINE, task=1), call(3 * INLINE, task=2)
        client.submit(one)
        for _ in range(taken):
            worker.receive(carried(client.take(), ToWorker))
        client.submit(two)
        assert client.cancel(one)
        assert (client.outbox, client.apart) == (client_session.FRAME, 3 * INLINE)
        begun = told(client, worker).begun
        assert [(got.task, plain(got.arguments)) for got in begun] == [(2, plain(packed(2, 3 * INLINE)))]
        assert worker.bulk.transfers._arriving == {}


def test_w40a_a_sent_call_that_is_cancelled_waits_for_the_worker() -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    for times in (1, 2):
        for _ in range(times):
            assert not client.cancel(one)
        assert told(client, worker) == ([], [one.number] * times, []), "told once for each time"
        assert client.waiting == 1
    worker.answer(one.number, "cancelled")
    assert not client.cancel(one)  # crosses the answer
    assert told(client, worker) == SILENCE, "it has ended there"
    assert kinds(heard(client, worker)) == [(one, "cancelled")]


@pytest.mark.parametrize("size", [5, 3 * INLINE])
@pytest.mark.usefixtures("small")
def test_w40a_the_answer_of_an_abandoned_call_is_dropped(size: int) -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    client.abandon(one)
    assert client.waiting == 0
    worker.answer(one.number, "returned", packed(0, size))
    assert heard(client, worker) == []
    assert client.bulk.transfers._arriving == {}, "nor is it kept"
    assert client.broken() == []


# -- two lanes --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_w52_what_is_ready_leaves_as_one_message() -> None:
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


def test_w52_the_last_message_is_answered_by_its_own_calls() -> None:
    """An answer to an older one does not count: two that are under way would follow each other for ever."""
    client, worker = opened()
    for tasks in ((1, 2), (3, 4)):
        for task in tasks:
            client.submit(call(task=task))
        told(client, worker)

    def answers_last(*numbers: int, **more: Any) -> bool:
        return client.answers_last(ToClient(results=[Result(number=number) for number in numbers], **more))

    assert not answers_last(1, 2)
    assert answers_last(4)
    assert answers_last(2, 3)
    assert answers_last(refusals=[Refusal(number=3)])
    assert answers_last(yields=[Yield(number=3)])
    assert not answers_last(pulse=Pulse(), started=[3])
    client.cancel(client.sent[3])
    told(client, worker)
    assert not answers_last(1), "a message without calls changes nothing"
    client.submit(call(task=5))
    assert not answers_last(1), "nor does one that was not sent yet"
    told(client, worker)
    assert not answers_last(3, 4)
    assert answers_last(5)


def test_w52_a_message_with_steps_is_answered_by_anything() -> None:
    """Which steps are answered, and when, is the generators' affair."""
    client, worker = opened()
    stream = call(form=COUNTS, task=1)
    client.submit(stream)
    told(client, worker)
    client.submit(call(task=2))
    told(client, worker)
    client.step(stream, "next", count=1)
    assert client.has_frames
    told(client, worker)
    assert not client.has_frames
    assert client.answers_last(ToClient(yields=[Yield(number=1)]))
    assert not client.answers_last(ToClient(pulse=Pulse()))


@pytest.mark.usefixtures("small")
def test_w52_a_message_ends_when_it_is_long_enough() -> None:
    client, worker = opened()
    for task in range(1, 10):
        client.submit(call(INLINE, task=task))
    per_message = -(-MESSAGE // (INLINE + client_session.FRAME))
    message = client.take()
    assert message is not None
    assert len(message.calls) == per_message
    begun, _, _ = worker.receive(carried(message, ToWorker))
    begun += told(client, worker).begun
    assert [got.task for got in begun] == list(range(1, 10))
    for got in begun:
        worker.answer(got.number, "returned", noise(0, INLINE))
    reply = worker.take()
    assert reply is not None
    assert len(reply.results) == per_message
    assert len(heard(client, worker)) == 9 - per_message


@pytest.mark.usefixtures("small")
def test_w52_the_functions_in_a_message_count_to_its_length() -> None:
    """Each of them travels whole, so two that fill a message each must not share one."""
    client, _ = opened()
    for task in range(1, 6):
        client.submit(call(0, by_value(MESSAGE, f"f{task}"), task))
    message = client.take()
    assert message is not None
    assert sum(len(one.value) for one in message.definitions) < 2 * MESSAGE


@pytest.mark.usefixtures("small")
def test_w52_a_small_call_waits_for_one_chunk() -> None:
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
def test_w52_a_small_answer_waits_for_one_chunk() -> None:
    client, worker = opened()
    for task in (1, 2):
        client.submit(call(task=task))
    told(client, worker)
    worker.answer(1, "returned", packed(0, 10 * INLINE))
    message = worker.take()
    assert message is not None
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE]
    worker.answer(2, "returned", b"small")
    message = worker.take()
    assert message is not None
    assert [result.number for result in message.results] == [2]
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE]


@pytest.mark.usefixtures("small")
def test_w52_transfers_take_turns() -> None:
    client, worker = opened()
    client.submit(call(4 * INLINE, task=1))
    client.take()
    client.submit(call(2 * INLINE, task=2))
    client.submit(call(3 * INLINE, task=3))
    turns, done = [], []
    for message in all_of(client.take):
        turns += [chunk.transfer for chunk in message.chunks]
        done += [frame.task for frame in message.calls]
    first, second, third = turns[:3]
    assert turns == [first, second, third, first, second, third, first, third]
    assert done == [2, 1, 3]
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_w52_the_frame_follows_its_last_chunk() -> None:
    client, worker = opened()
    client.submit(call(2 * INLINE + 1))
    messages = []
    for message in all_of(client.take):
        messages.append([*(len(chunk.data) for chunk in message.chunks), *("call" for _ in message.calls)])
    assert messages == [[INLINE], [INLINE], [1], ["call"]]
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_w52_what_just_fits_travels_in_one_piece() -> None:
    client, _ = opened()
    client.submit(call(INLINE, task=1))
    client.submit(call(INLINE + 1, task=2))
    message = client.take()
    assert message is not None
    assert [(frame.task, len(frame.arguments)) for frame in message.calls] == [(1, INLINE)]
    assert [len(chunk.data) for chunk in message.chunks] == [INLINE]


@pytest.mark.usefixtures("small")
def test_w52_a_few_small_calls_may_wait_for_others() -> None:
    client, worker = opened()
    assert client.can_wait
    calls = [call(0, task=task) for task in (1, 2, 3)]
    for one in calls[:2]:
        client.submit(one)
        assert client.can_wait
    client.submit(calls[2])
    assert not client.can_wait, "a crowd"
    told(client, worker)
    client.submit(call(INLINE - client_session.FRAME - 1, task=4))
    assert client.can_wait
    told(client, worker)
    client.submit(call(INLINE - client_session.FRAME, task=4))
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
@pytest.mark.parametrize(("bulky", "size"), [(False, INLINE), (True, 3 * INLINE)])
def test_w52_a_long_outbox_says_that_it_is_full(bulky: bool, size: int) -> None:
    """What travels apart does not hold up what does not, nor the other way round."""
    client, _ = opened()
    while not client.full(bulky):
        assert (client.apart if bulky else client.outbox) < client_session.OUTBOX
        client.submit(call(size))
    assert (client.apart if bulky else client.outbox) >= client_session.OUTBOX
    assert not client.full(not bulky)
    assert list(all_of(client.take))
    assert not client.full(bulky)
    assert (client.outbox, client.apart) == (0, 0)


# -- generators -------------------------------------------------------------------------------------------------------

SMALL, LONG = 5, 3 * INLINE


def frames_of(message: ToWorker | ToClient) -> list[Any]:
    """Those that may have a payload and a context."""
    frames = (value for field, value in message.ListFields() if field.name in ("calls", "steps", "yields", "results"))
    return [frame for some in frames for frame in some]


class Shells:
    """The shells of both ends: memory, and all that has come, read and in order."""

    def __init__(self, client: ClientSession, worker: WorkerSession) -> None:
        self.client, self.worker = client, worker
        self.memory: dict[int, bytes] = {}
        self.closed: list[int] = []
        self.heard = Received([], [], [])
        self.answers: list[Any] = []
        self.frames: list[Any] = []  # as they were on the wire
        self._last = 100

    def lend(self, side: ClientSession | WorkerSession) -> list[int]:
        """Write what may be lent. The descriptors."""
        descriptors = []
        while (lending := side.bulk.loans.begin()) is not None:
            self._last += 1
            descriptors.append(self._last)
            self.memory[self._last] = b"".join(lending.bulk.segments())
            side.bulk.lend(lending, self._last)
        return descriptors

    def close(self, side: ClientSession | WorkerSession) -> list[int]:
        """Let go of what came back. The descriptors."""
        released = list(side.bulk.loans.take_released())
        for descriptor in released:
            del self.memory[descriptor]
        self.closed += released
        return released

    def whole(self, side: ClientSession | WorkerSession, payload: Any) -> Any:
        """What it holds. What was lent is read, and returned."""
        if not isinstance(payload, Borrowed):
            return plain(payload)
        side.bulk.has_read(payload)
        return cut(self.memory[payload.descriptor], payload)

    def send(self) -> bool:
        """The client's next message, and what there is to be lent for those that follow."""
        lent, message = self.lend(self.client), self.client.take()
        if message is not None:
            self.frames += frames_of(message)
            begun, cancels, steps = self.worker.receive(carried(message, ToWorker))
            self.heard.begun.extend(one._replace(arguments=self.whole(self.worker, one.arguments)) for one in begun)
            self.heard.steps.extend(one._replace(payload=self.whole(self.worker, one.payload)) for one in steps)
            self.heard.cancels.extend(cancels)
        return bool(lent) or message is not None or bool(self.close(self.client))

    def reply(self) -> bool:
        lent, message = self.lend(self.worker), self.worker.take()
        if message is not None:
            self.frames += frames_of(message)
            for answer in self.client.receive(carried(message, ToClient)):
                self.answers.append(answer._replace(payload=self.whole(self.client, answer.payload)))
        return bool(lent) or message is not None or bool(self.close(self.worker))

    def settle(self) -> None:
        """Until nobody has anything to say."""
        assert sum(1 for _ in all_of(lambda: self.send() or self.reply() or None)) < 10_000
        assert self.memory == {}, "all that was lent came back"


def generating(*, shares: bool = False) -> tuple[ClientSession, WorkerSession, Outgoing, Shells]:
    """A generator that runs."""
    client, worker = opened(shares=shares)
    one = call(form=COUNTS, prefetch=3)
    client.submit(one)
    shells = Shells(client, worker)
    shells.settle()
    (begun,) = shells.heard.begun
    assert begun.function.generator
    assert begun.prefetch == 3
    shells.heard.begun.clear()
    return client, worker, one, shells


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("sizes", list(itertools.product([SMALL, LONG], repeat=4)))
@pytest.mark.usefixtures("small")
def test_w05_items_and_the_end_arrive_in_the_order_they_were_made(sizes: tuple[int, ...], shares: bool) -> None:
    """A small one does not overtake a long one of the same generator, whichever way that travels."""
    _, worker, one, shells = generating(shares=shares)
    *items, last = [packed(nth, size) for nth, size in enumerate(sizes)]
    for nth, item in enumerate(items):
        assert worker.yielded(one.number, item, swallowed=nth == 1, steps=nth)
    assert worker.answer(one.number, "raised", last, steps=7)
    expected = [(one, "yielded", plain(item), nth == 1, nth, b"", ()) for nth, item in enumerate(items)]
    shells.settle()
    assert shells.answers == [*expected, (one, "raised", plain(last), False, 7, b"", ())]
    assert not worker.has_more


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.usefixtures("small")
def test_w05_frames_of_another_call_do_not_wait_in_line(shares: bool) -> None:
    client, worker, one, shells = generating(shares=shares)
    two = call(form=COUNTS, task=2)
    client.submit(two)
    shells.settle()
    worker.yielded(one.number, packed(1, LONG))
    worker.yielded(one.number, b"behind it")
    worker.yielded(two.number, b"beside it")
    worker.answer(two.number, "returned")
    message = worker.take()
    assert message is not None
    assert [(item.number, item.payload) for item in message.yields] == [(two.number, b"beside it")]
    assert [result.number for result in message.results] == [two.number]
    assert worker.has_more, "what waits for a parcel is on its way"
    assert [kind for _, kind in kinds(client.receive(carried(message, ToClient)))] == ["yielded", "returned"]
    shells.settle()
    assert [answer.payload for answer in shells.answers] == [plain(packed(1, LONG)), b"behind it"]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("size", [0, SMALL, INLINE, INLINE + 1, 2 * WINDOW])
@pytest.mark.usefixtures("small")
def test_w05_steps_arrive(size: int, shares: bool) -> None:
    client, _, one, shells = generating(shares=shares)
    value = packed("value", size)
    client.step(one, "next", count=2)
    shells.settle()
    client.step(one, "send", value)
    shells.settle()
    client.step(one, "throw", value)
    shells.settle()
    client.step(one, "close")
    shells.settle()
    assert shells.heard.steps == [
        Stepped(one.number, "next", 2, b""),
        (one.number, "send", 0, plain(value), b""),
        (one.number, "throw", 0, plain(value), b""),
        Stepped(one.number, "close", 0, b""),
    ]
    assert shells.answers == []


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("size", [SMALL, LONG])
@pytest.mark.usefixtures("small")
def test_w05_a_cancel_follows_the_step_it_is_meant_for(size: int, shares: bool) -> None:
    """Else it would be raised where the generator rests, and the step would be one that nobody waits for."""
    client, _, one, shells = generating(shares=shares)
    two = call(task=2)
    client.submit(two)
    shells.settle()
    client.step(one, "send", packed(1, size))
    assert not client.cancel(one)
    assert not client.cancel(two)
    assert not client.cancel(one)
    order: list[str] = []
    while not shells.heard.steps:
        assert shells.send() or shells.reply()
        order += ["step"] * len(shells.heard.steps)
        order += [f"cancel {number}" for number in shells.heard.cancels]
        shells.heard.cancels.clear()
    shells.settle()
    order += [f"cancel {number}" for number in shells.heard.cancels]
    assert sorted(order) == ["cancel 1", "cancel 1", "cancel 2", "step"]
    assert order.index("step") < order.index("cancel 1")
    if size == LONG and not shares:
        assert order[0] == "cancel 2", "which waits for nothing"
    shells.heard.cancels.clear()
    client.step(one, "send", packed(2, size))
    shells.settle()
    assert shells.heard.cancels == [], "each is told once"
    assert not client.cancel(one)
    shells.settle()
    assert shells.heard.cancels == [one.number], "the step has gone"


@pytest.mark.usefixtures("small")
def test_w05_a_cancel_follows_a_step_that_waits_for_the_next_message() -> None:
    client, worker = opened()
    shells = Shells(client, worker)
    calls = [call(form=COUNTS, task=task) for task in range(1, 8)]
    for one in calls:
        client.submit(one)
    shells.settle()
    for one in calls:
        client.step(one, "send", noise(0, INLINE))
    client.cancel(calls[-1])
    seen: list[int] = []
    for message in all_of(client.take):
        _, cancels, steps = worker.receive(carried(message, ToWorker))
        seen += [step.number for step in steps]
        assert set(cancels) <= set(seen), "it is meant for a step that has not come"


def test_w05_steps_of_a_call_that_is_not_there_say_nothing() -> None:
    client, worker, one, _ = generating()
    unsent, elsewhere = call(form=COUNTS, task=2), call(form=COUNTS, task=3)
    elsewhere.number = one.number
    for other in (unsent, elsewhere):
        client.step(other, "next", count=1)
        client.step(other, "send", BulkPayload(b"long"))
    assert client.take() is None
    worker.answer(one.number, "returned")
    client.step(one, "next", count=1)  # crosses the end
    (end,) = heard(client, worker)
    assert end.kind == "returned"
    client.step(one, "next", count=1)
    message = client.take()
    assert message is not None
    assert len(message.steps) == 1
    assert worker.receive(carried(message, ToWorker)) == SILENCE, "it has ended there"
    assert client.take() is None


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.usefixtures("small")
def test_w05_what_is_sent_to_a_generator_that_has_ended_is_dropped(shares: bool) -> None:
    client, worker, one, shells = generating(shares=shares)
    client.step(one, "send", packed(1, 2 * WINDOW))
    worker.answer(one.number, "returned")
    shells.settle()
    assert shells.heard == SILENCE
    assert [answer.kind for answer in shells.answers] == ["returned"]
    assert worker.bulk.transfers._arriving == {}
    assert len(shells.closed) == shares, "lent memory came back unread"


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.usefixtures("small")
def test_w05_items_of_an_abandoned_generator_are_dropped(shares: bool) -> None:
    client, worker, one, shells = generating(shares=shares)
    worker.yielded(one.number, packed(1, 2 * WINDOW))
    worker.yielded(one.number, b"small")
    client.step(one, "close")
    client.abandon(one)
    shells.settle()
    worker.answer(one.number, "returned", packed(2, 2 * WINDOW))
    shells.settle()
    assert shells.answers == []
    assert client.bulk.transfers._arriving == {}
    assert len(shells.closed) == 2 * shares, "lent memory came back unread"
    assert [step.advance for step in shells.heard.steps] == ["close"]
    assert client.broken() == []


def test_w05_only_a_generator_that_is_there_has_items() -> None:
    client, worker, one, _ = generating()
    assert not worker.yielded(99, b"of nobody")
    assert worker.yielded(one.number, b"1")
    worker.answer(one.number, "returned")
    assert not worker.yielded(one.number, b"2")
    assert same(heard(client, worker)) == [Answer(one, "yielded", b"1"), Answer(one, "returned")]
    other = call(form=COUNTS, task=2)
    client.submit(other)
    told(client, worker)
    assert worker.broken() == [other.number]
    assert not worker.yielded(other.number, b"for nobody")
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_w05_a_generator_whose_stream_breaks_is_lost_once() -> None:
    for taken in range(6):
        client, worker, one, _ = generating()
        worker.yielded(one.number, b"1")
        worker.yielded(one.number, packed(2, LONG))
        worker.answer(one.number, "returned")
        answers = []
        for _ in range(taken):
            if (message := worker.take()) is not None:
                answers += client.receive(carried(message, ToClient))
        late = [message for _ in range(5) if (message := worker.take()) is not None]
        answers += client.broken()
        for message in late:
            assert client.receive(carried(message, ToClient)) == []
        ended = [kind for _, kind in kinds(answers) if kind != "yielded"]
        assert ended == ["returned" if taken >= 4 else "lost"], "its end comes with the fourth message"
        assert not retained(client)
        worker.broken()
        assert not retained(worker)


@pytest.mark.usefixtures("small")
def test_w52_steps_share_messages_with_calls_and_go_first() -> None:
    client, worker, one, _ = generating()
    client.step(one, "next", count=1)
    assert client.can_wait
    client.step(one, "send", b"value")
    client.submit(call(0, task=2))
    assert not client.can_wait, "a crowd"
    message = client.take()
    assert message is not None
    assert [step.kind for step in message.steps] == [Step.NEXT, Step.SEND]
    assert [frame.task for frame in message.calls] == [2]
    assert worker.receive(carried(message, ToWorker)).steps[1].payload == b"value"
    for _ in range(6):
        client.step(one, "send", noise(0, INLINE))
    client.submit(call(0, task=3))
    per_message = -(-MESSAGE // (INLINE + client_session.FRAME))
    sent = []
    for message in all_of(client.take):
        sent.append((len(message.steps), len(message.calls)))
    assert sent == [(per_message, 0), (6 - per_message, 1)], "a message ends when it is long enough"


# -- payloads that travel apart ---------------------------------------------------------------------------------------

ROUTES = {"chunks": False, "memory": True}
ALL_SHAPES: list[Shape] = [
    *(0, 1, INLINE - 1, INLINE, INLINE + 1, 2 * INLINE, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 7),
    (1, (0, False)),
    (1, (0, True), (0, False)),
    (0, (1, False)),
    (INLINE, (INLINE, False)),
    (INLINE + 1, (INLINE + 1, True), (INLINE - 1, False)),
    (3, (WINDOW, True), (0, True), (WINDOW, False), (0, False)),
    (3, *((1, nth % 2 == 0) for nth in range(20))),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
@pytest.mark.usefixtures("small")
def test_w05_a_payload_arrives_equal_whichever_way_it_travels(shape: Shape, route: str) -> None:
    client, worker = opened(shares=ROUTES[route])
    shells = Shells(client, worker)
    one = call(shape, COUNTS)
    client.submit(one)
    shells.settle()
    client.step(one, "send", packed("sent", shape))
    shells.settle()
    worker.yielded(one.number, packed("item", shape))
    worker.answer(one.number, "returned", packed("result", shape))
    shells.settle()
    assert [got.arguments for got in shells.heard.begun] == [plain(packed(1, shape))]
    assert [step.payload for step in shells.heard.steps] == [plain(packed("sent", shape))]
    assert [answer.payload for answer in shells.answers] == [plain(packed(seed, shape)) for seed in ("item", "result")]
    assert bool(shells.closed) is (ROUTES[route] and isinstance(packed(0, shape), BulkPayload))


@pytest.mark.usefixtures("small")
def test_w52_a_transfer_waits_for_room_and_small_frames_do_not() -> None:
    client, worker = opened()
    client.submit(call(3 * WINDOW, task=1))
    messages = list(all_of(client.take))
    assert sum(len(chunk.data) for message in messages for chunk in message.chunks) == WINDOW
    assert (client.waiting, client.sent) == (1, {})
    assert not client.bulk.has_work, "nothing can be sent"
    client.submit(call(SMALL, task=2))
    message = client.take()
    assert message is not None
    assert [frame.task for frame in message.calls] == [2]
    assert not message.chunks
    for before in messages:
        worker.receive(carried(before, ToWorker))
    assert [got.task for got in worker.receive(carried(message, ToWorker)).begun] == [2]
    room = worker.take()
    assert room is not None
    assert [(credit.transfer, credit.bytes) for credit in room.credits] == [(1, WINDOW)]
    assert worker.take() is None
    assert client.receive(carried(room, ToClient)) == []
    assert client.bulk.has_work, "it goes on"
    assert not client.can_wait
    assert [got.task for got in told(client, worker).begun] == [1]


@pytest.mark.usefixtures("small")
def test_w52_a_long_answer_waits_for_room_and_small_ones_do_not() -> None:
    client, worker = opened()
    one, two = call(task=1), call(task=2)
    client.submit(one)
    client.submit(two)
    told(client, worker)
    worker.answer(one.number, "returned", packed(0, 3 * WINDOW))
    sent = [message for _ in range(9) if (message := worker.take()) is not None]
    assert sum(len(chunk.data) for message in sent for chunk in message.chunks) == WINDOW
    assert worker.has_more, "the answer is on its way"
    worker.answer(two.number, "returned", b"small")
    message = worker.take()
    assert message is not None
    assert [result.number for result in message.results] == [two.number]
    assert not message.chunks
    for before in sent:
        assert client.receive(carried(before, ToClient)) == []
    assert client.bulk.has_notices
    assert not client.can_wait, "the worker waits for it"
    assert kinds(client.receive(carried(message, ToClient))) == [(two, "returned")]
    told(client, worker)
    assert worker.bulk.has_work
    assert same(heard(client, worker)) == [(one, "returned", plain(packed(0, 3 * WINDOW)), False, 0, b"", ())]


@pytest.mark.usefixtures("small")
def test_w52_a_transfer_that_waits_for_room_holds_up_no_other() -> None:
    client, worker = opened()
    client.submit(call(3 * WINDOW, task=1))
    assert list(all_of(client.take))
    client.submit(call(WINDOW, task=2))
    done = []
    for message in all_of(client.take):
        assert {chunk.transfer for chunk in message.chunks} <= {2}
        done += [frame.task for frame in message.calls]
    assert done == [2]
    assert worker.take() is None


@pytest.mark.usefixtures("small")
def test_w52_the_answer_of_an_abandoned_call_has_room_to_come() -> None:
    """Else it would stand at the worker for as long as the stream lasts."""
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    client.abandon(one)
    worker.answer(one.number, "returned", packed(0, 5 * WINDOW))
    assert heard(client, worker) == []
    assert not worker.has_more
    assert client.bulk.transfers._arriving == {}


@pytest.mark.usefixtures("small")
def test_w40a_room_for_a_transfer_that_was_given_up_changes_nothing() -> None:
    client, worker = opened()
    one = call(3 * WINDOW)
    client.submit(one)
    for message in all_of(client.take):
        worker.receive(carried(message, ToWorker))
    assert client.cancel(one)
    room = worker.take()
    assert client.receive(carried(room, ToClient)) == []
    message = client.take()
    assert message is not None
    assert [(chunk.transfer, chunk.abandoned) for chunk in message.chunks] == [(1, True)]
    assert worker.receive(carried(message, ToWorker)) == SILENCE
    assert (client.take(), worker.take(), worker.bulk.transfers._arriving) == (None, None, {})


# -- memory that is lent ----------------------------------------------------------------------------------------------


def test_w05_both_sides_say_whether_they_can_read_the_others_memory() -> None:
    client, worker = ClientSession(1, "client", "1.0", max_payload=77), WorkerSession("w1", "1.0", form_of)
    mine, theirs = Probe(pid=1, descriptor=2, token=b"3"), Probe(pid=4, descriptor=5, token=b"6")
    hello = carried(client.hello(mine), ToWorker)
    assert hello.hello.probe == mine
    assert worker.greet(hello, probe=theirs, shares=True)
    assert worker.max_payload == 77
    assert client.welcomed(carried(worker.take(), ToClient)) is None
    assert (client.probe, client.bulk.shares, worker.bulk.shares) == (theirs, True, False)
    assert client.take() is None
    client.can_read()
    assert not client.can_wait, "until then the worker sends chunks"
    message = client.take()
    assert message is not None
    assert message.shares
    assert worker.receive(carried(message, ToWorker)) == SILENCE
    assert worker.bulk.shares
    assert client.take() is None, "said once"
    quiet, deaf = ClientSession(1, "client", "1.0"), WorkerSession("w1", "1.0", form_of)
    assert not quiet.hello().hello.HasField("probe")
    assert deaf.greet(quiet.hello())
    assert quiet.welcomed(carried(deaf.take(), ToClient)) is None
    assert (quiet.probe, quiet.bulk.shares, deaf.bulk.shares, deaf.max_payload) == (None, False, False, 0)


@pytest.mark.usefixtures("small")
def test_w05_a_call_whose_arguments_are_being_lent_is_unsent() -> None:
    client, worker = opened(shares=True)
    one = call((3, (2 * INLINE, True)))
    client.submit(one)
    assert client.take() is None, "it waits for memory"
    assert client.bulk.has_work
    lending = client.bulk.loans.begin()
    assert lending is not None
    assert client.take() is None, "it is being written"
    assert (client.waiting, client.sent) == (1, {})
    assert (client.outbox, client.apart) == (client_session.FRAME, 2 * INLINE + 3)
    client.bulk.lend(lending, 55)
    assert (one.number, client.waiting, client.sent) == (0, 1, {})
    message = client.take()
    assert message is not None
    assert not message.chunks
    (frame,) = message.calls
    assert (frame.arguments, frame.transfer, frame.loan.number, frame.loan.descriptor) == (b"", 0, 1, 55)
    assert (client.sent, client.outbox, client.apart, one.arguments) == ({one.number: one}, 0, 0, b"")
    assert one.lending is None, "nobody needs them any more"
    (begun,) = worker.receive(carried(message, ToWorker)).begun
    assert begun.arguments == Borrowed(1, 55, [(3, False), (2 * INLINE, True)])
    assert not list(client.bulk.loans.take_released()), "it is being read"
    worker.bulk.has_read(begun.arguments)
    assert worker.bulk.has_notices
    assert client.receive(carried(worker.take(), ToClient)) == []
    assert client.bulk.has_work
    assert list(client.bulk.loans.take_released()) == [55]
    assert not client.bulk.has_work
    assert kinds(client.broken()) == [(one, "lost")]
    assert not list(client.bulk.loans.take_released())


@pytest.mark.usefixtures("small")
def test_w05_only_so_many_loans_are_open() -> None:
    client, worker = opened(shares=True)
    shells = Shells(client, worker)
    for task in range(1, 6):
        client.submit(call(LONG, task=task))
    client.submit(call(SMALL, task=6))
    assert len(shells.lend(client)) == LOANS
    begun = told(client, worker).begun
    assert [got.task for got in begun] == [6, 1, 2], "the others wait, and no small one for them"
    assert shells.lend(client) == []
    assert isinstance(begun[1].arguments, Borrowed)
    worker.bulk.has_read(begun[1].arguments)
    assert client.receive(carried(worker.take(), ToClient)) == []
    assert len(shells.lend(client)) == 1, "one was returned"
    assert [got.task for got in told(client, worker).begun] == [3]


@pytest.mark.usefixtures("small")
def test_w05_without_memory_it_goes_in_chunks() -> None:
    client, worker, one, shells = generating(shares=True)
    two = call(LONG, task=2)
    client.submit(two)
    client.step(one, "send", packed("sent", LONG))
    worker.yielded(one.number, packed("item", LONG))
    worker.yielded(one.number, b"behind it")
    for side in (client, worker):
        while (lending := side.bulk.loans.begin()) is not None:
            side.bulk.not_lent(lending)
    shells.settle()
    assert [got.arguments for got in shells.heard.begun] == [plain(packed(2, LONG))]
    assert [step.payload for step in shells.heard.steps] == [plain(packed("sent", LONG))]
    assert [answer.payload for answer in shells.answers] == [plain(packed("item", LONG)), b"behind it"]
    assert shells.closed == []


STAGES = [
    "early",
    "waits for memory",
    "is written",
    "is written, and fails",
    "lies in memory",
    "no chunk",
    "some chunks",
    "waits for room",
    "all chunks",
    "sent",
]


def staged(stage: str) -> tuple[ClientSession, WorkerSession, Outgoing, Shells, Callable[[], object]]:
    """A call with long arguments that has come so far; and what its shell still has to do."""
    size = 3 * WINDOW if stage == "waits for room" else LONG
    one = call(size, context=CONTEXT)
    later: Callable[[], object] = bool  # nothing
    if stage == "early":
        client, worker = ClientSession(1, "client", "1.0"), WorkerSession("w1", "1.0", form_of)
        client.submit(one)
        assert worker.greet(client.hello(), shares=True)
        welcome = worker.take()
        assert welcome is not None
        return client, worker, one, Shells(client, worker), partial(client.welcomed, welcome)
    chunks = {"no chunk": 0, "some chunks": 1, "waits for room": 9, "all chunks": 3, "sent": 9}
    client, worker = opened(shares=stage not in chunks)
    shells = Shells(client, worker)
    client.submit(one)
    for _ in range(chunks.get(stage, 0)):
        if (message := client.take()) is not None:
            worker.receive(carried(message, ToWorker))
    if stage.startswith("is written") or stage == "lies in memory":
        lending = client.bulk.loans.begin()
        assert lending is not None
        shells.memory[55] = b"".join(lending.bulk.segments())
        if stage == "lies in memory":
            client.bulk.lend(lending, 55)
        elif stage == "is written":
            later = partial(client.bulk.lend, lending, 55)
        else:
            del shells.memory[55]
            later = partial(client.bulk.not_lent, lending)
    assert (one.number > 0) is (stage == "sent")
    return client, worker, one, shells, later


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("small")
def test_w40a_a_call_may_be_cancelled_at_any_stage(stage: str) -> None:
    client, worker, one, shells, later = staged(stage)
    assert client.cancel(one) is (stage != "sent")
    assert not client.cancel(one), "once"
    later()
    if stage == "sent":
        assert told(client, worker).cancels == [1, 1]
        worker.answer(1, "cancelled")
        assert kinds(heard(client, worker)) == [(one, "cancelled")]
    shells.settle()
    assert (client.outbox, client.apart, client.waiting) == (0, 0, 0)
    assert (shells.heard, shells.answers) == (SILENCE, [])
    assert worker.bulk.transfers._arriving == {}
    assert len(shells.closed) == (stage in ("is written", "lies in memory"))
    assert not retained(client)
    another = call(LONG, task=2)
    client.submit(another)
    shells.settle()
    assert [got.task for got in shells.heard.begun] == [2], "and the next one goes its way"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("small")
def test_w40a_a_stream_may_break_at_any_stage(stage: str) -> None:
    client, worker, one, shells, later = staged(stage)
    (answer,) = client.broken()
    assert (answer.call, answer.kind) == (one, "lost" if stage == "sent" else "unsent")
    if stage != "sent":
        assert plain(one.arguments) == plain(packed(1, len(one.arguments))), "it can be sent elsewhere as it is"
    if stage != "early":
        later()
    shells.close(client)
    assert len(shells.closed) == (stage in ("is written", "lies in memory"))
    assert shells.memory == {}
    assert client.bulk.loans.begin() is None
    assert not retained(client)
    assert client.take() is None
    worker.broken()
    assert not retained(worker)


@pytest.mark.parametrize("stage", ["waits for memory", "is written", "lies in memory", "sent", "returned"])
@pytest.mark.usefixtures("small")
def test_w40a_what_a_worker_lends_is_released_when_the_stream_breaks(stage: str) -> None:
    client, worker, one, shells = generating(shares=True)
    worker.yielded(one.number, packed(1, LONG))
    worker.yielded(one.number, b"behind it")
    lending = None
    if stage == "is written":
        lending = worker.bulk.loans.begin()
    elif stage != "waits for memory":
        shells.lend(worker)
        if stage != "lies in memory":
            (answer, _) = client.receive(carried(worker.take(), ToClient))
        if stage == "returned":
            shells.whole(client, answer.payload)
            told(client, worker)
    assert worker.broken() == [one.number]
    if lending is not None:
        shells.memory[55] = b""
        worker.bulk.lend(lending, 55)
    shells.close(worker)
    assert shells.memory == {}
    assert len(shells.closed) == (stage != "waits for memory")
    assert not retained(worker)
    assert not worker.has_more
    assert worker.take() is None


def test_w40a_what_was_read_after_the_break_is_told_to_nobody() -> None:
    """A thread may still be reading when the stream ends."""
    client, worker = opened(shares=True)
    for side in (client, worker):
        side.bulk.has_read(Borrowed(1, 55, [(3, False)]))
        assert side.bulk.has_notices
        side.broken()
        assert not side.bulk.has_notices
        assert side.take() is None
        side.bulk.has_read(Borrowed(2, 56, [(3, False)]))
        assert side.take() is None
    assert not worker.has_more


# -- context ----------------------------------------------------------------------------------------------------------


def in_order(shells: Shells, one: Outgoing) -> list[tuple[str, Any, bytes]]:
    """What came of a call."""
    return [(answer.kind, answer.payload, answer.context) for answer in shells.answers if answer.call is one]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("size", [0, SMALL, INLINE, INLINE + 1, 2 * WINDOW])
@pytest.mark.parametrize(
    "context", [b"", b"\0", noise("one", 40), noise("longer than a message", 3 * MESSAGE)], ids=len
)
@pytest.mark.usefixtures("small")
def test_w81_a_context_and_lessons_arrive_with_their_frame(context: bytes, size: int, shares: bool) -> None:
    client, worker = opened(shares=shares)
    shells = Shells(client, worker)
    one = call(size, COUNTS, context=context)
    client.submit(one)
    shells.settle()
    assert [(got.arguments, got.context) for got in shells.heard.begun] == [(plain(packed(1, size)), context)]
    for nth, advance in enumerate(["next", "send", "throw", "close"]):
        payload = packed(advance, size) if advance in ("send", "throw") else b""
        client.step(one, advance, payload, nth, context=context[nth:])  # type: ignore[arg-type]
        shells.settle()
        assert shells.heard.steps.pop() == (one.number, advance, nth, plain(payload), context[nth:])
        lessons = [Lesson("k", rest=nth)] * nth
        assert worker.yielded(one.number, packed(nth, size), context=context[: nth + 1], lessons=lessons)
        shells.settle()
        answer = (one, "yielded", plain(packed(nth, size)), False, 0, context[: nth + 1], lessons or ())
        assert shells.answers.pop() == answer
    lessons = [Lesson("k", 1.5, "why", (3, 1, None), 429, (("retry-after", "1"), ("x", ""))), Lesson("other")]
    assert worker.answer(one.number, "raised", packed("end", size), context=context, lessons=lessons)
    shells.settle()
    assert shells.answers == [(one, "raised", plain(packed("end", size)), False, 0, context, lessons)]
    assert shells.heard.steps == [], "each of them once"


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("swallowed", [False, True])
def test_w81_every_end_brings_its_context(kind: Any, swallowed: bool) -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    assert worker.answer(one.number, kind, b"result", swallowed=swallowed, context=CONTEXT)
    assert not worker.answer(one.number, kind, b"again", context=b"again")
    assert heard(client, worker) == [Answer(one, kind, b"result", swallowed, 0, CONTEXT)]


@pytest.mark.parametrize("kind", REFUSALS)
def test_w81_what_was_refused_never_began_and_sends_no_context_back(kind: Any) -> None:
    client, worker = opened()
    one = call(context=CONTEXT)
    client.submit(one)
    told(client, worker)
    assert worker.answer(one.number, kind, b"why", context=b"of nobody")
    assert heard(client, worker) == [Answer(one, kind, b"why")]
    assert one.context == CONTEXT, "it is to be sent elsewhere"


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("size", [SMALL, LONG])
@pytest.mark.usefixtures("small")
def test_w81_nothing_is_on_the_wire_where_nothing_is_set(size: int, shares: bool) -> None:
    """Not even beside one that sets something."""
    client, worker = opened(shares=shares)
    shells = Shells(client, worker)
    contexts = {1: b"", 2: CONTEXT, 3: b""}
    calls = [call(size, COUNTS, task, context=context) for task, context in contexts.items()]
    for one in calls:
        client.submit(one)
    shells.settle()
    for one in calls:
        client.step(one, "send", packed("sent", size), context=one.context)
        worker.yielded(one.number, packed("item", size), context=one.context)
        worker.answer(one.number, "returned", packed("end", size), context=one.context)
    shells.settle()
    assert len(shells.frames) == 4 * len(calls)
    context_of = {one.number: one.context for one in calls}
    for frame in shells.frames:
        context = context_of[frame.number]
        assert frame.context == context
        assert ("context" in on_the_wire(frame)) is bool(context)
        bare = carried(frame, frame.__class__)
        bare.ClearField("context")
        assert frame.ByteSize() - bare.ByteSize() == (len(context) + 2 if context else 0)


PATTERNS = [(b"a", b"b", b"", b"c"), (b"", b"", b"b", b""), (b"", b"a", b"b", b"c"), (b"a", b"", b"", b"")]


@pytest.mark.parametrize("route", ["chunks", "memory", "no memory"])
@pytest.mark.parametrize("sizes", list(itertools.product([SMALL, LONG], repeat=4)))
@pytest.mark.usefixtures("small")
def test_w81_contexts_wait_in_line_with_their_frames(sizes: tuple[int, ...], route: str) -> None:
    """None goes ahead with another frame, whichever of them travel apart."""
    for contexts in PATTERNS:
        _, worker, one, shells = generating(shares=route != "chunks")
        *items, end = zip((packed(nth, size) for nth, size in enumerate(sizes)), contexts, strict=True)
        for item, context in items:
            assert worker.yielded(one.number, item, context=context)
        assert worker.answer(one.number, "returned", end[0], context=end[1])
        while route == "no memory" and (lending := worker.bulk.loans.begin()) is not None:
            worker.bulk.not_lent(lending)
        shells.settle()
        expected = [("yielded", plain(item), context) for item, context in items]
        assert in_order(shells, one) == [*expected, ("returned", plain(end[0]), end[1])]
        assert not worker.has_more


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.usefixtures("small")
def test_w81_a_context_does_not_go_before_a_payload_that_travels_apart(shares: bool) -> None:
    client, worker, one, shells = generating(shares=shares)
    two = call(LONG, COUNTS, 2, context=b"call")
    client.submit(two)
    client.step(one, "send", packed("sent", LONG), context=b"step")
    worker.yielded(one.number, packed("item", LONG), context=b"item")
    worker.yielded(one.number, b"behind it", context=b"behind it")
    for side, other in ((client, worker), (worker, client)):
        for _ in range(3):  # chunks only; or nothing at all, for it waits for memory
            message: Any = side.take()
            assert (message is None) is shares
            if message is not None:
                assert message.chunks
                assert frames_of(message) == []
                assert other.receive(message) in ([], SILENCE)
    shells.settle()
    assert [(got.task, got.context) for got in shells.heard.begun] == [(2, b"call")]
    assert [(step.advance, step.context) for step in shells.heard.steps] == [("send", b"step")]
    assert [context for _, _, context in in_order(shells, one)] == [b"item", b"behind it"]


@pytest.mark.parametrize("seed", range(int(10 + 100 * SCALE)))
@pytest.mark.usefixtures("small")
def test_w81_contexts_keep_the_order_of_their_call(seed: int) -> None:
    """Several generators at once: steps, items and ends of all lengths, while messages come and go."""
    chance = random.Random(seed)
    client, worker = opened(shares=chance.random() < 0.5)
    shells = Shells(client, worker)
    count = itertools.count()
    some = lambda: noise(("context", next(count)), chance.choice((0, 0, 3, 20, MESSAGE)))  # noqa: E731 - short
    calls = [call(chance.choice((SMALL, LONG)), COUNTS, task, context=some()) for task in range(1, 5)]
    for one in calls:
        client.submit(one)
    shells.settle()
    assert {got.task: got.context for got in shells.heard.begun} == {one.task: one.context for one in calls}
    steps: dict[Outgoing, list[Any]] = {one: [] for one in calls}
    said: dict[Outgoing, list[Any]] = {one: [] for one in calls}
    for _ in range(60):
        one, size, context = chance.choice(calls), chance.choice((0, SMALL, INLINE, LONG, 2 * WINDOW)), some()
        match chance.choice(("step", "yield", "yield", "send", "reply")):
            case "step" if one.number not in client._departing:  # its consumer waits for that one
                payload = packed(("step", next(count)), size)
                client.step(one, "send", payload, context=context)
                steps[one].append((plain(payload), context))
            case "yield":
                payload = packed(("item", next(count)), size)
                assert worker.yielded(one.number, payload, context=context)
                said[one].append(("yielded", plain(payload), context))
            case "send":
                shells.send()
            case "reply":
                shells.reply()
    shells.settle()
    for one in chance.sample(calls, len(calls)):
        payload, context = packed(("end", one.task), chance.choice((0, LONG))), some()
        assert worker.answer(one.number, "returned", payload, context=context)
        said[one].append(("returned", plain(payload), context))
    shells.settle()
    for one in calls:
        assert [(step.payload, step.context) for step in shells.heard.steps if step.number == one.number] == steps[one]
        assert in_order(shells, one) == said[one]


@pytest.mark.parametrize("stage", [*STAGES, "refused"])
@pytest.mark.usefixtures("small")
def test_w81_a_call_that_is_sent_again_takes_its_context_along(stage: str) -> None:
    """Whatever became of it where it was first: unsent, lost, or refused."""
    client, worker, one, shells, later = staged("sent" if stage == "refused" else stage)
    if stage == "refused":
        worker.answer(one.number, "unavailable", context=b"of nobody")
        (answer,) = heard(client, worker)
        client.broken()
    else:
        (answer,) = client.broken()
    assert (answer.call, answer.context, one.context) == (one, b"", CONTEXT)
    if stage != "early":
        later()
    shells.close(client)
    client, worker = opened()
    shells = Shells(client, worker)
    client.submit(Outgoing(one.task, NAMED, packed(1, LONG), context=one.context))
    shells.settle()
    assert [(got.arguments, got.context) for got in shells.heard.begun] == [(plain(packed(1, LONG)), CONTEXT)]
    assert [frame.context for frame in shells.frames] == [CONTEXT], "once"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("small")
def test_w81_the_context_of_a_call_that_is_gone_goes_with_no_other(stage: str) -> None:
    client, worker, one, shells, later = staged(stage)
    client.cancel(one)
    later()
    for task, context in ((2, b""), (3, b"its own")):
        client.submit(call(task=task, context=context))
    shells.settle()
    assert [(got.task, got.context) for got in shells.heard.begun] == [(2, b""), (3, b"its own")]
    if stage == "sent":
        worker.answer(one.number, "cancelled", context=b"what it had set")
        shells.settle()
        assert in_order(shells, one) == [("cancelled", b"", b"what it had set")]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("size", [SMALL, LONG])
@pytest.mark.usefixtures("small")
def test_w81_a_cancel_costs_no_context(size: int, shares: bool) -> None:
    """What the step brought was set before it, and what the routine sets meanwhile comes back."""
    client, worker, one, shells = generating(shares=shares)
    client.step(one, "send", packed("sent", size), context=b"step")
    assert not client.cancel(one)
    worker.yielded(one.number, packed("item", size), context=b"before")
    shells.settle()
    assert not client.cancel(one)
    shells.settle()
    assert [step.context for step in shells.heard.steps] == [b"step"]
    worker.yielded(one.number, packed("late", size), swallowed=True, context=b"")
    worker.answer(one.number, "cancelled", context=b"after")
    client.cancel(one)  # crosses that
    shells.settle()
    assert [(kind, context) for kind, _, context in in_order(shells, one)] == [
        ("yielded", b"before"),
        ("yielded", b""),
        ("cancelled", b"after"),
    ]
    assert len(shells.heard.steps) == 1


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.usefixtures("small")
def test_w81_a_context_for_nobody_is_given_to_nobody(shares: bool) -> None:
    client, worker, one, shells = generating(shares=shares)
    two = call(form=COUNTS, task=2)
    client.submit(two)
    shells.settle()
    for number in (one.number, two.number):
        worker.yielded(number, packed(number, LONG), context=b"item of %d" % number)
        worker.yielded(number, b"", context=b"more of %d" % number)
    client.step(one, "close", context=b"step")
    client.abandon(one)
    client.step(one, "close", context=b"too late")
    worker.answer(one.number, "returned", context=b"end")
    assert not worker.yielded(one.number, b"", context=b"too late")
    shells.settle()
    assert [(answer.call, answer.context) for answer in shells.answers] == [(two, b"item of 2"), (two, b"more of 2")]
    assert shells.heard.steps == [], "it has ended there"
    client.step(two, "next", context=b"on its way")
    worker.yielded(two.number, b"", context=b"on its way")
    forth, back = client.take(), worker.take()
    assert [answer[1:] for answer in client.broken()] == [("lost", b"", False, 0, b"", ())]
    assert worker.broken() == [two.number]
    assert client.receive(carried(back, ToClient)) == []
    assert worker.receive(carried(forth, ToWorker)) == SILENCE
    assert not retained(client)
    assert not retained(worker)


def says(client: ClientSession, worker: WorkerSession, what: str, size: int, context: bytes) -> Callable[[], Any]:
    """Have one end say something ten times; who is to speak then."""
    take: Callable[[], Any] = client.take if what in ("calls", "steps") else worker.take
    if what == "calls":
        for task in range(1, 11):
            client.submit(call(size, task=task, context=context))
        return take
    calls = [call(0, COUNTS, task) for task in range(1, 11)]
    for one in calls:
        client.submit(one)
    told(client, worker)
    if what == "behind a parcel":
        worker.yielded(calls[0].number, packed(0, 2 * INLINE))
    for one in calls:
        payload = packed(one.task, size)
        if what == "steps":
            client.step(one, "send", payload, context=context)
        elif what == "results":
            worker.answer(one.number, "returned", payload, context=context)
        else:
            worker.yielded(calls[0].number, payload, context=context)
    return take


@pytest.mark.parametrize("what", ["calls", "steps", "yields", "results", "behind a parcel"])
@pytest.mark.parametrize("length", [INLINE, MESSAGE // 2, MESSAGE, 2 * MESSAGE])
@pytest.mark.usefixtures("small")
def test_w81_contexts_count_to_the_length_of_a_message(what: str, length: int) -> None:
    """A message ends when it is long enough, whatever makes it long."""
    take = says(*opened(), what, SMALL, noise(what, length))
    counts = []
    for message in all_of(take):
        frames = [frame for frame in frames_of(message) if frame.context]
        counts.append(len(frames))
        for frame in frames:
            assert frame.context == noise(what, length)
        assert sum(len(frame.context) for frame in frames[:-1]) < MESSAGE, "but for the frame that makes it so"
    assert sum(counts) == 10
    per_message = -(-MESSAGE // (length + SMALL + client_session.FRAME))
    assert max(counts) == per_message
    assert len([count for count in counts if count]) == -(-10 // per_message)


# -- functions --------------------------------------------------------------------------------------------------------


def test_w52_a_function_is_defined_once() -> None:
    client, worker = opened()
    value = by_value(20, "v", fresh=True, thread=True)
    defined = []
    for task, form in enumerate([NAMED, value, NAMED, value, NAMED._replace(thread=True)], 1):
        client.submit(call(form=form, task=task))
        message = client.take()
        defined.append([form_of(one) for one in message.definitions])  # type: ignore[union-attr]
        begun, _, _ = worker.receive(carried(message, ToWorker))
        assert [got.function for got in begun] == [form]
    assert defined == [[NAMED], [value], [], [], [NAMED._replace(thread=True)]]


@pytest.mark.usefixtures("small")
def test_w52_the_longest_unused_value_is_forgotten_and_defined_again() -> None:
    client, worker = opened()
    forms = {name: by_value(12, name) for name in "abc"}
    forms["named"] = NAMED

    def use(names: str | list[str]) -> tuple[list[str], list[str]]:
        for name in names:
            client.submit(call(form=forms[name], task=ord(name[0])))
        message = client.take()
        assert message is not None
        begun, _, _ = worker.receive(carried(message, ToWorker))
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
    assert sum(len(form.value) for form in worker._functions.values()) <= client_session.KEPT


@pytest.mark.usefixtures("small")
def test_w52_a_function_longer_than_all_that_is_kept_is_kept_alone() -> None:
    client, worker = opened()
    huge, little = by_value(50, "huge"), by_value(5, "little")
    told_of = []
    for task, form in enumerate([little, huge, huge, little, huge], 1):
        client.submit(call(form=form, task=task))
        message = client.take()
        assert message is not None
        begun, _, _ = worker.receive(carried(message, ToWorker))
        assert [got.function for got in begun] == [form]
        told_of.append((len(message.definitions), len(message.forgotten)))
        assert len(worker._functions) == 1
    assert told_of == [(1, 0), (1, 1), (0, 0), (1, 1), (1, 1)]


@pytest.mark.parametrize("origin", ["", "pool-1c9d/17"])
def test_o32_a_call_carries_the_task_for_which_it_runs(origin: str) -> None:
    client, worker = opened()
    client.submit(call(caller="client/1", origin=origin))
    [begun] = told(client, worker).begun
    assert (begun.caller, begun.origin) == ("client/1", origin)


# -- signs ------------------------------------------------------------------------------------------------------------


def test_w52_started_pulse_peers_and_stopping_travel() -> None:
    client, worker = opened()
    one, two = call(tell_start=True), call(task=2, timeout=1.5, caller="client/1")
    client.submit(one)
    client.submit(two)
    client.introduce("pool", [Peer("w2", "unix:b")])
    client.introduce("pool", [Peer("w1", "unix:a")], 3)
    begun = told(client, worker).begun
    assert [(got.timeout, got.caller, got.tell_start) for got in begun] == [(0.0, "", True), (1.5, "client/1", False)]
    assert worker.peers == ("pool", [Peer("w1", "unix:a")], 3), "what was said last"
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
    assert worker.peers == ("pool", [], 0)
    for number in (one.number, two.number):
        worker.answer(number, "returned")
    assert len(heard(client, worker)) == 2, "what it has it finishes"


def test_w52_a_worker_that_stops_says_so_in_its_welcome() -> None:
    client, worker = ClientSession(1, "client", "1.0"), WorkerSession("w1", "1.0", form_of)
    assert worker.greet(client.hello(), stopping=True)
    assert client.welcomed(carried(worker.take(), ToClient)) is None
    assert client.state == "stopping"


# -- protocols --------------------------------------------------------------------------------------------------------

Ranges = tuple[int, int]


def shake(monkeypatch: pytest.MonkeyPatch, client_speaks: Ranges, worker_speaks: Ranges) -> tuple[Any, Any, str | None]:
    """A handshake of two releases."""

    def speak(speaks: Ranges) -> None:
        for module in (client_session, worker_session):
            monkeypatch.setattr(module, "OLDEST", speaks[0])
        for module in (client_session, worker_session):
            monkeypatch.setattr(module, "NEWEST", speaks[1])

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
def test_w45_neighbouring_releases_talk(
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
    for module in (client_session, worker_session):
        monkeypatch.setattr(module, "OLDEST", worker_speaks[0])
    for module in (client_session, worker_session):
        monkeypatch.setattr(module, "NEWEST", worker_speaks[1])
    another = WorkerSession("w1", "2.0", form_of)
    another.greet(hello)
    reply = another.take()
    assert reply is not None
    assert reply.welcome.protocol == agreed, "the newest that both speak"


@pytest.mark.parametrize(
    ("client_speaks", "worker_speaks"), [((1, 1), (2, 2)), ((2, 3), (1, 1)), ((1, 2), (3, 9)), ((7, 9), (5, 6))]
)
def test_w45_incompatible_protocols_are_refused_with_a_reason(
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
def test_w45_a_first_message_without_hello_is_refused(message: ToWorker) -> None:
    worker = WorkerSession("w1", "1.0", form_of)
    assert not worker.greet(message)
    reply = worker.take()
    assert reply is not None
    assert "hello" in reply.refused.reason
    assert not reply.HasField("welcome")
    assert (worker.state, worker.open, worker.take()) == ("over", {}, None)
    early = ToWorker(definitions=[Definition(function=1)], calls=[Call(number=1, function=1)])
    assert worker.receive(early) == SILENCE


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
def test_w45_a_client_uses_no_worker_that_it_cannot_talk_to(message: ToClient, said: str) -> None:
    client = ClientSession(1, "client", "1.0")
    one = call()
    client.submit(one)
    reason = client.welcomed(message)
    assert reason is not None
    assert said in reason
    assert (client.state, client.uid, client.take()) == ("over", "", None)
    assert client.receive(ToClient(results=[Result(number=1)])) == []
    assert kinds(client.broken()) == [(one, "unsent")]


def test_w45_the_hello_says_what_the_client_speaks() -> None:
    hello = ClientSession(7, "abc", "1.2").hello().hello
    assert (hello.oldest, hello.newest) == (client_session.OLDEST, client_session.NEWEST)
    assert (hello.epoch, hello.client, hello.version) == (7, "abc", "1.2")


def test_w45_nothing_is_heard_before_the_welcome() -> None:
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


def test_w45_nothing_is_begun_before_the_hello() -> None:
    worker = WorkerSession("w1", "1.0", form_of)
    early = ToWorker(definitions=[Definition(function=1)], calls=[Call(number=1, function=1)], cancels=[1])
    assert worker.receive(early) == SILENCE
    assert (worker.open, worker.take(), worker.state) == ({}, None, "opening")
    assert worker.greet(ClientSession(1, "client", "1.0").hello())
    with pytest.raises(ProtocolViolation, match="not defined"):
        worker.receive(ToWorker(calls=[Call(number=1, function=1)]))


def test_w45_a_second_hello_and_a_second_welcome_change_nothing() -> None:
    client, worker = opened()
    one = call()
    client.submit(one)
    told(client, worker)
    assert worker.receive(ToWorker(hello=Hello(oldest=9, newest=9, client="other"))) == SILENCE
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
        (ToWorker(calls=[Call(number=6, function=1, transfer=3)]), "transfer 3, of which not all has come"),
        (
            ToWorker(chunks=[Chunk(transfer=8, abandoned=True)], calls=[Call(number=6, function=1, transfer=8)]),
            "transfer 8, of which not all has come",
        ),
        (ToWorker(calls=[Call(number=6, function=1), Call(number=7, function=2)]), "function 2"),
        (ToWorker(calls=[Call(number=6, function=1, transfer=8)]), "transfer 8, of which not all has come"),
        (ToWorker(steps=[Step(number=5, transfer=8)]), "transfer 8, of which not all has come"),
        (ToWorker(steps=[Step(number=99, transfer=3)]), "transfer 3, of which not all has come"),
        (ToWorker(chunks=[Chunk(transfer=3, data=b"x")]), "transfer 3, of which no layout came"),
        (ToWorker(chunks=[Chunk(transfer=8, data=b"beyond")]), "beyond what was announced"),
        (ToWorker(chunks=[Chunk(transfer=8, data=b"whole"), Chunk(transfer=8, data=b"x")]), "beyond"),
        (ToWorker(chunks=[Chunk(transfer=3, data=b"x", layout=Layout())]), "beyond"),
    ],
)
def test_w40a_a_worker_ends_a_conversation_it_cannot_follow(message: ToWorker, said: str) -> None:
    worker = opened()[1]
    worker.receive(
        ToWorker(
            definitions=[DEFINED],
            calls=[Call(number=5, function=1)],
            chunks=[Chunk(transfer=8, data=b"begun", layout=Layout(pickle=10))],
        )
    )
    with pytest.raises(ProtocolViolation, match=said) as caught:
        worker.receive(message)
    assert isinstance(caught.value, RpcError)
    assert caught.value.remedy
    assert 5 in worker.broken(), "what runs is to be cancelled, and nothing of this message was begun"
    assert worker.receive(message) == SILENCE
    assert worker.broken() == []


def test_w40a_a_forgotten_function_may_not_be_called() -> None:
    worker = opened()[1]
    begun, _, _ = worker.receive(
        ToWorker(definitions=[DEFINED], calls=[Call(number=1, function=1)], forgotten=[1, 1, 77])
    )
    assert [got.function.tag for got in begun] == ["jobs.add:1"], "the message that forgets it may use it"
    with pytest.raises(ProtocolViolation, match="not defined"):
        worker.receive(ToWorker(calls=[Call(number=2, function=1)]))


def test_w40a_cancels_of_unknown_calls_are_ignored() -> None:
    worker = opened()[1]
    worker.receive(ToWorker(definitions=[DEFINED], calls=[Call(number=1, function=1)]))
    assert worker.receive(ToWorker(cancels=[0, 1, 2, 1, 2**64 - 1])) == ([], [1, 1], [])


def answering() -> tuple[ClientSession, WorkerSession, list[Outgoing]]:
    client, worker = opened()
    calls = [call(task=task) for task in (1, 2, 3)]
    for one in calls:
        client.submit(one)
    told(client, worker)
    return client, worker, calls


def test_w40a_an_answer_whose_transfer_nobody_sent_breaks_the_conversation() -> None:
    client, _, calls = answering()
    with pytest.raises(ProtocolViolation, match="transfer 4, of which not all has come"):
        client.receive(ToClient(results=[Result(number=2, transfer=4)]))
    assert kinds(client.broken()) == [(one, "lost") for one in calls]


@pytest.mark.parametrize(
    "message",
    [
        ToClient(yields=[Yield(number=2, transfer=4)]),
        ToClient(yields=[Yield(number=99, transfer=4)]),
        ToClient(results=[Result(number=1, transfer=8)]),
        ToClient(chunks=[Chunk(transfer=3, data=b"x")]),
        ToClient(chunks=[Chunk(transfer=8, data=b"beyond")]),
        ToClient(chunks=[Chunk(transfer=8, data=b"12345"), Chunk(transfer=8)]),
        ToClient(chunks=[Chunk(transfer=8, abandoned=True), Chunk(transfer=8, data=b"x")]),
    ],
    ids=str,
)
def test_w40a_a_client_ends_a_conversation_it_cannot_follow(message: ToClient) -> None:
    client, _, calls = answering()
    client.receive(ToClient(chunks=[Chunk(transfer=8, data=b"begun", layout=Layout(pickle=10))]))
    message.results.add(number=calls[0].number, payload=b"fine")
    with pytest.raises(ProtocolViolation):
        client.receive(message)
    assert kinds(client.broken()) == [(one, "lost") for one in calls], "no call is left without an answer"
    assert not retained(client)


def test_w40a_room_and_returns_of_nobody_are_ignored() -> None:
    client, worker, _ = answering()
    assert client.receive(ToClient(credits=[Credit(transfer=5, bytes=7)], returned=[0, 4, 4])) == []
    assert worker.receive(ToWorker(credits=[Credit(transfer=5, bytes=7)], returned=[0, 4, 4])) == SILENCE
    assert (client.bulk.has_work, worker.bulk.has_work) == (False, False)
    assert worker.receive(ToWorker(steps=[Step(number=99), Step(number=98, loan=Loan(number=4))])) == SILENCE
    reply = worker.take()
    assert reply is not None
    assert list(reply.returned) == [4], "what a step of nobody was lent goes back"
    strange = ToClient(yields=[Yield(number=97, loan=Loan(number=6))], results=[Result(number=98, loan=Loan(number=7))])
    assert client.receive(strange) == []
    message = client.take()
    assert message is not None
    assert list(message.returned) == [6, 7]


@pytest.mark.usefixtures("small")
def test_w40a_a_loan_that_is_returned_twice_or_too_early_is_released_once() -> None:
    client, _ = opened(shares=True)
    one, two = call(LONG, task=1), call(LONG, task=2)
    client.submit(one)
    client.submit(two)
    shells = Shells(client, WorkerSession("w1", "1.0", form_of))
    lent = shells.lend(client)
    client.receive(ToClient(returned=[1, 1]))
    client.receive(ToClient(returned=[1]))
    assert client.cancel(one)
    assert client.cancel(two)
    assert list(client.bulk.loans.take_released()) == lent
    client.broken()
    assert list(client.bulk.loans.take_released()) == []


def test_w40a_an_item_of_a_call_that_is_no_generator_is_no_answer() -> None:
    """Its caller waits for one answer, and would take the item for it."""
    client, _, calls = answering()
    try:
        answers = client.receive(ToClient(yields=[Yield(number=calls[0].number, payload=b"item")]))
    except ProtocolViolation:
        answers = []
    assert answers == []


def test_w45_an_unknown_step_ends_a_generator() -> None:
    """A newer client may know more kinds. It was asked for something, and would wait for ever for an answer."""
    client, worker = opened()
    one = call(form=COUNTS)
    client.submit(one)
    told(client, worker)
    step = Step.FromString(Step(number=one.number).SerializeToString() + b"\x10\x09")
    assert worker.receive(carried(ToWorker(steps=[step]), ToWorker)).steps == [Stepped(one.number, "close", 0, b"")]


def test_w40a_a_message_that_breaks_the_conversation_costs_no_call_its_outcome() -> None:
    """Answers that stand before the fault must not vanish with it: their callers would wait for ever."""
    client, _, calls = answering()
    first = Result(number=calls[0].number, payload=b"fine")
    try:
        answers = client.receive(ToClient(results=[first, Result(number=calls[1].number, transfer=4)]))
    except ProtocolViolation:
        answers = []
    answers += client.broken()
    assert sorted(answer.call.task for answer in answers) == [1, 2, 3]


def test_w40a_answers_to_nobody_are_dropped() -> None:
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


def test_w40a_a_second_answer_is_dropped() -> None:
    client, _, calls = answering()
    number = calls[0].number
    twice = ToClient(results=[Result(number=number, payload=b"1"), Result(number=number, payload=b"2")])
    twice.refusals.add(number=number)
    assert client.receive(twice) == [Answer(calls[0], "returned", b"1")]
    assert client.receive(twice) == []
    assert kinds(client.broken()) == [(one, "lost") for one in calls[1:]]


def test_w45_unknown_kinds_of_answers_are_taken_for_the_safe_ones() -> None:
    """A newer worker may know more kinds. A result means that it ran, a refusal that it did not."""
    client, _, calls = answering()
    message = ToClient()
    message.results.append(Result.FromString(Result(number=calls[0].number).SerializeToString() + b"\x10\x09"))
    message.refusals.append(Refusal.FromString(Refusal(number=calls[1].number).SerializeToString() + b"\x10\x09"))
    assert message.results[0].kind == message.refusals[0].why == 9
    assert kinds(client.receive(carried(message, ToClient))) == [(calls[0], "lost"), (calls[1], "not_started")]


def test_w45_what_a_newer_side_adds_is_ignored() -> None:
    client, worker, calls = answering()
    added = b"\x92\x03\x03new"  # field 50, a string
    assert worker.receive(ToWorker.FromString(ToWorker(cancels=[1]).SerializeToString() + added)) == ([], [1], [])
    result = ToClient(results=[Result(number=calls[0].number)]).SerializeToString()
    assert kinds(client.receive(ToClient.FromString(result + added))) == [(calls[0], "returned")]


numbers = st.integers(0, 6)
payloads = st.binary(max_size=3)
lengths = st.integers(0, 4)
layouts = st.builds(
    Layout, pickle=lengths, buffers=st.lists(st.builds(Buffer, length=lengths, writable=st.booleans()), max_size=2)
)
chunks = st.lists(
    st.builds(Chunk, transfer=numbers, data=payloads, abandoned=st.booleans(), layout=st.none() | layouts), max_size=3
)
loans = st.none() | st.builds(Loan, number=numbers, descriptor=numbers, layout=layouts)
apart: dict[str, Any] = {"transfer": st.just(0) | numbers, "loan": loans, "context": payloads}
both: dict[str, Any] = {
    "chunks": chunks,
    "credits": st.lists(st.builds(Credit, transfer=numbers, bytes=st.integers(0, 2**64 - 1)), max_size=2),
    "returned": st.lists(numbers, max_size=3),
}
to_worker = st.builds(
    ToWorker,
    definitions=st.lists(st.builds(Definition, function=numbers, value=payloads), max_size=2),
    calls=st.lists(st.builds(Call, number=numbers, function=numbers, **apart), max_size=3),
    steps=st.lists(st.builds(Step, number=numbers, kind=st.integers(0, 4), **apart), max_size=3),
    cancels=st.lists(numbers, max_size=2),
    forgotten=st.lists(numbers, max_size=2),
    shares=st.booleans(),
    **both,
)
to_client = st.builds(
    ToClient,
    started=st.lists(numbers, max_size=2),
    results=st.lists(st.builds(Result, number=numbers, kind=st.integers(0, 4), **apart), max_size=3),
    yields=st.lists(st.builds(Yield, number=numbers, **apart), max_size=3),
    refusals=st.lists(st.builds(Refusal, number=numbers, why=st.integers(0, 4)), max_size=2),
    stopping=st.booleans(),
    **both,
)
fuzz = settings(max_examples=int(730 * SCALE**1.5))


def borrowed_in(payloads: Sequence[Any]) -> list[int]:
    return [payload.number for payload in payloads if isinstance(payload, Borrowed)]


def lent_by(frames: Sequence[Any]) -> list[int]:
    return [frame.loan.number for frame in frames if frame.HasField("loan") and not frame.transfer]


@fuzz
@given(messages=st.lists(to_worker, max_size=4))
def test_w40a_whatever_a_client_says_no_number_is_begun_twice(messages: list[ToWorker]) -> None:
    worker = opened()[1]
    begun: list[int] = []
    try:
        for message in messages:
            calls, cancels, steps = worker.receive(message)
            begun += [got.number for got in calls]
            assert set(cancels) <= set(begun)
            known = [(step.number, step.context) for step in message.steps if step.number in begun]
            assert [(step.number, step.context) for step in steps] == known, "steps of nobody are ignored"
            assert [got.context for got in calls] == [one.context for one in message.calls]
            assert list(worker.open) == begun
            taken = borrowed_in([*(got.arguments for got in calls), *(step.payload for step in steps)])
            assert sorted(taken + worker.bulk._returns) == sorted(lent_by([*message.calls, *message.steps]))
            worker.bulk._returns.clear()
    except ProtocolViolation:
        pass
    assert begun == sorted(set(begun))
    assert worker.broken()[: len(begun)] == begun
    for message in messages:
        assert worker.receive(message) == SILENCE
    assert worker.take() is None
    assert not retained(worker)


@fuzz
@given(messages=st.lists(to_client, max_size=4))
def test_w40a_whatever_a_worker_says_each_call_ends_once(messages: list[ToClient]) -> None:
    client, _, calls = answering()
    answers: list[Answer] = []
    try:
        for message in messages:
            more = client.receive(message)
            answers += [answer for answer in more if answer.kind != "yielded"]
            assert client.waiting == 3 - len(answers)
            firsts = {one.number: one.context for one in reversed(message.results)}
            for answer in more:
                assert answer.context == (b"" if answer.kind in REFUSALS else firsts[answer.call.number])
            taken = borrowed_in([answer.payload for answer in more])
            assert sorted(taken + client.bulk._returns) == sorted(lent_by([*message.results, *message.yields]))
            client.bulk._returns.clear()
    except ProtocolViolation:
        pass
    answers += client.broken()
    assert sorted(answer.call.task for answer in answers) == [one.task for one in calls]
    for message in messages:
        assert client.receive(message) == [], "garbage after the break"
    assert not retained(client)


@fuzz
@given(messages=st.lists(to_client, max_size=4), written=st.integers(0, 4), sent=st.booleans())
@pytest.mark.usefixtures("small")
def test_w40a_whatever_a_worker_says_each_descriptor_is_released_once(
    messages: list[ToClient], written: int, sent: bool
) -> None:
    """Calls whose arguments wait for memory, are being written, are written, were sent, and others in chunks."""
    client, _ = opened(shares=True)
    calls = [call(2 * INLINE, task=task) for task in range(1, 5)]
    for one in calls:
        client.submit(one)
    lendings = [lending for _ in calls if (lending := client.bulk.loans.begin()) is not None]
    for descriptor, lending in enumerate(lendings[:written], 100):
        client.bulk.lend(lending, descriptor)
    if sent:
        client.take()
    answers: list[Answer] = []
    try:
        for message in messages:
            answers += [answer for answer in client.receive(message) if answer.kind != "yielded"]
            assert len(client.bulk.loans._lent) + len(client.bulk.loans.writing) <= LOANS
    except ProtocolViolation:
        pass
    answers += client.broken()
    assert sorted(answer.call.task for answer in answers) == [1, 2, 3, 4]
    for descriptor, lending in enumerate(lendings[written:], 100 + written):
        client.bulk.lend(lending, descriptor)
    assert sorted(client.bulk.loans.take_released()) == [100 + nth for nth in range(len(lendings))]
    assert list(client.bulk.loans.take_released()) == []


# -- any interleaving -------------------------------------------------------------------------------------------------

LIMITS: list[dict[str, int]] = [
    {"INLINE": 60, "MESSAGE": 150, "OUTBOX": 400, "KEPT": 30, "CROWD": 3, "WINDOW": 240, "GRANT": 60, "LOANS": 2},
    {"INLINE": 4, "MESSAGE": 100, "OUTBOX": 300, "KEPT": 24, "CROWD": 2, "WINDOW": 10, "GRANT": 10, "LOANS": 1},
    {"INLINE": 8, "MESSAGE": 1, "OUTBOX": 100, "KEPT": 1, "CROWD": 2, "WINDOW": 8, "GRANT": 8, "LOANS": 3},
    {"INLINE": 30, "MESSAGE": 31, "OUTBOX": 200, "KEPT": 1000, "CROWD": 4, "WINDOW": 100, "GRANT": 45, "LOANS": 16},
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
    *[COUNTS] * 6,
    by_value(10, "ten", generator=True),
    by_value(11, "eleven", generator=True),
]
SHAPES: list[Callable[[int, int], Shape]] = [
    lambda inline, window: 0,
    lambda inline, window: 1,
    lambda inline, window: inline,
    lambda inline, window: inline,
    lambda inline, window: inline + 1,
    lambda inline, window: 2 * inline,
    lambda inline, window: 3 * inline + 1,
    lambda inline, window: window,
    lambda inline, window: window + 1,
    lambda inline, window: 2 * window + 3,
    lambda inline, window: (1, (0, False)),
    lambda inline, window: (3, (inline, False), (inline + 1, True), (0, True), (2, False)),
    lambda inline, window: (inline + 1, (window, True), (0, False), (0, False), (1, True)),
]
CHOICES: dict[str, Sequence[Any]] = {
    "limits": LIMITS,
    "manner": ["fine", "fine", "fine", "fine", "stopping", "refusing"],
    "worker_reads": [False, True],
    "client_reads": [False, True],
    "at": range(4),
    "nth": range(12),
    "form": FORMS,
    "shape": SHAPES,
    "context": [0, 0, 0, 3, 20, 200],
    "several": [1, 1, 2, 5],
    "retries": [0, 0, 0, 1, 2],
    "moves": [0, 0, 1],
    "kind": [*ENDS, *ENDS, *REFUSALS],
    "advance": ["next", "next", "send", "send", "throw", "close"],
    "times": [0, 1, 1, 3],
    "side": ["client", "worker"],
    "fails": [False, False, False, True],
    "swallowed": [False, False, True],
    "really": [False, False, False, True],
    "kept": [0, 0, 1, 3],
    "kept_back": [0, 0, 1, 3],
    "age": [0.0, 0.3, 2.0],
    "peers": [
        ("", [], 0),
        ("pool", [Peer("w1", "unix:a")], 1),
        ("pool", [Peer("w1", "unix:a"), Peer("w2", "unix:b")], 2),
    ],
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

    @initialize(**drawn(["limits", "worker_reads", "client_reads"]))
    def begin(self, limits: dict[str, int], worker_reads: bool, client_reads: bool) -> None:
        limit(limits)  # whoever runs this puts them back
        self.world = World()
        self.world.connect("fine", worker_reads, client_reads)
        self.chance = random.Random(0)

    def _pair(self, at: int, fits: Callable[[Pair], object] = lambda pair: True) -> Pair | None:
        pairs = [pair for pair in self.world.pairs if fits(pair)]
        return pairs[at % len(pairs)] if pairs else None

    def _work(self, nth: int, fits: Callable[[Work], object] = lambda work: True) -> Work | None:
        works = [work for work in self.world.works if not work.outcomes and fits(work)]
        return works[nth % len(works)] if works else None

    def _shape(self, shape: Callable[[int, int], Shape]) -> Shape:
        return shape(bulk.INLINE, bulk.WINDOW)

    @command("manner", "worker_reads", "client_reads", when=lambda self: len(self.world.pairs) < 4)
    def connect(self, manner: Any, worker_reads: bool, client_reads: bool) -> None:
        self.world.connect(manner, worker_reads, client_reads)

    @command("at", "form", "shape", "retries", "moves", "context", "several")
    def submit(
        self, at: int, form: FunctionForm, shape: Any, retries: int, moves: int, context: int, several: int
    ) -> None:
        pair = self._pair(at, lambda pair: pair.takes_calls)
        for _ in range(several):
            work = self.world.make(form, self._shape(shape), retries, moves, context)
            if pair is not None:
                self.world.place(work, pair)

    @command("nth", "advance", "shape", "times", "context", "several")
    def step(self, nth: int, advance: Any, shape: Any, times: int, context: int, several: int) -> None:
        work = self._work(nth, lambda work: work.form.generator)
        for _ in range(several if work is not None else 0):
            assert work is not None
            self.world.step(work, advance, self._shape(shape), times, context)

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

    @command("at", "nth", "really")
    def cancel_unsent(self, at: int, nth: int, really: bool) -> None:
        pair = self._pair(at, lambda pair: pair.out.works())
        if really and pair is not None:
            works = pair.out.works()
            self.world.cancel(works[nth % len(works)])

    @command("at", "nth")
    def cancel_nearly_sent(self, at: int, nth: int) -> None:
        """One whose arguments are being lent, or lie there, or have gone in chunks."""
        pair = self._pair(at, lambda pair: pair.out.nearly())
        if pair is not None:
            works = pair.out.nearly()
            self.world.cancel(works[nth % len(works)])

    @command("nth", "really")
    def abandon(self, nth: int, really: bool) -> None:
        work = self._work(nth)
        if really and work is not None:
            self.world.abandon(work)

    @command("at", "peers")
    def introduce(self, at: int, peers: Any) -> None:
        pair = self._pair(at, lambda pair: not pair.out.over)
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

    @command("at", "nth", "shape", "swallowed", "context", "several")
    def worker_yields(self, at: int, nth: int, shape: Any, swallowed: bool, context: int, several: int) -> None:
        pair = self._pair(at, lambda pair: pair.open)
        if pair is not None:
            generators = [number for number, work in pair.open.items() if work.form.generator]
            for _ in range(several if generators else 0):
                number = generators[nth % len(generators)]
                self.world.worker_yields(pair, number, self._shape(shape), swallowed, context)

    @command("at", "nth", "shape", "context")
    def worker_yields_again(self, at: int, nth: int, shape: Any, context: int) -> None:
        """One that has ended, or was never there."""
        pair = self._pair(at)
        if pair is not None and nth not in pair.open:
            self.world.worker_yields(pair, nth, self._shape(shape), False, context)

    @command("at", "nth", "kind", "shape", "swallowed", "context")
    def worker_answers(self, at: int, nth: int, kind: str, shape: Any, swallowed: bool, context: int) -> None:
        pair = self._pair(at, lambda pair: pair.open)
        if pair is not None:
            number = list(pair.open)[nth % len(pair.open)]
            self.world.worker_answers(pair, number, kind, self._shape(shape), swallowed, context)

    @command("at", "kind", "context")
    def worker_answers_all(self, at: int, kind: str, context: int) -> None:
        pair = self._pair(at, lambda pair: pair.open)
        for number in list(pair.open) if pair is not None else ():
            assert pair is not None
            self.world.worker_answers(pair, number, kind, 3, False, context)

    @command("at", "nth", "kind", "context")
    def worker_answers_again(self, at: int, nth: int, kind: str, context: int) -> None:
        """One that has ended, or was never there."""
        pair = self._pair(at)
        if pair is not None and nth not in pair.open:
            self.world.worker_answers(pair, nth, kind, 3, False, context)

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

    @command("at", "side", "several")
    def lend(self, at: int, side: SideName, several: int) -> None:
        """A shell begins to write what is to be lent."""
        pair = self._pair(at, lambda pair: pair.side(side).waiting)
        for _ in range(several if pair is not None else 0):
            assert pair is not None
            self.world.lend(pair, side)

    @command("at", "side", "nth", "fails", "several")
    def written(self, at: int, side: SideName, nth: int, fails: bool, several: int) -> None:
        """It has done so, in any order, before or after the break."""
        for _ in range(several):
            pair = self._pair(at, lambda pair: pair.side(side).writing or pair.side(side).late)
            if pair is not None:
                self.world.written(pair, side, nth, fails)

    @command("at", "side", "nth", "several")
    def read(self, at: int, side: SideName, nth: int, several: int) -> None:
        for _ in range(several):
            if (pair := self._pair(at, lambda pair: pair.side(side).reads)) is not None:
                self.world.read(pair, side, nth)

    @command("at", "side")
    def close(self, at: int, side: SideName) -> None:
        if (pair := self._pair(at)) is not None:
            self.world.close(pair, side)

    @command("at")
    def all_arrives(self, at: int) -> None:
        """A stream on which nothing waits."""
        pair = self._pair(at)
        if pair is None:
            return
        self.world.shell(pair, "client")
        while self.world.client_takes(pair):
            pass
        while pair.to_worker:
            self.world.worker_hears(pair)
        self.world.shell(pair, "worker")
        while self.world.worker_takes(pair):
            pass
        while pair.to_client:
            self.world.client_hears(pair)

    @command("at", "kept", "kept_back", "really")
    def client_breaks(self, at: int, kept: int, kept_back: int, really: bool) -> None:
        if really and (pair := self._pair(at, lambda pair: not pair.out.over)) is not None:
            self.world.client_breaks(pair)
            self.world.lose(pair, kept, kept_back)

    @command("at", "kept", "kept_back", "really")
    def worker_breaks(self, at: int, kept: int, kept_back: int, really: bool) -> None:
        if really and (pair := self._pair(at, lambda pair: not pair.back.over)) is not None:
            self.world.worker_breaks(pair)
            self.world.lose(pair, kept, kept_back)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.tidy()
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish(self.chance.choice)


MOVES = {
    "submit": 3,
    "step": 3,
    "client_takes": 6,
    "worker_hears": 6,
    "worker_yields": 3,
    "worker_answers": 6,
    "worker_takes": 6,
    "client_hears": 6,
    "lend": 3,
    "written": 4,
    "read": 4,
}


@pytest.mark.usefixtures("small")
def test_w40a_any_interleaving_leaves_each_call_in_one_outcome() -> None:
    run_state_machine_as_test(
        Conversations,
        settings=settings(
            max_examples=int(410 * SCALE**1.4),
            stateful_step_count=50,
            report_multiple_bugs=False,  # one at a time: shrinking is the slow part
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )


@pytest.fixture(params=range(int(300 * SCALE**1.5)))
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    return random.Random(request.param)


@pytest.mark.usefixtures("small")
def test_w40a_a_long_walk(chance: random.Random) -> None:
    """The same steps by plain chance: nothing is shrunk, and a second goes ten times as far."""
    machine = Conversations()
    machine.begin(chance.choice(LIMITS), chance.random() < 0.5, chance.random() < 0.5)
    machine.chance = chance
    weights = [MOVES.get(name) or chance.choice((0, 1, 1, 3)) for name, _, _ in COMMANDS]
    for name, names, when in chance.choices(COMMANDS, weights, k=500):
        if when(machine):
            getattr(machine, name)(**{one: chance.choice(CHOICES[one]) for one in names})
            machine.everything_adds_up()
    machine.teardown()


UNBROKEN = [one for one in COMMANDS if not one[0].endswith("_breaks")]


@pytest.mark.parametrize("seed", range(int(2 + 20 * SCALE)))
@pytest.mark.usefixtures("small")
def test_w40a_a_break_at_any_moment(seed: int) -> None:
    """The same walk again and again, cut off after one more step each time, by either end or by both."""
    length = 120
    for cut_off in range(seed % 4, length, 4):
        chance = random.Random(seed)
        machine = Conversations()
        machine.begin(LIMITS[seed % len(LIMITS)], True, True)
        machine.chance = chance
        weights = [MOVES.get(name, 1) for name, _, _ in UNBROKEN]
        for name, names, when in chance.choices(UNBROKEN, weights, k=length)[:cut_off]:
            if when(machine):
                getattr(machine, name)(**{one: chance.choice(CHOICES[one]) for one in names})
        machine.everything_adds_up()
        for nth, pair in enumerate(machine.world.pairs):
            ends = [machine.world.client_breaks, machine.world.worker_breaks]
            for end in (ends[:1], ends[1:], ends, ends[::-1])[(cut_off + nth) % 4]:
                if not (pair.out if end == ends[0] else pair.back).over:
                    end(pair)
                    machine.everything_adds_up()
        machine.teardown()
