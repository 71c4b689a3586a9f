"""Packs of ragged samples: whole, full, the same for a seed; gradients as of samples apart."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.ragged import Ragged, samples_of
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.plan import Plan
from mmplan.schema.workload import DataSpec, Workload
from mmplan.sources.mixture import Mixture
from mmplan.sources.packing import Packed, best_fit
from mmplan.zoo.interleaved import synthetic
from mmplan.zoo.losses import token_cross_entropy
from tests.programs import loss, make_plan, unit
from tests.training import train_planned, worst_difference

HERE = Path(__file__).parent
WIDTH, BUDGET = 6, 24


class Sequences:
    """Rows of skewed numbers, none of some; ``target`` is a number for each sample."""

    def __init__(self, count: int = 60) -> None:
        draw = np.random.default_rng(2)
        self.counts = np.minimum(draw.lognormal(1.2, 1.0, count).astype(np.int64), BUDGET)
        self.broken = False

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> dict[str, Tensor | Ragged]:
        if self.broken:
            raise ValueError("bad bytes")
        generator = torch.Generator().manual_seed(index)
        rows = torch.randn(int(self.counts[index]), WIDTH, generator=generator, dtype=torch.float64)
        return {
            "x": Ragged(rows, torch.tensor([len(rows)])),
            "target": torch.randn((), generator=generator, dtype=torch.float64),
            "number": torch.tensor(index),
        }

    def lengths(self, field: str) -> Any:
        assert field == "x"
        return self.counts

    def work(self, index: int) -> dict[str, float]:
        return {"reader": float(self.counts[index])}


def pack(seed: int = 0, **args: Any) -> Packed:
    source = {"factory": "tests.test_packing:Sequences"}
    given = {"source": source, "field": "x", "budget": BUDGET, **args}
    return build_dataset(
        DataSpec(factory="mmplan.sources.packing:packed", args=given), HERE, seed=seed
    )


def numbers(data: Packed, index: int) -> list[int]:
    return data[index]["number"].values.tolist()


# ---- packs ----


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(0, 2**62))
def test_packs_are_whole_and_no_two_of_them_fit_into_one(lengths: list[int], seed: int) -> None:
    pack = best_fit(np.array(lengths), 30, seed)
    assert set(pack.tolist()) == set(range(pack.max() + 1))
    rows = sorted(np.bincount(pack, weights=lengths).tolist())
    assert rows[-1] <= 30
    assert len(rows) == 1 or rows[0] + rows[1] > 30
    # The proved bound, against the fewest that the rows could fill.
    assert len(rows) <= 11 / 9 * max(-(-sum(lengths) // 30), sum(2 * n > 30 for n in lengths)) + 4
    assert pack.tolist() == best_fit(np.array(lengths), 30, seed).tolist()


@pytest.mark.parametrize("sigma", [0.8, 1.2])
def test_skewed_samples_fill_their_packs(sigma: float) -> None:
    lengths = np.random.default_rng(0).lognormal(5, sigma, 10_000).round().astype(np.int64)
    lengths = np.clip(lengths, 1, 2048)
    for budget in (2048, 8192):
        pack = best_fit(lengths, budget, 0)
        assert lengths.sum() > 0.99 * budget * (pack.max() + 1)


def test_the_zoo_s_skewed_images_fill_their_packs() -> None:
    data = synthetic(samples=400, length=64, rows=8, image=2, vocab=50)
    counts = np.array([int(data.work(index)["vision"]) for index in range(len(data))])
    packs = Packed(data, "images", 8, counts, 0)
    rows = [len(packs[index]["images"].values) for index in range(len(packs))]
    # Samples without an image take the place of one.
    assert sum(rows) + int((counts == 0).sum()) > 0.95 * 8 * len(packs)
    assert max(rows) <= 8


def test_an_epoch_has_every_sample_once_and_packs_hold_their_rows() -> None:
    data, source = pack(), Sequences()
    assert sorted(i for k in range(len(data)) for i in numbers(data, k)) == list(range(60))
    for index in range(len(data)):
        item, own = data[index], [source[i] for i in numbers(data, index)]
        rows: list[Any] = [sample["x"] for sample in own]
        assert item.keys() == {"x", "x_lengths", "target", "number"}
        assert torch.equal(item["x"].values, torch.cat([x.values for x in rows]))
        assert item["x_lengths"].values.tolist() == [len(x.values) for x in rows]
        assert len(item["x"].values) <= BUDGET
        for field in item.values():
            assert field.lengths.tolist() == [len(field.values)]
        work: Any = data
        assert work.work(index) == {"reader": float(len(item["x"].values))}


def test_packs_follow_from_the_seed_alone() -> None:
    data = pack(seed=5)
    copies = pack(seed=5), pickle.loads(pickle.dumps(data))
    every = range(len(data))
    for copy in copies:
        assert [numbers(copy, k) for k in every] == [numbers(data, k) for k in every]
    other = pack(seed=6)
    assert [numbers(other, k) for k in range(len(other))] != [numbers(data, k) for k in every]


def test_lengths_come_from_a_file_too(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", Sequences().counts)
    data = pack(lengths=str(tmp_path / "lengths.npy"))
    assert [numbers(data, k) for k in range(3)] == [numbers(pack(), k) for k in range(3)]
    np.save(tmp_path / "lengths.npy", Sequences().counts + 1)
    with pytest.raises(InvalidInputError, match=r"sample \d+ has \d+ rows of 'x', its length said"):
        pack(lengths=str(tmp_path / "lengths.npy"), budget=99)


# ---- what cannot be packed ----


class Dense:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(2)}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"budget": 20}, r"sample \d+ has 2\d rows, a pack 20"),
        ({"lengths": "nothing.npy"}, r"nothing.npy: no array of lengths"),
        ({"source": {}}, "source: no factory"),
        ({"source": {"factory": "tests.test_packing:Dense"}}, r"Dense has no lengths\(field\)"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as caught:
        pack(**args)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "lengths", "said"),
    [
        (Dense(), [2, 2, 2], "no ragged field 'x'"),
        (Mixture([Sequences(), Sequences()], [1, 2]), [1] * 120, "Mixture cannot be packed"),
        (Mixture([Sequences(), Sequences()], [1, 2], 120), [1] * 120, "Mixture cannot be packed"),
        (Sequences(), [1.5] * 60, r"the lengths are \[60\] of float64, the source has 60 samples"),
        (Sequences(), [1] * 59, r"the lengths are \[59\] of int64"),
    ],
)
def test_sources_that_cannot_be_packed_are_refused(source: Any, lengths: Any, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Packed(source, "x", BUDGET, lengths, 0)


def test_a_sample_that_raises_or_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Sequences()
    data = Packed(source, "x", BUDGET, source.counts, 0)
    place = next(k for k in range(len(data)) if len(numbers(data, k)) > 1)
    samples = numbers(data, place)
    source.broken = True
    with pytest.raises(RunFailedError, match=rf"sample {samples[0]} raised ValueError: bad bytes"):
        data[place]
    source.broken = False
    whole = Sequences.__getitem__

    def without(self: Sequences, index: int) -> dict[str, Tensor | Ragged]:
        sample = whole(self, index)
        return sample if index != samples[1] else {"x": sample["x"]}

    monkeypatch.setattr(Sequences, "__getitem__", without)
    with pytest.raises(InvalidInputError, match=rf"samples {samples[0]}, {samples[1]}.* do not"):
        data[place]


# ---- gradients ----


class PerRow(nn.Module):
    """A block on rows; the lengths of samples pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, *inputs: Any) -> tuple[Ragged, Ragged]:
        rows, lengths = inputs if len(inputs) == 2 else inputs[0]
        return Ragged(rows.values + torch.tanh(self.inner(rows.values)), rows.lengths), lengths


