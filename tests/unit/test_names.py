"""The public face: pinned, quick and lazy."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headgate
from headgate import errors
from headgate._version import __version__

ERRORS = {
    "ContextVarCollision",
    "CostTooLarge",
    "DiscoveryFailed",
    "DiscoveryTimeout",
    "DispatchTimeout",
    "DuplicatePool",
    "HeadgateError",
    "IdempotencyConflict",
    "InvalidArgument",
    "InvalidType",
    "LeaseLost",
    "NoActivePool",
    "NoWorkersAvailable",
    "PipelineIdMissing",
    "PoolBusy",
    "PoolClosed",
    "PoolExhausted",
    "QueueFull",
    "RemoteError",
    "RoutineExited",
    "RoutineTimeout",
    "RpcError",
    "ScopeNeedsStore",
    "StoreFormatTooNew",
    "StoreLocked",
    "StoreUnreachable",
    "StoreWriteFailed",
    "SubmitTimeout",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskRejected",
    "TaskStale",
    "TransientRpcError",
    "UnknownResource",
    "UnknownWorker",
    "WaitCycle",
    "WorkerLost",
    "WorkerStartFailed",
}
CONTEXT = {
    "Context",
    "ContextDecodeWarning",
    "ContextVar",
    "Token",
    "copy_context",
    "create_task",
    "current_context",
    "install_task_factory",
}
TASKS = {
    "Backpressure",
    "QueueStrategy",
    "TaskHandle",
    "TaskPool",
    "backpressure_queue",
    "fail_fast",
    "fair_round_robin",
    "fair_share",
    "fifo",
    "lifo",
    "pending",
    "pipeline_scope",
    "pool_create",
    "pool_get",
    "pool_list",
    "pool_wait",
    "priority",
    "ring_buffer",
    "spawn_to_pool",
    "wait_agent",
}
STORES = {"PostgresStore", "SqliteStore"}
RESOURCES = {
    "Adaptive",
    "Backoff",
    "CooldownResource",
    "Cost",
    "DisableResource",
    "PoolExhausted",
    "Quota",
    "Resource",
    "ResourcePool",
    "RetryOperation",
    "http_errors",
}


WORKERS = {
    "DaskPlacement",
    "RayPlacement",
    "BackpressureContext",
    "BackpressureLike",
    "ChannelOptions",
    "DiscoveryEvent",
    "DiscoveryLike",
    "DnsDiscovery",
    "LanDiscovery",
    "LeastLoadedLoadBalancer",
    "LoadBalancerLike",
    "LocalDiscovery",
    "LocalPlacement",
    "LocalWorker",
    "RoundRobinLoadBalancer",
    "RuntimeContext",
    "StaticDiscovery",
    "Task",
    "WorkerCredentials",
    "WorkerMetadata",
    "WorkerOptions",
    "WorkerPool",
    "WorkerProcess",
    "current_task",
    "do_dispatch",
    "map",
    "routine",
    "setup_result",
}


def test_the_names_at_the_root_are_exactly_these() -> None:
    names = ERRORS | RESOURCES | TASKS | STORES | CONTEXT | WORKERS | {"subscribe", "__version__"}
    assert set(headgate.__all__) == names - {"map"}
    assert all(hasattr(headgate, name) for name in names)
    assert names <= set(dir(headgate))


def test_importing_all_names_does_not_shadow_map() -> None:
    given: dict[str, object] = {}
    exec("from headgate import *; doubled = [*map(lambda n: 2 * n, (1, 2))]", given)
    assert given["doubled"] == [2, 4]
    assert "map" not in given
    assert given["TaskPool"] is headgate.TaskPool
    assert given["__version__"] == __version__
    assert headgate.map is headgate.workers.map


def test_every_error_is_at_the_root() -> None:
    defined = {
        name
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, errors.HeadgateError)
    }
    assert defined == ERRORS


def test_the_version_is_the_packages() -> None:
    assert headgate.__version__ == __version__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headgate' has no attribute 'Pol'"):
        headgate.Pol  # type: ignore[attr-defined]  # noqa: B018


def test_rooms_are_reached_through_the_root() -> None:
    code = "import headgate; print(headgate.resources.Pool.__name__, headgate.testing.run.__name__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["ResourcePool", "run"]


def test_all_lazy_names_are_declared_for_type_checkers() -> None:
    tree = ast.parse(Path(headgate.__file__).read_text("utf-8"))
    declared = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        for stmt in ast.walk(node)
        if isinstance(stmt, ast.ImportFrom)
        for alias in stmt.names
    }
    assert declared == {name for names in headgate._PACKAGES.values() for name in names}


def test_importing_is_lazy() -> None:
    """No asyncio, no logging, no grpc: what a name needs is imported when the name is used."""
    code = (
        "import sys, json, headgate; before = sorted(sys.modules); headgate.ResourcePool; "
        "print(json.dumps([before, sorted(sys.modules)]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = json.loads(out.stdout)
    assert not {"asyncio", "logging", "grpc", "random", "headgate.resources.pool"} & set(before)
    assert "headgate.resources.pool" in after
    assert "grpc" not in after


def test_decorating_and_making_a_pool_import_no_grpc() -> None:
    """It is imported while the workers start."""
    code = (
        "import sys, headgate; headgate.routine(lambda: None); headgate.WorkerPool(spawn=1); "
        "print(*{'grpc', 'google.protobuf', 'cloudpickle'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


def test_r02_the_floor_is_python_3_11() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["requires-python"] == ">=3.11"
    assert project["tool"]["mypy"]["python_version"] == "3.11"
    assert hasattr(asyncio.Task, "uncancel"), "what the floor is for"
