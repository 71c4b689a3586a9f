"""Tensor parallelism inside a block: plain shards, as Megatron-LM cuts them.

A block says in ``tp_plan`` which of its Linears are cut and how. Column-cut Linears take
the whole input and give a slice of the channels, row-cut ones take that slice and sum
their partial outputs over the group; so one all-reduce per row-cut Linear in forward, and in
backward one per tensor that column-cut Linears take before the next row-cut one, however many
share it (query, key and value). The sums are operators of torch, so that a compiled block is one
graph with them in it. Parameter names stay, only shapes shrink. All other parameters are
replicated, and their gradients are equal on every rank of the group: where a rank has a part of one
only (a norm of single heads sees the rank's own heads), the parts are summed in backward.
:mod:`mmplan.proof.tp_states` finds these, and blocks that cannot be run so.

With sequence parallelism a rank has its own rows only between the cut Linears
(:mod:`mmplan.proof.row_cuts`).

A rank may run a block in several groups: for several tasks, say. With the same shard in all of
them it holds that shard, and only the group of its sums changes. With different shards it holds
the block whole, and each group uses its shard of it. There replicated parameters would contribute
to a sum once too often, so the first rank of each group contributes, and the backwards of the
others leave their gradients out (:mod:`mmplan.program.shards`).

Source: Megatron-LM, arXiv:1909.08053, section 3 (the operators f and g).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmlaunch.checkpoint.boxes import Box, ShardStyle, shard_boxes
from mmlaunch.model.shard_layout import ShardLayout, shard_layout
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program, Stage
from mmplan.program.shards import Ranks, held_shards, is_crowded
from mmplan.proof.row_cuts import ROW_GROUPS, BlockRows, RowGroup, linear_of_rows
from mmplan.proof.tp_states import packed_parts

STYLES: tuple[ShardStyle, ...] = ("colwise", "rowwise", "packed_colwise")


class TensorParallelComm(Protocol):
    """A tensor-parallel group, as blocks see it."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over the group; blocks until it is there."""
        ...


