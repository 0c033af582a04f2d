"""Makes clients of SDKs whose requests are given keys of a pool."""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from headgate.errors import InvalidType
from headgate.integrations.httpx import CALL_OPTIONS, RotatingSyncTransport, RotatingTransport
from headgate.resources.model import Resource
from headgate.resources.pool import ResourcePool

WAITS_FOR = 60.0
"""Seconds after which a request of such a client makes no further attempt and waits no longer."""
MOST_REFUSALS = 50
"""Attempts of one request: many, because in a batch over limited keys most attempts may be refused."""


TransportT = TypeVar("TransportT", bound=RotatingTransport | RotatingSyncTransport)
ClientT_co = TypeVar("ClientT_co", covariant=True)


class ClientMaker(Generic[TransportT, ClientT_co]):
    """Makes clients of one class of an SDK, with transports that give requests keys of a pool. Is called."""

    def __init__(self, sdk: str, name: str, transport: type[TransportT], *, header: str) -> None:
        """`sdk` is the module whose class `name` is made; keys go into `header`."""
        self._sdk = sdk
        self._name = name
        self._kind = transport
        self._header = header

    def __call__(
        self,
        pool: ResourcePool[str] | Resource[str] | TransportT,
        *,
        wait_for_capacity: bool | None = None,
        wait_for_cooldown: bool | None = None,
        max_attempts: int | None = None,
        within: float | None = None,
        **options: Any,
    ) -> ClientT_co:
        """Make a client whose requests are given keys of the pool, or go with the one key that is passed.

        With a key, as a task of a TaskPool, `headgate map` or an operation of `run` is given one: a request is sent
        once, with that key. What its answer says about limits and tokens counts for the key, and the SDK's error is
        for whoever gave the key. Make such a client where you use it: it costs 0.2 ms, and all of them share their
        connections. A client of a pool does the same inside a task that has its key from that pool.

        With a pool: while all keys are limited or in use, a request waits for one, so that a batch goes through: as
        with `wait_for_capacity=True, within=60` and up to 50 refusals of keys; errors of the server are tried again as
        often as the pool's `max_attempts` says. These options, and the others of calls that `RotatingTransport` takes
        (`deadline`, `retry_delay`, `tags`, `exclude`, `affinity`), mean the same as for `ResourcePool.run`. With
        `wait_for_capacity=False` a request does not wait, and the SDK raises its RateLimitError.

        All other options are those of the SDK's client, without api_key and http_client. `max_retries` is 0 if it is
        not given: the pool tries again by itself. Keys go to the client's base_url and nowhere else.
        """
        waits = {"wait_for_capacity": wait_for_capacity, "wait_for_cooldown": wait_for_cooldown}
        every = {**waits, "max_attempts": max_attempts, "within": within, **options}
        return cast("ClientT_co", self._made(pool, every))

    def __repr__(self) -> str:
        return f"<maker of {self._sdk}.{self._name} clients: call it with a ResourcePool, or with a key of one>"

    def _made(self, pool: Any, options: dict[str, Any]) -> Any:
        """Make the client. `options` are those of calls (None: as usual) and those of the SDK."""
        for taken in ("api_key", "http_client"):
            if taken in options:
                raise InvalidType(
                    f"client() takes no option {taken!r}: keys come from the pool, by a transport of its own",
                    remedy="Pass a RotatingTransport instead of the pool to set it up yourself.",
                )
        try:
            module = import_module(self._sdk)
        except ImportError as error:
            raise InvalidType(f"{self._sdk} is not installed", remedy=f"pip install {self._sdk}") from error
        made_by = getattr(module, self._name)
        for_calls = {key: value for key, value in options.items() if key in CALL_OPTIONS and value is not None}
        for_sdk = {key: value for key, value in options.items() if key not in CALL_OPTIONS}
        _check_names(for_sdk, made_by)
        transport = _transport_of(pool, self._kind, self._header, for_calls)
        # The SDK would try again what the pool has tried with every key.
        chosen = {"max_retries": 0, **for_sdk}
        is_async = self._kind is RotatingTransport
        their_httpx = module.DefaultAsyncHttpxClient if is_async else module.DefaultHttpxClient
        made = made_by(api_key="headgate", http_client=their_httpx(transport=transport), **chosen)
        transport.keep_to(made.base_url)
        return made


def _check_names(for_sdk: dict[str, Any], made_by: Any) -> None:
    known = inspect.signature(made_by).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return  # it decides itself
    public = [one for one in known if one not in ("api_key", "http_client") and not one.startswith("_")]
    for name in for_sdk:
        if name not in known:
            near = difflib.get_close_matches(name, [*public, *CALL_OPTIONS], 1)
            options = f"Options are {', '.join(sorted(CALL_OPTIONS))}, and those of {made_by.__name__}."
            raise InvalidType(
                f"client() takes no option {name!r}", remedy=f"Did you mean {near[0]}?" if near else options
            )


def _transport_of(pool: Any, kind: type[Any], header: str, for_calls: dict[str, Any]) -> Any:
    if isinstance(pool, ResourcePool):
        transport = kind(pool, header=header, **_waiting(for_calls))
        if "max_attempts" not in for_calls:
            transport.bound_errors()
        return transport
    if isinstance(pool, Resource):
        if for_calls:
            raise InvalidType(
                f"client() takes no option {next(iter(for_calls))!r} with a single key: "
                "the task or call that was given the key has it",
                remedy="Leave it out, or pass the ResourcePool.",
            )
        return kind(pool, header=header)
    if not isinstance(pool, kind):
        raise InvalidType(
            f"client() takes a ResourcePool, the Resource that a task was given, or a {kind.__name__}, "
            f"got {type(pool).__name__}",
            remedy="Make a pool from your keys: ResourcePool([...]).",
        )
    if for_calls:
        raise InvalidType(
            f"client() takes no option {next(iter(for_calls))!r} with a transport, which has its own",
            remedy=f"Pass it to {kind.__name__}(...).",
        )
    return pool


def _waiting(for_calls: dict[str, Any]) -> dict[str, Any]:
    """Options of calls that wait for a key, where the caller did not say otherwise."""
    chosen = dict(for_calls)
    if "wait_for_capacity" not in chosen and "wait_for_cooldown" not in chosen:
        chosen["wait_for_capacity"] = True
    if chosen.get("wait_for_capacity") or chosen.get("wait_for_cooldown"):
        chosen.setdefault("max_attempts", MOST_REFUSALS)
        if "deadline" not in chosen:
            chosen.setdefault("within", WAITS_FOR)
    return chosen
