"""The virtual loop: what it promises about time, about the real world, and about getting stuck."""

from __future__ import annotations

import _thread
import asyncio
import inspect
import itertools
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NoReturn

import pytest

from headgate.core.clock import clock
from headgate.errors import InvalidArgument
from headgate.testing import Hang, VirtualLoop, run, settle


def now() -> float:
    return asyncio.get_running_loop().time()


def virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def forever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


# -- time --------------------------------------------------------------------------------------------------------------


def test_an_hour_passes_in_no_time() -> None:
    began = time.perf_counter()

    async def main() -> float:
        await asyncio.sleep(3600)
        return now()

    assert run(main) == 3600.0
    assert time.perf_counter() - began < 1.0


def test_timers_fire_at_exactly_their_own_float() -> None:
    marks = [0.3, 0.1 + 0.2, 0.1, 1 / 3, math.nextafter(1 / 3, 1), 1e-300, 5e-324, 12345.678]
    fired: list[tuple[float, float]] = []

    def fire(when: float) -> None:
        fired.append((when, now()))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for when in marks:
            loop.call_at(when, fire, when)
        await asyncio.sleep(100_000)

    run(main)
    assert fired == [(when, when) for when in sorted(marks)]


@pytest.mark.parametrize(("start", "when"), [(6.3, 14.6), (9.2, 41.4), (9.7, 45.9)])
def test_a_jump_lands_on_the_timer_and_not_near_it(start: float, when: float) -> None:
    fired: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(when, lambda: fired.append(loop.time()))
        await asyncio.sleep(100)

    assert start + (when - start) > when  # so a loop that adds the wait to its time is late
    run(main, start=start)
    assert fired == [when]


@pytest.mark.parametrize("start", [-1.0, -0.1, 0.0, 1000.0, 4_503_599_627_370_497.0])
def test_neighbouring_floats_are_different_times(start: float) -> None:
    fired: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first = math.nextafter(start, math.inf)
        second = math.nextafter(first, math.inf)
        for when in (second, first, start):
            loop.call_at(when, lambda: fired.append(loop.time()))
        await asyncio.sleep(16)
        assert fired == [start, first, second]

    run(main, start=start)


def test_timers_of_one_time_fire_in_the_order_they_were_set() -> None:
    fired: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(5, fired.append, i) for i in range(500)]
        for handle in handles[::2]:  # enough to make asyncio sweep and rebuild its heap
            handle.cancel()
        await asyncio.sleep(6)

    run(main)
    assert fired == list(range(1, 500, 2))


def test_a_cancelled_timer_moves_no_time() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(10, print).cancel()
        await asyncio.sleep(1)
        return now()

    assert run(main) == 1.0


def test_sleepers_wake_in_order_and_share_time() -> None:
    async def nap(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return now()

    async def main() -> list[float]:
        return await asyncio.gather(*map(nap, (30, 10, 20)))

    assert run(main, start=1000.0) == [1030.0, 1010.0, 1020.0]


def test_asyncio_tools_live_on_virtual_time() -> None:
    async def main() -> list[float]:
        marks: list[float] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await forever()
        marks.append(now())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3)
        marks.append(now())
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(5))
            group.create_task(asyncio.sleep(4))
        marks.append(now())
        done, pending = await asyncio.wait([asyncio.create_task(asyncio.sleep(9))], timeout=2)
        assert not done
        marks.append(now())
        await asyncio.gather(*pending)
        return [*marks, now()]

    assert run(main) == [7.0, 10.0, 15.0, 17.0, 24.0]


@pytest.mark.parametrize("wrong", [{"start": math.inf}, {"start": math.nan}, {"limit": 0}, {"patience": -1}])
def test_bad_times_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        VirtualLoop(**wrong)


# -- hangs -------------------------------------------------------------------------------------------------------------


