"""Random numbers that do not depend on the schedule or the cut.

Before each block the generators are seeded from (train.seed, step, module, block, first
sample of the micro-batch): dropout is then the same in every order, on every rank, and
when a block runs again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_MASK = (1 << 64) - 1


class Seeds:
    """Seeds the generators of the device in use.

    Args:
        seed: the workload's ``train.seed``.
        device: the CPU's generator is always seeded, this device's as well where it has one.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type not in ("cpu", "meta"):
            module: Any = torch.get_device_module(device)
            module.init()
            self._generators.append(module.default_generators[device.index or 0])
        self._digests: dict[tuple[str, int], int] = {}
        self._mixed: dict[tuple[str, int], tuple[int, int]] = {}

    def enter(self, step: int, name: str, index: int, first_sample: int) -> None:
        """Seed for one block (or loss) on one micro-batch (or sync batch)."""
        known, number = self._mixed.get((name, index), (None, 0))
        if known != step:
            # Mixed twice: neighbours in step and sample must not get neighbouring seeds.
            number = _mix(self._digest(name, index) + step)
            self._mixed[name, index] = step, number
        mixed = _mix(number + first_sample) >> 1
        for generator in self._generators:
            generator.manual_seed(mixed)

    def _digest(self, name: str, index: int) -> int:
        number = self._digests.get((name, index))
        if number is None:
            digest = hashlib.sha256(f"{self._seed}:{name}:{index}".encode()).digest()
            number = self._digests[name, index] = int.from_bytes(digest[:8], "big")
        return number

    @contextmanager
    def kept(self) -> Generator[None]:
        """Context after which the generators draw what they would have drawn before it."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit changes half of the output bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
