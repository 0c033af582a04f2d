"""Fixture for documents that open a WorkerPool in the process of the tests."""

from __future__ import annotations

import pytest

from tests.support.workers.support import what_grpc_opens


@pytest.fixture(scope="session", autouse=True)
def what_grpc_opens_once() -> None:
    what_grpc_opens()
