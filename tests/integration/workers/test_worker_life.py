"""W90: workers that are replaced at a limit while no call fails, setup and teardown, and workers that end when idle."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    InvalidArgument,
    InvalidType,
    LocalDiscovery,
    LocalWorker,
    NoActivePool,
    NoWorkersAvailable,
    StaticDiscovery,
    TaskPool,
    WorkerPool,
    WorkerStartFailed,
)
from headgate.testing import capture_events, no_leaks
from headgate.workers.processes import kept_workers, restarts
from tests.integration.workers import life_jobs
from tests.support.workers import jobs
from tests.support.workers.support import alive, all_ready, lines, pids, run, script, states, times, until

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(life_jobs.LOG, str(tmp_path / "life"))
    monkeypatch.setenv(life_jobs.FLAG, str(tmp_path / "flag"))
    monkeypatch.setattr(restarts, "FIRST", 0.01)  # what cannot start is tried again soon


@pytest.fixture
def life(tmp_path: Path) -> Callable[[], list[str]]:
    """What setups and teardowns noted, without the pids."""
    return lambda: [line.split()[0] for line in lines(tmp_path / "life")]


@pytest.fixture
def flag(tmp_path: Path) -> Callable[[str], None]:
    """Decide what `depends_on_the_flag` does from now on."""

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(tmp_path / "flag")

    return write


def replaced(events: Any) -> list[Any]:
    return [event for event in events if event.name == "worker_replaced"]


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spawn", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_w90_no_call_fails_and_each_runs_once_while_workers_are_replaced(spawn: int, log: str, scale: float) -> None:
    numbers = itertools.count()

    async def main() -> None:
        async with WorkerPool(spawn=spawn, max_tasks_per_worker=10) as pool:
            with capture_events("workers.lifecycle") as events:

                async def caller() -> None:
                    while len(replaced(events)) < max(4, 20 * scale):
                        await life_jobs.noted_call(log, next(numbers))

                await asyncio.gather(*(caller() for _ in range(100)))
            assert not {"worker_lost", "worker_not_started"} & set(events.names)
            assert all(event.planned and "max_tasks is 10" in event.reason for event in replaced(events))
            await all_ready(pool, spawn)

    with no_leaks(grace=3):
        run(main)
    assert times(log) == {str(number): 1 for number in range(next(numbers))}


def test_w90_no_task_of_a_pool_fails_while_its_workers_are_replaced(log: str, scale: float) -> None:
    numbers = itertools.count()

    async def main() -> None:
        workers = WorkerPool(spawn=2, max_tasks_per_worker=10)
        async with workers, TaskPool(max_concurrent=50, workers=workers) as pool:
            with capture_events("workers.lifecycle") as events:

                async def caller() -> None:
                    while len(replaced(events)) < max(4, 20 * scale):
                        handles = [await pool.submit(life_jobs.noted_call, log, next(numbers)) for _ in range(3)]
                        for handle in handles:
                            await handle

                await asyncio.gather(*(caller() for _ in range(100)))
            assert not {"worker_lost", "worker_not_started"} & set(events.names)

    run(main)
    assert times(log) == {str(number): 1 for number in range(next(numbers))}


def test_w90_calls_count_however_they_end_and_a_generator_once() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_tasks_per_worker=4) as pool:
            [old] = pids(pool)
            with capture_events("workers") as events:
                with pytest.raises(ValueError, match="on purpose"):
                    await life_jobs.fails()
                assert [number async for number, _ in life_jobs.numbers(20)] == list(range(20))
                call = asyncio.create_task(jobs.slow(100))
                await until(lambda: pool.workers()[0].in_flight)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                assert await jobs.pid() == old
                await until(lambda: replaced(events))
            assert [event.reason for event in replaced(events)] == ["it has executed 4 tasks, and max_tasks is 4"]
            assert await all_ready(pool, 1) != [old]

    run(main)


def test_w90_what_runs_on_a_worker_that_is_replaced_is_finished_there(tmp_path: Path) -> None:
    """Also where the workers are told to cut calls short when they are stopped."""

    def worker(*tags: str, credentials: Any = None) -> LocalWorker:
        return LocalWorker(*tags, credentials=credentials, grace=0.01)

    async def main() -> None:
        async with WorkerPool(spawn=1, max_tasks_per_worker=1, worker=worker) as pool:
            [old] = pids(pool)
            long = asyncio.create_task(jobs.sleep_and_pid(0.7))
            stream = life_jobs.numbers(3)
            assert await anext(stream) == (0, old)
            with capture_events("workers") as events:
                assert await jobs.pid() == old
                await until(lambda: replaced(events))
                while await jobs.pid() == old:  # the event comes a moment before calls go elsewhere
                    pass
                assert await long == old
                assert alive(old), "somebody may still advance the generator"
                assert [item async for item in stream] == [(1, old), (2, old)]
                await until(lambda: not alive(old))
            assert not [event for event in events if event.name == "worker_lost"]

    run(main)


def test_w90_nested_calls_find_the_workers_that_replace_others(log: str) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, max_tasks_per_worker=5) as pool:
            with capture_events("workers") as events:
                await asyncio.gather(*(life_jobs.nested_calls(log, 10 * number, 10) for number in range(30)))
                await until(lambda: replaced(events))
            assert "worker_lost" not in events.names
            await all_ready(pool, 2)

    run(main)
    assert times(log) == {str(number): 1 for number in range(300)}


def test_w90_a_broadcast_counts_and_reaches_each_worker_once() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, max_tasks_per_worker=1) as pool:
            before = pids(pool)
            found = await pool.broadcast(jobs.pid)
            assert sorted(found.values()) == sorted(before)
            await until(lambda: not set(before) & set(pids(pool)))
            assert len(await pool.broadcast(jobs.pid)) >= 2

    run(main)


def test_w90_the_workers_of_others_are_replaced_without_a_failed_call(runtime: Path, log: str) -> None:
    """A pool that found the workers of another pool through a discovery notices nothing."""
    numbers = itertools.count()

    async def main() -> None:
        async with WorkerPool(spawn=2, discovery=LocalDiscovery("life"), lease=0, max_tasks_per_worker=10):
            async with WorkerPool(discovery=LocalDiscovery("life")):
                with capture_events("workers.lifecycle") as events:

                    async def caller() -> None:
                        while len(replaced(events)) < 4:
                            await life_jobs.noted_call(log, next(numbers))

                    await asyncio.gather(*(caller() for _ in range(20)))

    run(main)
    assert times(log) == {str(number): 1 for number in range(next(numbers))}


def test_w90_a_worker_with_too_much_memory_is_replaced() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, max_memory_per_worker="300MB") as pool:
            old = await life_jobs.hoards(50)
            assert await life_jobs.hoards(0) == old
            with capture_events("workers") as events:
                assert await life_jobs.hoards(300) == old
                while await jobs.sleep_and_pid(0.01) == old:
                    pass
            [event] = replaced(events)
            assert "MB of memory, and max_memory is 300 MB" in event.reason
            await until(lambda: not alive(old))
            await all_ready(pool, 1)

    run(main)


def test_w90_a_memory_limit_that_no_worker_can_keep_is_a_failed_start() -> None:
    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match="before its first call, and max_memory_per_worker is 5 MB"):
            async with WorkerPool(spawn=1, max_memory_per_worker=5 * 2**20):
                pass

    with no_leaks(grace=3):
        run(main)


def test_w90_a_worker_works_until_its_replacement_is_ready(
    flag: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`workers()` says why it is replaced. If the replacement cannot be started, it stays."""
    monkeypatch.setattr(restarts, "LONGEST", 0.2)

    async def main() -> None:
        async with WorkerPool(spawn=1, max_tasks_per_worker=2, setup=life_jobs.depends_on_the_flag) as pool:
            [old] = pids(pool)
            flag("fail")
            with capture_events("workers") as events:
                for _ in range(10):
                    assert await jobs.pid() == old
                await until(lambda: sum(event.name == "worker_not_started" for event in events) >= 7)
                assert await jobs.pid() == old
                flag("wait")
                await until(lambda: "starting" in states(pool).values())
                for _ in range(10):
                    assert await jobs.pid() == old
                view = next(view for view in pool.workers() if view.pid == old)
                assert view.state == "ready"
                assert "max_tasks is 2" in view.replaced_because
                assert "is replaced: it has executed" in repr(view)
                assert not replaced(events)
                flag("")
                await until(lambda: replaced(events))
            while await jobs.pid() == old:  # noqa: ASYNC110 - it may take calls until the client has heard of the other
                await asyncio.sleep(0.01)

    run(main)


