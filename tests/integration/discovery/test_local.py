"""LocalDiscovery: files that workers and pools of one machine find each other by."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import DiscoveryFailed, DiscoveryTimeout, InvalidArgument, InvalidType, LocalDiscovery, UnknownWorker
from headgate.discovery import inotify, local, local_files
from headgate.testing import check_discovery, no_leaks
from tests.support.discovery.support import PATIENCE, end, publishing, subscribed, worker

pytestmark = pytest.mark.integration
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux'")


@pytest.fixture(params=["inotify", "polled"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With inotify and without."""
    if request.param == "polled":
        monkeypatch.setattr(inotify, "watch", lambda path, changed: None)
        monkeypatch.setattr(local, "_POLL", 0.05)
    elif not sys.platform.startswith("linux"):
        pytest.skip("inotify is Linux'")
    return str(request.param)


def folder_in(runtime: Path) -> Path:
    """The one directory of a namespace."""
    [folder] = [path for path in runtime.iterdir() if path.is_dir()]
    return folder


def files(runtime: Path) -> list[str]:
    return sorted(path.name for path in runtime.rglob("*")) if runtime.exists() else []


def test_w65_local_discovery_conforms(watched: str, runtime: Path) -> None:
    check_discovery(LocalDiscovery)
    assert files(runtime) == []


def test_w65_local_discovery_conforms_where_inotify_has_no_instance_left(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify, "_instance_of", lambda loop: None)
    monkeypatch.setattr(local, "_POLL", 0.02)
    check_discovery(LocalDiscovery)


# -- construction -----------------------------------------------------------------------------------------------------


def test_w65_an_equal_namespace_means_equal_discoveries_and_none_a_unique_one() -> None:
    assert LocalDiscovery("a") == LocalDiscovery("a", poll_interval=1)
    assert hash(LocalDiscovery("a")) == hash(LocalDiscovery("a"))
    assert LocalDiscovery("a") != LocalDiscovery("b")
    assert LocalDiscovery() != LocalDiscovery()
    assert LocalDiscovery("a") != "a"
    unique = LocalDiscovery()
    assert pickle.loads(pickle.dumps(unique)) == unique
    assert repr(LocalDiscovery("a")) == "LocalDiscovery('a')"


@pytest.mark.parametrize("namespace", ["", "  ", "a\nb", "x" * 201])
def test_a_namespace_that_is_none_is_refused(namespace: str) -> None:
    with pytest.raises(InvalidArgument, match="namespace"):
        LocalDiscovery(namespace)


def test_w61a_a_negative_poll_interval_is_refused() -> None:
    for wrong in (-1, 0, float("nan")):
        with pytest.raises(InvalidArgument, match="poll_interval"):
            LocalDiscovery("a", poll_interval=wrong)
    with pytest.raises(InvalidType):
        LocalDiscovery("a", poll_interval="1")  # type: ignore[arg-type]
    with pytest.raises(InvalidType):
        LocalDiscovery(7)  # type: ignore[arg-type]


def test_w60_the_discovery_is_one_of_the_port() -> None:
    assert isinstance(LocalDiscovery(), headgate.DiscoveryLike)
    assert headgate.workers.LocalDiscovery is headgate.LocalDiscovery is headgate.discovery.LocalDiscovery


# -- several processes ------------------------------------------------------------------------------------------------


async def _killed(discovery: LocalDiscovery, count: int) -> list[float]:
    """How long a subscriber takes to learn that a publisher was killed, each time."""
    taken = []
    for number in range(count):
        with publishing("space", f"w-{number}") as process:
            async with subscribed(discovery) as events:
                assert await events.types(1) == [("added", f"w-{number}")]
                process.kill()
                killed = time.perf_counter()
                assert await events.types(1) == [("dropped", f"w-{number}")]
                taken.append(time.perf_counter() - killed)
    return taken


def test_w61_a_killed_publisher_is_noticed_at_once(watched: str, runtime: Path, scale: float) -> None:
    taken = asyncio.run(_killed(LocalDiscovery("space"), max(2, int(20 * scale))))
    # 20 ms is the goal on an idle machine; a machine with other work to do is given ten times that.
    assert min(taken) < (0.2 if watched == "inotify" else 1.0), taken
    assert files(runtime) == [], "the subscriber has removed what was left"


