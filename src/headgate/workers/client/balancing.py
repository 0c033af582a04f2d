"""Which worker is next? Balancers, and the roster of workers they choose from.

A worker is a member of the same `Rotation` that resource pools use: a transient failure is a short, escalating
cooldown, and what is in flight is counted there. What differs from keys is said here: round robin goes by admission
order whatever the load (`Cycle`), and one that cools is tried last instead of never, because the caller would rather
wait a moment for a busy worker than be refused.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, runtime_checkable

from headgate.errors import InvalidType
from headgate.resources.members import ANY, Member, Use
from headgate.resources.model import Resource
from headgate.resources.pickers import Picker
from headgate.resources.rotation import Rotation
from headgate.resources.strategies import Strategy, round_robin
from headgate.workers.model import Report, Task, WorkerView

COOLDOWNS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds a worker rests after its first transient failure in a row, its second, and so on."""


@runtime_checkable
class LoadBalancerLike(Protocol):
    """Chooses the order in which workers are asked to take a task. Both methods are plain and must not block."""

    def order(self, task: Any, workers: Sequence[WorkerView]) -> Iterable[WorkerView]:
        """Whom to ask, first to last. The next one is asked only if the one before refused."""
        ...

    def report(self, worker: WorkerView, report: Report) -> None:
        """How it went: it took the task, it could not now, or it cannot be used at all."""
        ...


class _CyclePicker:
    """In order of admission, around and around."""

    def __init__(self) -> None:
        self._seats: dict[int, Member] = {}
        self._indexes: list[int] = []
        self._last = -1

    def offer(self, seat: Member) -> None:
        """A new seat stands at the end of the order."""
        if seat.index not in self._seats:
            self._seats[seat.index] = seat
            insort(self._indexes, seat.index)

    def withdraw(self, seat: Member) -> None:
        """It left."""
        if self._seats.pop(seat.index, None) is not None:
            self._indexes.remove(seat.index)

    def pick(self, skip: Container[str]) -> Member | None:
        """The next one after the last that is open."""
        indexes, seats = self._indexes, self._seats
        first, size = bisect_right(indexes, self._last), len(indexes)
        for step in range(size):
            index = indexes[(first + step) % size]
            seat = seats[index]
            if seat.is_open and not (skip and seat.resource.resource_id in skip):
                self._last = index
                return seat
        return None


@dataclass(frozen=True, slots=True)
class Cycle:
    """Round robin by admission order, whatever the load."""

    def picker(self) -> Picker:
        """A new picker without seats."""
        return _CyclePicker()


class Roster:
    """The workers that a pool may use from one event loop."""

    def __init__(self, strategy: Strategy) -> None:
        self._rotation = Rotation((), strategy=strategy, cooldown_table=COOLDOWNS, cancel_siblings=False)

    def __len__(self) -> int:
        return len(self._rotation.members)

    def __contains__(self, uid: object) -> bool:
        return uid in self._rotation.members

    def __iter__(self) -> Iterator[Any]:
        return (seat.resource.value for seat in self._rotation.members.values())

    def get(self, uid: str) -> Any:
        """Whatever was admitted under this uid, or None."""
        seat = self._rotation.members.get(uid)
        return None if seat is None else seat.resource.value

    def admit(self, uid: str, worker: Any) -> None:
        """It may be used from now on, last in order."""
        self._rotation.add(Resource(uid, worker))

    def drop(self, uid: str) -> None:
        """It may not any more. Calls it has go on."""
        self._rotation.remove(uid)

    def cooling(self, uid: str, now: float) -> bool:
        """Does it rest?"""
        self._rotation.advance(now)
        seat = self._rotation.members.get(uid)
        return seat is not None and seat.resource.status == "cooling_down"

    def next(self, now: float, avoid: Collection[str] = ()) -> Use | None:
        """The next worker in order and not in `avoid`; of those that cool, whoever is fit again first."""
        rotation = self._rotation
        if rotation.cooling:
            rotation.advance(now)
        flight = rotation.acquire(now, ANY, avoid)
        if flight is not None:
            return flight
        resting = [seat for seat in rotation.members.values() if seat.shut and seat.resource.resource_id not in avoid]
        if not resting:
            return None
        return rotation.take(min(resting, key=lambda seat: seat.resource.cooldown_until), now)

    def take(self, uid: str, now: float) -> Use | None:
        """This one, as somebody else chose; None: it is not there."""
        seat = self._rotation.members.get(uid)
        return None if seat is None else self._rotation.take(seat, now)

    def served(self, flight: Use) -> None:
        """It took the call and answered: it is fine."""
        seat = flight.member
        self._rotation.ok(flight)
        if seat.shut and not seat.gone and not flight.is_late:
            self._rotation.enable(seat.resource.resource_id)  # it was tried while it cooled

    def failed(self, flight: Use, now: float) -> None:
        """It could not, for now."""
        self._rotation.cooled(flight, now=now)

    def ended(self, flight: Use) -> None:
        """The call ended in a way that says nothing about it."""
        self._rotation.ended(flight)


