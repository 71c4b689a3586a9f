"""A profile from measurements on this machine: its points, and the profile made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from mmplan.costs.fit import fit_curve, fit_profile
from mmplan.errors import InvalidInputError, RunFailedError, UnfitEnvironmentError
from mmplan.processes import num_cores
from mmplan.profiling.grid import design, microbatch_sizes, task_difference
from mmplan.profiling.worker import (
    Json,
    MeasuredPoints,
    ProfileSetting,
    ProfileState,
    ProgressCallback,
    Worker,
    measure_points,
)
from mmplan.schema.agreement import fingerprinted
from mmplan.schema.cluster import Cluster, CollectiveLinks, Device, Link, Links
from mmplan.schema.profile import BuiltPart, LossPoint, LossProfile, ModuleProfile, Point, Profile
from mmplan.schema.workload import TaskView, Workload, load_workload, resolve_tasks

DeviceType = Literal["cpu", "cuda"]

# Sizes of messages: latency decides the time of the first ones, bandwidth that of the last.
LINK_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 24)
QUICK_LINK_BYTES = LINK_BYTES[::2]
# Most samples that are loaded for measuring; chosen by hand.
MOST_SAMPLES = 256
# Blocks are timed at a small micro-batch: their shares hardly depend on it.
_SHAPE_MICROBATCH = 8
# Half-width of the middle half over the median, above which block times say less than FLOPs.
_NOISY = 0.25
# The least number with a median that one slow round does not decide.
ROUNDS = 3
# Longer points are means over slow and fast moments already.
_LONG_S = 5.0
_TIMES = ("forward_s", "backward_s", "seconds", "forward_spread_s", "backward_spread_s", "spread_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A task's use of a module, unless an earlier task uses it the same way."""

    task: str
    module: str
    first: bool


def measure_profile(
    path: Path,
    *,
    cluster: Cluster | None = None,
    device: DeviceType | None = None,
    num_processes: int | None = None,
    progress: ProgressCallback | None = None,
    state_path: Path,
    rounds: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
    worker: Worker | None = None,
) -> Profile:
    """Measure a workload's modules, losses and links on this machine's devices.

    Args:
        path: the workload file.
        cluster: devices and links to plan for; measured as well when absent.
        device: default: cuda where there is one.
        num_processes: that measure at the same time; default: every GPU, or two
            processes on a CPU with two cores.
        progress: called after every point.
        state_path: where finished points are kept until the profile is done; the caller
            removes it.
        rounds: how often each point is measured, in new processes each time; more than one
            take more points and repeats too.
        meanwhile: called while the processes load their libraries.
        worker: that does so already; default: a new one.

    Returns:
        A fitted profile with source "measured".

    Raises:
        InvalidInputError: the workload, its code or its data is wrong, or the cluster's
            devices are not this machine's.
        UnfitEnvironmentError: the device cannot be used.
        RunFailedError: a process died, or not even the smallest micro-batch could be run.
    """
    with worker or Worker() as worker:
        worker.start()
        workload = load_workload(path)
        chosen, processes = choose_devices(device, num_processes)
        _check_cluster(cluster, chosen)
        meanwhile()
        setting = ProfileSetting(
            workload=workload.model_dump(mode="json", exclude_none=True),
            folder=path.parent.resolve(),
            device=chosen,
            processes=processes,
            repeat_s=0.04 if rounds == 1 else 0.1,
            max_point_s=20.0,
            pool=min(MOST_SAMPLES, max(t.batch for t in resolve_tasks(workload).values())),
            # A lone GPU has copies alone, within itself.
            links=cluster is None and (chosen == "cpu" or processes > 1),
        )
        state = ProfileState(state_path)
        uses = list(_uses(workload))
        described, built = _describe(setting, workload, uses, state, worker)
        # Points of another model, which an interrupted profile may have left, are of no use.
        setting = replace(setting, model={name: part.model_dump() for name, part in built.items()})
        points = _design(workload, uses, described, setting, cluster is None, quick=rounds == 1)
        results = in_rounds(setting, points, state, worker, progress=progress, rounds=rounds)
    measured = list(zip(points, results, strict=True))
    assembled = _assemble(workload, uses, described, setting, measured, cluster)
    profile = fingerprinted(assembled, workload, built)
    return profile.model_copy(update={"fits": fit_profile(profile)})


