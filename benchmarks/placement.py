"""Calls on two workers that Ray or Dask has placed, beside what these engines run themselves; and how soon a killed
worker is back.

    python benchmarks/placement.py            three minutes
    python benchmarks/placement.py --quick    one minute

100 callers, each of which makes one call after the other. The contestants of an engine take turns in one run and on one
cluster, and only ratios count. A MISSED figure is printed, and the program exits with 0 all the same.

Both engines run on loopback addresses of this machine, with two processes each for their own work: two Ray workers for
tasks, two async actors, two Dask workers. The caller of all contestants is this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_DISABLE_IMPORT_WARNING="1")

import table
from table import Bar, Turns, median, per_second, say, times

from headgate import DaskPlacement, RayPlacement, WorkerPool, routine

CALLERS, WORKERS = 100, 2
RATES = {"Ray tasks": Bar(12), "Ray async actors": Bar(12), "Dask futures": Bar(30)}
P50 = Bar(0.6, at_most=True)
BACK = Bar(1.2, at_most=True)

Call = Callable[[int], Awaitable[int]]


@routine
async def add_one(number: int) -> int:
    """Do as little as can be."""
    return number + 1


@routine
async def own_pid() -> int:
    """Return the pid of a worker."""
    return os.getpid()


class Contestant:
    """Callers that make one call after the other, and the seconds that each call took."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.latencies: list[float] = []

    async def __call__(self, count: int) -> None:
        """Make so many calls in all."""
        todo = iter(range(count))

        async def caller() -> None:
            for number in todo:
                start = time.perf_counter()
                assert await self._call(number) == number + 1
                self.latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def compare(turns: Turns, calls: dict[str, Call], found: dict[str, Any]) -> None:
    """Measure ours and the others in turns, and add to what was found."""
    contestants = {name: Contestant(call) for name, call in calls.items()}
    for contestant in contestants.values():  # processes and connections are there before anything is timed
        for _ in range(3):
            await contestant(2 * CALLERS)
        contestant.latencies.clear()
    rates = await table.in_turns(turns, contestants)
    [ours, *others] = contestants
    for name in others:
        pairs = zip(rates[ours], rates[name], strict=True)
        found[name] = {
            "ours": median(rates[ours]),
            "theirs": median(rates[name]),
            "ratio": median([mine / theirs for mine, theirs in pairs]),
            "p50_ours_ms": 1000 * median(contestants[ours].latencies),
            "p50_theirs_ms": 1000 * median(contestants[name].latencies),
        }


async def back_after_kill(pool: WorkerPool) -> float:
    """Seconds from the SIGKILL of a worker until as many as before are ready."""
    old = pool.workers()[0]
    start = time.perf_counter()
    os.kill(old.pid, signal.SIGKILL)
    while True:  # it looks again and again, as the others do
        views = {view.uid: view.state for view in pool.workers()}
        if old.uid not in views and set(views.values()) == {"ready"}:
            return time.perf_counter() - start
        await asyncio.sleep(0.001)


# -- Ray --------------------------------------------------------------------------------------------------------------


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Two nodes."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"node_ip_address": "127.0.0.1", "num_cpus": 4, "object_store_memory": 100 * 2**20}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


async def measure_ray(turns: Turns, found: dict[str, Any], kills: int) -> None:
    """Compare with tasks and async actors of Ray, and with the time in which Ray restarts an actor."""
    import ray

    # Two processes for tasks, as many as ours and as there are actors: one fits into what is left of each node. Ray
    # ends idle processes above `num_cpus` of a node, so that is high enough for all of them to stay between turns.
    @ray.remote(num_cpus=2)
    def task(number: int) -> int:
        return number + 1

    @ray.remote(num_cpus=0.1, max_restarts=-1, max_task_retries=-1)
    class Actor:
        async def add_one(self, number: int) -> int:
            return number + 1

        async def pid(self) -> int:
            return os.getpid()

    actors = [Actor.remote() for _ in range(WORKERS)]
    await asyncio.gather(*(actor.pid.remote() for actor in actors))

    async def call_task(number: int) -> int:
        return int(await task.remote(number))

    async def call_actor(number: int) -> int:
        return int(await actors[number % WORKERS].add_one.remote(number))

    async with WorkerPool(placement=RayPlacement(WORKERS, num_cpus=0.1)) as pool:
        calls: dict[str, Call] = {"headgate on Ray": add_one, "Ray tasks": call_task, "Ray async actors": call_actor}
        await compare(turns, calls, found)
        ours, theirs = [], []
        for _ in range(kills):
            ours.append(await back_after_kill(pool))
            pid = await actors[0].pid.remote()
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while await actors[0].pid.remote() == pid:
                pass
            theirs.append(time.perf_counter() - start)
    found["back, beside a Ray actor"] = {"ours": median(ours), "theirs": median(theirs)}


