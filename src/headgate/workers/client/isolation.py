"""Where a call runs that was on a worker when it died: with fewer neighbours than it had, the last time alone.

The client asks a worker for room (see `admission`) and sends the call when that was granted. It asks the worker with
the fewest calls first, waits there for a while, and then asks the next one; each time around it waits twice as long.
Meanwhile such a worker takes no other calls, and so the first ones that wait long enough find it empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.core.clock import clock
from headgate.errors import DispatchTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headgate.resources.members import Use
    from headgate.workers.client.connection import Connection
    from headgate.workers.client.dispatcher import Dispatcher
    from headgate.workers.client.routine_call import Attempts, RoutineCall
    from headgate.workers.protocol.messages import Request

RESERVED = "reserved for a call that is run again after a loss"
"""The reason why a worker does not take a call."""
PATIENCE = 0.1
"""Seconds to wait for room on one worker, the first time around."""
OVERDUE = 600.0
"""Seconds after which a call does not wait any longer for calls that may never end."""
_MOST_LOSSES = 10_000


class Isolation:
    """What a call needs that is run again after its worker was lost."""

    def __init__(self, max_calls: int) -> None:
        self.max_calls: int = max_calls
        """How many calls may run on its worker while it does, itself included."""
        self.reservation: int = 0
        """The number of the reservation that it was granted."""
        self._patience = PATIENCE
        self._since = clock.now()
        self._full: set[str] = set()  # workers that had no room, this time around

    async def place(self, dispatcher: Dispatcher, call: RoutineCall, attempts: Attempts) -> Use:
        """Find a worker that has room for a call, and wait for it. Raises what placing any other call would."""
        until = attempts.until
        while True:
            connection = self._roomiest(dispatcher, call, attempts.tried)
            if connection is None and self._full:
                self._full.clear()
                self._patience *= 2
                continue
            if connection is None:
                await dispatcher.until_there_is_one(call, attempts)
                continue
            left = None if until is None else until - clock.now()
            patience = self._patience if left is None else max(0.0, min(left, self._patience))
            overdue = clock.now() - self._since > OVERDUE
            self.reservation = await connection.reserve(self.max_calls, call.caller, overdue, patience)
            if self.reservation:
                uid = connection.metadata.uid
                use = dispatcher.roster.take(uid, clock.now()) if dispatcher.roster.get(uid) is connection else None
                if use is not None:
                    return use
                connection.release(self.reservation)  # it has just left
            if until is not None and clock.now() >= until:
                raise DispatchTimeout(
                    f"{call.routine.tag} is run again after its worker was lost, and no worker had room for it (at "
                    f"most {self.max_calls - 1} other calls beside it) within dispatch_timeout={call.limit:g} s"
                )
            self._full.add(connection.metadata.uid)

    def _roomiest(self, dispatcher: Dispatcher, call: RoutineCall, tried: Mapping[str, str]) -> Connection | None:
        """Return the worker to ask for room: the one with the fewest calls. The caller's own worker comes behind those
        that are open, because what made this call would be lost with it, and before those that others wait for."""
        if not dispatcher.is_usable(call.routine):
            return None
        avoid = {*tried, *self._full, *dispatcher.openings.unable(call.routine.portable.thread)}
        if dispatcher.custom is not None:
            use = dispatcher.custom_choice(dispatcher.custom, call, avoid)
            if use is None:
                return None
            dispatcher.roster.ended(use)
            return dispatcher.roster.worker_of(use)
        there = (one for one in dispatcher.roster if one.metadata.uid not in avoid and one.can_take(call.is_bulky))

        def rank(one: Connection) -> tuple[int, int]:
            return 1 if one.metadata.uid == dispatcher.here else 2 * one.reserved, one.load

        return min(there, key=rank, default=None)


def after_loss(before: Isolation | None, attempts: int, neighbours: int) -> Isolation:
    """Make the isolation of a call that was lost with `neighbours` others, and may run `attempts` times more."""
    return Isolation(max_calls_after(0 if before is None else before.max_calls, attempts, neighbours))


def max_calls_after(before: int, attempts: int, neighbours: int) -> int:
    """Return how many calls may run where it runs next, itself included; `before`: as many as were allowed (0: any)."""
    if attempts <= 1:
        return 1
    most = neighbours if before == 0 else min(neighbours, before - 1)
    return most // 2 + 1


class Losses:
    """Requests that were on a worker when it died, and that their owner runs again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}  # by id: as `max_calls`, and how many attempts it has left

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def note(self, request_id: str, attempts: int, neighbours: int) -> None:
        """Note that a request was lost with `neighbours` others, and has so many attempts left."""
        before, _ = self._known.pop(request_id, (0, 0))
        if attempts > 0:
            self._known[request_id] = max_calls_after(before, attempts, neighbours), attempts
            while len(self._known) > _MOST_LOSSES:
                del self._known[next(iter(self._known))]

    def limit(self, request: Request) -> None:
        """Set with how many others a request is run again now, and count that as an attempt."""
        if request.request_id in self._known:
            most, attempts = self._known[request.request_id]
            self._known[request.request_id] = most, attempts - 1
            request.max_calls = 1 if attempts <= 1 else most


def max_calls_of(request: Request | None) -> Isolation | None:
    """Return the isolation that a request needs, if its owner runs it again after a loss."""
    return None if request is None or not request.max_calls else Isolation(request.max_calls)
