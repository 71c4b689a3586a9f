"""One training step of the same model under several systems, side by side.

Every system gets the same initial weights, samples, loss and optimizer from one workload
file, and lives in the same processes as the others, so that steps of all of them can be
timed in turns:

- a plan, run by ``mmlaunch.Session``, and the colocated one also with sums of gradients behind
  the last backward instead of inside of it;
- ``ddp``: every process holds all modules and takes its share of the batch; features are
  gathered with their gradient and each process computes the loss of its own rows against
  all (open_clip's ``local_loss`` with ``gather_with_grad``);
- ``ddp bf16``: its gradients as bfloat16 on the wire;
- ``fsdp2``: the same under ``fully_shard``, one unit per block.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mmlaunch.data.loader import StepLoader
from mmlaunch.launch.launch import WorkerContext
from mmlaunch.session.optimizer import build_optimizer
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.schema.factories import (
    build_dataset,
    build_loss,
    build_module,
    frozen_blocks,
)
from mmplan.schema.workload import Workload, load_workload, resolve_tasks
from mmplan.zoo.losses import CLIPLoss

PEERS = ("ddp", "fsdp2")
COMPRESSED = "ddp bf16"
CHECKED_STEPS = 3
LOSS_TOLERANCE = 1e-4
# Rounded gradients give other weights after the first step.
COMPRESSED_TOLERANCE = 1e-2


class System(Protocol):
    """Something that trains."""

    def step(self) -> float:
        """One whole optimizer step on the next batch; the loss of the whole batch."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class PlannedSystem:
    """A plan under ``mmlaunch``."""

    def __init__(self, plan: str, workload: str) -> None:
        self._session = Session.from_plan(plan, workload=workload)

    def step(self) -> float:
        return self._session.step().loss

    def close(self) -> None:
        self._session.close()


class LateSums(PlannedSystem):
    """The same, with sums of gradients behind the last backward."""

    def __init__(self, plan: str, workload: str) -> None:
        with patch("mmplan.program.compile.with_starts", lambda _, rows: rows):
            super().__init__(plan, workload)


