"""The small part of httpx that the examples use, without a network. In your code: `import httpx`.

Every key answers 200 unless `will_answer` said otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

_coming: dict[str, list[int]] = {}
_REASONS = {200: "OK", 401: "Unauthorized", 429: "Too Many Requests", 502: "Bad Gateway"}


def will_answer(key: str, *statuses: int) -> None:
    """The next requests with this bearer token get these statuses, one each."""
    _coming.setdefault(key, []).extend(statuses)


@dataclass(frozen=True)
class Response:
    status_code: int
    key: str
    sent: Any
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return {"status": _REASONS[self.status_code], "served_with": self.key, "echo": self.sent}


class AsyncClient:
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    async def post(self, url: str, *, headers: Mapping[str, str], json: Any = None) -> Response:
        await asyncio.sleep(0.01)
        key = headers["Authorization"].removeprefix("Bearer ")
        status = _coming[key].pop(0) if _coming.get(key) else 200
        return Response(status, key, json, {"retry-after": "30"} if status == 429 else {})
