"""Simulate a program: clocks and bytes of every rank for one optimizer step.

The instructions are those that the launcher executes; the cost model replaces torch. Times are
those of forward, backward, communication and losses, without the optimizer's update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from mmplan.costs.program_costs import ProgramCosts
from mmplan.errors import InvalidInputError
from mmplan.processes import rare_collections
from mmplan.program.clocks import Clocks, Durations, Parts, Shared, replay
from mmplan.program.dependencies import Dependencies, find_dependencies
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Step, Sync
from mmplan.program.model import Program
from mmplan.program.reduction_starts import rounds_of, starting_stages
from mmplan.program.sent_messages import MessagesUnderWay
from mmplan.program.trace import TimedInstruction
from mmplan.schema.plan import Plan, Prediction

# Of messages that take as long: source, target, edge, samples, and whether they go back.
_Kind = tuple[int, int, int, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One simulated step; per-rank values have one entry per rank, idle ranks included.

    For a rank that is used, ``busy_s + communication_s + idle_s == iteration_s``.

    Attributes:
        busy_s: in computes and losses.
        communication_s: in reductions that nothing hides, or waiting for data in flight.
        idle_s: waiting for other ranks to start something.
        used: whether the rank computes at all.
        peak_bytes: most bytes held at any time.
        samples: of the step, over all tasks.
        flops: useful work of the step.
    """

    program: Program = field(repr=False)
    costs: ProgramCosts = field(repr=False)
    clocks: Clocks = field(repr=False)
    iteration_s: float
    busy_s: tuple[float, ...]
    communication_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    used: tuple[bool, ...]
    peak_bytes: tuple[float, ...]
    samples: int
    flops: float

    @property
    def devices_used(self) -> int:
        """Ranks that compute something."""
        return sum(self.used)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the device time of the ranks used."""
        return self._share(self.idle_s)

    @property
    def communication_fraction(self) -> float:
        """Share of the device time of the ranks used in which communication is not hidden."""
        return self._share(self.communication_s)

    @property
    def samples_per_s(self) -> float:
        """Throughput; 0 for a step that takes no time."""
        return self.samples / self.iteration_s if self.iteration_s else 0.0

    def _share(self, seconds: tuple[float, ...]) -> float:
        total = self.devices_used * self.iteration_s
        return sum(seconds) / total if total else 0.0

    def events(self) -> Iterator[TimedInstruction]:
        """Every instruction but STEP with its times, rank by rank in program order."""
        for rank in range(self.program.num_ranks):
            yield from self.events_of(rank)

    def events_of(self, rank: int) -> Iterator[TimedInstruction]:
        """Every instruction of a rank but STEP with its times, in program order."""
        row = self.program.instructions[rank]
        times = zip(row, self.clocks.start[rank], self.clocks.end[rank], strict=True)
        for position, (item, start_s, end_s) in enumerate(times):
            if not isinstance(item, Step):
                yield TimedInstruction(rank, position, start_s, end_s)


@rare_collections()
def simulate(
    program: Program,
    costs: ProgramCosts,
    *,
    contention: bool = True,
    held: tuple[float, ...] | None = None,
) -> Simulation:
    """Run one step of a program that has no faults.

    A send returns at once and its message arrives ``message_s`` later; the messages from
    one rank to another go one after the other. A compute waits for its messages.
    SYNC_START returns at once; the gather begins when the loss's last rank has started and
    the loss's gather before it is over, and SYNC_WAIT ends when it is over, every rank is
    there and the loss is computed. Tensor-parallel computes, COUNT and REDUCE begin when
    their last rank is there. A reduction with a REDUCE_START is carried inside the compute after
    it, as its gradients come, and REDUCE ends when it is over; computes beside it are slower
    (:mod:`mmplan.program.clocks`). Transfers between nodes that overlap in time share the
    bandwidth of the nodes that they have in common (:mod:`mmplan.program.network`).

    Args:
        program: to run.
        costs: of its instructions.
        contention: False gives every transfer the network to itself, to see the cost of
            sharing it.
        held: :func:`peak_bytes`, where they are known.

    Raises:
        InvalidInputError: the program deadlocks.
    """
    dependencies = find_dependencies(program)
    durations = durations_of(program, costs, dependencies, contention=contention)
    clocks = replay(dependencies, durations)
    if clocks.stuck:
        rank, position = min(clocks.stuck.items())
        raise InvalidInputError(
            f"the program deadlocks: rank {rank} waits for ever at instruction {position} "
            f"({program.instructions[rank][position]})",
            hint="mmplan check PLAN lists every fault; solve the workload again",
        )
    iteration_s = max((row[-1] for row in clocks.end if row), default=0.0)
    ranks = range(program.num_ranks)
    busy = tuple(
        _seconds(program, durations, rank, (Compute, Sync)) + clocks.slowed[rank] for rank in ranks
    )
    communication = tuple(
        clocks.exposed[rank] + _seconds(program, durations, rank, (Collective,)) for rank in ranks
    )
    used = tuple(any(isinstance(x, Compute) for x in row) for row in program.instructions)
    return Simulation(
        program=program,
        costs=costs,
        clocks=clocks,
        iteration_s=iteration_s,
        busy_s=busy,
        communication_s=communication,
        # Rounding may leave a few ulps below zero.
        idle_s=tuple(
            max(0.0, iteration_s - b - c) if u else 0.0
            for b, c, u in zip(busy, communication, used, strict=True)
        ),
        used=used,
        peak_bytes=peak_bytes(program, costs) if held is None else held,
        samples=sum(program.batches.values()),
        flops=costs.flops(),
    )


def prediction(simulation: Simulation, plan: Plan) -> Prediction:
    """The plan's ``predicted`` record; ``mfu`` counts all of its devices, idle ones too."""
    peak_flops = plan.devices * plan.cluster.device.peak_flops
    iteration_s = simulation.iteration_s
    return Prediction(
        iteration_s=iteration_s,
        samples_per_s=simulation.samples_per_s,
        mfu=simulation.flops / iteration_s / peak_flops if iteration_s else 0.0,
        bubble_fraction=simulation.bubble_fraction,
        communication_fraction=simulation.communication_fraction,
        memory_bytes=simulation.peak_bytes,
        devices_used=simulation.devices_used,
    )


