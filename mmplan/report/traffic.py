"""What travels between devices in a step: from unit to unit, features, gradients to be summed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from mmplan.costs import ProgramCosts
from mmplan.program.instructions import Message, Op
from mmplan.report import format as fmt
from mmplan.report import markup
from mmplan.report.source import ReportData
from mmplan.simulate import Simulation

_MOST_ROWS = 30
# What, bytes inside nodes, bytes between nodes.
Row = tuple[str, float, float]


def traffic_table(data: ReportData) -> str:
    """Bytes inside nodes and between them; nothing where the plan cannot be simulated."""
    simulation = data.simulation
    if simulation is None or not isinstance(simulation.costs, ProgramCosts):
        return ""
    kinds = _messages, _gathers, _reductions
    found = [row for kind in kinds for row in kind(simulation, simulation.costs)]
    rows = sorted(found, key=lambda row: -row[1] - row[2])
    if not rows:
        return markup.note("Nothing travels between devices.")
    more = len(rows) - _MOST_ROWS
    grid = markup.table(
        ("what", ">inside nodes", ">between nodes"),
        [(what, *map(_size, sizes)) for what, *sizes in rows[:_MOST_ROWS]],
        label="Bytes that travel in a step",
    )
    return (
        markup.text("h3", "What travels in a step")
        + grid
        + (markup.note(f"{more} lesser ones are left out.") if more > 0 else "")
    )


def _size(value: float) -> str:
    return fmt.size(value) if value else "–"


def _messages(simulation: Simulation, costs: ProgramCosts) -> Iterator[Row]:
    """Activations and gradients, from unit to unit, both directions in one row."""
    program, node_of = simulation.program, costs.costs.cluster.node_of
    inside: defaultdict[tuple[int, bool], int] = defaultdict(int)
    between: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for rank, row in enumerate(program.instructions):
        for item in row:
            if isinstance(item, Message) and item.is_send and item.peer != rank:
                found = inside if node_of(rank) == node_of(item.peer) else between
                found[item.edge, item.op is Op.SEND_B] += item.stop - item.start
    rows: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for edge in program.edges:
        ends = program.stages[edge.producer].unit, program.stages[edge.consumer].unit
        name = f"{ends[0]}, from stage to stage" if edge.internal else " to ".join(ends)
        for i, found in enumerate((inside, between)):
            for backward in (False, True):
                size = costs.message_bytes(edge, found[edge.index, backward], backward)
                rows[name][i] += size
                # A group hands each share on to its other ranks, inside its node.
                rows[name][0] += size * (program.shares(edge, backward=backward) - 1)
    yield from ((name, own[0], own[1]) for name, own in rows.items() if any(own))


def _gathers(simulation: Simulation, costs: ProgramCosts) -> Iterator[Row]:
    """Features that the ranks of a loss across samples get of each other."""
    node_of = costs.costs.cluster.node_of
    for loss in simulation.program.losses:
        if loss.sync_batch is not None and len(loss.ranks) > 1:
            samples = simulation.program.batches[loss.task]
            size = samples * costs.feature_bytes(loss) * (len(loss.ranks) - 1)
            spread = len({node_of(rank) for rank in loss.ranks}) > 1
            yield f"features for {loss.name}, gathered", size * (not spread), size * spread


def _reductions(simulation: Simulation, costs: ProgramCosts) -> Iterator[Row]:
    """Gradients of each module, as much as all ranks bring to their sums."""
    node_of = costs.costs.cluster.node_of
    rows: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for item in simulation.program.reductions:
        if len(item.ranks) > 1:
            spread = len({node_of(rank) for rank in item.ranks}) > 1
            whole = costs.reduced_bytes(item) * len(item.ranks)
            rows[f"gradients of {item.owner}, summed"][spread] += whole
    yield from ((name, own[0], own[1]) for name, own in rows.items() if any(own))
