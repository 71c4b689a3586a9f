"""A workload's folder for a model: workload.yaml, model.py, config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.schema.base import write_text
from mmplan.schema.factories import import_factory
from mmplan.zoo.automatic.blocks import Uncut
from mmplan.zoo.automatic.families import FAMILIES, Family, stored_scales
from mmplan.zoo.automatic.layers import find_layers
from mmplan.zoo.automatic.pretrained import (
    PretrainedRecipe,
    architecture,
    build_pretrained,
    read_config,
    recipe,
    without_effect,
)
from mmplan.zoo.automatic.source import CutSource, cut_source
from mmplan.zoo.synthetic import noise

_SAMPLES = 3
# Far above what rounding does in another order, far below what another sample does.
_SLACK = 1e-3
MODULE = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What was written.

    Attributes:
        workload: the file.
        files: all, that one among them.
        blocks: of the module.
        originals: what ``mmlaunch verify --original`` takes.
        notes: for the user.
    """

    workload: Path
    files: tuple[Path, ...]
    blocks: int
    originals: tuple[str, ...]
    notes: tuple[str, ...]

    def remove(self) -> None:
        """Take back what was written, so that the same command can be given again."""
        for file in self.files:
            file.unlink(missing_ok=True)
        folder = self.workload.parent
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A model: how it is made here, how model.py makes it, and how it is trained."""

    name: str
    make: Callable[[], nn.Module]
    code: str
    imports: str
    recipe: PretrainedRecipe
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...] | None
    config: dict[str, Any] | None = None
    init: Path | None = None
    notes: tuple[str, ...] = ()


def begin(
    source: str, folder: Path, *, sample: str | None, layers: Sequence[str], length: int | None
) -> Begun:
    """Write a folder with a workload that trains a model on synthetic data.

    Args:
        source: folder of a model or its config.json; or ``module:callable`` of a plain model.
        folder: new, or empty.
        sample: ``module:callable`` of the plain model's inputs, where its callable gives none.
        layers: names of lists of layers to cut at; none: they are looked for.
        length: tokens of a text.

    Raises:
        InvalidInputError: the source is no model, or cannot be cut by itself.
        UnfitEnvironmentError: its library is missing.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(
            f"-o {folder} exists and is not empty", hint="name a folder that does not exist"
        )
    is_path = Path(source).exists() or ":" not in source
    if is_path and architecture(config := read_config(Path(source))) in FAMILIES:
        return _begin_family(Path(source), config, folder, layers, length)
    found = _pretrained(Path(source), length) if is_path else _plain(source, sample, folder)
    uncut = Uncut(
        found.make(), found.names, output=found.recipe.output or None, options=found.recipe.options
    )
    shape = _output_shape(found)
    cut = cut_source(uncut, found.inputs, find_layers(uncut.model, layers))
    return _write(found, cut, shape, folder)


def _begin_family(
    source: Path, config: dict[str, Any], folder: Path, layers: Sequence[str], length: int | None
) -> Begun:
    """A workload of several modules, each by a factory of mmplan.zoo."""
    name = architecture(config)
    if layers:
        raise InvalidInputError(
            f"--layers {','.join(layers)}: {name} is cut at the layers of its parts",
            hint="leave --layers out",
        )
    config |= {"architectures": [name]}
    family = FAMILIES[name]
    # Shapes alone are looked at.
    with torch.device("meta"):
        parts = {name: part.build(config) for name, part in family.parts.items()}
        fields = family.fields(build_pretrained(config), parts, length)
    weights = source.is_dir() and any(source.glob("*.safetensors"))
    init = source.resolve() if weights else None
    files = {
        "model.py": _family_model(name, family),
        "workload.yaml": _family_workload(name, family, fields, init, folder),
        "config.json": json.dumps(config, indent=2) + "\n",
    }
    for file, text in files.items():
        write_text(folder / file, text)
    return Begun(
        workload=folder / "workload.yaml",
        files=tuple(folder / file for file in files),
        blocks=sum(map(len, parts.values())),
        originals=("model:original",),
        notes=tuple(
            f"{part} is not trained, as this kind of model usually is: frozen in workload.yaml"
            for part, of in family.parts.items()
            if of.is_frozen
        ),
    )


