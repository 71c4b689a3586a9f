"""A task's data flowing through its modules on the meta device: shapes without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.profiling.counting import BlockCount, Counter
from mmplan.profiling.grid import RAGGED_SAMPLES
from mmplan.proof.row_cuts import ROW_GROUPS, BlockRows, RowCuts, RowFlow, ShapeGroup
from mmplan.proof.tp_states import TPStates, module_states
from mmplan.ragged import Ragged
from mmplan.schema.dry_run import looks_at_values
from mmplan.schema.factories import build_loss, build_module, compute_dtype
from mmplan.schema.protocols import as_vocabulary_loss
from mmplan.schema.task_shapes import TaskShapes
from mmplan.schema.workload import TaskView, Workload, crossing_elements, takes_own_logits

# Samples of the run that fixes shapes: more than one, so that no dimension is squeezed away,
# and several, because ragged fields have a whole number of rows in all of them together.
BASE = 8


class TaskFlow:
    """Counts a task's modules and losses at any micro-batch size and tp.

    Shapes come from sample 0 of the task's data set, repeated. Ragged fields have the mean
    number of rows of samples spread over the data set. How much they vary is seen in attention
    alone (:mod:`mmplan.zoo.parts.ragged_attention`), which costs the squares of their lengths.

    Args:
        workload: the job.
        folder: the workload file's folder.
        task: one of its tasks.

    Attributes:
        shapes: inputs of its modules and losses.

    Raises:
        InvalidInputError: the task has no data, or its factories cannot be used.
    """

    def __init__(self, workload: Workload, folder: Path, task: TaskView) -> None:
        self._workload, self._folder, self.task = workload, folder, task
        self._dtype = compute_dtype(workload.train.precision)
        self._outputs: dict[str, Any] = {}
        self.shapes = TaskShapes(
            workload,
            folder,
            task,
            samples=BASE,
            dtype=self._dtype,
            output=self._output,
            look_at=_spread_rows,
        )
        self._states: dict[tuple[str, int], list[TPStates]] = {}
        self._keeps = cache(self._keeps_logits)

    def _output(self, module: str) -> Any:
        if module not in self._outputs:
            self.count_module(module, tp=1, samples=BASE)
        return self._outputs[module]

    def output_bytes(self, module: str) -> float:
        """Bytes per sample that cross the cut after a module's last block."""
        output = self._output(module)
        elements = crossing_elements(self.task, module)
        parts = [output] if elements is None else [output[element] for element in elements]
        leaves = pytree.tree_leaves(parts)
        return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor)) / BASE

    def build(self, module: str, tp: int = 1) -> nn.Sequential:
        """A module on the meta device, one rank's share of it where tp is larger than 1."""
        built = build_module(self._workload, module, self._folder, device="meta").to(self._dtype)
        for block in built:
            _shard_shapes(block, tp, where=f"modules.{module}")
        return built

    def count_module(self, module: str, *, tp: int, samples: int) -> list[BlockCount]:
        """Every block at a micro-batch size.

        Raises:
            InvalidInputError: a block cannot run without values, cannot be split by tp, or
                would then compute something else.
        """
        built, whole = self.build(module, tp), self.build(module)
        states = self._followed(module, tp)
        counter = Counter(built)
        state: Any = self.shapes.inputs(f"modules.{module}", self.task.inputs[module], samples)
        counts: list[BlockCount] = []
        known: dict[object, tuple[BlockCount, Any, int]] = {}
        before: object = None
        # The rank that has the most rows.
        group = ShapeGroup(index=tp - 1, count=tp)
        ROW_GROUPS[_COUNTED] = group
        flow = RowFlow(_COUNTED)
        for index, block in enumerate(built):
            rows, cuts = BlockRows(), states[index].rows if tp > 1 else None
            if tp > 1:
                vocab = 0 if states[index].logits else _num_tokens(whole[index])
                counter.watch_tensor_parallel(block, rows, vocab)
                counter.watch_sums(block.get_parameter(n) for n in sorted(states[index].partial))
            if cuts is not None:
                rows.hook(block, cuts)
            arguments = state if index == 0 else [state]
            # What the block before it keeps decides whether a block's input is kept once more.
            kind = before, _kind(block, arguments), flow.length, cuts
            if kind in known:
                count, state, flow.length = known[kind]
                state = counter.another(state)
            else:
                where = f"modules.{module}: block {index}" + (f" at tp {tp}" if tp > 1 else "")
                run = partial(_run_rows, flow, rows, cuts, block, index == len(built) - 1)
                count, state = _run(counter, block, arguments, where, run)
                known[kind] = count, state, flow.length
            before = kind[1]
            counts.append(count)
        if tp == 1 and samples == BASE:
            self._outputs[module] = state
        return counts

    def _followed(self, module: str, tp: int) -> list[TPStates]:
        """What a group does with each block."""
        if tp == 1:
            return []
        if (module, tp) not in self._states:
            sources = self.task.inputs[module]
            values = zip(
                sources, self.shapes.inputs(f"modules.{module}", sources, BASE), strict=True
            )
            inputs = [
                value if source.module is None else pytree.tree_map_only(Tensor, _as_output, value)
                for source, value in values
            ]
            self._states[module, tp] = module_states(
                self.build(module),
                inputs,
                tp,
                where=f"modules.{module}",
                rows=self._workload.train.sequence_parallel,
                logits=self._keeps(module),
            )
        return self._states[module, tp]

    def _keeps_logits(self, module: str) -> bool:
        """Whether a group that cuts the vocabulary needs no whole logits of a module."""

        def takes_shards(loss: str) -> bool:
            return as_vocabulary_loss(self.build_loss(loss)) is not None

        return takes_own_logits(self.task, module, takes_shards)

    def count_shards(self, loss: str, samples: int) -> BlockCount | None:
        """A loss as a tensor-parallel group has it that cuts its logits, all shards together.

        None where it takes whole logits.
        """
        built, sources = self.build_loss(loss), self.task.loss_inputs[loss]
        sharded, module = as_vocabulary_loss(built), sources[0].module
        if sharded is None or module is None or not self._keeps(module):
            return None
        if not _num_tokens(self.build(module)[-1]):
            return None
        logits, *others = self.shapes.inputs(f"losses.{loss}", sources, samples)
        vocab = (logits.values if isinstance(logits, Ragged) else logits).shape[-1]
        run = partial(sharded.of_shard, (0, vocab, vocab), lambda one: one[None])
        return _run(Counter(built), built, [logits, *others], f"losses.{loss}", run)[0]

    def count_loss(self, loss: str, samples: int) -> BlockCount:
        """A loss on a number of samples.

        Raises:
            InvalidInputError: it cannot run without values.
        """
        built = self.build_loss(loss)
        inputs = self.shapes.inputs(f"losses.{loss}", self.task.loss_inputs[loss], samples)
        return _run(Counter(built), built, inputs, f"losses.{loss}")[0]

    def build_loss(self, loss: str) -> nn.Module:
        """A loss on the meta device."""
        return build_loss(self._workload, loss, self._folder, device="meta").to(self._dtype)


