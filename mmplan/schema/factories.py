"""From names in a workload file to the user's own objects.

The only place that imports a user's code. Every factory runs under a generator seeded from
``train.seed`` and a name, so that all processes build the same weights and data.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.ragged import Ragged
from mmplan.schema.made import CallbackSpec, DataSpec
from mmplan.schema.workload import LossSpec, ModuleSpec, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

# Methods of a tensor, and functions of torch.nn.init, that fill it with random numbers.
_FILLS = ("normal_", "exponential_", "log_normal_", "cauchy_", "geometric_")
# Folders of workload files, in the order in which they were first used.
_folders: list[str] = []
# The folder of the workload whose factory runs.
_running_for: ContextVar[Path | None] = ContextVar("workload_folder", default=None)


def import_factory(spec: str, folder: Path, *, field: str = "factory") -> Callable[..., Any]:
    """Find ``"package.module:callable"``; the workload file's folder is searched first.

    Args:
        spec: module and attribute, the attribute may have dots.
        folder: the workload file's folder; it stays first on ``sys.path``.
        field: the place in the workload file, for errors.

    Raises:
        InvalidInputError: there is no such module or attribute, it is not callable, or
            importing it raised (the message says what and in which line).
    """
    module_name, _, attribute = spec.partition(":")
    _make_importable(folder.resolve(), module_name)
    found: Any = _import(module_name, folder, spec=spec, field=field)
    for part in attribute.split("."):
        if not hasattr(found, part):
            file = getattr(found, "__file__", None) or module_name
            raise InvalidInputError(
                f"{field}: {spec}: {module_name} has no {attribute!r}",
                hint=f"correct the name, or define it in {file}",
            )
        found = getattr(found, part)
    if not callable(found):
        raise InvalidInputError(
            f"{field}: {spec} is not callable, it is of type {type(found).__name__}",
            hint="name a function or a class",
        )
    return found


def factory_seed(train_seed: int, name: str) -> int:
    """Seed of one factory: the first 63 bits of SHA-256 of ``"{train_seed}:{name}"``.

    Python's own hash differs between processes, and seeds that follow one another are
    not independent in every generator.
    """
    digest = hashlib.sha256(f"{train_seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def dtype_of(precision: str) -> torch.dtype:
    """Type of the parameters that the optimizer updates; bf16 and fp16 keep float32 ones."""
    import torch

    return torch.float64 if precision == "fp64" else torch.float32


def compute_dtype(precision: str) -> torch.dtype:
    """Type of most that blocks compute: the autocast's in bf16 and fp16."""
    import torch

    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return narrow.get(precision) or dtype_of(precision)


def build_module(
    workload: Workload, name: str, folder: Path, *, device: str | None = None
) -> nn.Sequential:
    """Build one module of a workload, the same in every process.

    A module with ``share`` is built under its owner's name: the parameters are equal.

    Args:
        workload: where the module is defined.
        name: the module's name.
        folder: the workload file's folder.
        device: where its parameters go; "meta" builds without memory. Others are built on
            the CPU first, so that the weights do not depend on the device.

    Raises:
        InvalidInputError: the factory cannot be imported, raises, or returns something
            that cannot be cut into blocks, or ``frozen`` names blocks that it does not
            have; names the field.
    """
    spec = workload.modules[name]
    field = f"modules.{name}"
    seeded = workload.train.seed, spec.share or name
    module = _made(spec, folder, field=field, seeded=seeded, device=device)
    _check_module(module, field=field, factory=spec.factory, on_meta=device == "meta")
    frozen_blocks(spec.frozen, len(module), field=f"{field}.frozen")
    _pass_elements(module)
    return module.to(device=device, dtype=dtype_of(workload.train.precision))


def build_loss(
    workload: Workload,
    name: str,
    folder: Path,
    *,
    device: str | None = None,
    field: str | None = None,
) -> nn.Module:
    """Build one loss of a workload, the same in every process.

    Args:
        workload: whose loss it is.
        name: of the loss.
        folder: the workload file's folder.
        device: where it is made.
        field: the place in the workload file, for errors.

    Raises:
        InvalidInputError: the factory cannot be imported, raises, or returns no nn.Module.
    """
    from torch import nn

    spec = workload.losses[name]
    field = field or f"losses.{name}"
    seeded = workload.train.seed, field
    loss = _made(spec, folder, field=field, seeded=seeded, device=device)
    if not isinstance(loss, nn.Module):
        raise InvalidInputError(
            f"{field}.factory: {spec.factory} returned a {type(loss).__name__}, not an nn.Module",
            hint="return a module whose forward takes the loss's inputs",
        )
    _check_buffers(loss, field)
    return loss.to(device=device, dtype=dtype_of(workload.train.precision))


