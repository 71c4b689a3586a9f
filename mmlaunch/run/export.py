"""``mmlaunch export``: a run's weights as the libraries load them that its models come from."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.distributed import KeyPath, write_distributed
from mmlaunch.checkpoint.exported_weights import (
    WeightSource,
    targets,
    write_weights,
)
from mmlaunch.checkpoint.folder import step_folders, write_synced
from mmlaunch.checkpoint.restore import open_checkpoint
from mmlaunch.checkpoint.tensorfile import TensorSpec, storage_error
from mmlaunch.run.status import CHECKPOINTS
from mmlaunch.session.optimizer import build_optimizer, rate_factor
from mmlaunch.session.state import OPTIMIZER_KIND
from mmplan.errors import InvalidInputError
from mmplan.schema.base import parse_json, read_text
from mmplan.schema.factories import build_loss, build_module
from mmplan.schema.settings import with_settings
from mmplan.schema.workload import Workload, load_workload

FORMATS = ("transformers", "dcp")
_MEND = "make room, then export again"


class SavedTensors(Protocol):
    """Tensors of a run, unsharded: a checkpoint's, or weights alone."""

    def names(self) -> list[str]:
        """Full names of the weights."""
        ...

    def kinds(self, name: str) -> list[str]:
        """Kinds that are stored of one name."""
        ...

    def spec(self, name: str, kind: str = "param") -> TensorSpec:
        """Type and shape."""
        ...

    def load_whole(self, name: str, kind: str = "param") -> Tensor:
        """One of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """What is exported.

    Attributes:
        path: the checkpoint's folder, or the file with the weights.
        step: after which; None where nothing says it.
        workload: of the run, with its settings.
        folder: the workload file's.
        saved: the tensors.
    """

    path: Path
    step: int | None
    workload: Workload
    folder: Path
    saved: SavedTensors

    @property
    def imports(self) -> list[str]:
        """The factories that are about to be imported."""
        parts = [*self.workload.modules.values(), *self.workload.losses.values()]
        return list(dict.fromkeys(part.factory for part in parts))

    def without(self, models: Sequence[Exported]) -> list[str]:
        """Modules with parameters of their own that are in no model."""
        written = {name for model in models for name in model.modules}
        modules = self.workload.modules.items()
        return [name for name, spec in modules if spec.share is None and name not in written]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A model that was written.

    Attributes:
        modules: of the workload that are parts of it; none for what losses are left with.
        folder: where.
        architecture: class that its config.json names; None without one.
        tensors: their number.
        size_bytes: of all of them.
        notes: what is to be known of it, in words.
    """

    modules: tuple[str, ...]
    folder: Path
    architecture: str | None
    tensors: int
    size_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Original:
    """One original model.

    Attributes:
        modules: of the workload that are parts of it.
        configuration: content of its config.json.
        stored: its names to those of the run.
        tied: its other names of some, to the first ones.
        shapes: of those that have another one in the run.
    """

    modules: list[str]
    configuration: dict[str, Any] | None = None
    stored: dict[str, str] = field(default_factory=dict[str, str])
    tied: dict[str, str] = field(default_factory=dict[str, str])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    notes: list[str] = field(default_factory=list[str])

    @property
    def architecture(self) -> str | None:
        """The class that loads it."""
        found = self.configuration or {}
        return found.get("_class_name") or next(iter(found.get("architectures") or ()), None)


def find_source(
    path: Path, *, step: int | None = None, workload: Path | None = None
) -> ExportSource:
    """Find the tensors and the workload of a run.

    Args:
        path: the run's folder, or a checkpoint's.
        step: of a run's folder that checkpoint; None: the last good one, or the final weights of
            a run that has ended.
        workload: its file; None: the one that the run's record names.

    Raises:
        InvalidInputError: there is no such checkpoint, it is damaged, or the workload is gone.
    """
    is_checkpoint = path in [folder for _, folder in step_folders(path.parent)]
    if is_checkpoint and step is not None:
        raise InvalidInputError(
            f"--step {step}: {path} is one checkpoint", hint="give the run's folder, or no --step"
        )
    run_dir = path.parent.parent if is_checkpoint else path
    record = _record(run_dir)
    if record is None and not is_checkpoint:
        raise InvalidInputError(
            f"{path} is neither a run's folder nor a checkpoint",
            hint=f"give the folder with run.json, or one of its {CHECKPOINTS}/step-N",
        )
    record = record or {}
    chosen = path if is_checkpoint else _chosen(run_dir, record, step)
    file = _workload_file(run_dir, record, workload)
    settings = record.get("set")
    stated = load_workload(file)
    if chosen.is_dir():
        checkpoint = open_checkpoint(chosen)
        saved, done = checkpoint, checkpoint.manifest.step
    else:
        saved, done = WeightSource(chosen), _int(record.get("steps"))
    return ExportSource(
        path=chosen,
        step=done,
        workload=with_settings(stated, settings if isinstance(settings, dict) else {}),
        folder=file.parent,
        saved=saved,
    )


