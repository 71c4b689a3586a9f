"""The memory that a run is expected to hold on each rank, instruction by instruction.

Plans are searched and checked with another number (:mod:`mmplan.simulation.step`): it counts every
gradient for the whole step, and otherwise only weights, optimizer state, activations, messages and
communicators. A run differs from that number in both directions:

- The first backward that makes a block's gradient allocates it, and the update frees it. Within a
  backward, activations are freed block by block as gradients are allocated.
- A forward or backward needs workspace while it runs, as far as the profile knows.
- A stage keeps what it receives from the receive's post until its backward. It keeps what it sends
  until its rank knows that it has come (:mod:`mmplan.program.sent_messages`).
- A micro-batch holds as many bytes as its samples' work asks for. Where the profile knows how the
  work varies, the first batches of a run are taken, and the largest peak of them counts.
- A sum over ranks copies a bucket of gradients, and lets go of these. ZeRO-1's leaves a slice of
  them; sums under way hold the copies and the slices. Losses hold their own activations, and
  cross-sample losses hold the features of a whole sync batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from mmplan.costs.fit import fit_curve
from mmplan.costs.program_costs import (
    CostModel,
    OwnedPart,
    ProgramCosts,
    own_samples,
    passed_blocks,
)
from mmplan.program.instructions import Collective, Compute, Message, Op, Sync
from mmplan.program.model import BlockReduction, CrossSampleLoss, MicroBatch, Stage
from mmplan.program.reduction_starts import is_cut
from mmplan.program.samples import SampleRange, intersect
from mmplan.program.sent_messages import MessagesUnderWay
from mmplan.program.shards import BUCKET_BYTES
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Curve, ModuleProfile, Point
from mmplan.simulation.sampled_batches import (
    RunningWorks,
    default_num_batches,
    first_batches,
    running_works,
    weighted_samples,
)
from mmplan.simulation.step import Simulation, bytes_under_way

# The largest peak of so many batches: a run has many more, but the largest of few is near to that
# of many. bench_prediction.py runs as many steps.
MAX_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The bytes that a rank holds at one time.

    Attributes:
        fixed: weights, their copies, optimizer state, communicators.
        gradients: of parameters.
        activations: of micro-batches between their forward and backward.
        workspace: of the forward or backward that runs.
        buffers: received, sent and gathered tensors, copies for sums, and tensors of losses.
    """

    fixed: float
    gradients: float
    activations: float
    workspace: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.fixed + self.gradients + self.activations + self.workspace + self.buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionMemory:
    """The peak while an instruction runs, and the bytes held from its end on.

    Attributes:
        message_bytes: of messages under way from its end on: those posted and not taken, and those
            sent and not known to have come. They are among activations and buffers.
    """

    position: int
    during: MemoryUse
    after_bytes: float
    message_bytes: float


