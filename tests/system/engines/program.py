"""A program with a pool on an engine, that another process kills or whose engine is killed. It tells what it does.

    python program.py ray ADDRESS FOLDER
    python program.py dask ADDRESS FOLDER

It prints the pids of its workers, makes calls until there is a file FOLDER/go, and prints how many of them succeeded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle

sys.path.insert(0, str(Path(__file__).parents[3]))

from headgate import WorkerPool
from tests.system.engines import engine_jobs


def placement(engine: str, address: str) -> Any:
    if engine == "ray":
        from headgate import RayPlacement

        return RayPlacement(num_workers=2, num_cpus=0.1, address=address, orphan_timeout=1)
    from distributed import Client

    from headgate import DaskPlacement

    return DaskPlacement(Client(address), 2, orphan_timeout=1)


def tell(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(engine: str, address: str, folder: Path) -> None:
    async with WorkerPool(placement=placement(engine, address)) as pool:
        running = asyncio.create_task(engine_jobs.until_there(str(folder / "go")))
        tell([view.pid for view in pool.workers()])
        calls = 0
        while not (folder / "go").exists():
            assert await engine_jobs.add(calls, 1) == calls + 1
            calls += 1
            await asyncio.sleep(0.02)
        finished = await running
        more = await asyncio.gather(*(engine_jobs.add(number, 1) for number in range(20)))
        assert more == list(range(1, 21))
        tell({"calls": calls, "finished_on": finished})


if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(engine_jobs)
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
