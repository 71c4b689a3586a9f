"""Plan again: the same work for other tasks, or with faster parts, another cluster or batch.

:func:`part_effects` keeps the plan and simulates its program with one part made faster: the
bottleneck is the part that shortens the step most. :func:`replans` plans again with a node more
or less, links of twice the speed, or another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from mmplan.costs.cost_model import CostModel
from mmplan.costs.links import Transfer
from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.planning import planner
from mmplan.processes import in_processes
from mmplan.schema.cluster import Cluster, CollectiveLinks, Link
from mmplan.schema.plan import Asked, Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, with_batch
from mmplan.simulation.predict import plan_profile
from mmplan.simulation.symmetry import predict

# Other batches over the plan's.
BATCHES = {
    "four times": Fraction(4),
    "twice": Fraction(2),
    "half": Fraction(1, 2),
    "a quarter of": Fraction(1, 4),
}
# Settings of :func:`replans`.
NUM_REPLANS = 3 + len(BATCHES)
# Parts of the step that are not computes.
MESSAGES = "messages"
LOSSES = "losses"
REDUCTIONS = "gradient reductions"
# Of plans that are not written.
_NO_FILES: dict[str, Any] = {"workload_path": None, "profile_path": None, "plan_path": "plan.json"}


def replan(
    plan: Plan,
    plan_path: Path,
    *,
    workload: Workload,
    workload_path: Path,
    tasks: Sequence[str],
    output: Path,
) -> Plan:
    """A plan for other tasks, with the plan's cluster, devices, solver and options.

    Args:
        plan: the present plan.
        plan_path: its file; the profile's path is relative to it.
        workload: of the plan.
        workload_path: its file.
        tasks: names of tasks of the workload.
        output: file of the new plan.

    Raises:
        InvalidInputError: an unknown task, or the profile is gone or has changed.
        InfeasibleError: these tasks do not fit the plan's devices.
    """
    what = f"planning for the tasks {', '.join(tasks)}"
    try:
        profile = plan_profile(plan, plan_path)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{what}: {error.message}",
            hint="put it back, or solve for them: mmplan solve WORKLOAD --profile PROFILE "
            f"--tasks {','.join(tasks)}",
        ) from None
    try:
        return solve_again(
            plan,
            workload=workload,
            workload_path=workload_path,
            profile=profile,
            profile_path=plan_path.parent / plan.profile.path,
            plan_path=output,
            cluster=plan.cluster,
            devices=plan.devices,
            tasks=tasks,
        )
    except MMPlanError as error:
        raise type(error)(f"{what}: {error.message}", hint=error.hint) from None


def solve_again(plan: Plan, *, workload: Workload, **setting: Any) -> Plan:
    """A new plan by the solver and the options of a plan.

    Args:
        plan: has the solver and its options.
        workload: may be another one.
        setting: files, cluster, devices and tasks; see :func:`mmplan.planning.planner.solve`.
    """
    asked = plan.solver.asked or _default_options(plan)
    return planner.solve(
        workload,
        solver=asked.solver,
        method=asked.method,
        top=asked.top,
        budget_s=asked.budget_s,
        **setting,
    )


def _default_options(plan: Plan) -> Asked:
    """Options for a plan without recorded ones: its solver, or any for a plan made by hand."""
    if plan.solver.name in planner.SOLVERS | planner.BASELINES:
        return Asked(solver=plan.solver.name, method=plan.solver.method)
    return Asked(solver="auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The step with one part made faster.

    Attributes:
        part: a module whose computes take half the time, or one of the free parts: ``messages``,
            ``losses`` (gathers included), ``gradient reductions``.
        is_module: whether the part is a module.
        iteration_s: seconds of that step.
        gain: saved share of the step.
    """

    part: str
    is_module: bool
    iteration_s: float
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The best plan of a changed setting.

    Attributes:
        change: difference to the plan's setting: ``one node more``.
        times: batch of the setting over the plan's.
        plan: None where the setting has none.
        why: the reason for that.
    """

    change: str
    times: Fraction = Fraction(1)
    plan: Plan | None = None
    why: str = ""


def part_effects(plan: Plan, profile: Profile) -> list[Effect]:
    """The step with each part of the plan made faster, largest gain first.

    Raises:
        InvalidInputError: the profile lacks a module or a degree of the plan.
    """
    now_s = predict(plan, CostModel(profile, plan.cluster, plan.training)).iteration_s
    parts = [(module, True) for module in dict.fromkeys(unit.module for unit in plan.units)]
    parts += [(MESSAGES, False), (LOSSES, False), (REDUCTIONS, False)]
    effects: list[Effect] = []
    for part, is_module in parts:
        costs = _Faster(profile, plan, part, is_module=is_module)
        then_s = predict(plan, costs).iteration_s
        effects.append(
            Effect(
                part=part,
                is_module=is_module,
                iteration_s=then_s,
                gain=1 - then_s / now_s if now_s else 0.0,
            )
        )
    return sorted(effects, key=lambda effect: -effect.gain)


class _Faster(CostModel):
    """The costs of a profile, a module's halved or those of another part zero."""

    def __init__(self, profile: Profile, plan: Plan, part: str, *, is_module: bool) -> None:
        super().__init__(profile, plan.cluster, plan.training)
        self._part, self._is_module = part, is_module

    def forward_s(self, *, module: str, **given: Any) -> float:
        return super().forward_s(module=module, **given) * self._module_factor(module)

    def backward_s(self, *, module: str, **given: Any) -> float:
        return super().backward_s(module=module, **given) * self._module_factor(module)

    def message(self, *, source: int, target: int, num_bytes: float) -> Transfer:
        transfer = super().message(source=source, target=target, num_bytes=num_bytes)
        return transfer.times(self._factor(MESSAGES))

    def gather_shares_s(self, *, ranks: Sequence[int], num_bytes: float) -> float:
        return super().gather_shares_s(ranks=ranks, num_bytes=num_bytes) * self._factor(MESSAGES)

    def all_gather(self, *, ranks: Sequence[int], num_bytes: float, sharers: int = 1) -> Transfer:
        transfer = super().all_gather(ranks=ranks, num_bytes=num_bytes, sharers=sharers)
        return transfer.times(self._factor(LOSSES))

    def all_reduce(self, *, ranks: Sequence[int], num_bytes: float, sharers: int = 1) -> Transfer:
        transfer = super().all_reduce(ranks=ranks, num_bytes=num_bytes, sharers=sharers)
        return transfer.times(self._factor(REDUCTIONS))

    def loss_s(
        self, *, loss: str, samples: int, shards: int = 1, tp: int = 1
    ) -> tuple[float, float]:
        forward_s, backward_s = super().loss_s(loss=loss, samples=samples, shards=shards, tp=tp)
        factor = self._factor(LOSSES)
        return forward_s * factor, backward_s * factor

    def _module_factor(self, module: str) -> float:
        return 0.5 if self._is_module and module == self._part else 1.0

    def _factor(self, part: str) -> float:
        return 0.0 if part == self._part and not self._is_module else 1.0


