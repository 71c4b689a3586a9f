"""Simulate a finished plan under the profile that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InvalidInputError
from mmplan.processes import rare_collections
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute
from mmplan.program.model import Timings
from mmplan.schema.agreement import belief, check_profiled
from mmplan.schema.base import file_sha256
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import load_workload
from mmplan.simulation.step import Simulation, simulate
from mmplan.simulation.symmetry import simulated
from mmplan.wording import counted, size


def plan_profile(plan: Plan, plan_path: Path, given: Profile | Path | None = None) -> Profile:
    """The profile of a plan: the given one, or the one it names, unchanged.

    Args:
        plan: the plan.
        plan_path: its file; the profile's path is relative to it.
        given: another profile to predict with (of other devices, say).

    Raises:
        InvalidInputError: it is not there, or no longer the one that was used.
    """
    if isinstance(given, Profile):
        return given
    path = given or plan_path.parent / plan.profile.path
    if not path.is_file():
        raise InvalidInputError(
            f"{plan_path}: its profile {path} is not there", hint="name it with --profile"
        )
    if given is None and file_sha256(path) != plan.profile.sha256:
        raise InvalidInputError(
            f"{path} has changed since {plan_path} was made from it",
            hint="solve again, or name it with --profile to predict with what it says now",
        )
    return load_profile(path)


def check_plans_model(
    plan: Plan, plan_path: Path, given: Profile | Path | None = None
) -> str | None:
    """Refuse a profile of another model than the plan's workload, where both are there.

    Args:
        plan: the plan.
        plan_path: its file; paths of profile and workload are relative to it.
        given: another profile.

    Returns:
        A note on a profile that does not say its model.

    Raises:
        InvalidInputError: a factory or its arguments are others.
    """
    try:
        profile = given
        if not isinstance(profile, Profile):
            profile = load_profile(profile or plan_path.parent / plan.profile.path)
        workload = load_workload(plan_path.parent / plan.workload.path)
    except InvalidInputError:
        return None  # whoever needs the file says what is wrong with it
    check_profiled(profile, workload)
    return belief(profile, workload.train.precision)


def plan_costs(plan: Plan, plan_path: Path, given: Profile | Path | None = None) -> ProgramCosts:
    """The plan's program, with times and bytes from its profile.

    Raises:
        InvalidInputError: see :func:`plan_profile`; or the profile lacks a module.
    """
    return costs_of(plan, plan_profile(plan, plan_path, given))


@rare_collections()
def costs_of(plan: Plan, profile: Profile) -> ProgramCosts:
    """The plan's program, with times and bytes from a profile.

    Raises:
        InvalidInputError: the profile lacks a module.
    """
    costs = CostModel(profile, plan.cluster, plan.training)
    return ProgramCosts(compile_plan(plan), costs, plan)


def memory_faults(plan: Plan, profile: Profile | None) -> list[str]:
    """Ranks whose planned memory exceeds their device's, on one line.

    Args:
        plan: one that compiles.
        profile: that it was made from; without it the memory is the plan's own prediction.
    """
    planned: Sequence[float] = plan.predicted.memory_bytes
    if profile is not None:
        planned = simulated(plan, CostModel(profile, plan.cluster, plan.training))[0].peak_bytes
    device = plan.cluster.device
    over = {rank: most for rank, most in enumerate(planned) if most > device.memory_bytes}
    if not over:
        return []
    rank, most = max(over.items(), key=lambda item: item[1])
    more = f"; {counted(len(over), 'rank')} in all hold too much" if len(over) > 1 else ""
    return [
        f"rank {rank} holds {size(most)}, a {device.name} has {size(device.memory_bytes)}{more}"
    ]


def compute_timings(costs: ProgramCosts) -> Timings:
    """Seconds of every compute of a program, for ``mmlaunch run --emulate``."""
    program = costs.program
    sizes = {
        (stage.index, stop - start)
        for stage in program.stages
        for row in stage.microbatches
        for start, stop in row
    }
    ops = {(i.stage, i.op) for row in program.instructions for i in row if isinstance(i, Compute)}
    return Timings(
        computes={
            # Emulated runs gather scattered messages and parameters too: that time is left out.
            (index, op, samples): costs.alone_s(program.stages[index], op, samples)
            - costs.shares_s(program.stages[index], op, samples)
            for index, samples in sizes
            for stage, op in ops
            if stage == index
        },
        losses={
            loss.name: costs.sync_s(loss) - costs.gather_s(loss)
            for loss in program.cross_sample_losses
        },
    )


def simulate_plan(plan: Plan, plan_path: Path, profile_path: Path | None = None) -> Simulation:
    """One step of the plan's program; see :func:`plan_costs`."""
    costs = plan_costs(plan, plan_path, profile_path)
    return simulate(costs.program, costs)