def test_w90_a_pool_is_resized_while_workers_are_replaced(flag: Callable[[str], None]) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, max_tasks_per_worker=1, setup=life_jobs.depends_on_the_flag) as pool:
            flag("wait")
            await asyncio.gather(*(jobs.pid() for _ in range(4)))
            await until(lambda: sum(bool(view.replaced_because) for view in pool.workers()) == 2)
            await until(lambda: "starting" in states(pool).values())
            assert len(pool.workers()) == 3, "one more than wanted, not two"
            shrinking = asyncio.create_task(pool.resize(1))
            await until(lambda: len(pids(pool)) == 1)
            flag("")
            await shrinking
            await until(lambda: len(pool.workers()) == 1 and not pool.workers()[0].replaced_because)
            await pool.resize(3)
            await all_ready(pool, 3)

    with no_leaks(grace=3):
        run(main)


def test_w90_a_pool_is_left_while_workers_are_replaced(flag: Callable[[str], None]) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2, max_tasks_per_worker=1, setup=life_jobs.depends_on_the_flag) as pool:
            flag("wait")
            await asyncio.gather(*(jobs.pid() for _ in range(4)))
            await until(lambda: "starting" in states(pool).values())

    with no_leaks(grace=3):
        run(main)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tasks_per_worker": 0}, "max_tasks_per_worker must be >= 1, got 0"),
        ({"max_tasks_per_worker": -3}, "max_tasks_per_worker must be >= 1"),
        ({"max_tasks_per_worker": 1.5}, "max_tasks_per_worker must be a whole number"),
        ({"max_tasks_per_worker": True}, "max_tasks_per_worker must be a whole number"),
        ({"max_memory_per_worker": 0}, "max_memory_per_worker must be a number of bytes above 0"),
        ({"max_memory_per_worker": -1}, "max_memory_per_worker must be a number of bytes above 0"),
        ({"max_memory_per_worker": "much"}, "text such as .500MB., got 'much'"),
        ({"max_memory_per_worker": "-5MB"}, "text such as .500MB."),
        ({"max_memory_per_worker": ""}, "text such as .500MB."),
        ({"max_memory_per_worker": float("nan")}, "max_memory_per_worker must be"),
        ({"max_memory_per_worker": True}, "max_memory_per_worker must be a number of bytes or a text"),
        ({"max_memory_per_worker": [1]}, "max_memory_per_worker must be a number of bytes or a text"),
        ({"setup": 3}, "setup must be a function without parameters or a context manager, got int"),
        ({"setup": life_jobs.manager()}, "setup=function, not setup=function()"),
        ({"setup": life_jobs.plain_manager()}, "setup=function, not setup=function()"),
        ({"setup": jobs.add}, "setup is a routine"),
        ({"setup": life_jobs.forgotten}, "setup is a generator function"),
        ({"teardown": "close"}, "teardown must be a function without parameters, got str"),
        ({"teardown": life_jobs.Opened()}, "teardown must be a function without parameters, got Opened"),
        ({"teardown": jobs.add}, "teardown is a routine"),
        ({"setups": life_jobs.plain}, "setup"),
    ],
)
def test_w90_bad_arguments_are_refused_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidArgument, InvalidType, TypeError), match=words):
        WorkerPool(spawn=1, **options)


