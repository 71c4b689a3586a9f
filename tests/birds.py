"""The third person's workload of ``tests/third_person``, copied away, and plans for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmplan.schema.base import document_text, file_sha256
from mmplan.schema.plan import FileReference
from mmplan.schema.workload import load_workload
from tests.programs import loss, make_plan, trained_as, unit

SOURCE = Path(__file__).parent / "third_person"


def copy_workload(folder: Path) -> Path:
    """The workload file in a new folder ``birds`` outside the checkout."""
    target = folder / "birds"
    shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target / "workload.yaml"


def edited(workload: Path, old: str, new: str) -> Path:
    """The workload with one piece of its text replaced."""
    text = workload.read_text()
    assert text.count(old) == 1
    workload.write_text(text.replace(old, new))
    return workload


def two_rank_plan(workload: Path, path: Path, *, dp: bool = False) -> Path:
    """A pipeline of two stages on both ranks, the other tower beside its second stage.

    Args:
        workload: its file.
        path: of the plan.
        dp: two replicas of the first tower in place of the pipeline.
    """
    ranks = [[[0]], [[1]]] if dp else [[[0], [1]]]
    plan = make_plan(
        unit("sound", "spectrogram", pp=1 + (not dp), dp=1 + dp, k=2, blocks=4, ranks=ranks),
        unit("words", "description", k=2, blocks=3, ranks=[[[1]]]),
        losses=[
            loss("match", "sound", "words", sync_batch=8),
            loss("species", "sound", "kind", weight=0.5),
        ],
        batch=16,
        seed=3,
        name="birds",
    )
    relative = Path("..") / workload.parent.name / workload.name
    assert (path.parent / relative).resolve() == workload.resolve()
    named = {
        "workload": FileReference(path=str(relative), sha256=file_sha256(workload)),
        "profile": FileReference(path="profile.json", sha256="0" * 64),
    }
    plan = trained_as(plan, load_workload(workload), folder=None)
    path.write_text(document_text(plan.model_copy(update=named)))
    return path


def given_profile(path: Path, change: Callable[[dict[str, Any]], object] | None = None) -> Path:
    """A profile of the workload with round numbers, for a cpu cluster of two."""
    link = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
    device = {"name": "cpu", "memory_bytes": 1e9, "peak_flops": 1e10}
    profile: dict[str, Any] = {
        "version": 1,
        "name": "birds",
        "source": "given",
        "cluster": {
            "version": 1,
            "name": "cpu-2",
            "nodes": 1,
            "devices_per_node": 2,
            "device": device,
            "links": {"intra_node": link},
        },
        "modules": {
            "sound": _module(blocks=4, parameters=648, forward_s=2e-3),
            "words": _module(blocks=3, parameters=576, forward_s=1e-3),
        },
        "losses": {"match": {"points": [{"samples": 8, "forward_s": 1e-4, "backward_s": 1e-4}]}},
    }
    if change is not None:
        change(profile)
    path.write_text(json.dumps(profile))
    return path


def _module(*, blocks: int, parameters: float, forward_s: float) -> dict[str, Any]:
    points = [
        {
            "microbatch": size,
            "forward_s": size * forward_s,
            "backward_s": 2 * size * forward_s,
            "activation_bytes": 1000.0 * size,
        }
        for size in (1, 2, 8)
    ]
    return {
        "blocks": blocks,
        "parameters": parameters,
        "output_bytes_per_sample": 48,
        "boundary_bytes_per_sample": 288,
        "points": points,
    }
