"""What a module may choose from: degrees, replicas, micro-batches and order, with their costs.

Symbols, as in DistMM: K micro-batches of a round, P stages, f and b the forward and backward
seconds of the slowest stage on the slowest replica's largest micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmplan.solvers.partitioner import degree_candidates, module_stages
from mmplan.solvers.problem import Blocks, Problem
from mmplan.solvers.shares import microbatch_sizes, replica_counts

Floats = NDArray[np.float64]
Kind = Literal["batch-sync", "gpipe", "1f1b"]
# Rows compared with the front at a time.
CHUNK = 256
# Micro-batches that a stage runs ahead of the next one, so that messages hide behind work.
LONG_LEAD = 2


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
        pace_s: from one micro-batch to the next between two syncs.
        forward_s: of the slowest stage, f; ``backward_s`` likewise, b.
        hops_s: one message over each cut between stages.
        hop_s: the slowest of these.
        reduce_s: gradient reduction of the slowest stage.
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
    kind: Kind
    lead: int
    pace_s: float
    forward_s: float
    backward_s: float
    hops_s: float
    hop_s: float
    reduce_s: float
    busy_s: float
    rounds: int
    even: bool

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.tp * self.pp * self.dp

    @property
    def ramp_forward_s(self) -> float:
        """First micro-batch through all stages: P f and the messages."""
        return self.pp * self.forward_s + self.hops_s

    @property
    def ramp_backward_s(self) -> float:
        """The last micro-batch's way back: P b and the messages."""
        return self.pp * self.backward_s + self.hops_s

    @property
    def tail_forward_s(self) -> float:
        """The other micro-batches: (K - 1) f, or as fast as messages follow each other."""
        return (self.count - 1) * max(self.forward_s, self.hop_s)

    @property
    def tail_backward_s(self) -> float:
        """The other micro-batches: (K - 1) b, or as fast as messages follow each other."""
        return (self.count - 1) * max(self.backward_s, self.hop_s)

    @property
    def first_s(self) -> float:
        """(K + P - 1) f."""
        return self.ramp_forward_s + self.tail_forward_s

    @property
    def last_s(self) -> float:
        """(K + P - 1) b, and the reduction."""
        return self.ramp_backward_s + self.tail_backward_s + self.reduce_s

    @property
    def cycle_s(self) -> float:
        """From sync to sync: K paces; a gpipe drains and fills, (K + P - 1) (f + b)."""
        if self.rounds == 1:
            return 0.0
        if self.kind == "gpipe":
            return self.first_s + self.last_s - self.reduce_s
        return self.count * self.pace_s

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
    kinds: tuple[Kind, ...] = ("batch-sync", "gpipe")
    most_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Modules that must agree in something.

    Attributes:
        name: of the family.
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
        family: whom it must agree with; options do not dominate those that others may need.
    """

    def __init__(
        self,
        problem: Problem,
        module: str,
        *,
        choices: Choices = Choices(),
        family: Family | None = None,
    ) -> None:
        self.module, self.family = module, family
        self.shortage: Shortage | None = None
        most = choices.most_devices or problem.devices
        self.tried = [(tp, pp) for tp, pp in degree_candidates(problem, module) if tp * pp <= most]
        self._problem, self._choices, self._most = problem, choices, most
        self._pins = problem.request.workload.modules[module].plan
        options: list[Option] = []
        for tp, pp in self.tried:
            options += self._of_degrees(tp, pp)
            if options and choices.preferred_only:
                break
        groups: dict[Hashable, list[Option]] = {}
        chained = problem.chained()
        for option in options:
            # What a chain waits for depends on whether micro-batches hold the same samples.
            cuts = (option.count, option.even) if chained else None
            groups.setdefault((family and family.key(option), cuts), []).append(option)
        self.options = [x for own in groups.values() for x in _undominated(own, chained=chained)]

    def _of_degrees(self, tp: int, pp: int) -> Iterator[Option]:
        problem, devices = self._problem, tp * pp
        stages = Stages(problem, self.module, tp, pp)
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
        orders, needed = stages.orders(dp, -(-share // size), size, self._choices.kinds)
        if not orders and (self.shortage is None or needed < self.shortage.needed_bytes):
            self.shortage = Shortage(needed_bytes=needed, tp=stages.tp, pp=stages.pp)
        for kind, lead in orders:
            yield self._option(stages, dp, share, size, kind, lead)

    def _option(
        self, stages: Stages, dp: int, share: int, size: int, kind: Kind, lead: int
    ) -> Option:
        times = stages.times(size, dp)
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
            pace_s=stages.pace_s(size, dp, lead),
            forward_s=max(f for f, _ in times),
            backward_s=max(b for _, b in times),
            hops_s=stages.hops_s(size),
            hop_s=max(stages.hops(size), default=0.0),
            reduce_s=stages.reduce_s(dp),
            busy_s=sum(f + b for f, b in times),
            rounds=self._problem.rounds,
            even=count * size * dp == self._problem.round_samples,
        )


class Stages:
    """A module cut into stages at given degrees; remembers what it was asked."""

    def __init__(self, problem: Problem, module: str, tp: int, pp: int) -> None:
        self.problem, self.module, self.tp, self.pp = problem, module, tp, pp
        self.blocks: tuple[Blocks, ...] = module_stages(problem, module, pp)
        self._times: dict[tuple[int, int], tuple[tuple[float, float], ...]] = {}
        self._held: dict[int, tuple[float, ...]] = {}
        self._fixed: dict[int, tuple[float, ...]] = {}
        self._reduce: dict[int, float] = {}
        self._backward = [problem.has_backward(module, blocks) for blocks in self.blocks]
        self._later = len(_downstream(problem, module))
        nodes = [problem.request.cluster.node_of(p * tp) for p in range(pp)]
        self._apart = [here != there for here, there in pairwise(nodes)]
        # Messages take a latency and a time in proportion to the samples.
        self._hop_s = self._hops_s(0)
        self._hop_per_sample_s = [
            one - none for none, one in zip(self._hop_s, self._hops_s(1), strict=True)
        ]

    def times(self, size: int, dp: int) -> tuple[tuple[float, float], ...]:
        """Forward and backward seconds of every stage for one micro-batch."""
        key = size, dp if self.problem.varies else 1
        if key not in self._times:
            self._times[key] = tuple(
                self.problem.stage_s(self.module, blocks, self.tp, *key) for blocks in self.blocks
            )
        return self._times[key]

    def held(self, size: int) -> tuple[float, ...]:
        """Bytes that each stage holds of one micro-batch."""
        if size not in self._held:
            self._held[size] = tuple(
                self.problem.held_bytes(self.module, blocks, self.tp, size)
                for blocks in self.blocks
            )
        return self._held[size]

    def fixed(self, dp: int) -> tuple[float, ...]:
        """Bytes of parameters, and of communicators, on each stage's devices."""
        key = dp if self.problem.costs.training.zero or dp == 1 else 2
        if key not in self._fixed:
            each = self.problem.request.cluster.device.communicator_bytes
            self._fixed[key] = tuple(
                self.problem.fixed_bytes(self.module, blocks, self.tp, dp)
                + each * self._communicators(blocks, dp)
                for blocks in self.blocks
            )
        return self._fixed[key]

    def _communicators(self, blocks: Blocks, dp: int) -> int:
        """One each for TP group, reduction and messages; one for losses, and each one's gather."""
        problem, module = self.problem, self.module
        edges = bool(problem.producers(module) or problem.consumers(module))
        syncs = sum(module in problem.synced_modules(x) for x in problem.task.sync_batches)
        last = blocks[1] == problem.blocks(module)
        reduced = dp > 1 and bool(problem.trainable(module, blocks))
        several = problem.devices > 1
        losses = (syncs > 0) + syncs if last and several else 0
        return (self.tp > 1) + reduced + losses + (self.pp > 1 or edges)

    def in_flight(self, kind: Kind, count: int, lead: int = 1) -> list[int]:
        """Most micro-batches that each stage holds.

        ``batch-sync``: min(G K, K + lead (P - 1 - p)); ``1f1b`` the same with K = 1; ``gpipe``
        K. A stage without a backward holds only the one that it computes.
        """
        total = self.problem.rounds * count
        warm_up = 1 if kind == "1f1b" else count
        ahead = [
            0 if kind == "gpipe" else lead * (self.pp - 1 - p) + self._later for p in range(self.pp)
        ]
        return [
            min(total, warm_up + extra) if backward else 1
            for extra, backward in zip(ahead, self._backward, strict=True)
        ]

    def orders(
        self, dp: int, count: int, size: int, kinds: Sequence[Kind]
    ) -> tuple[list[tuple[Kind, int]], float]:
        """(the orders that fit the memory, each with its lead; the bytes of the smallest).

        The first of ``kinds`` that fits, and, where messages between sync batches would hold
        it up, the same with a longer lead. Without a cross-sample loss there is only 1f1b.
        """
        needed = float("inf")
        allowed: Sequence[Kind] = kinds if self.problem.task.sync_batches else ("1f1b",)
        for kind in allowed:
            lead = 0 if kind == "gpipe" else 1
            own = self._needed_bytes(dp, size, self.in_flight(kind, count, lead))
            needed = min(needed, own)
            if own > self.problem.memory_bytes:
                continue
            found: list[tuple[Kind, int]] = []
            found.append((kind, lead))
            if kind == "batch-sync" and self.problem.rounds > 1 and any(self.hops(size)):
                longer = self._needed_bytes(dp, size, self.in_flight(kind, count, LONG_LEAD))
                if longer <= self.problem.memory_bytes:
                    found.append((kind, LONG_LEAD))
            return found, needed
        return [], needed

    def _needed_bytes(self, dp: int, size: int, flights: Sequence[int]) -> float:
        rows = zip(self.fixed(dp), self.held(size), flights, strict=True)
        return float(max(fixed + held * flight for fixed, held, flight in rows))

    def pace_s(self, size: int, dp: int, lead: int) -> float:
        """From one micro-batch to the next where a stage alternates backward and forward.

        A gradient's way back over k cuts and the way on of what it lets go take (k + 1)(f + b)
        and 2 k messages, in which a stage that runs ``lead`` ahead of the next one makes
        k lead + 1 micro-batches. The least pace is greatest for one cut or for all of them.
        """
        times = self.times(size, dp)
        work_s = max(f for f, _ in times) + max(b for _, b in times)
        if lead == 0 or self.pp == 1:
            return work_s
        # To the next node go activations and to the last one gradients, and share the way out.
        ways = [
            2 * s if apart else s for s, apart in zip(self.hops(size), self._apart, strict=True)
        ]
        one_cut_s = 2 * (work_s + max(ways)) / (lead + 1)
        cuts = self.pp - 1
        all_cuts_s = (self.pp * work_s + 2 * sum(ways)) / (cuts * lead + 1)
        return max(work_s, max(ways), one_cut_s, all_cuts_s)

    def hops(self, size: int) -> list[float]:
        """Seconds of each message of one micro-batch from stage to stage, one way."""
        return [a + size * b for a, b in zip(self._hop_s, self._hop_per_sample_s, strict=True)]

    def hops_s(self, size: int) -> float:
        """Seconds of one micro-batch's messages over the cuts of one replica."""
        return sum(self.hops(size))

    def _hops_s(self, size: int) -> list[float]:
        """Seconds of each message from stage to stage, forward or backward."""
        return [
            self._hop(p, size * self.problem.output_bytes(self.module, blocks[1] - 1))
            for p, blocks in enumerate(self.blocks[:-1])
        ]

    def _hop(self, p: int, num_bytes: float) -> float:
        """All ranks of a TP group send the same bytes; between nodes they share one link."""
        return self.problem.costs.message_s(
            source=p * self.tp,
            target=(p + 1) * self.tp,
            num_bytes=num_bytes * (self.tp if self._apart[p] else 1),
        )

    def reduce_s(self, dp: int) -> float:
        """Seconds of the slowest stage's gradient reduction, replicas side by side.

        All stages of a replica reduce when the step ends, and share their nodes' bandwidth.
        """
        if dp == 1:
            return 0.0
        if dp not in self._reduce:
            per_node = self.problem.request.cluster.devices_per_node
            self._reduce[dp] = max(
                self.problem.costs.all_reduce_s(
                    ranks=[(d * self.pp + p) * self.tp for d in range(dp)],
                    num_bytes=self.problem.gradient_bytes(self.module, blocks, self.tp),
                    sharers=min(self.tp * self.pp, per_node),
                )
                if self.problem.trainable(self.module, blocks)
                else 0.0
                for p, blocks in enumerate(self.blocks)
            )
        return self._reduce[dp]


