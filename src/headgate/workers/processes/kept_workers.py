"""`KeptWorkers`: the workers of one pool, wherever they run: which there are, which are missing, which leave.

What has their processes started is another's affair: the port `Keepers`, which is one keeper of this machine
(`LocalKeepers`) or many of a cluster (`EngineKeepers`). It reports what becomes of each process.

A worker that ends is replaced for as long as the placement is open. Where that fails, `restarts` says when the next try
is and when callers are told; one worker is started then as a trial, and the others when it is ready.

A worker that says that its lifetime is over goes on until another is ready, and then finishes what it has. If no other
can be started, it simply stays. `replacements` says how many are replaced at the same time.
"""

from __future__ import annotations

import asyncio
import marshal
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.errors import InvalidArgument, InvalidType, WorkerStartFailed
from headgate.workers.model import WorkerView
from headgate.workers.processes.exit_status import ending_of, why_replaced
from headgate.workers.processes.local_worker import LocalWorker, exit_text, start_failure, stop_remotely
from headgate.workers.processes.members import Member
from headgate.workers.processes.replacements import missing, surplus
from headgate.workers.processes.restarts import DEATHS, LONGEST, WITHIN, Starts, Trouble
from headgate.workers.setup import TEARDOWN_SECONDS

if TYPE_CHECKING:
    from headgate.discovery.in_process import OwnDiscovery
    from headgate.discovery.port import DiscoveryEvent, Filter
    from headgate.workers.processes.keepers import Keepers
    from headgate.workers.processes.placement import Launch, Retirement

_LAST = 2.0  # seconds for workers to go by themselves when nothing runs any more and there is no teardown


