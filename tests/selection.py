"""Cases of which `make test` takes a few, and `make test-all` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *quick: int) -> list[Any]:
    """All cases as parameters; those at other positions than the given ones are slow.

    Args:
        cases: values of one parameter, or tuples of several.
        quick: positions.
    """
    return [
        case
        if index in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
