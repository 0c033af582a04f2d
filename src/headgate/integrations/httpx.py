"""Transports that rotate keys, for every client that stands on httpx or httpx2.

    client = httpx.AsyncClient(transport=RotatingTransport(pool))

Each request is given a key of the pool. A refusal (429, 401, 402, 403, 529) cools or disables the key, and the request
is sent again with another one, as it is after a server's error or a broken connection. When every attempt was refused,
the client gets the last refusal; one that disabled its key only if no other key is left, or nothing else was answered.
The client never sees a key: the key is written into a copy of its request.

    client = httpx.AsyncClient(transport=RotatingTransport(key))

Inside a task or call that was given a key, requests go with that key, and an error is for whoever gave it. A transport
over the pool does the same inside a task of a TaskPool that has its key from this pool.

Nothing here imports httpx: the classes are those of the library that the request is of.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from headgate.core.checks import Affinity, checked_affinity, is_finite
from headgate.core.clock import clock
from headgate.errors import InvalidType, PoolExhausted
from headgate.integrations.key_rules import Header, KeyRules
from headgate.integrations.request_call import HeldCall, RequestCall, Verdict, errors_of_strangers, proxy_errors
from headgate.integrations.shared_connections import SharedConnections, SharedSyncConnections, library_of
from headgate.integrations.token_usage import estimated_cost
from headgate.resources.costs import AnyCost, Cost, checked_cost
from headgate.resources.engine import engine_of
from headgate.resources.http_errors import http_errors
from headgate.resources.http_status import HEARD
from headgate.resources.model import Resource
from headgate.resources.pool import ResourcePool
from headgate.resources.run_options import plan_of
from headgate.resources.signals import DisableResource, Signal
from headgate.tasks.attempts.attempt import use_of_task

if TYPE_CHECKING:  # checkers know our transports as transports of both libraries, and programs import neither
    from httpx import AsyncBaseTransport as _Async
    from httpx import BaseTransport as _Sync
    from httpx2 import AsyncBaseTransport as _Async2
    from httpx2 import BaseTransport as _Sync2
else:
    _Async = _Sync = type("_OfHttpx", (), {})
    _Async2 = _Sync2 = type("_OfHttpx2", (), {})

__all__ = ["RotatingSyncTransport", "RotatingTransport"]

_log = logging.getLogger("headgate.integrations")

_EXTENSION = "headgate"  # the key of a request's `extensions` under which it says what concerns us
_LONGEST_REFUSAL = 1 << 16  # bytes of a refusal that are kept; the rest of a longer one is dropped
_LONGEST_REPLAY = 4 << 20  # bytes of a body in parts (a form with files) that are read to be able to send them again


class TransportOptions(TypedDict, total=False):
    """Those of the options of `ResourcePool.run_sync` that a transport takes. They mean the same."""

    deadline: float | None
    within: float | None
    wait_for_cooldown: bool
    wait_for_capacity: bool
    tags: Iterable[str]
    exclude: Iterable[str]
    affinity: Affinity | Callable[[Any], Affinity | None] | None
    max_attempts: int | None
    retry_delay: float


CALL_OPTIONS = frozenset(TransportOptions.__annotations__)


class _Rotating:
    """What the transports have in common: everything but sending and receiving."""

    def __init__(
        self,
        pool: ResourcePool[Any] | Resource[Any],
        *,
        header: Header = None,
        hosts: Iterable[str] | None = None,
        insecure: bool = False,
        proxies: bool = False,
        transport: Any = None,
        cost: AnyCost | Callable[[Any], AnyCost] | None = None,
        **options: Unpack[TransportOptions],
    ) -> None:
        """`pool` is where keys come from, or the one key to use, which a task or call was given.

        `header` says where the key goes, a name or a function from the resource to headers. By default that is the
        header that the client has already filled (`x-api-key` and the like), or else `Authorization: Bearer`. `hosts`
        names where keys may go; by default where the first request goes. Requests to other places are sent without a
        key. `insecure=True` lets keys go over plain HTTP. With `proxies=True` the values of the resources are URLs of
        proxies, and no header is written. `transport` is what sends; by default the usual transport of the library,
        and with a single key the connections that all such transports of an event loop share.
        `cost` is how many tokens a request takes of the quota of its key: a number, a `Cost`, or a function of the
        request. By default it is estimated from the body if keys have a quota. When the answer reports its usage, that
        counts. `affinity` may be a function of the request too, such as one that returns its host. A request names its
        own with ``extensions={"headgate": {"affinity": ...}}``. The other options are those of `ResourcePool.run_sync`.
        """
        if not isinstance(pool, (ResourcePool, Resource)):
            raise InvalidType(
                f"{type(self).__name__} takes a ResourcePool, or the Resource that a task was given, "
                f"got {type(pool).__name__}",
                remedy="Make a pool from your keys: ResourcePool([...]).",
            )
        self._held = pool if isinstance(pool, Resource) else None
        if self._held is not None and (options or cost is not None):
            raise InvalidType(
                f"{type(self).__name__} takes no option {next(iter(options), 'cost')!r} with a single key: "
                "the task or call that was given the key has these options",
                remedy="Leave it out, or pass the ResourcePool.",
            )
        if proxies and (header is not None or transport is not None or hosts is not None):
            raise InvalidType(
                "with proxies=True there is no header=, hosts= or transport=: no key is sent, each proxy has its own",
                remedy="Leave them out.",
            )
        self._engine = None if isinstance(pool, Resource) else engine_of(pool)
        attempts = 1 if self._engine is None else self._engine.plan.max_attempts
        affinity = options.get("affinity")
        self._affinity_of: Callable[[Any], Affinity | None] | None = affinity if callable(affinity) else None
        if self._affinity_of is not None:
            options["affinity"] = None
        self._plan = plan_of(options, method=type(self).__name__, allowed=CALL_OPTIONS, max_attempts=attempts)
        self._rules = KeyRules(header, hosts, insecure)
        if not (cost is None or isinstance(cost, Cost) or callable(cost) or (is_finite(cost) and cost >= 0)):
            raise InvalidType(
                f"cost must be a number of tokens, a Cost or a function of the request, got {cost!r}",
                remedy="Leave it out: then it is estimated.",
            )
        members = () if self._engine is None else list(self._engine.rotation.members.values())
        has_quotas = any(one.sharing.account is not None for one in members)
        self._cost: AnyCost | Callable[[Any], AnyCost] = _estimated_cost if cost is None else cost
        self._has_costs = has_quotas or cost is not None
        self._proxies = proxies
        self._given = self._shared() if self._held is not None and transport is None and not proxies else transport
        self._made: dict[Any, Any] = {}
        self._tls: Any = None
        self._strangers: set[str] = set()
        self._most_errors: int | None = None
        self._verdict: Verdict = proxy_errors if proxies else http_errors
        self._most_disabled: int | None = None

    @staticmethod
    def _shared() -> Any:
        """Connections that all transports of single keys use: one is made for each task."""
        raise NotImplementedError

    def keep_to(self, url: Any) -> None:
        """Let keys go only to the scheme, host and port of this URL, unless `hosts` was given."""
        self._rules.keep_to(url)

    def bound_errors(self) -> None:
        """Let `max_attempts` count refusals of keys, and the pool's own number the errors that are of no key."""
        self._most_errors = None if self._engine is None else self._engine.plan.max_attempts

    def distrust_requests(self) -> None:
        """Let no single request take away the keys from others: it may disable one, and let keys rest for a minute."""
        self._verdict, self._most_disabled = errors_of_strangers, 1

    def _uses_pool(self, url: Any) -> bool:
        if self._proxies or self._rules.may_carry(url):
            return True
        if url.host not in self._strangers and len(self._strangers) < 100:
            self._strangers.add(url.host)
            _log.warning(
                "a request to %s carries no key: keys go elsewhere; name it in hosts= if they should", url.host
            )
        return False

    def _call(self, request: Any, may_repeat: bool) -> RequestCall | HeldCall:
        held = self._held or self._of_task()
        if held is not None:
            return HeldCall(held, self._verdict)
        assert self._engine is not None, "there is a key or a pool"
        has_costs = self._has_costs or self._engine.learns
        plan = replace(self._plan, cost=self._cost_of(request, may_repeat)) if has_costs else self._plan
        if self._affinity_of is not None or _EXTENSION in request.extensions:
            plan = replace(plan, affinity=self._affinity(request))
        is_retry = partial(_is_retry, request)
        return RequestCall(
            self._engine,
            plan,
            self._verdict,
            may_repeat=may_repeat,
            is_retry=is_retry,
            most_errors=self._most_errors,
            most_disabled=self._most_disabled,
        )

    def _of_task(self) -> Resource[Any] | None:
        """The resource of this pool that the task has in which the request is made, if the request may go with it."""
        use = None if self._engine is None else use_of_task(self._engine)
        fits = use is not None and self._plan.requirement.fits(use.member.resource)
        return use.member.resource if use is not None and fits else None

    def _cost_of(self, request: Any, loaded: bool) -> AnyCost:
        if self._cost is _estimated_cost and not loaded:
            return 0.0
        cost = self._cost(request) if callable(self._cost) else self._cost
        return checked_cost("cost of a request", cost)

    def _affinity(self, request: Any) -> Affinity | None:
        """The affinity of a request: its own, or else what the function of the transport returns for it."""
        given = request.extensions.get(_EXTENSION)
        if given is None:
            return self._plan.affinity if self._affinity_of is None else checked_affinity(self._affinity_of(request))
        if not isinstance(given, Mapping) or given.keys() != {"affinity"}:
            shown = f"the keys {sorted(map(str, given))}" if isinstance(given, Mapping) else type(given).__name__
            raise InvalidType(
                f'the extension "headgate" of a request must be a mapping with the key "affinity", got {shown}',
                remedy='Write client.get(url, extensions={"headgate": {"affinity": "shop.example"}}).',
            )
        return checked_affinity(given["affinity"])

    def _keyed(self, library: Any, request: Any, resource: Resource[Any]) -> Any:
        """A copy of the request that carries the key. The client keeps its own, for redirects and errors."""
        headers = request.headers.copy()
        if not self._proxies:
            for name, value in self._rules.headers(resource, headers.raw).items():
                headers[name] = value  # `update` takes five times as long
        return _keyed_request(library)(request, headers)

    def _inner(self, library: Any, resource: Resource[Any] | None, kind: str) -> Any:
        if self._given is not None:
            return self._given
        proxy = resource.value if self._proxies and resource is not None else None
        found = self._made.get((library, proxy))
        if found is None:
            if self._tls is None:
                self._tls = library.create_ssl_context()  # takes 0.1 s, so not for each of many proxies
            options = {} if proxy is None else {"proxy": proxy}
            found = self._made[library, proxy] = getattr(library, kind)(verify=self._tls, **options)
        return found

    def _transports(self) -> list[Any]:
        given = [] if self._given is None else [self._given]
        return [*given, *self._made.values()]


