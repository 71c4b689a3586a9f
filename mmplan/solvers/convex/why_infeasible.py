"""Why no disaggregated pipeline fits, and how much more would do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mmplan.errors import InfeasibleError
from mmplan.solvers.convex.backbone_groups import Pipelines
from mmplan.solvers.convex.branch_and_bound import FormulaPlan, best_plans
from mmplan.solvers.convex.module_tables import ModuleTables
from mmplan.solvers.problem import Problem
from mmplan.wording import counted, size

# Nothing that is still infeasible with so many times the devices or bytes is a matter of them.
MOST_DOUBLINGS = 12
# Bytes are found to this part of what a device has.
PRECISION = 1 / 256


def explain(problem: Problem) -> InfeasibleError:
    """The tightest constraint, and the devices or bytes that are missing."""
    pipelines = Pipelines(problem)
    for own in pipelines.tables:
        if own.empty:
            return _no_degrees(problem, own)
    if len(pipelines.modules) > problem.devices:
        missing = len(pipelines.modules) - problem.devices
        return InfeasibleError(
            f"convex gives each of {len(pipelines.modules)} modules devices of its own, there "
            f"are {problem.devices}: {missing} missing",
            hint=f"give it {counted(missing, 'more device')}, or use --solver auto, which may "
            "share them",
        )
    devices = _least(problem.devices, lambda n: _any_plan(_with_devices(problem, n)))
    memory = _least_memory(problem)
    if devices is None and memory is None:
        return _no_degrees(problem, None)
    return _missing(problem, devices, memory)


def _missing(problem: Problem, devices: int | None, memory: float | None) -> InfeasibleError:
    have = problem.memory_bytes
    ways: list[str] = []
    if devices is not None:
        ways.append(counted(devices - problem.devices, "more device"))
    if memory is not None:
        ways.append(f"{_rounded_up(memory - have)} more on each device")
    modules = ", ".join(problem.task.modules)
    if memory is None:
        listed = _listed(_with_devices(problem, devices or problem.devices))
        return InfeasibleError(
            f"devices are the tightest constraint: a pipeline of {modules} takes at least "
            f"{devices} ({listed}), there are {problem.devices}",
            hint=f"give it {ways[0]}, or use --solver auto, which may share them",
        )
    fullest, needed = _fullest(problem)
    if needed > have:
        reason = (
            f"module {fullest} needs {_rounded_up(needed)} on a device at best, a device "
            f"has {size(have)}"
        )
    else:
        listed = "" if devices is None else f" ({_listed(_with_devices(problem, devices))})"
        reason = (
            f"with {size(have)} on a device, a pipeline of {modules} takes "
            f"{counted(devices, 'device') if devices else 'more than any number of devices'}"
            f"{listed}, there are {problem.devices}"
        )
    return InfeasibleError(
        f"memory is the tightest constraint: {reason}",
        hint=f"give it {' or '.join(ways)}, recompute: full for {fullest}, or zero: 1",
    )


def _rounded_up(num_bytes: float) -> str:
    """Three digits that are enough."""
    digits = 10 ** max(0, math.floor(math.log10(max(num_bytes, 1.0))) - 2)
    return size(math.ceil(num_bytes / digits) * digits)


def _no_degrees(problem: Problem, own: ModuleTables | None) -> InfeasibleError:
    if own is None:
        return InfeasibleError(
            f"no degrees that the modules' plans allow fit a batch of {problem.task.batch} on "
            f"{counted(problem.devices, 'device')}, whatever their memory",
            hint="loosen dp, pp, vpp or microbatch in the modules' plan",
        )
    degrees = problem.costs.tp_options(task=problem.task.name, module=own.module)
    return InfeasibleError(
        f"module {own.module}: no tp, pp and vpp fit its plan ({own.pins}), the profile's tp "
        f"{', '.join(map(str, degrees))} and {counted(problem.devices, 'device')}",
        hint=f"loosen modules.{own.module}.plan, or profile it at another tp",
    )


def _any_plan(problem: Problem) -> bool:
    return bool(_plan(problem)[1])


def _plan(problem: Problem) -> tuple[Pipelines, list[FormulaPlan]]:
    pipelines = Pipelines(problem)
    found = best_plans(pipelines.groups(), pipelines.edges, devices=problem.devices, any_plan=True)
    return pipelines, found


def _listed(problem: Problem) -> str:
    pipelines, found = _plan(problem)
    frame = pipelines.frames[found[0].group]
    counts = [
        f"{module} {pipelines.table(k, frame).options.devices[found[0].choice[k]]}"
        for k, module in enumerate(pipelines.modules)
    ]
    return ", ".join(counts)


def _fullest(problem: Problem) -> tuple[str, float]:
    """The module that needs most bytes on a device, with all devices to itself."""
    pipelines = Pipelines(problem)
    after = pipelines.depths_after()
    one = np.ones(1, dtype=np.int64)
    needed: dict[str, float] = {}
    for k, own in enumerate(pipelines.tables):
        many = np.array([max(1, problem.devices)], dtype=np.int64)
        needed[own.module] = min(
            float(own.needed_bytes(dp, one, problem.task.batch, after[k]).min())
            for dp in (one, many)
        )
    fullest = max(needed, key=lambda module: needed[module])
    return fullest, needed[fullest]


def _with_devices(problem: Problem, devices: int) -> Problem:
    cluster = problem.request.cluster
    if cluster.device.is_cpu:
        cluster = cluster.model_copy(update={"nodes": 1, "devices_per_node": devices})
    else:
        nodes = -(-devices // cluster.devices_per_node)
        cluster = cluster.model_copy(update={"nodes": nodes})
    return Problem(
        request=replace(problem.request, devices=devices, cluster=cluster), task=problem.task
    )


def _with_memory(problem: Problem, memory_bytes: float) -> Problem:
    cluster = problem.request.cluster
    device = cluster.device.model_copy(update={"memory_bytes": memory_bytes})
    changed = cluster.model_copy(update={"device": device})
    return Problem(request=replace(problem.request, cluster=changed), task=problem.task)


def _least_memory(problem: Problem) -> float | None:
    unit = problem.memory_bytes * PRECISION
    steps = round(1 / PRECISION)
    found = _least(steps, lambda n: _any_plan(_with_memory(problem, n * unit)))
    return None if found is None else found * unit


def _least(have: int, enough: Callable[[int], bool]) -> int | None:
    """The least number above ``have`` that is enough, None where doubling does not find one."""
    low, high = have, 2 * have
    for _ in range(MOST_DOUBLINGS):
        if enough(high):
            break
        low, high = high, 2 * high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
