"""Sequence parallelism: the rows of a block's activations, cut over its tensor-parallel group.

Between cut Linears a rank has some of the rows (tokens, dim -2) with all their channels, so that
norms, residual sums and what they keep for backward are shared out. Submodules with cut Linears
(*regions*) take all rows: an all-gather before them, and a reduce-scatter after each row-cut
product in place of its all-reduce. A column-cut Linear keeps the rank's own rows only, and
gathers again in backward, while it computes the gradient of its input. A submodule with matrices
that nobody cuts (an embedding, a head) takes all rows too and computes them on each rank, as
without sequence parallelism.

Hooks on the submodules do this; a block's own code stays as it is. It sees as many rows as the
rank has, so it may do with them only what each row can do alone:
:mod:`mmplan.proof.tp_states` finds blocks that do more. Of R rows rank i of n has R*i//n up to
R*(i+1)//n, so any R can be cut.

Everything that moves rows is an operator of torch: compiled blocks have them in their graphs, and
the proof and the counting of kernels see them.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
arXiv:2205.05198, section 4.2.2 (the operators g and its conjugate).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Past the checker, which takes the decorator's ctx for position-only.
once = cast("Callable[[Any], Any]", once_differentiable)


class RowGroup(Protocol):
    """A tensor-parallel group whose ranks share out rows."""

    @property
    def index(self) -> int:
        """This rank's place in it."""
        ...

    @property
    def count(self) -> int:
        """Ranks of it."""
        ...

    def start_gather(self, mine: Tensor) -> Callable[[], Tensor | list[Tensor]]:
        """What waits for every rank's ``mine``, all of one shape.

        It gives one tensor [count, ...] where that costs less.
        """
        ...

    def sum_own(self, parts: Tensor) -> Tensor:
        """Of parts [count, ...] for each rank the sum of everyone's for this one."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShapeGroup:
    """A group of which one rank is traced or counted, by shapes alone."""

    index: int
    count: int

    def start_gather(self, mine: Tensor) -> Callable[[], list[Tensor]]:
        """As many as there would be."""
        return lambda: [mine] * self.count

    def sum_own(self, parts: Tensor) -> Tensor:
        """One that is as large."""
        return parts[self.index].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCuts:
    """Where a block's rows are cut and brought together; names of submodules.

    Attributes:
        takes: the block is given its own rows of its first tensor.
        gives: its first output is the rank's own rows.
        regions: take all rows, and have cut Linears.
        whole: take all rows, and compute all of them on each rank.
        scattered: of whose output the rank goes on with its own rows.
        summed: cut embeddings, of whose sum the rank takes its own rows.
    """

    takes: bool
    gives: bool = False
    regions: tuple[str, ...]
    whole: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()


# --- operators -------------------------------------------------------------------------

# By the names by which operators know them.
ROW_GROUPS: WeakValueDictionary[str, RowGroup] = WeakValueDictionary()


def own_rows(rows: int, index: int, count: int) -> tuple[int, int]:
    """The rows [first, end) of a rank; at most one more than another rank's."""
    return rows * index // count, rows * (index + 1) // count


def _num_own(rows: int, group: str) -> int:
    at = ROW_GROUPS[group]
    first, end = own_rows(rows, at.index, at.count)
    return end - first


def _gather(shard: Tensor, rows: int, group: str) -> Tensor:
    return _start_gather(shard, rows, group)()


