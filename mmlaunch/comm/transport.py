"""The transport that the executor needs, and its torch.distributed form."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mmlaunch.comm import wire
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.program.communicators import CommGroup
from mmplan.program.shards import Ranks

# Of each channel, the (source, target) pairs between which messages go, sorted.
Links = Mapping[CommGroup, Sequence[tuple[int, int]]]
# Thread blocks that a message's kernel may take on a GPU: a posted receive spins until it comes.
CHANNEL_CTAS = 4


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One end of a tensor's way to another rank.

    Attributes:
        tensor: contiguous; one that is sent must not change before the work is waited for.
        peer: the other rank.
        tag: the same at both ends. NCCL takes no notice of it: its n-th receive from a rank gets
            what that rank sends n-th on the channel.
    """

    tensor: Tensor
    peer: int
    tag: int
    is_send: bool


class Transport(Protocol):
    """Moves tensors between ranks. Groups are tuples of ranks in ascending order."""

    rank: int
    world_size: int
    device: torch.device

    def prepare(self, groups: Sequence[CommGroup], links: Links) -> None:
        """Make communicators and connections, and use each once.

        Args:
            groups: of collectives; every rank passes the same in the same order.
            links: of the channels, likewise.
        """
        ...

    def post(self, transfers: Sequence[Transfer], channel: CommGroup) -> Work:
        """Begin transfers to and from other ranks, as one group of a channel."""
        ...

    def send_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send a CPU tensor beside the channels: lengths and flags, which hosts must know."""
        ...

    def receive_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Receive into a CPU tensor what :meth:`send_on_host` sends."""
        ...

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """Replace the tensor by its sum over the ranks."""
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

    def gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """Fill the flat ``full`` with every rank's slice, in the order of ``ranks``."""
        ...

    def mark(self) -> Any:
        """This moment in the rank's work, without a wait: on CUDA, in the stream's order."""
        ...

    def seconds_of(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from the first mark to each; waits until the last has come."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
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


class _Watched:
    """Tells the heartbeat whom this rank waits for."""

    def __init__(self, works: Sequence[Any], heartbeat: Heartbeat, peers: Ranks) -> None:
        self._works, self._heartbeat, self._peers = works, heartbeat, peers

    def wait(self) -> None:
        """Wait, marked as waiting; nothing happens the second time."""
        # gloo's sends wait for ever when they are waited for twice.
        works, self._works = self._works, ()
        with self._heartbeat.waiting(self._peers):
            for work in works:
                work.wait()


def seconds_since_first(marks: Sequence[float]) -> list[float]:
    """For transports whose marks are seconds of a clock."""
    return [mark - marks[0] for mark in marks]


class DistTransport:
    """torch.distributed, on gloo or NCCL, with its default process group initialised.

    gloo tells messages apart by tags and needs no channels. On NCCL a channel is a communicator,
    and its transfers are posted as one group: only so does torch use the channel's communicator
    and not one for each pair of ranks. The default group has gloo for CPU tensors in both cases.

    Args:
        device: where tensors live.
        heartbeat: told of every wait.
        timeout_s: longest wait of a communicator for its ranks; default: torch's.
    """

    def __init__(
        self, device: torch.device, heartbeat: Heartbeat, timeout_s: float | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self._heartbeat = heartbeat
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._groups: dict[CommGroup, Any] = {(tuple(range(self.world_size)), 0): dist.group.WORLD}

    def prepare(self, groups: Sequence[CommGroup], links: Links) -> None:
        """See :class:`Transport`."""
        nccl = self.device.type == "cuda"
        for group in [*groups, *(links if nccl else ())]:
            if self.rank in group[0] and len(group[0]) > 1:
                if group not in self._groups:
                    self._groups[group] = self._new_group(group)
                if nccl:
                    # The communicator is made by its first operation: here, where nothing else
                    # runs, and in one order on all ranks.
                    dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups[group])
                    torch.cuda.synchronize(self.device)
        self._connect(links)

    def _new_group(self, group: CommGroup) -> Any:
        ranks, number = group
        options = None
        if self.device.type == "cuda" and number < 0:
            options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportPrivateImportUsage]
            options.config.max_ctas = CHANNEL_CTAS
        # Ranks that are not in the group need not come.
        return dist.new_group(
            list(ranks),
            timeout=self._timeout,
            pg_options=options,
            use_local_synchronization=True,
        )

    def forget_groups(self) -> None:
        """Let go of the groups of the last plan, before those of the next; all ranks call it."""
        everyone = tuple(range(self.world_size)), 0
        for group in [group for group in self._groups if group != everyone]:
            dist.destroy_process_group(self._groups.pop(group))

    def _connect(self, links: Links) -> None:
        """Exchange one token on each link, one link after another.

        gloo (with lazy initialisation) and NCCL connect two ranks when they first meet, and
        the one that comes first is blocked, even where it only posts. Among the messages of a
        step that can be a deadlock.
        """
        met: set[object] = set()
        for channel, pairs in links.items():
            for pair in pairs if self.rank in channel[0] else ():
                # gloo has one connection between two ranks, whatever goes over it.
                key = (channel, pair) if self.device.type == "cuda" else frozenset(pair)
                if self.rank not in pair or key in met:
                    continue
                met.add(key)
                source, target = pair
                token = torch.zeros(1, device=self.device)
                is_send = self.rank == source
                peer = target if is_send else source
                self.post(
                    [Transfer(tensor=token, peer=peer, tag=0, is_send=is_send)], channel
                ).wait()
        self.synchronize()

    def post(self, transfers: Sequence[Transfer], channel: CommGroup) -> Work:
        """See :class:`Transport`."""
        if self.device.type == "cuda":
            group = self._groups[channel]
            operations = [
                dist.P2POp(
                    dist.isend if item.is_send else dist.irecv, item.tensor, item.peer, group
                )
                for item in transfers
            ]
            works = dist.batch_isend_irecv(operations)
        else:
            works = [
                dist.isend(item.tensor, dst=item.peer, tag=item.tag)
                if item.is_send
                else dist.irecv(item.tensor, src=item.peer, tag=item.tag)
                for item in transfers
            ]
        return _Watched(works, self._heartbeat, tuple({item.peer for item in transfers}))

    def send_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`Transport`."""
        return _Watched([dist.isend(tensor, dst=peer, tag=tag)], self._heartbeat, (peer,))

    def receive_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`Transport`."""
        return _Watched([dist.irecv(tensor, src=peer, tag=tag)], self._heartbeat, (peer,))

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """See :class:`Transport`."""
        if len(ranks) > 1:
            with self._heartbeat.waiting(ranks):
                dist.all_reduce(tensor, group=self._groups[ranks, 0])

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            return Done(), [tensor]
        gathered = [torch.empty_like(tensor) for _ in ranks]
        group = self._groups[ranks, channel]
        work = dist.all_gather(gathered, tensor, group=group, async_op=True)
        return _Watched([work], self._heartbeat, ranks), gathered

    def reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> None:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            mine.copy_(full)
            return
        with self._heartbeat.waiting(ranks):
            _REDUCE_SCATTER(mine, full, group=self._groups[ranks, 0])

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

    def synchronize(self) -> None:
        """See :class:`Transport`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_objects(self, item: Any, kind: Any = Any) -> list[Any]:
        """See :class:`Transport`."""
        mine = _tensor_of(wire.pack(item, kind))
        sizes = self._all_gather_on_host(torch.tensor([len(mine)]))
        lengths = [int(size) for size in sizes]
        padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
        found = zip(self._all_gather_on_host(padded), lengths, strict=True)
        return [wire.unpack(_bytes_of(part[:length]), kind) for part, length in found]

    def broadcast_object(self, item: Any, source: int, kind: Any = Any) -> Any:
        """See :class:`Transport`."""
        data = torch.empty(0, dtype=torch.uint8)
        if self.rank == source:
            data = _tensor_of(wire.pack(item, kind))
        length = torch.tensor([len(data)])
        with self._heartbeat.waiting((source,)):
            dist.broadcast(length, src=source)
            if self.rank != source:
                data = data.new_empty(int(length))
            dist.broadcast(data, src=source)
        return wire.unpack(_bytes_of(data), kind)

    def _all_gather_on_host(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._heartbeat.waiting(tuple(range(self.world_size))):
            dist.all_gather(found, tensor)
        return found


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(data: Tensor) -> bytes:
    return data.numpy().tobytes()
