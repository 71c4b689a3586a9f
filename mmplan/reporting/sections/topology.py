"""The plan on the cluster: nodes, their devices, the units on each, and the traffic between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmplan.costs.program_costs import ProgramCosts
from mmplan.program.instructions import Message, Op
from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup
from mmplan.reporting.source import ReportData
from mmplan.schema.plan import Plan, Unit
from mmplan.simulation.step import Simulation
from mmplan.wording import counted

# Colours that the style has for units.
NUM_COLOURS = 7
# Above this many devices cells have letters instead of names.
_DETAILED_DEVICES = 64
# No more devices are drawn.
_MOST_DEVICES = 1024
# CSS pixels.
_PAGE_WIDTH = 1100.0
# CSS pixels around nodes and their devices.
_MARGIN = 10.0
# Rows of the table of traffic.
_MOST_ROWS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assignment:
    """A device's position in one unit.

    Attributes:
        is_complete: the unit has all blocks of its module.
    """

    unit: Unit
    is_complete: bool
    index: int
    replica: int
    stage: int
    tp_index: int

    @property
    def lines(self) -> tuple[str, str]:
        """Name and position, as a cell shows them."""
        parts = [f"replica {self.replica + 1}/{self.unit.dp}"] if self.unit.dp > 1 else []
        if self.unit.pp > 1:
            parts.append(f"stage {self.stage + 1}/{self.unit.pp}")
        if self.unit.tp > 1:
            parts.append(f"tp {self.tp_index}")
        blocks = "whole module" if self.is_complete else f"blocks {self._blocks}"
        return self.unit.name, " · ".join(parts) or blocks

    @property
    def _blocks(self) -> str:
        return f"[{self.unit.blocks[0][0]}, {self.unit.blocks[-1][1]})"

    @property
    def sentence(self) -> str:
        """Name and position in words."""
        blocks = "" if self.is_complete else f" (blocks {self._blocks})"
        return (
            f"{self.unit.name}{blocks}, replica {self.replica + 1} of {self.unit.dp}, "
            f"stage {self.stage + 1} of {self.unit.pp}, tp index {self.tp_index} of {self.unit.tp}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A node that is drawn, for itself and those ``alike``; ``ranks`` are its own."""

    alike: tuple[int, ...]
    ranks: range

    @property
    def name(self) -> str:
        return f"{'nodes' if len(self.alike) > 1 else 'node'} {fmt.ranks(self.alike)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Sizes in CSS pixels; columns are devices per row of a node."""

    cell_width: float
    cell_height: float
    columns: int
    rows: int

    @property
    def node_width(self) -> float:
        return self.columns * self.cell_width + 2 * _MARGIN

    @property
    def node_height(self) -> float:
        return self.rows * self.cell_height + 2 * _MARGIN + 18


def unit_letter(index: int) -> str:
    """A short name for the unit at a position of the plan: A, B, ..., A1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def unit_colour(index: int) -> str:
    """CSS class that fills with the unit's colour."""
    return f"u{index % NUM_COLOURS}"


def topology_section(data: ReportData) -> str:
    """The drawing of nodes and devices, and the table of messages."""
    return topology_picture(data.plan) + traffic_table(data)


