"""The transport that the executor needs, and its torch.distributed form."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mmlaunch.comm import wire
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.program.communicators import CommGroup
from mmplan.program.shards import Ranks

# (source, target, backward): where messages go.
MessageLink = tuple[int, int, bool]


def _flat_collective(name: str, before: str) -> Callable[..., Any]:
    """A collective on flat tensors by its name, or by that of older releases of torch."""
    return getattr(dist, name, None) or getattr(dist, before)


_REDUCE_SCATTER = _flat_collective("reduce_scatter_single", "reduce_scatter_tensor")
_ALL_GATHER = _flat_collective("all_gather_single", "all_gather_into_tensor")


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Block until the transfer is over (on CUDA: until the stream has it in order)."""
        ...


class Send(Work, Protocol):
    """A send under way."""

    def is_completed(self) -> bool:
        """Whether its tensor may go. gloo says so only after a wait."""
        ...


class Transport(Protocol):
    """Moves tensors between ranks. Groups are tuples of ranks in ascending order."""

    rank: int
    world_size: int
    device: torch.device

    def prepare(self, groups: Sequence[CommGroup], links: Sequence[MessageLink]) -> None:
        """Create communicators and connections; every rank passes the same in the same order."""
        ...

    def isend(self, tensor: Tensor, peer: int, tag: int, *, backward: bool) -> Send:
        """Send a contiguous tensor; it must not change before the work is waited for."""
        ...

    def irecv(self, tensor: Tensor, peer: int, tag: int, *, backward: bool) -> Work:
        """Receive into a contiguous tensor of the sent shape and type."""
        ...

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """Replace the tensor by its sum over the ranks."""
        ...

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Work:
        """The same, beside what comes next: the tensor is the sum after the wait."""
        ...

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """One tensor of this shape per rank, in the order of ``ranks``, valid after the wait."""
        ...

    def reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> None:
        """Fill ``mine`` with this rank's slice of the sum of ``full`` over the ranks.

        Both are flat, ``full`` as long as one slice for each rank, in the order of ``ranks``.
        """
        ...

    def start_reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> Work:
        """The same, beside what comes next; neither tensor may change before the wait."""
        ...

    def gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """Fill the flat ``full`` with every rank's slice, in the order of ``ranks``."""
        ...

    def mark(self) -> Any:
        """This moment in the rank's work, without a wait: on CUDA, in the stream's order."""
        ...

    def seconds_of(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from the first mark to each; waits until the last has come."""
        ...

    def gather_objects(self, item: Any, kind: Any = Any) -> list[Any]:
        """Every rank's object, by rank; only used outside the training steps.

        Args:
            item: see :func:`mmlaunch.comm.wire.pack`.
            kind: its type.
        """
        ...

    def broadcast_object(self, item: Any, source: int, kind: Any = Any) -> Any:
        """The source's object on every rank; only used outside the training steps."""
        ...


@dataclass(frozen=True, slots=True)
class Deferred:
    """Work that is done where it is waited for."""

    wait: Callable[[], Any]


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def is_completed(self) -> bool:
        """It is."""
        return True


class _Watched:
    """Tells the heartbeat whom this rank waits for."""

    def __init__(self, work: Any, heartbeat: Heartbeat, peers: Ranks) -> None:
        self._work, self._heartbeat, self._peers = work, heartbeat, peers

    def wait(self) -> None:
        """Wait, marked as waiting."""
        with self._heartbeat.waiting(self._peers):
            self._work.wait()

    def is_completed(self) -> bool:
        """See :class:`Send`."""
        return self._work.is_completed()


def seconds_since_first(marks: Sequence[float]) -> list[float]:
    """For transports whose marks are seconds of a clock."""
    return [mark - marks[0] for mark in marks]


class DistTransport:
    """torch.distributed, on gloo or NCCL, with its default process group initialised.

    gloo tells messages apart by tags. NCCL ignores tags: there the order of the program
    must serve, and two ranks that both receive before they send on one communicator would
    block each other, so each direction has a communicator of its own.

    Args:
        device: where tensors live.
        heartbeat: told of every wait.
    """

    def __init__(self, device: torch.device, heartbeat: Heartbeat) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self._heartbeat = heartbeat
        self._groups: dict[CommGroup, Any] = {(tuple(range(self.world_size)), 0): dist.group.WORLD}
        self._directions: dict[tuple[bool, bool], Any] = {}
        self._mailbox: dict[tuple[int, bool], Tensor] = {}

    def prepare(self, groups: Sequence[CommGroup], links: Sequence[MessageLink]) -> None:
        """See :class:`Transport`."""
        for group in groups:
            if group not in self._groups and len(group[0]) > 1:
                self._groups[group] = dist.new_group(list(group[0]))
        if dist.get_backend() == "nccl" and not self._directions:
            self._directions = {
                (backward, upward): dist.new_group(list(range(self.world_size)))
                for backward in (False, True)
                for upward in (False, True)
            }
        self._connect(links)

    def forget_groups(self) -> None:
        """Let go of the groups of the last plan, before those of the next; all ranks call it."""
        everyone = tuple(range(self.world_size)), 0
        for group in [group for group in self._groups if group != everyone]:
            dist.destroy_process_group(self._groups.pop(group))

    def _connect(self, links: Sequence[MessageLink]) -> None:
        """Exchange one empty message on each link, one link after another.

        gloo (with lazy initialisation) and NCCL connect two ranks when they first meet, and
        the one that comes first is blocked, even in ``isend`` and ``irecv``. Among the
        messages of a step that can be a deadlock.
        """
        met: set[tuple[tuple[bool, bool], frozenset[int]]] = set()
        for source, target, backward in links:
            direction = (backward, source < target) if self._directions else (False, False)
            key = direction, frozenset((source, target))
            if source == target or key in met:
                continue
            met.add(key)
            token = torch.zeros(1, device=self.device)
            if self.rank == source:
                self.isend(token, target, 0, backward=backward).wait()
            elif self.rank == target:
                self.irecv(token, source, 0, backward=backward).wait()

    def isend(self, tensor: Tensor, peer: int, tag: int, *, backward: bool) -> Send:
        """See :class:`Transport`."""
        if peer == self.rank:
            self._mailbox[tag, backward] = tensor
            return Done()
        group = self._directions.get((backward, self.rank < peer))
        work = dist.isend(tensor, dst=peer, tag=tag, group=group)
        return _Watched(work, self._heartbeat, (peer,))

    def irecv(self, tensor: Tensor, peer: int, tag: int, *, backward: bool) -> Work:
        """See :class:`Transport`."""
        if peer == self.rank:
            # In every program the send comes before the wait.
            return Deferred(lambda: tensor.copy_(self._mailbox.pop((tag, backward))))
        group = self._directions.get((backward, peer < self.rank))
        work = dist.irecv(tensor, src=peer, tag=tag, group=group)
        return _Watched(work, self._heartbeat, (peer,))

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """See :class:`Transport`."""
        if len(ranks) > 1:
            with self._heartbeat.waiting(ranks):
                dist.all_reduce(tensor, group=self._groups[ranks, 0])

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Work:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            return Done()
        work = dist.all_reduce(tensor, group=self._groups[ranks, 0], async_op=True)
        return _Watched(work, self._heartbeat, ranks)

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            return Done(), [tensor]
        gathered = [torch.empty_like(tensor) for _ in ranks]
        group = self._groups[ranks, channel]
        work = dist.all_gather(gathered, tensor, group=group, async_op=True)
        return _Watched(work, self._heartbeat, ranks), gathered

    def reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> None:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            mine.copy_(full)
            return
        with self._heartbeat.waiting(ranks):
            _REDUCE_SCATTER(mine, full, group=self._groups[ranks, 0])

    def start_reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> Work:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            mine.copy_(full)
            return Done()
        work = _REDUCE_SCATTER(mine, full, group=self._groups[ranks, 0], async_op=True)
        return _Watched(work, self._heartbeat, ranks)

    def gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            full.copy_(mine)
            return
        with self._heartbeat.waiting(ranks):
            _ALL_GATHER(full, mine, group=self._groups[ranks, 0])

    def mark(self) -> Any:
        """See :class:`Transport`."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_of(self, marks: Sequence[Any]) -> list[float]:
        """See :class:`Transport`."""
        if self.device.type != "cuda":
            return seconds_since_first(marks)
        # Here and nowhere before: a posted receive ends when its message has come, which may be
        # the work of an instruction of this rank's own that comes later.
        marks[-1].synchronize()
        return [1e-3 * marks[0].elapsed_time(mark) for mark in marks]

    def gather_objects(self, item: Any, kind: Any = Any) -> list[Any]:
        """See :class:`Transport`."""
        mine = self._tensor_of(wire.pack(item, kind))
        sizes = self._all_gather(torch.tensor([len(mine)], device=self.device))
        lengths = [int(size) for size in sizes]
        padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
        found = zip(self._all_gather(padded), lengths, strict=True)
        return [wire.unpack(_bytes_of(part[:length]), kind) for part, length in found]

    def broadcast_object(self, item: Any, source: int, kind: Any = Any) -> Any:
        """See :class:`Transport`."""
        data = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.rank == source:
            data = self._tensor_of(wire.pack(item, kind))
        length = torch.tensor([len(data)], device=self.device)
        with self._heartbeat.waiting((source,)):
            dist.broadcast(length, src=source)
            if self.rank != source:
                data = data.new_empty(int(length))
            dist.broadcast(data, src=source)
        return wire.unpack(_bytes_of(data), kind)

    def _tensor_of(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        work, found = self.all_gather(tensor, tuple(range(self.world_size)))
        work.wait()
        return found


def _bytes_of(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
