"""All that the command ``mmplan`` does, as functions: typed results, and nothing is printed.

``import mmplan`` has every name of this module. Files are given by path or as objects. Names of
workload fields, units and errors are those of docs/reference.md; every function raises
subclasses of :class:`mmplan.errors.MMPlanError` with a message and a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

from mmplan.errors import InvalidInputError, RunFailedError, require_linux
from mmplan.planning import compare as comparing
from mmplan.planning import planner
from mmplan.planning.differences import plan_changes
from mmplan.planning.measured_trials import Trials as Trials
from mmplan.planning.what_if import part_effects, replans
from mmplan.proof.certificate import write_certificate
from mmplan.proof.prove import Proof, prove
from mmplan.reporting import explain as explaining
from mmplan.reporting.report_page import write_report
from mmplan.reporting.source import data_of, load_source
from mmplan.results import Checked, Compared, Differing, Explained, Planned, PredictedStep
from mmplan.schema import load as loading
from mmplan.schema.agreement import belief, plan_differences
from mmplan.schema.base import (
    Document,
    DocumentT,
    file_sha256,
    load_document,
    unchanged_file,
    validated,
)
from mmplan.schema.cluster import Cluster, load_cluster
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.settings import with_settings
from mmplan.schema.workload import Workload, unused_modules
from mmplan.schema.workload import load_workload as load_workload
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.predict import (
    check_plans_model,
    costs_of,
    memory_faults,
    plan_costs,
    plan_profile,
)
from mmplan.simulation.sampled_batches import sample_steps
from mmplan.simulation.step import prediction
from mmplan.simulation.step import simulate as simulate_step
from mmplan.solvers.registry import SearchProgress
from mmplan.wording import Hint

if TYPE_CHECKING:
    from mmplan.planning.model_folder import Begun
    from mmplan.profiling.worker import Worker

# What a file is given as.
WorkloadLike = Workload | str | Path
ProfileLike = Profile | str | Path
ClusterLike = Cluster | str | Path
PlanLike = Planned | str | Path


def _silent(_: str) -> None:
    """For those who want no hints."""


def _no_progress(done: int, total: int, note: str) -> None:
    """For those who want no progress."""


def init(
    source: str | Path,
    folder: str | Path,
    *,
    sample: str | None = None,
    layers: Sequence[str] = (),
    length: int | None = None,
) -> Begun:
    """Write a folder with a workload that trains a model as it is, on synthetic data.

    Args:
        source: folder of a model or its config.json; or ``module:callable`` of a plain model.
        folder: new, or empty.
        sample: ``module:callable`` of the plain model's inputs, where its callable gives none.
        layers: names of lists of layers to cut at; none: all outermost ones.
        length: tokens of a synthetic text.

    Returns:
        The files, and what ``mmlaunch verify --original`` holds the cut against.

    Raises:
        InvalidInputError: the source is no model, or cannot be cut by itself.
        UnfitEnvironmentError: its library is missing.
    """
    from mmplan.planning.model_folder import begin

    return begin(str(source), Path(folder), sample=sample, layers=layers, length=length)


def load(path: str | Path) -> Workload | Profile | Planned | Cluster:
    """Read a file; what it is, its fields say.

    Raises:
        InvalidInputError: it is none of ours, or a faulty one; names file and field.
    """
    found = loading.load_any(Path(path))
    return Planned(plan=found, path=Path(path)) if isinstance(found, Plan) else found


def load_plan(path: str | Path) -> Planned:
    """Read plan.json.

    Raises:
        InvalidInputError: the file is wrong, or the plan is faulty.
    """
    return Planned(plan=loading.load_plan(path), path=Path(path))


def load_profile(path: str | Path) -> Profile:
    """Read profile.json.

    Raises:
        InvalidInputError: the file or its contents are wrong.
    """
    return load_document(Profile, path)


def changed(workload: Workload, settings: Mapping[str, Any]) -> Workload:
    """The workload with other values of some fields.

    Args:
        workload: stays as it is.
        settings: dotted field to value: ``{"batch": 1024, "modules.text.args.blocks": 12}``.

    Returns:
        Another workload; its modules and files are looked for where those of the first are.

    Raises:
        InvalidInputError: there is no such field, or it does not take that value.
    """
    return with_settings(validated(workload), settings, source="changed")


def profile(
    workload: WorkloadLike,
    *,
    cluster: ClusterLike | None = None,
    analytic: bool = False,
    device: str | None = None,
    processes: int | None = None,
    rounds: int = 1,
    data: bool = False,
    data_samples: int | None = None,
    folder: str | Path | None = None,
    state: Path | None = None,
    hint: Hint = _silent,
    progress: SearchProgress = _no_progress,
    worker: Worker | None = None,
) -> Profile:
    """Time the modules, losses and links of a workload, and fit their curves.

    Args:
        workload: one that was built or changed in Python can be profiled ``analytic`` only: the
            processes that measure read its file.
        cluster: file, or name of a shipped one; default: this machine, measured too.
        analytic: count FLOPs on the meta device instead of measuring; needs ``cluster``.
        device: ``cpu`` or ``cuda``; default: cuda where there is one.
        processes: that measure together; default: every GPU, or two on a CPU with two cores.
        rounds: how often each point is measured; from 2 on at more points, too.
        data: also how much work the samples of the data are.
        data_samples: that ``data`` looks at; default 512.
        folder: where the workload's own modules and files are; default: that of the file that it
            was read from, else this one.
        state: file of finished points, from which an interrupted profile goes on.
        hint: hears what could not be tried.
        progress: hears how many of how many points are done; of an analytic profile, modules and
            losses.
        worker: that loads its libraries already; default: a new one.

    Raises:
        InvalidInputError: the workload, its code or its data is wrong, or options contradict.
        UnfitEnvironmentError: the device cannot be used.
        RunFailedError: a process died, or nothing could be run.
    """
    loaded, path = _document(Workload, workload)
    where = _folder(loaded, path) if folder is None else Path(folder)
    _hint_unused(loaded, hint)
    if data_samples is not None and not (data and data_samples > 0):
        raise InvalidInputError(
            f"--data-samples {data_samples}: how many samples --data looks at",
            hint="give 1 or more, together with --data",
        )
    if device not in (None, "cpu", "cuda"):
        raise InvalidInputError(f"--device {device}: no kind of device", hint="choose cpu or cuda")
    machine = _cluster(cluster)
    if analytic and machine is None:
        raise InvalidInputError(
            "--analytic needs --cluster: there is no device to ask", hint="--cluster p3-8"
        )
    if path is None and not analytic:
        made = "was changed since it was read" if loaded.read_from else "has no file"
        raise InvalidInputError(
            f"a workload that {made} cannot be measured: other processes read its file",
            hint=f"save_document(workload, {str(where / 'other.json')!r}) and give that path, or "
            "analytic=True",
        )
    if not analytic:
        require_linux("measuring a profile")

    from mmplan.profiling.analytic import analytic_profile
    from mmplan.profiling.data import SAMPLES, profile_data
    from mmplan.profiling.measure import measure_profile
    from mmplan.schema.dry_run import dry_run

    def try_out() -> None:
        for note in dry_run(loaded, where, on_meta=analytic):
            hint(note)

    def on_point(done: int, total: int, _left_s: float | None, note: str) -> None:
        progress(done, total, note)

    with TemporaryDirectory(prefix="mmplan-") as temporary:
        state = state or Path(temporary) / "profile.partial"
        if path is None or (analytic and machine is not None):
            assert machine is not None
            try_out()
            made = analytic_profile(loaded, where, machine, progress=progress)
        else:
            made = measure_profile(
                path,
                cluster=machine,
                device=device,
                num_processes=processes,
                progress=on_point,
                state_path=state,
                rounds=rounds,
                meanwhile=try_out,
                worker=worker,
            )
        if data:
            made = profile_data(
                made,
                loaded,
                where,
                samples=data_samples or SAMPLES,
                progress=lambda done, total, _, note: progress(
                    done, total, f"reading data: {note}"
                ),
                state_path=state,
            )
    for task in made.provenance["data"]["equal"] if data else ():
        hint(
            f"task {task}: no work(index) in its data set and no ragged fields that a module "
            "takes; all samples count alike"
        )
    return made


def solve(
    workload: WorkloadLike,
    profile: ProfileLike,
    *,
    cluster: ClusterLike | None = None,
    devices: int | None = None,
    solver: str = "auto",
    method: str | None = None,
    tasks: Sequence[str] | None = None,
    top: int = 8,
    budget_s: float = 1.0,
    trials: Trials | None = None,
    path: str | Path = "plan.json",
    hint: Hint = _silent,
    progress: SearchProgress = _no_progress,
) -> Planned:
    """Find devices, degrees, shares and schedule for every module, and prove the plan.

    Args:
        workload: what to train.
        profile: what it costs.
        cluster: whose devices and links to use; default: the profile's.
        devices: use its first ones only.
        solver: its name, or ``auto`` for the best of all that apply.
        method: of the solver.
        tasks: only these; default: those that train first.
        top: candidates to simulate.
        budget_s: seconds for searches that are not exact.
        trials: real steps of the best plans decide.
        path: where the plan will be saved; nothing is written.
        hint: hears of unused modules, and of a profile that does not say its model.
        progress: hears how many of how many searches and simulations are done.

    Raises:
        InvalidInputError: an unknown name, a count below 1, or files that contradict.
        InfeasibleError: no plan fits the devices or their memory.
        RunFailedError: no plan that was tried ran.
    """
    if devices is not None:
        _check_count("devices", devices)
    loaded, workload_path = _document(Workload, workload)
    costs, profile_path = _document(Profile, profile)
    _hint_unused(loaded, hint)
    _say(belief(costs, loaded.train.precision), hint)
    plan = planner.solve(
        loaded,
        workload_path=workload_path,
        profile=costs,
        profile_path=profile_path,
        plan_path=path,
        cluster=_cluster(cluster),
        devices=devices,
        solver=solver,
        method=method,
        tasks=tasks,
        top=top,
        budget_s=budget_s,
        trials=trials,
        progress=progress,
    )
    proof = prove(plan, loaded, costs)
    if proof.faults:
        raise RunFailedError(
            f"the plan of {plan.solver.name} is not proven: {proof.faults[0]}",
            hint="choose another --solver; this is a fault of the planner, please report it",
        )
    return Planned(plan=plan, path=Path(path), workload=loaded, profile=costs, proof=proof)


def compare(
    workload: WorkloadLike,
    profile: ProfileLike,
    *,
    cluster: ClusterLike | None = None,
    devices: int | Sequence[int] = (),
    batches: int | Sequence[int] = (),
    solvers: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    baseline: str | None = None,
    budget_s: float = comparing.BUDGET_S,
    details: bool = True,
    hint: Hint = _silent,
    progress: SearchProgress = _no_progress,
) -> Compared:
    """Plans of several solvers side by side, best first.

    Args:
        workload: what to train.
        profile: what it costs.
        cluster: whose devices to use; default: the profile's.
        devices: number of its first devices, or several; default: all. The largest is the main
            setting.
        batches: more batches, on that many devices.
        solvers: names; default: all that are for as many tasks.
        tasks: only these; default: those that train first.
        baseline: solver that ratios refer to; default: the fastest with equal degrees.
        budget_s: seconds of each solver's searches.
        details: with the timelines of the main setting's plans.
        hint: hears of a profile that does not say its model.
        progress: hears how many of how many plans are done.

    Raises:
        InvalidInputError: an unknown name, or a count that the cluster does not have.
        InfeasibleError: no solver has a plan.
    """
    loaded, workload_path = _document(Workload, workload)
    costs, profile_path = _document(Profile, profile)
    _say(belief(costs, loaded.train.precision), hint)
    comparison = comparing.compare(
        loaded,
        workload_path=workload_path,
        profile=costs,
        profile_path=profile_path,
        cluster=_cluster(cluster),
        devices=_counts("devices", devices),
        batches=_counts("batches", batches),
        solvers=solvers,
        tasks=tasks,
        baseline=baseline,
        budget_s=budget_s,
        with_details=details,
        progress=progress,
    )
    return Compared(comparison=comparison, workload=loaded, profile=costs)


def check(
    plan: PlanLike,
    workload: WorkloadLike | None = None,
    *,
    try_it: bool = False,
    certificate: str | Path | None = None,
    hint: Hint = _silent,
) -> Checked:
    """Prove that a plan trains its workload: every invariant, without running it.

    Args:
        plan: a faulty file is no error, its faults are the result.
        workload: to compare with; default: the one that the plan was made from.
        try_it: import the workload's code, and run it on two samples first.
        certificate: written where all is proven, and the plan and its workload have files.
        hint: hears what could not be tried, and of a profile that does not say its model.

    Raises:
        InvalidInputError: a file cannot be read, or the profile is of another model.
    """
    planned = plan
    if not isinstance(planned, Planned):
        planned = Planned(plan=load_document(Plan, planned), path=Path(planned))
    document, file = planned.plan, planned.path.parent / planned.plan.workload.path
    asked = planned.workload
    if workload is not None:
        asked, given = _document(Workload, workload)
        file = given or file
    elif asked is None and (try_it or file.is_file()):
        asked = load_workload(file)
    if try_it and asked is not None:
        for note in _tried(document, asked, _folder(asked, file if file.is_file() else None)):
            hint(note)
    _say(check_plans_model(document, planned.path, planned.profile), hint)
    faults, proof = plan_faults(document), None
    if not faults and asked is not None:
        faults = plan_differences(document, asked)
    if not faults:
        proof, faults = _proof(planned, asked)
    compiled = proof.compiled if proof else None
    written = None
    if certificate is not None and file.is_file() and compiled and not (faults or compiled.folded):
        written = write_certificate(planned.path, file, Path(certificate), compiled)
    return Checked(
        plan=document,
        path=planned.path,
        workload=file,
        compared=asked is not None,
        faults=tuple(faults),
        proof=proof,
        certificate=written,
    )


def _tried(plan: Plan, workload: Workload, folder: Path) -> list[str]:
    from mmplan.schema.dry_run import dry_run

    return dry_run(workload, folder, tasks=plan.tasks, sharded=plan.cuts_parameters)


def _proof(planned: Planned, workload: Workload | None) -> tuple[Proof, list[str]]:
    """The proof of a plan, and the faults of the plan."""
    try:
        costs = plan_profile(planned.plan, planned.path, planned.profile)
    except InvalidInputError:
        costs = None
    proof = prove(planned.plan, workload, costs)
    return proof, [*proof.faults, *(() if proof.faults else memory_faults(planned.plan, costs))]


def simulate(
    plan: PlanLike,
    profile: ProfileLike | None = None,
    *,
    draws: int | None = None,
    hint: Hint = _silent,
) -> PredictedStep:
    """Predict one step; where the profile has data, how times spread.

    Args:
        plan: what to simulate.
        profile: to predict with; default: the one that the plan was made from.
        draws: batches of the profile's data to draw, 0 for none; default: as many as are quick.
        hint: hears of a profile that does not say its model, or has no data to draw.

    Raises:
        InvalidInputError: the profile is gone, has changed, or is of another model.
    """
    planned, given = _planned(plan), _given(plan, profile)
    _say(check_plans_model(planned.plan, planned.path, given), hint)
    costs = plan_costs(planned.plan, planned.path, given)
    step = simulate_step(costs.program, costs)
    sampled = None if draws == 0 else sample_steps(costs, draws=draws)
    if sampled is None and draws:
        hint("--draws: the profile knows no data; mmplan profile --data looks at it")
    predicted = prediction(step, planned.plan)
    return PredictedStep(plan=planned.plan, predicted=predicted, step=step, sampled=sampled)


def explain(
    plan: PlanLike,
    profile: ProfileLike | None = None,
    *,
    replan: bool = False,
    hint: Hint = _silent,
    progress: SearchProgress = _no_progress,
) -> Explained:
    """Why a plan is as it is: what binds it, what waits, what it was chosen over.

    Args:
        plan: what to explain.
        profile: to explain it with; default: the one that the plan was made from.
        replan: also plan for a node more or less, faster links, other batches.
        hint: hears of a profile that does not say its model.
        progress: hears how many of how many settings are planned.

    Raises:
        InvalidInputError: the profile is gone, has changed, or is of another model.
    """
    planned, given = _planned(plan), _given(plan, profile)
    document, path = planned.plan, planned.path
    _say(check_plans_model(document, path, given), hint)
    known = plan_profile(document, path, given)
    costs = costs_of(document, known)
    step = simulate_step(costs.program, costs)
    effects = part_effects(document, known)
    reasons = explaining.explain(document, known, step, effects, run_memory=ExpectedMemory(costs))
    changed: list[explaining.Reason] = []
    if replan:
        workload = planned.workload or load_workload(path.parent / document.workload.path)
        others = replans(document, profile=known, workload=workload, progress=progress)
        changed = [explaining.replan_reason(document, item) for item in others]
        changed.append(explaining.best_batch(document, others))
    return Explained(
        name=document.name,
        reasons=tuple(reasons),
        effects=tuple(effects),
        replans=tuple(changed),
    )


def report(
    plan: PlanLike,
    output: str | Path = "report.html",
    *,
    replan: bool = False,
    hint: Hint = _silent,
    progress: SearchProgress = _no_progress,
) -> Path:
    """Write one self-contained page with pictures of a plan, or of a run.

    Args:
        plan: or the folder of a run.
        output: the page's file.
        replan: also plan for a node more or less, faster links, other batches.
        hint: hears of a profile that does not say its model.
        progress: hears how many of how many settings are planned.

    Returns:
        The page's file.

    Raises:
        InvalidInputError: neither of the two, or its plan is faulty.
        UnfitEnvironmentError: the page cannot be written.
    """
    if isinstance(plan, Planned):
        data = data_of(plan.plan, plan.path, profile=plan.profile, workload=plan.workload)
    else:
        data = load_source(Path(plan))
    write_report(data, Path(output), progress=progress if replan else None)
    _say(data.believed, hint)
    return Path(output)


def diff(first: PlanLike, second: PlanLike) -> Differing:
    """What differs between two plans: workload, degrees, shares, schedules, the predicted step.

    Modules are compared by task and name, whatever solvers call their units.

    Raises:
        InvalidInputError: a file is wrong.
    """
    before, after = _planned(first), _planned(second)
    workloads = _workload_of(before), _workload_of(after)
    changes = tuple(plan_changes(before.plan, after.plan, workloads=workloads))
    return Differing(first=str(before.path), second=str(after.path), changes=changes)


def _workload_of(planned: Planned) -> Workload | None:
    """The workload that a plan was made from; None where its file is gone or has changed."""
    reference = planned.plan.workload
    file = planned.path.parent / reference.path
    if planned.workload is not None or not file.is_file():
        return planned.workload
    return load_workload(file) if file_sha256(file) == reference.sha256 else None


@overload
def _document(kind: type[Workload], given: WorkloadLike) -> tuple[Workload, Path | None]: ...
@overload
def _document(kind: type[Profile], given: ProfileLike) -> tuple[Profile, Path | None]: ...
def _document(
    kind: type[DocumentT], given: DocumentT | str | Path
) -> tuple[DocumentT, Path | None]:
    """A document and its file, None for an object that has none or differs from it."""
    if not isinstance(given, Document):
        return load_document(kind, given), Path(given)
    found = validated(given)
    return found, unchanged_file(found)


def _folder(workload: Workload, path: Path | None) -> Path:
    """Where a workload's own modules and files are."""
    file = path or workload.read_from
    return Path.cwd() if file is None else file.parent


def _counts(name: str, given: int | Sequence[int]) -> Sequence[int]:
    """Whole numbers, given as one or as several."""
    if not isinstance(given, Sequence):
        _check_count(name, given)
        return [given]
    for count in given:
        _check_count(name, count)
    return given


def _check_count(name: str, given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool):
        raise InvalidInputError(
            f"{name}={given!r:.60}: must be a whole number",
            hint=f"{name}=16; only mmplan.compare takes several",
        )


def _cluster(given: ClusterLike | None) -> Cluster | None:
    if given is None:
        return None
    return validated(given) if isinstance(given, Cluster) else load_cluster(given)


def _planned(given: PlanLike) -> Planned:
    return given if isinstance(given, Planned) else load_plan(given)


def _given(plan: PlanLike, profile: ProfileLike | None) -> Profile | Path | None:
    """The profile that was given, or that a plan in memory has."""
    if profile is None:
        return plan.profile if isinstance(plan, Planned) else None
    return profile if isinstance(profile, Profile) else Path(profile)


def _hint_unused(workload: Workload, hint: Hint) -> None:
    for name in unused_modules(workload):
        hint(f"module {name} is used by no task: ignored")


def _say(note: str | None, hint: Hint) -> None:
    if note is not None:
        hint(note)
