"""W42: how much memory a large argument takes on its way."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.workers.support import script

MB = 2**20

# What some processes have together, as the kernel counts it: memory that several map is divided among them, and memory
# files that are open and that nobody maps are added. The first sum, and at the end the greatest.
SAMPLER = """
import os, select, sys

def field(text, name):
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name))

def total(pids):
    pss = shmem = 0
    inodes = {}
    for pid in pids:
        try:
            text = open(f"/proc/{pid}/smaps_rollup").read()
            pss += field(text, "Pss:")
            shmem += field(text, "Pss_Shmem:")
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                target = os.readlink(path)
                if "memfd:" in target or target.endswith("(deleted)"):
                    stat = os.stat(path)
                    inodes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
        except OSError:
            pass
    return pss + max(0, sum(inodes.values()) - shmem)

pids = sys.argv[1:]
most = first = total(pids)
print(first, flush=True)
while not select.select([sys.stdin], [], [], 0.002)[0]:
    most = max(most, total(pids))
print(most, flush=True)
"""

MEASURED = """
import asyncio, gc, os, subprocess, sys
import headgate
from tests.support.workers import jobs
from tests.integration.workers import size_jobs
from tests.support.workers.support import descendants

SIZE = {size}

async def measure(routine, check):
    async with headgate.WorkerPool(spawn=1, lazy=False):
        await jobs.echo(bytes(1000))
        gc.collect()
        pids = [os.getpid(), *descendants(os.getpid())]
        sampler = subprocess.Popen(
            [sys.executable, "-ISs", "-c", {sampler!r}, *map(str, pids)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        first = int(sampler.stdout.readline())
        value = size_jobs.payload(SIZE)
        result = await routine(value)
        assert check(value, result)
        del value, result
        sampler.stdin.close()
        most = int(sampler.stdout.readline())
        sampler.wait()
        return most - first

async def main():
    # In a thread: to digest 256 MB holds the loop of a worker for a second on a busy machine, and it says so.
    print(await measure(size_jobs.describe_in_a_thread, lambda value, told: size_jobs.digest(value) == told))
    print(await measure(jobs.echo, lambda value, back: value == back))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.parametrize("switch", ["1", "0"], ids=["shared memory", "chunks"])
def test_w42_memory_is_three_times_the_argument_and_four_times_the_echo(switch: str, tmp_path: Path) -> None:
    """All processes together, the caller's own object included."""
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("this kernel does not tell the memory of a process in /proc/self/smaps_rollup (Linux 4.14 does)")
    size = 256 * MB
    done = script(MEASURED.format(size=size, sampler=SAMPLER), tmp_path, patience=120, HEADGATE_SHARED_MEMORY=switch)
    assert (done.returncode, done.stderr) == (0, "")
    one_way, echo = map(int, done.stdout.split())
    slack = 12 * MB  # credit in both directions, and what gRPC holds
    assert one_way >= size, "it was measured"
    assert one_way <= 3 * size + slack, f"{one_way / size:.2f} times"
    assert echo <= 4 * size + slack, f"{echo / size:.2f} times"
