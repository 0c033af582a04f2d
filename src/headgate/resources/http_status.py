"""The HTTP status that an exception or a response carries, whatever library it is of. Pure.

httpx, httpx2      response.status_code; an error has its .response
requests           the same
aiohttp            response.status, error.status
openai, anthropic  error.status_code, error.response
google-genai       error.code, error.response
botocore           error.response, a dict: ["ResponseMetadata"]["HTTPStatusCode"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


def status_of(outcome: object) -> int | None:
    """The HTTP status of an exception or of a response; None if it has none, or is neither."""
    try:
        if isinstance(outcome, BaseException):
            return _of_error(outcome)
        return _status(outcome, "status_code", "status") if _is_response(outcome) else None
    except Exception:  # an attribute that computes, and fails
        return None


def response_of(outcome: object) -> Any:
    """The response that an exception carries, or the response itself; None if there is none."""
    try:
        if isinstance(outcome, BaseException):
            return getattr(outcome, "response", None)
        return outcome if _is_response(outcome) else None
    except Exception:
        return None


def headers_of(outcome: object) -> Any:
    """The headers of the response that an exception tells of, or of a response; None if there are none."""
    response = response_of(outcome)
    try:
        if isinstance(response, Mapping):
            metadata = response.get("ResponseMetadata")
            return metadata.get("HTTPHeaders") if isinstance(metadata, Mapping) else None
        headers = getattr(response, "headers", None)
        return getattr(outcome, "headers", None) if headers is None else headers
    except Exception:
        return None


class Answer(NamedTuple):
    """The status and the headers of an answer, in the shape of a response."""

    status_code: int | None
    headers: Any


HEARD = "headgate_heard"
"""The extension of a response from which a pool has learned already, when it passed a transport."""


def was_heard(outcome: object) -> bool:
    """Whether a pool has learned from this response, or from that of this error, when it passed a transport."""
    try:
        extensions = getattr(response_of(outcome), "extensions", None)
        return isinstance(extensions, dict) and HEARD in extensions
    except Exception:
        return False


def _of_error(error: BaseException) -> int | None:
    found = _status(error, "status_code", "status", "code")
    if found is not None:
        return found
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        metadata = response.get("ResponseMetadata")
        return _number(metadata.get("HTTPStatusCode")) if isinstance(metadata, Mapping) else None
    return _status(response, "status_code", "status")


def _is_response(outcome: object) -> bool:
    kind = type(outcome)
    return kind.__module__ != "builtins" and hasattr(outcome, "headers")


def _status(thing: object, *names: str) -> int | None:
    for name in names:
        found = _number(getattr(thing, name, None))
        if found is not None:
            return found
    return None


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int) and 100 <= value <= 599 else None  # an HTTPStatus becomes a plain int
