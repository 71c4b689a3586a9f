"""Which gradients a tensor-parallel group must sum, and which blocks it cannot run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmlaunch.model.tensor_parallel import shard_block
from mmplan.errors import InvalidInputError
from mmplan.proof.tp_states import tp_states
from tests.matrix_models import WIDTH, HeadNorms
from tests.mixed_tp_cases import MIXED, MixedCase, random_case
from tests.programs import Kind, loss, unit
from tests.test_tp import Group
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import verify_in_process

SHARED = {"q_norm.weight", "k_norm.weight", "k_norm.bias", "scale", "mix.weight", "mix.bias"}


class Cut(nn.Module):
    """``function`` between a column-cut and a row-cut Linear; knows some parameters."""

    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.norm, self.gate = nn.LayerNorm(4), nn.Linear(WIDTH, 1)
        self.wide, self.scale = nn.LayerNorm(24), nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self, x, self.up(x)))


class _Double(torch.autograd.Function):
    """A user's own function, which runs without a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.tanh(scale) * x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        slope = 1 - torch.tanh(scale) ** 2
        return 2 * torch.tanh(scale) * grads[0], (2 * slope * x * grads[0]).sum()


def _written(m: Any, x: Tensor, h: Tensor) -> Tensor:
    """A parameter's values reach the cut width through memory that is written in place."""
    row = torch.zeros(2, dtype=x.dtype)
    row[:1] = m.scale
    return h * row.sum()


def _two_parts(m: Any, x: Tensor, h: Tensor) -> Tensor:
    one, other = m.bias.split(4)
    return h * one.sum() + m.up(x * other.sum())


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (-1, 4))


def _attend(h: Tensor, dropout: float) -> Tensor:
    q = _heads(h).transpose(0, 1)[None]
    mixed = functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout)
    return mixed[0].transpose(0, 1).flatten(-2)


def _x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, WIDTH)), dtype=torch.float64, requires_grad=True)


SUMMED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], set[str]]] = {
    "nothing": (lambda m, x, h: functional.gelu(h), set()),
    "dropout that is off": (
        lambda m, x, h: _attend(functional.dropout(functional.dropout(h, 0.0), 0.5, False), 0.0),
        set(),
    ),
    "a norm of each head": (
        lambda m, x, h: m.norm(_heads(h)).flatten(-2),
        {"norm.weight", "norm.bias"},
    ),
    "a scale": (lambda m, x, h: h * m.scale.exp(), {"scale"}),
    "a scale written in place": (_written, {"scale"}),
    "a function of the user's": (lambda m, x, h: _Double.apply(h, m.scale), {"scale"}),
    "a bias of each head": (lambda m, x, h: (_heads(h) + m.bias[:4]).flatten(-2), {"bias"}),
    "a softmax in each head": (lambda m, x, h: _heads(h).softmax(-1).flatten(-2), set()),
    "rotated halves": (
        lambda m, x, h: torch.cat([-_heads(h)[..., 2:], _heads(h)[..., :2]], -1).flatten(-2),
        set(),
    ),
    "an activation without a gradient": (lambda m, x, h: h * x.detach()[:, :1], set()),
    "all channels, counted from the end": (
        lambda m, x, h: h[..., -24:].tanh(),
        set(),
    ),
    "complex numbers": (
        lambda m, x, h: torch.view_as_real(
            torch.view_as_complex(h.unflatten(-1, (-1, 2))) * torch.polar(m.scale, m.scale)
        ).flatten(-2),
        {"scale"},
    ),
    "a product with a parameter": (
        lambda m, x, h: torch.einsum(
            "bhd,de->bhe", _heads(h), m.norm.weight.outer(m.bias[:4])
        ).flatten(-2),
        {"norm.weight", "bias"},
    ),
}

REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "dropout of its own channels": (lambda m, x, h: functional.dropout(h, 0.1), "random numbers"),
    "dropout of its own heads": (lambda m, x, h: _attend(h, 0.1), "attention draws random numbers"),
    "noise for its own channels": (lambda m, x, h: h + torch.randn_like(h), "random numbers"),
    "a norm over the cut width": (lambda m, x, h: m.wide(h), "tp 2: wide: RuntimeError"),
    "that norm without a weight": (
        lambda m, x, h: functional.layer_norm(h, h.shape[-1:]),
        "norm over a cut width",
    ),
    "that norm by hand": (
        lambda m, x, h: h * torch.rsqrt(h.square().mean(-1, keepdim=True)),
        "mean goes over the cut width",
    ),
    "a sum over heads": (
        lambda m, x, h: h + _heads(h).sum(-2).sum(-1, keepdim=True),
        "sum goes over the cut width",
    ),
    "a softmax over the cut width": (lambda m, x, h: h.softmax(-1), "_softmax goes along the cut"),
    "a softmax over heads": (
        lambda m, x, h: _heads(h).softmax(-2).flatten(-2),
        "_softmax goes along the cut",
    ),
    "a scale by the cut width": (lambda m, x, h: h / h.shape[-1], "computed of a cut size"),
    "positions of a cut width": (
        lambda m, x, h: h * torch.arange(h.shape[-1]),
        "arange takes its size of a cut value",
    ),
    "an activation by the cut width": (
        lambda m, x, h: h * m.gate(x),
        "mul joins a value that is whole",
    ),
    "an activation by the cut width alone": (
        lambda m, x, h: m.up(m.bias.expand(len(x), -1)) * m.gate(x) + 0 * h.detach(),
        "mul joins an activation that is whole",
    ),
    "a residual of whole channels": (lambda m, x, h: h + x[:, :1], "add joins a value"),
    "a parameter used with and without": (
        lambda m, x, h: h * m.scale + (m.bias * m.scale).sum() * 0 + m.up(x * m.scale),
        "used without them too",
    ),
    "two parts of one split": (lambda m, x, h: _two_parts(m, x, h), "used without them too"),
    "heads that are the inner channels": (
        lambda m, x, h: h.view(len(h), 4, -1).transpose(1, 2).reshape(len(h), -1),
        "mixes the shards",
    ),
    "a fused Linear cut as one": (
        lambda m, x, h: torch.cat([h.chunk(2, -1)[0].tanh(), h.chunk(2, -1)[1]], -1),
        "packed_colwise is for Linears of several matrices",
    ),
    "heads in reverse": (lambda m, x, h: h.flip(-1), "flip goes along the cut"),
    "an operation that is not known": (
        lambda m, x, h: torch.fft.fft(h).real,
        "not known to be right on a shard",
    ),
    "other operations on a shard": (
        lambda m, x, h: h.exp() if h.shape[-1] > 12 else h.sin(),
        "where a rank of the group runs sin",
    ),
}


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_partial_gradients_are_found_and_their_sum_is_the_gradient(name: str, count: int) -> None:
    torch.manual_seed(0)
    function, partial = SUMMED[name]
    _check_sums(Cut(function).double(), count, partial)


@pytest.mark.parametrize("count", [2, 4])
def test_norms_scales_and_linears_of_heads_are_summed(count: int) -> None:
    torch.manual_seed(0)
    _check_sums(HeadNorms().double(), count, SHARED)


def _check_sums(block: nn.Module, count: int, partial: set[str]) -> None:
    """The states of a block, and what its ranks really compute."""
    assert tp_states(block, (_x(),), count, where="v.0").partial == partial
    x, grad = _x().detach(), _x().detach()
    out, grad_x, grads = _gradients(block, x, grad)
    group = Group(count)
    ranks = [copy.deepcopy(block) for _ in range(count)]
    cuts = [
        shard_block(rank, index=index, count=count, comm=group.member(index))
        for index, rank in enumerate(ranks)
    ]
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda rank: _gradients(rank, x, grad), ranks))
    for got_out, got_x, _ in results:
        torch.testing.assert_close(got_out, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_x, grad_x, rtol=1e-12, atol=1e-12)
    for name in grads.keys() - cuts[0].keys():
        parts = [got[name] for _, _, got in results]
        if name in partial:
            torch.testing.assert_close(torch.stack(parts).sum(0), grads[name])
            assert not torch.allclose(parts[0], grads[name]), name
        else:
            for part in parts:
                torch.testing.assert_close(part, grads[name])


