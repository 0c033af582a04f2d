"""The command `headgate` as a process, and workers that it runs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from headgate import RoundRobinLoadBalancer, WorkerMetadata
from headgate.cli.main import main
from headgate.workers.client.dispatcher import Dispatcher
from headgate.workers.routines import ACTIVE

HERE = Path(__file__).parents[2] / "system" / "cli"
PATIENCE = 60.0
"""Seconds after which something that did not happen counts as a failure, on the busiest machine."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headgate", *arguments]


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which nothing is set that changes what is printed."""
    left_out = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if name not in left_out} | dict(given or {})


def importable(folder: Path) -> str:
    """A PYTHONPATH by which a program finds the modules of a folder. Not all of `sys.path`: tests add to that."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def run(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
    """Run a command to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=environment(env),
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
        check=False,
    )


class Ended(NamedTuple):
    """What a command left, as of a process."""

    returncode: int
    stdout: str
    stderr: str


def run_here(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command in this process: where only what it says is asked, an interpreter would be a waste."""
    before, level, path = signal.getsignal(signal.SIGTERM), logging.getLogger("headgate").level, list(sys.path)
    with (
        mock.patch.dict(os.environ, environment(env), clear=True),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        chdir(cwd or Path.cwd()),
    ):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, before)
            sys.path[:] = path  # else workers of other tests would have the folders of this one
            logging.getLogger("headgate").setLevel(level)  # some commands show what is logged in another way
    return Ended(code, out.getvalue(), err.getvalue())


class Worker(NamedTuple):
    """A worker that `headgate worker` runs."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    """The line that it printed."""
    log: Path

    @property
    def metadata(self) -> WorkerMetadata:
        told = self.ready
        return WorkerMetadata(told["uid"], told["address"], told["pid"], told["version"], secure=told["secure"])

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until_logged(self, text: str) -> None:
        """Wait until its log has this text."""
        until(lambda: text in self.log.read_text("utf-8"), f"{text!r} in {self.log.read_text('utf-8')}")


@contextmanager
def started(
    folder: Path, *arguments: str, cwd: Path = HERE, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """Start a command, wait for its first line, and end it. Its log is a file in this folder."""
    log = folder / f"log-{time.monotonic_ns()}"
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command(*arguments),
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            cwd=cwd,
            env=environment(env),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text("utf-8")
            yield process, line, log
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE)


@contextmanager
def worker(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Worker]:
    """Start a worker, wait until it is ready, and end it. Its log is a file in this folder."""
    with started(folder, "worker", *arguments, env=env) as (process, line, log):
        yield Worker(process, json.loads(line), log)


@contextmanager
def killed_at_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive a test that has failed."""
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def until(condition: Any, what: object = "it") -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class _Pool:
    """A pool of one worker that somebody else has started."""

    def __init__(self, metadata: WorkerMetadata) -> None:
        self.dispatcher = Dispatcher(RoundRobinLoadBalancer())
        self.dispatcher.connections.set_members([metadata])

    def __open_pool__(self) -> _Pool:
        return self

    def __dispatcher__(self) -> Dispatcher:
        return self.dispatcher


@asynccontextmanager
async def calling(metadata: WorkerMetadata) -> AsyncIterator[Any]:
    """Call routines on one worker: ``await call(cli_jobs.double, 2)``."""
    pool = _Pool(metadata)

    async def call(routine: Any, *args: Any) -> Any:
        async with asyncio.timeout(PATIENCE):
            return await routine(*args)

    token = ACTIVE.set(pool)
    try:
        yield call
    finally:
        ACTIVE.reset(token)
        await pool.dispatcher.close("the test is over")


async def begins(call: Any, routine: Any, *arguments: Any, began: Path) -> asyncio.Task[Any]:
    """Start a call, and return when it runs on its worker."""
    task = asyncio.ensure_future(call(routine, *arguments, str(began)))
    await asyncio.to_thread(until, lambda: began.exists() or task.done())
    assert not task.done(), task
    return task
