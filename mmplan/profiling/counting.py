"""FLOPs, bytes moved and bytes saved of a block, counted on the meta device.

Every kernel of a block's forward and backward is recorded with its FLOPs (torch's own
formulas), the bytes of its arguments and results, and the bytes that tensor parallelism
sums or gathers over the group. Attention and RMSNorm count as one fused kernel, as accelerators run
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mmplan.arrays import Floats
from mmplan.proof.row_cuts import BlockRows, linear_of_rows

CountState = Any  # a tensor, or a tuple of tensors
Product = tuple[int, int, int, int]
# Columns of a table of kernels.
COLUMNS = 10
FLOPS, MOVED, SUMMED, M, N, K, BATCH, KIND, ROWS, GATHERED = range(COLUMNS)
# Kinds of kernels, which reach different parts of a device's rates. POINTWISE is all else.
POINTWISE, PRODUCT, ATTENTION, NORM, SOFTMAX, ACTIVATION = range(6)

# No kernel runs for these: they make a name, or memory that another kernel fills.
_FREE = frozenset(
    [
        "detach",
        "alias",
        "lift_fresh",
        "_unsafe_view",
        "_reshape_alias",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    ]
)
# Operators that gather rows over the group, and that sum and scatter them.
_GATHERS = frozenset(f"mmplan::{name}" for name in ("gather_rows", "all_rows", "gather_again"))
_SCATTERS = "mmplan::sum_rows"
# How the names of norms' kernels begin.
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm")
_ACTIVATIONS = frozenset(["gelu", "silu", "sigmoid", "tanh", "mish", "softplus", "exp"])
# Five matrix products (one of them repeats the forward's) against the forward's two.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of one phase of a block.

    Attributes:
        names: one per kernel.
        table: [kernels, 10], FLOPs, bytes moved, bytes summed over the TP group; of a matrix
            product ``[batch, m, k] x [batch, k, n]`` m, n, k and batch, of attention m queries, n
            keys and a batch of heads, else 0; the kind; of norms and softmaxes the rows; bytes
            of all rows that the TP group gathers, or sums and scatters.
    """

    names: tuple[str, ...]
    table: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCount:
    """A block at one micro-batch size.

    Attributes:
        backward: input and weight gradients.
        backward_input: the part that computes input gradients.
        saved_bytes: kept for the backward and not kept by an earlier block.
        output_bytes: of all its outputs.
    """

    forward: Kernels
    backward: Kernels
    backward_input: Kernels
    saved_bytes: float
    output_bytes: float


@dataclass(slots=True)
class _Log:
    names: list[str] = field(default_factory=lambda: [])
    rows: list[tuple[float, ...]] = field(default_factory=lambda: [])

    def add(
        self,
        name: str,
        *,
        flops: float = 0,
        moved: float = 0,
        summed: float = 0,
        product: Product = (0, 0, 0, 0),
        kind: int = POINTWISE,
        rows: float = 0,
        gathered: float = 0,
    ) -> None:
        self.names.append(name)
        numbers = flops, moved, summed, *product, kind, rows, gathered
        self.rows.append(tuple(map(float, numbers)))

    def take(self) -> Kernels:
        table = np.array(self.rows, dtype=np.float64).reshape(-1, COLUMNS)
        kernels = Kernels(names=tuple(self.names), table=table)
        self.names.clear()
        self.rows.clear()
        return kernels