def test_a_hang_names_who_waits_where_and_for_what() -> None:
    async def consumer(queue: asyncio.Queue[int]) -> None:
        await queue.get()

    async def main() -> None:
        task = asyncio.create_task(consumer(asyncio.Queue()), name="the consumer")
        await task

    with pytest.raises(Hang) as caught:
        run(main)
    told = str(caught.value)
    line = inspect.getsourcelines(consumer)[1] + 1
    assert "Task 'the consumer' in test_a_hang_names_who_waits_where_and_for_what.<locals>.consumer" in told
    assert f"test_virtual.py:{line} in consumer: await queue.get()" in told
    assert "waits on <Queue at" in told
    assert "test_virtual.py" in told
    assert "in main: await task" in told
    assert "waits on Task 'the consumer'" in told


def test_a_hang_looks_through_generators_and_foreign_awaitables() -> None:
    class Thin:
        __slots__ = ("inner",)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __await__(self) -> Any:
            return self

        def __iter__(self) -> Thin:
            return self

        def __next__(self) -> Any:
            return self.inner.send(None)

    async def deepest() -> None:
        await asyncio.Event().wait()

    async def numbers() -> AsyncIterator[int]:
        await Thin(deepest())
        yield 1

    async def main() -> None:
        async for _ in numbers():
            pass

    with pytest.raises(Hang) as caught:
        run(main)
    assert re.findall(r" in (\w+):", str(caught.value)) == ["main", "numbers", "deepest", "wait"]


def test_a_hang_names_what_is_gathered() -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(forever(), name=f"t{i}") for i in range(2)]
        await asyncio.gather(*tasks)

    with pytest.raises(Hang, match=r"waits on a gather of 2: Task 't0', Task 't1'"):
        run(main)


def test_a_hang_without_any_task() -> None:
    loop = VirtualLoop()
    try:
        with pytest.raises(Hang, match="No task is pending"):
            loop.run_until_complete(loop.create_future())
    finally:
        loop.close()


def test_a_hang_is_seen_at_once_after_threads_have_worked() -> None:
    async def main() -> None:
        await asyncio.to_thread(int)  # leaves an idle thread behind, which nobody should wait for
        await forever()

    with pytest.raises(Hang, match="nothing is ready"):
        run(main)


def test_a_foreign_thread_that_has_ended_holds_nothing_up() -> None:
    """Until Python 3.12 one that asked who it is stays in `threading.enumerate()` for ever."""
    ended = threading.Event()

    def foreign() -> None:
        threading.current_thread()
        ended.set()

    ident = _thread.start_new_thread(foreign, ())
    ended.wait()
    while ident in sys._current_frames():
        time.sleep(0.001)
    with pytest.raises(Hang, match="nothing is ready"):
        run(forever)


def test_time_runs_past_the_limit() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(10)

    with pytest.raises(Hang, match=r"at 90 s time ran past 95 virtual seconds.*(?s:.)*in main: await asyncio.sleep"):
        run(main, start=0.0, limit=95)


def test_the_limit_counts_from_the_start() -> None:
    assert run(lambda: asyncio.sleep(100, "fine"), start=1e9, limit=100) == "fine"


def test_a_timer_at_infinity_is_no_timer() -> None:
    with pytest.raises(Hang, match="nothing is ready"):
        run(lambda: asyncio.sleep(math.inf), limit=math.inf)


def test_a_task_that_refuses_to_end_does_not_hide_the_first_hang() -> None:
    async def main() -> None:
        while True:
            try:
                await forever()
            except asyncio.CancelledError:
                continue

    with pytest.raises(Hang) as caught:
        run(main)
    assert "cleaning up after it hung too" in caught.value.__notes__[0]
    assert clock.now is time.monotonic


# -- the real world ----------------------------------------------------------------------------------------------------


def work(seconds: float) -> str:
    time.sleep(seconds)
    return threading.current_thread().name


