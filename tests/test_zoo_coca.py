"""The contrastive captioner: its parts, and a whole step planned and run against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.schema.factories import build_module
from mmplan.schema.workload import load_workload
from mmplan.zoo import coca
from tests.commands import call
from tests.zoo_tp import run_split_block

PAPERS = Path(__file__).parents[1] / "examples" / "papers"
IMAGE = {"heads": 4, "image": 8, "patch": 4, "channels": 1, "queries": 3, "embed": 6}
WORDS = {"heads": 4, "vocab": 30, "length": 8, "embed": 6}


def words(*lengths: int) -> Tensor:
    ids = torch.randint(1, 30, (len(lengths), max(lengths)))
    return ids * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def pixels(count: int) -> Tensor:
    return torch.rand(count, 1, 8, 8, dtype=torch.float64)


def run(module: nn.Sequential, state: tuple[Any, ...]) -> Any:
    for block in module:
        state = block(*state)
        state = state if isinstance(state, tuple) else (state,)
    return state


def test_padding_changes_neither_features_nor_captions() -> None:
    read = coca.words(2, 16, **WORDS).double()
    write = coca.captioner(2, 16, heads=4, vocab=30).double()
    rows = torch.rand(2, 3, 16, dtype=torch.float64)
    short = words(3, 3)
    padded = torch.cat([short, short.new_zeros(2, 4)], dim=1)
    feature, hidden = run(read, (short,))
    other, longer = run(read, (padded,))
    torch.testing.assert_close(other, feature)
    (want,), (got,) = run(write, (hidden, rows)), run(write, (longer, rows))
    torch.testing.assert_close(got[:, :3], want)


def test_the_feature_is_that_of_the_last_word_and_captions_do_not_look_ahead() -> None:
    read = coca.words(2, 16, **WORDS).double()
    text = words(5)
    changed = text.clone()
    changed[0, 4] = changed[0, 4] % 29 + 1
    (feature, hidden), (other, moved) = run(read, (text,)), run(read, (changed,))
    assert (feature - other).abs().max() > 1e-6
    torch.testing.assert_close(hidden[:, :4], moved[:, :4])


def test_captions_see_the_image_and_the_feature_comes_from_the_rows() -> None:
    look = coca.image(2, 16, **IMAGE).double()
    write = coca.captioner(2, 16, heads=4, vocab=30).double()
    one, two = pixels(1), pixels(1)
    (feature, rows), (other, others) = run(look, (one,)), run(look, (two,))
    assert feature.shape == (1, 6)
    assert rows.shape == (1, 3, 16)
    assert (feature - other).abs().max() > 1e-6
    hidden = torch.rand(1, 4, 16, dtype=torch.float64)
    (seen,), (unseen,) = run(write, (hidden, rows)), run(write, (hidden, others))
    assert seen.shape == (1, 4, 30)
    assert (seen - unseen).abs().amin(dim=2).max() > 0


@pytest.mark.parametrize("tp", [2, 4])
def test_split_blocks_of_the_captioner_equal_whole_ones(tp: int) -> None:
    image = coca.image(2, 16, **IMAGE).double()
    text = coca.words(2, 16, **WORDS).double()
    rows = torch.rand(2, 3, 16, dtype=torch.float64)
    hidden = torch.rand(2, 5, 16, dtype=torch.float64)
    starts = [
        (image, (pixels(2),)),
        (text, (words(5, 2),)),
        (coca.captioner(2, 16, heads=4, vocab=30).double(), (hidden, rows)),
    ]
    for module, start in starts:
        state: tuple[Any, ...] = start
        for block in module:
            linears = {n for n, m in block.named_modules() if isinstance(m, nn.Linear)}
            split: Any = block.tp_plan
            assert linears - set(split) <= {"embed.project", "head.head", "head.1"}
            want = block(*state)
            got = run_split_block(block, state, tp)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            state = want if isinstance(want, tuple) else (want,)


@pytest.mark.parametrize(
    ("build", "args"),
    [
        (coca.image, {**IMAGE, "heads": 3}),
        (coca.words, {**WORDS, "heads": 3}),
        (coca.captioner, {"heads": 3, "vocab": 30}),
    ],
)
def test_sizes_are_checked(build: Any, args: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="heads 3 does not divide width 16"):
        build(2, 16, **args)


@pytest.mark.parametrize(
    ("name", "module", "size"),
    [
        ("clip-760m", "vision", 0.68),
        ("clip-760m", "text", 0.35),
        ("clip-6.7b", "text", 2.65),
        ("clip-13b", "vision", 12.6),
        ("lit-6.7b", "text", 12.8),
        ("lit-350m", "vision", 0.30),
        ("coca-6.7b", "image", 6.58),
        ("coca-6.7b", "words", 3.43),
        ("coca-6.7b", "captioner", 4.5),
    ],
)
def test_papers_towers_have_the_published_numbers_of_parameters(
    name: str, module: str, size: float
) -> None:
    built = build_module(load_workload(PAPERS / f"{name}.yaml"), module, PAPERS, device="meta")
    assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(size, rel=0.02)


SIZES = {"width": 16, "heads": 4}
WORKLOAD = {
    "version": 1,
    "name": "toy-coca",
    "batch": 8,
    "modules": {
        "image": {
            "factory": "mmplan.zoo.coca:image",
            "args": {**IMAGE, **SIZES, "blocks": 3},
            "inputs": ["pixels"],
        },
        "words": {
            "factory": "mmplan.zoo.coca:words",
            "args": {**WORDS, **SIZES, "blocks": 2},
            "inputs": ["tokens"],
        },
        "captioner": {
            "factory": "mmplan.zoo.coca:captioner",
            "args": {**SIZES, "blocks": 2, "vocab": 30},
            "inputs": ["words.1", "image.1"],
        },
    },
    "losses": {
        "contrastive": {
            "factory": "mmplan.zoo.losses:clip",
            "inputs": ["image.0", "words.0"],
            "cross_sample": True,
            "sync_batch": 4,
        },
        "captions": {
            "factory": "mmplan.zoo.losses:token_cross_entropy",
            "args": {"ignore_index": 0},
            "inputs": ["captioner", "tokens"],
            "weight": 2.0,
        },
    },
    "data": {
        "factory": "mmplan.zoo.synthetic:noise",
        "args": {
            "fields": {"pixels": {"shape": [1, 8, 8]}, "tokens": {"shape": [8], "vocab": 30}},
            "samples": 64,
        },
    },
    "train": {"precision": "fp64"},
}


@pytest.mark.slow
def test_contrast_and_captions_in_one_step_equal_one_process(tmp_path: Path) -> None:
    job = tmp_path / "coca.json"
    job.write_text(json.dumps(WORKLOAD))
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    done = call("mmplan", "profile", job, "--analytic", "--cluster", "cpu-4", "-o", profile)
    assert done.code == 0, done.err
    done = call(
        *("mmplan", "solve", job, "--profile", profile, "--solver", "distmm", "-o", plan),
    )
    assert done.code == 0, done.err
    done = call("mmlaunch", "verify", plan)
    assert done.code == 0, done.err
