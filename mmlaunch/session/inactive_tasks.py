"""Weights and optimizer state of inactive tasks, which the plan leaves out, offloaded to hosts.

As in one process, a module that no active task uses gets no gradient and no update, and is
there when a task needs it again. Its tensors lie whole in host memory, each on one rank, and
are in every checkpoint and in the final weights. So is the optimizer state of parameters that
only inactive tasks train.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import whole
from mmlaunch.checkpoint.exported_weights import targets
from mmlaunch.checkpoint.restore import Checkpoint
from mmlaunch.checkpoint.save import Entry
from mmlaunch.comm.transport import Transport
from mmlaunch.model.deferred_init import MetaModule, UndeferrableError
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.whole_modules import build_owner
from mmlaunch.session.state import OPTIMIZER_KIND, WeightSpec
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program
from mmplan.schema.factories import build_loss
from mmplan.schema.workload import Workload, resolve_tasks

# (kind, full name) of a tensor in a checkpoint.
_StateKey = tuple[str, str]
_WEIGHT = "param"
_CPU = torch.device("cpu")


class InactiveTasks:
    """The offloaded tensors of inactive tasks that one rank keeps.

    Args:
        workload: has the inactive tasks.
        folder: the workload file's folder.
        program: the plan's.
        transport: says which rank this is.

    Attributes:
        names: full names of all parameters that only inactive tasks use, on every rank the same.

    Raises:
        InvalidInputError: a factory is wrong.
    """

    def __init__(
        self, *, workload: Workload, folder: Path, program: Program, transport: Transport
    ) -> None:
        self._transport = transport
        owners, losses = _unused(workload, program)
        share = transport.rank, transport.world_size
        self._modules = [_Module(workload, owner, folder, share) for owner in owners]
        of_losses = {
            f"losses.{name}.{n}": tensor
            for name in losses
            for n, tensor in targets(build_loss(workload, name, folder))
        }
        self._specs = {n: spec for module in self._modules for n, spec in module.specs.items()}
        self._specs |= {n: _Spec.of(tensor) for n, tensor in of_losses.items()}
        # The first rank keeps those of losses.
        self._of_losses = {n: t.detach() for n, t in of_losses.items() if transport.rank == 0}
        self.names = frozenset(n for n, spec in self._specs.items() if spec.is_parameter)
        self._kept: dict[_StateKey, Tensor] | None = None

    def load(
        self, checkpoint: Checkpoint, *, written: Sequence[str], trained: Sequence[str]
    ) -> None:
        """Take everything that the sessions' own states leave; all ranks call it.

        Args:
            checkpoint: of any plan.
            written: full names of the weights that this rank's session saves.
            trained: names of the parameters that it updates, whose state it loads.

        Raises:
            InvalidInputError: a module is missing or has another shape.
        """
        check_holds(checkpoint, self._specs)
        for name, spec in self._specs.items():
            # Reading no box compares the shapes, and says which one is wrong.
            checkpoint.load(name, _WEIGHT, [], full_shape=spec.shape)
        present, updated = set[str](), set[str]()
        for theirs in self._transport.gather_objects((written, trained)):
            present.update(theirs[0])
            updated.update(theirs[1])
        wanted = [(_WEIGHT, name) for name in self._specs]
        for name in sorted({*self.names, *present} - updated):
            wanted += [(k, name) for k in checkpoint.kinds(name) if k.startswith(OPTIMIZER_KIND)]
        self._kept = {key: self._read(checkpoint, key) for key in self._mine(checkpoint, wanted)}
        self._modules, self._of_losses = [], {}

    def _mine(self, checkpoint: Checkpoint, wanted: Sequence[_StateKey]) -> Iterator[_StateKey]:
        """This rank's share: the largest first, each to the rank that has the least so far."""
        loads = [0] * self._transport.world_size
        sizes = {key: whole(checkpoint.full_shape(key[1], key[0])).num_elements for key in wanted}
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            rank = loads.index(min(loads))
            loads[rank] += sizes[key]
            if rank == self._transport.rank:
                yield key

    def _read(self, checkpoint: Checkpoint, key: _StateKey) -> Tensor:
        kind, name = key
        value = checkpoint.load_whole(name, kind)
        spec = self._specs.get(name)
        # As when a session's own are loaded: a step count keeps its type.
        typed = kind == _WEIGHT or value.dim() > 0
        return value.to(spec.dtype) if spec is not None and typed else value

    def _tensors(self) -> dict[_StateKey, Tensor]:
        """The kept tensors; initial weights where no checkpoint was loaded."""
        if self._kept is None:
            initial = [*(module.initial() for module in self._modules), self._of_losses]
            self._kept = {(_WEIGHT, n): t for found in initial for n, t in found.items()}
            self._modules, self._of_losses = [], {}
        return self._kept

    def entries(self) -> list[Entry]:
        """This rank's entries of a checkpoint."""
        return [
            Entry(
                name=name,
                kind=kind,
                full_shape=tuple(tensor.shape),
                boxes=[((0,) * tensor.dim(), tensor.contiguous())],
            )
            for (kind, name), tensor in self._tensors().items()
        ]

    def specs(self) -> list[WeightSpec]:
        """Name, full shape, type and boxes of the weights kept here."""
        return [
            (name, tuple(tensor.shape), tensor.dtype, (whole(tuple(tensor.shape)),))
            for (kind, name), tensor in self._tensors().items()
            if kind == _WEIGHT
        ]

    def parts(self, name: str) -> list[Tensor]:
        """A kept weight, where it can be sent from."""
        return [self._tensors()[_WEIGHT, name].to(self._transport.device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """Shape and type of a tensor of an inactive task."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Spec:
        is_parameter = isinstance(tensor, nn.Parameter)
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, is_parameter=is_parameter)


class _Module:
    """An inactive module: its names and shapes, and the values of one rank's blocks.

    On the meta device where its factory can be recorded.

    Args:
        share: this rank, and how many ranks share the blocks out.
    """

    def __init__(
        self, workload: Workload, owner: str, folder: Path, share: tuple[int, int]
    ) -> None:
        self._workload, self._owner, self._folder = workload, owner, folder
        self._share = share
        self._values: dict[str, Tensor] = {}
        self._meta: MetaModule | None = None
        with suppress(UndeferrableError):
            self._meta = MetaModule(workload, owner, folder)
        module = self._meta.module if self._meta else self._whole()
        self.specs = {f"{owner}.{n}": _Spec.of(t) for n, t in targets(module)}
        if self._meta is None:
            self._take(module)

    def initial(self) -> dict[str, Tensor]:
        """Weights of this rank's blocks, as the factory or ``init`` has them."""
        meta, self._meta = self._meta, None
        if meta is not None:
            try:
                blocks = {b: meta.module[b] for b in self._blocks(meta.module)}
                meta.materialise(blocks, {}, _CPU)
                self._take(meta.module)
            except UndeferrableError:
                self._take(self._whole())
        return self._values

    def _blocks(self, module: nn.Sequential) -> list[int]:
        rank, count = self._share
        return [b for b in range(len(module)) if b * count // len(module) == rank]

    def _take(self, module: nn.Sequential) -> None:
        """Keep the values of this rank's blocks, of tied ones under their first name."""
        blocks = self._blocks(module)
        self._values = {
            f"{self._owner}.{name}": tensor.detach()
            for name, tensor in module.state_dict(keep_vars=True).items()
            if int(name.split(".")[0]) in blocks and f"{self._owner}.{name}" in self.specs
        }

    def _whole(self) -> nn.Sequential:
        return build_owner(self._workload, self._owner, self._folder, trains=None)


def trained_by_others(inactive: InactiveTasks | None, model: LocalModel) -> set[str]:
    """Names of parameters, here and offloaded, that inactive tasks may train."""
    if inactive is None:
        return set()
    return {n for n, p in model.named_parameters() if not p.requires_grad} | inactive.names


def check_holds(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """Refuse a checkpoint without anything of a module that it should hold.

    Args:
        checkpoint: an opened one.
        names: full names that are needed.

    Raises:
        InvalidInputError: names the module.
    """
    held = {_owner_of(name) for name in checkpoint.names()}
    for name in names:
        owner = _owner_of(name)
        if owner not in held:
            raise InvalidInputError(
                f"{checkpoint.path} holds no {name} ({_WEIGHT}), nor anything else of {owner}, "
                "which a task of the workload uses",
                hint="resume with the workload that the checkpoint was saved with, or start a new "
                "run from the trained weights with init:",
            )


def _owner_of(name: str) -> str:
    """The module or loss of a full name, in words."""
    first, second = name.split(".")[:2]
    return f"loss {second}" if first == "losses" else f"module {first}"


def _unused(workload: Workload, program: Program) -> tuple[list[str], list[str]]:
    """Owners of parameters, and losses, that only tasks outside the program use."""
    tasks: Mapping[str, Any] = resolve_tasks(workload)
    used = {stage.owner for stage in program.stages}
    owners = [workload.modules[m].share or m for t in tasks.values() for m in t.modules]
    here = {loss.name for loss in program.losses}
    losses = [loss for task in tasks.values() for loss in task.loss_inputs]
    return (
        [name for name in dict.fromkeys(owners) if name not in used],
        [name for name in dict.fromkeys(losses) if name not in here],
    )
