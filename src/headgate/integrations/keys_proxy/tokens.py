"""Who a client is: its token, and the tenant that is bound to it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

from headgate.errors import InvalidArgument, InvalidType

SHORTEST = 16
"""Characters that a token has at least: a shorter one can be guessed."""


@dataclass(frozen=True, slots=True)
class Client:
    """What a token allows: to work for this tenant, and for any other if it `names_tenant` in a header."""

    tenant: str
    names_tenant: bool = False


class Tokens:
    """Finds the client that a token belongs to. How long that takes says nothing about the tokens."""

    def __init__(self, clients: Mapping[str, Client | str], *, salt: str) -> None:
        """`clients`: by token, a client or the name of its tenant. `salt`: a text that nobody else knows."""
        self._salt = salt.encode()[:64]
        self._clients: dict[bytes, tuple[bytes, Client]] = {}
        for number, (token, client) in enumerate(clients.items(), 1):
            made = Client(client) if isinstance(client, str) else client
            if not isinstance(made, Client):
                raise InvalidType(f"a token stands for a Client or a tenant, got {type(client).__name__}")
            secret = _checked(token, f"token {number}")
            self._clients[self._digest(secret)] = (secret, made)
        if not self._clients:
            raise InvalidArgument("there is no token, so nobody could use the proxy", remedy="Give each client one.")

    def client(self, candidates: Iterable[bytes]) -> Client | None:
        """Return the client of the first of these tokens that is known.

        A digest with a salt is looked up: what is compared is not what the client sent, so that nobody learns a token
        from the time of failures, character by character.
        """
        for candidate in candidates:
            known = self._clients.get(self._digest(candidate))
            if known is not None and compare_digest(known[0], candidate):
                return known[1]
        return None

    def _digest(self, token: bytes) -> bytes:
        return blake2b(token, key=self._salt, digest_size=32).digest()

    def __repr__(self) -> str:
        return f"<Tokens for {len(self._clients)} clients>"


def _checked(token: object, name: str) -> bytes:
    """A token as bytes of a header. Errors do not show it."""
    if not isinstance(token, str):
        raise InvalidType(f"{name} must be a string, got {type(token).__name__}")
    if len(token) < SHORTEST:
        raise InvalidArgument(
            f"{name} has {len(token)} characters, and could be guessed: at least {SHORTEST} are needed",
            remedy="Make one with `openssl rand -hex 24`.",
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument(f"{name} has characters that no header may have", remedy="Use letters and digits.")
    return token.encode()
