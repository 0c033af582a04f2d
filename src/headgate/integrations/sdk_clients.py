"""Makes clients of SDKs whose requests are given keys of a pool."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from headgate.errors import InvalidType
from headgate.integrations.httpx import RotatingTransport
from headgate.resources.pool import ResourcePool


def make_client(sdk: str, name: str, header: str, kind: type[Any], pool: Any, options: dict[str, Any]) -> Any:
    """Make the client `name` of an SDK, with a transport of this kind that writes keys into `header`."""
    for taken in ("api_key", "http_client"):
        if taken in options:
            raise InvalidType(
                f"client() takes no option {taken!r}: keys come from the pool, by a transport of its own",
                remedy="Pass a RotatingTransport instead of the pool to set it up yourself.",
            )
    try:
        module = import_module(sdk)
    except ImportError as error:
        raise InvalidType(f"{sdk} is not installed", remedy=f"pip install {sdk}") from error
    transport = kind(pool, header=header) if isinstance(pool, ResourcePool) else pool
    if not isinstance(transport, kind):
        raise InvalidType(
            f"client() takes a ResourcePool or a {kind.__name__}, got {type(pool).__name__}",
            remedy="Make a pool from your keys: ResourcePool([...]).",
        )
    # The SDK would try again what the pool has tried with every key.
    chosen = {"max_retries": 0, **options}
    their_httpx = module.DefaultAsyncHttpxClient if kind is RotatingTransport else module.DefaultHttpxClient
    made = getattr(module, name)(api_key="headgate", http_client=their_httpx(transport=transport), **chosen)
    transport.keep_to(made.base_url)
    return made
