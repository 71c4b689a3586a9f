"""Bytes of one micro-batch in a stage, as a run allocates and frees them.

A plan's memory counts weights, gradients, optimizer state and activations. Here are also the
workspace of forwards and backwards, as far as the profile has it, messages, and tensors of losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmplan.costs.block_ranges import gradient_blocks
from mmplan.costs.fit import fit_curve
from mmplan.costs.program_costs import ProgramCosts
from mmplan.program.model import CrossSampleLoss, Stage
from mmplan.schema.profile import Curve, LossProfile, ModuleProfile, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchMemory:
    """The bytes of one micro-batch in a stage.

    Attributes:
        activations: of the blocks that a gradient passes, from first to last; held from the
            forward to the backward.
        first: the first of these blocks.
        forward: peak workspace of the forward, without its activations.
        backward: peak workspace of the backward.
        losses: of its hosted losses, held as activations are.
        output: of the last block.
    """

    activations: tuple[float, ...]
    first: int
    forward: float
    backward: float
    losses: float
    output: float


class StageMemory:
    """The bytes of micro-batches in the stages of a program, cached.

    Args:
        costs: of the program.

    Attributes:
        knows_workspace: whether the profile has the workspace of every module that runs.
    """

    def __init__(self, costs: ProgramCosts) -> None:
        self.costs = costs
        self._stages: dict[tuple[int, int, float], MicroBatchMemory] = {}
        self._curves: dict[tuple[str, str, int], _Workspace | None] = {}
        self._loss_curves: dict[str, Curve | None] = {}
        self.knows_workspace = all(
            self._workspace(stage) is not None for stage in costs.program.stages
        )

    def of(self, stage: Stage, samples: int, weighted_samples: float) -> MicroBatchMemory:
        """Of a micro-batch of ``samples`` samples, or ``weighted_samples`` of mean work."""
        key = stage.index, samples, weighted_samples
        if key not in self._stages:
            self._stages[key] = self._bytes_of(stage, samples, weighted_samples)
        return self._stages[key]

    def _bytes_of(self, stage: Stage, samples: int, weighted_samples: float) -> MicroBatchMemory:
        cut = self.costs.costs.cut_bytes(
            task=stage.task, module=stage.module, after_block=stage.blocks[1] - 1
        )
        losses = [self.costs.program.losses[index].name for index in stage.hosted]
        forward, backward = self._workspaces(stage, weighted_samples)
        passed = _passed(stage)
        return MicroBatchMemory(
            activations=self._activations(stage, weighted_samples),
            first=passed[0] if passed is not None else stage.blocks[1],
            forward=forward,
            backward=backward,
            losses=sum(self.loss_bytes(name, samples) for name in losses),
            output=weighted_samples * cut,
        )

    def _activations(self, stage: Stage, weighted_samples: float) -> tuple[float, ...]:
        passed = _passed(stage)
        if passed is None:
            return ()
        whole = self.costs.activation_bytes(stage, weighted_samples)
        shares = [
            self.costs.costs.activation_share(
                task=stage.task, module=stage.module, blocks=(block, block + 1)
            )
            for block in range(*passed)
        ]
        total = sum(shares)
        return tuple(whole * (s / total if total else 1 / len(shares)) for s in shares)

    def _workspaces(self, stage: Stage, weighted_samples: float) -> tuple[float, float]:
        """Peak workspace of a forward and of a backward."""
        known = self._workspace(stage)
        if known is None:
            return 0.0, 0.0
        work = self.costs.costs.sampled_work(stage.task)
        # In samples like those of the profile's points.
        size = weighted_samples * (1.0 if work is None else work.mean(stage.module))
        alone = known.forward_only.at(size)
        passed = _passed(stage)
        if passed is None:
            return alone, 0.0
        backward = known.backward_extra.at(size)
        if self.costs.recomputes(stage):
            # A block runs forward again, and holds all of its activations during its backward.
            return alone, backward + self._largest_block(stage, weighted_samples, passed)
        forward = known.forward_extra.at(size)
        return (forward if passed == stage.blocks else max(forward, alone)), backward

    def _largest_block(
        self, stage: Stage, weighted_samples: float, passed: tuple[int, int]
    ) -> float:
        return max(
            self.costs.costs.activation_bytes(
                task=stage.task,
                module=stage.module,
                tp=stage.tp,
                samples=weighted_samples,
                blocks=(block, block + 1),
            )
            for block in range(*passed)
        )

    def _workspace(self, stage: Stage) -> _Workspace | None:
        key = stage.task, stage.module, stage.tp
        if key not in self._curves:
            module = self.costs.costs.profile.module(stage.module, stage.task)
            self._curves[key] = _fitted(module, stage.tp)
        return self._curves[key]

    def loss_bytes(self, name: str, samples: int) -> float:
        """Bytes of a loss from its forward to its backward; 0 where the profile lacks it."""
        if name not in self._loss_curves:
            self._loss_curves[name] = _loss_curve(self.costs.costs.profile.losses.get(name))
        curve = self._loss_curves[name]
        return 0.0 if curve is None else curve.at(samples)

    def sync_bytes(self, loss: CrossSampleLoss) -> tuple[float, float]:
        """Bytes of one sync batch: all features, and the loss's tensors on a rank."""
        samples = loss.sync_batch
        whole_bytes = self.loss_bytes(loss.name, samples)
        known = self.costs.costs.profile.losses.get(loss.name)
        parts = len(loss.ranks) if known is not None and known.sharded else 1
        return samples * self.costs.feature_bytes(loss), whole_bytes / parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workspace:
    """Curves over the micro-batch size of the workspace fields of :class:`Point`."""

    forward_only: Curve
    forward_extra: Curve
    backward_extra: Curve


def _fitted(module: ModuleProfile, tp: int) -> _Workspace | None:
    """Workspace of one tp; None where no point has it.

    Workspace is a peak over the blocks: a stage of some blocks takes as much as the module.
    """
    points = [p for p in module.points if p.tp == tp and p.backward_extra_bytes is not None]
    whole = [p for p in points if p.blocks in (None, module.blocks)] or points
    if not whole:
        return None

    def curve(value: Callable[[Point], float | None]) -> Curve:
        return fit_curve([p.microbatch for p in whole], [value(p) or 0.0 for p in whole])

    return _Workspace(
        forward_only=curve(lambda p: p.forward_only_bytes),
        forward_extra=curve(lambda p: p.forward_extra_bytes),
        backward_extra=curve(lambda p: p.backward_extra_bytes),
    )


def _loss_curve(loss: LossProfile | None) -> Curve | None:
    if loss is None:
        return None
    return fit_curve([p.samples for p in loss.points], [p.activation_bytes for p in loss.points])


def _passed(stage: Stage) -> tuple[int, int] | None:
    return gradient_blocks(stage.blocks, stage.trainable, input_gradient=stage.input_gradient)
