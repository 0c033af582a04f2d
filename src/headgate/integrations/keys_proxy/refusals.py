"""What a client gets from the proxy itself, and not from the upstream: an error as providers write it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

Headers = list[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, a code for programs and a sentence for people."""

    status: int
    code: str
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        """JSON of the form that the SDKs of OpenAI and Anthropic both read."""
        kind = _KINDS.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error = {"type": kind, "code": self.code, "message": f"headgate: {self.message}"}
        return json.dumps({"type": "error", "error": error}).encode()

    def all_headers(self, body: bytes) -> Headers:
        """Return the headers of an answer with this body."""
        length = str(len(body)).encode()
        return [(b"content-type", b"application/json"), (b"content-length", length), *self.headers]


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def retry_after(seconds: float | None) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header that tells a client when to come back."""
    return () if seconds is None else ((b"retry-after", str(max(1, round(seconds))).encode()),)