def _pretrained(source: Path, length: int | None) -> _Source:
    config = read_config(source)
    model = build_pretrained(config)
    config |= {} if "_class_name" in config else {"architectures": [architecture(config)]}
    how = recipe(config, model, length)
    weights = list(source.glob("*.safetensors")) if source.is_dir() else []
    return _Source(
        name=architecture(config),
        make=lambda: build_pretrained(config),
        code='build_pretrained(Path(__file__).with_name("config.json"))',
        imports="from mmplan.zoo.automatic.pretrained import build_pretrained\n",
        recipe=how,
        inputs=_drawn(how.inputs),
        names=tuple(how.inputs),
        config=config,
        init=source.resolve() if weights else None,
        notes=tuple(without_effect(model)),
    )


def _drawn(fields: Mapping[str, Mapping[str, Any]]) -> tuple[Tensor, ...]:
    data = noise(fields, samples=_SAMPLES)
    samples = [data[index] for index in range(_SAMPLES)]
    return tuple(torch.stack([cast(Tensor, s[name]) for s in samples]) for name in fields)


def _plain(source: str, sample: str | None, folder: Path) -> _Source:
    make = import_factory(source, Path.cwd(), field="SOURCE")

    def made() -> Any:
        try:
            return make()
        except Exception as error:
            raise InvalidInputError(
                f"SOURCE {source} raised {type(error).__name__}: {error}",
                hint="name a function without arguments that makes the model",
            ) from error

    first = made()
    pair = cast("tuple[Any, ...]", first) if type(first) is tuple and len(first) == 2 else None
    if sample is not None:
        given = import_factory(sample, Path.cwd(), field="--sample")()
    elif pair is not None:
        given = pair[1]
    else:
        raise InvalidInputError(
            f"SOURCE {source} makes a model alone, whose inputs are not known",
            hint="return (model, inputs), or give --sample module:callable of the inputs",
        )
    if not isinstance(pair[0] if pair else first, nn.Module):
        raise InvalidInputError(
            f"SOURCE {source} makes a {type(pair[0] if pair else first).__name__}, no nn.Module",
            hint="name a function that returns the model, or (model, inputs)",
        )
    names, values = _named_inputs(given)
    fields = {
        name: {"shape": list(value.shape[1:]), **_kind(value)}
        for name, value in zip(names, values, strict=True)
    }
    module, _, attribute = source.partition(":")
    top = attribute.partition(".")[0]
    return _Source(
        name=attribute,
        make=lambda: made()[0] if pair else made(),
        code=f"{attribute}()" + ("[0]" if pair else ""),
        imports=f"\n# Where {module} is.\nsys.path.append({str(Path.cwd())!r})\n"
        f"from {module} import {top}  # noqa: E402\n",
        recipe=PretrainedRecipe(inputs=fields, output="", loss=""),
        inputs=values,
        names=names if isinstance(given, dict) else None,
    )


def _kind(value: Tensor) -> dict[str, Any]:
    """What noise of the same kind is made of."""
    if value.is_floating_point():
        return {}
    if value.dtype == torch.bool:
        return {"mask": True}
    return {"vocab": max(int(value.max()) + 1, 2)}


def _named_inputs(given: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    named: dict[str, Any] = (
        dict(cast("dict[str, Any]", given))
        if isinstance(given, dict)
        else {f"x{i}": v for i, v in enumerate(given if isinstance(given, tuple) else (given,))}
    )
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) < 2:
            raise InvalidInputError(
                f"the sample's {name} is no tensor of two or more samples, batch first",
                hint="give a tuple or a dict of tensors [samples, ...]",
            )
    return tuple(named), tuple(named.values())


