"""Rates of the points of a plot: also after a time in which nobody looked, and if many look at once."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from headgate.core.views import TaskPoolView, TenantRow, Unread
from headgate.observe import sampler
from headgate.observe.history import PLOTTED, POINTS, PoolHistory, recent_points
from tests.system.observe.conftest import Program
from tests.system.observe.support import eventually


def noted(history: PoolHistory, now: float, completed: int) -> float:
    point = history.note(TaskPoolView(completed=completed), now, 1_000_000.0 + now)
    assert point is not None
    return float(point["done"])


def test_o20_a_rate_is_of_the_last_two_seconds() -> None:
    history = PoolHistory("tasks")
    assert [noted(history, now, 10 * now) for now in range(4)] == [0.0, 10.0, 10.0, 10.0]
    assert [noted(history, now, 30) for now in (4, 5, 6)] == [5.0, 0.0, 0.0]


def test_o20_the_first_rate_after_a_gap_is_no_peak_and_the_next_is_not_of_the_gap() -> None:
    history = PoolHistory("tasks")
    for now in range(5):
        noted(history, now, 10 * now)
    assert noted(history, 64, 640) == 10.0, "what was done in the gap is divided by all of it"
    assert noted(history, 65, 740) == 100.0
    assert noted(history, 66, 840) == 100.0


def test_o20_failures_and_dropped_tasks_have_rates_of_what_their_totals_count() -> None:
    history = PoolHistory("tasks")
    history.note(TaskPoolView(), 0, 0)
    point = history.note(TaskPoolView(failed=3, rejected=10, expired=20, stale=30, cancelled=7), 1, 1)
    assert point is not None
    assert (point["failed"], point["dropped"]) == (3.0, 60.0)


@pytest.mark.parametrize("soon", [0.0, 0.001, 0.4])
def test_o20_looks_that_follow_each_other_at_once_make_no_peak(soon: float) -> None:
    history = PoolHistory("tasks")
    assert noted(history, 0.0, 0) == 0.0
    assert noted(history, soon, 1) == 0.0
    assert noted(history, 1.0, 1) == 1.0
    assert noted(history, 1.0 + soon, 3) <= 3.0
    for step in range(10_000):
        assert noted(history, 2.0 + step / 1000, 3) <= 3.0
    assert len(history.points) == POINTS


@pytest.mark.parametrize("view", [Unread(changing=True), Unread(broken="ValueError"), Unread(state="loading")])
def test_o20_a_view_without_counters_makes_no_point_and_no_peak(view: Unread) -> None:
    history = PoolHistory("tasks")
    rates = []
    for now in range(8):
        if now == 4:
            assert history.note(view, now, now) is None
        else:
            rates.append(noted(history, now, 100_000))
    assert rates == [0.0] * 7
    assert len(history.points) == 7


@pytest.mark.parametrize("pools", [1, 10, 500])
def test_o20_what_is_sent_of_the_past_has_a_limit_for_all_pools_together(pools: int) -> None:
    histories = {number: PoolHistory("tasks") for number in range(pools)}
    tenants = {f"tenant {one} {'x' * 180}": [one, 0.5] for one in range(PLOTTED)}
    for history in histories.values():
        history.points.extend([{"t": now, "tenants": tenants} for now in range(POINTS)])
    past = recent_points(histories, 2_000_000)
    assert past.keys() == {str(number) for number in histories}
    assert len(json.dumps(past)) < 2_500_000
    assert {len(points) for points in past.values()} == {min(POINTS, len(past["0"]))}
    assert [points[-1]["t"] for points in past.values()] == [POINTS - 1] * pools
    assert len(past["0"]) == POINTS or len(json.dumps(past)) > 1_000_000, "no less than there is room for"
    assert recent_points({1: PoolHistory("tasks")}) == {"1": []}


def waiting(history: PoolHistory, now: float, lags: dict[str, float]) -> list[str]:
    rows = [TenantRow(name, queued=int(lag > 0), lag=lag) for name, lag in lags.items()]
    rows.sort(key=lambda row: -row.lag)  # as the view has them
    point = history.note(TaskPoolView(tenants=rows), now, now)
    assert point is not None
    return list(point["tenants"])


def test_o20_those_that_wait_now_are_plotted_instead_of_those_that_have_nothing_queued() -> None:
    history = PoolHistory("tasks")
    first = {f"early {n}": 5.0 + n for n in range(6)}
    assert set(waiting(history, 0.0, first)) == {*first}
    now_waiting = {f"late {n}": 1.0 + n for n in range(60)}
    idle = dict.fromkeys(list(first)[1:], 0.0)
    assert set(waiting(history, 5.0, {"early 0": 50.0, **idle, **now_waiting})) == {*first}, "nothing jumps"
    plotted = waiting(history, 11.0, {"early 0": 56.0, **idle, **now_waiting})
    assert set(plotted) == {"early 0", *(f"late {n}" for n in range(55, 60))}
    for second in range(12, 100):  # all wait, and in another order each time: nobody has to go
        assert (
            waiting(
                history, second, {name: 20.0 + second * n % 7 for n, name in enumerate(now_waiting)} | {"early 0": 20.0}
            )
            == plotted
        )


def test_o20_one_that_waits_much_longer_is_plotted_though_others_have_something_queued() -> None:
    history, short = PoolHistory("tasks"), {f"short {n}": 0.5 for n in range(6)}
    assert "long" not in waiting(history, 0.0, short)
    seen = [waiting(history, second, {**short, "long": float(second)}) for second in range(1, 30)]
    assert "long" in seen[-1]
    assert len(seen[-1]) == 6
    assert waiting(history, 90.0, {}) == seen[-1], "those that waited last stay, if nobody waits"


def test_o20_a_loop_that_is_held_makes_no_points(program: Program) -> None:
    def view() -> dict[str, Any]:
        return next(one for one in watched.look()["pools"] if one["name"] == program.pool.name)

    watched, free = sampler.acquire(), threading.Event()
    try:
        assert view()["point"]["active"] == 2
        program.loop.call_soon_threadsafe(free.wait)
        held = view()
        assert held["held"] >= 0.3
        assert "point" not in held, "what was seen last says nothing of now"
        free.set()
        eventually(lambda: "point" in view())
    finally:
        free.set()
        sampler.release()
