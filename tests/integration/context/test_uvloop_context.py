"""Values travel under uvloop as under asyncio's own loop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

import headgate
from headgate import WorkerPool
from tests.integration.context import travel_jobs as far
from tests.integration.context.test_oracle import CHOSEN, compare
from tests.integration.context.travel_jobs import NOTHING, UNSET, Planted, tenant, values
from tests.support.workers.support import bounded

uvloop = pytest.importorskip("uvloop", reason="pip install headgate[speed]")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def what_uvloop_opens_once(what_grpc_opens_once: None) -> None:
    """It keeps a pipe until the process ends."""

    async def main() -> None:
        async with WorkerPool(spawn=1):
            assert await far.see() == NOTHING

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded(main))


def test_w81_under_uvloop(what_uvloop_opens_once: None) -> None:
    async def one(number: int) -> None:
        tenant.set(number)
        assert (await far.swap(tenant=-number))[0] == number
        assert tenant.get() == -number
        assert await asyncio.to_thread(tenant.get) == -number

    async def in_a_context(context: headgate.Context) -> Any:
        return await far.my_chain(), await far.swap_plainly(tenant="in the context")

    async def main() -> None:
        async with WorkerPool(spawn=2):
            assert type(asyncio.get_running_loop()).__module__ == "uvloop"
            await asyncio.gather(*map(one, range(100)))
            assert values() == NOTHING
            tenant.set("mine")
            with pytest.raises(Planted):
                await far.swap_and_fail(tenant="failed")
            assert await far.through_callbacks() == ["armed", "armed"]
            assert tenant.get() == "later"
            assert (await far.through_tasks())[-1] == ("parent", UNSET, UNSET)
            assert (await far.through_to_thread())[0] == ("set before", UNSET, UNSET)
            async with aclosing(far.converses()) as stream:
                for number in range(3):
                    tenant.set(number)
                    assert (await anext(stream))[1][0] == number
                    assert tenant.get() == f"worker {number}"
            context = headgate.copy_context()
            found = await headgate.create_task(in_a_context(context), context=context)
            assert found == (context.id, ("worker 2", UNSET, "closed"))
            task: Any = asyncio.create_task(in_a_context(context), context=context)  # type: ignore[arg-type]
            assert await task == (context.id, ("in the context", UNSET, "closed"))
            for script in CHOSEN.values():
                await compare(script)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded(main))
