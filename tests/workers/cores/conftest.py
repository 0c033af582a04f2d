"""Nothing here starts a worker, so nothing has to be warmed up for the leak checks."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.workers.cores.conversation")


@pytest.fixture(scope="session", autouse=True)
def what_grpc_opens_once() -> None:
    """In place of the one for tests with processes."""
