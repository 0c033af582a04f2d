"""What users pass as operations, and what these return."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine
from typing import Any

from headgate.core.cancellation import adopt
from headgate.errors import InvalidType


def coroutine_of(made: object) -> tuple[Coroutine[Any, Any, Any], bool]:
    """A coroutine for what an operation returned, and whether siblings may cancel it."""
    if isinstance(made, Coroutine):
        return made, True
    if isinstance(made, Awaitable):
        return adopt(made), asyncio.isfuture(made)
    if inspect.isawaitable(made):
        return adopt(made), False
    streams = hasattr(made, "__anext__")
    raise InvalidType(
        f"operation must return an Awaitable, got {type(made).__name__}",
        remedy="Use stream() for an async generator." if streams else "Pass an async function, or use run_sync().",
    )


def require_operation(operation: object) -> None:
    """Raise InvalidType when what was passed as operation cannot be called at all."""
    if callable(operation):
        return
    if inspect.iscoroutine(operation):
        operation.close()
    raise InvalidType(
        f"operation must be a function that takes the resource, got {type(operation).__name__}",
        remedy="Pass the function itself, or a lambda: pool.run(lambda resource: fetch(resource, url)).",
    ) from None
