"""What attackers found: each test failed once."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import PoolClosed, WorkerPool, WorkerStartFailed, routine
from headgate.workers.processes.keeper_client import NEW, PREFIX
from tests.integration.workers import attack_jobs
from tests.support.workers import jobs
from tests.support.workers.support import PATIENCE, ROOT, Shared, alive, keeper_client_of, run, until


def script(tmp_path: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of which all is in ``__main__``."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        check=False,
    )


# -- starting ---------------------------------------------------------------------------------------------------------


def test_w26_a_start_that_fails_leaves_the_current_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headgate.workers.processes.keeper_client._bases", lambda: [str(tmp_path / "nowhere")])

    async def main() -> None:
        with pytest.raises(WorkerStartFailed, match="no folder for the sockets"):
            async with WorkerPool(spawn=1):
                pass

    run(main)
    assert (tmp_path / "precious").read_text() == "mine"


def test_w33_pools_that_start_at_once_do_not_sweep_each_other(runtime: Path, scale: float) -> None:
    async def one() -> None:
        async with WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    async def main() -> None:
        for _ in range(max(1, int(8 * scale))):
            await asyncio.gather(*(one() for _ in range(4)))

    run(main, 60)
    assert [name for name in os.listdir(runtime) if name.startswith((NEW, PREFIX))] == []


def test_w52_many_open_descriptors_are_no_hindrance() -> None:
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

    async def main() -> None:
        async with WorkerPool(spawn=1):
            assert await jobs.add(1, 2) == 3

    try:
        run(main)
    finally:
        for fd in taken:
            os.close(fd)


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_w35_a_busy_loop_of_another_thread_does_not_hold_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.workers.client.other_loops.LAST", 0.2)
    went = threading.Event()

    async def elsewhere() -> None:
        await jobs.pid()
        went.set()
        time.sleep(1)  # noqa: ASYNC251 - held on purpose

    async def main() -> None:
        async with WorkerPool(spawn=1):
            context = contextvars.copy_context()
            thread = threading.Thread(target=lambda: context.run(asyncio.run, elsewhere()))
            thread.start()
            await until(went.is_set)
        assert thread.is_alive()
        await until(lambda: not thread.is_alive())

    run(main)


def test_w35_leaving_during_a_resize_is_not_held_by_what_leaves() -> None:
    async def main() -> None:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            async with WorkerPool(spawn=2) as pool:
                calls = [asyncio.create_task(jobs.slow(60)) for _ in range(2)]
                await until(lambda: sum(view.in_flight for view in pool.workers()) == 2)
                resizing = asyncio.create_task(pool.resize(1))
                await until(lambda: len(pool.workers()) == 1)
                began = time.monotonic()
                raise KeyboardInterrupt
        assert time.monotonic() - began < 20
        for call in calls:
            with pytest.raises(PoolClosed):
                await call
        with pytest.raises(PoolClosed):
            await resizing

    run(main)


def test_w26_resizes_at_once_take_turns() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=3) as pool:
            await asyncio.gather(pool.resize(1), pool.resize(1), pool.resize(2))
            assert len(pool.workers()) == 2
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w25_pools_may_be_left_in_another_order() -> None:
    async def main() -> None:
        outer, inner = WorkerPool(spawn=1), WorkerPool(spawn=1)
        await outer.__aenter__()
        await inner.__aenter__()
        await outer.__aexit__(None, None, None)
        [view] = inner.workers()
        assert await jobs.pid() == view.pid
        await inner.__aexit__(None, None, None)
        with pytest.raises(PoolClosed):
            await jobs.pid()

    run(main)


def test_w24_a_worker_that_stops_is_waited_for_to_be_replaced() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            done = 0

            async def caller() -> None:
                nonlocal done
                for _ in range(30):
                    await jobs.slow(0.02)
                    done += 1

            callers = [asyncio.create_task(caller()) for _ in range(5)]
            await until(lambda: done > 20)
            os.kill(pool.workers()[0].pid, signal.SIGTERM)
            await asyncio.gather(*callers)

    run(main)


def test_w22_a_pool_that_cannot_connect_in_time_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.workers.processes.kept_workers._LAST", 0.3)
    stopped: list[int] = []

    def stop(event: Any) -> None:
        if event.name == "worker_ready":
            os.kill(event.pid, signal.SIGSTOP)
            stopped.append(event.pid)

    async def main() -> None:
        pool = WorkerPool(spawn=1, lazy=False)
        unsubscribe = headgate.subscribe(stop, "workers.lifecycle")
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.8), pool:
                    pass
        finally:
            unsubscribe()
        await until(lambda: not any(map(alive, stopped)))
        with pytest.raises(headgate.NoActivePool):
            await jobs.pid()

    run(main)


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a subreaper")
def test_w33_a_daemon_ends_with_its_own_worker_and_not_with_another() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            daemons = {}
            while len(daemons) < 2:
                daemons[await jobs.pid()] = 0
            for _ in daemons:
                before = {view.pid for view in pool.workers()}
                daemon = await attack_jobs.leave_a_daemon()
                owner = next(pid for pid in before if daemon in below(pid))
                daemons[owner] = daemon
            assert all(daemons.values())
            first, second = daemons
            os.kill(first, signal.SIGKILL)
            await until(lambda: not alive(daemons[first]))
            assert alive(daemons[second])
        await until(lambda: not alive(daemons[second]))

    run(main)


def below(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        one = todo.pop()
        for thread in os.listdir(f"/proc/{one}/task"):
            try:
                children = {int(child) for child in Path(f"/proc/{one}/task/{thread}/children").read_text().split()}
            except FileNotFoundError:  # it has just ended
                continue
            todo += children - found
            found |= children
    return found


def test_w34_a_client_that_was_stopped_finds_its_calls_again(scale: float) -> None:
    program = """
        import asyncio, os, sys
        import headgate

        @headgate.routine
        async def nap(seconds):
            await asyncio.sleep(seconds)
            return seconds

        async def main():
            async with headgate.WorkerPool(spawn=1):
                call = asyncio.create_task(nap(2))
                await asyncio.sleep(0.3)
                print("ready", flush=True)
                print(await call, flush=True)

        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1 + 8 * scale)  # at full length longer than any ping may take
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "2\n"
        assert process.wait(PATIENCE) == 0


