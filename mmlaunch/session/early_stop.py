"""Early stop: a run ends when its evaluations do not get better any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from mmplan.schema.evaluation import EarlyStopSpec


class EarlyStop:
    """Looks at evaluations, the same on all ranks; checkpoints keep what it has seen.

    Args:
        spec: of the workload.

    Attributes:
        best: the best value so far; None before the first.
        waited: evaluations since then.
    """

    def __init__(self, spec: EarlyStopSpec) -> None:
        self._spec = spec
        self.best: float | None = None
        self.waited = 0

    @property
    def is_over(self) -> bool:
        """Whether the run ends."""
        return self.waited >= self._spec.patience

    def add(self, values: Mapping[str, float]) -> None:
        """Take an evaluation; a value that is no number is not better.

        One without the metric, whose task does not train just now, says nothing.
        """
        value, best = values.get(self._spec.metric), self.best
        if value is None:
            return
        sign = 1 if self._spec.mode == "max" else -1
        if best is None:
            better = math.isfinite(value)
        else:
            better = sign * (value - best) > self._spec.min_delta
        if better:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def reason(self) -> str:
        """Why the run ends, in words."""
        best = "no value yet" if self.best is None else f"{self.best:.6g} at best"
        times = f"{self.waited} evaluations" if self.waited > 1 else "1 evaluation"
        return f"{self._spec.metric} has not got better in {times} ({best})"

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: object) -> None:
        """Go on from a checkpoint's state; from one without, as from the begin."""
        known = cast("dict[str, Any]", state) if isinstance(state, dict) else {}
        best, waited = known.get("best"), known.get("waited")
        self.best = float(best) if isinstance(best, int | float) else None
        self.waited = waited if isinstance(waited, int) else 0
