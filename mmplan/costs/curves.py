"""A fitted curve at many sizes at once."""

from __future__ import annotations

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.schema.profile import Curve


def curve_values(curve: Curve, size: Ints | Floats) -> Floats:
    """:meth:`Curve.at` of every size, in the sizes' shape."""
    value: Floats = np.full(np.shape(size), curve.alpha)
    start = 0.0
    for slope, end in zip(curve.slopes, (*curve.knots, np.inf), strict=True):
        value += slope * np.clip(size - start, 0.0, end - start)
        start = end
    return value
