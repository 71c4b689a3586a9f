"""The page's first section: the plan and the quality of its prediction, in plain words."""

from __future__ import annotations

from collections.abc import Iterator

from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup
from mmplan.reporting.source import ReportData
from mmplan.schema.plan import Plan, Unit
from mmplan.wording import counted

# Units with a sentence each; the table of units has all.
_MOST_UNITS = 12
# Characters of a sentence's ranks.
_MOST_RANKS = 60
_EMULATED = (
    "The run's computes were waits of the profile's times, its processes, messages and "
    "reductions real. Its times test the prediction of everything but the computes; nothing "
    "was trained."
)


def overview_section(data: ReportData) -> str:
    """What the plan brings, tiles with the main figures, then sentences."""
    against = fmt.gain(data.plan)
    return (
        (markup.text("p", f"Simulated, this plan is {against}.") if against else "")
        + markup.element("div", _tiles(data), class_="tiles")
        + markup.text("p", _what_is_planned(data.plan))
        + markup.bullets(_who_runs_what(data.plan), class_="facts")
        + markup.text("p", _times(data))
        + (
            markup.warning("Emulated devices", _EMULATED)
            if data.run and data.run.is_emulated
            else sharing_note(data)
        )
    )


def _tiles(data: ReportData) -> str:
    plan, predicted = data.plan, data.plan.predicted
    tiles = [
        ("predicted iteration", fmt.seconds(predicted.iteration_s), f"from {data.source_label}"),
        ("predicted samples/s", fmt.count(predicted.samples_per_s), "without the update"),
    ]
    measured_s = data.run.iteration_s if data.run else None
    if measured_s:
        ratio = predicted.iteration_s / measured_s
        tiles += [
            (f"{data.time_source} iteration", fmt.seconds(measured_s), "median of the run"),
            (f"predicted / {data.time_source}", f"{ratio:.3g}", "1 is a perfect prediction"),
        ]
    tiles += [
        ("devices used", f"{predicted.devices_used} of {plan.devices}", plan.cluster.device.name),
        ("idle share", fmt.percent(predicted.bubble_fraction), "of the devices used, predicted"),
    ]
    return "".join(
        markup.element(
            "div",
            markup.text("span", name, class_="name")
            + markup.text("strong", value)
            + markup.text("span", below, class_="below"),
            class_="tile",
        )
        for name, value, below in tiles
    )


def _what_is_planned(plan: Plan) -> str:
    tasks = ", ".join(
        f"{name} ({counted(task.batch, 'sample')} a step)"
        if len(plan.tasks) > 1
        else counted(task.batch, "sample")
        for name, task in plan.tasks.items()
    )
    modules = {name for task in plan.tasks.values() for name in task.modules}
    kind = "processes" if plan.cluster.device.is_cpu else "devices"
    where = f"{plan.devices} {kind} of cluster {plan.cluster.name}"
    trains = f"{plan.name} trains {counted(len(modules), 'module')}"
    if len(plan.tasks) > 1:
        return f"{trains} in {counted(len(plan.tasks), 'task')}, {tasks}, on {where}."
    return f"{trains} on {where}, {tasks} a step."


def _who_runs_what(plan: Plan) -> Iterator[str]:
    yield from map(_unit_sentence, plan.units[:_MOST_UNITS])
    if len(plan.units) > _MOST_UNITS:
        more = counted(len(plan.units) - _MOST_UNITS, "more unit is", "more units are")
        yield f"{more} in the table below."
    for name, task in plan.tasks.items():
        prefix = f"{name}: " if len(plan.tasks) > 1 else ""
        for loss_name, loss in task.losses.items():
            ranks = {
                r for x in plan.losses if (x.name, x.task) == (loss_name, name) for r in x.ranks
            }
            over = (
                f"over sync batches of {counted(loss.sync_batch, 'sample')}"
                if loss.sync_batch
                else "micro-batch by micro-batch"
            )
            yield f"{prefix}Loss {loss_name} is computed {over} on {_ranks(tuple(ranks))}."
    idle = plan.solver.idle_ranks
    if idle:
        yield f"Idle: {_ranks(idle)}."


def _unit_sentence(unit: Unit) -> str:
    parts = [counted(unit.dp, "replica")]
    if unit.pp > 1:
        parts.append(f"{unit.pp} pipeline stages each")
    if unit.tp > 1:
        how = "items of its samples" if unit.items else "tensor parallel"
        parts.append(f"each stage split {unit.tp} ways ({how})")
    first, last = unit.blocks[0][0], unit.blocks[-1][1]
    blocks = f"blocks [{first}, {last})"
    what = blocks if unit.name == unit.module else f"{blocks} of module {unit.module}"
    sizes = fmt.first_of(fmt.microbatch_sizes(unit), 4, separator=" or ", rest="others")
    return (
        f"{unit.name} ({what}) runs in {', '.join(parts)} on {_ranks(unit.all_ranks)}: "
        f"{_shares(unit)} a step, in micro-batches of {sizes} a round "
        f"({unit.schedule.kind} order)."
    )


