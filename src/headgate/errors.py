"""Every error of headgate, in one tree, sorted by whose turn it is to act.

    HeadgateError
    ├── your call is wrong: change the code
    │   ├── InvalidArgument (ValueError)        HEADGATE-ARG-001
    │   ├── InvalidType (TypeError)             HEADGATE-ARG-002
    │   ├── UnknownResource (KeyError)          HEADGATE-ARG-003
    │   ├── NoActivePool                        HEADGATE-ARG-004
    │   └── ContextVarCollision                 HEADGATE-ARG-005
    ├── a policy said no: wait, widen it, or give up
    │   ├── QueueFull                           HEADGATE-POL-001
    │   ├── PoolBusy                            HEADGATE-POL-002
    │   ├── DuplicatePool                       HEADGATE-POL-003
    │   ├── ScopeNeedsStore                     HEADGATE-POL-004
    │   ├── PipelineIdMissing                   HEADGATE-POL-005
    │   ├── IdempotencyConflict                 HEADGATE-POL-006
    │   ├── WaitCycle                           HEADGATE-POL-007
    │   ├── PoolClosed                          HEADGATE-POL-008
    │   └── SubmitTimeout                       HEADGATE-POL-009
    ├── nothing could serve the call
    │   ├── PoolExhausted                       HEADGATE-RES-001
    │   │   └── CostTooLarge (InvalidArgument)  HEADGATE-RES-004
    │   └── NoWorkersAvailable                  HEADGATE-RES-002
    │       └── DispatchTimeout (TimeoutError)  HEADGATE-RES-003
    ├── the work itself ended badly
    │   ├── TaskFailed                          HEADGATE-TSK-001
    │   ├── TaskRejected                        HEADGATE-TSK-002
    │   ├── TaskCancelled                       HEADGATE-TSK-003
    │   ├── TaskExpired                         HEADGATE-TSK-004
    │   ├── TaskStale                           HEADGATE-TSK-005
    │   ├── RoutineTimeout (TimeoutError)       HEADGATE-TSK-006
    │   ├── RemoteError                         HEADGATE-TSK-007
    │   └── RoutineExited                       HEADGATE-TSK-008
    ├── a store cannot be used
    │   ├── StoreLocked                         HEADGATE-STO-001
    │   ├── StoreWriteFailed                    HEADGATE-STO-002
    │   ├── StoreFormatTooNew                   HEADGATE-STO-003
    │   ├── StoreUnreachable                    HEADGATE-STO-004
    │   └── LeaseLost                           HEADGATE-STO-005
    ├── a worker is out of reach
    │   ├── WorkerLost                          HEADGATE-WRK-001
    │   ├── WorkerStartFailed                   HEADGATE-WRK-002
    │   └── RpcError                            HEADGATE-WRK-003
    │       └── TransientRpcError               HEADGATE-WRK-004
    └── workers cannot be announced or found
        └── DiscoveryFailed                     HEADGATE-DIS-001
            ├── DiscoveryTimeout (TimeoutError) HEADGATE-DIS-002
            └── UnknownWorker                   HEADGATE-DIS-003

An error says what happened and why in its message, and what to do in its `remedy`; ``str()`` shows both and the `code`,
which never changes and is what to search for. All of them survive pickling with their type and fields.

The signals an operation raises (CooldownResource, DisableResource, RetryOperation) are not here: they are messages to a
pool, not failures, and live in `headgate.resources.signals`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own, without importing typing: every program that uses headgate pays for this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, ClassVar, Literal, Protocol, TypeAlias

    class FailedAttempt(Protocol):
        """What `headgate.Attempt` is. Named here so that errors import nothing of headgate."""

        @property
        def resource_id(self) -> str: ...
        @property
        def signal(self) -> Exception: ...
        @property
        def duration(self) -> float: ...

    ExhaustedReason: TypeAlias = Literal["no_eligible", "attempts", "deadline"]


def travel(self: BaseException) -> tuple[Any, ...]:
    """A ``__reduce__`` that restores an exception as it is, instead of calling its constructor again.

    The stdlib calls ``type(*args)``, which breaks as soon as a constructor's parameters are not its ``args``.
    """
    return _arrive, (type(self), self.args, {k: v for k, v in vars(self).items() if not k.startswith("__")})


def _arrive(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


class HeadgateError(Exception):
    """The root of all errors of headgate."""

    code: ClassVar[str] = "HEADGATE-000"
    remedy: str = "See the documentation of the call that raised this."

    def __init__(self, message: str = "", *, remedy: str | None = None) -> None:
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy

    @property
    def message(self) -> str:
        """What happened and why, without the remedy."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        what = self.message or type(self).__name__
        return f"{what}{'' if what.endswith(('.', '!', '?')) else '.'} {self.remedy} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return travel(self)