# -- calls ------------------------------------------------------------------------------------------------------------


def test_w03_a_class_of_the_program_is_never_written_over(tmp_path: Path) -> None:
    ran = script(
        tmp_path,
        """
        import asyncio
        import headgate

        class Job:
            created = 0
            def __init__(self):
                Job.created += 1
            def see(self):
                return flag

        class Failed(Exception):
            count = 0

        flag = 1

        @headgate.routine
        async def echo(x):
            return x

        @headgate.routine
        async def fail():
            Failed.count += 1
            raise Failed("no")

        @headgate.routine
        async def write(value, seconds):
            Job.created = value
            await asyncio.sleep(seconds)
            return Job.created

        @headgate.routine
        async def add_new():
            had = getattr(Job, "extra", None)
            Job.extra = 5
            return had

        async def main():
            global flag
            async with headgate.WorkerPool(spawn=1):
                job = Job()
                call = asyncio.create_task(echo(job))
                await asyncio.sleep(0)
                Job()
                see = Job.see
                back = await call
                print(type(back) is Job, Job.created, Job.see is see)
                flag = 99
                print(Job().see())
                Failed.count = 7
                try:
                    await fail()
                except Failed as error:
                    print(type(error) is Failed, Failed.count)
                print(await asyncio.gather(write(1, 0.2), write(2, 0.05)))
                print(await add_new(), await add_new())

        asyncio.run(main())
        """,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["True 2 True", "99", "True 7", "[1, 2]", "None None"]


def test_w34_a_burst_of_short_calls_is_begun_bit_by_bit(shared: Shared, scale: float) -> None:
    """None is told that it ran too long, and the first is answered before the last has begun."""

    async def main() -> None:
        heard: list[float] = []

        async def one() -> None:
            await attack_jobs.compute_a_little()
            heard.append(time.monotonic())

        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(300 if scale >= 1 else 150)))
        assert heard[-1] - heard[0] > (heard[-1] - began) / 20, "answers came while others ran"
        assert {view.state for view in shared.pool.workers()} == {"ready"}

    shared(main)


