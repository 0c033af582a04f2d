"""H10: calls that wait for a quota of several processes are all served. Members of `SharedMemory` play the processes."""

from __future__ import annotations

import gc

import pytest

from headgate import Quota, Resource, ResourcePool
from headgate.core.clock import clock
from headgate.stores.shared.memory import SharedMemory
from headgate.testing import virtual
from tests.resources.support import ident
from tests.resources.test_quotas import Upstream, limited

# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_pool_goes", [False, True])
def test_h10_a_pool_without_a_store_takes_part_in_a_group_that_is_shared(first_pool_goes: bool) -> None:
    @virtual
    async def scenario() -> None:
        quota, group, upstream = Quota(requests=10, per=10.0), f"shared {first_pool_goes}", Upstream(10, None, 10.0)
        resource = Resource("a", "a", quota=quota, quota_group=group)
        shared = ResourcePool([resource], name="keys", store=SharedMemory().member())
        alone = limited("b", quota=quota, group=group)
        if first_pool_goes:
            del shared
            gc.collect()
        for _ in range(30):
            assert await alone.run(ident, wait_for_capacity=True) == "b"
            upstream.arrive("b", 0)
        assert upstream.exceeded == []
        assert clock.now() <= 30

    scenario()
