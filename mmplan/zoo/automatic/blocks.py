"""What a model.py that ``mmplan init`` wrote is made of: the uncut model, and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.zoo.sequential import LayerSequential, Part

# A function of (step, *state), the layer's name in the model, and other names that it uses.
StepSpec = tuple[Callable[..., Any], str, Sequence[str]]
# Least and most of each dimension after the first; no most: any.
Sizes = Sequence[Sequence[tuple[int, int | None]]]


class Uncut(nn.Module):
    """A model that takes its inputs by position and gives what a loss is computed of.

    Args:
        model: the model.
        inputs: names of its forward's arguments, in order; None gives them by position.
        output: attribute or key of what forward returns; None takes it as it is.
        options: other arguments of its forward.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[str] | None = None,
        *,
        output: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._inputs, self._output, self._options = inputs, output, dict(options or {})

    def forward(self, *inputs: Tensor) -> Any:
        """The output for the inputs.

        Raises:
            InvalidInputError: the model returns no such thing.
        """
        if self._inputs is None:
            returned = self.model(*inputs, **self._options)
        else:
            named = dict(zip(self._inputs, inputs, strict=True))
            returned = self.model(**named, **self._options)
        if self._output is None:
            return returned
        if not hasattr(returned, self._output):
            has = [*cast("dict[str, Any]", returned)] if isinstance(returned, dict) else "no name"
            raise InvalidInputError(
                f"{type(self.model).__name__} returns {has}, and how it is trained is not known",
                hint="wrap it in a module whose forward returns the tensor that a loss takes, and "
                "give module:callable",
            )
        return getattr(returned, self._output)


class CutStep(Part):
    """A block: a layer of the model, and what stands before it (behind the last one, too).

    Attributes:
        layer: the layer.
    """

    layer: nn.Module

    def __init__(
        self, function: Callable[..., Any], model: nn.Module, names: Sequence[str]
    ) -> None:
        super().__init__(function, model, names)
        self._sizes: Sizes = ()

    def expect(self, sizes: Sizes) -> None:
        """Refuse inputs of other sizes than those that the model was traced for."""
        self._sizes = sizes

    @property
    def device(self) -> torch.device:
        """Where the block computes."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of its parameters."""
        return next(self.parameters()).dtype

    def named(self, name: str) -> Any:
        """What stands under a dotted name of the model."""
        found: Any = self
        for piece in name.split("."):
            found = getattr(found, piece)
        return found

    def forward(self, *inputs: Any) -> Any:
        """Run the block on tensors, or on one tuple of tensors; returns a tensor or a tuple."""
        single: Any = inputs[0]
        state = cast("tuple[Any, ...]", single) if type(single) is tuple else inputs
        for value, sizes in zip(state, self._sizes, strict=False):
            _check(value, sizes)
        return super().forward(*state)


def _check(value: Tensor | Ragged, sizes: Sequence[tuple[int, int | None]]) -> None:
    if isinstance(value, Ragged):
        raise InvalidInputError(
            "an input has samples of several lengths, a model cut by mmplan init takes one",
            hint="pad them in the data set, with -100 in the target; mmplan.zoo.hf:causal_lm takes "
            "ragged text",
        )
    for size, (least, most) in zip(value.shape[1:], sizes, strict=True):
        if size < least or (most is not None and size > most):
            raise InvalidInputError(
                f"an input has shape {list(value.shape)}, the model was cut for "
                f"batch x {size_words(sizes)}",
                hint="give data of that shape, or run mmplan init again with a --sample of the "
                "other shape (a model of a library: with --length)",
            )


def size_words(sizes: Sequence[tuple[int, int | None]]) -> str:
    """The dimensions that an input may have, as in ``3 x 32 x (2 to 64)``."""
    words = [
        str(least) if least == most else f"({least} to {'any' if most is None else most})"
        for least, most in sizes
    ]
    return " x ".join(words) or "one number"


def assemble(model: nn.Module, steps: Sequence[StepSpec], *, sizes: Sizes = ()) -> LayerSequential:
    """The blocks of a model, which uses its tensors and knows their names in it.

    Args:
        model: the model.
        steps: of each block.
        sizes: of the inputs.
    """
    blocks: list[CutStep] = []
    for function, layer, names in steps:
        step = CutStep(function, model, names)
        step.layer = model.get_submodule(layer)
        blocks.append(step)
    blocks[0].expect(sizes)
    cut = LayerSequential(*blocks)
    cut.remember(model)
    return cut