def test_w61_a_poll_interval_is_used_beside_inotify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local._Watching, "_changed", lambda *about: None)  # an inotify that says nothing
    taken = asyncio.run(_killed(LocalDiscovery("space", poll_interval=0.05), 1))
    assert taken[0] < PATIENCE


def test_w61_a_stopped_publisher_is_no_killed_one() -> None:
    async def main() -> None:
        with publishing("space", "w-1") as process:
            async with subscribed(LocalDiscovery("space")) as events:
                assert await events.types(1) == [("added", "w-1")]
                process.send_signal(signal.SIGSTOP)
                async with LocalDiscovery("space").publisher as publisher:
                    await publisher.publish("worker-added", worker("w-2"))
                    assert await events.types(1) == [("added", "w-2")]
                    process.kill()
                    assert await events.types(1) == [("dropped", "w-1")]

    asyncio.run(main())


def test_w61_there_is_no_limit_of_workers(scale: float) -> None:
    count = int(3000 * scale**1.3) + 100

    async def main() -> None:
        discovery = LocalDiscovery("space")
        async with discovery.publisher as publisher:
            early = discovery.subscribe()
            reading = asyncio.ensure_future(anext(early))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            for number in range(count):
                await publisher.publish("worker-added", worker(f"w-{number}"))
            assert (await reading).type == "worker-added"
            async with subscribed(discovery) as events:
                assert len(set(await events.types(count))) == count
            await early.aclose()  # type: ignore[attr-defined]
        async with subscribed(discovery) as events:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await anext(events.stream)

    asyncio.run(main())


def test_w65_one_drop_retires_also_from_another_process() -> None:
    async def main() -> None:
        discovery = LocalDiscovery("space")
        with publishing("space", "w-1") as process:
            async with subscribed(discovery) as events, discovery.publisher as publisher:
                assert await events.types(1) == [("added", "w-1")]
                await publisher.publish("worker-dropped", worker("w-1"))
                assert await events.types(1) == [("dropped", "w-1")]
                with pytest.raises(UnknownWorker, match="w-1 is not announced in namespace 'space'"):
                    await publisher.publish("worker-updated", worker("w-1"))
                end(process)
                await publisher.publish("worker-added", worker("w-2"))
                assert await events.types(1) == [("added", "w-2")]

    asyncio.run(main())


def test_w65_the_exit_of_a_re_announcer_leaves_the_worker() -> None:
    async def main() -> None:
        discovery = LocalDiscovery("space")
        async with subscribed(discovery) as events:
            async with discovery.publisher as publisher:
                await publisher.publish("worker-added", worker("w-1"))
                assert await events.types(1) == [("added", "w-1")]
                for ended in (end, subprocess.Popen.kill):
                    with publishing("space", "w-1") as process:
                        assert await events.types(1) == [("updated", "w-1")]
                        ended(process)
                await publisher.publish("worker-added", worker("w-2"))
                assert await events.types(1) == [("added", "w-2")]
            assert sorted(await events.types(2)) == [("dropped", "w-1"), ("dropped", "w-2")]

    asyncio.run(main())


@pytest.mark.parametrize("first", ["owner", "joiner"])
def test_w61a_owner_or_joiner_may_exit_first(first: str, runtime: Path) -> None:
    async def main() -> None:
        async with subscribed(LocalDiscovery("space")) as events:
            with publishing("space", "w-1") as owner:
                assert await events.types(1) == [("added", "w-1")]
                with publishing("space", "w-2") as joiner:
                    assert await events.types(1) == [("added", "w-2")]
                    order = [(owner, "w-1"), (joiner, "w-2")]
                    for process, uid in order if first == "owner" else order[::-1]:
                        end(process)
                        assert await events.types(1) == [("dropped", uid)]

    asyncio.run(main())
    assert files(runtime) == []


def test_w61a_rapid_reuse_of_a_namespace(runtime: Path, scale: float) -> None:
    rounds = int(200 * scale**1.5) + 20

    async def main() -> None:
        discovery = LocalDiscovery("space")
        async with subscribed(discovery) as events:
            for number in range(rounds):
                async with discovery.publisher as publisher:
                    await publisher.publish("worker-added", worker("w-1", pid=number))
                    event = await events.next()
                    assert (event.type, event.metadata.pid) == ("worker-added", number)
                assert await events.types(1) == [("dropped", "w-1")]

    asyncio.run(main())
    assert files(runtime) == []


