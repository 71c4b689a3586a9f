"""Small modules, losses and data that together use every feature a program has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mmplan.ragged import Ragged, samples_of

WIDTH = 8


def mixed(inputs: Sequence[Tensor | None]) -> Tensor:
    """A sum in which each input has a weight of its own, by its place and by their number."""
    parts = [
        item * (1.0 + (place + 1) / (len(inputs) + 1))
        for place, item in enumerate(inputs)
        if item is not None
    ]
    return sum(parts[1:], parts[0])


class Block(nn.Module):
    """Two Linears that tensor parallelism can cut; inputs add up, absent ones are None."""

    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self, inputs: int, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.up = nn.Linear(inputs, width)
        self.down = nn.Linear(width, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        x = mixed(inputs)
        return self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Gated(nn.Module):
    """A fused gate and up, which tensor parallelism cuts apart, by 2, 3, 4 or 6."""

    tp_plan = {"gate_up": "packed_colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        x = mixed(inputs)
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(torch.tanh(gate) * up)


def gated(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Gated() for _ in range(blocks)))


class HeadNorms(nn.Module):
    """Heads with norms, a scale and a Linear that all heads share; tp cuts between heads."""

    tp_plan = {"query": "colwise", "key": "colwise", "out": "rowwise"}  # noqa: RUF012

    def __init__(self, heads: int = 12, head_dim: int = 3) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key = (nn.Linear(WIDTH, heads * head_dim) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.LayerNorm(head_dim)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, head_dim))
        self.mix = nn.Linear(head_dim, head_dim)
        self.out = nn.Linear(heads * head_dim, WIDTH)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        present = [item for item in inputs if item is not None]
        x = sum(present[1:], present[0])
        h = self.norm(x)
        q = self.q_norm(self.query(h).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.key(h).unflatten(-1, (-1, self.head_dim))) * self.scale
        return x + self.out((torch.tanh(self.mix(q)) * k).flatten(-2))


def head_norms(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(HeadNorms() for _ in range(blocks)))


class Words(nn.Module):
    """Counts a sample's positive numbers, and speaks of them in a vocabulary of 7 words."""

    tp_plan = {"table": "vocab", "head": "vocab"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, padding_idx=4)
        self.head, self.back = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        x = mixed(inputs)
        x = x + self.table((x > 0).sum(-1) % 7)
        return x + self.back(self.head(x).softmax(-1))


def words(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Words() for _ in range(blocks)))


def tied_words(blocks: int) -> nn.Sequential:
    """The first block's table is its own head and the last block's table and head."""
    items = [Words() for _ in range(blocks)]
    table = items[0].table.weight
    items[0].head.weight = items[-1].table.weight = items[-1].head.weight = table
    return nn.Sequential(*items)


def shared_norms(blocks: int) -> nn.Sequential:
    """All blocks have one norm of the queries' heads."""
    items = [HeadNorms() for _ in range(blocks)]
    for item in items[1:]:
        item.q_norm = items[0].q_norm
    return nn.Sequential(*items)


class WideNorm(Block):
    """A norm over all channels between the cut Linears, written by hand."""

    def forward(self, *inputs: Tensor | None) -> Tensor:
        h = self.up(self.norm(inputs[0]))
        return self.down(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6))


def norm_of_all_heads(blocks: int) -> nn.Sequential:
    """The last block has it."""
    return nn.Sequential(*tower(blocks - 1), WideNorm(WIDTH, 2 * WIDTH, WIDTH, 0.0))


class Split(nn.Module):
    """A block that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def tower(blocks: int, dropout: float = 0.0, tuple_output: bool = False) -> nn.Sequential:
    items: list[nn.Module] = [
        Block(WIDTH, 2 * WIDTH, WIDTH, dropout) for _ in range(blocks - tuple_output)
    ]
    return nn.Sequential(*items, *([Split()] if tuple_output else []))


def wide(blocks: int, width: int) -> nn.Sequential:
    """Nearly all parameters are matrices."""
    return nn.Sequential(*(Block(WIDTH, width, WIDTH, 0.0) for _ in range(blocks)))


def tied(blocks: int) -> nn.Sequential:
    """The first and the last block share a weight."""
    items = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)]
    items[-1][0].weight = items[0][0].weight
    return nn.Sequential(*items)


class RaggedBlock(nn.Module):
    """Takes and returns (Ragged, mean row per sample); the first one takes Ragged alone."""

    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Ragged | tuple[Ragged, Tensor]) -> tuple[Ragged, Tensor]:
        rows = x if isinstance(x, Ragged) else x[0]
        new = Ragged(rows.values + self.down(torch.tanh(self.up(rows.values))), rows.lengths)
        means = mean_rows(new)
        return new, means if isinstance(x, Ragged) else means + x[1]


class Reader(nn.Module):
    """Takes the output of a :class:`RaggedBlock` and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mean = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: tuple[Ragged, Tensor], other: Tensor) -> Tensor:
        rows, mean = x
        read = Ragged(torch.tanh(self.rows(rows.values)), rows.lengths)
        return mean_rows(read) + self.mean(mean) + other


