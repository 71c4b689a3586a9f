"""A model that was cut into blocks against itself, uncut.

Both get equal weights and one batch, in evaluation mode, in which no dropout is drawn. Outputs or
losses and every parameter's gradient must be equal, up to rounding as ``verify`` measures it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from mmlaunch.session.reference import Reference, Value
from mmlaunch.session.verify import Difference, ReportedElements, Rounding
from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.program.model import Program
from mmplan.schema.factories import dtype_of, import_factory
from mmplan.schema.workload import TaskView, Workload, resolve_tasks

_OPTION = "--original"


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalVerdict:
    """Result of a comparison with the uncut model.

    Attributes:
        compared: outputs or losses, and gradients.
        share: the largest part of what rounding allows that a difference takes.
        differences: those above it; of outputs and losses first, then the largest share.
    """

    compared: int
    share: float
    differences: tuple[Difference, ...]


def compare_original(
    workload: Workload, folder: Path, program: Program, spec: str
) -> OriginalVerdict:
    """Hold the workload's modules against the uncut model.

    Args:
        workload: has the modules.
        folder: the workload file's folder.
        program: of the plan; says which tasks there are.
        spec: ``package.module:callable`` of the whole model, whose forward takes the task's data
            fields by name and gives its weighted loss, or a dict of unweighted ones; or
            ``MODULE=package.module:callable``, whose forward takes the module's inputs and gives
            its output. The callable makes the model; it is given those of the module's ``args``
            that it takes.

    Raises:
        InvalidInputError: no such module or callable, a model that draws random numbers, or a
            parameter that has no counterpart.
    """
    name, equals, factory = spec.rpartition("=")
    if equals and name not in workload.modules:
        raise InvalidInputError(
            f"{_OPTION} {spec}: the workload has no module {name!r}",
            hint=f"its modules are {', '.join(workload.modules)}",
        )
    if ":" not in factory:
        raise InvalidInputError(
            f"{_OPTION} {spec}: {factory!r} is no package.module:callable",
            hint=f"{_OPTION} model:MyModel, or {_OPTION} MODULE=model:MyModel",
        )
    made = import_factory(factory, folder, field=_OPTION)
    original = _made(made, workload.modules[name].args if name else {}, factory)
    found = _Comparison(workload, folder, program, original, factory)
    if name:
        found.module(name)
    else:
        found.model()
    return OriginalVerdict(
        compared=found.compared,
        share=found.share,
        # The first cause first: gradients differ where outputs do.
        differences=tuple(
            sorted(found.differences, key=lambda item: (item.what == "gradient", -item.share))
        ),
    )


def _made(factory: Any, args: Mapping[str, Any], spec: str) -> nn.Module:
    try:
        taken = inspect.signature(factory).parameters.values()
    except ValueError:  # a class written in C
        taken = ()
    every = any(item.kind is item.VAR_KEYWORD for item in taken)
    names = {item.name for item in taken}
    try:
        model = factory(**{k: v for k, v in args.items() if every or k in names})
    except MMPlanError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"{_OPTION}: {spec} raised {type(error).__name__}: {error}",
            hint="name a function that makes the model without arguments",
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"{_OPTION}: {spec} made a {type(model).__name__}, not an nn.Module",
            hint="name the model's class, or a function that makes the model",
        )
    return model


class _Comparison:
    """The cut modules and the original on one batch: a sync batch, or the task's."""

    def __init__(
        self, workload: Workload, folder: Path, program: Program, original: nn.Module, spec: str
    ) -> None:
        precision = "fp64" if workload.train.precision == "fp64" else "fp32"
        train = workload.train.model_copy(update={"precision": precision})
        # Losses across samples see one sync batch, as the original does.
        sizes = {name: view.period for name, view in resolve_tasks(workload).items()}
        tasks = {
            name: task.model_copy(update={"batch": sizes[name]})
            for name, task in workload.tasks.items()
        }
        batch = workload.batch if tasks else next(iter(sizes.values()))
        small = workload.model_copy(update={"train": train, "tasks": tasks, "batch": batch})
        self._reference = Reference(workload=small, folder=folder, program=program)
        self._workload, self._spec = small, spec
        self._original = original.to(dtype_of(precision))
        for module in (*self._reference.modules.values(), *self._reference.losses.values()):
            _without_dropout(module)
        _without_dropout(self._original)
        self.compared, self.share = 0, 0.0
        self.differences: list[Difference] = []

    def model(self) -> None:
        """The whole model: the losses of its only task, and all gradients."""
        if len(self._reference.tasks) > 1:
            raise InvalidInputError(
                f"{_OPTION} {self._spec}: the plan has {len(self._reference.tasks)} tasks, and a "
                "whole model is held against one",
                hint=f"hold each module: {_OPTION} MODULE=package.module:callable",
            )
        (task,) = self._reference.tasks.values()
        names = self._copied([*self._reference.modules], losses=True)
        total = self._reference.step()
        rounding = self._rounding(total)
        given = self._call((), self._reference.fields(task.name))
        losses = self._losses_of(given, task)
        weights = {name: self._workload.losses[name].weight for name in losses}
        expected = {name: self._reference.values[task.name, name] for name in losses}
        if isinstance(given, Tensor):
            losses, weights, expected = (
                {"loss": given},
                {"loss": 1.0},
                {"loss": total / task.weight},
            )
        value = torch.zeros((), dtype=torch.float64)
        for name, loss in losses.items():
            error = abs(float(loss.detach()) - expected[name]) / max(abs(expected[name]), 1e-300)
            self._note(name, "loss", error, rounding.loss)
            value = value + task.weight * weights[name] * loss
        self._compare_gradients(value, names, rounding)

    def module(self, name: str) -> None:
        """One module: its output, and the gradients of a random sum of the output."""
        tasks = [view for view in self._reference.tasks.values() if name in view.inputs]
        if not tasks:
            raise InvalidInputError(
                f"{_OPTION}: no task of the plan has the module {name}",
                hint="choose a module that the plan trains",
            )
        owner = self._workload.modules[name].share or name
        names = self._copied([owner], losses=False)
        self._reference.step()
        self._forget_gradients()
        arguments = self._reference.inputs_of(tasks[0].name, name)
        cut = self._reference.modules[owner]

        def run() -> list[Tensor]:
            given: tuple[Any, ...] = tuple(arguments)
            for block in cut:
                given = (block(*given),)
            return list(_tensors(given[0]))

        outputs = run()
        weights = _weights_for(outputs)
        _weighted(outputs, weights).backward()
        rounding = self._rounding(0.0, lambda: float(_backward(_weighted(run(), weights))))
        found = list(_tensors(self._call(arguments, {})))
        if len(found) != len(outputs):
            raise InvalidInputError(
                f"{_OPTION} {self._spec} gives {len(found)} tensors, module {name} {len(outputs)}",
                hint="wrap the model so that its forward gives what the module gives",
            )
        for index, (mine, its) in enumerate(zip(outputs, found, strict=True)):
            label = name if len(outputs) == 1 else f"{name}.{index}"
            same = mine.shape == its.shape
            size = float(mine.detach().double().abs().max()) or 1.0
            error = float((mine - its).detach().double().abs().max()) / size if same else torch.inf
            self._note(label, "output", error, _OUTPUT_UNITS * torch.finfo(mine.dtype).eps)
            if not same:
                return
        self._compare_gradients(_weighted(found, weights), names, rounding)

    def _call(self, arguments: Sequence[Value], fields: Mapping[str, Value]) -> Any:
        before = torch.get_rng_state()
        try:
            given = self._original(*arguments, **fields)
        except Exception as error:
            what = "the data fields " + ", ".join(fields) if fields else "the module's inputs"
            raise InvalidInputError(
                f"{_OPTION} {self._spec}: its forward raised {type(error).__name__}: {error}",
                hint=f"its forward takes {what}; wrap it where it does not",
            ) from error
        if self._reference.draws or not torch.equal(before, torch.get_rng_state()):
            side = "the workload's modules draw" if self._reference.draws else "its forward draws"
            raise InvalidInputError(
                f"{_OPTION} {self._spec}: {side} random numbers in evaluation mode too",
                hint="let them depend on self.training, as nn.Dropout does",
            )
        return given

    def _losses_of(self, given: Any, task: TaskView) -> dict[str, Tensor]:
        """The original's losses by name; none where it gives their sum."""
        if isinstance(given, Tensor):
            return {}
        if isinstance(given, Mapping):
            losses = cast("Mapping[str, Any]", given)
            if set(losses) == set(task.loss_inputs):
                return {name: losses[name] for name in task.loss_inputs}
        raise InvalidInputError(
            f"{_OPTION} {self._spec}: its forward gives a {type(given).__name__}",
            hint="give one tensor, the weighted sum of the task's losses, or a dict of "
            f"{', '.join(task.loss_inputs)}",
        )

    def _copied(self, owners: Sequence[str], *, losses: bool) -> dict[str, str]:
        """Copy the cut's parameters and buffers; full name to the original's."""
        cut: dict[str, tuple[Tensor, list[str]]] = {}
        for owner in owners:
            module = self._reference.modules[owner]
            sources: Mapping[str, str] = getattr(module, "source_names", {})
            for name, tensor in _named(module):
                own = list(dict.fromkeys([sources.get(name, name), name]))
                cut[f"{owner}.{name}"] = tensor, [*own, *(f"{owner}.{n}" for n in own)]
        for loss, module in self._reference.losses.items() if losses else ():
            for name, tensor in _named(module):
                cut[f"losses.{loss}.{name}"] = (
                    tensor,
                    [f"losses.{loss}.{name}", f"{loss}.{name}", name],
                )
        original = dict(_named(self._original))
        names = _matched(cut, original, self._spec)
        with torch.no_grad():
            for name, its in names.items():
                original[its].copy_(cut[name][0].reshape(original[its].shape))
        return names

    def _rounding(self, loss: float, again: Any = None) -> Rounding:
        """What rounding allows, measured on the cut; its gradients are gone afterwards."""
        parameters = self._reference.named_parameters()
        expected = {name: p.grad for name, p in parameters.items()}
        return Rounding.measured(
            self._reference,
            expected,
            loss,
            precision=self._workload.train.precision,
            draws=torch.Generator().manual_seed(0),
            again=again or self._reference.again,
        )

    def _forget_gradients(self) -> None:
        for parameter in self._reference.named_parameters().values():
            parameter.grad = None

    def _compare_gradients(
        self, value: Tensor, names: Mapping[str, str], rounding: Rounding
    ) -> None:
        if value.requires_grad:
            value.backward()
        original = dict(self._original.named_parameters())
        parameters = self._reference.named_parameters()
        for name, its in names.items():
            if name not in parameters or not parameters[name].requires_grad:
                continue
            gradient = original[its].grad
            found = torch.zeros_like(original[its]) if gradient is None else gradient
            found = found.reshape(parameters[name].shape)
            error, allowed, _ = rounding.judge(found, ReportedElements(name=name))
            self._note(name, "gradient", error, allowed)
        for its, parameter in original.items():
            alone = its not in names.values() and parameter.grad is not None
            if alone and bool(cast(Tensor, parameter.grad).any()):
                self._note(its, "gradient of a parameter that no block has,", torch.inf, 0.0)

    def _note(self, name: str, what: str, error: float, allowed: float) -> None:
        item = Difference(name=name, what=what, rank=0, error=error, allowed=allowed)
        self.compared += 1
        self.share = max(self.share, item.share)
        if not item.share <= 1:
            self.differences.append(item)


