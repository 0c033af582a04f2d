"""A fleet of 10,000 workers, 1,000,000 tenants and 1,000 keys, simulated on this machine.

    python benchmarks/simulate.py            two minutes, 0.6 GB of memory
    python benchmarks/simulate.py --quick    a tenth of everything, some seconds

What is real: the code that decides. `Scheduler` (which task is next, with fair turns of tenants), `Rotation` (with
which key, its cooldowns and trials) and `Roster` (on which worker) are the objects that pools use, unchanged.

What is simulated: everything else. There are no processes, no network and no functions: a call is a timer of a virtual
event loop, so an hour takes as long as its decisions. How long calls take, which workers go and what an API refuses are
drawn from a seed.

Two results. *Decisions*: how many instructions of the interpreter one decision takes, counted, with ever more tenants,
keys and workers; they must not grow faster than the logarithm. (C code counts as nothing. What the cores use of it are
dicts, deques and heaps: `heapq` compares log2 n times.) *A bad minute*: calls on the whole fleet, while workers come
and go, a part of them cannot be reached, a region is lost, and all keys are refused for a while. No call may be lost,
turns must stay fair, and the end of the outage must not become a herd.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import resource as process
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import table

from headgate.resources.members import Use
from headgate.resources.model import Resource
from headgate.resources.rotation import Rotation
from headgate.resources.strategies import round_robin
from headgate.tasks.admission import UNBOUNDED
from headgate.tasks.model import Moment, TaskRecord
from headgate.tasks.scheduling.scheduler import Scheduler
from headgate.tasks.strategies import fair_round_robin
from headgate.testing import run
from headgate.workers.client.balancing import LeastLoadedLoadBalancer, Roster

COOLDOWNS = (30.0, 120.0, 300.0)
START = Moment(0.0, 0.0)
OWNER: Any = SimpleNamespace(name="fleet")
DECISIONS = 200
"""Decisions over which instructions are counted."""


def record(number: int, tenant: int) -> TaskRecord:
    """Make a queued task."""
    return TaskRecord(OWNER, number, None, (), None, START, None, 0, tenant, tenant)


# -- counted instructions ----------------------------------------------------------------------------------------------


def instructions(work: Callable[[], object]) -> int:
    """Count the instructions of the interpreter that this takes, with all that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def each(times: int, work: Callable[[], object]) -> float:
    """Instructions of one of so many."""

    def repeat() -> None:
        for _ in range(times):
            work()

    return instructions(repeat) / times


def tenants_decided(tenants: int) -> float:
    """Instructions to end a task, give its slot to the next tenant and queue another, with so many tenants waiting."""
    scheduler = Scheduler(fair_round_robin(), UNBOUNDED, 1)
    for number in range(tenants):
        scheduler.enqueue(record(number, number))
    running = deque([scheduler.next()])

    def decide() -> None:
        ended = running.popleft()
        assert ended is not None
        running.append(scheduler.succeed(ended))
        scheduler.enqueue(record(0, int(str(ended.key))))

    return each(DECISIONS, decide)


def keys_decided(keys: int) -> float:
    """Instructions to take a key, end the use, and for one in ten: be refused and choose again."""
    rotation = Rotation(
        [Resource(f"key-{number}", number, max_in_flight=20) for number in range(keys)],
        strategy=round_robin(),
        cooldown_table=COOLDOWNS,
        cancel_siblings=False,
    )
    held = deque(rotation.acquire(0.0) for _ in range(keys))
    turn = iter(range(10**9))

    def decide() -> None:
        number, use = next(turn), held.popleft()
        now = number / 10
        assert use is not None
        if rotation.due(now):
            rotation.advance(now)
        if number % 10 == 9 and use.member.resource.status == "healthy":
            rotation.cooled(use, 0.5, now=now)
        else:
            rotation.ok(use, now)
        held.append(rotation.acquire(now))

    return each(DECISIONS, decide)


def workers_decided(workers: int) -> float:
    """Instructions to choose the worker with the fewest calls, and to note the end of a call."""
    roster: Roster[int] = Roster(LeastLoadedLoadBalancer().strategy)
    for number in range(workers):
        roster.admit(f"w-{number}", number)
    held = deque(roster.next(0.0) for _ in range(workers))

    def decide() -> None:
        use = held.popleft()
        assert use is not None
        roster.served(use)
        held.append(roster.next(0.0))

    return each(DECISIONS, decide)


def measure_decisions(scale: float) -> dict[str, Any]:
    """Count for ever more tenants, keys and workers, and print how that grows."""
    found: dict[str, Any] = {}
    rows = []
    for name, most, measure in (
        ("tenants", 1_000_000, tenants_decided),
        ("keys", 10_000, keys_decided),
        ("workers", 10_000, workers_decided),
    ):
        sizes = [size for size in (10, 100, 1_000, 10_000, 100_000, 1_000_000) if size <= max(1_000, most * scale)]
        counts = {size: measure(size) for size in sizes}
        growth = counts[sizes[-1]] / counts[sizes[0]]
        allowed = math.log2(sizes[-1]) / math.log2(sizes[0])
        found[name] = {"instructions": counts, "growth": growth, "allowed": allowed}
        shown = ", ".join(f"{count:.0f} with {size:,}" for size, count in counts.items())
        rows.append([name, shown, f"{growth:.2f}x", f"{allowed:.1f}x", "holds" if growth <= allowed else table.MISSED])
    table.print_table("Instructions for one decision", ["", "counted", "growth", "log n", ""], rows)
    return found