class Attend(nn.Module):
    """Each sample's rows weighed against each other: a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Ragged, Ragged]) -> Ragged:
        rows, lengths = inputs
        apart = Ragged(rows.values, lengths.values)
        sample, weight = samples_of(apart), torch.exp(torch.tanh(self.score(rows.values)))
        zeros = rows.values.new_zeros(len(lengths.values), WIDTH)
        total = zeros[:, :1].index_add(0, sample, weight)
        pooled = zeros.index_add(0, sample, weight * rows.values) / total.clamp(min=1e-9)
        return Ragged(self.out(pooled), lengths.lengths)


class Squares(nn.Module):
    """A sum over samples, which are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, features: Ragged, target: Ragged) -> Tensor:
        return (self.head(features.values).squeeze(-1) - target.values).square().sum()

    def count(self, fields: dict[str, Ragged]) -> Tensor:
        return fields["target"].lengths


def reader() -> nn.Sequential:
    return nn.Sequential(PerRow(), PerRow(), Attend())


def training() -> Workload:
    packs = {"source": {"factory": "tests.test_packing:Sequences"}, "field": "x", "budget": BUDGET}
    return Workload.model_validate(
        {
            "name": "packs",
            "batch": 6,
            "modules": {
                "reader": {"factory": "tests.test_packing:reader", "inputs": ["x", "x_lengths"]}
            },
            "losses": {
                "squares": {
                    "factory": "tests.test_packing:Squares",
                    "inputs": ["reader", "target"],
                }
            },
            "data": {"factory": "mmplan.sources.packing:packed", "args": packs},
            "train": {
                "precision": "fp64",
                "seed": 4,
                "optimizer": "SGD",
                "optimizer_args": {"lr": 1.0},
            },
        }
    )


