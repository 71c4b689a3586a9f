"""Every workload of the three papers, planned and simulated under every system.

    python benchmarks/reproduce.py [--parts contrastive,chains,multitask,stated] [--folder DIR]

Writes docs/reproduction.md and its pictures. Plans are kept in --folder (runs/reproduce), so
that an interrupted run goes on where it was. What goes in are the papers' configurations and
their clusters' specifications; every number that comes out is this program's own.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from page import ROOT
from reproduction import chains, contrastive, multitask, stated
from reproduction.jobs import run

from mmplan.errors import InvalidInputError
from mmplan.schema.base import write_text

PARTS = {
    "contrastive": contrastive,
    "chains": chains,
    "multitask": multitask,
    "stated": stated,
}
PAGE = ROOT / "docs" / "reproduction.md"
INTRODUCTION = """# The papers' workloads, planned and simulated

`make reproduce` writes this page: every plan below was made by a solver of mmplan from an
analytic profile (FLOPs counted on the meta device, a roofline of the cluster's GPU) and simulated
from its program, the one that `mmlaunch` would execute. **Nothing here was measured on a GPU**,
and no result of the papers was put in: only their models' sizes and their clusters'
specifications. Where batches, precision, degrees or recomputation are others than the papers', the
head of the workload in `examples/papers` says so. [simulator.md](simulator.md) says what the
simulator models and how far to trust it, [baselines.md](baselines.md) what the systems beside ours
are.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "reproduce")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise InvalidInputError(
            f"--parts {unknown[0]}: there are {', '.join(PARTS)}", hint="choose some of these"
        )
    began = time.perf_counter()
    parts = [PARTS[name] for name in names]
    results = run([job for part in parts for job in part.jobs()], options.folder)
    sections = [text for part in parts for text in part.section(results)]
    minutes = (time.perf_counter() - began) / 60
    closing = (
        f"{len(results)} plans; {datetime.now(UTC):%Y-%m-%d}, {minutes:.1f} minutes on "
        f"{os.cpu_count()} cores, plans already kept from before not made again."
    )
    text = "\n\n".join([INTRODUCTION.strip(), *sections, closing])
    if len(parts) == len(PARTS):
        write_text(PAGE, text + "\n")
        print(f"wrote {PAGE}")
    else:
        print(text)


if __name__ == "__main__":
    main()
