"""Listeners of the event stream and readers of the registry: logging, metrics, traces, and how a program is seen.

They subscribe to topics and read the registry. May import `tasks` and every package below it, and is imported by
none of those. `sampler` looks at the pools, `publishing` shows them through a socket, `actions` acts on them;
`prometheus`, `opentelemetry` and `logging` are for machines.
"""

from headgate.core.lazy import lazy

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.observe.publishing import Publication, publish

__all__ = ["Publication", "publish"]

if not TYPE_CHECKING:  # a checker that sees this believes in every name
    __getattr__ = lazy(globals(), {"headgate.observe.publishing": ("Publication", "publish")})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
