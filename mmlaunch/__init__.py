"""Train exactly what a plan says.

``mmlaunch.train("plan.json")`` is what ``mmlaunch run`` does; see :mod:`mmlaunch.api`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmlaunch.api import export, status, train, verify
    from mmlaunch.session.session import Session

__all__ = ["Session", "export", "status", "train", "verify"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: torch takes a second to import."""
    if name not in __all__:
        raise AttributeError(f"module 'mmlaunch' has no attribute {name!r}")
    from importlib import import_module

    where = "mmlaunch.session.session" if name == "Session" else "mmlaunch.api"
    return getattr(import_module(where), name)
