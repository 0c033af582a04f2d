"""Workers as forks of a fork server: what that must not change, and what happens when there is none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from headgate import WorkerPool
from headgate.testing import no_leaks
from tests.integration.workers import attack_jobs
from tests.support.workers import jobs
from tests.support.workers.support import (
    alive,
    all_ready,
    descendants,
    keeper_client_of,
    parent_of,
    pids,
    run,
    script,
    until,
)

pytestmark = [
    pytest.mark.cold,
    pytest.mark.skipif(sys.platform != "linux", reason="fork servers need Linux's subreapers"),
]


def keeper_of(pool: WorkerPool) -> int:
    """The pid of the keeper."""
    return keeper_client_of(pool).pid


def fork_server_of(pool: WorkerPool) -> int | None:
    """The child of the keeper that is no worker."""
    children = {pid for pid in descendants(keeper_of(pool)) if parent_of(pid) == keeper_of(pool)}
    return next(iter(children - set(pids(pool))), None)


def test_w33_workers_are_children_of_the_keeper_and_lead_sessions_of_their_own() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=3) as pool:
            await all_ready(pool, 3)
            assert {parent_of(pid) for pid in pids(pool)} == {keeper_of(pool)}
            server = fork_server_of(pool)
            assert server is not None
            assert not set(pids(pool)) & {server}
            found = await asyncio.gather(*(attack_jobs.surroundings("PATH") for _ in range(9)))
            assert {sid for _, _, sid, _ in found} == set(pids(pool))
        await until(lambda: not alive(server))

    with no_leaks(grace=3):
        run(main)


def test_w26_a_fork_server_that_is_killed_is_no_loss() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2) as pool:
            server = fork_server_of(pool)
            assert server is not None
            os.kill(server, signal.SIGKILL)
            await until(lambda: not alive(server))
            assert await jobs.add(1, 2) == 3
            for _ in range(2):
                gone = pids(pool)[0]
                os.kill(gone, signal.SIGKILL)
                await until(lambda gone=gone: gone not in pids(pool))
                await all_ready(pool, 2)
            assert await jobs.add(1, 2) == 3
            assert fork_server_of(pool) not in (None, server), "a new one makes those that come later"

    with no_leaks(grace=3):
        run(main)


def test_w26_a_fork_server_stopped_at_work_does_not_hold_the_exit() -> None:
    """Workers that were asked for and are not there yet need not be waited for."""

    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            server = fork_server_of(pool)
            assert server is not None
            os.kill(server, signal.SIGSTOP)
            growing = asyncio.create_task(pool.resize(3))
            await asyncio.sleep(0.1)
            assert not growing.done()
            growing.cancel()
            await asyncio.gather(growing, return_exceptions=True)
            before = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - before < 4
        assert not alive(server)

    with no_leaks(grace=3):
        run(main)


def test_w20_a_later_worker_has_the_environment_path_and_folder_of_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1) as pool:
            assert (await attack_jobs.surroundings("HEADGATE_TEST_LATER"))[0] is None
            first = pids(pool)[0]
            monkeypatch.setenv("HEADGATE_TEST_LATER", "now")
            monkeypatch.chdir(tmp_path)
            (tmp_path / "headgate_later.py").write_text("def answer(): return 42")
            monkeypatch.syspath_prepend(tmp_path)
            os.kill(first, signal.SIGKILL)
            await until(lambda: pids(pool) != [first])
            await all_ready(pool, 1)
            value, folder, _, _ = await attack_jobs.surroundings("HEADGATE_TEST_LATER")
            assert (value, folder) == ("now", str(tmp_path))
            assert await attack_jobs.call_later() == 42

    run(main)


def test_w20_a_routine_may_open_a_pool_of_its_own() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=1):
            assert await attack_jobs.opens_a_pool() == 42

    with no_leaks(grace=3):
        run(main)


CODE = """
    import asyncio, os
    import headgate
    from tests.support.workers import jobs
    async def main():
        async with headgate.WorkerPool(spawn=2) as pool:
            pids = set(await asyncio.gather(*(jobs.pid() for _ in range(10))))
            print(len(pids), await jobs.add(1, 2))
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    "site",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        pytest.param(
            "import os, sys; any('begin_with_fork_server' in word for word in sys.orig_argv) and os._exit(3)",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "import sys; 'begin_with_fork_server' in ''.join(sys.orig_argv) and sys.modules.update(gc=None)",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "import os, sys; "
            "any('begin_with_fork_server' in word for word in sys.orig_argv) and os.kill(os.getpid(), 9)",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["threads", "exits", "breaks", "killed"],
)
def test_w26_where_no_fork_server_can_be_workers_start_by_themselves(tmp_path: Path, site: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(tmp_path / "site"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = script(textwrap.dedent(CODE), tmp_path, PYTHONPATH=path)
    assert (done.stdout, done.returncode) == ("2 3\n", 0), done.stderr


def test_w26_what_the_interpreter_writes_at_its_start_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; print('from the site', file=sys.stderr)")
    path = os.pathsep.join([str(tmp_path / "site"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = script(textwrap.dedent(CODE), tmp_path, PYTHONPATH=path)
    assert (done.stdout, done.returncode) == ("2 3\n", 0)
    assert done.stderr.count("from the site") == 2, "once here, once in the fork server"


def test_w33_each_worker_draws_its_own_numbers() -> None:
    async def main() -> None:
        async with WorkerPool(spawn=2):
            found = await asyncio.gather(*(attack_jobs.draws() for _ in range(8)))
            assert len(set(found)) == 8

    run(main)
