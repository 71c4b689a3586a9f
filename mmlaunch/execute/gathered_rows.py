"""Rows of a cross-sample loss's inputs: who holds which, and how they reach their readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod

import torch
from torch import Tensor

from mmlaunch.comm.transport import Pieces, Transport, Work
from mmplan.program.features import are_apart, holders_of, readers, share, share_rows
from mmplan.program.model import CrossSampleLoss, Program, Stage
from mmplan.program.samples import SampleRange, intersect
from mmplan.program.shards import Ranks

# Of an input: the shape of a row, and its type.
RowLike = tuple[tuple[int, ...], torch.dtype]
# Finishes a gather; gives [sync_batch, ...] by input in sample order.
Finish = Callable[[], dict[int, Tensor]]


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Rows ``[start, stop)`` of an input that a rank holds: part of a micro-batch."""

    input: int
    stage: int
    mb: int
    start: int
    stop: int


class GatheredRows:
    """Brings rows of one sync batch to their readers (:mod:`mmplan.program.features`).

    Args:
        program: the whole program.
        transport: carries them.
        loss: whose inputs they are.
        batch: the sync batch.
        others_only: whether the loss compares rows with those of other inputs alone.
    """

    def __init__(
        self,
        program: Program,
        transport: Transport,
        loss: CrossSampleLoss,
        batch: int,
        *,
        others_only: bool,
    ) -> None:
        self._transport, self._loss = transport, loss
        inputs = [i for i, item in enumerate(loss.inputs) if item.stage is not None]
        holders = holders_of(program, loss)
        self._apart = are_apart(holders, others_only=others_only)
        found = readers(holders, others_only=others_only)
        self._readers: dict[int, Ranks] = dict(zip(inputs, found, strict=True))
        # Of a tensor-parallel group, the first rank gives the rows.
        self._layout: dict[int, list[HeldRows]] = {rank: [] for rank in loss.ranks}
        for i in inputs:
            stage = program.stages[loss.inputs[i].stage or 0]
            for d, group in enumerate(stage.ranks):
                self._layout[group[0]] += rows_of(stage, d, loss.samples(batch), i)
        self._spans = {rank: _joined(held) for rank, held in self._layout.items()}

    def gather(
        self, own: Mapping[int, Tensor], rows: Mapping[int, RowLike], channel: int
    ) -> Finish:
        """Begin to gather rows; every rank of the loss calls this.

        Args:
            own: input to the rows [N, ...] that this rank gives, in the order of its replica's
                micro-batches.
            rows: of each input, what its rows are like.
            channel: of the communicators.
        """
        begun = self._begin_apart if self._apart else self._begin_together
        return begun(own, rows, channel)

    def _begin_together(
        self, own: Mapping[int, Tensor], rows: Mapping[int, RowLike], channel: int
    ) -> Finish:
        """One gather of what each rank holds, padded to the longest."""
        size = max(
            sum((r.stop - r.start) * prod(rows[r.input][0]) for r in held)
            for held in self._layout.values()
        )
        flat = torch.zeros(size, dtype=_common(rows), device=self._transport.device)
        position = 0
        for i in sorted(own):
            flat[position : position + own[i].numel()] = own[i].reshape(-1)
            position += own[i].numel()
        work, gathered = self._transport.all_gather(flat, self._loss.ranks, channel)

        def finish() -> dict[int, Tensor]:
            work.wait()
            full = {i: self._empty(self._loss.sync_batch, like) for i, like in rows.items()}
            for rank, given in zip(self._loss.ranks, gathered, strict=True):
                position = 0
                for index, start, stop in self._spans[rank]:
                    target = full[index][start:stop]
                    target.copy_(given[position : position + target.numel()].view(target.shape))
                    position += target.numel()
            return full

        return finish

    def _begin_apart(
        self, own: Mapping[int, Tensor], rows: Mapping[int, RowLike], channel: int
    ) -> Finish:
        """Every row to the reader in whose share it stands, then the readers gather."""
        rank, ranks, samples = self._transport.rank, self._loss.ranks, self._loss.sync_batch
        read = [i for i, members in self._readers.items() if rank in members]
        shares = {i: self._empty(share_rows(len(self._readers[i]), samples), rows[i]) for i in read}
        starts = {
            i: share(self._readers[i].index(rank), len(self._readers[i]), samples)[0] for i in read
        }
        gathered: dict[int, list[Tensor]] = {}

        def place_own(item: HeldRows) -> Tensor:
            return shares[item.input][
                item.start - starts[item.input] : item.stop - starts[item.input]
            ]

        sent = [[self._cut(own, rows, item) for item in self._between(rank, to)] for to in ranks]
        # What stays here needs no message.
        for item, part in zip(self._between(rank, rank), sent[ranks.index(rank)], strict=True):
            place_own(item).copy_(part)
        sent[ranks.index(rank)] = []
        awaited = [[] if r == rank else [*self._between(r, rank)] for r in ranks]
        lengths = [sum(place_own(item).numel() for item in items) for items in awaited]
        dtype = _common(rows)
        received = torch.empty(sum(lengths), dtype=dtype, device=self._transport.device)
        work = self._transport.exchange(
            (received, lengths), _packed(sent, dtype, self._transport.device), ranks, channel
        )

        def gather_shares() -> Work:
            position = 0
            for item in (item for items in awaited for item in items):
                target = place_own(item)
                target.copy_(received[position : position + target.numel()].view(target.shape))
                position += target.numel()
            works: list[Work] = []
            for i in read:
                begun, gathered[i] = self._transport.all_gather(
                    shares[i], self._readers[i], channel
                )
                works.append(begun)
            return _All(works)

        gathering = self._transport.after(work, gather_shares)

        def finish() -> dict[int, Tensor]:
            gathering.wait()
            return {i: torch.cat(gathered[i])[:samples] for i in read}

        return finish

    def _between(self, source: int, target: int) -> Iterator[HeldRows]:
        """The rows that one rank holds of another's shares."""
        for held in self._layout[source]:
            members = self._readers[held.input]
            if target in members:
                wanted = share(members.index(target), len(members), self._loss.sync_batch)
                common = intersect((held.start, held.stop), wanted)
                if common is not None:
                    yield HeldRows(held.input, held.stage, held.mb, *common)

    def _cut(
        self, own: Mapping[int, Tensor], rows: Mapping[int, RowLike], item: HeldRows
    ) -> Tensor:
        """Some of the rows that this rank gives."""
        position = 0
        for held in self._layout[self._transport.rank]:
            if (held.input, held.mb, held.stage) == (item.input, item.mb, item.stage):
                first = position + item.start - held.start
                return own[item.input][first : first + item.stop - item.start]
            position += (held.stop - held.start) * (held.input == item.input)
        return self._empty(0, rows[item.input])

    def _empty(self, count: int, like: RowLike) -> Tensor:
        return torch.empty((count, *like[0]), dtype=like[1], device=self._transport.device)


