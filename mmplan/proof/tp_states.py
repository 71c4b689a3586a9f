"""What a tensor-parallel group's ranks hold of each value of a block: all of it, or a shard.

A block runs twice without values (:mod:`mmplan.proof.block_trace`): whole, and as one rank of a
group of ``count`` runs it. Operation for operation the two are laid side by side. A value of the
same shape in both is *whole* on each rank, one that is ``count`` times as long along a dim in
the first is *cut* along it. Then the rules are few.

Forward. A column-cut Linear takes a whole value and gives a cut one, a row-cut one the other way
round, with the group's sum. Any other operation on cut values must give each rank its shard
of what the whole operation gives: pointwise ones along the same dim, matrix products and
attention where the cut dim is a batch or an output dim, views where the shards stay apart. One
that gives a value of the same shape on all ranks mixed a rank's shard: a fault. So is a number
that depends on the shard's size, and so are random numbers for a shard: all ranks would draw the
same for different heads or channels, and one process others.

Backward. The gradient of a whole value that a cut one was computed with is *partial*: each rank
has the part that went through its shard. Gradients are linear in those that come in, so it stays
partial on the way back. At a parameter the group can sum it. At the block's input, or at
the output of a row-cut Linear, nobody would: a fault. So is a gradient that is partial by one
use of a value and whole by another one.

Rows. With sequence parallelism (:mod:`mmplan.proof.row_cuts`) the block's rows are cut as well.
Then a row-cut Linear gives rows that are cut, a gather makes them whole, and the other rules hold
as they are for dim -2 instead of channels: norms and sums of residuals go along, an operation that
mixes rows is a fault. A parameter that is whole and met cut rows has a partial gradient. What a
gather for cut Linears gives may be used by these alone: its gradient is summed behind it. A block
with a fault keeps its rows whole.

Vocabulary. An embedding cut along its tokens takes and gives whole values, with the group's sum. A
Linear cut along them is a column-cut one; what it gives is brought together, or goes on cut to
the end of the block, where a loss takes it so.

Source: the states of GSPMD (arXiv:2105.04663) and of DTensor, for one group and Megatron's two
kinds of Linears.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from torch import nn

from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.proof.block_trace import (
    EMBEDDING,
    BlockError,
    BlockTrace,
    Operation,
    TracedValue,
    arguments_of,
    block_kind,
    trace_block,
)
from mmplan.proof.row_cuts import (
    RowCuts,
    ShapeGroup,
    first_tensor,
    has_rows,
    regions_of,
    whole_submodules,
)

COLUMNS = frozenset(["colwise", "packed_colwise"])
ROWS = "rowwise"
VOCAB = "vocab"
GATHER = "mmplan.gather_rows"
ALL_ROWS = "mmplan.all_rows"
OWN_ROWS = "mmplan.own_rows"

# Views: the shards stay apart if the cut dim keeps its place among all elements.
_RESHAPES = frozenset(["aten.view", "aten._reshape_alias", "aten.reshape"])
# Dims exchanged, added or dropped; dropping the cut one gives a whole shape, which is a fault.
_REORDERINGS = frozenset(
    [
        "aten.detach",
        "aten.permute",
        "aten.select",
        "aten.squeeze",
        "aten.t",
        "aten.transpose",
        "aten.unbind",
        "aten.unsqueeze",
        "aten.view_as_complex",
        "aten.view_as_real",
        "written",
    ]
)
_PARTS = frozenset(["aten.slice", "aten.split", "aten.split_with_sizes", "aten.unsafe_split"])
# Draws random numbers.
_RANDOM = frozenset(
    [
        "aten.bernoulli",
        "aten.bernoulli_",
        "aten.exponential_",
        "aten.native_dropout",
        "aten.normal_",
        "aten.rand",
        "aten.rand_like",
        "aten.randn",
        "aten.randn_like",
        "aten.uniform_",
    ]
)
# Pointwise, whatever torch's tags say.
_POINTWISE = frozenset(
    [
        "aten._prelu_kernel",
        "aten._to_copy",
        "aten.bernoulli",
        "aten.bernoulli_",
        "aten.copy_",
        "aten.exponential_",
        "aten.fill_",
        "aten.masked_fill",
        "aten.masked_fill_",
        "aten.native_dropout",
        "aten.normal_",
        "aten.uniform_",
        "aten.where",
        "aten.zero_",
    ]
)
# The same number in each place, or a random one.
_CONSTANTS = frozenset(
    [
        "aten.empty",
        "aten.empty_like",
        "aten.full",
        "aten.full_like",
        "aten.new_empty",
        "aten.new_full",
        "aten.new_ones",
        "aten.new_zeros",
        "aten.ones",
        "aten.ones_like",
        "aten.rand",
        "aten.rand_like",
        "aten.randn",
        "aten.randn_like",
        "aten.zeros",
        "aten.zeros_like",
    ]
)
# Over some dims; a cut one among them gives a whole shape, which is a fault.
_REDUCTIONS = frozenset(
    [
        "aten.all",
        "aten.amax",
        "aten.amin",
        "aten.any",
        "aten.argmax",
        "aten.argmin",
        "aten.linalg_vector_norm",
        "aten.logsumexp",
        "aten.max",
        "aten.mean",
        "aten.min",
        "aten.norm",
        "aten.prod",
        "aten.std",
        "aten.std_mean",
        "aten.sum",
        "aten.var",
        "aten.var_mean",
    ]
)
# Along dims that they keep: not the cut one.
_ALONG = frozenset(
    [
        "aten._log_softmax",
        "aten._softmax",
        "aten.cumprod",
        "aten.cumsum",
        "aten.flip",
        "aten.logcumsumexp",
        "aten.roll",
        "aten.sort",
        "aten.topk",
    ]
)
_PRODUCTS = frozenset(["linear", "matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"])
# Arguments that say sizes, which shapes show already.
_SIZES = frozenset(["size", "shape", "split_size", "split_sizes", "start", "end", "names"])


class Cut(NamedTuple):
    """A value of which each rank has a shard.

    Attributes:
        dim: which is cut.
        parts: the dim is so many parts, each cut apart (a fused qkv: 3); 0 where all places along
            it are alike, so that any cut of it is this one.
    """

    dim: int
    parts: int


State = Cut | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TPStates:
    """A block as a tensor-parallel group runs it, found right.

    Attributes:
        partial: replicated parameters of which each rank's gradient is a part; their sum over
            the group is the gradient.
        output: its output tree, without values; leaves say whether they require a gradient.
        rows: where its rows are cut; None where they stay whole.
        obstacle: why they do, where they were to be cut.
        logits: whether its first output is cut along the vocabulary (dim -1).
    """

    partial: frozenset[str]
    output: Any
    rows: RowCuts | None = None
    obstacle: str | None = None
    logits: bool = False


class _FaultError(Exception):
    """An operation that is wrong under tensor parallelism."""

    def __init__(self, message: str, operation: Operation | None = None) -> None:
        place = ""
        if operation is not None:
            name = operation.name.removeprefix("aten.")
            place = f"{operation.where}: {name} " if operation.where else f"{name} "
        super().__init__(place + message)


def tp_states(
    block: nn.Module,
    inputs: Sequence[Any],
    count: int,
    *,
    where: str,
    full: Mapping[str, Sequence[int]] | None = None,
    known: dict[object, TPStates] | None = None,
    rows: bool = False,
    logits: bool = False,
) -> TPStates:
    """Follow a block's values through a tensor-parallel group; nothing of its size is allocated.

    Args:
        block: whole or cut; carries ``tp_plan``.
        inputs: its arguments, trees of tensors with or without values. What requires a gradient
            of them and of the parameters is as in training.
        count: ranks of the group.
        where: the block's name in errors (``vision.3``).
        full: whole shapes of the parameters of which the block has a shard only.
        known: answers by kind of block; a block of a kind that is in it costs nothing, and
            others are added. For as long as the blocks live.
        rows: whether the group cuts rows too, where the block can be run so.
        logits: whether its first output may stay cut along the vocabulary.

    Raises:
        InvalidInputError: the block would compute or train something else than on one rank.
    """
    plan = _plan(block, count, full or {})
    known = {} if known is None else known
    logits = logits and len(plan.heads) == 1
    kind = block_kind(block, inputs), plan.key, rows, logits
    if kind not in known:
        found = _states(block, inputs, count, where, plan)
        if logits:
            found = _with_logits(block, inputs, count, plan, found)
        known[kind] = _with_rows(block, inputs, count, plan, found) if rows else found
    return known[kind]


def module_states(
    module: nn.Sequential,
    inputs: Sequence[Any],
    count: int,
    *,
    where: str,
    rows: bool = False,
    logits: bool = False,
) -> list[TPStates]:
    """Follow a module's blocks, all whole, one after another.

    Args:
        module, inputs: as for :func:`tp_states`, of the first block.
        count: ranks of the group.
        where: the module's name in errors.
        rows: as for :func:`tp_states`.
        logits: as for :func:`tp_states`, of the last block.

    Raises:
        InvalidInputError: as :func:`tp_states`, or a block cannot run without values.
    """
    known: dict[object, TPStates] = {}
    found: list[TPStates] = []
    for index, block in enumerate(module):
        given = inputs if index == 0 else [found[-1].output]
        try:
            last = index == len(module) - 1
            states = tp_states(
                block,
                given,
                count,
                where=f"{where}.{index}",
                known=known,
                rows=rows,
                logits=logits and last,
            )
            found.append(states)
        except MMPlanError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise InvalidInputError(
                f"{where}.{index} cannot run on shapes alone, which tp {count} needs: "
                f"{type(error).__name__}: {(lines or [''])[0]}",
                hint="look at shapes in forward, not at values, or pin the module with "
                "plan: {tp: 1}",
            ) from error
    return found


def _states(
    block: nn.Module, inputs: Sequence[Any], count: int, where: str, plan: _Plan
) -> TPStates:
    try:
        whole = trace_block(block, inputs, shapes=plan.whole, styles=plan.styles)
    except BlockError as error:
        raise cast(Exception, error.__cause__) from None
    if count == 1 or not plan.styles:
        return TPStates(partial=frozenset(), output=whole.output)
    try:
        shard = trace_block(block, inputs, shapes=plan.shard, styles=plan.styles, logits=plan.heads)
        partial, _ = _followed(whole, shard, count, plan)
    except (_FaultError, BlockError) as fault:
        problem = str(fault)
    else:
        return TPStates(partial=partial, output=whole.output)
    raise InvalidInputError(
        f"{where} ({type(block).__name__}) at tp {count}: {problem}",
        hint=f"take the Linears around it out of tp_plan (it has {', '.join(plan.styles)}), or pin "
        "the module with plan: {tp: 1}",
    )


def _with_logits(
    block: nn.Module, inputs: Sequence[Any], count: int, plan: _Plan, found: TPStates
) -> TPStates:
    """The states with the first output cut along the vocabulary, where it can be."""
    try:
        whole, shard = (
            trace_block(block, inputs, shapes=shapes, styles=plan.styles)
            for shapes in (plan.whole, plan.shard)
        )
        partial, results = _followed(whole, shard, count, plan, logits=True)
    except (_FaultError, BlockError):
        return found
    return replace(found, partial=partial, logits=results[0] is not None)


def _with_rows(
    block: nn.Module, inputs: Sequence[Any], count: int, plan: _Plan, found: TPStates
) -> TPStates:
    """The states with rows cut, or why they stay whole."""
    if not plan.styles:
        return found
    around = regions_of(plan.styles)
    if around is None:
        reason = "its cut Linears are not in submodules of their own"
        return replace(found, obstacle=reason)
    # A cut head takes its rows by itself, and an embedding gives its own, or whoever has them does.
    choices = dict.fromkeys(
        (regions, tables)
        for regions in ((*around, *plan.heads), around)
        for tables in (plan.tables, ())
    )
    whole = trace_block(block, inputs, shapes=plan.whole, styles=plan.styles)
    reason = "it has no activations with rows"
    first: Any = first_tensor(inputs[0]) if inputs else None
    # What fails is tried in another way: its traceback would tell users nothing.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    for takes in (False, True) if has_rows(first) else (False,):
        for regions, tables in choices:
            cuts = _row_cuts(block, whole, regions, tables, first.shape[-2] if takes else 0)
            if not (cuts.takes or cuts.scattered or cuts.summed):
                continue
            try:
                return _states_of_rows(block, inputs, count, plan, cuts, logits=found.logits)
            except (_FaultError, BlockError) as fault:
                reason = str(fault)
    return replace(found, obstacle=reason)


def _row_cuts(
    block: nn.Module,
    whole: BlockTrace,
    regions: tuple[str, ...],
    tables: tuple[str, ...],
    rows: int,
) -> RowCuts:
    """Where rows are to be cut and gathered.

    Args:
        block: the block.
        whole: what it does.
        regions: see :func:`mmplan.proof.row_cuts.regions_of`.
        tables: cut embeddings that give a rank its own rows.
        rows: of its first input, of which it takes its own; 0 where it takes all.
    """
    last = max(i for i, operation in enumerate(whole.operations) if operation.name == ROWS)
    takes, gathers, scatters = bool(rows), list[str](), list[str]()
    names = [*whole_submodules(block, (*regions, *tables)), *tables]
    calls = {call.name: call for call in reversed(whole.calls) if call.name in names}
    for name, call in sorted(calls.items(), key=lambda item: item[1].first):
        if rows and call.given is not None and call.given[-2] == rows:
            gathers.append(name)
        if call.end <= last and call.gave is not None and call.gave[-2] == (rows or call.gave[-2]):
            scatters.append(name)
            rows = call.gave[-2]
    return RowCuts(
        takes=takes,
        regions=regions,
        whole=tuple(gathers),
        scattered=tuple(name for name in scatters if name not in tables),
        summed=tuple(name for name in scatters if name in tables),
    )


def _states_of_rows(
    block: nn.Module,
    inputs: Sequence[Any],
    count: int,
    plan: _Plan,
    cuts: RowCuts,
    *,
    logits: bool,
) -> TPStates:
    """The states of a block whose rows are cut, and its logits too, where they are to be.

    Raises:
        _FaultError, BlockError: the group would compute or train something else.
    """
    whole, shard = (
        trace_block(
            block,
            inputs,
            shapes=shapes,
            styles=plan.styles,
            cuts=cuts,
            group=ShapeGroup(index=0, count=ranks),
            logits={} if logits else plan.heads,
        )
        for shapes, ranks in ((plan.whole, 1), (plan.shard, count))
    )
    if whole.rows < count:
        raise _FaultError(f"it has {whole.rows} rows for {count} ranks")
    partial, results = _followed(whole, shard, count, plan, cuts, logits=logits)
    return TPStates(
        partial=partial,
        output=whole.output,
        rows=replace(cuts, gives=results[0] is not None and not logits),
        logits=logits,
    )


def packed_parts(linear: nn.Module, name: str) -> int:
    """Matrices that lie one above the other in a fused Linear: its ``packed_parts``.

    Without the attribute: 3 for a name with "qkv" in it, else 2 (gate and up).
    """
    return int(cast(Any, getattr(linear, "packed_parts", 3 if "qkv" in name else 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A block's ``tp_plan`` at one degree.

    Attributes:
        styles: of its Linears and embeddings.
        whole, shard: shapes of the cut parameters, and of one rank's shards.
        cuts: how they are cut.
        heads: Linears that are cut along the vocabulary, with its size.
    """

    styles: dict[str, str] = field(default_factory=lambda: {})
    whole: dict[str, tuple[int, ...]] = field(default_factory=lambda: {})
    shard: dict[str, tuple[int, ...]] = field(default_factory=lambda: {})
    cuts: dict[str, Cut] = field(default_factory=lambda: {})
    heads: dict[str, int] = field(default_factory=lambda: {})

    @property
    def tables(self) -> tuple[str, ...]:
        """Embeddings that are cut along the vocabulary."""
        return tuple(n for n, s in self.styles.items() if s == VOCAB and n not in self.heads)

    @property
    def key(self) -> object:
        """Equal for equal plans."""
        return tuple(self.whole.items()), tuple(self.shard.items()), tuple(self.cuts.items())


