"""Tools for tests of programs that use headgate, and for headgate's own tests.

May import every package; no package imports it, and only `plugin` imports pytest. Entry points: `run` and `virtual`.

    from headgate.testing import capture_events, virtual

    @virtual                                     # an event loop on which an hour takes no time
    async def test_the_key_comes_back():
        with capture_events("resources") as events:
            await asyncio.sleep(3600)
        assert events.names == []

`run` and `virtual` put a test on a `VirtualLoop`: timers jump, a hang is a `Hang` that says who waits, a task left over
is a `Leak`. `settle` lets everything ready happen while time stands. `capture_events` remembers what pools report, and
`no_leaks` fails a block that leaves tasks, threads, files or child processes behind; `check_strategy`, `check_store`,
`check_shared_state`, `check_slot_budget`, `check_discovery` and `check_placement` tell whether a strategy, a store, a
budget, a discovery or a placement of yours keeps its contract. `headgate.testing.plugin` is a plugin for pytest. See
docs/testing.md.

Names are loaded when they are first used: pytest imports this package for the plugin, whether it is used or not.
"""

from __future__ import annotations

from headgate.core.lazy import lazy

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.testing.budgets import check_slot_budget
    from headgate.testing.capture import Captured, capture_events
    from headgate.testing.discoveries import check_discovery
    from headgate.testing.leaks import no_leaks
    from headgate.testing.placements import check_placement
    from headgate.testing.running import run, settle, virtual
    from headgate.testing.shared_states import check_shared_state
    from headgate.testing.stores import check_store
    from headgate.testing.strategies import check_strategy
    from headgate.testing.virtual_loop import VirtualLoop
    from headgate.testing.waiting import Hang, Leak

__all__ = [
    "Captured",
    "Hang",
    "Leak",
    "VirtualLoop",
    "capture_events",
    "check_discovery",
    "check_placement",
    "check_shared_state",
    "check_slot_budget",
    "check_store",
    "check_strategy",
    "no_leaks",
    "run",
    "settle",
    "virtual",
]

_named = lazy(
    globals(),
    {
        "headgate.testing.budgets": ("check_slot_budget",),
        "headgate.testing.capture": ("Captured", "capture_events"),
        "headgate.testing.discoveries": ("check_discovery",),
        "headgate.testing.leaks": ("no_leaks",),
        "headgate.testing.placements": ("check_placement",),
        "headgate.testing.running": ("run", "settle", "virtual"),
        "headgate.testing.shared_states": ("check_shared_state",),
        "headgate.testing.stores": ("check_store",),
        "headgate.testing.strategies": ("check_strategy",),
        "headgate.testing.virtual_loop": ("VirtualLoop",),
        "headgate.testing.waiting": ("Hang", "Leak"),
    },
)

if not TYPE_CHECKING:  # a checker that sees this believes in every name

    def __getattr__(name):
        return _named(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
