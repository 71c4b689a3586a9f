"""The end of a step: parameters updated from their summed gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from mmlaunch.checkpoint.restore import Checkpoint
from mmlaunch.comm.transport import Transport
from mmlaunch.execute.gradient_buckets import UpdatedSlice
from mmlaunch.execute.reductions import Reductions
from mmlaunch.session.optimizer import build_optimizer, group_of, rate_factor, state_of
from mmlaunch.session.state import OPTIMIZER_KIND
from mmplan.errors import InvalidInputError
from mmplan.schema.workload import TrainSpec


class Update:
    """One rank's optimizer and the slices of parameters that it updates.

    Args:
        train: the workload's.
        reductions: knows these slices, and gathers those of ZeRO-1.
        transport: adds up the gradients' norm.
        sharded: whether any parameter of the run, or its state, is cut over ranks.
        inactive: names of parameters that tasks outside this plan may train.

    Attributes:
        slices: those that this rank updates.
        optimizer: None where there are none.

    Raises:
        InvalidInputError: the optimizer's class or arguments are wrong, or a group matches no
            parameter of the run.
    """

    def __init__(
        self,
        train: TrainSpec,
        reductions: Reductions,
        transport: Transport,
        *,
        sharded: bool,
        inactive: Collection[str] = (),
    ) -> None:
        self._train, self._reductions, self._transport = train, reductions, transport
        self.slices = reductions.updated_slices()
        self.optimizer: torch.optim.Optimizer | None = build_optimizer(
            train,
            [(item.name, item.tensor) for item in self.slices],
            sharded=sharded,
        )

        # Learning rates before the schedule's factor.
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        self._rates = [(group, group["lr"]) for group in groups]
        self._check_groups(inactive)

    def _check_groups(self, inactive: Collection[str]) -> None:
        """Refuse patterns that no parameter of any rank matches."""
        if not self._train.groups:
            return
        names = [*(item.name for item in self.slices), *inactive]
        mine = {group_of(self._train, name) for name in names}
        used = set[int | None]().union(*self._transport.gather_objects(mine, set[int | None]))
        for index, group in enumerate(self._train.groups):
            if index not in used:
                raise InvalidInputError(
                    f"train.groups[{index}].match: {group.match!r} matches no trained parameter "
                    "that is not in an earlier group",
                    hint="names are module.block.parameter and losses.NAME.parameter, as in "
                    "final.safetensors",
                )

    def check_state(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that another optimizer left.

        Raises:
            InvalidInputError: names both.
        """
        mine, theirs = self._train.optimizer, checkpoint.manifest.state.get("optimizer")
        if theirs not in (None, mine):
            raise InvalidInputError(
                f"{checkpoint.path} was saved with train.optimizer {theirs}, the workload has "
                f"{mine}",
                hint=f"go on with {theirs}, or start a new run from the trained weights with init:",
            )
        kept: dict[int | None, frozenset[str]] = {}
        for item in self.slices:
            group = group_of(self._train, item.name)
            if group not in kept:
                kept[group] = state_of(self._train, item.name)
            kinds = [kind for kind in checkpoint.kinds(item.name) if OPTIMIZER_KIND in kind]
            stored = {kind.removeprefix(OPTIMIZER_KIND) for kind in kinds}
            if stored and stored != kept[group]:
                raise InvalidInputError(
                    f"{checkpoint.path} holds {', '.join(sorted(stored))} of {item.name}, {mine} "
                    f"with these arguments keeps {', '.join(sorted(kept[group])) or 'nothing'}",
                    hint="go on with the optimizer and the optimizer_args of the saved run",
                )

    def apply(self, step: int) -> float | None:
        """Update the parameters on all ranks; gradients are gone afterwards.

        Args:
            step: number of this step, for the schedule.

        Returns:
            The norm of all gradients before they were clipped; None without clipping.
        """
        norm = None if self._train.clip_grad_norm is None else self._clip()
        if self.optimizer is not None:
            factor = rate_factor(self._train, step)
            for group, rate in self._rates:
                group["lr"] = rate * factor
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._reductions.gather()
        return norm

    def skip(self) -> None:
        """Let go of the gradients; parameters and the optimizer's state stay as they are."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def unscale(self, scale: float) -> None:
        """Divide the gradients by the scale with which their backward began."""
        for grads in self._by_type(self.slices).values():
            torch._foreach_mul_(grads, 1.0 / scale)  # pyright: ignore[reportPrivateImportUsage]

    def has_faults(self) -> Tensor:
        """1.0 where a summed gradient of this rank is not finite, else 0.0; on its device."""
        found = torch.zeros(1, device=self._transport.device)
        one = torch.ones_like(found)
        # What torch.amp.GradScaler calls: one kernel, where a norm is two for each gradient.
        for grads in self._by_type(self.slices).values():
            torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
                grads, found, one
            )
        return found[0].double()

    def faults(self) -> list[str]:
        """Names of the gradients that are not finite on any rank, in order of ranks."""
        mine = [name for name, grad in self.gradients().items() if not grad.isfinite().all()]
        everyone = self._transport.gather_objects(mine)
        return list(dict.fromkeys(name for names in everyone for name in names))

    def _clip(self) -> float:
        """Scale all gradients such that their common norm is at most the workload's.

        Each element counts once: of replicas and of equal slices one rank's, of shards and
        other slices each. Scaled as ``torch.nn.utils.clip_grad_norm_`` does.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        for dtype, grads in self._by_type(p for p in self.slices if p.counts).items():
            # At least float32: the norms of bfloat16 gradients would be rounded to three digits.
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm(grads, 2, wide)  # pyright: ignore[reportPrivateImportUsage]
            squares += torch.stack(norms).double().square().sum()
        self._transport.all_reduce(squares, tuple(range(self._transport.world_size)))
        norm = math.sqrt(squares.item())
        scale = (self._train.clip_grad_norm or math.inf) / (norm + 1e-6)
        if scale < 1.0:
            for grads in self._by_type(self.slices).values():
                torch._foreach_mul_(grads, scale)  # pyright: ignore[reportPrivateImportUsage]
        return norm

    def _by_type(self, slices: Iterable[UpdatedSlice]) -> dict[torch.dtype, list[Tensor]]:
        """Gradients of slices, by type: as many at a time as one kernel takes."""
        found: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for item in slices:
            if item.tensor.grad is not None:
                found[item.tensor.grad.dtype].append(item.tensor.grad)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Summed gradients of this rank's slices, by :attr:`UpdatedSlice.label`."""
        return {p.label: p.tensor.grad for p in self.slices if p.tensor.grad is not None}
