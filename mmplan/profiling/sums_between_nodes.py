"""Tensor parallelism over nodes in a profile that was measured on one machine.

All processes of a measurement are on one machine, so the sums of a group that would be on several
nodes take its links. What they take more on the cluster's links is added, by the bytes of the sums
that are counted.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mmplan.profiling.counting import BlockCount
from mmplan.profiling.flow import TaskFlow
from mmplan.profiling.roofline import sums_s
from mmplan.schema.cluster import Cluster
from mmplan.schema.profile import ModuleProfile, Point
from mmplan.schema.workload import Workload, resolve_tasks


class SumsBetweenNodes:
    """Adds to measured points what the sums of groups on several nodes take more.

    Args:
        workload: that was measured.
        folder: its file's.
        cluster: for which a plan is made.
    """

    def __init__(self, workload: Workload, folder: Path, cluster: Cluster) -> None:
        self._cluster, tasks = cluster, resolve_tasks(workload)
        self._flow = cache(lambda task: TaskFlow(workload, folder, tasks[task]))

    def added(self, profile: ModuleProfile, task: str, module: str) -> ModuleProfile:
        """The module's profile with the seconds that its points lack."""
        points = (
            self._point(point, task, module) if self._cluster.spans_nodes(point.tp) else point
            for point in profile.points
        )
        return profile.model_copy(update={"points": tuple(points)})

    def _point(self, point: Point, task: str, module: str) -> Point:
        counts = self._flow(task).count_module(module, tp=point.tp, samples=point.microbatch)
        counts = counts[: point.blocks]
        forward_s, backward_s, input_s = (
            self._more_s(counts, phase, point.tp)
            for phase in ("forward", "backward", "backward_input")
        )
        changes = {
            "forward_s": point.forward_s + forward_s,
            "backward_s": point.backward_s + backward_s,
        }
        if point.backward_input_s is not None:
            changes["backward_input_s"] = point.backward_input_s + input_s
        return point.model_copy(update=changes)

    def _more_s(self, counts: list[BlockCount], phase: str, tp: int) -> float:
        one_node = self._cluster.model_copy(update={"nodes": 1, "devices_per_node": tp})
        tables = [getattr(count, phase).table for count in counts]
        over, inside = (
            sum(sums_s(cluster, table, tp=tp) for table in tables)
            for cluster in (self._cluster, one_node)
        )
        return over - inside
