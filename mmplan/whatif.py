"""What would change the step's time: parts of the plan made faster, or another cluster or batch.

Two kinds of question. :func:`part_effects` keeps the plan and simulates its program with one part
made faster: what binds a plan is what shortens the step when it gets cheaper. :func:`replans` asks
the planner again, with one node more, links of twice the speed, or another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmplan.errors import MMPlanError
from mmplan.links import Transfer
from mmplan.module_costs import CostModel
from mmplan.replan import solve_again
from mmplan.schema.base import parse_document
from mmplan.schema.cluster import Cluster, CollectiveLinks, Link
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.symmetry import predict

# Settings that :func:`replans` asks about.
NUM_REPLANS = 5
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
        change: what is other: ``one node more``.
        plan: None where there is none; ``why`` then says why.
    """

    change: str
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


def replans(
    plan: Plan,
    plan_path: Path,
    *,
    profile: Profile,
    profile_path: Path,
    workload: Workload,
    workload_path: Path,
) -> Iterator[Replan]:
    """The best plans of a node more or less, faster links, twice and half the batch.

    Each asks the solver what the plan's own solving asked. The new plans are not written.

    Args:
        plan: to compare with.
        plan_path: its file.
        profile: of the plan, or another that knows its modules.
        profile_path: its file.
        workload: of the plan.
        workload_path: its file.
    """
    step = 1 if plan.cluster.device.is_cpu else plan.cluster.devices_per_node
    node = "process" if plan.cluster.device.is_cpu else "node"
    settings: list[tuple[str, Cluster, int, Callable[[Workload], Workload]]] = [
        (f"one {node} more", _one_more(plan.cluster), plan.devices + step, _same),
        (f"one {node} less", plan.cluster, plan.devices - step, _same),
        ("links of twice the speed", _faster_links(plan.cluster), plan.devices, _same),
        ("twice the batch", plan.cluster, plan.devices, partial(_of_batch, times=2, over=1)),
        ("half the batch", plan.cluster, plan.devices, partial(_of_batch, times=1, over=2)),
    ]
    for change, cluster, devices, changed in settings:
        try:
            found = solve_again(
                plan,
                workload=changed(workload),
                workload_path=workload_path,
                profile=profile,
                profile_path=profile_path,
                plan_path=plan_path,
                cluster=cluster,
                devices=devices,
                tasks=tuple(plan.tasks),
            )
        except MMPlanError as error:
            yield Replan(change=change, plan=None, why=error.message)
        else:
            yield Replan(change=change, plan=found)


def _same(workload: Workload) -> Workload:
    return workload


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


def _of_batch(workload: Workload, *, times: int, over: int) -> Workload:
    """The workload with every batch scaled; so are sync batches that would not divide theirs.

    Raises:
        InvalidInputError: the workload does not allow such a batch.
    """
    document = workload.model_dump(mode="json", exclude_unset=True)
    batches = [document, *(t for t in document.get("tasks", {}).values() if t.get("batch"))]
    for holder in batches:
        holder["batch"] = holder["batch"] * times // over
    for loss in document["losses"].values():
        sync_batch = loss.get("sync_batch")
        if sync_batch and any(holder["batch"] % sync_batch for holder in batches):
            loss["sync_batch"] = sync_batch * times // over
    return parse_document(Workload, document, source=f"the workload with {times}/{over} the batch")
