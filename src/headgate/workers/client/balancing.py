"""Which worker is next? Balancers, and the roster of workers they choose from.

A worker is a member of the same `Rotation` that resource pools use: a transient failure is a short, escalating
cooldown, and what is in flight is counted there. What differs from keys is said here: the default goes by calls in
flight and then by picks (`FewestInFlight`), round robin by admission order whatever the load (`Cycle`), and one that
cools is tried last instead of never, because the caller would rather wait a moment for a busy worker than be refused.

**Why the fewest calls in flight.** The callers that a message of answers wakes call again at once. Their worker has the
fewest calls then, so they go back there and share the next message. Round robin deals them out to all workers, and
messages split down to one call each: with 100 callers on eight workers, 1.5 to 2 calls a message instead of 12, and
four times the CPU time per call on both sides (benchmarks/dispatch.py).

Each event loop counts its own calls: a count that loops of several threads share would need a lock at each call. But
when workers were picked is known to all loops of a pool, so loops with a call or two each do not all begin with the
same worker.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, Protocol, TypeVar, runtime_checkable

from headgate.errors import InvalidType
from headgate.resources.members import ANY, Member, Use
from headgate.resources.model import Resource
from headgate.resources.pickers import Entry, LazyHeap, Picker
from headgate.resources.rotation import Rotation
from headgate.resources.strategies import Strategy
from headgate.workers.model import Report, Task, WorkerView

COOLDOWNS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds a worker rests after its first transient failure in a row, its second, and so on."""
_MOST_KNOWN = 4096  # workers whose last pick is remembered; those known longest are forgotten first


@runtime_checkable
class LoadBalancerLike(Protocol):
    """Chooses the order in which workers are asked to take a task. Both methods are plain and must not block."""

    def order(self, task: Task, workers: Sequence[WorkerView]) -> Iterable[WorkerView]:
        """Return the workers to ask, first to last. The next one is asked only if the one before refused."""
        ...

    def report(self, worker: WorkerView, report: Report) -> None:
        """Hear how a worker answered: it took the task, it could not now, or it cannot be used at all."""
        ...


class _CyclePicker:
    """Picks members in the order of their admission, and then begins again."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._indexes: list[int] = []
        self._last = -1

    def offer(self, member: Member) -> None:
        """Put a new member at the end of the order."""
        if member.index not in self._members:
            self._members[member.index] = member
            insort(self._indexes, member.index)

    def withdraw(self, member: Member) -> None:
        """Remove a member from the order."""
        if self._members.pop(member.index, None) is not None:
            self._indexes.remove(member.index)

    def pick(self, skip: Container[str]) -> Member | None:
        """Return the next open member after the one that was picked last."""
        indexes, members = self._indexes, self._members
        first, size = bisect_right(indexes, self._last), len(indexes)
        for step in range(size):
            index = indexes[(first + step) % size]
            member = members[index]
            if member.is_open and not (skip and member.resource.resource_id in skip):
                self._last = index
                return member
        return None


@dataclass(frozen=True, slots=True)
class Cycle:
    """Round robin by admission order, whatever the load."""

    def picker(self) -> Picker:
        """Make a picker that has no members yet."""
        return _CyclePicker()


_turns = count(1)


class _LastPick:
    """When a worker was last picked, as a number that grows with each pick; 0: never."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn: int = 0


