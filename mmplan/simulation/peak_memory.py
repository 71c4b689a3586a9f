"""What each rank of a run really holds, instruction by instruction.

The memory that plans are searched and checked with (:mod:`mmplan.simulation.step`) counts every
gradient as held all the time, and nothing beside weights, state and activations. A run differs
from it in both directions:

- A block's gradient comes with the first backward that makes it and goes with the update. Within
  a backward activations go, block by block, as gradients come.
- A forward or backward takes memory for the moment, as far as the profile knows.
- What a stage receives it holds until its backward; what it sent until the gradient of it is back,
  or until the step's end where none comes.
- Micro-batches hold as much as their samples are worth: of data that vary, as far as the profile
  knows how, the first batches of a run are taken and the most of them counts.
- REDUCE copies gradients, so many bytes at a time; ZeRO-1's leaves a slice of them. Losses hold
  their own activations, and those across samples the features of a whole sync batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mmplan.costs.microbatch_memory import BytesOfStages, StageBytes
from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.program.instructions import Collective, Compute, Message, Op, Sync
from mmplan.program.model import MicroBatch, Program, Stage
from mmplan.program.rank_facts import BUCKET_BYTES
from mmplan.program.samples import SampleRange, intersect
from mmplan.schema.plan import Plan
from mmplan.simulation.sampled_batches import default_draws, first_batches, running_works
from mmplan.simulation.step import Simulation
from mmplan.simulation.symmetry_classes import Outline, outline

Works = Mapping[tuple[str, str], Sequence[float]]  # task and module to running sums over samples

# Batches at most: a run has many more, but the most of few is near to that of many.
MOST_DRAWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds at one time, bytes.

    Attributes:
        fixed: weights, their copies, optimizer state, communicators.
        gradients: of parameters.
        activations: of micro-batches between their forward and backward.
        passing: what a forward or a backward takes for the moment.
        others: what was received, sent or gathered, copies for sums, and what losses hold.
    """

    fixed: float
    gradients: float
    activations: float
    passing: float
    others: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.fixed + self.gradients + self.activations + self.passing + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An instruction, the most that is held while it runs, and the bytes held from then on."""

    position: int
    during: Held
    after_bytes: float


class HeldBytes:
    """What the ranks of a program hold.

    Args:
        costs: of the program.

    Attributes:
        knows_passing: whether the profile has what forwards and backwards take for the moment.
    """

    def __init__(self, costs: ProgramCosts) -> None:
        self.costs = costs
        self.stages = BytesOfStages(costs)
        self.knows_passing = self.stages.knows_passing
        self.gradients_back: defaultdict[int, list[int]] = defaultdict(list)
        for edge in costs.program.edges:
            if edge.carries_gradient:
                self.gradients_back[edge.consumer].append(edge.index)
        draws = min(MOST_DRAWS, default_draws(costs.program))
        batches = first_batches(costs, number=draws)
        self._found: dict[int, tuple[Held, Works]] = {}
        self._works: list[Works] = [running_works(batch) for batch in batches] or [{}]

    def moments(self, rank: int) -> Iterator[Moment]:
        """What every instruction of a rank does to what it holds, in program order."""
        return _Walk(self, rank, self._most(rank)[1]).moments()

    def peak(self, rank: int) -> Held:
        """What a rank holds when it holds most; its fixed bytes where it does nothing."""
        return self._most(rank)[0]

    def _most(self, rank: int) -> tuple[Held, Works]:
        """The peak, and the batch that has it."""
        if rank not in self._found:
            self._found[rank] = self._drawn(rank)
        return self._found[rank]

    def _drawn(self, rank: int) -> tuple[Held, Works]:
        stages = self.costs.program.stages_of(rank)
        found: list[tuple[Held, Works]] = []
        for works in self._works:
            walk = _Walk(self, rank, works)
            start = walk.now()
            peak = max((m.during for m in walk.moments()), key=_total, default=start)
            found.append((peak, works))
            if not any((stage.task, stage.module) in works for stage in stages):
                break
        return max(found, key=lambda item: item[0].total)

    def peaks(self) -> list[Held]:
        """The same of every rank."""
        return [self.peak(rank) for rank in range(self.costs.program.num_ranks)]

    def over_time(self, simulation: Simulation, rank: int) -> list[tuple[float, float]]:
        """(second, bytes held from then on) of a rank, from 0 to the step's end."""
        start_s, end_s = simulation.clocks.start[rank], simulation.clocks.end[rank]
        walk = _Walk(self, rank, self._most(rank)[1])
        points = [(0.0, walk.now().total)]
        row = self.costs.program.instructions[rank]
        for moment in walk.moments():
            begins_s, item = start_s[moment.position], row[moment.position]
            # Messages and gathers go on while what comes after them runs.
            is_posted = isinstance(item, Message) or item.op is Op.SYNC_START
            ends_s = begins_s if is_posted else end_s[moment.position]
            points += [(begins_s, moment.during.total), (ends_s, moment.after_bytes)]
        return points


