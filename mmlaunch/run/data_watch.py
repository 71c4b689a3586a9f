"""Steps that wait for data: processes chosen from what samples cost, and a hint once a run."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import add
from statistics import median

from mmlaunch.data.loader import Field, StepData
from mmlaunch.data.loading_processes import LoadCost, Loading, choose, pays
from mmlaunch.launch.worker_main import WorkerContext
from mmlaunch.measure.machine import memory_bytes
from mmlaunch.session.session import Session, StepResult
from mmplan.processes import num_cores
from mmplan.ragged import Ragged
from mmplan.wording import counted, rank_ranges

# Steps left out while caches and allocators, or loading processes, begin; then those looked at to
# choose; and those between two looks at the waiting.
_WARM_UP = 2
_MEASURED = 6
_WATCHED = 20
# Waiting after which fewer steps must do to choose.
_PATIENCE_S = 10.0
# Of a step: waiting that is worth a line.
_HINTED = 0.05
# Of a rank's share of the memory and of the shared memory, for its loading processes.
_MEMORY_SHARE = 0.25


class DataWatch:
    """Follows the sessions of a run.

    Args:
        ctx: the worker's.
        processes: for each rank and task; None to choose them.
    """

    def __init__(self, ctx: WorkerContext, processes: int | None) -> None:
        self._ctx, self._processes = ctx, processes
        self._hinted = False

    def follow(self, session: Session, until: int) -> None:
        """Watch a session's steps until their last one."""
        self._until, self._seen, self._first_s = until, 0, 0.0
        self._loads: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._parts: dict[str, StepData] = {}
        self._rests: list[float] = []
        self._costs: list[LoadCost] = []
        self._best: list[Loading] | None = None
        session.hooks.on_data.append(self._on_data)
        session.hooks.on_step.append(self._on_step)

    def _on_data(self, _: Session, data: Mapping[str, StepData]) -> None:
        if self._best is None and self._seen >= _WARM_UP:
            for task, part in data.items():
                self._loads[task].append((part.load_s, part.core_s))
                self._parts[task] = part

    def _on_step(self, session: Session, result: StepResult) -> None:
        self._seen += 1
        if self._seen <= _WARM_UP:
            return
        rest_s = result.iteration_s + result.update_s
        if self._best is None:
            self._rests.append(rest_s)
            # The same on all ranks, which choose after the same step.
            self._first_s += max(result.data_s_by_rank)
            if len(self._rests) == _MEASURED or self._first_s > _PATIENCE_S:
                self._choose(session)
        elif session.rank == 0 and not self._hinted:
            self._waits = [*map(add, self._waits, result.data_s_by_rank)]
            self._took_s += result.data_s + rest_s
            if self._seen % _WATCHED == 0:
                self._look(self._until - session.step_count, self._best)
                self._begin_look(session.transport.world_size)

    def _choose(self, session: Session) -> None:
        """Find every rank's processes from everyone's costs, and load in them."""
        left = self._until - session.step_count
        mine = [self._cost(session, task, left) for task in self._loads]
        everyone = session.transport.gather_objects(mine, list[LoadCost])
        self._costs = [*chain.from_iterable(everyone)]
        self._best = best = choose(self._costs, left)
        self._loads.clear()
        self._parts.clear()
        self._seen = 0
        self._begin_look(session.transport.world_size)
        if self._processes is None and any(found.processes for found in best):
            pairs = zip(self._costs, best, strict=True)
            session.data.use({c.task: f for c, f in pairs if c.rank == session.rank})
            self._tell("note", said_of(self._costs, best))

    def _cost(self, session: Session, task: str, left: int) -> LoadCost:
        loads, part, device = self._loads[task], self._parts[task], self._ctx.device
        load_s = median(load for load, _ in loads)
        num_local = int(os.environ["LOCAL_WORLD_SIZE"])
        room = _MEMORY_SHARE / num_local / len(self._loads)
        memory = room * memory_bytes(1)
        bound = ",".join(map(str, sorted(device.cores)))
        return LoadCost(
            rank=session.rank,
            task=task,
            samples=len(part.indices),
            load_s=load_s,
            longest_s=max(load for load, _ in loads),
            core_s=median(core for _, core in loads),
            rest_s=median(self._rests),
            batch_bytes=sum(_num_bytes(value) for value in part.fields.values()),
            # Counting takes a while, and of cheap samples nobody asks.
            sent_bytes=session.data.sent_bytes(task, memory) if pays(load_s, 0.0, left) else 0,
            memory_bytes=memory,
            shared_bytes=min(memory, room * _free_shared_bytes()),
            place=f"{os.environ['GROUP_RANK']}:{bound}",
            cores=num_cores(),
            threads=device.num_threads,
        )

    def _begin_look(self, num_ranks: int) -> None:
        self._waits, self._took_s, self._from = [0.0] * num_ranks, 0.0, self._seen

    def _look(self, left: int, best: list[Loading]) -> None:
        """Say once what would help, where much of the time to come would be spent waiting."""
        longest_s = max(self._waits)
        share, steps = longest_s / self._took_s, self._seen - self._from
        if share < _HINTED or not pays(longest_s / steps, self._took_s / steps, left):
            return
        self._hinted = True
        rank = self._waits.index(longest_s)
        self._tell("hint", hint_of(share, rank, self._costs, best, self._processes))

    def _tell(self, kind: str, message: str) -> None:
        if self._ctx.rank == 0:
            self._ctx.report({"kind": kind, "message": message})


def said_of(costs: Sequence[LoadCost], chosen: Sequence[Loading]) -> str:
    """The choice in a line."""
    by_rank: Counter[int] = Counter()
    for cost, found in zip(costs, chosen, strict=True):
        by_rank[cost.rank] += found.processes
    ranks: defaultdict[int, list[int]] = defaultdict(list)
    for rank, processes in by_rank.items():
        ranks[processes].append(rank)
    shares = [
        f"{counted(n, 'loading process', 'loading processes')} on "
        f"rank{'s' if len(ranks[n]) > 1 else ''} {rank_ranges(ranks[n])}"
        for n in sorted(ranks, reverse=True)
        if n
    ]
    load_s, rest_s = max(cost.load_s for cost in costs), min(cost.rest_s for cost in costs)
    return (
        f"data: {', '.join(shares)}; a step's samples take up to {1e3 * load_s:.1f} ms to load, "
        f"the rest of a step {1e3 * rest_s:.1f} ms"
    )


def hint_of(
    share: float,
    rank: int,
    costs: Sequence[LoadCost],
    best: Sequence[Loading],
    processes: int | None,
) -> str:
    """What would help against waiting for data, in a line.

    Args:
        share: of the steps' time.
        rank: that waits longest.
        costs: of all ranks.
        best: what these take.
        processes: that the user gave; None where they were chosen.
    """
    cost, found = max(
        (pair for pair in zip(costs, best, strict=True) if pair[0].rank == rank),
        key=lambda pair: pair[0].load_s,
    )
    now = found.processes if processes is None else processes
    more = found.processes if found.limit else max(found.processes, now + 1)
    return (
        f"steps wait {share:.0%} of their time for data (rank {rank} most): "
        f"{f'--num-workers {more}' if more > now else found.limit} (a sample takes "
        f"{1e3 * cost.load_s / max(1, cost.samples):.2g} ms, a step needs {cost.samples})"
    )


def _num_bytes(value: Field) -> int:
    parts = value if isinstance(value, Ragged) else (value,)
    return sum(part.nbytes for part in parts)


def _free_shared_bytes() -> float:
    """Of the memory through which loading processes hand over tensors."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return math.inf
