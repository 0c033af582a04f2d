"""A small HTTP server for `/metrics`, `/healthz` and `/readyz` of a process that has no page.

It answers nothing else, and nobody who came by a name that is not known: a page of a stranger whose name points to this
machine (DNS rebinding) learns nothing.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from headgate.core.clock import clock
from headgate.core.redaction import log_exception
from headgate.observe.prometheus import CONTENT_TYPE

_TEXT = "text/plain; charset=utf-8"
WITHIN: Final = 10.0
"""Seconds that a connection has in all: to ask, and to read the answer."""
MOST_CONNECTIONS: Final = 32
"""Each has a thread."""


class MetricsServer:
    """Serves from a thread of its own until `close`. Port 0: any free one, see `port`."""

    def __init__(
        self, host: str, port: int, metrics: Callable[[], bytes], ready: Callable[[], bool], *names: str
    ) -> None:
        """`names`: host names by which it may be called, besides addresses and localhost."""
        known = {"localhost", host.lower(), *(name.lower() for name in names)}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                try:
                    status, body, kind = self._answer()
                except Exception:
                    log_exception("headgate.observe", "answering %s failed", self.path)
                    status, body, kind = 500, b"this could not be found out; see the log\n", _TEXT
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def _answer(self) -> tuple[int, bytes, str]:
                if not _is_known(self.headers.get("Host", ""), known):
                    return 403, b"unknown host; start the worker with --metrics-allow-host to add it\n", _TEXT
                if self.path == "/metrics":
                    return 200, metrics(), CONTENT_TYPE
                if self.path == "/healthz":
                    return 200, b"ok\n", _TEXT
                if self.path == "/readyz":
                    return (200, b"ready\n", _TEXT) if ready() else (503, b"not ready\n", _TEXT)
                return 404, b"only /metrics, /healthz and /readyz are here\n", _TEXT

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: a scrape every few seconds is no news."""

        self._server = _Server((host, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="headgate metrics", daemon=True
        )
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._server.deadlines)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """Ends connections whose time is over, and takes no more than there may be."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.deadlines: dict[socket.socket, float] = {}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.deadlines) >= MOST_CONNECTIONS:
            super().shutdown_request(request)
            return
        self.deadlines[request] = clock.now() + WITHIN
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by the thread that takes connections, several times a second."""
        now = clock.now()
        for request, deadline in list(self.deadlines.items()):
            if deadline < now:
                try:
                    request.shutdown(socket.SHUT_RDWR)  # which wakes the thread that reads or writes
                except OSError:  # it has ended just now
                    pass

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else the client has gone
            log_exception("headgate.observe", "answering who asks for metrics failed")


def _is_known(header: str, known: set[str]) -> bool:
    host = header.rsplit(":", 1)[0] if not header.endswith("]") else header
    host = host.strip("[]").lower()
    if host in known:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
