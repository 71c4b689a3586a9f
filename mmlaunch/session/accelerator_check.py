"""Sessions of a plan's distinct ranks on an accelerator without hardware.

Ranks are threads of a process of their own, one of each class of alike ranks or more. Each builds
its session and takes one step with its update. Tensors of the device have no values and take no
memory, so a plan may be larger than this machine.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.process.fake_accelerator import DeviceFault, FakeAccelerator, register
from mmlaunch.process.heartbeat import Heartbeat
from mmlaunch.session.session import Session
from mmlaunch.session.smaller_plans import likeness
from mmplan.errors import MMPlanError
from mmplan.program.instructions import Compute
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorVerdict:
    """The result of one step of each distinct rank.

    Attributes:
        ranks: that took the step.
        faults: the first of each kind and place.
        most_synchronisations: of the host with the device, in the step of any rank, faults or not.
        failure: why the step ended early; the cause is among the faults, or not the device's.
    """

    ranks: int
    faults: tuple[DeviceFault, ...]
    most_synchronisations: int
    failure: str | None


def check_on_accelerator(plan: Plan, workload: Workload, folder: Path) -> AcceleratorVerdict:
    """Take one step of each distinct rank, in a process that has the device.

    Args:
        plan: of any number of ranks.
        workload: of the plan.
        folder: the workload file's folder.
    """
    # A fork needs nothing imported again; elsewhere it is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(1, mp_context=context) as child:
        return child.submit(_check, plan, workload, folder).result()


def _check(plan: Plan, workload: Workload, folder: Path) -> AcceleratorVerdict:
    torch.set_num_threads(1)
    device = register()
    plan, workload = likeness(plan, workload)
    accelerators = [FakeAccelerator(rank) for rank in range(plan.devices)]

    def entry(transport: InProcessTransport) -> None:
        transport.device = device
        # Sums inside a backward give way to other ranks: it must stay in the rank's thread.
        with accelerators[transport.rank], torch.autograd.set_multithreading_enabled(False):
            _step(plan, workload, folder, transport, accelerators[transport.rank])

    failure = None
    try:
        InProcessWorld(plan.devices).run(entry)
    except MMPlanError as error:
        failure = error.message
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    faults: dict[Any, DeviceFault] = {}
    for accelerator in reversed(accelerators):
        faults |= accelerator.faults
    return AcceleratorVerdict(
        ranks=plan.devices,
        faults=tuple(faults.values()),
        most_synchronisations=max(item.num_synchronisations for item in accelerators),
        failure=failure,
    )


def _step(
    plan: Plan,
    workload: Workload,
    folder: Path,
    transport: InProcessTransport,
    accelerator: FakeAccelerator,
) -> None:
    beat = _Instructions(accelerator)
    session = Session(
        plan=plan, workload=workload, folder=folder, transport=transport, heartbeat=beat
    )
    row = session.program.instructions[transport.rank]
    beat.computes = [i for i, instruction in enumerate(row) if isinstance(instruction, Compute)]
    accelerator.num_synchronisations = 0
    session.forward_backward()
    accelerator.instruction = "update"
    # Apart from the rest of a step, which asks whether gradients are finite.
    session.update.apply(session.step_count)


class _Instructions(Heartbeat):
    """Tells an accelerator which instruction runs; between computes the host must not wait."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__(Heartbeat.detached()._buffer, 0)
        self._accelerator = accelerator
        self.computes: list[int] = []

    def beat(
        self, step: int, instruction_index: int, instruction: str, module: str | None = None
    ) -> None:
        """See :class:`Heartbeat`."""
        super().beat(step, instruction_index, instruction, module)
        first, last = (self.computes[0], self.computes[-1]) if self.computes else (0, -1)
        self._accelerator.instruction = instruction
        self._accelerator.in_step = first <= instruction_index <= last
