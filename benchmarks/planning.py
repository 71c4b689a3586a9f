"""From a benchmark's workload file to a measured profile and plans, as the commands do it."""

from __future__ import annotations

from pathlib import Path

from mmplan.planning import planner
from mmplan.profiling.data import profile_data
from mmplan.profiling.measure import ROUNDS, measure_profile
from mmplan.schema.base import save_document
from mmplan.schema.plan import Plan
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import Workload, load_workload

FOLDER = Path(__file__).parent


def workload_path(name: str) -> Path:
    """A shipped workload's file."""
    return FOLDER / f"{name}.yaml"


def with_fused_backwards(workload: Workload) -> Workload:
    """The workload without split backwards, which baselines do not have."""
    modules = {
        name: spec.model_copy(
            update={"plan": spec.plan.model_copy(update={"split_backward": False})}
        )
        for name, spec in workload.modules.items()
    }
    return workload.model_copy(update={"modules": modules})


def profiled(name: str, folder: Path, *, rounds: int) -> Path:
    """Measure a workload on this machine's processors: ``mmplan profile --device cpu --data``.

    Args:
        name: of the workload.
        folder: where the profile goes.
        rounds: how often its points are measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.profile.json"
    profiled_file(workload_path(name), path, rounds=rounds)
    return path


def profiled_file(
    workload: Path, path: Path, *, num_processes: int | None = None, rounds: int = ROUNDS
) -> None:
    """The same for any workload's file, with ``--data``; the profile goes to ``path``.

    ``num_processes`` measure at the same time; by default as many as will run, up to the cores.
    """
    state = path.with_suffix(".partial")
    state.unlink(missing_ok=True)  # of another day, perhaps of another load
    profile = measure_profile(
        workload,
        device="cpu",
        num_processes=num_processes,
        state_path=state,
        rounds=rounds,
    )
    profile = profile_data(profile, load_workload(workload), workload.parent, state_path=state)
    state.unlink(missing_ok=True)
    save_document(profile, path)


def solved(name: str, profile: Path, *, devices: int, solver: str) -> tuple[Path, Plan]:
    """Plan a shipped workload, as ``mmplan solve --devices N --solver NAME``."""
    return planned(workload_path(name), profile, devices=devices, solver=solver)


def planned(workload: Path, profile: Path, *, devices: int, solver: str) -> tuple[Path, Plan]:
    """The same for any workload's file; the plan goes beside the profile.

    Raises:
        InfeasibleError: the solver has no plan.
        InvalidInputError: it is not for such a workload.
    """
    path = profile.with_suffix(f".{devices}-{solver}.plan.json")
    plan = planner.solve(
        load_workload(workload),
        workload_path=workload,
        profile=load_profile(profile),
        profile_path=profile,
        plan_path=path,
        devices=devices,
        solver=solver,
    )
    save_document(plan, path)
    return path, plan


def described(plan: Plan) -> str:
    """Degrees and micro-batches of every unit, in a few words."""
    return ", ".join(
        f"{unit.name} on {len(unit.all_ranks)}"
        + (f" (dp {unit.dp} × pp {unit.pp})" if unit.pp > 1 or unit.dp > 1 else "")
        + f", K {'/'.join(str(len(row)) for row in unit.microbatches)}"
        for unit in plan.units
    )
