"""Mutants of plan files: one field edited by hand, then compiled.

Each is judged against the workload that the plan was made for.
"""

from __future__ import annotations

import random
from typing import Any

from mmplan.schema.plan import Plan, PlannedLoss, PlannedModule, PlannedTask, Unit
from tests.mutants import mutator, one_of


def _copied(item: Any, **changes: Any) -> Any:
    return item.model_copy(update=changes)


def _with_task(plan: Plan, name: str, **changes: Any) -> Plan:
    return _copied(plan, tasks={**plan.tasks, name: _copied(plan.tasks[name], **changes)})


def _with_module(plan: Plan, task: str, name: str, **changes: Any) -> Plan:
    modules = plan.tasks[task].modules
    return _with_task(plan, task, modules={**modules, name: _copied(modules[name], **changes)})


def _with_loss(plan: Plan, task: str, name: str, **changes: Any) -> Plan:
    losses = plan.tasks[task].losses
    return _with_task(plan, task, losses={**losses, name: _copied(losses[name], **changes)})


def _with_unit(plan: Plan, unit: Unit, **changes: Any) -> Plan:
    units = tuple(_copied(u, **changes) if u is unit else u for u in plan.units)
    return _copied(plan, units=units)


def _modules(plan: Plan) -> list[tuple[str, str, PlannedModule]]:
    return [(t, m, x) for t, task in plan.tasks.items() for m, x in task.modules.items()]


def _losses(plan: Plan) -> list[tuple[str, str, PlannedLoss]]:
    return [(t, m, x) for t, task in plan.tasks.items() for m, x in task.losses.items()]


def _known(task: PlannedTask) -> list[str]:
    """Fields and modules that a task's inputs name, or could."""
    named = {i for x in (*task.modules.values(), *task.losses.values()) for i in x.inputs if i}
    return sorted(named | set(task.modules))


# --- what is trained ---------------------------------------------------------------------


@mutator("plan")
def plan_freezes_a_module(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if m[2].frozen is not True])
    return _with_module(plan, found[0], found[1], frozen=True) if found else None


@mutator("plan")
def plan_freezes_a_block(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if m[2].frozen is False])
    if found is None:
        return None
    block = rng.randrange(found[2].blocks)
    return _with_module(plan, found[0], found[1], frozen=((block, block + 1),))


@mutator("plan")
def plan_trains_a_frozen_module(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if m[2].frozen is not False])
    return _with_module(plan, found[0], found[1], frozen=False) if found else None


@mutator("plan")
def plan_freezes_other_blocks(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if not isinstance(m[2].frozen, bool)])
    if found is None:
        return None
    frozen: Any = found[2].frozen
    moved = tuple((a + 1, min(b + 1, found[2].blocks)) for a, b in frozen)
    moved = tuple((a, b) for a, b in moved if a < b)
    return _with_module(plan, found[0], found[1], frozen=moved or True)


@mutator("plan")
def plan_writes_frozen_blocks_one_by_one(plan: Plan, rng: random.Random) -> Plan | None:
    """The same blocks in other ranges: not another training."""
    found = one_of(rng, [m for m in _modules(plan) if m[2].frozen is not False])
    if found is None:
        return None
    frozen: Any = found[2].frozen
    blocks = range(found[2].blocks) if frozen is True else [b for s in frozen for b in range(*s)]
    spans = tuple((b, b + 1) for b in blocks)
    return _with_module(plan, found[0], found[1], frozen=spans) if spans != frozen else None


@mutator("plan")
def plan_weighs_a_loss_otherwise(plan: Plan, rng: random.Random) -> Plan:
    task, name, loss = rng.choice(_losses(plan))
    return _with_loss(plan, task, name, weight=loss.weight * rng.choice([3.0, 0.5, -1.0, 1.001]))


@mutator("plan")
def plan_weighs_a_task_otherwise(plan: Plan, rng: random.Random) -> Plan:
    name = rng.choice(list(plan.tasks))
    return _with_task(plan, name, weight=plan.tasks[name].weight * rng.choice([3.0, 0.5]))


@mutator("plan")
def plan_swaps_the_inputs_of_a_module(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if len(m[2].inputs) > 1])
    if found is None:
        return None
    return _with_module(plan, found[0], found[1], inputs=found[2].inputs[::-1])


@mutator("plan")
def plan_drops_an_input_of_a_module(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if len(m[2].inputs) > 1])
    if found is None:
        return None
    inputs = list(found[2].inputs)
    del inputs[rng.randrange(len(inputs))]
    return _with_module(plan, found[0], found[1], inputs=tuple(inputs))