def build_dataset(data: DataSpec, folder: Path, *, seed: int = 0, field: str = "data") -> Any:
    """Build a map-style dataset of dicts of tensors.

    The factory runs under a seed too (name "data"): data that it draws is the same in
    every process.

    Args:
        data: the factory and its arguments.
        folder: the workload file's folder.
        seed: ``train.seed``.
        field: the place in the workload file, for errors.

    Raises:
        InvalidInputError: the factory cannot be imported or raises, or the dataset has no
            length, no samples, or samples that are not dicts of tensors.
    """
    with seeded_draws(seed, "data"):
        return _made_dataset(data, folder, field)


def build_part(part: Mapping[str, Any], *, field: str) -> Any:
    """A dataset that the factory of another one asks for, under the same seed.

    Args:
        part: ``factory`` and ``args`` (none by default).
        field: the place in the other's arguments, for errors.

    Raises:
        InvalidInputError: no factory, or a field that is neither; else as :func:`build_dataset`.
    """
    unknown = sorted(set(part) - {"factory", "args"})
    if unknown or "factory" not in part:
        raise InvalidInputError(
            f"{field}: {f'unknown field {unknown[0]!r}' if unknown else 'no factory'}",
            hint="a dataset has factory and args; in a mixture weight too",
        )
    return _made_dataset(DataSpec(**part), workload_folder(), field)


def build_callback(spec: CallbackSpec, folder: Path, *, field: str) -> Any:
    """The object that a callback's factory makes.

    Raises:
        InvalidInputError: the factory cannot be imported or raises.
    """
    factory = import_factory(spec.factory, folder, field=f"{field}.factory")
    return _call(factory, spec.args, folder, field=field)


def workload_folder() -> Path:
    """The folder of the workload file whose factory runs; else the current one."""
    return _running_for.get() or Path()


def _made_dataset(data: DataSpec, folder: Path, field: str) -> Any:
    factory = import_factory(data.factory, folder, field=f"{field}.factory")
    dataset = _call(factory, data.args, folder, field=field)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing or isinstance(dataset, Mapping):
        raise InvalidInputError(
            f"{field}.factory: {data.factory} returned a {type(dataset).__name__}"
            + (f" without {missing[0]}" if missing else ", which has names in place of an order"),
            hint="return a map-style dataset: __len__ and __getitem__(index) -> dict; the order of "
            "a stream would change with ranks and processes",
        )
    _check_sample(dataset, data, folder, field)
    return dataset


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Names under which a parameter appears again: alias to the first name of the object."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def tied_blocks(module: nn.Sequential) -> tuple[tuple[int, ...], ...]:
    """The blocks of each parameter that several blocks share; equal ones once."""
    blocks: dict[str, set[int]] = {}
    for alias, first in tied_parameters(module).items():
        blocks.setdefault(first, set()).update(int(n.split(".")[0]) for n in (alias, first))
    return tuple(sorted({tuple(sorted(own)) for own in blocks.values() if len(own) > 1}))


def frozen_blocks(
    frozen: bool | Sequence[tuple[int, int]], num_blocks: int, *, field: str = "frozen"
) -> tuple[bool, ...]:
    """Whether each block is frozen, from ``true``, ``false`` or half-open block ranges.

    Raises:
        InvalidInputError: a range is empty, turned round, or ends after the last block.
    """
    if isinstance(frozen, bool):
        return (frozen,) * num_blocks
    for begin, end in frozen:
        if not 0 <= begin < end <= num_blocks:
            raise InvalidInputError(
                f"{field}: [{begin}, {end}] is no range of blocks of a module of {num_blocks}",
                hint=f"ranges are half-open: [0, {num_blocks}] is all blocks",
            )
    return tuple(any(a <= block < b for a, b in frozen) for block in range(num_blocks))