class Counter:
    """Counts blocks one after another; remembers what earlier ones already keep.

    Args:
        module: whose parameters are no activations.
    """

    def __init__(self, module: nn.Module) -> None:
        self._log = _Log()
        self._kept = [*module.parameters(), *module.buffers()]
        self._known = {_storage(tensor) for tensor in self._kept}
        # Outputs that the block that made them keeps, whatever the next one does.
        self._by_itself: set[int] = set()
        # Inputs of column-cut Linears since the last row-cut one; their gradients are summed once.
        self._entered: list[tuple[Tensor, Tensor]] = []

    def count(
        self,
        call: nn.Module,
        inputs: Sequence[CountState],
        run: Callable[..., CountState] | None = None,
    ) -> tuple[BlockCount, CountState]:
        """Run forward and backward of a block (or of a loss) on meta tensors.

        Args:
            call: the block.
            inputs: its inputs.
            run: calls it with them, and does what belongs to it; None for the block alone.

        Returns:
            The counts, and the outputs, cut from the graph.
        """
        inputs = pytree.tree_map_only(Tensor, _as_leaf, list(inputs))
        parameters = [p for p in call.parameters() if p.requires_grad]
        saved = _Saved(self._known, self._kept)
        with _Kernels(self._log), _Fused(self._log):
            with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
                outputs = (run or call)(*inputs)
            forward = self._log.take()
            backward_input = self._gradients(outputs, _floating(inputs), last=False)
            backward = self._gradients(outputs, [*_floating(inputs), *parameters], last=True)
        count = BlockCount(
            forward=forward,
            backward=backward,
            backward_input=backward_input,
            saved_bytes=saved.num_bytes,
            output_bytes=sum(map(_num_bytes, _tensors(outputs))),
        )
        self._by_itself |= {_storage(t) for t in _tensors(outputs)} & self._known
        return count, pytree.tree_map_only(Tensor, _as_input, outputs)

    def another(self, outputs: CountState) -> CountState:
        """Outputs like these of one more block of the same kind, kept where these are kept."""
        return pytree.tree_map_only(Tensor, self._copy, outputs)

    def _copy(self, output: Tensor) -> Tensor:
        if not output.is_floating_point():
            return output
        copy = torch.empty_like(output)
        if _storage(output) in self._by_itself:
            self._by_itself.add(_storage(copy))
            self._known.add(_storage(copy))
            self._kept.append(copy)
        return copy

    def _gradients(self, outputs: CountState, wanted: list[Tensor], *, last: bool) -> Kernels:
        roots = [t for t in _tensors(outputs) if t.requires_grad]
        if roots and wanted:
            ones = [torch.empty_like(t) for t in roots]
            torch.autograd.grad(roots, wanted, ones, retain_graph=not last, allow_unused=True)
        return self._log.take()

    def watch_tensor_parallel(self, block: nn.Module, rows: BlockRows, vocab: int = 0) -> None:
        """Record the sums over the group: outputs of row-cut Linears and of cut embeddings in
        forward, in backward the gradient of each tensor that column-cut ones take before the next
        row-cut one.

        Where rows are cut, their operators are recorded in place of these.

        Args:
            block: with ``tp_plan``.
            rows: of its activations.
            vocab: of how many tokens the group brings logits together; 0 where it does not.
        """
        plan: dict[str, str] = getattr(block, "tp_plan", None) or {}
        for name, style in plan.items():
            layer = block.get_submodule(name)
            if isinstance(layer, nn.Embedding):
                layer.register_forward_hook(partial(self._sum_table, rows, name))
            elif style == "rowwise":
                layer.register_forward_hook(partial(self._sum_output, rows))
            elif style == "vocab":
                layer.__dict__["forward"] = partial(self._head, layer, rows, vocab)
            else:
                layer.__dict__["forward"] = partial(self._column_cut, layer, rows)

    def watch_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the sums over the group of parameters' gradients in backward."""
        for parameter in parameters:
            parameter.register_hook(self._sum_gradient)

    def _sum_gradient(self, gradient: Tensor) -> None:
        self._log.add("all_reduce", summed=_num_bytes(gradient))

    def _sum_output(self, rows: BlockRows, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        self._entered.clear()
        rows.clear()
        if rows.cuts is not None:
            return rows.sum(output)
        self._log.add("all_reduce", summed=_num_bytes(output))
        return output

    def _sum_table(
        self, rows: BlockRows, name: str, _: nn.Module, __: Any, output: Tensor
    ) -> Tensor:
        own = rows.sum_of_table(name, output)
        if own is None:
            self._log.add("all_reduce", summed=_num_bytes(output))
        return output if own is None else own

    def _head(self, linear: Any, rows: BlockRows, vocab: int, input: Tensor) -> Tensor:
        logits = self._column_cut(linear, rows, input)
        self._entered.clear()
        rows.clear()
        if not vocab:
            return logits
        padded = functional.pad(logits, (0, vocab - logits.shape[-1]))
        self._log.add("all_reduce", summed=_num_bytes(padded))
        return padded

    def _column_cut(self, linear: Any, rows: BlockRows, input: Tensor) -> Tensor:
        gathered = rows.gathered(input)
        if gathered is None:
            found = next((after for before, after in self._entered if before is input), None)
            if found is None:
                found = cast(Any, _SumGradient).apply(input, self._log)
                self._entered.append((input, found))
            input = found
        return linear_of_rows(input, linear.weight, linear.bias, gathered)


class _SumGradient(torch.autograd.Function):
    """Identity whose backward records the sum of the gradient over the TP group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: _Log) -> Tensor:
        ctx.log = log
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.log.add("all_reduce", summed=_num_bytes(gradients[0]))
        return gradients[0], None


class _Kernels(TorchDispatchMode):
    """Writes every kernel into a log."""

    def __init__(self, log: _Log) -> None:
        cast(Any, super()).__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in _FREE or not _tensors(out):
            return out
        if name in _GATHERS or name == _SCATTERS:
            full = args[0] if name == _SCATTERS else out
            kind = "reduce_scatter" if name == _SCATTERS else "all_gather"
            self._log.add(kind, gathered=_num_bytes(full))
            if full.shape[:-2].numel() > 1:
                # Ranks' rows lie one after another in each sample, and apart on the wire.
                self._log.add("cat", moved=2 * _num_bytes(full))
            return out
        formula = flop_registry.get(func._overloadpacket)
        flops = formula(*args, **kwargs, out_val=out) if formula else 0
        moved = sum(map(_num_bytes, _tensors((args, kwargs, out))))
        product = _product(name, args)
        kind = PRODUCT if product[2] else _kind(name)
        rows = _rows(args) if kind in (NORM, SOFTMAX) else 0
        self._log.add(name, flops=flops, moved=moved, product=product, kind=kind, rows=rows)
        return out


def _kind(name: str) -> int:
    """Of a kernel that is no matrix product."""
    if "softmax" in name:
        return SOFTMAX
    if name.startswith(_NORMS):
        return NORM
    return ACTIVATION if name.removesuffix("_backward") in _ACTIVATIONS else POINTWISE


def _rows(args: Sequence[Any]) -> int:
    """Rows of the first tensor, each of which one block of threads handles."""
    shape = _tensors(args)[0].shape
    return shape[:-1].numel() if len(shape) > 1 else 1


def _product(name: str, args: Sequence[Any]) -> Product:
    """m, n, k and batch of a matrix product; zeros for anything else."""
    first = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.get(name)
    if first is None:
        return 0, 0, 0, 0
    left, right = args[first], args[first + 1]
    return left.shape[-2], right.shape[-1], left.shape[-1], left.shape[:-2].numel()


class _Fused(TorchFunctionMode):
    """Takes the place of operators that are one kernel on accelerators and many on meta.

    Attention keeps no matrix of scores, RMSNorm no copy of its input in float32.
    """

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.rms_norm:
            return self._rms_norm(*args, **kwargs)
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        # Fused kernels skip the half of the scores that a causal mask hides.
        share = 0.5 if named.get("is_causal") else 1.0
        return cast(Any, _CountedAttention).apply(
            named["query"], named["key"], named["value"], share, self._log
        )

    def _rms_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None
    ) -> Tensor:
        scale = input.new_ones(tuple(normalized_shape)) if weight is None else weight
        return cast(Any, _RMSNorm).apply(input, scale, self._log)


class _RMSNorm(torch.autograd.Function):
    """Shapes and saved tensors of a fused kernel, as ``_fused_rms_norm`` on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, log: _Log) -> Tensor:
        out = torch.empty_like(x)
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.dim() - weight.dim()]))
        ctx.log = log
        log.add(
            "rms_norm", moved=sum(map(_num_bytes, (x, weight, out))), kind=NORM, rows=_rows([x])
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        # Input, output gradient and result; input and output gradient again for the weight's.
        for tensors in (3, 2):
            moved = tensors * _num_bytes(x)
            ctx.log.add("rms_norm", moved=moved, kind=NORM, rows=_rows([x]))
        return torch.empty_like(x), torch.empty_like(weight), None


class _CountedAttention(torch.autograd.Function):
    """Shapes, FLOPs and saved tensors of a fused attention kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: float, log: _Log) -> Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        log_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.log = log
        ctx.flops = 2 * share * q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        ctx.scores = (q.shape[-2], k.shape[-2], 0, q.shape[:-2].numel())
        moved = sum(map(_num_bytes, (q, k, v, out)))
        log.add("attention", flops=ctx.flops, moved=moved, product=ctx.scores, kind=ATTENTION)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        moved = 2 * sum(map(_num_bytes, (q, k, v, gradients[0])))
        flops = _ATTENTION_BACKWARD * ctx.flops
        ctx.log.add("attention", flops=flops, moved=moved, product=ctx.scores, kind=ATTENTION)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


class _Saved:
    """Sums the bytes of storages that autograd saves, each once, parameters not at all."""

    def __init__(self, known: set[int], kept: list[Tensor]) -> None:
        self._known, self._kept = known, kept
        self.num_bytes = 0.0

    def keep(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._known:
            self._known.add(storage)
            self._kept.append(tensor.detach())  # a freed storage's address would come again
            self.num_bytes += tensor.untyped_storage().nbytes()
        return tensor


def _storage(tensor: Tensor) -> int:
    return cast(Any, tensor.untyped_storage())._cdata


def _num_bytes(tensor: Tensor) -> int:
    # An expanded tensor is read once.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _floating(tree: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(tree) if tensor.is_floating_point()]


def _as_leaf(tensor: Tensor) -> Tensor:
    return _as_input(tensor).requires_grad_(tensor.is_floating_point())


def _as_input(tensor: Tensor) -> Tensor:
    # Lengths stay the tensors of which the host knows the numbers.
    return tensor.detach() if tensor.is_floating_point() else tensor


def block_parameters(module: nn.Sequential) -> tuple[int, ...]:
    """Parameters of each block; one that is tied to an earlier block's counts there."""
    seen: set[int] = set()
    counts: list[int] = []
    for block in module:
        own = {id(p): p.numel() for p in block.parameters() if id(p) not in seen}
        seen |= own.keys()
        counts.append(sum(own.values()))
    return tuple(counts)
