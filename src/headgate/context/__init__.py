"""Context variables that are sent to the worker with each call of a routine, and come back with the changes.

`variables` has `ContextVar` and `Token`, `contexts` has `Context` and the task factory, `chains` keeps the values and
the identity of each Context, `travel` encodes and decodes what a call carries. May import `errors`, `core` and
`resources`. Entry points: `ContextVar`, `Context`, `copy_context`.
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
