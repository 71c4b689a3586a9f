"""Proof that a plan trains its workload, from one representative of each class of ranks.

Three parts make the proof. Each is about data alone; no code of the workload runs.

1. The plan's stages and losses compute what the workload asks for
   (:mod:`mmplan.proof.specification`).
2. The micro-batches of all replicas tile the batch, and every sum of gradients has one rank of each
   replica (:func:`mmplan.program.checks.check.graph_faults`). These hold for the whole plan.
3. Every row of instructions meets its obligations, messages and collectives fit together, and
   nobody waits for ever (:func:`mmplan.program.checks.check.row_faults`). These are shown for the
   plan's quotient (:mod:`mmplan.program.symmetry_classes`), and of a plan of very many ranks for
   that of its folded plan (:mod:`mmplan.program.folding`). Components of one class have the same
   rows under a renaming of ranks and a shift of samples, and exchange messages with themselves
   alone. An order in which the quotient runs to its end, with every step done in all components of
   a class, is one in which the plan does.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmplan.errors import InvalidInputError
from mmplan.processes import rare_collections
from mmplan.program.checks.check import graph_faults, row_faults
from mmplan.program.communicators import CommunicatorCount, most_communicators, most_held_blocks
from mmplan.program.compile import compile_graph
from mmplan.program.folding import fold_large
from mmplan.program.lower import lower
from mmplan.program.model import Graph, Program
from mmplan.program.symmetry_classes import LoweredPlan, lower_plan
from mmplan.proof.specification import specification_faults, specify
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The outcome of :func:`prove`.

    Attributes:
        faults: what is not proven, one line each; empty where all is.
        rows: of instructions that were looked at, one for each class of ranks.
        instructions: in these rows.
        compiled: what was looked at; None where nothing compiles.
        communicators: of the rank with the most; None where nothing compiles.
        held_blocks: thread blocks of a GPU that a rank's communication may hold at once.
    """

    faults: tuple[str, ...]
    rows: int = 0
    instructions: int = 0
    compiled: CompiledPlan | None = None
    communicators: CommunicatorCount | None = None
    held_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPlan:
    """A plan's program, of one rank of each class.

    Attributes:
        lowered: the plan, or a folded one in its place.
        program: of the representatives.
        folded: whether it is of a folded plan.
    """

    lowered: LoweredPlan
    program: Program
    folded: bool


def compile_classes(plan: Plan, graph: Graph) -> CompiledPlan:
    """Compile one rank of each class of a plan.

    Args:
        plan: the plan.
        graph: that it lowers to.

    Raises:
        InvalidInputError: see :func:`mmplan.program.compile.compile_plan`.
    """
    compiled, small = fold_large(plan, graph) or (plan, graph)
    lowered = lower_plan(compiled, small)
    program = compile_graph(compiled, lowered.simulated_graph, lowered.orders)
    return CompiledPlan(lowered=lowered, program=program, folded=compiled is not plan)


@rare_collections()
def prove(plan: Plan, workload: Workload | None, profile: Profile | None = None) -> Proof:
    """Prove that a plan trains its workload.

    Args:
        plan: without faults of its fields (:func:`mmplan.schema.faults.plan_faults`).
        workload: None to prove only that the program does what the plan's own stages say.
        profile: of the model. It says how many blocks the modules have, and which of them
            share parameters; without it the plan is believed.
    """
    try:
        graph = lower(plan)
        compiled = compile_classes(plan, graph)
    except InvalidInputError as error:
        return Proof(faults=(error.message,))
    program = compiled.program
    whole = Program.of(plan, graph, program.instructions)
    faults = graph_faults(whole)
    if workload is not None:
        blocks = {n: m.blocks for t in plan.tasks.values() for n, m in t.modules.items()}
        if profile is not None:
            blocks |= {name: own.blocks for name, own in profile.modules.items()}
        ties = None if profile is None else profile.ties
        asked = specify(workload, blocks, ties=ties, tasks=plan.tasks)
        faults += specification_faults(whole, asked)
    faults += row_faults(program)
    return Proof(
        faults=tuple(faults),
        rows=sum(1 for row in program.instructions if row),
        instructions=sum(map(len, program.instructions)),
        compiled=compiled,
        communicators=most_communicators(whole),
        held_blocks=most_held_blocks(whole),
    )
