"""What each thread is doing."""

from __future__ import annotations

import linecache
import threading
import time

from headgate.core.threads import stacks

PROGRAM = """
def numbers():
    for number in range(50):
        yield number

def computes_until(told):
    while not told.is_set():
        for number in numbers():
            pass
"""


class SlowSource:
    """A loader whose files are read slowly, as from a network."""

    def get_source(self, name: str) -> str:
        time.sleep(0.01)
        return PROGRAM


def test_w34_the_stack_of_a_thread_that_computes_is_whole() -> None:
    """While one stack is formatted, for which files are read, the generators of another thread are suspended, and a
    suspended generator has no caller."""
    told = threading.Event()
    threads = []
    for number in range(3):
        name = f"slow_program_{number}"
        names = {"__name__": name, "__loader__": SlowSource()}
        exec(compile(PROGRAM, f"{name}.py", "exec"), names)
        threads.append(threading.Thread(target=names["computes_until"], args=(told,)))
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            found = stacks()
            linecache.clearcache()
            assert all("in computes_until" in found[thread.ident or 0] for thread in threads)
    finally:
        told.set()
        for thread in threads:
            thread.join()
