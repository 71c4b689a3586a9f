"""The transport that the executor needs, and its torch.distributed form."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mmlaunch.comm import wire
from mmlaunch.process import process_group
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.program.communicators import CHANNEL_CTAS, CommGroup
from mmplan.program.shards import Ranks

# Of each channel, the (source, target) pairs between which messages go, sorted.
ChannelLinks = Mapping[CommGroup, Sequence[tuple[int, int]]]


# Keeps the names of groups apart that a process makes one after the other, as all others do.
_SERIES = itertools.count()


# A flat tensor, and the lengths of its parts.
Pieces = tuple[Tensor, Sequence[int]]


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Block until the transfer is over (on CUDA: until the stream has it in order)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnd:
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

    def prepare(self, groups: Sequence[CommGroup], links: ChannelLinks) -> None:
        """Make communicators and connections, and use each once.

        Args:
            groups: of collectives; every rank passes the same in the same order.
            links: of the channels, likewise.
        """
        ...

    def post(self, transfers: Sequence[TransferEnd], channel: CommGroup) -> Work:
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

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Work:
        """The same, beside what comes next: the tensor is the sum after the wait."""
        ...

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """One tensor of this shape per rank, in the order of ``ranks``, valid after the wait."""
        ...

    def exchange(self, received: Pieces, sent: Pieces, ranks: Ranks, channel: int = 0) -> Work:
        """Send a part to each rank and receive one from each, in the order of ``ranks``.

        Args:
            received: where the parts go that come, valid after the wait.
            sent: must not change before the wait.
            ranks: of the group.
            channel: of the communicator.
        """
        ...

    def after(self, work: Work, then: Callable[[], Work]) -> Work:
        """What ``then`` begins as soon as ``work`` is over; the rank goes on meanwhile.

        On CUDA both are in a stream of their own. Elsewhere ``then`` is called where its work is
        waited for, so all ranks must wait in one order.
        """
        ...

    def start_reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> Work:
        """Fill the flat ``mine`` with this rank's slice of the sum of all ranks' ``full``.

        Beside what comes next: neither tensor may change before the wait.
        """
        ...

    def gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """Fill the flat ``full`` with every rank's slice, in the order of ``ranks``."""
        ...

    def start_gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> Work:
        """The same, beside what comes next; neither tensor may change before the wait."""
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

    def gather_objects(self, item: Any, kind: Any = Any, *, to: int | None = None) -> list[Any]:
        """Every rank's object, by rank; only used outside the training steps.

        Args:
            item: see :func:`mmlaunch.comm.wire.pack`.
            kind: its type.
            to: the one rank that gets them, the others none; None: all get them.
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


def in_turn(work: Work, then: Callable[[], Work]) -> Work:
    """Both, where they are waited for."""

    def wait() -> None:
        work.wait()
        then().wait()

    return Deferred(wait)


def seconds_since_first(marks: Sequence[float]) -> list[float]:
    """For transports whose marks are seconds of a clock."""
    return [mark - marks[0] for mark in marks]


class DistTransport:
    """torch.distributed, on gloo or NCCL, with its default process group initialised.

    gloo tells messages apart by tags and needs no channels. On NCCL a channel is a communicator,
    and its transfers are posted as one group: only so does torch use the channel's communicator
    and not one for each pair of ranks. Beside NCCL a gloo group serves the hosts.

    Its groups are torch's backends themselves (:func:`mmlaunch.process.process_group.new_backend`).

    Args:
        device: where tensors live.
        heartbeat: told of every wait.
        timeout_s: longest wait of a communicator for its ranks, seconds.
    """

    def __init__(
        self, device: torch.device, heartbeat: Heartbeat, timeout_s: float = 600.0
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self._heartbeat = heartbeat
        self._timeout = timedelta(seconds=timeout_s)
        self._everyone = tuple(range(self.world_size))
        self._series = next(_SERIES)
        self._host: Any = self._new_group((self._everyone, 0), "host")
        self._groups: dict[CommGroup, Any] = {}
        self._side: Any = None

    def prepare(self, groups: Sequence[CommGroup], links: ChannelLinks) -> None:
        """See :class:`Transport`."""
        nccl = self.device.type == "cuda"
        for group in [(self._everyone, 0), *groups, *(links if nccl else ())]:
            if self.rank not in group[0] or group in self._groups:
                continue
            self._groups[group] = self._new_group(group, self.device.type)
            if nccl:
                # The communicator is made by its first operation: here, where nothing else runs,
                # and in one order on all ranks.
                self._groups[group].allreduce(torch.zeros(1, device=self.device)).wait()
                self.synchronize()
        self._connect(links)

    def _new_group(self, group: CommGroup, kind: str) -> Any:
        ranks, number = group
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()
        return process_group.new_backend(
            f"{self._series}/{kind}/{members}/{number}",
            ranks,
            cuda=kind == "cuda",
            timeout=self._timeout,
            max_ctas=CHANNEL_CTAS if number < 0 else None,
        )

    def forget_groups(self) -> None:
        """Let go of the groups of the last plan, before those of the next; all ranks call it."""
        for group in self._groups.values():
            process_group.drop_backend(group)
        self._groups.clear()
        self._series = next(_SERIES)

    def _connect(self, links: ChannelLinks) -> None:
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
                end = TransferEnd(tensor=token, peer=peer, tag=0, is_send=is_send)
                self.post([end], channel).wait()
        self.synchronize()

    def post(self, transfers: Sequence[TransferEnd], channel: CommGroup) -> Work:
        """See :class:`Transport`."""
        if self.device.type != "cuda":
            group = self._groups[self._everyone, 0]
            works = [_begin(group, item, item.peer, item.tag) for item in transfers]
        else:
            group = self._groups[channel]
            group._start_coalescing()
            for item in transfers:
                _begin(group, item, channel[0].index(item.peer), 0)
            works = [group._end_coalescing()]
        return _Watched(works, self._heartbeat, tuple({item.peer for item in transfers}))

    def send_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`Transport`."""
        return _Watched([self._host.send([tensor], peer, tag)], self._heartbeat, (peer,))

    def receive_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`Transport`."""
        return _Watched([self._host.recv([tensor], peer, tag)], self._heartbeat, (peer,))

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """See :class:`Transport`."""
        self.start_all_reduce(tensor, ranks).wait()

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Work:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            return Done()
        work = self._groups[ranks, 0].allreduce(tensor)
        return _Watched([work], self._heartbeat, ranks)

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            return Done(), [tensor]
        gathered = [torch.empty_like(tensor) for _ in ranks]
        work = self._groups[ranks, channel].allgather([gathered], [tensor])
        return _Watched([work], self._heartbeat, ranks), gathered

    def exchange(self, received: Pieces, sent: Pieces, ranks: Ranks, channel: int = 0) -> Work:
        """See :class:`Transport`."""
        (into, lengths), (given, sizes) = received, sent
        group = self._groups[ranks, channel]
        work = group.alltoall_base(into, given, [*lengths], [*sizes])
        return _Watched([work], self._heartbeat, ranks)

    def after(self, work: Work, then: Callable[[], Work]) -> Work:
        """See :class:`Transport`."""
        if self.device.type != "cuda":
            return in_turn(work, then)
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        # The rank itself goes on: this is no wait in its times.
        told, self._heartbeat.on_wait = self._heartbeat.on_wait, None
        # What ``then`` allocates is this stream's, and used again only behind the wait above.
        with torch.cuda.stream(self._side):
            work.wait()
            begun = then()
        self._heartbeat.on_wait = told
        return begun

    def start_reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> Work:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            mine.copy_(full)
            return Done()
        work = self._groups[ranks, 0]._reduce_scatter_base(mine, full)
        return _Watched([work], self._heartbeat, ranks)

    def gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """See :class:`Transport`."""
        self.start_gather_flat(full, mine, ranks).wait()

    def start_gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> Work:
        """See :class:`Transport`."""
        if len(ranks) == 1:
            full.copy_(mine)
            return Done()
        work = self._groups[ranks, 0]._allgather_base(full, mine)
        return _Watched([work], self._heartbeat, ranks)

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

    def gather_objects(self, item: Any, kind: Any = Any, *, to: int | None = None) -> list[Any]:
        """See :class:`Transport`."""
        mine = _tensor_of(wire.pack(item, kind))
        sizes = self._gather_on_host(torch.tensor([len(mine)]))
        lengths = [int(size) for size in sizes]
        padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
        parts = self._gather_on_host(padded, to)
        found = zip(parts, lengths if parts else (), strict=True)
        return [wire.unpack(_bytes_of(part[:length]), kind) for part, length in found]

    def broadcast_object(self, item: Any, source: int, kind: Any = Any) -> Any:
        """See :class:`Transport`."""
        data = torch.empty(0, dtype=torch.uint8)
        if self.rank == source:
            data = _tensor_of(wire.pack(item, kind))
        length = torch.tensor([len(data)])
        with self._heartbeat.waiting((source,)):
            self._host.broadcast(length, source).wait()
            if self.rank != source:
                data = data.new_empty(int(length))
            self._host.broadcast(data, source).wait()
        return wire.unpack(_bytes_of(data), kind)

    def _gather_on_host(self, tensor: Tensor, to: int | None = None) -> list[Tensor]:
        """Tensors of one shape by rank; where ``to`` names a rank, the others get none."""
        wanted = to in (None, self.rank)
        found = [[torch.empty_like(tensor) for _ in self._everyone]] if wanted else []
        if to is None:
            work = self._host.allgather(found, [tensor])
        else:
            options = dist.GatherOptions()
            options.rootRank = to
            work = self._host.gather(found, [tensor], options)
        _Watched([work], self._heartbeat, self._everyone).wait()
        return found[0] if found else []


def _begin(group: Any, end: TransferEnd, peer: int, tag: int) -> Any:
    """Post one transfer on a backend, to or from a rank of its own numbering."""
    return (group.send if end.is_send else group.recv)([end.tensor], peer, tag)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(data: Tensor) -> bytes:
    return data.numpy().tobytes()
