"""All ranks as threads of one process: the executor without processes.

One thread runs at a time and gives way only where it waits for another rank, to one that can go
on. So a run is deterministic, and a deadlock is seen at once instead of hanging. Random numbers
belong to the rank: the generator's state is put back after every wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmlaunch.comm import wire
from mmlaunch.comm.transport import (
    ChannelLinks,
    CommGroup,
    Deferred,
    Done,
    Pieces,
    TransferEnd,
    Work,
    in_turn,
    seconds_since_first,
)
from mmlaunch.process.heartbeat import Heartbeat
from mmplan.errors import RunFailedError
from mmplan.program.shards import Ranks

T = TypeVar("T")
# (source, target, tag, whether it is on the host)
_Address = tuple[int, int, int, bool]
# Number of the group, of all ranks, whose collectives are between hosts.
_HOST = -1


class _AbandonedError(Exception):
    """Another rank failed; this one has nothing to add."""


class InProcessWorld:
    """A set of ranks that share this process.

    Args:
        size: number of ranks.
        choose: which of the ranks that can go on does; default: the first.
    """

    def __init__(self, size: int, *, choose: Callable[[list[int]], int] = min) -> None:
        self.size = size
        self._choose = choose
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._transports: list[InProcessTransport] = []
        self._mailbox: dict[_Address, list[Tensor]] = {}
        # By group and number of its collective: by rank what it does there, and with what.
        self._deposits: dict[tuple[CommGroup, int], dict[int, tuple[str, Any]]] = {}
        self._collected: dict[tuple[CommGroup, int], int] = {}
        # By rank: what it needs to go on, and that in words.
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._alive: set[int] = set()
        self._failure: BaseException | None = None

    def transport(self, rank: int) -> InProcessTransport:
        """A rank's transport in this world."""
        return InProcessTransport(self, rank)

    def run(self, entry: Callable[[InProcessTransport], T]) -> list[T]:
        """Call ``entry`` once per rank, with its transport, and return the results by rank.

        Raises:
            BaseException: the first failure of a rank.
            RunFailedError: the ranks wait for each other.
        """
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self._failure is None:
                    results[rank] = entry(self._transports[rank])
            except _AbandonedError:
                pass
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._alive.remove(rank)
                self._pass_on()

        self._transports = [self.transport(rank) for rank in range(self.size)]
        self._alive = set(range(self.size))
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def wait_until(self, rank: int, condition: Callable[[], bool], what: str) -> None:
        """Let other ranks run until the condition holds.

        Args:
            rank: that waits.
            condition: of other ranks' making.
            what: the rank waits for, in words.
        """
        if not condition():
            self.give_way(rank, condition, what)

    def give_way(
        self, rank: int, condition: Callable[[], bool] = lambda: True, what: str = ""
    ) -> None:
        """Let another rank run; go on when it is this one's turn again and the condition holds."""
        state = torch.get_rng_state()
        self._waiting[rank] = condition, what
        self._pass_on()
        self._turns[rank].acquire()
        del self._waiting[rank]
        if self._failure is not None:
            raise _AbandonedError
        torch.set_rng_state(state)

    def _pass_on(self) -> None:
        """Give a rank that can go on its turn; after a failure any, so that all come to an end."""
        ready = [r for r in sorted(self._alive) if r not in self._waiting or self._waiting[r][0]()]
        if self._alive and not ready and self._failure is None:
            self._failure = self._hang()
        if self._failure is not None:
            ready = sorted(self._alive)
        if ready:
            self._turns[self._choose(ready)].release()

    def _hang(self) -> RunFailedError:
        waits = [
            f"{self._transports[rank].where()}, for {what}"
            for rank, (_, what) in sorted(self._waiting.items())
        ]
        return RunFailedError(
            f"ranks {sorted(self._waiting)} wait for each other: {'; '.join(waits[:4])}",
            hint="mmplan check PLAN says where",
        )

    def put(self, key: _Address, tensor: Tensor) -> None:
        """Leave a message."""
        self._mailbox.setdefault(key, []).append(tensor)

    def take(self, rank: int, key: _Address) -> Tensor:
        """Wait for a message and remove it."""
        self.wait_until(rank, lambda: bool(self._mailbox.get(key)), f"a message of rank {key[0]}")
        return self._mailbox[key].pop(0)

    def deposit(
        self, rank: int, group: CommGroup, sequence: int, operation: str, item: Any
    ) -> None:
        """Leave an item for the group's collective of that number."""
        self._deposits.setdefault((group, sequence), {})[rank] = operation, item

    def collect(self, rank: int, group: CommGroup, sequence: int) -> list[tuple[str, Any]]:
        """Wait for all of the group's items and return them in rank order."""
        key, ranks = (group, sequence), group[0]
        deposits = self._deposits[key]
        what = f"the {deposits[rank][0]} of ranks {list(ranks)}"
        self.wait_until(rank, lambda: len(deposits) == len(ranks), what)
        self._collected[key] = self._collected.get(key, 0) + 1
        if self._collected[key] == len(ranks):
            del self._deposits[key], self._collected[key]
        return [deposits[r] for r in ranks]