def choose_devices(device: DeviceType | None, num_processes: int | None) -> tuple[DeviceType, int]:
    """The kind of device to measure, and the processes that measure together on a machine.

    Raises:
        InvalidInputError: no process.
        UnfitEnvironmentError: there is no GPU.
    """
    if num_processes is not None and num_processes < 1:
        raise InvalidInputError(
            f"--nproc {num_processes}: so many processes cannot measure", hint="give 1 or more"
        )
    import torch

    chosen: DeviceType = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise UnfitEnvironmentError(
            "--device cuda: torch finds no CUDA device here",
            hint="--device cpu, or install the torch for your CUDA; mmplan doctor says more",
        )
    if chosen == "cuda":
        return chosen, num_processes or max(1, torch.cuda.device_count())
    return chosen, num_processes or min(2, num_cores())


def _check_cluster(cluster: Cluster | None, device: DeviceType) -> None:
    if cluster is not None and cluster.device.is_cpu != (device == "cpu"):
        raise InvalidInputError(
            f"cluster {cluster.name} has devices {cluster.device.name}, this machine would "
            f"measure on {device}",
            hint="profile on one of its nodes, or without devices: --analytic",
        )


# --- points to measure -------------------------------------------------------------------


def _uses(workload: Workload) -> Iterator[_Use]:
    """Every module as its first task uses it, and as each other task that differs does."""
    seen: dict[str, list[Any]] = {}
    for name, task in resolve_tasks(workload).items():
        for module in task.modules:
            before = seen.setdefault(module, [])
            signature = _signature(task, module)
            if signature not in before:
                yield _Use(task=name, module=module, first=not before)
                before.append(signature)


def _signature(task: TaskView, module: str) -> Any:
    """Equal for tasks with the same batch, data and modules in front of a module."""
    inputs = [
        (source.field, source.element, source.module and _signature(task, source.module))
        for source in task.inputs[module]
    ]
    return task.batch, task.data, module, inputs


def _describe(
    setting: ProfileSetting,
    workload: Workload,
    uses: Sequence[_Use],
    state: ProfileState,
    worker: Worker,
) -> tuple[dict[str, Json], dict[str, BuiltPart]]:
    """Of every module blocks, parameters and possible tp, of every part what was built.

    From shapes; of the model as it is now, whatever was found before.
    """
    degrees = [tp for tp in range(2, setting.processes + 1) if setting.processes % tp == 0]
    points: list[Json] = [{"kind": "fingerprints"}]
    for module in dict.fromkeys(use.module for use in uses):
        pins = workload.modules[module].plan
        tps = [tp for tp in degrees if pins.allows("tp", tp)]
        points.append({"kind": "describe", "module": module, "tps": tps})
    built, *results = measure_points(setting, points, state, worker, again=True)
    described = {p["module"]: result for p, result in zip(points[1:], results, strict=True)}
    return described, {name: BuiltPart.model_validate(part) for name, part in built.items()}


def _design(
    workload: Workload,
    uses: Sequence[_Use],
    described: Mapping[str, Json],
    setting: ProfileSetting,
    with_links: bool,
    *,
    quick: bool,
) -> list[Json]:
    points: list[Json] = [{"kind": "machine"}]
    for use in uses:
        points += _module_points(workload, use, described[use.module], quick=quick)
    for task in resolve_tasks(workload).values():
        for loss in task.loss_inputs:
            if not any(p["kind"] == "loss" and p["loss"] == loss for p in points):
                points += _loss_points(task, loss)
    if with_links:
        points += _link_points(setting, QUICK_LINK_BYTES if quick else LINK_BYTES)
    return points


def _module_points(workload: Workload, use: _Use, module: Json, *, quick: bool) -> Iterator[Json]:
    batch = resolve_tasks(workload)[use.task].batch
    pinned = workload.modules[use.module].plan.microbatch
    if pinned is not None:
        batch = min(batch, max((pinned,) if isinstance(pinned, int) else pinned))
    base: Json = {"task": use.task, "module": use.module}
    yield base | {"kind": "shape", "microbatch": min(_SHAPE_MICROBATCH, batch)}
    for tp, size, blocks in design(module["blocks"], batch, module["tps"], quick=quick):
        yield base | {"kind": "module", "tp": tp, "microbatch": size, "blocks": blocks}


