"""One call of a routine, as its dispatcher keeps it: with its routine, its worker, and what earlier attempts showed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from headgate.core.clock import clock
from headgate.workers.client.isolation import Isolation, after_loss, max_calls_of
from headgate.workers.protocol.bulk import BulkPayload
from headgate.workers.protocol.messages import Answer, Outgoing

if TYPE_CHECKING:
    from headgate.resources.members import Use
    from headgate.resources.model import Resource
    from headgate.workers.client.connection import Connection
    from headgate.workers.model import FunctionForm
    from headgate.workers.routines import Routine
    from headgate.workers.serialization.settled import Surroundings

GONE = frozenset({"lost", "stopped"})
"""Kinds of answers that say that the worker of a call is gone."""


class ArgumentNames:
    """Which classes the arguments of one call may name, and the form of its function, which must have them."""

    __slots__ = ("_form", "_routine")

    def __init__(self, routine: Routine) -> None:
        self._routine = routine
        self._form: FunctionForm | None = None

    def form(self) -> FunctionForm:
        """Return the form in which the function has to be sent with these arguments."""
        if self._form is None:
            self._form = self._routine.portable.form(self._routine.decorated)
        return self._form

    def names(self) -> Mapping[int, str]:
        """Return the ids of the classes, by the identity of the class."""
        self.form()
        return self._routine.portable.names

    def adopt(self, classes: Collection[type]) -> bool:
        """Have the function take these classes along. False: none of them can be named."""
        adopted = self._routine.portable.adopt(self._routine.decorated, classes)
        self._form = adopted or self._form
        return adopted is not None


class RoutineCall(Outgoing):
    """A call of a routine. `Dispatcher.prepare` makes it, and `Dispatcher.assign` gives it to a worker."""

    __slots__ = ("connection", "given", "routine", "seen", "use")

    routine: Routine
    seen: Surroundings | None
    """What was sent with the routine: the result may name classes of it, which must not be gone by then."""
    use: Use
    """The hold on its worker, by which the roster counts it."""
    connection: Connection
    """The connection to its worker."""
    given: tuple[Resource[Any], ...]
    """The resources among its arguments, if it belongs to no task."""

    @property
    def is_bulky(self) -> bool:
        """Whether its arguments are sent apart from frames. Known until it is sent."""
        return isinstance(self.arguments, BulkPayload)

    def again(self, arguments: bytes | BulkPayload) -> RoutineCall:
        """Copy it for another attempt. (A session drops the arguments of a call that it has sent.)"""
        call = RoutineCall(
            self.task,
            self.form,
            arguments,
            self.timeout,
            self.caller,
            self.tell_start,
            None,
            self.prefetch,
            self.context,
            self.tenant,
            self.request,
            self.origin,
        )
        call.routine, call.limit, call.exchange, call.backlog = self.routine, self.limit, self.exchange, self.backlog
        call.seen, call.given = self.seen, self.given
        return call


_NOBODY: dict[str, str] = {}


class Attempts:
    """What decides where one call goes next: its limits, and what its attempts have shown so far."""

    # What most calls never change is kept by the class (benchmarks/dispatch.py).
    to: str = ""
    """The uid of the only worker that may run it; "": any may."""
    until: float | None = None
    """When it must have begun; None: no limit."""
    left: int = 0
    """How many more times it may run after its worker was lost."""
    isolation: Isolation | None = None
    """What it needs since its worker was lost."""
    tried: Mapping[str, str] = _NOBODY
    """Workers that refused it, by uid, each with its reason."""
    patience: float | None = None
    """When its own timeout would be over, although no worker could begin it; None: not counted so far."""
    may_stay: bool = True
    """Whether it may go to the worker on which its caller runs although that refuses others."""

    def limit(self, call: RoutineCall, to: str) -> None:
        """Set the limits of a call, if it has any."""
        if call.limit:
            self.until = clock.now() + call.limit
        if to:
            self.to = to
        else:
            self.left = call.routine.options.retries
        self.isolation = max_calls_of(call.request)

    def after_refusal(self, uid: str, reason: str) -> None:
        """Note that a worker refused the call."""
        self.tried = {**self.tried, uid: reason}

    def after_answer(self, call: RoutineCall, answer: Answer, here: str) -> None:
        """Note an attempt that did not run, or was lost, before the next one. `here`: the worker of its caller."""
        kind, connection = answer.kind, call.connection
        if kind == "lost" or (kind in GONE and self.isolation is not None):  # it was lost before
            self.isolation = after_loss(self.isolation, self.left, max(0, connection.casualties - 1))
        if kind in GONE:
            self.left -= 1
            self.tried = _NOBODY
        elif kind == "reserved" and connection.metadata.uid == here:
            self.may_stay = False
