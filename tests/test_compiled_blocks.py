"""Compiled blocks: one graph each, whatever runs them, and the gradients of one process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmlaunch.execute import compiled_blocks
from mmlaunch.execute.compiled_blocks import CompiledBlocks
from mmplan.errors import UnfitEnvironmentError
from mmplan.schema.workload import Workload
from tests.compiling import ZOO, Backend, compiled
from tests.matrix_cases import Case
from tests.verification import verify_in_process

WAYS = [(tp, split) for tp in (1, 2) for split in (False, True)]


def check(name: str, tp: int, split: bool, backend: Backend) -> None:
    found = compiled(name, tp=tp, split=split, backend=backend)
    assert not found.breaks, found.breaks
    assert found.graphs[0] > 0
    assert found.graphs[1:] == [found.graphs[1]] * (len(found.graphs) - 1), "compiled after step 2"
    assert found.error <= 1e-12


@pytest.mark.slow
def test_a_split_tensor_parallel_tower_is_one_graph_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend("eager", monkeypatch)
    found = compiled("towers.vision", tp=2, split=True, backend=backend, steps=1)
    assert not found.breaks, found.breaks
    assert found.graphs == [2]
    # Two row-cut Linears and two inputs of column-cut ones a layer; the tower's has no gradient.
    assert found.sums == 2 * 4
    assert found.error == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tp", "split"), WAYS)
@pytest.mark.parametrize("name", ZOO)
def test_every_block_of_the_zoo_is_one_graph_and_stays_compiled(
    name: str, tp: int, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, tp, split, Backend("aot_eager", monkeypatch))


def _compiled(case: Case, precision: str = "fp64") -> Workload:
    workload = case.workload()
    update = {"compile": True, "precision": precision}
    train = workload.train.model_copy(update=update)
    return workload.model_copy(update={"train": train})


SPLIT = Case(pp=2, k=2, samples=12, others="single", feature="dropout", backward="split")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case", [replace(SPLIT, tp=2), Case(tp=2, k=2, feature="shared")], ids=["split", "shared"]
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_compiled_run_equals_one_process(
    case: Case, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend("aot_eager", monkeypatch)
    workload = _compiled(case)
    modules = {
        name: spec.model_copy(update={"recompute": recompute})
        for name, spec in workload.modules.items()
    }
    verdict = verify_in_process(case.plan(), workload.model_copy(update={"modules": modules}))
    assert not verdict.differences, verdict.differences[:5]
    assert backend.graphs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_compiled_code_keeps_what_a_split_backward_needs() -> None:
    """The default backend reuses memory; W must not find other values there."""
    torch.compiler.reset()
    verdict = verify_in_process(SPLIT.plan(), _compiled(SPLIT))
    assert not verdict.differences, verdict.differences[:5]


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (str(tmp_path / "none"),))
    assert compiled_blocks.BACKEND == "inductor"
    with pytest.raises(UnfitEnvironmentError, match="cannot compile blocks for cpu here") as found:
        CompiledBlocks(torch.device("cpu"))
    assert found.value.exit_code == 4
    assert "train.compile=false" in str(found.value.hint)
