"""Costs for tests, and a simulator that shares no code with the real one."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmplan.costs.program_costs import ProgramCosts
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Message, Op, Sync
from mmplan.program.model import Edge, Loss, Program, Reduction, Stage
from mmplan.program.network import Traffic
from tests.programs import Kind, loss, make_plan, unit


@dataclass(kw_only=True)
class FixedCosts(ProgramCosts):
    """Costs that do not depend on sizes unless a test asks for it.

    Attributes:
        compute_slowdown: of computes beside a collective.
        input_share: what part of a split backward is I.
        per_node: ranks of a node; 0 where all are on one.
        reduce_shares: of the last backward, after which the parts of a reduction can begin.
        latency: of a message between two nodes, before its ``message`` seconds.
    """

    forward: float = 1.0
    backward: float = 2.0
    input_share: float = 0.5
    by_module: dict[str, tuple[float, float]] = field(default_factory=dict)
    per_sample: bool = False
    message: float = 0.0
    latency: float = 0.0
    per_node: int = 0
    gather: float = 0.0
    loss: float = 0.0
    reduce: float = 0.0
    reduce_shares: tuple[float, ...] = (1.0,)
    activation: float = 1.0
    static: float = 0.0
    one_communicator_bytes: float = 0.0
    compute_slowdown: float = 1.25

    def compute_s(self, stage: Stage, op: Op, samples: int) -> float:
        f, b = self.by_module.get(stage.module, (self.forward, self.backward))
        parts = {Op.INPUT: self.input_share, Op.WEIGHT: 1 - self.input_share}
        seconds = f if op is Op.FORWARD else b * parts.get(op, 1.0)
        return seconds * (samples if self.per_sample else 1)

    def message_s(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> float:
        traffic = self.message_traffic(source, target, edge, samples, backward)
        carried = self.message * (samples if self.per_sample else 1)
        return 0.0 if source == target else carried + (self.latency if traffic else 0.0)

    def message_traffic(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> Traffic | None:
        if not self.per_node or source // self.per_node == target // self.per_node:
            return None
        loads = ((2 * (source // self.per_node), 1.0), (2 * (target // self.per_node) + 1, 1.0))
        return Traffic(seconds=self.message * (samples if self.per_sample else 1), loads=loads)

    def _between_nodes(self, ranks: Sequence[int], seconds: float) -> Traffic | None:
        nodes = sorted({rank // self.per_node for rank in ranks}) if self.per_node else []
        loads = tuple((2 * node + way, 1.0) for node in nodes for way in (0, 1))
        return Traffic(seconds=seconds, loads=loads) if len(nodes) > 1 else None

    def gather_traffic(self, loss: Loss) -> Traffic | None:
        return self._between_nodes(loss.ranks, self.gather)

    def reduce_traffic(self, reduction: Reduction, parts: int = 1) -> Traffic | None:
        return self._between_nodes(reduction.ranks, self.reduce / parts)

    def gather_s(self, loss: Loss) -> float:
        return self.gather

    def sync_s(self, loss: Loss) -> float:
        return self.gather + self.loss

    def reduce_s(self, reduction: Reduction) -> float:
        return self.reduce

    def reduce_parts(
        self, reduction: Reduction, stages: Sequence[Stage]
    ) -> list[tuple[float, float]]:
        n = len(self.reduce_shares)
        return [(share, self.reduce / n) for share in self.reduce_shares]

    def activation_bytes(self, stage: Stage, samples: float) -> float:
        return self.activation if stage.has_backward else 0.0

    def message_bytes(self, edge: Edge, samples: int, backward: bool) -> float:
        return 0.0

    def kept_bytes(self, rank: int, message: Message) -> float:
        return 0.0

    def static_bytes(self, rank: int) -> float:
        return self.static

    def communicator_bytes(self, rank: int) -> float:
        return 2 * self.one_communicator_bytes

    def flops(self) -> float:
        return 6e12

    def module_flops(self) -> dict[str, float]:
        return {"v": self.flops()}


def tower(
    stages: int, k: int, rounds: int, *, kind: Kind = "batch-sync", **options: Any
) -> Program:
    """One module, micro-batches of one sample."""
    synced = kind == "batch-sync"
    plan = make_plan(
        unit("v", pp=stages, k=k if synced else k * rounds, kind=kind, **options),
        losses=[loss("c", "v", sync_batch=k if synced else None)],
        batch=k * rounds,
    )
    return compile_plan(plan)


@dataclass(eq=False)
class Flow:
    """Something that flows: what is left of it, in seconds alone."""

    traffic: Traffic
    left: float
    key: Any


def levels(flows: Sequence[Flow]) -> list[float]:
    """Max-min fair rates, by raising all that are not stopped until an interface is full."""
    rates = [0.0] * len(flows)
    stopped = [False] * len(flows)
    while not all(stopped):
        steps: list[tuple[float, int]] = []
        for interface in {i for flow in flows for i, _ in flow.traffic.loads}:
            load = [dict(flow.traffic.loads).get(interface, 0.0) for flow in flows]
            used = sum(a * rate for a, rate in zip(load, rates, strict=True))
            growing = sum(a for a, stop in zip(load, stopped, strict=True) if not stop)
            if growing:
                steps.append(((1.0 - used) / growing, interface))
        step, full = min(steps)
        if max(rates) + step > 1.0:  # no flow is faster than alone
            return [rate if stop else 1.0 for rate, stop in zip(rates, stopped, strict=True)]
        rates = [rate + (0 if stop else step) for rate, stop in zip(rates, stopped, strict=True)]
        for index, flow in enumerate(flows):
            stopped[index] |= full in dict(flow.traffic.loads)
    return rates


class TinySimulator:
    """Discrete events on a heap, each rank a coroutine. Slow, obvious, nothing shared.

    A coroutine yields ("at", time) or ("until", key); keys get a time when something sets
    them and wake those who wait. What flows between nodes is told anew how fast at each event.
    """

    def __init__(self, program: Program, costs: FixedCosts) -> None:
        self.program, self.costs = program, costs
        self.now = 0.0
        self.heap: list[tuple[float, int, Generator[Any, None, None]]] = []
        self.known: dict[Any, float] = {}
        self.waiting: defaultdict[Any, list[Generator[Any, None, None]]] = defaultdict(list)
        self.there: defaultdict[Any, list[float]] = defaultdict(list)
        self.lanes: defaultdict[Any, list[Any]] = defaultdict(list)
        self.flows: list[Flow] = []
        self.settled = 0.0
        self.ends = [0.0] * program.num_ranks
        self.ticket = 0

    def run(self) -> float:
        for rank in range(self.program.num_ranks):
            self._schedule(0.0, self._rank(rank))
        while self.heap or self.flows:
            rates = levels(self.flows)
            ends = [f.left / r + self.settled for f, r in zip(self.flows, rates, strict=True)]
            self.now = min([*ends, *(time for time, *_ in self.heap[:1])])
            for flow, rate in zip(self.flows, rates, strict=True):
                flow.left -= rate * (self.now - self.settled)
            self.settled = self.now
            over = [f for f, end in zip(self.flows, ends, strict=True) if end <= self.now]
            self.flows = [flow for flow in self.flows if flow not in over]
            for flow in over:
                self._set(flow.key, self.now)
            while self.heap and self.heap[0][0] <= self.now:
                self._continue(heapq.heappop(self.heap)[2])
        return max(self.ends)

    def _continue(self, process: Generator[Any, None, None]) -> None:
        for what, value in process:
            if what == "at":
                self._schedule(value, process)
            elif value in self.known and self.known[value] <= self.now:
                continue
            elif value in self.known:
                self._schedule(self.known[value], process)
            else:
                self.waiting[value].append(process)
            break

    def _schedule(self, time: float, process: Generator[Any, None, None]) -> None:
        self.ticket += 1
        heapq.heappush(self.heap, (time, self.ticket, process))

    def _set(self, key: Any, time: float) -> None:
        self.known[key] = time
        for process in self.waiting.pop(key, []):
            self._schedule(max(time, self.now), process)

    def _meet(self, key: Any, size: int) -> None:
        self.there[key].append(self.now)
        if len(self.there[key]) == size:
            self._set(key, self.now)

    def _carry(
        self, lane: Any, key: Any, seconds: float, traffic: Traffic | None
    ) -> Generator[Any, None, None]:
        """When what was put on the lane before is over."""
        before = self.lanes[lane][-1:]
        self.lanes[lane].append(key)
        for other in before:
            yield "until", other
        if traffic is None:
            yield "at", self.now + seconds
            self._set(key, self.now)
            return
        yield "at", self.now + seconds - traffic.seconds
        self.flows.append(Flow(traffic, traffic.seconds, key))

    def _work(
        self, seconds: float, armed: Sequence[Reduction], slow_until: float
    ) -> Generator[Any, None, float]:
        """A compute, piece by piece: slower for as long as this rank's reductions take alone."""
        parts = [
            (share * seconds, ("part", reduction.index, k), each, reduction)
            for reduction in armed
            for k, (share, each) in enumerate(self.costs.reduce_parts(reduction, []))
        ]
        done = 0.0
        while parts or done < seconds:
            while parts and parts[0][0] <= done:
                _, key, each, reduction = parts.pop(0)
                slow_until = max(slow_until, self.now) + each
                self._meet(key, len(reduction.ranks))
                if key in self.known:
                    traffic = self.costs.reduce_traffic(reduction, len(self.costs.reduce_shares))
                    lane = "reductions", reduction.ranks
                    self._schedule(self.now, self._carry(lane, ("carried", *key), each, traffic))
            goal = parts[0][0] if parts else seconds
            slower = self.costs.compute_slowdown if self.now < slow_until else 1.0
            step = (goal - done) * slower
            if self.now < slow_until < self.now + step:
                step, done = slow_until - self.now, done + (slow_until - self.now) / slower
            else:
                done = goal
            yield "at", self.now + step
        return slow_until

    def _rank(self, rank: int) -> Generator[Any, None, None]:
        inputs: defaultdict[Any, list[Any]] = defaultdict(list)
        armed: list[Reduction] = []
        slow_until = 0.0
        for item in self.program.instructions[rank]:
            if isinstance(item, Message):
                kind = item.op.value[-1]
                if item.is_send:
                    key = (kind, item.edge, rank, item.peer, item.start, item.stop)
                    edge = self.program.edges[item.edge]
                    given = rank, item.peer, edge, item.stop - item.start, kind == "B"
                    taken, traffic = (
                        self.costs.message_s(*given),
                        self.costs.message_traffic(*given),
                    )
                    carry = self._carry(("link", rank, item.peer), key, taken, traffic)
                    self._schedule(self.now, carry)
                else:
                    key = (kind, item.edge, item.peer, rank, item.start, item.stop)
                    inputs[kind, item.stage, item.mb].append(key)
            elif isinstance(item, Compute):
                way = "B" if item.op is Op.INPUT else item.op.value
                for key in inputs[way, item.stage, item.mb]:
                    yield "until", key
                stage = self.program.stages[item.stage]
                d = next(i for i, group in enumerate(stage.ranks) if rank in group)
                if item.op is not Op.WEIGHT:
                    gang = ("compute", item, d)
                    self._meet(gang, stage.tp)
                    yield "until", gang
                a, b = stage.microbatches[d][item.mb]
                seconds = self.costs.compute_s(stage, item.op, b - a)
                slow_until = yield from self._work(seconds, armed, slow_until)
                armed = []
            elif isinstance(item, Sync):
                own = self.program.losses[item.loss]
                size = len(own.ranks)
                if item.op is Op.SYNC_START:
                    started = ("started", item.loss, item.batch)
                    self._meet(started, size)
                    if started in self.known:
                        key = ("gather", item.loss, item.batch)
                        seconds, traffic = self.costs.gather_s(own), self.costs.gather_traffic(own)
                        carry = self._carry(("gathers", item.loss), key, seconds, traffic)
                        self._schedule(self.now, carry)
                else:
                    yield "until", ("gather", item.loss, item.batch)
                    self._meet(("wait", item.loss, item.batch), size)
                    yield "until", ("wait", item.loss, item.batch)
                    yield "at", self.now + self.costs.loss
            elif isinstance(item, Collective) and item.op is Op.REDUCE_START:
                armed.append(self.program.reductions[item.index])
            elif isinstance(item, Collective):
                reduces = item.op is Op.REDUCE
                owner = self.program.reductions if reduces else self.program.losses
                met = ("met", item)
                self._meet(met, len(owner[item.index].ranks))
                yield "until", met
                last = "part", item.index, len(self.costs.reduce_shares) - 1
                if reduces and self.there[last]:
                    yield "until", ("carried", *last)
                elif reduces:
                    reduction = self.program.reductions[item.index]
                    traffic = self.costs.reduce_traffic(reduction)
                    if not self.there["carried", item]:
                        lane = "reductions", reduction.ranks
                        carry = self._carry(lane, item, self.costs.reduce, traffic)
                        self._schedule(self.now, carry)
                    self.there["carried", item].append(self.now)
                    yield "until", item
        self.ends[rank] = self.now
