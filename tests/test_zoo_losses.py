"""The zoo's losses: closed forms, and the sharded CLIP loss against forward and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mmplan import Ragged
from mmplan.errors import InvalidInputError
from mmplan.zoo import losses
from tests.zoo_tp import Meeting, run_ranks

# For each modality, the rank that holds each sample's row.
Owners = list[list[int]]


def features(num_modalities: int, num_samples: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_modalities, num_samples, 7)
    return list(torch.randn(shape, generator=generator, dtype=torch.float64) * 3)


def pairs(a: Tensor, b: Tensor, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of two tensors."""
    return list(zip(a.split(sizes), b.split(sizes), strict=True))


def clip_by_hand(xs: list[Tensor], scale: float) -> float:
    """The definition, one scalar at a time."""
    units = [[(row / row.norm()).tolist() for row in x] for x in xs]
    num, total, num_pairs = len(xs[0]), 0.0, 0
    for i in range(len(xs)):
        for j in range(i + 1, len(xs)):
            num_pairs += 1
            for a, b in ((units[i], units[j]), (units[j], units[i])):
                for r in range(num):
                    logits = [
                        scale * sum(x * y for x, y in zip(a[r], b[c], strict=True))
                        for c in range(num)
                    ]
                    total += math.log(sum(map(math.exp, logits))) - logits[r]
    return total / (2 * num_pairs * num)


