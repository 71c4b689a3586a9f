"""How many processes load samples, from what these cost the ranks.

A step's samples are one piece of work: n processes load n steps at the same time. They keep up
with a step of s seconds if n * s is more than the seconds of loading.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

# All chosen by hand. Seconds of loading that must lie ahead: a rank's first loading process costs
# some, as it imports torch.
_PAYS_S = 10.0
# Shares of a step below which loading is nothing to speak of.
_NOTICED = 0.02
# More than the mean, as samples differ.
_MARGIN = 1.25
# Of a core that nobody has to spare: enough for a process that waits for files.
_SHARED_CORE = 0.5
_PROCESS_BYTES = 250e6
_MOST_AHEAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """The cost of one task's samples for one rank, as its first steps were.

    Attributes:
        rank: that needs them.
        task: whose they are.
        samples: that it loads for a step.
        load_s: for a step's samples in one process; the median.
        longest_s: the largest of these.
        core_s: of ``load_s`` what a core takes.
        rest_s: of the rank's step without its wait for data.
        batch_bytes: of a step's samples.
        sent_bytes: of the dataset; None where it cannot be sent to another process.
        memory_bytes: that loading processes of this rank and task may take.
        shared_bytes: of that what lies in shared memory: samples that are ahead.
        place: ranks with the same share the cores.
        cores: of the place.
        threads: with which the rank computes.
    """

    rank: int
    task: str
    samples: int
    load_s: float
    longest_s: float
    core_s: float
    rest_s: float
    batch_bytes: int
    sent_bytes: int | None
    memory_bytes: float
    shared_bytes: float
    place: str
    cores: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a rank loads a task's samples.

    Attributes:
        processes: 0 for the rank itself, at the start of a step.
        ahead: steps that each is ahead at most.
        limit: why there are not more, where that would help.
    """

    processes: int = 0
    ahead: int = 2
    limit: str = ""


def pays(load_s: float, rest_s: float, steps: int) -> bool:
    """Whether loading is worth a process beside so many steps' rest."""
    return load_s >= _NOTICED * rest_s and load_s * steps >= _PAYS_S


def choose(costs: Sequence[LoadCost], steps: int) -> list[Loading]:
    """The loading of each rank and task, such that no step waits for it.

    Cores that no rank computes with go to ranks by what they need. The same costs give the same
    answer on every rank.

    Args:
        costs: of all ranks.
        steps: that are still to come.
    """
    # All ranks wait for the one that loads longest: its rest is what a step is without loading.
    step_s = max(min((cost.rest_s for cost in costs), default=1.0), 1e-6)
    wanted = [
        min(math.ceil(_MARGIN * cost.load_s / step_s), cost.cores)
        if pays(cost.load_s, step_s, steps)
        else 0
        for cost in costs
    ]
    by_place: defaultdict[str, list[int]] = defaultdict(list)
    for index, cost in enumerate(costs):
        by_place[cost.place].append(index)
    chosen = [Loading()] * len(costs)
    for members in by_place.values():
        threads = {costs[i].rank: costs[i].threads for i in members}
        spare = costs[members[0]].cores - sum(threads.values())
        busy = {
            i: wanted[i] * min(1.0, costs[i].core_s / max(1e-9, costs[i].load_s)) for i in members
        }
        for i in members:
            share = max(_SHARED_CORE, spare * busy[i] / max(1e-9, sum(busy.values())))
            kept = wanted[i] if busy[i] <= share else int(share * wanted[i] / busy[i])
            limit = "no core is to spare" if kept < wanted[i] else ""
            chosen[i] = _within_memory(costs[i], kept, step_s, limit)
    return chosen


def _within_memory(cost: LoadCost, wanted: int, step_s: float, limit: str) -> Loading:
    """As many as fit, less far ahead if need be."""
    if not wanted:
        return Loading(limit=limit)
    if cost.sent_bytes is None:
        return Loading(limit="the dataset cannot be sent to another process")
    own_bytes, batch_bytes = _PROCESS_BYTES + cost.sent_bytes, max(1, cost.batch_bytes)

    def most(ahead: int) -> int:
        shared = ahead * batch_bytes
        return int(min(cost.memory_bytes / (own_bytes + shared), cost.shared_bytes / shared))

    # A process that meets the longest samples has begun with them so many steps before.
    ahead = min(_MOST_AHEAD, 1 + math.ceil(cost.longest_s / (wanted * step_s)))
    fitting = next((n for n in range(ahead, 1, -1) if most(n) >= wanted), 1)
    processes = min(wanted, most(fitting))
    found = Loading(processes=processes, ahead=fitting, limit=limit)
    return found if processes == wanted else replace(found, limit="memory allows no more")


def sent_bytes(dataset: Any, most: float) -> int | None:
    """Bytes of a dataset as a loading process gets it; None where it cannot be sent.

    Args:
        dataset: the data factory's.
        most: bytes after which nobody counts on.
    """
    sizer = _Sizer(most)
    try:
        sizer.dump(dataset)
    except Exception:  # whatever a dataset says of it
        return sizer.num_bytes if sizer.num_bytes > most else None
    return sizer.num_bytes


class _Sizer(pickle.Pickler):
    """Its own file, which counts bytes and keeps none; of tensors without a copy."""

    def __init__(self, most: float) -> None:
        self._most, self.num_bytes = most, 0
        super().__init__(cast(Any, self), protocol=pickle.HIGHEST_PROTOCOL)

    def write(self, data: Any) -> None:
        self._add(memoryview(data).nbytes)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        self._add(value.nbytes)
        return int, ()

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self._most:
            raise OverflowError