class ExpectedMemory:
    """The expected memory of the ranks of a program.

    Args:
        costs: of the program.

    Attributes:
        knows_workspace: whether the profile has the workspace of every module that runs.
    """

    def __init__(self, costs: ProgramCosts) -> None:
        self.costs = costs
        self.stages = StageMemory(costs)
        self.under_way = MessagesUnderWay(costs.program)
        self.knows_workspace = all(self.stages.workspace(s) for s in costs.program.stages)
        self.gradients_back: defaultdict[int, list[int]] = defaultdict(list)
        for edge in costs.program.edges:
            if edge.carries_gradient:
                self.gradients_back[edge.consumer].append(edge.index)
        batches = first_batches(costs, number=min(MAX_BATCHES, default_num_batches(costs.program)))
        self._peaks: dict[int, tuple[MemoryUse, RunningWorks]] = {}
        self._works: list[RunningWorks] = [running_works(batch) for batch in batches] or [{}]

    def by_instruction(self, rank: int) -> Iterator[InstructionMemory]:
        """The memory of a rank at each of its instructions, in program order."""
        return _Walk(self, rank, self._peak_and_batch(rank)[1]).by_instruction()

    def peak(self, rank: int) -> MemoryUse:
        """A rank's memory at its peak; the fixed bytes of a rank without instructions."""
        return self._peak_and_batch(rank)[0]

    def _peak_and_batch(self, rank: int) -> tuple[MemoryUse, RunningWorks]:
        """The largest peak of the batches, and the work of that batch."""
        if rank not in self._peaks:
            stages = self.costs.program.stages_of(rank)
            found: list[tuple[MemoryUse, RunningWorks]] = []
            for works in self._works:
                walk = _Walk(self, rank, works)
                start = walk.now()
                peak = max(
                    (m.during for m in walk.by_instruction()),
                    key=attrgetter("total"),
                    default=start,
                )
                found.append((peak, works))
                # Without varying work on this rank, all batches are equal.
                if not any((stage.task, stage.module) in works for stage in stages):
                    break
            self._peaks[rank] = max(found, key=lambda item: item[0].total)
        return self._peaks[rank]

    def peaks(self) -> list[MemoryUse]:
        """The same of every rank."""
        return [self.peak(rank) for rank in range(self.costs.program.num_ranks)]

    def message_bytes(self, rank: int) -> float:
        """The most bytes of messages that are under way on a rank."""
        return max((memory.message_bytes for memory in self.by_instruction(rank)), default=0.0)

    def over_time(self, simulation: Simulation, rank: int) -> list[tuple[float, float]]:
        """(second, bytes held from then on) of a rank, from 0 to the step's end."""
        start_s, end_s = simulation.clocks.start[rank], simulation.clocks.end[rank]
        walk = _Walk(self, rank, self._peak_and_batch(rank)[1])
        points = [(0.0, walk.now().total)]
        row = self.costs.program.instructions[rank]
        for memory in walk.by_instruction():
            begins_s, item = start_s[memory.position], row[memory.position]
            # Messages and gathers go on while the next instructions run.
            is_posted = isinstance(item, Message) or item.op in (Op.SYNC_START, Op.REDUCE_START)
            ends_s = begins_s if is_posted else end_s[memory.position]
            points += [(begins_s, memory.during.total), (ends_s, memory.after_bytes)]
        return points