def _record(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / "run.json"
    if not path.is_file():
        return None
    found = parse_json(read_text(path), path)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _chosen(run_dir: Path, record: Mapping[str, Any], step: int | None) -> Path:
    """A checkpoint's folder, or the file with the final weights."""
    found = dict(step_folders(run_dir / CHECKPOINTS))
    if step is not None and step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise InvalidInputError(
            f"{run_dir} has no checkpoint of step {step}", hint=f"its checkpoints: {there}"
        )
    if step is not None:
        return found[step]
    marked = _int(record.get("last_good"))
    newest = marked if marked in found else max(found, default=None)
    ended = record.get("ended")
    names = ("final.safetensors", "final.safetensors.index.json")
    final = next((run_dir / name for name in names if (run_dir / name).is_file()), None)
    done = isinstance(ended, dict) and cast("dict[str, Any]", ended).get("how") == "done"
    # Weights of a run that has ended; its last checkpoint has them too, with the optimizer's state.
    if final is not None and (newest is None or (done and newest != record.get("steps"))):
        return final
    if newest is None:
        raise InvalidInputError(
            f"{run_dir} has no checkpoint yet, and no final weights",
            hint="runs save with --save-every N, and at their end",
        )
    return found[newest]


def _workload_file(run_dir: Path, record: Mapping[str, Any], given: Path | None) -> Path:
    named = record.get("workload")
    path = given or (run_dir / named if isinstance(named, str) else None)
    if path is None or not path.is_file():
        what = "none is named" if path is None else f"{path} is not there"
        raise InvalidInputError(
            what if given is not None else f"{run_dir / 'run.json'}: its workload: {what}",
            hint="name the workload's file with --workload FILE",
        )
    return path


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def check_kind(kind: str) -> None:
    """Refuse a format that is not there.

    Raises:
        InvalidInputError: names those that are.
    """
    if kind not in FORMATS:
        raise InvalidInputError(f"--format {kind}: unknown", hint=f"one of {', '.join(FORMATS)}")


def check_output(folder: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        InvalidInputError: it does, or it is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise InvalidInputError(f"-o {folder} {what}", hint="name a folder that does not exist")


def export(source: ExportSource, output: Path, *, kind: str = "transformers") -> list[Exported]:
    """Write a run's models, each as its library loads it, all or none.

    A single model is written into the folder itself, several ones into folders of their modules'
    names. Parameters of losses that are in no model go to ``losses``.

    Args:
        source: the run.
        output: the folder; it does not exist, or is empty.
        kind: ``transformers`` also for models of diffusers and plain ones; ``dcp``.

    Raises:
        InvalidInputError: the folder holds something, or the tensors are not the workload's.
        UnfitEnvironmentError: disk full, or another failure of the file system.
    """
    check_output(output)
    models = _models(source)
    several = sum(1 for model in models if model.modules) > 1
    temp = output.with_name(f".{output.name}.tmp")
    done: list[Exported] = []
    try:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        for model in models:
            name = "+".join(model.modules) or "losses"
            inner = name if several or not model.modules else "."
            (temp / inner).mkdir(exist_ok=True)
            write = _write_library if kind == "transformers" else _write_distributed
            num_bytes = write(source, model, temp / inner)
            done.append(
                Exported(
                    modules=tuple(model.modules),
                    folder=output / inner,
                    architecture=model.architecture,
                    tensors=len(model.stored),
                    size_bytes=num_bytes,
                    notes=tuple(model.notes),
                )
            )
        temp.rename(output)
    except OSError as error:
        needed = sum(
            source.saved.spec(name).size_bytes for m in models for name in m.stored.values()
        )
        raise storage_error(
            error, what="the export", folder=output.parent, needed_bytes=needed, mend=_MEND
        ) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return done


def _models(source: ExportSource) -> list[_Original]:
    """The original models of a workload's modules, and what is left of the losses."""
    models: list[_Original] = []
    for owner, spec in source.workload.modules.items():
        if spec.share is None:
            _add_module(models, source, owner)
    left = _Original(modules=[])
    expected = [_names_of_class(model) for model in models]
    for loss, spec in source.workload.losses.items():
        feeding = {str(item).partition(".")[0] for item in spec.inputs}
        for name, run_name in _stored(source, f"losses.{loss}", _loss_of(source, loss)).items():
            # CLIP's scale, say, is the whole model's own.
            shape = source.saved.spec(run_name).shape
            homes = [
                (model, names[name])
                for model, names in zip(models, expected, strict=True)
                if feeding.intersection(model.modules)
                and name in names
                and name not in model.stored
                and prod(names[name]) == prod(shape)
            ]
            if len(homes) == 1:
                model, model.shapes[name] = homes[0][0], homes[0][1]
                model.stored[name] = run_name
            else:
                left.stored[run_name] = run_name
    for model, names in zip(models, expected, strict=True):
        _compare(model, names)
    return [*models, *([left] if left.stored else [])]


def _add_module(models: list[_Original], source: ExportSource, owner: str) -> None:
    """Add a module to the model that it is a part of, or as one of its own."""
    module = _skeleton(lambda **on: build_module(source.workload, owner, source.folder, **on))
    original: Mapping[str, str] = getattr(module, "source_names", {})
    found = _stored(source, owner, module)
    stored = {original.get(name, name): run_name for name, run_name in found.items()}
    configuration: dict[str, Any] | None = getattr(module, "configuration", None)
    if not stored:
        return
    for model in models:
        same = configuration is not None and model.configuration == configuration
        if same and not stored.keys() & model.stored.keys():
            break
    else:
        model = _Original(modules=[], configuration=configuration)
        models.append(model)
    model.modules.append(owner)
    model.stored |= stored
    model.tied |= getattr(module, "tied_names", {})


def _loss_of(source: ExportSource, name: str) -> nn.Module:
    return _skeleton(lambda **on: build_loss(source.workload, name, source.folder, **on))


def _skeleton(build: Callable[..., nn.Module]) -> nn.Module:
    """A module without memory; with it, where its factory cannot do without."""
    with suppress(InvalidInputError):
        return build(device="meta")
    return build()


def _stored(source: ExportSource, owner: str, module: nn.Module) -> dict[str, str]:
    """Names of a module's tensors, the first of each, to those of the run.

    None where the run has nothing of that module.

    Raises:
        InvalidInputError: one is not stored though others are, or with another shape.
    """
    names: dict[Tensor, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    found: dict[str, str] = {}
    for tensor, own in names.items():
        run_names = [f"{owner}.{name}" for name in own]
        run_name = next((name for name in run_names if source.saved.kinds(name)), None)
        if run_name is not None:
            shape = source.saved.spec(run_name).shape
            if shape != tuple(tensor.shape):
                raise _other_workload(source, f"{run_name} with shape {list(shape)}", tensor)
            found[own[0]] = run_name
    lost = next((own[0] for own in names.values() if own[0] not in found), None)
    if lost is not None and any(name.startswith(f"{owner}.") for name in source.saved.names()):
        raise _other_workload(source, f"no {owner}.{lost}", None)
    return found


def _other_workload(source: ExportSource, has: str, tensor: Tensor | None) -> InvalidInputError:
    want = "" if tensor is None else f", the workload's is {list(tensor.shape)}"
    return InvalidInputError(
        f"{source.path} holds {has}{want}",
        hint="name the workload that was trained with --workload FILE",
    )


def _names_of_class(model: _Original) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the model's class has, by the names here; none of no class."""
    if model.architecture is None:
        return {}
    configuration = cast("dict[str, Any]", model.configuration)
    try:
        with torch.device("meta"):
            if "_class_name" in configuration:
                built = _class("diffusers", model.architecture).from_config(configuration)
            else:
                kind = _class("transformers", model.architecture)
                built = kind(kind.config_class.from_dict(configuration))
    except Exception as error:  # whatever the library raises: the weights are whole without it
        said = str(error).strip().splitlines() or [type(error).__name__]
        model.notes.append(f"not compared with {model.architecture}: {said[0]}")
        return {}
    # A part of a larger model is loaded with the part's name, or without.
    prefix = f"{getattr(built, 'base_model_prefix', '')}."
    return {
        name if name in model.stored or prefix + name not in model.stored else prefix + name: tuple(
            tensor.shape
        )
        for name, tensor in targets(built)
    }


def _class(library: str, name: str) -> Any:
    return getattr(importlib.import_module(library), name)


def _compare(model: _Original, names: Mapping[str, tuple[int, ...]]) -> None:
    """Note how a model's tensors differ from those of its class."""
    if names:
        _note(model, [n for n in names if n not in model.stored], "are not among the run's")
        _note(model, [n for n in model.stored if n not in names], "are unknown to it")


def _note(model: _Original, names: list[str], what: str) -> None:
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        model.notes.append(f"{model.architecture}: {len(names)} tensors {what}: {shown}")


def _write_library(source: ExportSource, model: _Original, folder: Path) -> int:
    """Safetensors, and config.json where there is one; bytes of the tensors."""
    specs = [_spec(source, model, name) for name in model.stored]

    def read(name: str) -> Tensor:
        shape = _spec(source, model, name).shape
        return source.saved.load_whole(model.stored[name]).reshape(shape)

    configuration = model.configuration
    stem = "diffusion_pytorch_model" if "_class_name" in (configuration or {}) else "model"
    path = folder / f"{stem}.safetensors"
    write_weights(path, specs, read, mend=_MEND)
    if configuration is not None:
        written = json.dumps(_with_type(configuration, specs), indent=2, sort_keys=True) + "\n"
        write_synced(folder / "config.json", [written.encode()])
    return sum(spec.size_bytes for spec in specs)


def _spec(source: ExportSource, model: _Original, name: str, kind: str = "param") -> TensorSpec:
    stored = source.saved.spec(model.stored[name], kind)
    # Beside moments of the parameter's shape an optimizer has counts of steps.
    count = kind == f"{OPTIMIZER_KIND}step"
    shape = stored.shape if count else model.shapes.get(name, stored.shape)
    return TensorSpec(name=name, dtype=stored.dtype, shape=shape)


def _with_type(configuration: Mapping[str, Any], specs: list[TensorSpec]) -> dict[str, Any]:
    """The configuration with the type of the weights, to which transformers would cast them."""
    if "_class_name" in configuration:
        return dict(configuration)

    def without(config: Mapping[str, Any]) -> dict[str, Any]:
        parts = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
        return {
            k: without(cast("dict[str, Any]", v)) if isinstance(v, dict) else v
            for k, v in parts.items()
        }

    types = {spec.dtype for spec in specs if spec.dtype.is_floating_point}
    one = {"dtype": str(types.pop()).removeprefix("torch.")} if len(types) == 1 else {}
    return without(configuration) | one


def _write_distributed(source: ExportSource, model: _Original, folder: Path) -> int:
    """A folder of torch.distributed.checkpoint; bytes of its tensors.

    Its dict is ``{"model": ..., "optim": ...}`` of ``get_state_dict`` of
    torch.distributed.checkpoint.state_dict.
    """
    specs: dict[KeyPath, TensorSpec] = {}

    def hollow(path: KeyPath, name: str, kind: str = "param") -> Tensor:
        specs[path] = spec = _spec(source, model, name, kind)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def read(path: KeyPath) -> Tensor:
        spec = specs[path]
        kind = "param" if path[0] == "model" else f"{OPTIMIZER_KIND}{path[-1]}"
        return source.saved.load_whole(model.stored[spec.name], kind).reshape(spec.shape)

    names = {name: name for name in model.stored}
    names |= {other: name for other, name in model.tied.items() if name in names}
    state: dict[str, dict[str, Tensor]] = {}
    for name, run_name in model.stored.items():
        for kind in source.saved.kinds(run_name):
            if kind.startswith(OPTIMIZER_KIND):
                key = kind.removeprefix(OPTIMIZER_KIND)
                path = "optim", "state", name, key
                state.setdefault(name, {})[key] = hollow(path, name, kind)
    content = {
        "model": {other: hollow(("model", other), name) for other, name in names.items()},
        "optim": {"state": state, "param_groups": _groups(source, model, list(state))},
    }
    write_distributed(folder, content, read)
    return sum(spec.size_bytes for spec in specs.values())


def _groups(source: ExportSource, model: _Original, trained: Sequence[str]) -> list[dict[str, Any]]:
    """The optimizer's groups, with the learning rates of the next step."""
    train = source.workload.train
    hollow = {nn.Parameter(torch.empty(0, device="meta")): name for name in trained}
    named = [(model.stored[name], parameter) for parameter, name in hollow.items()]
    optimizer = build_optimizer(train, named, sharded=False)
    return [
        {
            **group,
            "params": [hollow[parameter] for parameter in group["params"]],
            "lr": group["lr"] * rate_factor(train, source.step or 0),
        }
        for group in (optimizer.param_groups if optimizer else ())
    ]