@dataclass(frozen=True, slots=True)
class _All:
    """Several works as one."""

    works: list[Work]

    def wait(self) -> None:
        """Wait for all."""
        for work in self.works:
            work.wait()


def rows_of(stage: Stage, d: int, samples: SampleRange, index: int) -> list[HeldRows]:
    """Rows of a sync batch that a replica's micro-batches hold, in order."""
    found: list[HeldRows] = []
    for mb, span in enumerate(stage.microbatches[d]):
        shared = intersect(span, samples)
        if shared is not None:
            low, high = shared[0] - samples[0], shared[1] - samples[0]
            found.append(HeldRows(index, stage.index, mb, low, high))
    return found


def _joined(held: Iterable[HeldRows]) -> list[tuple[int, int, int]]:
    """Input, first row and end of what follows one another: fewer, longer copies."""
    found: list[tuple[int, int, int]] = []
    for rows in held:
        start = rows.start
        if found and found[-1][::2] == (rows.input, start):
            _, start, _ = found.pop()
        found.append((rows.input, start, rows.stop))
    return found


def _common(rows: Mapping[int, RowLike]) -> torch.dtype:
    return reduce(torch.promote_types, (dtype for _, dtype in rows.values()))


def _packed(parts: list[list[Tensor]], dtype: torch.dtype, device: torch.device) -> Pieces:
    """The tensors of each part, flat, and the lengths of the parts."""
    flat = [tensor.reshape(-1).to(dtype) for tensors in parts for tensor in tensors]
    lengths = [sum(tensor.numel() for tensor in tensors) for tensors in parts]
    return torch.cat([torch.empty(0, dtype=dtype, device=device), *flat]), lengths