def test_w90_a_coroutine_is_no_setup() -> None:
    with pytest.raises(InvalidType, match="got what a function returned: a coroutine"):
        WorkerPool(spawn=1, setup=life_jobs.coroutine())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tasks_per_worker": 5},
        {"max_memory_per_worker": "1GB"},
        {"setup": life_jobs.plain},
        {"teardown": life_jobs.teardown},
    ],
)
def test_w90_a_pool_that_starts_no_workers_refuses_what_has_no_effect(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(InvalidArgument, match=f"{name} has no effect in a pool that starts no workers"):
        WorkerPool(discovery=StaticDiscovery(["127.0.0.1:1"]), **options)


def test_w90_setup_that_cannot_be_sent_is_refused_when_the_pool_is_entered() -> None:
    async def main() -> None:
        lock = threading.Lock()
        with pytest.raises(InvalidType, match="setup or teardown cannot be sent to workers") as caught:
            async with WorkerPool(spawn=1, setup=lambda: lock):
                pass
        assert "inside of setup" in str(caught.value)

    with no_leaks(grace=3):
        run(main)


# -- setup and teardown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "result", "closes"),
    [
        (life_jobs.plain, "plain", False),
        (life_jobs.coroutine, "coroutine", False),
        (life_jobs.manager, "manager", True),
        (life_jobs.plain_manager, "plain_manager", True),
        (life_jobs.Opened, "Opened", True),
        (life_jobs.Opened("instance"), "instance", True),
        (life_jobs.makes_a_manager, "manager", True),
        (life_jobs.makes_an_object, life_jobs.Opened("made"), False),
        (life_jobs.named, "named", True),
    ],
)
def test_w90_setup_runs_once_before_the_first_call_and_its_result_is_reachable(
    setup: Any, result: object, closes: bool, life: Callable[[], list[str]]
) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, setup=setup, teardown=life_jobs.async_teardown):
            assert life() == ["setup"]
            assert await asyncio.gather(*(life_jobs.what_setup_made() for _ in range(5))) == [result] * 5
            assert life() == ["setup"]

    with no_leaks(grace=3):
        run(main)
    assert life() == ["setup", "teardown", "closed"] if closes else ["setup", "teardown"]


