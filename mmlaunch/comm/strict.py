"""NCCL's rules on the CPU: ranks as threads of one process that fail where a GPU would.

A rank's thread stands for its stream: it comes to an instruction when the GPU would. What NCCL
forgives no program, and gloo does, is found here:

- What is posted on a communicator is served in order, tags or not, and a send ends when it is
  taken.
- A receive's buffer holds nothing that may be read or written until its wait, and a send's must
  stay as it is until then.
- A communicator that a step uses was made before.
- What is posted and not over holds multiprocessors, and nothing else runs without one.
- The collectives of two communicators come in one order on all ranks.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.comm.messages import MOST_TENSORS
from mmlaunch.comm.transport import (
    ChannelLinks,
    CommGroup,
    Deferred,
    Pieces,
    TransferEnd,
    Work,
)
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.program.communicators import CHANNEL_CTAS, COLLECTIVE_CTAS
from mmplan.program.shards import Ranks

T = TypeVar("T")
# Of an H100's 132, less some for kernels that are in no plan.
MULTIPROCESSORS = 116
# Whether a channel is one communicator, or one for each (source, target) pair of it, which is what
# torch makes of sends and receives that are posted outside of groups.
Mode = Literal["channels", "pairs"]
_Communicator = tuple[CommGroup, tuple[int, int] | None]


@dataclass(eq=False, slots=True)
class _End:
    """One end of a transfer.

    Attributes:
        where: its rank was when it posted it.
        bytes: that the tensor must hold: what is sent, and poison before a receive.
        kernel: that it is part of.
        came: what a receive brings.
        met: whether the other end is there.
    """

    rank: int
    item: TransferEnd
    where: str
    bytes: Tensor
    kernel: _Kernel
    came: Tensor | None = None
    met: bool = False

    @property
    def is_as_posted(self) -> bool:
        """Whether the tensor holds what it held when it was posted."""
        return torch.equal(_bytes_of(self.item.tensor), self.bytes)

    @property
    def name(self) -> str:
        """The tensor, by its place in its message."""
        return f"tensor {self.item.tag % MOST_TENSORS - 1}"


@dataclass(eq=False, slots=True)
class _Kernel:
    """What a rank posts at once on one communicator."""

    queue: tuple[int, _Communicator]
    ends: list[_End] = field(default_factory=list[_End])

    @property
    def is_over(self) -> bool:
        """Whether every end of it has met its other one."""
        return all(end.met for end in self.ends)


class StrictWorld(InProcessWorld):
    """Ranks that share this process, under NCCL's rules.

    Args:
        size: number of ranks.
        seed: of the order in which ranks go on.
        mode: which communicators a channel has.
        multiprocessors: of a GPU.

    Attributes:
        faults: a line for each broken rule.
        most_blocks: the most thread blocks that messages and collectives hold on a rank when an
            instruction begins.
        most_bytes: by rank, the most bytes of messages at one time: what is received from its
            post to its wait, and what is sent until the rank waits for it.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        mode: Mode = "channels",
        multiprocessors: int = MULTIPROCESSORS,
    ) -> None:
        draws = random.Random(seed)
        super().__init__(size, choose=draws.choice)
        self.faults: list[str] = []
        self.most_blocks = 0
        self.most_bytes = [0] * size
        self.multiprocessors = multiprocessors
        self._mode = mode
        self._made: set[tuple[int, CommGroup]] = set()
        self._queues: defaultdict[tuple[int, _Communicator], deque[_Kernel]] = defaultdict(deque)
        # By rank: ends that it has not waited for, and its collectives in order.
        self._open: list[dict[_End, None]] = [{} for _ in range(size)]
        self._orders: list[list[tuple[CommGroup, int]]] = [[] for _ in range(size)]
        self._named: dict[tuple[CommGroup, int], str] = {}
        # By work that goes on in a stream of its own: where its rank began it.
        self.beside: dict[Work, str] = {}

    def transport(self, rank: int) -> StrictTransport:
        """See :class:`InProcessWorld`."""
        return StrictTransport(self, rank)

    def run(self, entry: Callable[[InProcessTransport], T]) -> list[T]:
        """See :class:`InProcessWorld`; :attr:`faults` has what did not end the run."""
        results = super().run(entry)
        for end in (end for ends in self._open for end in ends):
            self.add_fault(f"{end.where}: nothing waits for {end.name} of this message")
        for where in self.beside.values():
            self.add_fault(f"{where}: nothing waits for what goes on in a stream of its own")
        self._see_circles()
        return results

    def add_fault(self, text: str) -> None:
        """Note a broken rule, once."""
        if text not in self.faults:
            self.faults.append(text)

    def make(self, rank: int, groups: Iterable[CommGroup]) -> None:
        """Make a rank's communicators."""
        self._made.update((rank, group) for group in groups if rank in group[0])

    def use(self, rank: int, group: CommGroup, what: str) -> None:
        """Note that a rank uses a communicator."""
        if (rank, group) not in self._made:
            where = self._transports[rank].where()
            self.add_fault(
                f"{where}: {what} makes the communicator {group[1]} of ranks {list(group[0])}, "
                "which was not made before the steps"
            )

    # --- messages ----------------------------------------------------------------------

    def post(self, rank: int, transfers: Sequence[TransferEnd], channel: CommGroup) -> list[_End]:
        """Put transfers into the queues of their communicators."""
        self.use(rank, channel, "a message")
        where = self._transports[rank].where()
        kernels: dict[_Communicator, _Kernel] = {}
        posted: list[_End] = []
        for item in transfers:
            pair = (rank, item.peer) if item.is_send else (item.peer, rank)
            communicator = channel, pair if self._mode == "pairs" else None
            kernel = kernels.setdefault(communicator, _Kernel((rank, communicator)))
            if not item.is_send:
                _poison(item.tensor)
            end = _End(rank, item, where, _bytes_of(item.tensor).clone(), kernel)
            kernel.ends.append(end)
            posted.append(end)
        self._open[rank].update(dict.fromkeys(posted))
        kept = {s.data_ptr(): s.nbytes() for s in map(_storage_of, self._open[rank])}
        self.most_bytes[rank] = max(self.most_bytes[rank], sum(kept.values()))
        for kernel in kernels.values():
            self._queues[kernel.queue].append(kernel)
            self._serve(kernel)
        return posted

    def _serve(self, kernel: _Kernel) -> None:
        """Let the first kernels of queues meet, from one that came first."""
        turn = [kernel]
        while turn:
            current = turn.pop()
            communicator = current.queue[1]
            if self._first(current.queue) is not current:
                continue
            for end in current.ends:
                other = self._first((end.item.peer, communicator))
                if not end.met and other is not None:
                    self._meet(end, other)
                    if other.is_over:
                        turn += self._next(other)
            if current.is_over:
                turn += self._next(current)

    def _first(self, queue: tuple[int, _Communicator]) -> _Kernel | None:
        return next(iter(self._queues[queue]), None)

    def _next(self, over: _Kernel) -> list[_Kernel]:
        """The kernel behind one that is over, which leaves its queue."""
        self._queues[over.queue].popleft()
        following = self._first(over.queue)
        return [] if following is None else [following]

    def _meet(self, end: _End, kernel: _Kernel) -> None:
        """Give an end the first fitting one of its peer's kernel, whatever it was meant for."""
        for other in kernel.ends:
            fits = other.item.peer == end.rank and other.item.is_send != end.item.is_send
            if fits and not other.met:
                sent, received = (end, other) if end.item.is_send else (other, end)
                end.met = other.met = True
                self._move(sent, received)
                return

    def _move(self, sent: _End, received: _End) -> None:
        given, wanted = sent.item.tensor, received.item.tensor
        if sent.item.tag != received.item.tag:
            self.add_fault(
                f"{received.where}: {received.name} gets {sent.name} of another message: that of "
                f"{sent.where}"
            )
        if given.shape == wanted.shape and given.dtype == wanted.dtype:
            received.came = given.clone()
            return
        self.add_fault(
            f"{received.where}: {received.name} is {tuple(wanted.shape)} {wanted.dtype}, and "
            f"{tuple(given.shape)} {given.dtype} at {sent.where}"
        )

    def wait(self, rank: int, posted: Sequence[_End]) -> None:
        """Wait until the kernels of some ends are over, and write what they bring."""
        waited = [end for end in posted if end in self._open[rank]]
        peers = sorted({end.item.peer for end in waited})
        what = f"messages to and from {'rank' if len(peers) == 1 else 'ranks'} {str(peers)[1:-1]}"
        self.wait_until(rank, lambda: all(end.kernel.is_over for end in waited), what)
        for end in waited:
            del self._open[rank][end]
            if not end.is_as_posted:
                way = "sent" if end.item.is_send else "received"
                self.add_fault(f"{end.where}: {end.name} changes while it is {way}")
            if end.came is not None:
                end.item.tensor.copy_(end.came)

    # --- collectives, multiprocessors --------------------------------------------------

    def deposit(
        self, rank: int, group: CommGroup, sequence: int, operation: str, item: object
    ) -> None:
        """See :class:`InProcessWorld`."""
        super().deposit(rank, group, sequence, operation, item)
        # Numbers below zero are of no collective on the device.
        if group[1] >= 0 and len(group[0]) > 1:
            self.use(rank, group, f"a {operation}")
            self._orders[rank].append((group, sequence))
            where = self._transports[rank].where()
            self._named.setdefault((group, sequence), f"the {operation} of {where}")

    def in_flight(self, rank: int) -> int:
        """Thread blocks of what a rank has begun that waits for others, of each queue the first."""
        messages = sum(bool(queue) for (owner, _), queue in self._queues.items() if owner == rank)
        collectives = {
            group
            for (group, _), given in self._deposits.items()
            if rank in given and len(given) < len(group[0])
        }
        return messages * CHANNEL_CTAS + len(collectives) * COLLECTIVE_CTAS

    def _see_circles(self) -> None:
        """Collectives that come before each other by way of several ranks are a fault."""
        after: defaultdict[object, set[object]] = defaultdict(set)
        for order in self._orders:
            for one, other in pairwise(order):
                after[other].add(one)
        try:
            TopologicalSorter(after).prepare()
        except CycleError as error:
            names = [self._named[key] for key in error.args[1][:2]]
            self.add_fault(f"{names[0]} comes before {names[1]} on one rank and after it on others")