def durations_of(
    program: Program, costs: ProgramCosts, dependencies: Dependencies, *, contention: bool = True
) -> Durations:
    """Seconds of every instruction, message and gather of a program."""
    started = [_parts(program, costs, item) for item in dependencies.started]
    kinds, places = _kinds_of_messages(dependencies)
    seconds = [
        costs.message_s(source, target, program.edges[edge], samples, backward)
        for source, target, edge, samples, backward in kinds
    ]
    shared = _shared(program, costs, dependencies, started, kinds, places) if contention else None
    return Durations(
        instruction=_instruction_seconds(program, costs, set(dependencies.reduction)),
        message=list(map(seconds.__getitem__, places)),
        started=started,
        slowdown=costs.compute_slowdown,
        shared=shared,
    )


def _parts(program: Program, costs: ProgramCosts, item: Sync | Collective) -> Parts:
    """The parts of a collective that starts before its ranks wait for it."""
    if isinstance(item, Sync):
        return [(1.0, costs.gather_s(program.cross_sample(item.loss)))]
    reduction = program.reductions[item.index]
    if item.mb is None:
        return costs.reduce_parts(reduction, starting_stages(program, reduction))
    stage, _ = next(islice(rounds_of(program, reduction), item.mb, None))
    return costs.reduce_parts(reduction, [stage])


def _shared(
    program: Program,
    costs: ProgramCosts,
    dependencies: Dependencies,
    started: Sequence[Parts],
    kinds: Mapping[_Kind, int],
    places: Sequence[int],
) -> Shared | None:
    """The use of nodes' interfaces, if two transfers can use one at the same time."""
    messages = [
        costs.message_traffic(source, target, program.edges[edge], samples, backward)
        for source, target, edge, samples, backward in kinds
    ]
    gathers = {loss.index: costs.gather_traffic(loss) for loss in program.cross_sample_losses}
    shared = Shared(
        message=list(map(messages.__getitem__, places)),
        started=[
            gathers[item.loss]
            if isinstance(item, Sync)
            else costs.reduce_traffic(program.reductions[item.index], len(parts))
            for item, parts in zip(dependencies.started, started, strict=True)
        ],
        group=[
            None if index < 0 else costs.reduce_traffic(program.reductions[index])
            for index in dependencies.reduction
        ],
    )
    users: dict[int, tuple[str, object]] = {}
    # Messages of one pair, gathers of one loss and reductions of the same ranks never overlap.
    users_of = (
        (("message", link) for link in kinds.values()),
        (
            ("gather", item.loss)
            if isinstance(item, Sync)
            else ("reduction", program.reductions[item.index].communicator)
            for item in dependencies.started
        ),
        (
            ("reduction", program.reductions[i].communicator if i >= 0 else -1)
            for i in dependencies.reduction
        ),
    )
    for transfers, names in zip((messages, shared.started, shared.group), users_of, strict=True):
        for traffic, user in zip(transfers, names, strict=True):
            for interface, load in traffic.loads if traffic is not None else ():
                if load > 1 or users.setdefault(interface, user) != user:
                    return shared
    return None


