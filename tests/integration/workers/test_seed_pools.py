"""The seed's examples of durable, hybrid and leased pools, of options and credentials, with our import name."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate.workers import ChannelOptions, LocalWorker, WorkerOptions
from tests.support.workers import jobs
from tests.support.workers.certificates import Authority
from tests.support.workers.support import run

pytest.importorskip("zeroconf", reason="pip install headgate[lan]")


def lan(namespace: str) -> headgate.LanDiscovery:
    return headgate.LanDiscovery(namespace, advertise_host="127.0.0.1")


def test_w02_w20_durable_hybrid_and_leased_pools_of_the_seed_run() -> None:
    namespace = f"seed-{os.urandom(6).hex()}"

    async def main() -> None:
        async with headgate.WorkerPool(spawn=2, discovery=lan(namespace)) as hybrid:
            own = {view.pid for view in hybrid.workers()}
            assert await jobs.pid() in own
            async with headgate.WorkerPool(discovery=lan(namespace)):  # durable
                assert await jobs.pid() in own
            async with headgate.WorkerPool(spawn=1, lease=1, discovery=lan(namespace), quorum=2, lazy=False) as leased:
                assert len(leased.workers()) == 2
                assert await jobs.add(1, 2) == 3
            async with headgate.WorkerPool(discovery=lan(namespace), lease=10):
                assert await jobs.pid() in own

    run(main, patience=60)


def test_w02_w62_without_credentials_the_workers_of_a_lan_pool_stay_on_this_machine_and_a_warning_says_so() -> None:
    async def main() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            async with headgate.WorkerPool(spawn=1, discovery=headgate.LanDiscovery()) as pool:
                assert pool.workers()[0].address.startswith("127.0.0.1:")
                assert await jobs.add(1, 2) == 3
        assert any("127.0.0.1" in str(one.message) for one in caught)

    run(main, patience=60)


def test_w02_w50_the_options_of_the_seed_run() -> None:
    options = WorkerOptions(
        channel=ChannelOptions(keepalive_time_ms=10_000, keepalive_timeout_ms=5_000, max_concurrent_streams=50),
        max_connection_idle_ms=300_000,
    )

    def worker(*tags: str, credentials: Any = None) -> LocalWorker:
        return LocalWorker(*tags, credentials=credentials, options=options)

    async def main() -> None:
        async with headgate.WorkerPool(spawn=1, worker=worker) as pool:
            assert pool.workers()[0].metadata.options == options.channel
            assert await jobs.add(1, 2) == 3

    run(main)


def test_w02_w70_the_credentials_of_the_seed_run(tmp_path: Path) -> None:
    authority = Authority()
    ca_path, key_path, cert_path = authority.good.write(tmp_path, authority.cert)

    async def main() -> None:
        creds = headgate.WorkerCredentials.from_files(
            ca_path=ca_path, key_path=key_path, cert_path=cert_path, mutual=True
        )
        async with headgate.WorkerPool(spawn=2, credentials=creds):
            assert await jobs.add(1, 2) == 3
        async with headgate.WorkerPool(spawn=1, discovery=headgate.LocalDiscovery(), credentials=creds) as pool:
            assert pool.workers()[0].metadata.secure
            assert await jobs.add(1, 2) == 3

    run(main)
