"""The server that tests of HTTP clients talk to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import httpx2
import pytest

from tests.support.integrations.upstream import Upstream, serving


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with serving() as server:
        yield server


@cache
def _context(library: Any) -> Any:
    return library.create_ssl_context()


@pytest.fixture(autouse=True)
def one_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the TLS context of each library once: it takes 0.1 s, and no test here uses TLS."""
    for library in (httpx, httpx2):
        context = _context(library)
        for module in (library, library._transports.default):
            monkeypatch.setattr(module, "create_ssl_context", lambda *args, made=context, **options: made)
