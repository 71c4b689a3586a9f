"""Items of ragged tensors shared out among the ranks of a group, for a stage of whole blocks.

All ranks of the group have a micro-batch whole. Each runs the blocks on its own items, consecutive
rows of the ragged tensors: a sample may have some of its items on one rank and some on the next.
The output is brought together, so that it is whole on all ranks again. Gradients go the same
way: of the output each rank takes its own items', those of the input are gathered. Each rank has a
part of the gradient of a parameter; the program's sums are over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mmlaunch.comm.batches import Tree
from mmplan.errors import RunFailedError
from mmplan.proof.row_cuts import ROW_GROUPS, own_rows, take_all, take_own
from mmplan.ragged import Ragged, host_lengths, with_host_lengths

_HINT = "leave items out of the module, or let its blocks return one row for each row they take"


class ItemShares:
    """The shares of one micro-batch.

    Args:
        group: name by which operators know the group.
        where: the module, for messages.

    Attributes:
        index: this rank's place in the group.
    """

    def __init__(self, group: str, where: str) -> None:
        self._group, self._where = group, where
        ranks = ROW_GROUPS[group]
        self.index, self._count = ranks.index, ranks.count
        self._lengths: Tensor | None = None

    def own(self, arguments: Sequence[Tree]) -> list[Tree]:
        """The stage's arguments with this rank's items; what is not ragged is whole.

        Raises:
            RunFailedError: no argument is ragged, or two have other numbers of items.
        """
        mine = [self._own(tree) for tree in arguments]
        if self._lengths is None:
            raise RunFailedError(f"{self._where}: items are shared out, no input is ragged")
        return mine

    def _own(self, tree: Tree) -> Tree:
        if isinstance(tree, Ragged):
            known = host_lengths(tree.lengths)
            if self._lengths is not None and host_lengths(self._lengths) != known:
                raise RunFailedError(
                    f"{self._where}: items are shared out, and two ragged inputs have other "
                    "numbers of them"
                )
            self._lengths = tree.lengths
            first, end = own_rows(sum(known), self.index, self._count)
            ends = pairwise(accumulate(known, initial=0))
            own = [max(0, min(end, b) - max(first, a)) for a, b in ends]
            lengths = tree.lengths.new_tensor(own)
            return Ragged(self._taken(tree.values), with_host_lengths(lengths, own))
        if isinstance(tree, tuple):
            return tuple(self._own(item) for item in tree)
        return tree

    def _taken(self, values: Tensor) -> Tensor:
        if not (len(values) and values.requires_grad):
            first, end = own_rows(len(values), self.index, self._count)
            return values[first:end]
        flat = values.reshape(len(values), -1)
        return take_own(flat, group=self._group).unflatten(1, values.shape[1:] or (1,))

    def whole(self, output: Tree) -> Tree:
        """The output of all ranks' items.

        Raises:
            RunFailedError: it is not one row for each item.
        """
        if isinstance(output, Ragged):
            lengths = self._lengths
            assert lengths is not None
            rows = sum(host_lengths(lengths))
            first, end = own_rows(rows, self.index, self._count)
            if len(output.values) != end - first:
                raise RunFailedError(
                    f"{self._where}: items are shared out, and of {end - first} rows its blocks "
                    f"made {len(output.values)}",
                    hint=_HINT,
                )
            if not rows:
                return output
            shape, known = output.values.shape[1:], host_lengths(lengths)
            flat = output.values.reshape(end - first, int(torch.Size(shape).numel()))
            full = take_all(flat, rows=rows, group=self._group)
            # Another tensor than the input's, of which the host knows the same.
            own = with_host_lengths(lengths.clone(), known)
            return Ragged(full.unflatten(1, shape or (1,)), own)
        if isinstance(output, tuple):
            return tuple(self.whole(item) for item in output)
        if output is None:
            return None
        raise RunFailedError(
            f"{self._where}: items are shared out, and its output is not ragged", hint=_HINT
        )
