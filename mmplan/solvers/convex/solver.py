"""MMScale: an encoder, an LLM and a generator on devices of their own, planned exactly.

``exact`` finds the optimum of :mod:`.convex_core`'s formula over the degrees of every module;
``cvxpy`` solves the paper's convex relaxation and rounds it.

Source: MMScale (Algorithm 1), with whole blocks, whole samples, memory as the pipeline
holds it, and gradient reductions and messages in the objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from mmplan.solvers.convex.why_infeasible import explain
from mmplan.solvers.placement import place_modules
from mmplan.solvers.problem import Candidate, NotApplicableError, Problem, Request, Solution
from mmplan.solvers.sample_split import split_evenly
from mmplan.wording import counted

METHODS = {
    "exact": "the integer optimum of the formula",
    "cvxpy": "the convex relaxation, rounded",
}
# Plans asked of the search for each one wanted: some may have no placement.
SPARE = 2


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
    return _with_one_node(problem, Problem(request=_first(request, node), task=problem.task))


def _first(request: Request, devices: int) -> Request:
    """The request on the first devices only."""
    cluster = request.cluster.take(devices)
    costs = CostModel(request.costs.profile, cluster, request.costs.training)
    return replace(request, cluster=cluster, devices=devices, costs=costs)


def _with_one_node(whole: Problem, node: Problem) -> Solution:
    """The plans on all devices, and those on one node, best first.

    Of several nodes the formula takes all messages between modules to cross nodes, so plans that
    stay on one are looked for apart.
    """
    try:
        found = best_pipelines(whole)
    except InfeasibleError:
        # What is missing is said of all devices.
        with suppress(InfeasibleError):
            return best_pipelines(node)
        raise
    with suppress(InfeasibleError):
        inside = best_pipelines(node)
        least_s = found.candidates[0].objective_s
        better = [c for c in inside.candidates if c.objective_s < least_s]
        others = [c for c in found.candidates if all(c.units != b.units for b in better)]
        bound_s = min(found.formula_bound_s, inside.formula_bound_s)
        return replace(found, candidates=(*better, *others), formula_bound_s=bound_s)
    return found


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
    top, asked = problem.request.top, _asks_for_vpp(problem)
    searches = [Pipelines(problem, interleaved=asked)]
    if top > 1 and not asked:
        searches.append(Pipelines(problem))
    found = [(pipelines, _found(pipelines, top)) for pipelines in searches]
    values = [plans[0].value_s for _, plans in found if plans]
    if not values:
        raise explain(problem)
    candidates: dict[tuple[Unit, ...], Candidate] = {}
    for pipelines, plans in found:
        for candidate in islice(candidates_of(pipelines, plans), top):
            candidates.setdefault(candidate.units, candidate)
    if not candidates:
        raise _no_placement()
    return Solution(
        solver="convex",
        method="exact",
        candidates=tuple(candidates.values()),
        formula_bound_s=min(*values, *(c.objective_s for c in candidates.values())),
    )


def _asks_for_vpp(problem: Problem) -> bool:
    specs = problem.request.workload.modules
    return any(specs[module].plan.vpp is not None for module in problem.task.modules)


def _solve_relaxed(problem: Problem) -> Solution:
    plans = relax(problem)
    made = (
        make_candidate(plans.pipelines, plan.frame, plan.picks, plan.value_s)
        for plan in plans.rounded
    )
    candidates = list(islice((c for c in made if c is not None), problem.request.top))
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
        "no placement keeps every tensor-parallel group inside a node",
        hint="limit tp in the modules' plan, or give it more devices",
    )


def _found(pipelines: Pipelines, top: int) -> list[FormulaPlan]:
    groups = pipelines.groups()
    return best_plans(
        groups,
        pipelines.edges,
        devices=pipelines.problem.devices,
        top=top if top == 1 else SPARE * top,
    )


def candidates_of(pipelines: Pipelines, found: Sequence[FormulaPlan]) -> Iterator[Candidate]:
    """The plans that can be placed, with their units."""
    for plan in found:
        frame = pipelines.frames[plan.group]
        picks = {
            module: pipelines.tables[k].pick(pipelines.table(k, frame), plan.choice[k])
            for k, module in enumerate(pipelines.modules)
        }
        candidate = make_candidate(pipelines, frame, picks, plan.value_s)
        if candidate is not None:
            yield candidate


def make_candidate(
    pipelines: Pipelines, frame: BackboneShape, picks: dict[str, SelectedOption], value_s: float
) -> Candidate | None:
    """Units on ranks; None where some tensor-parallel group would cross nodes."""
    problem = pipelines.problem
    grids = place_modules(
        {name: (pick.dp, pick.pp, pick.tp) for name, pick in picks.items()},
        cluster=problem.request.cluster,
        devices=problem.devices,
    )
    if grids is None:
        return None
    units = tuple(_unit(problem, name, pick, frame, grids[name]) for name, pick in picks.items())
    return Candidate(units=units, objective_s=value_s, notes=tuple(_notes(pipelines, frame)))


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