# -- Dask -------------------------------------------------------------------------------------------------------------


async def measure_dask(turns: Turns, found: dict[str, Any], kills: int) -> None:
    """Compare with futures of Dask, and with the time in which Dask restarts a worker."""
    from distributed import Client, LocalCluster

    def work(number: int) -> int:
        return number + 1

    async with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):

        async def call_future(number: int) -> int:
            return int(await client.submit(work, number, pure=False))

        async with WorkerPool(placement=DaskPlacement(client, WORKERS)) as pool:
            await compare(turns, {"headgate on Dask": add_one, "Dask futures": call_future}, found)
            ours, theirs = [], []
            for _ in range(kills):
                ours.append(await back_after_kill(pool))
                theirs.append(await _dask_restart(client))
    found["back, beside a Dask worker"] = {"ours": median(ours), "theirs": median(theirs)}


async def _dask_restart(client: Any) -> float:
    """Seconds from the SIGKILL of a Dask worker until as many as before are there, one of them new."""
    pids = await client.run(os.getpid)
    start = time.perf_counter()
    os.kill(next(iter(pids.values())), signal.SIGKILL)
    while True:
        workers = await client.nthreads()
        if len(workers) == WORKERS and set(workers) != set(pids):
            return time.perf_counter() - start
        await asyncio.sleep(0.002)


# -- the report -------------------------------------------------------------------------------------------------------


def report(found: dict[str, Any]) -> None:
    """Print what was measured, and keep it."""
    rows = []
    for name, bar in RATES.items():
        if (one := found.get(name)) is None:
            continue
        p50 = one["p50_ours_ms"] / one["p50_theirs_ms"]
        rows.append(
            [
                name,
                per_second(one["theirs"]),
                per_second(one["ours"]),
                times(one["ratio"]),
                f"{bar.must:g}x",
                bar.verdict(one["ratio"]),
                f"{one['p50_theirs_ms']:.2f} ms",
                f"{one['p50_ours_ms']:.2f} ms",
                times(p50),
                P50.verdict(p50) if name.startswith("Ray") else "",
            ]
        )
    header = ["beside", "calls/s", "ours", "ratio", "must", "", "p50", "ours", "ratio", "must 0.6x"]
    table.print_table(f"Calls on {WORKERS} placed workers, {CALLERS} callers", header, rows)
    rows = []
    for name in [name for name in found if name.startswith("back")]:
        one = found[name]
        ratio = one["ratio"] = one["ours"] / one["theirs"]
        rows.append(
            [name, f"{one['theirs']:.2f} s", f"{one['ours']:.2f} s", times(ratio), BACK.verdict(ratio)],
        )
    table.print_table("A killed worker is back", ["", "engine", "ours", "ratio", "must 1.2x"], rows)
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    table.keep("placement", {"callers": CALLERS, "workers": WORKERS, "found": found})


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter and coarser")
    parser.add_argument("--only", choices=["ray", "dask"], help="one engine")
    options = parser.parse_args()
    table.warn_if_busy()
    turns, kills = (Turns(3, 0.5), 1) if options.quick else (Turns(7, 1.5), 3)
    found: dict[str, Any] = {}
    if options.only != "ray":
        say("Dask ...")
        asyncio.run(measure_dask(turns, found, kills))
    if options.only != "dask":
        say("Ray ...")
        with ray_cluster():
            asyncio.run(measure_ray(turns, found, kills))
    report(found)


if __name__ == "__main__":
    main()
