"""What is wrong inside a plan that is valid field by field (edited by hand, say)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mmplan.schema.plan import Plan, PlannedModule, Unit
from mmplan.schema.workload import parse_source


def plan_faults(plan: Plan) -> list[str]:
    """Every contradiction inside the plan, each one line that names the field."""
    return [fault for check in _CHECKS for fault in check(plan)]


def _names(plan: Plan) -> Iterator[str]:
    for name, count in Counter(unit.name for unit in plan.units).items():
        if count > 1:
            yield f"units: {count} units are called {name!r}"
    for unit in plan.units:
        if unit.task not in plan.tasks:
            yield f"units.{unit.name}.task: there is no task {unit.task!r}"
        elif unit.module not in plan.tasks[unit.task].modules:
            yield f"units.{unit.name}.module: task {unit.task} has no module {unit.module!r}"


def _grids(plan: Plan) -> Iterator[str]:
    for unit in plan.units:
        where = f"units.{unit.name}"
        shape = (unit.dp, unit.pp, unit.tp)
        if len(unit.ranks) != unit.dp:
            yield f"{where}.ranks: {len(unit.ranks)} replicas, dp is {unit.dp}"
        elif any(len(replica) != unit.pp for replica in unit.ranks):
            yield f"{where}.ranks: a replica has not pp = {unit.pp} stages: a stage is missing"
        elif any(len(stage) != unit.tp for replica in unit.ranks for stage in replica):
            yield f"{where}.ranks: the grid is not dp x pp x tp = {shape}"
        for rank, count in Counter(unit.all_ranks).items():
            if count > 1:
                yield f"{where}.ranks: rank {rank} stands {count} times in one unit"
            if rank >= plan.devices:
                yield f"{where}.ranks: rank {rank} of {plan.devices} devices"
    capacity = plan.cluster.num_devices
    if plan.devices > capacity:
        yield f"devices: {plan.devices}, the cluster has {capacity}"


def _samples(plan: Plan) -> Iterator[str]:
    for unit in plan.units:
        where = f"units.{unit.name}"
        task = plan.tasks.get(unit.task)
        if task is None:
            continue
        for field in ("samples", "microbatches"):
            if len(getattr(unit, field)) != unit.dp:
                yield f"{where}.{field}: {len(getattr(unit, field))} replicas, dp is {unit.dp}"
                return
        if sum(unit.samples) != task.batch:
            yield f"{where}.samples: add up to {sum(unit.samples)}, the batch is {task.batch}"
            continue
        round_samples = sum(map(sum, unit.microbatches))
        if not round_samples or task.batch % round_samples:
            yield (
                f"{where}.microbatches: a round of {round_samples} samples does not divide the "
                f"batch of {task.batch}"
            )
            continue
        rounds = task.batch // round_samples
        for d, sizes in enumerate(unit.microbatches):
            if sum(sizes) * rounds != unit.samples[d]:
                yield (
                    f"{where}.microbatches.{d}: {rounds} rounds of {sum(sizes)} samples, "
                    f"samples.{d} is {unit.samples[d]}"
                )


def _blocks(plan: Plan) -> Iterator[str]:
    for unit in plan.units:
        chunks = unit.pp * unit.vpp
        if len(unit.blocks) != chunks:
            yield f"units.{unit.name}.blocks: {len(unit.blocks)} chunks, pp x vpp is {chunks}"
    for name, task in plan.tasks.items():
        for module, planned in task.modules.items():
            units = [u for u in plan.units if (u.task, u.module) == (name, module)]
            yield from _coverage(f"task {name}, module {module}", units, planned.blocks)


def _ties(plan: Plan) -> Iterator[str]:
    """Ties are several blocks of the module; modules with one owner have the same ones."""
    first: dict[str, tuple[str, PlannedModule]] = {}
    for name, task in plan.tasks.items():
        for module, planned in task.modules.items():
            where = f"tasks.{name}.modules.{module}.ties"
            for i, tie in enumerate(planned.ties):
                if len(tie) < 2 or list(tie) != sorted(set(tie)) or tie[-1] >= planned.blocks:
                    yield (
                        f"{where}.{i}: {list(tie)} are not several of the blocks "
                        f"0..{planned.blocks - 1}, ascending"
                    )
            if len(set(planned.ties)) < len(planned.ties):
                yield f"{where}: blocks stand there twice"
            other, same = first.setdefault(planned.share or module, (where, planned))
            if set(same.ties) != set(planned.ties):
                yield f"{where}: the parameters are those of {other}, the ties are not"


def _zero(plan: Plan) -> Iterator[str]:
    """All units that use the same parameters cut them alike."""
    first: dict[str, Unit] = {}
    for unit in plan.units:
        task = plan.tasks.get(unit.task)
        if task is None or unit.module not in task.modules:
            continue
        other = first.setdefault(task.modules[unit.module].share or unit.module, unit)
        if plan.zero_of(other) != plan.zero_of(unit):
            yield (
                f"units.{unit.name}.zero: {plan.zero_of(unit)}, and {plan.zero_of(other)} of unit "
                f"{other.name}, which uses the same parameters"
            )


def _items(plan: Plan) -> Iterator[str]:
    """Items are shared out where the workload says that blocks treat them apart."""
    for unit in plan.units:
        task = plan.tasks.get(unit.task)
        module = task and task.modules.get(unit.module)
        if unit.items and module is not None and not module.items:
            yield f"units.{unit.name}.items: the blocks of {unit.module} may not treat items apart"


def _coverage(where: str, units: list[Unit], blocks: int) -> Iterator[str]:
    """Chunks in pipeline order must tile [0, blocks)."""
    if not units:
        yield f"{where}: no unit runs it"
        return
    position = 0
    for start, end in sorted((a, b) for unit in units for a, b in unit.blocks):
        if start != position or end <= start:
            yield (
                f"{where}: blocks [{start}, {end}) come after block {position}: a stage is "
                "missing, doubled or empty"
            )
            return
        position = end
    if position != blocks:
        yield f"{where}: its units run {position} of {blocks} blocks: a stage is missing"


def _losses(plan: Plan) -> Iterator[str]:
    placed = Counter((loss.task, loss.name) for loss in plan.losses)
    for name, task in plan.tasks.items():
        for loss, planned in task.losses.items():
            if placed[name, loss] != 1:
                yield f"losses: {loss} of task {name} stands there {placed[name, loss]} times"
            if planned.sync_batch and task.batch % planned.sync_batch:
                yield (
                    f"tasks.{name}.losses.{loss}.sync_batch: {planned.sync_batch} does not divide "
                    f"the batch of {task.batch}"
                )
            if not any(parse_source(text, task.modules).module for text in planned.inputs):
                yield f"tasks.{name}.losses.{loss}.inputs: names no module of the task"
    for loss in plan.losses:
        if loss.task not in plan.tasks or loss.name not in plan.tasks[loss.task].losses:
            yield f"losses: there is no loss {loss.name!r} in task {loss.task!r}"


def _waves(plan: Plan) -> Iterator[str]:
    """Where there are waves, each unit is one slice, in one of them."""
    slices = [item for wave in plan.waves for item in wave.slices]
    units = {unit.name: unit for unit in plan.units}
    for name, count in Counter(item.unit for item in slices).items():
        if name not in units:
            yield f"waves: there is no unit {name!r}"
        elif count > 1:
            yield f"waves: unit {name} stands there {count} times"
    for item in slices:
        unit = units.get(item.unit)
        if unit is None:
            continue
        where = f"waves, unit {item.unit}"
        if (item.blocks,) != unit.blocks:
            yield f"{where}: blocks {list(item.blocks)}, the unit runs {[*map(list, unit.blocks)]}"
        if item.ranks != unit.all_ranks or item.devices != len(item.ranks):
            yield (
                f"{where}: {item.devices} devices, ranks {list(item.ranks)}; the unit's are "
                f"{list(unit.all_ranks)}"
            )


def _in_turn(plan: Plan) -> Iterator[str]:
    """Tasks in turn are tasks of the plan, once each; waves have an order of their own."""
    for name, count in Counter(plan.in_turn).items():
        if name not in plan.tasks:
            yield f"in_turn: there is no task {name!r}"
        elif count > 1:
            yield f"in_turn: task {name} stands there {count} times"
    in_waves = {item.unit for wave in plan.waves for item in wave.slices}
    for unit in plan.units:
        if unit.task in plan.in_turn and unit.name in in_waves:
            yield f"in_turn: task {unit.task} has slices in waves, which have an order of their own"
            return


def _order(plan: Plan) -> Iterator[str]:
    """Nominal times are of all units or of none, and of all their chunks; sums are of modules."""
    times, sums = (plan.order.times, plan.order.sums) if plan.order else ({}, {})
    names = [unit.name for unit in plan.units]
    modules = (pair for task in plan.tasks.values() for pair in task.modules.items())
    owners = {module.share or name for name, module in modules}
    for name in sums:
        if name not in owners:
            yield f"order.sums: no task has parameters of module {name!r}"
    for name in times:
        if name not in names:
            yield f"order.times: there is no unit {name!r}"
    for unit in plan.units if times else ():
        given, chunks = len(times.get(unit.name, ())), len(unit.blocks)
        if given != chunks:
            yield f"order.times.{unit.name}: times of {given} chunks, the unit has {chunks}"


_CHECKS = (
    _names,
    _grids,
    _samples,
    _blocks,
    _ties,
    _zero,
    _items,
    _losses,
    _waves,
    _in_turn,
    _order,
)