def test_w32_a_hook_counts_those_it_let_in() -> None:
    def five_at_most(context: headgate.BackpressureContext) -> bool:
        return context.active_task_count >= 5

    async def main() -> None:
        made = lambda *tags, credentials=None: headgate.LocalWorker(*tags, backpressure=five_at_most)  # noqa: E731
        async with WorkerPool(spawn=1, worker=made):
            calls = [asyncio.create_task(jobs.slow(0.5, number)) for number in range(10)]
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert ended[:5] == [0, 1, 2, 3, 4]
            assert all(isinstance(one, headgate.NoWorkersAvailable) for one in ended[5:])

    run(main)


def test_w32_a_hook_that_raises_anything_refuses(shared: Shared) -> None:
    def leaves(context: headgate.BackpressureContext) -> bool:
        raise SystemExit(3)

    async def main() -> None:
        made = lambda *tags, credentials=None: headgate.LocalWorker(*tags, backpressure=leaves)  # noqa: E731
        async with WorkerPool(spawn=1, worker=made):
            with pytest.raises(headgate.NoWorkersAvailable, match="SystemExit"):
                await jobs.add(1, 2)

    run(main)


def test_w42_calls_that_wait_for_room_do_not_wake_each_other_again_and_again(shared: Shared) -> None:
    async def main() -> None:
        payload = b"x" * 20_000
        before = time.process_time()
        found = await asyncio.gather(*(jobs.echo(payload) for _ in range(3000)))
        assert all(one == payload for one in found)
        assert time.process_time() - before < 10, "it grew with the square of their number"

    shared(main)


def test_w04_a_function_run_here_may_raise_stop_iteration() -> None:
    @routine
    def stops() -> None:
        raise StopIteration

    async def main() -> None:
        with headgate.do_dispatch(False), pytest.raises(RuntimeError, match="StopIteration"):
            await stops()

    run(main)


def test_w03_private_methods_and_properties_travel_by_name(shared: Shared) -> None:
    async def main() -> None:
        assert os.getpid() not in await attack_jobs.Held().ask()
        form = attack_jobs.Held._Held__private.__headgate_routine__.portable._form  # type: ignore[attr-defined]
        assert form.module and not form.value  # noqa: PT018

    shared(main)


def test_w40_a_balancer_with_a_mind_of_its_own_is_asked() -> None:
    class Stubborn(headgate.RoundRobinLoadBalancer):
        def order(self, task: Any, workers: Any) -> Any:
            return sorted(workers, key=lambda worker: worker.pid)[:1]

        def report(self, worker: Any, report: Any) -> None:
            raise ValueError("no reports, please")

    async def main() -> None:
        async with WorkerPool(spawn=2, loadbalancer=Stubborn()) as pool:
            assert {await jobs.pid() for _ in range(4)} == {min(view.pid for view in pool.workers())}

    run(main)


def test_w23_a_worker_thread_calls_others_quietly(tmp_path: Path) -> None:
    ran = script(
        tmp_path,
        """
        import asyncio
        import headgate

        @headgate.routine
        async def one():
            return 1

        @headgate.routine(thread=True)
        async def two():
            return await one() + await one()

        async def main():
            async with headgate.WorkerPool(spawn=2):
                print(sum(await asyncio.gather(*(two() for _ in range(20)))))

        asyncio.run(main())
        """,
    )
    assert (ran.stdout, ran.stderr) == ("40\n", "")


