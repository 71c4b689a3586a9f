"""The measurements of one process of a job, one function for each kind of point."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import nn

from mmlaunch.comm.batches import Tree, leaf_of, map_tensors, tensors_of
from mmlaunch.measure.clocks import Clock, Reading, clock_of
from mmlaunch.measure.inputs import (
    Inputs,
    block_flops,
    checked_block,
    checked_loss,
    compute_shard,
    float_outputs,
)
from mmlaunch.measure.machine import (
    NoComm,
    measure_link,
    measure_machine,
    tensor_parallel_groups,
)
from mmlaunch.measure.memory import kept_bytes, transient_bytes
from mmlaunch.measure.sample_work import WorkSampler
from mmlaunch.measure.timing import HeldTensors, Peers, Stopwatch, Timing
from mmlaunch.model.precision import TrainingPrecision
from mmlaunch.model.tensor_parallel import (
    GroupSums,
    Shards,
    block_plan,
    check_tied_alike,
    group_name,
    shard_block,
    sum_gradients,
    sums_of,
)
from mmlaunch.model.whole_modules import call_blocks
from mmlaunch.process.device import set_numerics
from mmplan.errors import InvalidInputError
from mmplan.processes import num_cores
from mmplan.proof.row_cuts import RowCuts, RowFlow
from mmplan.proof.tp_states import TPStates, module_states
from mmplan.ragged import Ragged
from mmplan.schema.base import Json
from mmplan.schema.factories import build_loss, build_module, tied_blocks
from mmplan.schema.fingerprints import built_parts
from mmplan.schema.protocols import (
    as_sharded,
    as_vocabulary_loss,
    exchanged_per_row,
    others_only,
    trains,
)
from mmplan.schema.workload import Workload, resolve_tasks, takes_own_logits

# Two samples: some modules squeeze a batch of one away.
_FOLLOWED_SAMPLES = 2


class Measurer:
    """Measures points one after another; all processes are given the same ones.

    Args:
        job: see :mod:`mmlaunch.measure`.
        rank: this process.
        device: where it computes.
    """

    def __init__(self, job: Json, *, rank: int, device: torch.device) -> None:
        self._rank, self._device, self._job = rank, device, job
        self._workload = Workload.model_validate(job["workload"])
        self._folder = Path(job["folder"])
        train = self._workload.train
        set_numerics(deterministic=train.deterministic, tf32=train.tf32, device=device)
        self._takes_part = rank < job["processes"]
        is_alone = job["processes"] <= num_cores() and torch.get_num_threads() == 1
        self._watch = Stopwatch(
            clock=clock_of(device, is_alone=is_alone),
            peers=Peers(job["processes"], device),
            repeat_s=job["repeat_s"],
        )
        self._groups = tensor_parallel_groups(job["processes"], rank)
        self._inputs = Inputs(self._workload, self._folder, device, pool=job["pool"])
        self._built: tuple[tuple[str, int], nn.Sequential] | None = None
        self._states: dict[tuple[str, int], list[TPStates]] = {}
        # Blocks of the last one built whose rows are cut, and the group that shares them out.
        self._cuts: dict[nn.Module, RowCuts] = {}
        self._row_group = ""
        # Measured seconds per sample, to foresee points that would take too long.
        self._seconds: dict[tuple[Any, ...], float] = {}
        self._kinds: dict[str, Callable[[Json], Json]] = {
            "machine": self._machine,
            "fingerprints": self._fingerprints,
            "describe": self._describe,
            "shape": self._shape,
            "module": self._module,
            "loss": self._loss,
            "work": WorkSampler(self._workload, self._folder).work,
        }

    def measure(self, point: Json) -> Json:
        """One point's result; ``{"skipped": reason}`` for one that this device cannot do."""
        if point["kind"] == "link":
            timing = measure_link(
                point["operation"],
                point["bytes"],
                device=self._device,
                repeat_s=self._job["repeat_s"],
            )
            return {
                "seconds": timing.median_s,
                "spread_s": timing.spread_s,
                "repeats": timing.repeats,
            }
        if not self._takes_part:
            return {}
        try:
            return self._kinds[point["kind"]](point)
        except torch.OutOfMemoryError:
            self._built = None
            torch.cuda.empty_cache()
            return {"skipped": "out of memory"}

    def _autocast(self) -> AbstractContextManager[Any]:
        precision = TrainingPrecision(self._workload.train, self._device)
        return precision.compute(keep_casts=True)

    def _machine(self, _: Json) -> Json:
        return measure_machine(
            device=self._device,
            processes=self._job["processes"],
            precision=self._workload.train.precision,
            watch=self._watch,
        )

    # --- modules -----------------------------------------------------------------------

    def _fingerprints(self, _: Json) -> Json:
        """What the factories of all modules and losses build."""
        built = built_parts(self._workload, self._folder)
        return {
            name: part.model_dump(mode="json", exclude_none=True) for name, part in built.items()
        }

    def _describe(self, point: Json) -> Json:
        """A module's sizes, from its shapes alone."""
        name = point["module"]
        module = self._build_shapes(name)
        degrees: list[int] = [1]
        refused: Json = {}
        for tp in point["tps"]:
            obstacle = self._tp_obstacle(name, tp)
            if obstacle is None:
                degrees.append(tp)
            else:
                refused[str(tp)] = obstacle
        owned = [sum(p.numel() for p in own) for own in _parameters_by_block(module)]
        return {
            "blocks": len(module),
            "parameters": sum(owned),
            "block_parameters": owned,
            "tied_blocks": tied_blocks(module),
            "tps": degrees,
            "refused": refused,
        }

    def _build_shapes(self, name: str) -> nn.Sequential:
        try:
            return build_module(self._workload, name, self._folder, device="meta")
        except InvalidInputError:
            # A factory that computes with its values cannot be built without them.
            return build_module(self._workload, name, self._folder)

    def _tp_obstacle(self, name: str, tp: int) -> str | None:
        """Why a module is not measured at this degree; None when it can be."""
        module = self._build_shapes(name)
        try:
            plans = [block_plan(b, where=f"{name}.{i}") for i, b in enumerate(module)]
            if not any(plans):
                return "no block has a tp_plan"
            check_tied_alike(module, name)
            for index, block in enumerate(module):
                where = f"{name}.{index}"
                shard_block(block, index=0, count=tp, comm=NoComm(), where=where)
            self._followed(name, tp)
        except InvalidInputError as error:
            return error.message
        return None

    def _followed(self, name: str, tp: int) -> list[TPStates]:
        """What a group does with each block; nothing at tp 1.

        Raises:
            InvalidInputError: a block would compute something else at this degree.
        """
        if tp == 1:
            return []
        if (name, tp) not in self._states:
            task = next(t.name for t in resolve_tasks(self._workload).values() if name in t.inputs)
            inputs = self._inputs.of_module(task, name, _FOLLOWED_SAMPLES)
            rows = self._workload.train.sequence_parallel
            module = self._build_shapes(name)
            self._states[name, tp] = module_states(
                module,
                inputs,
                tp,
                where=name,
                rows=rows,
                logits=self._keeps_logits(task, name),
            )
        return self._states[name, tp]

    def _keeps_logits(self, task: str, module: str) -> bool:
        """Whether a group that cuts the vocabulary needs no whole logits of a module."""

        def takes_shards(loss: str) -> bool:
            built = build_loss(self._workload, loss, self._folder)
            return as_vocabulary_loss(built) is not None

        return takes_own_logits(resolve_tasks(self._workload)[task], module, takes_shards)

    def _call(self, blocks: Sequence[nn.Module], args: tuple[Tree, ...]) -> Tree:
        """The forward of consecutive blocks, as a stage of a run has it."""
        if not self._cuts:
            return call_blocks(blocks, args)
        flow, given = RowFlow(self._row_group), args
        for block in blocks:
            cuts = self._cuts.get(block)
            given = flow.before(cuts, given)
            rows = None if cuts is None else cast(GroupSums, sums_of(block)).rows
            if rows is not None:
                rows.begin(cuts, self._row_group, flow.length)
            given = (block(*given),)
            flow.after(rows)
        return flow.end(given[0])

    def _shape(self, point: Json) -> Json:
        """Work, activations and outputs of every block, from real samples.

        Raises:
            InvalidInputError: a block fails on the data, or changes a buffer.
        """
        task, name, size = point["task"], point["module"], point["microbatch"]
        module = self._build(name, tp=1)
        args = self._inputs.of_module(task, name, size)
        blocks: list[Json] = []
        known = [*module.parameters(), *module.buffers(), *tensors_of(args)]
        value = args
        for index, block in enumerate(module):
            with HeldTensors(known) as held, self._autocast():
                out = checked_block(name, index, block, value)
            held_bytes = held.add(tensors_of(out))
            known = held.kept
            with self._autocast():
                flops = block_flops(block, value)
            leaves_module = self._inputs.crossing(task, name, out) if block is module[-1] else out
            bytes_out = sum(t.numel() * t.element_size() for t in tensors_of(leaves_module))
            blocks.append(
                {
                    "flops": flops / size,
                    "output_bytes": bytes_out / size,
                    "activation_bytes": held_bytes / size,
                }
            )
            value = (out,)
        seconds = self._block_seconds(module, args)
        kinds = [_signature(block) for block in module]
        for block, timing, kind in zip(blocks, seconds, kinds, strict=True):
            block |= {
                "seconds": timing.median_s,
                "spread_s": timing.spread_s,
                "same_as": kinds.index(kind),
            }
        return {"blocks": blocks}

    def _block_seconds(self, module: nn.Sequential, args: tuple[Tree, ...]) -> list[Timing]:
        """Forward and backward together of every block by itself."""

        clock = self._watch.clock

        def step(_: int) -> Sequence[Reading]:
            readings: list[Reading] = []
            value = args
            for block in module:
                started = clock.mark()
                with self._autocast():
                    out = block(*value)
                forward = clock.since(started)
                backward = _timed_backward(out, clock)
                readings.append(lambda a=forward, b=backward: a() + b())
                value = (map_tensors(out, leaf_of),)
            return readings

        return self._watch.time(step)

    def _module(self, point: Json) -> Json:
        """Seconds and held bytes of the first blocks of a module."""
        task, name, tp = point["task"], point["module"], point["tp"]
        size, num_blocks = point["microbatch"], point["blocks"]
        key = task, name, tp, num_blocks
        foreseen_s = self._watch.peers.largest(self._seconds.get(key, 0.0) * size)
        if foreseen_s > self._job["max_point_s"]:
            return {"skipped": f"one micro-batch of {size} would take {foreseen_s:.3g} s"}
        blocks = list(self._build(name, tp=tp))[:num_blocks]
        started = time.perf_counter()
        different = list(self._inputs.different(task, name, size))
        held = fmean(self._held_bytes(blocks, args) for args in different)
        # Waiting for the others of a tensor-parallel group takes no processor time.
        clock = clock_of(self._device) if tp > 1 else self._watch.clock
        forward, backward = self._forward_backward(blocks, task, name, size, clock)
        inputs = self._backward_input(blocks, task, name, size, clock)
        transient = [self._transient_bytes(blocks, args) for args in different]
        self._seconds[key] = (forward.median_s + backward.median_s) / size
        return {
            "forward_s": forward.median_s,
            "forward_spread_s": forward.spread_s,
            "backward_s": backward.median_s,
            "backward_spread_s": backward.spread_s,
            "repeats": forward.repeats,
            "activation_bytes": held,
            "passing": {key: fmean(each[key] for each in transient) for key in transient[0]},
            "backward_input": inputs,
            "wall_s": time.perf_counter() - started,
        }

    def _held_bytes(self, blocks: list[nn.Module], args: tuple[Tree, ...]) -> float:
        """Bytes held from the forward to the backward, outputs included."""
        held = [p for b in blocks for p in (*b.parameters(), *b.buffers())]
        twice = TrainingPrecision(self._workload.train, self._device).is_narrow
        with self._autocast():
            return kept_bytes(
                lambda: self._call(blocks, args), [*held, *tensors_of(args)], self._device, twice
            )

    def _transient_bytes(self, blocks: list[nn.Module], args: tuple[Tree, ...]) -> Json:
        """Transient bytes of the blocks; the timed repeats left gradients behind."""

        def call() -> Tree:
            with self._autocast():
                return self._call(blocks, args)

        return transient_bytes(call, self._device)

    def _forward_backward(
        self, blocks: list[nn.Module], task: str, name: str, size: int, clock: Clock
    ) -> list[Timing]:
        def step(repeat: int) -> Sequence[Reading]:
            args = self._inputs.of_module(task, name, size, repeat)
            if clock.is_cold:
                clock.cool()
            started = clock.mark()
            with self._autocast():
                out = self._call(blocks, args)
            forward = clock.since(started)
            return forward, _timed_backward(out, clock)

        return self._watch.time(step)

    def _backward_input(
        self, blocks: list[nn.Module], task: str, name: str, size: int, clock: Clock
    ) -> Json | None:
        """Backward that stops at inputs: of all blocks, or of those after the first.

        Data takes no gradient, so for a module that is fed with data alone the gradient
        ends after its first block; the caller scales the time to all of them.
        """
        first = 0 if self._inputs.takes_gradients(task, name) else 1
        if first >= len(blocks):
            return None
        trained = [p for b in blocks for p in b.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)

        def step(repeat: int) -> Sequence[Reading]:
            args = self._inputs.of_module(task, name, size, repeat)
            with self._autocast():
                if first:
                    args = (map_tensors(self._call(blocks[:1], args), leaf_of),)
                out = self._call(blocks[first:], args)
            return (_timed_backward(out, clock),)

        try:
            timing = self._watch.time(step)[0]
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
        return {"seconds": timing.median_s, "first_block": first}

    def _build(self, name: str, *, tp: int) -> nn.Sequential:
        """A module on this device, cut for tensor parallelism; the last one is kept."""
        if self._built is None or self._built[0] != (name, tp):
            self._built = None
            self._cuts = {}
            module = build_module(self._workload, name, self._folder)
            if tp > 1:
                comm, place, shards = self._groups[tp], self._rank % tp, Shards()
                for index, block in enumerate(module):
                    where = f"{name}.{index}"
                    shard_block(block, index=place, count=tp, comm=comm, where=where, shards=shards)
            module = module.to(self._device).train()
            for block, states in zip(module, self._followed(name, tp), strict=False):
                partial = sorted(states.partial)
                sum_gradients(map(block.get_parameter, partial), self._groups[tp])
                if states.logits:
                    cast(GroupSums, sums_of(block)).keeps_logits = True
                if states.rows is not None:
                    cast(GroupSums, sums_of(block)).rows.hook(block, states.rows)
                    self._cuts[block] = states.rows
                    self._row_group = group_name(self._groups[tp])
            self._built = (name, tp), module
        return self._built[1]

    # --- losses ------------------------------------------------------------------------

    def _loss(self, point: Json) -> Json:
        """Seconds of a whole loss on some samples, as one device computes it.

        Called as a run calls it; a sharded loss computes its gradient in its forward.
        """
        task, name, size = point["task"], point["loss"], point["samples"]
        loss = build_loss(self._workload, name, self._folder).to(self._device)
        args = self._inputs.of_loss(task, name, size)
        with HeldTensors([*loss.parameters(), *tensors_of(args)]) as held, self._autocast():
            value = checked_loss(name, loss, args)
            held_bytes = held.add([value])
        cut_bytes = self._cut_bytes(task, name, loss, args)

        clock = self._watch.clock
        # As in a run: features alone can be shared out, data fields are not.
        sharded = as_sharded(loss) if self._inputs.only_features(task, name) else None

        def step(_: int) -> Sequence[Reading]:
            clock.cool()
            started = clock.mark()
            with self._autocast():
                if sharded is not None:
                    compute_shard(sharded, args)
                    return clock.since(started), lambda: 0.0
                value = loss(*args)
            forward = clock.since(started)
            return forward, _timed_backward(value, clock)

        forward, backward = self._watch.time(step)
        return {
            "forward_s": forward.median_s,
            "backward_s": backward.median_s,
            "activation_bytes": held_bytes,
            "cut_bytes": cut_bytes,
            "sharded": sharded is not None,
            "exchanged_per_row": exchanged_per_row(sharded),
            "others_only": others_only(sharded),
            "trains": trains(loss),
        }

    def _cut_bytes(
        self, task: str, name: str, loss: nn.Module, args: tuple[Tree, ...]
    ) -> float | None:
        """Bytes that a group holds together that cuts the vocabulary; None where none does."""
        source = resolve_tasks(self._workload)[task].loss_inputs[name][0]
        sharded = as_vocabulary_loss(loss)
        if sharded is None or source.module is None or not self._keeps_logits(task, source.module):
            return None
        plan = block_plan(self._build_shapes(source.module)[-1])
        if "vocab" not in plan.values():
            return None
        logits = cast(Any, args[0])
        vocab = (logits.values if isinstance(logits, Ragged) else logits).shape[-1]
        with HeldTensors([*loss.parameters(), *tensors_of(args)]) as held, self._autocast():
            value = sharded.of_shard((0, vocab, vocab), lambda one: one[None], *cast(Any, args))
            return held.add([value])


def _timed_backward(out: Tree, clock: Clock) -> Reading:
    outs = float_outputs(out)
    grads = [torch.ones_like(o) for o in outs]
    started = clock.mark()
    if outs:
        torch.autograd.backward(outs, grads)
    return clock.since(started)


def _parameters_by_block(module: nn.Sequential) -> list[list[nn.Parameter]]:
    """Each block's parameters; one that is tied to an earlier block's counts there."""
    seen: set[nn.Parameter] = set()
    blocks: list[list[nn.Parameter]] = []
    for block in module:
        blocks.append([p for p in block.parameters() if p not in seen])
        seen.update(block.parameters())
    return blocks


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that must cost the same."""
    shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    return type(block), shapes
