"""Each scenario gives the recorded events, states and texts.

The three are compared apart: words of stories, logs and errors may be changed on purpose, and then events and states
show that nothing else was.
"""

from __future__ import annotations

import pytest

from tests.unit.traces.playing import played, scenario_names
from tests.unit.traces.support import recorded, recorded_names, same


def test_every_scenario_is_recorded() -> None:
    assert scenario_names() == recorded_names()


@pytest.mark.parametrize("part", ["events", "states", "texts"])
@pytest.mark.parametrize("name", scenario_names())
def test_a_scenario_is_as_it_was(name: str, part: str) -> None:
    same(f"{part} of {name}", played(name)[part], recorded(name)[part])