@pytest.mark.parametrize("setup", [life_jobs.makes_a_lock, life_jobs.makes_a_contended_lock])
def test_w90_what_setup_makes_can_be_used_on_the_loop_of_routines(setup: Any) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, setup=setup):
            assert await life_jobs.uses_the_lock()

    run(main)


def test_w90_variables_that_setup_sets_are_seen_by_every_call_and_by_no_caller() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, setup=life_jobs.sets_variables):
            for _ in range(2):
                assert await life_jobs.variables() == (["loaded"], "of setup", "unset")
            assert life_jobs.TRAVELS.get() == "unset"
            life_jobs.TRAVELS.set("of the caller")
            assert await life_jobs.variables() == (["loaded"], "of setup", "of the caller")

    run(main)


def test_w90_without_setup_there_is_no_result() -> None:
    async def main() -> None:
        with pytest.raises(NoActivePool, match="ran no setup"):
            headgate.setup_result()
        async with WorkerPool(spawn=1):
            with pytest.raises(NoActivePool, match="ran no setup"):
                await life_jobs.what_setup_made()
        async with WorkerPool(spawn=1, teardown=life_jobs.teardown):
            assert await life_jobs.what_setup_made() is None

    run(main)


def test_w90_a_routine_that_cancels_every_task_does_not_end_what_setup_opened(life: Callable[[], list[str]]) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, setup=life_jobs.manager):
            await life_jobs.cancels_every_task()
            assert await life_jobs.what_setup_made() == "manager"
            assert life() == ["setup"]

    run(main)
    assert life() == ["setup", "closed"]


def test_w90_functions_of_a_script_are_setup_and_teardown(tmp_path: Path) -> None:
    said = script(
        """
import asyncio, os
from contextlib import asynccontextmanager
from headgate import WorkerPool, routine, setup_result

class Model:
    def __init__(self, factor):
        self.factor = factor
    def predict(self, x):
        return self.factor * x

FACTOR = 3

@asynccontextmanager
async def load():
    yield Model(FACTOR)

def bye():
    print(f"bye {setup_result().factor}\\n", end="", flush=True)  # one write: two workers share this pipe

@routine
async def predict(x):
    return setup_result().predict(x)

async def main():
    async with WorkerPool(spawn=2, setup=load, teardown=bye) as pool:
        while [view.state for view in pool.workers()] != ["ready"] * 2:  # one that is not up has nothing to end
            await asyncio.sleep(0.005)
        print(await asyncio.gather(*(predict(n) for n in range(4))), flush=True)

if __name__ == "__main__":
    asyncio.run(main())
""",
        tmp_path,
    )
    assert said.stdout.splitlines() == ["[0, 3, 6, 9]", "bye 3", "bye 3"], said.stderr
    assert said.stderr == ""


