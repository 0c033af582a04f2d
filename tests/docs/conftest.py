"""Documents that open a WorkerPool are run in this process."""

from __future__ import annotations

import asyncio

import pytest

import headgate
from tests.workers import jobs


@pytest.fixture(scope="session", autouse=True)
def what_grpc_opens_once() -> None:
    """gRPC keeps what it opened first until the process ends: not a leak of the document that happens to come first."""

    async def main() -> None:
        async with headgate.WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    asyncio.run(main())