def _shares(unit: Unit) -> str:
    if len(set(unit.samples)) == 1:
        return counted(unit.samples[0], "sample") + (" each" if unit.dp > 1 else "")
    return f"{fmt.repeated(unit.samples)} samples, replica by replica,"


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = fmt.ranks(ranks)
    if len(shown) > _MOST_RANKS:
        return f"{len(set(ranks))} ranks from {min(ranks)} to {max(ranks)}"
    return fmt.ranks_words(ranks)


def _times(data: ReportData) -> str:
    predicted = data.plan.predicted
    text = (
        f"One iteration (forward, backward, communication and losses; without the update) is "
        f"predicted to take {fmt.seconds(predicted.iteration_s)}, which is "
        f"{fmt.count(predicted.samples_per_s)} samples/s."
    )
    run = data.run
    if run is None:
        return text
    measured_s = run.iteration_s
    if measured_s is None or not measured_s:
        return f"{text} Nothing was measured in this run."
    ratio = predicted.iteration_s / measured_s
    left_out = f" after the first {run.warm_up}" if run.warm_up else ""
    samples = sum(task.batch for task in data.plan.tasks.values())
    return (
        f"{text} {data.time_source.capitalize()}: {fmt.seconds(measured_s)}, "
        f"{fmt.count(samples / measured_s)} samples/s, "
        f"the median of {counted(len(run.current) - run.warm_up, 'step')}{left_out}. "
        f"Predicted / {data.time_source} = {ratio:.3f}: {_verdict(ratio)}."
    )


def _verdict(ratio: float) -> str:
    if not ratio:
        return "the plan was not simulated"
    if abs(ratio - 1) < 0.005:
        return "the prediction is right to half a percent"
    if ratio < 2 / 3:
        return f"the run takes {1 / ratio:.3g} times as long as predicted"
    if ratio < 1:
        return f"the run is {fmt.percent(1 / ratio - 1)} slower than predicted"
    return f"the run is {fmt.percent(1 - 1 / ratio)} faster than predicted"


def sharing_note(data: ReportData) -> str:
    """The effect on the prediction where ranks outnumber the machine's cores; else nothing."""
    run, plan = data.run, data.plan
    used = len({rank for unit in plan.units for rank in unit.all_ranks})
    if run is None or run.cores is None or not plan.cluster.device.is_cpu or used <= run.cores:
        return ""
    cores = counted(run.cores, "core")
    shared = _cores_shared_by_profile(data)
    if shared is None:
        text = (
            f"{counted(used, 'rank')} share {cores}. The prediction assumes a core for each "
            f"rank, so measured times may be up to {used}/{run.cores} = {used / run.cores:.3g} "
            "times longer than predicted whenever all ranks compute at once; the measured "
            "timeline shows ranks that wait for a core as longer instructions."
        )
    else:
        text = (
            f"{counted(used, 'rank')} share {cores}. The profile was measured with "
            f"{counted(shared[0], 'process', 'processes')} busy "
            f"at once on {counted(shared[1], 'core')}, so its times already contain sharing a core "
            f"{shared[0]}/{shared[1]} = {shared[0] / shared[1]:.3g} ways: where all ranks compute "
            "at once the prediction holds, where some of them wait the others run faster than "
            "predicted, and the order in which ranks get a core is chance."
        )
    measured_s = run.iteration_s
    if measured_s and plan.predicted.iteration_s:
        ratio = measured_s / plan.predicted.iteration_s
        text += f" In this run measured is {ratio:.3g} times predicted."
        if shared is None and ratio > 1.1 * used / run.cores:
            text += " That is more than sharing explains: other programs may have been running."
    return markup.warning("More ranks than cores", text)


def _cores_shared_by_profile(data: ReportData) -> tuple[int, int] | None:
    """(processes, cores) at the profile's measurement, where its times contain sharing cores.

    None with fewer processes than cores, and where processor time was measured: it stands
    still while a process waits for a core.
    """
    written = data.profile.provenance if data.profile else {}
    if written.get("clock") == "processor time":
        return None
    processes, cores = written.get("processes"), written.get("cores")
    if isinstance(processes, int) and isinstance(cores, int) and 0 < cores < processes:
        return processes, cores
    return None