def _instruction_seconds(
    program: Program, costs: ProgramCosts, reduced: Collection[int]
) -> list[list[float]]:
    """Seconds of computes, losses and some reductions; zero for the rest."""
    known: dict[tuple[int, Op, int], float] = {}
    loss_s = {
        loss.index: costs.sync_s(loss) - costs.gather_s(loss)
        for loss in program.cross_sample_losses
    }
    reduce_s = {i: costs.reduce_s(r) for i, r in enumerate(program.reductions) if i in reduced}

    def seconds(item: Instruction, samples: dict[int, list[int]]) -> float:
        if isinstance(item, Compute):
            key = item.stage, item.op, samples[item.stage][item.mb]
            if key not in known:
                known[key] = costs.compute_s(program.stages[item.stage], item.op, key[2])
            return known[key]
        if isinstance(item, Sync) and item.op is Op.SYNC_WAIT:
            return loss_s[item.loss]
        if isinstance(item, Collective) and item.op is Op.REDUCE:
            return reduce_s.get(item.index, 0.0)
        return 0.0

    rows: list[list[float]] = []
    for rank, row in enumerate(program.instructions):
        samples = _samples(program, rank) if row else {}
        # Most are messages, which have their seconds beside these.
        rows.append([0.0 if isinstance(x, Message) else seconds(x, samples) for x in row])
    return rows


def _kinds_of_messages(dependencies: Dependencies) -> tuple[dict[_Kind, int], list[int]]:
    """The kinds of messages, each with its link, and of every message its place among these."""
    kinds: dict[_Kind, int] = {}
    links: dict[_Kind, int] = {}
    places: list[int] = []
    messages = zip(dependencies.messages, dependencies.link, strict=True)
    for (edge, backward, source, target, start, stop), link in messages:
        key = source, target, edge, stop - start, backward
        place = kinds.get(key)
        if place is None:
            place = kinds[key] = len(kinds)
            links[key] = link
        places.append(place)
    return links, places


def _samples(program: Program, rank: int) -> dict[int, list[int]]:
    """Stage to the sizes of its micro-batches on a rank."""
    return {
        stage.index: [b - a for a, b in stage.microbatches[stage.place(rank)[0]]]
        for stage in program.stages_of(rank)
    }


def _seconds(
    program: Program, durations: Durations, rank: int, kinds: tuple[type[Instruction], ...]
) -> float:
    if not program.instructions[rank]:
        return 0.0
    row = zip(program.instructions[rank], durations.instruction[rank], strict=True)
    return sum(seconds for item, seconds in row if seconds and isinstance(item, kinds))


def peak_bytes(program: Program, costs: ProgramCosts) -> tuple[float, ...]:
    """The planned memory of each rank at its peak, as it stands in a plan's ``memory_bytes``."""
    under_way = MessagesUnderWay(program)

    def active_bytes(rank: int) -> float:
        if not program.instructions[rank]:
            return 0.0
        return max(accumulate(_changes(program, costs, rank, under_way), initial=0.0))

    return tuple(
        costs.static_bytes(rank) + costs.communicator_bytes(rank) + active_bytes(rank)
        for rank in range(program.num_ranks)
    )


def bytes_under_way(
    costs: ProgramCosts, rank: int, under_way: MessagesUnderWay
) -> tuple[dict[int, float], dict[int, float]]:
    """By position, the bytes of messages that are posted there, and let go with its end."""
    posted: dict[int, float] = {}
    let_go: defaultdict[int, float] = defaultdict(float)
    for span in under_way.spans(rank):
        posted[span.first] = num_bytes = costs.kept_bytes(rank, span.message)
        let_go[span.last] += num_bytes
    return posted, let_go


def _changes(
    program: Program, costs: ProgramCosts, rank: int, under_way: MessagesUnderWay
) -> Iterator[float]:
    """The bytes of activations and messages that a rank gains and loses, in program order.

    The forward of a micro-batch allocates activations. The backward frees them, of a split one its
    ``W``; in a stage without backward, the forward itself does. Activations have the inputs that a
    forward takes, but not what is sent.
    """
    samples = _samples(program, rank)
    known: dict[tuple[int, int], float] = {}
    posted, let_go = bytes_under_way(costs, rank, under_way)
    for position, item in enumerate(program.instructions[rank]):
        if position in posted:
            yield posted[position]
        if isinstance(item, Compute):
            stage = program.stages[item.stage]
            key = item.stage, samples[item.stage][item.mb]
            if key not in known:
                known[key] = costs.activation_bytes(stage, key[1])
            if item.op is Op.FORWARD:
                yield known[key]
            if item.op in (Op.BACKWARD, Op.WEIGHT) or not stage.has_backward:
                yield -known[key]
        if position in let_go:
            yield -let_go[position]
