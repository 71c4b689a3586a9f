"""Methods that a loss's module may have besides its forward, as planner and runtime see them.

Asked for by attribute, not by ``isinstance``: from Python 3.12 on the latter looks past
``__getattr__``, by which wrappers such as ``torch.compile``'s give their module's methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mmplan.ragged import Ragged


class ShardedLoss(Protocol):
    """A cross-sample loss of which each rank can compute its own rows' part (DistMM, 5.3).

    A run uses it where all inputs of the loss are features; data fields are not sharded. A loss
    with a true attribute ``others_only`` compares rows with those of other inputs alone: then a
    rank receives the features of those inputs only.
    """

    def sharded(
        self,
        own: Mapping[int, Tensor],
        rows: Mapping[int, Tensor],
        full: Mapping[int, Tensor],
        exchange: Callable[[dict[int, Tensor]], Mapping[int, Tensor]],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """This rank's part of the loss, and the gradient of its own features.

        Args:
            own: input to this rank's features [N, ...]; an input of which it has none is absent.
            rows: input to the positions [N] (int64) of these rows in the sync batch.
            full: all features [S, ...] of every input, by input; with ``others_only`` of those that
                the own rows are compared with.
            exchange: gathers statistics of rows, {input: [N, ...]} of own ones to {input:
                [S, ...]} of the inputs in ``full``. Every rank calls it equally often. The planner
                charges one call with :func:`exchanged_per_row` numbers a row.

        Returns:
            The part of the loss, detached: the parts of all ranks add up to the forward's value.
            {input: [N, ...]}, the gradient of the whole loss by the own features. Parts of the
            parameters' gradients are added to their ``.grad``.
        """
        ...


class CountingLoss(Protocol):
    """A per-sample loss whose forward is a sum, which the count of the whole batch divides."""

    def count(self, fields: Mapping[str, Tensor | Ragged]) -> Tensor:
        """The number of targets of each sample, from the loss's data fields alone, on the CPU."""
        ...


class VocabularyLoss(Protocol):
    """A per-sample loss that can do with logits of some tokens on each rank."""

    def of_shard(
        self,
        tokens: tuple[int, int, int],
        gather: Callable[[Tensor], Tensor],
        *inputs: Tensor | Ragged,
    ) -> Tensor:
        """The forward's value on every rank; its gradient by the rank's own logits.

        Args:
            tokens: the first token of which the rank has logits, the end, and of how many.
            gather: [...] of each rank to [ranks, ...]; all ranks call it alike.
            inputs: of the forward, the first of them logits [..., the rank's tokens].
        """
        ...


def as_vocabulary_loss(loss: object) -> VocabularyLoss | None:
    """The loss, where it takes logits that are cut along the vocabulary.

    Not one that has a forward of its own and ``of_shard`` of another class.
    """
    kinds = [kind for kind in type(loss).__mro__ if {"forward", "of_shard"} & vars(kind).keys()]
    known = bool(kinds) and "of_shard" in vars(kinds[0])
    return cast("VocabularyLoss", loss) if known else None


def as_sharded(loss: object) -> ShardedLoss | None:
    """The loss, where each rank can compute a part of it."""
    return cast("ShardedLoss", loss) if hasattr(loss, "sharded") else None


def as_counting(loss: object) -> CountingLoss | None:
    """The loss, where it is a sum over targets that it counts."""
    return cast("CountingLoss", loss) if hasattr(loss, "count") else None


def others_only(loss: object) -> bool:
    """Whether a sharded loss compares rows with those of other inputs alone."""
    return bool(getattr(loss, "others_only", False))


def trains(module: nn.Module) -> bool:
    """Whether a module has parameters that train."""
    return any(parameter.requires_grad for parameter in module.parameters())


def exchanged_per_row(loss: object) -> int | None:
    """Numbers that a sharded loss exchanges for each row of each input, besides the features.

    The loss's attribute of that name; None where it has none. The planner then takes one number
    against every input, as CLIP's logsumexps are.
    """
    return getattr(loss, "exchanged_per_row", None)
