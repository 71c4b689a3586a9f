"""Reasons for a plan, in sentences: its bottleneck, its idle times, its alternatives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten

from mmplan.costs.cost_model import CostModel
from mmplan.planning.lower_bound import above_work, lower_bound
from mmplan.planning.what_if import Effect, Replan
from mmplan.program.instructions import Compute
from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup
from mmplan.reporting.source import ReportData
from mmplan.reporting.terminal.console import Grid
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.simulation.critical_path import seconds_on_path
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.step import Simulation
from mmplan.wording import counted

# Modules that get a line each; the rest share one.
_MOST_MODULES = 5
# Smaller gains, as shares of the step, are not listed.
_LEAST_GAIN = 0.005
# Characters of another plan's degrees: with many units they fill a page.
_LABEL = 200
# Share of a device's memory above which the memory limits the choice of plans; by hand.
_FULL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One line of an explanation."""

    topic: str
    text: str


def explain(
    plan: Plan,
    profile: Profile,
    simulation: Simulation,
    effects: Sequence[Effect],
    *,
    run_memory: ExpectedMemory | None = None,
) -> list[Reason]:
    """The lines, most important first.

    Args:
        plan: the plan to explain.
        profile: its profile.
        simulation: of its program under that profile.
        effects: of its parts, largest gain first; see
            :func:`mmplan.planning.what_if.part_effects`.
        run_memory: expected memory of a run's ranks, where it is known.
    """
    return [
        Reason(topic="plan", text=_headline(plan, profile, simulation)),
        *([Reason(topic="gain", text=against)] if (against := fmt.gain(plan)) else []),
        *_module_reasons(simulation),
        Reason(topic="path", text=_path(simulation)),
        Reason(topic="binds", text=_binding(plan, effects)),
        Reason(topic="waits", text=_waiting(simulation)),
        Reason(topic="memory", text=_memory(plan, simulation)),
        *_expected_memory(plan, simulation, run_memory),
        Reason(topic="bound", text=_bound(plan, profile, simulation)),
        Reason(topic="formula", text=_formula(plan)),
        Reason(topic="instead", text=_instead(plan)),
        *_left_over(plan),
    ]


def replan_reason(plan: Plan, replan: Replan) -> Reason:
    """Throughput of the best plan of another setting."""
    if replan.plan is None:
        return Reason(topic=replan.change, text=f"no plan: {replan.why}")
    now, then = plan.predicted, replan.plan.predicted
    faster = f" ({then.samples_per_s / now.samples_per_s - 1:+.1%})" if now.samples_per_s else ""
    return Reason(
        topic=replan.change,
        text=f"{fmt.count(then.samples_per_s)} samples/s{faster}, "
        f"{fmt.seconds(then.iteration_s)} a step on {counted(replan.plan.devices, 'device')}",
    )


def best_batch(plan: Plan, replans: Sequence[Replan]) -> Reason:
    """The batch with the most samples per second."""
    tried = [("the plan's own batch", plan.predicted)]
    tried += [(r.change, r.plan.predicted) for r in replans if r.plan is not None and r.times != 1]
    change, best = max(tried, key=lambda pair: pair[1].samples_per_s)
    return Reason(
        topic="best batch",
        text=f"{change}, {fmt.count(best.samples_per_s)} samples/s, of {len(tried)} tried; what "
        "a batch does to learning is not said",
    )


def reason_grid(title: str, reasons: Sequence[Reason]) -> Grid:
    """The lines as a table."""
    return Grid(title=title, columns=("", "why"), rows=[(r.topic, r.text) for r in reasons])


def _headline(plan: Plan, profile: Profile, simulation: Simulation) -> str:
    return (
        f"{fmt.seconds(simulation.iteration_s)} a step of {counted(simulation.samples, 'sample')}, "
        f"{fmt.count(simulation.samples_per_s)} samples/s on {simulation.devices_used} of "
        f"{counted(plan.devices, 'device')}, by a profile that is {profile.source}"
    )


def _module_reasons(simulation: Simulation) -> Iterator[Reason]:
    """Devices and share of the work of each module, most work first."""
    work_s: defaultdict[str, float] = defaultdict(float)
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    stages = simulation.program.stages
    for rank, row in enumerate(simulation.program.instructions):
        clocks = zip(row, simulation.clocks.start[rank], simulation.clocks.end[rank], strict=True)
        for item, start_s, end_s in clocks:
            if isinstance(item, Compute):
                module = stages[item.stage].module
                work_s[module] += end_s - start_s
                ranks[module].add(rank)
    total_s = sum(work_s.values()) or 1.0
    ordered = sorted(work_s, key=lambda module: -work_s[module])
    for module in ordered[:_MOST_MODULES]:
        count = len(ranks[module])
        device_s = count * simulation.iteration_s or 1.0
        yield Reason(
            topic=module,
            text=f"{counted(count, 'device')} ({fmt.ranks(sorted(ranks[module]))}) for "
            f"{fmt.percent(work_s[module] / total_s)} of the work, busy with it "
            f"{fmt.percent(work_s[module] / device_s)} of the step",
        )
    rest = ordered[_MOST_MODULES:]
    if rest:
        share = sum(work_s[module] for module in rest) / total_s
        yield Reason(topic="others", text=f"{', '.join(rest)}: {fmt.percent(share)} of the work")


def _path(simulation: Simulation) -> str:
    """What the end of the step waits for, one thing after the other."""
    step_s, on_path = simulation.iteration_s or 1.0, seconds_on_path(simulation)
    rest_s = simulation.iteration_s - sum(on_path.values())
    own = {**dict(list(on_path.items())[:_MOST_MODULES]), "all else": rest_s}
    parts = [f"{w} {fmt.percent(s / step_s)}" for w, s in own.items() if s >= _LEAST_GAIN * step_s]
    return f"the end of the step waits for {', '.join(parts)}"


