"""R03: notes for coding agents that are true."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import headgate
from headgate import Resource, ResourcePool
from headgate.resources import PoolStats, ResourceStats

NOTES = ResourcePool.__agent_notes__()


def test_r03_the_module_prints_the_notes() -> None:
    pytest.importorskip("agent_readable", reason="pip install agent-readable")
    out = subprocess.run(
        [sys.executable, "-m", "agent_readable", "headgate.ResourcePool"], capture_output=True, text=True, check=True
    ).stdout
    for part in ("### The operation contract", "### Do not", "### Failure modes", "CooldownResource", "run_sync"):
        assert part in out


def test_r03_every_public_class_has_notes_without_any_dependency() -> None:
    for kind in (ResourcePool, Resource, PoolStats, ResourceStats):
        assert len(kind.__agent_notes__()) > 40


def test_r03_every_member_the_notes_name_exists() -> None:
    methods = set(re.findall(r"`(?:headgate\.)?(\w+)\(", NOTES))
    known = {*dir(ResourcePool), *dir(headgate), "Resource"}
    assert methods <= known, methods - known
    options = set(re.findall(r"`?(\w+)=", NOTES)) - {"result"}
    from headgate.resources import RunOptions

    accepted = {*RunOptions.__annotations__, *ResourcePool.__init__.__annotations__, *Resource.__init__.__annotations__}
    from typing import get_type_hints

    accepted |= set(get_type_hints(RunOptions)) | {"cooldown_seconds", "reason", "only_for", "pool", "status"}
    assert options <= accepted, options - accepted
    for attribute in re.findall(r"`\.(\w+)`", NOTES):
        assert hasattr(headgate.PoolExhausted("x"), attribute)


def test_r03_the_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", NOTES, re.S)
    assert len(blocks) == 1
    names: dict[str, object] = {}
    exec(blocks[0], names)
    assert names["result"] == 200
    pool = names["pool"]
    assert isinstance(pool, ResourcePool)
    assert pool.snapshot()["key-1"]["status"] == "cooling_down"