class KeptWorkers:
    """Decides which workers of a pool are started, replaced and ended. Its methods are those of `Placement`."""

    def __init__(self, keepers: Keepers, worker: Callable[..., object] | None = None) -> None:
        self._keepers = keepers
        self._factory: Callable[..., object] = worker if worker is not None else LocalWorker
        self._members: dict[str, Member] = {}
        self._leaving: dict[str, Member] = {}
        self._starts = Starts()
        self._next_try: asyncio.TimerHandle | None = None
        self._size = 0
        self._opened = self._running = self._closing = False
        self._launch: Launch
        self._loop: asyncio.AbstractEventLoop
        self._discovery: OwnDiscovery

    def open(self, launch: Launch, workers: int) -> None:
        """Have so many workers started. RuntimeError: it was opened before."""
        if self._opened:
            raise RuntimeError("a placement is opened once: make a new one for each pool")
        self._opened, self._launch, self._size = True, launch, workers
        self._loop = asyncio.get_running_loop()
        self._keepers.open(launch, self._on_report)
        self._keepers.prepare(workers)
        from headgate.discovery.in_process import OwnDiscovery  # while the fork server is loaded

        self._discovery, self._running = OwnDiscovery(), True
        for _ in range(self._size):
            self._spawn_one()

    async def scale(self, workers: int) -> None:
        """Start what is missing, or let the surplus finish what it has and go."""
        self._size = workers
        self._keepers.prepare(workers)
        for _ in range(self._missing()):
            self._spawn_one()
        leaving = self._fresh()[workers:]
        for member in leaving:
            self._let_leave(member)
        self._let_expired_go()
        self._tell_change()
        await asyncio.gather(*(self._dismiss(member) for member in leaving))

    def retire(self, uid: str, reason: str, how: Retirement) -> None:
        """Put another in its place: when it has ended, or, if it finishes what it has, now."""
        member = self._members.get(uid) or self._leaving.get(uid)
        if member is None or self._closing:
            return
        if how == "unreachable":
            if not self._keepers.is_dead(member.worker):
                member.lost = member.lost or reason
            self._keepers.signal(uid, signal.SIGKILL)
        elif how == "end":
            member.replaced = member.replaced or reason
            self._keepers.signal(uid, signal.SIGKILL)
        elif not member.stopping:
            self._let_leave(member)
            self._discovery.announce("worker-dropped", member.worker.described())
            _emit("WorkerReplaced", member.worker, reason=redact(reason))
            self._keepers.signal(uid, signal.SIGTERM)  # one that retires by itself knows already
            if self._missing():
                self._start_workers(1)
            self._tell_change()

    def workers(self) -> list[WorkerView]:
        """Return the workers that there are to be; one that has died is lost, though its keeper may not know yet."""
        found = []
        for one in list(self._members.values()):
            state = one.state()
            if state == "ready" and self._keepers.is_dead(one.worker):
                state = "lost"
            found.append(WorkerView(one.worker.described(), state, replaced_because=one.expired))
        return found

    def subscribe(self, filter: Filter | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Tell of the workers that take calls."""
        return self._discovery.subscribe(filter)

    async def close(self, drained: Awaitable[object]) -> None:
        """Stop the workers when what they run has ended, and then what keeps them, which ends what is left of them."""
        self._closing = True
        self._stop_trying()
        here = self._running and self._loop is asyncio.get_running_loop()
        try:
            await drained
            if here:
                await self._stop_workers()
        finally:
            if self._running:
                self._discovery.close()
                await self._keepers.close() if here else self._keepers.abandon(self._loop)

    async def _stop_workers(self) -> None:
        for member in self._members.values():
            if member.is_ready:
                self._discovery.announce("worker-dropped", member.worker.described())
        for member in self._members.values():
            member.stopping = True
            self._keepers.signal(member.worker.uid, signal.SIGTERM)
        if left := [*self._members.values(), *self._leaving.values()]:
            await asyncio.wait([member.ended for member in left], timeout=self._last())
        for uid in (*self._members, *self._leaving):
            self._keepers.signal(uid, signal.SIGKILL)

    # -- starting and stopping one worker -----------------------------------------------------------------------------

    def _spawn_one(self) -> None:
        worker = self._factory(*self._launch.tags, credentials=self._launch.credentials)
        if not isinstance(worker, LocalWorker):
            raise InvalidType(
                f"worker= must make LocalWorkers, it made a {type(worker).__name__}",
                remedy="worker=lambda *tags, credentials=None: LocalWorker(*tags, credentials=credentials)",
            )
        if worker.uid in self._members:
            raise InvalidArgument("worker= made the same worker twice", remedy="Make a new one at each call.")
        if worker.idle_timeout is not None:
            raise InvalidArgument(
                "a LocalWorker of a pool cannot have idle_timeout=: the pool would start another when it ends",
                remedy="Leave it out of worker=, or start the worker by hand and let the pool find it.",
            )
        self._keepers.spawn(worker)
        self._members[worker.uid] = Member(worker)

    def _let_leave(self, member: Member) -> None:
        member.stopping = True
        del self._members[member.worker.uid]
        self._leaving[member.worker.uid] = member
        self._keepers.vacate(member.worker.uid)

    async def _dismiss(self, member: Member) -> None:
        """Let a worker that leaves finish what it has, and end it if it does not go then."""
        worker, patience = member.worker, 0.0
        if worker.pid and member.is_ready:
            self._discovery.announce("worker-dropped", worker.described())
            timeout = self._launch.stop_timeout
            address, seconds = worker.described().address, -1.0 if timeout is None else timeout
            await stop_remotely(address, seconds, worker.credentials)
            patience = self._last()
        await asyncio.wait((member.ended,), timeout=patience)
        if not member.ended.done():
            self._keepers.signal(worker.uid, signal.SIGKILL)

    def _last(self) -> float:
        """Return the seconds for workers to go by themselves when nothing runs any more."""
        return _LAST if self._launch.setup is None else _LAST + TEARDOWN_SECONDS

    # -- workers that are to be replaced, and work until then ---------------------------------------------------------

    def _fresh(self) -> list[Member]:
        return [member for member in self._members.values() if not member.expired]

    def _missing(self) -> int:
        fresh = len(self._fresh())
        return missing(self._size, fresh, len(self._members) - fresh)

    def _expire(self, member: Member, reason: str) -> None:
        """Start another for a worker whose lifetime is over, unless a start that failed is to be tried again later."""
        if not (member.stopping or self._closing):
            member.expired = reason
            self._keepers.vacate(member.worker.uid)
            if self._next_try is None and (count := self._missing()):
                self._start_workers(count)

    def _let_expired_go(self) -> None:
        """Let expired workers finish what they have, as far as others are ready, and replace the next ones."""
        expired = [member for member in self._members.values() if member.expired]
        ready = sum(member.is_ready for member in self._fresh())
        for member in expired[: surplus(self._size, ready, len(expired))]:
            self._let_leave(member)
            self._discovery.announce("worker-dropped", member.worker.described())
            _emit("WorkerReplaced", member.worker, reason=redact(member.expired), planned=True)
            self._keepers.signal(member.worker.uid, signal.SIGTERM)

    # -- what the keeper reports --------------------------------------------------------------------------------------

    def _on_report(self, report: Mapping[str, Any]) -> None:
        event = report["event"]
        if event == "gone":
            self._gone(report["uids"])
        else:
            member = self._members.get(report["uid"]) or self._leaving.get(report["uid"])
            if member is None:
                return
            if event == "started":
                member.worker.pid = report["pid"]
                _emit("WorkerStarted", member.worker)
            elif event == "said":
                self._said(member, marshal.loads(report["said"]))
            elif event == "exited":
                self._exited(member, report)
        self._tell_change()

    def _tell_change(self) -> None:
        self._launch.on_change(sum(member.is_ready for member in self._members.values()))

    def _said(self, member: Member, said: Mapping[str, Any]) -> None:
        """Note what a worker says: that it is ready, why it never will be, or that another is to take its place."""
        if "expired" in said:
            self._expire(member, said["expired"])
            return
        if not said.get("ready"):
            member.failure, member.cause = str(said["cause"]), said.get("error", b"")
            return
        member.is_ready = True
        member.worker.listens(said["address"])
        if member.stopping:
            return
        self._discovery.announce("worker-added", member.worker.described())
        _emit("WorkerReady", member.worker, failed_tries=self._starts.failed_tries)
        self._starts.ready()
        self._stop_trying()
        self._launch.on_trouble(None)
        if not self._closing:
            self._let_expired_go()
            if count := self._missing():
                self._start_workers(count)

    def _exited(self, member: Member, report: Mapping[str, Any]) -> None:
        """Note how a worker ended, and start another in its place unless it was to end."""
        worker = member.worker
        self._members.pop(worker.uid, None)
        self._leaving.pop(worker.uid, None)
        if not member.ended.done():
            member.ended.set_result(None)
        ending = ending_of(report)
        self._launch.on_ended(worker.uid, ending)
        if member.is_ready:
            self._discovery.announce("worker-dropped", worker.described())
        if member.stopping or self._closing:
            _emit("WorkerStopped", worker)
            return
        if not member.is_ready:
            self._start_failed(start_failure(member.failure, report, member.cause), worker)
            return
        restarted = (self._missing() > 0 and self._start_workers(1)) or bool(member.expired)
        replaced = member.replaced or why_replaced(ending)
        if report.get("code") == 0 and not (member.lost or replaced):  # somebody told it to stop
            _emit("WorkerStopped", worker)
        else:
            reason = exit_text(report["code"]) if "code" in report else "its keeper is gone"
            if member.lost and report.get("code") == -signal.SIGKILL:  # else it had ended by itself
                reason = f"it was ended, being out of reach: {member.lost}"
            reason = f"it was ended, to be replaced: {replaced}" if replaced else reason
            self._launch.on_lost()
            _emit("WorkerLostEvent", worker, reason=redact(reason), restarted=restarted)

    def _gone(self, uids: Collection[str]) -> None:
        """Begin anew: what kept these workers was killed, and they with it."""
        if self._closing:
            return
        members = [member for uid in uids if (member := self._members.get(uid) or self._leaving.get(uid)) is not None]
        for member in members:
            self._members.pop(member.worker.uid, None)
        for member in members:
            self._exited(member, {"event": "gone"})

    # -- starts that fail ---------------------------------------------------------------------------------------------

    def _start_workers(self, count: int) -> bool:
        """Start so many. False: that failed, and is tried again later."""
        try:
            for _ in range(count):
                self._spawn_one()
        except WorkerStartFailed as error:
            self._start_failed(error)
            return False
        except Exception as error:  # a factory that fails now and did not before
            failure = WorkerStartFailed(f"a worker could not be started: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._start_failed(failure)
            return False
        return True

    def _start_failed(self, failure: WorkerStartFailed, worker: LocalWorker | None = None) -> None:
        """Try again later, because a worker did not become ready, and tell the pool why."""
        starts, reason = self._starts, failure.message
        pause = starts.failed(clock.now())
        retry_in: float | None = None
        self._stop_trying()
        if starts.hopeless and not self._members:
            failure.args = (f"{failure.args[0]}. It was the {DEATHS}th to do so within {WITHIN:g} s",)
        else:
            retry_in = pause
            self._try_again_in(pause)
        self._tell_change()  # the pool looks whether a worker is left
        self._launch.on_trouble(Trouble(failure, reason, starts.failed_tries, starts.since, retry_in))
        if worker is not None:
            self._keepers.clean_up(worker)
        _emit("WorkerNotStarted", worker, reason=redact(reason), failed_tries=starts.failed_tries, retry_in=retry_in)

    def _try_again_in(self, seconds: float) -> None:
        self._stop_trying()
        self._next_try = self._loop.call_later(seconds, self._try_again)

    def _try_again(self) -> None:
        """Start one worker as a trial, because a pause is over. The others follow when it is ready."""
        self._next_try = None
        self._starts.trying()
        if not self._closing and self._missing():
            if self._start_workers(1):
                self._try_again_in(LONGEST)  # one that hangs while it starts does not keep the others from being tried
            self._tell_change()

    def _stop_trying(self) -> None:
        timer, self._next_try = self._next_try, None
        if timer is not None:
            timer.cancel()


def _emit(name: str, worker: LocalWorker | None, **fields: object) -> None:
    """Emit an event about a worker. None: it concerns one that was not even made."""
    from headgate.workers import events

    if events.WORKERS.listeners:
        uid, pid = ("", 0) if worker is None else (worker.uid, worker.pid)
        event = getattr(events, name)(at=clock.wall(), uid=uid, pid=pid, **fields)
        events.WORKERS.emit(event)
