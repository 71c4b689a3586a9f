"""What would change the step's time: parts of the plan made faster, or another cluster or batch.

Two kinds of question. :func:`part_effects` keeps the plan and simulates its program with one part
made faster: what binds a plan is what shortens the step when it gets cheaper. :func:`replans` asks
the planner again, with one node more, links of twice the speed, or another batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from mmplan.costs.batch_override import with_batch
from mmplan.costs.cost_model import CostModel
from mmplan.costs.links import Transfer
from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.planning.replan import solve_again
from mmplan.processes import in_processes
from mmplan.schema.cluster import Cluster, CollectiveLinks, Link
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.simulation.symmetry import predict

BATCHES = {
    "four times": Fraction(4),
    "twice": Fraction(2),
    "half": Fraction(1, 2),
    "a quarter of": Fraction(1, 4),
}
# Settings that :func:`replans` asks about.
NUM_REPLANS = 3 + len(BATCHES)
MESSAGES, LOSSES, REDUCTIONS = "messages", "losses", "gradient reductions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The step with one part made faster.

    Attributes:
        part: a module, whose computes take half the time, or what is free: ``messages``,
            ``losses`` (gathers included) or ``gradient reductions``.
        is_module: which of the two.
        iteration_s: of the step then.
        gain: share of the step that this saves.
    """

    part: str
    is_module: bool
    iteration_s: float
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The best plan of a changed setting.

    Attributes:
        place: among those that :func:`replans` asks about.
        change: what is other: ``one node more``.
        times: the batch is so many times the plan's.
        plan: None where there is none; ``why`` then says why.
    """

    place: int = 0
    change: str
    times: Fraction = Fraction(1)
    plan: Plan | None
    why: str = ""


def part_effects(plan: Plan, profile: Profile) -> list[Effect]:
    """What each part of the plan would save if it were faster, most first.

    Raises:
        InvalidInputError: the profile lacks a module or a degree of the plan.
    """
    now_s = predict(plan, CostModel(profile, plan.cluster, plan.training)).iteration_s
    modules = dict.fromkeys(unit.module for unit in plan.units)
    parts = [(module, True) for module in modules]
    effects: list[Effect] = []
    for part, is_module in [*parts, (MESSAGES, False), (LOSSES, False), (REDUCTIONS, False)]:
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
    """The costs of a profile, one part of them halved (a module's) or gone."""

    def __init__(self, profile: Profile, plan: Plan, part: str, *, is_module: bool) -> None:
        super().__init__(profile, plan.cluster, plan.training)
        self._part, self._is_module = part, is_module

    def forward_s(self, *, module: str, **given: Any) -> float:
        return super().forward_s(module=module, **given) * self._of(module)

    def backward_s(self, *, module: str, **given: Any) -> float:
        return super().backward_s(module=module, **given) * self._of(module)

    def message(self, *, source: int, target: int, num_bytes: float) -> Transfer:
        whole = super().message(source=source, target=target, num_bytes=num_bytes)
        return whole.times(self._left(MESSAGES))

    def gather_shares_s(self, *, ranks: Sequence[int], num_bytes: float) -> float:
        return super().gather_shares_s(ranks=ranks, num_bytes=num_bytes) * self._left(MESSAGES)

    def all_gather(self, *, ranks: Sequence[int], num_bytes: float) -> Transfer:
        whole = super().all_gather(ranks=ranks, num_bytes=num_bytes)
        return whole.times(self._left(LOSSES))

    def all_reduce(self, *, ranks: Sequence[int], num_bytes: float, sharers: int = 1) -> Transfer:
        whole = super().all_reduce(ranks=ranks, num_bytes=num_bytes, sharers=sharers)
        return whole.times(self._left(REDUCTIONS))

    def loss_s(self, *, loss: str, samples: int, shards: int = 1) -> tuple[float, float]:
        forward_s, backward_s = super().loss_s(loss=loss, samples=samples, shards=shards)
        left = self._left(LOSSES)
        return forward_s * left, backward_s * left

    def _of(self, module: str) -> float:
        return 0.5 if self._is_module and module == self._part else 1.0

    def _left(self, part: str) -> float:
        return 0.0 if part == self._part and not self._is_module else 1.0


def faster_links_s(plan: Plan, profile: Profile) -> float:
    """Seconds of a step of the same plan, links having twice the speed."""
    cluster = _faster_links(plan.cluster)
    changed = plan.model_copy(update={"cluster": cluster})
    return predict(changed, CostModel(profile, cluster, plan.training)).iteration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """Another cluster or batch, with its place among the others."""

    place: int
    change: str
    cluster: Cluster
    devices: int
    times: Fraction = Fraction(1)


def replans(
    plan: Plan,
    plan_path: Path,
    *,
    profile: Profile,
    profile_path: Path,
    workload: Workload,
    workload_path: Path,
    processes: int | None = None,
) -> Iterator[Replan]:
    """The best plans of a node more or less, faster links, and other batches, as they are found.

    Each asks the solver what the plan's own solving asked. The new plans are not written.

    Args:
        plan: to compare with.
        plan_path: its file.
        profile: of the plan, or another that knows its modules.
        profile_path: its file.
        workload: of the plan.
        workload_path: its file.
        processes: that plan at the same time, default one per core.
    """
    ask = partial(
        _replanned,
        plan=plan,
        plan_path=plan_path,
        profile=profile,
        profile_path=profile_path,
        workload=workload,
        workload_path=workload_path,
    )
    yield from in_processes(ask, _settings(plan), processes=processes)


def _settings(plan: Plan) -> list[_Setting]:
    cluster, devices = plan.cluster, plan.devices
    step = 1 if cluster.device.is_cpu else cluster.devices_per_node
    node = "process" if cluster.device.is_cpu else "node"
    changes: list[tuple[str, Cluster, int, Fraction]] = [
        (f"one {node} more", _one_more(cluster), devices + step, Fraction(1)),
        (f"one {node} less", cluster, devices - step, Fraction(1)),
        ("links of twice the speed", _faster_links(cluster), devices, Fraction(1)),
        *((f"{words} the batch", cluster, devices, times) for words, times in BATCHES.items()),
    ]
    return [
        _Setting(place=i, change=change, cluster=machine, devices=count, times=times)
        for i, (change, machine, count, times) in enumerate(changes)
    ]


def _replanned(
    setting: _Setting,
    *,
    plan: Plan,
    plan_path: Path,
    profile: Profile,
    profile_path: Path,
    workload: Workload,
    workload_path: Path,
) -> Replan:
    found = Replan(place=setting.place, change=setting.change, times=setting.times, plan=None)
    try:
        solved = solve_again(
            plan,
            workload=_of_batch(workload, setting.times),
            workload_path=workload_path,
            profile=profile,
            profile_path=profile_path,
            plan_path=plan_path,
            cluster=setting.cluster,
            devices=setting.devices,
            tasks=tuple(plan.tasks),
        )
    except MMPlanError as error:
        return replace(found, why=error.message)
    return replace(found, plan=solved)


def _of_batch(workload: Workload, times: Fraction) -> Workload:
    batch = workload.batch * times
    if batch.denominator > 1:
        raise InvalidInputError(f"a batch of {workload.batch} times {times} is no whole number")
    return workload if times == 1 else with_batch(workload, int(batch), scale_sync=True)


def _one_more(cluster: Cluster) -> Cluster:
    if cluster.device.is_cpu:
        return cluster.model_copy(update={"devices_per_node": cluster.devices_per_node + 1})
    return cluster.model_copy(update={"nodes": cluster.nodes + 1})


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
                    "intra_node_collectives": collectives(links.intra_node_collectives),
                    "inter_node_collectives": collectives(links.inter_node_collectives),
                }
            )
        }
    )