class RotatingTransport(_Rotating, _Async, _Async2):
    """A transport for `AsyncClient` of httpx and httpx2 that gives each request a key of a ResourcePool."""

    @staticmethod
    def _shared() -> Any:
        return SharedConnections()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request with a key, again with another one if it is refused, and return the answer."""
        library = library_of(request.__class__)
        if not self._uses_pool(request.url):
            return await self._inner(library, None, "AsyncHTTPTransport").handle_async_request(request)
        if not (loaded := _is_loaded(request)) and _is_short(request):
            await request.aread()
            loaded = True
        call = self._call(request, loaded)
        failures = _Failures(library, request, call)
        while True:
            try:
                resource = await call.take()
            except PoolExhausted:
                return failures.outcome()
            opened = None
            try:
                inner = self._inner(library, resource, "AsyncHTTPTransport")
                opened = _Opened(await inner.handle_async_request(self._keyed(library, request, resource)))
                await opened.read_async()
                signal = call.refused(opened.status, opened.headers, partial(opened.judged, library))
                opened.is_heard = call.is_heard
                if signal is None:
                    return opened.answer(library, _async_stream(library)(opened, call))
                failures.note(opened.refusal(library), signal)
            except BaseException as error:
                pause = call.raised(error)  # first, because closing may fail too
                if opened is not None:
                    await opened.aclose()
                if pause is None:
                    raise
                failures.note(error)
            else:
                pause = call.failed(signal)
                await opened.aclose()
                if pause is None:
                    return failures.outcome()
            if pause:
                await asyncio.sleep(pause)

    async def aclose(self) -> None:
        """Close the transports that send."""
        for transport in self._transports():
            await transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class RotatingSyncTransport(_Rotating, _Sync, _Sync2):
    """A transport for `Client` of httpx and httpx2 that gives each request a key of a ResourcePool."""

    @staticmethod
    def _shared() -> Any:
        return SharedSyncConnections()

    def handle_request(self, request: Any) -> Any:
        """Send a request with a key, again with another one if it is refused, and return the answer."""
        library = library_of(request.__class__)
        if not self._uses_pool(request.url):
            return self._inner(library, None, "HTTPTransport").handle_request(request)
        if not (loaded := _is_loaded(request)) and _is_short(request):
            request.read()
            loaded = True
        call = self._call(request, loaded)
        failures = _Failures(library, request, call)
        while True:
            try:
                resource = call.take_sync()
            except PoolExhausted:
                return failures.outcome()
            opened = None
            try:
                inner = self._inner(library, resource, "HTTPTransport")
                opened = _Opened(inner.handle_request(self._keyed(library, request, resource)))
                opened.read()
                signal = call.refused(opened.status, opened.headers, partial(opened.judged, library))
                opened.is_heard = call.is_heard
                if signal is None:
                    return opened.answer(library, _sync_stream(library)(opened, call))
                failures.note(opened.refusal(library), signal)
            except BaseException as error:
                pause = call.raised(error)  # first, because closing may fail too
                if opened is not None:
                    opened.close()
                if pause is None:
                    raise
                failures.note(error)
            else:
                pause = call.failed(signal)
                opened.close()
                if pause is None:
                    return failures.outcome()
            if pause:
                clock.sleep(pause)

    def close(self) -> None:
        """Close the transports that send."""
        for transport in self._transports():
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


# -- requests ---------------------------------------------------------------------------------------------------------


@cache
def _keyed_request(library: Any) -> Any:
    """A class of requests that are copies of others with other headers.

    It leaves out what the constructor of the library checks and makes, which was done for the request that it copies:
    that was a fifth of what a request cost here (benchmarks/http_costs.py).
    """

    class KeyedRequest(library.Request):  # type: ignore[misc]
        def __init__(self, request: Any, headers: Any) -> None:
            self.method, self.url, self.stream = request.method, request.url, request.stream
            self.headers, self.extensions = headers, dict(request.extensions)

    return KeyedRequest


def _estimated_cost(request: Any) -> Cost:
    return estimated_cost(request.content)


def _is_loaded(request: Any) -> bool:
    """Whether the body is in memory, so that it can be sent again."""
    try:
        return request.content is not None
    except Exception:  # httpx: RequestNotRead
        return False


def _is_retry(request: Any) -> bool:
    """Whether an SDK sends this again, after an exception of ours."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"  # type: ignore[no-any-return]


