"""Which calls may run side by side on a worker. Pure.

A call that was on a worker when it died may be what killed it, or may have died with what did. So it is run again with
fewer neighbours, and on its last permitted attempt alone: then a call that crashes takes nobody along. It is not
enough that its client sends nothing else to that worker, because others do. So the client *asks* the worker for a
reservation before it sends such a call, and the worker *grants* it when enough of its calls have ended. Nothing of the
call is there before: a worker that dies while a client waits for a reservation costs the call no attempt.

While somebody waits, and while such a call runs, the worker is *closed*: it refuses other calls, which go elsewhere or
wait until it is open. One rule keeps this from deadlock: a call that is made by a call which runs on this worker is
always admitted here. So whoever runs can finish, wherever the calls that it makes are refused. For the same reason
neither the callers of a call, which wait for it, nor generators that rest between two steps count as its neighbours.
And a call that is run again and was made by one that runs here does not wait for calls that wait for others themselves:
they may wait for one that wants to be alone as well. (They would be lost with it. Its client asks others first.)

A call with a reservation has ended, for its neighbours, when its client gives the reservation back: that tells that its
answer has arrived. The answer of a call that was run alone would otherwise be lost with the next call, if that crashes.

Asks are granted in their order; those of calls that are made by calls which run here pass the others, whose turn comes
when these have ended. An ask that has waited for very long for calls without a limit (see `isolation`) does not wait
for them any longer: they may never end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from headgate.workers.protocol.wire.wire_pb2 import Reserve, ToClient, ToWorker

if TYPE_CHECKING:
    from headgate.workers.server.client_stream import ClientStream


class RunningCallLike(Protocol):
    """What admission has to know about a call that runs on the worker."""

    @property
    def id(self) -> str:
        """The id of the task that this call runs."""
        ...

    @property
    def caller(self) -> str:
        """The id of the task that made this call; "" if no task did."""
        ...

    @property
    def rests(self) -> bool:
        """Is the call a generator that is between two steps?"""
        ...

    @property
    def waits(self) -> int:
        """The number of calls that it made and waits for."""
        ...


class Ask:
    """The request of a client for a reservation for one call."""

    __slots__ = ("caller", "max_calls", "number", "overdue", "released", "stream")

    def __init__(self, stream: ClientStream, number: int, caller: str, max_calls: int, overdue: bool = False) -> None:
        self.stream: ClientStream = stream
        """The stream of the client that asks; only compared here."""
        self.number: int = number
        """The number of the reservation in this stream."""
        self.caller: str = caller
        self.max_calls: int = max_calls
        """How many calls may run while it does, itself included."""
        self.overdue: bool = overdue
        """Has it waited for so long that it does not wait for calls without a limit?"""
        self.released: bool = False
        """Has the client given it back, or gone?"""


class Admission:
    """Decides which calls may begin, given those that run."""

    def __init__(self, running: Mapping[tuple[ClientStream, int], RunningCallLike]) -> None:
        self.waiting: list[Ask] = []
        """Requests that were not granted yet, in the order in which they came."""
        self.granted: dict[Ask, None] = {}
        """Granted reservations whose calls have not come yet."""
        self.limited: dict[RunningCallLike, Ask] = {}
        """Running calls with a reservation."""
        self.unconfirmed: dict[Ask, None] = {}
        """Reservations of calls that have ended, and whose clients have not given them back yet."""
        self._running = running
        self._known: dict[str, RunningCallLike] | None = None  # by id; None: it has to be looked up

    @property
    def active(self) -> bool:
        """Is there anything to decide? As a rule there is not, and every call may begin."""
        return bool(self.waiting or self.granted or self.limited or self.unconfirmed)

    @property
    def closed(self) -> bool:
        """Are calls refused that are not made by a running call?"""
        return bool(self.waiting) or not self._allows_another([])

    def admits(self, caller: str) -> bool:
        """Tell whether a call without a limit, made by this caller, may begin."""
        return not self.closed or caller in self._by_id()

    def ask(self, ask: Ask) -> None:
        """Add a reservation to the waiting ones; `grant` returns it when its call may begin."""
        self.waiting.append(ask)
        self._known = None  # nobody tells of the calls that begin and end while there is nothing to decide

    def grant(self) -> list[Ask]:
        """Grant the reservations that can be granted now: each is kept until its call begins or it is withdrawn."""
        made: list[Ask] = []
        stuck = False
        for ask in list(self.waiting):
            callers = self._callers(ask.caller)
            if (callers or not stuck) and self._may_begin(ask, callers):
                self.waiting.remove(ask)
                self.granted[ask] = None
                made.append(ask)
            elif not callers:
                stuck = True
        return made

    def begins(self, stream: ClientStream, number: int, call: RunningCallLike) -> bool:
        """Begin the call of a granted reservation. False: it was not granted."""
        for ask in self.granted:
            if ask.stream is stream and ask.number == number:
                del self.granted[ask]
                self.limited[call] = ask
                return True
        return False

    def ended(self, call: RunningCallLike) -> None:
        """Note that a call has ended. It is not among the running ones any more."""
        ask = self.limited.pop(call, None)
        if ask is not None and not ask.released:
            self.unconfirmed[ask] = None
        self._known = None

    def began(self) -> None:
        """Note that a call has begun. It is among the running ones."""
        self._known = None

    def withdraw(self, stream: ClientStream, number: int) -> None:
        """Give a reservation back. If its call runs, it continues."""
        self._release(lambda ask: ask.stream is stream and ask.number == number)

    def leave(self, stream: ClientStream) -> None:
        """Forget all that this client asked for."""
        self._release(lambda ask: ask.stream is stream)

    def _release(self, which: Callable[[Ask], bool]) -> None:
        self.waiting = [ask for ask in self.waiting if not which(ask)]
        self.granted = {ask: None for ask in self.granted if not which(ask)}
        self.unconfirmed = {ask: None for ask in self.unconfirmed if not which(ask)}
        for ask in self.limited.values():
            ask.released = ask.released or which(ask)

    # -- who is whose neighbour ----------------------------------------------------------------------------------------

    def _by_id(self) -> dict[str, RunningCallLike]:
        if self._known is None:
            self._known = {call.id: call for call in self._running.values()}
        return self._known

    def _callers(self, caller: str) -> list[RunningCallLike]:
        """Return the running call of this id, the call that made that one, and so on, as far as they run here."""
        known = self._by_id()
        found: list[RunningCallLike] = []
        while (call := known.get(caller)) is not None and call not in found:
            found.append(call)
            caller = call.caller
        return found

    def _neighbours(self, family: list[RunningCallLike], nested: bool) -> int:
        """Count the running calls outside this family, and the reservations without a running call.

        With `nested`, calls that wait for other calls are not counted.
        """
        running = (call for call in self._running.values() if not call.rests and not (nested and call.waits))
        return sum(call not in family for call in running) + len(self.granted) + len(self.unconfirmed)

    def _may_begin(self, ask: Ask, callers: list[RunningCallLike]) -> bool:
        if not ask.overdue and self._neighbours(callers, bool(callers)) >= ask.max_calls:
            return False
        return self._allows_another(callers)

    def _allows_another(self, callers: list[RunningCallLike]) -> bool:
        """Does every call with a limit allow one more call beside it, made by these callers?"""
        nested = bool(callers)
        for call, ask in self.limited.items():
            if call not in callers and self._neighbours(self._family(call), nested) + 1 >= ask.max_calls:
                return False
        apart = (*self.granted, *self.unconfirmed)
        return all(self._neighbours(self._callers(ask.caller), nested) < ask.max_calls for ask in apart)

    def _family(self, call: RunningCallLike) -> list[RunningCallLike]:
        """Return a call with its callers and with all calls that it made, directly or through others."""
        made = [other for other in self._running.values() if call in self._callers(other.caller)]
        return [call, *self._callers(call.caller), *made]


class Reservations:
    """The reservations of one session, as the client knows them."""

    def __init__(self) -> None:
        self.granted: list[int] = []
        """Numbers of the reservations that were granted, until the connection takes them."""
        self.closed: bool = False
        """Does the worker refuse other calls?"""
        self.unsaid: bool = False
        """Is there something to tell the worker?"""
        self._asks: list[Reserve] = []
        self._released: list[int] = []
        self._last = 0

    def ask(self, max_calls: int, caller: str, overdue: bool) -> int:
        """Ask for a reservation for a call; returns its number."""
        self._last += 1
        self._asks.append(Reserve(number=self._last, max_calls=max_calls, caller=caller, overdue=overdue))
        self.unsaid = True
        return self._last

    def release(self, number: int) -> None:
        """Give up a reservation, which is not needed any more."""
        self._released.append(number)
        self.unsaid = True

    def write(self, message: ToWorker) -> None:
        """Write the new requests and the given up reservations into a message."""
        message.reserves.extend(self._asks)
        message.released.extend(self._released)
        self._asks, self._released, self.unsaid = [], [], False

    def receive(self, message: ToClient) -> None:
        """Read what a message of the worker says about reservations."""
        if message.granted:
            self.granted.extend(message.granted)
        if message.HasField("reserved"):
            self.closed = message.reserved