class _FewestPicker(LazyHeap):
    """Picks the member with the fewest uses; of equals the one picked longest ago, first those that never were.

    The `notes` of a member are its `_LastPick`, which pickers of other loops have too. Its turn only grows, so their
    picks move a member back, and its entry here is too early at worst, as a lazy heap allows.
    """

    def __init__(self, last_pick: Callable[[str], _LastPick]) -> None:
        super().__init__()
        self._last_pick = last_pick

    def entry_of(self, member: Member) -> Entry:
        """The entry at the member's true place in the order."""
        return len(member.uses), member.notes.turn, member.index, member

    def offer(self, member: Member) -> None:
        """Note that a member is new, or that one of its uses ended."""
        current = self._current.get(member.index)
        if current is None:
            if member.notes is None:
                member.notes = self._last_pick(member.resource.resource_id)
            self._push(member)
        elif len(member.uses) < current[0]:
            self._push(member)

    def pick(self, skip: Container[str]) -> Member | None:
        """Return the first open member in the order."""
        # The path of every call, inlined (benchmarks/dispatch.py). Usually the first entry is that of a worker whose
        # answers have come: its turn is out of date, and it is the first all the same.
        heap, current = self._heap, self._current
        aside: list[Entry] = []
        chosen = None
        while heap:
            entry = heap[0]
            load, turn, index, member = entry
            if current.get(index) is not entry:
                heappop(heap)
                continue
            uses, last = len(member.uses), member.notes
            if load != uses or turn != last.turn:
                entry = current[index] = (uses, last.turn, index, member)
                heapreplace(heap, entry)
                if heap[0] is not entry:
                    continue
            if member.unavailable:
                heappop(heap)
                del current[index]
            elif skip and member.resource.resource_id in skip:
                aside.append(heappop(heap))
            else:
                last.turn = next(_turns)
                chosen = member
                break
        for entry in aside:
            heappush(heap, entry)
        return chosen


class FewestInFlight:
    """Fewest calls in flight, then picked longest ago by any roster that goes by this object."""

    def __init__(self) -> None:
        self._last_picks: dict[str, _LastPick] = {}  # by uid

    def picker(self) -> Picker:
        """Make a picker that has no members yet."""
        return _FewestPicker(self.last_pick)

    def last_pick(self, uid: str) -> _LastPick:
        """Return the record of a worker's last pick. From any thread."""
        known = self._last_picks
        found = known.setdefault(uid, _LastPick())
        if len(known) > _MOST_KNOWN:
            for gone in list(known)[:-_MOST_KNOWN]:
                known.pop(gone, None)
        return found


Worker = TypeVar("Worker")


class _Place(Generic[Worker]):
    """The value of a member: what reaches its worker, which may be replaced."""

    __slots__ = ("worker",)

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker = worker


class Roster(Generic[Worker]):
    """The workers that a pool may use from one event loop, each with what reaches it: for a dispatcher a Connection."""

    def __init__(self, strategy: Strategy) -> None:
        self._rotation = Rotation((), strategy=strategy, cooldown_table=COOLDOWNS, cancel_siblings=False)

    def __len__(self) -> int:
        return len(self._rotation.members)

    def __contains__(self, uid: object) -> bool:
        return uid in self._rotation.members

    def __iter__(self) -> Iterator[Worker]:
        return (member.resource.value.worker for member in self._rotation.members.values())

    def get(self, uid: str) -> Worker | None:
        """Return what was admitted under this uid, or None."""
        member = self._rotation.members.get(uid)
        return None if member is None else member.resource.value.worker

    def worker_of(self, use: Use) -> Worker:
        """Return what was admitted as the worker of this use."""
        worker: Worker = use.member.resource.value.worker
        return worker

    def admit(self, uid: str, worker: Worker) -> None:
        """Add a worker, last in order."""
        self._rotation.add(Resource(uid, _Place(worker)))

    def replace(self, uid: str, worker: Worker) -> None:
        """Reach a worker through this from now on. It keeps its place in the order, and its calls count as before."""
        self._rotation.members[uid].resource.value.worker = worker

    def drop(self, uid: str) -> None:
        """Remove a worker. Its calls go on."""
        self._rotation.remove(uid)

    def cooling(self, uid: str, now: float) -> bool:
        """Whether this worker rests after a transient failure."""
        self._rotation.advance(now)
        member = self._rotation.members.get(uid)
        return member is not None and member.resource.status == "cooling_down"

    def next(self, now: float, avoid: Collection[str] = ()) -> Use | None:
        """Take the next worker in order that is not in `avoid`; if all cool, the one whose cooldown ends first."""
        rotation = self._rotation
        if rotation.cooling:
            rotation.advance(now)
        use = rotation.acquire(now, ANY, avoid)
        if use is not None:
            return use
        resting = [
            one for one in rotation.members.values() if one.unavailable and one.resource.resource_id not in avoid
        ]
        if not resting:
            return None
        return rotation.take(min(resting, key=lambda one: one.resource.cooldown_until), now)

    def take(self, uid: str, now: float) -> Use | None:
        """Take the worker that somebody else chose; None: it is not there."""
        member = self._rotation.members.get(uid)
        return None if member is None else self._rotation.take(member, now)

    def served(self, use: Use) -> None:
        """Note that a worker took the call and answered."""
        member = use.member
        self._rotation.ok(use)
        if member.unavailable and not member.gone and not use.is_late:
            self._rotation.enable(member.resource.resource_id)  # it was tried while it cooled

    def failed(self, use: Use, now: float) -> None:
        """Note that a worker could not take the call for now: it cools."""
        self._rotation.cooled(use, now=now)

    def ended(self, use: Use) -> None:
        """Note that a call ended in a way that says nothing about its worker."""
        self._rotation.ended(use)