class _Walk:
    """One rank's way through its program, with what it holds on the way."""

    def __init__(self, of: HeldBytes, rank: int, works: Works) -> None:
        self._of, self._costs, self._bytes = of, of.costs, of.stages
        self._program = of.costs.program
        self._row = self._program.instructions[rank]
        self._works = works
        self._gradient_of = self._costs.gradient_bytes(rank)
        self._replica = {s.index: s.place(rank)[0] for s in self._program.stages_of(rank)}
        computes = ((k, x) for k, x in enumerate(self._row) if isinstance(x, Compute))
        # A micro-batch's activations go with the last of its computes.
        self._last = {(item.stage, item.mb): position for position, item in computes}
        self._sent = {
            (item.stage, item.mb)
            for item in self._row
            if isinstance(item, Message)
            and item.op is Op.SEND_F
            and not self._program.edges[item.edge].carries_gradient
        }
        each = self._costs.communicator_bytes
        shared = each * self._costs.communicators(rank) if each else 0.0
        static = self._costs.static_bytes(rank) - sum(self._gradient_of.values())
        self._fixed = static + shared
        self._gradients = self._activations = self._others = 0.0
        self._made: set[tuple[str, int]] = set()
        self._received: defaultdict[MicroBatch, float] = defaultdict(float)
        self._returned: defaultdict[MicroBatch, float] = defaultdict(float)
        # Outputs that wait for their syncs: how many, and their bytes.
        self._waiting: dict[MicroBatch, tuple[int, float]] = {}
        self._gathered: defaultdict[tuple[int, int], float] = defaultdict(float)

    def now(
        self,
        *,
        passing: float = 0.0,
        others: float = 0.0,
        gone: float = 0.0,
        come: float = 0.0,
    ) -> Held:
        """What is held, with more for the moment, activations gone and gradients come."""
        return Held(
            fixed=self._fixed,
            gradients=self._gradients + come,
            activations=self._activations - gone,
            passing=passing,
            others=self._others + others,
        )

    def moments(self) -> Iterator[Moment]:
        """What every instruction does, in program order."""
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
                self._gradients = self._others = 0.0
            after = self._fixed + self._gradients + self._activations + self._others
            yield Moment(position=position, during=during, after_bytes=after)

    # --- computes ----------------------------------------------------------------------

    def _compute(self, position: int, item: Compute) -> Held:
        stage = self._program.stages[item.stage]
        start, stop = stage.microbatches[self._replica[stage.index]][item.mb]
        sums = self._works.get((stage.task, stage.module))
        # Sums of the same works differ in their last digits; an empty one may be below nothing.
        worth = stop - start if sums is None else max(round(sums[stop] - sums[start], 9), 0.0)
        found = self._bytes.of(stage, stop - start, worth)
        if item.op is Op.FORWARD:
            self._activations += sum(found.activations)
            self._others += found.losses
            during = self.now(passing=found.forward)
        else:
            during = self._backward(stage, item, found)
        if item.is_backward:
            self._give_gradient(stage, stop - start)
        if self._last[item.stage, item.mb] == position:
            self._release(stage, item.mb, found)
        return during

    def _backward(self, stage: Stage, item: Compute, found: StageBytes) -> Held:
        """The most while activations go and gradients come, from the last block to the first.

        An ``I`` makes no gradients of weights, and what it leaves waits for its ``W``.
        """
        if item.is_backward:
            self._take_gradient(item)
        most = self.now(passing=found.backward)
        if item.op is Op.INPUT:
            return most
        new = self._new_gradients(stage)
        gone = come = 0.0
        for block in range(stage.blocks[1] - 1, found.first - 1, -1):
            within = self.now(passing=found.backward, gone=gone, come=come)
            most = max(most, within, key=_total)
            gone += found.activations[block - found.first]
            come += new.get(block, 0.0)
        self._gradients += sum(new.values())
        return max(most, self.now(gone=gone), key=_total)

    def _new_gradients(self, stage: Stage) -> dict[int, float]:
        """Block to the bytes of its gradient, of those that had none yet."""
        new: dict[int, float] = {}
        for first, end in stage.trainable:
            for block in range(max(first, stage.blocks[0]), min(end, stage.blocks[1])):
                key = stage.owner, block
                if key not in self._made:
                    self._made.add(key)
                    new[block] = self._gradient_of.get(key, 0.0)
        return new

    def _release(self, stage: Stage, mb: int, found: StageBytes) -> None:
        """A micro-batch's last compute is over; its output may be kept for others."""
        key = stage.index, mb
        self._activations -= sum(found.activations)
        self._others -= found.losses + self._received.pop(key, 0.0)
        if key in self._sent:
            self._others += found.output
        elif not stage.has_backward and stage.syncs:
            self._waiting[key] = self._num_syncs(stage, mb), found.output
            self._others += found.output

    def _num_syncs(self, stage: Stage, mb: int) -> int:
        """Sync batches, of all losses, that take samples of a micro-batch."""
        span = stage.microbatches[self._replica[stage.index]][mb]
        return sum(len(self._program.cross_sample(i).batches_of(span)) for i in stage.syncs)

    # --- between ranks -----------------------------------------------------------------

    def _message(self, item: Message) -> Held:
        if not item.is_send:
            edge = self._program.edges[item.edge]
            size = self._costs.edge_bytes(edge, item.stop - item.start)
            kind = self._received if item.op is Op.RECV_F else self._returned
            kind[item.stage, item.mb] += size
            self._others += size
        return self.now()

    def _take_gradient(self, item: Compute) -> None:
        """An output's gradient is counted with what a backward takes for the moment, if known."""
        size = self._returned.pop((item.stage, item.mb), 0.0)
        if self._of.knows_passing:
            self._others -= size
        else:
            self._received[item.stage, item.mb] += size

    def _give_gradient(self, stage: Stage, samples: int) -> None:
        """The gradient of what was received is sent, and kept until the step's end."""
        for index in self._of.gradients_back[stage.index]:
            self._others += self._costs.edge_bytes(self._program.edges[index], samples)

    def _sync(self, item: Sync) -> Held:
        loss = self._program.cross_sample(item.loss)
        features, held = self._bytes.sync_bytes(loss)
        key = item.loss, item.batch
        if item.op is Op.SYNC_START:
            # What this rank gives, and what it gets.
            self._gathered[key] = features * (1 + 1 / len(loss.ranks))
            self._others += self._gathered[key]
            return self.now()
        # All features in the order of samples, their gradients, and the loss.
        during = self.now(others=2 * features + held)
        self._others -= self._gathered.pop(key, 0.0)
        self._synced(item.loss, loss.samples(item.batch))
        return during

    def _synced(self, loss: int, samples: tuple[int, int]) -> None:
        """Outputs whose last sync is over are kept no longer."""
        for (index, mb), (left, size) in list(self._waiting.items()):
            stage = self._program.stages[index]
            span = stage.microbatches[self._replica[index]][mb]
            if loss not in stage.syncs or intersect(span, samples) is None:
                continue
            self._waiting[index, mb] = left - 1, size
            if left == 1:
                del self._waiting[index, mb]
                self._others -= size

    def _collective(self, item: Collective) -> Held:
        if item.op is not Op.REDUCE:
            return self.now()
        reduction = self._program.reductions[item.index]
        size = self._costs.reduced_bytes(reduction)
        bucket = min(size, BUCKET_BYTES)
        if not self._costs.costs.training.zero or len(reduction.ranks) == 1:
            return self.now(others=bucket)
        # This rank's slice of the sum is there before the gradients go; gloo copies what it sums.
        own = size / len(reduction.ranks)
        copies = 2 if self._costs.costs.cluster.device.is_cpu else 1
        during = self.now(others=own + bucket * copies)
        self._gradients -= size - own
        return during


