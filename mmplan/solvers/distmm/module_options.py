"""What a module may choose from: degrees, replicas, micro-batches and order, with their costs.

Symbols, as in DistMM: K micro-batches of a round, P stages, f and b the forward and backward
seconds of the slowest stage on the slowest replica's largest micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import ScheduleKind
from mmplan.solvers.distmm.stage_costs import Stages
from mmplan.solvers.pareto import pareto_rows
from mmplan.solvers.partitioner import degree_candidates
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import microbatch_sizes, replica_counts

# Rows compared with the front at a time.
CHUNK = 256


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
class Shortage:
    """Why options were dropped: the least bytes that any of them would have needed."""

    needed_bytes: float
    tp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What every module may choose from; the defaults are everything.

    Attributes:
        uneven: shares of a round may differ by replica.
        preferred_only: stop at the first degrees with a feasible option (the partitioner).
        kinds: orders of a module's stages, the best first.
        most_devices: of a module.
    """

    uneven: bool = True
    preferred_only: bool = False
    kinds: tuple[ScheduleKind, ...] = ("batch-sync", "gpipe")
    most_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """Modules that must agree in something.

    Attributes:
        name: of the coupling.
        key: what of their options must be equal.
    """

    name: str
    key: Callable[[Option], Hashable]


class ModuleOptions:
    """The feasible options of one module, none of them dominated by another.

    Args:
        problem: its task, devices and costs.
        module: its name.
        choices: what it may choose from.
        coupling: whom it must agree with; options do not dominate those that others may need.
    """

    def __init__(
        self,
        problem: Problem,
        module: str,
        *,
        choices: Choices = Choices(),
        coupling: Coupling | None = None,
    ) -> None:
        self.module, self.coupling = module, coupling
        self.shortage: Shortage | None = None
        most = choices.most_devices or problem.devices
        self.tried = [(tp, pp) for tp, pp in degree_candidates(problem, module) if tp * pp <= most]
        self._problem, self._choices, self._most = problem, choices, most
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
            if options and choices.preferred_only:
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
            uneven=self._choices.uneven,
            pins=self._pins,
        )
        for dp in counts:
            share = -(-problem.round_samples // dp)
            for size in microbatch_sizes(share, self._pins):
                yield from self._options(stages, dp, share, size)

    def _options(self, stages: Stages, dp: int, share: int, size: int) -> Iterator[Option]:
        """One for each order that fits."""
        orders = stages.orders(dp, -(-share // size), size, self._choices.kinds)
        self._is_all &= orders.is_all
        needed = orders.needed_bytes
        if not orders.found and (self.shortage is None or needed < self.shortage.needed_bytes):
            self.shortage = Shortage(needed_bytes=needed, tp=stages.tp, pp=stages.pp)
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
