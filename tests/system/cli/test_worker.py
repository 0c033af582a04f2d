"""`headgate worker`: ready line, calls, signals, limits of its life, wrong calls."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import cli_jobs
import pytest

import headgate
from headgate.errors import HeadgateError
from headgate.workers.client.inspection import inspect
from headgate.workers.protocol.transport import dial
from headgate.workers.server.service import HEALTH
from tests.support.cli.support import (
    HERE,
    PATIENCE,
    begins,
    calling,
    command,
    environment,
    run,
    run_here,
    until,
    worker,
)

pytestmark = pytest.mark.integration


async def ended(begun: asyncio.Task[Any]) -> BaseException:
    """The exception of a task."""
    await asyncio.wait([begun], timeout=PATIENCE)
    error = begun.exception()
    assert error is not None
    return error


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_p04_systemd_is_told_when_a_worker_takes_calls_and_when_it_stops(tmp_path: Path, abstract: bool) -> None:
    name = f"@headgate-{os.getpid()}-notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(PATIENCE)
        with worker(tmp_path, "--none", env={"NOTIFY_SOCKET": name}) as started:
            assert manager.recv(4096) == b"READY=1"
            gate = tmp_path / "gate"

            async def main() -> None:
                async with calling(started.metadata) as call:
                    began = tmp_path / "began"
                    running = await begins(call, cli_jobs.wait_for, str(gate), began=began)
                    started.signal(signal.SIGTERM)
                    assert await asyncio.to_thread(manager.recv, 4096) == b"STOPPING=1"
                    assert not running.done(), "its calls finish after that"
                    gate.write_text("go")
                    await running

            asyncio.run(main())
            assert started.wait() == 0
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(4096)


def test_p04_a_service_manager_that_is_not_there_keeps_no_worker_from_its_work(tmp_path: Path) -> None:
    with worker(tmp_path, "--none", env={"NOTIFY_SOCKET": str(tmp_path / "nobody")}) as started:
        started.until_logged("READY=1 could not be sent to the service manager")
        started.signal(signal.SIGTERM)
        assert started.wait() == 0


def test_c01_a_worker_prints_one_json_line_when_it_is_ready_and_logs_to_stderr(tmp_path: Path) -> None:
    with worker(tmp_path, "--none", "--tag", "gpu", "--tag", "big") as started:
        told = started.ready
        assert set(told) == {"uid", "address", "pid", "version", "secure", "tags", "namespace"}
        assert told["pid"] == started.process.pid
        assert told["version"] == headgate.__version__
        assert told["tags"] == ["big", "gpu"]
        assert told["secure"] is False
        assert told["namespace"] is None
        assert told["address"].startswith("unix:/")
        folder = Path(told["address"].removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700

        async def main() -> None:
            async with calling(started.metadata) as call:
                assert await call(cli_jobs.double, 21) == 42

        asyncio.run(main())
        started.signal(signal.SIGTERM)
        assert started.wait() == 0
        assert started.process.stdout is not None
        assert started.process.stdout.read() == "", "data on stdout, logs on stderr"
    log = started.log.read_text("utf-8")
    assert f"worker {told['uid']} (pid {told['pid']}) listens on {told['address']}" in log
    assert "has stopped after 1 tasks" in log
    assert not folder.exists()


def test_c01_a_tcp_worker_tells_the_port_it_got_and_answers_health_checks(tmp_path: Path) -> None:
    with worker(tmp_path, "--none", "--bind", "127.0.0.1:0") as started:
        host, _, port = started.ready["address"].rpartition(":")
        assert (host, int(port) > 0) == ("127.0.0.1", True)

        async def main() -> None:
            async with dial(started.ready["address"], session=False) as channel:
                assert await channel.unary_unary(HEALTH + "Check")(b"", timeout=PATIENCE) == b"\x08\x01"
            found = await inspect(started.metadata, None, timeout=PATIENCE)
            assert found.admitted
            assert found.load is not None
            assert (found.load.uid, found.load.pid) == (started.ready["uid"], started.process.pid)
            assert (found.load.running, found.load.finished, found.load.stopping) == (0, 0, False)
            assert abs(found.load.clock_offset) < PATIENCE

        asyncio.run(main())


def test_c01_the_first_signal_lets_calls_finish_and_the_exit_code_is_0(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with worker(tmp_path, "--none") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                running = await begins(call, cli_jobs.wait_for, str(go), began=tmp_path / "began")
                started.signal(signal.SIGTERM)
                await asyncio.to_thread(started.until_logged, "got SIGTERM: it finishes 1 calls")
                found = await inspect(started.metadata, None, timeout=PATIENCE)
                assert found.load is not None
                assert (found.admitted, found.load.stopping, found.load.running) == (False, True, 1)
                go.touch()
                assert await running == "seen"

        asyncio.run(main())
        assert started.wait() == 0


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGTERM, signal.SIGINT, 143),
        (signal.SIGINT, signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, signal.SIGTERM, 143, marks=pytest.mark.soak),
    ],
)
def test_c01_the_second_signal_cancels_calls(
    first: signal.Signals, second: signal.Signals, code: int, tmp_path: Path
) -> None:
    with worker(tmp_path, "--none") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                running = await begins(call, cli_jobs.nap, 10 * PATIENCE, began=tmp_path / "began")
                started.signal(first)
                await asyncio.to_thread(started.until_logged, f"got {first.name}")
                started.signal(second)
                assert isinstance(await ended(running), HeadgateError)

        asyncio.run(main())
        assert started.wait() == code
    assert "cancels 1 calls" in started.log.read_text("utf-8")


def test_c01_calls_that_take_longer_than_the_grace_are_cancelled(tmp_path: Path) -> None:
    with worker(tmp_path, "--none", "--grace", "0.1") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                running = await begins(call, cli_jobs.nap, 10 * PATIENCE, began=tmp_path / "began")
                started.signal(signal.SIGTERM)
                assert isinstance(await ended(running), HeadgateError)

        asyncio.run(main())
        assert started.wait() == 143


def test_c01_threads_of_routines_do_not_keep_a_worker_from_its_end(tmp_path: Path) -> None:
    with worker(tmp_path, "--none") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                await call(cli_jobs.hold_the_thread, 10 * PATIENCE)

        asyncio.run(main())
        started.signal(signal.SIGINT)
        assert started.wait() == 0


def test_c01_a_worker_ends_after_so_many_tasks(tmp_path: Path) -> None:
    with worker(tmp_path, "--none", "--max-tasks", "3") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                assert [await call(cli_jobs.double, number) for number in range(3)] == [0, 2, 4]

        asyncio.run(main())
        assert started.wait() == 0
    assert "it has executed 3 tasks, and max_tasks is 3" in started.log.read_text("utf-8")


def test_c01_a_worker_that_reached_its_tasks_finishes_what_it_has(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with worker(tmp_path, "--none", "--max-tasks", "1") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                running = await begins(call, cli_jobs.wait_for, str(go), began=tmp_path / "began")
                assert await call(cli_jobs.double, 1) == 2
                await asyncio.to_thread(started.until_logged, "max_tasks is 1")
                assert started.process.poll() is None
                go.touch()
                assert await running == "seen"

        asyncio.run(main())
        assert started.wait() == 0


def test_c01_a_worker_ends_above_so_much_memory(tmp_path: Path) -> None:
    with worker(tmp_path, "--none", "--max-memory", "400M") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                assert await call(cli_jobs.hoard, 400 * 2**20) == 1

        asyncio.run(main())
        assert started.wait() == 0
    assert "max_memory is 400 MB" in started.log.read_text("utf-8")


def test_c01_a_worker_without_clients_ends(tmp_path: Path) -> None:
    with worker(tmp_path, "--none", "--orphan-timeout", "0.2") as started:
        assert started.wait() == 0
    assert "no client was connected for 0.2 s" in started.log.read_text("utf-8")


def test_c01_modules_are_imported_before_it_is_ready(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import sys; print('imported', sys.argv, file=sys.stderr)", "utf-8")
    with worker(tmp_path, "--none", "--module", "loud", env={"PYTHONPATH": str(tmp_path)}) as started:
        assert "imported ['']" in started.log.read_text("utf-8")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no GPU')", "SystemExit: no GPU"),
        ("def (", "SyntaxError"),
    ],
)
def test_c01_a_module_that_cannot_be_imported_is_exit_code_1_with_the_cause(
    source: str, cause: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(source, "utf-8")
    ran = run("worker", "--none", "--module", "broken", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"headgate worker: module broken cannot be imported: {cause}" in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--bind", "127.0.0.1"),
        ("--bind", "127.0.0.1:99999"),
        ("--bind", "::1:0"),
        ("--bind", ":80"),
        ("--socket", ""),
        ("--socket", "x", "--bind", "127.0.0.1:0"),
        ("--lan", "--local"),
        ("--lan", "--socket", "x"),
        ("--lan",),
        ("--advertise", "10.0.0.7"),
        ("--lan", "--advertise", "0.0.0.0", "--insecure"),
        ("--lan", "--advertise", "here/there", "--insecure"),
        ("--lan", "--bind", "0.0.0.0:0"),
        ("--insecure", "--cert-dir", "x"),
        ("--cert-dir", "nowhere"),
        ("--concurrency", "0"),
        ("--concurrency", "many"),
        ("--max-tasks", "-1"),
        ("--max-memory", "lots"),
        ("--max-memory", "0"),
        ("--orphan-timeout", "nan"),
        ("--grace", "-1"),
        ("--tag", " "),
        ("--namespace", ""),
        ("--nonsense",),
        ("stray",),
    ],
)
def test_c01_a_wrong_call_of_worker_is_exit_code_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = run_here("worker", *arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert "headgate worker: " in ran.stderr
    assert "Traceback" not in ran.stderr


def test_c01_beyond_loopback_a_worker_asks_for_certificates_or_for_insecure(tmp_path: Path) -> None:
    ran = run("worker", "--none", "--bind", "0.0.0.0:0", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "whoever can connect can run code here: give --cert-dir DIR" in ran.stderr
    assert "or give --insecure" in ran.stderr
    assert "=" not in ran.stderr, "it speaks of options, not of arguments of Python"
    with worker(tmp_path, "--none", "--bind", "0.0.0.0:0", "--insecure") as started:
        assert started.ready["secure"] is False


def test_c01_a_port_in_use_is_exit_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = run("worker", "--none", "--bind", f"127.0.0.1:{taken.getsockname()[1]}", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "cannot listen on 127.0.0.1" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_c01_a_worker_whose_line_nobody_reads_works_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        command("worker", "--none", "--socket", str(path)), stdout=writer, stderr=subprocess.PIPE, env=environment()
    ) as process:
        os.close(writer)
        try:
            until(path.exists)
            metadata = headgate.WorkerMetadata("w", f"unix:{path}", 0, headgate.__version__)

            until(lambda: asyncio.run(inspect(metadata, None, timeout=PATIENCE)).admitted)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        assert b"the line for stdout could not be written" in process.stderr.read()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_c01_a_worker_whose_log_cannot_be_written_works_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    arguments = command("worker", "--none", "--socket", str(path))
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=full, cwd=HERE, env=environment(), text=True
        )
    with process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            metadata = headgate.WorkerMetadata(ready["uid"], ready["address"], ready["pid"], headgate.__version__)

            async def main() -> None:
                async with calling(metadata) as call:
                    assert await call(cli_jobs.double, 21) == 42

            asyncio.run(main())
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_c01_a_wrong_call_whose_complaint_cannot_be_written_is_exit_code_2() -> None:
    with open("/dev/full", "wb") as full:
        for arguments in (["worker", "--bind", "0.0.0.0:0"], ["worker", "--bind", "nonsense"], ["wroker"]):
            assert subprocess.run(command(*arguments), stderr=full, env=environment(), check=False).returncode == 2


def test_c01_a_socket_in_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    ran = run("worker", "--none", "--socket", str(open_to_all / "socket"))
    assert ran.returncode == 1
    assert "others can write to" in ran.stderr


def test_worker_process_serves_in_a_program_of_yours(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, json, headgate\n"
        "async def main():\n"
        "    worker = headgate.WorkerProcess('a', backpressure=lambda context: context.active_task_count > 100)\n"
        "    await worker.serve(lambda metadata: print(json.dumps([metadata.uid, metadata.address]), flush=True))\n"
        "    print(worker.cancelled, worker.signal)\n"
        "asyncio.run(main())\n",
        "utf-8",
    )
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        uid, address = json.loads(process.stdout.readline())
        metadata = headgate.WorkerMetadata(uid, address, process.pid, headgate.__version__)

        async def main() -> None:
            async with calling(metadata) as call:
                assert await call(headgate.routine(len), "four") == 4

        asyncio.run(main())
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == f"0 {signal.SIGINT.value}\n"
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"host": ""}, "host must be a name"),
        ({"port": -1}, "port must be a whole number"),
        ({"port": True}, "port must be a whole number"),
        ({"socket": "/x/y", "host": "127.0.0.1"}, "cannot be given together"),
        ({"grace": 0}, "grace must be"),
        ({"orphan_timeout": 0}, "orphan_timeout must be"),
        ({"max_tasks": 0}, "max_tasks must be"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"backpressure": 3}, "backpressure must be callable"),
        ({"insecure": "yes"}, "insecure must be bool"),
        ({"max_task": 3}, "max_tasks"),
    ],
)
def test_worker_process_checks_its_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        headgate.WorkerProcess(**arguments)


def test_worker_process_ends_when_serving_is_cancelled(tmp_path: Path) -> None:
    async def main() -> str:
        ready: asyncio.Future[headgate.WorkerMetadata] = asyncio.get_running_loop().create_future()
        made = headgate.WorkerProcess()
        serving = asyncio.ensure_future(made.serve(ready.set_result))
        metadata = await ready
        async with calling(metadata) as call:
            running = await begins(call, cli_jobs.nap, 10 * PATIENCE, began=tmp_path / "began")
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            assert isinstance(await ended(running), HeadgateError)
        assert made.cancelled == 1
        with pytest.raises(RuntimeError, match="make another"):
            await made.serve()
        return metadata.address.removeprefix("unix:")

    assert not os.path.exists(asyncio.run(main()))


def test_c01_a_worker_runs_so_many_tasks_at_the_same_time(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with worker(tmp_path, "--none", "--concurrency", "1") as started:

        async def main() -> None:
            async with calling(started.metadata) as call:
                first = await begins(call, cli_jobs.wait_for, str(go), began=tmp_path / "first")
                second = asyncio.ensure_future(call(cli_jobs.wait_for, str(go), str(tmp_path / "second")))
                async with asyncio.timeout(PATIENCE):
                    load = (await inspect(started.metadata, None)).load
                    while load is None or load.running < 2:
                        load = (await inspect(started.metadata, None)).load
                assert not (tmp_path / "second").exists()
                go.touch()
                assert [await first, await second] == ["seen", "seen"]

        asyncio.run(main())


def test_c01_programs_find_a_worker_by_its_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with worker(tmp_path, "--namespace", "mine") as started:

        async def main() -> None:
            async with headgate.WorkerPool(discovery=headgate.LocalDiscovery("mine"), quorum_timeout=PATIENCE) as pool:
                assert await cli_jobs.double(4) == 8
                assert [one.uid for one in pool.workers()] == [started.ready["uid"]]

        asyncio.run(main())
