"""What a module may choose from: degrees, replicas, micro-batches and order, with their costs.

Symbols, as in DistMM: K micro-batches of a round, P stages, f and b the forward and backward
seconds of the slowest stage on the slowest replica's largest micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmplan.arrays import Floats
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import ScheduleKind, Unit
from mmplan.solvers.communicators import PlacedModule, communicators
from mmplan.solvers.messages import stage_messages
from mmplan.solvers.pareto import pareto_rows
from mmplan.solvers.partitioner import degree_candidates, module_stages
from mmplan.solvers.problem import Blocks, Problem, Request
from mmplan.solvers.sample_split import microbatch_sizes, replica_counts

# Far beyond any device: a unit that still fits is not limited by memory.
UNLIMITED = 2**40
# Micro-batches that a stage runs ahead of the next one, so that messages hide behind work.
LONG_LEAD = 2


class StageOrders(NamedTuple):
    """Orders of a module's stages that fit the memory, each with its lead.

    Attributes:
        needed_bytes: of the smallest, whether it fits or not.
        is_all: nothing was left out for lack of memory.
    """

    found: list[tuple[ScheduleKind, int]]
    needed_bytes: float
    is_all: bool


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch.

    Attributes:
        forward_s: of the slowest stage, f; ``backward_s`` likewise, b.
        busy_s: of all stages.
        backwards_s: of all stages, their backwards only.
    """

    forward_s: float
    backward_s: float
    busy_s: float
    backwards_s: float


