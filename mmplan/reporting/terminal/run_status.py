"""The state of a run: figures of its record and metrics, as a document and as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from statistics import median
from typing import Any

from mmplan.reporting.numbers import first_of, percent, seconds
from mmplan.reporting.source import Run, StepMetrics
from mmplan.reporting.terminal.console import Grid

# Waits for data are those of the last steps.
_RECENT_STEPS = 100
_SHOWN_LINES = 3
_SHOWN_PEERS = 4
_SHOWN_VALUES = 5
# Most instructions take less.
_SILENT_S = 2.0
# No step is beyond it, and no second.
_LARGEST = 1e15


def status_document(run: Run, launch: Mapping[str, Any]) -> dict[str, Any]:
    """The document of ``mmlaunch status --json``.

    Args:
        run: the folder's record and metrics.
        launch: state, hosts, ranks and last checkpoint, as ``mmlaunch`` finds them.
    """
    record, steps = run.record, run.current
    ended = _mapping(record.get("ended"))
    last = run.segments[-1] if run.segments else None
    predicted_s = last.iteration_s if last else _number(record.get("predicted_iteration_s"))
    iteration_s = run.iteration_s
    rates = [s.samples_per_s for s in steps[run.warm_up :] if s.samples_per_s is not None]
    wait, rank = _data_wait(steps[-_RECENT_STEPS:])
    wall_s, goodput = _goodput(run, launch["state"])
    return {
        "run_dir": str(run.folder),
        "state": launch["state"],
        "cause": _text(ended.get("cause")),
        "started_at": _text(record.get("started_at")),
        "ended_at": _text(ended.get("at")),
        "step": run.steps[-1].step + 1 if run.steps else 0,
        "steps": _number(record.get("steps")),
        "last_step_s": _age_s(run),
        "time_source": run.time_source,
        "iteration_s": iteration_s,
        "predicted_iteration_s": predicted_s,
        "samples_per_s": median(rates) if rates else None,
        "predicted_samples_per_s": last.samples_per_s if last else None,
        "evaluation": (
            {"step": run.evaluations[-1].step, **run.evaluations[-1].values}
            if run.evaluations
            else None
        ),
        "data_wait": wait,
        "data_wait_rank": rank,
        "checkpoint_step": launch["checkpoint_step"],
        "checkpoint_s": launch["checkpoint_s"],
        "restarts": [
            {
                "at": _text(restart.get("at")),
                "cause": _text(restart.get("cause")),
                "from_step": _number(restart.get("from_step")),
            }
            for restart in map(_mapping, _list(record.get("restarts")))
        ],
        "slow_ranks": list(run.slow_ranks),
        "wall_s": wall_s,
        "goodput": goodput,
        "hosts": list(launch["hosts"]),
        "ranks": list(launch["ranks"]),
    }


def status_grids(status: Mapping[str, Any]) -> list[Grid]:
    """Tables for people of a status document."""
    rows = [
        ("state", _state(status)),
        ("step", _step(status)),
        ("iteration", _against(status, "iteration_s", seconds)),
        ("samples/s", _against(status, "samples_per_s", lambda value: f"{value:.4g}")),
    ]
    if status["evaluation"] is not None:
        rows.append(("last evaluation", _evaluation(status["evaluation"])))
    if status["data_wait"] is not None:
        rank = status["data_wait_rank"]
        whom = "" if rank is None else f", rank {rank} the longest"
        rows.append(("waiting for data", f"{percent(status['data_wait'])} of a step{whom}"))
    rows.append(("last checkpoint", _checkpoint(status)))
    if status["goodput"] is not None:
        wall = _age(status["wall_s"])
        rows.append(("goodput", f"{percent(status['goodput'])} of {wall} since the start"))
    restarts = status["restarts"]
    rows.append(("restarts", str(len(restarts))))
    rows += [(f"  {restart['at']}", _restart(restart)) for restart in restarts[-_SHOWN_LINES:]]
    rows += [("slow rank", line) for line in status["slow_ranks"][-_SHOWN_LINES:]]
    grids = [Grid(title=f"Run {status['run_dir']}", columns=("", ""), rows=rows)]
    if status["ranks"]:
        columns = (">rank", "host", "state", ">step", "in", "last sign")
        ranks = [_rank_row(rank) for rank in status["ranks"]]
        grids.append(Grid(title="Ranks", columns=columns, rows=ranks))
    return grids


def _state(status: Mapping[str, Any]) -> str:
    state = status["state"]
    if status["cause"]:
        return f"{state}: {status['cause']}"
    if status["hosts"]:
        hosts = first_of(status["hosts"], _SHOWN_PEERS, separator=", ", rest="…")
        return f"{state}; ask on {hosts} for the ranks there"
    return f"{state}, its launcher has ended without a word" if state == "killed" else state


def _step(status: Mapping[str, Any]) -> str:
    total, late_s = status["steps"], status["last_step_s"]
    done = str(status["step"]) + ("" if total is None else f" of {total}")
    return done if late_s is None else f"{done}, the last {_age(late_s)} ago"


def _against(status: Mapping[str, Any], field: str, text: Any) -> str:
    """A measured value against the plan's."""
    measured, predicted = status[field], status[f"predicted_{field}"]
    if measured is None:
        return "–" if predicted is None else f"– (predicted {text(predicted)})"
    if not predicted:
        return text(measured)
    return f"{text(measured)} (predicted {text(predicted)}: {measured / predicted:.2f} ×)"


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    values = [
        f"{name} {'nan' if value is None else f'{value:.4g}'}"
        for name, value in evaluation.items()
        if name != "step"
    ]
    shown = first_of(values, _SHOWN_VALUES, separator=", ", rest="…")
    return f"after step {evaluation['step']}: {shown}"


