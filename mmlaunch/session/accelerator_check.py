"""Sessions of a plan's distinct ranks on an accelerator without hardware.

Ranks are threads of a process of their own, as many as the plan has classes of alike ranks. Each
builds its session and takes one step with its update; tensors of the device have no values and
take no memory.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.process import fork_server
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
        ranks: that took the step, one of each class of alike ranks or more.
        faults: the first of each kind and place.
        failure: why the step ended early; the cause is among the faults, or not the device's.
    """

    ranks: int
    faults: tuple[DeviceFault, ...]
    failure: str | None


def check_on_accelerator(plan: Plan, workload: Workload, folder: Path) -> AcceleratorVerdict:
    """Take the step in a process of its own: it cannot give the device back.

    Args:
        plan: any plan.
        workload: of the plan.
        folder: the workload file's folder.
    """
    fork_server.start(preload=[__name__])
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as child:
        return child.submit(one_step, plan, workload, folder).result()


def one_step(plan: Plan, workload: Workload, folder: Path) -> AcceleratorVerdict:
    """Take the step in this process, which has the device from now on."""
    small, fitting = likeness(plan, workload)
    device = register()
    faults: dict[Any, DeviceFault] = {}

    def entry(transport: InProcessTransport) -> None:
        transport.device = device
        accelerator = FakeAccelerator(transport.rank)
        # One thread: sums inside a backward give way to other ranks.
        with accelerator, torch.autograd.set_multithreading_enabled(False):
            try:
                _step(small, fitting, folder, transport, accelerator)
            finally:
                for key, fault in accelerator.faults.items():
                    faults.setdefault(key, fault)

    failure = None
    try:
        InProcessWorld(small.devices).run(entry)
    except Exception as error:
        import traceback; traceback.print_exc()
        failure = error.message if isinstance(error, MMPlanError) else f"{type(error).__name__}: {error}"
    return AcceleratorVerdict(ranks=small.devices, faults=tuple(faults.values()), failure=failure)


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
    session.forward_backward()
    accelerator.in_step, accelerator.instruction = False, ""
    # Apart: whether gradients are finite is among the values.
    session.update.apply(0)


class _Instructions(Heartbeat):
    """Tells an accelerator which instruction runs, and when nothing may wait for it."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        detached = Heartbeat.detached()
        super().__init__(detached._buffer, 0)
        self._accelerator = accelerator
        self.computes: list[int] = []

    def beat(
        self, step: int, instruction_index: int, instruction: str, module: str | None = None
    ) -> None:
        """See :class:`Heartbeat`."""
        super().beat(step, instruction_index, instruction, module)
        self._accelerator.instruction = instruction
        self._accelerator.in_step = (
            bool(self.computes) and self.computes[0] <= instruction_index <= self.computes[-1]
        )
