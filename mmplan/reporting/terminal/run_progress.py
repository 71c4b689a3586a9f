"""A run as its user sees it: lines and a bar while it goes on, a trace when it is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmplan.errors import MMPlanError
from mmplan.processes import num_cores
from mmplan.program.compile import compile_plan
from mmplan.program.trace import TimedInstruction, trace_events, write_trace
from mmplan.reporting.terminal.console import Output, Progress
from mmplan.schema.plan import Plan
from mmplan.simulation.predict import simulate_plan
from mmplan.wording import counted, slow_rank

# Of a step: shorter waits for data are not spoken of.
_SAID_SHARE = 0.05


def follow(
    out: Output, bar: Progress, plan: Plan, total: int, *, emulated: bool = False
) -> Callable[[dict[str, Any]], None]:
    """Shows the events of a run as they come.

    Args:
        out: for lines.
        bar: for steps.
        plan: that was started.
        total: steps of the run.
        emulated: whether nothing is trained, so that there is no loss.
    """
    predicted_s = plan.predicted.iteration_s

    def on_event(event: dict[str, Any]) -> None:
        nonlocal predicted_s
        match event:
            case {"kind": "step"}:
                done, took = event["step"] + 1, event["iteration_s"]
                loss = "loss nan  " if event["loss"] is None else f"loss {event['loss']:.4f}  "
                bar.update(
                    done,
                    total,
                    f"{'' if emulated else loss}{event['samples_per_s']:.0f} samples/s  iteration "
                    f"{1e3 * took:.1f} ms (predicted {1e3 * predicted_s:.1f}){_waiting(event)}",
                )
            case {"kind": "segment"}:
                segment = event["segment"]
                predicted_s = segment.plan.predicted.iteration_s
                if event["of"] > 1:
                    out.text(
                        f"until step {segment.until}: tasks {', '.join(segment.plan.tasks)}, "
                        f"predicted {1e3 * predicted_s:.1f} ms"
                    )
            case {"kind": "start"}:
                out.text(f"run folder {event['run_dir']}, {counted(plan.devices, 'rank')}")
                used, cores = plan.predicted.devices_used, num_cores()
                if plan.cluster.device.is_cpu and plan.cluster.nodes == 1 and used > cores:
                    out.hint(
                        f"{used} ranks share {counted(cores, 'core')}: steps take longer than a "
                        "profile of fewer processes predicts"
                    )
            case {"kind": "slow"}:
                values = (event[name] for name in ("step", "rank", "instruction", "times"))
                out.text(slow_rank(*values))
            case {"kind": "resumed"}:
                out.text(f"going on after step {event['step']}, from its checkpoint")
            case {"kind": "note"}:
                out.text(event["message"])
            case {"kind": "hint"}:
                out.hint(event["message"])
            case {"launcher": "restart"}:
                out.text(f"starting all workers again: {event['cause']}")
            case {"launcher": "stop-requested"}:
                out.text("stopping after this step; Ctrl-C from now on ends everything at once")
            case _:
                pass  # a checkpoint: the folder shows it

    return on_event


def _waiting(step: Mapping[str, Any]) -> str:
    """The share of a step in which a rank waited for data, where it is more than a few percent."""
    rank, longest_s = next(iter(step["data_s_by_rank"].items()))
    share = longest_s / (step["data_s"] + step["iteration_s"] + step["update_s"])
    return f"  waiting for data {share:.0%} (rank {rank})" if share >= _SAID_SHARE else ""


def write_run_trace(
    out: Output,
    plan: Plan,
    plan_path: Path,
    spans: Mapping[int, Sequence[tuple[int, float, float]]],
    path: Path,
) -> None:
    """Write a run's ``trace.json``: predicted and measured rows of each rank, one above the other.

    Args:
        out: hears why there are no predicted rows.
        plan: that ran last.
        plan_path: its file.
        spans: rank to (instruction, start, end) of its last step, seconds.
        path: where the trace goes.
    """
    program = compile_plan(plan)
    measured = [
        TimedInstruction(rank, index, start_s, end_s)
        for rank, row in spans.items()
        for index, start_s, end_s in row
    ]
    groups = [trace_events(program, measured, process_name="measured", process=1)]
    try:
        events = simulate_plan(plan, plan_path).events()
    except MMPlanError as error:
        out.hint(f"trace.json has no predicted rows: {error.message}")
    else:
        groups.insert(0, trace_events(program, events, process_name="predicted", process=0))
    write_trace(path, *groups)
