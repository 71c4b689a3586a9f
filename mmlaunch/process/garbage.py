"""Python's garbage, collected between steps and on all ranks after the same ones.

Python collects whenever enough objects are new, on each rank at another time: then all ranks of a
step wait for one after another.
"""

from __future__ import annotations

import gc
from typing import Any


class PacedGarbage:
    """A context in which garbage is collected after every so many steps and at no other time.

    Objects that are there when it begins are left out, which makes a collection short; objects of
    a step that nothing refers to go at once, as ever.

    Args:
        every: steps; 0 leaves it to Python.
    """

    def __init__(self, every: int) -> None:
        self._every = every

    def __enter__(self) -> PacedGarbage:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._every:
            gc.unfreeze()
            gc.enable()

    def after_step(self, step_count: int) -> None:
        """So many steps are done."""
        if self._every and step_count % self._every == 0:
            gc.collect()
