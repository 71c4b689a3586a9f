"""The one table of what a module's stages cost, for all degrees and micro-batches at once.

Everything about a stage is a sum over its blocks, times what the whole module takes of a
micro-batch, which knows no blocks. The rules are those of
:class:`mmplan.costs.cost_model.CostModel`, which says them for one stage and one micro-batch.

Shape suffixes: L = blocks, C = stages (chunks of a pipeline position).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.costs.block_ranges import Blocks
from mmplan.costs.fit import curve_values
from mmplan.costs.links import all_reduce_s
from mmplan.costs.program_costs import CostModel
from mmplan.schema.cluster import Cluster
from mmplan.schema.recompute import Recompute, recomputed_blocks

# Columns of a stage's shares: of the module's work; of the work that a gradient passes; of the
# work whose weights train; of what of the passed work recomputes; 1 where the losses are that the
# module hosts.
WORK, PASSED, TRAINED, AGAIN, LOSSES = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """A module cut into stages, at tp 1.

    Attributes:
        cuts: the stages.
        shares: [C, 5], columns above.
        held: [C], share of the module's activations that is held, of blocks that do not recompute.
        outputs: [C], bytes per sample of the outputs of blocks that recompute.
        trained: [C], parameters that train; ``frozen`` the others. Of those that several blocks
            share a later stage has a copy.
        cut_bytes: [C], of the output of each stage, per sample.
    """

    cuts: tuple[Blocks, ...]
    shares: Floats
    held: Floats
    outputs: Floats
    trained: Floats
    frozen: Floats
    cut_bytes: Floats


class ModuleCosts:
    """The costs of one module's blocks.

    Args:
        costs: of the profile.
        task: whose version of the module.
        module: its name.
        passed: of each block, whether a gradient passes.
        trains: of each block, whether its weights train.
        losses: that the last block hosts.
        recompute: of the module: how many blocks keep their outputs only.
        round_samples: of a round of the task.
        zero: ZeRO stage of its parameters.

    Attributes:
        blocks: every block as a stage, without copies of parameters.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        task: str,
        module: str,
        passed: Sequence[bool],
        trains: Sequence[bool],
        losses: Sequence[str],
        recompute: Recompute,
        round_samples: int,
        zero: int,
    ) -> None:
        self._costs, self._task, self._module = costs, task, module
        self._round_samples, self._zero = round_samples, zero
        self._straggler = cache(self._compute_straggler)
        self._losses = losses
        cuts = tuple((b, b + 1) for b in range(len(passed)))

        def array(value: Callable[..., float]) -> Floats:
            return np.array([value(task=task, module=module, blocks=cut) for cut in cuts])

        work, parameters = array(costs.work_share), array(costs.parameters)
        passed_L, trains_L = np.array(passed, dtype=np.float64), np.array(trains, dtype=np.float64)
        again_L = np.zeros(len(cuts))
        for first, end in recomputed_blocks(recompute, len(cuts)):
            again_L[first:end] = passed_L[first:end]
        last_L = np.arange(len(cuts)) == len(cuts) - 1
        cut_bytes = np.array(
            [costs.cut_bytes(task=task, module=module, after_block=b) for b, _ in cuts]
        )
        self.blocks = StageCosts(
            cuts=cuts,
            shares=np.stack(
                [work, work * passed_L, work * trains_L, work * again_L, last_L], axis=1
            ),
            held=array(costs.activation_share) * (passed_L - again_L),
            outputs=cut_bytes * again_L,
            trained=parameters * trains_L,
            frozen=parameters * (1 - trains_L),
            cut_bytes=cut_bytes,
        )
        shared = costs.shared_parameters(task=task, module=module)
        # Of parameters that blocks share: the blocks, how many, and whether they train.
        self._shared = [(own, n, all(trains[b] for b in own)) for own, n in shared.items()]
        own = self.blocks
        columns = [own.shares, own.held, own.outputs, own.trained, own.frozen]
        # A row of zeros after the last block, so that its end is a place too.
        self._per_block = np.pad(np.column_stack(columns), ((0, 1), (0, 0)))

    def _compute_straggler(self, dp: int) -> float:
        return self._costs.straggler(
            task=self._task, module=self._module, dp=dp, samples=self._round_samples
        )

    def stages(self, cuts: tuple[Blocks, ...]) -> StageCosts:
        """Ranges of the module's blocks as stages."""
        # Sums from each range's start to its end, and from there on; every other one counts.
        sums = np.add.reduceat(self._per_block, np.array(cuts).ravel())[::2]
        held, outputs, trained, frozen = sums[:, LOSSES + 1 :].T
        for shared, number, trains in self._shared:
            copied = [a > shared[0] and any(a <= b < stop for b in shared) for a, stop in cuts]
            (trained if trains else frozen)[copied] += number
        return StageCosts(
            cuts=cuts,
            shares=sums[:, : LOSSES + 1],
            held=held,
            outputs=outputs,
            trained=trained,
            frozen=frozen,
            cut_bytes=self.blocks.cut_bytes[[stop - 1 for _, stop in cuts]],
        )

    # --- seconds ------------------------------------------------------------------------

    def seconds(
        self, tp: int, size: Ints | Floats, dp: Ints | None = None
    ) -> tuple[Floats, Floats]:
        """``[5, ...]`` what the columns of a stage's shares are multiplied by.

        Args:
            tp: tensor-parallel degree.
            size: samples of a micro-batch.
            dp: replicas, where the busiest one counts.

        Returns:
            Seconds of a forward, and of a backward.
        """
        fit = self._costs.curves(task=self._task, module=self._module, tp=tp)
        # In samples of mean work.
        work: Ints | Floats = size
        if dp is not None and self._costs.sampled_work(self._task) is not None:
            work = size * np.vectorize(self._straggler, otypes=[np.float64])(dp)
        forward = curve_values(fit.forward, work)
        inputs = curve_values(fit.backward_input, work)
        weights = np.maximum(curve_values(fit.backward, work) - inputs, 0.0)
        none, loss, loss_backward = (np.zeros_like(forward) for _ in range(3))
        for own in (self._costs.loss_curves(name, tp) for name in self._losses):
            if own is None:
                continue
            loss = loss + curve_values(own.forward, size)
            loss_backward = loss_backward + curve_values(own.backward, size)
        return (
            np.stack([forward, none, none, none, loss]),
            np.stack([none, inputs, weights, forward, loss_backward]),
        )

    # --- bytes --------------------------------------------------------------------------

    @property
    def gradient_bytes(self) -> int:
        """Of one parameter, that replicas sum."""
        return self._costs.gradient_bytes(self._zero)

    def activation_bytes(self, tp: int, size: Ints | Floats) -> Floats:
        """Of a micro-batch, the whole module's, in the sizes' shape."""
        fit = self._costs.curves(task=self._task, module=self._module, tp=tp)
        return curve_values(fit.activation_bytes, size)

    def held_bytes(
        self,
        held: Floats,
        outputs: Floats,
        *,
        tp: int | Ints,
        size: Ints | Floats,
        activation: Floats | None = None,
    ) -> Floats:
        """Activations of one micro-batch.

        Args:
            held: share of the module's activations, of blocks that do not recompute.
            outputs: bytes per sample of the others' outputs.
            tp: of the stages.
            size: samples of the micro-batch.
            activation: :meth:`activation_bytes`, where there are several ``tp``.
        """
        if activation is None:
            activation = self.activation_bytes(int(tp), size)
        sharers = tp if self._costs.training.sequence_parallel else 1
        return held * activation + outputs * size / sharers

    def parameter_bytes(
        self,
        trained: Floats,
        frozen: Floats,
        *,
        tp: int | Ints,
        dp: int | Ints,
        in_rounds: bool = False,
    ) -> Floats:
        """Weights, gradients and optimizer state of stages.

        Args:
            trained: parameters that train.
            frozen: the others.
            tp, dp: of the stages.
            in_rounds: whether gradients are summed after each micro-batch.
        """
        of_trained = np.full(np.shape(dp), self._costs.bytes_per_parameter(trainable=True))
        if self._zero:
            each, cut = self._costs.shard_bytes(self._zero, in_rounds=in_rounds, gathers=in_rounds)
            of_trained = np.where(np.equal(dp, 1), of_trained, each + cut / np.asarray(dp))
        of_frozen = self._costs.bytes_per_parameter(trainable=False)
        return (trained * of_trained + frozen * of_frozen) / tp


