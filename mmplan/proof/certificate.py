"""Certificates: a plan's program in a form that an independent checker can check.

A certificate is made from representatives of ranks that do the same
(:mod:`mmplan.program.symmetry_classes`), so the rows of the others are never written. It is written
only if the checker (:mod:`mmplan.proof.checker`) accepts it. docs/proof.md has the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.program.clocks import Durations, replay
from mmplan.program.dependencies import find_dependencies
from mmplan.program.folding import FOLDED_FROM
from mmplan.program.instructions import Collective, Compute, Op, Sync
from mmplan.program.lower import lower
from mmplan.program.model import Program
from mmplan.program.symmetry_classes import LoweredPlan
from mmplan.proof.checker import check_certificate, document_sha256, specification
from mmplan.proof.prove import CompiledPlan, compile_classes
from mmplan.proof.rows import RowWriter, describe_graph, hash_graph, hash_row, sum_indices
from mmplan.schema.base import Json, parse_document, parse_text, read_text, write_text
from mmplan.schema.plan import Plan
from mmplan.wording import counted

VERSION = 1


def certificate_path(plan: Path) -> Path:
    """Where the certificate of a plan lies: beside it."""
    return plan.with_name(f"{plan.stem}.proof.json")


def make_certificate(
    plan: Plan, document: Json, workload: Json, compiled: CompiledPlan | None = None
) -> Json:
    """The certificate of a plan without faults.

    Args:
        plan: the plan.
        document: its file, parsed.
        workload: the workload's file, parsed.
        compiled: the plan's program, where it is known.

    Raises:
        RunFailedError: the program's ranks wait for each other.
        InvalidInputError: the plan is folded, whose ranks have no row in common with their
            representatives; or see :func:`mmplan.program.compile.compile_plan`.
    """
    compiled = compile_classes(plan, lower(plan)) if compiled is None else compiled
    if compiled.folded:
        raise InvalidInputError(
            f"a plan of {counted(plan.devices, 'rank')} has no certificate",
            hint=f"certificates are for up to {FOLDED_FROM:,} ranks; mmplan check proves more",
        )
    lowered, program = compiled.lowered, compiled.program
    graph = describe_graph(lowered.graph)
    classes = _Classes(plan, lowered, program)
    graph_sha256 = hash_graph(graph)
    return {
        "version": VERSION,
        "plan_sha256": document_sha256(document),
        "specification": specification(workload, plan.tasks),
        "graph": graph,
        "rows": [
            {"sha256": hash_row(graph_sha256, row), "instructions": row} for row in classes.rows
        ],
        "classes": [
            {"representative": rank, "row": row, "levels": classes.levels(rank)}
            for rank, row in classes.known
        ],
        "ranks": classes.of_rank,
        "images": _images(plan, classes.representative),
    }


def certify(plan_path: Path, workload_path: Path, compiled: CompiledPlan | None = None) -> Json:
    """The certificate of a plan's file, checked.

    Raises:
        InvalidInputError: a file is wrong, or see :func:`make_certificate`.
        RunFailedError: the plan does not train what the workload says.
    """
    document, workload = _read(plan_path), _read(workload_path)
    plan = parse_document(Plan, document, source=str(plan_path))
    # As a reader will find it: tuples are lists, names are texts.
    certificate = json.loads(json.dumps(make_certificate(plan, document, workload, compiled)))
    faults = check_certificate(workload, document, certificate)
    if faults:
        raise RunFailedError(
            f"{plan_path} cannot be proven to train {workload_path}: {first_of(faults)}",
            hint="solve the workload again; mmplan check says more",
        )
    return certificate


def write_certificate(
    plan_path: Path,
    workload_path: Path,
    path: Path | None = None,
    compiled: CompiledPlan | None = None,
) -> Path:
    """Prove a plan and write its certificate, beside it or to another path.

    Raises:
        MMPlanError: see :func:`certify`; or the file cannot be written.
    """
    path = path or certificate_path(plan_path)
    write_text(path, _text(certify(plan_path, workload_path, compiled)))
    return path


def rank_hashes(
    plan_path: Path, workload_path: Path, *, is_own: bool = False
) -> tuple[str | None, ...]:
    """The hash of the row that each rank of a plan must execute; None where it is idle.

    They are from the certificate beside the plan, which must hold, or from a new proof.

    Args:
        plan_path: the plan's file.
        workload_path: its workload's file.
        is_own: the run has made the plan itself. It keeps the proof beside it, and one that lies
            there of an earlier plan is replaced.

    Raises:
        InvalidInputError: there is a certificate, and it proves something else or nothing.
        MMPlanError: see :func:`certify`.
    """
    path = certificate_path(plan_path)
    certificate = _read(path) if path.is_file() else None
    if certificate is not None:
        faults = check_certificate(_read(workload_path), _read(plan_path), certificate)
        if faults and not is_own:
            raise InvalidInputError(
                f"{path} does not prove {plan_path} for {workload_path}: {first_of(faults)}",
                hint=f"mmplan check {plan_path} writes it again, where the plan has no faults",
            )
        certificate = None if faults else certificate
    if certificate is None:
        certificate = certify(plan_path, workload_path)
        if is_own:
            write_text(path, _text(certificate))
    rows, classes = certificate["rows"], certificate["classes"]
    return tuple(
        None if own is None else rows[classes[own]["row"]]["sha256"] for own in certificate["ranks"]
    )


def first_of(faults: Sequence[str]) -> str:
    """The first fault, and how many there are beside it."""
    more = f" (and {counted(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
    return f"{faults[0]}{more}"


def _read(path: Path) -> Json:
    document = parse_text(read_text(path), path)
    if not isinstance(document, dict):
        raise InvalidInputError(f"{path}: is not a mapping of fields", hint="check the path")
    return cast(Json, document)


def _text(certificate: Json) -> str:
    """JSON with one entry of each long list on a line."""
    lines = [_entry(name, value) for name, value in certificate.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _entry(name: str, value: object) -> str:
    if not isinstance(value, list):
        return f"{json.dumps(name)}: {json.dumps(value)}"
    items = cast("list[object]", value)
    if name == "ranks":
        return f"{json.dumps(name)}: {json.dumps(items)}"
    return f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, items)) + "\n]"


def _images(plan: Plan, representative: Mapping[int, int]) -> Json:
    """Of each unit's replicas, the replicas that stand for them."""
    found: Json = {}
    for unit in plan.units:
        replica_of = {replica[0][0]: d for d, replica in enumerate(unit.ranks)}
        found[unit.name] = [replica_of[representative[first]] for first in replica_of]
    return found