# Units in the last place of an output's largest element: a sum in another order, layer by layer.
_OUTPUT_UNITS = 1024.0


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, each by its first name, and persistent buffers."""
    yield from module.named_parameters()
    kept = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


def _matched(
    cut: Mapping[str, tuple[Tensor, list[str]]], original: Mapping[str, Tensor], spec: str
) -> dict[str, str]:
    """Names of the cut to those of the original: by name, else all in order with equal shapes.

    Raises:
        InvalidInputError: a tensor of the cut has no counterpart, or shares it.
    """
    found: dict[str, str] = {}
    for name, (tensor, candidates) in cut.items():
        its = next((n for n in candidates if n in original), None)
        if its is None:
            ends = [n for n in original if any(n.endswith(f".{c}") for c in candidates)]
            its = ends[0] if len(ends) == 1 else None
        # A scalar may have a dimension of one.
        if its is not None and (
            original[its].shape == tensor.shape or original[its].numel() == tensor.numel() == 1
        ):
            found[name] = its
    if len(found) < len(cut) and len(cut) == len(original):
        pairs = list(zip(cut, original, strict=True))
        if all(cut[mine][0].shape == original[its].shape for mine, its in pairs):
            return dict(pairs)
    missing = next((name for name in cut if name not in found), None)
    if missing is not None:
        tensor, candidates = cut[missing]
        raise InvalidInputError(
            f"{_OPTION} {spec} has no parameter of shape {list(tensor.shape)} for {missing}; "
            f"looked for {', '.join(candidates)}",
            hint="give the cut the model's names (from_layers keeps them), or the same parameters "
            "in the same order",
        )
    first: dict[str, str] = {}
    for name, its in found.items():
        other = first.setdefault(its, name)
        if other != name:
            raise InvalidInputError(
                f"{_OPTION} {spec}: {other} and {name} are both its {its}",
                hint="tie them in the factory, or give them names of their own",
            )
    return found


def _without_dropout(module: nn.Module) -> None:
    module.eval()
    for child in module.modules():
        if isinstance(child, _DropoutNd):
            child.p = 0.0


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, Any]", value).values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in cast("Sequence[Any]", value):
            yield from _tensors(item)


def _weights_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random weights of a sum over outputs, so that none of their gradients is alike."""
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=draws, dtype=torch.float64) for t in outputs]


def _weighted(outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    pairs = zip(outputs, weights, strict=True)
    terms = [(t * w).sum() for t, w in pairs if t.is_floating_point()]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _backward(value: Tensor) -> Tensor:
    value.backward()
    return value.detach()
