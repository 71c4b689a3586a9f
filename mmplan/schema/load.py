"""Files whose kind or soundness must be found out while reading."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from mmplan.errors import InvalidInputError
from mmplan.schema.base import load_document, parse_document, parse_text, read_text
from mmplan.schema.cluster import Cluster
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.wording import counted


def load_plan(path: str | Path) -> Plan:
    """Read plan.json and refuse a faulty one.

    Raises:
        InvalidInputError: the file cannot be read, or :func:`plan_faults` finds a fault.
    """
    plan = load_document(Plan, path)
    faults = plan_faults(plan)
    if faults:
        more = f" (and {counted(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
        raise InvalidInputError(
            f"{path}: {faults[0]}{more}", hint=f"mmplan check {path} lists every fault"
        )
    return plan


def load_any(path: Path) -> Workload | Profile | Plan | Cluster:
    """A workload, profile, plan or cluster, told apart by its fields.

    Raises:
        InvalidInputError: the file is none of these, or a faulty one.
    """
    data = parse_text(read_text(path), path)
    fields = set(cast("dict[str, object]", data)) if isinstance(data, dict) else set[str]()
    if fields & {"units", "solver"}:
        return load_plan(path)
    kind: type[Workload] | type[Profile] | type[Cluster] = Workload
    if "devices_per_node" in fields:
        kind = Cluster
    elif "source" in fields or {"cluster", "modules"} <= fields:
        kind = Profile
    return parse_document(kind, data, source=str(path)).as_read_from(path)
