"""Steps after which slow ranks are named, in recorded production jobs.

    python benchmarks/bench_slow_ranks.py [--write-docs]

Each job is looked at as it was recorded: whoever is named but AR's slow worker is a false alarm.
Then each worker of ST and SE in turn is slowed by hand, from each of some steps on.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from page import conditions, table, write_section

FIRST = (0, 12, 20)
TIMES = (1.1, 1.2, 1.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.recorded import JOBS, named, recorded, slowed

    alone: list[tuple[str, ...]] = []
    rows: list[tuple[str, ...]] = []
    for job in JOBS:
        steps = recorded(job)
        num_steps, _, replicas, stages = steps.shape
        told = [
            f"worker {slow.rank} at step {at + 1}: {slow.kind} {slow.times:.2f} times"
            for at, slow in named(steps)
        ]
        alone.append((job, f"{replicas} x {stages}", str(num_steps), "; ".join(told) or "nobody"))
        for first in FIRST if job != "AR" else ():
            for times in TIMES:
                after: list[int] = []
                others = 0
                for rank in range(replicas * stages):
                    found = named(slowed(steps, rank, times, first))
                    after += [at + 1 - first for at, slow in found if slow.rank == rank]
                    others += sum(slow.rank != rank for _, slow in found)
                low, middle, high = np.quantile(after, (0, 0.5, 1))
                rows.append(
                    (
                        f"{job}, {times} times from step {first + 1} on",
                        f"{len(after)} of {replicas * stages}",
                        f"{low:.0f}",
                        f"{middle:.0f}",
                        f"{high:.0f}",
                        str(others),
                    )
                )
    header = ("slowed by hand", "named", "after steps: least", "median", "most", "others named")
    text = "\n\n".join(
        [
            f"`python benchmarks/bench_slow_ranks.py`. {conditions(load_before)} Recorded jobs of "
            "ByteDance-Seed/StragglerAnalysis (Apache-2.0), replicas x stages; each worker in turn "
            "is slowed in all its computes.",
            table(("as recorded", "workers", "steps", "named"), alone),
            table(header, rows),
        ]
    )
    print(text)
    if options.write_docs:
        write_section("slow-ranks", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
