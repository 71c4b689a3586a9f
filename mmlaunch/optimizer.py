"""The optimizer of one rank: a class of torch.optim over the parameters that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mmplan.errors import InvalidInputError
from mmplan.schema.workload import TrainSpec

# They treat every element alone, so that shards of a parameter can be updated apart.
ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"}
    | {"NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


def build_optimizer(
    train: TrainSpec, parameters: Sequence[tuple[str, nn.Parameter]], *, sharded: bool
) -> torch.optim.Optimizer | None:
    """Make the workload's optimizer; None for a rank that trains nothing.

    Args:
        train: class and arguments.
        parameters: this rank's trained parameters by name.
        sharded: whether tensor parallelism cuts parameters anywhere in the run.

    Raises:
        InvalidInputError: no such class, wrong arguments, or one that needs whole
            parameters where they are cut.
    """
    kind: Any = getattr(torch.optim, train.optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InvalidInputError(
            f"train.optimizer: torch.optim has no optimizer {train.optimizer!r}",
            hint=f"choose of {', '.join(sorted(ELEMENTWISE))}",
        )
    if train.optimizer == "LBFGS" or (sharded and train.optimizer not in ELEMENTWISE):
        raise InvalidInputError(
            f"train.optimizer: {train.optimizer} needs whole parameters on every rank",
            hint=f"choose of {', '.join(sorted(ELEMENTWISE))}, or a plan with tp 1",
        )
    if not parameters:
        return None
    try:
        return kind([parameter for _, parameter in parameters], **train.optimizer_args)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"train.optimizer_args: {train.optimizer}: {error}",
            hint=f"see torch.optim.{train.optimizer} for its arguments",
        ) from None
