"""Nothing here starts a worker, so nothing has to be warmed up for the leak checks."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest

pytest.register_assert_rewrite("tests.workers.cores.conversation")


@pytest.fixture(scope="session", autouse=True)
def what_grpc_opens_once() -> None:
    """In place of the one for tests with processes."""


@pytest.fixture(autouse=True)
def what_cloudpickle_was_told() -> Iterator[None]:
    """Modules that a test had sent by value are not, afterwards."""
    registry = cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES
    before = set(registry)
    yield
    registry.intersection_update(before)
