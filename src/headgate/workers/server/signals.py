"""Signals of a worker process: what they call while it serves. Processes that routines fork do not get them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class _Held(threading.local):
    mask: set[signal.Signals | int] | None = None


_held = _Held()
_guarded = False
_handled: set[int] = set()


@contextmanager
def handled(loop: asyncio.AbstractEventLoop, handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Context manager in which signals call these functions on the loop. Outside the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in handlers}
    handle(loop, handlers)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            _handled.discard(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def handle(loop: asyncio.AbstractEventLoop, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
    """Have signals call these functions on the loop, and keep them from processes that are forked."""
    global _guarded
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
        _handled.add(number)
    if not _guarded:
        _guarded = True
        os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_signals)


def _hold_signals() -> None:
    """Block signals before a routine forks, until the new process has handlers of its own."""
    if _handled:
        _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _release_signals() -> None:
    if _held.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)
        _held.mask = None


def _forget_signals() -> None:
    """Remove the handlers of the worker in a process that a routine forked.

    With them a signal to that process would not end it, and would be reported to the worker's loop through a descriptor
    that both have.
    """
    if _handled:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _handled.clear()
    _release_signals()
