"""What a client is told when a pool does not take its work: 503, and when to come again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headgate.core.checks import checked_whole
from headgate.errors import (
    HeadgateError,
    NoWorkersAvailable,
    PoolBusy,
    PoolClosed,
    PoolExhausted,
    QueueFull,
    SubmitTimeout,
    TaskExpired,
    TaskRejected,
)
from headgate.integrations.asgi.messages import App, ErrorAnswer, Message, Receive, Scope, Send

REFUSALS: tuple[type[HeadgateError], ...] = (
    QueueFull,
    PoolBusy,
    SubmitTimeout,
    TaskRejected,
    TaskExpired,
    PoolExhausted,
    NoWorkersAvailable,
    PoolClosed,
)
"""The errors that say: not now. The work was not begun, or no resource would do it; another time it may succeed."""

_LONGEST = 86_400  # seconds: a client that is told to wait longer would rather be told tomorrow


class PoolErrors:
    """ASGI middleware: the errors of `REFUSALS` become 503 with Retry-After and a small JSON body.

    Retry-After is the pool's own estimate in whole seconds, at least 1, and `retry_after` where the pool has none. The
    body has the stable code of the error and nothing of its message. `status=429` is for services whose pools limit
    each client, and not the service. All other errors, and those after the first byte of an answer, go on as they are.
    """

    def __init__(self, app: App, *, status: int = 503, retry_after: int = 1) -> None:
        self._app = app
        self._status = checked_whole("status", status, 400)
        self._default = checked_whole("retry_after", retry_after, 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            refusal = None if started else _refusal_in(error)
            if refusal is None:
                raise
            await _answer(refusal, self._status, self._default)(scope, receive, send)


def exception_handlers(*, status: int = 503, retry_after: int = 1) -> dict[Any, Callable[[Any, Any], Any]]:
    """Return what `PoolErrors` does as exception handlers: ``FastAPI(exception_handlers=asgi.exception_handlers())``.

    They see what an endpoint raises, and not what a middleware does.
    """
    code, default = checked_whole("status", status, 400), checked_whole("retry_after", retry_after, 1)

    async def handle(request: Any, error: Any) -> ErrorAnswer:
        return _answer(error, code, default)

    return dict.fromkeys(REFUSALS, handle)


def _answer(error: HeadgateError, status: int, default: int) -> ErrorAnswer:
    estimate: float | None = getattr(error, "retry_after", None)
    seconds = default if estimate is None else math.ceil(min(_LONGEST, max(1, estimate)))
    return ErrorAnswer(status, error.code, f"There is no capacity for this now. Try again in {seconds} s.", seconds)


def _refusal_in(error: Exception) -> HeadgateError | None:
    """The refusal that this error is. Of a group, which a TaskGroup raises, the first, if all of them are refusals."""
    if not isinstance(error, ExceptionGroup):
        return error if isinstance(error, REFUSALS) else None
    refusals = [_refusal_in(one) for one in error.exceptions]
    return None if None in refusals else refusals[0]
