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

Embeddings and Linears that give logits are cut along the vocabulary (``vocab``): a rank has the
rows of some tokens. An embedding's ranks look up their own tokens, and sum what they found. A
Linear is a column-cut one; its logits are brought together, unless a loss takes a rank's own ones
(:attr:`GroupSums.keeps_logits`): then nobody ever has all of them.

With sequence parallelism a rank has its own rows only between the cut Linears
(:mod:`mmplan.proof.row_cuts`).

A rank may run a block in several groups: for several tasks, say. With the same shard in all of
them it holds that shard, and only the group of its sums changes. With different shards it holds
the block whole, and each group uses its shard of it. There replicated parameters would contribute
to a sum once too often, so the first rank of each group contributes, and the backwards of the
others leave their gradients out (:mod:`mmplan.program.shards`).

Source: Megatron-LM, arXiv:1909.08053, section 3 (the operators f and g, and the vocabulary).
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

STYLES: tuple[ShardStyle, ...] = ("colwise", "rowwise", "packed_colwise", "vocab")
# First token, end, and of how many: a shard of a vocabulary.
Tokens = tuple[int, int, int]
# Whole parameters to a rank's shards of them.
Shards = dict[nn.Parameter, nn.Parameter]


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
    shards: Shards | None = None,
) -> dict[str, ShardLayout]:
    """Cut a block's Linears and embeddings in place to one rank's shard of a group.

    Args:
        block: may carry ``tp_plan``: submodule name to style; without it the block stays
            whole on every rank.
        index: this rank's position in the group.
        count: ranks of the group.
        comm: sums tensors over the group.
        where: the block's name in errors (``vision.3``).
        shards: of parameters that other blocks of this module share; those of this block are
            added.

    Returns:
        Layouts of the cut parameters by name inside the block, of tied ones by each of their
        names; the others are replicated.

    Raises:
        InvalidInputError: the plan names no Linear of the block, an unknown style, sizes
            (heads too) that ``count`` does not divide, or tied parameters that are not cut alike.
    """
    plan = block_plan(block, where=where)
    if count == 1:
        return {}
    _check_tied_alike(block, plan, where)
    shards = {} if shards is None else shards
    layouts: dict[str, ShardLayout] = {}
    sums = GroupSums(comm)
    for name, style in plan.items():
        layer = _layer(block, name, style, where)
        parts = _parts(layer, name, style)
        _check_sizes(block, name, layer, style=style, parts=parts, count=count, where=where)
        cut = _cut(layer, style, parts, index, count, shards)
        for parameter, layout in cut.items():
            layouts[f"{name}.{parameter}"] = layout
        layer.tp_sums = sums
        if style == "vocab":
            layer.tp_tokens = _tokens(cut["weight"].boxes, cut["weight"].full_shape)
        layer.__class__ = _kind(layer, style)
        if isinstance(layer, CutEmbedding):
            layer.tp_name = name
            layer.padding_idx = _own_padding(layer.padding_idx, layer.tp_tokens)
    return layouts


