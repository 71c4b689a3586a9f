"""Faults of a runtime, as others had them, each planted in ours by one function.

Every function patches the executor's side alone; the reference shares none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mmlaunch.data import loader
from mmlaunch.execute.batch_sync import BatchSync
from mmlaunch.execute.gradient_buckets import FlatShards
from mmlaunch.execute.reductions import Reductions
from mmlaunch.model import local_model, tensor_parallel
from mmlaunch.model.seeds import Seeds
from mmlaunch.session import update
from mmlaunch.session.session import Session
from mmlaunch.session.update import Update
from mmplan.program.model import TieReduction
from mmplan.proof.row_cuts import BlockRows
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import LossSpec, UnitSpec, loss, make_plan, unit
from tests.row_texts import TextCase
from tests.verification import make_workload

BATCH = 12
# A patch to enter.
Planted = Any


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A plan and its workload: two towers of two replicas, in float64, with clipping."""

    tp: int = 1
    pp: int = 1
    sizes: tuple[tuple[int, ...], ...] | None = None
    args: dict[str, Any] = field(default_factory=dict[str, Any])
    factories: dict[str, str] = field(default_factory=dict[str, str])
    zero: int = 0
    recompute: str = "none"
    # The first tower takes rows, some to each sample, and passes them on.
    ragged: bool = False
    # A decoder in place of the towers.
    text: TextCase | None = None

    def made(self) -> tuple[Plan, Workload]:
        if self.text:
            args = {"lr": 0.01, "eps": 1e-4}
            return self.text.plan(), self.text.workload(clip_grad_norm=0.5, optimizer_args=args)
        units: list[UnitSpec] = [
            unit("v", "a", blocks=2, dp=2, tp=self.tp, pp=self.pp, k=2, sizes=self.sizes),
            unit("t", "b", blocks=2, dp=2, k=1),
        ]
        losses: list[LossSpec] = [
            loss("contrastive", "v", "t", sync_batch=BATCH),
            loss("counted", "t", "mask", weight=0.7),
            loss("regression", "v", "target", weight=1.5),
        ]
        if self.ragged:
            units = [
                unit("v", "rows", blocks=2, dp=2, k=2),
                unit("t", "v", "b", blocks=2, dp=2, k=1),
            ]
            losses = [loss("contrastive", "v.1", "t", sync_batch=BATCH)]
        train = {
            "zero": self.zero,
            "optimizer": "AdamW",
            "optimizer_args": {"lr": 0.01},
            "clip_grad_norm": 0.5,
        }
        workload = make_workload(
            units,
            losses,
            batch=BATCH,
            train=train,
            args={"v": self.args, "t": self.args},
            factories=self.factories,
            recompute=self.recompute,
        )
        return make_plan(*units, losses=losses, batch=BATCH), workload


PLAIN = Setup()
ZERO = Setup(zero=1)
TEXT = Setup(text=TextCase(tp=2))
DROPOUT = Setup(args={"dropout": 0.3})


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Planted:
    """A method that gets the sound one before its own arguments."""
    sound = getattr(owner, name)
    return patch.object(owner, name, lambda *a, **k: change(sound, *a, **k))


def _after(owner: Any, name: str, do: Callable[..., None]) -> Planted:
    """A method after which something else is done, with the same arguments."""

    def both(sound: Any, *args: Any, **options: Any) -> Any:
        result = sound(*args, **options)
        do(*args, **options)
        return result

    return _around(owner, name, both)


@contextmanager
def _together(*patches: Planted) -> Generator[None]:
    with ExitStack() as stack:
        for item in patches:
            stack.enter_context(item)
        yield


def zero_not_gathered() -> Planted:
    return patch.object(Reductions, "gather", lambda _: None)


def rate_times_10() -> Planted:
    return _around(update, "rate_factor", lambda sound, *a: 10 * sound(*a))


def gradients_not_zeroed() -> Planted:
    def keep(session: Session, **_: Any) -> None:
        if session.optimizer is not None:
            session.optimizer.zero_grad = lambda set_to_none=True: None

    return _after(Session, "__init__", keep)


def samples_of_step_0() -> Planted:
    return _around(loader, "step_indices", lambda sound, n, b, seed, _: sound(n, b, seed, 0))


def half_the_batch_is_one_sample() -> Planted:
    def repeat(sound: Any, *args: Any) -> list[int]:
        found = sound(*args)
        half = len(found) // 2
        return [found[0]] * half + found[half:]

    return _around(loader, "step_indices", repeat)


def count_of_step_0() -> Planted:
    def keep(sound: Any, self: Any, index: int, field_of: Any) -> None:
        if index not in self._totals:
            sound(self, index, field_of)

    kept = patch.object(Reductions, "begin", lambda _: None)
    return _together(kept, _around(Reductions, "count", keep))


