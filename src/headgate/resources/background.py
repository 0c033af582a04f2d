"""Calls functions one after the other in a thread of its own, which lives as long as there is something to call.

The thread of a store must not run code of users: it renews a lease. So what a store brings is reported from here.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from headgate.core.redaction import log_exception


class Background:
    """A queue of calls and at most one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], object]] = deque()
        self._running = False

    def call(self, function: Callable[[], object]) -> None:
        """Call this soon, after what was given before."""
        with self._lock:
            self._calls.append(function)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    return
                function = self._calls.popleft()
            try:
                function()
            except Exception:
                log_exception("headgate.resources", "a report from %s failed", self._name)
            del function

    def after_fork(self) -> None:
        """Begin anew in a forked child, which has no such thread."""
        self._lock = threading.Lock()
        self._calls.clear()
        self._running = False


reports: Background = Background("headgate-reports")
"""For what users are told of other processes."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=reports.after_fork)