@pytest.mark.parametrize(
    ("setup", "cause", "words"),
    [
        (life_jobs.calling(life_jobs.raises, ValueError("no model")), ValueError, "setup raised ValueError: no model"),
        pytest.param(
            life_jobs.calling(life_jobs.raises, StopIteration()),
            RuntimeError,
            "coroutine raised StopIteration",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            life_jobs.calling(life_jobs.raises, KeyboardInterrupt()),
            KeyboardInterrupt,
            "setup raised KeyboardInterrupt",
            marks=pytest.mark.soak,
        ),
        (life_jobs.exits, SystemExit, r"setup called sys.exit\(3\)"),
        (life_jobs.cancels_itself, asyncio.CancelledError, "setup raised CancelledError"),
        (life_jobs.raises_what_cannot_travel, headgate.RemoteError, "setup raised ValueError: unpicklable"),
        (life_jobs.leaves_a_thread, ValueError, "setup raised ValueError: and a thread is left"),
        pytest.param(
            lambda needed: None,
            TypeError,
            "setup raised TypeError: .* missing 1 required positional argument",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_w90_a_setup_that_fails_is_a_failed_start_with_its_cause(
    setup: Any, cause: type[BaseException], words: str, life: Callable[[], list[str]]
) -> None:
    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match=words) as caught:
            async with WorkerPool(spawn=2, setup=setup, teardown=life_jobs.teardown):
                pass
        assert isinstance(caught.value.__cause__, cause)
        assert "Traceback" in "".join(caught.value.__notes__)

    with no_leaks(grace=3):
        run(main)
    assert life() == [], "without setup there is no teardown"


@pytest.mark.soak
def test_w90_a_setup_that_fails_slowly_is_told_when_the_time_is_over(flag: Callable[[str], None]) -> None:
    """Also if it did not fail five times in half a minute, after which a pool is given up."""
    flag("fail")

    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match="no worker was ready within quorum_timeout=3 s") as caught:
            async with WorkerPool(spawn=1, setup=life_jobs.depends_on_the_flag, quorum_timeout=3):
                pass
        assert isinstance(caught.value.__cause__, ConnectionError)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restarts, "DEATHS", 10**6)
        run(main)


def test_w90_a_setup_that_fails_now_and_then_is_tried_again(flag: Callable[[str], None]) -> None:
    flag("fail")

    async def main() -> None:
        with capture_events("workers") as events:
            pool = WorkerPool(spawn=1, setup=life_jobs.depends_on_the_flag)
            entering = asyncio.create_task(pool.__aenter__())
            await until(lambda: "worker_not_started" in events.names)
            flag("")
            await entering
            await pool.__aexit__(None, None, None)

    run(main)


@pytest.mark.parametrize("how", ["hang", pytest.param("block", marks=pytest.mark.soak)])
def test_w90_a_setup_that_hangs_is_ended_when_its_time_is_over(how: str, flag: Callable[[str], None]) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1, setup=life_jobs.depends_on_the_flag, quorum_timeout=3) as pool:
            [old] = pids(pool)
            flag(how)
            with capture_events("workers") as events:
                os.kill(old, signal.SIGKILL)
                await until(lambda: "starting" in states(pool).values())
                [hangs] = states(pool)
                await until(lambda: "worker_not_started" in events.names)
                flag("")
                assert not alive(hangs)
            [event] = [event for event in events if event.name == "worker_not_started"]
            assert "setup did not end within 3 s, the quorum_timeout of the pool" in event.reason
            assert await life_jobs.what_setup_made() == "there"

    run(main)


@pytest.mark.parametrize("how", ["hang", "block"])
def test_w90_a_pool_whose_setup_hangs_is_not_entered(how: str, flag: Callable[[str], None]) -> None:
    flag(how)

    async def main() -> None:
        with pytest.raises(NoWorkersAvailable, match="setup runs before a worker is ready"):
            async with WorkerPool(spawn=1, setup=life_jobs.depends_on_the_flag, quorum_timeout=0.5):
                pass

    with no_leaks(grace=3):
        run(main)