def _loss_points(task: TaskView, loss: str) -> list[Json]:
    largest = task.sync_batches.get(loss, task.batch)
    return [
        {"kind": "loss", "task": task.name, "loss": loss, "samples": size}
        for size in microbatch_sizes(largest, quick=True)
    ]


def _link_points(setting: ProfileSetting, sizes: Sequence[int]) -> list[Json]:
    operations = ("p2p", "all_reduce", "all_gather") if setting.links else ("copy",)
    return [
        {"kind": "link", "operation": operation, "bytes": size}
        for operation in operations
        for size in sizes
    ]


# --- rounds ------------------------------------------------------------------------------


def in_rounds(
    setting: ProfileSetting,
    points: Sequence[Json],
    state: ProfileState,
    worker: Worker,
    *,
    progress: ProgressCallback | None = None,
    rounds: int = ROUNDS,
) -> list[Json]:
    """Results of all points, in order, with the median over the rounds of each time.

    A machine's speed changes within seconds: repeats of a point right after each other may all
    fall into one slow moment. Each round measures all points, in new processes. Long points, and
    points of some blocks or of each block, are measured once: these only divide times among
    blocks.

    Raises:
        InvalidInputError: a factory, the data or a block is wrong.
        UnfitEnvironmentError: the device cannot be used.
        RunFailedError: a process died; finished points stay in the state.
    """
    results_of: list[list[Json]] = []
    again = list(range(len(points)))
    for number in range(rounds):
        todo = [points[k] | ({"round": number} if number else {}) for k in again]
        shown = _shown(progress, number, rounds)
        with worker:
            results = measure_points(setting, todo, state, worker, progress=shown)
        if not number:
            results_of = [[result] for result in results]
            again = [k for k in again if _repeats(points[k], points, results[k])]
            continue
        for k, result in zip(again, results, strict=True):
            if "skipped" not in result:
                results_of[k].append(result)
    return [cast(Json, _median(rounds_of_point)) for rounds_of_point in results_of]


def _shown(progress: ProgressCallback | None, number: int, rounds: int) -> ProgressCallback | None:
    """The callback, told the number of the round too."""
    if progress is None or rounds == 1:
        return progress
    return lambda done, total, left_s, text: progress(
        done, total, left_s, f"{text} (round {number + 1} of {rounds})"
    )


def _repeats(point: Json, points: Sequence[Json], result: Json) -> bool:
    """Whether further rounds measure a point again."""
    if "skipped" in result or result.get("wall_s", 0.0) > _LONG_S:
        return False
    if point["kind"] != "module":
        return point["kind"] in ("loss", "link")
    same = (p for p in points if p["kind"] == "module" and p["module"] == point["module"])
    return point["blocks"] == max(p["blocks"] for p in same)


def _median(results_of: Sequence[Any]) -> Any:
    """The first result, its times replaced by the medians of all results."""
    first = results_of[0]
    if len(results_of) == 1 or not isinstance(first, dict):
        return first
    merged: Json = {}
    for key in cast(Json, first):
        values = [visit[key] for visit in results_of]
        if key in _TIMES:
            merged[key] = statistics.median(values)
        else:
            merged[key] = sum(values) if key == "repeats" else _median(values)
    return merged


# --- the profile of the results ----------------------------------------------------------------


def _assemble(
    workload: Workload,
    uses: Sequence[_Use],
    described: Mapping[str, Json],
    setting: ProfileSetting,
    measured: MeasuredPoints,
    cluster: Cluster | None,
) -> Profile:
    modules: dict[str, ModuleProfile] = {}
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    over_nodes = None
    if cluster is not None and cluster.tensor_parallel_nodes > 1:
        # Counts by torch, which is not loaded here otherwise.
        from mmplan.profiling.sums_between_nodes import SumsBetweenNodes

        over_nodes = SumsBetweenNodes(workload, setting.folder, cluster)
    for use in uses:
        profiled = _module_profile(use, described[use.module], measured)
        if over_nodes is not None:
            profiled = over_nodes.added(profiled, use.task, use.module)
        if use.first:
            modules[use.module] = profiled
        else:
            changed = task_difference(profiled, modules[use.module])
            tasks.setdefault(use.task, {})[use.module] = changed
    machine = next(result for point, result in measured if point["kind"] == "machine")
    return Profile(
        name=workload.name,
        source="measured",
        cluster=cluster or measured_cluster(setting.device, setting.processes, machine, measured),
        modules=modules,
        tasks=tasks,
        losses=dict(_loss_profiles(measured)),
        sequence_parallel=workload.train.sequence_parallel,
        provenance=_provenance(setting, machine, described, measured),
    )


