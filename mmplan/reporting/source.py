"""Data of the report page, from a plan's file or a run's folder; missing files become notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from mmplan.costs.program_costs import check_cluster
from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.planning.what_if import Effect, Replan, part_effects
from mmplan.program.trace import trace_events
from mmplan.schema.base import document_text, file_sha256, parse_json, read_text, text_sha256
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import Workload
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.predict import check_plans_model, costs_of
from mmplan.simulation.step import Simulation, simulate
from mmplan.wording import slow_rank

TraceEvent = dict[str, Any]
Line = TypeVar("Line")

# A trace of a hundred thousand instructions has about as many.
_MOST_ENTRIES = 5_000_000
# Of ``metrics.jsonl`` the end is read; a step has some 200 bytes.
_MOST_METRICS_BYTES = 64 << 20
_MOST_STEPS = 200_000
# No step, second or loss is larger; sums of numbers below it stay finite.
_LARGEST = 1e150
# Steps left out of the median: allocators, caches and connections warm up in them.
WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; None where the value was not finite or not written.

    Attributes:
        waits: ranks and their seconds of waiting for data, of those that waited longest.
    """

    step: int
    loss: float | None
    iteration_s: float | None
    update_s: float | None
    data_s: float | None
    samples_per_s: float | None
    waits: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvaluation:
    """One line of ``evaluations.jsonl``.

    Attributes:
        step: steps that were done.
        values: losses and metrics by name; None where a value was not finite.
    """

    step: int
    values: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSegment:
    """Steps of a run under one plan, from ``from_step`` on."""

    from_step: int
    tasks: tuple[str, ...]
    devices: int
    iteration_s: float | None
    samples_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's folder.

    Attributes:
        folder: the run directory.
        record: ``run.json``; empty when there is none.
        steps: in order of the file.
        evaluations: of held-out data; none where the workload asks for none.
        segments: plans in the order in which they trained; none where the record has none.
        faults: sentences on unreadable files.
    """

    folder: Path
    record: dict[str, Any]
    steps: tuple[StepMetrics, ...]
    evaluations: tuple[RunEvaluation, ...] = ()
    segments: tuple[RunSegment, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def current(self) -> tuple[StepMetrics, ...]:
        """Steps of the last plan, the one that the page shows."""
        first = self.segments[-1].from_step if self.segments else 0
        return tuple(step for step in self.steps if step.step >= first)

    @property
    def warm_up(self) -> int:
        """Number of first steps of the current plan that the median leaves out."""
        return min(WARM_UP_STEPS, max(0, len(self.current) - 1))

    @property
    def iteration_s(self) -> float | None:
        """Median measured iteration without the warm-up, None without a measured step."""
        times = [s.iteration_s for s in self.current[self.warm_up :] if s.iteration_s is not None]
        return median(times) if times else None

    @property
    def is_emulated(self) -> bool:
        """Whether its computes were waits."""
        return self.record.get("emulated") is True

    @property
    def time_source(self) -> str:
        """``measured`` or ``emulated``."""
        return "emulated" if self.is_emulated else "measured"

    @property
    def memory_bytes(self) -> dict[int, float]:
        """Measured peak memory of each rank's steps; no ranks where none was measured."""
        recorded = self.record.get("memory_bytes")
        items = recorded.items() if isinstance(recorded, dict) else ()
        sizes = {rank: _finite(value) for rank, value in items}
        return {int(r): v for r, v in sizes.items() if str(r).isdecimal() and v is not None}

    @property
    def slow_ranks(self) -> tuple[str, ...]:
        """Ranks that were found to be slow while it trained, a line for each."""
        recorded = self.record.get("slow_ranks")
        lines: list[str] = []
        for entry in recorded if isinstance(recorded, list) else ():
            with suppress(ValueError, KeyError, TypeError):
                step, rank, times = _count(entry["step"]), _count(entry["rank"]), entry["times"]
                lines.append(slow_rank(step, rank, f"{entry['instruction']:.40}", times))
        return tuple(lines)

    @property
    def cores(self) -> int | None:
        """Processor cores of the machine of the run."""
        cores = self.record.get("cores")
        return cores if isinstance(cores, int) and cores > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Data of all sections.

    Attributes:
        profile: None where it cannot be read.
        profile_note: the reason for that, or that the profile has changed since planning.
        believed: a note on a profile that does not say its model.
        simulation: of the plan's step; None where it cannot be simulated.
        simulation_note: the reason for that.
        run_memory: expected memory of a run's ranks; None without a simulation.
        effects: of the plan's parts; none without a simulation.
        predicted: Chrome trace events of the simulated step.
        measured: events of the last measured step.
        timeline_notes: reasons for missing events.
        hashes: (kind of file, path in the plan, SHA-256 in the plan, SHA-256 now or None).
        original: file that the plan was written to; the plan's paths are relative to it.
        replans: plans of other settings, with ``--replan`` only.
        workload: None where it stands in the file that the plan names.
    """

    plan: Plan
    profile: Profile | None
    profile_note: str
    believed: str | None
    simulation: Simulation | None
    simulation_note: str
    run_memory: ExpectedMemory | None
    effects: tuple[Effect, ...]
    run: Run | None
    predicted: tuple[TraceEvent, ...]
    measured: tuple[TraceEvent, ...]
    timeline_notes: tuple[str, ...]
    hashes: tuple[tuple[str, str, str, str | None], ...]
    original: Path
    replans: tuple[Replan, ...] = ()
    workload: Workload | None = None

    @property
    def time_source(self) -> str:
        """``measured`` or ``emulated``."""
        return "measured" if self.run is None else self.run.time_source

    @property
    def source_label(self) -> str:
        """The profile of the predictions: a measured, an analytic or a given one."""
        if self.profile is None:
            return "a profile that was not found"
        return f"{'an' if self.profile.source == 'analytic' else 'a'} {self.profile.source} profile"


def load_source(source: Path) -> ReportData:
    """Read a plan file or a run's folder.

    Raises:
        InvalidInputError: neither of the two, the plan in it is faulty, or its profile is of
            another model than its workload.
    """
    if source.is_dir():
        plan_file = source / "plan.json"
        if not plan_file.is_file():
            raise InvalidInputError(
                f"{source}: a folder without plan.json is no run's folder",
                hint="give a plan.json, or the folder that mmlaunch run wrote",
            )
        plan, run = load_plan(plan_file), load_run(source)
        # File of the plan that the run was started with.
        named = run.record.get("plan")
        original = source / named if isinstance(named, str) else plan_file
    else:
        plan, run, plan_file = load_plan(source), None, source
        original = source
    return data_of(plan, original, plan_file=plan_file, run=run)


def data_of(
    plan: Plan,
    original: Path,
    *,
    plan_file: Path | None = None,
    profile: Profile | None = None,
    workload: Workload | None = None,
    run: Run | None = None,
) -> ReportData:
    """Everything that a page says of a plan.

    Args:
        plan: the plan.
        original: the file that it was written to, or will be; its paths are relative to it.
        plan_file: the file that it was read from, None where it has none.
        profile: that it was made from; default: the one it names.
        workload: likewise.
        run: of it.

    Raises:
        InvalidInputError: the profile is of another model than the plan's workload.
    """
    believed = check_plans_model(plan, original, profile)
    profile, note = _load_profile(plan, original) if profile is None else (profile, "")
    simulation, run_memory, fault = _simulated(plan, profile)
    predicted, measured, notes = _timelines(simulation, fault, run)
    return ReportData(
        plan=plan,
        profile=profile,
        profile_note=note,
        believed=believed,
        simulation=simulation,
        simulation_note=fault,
        run_memory=run_memory,
        effects=tuple(part_effects(plan, profile)) if profile and simulation else (),
        run=run,
        predicted=predicted,
        measured=measured,
        timeline_notes=notes,
        hashes=_hashes(plan, plan_file, original, run),
        original=original,
        workload=workload,
    )


def load_run(run_dir: str | Path) -> Run:
    """Read a run's folder; what is missing or broken in it becomes ``faults``."""
    folder = Path(run_dir)
    faults: list[str] = []
    record = _json_file(folder / "run.json", faults)
    return Run(
        folder=folder,
        record=record if isinstance(record, dict) else {},
        steps=_load_lines(folder / "metrics.jsonl", _step, faults, missing="no step was finished"),
        evaluations=_load_lines(folder / "evaluations.jsonl", _evaluation, faults),
        segments=_segments(record),
        faults=tuple(faults),
    )


