"""`serve()`: the page of this program, from a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from headgate.core.clock import clock
from headgate.core.redaction import log_exception
from headgate.errors import HeadgateError, InvalidArgument
from headgate.observe.listeners import Listener
from headgate.workers.protocol.addresses import is_loopback, is_wildcard

if TYPE_CHECKING:
    from headgate.dashboard.sources import Source

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~-]{16,}")
"""What stands in the fragment of an address and in a header as it is."""
_CLOSING: Final = 1
_AT_ONCE: Final = 128
"""Connections that are taken before the first of them is looked at: each is a file of this program."""


class Dashboard:
    """A page that is served until `close`, or until the program ends."""

    def __init__(self, source: Source, listener: Listener, token: str, hosts: Iterable[str]) -> None:
        self.token: str = token
        host, port = listener.getsockname()[:2]
        self.port: int = port
        if is_wildcard(host):  # a browser needs one address of those, and the page answers to names that it knows
            host = "::1" if ":" in host else "127.0.0.1"
        shown = f"[{host}]" if ":" in host else host
        self.url: str = f"http://{shown}:{port}/#token={token}"
        """The address of the page, with the token in its fragment. Whoever has it can see and act."""
        self._source, self._listener, self._hosts = source, listener, (shown, *hosts)
        self._server: Any = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        _served.add(self)
        self._thread = threading.Thread(target=self._run, name="headgate dashboard", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # see Listener
                runner.run(self._serve())
        except BaseException as error:
            if self._started.is_set():
                log_exception("headgate.dashboard", "the page cannot be served any more")
            self._failure = error
        finally:
            self._started.set()
            self._listener.close()

    async def _serve(self) -> None:
        import uvicorn

        from headgate.dashboard import connections
        from headgate.dashboard.app import make_app
        from headgate.dashboard.security import Guard

        app, hub = make_app(self._source, Guard(self.token, self._hosts))
        await self._source.open(hub.changed)
        config = uvicorn.Config(
            app,
            http=connections.PageConnection,
            backlog=_AT_ONCE,
            access_log=False,
            proxy_headers=False,
            log_config=None,
            lifespan="off",
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=_CLOSING,
            h11_max_incomplete_event_size=32 * 1024,
        )
        self._server = uvicorn.Server(config)
        self._hub, self._loop = hub, asyncio.get_running_loop()
        self._started.set()
        try:
            with _without_chatter():
                await self._server.serve(sockets=[self._listener])
        finally:
            hub.close()
            await self._source.close()

    def close(self) -> None:
        """Stop serving, after open pages were told how it ends. Twice is fine."""
        if self._tell_end():
            self._server.should_exit = True
            self._thread.join()

    def end(self) -> None:
        """Because the program ends: tell open pages how, and wait for that. The thread ends with the program."""
        if self._tell_end():
            until = clock.now() + _CLOSING
            while self._hub.streams and clock.now() < until:
                clock.sleep(0.01)

    def _tell_end(self) -> bool:
        """Have open pages told the last state. False: nobody is served any more."""
        if self._server is None or not self._thread.is_alive():
            return False
        try:
            self._source.finish()
        except Exception:
            log_exception("headgate.dashboard", "the last look failed")
        try:
            self._loop.call_soon_threadsafe(self._hub.close)
        except RuntimeError:  # its loop has just ended
            return False
        return True

    def abandon(self) -> None:
        """In a forked child: close what nobody would answer."""
        self._listener.abandon()

    def wait(self) -> None:
        """Return when the page is not served any more."""
        while self._thread.is_alive():
            self._thread.join(0.5)  # so that Ctrl-C is noticed

    def __enter__(self) -> Dashboard:  # noqa: PYI034 - nobody derives from it
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Dashboard on port {self.port}>"  # without its token: reprs are logged


def serve(
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    token: str | None = None,
    hosts: Iterable[str] = (),
    insecure: bool = False,
    source: Source | None = None,
) -> Dashboard:
    """Serve the page of this program, from a thread of its own; ``print(serve().url)``.

    `port` 0 is any free one. `token` is drawn unless given. `hosts` are names by which the page may be called besides
    localhost. Beyond this machine the page and its token travel in the clear, so that needs ``insecure=True``; better
    put a proxy with TLS, or ssh, in front of it. `source`: other programs than this one.
    """
    _check_installed()
    if not isinstance(port, int) or not 0 <= port <= 65_535:
        raise InvalidArgument(f"port must be a whole number from 0 to 65535, got {port!r}", remedy="0 is any free one.")
    try:
        is_local = is_loopback(host)
    except OSError as error:
        raise InvalidArgument(f"host {host!r} is not known: {error.strerror or error}") from error
    if not is_local and not insecure:
        raise InvalidArgument(
            f"host {host!r} is beyond this machine, and the page has no TLS: its token could be read on the way",
            remedy="Use `ssh -L`, or a proxy with TLS; or insecure=True (on the command line --insecure) if nobody "
            "else can reach this network.",
        )
    chosen = clock.token() if token is None else token.strip()
    if not _TOKEN.fullmatch(chosen):
        raise InvalidArgument("token must have at least 16 characters, and only letters, digits and . _ ~ -")
    from headgate.dashboard.sources import ThisProgram

    try:
        made = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise HeadgateError(
            f"the page cannot be served on {host}:{port}: {error.strerror or error}",
            remedy="Choose another port; 0 is any free one.",
        ) from error
    listener = Listener(fileno=made.detach())
    return Dashboard(source or ThisProgram(), listener, chosen, hosts)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Drop what uvicorn logs below warnings in this thread. Its level is left alone: the program may have a uvicorn."""
    log, here = logging.getLogger("uvicorn.error"), threading.get_ident()

    def matters(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.thread != here

    log.addFilter(matters)
    try:
        yield
    finally:
        log.removeFilter(matters)


def _check_installed() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise HeadgateError(
            "the page needs starlette and uvicorn, which are not installed", remedy="pip install 'headgate[dashboard]'"
        ) from error


_served: weakref.WeakSet[Dashboard] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for page in list(_served):
        page.end()


def _forked() -> None:
    for page in list(_served):
        page.abandon()
    _served.clear()


os.register_at_fork(after_in_child=_forked)
