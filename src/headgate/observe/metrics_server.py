"""A small HTTP server for `/metrics`, `/healthz` and `/readyz` of a process that has no page.

It answers nothing else, and nobody who came by a name that is not known: a page of a stranger whose name points to this
machine (DNS rebinding) learns nothing.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headgate.core.redaction import log_exception

_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Serves from a thread of its own until `close`. Port 0: any free one, see `port`."""

    def __init__(
        self, host: str, port: int, metrics: Callable[[], bytes], ready: Callable[[], bool], *names: str
    ) -> None:
        """`names`: host names by which it may be called, besides addresses and localhost."""
        known = {"localhost", host.lower(), *(name.lower() for name in names)}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10

            def do_GET(self) -> None:
                if not _is_known(self.headers.get("Host", ""), known):
                    self._answer(403, b"unknown host\n")
                elif self.path == "/metrics":
                    try:
                        self._answer(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
                    except Exception:
                        log_exception("headgate.observe", "the metrics could not be made")
                        self._answer(500, b"the metrics could not be made; see the log\n")
                elif self.path == "/healthz":
                    self._answer(200, b"ok\n")
                elif self.path == "/readyz":
                    self._answer(*((200, b"ready\n") if ready() else (503, b"not ready\n")))
                else:
                    self._answer(404, b"only /metrics, /healthz and /readyz are here\n")

            def _answer(self, status: int, body: bytes, kind: str = _TEXT) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: a scrape every few seconds is no news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="headgate metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


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
