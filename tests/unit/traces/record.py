"""Record the scenarios again: `python -m tests.unit.traces.record`, with the oldest Python.

Tests never write. Read what this changes before you commit it: each difference is a defect, or a text that was meant to
change.
"""

from __future__ import annotations

import sys

from tests.unit.traces.playing import played, scenario_names
from tests.unit.traces.support import RECORDED, text_of


def main() -> None:
    """Write one file for each scenario."""
    if sys.version_info[:2] != (3, 11):
        raise SystemExit("record with Python 3.11, the oldest that is supported")
    for old in RECORDED.glob("*.json"):
        old.unlink()
    for name in scenario_names():
        (RECORDED / f"{name}.json").write_text(text_of(played(name)), "utf-8")


if __name__ == "__main__":
    main()
