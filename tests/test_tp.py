"""Sharded blocks against whole ones: outputs and every gradient, in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mmlaunch.checkpoint.boxes import shard_boxes
from mmlaunch.model.shard_layout import ShardLayout, shard_layout
from mmlaunch.model.tensor_parallel import CutLinear, shard_block
from mmplan.errors import InvalidInputError
from mmplan.zoo import decoder, seq2seq, towers
from tests.matrix_models import WIDTH, Words
from tests.zoo_tp import gradients_by_name


class Group:
    """All-reduce among threads: everyone writes, a barrier, everyone reads the same sum."""

    def __init__(self, count: int) -> None:
        self.slots: list[Tensor] = [torch.empty(0)] * count
        self.barrier = threading.Barrier(count, timeout=20)
        self.calls = 0

    def member(self, index: int) -> Member:
        return Member(self, index)


class Member:
    def __init__(self, group: Group, index: int) -> None:
        self.group, self.index = group, index

    def all_reduce(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.group.slots[self.index] = tensor.clone()
        self.group.barrier.wait()
        total = torch.stack(self.group.slots).sum(0)
        self.group.barrier.wait()
        if self.index == 0:
            self.group.calls += 1
        with torch.no_grad():
            tensor.copy_(total)


class Plain(nn.Module):
    """q, k, v apart, a gated MLP (packed), biases and norms around."""

    def __init__(self, width: int = 24, heads: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention: Any = nn.Module()
        self.attention.head_dim = width // heads
        for name in "qkv":
            self.attention.add_module(name, nn.Linear(width, width, bias=name != "k"))
        self.attention.out = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 2 * 36)
        self.down = nn.Linear(36, width, bias=False)
        self.tp_plan = {
            "attention.q": "colwise",
            "attention.k": "colwise",
            "attention.v": "colwise",
            "attention.out": "rowwise",
            "gate_up": "packed_colwise",
            "down": "rowwise",
        }

    def forward(self, x: Tensor) -> Tensor:
        h, attention = self.norm(x), self.attention
        q, k, v = (
            getattr(attention, n)(h).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for n in "qkv"
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + attention.out(mixed)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def reference(
    block: nn.Module, x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad, gradients_by_name(block)


def run_sharded(
    block: nn.Module, count: int, x: Tensor, grad: Tensor
) -> tuple[list[tuple[Tensor, Tensor, dict[str, Tensor]]], list[dict[str, ShardLayout]], int]:
    group = Group(count)
    blocks = [copy.deepcopy(block) for _ in range(count)]
    shards = [
        shard_block(b, index=i, count=count, comm=group.member(i)) for i, b in enumerate(blocks)
    ]
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda b: reference(b, x, grad), blocks))
    return results, shards, group.calls


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["plain", "words"])
def test_outputs_and_all_gradients_are_those_of_the_whole_block(kind: str, count: int) -> None:
    torch.manual_seed(0)
    width = 24
    whole = Plain(width).double()
    if kind == "words":
        # No degree divides the 7 tokens; logits that go on in the block are summed too.
        whole, width = Words().double(), WIDTH
    x, grad = torch.randn(2, 3, 5, width, dtype=torch.float64)
    out, grad_x, grads = reference(whole, x, grad)
    results, shards, calls = run_sharded(whole, count, x, grad)
    sums = 2 + 2 if kind == "plain" else 2 + 1
    assert calls == sums, "of each row-cut layer, and of each input of column-cut ones"
    cut_numel = 0
    for index, (got_out, got_grad_x, got) in enumerate(results):
        torch.testing.assert_close(got_out, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_grad_x, grad_x, rtol=1e-11, atol=1e-12)
        assert list(got) == list(grads), "names stay"
        for name, full in grads.items():
            shard = shards[index].get(name)
            boxes = [...] if shard is None else [b.slices for b in _boxes(shard, index, count)]
            expected = torch.cat([full[box] for box in boxes])
            torch.testing.assert_close(got[name], expected, rtol=1e-10, atol=1e-12)
            cut_numel += expected.numel() if shard is not None else 0
    assert cut_numel == sum(grads[name].numel() for name in shards[0]), "shards tile the whole"
    assert all(shards[0][name].full_shape == grads[name].shape for name in shards[0])


def _boxes(shard: ShardLayout, index: int, count: int) -> Any:
    return shard_boxes(shard.full_shape, shard.style, index, count, shard.parts)


def test_the_rowwise_bias_is_whole_and_everything_else_of_the_plan_is_cut() -> None:
    shards = shard_block(Plain(), index=1, count=2, comm=Group(2).member(1))
    assert shards["attention.q.bias"] == shard_layout((24,), "colwise", 1, 2, 1)
    assert shards["gate_up.weight"].parts == 2
    assert "attention.out.bias" not in shards
    assert "norm.weight" not in shards
    qkv = shard_block(towers.text(2, 24, heads=12)[0], index=0, count=2, comm=Group(2).member(0))
    assert qkv["attention.qkv.bias"] == shard_layout((72,), "packed_colwise", 0, 2, 3)


def test_frozen_parameters_stay_frozen_and_shards_own_their_memory() -> None:
    block = Plain()
    block.attention.q.requires_grad_(False)
    shard_block(block, index=0, count=2, comm=Group(2).member(0))
    weight = block.attention.q.weight
    assert not weight.requires_grad
    assert block.attention.k.weight.requires_grad
    assert weight.untyped_storage().nbytes() == weight.numel() * 4
    assert block.attention.q.out_features == 12


def test_a_block_without_plan_and_a_group_of_one_stay_whole() -> None:
    assert shard_block(nn.Linear(2, 2), index=0, count=2, comm=Group(2).member(0)) == {}
    block = Plain()
    assert shard_block(block, index=0, count=1, comm=Group(1).member(0)) == {}
    assert type(block.down) is nn.Linear


def test_shapes_alone_need_no_group() -> None:
    comm = Group(2).member(0)  # its barrier would wait for a second thread
    with FakeTensorMode():
        block = Plain()
        shard_block(block, index=0, count=2, comm=comm)
        assert block(torch.empty(4, 5, 24)).shape == (4, 5, 24)
    with torch.device("meta"):
        block = Plain()
        shard_block(block, index=0, count=2, comm=comm)
        block(torch.empty(4, 5, 24)).sum().backward()
    assert block.down.weight.grad is not None
    assert block.down.weight.grad.shape == (24, 18)


def test_bf16_autocast_keeps_bf16_through_the_sum() -> None:
    block = Plain()
    shard_block(block, index=0, count=2, comm=_Alone())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block.attention.out(torch.randn(2, 12)).dtype == torch.bfloat16


class _Alone:
    """A group whose other rank has the same."""

    sums = 0

    def all_reduce(self, tensor: Tensor) -> None:
        self.sums += 1
        tensor.mul_(2)


class NewInputs(Plain):
    """Gives each Linear a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h, attention = self.norm(x), self.attention
        q, k, v = (getattr(attention, n)(h.flatten(0, 1)) for n in "qkv")
        x = x + attention.out(q * k.sigmoid() + v).view_as(x)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def _activations(rows: int = 5) -> Tensor:
    return torch.randn(2, rows, 24, requires_grad=True)


