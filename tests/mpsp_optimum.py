"""The optimum of small instances by CP-SAT, which knows only the problem statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# An extra that `make install` leaves out; who imports this module skips without it.
from ortools.sat.python import cp_model  # pyright: ignore[reportMissingImports]

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Times in the unit of the tables.

    Attributes:
        seconds: of the best schedule found.
        bound_s: no schedule takes less; the same where the search ended.
    """

    seconds: float
    bound_s: float

    @property
    def proven(self) -> bool:
        """Whether none is better."""
        return self.bound_s >= self.seconds * (1 - 1e-9)


def optimum(
    instance: Instance, tables: Sequence[Floats], *, limit_s: float, tick_s: float
) -> Optimum:
    """Every block an interval on one of its chain's counts; at most N devices at any time.

    Args:
        tables: ``[K, L]`` times; multiples of the tick, or rounded down to them.
    """
    model = cp_model.CpModel()
    ticks = [(table / tick_s + 1e-9).astype(int) for table in tables]
    horizon = int(sum(table.min(axis=0).sum() for table in ticks)) + 1
    intervals: list[cp_model.IntervalVar] = []
    demands: list[int] = []
    firsts: list[cp_model.IntVar] = []
    lasts: list[cp_model.IntVar] = []
    for m, chain in enumerate(instance.chains):
        ends: list[cp_model.IntVar] = []
        for block in range(chain.blocks):
            start = model.new_int_var(0, horizon, f"s{m}.{block}")
            end = model.new_int_var(0, horizon, f"e{m}.{block}")
            taken: list[cp_model.IntVar] = []
            for k, count in enumerate(chain.counts):
                used = model.new_bool_var(f"u{m}.{block}.{k}")
                size = int(ticks[m][k, block])
                name = f"i{m}.{block}.{k}"
                intervals.append(model.new_optional_interval_var(start, size, end, used, name))
                demands.append(count)
                taken.append(used)
            model.add_exactly_one(taken)
            if ends:
                model.add(start >= ends[-1])
            else:
                firsts.append(start)
            ends.append(end)
        lasts.append(ends[-1])
        for other in chain.after:
            model.add(firsts[m] >= lasts[other])
    model.add_cumulative(intervals, demands, instance.devices)
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, lasts)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(seconds=float("inf"), bound_s=solver.best_objective_bound * tick_s)
    return Optimum(
        seconds=solver.objective_value * tick_s, bound_s=solver.best_objective_bound * tick_s
    )
