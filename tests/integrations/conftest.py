"""The server that tests of HTTP clients talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.upstream import Upstream, serving


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with serving() as server:
        yield server
