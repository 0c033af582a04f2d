"""What every test gets: a scale for the long ones, and a check that it leaves no thread and no open file behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from headgate.testing import no_leaks

SCALE = float(os.environ.get("HEADGATE_SCALE", "0.1"))


@pytest.fixture
def scale() -> float:
    """How much of a long test to run: 0.1 in `make check`, 1 in `make soak`."""
    return SCALE


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    with no_leaks():
        yield
