"""Context variables that are sent with each call of a routine to its worker, and come back changed.

May import `headgate.core`, `headgate.errors` and `headgate.resources`. Entry points: `ContextVar` in `variables`,
`Context` in `contexts`; `travel` encodes and decodes what a call carries.
"""

from headgate.core.lazy import lazy

TYPE_CHECKING = False  # typing's own, without importing typing
if TYPE_CHECKING:
    from headgate.context.contexts import Context, copy_context, create_task, current_context, install_task_factory
    from headgate.context.travel import ContextDecodeWarning
    from headgate.context.variables import ContextVar, Token

__all__ = [
    "Context",
    "ContextDecodeWarning",
    "ContextVar",
    "Token",
    "copy_context",
    "create_task",
    "current_context",
    "install_task_factory",
]

_MODULES = {
    "headgate.context.contexts": ("Context", "copy_context", "create_task", "current_context", "install_task_factory"),
    "headgate.context.travel": ("ContextDecodeWarning",),
    "headgate.context.variables": ("ContextVar", "Token"),
}

if not TYPE_CHECKING:  # a checker that sees this believes in every name
    __getattr__ = lazy(globals(), _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