def run_sharded(
    loss: losses.CLIPLoss,
    xs: list[Tensor],
    owners: Owners,
    num_ranks: int,
    *,
    with_empty: bool = False,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Sum of the ranks' losses, the gradients put together, the sum of the scale's gradients.

    A rank without rows of a modality leaves it out, or passes none ``with_empty``.
    """
    full = [x.detach() for x in xs]
    copies = [losses.clip().double() for _ in range(num_ranks)]
    for copy in copies:
        copy.load_state_dict(loss.state_dict())
        copy.logit_scale.requires_grad_(loss.logit_scale.requires_grad)

    def run(rank: int, meeting: Meeting) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
        rows = {
            i: torch.tensor([s for s, owner in enumerate(row) if owner == rank], dtype=torch.int64)
            for i, row in enumerate(owners)
            if rank in row or with_empty
        }

        def exchange(stats: dict[int, Tensor]) -> dict[int, Tensor]:
            gathered = meeting.all_gather(rank, (rows, stats))
            whole = [torch.full((len(full[0]), len(full)), math.nan).double() for _ in full]
            for their_rows, their_stats in gathered:
                assert their_rows.keys() == their_stats.keys()
                for i, values in their_stats.items():
                    whole[i][their_rows[i]] = values
            return {j: whole[j] for j in read}

        # As in a run: a modality is not compared with itself.
        read = {j: x for j, x in enumerate(full) if list(rows) != [j]}
        own = {i: full[i][index] for i, index in rows.items()}
        part, grads = copies[rank].sharded(own, rows, read, exchange)
        return part, grads, rows

    grads = [torch.full_like(x, math.nan) for x in full]
    total = torch.zeros((), dtype=torch.float64)
    for part, rank_grads, rows in run_ranks(num_ranks, run):
        assert not part.requires_grad
        total += part
        for i, grad in rank_grads.items():
            grads[i][rows[i]] = grad
    scales = [copy.logit_scale.grad for copy in copies if copy.logit_scale.grad is not None]
    return total, grads, torch.stack(scales).sum() if scales else None


def check_sharded(
    xs: list[Tensor], owners: Owners, num_ranks: int, *, with_empty: bool = False
) -> None:
    loss = losses.clip().double()
    leaves = [x.clone().requires_grad_() for x in xs]
    want = loss(*leaves)
    want.backward()
    got, grads, scale_grad = run_sharded(loss, xs, owners, num_ranks, with_empty=with_empty)
    torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
    for grad, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scale_grad, loss.logit_scale.grad, rtol=1e-12, atol=1e-12)


@st.composite
def owner_tables(draw: st.DrawFn) -> tuple[Owners, int]:
    num_ranks = draw(st.integers(1, 4))
    num_samples = draw(st.integers(1, 9))
    row = st.lists(st.integers(0, num_ranks - 1), min_size=num_samples, max_size=num_samples)
    return draw(st.lists(row, min_size=2, max_size=3)), num_ranks


@settings(max_examples=30, deadline=None)
@given(owner_tables(), st.integers(0, 1000), st.booleans())
def test_sharded_clip_equals_one_process(
    case: tuple[Owners, int], seed: int, with_empty: bool
) -> None:
    owners, num_ranks = case
    xs = features(len(owners), len(owners[0]), seed)
    check_sharded(xs, owners, num_ranks, with_empty=with_empty)


@pytest.mark.parametrize(
    "owners",
    [
        [[0] * 22 + [1] * 21 + [2] * 21, [3] * 64],  # uneven replicas of one tower
        [[0] * 64, [1] * 40 + [2] * 24, [2] * 10 + [1] * 54],  # ranks with two modalities
        [[0] * 64, [0] * 64],  # ranks 1 to 3 hold nothing and still meet the others
    ],
)
def test_sharded_clip_with_planned_shares(owners: Owners) -> None:
    check_sharded(features(len(owners), 64), owners, num_ranks=4)


def test_sharded_clip_above_the_largest_scale() -> None:
    owners = [[0, 0, 1, 1], [1, 1, 1, 0]]
    loss = losses.clip().double()
    with torch.no_grad():
        loss.logit_scale.fill_(math.log(150))
    xs = features(2, 4)
    want = loss(*xs)
    want.backward()
    got, _, scale_grad = run_sharded(loss, xs, owners, 2)
    torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
    assert loss.logit_scale.grad == 0
    assert scale_grad == 0


def test_sharded_clip_leaves_a_frozen_scale_alone() -> None:
    loss = losses.clip().double()
    loss.logit_scale.requires_grad_(False)
    _, _, scale_grad = run_sharded(loss, features(2, 4), [[0, 0, 1, 1]] * 2, 2)
    assert scale_grad is None


def test_sharded_clip_adds_to_gradients_of_earlier_sync_batches() -> None:
    loss = losses.clip().double()
    xs = features(2, 4)
    rows = {i: torch.arange(4) for i in range(2)}

    def scale_grad() -> Tensor:
        loss.sharded(dict(enumerate(xs)), rows, dict(enumerate(xs)), lambda stats: stats)
        assert loss.logit_scale.grad is not None
        return loss.logit_scale.grad.clone()

    once, twice = scale_grad(), scale_grad()
    torch.testing.assert_close(twice, 2 * once, rtol=1e-15, atol=0)


@pytest.mark.parametrize("num_modalities", [2, 3, 4])
def test_clip_is_its_definition(num_modalities: int) -> None:
    xs = features(num_modalities, 5)
    got = losses.clip(init_scale=9.0).double()(*xs).item()
    assert got == pytest.approx(clip_by_hand(xs, 9.0), rel=1e-6)  # log 9 passes through float32


def test_clip_of_equal_features_is_the_logarithm_of_the_batch() -> None:
    x = torch.ones(8, 3, dtype=torch.float64)
    assert losses.clip()(x, x).item() == pytest.approx(math.log(8), rel=1e-12)


def test_clip_does_not_see_norms_or_the_order_of_modalities() -> None:
    a, b = features(2, 6)
    loss = losses.clip().double()
    torch.testing.assert_close(loss(a, b), loss(b, 5 * a))


def test_clip_computes_bf16_features_in_float32() -> None:
    xs = [x.bfloat16() for x in features(2, 6)]
    want = losses.clip()(*[x.float() for x in xs])
    assert torch.equal(losses.clip()(*xs), want)
    rows = {i: torch.arange(6) for i in range(2)}
    got, grads = losses.clip().sharded(
        dict(enumerate(xs)), rows, dict(enumerate(xs)), lambda stats: stats
    )
    torch.testing.assert_close(got, want.detach())
    assert {grad.dtype for grad in grads.values()} == {torch.bfloat16}


@pytest.mark.parametrize("factory", [losses.clip, losses.sigmoid])
def test_contrastive_losses_refuse_what_they_cannot_pair(factory: Callable[[], nn.Module]) -> None:
    loss = factory()
    with pytest.raises(InvalidInputError, match="two modalities or more, got 1"):
        loss(torch.ones(3, 4))
    with pytest.raises(InvalidInputError, match=r"one shape, got \[\[3, 4\], \[3, 5\]\]"):
        loss(torch.ones(3, 4), torch.ones(3, 5))


@pytest.mark.parametrize("scale", [0.0, -1.0, 101.0, math.nan])
def test_clip_refuses_scales_out_of_range(scale: float) -> None:
    with pytest.raises(InvalidInputError, match="0 < init_scale <= max_scale"):
        losses.clip(init_scale=scale)


def test_sigmoid_is_its_definition() -> None:
    a, b = features(2, 5)
    loss = losses.sigmoid(init_scale=4.0, init_bias=-2.0).double()
    want = 0.0
    for r in range(5):
        for c in range(5):
            cosine = (a[r] @ b[c] / (a[r].norm() * b[c].norm())).item()
            z = (4.0 * cosine - 2.0) * (1 if r == c else -1)
            want += math.log1p(math.exp(-z)) / 5
    assert loss(a, b).item() == pytest.approx(want, rel=1e-6)
    assert loss(a, b, b).item() == pytest.approx((2 * want + loss(b, b).item()) / 3, rel=1e-6)


@pytest.mark.parametrize("shift", [True, False])
def test_token_sums_over_counts_do_not_depend_on_the_micro_batches(shift: bool) -> None:
    logits = torch.randn(6, 5, 11, dtype=torch.float64)
    labels = torch.randint(11, (6, 5))
    labels[0, 2:], labels[3, 1:], labels[5, :] = -100, -100, -100
    loss = losses.token_cross_entropy(shift=shift)
    counts = loss.count({"labels": labels})
    parts = sum(loss(a, b) for a, b in pairs(logits, labels, [1, 4, 1]))
    shown = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    want = torch.nn.functional.cross_entropy(shown[0].transpose(1, 2), shown[1])
    torch.testing.assert_close(parts / counts.sum(), want)
    assert counts.tolist() == ([1, 4, 4, 0, 4, 0] if shift else [2, 5, 5, 1, 5, 0])


@pytest.mark.parametrize("shift", [True, False])
def test_ragged_tokens_count_and_sum_as_padded_ones(shift: bool) -> None:
    lengths = torch.tensor([3, 0, 1, 5])
    logits, labels = torch.randn(4, 5, 11, dtype=torch.float64), torch.randint(11, (4, 5))
    inside = torch.arange(5) < lengths[:, None]
    labels[~inside] = -100
    labels[3, 2] = -100
    packed_logits, packed_labels = Ragged(logits[inside], lengths), Ragged(labels[inside], lengths)
    loss = losses.token_cross_entropy(shift=shift)
    torch.testing.assert_close(loss(packed_logits, packed_labels), loss(logits, labels))
    assert torch.equal(loss.count({"x": packed_labels}), loss.count({"x": labels}))
    assert loss.count({"x": packed_labels}).tolist() == ([2, 0, 0, 3] if shift else [3, 0, 1, 4])


def test_a_micro_batch_without_any_token_adds_nothing() -> None:
    empty = torch.zeros(3, dtype=torch.int64)
    logits = torch.zeros(0, 11, requires_grad=True)
    labels = Ragged(torch.zeros(0, dtype=torch.int64), empty)
    loss = losses.token_cross_entropy()
    value = loss(Ragged(logits, empty), labels)
    value.backward()
    assert value == 0
    assert logits.grad is not None
    assert loss.count({"labels": labels}).tolist() == [0, 0, 0]


def test_token_loss_finds_its_labels() -> None:
    fields = {"mask": torch.ones(2, 3), "labels": torch.ones(2, 3, dtype=torch.int64)}
    named = losses.token_cross_entropy(field="labels")
    assert named.count(fields).tolist() == [2, 2]
    with pytest.raises(InvalidInputError, match=r"no labels.*\['labels', 'mask'\]"):
        losses.token_cross_entropy().count(fields)


def test_mean_losses_equal_the_weighted_mean_of_their_micro_batches() -> None:
    logits, label = torch.randn(7, 4, dtype=torch.float64), torch.randint(4, (7,))
    target = torch.randn(7, 4)
    for loss, other in ((losses.cross_entropy(), label), (losses.mse(), target)):
        parts = sum(len(a) / 7 * loss(a, b) for a, b in pairs(logits, other, [3, 3, 1]))
        torch.testing.assert_close(parts, loss(logits, other))


def test_mse_refuses_to_broadcast() -> None:
    with pytest.raises(InvalidInputError, match=r"compares \[4, 1\] with \[4\]"):
        losses.mse()(torch.ones(4, 1), torch.ones(4))
