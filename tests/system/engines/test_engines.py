"""Pools on real clusters of Ray and Dask: what works there, and what happens when something is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import headgate
from headgate import WorkerLost, WorkerPool
from headgate.testing import check_placement
from tests.support.workers.support import ROOT, until
from tests.system.engines import engine_jobs
from tests.system.engines.conftest import Dask, Ray, program, until_dead

pytestmark = [
    pytest.mark.integration,
    pytest.mark.engines,
    # The clients of both engines keep threads and connections for their next use.
    pytest.mark.headgate_leaks(threads=False, files=False, tasks=True, children=False),
]


mostly_dask = pytest.mark.parametrize("engine", ["dask", pytest.param("ray", marks=pytest.mark.soak)], indirect=True)
"""For tests that show much the same with both engines: an actor of Ray takes seconds to start."""


@pytest.fixture(autouse=True)
def jobs_travel_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(engine_jobs)
    yield
    cloudpickle.unregister_pickle_by_value(engine_jobs)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


@mostly_dask
def test_p02_p03_placements_on_engines_keep_the_contract(engine: Any) -> None:
    check_placement(engine.placement, patience=30, keeps_connections=True)


def test_p05_p06_what_works_on_placed_workers(engine: Any, tmp_path: Path) -> None:
    """Routine, generator, cancellation, nested calls, context, and mutual TLS with certificates of the pool."""
    note = tmp_path / "note"

    async def main(pool: WorkerPool) -> None:
        assert len(pool.workers()) == 2
        assert all(view.metadata.secure for view in pool.workers())
        assert all(view.address.startswith("127.0.0.1:") for view in pool.workers())
        assert await asyncio.gather(*(engine_jobs.add(n, 1) for n in range(20))) == list(range(1, 21))
        assert [n async for n in engine_jobs.count(5)] == [0, 1, 2, 3, 4]
        assert len(set(await engine_jobs.nested(5))) == 2, "nested calls go to both workers"
        engine_jobs.TENANT.set("acme")
        assert await engine_jobs.tenant() == "acme"
        napping = asyncio.create_task(engine_jobs.nap(60, str(note)))
        await until(lambda: sum(view.in_flight for view in pool.workers()))
        napping.cancel()
        await asyncio.wait([napping])
        await until(note.exists)

    engine.shared(main)


def test_p06_a_killed_worker_is_lost_and_replaced_and_its_uid_never_comes_back(engine: Any) -> None:
    async def main(pool: WorkerPool) -> None:
        first = {view.uid: view.pid for view in pool.workers()}
        await pool.broadcast(engine_jobs.pid)  # both are connected
        calls = [asyncio.create_task(engine_jobs.nap(60)) for _ in range(2)]
        await until(lambda: [view.in_flight for view in pool.workers()] == [1, 1])
        killed, pid = next(iter(first.items()))
        os.kill(pid, signal.SIGKILL)
        done, others = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        [lost] = done
        assert isinstance(lost.exception(), WorkerLost)
        assert lost.exception().signal == signal.SIGKILL
        await until(lambda: killed not in {view.uid for view in pool.workers()})
        await until(lambda: sum(view.state == "ready" for view in pool.workers()) == 2)
        assert await asyncio.gather(*(engine_jobs.add(n, 1) for n in range(10))) == list(range(1, 11))
        for call in others:
            call.cancel()
        await asyncio.wait(others)

    engine.shared(main)


def test_p06_nothing_outlives_the_process_of_the_engine_and_another_worker_comes(engine: Any) -> None:
    async def main(pool: WorkerPool) -> None:
        killed, pid = next((view.uid, view.pid) for view in pool.workers())
        parent = engine.kill_place_of(pid)
        await asyncio.to_thread(until_dead, [pid, parent], 5)
        assert await asyncio.gather(*(engine_jobs.add(n, 1) for n in range(10))) == list(range(1, 11))
        await until(lambda: killed not in {view.uid for view in pool.workers()})
        await until(lambda: sum(view.state == "ready" for view in pool.workers()) == 2, 30)

    engine.shared(main)


@mostly_dask
def test_p06_resizing_under_load_loses_no_call(engine: Any) -> None:
    async def main(pool: WorkerPool) -> None:
        over, made = asyncio.Event(), 0

        async def load() -> None:
            nonlocal made
            while not over.is_set():
                assert await engine_jobs.add(made, 1) > 0
                assert await engine_jobs.nap(0.01) == "slept"
                made += 2

        loads = [asyncio.create_task(load()) for _ in range(8)]
        for size in (3, 1, 2):
            await pool.resize(size)
            assert len(pool.workers()) == size
            seen = made
            await until(lambda seen=seen: made > seen + 20)  # type: ignore[misc]
        over.set()
        await asyncio.gather(*loads)

    engine.shared(main)


@mostly_dask
def test_p06_everything_ends_when_the_client_is_killed(engine: Any, tmp_path: Path) -> None:
    with program(engine.name, engine.address, tmp_path) as client:
        assert client.stdout is not None
        line = client.stdout.readline()
        assert line, (tmp_path / "log").read_text()
        pids = json.loads(line)
        client.kill()
        client.wait()
        until_dead(pids, 1 + 5)  # its orphan timeout is 1 s


def test_p07_a_module_that_workers_lack_is_named_with_the_remedy(engine: Any, tmp_path: Path) -> None:
    import importlib.util

    (tmp_path / "only_here.py").write_text("import headgate\n\n@headgate.routine\nasync def here():\n    return 1\n")
    spec = importlib.util.spec_from_file_location("only_here", tmp_path / "only_here.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["only_here"] = module
    spec.loader.exec_module(module)

    async def main(_: WorkerPool) -> None:
        with pytest.raises(headgate.RemoteError) as raised:
            await module.here()
        assert "needs the module only_here, which the worker cannot import" in str(raised.value)
        assert {"ray": "runtime_env", "dask": "upload_file"}[engine.name] in str(raised.value)

    try:
        engine.shared(main)
    finally:
        del sys.modules["only_here"]


# -- one engine -------------------------------------------------------------------------------------------------------


def test_p02_resources_that_nobody_has_are_named(ray_cluster: Ray) -> None:
    async def main() -> None:
        with pytest.raises(headgate.NoWorkersAvailable) as raised:
            async with WorkerPool(placement=ray_cluster.placement(1, num_gpus=2), quorum_timeout=1.5):
                pass
        assert "no node of the Ray cluster has enough GPU for a worker (CPU: 0.1, GPU: 2)" in str(raised.value)
        assert "CPU: 4" in str(raised.value), "what the cluster has"

    run(main)


def test_p02_resources_choose_the_node_and_the_environment_reaches_the_worker(ray_cluster: Ray) -> None:
    async def main() -> None:
        options = {"resources": {"node-0": 1}, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": "7"}}}
        async with WorkerPool(placement=ray_cluster.placement(1, **options)):
            assert await engine_jobs.environment("CUDA_VISIBLE_DEVICES") == "7"
            # A routine that holds the interpreter's lock does not hold up Ray, whose actor is another process.
            await engine_jobs.hold_everything(0.2)

    run(main)


def test_p02_wrong_options_are_refused() -> None:
    for options, says in (
        ({"num_workers": 0}, "num_workers must be >= 1"),
        ({"num_gpus": -1}, "a worker must ask for a number >= 0 of GPU, got -1"),
        ({"resources": {"tpu": "x"}}, "a worker must ask for a number >= 0 of tpu, got 'x'"),
        ({"num_gpu": 1}, "RayPlacement\\(\\) has no option 'num_gpu'. Did you mean num_gpus"),
    ):
        with pytest.raises(headgate.HeadgateError, match=says):
            headgate.RayPlacement(**options)  # type: ignore[arg-type]


def test_p03_as_many_workers_as_dask_has_and_more_if_asked(dask_cluster: Dask) -> None:
    async def main() -> None:
        async with WorkerPool(placement=dask_cluster.placement(None)) as pool:
            assert len(pool.workers()) == 2
            await pool.resize(3)
            assert len(pool.workers()) == 3
            assert len(set((await pool.broadcast(engine_jobs.pid)).values())) == 3

    run(main)


def test_p03_what_is_no_client_is_refused() -> None:
    with pytest.raises(headgate.InvalidType, match=r"client must be a distributed\.Client, got str"):
        headgate.DaskPlacement("tcp://127.0.0.1:8786")  # type: ignore[arg-type]


# -- the head: last, because a cluster without one is of no more use --------------------------------------------------


@mostly_dask
def test_p06_calls_go_on_without_the_head_of_the_engine(engine: Any, tmp_path: Path) -> None:
    with program(engine.name, engine.address, tmp_path) as client:
        assert client.stdout is not None
        line = client.stdout.readline()
        assert line, (tmp_path / "log").read_text()
        pids = json.loads(line)
        closing = engine.closes_without_head(pids)
        engine.kill_head()
        until_dead(closing, 30)
        (tmp_path / "go").write_text("go")
        told = json.loads(client.stdout.readline())
        assert told["finished_on"] in pids, "the call that ran when the head was killed has finished there"
        client.kill()
        client.wait()
        until_dead(pids, 1 + 5)


# -- the demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dask", pytest.param("ray", marks=pytest.mark.soak)])
def test_p08_the_demo_on_a_cluster_loses_no_call_when_a_node_is_killed(name: str, tmp_path: Path) -> None:
    """As `make scale` runs it. It starts a cluster of its own."""
    pytest.importorskip({"dask": "distributed", "ray": "ray"}[name], reason=f"the extra {name} is not installed")
    calls = {"dask": 120, "ray": 480}[name]  # Ray tells later that a node is gone
    ran = subprocess.run(
        [sys.executable, "-m", "headgate", "demo", "--on", name, "--calls", str(calls), "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout[ran.stdout.index("{\n") :])  # Ray prints there too
    assert (figures["answered"], figures["lost_results"], figures["workers_killed"]) == (calls, 0, 1)
    assert "is killed" in ran.stderr
    assert " is lost: " in ran.stderr, "the worker that was on the node"
    target = (ROOT / "Makefile").read_text("utf-8").partition("\nscale:")[2].partition("\n\n")[0]
    assert f"headgate demo --on {name}" in target
