"""The generated code of the wire is what its definition makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WIRE = ROOT / "src" / "headgate" / "workers" / "protocol" / "wire"


def test_w52_the_generated_code_has_not_drifted() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "wire"), "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_w52_every_field_of_the_wire_is_explained_or_explains_itself() -> None:
    """Fields without a comment above them are few, and their names say it."""
    lines = (WIRE / "wire.proto").read_text("utf-8").splitlines()
    fields = [
        (number, line) for number, line in enumerate(lines) if "=" in line and line.startswith("  ") and ";" in line
    ]
    bare = [
        line.strip() for number, line in fields if not lines[number - 1].strip().startswith("//") and "enum" not in line
    ]
    assert len(bare) < len(fields) / 2, bare
