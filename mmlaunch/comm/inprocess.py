"""All ranks as threads of one process: the executor without processes.

One thread runs at a time and gives way only where it waits for another rank, so a run is
deterministic, and a deadlock is seen at once instead of hanging. Random numbers belong to
the rank: the generator's state is put back after every wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmlaunch.comm import wire
from mmlaunch.comm.transport import (
    CommGroup,
    Deferred,
    Done,
    Links,
    Parts,
    Transfer,
    Work,
    in_turn,
    seconds_since_first,
)
from mmplan.errors import RunFailedError
from mmplan.program.shards import Ranks

T = TypeVar("T")
# (source, target, tag, whether it is on the host)
_Address = tuple[int, int, int, bool]


class _AbandonedError(Exception):
    """Another rank failed; this one has nothing to add."""


class InProcessWorld:
    """A set of ranks that share this process.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Condition()
        self._mailbox: dict[_Address, list[Tensor]] = {}
        self._deposits: dict[tuple[CommGroup, int], dict[int, Any]] = {}
        self._collected: dict[tuple[CommGroup, int], int] = {}
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._alive = 0
        self._failure: BaseException | None = None

    def run(self, entry: Callable[[InProcessTransport], T]) -> list[T]:
        """Call ``entry`` once per rank and return the results by rank.

        Raises:
            BaseException: the first failure of a rank.
            RunFailedError: the ranks wait for each other.
        """
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            with self._turn:
                try:
                    if self._failure is None:
                        results[rank] = entry(InProcessTransport(self, rank))
                except _AbandonedError:
                    pass
                except BaseException as error:
                    self._failure = self._failure or error
                finally:
                    self._alive -= 1
                    self._see_deadlock()
                    self._turn.notify_all()

        self._alive = self.size
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def wait_until(self, rank: int, condition: Callable[[], bool]) -> None:
        """Let other ranks run until the condition holds."""
        if condition():
            return
        state = torch.get_rng_state()
        self._waiting[rank] = condition
        self._see_deadlock()
        self._turn.notify_all()
        self._turn.wait_for(lambda: self._failure is not None or condition())
        del self._waiting[rank]
        if self._failure is not None:
            raise _AbandonedError
        torch.set_rng_state(state)

    def _see_deadlock(self) -> None:
        if self._failure is not None or not self._alive or len(self._waiting) < self._alive:
            return
        if not any(condition() for condition in self._waiting.values()):
            self._failure = RunFailedError(
                f"ranks {sorted(self._waiting)} wait for each other",
                hint="mmplan check PLAN says where",
            )

    def put(self, key: _Address, tensor: Tensor) -> None:
        """Leave a message."""
        self._mailbox.setdefault(key, []).append(tensor)
        self._turn.notify_all()

    def take(self, rank: int, key: _Address) -> Tensor:
        """Wait for a message and remove it."""
        self.wait_until(rank, lambda: bool(self._mailbox.get(key)))
        return self._mailbox[key].pop(0)

    def deposit(self, rank: int, group: CommGroup, sequence: int, item: Any) -> None:
        """Leave an item for the group's collective of that number."""
        self._deposits.setdefault((group, sequence), {})[rank] = item
        self._turn.notify_all()

    def collect(self, rank: int, group: CommGroup, sequence: int) -> list[Any]:
        """Wait for all of the group's items and return them in rank order."""
        key, ranks = (group, sequence), group[0]
        deposits = self._deposits[key]
        self.wait_until(rank, lambda: len(deposits) == len(ranks))
        self._collected[key] = self._collected.get(key, 0) + 1
        if self._collected[key] == len(ranks):
            del self._deposits[key], self._collected[key]
        return [deposits[r] for r in ranks]


class InProcessTransport:
    """One rank's :class:`mmlaunch.comm.transport.Transport` in an :class:`InProcessWorld`."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.size
        self.device = torch.device("cpu")
        self._world = world
        self._sequence: dict[CommGroup, int] = {}

    def prepare(self, groups: Sequence[CommGroup], links: Links) -> None:
        """Nothing needs preparation here."""

    def post(self, transfers: Sequence[Transfer], channel: CommGroup) -> Work:
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
        total = self._start_sum(tensor, ranks)
        return Deferred(lambda: tensor.copy_(total()))

    def _start_sum(self, tensor: Tensor, ranks: Ranks) -> Callable[[], Tensor]:
        group = ranks, 0
        sequence = self._deposit(group, tensor.clone())

        def total() -> Tensor:
            first, *others = self._collect(group, sequence)
            found = first.clone()
            for part in others:
                found += part
            return found

        return total

    def start_reduce_scatter(self, mine: Tensor, full: Tensor, ranks: Ranks) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        total = self._start_sum(full, ranks)
        return Deferred(lambda: mine.copy_(total().chunk(len(ranks))[ranks.index(self.rank)]))

    def gather_flat(self, full: Tensor, mine: Tensor, ranks: Ranks) -> None:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        full.copy_(torch.cat(self._exchange(ranks, mine.clone())))

    def all_gather(
        self, tensor: Tensor, ranks: Ranks, channel: int = 0
    ) -> tuple[Work, list[Tensor]]:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        gathered = [torch.empty_like(tensor) for _ in ranks]
        group = ranks, channel
        sequence = self._deposit(group, tensor.clone())

        def fill() -> None:
            for target, source in zip(gathered, self._collect(group, sequence), strict=True):
                target.copy_(source)

        return Deferred(fill), gathered

    def exchange(self, received: Parts, sent: Parts, ranks: Ranks, channel: int = 0) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        group, place = (ranks, channel), ranks.index(self.rank)
        sequence = self._deposit(group, sent[0].clone().split([*sent[1]]))

        def fill() -> None:
            parts = [given[place] for given in self._collect(group, sequence)]
            for target, part in zip(received[0].split([*received[1]]), parts, strict=True):
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

    def gather_objects(self, item: Any, kind: Any = Any) -> list[Any]:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        found = self._exchange(tuple(range(self.world_size)), wire.pack(item, kind))
        return [wire.unpack(part, kind) for part in found]

    def broadcast_object(self, item: Any, source: int, kind: Any = Any) -> Any:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        mine = wire.pack(item, kind) if self.rank == source else b""
        return wire.unpack(self._exchange(tuple(range(self.world_size)), mine)[source], kind)

    def _collect(self, group: CommGroup, sequence: int) -> list[Any]:
        """Every rank's item; the ranks of a collective must mean the same one."""
        parts = self._world.collect(self.rank, group, sequence)
        kinds = {
            (tuple(part.shape), part.dtype) if isinstance(part, Tensor) else type(part).__name__
            for part in parts
        }
        if len(kinds) > 1:
            raise RunFailedError(
                f"ranks {list(group[0])} meet in one collective with different tensors: "
                f"{sorted(map(str, kinds))}",
                hint="mmplan check PLAN says where their programs part",
            )
        return parts

    def _deposit(self, group: CommGroup, item: Any) -> int:
        sequence = self._sequence.get(group, 0)
        self._sequence[group] = sequence + 1
        self._world.deposit(self.rank, group, sequence, item)
        return sequence

    def _exchange(self, ranks: Ranks, item: Any) -> list[Any]:
        group = ranks, 0
        return self._collect(group, self._deposit(group, item))
