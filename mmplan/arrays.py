"""Types of arrays, by what is in them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Positions, as numpy's own functions return them.
Indices = NDArray[np.intp]
# The kind of number that a function hands on.
NumberT = TypeVar("NumberT", bound=np.generic)