def same_mask_in_each_step() -> Planted:
    return _around(Seeds, "enter", lambda sound, self, _, *where: sound(self, 0, *where))


def dropout_off() -> Planted:
    def evaluate(model: Any, **_: Any) -> None:
        for block in model.blocks.values():
            block.eval()

    return _after(local_model.LocalModel, "__init__", evaluate)


def block_not_trained() -> Planted:
    def without_one(sound: Any, program: Any) -> dict[tuple[str, int], bool]:
        return {**sound(program), ("v", 1): False}

    return _around(local_model, "trainable_blocks", without_one)


def no_clipping() -> Planted:
    def only_measured(sound: Any, self: Any) -> float:
        before = {label: grad.clone() for label, grad in self.gradients().items()}
        norm = sound(self)
        for label, grad in self.gradients().items():
            grad.copy_(before[label])
        return norm

    return _around(Update, "_clip", only_measured)


def rank_never_updates() -> Planted:
    def skip(sound: Any, self: Any, step: int) -> float | None:
        if self._transport.rank != 1:
            return sound(self, step)
        optimizer, self.optimizer = self.optimizer, None
        norm = sound(self, step)
        self.optimizer = optimizer
        optimizer.zero_grad()
        return norm

    return _around(Update, "apply", skip)


def norm_counts_copies() -> Planted:
    def all_count(self: Any, *_: Any, **__: Any) -> None:
        self.slices = [replace(item, counts=True) for item in self.slices]

    return _after(Update, "__init__", all_count)


def encoder_gradients_times_replicas() -> Planted:
    def scale(self: Any, index: int) -> None:
        if getattr(self._program.reductions[index], "owner", "") == "v":
            for item in self._sums[index]:
                for part in item.slices:
                    if part.parameter.grad is not None:
                        part.parameter.grad.mul_(2)

    return _after(Reductions, "reduce", scale)


def sampler_for_each_module() -> Planted:
    def another(sound: Any, self: Any, dataset: Any, **options: Any) -> None:
        options["seed"] += "b" in options["fields"]
        sound(self, dataset, **options)

    return _around(loader.StepLoader, "__init__", another)


def mean_of_uneven_microbatches() -> Planted:
    def per_microbatch(sound: Any, self: Any, term: Any, samples: int) -> float:
        if term.index in self._totals:
            return sound(self, term, samples)
        stage = self._program.stages[term.host]
        return float(term.weight / sum(map(len, stage.microbatches)))

    return _around(Reductions, "scale", per_microbatch)


def normalised_by_module() -> Planted:
    def by_replica(sound: Any, self: Any, term: Any, samples: int) -> float:
        return sound(self, term, samples) * self._program.stages[term.host].dp

    return _around(Reductions, "scale", by_replica)


def rows_of_another_replica() -> Planted:
    def exchanged(sound: Any, self: Any, field: str, start: int, stop: int) -> Any:
        value = sound(self, field, start, stop)
        return value._replace(values=value.values.roll(1, 0)) if field == "rows" else value

    return _around(loader.StepData, "get", exchanged)


def mean_by_rank() -> Planted:
    def own(sound: Any, self: Any, index: int, field_of: Any) -> None:
        ranks = self._program.losses[index].ranks
        with patch.object(self, "_sum_on_host", lambda *_: None):
            sound(self, index, field_of)
        if index in self._totals:
            self._totals[index] *= len(ranks)

    return _around(Reductions, "count", own)


def ties_not_summed() -> Planted:
    def leave_out(sound: Any, self: Any, index: int) -> None:
        if not isinstance(self._program.reductions[index], TieReduction):
            sound(self, index)

    return _around(Reductions, "reduce", leave_out)


def shards_of_ties_not_summed() -> Planted:
    return ties_not_summed()


def partial_gradient_under_tp() -> Planted:
    def kept(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].clone(), None

    return patch.object(tensor_parallel._Enter, "backward", staticmethod(kept))


def found_words_not_summed() -> Planted:
    return patch.object(BlockRows, "sum_of_table", lambda self, name, full: full)


def softmax_over_own_words() -> Planted:
    return patch.object(local_model, "gathered", lambda own, **_: own[None])


def wrong_zero_slice() -> Planted:
    def roll(self: Any, *_: Any) -> None:
        for item in self.updated:
            if item.tensor.grad is not None and item.tensor.numel() > 1:
                item.tensor.grad = item.tensor.grad.flatten().roll(1).view(item.tensor.shape)

    return _after(FlatShards, "finish", roll)


