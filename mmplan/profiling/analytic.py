"""A profile without devices: modules counted on the meta device, timed by a roofline.

Its times are as good as the stated efficiencies (see :mod:`mmplan.profiling.roofline`): good
enough to choose between plans, and for clusters that are not at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmplan.costs.fit import fit_profile
from mmplan.errors import InvalidInputError
from mmplan.profiling.counting import FLOPS, block_parameters
from mmplan.profiling.flow import BASE, TaskFlow
from mmplan.profiling.grid import microbatch_sizes, task_difference
from mmplan.profiling.roofline import Roofline
from mmplan.schema.agreement import fingerprinted
from mmplan.schema.cluster import Cluster
from mmplan.schema.factories import tied_blocks
from mmplan.schema.fingerprints import built_parts
from mmplan.schema.profile import LossPoint, LossProfile, ModuleProfile, Point, Profile
from mmplan.schema.protocols import as_sharded, exchanged_per_row, others_only, trains
from mmplan.schema.workload import Workload, resolve_tasks

# Degrees of tensor parallelism that are counted: groups fit the nodes of common clusters.
TP_DEGREES = (1, 2, 4, 8)
PHASES = ("forward", "backward", "backward_input")


def analytic_profile(
    workload: Workload,
    folder: Path,
    cluster: Cluster,
    *,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> Profile:
    """Profile a workload for a cluster that need not exist.

    Args:
        workload: its factories are called on the meta device; its data set is built for the
            shapes of its first sample.
        folder: the workload file's folder.
        cluster: device and links of the times.
        progress: hears how many of how many modules and losses are counted, and the next one.

    Returns:
        A profile with source "analytic", fitted, constants in its provenance.

    Raises:
        InvalidInputError: no data, a factory that fails, or a block that needs values.
    """
    train = workload.train
    roofline = Roofline(cluster, train.precision, compiled=train.compile)
    modules: dict[str, ModuleProfile] = {}
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    losses: dict[str, LossProfile] = {}
    left_out: dict[str, str] = {}
    views = resolve_tasks(workload)
    total = sum(len(task.modules) + len(task.loss_inputs) for task in views.values())
    parts = iter(range(total))
    for name, task in views.items():
        flow = TaskFlow(workload, folder, task)
        for module in task.modules:
            done = next(parts)

            def on_degree(tp: int, module: str = module, done: int = done) -> None:
                progress(done, total, f"{module} tp {tp}")

            profiled = _module_profile(flow, module, cluster, roofline, left_out, on_degree)
            changed = task_difference(profiled, modules.setdefault(module, profiled))
            if changed:
                tasks.setdefault(name, {})[module] = changed
        for loss in task.loss_inputs:
            progress(next(parts), total, f"loss {loss}")
            if loss not in losses:
                losses[loss] = _loss_profile(flow, loss, roofline)
    progress(total, total, "fingerprints of modules and losses")
    profile = Profile(
        name=workload.name,
        source="analytic",
        cluster=cluster,
        modules=modules,
        tasks=tasks,
        losses=losses,
        sequence_parallel=train.sequence_parallel,
        provenance={
            **roofline.provenance(),
            "precision": train.precision,
            "torch": str(torch.__version__),
            "tp_left_out": left_out,
        },
    )
    fits = fit_profile(profile)
    made = fingerprinted(profile, workload, built_parts(workload, folder))
    return made.model_copy(update={"fits": fits})


def _module_profile(
    flow: TaskFlow,
    module: str,
    cluster: Cluster,
    roofline: Roofline,
    left_out: dict[str, str],
    on_degree: Callable[[int], None],
) -> ModuleProfile:
    on_degree(1)
    built = flow.build(module)
    sizes = microbatch_sizes(flow.task.batch)
    base = flow.count_module(module, tp=1, samples=BASE)
    points = _points(flow, module, sizes, 1, roofline)
    for tp in _tp_candidates(built, cluster):
        on_degree(tp)
        try:
            points += _points(flow, module, sizes, tp, roofline)
        except InvalidInputError as error:
            left_out[f"{module} tp {tp}"] = error.message
    parameters = block_parameters(built)
    outputs = [count.output_bytes / BASE for count in base]
    saved = tuple(count.saved_bytes / BASE for count in base)
    return ModuleProfile(
        blocks=len(base),
        block_work=tuple(
            roofline.seconds(c.forward.table) + roofline.seconds(c.backward.table) for c in base
        ),
        block_parameters=tuple(map(float, parameters)) if any(parameters) else None,
        block_activation_bytes=saved if any(saved) else None,
        block_boundary_bytes=tuple(outputs),
        tied_blocks=tied_blocks(built) or None,
        parameters=float(sum(parameters)),
        flops_per_sample=sum(float(c.forward.table[:, FLOPS].sum()) for c in base) / BASE,
        output_bytes_per_sample=flow.output_bytes(module),
        boundary_bytes_per_sample=max(outputs[:-1], default=outputs[-1]),
        points=tuple(points),
    )


def _tp_candidates(built: Any, cluster: Cluster) -> list[int]:
    """Degrees above 1 that fit a node, or are whole nodes where the cluster lets groups be on them.

    None for a module that no block says how to split. Such a module would be replicated, which
    saves neither time nor memory.
    """
    if not any(getattr(block, "tp_plan", None) for block in built):
        return []
    node = cluster.devices_per_node
    several = (nodes * node for nodes in range(2, cluster.tensor_parallel_nodes + 1))
    return [*(tp for tp in TP_DEGREES[1:] if tp <= node), *several]


def _points(
    flow: TaskFlow, module: str, sizes: Sequence[int], tp: int, roofline: Roofline
) -> list[Point]:
    small, large = (flow.count_module(module, tp=tp, samples=n) for n in (BASE, 2 * BASE))
    is_affine = all(
        getattr(a, phase).names == getattr(b, phase).names
        for a, b in zip(small, large, strict=True)
        for phase in PHASES
    )

    def point(samples: int) -> Point:
        # Of the same kernels FLOPs and bytes are affine in samples; others are counted.
        counts = None if is_affine else flow.count_module(module, tp=tp, samples=samples)
        pairs = list(zip(counts or small, counts or large, strict=True))

        def seconds(phase: str) -> float:
            tables = ((getattr(a, phase).table, getattr(b, phase).table) for a, b in pairs)
            return sum(roofline.seconds(_affine(a, b, samples), tp=tp) for a, b in tables)

        saved = sum(_affine(a.saved_bytes, b.saved_bytes, samples) for a, b in pairs)
        return Point(
            tp=tp,
            microbatch=samples,
            forward_s=seconds("forward"),
            backward_s=seconds("backward"),
            backward_input_s=seconds("backward_input"),
            activation_bytes=float(saved),
        )

    return [point(samples) for samples in sizes]


def _affine(small: Any, large: Any, samples: int) -> Any:
    """A table or a number at a micro-batch size, from those at one and at two times ``BASE``."""
    return np.maximum(small + (large - small) * ((samples - BASE) / BASE), 0.0)


def _loss_profile(flow: TaskFlow, loss: str, roofline: Roofline) -> LossProfile:
    sizes = microbatch_sizes(flow.task.sync_batches.get(loss) or flow.task.batch)
    counted = [(n, flow.count_loss(loss, n), flow.count_shards(loss, n)) for n in sizes]
    from_modules = all(source.module is not None for source in flow.task.loss_inputs[loss])
    points = tuple(
        LossPoint(
            samples=n,
            forward_s=roofline.seconds(count.forward.table),
            backward_s=roofline.seconds(count.backward.table),
            activation_bytes=count.saved_bytes,
            cut_bytes=None if shards is None else shards.saved_bytes,
        )
        for n, count, shards in counted
    )
    # The runtime shards a loss with a sharded form, if its inputs are features only.
    module = flow.build_loss(loss)
    sharded = from_modules and as_sharded(module) is not None
    exchanged = exchanged_per_row(module) if sharded else None
    return LossProfile(
        sharded=sharded,
        exchanged_per_row=exchanged,
        others_only=others_only(module),
        trains=trains(module),
        points=points,
    )
