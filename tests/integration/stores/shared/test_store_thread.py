"""G23 and G06: the thread of a store."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from headgate.errors import PoolClosed
from headgate.stores.shared.store_thread import StoreThread

PATIENCE = 30.0


def test_g23_callbacks_run_in_order_in_one_thread_of_their_own() -> None:
    thread = StoreThread("test-store")
    assert not [one for one in threading.enumerate() if one.name == "test-store"], "it starts at the first use"
    ran: list[tuple[int, str]] = []
    for number in range(100):
        thread.post(lambda n=number: ran.append((n, threading.current_thread().name)))
    assert thread.close(lambda: ran.append((100, "last")), PATIENCE)
    assert ran == [*((number, "test-store") for number in range(100)), (100, "last")]
    assert thread.close(lambda: ran.append((101, "never")), PATIENCE)
    assert len(ran) == 101
    with pytest.raises(PoolClosed):
        thread.post(lambda: None)


def test_g23_a_thread_that_was_never_used_closes_at_once() -> None:
    thread = StoreThread("test-store")
    assert thread.close(lambda: pytest.fail("nothing was opened"), 0.0)


def test_g23_a_callback_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    thread = StoreThread("test-store")
    ran = threading.Event()
    thread.post(lambda: 1 / 0)
    thread.post(ran.set)
    assert ran.wait(PATIENCE)
    assert thread.close(lambda: None, PATIENCE)
    assert "ZeroDivisionError" in caplog.text


def test_g23_callbacks_have_the_loop_of_the_thread() -> None:
    thread = StoreThread("test-store")
    fired = threading.Event()
    thread.post(lambda: asyncio.get_running_loop().call_later(0.01, fired.set))
    assert fired.wait(PATIENCE)
    assert thread.close(lambda: None, PATIENCE)


def test_g23_closing_from_a_callback_ends_the_thread() -> None:
    thread = StoreThread("test-store")
    closed = threading.Event()
    thread.post(lambda: thread.close(closed.set, PATIENCE))
    assert closed.wait(PATIENCE)
    assert thread.close(lambda: None, PATIENCE)


def test_g23_closing_waits_no_longer_than_it_is_told() -> None:
    thread = StoreThread("test-store")
    release = threading.Event()
    thread.post(lambda: release.wait(PATIENCE))
    assert not thread.close(lambda: None, 0.01)
    release.set()
    assert thread.close(lambda: None, PATIENCE)


@pytest.mark.integration
def test_g06_a_forked_child_has_a_thread_of_its_own() -> None:
    code = """
import os, threading, warnings
warnings.simplefilter("ignore")
from headgate.stores.shared.store_thread import StoreThread
thread = StoreThread("test-store")
busy, release = threading.Event(), threading.Event()
thread.post(lambda: (busy.set(), release.wait(30)))
thread.post(lambda: os.write(1, b"parent %d\\n" % os.getpid()))
busy.wait(30)
pid = os.fork()
if not pid:
    thread.post(lambda: os.write(1, b"child %d\\n" % os.getpid()))
    assert thread.close(lambda: None, 30)
    os._exit(0)
os.waitpid(pid, 0)
release.set()
assert thread.close(lambda: None, 30)
print(pid, os.getpid())
"""
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=PATIENCE, text=True)
    child, parent, numbers = ran.stdout.splitlines()
    assert numbers.split() == [child.removeprefix("child "), parent.removeprefix("parent ")]
