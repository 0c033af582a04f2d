"""For whom tasks are done that name no tenant: `tenant_scope`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from headgate.errors import InvalidArgument

TENANT: ContextVar[str | None] = ContextVar("headgate_tenant", default=None)
"""The tenant of the innermost `tenant_scope`."""


@contextmanager
def tenant_scope(tenant: str) -> Iterator[str]:
    """Context manager: tasks that are submitted inside belong to this tenant, unless their submit names another.

    It holds for all task pools, and for what these tasks submit themselves in this process.
    """
    if not isinstance(tenant, str) or not tenant.strip():
        raise InvalidArgument(f"tenant must be a non-blank string, got {tenant!r}", remedy="Pass the tenant's id.")
    token = TENANT.set(tenant)
    try:
        yield tenant
    finally:
        TENANT.reset(token)


def current_tenant() -> str | None:
    """Return the tenant of the `tenant_scope` around this code; None if there is none."""
    return TENANT.get()
