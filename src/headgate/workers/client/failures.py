"""The errors that the caller of a routine gets, and the events that tell how a call went."""

from __future__ import annotations

from asyncio import CancelledError
from copy import copy
from typing import TYPE_CHECKING, NoReturn

from headgate.core.clock import clock
from headgate.core.redaction import redact
from headgate.core.topics import topic_named
from headgate.errors import (
    DispatchTimeout,
    InvalidArgument,
    PoolClosed,
    RemoteError,
    RoutineExited,
    RoutineTimeout,
    WorkerLost,
)
from headgate.workers.model import TaskException
from headgate.workers.processes.exit_status import Ending
from headgate.workers.serialization import context_frames
from headgate.workers.serialization.pickling import load_exception

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headgate.workers.client.routine_call import RoutineCall
    from headgate.workers.protocol.bulk import BulkPayload
    from headgate.workers.protocol.messages import Answer
    from headgate.workers.routines import Routine
    from headgate.workers.serialization.dynamic_classes import Scope

_ENDS_A_PROGRAM = (SystemExit, KeyboardInterrupt)
"""What asyncio lets through: raised in a task, they end its loop, whoever awaits the task."""
INSIDE = "Call it inside the `async with` block of its pool, and have its results there."
TASKS = topic_named("workers.tasks")
"""The classes of its events are imported by the first one: a worker emits none, and they took 15 ms of its start."""
_client = ""  # what the ids of this process's tasks begin with


def client_id() -> str:
    """Return what the ids of this process's tasks begin with. Made when first needed."""
    global _client
    if not _client:
        _client = clock.token()[:12]
    return _client


def task_id(call: RoutineCall) -> str:
    """Return the id by which events name a call."""
    return f"{client_id()}/{call.task}"


# -- events -----------------------------------------------------------------------------------------------------------


def tell_dispatched(call: RoutineCall) -> None:
    """Emit the event that a worker is given a call."""
    if TASKS.listeners:
        from headgate.workers.events import TaskDispatched

        TASKS.emit(
            TaskDispatched(
                at=clock.wall(),
                task=task_id(call),
                tag=call.routine.tag,
                uid=call.connection.metadata.uid,
                request_id=None if call.request is None else call.request.request_id,
            )
        )


def tell_ended(call: RoutineCall, outcome: str, exception: TaskException | None = None) -> None:
    """Emit the event that a call has its outcome."""
    if TASKS.listeners:
        from headgate.workers.events import TaskFinished

        request = call.request
        if exception is not None:
            exception = TaskException(exception.type, redact(exception.traceback))
        TASKS.emit(
            TaskFinished(
                at=clock.wall(),
                task=task_id(call),
                tag=call.routine.tag,
                uid=call.connection.metadata.uid,
                outcome=outcome,
                exception=exception,
                request_id=None if request is None else request.request_id,
            )
        )


def described(error: BaseException) -> TaskException:
    """Describe an exception of this library for events."""
    return TaskException(type(error).__qualname__, str(error))


# -- errors -----------------------------------------------------------------------------------------------------------


def raise_lost(call: RoutineCall, answer: Answer, closed: str) -> NoReturn:
    """Raise that the worker of a call is gone, or that its pool was closed before it ended (`closed`: why)."""
    error = _not_finished(call.routine, closed) if closed else _lost(call, answer.kind == "stopped")
    tell_ended(call, "closed" if closed else "lost", described(error))
    raise error


def _not_finished(routine: Routine, why: str) -> PoolClosed:
    """Its pool was closed before it ended."""
    return PoolClosed(f"{routine.tag} was not finished when its pool was closed ({why})", remedy=INSIDE)


def _lost(call: RoutineCall, stopped: bool) -> WorkerLost:
    routine, connection = call.routine, call.connection
    task, uid, pid = task_id(call), connection.metadata.uid, connection.pid
    what = "was stopped" if stopped else "was lost"
    why = "it did not wait for the task to end" if stopped else connection.reason
    ending = connection.ending or Ending()
    why = f"{ending} ({why})" if str(ending) else why
    retries = routine.options.retries
    remedy = f"All its attempts (retries={retries}) were lost so: see what ends the workers." if retries else None
    if remedy is None and call.request is not None:
        remedy = "Use `submit(..., retries=n)` for a task that may run twice; it then goes to another worker."
    error = WorkerLost(
        f"worker {uid} (pid {pid}) {what} while it had task {task} ({routine.tag}): {why}. "
        "The task may have run, in part or whole",
        task=task,
        worker=uid,
        exit_code=ending.exit_code,
        signal=ending.signal,
        stderr=ending.stderr,
        neighbours=max(0, connection.casualties - 1),
        remedy=remedy,
    )
    if ending.stderr:
        error.add_note(f"The last that worker {uid} wrote to stderr:\n{ending.stderr}")
    return error


