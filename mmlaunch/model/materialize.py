"""Materialise the blocks that a rank keeps of a module on the meta device."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.checkpoint.exported_weights import InitialWeights
from mmlaunch.model.deferred_init import recording
from mmlaunch.model.replay_init import UndeferrableError
from mmplan.errors import InvalidInputError
from mmplan.schema.factories import build_module
from mmplan.schema.workload import Workload

Cuts = Mapping[str, Sequence[Box]]


@dataclass(slots=True)
class _Slot:
    """One tensor of the kept blocks, with every attribute that holds it.

    Attributes:
        full: the tensor that the factory made.
        local: the meta tensor to replace; of a cut parameter, its shard.
        boxes: the kept parts of the full tensor; None keeps all.
        attributes: dictionaries of modules, and the key in each.
    """

    full: Tensor
    local: Tensor
    boxes: Sequence[Box] | None
    attributes: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def put(self, parts: Sequence[Tensor], device: torch.device) -> None:
        """Replace the meta tensor in every attribute by its values."""
        value = parts[0].clone() if len(parts) == 1 else torch.cat(list(parts))
        # A part of a row is contiguous here as it is where a whole parameter was cut.
        value = (value if self.boxes is None else value.contiguous()).to(device)
        if isinstance(self.local, nn.Parameter):
            value = nn.Parameter(value, requires_grad=self.local.requires_grad)
        for attributes, key in self.attributes:
            attributes[key] = value


class MetaModule:
    """A module on the meta device, and the record from which its values can be made.

    Args:
        workload: gives the factory and the weights to start from.
        owner: the module's name.
        folder: the workload file's folder.

    Attributes:
        module: the whole module; blocks may be cut afterwards.

    Raises:
        UndeferrableError: the factory failed, or cannot be recorded.
        InvalidInputError: the weights to start from are wrong.
    """

    def __init__(self, workload: Workload, owner: str, folder: Path) -> None:
        try:
            with recording() as self._record:
                self.module = build_module(workload, owner, folder)
        except InvalidInputError as error:
            # The factory's own failure, if it is one, comes again from an ordinary build.
            raise UndeferrableError(str(error.__cause__ or error.message)) from None
        init = workload.modules[owner].init
        self._initial = None if init is None else InitialWeights(folder / init, self.module, owner)
        self._full: dict[str, Tensor] = {}
        self._full.update(self.module.named_parameters(remove_duplicate=False))
        self._full.update(self.module.named_buffers(remove_duplicate=False))

    def materialise(
        self, blocks: Mapping[int, nn.Module], cuts: Cuts, device: torch.device
    ) -> None:
        """Make the values of some blocks; those of others never exist all at once.

        Args:
            blocks: by their index in the module; they lose their meta tensors.
            cuts: kept parts of cut parameters, by name in the module.
            device: of the values.

        Raises:
            UndeferrableError: the factory's operations cannot be replayed.
        """
        slots = list(self._slots(blocks, cuts).values())
        computed: list[_Slot] = []
        for slot in slots:
            if self._initial is not None and self._initial.has(slot.full):
                slot.put(self._initial.read(slot.full, slot.boxes), device)
            else:
                computed.append(slot)

        def done(index: int, value: Tensor) -> None:
            boxes = computed[index].boxes
            parts = [value] if boxes is None else [value[box.slices] for box in boxes]
            computed[index].put(parts, device)

        self._record.replay([slot.full for slot in computed], done)
        for block in blocks.values():
            block.to(device)  # constants that were real all along

    def _slots(self, blocks: Mapping[int, nn.Module], cuts: Cuts) -> dict[Tensor, _Slot]:
        slots: dict[Tensor, _Slot] = {}
        for name, attributes, key in _meta_tensors(blocks):
            local: Tensor = attributes[key]
            full = self._full.get(name, local)
            if local._backward_hooks:
                raise UndeferrableError(f"it registers a hook on {name}")
            slot = slots.setdefault(full, _Slot(full, local, cuts.get(name)))
            slot.attributes.append((attributes, key))
        return slots

    def storages(self) -> list[StorageWeakRef]:
        """Memory that must be free when this object and the module are."""
        return self._record.storages()


def check_gone(storages: Sequence[StorageWeakRef]) -> None:
    """Refuse a module of which a meta tensor is still held.

    Raises:
        UndeferrableError: a block reaches for a tensor outside itself, or keeps one in a list.
    """
    if not all(storage.expired() for storage in storages):
        gc.collect()
    if not all(storage.expired() for storage in storages):
        raise UndeferrableError("it keeps tensors that no module has as an attribute")


def _meta_tensors(blocks: Mapping[int, nn.Module]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, dictionary and key of every meta tensor of blocks."""
    for index, block in blocks.items():
        for prefix, module in block.named_modules():
            start = f"{index}.{prefix}." if prefix else f"{index}."
            for attributes in (module._parameters, module._buffers, vars(module)):
                for key, value in list(attributes.items()):
                    if isinstance(value, Tensor) and value.is_meta:
                        yield start + key, attributes, key