def _make_importable(folder: Path, module_name: str) -> None:
    place = str(folder)
    top = module_name.partition(".")[0]
    cached = sys.modules.get(top)
    if cached is not None and _belongs_to_another_workload(cached, top, place):
        for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
            del sys.modules[name]
    if sys.path[:1] != [place]:
        sys.path[:] = [place, *(p for p in sys.path if p != place)]
    if place not in _folders:
        _folders.append(place)
    # A file written a moment ago is not in the finder's cache of the folder.
    importlib.invalidate_caches()


def _belongs_to_another_workload(module: Any, top: str, place: str) -> bool:
    """Whether a loaded file of another workload hides a file of this one (same name)."""
    origin = getattr(module, "__file__", None)
    if origin is None or not any(Path(origin).is_relative_to(f) for f in _folders if f != place):
        return False
    spec = importlib.machinery.PathFinder.find_spec(top, [place])
    return spec is not None and spec.origin != origin


def _import(module_name: str, folder: Path, *, spec: str, field: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            _raise_users(error, folder, f"{field}: importing {module_name}")
        raise InvalidInputError(
            f"{field}: {spec}: there is no module {error.name!r}",
            hint=f"correct the name, put its file into {folder.resolve()}, or install it",
        ) from None
    except (Exception, SystemExit) as error:
        _raise_users(error, folder, f"{field}: importing {module_name}")


def _call(factory: Callable[..., Any], args: Mapping[str, Any], folder: Path, *, field: str) -> Any:
    before = _running_for.set(folder)
    try:
        return factory(**args)
    except (Exception, SystemExit) as error:
        if isinstance(error, TypeError) and error.__traceback__ and not error.__traceback__.tb_next:
            _refuse_args(error, factory, args, field=field)
        _raise_users(error, folder, f"{field}.factory", args=args)
    finally:
        _running_for.reset(before)


def _refuse_args(
    error: TypeError, factory: Callable[..., Any], args: Mapping[str, Any], *, field: str
) -> NoReturn:
    """The call itself failed, before the factory's first line: its args do not fit."""
    try:
        taken = ", ".join(inspect.signature(factory).parameters) or "none"
    except ValueError:  # a class written in C
        taken = "others"
    raise InvalidInputError(
        f"{field}.args: {', '.join(args) or '(none)'}: {error}",
        hint=f"correct them; the factory takes {taken}",
    ) from error


def _raise_users(
    error: BaseException, folder: Path, what: str, *, args: Mapping[str, Any] | None = None
) -> NoReturn:
    """Tell a failure in user code: its type, its message and the line it happened in."""
    if isinstance(error, MMPlanError):
        raise type(error)(f"{what}: {error.message}", hint=error.hint) from error
    line = str(error).strip().splitlines()
    problem = f"{type(error).__name__}: {line[0]}" if line else type(error).__name__
    called = "" if args is None else f" with args {', '.join(args) or '(none)'}"
    raise InvalidInputError(
        f"{what}{called} raised {problem} ({_where(error, folder)})",
        hint="mend that line, or correct the factory and its args",
    ) from error


def _where(error: BaseException, folder: Path) -> str:
    """file:line of the innermost frame of the user's own files, else of anyone's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
    usable = [f for f in frames if "importlib" not in f[0] and f[0] != __file__]
    inside = [f for f in usable if Path(f[0]).is_relative_to(folder.resolve())]
    # A virtual environment inside the workload's folder is not the user's code.
    own = [f for f in inside if "site-packages" not in f[0]]
    file, line = (own or usable or frames or [("?", 0)])[-1]
    return f"{file}:{line}"


@contextmanager
def seeded_draws(train_seed: int, name: str) -> Generator[None]:
    """The default generator of the CPU with :func:`factory_seed`; as it was afterwards."""
    import torch

    random = cast(Any, torch.random)
    with random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the caller's CUDA generators as well.
        random.default_generator.manual_seed(factory_seed(train_seed, name))
        yield


def _made(
    spec: ModuleSpec | LossSpec,
    folder: Path,
    *,
    field: str,
    seeded: tuple[int, str],
    device: str | None,
) -> Any:
    """The object of a factory, on the CPU or without memory."""
    import torch

    factory = import_factory(spec.factory, folder, field=f"{field}.factory")
    on_meta = device == "meta"
    fills = _no_fills() if on_meta else nullcontext()
    with seeded_draws(*seeded), fills, torch.device("meta" if on_meta else "cpu"):
        return _call(factory, spec.args, folder, field=field)


def _no_fills() -> AbstractContextManager[object]:
    """Tensors without memory stay as they are where random numbers would fill them.

    For some distributions torch would import its compiler, which takes two seconds.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    # Functions of torch.nn.init are seen here once: what they call is not.
    owners = (torch.Tensor, torch.nn.init)
    fills = {getattr(owner, name) for owner in owners for name in _FILLS if hasattr(owner, name)}

    class NoFills(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in fills:
                filled = args[0] if args else kwargs["tensor"]
                if filled.is_meta:
                    return filled
            return func(*args, **kwargs)

    return NoFills()


def _check_module(module: object, *, field: str, factory: str, on_meta: bool) -> None:
    from torch import nn

    place = f"{field}.factory: {factory}"
    if not isinstance(module, nn.Sequential):
        raise InvalidInputError(
            f"{place} returned a {type(module).__name__}, not an nn.Sequential",
            hint="return nn.Sequential(*blocks): its children are where the module may be cut",
        )
    if len(module) == 0:
        raise InvalidInputError(
            f"{place} returned an empty nn.Sequential", hint="give it at least one block"
        )
    parameters = dict(module.named_parameters())
    if not parameters:
        raise InvalidInputError(
            f"{place} returned a module without parameters",
            hint="put it into a block of the module that uses its output",
        )
    hollow = [name for name, value in parameters.items() if value.is_meta and not on_meta]
    if hollow:
        raise InvalidInputError(
            f"{place}: {hollow[0]} is on the meta device, so it has no values",
            hint="create the parameters on the CPU",
        )
    _check_buffers(module, field)


def _pass_elements(module: nn.Sequential) -> None:
    """Give a tuple's elements to blocks whose forward names several arguments.

    A hook, so that everything that calls a block follows the rule, the Sequential itself too.
    """
    for block in module:
        kinds = [p.kind for p in inspect.signature(block.forward).parameters.values()]
        named = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        if sum(kind in named for kind in kinds) > 1:
            block.register_forward_pre_hook(_elements)


def _elements(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    # A NamedTuple such as Ragged is one tensor.
    return args[0] if len(args) == 1 and type(args[0]) is tuple else None


def _check_buffers(module: nn.Module, field: str) -> None:
    """Refuse running statistics: micro-batches and replicas would each change their own."""
    from torch.nn.modules import batchnorm

    base = cast(Any, batchnorm)._NormBase  # batch norms and instance norms
    children = cast("Iterator[tuple[str, Any]]", module.named_modules())
    for name, child in children:
        if isinstance(child, base) and child.track_running_stats and child.training:
            raise InvalidInputError(
                f"{field}: {type(child).__name__} {name!r} changes the buffer "
                f"'{name}.running_mean' in forward, which no cut into micro-batches repeats",
                hint="use LayerNorm or GroupNorm, track_running_stats=False, or .eval() on it",
            )


def _check_sample(dataset: Any, data: DataSpec, folder: Path, field: str) -> None:
    import torch

    try:
        length = len(dataset)
        sample: object = dataset[0] if length else None
    except Exception as error:
        _raise_users(error, folder, f"{field}: reading sample 0 of {data.factory}")
    if sample is None:
        raise InvalidInputError(
            f"{field}.factory: {data.factory} returned a dataset without samples",
            hint="check the data's folder and its args",
        )
    kind = type(sample).__name__
    if not isinstance(sample, Mapping) or not sample:
        raise InvalidInputError(
            f"{field}: sample 0 of {data.factory} is a {kind}, not a dict of tensors",
            hint='return {"field": tensor, ...} from __getitem__',
        )
    fields = cast("Mapping[str, object]", sample)
    wrong = [k for k, v in fields.items() if not isinstance(v, torch.Tensor | Ragged)]
    if wrong and not hasattr(dataset, "collate"):
        raise InvalidInputError(
            f"{field}: sample 0 of {data.factory}: {wrong[0]!r} is a "
            f"{type(fields[wrong[0]]).__name__}, not a tensor",
            hint="return tensors, or give the dataset a collate(samples) method",
        )
