"""Samples without images or audio: where they are missing, plans that meet them, one process.

Every sample has words; pictures and clips are ragged and missing where :data:`PLACES` says. The
judge is :func:`train_plainly`: whole modules, plain autograd, torch's optimizer, nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from mmplan.ragged import Ragged
from mmplan.schema.factories import build_loss, build_module
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.zoo.interleaved import IMAGE
from tests.matrix_models import WIDTH, Block, Contrastive, Regression, mean_rows
from tests.mllm_cases import GLANCE, glances
from tests.programs import LossSpec, UnitSpec, loss, make_plan, unit
from tests.verification import HERE

BATCH = 12
STEPS = 3
SEED = 4
CLASSES = 5
WORDS = 3
# Large against rounding, so that a gradient of rounding noise does not move a parameter by lr.
OPTIMIZER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-2}

# (step, first batch position, end) without the modality. Replicas of two take 6 samples each,
# and of these each micro-batch 3 where there are two.
PLACES: dict[str, dict[str, list[tuple[int, int, int]]]] = {
    "sample": {"pictures": [(0, 0, 1), (1, 5, 7), (2, 11, 12)]},
    "first-microbatch": {"pictures": [(0, 0, 3), (1, 0, 3)], "clips": [(0, 3, 6)]},
    "replica": {"pictures": [(0, 6, 12), (1, 0, 6)], "clips": [(2, 0, 6)]},
    "step": {"pictures": [(1, 0, 12)], "clips": [(2, 0, 12)]},
    "first-step": {"pictures": [(0, 0, 12)]},
    "both": {"pictures": [(1, 0, 12)], "clips": [(1, 0, 12), (0, 0, 6)]},
    "everywhere": {"pictures": [(step, 0, 12) for step in range(STEPS)]},
}


class Album(Dataset[dict[str, Tensor | Ragged]]):
    """Words, pictures of digits' size with a label each, and clips; noise, always the same."""

    def __init__(self, absent: Mapping[str, Sequence[Sequence[int]]], batch: int = BATCH) -> None:
        self._absent = absent
        order = torch.randperm(batch * STEPS, generator=torch.Generator().manual_seed(SEED))
        self._place = {index: divmod(place, batch) for place, index in enumerate(order.tolist())}

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, index: int) -> dict[str, Tensor | Ragged]:
        generator = torch.Generator().manual_seed(index)

        def rows(field: str, *shape: int) -> Ragged:
            number = 0 if self._lacks(field, index) else 1 + index % 3
            values = torch.randn((3, *shape), generator=generator, dtype=torch.float64)
            return Ragged(values[:number], torch.tensor([number]))

        pictures = rows("pictures", 1, 4, 4)
        names = torch.randint(CLASSES, (3,), generator=generator)[: len(pictures.values)]
        return {
            "pictures": pictures,
            "names": Ragged(names, pictures.lengths),
            "clips": rows("clips", 1, WIDTH),
            "seen": torch.tensor(len(pictures.values) > 0),
            "words": torch.randn((WORDS, WIDTH), generator=generator, dtype=torch.float64),
            "target": torch.randn((), generator=generator, dtype=torch.float64),
        }

    def _lacks(self, field: str, index: int) -> bool:
        step, place = self._place[index]
        return any(
            s == step and low <= place < high for s, low, high in self._absent.get(field, ())
        )


class Rows(nn.Module):
    """A block on the rows of ``Ragged``, whatever their number.

    With ``passes`` it returns no rows as they came, which are of another shape than its own.
    """

    def __init__(self, inner: nn.Module, passes: bool = False) -> None:
        super().__init__()
        self.inner, self.passes = inner, passes
        plan: dict[str, str] = getattr(inner, "tp_plan", {})
        self.tp_plan = {f"inner.{name}": style for name, style in plan.items()}

    def forward(self, x: Ragged) -> Ragged:
        if self.passes and not len(x.values):
            return x
        return Ragged(self.inner(x.values), x.lengths)


class Patches(nn.Module):
    """A convolution, a norm over channels and attention over places: [N, 1, ...] to [N, WIDTH]."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.GroupNorm(2, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = self.norm(self.convolution(x)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(places).chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(q, k, v).mean(dim=1)


def eye(passes: bool = False) -> nn.Sequential:
    """Pictures to rows [N, WIDTH]."""
    blocks = [Block(WIDTH, 2 * WIDTH, WIDTH, 0.0) for _ in range(3)]
    first = Patches(nn.Conv2d(1, WIDTH, 2))
    return nn.Sequential(*(Rows(block, passes) for block in (first, *blocks)))


def fussy_eye() -> nn.Sequential:
    """An eye whose second block cannot take 0 rows."""
    built = eye()
    built[1] = Rows(Reshaped(Block(WIDTH, 2 * WIDTH, WIDTH, 0.0)))
    return built


class Reshaped(nn.Module):
    """A block with a size of -1, which an empty tensor does not say."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(len(x), -1))