class StrictTransport(InProcessTransport):
    """One rank's transport in a :class:`StrictWorld`."""

    def __init__(self, world: StrictWorld, rank: int) -> None:
        super().__init__(world, rank)
        self._strict = world
        self.heartbeat = _Beats(self)

    def begin(self) -> None:
        """An instruction begins: others may go on first, and it needs a multiprocessor."""
        world = self._strict
        world.give_way(self.rank)
        held = world.in_flight(self.rank)
        world.most_blocks = max(world.most_blocks, held)
        world.wait_until(
            self.rank,
            lambda: world.in_flight(self.rank) < world.multiprocessors,
            f"one of {world.multiprocessors} multiprocessors: messages and collectives hold {held}",
        )

    def prepare(self, groups: Sequence[CommGroup], links: ChannelLinks) -> None:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        self._strict.make(self.rank, [*groups, *links])

    def post(self, transfers: Sequence[TransferEnd], channel: CommGroup) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        posted = self._strict.post(self.rank, transfers, channel)
        return Deferred(lambda: self._strict.wait(self.rank, posted))

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        work, gathered = super().all_gather(tensor, ranks, channel)
        for part in gathered:
            _poison(part)
        return work, gathered

    def start_gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        work = super().start_gather_flat(full, mine, ranks)
        _poison(full)
        return work

    def exchange(self, received: Pieces, sent: Pieces, ranks: Ranks, channel: int = 0) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        work = super().exchange(received, sent, ranks, channel)
        _poison(received[0])
        return work

    def after(self, work: Work, then: Callable[[], Work]) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`; without its wait nothing has a value."""
        both = super().after(work, then)

        def wait() -> None:
            self._strict.beside.pop(waited, None)
            both.wait()

        waited = Deferred(wait)
        self._strict.beside[waited] = self.where()
        return waited

    def synchronize(self) -> None:
        """Wait for all that this rank has begun."""
        self._strict.wait_until(
            self.rank,
            lambda: not self._strict.in_flight(self.rank),
            "all that is in flight on its device",
        )


class _Beats(Heartbeat):
    """Tells the transport when an instruction begins."""

    def __init__(self, transport: StrictTransport) -> None:
        super().__init__(bytearray(1 << 12), 0)
        self._transport = transport

    def beat(
        self, step: int, instruction_index: int, instruction: str, module: str | None = None
    ) -> None:
        """See :class:`mmlaunch.process.heartbeat.Heartbeat`."""
        super().beat(step, instruction_index, instruction, module)
        self._transport.begin()


def _storage_of(end: _End) -> torch.UntypedStorage:
    """What is kept for a transfer: of a part of a tensor the whole tensor."""
    return end.item.tensor.untyped_storage()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _poison(tensor: Tensor) -> None:
    """Fill with what no computation takes for a number of its own."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
