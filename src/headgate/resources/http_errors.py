"""`http_errors`: a classifier for pools whose operations call HTTP APIs.

    pool = ResourcePool(keys, classify=headgate.http_errors)

Tasks of a TaskPool(resources=) have it by default, as `task_errors`.

It understands errors and responses of httpx, httpx2, aiohttp, requests, openai, anthropic, google-genai and botocore,
and imports none of them. An error that says more than its status, such as OpenAI's 429 with `insufficient_quota`, is
taken by what it says.

    429, 529, overloaded, throttled            CooldownResource, as long as the headers ask for
    401, 402, 403, no quota, invalid key       DisableResource
    5xx, timeouts, broken connections          RetryOperation
    everything else                            None: the caller's
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headgate.core.checks import is_finite
from headgate.core.clock import clock
from headgate.errors import HeadgateError
from headgate.resources.http_status import headers_of, response_of, status_of
from headgate.resources.http_times import YEAR, duration_of
from headgate.resources.rate_limits import read_rate_limits
from headgate.resources.signals import CooldownResource, DisableResource, RetryOperation, Signal


def http_errors(outcome: object) -> Signal | None:
    """What an exception or a response says about the key it was made with; None: nothing. For `classify=`."""
    status = status_of(outcome)
    if isinstance(outcome, BaseException):
        if isinstance(outcome, HeadgateError):
            return None
    elif status is None or status < 400:
        return None
    words = tuple(_words(outcome))
    why = _reason(outcome, status, words)
    if status in _DISABLES or not _DISABLING.isdisjoint(words):
        return DisableResource(why)
    if status in _COOLS or not _COOLING.isdisjoint(words):
        return CooldownResource(_seconds(outcome), why)
    if status is None or status < 400:  # of an error: it came later than the status, in the middle of a stream
        broken = not _FAILING.isdisjoint(words) or (status is None and is_connection_error(outcome))
        return RetryOperation(why) if broken else None
    return RetryOperation(why) if status >= 500 else None


def task_errors(error: BaseException) -> Signal | None:
    """`http_errors` for what a task raises in a pool without a `classify` of its own.

    A TimeoutError or ConnectionError that no HTTP library raised is not taken as a signal: a task may do anything, and
    one that ran into its own time limit must not run twice unless somebody said so.
    """
    ours = isinstance(error, _BUILTIN) and status_of(error) is None and not _is_of_http_client(error)
    return None if ours else http_errors(error)


def is_connection_error(outcome: object) -> bool:
    """Whether this is an exception of a connection that failed or took too long."""
    return isinstance(outcome, _BUILTIN) or _is_of_http_client(outcome)


def _is_of_http_client(outcome: object) -> bool:
    kinds = type(outcome).__mro__ if isinstance(outcome, Exception) else ()
    return any((kind.__module__.partition(".")[0], kind.__name__) in _CONNECTION_ERRORS for kind in kinds)


_BUILTIN = (ConnectionError, TimeoutError)


_DISABLES = (401, 402, 403)
_COOLS = (429, 529)

# What providers write as type, code, status or reason of an error, in lower case.
_DISABLING = frozenset(
    (
        *("insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "account_deactivated"),  # OpenAI
        *("invalid_api_key", "authentication_error", "billing_error", "permission_error"),  # Anthropic
        *("api_key_invalid", "unauthenticated"),  # Google, which answers an invalid key with 400
        *("expiredtoken", "expiredtokenexception", "invalidclienttokenid", "unrecognizedclientexception"),  # AWS
        *("invalidaccesskeyid", "signaturedoesnotmatch"),
    )
)
_COOLING = frozenset(
    (
        *("rate_limit_exceeded", "rate_limit_error", "overloaded_error", "resource_exhausted"),
        *("throttling", "throttlingexception", "throttledexception", "requestthrottled", "requestthrottledexception"),
        *("toomanyrequestsexception", "provisionedthroughputexceededexception", "requestlimitexceeded"),
        *("bandwidthlimitexceeded", "limitexceededexception", "slowdown", "ec2throttledexception"),
    )
)
_FAILING = frozenset(
    (
        *("api_error", "server_error", "timeout_error", "internal_server_error"),
        *("internal", "unavailable", "deadline_exceeded"),
    )
)
_CONNECTION_ERRORS = frozenset(
    (module, name)
    for modules, names in (
        (("httpx", "httpx2", "httpcore", "httpcore2"), ("TimeoutException", "NetworkError", "RemoteProtocolError")),
        (("httpx", "httpx2", "httpcore", "httpcore2"), ("ProxyError",)),
        (("aiohttp",), ("ClientConnectionError", "ClientPayloadError")),
        (("requests",), ("ConnectionError", "Timeout", "ChunkedEncodingError")),
        (("urllib3",), ("TimeoutError", "ProtocolError", "NewConnectionError", "MaxRetryError")),
        (("openai", "anthropic"), ("APIConnectionError",)),
        (("botocore",), ("ConnectionError", "HTTPClientError")),
        (("urllib",), ("URLError",)),
        (("socket",), ("gaierror",)),
    )
    for module in modules
    for name in names
)


def asked_pause(error: BaseException) -> float:
    """The seconds for which an error asks its caller to wait: its `retry_after`, or what an upstream's answer says.

    0 if it does not say so, or asks for what cannot be meant: more than a year.
    """
    try:
        own, told = _attribute(error, "retry_after"), _seconds(error)
    except Exception:  # its body may be of any class
        return 0.0
    return max(own if is_finite(own) and 0 <= own <= YEAR else 0.0, told or 0.0)


def _seconds(outcome: object) -> float | None:
    read = read_rate_limits(headers_of(outcome), clock.wall())
    if read is not None and read.wait is not None:
        return read.wait
    for body in _bodies(outcome):
        for detail in _details(body):
            delay = detail.get("retryDelay")  # Google: "34s", in the body only
            seconds = duration_of(delay) if isinstance(delay, str) else None
            if seconds is not None:
                return seconds
    return None


def _reason(outcome: object, status: int | None, words: tuple[str, ...]) -> str:
    """A reason without the text of the error: providers repeat parts of the key there."""
    what = type(outcome).__name__ if status is None or status < 400 else f"HTTP {status}"
    told = next((word for word in words if word in _DISABLING or word in _COOLING or word in _FAILING), None)
    return f"{what} ({told})" if told else what


# -- what the body of an answer says ----------------------------------------------------------------------------------


def _words(outcome: object) -> Iterator[str]:
    """What the provider calls the error, in lower case."""
    if isinstance(outcome, BaseException):
        yield from _texts(*(_attribute(outcome, name) for name in ("code", "type", "status")))
    for body in _bodies(outcome):
        error = _error_in(body)
        yield from _texts(*(error.get(name) for name in ("code", "type", "status", "Code", "reason")))
        for detail in _details(body):
            yield from _texts(detail.get("reason"))


def _texts(*values: object) -> Iterator[str]:
    return (value.lower() for value in values if isinstance(value, str) and len(value) <= 100)


def _bodies(outcome: object) -> Iterator[Mapping[str, Any]]:
    """What is known of the body of an answer, as mappings."""
    response = response_of(outcome)
    candidates: tuple[object, ...] = (_parsed(response),)
    if isinstance(outcome, BaseException):
        candidates = (*(_attribute(outcome, name) for name in ("body", "details")), response, *candidates)
    for candidate in candidates:
        body = candidate[0] if isinstance(candidate, list) and candidate else candidate
        if isinstance(body, Mapping):
            yield body


def _parsed(response: object) -> object:
    """The body of a response as JSON, if it has been read. Nothing is read here: that could block, or await."""
    for name in ("_content", "_body"):  # httpx and requests, aiohttp
        content = _attribute(response, name)
        if isinstance(content, bytes) and content[:1] in (b"{", b"[") and len(content) <= _LONGEST_BODY:
            try:
                return json.loads(content)
            except (ValueError, RecursionError):
                return None
    return None


_LONGEST_BODY = 1 << 16


def _error_in(body: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("error", "Error"):
        if isinstance(body.get(name), Mapping):
            return body[name]  # type: ignore[no-any-return]
    return body


def _details(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    details = _error_in(body).get("details")
    if isinstance(details, list):
        yield from (detail for detail in details[:20] if isinstance(detail, Mapping))


def _attribute(thing: object, name: str) -> object:
    try:
        return getattr(thing, name, None)
    except Exception:  # it computes, and fails
        return None