class _Classes:
    """The classes of a plan's ranks: those with one representative and one row.

    Attributes:
        rows: canonical ones, each once.
        known: representative and index of the row of each class.
        of_rank: class of each rank; None where it is idle.
        representative: of each rank that works.
    """

    def __init__(self, plan: Plan, lowered: LoweredPlan, program: Program) -> None:
        quotient, self._graph = lowered.quotient, lowered.graph
        sums = sum_indices(lowered.graph.reductions)
        kept = range(len(sums)) if quotient is None else quotient.reductions
        self._writer = RowWriter(program, [sums[index] for index in kept])
        self._whole: dict[int, str] = {}
        self._dependencies = find_dependencies(program)
        ones = Durations(
            instruction=[[1.0] * len(row) for row in program.instructions],
            message=[0.0] * len(self._dependencies.messages),
            started=[[(1.0, 0.0)]] * len(self._dependencies.started),
        )
        self._clocks, self._program = replay(self._dependencies, ones), program
        if self._clocks.stuck:
            raise RunFailedError(
                f"rank {min(self._clocks.stuck)} waits for ever", hint="solve the workload again"
            )
        tp_index = {
            rank: t
            for stage in lowered.graph.stages
            for group in stage.ranks
            for t, rank in enumerate(group)
        }
        self.representative = {
            rank: rank if quotient is None else quotient.representative[rank] for rank in tp_index
        }
        rows: dict[str, int] = {}
        self.known: dict[tuple[int, int], int] = {}
        self.of_rank: list[int | None] = []
        written: dict[tuple[int, int], int] = {}
        for rank in range(plan.devices):
            if rank not in tp_index:
                self.of_rank.append(None)
                continue
            own = self.representative[rank]
            # Where a rank stands for its group, the others leave out what they do not send.
            t = tp_index[rank] if quotient is not None and quotient.merges_tp else 0
            row = written.get((own, t))
            if row is None:
                text = self._row(own, t)
                row = written[own, t] = rows.setdefault(text, len(rows))
            self.of_rank.append(self.known.setdefault((own, row), len(self.known)))
        self.rows = list(rows)

    def _row(self, representative: int, t: int) -> str:
        """The row of tp index t of the group that a rank stands for."""
        text = self._whole.get(representative)
        if text is None:
            text = self._whole[representative] = self._writer.row(representative)
        return " ".join(x for x in text.split(" ") if self._is_of(x, t)) if t else text

    def _is_of(self, token: str, t: int) -> bool:
        op, _, rest = token.partition(":")
        if op not in (Op.SEND_F, Op.SEND_B):
            return True
        edge = self._graph.edges[int(rest.split(".")[2])]
        other = edge.consumer if op == Op.SEND_F else edge.producer
        return t < self._graph.stages[other].tp

    def levels(self, rank: int) -> str:
        """The levels of a representative's computes, waits and collectives, in order."""
        starts = self._clocks.start[rank]
        return " ".join(
            str(int(starts[position]))
            for position, item in enumerate(self._program.instructions[rank])
            if isinstance(item, Compute | Collective | Sync)
            and item.op not in (Op.SYNC_START, Op.REDUCE_START)
        )
