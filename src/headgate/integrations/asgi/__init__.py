"""headgate in web services: for FastAPI, Starlette and every other ASGI framework.

    pool = TaskPool("answers", max_concurrent=40, queue=fair_round_robin("tenant_id"), backpressure=...)
    app = FastAPI(lifespan=asgi.lifespan(pool))     # opened at start-up, drained at shutdown
    app.add_middleware(asgi.PoolErrors)             # an overloaded pool is a 503 with Retry-After
    app.add_middleware(asgi.TenantHeader)           # x-tenant-id names the tenant of what a request submits
    app.add_middleware(asgi.CancelOnDisconnect)     # a client that goes away cancels its `pool.run`

Everything is plain ASGI: no framework is imported.
"""

from headgate.integrations.asgi.disconnects import CancelOnDisconnect
from headgate.integrations.asgi.lifespans import WithLifespan, lifespan, lifespan_from
from headgate.integrations.asgi.refusals import REFUSALS, PoolErrors, exception_handlers
from headgate.integrations.asgi.tenants import TenantHeader

__all__ = [
    "REFUSALS",
    "CancelOnDisconnect",
    "PoolErrors",
    "TenantHeader",
    "WithLifespan",
    "exception_handlers",
    "lifespan",
    "lifespan_from",
]