def recompute_draws_other_masks() -> Planted:
    def again(sound: Any, self: Any, step: int, name: str, index: int, first: int) -> None:
        seen = self.__dict__.setdefault("seen", set[tuple[object, ...]]())
        key = step, name, index, first
        sound(self, step, name, index, first + 1000 * (key in seen))
        seen.add(key)

    return _around(Seeds, "enter", again)


def contrastive_times_world() -> Planted:
    def scaled(sound: Any, self: Any, term: Any, batch: int, grads: Any) -> None:
        sound(self, term, batch, {i: grad * len(term.ranks) for i, grad in grads.items()})

    return _around(BatchSync, "_dispatch", scaled)


def replica_with_other_weights() -> Planted:
    def shift(model: Any, *, rank: int, **_: Any) -> None:
        if rank == 1:
            with torch.no_grad():
                for _name, parameter in model.named_parameters():
                    parameter.mul_(1.01)

    return _after(local_model.LocalModel, "__init__", shift)


def loss_weight_forgotten() -> Planted:
    return _around(
        Reductions, "scale", lambda sound, self, term, *a: sound(self, term, *a) / term.weight
    )


def loss_halved() -> Planted:
    return _around(Reductions, "scale", lambda sound, *a: 0.5 * sound(*a))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault.

    Attributes:
        plant: gives the patch.
        setup: where it does harm.
        seen_in: kinds of values of which one at least must differ.
        source: where it was published, or its number in our own list.
    """

    plant: Callable[[], Planted]
    setup: Setup = PLAIN
    seen_in: frozenset[str]
    source: str


def _fault(plant: Callable[[], Planted], source: str, *seen_in: str, setup: Setup = PLAIN) -> Fault:
    return Fault(plant=plant, source=source, seen_in=frozenset(seen_in), setup=setup)


FAULTS = {
    fault.plant.__name__: fault
    for fault in [
        _fault(zero_not_gathered, "R1", "weight", setup=ZERO),
        _fault(rate_times_10, "R2", "weight"),
        _fault(gradients_not_zeroed, "R3", "gradient"),
        _fault(samples_of_step_0, "R4", "samples"),
        _fault(half_the_batch_is_one_sample, "R5", "samples"),
        _fault(count_of_step_0, "R6", "gradient"),
        _fault(same_mask_in_each_step, "R7", "gradient", setup=DROPOUT),
        _fault(dropout_off, "R8", "gradient", setup=DROPOUT),
        _fault(block_not_trained, "R10", "gradient"),
        _fault(no_clipping, "R13", "exp_avg"),
        _fault(rank_never_updates, "R14", "weight"),
        _fault(norm_counts_copies, "P5, NeMo/RL#3788, DeepSpeed#2094", "norm"),
        _fault(encoder_gradients_times_replicas, "Megatron-Bridge#4066", "gradient"),
        _fault(normalised_by_module, "Megatron-Bridge#5555", "gradient"),
        _fault(
            rows_of_another_replica,
            "Megatron-Bridge#5924",
            "gradient",
            setup=Setup(ragged=True, factories={"v": "ragged", "t": "reader"}),
        ),
        _fault(sampler_for_each_module, "Megatron-Bridge#2956", "samples"),
        _fault(
            mean_of_uneven_microbatches,
            "torchtitan#1733",
            "gradient",
            setup=Setup(sizes=((5, 1), (4, 2))),
        ),
        _fault(mean_by_rank, "torchtitan#2206", "gradient"),
        _fault(
            ties_not_summed,
            "piper#13, Megatron-Bridge#5380",
            "gradient",
            setup=Setup(pp=2, factories={"v": "tied"}),
        ),
        _fault(
            shards_of_ties_not_summed,
            "a cut and tied vocabulary",
            "gradient",
            setup=Setup(text=TextCase(model="tied", tp=2, pp=2)),
        ),
        _fault(partial_gradient_under_tp, "Megatron-LM#1446", "gradient", setup=Setup(tp=2)),
        _fault(found_words_not_summed, "a cut embedding's sum", "gradient", setup=TEXT),
        _fault(softmax_over_own_words, "a cut loss's sums", "gradient", setup=TEXT),
        _fault(wrong_zero_slice, "DeepSpeed#966", "gradient", setup=ZERO),
        _fault(
            recompute_draws_other_masks,
            "OLMo-core#828",
            "gradient",
            setup=Setup(args={"dropout": 0.3}, recompute="full"),
        ),
        _fault(contrastive_times_world, "open_clip#616", "gradient"),
        _fault(replica_with_other_weights, "a replica's weights 1% off", "weight"),
        _fault(loss_weight_forgotten, "a loss's weight forgotten", "gradient"),
        _fault(loss_halved, "a loss halved", "gradient"),
    ]
}
