"""Turn a model with a list of layers into the ``nn.Sequential`` that a module factory returns.

    def encoder() -> nn.Sequential:
        model = MyEncoder()
        return from_layers(
            model,
            "encoder.layers",
            before=lambda part, images: part.embeddings(images),
            after=lambda part, hidden: part.head(part.norm(hidden[:, 0])),
            first=["embeddings"],
            last=["norm", "head"],
            tp_plan={"attention.query": "colwise", "attention.out": "rowwise"},
        )

Each child of the Sequential is one layer; the first runs ``before`` ahead of it,
the last runs ``after`` behind it. The functions get a *part*: a module that owns
the submodules and parameters of the model that ``first`` (or ``last``) names,
under the names that they have in the model. They must not reach for the model
itself: a rank keeps only its own blocks, so the model does not exist there.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from mmplan.errors import InvalidInputError

TP_RULES = ("colwise", "rowwise", "packed_colwise")

# before(part, *inputs), after(part, *state) and each(layer, *state).
StateFunction = Callable[..., Any]
TPPlan = Mapping[str, str] | Callable[[nn.Module], Mapping[str, str]]


class Owned(nn.Module):
    """What a block owns of the model at one level of its names."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{name!r} is not owned by this block; name it in from_layers(first=...) "
                "or from_layers(last=...)"
            ) from error


