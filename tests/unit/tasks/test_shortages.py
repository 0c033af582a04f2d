"""When a pool waited for something other than slots, for stories."""

from __future__ import annotations

from collections.abc import Hashable

from headgate.tasks.runtime.shortages import Shortages


def test_o10_a_shortage_counts_for_its_requirement_and_its_time() -> None:
    shortages, unserved = Shortages(), set[Hashable]({"eu", "us"})
    shortages.begin("eu", 10.0, "nothing is free")
    shortages.begin("eu", 11.0, "nothing is free")
    shortages.begin("us", 12.0, "nothing is there")
    assert shortages.between("eu", 5.0, 20.0) == (10.0, "nothing is free"), "it goes on"
    shortages.end(unserved, ["eu"], 15.0)
    assert unserved == {"us"}
    assert shortages.between("eu", 5.0, 20.0) == (5.0, "nothing is free")
    assert shortages.between("eu", 12.0, 13.0) == (1.0, "nothing is free")
    assert shortages.between("eu", 15.0, 20.0) == shortages.between("eu", 1.0, 10.0) == (0.0, "")
    assert shortages.between("us", 5.0, 20.0) == (8.0, "nothing is there")
    assert shortages.between(None, 5.0, 20.0) == (0.0, "")


def test_o10_shortages_with_short_pauses_are_one_and_old_ones_are_forgotten() -> None:
    shortages = Shortages()
    for turn in range(1000):
        shortages.begin(None, turn / 2, "nothing is free")
        shortages.end(set(), [None], turn / 2 + 0.4)
    seconds, _ = shortages.between(None, 0.0, 600.0)
    assert 499.8 < seconds < 500.0
    for turn in range(1000):
        shortages.begin(None, 1000.0 + turn * 10, "nothing is free")
        shortages.end({None}, [None, "never begun"], 1001.0 + turn * 10)
    assert shortages.between(None, 0.0, 1e9) == (100.0, "nothing is free")