def _is_short(request: Any) -> bool:
    length = request.headers.get("content-length", "")
    return length.isdecimal() and len(length) < 9 and int(length) <= _LONGEST_REPLAY


# -- answers ----------------------------------------------------------------------------------------------------------


class _Opened:
    """An answer of which the beginning has been read: of an error its text, of anything else the first bytes."""

    __slots__ = ("_response", "_stream", "begun", "headers", "is_heard", "items", "status")

    def __init__(self, response: Any) -> None:
        self._response: Any = response
        self._stream = response.stream
        self.status: int = response.status_code
        self.headers: Any = response.headers
        self.items: Any = None
        self.begun: list[bytes] = []
        self.is_heard: bool = False

    async def read_async(self) -> None:
        self.items = aiter(self._stream)
        async for chunk in self.items:
            self.begun.append(chunk)
            if self._has_enough(chunk):
                break

    def read(self) -> None:
        self.items = iter(self._stream)
        for chunk in self.items:
            self.begun.append(chunk)
            if self._has_enough(chunk):
                break

    def _has_enough(self, chunk: bytes) -> bool:
        return bool(chunk) if self.status < 400 else sum(map(len, self.begun)) >= _LONGEST_REFUSAL

    async def aclose(self) -> None:
        if hasattr(self.items, "aclose"):
            await self.items.aclose()
        await self._stream.aclose()

    def close(self) -> None:
        if hasattr(self.items, "close"):
            self.items.close()
        self._stream.close()

    def judged(self, library: Any) -> Any:
        """The answer as a classifier should see it: an error with its text."""
        status, headers = self.status, self.headers
        try:
            return library.Response(status, headers=headers, content=b"".join(self.begun) if status >= 400 else b"")
        except Exception:  # the text is not encoded as the headers say
            return library.Response(status, headers=[(k, v) for k, v in headers.items() if k != "content-encoding"])

    def answer(self, library: Any, stream: Any) -> Any:
        """The answer for the client: what the inner transport gave, with another stream, as clients do it too."""
        response, self._response = self._response, None  # else they would hold each other
        if self.is_heard:
            response.extensions[HEARD] = True
        if response.is_stream_consumed:  # it was made from bytes, as in tests: its stream would never be read
            kept = {"headers": self.headers, "stream": stream, "extensions": response.extensions}
            return library.Response(self.status, **kept)
        response.stream = stream
        return response

    def refusal(self, library: Any) -> Any:
        """The refusal for the client, from memory. An SDK is told not to try again: that has been done."""
        headers = self.headers.copy()
        headers["x-should-retry"] = "false"
        headers.pop("transfer-encoding", None)
        body = b"".join(self.begun)
        headers["content-length"] = str(len(body))
        known = {HEARD: True} if self.is_heard else {}
        return library.Response(self.status, headers=headers, stream=library.ByteStream(body), extensions=known)