class Part(Owned):
    """A function and what it owns of the model, under the model's own names."""

    def __init__(self, function: StateFunction, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._function = function
        for name in names:
            _adopt(self, model, name)

    def forward(self, *state: Any) -> Any:
        """Call the function with this part and the state."""
        return self._function(self, *state)


class LayerBlock(nn.Module):
    """One layer of the model, with ``before`` ahead of it or ``after`` behind it."""

    def __init__(
        self,
        *,
        layer: nn.Module,
        each: StateFunction,
        before: nn.Module | None,
        after: nn.Module | None,
        tp_plan: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._each = each
        self.before = before
        self.layer = layer
        self.after = after
        if tp_plan:
            self.tp_plan: dict[str, str] = {f"layer.{n}": rule for n, rule in tp_plan.items()}

    def forward(self, *inputs: Any) -> Any:
        """Run the block on tensors, or on one tuple of tensors; returns a tensor or a tuple."""
        state = _state(inputs[0]) if len(inputs) == 1 else inputs
        if self.before is not None:
            state = _state(self.before(*state))
        state = _state(self._each(self.layer, *state))
        if self.after is not None:
            state = _state(self.after(*state))
        return state[0] if len(state) == 1 else state


class LayerSequential(nn.Sequential):
    """The blocks, and where their tensors come from.

    ``init:`` of a workload reads the model's own weights by these attributes, and
    ``mmlaunch export`` writes them; any ``nn.Sequential`` may have them. They are empty in a
    slice, whose names are not these.

    Attributes:
        source_names: name of each parameter and persistent buffer here to the name
            of the same tensor in the model's own ``state_dict``. A tensor with several
            names in the model has the first one here.
        tied_names: the other names in the model of such tensors, to the first one.
        renamed: a name in a file, of an older version of the library too, to the model's own.
            None: files have the model's names.
        configuration: content of the model's ``config.json``, its class among it
            (``architectures`` of transformers, ``_class_name`` of diffusers). Modules that
            are parts of one model have equal ones: they are exported together. None: the
            model is of neither library.
    """

    # Takes what nn.Sequential takes: slicing one makes another of its class.
    def __init__(self, *blocks: Any) -> None:
        super().__init__(*blocks)
        self.source_names: dict[str, str] = {}
        self.tied_names: dict[str, str] = {}
        self.renamed: Callable[[str], str] | None = None
        self.configuration: dict[str, Any] | None = None

    def remember(self, model: nn.Module) -> None:
        """Note names and configuration of the model whose tensors the blocks use."""
        first: dict[int, str] = {}
        # keep_vars: without it state_dict gives new tensor objects, which identify nothing.
        for name, tensor in model.state_dict(keep_vars=True).items():
            if first.setdefault(id(tensor), name) != name:
                self.tied_names[name] = first[id(tensor)]
        own = self.state_dict(keep_vars=True).items()
        self.source_names = {name: first[id(t)] for name, t in own if id(t) in first}
        self.configuration = configuration_of(model)
        self.renamed = _renaming_of(model)


def _renaming_of(model: nn.Module) -> Callable[[str], str] | None:
    """From names in files to those of a model of transformers, as ``from_pretrained`` does it."""
    prefix: Any = getattr(model, "base_model_prefix", None)
    if prefix is None:
        return None
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping")
    rules = [
        rule
        for rule in mapping.get_model_conversion_mapping(model)
        if isinstance(rule, loading.WeightRenaming)
    ]
    own = dict.fromkeys(model.state_dict(), True)
    return lambda name: loading.rename_source_key(name, rules, [], prefix, own)[0]


def configuration_of(model: nn.Module) -> dict[str, Any] | None:
    """The ``config.json`` of a model of transformers or diffusers; None of another."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        return {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    # In diffusers the configuration is a dict, and the model writes it.
    writes: Any = getattr(model, "to_json_string", None)
    return json.loads(writes()) if writes is not None else None


def from_layers(
    model: nn.Module,
    layers: str,
    *,
    before: StateFunction | nn.Module | None = None,
    after: StateFunction | nn.Module | None = None,
    each: StateFunction | None = None,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    tp_plan: TPPlan | None = None,
    vocab: Sequence[str] = (),
    ignore: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> LayerSequential:
    """Cut a model at its layers.

    The model's tensors are used, not copied; nothing refers to the model afterwards.

    Args:
        model: holds the layers and what runs before and after them.
        layers: dotted name of its ``nn.ModuleList`` (or ``nn.Sequential``) of layers.
        before: takes (part, *inputs of the module), returns what the first layer
            takes: a tensor, or a tuple of tensors. A module is owned whole and
            takes the inputs only. None: the first layer takes the inputs.
        after: takes (part, *what the last layer returned), returns the output.
        each: runs a layer, takes (layer, *state) and returns the next state. By
            default the layer is called with the whole state and its output (the
            first element, if a tuple) replaces the first tensor of the state.
        first: dotted names of submodules, parameters or buffers of the model that
            ``before`` uses; ``last`` the same for ``after``. A name in both is one
            shared (tied) module.
        last: see ``first``.
        tp_plan: submodule names inside a layer to rules, or a function that gives
            these for a layer.
        vocab: dotted names of embeddings, and of the Linear that gives logits, which tensor
            parallelism cuts along the vocabulary. Tied ones are cut alike; one whose weight
            another part of the model has too stays whole.
        ignore: dotted names of what is left out on purpose.
        unused: dotted names of what forward does not use, layers among them. The last block
            keeps it, frozen, so that the model can be exported whole.

    Returns:
        As many children as there are layers that are used.

    Raises:
        InvalidInputError: a name that the model lacks, no layers, a trainable
            parameter that no block owns, or a tp rule for what is not a Linear.
    """
    kept = [_find(model, name).requires_grad_(False) for name in unused]
    modules = [layer for layer in _layers(model, layers) if layer not in kept]
    run_each = each or _call_layer
    _check_outside(model, modules, [*first, *last, *unused])
    first_part, last_part = _part(before, model, first), _part(after, model, [*last, *unused])
    blocks = [
        LayerBlock(
            layer=layer,
            each=run_each,
            before=first_part if index == 0 else None,
            after=last_part if index == len(modules) - 1 else None,
            tp_plan=_tp_plan(layer, tp_plan),
        )
        for index, layer in enumerate(modules)
    ]
    _cut_vocabulary(model, blocks, vocab)
    _check_nothing_lost(model, blocks, ignore)
    cut = LayerSequential(*blocks)
    cut.remember(model)
    return cut


def _state(value: Any) -> tuple[Any, ...]:
    """A plain tuple is a state; a NamedTuple such as Ragged is one tensor of it."""
    return cast("tuple[Any, ...]", value) if type(value) is tuple else (value,)


def _call_layer(layer: nn.Module, *state: Any) -> tuple[Any, ...]:
    output = _state(layer(*state))
    return (output[0], *state[1:])


def _layers(model: nn.Module, name: Any) -> list[nn.Module]:
    if not isinstance(name, str):
        raise InvalidInputError(
            f"from_layers takes the name of one list of layers, not {name!r}",
            hint="mmplan init cuts a model at several lists, an encoder's and a decoder's say",
        )
    found = _find(model, name)
    if not isinstance(found, nn.ModuleList | nn.Sequential) or len(found) == 0:
        lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
        raise InvalidInputError(
            f"{name} in {type(model).__name__} is no list of layers but a {type(found).__name__}",
            hint=f"its lists are: {', '.join(lists) or 'none'}",
        )
    return list(found)


def _find(model: nn.Module, name: str) -> nn.Module | Tensor:
    """The submodule, parameter or buffer of this dotted name."""
    owner: Any = model
    for piece in name.split("."):
        found = getattr(owner, piece, None)
        if not isinstance(found, nn.Module | Tensor):
            raise InvalidInputError(
                f"{type(model).__name__} has no {name!r}: there is no {piece!r}",
                hint=f"at that place it has: {', '.join(_names_of(owner)) or 'nothing'}",
            )
        owner = found
    return owner


def _names_of(owner: Any) -> list[str]:
    if not isinstance(owner, nn.Module):
        return []
    named = [*owner.named_children(), *owner.named_parameters(recurse=False)]
    return [name for name, _ in [*named, *owner.named_buffers(recurse=False)]]


def _part(
    run: StateFunction | nn.Module | None, model: nn.Module, names: Sequence[str]
) -> nn.Module | None:
    if run is None or isinstance(run, nn.Module):
        if names:
            raise InvalidInputError(
                f"{', '.join(names)} would be owned by a block that runs no function with them",
                hint="give a function that uses them, or leave the names out",
            )
        return run
    return Part(run, model, names)


def _check_outside(model: nn.Module, layers: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Refuse a part that would own the layers, which belong to blocks of their own."""
    for name in names:
        found = _find(model, name)
        inside = set(found.modules()) if isinstance(found, nn.Module) else set[nn.Module]()
        if inside.intersection(layers):
            raise InvalidInputError(
                f"{name!r} contains the layers", hint="name only what runs before or after them"
            )


def _adopt(part: nn.Module, model: nn.Module, name: str) -> None:
    """Register the model's ``a.b.c`` in the part under the same dotted name."""
    *path, leaf = name.split(".")
    found, container = _find(model, name), part
    for piece in path:
        child = dict(container.named_children()).get(piece)
        if child is None:
            child = Owned()
            container.add_module(piece, child)
        container = child
    if leaf in _names_of(container):
        raise InvalidInputError(
            f"{name!r} is owned twice by one block",
            hint="name a submodule or its parts, not both",
        )
    if isinstance(found, nn.Module):
        container.add_module(leaf, found)
    elif isinstance(found, nn.Parameter):
        container.register_parameter(leaf, found)
    else:
        container.register_buffer(leaf, found, persistent=name in model.state_dict())


def _tp_plan(layer: nn.Module, rule: TPPlan | None) -> Mapping[str, str]:
    plan = rule(layer) if callable(rule) else (rule or {})
    linear = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    for name, kind in plan.items():
        if kind not in TP_RULES:
            raise InvalidInputError(
                f"tp rule {kind!r} for {name!r} is unknown", hint=f"rules: {', '.join(TP_RULES)}"
            )
        if name not in linear:
            raise InvalidInputError(
                f"tp rule for {name!r}, which is no Linear of {type(layer).__name__}",
                hint=f"its Linears: {', '.join(sorted(linear)) or 'none'}",
            )
    return plan


def _cut_vocabulary(model: nn.Module, blocks: Sequence[LayerBlock], names: Sequence[str]) -> None:
    """Rules for the parts before and after the layers that are cut along the vocabulary."""
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    found = [
        (block, f"{place}.{name}", part)
        for block, place in ((blocks[0], "before"), (blocks[-1], "after"))
        for name in names
        if (part := dict(block.named_modules()).get(f"{place}.{name}")) is not None
    ]
    # A weight that others use too stays whole.
    uses.subtract(parameter for *_, part in found for parameter in part.parameters())
    for block, name, part in found:
        if not any(uses[parameter] for parameter in part.parameters()):
            block.tp_plan = {**getattr(block, "tp_plan", {}), name: "vocab"}


def _check_nothing_lost(
    model: nn.Module, blocks: Sequence[nn.Module], ignore: Sequence[str]
) -> None:
    owned = {id(p) for block in blocks for p in block.parameters()}
    ignored = set[int]()
    for name in ignore:
        found = _find(model, name)
        ignored |= {
            id(p) for p in (found.parameters() if isinstance(found, nn.Module) else [found])
        }
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in owned | ignored
    ]
    if lost:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        raise InvalidInputError(
            f"no block owns {len(lost)} trainable parameters of {type(model).__name__}: {shown}",
            hint="name their modules in first or last, or in ignore to leave them out",
        )
