"""Searches end by what they did: a busy machine finds the same plans, a very slow one ends too."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mmplan.solvers import search_budget as effort
from mmplan.solvers.distmm.chained_modules import ChainSearch, Choice
from mmplan.solvers.distmm.module_options import Option
from mmplan.solvers.search_budget import CLOCK_FACTOR, SearchBudget


def clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Every look at the clock finds it so much later."""
    ticks = itertools.count(step=step_s)
    monkeypatch.setattr(effort, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


def test_what_was_spent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 0.0)
    own = SearchBudget(1.0)
    own.spend(0.75)
    assert (own.left_s, own.is_over) == (0.25, False)
    own.spend(0.25)
    assert own.is_over


def test_the_clock_ends_what_takes_many_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 1.0)
    own = SearchBudget(2.0)
    assert [own.is_over for _ in range(2 * CLOCK_FACTOR + 2)].index(True) == 2 * CLOCK_FACTOR


def options(seed: int) -> list[Option]:
    rng = np.random.default_rng(seed)
    return [
        Option(
            tp=1,
            pp=1,
            dp=dp,
            share=1,
            size=1,
            pinned=False,
            count=int(rng.integers(1, 5)),
            kind="1f1b",
            lead=1,
            interval_s=1.0,
            forward_s=float(rng.random()) / dp,
            backward_s=float(rng.random()) / dp,
            transfers_s=0.0,
            transfer_s=0.0,
            reduce_s=0.0,
            busy_s=1.0,
            rounds=1,
            even=True,
        )
        for dp in range(1, 30)
    ]


def test_a_busy_machine_finds_the_same_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(step_s: float, seconds: float) -> list[Choice]:
        clock(monkeypatch, step_s)
        chain = ChainSearch(
            [options(s) for s in range(4)], edges=[(0, 1), (1, 3)], rounds=1, devices=48
        )
        return chain.best_first(top=8, budget=SearchBudget(seconds))

    quiet = found(0.0, 0.02)
    assert quiet == found(1e-4, 0.02)
    assert quiet[0].bound_s < found(0.0, 10.0)[0].bound_s  # it did not see all
