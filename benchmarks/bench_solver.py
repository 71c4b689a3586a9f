"""Solver time: the exact balancer beside the plain O(M N^2) recurrence.

    python benchmarks/bench_solver.py [--seconds 60] [--seed 0]

The problem is the pure data-parallel one, max_m tau_m(k_m) with sum k_m <= N, where tau_m is
the best time of module m with at most k devices: the only form that the recurrence

    V_1(g) = tau_1(g),    V_m(g) = min_k max(V_{m-1}(g - k), tau_m(k))

solves. Both must give the same time. The recurrence runs while its estimated time, from the
size before it, stays under --seconds; it is plain Python, and once more with each
minimum over k as one numpy operation. The last column is the whole objective (forwards,
rounds and backwards apart, three sync batches, four degrees and four micro-batch counts a
replica), which the recurrence cannot express.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from mmplan.solvers.distmm.balancer import OptionTable, balance, make_table

Floats = NDArray[np.float64]
DEVICES = (64, 256, 1024, 4096, 16384)
MODULES = (2, 3, 4, 6)
SYNC_BATCH = 32768
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """tau_m(k) of every module, k = 1..devices, and the tables for the whole objective."""

    modules: int
    devices: int
    tau: list[Floats]
    full: list[OptionTable]


def make_case(modules: int, devices: int, rng: np.random.Generator) -> Case:
    """Times that fall with the slowest replica's share, on a fixed part."""
    tau: list[Floats] = []
    full: list[OptionTable] = []
    counts = np.arange(1, devices + 1)
    for _ in range(modules):
        fixed_s, work_s = rng.uniform(0, 0.01), rng.uniform(0.5, 5.0)
        tau.append(fixed_s + work_s * np.ceil(SYNC_BATCH / counts) / SYNC_BATCH)
        full.append(full_table(devices, fixed_s, work_s, rng.uniform(0.1, 0.5)))
    return Case(modules=modules, devices=devices, tau=tau, full=full)


def full_table(devices: int, fixed_s: float, work_s: float, forward: float) -> OptionTable:
    """Degrees 1, 2, 4, 8 and 1, 2, 4, 8 micro-batches; of equal shares the fewest replicas."""
    rows: list[tuple[float, ...]] = []
    for degree in (1, 2, 4, 8):
        stages = max(1, degree // 2)
        shares = np.ceil(SYNC_BATCH / np.arange(1, devices // degree + 1))
        _, fewest = np.unique(-shares, return_index=True)
        for replicas in fewest + 1:
            share = np.ceil(SYNC_BATCH / replicas)
            for count in (1, 2, 4, 8):
                stage_s = 1.05**stages * (fixed_s + work_s * share / SYNC_BATCH / count) / degree
                f, b = stage_s * forward, stage_s * (1 - forward)
                steps = count + stages - 1
                group = degree * 10**6 + replicas
                rows.append((degree * replicas, steps * f, count * (f + b), steps * b, group))
    table = np.array(rows)
    return make_table(
        table[:, 0].astype(np.int64),
        table[:, 1],
        round_s=table[:, 2],
        last_s=table[:, 3],
        group=table[:, 4].astype(np.int64),
    )


def recurrence(tau: list[Floats], devices: int) -> float:
    """The recurrence as it is written, in plain Python."""
    infinite = float("inf")
    value = [infinite, *tau[0].tolist()]
    for times in (row.tolist() for row in tau[1:]):
        grown = [infinite] * (devices + 1)
        for g in range(1, devices + 1):
            best = infinite
            for k in range(1, g):
                longest = max(value[g - k], times[k - 1])
                if longest < best:
                    best = longest
            grown[g] = best
        value = grown
    return value[devices]


def recurrence_numpy(tau: list[Floats], devices: int) -> float:
    """The same operations, the minimum over k in one numpy call."""
    value = np.concatenate(([np.inf], tau[0]))
    for times in tau[1:]:
        grown = np.full(devices + 1, np.inf)
        for g in range(2, devices + 1):
            grown[g] = np.maximum(value[g - 1 : 0 : -1], times[: g - 1]).min()
        value = grown
    return float(value[devices])


def balancer(tau: list[Floats], devices: int) -> float:
    """The exact balancer, building its tables included."""
    counts = np.arange(1, devices + 1)
    tables = [make_table(counts, times) for times in tau]
    return balance(tables, devices=devices, rounds=1).objective_s


def timed(run: Callable[[], float], repeats: int) -> tuple[float, float]:
    """(median seconds, result)."""
    seconds: list[float] = []
    result = float("nan")
    for _ in range(repeats):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result


class Limited:
    """Runs a slow method while the next size is expected to end in time."""

    def __init__(self, method: Callable[[list[Floats], int], float], limit_s: float) -> None:
        self._method, self._limit_s = method, limit_s
        self._per_step_s = 0.0

    def __call__(self, case: Case, expected: float) -> float | None:
        """Median seconds, None where it would take too long.

        Raises:
            RuntimeError: its result is another than the balancer's.
        """
        steps = (case.modules - 1) * case.devices**2
        if self._per_step_s * steps > self._limit_s:
            return None
        seconds, value = timed(lambda: self._method(case.tau, case.devices), 1)
        if value != expected:
            raise RuntimeError(f"{self._method.__name__} gives {value}, the balancer {expected}")
        self._per_step_s = seconds / steps
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one slow run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    slow = Limited(recurrence, options.seconds)
    vector = Limited(recurrence_numpy, options.seconds)
    print(f"{datetime.now(tz=UTC):%Y-%m-%d}, {platform.machine()}, Python", end=" ")
    print(f"{platform.python_version()}, numpy {np.__version__}, median of {REPEATS}\n")
    print(
        "| modules | devices | balancer | recurrence | ratio | recurrence, numpy | ratio "
        "| whole objective |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for devices in DEVICES:
        for modules in MODULES:
            case = make_case(modules, devices, rng)
            seconds, value = timed(lambda c=case: balancer(c.tau, c.devices), REPEATS)
            full_s, _ = timed(
                lambda c=case: balance(c.full, devices=c.devices, rounds=3).objective_s, 1
            )
            cells = [
                cell for method in (slow, vector) for cell in row(method(case, value), seconds)
            ]
            print(
                f"| {modules} | {devices} | {seconds * 1e3:.3g} ms | {' | '.join(cells)} "
                f"| {full_s * 1e3:.3g} ms |",
                flush=True,
            )


def row(other_s: float | None, seconds: float) -> tuple[str, str]:
    """Seconds and ratio, or dashes where it was not run."""
    if other_s is None:
        return "-", "-"
    return f"{other_s * 1e3:.3g} ms", f"{other_s / seconds:.2g}"


if __name__ == "__main__":
    main()
