"""Which discovered workers a pool uses: `workers/membership.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headgate import WorkerMetadata
from headgate.workers.membership import MOST_REFUSED, MOST_TRIED, MOST_WAITING, Membership, version_trouble

OURS = "0.3.0"


def worker(uid: str, **fields: Any) -> WorkerMetadata:
    return WorkerMetadata(**{"uid": uid, "address": f"{uid}:1", "pid": 1, "version": OURS, **fields})


def told(membership: Membership, type: Any, metadata: WorkerMetadata) -> list[tuple[str, str]]:
    return [(change.type, change.metadata.uid) for change in membership.heard(type, metadata)]


def added(membership: Membership, *uids: str, **fields: Any) -> list[tuple[str, str]]:
    return [change for uid in uids for change in told(membership, "worker-added", worker(uid, **fields))]


def uids(membership: Membership) -> list[str]:
    return [metadata.uid for metadata in membership.admitted]


def test_w20_without_a_lease_every_worker_is_used() -> None:
    membership = Membership(version=OURS)
    assert added(membership, "a", "b", "c") == [("worker-added", uid) for uid in "abc"]
    assert uids(membership) == ["a", "b", "c"]
    assert told(membership, "worker-dropped", worker("b")) == [("worker-dropped", "b")]
    assert told(membership, "worker-dropped", worker("b")) == []


def test_w20_w66_the_lease_caps_discovered_workers_and_a_drop_frees_a_place() -> None:
    membership = Membership(lease=2, version=OURS)
    membership.owns("mine")
    assert added(membership, "mine", "a", "b", "c", "d") == [("worker-added", "a"), ("worker-added", "b")]
    assert set(membership.refused) == {"c", "d"}
    assert "lease of 2" in membership.refused["c"]
    assert told(membership, "worker-dropped", worker("a")) == [("worker-dropped", "a"), ("worker-added", "c")]
    assert uids(membership) == ["b", "c"]


def test_w66_a_refresh_of_a_worker_that_is_used_bypasses_the_cap() -> None:
    membership = Membership(lease=1, version=OURS)
    added(membership, "a", "b")
    assert added(membership, "a") == [], "nothing has changed"
    moved = worker("a", address="elsewhere:2")
    assert told(membership, "worker-added", moved) == [("worker-updated", "a")]
    assert membership.admitted == [moved]


def test_w66_the_update_of_a_worker_without_a_place_is_ignored_while_the_lease_is_full() -> None:
    membership = Membership(lease=1, version=OURS)
    added(membership, "a", "b")
    later = worker("b", address="elsewhere:2")
    assert told(membership, "worker-updated", later) == []
    assert [change.metadata for change in membership.heard("worker-dropped", worker("a"))] == [worker("a"), later]


def test_w66_a_lone_update_admits() -> None:
    membership = Membership(version=OURS)
    assert told(membership, "worker-updated", worker("a")) == [("worker-added", "a")]


@pytest.mark.parametrize("bad", [{"version": "soon"}, {"version": "7.0.0"}, {"secure": True}, {"tags": frozenset("z")}])
def test_w66_w64_an_update_that_makes_a_worker_unfit_evicts_it_and_one_that_mends_it_admits_it(
    bad: dict[str, Any],
) -> None:
    membership = Membership(tags=["x", "y"], lease=1, version=OURS)
    fit = worker("a", tags=frozenset("xq"))
    unfit = worker("a", **{"tags": frozenset("x"), **bad})
    assert told(membership, "worker-added", unfit) == []
    assert membership.refused["a"]
    assert told(membership, "worker-added", worker("b", tags=frozenset("y"))) == [("worker-added", "b")], "not counted"
    told(membership, "worker-dropped", worker("b"))
    assert told(membership, "worker-updated", fit) == [("worker-added", "a")]
    assert membership.refused == {}
    assert told(membership, "worker-updated", unfit) == [("worker-dropped", "a")]
    assert told(membership, "worker-updated", fit) == [("worker-added", "a")]


@pytest.mark.parametrize(("secure", "says"), [(True, "secure workers only"), (False, "insecure workers only")])
def test_w64_secure_and_insecure_workers_never_mix(secure: bool, says: str) -> None:
    membership = Membership(secure=secure, version=OURS)
    assert added(membership, "fit", secure=secure) == [("worker-added", "fit")]
    assert added(membership, "unfit", secure=not secure) == []
    assert says in membership.refused["unfit"]


def test_w21_any_tag_that_matches_selects_a_worker() -> None:
    membership = Membership(tags=["gpu", "big"], version=OURS)
    assert added(membership, "a", tags=frozenset({"gpu"})) == [("worker-added", "a")]
    assert added(membership, "b", tags=frozenset({"big", "old"})) == [("worker-added", "b")]
    assert added(membership, "c", tags=frozenset({"small"})) == []
    assert added(membership, "d") == []
    assert membership.refused["d"] == "it has none of the tags big, gpu"


def test_w66_what_a_discovery_says_of_the_pools_own_workers_is_ignored() -> None:
    membership = Membership(version=OURS)
    added(membership, "a", "b")
    assert [change.type for change in membership.owns("a")] == ["worker-dropped"], "it came by discovery first"
    assert added(membership, "a") == []
    assert told(membership, "worker-dropped", worker("a")) == []
    assert membership.owns("c") == []


def test_w66_a_worker_out_of_reach_gives_its_place_to_one_that_waits() -> None:
    membership = Membership(lease=1, version=OURS)
    added(membership, "a", "b")
    changes = [(change.type, change.metadata.uid) for change in membership.out_of_reach("a")]
    assert changes == [("worker-dropped", "a"), ("worker-added", "b")]
    assert membership.out_of_reach("unknown") == []
    assert [change.metadata.uid for change in membership.out_of_reach("b")] == ["b", "a"], "it waits, and comes back"
    alone = Membership(lease=1, version=OURS)
    added(alone, "a")
    assert alone.out_of_reach("a") == [], "nobody waits"


def test_w66_while_workers_say_nothing_others_are_tried_beside_them() -> None:
    membership = Membership(lease=2, version=OURS)
    for number in range(50):
        added(membership, f"fake-{number}")
    added(membership, "good")
    tried, turns = ["fake-0", "fake-1"], 0
    while "good" not in tried:
        turns += 1
        tried += [change.metadata.uid for uid in list(tried) for change in membership.silent(uid)]
    assert turns <= 4, "each of a third of a second"
    assert len(membership.admitted) == 2, "no more are used"
    assert membership.answers("good") == []
    assert membership.admitted[0].uid == "good"
    dropped = [change.metadata.uid for change in membership.answers("fake-7")]
    assert len(dropped) == 49
    assert [one.uid for one in membership.admitted] == ["fake-7", "good"]
    assert membership.answers("fake-9") == [], "it comes too late"
    assert not membership.uses("fake-9")
    assert membership.silent("good") == [], "it answered before"
    assert "lease of 2" in membership.refused["fake-9"]


def test_w62_no_more_than_a_few_are_tried_beyond_the_lease() -> None:
    membership = Membership(lease=2, version=OURS)
    tried = []
    for number in range(1000):
        added(membership, f"fake-{number}")
        tried += [change.metadata.uid for change in membership.silent(f"fake-{number}")]
    assert len([number for number in range(1000) if membership.uses(f"fake-{number}")]) == 2 + MOST_TRIED


def test_w62_ten_thousand_announcements_cost_bounded_memory() -> None:
    membership = Membership(lease=3, version=OURS)
    for number in range(10_000):
        added(membership, f"fake-{number}")
        added(membership, f"unfit-{number}", secure=True)
    assert len(membership.admitted) == 3
    assert len(membership.refused) <= MOST_REFUSED + MOST_WAITING


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        *[(version, True) for version in ("0.3.0", "0.1", "0", "0.9.0rc1", "0.4.0.dev3+local")],
        *[
            (version, False)
            for version in ("1.0.0", "10.3.0", "", "x", "0.", ".3", "0.3.0 \n", "٣.0", "v0.3", "9" * 50)
        ],
    ],
)
def test_w66_versions_with_another_first_number_or_unreadable_ones_are_not_used(version: str, fits: bool) -> None:
    assert (version_trouble(version, OURS) == "") == fits


def test_w66_random_events_keep_the_rules(scale: float) -> None:
    for seed in range(int(2000 * scale)):
        rng = random.Random(seed)
        lease = rng.choice([None, 1, 2, 3])
        membership = Membership(tags=rng.choice([(), ("x",)]), lease=lease, version=OURS)
        there: dict[str, WorkerMetadata] = {}  # as dispatchers were told
        known: dict[str, WorkerMetadata] = {}  # as the discovery told
        for _ in range(60):
            uid = rng.choice("abcdef")
            fields = {"tags": frozenset(rng.choice(["x", "y"])), "secure": rng.random() < 0.2}
            metadata = worker(uid, address=f"{uid}:{rng.randrange(3)}", version=rng.choice([OURS, "9.0"]), **fields)
            kind = rng.choice(["worker-added", "worker-updated", "worker-dropped"])
            for change in membership.heard(kind, metadata):
                if change.type == "worker-dropped":
                    del there[change.metadata.uid]
                else:
                    assert (change.metadata.uid in there) == (change.type == "worker-updated")
                    there[change.metadata.uid] = change.metadata
            if kind == "worker-dropped":
                known.pop(uid, None)
            else:
                known[uid] = metadata
            fit = {uid: one for uid, one in known.items() if not membership.reason_against(one)}
            assert list(there.values()) == membership.admitted
            assert there.items() <= fit.items()
            assert len(there) == len(fit) if lease is None else len(there) == min(lease, len(fit))


def test_w66_random_answers_and_silences_keep_the_lease(scale: float) -> None:
    for seed in range(int(2000 * scale)):
        rng = random.Random(seed)
        lease = rng.choice([1, 2, 3])
        membership = Membership(lease=lease, version=OURS)
        there: set[str] = set()
        known: set[str] = set()
        answered: set[str] = set()
        for _ in range(80):
            uid = rng.choice("abcdefghij")
            happens = rng.choice(["added", "added", "dropped", "silent", "answers", "out_of_reach"])
            if happens in ("added", "dropped"):
                changes = membership.heard(f"worker-{happens}", worker(uid))  # type: ignore[arg-type]
                (known.add if happens == "added" else known.discard)(uid)
            else:
                changes = getattr(membership, happens)(uid)
            for change in changes:
                (there.discard if change.type == "worker-dropped" else there.add)(change.metadata.uid)
            answered = {one for one in answered & there if (one, happens) != (uid, "out_of_reach")}
            answered |= {uid} & there if happens == "answers" else set()
            assert there == {one for one in known if membership.uses(one)}
            assert len(answered) <= lease, "no more than that are used"
            assert len(there) >= min(lease, len(known))
            assert len(there) == lease or len(answered) < lease
            assert {one.uid for one in membership.admitted} <= there
            assert len(membership.admitted) == min(lease, len(known))
            assert answered <= {one.uid for one in membership.admitted}
