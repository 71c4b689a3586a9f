"""Train exactly what a plan says."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmlaunch.session.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: torch takes a second to import."""
    if name != "Session":
        raise AttributeError(f"module 'mmlaunch' has no attribute {name!r}")
    from mmlaunch.session.session import Session

    return Session
