"""CPython's own tests of executors, run against ours. They come with most Pythons, and are not copied here.

What the tests assume about the constructor or the inside of an executor is replaced by a mixin below; which tests do
not apply, and why, is said in `NOT_APPLICABLE`.
"""

from __future__ import annotations

import asyncio
import os
import unittest
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from headgate import TaskPool, WorkerPool, pool_list

SCALE = float(os.environ.get("HEADGATE_SCALE", "0.1"))

try:
    support = import_module("test.support")
    found = import_module("test.test_concurrent_futures")
except ImportError:
    pytest.skip(
        "this Python was installed without its own tests (test.test_concurrent_futures)", allow_module_level=True
    )

if SCALE < 1 and support.use_resources is None:
    support.use_resources = []  # tests that need seconds are skipped, as by `python -m test` without -u


def part(name: str) -> ModuleType:
    """Where a class of tests stands: in a package of several modules from 3.12 on, and in one module before."""
    return import_module(f"test.test_concurrent_futures.{name}") if hasattr(found, "__path__") else found


NOT_APPLICABLE = {
    "test_max_workers_negative": "a pool is made before its executor: max_concurrent=0 is refused by TaskPool",
    "test_interpreter_shutdown": "runs a script that imports the class from concurrent.futures; ours: test_as_executor",
    "test_submit_after_interpreter_shutdown": "the same",
    "test_hang_gh83386": "the same",
    "test_hang_gh94440": "the same: it calls the class with max_workers=",
}


class Ours:
    """Makes an executor of a pool for each test."""

    worker_count = 5
    executor: Any
    executor_type = TaskPool

    pool: TaskPool | None = None

    def setUp(self) -> None:
        self.pool = TaskPool(max_concurrent=self.worker_count)
        self.executor = self.pool.as_executor()

    def tearDown(self) -> None:
        self.executor.shutdown(wait=True)
        self.executor = None
        pool, self.pool = self.pool, None
        if pool is not None and pool in pool_list():  # a pool that no test has used is not closed by its executor
            asyncio.run(pool.close())


class OnWorkers(Ours):
    worker_count = 2

    def setUp(self) -> None:
        self.executor = WorkerPool(spawn=self.worker_count).as_executor()
        self.executor.__enter__()  # a call cannot start before there is a worker


def applied(name: str, tests: type, ours: type[Ours]) -> type[unittest.TestCase]:
    """The tests of CPython with our executor, without those that do not apply."""
    left_out = dict.fromkeys(set(NOT_APPLICABLE) & set(dir(tests)))
    made: type[unittest.TestCase] = type(name, (tests, ours, unittest.TestCase), {**left_out, "__module__": __name__})
    return made


C30Executor = pytest.mark.integration(applied("C30Executor", part("executor").ExecutorTest, Ours))
C30Shutdown = pytest.mark.integration(applied("C30Shutdown", part("test_shutdown").ExecutorShutdownTest, Ours))
C30AsCompleted = pytest.mark.integration(applied("C30AsCompleted", part("test_as_completed").AsCompletedTests, Ours))
C30Wait = pytest.mark.soak(pytest.mark.integration(applied("C30Wait", part("test_wait").WaitTests, Ours)))
C30OnWorkers = pytest.mark.integration(applied("C30OnWorkers", part("executor").ExecutorTest, OnWorkers))
C30ShutdownOnWorkers = pytest.mark.soak(
    pytest.mark.integration(applied("C30ShutdownOnWorkers", part("test_shutdown").ExecutorShutdownTest, OnWorkers))
)


def test_c30_what_does_not_apply_is_still_there() -> None:
    """A name that CPython drops must leave the list."""
    tests = (part("executor").ExecutorTest, part("test_shutdown").ExecutorShutdownTest)
    assert set(NOT_APPLICABLE) <= {name for one in tests for name in dir(one)}
