"""Clusters of Ray and Dask on loopback addresses of this machine, one of each for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import DaskPlacement, RayPlacement, WorkerPool
from tests.conftest import SCALE
from tests.support.workers.support import ROOT, Shared, alive, wait_until

LIMIT = 120
"""Seconds for one test with an engine, with the start of its cluster."""

# Ray reads these when it is imported. No message to anybody, loopback only, no process before one is needed.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_enable_worker_prestart="0",
    RAY_prestart_worker_first_driver="0",
    RAY_enable_metrics_collection="0",
    RAY_DISABLE_IMPORT_WARNING="1",
)
_NODE = {"node_ip_address": "127.0.0.1", "num_cpus": 4, "object_store_memory": 80 * 2**20}


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """An engine that hangs must not hold up everything."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"{request.node.name} took more than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class SharedPool:
    """A pool of two workers of a cluster, for all tests that leave it with two: opened by the first of them."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._open: Shared | None = None

    def __call__(self, main: Callable[[WorkerPool], Coroutine[Any, Any, None]]) -> None:
        if self._open is None:
            self._open = Shared(placement=self._cluster.placement(2))
            self._open.open()
        pool = self._open.pool
        self._open(lambda: main(pool), LIMIT)

    def close(self) -> None:
        shared, self._open = self._open, None
        if shared is not None:
            shared.close()


class Ray:
    """Three nodes, or two below full length, and this process as a client of them."""

    name = "ray"

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
            for number in range(2 if SCALE >= 1 else 1):
                self.cluster.add_node(wait=False, resources={f"node-{number}": 1}, **_NODE)
            self.cluster.wait_for_nodes()
            self.address: str = self.cluster.address
            ray.init(address=self.address, log_to_driver=False, _node_ip_address="127.0.0.1")
        self.spoiled = False
        self.shared = SharedPool(self)

    def placement(self, workers: int, **options: Any) -> RayPlacement:
        return RayPlacement(workers, **{"num_cpus": 0.1, **options})

    def kill_place_of(self, pid: int) -> int:
        """Kill the actor to which a worker belongs."""
        os.kill(actor := _above(pid, "HostActor"), signal.SIGKILL)
        return actor

    def closes_without_head(self, pids: list[int]) -> list[int]:
        """Nothing does, for a minute."""
        return []

    def kill_head(self) -> None:
        import ray

        self.shared.close()
        ray.shutdown()  # it would end this process when its head does not come back
        self.spoiled = True
        self.cluster.head_node.kill_gcs_server()

    def close(self) -> None:
        import ray

        self.shared.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
            session = self.cluster.head_node.get_session_dir_path()
            self.cluster.shutdown()
            shutil.rmtree(session, ignore_errors=True)


class Dask:
    """A scheduler and two workers as processes of their own, and a client in this process."""

    name = "dask"

    def __init__(self) -> None:
        from distributed import Client

        self.spoiled = False
        self.shared = SharedPool(self)
        self._folder = Path(tempfile.mkdtemp(prefix="headgate-dask-"))
        where = self._folder / "scheduler.json"
        common = [f"--scheduler-file={where}", "--no-dashboard"]
        self._processes = [_started(self._folder, "dask_scheduler", *common, "--host=127.0.0.1", "--port=0")]
        self._processes.append(
            _started(
                self._folder,
                "dask_worker",
                *common,
                "--host=127.0.0.1",
                "--nworkers=2",
                "--nthreads=1",
                "--memory-limit=0",
            )
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.client = Client(scheduler_file=str(where), timeout=60)
            self.client.wait_for_workers(2, timeout=60)
        self.address: str = self.client.scheduler.address

    def placement(self, workers: int | None, **options: Any) -> DaskPlacement:
        return DaskPlacement(self.client, workers, **options)

    def kill_place_of(self, pid: int) -> int:
        """Kill the Dask worker to which a worker belongs."""
        os.kill(worker := _above(pid, "multiprocessing"), signal.SIGKILL)
        return worker

    def closes_without_head(self, pids: list[int]) -> list[int]:
        """The Dask workers close at once when their scheduler is gone."""
        return [_above(pid, "multiprocessing") for pid in pids]

    def kill_head(self) -> None:
        self.shared.close()
        self.client.close()
        self.spoiled = True
        self._processes[0].kill()

    def close(self) -> None:
        self.shared.close()
        if not self.spoiled:
            self.client.close()
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers of a nanny; to close in order takes 10 s
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _started(folder: Path, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
    with (folder / f"{module}.log").open("wb") as log:
        return subprocess.Popen(program, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def _above(pid: int, title: str) -> int:
    """Return the nearest ancestor of a process whose command line has this text."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if title in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
            return pid
    raise AssertionError(f"no process above has {title!r}")


_clusters: dict[str, Any] = {}


def _running(kind: Callable[[], Any], name: str) -> Any:
    """The cluster of this kind. If a test has killed its head, another one is started."""
    found = _clusters.get(name)
    if found is not None and found.spoiled:
        _clusters.pop(name).close()
        found = None
    if found is None:
        found = _clusters[name] = kind()
    return found


@pytest.fixture(scope="session")
def clusters() -> Iterator[None]:
    yield
    for cluster in _clusters.values():
        cluster.close()
    _clusters.clear()


@pytest.fixture
def ray_cluster(clusters: None) -> Ray:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    found: Ray = _running(Ray, "ray")
    return found


@pytest.fixture
def dask_cluster(clusters: None) -> Dask:
    pytest.importorskip("distributed", reason="the extra dask is not installed")
    found: Dask = _running(Dask, "dask")
    return found


@pytest.fixture(params=["dask", "ray"])
def engine(request: pytest.FixtureRequest) -> Any:
    """Each engine in turn."""
    return request.getfixturevalue(f"{request.param}_cluster")


@contextmanager
def program(engine: str, address: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The program of `program.py`, until the block ends."""
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "program.py"), engine, address, str(folder)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def until_dead(pids: list[int], seconds: float) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), seconds)
