"""The best replicas and micro-batches of layouts on one grid, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.baselines.one_grid import Layout, OneGrid, Split
from mmplan.solvers.problem import Candidate, Problem, Request
from mmplan.wording import counted, missing, size


def best_grids(
    problem: Problem, solver: str, layouts: Sequence[Layout]
) -> list[tuple[Candidate, OneGrid]]:
    """The best split of each of the ``top`` best layouts by the formula, best first: exact.

    Where there are fewer layouts their next best splits follow. Layouts differ in what the
    formula leaves out (stages on common devices wait for each other), so simulation has more
    to choose from than among the best splits of one of them. Splits are visited in the order
    of their time without reductions and syncs, until no later one can come before those found.

    Raises:
        InfeasibleError: nothing that devices and pins allow, or nothing that fits the memory.
    """
    grids = [grid for grid in (OneGrid(problem, layout) for layout in layouts) if grid.most]
    lacking = [(grid.least_bytes(), grid.layout) for grid in grids]
    roomy = [
        grid
        for grid, (least, _) in zip(grids, lacking, strict=True)
        if least <= problem.memory_bytes
    ]
    entries = [
        (grid.compute_s(split), k, split) for k, grid in enumerate(roomy) for split in grid.splits()
    ]
    if not entries and (roomy or not grids):
        raise nothing_allowed(problem, solver, layouts)
    found = _visit(problem, roomy, sorted(entries, key=lambda entry: entry[0]), lacking)
    if not found:
        raise too_large(problem, solver, [x for x in lacking if x[0] > problem.memory_bytes])
    return [
        (Candidate(units=roomy[k].units(split), objective_s=value_s), roomy[k])
        for value_s, k, split in _firsts_first(found, _top(problem))
    ]


def _visit(
    problem: Problem,
    grids: Sequence[OneGrid],
    entries: Sequence[tuple[float, int, Split]],
    lacking: list[tuple[float, Layout]],
) -> dict[int, list[tuple[float, Split]]]:
    """Position of a grid to its splits that fit, best first; what does not joins ``lacking``."""
    found: dict[int, list[tuple[float, Split]]] = {}
    for compute_s, k, split in entries:
        firsts = sorted(own[0][0] for own in found.values())
        if len(firsts) >= _top(problem) and compute_s >= firsts[_top(problem) - 1]:
            break
        needed = grids[k].needed_bytes(split)
        if needed > problem.memory_bytes:
            lacking.append((needed, grids[k].layout))
            continue
        own = found.setdefault(k, [])
        own.append((grids[k].step_s(split), split))
        own.sort(key=lambda pair: pair[0])
    return found


def _firsts_first(
    found: Mapping[int, Sequence[tuple[float, Split]]], top: int
) -> list[tuple[float, int, Split]]:
    """The best split of each grid, then the others, ``top`` in all; by value."""
    ranked = sorted(
        (place > 0, value_s, k, place)
        for k, own in found.items()
        for place, (value_s, _) in enumerate(own)
    )
    chosen = sorted(item[1:] for item in ranked[:top])
    return [(value_s, k, found[k][place][1]) for value_s, k, place in chosen]


def _top(problem: Problem) -> int:
    return max(problem.request.top, 1)


def check_exact(request: Request, solver: str) -> None:
    """Refuse a method of a solver that has one only.

    Raises:
        InvalidInputError: another one than exact.
    """
    if request.method not in (None, "exact"):
        raise InvalidInputError(
            f"--method {request.method}: {solver} knows exact", hint="leave --method out"
        )


def allowed(problem: Problem, layout: Layout) -> bool:
    """Whether the modules' pins allow a layout's degrees."""
    specs = problem.request.workload.modules
    return all(
        specs[module].plan.allows("tp", 1 if place.replicated else layout.tp)
        and specs[module].plan.allows("pp", len(place.cuts))
        and specs[module].plan.allows("vpp", 1)
        for module, place in layout.places.items()
    )


def nothing_allowed(problem: Problem, solver: str, layouts: Sequence[Layout]) -> InfeasibleError:
    """What to say where no layout has a split that devices and pins allow."""
    fewest = min((layout.tp * layout.positions for layout in layouts), default=0)
    if fewest > problem.devices:
        return InfeasibleError(
            f"{solver} needs at least {counted(fewest, 'device')} for one replica, there are "
            f"{problem.devices}: {fewest - problem.devices} missing",
            hint=f"give it {counted(fewest, 'device')} or more",
        )
    modules = problem.task.modules
    specs = problem.request.workload.modules
    pins = {m: p for m in modules if (p := specs[m].plan.model_dump(exclude_none=True))}
    return InfeasibleError(
        f"{solver} has one grid for {', '.join(modules)}: no degrees and micro-batch fit all of "
        f"their plans {pins} on {counted(problem.devices, 'device')}",
        hint="loosen the modules' plan, or use --solver auto",
    )


def too_large(
    problem: Problem, solver: str, lacking: Sequence[tuple[float, Layout]]
) -> InfeasibleError:
    """What to say where nothing fits the memory: by the layout that lacks least."""
    needed, layout = min(lacking, key=lambda item: item[0])
    return InfeasibleError(
        f"{solver} needs at least {size(needed)} on a device (tp {layout.tp}, "
        f"{counted(layout.positions, 'pipeline position')}), "
        f"{missing(needed, problem.memory_bytes)}",
        hint="give it more devices, recompute: full, zero: 1, or a smaller sync_batch",
    )