def shard_block(
    block: nn.Module,
    *,
    index: int,
    count: int,
    comm: TensorParallelComm,
    where: str = "block",
) -> dict[str, ShardLayout]:
    """Cut a block's Linears in place to one rank's shard of a tensor-parallel group.

    Args:
        block: may carry ``tp_plan``: submodule name to style; without it the block stays
            whole on every rank.
        index: this rank's position in the group.
        count: ranks of the group.
        comm: sums tensors over the group.
        where: the block's name in errors (``vision.3``).

    Returns:
        Layouts of the cut parameters by name inside the block; the others are replicated.

    Raises:
        InvalidInputError: the plan names no Linear of the block, an unknown style, or sizes
            (heads too) that ``count`` does not divide.
    """
    plan = block_plan(block, where=where)
    if count == 1:
        return {}
    _check_not_tied(block, plan, where)
    shards: dict[str, ShardLayout] = {}
    sums = GroupSums(comm)
    for name, style in plan.items():
        linear = _linear(block, name, where)
        parts = packed_parts(linear, name) if style == "packed_colwise" else 1
        _check_sizes(block, name, linear, style=style, parts=parts, count=count, where=where)
        for parameter, shard in _cut(linear, style, parts, index, count).items():
            shards[f"{name}.{parameter}"] = shard
        linear.__class__ = _RowwiseLinear if style == "rowwise" else _ColwiseLinear
        cast(Any, linear).tp_sums = sums
    return shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The shard of a whole Linear that one tensor-parallel group uses on this rank.

    Attributes:
        weight, bias: boxes of the shard; None for all of it.
    """

    style: ShardStyle
    weight: list[Box]
    bias: list[Box] | None


def window_block(
    block: nn.Module, *, index: int, count: int, sums: GroupSums, where: str = "block"
) -> list[tuple[WindowedLinear, Window]]:
    """Let a block stay whole and run as a shard of a tensor-parallel group where asked to.

    Args:
        block, index, count, where: as for :func:`shard_block`.
        sums: the block's.

    Returns:
        The Linears that the group cuts, each with its shard; until one is set as ``tp_window``
        the Linear computes as before.

    Raises:
        InvalidInputError: as :func:`shard_block`.
    """
    plan = block_plan(block, where=where)
    _check_not_tied(block, plan, where)
    found: list[tuple[WindowedLinear, Window]] = []
    for name, style in plan.items():
        linear = cast(Any, block.get_submodule(name))
        if not isinstance(linear, WindowedLinear):
            linear = cast(Any, _linear(block, name, where))
        parts = packed_parts(linear, name) if style == "packed_colwise" else 1
        _check_sizes(block, name, linear, style=style, parts=parts, count=count, where=where)
        boxes = {
            parameter: shard_boxes(tuple(full.shape), style, index, count, parts)
            for parameter, full in _parameters_to_cut(linear, style)
        }
        linear.__class__ = WindowedLinear
        linear.tp_window, linear.tp_sums = None, sums
        window = Window(style=style, weight=boxes["weight"], bias=boxes.get("bias"))
        found.append((linear, window))
    return found


def cut_parameters(block: nn.Module, *, where: str = "block") -> dict[str, ShardLayout]:
    """Layouts of a whole block's parameters that tensor parallelism would cut, by name inside it.

    Raises:
        InvalidInputError: the plan names no Linear of the block, or an unknown style.
    """
    found: dict[str, ShardLayout] = {}
    for name, style in block_plan(block, where=where).items():
        linear = _linear(block, name, where)
        parts = packed_parts(linear, name) if style == "packed_colwise" else 1
        for parameter, full in _parameters_to_cut(linear, style):
            layout = shard_layout(tuple(full.shape), style, 0, 1, parts)
            found[f"{name}.{parameter}"] = layout
    return found


def block_plan(block: nn.Module, *, where: str = "block") -> dict[str, ShardStyle]:
    """A block's ``tp_plan``, checked; empty when it has none.

    Raises:
        InvalidInputError: the plan is no dict of known styles.
    """
    plan: object = getattr(block, "tp_plan", None)
    if plan is None:
        return {}
    if not isinstance(plan, dict):
        raise InvalidInputError(
            f"{where}: tp_plan is a {type(plan).__name__}",
            hint='give it a dict: {"mlp.up": "colwise", "mlp.down": "rowwise"}',
        )
    for name, style in plan.items():
        if style not in STYLES:
            raise InvalidInputError(
                f"{where}: tp_plan[{name!r}] is {style!r}", hint=f"choose of {', '.join(STYLES)}"
            )
    return cast("dict[str, ShardStyle]", plan)


class CutLinear(nn.Linear):
    """A Linear of which this rank holds a shard."""

    tp_sums: GroupSums

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], either of them this rank's shard."""
        return self.compute(linear_of_rows, input)

    def compute(self, linear: Callable[..., Tensor], input: Tensor) -> Tensor:
        """The forward with another function in place of ``linear_of_rows``."""
        raise NotImplementedError


class _ColwiseLinear(CutLinear):
    """Rows of the weight: whole input, a slice of the output channels."""

    def compute(self, linear: Callable[..., Tensor], input: Tensor) -> Tensor:
        """[..., in] to [..., out / count]; the input's gradient is summed over the group."""
        rows = self.tp_sums.rows.gathered(input)
        x = self.tp_sums.enter(input) if rows is None else input
        return linear(x, self.weight, self.bias, rows)


class _RowwiseLinear(CutLinear):
    """Columns of the weight: a slice of the input channels, whole output."""

    def compute(self, linear: Callable[..., Tensor], input: Tensor) -> Tensor:
        """[..., in / count] to [..., out], summed over the group; the bias is added once.

        Of rows that are cut the rank's own ones come out.
        """
        summed = self.tp_sums.leave(linear, input, self.weight)
        # Under autocast the sum is bf16 and the bias float32: keep the sum's type.
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class WindowedLinear(nn.Linear):
    """A whole Linear of which tensor-parallel groups use a shard, in turn."""

    tp_window: Window | None
    tp_sums: GroupSums

    def forward(self, input: Tensor) -> Tensor:
        """As the Linear, or as this rank's shard of it in the group of the window."""
        window = self.tp_window
        if window is None:
            return functional.linear(input, self.weight, self.bias)
        weight = _cat_boxes(self.weight, window.weight)
        if window.style == "rowwise":
            summed = self.tp_sums.leave(functional.linear, input, weight)
            return summed if self.bias is None else summed + self.bias.to(summed.dtype)
        bias = None if window.bias is None else _cat_boxes(self.bias, window.bias)
        return functional.linear(self.tp_sums.enter(input), weight, bias)


