"""What a user may say of a run; launcher and workers read it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlaunch.launch.hosts import Meeting
from mmplan.program.model import Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run on the command line; see ``mmlaunch run --help``.

    Attributes:
        settings: fields of the workload that ``--set`` gives other values, dotted.
        meeting: the machines of the run.
        keep_every_s: one checkpoint of each so many seconds stays; None: only the newest.
        num_workers: loading processes of each rank and task; None to choose them.
        skip_damaged: resume from an older checkpoint where the newest is damaged, as restarts do.
        data_address: HOST:PORT of the cluster that prepares data; None to load on the machines.
        data_wait_s: longest wait of a step while that has no producer.
        profile: steps from the first number on, before the second, are profiled by torch.
        predicted: what computes of the plan should take, where a measured profile tells.
    """

    plan: Path
    steps: int | None = None
    run_dir: Path | None = None
    resume: bool = False
    resume_anyway: bool = False
    skip_damaged: bool = False
    save_every: int = 0
    async_save: bool = False
    keep_every_s: float | None = None
    max_restarts: int = 0
    workload: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] | None = None
    meeting: Meeting = field(default_factory=Meeting)
    timeout_s: float = 300.0
    start_timeout_s: float = 900.0
    num_workers: int | None = None
    data_address: str | None = None
    data_wait_s: float = 240.0
    emulation: Timings | None = None
    predicted: Timings | None = None
    profile: tuple[int, int] | None = None