class RoundRobinLoadBalancer:
    """One worker after the other, in the order of their admission, whatever their load. Those that cool come last."""

    strategy: Strategy = Cycle()
    """What pools use of it: their roster goes by this. `order` is for everyone else."""

    def __init__(self) -> None:
        self._rosters: dict[tuple[str, ...], Roster] = {}

    def order(self, task: Any, workers: Sequence[WorkerView]) -> Iterable[WorkerView]:
        """Each worker once, beginning with the one whose turn it is."""
        views = {worker.uid: worker for worker in workers}
        roster = self._roster(tuple(views))
        tried: set[str] = set()
        cooling = []
        while (flight := roster.next(0.0, tried)) is not None:
            uid = flight.member.resource.resource_id
            roster.ended(flight)
            tried.add(uid)
            if views[uid].state == "cooling":
                cooling.append(views[uid])
            else:
                yield views[uid]
        yield from cooling

    def report(self, worker: WorkerView, report: Report) -> None:
        """The turn has moved on already."""

    def _roster(self, uids: tuple[str, ...]) -> Roster:
        """One turn for each list of workers, so that one balancer may serve several pools."""
        roster = self._rosters.get(uids)
        if roster is None:
            while len(self._rosters) >= 64:
                del self._rosters[next(iter(self._rosters))]
            roster = self._rosters[uids] = Roster(self.strategy)
            for uid in uids:
                roster.admit(uid, uid)
        return roster

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class LeastLoadedLoadBalancer:
    """The worker with the fewest calls in flight; among equals the one that was longest unused. Cooling ones last."""

    strategy: Strategy = round_robin()
    """What pools use of it: their roster goes by this. `order` is for everyone else."""

    def __init__(self) -> None:
        self._turns = count(1)
        self._used: dict[str, int] = {}

    def order(self, task: Any, workers: Sequence[WorkerView]) -> Iterable[WorkerView]:
        """Fewest in flight first."""
        used = self._used
        for worker in sorted(
            workers, key=lambda worker: (worker.state == "cooling", worker.in_flight, used.get(worker.uid, 0))
        ):
            used.pop(worker.uid, None)
            used[worker.uid] = next(self._turns)
            while len(used) > 4096:  # of workers that are long gone
                del used[next(iter(used))]
            yield worker

    def report(self, worker: WorkerView, report: Report) -> None:
        """What is in flight says it all."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def strategy_of(balancer: object) -> Strategy | None:
    """The order of a roster that stands for this balancer; None: it has a mind of its own, and must be asked."""
    for shipped in (RoundRobinLoadBalancer, LeastLoadedLoadBalancer):
        kind = type(balancer)
        if issubclass(kind, shipped) and (kind.order, kind.report) == (shipped.order, shipped.report):
            return shipped.strategy
    return None


def checked_order(balancer: LoadBalancerLike, task: Task, views: list[WorkerView]) -> Iterator[WorkerView]:
    """The workers that a balancer of the user's names, in its order; InvalidType if it names something else."""
    order = balancer.order(task, views)
    try:
        workers = iter(order)
    except TypeError:
        raise InvalidType(f"order() of {balancer!r} gave {order!r}, which is no list of workers") from None
    for view in workers:
        if not isinstance(view, WorkerView):
            raise InvalidType(f"order() of {balancer!r} gave {view!r}, which is none of the workers it was shown")
        yield view
