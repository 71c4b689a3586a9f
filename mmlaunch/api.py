"""What the command ``mmlaunch`` does on one machine, as functions: typed results, no printing.

``import mmlaunch`` has every name of this module. ``mmlaunch run`` is :func:`train` here, because
``mmlaunch.run`` is the package that runs. Every function raises subclasses of
:class:`mmplan.errors.MMPlanError` with a message and a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmlaunch.launch.watch import OnEvent
from mmlaunch.run import export as exporting
from mmlaunch.run import run as running
from mmlaunch.run.export import Exported
from mmlaunch.run.options import RunOptions
from mmlaunch.run.run import RunSummary, Verified, Workers
from mmlaunch.run.segments import Planner, sets_of_run
from mmlaunch.run.status import LaunchStatus, launch_status
from mmplan.errors import InvalidInputError, require_linux
from mmplan.schema.base import parse_json, read_text
from mmplan.schema.plan import Plan
from mmplan.wording import Hint


def _silent(_: object) -> None:
    """For those who want to hear nothing."""


def _no_planner(tasks: tuple[str, ...], _: Path) -> Plan:
    raise InvalidInputError(
        f"the run trains {', '.join(tasks)} too, for which the plan is not",
        hint="give planner=, or use mmlaunch run, which plans for them",
    )


def train(
    plan: str | Path,
    *,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    save_every: int = 0,
    max_restarts: int = 0,
    workload: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    tasks: Sequence[str] | None = None,
    num_workers: int | None = None,
    timeout_s: float = 300.0,
    planner: Planner = _no_planner,
    on_event: OnEvent = _silent,
    hint: Hint = _silent,
) -> RunSummary:
    """Train in one process per rank, as ``mmlaunch run`` does, on this machine.

    Args:
        plan: the file.
        steps: of the optimizer; None: ``train.steps`` of the workload.
        run_dir: for metrics, checkpoints and weights; None: ``runs/NAME``.
        resume: from the newest checkpoint of the run folder.
        save_every: steps between checkpoints; 0: none.
        max_restarts: after failures, within an hour.
        workload: in place of the file that the plan names.
        settings: dotted fields of the workload that are no part of the plan, with other values.
        tasks: of the plan; None: those that the workload's ``train.tasks`` has, else all.
        num_workers: data processes of each rank and task; None: as many as their samples cost.
        timeout_s: after which a rank that makes no progress ends the run.
        planner: makes a plan for tasks that the given plan does not have.
        on_event: hears of every step as a dictionary with ``kind``, and of the launcher.
        hint: hears what could not be checked before.

    Returns:
        The steps that were done, why training ended, and each rank's peak memory in bytes.

    Raises:
        InvalidInputError: plan and workload do not belong together, or there are too few devices.
        WorkerFailedError: a worker died or hung.
    """
    require_linux("mmlaunch.train")
    options = RunOptions(
        plan=Path(plan),
        steps=steps,
        run_dir=None if run_dir is None else Path(run_dir),
        resume=resume,
        save_every=save_every,
        max_restarts=max_restarts,
        workload=None if workload is None else Path(workload),
        settings=dict(settings or {}),
        tasks=None if tasks is None else tuple(tasks),
        timeout_s=timeout_s,
        data_wait_s=0.8 * timeout_s,
        num_workers=num_workers,
    )
    prepared = running.prepare(options)
    sets = sets_of_run(prepared.plan, prepared.workload, options.tasks)
    tried = running.try_out(prepared, {name for item in sets for name in item.tasks})
    for note in (*prepared.notes, *tried):
        hint(note)
    return running.run(options, prepared, on_event, planner)


def verify(
    plan: str | Path,
    *,
    steps: int = 3,
    originals: Sequence[str] = (),
    workers: Workers = "processes",
    shrink: bool = False,
    workload: str | Path | None = None,
    timeout_s: float = 300.0,
    hint: Hint = _silent,
) -> Verified:
    """Hold planned steps and a reload against one process, as ``mmlaunch verify`` does.

    Args:
        plan: the file.
        steps: of the optimizer.
        originals: ``[module=]package.module:callable`` that returns the uncut model, or one for
            each of several modules.
        workers: ranks as processes; as ``threads`` of this one; or as threads under the rules of
            GPUs and NCCL (``strict``).
        shrink: a small plan with every class of alike ranks, as threads.
        workload: in place of the file that the plan names.
        timeout_s: after which a rank that makes no progress ends it.
        hint: hears what could not be checked before.

    Returns:
        What was compared; ``faults`` has a sentence for each difference.

    Raises:
        InvalidInputError: plan and workload do not belong together.
        WorkerFailedError: a worker died or hung.
    """
    require_linux("mmlaunch.verify")
    options = RunOptions(
        plan=Path(plan),
        workload=None if workload is None else Path(workload),
        timeout_s=timeout_s,
        data_wait_s=0.8 * timeout_s,
    )
    prepared = running.prepare(options)
    for note in (*prepared.notes, *running.try_out(prepared, prepared.plan.tasks)):
        hint(note)
    if shrink:
        prepared = running.shrunk(prepared)
        workers = "threads" if workers == "processes" else workers
    found = running.verify(options, prepared, steps=steps, workers=workers, originals=originals)
    if found.failure is not None:
        raise found.failure
    return found


def status(run_dir: str | Path) -> LaunchStatus:
    """How a run does, from its folder: while it goes on, and after.

    Its steps and evaluations are in ``metrics.jsonl`` and ``evaluations.jsonl``, which
    ``mmplan.load_run`` reads.

    Args:
        run_dir: that ``mmlaunch run`` wrote.

    Raises:
        InvalidInputError: it is no run's folder.
    """
    path = Path(run_dir) / "run.json"
    if not path.is_file():
        raise InvalidInputError(
            f"{run_dir}: no run's folder: run.json is missing",
            hint="give the folder that mmlaunch run wrote",
        )
    record = parse_json(read_text(path), path)
    return launch_status(Path(run_dir), record if isinstance(record, dict) else {})


def export(
    source: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    kind: str = "transformers",
    workload: str | Path | None = None,
) -> list[Exported]:
    """Write a run's weights as their models are loaded elsewhere, as ``mmlaunch export`` does.

    Args:
        source: a run's folder, a checkpoint, or a file with weights.
        folder: new, or empty.
        step: of a run's checkpoint; None: the last.
        kind: ``transformers`` for ``from_pretrained``; ``dcp`` for torch.distributed.checkpoint
            with the optimizer's state.
        workload: in place of the run's own.

    Returns:
        The models that were written.

    Raises:
        InvalidInputError: there is nothing to export, or the weights are of another workload.
    """
    exporting.check_kind(kind)
    exporting.check_output(Path(folder))
    found = exporting.find_source(
        Path(source), step=step, workload=None if workload is None else Path(workload)
    )
    return exporting.export(found, Path(folder), kind=kind)
