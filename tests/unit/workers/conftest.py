"""Nothing here starts a worker, so nothing has to be warmed up for the leak checks."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest

pytest.register_assert_rewrite("tests.unit.workers.conversation")


@pytest.fixture(scope="session", autouse=True)
def what_grpc_opens_once() -> None:
    """In place of the one for tests with processes."""


@pytest.fixture(autouse=True)
def what_cloudpickle_was_told() -> Iterator[None]:
    """No module is sent by value but those that a test names, and afterwards they are not either."""
    registry = cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES
    before = set(registry)
    registry.clear()
    yield
    registry.clear()
    registry.update(before)
