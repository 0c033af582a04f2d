"""A pool with a worker on another machine: two network namespaces, and mutual TLS between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.support.cli.support import HERE, PATIENCE, command, environment


class Network:
    """Two network namespaces with a wire between them: 10.77.0.1 and 10.77.0.2."""

    def __init__(self) -> None:
        self.names = [f"hg{os.getpid()}{side}" for side in "ab"]

    def __enter__(self) -> Self:
        a, b = self.names
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "add", f"{a}0", "netns", a, "type", "veth", "peer", "name", f"{b}0", "netns", b)
            for name, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
                _ip("-n", name, "addr", "add", address, "dev", f"{name}0")
                _ip("-n", name, "link", "set", f"{name}0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def inside(self, side: int, *program: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[side], *program]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("needs `ip`: install Debian's iproute2")
    try:
        made = Network().__enter__()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the right to make network namespaces (run as root): {error.stderr.decode().strip()}")
    yield made
    made.__exit__()


PROGRAM = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
import fleet_jobs
from headgate import StaticDiscovery, WorkerCredentials, WorkerPool

async def main():
    paths = [f"{sys.argv[1]}/{name}.pem" for name in ("ca-cert", "worker-key", "worker-cert")]
    credentials = WorkerCredentials.from_files(*paths)
    found = StaticDiscovery(["10.77.0.2:7070"], secure=True)
    async with WorkerPool(spawn=1, discovery=found, credentials=credentials) as pool:
        pids = set()
        while len(pids) < 2:
            pids |= set(await asyncio.gather(*(fleet_jobs.where() for _ in range(20))))
        print(len(pids), len(await fleet_jobs.nested(4)))

asyncio.run(main())
"""


def test_w70_w20_a_hybrid_pool_across_two_network_namespaces_with_mutual_tls(network: Network, tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    made = subprocess.run(
        command("certs", str(certificates), "--name", "10.77.0.2"), capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    remote = network.inside(1, *command("worker", "--none", "--bind", "0.0.0.0:7070", "--cert-dir", str(certificates)))
    with subprocess.Popen(
        remote, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["secure"]
            program = network.inside(0, sys.executable, "-c", PROGRAM, str(certificates), str(HERE))
            told = subprocess.run(
                program, capture_output=True, text=True, timeout=PATIENCE, cwd=HERE, env=environment(), check=False
            )
            assert (told.stderr, told.stdout.split()[:1]) == ("", ["2"])
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)
