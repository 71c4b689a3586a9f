"""A number that is not finite: the parameters stay, no checkpoint keeps it, a run gets past it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

from mmlaunch.checkpoint.save import Entry
from mmlaunch.comm.wire import Failure
from mmlaunch.data.loader import step_indices
from mmlaunch.launch import failures
from mmlaunch.process.heartbeat import Where
from mmlaunch.session.session import MOST_SKIPPED, NotFiniteStep, Session
from mmplan.errors import InvalidInputError, NotFiniteError
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import run
from tests.programs import loss, make_plan, unit
from tests.test_checkpoint import save_all
from tests.test_session import BATCH, make_workload, run_ranks


def test_a_gradient_that_is_no_number_updates_nothing() -> None:
    units = [unit("v", "a", blocks=2, pp=2), unit("t", "b", blocks=2, dp=2)]
    losses = [loss("contrastive", "v", "t", sync_batch=12)]
    plan = make_plan(*units, losses=losses, batch=BATCH)

    def body(session: Session) -> tuple[str, bool]:
        before = {n: p.detach().clone() for n, p in session.model.trained()}

        def poison(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan")

        if session.rank == 2:
            session.model.trained()[0][1].register_hook(poison)
        with pytest.raises(NotFiniteError) as caught:
            session.step()
        same = all(torch.equal(before[n], p) for n, p in session.model.trained())
        return caught.value.message, same

    found = run_ranks(plan, make_workload(units, losses, batch=BATCH), body)
    assert len(set(found)) == 1  # on all ranks, in the same words
    message, same = found[0]
    assert same
    assert message.startswith("step 0: the gradient of t.0.")


def test_a_step_that_is_skipped_leaves_everything_as_it_was() -> None:
    units = [unit("v", "a", pp=2), unit("t", "b", dp=2)]
    losses = [loss("contrastive", "v", "t", sync_batch=12)]
    plan = make_plan(*units, losses=losses, batch=BATCH)
    factor = [1.0]

    def body(session: Session) -> list[NotFiniteStep]:
        seen: list[NotFiniteStep] = []
        session.hooks.on_not_finite.append(lambda _, step: seen.append(step))
        if session.rank == 2:
            session.model.trained()[0][1].register_hook(lambda gradient: gradient * factor[0])

        def state() -> list[torch.Tensor]:
            kept = [p.detach().clone() for _, p in session.model.trained()]
            found = session.optimizer.state.values() if session.optimizer else ()
            return kept + [x.clone() for values in found for x in values.values()]

        def step(value: float) -> bool:
            before = state()
            if session.rank == 2:
                factor[0] = value
            result = session.step()
            assert result.finite == (value == 1.0)
            return all(map(torch.equal, before, state()))

        assert not step(1.0)
        assert step(math.nan)
        assert not step(1.0)
        for _ in range(MOST_SKIPPED):
            assert step(math.inf)
        with pytest.raises(NotFiniteError, match="as were the 10 steps before"):
            step(math.inf)
        assert session.step_count == 3 + MOST_SKIPPED
        return seen

    train = {"non_finite": "skip", "optimizer": "AdamW", "optimizer_args": {"lr": 0.01}}
    found = run_ranks(plan, make_workload(units, losses, batch=BATCH, train=train), body)
    assert all(seen == found[0] for seen in found)
    first = found[0][0]
    assert first.step == 1
    assert first.gradients[0].startswith("t.0.")
    # Both replicas of t together read the step's batch.
    read = sorted(index for rank in (2, 3) for index in first.samples[rank]["default"])
    assert read == sorted(step_indices(range(2 * BATCH), BATCH, 3, 1))


def test_a_checkpoint_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    def entry(rank: int, value: float, *, trained: bool) -> Entry:
        parts = [((rank,), torch.tensor([value]))]
        return Entry(name="v.0.w", kind="param", full_shape=(2,), boxes=parts, trained=trained)

    inf = float("inf")
    found = save_all(tmp_path, 3, [[entry(0, 1.0, trained=True)], [entry(1, inf, trained=True)]])
    assert all(isinstance(error, NotFiniteError) for error in found)
    assert found[0].message == "v.0.w (param) is not finite and is not saved"
    assert list(tmp_path.iterdir()) == []
    # What is never trained may be a mask.
    found = save_all(tmp_path, 3, [[entry(0, 1.0, trained=False)], [entry(1, inf, trained=False)]])
    assert found == [tmp_path / "step-3"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_one_transient_fault_costs_one_restart_or_one_step(tmp_path: Path, policy: str) -> None:
    """One backward gives NaN, once; the loss of that step is finite."""
    steps = f"steps: 16, non_finite: {policy}"
    workload = edited(copy_workload(tmp_path), "steps: 8", steps)
    losses = workload.parent / "birds" / "losses.py"
    losses.write_text(
        losses.read_text().replace(
            "        return functional.cross_entropy(self.probe(sound), kind)\n",
            "        import os\n"
            "        self._calls = getattr(self, '_calls', 0) + 1\n"
            "        if self._calls == 19:\n"
            "            try:\n"
            f"                os.close(os.open({str(tmp_path / 'hit')!r}, "
            "os.O_CREAT | os.O_EXCL))\n"
            "                sound.register_hook(lambda gradient: gradient * float('nan'))\n"
            "            except FileExistsError:\n"
            "                pass\n"
            "        return functional.cross_entropy(self.probe(sound), kind)\n",
        )
    )
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")
    where = ["--run-dir", tmp_path / "run", "--save-every", 5, "--timeout", 60]
    done = run("mmlaunch", "run", plan, *where, "--max-restarts", 3, cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "hit").exists()
    assert done.out.count("starting all workers again") == (policy == "stop"), done.out
    assert "is not finite" in done.out
    (kept,) = (tmp_path / "run" / "not-finite").iterdir()
    assert f"the samples of step {json.loads(kept.read_text())['step']} stand in {kept}" in done.out
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(16))
    assert sum("skipped" in row for row in rows) == (policy == "skip")


def _died(folder: Path, attempt: int, error: Exception, *, start: int | None, step: int) -> None:
    if start is not None:
        failures.write_start(folder, attempt=attempt, step=start)
    where = Where(step=step)
    failures.write_record(folder, rank=1, attempt=attempt, where=where, error=error)
    time.sleep(0.002)


def test_a_restart_passes_over_a_checkpoint_on_which_one_died(tmp_path: Path) -> None:
    def failed(attempt: int, *saved: int) -> set[int]:
        return failures.died_on(tmp_path, attempt=attempt, saved=saved)

    nan, other = NotFiniteError("the loss of step 12 is nan"), ValueError("a bad sample")
    _died(tmp_path, 0, nan, start=None, step=12)
    assert failed(1, 5, 10) == set()  # it made the checkpoints, it did not begin with them
    _died(tmp_path, 1, nan, start=10, step=12)
    assert failed(2, 5, 10) == {10}
    assert failed(2, 5, 10, 11) == set()  # it got on to save another one
    _died(tmp_path, 2, other, start=5, step=5)
    assert failed(3, 5, 10) == {10}  # once may be chance
    _died(tmp_path, 3, RuntimeError("Connection closed by peer"), start=5, step=5)
    assert failed(4, 5, 10) == {10}  # of another's death
    # Step 10 is no way past step 5: from there the way led to the same end.
    _died(tmp_path, 4, other, start=5, step=12)
    assert failed(5, 5, 10) == {5, 10}
    assert failed(5, 5, 10, 11) == set()
    failures.remove_records(tmp_path, range(2))
    assert failed(5, 5, 10) == set()


def test_errors_travel_with_their_kind() -> None:
    for error in (NotFiniteError("a", hint="b"), InvalidInputError("a"), OSError(28, "full")):
        again = Failure.of(error).error()
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert getattr(again, "hint", None) == getattr(error, "hint", None)
    assert str(Failure.of(KeyError("x")).error()) == "KeyError: 'x'"