def _kind(layer: nn.Module, style: ShardStyle) -> type[nn.Module]:
    """The class of a layer that is cut."""
    if isinstance(layer, nn.Embedding):
        return CutEmbedding
    kinds = {"rowwise": _RowwiseLinear, "vocab": VocabularyLinear}
    return kinds.get(style, _ColwiseLinear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The shard of a whole layer that one tensor-parallel group uses on this rank.

    Attributes:
        weight, bias: boxes of the shard; None for all of it.
    """

    style: ShardStyle
    weight: list[Box]
    bias: list[Box] | None


def window_block(
    block: nn.Module, *, index: int, count: int, sums: GroupSums, where: str = "block"
) -> list[tuple[WindowedLinear | WindowedEmbedding, Window]]:
    """Let a block stay whole and run as a shard of a tensor-parallel group where asked to.

    Args:
        block, index, count, where: as for :func:`shard_block`.
        sums: the block's.

    Returns:
        The layers that the group cuts, each with its shard; until one is set as ``tp_window``
        the layer computes as before.

    Raises:
        InvalidInputError: as :func:`shard_block`.
    """
    plan = block_plan(block, where=where)
    _check_tied_alike(block, plan, where)
    found: list[tuple[WindowedLinear | WindowedEmbedding, Window]] = []
    for name, style in plan.items():
        known = block.get_submodule(name)
        is_known = isinstance(known, WindowedLinear | WindowedEmbedding)
        layer: Any = known if is_known else _layer(block, name, style, where)
        parts = _parts(layer, name, style)
        _check_sizes(block, name, layer, style=style, parts=parts, count=count, where=where)
        boxes = {
            parameter: shard_boxes(tuple(full.shape), style, index, count, parts)
            for parameter, full in _parameters_to_cut(layer, style)
        }
        kinds: tuple[Any, Any] = WindowedLinear, WindowedEmbedding
        layer.__class__ = kinds[isinstance(layer, nn.Embedding)]
        layer.tp_window, layer.tp_sums = None, sums
        window = Window(style=style, weight=boxes["weight"], bias=boxes.get("bias"))
        found.append((layer, window))
    return found


def cut_parameters(block: nn.Module, *, where: str = "block") -> dict[str, ShardLayout]:
    """Layouts of a whole block's parameters that tensor parallelism would cut, by name inside it.

    Raises:
        InvalidInputError: the plan names no Linear of the block, or an unknown style.
    """
    found: dict[str, ShardLayout] = {}
    for name, style in block_plan(block, where=where).items():
        layer = _layer(block, name, style, where)
        parts = _parts(layer, name, style)
        for parameter, full in _parameters_to_cut(layer, style):
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


class VocabularyLinear(CutLinear):
    """Rows of the weight: whole input, the logits of some tokens or of all."""

    tp_tokens: Tokens

    def compute(self, linear: Callable[..., Tensor], input: Tensor) -> Tensor:
        """[..., in] to [..., vocab], or the rank's own of them; the input's gradient is summed."""
        sums = self.tp_sums
        rows = sums.rows.gathered(input)
        x = sums.enter(input) if rows is None else input
        try:
            logits = linear(x, self.weight, self.bias, rows)
        finally:
            # Recomputation of a block may end inside of the product.
            sums.forget()
        return logits if sums.keeps_logits else sums.all_logits(logits, self.tp_tokens)


class CutEmbedding(nn.Embedding):
    """An embedding of which this rank holds the rows of some tokens."""

    tp_sums: GroupSums
    tp_tokens: Tokens
    tp_name: str

    def forward(self, input: Tensor) -> Tensor:
        """Ids [...] to [..., width], summed over the group; of rows that are cut its own ones."""
        return self.tp_sums.looked_up(self.lookup, input, self.tp_tokens, self.tp_name)

    def lookup(self, input: Tensor) -> Tensor:
        """Rows of the rank's own tokens, counted from its first one."""
        return functional.embedding(input, self.weight, self.padding_idx)


class WindowedEmbedding(nn.Embedding):
    """A whole embedding of which tensor-parallel groups use a shard, in turn."""

    tp_window: Window | None
    tp_sums: GroupSums

    def forward(self, input: Tensor) -> Tensor:
        """As the embedding, or as this rank's shard of it in the group of the window."""
        window = self.tp_window
        if window is None:
            return functional.embedding(input, self.weight, self.padding_idx)
        tokens = _tokens(window.weight, self.weight.shape)
        padding = _own_padding(self.padding_idx, tokens)
        weight = _cat_boxes(self.weight, window.weight)
        return self.tp_sums.looked_up(
            lambda own: functional.embedding(own, weight, padding), input, tokens
        )


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
        out = functional.linear(self.tp_sums.enter(input), weight, bias)
        if window.style != "vocab":
            return out
        return self.tp_sums.all_logits(out, _tokens(window.weight, self.weight.shape))


def _tokens(boxes: Sequence[Box], full_shape: Sequence[int]) -> Tokens:
    """Of a weight's shard."""
    (box,) = boxes
    return box.offsets[0], box.offsets[0] + box.sizes[0], full_shape[0]


def _own_padding(padding: int | None, tokens: Tokens) -> int | None:
    """The token without a gradient, counted from the rank's first one; None if others have it."""
    first, end, _ = tokens
    return padding - first if padding is not None and first <= padding < end else None


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
        keeps_logits: whether the block's first output is the rank's own logits.
    """

    def __init__(self, comm: TensorParallelComm) -> None:
        self.group = _group(comm)
        self.rows = BlockRows()
        self.keeps_logits = False
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
        self.forget()
        if self.rows.cuts is not None:
            return self.rows.sum(linear(x, weight))
        return cast(Tensor, _Leave.apply(linear(x, weight), self.group.name))

    def forget(self) -> None:
        """The Linears that share an input have taken it."""
        self._entered.clear()
        self.rows.clear()

    def looked_up(
        self, lookup: Callable[[Tensor], Tensor], ids: Tensor, tokens: Tokens, name: str = ""
    ) -> Tensor:
        """Rows of an embedding for ids [...], each found by the rank that has its token."""
        first, end, vocab = tokens
        mine = torch.ones_like(ids, dtype=torch.bool)
        # No end of the vocabulary is an end of these: the lookup meets what is beyond.
        if first > 0:
            mine = mine & (ids >= first)
        if end < vocab:
            mine = mine & (ids < end)
        rows = lookup(torch.where(mine, ids - first, 0))
        found = rows.masked_fill(~mine[..., None], 0)
        own = self.rows.sum_of_table(name, found)
        return cast(Tensor, _Leave.apply(found, self.group.name)) if own is None else own

    def all_logits(self, own: Tensor, tokens: Tokens) -> Tensor:
        """Logits of the whole vocabulary [..., vocab], of everyone's own ones."""
        first, end, vocab = tokens
        padded = functional.pad(own, (first, vocab - end))
        return cast(Tensor, _Leave.apply(padded, self.group.name))


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


def gathered(tensor: Tensor, *, comm: TensorParallelComm) -> Tensor:
    """[...] of every rank of a group, as [count, ...]."""
    found = cast(RowGroup, comm).start_gather(tensor)()
    return found if isinstance(found, Tensor) else torch.stack(found)


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


def _layer(block: nn.Module, name: str, style: ShardStyle, where: str) -> Any:
    """The Linear that a plan cuts, or the embedding that it cuts along the vocabulary."""
    try:
        found = block.get_submodule(name)
    except AttributeError:
        children = [child for child, m in block.named_modules() if isinstance(m, nn.Linear)]
        raise InvalidInputError(
            f"{where}: tp_plan names {name!r}, which the block does not have",
            hint=f"its Linears are {', '.join(children) or '(none)'}",
        ) from None
    plain = isinstance(found, nn.Linear) and type(found).forward is nn.Linear.forward
    if style == "vocab" and isinstance(found, nn.Embedding):
        plain = type(found).forward is nn.Embedding.forward and not (
            found.max_norm or found.sparse or found.scale_grad_by_freq
        )
    if not plain or "weight" not in found._parameters:
        raise InvalidInputError(
            f"{where}: tp_plan names {name!r}, a {type(found).__name__}",
            hint="only nn.Linear can be cut, and nn.Embedding with the rule vocab (without "
            "max_norm, sparse and scale_grad_by_freq); leave others out of tp_plan to replicate "
            "them",
        )
    return found


def check_tied_alike(module: nn.Sequential, where: str) -> None:
    """Refuse a module of which one block cuts what another one has whole, or cuts otherwise.

    Args:
        module: of whole blocks.
        where: its name in errors.

    Raises:
        InvalidInputError: it is such a module.
    """
    plans = ((i, block_plan(block, where=f"{where}.{i}")) for i, block in enumerate(module))
    plan: dict[str, ShardStyle] = {
        f"{i}.{name}": style for i, own in plans for name, style in own.items()
    }
    _check_tied_alike(module, plan, where)


def _check_tied_alike(module: nn.Module, plan: Mapping[str, ShardStyle], where: str) -> None:
    first: dict[nn.Parameter, tuple[str, ShardStyle | None, int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        layer = name.rpartition(".")[0]
        style = plan.get(layer)
        own = name, style, _parts(module.get_submodule(layer), layer, style)
        other = first.setdefault(parameter, own)
        if own[1:] != other[1:]:
            (cut, rule, _), (tied, its, _) = (own, other) if style else (other, own)
            raise InvalidInputError(
                f"{where}: tp_plan cuts {cut} ({rule}), which is tied to {tied} ({its or 'whole'})",
                hint="give both of them one rule, or leave both out of tp_plan",
            )


def _parts(layer: nn.Module, name: str, style: ShardStyle | None) -> int:
    """The matrices of a layer that are cut apart."""
    return packed_parts(layer, name) if style == "packed_colwise" else 1


def _check_sizes(
    block: nn.Module,
    name: str,
    linear: Any,
    *,
    style: ShardStyle,
    parts: int,
    count: int,
    where: str,
) -> None:
    if style == "vocab":
        if len(linear.weight) < count:
            raise InvalidInputError(
                f"{where}: {name} has {len(linear.weight)} tokens for the {count} ranks of tp",
                hint=f"choose a tp of {len(linear.weight)} or less, or take it out of tp_plan",
            )
        return
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


def _parameters_to_cut(linear: nn.Module, style: ShardStyle) -> list[tuple[str, nn.Parameter]]:
    """A layer's parameters but for a row-cut one's bias: that is added once, after the sum."""
    return [
        (name, full)
        for name, full in linear.named_parameters()
        if not (style == "rowwise" and full.dim() == 1)
    ]


def _cut(
    linear: Any, style: ShardStyle, parts: int, index: int, count: int, shards: Shards
) -> dict[str, ShardLayout]:
    """Replace a layer's parameters by their shards, on memory of their own; tied ones are one."""
    layouts: dict[str, ShardLayout] = {}
    for name, full in _parameters_to_cut(linear, style):
        layout = layouts[name] = shard_layout(tuple(full.shape), style, index, count, parts)
        if full not in shards:
            local = layout.take(full.detach())
            shards[full] = nn.Parameter(local, requires_grad=full.requires_grad)
        setattr(linear, name, shards[full])
    if isinstance(linear, nn.Embedding):
        linear.num_embeddings = len(linear.weight)
    else:
        linear.out_features, linear.in_features = linear.weight.shape
    return layouts


Comm = Callable[[Ranks], TensorParallelComm]
# A layer or a block's sums, the attribute that says on which shard it computes or in which
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
        """The groups of all ranks that hold a block once."""
        if (owner, index) not in self._groups:
            users = (
                stage
                for stage in self._program.stages
                if stage.owner == owner and stage.blocks[0] <= index < stage.blocks[1]
            )
            groups = dict.fromkeys(group for stage in users for group in stage.holders)
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
            for group in stage.holders:
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
        """The shard of a whole block that its layers use in a group."""
        index, count = group.index(self._rank), len(group)
        found = window_block(block, index=index, count=count, sums=sums, where=where)
        return [(layer, "tp_window", window if count > 1 else None) for layer, window in found]

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
    cut = (m for m in block.modules() if isinstance(m, CutLinear | CutEmbedding))
    return next((m.tp_sums for m in cut), None)
