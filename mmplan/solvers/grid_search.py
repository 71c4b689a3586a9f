"""The best replicas and micro-batches of layouts on one grid, exactly."""

from __future__ import annotations

from collections.abc import Sequence

from mmplan.errors import InfeasibleError
from mmplan.solvers.one_grid import Layout, OneGrid, Split
from mmplan.solvers.problem import Candidate, Problem


def best_grids(
    problem: Problem, solver: str, layouts: Sequence[Layout]
) -> list[tuple[Candidate, OneGrid]]:
    """The ``top`` best splits of all layouts by the formula, best first: exact.

    Splits are visited in the order of their time without reductions and syncs, until no
    later one can come before those found.

    Raises:
        InfeasibleError: nothing that devices and pins allow, or nothing that fits the memory.
    """
    memory, top = problem.memory_bytes, max(problem.request.top, 1)
    grids = [grid for grid in (OneGrid(problem, layout) for layout in layouts) if grid.most]
    lacking = [(grid.least_bytes(), grid.layout) for grid in grids]
    roomy = [g for g, (least, _) in zip(grids, lacking, strict=True) if least <= memory]
    entries = [(grid.compute_s(split), grid, split) for grid in roomy for split in grid.splits()]
    if not entries and (roomy or not grids):
        raise _nothing_allowed(problem, solver, layouts)
    entries.sort(key=lambda entry: entry[0])
    found: list[tuple[float, int, OneGrid, Split]] = []
    for order, (compute_s, grid, split) in enumerate(entries):
        if len(found) == top and compute_s >= found[-1][0]:
            break
        needed = grid.needed_bytes(split)
        if needed > memory:
            lacking.append((needed, grid.layout))
            continue
        found = sorted([*found, (grid.step_s(split), order, grid, split)], key=lambda f: f[:2])
        found = found[:top]
    if not found:
        raise _too_large(problem, solver, [item for item in lacking if item[0] > memory])
    return [
        (Candidate(units=grid.units(split), objective_s=value_s), grid)
        for value_s, _, grid, split in found
    ]


def tensor_degrees(problem: Problem, module: str) -> list[int]:
    """Profiled degrees whose groups stay inside a node and tile it."""
    node, devices = problem.request.cluster.devices_per_node, problem.devices
    return [
        tp
        for tp in problem.costs.tp_options(task=problem.task.name, module=module)
        if tp <= min(node, devices) and (devices <= node or node % tp == 0)
    ]


def allowed(problem: Problem, layout: Layout) -> bool:
    """Whether the modules' pins allow a layout's degrees."""
    specs = problem.request.workload.modules
    return all(
        specs[module].plan.allows("tp", 1 if place.whole else layout.tp)
        and specs[module].plan.allows("pp", len(place.cuts))
        and specs[module].plan.allows("vpp", 1)
        for module, place in layout.places.items()
    )


def _nothing_allowed(problem: Problem, solver: str, layouts: Sequence[Layout]) -> InfeasibleError:
    fewest = min((layout.tp * layout.positions for layout in layouts), default=0)
    if fewest > problem.devices:
        return InfeasibleError(
            f"{solver} needs at least {fewest} devices for one replica, there are "
            f"{problem.devices}: {fewest - problem.devices} missing",
            hint=f"give it {fewest} devices or more",
        )
    modules = problem.task.modules
    specs = problem.request.workload.modules
    pins = {m: p for m in modules if (p := specs[m].plan.model_dump(exclude_none=True))}
    return InfeasibleError(
        f"{solver} has one grid for {', '.join(modules)}: no degrees and micro-batch fit all of "
        f"their plans {pins} on {problem.devices} devices",
        hint="loosen the modules' plan, or use --solver auto",
    )


def _too_large(
    problem: Problem, solver: str, lacking: Sequence[tuple[float, Layout]]
) -> InfeasibleError:
    needed, layout = min(lacking, key=lambda item: item[0])
    memory = problem.memory_bytes
    return InfeasibleError(
        f"{solver} needs at least {needed:.3g} bytes on a device (tp {layout.tp}, "
        f"{layout.positions} pipeline positions), a device has {memory:.3g}: "
        f"{needed - memory:.3g} bytes missing",
        hint="give it more devices, recompute: full, zero: 1, or a smaller sync_batch",
    )
