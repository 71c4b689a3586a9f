"""Plans of the papers' workloads, made side by side and kept, so that a second run goes on.

A job's result is kept under a name made of everything it depends on: the job, the workload's
file and mmplan's own source. What was made by other code is never taken for new.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from page import ROOT
from planning import with_fused_backwards
from rich.progress import Progress

from mmplan.costs.program_costs import ProgramCosts
from mmplan.errors import InfeasibleError, MMPlanError
from mmplan.planning import planner
from mmplan.processes import in_processes
from mmplan.profiling.analytic import analytic_profile
from mmplan.profiling.data import profile_data
from mmplan.schema.base import load_document, parse_document, save_document, write_text
from mmplan.schema.cluster import Cluster, load_cluster
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import Workload, load_workload
from mmplan.simulation.predict import costs_of

PAPERS = ROOT / "examples" / "papers"
DATA_SAMPLES = 512
# For simulating plans beyond the first of each kind: the page is made in minutes.
PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A workload's analytic profile.

    Attributes:
        model: a file of examples/papers, without its ending.
        cluster: a shipped cluster.
        memory_bytes: of its devices instead of their own.
        data: with the work of the workload's samples.
    """

    model: str
    cluster: str
    memory_bytes: float | None = None
    data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One plan.

    Attributes:
        on: workload and cluster.
        devices: the cluster's first ones.
        solver: ``--solver``; ``method`` likewise.
        tasks: only these; empty for all.
        changes: dotted path in the workload to what stands there instead.
    """

    on: Profiled
    devices: int
    solver: str
    method: str | None = None
    tasks: tuple[str, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.on.model}, {self.devices} devices, {self.solver}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a job.

    Attributes:
        plan: None where none fits or the solver does not apply; ``why`` then says why.
        seconds: that planning took.
        profile_path: of the profile it was planned with.
    """

    plan: Plan | None
    why: str
    seconds: float
    profile_path: Path

    @property
    def costs(self) -> ProgramCosts:
        """The costs of the plan's program."""
        if self.plan is None:
            raise ValueError(f"no plan: {self.why}")
        return costs_of(self.plan, load_profile(self.profile_path))

    @property
    def samples_per_s(self) -> float | None:
        """Simulated throughput; None without a plan."""
        return self.plan.predicted.samples_per_s if self.plan else None


Results = Mapping[Job, Result]
What = TypeVar("What", Job, Profiled)


@cache
def _source() -> str:
    """A hash of mmplan's code and data."""
    digest = hashlib.sha256()
    for folder, pattern in (("mmplan", "**/*.py"), ("profiles", "**/*.yaml")):
        for path in sorted((ROOT / folder).glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _kept(what: Job | Profiled, folder: Path) -> Path:
    """Where the result of something is kept."""
    on = what.on if isinstance(what, Job) else what
    workload = (PAPERS / f"{on.model}.yaml").read_bytes()
    text = json.dumps([type(what).__name__, asdict(what), _source()], sort_keys=True).encode()
    name = hashlib.sha256(text + workload).hexdigest()[:16]
    return folder / f"{on.model}-{name}.json"


def run(jobs: Iterable[Job], folder: Path) -> dict[Job, Result]:
    """Make every plan that is not there yet, one a core at a time.

    Interrupted, it keeps what is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(jobs))
    with Progress() as progress:
        profiles = list(dict.fromkeys(job.on for job in wanted))
        _each(progress, "profiles", _make_profile, profiles, folder)
        # The largest first, so that all cores end together.
        largest_first = sorted(wanted, key=lambda job: -job.devices)
        _each(progress, "plans", _make_plan, largest_first, folder)
    return {job: _read(job, folder) for job in wanted}


def _each(
    progress: Progress,
    what: str,
    make: Callable[..., None],
    items: Sequence[What],
    folder: Path,
) -> None:
    """Make what is not there yet, one process a core."""
    missing = [item for item in items if not _kept(item, folder).exists()]
    bar = progress.add_task(what, total=len(items), completed=len(items) - len(missing))
    for _ in in_processes(partial(make, folder=folder), missing):
        progress.advance(bar)


def cluster_of(on: Profiled) -> Cluster:
    """A shipped cluster, with other devices where that is asked."""
    cluster = load_cluster(on.cluster)
    if on.memory_bytes is None:
        return cluster
    name = f"{cluster.device.name} with {on.memory_bytes:.3g} bytes"
    device = cluster.device.model_copy(update={"memory_bytes": on.memory_bytes, "name": name})
    return cluster.model_copy(update={"device": device})


def _make_profile(on: Profiled, folder: Path) -> None:
    path = _kept(on, folder)
    workload = load_workload(PAPERS / f"{on.model}.yaml")
    made = analytic_profile(workload, PAPERS, cluster_of(on))
    if on.data:
        made = profile_data(
            made,
            workload,
            PAPERS,
            samples=DATA_SAMPLES,
            progress=lambda *_: None,
            state_path=path.with_suffix(".partial"),
        )
    save_document(made, path)


def _make_plan(job: Job, folder: Path) -> None:
    path, profile_path = _kept(job, folder), _kept(job.on, folder)
    profile = load_document(Profile, profile_path)
    began = time.perf_counter()
    plan, why = None, ""
    try:
        plan = planner.solve(
            changed_workload(job),
            workload_path=PAPERS / f"{job.on.model}.yaml",
            profile=profile,
            profile_path=profile_path,
            plan_path=path,
            cluster=profile.cluster,
            devices=job.devices,
            solver=job.solver,
            method=job.method,
            tasks=job.tasks or None,
            patience_s=PATIENCE_S,
        )
    except MMPlanError as error:
        # Only these are an answer; another fault stops the run.
        if not isinstance(error, InfeasibleError):
            raise
        why = error.message
    kept = {
        "plan": plan.model_dump(mode="json", exclude_none=True) if plan else None,
        "why": why,
        "seconds": time.perf_counter() - began,
    }
    write_text(path, json.dumps(kept))


def changed_workload(job: Job) -> Workload:
    """The job's workload, with whole backwards as the papers' systems have them."""
    workload = with_fused_backwards(load_workload(PAPERS / f"{job.on.model}.yaml"))
    if not job.changes:
        return workload
    document = workload.model_dump(mode="json", exclude_unset=True)
    for path, value in job.changes:
        *parents, last = path.split(".")
        holder: Any = document
        for name in parents:
            holder = holder.setdefault(name, {})
        holder[last] = list(value) if isinstance(value, tuple) else value
    return parse_document(Workload, document, source=f"{job.on.model} with {job.changes}")


def _read(job: Job, folder: Path) -> Result:
    kept = json.loads(_kept(job, folder).read_text(encoding="utf-8"))
    return Result(
        plan=Plan.model_validate(kept["plan"]) if kept["plan"] else None,
        why=kept["why"],
        seconds=kept["seconds"],
        profile_path=_kept(job.on, folder),
    )
