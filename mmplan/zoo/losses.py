"""Losses for workload files: each factory returns an ``nn.Module``.

A loss is one of three kinds, told apart by the workload and by the module:

- ``cross_sample: true`` (``clip``, ``sigmoid``): forward takes the features of a
  whole sync batch and returns its mean. ``clip`` has a ``sharded`` method too, so
  that each rank computes only its own rows.
- a mean per micro-batch (``mse``, ``cross_entropy``): weighted by samples.
- a sum with ``count`` (``token_cross_entropy``): divided by the whole batch's count. With
  ``of_shard`` it takes logits that a tensor-parallel group cuts along the vocabulary.

Shape suffixes used in this file: S = samples of the sync batch, N = own rows of
a rank, D = feature width, M = modalities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged, samples_of

# Past the checker, which takes the decorator's ctx for position-only.
once = cast("Callable[[Any], Any]", once_differentiable)
# Of [...] on each rank [ranks, ...].
GatherOverRanks = Callable[[Tensor], Tensor]
Exchange = Callable[[dict[int, Tensor]], Mapping[int, Tensor]]


class CLIPLoss(nn.Module):
    """Symmetric InfoNCE, averaged over all pairs of two or more modalities.

    With u the features divided by their norms, s = exp(logit_scale), at most
    ``max_scale``, and P = M (M - 1) / 2 pairs,

        loss = 1/(2 P S) sum_{i != j} sum_r [ logsumexp_c(s u_i[r].u_j[c]) - s u_i[r].u_j[r] ].

    Attributes:
        logit_scale: scalar parameter, the logarithm of the scale.
        others_only: rows of a modality are compared with those of the others alone.
    """

    others_only = True

    def __init__(self, *, init_scale: float, max_scale: float) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(init_scale)))
        self.max_log_scale = math.log(max_scale)

    def forward(self, *features: Tensor) -> Tensor:
        """Loss of a sync batch, a scalar: the mean over its samples and pairs.

        Args:
            features: [S, D] per modality; row r of all of them is one sample.

        Raises:
            InvalidInputError: fewer than two modalities, or shapes that differ.
        """
        _check_features(features)
        unit_MSD = [_unit(x) for x in features]
        target_S = torch.arange(len(features[0]), device=features[0].device)
        scale = self._scale()
        losses = [
            functional.cross_entropy(logits, target_S)
            for i, j in combinations(range(len(features)), 2)
            for similarity in [scale * unit_MSD[i] @ unit_MSD[j].T]
            for logits in (similarity, similarity.T)
        ]
        return torch.stack(losses).mean()

    def sharded(
        self,
        own: Mapping[int, Tensor],
        rows: Mapping[int, Tensor],
        full: Mapping[int, Tensor],
        exchange: Exchange,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """This rank's part of the loss and the gradient of its own features.

        Computes own rows against all rows of every other modality. Besides the
        features only one number per row and modality crosses ranks: the
        logsumexp of the row, from which the softmax of the transposed problem
        follows, p_ji[c, r] = exp(s u_j[c].u_i[r] - lse_ji[c]).

        Args:
            own: modality to this rank's features [N, D]; absent where it has none.
            rows: modality to the positions [N] (int64) of these rows in the batch.
            full: modality to all its features [S, D]; the only modality of a rank's
                own may be absent.
            exchange: called once by every rank. Takes {modality: [N, M]} of own
                rows, returns {modality: [S, M]} for those in ``full``.

        Returns:
            The part of the loss (detached; summed over ranks it is
            the forward's value) and {modality: [N, D]}, the gradient of the whole
            loss with respect to the own features. The part of ``logit_scale``'s
            gradient is added to its ``.grad``; summed over ranks it is exact.

        Raises:
            InvalidInputError: fewer than two modalities, or shapes that differ.

        Source:
            DistMM, NSDI 2024, section 5.3.
        """
        num_samples = max(map(len, full.values()), default=0)
        _check_shapes([[num_samples, *x.shape[1:]] for x in {**full, **own}.values()])
        with torch.no_grad():
            part = _Shard(own=own, rows=rows, full=full, scale=self._scale())
            full_lse = exchange(part.lse())
            loss, grad_log_scale = part.loss_and_scale_grad()
            grad_unit = part.unit_grads(full_lse)
        if self.logit_scale.requires_grad:
            # As of a clamp; asking for the number would make the host wait for the device.
            is_free = self.logit_scale.detach() <= self.max_log_scale
            _accumulate(self.logit_scale, grad_log_scale * is_free)
        return loss, {i: _through_unit(own[i], grad_unit[i]) for i in own}

    def _scale(self) -> Tensor:
        return self.logit_scale.clamp(max=self.max_log_scale).exp()


class _Shard:
    """Own rows of each modality against all rows of every other one."""

    def __init__(
        self,
        *,
        own: Mapping[int, Tensor],
        rows: Mapping[int, Tensor],
        full: Mapping[int, Tensor],
        scale: Tensor,
    ) -> None:
        self._rows = rows
        # What is missing in full is held here, for every other one is compared with it.
        self._num_modalities = len({*full, *own})
        self._unit = {i: _unit(x) for i, x in full.items()}
        some = next(iter(self._unit.values()))
        self._scale = scale.to(some.dtype)
        num_pairs = self._num_modalities * (self._num_modalities - 1) // 2
        self._weight = 1.0 / (2 * num_pairs * len(some))
        # Keyed (i, j): logits [N, S] of own rows of i against all rows of j.
        self._logits = {
            (i, j): self._scale * _unit(own[i]) @ self._unit[j].T
            for i in own
            for j in full
            if i != j
        }
        self._lse = {key: logits.logsumexp(dim=1) for key, logits in self._logits.items()}

    def lse(self) -> dict[int, Tensor]:
        """{modality: [N, M]}, zero in the modality's own column."""
        zero = {i: self._scale.new_zeros(len(rows)) for i, rows in self._rows.items()}
        return {
            i: torch.stack([self._lse.get((i, j), zero[i]) for j in range(self._num_modalities)], 1)
            for i in self._rows
        }

    def loss_and_scale_grad(self) -> tuple[Tensor, Tensor]:
        """Own part of the loss, and of its derivative by the logarithm of the scale."""
        loss, grad = self._scale.new_zeros(()), self._scale.new_zeros(())
        for (i, j), logits in self._logits.items():
            positive = logits.gather(1, self._rows[i][:, None])[:, 0]
            softmax = (logits - self._lse[i, j][:, None]).exp()
            loss += self._weight * (self._lse[i, j] - positive).sum()
            grad += self._weight * ((softmax * logits).sum() - positive.sum())
        return loss, grad

    def unit_grads(self, full_lse: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Gradient of the whole loss by the own normalised features, {modality: [N, D]}."""
        width = next(iter(self._unit.values())).shape[1]
        grads = {i: self._scale.new_zeros(len(rows), width) for i, rows in self._rows.items()}
        for (i, j), logits in self._logits.items():
            as_row = (logits - self._lse[i, j][:, None]).exp()
            as_column = (logits - full_lse[j][:, i][None, :]).exp()
            pull = 2 * self._unit[j][self._rows[i]]
            grads[i] += self._weight * self._scale * ((as_row + as_column) @ self._unit[j] - pull)
        return grads


class SigmoidLoss(nn.Module):
    """SigLIP's loss: every pair of rows is a yes-or-no question of its own.

        loss = -1/(P S) sum_{i < j} sum_{r, c} log sigmoid(z_rc (s u_i[r].u_j[c] + b)),

    z = 1 on the diagonal and -1 off it. Source: arXiv:2303.15343.

    Attributes:
        logit_scale: scalar parameter, log s.
        logit_bias: scalar parameter, b.
    """

    def __init__(self, *, init_scale: float, init_bias: float) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(init_scale)))
        self.logit_bias = nn.Parameter(torch.tensor(init_bias))

    def forward(self, *features: Tensor) -> Tensor:
        """Loss of a sync batch: features [S, D] per modality to a scalar.

        Raises:
            InvalidInputError: fewer than two modalities, or shapes that differ.
        """
        _check_features(features)
        unit_MSD = [_unit(x) for x in features]
        num_samples = len(features[0])
        sign = 2 * torch.eye(num_samples, dtype=unit_MSD[0].dtype, device=unit_MSD[0].device) - 1
        losses = [
            -functional.logsigmoid(
                sign * (self.logit_scale.exp() * a @ b.T + self.logit_bias)
            ).sum()
            for a, b in combinations(unit_MSD, 2)
        ]
        return torch.stack(losses).mean() / num_samples


class TokenCrossEntropy(nn.Module):
    """A language model's loss: the SUM over target tokens, divided by their number by the caller.

    A mean per micro-batch would weigh a token by how many others happen to share
    its micro-batch.
    """

    def __init__(self, *, field: str | None, shift: bool, ignore_index: int) -> None:
        super().__init__()
        self.field = field
        self.shift = shift
        self.ignore_index = ignore_index

    def forward(
        self, logits: Tensor | Ragged, labels: Tensor | Ragged, lengths: Ragged | None = None
    ) -> Tensor:
        """Sum of the cross entropy over the targets.

        Args:
            logits: [B, T, V], or ragged with values [tokens, V].
            labels: [B, T] int64, or ragged with values [tokens]; ``ignore_index``
                where there is no target.
            lengths: of packs (:mod:`mmplan.sources.packing`), the tokens of each sample.
        """
        scores = logits.values if isinstance(logits, Ragged) else logits.flatten(0, 1)
        return functional.cross_entropy(
            scores,
            self.targets(labels, lengths).flatten(),
            ignore_index=self.ignore_index,
            reduction="sum",
        )

    def of_shard(
        self,
        tokens: tuple[int, int, int],
        gather: GatherOverRanks,
        logits: Tensor | Ragged,
        labels: Tensor | Ragged,
        lengths: Ragged | None = None,
    ) -> Tensor:
        """The forward on ranks of which each has the logits of some tokens alone.

        Two numbers a row cross ranks: the logsumexp of the rank's logits, and the target's logit
        where the rank has it.

        Args:
            tokens: the first token of which this rank has logits, the end, and of how many.
            gather: called alike by all ranks.
            logits: as for the forward, V being this rank's tokens.
            labels, lengths: as for the forward.

        Source:
            Megatron-LM, arXiv:1909.08053, section 3.
        """
        scores = logits.values if isinstance(logits, Ragged) else logits.flatten(0, 1)
        targets = self.targets(labels, lengths).flatten()
        return _ShardedCrossEntropy.apply(scores, targets, tokens, gather, self.ignore_index)

    def count(self, fields: Mapping[str, Tensor | Ragged]) -> Tensor:
        """Target tokens of each sample, [B] int64.

        Args:
            fields: the data fields among the loss's inputs, batch first.

        Raises:
            InvalidInputError: it is not clear which field holds the labels.
        """
        # Packs have the labels' lengths beside them.
        own = [name for name in fields if name.removesuffix("_lengths") not in {*fields} - {name}]
        name = self.field or (own[0] if len(own) == 1 else None)
        if name is None or name not in fields:
            raise InvalidInputError(
                f"token_cross_entropy has no labels: field {name!r}, its data {sorted(fields)}",
                hint="name the field of the labels: args: {field: NAME}",
            )
        labels = fields[name]
        lengths: Any = fields.get(f"{name}_lengths")
        is_target = (self.targets(labels, lengths) != self.ignore_index).long()
        if not isinstance(labels, Ragged):
            return is_target.sum(dim=1)
        return is_target.new_zeros(len(labels.lengths)).index_add(0, samples_of(labels), is_target)

    def targets(self, labels: Tensor | Ragged, lengths: Ragged | None) -> Tensor:
        """What each position predicts, in the shape of the labels' values."""
        values = labels.values if isinstance(labels, Ragged) else labels
        if not self.shift:
            return values
        targets = values.roll(-1, dims=-1)
        if isinstance(labels, Ragged):
            sample = samples_of(
                Ragged(labels.values, lengths.values) if lengths is not None else labels
            )
            is_last = torch.cat([sample[1:] != sample[:-1], torch.ones_like(sample[:1]).bool()])
            return targets.masked_fill(is_last, self.ignore_index)
        targets[:, -1] = self.ignore_index
        return targets


class _ShardedCrossEntropy(torch.autograd.Function):
    """See :meth:`TokenCrossEntropy.of_shard`. Keeps the logits as they came; N = rows."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        target_N: Tensor,
        tokens: tuple[int, int, int],
        gather: GatherOverRanks,
        ignore_index: int,
    ) -> Tensor:
        first, end, vocab = tokens
        counts_N = target_N != ignore_index
        # No end of the vocabulary is an end of these: the lookup meets labels beyond it.
        mine_N = counts_N
        if first > 0:
            mine_N = mine_N & (target_N >= first)
        if end < vocab:
            mine_N = mine_N & (target_N < end)
        own_N = torch.where(mine_N, target_N - first, 0)
        wide_NV = _wide(logits_NV)
        hit_N = wide_NV.gather(1, own_N[:, None])[:, 0].masked_fill(~mine_N, 0)
        sums_N = wide_NV.logsumexp(1)
        if len(target_N):
            sums_RN, hit_RN = gather(torch.stack([sums_N, hit_N])).unbind(1)
            sums_N, hit_N = sums_RN.logsumexp(0), hit_RN.sum(0)
        ctx.save_for_backward(logits_NV, sums_N, own_N, mine_N, counts_N)
        return (sums_N - hit_N).masked_fill(~counts_N, 0).sum()

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, sums_N, own_N, mine_N, counts_N = ctx.saved_tensors
        grad_NV = (_wide(logits_NV) - sums_N[:, None]).exp_()
        grad_NV.scatter_add_(1, own_N[:, None], -mine_N[:, None].to(grad_NV.dtype))
        grad_NV *= (counts_N * grads[0])[:, None]
        return grad_NV.to(logits_NV.dtype), None, None, None, None


class MeanSquaredError(nn.Module):
    """Mean over samples and elements of the squared difference."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Scalar mean; both [B, ...] of one shape.

        Raises:
            InvalidInputError: shapes that differ, which would broadcast in silence.
        """
        if prediction.shape != target.shape:
            raise InvalidInputError(
                f"mse compares {list(prediction.shape)} with {list(target.shape)}",
                hint="give it a module output and a field of one shape",
            )
        return functional.mse_loss(prediction, target.to(prediction.dtype))


def clip(*, init_scale: float = 1 / 0.07, max_scale: float = 100.0) -> CLIPLoss:
    """CLIP's contrastive loss for two or more modalities; use it with ``cross_sample: true``.

    Args:
        init_scale: scale of the cosine similarities at the start.
        max_scale: the scale is held at or below this.

    Raises:
        InvalidInputError: not 0 < init_scale <= max_scale.
    """
    if not 0 < init_scale <= max_scale < math.inf:
        raise InvalidInputError(
            f"clip needs 0 < init_scale <= max_scale, got {init_scale} and {max_scale}",
            hint="the usual values are 14.3 and 100",
        )
    return CLIPLoss(init_scale=init_scale, max_scale=max_scale)


def sigmoid(*, init_scale: float = 10.0, init_bias: float = -10.0) -> SigmoidLoss:
    """SigLIP's loss for two or more modalities; use it with ``cross_sample: true``.

    Args:
        init_scale: scale of the cosine similarities at the start, above 0.
        init_bias: added to every scaled similarity.

    Raises:
        InvalidInputError: a scale that is not positive.
    """
    if not 0 < init_scale < math.inf:
        raise InvalidInputError(f"sigmoid needs init_scale > 0, got {init_scale}", hint="try 10")
    return SigmoidLoss(init_scale=init_scale, init_bias=init_bias)


def mse() -> MeanSquaredError:
    """Mean squared error of a module's output against a field of the same shape."""
    return MeanSquaredError()


def cross_entropy(*, label_smoothing: float = 0.0) -> nn.CrossEntropyLoss:
    """Classification loss: inputs are logits [B, C] and class indices [B]."""
    return nn.CrossEntropyLoss(label_smoothing=label_smoothing)


def token_cross_entropy(
    *, field: str | None = None, shift: bool = True, ignore_index: int = -100
) -> TokenCrossEntropy:
    """Language-model loss: inputs are logits [B, T, V] and labels [B, T], or both ragged.

    Args:
        field: data field of the labels; needed when the loss has several data fields.
        shift: position t predicts label t + 1; false when the labels are shifted already.
        ignore_index: label of positions without a target (often the padding's id).
    """
    return TokenCrossEntropy(field=field, shift=shift, ignore_index=ignore_index)


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _unit(features: Tensor) -> Tensor:
    """Rows of norm 1, in float32 at least: similarities in bf16 have two digits."""
    return functional.normalize(_wide(features), dim=-1)


def _through_unit(features: Tensor, grad_unit: Tensor) -> Tensor:
    """Gradient by the features, given the one by the normalised features."""
    with torch.enable_grad():
        leaf = features.detach().requires_grad_()
        (grad,) = torch.autograd.grad(_unit(leaf), leaf, grad_unit)
    return grad


def _accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def _check_features(features: Sequence[Tensor]) -> None:
    _check_shapes([list(x.shape) for x in features])


def _check_shapes(shapes: Sequence[list[int]]) -> None:
    if len(shapes) < 2:
        raise InvalidInputError(
            f"a contrastive loss needs two modalities or more, got {len(shapes)}",
            hint="list the outputs of two modules as the loss's inputs",
        )
    if len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
        raise InvalidInputError(
            f"a contrastive loss needs features [samples, width] of one shape, got {shapes}",
            hint="give the modules the same output width (embed)",
        )