def test_work_in_threads_takes_no_virtual_time() -> None:
    async def main() -> tuple[str, float]:
        async with asyncio.timeout(0.001):
            name = await asyncio.to_thread(work, 0.05)
        return name, now()

    name, at = run(main)
    assert name != threading.main_thread().name
    assert at == 0.0


def test_a_cancelled_job_is_still_waited_for() -> None:
    ended: list[float] = []

    def job(loop: VirtualLoop) -> None:
        time.sleep(0.05)
        ended.append(loop.time())

    async def main() -> None:
        future = virtual_loop().run_in_executor(None, job, virtual_loop())
        await settle()
        future.cancel()
        await asyncio.sleep(100)
        assert ended == [0.0]

    run(main)


class Backwards(Future[str]):
    """Tells its listeners in the wrong order, and slowly, as two threads might."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[Future[str]], object]] = []
        self.thread = threading.Thread(target=self.finish)

    def add_done_callback(self, fn: Callable[[Future[str]], object]) -> None:
        self.listeners.append(fn)
        if len(self.listeners) == 2:
            self.thread.start()

    def finish(self) -> None:
        self.set_result("arrived")
        for listener in reversed(self.listeners):
            listener(self)
            time.sleep(0.05)


def test_a_job_holds_time_until_its_result_has_arrived() -> None:
    class Odd(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            jobs.append(Backwards())
            return jobs[-1]

    async def main() -> str:
        async with asyncio.timeout(1):
            return await virtual_loop().run_in_executor(Odd(), str)

    jobs: list[Backwards] = []
    assert run(main) == "arrived"
    jobs.pop().thread.join()


def test_a_job_that_fails_and_one_that_is_refused_are_forgotten() -> None:
    async def main() -> None:
        loop = virtual_loop()
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        closed = ThreadPoolExecutor()
        closed.shutdown()
        with pytest.raises(RuntimeError):
            await loop.run_in_executor(closed, int)
        await asyncio.sleep(1)

    run(main, patience=0.5)


def test_work_in_processes() -> None:
    async def main() -> int:
        loop = virtual_loop()
        import multiprocessing

        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return await loop.run_in_executor(pool, os.getpid)

    assert run(main, patience=60) != os.getpid()


def test_work_that_never_ends_is_a_hang() -> None:
    gate = threading.Event()

    async def main() -> None:
        await asyncio.to_thread(gate.wait)

    try:
        with pytest.raises(Hang, match=r"did not end: Event.wait\(\) \(waited 0.05 real seconds\)"):
            run(main, patience=0.05)
    finally:
        gate.set()


def test_a_call_from_another_thread_wakes_the_loop() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()

        def call() -> None:
            time.sleep(0.05)
            loop.call_soon_threadsafe(future.set_result, "called")

        thread = threading.Thread(target=call)
        thread.start()
        try:
            return await future
        finally:
            thread.join()

    assert run(main) == "called"


def test_a_silent_thread_is_a_hang_that_names_it() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="the silent one")
    thread.start()
    try:
        with pytest.raises(Hang, match="nothing came from threads the silent one"):
            run(forever, patience=0.05)
    finally:
        gate.set()
        thread.join()


def test_threads_sleep_on_virtual_time_together() -> None:
    def nap(seconds: float) -> float:
        clock.sleep(seconds)
        return clock.now()

    async def main() -> list[float]:
        ticks: list[float] = []

        async def tick() -> None:
            for _ in range(3):
                await asyncio.sleep(2)
                ticks.append(now())

        async with asyncio.TaskGroup() as group:
            group.create_task(tick())
            naps = [group.create_task(asyncio.to_thread(nap, 5.0)) for _ in range(4)]
        assert ticks == [2.0, 4.0, 6.0]
        return [nap.result() for nap in naps]

    assert run(main) == [5.0, 5.0, 5.0, 5.0]


def test_more_sleeping_jobs_than_workers() -> None:
    async def main() -> float:
        with ThreadPoolExecutor(2) as pool:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*[loop.run_in_executor(pool, clock.sleep, 10) for _ in range(6)])
            return now()

    assert run(main) == 30.0


def test_a_thread_asleep_when_main_returns_is_waited_for() -> None:
    woke: list[float] = []

    def nap() -> None:
        clock.sleep(3600)
        woke.append(clock.now())

    async def main() -> None:
        jobs.append(asyncio.get_running_loop().run_in_executor(None, nap))
        await settle()

    jobs: list[object] = []

    run(main)
    assert woke == [3600.0]


def test_a_thread_that_sleeps_on_a_closed_loop_is_let_go() -> None:
    asleep = threading.Event()

    def nap(loop: VirtualLoop) -> str:
        asleep.set()
        loop.sleep(3600)
        return "awake"

    async def main() -> None:
        naps.append(pool.submit(nap, virtual_loop()))
        await asyncio.to_thread(asleep.wait)
        await settle()

    naps: list[Future[str]] = []
    with ThreadPoolExecutor(1) as pool:
        run(main)
        assert naps.pop().result(timeout=60) == "awake"


def test_sleep_in_the_loops_own_thread_moves_time() -> None:
    async def main() -> tuple[float, float]:
        before = clock.wall()
        clock.sleep(0.25)
        with pytest.raises(InvalidArgument, match="-1"):
            clock.sleep(-1)
        return now(), clock.wall() - before

    assert run(main) == (0.25, 0.25)


def test_real_sockets_work() -> None:
    async def main() -> bytes:
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=left)
        far_reader, far_writer = await asyncio.open_connection(sock=right)

        async def echo() -> None:
            far_writer.write((await far_reader.readexactly(4)).upper())

        async with asyncio.TaskGroup() as group:
            group.create_task(echo())
            writer.write(b"ping")
            async with asyncio.timeout(1):
                answer = await reader.readexactly(4)
        for stream in (writer, far_writer):
            stream.close()
            await stream.wait_closed()
        assert now() == 0.0
        return answer

    assert run(main) == b"PING"


def test_a_server_and_a_client_over_tcp() -> None:
    async def main() -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            writer.write(b"hello\n")
            line = await reader.readline()
            writer.close()
            await writer.wait_closed()
        return line

    assert run(main) == b"hello\n"


def test_data_from_a_thread_through_a_socket_is_waited_for() -> None:
    left, right = socket.socketpair()
    left.setblocking(False)

    def send() -> None:
        time.sleep(0.05)
        right.sendall(b"late")

    async def main() -> bytes:
        thread = threading.Thread(target=send)
        thread.start()
        loop = virtual_loop()
        with loop.outside("the sender"):
            async with asyncio.timeout(1):
                data = await loop.sock_recv(left, 4)
        thread.join()
        return data

    with left, right:
        assert run(main) == b"late"


def test_a_silent_socket_is_a_hang_after_patience() -> None:
    left, right = socket.socketpair()
    left.setblocking(False)

    async def main() -> None:
        await asyncio.get_running_loop().sock_recv(left, 1)

    with left, right, pytest.raises(Hang, match="nothing came from 1 registered file"):
        run(main, patience=0.05)


def test_child_processes_are_waited_for() -> None:
    async def main() -> tuple[int, bytes]:
        quiet = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
        code = await quiet.wait()
        loud = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('hi')", stdout=asyncio.subprocess.PIPE)
        out, _ = await loud.communicate()
        return code, out

    assert run(main, patience=60) == (0, b"hi\n")


def test_an_interrupt_in_a_callback_comes_through() -> None:
    cleaned: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        asyncio.get_running_loop().call_later(5, interrupt)
        try:
            await forever()
        finally:
            cleaned.append("yes")

    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert cleaned == ["yes"]
    assert clock.now is time.monotonic


def test_ctrl_c_during_a_real_wait() -> None:
    def press() -> None:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    async def main() -> None:
        await asyncio.to_thread(press)
        await asyncio.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        run(main)
