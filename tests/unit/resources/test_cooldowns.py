"""R31, R35: the rule for cooldowns, alone."""

from __future__ import annotations

import pytest

from headgate import Resource
from headgate.resources.cooldowns import Cooldown, cooldown_after

TABLE = (30.0, 120.0)


def resource(consecutive: int = 0, until: float = 0.0) -> Resource[None]:
    return Resource("key", None, consecutive_cooldown=consecutive, cooldown_until=until)


@pytest.mark.parametrize(("before", "seconds"), [(0, 30.0), (1, 120.0), (7, 120.0)])
def test_r31_the_table_gives_the_seconds_and_its_last_entry_goes_on(before: int, seconds: float) -> None:
    found = cooldown_after(resource(before), TABLE, None, is_late=False, now=5.0)
    assert found == Cooldown(before + 1, 5.0 + seconds, seconds)


def test_r31_a_verdict_that_names_seconds_gets_them() -> None:
    assert cooldown_after(resource(), TABLE, 2.5, is_late=False, now=1.0) == Cooldown(1, 3.5, 2.5)


def test_r35_a_late_verdict_is_the_same_outage() -> None:
    assert cooldown_after(resource(2, 40.0), TABLE, 60.0, is_late=True, now=10.0) == Cooldown(2, 70.0, 60.0)
    assert cooldown_after(resource(0), TABLE, None, is_late=True, now=10.0).consecutive == 1


def test_r31_no_verdict_makes_a_cooldown_shorter() -> None:
    assert cooldown_after(resource(1, 100.0), TABLE, 1.0, is_late=True, now=10.0) == Cooldown(1, 100.0, 90.0)
