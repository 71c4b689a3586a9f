"""The encoder-decoder language model that reads features of other modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.zoo.seq2seq import decoder, encoder
from tests.zoo_tp import run_split_block

SIZES = {"heads": 4, "vocab": 30, "length": 8}


def words(*lengths: int) -> Tensor:
    ids = torch.randint(1, 30, (len(lengths), max(lengths)))
    return ids * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def test_padding_changes_nothing() -> None:
    read, write = encoder(2, 16, **SIZES).double(), decoder(2, 16, **SIZES).double()
    short, answer = words(3, 3), words(4, 4)
    padded = torch.cat([short, short.new_zeros(2, 4)], dim=1)
    want = write((answer, *read(short)))
    torch.testing.assert_close(write((answer, *read(padded))), want)


def test_a_token_depends_on_those_before_it_and_on_everything_read() -> None:
    read, write = encoder(2, 16, **SIZES).double(), decoder(3, 16, **SIZES).double()
    features = torch.rand(1, 3, 16, dtype=torch.float64)
    source, answer = words(5), words(6)
    want = write((answer, *read[1](read[0](source, features))))
    changed = answer.clone()
    changed[0, 3] = changed[0, 3] % 29 + 1
    got = write((changed, *read[1](read[0](source, features))))
    torch.testing.assert_close(got[:, :3], want[:, :3])
    assert (got[:, 3:] - want[:, 3:]).abs().amin(dim=1).min() > 0
    other = write((answer, *read[1](read[0](source, features * 2))))
    assert (other - want).abs().amax(dim=(0, 2)).min() > 1e-6


def test_what_a_task_lacks_is_left_out() -> None:
    read = encoder(2, 16, **SIZES)
    features = torch.rand(2, 3, 16)
    rows, mask = read[1](read[0](None, None, features))
    assert rows.shape == (2, 3, 16)
    assert mask.all()
    rows, mask = read[1](read[0](words(5, 2), None, features))
    assert rows.shape == (2, 8, 16)
    assert mask.sum(dim=1).tolist() == [8, 5]
    with pytest.raises(InvalidInputError, match="neither tokens nor features"):
        read[0](None, None)


@pytest.mark.parametrize("tp", [2, 4])
def test_split_blocks_of_the_language_model_equal_whole_ones(tp: int) -> None:
    state: tuple[Any, ...] = (words(5, 2), torch.rand(2, 3, 16, dtype=torch.float64))
    for block in encoder(2, 16, **SIZES).double():
        want = block(*state)
        got = run_split_block(block, state, tp)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        state = want
    state = (words(6, 4), *state)
    for block in decoder(2, 16, **SIZES).double():
        linears = {n for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        rules: Any = block.tp_plan
        assert linears - set(rules) <= {"head.1"}
        want = block(*state)
        got = run_split_block(block, state, tp)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        state = want if isinstance(want, tuple) else (want,)


@pytest.mark.parametrize("factory", [encoder, decoder])
def test_sizes_of_the_language_model_are_checked(factory: Callable[..., nn.Sequential]) -> None:
    with pytest.raises(InvalidInputError, match="heads 3 does not divide width 16"):
        factory(2, 16, heads=3, vocab=30, length=8)
    with pytest.raises(InvalidInputError, match="vocab is 0"):
        factory(2, 16, heads=4, vocab=0, length=8)
