"""Which discovered workers a pool misses: `workers/missing.py`."""

from __future__ import annotations

import pytest

from headgate import WorkerMetadata
from headgate.workers.membership import Change
from headgate.workers.missing import JUST_LEFT, MOST, REMEMBERED, MissingWorkers


class Fleet:
    """Missing workers, told of by short names: "b@h2" is worker b on host h2."""

    def __init__(self, *names: str) -> None:
        self.missing = MissingWorkers()
        self.now = 1000.0
        self.added(*names)
        for name in names:
            self.missing.answers(name.partition("@")[0])

    def added(self, *names: str) -> None:
        for name in names:
            self.missing.heard(Change("worker-added", worker(name)), self.now)

    def dropped(self, *names: str) -> None:
        for name in names:
            self.missing.heard(Change("worker-dropped", worker(name)), self.now)

    def lost(self, *uids: str) -> None:
        for uid in uids:
            self.missing.lost(uid, self.now)

    @property
    def absent(self) -> list[str]:
        return [metadata.uid for metadata in self.missing.absent(self.now)]


def worker(name: str) -> WorkerMetadata:
    uid, _, host = name.partition("@")
    return WorkerMetadata(uid, f"{host or uid}:1", 1, "0.1.0")


def test_w67_a_worker_that_was_lost_is_missed_after_its_discovery_dropped_it() -> None:
    fleet = Fleet("a", "b")
    fleet.lost("b")
    assert fleet.absent == [], "its discovery still tells of it"
    fleet.dropped("b")
    assert (fleet.absent, fleet.missing.losses) == (["b"], 1)
    fleet.now += REMEMBERED - 1
    assert fleet.absent == ["b"]
    fleet.now += 1
    assert fleet.absent == [], "not for good"


def test_w67_the_drop_may_come_before_the_loss() -> None:
    fleet = Fleet("a", "b")
    fleet.dropped("b")
    assert fleet.absent == []
    fleet.now += JUST_LEFT
    fleet.lost("b")
    assert (fleet.absent, fleet.missing.losses) == (["b"], 1)


def test_w67_a_worker_that_left_is_not_missed_and_its_calls_may_be_lost_later() -> None:
    fleet = Fleet("a", "b")
    fleet.dropped("b")
    assert (fleet.absent, fleet.missing.losses) == ([], 0)
    fleet.now += JUST_LEFT + 1
    fleet.lost("b")
    assert (fleet.absent, fleet.missing.losses) == ([], 1)


def test_w67_a_loss_that_several_event_loops_tell_of_counts_once_and_the_next_one_again() -> None:
    fleet = Fleet("a")
    fleet.lost("a", "a")
    assert fleet.missing.losses == 1
    fleet.missing.answers("a")
    fleet.lost("a")
    fleet.dropped("a")
    fleet.lost("a")
    fleet.added("b")
    fleet.lost("a")
    assert fleet.missing.losses == 2


@pytest.mark.parametrize("dropped_first", [True, False])
def test_w67_a_worker_on_the_same_host_takes_the_place_of_one_that_was_lost(dropped_first: bool) -> None:
    fleet = Fleet("a@one", "b@two", "c@three")
    fleet.lost("b", "c")
    if dropped_first:
        fleet.dropped("b@two", "c@three")
    fleet.added("d@three")
    if not dropped_first:
        fleet.dropped("b@two", "c@three")
    assert fleet.absent == ["b"]


def test_w67_a_worker_on_another_host_takes_the_place_that_is_empty_for_longest() -> None:
    fleet = Fleet("a@one", "b@two", "c@three")
    fleet.lost("b", "c")
    fleet.dropped("c@three", "b@two")
    fleet.added("d@four")
    assert fleet.absent == ["b"]
    fleet.added("c@three", "e@five")
    assert fleet.absent == []


def test_w67_a_worker_that_comes_back_takes_its_own_place() -> None:
    fleet = Fleet("a@one", "b@two")
    fleet.lost("a", "b")
    fleet.dropped("a@one", "b@two")
    fleet.added("b@one")
    assert fleet.absent == ["a"]


def test_w67_a_place_that_was_given_up_is_not_filled_instead_of_one_that_is_missed() -> None:
    fleet = Fleet("a@one", "b@two")
    fleet.lost("a")
    fleet.dropped("a@one")
    fleet.now += REMEMBERED
    fleet.lost("b")
    fleet.dropped("b@two")
    fleet.added("c@three")
    assert fleet.absent == []


def test_w67_a_worker_that_never_answered_is_not_missed() -> None:
    fleet = Fleet()
    fleet.added("fake")
    fleet.dropped("fake")
    assert (fleet.absent, fleet.missing.losses) == ([], 0)


def test_w67_a_bounded_number_is_remembered() -> None:
    names = [f"w{number}" for number in range(MOST + 10)]
    fleet = Fleet(*names)
    fleet.lost(*names)
    fleet.dropped(*names)
    assert len(fleet.absent) == MOST