# -- your call is wrong -----------------------------------------------------------------------------------------------


class InvalidArgument(HeadgateError, ValueError):
    """An argument has a value that cannot work. The message names it and shows the value."""

    code = "HEADGATE-ARG-001"
    remedy = "Correct the argument named above."


class InvalidType(HeadgateError, TypeError):
    """An argument is of a kind that cannot work. The message names it and the type."""

    code = "HEADGATE-ARG-002"
    remedy = "Correct the argument named above."


class UnknownResource(HeadgateError, KeyError):
    """No resource of this id is in the pool."""

    code = "HEADGATE-ARG-003"
    remedy = "`snapshot()` lists the ids that are there."


class NoActivePool(HeadgateError):
    """A routine was called and no WorkerPool is open around the call."""

    code = "HEADGATE-ARG-004"
    remedy = "Open one around the call: `async with headgate.WorkerPool():`, and await it inside."


class ContextVarCollision(HeadgateError):
    """Two context variables claim the same key."""

    code = "HEADGATE-ARG-005"
    remedy = "Give one of them another name or namespace."


# -- a policy said no -------------------------------------------------------------------------------------------------


class _UnderLoad(Exception):
    """Says how loaded the pool was that did not accept a task."""

    retry_after: float | None = None
    """The estimated seconds until the task would have started; None when there is nothing to estimate them from."""
    queued: int = 0
    """How many tasks were queued."""
    active: int = 0
    """How many tasks held a slot."""

    def __init__(
        self,
        message: str = "",
        *,
        retry_after: float | None = None,
        queued: int = 0,
        active: int = 0,
        remedy: str | None = None,
    ) -> None:
        HeadgateError.__init__(self, message, remedy=remedy)  # type: ignore[arg-type] # it is one, in both of them
        self.retry_after, self.queued, self.active = retry_after, queued, active


class QueueFull(_UnderLoad, HeadgateError):
    """The queue is at its depth, and its policy is to fail the submitter."""

    code = "HEADGATE-POL-001"
    remedy = "Submit again later, or choose another `on_full` or a greater depth."


class PoolBusy(_UnderLoad, HeadgateError):
    """The task cannot start now, and the pool keeps no queue."""

    code = "HEADGATE-POL-002"
    remedy = "Submit again later, or give the pool a queue."


class DuplicatePool(HeadgateError):
    """A live pool has this name."""

    code = "HEADGATE-POL-003"
    remedy = "Use `pool_get(name)` to get the one that exists, or close it first."


class ScopeNeedsStore(HeadgateError):
    """This scope is shared between processes and needs a shared store."""

    code = "HEADGATE-POL-004"
    remedy = (
        "Pass `store=SqliteStore(path)` for the processes of one machine or `store=PostgresStore(dsn)` for those of "
        "several, or set HEADGATE_STORE."
    )


class PipelineIdMissing(HeadgateError):
    """A pipeline pool has no pipeline id."""

    code = "HEADGATE-POL-005"
    remedy = "Pass `pipeline_id=`, enter `pipeline_scope(id)`, or set HEADGATE_PIPELINE_ID."


