"""Each test of discovery has a runtime directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which `LocalDiscovery` keeps its files."""
    above = tmp_path / "runtime"
    above.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(above))
    return above / "headgate"