@mutator("plan")
def plan_adds_an_input_to_a_module(plan: Plan, rng: random.Random) -> Plan | None:
    task, name, module = rng.choice(_modules(plan))
    other = one_of(rng, [n for n in _known(plan.tasks[task]) if n != name])
    return _with_module(plan, task, name, inputs=(*module.inputs, other))


@mutator("plan")
def plan_gives_a_module_another_input(plan: Plan, rng: random.Random) -> Plan | None:
    task, name, module = rng.choice(_modules(plan))
    inputs = list(module.inputs)
    n = rng.randrange(len(inputs))
    other = one_of(rng, [x for x in _known(plan.tasks[task]) if x not in (name, inputs[n])])
    if other is None:
        return None
    inputs[n] = other
    return _with_module(plan, task, name, inputs=tuple(inputs))


@mutator("plan")
def plan_gives_a_module_null(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if len(m[2].inputs) > 1])
    if found is None:
        return None
    inputs = list(found[2].inputs)
    inputs[rng.randrange(len(inputs))] = None
    inputs = tuple(inputs)
    return (
        _with_module(plan, found[0], found[1], inputs=inputs) if inputs != found[2].inputs else None
    )


@mutator("plan")
def plan_names_another_element(plan: Plan, rng: random.Random) -> Plan | None:
    found = [
        (t, m, x, n)
        for t, m, x in (*_modules(plan), *_losses(plan))
        for n, text in enumerate(x.inputs)
        if text is not None and text[-2:] in (".0", ".1")
    ]
    pick = one_of(rng, found)
    if pick is None:
        return None
    task, name, item, n = pick
    inputs: list[Any] = list(item.inputs)
    inputs[n] = inputs[n][:-1] + ("1" if inputs[n][-1] == "0" else "0")
    change = _with_module if isinstance(item, PlannedModule) else _with_loss
    return change(plan, task, name, inputs=tuple(inputs))


@mutator("plan")
def plan_swaps_the_inputs_of_a_loss(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [x for x in _losses(plan) if len(x[2].inputs) > 1])
    if found is None:
        return None
    return _with_loss(plan, found[0], found[1], inputs=found[2].inputs[::-1])


@mutator("plan")
def plan_gives_a_loss_one_input_twice(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [x for x in _losses(plan) if x[2].sync_batch and len(x[2].inputs) > 1])
    if found is None:
        return None
    inputs = (found[2].inputs[0], found[2].inputs[0], *found[2].inputs[2:])
    return _with_loss(plan, found[0], found[1], inputs=inputs)


@mutator("plan")
def plan_gives_a_loss_another_input(plan: Plan, rng: random.Random) -> Plan | None:
    task, name, loss = rng.choice(_losses(plan))
    inputs = list(loss.inputs)
    n = rng.randrange(len(inputs))
    other = one_of(rng, [x for x in _known(plan.tasks[task]) if x != inputs[n]])
    if other is None:
        return None
    inputs[n] = other
    return _with_loss(plan, task, name, inputs=tuple(inputs))


