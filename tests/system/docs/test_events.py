"""docs/events.md is what the classes of events say, and their names and topics are even."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from headgate.core.events import Event

ROOT = Path(__file__).parents[3]
TOOL = runpy.run_path(str(ROOT / "tools" / "events"))
TOPIC = re.compile(r"(tasks|resources|workers|observe)\.[a-z]+|lifecycle\.pool\.audit")


def test_o02_the_page_is_generated() -> None:
    assert (ROOT / "docs" / "events.md").read_text("utf-8") == TOOL["page"](), "run `.venv/bin/python tools/events`"


def test_o02_names_and_topics_are_even_and_there_is_one_version() -> None:
    kinds: list[type[Event]] = TOOL["events"]()
    assert len(kinds) >= 30
    assert {kind.schema for kind in kinds} == {1}
    for kind in kinds:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)+", kind.name), kind.name
        assert TOPIC.fullmatch(kind.topic), kind.topic
    names = [kind.name for kind in kinds]
    assert len(names) == len(set(names)), "a name says which event it is"