class _Walk:
    """The memory of one rank along its program."""

    def __init__(self, of: ExpectedMemory, rank: int, works: RunningWorks) -> None:
        self._of, self._costs, self._bytes = of, of.costs, of.stages
        self._program = of.costs.program
        self._row = self._program.instructions[rank]
        self._works = works
        self._gradient_of = self._costs.gradient_bytes(rank)
        self._rank = rank
        self._replica = {s.index: s.place(rank)[0] for s in self._program.stages_of(rank)}
        computes = ((k, x) for k, x in enumerate(self._row) if isinstance(x, Compute))
        # The last compute of a micro-batch frees its activations.
        self._last = {(item.stage, item.mb): position for position, item in computes}
        # (stage, micro-batch, whether gradients are sent): the last instruction that shows a send.
        self._kept_until: defaultdict[tuple[int, int, bool], int] = defaultdict(int)
        last = of.under_way.last_positions(rank)
        for position, item in enumerate(self._row):
            if isinstance(item, Message) and item.is_send:
                # A rank keeps what it sends to itself for the whole step.
                shown = last.get(position, len(self._row) - 1)
                key = item.stage, item.mb, item.op is Op.SEND_B
                self._kept_until[key] = max(shown, self._kept_until[key])
        # By instruction: the bytes of what was sent that go with its end.
        self._freed: defaultdict[int, float] = defaultdict(float)
        self._posted, self._let_go = bytes_under_way(self._costs, rank, of.under_way)
        self._messages = 0.0
        static = self._costs.static_bytes(rank) - sum(self._gradient_of.values())
        self._fixed = static + self._costs.communicator_bytes(rank)
        self._gradients = self._activations = self._buffers = 0.0
        self._made: set[OwnedPart] = set()
        # Of each block, what has a gradient with it: itself, and what it shares with others.
        self._parts: defaultdict[tuple[str, int], list[OwnedPart]] = defaultdict(list)
        for owner, part in self._gradient_of:
            for block in (part,) if isinstance(part, int) else part:
                self._parts[owner, block].append((owner, part))
        self._received: defaultdict[MicroBatch, float] = defaultdict(float)
        self._returned: defaultdict[MicroBatch, float] = defaultdict(float)
        # Reductions that start inside the next compute, and all that started.
        self._starting: list[int] = []
        self._started: set[int] = set()
        # Outputs kept for syncs: the number of syncs to come, and the bytes.
        self._waiting: dict[MicroBatch, tuple[int, float]] = {}
        self._gathered: defaultdict[tuple[int, int], float] = defaultdict(float)

    def now(
        self,
        *,
        workspace: float = 0.0,
        buffers: float = 0.0,
        freed: float = 0.0,
        new_gradients: float = 0.0,
    ) -> MemoryUse:
        """The memory now, with workspace, more buffers and gradients, and less activations."""
        return MemoryUse(
            fixed=self._fixed,
            gradients=self._gradients + new_gradients,
            activations=self._activations - freed,
            workspace=workspace,
            buffers=self._buffers + buffers,
        )

    def by_instruction(self) -> Iterator[InstructionMemory]:
        """See :meth:`ExpectedMemory.by_instruction`; may run once only."""
        for position, item in enumerate(self._row):
            if isinstance(item, Compute):
                during = self._compute(position, item)
            elif isinstance(item, Message):
                during = self._message(item)
            elif isinstance(item, Sync):
                during = self._sync(item)
            elif isinstance(item, Collective):
                during = self._collective(item)
            else:
                during = self.now()
                self._gradients = self._buffers = 0.0
                self._freed.clear()
            self._buffers -= self._freed.pop(position, 0.0)
            self._messages += self._posted.get(position, 0.0) - self._let_go.get(position, 0.0)
            after = self._fixed + self._gradients + self._activations + self._buffers
            yield InstructionMemory(
                position=position,
                during=during,
                after_bytes=after,
                message_bytes=self._messages,
            )

    # --- computes ----------------------------------------------------------------------

    def _compute(self, position: int, item: Compute) -> MemoryUse:
        stage = self._program.stages[item.stage]
        start, stop = span = stage.microbatches[self._replica[stage.index]][item.mb]
        sizes = self._bytes.of(stage, stop - start, weighted_samples(stage, span, self._works))
        if item.op is Op.FORWARD:
            self._activations += sum(sizes.activations)
            self._buffers += sizes.losses
            during = self.now(workspace=sizes.forward)
        else:
            during = self._backward(stage, item, sizes)
        if item.is_backward:
            self._give_gradient(stage, item.mb, stop - start)
        if self._last[item.stage, item.mb] == position:
            self._release(stage, item.mb, sizes, position)
        return during

    def _starts(self) -> list[_Start]:
        """The reductions that start inside the next compute."""
        starts, self._starting = list(map(self._start, self._starting)), []
        return starts

    def _start(self, index: int) -> _Start:
        reduction = self._program.reductions[index]
        if not isinstance(reduction, BlockReduction):
            raise AssertionError(f"sum {index} starts, and is not of blocks")
        (first, end), size = reduction.blocks, self._costs.reduced_bytes(reduction)
        copied, own = self._sum_bytes(index)
        # Blocks as if alike: how many have the first bucket's gradients.
        filled = math.ceil((end - first) * min(1.0, BUCKET_BYTES / size)) if size else 1
        return _Start(block=end - filled, copied=copied, own=own)

    def _sum_bytes(self, index: int) -> tuple[float, float]:
        """Bytes of the copies of a bucket of a reduction, and of this rank's slice of its sum."""
        reduction = self._program.reductions[index]
        size = self._costs.reduced_bytes(reduction)
        bucket = min(size, BUCKET_BYTES)
        if not self._costs.zero_of(reduction) or len(reduction.ranks) == 1:
            return bucket, 0.0
        # gloo copies its input.
        copies = 2 if self._costs.costs.cluster.device.is_cpu else 1
        if is_cut(reduction):
            return bucket * (copies + 1) + min(bucket, size - bucket), 0.0
        return bucket * copies, size / len(reduction.ranks)

    def _backward(self, stage: Stage, item: Compute, sizes: MicroBatchMemory) -> MemoryUse:
        """The peak while blocks, last one first, free activations and allocate gradients.

        An ``I`` makes no gradients of weights and keeps all activations for its ``W``.
        """
        if item.is_backward:
            self._take_gradient(item)
        peak = self.now(workspace=sizes.backward)
        if item.op is Op.INPUT:
            return peak
        new, starts = self._new_gradients(stage), self._starts()
        freed = allocated = 0.0
        for block in range(stage.blocks[1] - 1, sizes.first - 1, -1):
            within = self.now(
                workspace=sizes.backward,
                freed=freed,
                new_gradients=allocated,
                buffers=_summing(start for start in starts if start.block > block),
            )
            peak = max(peak, within, key=attrgetter("total"))
            freed += sizes.activations[block - sizes.first]
            allocated += new.get(block, 0.0)
        self._gradients += sum(new.values())
        end = self.now(freed=freed, buffers=_summing(starts))
        self._buffers += sum(start.own for start in starts)
        return max(peak, end, key=attrgetter("total"))

    def _new_gradients(self, stage: Stage) -> dict[int, float]:
        """Blocks that have no gradient yet, to the bytes of that gradient."""
        new: dict[int, float] = {}
        for first, end in stage.trainable:
            for block in reversed(range(max(first, stage.blocks[0]), min(end, stage.blocks[1]))):
                made = set(self._parts[stage.owner, block]) - self._made
                self._made |= made
                new[block] = sum(self._gradient_of[part] for part in made)
        return new

    def _release(self, stage: Stage, mb: int, sizes: MicroBatchMemory, position: int) -> None:
        """Free a micro-batch after its last compute; a send or a sync may keep its output."""
        key = stage.index, mb
        self._activations -= sum(sizes.activations)
        self._buffers -= sizes.losses + self._received.pop(key, 0.0)
        kept_until = self._kept_until[*key, False]
        if kept_until > position:
            self._keep(sizes.output, kept_until)
        elif not stage.has_backward and stage.syncs:
            self._waiting[key] = self._num_syncs(stage, mb), sizes.output
            self._buffers += sizes.output

    def _num_syncs(self, stage: Stage, mb: int) -> int:
        """Number of sync batches, of all losses, with samples of a micro-batch."""
        span = stage.microbatches[self._replica[stage.index]][mb]
        return sum(len(self._program.cross_sample(i).batches_of(span)) for i in stage.syncs)

    # --- between ranks -----------------------------------------------------------------

    def _message(self, item: Message) -> MemoryUse:
        if not item.is_send:
            edge = self._program.edges[item.edge]
            size = self._costs.edge_bytes(edge, item.stop - item.start)
            arrived = self._received if item.op is Op.RECV_F else self._returned
            arrived[item.stage, item.mb] += size
            self._buffers += size
        return self.now()

    def _keep(self, num_bytes: float, until: int) -> None:
        """Keep what is sent until an instruction is over."""
        self._buffers += num_bytes
        self._freed[until] += num_bytes

    def _take_gradient(self, item: Compute) -> None:
        """Count an output's gradient as part of the backward's workspace, if that is known."""
        size = self._returned.pop((item.stage, item.mb), 0.0)
        if self._of.knows_workspace:
            self._buffers -= size
        else:
            self._received[item.stage, item.mb] += size

    def _give_gradient(self, stage: Stage, mb: int, samples: int) -> None:
        """Keep the gradients of received tensors, which are sent, until they have come."""
        until = self._kept_until[stage.index, mb, True]
        for index in self._of.gradients_back[stage.index] if until else ():
            self._keep(self._costs.edge_bytes(self._program.edges[index], samples), until)

    def _sync(self, item: Sync) -> MemoryUse:
        loss = self._program.cross_sample(item.loss)
        features, loss_bytes = self._bytes.sync_bytes(loss, self._rank)
        key = item.loss, item.batch
        if item.op is Op.SYNC_START:
            # This rank's own features, and all that it reads.
            self._gathered[key] = features * (1 + 1 / len(loss.ranks))
            self._buffers += self._gathered[key]
            return self.now()
        # Features in the order of samples, their gradients, and the loss.
        during = self.now(buffers=2 * features + loss_bytes)
        self._buffers -= self._gathered.pop(key, 0.0)
        self._synced(item.loss, loss.samples(item.batch))
        return during

    def _synced(self, loss: int, samples: tuple[int, int]) -> None:
        """Free the outputs whose last sync is over."""
        for (index, mb), (left, size) in list(self._waiting.items()):
            stage = self._program.stages[index]
            span = stage.microbatches[self._replica[index]][mb]
            if loss not in stage.syncs or intersect(span, samples) is None:
                continue
            self._waiting[index, mb] = left - 1, size
            if left == 1:
                del self._waiting[index, mb]
                self._buffers -= size

    def _collective(self, item: Collective) -> MemoryUse:
        if item.op is Op.REDUCE_START:
            self._starting.append(item.index)
            self._started.add(item.index)
        if item.op is not Op.REDUCE:
            return self.now()
        bucket, own = self._sum_bytes(item.index)
        if item.index in self._started:
            during = self.now()
            self._buffers -= own
        else:
            during = self.now(buffers=own + bucket)
        if own:
            size = self._costs.reduced_bytes(self._program.reductions[item.index])
            self._gradients -= size - own
        return during


