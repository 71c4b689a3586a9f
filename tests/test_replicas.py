"""Copies of parameters are compared: a flipped bit in one of them is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmlaunch.session.replicas import digest
from mmlaunch.session.session import Session
from mmplan.errors import RunFailedError
from tests.birds import copy_workload, two_rank_plan
from tests.commands import run
from tests.programs import loss, make_plan, unit
from tests.test_session import BATCH, make_workload, plan_of, run_ranks, workload_with

CPU = torch.device("cpu")
# Ranks 0 to 2 hold all of t, and of v ranks 3 and 5 hold one shard, 4 and 6 the other.
UNITS = [
    unit("v", "a", tp=2, dp=2, blocks=2, ranks=[[[3, 4]], [[5, 6]]]),
    unit("t", "b", dp=3, blocks=2, ranks=[[[0]], [[1]], [[2]]], frozen=((0, 1),)),
]
SGD: dict[str, Any] = {"optimizer": "SGD", "optimizer_args": {"lr": 0.1}}
LOSSES = [loss("contrastive", "v", "t", sync_batch=12)]


def flip(parameter: Tensor, bit: int) -> None:
    """Change one bit of the last element."""
    last = parameter.data.view(-1)[-1:].view(torch.int64)
    last ^= 1 << bit


@pytest.mark.parametrize(
    ("rank", "prefix", "zero", "said"),
    [
        (1, "t.0.", 0, "rank 1 holds other bits of t.0."),  # frozen
        pytest.param(2, "t.1.", 0, "rank 2 holds other bits of t.1.", marks=pytest.mark.slow),
        # An update would overwrite this copy, or the others.
        (2, "t.1.", 1, "rank 2 holds other bits of t.1."),
        (6, "v.1.", 0, "ranks 4 and 6 hold different bits of v.1."),
    ],
)
def test_a_flipped_bit_is_named_within_n_steps(
    rank: int, prefix: str, zero: int, said: str
) -> None:
    every = 1 if zero else 2
    train = {"compare_replicas": every, "zero": zero}
    workload = make_workload(UNITS, LOSSES, batch=BATCH, train={**SGD, **train})

    def body(session: Session) -> tuple[int, str]:
        for _ in session.steps(2):
            pass
        if session.rank == rank:
            held = session.model.named_parameters()
            flip(next(p for n, p in held if n.startswith(prefix)), bit=3)
        with pytest.raises(RunFailedError) as caught:
            for _ in session.steps(99):
                pass
        return session.step_count, caught.value.message

    plan = make_plan(*UNITS, losses=LOSSES, batch=BATCH)
    found = run_ranks(plan, workload, body)
    assert len({*found}) == 1  # on all ranks, in the same words
    step, message = found[0]
    assert step == 1 + every
    assert message.startswith(f"step {step}: {said}")
    assert ("than ranks" in message) == (rank < 3)


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["tensor parallel", pytest.param("everything at once", marks=pytest.mark.slow)]
)
def test_copies_are_equal_under_any_plan(name: str, zero: int, tmp_path: Path) -> None:
    """Tied parameters among them, several tensor-parallel degrees and a frozen block."""
    workload = workload_with(
        compare_replicas=1, zero=zero, optimizer="AdamW", optimizer_args={"lr": 0.01}
    )

    def body(session: Session) -> int:
        session.step()
        session.load(session.save(tmp_path))
        session.step()
        return session.step_count

    assert {*run_ranks(plan_of(name), workload, body)} == {2}


def test_a_copy_that_differs_is_not_saved(tmp_path: Path) -> None:
    workload = make_workload(UNITS, LOSSES, batch=BATCH, train=SGD)

    def body(session: Session) -> None:
        session.step()
        if session.rank == 0:
            flip(session.model.trained()[0][1], bit=62)
        with pytest.raises(RunFailedError, match="step 1: rank 0 holds other bits of"):
            session.save(tmp_path)

    run_ranks(make_plan(*UNITS, losses=LOSSES, batch=BATCH), workload, body)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_with_a_flipped_bit_ends_in_one_line(tmp_path: Path) -> None:
    workload = copy_workload(tmp_path)
    losses = workload.parent / "birds" / "losses.py"
    text = losses.read_text().replace(
        "        return functional.cross_entropy(self.probe(sound), kind)\n",
        "        import os\n"
        "        self._calls = getattr(self, '_calls', 0) + 1\n"
        "        if self._calls > 8 and os.environ['RANK'] == '1':\n"
        "            self.probe.weight.data.view(-1)[0] += 1e-3\n"
        "        return functional.cross_entropy(self.probe(sound), kind)\n",
    )
    losses.write_text(text)
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json", dp=True)
    where = ["--run-dir", tmp_path / "run", "--save-every", 2, "--timeout", 60]
    done = run("mmlaunch", "run", plan, *where, "--set", "train.compare_replicas=1", cwd=tmp_path)
    assert done.code == 1, done.err
    assert "ranks 0 and 1 hold different bits of losses.species.probe.weight" in done.message
    assert "Traceback" not in done.err
    # All copies were equal there.
    assert [*(tmp_path / "run" / "checkpoints").glob("step-*")]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.complex128]
)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    values = torch.randn(4, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = digest([values], CPU)
    assert torch.equal(before, digest(values.split(3), CPU))  # however it is cut
    raw = values.view(torch.uint8)
    for index in range(len(raw)):
        for bit in range(8):
            raw[index] ^= 1 << bit
            assert not torch.equal(before, digest([values], CPU))
            raw[index] ^= 1 << bit
    assert not torch.equal(before, digest([values.flip(0)], CPU))
