"""The optimizer of a workload: a class of ``torch.optim``, and the arguments that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from mmplan.errors import InvalidInputError
from mmplan.schema.base import MOST_COUNT
from mmplan.schema.workload import TrainSpec

# They treat every element alone, so that shards of a parameter can be updated apart.
ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"}
    | {"NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
# A shorter name that another begins with is chance.
_INITIALS = 2


def check_optimizer(train: TrainSpec, *, sharded: bool) -> Any:
    """The class that a workload names, where it takes the arguments that are given.

    Args:
        train: class and arguments.
        sharded: whether a rank may hold a part of a parameter.

    Raises:
        InvalidInputError: no such class, wrong arguments, or one that needs whole
            parameters where they are cut.
    """
    import torch

    kind: Any = getattr(torch.optim, train.optimizer, None)
    choice = f"choose of {', '.join(sorted(ELEMENTWISE))}"
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InvalidInputError(
            f"train.optimizer: torch.optim has no optimizer {train.optimizer!r}",
            hint=_meant(train.optimizer, ELEMENTWISE) or choice,
        )
    if train.optimizer == "LBFGS" or (sharded and train.optimizer not in ELEMENTWISE):
        raise InvalidInputError(
            f"train.optimizer: {train.optimizer} needs whole parameters on every rank",
            hint=f"{choice}, or a plan with tp 1",
        )
    _try_arguments(kind, train.optimizer_args, "train.optimizer_args")
    for index, group in enumerate(train.groups):
        field = f"train.groups[{index}].optimizer_args"
        # Torch does not look at the names of a group's own arguments.
        _try_arguments(kind, group.optimizer_args, field, {**train.optimizer_args})
    return kind


def _try_arguments(
    kind: Any, arguments: Mapping[str, Any], field: str, others: Mapping[str, Any] | None = None
) -> None:
    """Make one optimizer of a number, with some arguments and the others that go with them."""
    import torch
    from torch import nn

    taken = [*inspect.signature(kind).parameters][1:]
    for name in arguments:
        if name not in taken:
            raise InvalidInputError(
                f"{field}: {kind.__name__} takes no {name!r}",
                hint=_meant(name, taken) or f"{kind.__name__} takes {', '.join(taken)}",
            )
    large = [name for name, value in arguments.items() if _is_too_large(value)]
    if large:
        raise InvalidInputError(
            f"{field}.{large[0]}: {kind.__name__} cannot compute with so large a number",
            hint=f"see torch.optim.{kind.__name__} for its arguments",
        )
    # Torch hides this method from its compiler, which it loads for that: a second of imports.
    plain = {"add_param_group": inspect.unwrap(torch.optim.Optimizer.add_param_group)}
    try:
        type(kind.__name__, (kind,), plain)(
            [nn.Parameter(torch.zeros(1))], **{**(others or {}), **arguments}
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{field}: {kind.__name__}: {error}",
            hint=f"see torch.optim.{kind.__name__} for its arguments",
        ) from None


def _is_too_large(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_too_large, value))
    return isinstance(value, int) and abs(value) > MOST_COUNT


def _meant(given: str, known: Collection[str]) -> str | None:
    """A question with the known name that a wrong one stands for: by its letters or initials."""
    word, names = given.lower(), {name.lower(): name for name in known}
    initials = "".join(part[:1] for part in word.split("_"))
    found = [
        *(name for name in names if name == word),
        *(name for name in names if name == initials),
        *get_close_matches(word, names, n=1),
        *(name for name in names if len(name) > _INITIALS and word.startswith(name)),
    ]
    return f"did you mean {names[found[0]]}?" if found else None