def _as_output(tensor: Tensor) -> Tensor:
    """A tensor as a module that is trained gives it."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


# Numbers that layers give themselves and that change nothing of what they compute.
_SERIAL_NAMES = {"layer_idx"}


def _kind(block: nn.Module, inputs: Sequence[Any]) -> object:
    """Equal for blocks that compute the same on inputs of the same shapes."""
    parts = [
        (
            name,
            type(part),
            _settings(part),
            _shapes([*part.parameters(recurse=False), *part.buffers(recurse=False)]),
        )
        for name, part in cast("Iterator[tuple[str, nn.Module]]", block.named_modules())
    ]
    return tuple(parts), _shapes(inputs), str(pytree.tree_structure(inputs))


def _settings(part: nn.Module) -> tuple[Any, ...]:
    """A module's plain attributes, and which functions it was given."""
    plain = (bool, int, float, str, tuple, type(None))
    own = [
        (k, v) for k, v in sorted(vars(part).items(), key=itemgetter(0)) if k not in _SERIAL_NAMES
    ]
    values = ((k, repr(v)) for k, v in own if isinstance(v, plain))
    functions = ((k, id(v)) for k, v in own if isinstance(v, FunctionType))
    return (*values, *functions)


def _shapes(tree: Any) -> tuple[Any, ...]:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _spread_rows(
    dataset: Any, collate: Callable[..., Any], fields: Sequence[str]
) -> dict[str, Ragged]:
    """Ragged fields of samples spread evenly over the data set."""
    if not fields:
        return {}
    length = len(dataset)
    chosen = sorted({i * length // RAGGED_SAMPLES for i in range(RAGGED_SAMPLES)})
    rows: dict[str, list[Ragged]] = {name: [] for name in fields}
    for index in chosen:
        sample = collate([dataset[index]])
        for name, own in rows.items():
            own.append(_counted(sample[name]))
    return {
        name: Ragged(*(torch.cat(column) for column in zip(*own, strict=True)))
        for name, own in rows.items()
    }


def _counted(rows: Ragged) -> Ragged:
    """Rows without their values, which may be large images; whole numbers may be lengths."""
    is_numbers = rows.values.dtype == torch.int64 and rows.values.dim() == 1
    return rows if is_numbers else Ragged(rows.values.to("meta"), rows.lengths)


def _shard_shapes(block: nn.Module, tp: int, *, where: str) -> None:
    """Give a block's cut Linears the shapes of one rank's shards.

    Raises:
        InvalidInputError: a size that tp does not divide.
    """
    plan: dict[str, str] = getattr(block, "tp_plan", None) or {}
    for name, style in plan.items() if tp > 1 else ():
        linear: Any = block.get_submodule(name)
        size = linear.weight.shape[1 if style == "rowwise" else 0]
        if style == "vocab":
            # Of the rank that has the most tokens.
            size = -(-size // tp) * tp
        elif size % tp:
            raise InvalidInputError(
                f"{where}: {name} has {size} channels, tp {tp} does not divide them",
                hint="choose a tp that does",
            )
        if style == "rowwise":
            linear.weight = nn.Parameter(linear.weight[:, : size // tp].detach())
            linear.in_features = size // tp
        else:
            linear.weight = nn.Parameter(linear.weight[: size // tp].detach())
            if isinstance(linear, nn.Embedding):
                linear.num_embeddings, linear.padding_idx = size // tp, None
                continue
            linear.out_features = size // tp
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias[: size // tp].detach())


def _num_tokens(block: nn.Module) -> int:
    """Tokens of which a block gives logits that a group may cut; 0 where it gives none."""
    plan: dict[str, str] = getattr(block, "tp_plan", None) or {}
    layers = (block.get_submodule(name) for name, style in plan.items() if style == "vocab")
    return next((layer.out_features for layer in layers if isinstance(layer, nn.Linear)), 0)


# The group whose rank is counted.
_COUNTED = "counted"


def _run_rows(
    flow: RowFlow,
    rows: BlockRows,
    cuts: RowCuts | None,
    block: nn.Module,
    last: bool,
    *arguments: Any,
) -> Any:
    """One block, which takes and gives all rows or a rank's own; all of them at the end."""
    given = flow.before(cuts, arguments)
    rows.begin(cuts, _COUNTED, flow.length)
    output = block(*given)
    flow.after(rows)
    return flow.end(output) if last else output


def _run(
    counter: Counter,
    call: nn.Module,
    inputs: list[Any],
    what: str,
    run: Callable[..., Any] | None = None,
) -> tuple[BlockCount, Any]:
    try:
        return counter.count(call, inputs, run)
    except MMPlanError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if looks_at_values(error):
            raise InvalidInputError(
                f"{what} cannot run on shapes alone: {problem}",
                hint="profile it on real devices: leave --analytic out",
            ) from error
        raise InvalidInputError(
            f"{what} raised {problem}",
            hint="a block takes what the one before it returns, the first the module's inputs",
        ) from error
