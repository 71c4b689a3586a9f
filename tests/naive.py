"""A program run sample by sample, with no intervals and no wiring: slow and obvious.

What it counts is what a step computes: for every rank and block, how often the gradient of
each (stage, loss, sample) was added, reductions included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Sync
from mmplan.program.model import BlockReduction, Program, Stage

# (loss, sample) to the times it is counted
Gradient = Counter[tuple[int, int]]


class WrongStepError(Exception):
    """The step is not the one that a single process would compute."""


class NaiveRun:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = [0] * program.num_ranks
        self.posted: defaultdict[Any, list[Any]] = defaultdict(list)
        self.sent: dict[Any, Any] = {}
        self.done: set[Any] = set()
        self.entered: Counter[Any] = Counter()
        self.output: defaultdict[Any, Gradient] = defaultdict(Counter)
        self.backward: dict[Any, Gradient] = {}
        self.features: defaultdict[Any, Counter[Any]] = defaultdict(Counter)
        self.started: defaultdict[Any, set[int]] = defaultdict(set)
        # Of each rank, the reductions that start inside its next compute; all that started.
        self.starting: defaultdict[int, list[int]] = defaultdict(list)
        self.has_started: set[tuple[int, int]] = set()
        # (reduction, (rank, owner, block)) to the gradient that a rank brings to it
        self.summed: defaultdict[Any, Counter[Any]] = defaultdict(Counter)
        # (rank, owner, block) to (stage, loss, sample) to times
        self.parameters: defaultdict[Any, Counter[Any]] = defaultdict(Counter)

    def run(self) -> None:
        """Run to the end and compare with what a step must be."""
        while any(self._try(rank) for rank in range(self.program.num_ranks)):
            pass
        for rank, row in enumerate(self.program.instructions):
            if self.at[rank] < len(row):
                raise WrongStepError(f"rank {rank} sticks at {row[self.at[rank]]}")
        self._compare()

    def _next(self, rank: int) -> Instruction | None:
        row = self.program.instructions[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def _try(self, rank: int) -> bool:
        item = self._next(rank)
        if item is None:
            return False
        if isinstance(item, Message):
            self._message(rank, item)
        elif isinstance(item, Compute):
            way = {"I": "B"}.get(item.op.value, item.op.value)
            keys = self.posted[rank, item.stage, way, item.mb]
            if any(key not in self.sent for key in keys):
                return False
            run = {Op.FORWARD: self._forward, Op.WEIGHT: self._weights}
            run.get(item.op, self._backward)(rank, item, keys)
            self._begin_sums(rank)
        elif isinstance(item, Sync) and item.op is Op.SYNC_START:
            self._start(rank, item)
        elif isinstance(item, Collective) and item.op is Op.REDUCE_START:
            self.starting[rank].append(item.index)
            self.has_started.add((rank, item.index))
        elif isinstance(item, Sync | Collective):
            return self._gang(item)
        self.at[rank] += 1
        return True

    def _span(self, rank: int, stage: Stage, mb: int) -> range:
        d = next(i for i, group in enumerate(stage.ranks) if rank in group)
        return range(*stage.microbatches[d][mb])

    def _place(self, rank: int, stage: Stage) -> int:
        return next(group.index(rank) for group in stage.ranks if rank in group)

    def _message(self, rank: int, item: Message) -> None:
        way = item.op.value[-1]
        ends = (rank, item.peer) if item.is_send else (item.peer, rank)
        key = (way, item.edge, *ends, item.start, item.stop)
        held = rank, item.stage, item.mb
        samples = set(range(item.start, item.stop))
        if not item.is_send:
            self.posted[rank, item.stage, way, item.mb].append(key)
        elif way == "F":
            here = set(self._span(rank, self.program.stages[item.stage], item.mb))
            self.sent[key] = Counter(samples & here if held in self.done else ())
        else:
            self.sent[key] = self._edge_gradient(held, item.edge, samples)

    def _edge_gradient(self, held: Any, edge: int, samples: set[int]) -> Gradient:
        if held not in self.backward:
            return Counter()
        stage = self.program.stages[held[1]]
        result: Gradient = Counter()
        if any(source.edge == edge for source in stage.inputs):
            for (loss, sample), times in self.backward[held].items():
                result[loss, sample] += times * (sample in samples)
        for index in stage.hosted:
            if any(s.edge == edge for s in self.program.per_sample(index).inputs):
                result.update((index, sample) for sample in samples)
        return result

    def _forward(self, rank: int, item: Compute, keys: list[Any]) -> None:
        stage = self.program.stages[item.stage]
        span = self._span(rank, stage, item.mb)
        arrived: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for key in keys:
            arrived[key[1]] += self.sent[key]
        for edge in self.program.edges:
            if edge.consumer == item.stage and arrived[edge.index] != Counter(span):
                raise WrongStepError(f"rank {rank}, {item}: edge {edge.index} brings wrong samples")
        held = rank, item.stage, item.mb
        self.done.add(held)
        self.entered.update((item.stage, self._place(rank, stage), sample) for sample in span)
        for index in stage.hosted:
            if any(s.own for s in self.program.per_sample(index).inputs):
                self.output[held].update((index, sample) for sample in span)

    def _backward(self, rank: int, item: Compute, keys: list[Any]) -> None:
        held = rank, item.stage, item.mb
        if held not in self.done:
            raise WrongStepError(f"rank {rank}: {item} before its forward")
        for key in keys:
            self.output[held].update(self.sent[key])
        self.backward[held] = Counter(self.output[held])
        if self.program.stages[item.stage].split != (item.op is Op.INPUT):
            raise WrongStepError(f"rank {rank}: {item} is not how its stage goes backward")
        if item.op is Op.BACKWARD:
            self._weights(rank, item, [])

    def _weights(self, rank: int, item: Compute, _: list[Any]) -> None:
        stage = self.program.stages[item.stage]
        held = rank, item.stage, item.mb
        if held not in self.backward:
            raise WrongStepError(f"rank {rank}: {item} before its I")
        for a, b in stage.trainable:
            for block in range(a, b):
                for (loss, sample), times in self.backward[held].items():
                    self.parameters[rank, stage.owner, block][item.stage, loss, sample] += times

    def _parts(self, rank: int, item: Sync) -> list[tuple[Stage, int, list[int]]]:
        """The micro-batches of a rank that hold samples of a sync batch, and which."""
        size = self.program.cross_sample(item.loss).sync_batch
        batch = range(item.batch * size, (item.batch + 1) * size)
        found: list[tuple[Stage, int, list[int]]] = []
        for stage in self.program.stages_of(rank):
            if item.loss in stage.syncs:
                d = next(i for i, group in enumerate(stage.ranks) if rank in group)
                for mb in range(len(stage.microbatches[d])):
                    samples = [x for x in self._span(rank, stage, mb) if x in batch]
                    if samples:
                        found.append((stage, mb, samples))
        return found

    def _start(self, rank: int, item: Sync) -> None:
        key = item.loss, item.batch
        self.started[key].add(rank)
        for stage, mb, samples in self._parts(rank, item):
            if (rank, stage.index, mb) in self.done:
                t = self._place(rank, stage)
                self.features[key].update((stage.index, t, sample) for sample in samples)

    def _gang(self, item: Sync | Collective) -> bool:
        """SYNC_WAIT, COUNT and REDUCE happen when all their ranks are at them."""
        if isinstance(item, Sync):
            ranks = self.program.losses[item.loss].ranks
            if self.started[item.loss, item.batch] != set(ranks):
                return False
        elif item.op is Op.COUNT:
            ranks = self.program.losses[item.index].ranks
        else:
            ranks = self.program.reductions[item.index].ranks
        if any(self._next(rank) != item for rank in ranks):
            return False
        if isinstance(item, Sync):
            self._wait(item, ranks)
        elif item.op is Op.REDUCE:
            self._reduce(item)
        for rank in ranks:
            self.at[rank] += 1
        return True

    def _wait(self, item: Sync, ranks: tuple[int, ...]) -> None:
        loss = self.program.cross_sample(item.loss)
        expected: Counter[Any] = Counter(
            (stage, t, sample)
            for stage in loss.stages
            for t in range(self.program.stages[stage].tp)
            for sample in range(*loss.samples(item.batch))
        )
        if self.features[item.loss, item.batch] != expected:
            raise WrongStepError(f"{item}: features are missing or doubled")
        for rank in ranks:
            for stage, mb, samples in self._parts(rank, item):
                self.output[rank, stage.index, mb].update((item.loss, x) for x in samples)

    def _begin_sums(self, rank: int) -> None:
        """After a compute, the gradients of the reductions that started in it are as they are."""
        for index in self.starting.pop(rank, ()):
            self._take(rank, index)

    def _take(self, rank: int, index: int) -> None:
        reduction = self.program.reductions[index]
        for block in range(*reduction.blocks) if isinstance(reduction, BlockReduction) else ():
            key = rank, reduction.owner, block
            self.summed[index, key] = Counter(self.parameters[key])

    def _reduce(self, item: Collective) -> None:
        reduction = self.program.reductions[item.index]
        for rank in reduction.ranks:
            if (rank, item.index) not in self.has_started:
                self._take(rank, item.index)
        for block in range(*reduction.blocks) if isinstance(reduction, BlockReduction) else ():
            total: Counter[Any] = Counter()
            for rank in reduction.ranks:
                total.update(self.summed[item.index, (rank, reduction.owner, block)])
            for rank in reduction.ranks:
                self.parameters[rank, reduction.owner, block] = Counter(total)

    def _compare(self) -> None:
        paths = count_paths(self.program)
        for stage in self.program.stages:
            for t in range(stage.tp):
                for sample in range(self.program.batches[stage.task]):
                    if self.entered[stage.index, t, sample] != 1:
                        raise WrongStepError(f"sample {sample} of stage {stage.index}")
        expected: defaultdict[Any, Counter[Any]] = defaultdict(Counter)
        holders: defaultdict[Any, set[int]] = defaultdict(set)
        for stage in self.program.stages:
            ranks = {rank for group in stage.ranks for rank in group}
            for block in range(*stage.blocks):
                holders[stage.owner, block] |= ranks
            for a, b in stage.trainable:
                for block in range(a, b):
                    for loss, times in paths[stage.index].items():
                        for sample in range(self.program.batches[stage.task]):
                            expected[stage.owner, block][stage.index, loss, sample] = times
        for (owner, block), counts in expected.items():
            for rank in holders[owner, block]:
                if self.parameters[rank, owner, block] != counts:
                    raise WrongStepError(f"rank {rank}: block {block} of {owner}")


def count_paths(program: Program) -> list[Counter[int]]:
    """Per stage: loss index to the number of ways from the stage's output to the loss."""

    def ways(stage: Stage) -> Counter[int]:
        found = Counter(stage.syncs)
        found.update(i for i in stage.hosted if any(s.own for s in program.per_sample(i).inputs))
        for edge in program.edges:
            if edge.producer == stage.index:
                consumer = program.stages[edge.consumer]
                if any(s.edge == edge.index for s in consumer.inputs):
                    found.update(ways(consumer))
                found.update(
                    i
                    for i in consumer.hosted
                    if any(s.edge == edge.index for s in program.per_sample(i).inputs)
                )
        return found

    return [ways(stage) for stage in program.stages]