def _cat_boxes(full: Tensor, boxes: Sequence[Box]) -> Tensor:
    """Boxes of a tensor, one above the other."""
    parts = [full[box.slices] for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _NamedGroup(NamedTuple):
    """A group, and the name by which compiled blocks know it."""

    comm: TensorParallelComm
    name: str


_COMMS: WeakValueDictionary[str, TensorParallelComm] = WeakValueDictionary()
_NAMES: WeakKeyDictionary[TensorParallelComm, str] = WeakKeyDictionary()
_numbers = itertools.count()


def _group(comm: TensorParallelComm) -> _NamedGroup:
    """The same name for the same group, so that alike blocks share their compiled code."""
    name = _NAMES.setdefault(comm, f"group {next(_numbers)}")
    _COMMS[name] = comm
    ROW_GROUPS[name] = cast(RowGroup, comm)
    return _NamedGroup(comm, name)


# One operator for compilers, whatever a group does inside: they neither look into it nor move
# what it waits for.
torch.library.define("mmlaunch::sum_over_group", "(Tensor(a!) tensor, str group) -> ()")


def _all_reduce(tensor: Tensor, group: str) -> None:
    _COMMS[group].all_reduce(tensor)


torch.library.impl("mmlaunch::sum_over_group", "CompositeExplicitAutograd", _all_reduce)
# On shapes alone nobody would answer a sum.
torch.library.register_fake("mmlaunch::sum_over_group", lambda *_: None)
_sum = cast("Callable[[Tensor, str], None]", torch.ops.mmlaunch.sum_over_group.default)


class GroupSums:
    """The sums of one block over the tensor-parallel group that runs it.

    Args:
        comm: of the group.

    Attributes:
        rows: of the block's activations.
    """

    def __init__(self, comm: TensorParallelComm) -> None:
        self.group = _group(comm)
        self.rows = BlockRows()
        # Inputs of column-cut Linears since the last row-cut one, and what these compute with.
        self._entered: list[tuple[Tensor, Tensor]] = []

    def enter(self, x: Tensor) -> Tensor:
        """Megatron's f: the same values; the gradient is summed once for all who take them."""
        for known, entered in self._entered:
            if known is x:
                return entered
        entered = cast(Tensor, _Enter.apply(x, self.group.name))
        self._entered.append((x, entered))
        return entered

    def leave(self, linear: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
        """A row-cut product and Megatron's g: the sum over the group; the gradient as it comes."""
        # Before the product: recomputation of a block may end inside of its last one.
        self._entered.clear()
        self.rows.clear()
        if self.rows.cuts is not None:
            return self.rows.sum(linear(x, weight))
        return cast(Tensor, _Leave.apply(linear(x, weight), self.group.name))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy: the incoming gradient may be in use by another consumer.
        total = grads[0].clone(memory_format=torch.contiguous_format)
        _sum(total, ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.mark_dirty(x)
        _sum(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def sum_gradients(parameters: Iterable[nn.Parameter], comm: TensorParallelComm) -> None:
    """Sum the gradients of parameters over a group in each backward."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(partial(summed, comm=comm))


def summed(gradient: Tensor, comm: TensorParallelComm) -> Tensor:
    """The sum of a gradient over a group."""
    # A copy: the incoming gradient may be in use by another consumer.
    total = gradient.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


def _linear(block: nn.Module, name: str, where: str) -> nn.Linear:
    try:
        found = block.get_submodule(name)
    except AttributeError:
        children = [child for child, m in block.named_modules() if isinstance(m, nn.Linear)]
        raise InvalidInputError(
            f"{where}: tp_plan names {name!r}, which the block does not have",
            hint=f"its Linears are {', '.join(children) or '(none)'}",
        ) from None
    plain = isinstance(found, nn.Linear) and type(found).forward is nn.Linear.forward
    if not plain or "weight" not in found._parameters:
        raise InvalidInputError(
            f"{where}: tp_plan names {name!r}, a {type(found).__name__}",
            hint="only nn.Linear can be cut; leave others out of tp_plan to replicate them",
        )
    return cast(nn.Linear, found)


def _check_not_tied(block: nn.Module, plan: dict[str, ShardStyle], where: str) -> None:
    first: dict[nn.Parameter, str] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, name)
        cut = [n for n in (other, name) if n.rpartition(".")[0] in plan]
        if other != name and cut:
            raise InvalidInputError(
                f"{where}: tp_plan cuts {cut[0]}, which is tied to "
                f"{name if cut[0] == other else other}",
                hint="leave it out of tp_plan: tied parameters stay whole",
            )


def _check_sizes(
    block: nn.Module,
    name: str,
    linear: nn.Linear,
    *,
    style: ShardStyle,
    parts: int,
    count: int,
    where: str,
) -> None:
    width = linear.in_features if style == "rowwise" else linear.out_features
    side = "in_features" if style == "rowwise" else "out_features"
    packed = f" in {parts} parts" if parts > 1 else ""
    if parts < 1 or width % (parts * count):
        raise InvalidInputError(
            f"{where}: {name} has {side} {width}{packed}, which tp {count} does not divide",
            hint=f"choose a tp that divides {width // max(parts, 1)}, or take {name} out of "
            "tp_plan with the Linears that share its channels",
        )
    part = width // parts
    head_dim = getattr(block.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(head_dim, int) and part % head_dim == 0 and (part // count) % head_dim:
        raise InvalidInputError(
            f"{where}: {name} has {part // head_dim} heads of {head_dim} channels, "
            f"which tp {count} does not divide",
            hint=f"choose a tp that divides {part // head_dim}",
        )


def _parameters_to_cut(linear: nn.Linear, style: ShardStyle) -> list[tuple[str, nn.Parameter]]:
    """A Linear's parameters but for a row-cut one's bias: that is added once, after the sum."""
    return [
        (name, full)
        for name, full in linear.named_parameters()
        if not (style == "rowwise" and full.dim() == 1)
    ]


def _cut(
    linear: nn.Linear, style: ShardStyle, parts: int, index: int, count: int
) -> dict[str, ShardLayout]:
    """Replace a Linear's parameters by their shards, on memory of their own."""
    shards: dict[str, ShardLayout] = {}
    for name, full in _parameters_to_cut(linear, style):
        shards[name] = shard_layout(tuple(full.shape), style, index, count, parts)
        local = shards[name].take(full.detach())
        setattr(linear, name, nn.Parameter(local, requires_grad=full.requires_grad))
    linear.out_features, linear.in_features = linear.weight.shape
    return shards


Comm = Callable[[Ranks], TensorParallelComm]
# A Linear or a block's sums, the attribute that says on which shard it computes or in which
# group, and its value.
_GroupAttribute = tuple[nn.Module | GroupSums, str, Any]


class TPGroups:
    """The shard of each block that a rank holds, and the groups in which it runs the block.

    Args:
        program: the whole program.
        rank: this rank.

    Attributes:
        running: stage whose instruction the rank runs now.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self._program, self._rank = program, rank
        self.running: int | None = None
        self._groups: dict[tuple[str, int], list[Ranks]] = {}
        self._attributes: dict[tuple[int, int], list[_GroupAttribute]] = {}
        # (stage, block) for whose replicated parameters another rank of the group contributes.
        self._left_out: set[tuple[int, int]] = set()
        # By (stage, parameter), the group that sums its gradient.
        self._partial: dict[tuple[int, nn.Parameter], TensorParallelComm] = {}
        self._hooked: set[nn.Parameter] = set()

    def groups(self, owner: str, index: int) -> list[Ranks]:
        """The tensor-parallel groups of all ranks that run a block."""
        if (owner, index) not in self._groups:
            users = (
                stage
                for stage in self._program.stages
                if stage.owner == owner and stage.blocks[0] <= index < stage.blocks[1]
            )
            groups = dict.fromkeys(group for stage in users for group in stage.ranks)
            self._groups[owner, index] = list(groups)
        return self._groups[owner, index]

    def shard(self, owner: str, index: int) -> tuple[int, int]:
        """(shard, of how many) of a block that the rank holds."""
        return held_shards(self.groups(owner, index))[self._rank]

    def has_several_shards(self, owner: str, index: int) -> bool:
        """Whether some rank runs a block as two different shards."""
        return is_crowded(self.groups(owner, index))

    def prepare(
        self, owner: str, blocks: Mapping[int, nn.Module], stages: Sequence[Stage], comm: Comm
    ) -> None:
        """Prepare blocks of a module that the rank runs in several groups.

        Args:
            owner: the module.
            blocks: the rank's, by index, cut or whole.
            stages: the rank's that run them.
            comm: the tensor-parallel group of given ranks.
        """
        users: defaultdict[int, dict[int, Ranks]] = defaultdict(dict)
        for stage in stages:
            for group in stage.ranks:
                for index in range(*stage.blocks) if self._rank in group else ():
                    users[index][stage.index] = group
        for index, groups in users.items():
            if len(set(groups.values())) > 1:
                block, comms = blocks[index], {g: comm(tuple(sorted(g))) for g in groups.values()}
                whole = self.shard(owner, index) == (0, 1)
                sums = GroupSums(next(iter(comms.values()))) if whole else sums_of(block)
                if sums is None:
                    continue
                for stage, group in groups.items():
                    self._attributes[stage, index] = [
                        (sums, "group", _group(comms[group])),
                        *(self._windows(f"{owner}.{index}", block, group, sums) if whole else ()),
                    ]

    def _windows(
        self, where: str, block: nn.Module, group: Ranks, sums: GroupSums
    ) -> list[_GroupAttribute]:
        """The shard of a whole block that its Linears use in a group."""
        index, count = group.index(self._rank), len(group)
        found = window_block(block, index=index, count=count, sums=sums, where=where)
        return [(linear, "tp_window", window if count > 1 else None) for linear, window in found]

    def enter(self, stage: Stage, index: int) -> None:
        """Let a block compute its shard in the group of the stage that runs it now."""
        for holder, name, value in self._attributes.get((stage.index, index), ()):
            setattr(holder, name, value)

    def leave_out(self, stage: Stage, index: int) -> None:
        """Take a block's replicated gradients from the first rank of a stage's group only."""
        if stage.place(self._rank)[1] > 0:
            self._left_out.add((stage.index, index))

    def sum_partial(
        self, stage: Stage, index: int, parameter: nn.Parameter, comm: TensorParallelComm
    ) -> None:
        """Sum a replicated parameter's gradient over a stage's group, in each backward."""
        self._partial[stage.index, parameter] = comm
        self.hook(index, parameter)

    def hook(self, index: int, parameter: nn.Parameter) -> None:
        """Let :meth:`leave_out` and :meth:`sum_partial` hold for a parameter of a block.

        A parameter with a hook gets its gradient in ``I`` of a split backward, where the ranks of
        a group are together.
        """
        if parameter not in self._hooked:
            self._hooked.add(parameter)
            parameter.register_hook(partial(self._contributed, index, parameter))

    def _contributed(self, index: int, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        comm = self._partial.get((cast(int, self.running), parameter))
        if comm is not None:
            gradient = summed(gradient, comm)
        if (self.running, index) in self._left_out:
            return torch.zeros_like(gradient)
        return gradient


def group_name(comm: TensorParallelComm) -> str:
    """The name by which operators know a group."""
    return _group(comm).name


def sums_of(block: nn.Module) -> GroupSums | None:
    """The sums of a cut block; None where it cuts nothing."""
    return next((m.tp_sums for m in block.modules() if isinstance(m, CutLinear)), None)
