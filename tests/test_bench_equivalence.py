"""The systems that the benchmark compares train the same model: else its times mean nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks import page, peers
from benchmarks.peers import Race, RaceResult
from mmlaunch.launch.worker_main import WorkerContext
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.schema.base import file_sha256, save_document
from mmplan.schema.plan import FileReference, Plan
from mmplan.schema.workload import load_workload
from tests.launching import launched
from tests.programs import loss, make_plan, trained_as, unit

BATCH = 12
TOWERS = [loss("contrastive", "vision", "text", sync_batch=BATCH)]


def workload_file(folder: Path, *, frozen: bool = False, sync_batch: int = BATCH) -> Path:
    """Tiny towers on real digits. SGD: Adam would hide a gradient of the wrong scale."""
    document: dict[str, Any] = {
        "version": 1,
        "name": "tiny",
        "batch": BATCH,
        "modules": {
            "vision": {
                "factory": "mmplan.zoo.towers:vision",
                "args": {"blocks": 2, "width": 16, "embed": 8},
                "inputs": ["image"],
                "frozen": frozen,
            },
            "text": {
                "factory": "mmplan.zoo.towers:text",
                "args": {"blocks": 1, "width": 16, "embed": 8},
                "inputs": ["tokens"],
            },
        },
        "losses": {
            "contrastive": {
                "factory": "mmplan.zoo.losses:clip",
                "inputs": ["vision", "text"],
                "cross_sample": True,
                "sync_batch": sync_batch,
            }
        },
        "data": {"factory": "mmplan.zoo.digits:captioned"},
        "train": {"optimizer": "SGD", "optimizer_args": {"lr": 0.5}},
    }
    path = folder / "workload.yaml"
    YAML(typ="safe").dump(document, path)
    return path


def plan_file(workload: Path, plan: Plan) -> str:
    path = workload.with_name("plan.json")
    named = FileReference(path=workload.name, sha256=file_sha256(workload))
    plan = trained_as(plan, load_workload(workload)).model_copy(update={"workload": named})
    save_document(plan, path)
    return str(path)


def separate(*, frozen: bool = False) -> Plan:
    """A device for each tower, micro-batches of different sizes."""
    return make_plan(
        unit("vision", "image", blocks=2, k=2, frozen=frozen),
        unit("text", "tokens", blocks=1, k=3),
        losses=TOWERS,
        batch=BATCH,
    )


def uneven() -> Plan:
    """Four devices: a pipeline of two and two replicas with uneven shares."""
    return make_plan(
        unit("vision", "image", pp=2, k=2),
        unit("text", "tokens", blocks=1, dp=2, shares=[7, 5]),
        losses=TOWERS,
        batch=BATCH,
    )


def run_race(entry: Any, workload: Path, plan: Plan) -> list[RaceResult]:
    job = Race(
        workload=str(workload), plans={"planned": plan_file(workload, plan)}, pairs=1, steps=1
    )
    return launched(
        entry,
        (job,),
        num_ranks=plan.devices,
        run_dir=workload.parent / "run",
        timeout_s=60.0,
    )


@pytest.mark.parametrize(
    ("plan", "frozen"),
    [
        (separate(), False),
        pytest.param(separate(frozen=True), True, marks=pytest.mark.slow),
        pytest.param(uneven(), False, marks=pytest.mark.slow),  # four processes
    ],
)
def test_all_systems_have_the_same_losses(tmp_path: Path, plan: Plan, frozen: bool) -> None:
    results = run_race(peers.race, workload_file(tmp_path, frozen=frozen), plan)
    losses = results[0].losses
    assert set(losses) == {"planned", "ddp", "fsdp2"}
    for name in peers.PEERS:
        # Tighter than the race's own check: here nothing adds up over many samples.
        assert losses[name] == pytest.approx(losses["planned"], rel=1e-5)
    assert len(set(losses["planned"])) == peers.CHECKED_STEPS, "the weights never changed"
    assert all(result.seconds == results[0].seconds for result in results)
    assert all(turn[0] > 0 for turns in results[0].seconds.values() for turn in turns)


def race_with_local_gradients(ctx: WorkerContext, job: Race) -> RaceResult:
    """A classic mistake: gathered features without the gradient through the gather."""
    whole = peers.gathered
    peers.gathered = lambda own: whole(own.detach())
    return peers.race(ctx, job)


def race_with_doubled_loss(ctx: WorkerContext, job: Race) -> RaceResult:
    """The other one: a sum where DDP averages. The loss that is shown stays right."""
    right = peers.local_clip_loss

    def doubled(*args: Any) -> Any:
        value = right(*args)
        return value + (value - value.detach())

    peers.local_clip_loss = doubled
    return peers.race(ctx, job)


@pytest.mark.parametrize(
    "entry",
    [race_with_local_gradients, pytest.param(race_with_doubled_loss, marks=pytest.mark.slow)],
)
def test_a_peer_that_trains_something_else_is_not_timed(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(RunFailedError, match="ddp has loss"):
        run_race(entry, workload_file(tmp_path), separate())


def test_workloads_that_the_peers_cannot_train_are_refused(tmp_path: Path) -> None:
    half = [loss("contrastive", "vision", "text", sync_batch=BATCH // 2)]
    plan = make_plan(
        unit("vision", "image", blocks=2), unit("text", "tokens"), losses=half, batch=BATCH
    )
    with pytest.raises((InvalidInputError, RunFailedError), match="one loss over the whole batch"):
        run_race(peers.race, workload_file(tmp_path, sync_batch=BATCH // 2), plan)


def test_check_losses_refuses_nan() -> None:
    with pytest.raises(RunFailedError, match="step 1"):
        peers.check_losses({"planned": [1.0, 1.0], "ddp": [1.0, float("nan")]})


def test_sections_are_replaced_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    page.write_section("one", r"first \1", page=path)
    page.write_section("two", "second", page=path)
    path.write_text(path.read_text() + "\nby hand\n", encoding="utf-8")
    page.write_section("one", "third", page=path)
    text = path.read_text(encoding="utf-8")
    assert "first" not in text
    assert text.index("third") < text.index("second") < text.index("by hand")
    assert os.linesep.join(text.splitlines()).count("one: begin") == 1


def test_benchmarks_measure_the_tree_they_are_in(tmp_path: Path) -> None:
    page.check_tree(page.ROOT / "mmplan")
    with pytest.raises(SystemExit, match="set PYTHONPATH="):
        page.check_tree(tmp_path / "mmplan")