class _Start(NamedTuple):
    """A reduction that starts inside a backward.

    Attributes:
        block: with whose gradients its first bucket is full.
        copied: bytes of a bucket's copies.
        own: of this rank's slice of its sum.
    """

    block: int
    copied: float
    own: float


def _summing(starts: Iterable[_Start]) -> float:
    """Bytes of sums that have started: all slices, and one bucket, since others are over."""
    # Of sums that are cut a bucket is under way while the gradients of the next one come.
    begun = [*starts]
    copied = max((start.copied for start in begun), default=0.0)
    return copied + sum(start.own for start in begun)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchMemory:
    """The bytes of one micro-batch in a stage.

    Attributes:
        activations: of the blocks that a gradient passes, from first to last; held from the
            forward to the backward.
        first: the first of these blocks.
        forward: peak workspace of the forward, without its activations.
        backward: peak workspace of the backward.
        losses: of its hosted losses, held as activations are.
        output: of the last block.
    """

    activations: tuple[float, ...]
    first: int
    forward: float
    backward: float
    losses: float
    output: float


class StageMemory:
    """The bytes of micro-batches in the stages of a program, cached."""

    def __init__(self, costs: ProgramCosts) -> None:
        self.costs = costs
        self._stages: dict[tuple[int, int, float], MicroBatchMemory] = {}
        self._curves: dict[tuple[str, str, int], _Workspace | None] = {}
        self._loss_curves: dict[tuple[str, bool], Curve] = {}

    def of(self, stage: Stage, samples: int, weighted_samples: float) -> MicroBatchMemory:
        """Of a micro-batch of ``samples`` samples, or ``weighted_samples`` of mean work."""
        key = stage.index, samples, weighted_samples
        if key not in self._stages:
            self._stages[key] = self._bytes_of(stage, samples, weighted_samples)
        return self._stages[key]

    def _bytes_of(self, stage: Stage, samples: int, weighted_samples: float) -> MicroBatchMemory:
        losses = [self.costs.program.losses[index].name for index in stage.hosted]
        forward, backward = self._workspaces(stage, weighted_samples)
        passed = passed_blocks(stage)
        return MicroBatchMemory(
            activations=self._activations(stage, weighted_samples),
            first=passed[0] if passed is not None else stage.blocks[1],
            forward=forward,
            backward=backward,
            losses=sum(self.loss_bytes(name, samples, stage.shards) for name in losses),
            output=weighted_samples * self.costs.output_bytes(stage),
        )

    def _activations(self, stage: Stage, weighted_samples: float) -> tuple[float, ...]:
        passed = passed_blocks(stage)
        if passed is None:
            return ()
        whole = self.costs.activation_bytes(stage, weighted_samples)
        shares = [
            self.costs.costs.activation_share(
                task=stage.task, module=stage.module, blocks=(block, block + 1)
            )
            for block in range(*passed)
        ]
        total = sum(shares)
        held = [whole * (s / total if total else 1 / len(shares)) for s in shares]
        if stage.items:
            # The output of all ranks beside the own one.
            output = self.costs.output_bytes(stage)
            held[-1] += output * (weighted_samples - own_samples(stage, weighted_samples))
        return tuple(held)

    def _workspaces(self, stage: Stage, weighted_samples: float) -> tuple[float, float]:
        """Peak workspace of a forward and of a backward."""
        known = self.workspace(stage)
        if known is None:
            return 0.0, 0.0
        # In samples like those of the profile's points.
        own = own_samples(stage, weighted_samples)
        size = own * self.costs.costs.mean_work(stage.task, stage.module)
        alone = known.forward_only.at(size)
        passed = passed_blocks(stage)
        if passed is None:
            return alone, 0.0
        backward = known.backward_extra.at(size)
        again = self.costs.recomputed(stage)
        if again:
            # A block runs forward again, and holds all of its activations during its backward.
            backward += max(
                self.costs.costs.activation_bytes(
                    task=stage.task,
                    module=stage.module,
                    tp=stage.shards,
                    samples=own,
                    blocks=(block, block + 1),
                )
                for part in again
                for block in range(*part)
            )
        if again == [passed]:
            return alone, backward
        forward = known.forward_extra.at(size)
        return (forward if passed == stage.blocks else max(forward, alone)), backward

    def workspace(self, stage: Stage) -> _Workspace | None:
        """The curves of a stage's module, where the profile has them."""
        key = stage.task, stage.module, stage.shards
        if key not in self._curves:
            module = self.costs.costs.profile.module(stage.module, stage.task)
            self._curves[key] = _fitted(module, stage.shards)
        return self._curves[key]

    def loss_bytes(self, name: str, samples: int, tp: int = 1) -> float:
        """Bytes of a loss from its forward to its backward; 0 where the profile lacks it.

        Args:
            name: of the loss.
            samples: of the sync batch, or of the micro-batch.
            tp: ranks of its host's tensor-parallel group, which may share it out.
        """
        profile = self.costs.costs.profile.losses.get(name)
        if profile is None:
            return 0.0
        key = name, tp > 1 and profile.cuts_vocabulary
        if key not in self._loss_curves:
            points = profile.points
            sizes = [p.cut_bytes if key[1] else p.activation_bytes for p in points]
            self._loss_curves[key] = fit_curve(
                [p.samples for p in points], [size or 0.0 for size in sizes]
            )
        return self._loss_curves[key].at(samples) / (tp if key[1] else 1)

    def sync_bytes(self, loss: CrossSampleLoss, rank: int) -> tuple[float, float]:
        """Bytes of one sync batch: the features that a rank reads, and the loss's tensors on it."""
        samples = loss.sync_batch
        whole_bytes = self.loss_bytes(loss.name, samples)
        known = self.costs.costs.profile.losses.get(loss.name)
        parts = len(loss.ranks) if known is not None and known.sharded else 1
        return samples * self.costs.feature_bytes(loss, rank), whole_bytes / parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workspace:
    """Curves over the micro-batch size of the workspace fields of :class:`Point`."""

    forward_only: Curve
    forward_extra: Curve
    backward_extra: Curve


