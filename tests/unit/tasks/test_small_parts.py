"""The timers, the submit queue, and what counts as the same work."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headgate.core.key_windows import checked_window
from headgate.errors import InvalidArgument
from headgate.tasks.model import TaskRecord, Terms
from headgate.tasks.scheduling.idempotency import difference, equal, work_of
from headgate.tasks.scheduling.submit_queue import Arrival, SubmitQueue
from headgate.tasks.scheduling.timers import Timers
from tests.unit.tasks.model import record

# -- timers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_an_agenda_is_a_list_sorted_by_time(seed: int, scale: float) -> None:
    for walk in range(int(3 + 50 * scale)):
        chance = random.Random(f"{seed} {walk}")
        timers, now = Timers(), 0.0
        planned: list[tuple[float, int, str, TaskRecord]] = []
        tasks: list[TaskRecord] = []
        most = 0
        for number in range(300):
            what = chance.random()
            if what < 0.5:
                task = chance.choice(tasks) if tasks and chance.random() < 0.3 else record(number)
                at, errand = now + chance.choice((0.0, 1.0, 2.5, 10.0)), chance.choice(("due", "expire"))
                tasks.append(task)
                planned.append((at, number, errand, task))
                timers.add(at, errand, task)  # type: ignore[arg-type]
            elif what < 0.7 and tasks:
                chance.choice(tasks).status = chance.choice(("running", "cancelled", "queued"))  # type: ignore[assignment]
            elif what < 0.9:
                now += chance.choice((0.0, 0.5, 3.0))
                due = sorted(entry for entry in planned if entry[0] <= now and entry[3].status == "queued")
                planned = [entry for entry in planned if entry[0] > now]
                assert list(timers.due(now)) == [(errand, task) for _, _, errand, task in due]
            # One whose task has left the queue may be forgotten at any time; here nobody comes back for it.
            planned = [entry for entry in planned if entry[3].status == "queued"]
            for task in tasks:
                if task.status != "queued":
                    task.status = "cancelled"
            tasks = [task for task in tasks if task.status == "queued"]
            assert timers.next_at() == min((entry[0] for entry in planned), default=None)
            for task in tasks[-3:]:
                mine = [at for at, _, errand, one in planned if one is task and errand == "due"]
                assert timers.due_at(task, -1.0) == min(mine, default=-1.0)
            most = max(most, len(planned))
            assert len(timers._heap) <= 2 * most + 66


def test_an_errand_that_ends_another_task_is_seen_at_once() -> None:
    """Doing the first may make the second needless."""
    timers = Timers()
    first, second = record(1), record(2)
    timers.add(1.0, "expire", first)
    timers.add(2.0, "expire", second)
    done = []
    for _, task in timers.due(5.0):
        done.append(task)
        second.status = "cancelled"
    assert done == [first]
    assert timers.next_at() is None


def test_tasks_that_leave_fill_no_agenda() -> None:
    timers = Timers()
    for number in range(10_000):
        task = record(number)
        timers.add(1e9 + number, "expire", task)
        task.status = "completed"
        assert len(timers._heap) <= 66


# -- submit queue ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_t30_the_door_is_first_come_first_served(seed: int) -> None:
    chance = random.Random(seed)
    submit_queue = SubmitQueue()
    line: list[Arrival] = []
    for number in range(500):
        if chance.random() < 0.5:
            key = chance.choice((None, "k0", "k1", "k2"))
            same = next((one for one in line if key is not None and one.task.terms.idempotency_key == key), None)
            assert key is None or submit_queue.with_key(key) is same
            if same is None:
                same = Arrival(record(number, terms=Terms(idempotency_key=key)))
                line.append(same)
                submit_queue.join(same)
            same.claimants.append(object())
        elif line:
            leaver = line[0] if chance.random() < 0.5 else chance.choice(line)
            line.remove(leaver)
            assert submit_queue.leave(leaver.task) is leaver
            assert submit_queue.leave(leaver.task) is None
        assert submit_queue.first() is (line[0] if line else None)
        assert list(submit_queue.line.values()) == line
        assert submit_queue.submitters == sum(len(arrival.claimants) for arrival in line)
    for arrival in line:
        submit_queue.leave(arrival.task)
    assert not submit_queue._by_key


def test_t30_who_never_stood_there_takes_nobodys_key() -> None:
    submit_queue = SubmitQueue()
    stands = Arrival(record(1, terms=Terms(idempotency_key="k")))
    submit_queue.join(stands)
    assert submit_queue.leave(record(2, terms=Terms(idempotency_key="k"))) is None
    assert submit_queue.with_key("k") is stands


# -- the same work -----------------------------------------------------------------------------------------------------


def plain(*args: Any, **keywords: Any) -> None: ...


def other(*args: Any, **keywords: Any) -> None: ...


class Worker:
    def run(self, *args: Any) -> None: ...

    def rest(self) -> None: ...

    def __call__(self, *args: Any) -> None: ...


class Array:
    """As numpy's: == gives an array, and an array is neither true nor false."""

    def __eq__(self, other: object) -> Any:
        return Array()

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Rude:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare me")

    __hash__ = None  # type: ignore[assignment]


