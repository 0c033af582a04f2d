"""Watches the task loop of a worker from the thread of its server, while routines run or clients wait for something.

A loop that had no turn for a second is held by a routine. The callers are told, the log names the routine with its
stack, and calls that have not begun are given to other workers. If this thread cannot run either, because the routine
holds the interpreter's lock, it logs the stacks at its next turn (`stack_dumps`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headgate.core.clock import clock
from headgate.workers.protocol.messages import HELD, PULSE
from headgate.workers.server import stack_dumps
from headgate.workers.server.orphans import Orphans
from headgate.workers.server.running_call import RunningCall

if TYPE_CHECKING:
    from headgate.workers.server.service import Service

_BEAT = 0.25
_NO_TURN = 1.75  # seconds without a check, after which the stacks are worth a warning
CATCH_UP = 0.2
"""Seconds in which a server that had no turn for long reads what came meanwhile, before other calls begin."""
_log = logging.getLogger("headgate.workers")


class Watch:
    """Checks the task loop at short intervals, as long as it has calls, and reports that to clients."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._timer: asyncio.TimerHandle | None = None
        self._suspect: object = None  # what held the loop at the last check
        self._named: object = None  # what was last named as holding the loop
        self._told = 0.0
        self._looked = 0.0
        self._caught_up = 0.0  # when what came without a turn has been read
        self._orphans = Orphans(lambda: service.tasks.busy)

    def begin(self) -> None:
        """Begin to check: the task loop has calls now, or will have them when their arguments were read."""
        if self._timer is None:
            self._told = self._looked = clock.now()
            self._look()

    def end(self) -> None:
        """Check no longer: the worker has stopped. Its process may continue."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stack_dumps.cancel()

    def behind(self) -> float:
        """Return for how many seconds calls may not begin. Above 0: the server had no turn for long, until just now,
        and callers who gave up meanwhile say so in messages that are still to be read. Thread-safe."""
        now = clock.now()
        if self._timer is not None:
            self._note_turn(now)
        return max(0.0, self._caught_up - now)

    def _note_turn(self, now: float) -> None:
        if now - self._looked > _NO_TURN:
            self._caught_up = now + CATCH_UP

    def _look(self) -> None:
        tasks = self._service.tasks
        now = clock.now()
        self._note_turn(now)
        self._orphans.begin()
        if not self._service.is_awaited:
            self._timer = None
            self._named = self._suspect = None
            stack_dumps.cancel()
            return
        # First of all: an error below must not end the checks, and with them the reports to clients.
        self._timer = asyncio.get_running_loop().call_later(_BEAT, self._look)
        stack_dumps.dump_later()
        late = now - self._looked
        # Loading a C extension holds the interpreter's lock for many seconds, and nobody can do anything about that.
        if not tasks.imports.active and now - max(self._looked, tasks.imports.ended) > _NO_TURN:
            self._log_stacks(late)
        if tasks.asked is not None and late > 2 * _BEAT:
            tasks.asked = now  # this thread had no turn itself: that says nothing about the other
        self._looked = now
        age = 0.0 if tasks.asked is None else now - tasks.asked
        tasks.ask(now)
        if age > HELD - _BEAT:
            self._log_holder(age)
        if age > HELD:
            self._service.give_back()
        else:
            self._named = self._suspect = None
        self._service.check_limits(now, age)
        if now - self._told >= PULSE or (age > HELD and now - self._told >= _BEAT):
            self._told = now
            self._service.beat(age)

    def _log_stacks(self, late: float) -> None:
        _log.warning(
            "worker %s had no turn for %.1f s: a routine held the interpreter's lock (C code that does not release "
            "it), or the process was stopped or starved. What its threads do now:\n%s",
            self._service.uid,
            late,
            stack_dumps.others(),
        )

    def _log_holder(self, age: float) -> None:
        held = self._service.tasks.held_by() or self
        suspect, self._suspect = self._suspect, held
        if held is self._named or held is not suspect:  # only what is there at two checks holds the loop
            return
        self._named = held
        what = "something a routine started"
        if isinstance(held, RunningCall):
            what = f"{held.begun.function.tag} (task {held.id})"
        module = self._service.tasks.imports_on_loop()
        if module is not None:
            _log.warning(
                "%s imports %s while it runs, which holds the loop of worker %s for %.1f s so far. Import it at the "
                "top of a module: workers import those in a thread",
                what,
                module,
                self._service.uid,
                age,
            )
            return
        _log.warning(
            "%s holds the loop of worker %s for %.1f s; it answers, and takes no new calls until the loop is free. "
            "Await in it: what computes or blocks belongs into a routine with a plain `def`.\n%s",
            what,
            self._service.uid,
            age,
            self._service.tasks.stack(),
        )