class RoundRobinLoadBalancer:
    """Balancer that asks one worker after the other, by admission, whatever their load. Those that cool come last."""

    strategy: Strategy = Cycle()
    """What pools use of it: their roster goes by this. `order` is for everyone else."""

    def __init__(self) -> None:
        self._rosters: dict[tuple[str, ...], Roster[str]] = {}

    def order(self, task: Task, workers: Sequence[WorkerView]) -> Iterable[WorkerView]:
        """Yield each worker once, beginning with the one whose turn it is."""
        views = {worker.uid: worker for worker in workers}
        roster = self._roster(tuple(views))
        tried: set[str] = set()
        cooling = []
        while (use := roster.next(0.0, tried)) is not None:
            uid = use.member.resource.resource_id
            roster.ended(use)
            tried.add(uid)
            if views[uid].state == "cooling":
                cooling.append(views[uid])
            else:
                yield views[uid]
        yield from cooling

    def report(self, worker: WorkerView, report: Report) -> None:
        """Do nothing: the turn has moved on already."""

    def _roster(self, uids: tuple[str, ...]) -> Roster[str]:
        """Return the roster of these workers. Each list has its own turns, so one balancer may serve several pools."""
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
    """Balancer that asks the worker with the fewest calls in flight, of equals the one asked longest ago. Those that
    cool come last. This is what `loadbalancer=None` means."""

    def __init__(self) -> None:
        self.strategy: FewestInFlight = FewestInFlight()
        """What pools use of it: their rosters go by this. `order` is for everyone else."""

    def order(self, task: Task, workers: Sequence[WorkerView]) -> Iterable[WorkerView]:
        """Yield each worker once, the one with the fewest calls in flight first."""
        picks = {worker.uid: self.strategy.last_pick(worker.uid) for worker in workers}
        for worker in sorted(
            workers, key=lambda worker: (worker.state == "cooling", worker.in_flight, picks[worker.uid].turn)
        ):
            picks[worker.uid].turn = next(_turns)
            yield worker

    def report(self, worker: WorkerView, report: Report) -> None:
        """Do nothing: the number of calls in flight says enough."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def strategy_of(balancer: object) -> Strategy | None:
    """Return the order of a roster that does what this balancer does; None: it is a user's, and must be asked."""
    for shipped in (RoundRobinLoadBalancer, LeastLoadedLoadBalancer):
        if isinstance(balancer, shipped):
            kind = type(balancer)
            return balancer.strategy if (kind.order, kind.report) == (shipped.order, shipped.report) else None
    return None


def checked_order(balancer: LoadBalancerLike, task: Task, views: list[WorkerView]) -> Iterator[WorkerView]:
    """Yield the workers that a user's balancer names, in its order; InvalidType if it names something else."""
    order = balancer.order(task, views)
    try:
        workers = iter(order)
    except TypeError:
        raise InvalidType(f"order() of {balancer!r} gave {order!r}, which is no list of workers") from None
    for view in workers:
        if not isinstance(view, WorkerView):
            raise InvalidType(f"order() of {balancer!r} gave {view!r}, which is none of the workers it was shown")
        yield view