class Nothing(nn.Module):
    """A block that returns None where there are no rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Ragged) -> Ragged | None:
        return self.inner(x) if len(x.values) else None


def vanishing_eye() -> nn.Sequential:
    """An eye that returns None where there are no rows."""
    built = eye()
    built[3] = Nothing(built[3])
    return built


def ear(passes: bool = False) -> nn.Sequential:
    """Clips to rows [N, WIDTH]."""
    first = Patches(nn.Conv1d(1, WIDTH, 3))
    block = Block(WIDTH, 2 * WIDTH, WIDTH, 0.0)
    return nn.Sequential(Rows(first, passes), Rows(block, passes))


class Join(nn.Module):
    """Words and the mean rows of other modules, to [batch, WIDTH].

    With ``skips`` a module without rows does not enter the graph, as users write it. Without a
    bias that is the same sum.
    """

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.seen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.words = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, *modules: Ragged) -> Tensor:
        x = self.words(words).mean(dim=1)
        for rows in modules:
            if not self.skips or len(rows.values):
                x = x + self.seen(mean_rows(rows))
        return x


def reader(skips: bool = False) -> nn.Sequential:
    """Words [batch, 3, WIDTH] and rows of other modules to [batch, WIDTH]."""
    return nn.Sequential(Join(skips), *(Block(WIDTH, 2 * WIDTH, WIDTH, 0.0) for _ in range(3)))


class Naming(nn.Module):
    """The sum of the cross entropy of every picture's name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, rows: Ragged, names: Ragged) -> Tensor:
        return functional.cross_entropy(self.head(rows.values), names.values, reduction="sum")

    def count(self, fields: Mapping[str, Ragged]) -> Tensor:
        return fields["names"].lengths


