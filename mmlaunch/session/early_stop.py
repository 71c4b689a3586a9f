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
        best_step: steps done before it.
        waited: evaluations since then.
    """

    def __init__(self, spec: EarlyStopSpec) -> None:
        self._spec = spec
        self.best: float | None = None
        self.best_step: int | None = None
        self.waited = 0

    @property
    def is_over(self) -> bool:
        """Whether the run ends."""
        return self.waited >= self._spec.patience

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take the evaluation after a step; a value that is no number is not better.

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
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1

    def reason(self) -> str:
        """Why the run ends, in words."""
        best = "no value yet" if self.best is None else f"{self.best:.6g} at best"
        best += "" if self.best_step is None else f", after step {self.best_step}"
        times = f"{self.waited} evaluations" if self.waited > 1 else "1 evaluation"
        return f"{self._spec.metric} has not got better in {times} ({best})"

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load(self, state: object) -> None:
        """Go on from a checkpoint's state; from one without, as from the begin."""
        known = cast("dict[str, Any]", state) if isinstance(state, dict) else {}
        best, step, waited = (known.get(name) for name in ("best", "best_step", "waited"))
        self.best = float(best) if isinstance(best, int | float) else None
        self.best_step = step if isinstance(step, int) else None
        self.waited = waited if isinstance(waited, int) else 0
