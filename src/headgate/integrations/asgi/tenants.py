"""The tenant of a request, from a header that a gateway sets."""

from __future__ import annotations

import re
from collections.abc import Callable

from headgate.errors import InvalidArgument, InvalidType
from headgate.integrations.asgi.messages import App, ErrorAnswer, Receive, Scope, Send
from headgate.tasks.tenants import tenant_scope

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_HEADER = re.compile(r"[A-Za-z0-9-]+")


class TenantHeader:
    """ASGI middleware: a header names the tenant of all tasks that a request submits without naming one.

    Trust such a header only behind a gateway that sets it, or removes what clients send: who can choose the tenant can
    take the turns of others, or invent tenants. `source`, a function of the ASGI scope, is asked instead of the
    header if it is given; for example it may return what an authentication middleware has put there.

    A tenant has up to 128 letters, digits and ``. _ : @ -``. A request with another one, or with several, gets a 400.
    So does one without, unless there is a `default`.
    """

    def __init__(
        self,
        app: App,
        *,
        header: str = "x-tenant-id",
        source: Callable[[Scope], str | None] | None = None,
        default: str | None = None,
    ) -> None:
        if not isinstance(header, str) or not _HEADER.fullmatch(header):
            raise InvalidArgument(f"header must be the name of a header, got {header!r}")
        if source is not None and not callable(source):
            raise InvalidType(f"source must be a function of the ASGI scope, got {type(source).__name__}")
        if default is not None and not _is_tenant(default):
            raise InvalidArgument(f"default must be the id of a tenant, got {default!r}", remedy=_ALLOWED)
        self._app = app
        self._header = header.lower().encode()
        self._source = source
        self._default = default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        found = self._found(scope)
        if found is None or not _is_tenant(found):
            await self._refuse(scope, receive, send)
            return
        with tenant_scope(found):
            await self._app(scope, receive, send)

    def _found(self, scope: Scope) -> str | None:
        if self._source is not None:
            named = self._source(scope)
            return self._default if named is None else named
        values = [value for name, value in scope["headers"] if name.lower() == self._header]
        if not values:
            return self._default
        return str(values[0], "latin-1") if len(values) == 1 else None

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no valid tenant"})
            return
        where = "" if self._source is not None else f" in one header {self._header.decode()}"
        detail = f"The request must name its tenant{where}. {_ALLOWED}"
        await ErrorAnswer(400, InvalidArgument.code, detail)(scope, receive, send)


_ALLOWED = "A tenant has 1 to 128 letters, digits and . _ : @ - and begins with a letter or a digit."


def _is_tenant(value: object) -> bool:
    return isinstance(value, str) and _TENANT.fullmatch(value) is not None