class _Failures:
    """What the client gets when no attempt succeeded: the last refusal or error, or else why there was none.

    A refusal that disabled its key (401) says nothing about the others. While there are others, the client gets the
    last failure of another kind: told that its key is invalid, it would give up, and told to wait, it may succeed.
    """

    def __init__(self, library: Any, request: Any, call: RequestCall | HeldCall) -> None:
        self._library = library
        self._request = request
        self._call = call
        self._last: Any = None
        self._last_of_others: Any = None  # the last that did not disable its key
        self._disabled = False

    def note(self, failure: Any, signal: Signal | None = None) -> None:
        """Note the refusal, or the exception, of an attempt."""
        self._last, self._disabled = failure, isinstance(signal, DisableResource)
        if not self._disabled:
            self._last_of_others = failure

    def outcome(self) -> Any:
        """The response for the client; raises if it is an exception."""
        given, exhausted = self._last, self._call.exhausted
        if self._disabled and exhausted is not None and self._call.has_other_keys():
            given = self._last_of_others
            if given is None and not self._is_of_sdk():
                given = self._last
        if given is None and exhausted is not None:
            return self._exhausted(exhausted)
        if isinstance(given, BaseException):
            raise given
        return given

    def _is_of_sdk(self) -> bool:
        return "x-stainless-lang" in self._request.headers

    def _exhausted(self, exhausted: PoolExhausted) -> Any:
        if not self._is_of_sdk():
            raise exhausted
        # An SDK would take an exception for a broken connection and try again. This becomes its RateLimitError.
        seconds = exhausted.retry_after
        headers = {"x-should-retry": "false", "content-type": "application/json"}
        if seconds is not None:
            headers["retry-after"] = str(max(1, round(seconds)))
        error = {"type": "rate_limit_error", "code": "pool_exhausted", "message": f"headgate: {exhausted}"}
        body = json.dumps({"type": "error", "error": error}).encode()
        return self._library.Response(429, headers=headers, content=body)


