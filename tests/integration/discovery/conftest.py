"""Each test of discovery has a runtime directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.workers.warm_programs import programs_start_warm, template_of_programs  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which `LocalDiscovery` keeps its files."""
    above = tmp_path / "runtime"
    above.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(above))
    return above / "headgate"
