"""Weight gradients made later equal those that autograd makes at once, in every corner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from mmlaunch.execute.weight_gradients import SplitBackward, WeightGradients

Grads = dict[str, Tensor]


class Twice(nn.Module):
    """One Linear on two inputs, and its weight once more beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x)) + functional.linear(x, self.linear.weight)


class Penalised(nn.Module):
    """Takes a gradient of its own while it runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        free = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(free).square().sum(), free)
        (own,) = torch.autograd.grad(self.linear(free).sum(), self.linear.weight)
        return self.linear(x) * slope.mean() + own.sum()


class Own(nn.Linear):
    """A Linear with a forward of its own, which must run."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def _frozen(*names: str) -> nn.Module:
    block = _mlp()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name not in names)
    return block


def _mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6, bias=False))


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rows": (_mlp, (5, 6)),
    "rows of rows": (_mlp, (2, 3, 5, 6)),
    "one row": (_mlp, (6,)),
    "no rows": (_mlp, (0, 6)),
    "twice": (Twice, (5, 6)),
    "penalised": (Penalised, (5, 6)),
    "tied": (_tied, (5, 6)),
    "frozen weight": (lambda: _frozen("1.weight"), (5, 6)),
    "frozen bias": (lambda: _frozen("1.bias"), (5, 6)),
    "frozen Linears": (lambda: _frozen("1.weight", "1.bias", "3.weight"), (5, 6)),
    "own forward": (lambda: nn.Sequential(Own(6, 6), nn.Linear(6, 6)), (5, 6)),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), (5, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 9, 0.0, batch_first=True), (2, 3, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, padding=1, groups=2), (2, 6, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2, stride=2, bias=False), (2, 3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 2, dilation=2, padding="valid"), (2, 3, 4, 5, 4)),
    "conv padded alike": (lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 6, 6)),
    "conv padded round": (
        lambda: nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"),
        (2, 3, 5),
    ),
    "conv of one": (lambda: nn.Conv1d(3, 4, 2), (3, 5)),
}


def run(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    later: bool,
    leaf: bool = True,
    wrap: Callable[[Callable[[Tensor], Any], Tensor], Any] = lambda block, x: block(x),
) -> tuple[Grads, Tensor | None, int]:
    """Gradients of two micro-batches, the second input's, and how many weights waited."""
    make, shape = BLOCKS[name]
    torch.manual_seed(3)
    block = make().to(dtype)
    split, waited = SplitBackward(), 0
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=leaf) for _ in range(2)]
    pending: list[WeightGradients] = []
    for x in inputs:
        notes = split.microbatch()

        def through(y: Tensor) -> Any:
            with split.during(block):
                return block(y)

        out = wrap(through if later else block, x)
        with notes.collect():
            out.backward(torch.cos(out.detach() + torch.arange(out.shape[-1])))
        waited += len(notes)
        pending.append(notes)
    for notes in reversed(pending):
        notes.compute()
        assert not len(notes)
    grads = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    return grads, inputs[1].grad, waited