def topology_picture(plan: Plan) -> str:
    """The units of every device, node by node."""
    assignments = _assignments(plan)
    nodes = _nodes(plan, assignments)
    shown = nodes[: max(1, _MOST_DEVICES // plan.cluster.devices_per_node)]
    drawn = _drawing(plan, assignments, shown)
    caption = markup.esc(_links(plan))
    if any(len(node.alike) > 1 for node in nodes):
        caption += " Of nodes whose devices hold the same stages one is drawn."
    if len(shown) < len(nodes):
        caption += markup.esc(f" The first {len(shown):,} of {len(nodes):,} nodes are drawn.")
    figure = markup.figure(drawn, label="Plan on the cluster, device by device", caption=caption)
    return _unit_legend(plan, assignments) + figure


def _assignments(plan: Plan) -> dict[int, list[_Assignment]]:
    assignments: defaultdict[int, list[_Assignment]] = defaultdict(list)
    for index, unit in enumerate(plan.units):
        blocks = plan.tasks[unit.task].modules[unit.module].blocks
        is_complete = sum(b - a for a, b in unit.blocks) == blocks
        for d, p, group in unit.grid.groups():
            for t, rank in enumerate(group):
                assignments[rank].append(
                    _Assignment(
                        unit=unit,
                        is_complete=is_complete,
                        index=index,
                        replica=d,
                        stage=p,
                        tp_index=t,
                    )
                )
    return assignments


def _unit_legend(plan: Plan, assignments: dict[int, list[_Assignment]]) -> str:
    compact = plan.devices > _DETAILED_DEVICES
    entries = [
        (
            markup.text("span", unit_letter(i) if compact else "", class_=f"key {unit_colour(i)}"),
            unit.name,
        )
        for i, unit in enumerate(plan.units)
    ]
    if any(rank not in assignments for rank in range(plan.devices)):
        entries.append((markup.text("span", "", class_="key idle"), "idle"))
    return markup.legend(entries)


def _links(plan: Plan) -> str:
    cluster = plan.cluster
    inside, between = cluster.links.intra_node, cluster.links.inter_node
    text = (
        f"Cluster {cluster.name}, {cluster.device.name}, "
        f"{fmt.size(cluster.device.memory_bytes)} a device. Inside a node: "
        f"{fmt.size(inside.bandwidth_bytes_per_s)}/s after {fmt.seconds(inside.latency_s)}."
    )
    if cluster.nodes > 1 and between:
        adapter = cluster.links.adapter_bytes_per_s
        own = f", {fmt.size(adapter)}/s a device," if adapter else ""
        text += (
            f" Between nodes: {fmt.size(between.bandwidth_bytes_per_s)}/s a node{own} after "
            f"{fmt.seconds(between.latency_s)}."
        )
    return text


def _nodes(plan: Plan, assignments: dict[int, list[_Assignment]]) -> list[_Node]:
    """The nodes to draw, in order: each, or on a large cluster one of those that hold the same."""
    per_node, alike = plan.cluster.devices_per_node, defaultdict[object, list[int]](list)
    ranks = [
        range(start, min(start + per_node, plan.devices))
        for start in range(0, plan.devices, per_node)
    ]
    for number, node in enumerate(ranks):
        held = tuple(tuple((a.index, a.stage) for a in assignments.get(rank, [])) for rank in node)
        alike[held if plan.devices > _DETAILED_DEVICES else number].append(number)
    return [_Node(alike=tuple(same), ranks=ranks[same[0]]) for same in alike.values()]


def _drawing(plan: Plan, assignments: dict[int, list[_Assignment]], nodes: Sequence[_Node]) -> str:
    layout = _layout(plan, assignments, max(len(node.ranks) for node in nodes))
    across = max(1, int((_PAGE_WIDTH + _MARGIN) // (layout.node_width + _MARGIN)))
    drawn: list[str] = []
    for i, node in enumerate(nodes):
        x = (i % across) * (layout.node_width + _MARGIN) + 1
        y = (i // across) * (layout.node_height + _MARGIN) + 1
        drawn.append(_node(plan, assignments, layout, node, x, y))
    num_rows = -(-len(nodes) // across)
    return markup.svg(
        _HATCH + "".join(drawn),
        width=min(across, len(nodes)) * (layout.node_width + _MARGIN),
        height=num_rows * (layout.node_height + _MARGIN),
        label=f"{counted(sum(len(node.alike) for node in nodes), 'node')} with "
        f"{counted(sum(len(node.alike) * len(node.ranks) for node in nodes), 'device')}; "
        "the table of units says the same",
        class_="topology",
    )


_HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="7" height="7" class="hatch-ground"/>'
    '<rect width="2" height="7" class="hatch-line"/></pattern></defs>'
)


def _layout(plan: Plan, assignments: dict[int, list[_Assignment]], most_on_node: int) -> _Layout:
    most_units = max(map(len, assignments.values()))
    if plan.devices > _DETAILED_DEVICES:
        columns = min(most_on_node, 16)
        width, height = 30.0, 17 + 15 * min(most_units, 4)
    else:
        columns = min(most_on_node, 7 if most_on_node % 7 == 0 else 8 if most_on_node > 6 else 6)
        longest = max(len(line) for row in assignments.values() for a in row for line in a.lines)
        widest = (_PAGE_WIDTH - 2 * _MARGIN) / columns
        width = max(96.0, min(widest, 7.0 * longest + 26, 190.0))
        height = 26 + 38 * min(most_units, 6)
    rows = -(-most_on_node // columns)
    return _Layout(cell_width=width, cell_height=height, columns=columns, rows=rows)


def _node(
    plan: Plan,
    assignments: dict[int, list[_Assignment]],
    layout: _Layout,
    node: _Node,
    x: float,
    y: float,
) -> str:
    kind = "processes of one machine" if plan.cluster.device.is_cpu else "devices"
    drawn = [
        markup.element(
            "rect", width=layout.node_width, height=layout.node_height, rx=8, class_="node"
        ),
        markup.text("title", node.name),
        markup.text(
            "text",
            fmt.shortened(f"{node.name}: {len(node.ranks)} {kind}", int(layout.node_width / 7)),
            x=_MARGIN,
            y=18,
            class_="small",
        ),
    ]
    detailed = plan.devices <= _DETAILED_DEVICES
    for i, rank in enumerate(node.ranks):
        left = _MARGIN + (i % layout.columns) * layout.cell_width
        top = _MARGIN + 16 + (i // layout.columns) * layout.cell_height
        cell = _cell(rank, assignments.get(rank, []), layout, detailed=detailed)
        drawn.append(markup.element("g", cell, transform=f"translate({left:g} {top:g})"))
    return markup.element("g", "".join(drawn), transform=f"translate({x:g} {y:g})")


def _cell(rank: int, assignments: Sequence[_Assignment], layout: _Layout, *, detailed: bool) -> str:
    width, height = layout.cell_width - 4, layout.cell_height - 4
    sentence = "; ".join(assignment.sentence for assignment in assignments) or "idle: in no unit"
    ground = "device" if assignments else "device unused"
    drawn = [
        markup.text("title", f"rank {rank}: {sentence}"),
        markup.element("rect", width=f"{width:g}", height=f"{height:g}", rx=4, class_=ground),
        markup.text(
            "text",
            f"rank {rank}" if detailed else rank,
            x=6 if detailed else 4,
            y=15 if detailed else 10,
            class_="small" if detailed else "tiny dim",
        ),
    ]
    if not assignments:
        x, kind = (6, "small") if detailed else (4, "tiny")
        drawn.append(markup.text("text", "idle", x=x, y=f"{height - 5:g}", class_=kind))
    most = 6 if detailed else 4
    draw = _unit_label if detailed else _unit_letter_label
    drawn += [draw(assignment, i, width) for i, assignment in enumerate(assignments[:most])]
    if len(assignments) > most:
        more = f"+{len(assignments) - most}"
        drawn.append(markup.text("text", more, x=width - 22, y=10, class_="small"))
    return "".join(drawn)


def _unit_label(assignment: _Assignment, index: int, width: float) -> str:
    top = 20 + 38 * index
    name, position = assignment.lines
    most = int((width - 16) / 6.6)
    return (
        markup.element(
            "rect",
            x=3,
            y=top,
            width=f"{width - 6:g}",
            height=35,
            rx=3,
            class_=unit_colour(assignment.index),
        )
        + markup.text("text", fmt.shortened(name, most), x=8, y=top + 15, class_="on-colour strong")
        + markup.text(
            "text", fmt.shortened(position, most + 2), x=8, y=top + 29, class_="on-colour tiny"
        )
    )


def _unit_letter_label(assignment: _Assignment, index: int, width: float) -> str:
    top = 13 + 15 * index
    short = unit_letter(assignment.index)
    short += str(assignment.stage + 1) if assignment.unit.pp > 1 else ""
    return markup.element(
        "rect",
        x=2,
        y=top,
        width=f"{width - 4:g}",
        height=13,
        rx=2,
        class_=unit_colour(assignment.index),
    ) + markup.text("text", short, x=5, y=top + 10, class_="on-colour tiny")


# Content of the messages, bytes inside nodes, bytes between nodes.
TrafficRow = tuple[str, float, float]


def traffic_table(data: ReportData) -> str:
    """Bytes inside nodes and between them; nothing where the plan cannot be simulated."""
    simulation = data.simulation
    if simulation is None:
        return ""
    kinds = _messages, _gathers, _reductions
    traffic = (row for kind in kinds for row in kind(simulation, simulation.costs))
    rows = sorted(traffic, key=lambda row: -row[1] - row[2])
    if not rows:
        return markup.note("Nothing travels between devices.")
    more = len(rows) - _MOST_ROWS
    grid = markup.table(
        ("what", ">inside nodes", ">between nodes"),
        [(what, *map(_size, sizes)) for what, *sizes in rows[:_MOST_ROWS]],
        label="Bytes that travel in a step",
    )
    note = markup.note(f"{more} lesser ones are left out.") if more > 0 else ""
    return markup.text("h3", "What travels in a step") + grid + note


def _size(value: float) -> str:
    return fmt.size(value) if value else "–"


def _messages(simulation: Simulation, costs: ProgramCosts) -> Iterator[TrafficRow]:
    """Activations and gradients, from unit to unit, both directions in one row."""
    program, node_of = simulation.program, costs.costs.cluster.node_of
    inside: defaultdict[tuple[int, bool], int] = defaultdict(int)
    between: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for rank, row in enumerate(program.instructions):
        for item in row:
            if isinstance(item, Message) and item.is_send and item.peer != rank:
                counts = inside if node_of(rank) == node_of(item.peer) else between
                counts[item.edge, item.op is Op.SEND_B] += item.stop - item.start
    rows: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for edge in program.edges:
        ends = program.stages[edge.producer].unit, program.stages[edge.consumer].unit
        name = f"{ends[0]}, from stage to stage" if edge.internal else " to ".join(ends)
        for i, counts in enumerate((inside, between)):
            for backward in (False, True):
                size = costs.message_bytes(edge, counts[edge.index, backward], backward)
                rows[name][i] += size
                # Ranks of a TP group gather the shares of the others, inside their node.
                rows[name][0] += size * (program.shares(edge, backward=backward) - 1)
    yield from ((name, sent[0], sent[1]) for name, sent in rows.items() if any(sent))


def _gathers(simulation: Simulation, costs: ProgramCosts) -> Iterator[TrafficRow]:
    """Features that the ranks of a cross-sample loss gather."""
    node_of = costs.costs.cluster.node_of
    for loss in simulation.program.cross_sample_losses:
        if len(loss.ranks) > 1:
            samples = simulation.program.batches[loss.task]
            size = samples * costs.gathered_bytes(loss)
            spread = len({node_of(rank) for rank in loss.ranks}) > 1
            inside, between = (0.0, size) if spread else (size, 0.0)
            yield f"features for {loss.name}, gathered", inside, between


def _reductions(simulation: Simulation, costs: ProgramCosts) -> Iterator[TrafficRow]:
    """Gradients of each module, over all ranks that contribute to their reductions."""
    node_of = costs.costs.cluster.node_of
    rows: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for item in simulation.program.reductions:
        if len(item.ranks) > 1:
            spread = len({node_of(rank) for rank in item.ranks}) > 1
            size = costs.reduced_bytes(item) * len(item.ranks)
            rows[f"gradients of {item.owner}, summed"][spread] += size
    yield from (
        (name, inside, between) for name, (inside, between) in rows.items() if inside + between
    )