def reduction_s(
    cluster: Cluster,
    *,
    tp: int | Ints,
    pp: int | Ints,
    dp: int | Ints,
    num_bytes: float | Floats,
    backward_s: float | Floats,
) -> Floats:
    """Seconds of gradient reductions after the last stage to end, replicas side by side.

    The stages of a replica on one node share its bandwidth, but end their last micro-batch
    one backward after the other: n reductions so end max(one alone, n - (n - 1) backwards)
    after the last stage.

    Args:
        cluster: its links carry them.
        tp, pp, dp: of the module.
        num_bytes: gradients of the stage that has the most, on a device.
        backward_s: of one stage's micro-batch.
    """
    alone_s, together_s, number = reductions_s(cluster, tp=tp, pp=pp, dp=dp, num_bytes=num_bytes)
    after_s = together_s - (number - 1) * backward_s
    return np.where(np.greater(num_bytes, 0), np.maximum(alone_s, after_s), 0.0)


def reductions_s(
    cluster: Cluster,
    *,
    tp: int | Ints,
    pp: int | Ints,
    dp: int | Ints,
    num_bytes: float | Floats,
) -> tuple[Floats, Floats, Ints]:
    """Seconds of a sum alone, and of all that share its node's bandwidth; how many these are."""
    stride, node = tp * pp, cluster.devices_per_node
    num_local = np.minimum(dp, np.maximum(1, -(-node // stride)))
    num_nodes = np.minimum(dp, (dp - 1) * stride // node + 1)
    sharers = np.minimum(stride, node)
    # Alone and together in one call, which takes little longer than each.
    both = np.stack(np.broadcast_arrays(tp, sharers, dp)[:2])
    alone_s, together_s = all_reduce_s(cluster, dp, num_local, num_nodes, num_bytes, sharers=both)
    return alone_s, together_s, np.maximum(sharers // tp, 1)