ARRAY = Array()


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ((plain, (1, "a")), (plain, (1, "a")), True),
        ((plain, (1,)), (plain, (2,)), False),
        ((plain, (1,)), (plain, (1, 1)), False),
        ((plain, (1,)), (other, (1,)), False),
        ((plain, (1.0,)), (plain, (1,)), True),
        ((partial(plain, 1), (2,)), (plain, (1, 2)), True),
        ((partial(partial(plain, 1), 2), (3,)), (plain, (1, 2, 3)), True),
        ((partial(plain, a=1), ()), (partial(plain, a=1), ()), True),
        ((partial(plain, a=1), ()), (partial(plain, a=2), ()), False),
        ((partial(plain, a=1), ()), (plain, ()), False),
        ((partial(partial(plain, a=1), a=2), ()), (partial(plain, a=2), ()), True),
        ((partial(plain, a=1, b=2), ()), (partial(plain, b=2, a=1), ()), True),
        ((partial(plain, a=1), ()), (plain, ({"a": 1},)), False),
        ((partial(plain, 5, a=1), ()), (plain, (5, {"a": 1})), False),
        ((Worker().run, (1,)), (Worker().run, (1,)), True),  # what it is bound to is captured, and not compared
        ((Worker().run, ()), (Worker().rest, ()), False),
        ((Worker(), (1,)), (Worker(), (1,)), True),
        ((Worker(), (1,)), (Worker().run, (1,)), False),
        ((Worker, ()), (Worker, ()), True),
        ((plain, (ARRAY,)), (plain, (ARRAY,)), True),
        ((plain, (Array(),)), (plain, (Array(),)), False),
        ((plain, ([Array()],)), (plain, ([Array()],)), False),
        ((partial(plain, a=Array()), ()), (partial(plain, a=Array()), ()), False),
        ((plain, (Rude(),)), (plain, (Rude(),)), False),
        ((print, ("x",)), (print, ("x",)), True),
        (([].append, (1,)), ([].append, (1,)), True),
        ((str.upper, ("x",)), (str.upper, ("x",)), True),
        (("x".upper, ()), ("x".upper, ()), True),
        (((5).__add__, (1,)), ((5).__add__, (1,)), True),
    ],
)
def test_t14_same_function_and_equal_arguments(one: Any, two: Any, same: bool) -> None:
    (name, given), (other_name, other_given) = work_of(*one), work_of(*two)
    assert (difference(name, other_name, same_arguments=equal(given, other_given)) == "") is same
    assert (difference(other_name, name, same_arguments=equal(other_given, given)) == "") is same


SCRIPT = "the module of a script that is run directly is called __main__"


@pytest.mark.parametrize(
    ("old", "new", "same_arguments", "text"),
    [
        ("jobs:a", "jobs:a", True, ""),
        ("jobs:a", "jobs:a", None, ""),
        ("jobs:a", "jobs:a", False, "the arguments differ"),
        ("", "jobs:a", None, ""),
        ("", "jobs:a", False, "the function or its arguments differ"),
        ("jobs:a", "jobs:b", None, "the function differs: it was jobs:a and is now jobs:b"),
        ("jobs:a", "jobs:b", True, "the function differs: it was jobs:a and is now jobs:b, with the same arguments"),
        ("jobs:a", "jobs:b", False, "the function differs: it was jobs:a and is now jobs:b, with other arguments"),
        ("__main__:a", "jobs:a", None, f"the function differs: it was __main__:a and is now jobs:a; {SCRIPT}"),
    ],
)
def test_t19_a_conflict_says_what_differs(old: str, new: str, same_arguments: bool | None, text: str) -> None:
    assert difference(old, new, same_arguments=same_arguments) == text


@pytest.mark.parametrize(
    "fn", [plain, Worker().run, Worker(), Worker, print, str.upper, "x".upper, (5).__add__, lambda: 0]
)
def test_t14_everything_that_can_be_called_has_a_name(fn: Callable[..., Any]) -> None:
    name, _ = work_of(partial(fn), ())
    assert name == work_of(fn, ())[0]
    assert ":" in name


def test_t14_work_is_named_by_module_and_qualified_name() -> None:
    assert work_of(plain, (1,))[0] == f"{__name__}:plain"
    assert work_of(Worker().run, ())[0] == f"{__name__}:Worker.run"
    assert work_of(Worker(), ())[0] == f"{__name__}:Worker"


@pytest.mark.parametrize("window", ["while_active", "until_success", "forever", 1, 0.5])
def test_t14_a_window_is_a_name_or_seconds(window: Any) -> None:
    assert checked_window(window) == window


@pytest.mark.parametrize("window", ["for ever", "", 0, -1, True, None, float("inf"), float("nan"), [], "5"])
def test_t14_another_window_is_refused(window: Any) -> None:
    with pytest.raises(InvalidArgument, match="window must be one of"):
        checked_window(window)