def faster_links_s(plan: Plan, profile: Profile) -> float:
    """Seconds of a step of the same plan, links having twice the speed."""
    cluster = _faster_links(plan.cluster)
    changed = plan.model_copy(update={"cluster": cluster})
    return predict(changed, CostModel(profile, cluster, plan.training)).iteration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """Another cluster or batch."""

    change: str
    cluster: Cluster
    devices: int
    times: Fraction = Fraction(1)


def replans(
    plan: Plan,
    *,
    profile: Profile,
    workload: Workload,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> list[Replan]:
    """The best plans of a node more or less, faster links, and other batches.

    The solver and its options are the plan's. The new plans are not written.

    Args:
        plan: to compare with.
        profile: of the plan, or another that knows its modules.
        workload: of the plan.
        progress: called with settings done, all settings, and the last change.
    """
    replan = partial(_replanned, plan=plan, profile=profile, workload=workload)
    settings, replanned = _settings(plan), dict[str, Replan]()
    for item in in_processes(replan, settings):
        replanned[item.change] = item
        progress(len(replanned), len(settings), item.change)
    return [replanned[setting.change] for setting in settings]


def _settings(plan: Plan) -> list[_Setting]:
    cluster, devices = plan.cluster, plan.devices
    if cluster.device.is_cpu:
        node, step, larger = "process", 1, {"devices_per_node": cluster.devices_per_node + 1}
    else:
        node, step, larger = "node", cluster.devices_per_node, {"nodes": cluster.nodes + 1}
    more = cluster.model_copy(update=larger)
    settings = [
        _Setting(change=f"one {node} more", cluster=more, devices=devices + step),
        _Setting(change=f"one {node} less", cluster=cluster, devices=devices - step),
        _Setting(
            change="links of twice the speed", cluster=_faster_links(cluster), devices=devices
        ),
    ]
    for words, times in BATCHES.items():
        change = f"{words} the batch"
        settings.append(_Setting(change=change, cluster=cluster, devices=devices, times=times))
    return settings


def _replanned(setting: _Setting, *, plan: Plan, profile: Profile, workload: Workload) -> Replan:
    try:
        solved = solve_again(
            plan,
            workload=_of_batch(workload, setting.times),
            cluster=setting.cluster,
            devices=setting.devices,
            tasks=tuple(plan.tasks),
            profile=profile,
            **_NO_FILES,
        )
    except MMPlanError as error:
        return Replan(change=setting.change, times=setting.times, why=error.message)
    return Replan(change=setting.change, times=setting.times, plan=solved)


def _of_batch(workload: Workload, times: Fraction) -> Workload:
    batch = workload.batch * times
    if batch.denominator > 1:
        raise InvalidInputError(f"a batch of {workload.batch} times {times} is no whole number")
    return workload if times == 1 else with_batch(workload, int(batch), scale_sync=True)


def _faster_links(cluster: Cluster) -> Cluster:
    def faster(link: Link | None) -> Link | None:
        return link and Link(
            latency_s=link.latency_s / 2, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * 2
        )

    def collectives(links: CollectiveLinks | None) -> CollectiveLinks | None:
        return links and CollectiveLinks(
            all_reduce=faster(links.all_reduce), all_gather=faster(links.all_gather)
        )

    links = cluster.links
    return cluster.model_copy(
        update={
            "links": links.model_copy(
                update={
                    "intra_node": faster(links.intra_node),
                    "inter_node": faster(links.inter_node),
                    "adapter_bytes_per_s": links.adapter_bytes_per_s
                    and links.adapter_bytes_per_s * 2,
                    "intra_node_collectives": collectives(links.intra_node_collectives),
                    "inter_node_collectives": collectives(links.inter_node_collectives),
                }
            )
        }
    )