def _downstream(problem: Problem, module: str) -> set[str]:
    """Modules that take the output, directly or not: at least one stage each comes later."""
    found: set[str] = set()
    for consumer in problem.consumers(module):
        found |= {consumer} | _downstream(problem, consumer)
    return found


def _undominated(options: Sequence[Option], *, chained: bool) -> list[Option]:
    """Options that no other one equals or beats in devices, times and device-seconds."""
    if not options:
        return []
    names = ["devices", "first_s", "cycle_s", "last_s", "device_s"]
    if chained:
        names += ["ramp_forward_s", "tail_forward_s", "ramp_backward_s", "tail_backward_s"]
    rows = np.array([[getattr(option, name) for name in names] for option in options])
    order = np.lexsort(rows.T[::-1])
    front: Floats = rows[:0]
    kept: list[int] = []
    # In this order a row can only be beaten by an earlier one.
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        chunk = chunk[~_beaten(rows[chunk], front).any(axis=1)]
        inside = np.tril(_beaten(rows[chunk], rows[chunk]), k=-1).any(axis=1)
        front = np.vstack([front, rows[chunk[~inside]]])
        kept += [int(i) for i in chunk[~inside]]
    return [options[i] for i in kept]


def _beaten(rows: Floats, others: Floats) -> NDArray[np.bool_]:
    """[i, j]: other row j is at most equal to row i in every column."""
    result = np.ones((len(rows), len(others)), dtype=np.bool_)
    for column in range(rows.shape[1]):
        result &= others[None, :, column] <= rows[:, None, column]
    return result