def _raised(call: RoutineCall, answer: Answer, scope: Scope | None, thrown: BaseException | None) -> BaseException:
    """Return what a routine raised, or that it was cancelled, for its caller. `thrown`: what the consumer of a
    generator raised in it at this step."""
    if answer.kind == "cancelled":
        error = load_exception(answer.payload, scope) if answer.payload else None
        return error if isinstance(error, CancelledError) else CancelledError()
    error = load_exception(answer.payload, scope)
    if isinstance(error, _ENDS_A_PROGRAM) and not isinstance(thrown, type(error)):
        return _exited(call, error)
    return error


def _exited(call: RoutineCall, error: BaseException) -> RoutineExited:
    """Make the error for a routine that raised one of `_ENDS_A_PROGRAM`, which is its cause."""
    tag, worker = call.routine.tag, f"on worker {call.connection.metadata.uid}"
    if isinstance(error, SystemExit):
        given = error.code
        code = 0 if given is None else given if isinstance(given, int) else 1  # as Python does
        argument = "" if given is None else redact(repr(given))
        made = RoutineExited(f"{tag} called sys.exit({argument}) {worker}", exit_code=code)
    else:
        made = RoutineExited(f"{tag} raised KeyboardInterrupt {worker}", exit_code=130)
    notes = getattr(error, "__notes__", None)
    if notes:  # the last one is its traceback there
        made.add_note(notes.pop())
    made.__cause__ = error
    return made


def raise_answer(
    call: RoutineCall,
    answer: Answer,
    scope: Scope | None,
    failures: Sequence[str] = (),
    thrown: BaseException | None = None,
) -> NoReturn:
    """Raise here what the routine raised there. `thrown`: what its consumer raised in a generator at this step."""
    error = _raised(call, answer, scope, thrown)
    if isinstance(error, RemoteError):
        call.routine.portable.disown()
    if TASKS.listeners:
        notes = getattr(error, "__notes__", None)
        text = str(notes[-1]) if isinstance(notes, list) and notes else ""
        tell_ended(call, answer.kind, TaskException(type(error).__qualname__, text))
    if failures:
        context_frames.tell(call.routine.tag, failures, error)
    context = error.__context__
    try:
        raise error
    finally:
        # Python puts the exception that is being handled here in its place.
        BaseException.__setattr__(error, "__context__", context)
        del error


def not_begun(call: RoutineCall) -> DispatchTimeout:
    """Make the error for a call that its worker has not begun in time."""
    return DispatchTimeout(
        f"{call.routine.tag} had not begun on worker {call.connection.metadata.uid} {call.limit:g} s after it was "
        "called (dispatch_timeout)"
    )


def too_late(call: RoutineCall, *, gone: bool) -> RoutineTimeout:
    """Make the error for a call past its timeout, whose worker has not said how it ended, or is gone."""
    routine = call.routine
    what = f"a step of {routine.tag}" if routine.portable.generator else routine.tag
    how = "is gone" if gone else "did not confirm its end: it may be running still"
    return RoutineTimeout(
        f"{what} ran longer than its timeout of {call.timeout:g} s, and worker {call.connection.metadata.uid} {how}"
    )


def unreadable(routine: Routine, error: BaseException) -> RemoteError:
    """Make the error for what a routine returned or yielded, and that cannot be unpickled here."""
    how = "yielded" if routine.portable.generator else "returned"
    return RemoteError(
        f"what {routine.tag} {how} cannot be read here: {type(error).__name__}: {redact(str(error))}",
        remedy="Its class must be importable here, and what it pickles must unpickle.",
    )


def fresh(error: BaseException) -> BaseException:
    """Copy an error to raise it: one that is raised again and again keeps all its tracebacks."""
    again = copy(error)
    for note in getattr(error, "__notes__", ()):
        again.add_note(note)
    again.__cause__ = error.__cause__
    return again


def listed(reasons: Mapping[str, str]) -> str:
    """List workers with the reason why each of them did not take a call."""
    return "; ".join(f"{uid}: {redact(reason)}" for uid, reason in reasons.items())


def refuse_long(routine: Routine, payload: bytes | BulkPayload, most: int) -> None:
    """Raise InvalidArgument if a payload takes more bytes than `most`, unless that is 0."""
    if 0 < most < len(payload):
        raise InvalidArgument(
            f"what is sent to {routine.tag} takes {len(payload):,} bytes, and max_payload is {most:,}",
            remedy="Send it in parts, or open the pool with a higher `max_payload`.",
        )