def _output_shape(found: _Source) -> list[int]:
    """Of one sample's output, which no other sample may change."""
    how = found.recipe
    uncut = Uncut(found.make().eval(), found.names, output=how.output or None, options=how.options)
    with torch.no_grad():
        output = uncut(*found.inputs)
        longer = uncut(*(torch.cat([x, x[-1:]]) for x in found.inputs))
    if not isinstance(output, Tensor) or len(output) != len(found.inputs[0]):
        raise InvalidInputError(
            f"{found.name} gives a {type(output).__name__}, not one tensor with the samples first",
            hint="wrap it in a module whose forward returns the tensor that the loss takes",
        )
    slack = _SLACK * float(output.abs().max())
    same = torch.isclose(longer[: len(output)], output, rtol=_SLACK, atol=slack, equal_nan=True)
    if not same.all():
        raise InvalidInputError(
            f"{found.name}'s output for a sample depends on the other samples, or on chance",
            hint="a batch is cut into micro-batches: put what mixes samples into a loss with "
            "cross_sample: true",
        )
    return list(output.shape[1:])


def _trained(found: _Source, shape: list[int]) -> PretrainedRecipe:
    """The recipe, with a loss by the output's shape where the source does not say."""
    how = found.recipe
    whole = not any(x.is_floating_point() for x in found.inputs)
    if how.loss == "" and whole and len(shape) == 2:
        target = {"shape": shape[:1], "vocab": shape[1]}
        return PretrainedRecipe(
            inputs=how.inputs,
            output="",
            loss="token_cross_entropy",
            loss_args={"shift": False},
            target=target,
        )
    if how.loss == "" and len(shape) == 1 and shape[0] > 1:
        target = {"shape": [], "vocab": shape[0]}
        return PretrainedRecipe(inputs=how.inputs, output="", loss="cross_entropy", target=target)
    return how


def _write(found: _Source, cut: CutSource, shape: list[int], folder: Path) -> Begun:
    how = _trained(found, shape)
    files = {"model.py": _model(found, cut), "workload.yaml": _workload(found, how, shape, folder)}
    if found.config is not None:
        files["config.json"] = json.dumps(found.config, indent=2) + "\n"
    for name, text in files.items():
        write_text(folder / name, text)
    unused = ", ".join(cut.unused[:3]) + (", ..." if len(cut.unused) > 3 else "")
    notes = [f"{len(cut.unused)} parameters take no part in forward: {unused}"] if unused else []
    if found.config is None:
        sizes = zip(found.recipe.inputs, cut.ranges, strict=True)
        notes.append(f"sizes of a sample: {', '.join(f'{n} {size}' for n, size in sizes)}")
    if not how.loss:
        notes.append("the loss is the mean squared error against noise: choose yours there")
    return Begun(
        workload=folder / "workload.yaml",
        files=tuple(folder / name for name in files),
        blocks=cut.blocks,
        originals=(f"{MODULE}=model:original",),
        notes=(*found.notes, *notes),
    )


def _model(found: _Source, cut: CutSource) -> str:
    how = found.recipe
    words = [found.code]
    words += [repr(list(found.names))] if found.names is not None else []
    words += [f"output={how.output!r}"] if how.output else []
    words += [f"options={how.options!r}"] if how.options else []
    return f'''"""{found.name}, cut into {cut.blocks} blocks. Written by `mmplan init`.

`model` makes the blocks, `original` the model itself, against which
`mmlaunch verify PLAN --original {MODULE}=model:original` holds them. The functions are what the
model's forward does around its layers, for the sizes of this configuration: after a change
of the model run `mmplan init` again.
"""
# ruff: noqa
# pyright: basic

import operator
import sys
from pathlib import Path

import torch
from torch import nn

from mmplan.zoo.automatic.blocks import Uncut, assemble
{found.imports}
aten = torch.ops.aten


{cut.functions}


# Of each block: its function, its layer, and what else it uses of the model.
STEPS = {cut.steps}
# Of each input: the least and the most of its dimensions, without the batch.
SIZES = {cut.sizes}


def original():
    """The model, with what the loss takes as its output."""
    return Uncut({", ".join(words)})


def model():
    """The model's blocks."""
    return assemble(original().model, STEPS, sizes=SIZES)
'''