class IdempotencyConflict(HeadgateError):
    """The same idempotency key was used for other work."""

    code = "HEADGATE-POL-006"
    remedy = (
        "Use one key for one piece of work. If it is the same work all the same, say so with submit(payload_id=...), "
        'or for all keys of a pool with TaskPool(on_conflict="trust_key").'
    )


class WaitCycle(HeadgateError):
    """Tasks wait for each other in a circle: none of them could ever go on."""

    code = "HEADGATE-POL-007"
    remedy = "Break the circle shown above."


class PoolClosed(HeadgateError):
    """The pool is closed or closing."""

    code = "HEADGATE-POL-008"
    remedy = "Make a new pool, or submit before leaving its `async with` block."


class SubmitTimeout(_UnderLoad, HeadgateError):
    """No place in the queue came free in time."""

    code = "HEADGATE-POL-009"
    remedy = "Raise `wait_timeout=`, or submit more slowly."


# -- nothing could serve the call -------------------------------------------------------------------------------------


class PoolExhausted(HeadgateError):
    """A ResourcePool could not serve a call. The last signal is its ``__cause__``."""

    code = "HEADGATE-RES-001"
    remedy = "Add resources, wait with `wait_for_capacity=True`, or call again after `retry_after` seconds."

    def __init__(
        self,
        message: str = "no eligible resource",
        *,
        reason: ExhaustedReason = "no_eligible",
        attempts: Sequence[FailedAttempt] = (),
        retry_after: float | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.reason: ExhaustedReason = reason
        """What ran out: "no_eligible" resource, "attempts", or time before the "deadline"."""
        self.attempts: tuple[FailedAttempt, ...] = tuple(attempts)
        """What was tried: resource id, signal and duration of each attempt, oldest first."""
        self.retry_after: float | None = retry_after
        """Seconds until the earliest cooldown of a matching resource ends; None when none is cooling."""


class CostTooLarge(PoolExhausted, InvalidArgument):
    """A call costs more than a whole window of any matching resource's quota, so waiting cannot help."""

    code = "HEADGATE-RES-004"
    remedy = "Make the call smaller, or give the resources a larger quota."


class NoWorkersAvailable(HeadgateError):
    """No worker could take the task."""

    code = "HEADGATE-RES-002"
    remedy = "Start workers, or raise `quorum_timeout`."


class DispatchTimeout(NoWorkersAvailable, TimeoutError):
    """No worker had begun the task in time."""

    code = "HEADGATE-RES-003"
    remedy = "Raise `dispatch_timeout`, or give the pool more workers."


# -- the work itself ended badly --------------------------------------------------------------------------------------


class TaskFailed(HeadgateError):
    """The task raised; this is what is left of its exception after a restart."""

    code = "HEADGATE-TSK-001"
    remedy = "Read the error above, then submit it again."


class TaskRejected(HeadgateError):
    """The task was dropped by the pool's backpressure policy and never ran."""

    code = "HEADGATE-TSK-002"
    remedy = "Submit it again when there is room."

    def __init__(self, message: str = "", *, retry_after: float | None = None, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after: float | None = retry_after
        """The estimated seconds until the task would have started, when it was dropped; None if nothing was known."""


class TaskCancelled(HeadgateError):
    """The task was cancelled. (Not CancelledError: whoever awaits it is not being cancelled.)"""

    code = "HEADGATE-TSK-003"
    remedy = "Submit it again if it is still wanted."


class TaskExpired(HeadgateError):
    """The task did not start before its `ttl` or `deadline`."""

    code = "HEADGATE-TSK-004"
    remedy = "Give it more time, or the pool more slots."


class TaskStale(HeadgateError):
    """The process that owned the task ended before the task did."""

    code = "HEADGATE-TSK-005"
    remedy = "Submit it again with the same idempotency key."


class RoutineTimeout(HeadgateError, TimeoutError):
    """A routine ran longer than its timeout."""

    code = "HEADGATE-TSK-006"
    remedy = "Raise `timeout=`, or make the routine shorter."


class RemoteError(HeadgateError):
    """A routine raised something that cannot travel; its type's name and traceback are in the message."""

    code = "HEADGATE-TSK-007"
    remedy = "Make the exception picklable to get the real one."


class RoutineExited(HeadgateError):
    """What ran on a worker called `sys.exit()`, or raised KeyboardInterrupt. Only that call or task has failed."""

    code = "HEADGATE-TSK-008"
    remedy = "Return, or raise another exception: on a worker there is no program to end."

    def __init__(self, message: str = "", *, exit_code: int = 1, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.exit_code: int = exit_code
        """What the exit code of a program would be that ended so: 0 for `sys.exit()`, 1 for `sys.exit("text")`."""


# -- a store cannot be used -------------------------------------------------------------------------------------------


class StoreLocked(HeadgateError):
    """The store cannot be opened: another process writes to it."""

    code = "HEADGATE-STO-001"
    remedy = "End the process named above, or use another path."


class StoreWriteFailed(HeadgateError):
    """A record could not be written. Nothing was acknowledged."""

    code = "HEADGATE-STO-002"
    remedy = "Make room on the disk, then submit again."


class StoreFormatTooNew(HeadgateError):
    """The store was written by a newer release."""

    code = "HEADGATE-STO-003"
    remedy = "Upgrade headgate, or use another path."


class StoreUnreachable(HeadgateError):
    """The store does not answer. The message names host and cause, and never a password."""

    code = "HEADGATE-STO-004"
    remedy = "Start the server, or correct the address."


class LeaseLost(HeadgateError):
    """This process could not renew its lease in time: what it held of a shared budget belongs to others now."""

    code = "HEADGATE-STO-005"
    remedy = "Nothing need be done: the pool takes part again by itself. A longer `lease=` of the store helps."


# -- a worker is out of reach -----------------------------------------------------------------------------------------


class WorkerLost(HeadgateError):
    """A worker vanished while it had the task. It may have run, in part or whole."""

    code = "HEADGATE-WRK-001"
    remedy = "Use `@routine(retries=n)` for work that may run twice."

    def __init__(
        self,
        message: str = "",
        *,
        task: str | None = None,
        worker: str | None = None,
        exit_code: int | None = None,
        signal: int | None = None,
        stderr: str = "",
        neighbours: int = 0,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.task: str | None = task
        """The id of the task that it had."""
        self.worker: str | None = worker
        """The uid of the worker."""
        self.exit_code: int | None = exit_code
        """The exit code of its process; None: a signal killed it, or that is not known."""
        self.signal: int | None = signal
        """The number of the signal that killed it; None: none did, or that is not known."""
        self.stderr: str = stderr
        """The last lines that it wrote to stderr, as far as they are known, without values of resources."""
        self.neighbours: int = neighbours
        """How many other calls of this event loop were lost with it."""


class WorkerStartFailed(HeadgateError):
    """Workers end before they are ready."""

    code = "HEADGATE-WRK-002"
    remedy = "Fix the cause named above."


class RpcError(HeadgateError):
    """A call to a worker failed in the transport."""

    code = "HEADGATE-WRK-003"
    remedy = "Check the worker named above."


class TransientRpcError(RpcError):
    """A call to a worker failed in the transport, and may work when tried again."""

    code = "HEADGATE-WRK-004"
    remedy = "Try again."


# -- workers cannot be announced or found -----------------------------------------------------------------------------


class DiscoveryFailed(HeadgateError):
    """Workers cannot be announced or found this way."""

    code = "HEADGATE-DIS-001"
    remedy = "Correct the cause named above."


class DiscoveryTimeout(DiscoveryFailed, TimeoutError):
    """The directory or network that a discovery uses did not answer within the limit that the message names."""

    code = "HEADGATE-DIS-002"
    remedy = "Try again; if it happens again, look for a process that is stopped or hangs."


class UnknownWorker(DiscoveryFailed):
    """An update names a worker that nobody has announced, or that is gone."""

    code = "HEADGATE-DIS-003"
    remedy = "Announce it with 'worker-added'."
