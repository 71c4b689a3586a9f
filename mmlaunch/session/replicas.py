"""Copies of parameters on several ranks, which a fault of a device may make differ.

Copies stay equal by construction: their gradients come from one sum and are updated alike. So
what differs in one bit is a fault, of memory or of a computation, and its rank can be named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from mmlaunch.comm.transport import Transport
from mmlaunch.execute.gradient_buckets import ParameterSlice, slices_of, whole_slice
from mmlaunch.model.local_model import LocalModel
from mmplan.errors import RunFailedError
from mmplan.program.model import Program
from mmplan.program.shards import Ranks, shard_sums
from mmplan.program.ties import groups_of

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at a time, whose weights take eight bytes each: few enough for a CPU's caches, enough to
# keep a GPU busy. Chosen by hand.
_AT_ONCE = 1 << 20


class ParameterCopies:
    """The parameters of one rank of which others hold copies; all ranks make it and call it.

    Trained and frozen ones, whole or cut. Of a rank's own tensor-parallel group only those are
    compared whose gradients have one sum: ranks of a group compute the others apart, and on a GPU
    two computations may differ in their last bits.

    Args:
        program: the whole program.
        model: this rank's parameters.
        transport: compares.
        without: names of parameters that are cut, so that there are no copies.
    """

    def __init__(
        self,
        program: Program,
        model: LocalModel,
        transport: Transport,
        *,
        without: Collection[str] = (),
    ) -> None:
        self._transport = transport
        found: defaultdict[Ranks, list[ParameterSlice]] = defaultdict(list)
        for ranks, item in _shared(program, model, transport.rank):
            if len(ranks) > 1 and item.name not in without:
                found[ranks].append(item)
        # Ranks hold tied parameters in different orders.
        self._held = {r: sorted(found[r], key=lambda item: item.name) for r in sorted(found)}
        self._sets = transport.gather_objects([*self._held], list[Ranks])

    def compare(self, step: int) -> None:
        """Hold the bits of all copies against each other.

        Every rank reads its parameters once and gets some eight-byte numbers of each other.

        Args:
            step: number of the one that is next updated or saved, for the message.

        Raises:
            RunFailedError: on all ranks, in the same words; names the rank that differs, of two
                both.
        """
        most = max(map(len, self._sets))
        if not most:
            return
        device = self._transport.device
        mine = torch.zeros(most, dtype=torch.int64, device=device)
        for index, items in enumerate(self._held.values()):
            mine[index] = digest((item.flat(item.parameter) for item in items), device)
        everyone = tuple(range(self._transport.world_size))
        work, gathered = self._transport.all_gather(mine, everyone)
        work.wait()
        digests: defaultdict[Ranks, dict[int, int]] = defaultdict(dict)
        rows = zip(self._sets, torch.stack(gathered).tolist(), strict=True)
        for rank, (sets, row) in enumerate(rows):
            for ranks, value in zip(sets, row, strict=False):
                digests[ranks][rank] = value
        for ranks, by_rank in sorted(digests.items()):
            if len({*by_rank.values()}) > 1:
                raise self._fault(step, ranks, by_rank)

    def _fault(self, step: int, ranks: Ranks, by_rank: dict[int, int]) -> RunFailedError:
        """Find the first parameter that differs; all ranks call it."""
        device = self._transport.device
        mine = [
            (item.name, int(digest([item.flat(item.parameter)], device)))
            for item in self._held.get(ranks, ())
        ]
        theirs = self._transport.gather_objects(mine, list[tuple[str, int]])
        of_ranks = zip(*(theirs[rank] for rank in ranks), strict=True)
        # All digests of single parameters may agree where two changes cancel out in one.
        name = next((found[0][0] for found in of_ranks if len({*found}) > 1), "a parameter")
        ((usual, count), *_) = Counter(by_rank.values()).most_common()
        apart = [rank for rank in ranks if by_rank[rank] != usual]
        if 2 * count > len(ranks):
            others = _named([rank for rank in ranks if rank not in apart])
            holds = "holds" if len(apart) == 1 else "hold"
            what = f"{_named(apart)} {holds} other bits of {name} than {others}"
        else:
            what = f"{_named(ranks)} hold different bits of {name}"
        return RunFailedError(
            f"step {step}: {what}",
            hint="look for a faulty device there; the copies of the last checkpoint were equal: go "
            "on with --resume",
        )


def digest(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """A number that any changed bit changes: int64 on the device, without a wait.

    The sum modulo 2**64 of all elements' bits, taken as integers, each times an odd number of its
    place. One element that differs always shows; several would have to cancel out exactly.

    Args:
        parts: flat, one after the other.
        device: of the parts.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    first = 1
    for part in parts:
        flat = part.detach().contiguous()
        for bits in flat.view(_BITS[min(flat.element_size(), 8)]).split(_AT_ONCE):
            weights = torch.arange(first, first + 2 * len(bits), 2, device=device)
            total += weights.mul_(bits).sum()
            first += 2 * len(bits)
    return total


def _shared(
    program: Program, model: LocalModel, rank: int
) -> Iterator[tuple[Ranks, ParameterSlice]]:
    """Every parameter of the rank, or part of it, with the ranks whose copies are equal."""
    tied = {tie.name: tie for tie in model.ties}
    of_losses = {
        loss.name: tuple(
            sorted({r for x in program.losses if x.name == loss.name for r in x.ranks})
        )
        for loss in program.losses
    }
    for name, parameter in model.named_parameters():
        owner, index = name.split(".")[:2]
        if owner == "losses":
            yield of_losses[index], whole_slice(name, parameter)
        else:
            blocks = tied[name].blocks if name in tied else (int(index),)
            parts = shard_sums(groups_of(program.stages, owner, blocks))
            for part in (part for part in parts if rank in part.ranks):
                for item in slices_of(part, {name: parameter}, model.layouts):
                    yield part.ranks, item


def _named(ranks: Iterable[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