class InProcessTransport:
    """One rank's :class:`mmlaunch.comm.transport.Transport` in an :class:`InProcessWorld`.

    Attributes:
        heartbeat: for the session, so that a rank that waits for ever can say where.
    """

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.size
        self.device = torch.device("cpu")
        self.heartbeat = Heartbeat.detached()
        self._world = world
        self._sequence: dict[CommGroup, int] = {}

    def where(self) -> str:
        """The rank, and the instruction at which it is."""
        where = self.heartbeat.where
        if where.instruction_index < 0:
            return ", ".join(filter(None, (f"rank {self.rank}", str(where))))
        return (
            f"rank {self.rank}, step {where.step}, instruction {where.instruction_index} "
            f"({where.instruction})"
        )

    def prepare(self, groups: Sequence[CommGroup], links: ChannelLinks) -> None:
        """Nothing needs preparation here."""

    def post(self, transfers: Sequence[TransferEnd], channel: CommGroup) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        taken: list[Callable[[], None]] = []
        for item in transfers:
            if item.is_send:
                self._world.put((self.rank, item.peer, item.tag, False), item.tensor.clone())
            else:
                taken.append(self._taking(item.tensor, (item.peer, self.rank, item.tag, False)))
        return Deferred(lambda: [take() for take in taken])

    def send_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        self._world.put((self.rank, peer, tag, True), tensor.clone())
        return Done()

    def receive_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        return Deferred(self._taking(tensor, (peer, self.rank, tag, True)))

    def _taking(self, tensor: Tensor, address: _Address) -> Callable[[], None]:
        def take() -> None:
            sent = self._world.take(self.rank, address)
            if sent.shape != tensor.shape or sent.dtype != tensor.dtype:
                raise RunFailedError(
                    f"a message of {tuple(sent.shape)} {sent.dtype} came where "
                    f"{tuple(tensor.shape)} {tensor.dtype} was expected"
                )
            tensor.copy_(sent)

        return take

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """See :class:`mmlaunch.comm.transport.Transport`; sums in rank order."""
        self.start_all_reduce(tensor, ranks).wait()

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        total = self._start_sum(tensor, ranks, "sum")
        return Deferred(lambda: tensor.copy_(total()))

    def _start_sum(self, tensor: Tensor, ranks: Ranks, operation: str) -> Callable[[], Tensor]:
        group = ranks, 0
        sequence = self._deposit(group, operation, tensor.clone())

        def total() -> Tensor:
            first, *others = self._collect(group, sequence)
            found = first.clone()
            for part in others:
                found += part
            return found

        return total

    def start_reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        total = self._start_sum(full, ranks, "sum of slices")
        return Deferred(lambda: mine.copy_(total().chunk(len(ranks))[ranks.index(self.rank)]))

    def gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        self.start_gather_flat(full, mine, ranks).wait()

    def start_gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        group = ranks, 0
        sequence = self._deposit(group, "gather of slices", mine.clone())
        return Deferred(lambda: full.copy_(torch.cat(self._collect(group, sequence))))

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        gathered = [torch.empty_like(tensor) for _ in ranks]
        group = ranks, channel
        sequence = self._deposit(group, "gather", tensor.clone())

        def fill() -> None:
            for target, source in zip(gathered, self._collect(group, sequence), strict=True):
                target.copy_(source)

        return Deferred(fill), gathered

    def exchange(self, received: Pieces, sent: Pieces, ranks: Ranks, channel: int = 0) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        group, place = (ranks, channel), ranks.index(self.rank)
        sequence = self._deposit(group, "exchange", sent[0].clone().split([*sent[1]]))

        def fill() -> None:
            parts = [given[place] for given in self._collect(group, sequence)]
            for target, part in zip(received[0].split([*received[1]]), parts, strict=True):
                if target.shape != part.shape:
                    raise self._different(ranks, {tuple(target.shape), tuple(part.shape)})
                target.copy_(part)

        return Deferred(fill)

    def after(self, work: Work, then: Callable[[], Work]) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        return in_turn(work, then)

    def mark(self) -> float:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        return time.perf_counter()

    def seconds_of(self, marks: Sequence[float]) -> list[float]:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        return seconds_since_first(marks)

    def synchronize(self) -> None:
        """Nothing runs beside the host."""

    def gather_objects(self, item: Any, kind: Any = Any, *, to: int | None = None) -> list[Any]:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        parts = self._on_host(wire.pack(item, kind))
        return [wire.unpack(part, kind) for part in parts if to in (None, self.rank)]

    def broadcast_object(self, item: Any, source: int, kind: Any = Any) -> Any:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        mine = wire.pack(item, kind) if self.rank == source else b""
        return wire.unpack(self._on_host(mine)[source], kind)

    def _on_host(self, item: bytes) -> list[bytes]:
        """Every rank's item, beside the device's communicators."""
        return self._exchange((tuple(range(self.world_size)), _HOST), "gather of objects", item)

    def _collect(self, group: CommGroup, sequence: int) -> list[Any]:
        """Every rank's item; the ranks of a collective must mean the same one."""
        parts = self._world.collect(self.rank, group, sequence)
        kinds = {
            (operation, tuple(part.shape), part.dtype) if isinstance(part, Tensor) else operation
            for operation, part in parts
        }
        if len(kinds) > 1:
            raise self._different(group[0], kinds)
        return [part for _, part in parts]

    def _different(self, ranks: Ranks, kinds: Iterable[object]) -> RunFailedError:
        return RunFailedError(
            f"{self.where()}: ranks {list(ranks)} meet in one collective with different "
            f"tensors or operations: {sorted(map(str, kinds))}",
            hint="mmplan check PLAN says where their programs part",
        )

    def _deposit(self, group: CommGroup, operation: str, item: Any) -> int:
        sequence = self._sequence.get(group, 0)
        self._sequence[group] = sequence + 1
        self._world.deposit(self.rank, group, sequence, operation, item)
        return sequence

    def _exchange(self, group: CommGroup, operation: str, item: Any) -> list[Any]:
        return self._collect(group, self._deposit(group, operation, item))