def _segments(record: Any) -> tuple[RunSegment, ...]:
    """Plans that trained, by ``run.json``; none where it cannot be understood."""
    try:
        return tuple(
            RunSegment(
                from_step=_count(entry["from_step"]),
                tasks=tuple(map(str, entry["tasks"])),
                devices=_count(entry["devices"]),
                iteration_s=_finite(entry.get("predicted_iteration_s")),
                samples_per_s=_finite(entry.get("predicted_samples_per_s")),
            )
            for entry in record["segments"]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


def _json_file(path: Path, faults: list[str]) -> Any:
    if not path.is_file():
        faults.append(f"{path.name} is missing")
        return None
    try:
        return parse_json(read_text(path), path, most_entries=_MOST_ENTRIES)
    except InvalidInputError as error:
        faults.append(f"{path.name} cannot be read: {error.message.removeprefix(f'{path}: ')}")
        return None


def _load_lines(
    path: Path,
    parse: Callable[[bytes], Line | None],
    faults: list[str],
    *,
    missing: str | None = None,
) -> tuple[Line, ...]:
    """The lines of a file that can be read.

    Args:
        path: the file.
        parse: a line; None where it cannot be read.
        faults: gets sentences on what is missing or broken.
        missing: what it means where the file is; None where it may be.
    """
    if not path.is_file():
        if missing is not None:
            faults.append(f"{path.name} is missing: {missing}")
        return ()
    try:
        with path.open("rb") as file:
            skipped = max(0, path.stat().st_size - _MOST_METRICS_BYTES)
            file.seek(skipped)
            lines = file.read(_MOST_METRICS_BYTES).rsplit(b"\n", _MOST_STEPS + 1)
    except OSError as error:
        faults.append(f"{path.name} cannot be read: {error.strerror}")
        return ()
    if skipped or len(lines) > _MOST_STEPS + 1:
        faults.append(f"{path.name}: only its last {len(lines) - 2:,} lines are read")
        del lines[0]
    found = [parse(line) for line in lines if line.strip()]
    broken = found.count(None)
    if broken:
        # A killed run may leave its last line cut off.
        is_one = broken == 1
        lines = f"{broken} {'line' if is_one else 'lines'} cannot be read"
        faults.append(f"{path.name}: {lines} and {'is' if is_one else 'are'} left out")
    return tuple(line for line in found if line is not None)


def _step(line: bytes) -> StepMetrics | None:
    try:
        entry = json.loads(line)
        names = ("loss", "iteration_s", "update_s", "data_s", "samples_per_s")
        values = {name: _finite(entry.get(name)) for name in names}
        waits = entry.get("data_s_by_rank", {}).items()
        return StepMetrics(
            step=_count(entry["step"]),
            **values,
            waits=tuple(
                (_count(int(rank)), seconds)
                for rank, w in waits
                if (seconds := _finite(w)) is not None
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _evaluation(line: bytes) -> RunEvaluation | None:
    try:
        entry = json.loads(line)
        step = _count(entry.pop("step"))
        values = {f"{name:.80}": _finite(value) for name, value in entry.items()}
        return RunEvaluation(step=step, values=values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r:.40} counts nothing")
    return value


def _finite(value: Any) -> float | None:
    """The value where it is a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def _load_profile(plan: Plan, original: Path) -> tuple[Profile | None, str]:
    path = original.parent / plan.profile.path
    if not path.is_file():
        return None, f"The profile {plan.profile.path} is not where the plan says."
    try:
        profile = load_profile(path)
    except MMPlanError as error:
        return None, f"The profile cannot be used: {error.message}"
    if file_sha256(path) != plan.profile.sha256:
        return profile, "The profile has changed since the plan was made from it."
    return profile, ""


def _timelines(
    simulation: Simulation | None, fault: str, run: Run | None
) -> tuple[tuple[TraceEvent, ...], tuple[TraceEvent, ...], tuple[str, ...]]:
    notes: list[str] = []
    predicted: tuple[TraceEvent, ...] = ()
    measured: tuple[TraceEvent, ...] = ()
    if run is not None:
        faults: list[str] = []
        events = _trace_list(_json_file(run.folder / "trace.json", faults))
        predicted, measured = _of_process(events, "predicted"), _of_process(events, "measured")
        if not measured:
            reason = faults[0] if faults else "trace.json holds no measured step"
            notes.append(f"No measured timeline: {reason}.")
    if not predicted and simulation is not None:
        events = trace_events(simulation.program, simulation.events(), process_name="predicted")
        predicted = tuple(event for event in events if event["ph"] == "X")
    if not predicted:
        notes.append(f"No predicted timeline: {fault}.")
    return predicted, measured, tuple(notes)


def _simulated(
    plan: Plan, profile: Profile | None
) -> tuple[Simulation | None, ExpectedMemory | None, str]:
    """One step, and the expected memory of a run; or the reason why there is none."""
    if profile is None:
        return None, None, "it needs the profile, which is missing"
    try:
        check_cluster(profile, plan.cluster)
        costs = costs_of(plan, profile)
        return simulate(costs.program, costs), ExpectedMemory(costs), ""
    except MMPlanError as error:
        return None, None, error.message


def _trace_list(document: Any) -> list[TraceEvent]:
    events = document.get("traceEvents") if isinstance(document, dict) else None
    return [e for e in events if isinstance(e, dict)] if isinstance(events, list) else []


def _of_process(events: list[TraceEvent], name: str) -> tuple[TraceEvent, ...]:
    """The complete slices of a process, shifted so that the first one starts at 0."""
    numbers = [
        e.get("pid")
        for e in events
        if e.get("name") == "process_name" and e.get("args") == {"name": name}
    ]
    slices = [e for e in events if e.get("ph") == "X" and e.get("pid") in numbers and _is_slice(e)]
    first = min((e["ts"] for e in slices), default=0.0)
    return tuple(e | {"ts": e["ts"] - first} for e in slices)


def _is_slice(event: TraceEvent) -> bool:
    times = _finite(event.get("ts")), _finite(event.get("dur"))
    arguments = event.get("args", {})
    if None in times or not isinstance(event.get("tid"), int) or not isinstance(arguments, dict):
        return False
    pairs = (arguments.get("samples"), arguments.get("blocks"))
    return all(pair is None or _is_range(pair) for pair in pairs)


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(n, int) and 0 <= n < _LARGEST for n in value)
    )


def _hashes(
    plan: Plan, plan_file: Path | None, original: Path, run: Run | None
) -> tuple[tuple[str, str, str, str | None], ...]:
    now = text_sha256(document_text(plan)) if plan_file is None else file_sha256(plan_file)
    recorded = (run.record.get("plan_sha256") if run else None) or now
    return (
        ("plan", (plan_file or original).name, str(recorded), plan_file and now),
        *(
            (kind, file.path, file.sha256, _sha256(original.parent / file.path))
            for kind, file in (("workload", plan.workload), ("profile", plan.profile))
        ),
    )


def _sha256(path: Path) -> str | None:
    return file_sha256(path) if path.is_file() else None
