"""Costs for tests, and a simulator that shares no code with the real one."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Message, Op, Sync
from mmplan.program.model import Edge, Loss, Program, Reduction, Stage
from tests.programs import loss, make_plan, unit


@dataclass(kw_only=True)
class FixedCosts:
    """Costs that do not depend on sizes unless a test asks for it.

    Attributes:
        input_share: what part of a split backward is I.
    """

    forward: float = 1.0
    backward: float = 2.0
    input_share: float = 0.5
    by_module: dict[str, tuple[float, float]] = field(default_factory=dict)
    per_sample: bool = False
    message: float = 0.0
    gather: float = 0.0
    loss: float = 0.0
    reduce: float = 0.0
    activation: float = 1.0
    static: float = 0.0
    communicator_bytes: float = 0.0

    def compute_s(self, stage: Stage, op: Op, samples: int) -> float:
        f, b = self.by_module.get(stage.module, (self.forward, self.backward))
        parts = {Op.INPUT: self.input_share, Op.WEIGHT: 1 - self.input_share}
        seconds = f if op is Op.FORWARD else b * parts.get(op, 1.0)
        return seconds * (samples if self.per_sample else 1)

    def message_s(self, source: int, target: int, edge: Edge, samples: int) -> float:
        return 0.0 if source == target else self.message * (samples if self.per_sample else 1)

    def gather_s(self, loss: Loss) -> float:
        return self.gather

    def sync_s(self, loss: Loss) -> float:
        return self.gather + self.loss

    def reduce_s(self, reduction: Reduction) -> float:
        return self.reduce

    def activation_bytes(self, stage: Stage, samples: int) -> float:
        return self.activation if stage.has_backward else 0.0

    def static_bytes(self, rank: int) -> float:
        return self.static

    def communicators(self, rank: int) -> int:
        return 2

    def flops(self) -> float:
        return 6e12


def tower(stages: int, k: int, rounds: int, *, kind: str = "batch-sync", **options: Any) -> Program:
    """One module, micro-batches of one sample."""
    synced = kind == "batch-sync"
    plan = make_plan(
        unit("v", pp=stages, k=k if synced else k * rounds, kind=kind, **options),
        losses=[loss("c", "v", sync_batch=k if synced else None)],
        batch=k * rounds,
    )
    return compile_plan(plan)


class TinySimulator:
    """Discrete events on a heap, each rank a coroutine. Slow, obvious, nothing shared.

    A coroutine yields ("at", time) or ("until", key); keys get a time when something sets
    them and wake those who wait.
    """

    def __init__(self, program: Program, costs: FixedCosts) -> None:
        self.program, self.costs = program, costs
        self.now = 0.0
        self.heap: list[tuple[float, int, Generator[Any, None, None]]] = []
        self.known: dict[Any, float] = {}
        self.waiting: defaultdict[Any, list[Generator[Any, None, None]]] = defaultdict(list)
        self.there: defaultdict[Any, list[float]] = defaultdict(list)
        self.link: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.ends = [0.0] * program.num_ranks
        self.ticket = 0

    def run(self) -> float:
        for rank in range(self.program.num_ranks):
            self._schedule(0.0, self._rank(rank))
        while self.heap:
            self.now, _, process = heapq.heappop(self.heap)
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
        return max(self.ends)

    def _schedule(self, time: float, process: Generator[Any, None, None]) -> None:
        self.ticket += 1
        heapq.heappush(self.heap, (time, self.ticket, process))

    def _set(self, key: Any, time: float) -> None:
        self.known[key] = time
        for process in self.waiting.pop(key, []):
            self._schedule(max(time, self.now), process)

    def _meet(self, key: Any, size: int, extra: float = 0.0) -> None:
        self.there[key].append(self.now)
        if len(self.there[key]) == size:
            self._set(key, max(self.there[key]) + extra)

    def _rank(self, rank: int) -> Generator[Any, None, None]:
        inputs: defaultdict[Any, list[Any]] = defaultdict(list)
        for item in self.program.instructions[rank]:
            if isinstance(item, Message):
                kind = item.op.value[-1]
                if item.is_send:
                    key = (kind, item.edge, rank, item.peer, item.start, item.stop)
                    edge = self.program.edges[item.edge]
                    taken = self.costs.message_s(rank, item.peer, edge, item.stop - item.start)
                    free = max(self.now, self.link[rank, item.peer])
                    self.link[rank, item.peer] = free + taken
                    self._set(key, free + taken)
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
                yield "at", self.now + self.costs.compute_s(stage, item.op, b - a)
            elif isinstance(item, Sync):
                size = len(self.program.losses[item.loss].ranks)
                if item.op is Op.SYNC_START:
                    gather = self.costs.gather
                    self._meet(("gather", item.loss, item.batch), size, gather)
                else:
                    yield "until", ("gather", item.loss, item.batch)
                    self._meet(("wait", item.loss, item.batch), size)
                    yield "until", ("wait", item.loss, item.batch)
                    yield "at", self.now + self.costs.loss
            elif isinstance(item, Collective):
                reduces = item.op is Op.REDUCE
                owner = self.program.reductions if reduces else self.program.losses
                self._meet(item, len(owner[item.index].ranks))
                yield "until", item
                yield "at", self.now + (self.costs.reduce if reduces else 0.0)
        self.ends[rank] = self.now
