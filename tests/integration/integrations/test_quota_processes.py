"""H10, H12 in real processes, on real stores, with a real HTTP server that counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.integrations.test_http_quotas import Limits
from tests.postgres_server import PostgresServer, postgres_dsn, postgres_server  # noqa: F401
from tests.support.integrations.upstream import Answer, Seen, Upstream, usual

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("quota_process.py")


class SlidingWindow:
    """Counts the requests that start within a second, over all keys, by what they say."""

    def __init__(self) -> None:
        self.started: list[float] = []

    def __call__(self, seen: Seen) -> Answer:
        self.started.append(float(seen.headers["x-started"]))
        return usual(seen)

    @property
    def most(self) -> int:
        """The most requests of any second."""
        return max(sum(begin <= at < begin + 1.0 for at in self.started) for begin in self.started)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a store that processes share."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shared.db"
    address: str = request.getfixturevalue("postgres_dsn")
    return address


@contextmanager
def processes(upstream: Upstream, store: str, quota: str, requests: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Three processes that send so many requests each. They begin together."""
    command = [sys.executable, str(PROGRAM), upstream.url, store, quota, str(requests)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def results(started: list[subprocess.Popen[str]]) -> list[int]:
    return [int(process.communicate(timeout=60)[0]) for process in started]


@pytest.mark.parametrize(
    "store",
    [pytest.param("sqlite", marks=pytest.mark.soak), pytest.param("postgres", marks=pytest.mark.soak)],
    indirect=True,
)
def test_h12_three_processes_learn_one_quota(store: str, upstream: Upstream, tmp_path: Path) -> None:
    limits = Limits(30, per=1.0)
    upstream.answers = {"planted-key": limits}
    with processes(upstream, store, "learn", 25) as started:
        assert results(started) == [25, 25, 25]
    assert limits.served == 75
    assert limits.refused <= limits.windows
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert bool(files) is (store.startswith("sqlite"))
    assert not any(b"planted-key" in path.read_bytes() for path in files)  # G24


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)], indirect=True)
def test_h10_three_processes_keep_one_quota_also_if_one_is_killed(store: str, upstream: Upstream) -> None:
    window = SlidingWindow()
    upstream.answers = {"planted-key": window}
    with processes(upstream, store, "20", 15) as started:
        while not window.started:
            time.sleep(0.01)
        os.kill(started[0].pid, signal.SIGKILL)
        assert results(started[1:]) == [15, 15]
    assert len(window.started) >= 30
    assert window.most <= 20
