"""Who may ask what of the page. Pure.

- **Host**: only names that are known. A stranger's page whose name was made to point here (DNS rebinding) comes with
  the stranger's name.
- **Origin**: every request that is no GET must say that it comes from this very page, so no other page can send one.
- **Token**: everything that has data or acts wants ``Authorization: Bearer <token>``. The token stands in the fragment
  of the address, which browsers do not send, and is no cookie, because all ports of localhost share cookies.
- The page may load nothing but its own script and style, and cannot be put into a frame.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
LOCAL: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
OPEN: Final = frozenset({"/", "/app.js", "/plots.js", "/app.css", "/icon.svg", "/healthz", "/readyz"})
"""What anybody on this machine may see: the page without data."""


class Refusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    reason: str


class Guard:
    """Decides whether a request may be answered."""

    def __init__(self, token: str, hosts: Iterable[str] = ()) -> None:
        self._token = token.encode()
        self._hosts = LOCAL | {name.lower() for name in hosts}

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why this request is refused; None: it may be answered. Names of headers in lower case."""
        host = headers.get("host", "").lower()
        if _name(host) not in self._hosts:
            return Refusal(421, "this name is not known here; start the dashboard with --allow-host to add it")
        if method not in ("GET", "HEAD") and not self._is_own(headers.get("origin", ""), host):
            return Refusal(403, "only the page itself may do that: the Origin is another one, or missing")
        if path in OPEN and method in ("GET", "HEAD"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            return Refusal(401, "the token is missing or wrong: open the address that was printed")
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        return origin.lower() in (f"http://{host}", f"https://{host}") and bool(host)


def _name(host: str) -> str:
    """Return a Host header without its port; "" if it is none."""
    found = _HOST.fullmatch(host)
    return found[1] if found else ""