SUMS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], int, int]] = {
    "q, k, v and gate, up": (
        lambda: decoder.llama(3, 24, heads=4, kv_heads=2, vocab=8)[1], (_activations(),), 2, 2
    ),
    # Cross-attention takes two tensors.
    "cross-attention": (
        lambda: seq2seq.decoder(3, 24, heads=4, vocab=8, length=5)[1],
        (_activations(), _activations(3)),
        3,
        4,
    ),
    "a tensor for each": (NewInputs, (_activations(),), 2, 4),
}  # fmt: skip


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_a_group_sums_once_for_each_tensor_that_cut_linears_take(name: str, again: bool) -> None:
    make, inputs, forward, backward = SUMS[name]
    block, group = make(), _Alone()
    shard_block(block, index=0, count=2, comm=group)
    out = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
    assert group.sums == forward
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    # Recomputation ends at the last tensor that backward needs, before the last sum.
    assert group.sums - forward == backward + (forward - 1 if again else 0)
    cut = next(m for m in block.modules() if isinstance(m, CutLinear))
    assert cut.tp_sums._entered == [], "nothing is held"


def test_inputs_of_their_own_get_the_same_gradients() -> None:
    torch.manual_seed(0)
    whole = NewInputs().double()
    x, grad = torch.randn(2, 3, 5, 24, dtype=torch.float64)
    _, grad_x, _ = reference(whole, x, grad)
    for _, got, _ in run_sharded(whole, 2, x, grad)[0]:
        torch.testing.assert_close(got, grad_x, rtol=1e-11, atol=1e-12)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


class Special(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("block", "plan", "count", "part"),
    [
        (Plain(), {"mlp.up": "colwise"}, 2, "'mlp.up', which the block does not have"),
        (Plain(), {"down": "columns"}, 2, "'columns'"),
        (Plain(), ["down"], 2, "tp_plan is a list"),
        (Plain(), {"norm": "colwise"}, 2, "a LayerNorm"),
        (Plain(), {"gate_up": "colwise"}, 5, "out_features 72, which tp 5 does not divide"),
        (Plain(), {"gate_up": "packed_colwise"}, 8, "72 in 2 parts"),
        (Plain(), {"down": "rowwise"}, 5, "in_features 36, which tp 5"),
        (Plain(24, 3), {"attention.q": "colwise"}, 2, "3 heads of 8 channels"),
        (towers.vision(1, 50, heads=25)[0], None, 2, "25 heads of 2 channels"),
        (
            Tied(),
            {"b": "colwise"},
            2,
            r"cuts b.weight \(colwise\), which is tied to a.weight",
        ),
        (nn.Sequential(nn.Embedding(4, 4)), {"0": "colwise"}, 2, "an? Embedding"),
        (nn.Sequential(Special(4, 4)), {"0": "colwise"}, 2, "a Special"),
    ],
)
def test_what_cannot_be_cut_is_named(block: Any, plan: Any, count: int, part: str) -> None:
    block.tp_plan = block.tp_plan if plan is None else plan
    with pytest.raises(InvalidInputError, match=part) as caught:
        shard_block(block, index=0, count=count, comm=_Alone(), where="vision.3")
    assert caught.value.message.startswith("vision.3: ")
    assert caught.value.hint