def _family_model(name: str, family: Family) -> str:
    def made(part: str) -> str:
        of = family.parts[part]
        words = ["CONFIG", *(f"{k}={v!r}" for k, v in of.options.items())]
        return f"def {part}():\n    return {of.factory}({', '.join(words)})"

    functions = "\n\n\n".join(map(made, family.parts))
    modules = ", ".join(sorted({of.factory.partition(".")[0] for of in family.parts.values()}))
    return f'''"""{name} in its parts: {", ".join(family.parts)}. Written by `mmplan init`.

Each function makes the blocks of a part, `original` the whole model, whose forward gives its loss
and against which `mmlaunch verify PLAN --original model:original` holds them.
"""
# pyright: basic

from pathlib import Path

from mmplan.zoo import {modules}
from mmplan.zoo.automatic.families import WithLoss
from mmplan.zoo.automatic.pretrained import build_pretrained, read_config

CONFIG = read_config(Path(__file__).with_name("config.json"))


{functions}


def original():
    return {family.original}(build_pretrained(CONFIG), {dict(family.options)!r})
'''


def _family_workload(
    name: str,
    family: Family,
    fields: Mapping[str, Any],
    init: Path | None,
    folder: Path,
) -> str:
    def module(part: str) -> str:
        of = family.parts[part]
        words = [f'factory: "model:{part}"', f"inputs: [{', '.join(of.takes)}]"]
        words += ["frozen: true"] if of.is_frozen else []
        words += [f"init: {_flow(str(init))}"] if init else []
        return f"  {part}: {{{', '.join(words)}}}"

    modules = "\n".join(map(module, family.parts))
    scales = stored_scales(family, init) if init else {}
    args = f"\n    args: {_flow(scales)}" if scales else ""
    pairs = "\n    cross_sample: true\n    sync_batch: 8" if family.is_cross_sample else ""
    about = "each sample's pair against the pairs of all sync_batch samples"
    return f"""# {name}, written by `mmplan init`; see docs/your-hugging-face-model.md.
version: 1
name: {_flow(folder.resolve().name)}
batch: 8
modules:
{modules}
losses:
  # {about if family.is_cross_sample else _ABOUT[family.loss]}
  {family.loss}:
    factory: "mmplan.zoo.losses:{family.loss}"
    inputs: [{", ".join(family.loss_inputs)}]{pairs}{args}
{_data(fields)}"""


_ABOUT = {
    "token_cross_entropy": "next token, or the token at each place (shift: false); -100: no target",
    "cross_entropy": "class of each sample",
    "mse": "mean squared error against a field of the output's shape",
}


def _workload(found: _Source, how: PretrainedRecipe, shape: list[int], folder: Path) -> str:
    loss = how.loss or "mse"
    fields = {**how.inputs, "target": how.target or {"shape": shape}}
    args = f", args: {_flow(how.loss_args)}" if how.loss_args else ""
    init = f"\n    init: {_flow(str(found.init))}" if found.init else ""
    return f"""# {found.name}, written by `mmplan init`; see docs/your-hugging-face-model.md.
version: 1
name: {_flow(folder.resolve().name)}
batch: 8
modules:
  {MODULE}:
    factory: "model:model"
    inputs: {_flow(list(how.inputs))}{init}
losses:
  # {_ABOUT[loss]}
  loss: {{factory: "mmplan.zoo.losses:{loss}", inputs: [{MODULE}, target]{args}}}
{_data(fields)}"""


def _data(fields: Mapping[str, Any]) -> str:
    """The workload's data and training."""
    lines = "\n".join(f"      {name}: {_flow(spec)}" for name, spec in fields.items())
    return f"""# SYNTHETIC: noise in the right shapes. Put your own data set here: a factory of a
# map-style dataset, whose samples are dicts of tensors with these names and shapes; see
# docs/data.md.
data:
  factory: "mmplan.zoo.synthetic:noise"
  args:
    samples: 4096
    fields:
{_indented(lines)}
train: {{optimizer: AdamW, optimizer_args: {{lr: 1.0e-4}}, steps: 10}}
"""


def _indented(lines: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in lines.split("\n"))


def _flow(value: Any) -> str:
    """YAML in one line: JSON is YAML."""
    return json.dumps(value)