def _module_profile(use: _Use, described: Json, measured: MeasuredPoints) -> ModuleProfile:
    own = [
        (p, r) for p, r in measured if (p.get("task"), p.get("module")) == (use.task, use.module)
    ]
    shape = next(result for point, result in own if point["kind"] == "shape")
    if "skipped" in shape:
        raise _unable(use.module, shape)
    blocks: list[Json] = shape["blocks"]
    work = _block_work(blocks)
    points = [
        _point(point, result, work)
        for point, result in own
        if point["kind"] == "module" and "skipped" not in result
    ]
    if not points:
        raise _unable(use.module, next(r for p, r in own if p["kind"] == "module"))
    outputs = [block["output_bytes"] for block in blocks]
    activations = [block["activation_bytes"] for block in blocks]
    return ModuleProfile(
        blocks=len(blocks),
        block_work=tuple(work),
        block_parameters=tuple(map(float, described["block_parameters"])),
        block_activation_bytes=tuple(activations) if any(activations) else None,
        block_boundary_bytes=tuple(outputs),
        tied_blocks=described.get("tied_blocks") or None,
        parameters=float(described["parameters"]),
        flops_per_sample=sum(block["flops"] for block in blocks),
        output_bytes_per_sample=outputs[-1],
        boundary_bytes_per_sample=max(outputs[:-1], default=outputs[-1]),
        points=tuple(points),
    )


def _unable(module: str, result: Json) -> RunFailedError:
    return RunFailedError(
        f"profiling: {module} could not be run at its smallest micro-batch: {result['skipped']}",
        hint="profile it with tensor parallelism (--nproc), on a larger device, or --analytic",
    )


