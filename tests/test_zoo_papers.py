"""Spindle's workloads at full size: what is published, what flows, and that they are planned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import nn

from mmplan.profiling.flow import BASE, TaskFlow
from mmplan.schema.factories import build_dataset, build_module
from mmplan.schema.workload import InputSource, load_workload, resolve_tasks
from tests.commands import call
from tests.selection import some

PAPERS = Path(__file__).parents[1] / "examples" / "papers"

pytestmark = pytest.mark.usefixtures("one_thread")


def parameters(modules: Mapping[str, nn.Module]) -> dict[str, float]:
    """Of each module, in 1e9."""
    return {
        name: sum(p.numel() for p in module.parameters()) / 1e9 for name, module in modules.items()
    }


@pytest.mark.parametrize(
    ("name", "expected", "total"),
    [
        (
            "multitask-clip",
            {"vision": 0.63, "text": 0.35, "audio": 0.086, "depth": 0.022, "thermal": 0.086},
            1.2,
        ),
        ("ofasys", {"encoder": 0.21, "decoder": 0.32, "vision": 0.088}, 0.66),
        ("qwen-val-9b", {"vision": 1.89, "audio": 0.66, "llm": 7.72}, 10.3),
        ("qwen-val-30b", {"vision": 1.9, "audio": 0.67, "llm": 32.5}, 35.1),
        ("qwen-val-70b", {"vision": 1.97, "audio": 0.72, "llm": 72.3}, 75.0),
    ],
)
def test_papers_modules_have_the_published_numbers_of_parameters(
    name: str, expected: dict[str, float], total: float
) -> None:
    workload = load_workload(PAPERS / f"{name}.yaml")
    built = parameters(
        {m: build_module(workload, m, PAPERS, device="meta") for m in workload.modules}
    )
    for module, size in expected.items():
        assert built[module] == pytest.approx(size, rel=0.02), module
    assert sum(built.values()) == pytest.approx(total, rel=0.03)


@pytest.mark.parametrize(("name", "sizes"), [("multitask-clip", [4, 7, 10]), ("ofasys", [4, 7])])
def test_the_papers_task_sets_are_those_of_the_file(name: str, sizes: list[int]) -> None:
    workload = load_workload(PAPERS / f"{name}.yaml")
    comments = (PAPERS / f"{name}.yaml").read_text().partition("version:")[0]
    sets = [found.split(",") for found in re.findall(r"--tasks (\S+)", comments)]
    for tasks in (*sets, list(workload.tasks)):
        assert len(tasks) == sizes.pop(0)
        assert set(tasks) <= set(workload.tasks)
    assert not sizes


@pytest.mark.parametrize("name", ["ofasys", "qwen-val-9b", "qwen-val-30b", "qwen-val-70b"])
def test_papers_data_fill_the_places_of_their_features(name: str) -> None:
    """What the model on its full size would refuse: the number of placeholders."""
    workload = load_workload(PAPERS / f"{name}.yaml")
    rows = {"vision": 256, "audio": 750}
    for task in resolve_tasks(workload).values():
        assert task.data is not None
        sample = build_dataset(task.data, PAPERS)[0]
        for module in task.modules:
            args = workload.modules[module].args
            for source in task.inputs[module]:
                if source.field in ("image", "speech", "poses"):
                    side = args["image"]
                    extent = [side, side] if isinstance(side, int) else side
                    want = [args.get("channels", 3), *extent]
                    assert list(sample[source.field].shape) == want
                elif source.field is not None:
                    assert sample[source.field].max() < args["vocab"]
        for place, encoder_name in enumerate(("vision", "audio")):
            if "llm" in task.modules:
                own = workload.modules["llm"].args["placeholders"][place]
                expected = rows[encoder_name] if encoder_name in task.modules else 0
                assert (sample["tokens"] == own).sum() == expected


@pytest.mark.parametrize(
    ("name", "task", "outputs"),
    some(
        [
            ("multitask-clip", "VA", {"vision": [[8, 1024]], "audio": [[8, 1024]]}),
            ("multitask-clip", "MT", {"motion": [[8, 1024]], "text": [[8, 1024]]}),
            ("ofasys", "vqa", {"encoder": [[8, 608, 1024], [8, 608]], "decoder": [[8, 16, 59457]]}),
            ("ofasys", "asr", {"audio": [[8, 375, 1024]], "encoder": [[8, 375, 1024], [8, 375]]}),
            ("qwen-val-30b", "VAL", {"vision": [[8, 256, 5120]], "audio": [[8, 750, 5120]]}),
            ("qwen-val-70b", "AL", {"audio": [[8, 750, 8192]], "llm": [[8, 2048, 152064]]}),
        ],
        *(0, 2, 4),
    ),
)
def test_papers_tasks_flow_through_their_modules(
    name: str, task: str, outputs: dict[str, list[list[int]]]
) -> None:
    """Shapes of a batch of 8, at full size, without memory."""
    workload = load_workload(PAPERS / f"{name}.yaml")
    flow = TaskFlow(workload, PAPERS, resolve_tasks(workload)[task])
    for module, shapes in outputs.items():
        flow.count_module(module, tp=1, samples=BASE)
        (output,) = flow.shapes.inputs("test", [InputSource(module=module)], BASE)
        found = output if isinstance(output, tuple) else (output,)
        assert [list(tensor.shape) for tensor in found] == shapes
    for loss in flow.task.loss_inputs:
        assert flow.count_loss(loss, BASE).forward.names


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "cluster", "devices"),
    [
        ("multitask-clip", "a800-8x8", 16),
        ("ofasys", "a800-8x8", 8),
        ("qwen-val-9b", "a800-8x8", 16),
        ("qwen-val-30b", "a800-32", 64),
        ("qwen-val-70b", "a800-32", 256),
    ],
)
def test_papers_workloads_are_planned_from_analytic_profiles(
    tmp_path: Path, name: str, cluster: str, devices: int
) -> None:
    workload, profiled, plan = PAPERS / f"{name}.yaml", tmp_path / "p.json", tmp_path / "plan.json"
    done = call("mmplan", "profile", workload, "--analytic", "--cluster", cluster, "-o", profiled)
    assert done.code == 0, done.err
    done = call(
        *("mmplan", "solve", workload, "--profile", profiled, "--devices", devices),
        *("--solver", "mpsp", "-o", plan),
    )
    assert done.code == 0, done.err
    assert call("mmplan", "check", plan).code == 0