def _gradients(
    block: nn.Module, x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Output, the input's gradient, and those of the parameters that the block uses."""
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(grad)
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, found


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_group_would_compute_wrong_is_refused(name: str) -> None:
    function, part = REFUSED[name]
    with pytest.raises(InvalidInputError, match=part) as caught:
        tp_states(Cut(function).double(), (_x(),), 2, where="vision.3")
    assert caught.value.message.startswith("vision.3 (Cut) at tp 2: ")
    assert "tp_plan (it has up, down)" in str(caught.value.hint)


# --- runs ------------------------------------------------------------------------------------


def _heads_of(case: MixedCase) -> MixedCase:
    """The case with norms, a scale and a Linear of single heads in every block of its module."""
    return replace(case, factories={**case.factories, "v": "head_norms"})


def _one_task(*, pp: int = 1, dp: int = 1, tp: int = 2, split: bool = False) -> MixedCase:
    kind: Kind = "1f1b"
    return MixedCase(
        units=[
            unit("v", "a", pp=pp, dp=dp, tp=tp, k=2, blocks=pp, kind=kind, split=split),
        ],
        losses=[loss("regression", "v", "target")],
        batch={"default": 12},
        factories={"v": "head_norms"},
    )


def _check_run(case: MixedCase, **workload: Any) -> None:
    verdict = verify_in_process(case.plan(), case.workload(**workload))
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.parametrize(
    ("case", "train"),
    [
        pytest.param(_one_task(), {}, marks=pytest.mark.slow),
        (_one_task(tp=4), {"recompute": "full"}),
        (_one_task(pp=2, dp=2, split=True), {"zero": 1, "recompute": "full"}),
        (_one_task(pp=2, split=True), {"precision": "bf16"}),
    ],
)
def test_runs_equal_one_process(case: MixedCase, train: dict[str, Any]) -> None:
    _check_run(case, **train)


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("3 ranks: tp 2 and tp 1", 1),
        # With a cut vocabulary too: tests/test_vocabulary.py.
        pytest.param("2 ranks: tp 2 and dp 2", 0, marks=pytest.mark.slow),
        pytest.param("one degree, other partners", 1, marks=pytest.mark.slow),
        pytest.param("4 ranks: tp 4, tp 2 and dp 3", 1, marks=pytest.mark.slow),
        pytest.param("7 ranks: tp 2, tp 4 and tp 1", 0, marks=pytest.mark.slow),
        pytest.param("frozen in one task", 0, marks=pytest.mark.slow),
    ],
)
def test_runs_of_mixed_degrees_equal_one_process(name: str, zero: int) -> None:
    _check_run(_heads_of(MIXED[name]), zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("crowded", [False, True])
def test_runs_of_any_slices_equal_one_process(seed: int, crowded: bool) -> None:
    _check_run(_heads_of(random_case(seed, crowded=crowded)), zero=seed % 2)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_three_steps_equal_plain_torch(zero: int) -> None:
    case = _one_task(pp=2, dp=2, split=True)
    workload = case.workload(zero=zero, optimizer="AdamW", optimizer_args={"lr": 0.01, "eps": 1e-4})
    planned = train_planned(case.plan(), workload, 3)
    alone = train_alone(case.plan(), workload, 3, plain(workload))
    assert planned.losses == pytest.approx(alone.losses, rel=1e-12)
    assert worst_difference(planned.weights, alone.weights) < 1e-12


def test_a_run_refuses_what_it_would_train_wrong() -> None:
    case = replace(_one_task(pp=2), factories={"v": "norm_of_all_heads"})
    with pytest.raises(
        InvalidInputError, match=r"v\.1 \(WideNorm\) at tp 2: mean goes over"
    ) as got:
        _check_run(case)
    assert "plan: {tp: 1}" in str(got.value.hint)
    _check_run(replace(_one_task(pp=2, tp=1), factories={"v": "norm_of_all_heads"}))


def test_a_partial_parameter_that_blocks_share_is_refused() -> None:
    case = replace(_one_task(pp=2), factories={"v": "shared_norms"})
    with pytest.raises(InvalidInputError, match=r"v\.0\.q_norm\.weight stands in several blocks"):
        _check_run(case)