def _block_work(blocks: Sequence[Json]) -> list[float]:
    """Seconds of each block; blocks of one kind get their mean, noisy times give way to FLOPs."""
    noise = sorted(block["spread_s"] / max(block["seconds"], 1e-12) for block in blocks)
    if noise[len(noise) // 2] > _NOISY and all(block["flops"] > 0 for block in blocks):
        return [float(block["flops"]) for block in blocks]
    times_of: dict[tuple[int, float], list[float]] = {}
    for block in blocks:
        times_of.setdefault((block["same_as"], block["flops"]), []).append(block["seconds"])
    means = {kind: math.fsum(times) / len(times) for kind, times in times_of.items()}
    return [means[block["same_as"], block["flops"]] for block in blocks]


# Fields of a point of a loss, and of a module, as the worker measures them.
_COSTS = ("forward_s", "backward_s", "activation_bytes")
_MEASURED = (*_COSTS, "forward_spread_s", "backward_spread_s", "repeats")


def _point(point: Json, result: Json, work: Sequence[float]) -> Point:
    num = point["blocks"]
    inputs = result["backward_input"]
    backward_input_s: float | None = None
    if inputs is not None:
        # The gradient may have ended after the first block: scale it to all of them.
        covered = math.fsum(work[inputs["first_block"] : num])
        scaled_s = inputs["seconds"] * math.fsum(work[:num]) / covered if covered else math.inf
        backward_input_s = min(scaled_s, result["backward_s"])
    return Point(
        **{key: point[key] for key in ("tp", "microbatch", "blocks")},
        **{key: result[key] for key in _MEASURED},
        backward_input_s=backward_input_s,
        # Points that an older version finished lack them.
        **result.get("passing", {}),
    )


def _loss_profiles(measured: MeasuredPoints) -> Iterator[tuple[str, LossProfile]]:
    losses = [(p, r) for p, r in measured if p["kind"] == "loss" and "skipped" not in r]
    for name in dict.fromkeys(point["loss"] for point, _ in losses):
        results = [(p, r) for p, r in losses if p["loss"] == name]
        points = tuple(
            LossPoint(
                samples=point["samples"],
                cut_bytes=result.get("cut_bytes"),
                **{key: result[key] for key in _COSTS},
            )
            for point, result in results
        )
        first = results[0][1]
        exchanged = first.get("exchanged_per_row")
        yield (
            name,
            LossProfile(
                sharded=first["sharded"],
                exchanged_per_row=exchanged,
                # Points that an older version finished lack these.
                others_only=first.get("others_only", True),
                trains=first.get("trains", True),
                points=points,
            ),
        )


# Fields of a device as the worker measures them; of communicators only GPUs have memory.
_DEVICE = (
    "memory_bytes",
    "peak_flops",
    "communicator_bytes",
    "communicator_start_s",
    "compute_slowdown",
)


def measured_cluster(
    device: str, per_node: int, machine: Json, measured: MeasuredPoints, *, nodes: int = 1
) -> Cluster:
    """The measured machines as a cluster.

    Args:
        device: "cpu" or "cuda".
        per_node: devices of a machine.
        machine: what was found of one device.
        measured: among others the links; those of several machines say between which.
        nodes: machines.
    """
    cpu = device == "cpu"
    links = [(p, r) for p, r in measured if p["kind"] == "link"]
    outside = _links([(p, r) for p, r in links if p.get("between") == "nodes"], nodes)
    inside = _links([(p, r) for p, r in links if p.get("between") != "nodes"], max(2, per_node))
    # Machines of one device have no links inside.
    inside = inside or outside
    assert inside is not None
    name = f"cpu-{machine['cores']}" if cpu else f"this-machine-{per_node}"
    return Cluster(
        name=name if nodes == 1 else f"{nodes}-nodes-of-{per_node}",
        nodes=nodes,
        devices_per_node=per_node,
        device=Device(
            name=machine["name"],
            type="cpu" if cpu else "cuda",
            **{field: machine[field] for field in _DEVICE if field in machine},
        ),
        links=Links(
            intra_node=inside[0],
            intra_node_collectives=inside[1],
            inter_node=outside and outside[0],
            inter_node_collectives=outside and outside[1],
        ),
    )


def _links(measured: MeasuredPoints, world: int) -> tuple[Link, CollectiveLinks | None] | None:
    """The link that messages take, and those of collectives of so many, as rings; None: no points.

    A lone GPU has copies alone.
    """
    if not measured:
        return None
    if any(point["operation"] == "copy" for point, _ in measured):
        return _link(measured, "copy", 1.0), None
    ring = {"all_reduce": 2 * (world - 1) / world, "all_gather": (world - 1) / world}
    collectives = {name: _link(measured, name, share) for name, share in ring.items()}
    return _link(measured, "p2p", 1.0), CollectiveLinks(**collectives)


def _link(measured: MeasuredPoints, operation: str, share: float) -> Link:
    """Latency and bandwidth through the sizes; ``share`` of the bytes crosses each link."""
    sizes = [(p["bytes"] * share, r["seconds"]) for p, r in measured if p["operation"] == operation]
    curve = fit_curve([b for b, _ in sizes], [s for _, s in sizes], knots_max=0)
    # Noise can hide the slope: then the largest transfer bounds the bandwidth.
    largest_bytes, largest_s = max(sizes)
    slope = curve.slopes[0] if curve.slopes[0] > 0 else largest_s / largest_bytes
    return Link(latency_s=curve.alpha, bandwidth_bytes_per_s=1.0 / slope)


def _provenance(
    setting: ProfileSetting, machine: Json, described: Mapping[str, Json], measured: MeasuredPoints
) -> dict[str, Any]:
    """Place, conditions and versions of the measurements, and the points left out."""
    oversubscribed = setting.device == "cpu" and setting.processes > machine["cores"]
    busy = "more processes than cores" if oversubscribed else "every process with a core of its own"
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": setting.device,
        "processor": machine["processor"],
        "cores": machine["cores"],
        "processes": setting.processes,
        "threads": machine["threads"],
        "conditions": f"all processes busy at the same time, {busy}",
        "precision": setting.workload["train"]["precision"],
        "torch": machine["torch"],
        "clock": machine["clock"],
        **({"sm_clock": machine["sm_clock"]} if "sm_clock" in machine else {}),
        "repeat_s": setting.repeat_s,
        "samples": setting.pool,
        "tp_left_out": {
            f"{name} tp {tp}": reason
            for name, module in described.items()
            for tp, reason in module["refused"].items()
        },
        "points_left_out": [
            {key: value for key, value in point.items() if key != "kind"} | result
            for point, result in measured
            if "skipped" in result
        ],
    }
