"""The metrics server of workers: by which names and addresses it is asked, and what it answers when something fails."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headgate.observe.metrics_server import MetricsServer
from tests.support.cli.support import run, worker
from tests.system.observe.support import PATIENCE

pytestmark = pytest.mark.integration


def status(address: str, port: int, path: str, host: str | None = None) -> int:
    with closing(http.client.HTTPConnection(address, port, timeout=PATIENCE)) as connection:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        return connection.getresponse().status


def test_o30_what_fails_to_answer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise ValueError("made to fail")

    with closing(MetricsServer("127.0.0.1", 0, broken, broken)) as server:
        assert status("127.0.0.1", server.port, "/readyz") == 500
        assert status("127.0.0.1", server.port, "/metrics") == 500
        assert status("127.0.0.1", server.port, "/healthz") == 200
    assert [one.getMessage() for one in caplog.records] == ["answering /readyz failed", "answering /metrics failed"]
    assert "ValueError: made to fail" in caplog.text


def test_o30_a_worker_is_asked_for_metrics_by_names_that_were_allowed_and_over_ipv6(tmp_path: Path) -> None:
    allowed = ["--metrics-allow-host", "worker-1", "--metrics-allow-host", "Worker-1.example.org"]
    options = ["--none", "--metrics-port", "0", "--metrics-host", "[::1]", *allowed]
    with worker(tmp_path, *options) as started:
        hosts = (None, "worker-1", "worker-1.example.org:9464", "rebound.example")
        port = started.ready["metrics_port"]
        assert [status("::1", port, "/metrics", host) for host in hosts] == [200, 200, 200, 403]


def test_o30_a_port_that_is_in_use_is_a_failure_and_not_a_wrong_call() -> None:
    with closing(MetricsServer("127.0.0.1", 0, bytes, bool)) as server:
        ran = run("worker", "--none", "--metrics-port", str(server.port))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"--metrics-port {server.port} cannot be used: " in ran.stderr