def _total(held: Held) -> float:
    return held.total


def least_memory_bytes(plan: Plan, costs: CostModel, drawn: Outline | None = None) -> float:
    """Bytes that some device holds at least: its fixed ones, and the most of one of its stages.

    Exact where devices run one stage each and backwards are whole. Takes a fraction of what
    simulating takes; an outline that is there already is used.
    """
    drawn = outline(plan) if drawn is None else drawn
    graph = drawn.graph
    program = Program(
        name=plan.name,
        batches={name: task.batch for name, task in plan.tasks.items()},
        stages=tuple(graph.stages),
        edges=tuple(graph.edges),
        losses=tuple(graph.losses),
        reductions=tuple(graph.reductions),
        instructions=tuple(() for _ in range(plan.devices)),
    )
    found = ProgramCosts(program, costs, plan)
    kept = drawn.enough.stages
    fixed = {rank: found.static_bytes(rank) for rank in _first_ranks(kept)}
    before = drawn.orders.forwards_before
    return max(
        fixed[ranks[0]]
        + _held_bytes(graph.stages[stage.index], spans, before[stage.index][d], found)
        for stage in kept
        for d, (ranks, spans) in enumerate(zip(stage.ranks, stage.microbatches, strict=True))
    )


def _first_ranks(stages: Sequence[Stage]) -> set[int]:
    return {group[0] for stage in stages for group in stage.ranks}


def _held_bytes(
    stage: Stage, spans: Sequence[SampleRange], before: Sequence[int], costs: ProgramCosts
) -> float:
    """Most bytes of micro-batches between forward and backward; ``before`` as in ``Orders``."""
    if not stage.has_backward:
        return 0.0
    sizes = (stop - start for start, stop in spans)
    upto = list(accumulate((costs.activation_bytes(stage, n) for n in sizes), initial=0.0))
    return max((upto[count] - upto[m] for m, count in enumerate(before)), default=0.0)