class Pool(nn.Module):
    """Rows to one vector a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Ragged) -> Tensor:
        return self.project(mean_rows(rows))


def pool() -> nn.Sequential:
    """Rows to [batch, WIDTH]."""
    return nn.Sequential(Pool())


class Matching(Contrastive):
    """Contrasts those samples that have pictures; without any the pictures are left out."""

    # It takes a field more than its base.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, pictures: Tensor, words: Tensor, seen: Tensor
    ) -> Tensor:
        if not seen.any():
            return words.square().mean()
        return super().forward(pictures[seen], words[seen])


FACTORIES = {"eye": 4, "ear": 2, "reader": 4, "pool": 1}
LOSSES = {
    "regression": Regression,
    "naming": Naming,
    "contrastive": Contrastive,
    "matching": Matching,
}
# Arguments of the factories by MissingCase.joins.
ARGS: dict[str, dict[str, dict[str, Any]]] = {
    "adds": {},
    "skips": {"reader": {"skips": True}},
    "passes": {"reader": {"skips": True}, "eye": {"passes": True}, "ear": {"passes": True}},
}
GRID = {"apart": "1f1b", "colocated": "1f1b", "interleaved": "interleaved", "waves": "wave"}


@dataclass(frozen=True, kw_only=True)
class MissingCase:
    """One row of the matrix.

    Attributes:
        where: a key of :data:`PLACES`.
        kind: of the plan.
        tp: of eye and of the slices of reader.
        joins: "adds" sums whatever rows there are, "skips" leaves a module without rows out,
            "passes" also passes no rows through the modules as they came; no loss takes those.
        losses: beside the regression of reader: "naming", on rows, "contrastive" or "matching",
            across samples, or none.
        tasks: with 2 a second task trains the same modules on samples without any picture.
        nodes: ranks of a node are 2 where it is true: messages to tp groups travel in shares.
    """

    where: str
    kind: str = "apart"
    tp: int = 1
    joins: str = "adds"
    losses: str = "naming"
    tasks: int = 1
    zero: int = 0
    recompute: str = "none"
    split: bool = False
    precision: str = "fp64"
    nodes: bool = False

    def __str__(self) -> str:
        options = f"{self.joins}-{self.losses}-tasks{self.tasks}-zero{self.zero}-{self.recompute}"
        how = f"split{int(self.split)}-{self.precision}-nodes{int(self.nodes)}"
        return f"{self.where}-{self.kind}-tp{self.tp}-{options}-{how}"

    def autocast(self) -> torch.autocast:
        """What blocks compute under in one process."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")

    @property
    def across(self) -> bool:
        """Whether a loss is across samples."""
        return self.losses in ("contrastive", "matching")

    def task_names(self) -> list[str]:
        return ["default"] if self.tasks == 1 else ["album", "text"]

    def workload(self) -> Workload:
        """The workload that :meth:`plan` is for."""
        units, losses = self._units("default"), self._losses("default")
        modules = {
            u.module: {
                "factory": f"tests.missing_cases:{u.module}",
                "args": ARGS[self.joins].get(u.module, {}),
                "inputs": list(u.inputs),
                "recompute": self.recompute,
            }
            for u in units
        }
        spelled = {
            x.name: {
                "factory": f"tests.missing_cases:{LOSSES[x.name].__name__}",
                "inputs": list(x.inputs),
                "cross_sample": x.sync_batch is not None,
                "sync_batch": x.sync_batch,
                "weight": x.weight,
            }
            for x in losses
        }
        tasks: dict[str, Any] = {}
        for name in self.task_names() if self.tasks == 2 else ():
            nowhere = {"pictures": [(step, 0, BATCH) for step in range(STEPS)]}
            absent = PLACES[self.where] if name == "album" else nowhere
            tasks[name] = {
                "modules": list(modules),
                "losses": list(spelled),
                "data": {"factory": "tests.missing_cases:Album", "args": {"absent": absent}},
            }
        return Workload.model_validate(
            {
                "name": "missing",
                "batch": BATCH,
                "modules": modules,
                "losses": spelled,
                "tasks": tasks,
                "data": {
                    "factory": "tests.missing_cases:Album",
                    "args": {"absent": PLACES[self.where]},
                },
                "train": {
                    "precision": self.precision,
                    "seed": SEED,
                    "zero": self.zero,
                    "optimizer_args": OPTIMIZER,
                    "steps": STEPS,
                },
            }
        )

    def plan(self, devices: int | None = None) -> Plan:
        """The plan; with ``devices`` the ranks that it does not use stay idle."""
        names = self.task_names()
        return make_plan(
            *(u for name in names for u in self._units(name)),
            losses=[x for name in names for x in self._losses(name)],
            batch=BATCH,
            devices=devices,
            per_node=2 if self.nodes else None,
        )

    def _losses(self, task: str) -> list[LossSpec]:
        found = [loss("regression", "reader", "target", task=task)]
        if self.losses == "naming":
            found.append(loss("naming", "eye", "names", task=task, weight=0.5))
        if self.across:
            seen = ["seen"] if self.losses == "matching" else []
            found.append(loss(self.losses, "pool", "reader", *seen, sync_batch=6, task=task))
        return found

    def _units(self, task: str) -> list[UnitSpec]:
        tp, two = self.tp, {"dp": 2, "k": 2}
        inputs = {"eye": ["pictures"], "ear": ["clips"], "reader": ["words", "eye", "ear"]}

        def part(module: str, **options: Any) -> UnitSpec:
            fed = inputs.get(module, ["eye"])
            kind = options.pop("kind", "1f1b")
            if self.across and kind == "1f1b":
                kind = "batch-sync"
            name = options.pop("name", module)
            return unit(
                module,
                *fed,
                task=task,
                name=name if task == "default" else f"{task}.{name}",
                kind=kind,
                split=self.split,
                blocks=FACTORIES[module],
                **options,
            )

        # Ranks of the first task's units, so that the second one trains the same copies.
        grids = _grids(self.kind, tp)
        if self.kind == "waves":
            units = [
                part("eye", name="eye.0", cuts=[(0, 2)], kind="wave", **two, ranks=grids["eye"]),
                part("eye", name="eye.1", cuts=[(2, 4)], k=3, kind="wave", ranks=grids["ear"]),
                part("ear", k=2, kind="wave", ranks=grids["ear"]),
                part("reader", **two, tp=tp, kind="wave", ranks=grids["reader"]),
            ]
        else:
            vpp = 2 if self.kind == "interleaved" else 1
            kind = "interleaved" if vpp == 2 else "1f1b"
            units = [
                part("eye", **two, tp=tp, pp=2, vpp=vpp, kind=kind, ranks=grids["eye"]),
                part("ear", k=3, ranks=grids["ear"]),
                part("reader", **two, tp=tp, pp=2, vpp=vpp, kind=kind, ranks=grids["reader"]),
            ]
        if self.across:
            kind = "wave" if self.kind == "waves" else "1f1b"
            units.append(part("pool", k=2, kind=kind, ranks=grids["ear"]))
        return units