def _fitted(module: ModuleProfile, tp: int) -> _Workspace | None:
    """Workspace of one tp; None where no point has it.

    Workspace is a peak over the blocks: a stage of some blocks takes as much as the module.
    """
    points = [p for p in module.points if p.tp == tp and p.backward_extra_bytes is not None]
    whole = [p for p in points if p.blocks in (None, module.blocks)] or points
    if not whole:
        return None

    def curve(value: Callable[[Point], float | None]) -> Curve:
        return fit_curve([p.microbatch for p in whole], [value(p) or 0.0 for p in whole])

    return _Workspace(
        forward_only=curve(lambda p: p.forward_only_bytes),
        forward_extra=curve(lambda p: p.forward_extra_bytes),
        backward_extra=curve(lambda p: p.backward_extra_bytes),
    )


def memory_lower_bound(plan: Plan, costs: CostModel, lowered: LoweredPlan | None = None) -> float:
    """A lower bound of the largest ``peak_bytes`` of a plan: one stage's, and the fixed bytes.

    Exact where devices run one stage each, backwards are fused, communicators and messages free. It
    takes a fraction of a simulation's time.

    Args:
        plan: the plan.
        costs: of its modules.
        lowered: the plan lowered, where that is done already.
    """
    lowered = lower_plan(plan) if lowered is None else lowered
    graph = lowered.graph
    program_costs = ProgramCosts.of_lowered(plan, graph, costs)
    kept = lowered.simulated_graph.stages
    first_ranks = {group[0] for stage in kept for group in stage.ranks}
    fixed = {rank: program_costs.static_bytes(rank) for rank in first_ranks}
    before = lowered.orders.forwards_before
    return max(
        fixed[ranks[0]]
        + _peak_activations(graph.stages[stage.index], spans, before[stage.index][d], program_costs)
        for stage in kept
        for d, (ranks, spans) in enumerate(zip(stage.ranks, stage.microbatches, strict=True))
    )


def _peak_activations(
    stage: Stage, spans: Sequence[SampleRange], before: Sequence[int], costs: ProgramCosts
) -> float:
    """Most bytes of micro-batches in flight; ``before`` as in ``Orders.forwards_before``."""
    if not stage.has_backward:
        return 0.0
    sizes = [stop - start for start, stop in spans]
    held = {n: costs.activation_bytes(stage, n) for n in set(sizes)}
    total = list(accumulate(map(held.__getitem__, sizes), initial=0.0))
    return max((total[count] - total[m] for m, count in enumerate(before)), default=0.0)
