"""All scenarios, each played once in a process."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.unit.traces import combined_scenarios, resource_scenarios, task_scenarios
from tests.unit.traces.traces import SCENARIOS, play

MODULES = (resource_scenarios, task_scenarios, combined_scenarios)


def scenario_names() -> list[str]:
    """All of them."""
    return sorted(SCENARIOS)


@cache
def played(name: str) -> dict[str, Any]:
    """What a scenario records now. Do not change what this returns."""
    return play(name)
