"""W92: which calls may run side by side on a worker, against a model that is obviously right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headgate.workers.client.isolation import Losses, max_calls_after
from headgate.workers.protocol.wire.wire_pb2 import Reserve, ToClient, ToWorker
from headgate.workers.server.admission import Admission, Ask, Reservations
from headgate.workers.server.reserved_calls import ReservedCalls
from tests.conftest import SCALE


class Call:
    """One that runs."""

    def __init__(self, number: int, caller: Call | None, most: int) -> None:
        self.id = f"c/{number}"
        self.made_by = caller
        self.most = most
        self.rests = False
        self.waits = 0
        self.order = 0

    @property
    def caller(self) -> str:
        return "" if self.made_by is None else self.made_by.id

    def __repr__(self) -> str:
        return self.id


def line(call: Call) -> list[Call]:
    found = [call]
    while found[-1].made_by is not None:
        found.append(found[-1].made_by)
    return found


class Machine(RuleBasedStateMachine):
    """Calls begin, end, rest, and ask for room, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, Call] = {}
        self.admission = Admission(self.running)
        self.asks: dict[Ask, Call | None] = {}  # who waits or was granted room, and who makes the call
        self.numbers = 0
        self.begun = 0
        self.ordered: list[Ask] = []  # of calls that nobody here makes, in the order in which they asked

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def calls(self) -> list[Call]:
        return list(self.running.values())

    def grant(self) -> None:
        made = [call.made_by for call in self.calls()] + list(self.asks.values())
        for call in self.calls():
            call.waits = made.count(call)
        waiting = [ask for ask in self.admission.waiting if ask in self.ordered]
        granted = self.admission.grant()
        outside = [ask for ask in granted if ask in self.ordered]
        assert outside == waiting[: len(outside)], "in their order"
        for place, ask in enumerate(granted):
            callers = [] if (caller := self.asks[ask]) is None else line(caller)
            others = [call for call in self.calls() if not call.rests and call not in callers]
            others = [call for call in others if not (callers and call.waits)]
            reserved = (*self.admission.granted, *self.admission.unconfirmed)
            kept = [other for other in reserved if other not in granted[place:]]  # those after it came after it
            assert ask.overdue or len(others) + len(kept) < ask.max_calls, (ask.max_calls, others, kept)

    def begin(self, number: int, call: Call) -> None:
        told = self.admission.active  # nobody tells of calls that begin while there is nothing to decide
        self.running[number] = call
        self.begun += 1
        call.order = self.begun
        if told:
            self.admission.began()
            self.grant()

    @rule(data=st.data())
    def comes(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from([None, *self.calls()]))
        call = Call(self.number(), caller, 0)
        expected = caller is not None or not self.admission.closed
        assert self.admission.admits(call.caller) == expected
        if expected:
            self.begin(self.numbers, call)

    @rule(data=st.data(), most=st.integers(1, 4), overdue=st.booleans())
    def asks_for_room(self, data: st.DataObject, most: int, overdue: bool) -> None:
        caller = data.draw(st.sampled_from([None, *self.calls()]))
        ask = Ask(self, self.number(), "" if caller is None else caller.id, most, overdue and most > 1)
        self.asks[ask] = caller
        if caller is None:
            self.ordered.append(ask)
        self.admission.ask(ask)
        self.grant()

    @precondition(lambda self: self.admission.granted)
    @rule(data=st.data())
    def begins_with_room(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(list(self.admission.granted)))
        caller = self.asks.pop(ask)
        call = Call(ask.number, caller, 0 if ask.overdue else ask.max_calls)
        assert self.admission.begins(self, ask.number, call)
        assert not self.admission.begins(self, ask.number, call), "once"
        self.begin(ask.number, call)

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def withdraws(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(list(self.asks)))
        del self.asks[ask]
        self.admission.withdraw(object(), ask.number)
        self.admission.withdraw(self, ask.number)
        self.grant()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        """One that waits for nobody."""
        waited_for = [call.made_by for call in self.calls()] + list(self.asks.values())
        number = data.draw(st.sampled_from([n for n, call in self.running.items() if call not in waited_for] or [0]))
        call = self.running.pop(number, None)
        if call is not None:
            self.admission.ended(call)
            self.grant()

    @precondition(lambda self: self.admission.unconfirmed or self.admission.limited)
    @rule(data=st.data())
    def gives_back(self, data: st.DataObject) -> None:
        """The client has the answer; or it has the first item of a generator, which goes on."""
        asks = [*self.admission.unconfirmed, *self.admission.limited.values()]
        self.admission.withdraw(self, data.draw(st.sampled_from(asks)).number)
        self.grant()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def rests(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls()))
        call.rests = not call.rests
        self.grant()

    @rule()
    def everybody_goes_on(self) -> None:
        """Whoever runs can finish, and then whoever waits has room: nothing is ever stuck."""
        for _ in range(1000):
            for ask in list(self.admission.unconfirmed):
                self.admission.withdraw(self, ask.number)
                self.grant()
            for ask in list(self.admission.granted):
                caller = self.asks.pop(ask)
                call = Call(ask.number, caller, 0 if ask.overdue else ask.max_calls)
                self.admission.begins(self, ask.number, call)
                self.begin(ask.number, call)
            waited_for = [call.made_by for call in self.calls()] + list(self.asks.values())
            free = [number for number, call in self.running.items() if call not in waited_for]
            if not free and not self.admission.unconfirmed:
                break
            if free:
                self.admission.ended(self.running.pop(free[0]))
                self.grant()
        assert not self.running
        assert not self.admission.waiting
        assert not self.admission.active
        assert not self.admission.closed

    @invariant()
    def nobody_joins_one_that_is_to_be_alone(self) -> None:
        """Those it was let in with are looked at in `grant`. What calls that run here make, is always admitted."""
        for call in self.calls():
            strangers = [one for one in self.calls() if one.made_by is None and one.order > call.order]
            assert call.most != 1 or not strangers, (call, strangers)

    @invariant()
    def it_is_idle_when_nobody_asks(self) -> None:
        if not self.asks and not self.admission.unconfirmed and not any(call.most for call in self.calls()):
            limited = [call for call in self.admission.limited if call in self.calls()]
            assert bool(limited) == self.admission.active


