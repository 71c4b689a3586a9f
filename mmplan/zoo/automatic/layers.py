"""Which submodules of a model its blocks begin with."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mmplan.errors import InvalidInputError


def find_layers(model: nn.Module, lists: Sequence[str] = ()) -> list[str]:
    """Names of the layers: elements of the outermost lists of two or more; else the children.

    Args:
        model: to be cut.
        lists: names of its lists of layers, or of single modules; none: they are looked for.

    Raises:
        InvalidInputError: a name is none of a module, or the model cannot be cut anywhere.
    """
    if lists:
        return [layer for name in lists for layer in _named(model, name)]
    found = _outermost(model)
    if not found:
        # Without lists: the parts that it is written with.
        found = [name for name, child in model.named_children() if _is_trained(child)]
    if len(found) < 2:
        raise InvalidInputError(
            f"{type(model).__name__} has no list of layers, and not two parts with parameters",
            hint="name the modules that blocks shall begin with: --layers A,B,...",
        )
    return found


def _outermost(model: nn.Module, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        if _is_list(child):
            found += [f"{full}.{key}" for key, item in child.named_children() if _is_trained(item)]
        else:
            found += _outermost(child, f"{full}.")
    return found


def _is_list(module: nn.Module) -> bool:
    trained = [item for item in module.children() if _is_trained(item)]
    if isinstance(module, nn.ModuleList):
        return len(trained) > 1
    # A small Sequential of torch's own modules is a part of a layer.
    return (
        type(module) is nn.Sequential
        and len(trained) > 1
        and not any(type(item).__module__.startswith("torch.nn") for item in trained)
    )


def _is_trained(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _named(model: nn.Module, name: str) -> list[str]:
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList))
        raise InvalidInputError(
            f"--layers {name}: {type(model).__name__} has no such module",
            hint=f"its lists of layers: {known or 'none'}",
        ) from error
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return [f"{name}.{key}" for key, _ in module.named_children()]
    return [name]