def _binding(plan: Plan, effects: Sequence[Effect]) -> str:
    gains = [
        f"{fmt.percent(effect.gain)} "
        + (f"if {effect.part} took half the time" if effect.is_module else f"without {effect.part}")
        for effect in effects
        if effect.gain >= _LEAST_GAIN
    ]
    full = max(plan.predicted.memory_bytes, default=0.0) / plan.cluster.device.memory_bytes
    memory = "; memory binds as well" if full >= _FULL else ""
    if not gains:
        return f"no single part: none would shorten the step if it were faster{memory}"
    return f"the step would be shorter by {', '.join(gains)}{memory}"


def _waiting(simulation: Simulation) -> str:
    shares = [
        (idle_s / simulation.iteration_s if simulation.iteration_s else 0.0, rank)
        for rank, (idle_s, used) in enumerate(zip(simulation.idle_s, simulation.used, strict=True))
        if used
    ]
    busy = 1 - simulation.bubble_fraction - simulation.communication_fraction
    text = (
        f"devices compute {fmt.percent(busy)} of the time, communicate "
        f"{fmt.percent(simulation.communication_fraction)}, wait "
        f"{fmt.percent(simulation.bubble_fraction)}"
    )
    if not shares:
        return text
    most, rank = max(shares, key=lambda pair: (pair[0], -pair[1]))
    modules = dict.fromkeys(s.module for s in simulation.program.stages_of(rank))
    return f"{text}; rank {rank} ({', '.join(modules)}) waits most, {fmt.percent(most)}"


def _memory(plan: Plan, simulation: Simulation) -> str:
    peak, rank = max((peak, -rank) for rank, peak in enumerate(simulation.peak_bytes))
    capacity = plan.cluster.device.memory_bytes
    return (
        f"rank {-rank} holds most, {fmt.size(peak)} of {fmt.size(capacity)} "
        f"({fmt.percent(peak / capacity)})"
    )


def _expected_memory(
    plan: Plan, simulation: Simulation, run_memory: ExpectedMemory | None
) -> Iterator[Reason]:
    """Expected memory of a run; a plan that fits by its own count may still run out of memory."""
    if run_memory is None:
        return
    peaks = [peak.total for peak in run_memory.peaks()]
    most, rank = max((value, -rank) for rank, value in enumerate(peaks))
    text = f"a run is expected to hold {fmt.size(most)} on rank {-rank}"
    if not run_memory.knows_workspace:
        text += (
            " and, which its profile does not say, what forwards and backwards take for the moment"
        )
    capacity = plan.cluster.device.memory_bytes
    if most > capacity >= max(simulation.peak_bytes):
        text += (
            ": more than a device has, though what the plan counts fits. It may run out of "
            "memory: solve again with a smaller memory_bytes of the cluster's device"
        )
    yield Reason(topic="run's memory", text=text)


def _bound(plan: Plan, profile: Profile, simulation: Simulation) -> str:
    bound = lower_bound(plan, CostModel(profile, plan.cluster, plan.training))
    gap = simulation.iteration_s / bound.seconds - 1 if bound.seconds else 0.0
    shares = above_work(simulation, bound).items()
    parts = [f"{fmt.percent(share)} {what}" for what, share in shares if share >= _LEAST_GAIN]
    return (
        f"no plan takes less than {fmt.seconds(bound.seconds)} (gap {gap:.2%}): the work takes all "
        f"devices {fmt.seconds(bound.work_s)} at the least, the path of one sample "
        f"{fmt.seconds(bound.path_s)}"
        + (
            f"; beside the least work, of this plan's device time, {', '.join(parts)}"
            if parts
            else ""
        )
    )


def _formula(plan: Plan) -> str:
    solver = plan.solver
    text = (
        f"{solver.name} ({solver.method}): {fmt.seconds(solver.objective_s)} by its own formula, "
        f"at least {fmt.seconds(solver.formula_bound_s)} for all plans that it may choose"
    )
    limits = [f"{loss} up to {samples:,}" for loss, samples in solver.largest_sync_batch.items()]
    return text + (f"; sync batches that fit: {', '.join(limits)}" if limits else "")


def _instead(plan: Plan) -> str:
    if not plan.solver.runners_up:
        return "no other plan was simulated"
    first = min(plan.solver.runners_up, key=lambda runner: runner.iteration_s)
    now_s = plan.predicted.iteration_s
    slower = f" ({first.iteration_s / now_s - 1:+.1%})" if now_s else ""
    return (
        f"of {counted(len(plan.solver.runners_up), 'other')} the best takes "
        f"{fmt.seconds(first.iteration_s)}{slower}: "
        + shorten(first.label, _LABEL, placeholder=" …")
    )


def _left_over(plan: Plan) -> Iterator[Reason]:
    if plan.solver.idle_ranks:
        yield Reason(
            topic="left over",
            text=f"{fmt.ranks_words(plan.solver.idle_ranks)}: no degrees that use more are faster",
        )


def why_section(data: ReportData) -> str:
    """The reasons as a table."""
    plan, profile = data.plan, data.profile
    if profile is None or data.simulation is None:
        return markup.note(f"Not explained: {data.profile_note or data.simulation_note}")
    reasons = explain(plan, profile, data.simulation, data.effects, run_memory=data.run_memory)
    rows = [(reason.topic, reason.text) for reason in reasons]
    return markup.table(("", ""), rows, label="Why this plan", head=False)
