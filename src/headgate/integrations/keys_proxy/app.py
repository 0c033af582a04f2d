"""`KeysProxy`: the ASGI application of `headgate serve-keys`.

    read the head -> rules -> read the body -> a turn (TaskPool, fair between tenants) -> a key (RotatingTransport)
                                                                          answer <- chunk by chunk <- upstream

A request holds its slot and its key until the answer has been passed on, or the client has gone: then the connection to
the upstream is closed. The body of a request is read as a whole, so that it can be sent again with another key.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Self

from headgate.core.checks import checked_seconds, checked_whole
from headgate.core.clock import clock
from headgate.core.redaction import log_exception
from headgate.errors import InvalidType, PoolClosed, PoolExhausted, QueueFull, TaskCancelled, TaskExpired
from headgate.integrations.httpx import RotatingTransport
from headgate.integrations.keys_proxy.answers import Answer, ClientStalled
from headgate.integrations.keys_proxy.error_texts import ErrorTexts
from headgate.integrations.keys_proxy.refusals import Refusal, retry_after
from headgate.integrations.keys_proxy.rules import BODILESS, NO_BODY, Accepted, ProxyRules, Request
from headgate.integrations.sdk_clients import MOST_REFUSALS
from headgate.resources.engine import engine_of, lock
from headgate.resources.http_errors import is_connection_error
from headgate.resources.pool import ResourcePool
from headgate.tasks.admission import backpressure_queue
from headgate.tasks.pool import TaskPool

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LOGGER = "headgate.integrations"
_CONNECTING = 15.0  # seconds for a connection to the upstream; then another attempt is made


@dataclass(frozen=True, slots=True)
class Limits:
    """How much, how long and how many."""

    max_concurrent: int = 100
    """Requests at the upstream at a time."""
    max_per_tenant: int | None = None
    """Requests of one tenant at the upstream at a time.

    If None, a tenant leaves a quarter of `max_concurrent` to the others while there are others, which means that one
    has sent a request in the last `timeout` seconds. The price: a tenant that was alone may hold all slots when another
    one sends its first request, which then waits for an answer to end. A number always holds.
    """
    max_waiting: int = 1000
    """Requests that wait for their turn; the next one is refused. One tenant may have half of them, also alone."""
    max_body: int = 10 << 20
    """Bytes of a request's body."""
    max_bodies: int = 256 << 20
    """Bytes of all bodies that the proxy holds at a time. One tenant may have half of it, or one whole body."""
    timeout: float = 600.0
    """Seconds that an answer may take, from the turn of the request to its last byte."""
    wait: float = 60.0
    """Seconds that a request waits for its turn, and then for a key."""
    client_timeout: float = 30.0
    """Seconds that a client has to send its request. It may read nothing of its answer for half as long again."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "max_waiting", "max_body", "max_bodies"):
            checked_whole(name, getattr(self, name), 1)
        if self.max_per_tenant is not None:
            checked_whole("max_per_tenant", self.max_per_tenant, 1)
        for name in ("timeout", "wait", "client_timeout"):
            checked_seconds(f"{name} must be a number of seconds >= 0.001", getattr(self, name), 0.001)

    @property
    def read_within(self) -> float:
        """Seconds after which a client that reads nothing of its answer is disconnected.

        Linux tells a sender that something was read after 128 KB. A client that reads 4 KB a second needs 32 s for
        them, which is more than the usual `client_timeout`.
        """
        return 1.5 * self.client_timeout


class KeysProxy:
    """An ASGI application that sends requests on with keys of a pool. Close it, or use it as a context manager."""

    def __init__(
        self,
        keys: ResourcePool[Any],
        rules: ProxyRules,
        limits: Limits | None = None,
    ) -> None:
        self.limits: Limits = limits or Limits()
        self._httpx = _httpx()
        self._rules = rules
        self._keys = keys
        self._tasks = TaskPool(
            max_concurrent=self.limits.max_concurrent,
            queue="fair_round_robin",
            backpressure=backpressure_queue(self.limits.max_waiting, "fail_submitter"),
            max_concurrent_per_key=self.limits.max_per_tenant,
            keep=0,
        )
        self._tenants = RecentTenants(self.limits.timeout)
        self._shares_slots = False  # whether tenants leave slots to each other because there are several
        self._base = self._httpx.URL(f"{rules.scheme}://{rules.authority}")
        self._transport = RotatingTransport(
            keys,
            header=rules.header,
            insecure=rules.insecure,
            transport=self._usual_transport(),
            wait_for_capacity=True,
            within=self.limits.wait,
            max_attempts=MOST_REFUSALS,
        )
        self._transport.bound_errors()
        self._transport.distrust_requests()
        self._waiting: Counter[str] = Counter()  # requests that wait for their turn, by tenant
        self._bodies: Counter[str] = Counter()  # bytes of the bodies of requests that have not ended, by tenant
        self._closing: set[asyncio.Future[None]] = set()  # answers of the upstream that are being closed
        self._transport.keep_to(self._base)
        self._timeouts = {"connect": _CONNECTING, "read": None, "write": None, "pool": None}
        self._url = lru_cache(256)(lambda target: self._base.copy_with(raw_path=target))

    # -- one request --------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI says."""
        await self.answer(scope, receive, send, read_within=self.limits.read_within)

    async def answer(self, scope: Message, receive: Receive, send: Send, *, read_within: float | None) -> None:
        """Answer one request. `read_within`: seconds that each message to the server may take.

        None: the server itself cuts off clients that do not read. It sees more than that a message takes long.
        """
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        else:
            answer = Answer(send, read_within)
            try:
                await self._handle(scope, receive, answer)
            except asyncio.CancelledError:
                await answer.refuse(_ENDS)
                raise
            except ClientStalled:
                pass  # the server closes the connection, because the answer is not complete
            except Exception:
                log_exception(_LOGGER, "the proxy failed with a request")
                await answer.refuse(Refusal(500, "proxy_failed", "the proxy failed; its log says more"))

    async def _handle(self, scope: Message, receive: Receive, answer: Answer) -> None:
        server = scope.get("server") or ("",)
        request = Request(
            scope["method"],
            scope["raw_path"],
            scope["query_string"],
            list(scope["headers"]),
            str(server[0]),
            scope["http_version"],
        )
        judged = self._rules.judge(request)
        if isinstance(judged, Refusal):
            await answer.refuse(judged)
        elif judged.what == "forward":
            held: Counter[str] = Counter()
            try:
                body = await self._body(judged, receive, held)
                if isinstance(body, Refusal):
                    await answer.refuse(body)
                elif body and request.method in BODILESS:  # HTTP/2 can have one without a Content-Length
                    await answer.refuse(NO_BODY)
                elif body is not None:
                    await self._take_turn(self._request(request.method, judged, body), judged.tenant, receive, answer)
            finally:
                self._bodies -= held  # drops tenants with none
        else:
            await answer.tell({"status": "ok"} if judged.what == "health" else self._state())

    async def _body(self, accepted: Accepted, receive: Receive, held: Counter[str]) -> bytes | Refusal | None:
        """Read the body, and count its bytes in `held` too; None: the client has gone."""
        most, tenant = self.limits.max_body, accepted.tenant
        too_long = Refusal(413, "body_too_long", f"the body is longer than {most} bytes (--max-body)")
        if accepted.length is not None and accepted.length > most:
            return too_long
        parts, length = [], 0
        try:
            async with asyncio.timeout(self.limits.client_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    length += len(parts[-1])
                    if length > most:
                        return too_long
                    if not self._has_room(tenant, len(parts[-1])):
                        return Refusal(503, "proxy_busy", "the bodies of all requests are too long together", _LATER)
                    self._bodies[tenant] += len(parts[-1])
                    held[tenant] = length
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            return Refusal(408, "client_too_slow", "the request took too long to arrive", _CLOSE)

    def _has_room(self, tenant: str, length: int) -> bool:
        """Whether so many bytes may be held in addition; one tenant leaves some to the others."""
        most = max(self.limits.max_bodies, self.limits.max_body)
        share = max(most // 2, self.limits.max_body)
        return self._bodies.total() + length <= most and self._bodies[tenant] + length <= share

    def _request(self, method: str, accepted: Accepted, body: bytes) -> Any:
        """Make the request for the upstream, without a key."""
        headers = accepted.headers
        if body or method in ("POST", "PUT", "PATCH"):
            headers.append((b"content-length", str(len(body)).encode()))
        if method == "HEAD":
            headers.append((b"connection", b"close"))  # see _never_reuse
        return self._httpx.Request(
            method,
            self._url(accepted.target),
            headers=headers,
            content=body,
            extensions={"timeout": self._timeouts},
        )

    async def _take_turn(self, request: Any, tenant: str, receive: Receive, answer: Answer) -> None:
        """Send the request on when it is the turn of its tenant, unless the client goes before."""
        resting = self._resting()
        if resting is not None and resting > self.limits.wait:
            await answer.refuse(_exhausted(resting))
            return
        if self._waiting[tenant] >= max(1, self.limits.max_waiting // 2):  # the rest is for other tenants
            await answer.refuse(Refusal(503, "proxy_busy", "too many requests of this tenant wait", retry_after(1)))
            return
        self._share_slots(tenant)
        leave = self._wait(tenant)
        try:
            task = self._tasks.submit_nowait(self._exchange, request, answer, leave, key=tenant, ttl=self.limits.wait)
        except QueueFull as full:
            leave()
            later = retry_after(full.retry_after or 1)
            await answer.refuse(Refusal(503, "proxy_busy", "too many requests wait for their turn", later))
            return
        except PoolClosed:
            leave()
            await answer.refuse(_ENDS)
            return

        async def cancel_when_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not answer.complete:  # else it is told of the end of the answer
                task.cancel()

        watch = asyncio.ensure_future(cancel_when_gone())
        try:
            await task
        except TaskExpired:
            busy = (
                f"no slot was free for this tenant within {self.limits.wait:g} s "
                "(--max-concurrent, --max-per-tenant, --wait)"
            )
            await answer.refuse(Refusal(503, "proxy_busy", busy, retry_after(1)))
        except TaskCancelled:
            await answer.refuse(_ENDS)  # if the client has gone, it is told in vain
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            leave()
            watch.cancel()

    def _share_slots(self, tenant: str) -> None:
        """Let each tenant leave slots to others from when there are several, and until one is alone again."""
        if self.limits.max_per_tenant is not None:
            return
        most = self.limits.max_concurrent
        several = self._tenants.several(tenant, clock.now())
        if several != self._shares_slots:
            self._shares_slots = several
            self._tasks.limit_keys(max(1, most - max(1, most // 4)) if several else None)

    def _wait(self, tenant: str) -> Callable[[], None]:
        """Count a request that waits for its turn. Returns what to call when it does not any more, once or oftener."""
        self._waiting[tenant] += 1
        places = [tenant]

        def leave() -> None:
            if places:
                self._waiting -= Counter(places)  # drops tenants with none
                places.clear()

        return leave

    async def _exchange(self, request: Any, answer: Answer, begun: Callable[[], None]) -> None:
        """Send a request with a key, and pass the answer on. Its use of the key ends with this."""
        begun()
        response = None
        try:
            try:
                async with asyncio.timeout(self.limits.timeout):
                    response = await self._transport.handle_async_request(request)
                    if response.status_code in (204, 304):
                        await _never_reuse(response)
                    await answer.pass_on(response, self._texts)
            finally:
                if response is not None:
                    await self._close(response, answer)
        except ClientStalled:
            pass
        except Exception as error:
            refusal = _refusal_of(error, self.limits)
            if refusal is None:
                log_exception(_LOGGER, "the proxy failed with an answer of the upstream")
                refusal = Refusal(502, "upstream_failed", "the answer of the upstream could not be passed on")
            await answer.refuse(refusal)

    async def _close(self, response: Any, answer: Answer) -> None:
        """Close the upstream's response, even if the client disconnects meanwhile, which cancels this.

        If the closing itself were cancelled, httpx would keep the connection open and never use it again. A client that
        has its complete answer cancels nothing, and its request is spared the task that this takes.
        """
        if answer.complete:
            await response.aclose()
            return
        closing = asyncio.ensure_future(response.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closed)
        await asyncio.shield(closing)

    def _closed(self, closing: asyncio.Future[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled():
            closing.exception()  # else asyncio logs it if nobody has waited

    # -- what it tells of itself --------------------------------------------------------------------------------------

    def _resting(self) -> float | None:
        """Seconds until the first key is back; None if one can be used now, or none will be back."""
        with lock:
            rotation = engine_of(self._keys).rotation
            if any(member.resource.status == "healthy" for member in rotation.members.values()):
                return None
            expiry = rotation.next_expiry()
            return None if expiry is None else expiry - clock.now()

    def _texts(self) -> ErrorTexts:
        with lock:
            return ErrorTexts([member.resource.value for member in engine_of(self._keys).rotation.members.values()])

    def _state(self) -> dict[str, Any]:
        tasks = self._tasks.snapshot(0)
        shown = ("status", "in_flight", "cooldown_seconds_remaining")
        keys = {name: {field: one[field] for field in shown} for name, one in self._keys.snapshot().items()}  # type: ignore[literal-required]
        return {"keys": keys, "running": tasks.active, "waiting": tasks.queued}

    # -- its end ------------------------------------------------------------------------------------------------------

    async def aclose(self, timeout: float | None = None) -> None:
        """Take no more requests, wait so long for those that run, cancel the rest, and close the connections."""
        await self._tasks.close(timeout=timeout)
        if self._closing:
            await asyncio.wait(self._closing)
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose(timeout=0)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.shutdown":
                await self.aclose(timeout=0)
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    def _usual_transport(self) -> Any:
        most = self.limits.max_concurrent
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=most, keepalive_expiry=30)
        return self._httpx.AsyncHTTPTransport(limits=limits)


class RecentTenants:
    """Knows whether more than one tenant has sent a request lately. Takes no more room for a million of them."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._last: tuple[str, float] | None = None  # the tenant of the last request
        self._other: float | None = None  # when the last request of any other tenant was

    def several(self, tenant: str, now: float) -> bool:
        """Note a request, and return whether another tenant has sent one in the last `window` seconds."""
        if self._last is not None and self._last[0] != tenant:
            self._other = self._last[1]
        self._last = (tenant, now)
        return self._other is not None and now - self._other <= self._window


_CLOSE = ((b"connection", b"close"),)
_LATER = (*retry_after(1), *_CLOSE)
_ENDS = Refusal(503, "proxy_ends", "the proxy ends", _CLOSE)


def _refusal_of(error: Exception, limits: Limits) -> Refusal | None:
    """What a client is told of an exception: never its text, which may show a key."""
    if isinstance(error, PoolExhausted):
        return _exhausted(error.retry_after)
    if isinstance(error, TimeoutError):
        return Refusal(504, "upstream_too_slow", f"the answer took longer than {limits.timeout:g} s (--timeout)")
    if is_connection_error(error):
        return Refusal(502, "upstream_unreachable", f"the upstream did not answer: {type(error).__name__}")
    return None


async def _never_reuse(response: Any) -> None:
    """Close the connection of an answer that has no body.

    Some servers send one all the same. It would be read as the answer to the next request, of whatever tenant.
    """
    connection = response.extensions.get("network_stream")
    if connection is not None:
        await connection.aclose()


def _exhausted(seconds: float | None) -> Refusal:
    """Tell that no key can be used for so many seconds. SDKs obey `x-should-retry`: the proxy has tried and waited."""
    why = "no key could be used; /headgate/state shows their states"
    if seconds is not None:
        why = f"every key is limited or refused; one is back in {max(1.0, seconds):.0f} s"
    return Refusal(429, "pool_exhausted", why, (*retry_after(seconds), (b"x-should-retry", b"false")))


def _httpx() -> Any:
    try:
        return import_module("httpx")
    except ImportError as error:
        raise InvalidType(
            "httpx is not installed, which sends the requests to the upstream", remedy="pip install 'headgate[http]'"
        ) from error