@mutator("plan")
def plan_halves_a_sync_batch(plan: Plan, rng: random.Random) -> Plan | None:
    """And each unit's rounds are of as many samples as before."""
    found = one_of(rng, [x for x in _losses(plan) if (x[2].sync_batch or 1) % 2 == 0])
    if found is None or found[2].sync_batch is None:
        return None
    return _with_loss(plan, found[0], found[1], sync_batch=found[2].sync_batch // 2)


@mutator("plan")
def plan_makes_a_loss_per_sample(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [x for x in _losses(plan) if x[2].sync_batch])
    return _with_loss(plan, found[0], found[1], sync_batch=None) if found else None


@mutator("plan")
def plan_makes_a_loss_cross_sample(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [x for x in _losses(plan) if x[2].sync_batch is None])
    if found is None:
        return None
    return _with_loss(plan, found[0], found[1], sync_batch=plan.tasks[found[0]].batch)


@mutator("plan")
def plan_halves_the_batch(plan: Plan, rng: random.Random) -> Plan | None:
    """Of a task and of its units' rounds, consistently."""
    name = rng.choice(list(plan.tasks))
    task = plan.tasks[name]
    units = tuple(
        _copied(u, samples=tuple(s // 2 for s in u.samples)) if u.task == name else u
        for u in plan.units
    )
    if any(s % 2 for u in plan.units if u.task == name for s in u.samples):
        return None
    return _copied(_with_task(plan, name, batch=task.batch // 2), units=units)


@mutator("plan")
def plan_forgets_to_share(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if m[2].share])
    return _with_module(plan, found[0], found[1], share=None) if found else None


@mutator("plan")
def plan_forgets_a_tie(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if m[2].ties])
    return _with_module(plan, found[0], found[1], ties=()) if found else None


@mutator("plan")
def plan_ties_other_blocks(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [m for m in _modules(plan) if m[2].blocks > 1 and m[2].ties != ((0, 1),)])
    return _with_module(plan, found[0], found[1], ties=((0, 1),)) if found else None


@mutator("plan")
def plan_shares_two_modules(plan: Plan, rng: random.Random) -> Plan | None:
    pairs = [
        (a, b)
        for a in _modules(plan)
        for b in _modules(plan)
        if a[1] != b[1] and not a[2].share and not b[2].share and a[2].blocks == b[2].blocks
    ]
    pair = one_of(rng, pairs)
    return _with_module(plan, pair[0][0], pair[0][1], share=pair[1][1]) if pair else None


@mutator("plan")
def plan_forgets_a_loss(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [t for t, task in plan.tasks.items() if len(task.losses) > 1])
    if found is None:
        return None
    lost = rng.choice(list(plan.tasks[found].losses))
    losses = {n: x for n, x in plan.tasks[found].losses.items() if n != lost}
    placed = tuple(x for x in plan.losses if (x.task, x.name) != (found, lost))
    return _copied(_with_task(plan, found, losses=losses), losses=placed)


@mutator("plan")
def plan_forgets_a_block(plan: Plan, rng: random.Random) -> Plan | None:
    """The module's number of blocks and its last chunk are one less."""
    found = [
        (u, plan.tasks[u.task].modules[u.module])
        for u in plan.units
        if u.blocks[-1][1] == plan.tasks[u.task].modules[u.module].blocks
        and u.blocks[-1][1] - u.blocks[-1][0] > 1
    ]
    pick = one_of(rng, found)
    if pick is None:
        return None
    unit, module = pick
    low, high = unit.blocks[-1]
    changed = _with_unit(plan, unit, blocks=(*unit.blocks[:-1], (low, high - 1)))
    return _with_module(changed, unit.task, unit.module, blocks=module.blocks - 1)


@mutator("plan")
def plan_says_a_module_has_a_block_more(plan: Plan, rng: random.Random) -> Plan:
    unit = rng.choice(plan.units)
    module = plan.tasks[unit.task].modules[unit.module]
    low, high = unit.blocks[-1]
    changed = _with_unit(plan, unit, blocks=(*unit.blocks[:-1], (low, high + 1)))
    return _with_module(changed, unit.task, unit.module, blocks=module.blocks + 1)


# --- where it is trained: contradictions ----------------------------------------------------


@mutator("plan")
def plan_leaves_a_gap_between_blocks(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [u for u in plan.units if len(u.blocks) > 1])
    if found is None:
        return None
    cut = rng.randrange(1, len(found.blocks))
    low, high = found.blocks[cut]
    blocks = (*found.blocks[:cut], (low + 1, max(high, low + 2)), *found.blocks[cut + 1 :])
    return _with_unit(plan, found, blocks=blocks)


@mutator("plan")
def plan_swaps_two_chunks(plan: Plan, rng: random.Random) -> Plan | None:
    found = one_of(rng, [u for u in plan.units if len(u.blocks) > 1])
    if found is None:
        return None
    return _with_unit(plan, found, blocks=(*found.blocks[1:], found.blocks[0]))


@mutator("plan")
def plan_forgets_a_unit(plan: Plan, rng: random.Random) -> Plan | None:
    lost = rng.randrange(len(plan.units))
    units = tuple(u for n, u in enumerate(plan.units) if n != lost)
    return _copied(plan, units=units) if units else None


@mutator("plan")
def plan_gives_a_unit_another_module(plan: Plan, rng: random.Random) -> Plan | None:
    unit = rng.choice(plan.units)
    modules = [m for m in plan.tasks[unit.task].modules if m != unit.module]
    other = one_of(rng, modules)
    return None if other is None else _with_unit(plan, unit, module=other)


@mutator("plan")
def plan_places_a_loss_elsewhere(plan: Plan, rng: random.Random) -> Plan | None:
    loss = rng.choice(plan.losses)
    ranks = tuple(sorted({(r + 1) % plan.devices for r in loss.ranks}))
    if ranks == loss.ranks:
        return None
    return _copied(
        plan, losses=tuple(_copied(x, ranks=ranks) if x is loss else x for x in plan.losses)
    )


@mutator("plan")
def plan_gives_a_replica_a_sample_less(plan: Plan, rng: random.Random) -> Plan | None:
    unit = rng.choice(plan.units)
    d = rng.randrange(unit.dp)
    sizes = [list(row) for row in unit.microbatches]
    sizes[d][0] -= 1
    if not sizes[d][0]:
        return None
    return _with_unit(plan, unit, microbatches=tuple(map(tuple, sizes)))


# --- what a plan may be ------------------------------------------------------------------


@mutator("plan")
def plan_moves_a_sample_between_replicas(plan: Plan, rng: random.Random) -> Plan | None:
    """Other shares of the same batch."""
    unit = one_of(rng, [u for u in plan.units if u.dp > 1])
    if unit is None:
        return None
    a, b = rng.sample(range(unit.dp), 2)
    sizes = [list(row) for row in unit.microbatches]
    rounds = unit.samples[a] // sum(sizes[a])
    if sizes[a][-1] < 2:
        return None
    sizes[a][-1] -= 1
    sizes[b][-1] += 1
    samples = list(unit.samples)
    samples[a] -= rounds
    samples[b] += rounds
    return _with_unit(plan, unit, microbatches=tuple(map(tuple, sizes)), samples=tuple(samples))


@mutator("plan")
def plan_cuts_a_micro_batch_in_two(plan: Plan, rng: random.Random) -> Plan | None:
    unit = rng.choice(plan.units)
    d = rng.randrange(unit.dp)
    sizes = [list(row) for row in unit.microbatches]
    if sizes[d][0] < 2:
        return None
    sizes[d][:1] = [1, sizes[d][0] - 1]
    return _with_unit(plan, unit, microbatches=tuple(map(tuple, sizes)))


@mutator("plan")
def plan_moves_a_cut(plan: Plan, rng: random.Random) -> Plan | None:
    found = [
        (u, n)
        for u in plan.units
        for n in range(len(u.blocks) - 1)
        if u.blocks[n][1] - u.blocks[n][0] > 1
    ]
    pick = one_of(rng, found)
    if pick is None:
        return None
    unit, n = pick
    blocks = list(unit.blocks)
    middle = blocks[n][1] - 1
    blocks[n], blocks[n + 1] = (blocks[n][0], middle), (middle, blocks[n + 1][1])
    return _with_unit(plan, unit, blocks=tuple(blocks))


@mutator("plan")
def plan_swaps_two_replicas(plan: Plan, rng: random.Random) -> Plan | None:
    unit = one_of(rng, [u for u in plan.units if u.dp > 1])
    return _with_unit(plan, unit, ranks=unit.ranks[::-1]) if unit else None


@mutator("plan")
def plan_swaps_two_stages(plan: Plan, rng: random.Random) -> Plan | None:
    """The first and the last stage's ranks of one replica."""
    unit = one_of(rng, [u for u in plan.units if u.pp > 1])
    if unit is None:
        return None
    ranks = list(unit.ranks)
    d = rng.randrange(len(ranks))
    ranks[d] = ranks[d][::-1]
    return _with_unit(plan, unit, ranks=tuple(ranks))


@mutator("plan")
def plan_has_another_schedule(plan: Plan, rng: random.Random) -> Plan | None:
    unit = rng.choice(plan.units)
    kinds = [k for k in ("gpipe", "1f1b", "batch-sync") if k != unit.schedule.kind]
    if unit.vpp > 1 or unit.schedule.kind not in ("gpipe", "1f1b", "batch-sync"):
        return None
    return _with_unit(plan, unit, schedule=_copied(unit.schedule, kind=rng.choice(kinds)))


@mutator("plan")
def plan_has_another_lead(plan: Plan, rng: random.Random) -> Plan:
    unit = rng.choice(plan.units)
    lead = rng.choice([x for x in (0, 1, 2) if x != unit.schedule.lead])
    return _with_unit(plan, unit, schedule=_copied(unit.schedule, lead=lead))


@mutator("plan")
def plan_splits_backwards(plan: Plan, rng: random.Random) -> Plan:
    unit = rng.choice(plan.units)
    schedule = _copied(unit.schedule, split_backward=not unit.schedule.split_backward)
    return _with_unit(plan, unit, schedule=schedule)


@mutator("plan")
def plan_shards_the_optimizer(plan: Plan, rng: random.Random) -> Plan:
    del rng
    return _copied(plan, training=_copied(plan.training, zero=1 - plan.training.zero))


@mutator("plan")
def plan_predicts_something_else(plan: Plan, rng: random.Random) -> Plan:
    del rng
    return _copied(plan, predicted=_copied(plan.predicted, iteration_s=1.0), name="renamed")


@mutator("plan")
def plan_lists_its_units_in_another_order(plan: Plan, rng: random.Random) -> Plan | None:
    if len(plan.units) < 2:
        return None
    return _copied(plan, units=tuple(rng.sample(plan.units, len(plan.units))))


@mutator("plan")
def plan_renames_a_unit(plan: Plan, rng: random.Random) -> Plan | None:
    unit = rng.choice(plan.units)
    return None if plan.waves else _with_unit(plan, unit, name=f"{unit.name}.x")
