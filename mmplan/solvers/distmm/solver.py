"""DistMM: every module on devices of its own, the formula's optimum and the plans next to it.

Source: DistMM, NSDI 2024, sections 4 and 5, with the objective of :mod:`.balancer`; for
modules that take each other's outputs, of :mod:`.chained_modules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice, product
from operator import attrgetter

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.plan import Schedule
from mmplan.solvers.distmm.balancer import OptionTable, balance_best_first, make_table
from mmplan.solvers.distmm.chained_modules import ChainSearch, Choice
from mmplan.solvers.distmm.module_options import Coupling, Method, ModuleOptions, Option
from mmplan.solvers.partitioner import module_stages
from mmplan.solvers.placement import last_stage_ranks, make_unit, place_modules
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.solvers.search_budget import SearchBudget
from mmplan.wording import counted, missing, size

# Seconds of choosing and placing a plan of modules that take nothing from each other.
_PLACE_S = 2e-3
# What coupled modules agree on.
_TP = attrgetter("tp")
_GRID = attrgetter("tp", "pp")


METHODS = {
    "exact": Method(),
    "even": Method(about="equal shares for all replicas", uneven=False),
    "paper": Method(about="the partitioner's degrees", preferred_only=True),
    "one-grid": Method(about="without the partitioner", one_grid=True),
    "same-devices": Method(about="without the load balancer", same_devices=True),
    "drained": Method(about="without interleaved sync batches", kinds=("gpipe",)),
}


def solve_distmm(request: Request) -> Solution:
    """The ``top`` best plans of the formula, and the proof of the best.

    Raises:
        InvalidInputError: several tasks, a pinned vpp, or an unknown method.
        InfeasibleError: too few devices, or too little memory; names what is missing.
    """
    problem = Problem(request=request, task=request.only_task("distmm"))
    request.check_not_interleaved("distmm")
    name = request.method or "exact"
    if name not in METHODS:
        raise InvalidInputError(
            f"--method {name}: distmm knows {', '.join(METHODS)}",
            hint="leave --method out for exact",
        )
    modules = make_options(problem, METHODS[name])
    check_feasible(problem, modules)
    candidates, bound_s = best_candidates(problem, modules)
    return Solution(
        solver="distmm",
        method=name,
        candidates=tuple(candidates),
        formula_bound_s=bound_s,
        closed_form=problem.closed_form(),
    )


def make_options(problem: Problem, method: Method) -> dict[str, ModuleOptions]:
    """What every module of the task may choose from, by its name."""
    names = problem.task.modules
    specs = problem.request.workload.modules
    owners = {name: specs[name].share or name for name in names}

    def coupling(name: str) -> Coupling | None:
        if method.one_grid:
            return Coupling(name="all modules", key=_GRID)
        alone = list(owners.values()).count(owners[name]) == 1
        return None if alone else Coupling(name=owners[name], key=_TP)

    return {n: ModuleOptions(problem, n, method, coupling(n)) for n in names}


def best_candidates(
    problem: Problem, modules: dict[str, ModuleOptions]
) -> tuple[list[Candidate], float]:
    """The ``top`` best plans by the whole formula, syncs included, and a bound on it.

    The search knows a bound on the syncs only (they depend on all ranks together), so it
    goes on until no later choice can come before the ones found.
    """
    request, budget = problem.request, SearchBudget(problem.request.budget_s)
    least_sync_s = problem.rounds * problem.least_sync_s()
    found: list[Candidate] = []
    bound_s = float("inf")
    for choice in _choices(problem, modules, budget):
        bound_s = choice.bound_s + least_sync_s
        known = sorted(c.objective_s for c in found)
        if len(found) >= request.top and bound_s >= known[request.top - 1]:
            break
        # Of chains only the best were searched for, and they are all there by now.
        if found and not problem.chained() and budget.is_over:
            break
        budget.spend(_PLACE_S)
        candidate = _candidate(problem, modules, choice)
        if candidate is not None:
            found.append(candidate)
    else:
        # All choices were seen; of chains only the best are given.
        bound_s = bound_s if problem.chained() else float("inf")
    if not found:
        raise InfeasibleError(
            "no placement keeps every tensor-parallel group inside a node",
            hint="limit tp in the modules' plan, or give it more devices",
        )
    found.sort(key=lambda c: c.objective_s)
    return found[: request.top], min(bound_s, found[0].objective_s)


def _choices(
    problem: Problem, modules: dict[str, ModuleOptions], budget: SearchBudget
) -> Iterator[Choice]:
    """Choices of the whole search space, best first."""
    parts = (_search(problem, options, budget) for options in _selections(modules))
    return merge(*parts, key=lambda choice: choice.bound_s)


def _selections(modules: dict[str, ModuleOptions]) -> Iterator[list[list[Option]]]:
    """Options of each module, once for everything that the modules of a coupling may agree on."""
    couplings: dict[Coupling, list[ModuleOptions]] = {}
    for own in modules.values():
        if own.coupling is not None:
            couplings.setdefault(own.coupling, []).append(own)
    common = [
        set.intersection(*({coupling.key(o) for o in own.options} for own in members))
        for coupling, members in couplings.items()
    ]
    for keys in product(*(sorted(each, key=str) for each in common)):
        agreed = dict(zip(couplings, keys, strict=True))
        yield [
            [
                option
                for option in own.options
                if own.coupling is None or own.coupling.key(option) == agreed[own.coupling]
            ]
            for own in modules.values()
        ]


def _search(
    problem: Problem, options: Sequence[Sequence[Option]], budget: SearchBudget
) -> Iterator[Choice]:
    fewest = sum(min(o.devices for o in own) for own in options)
    if fewest > problem.devices:
        return
    tables = [_table(own) for own in options]
    plans = balance_best_first(tables, devices=problem.devices, rounds=problem.rounds)
    choices = (
        Choice(
            options=tuple(own[i] for own, i in zip(options, plan.choice, strict=True)),
            objective_s=plan.objective_s,
            bound_s=plan.objective_s,
        )
        for plan in plans
    )
    if not problem.chained():
        yield from choices
        return
    order, top = problem.task.modules, problem.request.top
    edges = [(order.index(p), i) for i, m in enumerate(order) for p in problem.producers(m)]
    chain = ChainSearch(options, edges=edges, rounds=problem.rounds, devices=problem.devices)
    # What is best without the ways between modules is near the best with them.
    first = [choice.options for choice in islice(choices, top)]
    yield from chain.best_first(top=top, budget=budget, first=first)


def _table(options: Sequence[Option]) -> OptionTable:
    groups: dict[tuple[int, int, int], int] = {}
    return make_table(
        [o.devices for o in options],
        [o.first_s for o in options],
        round_s=[o.round_s for o in options],
        last_s=[o.last_s for o in options],
        device_s=[o.device_s for o in options],
        group=[groups.setdefault((o.tp, o.pp, o.dp), len(groups)) for o in options],
    )


def _candidate(
    problem: Problem, modules: dict[str, ModuleOptions], choice: Choice
) -> Candidate | None:
    """Place a choice and add its syncs; None where it cannot be placed."""
    chosen = dict(zip(modules, choice.options, strict=True))
    grids = place_modules(
        {name: (o.dp, o.pp, o.tp) for name, o in chosen.items()},
        cluster=problem.request.cluster,
        devices=problem.devices,
    )
    if grids is None:
        return None
    units = tuple(
        make_unit(
            problem,
            name,
            grid=grids[name],
            blocks=module_stages(problem, name, option.pp),
            size=option.size,
            pinned=option.pinned,
            schedule=Schedule(kind=option.kind, lead=option.lead),
        )
        for name, option in chosen.items()
    )
    sync_s = problem.sync_s({unit.module: last_stage_ranks(unit) for unit in units})
    return Candidate(units=units, objective_s=choice.objective_s + problem.rounds * sync_s)


def check_feasible(problem: Problem, modules: dict[str, ModuleOptions]) -> None:
    """Refuse what has no plan, with the tightest constraint and what is missing.

    Raises:
        InfeasibleError: fewer devices than modules, a module without an option, or least
            devices that add up to too many.
    """
    count = len(modules)
    if count > problem.devices:
        raise InfeasibleError(
            f"distmm gives each of {count} modules devices of its own, there are "
            f"{problem.devices}: {count - problem.devices} missing",
            hint="--solver auto also tries all modules on all devices",
        )
    for name, own in modules.items():
        if not own.options:
            raise _no_option(problem, name, own)
    fewest = {name: min(o.devices for o in own.options) for name, own in modules.items()}
    total = sum(fewest.values())
    if total > problem.devices:
        largest = max(fewest, key=lambda name: fewest[name])
        listed = ", ".join(f"{name} {n}" for name, n in fewest.items())
        raise InfeasibleError(
            f"the modules need at least {counted(total, 'device')} ({listed}), there are "
            f"{problem.devices}: {total - problem.devices} missing, most of them for {largest}",
            hint=f"use {counted(total, 'device')} or more, or --solver auto, which may share them",
        )


def _no_option(problem: Problem, name: str, own: ModuleOptions) -> InfeasibleError:
    if not own.tried:
        pins = problem.request.workload.modules[name].plan
        degrees = problem.costs.tp_options(task=problem.task.name, module=name)
        return InfeasibleError(
            f"module {name}: no tp and pp fit its plan ({pins}), the profile's tp "
            f"{', '.join(map(str, degrees))} and {counted(problem.devices, 'device')}",
            hint=f"loosen modules.{name}.plan, or profile it at another tp",
        )
    if own.shortage is None:
        return InfeasibleError(
            f"module {name}: no number of replicas and micro-batch allowed by its plan fits a "
            f"round of {problem.round_samples} samples on {counted(problem.devices, 'device')}",
            hint=f"loosen dp or microbatch in modules.{name}.plan",
        )
    needed, tp, pp = own.shortage
    return InfeasibleError(
        f"module {name} needs {size(needed)} on a device at best (tp {tp}, pp {pp}), "
        f"{missing(needed, problem.memory_bytes)}",
        hint=f"give it more devices, recompute: full for {name}, a smaller sync_batch or zero: 1",
    )