class Towers(nn.Module):
    """All modules of a workload and the loss's scale, as one model.

    Forward takes the data fields and returns the features of every module in the order of
    the loss's inputs, normalised, and the scale: what open_clip's model returns.
    """

    def __init__(self, workload: Workload, folder: Path) -> None:
        super().__init__()
        loss = _clip_loss(workload, folder)
        self.names = [name for name in next(iter(workload.losses.values())).inputs if name]
        self.fields = {name: workload.modules[name].inputs[0] for name in self.names}
        self.towers = nn.ModuleDict()
        for name in self.names:
            module = build_module(workload, name, folder)
            frozen = frozen_blocks(workload.modules[name].frozen, len(module))
            for block, is_frozen in zip(module, frozen, strict=True):
                block.requires_grad_(not is_frozen)
            self.towers[name] = module
        # fully_shard cuts along the first axis and takes no scalar.
        self.log_scale = nn.Parameter(loss.logit_scale.detach().reshape(1))
        self.max_log_scale = loss.max_log_scale

    def forward(self, fields: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        features = [
            functional.normalize(self.towers[name](fields[cast(str, self.fields[name])]), dim=-1)
            for name in self.names
        ]
        return features, self.log_scale.clamp(max=self.max_log_scale).exp()


class DataParallel:
    """``ddp`` or ``fsdp2``."""

    def __init__(self, kind: str, workload_path: str, device: torch.device) -> None:
        workload, folder = load_workload(workload_path), Path(workload_path).parent
        _check_supported(workload)
        rank, count = dist.get_rank(), dist.get_world_size()
        self._device = device
        share = workload.batch // count
        self._range = rank * share, (rank + 1) * share
        model = Towers(workload, folder).to(device)
        self._fields = sorted({cast(str, field) for field in model.fields.values()})
        self._model = _WRAPPERS[kind](model, device)
        self._optimizer = cast(
            torch.optim.Optimizer,
            build_optimizer(
                workload.train,
                [(n, p) for n, p in self._model.named_parameters() if p.requires_grad],
                sharded=kind == "fsdp2",
            ),
        )
        task = next(iter(resolve_tasks(workload).values()))
        self._loader = StepLoader(
            build_dataset(cast(Any, task.data), folder, seed=workload.train.seed),
            batch=workload.batch,
            seed=workload.train.seed,
            ranges=[self._range],
            fields=self._fields,
        )

    def step(self) -> float:
        data = next(self._loader)
        fields = {
            name: cast(Tensor, data.get(name, *self._range)).to(self._device)
            for name in self._fields
        }
        features, scale = self._model(fields)
        loss = local_clip_loss(features, scale)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        # The planned step gives the whole batch's loss too.
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def close(self) -> None:
        self._loader.close()


class _Gather(torch.autograd.Function):
    """Rows of all ranks; a row's gradient is the sum of what every rank asks of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def gathered(own: Tensor) -> Tensor:
    """All ranks' rows [ranks * N, E] of features [N, E], with gradients back to their owners.

    What ``torch.distributed.nn.all_gather`` gives, which torch 2.13 calls deprecated.
    """
    return cast(Tensor, _Gather.apply(own.contiguous()))


def local_clip_loss(features: Sequence[Tensor], scale: Tensor) -> Tensor:
    """This rank's rows against all rows, averaged over its rows, directions and pairs.

    The gather passes gradients back to the rows' owners, so the mean over ranks of the
    gradients (which both DDP and FSDP take) is the gradient of the whole batch's loss.

    Args:
        features: [own rows, E] per modality, normalised.
        scale: [1].

    Source: open_clip, ``ClipLoss(local_loss=True, gather_with_grad=True)``.
    """
    whole = [gathered(own) for own in features]
    first = dist.get_rank() * len(features[0])
    label = torch.arange(len(features[0]), device=features[0].device) + first
    terms = [
        functional.cross_entropy(scale * features[a] @ whole[b].T, label)
        for i, j in combinations(range(len(features)), 2)
        for a, b in ((i, j), (j, i))
    ]
    return torch.stack(terms).mean()


def _ddp(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=True,
    )


def _fsdp2(model: Towers, device: torch.device) -> nn.Module:
    """Parameters stay whole between forward and backward: the faster choice where they fit."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for tower in model.towers.values():
        for block in cast(nn.Sequential, tower):
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def _ddp_bf16(model: nn.Module, device: torch.device) -> nn.Module:
    wrapped = cast(DistributedDataParallel, _ddp(model, device))
    # DistributedDataParallel lets the hook itself, known by its name, on CUDA only.
    wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return wrapped


_WRAPPERS: dict[str, Any] = {"ddp": _ddp, "fsdp2": _fsdp2, COMPRESSED: _ddp_bf16}


def _clip_loss(workload: Workload, folder: Path) -> CLIPLoss:
    loss = build_loss(workload, next(iter(workload.losses)), folder)
    if not isinstance(loss, CLIPLoss):
        raise InvalidInputError(
            "the data-parallel systems know mmplan.zoo.losses:clip only",
            hint="benchmark a workload with that loss",
        )
    return loss


def _check_supported(workload: Workload) -> None:
    """Refuse what the peers would train differently from the plan."""
    syncs = [loss.sync_batch for loss in workload.losses.values()]
    chained = any(
        len(module.inputs) != 1 or module.inputs[0] in workload.modules
        for module in workload.modules.values()
    )
    if len(syncs) != 1 or syncs[0] not in (None, workload.batch) or chained:
        raise InvalidInputError(
            "the data-parallel systems train towers with one input each and one loss over "
            "the whole batch",
            hint="benchmark such a workload",
        )
    if workload.batch % dist.get_world_size():
        raise InvalidInputError(
            f"a batch of {workload.batch} does not divide by {dist.get_world_size()} processes",
            hint="change batch in the workload",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What every process is told.

    Attributes:
        workload: path.
        plans: name to path of a plan.
        pairs: rounds; each gives every system its steps, in turns.
        steps: timed steps of a system in a round.
        peers: data-parallel systems that take part.
    """

    workload: str
    plans: dict[str, str]
    pairs: int
    steps: int
    peers: tuple[str, ...] = PEERS


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """What every process returns; all return the same.

    Attributes:
        losses: of the first steps, by system.
        seconds: ``[round][step]`` by system, of the slowest rank.
        cpu_s: ``[round][step]`` by system, processor seconds of all ranks together; unlike
            wall time it is hardly changed by what else the machine does.
    """

    losses: dict[str, list[float]]
    seconds: dict[str, list[list[float]]]
    cpu_s: dict[str, list[list[float]]]


def race(ctx: WorkerContext, job: Race) -> RaceResult:
    """Check that all systems compute the same, then time them in turns.

    Raises:
        RunFailedError: a loss differs: the systems do not train the same model.
    """
    systems: dict[str, System] = {}
    for name, plan in job.plans.items():
        systems[name] = PlannedSystem(plan, job.workload)
        if name == "colocated":
            systems[f"{name}, sums last"] = LateSums(plan, job.workload)
    for name in job.peers:
        systems[name] = DataParallel(name, job.workload, ctx.device.device)
    try:
        losses = {
            name: [_beaten(ctx, name, system) for _ in range(CHECKED_STEPS)]
            for name, system in systems.items()
        }
        check_losses(losses)
        seconds: dict[str, list[list[float]]] = {name: [] for name in systems}
        cpu_s: dict[str, list[list[float]]] = {name: [] for name in systems}
        names = list(systems)
        for turn in range(job.pairs):
            # Who goes first changes, so that what one leaves in the caches hits all alike.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                # The first step after another system's is not timed: caches are cold.
                _beaten(ctx, name, systems[name])
                times = [_timed(ctx, name, systems[name]) for _ in range(job.steps)]
                seconds[name].append([wall_s for wall_s, _ in times])
                cpu_s[name].append([used_s for _, used_s in times])
        return RaceResult(losses=losses, seconds=seconds, cpu_s=cpu_s)
    finally:
        for system in systems.values():
            system.close()


def check_losses(losses: dict[str, list[float]]) -> None:
    """Refuse a race between systems that do not train the same model.

    Raises:
        RunFailedError: names the first system and step that differ.
    """
    base, *others = losses
    for name in others:
        for step, (want, got) in enumerate(zip(losses[base], losses[name], strict=True)):
            tolerance = COMPRESSED_TOLERANCE if name == COMPRESSED else LOSS_TOLERANCE
            if not abs(got - want) <= tolerance * max(1.0, abs(want)):
                raise RunFailedError(f"step {step}: {name} has loss {got}, {base} has {want}")


def _beaten(ctx: WorkerContext, name: str, system: System) -> float:
    ctx.heartbeat.beat(-1, -1, name)
    return system.step()


def _timed(ctx: WorkerContext, name: str, system: System) -> tuple[float, float]:
    """Seconds from a common start until the last rank is done, and processor seconds of all."""
    dist.barrier()
    began_cpu, began = time.process_time(), time.perf_counter()
    _beaten(ctx, name, system)
    took_s, used_s = time.perf_counter() - began, time.process_time() - began_cpu
    slowest = torch.tensor([took_s], dtype=torch.float64, device=ctx.device.device)
    total = torch.tensor([used_s], dtype=torch.float64, device=ctx.device.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return slowest.item(), total.item()