def _plan(block: nn.Module, count: int, full: Mapping[str, Sequence[int]]) -> _Plan:
    plan = _Plan()
    given: Mapping[str, str] = getattr(block, "tp_plan", None) or {}
    for name, style in given.items():
        if style not in COLUMNS and style not in (ROWS, VOCAB):
            continue
        plan.styles[name] = style
        linear = block.get_submodule(name)
        parts = packed_parts(linear, name) if style == "packed_colwise" else 1
        for key, parameter in linear.named_parameters(recurse=False):
            if style == ROWS and parameter.dim() == 1:
                continue
            path, dim = f"{name}.{key}", 1 if style == ROWS else 0
            plan.cuts[path] = Cut(dim, parts)
            sizes = list(full.get(path, parameter.shape))
            plan.whole[path] = tuple(sizes)
            if style == VOCAB and key == "weight" and not isinstance(linear, nn.Embedding):
                plan.heads[name] = sizes[0]
            sizes[dim] //= count
            plan.shard[path] = tuple(sizes)
    return plan


def _followed(
    whole: BlockTrace,
    shard: BlockTrace,
    count: int,
    plan: _Plan,
    rows: RowCuts | None = None,
    *,
    logits: bool = False,
) -> tuple[frozenset[str], list[State]]:
    """The parameters with partial gradients, and the states of the results.

    Raises:
        _FaultError: the group computes something else than one rank.
    """
    given = [plan.cuts.get(name) for name in whole.parameters]
    states: dict[int, State] = dict(zip(whole.parameters.values(), given, strict=True))
    states |= dict.fromkeys(whole.inputs)
    if rows is not None and rows.takes:
        first = whole.inputs[0]
        states[first] = Cut(whole.tensors[first].dim() - 2, 1)
    rules = _Rules(whole, shard, count, states, logits=logits)
    for index, operation in enumerate(whole.operations):
        other = shard.operations[index] if index < len(shard.operations) else None
        if other is None or (other.name, other.outputs) != (operation.name, operation.outputs):
            ran = "nothing" if other is None else other.name.removeprefix("aten.")
            raise _FaultError(f"runs on one rank where a rank of the group runs {ran}", operation)
        rules.apply(operation, other)
    if len(shard.operations) > len(whole.operations):
        raise _FaultError("a rank of the group runs more operations than one rank alone")
    results = [rules.state(number) for number in whole.results]
    for place, number in enumerate(whole.results):
        # Only the first output may have the rank's own rows, or its shard of the logits.
        known = rules.has_own_rows(number) or (logits and rules.is_cut_at_the_end(number))
        if results[place] is not None and not (place == 0 and known):
            raise _FaultError("its output is cut: each rank would return its own shard")
    return _partial_parameters(whole, rules), results


