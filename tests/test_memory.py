"""What a rank's steps held is measured, and stands beside what was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmlaunch.process.peak_memory import PeakMemory

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
def test_the_peak_is_that_of_the_steps_alone() -> None:
    before = torch.ones(64 * MIB)  # of float32: 256 MiB that are none of the steps'
    model = torch.ones(16 * MIB)
    memory = PeakMemory(CPU)
    assert memory.most_bytes is None
    memory.begin([model, model.view(4, -1)])  # one memory, counted once
    checkpoint = torch.ones(96 * MIB)
    del checkpoint
    memory.forget()
    libraries = torch.ones(24 * MIB)  # what the first steps leave behind for good
    state = torch.ones(8 * MIB)
    for size in (32, 8):
        activations = torch.ones(size * MIB)
        del activations
        memory.note()
    memory.end([model, state])
    assert memory.most_bytes == pytest.approx(4 * (16 + 8 + 32) * MIB, abs=4 * MIB)
    assert len(before) + len(libraries) == 88 * MIB


def test_a_system_that_does_not_tell_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmlaunch.process.peak_memory._CLEAR", Path("/nowhere/clear_refs"))
    memory = PeakMemory(CPU)
    memory.begin([torch.ones(4)])
    memory.forget()
    memory.note()
    memory.end([torch.ones(4)])
    assert memory.most_bytes is None
