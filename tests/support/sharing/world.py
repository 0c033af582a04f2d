"""Processes that share one state through a store that delays, doubles and loses whatever it may.

`World` plays the store: one text, the ids of members and who is gone, its clock, and what is under way. Each `Process`
has a clock of its own, a real `Link`, and a `Part`: what one kind of shared state does in a process. Nothing happens by
itself, so every order of events can be tried. `settle` delivers everything while the clock stands still, and fails if
that takes more messages than so few changes should cost. `drain` also lets time pass and ends what runs, until nothing
waits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from typing import Any, ClassVar, Protocol

from headgate.core.clock import clock
from headgate.errors import StoreUnreachable, StoreWriteFailed
from headgate.sharing.link import Link, send_due
from headgate.sharing.protocol import Kind
from headgate.sharing.states import ClockOffset, Listener, Outcome, Seen, Step

KEY = "state"
MOST_MESSAGES = 2
"""How many messages each process may send, at most, for one thing that happens to any of them."""
MOST_ROUNDS = 2000
"""How often time may pass or something may end before all is done."""


class Part(Protocol):
    """What one kind does in one process: a `Sharer`, and what a test can do to it.

    To add a kind to the machine, write one of these. `check` and `check_at_rest` compare all parts with a naive count.
    """

    actions: ClassVar[tuple[str, ...]]
    """What `act` understands. What is named twice is done twice as often."""
    survives_loss: ClassVar[bool] = True
    """May the text be lost while processes live?"""
    process: Process
    link: Link

    def act(self, what: str, which: int) -> None:
        """Do one thing that a program may do. `which` chooses among tasks, tenants, amounts."""

    @property
    def is_due(self) -> bool:
        """Would the event loop, or a timer, call `turn` by now?"""
        return False

    def turn(self) -> None:
        """Do what the event loop or a timer does."""

    def next_at(self) -> float:
        """When a timer is due, on the clock of the process; infinite if there is none."""
        return math.inf

    @property
    def waits(self) -> bool:
        """Does anything wait?"""
        ...

    def end_one(self) -> bool:
        """End something that runs. False if nothing does."""
        return False

    def want_all(self) -> None:
        """Want all that there is: the world is at rest, and nothing runs."""

    def has_all(self) -> bool:
        """Did this process get it?"""
        ...

    # -- what the link asks, where most kinds need nothing -------------------------------------------------------------

    def message(self, now: float, *, looks: bool) -> Any | None: ...

    def take(self, said: Any, told: Any, offset: ClockOffset, now: float, *, is_current: bool) -> bool: ...

    def failed(self, said: Any, error: BaseException) -> None: ...

    def forget(self, now: float, *, forked: bool = False) -> None: ...

    def set_alone(self, now: float, *, alone: bool, why: Exception | None = None) -> None: ...

    def carry_out(self) -> None: ...

    def warn(self, what: str) -> None:
        if not isinstance(self.process.failure, StoreWriteFailed):
            raise AssertionError(f"a warning: {what}")


class Game(Protocol):
    """One kind, and the naive count of what its parts do."""

    def part(self, process: Process) -> Part:
        """A part of a process that joins."""
        ...

    def check(self, world: World) -> None:
        """Fail if the parts do more than they may. After each step."""

    def check_at_rest(self, world: World) -> None:
        """Fail if the parts do not agree. Everything that was said has arrived."""

    def lost(self, world: World) -> None:
        """Note that the text was lost."""


class Answer(Future[Any]):
    """A future that raises what goes wrong when its answer is taken, where others log it."""

    def __init__(self) -> None:
        super().__init__()
        self._thens: list[Callable[[Future[Any]], object]] = []

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        self._thens.append(fn)

    def arrive(self, reply: Any, error: Exception | None = None) -> None:
        """Have this answer, or this error, taken."""
        if error is None:
            self.set_result(reply)
        else:
            self.set_exception(error)
        for then in self._thens:
            then(self)


class Call:
    """A step under way: to the store, and, once it has run, back."""

    __slots__ = ("future", "has_run", "reply", "step")

    def __init__(self, step: Step) -> None:
        self.future = Answer()
        self.step = step
        self.has_run = False
        self.reply: Any = None


class Process:
    """One process: its membership, its clock, and what is under way. Implements `SharedState`."""

    is_closed = False

    def __init__(self, world: World, ahead: float) -> None:
        self.world = world
        self.ahead = ahead
        """How far the clock of the store is ahead of its own."""
        self.member = world.new_id()
        self.deadline = math.inf
        self.calls: list[Call] = []
        self.is_woken = False
        """Is a wake-up under way?"""
        self.is_cut_off = False
        self.failure: Exception | None = None
        """What the store answered last instead of an answer."""
        self._listener: Listener | None = None
        self.part = world.game.part(self)

    @property
    def is_gone(self) -> bool:
        """Is its lease over? It may not know yet."""
        return self.member in self.world.gone

    @property
    def listener(self) -> Listener:
        assert self._listener is not None
        return self._listener

    def link(self, kind: Kind[Any], sharer: Any, **options: Any) -> Link:
        """The link of a part."""
        return Link(sharer, self, KEY, kind, "nothing is shared any more", **options)

    def connect(self, timeout: float) -> None:
        """The world always answers some day."""

    def transact(self, key: str, step: Step, *, durable: bool = False) -> Future[Any]:
        self.world.sent += 1
        call = Call(step)
        self.calls.append(call)
        return call.future

    def listen(self, key: str, listener: Listener) -> Callable[[], None]:
        self._listener = listener
        return lambda: None


class World:
    """A store of one text, and the processes that use it."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.now = 10_000.0
        self.text: str | None = None
        self.gone: set[str] = set()
        self.unheard: set[str] = set()
        self.processes: list[Process] = []
        self.is_lossless = True
        """Was no wake-up lost, so that nobody needs a heartbeat?"""
        self.sent = 0
        """How many messages there were."""
        self.changes = 0
        """How many things have happened since all was at rest that may be worth messages."""
        self._settled_at = 0
        self._parsed: tuple[str | None, dict[str, Any]] = None, {}
        self._ids = count(1)
        self._tokens = count(1)
        self._at: Process | None = None
        self._clock = ExitStack()
        self._clock.enter_context(clock.replaced(now=self._local, token=lambda: f"t{next(self._tokens)}"))

    def close(self) -> None:
        """Give the clock back."""
        self._clock.close()

    def _local(self) -> float:
        return self.now if self._at is None else self.now - self._at.ahead

    def new_id(self) -> str:
        return f"m{next(self._ids)}"

    def state(self) -> dict[str, Any]:
        """The text, parsed."""
        if self._parsed[0] is not self.text:
            self._parsed = self.text, {} if self.text is None else json.loads(self.text)
        return self._parsed[1]

    def living(self) -> Iterator[Process]:
        """The processes whose lease stands."""
        return (one for one in self.processes if not one.is_gone)

    # -- what processes do ---------------------------------------------------------------------------------------------

    def join(self, ahead: float) -> Process:
        """Start a process. It is used once its first message was answered."""
        self._at = None
        process = Process(self, ahead)
        self.processes.append(process)
        self._enter(process)
        process.part.link.start()
        self.run(process)
        self.answer(process)
        return process

    def _enter(self, process: Process) -> None:
        self._at = process
        self.changes += 1

    def act(self, process: Process, what: str, which: int) -> None:
        """Have a program do something."""
        self._enter(process)
        process.part.act(what, which)
        send_due()

    def turn(self, process: Process) -> None:
        """Have its event loop, or a timer, do what is due."""
        self._at = process
        if process.part.is_due:
            process.part.turn()
            send_due()

    def leave(self, process: Process) -> None:
        """Have it take part no longer; its last message arrives."""
        self._enter(process)
        process.part.link.leave()
        for call in process.calls:
            if not call.has_run:
                self._run(process, call)
        self.processes.remove(process)

    def crash(self, process: Process) -> None:
        """Kill it."""
        self.processes.remove(process)
        self.expire(process)

    def expire(self, process: Process) -> None:
        """Let its lease be over. It does not know, but for its own deadline."""
        self.changes += 1
        process.deadline = min(process.deadline, self.now - process.ahead)
        self.gone.add(process.member)
        self.unheard.discard(process.member)
        for one in self.processes:
            one.is_woken = True

    def notice(self, process: Process) -> None:
        """Let it know that its lease was lost, and take part as another member."""
        if process.is_gone:
            self._enter(process)
            process.member, process.deadline = self.new_id(), math.inf
            process.listener.lost()
            send_due()

    # -- what the store does -------------------------------------------------------------------------------------------

    def run(self, process: Process, *, before: float = 0.0, after: float = 0.0, how: str = "once") -> None:
        """Run its next step. Time passes before the clock of the store is read, and after that.

        It is run "once", or "twice" because the answer to a COMMIT was lost; or its transaction was in "conflict" with
        another, so what came of the first run is thrown away.
        """
        call = next((one for one in process.calls if not one.has_run), None)
        if call is not None and not process.is_cut_off:
            self.notice(process)
            self._run(process, call, before, after, how)

    def _run(self, process: Process, call: Call, before: float = 0.0, after: float = 0.0, how: str = "once") -> None:
        self._at = process
        self.now += before
        seen = Seen(self.now, process.member, self.gone.__contains__, None, frozenset(self.unheard))
        self.now += after
        outcome: Outcome = call.step(self.text, seen)
        if how == "conflict":
            again: Outcome = call.step(self.text, seen)
            assert outcome == again, "a step is not pure"
        self._commit(process, outcome)
        if how == "twice":
            outcome = call.step(self.text, seen)
            self._commit(process, outcome)
        self.unheard.discard(process.member)
        call.has_run, call.reply = True, outcome.reply

    def _commit(self, process: Process, outcome: Outcome) -> None:
        if outcome.state is not None:
            self.text = outcome.state
        for one in self.processes:
            if one.member in outcome.wakes and one is not process:
                one.is_woken = True

    def answer(self, process: Process) -> None:
        """Let the answer to its oldest message arrive."""
        if process.calls and process.calls[0].has_run:
            self._at = process
            call = process.calls.pop(0)
            process.failure = None
            call.future.arrive(call.reply)
            send_due()

    def fail(self, process: Process) -> None:
        """Have the store say that it cannot write, before it has run its oldest message, or when its answer is lost."""
        if process.calls:
            self._enter(process)
            process.failure = StoreWriteFailed("the disk is full")
            process.calls.pop(0).future.arrive(None, process.failure)
            send_due()
            self.is_lossless = False  # it is sent again when there is news, or with the next heartbeat

    def wake(self, process: Process) -> None:
        """Deliver a wake-up, whether there was one or not: a heartbeat is one, too."""
        process.is_woken = False
        self._at = process
        if not process.is_cut_off:
            process.listener.woken()
            send_due()

    def lose_wake(self, process: Process) -> None:
        """Lose the wake-up that is under way to it."""
        if process.is_woken:
            process.is_woken = self.is_lossless = False

    def cut_off(self, process: Process) -> None:
        """Have it not reach the store any more."""
        self._enter(process)
        process.is_cut_off = True
        process.listener.unreachable(StoreUnreachable("no answer"))
        send_due()

    def reconnect(self, process: Process) -> None:
        """Let it reach the store again."""
        if process.is_cut_off:
            self._enter(process)
            process.is_cut_off, process.is_woken = False, True

    def lose_text(self) -> None:
        """Lose the text, as somebody does who deletes the file of a store; all that live may hold something."""
        self.changes += 1
        self.text, self.unheard = None, {one.member for one in self.living()}
        self.game.lost(self)
        for one in self.processes:
            one.is_woken = True  # the connection was lost

    # -- until nothing happens any more --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Deliver everything while the clock stands still. Fails if there are too many messages."""
        for one in self.processes:
            self.reconnect(one)
            self.notice(one)
        self._deliver()
        if not self.is_lossless:
            self.heartbeat()
            self._deliver()
            self.is_lossless = True
        self.game.check_at_rest(self)
        self.changes, self._settled_at = 0, self.sent

    def heartbeat(self) -> None:
        """Have all look."""
        for one in self.processes:
            self.changes += 1
            one.is_woken = True

    def _deliver(self) -> None:
        busy = True
        while busy:
            busy = False
            for one in self.processes:
                self._at = one
                if one.part.is_due or one.is_woken or one.calls:
                    busy = True
                    self.turn(one)
                    if one.is_woken:
                        self.wake(one)
                    self.run(one)
                    self.answer(one)
                    self.game.check(self)
            each = (self.sent - self._settled_at) / max(1, len(self.processes))
            assert each <= MOST_MESSAGES * (self.changes + 1), f"{each:g} messages each after {self.changes} changes"

    def drain(self) -> None:
        """Deliver everything, end all that runs, and let time pass, until nothing waits any more.

        Nobody looks at a heartbeat, unless a wake-up was lost before. So what still waits was never woken.
        """
        for _ in range(MOST_ROUNDS):
            self.settle()
            if self._end_one():
                continue
            if not any(one.part.waits for one in self.processes):
                return
            self._pass_time()
        raise AssertionError(f"it never comes to an end: {self.text}")

    def _end_one(self) -> bool:
        for one in self.processes:
            self._at = one
            if one.part.end_one():
                self.changes += 1
                send_due()
                return True
        return False

    def _pass_time(self) -> None:
        times = []
        for one in self.processes:
            self._at = one
            times.append(one.part.next_at() + one.ahead)
        soonest = min(times)
        assert soonest < math.inf, f"something waits, nothing runs and nobody was woken: {self.text}"
        self.now = max(self.now, soonest) + 1e-6
        self.changes += sum(one <= self.now for one in times)

    def give_all_to_a_newcomer(self) -> None:
        """Have a process join that wants all there is. It gets it, so nothing was held for ever."""
        newcomer = self.join(0.0)
        self._enter(newcomer)
        newcomer.part.want_all()
        send_due()
        for _ in range(MOST_ROUNDS):
            self.settle()
            if newcomer.part.has_all():
                return
            self._pass_time()
        raise AssertionError(f"something is held for ever: {self.text}")