class _Rules:
    """States of all values, found in the order of the operations.

    Args:
        whole, shard: the block on one rank, and on one of the group.
        count: ranks of the group.
        states: of parameters and inputs, by number.
        logits: whether what a Linear gives that is cut along the vocabulary goes on cut.
    """

    def __init__(
        self,
        whole: BlockTrace,
        shard: BlockTrace,
        count: int,
        states: dict[int, State],
        *,
        logits: bool,
    ) -> None:
        self._whole, self._shard, self._count = whole, shard, count
        self._states, self._logits = states, logits
        # Of the vocabularies that are cut: all tokens, and the rank's.
        self._vocabularies: set[tuple[int, int]] = set()
        # What a gather gave to cut Linears, before the next row-cut one: they sum no gradient.
        self._gathered: set[int] = set()
        self.takes_gathered: set[int] = set()
        table: list[tuple[Iterable[str], Callable[[Operation, Operation], list[State]]]] = [
            (_RESHAPES, self._reshape),
            (_REORDERINGS, self._kept),
            (_REDUCTIONS, self._kept),
            (_PARTS, self._part),
            (_CONSTANTS, self._constant),
            (["aten.expand"], self._expand),
            (["aten.cat"], self._cat),
            (_ALONG, self._along),
            (_PRODUCTS, self._product),
            (["attention", "mmplan.ragged_attention"], self._attention),
            (["norm"], self._norm),
            (_POINTWISE, self._pointwise),
            ([GATHER, ALL_ROWS], self._all_rows),
            ([OWN_ROWS], self._own_rows),
            ([EMBEDDING], self._embedding),
        ]
        self._rules = {name: rule for names, rule in table for name in names}

    def state(self, number: int) -> State:
        """Of a value; constants from outside the block are whole."""
        return self._states.get(number)

    def has_own_rows(self, number: int) -> bool:
        """Whether a value is cut along its rows."""
        state, shape = self.state(number), self._shape(number)
        return state is not None and state.dim == len(shape) - 2 and shape[-2] == self._whole.rows

    def is_cut_at_the_end(self, number: int) -> bool:
        """Whether a value is cut along its last dim, in one part."""
        state = self.state(number)
        return state is not None and state == Cut(len(self._shape(number)) - 1, 1)

    def apply(self, operation: Operation, other: Operation) -> None:
        """Find the states of an operation's outputs.

        Raises:
            _FaultError: they are not those of the whole operation.
        """
        if operation.name in COLUMNS or operation.name == VOCAB:
            found: list[State] = [self._columns(operation)]
        elif operation.name == ROWS:
            found = [self._rows(operation)]
        else:
            found = self._rule(operation)(operation, other)
        for output, state in zip(operation.outputs, found, strict=True):
            if (state and state.dim) != self._cut_dim(output, operation):
                raise _FaultError("gives a rank something else than its shard", operation)
            if state is not None and _draws(operation):
                raise _FaultError(
                    "draws random numbers between cut Linears: every rank would draw the same for "
                    "heads or channels of its own, one process draws them for all",
                    operation,
                )
            self._states[output] = state

    def _rule(self, operation: Operation) -> Callable[[Operation, Operation], list[State]]:
        if operation.name in self._rules:
            return self._rules[operation.name]
        if operation.pointwise:
            return self._pointwise
        return self._unknown

    # --- shapes ------------------------------------------------------------------------

    def _shape(self, number: int) -> tuple[int, ...]:
        return tuple(self._whole.tensors[number].shape)

    def _cut_dim(self, number: int, operation: Operation) -> int | None:
        """The dim in which a value is shorter on a rank of the group."""
        whole, shard = self._shape(number), tuple(self._shard.tensors[number].shape)
        if whole == shard:
            return None
        differ = [d for d, (a, b) in enumerate(zip(whole, shard, strict=False)) if a != b]
        if len(whole) != len(shard) or len(differ) > 1:
            raise _FaultError(f"gives {list(shard)}, no shard of {list(whole)}", operation)
        sizes = whole[differ[0]], shard[differ[0]]
        uneven = {(self._whole.rows, self._num_own), *self._vocabularies}
        if sizes[0] != self._count * sizes[1] and sizes not in uneven:
            raise _FaultError(f"gives {list(shard)}, no shard of {list(whole)}", operation)
        return differ[0]

    @property
    def _num_own(self) -> int:
        return self._whole.rows // self._count

    def _from_end(self, number: int) -> int:
        """The cut dim of a cut value, counted from its last one: -1, -2, ..."""
        state = self._states[number]
        assert state is not None
        return state.dim - len(self._shape(number))

    def _cut_inputs(self, operation: Operation) -> list[int]:
        return [number for number in operation.inputs if self.state(number) is not None]

    def _parts(self, numbers: Iterable[int], operation: Operation) -> int:
        """The parts that cut values have alike."""
        found = {state.parts for n in numbers if (state := self.state(n))} - {0}
        if len(found) > 1:
            raise _FaultError("joins values that are cut in different parts", operation)
        return found.pop() if found else 0

    def _outputs(self, operation: Operation, parts: int) -> list[State]:
        """Outputs cut where their shapes say so; none of them whole."""
        dims = [self._cut_dim(number, operation) for number in operation.outputs]
        if None in dims:
            raise _FaultError(
                "goes over the cut width: each rank would have it of its own shard only", operation
            )
        return [Cut(cast(int, dim), parts) for dim in dims]

    # --- rules -------------------------------------------------------------------------

    def _columns(self, operation: Operation) -> State:
        weight = self._states[_number(operation, "weight")]
        if self.state(_number(operation, "input")) is not None:
            raise _FaultError("is a column-cut Linear on a value that is cut already", operation)
        assert weight is not None
        if _number(operation, "input") in self._gathered:
            self.takes_gathered.add(operation.outputs[0])
        if operation.name == VOCAB:
            number = _number(operation, "weight")
            rows = self._shape(number)[0], self._shard.tensors[number].shape[0]
            self._vocabularies.add(rows)
            if not self._logits:
                return None
        return Cut(len(self._shape(operation.outputs[0])) - 1, weight.parts)

    def _embedding(self, operation: Operation, other: Operation) -> list[State]:
        if self.state(_number(operation, "input")) is not None:
            raise _FaultError("looks up tokens that are cut along the vocabulary", operation)
        (output,) = operation.outputs
        return [None if self._cut_dim(output, operation) is None else self._own(output)]

    def _own(self, number: int) -> State:
        """Of a value of which a rank has its own rows."""
        return Cut(len(self._shape(number)) - 2, 1)

    def _rows(self, operation: Operation) -> State:
        number = _number(operation, "input")
        state = self.state(number)
        if state is None or self._from_end(number) != -1 or state.parts > 1:
            raise _FaultError(
                "is a row-cut Linear on channels that are not cut as it is", operation
            )
        self._gathered.clear()
        return self._own(operation.outputs[0]) if self._whole.rows else None

    def _all_rows(self, operation: Operation, other: Operation) -> list[State]:
        (number,), (output,) = operation.inputs, operation.outputs
        if not self.has_own_rows(number):
            raise _FaultError("brings rows together that are not cut", operation)
        if operation.name == GATHER:
            self._gathered.add(output)
        return [None]

    def _own_rows(self, operation: Operation, other: Operation) -> list[State]:
        (number,), (output,) = operation.inputs, operation.outputs
        if self.state(number) is not None:
            raise _FaultError("cuts rows of a value that is cut already", operation)
        return [self._own(output)]

    def _same(self, operation: Operation, other: Operation) -> None:
        """The arguments that are no tensors and no sizes."""
        for name, value in operation.arguments.items():
            theirs = other.arguments.get(name)
            if name not in _SIZES and not _equal(value, theirs):
                raise _FaultError(
                    f"takes the number {_shown(value)}, and {_shown(theirs)} on a rank of the "
                    "group: it was computed of a cut size",
                    operation,
                )

    def _unknown(self, operation: Operation, other: Operation) -> list[State]:
        if self._cut_inputs(operation):
            raise _FaultError("on a cut value is not known to be right on a shard", operation)
        self._same(operation, other)
        dims = [self._cut_dim(number, operation) for number in operation.outputs]
        if any(dim is not None for dim in dims):
            raise _FaultError("takes its size of a cut value", operation)
        return [None] * len(dims)

    def _kept(self, operation: Operation, other: Operation) -> list[State]:
        cut = self._cut_inputs(operation)
        if not cut:
            return self._unknown(operation, other)
        self._same(operation, other)
        return self._outputs(operation, self._parts(cut, operation))

    def _reshape(self, operation: Operation, other: Operation) -> list[State]:
        (number,), (output,) = operation.inputs, operation.outputs
        state, dim = self.state(number), self._cut_dim(output, operation)
        if state is None or dim is None:
            return self._kept(operation, other)
        if state.parts == 0:
            return [Cut(dim, 0)]
        # So many runs of elements hold one shard of each rank; a view does not move elements.
        runs = math.prod(self._shape(number)[: state.dim]) * state.parts
        parts, rest = divmod(runs, math.prod(self._shape(output)[:dim]))
        uneven = self._shape(output)[dim] % (parts * self._count) if parts else 0
        if parts < 1 or rest or (uneven and not (parts == 1 and self.has_own_rows(number))):
            raise _FaultError(
                f"of {list(self._shape(number))} to {list(self._shape(output))} mixes the shards "
                f"of dim {state.dim}",
                operation,
            )
        return [Cut(dim, parts)]

    def _part(self, operation: Operation, other: Operation) -> list[State]:
        number = operation.inputs[0]
        state, shape = self.state(number), self._shape(number)
        dim = int(operation.arguments.get("dim", 0)) % len(shape)
        if state is None or state.dim != dim or state.parts == 0:
            if state is None or state.dim != dim:
                self._same_part(operation, other)
            return self._kept(operation, other)
        length = shape[dim] // state.parts
        first, begins = (
            max(0, start + sizes[dim]) if start < 0 else start
            for start, sizes in (
                (int(operation.arguments.get("start") or 0), shape),
                (int(other.arguments.get("start") or 0), self._shard.tensors[number].shape),
            )
        )
        if begins * self._count != first:
            raise _FaultError("takes other channels of a shard than of the whole", operation)
        if (operation.arguments.get("step") or 1) != 1:
            raise _FaultError("takes every other channel of a cut width", operation)
        found: list[State] = []
        for output in operation.outputs:
            size = self._shape(output)[dim]
            if first % length or size % length:
                raise _FaultError(
                    f"takes channels {first} to {first + size} of a cut width of {shape[dim]}; "
                    "packed_colwise is for Linears of several matrices",
                    operation,
                )
            found.append(Cut(dim, size // length))
            first += size
        return found

    def _same_part(self, operation: Operation, other: Operation) -> None:
        for name in ("start", "end", "split_size", "split_sizes"):
            if operation.arguments.get(name) != other.arguments.get(name):
                raise _FaultError("takes a part whose place depends on a cut size", operation)

    def _constant(self, operation: Operation, other: Operation) -> list[State]:
        self._same(operation, other)
        dims = [self._cut_dim(number, operation) for number in operation.outputs]
        return [None if dim is None else Cut(dim, 0) for dim in dims]

    def _expand(self, operation: Operation, other: Operation) -> list[State]:
        (number,), (output,) = operation.inputs, operation.outputs
        dim = self._cut_dim(output, operation)
        if self.state(number) is not None or dim is None:
            return self._kept(operation, other)
        if self._size(number, dim - len(self._shape(output))) != 1:
            return self._unknown(operation, other)
        return [Cut(dim, 0)]

    def _size(self, number: int, from_end: int) -> int:
        """A value's size along a dim, 1 where it has fewer dims."""
        shape = self._shape(number)
        return shape[from_end] if -from_end <= len(shape) else 1

    def _pointwise(self, operation: Operation, other: Operation) -> list[State]:
        cut = self._cut_inputs(operation)
        if not cut:
            return self._unknown(operation, other)
        self._same(operation, other)
        return self._aligned(operation, {number: self._from_end(number) for number in cut})

    def _aligned(self, operation: Operation, places: Mapping[int, int]) -> list[State]:
        """Outputs that are cut in one dim, to which each cut input's dim is brought.

        Args:
            places: for each cut input, the dim of the outputs, from the end.
        """
        found = self._outputs(operation, self._parts(places, operation))
        for output, state in zip(operation.outputs, found, strict=True):
            place = cast(Cut, state).dim - len(self._shape(output))
            if set(places.values()) != {place}:
                raise _FaultError("joins values that are cut in different dims", operation)
        return found

    def _broadcast(self, operation: Operation, numbers: Iterable[int], place: int) -> None:
        for number in numbers:
            if self.state(number) is None and self._size(number, place) != 1:
                raise _FaultError("joins a cut value with a whole one along the cut dim", operation)

    def _cat(self, operation: Operation, other: Operation) -> list[State]:
        cut = self._cut_inputs(operation)
        if not cut:
            return self._unknown(operation, other)
        self._same(operation, other)
        dims = len(self._shape(operation.outputs[0]))
        dim = int(operation.arguments.get("dim", 0)) % dims
        if len(cut) != len(operation.inputs):
            raise _FaultError("joins cut values and whole ones", operation)
        if any(self._from_end(number) == dim - dims for number in cut):
            if len({self._shape(number)[dim] for number in cut}) > 1:
                raise _FaultError(
                    "joins cut values of different sizes along the cut dim", operation
                )
            return self._outputs(operation, len(cut) * max(1, self._parts(cut, operation)))
        return self._aligned(operation, {number: self._from_end(number) for number in cut})

    def _along(self, operation: Operation, other: Operation) -> list[State]:
        given = operation.arguments.get("dim", operation.arguments.get("dims", -1))
        for number in self._cut_inputs(operation):
            dims = len(self._shape(number))
            along = [int(dim) % dims for dim in (given if isinstance(given, list) else [given])]
            if self._from_end(number) + dims in along:
                raise _FaultError("goes along the cut dim", operation)
        return self._kept(operation, other)

    def _product(self, operation: Operation, other: Operation) -> list[State]:
        cut = self._cut_inputs(operation)
        if not cut:
            return self._unknown(operation, other)
        self._same(operation, other)
        left, right, added = self._factors(operation)
        ranks = len(self._shape(left)), len(self._shape(right))
        transposed = operation.name == "linear"
        places: dict[int, int] = {}
        for number in cut:
            place = self._from_end(number)
            if number == added:
                places[number] = place
                continue
            inner, outer = (-1, -2) if number == left or transposed else (-2, -1)
            if place == inner or 1 in ranks:
                raise _FaultError(
                    "sums over the cut width outside of a row-cut Linear: each rank would have a "
                    "part of the sum",
                    operation,
                )
            places[number] = place if number == left else -1 if place == outer else place
        found = self._aligned(operation, places)
        place = next(iter(places.values()))
        if place < -2:
            self._broadcast(operation, [left, right], place)
        return found

    def _factors(self, operation: Operation) -> tuple[int, int, int | None]:
        """Left factor, right factor and addend of a matrix product."""
        if operation.name == "linear":
            given = list(arguments_of(operation, ["input", "weight", "bias"]))
        elif operation.name == "matmul":
            given = [TracedValue(number) for number in operation.inputs]
        else:
            given = [operation.arguments.get(n) for n in ("mat1", "batch1", "self")]
            given = [v for v in given if isinstance(v, TracedValue)][:1]
            others = [operation.arguments.get(n) for n in ("mat2", "batch2")]
            given += [v for v in others if isinstance(v, TracedValue)]
            if operation.name in ("aten.addmm", "aten.baddbmm"):
                given.append(operation.arguments["self"])
        numbers = [v.number if isinstance(v, TracedValue) else None for v in (*given, None)]
        return cast(int, numbers[0]), cast(int, numbers[1]), numbers[2]

    def _attention(self, operation: Operation, other: Operation) -> list[State]:
        cut = self._cut_inputs(operation)
        if not cut:
            return self._unknown(operation, other)
        self._same(operation, other)
        places = {number: self._from_end(number) for number in cut}
        found = self._aligned(operation, places)
        place = next(iter(places.values()))
        if place > -3:
            raise _FaultError("goes along the cut dim", operation)
        self._broadcast(operation, operation.inputs, place)
        return found

    def _norm(self, operation: Operation, other: Operation) -> list[State]:
        cut = self._cut_inputs(operation)
        names = ["input", "normalized_shape", "weight", "bias", "eps"]
        _, shape, *_ = arguments_of(operation, names)
        if any(self._from_end(number) >= -len(shape) for number in cut):
            raise _FaultError("over a cut width: each rank would norm its own shard", operation)
        return self._pointwise(operation, other)


def _draws(operation: Operation) -> bool:
    """Whether an operation draws random numbers."""
    if operation.name == "attention":
        names = ["query", "key", "value", "attn_mask", "dropout_p"]
        return bool(list(arguments_of(operation, names))[-1])
    return operation.name in _RANDOM


def _number(operation: Operation, name: str) -> int:
    return cast(TracedValue, operation.arguments[name]).number


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one is other)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- backward --------------------------------------------------------------------------

# The gradient of a value: whole or its shard on each rank, or a part of it, and why.
_Gradient = str | None


def _partial_parameters(trace: BlockTrace, rules: _Rules) -> frozenset[str]:
    """Follow gradients back through the operations, from the block's output.

    Raises:
        _FaultError: a partial gradient that nobody would sum.
    """
    gradients: dict[int, _Gradient] = {n: None for n in trace.results if _requires(trace, n)}
    # Values of an autograd.Function: it runs without a graph, its output has one.
    inside: set[int] = set()
    for operation in reversed(trace.operations):
        live = [n for n in operation.outputs if n in gradients]
        if not live:
            continue
        if not operation.records:
            inside |= set(operation.inputs)
        back = _back(operation, live, gradients, rules)
        for number in dict.fromkeys(operation.inputs):
            if not (_requires(trace, number) or number in inside):
                continue
            gradient = None if rules.state(number) is not None else back.get(number)
            if number in gradients and (gradients[number] is None) != (gradient is None):
                raise _FaultError(_mixed(cast(str, gradient or gradients[number])))
            gradients.setdefault(number, gradient)
    for number in trace.inputs:
        if _requires(trace, number) and gradients.get(number):
            raise _FaultError(_at_activation(cast(str, gradients[number])))
    return frozenset(name for name, n in trace.parameters.items() if gradients.get(n) is not None)


def _back(
    operation: Operation,
    live: Sequence[int],
    gradients: Mapping[int, _Gradient],
    rules: _Rules,
) -> dict[int, _Gradient]:
    """What one operation gives back to each input that is whole."""
    came = next((gradients[n] for n in live if gradients[n] is not None), None)
    if operation.name in (VOCAB, EMBEDDING) and came is not None:
        raise _FaultError(_at_activation(came))
    if operation.name in COLUMNS or operation.name in (VOCAB, EMBEDDING):
        gathered = rules.takes_gathered.intersection(operation.outputs)
        return dict.fromkeys(operation.inputs, operation.where if gathered else None)
    if operation.name == OWN_ROWS:
        return dict.fromkeys(operation.inputs)
    if operation.name == GATHER and came is None:
        raise _FaultError("uses gathered rows outside of cut Linears, whose gradient is summed")
    if operation.name == GATHER:
        return dict.fromkeys(operation.inputs)
    if operation.name in (ROWS, ALL_ROWS) and came is not None:
        raise _FaultError(_at_activation(came))
    if came is not None and any(gradients[n] is None for n in live):
        raise _FaultError(_mixed(came))
    if any(rules.state(number) is not None for number in live):
        place = f" in {operation.where}" if operation.where else ""
        came = f"{operation.name.removeprefix('aten.')}{place}"
    return dict.fromkeys(operation.inputs, came)


def _at_activation(reason: str) -> str:
    return (
        f"{reason} joins an activation that is whole on each rank with cut ones, so its gradient "
        "would be a part of the sum on each rank; only a parameter's can be summed"
    )


def _mixed(reason: str) -> str:
    return (
        f"{reason} joins a value that is whole on each rank with cut ones, and it is used without "
        "them too: its gradient would be the sum of a whole part and of partial ones"
    )


def _requires(trace: BlockTrace, number: int) -> bool:
    return trace.tensors[number].requires_grad
