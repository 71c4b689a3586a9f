"""All modules on all devices, one after another: no module waits for another's devices.

Every rank runs a replica of every module. Module m with K micro-batches a round takes
K (f + b) a round, so a step takes

    T = sum_m (G K_m (f_m + b_m) + reduce_m) + G s.

The modules choose apart from each other but for the memory that they share, and for the ranks
that take part in a sync: their fronts of time against bytes are merged, those apart that reach
other ranks, which is exact. All this on the first n devices: more of them are not always faster,
where a node more makes the links slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter

import numpy as np

from mmplan.errors import InfeasibleError
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Schedule, ScheduleKind
from mmplan.solvers.distmm.module_options import Stages
from mmplan.solvers.pareto import staircase
from mmplan.solvers.partitioner import tensor_degrees
from mmplan.solvers.placement import make_unit
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.solvers.sample_split import microbatch_sizes, smallest_divisors
from mmplan.wording import counted, missing, size

# Up to so many devices all numbers of them are tried, of more whole nodes only.
_ALL = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleShare:
    """One module's way to share the devices."""

    tp: int
    dp: int
    size: int
    pinned: bool
    time_s: float
    held_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartialShare:
    """Parts of the modules so far, and their sums.

    Attributes:
        reach: ranks of each module, where syncs depend on them.
    """

    parts: tuple[_ModuleShare, ...]
    reach: tuple[int, ...]
    time_s: float
    held_bytes: float


def solve_colocated(request: Request) -> Solution:
    """The best plans with every module on every device, or on the first of them; exact.

    Raises:
        InvalidInputError: several tasks or a pinned vpp (:class:`NotApplicableError`), or a
            method.
        InfeasibleError: the modules do not fit a device's memory together, or their pins
            do not allow to share all devices.
    """
    request.check_exact("colocated")
    problem = Problem(request=request, task=request.only_task("colocated"))
    request.check_not_interleaved("colocated")
    found = _ColocationSearch(problem).run()[: request.top]
    return Solution(
        solver="colocated",
        method="exact",
        candidates=tuple(_candidate(problem, *pair) for pair in found),
        formula_bound_s=found[0][1],
        closed_form=problem.closed_form(),
    )