PLANS = {
    "one": {"k": 3},
    "replicas": {"dp": 2, "k": 1, "shares": [4, 2]},
    "pipeline": {"pp": 2, "k": 3, "kind": "1f1b"},
}


def planned(how: dict[str, Any]) -> Plan:
    inputs = "x", "x_lengths"
    return make_plan(
        unit("reader", *inputs, blocks=3, **how),
        losses=[loss("squares", "reader", "target")],
        batch=6,
        seed=4,
    )


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_of_the_samples_unpacked(name: str) -> None:
    """Two steps of SGD with a rate of 1: weights differ by gradients alone."""
    workload = training()
    assert workload.data is not None
    module, head = build_module(workload, "reader", HERE), build_loss(workload, "squares", HERE)
    packs, source = build_dataset(workload.data, HERE, seed=4), Sequences()
    parameters = {f"reader.{n}": p for n, p in module.named_parameters()}
    parameters |= {f"losses.squares.{n}": p for n, p in head.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    order = torch.randperm(len(packs), generator=torch.Generator().manual_seed(4)).tolist()
    for step in range(2):
        samples = [i for k in order[6 * step : 6 * step + 6] for i in numbers(packs, k)]
        for index in samples:
            sample: Any = source[index]
            one = torch.tensor([1])
            features = module[0](sample["x"], Ragged(sample["x"].lengths, one))
            target = Ragged(sample["target"][None], one)
            (head(module[1:](features), target) / len(samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = train_planned(planned(PLANS[name]), workload, 2)
    weights = {n: p.detach() for n, p in parameters.items()}
    assert worst_difference(found.weights, weights) < 1e-12


def test_targets_of_packs_stay_within_their_sample() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = [[3, 1], [2], [0, 4, 1]]
    packs = [sum(own) for own in lengths]
    total = sum(packs)
    logits = torch.randn(total, 5, generator=draw, dtype=torch.float64)
    labels = torch.randint(5, (total,), generator=draw)
    each = [torch.tensor(own) for own in lengths]
    apart = Ragged(torch.cat(each), torch.tensor([len(own) for own in lengths]))
    fields = {"labels": Ragged(labels, torch.tensor(packs)), "labels_lengths": apart}
    loss_of = token_cross_entropy()
    alone = Ragged(labels, apart.values)
    assert loss_of.count(fields).tolist() == [2, 1, 3]
    assert loss_of.count({"labels": alone}).sum() == 6
    found = loss_of(Ragged(logits, torch.tensor(packs)), *fields.values())
    assert torch.equal(found, loss_of(Ragged(logits, apart.values), alone))
