"""What a pool says when it is used on the wrong event loop, is interrupted, or when the time of a task is over."""

from __future__ import annotations

from headgate.errors import InvalidArgument
from headgate.tasks.model import TaskRecord


def without_loop(name: str) -> InvalidArgument:
    """The pool of this name was used where no event loop runs."""
    return InvalidArgument(
        f"the pool {name!r} was used without a running event loop in this thread",
        remedy="Submit from a coroutine, or with `asyncio.run_coroutine_threadsafe(pool.submit(...), loop)`.",
    )


def on_another_loop(name: str, what: str) -> InvalidArgument:
    """The method `what` of the pool was called on another loop than the pool is bound to."""
    return InvalidArgument(
        f"{what} was called on another event loop or thread than the one the pool {name!r} is bound to",
        remedy="Make a pool for each event loop (each asyncio.run has its own). From a thread: "
        "`asyncio.run_coroutine_threadsafe(pool.submit(...), loop)`, `loop.call_soon_threadsafe(handle.cancel)`.",
    )


def overdue_error(task: TaskRecord, cause: BaseException) -> TimeoutError:
    """The exception of a task that was stopped because its time was over."""
    limit = "its deadline" if task.terms.timeout is None else f"timeout={task.terms.timeout:g} s"
    error = TimeoutError(f"{task.label} was stopped at {limit}")
    error.__cause__ = cause
    return error


def log_interrupted(name: str, what: str, in_threads: int) -> None:
    """Log that a pool is interrupted, and what it does now."""
    import logging

    waits = f"; {in_threads} in threads, which end by themselves or with another Ctrl-C" if in_threads else ""
    logging.getLogger("headgate.tasks").warning("%s was interrupted: %s%s", name, what, waits)
