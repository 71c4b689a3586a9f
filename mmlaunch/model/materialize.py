"""Give values to the blocks that a rank keeps of a module that was built without memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.checkpoint.initial_weights import InitialWeights
from mmlaunch.model.deferred_init import Recording
from mmlaunch.model.replay_init import UndeferrableError

Cuts = Mapping[str, Sequence[Box]]


@dataclass(slots=True)
class _Slot:
    """One tensor of the kept blocks, and every place where it stands.

    Attributes:
        full: the tensor that the factory made.
        now: what stands there; of a cut parameter, the local share.
        boxes: the parts of the full tensor that are kept; None keeps all.
        homes: dictionaries of modules, and the key in each.
    """

    full: Tensor
    now: Tensor
    boxes: Sequence[Box] | None
    homes: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def put(self, parts: Sequence[Tensor], device: torch.device) -> None:
        """Replace the hollow tensor everywhere by its values."""
        value = parts[0].clone() if len(parts) == 1 else torch.cat(list(parts))
        # A part of a row is contiguous here as it is where a whole parameter was cut.
        value = (value if self.boxes is None else value.contiguous()).to(device)
        made = value
        if isinstance(self.now, nn.Parameter):
            made = nn.Parameter(value, requires_grad=self.now.requires_grad)
        for home, key in self.homes:
            home[key] = made


class UnfilledModule:
    """A module without values, as its factory left it.

    Args:
        module: the whole module; blocks may be cut afterwards.
        notes: what the factory did.
        initial: the weights to start from.
    """

    def __init__(
        self, module: nn.Sequential, notes: Recording, initial: InitialWeights | None
    ) -> None:
        self._notes, self._initial = notes, initial
        self._full: dict[str, Tensor] = {}
        self._full.update(module.named_parameters(remove_duplicate=False))
        self._full.update(module.named_buffers(remove_duplicate=False))

    def fill(self, blocks: Mapping[int, nn.Module], cuts: Cuts, device: torch.device) -> None:
        """Make the values of some blocks; those of others never exist all at once.

        Args:
            blocks: by their index in the module; they lose their hollow tensors.
            cuts: kept parts of cut parameters, by name in the module.
            device: where the values go.

        Raises:
            UndeferrableError: the factory's work cannot be done later.
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

        self._notes.replay([slot.full for slot in computed], done)
        for block in blocks.values():
            block.to(device)  # constants that were real all along

    def _slots(self, blocks: Mapping[int, nn.Module], cuts: Cuts) -> dict[int, _Slot]:
        slots: dict[int, _Slot] = {}
        for name, home, key in _hollow(blocks):
            now: Tensor = home[key]
            full = self._full.get(name, now)
            if now._backward_hooks:
                raise UndeferrableError(f"it registers a hook on {name}")
            slot = slots.setdefault(id(full), _Slot(full, now, cuts.get(name)))
            slot.homes.append((home, key))
        return slots

    def storages(self) -> list[StorageWeakRef]:
        """What must be gone when this object and the module are."""
        return self._notes.storages()


def check_gone(storages: Sequence[StorageWeakRef]) -> None:
    """Refuse a module of which something without values is still held by somebody.

    Raises:
        UndeferrableError: a block reaches for a tensor outside itself, or keeps one in a list.
    """
    if not all(storage.expired() for storage in storages):
        gc.collect()
    if not all(storage.expired() for storage in storages):
        raise UndeferrableError("it keeps tensors that no module has as an attribute")


def _hollow(blocks: Mapping[int, nn.Module]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, dictionary and key of every tensor without values that a module has."""
    for index, block in blocks.items():
        for prefix, module in block.named_modules():
            start = f"{index}.{prefix}." if prefix else f"{index}."
            for home in (module._parameters, module._buffers, vars(module)):
                for key, value in list(home.items()):
                    if isinstance(value, Tensor) and value.is_meta:
                        yield start + key, home, key