def assert_same(got: Grads, want: Grads, rtol: float) -> None:
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert got[name].dtype == grad.dtype
        atol = rtol * max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(got[name], grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_autograds(name: str, leaf: bool) -> None:
    want, want_input, none = run(name, later=False, leaf=leaf)
    got, got_input, waited = run(name, later=True, leaf=leaf)
    assert none == 0
    assert_same(got, want, 1e-13)
    if leaf:
        torch.testing.assert_close(got_input, want_input, rtol=1e-13, atol=1e-13)
    still = {"frozen Linears", "parametrized", "conv padded alike", "conv padded round"}
    assert (waited > 0) == (name not in {*still, "conv of one"})


@pytest.mark.parametrize("name", ["rows of rows", "twice", "tied", "attention", "conv2d"])
def test_nothing_is_there_before_it_is_computed(name: str) -> None:
    """The weights of Linears and convolutions get nothing from I."""
    make, shape = BLOCKS[name]
    block, split = make(), SplitBackward()
    notes = split.microbatch()
    with split.during(block):
        out = block(torch.randn(shape, requires_grad=True))
    with notes.collect():
        out.sum().backward()
    layers = [m for m in block.modules() if type(m) in (nn.Linear, nn.Conv2d)]
    if name == "twice":
        layers = []  # its weight is used beside the layer as well
    assert all(layer.weight.grad is None for layer in layers)
    notes.compute()
    assert all(layer.weight.grad is not None for layer in layers)


@pytest.mark.parametrize("name", ["rows", "attention", "conv2d", "twice"])
def test_recomputation_runs_once_and_gives_the_same(name: str) -> None:
    def again(block: Callable[[Tensor], Any], x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)

    want, want_input, _ = run(name, later=False)
    got, got_input, waited = run(name, later=True, wrap=again)
    assert waited
    assert_same(got, want, 1e-13)
    torch.testing.assert_close(got_input, want_input, rtol=1e-13, atol=1e-13)


def test_recomputation_keeps_the_input_of_the_block_only() -> None:
    block, split = _mlp(), SplitBackward()
    notes = split.microbatch()
    runs: list[int] = []

    def through(y: Tensor) -> Tensor:
        runs.append(1)
        with split.during(block):
            return block(y)

    kept: list[torch.Size] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.shape)
        return t

    x = torch.randn(5, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = checkpoint(through, x, use_reentrant=False)
    assert not [shape for shape in kept if 9 in shape]
    with notes.collect():
        out.sum().backward()
    notes.compute()
    assert len(runs) == 2


@pytest.mark.parametrize("name", ["rows of rows", "twice", "tied", "attention", "conv2d", "conv1d"])
def test_autocast_rounds_alike(name: str) -> None:
    def narrow(block: Callable[[Tensor], Any], x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x).float()

    want, want_input, _ = run(name, later=False, dtype=torch.float32, wrap=narrow)
    got, got_input, waited = run(name, later=True, dtype=torch.float32, wrap=narrow)
    assert waited
    assert {grad.dtype for grad in got.values()} == {torch.float32}
    assert_same(got, want, 2**-7)
    torch.testing.assert_close(got_input, want_input, rtol=2**-7, atol=2**-7)


def test_a_narrow_copy_is_made_once_a_step_and_is_not_autocasts() -> None:
    block, split = nn.Linear(6, 6), SplitBackward()
    x = torch.randn(3, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        outs: list[Tensor] = []
        for _ in range(2):
            autocast = torch.autocast("cpu", dtype=torch.bfloat16)
            with autocast, split.during(block):
                outs.append(block(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = block(x)
    assert len(split._narrow) == 2
    split.forget()
    assert split._narrow == {}
    # A cached copy without a graph would leave the weight without this gradient.
    plain.sum().backward()
    assert block.weight.grad is not None
    assert all(torch.equal(out, plain) for out in outs)


@pytest.mark.parametrize("after", [True, False])
def test_hooks_of_parameters_run_once_with_the_whole_gradient(after: bool) -> None:
    block, split = nn.Linear(6, 6), SplitBackward()
    seen: list[Tensor] = []
    if after:
        block.weight.register_post_accumulate_grad_hook(lambda p: seen.append(_copy(p.grad)))
    else:
        block.weight.register_hook(lambda grad: seen.append(_copy(grad)))
    notes = split.microbatch()
    with split.during(block):
        out = block(block(torch.randn(3, 6, requires_grad=True)))
    with notes.collect():
        out.sum().backward()
    assert len(seen) == 1
    notes.compute()
    assert len(seen) == 1
    assert torch.equal(seen[0], _copy(block.weight.grad))


def _copy(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.clone()


def test_a_backward_that_is_not_split_gives_everything_at_once() -> None:
    block, split = _mlp(), SplitBackward()
    notes = split.microbatch()
    with split.during(block):
        out = block(torch.randn(3, 6))
    out.sum().backward()
    assert len(notes) == 0
    assert all(p.grad is not None for p in block.parameters())


def test_blocks_are_left_as_they_were() -> None:
    block, split = nn.Sequential(nn.Linear(6, 6), nn.Conv1d(3, 3, 1)), SplitBackward()
    patched = nn.Linear(6, 6)
    patched.forward = lambda input: input + 1
    block.append(patched)
    before = [dict(m.__dict__) for m in block.modules()]
    with split.during(block):
        assert "forward" in block[0].__dict__
        assert torch.equal(block[2](torch.zeros(6)), torch.ones(6))
    assert [dict(m.__dict__) for m in block.modules()] == before
    with pytest.raises(ValueError, match="ill"), split.during(block):
        raise ValueError("ill")
    assert [dict(m.__dict__) for m in block.modules()] == before