@pytest.mark.parametrize("teardown", [life_jobs.failing_teardown, life_jobs.exiting_teardown])
def test_w90_a_teardown_that_fails_is_logged_and_the_rest_is_closed(
    teardown: Any, life: Callable[[], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        with capture_events("workers") as events:
            async with WorkerPool(spawn=1, setup=life_jobs.manager, teardown=teardown):
                await jobs.pid()
        assert events.names[-1] == "worker_stopped"

    with no_leaks(grace=3):
        run(main)
    assert life() == ["setup", "teardown", "closed"]
    assert "the teardown of a worker failed" in capfd.readouterr().err


@pytest.mark.parametrize("teardown", [life_jobs.hanging_teardown, life_jobs.blocking_teardown])
def test_w90_a_teardown_that_hangs_is_not_waited_for_for_ever(
    teardown: Any, life: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_workers, "TEARDOWN_SECONDS", 0.1)
    monkeypatch.setattr(kept_workers, "_LAST", 0.3)

    async def main() -> None:
        async with WorkerPool(spawn=1, teardown=teardown):
            await jobs.pid()

    with no_leaks(grace=3):
        run(main)
    assert life() == ["teardown"]


def test_w90_teardown_runs_whenever_a_worker_stops_and_not_when_it_is_killed(life: Callable[[], list[str]]) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"setup": life_jobs.plain, "teardown": life_jobs.teardown}
        async with WorkerPool(spawn=2, max_tasks_per_worker=2, **options) as pool:
            await pool.resize(1)
            assert life().count("teardown") == 1, "one that was too many"
            [pid] = pids(pool)
            for _ in range(2):
                await jobs.pid()
            await until(lambda: life().count("teardown") == 2)  # one that was replaced
            await until(lambda: not alive(pid))
            [pid] = await all_ready(pool, 1)
            os.kill(pid, signal.SIGTERM)
            await until(lambda: life().count("teardown") == 3)  # one that was told to stop
            await until(lambda: not alive(pid))
            [pid] = await all_ready(pool, 1)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pid not in states(pool))
            await all_ready(pool, 1)
            assert life().count("teardown") == 3
        assert life().count("teardown") == 4
        assert life().count("setup") == 5

    run(main)


def test_w90_workers_of_a_factory_run_setup_too(life: Callable[[], list[str]]) -> None:
    def worker(*tags: str, credentials: Any = None) -> LocalWorker:
        return LocalWorker(*tags, credentials=credentials, backpressure=lambda context: False)

    async def main() -> None:
        async with WorkerPool(spawn=1, worker=worker, setup=life_jobs.plain):
            assert await life_jobs.what_setup_made() == "plain"

    run(main)
    assert life() == ["setup"]


def test_w90_only_the_workers_that_a_pool_starts_run_its_setup(runtime: Path) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"spawn": 1, "setup": life_jobs.plain, "quorum": 2, "lazy": False}
        async with WorkerPool(spawn=1, discovery=LocalDiscovery("life"), lease=0):
            async with WorkerPool(discovery=LocalDiscovery("life"), **options):
                calls = [life_jobs.what_setup_made() for _ in range(2)]
                found = sorted(map(str, await asyncio.gather(*calls, return_exceptions=True)))
                assert found[0] == "plain"
                assert found[1].startswith("setup_result() was called in a process that ran no setup")

    run(main)


# -- workers that end when they are idle ------------------------------------------------------------------------------


def test_w90_a_local_worker_ends_when_it_had_no_call_for_so_long() -> None:
    async def main() -> None:
        worker = LocalWorker(idle_timeout=0.2)
        for _ in range(2):  # it can be started again
            await worker.start()
            await until(lambda: worker._exited is not None and worker._exited.done())
            assert not alive(worker.pid)
        await worker.stop()

    with no_leaks(grace=3):
        run(main)


def test_w90_a_local_worker_of_a_pool_cannot_end_when_idle() -> None:
    def worker(*tags: str, credentials: Any = None) -> LocalWorker:
        return LocalWorker(*tags, credentials=credentials, idle_timeout=1)

    async def main() -> None:
        with pytest.raises(InvalidArgument, match="cannot have idle_timeout="):
            async with WorkerPool(spawn=1, worker=worker):
                pass

    with no_leaks(grace=3):
        run(main)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), "1", True])
def test_w90_idle_timeout_is_a_number_of_seconds_above_0(bad: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="idle_timeout must be"):
        LocalWorker(idle_timeout=bad)
