"""The web page: what pools do, live, and actions on them. Needs the extra `dashboard`.

`serve()` shows this program; `headgate dashboard` shows all programs of this user. May import `observe` and what is
below it. `security` decides who may ask, `sources` know the programs, `app` answers, `server` listens; the page itself
is in `page/`, as it is sent.
"""

from headgate.core.lazy import lazy

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.dashboard.server import Dashboard, serve

__all__ = ["Dashboard", "serve"]

if not TYPE_CHECKING:  # a checker that sees this believes in every name
    __getattr__ = lazy(globals(), {"headgate.dashboard.server": ("Dashboard", "serve")})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