def _start_gather(shard: Tensor, rows: int, group: str) -> Callable[[], Tensor]:
    at = ROW_GROUPS[group]
    # All ranks send as many; the last of those that have fewer is of no use.
    most = -(-rows // at.count)
    finish = at.start_gather(_padded(shard, most))
    if shard.is_cuda and rows == at.count * most and math.prod(shard.shape[:-2]) == 1:
        return lambda: cast(Tensor, finish()).view(*shard.shape[:-2], rows, shard.shape[-1])
    full, (first, end) = _of_rows(shard, rows), own_rows(rows, at.index, at.count)
    # While the others' are under way.
    full[..., first:end, :] = shard

    def all_rows() -> Tensor:
        for index, part in enumerate(finish()):
            if index != at.index:
                first, end = own_rows(rows, index, at.count)
                full[..., first:end, :] = part[..., : end - first, :]
        return full

    return all_rows


def _sum(full: Tensor, group: str) -> Tensor:
    at = ROW_GROUPS[group]
    rows = full.shape[-2]
    most = -(-rows // at.count)
    if rows == at.count * most:
        return at.sum_own(full.unflatten(-2, (at.count, most)).movedim(-3, 0))
    spans = (own_rows(rows, index, at.count) for index in range(at.count))
    parts = [_padded(full[..., first:end, :], most) for first, end in spans]
    mine = at.sum_own(torch.stack(parts))
    return mine[..., : _num_own(rows, group), :].contiguous()


def _padded(x: Tensor, most: int) -> Tensor:
    """With as many rows as the rank that has most."""
    missing = most - x.shape[-2]
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def _own(full: Tensor, group: str) -> Tensor:
    # A copy: a view would keep all rows alive.
    at = ROW_GROUPS[group]
    first, end = own_rows(full.shape[-2], at.index, at.count)
    return full[..., first:end, :].clone(memory_format=torch.contiguous_format)


def _of_rows(like: Tensor, rows: int) -> Tensor:
    """Without values."""
    *lead, _, width = like.shape
    return like.new_empty((*lead, rows, width))


def _define(name: str, arguments: str, run: Any, shape: Any) -> Any:
    torch.library.define(f"mmplan::{name}", f"({arguments}) -> Tensor")
    torch.library.impl(f"mmplan::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"mmplan::{name}", shape)
    return getattr(torch.ops.mmplan, name).default


# All rows of everyone's own ones; of what the gradient is, the name says.
_GATHER = ("Tensor shard, SymInt rows, str group", _gather, lambda x, rows, _: _of_rows(x, rows))
_gather_rows: Callable[[Tensor, int, str], Tensor] = _define("gather_rows", *_GATHER)
_all_rows: Callable[[Tensor, int, str], Tensor] = _define("all_rows", *_GATHER)
# Own rows of the sum, and own rows of what is the same on all ranks.
_sum_rows: Callable[[Tensor, str], Tensor] = _define(
    "sum_rows",
    "Tensor full, str group",
    _sum,
    lambda x, group: _of_rows(x, _num_own(x.shape[-2], group)),
)
_own_rows: Callable[[Tensor, str], Tensor] = _define(
    "own_rows",
    "Tensor full, str group",
    _own,
    lambda x, group: _of_rows(x, _num_own(x.shape[-2], group)),
)
# In backward: the gradient is not used, but says that the gather belongs behind it. Otherwise a
# compiler would gather in forward, and keep all rows.
_gather_again: Callable[[Tensor, Tensor, str], Tensor] = _define(
    "gather_again",
    "Tensor shard, Tensor grad, str group",
    lambda shard, grad, group: _gather(shard, grad.shape[-2], group),
    lambda shard, grad, _: _of_rows(shard, grad.shape[-2]),
)


class _Gather(torch.autograd.Function):
    """All rows for cut Linears; each rank has a part of their gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, group: str) -> Tensor:
        ctx.group = group
        return _gather_rows(shard, rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_rows(grads[0], ctx.group), None, None


class _AllRows(torch.autograd.Function):
    """All rows for what each rank computes alike; so is their gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, group: str) -> Tensor:
        ctx.group = group
        return _all_rows(shard, rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(grads[0], ctx.group), None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, group: str) -> Tensor:
        ctx.group, ctx.rows = group, full.shape[-2]
        return _own_rows(full, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grads[0], ctx.rows, ctx.group), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, group: str) -> Tensor:
        ctx.group, ctx.rows = group, full.shape[-2]
        return _sum_rows(full, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grads[0], ctx.rows, ctx.group), None


class SharedRows:
    """All rows, and a rank's own ones, of which they can be had again.

    Linears that share them gather once in backward: the last one that needs them lets them go.

    Attributes:
        full: all rows, until the next row-cut product.
    """

    def __init__(self, full: Tensor, shard: Tensor, group: str) -> None:
        self.full: Tensor | None = full
        self.group = group
        self._shard = shard.detach()
        self._kept: dict[torch.dtype, Tensor] = {}
        self._finish: Callable[[], Tensor] | None = None
        self._again: Tensor | None = None
        self._uses = 0

    def kept(self, dtype: torch.dtype) -> Tensor:
        """What a Linear keeps: the rank's own rows in the type in which it computes."""
        if torch.compiler.is_compiling():
            return self._shard.to(dtype)
        if dtype not in self._kept:
            self._kept[dtype] = self._shard.to(dtype)
        return self._kept[dtype]

    def use(self, weight: Tensor) -> SharedRows | None:
        """Count a Linear that will want all rows again; None where compilers look on."""
        if torch.compiler.is_compiling() or not weight.requires_grad:
            return None
        self._uses += 1
        return self

    def start(self, shard: Tensor, grad: Tensor) -> None:
        """Begin with :meth:`again`, which comes behind a product.

        Where shapes are traced an operator does all of it.
        """
        if isinstance(ROW_GROUPS[self.group], ShapeGroup):
            return
        if self._again is None and self._finish is None:
            self._finish = _start_gather(shard, grad.shape[-2], self.group)

    def again(self, shard: Tensor, grad: Tensor) -> Tensor:
        """All rows of what :meth:`kept` gave, in backward."""
        if self._finish is not None:
            self._again, self._finish = self._finish(), None
        elif self._again is None:
            self._again = _gather_again(shard, grad, self.group)
        found = self._again
        self._uses -= 1
        if not self._uses:
            self._again = None
        return found

    def forget(self) -> None:
        """The Linears have taken them."""
        # What autograd keeps refers to this object: it must not hold all rows, nor a second copy.
        self.full = None
        self._kept = {}
        del self._shard


def all_rows_again(shared: SharedRows | None, shard: Tensor, grad: Tensor, group: str) -> Tensor:
    """All rows in backward, gathered once for the Linears that share them."""
    return _gather_again(shard, grad, group) if shared is None else shared.again(shard, grad)


def linear_of_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: SharedRows | None = None
) -> Tensor:
    """:func:`torch.nn.functional.linear`, which of gathered rows keeps the rank's own ones only."""
    if rows is None:
        return functional.linear(x, weight, bias)
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        narrow = torch.get_autocast_dtype(kind)
        x, weight = x.to(narrow), weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    return cast(
        Tensor,
        _KeepsOwnRows.apply(x, rows.kept(x.dtype), weight, bias, rows.group, rows.use(weight)),
    )