def test_w52_loops_of_threads_end_quietly(tmp_path: Path) -> None:
    ran = script(
        tmp_path,
        """
        import asyncio, contextvars, threading
        import headgate

        @headgate.routine
        async def one():
            return 1

        async def some():
            for _ in range(5):
                await one()

        async def main():
            async with headgate.WorkerPool(spawn=2):
                for _ in range(3):
                    threads = []
                    for _ in range(4):
                        context = contextvars.copy_context()
                        threads.append(threading.Thread(target=context.run, args=(asyncio.run, some())))
                    for thread in threads:
                        thread.start()
                    while any(thread.is_alive() for thread in threads):
                        await asyncio.sleep(0.01)
                print(await one())

        asyncio.run(main())
        """,
    )
    assert ran.stdout == "1\n"
    # On a busy machine gRPC's poller may be called once more after the loop of a thread was closed; asyncio says so.
    assert ran.stderr == "" or "PollerCompletionQueue._handle_events" in ran.stderr


def test_w44_a_folder_whose_name_is_no_text_is_no_hindrance(
    tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"odd\xff")
    os.mkdir(folder)
    with open(os.path.join(folder, b"odd_module_here.py"), "w") as file:
        file.write("import headgate\n@headgate.routine\nasync def f(): return 5\n")
    monkeypatch.syspath_prepend(os.fsdecode(folder))

    async def main() -> None:
        import odd_module_here  # type: ignore[import-not-found]

        async with WorkerPool(spawn=1):
            assert await odd_module_here.f() == 5

    try:
        run(main)
    finally:
        sys.modules.pop("odd_module_here", None)


def test_w52_whoever_cancels_all_tasks_finds_the_workers_again() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1):
            await jobs.pid()
            me = asyncio.current_task()
            for task in asyncio.all_tasks():
                if task is not me and "Connection" in repr(task.get_coro()):
                    task.cancel()
            await asyncio.sleep(0.05)
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w33_a_stopped_keeper_does_not_hold_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.workers.processes.keeper_client._PATIENCE", 0.3)
    monkeypatch.setattr("headgate.workers.processes.kept_workers._LAST", 0.3)

    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            keeper = keeper_client_of(pool).pid
            os.kill(keeper, signal.SIGSTOP)
        assert not alive(keeper)

    run(main)


def test_w08_a_timeout_counts_from_the_beginning_of_a_run_in_a_thread(shared: Shared) -> None:
    """So many plain functions at once that the last begin long after they were called."""

    async def main() -> None:
        found = await asyncio.gather(*(attack_jobs.rest_a_little() for _ in range(700)), return_exceptions=True)
        assert set(found) == {1}

    shared(main, 60)


def test_w08_routines_in_threads_that_wait_for_others_leave_their_place(shared: Shared) -> None:
    async def main() -> None:
        assert await asyncio.gather(*(attack_jobs.deep(8) for _ in range(12))) == [8] * 12  # more than there are places

    shared(main, 60)


def test_w07_a_pool_of_another_context_is_told_of(shared: Shared) -> None:
    async def main() -> None:
        with pytest.raises(headgate.NoActivePool, match="not in this context"):
            await asyncio.create_task(jobs.add(1, 2), context=contextvars.Context())

    shared(main)


def test_w42_who_goes_away_when_its_turn_comes_lets_the_next_one_in(shared: Shared) -> None:
    """Many wait for room in the outboxes, and whoever may be next is cancelled, again and again."""

    async def main() -> None:
        payload = b"x" * 200_000
        calls = [asyncio.create_task(jobs.echo(payload)) for _ in range(300)]
        await asyncio.sleep(0)
        for _ in range(40):
            await asyncio.sleep(0.002)
            for call in [call for call in calls[100:] if not call.done()][:1]:
                call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(one == payload or isinstance(one, asyncio.CancelledError) for one in ended)

    shared(main, 60)
