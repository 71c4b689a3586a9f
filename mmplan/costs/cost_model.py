"""Costs of modules, stages, messages and losses from a profile, in seconds and bytes.

A stage ``[a, b)`` takes its whole module's time times its blocks' share of the work, the fixed part
included. Its parameters and activations are shares by the profile's own lists, equal shares
without them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.costs.block_ranges import Blocks, Ranges, gradient_blocks, overlaps, running_shares
from mmplan.costs.fit import fit_key, fit_loss, fit_module, tp_degrees
from mmplan.costs.links import LinkCosts, Transfer
from mmplan.costs.sample_work import SampledWork, fit_for_work
from mmplan.errors import InvalidInputError
from mmplan.program.features import are_apart, readers
from mmplan.program.shards import Ranks
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import PlannedTraining
from mmplan.schema.profile import Curve, LossFit, ModuleFit, ModuleProfile, Profile
from mmplan.schema.recompute import Recompute, recomputed_blocks

# Bytes of a row's logsumexp, which is computed in float32 at least.
_STATISTIC_BYTES = 4
# Numbers of optimizer state per parameter, for optimizers other than Adam; SGD has a momentum.
_STATE_NUMBERS = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "ASGD": 1}
# Adam's two moments.
_ADAM_NUMBERS = 2
# Bytes of a parameter, of its gradient and of each number of its state.
_NUMBER_BYTES = {"fp32": 4, "fp64": 8, "bf16": 4, "fp16": 4}
# Bytes of the copy in which a parameter is computed with.
_COPY_BYTES = {"fp32": 0, "fp64": 0, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class _Shares:
    """Running sums of a profile's per-block lists, so that a range is one subtraction."""

    profile: ModuleProfile
    work: tuple[float, ...]
    parameters: tuple[float, ...]
    activations: tuple[float, ...]
    shared: dict[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class _Whole:
    """The cost of a whole module for one micro-batch."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    activation_bytes: float


class CostModel(LinkCosts):
    """Times (seconds) and sizes (bytes) from a profile's fitted curves.

    Curves are the profile's own ``fits``; others are fitted from its points when first needed.
    Results are cached: solvers need the same numbers often.

    Args:
        profile: the measured, analytic or given costs.
        cluster: its links are used; the profile's own cluster by default.
        training: precision and optimizer, for memory; ZeRO stages are arguments.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster | None = None,
        training: PlannedTraining | None = None,
    ) -> None:
        self.profile = profile
        super().__init__(cluster or profile.cluster)
        self.training = training or PlannedTraining()
        seed, reorder = self.training.seed, self.training.reorder
        self._work = {
            task: SampledWork(work, seed=seed, reordered=reorder)
            for task, work in profile.data.items()
        }
        self._shares: dict[tuple[str, str], _Shares] = {}
        self._fits: dict[tuple[str, str, int], ModuleFit] = {}
        self._fitted: dict[tuple[str, int], ModuleFit] = {}
        self._whole: dict[tuple[str, str, int, float], _Whole] = {}
        self._loss_fits: dict[str, LossFit] = {}
        self._asked: dict[str, tuple[Curve, float, float]] = {}
        self._outputs: dict[tuple[str, str], list[float]] = {}
        self._own_parameters: dict[tuple[str, str, int], float] = {}

    # --- modules ---------------------------------------------------------------------

    def tp_options(self, *, task: str, module: str) -> tuple[int, ...]:
        """Tensor-parallel degrees that have points, ascending."""
        return tp_degrees(self._module(task, module).profile)

    def num_blocks(self, *, task: str, module: str) -> int:
        """Blocks of a module."""
        return self._module(task, module).profile.blocks

    def work_share(self, *, task: str, module: str, blocks: Blocks) -> float:
        """Share of a module's work that lies in a range of its blocks."""
        return _between(self._module(task, module).work, blocks)

    def activation_share(self, *, task: str, module: str, blocks: Blocks) -> float:
        """Share of a module's activation bytes that lies in a range of its blocks."""
        return _between(self._module(task, module).activations, blocks)

    def curves(self, *, task: str, module: str, tp: int) -> ModuleFit:
        """A whole module's curves over the micro-batch size."""
        key = task, module, tp
        if key not in self._fits:
            profile = self._module(task, module).profile
            if tp not in tp_degrees(profile):
                options = ", ".join(map(str, tp_degrees(profile)))
                raise InvalidInputError(
                    f"module {module} has no points at tp {tp}; the profile has tp {options}",
                    hint=f"plan with one of these, or profile {module} at tp {tp} as well",
                )
            # Tasks without costs of their own share the module's.
            shared = self._fit_key(task, module), tp
            if shared not in self._fitted:
                fits = self.profile.fits
                stored = fits and fits.modules.get(shared[0], {}).get(str(tp))
                self._fitted[shared] = stored or fit_module(profile, tp)
            self._fits[key] = fit_for_work(self._fitted[shared], self.mean_work(task, module))
        return self._fits[key]

    def sampled_work(self, task: str) -> SampledWork | None:
        """The varying work of a task's samples, where the profile knows it."""
        return self._work.get(task)

    def straggler(self, *, task: str, module: str, dp: int, samples: int) -> float:
        """Expected work of the busiest of dp replicas over the mean; 1 where all samples are equal.

        The times of a module with dp replicas are those of its micro-batch times this factor.

        Args:
            task: its data.
            module: the module.
            dp: its replicas; they wait for each other after every round.
            samples: of a round, over all replicas.
        """
        known = self._work.get(task)
        return 1.0 if known is None else known.straggler(module, dp=dp, samples=samples)

    def loss_curves(self, loss: str, tp: int = 1) -> LossFit | None:
        """A loss's curves over the samples; None for a loss that the profile does not know.

        Args:
            loss: its name.
            tp: ranks of its host's tensor-parallel group, which share out the part of the time
                that grows with the samples where they cut the vocabulary.
        """
        profile, fits = self.profile.losses.get(loss), self.profile.fits
        if profile is None:
            return None
        if loss not in self._loss_fits:
            stored = fits.losses.get(loss) if fits else None
            self._loss_fits[loss] = stored or fit_loss(profile)
        whole = self._loss_fits[loss]
        if tp == 1 or not profile.cuts_vocabulary:
            return whole
        return LossFit(forward=_divided(whole.forward, tp), backward=_divided(whole.backward, tp))

    def forward_s(
        self, *, task: str, module: str, tp: int, samples: float, blocks: Blocks | None = None
    ) -> float:
        """Seconds of a range's forward (default: the whole module) for one micro-batch."""
        share = 1.0 if blocks is None else self.work_share(task=task, module=module, blocks=blocks)
        return self._whole_cost(task, module, tp, samples).forward_s * share

    def backward_s(
        self,
        *,
        task: str,
        module: str,
        tp: int,
        samples: float,
        blocks: Blocks | None = None,
        trainable: Ranges | None = None,
        input_gradient: bool = True,
        recompute: Recompute = "none",
    ) -> float:
        """Seconds of a range's backward for one micro-batch.

        Input gradients cost ``backward_input_s`` over the blocks from the first that a
        gradient passes. Weight gradients cost the rest of the backward over those that train.

        Args:
            task: its version of the module.
            module: the module.
            tp: tensor-parallel degree.
            samples: the micro-batch in samples of mean work.
            blocks: the stage, default the whole module.
            trainable: ranges of blocks that train, default all.
            input_gradient: whether something before the stage takes a gradient.
            recompute: of the module; adds the forward of its blocks that a gradient passes.
        """
        whole = self._whole_cost(task, module, tp, samples)
        work = self._module(task, module).work
        blocks = blocks or (0, len(work) - 1)
        passed = gradient_blocks(blocks, trainable, input_gradient=input_gradient)
        if passed is None:
            return 0.0
        weights = sum(_between(work, part) for part in overlaps(blocks, trainable))
        repeated = overlaps(passed, recomputed_blocks(recompute, len(work) - 1))
        again = sum(_between(work, part) for part in repeated)
        return (
            whole.backward_input_s * _between(work, passed)
            + whole.forward_s * again
            + max(whole.backward_s - whole.backward_input_s, 0.0) * weights
        )

    def activation_bytes(
        self,
        *,
        task: str,
        module: str,
        tp: int,
        samples: float,
        blocks: Blocks | None = None,
        recompute: Recompute = "none",
    ) -> float:
        """Bytes that one device holds of a micro-batch between its forward and backward.

        A block that recomputes keeps its output only, which is the next one's input: the bytes of
        the cut after it, replicated on every tensor-parallel rank, or shared out with sequence
        parallelism. The first input of a stage is data, or a message, and is counted there.
        """
        shares = self._module(task, module)
        blocks = blocks or (0, shares.profile.blocks)
        again = overlaps(blocks, recomputed_blocks(recompute, shares.profile.blocks))
        held = _between(shares.activations, blocks) - sum(
            _between(shares.activations, part) for part in again
        )
        outputs = self._output_bytes(task, module)
        sharers = tp if self.training.sequence_parallel else 1
        return (
            self._whole_cost(task, module, tp, samples).activation_bytes * held
            + samples * sum(_between(outputs, part) for part in again) / sharers
        )

    def _output_bytes(self, task: str, module: str) -> list[float]:
        """Running sums of the blocks' output bytes per sample."""
        key = task, module
        if key not in self._outputs:
            blocks = range(self.num_blocks(task=task, module=module))
            sizes = (self.cut_bytes(task=task, module=module, after_block=b) for b in blocks)
            self._outputs[key] = list(itertools.accumulate(sizes, initial=0.0))
        return self._outputs[key]

    def parameters(self, *, task: str, module: str, blocks: Blocks | None = None) -> float:
        """Number of parameters of a range of blocks (default: all).

        Those that several blocks share count in their first block alone.
        """
        shares = self._module(task, module)
        share = 1.0 if blocks is None else _between(shares.parameters, blocks)
        return shares.profile.parameters * share

    def shared_parameters(self, *, task: str, module: str) -> dict[tuple[int, ...], int]:
        """Blocks, ascending, to the number of parameters that all of them share."""
        return self._module(task, module).shared

    def own_parameters(self, *, task: str, module: str, block: int) -> float:
        """Number of parameters of a block that no other block has."""
        key = task, module, block
        if key not in self._own_parameters:
            shared = self.shared_parameters(task=task, module=module)
            number = self.parameters(task=task, module=module, blocks=(block, block + 1))
            others = sum(n for blocks, n in shared.items() if blocks[0] == block)
            self._own_parameters[key] = max(0.0, number - others)
        return self._own_parameters[key]

    def gathered_bytes(
        self, *, task: str, module: str, blocks: Blocks, trainable: Ranges | None = None
    ) -> float:
        """Most bytes that ZeRO-3 has whole while a block's backward runs: weights and gradient.

        On a device of its own the weights of the block before it are gathered meanwhile.
        Parameters that blocks share are whole all the time, and not among these.
        """
        numbers = [
            self.own_parameters(task=task, module=module, block=block)
            for part in overlaps(blocks, trainable)
            for block in range(*part)
        ]
        ahead = 0 if self.cluster.device.is_cpu else self.held_bytes
        own = self.held_bytes + self.gradient_bytes(zero=3)
        found = (n * own + before * ahead for before, n in itertools.pairwise([0.0, *numbers]))
        return max(found, default=0.0)

    @property
    def held_bytes(self) -> int:
        """Bytes of one parameter in a block that ZeRO-3 gathers."""
        precision = self.training.precision
        return _COPY_BYTES[precision] or _NUMBER_BYTES[precision]

    def bytes_per_parameter(
        self,
        *,
        trainable: bool,
        zero: int = 0,
        dp: int = 1,
        in_rounds: bool = False,
        gathers: bool = False,
    ) -> float:
        """Bytes that one parameter costs a device under this training and a ZeRO stage.

        ZeRO-1 cuts the state; where weights have a narrow copy it cuts the weights beside it too.
        ZeRO-2 cuts gradients that are summed after each micro-batch (``in_rounds``), ZeRO-3 also
        the weights of stages that gather them.
        """
        precision = self.training.precision
        number, copy = _NUMBER_BYTES[precision], _COPY_BYTES[precision]
        if not trainable:
            return number + copy
        if not zero or dp == 1:
            return number + copy + number + self._state_bytes
        each, cut = self.shard_bytes(zero, in_rounds=in_rounds, gathers=gathers)
        return each + cut / dp

    def shard_bytes(
        self, zero: int, *, in_rounds: bool = False, gathers: bool = False
    ) -> tuple[float, float]:
        """Bytes of one parameter that trains under ZeRO: on each rank, and what ranks share out."""
        precision = self.training.precision
        number, copy = _NUMBER_BYTES[precision], _COPY_BYTES[precision]
        held, cut = (copy, number + self._state_bytes) if copy else (number, self._state_bytes)
        if gathers and zero > 2:
            # The narrow weights are rounded for each gather anew.
            held, cut = 0.0, cut if copy else cut + held
        if in_rounds and zero > 1:
            return held, cut + number
        return held + self.gradient_bytes(zero), cut

    @property
    def _state_bytes(self) -> int:
        """Bytes of one parameter's optimizer state."""
        numbers = _STATE_NUMBERS.get(self.training.optimizer, _ADAM_NUMBERS)
        return _NUMBER_BYTES[self.training.precision] * numbers

    def gradient_bytes(self, zero: int) -> int:
        """Bytes of one parameter's gradient that several ranks sum."""
        precision = self.training.precision
        narrow = zero and self.training.narrow_gradients and _COPY_BYTES[precision]
        return narrow or _NUMBER_BYTES[precision]

    def flops_per_sample(self, *, task: str, module: str) -> float:
        """Floating-point operations of a whole module's forward for one sample."""
        return self._module(task, module).profile.flops_per_sample * self.mean_work(task, module)

    # --- cuts ------------------------------------------------------------------------

    def cut_bytes(self, *, task: str, module: str, after_block: int) -> float:
        """Bytes per sample that cross a cut after a block; the output after the last."""
        profile = self._module(task, module).profile
        if after_block == profile.blocks - 1:
            return profile.output_bytes_per_sample
        if profile.block_boundary_bytes is not None:
            return profile.block_boundary_bytes[after_block]
        return profile.boundary_bytes_per_sample

    # --- losses ----------------------------------------------------------------------

    def loss_s(
        self, *, loss: str, samples: int, shards: int = 1, tp: int = 1
    ) -> tuple[float, float]:
        """Forward and backward seconds of a loss on ``samples`` samples.

        Args:
            loss: its name; a loss that the profile does not know is free.
            samples: of the sync batch, or of the micro-batch.
            shards: ranks of the loss; ranks of a sharded loss divide the part of the time that
                grows with the samples.
            tp: as for :meth:`loss_curves`.
        """
        fit = self.loss_curves(loss, tp)
        if fit is None:
            return 0.0, 0.0
        self._note(f"loss {loss}: {{}} samples", fit.forward, samples)
        parts = shards if self.profile.losses[loss].sharded else 1
        curves = fit.forward, fit.backward
        forward_s, backward_s = (c.alpha + (c.at(samples) - c.alpha) / parts for c in curves)
        return forward_s, backward_s

    def reads_others_only(self, loss: str) -> bool:
        """Whether ranks of a loss read the features of inputs that they do not hold alone."""
        known = self.profile.losses.get(loss)
        return known is not None and known.sharded and known.others_only

    def trains(self, loss: str) -> bool:
        """Whether a loss has parameters that train, as far as the profile knows."""
        known = self.profile.losses.get(loss)
        return known is None or known.trains

    def features(self, *, loss: str, samples: int, held: Sequence[tuple[Ranks, float]]) -> Transfer:
        """The time in which the ranks of a loss receive the rows that they read.

        Args:
            loss: its name.
            samples: of the sync batch.
            held: of each input, the ranks that hold it and the bytes of a row.
        """
        holders = [ranks for ranks, _ in held]
        only = self.reads_others_only(loss)
        if not are_apart(holders, others_only=only):
            ranks = sorted({rank for ranks in holders for rank in ranks})
            return self.all_gather(ranks=ranks, num_bytes=samples * sum(size for _, size in held))
        gathers: defaultdict[Ranks, float] = defaultdict(float)
        for (_, size), ranks in zip(held, readers(holders, others_only=only), strict=True):
            gathers[ranks] += samples * size
        # A rank gathers its inputs one after the other; that of most seconds counts.
        slowest = Transfer(0.0)
        parts = {ranks: self._first_phase(ranks, size, held) for ranks, size in gathers.items()}
        whole = {r: self.all_gather(ranks=r, num_bytes=size) for r, size in gathers.items()}
        for rank in {rank for ranks in gathers for rank in ranks}:
            own = [t[ranks] for ranks in gathers if rank in ranks for t in (parts, whole)]
            total = Transfer(sum(t.seconds for t in own), sum(t.interface_s for t in own))
            slowest = max(slowest, total, key=lambda transfer: transfer.seconds)
        return slowest

    def _first_phase(
        self, ranks: Ranks, num_bytes: float, held: Sequence[tuple[Ranks, float]]
    ) -> Transfer:
        """Each reader's share, as a message; readers on one node share its interface."""
        node_of = self.cluster.node_of
        node, most = Counter(map(node_of, ranks)).most_common(1)[0]
        sources = sorted({rank for holders, _ in held for rank in holders} - {*ranks})
        target = next(rank for rank in ranks if node_of(rank) == node)
        source = next((rank for rank in sources if node_of(rank) != node), (*sources, target)[0])
        together = most if node_of(source) != node else 1
        num_bytes *= together / len(ranks)
        return self.message(source=source, target=target, num_bytes=num_bytes)

    def statistics_s(self, *, loss: str, samples: int, holders: Sequence[Ranks]) -> float:
        """Seconds in which the ranks of a sharded loss exchange their rows' statistics.

        Args:
            loss: its name; only a sharded one has any.
            samples: of the sync batch.
            holders: of each input, the ranks that hold it.
        """
        known = self.profile.losses.get(loss)
        if known is None or not known.sharded:
            return 0.0
        per_row = len(holders) if known.exchanged_per_row is None else known.exchanged_per_row
        held = [(ranks, float(per_row * _STATISTIC_BYTES)) for ranks in holders]
        return self.features(loss=loss, samples=samples, held=held).seconds

    def extrapolations(self) -> list[str]:
        """Sizes beyond the measured range, one line for each curve."""
        lines: list[str] = []
        for text, (curve, least, most) in sorted(self._asked.items()):
            beyond = [
                n for n, out in ((least, least < curve.lowest), (most, most > curve.highest)) if out
            ]
            if beyond:
                measured = f"measured from {curve.lowest:g} to {curve.highest:g}"
                lines.append(f"{text.format(' and '.join(f'{n:g}' for n in beyond))} ({measured})")
        return lines

    # --- looking things up -----------------------------------------------------------

    def _module(self, task: str, module: str) -> _Shares:
        key = task, module
        if key not in self._shares:
            profile = self.profile.module(module, task)
            self._shares[key] = _Shares(
                profile=profile,
                work=running_shares(profile.block_work, profile.blocks),
                parameters=running_shares(profile.block_parameters, profile.blocks),
                activations=running_shares(profile.block_activation_bytes, profile.blocks),
                shared=profile.shared_parameters,
            )
        return self._shares[key]

    def mean_work(self, task: str, module: str) -> float:
        """Mean work of a sample, in samples like those that the points were taken on."""
        known = self._work.get(task)
        return 1.0 if known is None else known.mean(module)

    def _whole_cost(self, task: str, module: str, tp: int, samples: float) -> _Whole:
        key = task, module, tp, samples
        if key not in self._whole:
            fit = self.curves(task=task, module=module, tp=tp)
            key_of_fit = self._fit_key(task, module)
            self._note(f"{key_of_fit} at tp {tp}: micro-batch {{}}", fit.forward, samples)
            self._whole[key] = _Whole(
                forward_s=fit.forward.at(samples),
                backward_s=fit.backward.at(samples),
                backward_input_s=fit.backward_input.at(samples),
                activation_bytes=fit.activation_bytes.at(samples),
            )
        return self._whole[key]

    def _fit_key(self, task: str, module: str) -> str:
        return fit_key(module, task if module in self.profile.tasks.get(task, {}) else None)

    def _note(self, text: str, curve: Curve, size: float) -> None:
        _, least, most = self._asked.get(text, (curve, size, size))
        self._asked[text] = curve, min(least, size), max(most, size)


def _between(running: Sequence[float], blocks: Blocks) -> float:
    return running[blocks[1]] - running[blocks[0]]


def _divided(curve: Curve, parts: int) -> Curve:
    """The curve with its slopes shared out."""
    return curve.model_copy(update={"slopes": tuple(slope / parts for slope in curve.slopes)})