class _ColocationSearch:
    """Undominated plans on the first n devices; remembers shares and syncs."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._shares = cache(self._compute_shares)
        self._syncs: dict[tuple[int, ...], float] = {}

    def run(self) -> list[tuple[_PartialShare, float]]:
        """Plans that fit with the formula's value, fastest first; of equals those on more devices.

        Raises:
            InfeasibleError: there is none on all devices, nor on fewer.
        """
        found: list[tuple[_PartialShare, float]] = []
        refused: list[InfeasibleError] = []
        for devices in self._counts():
            try:
                wholes = self._wholes(devices)
            except InfeasibleError as error:
                refused.append(error)
            else:
                found += [(whole, self._value_s(whole)) for whole in wholes]
        if not found:
            raise refused[0]
        unique: dict[tuple[_ModuleShare, ...], tuple[_PartialShare, float]] = {}
        for pair in found:
            unique.setdefault(pair[0].parts, pair)
        return sorted(unique.values(), key=lambda pair: pair[1])

    def _counts(self) -> list[int]:
        """Numbers of devices, all of them first, then those that may be as fast."""
        problem, most = self._problem, self._problem.devices
        specs = problem.request.workload.modules
        degrees = {tp for m in problem.task.modules for tp in tensor_degrees(problem, m)}
        # Of replicas with the same largest share the fewest, but for losses and ZeRO-1.
        counts = {int(n) * tp for n in smallest_divisors(problem.round_samples) for tp in degrees}
        pinned = any(specs[m].plan.dp is not None for m in problem.task.modules)
        sharded = any(map(problem.zero_of, problem.task.modules))
        if pinned or sharded or problem.task.sync_batches:
            step = 1 if most <= _ALL else problem.request.cluster.devices_per_node
            counts |= set(range(step, most, step))
        return [most, *sorted((n for n in counts if n < most), reverse=True)]

    def _wholes(self, devices: int) -> list[_PartialShare]:
        """Undominated plans that fit.

        Modules that take each other's outputs get one tp and one micro-batch size where their
        pins allow it: what they give each other then stays on its device.
        """
        problem = self._problem
        parts = {name: list(self._parts(name, devices)) for name in problem.task.modules}
        if not problem.chained():
            return self._merge(parts)
        cuts: list[dict[tuple[int, int], list[_ModuleShare]]] = []
        for own in parts.values():
            cuts.append({})
            for part in own:
                cuts[-1].setdefault((part.tp, part.size), []).append(part)
        aligned: list[_PartialShare] = []
        for key in sorted(set.intersection(*map(set, cuts))):
            same = {name: own[key] for name, own in zip(parts, cuts, strict=True)}
            aligned += self._fitting(self._sums(same))
        return aligned or self._merge(parts)

    def _parts(self, module: str, devices: int) -> Iterator[_ModuleShare]:
        problem = self._problem
        pins = problem.request.workload.modules[module].plan
        if not pins.allows("pp", 1):
            return
        for tp in tensor_degrees(problem, module):
            if pins.allows("tp", tp):
                dp = min(devices // tp, problem.round_samples)
                yield from self._shares(module, tp).get(dp, ())

    def _compute_shares(self, module: str, tp: int) -> dict[int, list[_ModuleShare]]:
        """Ways to share the devices at one tp, by the number of replicas."""
        problem, stages = self._problem, Stages(self._problem, module, 1)
        pins, samples = problem.request.workload.modules[module].plan, problem.round_samples
        replicas = {min(devices // tp, samples) for devices in self._counts()} - {0}
        found = [
            (dp, size, -(-samples // dp))
            for dp in replicas
            if pins.allows("dp", dp)
            for size in microbatch_sizes(-(-samples // dp), pins)
        ]
        dp, size, share = np.array(found, dtype=np.int64).reshape(-1, 3).T
        count = -(-share // size)
        forward_s, backward_s = (x[0] for x in stages.seconds(tp, size, dp))
        time_s = problem.rounds * count * (forward_s + backward_s)
        time_s = time_s + stages.reduce_s(tp, dp, backward_s)
        # Most modules have the same ranks, and no messages.
        costs = problem.module_costs(module)
        whole = costs.stages(((0, problem.blocks(module)),))
        held = costs.held_bytes(whole.held, whole.outputs, tp=tp, size=size)
        flight = POLICIES[_kind(problem)].held_of_step(count, problem.rounds, 0)
        num_bytes = stages.bytes.fixed_bytes(tp, dp)[0] + held * flight
        shares: dict[int, list[_ModuleShare]] = {}
        for (own_dp, own, _), seconds, own_bytes in zip(
            found, time_s.tolist(), num_bytes.tolist(), strict=True
        ):
            shares.setdefault(own_dp, []).append(
                _ModuleShare(
                    tp=tp,
                    dp=own_dp,
                    size=own,
                    pinned=pins.microbatch is not None,
                    time_s=seconds,
                    held_bytes=own_bytes,
                )
            )
        return shares

    def _merge(self, parts: dict[str, list[_ModuleShare]]) -> list[_PartialShare]:
        """Undominated sums of time and bytes that fit a device."""
        for name, own in parts.items():
            if not own:
                raise self._not_shared(name)
        wholes = self._sums(parts)
        if fitting := self._fitting(wholes):
            return fitting
        needed = min(w.held_bytes for w in wholes)
        raise InfeasibleError(
            f"all modules together need {size(needed)} on each device at best, "
            f"{missing(needed, self._problem.memory_bytes)}",
            hint="use --solver distmm with more devices, recompute: full, or a smaller sync_batch",
        )

    def _fitting(self, wholes: Sequence[_PartialShare]) -> list[_PartialShare]:
        return [whole for whole in wholes if whole.held_bytes <= self._problem.memory_bytes]

    def _sums(self, parts: dict[str, list[_ModuleShare]]) -> list[_PartialShare]:
        """Undominated sums of time and bytes."""
        syncs = bool(self._problem.task.sync_batches)
        wholes: list[_PartialShare] = [
            _PartialShare(parts=(), reach=(), time_s=0.0, held_bytes=0.0)
        ]
        for own in parts.values():
            sums = [
                (
                    whole.time_s + part.time_s,
                    whole.held_bytes + part.held_bytes,
                    (*whole.reach, part.tp * part.dp) if syncs else (),
                    whole,
                    part,
                )
                for whole in wholes
                for part in own
            ]
            # Of those that reach the same ranks, those that no other beats in time and bytes.
            wholes = [
                _PartialShare(
                    parts=(*whole.parts, part), reach=reach, time_s=time_s, held_bytes=held
                )
                for time_s, held, reach, whole, part in staircase(
                    sums, itemgetter(0, 1), group=itemgetter(2)
                )
            ]
        return wholes

    def _not_shared(self, module: str) -> InfeasibleError:
        problem = self._problem
        pins = str(problem.request.workload.modules[module].plan) or "no pins"
        degrees = ", ".join(map(str, tensor_degrees(problem, module))) or "none that fits a node"
        return InfeasibleError(
            f"module {module}: to share all of {counted(problem.devices, 'device')} it needs pp 1 "
            f"and a tp of the profile's ({degrees}), its plan ({pins}) allows none of these",
            hint=f"loosen modules.{module}.plan, profile it at another tp, or use --solver distmm",
        )

    def _value_s(self, whole: _PartialShare) -> float:
        """The formula, T."""
        problem = self._problem
        if whole.reach not in self._syncs:
            ranks = (tuple(range(reach)) for reach in whole.reach)
            self._syncs[whole.reach] = problem.sync_s(
                dict(zip(problem.task.modules, ranks, strict=False))
            )
        return whole.time_s + problem.rounds * self._syncs[whole.reach]


def _candidate(problem: Problem, whole: _PartialShare, value_s: float) -> Candidate:
    units = tuple(
        make_unit(
            problem,
            name,
            grid=RankGrid.consecutive(0, part.dp, 1, part.tp),
            blocks=((0, problem.blocks(name)),),
            size=part.size,
            pinned=part.pinned,
            # The consumer is on the same devices: running ahead of it only holds memory.
            schedule=Schedule(kind=_kind(problem), lead=0),
        )
        for name, part in zip(problem.task.modules, whole.parts, strict=True)
    )
    return Candidate(units=units, objective_s=value_s)


def _kind(problem: Problem) -> ScheduleKind:
    return "batch-sync" if problem.task.sync_batches else "1f1b"