def test_w61a_publishers_of_one_namespace_race_for_it(runtime: Path) -> None:
    """Each of them enters, announces and leaves all the time, and each time the directory may be removed."""

    async def publish(number: int) -> None:
        for _ in range(15):
            async with LocalDiscovery("space").publisher as publisher:
                await publisher.publish("worker-added", worker(f"w-{number}"))
                await publisher.publish("worker-updated", worker(f"w-{number}", pid=2))

    threads = [threading.Thread(target=lambda number=number: asyncio.run(publish(number))) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(runtime) == []


# -- what others do to the files --------------------------------------------------------------------------------------


def test_w61a_a_directory_removed_from_outside_breaks_no_exit(watched: str, runtime: Path) -> None:
    async def main() -> None:
        discovery = LocalDiscovery("space")
        async with subscribed(discovery) as events, discovery.publisher as publisher:
            await publisher.publish("worker-added", worker("w-1"))
            assert await events.types(1) == [("added", "w-1")]
            shutil.rmtree(runtime)
            assert await events.types(1) == [("dropped", "w-1")]
            await publisher.publish("worker-added", worker("w-1"))
            assert await events.types(1) == [("added", "w-1")]
            shutil.rmtree(runtime)
        async with discovery.publisher as publisher:
            await publisher.publish("worker-added", worker("w-3"))
            shutil.rmtree(runtime)

    asyncio.run(main())


def test_w61a_a_process_whose_directory_was_removed_ends_in_silence(runtime: Path) -> None:
    with publishing("space", "w-1") as process:
        shutil.rmtree(runtime)
        end(process)


def test_w61a_a_wedged_lock_is_a_bounded_timeout(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOCK_LIMIT", 0.2)

    async def main() -> None:
        discovery = LocalDiscovery("space")
        async with subscribed(discovery) as events, discovery.publisher as publisher:
            await publisher.publish("worker-added", worker("w-1"))
            assert await events.types(1) == [("added", "w-1")]
            folder = folder_in(runtime)
            wedge = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(wedge, fcntl.LOCK_EX)
                for news in ("worker-added", "worker-updated", "worker-dropped"):
                    with pytest.raises(TimeoutError, match=r"namespace 'space' is locked.*within 0.2 s") as caught:
                        await publisher.publish(news, worker("w-1"))  # type: ignore[arg-type]
                    assert isinstance(caught.value, DiscoveryTimeout)
                    assert str(folder) in caught.value.remedy
                await publisher.__aexit__(None, None, None)  # in spite of the lock its workers are gone
                assert await events.types(1) == [("dropped", "w-1")]
            finally:
                os.close(wedge)

    asyncio.run(main())
    asyncio.run(_sweep())
    assert files(runtime) == []


async def _sweep() -> None:
    async with LocalDiscovery().publisher:
        pass


def test_stale_files_of_any_namespace_are_swept_by_the_next_publisher(runtime: Path) -> None:
    with publishing("one", "w-1") as process, publishing("two", "w-2") as other:
        process.kill()
        process.wait()
        asyncio.run(_sweep())
        assert [name for name in files(runtime) if name.startswith("workers-one")] == []
        assert len(files(runtime)) == 3, "the directory of the one that lives, its record and its holder"
        end(other)
    assert files(runtime) == []


def test_garbage_is_ignored(watched: str, runtime: Path) -> None:
    async def main() -> None:
        discovery = LocalDiscovery("space")
        async with subscribed(discovery) as events, discovery.publisher as publisher:
            await publisher.publish("worker-added", worker("w-1"))
            assert await events.types(1) == [("added", "w-1")]
            folder = folder_in(runtime)
            [record] = folder.glob("*.json")
            good = record.read_bytes()
            key = local_files.key_of("w-2")
            planted: list[bytes] = [
                b"",
                b"{",
                b"[]",
                good,
                good.replace(b"w-1", b"w-2")[:-3],
                b"x" * 100_000,
                b"\xff" * 9,
            ]
            for number, content in enumerate(planted):
                (folder / f"{key}.json").write_bytes(content)
                (folder / f"{number:032x}.json").write_bytes(content)
            (folder / "notes.txt").write_text("hello")
            (folder / f"{99:032x}.json").mkdir()
            os.mkfifo(folder / f"{98:032x}.json")
            os.symlink("/etc/passwd", folder / f"{97:032x}.json")
            os.symlink(record, folder / f"{key}.tmp")
            os.rename(folder / f"{key}.tmp", folder / f"{key}.json")
            async with subscribed(discovery) as late:
                assert await late.types(1) == [("added", "w-1")]
                await publisher.publish("worker-added", worker("w-3"))
                assert await late.types(1) == [("added", "w-3")]
                assert await events.types(1) == [("added", "w-3")]
            await publisher.publish("worker-added", worker("w-2"))
            assert await events.types(1) == [("added", "w-2")]
            assert record.read_bytes() == good, "the link was replaced, and what it named was not written to"

    asyncio.run(main())


def _publish(discovery: LocalDiscovery) -> None:
    async def main() -> None:
        async with discovery.publisher as publisher:
            await publisher.publish("worker-added", worker())

    asyncio.run(main())


def test_a_planted_symbolic_link_is_not_followed(runtime: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    runtime.symlink_to(elsewhere)
    with pytest.raises(DiscoveryFailed, match="symbolic link"):
        _publish(LocalDiscovery("space"))
    runtime.unlink()
    runtime.mkdir(0o700)
    (runtime / local_files.Folder.of("space").name).symlink_to(elsewhere)
    with pytest.raises(DiscoveryFailed, match="symbolic link"):
        _publish(LocalDiscovery("space"))
    with pytest.raises(DiscoveryFailed, match="symbolic link"):
        asyncio.run(_first(LocalDiscovery("space")))
    assert list(elsewhere.iterdir()) == []


async def _first(discovery: LocalDiscovery) -> Any:
    async with subscribed(discovery) as events:
        return await events.next()


def test_a_directory_that_others_can_enter_is_refused(runtime: Path) -> None:
    runtime.mkdir(0o755)
    with pytest.raises(DiscoveryFailed, match="0755, so others can enter it"):
        _publish(LocalDiscovery("space"))
    with pytest.raises(DiscoveryFailed, match="XDG_RUNTIME_DIR"):
        asyncio.run(_first(LocalDiscovery("space")))
    runtime.rmdir()
    runtime.write_text("")
    with pytest.raises(DiscoveryFailed, match="is no directory"):
        _publish(LocalDiscovery("space"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(runtime: Path) -> None:
    runtime.mkdir(0o700)
    os.chown(runtime, 12345, -1)
    with pytest.raises(DiscoveryFailed, match="belongs to user 12345"):
        _publish(LocalDiscovery("space"))


def test_without_a_runtime_directory_the_one_for_temporary_files_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", "relative", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        assert local_files.runtime_directory() == str(tmp_path / f"headgate-{os.getuid()}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(DiscoveryFailed, match="No such file"):
        local_files.runtime_directory()


def test_a_process_that_can_open_no_more_files_keeps_its_workers(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        discovery = LocalDiscovery("space", poll_interval=0.02)
        async with subscribed(discovery) as events, discovery.publisher as publisher:
            await publisher.publish("worker-added", worker("w-1"))
            assert await events.types(1) == [("added", "w-1")]
            await publisher.publish("worker-added", worker("w-1"))
            looks: list[str] = []
            looked = asyncio.Event()

            def full(path: str, flags: int, folder: int | None = None) -> int:
                looks.append(path)
                if len(looks) == 3:
                    looked.set()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            with monkeypatch.context() as patched:
                patched.setattr(local_files.held, "open", full)
                waiting = asyncio.ensure_future(events.next())
                await looked.wait()
            assert (await waiting).type == "worker-updated"

    asyncio.run(main())


# -- loops, forks, descriptors ----------------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@on_linux
def test_w61a_a_holder_that_cannot_be_made_leaves_nothing(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local_files.Folder.of("unmade")
    folder.make()
    opened, others = local_files.held.open, []

    def locked_at_once(path: str, *given: Any) -> int:
        file = opened(path, *given)
        others.append(os.open(f"/proc/self/fd/{file}", os.O_RDONLY))
        fcntl.flock(others[-1], fcntl.LOCK_SH)
        return file

    with folder.opened() as file:
        before = open_files()
        with pytest.raises(FileNotFoundError):
            local_files.Holder(file, "/nonexistent")
        with monkeypatch.context() as patch:
            patch.setattr(local_files.held, "open", locked_at_once)
            with pytest.raises(BlockingIOError, match=r"\.live was locked by another process"):
                local_files.Holder(file, folder.base)
        for other in others:
            os.close(other)
        assert (open_files(), os.listdir(folder.path)) == (before, [])
    folder.tidy(leave=True)


def test_several_subscribers_on_several_loops() -> None:
    discovery = LocalDiscovery("space")
    seen, told = threading.Semaphore(0), []

    async def listen() -> None:
        async def one() -> None:
            async with subscribed(discovery) as events:
                first = await events.types(1)
                seen.release()
                told.append(first + await events.types(1))

        await asyncio.gather(*(one() for _ in range(5)))

    async def publish() -> None:
        async with discovery.publisher as publisher:
            await publisher.publish("worker-added", worker())
            for _ in range(15):
                assert await asyncio.to_thread(seen.acquire, timeout=PATIENCE)

    threads = [threading.Thread(target=lambda: asyncio.run(listen())) for _ in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(publish())
    for thread in threads:
        thread.join()
    assert told == [[("added", "w-1"), ("dropped", "w-1")]] * 15


@on_linux
def test_one_inotify_instance_serves_all_subscriptions_of_a_loop() -> None:
    def instances() -> int:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                pass
        return sum("inotify" in link for link in links)

    async def main() -> None:
        streams = [LocalDiscovery(f"space-{number % 50}").subscribe() for number in range(300)]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert instances() == 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        assert instances() == 0

    asyncio.run(main())


def test_a_subscription_that_is_dropped_frees_its_descriptors(runtime: Path) -> None:
    async def main() -> None:
        async with no_leaks():
            stream = LocalDiscovery("space").subscribe()
            waiting = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            waiting.cancel()
            del stream, waiting
            await asyncio.sleep(0)
            gc.collect()

    asyncio.run(main())
    assert files(runtime) == []


def test_a_forked_child_does_not_keep_the_workers_of_its_parent_alive() -> None:
    program = """
import asyncio, os, sys, time
from headgate import LocalDiscovery, WorkerMetadata
async def main():
    publisher = LocalDiscovery("space").publisher
    await publisher.__aenter__()
    await publisher.publish("worker-added", WorkerMetadata("w-1", "127.0.0.1:1", 1, "1"))
    if os.fork() == 0:
        await publisher.__aexit__(None, None, None)  # which must not drop the parent's worker
        print("forked", os.getpid(), flush=True)
        time.sleep(1000)
    time.sleep(1000)
asyncio.run(main())
"""

    async def main(process: subprocess.Popen[str]) -> None:
        async with subscribed(LocalDiscovery("space")) as events:
            assert await events.types(1) == [("added", "w-1")]
            process.kill()
            assert await events.types(1) == [("dropped", "w-1")]

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        try:
            asyncio.run(main(process))
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


@pytest.fixture(scope="module")
def uvloop() -> Any:
    """The module, after it has made the pipe that it keeps."""
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))
    return uvloop


def test_subscribing_on_uvloop(uvloop: Any) -> None:

    async def main() -> None:
        discovery = LocalDiscovery("space")
        async with subscribed(discovery) as events:
            async with discovery.publisher as publisher:
                await publisher.publish("worker-added", worker())
                assert await events.types(1) == [("added", "w-1")]
            assert await events.types(1) == [("dropped", "w-1")]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_a_publisher_may_announce_what_it_likes_and_is_told_what_not() -> None:
    async def main() -> None:
        async with LocalDiscovery("space").publisher as publisher:
            for wrong in ("worker-lost", "added", None, 1):
                with pytest.raises(InvalidArgument, match="type must be one of 'worker-added'"):
                    await publisher.publish(wrong, worker())  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                await publisher.publish("worker-added", worker(extra={"x": "x" * 20_000}))
            await publisher.publish("worker-dropped", worker("nobody"))
            await publisher.publish("worker-added", worker(extra={"x": "x" * 16_000}))
            odd = replace(worker("../../etc/passwd"), address="unix:/x")
            await publisher.publish("worker-added", odd)
            async with subscribed(LocalDiscovery("space")) as events:
                assert {(await events.next()).metadata.uid for _ in range(2)} == {"w-1", odd.uid}

    asyncio.run(main())


def test_w61a_a_runtime_directory_that_is_removed_holds_up_no_loop(runtime: Path) -> None:
    """As it happens to /run/user/UID when a user logs out."""

    async def main() -> None:
        async def listen() -> None:
            async for _ in LocalDiscovery("gone").subscribe():
                pass

        listening = asyncio.ensure_future(listen())
        await asyncio.sleep(0.05)
        shutil.rmtree(runtime.parent)
        for _ in range(20):
            await asyncio.sleep(0.01)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening

    asyncio.run(main())
