"""The warm-up: each rank takes step 0 once alone, before its first message on a device.

A receive on CUDA is a kernel that ends when its message has come. What waits for the device
meanwhile may wait for ever: a kernel that is loaded, a handle or workspace of cuBLAS or cuDNN,
memory that the allocator lacks. Here a rank comes by all of it, and by compiled blocks, while no
receive runs: it walks its row of the program with the data of step 0. Tensors of whole numbers,
lengths and counts travel between hosts, so that all shapes are those of the step; floating tensors
that would come from other ranks are zeros. Tensor-parallel groups are together, in their order.
Parameters, buffers and random numbers are afterwards as they were, gradients are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from mmlaunch.comm.transport import Deferred, Done, Pieces, TransferEnd, Transport, Work
from mmlaunch.data.loader import StepData
from mmlaunch.execute.blocks import ExecutionError
from mmlaunch.execute.executor import Executor
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.seeds import Seeds
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.program.communicators import CommGroup
from mmplan.program.instructions import Collective, Op
from mmplan.program.shards import Ranks


def warm_up(
    make: Callable[[type[Executor], Transport, Heartbeat], Executor],
    *,
    model: LocalModel,
    seeds: Seeds,
    transport: Transport,
    heartbeat: Heartbeat,
    data: Mapping[str, StepData],
) -> None:
    """Take step 0 for what it leaves in the device and its libraries; all ranks call it.

    Args:
        make: an executor of the program.
        model: this rank's, without gradients.
        seeds: of the executor.
        transport: of this rank, prepared.
        heartbeat: shows each instruction as a phase of the start.
        data: of step 0.

    Raises:
        ExecutionError: a block or loss cannot take zeros in place of activations.
    """
    alone = cast(Transport, _AloneTransport(transport))
    executor = make(_WithoutReductions, alone, _Phases(heartbeat))
    try:
        with _buffers_kept(model), seeds.kept():
            executor.run(0, data)
    except ExecutionError as error:
        hint = error.hint or "MMLAUNCH_WARM_UP=0 runs without it"
        raise ExecutionError(f"in the warm-up: {error.message}", hint=hint) from error.__cause__
    for _, parameter in model.named_parameters():
        parameter.grad = None
    transport.synchronize()


class _WithoutReductions(Executor):
    """Leaves gradients where they are."""

    def _collective(self, instruction: Collective) -> None:
        if instruction.op == Op.COUNT:
            super()._collective(instruction)


class _Phases(Heartbeat):
    """Shows instructions in the name of a phase, which may take longer than a step's."""

    def __init__(self, real: Heartbeat) -> None:
        super().__init__(Heartbeat.detached()._buffer, 0)
        self._real = real

    def beat(
        self, step: int, instruction_index: int, instruction: str, module: str | None = None
    ) -> None:
        """See :class:`Heartbeat`."""
        self._real.phase(f"warming up {instruction}"[:40])


class _AloneTransport:
    """A rank's transport without what runs on the device until another rank comes.

    Sums and gathers of a tensor-parallel group stay: there all ranks do the same in one order.
    """

    def __init__(self, real: Transport) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def post(self, transfers: Sequence[TransferEnd], channel: CommGroup) -> Work:
        """Whole numbers between hosts; floating tensors come as zeros."""
        works = [self._on_host(item) for item in transfers]
        return Deferred(lambda: [work.wait() for work in works])

    def _on_host(self, item: TransferEnd) -> Work:
        if item.tensor.is_floating_point():
            if not item.is_send:
                item.tensor.zero_()
            return Done()
        if item.is_send:
            return self._real.send_on_host(item.tensor.cpu(), item.peer, item.tag)
        received = torch.empty_like(item.tensor, device="cpu")
        work = self._real.receive_on_host(received, item.peer, item.tag)

        def wait() -> None:
            work.wait()
            item.tensor.copy_(received)

        return Deferred(wait)

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """Nothing: of the ranks of a loss, whose sums have the shape of what they sum."""

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """Zeros, and this rank's own."""
        mine = self._real.rank
        return Done(), [tensor if r == mine else torch.zeros_like(tensor) for r in ranks]

    def exchange(self, received: Pieces, sent: Pieces, ranks: Ranks, channel: int = 0) -> Work:
        """Zeros."""
        received[0].zero_()
        return Done()


@contextmanager
def _buffers_kept(model: LocalModel) -> Generator[None]:
    """Context after which the buffers of blocks and losses are what they were before."""
    modules = [m for top in (*model.blocks.values(), *model.losses.values()) for m in top.modules()]
    kept = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, values in kept:
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.data.copy_(cast(Tensor, values))
