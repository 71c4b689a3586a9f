"""One planned step against one process: every gradient, by name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.model.shard_layout import ShardLayout
from mmlaunch.session.reference import Reference
from mmlaunch.session.session import Session
from mmplan.program.model import Program
from mmplan.schema.workload import Workload

# Largest difference allowed, relative to the largest gradient of the whole model. For bf16
# it is measured: see :func:`_rounding_noise`.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
_BF16_HALF_ULP = 2.0**-9
# Each of a plan's roundings lies up to half a unit from one process's, and there are several
# in a row where the perturbation has one in each block.
_BF16_FACTOR = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedElements:
    """The elements of a full parameter that a rank reports.

    Attributes:
        name: the parameter's full name.
        layout: of the local parameter, where tensor parallelism cuts it.
        span: elements of that, flattened, of which only those are reported.
        box: elements of the full parameter of which only those are reported.
    """

    name: str
    layout: ShardLayout | None
    span: tuple[int, int] | None
    box: Box | None

    def take(self, full: Tensor) -> Tensor:
        """These elements of a tensor like the full parameter."""
        if self.box is not None:
            return full[self.box.slices]
        local = full if self.layout is None else self.layout.take(full)
        if self.span is None:
            return local
        low, high = self.span
        return local.reshape(-1)[low:high].reshape((high - low,) if local.dim() else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients:
    """The gradients of one rank's step.

    Attributes:
        loss: the step's loss.
        gradients: by label (:attr:`mmlaunch.execute.gradient_buckets.UpdatedSlice.label`).
        elements: of the full parameters, by label.
    """

    rank: int
    loss: float
    gradients: dict[str, Tensor]
    elements: dict[str, ReportedElements]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A gradient that differs from one process's.

    Attributes:
        name: parameter, or ``loss``.
        rank: where.
        error: largest absolute difference over the largest gradient of the model;
            infinite where one side has no gradient.
    """

    name: str
    rank: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a verification.

    Attributes:
        compared: number of (parameter, rank) pairs.
        worst: the largest error that was seen, within the tolerance or not.
        differences: those above the tolerance, worst first.
        loss, reference_loss: of the planned step and of the single process.
    """

    compared: int
    worst: float
    tolerance: float
    differences: tuple[Difference, ...]
    loss: float
    reference_loss: float


def planned_step(session: Session) -> LocalGradients:
    """Run one step of a session, without the update, and report its gradients."""
    loss = session.forward_backward().loss
    slices = session.update.slices
    return LocalGradients(
        rank=session.rank,
        loss=loss,
        # A gradient that never came counts as zero: its parameter would stay on this rank.
        gradients={item.label: _gradient_of(item.tensor).cpu() for item in slices},
        elements={
            item.label: ReportedElements(
                name=item.name,
                layout=session.model.layouts.get(item.name),
                span=item.span,
                box=item.box,
            )
            for item in slices
        },
    )


def compare(
    workload: Workload, folder: Path, program: Program, found: Sequence[LocalGradients]
) -> Verdict:
    """Hold the ranks' gradients against one process's, computed here."""
    reference = Reference(workload=workload, folder=folder, program=program)
    expected_loss = reference.step()
    expected = reference.named_parameters()
    scale = (
        max(
            (p.grad.abs().max().item() for p in expected.values() if p.grad is not None),
            default=0.0,
        )
        or 1.0
    )
    if workload.train.precision == "bf16":
        perturbed = Reference(workload=workload, folder=folder, program=program)
        tolerance = _BF16_FACTOR * _rounding_noise(perturbed, expected, scale)
    else:
        tolerance = TOLERANCE[workload.train.precision]
    errors: list[Difference] = []
    for rank in found:
        loss_error = abs(rank.loss - expected_loss) / max(abs(expected_loss), 1e-300)
        errors.append(Difference(name="loss", rank=rank.rank, error=loss_error))
        for label, grad in rank.gradients.items():
            where = rank.elements[label]
            error = _error(grad, expected[where.name].grad, where, scale)
            errors.append(Difference(name=label, rank=rank.rank, error=error))
    reported: defaultdict[str, list[ReportedElements]] = defaultdict(list)
    for where in (elements for rank in found for elements in rank.elements.values()):
        reported[where.name].append(where)
    errors += [
        Difference(name=name, rank=-1, error=math.inf)
        for name, parameter in expected.items()
        if parameter.grad is not None and not _is_whole(parameter.grad, reported[name])
    ]
    faults = [e for e in errors if not e.error <= tolerance]
    return Verdict(
        compared=len(errors),
        worst=max(e.error for e in errors),
        tolerance=tolerance,
        differences=tuple(sorted(faults, key=lambda e: -e.error)),
        loss=found[0].loss,
        reference_loss=expected_loss,
    )


def _rounding_noise(
    reference: Reference, expected: Mapping[str, nn.Parameter], scale: float
) -> float:
    """The largest change of a gradient when every weight moves by at most half a unit of bf16.

    A plan rounds in other places than one process, by as much, and no more often than once
    or twice in a block.
    """
    draws = torch.Generator().manual_seed(0)
    moved = reference.named_parameters()
    with torch.no_grad():
        for parameter in moved.values():
            draw = torch.rand(parameter.shape, generator=draws, dtype=parameter.dtype)
            parameter.mul_(1 + _BF16_HALF_ULP * (2 * draw - 1))
    reference.step()
    pairs = [(parameter.grad, expected[name].grad) for name, parameter in moved.items()]
    changes = [(a - b).abs().max().item() for a, b in pairs if a is not None and b is not None]
    return max(changes, default=0.0) / scale


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _error(grad: Tensor, whole: Tensor | None, where: ReportedElements, scale: float) -> float:
    if whole is None:
        # Zeros where one process has no gradient at all are no difference to the optimizer's
        # sums, anything else is.
        return 0.0 if not bool(grad.any()) else math.inf
    difference = (grad - where.take(whole)).abs().max().item() if grad.numel() else 0.0
    return math.inf if math.isnan(difference) else difference / scale


def _is_whole(gradient: Tensor, reported: Sequence[ReportedElements]) -> bool:
    """Whether every element that is not zero is among the reported ones."""
    position = torch.arange(gradient.numel()).view(gradient.shape)
    missing = gradient.reshape(-1) != 0
    for where in reported:
        missing[where.take(position).reshape(-1)] = False
    return not bool(missing.any())