Machine.TestCase.settings = settings(max_examples=max(20, int(300 * SCALE)), stateful_step_count=30)
TestAdmission = Machine.TestCase


class UnlimitedCall(Call):
    def __init__(self, number: int, caller: Call | None = None) -> None:
        super().__init__(number, caller, 0)


def test_w92_one_that_is_alone_is_alone() -> None:
    running: dict[Any, Any] = {1: UnlimitedCall(1), 2: UnlimitedCall(2)}
    admission = Admission(running)
    assert admission.admits("")
    ask = Ask("session", 1, "", 1)
    admission.ask(ask)
    assert admission.grant() == []
    assert admission.closed
    assert not admission.admits("")
    assert admission.admits("c/1"), "what runs may call others"
    running[3] = UnlimitedCall(3, running[1])
    admission.began()
    for number in (3, 1, 2):
        assert admission.grant() == []
        admission.ended(running.pop(number))
    assert admission.grant() == [ask]
    assert not admission.begins("another session", 1, UnlimitedCall(4))
    running[4] = alone = UnlimitedCall(4)
    assert admission.begins("session", 1, alone)
    admission.began()
    assert admission.closed
    assert admission.admits("c/4")
    running[5] = UnlimitedCall(5, alone)
    admission.began()
    assert admission.admits("c/5")
    admission.ended(running.pop(5))
    admission.ended(running.pop(4))
    assert admission.closed, "its answer has not arrived, and would be lost with a call that crashes"
    admission.withdraw("session", 1)
    assert not admission.closed
    assert not admission.active


@pytest.mark.parametrize("first", ["client", "call"])
def test_w92_a_client_that_goes_away_leaves_no_reservation(first: str) -> None:
    running: dict[Any, Any] = {1: UnlimitedCall(1)}
    admission = Admission(running)
    admission.ask(Ask("session", 1, "", 2))
    [ask] = admission.grant()
    running[2] = UnlimitedCall(2)
    assert admission.begins("session", ask.number, running[2])
    admission.began()
    if first == "client":
        admission.leave("session")
        assert admission.active
    admission.ended(running.pop(2))
    if first == "call":
        assert admission.active
        admission.leave("session")
    assert not admission.active


@pytest.mark.parametrize("before", ["withdrawn", "ended"])
def test_w92_what_began_while_nobody_asked_may_call_others(before: str) -> None:
    running: dict[Any, Any] = {} if before == "ended" else {1: UnlimitedCall(1)}
    admission = Admission(running)
    admission.ask(Ask("s", 1, "", 1))
    if admission.grant():
        running[2] = UnlimitedCall(2)
        assert admission.begins("s", 1, running[2])
        admission.began()
        admission.ended(running.pop(2))
        assert admission.closed
    admission.withdraw("s", 1)
    assert not admission.active
    running[3] = UnlimitedCall(3)  # it is not told of: there is nothing to decide
    admission.ask(Ask("s", 2, "", 1))
    assert admission.admits("c/3")


