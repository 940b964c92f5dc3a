"""Private federated learning: five published defences, one federation, and the attacks that measure them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_privacy.api import Run, runs, up
    from fl_privacy.errors import FederationError
    from fl_privacy.tasks.splitting import held_out
    from fl_privacy.tasks.task import Task

__version__ = "0.1.0"
__all__ = ["FederationError", "Run", "Task", "held_out", "runs", "up"]

_API = "fl_privacy.api"
_WHERE = {"Run": _API, "runs": _API, "up": _API}
_WHERE |= {"FederationError": "fl_privacy.errors", "Task": "fl_privacy.tasks.task"}
_WHERE |= {"held_out": "fl_privacy.tasks.splitting"}


def __getattr__(name: str) -> Any:
    """What is imported when it is first used: every process imports this package, and few need more of it."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