@cache
def _async_stream(library: Any) -> Any:
    """A class of streams that end their use of a key, derived from the library's own as its clients ask for."""

    class HeldStream(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, opened: _Opened, call: RequestCall | HeldCall) -> None:
            self._opened = opened
            self._call = call

        def __aiter__(self) -> Self:  # no generator: asyncio keeps a list of those, which costs more than the rest here
            return self

        async def __anext__(self) -> bytes:
            if self._opened.begun:
                chunk: bytes = self._opened.begun.pop(0)
                self._call.saw(chunk)
                return chunk
            try:
                chunk = await anext(self._opened.items)
            except StopAsyncIteration:
                self._call.done()
                raise
            except Exception as error:
                self._call.broke(error)
                raise
            self._call.saw(chunk)
            return chunk

        async def aclose(self) -> None:
            try:
                await self._opened.aclose()
            finally:
                self._call.done()

        def __del__(self) -> None:
            self._call.abandon()

    return HeldStream


@cache
def _sync_stream(library: Any) -> Any:
    class HeldStream(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, opened: _Opened, call: RequestCall | HeldCall) -> None:
            self._opened = opened
            self._call = call

        def __iter__(self) -> Iterator[bytes]:
            try:
                begun, self._opened.begun = self._opened.begun, []
                for chunk in chain(begun, self._opened.items):
                    self._call.saw(chunk)
                    yield chunk
            except Exception as error:
                self._call.broke(error)
                raise
            self._call.done()

        def close(self) -> None:
            try:
                self._opened.close()
            finally:
                self._call.done()

        def __del__(self) -> None:
            self._call.abandon()

    return HeldStream