class _KeepsOwnRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        full: Tensor,
        shard: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: str,
        shared: SharedRows | None,
    ) -> Tensor:
        ctx.save_for_backward(shard, weight)
        ctx.group, ctx.shared = group, shared
        return functional.linear(full, weight, bias)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (shard, weight) = grads, ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if needs_weight and ctx.shared is not None:
            ctx.shared.start(shard, grad)
        grad_x = grad.matmul(weight) if needs_x else None
        grad_weight = grad_bias = None
        if needs_weight:
            full = all_rows_again(ctx.shared, shard, grad, ctx.group)
            grad_weight = _flat(grad).t().mm(_flat(full))
        if needs_bias:
            grad_bias = _flat(grad).sum(0)
        return grad_x, None, grad_weight, grad_bias, None, None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# --- blocks ----------------------------------------------------------------------------


class BlockRows:
    """The rows of one block's activations, while it runs.

    Attributes:
        cuts: where they are cut; None where they are not, in this run of the block.
        group: name of the group that shares them out.
        length: all rows; 0 until a submodule has made them.
    """

    def __init__(self) -> None:
        self.cuts: RowCuts | None = None
        self.group = ""
        self.length = 0
        self._gathered: list[SharedRows] = []
        self._hooked: set[tuple[str, str]] = set()

    def hook(self, block: nn.Module, cuts: RowCuts) -> list[Any]:
        """Let a block's submodules take and give rows where a run says so; returns the hooks."""
        made: list[Any] = []
        for kind, names in (
            ("regions", cuts.regions),
            ("whole", cuts.whole),
            ("scattered", cuts.scattered),
        ):
            for name in names:
                if (kind, name) in self._hooked:
                    continue
                self._hooked.add((kind, name))
                module = block.get_submodule(name)
                if kind == "scattered":
                    made.append(module.register_forward_hook(partial(self._leave, name)))
                    continue
                hook = self._enter_region if kind == "regions" else self._enter_whole
                made.append(
                    # Before hooks that look at the rows.
                    module.register_forward_pre_hook(
                        partial(hook, name), with_kwargs=True, prepend=True
                    )
                )
        return made

    def begin(self, cuts: RowCuts | None, group: str, length: int) -> None:
        """A run of the block begins."""
        self.cuts, self.group, self.length = cuts, group, length
        self._gathered.clear()

    def gathered(self, x: Tensor) -> SharedRows | None:
        """Of what all rows are that a Linear takes; None where they were not gathered."""
        for rows in self._gathered:
            if rows.full is x:
                return rows
        return None

    def clear(self) -> None:
        """The Linears before a row-cut product have taken their rows."""
        for rows in self._gathered:
            rows.forget()
        self._gathered.clear()

    def sum(self, full: Tensor) -> Tensor:
        """This rank's rows of a row-cut product's sum."""
        return cast(Tensor, _SumRows.apply(full, self.group))

    def sum_of_table(self, name: str, full: Tensor) -> Tensor | None:
        """This rank's rows of what a cut embedding's ranks found; None where all are wanted."""
        if self.cuts is None or name not in self.cuts.summed or not self._has_rows(full):
            return None
        return self.sum(full)

    def _has_rows(self, full: Tensor) -> bool:
        """Whether there is something to share out; the first to ask says how much."""
        self.length = self.length or full.shape[-2]
        if not self.length:
            self.cuts = None
        return bool(self.length)

    def _enter_region(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.cuts is None or name not in self.cuts.regions:
            return None
        return _first_argument(args, kwargs, self._gather)

    def _enter_whole(
        self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.cuts is None or name not in self.cuts.whole:
            return None
        return _first_argument(args, kwargs, self._all)

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        if self.cuts is None or name not in self.cuts.scattered:
            return None
        if not self._has_rows(first_tensor(output)):
            return None
        return with_first(output, partial(take_own, group=self.group))

    def _gather(self, shard: Tensor) -> Tensor:
        full = cast(Tensor, _Gather.apply(shard, self.length, self.group))
        self._gathered.append(SharedRows(full, shard, self.group))
        return full

    def _all(self, shard: Tensor) -> Tensor:
        return take_all(shard, rows=self.length, group=self.group)


def take_own(full: Tensor, *, group: str) -> Tensor:
    """A rank's own rows of what is the same on all ranks; the gradient is all rows' again."""
    return cast(Tensor, _OwnRows.apply(full, group))


def take_all(shard: Tensor, *, rows: int, group: str) -> Tensor:
    """All rows of everyone's own ones, for what all ranks compute alike."""
    return cast(Tensor, _AllRows.apply(shard, rows, group))


def _first_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (with_first(args[0], change), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: with_first(kwargs[name], change)}


def first_tensor(tree: Any) -> Any:
    """The first tensor of a tensor or a tuple of such; what else stands first is returned."""
    return first_tensor(tree[0]) if isinstance(tree, tuple) and tree else tree


def with_first(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with its first tensor changed."""
    if not isinstance(tree, tuple):
        return change(tree)
    first, *others = cast("tuple[Any, ...]", tree)
    changed = with_first(first, change)
    kind: Any = type(tree)
    return kind(changed, *others) if hasattr(kind, "_fields") else (changed, *others)


def has_rows(tensor: Any) -> bool:
    """Whether something is activations with rows."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim() > 1


class RowFlow:
    """What goes from block to block: all rows, or a rank's own.

    Attributes:
        length: all rows, where a rank has its own; 0 where it has all.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self.length = 0

    def before(self, cuts: RowCuts | None, given: Sequence[Any]) -> tuple[Any, ...]:
        """A block's arguments as it takes them."""
        takes = cuts is not None and cuts.takes
        if takes and not self.length:
            self.length = first_tensor(given[0]).shape[-2]
            if self.length:
                own = with_first(given[0], partial(take_own, group=self._group))
                return own, *given[1:]
        if not takes and self.length:
            whole = self.end(given[0])
            return whole, *given[1:]
        return tuple(given)

    def after(self, rows: BlockRows | None) -> None:
        """A block has run."""
        gives = rows is not None and rows.cuts is not None and rows.cuts.gives
        self.length = rows.length if rows is not None and gives else 0

    def end(self, output: Any) -> Any:
        """The output with all rows."""
        if not self.length:
            return output
        whole = partial(take_all, rows=self.length, group=self._group)
        self.length = 0
        return with_first(output, whole)


# --- placement -------------------------------------------------------------------------


def regions_of(styles: Mapping[str, str]) -> tuple[str, ...] | None:
    """The submodules that take all rows for their cut Linears; None where the block itself does.

    A row-cut Linear's region is the smallest submodule that has column-cut ones as well. Parts that
    are cut along the vocabulary have none.

    Args:
        styles: of the cut Linears, by name.
    """
    columns = [name for name, style in styles.items() if style not in ("rowwise", "vocab")]
    found: set[str] = set()
    for name, style in styles.items():
        region = name
        while style == "rowwise" and region:
            region = region.rpartition(".")[0]
            if any(other.startswith(f"{region}.") for other in columns):
                break
        if not region:
            return None
        if style == "rowwise":
            found.add(region)
    outer = {n for n in found if not any(n.startswith(f"{o}.") for o in found)}
    covered = all(any(c.startswith(f"{n}.") for n in outer) for c in columns)
    return tuple(sorted(outer)) if outer and covered else None


def whole_submodules(block: nn.Module, regions: Sequence[str]) -> list[str]:
    """The outermost submodules that have matrices, and no region."""
    found: list[str] = []

    def walk(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            if name in regions:
                continue
            if any(region.startswith(f"{name}.") for region in regions):
                walk(child, f"{name}.")
            elif any(parameter.dim() > 1 for parameter in child.parameters()):
                found.append(name)

    walk(block, "")
    return found