# -- a bad minute ------------------------------------------------------------------------------------------------------


class Call:
    """A call that runs: its task, its key, its worker, and what ends it."""

    __slots__ = ("key", "task", "timer", "uid", "use")

    def __init__(self, task: TaskRecord, key: Use, use: Use, uid: str) -> None:
        self.task, self.key, self.use, self.uid = task, key, use, uid
        self.timer: asyncio.TimerHandle


class Fleet:
    """Tasks, keys and workers of one simulated minute. Time is that of the virtual loop."""

    def __init__(self, tenants: int, workers: int, keys: int, flood: int, seed: int = 7) -> None:
        self.chance = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(fair_round_robin(), UNBOUNDED, workers)
        for number in range(flood):  # one tenant floods the queue before all others come
            self.scheduler.enqueue(record(number, tenants))
        for number in range(tenants):
            self.scheduler.enqueue(record(flood + number, number))
        self.submitted = tenants + flood
        self.flood = tenants
        self.keys = Rotation(
            [Resource(f"key-{number}", number, max_in_flight=max(2, 2 * workers // keys)) for number in range(keys)],
            strategy=round_robin(),
            cooldown_table=COOLDOWNS,
            cancel_siblings=False,
            probe_on_recovery=True,
        )
        self.roster: Roster[int] = Roster(LeastLoadedLoadBalancer().strategy)
        self.size, self.number = workers, 0
        self.regions: dict[str, int] = {}
        for _ in range(workers):
            self.admit()
        self.running: dict[str, set[Call]] = {}
        self.counts: Counter[str] = Counter()
        self.starts: Counter[int] = Counter()  # by tenth of a second
        self.per_tenant: Counter[object] = Counter()
        self.busiest = 0
        self.refuses_until = 0.0
        self.unreachable: set[str] = set()
        self.waiting: asyncio.TimerHandle | None = None

    def admit(self) -> None:
        """Add a worker, in one of three regions."""
        self.number += 1
        uid = f"w-{self.number}"
        self.roster.admit(uid, self.number)
        self.regions[uid] = self.number % 3

    def drop(self, uid: str) -> None:
        """Lose a worker: its calls are queued again, as the first of their tenants."""
        self.roster.drop(uid)
        del self.regions[uid]
        self.unreachable.discard(uid)
        for call in self.running.pop(uid, set()):
            call.timer.cancel()
            self.counts["of lost workers"] += 1
            self.keys.ended(call.key, self.loop.time())
            self.roster.ended(call.use)
            self.scheduler.release(call.task)
            self.scheduler.requeue(call.task)

    # -- calls -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Start what can be started: a slot, a key and a worker for each."""
        now = self.loop.time()
        if self.keys.due(now):
            self.keys.advance(now)
        while self.scheduler.depth:
            key = self.keys.acquire(now)
            if key is None:
                self._wait_for_keys(now)
                return
            task = self.scheduler.next()
            use = None if task is None else self.roster.next(now)
            if task is None or use is None:
                self.keys.ended(key, now)
                if task is not None:
                    self.scheduler.release(task)
                    self.scheduler.requeue(task)
                return
            self._begin(Call(task=task, key=key, use=use, uid=use.member.resource.resource_id), now)

    def _wait_for_keys(self, now: float) -> None:
        expiry = self.keys.next_expiry()
        if expiry is not None and self.waiting is None:
            self.waiting = self.loop.call_later(max(0.0, expiry - now), self._keys_are_back)

    def _keys_are_back(self) -> None:
        self.waiting = None
        self.pump()

    def _begin(self, call: Call, now: float) -> None:
        self.starts[int(now * 10)] += 1
        self.per_tenant[call.task.key] += 1
        at = self.running.setdefault(call.uid, set())
        at.add(call)
        self.busiest = max(self.busiest, len(at))
        if call.uid in self.unreachable:  # nobody answers; the session finds out later (`lose_unreachable`)
            call.timer = self.loop.call_later(1e6, _never)
        elif now < self.refuses_until:
            call.timer = self.loop.call_later(0.02, self._refused, call)
        else:
            call.timer = self.loop.call_later(self.chance.uniform(0.5, 1.5), self._ended, call)

    def _ended(self, call: Call) -> None:
        self.running[call.uid].discard(call)
        self.counts["answered"] += 1
        now = self.loop.time()
        self.keys.ok(call.key, now)
        self.roster.served(call.use)
        self.scheduler.release(call.task)
        self.pump()

    def _refused(self, call: Call) -> None:
        """The API says when it is back. The call is queued again."""
        self.running[call.uid].discard(call)
        self.counts["refused"] += 1
        now = self.loop.time()
        self.keys.cooled(call.key, max(0.0, self.refuses_until - now), now=now)
        self.roster.served(call.use)
        self.scheduler.release(call.task)
        self.scheduler.requeue(call.task)
        self.pump()

    # -- what goes wrong -------------------------------------------------------------------------------------------

    def churn(self, share: float) -> None:
        """Replace some workers by new ones."""
        for uid in self.chance.sample(sorted(self.regions), int(len(self.regions) * share)):
            self.drop(uid)
            self.admit()
            self.counts["replaced"] += 1
        self.pump()

    def cut_off(self, share: float) -> None:
        """Let some workers not answer any more."""
        self.unreachable = set(self.chance.sample(sorted(self.regions), int(len(self.regions) * share)))
        for uid in self.unreachable:
            for call in self.running.get(uid, ()):
                call.timer.cancel()

    def lose_unreachable(self) -> None:
        """Sessions with those that did not answer are lost; the workers are replaced."""
        for uid in list(self.unreachable):
            self.drop(uid)
            self.admit()
            self.counts["cut off"] += 1
        self.pump()

    def lose_region(self, region: int) -> None:
        """Lose a third of the workers at once."""
        for uid in [uid for uid, its in self.regions.items() if its == region]:
            self.drop(uid)
            self.counts["lost with the region"] += 1
        self.scheduler.resize(len(self.regions))
        self.pump()

    def region_is_back(self) -> None:
        """Start as many workers as there were."""
        while len(self.regions) < self.size:
            self.admit()
        self.scheduler.resize(self.size)
        self.pump()

    def refuse(self, seconds: float) -> None:
        """Let the API refuse every key for a while."""
        self.refuses_until = self.loop.time() + seconds


def _never() -> None:
    pass


def measure_minute(scale: float) -> dict[str, Any]:
    """Simulate a minute, and print what became of the calls."""
    tenants, workers, keys = int(1_000_000 * scale), int(10_000 * scale), int(1_000 * scale)

    async def minute() -> Fleet:
        fleet = Fleet(tenants, workers, keys, flood=tenants // 10)
        fleet.pump()
        for second in range(60):
            await asyncio.sleep(1)
            fleet.churn(0.01)
            if second == 9:
                fleet.cut_off(0.1)
            if second == 12:
                fleet.lose_unreachable()
            if second == 19:
                fleet.lose_region(0)
            if second == 29:
                fleet.region_is_back()
            if second == 39:
                fleet.refuse(5.0)
        return fleet

    table.say(f"a minute of {workers:,} workers, {tenants:,} tenants and {keys:,} keys ...")
    return judge(run(minute, check_leaks=False), tenants, keys)


def judge(fleet: Fleet, tenants: int, keys: int) -> dict[str, Any]:
    """Print what was found, and what must hold of it."""
    under_way = sum(len(calls) for calls in fleet.running.values())
    lost = fleet.submitted - fleet.counts["answered"] - under_way - fleet.scheduler.depth
    again = fleet.counts["of lost workers"] + fleet.counts["refused"]
    steady = sum(fleet.starts[tenth] for tenth in range(50, 90)) / 40
    back = int((fleet.refuses_until + 0.05) * 10)
    herd = max(fleet.starts[tenth] for tenth in range(back, back + 20))
    first = fleet.starts[back] + fleet.starts[back - 1]
    flooded = fleet.per_tenant[fleet.flood]
    most = max(count for tenant, count in fleet.per_tenant.items() if tenant != fleet.flood)
    rows = [
        ["calls answered", f"{fleet.counts['answered']:,}", ""],
        ["calls queued again", f"{again:,}", "of lost workers, and refused"],
        ["workers replaced", f"{fleet.counts['replaced'] + fleet.counts['cut off']:,}", "one in a hundred a second"],
        ["calls lost", f"{lost:,}", "holds" if not lost else table.MISSED],
        ["most calls on one worker", f"{fleet.busiest:,}", "of one for each, when all are there"],
        [
            "starts of the tenant that queued a tenth of all first",
            f"{flooded:,}",
            "holds" if flooded <= most + 1 else table.MISSED,
        ],
        ["most starts of another tenant", f"{most:,}", "a call that is queued again waits for the next turn"],
        ["calls begun in a tenth of a second, as a rule", f"{steady:,.0f}", ""],
        [
            "the same when all keys are back, at first",
            f"{first:,}",
            "holds" if first <= 2 * keys else table.MISSED,
        ],
        ["the same in the two seconds after that, at most", f"{herd:,}", f"{herd / max(1.0, steady):.1f}x"],
    ]
    table.print_table("A minute: churn, 10 % cut off, a region lost, all keys refused", ["", "", ""], rows)
    memory = process.getrusage(process.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{memory:.1f} GB of memory at most")
    return {"lost": lost, "counts": dict(fleet.counts), "steady": steady, "herd": herd, "first": first}


def main() -> None:
    """Count, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    scale = 0.1 if parser.parse_args().quick else 1.0
    decisions = measure_decisions(scale)
    minute = measure_minute(scale)
    table.keep("simulate", {"scale": scale, "decisions": decisions, "minute": minute})


if __name__ == "__main__":
    main()
