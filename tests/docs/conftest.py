"""Fixture for documents that open a WorkerPool in the process of the tests."""

from __future__ import annotations

import asyncio

import pytest

import headgate
from tests.workers import jobs


@pytest.fixture(scope="session", autouse=True)
def what_grpc_opens_once() -> None:
    """Open a WorkerPool once, because gRPC keeps its first files and threads until the process ends."""

    async def main() -> None:
        async with headgate.WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    asyncio.run(main())
