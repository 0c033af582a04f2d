"""The shared budgets of several processes, each with its sum. Pure.

A process knows the other members of its budget as of its last exchange with the store. A process that can be seen
itself counts as it shows itself, which is newer; the others, on other machines for example, count as the store told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Look = Mapping[str, Any]


def shared_budgets(looks: Iterable[tuple[str, Look]]) -> list[dict[str, Any]]:
    """Return each shared budget of these programs, by id and what was seen of it: the sum, then its processes."""
    found: list[_Budget] = []
    for program, look in looks:
        for view in look.get("pools", ()):
            if view.get("shared"):
                budget = next((one for one in found if one.has(view)), None)
                if budget is None:
                    found.append(budget := _Budget())
                budget.add(program, look, view)
    return [one.summed() for one in found]


class _Budget:
    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, Look, Look]] = {}  # by the id of the member
        self._newest: Look = {}

    def has(self, view: Look) -> bool:
        """Whether a pool is of this budget. Two stores may have budgets of one id, and these share no member."""
        shared, newest = view["shared"], self._newest
        if view["id"] != newest["id"]:
            return False
        known = {one["id"] for one in newest["shared"]["members"]}
        return shared["member"] in known or any(one["id"] in self._seen for one in shared["members"])

    def add(self, program: str, look: Look, view: Look) -> None:
        self._seen[view["shared"]["member"]] = program, look, view
        if not self._newest or (view["shared"]["as_of"] or 0.0) > (self._newest["shared"]["as_of"] or 0.0):
            self._newest = view

    def summed(self) -> dict[str, Any]:
        newest, unlisted = self._newest, dict(self._seen)
        shared, rows = newest["shared"], []
        active, queued = shared["active"], shared["queued"]
        for member in shared["members"]:
            told = unlisted.pop(member["id"], None)
            row = {"program": "", "title": "", **member} if told is None else _row(*told, member["host"])
            active += row["active"] - member["active"]
            queued += row["queued"] - member["queued"]
            rows.append(row)
        for told in unlisted.values():  # they joined after the newest exchange that was seen
            row = _row(*told, "")
            active += row["active"]
            queued += row["queued"]
            rows.append(row)
        rows.sort(key=lambda row: (row["host"], row["pid"], row["id"]))
        return {
            "id": newest["id"],
            "name": newest["name"],
            "limit": newest["max_concurrent"],
            "active": active,
            "queued": queued,
            "member_count": shared["member_count"] + len(unlisted),
            "members": rows,
        }


def _row(program: str, look: Look, view: Look, host: str) -> dict[str, Any]:
    return {
        "program": program,
        "title": look["program"],
        "id": view["shared"]["member"],
        "host": host,
        "pid": look["pid"],
        "active": view["active"],
        "queued": view["queued"],
    }
