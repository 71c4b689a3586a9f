"""What a module may choose from: degrees, replicas, micro-batches and order, with their costs.

Symbols, as in DistMM: K micro-batches of a round, P stages, f and b the forward and backward
seconds of the slowest stage on the slowest replica's largest micro-batch.

Shape suffixes: P = stages, C = cuts between them, B = (replicas, micro-batch size).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Indices, Ints
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import ScheduleKind
from mmplan.solvers.cost_table import reduction_s
from mmplan.solvers.pareto import pareto_rows
from mmplan.solvers.partitioner import degree_candidates, module_stages
from mmplan.solvers.problem import Problem
from mmplan.solvers.sample_split import microbatch_sizes, replica_counts
from mmplan.solvers.stage_rows import StageBytes, largest_rows, stage_rows

# Micro-batches that a stage runs ahead of the next one, so that messages hide behind work.
LONG_LEAD = 2


class Stages:
    """A module on devices of its own, cut into so many stages.

    Sizes, replicas and counts of micro-batches are arrays [B].

    Attributes:
        bytes: of all stages.
    """

    def __init__(self, problem: Problem, module: str, pp: int) -> None:
        self.pp = pp
        self._problem, self._module = problem, module
        self._cuts = module_stages(problem, module, pp)
        self._costs = problem.module_costs(module)
        self._own = self._costs.stages(self._cuts)
        self._later = len(_downstream(problem, module))
        rows = stage_rows(problem, module, self._cuts, pp)
        self.bytes = StageBytes(problem, module, rows)
        self._fullest = StageBytes(problem, module, rows[largest_rows(rows)])

    # --- seconds ------------------------------------------------------------------------

    def seconds(self, tp: int, size: Ints, dp: Ints) -> tuple[Floats, Floats]:
        """[P, B] forward and backward of one micro-batch, with gathers of what came in shares."""
        each = self._costs.seconds(tp, size, dp)
        forward, backward = (self._own.shares @ x for x in each)
        gather_s, gather_byte_s = self._problem.costs.gather_line(tp)
        gathers = self._apart(tp) * (gather_s + size * self._cut_bytes * gather_byte_s)
        # A gradient comes back over a cut where something before it trains.
        back = [self._problem.has_backward(self._module, cut) for cut in self._cuts[:-1]]
        forward[1:] += gathers
        backward[:-1] += gathers * np.array(back, dtype=np.bool_)[:, None]
        return forward, backward

    def transfers_s(self, tp: int, size: Ints) -> Floats:
        """[C, B] of each message of one micro-batch from stage to stage, one way."""
        lines = (self._problem.costs.message_line(apart=apart) for apart in (False, True))
        inside, between = (
            latency_s + size * self._cut_bytes * byte_s for latency_s, byte_s in lines
        )
        return np.where(self._apart(tp), between, inside)

    @property
    def _cut_bytes(self) -> Floats:
        """[C, 1] per sample."""
        return self._own.cut_bytes[:-1, None]

    def _apart(self, tp: int) -> NDArray[np.bool_]:
        """[C, 1] whether the next stage is on another node.

        Then each rank of a TP group sends a share, and all share one link.
        """
        node = np.arange(self.pp) * tp // self._problem.request.cluster.devices_per_node
        return (np.diff(node) > 0)[:, None]

    def interval_s(self, tp: int, size: Ints, work_s: Floats, lead: int) -> Floats:
        """[B] from one micro-batch to the next where a stage alternates backward and forward.

        A gradient's way back over k cuts and the way on of what it lets go take (k + 1)(f + b)
        and 2 k messages, in which a stage that runs ``lead`` ahead of the next one makes
        k lead + 1 micro-batches. The least interval is greatest for one cut or for all of them.

        Args:
            tp: of the stages.
            size: of the micro-batches.
            work_s: f + b.
            lead: of the stages.
        """
        if lead == 0 or self.pp == 1:
            return work_s
        # To the next node go activations and to the last one gradients, and share the way out.
        ways = self.transfers_s(tp, size) * (1 + self._apart(tp))
        longest_s, cuts = ways.max(axis=0), self.pp - 1
        one_cut_s = 2 * (work_s + longest_s) / (lead + 1)
        all_cuts_s = (self.pp * work_s + 2 * ways.sum(axis=0)) / (cuts * lead + 1)
        return np.maximum.reduce([work_s, longest_s, one_cut_s, all_cuts_s])

    def reduce_s(self, tp: int, dp: Ints, backwards_s: Floats) -> Floats:
        """[B] (:func:`mmplan.solvers.cost_table.reduction_s`).

        Args:
            tp: of the stages.
            dp: replicas.
            backwards_s: of one micro-batch, all stages.
        """
        return reduction_s(
            self._problem.request.cluster,
            tp=tp,
            pp=self.pp,
            dp=dp,
            num_bytes=self._gradient_bytes(tp),
            backward_s=backwards_s / self.pp,
        )

    def _gradient_bytes(self, tp: int) -> float:
        """Of the stage that has the most."""
        return float(self._own.trained.max()) / tp * self._costs.gradient_bytes

    def slowest(self, tp: int) -> Floats:
        """Most forward and backward seconds of one sample, and gradient bytes, of any stage."""
        one = np.ones(1, dtype=np.int64)
        forward, backward = self.seconds(tp, one, one)
        return np.array([forward.max(), backward.max(), self._gradient_bytes(tp)])

    # --- bytes --------------------------------------------------------------------------

    def active_bytes(
        self, tp: int, size: Ints, count: Ints, kind: ScheduleKind, lead: int = 1
    ) -> Floats:
        """[P, B] of activations and messages, with K = ``count`` micro-batches of a round."""
        return self.bytes.active_bytes(tp, size, count, kind, lead=lead, later=self._later)

    def needed_bytes(
        self, tp: int, dp: Ints, size: Ints, count: Ints
    ) -> Callable[[ScheduleKind, int], Floats]:
        """[B] of the fullest stage, for an order and its lead."""
        fixed, later = self._fullest.fixed_bytes(tp, dp), self._later
        active = partial(self._fullest.active_bytes, tp, size, count, later=later)
        return lambda kind, lead: (fixed + active(kind, lead=lead)).max(axis=0)


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
        size: the largest micro-batch of the slowest replica.
        pinned: the micro-batch size is the user's.
        count: micro-batches of the slowest replica, K.
        even: all replicas have the same micro-batches.
        kind: order of its stages.
        lead: micro-batches that a stage runs ahead of the next one.
        forward_s: of the slowest stage, f; ``backward_s`` likewise, b.
        fill_forward_s: first micro-batch through all stages: P f and the messages.
        steady_forward_s: the others: (K - 1) f, or as fast as messages follow each other.
        drain_backward_s: the last micro-batch's way back: P b and the messages.
        steady_backward_s: the others: (K - 1) b, or as fast as messages follow each other.
        reduce_s: gradient reductions after the last stage to end.
        first_s: (K + P - 1) f.
        round_s: from sync to sync: K paces; a gpipe drains and fills, (K + P - 1) (f + b).
        last_s: (K + P - 1) b, and the reduction.
        devices: of all replicas.
        device_s: busy device-seconds of a step.
    """

    tp: int
    pp: int
    dp: int
    size: int
    pinned: bool
    count: int
    even: bool
    kind: ScheduleKind
    lead: int
    devices: int
    forward_s: float
    backward_s: float
    fill_forward_s: float
    steady_forward_s: float
    drain_backward_s: float
    steady_backward_s: float
    reduce_s: float
    first_s: float
    round_s: float
    last_s: float
    device_s: float


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
    key: Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """Ways to cut a round.

    Attributes:
        dp: [B] replicas, ascending.
        size: [B] samples of the slowest one's largest micro-batch.
        count: [B] its micro-batches, K.
        timed: [2, U] sizes and replicas that have times of their own.
        index: [B], which of them.
    """

    dp: Ints
    size: Ints
    count: Ints
    timed: Ints
    index: Indices

    def up_to(self, most: int) -> _Splits:
        """Those of at most so many replicas."""
        own = slice(int(np.searchsorted(self.dp, most, side="right")))
        shorter = {name: getattr(self, name)[own] for name in ("dp", "size", "count", "index")}
        return replace(self, **shorter)


