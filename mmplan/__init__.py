"""Plan each module of a multimodal model apart.

``mmplan.solve("workload.yaml", "profile.json")`` is what ``mmplan solve`` does, and so it is with
every other command; see :mod:`mmplan.api`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmplan.api import (
        Trials,
        changed,
        check,
        compare,
        diff,
        explain,
        init,
        load,
        load_plan,
        load_profile,
        load_workload,
        profile,
        report,
        simulate,
        solve,
    )
    from mmplan.doctor.doctor import examine
    from mmplan.ragged import Ragged
    from mmplan.reporting.source import load_run
    from mmplan.results import (
        Checked,
        Compared,
        Differing,
        Explained,
        Planned,
        PredictedStep,
    )
    from mmplan.schema.base import save_document
    from mmplan.schema.cluster import Cluster, load_cluster
    from mmplan.schema.plan import Plan
    from mmplan.schema.profile import Profile
    from mmplan.schema.workload import Workload

__all__ = [
    "Checked",
    "Cluster",
    "Compared",
    "Differing",
    "Explained",
    "Plan",
    "Planned",
    "PredictedStep",
    "Profile",
    "Ragged",
    "Trials",
    "Workload",
    "changed",
    "check",
    "compare",
    "diff",
    "examine",
    "explain",
    "init",
    "load",
    "load_cluster",
    "load_plan",
    "load_profile",
    "load_run",
    "load_workload",
    "profile",
    "report",
    "save_document",
    "simulate",
    "solve",
]

# Lazy, because a package's __init__ runs before its submodules: the launcher and
# `mmplan --help` must not load pydantic for a name they do not use.
_WHERE = {
    "examine": "mmplan.doctor.doctor",
    "Ragged": "mmplan.ragged",
    "load_run": "mmplan.reporting.source",
    "Trials": "mmplan.planning.measured_trials",
    "save_document": "mmplan.schema.base",
    "Cluster": "mmplan.schema.cluster",
    "load_cluster": "mmplan.schema.cluster",
    "Plan": "mmplan.schema.plan",
    "Profile": "mmplan.schema.profile",
    "Workload": "mmplan.schema.workload",
    "load_workload": "mmplan.schema.workload",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("mmplan")
    if name not in __all__:
        raise AttributeError(f"module 'mmplan' has no attribute {name!r}")
    from importlib import import_module

    where = _WHERE.get(name, "mmplan.results" if name[0].isupper() else "mmplan.api")
    return getattr(import_module(where), name)


def __dir__() -> list[str]:
    """The public names, for those who look around."""
    return [*__all__, "__version__"]