def test_w92_callers_and_generators_at_rest_are_no_neighbours() -> None:
    caller = UnlimitedCall(1)
    generator = UnlimitedCall(2)
    generator.rests = True
    running: dict[Any, Any] = {1: caller, 2: generator}
    admission = Admission(running)
    outer, inner = Ask("s", 1, "", 1), Ask("s", 2, "c/1", 1)
    admission.ask(outer)
    admission.ask(inner)
    assert admission.grant() == [inner], "its caller waits for it, and so must not be waited for"
    running[3] = UnlimitedCall(3, caller)
    assert admission.begins("s", 2, running[3])
    admission.began()
    assert admission.grant() == []
    admission.ended(running.pop(3))
    admission.ended(running.pop(1))
    assert admission.grant() == []
    admission.withdraw("s", 2)
    assert admission.grant() == [outer]


def test_w92_room_for_some() -> None:
    running: dict[Any, Any] = {n: UnlimitedCall(n) for n in range(5)}
    admission = Admission(running)
    asks = [Ask("s", n, "", 3) for n in range(2)]
    for ask in asks:
        admission.ask(ask)
    for n in range(2):
        admission.ended(running.pop(n))
        assert admission.grant() == []
    admission.ended(running.pop(2))
    assert admission.grant() == asks[:1], "two others and itself"
    running[5] = UnlimitedCall(5)
    assert admission.begins("s", 0, running[5])
    admission.began()
    admission.leave("s")
    assert admission.closed, "no more than two others"
    admission.ended(running.pop(3))
    assert not admission.closed


def test_w92_one_that_begins_is_a_neighbour_of_those_who_wait() -> None:
    """Also in the moment between its room and its place among the running calls."""
    running: dict[Any, Any] = {}
    granted: list[int] = []
    server: Any = SimpleNamespace(call_soon_threadsafe=lambda tell, asks, closed: tell(asks, closed))
    reserved = ReservedCalls(
        running, server, lambda asks, closed: granted.extend(ask.number for ask in asks), lambda: None
    )
    for number, most in ((1, 2), (2, 1)):
        reserved.ask("session", [Reserve(number=number, max_calls=most)], ())
        reserved.process_requests()
    assert granted == [1], "the second is to be alone"
    begins: Any = UnlimitedCall(1)
    begins.stream, begins.begun = "session", SimpleNamespace(reservation=1, caller="")
    assert reserved.admits(begins)
    assert granted == [1], "it begins now"
    running[1] = begins
    reserved.began()
    assert granted == [1]
    reserved.ended(running.pop(1))
    assert granted == [1], "its client has not heard of it"
    reserved.ask("session", (), [1])
    reserved.process_requests()
    assert granted == [1, 2]


def test_w92_one_that_has_waited_for_long_does_not_wait_for_what_may_never_end() -> None:
    running: dict[Any, Any] = {1: UnlimitedCall(1)}
    admission = Admission(running)
    late = Ask("s", 1, "", 1, overdue=True)
    admission.ask(late)
    assert admission.grant() == [late]
    running[2] = UnlimitedCall(2)
    assert admission.begins("s", 1, running[2])
    admission.ask(another := Ask("s", 2, "", 1, overdue=True))
    admission.began()
    assert admission.grant() == [], "but for one that is to be alone it does"
    admission.ended(running.pop(2))
    admission.withdraw("s", 1)
    assert admission.grant() == [another]


def test_w92_what_a_session_says_and_hears_of_room() -> None:
    reservations = Reservations()
    assert not reservations.unsaid
    assert (reservations.ask(1, "c/1", False), reservations.ask(3, "", True)) == (1, 2)
    reservations.release(1)
    assert reservations.unsaid
    message = ToWorker()
    reservations.write(message)
    said = [(one.number, one.max_calls, one.caller, one.overdue) for one in message.reserves]
    assert said == [(1, 1, "c/1", False), (2, 3, "", True)]
    assert list(message.released) == [1]
    assert not reservations.unsaid
    reservations.receive(ToClient(granted=[2], reserved=True))
    assert (reservations.granted, reservations.closed) == ([2], True)
    reservations.receive(ToClient())
    assert reservations.closed
    reservations.receive(ToClient(reserved=False))
    assert not reservations.closed


def test_w92_fewer_neighbours_each_time_and_none_at_last() -> None:
    assert max_calls_after(0, 1, 40) == 1
    assert [max_calls_after(0, 3, 40), max_calls_after(21, 2, 40), max_calls_after(11, 1, 40)] == [21, 11, 1]
    assert max_calls_after(0, 2, 0) == 1
    assert max_calls_after(1, 5, 40) == 1


class Request:
    max_calls = 0

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def test_w92_tasks_that_were_lost_are_remembered_until_their_last_attempt() -> None:
    losses = Losses()
    lost: Any = Request("pool/1")
    losses.limit(lost)
    assert (lost.max_calls, bool(losses)) == (0, False)
    losses.note("pool/1", 2, 10)
    assert "pool/1" in losses
    losses.limit(lost)
    assert lost.max_calls == 6
    losses.limit(lost)
    assert lost.max_calls == 1, "it raised in between: this is its last attempt"
    losses.note("pool/1", 0, 10)
    assert not losses