class WithIds(nn.Module):
    """Returns features and integers, which travel forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), (x > 0).sum(dim=1)


class IdReader(nn.Module):
    """Takes the output of :class:`WithIds` and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH + 1, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor], other: Tensor) -> Tensor:
        features, ids = x
        return features + self.table(ids) + other


def with_ids(blocks: int) -> nn.Sequential:
    return nn.Sequential(*tower(blocks - 1), WithIds())


def id_reader(blocks: int) -> nn.Sequential:
    return nn.Sequential(IdReader(), *tower(blocks - 1))


def mean_rows(x: Ragged) -> Tensor:
    """[batch, width]; zeros for a sample without rows."""
    sample = torch.searchsorted(
        x.lengths.cumsum(0), torch.arange(len(x.values), device=x.values.device), right=True
    )
    sums = x.values.new_zeros((len(x.lengths), x.values.shape[1]))
    return sums.index_add(0, sample, x.values) / x.lengths.clamp(min=1).unsqueeze(1)


class RowBlock(nn.Module):
    """Takes and returns rows, each by itself, or with the mean of its sample's."""

    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixes = mixes

    def forward(self, x: Ragged) -> Ragged:
        values = x.values + self.down(torch.tanh(self.up(x.values)))
        if self.mixes:
            values = values + mean_rows(x)[samples_of(x)]
        return Ragged(values, x.lengths)


class RowReader(Reader):
    """Takes rows and a tensor."""

    def forward(self, x: Ragged, other: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward((x, mean_rows(x)), other)


def rows(blocks: int, mixes: bool = False) -> nn.Sequential:
    return nn.Sequential(*(RowBlock(mixes) for _ in range(blocks)))


class Joined(nn.Module):
    """Makes one row of all."""

    def forward(self, x: Ragged) -> Ragged:
        return Ragged(x.values.sum(0, keepdim=True), x.lengths)


def joined(blocks: int) -> nn.Sequential:
    return nn.Sequential(*rows(blocks - 1), Joined())


def dropout(blocks: int) -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.5), *rows(blocks - 1))


def row_reader(blocks: int) -> nn.Sequential:
    return nn.Sequential(
        RowReader(), *(Block(WIDTH, 2 * WIDTH, WIDTH, 0.0) for _ in range(blocks - 1))
    )


def ragged(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(RaggedBlock() for _ in range(blocks)))


def reader(blocks: int) -> nn.Sequential:
    return nn.Sequential(
        Reader(), *(Block(WIDTH, 2 * WIDTH, WIDTH, 0.0) for _ in range(blocks - 1))
    )


class Contrastive(nn.Module):
    """InfoNCE over any number of modalities, with a parameter and no sharded form."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        target = torch.arange(len(first), device=first.device)
        a = nn.functional.normalize(first, dim=-1)
        terms = [
            nn.functional.cross_entropy(
                a @ nn.functional.normalize(b, dim=-1).t() * self.scale.exp(), target
            )
            for b in others
        ]
        return torch.stack(terms).sum()


class Regression(nn.Module):
    """Mean over samples, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        return (self.head(features).squeeze(-1) - target).square().mean()


class Counted(nn.Module):
    """A sum over targets, of which each sample has another number."""

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return (features.square() * mask).sum()

    def count(self, fields: dict[str, Tensor]) -> Tensor:
        return fields["mask"].sum(dim=1)


class WithIntegers(Contrastive):
    """A cross-sample loss that takes integers beside the features."""

    # As losses of users do, it takes a field more than its base.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, first: Tensor, ids: Tensor, *others: Tensor
    ) -> Tensor:
        weight = 1.0 + ids.to(first.dtype).mean()
        return super().forward(first, *others) * weight


class Samples(Dataset):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.values: dict[str, Tensor] = {
            name: torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
            for name in ("a", "b", "c")
        }
        self.values["target"] = torch.randn(length, generator=generator, dtype=torch.float64)
        counts = torch.randint(0, WIDTH + 1, (length, 1), generator=generator)
        self.values["mask"] = (torch.arange(WIDTH) < counts).to(torch.float64)
        # Every fifth sample has no row at all.
        self.rows = [
            torch.randn(index % 5, WIDTH, generator=generator, dtype=torch.float64)
            for index in range(length)
        ]

    def __len__(self) -> int:
        return len(self.values["a"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = Ragged(self.rows[index], torch.tensor([len(self.rows[index])]))
        return {"rows": rows, **{name: value[index] for name, value in self.values.items()}}


class Ill(nn.Module):
    """Does what the given function does, after one Linear."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def _second_block(blocks: int, function: Callable[[Tensor], Any]) -> nn.Sequential:
    healthy = tower(blocks)
    healthy[1] = Ill(function)
    return healthy


def fails_on_three_samples(blocks: int) -> nn.Sequential:
    def fail(x: Tensor) -> Tensor:
        if len(x) >= 3:
            raise ValueError("three samples are too many")
        return x

    return _second_block(blocks, fail)


def never_works(blocks: int) -> nn.Sequential:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("never works")

    return _second_block(blocks, fail)


def returns_a_list(blocks: int) -> nn.Sequential:
    return _second_block(blocks, lambda x: [x])


def returns_a_scalar(blocks: int) -> nn.Sequential:
    return _second_block(blocks, lambda x: x.sum())
