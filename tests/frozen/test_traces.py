"""Each scenario gives the recorded events, states and texts.

The three are compared apart: words of stories, logs and errors may be changed on purpose, and then events and states
show that nothing else was.
"""

from __future__ import annotations

import pytest

from tests.frozen.playing import played, scenario_names
from tests.frozen.support import names_of, recorded, same


def test_every_scenario_is_recorded() -> None:
    assert scenario_names() == names_of("traces")


@pytest.mark.parametrize("part", ["events", "states", "texts"])
@pytest.mark.parametrize("name", scenario_names())
def test_a_scenario_is_as_it_was(name: str, part: str) -> None:
    same(f"{part} of {name}", played(name)[part], recorded(f"traces/{name}.json")[part])
