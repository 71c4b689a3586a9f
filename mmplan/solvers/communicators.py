"""The communicators of ranks, before there is a program in which they could be counted.

A plan has no more of them than is said here. Where it is open whether two are of the same ranks,
both count. :func:`mmplan.program.communicators.communicator_counts` counts them in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.problem import Blocks, Problem

# Where a rank is, and how many ranks of there a stage has, which tells sets of ranks apart.
_Ranks = tuple[Hashable, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModule:
    """Where a module runs.

    Attributes:
        stages: place and blocks of each stage, in order. Stages of one place share ranks.
        tp: ranks of a group.
        dp: groups of a stage.
    """

    stages: tuple[tuple[Hashable, Blocks], ...]
    tp: int
    dp: int

    def ranks(self, stage: int) -> _Ranks:
        """What tells the ranks of a stage from others."""
        return self.stages[stage][0], self.tp * self.dp


PlacedModules = Mapping[str, PlacedModule]


def communicators(problem: Problem, placed: PlacedModules) -> dict[Hashable, frozenset[Hashable]]:
    """By place, a name of each communicator that its ranks have.

    Args:
        problem: the task.
        placed: all of its modules, or some; each other one is on ranks of its own.
    """
    found: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    for module, own in placed.items():
        for place, blocks in own.stages:
            found[place] |= {"all"} if problem.devices > 1 else set()
            found[place] |= _of_stage(problem, module, own, blocks)
        found[own.stages[-1][0]] |= _of_syncs(problem, module, placed)
    for source, target in _routes(problem, placed):
        for place, _ in (source, target):
            found[place] |= {("messages", source, target), ("messages", target, source)}
    return {place: frozenset(names) for place, names in found.items()}


def communicator_counts(
    problem: Problem, module: str, cuts: Sequence[Blocks], *, tp: int, pp: int, dp: int
) -> Floats:
    """``[pp]`` communicators at each position of a module that is alone on its devices."""
    stages = tuple((c % pp, cut) for c, cut in enumerate(cuts))
    names = communicators(problem, {module: PlacedModule(stages=stages, tp=tp, dp=dp)})
    return np.array([len(names[p]) for p in range(pp)], dtype=np.float64)


def _of_stage(problem: Problem, module: str, own: PlacedModule, blocks: Blocks) -> set[Hashable]:
    """Of a TP group, of reductions, and of per-sample losses."""
    stage, sizes = problem.stage(module, blocks), {(own.tp, 1)}
    if stage.trainable:
        sizes.add((1, own.dp))
    if stage.hosted:
        sizes.add((own.tp, own.dp))
    names: set[Hashable] = {("ranks", *size) for size in sizes if size != (1, 1)}
    specs = problem.request.workload.modules
    owners = [specs[m].share or m for m in problem.task.modules]
    owner = specs[module].share or module
    if owners.count(owner) > 1 or problem.costs.profile.ties.get(owner):
        names.add(("owner", owner))
    return names


def _of_syncs(problem: Problem, module: str, placed: PlacedModules) -> set[Hashable]:
    """Of cross-sample losses: of all ranks, and of those that read an input, two each.

    One of the two is for gathers (:mod:`mmplan.program.features`).
    """
    names: set[Hashable] = set()
    own = placed[module]
    ranks = own.ranks(-1)
    for loss in problem.task.sync_batches:
        held = [_ends(placed, s.module)[1] for s in problem.task.loss_inputs[loss] if s.module]
        groups = {frozenset(held), *(frozenset(held[:i] + held[i + 1 :]) for i in range(len(held)))}
        for group in groups:
            if ranks in group and (len(group) > 1 or ranks[1] > 1):
                name = ("ranks", own.tp, own.dp) if len(group) == 1 else ("losses", group)
                names |= {name, ("gathers", problem.task.name, loss, group)}
    return names


def _routes(problem: Problem, placed: PlacedModules) -> Iterator[tuple[_Ranks, _Ranks]]:
    """Sets of ranks between which messages go."""
    for own in placed.values():
        for stage, after in pairwise(range(len(own.stages))):
            if own.ranks(stage) != own.ranks(after):
                yield own.ranks(stage), own.ranks(after)
    for module in problem.task.modules:
        first, last = _ends(placed, module)
        ends = [(first, problem.into_first(module)), (last, problem.into_last(module))]
        for target, producers in ends:
            for producer in producers:
                source = _ends(placed, producer)[1]
                grids = [(p.tp, p.dp) for m in (producer, module) if (p := placed.get(m))]
                if source != target or len({*grids}) > 1:
                    yield source, target


def _ends(placed: PlacedModules, module: str) -> tuple[_Ranks, _Ranks]:
    """The ranks of the first and of the last stage."""
    own = placed.get(module)
    return (((module, 0), 0), ((module, 1), 0)) if own is None else (own.ranks(0), own.ranks(-1))
