"""The clusters of `headgate demo --on ray` and `--on dask`: several nodes on this machine, one of which is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.errors import HeadgateError

if TYPE_CHECKING:
    from headgate.workers.processes.placement import Placement

NODES = 3
_HERE = "127.0.0.1"
_STARTING = 120.0
"""Seconds that the nodes of Ray have to find each other. On two busy cores 30, Ray's own default, are sometimes few."""
_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it tells nobody
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it uses loopback addresses
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


class Theatre(NamedTuple):
    """Where the workers of the demo run."""

    placement: Placement
    kill: Callable[[], str]
    """Kill one node, without waiting; return what was killed."""


@contextmanager
def ray_nodes() -> Iterator[Theatre]:
    """Three nodes of Ray, with one worker on each."""
    os.environ.update(_RAY)
    import ray
    from ray.cluster_utils import Cluster

    from headgate.integrations.ray import RayPlacement

    node: dict[str, Any] = {"node_ip_address": _HERE, "num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster()
    try:
        cluster.add_node(**node, include_dashboard=False)
        others = [cluster.add_node(wait=False, **node) for _ in range(NODES - 1)]
        cluster.wait_for_nodes(_STARTING)
        ray.init(address=cluster.address, log_to_driver=False, _node_ip_address=_HERE)
    except Exception as error:  # TimeoutError, or Exception itself: Ray has no type of its own for it
        cluster.shutdown()
        raise HeadgateError(
            f"the cluster of Ray did not start: {' '.join(str(error).split()) or type(error).__name__}",
            remedy="Ray gives each node 30 s, and three of them need about 1 GB of free memory. Try again when the "
            "machine is less busy, or run `headgate demo --on dask`, which needs less. Ray's own log is in "
            "/tmp/ray/session_latest/logs.",
        ) from error

    def kill() -> str:
        killing = threading.Thread(target=cluster.remove_node, args=(others[0],), kwargs={"allow_graceful": False})
        killing.start()
        return "a node of Ray, with all that runs on it,"

    try:
        # Two fit on one node, so that the other nodes have room for the worker of the one that is killed.
        yield Theatre(RayPlacement(NODES, num_cpus=0.5), kill)
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def dask_workers() -> Iterator[Theatre]:
    """Three workers of Dask, with one of ours beside each."""
    import dask.config
    from distributed import Client, LocalCluster

    from headgate.integrations.dask import DaskPlacement

    dask.config.set({"logging.distributed": "critical"})
    options: dict[str, Any] = {"threads_per_worker": 1, "host": _HERE, "dashboard_address": None}
    cluster: Any = LocalCluster(n_workers=NODES, **options)
    with cluster, Client(cluster) as client:
        pids: Any = client.run(os.getpid)

        def kill() -> str:
            pid = next(iter(pids.values()))
            os.kill(pid, signal.SIGKILL)
            return f"the Dask worker {pid}, with all that runs beside it,"

        yield Theatre(DaskPlacement(client), kill)


CLUSTERS: dict[str, Callable[[], AbstractContextManager[Theatre]]] = {"ray": ray_nodes, "dask": dask_workers}
