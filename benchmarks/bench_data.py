"""Samples from tar shards: the index, the start at a late step, and the wait of a training step.

    python benchmarks/bench_data.py [--samples 1000000] [--steps 40] [--write-docs]

A million samples of one small member lie in ten shards. The index is made, then opened by another
process. The first batch is asked for at step 0 and at step a million, by three orders. A consumer
that takes 60 ms for a step of 32 samples then reads samples whose decoding takes 1.5 ms of a core:
in the step itself, in one and three loading processes, and by one and two producers of a Ray
cluster on this machine, of a core each. Ragged samples have nine rows in one of eight and one row
in the others, and the same time a row. The consumer sleeps, as a host does while its device
computes, so whoever loads has the cores.
"""

from __future__ import annotations

import argparse
import io
import os
import secrets
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from page import conditions, table, write_section

from mmlaunch.data.loader import StepLoader, step_indices
from mmlaunch.data.producers import DataSource, Producers, RemoteLoader
from mmlaunch.data.ray_node import RayNode, joined, take_settings
from mmplan.ragged import Ragged
from mmplan.schema.workload import DataSpec
from mmplan.sources.mixture import Mixture
from mmplan.sources.tar_shards import TarShards

SHARDS = 10
BATCH = 32
STEP_S = 0.06
DECODE_S = 0.0015
LATE = 1_000_000
WORKERS = (0, 1, 3)
PRODUCERS = (1, 2)
# Producers import torch first.
WARM_UP = 12
# A row of every eighth sample stands for nine: the mean is two.
LONG, EVERY = 9, 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        shards = _write(Path(name), options.samples)
        index = Path(name) / "shards.index"
        made_s, _ = _timed(lambda: TarShards(shards, index, _label))
        opened_s, data = _timed(lambda: TarShards(shards, index, _label))
        text = "\n\n".join(
            [
                f"`python benchmarks/bench_data.py --samples {options.samples} --steps "
                f"{options.steps}`. {conditions(load_before)}",
                f"The index of {options.samples:,} samples in {SHARDS} shards is made in "
                f"{made_s:.1f} s and opened in {1e3 * opened_s:.1f} ms ({made_s / opened_s:,.0f} "
                "times sooner).",
                _starts(shards, index, data),
                _waits(shards, index, options.steps),
            ]
        )
    print(text)
    if options.write_docs:
        write_section("Samples from tar shards", text)
    return 0


def _write(folder: Path, samples: int) -> list[Path]:
    print(f"writing {samples:,} samples", file=sys.stderr)
    paths = [folder / f"shard-{number}.tar" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for index in range(samples * number // SHARDS, samples * (number + 1) // SHARDS):
                content = str(index).encode()
                member = tarfile.TarInfo(f"{index:08d}.cls")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return paths


def _label(members: dict[str, Any]) -> dict[str, Any]:
    return {"label": torch.tensor(int(members["cls"]))}


def equal(members: dict[str, Any]) -> dict[str, Any]:
    """A sample whose decoding keeps a core for a while."""
    _compute(DECODE_S)
    return _label(members)


def ragged(members: dict[str, Any]) -> dict[str, Any]:
    """One whose decoding takes as long on average, and a time for each row."""
    sample = _label(members)
    rows = LONG if int(sample["label"]) % EVERY == 0 else 1
    _compute(DECODE_S * rows * EVERY / (LONG + EVERY - 1))
    return sample | {"rows": Ragged(torch.zeros(rows, 256), torch.tensor([rows]))}


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = run()
    return time.perf_counter() - began_s, result


def _starts(shards: Sequence[Path], index: Path, data: TarShards) -> str:
    """The first batch at step 0 and at a late one."""
    half = TarShards(shards[: SHARDS // 2], index.with_name("half.index"), _label)
    datasets = {
        "all samples in random order": data,
        "window of 4,096": TarShards(shards, index, _label, 4096),
        "mixture 3 : 1 of two sets of shards": Mixture([data, half], [3, 1]),
    }
    rows: list[list[str]] = []
    for name, dataset in datasets.items():
        now_s, late_s = (
            _timed(lambda d=dataset, s=step: d[step_indices(d, BATCH, 0, s)[0]])[0]
            for step in (0, LATE)
        )
        rows.append([name, f"{now_s:.3f} s", f"{late_s:.3f} s", f"{late_s / now_s:.2f}"])
    return table(["order", "first sample of step 0", f"of step {LATE:,}", "ratio"], rows)


def _waits(shards: Sequence[Path], index: Path, steps: int) -> str:
    """The share of a step in which its consumer waits for samples."""
    rows: list[list[str]] = []
    for decode in (equal, ragged):
        data = TarShards(shards, index, decode)
        arguments: dict[str, Any] = {
            "batch": BATCH,
            "seed": 0,
            "ranges": [(0, BATCH)],
            "fields": sorted(data[0]),
        }
        alone_s = 0.0

        def row(made: str, loader: StepLoader, kind: str = decode.__name__) -> None:
            nonlocal alone_s
            waited_s, step_s = _consumed(loader, steps)
            alone_s = alone_s or step_s
            ratio = f"{alone_s / step_s:.2f}"
            rows.append([kind, made, f"{1e3 * step_s:.1f} ms", f"{waited_s / step_s:.1%}", ratio])

        for workers in WORKERS:
            loader = StepLoader(data, num_workers=workers, **arguments)
            row(f"{workers} loading processes" if workers else "in the step", loader)
        source = DataSource(
            data=DataSpec(
                factory="mmplan.sources.tar_shards:tar_shards",
                args={
                    "shards": f"{shards[0].parent}/shard-{{0..{len(shards) - 1}}}.tar",
                    "decode": f"bench_data:{decode.__name__}",
                    "index": str(index),
                },
            ),
            folder=Path(__file__).parent,
            seed=0,
            field="data",
        )
        for count in PRODUCERS:
            with _cluster(count) as producers:
                loader = RemoteLoader(data, source=source, producers=producers, **arguments)
                row(f"{count} remote producers", loader)
    header = ["samples", "made", "a step", "of it waiting", "steps/s by those of 0"]
    return table(header, rows)


@contextmanager
def _cluster(count: int) -> Generator[Producers]:
    """A head without cores, and nodes of one core each."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    take_settings("the benchmark")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as stack:
        for cores in (0,) + (1,) * count:
            head = cores == 0
            node = RayNode(address=address, head=head, cpus=cores, store_bytes=200_000_000)
            stack.callback(node.close)
            node.start()
            node.wait()
            address = node.address()
        folder = stack.enter_context(joined(address))
        yield Producers(address=address, folder=folder, wait_s=60.0)


def _consumed(loader: StepLoader, steps: int) -> tuple[float, float]:
    """Seconds of waiting and of a whole step, the mean after some first ones."""
    waited_s, began_s = 0.0, 0.0
    try:
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                waited_s, began_s = 0.0, time.perf_counter()
            waited_s += _timed(lambda: next(loader))[0]
            time.sleep(STEP_S)
    finally:
        loader.close()
    return waited_s / steps, (time.perf_counter() - began_s) / steps


if __name__ == "__main__":
    sys.exit(main())
