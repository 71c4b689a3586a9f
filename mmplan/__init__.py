"""Plan each module of a multimodal model apart."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmplan.ragged import Ragged
    from mmplan.schema.workload import Workload

__all__ = ["Ragged", "Workload"]

# Lazy, because a package's __init__ runs before its submodules: the launcher and
# `mmplan --help` must not load pydantic for a name they do not use.
_WHERE = {"Ragged": "mmplan.ragged", "Workload": "mmplan.schema.workload"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _WHERE:
        raise AttributeError(f"module 'mmplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