class Stages:
    """A module cut into stages at given degrees; remembers what it was asked."""

    def __init__(self, problem: Problem, module: str, tp: int, pp: int) -> None:
        self.problem, self.module, self.tp, self.pp = problem, module, tp, pp
        self.blocks: tuple[Blocks, ...] = module_stages(problem, module, pp)
        self._times: dict[tuple[int, int], tuple[tuple[float, float], ...]] = {}
        self._held: dict[int, tuple[float, ...]] = {}
        self._fixed: dict[int, tuple[float, ...]] = {}
        self._reduce: dict[int, tuple[float, float]] = {}
        self._work: dict[tuple[int, int], StageSeconds] = {}
        self._transfers: dict[int, list[float]] = {}
        self._intervals: dict[tuple[int, int, int], float] = {}
        # The same as arrays, one number for each stage.
        self._held_P: dict[int, Floats] = {}
        self._fixed_P: dict[int, Floats] = {}
        self._flights_P: dict[tuple[ScheduleKind, int, int], Floats] = {}
        self._beside_P: dict[tuple[ScheduleKind, int, int], Floats] = {}
        placed = {module: PlacedModule(stages=tuple(enumerate(self.blocks)), tp=tp, dp=1)}
        self._messages = [stage_messages(problem, module, cut, placed) for cut in self.blocks]
        self._backward = [problem.has_backward(module, blocks) for blocks in self.blocks]
        self._later = len(_downstream(problem, module))
        nodes = [problem.request.cluster.node_of(p * tp) for p in range(pp)]
        self._apart = [here != there for here, there in pairwise(nodes)]
        # Messages take a latency and a time in proportion to the samples.
        self._transfer_s = self._transfers_s(0)
        self._transfer_per_sample_s = [
            one - none for none, one in zip(self._transfer_s, self._transfers_s(1), strict=True)
        ]
        self._gathered: dict[int, list[tuple[float, float]]] = {}
        # Bytes of gradients to sum, None where a stage has none.
        self._summed = [
            problem.gradient_bytes(module, cut, tp) if problem.trainable(module, cut) else None
            for cut in self.blocks
        ]

    def times(self, size: int, dp: int) -> tuple[tuple[float, float], ...]:
        """Forward and backward seconds of every stage for one micro-batch."""
        key = size, dp if self.problem.varies else 1
        if key not in self._times:
            stages = [self.problem.stage_s(self.module, cut, self.tp, *key) for cut in self.blocks]
            self._times[key] = tuple(
                (forward_s + own[0], backward_s + own[1])
                for (forward_s, backward_s), own in zip(stages, self._gathers_s(size), strict=True)
            )
        return self._times[key]

    def work(self, size: int, dp: int) -> StageSeconds:
        """Most and all seconds of any stage for one micro-batch."""
        key = size, dp if self.problem.varies else 1
        if key not in self._work:
            times = self.times(*key)
            forward_s, backward_s = zip(*times, strict=True)
            self._work[key] = StageSeconds(
                max(forward_s), max(backward_s), sum(map(sum, times)), sum(backward_s)
            )
        return self._work[key]

    def _gathers_s(self, size: int) -> list[tuple[float, float]]:
        """Forward and backward, of every stage: bringing together what came in shares."""
        if size not in self._gathered:
            cuts = [0.0] * (self.pp + 1)
            for p in range(self.pp - 1 if self.tp > 1 else 0):
                if self._apart[p]:
                    cuts[p + 1] = self.problem.costs.gather_shares_s(
                        ranks=range(p * self.tp, (p + 1) * self.tp),
                        num_bytes=size * self._cut_bytes(p),
                    )
            backs = [self._backward[p] * cut for p, cut in enumerate(cuts[1:])]
            self._gathered[size] = list(zip(cuts[:-1], backs, strict=True))
        return self._gathered[size]

    def _cut_bytes(self, p: int) -> float:
        """Per sample, after a stage."""
        return self.problem.output_bytes(self.module, self.blocks[p][1] - 1)

    def slowest(self) -> tuple[float, float, float]:
        """Most forward and backward seconds of one sample, and gradient bytes, of any stage."""
        times, problem = self.times(1, 1), self.problem
        return (
            max(f for f, _ in times),
            max(b for _, b in times),
            max(problem.gradient_bytes(self.module, cut, self.tp) for cut in self.blocks),
        )

    def held(self, size: int) -> tuple[float, ...]:
        """Bytes that each stage holds of one micro-batch, with the messages that it carries."""
        if size not in self._held:
            self._held[size] = tuple(
                self.problem.held_bytes(self.module, blocks, self.tp, size) + size * own.carried
                for blocks, own in zip(self.blocks, self._messages, strict=True)
            )
        return self._held[size]

    def active(self, size: int, kind: ScheduleKind, count: int, lead: int = 1) -> tuple[float, ...]:
        """Bytes of activations and messages on each stage's devices (:meth:`in_flight`)."""
        flights = self.in_flight(kind, count, lead)
        beside = self._beside(count)
        return tuple(
            h * n + size * b for h, n, b in zip(self.held(size), flights, beside, strict=True)
        )

    def _beside(self, count: int) -> list[float]:
        """Bytes per sample of messages beside those that micro-batches in flight carry."""
        steps = self.problem.rounds * count
        return [own.bytes_beside(steps) for own in self._messages]

    def fixed(self, dp: int) -> tuple[float, ...]:
        """Bytes of parameters, and of communicators, on each stage's devices."""
        key = dp if self.problem.costs.training.zero or dp == 1 else 2
        if key not in self._fixed:
            each = self.problem.request.cluster.device.communicator_bytes
            stages = tuple(enumerate(self.blocks))
            placed = {self.module: PlacedModule(stages=stages, tp=self.tp, dp=key)}
            names = communicators(self.problem, placed) if each else {}
            self._fixed[key] = tuple(
                self.problem.fixed_bytes(self.module, blocks, self.tp, dp)
                + each * len(names.get(p, ()))
                for p, blocks in stages
            )
        return self._fixed[key]

    def in_flight(self, kind: ScheduleKind, count: int, lead: int = 1) -> list[int]:
        """Most micro-batches that each stage holds of the G K of a step.

        A stage without a backward holds only the one that it computes.
        """
        policy, total = POLICIES[kind], self.problem.rounds * count
        ahead = [lead * (self.pp - 1 - p) + self._later for p in range(self.pp)]
        return [
            min(total, policy.in_flight(count, stages)) if backward else 1
            for stages, backward in zip(ahead, self._backward, strict=True)
        ]

    def orders(self, dp: int, count: int, size: int, kinds: Sequence[ScheduleKind]) -> StageOrders:
        """The orders that fit the memory.

        The first of ``kinds`` that fits, and, where messages between sync batches would hold
        it up, the same with a longer lead. Without a cross-sample loss there is only 1f1b.
        """
        needed = float("inf")
        allowed: Sequence[ScheduleKind] = kinds if self.problem.task.sync_batches else ("1f1b",)
        for kind in allowed:
            runs_ahead = POLICIES[kind].runs_ahead
            lead = int(runs_ahead)
            own = self._needed_bytes(dp, size, (kind, count, lead))
            needed = min(needed, own)
            if own > self.problem.memory_bytes:
                continue
            found: list[tuple[ScheduleKind, int]] = [(kind, lead)]
            is_all = kind == allowed[0]
            if runs_ahead and self.problem.rounds > 1 and any(self.transfers(size)):
                longer = self._needed_bytes(dp, size, (kind, count, LONG_LEAD))
                if longer <= self.problem.memory_bytes:
                    found.append((kind, LONG_LEAD))
                else:
                    is_all = False
            return StageOrders(found, needed, is_all)
        return StageOrders([], needed, False)

    def _needed_bytes(self, dp: int, size: int, order: tuple[ScheduleKind, int, int]) -> float:
        """Of the fullest stage in an order (:meth:`in_flight`). Asked very often."""
        if dp not in self._fixed_P:
            self._fixed_P[dp] = np.array(self.fixed(dp))
        if size not in self._held_P:
            self._held_P[size] = np.array(self.held(size))
        if order not in self._flights_P:
            self._flights_P[order] = np.array(self.in_flight(*order), dtype=np.float64)
            self._beside_P[order] = np.array(self._beside(order[1]))
        active_P = self._held_P[size] * self._flights_P[order] + size * self._beside_P[order]
        return float((self._fixed_P[dp] + active_P).max())

    def interval_s(self, size: int, dp: int, lead: int) -> float:
        """From one micro-batch to the next where a stage alternates backward and forward.

        A gradient's way back over k cuts and the way on of what it lets go take (k + 1)(f + b)
        and 2 k messages, in which a stage that runs ``lead`` ahead of the next one makes
        k lead + 1 micro-batches. The least interval is greatest for one cut or for all of them.
        """
        key = size, dp if self.problem.varies else 1, lead
        if key not in self._intervals:
            self._intervals[key] = self._interval_s(*key)
        return self._intervals[key]

    def _interval_s(self, size: int, dp: int, lead: int) -> float:
        work_s = self.work(size, dp).forward_s + self.work(size, dp).backward_s
        if lead == 0 or self.pp == 1:
            return work_s
        # To the next node go activations and to the last one gradients, and share the way out.
        ways = [
            2 * s if apart else s
            for s, apart in zip(self.transfers(size), self._apart, strict=True)
        ]
        one_cut_s = 2 * (work_s + max(ways)) / (lead + 1)
        cuts = self.pp - 1
        all_cuts_s = (self.pp * work_s + 2 * sum(ways)) / (cuts * lead + 1)
        return max(work_s, max(ways), one_cut_s, all_cuts_s)

    def transfers(self, size: int) -> list[float]:
        """Seconds of each message of one micro-batch from stage to stage, one way."""
        if size not in self._transfers:
            self._transfers[size] = [
                a + size * b
                for a, b in zip(self._transfer_s, self._transfer_per_sample_s, strict=True)
            ]
        return self._transfers[size]

    def _transfers_s(self, size: int) -> list[float]:
        """Seconds of each message from stage to stage, forward or backward."""
        # Between nodes each rank of a TP group sends a share, and all share one link.
        return [
            self.problem.costs.message_s(
                source=p * self.tp,
                target=(p + 1) * self.tp,
                num_bytes=size * self._cut_bytes(p),
            )
            for p in range(self.pp - 1)
        ]

    def reduce_s(self, dp: int, size: int) -> float:
        """Seconds of gradient reduction after the last stage to end, replicas side by side.

        The stages of a replica on one node share its bandwidth, but end their last micro-batch
        one backward after the other: n reductions so end max(one alone, n - (n - 1) backwards)
        after the last stage.
        """
        if dp == 1:
            return 0.0
        per_node = self.problem.request.cluster.devices_per_node
        sharers = min(self.tp * self.pp, per_node)
        if dp not in self._reduce:
            # Of stages in the same place of their nodes the one with most to sum takes longest.
            most: dict[int, tuple[float, int]] = {}
            for p, own in enumerate(self._summed):
                place = p * self.tp % per_node
                if own is not None:
                    most[place] = max((own, p), most.get(place, (0.0, p)))
            alone_s, together_s = (
                max((self._sum_s(dp, p, own, n) for own, p in most.values()), default=0.0)
                for n in (self.tp, sharers)
            )
            self._reduce[dp] = alone_s, together_s
        alone_s, together_s = self._reduce[dp]
        backward_s = self.work(size, dp).backwards_s / self.pp
        return max(alone_s, together_s - (sharers // self.tp - 1) * backward_s)

    def _sum_s(self, dp: int, p: int, num_bytes: float, sharers: int) -> float:
        """Seconds of one stage's gradient reduction."""
        ranks = range(p * self.tp, dp * self.pp * self.tp, self.pp * self.tp)
        return self.problem.costs.all_reduce_s(ranks=ranks, num_bytes=num_bytes, sharers=sharers)


def _downstream(problem: Problem, module: str) -> set[str]:
    """Modules that take the output, directly or not: at least one stage each comes later."""
    found: set[str] = set()
    for consumer in problem.consumers(module):
        found |= {consumer} | _downstream(problem, consumer)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run one module on devices of its own.

    Attributes:
        dp: replicas, n.
        share: samples of a round on the slowest replica.
        size: its largest micro-batch.
        pinned: the micro-batch size is the user's.
        count: micro-batches of the slowest replica, K.
        kind: order of its stages.
        lead: micro-batches that a stage runs ahead of the next one.
        interval_s: from one micro-batch to the next between two syncs.
        forward_s: of the slowest stage, f; ``backward_s`` likewise, b.
        transfers_s: one message over each cut between stages.
        transfer_s: the slowest of these.
        reduce_s: gradient reductions after the last stage to end.
        busy_s: forward and backward of one micro-batch on all stages.
        rounds: per step, G.
    """

    tp: int
    pp: int
    dp: int
    share: int
    size: int
    pinned: bool
    count: int
    kind: ScheduleKind
    lead: int
    interval_s: float
    forward_s: float
    backward_s: float
    transfers_s: float
    transfer_s: float
    reduce_s: float
    busy_s: float
    rounds: int
    even: bool

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.tp * self.pp * self.dp

    @property
    def fill_forward_s(self) -> float:
        """First micro-batch through all stages: P f and the messages."""
        return self.pp * self.forward_s + self.transfers_s

    @property
    def drain_backward_s(self) -> float:
        """The last micro-batch's way back: P b and the messages."""
        return self.pp * self.backward_s + self.transfers_s

    @property
    def steady_forward_s(self) -> float:
        """The other micro-batches: (K - 1) f, or as fast as messages follow each other."""
        return (self.count - 1) * max(self.forward_s, self.transfer_s)

    @property
    def steady_backward_s(self) -> float:
        """The other micro-batches: (K - 1) b, or as fast as messages follow each other."""
        return (self.count - 1) * max(self.backward_s, self.transfer_s)

    @property
    def first_s(self) -> float:
        """(K + P - 1) f."""
        return self.fill_forward_s + self.steady_forward_s

    @property
    def last_s(self) -> float:
        """(K + P - 1) b, and the reduction."""
        return self.drain_backward_s + self.steady_backward_s + self.reduce_s

    @property
    def round_s(self) -> float:
        """From sync to sync: K paces; a gpipe drains and fills, (K + P - 1) (f + b)."""
        if self.rounds == 1:
            return 0.0
        fill_and_drain_s = self.first_s + self.last_s - self.reduce_s
        return POLICIES[self.kind].round_s(self.count, self.interval_s, fill_and_drain_s)

    @property
    def device_s(self) -> float:
        """Busy device-seconds of a step."""
        return self.rounds * self.count * self.dp * self.tp * self.busy_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The whole search, or what is left of it with a component of DistMM switched off.

    Attributes:
        about: for the reference of the docs.
        uneven: shares of a round may differ by replica.
        preferred_only: stop at the first degrees with a feasible option (the partitioner).
        kinds: orders of a module's stages, the best first.
        one_grid: all modules have one tp and one pp.
        same_devices: no module has more devices than another one may have.
    """

    about: str = "all degrees, uneven shares"
    uneven: bool = True
    preferred_only: bool = False
    kinds: tuple[ScheduleKind, ...] = ("batch-sync", "gpipe")
    one_grid: bool = False
    same_devices: bool = False


class Coupling(NamedTuple):
    """Modules that must agree in something: ``key`` of their options must be equal."""

    name: str
    key: Callable[[Option], Hashable]


class ModuleOptions:
    """The feasible options of one module, none of them dominated by another.

    Args:
        problem: its task, devices and costs.
        module: its name.
        method: what is left of the search.
        coupling: whom it must agree with; options do not dominate those that others may need.
    """

    def __init__(
        self, problem: Problem, module: str, method: Method, coupling: Coupling | None
    ) -> None:
        self.module, self.coupling = module, coupling
        # Why options were dropped: the least bytes that any of them would have needed, tp and pp.
        self.shortage: tuple[float, int, int] | None = None
        most = problem.devices
        if method.same_devices:
            most = max(1, most // len(problem.task.modules))
        self.tried = [(tp, pp) for tp, pp in degree_candidates(problem, module) if tp * pp <= most]
        self._problem, self._method, self._most = problem, method, most
        self._pins = problem.request.workload.modules[module].plan
        options: list[Option] = []
        # Of each tp the last number of stages with which everything fitted.
        enough: dict[int, tuple[float, float, float]] = {}
        for tp, pp in self.tried:
            stages = Stages(problem, module, tp, pp)
            slowest = stages.slowest()
            if coupling is None and tp in enough and _is_no_better(slowest, enough[tp]):
                # More stages, none of them shorter: a longer fill on more devices.
                continue
            self._is_all = True
            options += self._of_degrees(stages)
            enough |= {tp: slowest} if self._is_all else {}
            if options and method.preferred_only:
                break
        groups: dict[Hashable, list[Option]] = {}
        chained = problem.chained()
        for option in options:
            # What a chain waits for depends on whether micro-batches hold the same samples.
            cuts = (option.count, option.even) if chained else None
            groups.setdefault((coupling and coupling.key(option), cuts), []).append(option)
        self.options = [x for own in groups.values() for x in _undominated(own, chained=chained)]

    def _of_degrees(self, stages: Stages) -> Iterator[Option]:
        problem, devices = self._problem, stages.tp * stages.pp
        counts = replica_counts(
            problem.round_samples,
            self._most // devices,
            uneven=self._method.uneven,
            pins=self._pins,
        )
        for dp in counts:
            share = -(-problem.round_samples // dp)
            for size in microbatch_sizes(share, self._pins):
                yield from self._options(stages, dp, share, size)

    def _options(self, stages: Stages, dp: int, share: int, size: int) -> Iterator[Option]:
        """One for each order that fits."""
        orders = stages.orders(dp, -(-share // size), size, self._method.kinds)
        self._is_all &= orders.is_all
        if not orders.found and (self.shortage is None or orders.needed_bytes < self.shortage[0]):
            self.shortage = orders.needed_bytes, stages.tp, stages.pp
        for kind, lead in orders.found:
            yield self._option(stages, dp, share, size, kind, lead)

    def _option(
        self, stages: Stages, dp: int, share: int, size: int, kind: ScheduleKind, lead: int
    ) -> Option:
        work, transfers = stages.work(size, dp), stages.transfers(size)
        pinned, count = self._pins.microbatch is not None, -(-share // size)
        return Option(
            tp=stages.tp,
            pp=stages.pp,
            dp=dp,
            share=share,
            size=size,
            pinned=pinned,
            count=count,
            kind=kind,
            lead=lead,
            interval_s=stages.interval_s(size, dp, lead),
            forward_s=work.forward_s,
            backward_s=work.backward_s,
            transfers_s=sum(transfers),
            transfer_s=max(transfers, default=0.0),
            reduce_s=stages.reduce_s(dp, size),
            busy_s=work.busy_s,
            rounds=self._problem.rounds,
            even=count * size * dp == self._problem.round_samples,
        )


def _is_no_better(slowest: tuple[float, float, float], known: tuple[float, float, float]) -> bool:
    return all(now >= before * (1 - 1e-9) for now, before in zip(slowest, known, strict=True))


def _undominated(options: Sequence[Option], *, chained: bool) -> list[Option]:
    """Options that no other one equals or beats in devices, times and device-seconds."""
    if not options:
        return []
    names = ["devices", "first_s", "round_s", "last_s", "device_s"]
    if chained:
        names += ["fill_forward_s", "steady_forward_s", "drain_backward_s", "steady_backward_s"]
    rows = np.array([[getattr(option, name) for name in names] for option in options])
    return [options[i] for i in pareto_rows(rows)]


def largest_of_all_tasks(request: Request, units: Sequence[Unit]) -> dict[str, int]:
    """:func:`largest_sync_batches` of the tasks of a plan with these units."""
    sizes: dict[str, int] = {}
    for task in request.tasks.values():
        own = [unit for unit in units if unit.task == task.name]
        sizes |= largest_sync_batches(Problem(request=request, task=task), own)
    return sizes


def largest_sync_batches(problem: Problem, units: Sequence[Unit]) -> dict[str, int]:
    """Samples of the largest sync batch that still fits, by cross-sample loss.

    A replica holds K micro-batches of the sync batch and those that later stages need. Each
    stage gives the most K that fits beside the other units of its ranks; K micro-batches
    times the replicas, least over the modules, is the answer. A loss whose modules hold no
    activations is not limited, and is left out.
    """
    spare = _spare_bytes(problem, units)
    sizes: dict[str, int] = {}
    for loss in problem.task.sync_batches:
        modules = problem.synced_modules(loss)
        limits = [_limit(problem, u, spare[u.name]) for u in units if u.module in modules]
        if min(limits) < UNLIMITED:
            sizes[loss] = min(limits)
    return sizes


def _limit(problem: Problem, unit: Unit, spare: Sequence[float]) -> int:
    """Samples that all replicas of a unit can hold for one sync; see above."""
    stages = Stages(problem, unit.module, unit.tp, unit.pp)
    size = max(unit.microbatches[0])

    def is_too_large(count: int) -> bool:
        active = stages.active(size, unit.schedule.kind, count, unit.schedule.lead)
        return any(own > most for own, most in zip(active, spare, strict=True))

    most = -(-UNLIMITED // (size * unit.dp))
    count = bisect_left(range(1, most), True, key=is_too_large)
    return UNLIMITED if count == most - 1 else count * size * unit.dp


def _spare_bytes(problem: Problem, units: Sequence[Unit]) -> dict[str, list[float]]:
    """Bytes for activations on each stage of each unit.

    Units on common devices share what their parameters leave, in proportion to what their
    activations take now.
    """
    fixed: dict[str, list[float]] = {}
    active: dict[str, list[float]] = {}
    for unit in units:
        stages = Stages(problem, unit.module, unit.tp, unit.pp)
        count, size = len(unit.microbatches[0]), max(unit.microbatches[0])
        fixed[unit.name] = list(stages.fixed(unit.dp))
        active[unit.name] = list(stages.active(size, "gpipe", count))
    spare: dict[str, list[float]] = {}
    for unit in units:
        beside = [u for u in units if set(u.all_ranks) & set(unit.all_ranks)]
        spare[unit.name] = []
        for p in range(unit.pp):
            # Units that share devices have one stage each; others have only themselves.
            index = {u.name: p if u is unit else 0 for u in beside}
            left = problem.memory_bytes - sum(fixed[u.name][index[u.name]] for u in beside)
            total = sum(active[u.name][index[u.name]] for u in beside)
            own = active[unit.name][p]
            spare[unit.name].append(left * own / total if total else left)
    return spare