class _OptionRows(NamedTuple):
    """Options of the same degrees and order; ``columns`` are the other fields of each."""

    tp: int
    pp: int
    kind: ScheduleKind
    lead: int
    columns: dict[str, NDArray[Any]]

    def option(self, row: int, *, pinned: bool) -> Option:
        """One of them."""
        own = {name: column[row].item() for name, column in self.columns.items()}
        return Option(tp=self.tp, pp=self.pp, kind=self.kind, lead=self.lead, pinned=pinned, **own)


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
        self._problem, self._method = problem, method
        self._pins = problem.request.workload.modules[module].plan
        stages_of = cache(lambda pp: Stages(problem, module, pp))
        splits, rows = self._splits(most), list[_OptionRows]()
        # Of each tp the last number of stages with which everything fitted.
        enough: dict[int, Floats] = {}
        for tp, pp in self.tried:
            stages = stages_of(pp)
            slowest = stages.slowest(tp)
            if coupling is None and tp in enough and (slowest >= enough[tp] * (1 - 1e-9)).all():
                # More stages, none of them shorter: a longer fill on more devices.
                continue
            found, is_all = self._of_degrees(stages, tp, splits.up_to(most // (tp * pp)))
            rows += found
            enough |= {tp: slowest} if is_all else {}
            if rows and method.preferred_only:
                break
        self.options = list(self._undominated(rows))

    def _splits(self, most: int) -> _Splits:
        problem, uneven = self._problem, self._method.uneven
        samples = problem.round_samples
        found = [
            (dp, size, -(-samples // dp))
            for dp in replica_counts(samples, most, uneven=uneven, pins=self._pins)
            for size in microbatch_sizes(-(-samples // dp), self._pins)
        ]
        dp, size, share = np.array(found, dtype=np.int64).reshape(-1, 3).T
        pairs = np.stack([size, dp if problem.varies else np.ones_like(dp)])
        timed, index = np.unique(pairs, axis=1, return_inverse=True)
        return _Splits(dp=dp, size=size, count=-(-share // size), timed=timed, index=index.ravel())

    def _of_degrees(
        self, stages: Stages, tp: int, splits: _Splits
    ) -> tuple[list[_OptionRows], bool]:
        """The options of a tp and pp that fit, and whether memory left none out.

        Of the method's orders the first that fits, and, where messages between sync batches would
        hold it up, the same with a longer lead. Without a cross-sample loss there is only 1f1b.
        """
        problem, found, is_all = self._problem, list[_OptionRows](), True
        kinds: Sequence[ScheduleKind] = self._method.kinds
        if not problem.task.sync_batches:
            kinds = ("1f1b",)
        columns = self._columns(stages, tp, splits)
        transfer_s = columns.pop("transfer_s")
        needed_bytes = stages.needed_bytes(tp, splits.dp, splits.size, splits.count)
        left = np.ones(len(splits.dp), dtype=np.bool_)
        least = np.full(len(splits.dp), np.inf)
        for kind in kinds:
            lead = int(POLICIES[kind].runs_ahead)
            needed = needed_bytes(kind, lead)
            least = np.minimum(least, needed)
            fits = left & (needed <= problem.memory_bytes)
            is_all &= kind == kinds[0] or not fits.any()
            orders = [(lead, fits)]
            if lead and problem.rounds > 1:
                held_up = fits & (transfer_s > 0)
                longer = held_up & (needed_bytes(kind, LONG_LEAD) <= problem.memory_bytes)
                is_all &= bool((longer == held_up).all())
                orders.append((LONG_LEAD, longer))
            for order_lead, rows in orders:
                if rows.any():
                    own = {name: column[rows] for name, column in columns.items()}
                    own["round_s"] = self._round_s(stages, tp, own, kind, order_lead)
                    found.append(_OptionRows(tp, stages.pp, kind, order_lead, own))
            left &= ~fits
        if left.any() and (self.shortage is None or least[left].min() < self.shortage[0]):
            self.shortage = float(least[left].min()), tp, stages.pp
        return found, is_all and not left.any()

    def _columns(self, stages: Stages, tp: int, splits: _Splits) -> dict[str, NDArray[Any]]:
        """[B] each: fields of :class:`Option`, but what depends on the order; slowest message."""
        size_U, dp_U = splits.timed
        forward, backward = stages.seconds(tp, size_U, dp_U)
        transfers = stages.transfers_s(tp, size_U)
        of_timed = np.stack(
            [
                forward.max(axis=0),
                backward.max(axis=0),
                transfers.max(axis=0, initial=0.0),
                transfers.sum(axis=0),
                forward.sum(axis=0),
                backward.sum(axis=0),
            ]
        )
        f, b, transfer, transfers_s, forwards_s, backwards_s = of_timed[:, splits.index]
        pp, dp, count = stages.pp, splits.dp, splits.count
        fill, steady = pp * f + transfers_s, (count - 1) * np.maximum(f, transfer)
        drain, steady_back = pp * b + transfers_s, (count - 1) * np.maximum(b, transfer)
        reduce_s = stages.reduce_s(tp, dp, backwards_s)
        samples = self._problem.round_samples
        return {
            "dp": dp,
            "size": splits.size,
            "count": count,
            "even": count * splits.size * dp == samples,
            "devices": tp * pp * dp,
            "forward_s": f,
            "backward_s": b,
            "transfer_s": transfer,
            "fill_forward_s": fill,
            "steady_forward_s": steady,
            "drain_backward_s": drain,
            "steady_backward_s": steady_back,
            "reduce_s": reduce_s,
            "first_s": fill + steady,
            "last_s": drain + steady_back + reduce_s,
            "device_s": self._problem.rounds * count * dp * tp * (forwards_s + backwards_s),
        }

    def _round_s(
        self,
        stages: Stages,
        tp: int,
        columns: dict[str, NDArray[Any]],
        kind: ScheduleKind,
        lead: int,
    ) -> Floats:
        """[B]."""
        if self._problem.rounds == 1:
            return np.zeros(len(columns["dp"]))
        work_s = columns["forward_s"] + columns["backward_s"]
        interval_s = stages.interval_s(tp, columns["size"], work_s, lead)
        fill_and_drain_s = columns["first_s"] + columns["last_s"] - columns["reduce_s"]
        return POLICIES[kind].round_s(columns["count"], interval_s, fill_and_drain_s)

    def _undominated(self, rows: Sequence[_OptionRows]) -> Iterator[Option]:
        """Options that no other one equals or beats in devices, times and device-seconds."""
        names = ["devices", "first_s", "round_s", "last_s", "device_s"]
        chained = self._problem.chained()
        if chained:
            names += ["fill_forward_s", "steady_forward_s", "drain_backward_s"]
            names += ["steady_backward_s"]
        groups: dict[Hashable, list[_OptionRows]] = {}
        for own in rows:
            groups.setdefault(self.coupling and self.coupling.key(own), []).append(own)
        for group in groups.values():
            values = np.hstack([[own.columns[name] for name in names] for own in group]).T
            owner = np.repeat(np.arange(len(group)), [len(own.columns["dp"]) for own in group])
            row = np.hstack([np.arange(len(own.columns["dp"])) for own in group])
            # What a chain waits for depends on whether micro-batches hold the same samples.
            cuts = np.hstack([2 * own.columns["count"] + own.columns["even"] for own in group])
            for key in np.unique(cuts) if chained else [None]:
                members = np.flatnonzero(cuts == key) if chained else np.arange(len(cuts))
                for i in members[pareto_rows(values[members])]:
                    yield group[owner[i]].option(
                        int(row[i]), pinned=self._pins.microbatch is not None
                    )