def _checkpoint(status: Mapping[str, Any]) -> str:
    step, age_s = status["checkpoint_step"], status["checkpoint_s"]
    return "none" if step is None else f"step {step}, {_age(age_s)} old"


def _restart(restart: Mapping[str, Any]) -> str:
    step = restart["from_step"]
    return f"{restart['cause']}" + ("" if step is None else f"; went on from step {step}")


def _rank_row(rank: Mapping[str, Any]) -> tuple[str, ...]:
    state, silent_s = rank["state"], rank["silent_s"]
    if rank["waits_for"]:
        peers = [str(peer) for peer in rank["waits_for"]]
        verb = "" if state == "waiting" else ", waited" if state == "dead" else ", waits"
        state += f"{verb} for {first_of(peers, _SHOWN_PEERS, separator=', ', rest='…')}"
    if silent_s is None:
        sign = "–"
    else:
        sign = f"silent for {_age(silent_s)}" if silent_s >= _SILENT_S else seconds(silent_s)
    step = "–" if rank["step"] is None else str(rank["step"])
    return str(rank["rank"]), rank["host"], state, step, rank["place"] or "–", sign


def _goodput(run: Run, state: str) -> tuple[float | None, float | None]:
    """Seconds since the start, and the share of them in which steps that count would be done.

    Steps that count are those since the start of this launch that no restart has thrown away,
    each at the median of its plan.
    """
    started_s = _time_s(run.record.get("started_at"))
    if started_s is None:
        return None, None
    until_s = _time_s(_mapping(run.record.get("ended")).get("at"))
    if state in ("running", "elsewhere"):
        until_s = time.time()
    elif until_s is None:  # killed: what came after its last step is unknown
        age_s = _age_s(run)
        until_s = started_s if age_s is None else time.time() - age_s
    wall_s = max(0.0, until_s - started_s)
    first = _number(run.record.get("started_step")) or 0
    starts = [segment.from_step for segment in run.segments] or [0]
    counted_s = 0.0
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        own = [s for s in run.steps if start <= s.step and (end is None or s.step < end)]
        times = [t for s in own if (t := _whole_s(s)) is not None]
        if times:
            counted_s += median(times) * sum(s.step >= first for s in own)
    return wall_s, min(1.0, counted_s / wall_s) if wall_s else None


def _whole_s(step: StepMetrics) -> float | None:
    """Seconds from a step's first wait for data to its update."""
    if step.iteration_s is None:
        return None
    return step.iteration_s + (step.update_s or 0.0) + (step.data_s or 0.0)


def _data_wait(steps: tuple[StepMetrics, ...]) -> tuple[float | None, int | None]:
    """The share of steps in which a rank waited for data, and the rank that waited most."""
    waited_s, total_s = dict[int, float](), 0.0
    longest_s = 0.0
    for step in steps:
        total_s += _whole_s(step) or 0.0
        longest_s += max((wait_s for _, wait_s in step.waits), default=0.0)
        for rank, wait_s in step.waits:
            waited_s[rank] = waited_s.get(rank, 0.0) + wait_s
    if not total_s:
        return None, None
    most = max(waited_s, key=lambda rank: waited_s[rank]) if longest_s else None
    return longest_s / total_s, most


def _age_s(run: Run) -> float | None:
    """Seconds since the last step was written."""
    try:
        written_s = (run.folder / "metrics.jsonl").stat().st_mtime
    except OSError:
        return None
    return max(0.0, time.time() - written_s) if run.steps else None


def _age(age_s: float) -> str:
    """Seconds as people say them: ``12 s``, ``5 min``, ``3.2 h``."""
    if age_s < 120:
        return f"{age_s:.1f} s"
    return f"{age_s / 60:.0f} min" if age_s < 7200 else f"{age_s / 3600:.1f} h"


def _time_s(said: Any) -> float | None:
    try:
        return datetime.fromisoformat(said).timestamp()
    except (ValueError, TypeError):
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < _LARGEST else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
