"""Results of the functions of :mod:`mmplan.api`: data that show themselves.

Their text is that of the command line; a notebook shows the report's tables and pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmplan.planning.compare import Comparison
from mmplan.planning.differences import Change
from mmplan.planning.what_if import Effect
from mmplan.program.trace import trace_events, write_trace
from mmplan.proof.certificate import certificate_path, write_certificate
from mmplan.proof.prove import Proof
from mmplan.reporting.comparison_page import plans_section, render_comparison, step_timelines
from mmplan.reporting.explain import Reason, reason_grid
from mmplan.reporting.html import markup
from mmplan.reporting.sections.timelines import (
    LABEL_LENGTH,
    StepTimeline,
    chosen_ranks,
    rank_labels,
    representatives,
    thinned_notes,
    timeline,
    timeline_figure,
    timeline_legend,
)
from mmplan.reporting.sections.topology import topology_picture
from mmplan.reporting.terminal.comparison_tables import comparison_grids, left_out_lines
from mmplan.reporting.terminal.console import Grid, tables
from mmplan.reporting.terminal.tables import (
    changes_grid,
    plan_grids,
    prediction_words,
    sampled_grid,
    timeline_lines,
)
from mmplan.schema.base import relative_path, save_document, write_text
from mmplan.schema.plan import Plan, Prediction
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.simulation.sampled_batches import SampledSteps
from mmplan.simulation.step import Simulation
from mmplan.wording import counted

# Characters on a line of text.
_WIDTH = 100
# Instructions and ranks of a notebook's timeline, which is saved with it; chosen by hand.
_BARS = 1_000
_ROWS = 16


class Shown:
    """Shows itself: as text, and in a notebook with pictures."""

    __slots__ = ()

    def grids(self) -> Iterable[Grid]:
        """Its tables."""
        raise NotImplementedError

    def picture(self) -> str:
        """Markup above the tables; none by default."""
        return ""

    def __repr__(self) -> str:
        lines = tables(self.grids(), width=_WIDTH).splitlines()
        return "\n".join(line.rstrip() for line in lines).rstrip()

    def _repr_html_(self) -> str:
        return markup.fragment(self.picture() + "".join(map(_table, self.grids())))


def _table(grid: Grid) -> str:
    return (
        markup.text("h3", grid.title)
        + markup.table(grid.columns, grid.rows, label=grid.title)
        + (markup.note(grid.note) if grid.note else "")
    )


def _timelines(lines: list[StepTimeline]) -> str:
    if not lines:
        return ""
    drawn, _ = timeline_figure(lines, label="Timelines")
    return timeline_legend() + drawn + thinned_notes(lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Planned(Shown):
    """A plan, and what it was made from.

    Attributes:
        plan: what plan.json says: the devices, degrees, shares and schedule of every module.
        path: its file; before it is saved, one in the folder that its paths are relative to.
        workload: that it is for; None where only the file is known that the plan names.
        profile: that it was made from, likewise.
        proof: that it trains the workload; None for a plan that was read.
    """

    plan: Plan
    path: Path
    workload: Workload | None = None
    profile: Profile | None = None
    proof: Proof | None = None

    def grids(self) -> Iterator[Grid]:
        """Units, predictions, runners-up."""
        return plan_grids(self.plan)

    def picture(self) -> str:
        """The units on the devices of the cluster."""
        return topology_picture(self.plan)

    @property
    def certificate(self) -> Path | None:
        """Its file, where it has been written."""
        path = certificate_path(self.path)
        return path if path.is_file() else None

    @property
    def later_tasks(self) -> str:
        """The task sets that begin later in training, which have plans of their own; in words."""
        later = (
            [item for item in self.workload.task_sets if item.from_step] if self.workload else []
        )
        return "; ".join(f"from step {item.from_step} {', '.join(item.tasks)}" for item in later)

    def save(self, path: str | Path) -> Planned:
        """Write the plan, for ``mmlaunch run``, and its certificate beside it.

        A workload or a profile that has no file, or was changed since it was read, is written
        beside it too: of ``plan.json`` as ``plan.workload.json`` and ``plan.profile.json``. A
        changed workload is written where its modules are found, beside the file that it was read
        from; where that is another folder, with digits of its hash in the name.

        Returns:
            The plan as it was written; its paths are relative to its new folder.

        Raises:
            UnfitEnvironmentError: a file cannot be written.
        """
        path, files = Path(path), dict[str, Path]()
        for kind, document in (("workload", self.workload), ("profile", self.profile)):
            reference = getattr(self.plan, kind)
            files[kind] = self.path.parent / reference.path
            if document is not None and not reference.path:
                files[kind] = _copy_of(document, reference.sha256, path)
                save_document(document, files[kind])
        plan = self.plan.model_copy(
            update={
                kind: getattr(self.plan, kind).model_copy(
                    update={"path": relative_path(file, path.parent)}
                )
                for kind, file in files.items()
            }
        )
        save_document(plan, path)
        compiled = self.proof.compiled if self.proof else None
        if compiled is not None and not compiled.folded:
            write_certificate(path, files["workload"], compiled=compiled)
        else:
            # That of another plan would be taken for this one's.
            certificate_path(path).unlink(missing_ok=True)
        return Planned(
            plan=plan, path=path, workload=self.workload, profile=self.profile, proof=self.proof
        )


def _copy_of(document: Workload | Profile, sha256: str, plan: Path) -> Path:
    """The file to write a plan's source to that has none."""
    origin = document.read_from
    beside = origin if isinstance(document, Workload) and origin is not None else plan
    # Plans of the same name in several folders keep their own.
    digits = "" if beside.parent.resolve() == plan.parent.resolve() else f".{sha256[:8]}"
    return beside.with_name(f"{plan.stem}{digits}.{document.kind}.json")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compared(Shown):
    """Plans of several solvers for the same work.

    Attributes:
        comparison: every plan, those that were refused, and the baseline of ratios.
        workload: of the plans.
        profile: of the plans.
    """

    comparison: Comparison
    workload: Workload
    profile: Profile

    @property
    def plans(self) -> dict[str, Planned]:
        """Solver to its plan for the most devices and the workload's batch, best first."""
        return {
            item.solver: Planned(
                plan=item.plan,
                path=self.comparison.plan_path,
                workload=self.workload,
                profile=self.profile,
            )
            for item in self.comparison.best_first
        }

    def write_page(self, path: str | Path) -> None:
        """Write one self-contained page with pictures.

        Raises:
            UnfitEnvironmentError: it cannot be written.
        """
        write_text(Path(path), render_comparison(self.comparison))

    @property
    def best(self) -> Planned:
        """The plan with the most samples per second."""
        return next(iter(self.plans.values()))

    def grids(self) -> Iterator[Grid]:
        """The plans best first, and how they scale."""
        return comparison_grids(self.comparison)

    def __repr__(self) -> str:
        return "\n".join((Shown.__repr__(self), *left_out_lines(self.comparison)))

    def _repr_html_(self) -> str:
        sweeps = list(self.grids())[1:]
        lines = step_timelines(self.comparison, _BARS)
        content = plans_section(self.comparison) + "".join(map(_table, sweeps)) + _timelines(lines)
        return markup.fragment(content)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PredictedStep(Shown):
    """One predicted step of a plan.

    Attributes:
        plan: that was simulated.
        predicted: seconds, samples per second, memory.
        step: clocks and bytes of every rank, instruction by instruction.
        sampled: how times spread over batches; None where the profile has no data.
    """

    plan: Plan
    predicted: Prediction
    step: Simulation
    sampled: SampledSteps | None = None

    def grids(self) -> Iterator[Grid]:
        """The spread of times, where it is known."""
        if self.sampled is not None:
            yield sampled_grid(self.sampled, predicted_s=self.predicted.iteration_s)

    def timeline(self, width: int = _WIDTH) -> Iterator[str]:
        """A row of letters for each rank, at most ``width`` characters."""
        return timeline_lines(self.step, width=width)

    def figures(self) -> Iterator[str]:
        """The prediction in words."""
        return prediction_words(self.predicted, self.plan.cluster.device)

    def __repr__(self) -> str:
        drawn = timeline_lines(self.step, width=_WIDTH, ranks=self._ranks())
        return "\n".join((*drawn, *self.figures(), Shown.__repr__(self))).rstrip()

    def _ranks(self) -> tuple[int, ...]:
        """Some ranks: those of different stages first."""
        ranks = range(self.step.program.num_ranks)
        return chosen_ranks(ranks, representatives(self.plan), most=_ROWS)

    def picture(self) -> str:
        """The timeline of some ranks, and the figures below it."""
        events = trace_events(self.step.program, self.step.events(), process_name="predicted")
        slices = [event for event in events if event["ph"] == "X"]
        shown = timeline(
            "Predicted",
            slices,
            ranks=self._ranks(),
            most_bars=_BARS,
            labels=rank_labels(self.plan, LABEL_LENGTH),
        )
        return _timelines([shown]) + "".join(map(markup.note, self.figures()))

    def write_trace(self, path: str | Path) -> None:
        """Write the step for ui.perfetto.dev or chrome://tracing."""
        events = trace_events(self.step.program, self.step.events(), process_name="predicted")
        write_trace(Path(path), events)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explained(Shown):
    """Why a plan is as it is.

    Attributes:
        name: of the plan.
        reasons: most important first.
        effects: of its parts made faster, largest gain first.
        replans: what other settings would bring; none unless asked for.
    """

    name: str
    reasons: tuple[Reason, ...]
    effects: tuple[Effect, ...]
    replans: tuple[Reason, ...] = ()

    def grids(self) -> Iterator[Grid]:
        """The reasons, and those of other settings."""
        yield reason_grid(self.name, self.reasons)
        if self.replans:
            yield reason_grid("with other settings", self.replans)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checked(Shown):
    """Whether a plan is proven to train its workload.

    Attributes:
        plan: that was checked.
        path: its file.
        workload: file of its workload.
        compared: whether it was compared with what that says.
        faults: a sentence on each; none where all is proven.
        proof: what was looked at; None where the plan's fields are at fault already.
        certificate: that was written, if any.
    """

    plan: Plan
    path: Path
    workload: Path
    compared: bool
    faults: tuple[str, ...]
    proof: Proof | None = None
    certificate: Path | None = None

    def grids(self) -> Iterator[Grid]:
        """Its faults."""
        rows = [(fault,) for fault in self.faults] or [("no faults",)]
        yield Grid(title=str(self.path), columns=(counted(len(self.faults), "fault"),), rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Differing(Shown):
    """What differs between two plans.

    Attributes:
        first: name or file of the plan with the values before.
        second: of the other.
        changes: of the whole plan, of its units, of its predictions; none where they are equal.
    """

    first: str
    second: str
    changes: tuple[Change, ...]

    def grids(self) -> Iterator[Grid]:
        """A row for each difference."""
        yield changes_grid(self.first, self.second, self.changes)
