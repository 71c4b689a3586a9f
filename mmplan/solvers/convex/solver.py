"""MMScale: an encoder, an LLM and a generator on devices of their own, planned exactly.

``exact`` finds the optimum of :mod:`.branch_and_bound`'s formula over the degrees of every module;
``cvxpy`` solves the paper's convex relaxation and rounds it.

Source: MMScale (Algorithm 1), with whole blocks, whole samples, memory as the pipeline
holds it, and gradient reductions and messages in the objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from mmplan.costs.program_costs import CostModel
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Schedule, Unit
from mmplan.solvers.convex.backbone_groups import BackboneShape, Pipelines
from mmplan.solvers.convex.branch_and_bound import FormulaPlan, best_plans
from mmplan.solvers.convex.module_tables import SelectedOption
from mmplan.solvers.convex.relaxation import relax
from mmplan.solvers.placement import place_modules
from mmplan.solvers.problem import Candidate, NotApplicableError, Problem, Request, Solution
from mmplan.solvers.sample_split import split_evenly
from mmplan.wording import counted, size

METHODS = {
    "exact": "the integer optimum of the formula",
    "cvxpy": "the convex relaxation, rounded",
}
# Plans asked of the search for each one wanted: some may have no placement.
SPARE = 2
# Nothing that is still infeasible with so many times the devices or bytes is a matter of them.
MOST_DOUBLINGS = 12
# Bytes are found to this part of what a device has.
PRECISION = 1 / 256


def solve_convex(request: Request) -> Solution:
    """The ``top`` best plans of the formula, and the proof of the best.

    Raises:
        InvalidInputError: an unknown method, or (:class:`NotApplicableError`) several tasks,
            a cross-sample loss or shared parameters.
        InfeasibleError: too few devices, or too little memory; names what is missing.
    """
    _check_suited(request)
    method = request.method or "exact"
    if method not in METHODS:
        raise InvalidInputError(
            f"--method {method}: convex knows {', '.join(METHODS)}",
            hint="leave --method out for exact",
        )
    problem = Problem(request=request, task=next(iter(request.tasks.values())))
    if method == "cvxpy":
        return _solve_relaxed(problem)
    node = request.cluster.devices_per_node
    if request.devices <= node:
        return best_pipelines(problem)
    cluster = request.cluster.take(node)
    costs = CostModel(request.costs.profile, cluster, request.costs.training)
    on_one = replace(request, cluster=cluster, devices=node, costs=costs)
    return _with_one_node(problem, Problem(request=on_one, task=problem.task))


def _with_one_node(whole: Problem, node: Problem) -> Solution:
    """The plans on all devices, and those on one node, best first.

    Of several nodes the formula takes all messages between modules to cross nodes, so plans that
    stay on one are looked for apart.
    """
    found = _pipelines(whole)
    placed = found.candidates if found else ()
    inside = _pipelines(node, below_s=placed[0].objective_s if placed else math.inf)
    if inside is None or not inside.candidates:
        # What is missing is said of all devices.
        return _with_plans(whole, found)
    if found is None or not placed:
        return inside
    others = [c for c in placed if all(c.units != b.units for b in inside.candidates)]
    bound_s = min(found.formula_bound_s, inside.formula_bound_s)
    return replace(found, candidates=(*inside.candidates, *others), formula_bound_s=bound_s)


def _check_suited(request: Request) -> None:
    task = request.only_task("convex")
    if task.sync_batches:
        raise NotApplicableError(
            f"convex plans pipelines whose losses are per sample; {', '.join(task.sync_batches)} "
            "takes a whole sync batch",
            hint="use --solver distmm",
        )
    shared = [name for name in task.modules if request.workload.modules[name].share]
    if shared:
        raise NotApplicableError(
            f"convex gives every module devices of its own; {', '.join(shared)} uses the "
            "parameters of another one",
            hint="use --solver distmm, or --solver auto",
        )


def best_pipelines(problem: Problem) -> Solution:
    """The best plans without interleaving first, then the best ones with it.

    The formula is a bound on what 1F1B takes. Of an interleaved backbone it knows the fill,
    not what chunks wait for when another module is the slowest: such plans take part where
    simulation chooses among several, or where the workload asks for vpp.

    Raises:
        InfeasibleError: too few devices, or too little memory; names what is missing.
    """
    return _with_plans(problem, _pipelines(problem))


def _with_plans(problem: Problem, found: Solution | None) -> Solution:
    """What was found, where that is a plan."""
    if found is None:
        raise _explain(problem)
    if not found.candidates:
        raise _no_placement()
    return found


def _pipelines(problem: Problem, *, below_s: float = math.inf) -> Solution | None:
    """The plans that take less than that; None where there are none, placed or not."""
    top, specs = problem.request.top, problem.request.workload.modules
    asked = any(specs[module].plan.vpp is not None for module in problem.task.modules)
    searches = [Pipelines(problem, interleaved=asked)]
    if top > 1 and not asked:
        searches.append(Pipelines(problem))
    wanted = top if top == 1 else SPARE * top
    values: list[float] = []
    candidates: dict[tuple[Unit, ...], Candidate] = {}
    for own in searches:
        plans = best_plans(
            own.groups(), own.edges, devices=problem.devices, top=wanted, below_s=below_s
        )
        values += [plan.value_s for plan in plans[:1]]
        for candidate in islice(candidates_of(own, plans), top):
            candidates.setdefault(candidate.units, candidate)
    if not values:
        return None
    return Solution(
        solver="convex",
        method="exact",
        candidates=tuple(candidates.values()),
        formula_bound_s=min(*values, *(c.objective_s for c in candidates.values())),
    )


def _solve_relaxed(problem: Problem) -> Solution:
    plans = relax(problem)
    candidates = list(islice(candidates_of(plans.pipelines, plans.rounded), problem.request.top))
    if not candidates:
        raise _no_placement()
    return Solution(
        solver="convex",
        method="cvxpy",
        candidates=tuple(candidates),
        formula_bound_s=min(plans.formula_bound_s, candidates[0].objective_s),
        idle_because="rounding the relaxation left them over",
    )


def _no_placement() -> InfeasibleError:
    return InfeasibleError(
        "no placement keeps every tensor-parallel group where it may be",
        hint="limit tp in the modules' plan, or give it more devices",
    )


def candidates_of(pipelines: Pipelines, found: Sequence[FormulaPlan]) -> Iterator[Candidate]:
    """The plans that can be placed with no tensor-parallel group across nodes."""
    problem = pipelines.problem
    for plan in found:
        frame = pipelines.frames[plan.group]
        picks = {
            own.module: own.pick(table, row)
            for own, table, row in zip(
                pipelines.tables, pipelines.tables_of(frame), plan.choice, strict=True
            )
        }
        grids = place_modules(
            {name: (pick.dp, pick.pp, pick.tp) for name, pick in picks.items()},
            cluster=problem.request.cluster,
            devices=problem.devices,
        )
        if grids is not None:
            yield Candidate(
                units=tuple(
                    _unit(problem, name, pick, frame, grids[name]) for name, pick in picks.items()
                ),
                objective_s=plan.value_s,
                notes=tuple(_notes(pipelines, frame)),
            )


def _unit(
    problem: Problem, module: str, pick: SelectedOption, frame: BackboneShape, grid: RankGrid
) -> Unit:
    sizes = step_sizes(problem.task.batch, frame, pick.dp)
    return Unit(
        name=module,
        task=problem.task.name,
        module=module,
        tp=pick.tp,
        pp=pick.pp,
        vpp=pick.vpp,
        dp=pick.dp,
        ranks=grid.ranks,
        blocks=pick.cuts,
        samples=tuple(map(sum, sizes)),
        microbatches=sizes,
        schedule=Schedule(kind="interleaved" if pick.vpp > 1 else "1f1b"),
    )


def step_sizes(batch: int, frame: BackboneShape, dp: int) -> tuple[tuple[int, ...], ...]:
    """[dp][l] micro-batches: every step of the pipeline takes the same samples in all modules.

    The last step may be smaller; replicas that get none of it have a micro-batch less.
    """
    full = split_evenly(frame.samples, dp)
    rest = split_evenly(batch - (frame.steps - 1) * frame.samples, dp)
    return tuple(
        (*((size,) * (frame.steps - 1)), *((last,) if last else ()))
        for size, last in zip(full, rest, strict=True)
    )


def _notes(pipelines: Pipelines, frame: BackboneShape) -> Iterator[str]:
    batch, backbone = pipelines.problem.task.batch, pipelines.modules[pipelines.backbone]
    last = batch - (frame.steps - 1) * frame.samples
    yield (
        f"{backbone} is the backbone: {counted(frame.replicas, 'replica')}, "
        f"{counted(frame.steps, 'micro-batch', 'micro-batches')} "
        f"of {frame.microbatch} each"
    )
    if last < frame.samples:
        yield (
            f"the batch of {batch} is no multiple of {counted(frame.samples, 'sample')}: the "
            f"last step of the pipeline takes {last}"
        )


def _explain(problem: Problem) -> InfeasibleError:
    """Why no pipeline fits: the tightest constraint, and the devices or bytes that are missing."""
    pipelines = Pipelines(problem)
    for own in pipelines.tables:
        if own.empty:
            degrees = problem.costs.tp_options(task=problem.task.name, module=own.module)
            return InfeasibleError(
                f"module {own.module}: no tp, pp and vpp fit its plan ({own.pins}), the profile's "
                f"tp {', '.join(map(str, degrees))} and {counted(problem.devices, 'device')}",
                hint=f"loosen modules.{own.module}.plan, or profile it at another tp",
            )
    if len(pipelines.modules) > problem.devices:
        missing = len(pipelines.modules) - problem.devices
        return InfeasibleError(
            f"convex gives each of {len(pipelines.modules)} modules devices of its own, there "
            f"are {problem.devices}: {missing} missing",
            hint=f"give it {counted(missing, 'more device')}, or use --solver auto, which may "
            "share them",
        )
    devices = _least(problem.devices, lambda n: bool(_plan(_with_devices(problem, n))[1]))
    unit = problem.memory_bytes * PRECISION
    units = _least(round(1 / PRECISION), lambda n: bool(_plan(_with_memory(problem, n * unit))[1]))
    memory = None if units is None else units * unit
    if devices is None and memory is None:
        return InfeasibleError(
            f"no degrees that the modules' plans allow fit a batch of {problem.task.batch} on "
            f"{counted(problem.devices, 'device')}, whatever their memory",
            hint="loosen dp, pp, vpp or microbatch in the modules' plan",
        )
    return _missing(problem, devices, memory)


def _missing(problem: Problem, devices: int | None, memory: float | None) -> InfeasibleError:
    have = problem.memory_bytes
    ways: list[str] = []
    if devices is not None:
        ways.append(counted(devices - problem.devices, "more device"))
    if memory is not None:
        ways.append(f"{_rounded_up(memory - have)} more on each device")
    modules = ", ".join(problem.task.modules)
    if memory is None:
        listed = _listed(_with_devices(problem, devices or problem.devices))
        return InfeasibleError(
            f"devices are the tightest constraint: a pipeline of {modules} takes at least "
            f"{devices} ({listed}), there are {problem.devices}",
            hint=f"give it {ways[0]}, or use --solver auto, which may share them",
        )
    fullest, needed = _fullest(problem)
    if needed > have:
        reason = (
            f"module {fullest} needs {_rounded_up(needed)} on a device at best, a device "
            f"has {size(have)}"
        )
    else:
        listed = "" if devices is None else f" ({_listed(_with_devices(problem, devices))})"
        reason = (
            f"with {size(have)} on a device, a pipeline of {modules} takes "
            f"{counted(devices, 'device') if devices else 'more than any number of devices'}"
            f"{listed}, there are {problem.devices}"
        )
    return InfeasibleError(
        f"memory is the tightest constraint: {reason}",
        hint=f"give it {' or '.join(ways)}, recompute: full for {fullest}, or zero: 1",
    )


def _rounded_up(num_bytes: float) -> str:
    """Three digits that are enough."""
    digits = 10 ** max(0, math.floor(math.log10(max(num_bytes, 1.0))) - 2)
    return size(math.ceil(num_bytes / digits) * digits)


def _plan(problem: Problem) -> tuple[Pipelines, list[FormulaPlan]]:
    pipelines = Pipelines(problem)
    found = best_plans(pipelines.groups(), pipelines.edges, devices=problem.devices, any_plan=True)
    return pipelines, found


def _listed(problem: Problem) -> str:
    pipelines, found = _plan(problem)
    tables = pipelines.tables_of(pipelines.frames[found[0].group])
    return ", ".join(
        f"{module} {table.options.devices[row]}"
        for module, table, row in zip(pipelines.modules, tables, found[0].choice, strict=True)
    )


def _fullest(problem: Problem) -> tuple[str, float]:
    """The module that needs most bytes on a device, with all devices to itself."""
    pipelines = Pipelines(problem)
    needed = {
        own.module: min(
            own.needed_bytes(dp, 1, problem.task.batch, pipelines.depths_after[k])
            for dp in (1, max(1, problem.devices))
        )
        for k, own in enumerate(pipelines.tables)
    }
    fullest = max(needed, key=lambda module: needed[module])
    return fullest, needed[fullest]


def _with_devices(problem: Problem, devices: int) -> Problem:
    cluster = problem.request.cluster
    if cluster.device.is_cpu:
        cluster = cluster.model_copy(update={"nodes": 1, "devices_per_node": devices})
    else:
        nodes = -(-devices // cluster.devices_per_node)
        cluster = cluster.model_copy(update={"nodes": nodes})
    request = replace(problem.request, devices=devices, cluster=cluster)
    return Problem(request=request, task=problem.task)


def _with_memory(problem: Problem, memory_bytes: float) -> Problem:
    cluster = problem.request.cluster
    device = cluster.device.model_copy(update={"memory_bytes": memory_bytes})
    cluster = cluster.model_copy(update={"device": device})
    return Problem(request=replace(problem.request, cluster=cluster), task=problem.task)


def _least(have: int, enough: Callable[[int], bool]) -> int | None:
    """The least number above ``have`` that is enough, None where doubling does not find one."""
    low, high = have, 2 * have
    for _ in range(MOST_DOUBLINGS):
        if enough(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