def _grids(kind: str, tp: int) -> dict[str, list[list[list[int]]]]:
    """[dp][pp][tp] of eye and reader, on ranks apart or together; ear has one rank."""

    def grid(first: int, pp: int, tp: int) -> list[list[list[int]]]:
        def group(d: int, p: int) -> list[int]:
            start = first + (d * pp + p) * tp
            return list(range(start, start + tp))

        return [[group(d, p) for p in range(pp)] for d in range(2)]

    if kind == "waves":
        return {"eye": grid(0, 1, 1), "reader": grid(2, 1, tp), "ear": [[[0]]]}
    reader = grid(0 if kind == "colocated" else 4 * tp, 2, tp)
    last = 0 if kind == "colocated" else 8 * tp
    return {"eye": grid(0, 2, tp), "reader": reader, "ear": [[[last]]]}


class TextAlone(Dataset[dict[str, Tensor | Ragged]]):
    """Interleaved digits without any image, for one encoder or two: padding in their places."""

    def __init__(self, **options: Any) -> None:
        self._sequences = glances(**options)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor | Ragged]:
        found: dict[str, Tensor | Ragged] = {}
        for field, value in self._sequences[index].items():
            if isinstance(value, Ragged):
                found[field] = Ragged(value.values[:0], torch.tensor([0]))
            else:
                found[field] = value.masked_fill((value == IMAGE) | (value == GLANCE), 0)
        return found


@dataclass(frozen=True, kw_only=True)
class Plain:
    """One process: weights by full name after the last step, and each step's loss."""

    weights: dict[str, Tensor]
    losses: list[float]


@cache
def train_plainly(case: MissingCase) -> Plain:
    """Whole modules on whole batches, one graph, one optimizer."""
    workload = case.workload()
    modules = {name: build_module(workload, name, HERE) for name in workload.modules}
    losses: dict[str, Any] = {name: build_loss(workload, name, HERE) for name in workload.losses}
    named = {f"{m}.{n}": p for m, x in modules.items() for n, p in x.named_parameters()}
    named |= {f"losses.{m}.{n}": p for m, x in losses.items() for n, p in x.named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), **OPTIMIZER)
    views = [workload.tasks[name].data for name in workload.tasks] or [workload.data]
    albums = [Album(view.args["absent"]) for view in views if view is not None]
    steps: list[float] = []
    order = torch.randperm(BATCH * STEPS, generator=torch.Generator().manual_seed(SEED)).tolist()
    for step in range(STEPS):
        chosen = order[step * BATCH : (step + 1) * BATCH]
        total = torch.zeros((), dtype=torch.float64)
        for album in albums:
            values = _batched([album[index] for index in chosen], case.precision)
            for name, module in modules.items():
                first, *rest = module
                with case.autocast():
                    given = first(
                        *(values[str(source)] for source in workload.modules[name].inputs)
                    )
                    for block in rest:
                        given = block(given)
                values[name] = given
            total = total + _total(case, losses, values)
        total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append(float(total.detach()))
    return Plain(weights={n: p.detach().clone() for n, p in named.items()}, losses=steps)


def _batched(samples: Sequence[Mapping[str, Any]], precision: str) -> dict[str, Any]:
    """Fields of a batch, floating ones in the training's type."""
    dtype = torch.float64 if precision == "fp64" else torch.float32

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    found: dict[str, Any] = {}
    for field, first in samples[0].items():
        column = [sample[field] for sample in samples]
        if isinstance(first, Ragged):
            values = cast(torch.cat([item.values for item in column]))
            found[field] = Ragged(values, torch.cat([item.lengths for item in column]))
        else:
            found[field] = cast(torch.stack(column))
    return found


def _total(case: MissingCase, losses: Mapping[str, Any], values: Mapping[str, Any]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name, spec in case.workload().losses.items():
        given = [values[str(source)] for source in spec.inputs]
        if spec.sync_batch is not None:
            wide = [x.float() if x.dtype == torch.bfloat16 else x for x in given]
            starts = range(0, BATCH, spec.sync_batch)
            cuts = [[x[a : a + spec.sync_batch] for x in wide] for a in starts]
            value = torch.stack([losses[name](*cut) for cut in cuts]).mean()
        else:
            with case.autocast():
                value = losses[name](*given)
        if name == "naming":
            value = value / max(int(given[1].lengths.sum()), 1)
        total = total + spec.weight * value
    return total
