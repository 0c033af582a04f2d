"""Budgets that several processes share: the sum of all, and each process once."""

from __future__ import annotations

from typing import Any

from headgate.cli.top_frame import Settings, frame
from headgate.observe.budgets import shared_budgets
from headgate.observe.history import DROPPED


def member(number: int, active: int, queued: int) -> dict[str, Any]:
    return {"id": f"m{number}", "host": f"host-{number}", "pid": number, "active": active, "queued": queued}


def seen(number: int, active: int, queued: int, members: list[dict[str, Any]], as_of: float = 1.0) -> dict[str, Any]:
    """What a program shows: its own figures, and what the store told it of all members."""
    shared = {
        "member": f"m{number}",
        "active": sum(one["active"] for one in members),
        "queued": sum(one["queued"] for one in members),
        "reachable": True,
        "as_of": as_of,
        "member_count": len(members),
        "members": members,
    }
    view = {"kind": "tasks", "name": "calls", "number": 1, "id": "pool-1", "state": "open", "completed": 0, "failed": 0}
    view |= {"active": active, "queued": queued, "max_concurrent": 9, "jain": 1.0, "lag": 0.0, "shared": shared}
    view |= {"held": None, "waiting_for": None, **dict.fromkeys(DROPPED, 0)}
    return {"pid": number, "program": f"job-{number}.py", "at": 0.0, "started_at": 0.0, "pools": [view]}


def summed(*looks: dict[str, Any]) -> list[dict[str, Any]]:
    return shared_budgets((f"id-{look['pid']}", look) for look in looks)


def rows(budget: dict[str, Any]) -> list[tuple[int, str, int, int]]:
    return [(one["pid"], one["title"], one["active"], one["queued"]) for one in budget["members"]]


def test_o20_a_process_that_is_seen_counts_as_it_shows_itself_and_others_as_the_store_told() -> None:
    told = [member(1, 1, 1), member(2, 2, 2), member(3, 3, 3)]
    [budget] = summed(seen(1, 4, 5, told), seen(2, 0, 7, told))
    assert (budget["active"], budget["queued"], budget["limit"], budget["member_count"]) == (4 + 0 + 3, 5 + 7 + 3, 9, 3)
    assert rows(budget) == [(1, "job-1.py", 4, 5), (2, "job-2.py", 0, 7), (3, "", 3, 3)]
    assert [one["program"] for one in budget["members"]] == ["id-1", "id-2", ""]


def test_o20_the_newest_list_counts_and_who_joined_after_it_is_added() -> None:
    old = seen(1, 2, 0, [member(1, 2, 0), member(9, 5, 5)], as_of=1.0)
    new = seen(2, 1, 1, [member(1, 2, 0), member(2, 1, 1)], as_of=2.0)
    late = seen(3, 1, 4, [member(1, 2, 0), member(2, 1, 1), member(3, 0, 0)], as_of=1.5)
    [budget] = summed(old, new, late)
    assert sorted(rows(budget)) == [(1, "job-1.py", 2, 0), (2, "job-2.py", 1, 1), (3, "job-3.py", 1, 4)]
    assert (budget["active"], budget["queued"], budget["member_count"]) == (4, 5, 3), "and not of one that is gone"


def test_o20_budgets_of_one_name_in_two_stores_are_two() -> None:
    both = summed(seen(1, 2, 0, [member(1, 2, 0)]), seen(2, 3, 0, [member(2, 3, 0)]))
    assert [one["active"] for one in both] == [2, 3]


def test_o20_a_list_that_was_cut_still_has_the_sum_of_all() -> None:
    look = seen(1, 4, 5, [member(1, 1, 1)])
    look["pools"][0]["shared"] |= {"active": 101, "queued": 201, "member_count": 300}
    [budget] = summed(look)
    assert (budget["active"], budget["queued"], budget["member_count"]) == (104, 205, 300)


def test_o20_pools_that_are_not_shared_or_cannot_be_read_are_left_out() -> None:
    alone, broken = seen(1, 1, 1, [member(1, 1, 1)]), seen(2, 1, 1, [member(2, 1, 1)])
    alone["pools"][0]["shared"] = None
    broken["pools"] = [{"kind": "tasks", "name": "calls", "number": 1, "broken": "ValueError"}]
    assert summed(alone, broken) == []


def test_o10_top_shows_the_sum_of_a_shared_budget_above_its_processes() -> None:
    told = [member(1, 4, 5), member(2, 0, 7), member(3, 3, 3)]
    looks = [seen(1, 4, 5, told), seen(2, 0, 7, told)]
    texts = ["".join(piece.text for piece in line) for line in frame(looks, Settings(), 120, 40)]
    at = texts.index("Shared budgets")
    assert texts[at + 2].split() == ["calls", "3", "7/9", "15"]
    pools = [text.split() for text in texts[texts.index("Task pools") + 2 :]]
    assert [(one[0], one[2], one[3]) for one in pools] == [("calls", "4/9", "5"), ("calls", "0/9", "7")]
