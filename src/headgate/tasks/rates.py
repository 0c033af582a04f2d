"""`rate_per_tenant`: how many tasks of each tenant a pool may start within some time, as users say it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from headgate.core.redaction import log_exception
from headgate.errors import InvalidArgument, InvalidType
from headgate.gate.tenants import Window
from headgate.resources.costs import REQUESTS
from headgate.resources.quota import Quota

RatePerTenant: TypeAlias = Quota | Mapping[str, Quota] | Callable[[str], Quota | None]
"""One rate for every tenant, rates for some, or a function of the tenant. None is no limit."""


class TenantRates:
    """The rates of one pool."""

    __slots__ = ("_rate",)

    def __init__(self, rate: RatePerTenant) -> None:
        self._rate = rate

    def quota(self, tenant: Hashable) -> Quota | None:
        """The rate of a tenant, or None if it has none. Raises what a function of the user raises."""
        if tenant is None:
            return None
        if isinstance(self._rate, Quota):
            return self._rate
        asked: Any = tenant  # it may be anything hashable
        if isinstance(self._rate, Mapping):
            return self._rate.get(asked)
        return _checked(self._rate(asked), f" of {tenant!r}")

    def window(self, tenant: Hashable) -> Window | None:
        """Make the window of a tenant, with nothing used. Never raises: its task was accepted already."""
        try:
            quota = self.quota(tenant)
        except Exception:
            log_exception("headgate.tasks", "rate_per_tenant failed, so a tenant has no rate for now")
            return None
        return None if quota is None else quota.window_of(REQUESTS)


def checked_rates(rate: object, *, is_shared: bool) -> TenantRates | None:
    """Check `rate_per_tenant`. InvalidArgument or InvalidType for what is no rate."""
    if rate is None:
        return None
    if is_shared:
        raise InvalidArgument(
            "rate_per_tenant= cannot be given to a pool that shares its budget: processes share no rates of tenants",
            remedy="Leave it out and cap tenants with max_concurrent_per_key=, or use a pool of one process.",
        )
    if isinstance(rate, Mapping):
        checked = {tenant: _checked(one, f" of {tenant!r}") for tenant, one in rate.items()}
        return TenantRates({tenant: quota for tenant, quota in checked.items() if quota is not None})
    if callable(rate) and not isinstance(rate, (Quota, type)):
        function: Callable[[Any], Any] = rate
        return TenantRates(function)
    quota = _checked(rate, "")
    return None if quota is None else TenantRates(quota)


def _checked(quota: object, whose: str) -> Quota | None:
    if quota is None:
        return None
    if not isinstance(quota, Quota):
        raise InvalidType(
            f"rate_per_tenant{whose} must be a Quota or None, got {type(quota).__name__}",
            remedy="Pass Quota(requests=5, per=60.0), a mapping from tenants to such, or a function of the tenant.",
        )
    if set(quota.limits) != {REQUESTS}:
        raise InvalidArgument(
            f"rate_per_tenant{whose} must be a Quota of requests alone, got {quota!r}",
            remedy="Starts of tasks are counted, and not tokens: Quota(requests=5, per=60.0).",
        )
    return quota
