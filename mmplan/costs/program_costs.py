"""Costs of a program's instructions: the cost model applied to stages, edges and ranks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate

import numpy as np

from mmplan.costs.block_ranges import Blocks, gradient_blocks, overlaps
from mmplan.costs.cost_model import CostModel
from mmplan.costs.hardware import load_hardware
from mmplan.costs.links import Transfer
from mmplan.errors import InvalidInputError
from mmplan.program.communicators import CommunicatorCount, communicator_counts
from mmplan.program.features import are_apart, holders_of, readers
from mmplan.program.instructions import Message, Op
from mmplan.program.model import (
    BlockReduction,
    CrossSampleLoss,
    Edge,
    Graph,
    LossReduction,
    Program,
    Reduction,
    Stage,
    TieReduction,
)
from mmplan.program.network import Loads, Traffic, exchange, incoming, outgoing
from mmplan.program.reduction_starts import is_cut
from mmplan.program.shards import BUCKET_BYTES, Ranks
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.recompute import Recompute, recomputed_blocks

# A block, or all blocks that share some parameters: these are a part of their own.
ModulePart = int | tuple[int, ...]
OwnedPart = tuple[str, ModulePart]  # owner, part
Shard = tuple[str, ModulePart, int, int]  # owner, part, tp, tp index
# Some shards of a part: first and end in shards of a tp, that tp, the number of ranks that sum
# them, and whether they do so after each micro-batch.
StatePart = tuple[int, int, int, int, bool]


# Parts of a reduction that are simulated apart. The last one alone is never hidden, and more parts
# take longer to simulate than they change the step. Chosen by hand.
MOST_PARTS = 16


def own_samples(stage: Stage, samples: float) -> float:
    """Samples of a micro-batch that each rank of a group has: a share where items are shared out.

    Shares of fewer items than ranks are uneven; this is their mean.
    """
    return samples / stage.tp if stage.items else samples


class ProgramCosts:
    """Seconds, bytes and FLOPs of a compiled plan, for the simulator and the memory check.

    Args:
        program: the compiled plan.
        costs: the profile's costs.
        plan: for recomputation, which the program leaves out.

    Attributes:
        compute_slowdown: times that a compute takes beside a collective of its device.
    """

    @classmethod
    def of_lowered(cls, plan: Plan, graph: Graph, costs: CostModel) -> ProgramCosts:
        """Costs of a plan that is not compiled yet."""
        return cls(Program.of(plan, graph, [()] * plan.devices), costs, plan)

    def __init__(self, program: Program, costs: CostModel, plan: Plan) -> None:
        self.program = program
        self.costs = costs
        self.compute_slowdown = load_hardware().compute_slowdown(costs.cluster.device)
        self._recompute: dict[tuple[str, str], Recompute] = {
            (task, name): module.recompute
            for task, planned in plan.tasks.items()
            for name, module in planned.modules.items()
        }
        self._rounds = {name: task.period for name, task in plan.tasks.items()}
        self._compute: dict[tuple[int, Op, int], float] = {}
        self._syncs: dict[int, float] = {}
        # The stage that the costs of a part are asked for.
        self._stage_of: dict[OwnedPart, Stage] = {}
        # A block trains where any task trains it.
        self._trained: set[OwnedPart] = set()
        for stage in program.stages:
            for block in range(*stage.blocks):
                self._stage_of.setdefault((stage.owner, block), stage)
            self._trained |= {(stage.owner, b) for part in stage.trainable for b in range(*part)}
        # Of each owner, the parameters that blocks share: the blocks, and how many.
        self._shared: dict[str, dict[tuple[int, ...], int]] = {}
        for stage in program.stages:
            if stage.owner not in self._shared:
                shared = costs.shared_parameters(task=stage.task, module=stage.module)
                self._shared[stage.owner] = shared
                for blocks in shared:
                    self._stage_of[stage.owner, blocks] = self._stage_of[stage.owner, blocks[0]]
                    if all((stage.owner, block) in self._trained for block in blocks):
                        self._trained.add((stage.owner, blocks))
        # Of each part, the ranks that may shard its optimizer state.
        self._state_parts: defaultdict[OwnedPart, list[StatePart]] = defaultdict(list)
        for item in program.reductions:
            if not isinstance(item, LossReduction) and item.parameters != "whole":
                state = (*item.shards, item.tp, len(item.ranks), is_cut(item))
                for part in _parts_of_sum(item):
                    self._state_parts[item.owner, part].append(state)
        self._shard_sizes: dict[Shard, float] = {}
        self._static_bytes: dict[tuple[tuple[int, int], ...], float] = {}
        self._output_bytes: dict[int, float] = {}
        self._message_bytes: dict[tuple[int, int, bool], float] = {}
        # (stage, whether its backward) to the edges whose messages its groups gather.
        self._gathered: defaultdict[tuple[int, bool], list[Edge]] = defaultdict(list)
        for edge in program.edges:
            for backward in (False, True):
                if program.shares(edge, backward=backward) > 1:
                    taker = edge.producer if backward else edge.consumer
                    self._gathered[taker, backward].append(edge)

    # --- seconds ---------------------------------------------------------------------

    def compute_s(self, stage: Stage, op: Op, samples: int) -> float:
        """Seconds of a stage's forward or backward, its hosted losses included.

        These are seconds of the busiest replica where the work of samples varies.
        """
        key = stage.index, op, samples
        if key not in self._compute:
            own_s = self.alone_s(stage, op, samples)
            self._compute[key] = own_s + self.parameters_s(stage, own_s)
        return self._compute[key]

    def alone_s(self, stage: Stage, op: Op, samples: int) -> float:
        """The same without gathers of parameters."""
        weighted_samples = samples * self.costs.straggler(
            task=stage.task,
            module=stage.module,
            dp=stage.dp,
            samples=self._rounds[stage.task],
        )
        return self.work_s(stage, op, samples, weighted_samples)

    def parameters_s(self, stage: Stage, compute_s: float) -> float:
        """Seconds for which a compute waits for its blocks' parameters; 0 where they are whole.

        On a device of its own the gather of a block runs beside the compute of the one before it.

        Args:
            stage: its blocks are gathered where it says so (ZeRO-3).
            compute_s: of all of its blocks.
        """
        if not stage.gathers or not stage.trainable:
            return 0.0
        # Ranks with one tensor-parallel index gather their shard, beside those with the others.
        task, module, ranks = stage.task, stage.module, tuple(own[0] for own in stage.holders)
        hidden_s, total_s, sharers = 0.0, 0.0, stage.shards
        whole = self.costs.work_share(task=task, module=module, blocks=stage.blocks) or 1.0
        blocks = [b for part in stage.trainable for b in range(*part)]
        sizes = [self._numbers(stage.owner, b) / sharers * self.costs.held_bytes for b in blocks]
        # Most blocks are of one size, and a group may have a thousand ranks.
        gathers = {
            size: self.costs.all_gather(ranks=ranks, num_bytes=size, sharers=sharers).seconds
            for size in {*sizes}
        }
        for block, size in zip(blocks, sizes, strict=True):
            total_s += max(0.0, gathers[size] - hidden_s)
            if not self.costs.cluster.device.is_cpu:
                own = self.costs.work_share(task=task, module=module, blocks=(block, block + 1))
                hidden_s = compute_s * own / whole
        return total_s

    def work_s(self, stage: Stage, op: Op, samples: int, weighted_samples: float) -> float:
        """Seconds of a micro-batch of ``samples`` samples, or ``weighted_samples`` of mean work."""
        own_s = self._module_s(stage, op, weighted_samples) + self._hosted_s(stage, op, samples)
        return own_s + self.shares_s(stage, op, samples)

    def shares_s(self, stage: Stage, op: Op, samples: int) -> float:
        """Seconds of the all-gathers of scattered inputs before a compute; see ``Edge``."""
        backward = op is not Op.FORWARD
        edges = self._gathered.get((stage.index, backward))
        if edges is None or op is Op.WEIGHT:
            return 0.0
        num_bytes = sum(self.edge_bytes(edge, samples) for edge in edges)
        return self.costs.gather_shares_s(ranks=stage.ranks[0], num_bytes=num_bytes)

    def _module_s(self, stage: Stage, op: Op, samples: float) -> float:
        if op is Op.FORWARD:
            gathered_s = self._items_s(stage, samples * self.output_bytes(stage))
            return gathered_s + self.costs.forward_s(
                task=stage.task,
                module=stage.module,
                tp=stage.shards,
                samples=own_samples(stage, samples),
                blocks=stage.blocks,
            )
        gathered_s = 0.0
        if stage.items:
            inward = (e for e in self.program.edges if e.consumer == stage.index)
            sent = sum(self.edge_bytes(e, samples) for e in inward if e.carries_gradient)
            gathered_s = self._items_s(stage, sent) if sent else 0.0
        whole_s = gathered_s + self._backward_s(stage, samples, stage.trainable)
        if op is Op.BACKWARD:
            return whole_s
        # The backward without trainable blocks: input gradients and recomputation.
        inputs_s = gathered_s + self._backward_s(stage, samples, ())
        return inputs_s if op is Op.INPUT else whole_s - inputs_s

    def _items_s(self, stage: Stage, num_bytes: float) -> float:
        """Seconds in which ranks that share out items gather what each has made."""
        if not stage.items:
            return 0.0
        return self.costs.gather_shares_s(ranks=stage.ranks[0], num_bytes=num_bytes)

    def _backward_s(
        self, stage: Stage, samples: float, trainable: Sequence[tuple[int, int]]
    ) -> float:
        return self.costs.backward_s(
            task=stage.task,
            module=stage.module,
            tp=stage.shards,
            samples=own_samples(stage, samples),
            blocks=stage.blocks,
            trainable=trainable,
            input_gradient=stage.input_gradient,
            recompute=self._recompute[stage.task, stage.module],
        )

    def _hosted_s(self, stage: Stage, op: Op, samples: int) -> float:
        if op is Op.WEIGHT:
            return 0.0
        # Every tensor-parallel rank of the host computes the loss of its micro-batch, all of it or
        # that of its own part of the vocabulary.
        losses = (self.program.losses[index].name for index in stage.hosted)
        side = 0 if op is Op.FORWARD else 1
        return sum(
            self.costs.loss_s(loss=name, samples=samples, tp=stage.shards)[side] for name in losses
        )

    def edge_bytes(self, edge: Edge, samples: float) -> float:
        """Bytes of ``samples`` samples along an edge, the same in both directions."""
        return samples * self.output_bytes(self.program.stages[edge.producer])

    def output_bytes(self, stage: Stage) -> float:
        """Bytes per sample of the output of a stage's last block."""
        if stage.index not in self._output_bytes:
            self._output_bytes[stage.index] = self.costs.cut_bytes(
                task=stage.task, module=stage.module, after_block=stage.blocks[1] - 1
            )
        return self._output_bytes[stage.index]

    def message_bytes(self, edge: Edge, samples: int, backward: bool) -> float:
        """Bytes of one message of ``samples`` samples: all, or the receiving rank's part."""
        key = edge.index, samples, backward
        if key not in self._message_bytes:
            # The edge of a quotient may differ (:mod:`mmplan.simulation.symmetry`).
            whole = self.program.edges[edge.index]
            parts = self.program.shares(whole, backward=backward)
            self._message_bytes[key] = self.edge_bytes(edge, samples) / parts
        return self._message_bytes[key]

    def kept_bytes(self, rank: int, message: Message) -> float:
        """Bytes of the tensor that a rank keeps for a message under way.

        A receive has a buffer. Of a send the whole tensor is kept that it is a part of.
        """
        edge = self.program.edges[message.edge]
        if message.is_send:
            stage = self.program.stages[message.stage]
            start, stop = stage.microbatches[stage.place(rank)[0]][message.mb]
            return self.edge_bytes(edge, stop - start)
        samples = message.stop - message.start
        return self.message_bytes(edge, samples, message.op is Op.RECV_B)

    def message_s(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> float:
        """Seconds of one message between two ranks; 0 to itself."""
        num_bytes = self.message_bytes(edge, samples, backward)
        return self.costs.message_s(source=source, target=target, num_bytes=num_bytes)

    def message_traffic(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> Traffic | None:
        """A message's use of nodes' interfaces; None inside a node."""
        num_bytes = self.message_bytes(edge, samples, backward)
        own = self.costs.message(source=source, target=target, num_bytes=num_bytes)
        node = self.costs.cluster.node_of
        loads = (outgoing(node(source)), own.load), (incoming(node(target)), own.load)
        return _traffic(own, loads) if own.interface_s else None

    def gather_s(self, loss: CrossSampleLoss) -> float:
        """Seconds in which the features of a sync batch come to the ranks that read them."""
        return self._gather(loss).seconds

    def gather_traffic(self, loss: CrossSampleLoss) -> Traffic | None:
        """A gather's use of nodes' interfaces; None inside a node."""
        return self._exchange(self._gather(loss), loss.ranks)

    def _gather(self, loss: CrossSampleLoss) -> Transfer:
        return self.costs.features(loss=loss.name, samples=loss.sync_batch, held=self._held(loss))

    def _exchange(self, transfer: Transfer, ranks: Sequence[int]) -> Traffic | None:
        """A collective's traffic, equal in and out of each of its nodes."""
        if not transfer.interface_s:
            return None
        nodes = {self.costs.cluster.node_of(rank) for rank in ranks}
        return _traffic(transfer, exchange(nodes, transfer.load))

    def sync_s(self, loss: CrossSampleLoss) -> float:
        """Seconds of one batch-sync: the gather of features, the loss and its gradient.

        A sharded loss also exchanges its rows' statistics. All sync batches have
        ``loss.sync_batch`` samples and take the same time.
        """
        if loss.index not in self._syncs:
            size, ranks = loss.sync_batch, loss.ranks
            own_s = self.costs.loss_s(loss=loss.name, samples=size, shards=len(ranks))
            statistics_s = self.costs.statistics_s(
                loss=loss.name, samples=size, holders=holders_of(self.program, loss)
            )
            self._syncs[loss.index] = self.gather_s(loss) + statistics_s + sum(own_s)
        return self._syncs[loss.index]

    def feature_bytes(self, loss: CrossSampleLoss, rank: int) -> float:
        """Bytes per sample of the features of the loss that one of its ranks reads."""
        return sum(size for ranks, size in self._read(loss) if rank in ranks)

    def gathered_bytes(self, loss: CrossSampleLoss) -> float:
        """Bytes per sample that all ranks together receive; at best a rank's own rows stay."""
        holders = holders_of(self.program, loss)
        apart = are_apart(holders, others_only=self.costs.reads_others_only(loss.name))
        # In shares each row comes to each of its readers; else a holder lacks the others' only.
        return sum(size * (len(ranks) - (not apart)) for ranks, size in self._read(loss))

    def _read(self, loss: CrossSampleLoss) -> list[tuple[Ranks, float]]:
        """Of each input, the ranks that read it and the bytes of a row."""
        only = self.costs.reads_others_only(loss.name)
        found = readers(holders_of(self.program, loss), others_only=only)
        return list(zip(found, (size for _, size in self._held(loss)), strict=True))

    def _held(self, loss: CrossSampleLoss) -> list[tuple[Ranks, float]]:
        """Of each input, the ranks that hold it and the bytes of a row; a stage's bytes once."""
        times = Counter(item.stage for item in loss.inputs)
        sizes = [
            self.output_bytes(self.program.stages[item.stage]) / times[item.stage]
            for item in loss.inputs
            if item.stage is not None
        ]
        return list(zip(holders_of(self.program, loss), sizes, strict=True))

    def reduce_s(self, reduction: Reduction) -> float:
        """Seconds of summing the gradients of a reduction over its ranks, alone on its links.

        ZeRO-1's reduce-scatter and gather move the same bytes. A loss's few parameters, and
        those of a profile without a fingerprint that blocks share, cost the latency only. A loss
        without any sums nothing.
        """
        return self._reduce(reduction).seconds

    def reduce_parts(
        self, reduction: Reduction, stages: Sequence[Stage]
    ) -> list[tuple[float, float]]:
        """The parts of a reduction that begins inside a backward of some stages, last blocks first.

        Of each part: the share of the backward after which all of its gradients are there, the
        largest of all stages, and its seconds. Parts are one bucket each, or several if there would
        be many.
        """
        parts = self._num_parts(reduction)
        seconds = self._reduce(reduction, parts).seconds
        if not stages or not isinstance(reduction, BlockReduction):
            return [(1.0, seconds)] * parts
        first, end = reduction.blocks
        numbers = (self._numbers(reduction.owner, b) for b in reversed(range(first, end)))
        there = [0.0, *accumulate(numbers)]
        of_each = [self._passed_shares(stage, reduction.blocks) for stage in stages]
        at = np.linspace(0, there[-1], parts + 1)[1:]
        shares = np.interp(at, there, np.maximum.reduce(of_each))
        return [(float(share), seconds) for share in shares]

    def _passed_shares(self, stage: Stage, blocks: tuple[int, int]) -> list[float]:
        """The shares of a stage's backward after which it has passed so many of some blocks.

        Blocks share the backward as they share the stage's work; the gradients of a block come
        evenly over its time.
        """
        low, high = passed_blocks(stage) or stage.blocks
        share = partial(self.costs.work_share, task=stage.task, module=stage.module)
        whole = share(blocks=(low, high)) or 1.0
        starts = (min(max(block, low), high) for block in range(blocks[1], blocks[0] - 1, -1))
        return [share(blocks=(start, high)) / whole for start in starts]

    def _num_parts(self, reduction: Reduction) -> int:
        buckets = math.ceil(self.reduced_bytes(reduction) / BUCKET_BYTES)
        return min(max(1, buckets), MOST_PARTS)

    def reduce_traffic(self, reduction: Reduction, parts: int = 1) -> Traffic | None:
        """Use of nodes' interfaces by one of so many parts of a reduction; None inside a node."""
        return self._exchange(self._reduce(reduction, parts), reduction.ranks)

    def _reduce(self, reduction: Reduction, parts: int = 1) -> Transfer:
        if isinstance(reduction, LossReduction) and not self.costs.trains(reduction.owner):
            return Transfer(0.0)
        num_bytes = self.reduced_bytes(reduction) / parts
        # Of ZeRO-3 no gather of parameters follows: a reduce-scatter takes as long as a gather.
        alone = isinstance(reduction, BlockReduction) and self._gathers(reduction)
        collective = self.costs.all_gather if alone else self.costs.all_reduce
        return collective(ranks=reduction.ranks, num_bytes=num_bytes)

    def _gathers(self, reduction: BlockReduction) -> bool:
        return self._stage_of[reduction.owner, reduction.blocks[0]].gathers

    def reduced_bytes(self, reduction: Reduction) -> float:
        """Bytes of gradient that every rank contributes to a reduction; its blocks all train.

        A profile does not know the parameters that tensor parallelism replicates: all count as
        sharded, here as in memory.
        """
        if isinstance(reduction, LossReduction) or reduction.parameters == "whole":
            return 0.0
        numbers = sum(self._numbers(reduction.owner, part) for part in _parts_of_sum(reduction))
        first, end = reduction.shards
        size = self.costs.gradient_bytes(self.zero_of(reduction))
        return numbers * (end - first) / reduction.tp * size

    def zero_of(self, reduction: Reduction) -> int:
        """ZeRO stage of what a reduction sums; 0 where a profile has no bytes of it."""
        if isinstance(reduction, LossReduction):
            return 0
        return self._stage_of[reduction.owner, reduction.blocks[0]].zero

    # --- bytes -----------------------------------------------------------------------

    def activation_bytes(self, stage: Stage, samples: float) -> float:
        """Bytes that a device holds of one micro-batch until its backward (its ``W``) has run.

        Only blocks that a gradient passes keep anything: nothing is saved before them.
        """
        passed = passed_blocks(stage)
        if passed is None:
            return 0.0
        return self.costs.activation_bytes(
            task=stage.task,
            module=stage.module,
            tp=stage.shards,
            samples=own_samples(stage, samples),
            blocks=passed,
            recompute=self._recompute[stage.task, stage.module],
        )

    def recomputed(self, stage: Stage) -> list[Blocks]:
        """Those of a stage's blocks that a gradient passes and that run their forward again."""
        passed = passed_blocks(stage)
        blocks = self.costs.num_blocks(task=stage.task, module=stage.module)
        again = recomputed_blocks(self._recompute[stage.task, stage.module], blocks)
        return [] if passed is None else overlaps(passed, again)

    def gradient_bytes(self, rank: int) -> dict[OwnedPart, float]:
        """Bytes of a rank's gradients, of each block (owner, block) that trains.

        Those of parameters that several blocks share have the tuple of these blocks in its place.
        Those that are cut stay as long as the optimizer's state, and are not among them.
        """
        return {
            shard[:2]: self._numbers(*shard[:2])
            / shard[2]
            * self.costs.gradient_bytes(self._stage_of[shard[:2]].zero)
            for shard in self._shards(rank)
            if shard[:2] in self._trained
            and not any(in_rounds for *_, in_rounds in self._parts_of(shard))
        }

    def static_bytes(self, rank: int) -> float:
        """Weights, gradients and optimizer state on a rank, each shard of a block once.

        Under ZeRO-1 the ranks that reduce a part of a shard divide its state. Of ZeRO-3 the block
        that a compute has whole counts too.
        """
        held = tuple((stage.index, index) for stage, index in self._held_shards(rank))
        if held not in self._static_bytes:
            whole = (self._gathered_bytes(stage) for stage in self.program.stages_of(rank))
            own = sum(self._shard_bytes(shard) for shard in self._shards(rank))
            self._static_bytes[held] = own + max(whole, default=0.0)
        return self._static_bytes[held]

    def _gathered_bytes(self, stage: Stage) -> float:
        if not stage.gathers or not stage.trainable:
            return 0.0
        return (
            self.costs.gathered_bytes(
                task=stage.task,
                module=stage.module,
                blocks=stage.blocks,
                trainable=stage.trainable,
            )
            / stage.shards
        )

    def _shard_bytes(self, shard: Shard) -> float:
        if shard not in self._shard_sizes:
            numbers = self._numbers(*shard[:2])
            self._shard_sizes[shard] = sum(
                numbers
                * (end - first)
                / tp
                * self.costs.bytes_per_parameter(
                    trainable=shard[:2] in self._trained,
                    zero=self._stage_of[shard[:2]].zero,
                    dp=ranks,
                    in_rounds=in_rounds,
                    gathers=in_rounds,
                )
                for first, end, tp, ranks, in_rounds in self._parts_of(shard)
            )
        return self._shard_sizes[shard]

    def _parts_of(self, shard: Shard) -> list[StatePart]:
        """The reduced parts of a shard; all of it, on one rank, where there are none."""
        owner, of, tp, index = shard
        parts = [
            part
            for part in self._state_parts.get((owner, of), ())
            if index * part[2] <= part[0] * tp and part[1] * tp <= (index + 1) * part[2]
        ]
        return parts or [(index, index + 1, tp, 1, False)]

    def _held_shards(self, rank: int) -> Iterator[tuple[Stage, int]]:
        """The stages that a rank holds, and its shard of each."""
        for stage in self.program.stages_of(rank):
            yield stage, 0 if stage.items else stage.place(rank)[1]

    def _shards(self, rank: int) -> list[Shard]:
        """The shard that a rank holds of every part; the whole part where it runs two shards."""
        shards: dict[OwnedPart, tuple[int, int]] = {}
        for stage, index in self._held_shards(rank):
            shard = stage.shards, index
            blocks = range(*stage.blocks)
            shared = (s for s in self._shared[stage.owner] if any(b in blocks for b in s))
            for part in (*blocks, *shared):
                key = stage.owner, part
                shards[key] = shard if shards.get(key, shard) == shard else (1, 0)
        return [(*key, *shard) for key, shard in shards.items()]

    def _numbers(self, owner: str, part: ModulePart) -> float:
        """How many parameters a part has, whole."""
        if not isinstance(part, int):
            return self._shared[owner].get(part, 0)
        stage = self._stage_of[owner, part]
        return self.costs.own_parameters(task=stage.task, module=stage.module, block=part)

    def communicator_bytes(self, rank: int) -> float:
        """Device memory of the communicators of a rank."""
        each = self.costs.cluster.device.communicator_bytes
        return each * self.communicators(rank) if each else 0.0

    def communicators(self, rank: int) -> int:
        """Communicators of a rank, as the launcher creates them on devices that have any."""
        return self._communicators[rank].total

    @cached_property
    def _communicators(self) -> list[CommunicatorCount]:
        return communicator_counts(self.program)

    # --- work ------------------------------------------------------------------------

    def flops(self) -> float:
        """Model FLOPs of one step: a forward, and as much again for each of the gradients.

        Input gradients count over the blocks that a gradient passes, weight gradients
        over those that train. Recomputation does not count.
        """
        return sum(self.module_flops().values())

    def module_flops(self) -> dict[str, float]:
        """Each module's part of :meth:`flops`, over all tasks that use it."""
        flops: defaultdict[str, float] = defaultdict(float)
        for stage in self.program.stages:
            flops[stage.module] += self._stage_flops(stage)
        return flops

    def _stage_flops(self, stage: Stage) -> float:
        task, module = stage.task, stage.module
        ranges = [stage.blocks, *stage.trainable]
        passed = passed_blocks(stage)
        if passed is not None:
            ranges.append(passed)
        share = sum(self.costs.work_share(task=task, module=module, blocks=r) for r in ranges)
        per_sample = self.costs.flops_per_sample(task=task, module=module)
        return share * per_sample * self.program.batches[task]


def _parts_of_sum(reduction: BlockReduction | TieReduction) -> list[ModulePart]:
    if isinstance(reduction, TieReduction):
        return [reduction.blocks]
    return [*range(*reduction.blocks)]


def _traffic(transfer: Transfer, loads: Loads) -> Traffic:
    """A transfer on the network: alone it takes as long as its part of an interface needs."""
    return Traffic(seconds=transfer.interface_s / transfer.load, loads=loads)


def passed_blocks(stage: Stage) -> tuple[int, int] | None:
    """The blocks of a stage that a gradient passes; see :func:`gradient_blocks`."""
    return gradient_blocks(stage.blocks, stage.trainable, input_gradient=stage.input_gradient)


def check_cluster(profile: Profile, cluster: Cluster | None) -> None:
    """Refuse to use a profile's times on other devices than its own.

    Measured and analytic times belong to one device. A given profile belongs to any device that
    the user names.

    Raises:
        InvalidInputError: the cluster's device has another name or another memory, or groups over
            nodes of another size.
    """
    if cluster is None or profile.source == "given":
        return
    theirs, ours = profile.cluster.device, cluster.device
    for field, was, now in (
        ("name", theirs.name, ours.name),
        ("memory_bytes", theirs.memory_bytes, ours.memory_bytes),
    ):
        if was != now:
            raise InvalidInputError(
                f"profile {profile.name} is {profile.source} for devices with {field} {was}, "
                f"cluster {cluster.name} has {now}",
                hint="profile the workload again with --cluster, or leave --cluster out",
            )
    nodes = profile.cluster.devices_per_node, cluster.devices_per_node
    degrees = {point.tp for module in profile.modules.values() for point in module.points}
    if nodes[0] != nodes[1] and any(map(cluster.spans_nodes, degrees)):
        raise InvalidInputError(
            f"cluster {cluster.name} has tensor-parallel groups over nodes of {nodes[1]} devices, "
            f"profile {profile.name} is for nodes of {nodes[0]}",
            hint="profile the workload again with --cluster, or set tensor_parallel_nodes: 1",
        )
