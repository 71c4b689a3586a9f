"""Analytic profiles against closed forms: FLOPs, bytes kept, tensor parallelism, roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmplan.arrays import Floats
from mmplan.costs.hardware import load_hardware
from mmplan.errors import InvalidInputError
from mmplan.profiling.analytic import analytic_profile
from mmplan.profiling.counting import (
    ACTIVATION,
    ATTENTION,
    BATCH,
    COLUMNS,
    FLOPS,
    KIND,
    MOVED,
    NORM,
    POINTWISE,
    PRODUCT,
    ROWS,
    SOFTMAX,
    K,
    M,
    N,
)
from mmplan.profiling.flow import TaskFlow
from mmplan.profiling.grid import design, microbatch_sizes
from mmplan.profiling.roofline import Roofline
from mmplan.schema.cluster import Cluster, load_cluster
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, resolve_tasks

CODE = """
import torch
from torch import nn

WIDTH, HIDDEN, TOKENS, OUT = 16, 64, 5, 8


class MLP(nn.Module):
    def __init__(self, tp_plan, hidden):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        if tp_plan:
            self.tp_plan = {"up": "colwise", "down": "rowwise"}

    def forward(self, x):
        return self.down(nn.functional.relu(self.up(x)))


class Attention(nn.Module):
    def forward(self, x):
        x = x.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(x, x, x).squeeze(1)


def stack(blocks=3, tp_plan=True, hidden=HIDDEN):
    blocks = [MLP(tp_plan, hidden) for _ in range(blocks)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, OUT, bias=False))


def tied():
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return nn.Sequential(first, last)


def attention():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention())


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(OUT, OUT)

    def forward(self, x):
        return self.map(x).mean(dim=1)


def head():
    return nn.Sequential(Head())


def mixed():
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*linears[:2], nn.ReLU(), linears[2], nn.ReLU(), linears[3])


class Repeats(nn.Linear):
    def __init__(self, times):
        super().__init__(WIDTH, WIDTH)
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = super().forward(x)
        return x


def repeats(times):
    return nn.Sequential(*map(Repeats, times))


class Peeks(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def peeks():
    return nn.Sequential(Peeks(WIDTH, WIDTH))


class Square(nn.Module):
    def forward(self, x):
        return (x @ x.T).mean()


class Mean(nn.Module):
    def forward(self, *x):
        return x[0].mean()


class Data(torch.utils.data.Dataset):
    def __init__(self, tokens=TOKENS):
        self.tokens = tokens

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"x": torch.ones(self.tokens, WIDTH), "label": torch.tensor(index)}
"""
KERNELS = load_hardware().kernels
CPU_START_S = 4e-6  # of every kernel
WIDTH, HIDDEN, TOKENS, OUT = 16, 64, 5, 8
MLP_FLOPS = 2 * TOKENS * 2 * WIDTH * HIDDEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(CODE)
    return tmp_path


def _workload(
    factory: str = "stack", args: dict[str, Any] | None = None, **changes: Any
) -> Workload:
    base: dict[str, Any] = {
        "name": "w",
        "batch": 12,
        "modules": {"m": {"factory": f"model:{factory}", "args": args or {}, "inputs": ["x"]}},
        "losses": {"mean": {"factory": "model:Mean", "inputs": ["m", "label"]}},
        "data": {"factory": "model:Data"},
    }
    return Workload.model_validate(base | changes)


def _profile(workload: Workload, folder: Path, cluster: Cluster | None = None) -> Profile:
    return analytic_profile(workload, folder, cluster or load_cluster("p3-8"))


def test_flops_parameters_and_cuts_of_a_stack_in_closed_form(folder: Path) -> None:
    module = _profile(_workload(), folder).modules["m"]
    assert module.blocks == 4
    assert module.flops_per_sample == 3 * MLP_FLOPS + 2 * TOKENS * WIDTH * OUT
    mlp = WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH
    assert module.block_parameters == (mlp, mlp, mlp, WIDTH * OUT)
    assert module.parameters == 3 * mlp + WIDTH * OUT
    assert module.boundary_bytes_per_sample == TOKENS * WIDTH * 4
    assert module.output_bytes_per_sample == TOKENS * OUT * 4


def test_kept_activations_are_what_autograd_saves_once(folder: Path) -> None:
    module = _profile(_workload(), folder).modules["m"]
    # Per sample: an MLP keeps its input and the ReLU's result; the last Linear its input.
    mlp, last = TOKENS * (WIDTH + HIDDEN) * 4, TOKENS * WIDTH * 4
    assert module.block_activation_bytes == pytest.approx([mlp] * 3 + [last])
    whole = {p.microbatch: p.activation_bytes for p in module.points if p.tp == 1}
    assert whole[1] == pytest.approx(3 * mlp + last)
    assert whole[12] == pytest.approx(12 * (3 * mlp + last))


def test_times_are_the_rooflines_of_the_kernels(folder: Path) -> None:
    """With a slow device every product is bound by its FLOPs and the rest by its start."""
    slow = _cluster_of("cpu", 1e6)
    point = next(
        p for p in _profile(_workload(), folder, slow).modules["m"].points if p.microbatch == 4
    )
    flops_per_s = 1e6 * 0.7  # a CPU's fp32 is its peak, and shapes do not matter
    forward = 4 * (3 * MLP_FLOPS + 2 * TOKENS * WIDTH * OUT) / flops_per_s
    assert point.forward_s == pytest.approx(forward + 10 * CPU_START_S, rel=1e-5)
    # The backward computes each product twice; the inputs' gradients are half of it.
    assert point.backward_s == pytest.approx(2 * forward, rel=1e-3)
    assert point.backward_input_s == pytest.approx(forward, rel=1e-3)


def _cluster_of(name: str, peak_flops: float) -> Cluster:
    """Nodes like p3-8's, of other devices."""
    p3 = load_cluster("p3-8")
    device = p3.device.model_copy(update={"name": name, "peak_flops": peak_flops})
    return p3.model_copy(update={"device": device})


def test_tensor_parallel_ranks_split_products_and_sum_over_the_group(folder: Path) -> None:
    p3 = load_cluster("p3-8")
    slow_links = p3.links.model_copy(
        update={"intra_node": p3.links.intra_node.model_copy(update={"bandwidth_bytes_per_s": 1e3})}
    )
    cluster = p3.model_copy(update={"links": slow_links})
    module = _profile(_workload(), folder, cluster).modules["m"]
    assert {p.tp for p in module.points} == {1, 2, 4, 8}
    at = {p.tp: p for p in module.points if p.microbatch == 8}
    size = 8 * TOKENS * WIDTH * 4
    for tp in (2, 4, 8):
        # One sum of the output in forward, one of the input's gradient in backward, each MLP.
        ring = 2 * (tp - 1) / tp * size / 1e3 + 2 * (tp - 1) * 5e-6
        assert at[tp].forward_s - at[1].forward_s == pytest.approx(3 * ring, rel=1e-3)
        assert at[tp].backward_s - at[1].backward_s == pytest.approx(3 * ring, rel=1e-3)
        backward_input_s = at[tp].backward_input_s
        assert backward_input_s is not None
        assert backward_input_s > 3 * ring
        kept = 8 * 4 * TOKENS * (3 * (WIDTH + HIDDEN / tp) + WIDTH)
        assert at[tp].activation_bytes == pytest.approx(kept)


def test_degrees_that_cannot_be_are_left_out_and_named(folder: Path) -> None:
    small = load_cluster("p3-8").model_copy(update={"devices_per_node": 4})
    assert {p.tp for p in _profile(_workload(), folder, small).modules["m"].points} == {1, 2, 4}
    whole = _profile(_workload(args={"tp_plan": False}), folder).modules["m"]
    assert {p.tp for p in whole.points} == {1}
    uneven = _profile(_workload(args={"hidden": 60}), folder)
    assert {p.tp for p in uneven.modules["m"].points} == {1, 2, 4}
    assert "up has 60 channels" in uneven.provenance["tp_left_out"]["m tp 8"]


def test_blocks_that_differ_in_a_setting_only_are_counted_apart(folder: Path) -> None:
    times = [1, 1, 1, 3, 1, 2, 1]
    module = _profile(_workload("repeats", args={"times": times}), folder).modules["m"]
    assert module.flops_per_sample == sum(times) * 2 * TOKENS * WIDTH * WIDTH
    assert module.block_work is not None
    assert module.block_work[3] >= 3 * module.block_work[1]
    kept = [b / (TOKENS * WIDTH * 4) for b in module.block_activation_bytes or ()]
    assert kept == times  # each product keeps its input


def test_what_the_block_before_keeps_is_not_kept_again(folder: Path) -> None:
    module = _profile(_workload("mixed"), folder).modules["m"]
    one = TOKENS * WIDTH * 4
    # A ReLU keeps its result, so that the Linear behind it keeps nothing more.
    assert module.block_activation_bytes == (one, one, one, 0, one, 0)


def test_attention_is_one_kernel_that_keeps_no_scores(folder: Path) -> None:
    module = _profile(_workload("attention"), folder).modules["m"]
    assert module.flops_per_sample == 2 * TOKENS * WIDTH * WIDTH + 4 * TOKENS * TOKENS * WIDTH
    assert module.block_activation_bytes is not None
    # Its input (query, key and value are one tensor here), its result, a number per row.
    assert module.block_activation_bytes[1] == TOKENS * (2 * WIDTH + 1) * 4
    workload = _workload("attention")
    flow = TaskFlow(workload, folder, resolve_tasks(workload)["default"])
    block = flow.count_module("m", tp=1, samples=2)[1]
    forward, backward = (float(k.table[:, 0].sum()) for k in (block.forward, block.backward))
    assert backward == 2.5 * forward == 2.5 * 2 * 4 * TOKENS * TOKENS * WIDTH


def test_a_tied_parameter_counts_once(folder: Path) -> None:
    module = _profile(_workload("tied"), folder).modules["m"]
    assert module.block_parameters == (WIDTH * WIDTH + WIDTH, WIDTH)
    assert module.parameters == WIDTH * WIDTH + 2 * WIDTH
    assert module.tied_blocks == ((0, 1),)


def test_outputs_flow_into_the_next_module_and_the_losses(folder: Path) -> None:
    modules = {
        "head": {"factory": "model:head", "inputs": ["m"]},
        "m": {"factory": "model:stack", "inputs": ["x"]},
    }
    losses = {
        "square": {
            "factory": "model:Square",
            "inputs": ["head"],
            "cross_sample": True,
            "sync_batch": 6,
        }
    }
    profile = _profile(_workload(modules=modules, losses=losses), folder)
    assert profile.modules["head"].flops_per_sample == 2 * TOKENS * OUT * OUT
    assert profile.modules["head"].output_bytes_per_sample == OUT * 4
    points = profile.losses["square"].points
    assert [p.samples for p in points] == [1, 2, 4, 6]
    assert not profile.losses["square"].sharded


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_narrow_type_halves_what_is_kept_and_moved(folder: Path, precision: str) -> None:
    whole = _profile(_workload(), folder).modules["m"]
    half = _profile(_workload(train={"precision": precision}), folder).modules["m"]
    assert half.output_bytes_per_sample == whole.output_bytes_per_sample / 2
    assert half.points[0].activation_bytes == whole.points[0].activation_bytes / 2
    assert half.flops_per_sample == whole.flops_per_sample


def test_a_task_with_other_data_has_points_of_its_own(folder: Path) -> None:
    tasks = {
        "short": {"modules": ["m"], "losses": ["mean"]},
        "long": {
            "modules": ["m"],
            "losses": ["mean"],
            "data": {"factory": "model:Data", "args": {"tokens": 3 * TOKENS}},
        },
    }
    profile = _profile(_workload(tasks=tasks), folder)
    assert set(profile.tasks) == {"long"}
    short, long = profile.module("m", "short"), profile.module("m", "long")
    assert long.flops_per_sample == 3 * short.flops_per_sample
    assert long.parameters == short.parameters
    assert profile.fits is not None
    assert set(profile.fits.modules) == {"m", "long.m"}


def test_it_says_that_it_is_analytic_and_on_what_it_stands(folder: Path) -> None:
    profile = _profile(_workload(), folder)
    assert profile.source == "analytic"
    assert profile.provenance["matmul_efficiency"] == 0.74
    assert profile.provenance["constants"] == "profiles/devices.yaml"
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_a_block_that_needs_values_is_named(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"modules\.m: block 0 cannot run on shapes alone"):
        _profile(_workload("peeks"), folder)


def test_missing_data_and_fields_are_named(folder: Path) -> None:
    workload = _workload()
    with pytest.raises(InvalidInputError, match="has no data"):
        _profile(workload.model_copy(update={"data": None}), folder)
    modules = {"m": {"factory": "model:stack", "inputs": ["y"]}}
    with pytest.raises(InvalidInputError, match=r"modules.m takes 'y', .* no field"):
        _profile(_workload(modules=modules), folder)


def _rows(*kernels: dict[int, float]) -> Floats:
    table = np.zeros((len(kernels), COLUMNS))
    for row, kernel in zip(table, kernels, strict=True):
        for column, value in kernel.items():
            row[column] = value
    return table


def _product(m: int, n: int, k: int, batch: int = 1) -> dict[int, float]:
    return {KIND: PRODUCT, FLOPS: 2.0 * batch * m * n * k, M: m, N: n, K: k, BATCH: batch}


def _a800(*, compiled: bool = True) -> Roofline:
    return Roofline(load_cluster("a800-14"), "bf16", compiled=compiled)


def test_attention_takes_its_start_and_the_slower_of_products_and_memory() -> None:
    attention, memory = 3.12e14 * 0.65, 2e12 * KERNELS.memory_efficiency.attention
    whole = {KIND: ATTENTION, M: 128.0, N: 64.0, BATCH: 108.0}
    kernels = _rows(
        {FLOPS: attention, MOVED: memory / 2, **whole},
        {FLOPS: attention / 4, MOVED: memory, **whole},
    )
    assert _a800().seconds(kernels) == pytest.approx(2 + 2 * KERNELS.start_s.attention)
    assert _a800().seconds(np.zeros((0, COLUMNS))) == 0


def test_attention_over_few_tokens_fills_its_tiles_and_rounds_in_part() -> None:
    def busy_s(tokens: float, heads: float) -> float:
        flops = 4 * heads * tokens**2 * 64
        kernel = {KIND: ATTENTION, FLOPS: flops, M: tokens, N: tokens, BATCH: heads}
        return _a800().seconds(_rows(kernel)) - KERNELS.start_s.attention

    # 77 tokens take two tiles of 128 queries and 64 keys, as 128 do.
    assert busy_s(77, 108) == pytest.approx(busy_s(128, 108))
    # One head takes as long as one for each of 108 multiprocessors.
    assert busy_s(128, 1) == pytest.approx(busy_s(128, 108))
    assert busy_s(128, 109) == pytest.approx(2 * busy_s(128, 108))


def test_kernels_that_stream_reach_the_part_of_their_kind() -> None:
    size = 1e9
    for kind, name in (
        (POINTWISE, "pointwise"),
        (NORM, "norm"),
        (SOFTMAX, "softmax"),
        (ACTIVATION, "activation"),
    ):
        start_s = getattr(KERNELS.start_s, name)
        large_s = size / (2e12 * getattr(KERNELS.memory_efficiency, name))
        kernels = {KIND: float(kind), MOVED: size, ROWS: 1e4 if kind in (NORM, SOFTMAX) else 0.0}
        assert _a800().seconds(_rows(kernels)) == pytest.approx(np.hypot(start_s, large_s))
        assert _a800().seconds(_rows({KIND: float(kind)})) == start_s
    # A row is one multiprocessor's.
    few = _a800().seconds(_rows({KIND: NORM, MOVED: size, ROWS: 27.0}))
    many = _a800().seconds(_rows({KIND: NORM, MOVED: size, ROWS: 108.0}))
    assert few == pytest.approx(4 * many, rel=1e-3)


def test_the_host_starts_kernels_one_by_one_unless_blocks_are_compiled() -> None:
    small = _rows(*[{MOVED: 1.0}] * 5)
    assert _a800(compiled=False).seconds(small) == pytest.approx(5 * KERNELS.host_s)
    assert _a800().seconds(small) == pytest.approx(5 * KERNELS.start_s.pointwise)
    # Large ones are what the host waits for.
    large = _rows({MOVED: 1e9})
    assert _a800(compiled=False).seconds(large) == _a800().seconds(large)


def test_a_product_of_whole_rounds_of_tiles_runs_at_the_full_rate() -> None:
    def busy_s(kernel: dict[int, float]) -> float:
        return _a800().seconds(_rows(kernel)) - KERNELS.start_s.product

    # 9 x 24 tiles of 256 x 128: two rounds of 108 multiprocessors.
    kernel = _product(9 * 256, 24 * 128, 4096)
    assert busy_s(kernel) == pytest.approx(kernel[FLOPS] / (3.12e14 * 0.75))
    # One row more is another row of tiles, of which the smallest costs least.
    more = busy_s(_product(9 * 256 + 1, 24 * 128, 4096))
    assert 1.05 < more / busy_s(kernel) < 1.5
    # The same as many products at once.
    heads = _product(256, 128, 4096, batch=9 * 24)
    assert busy_s(heads) == pytest.approx(kernel[FLOPS] / (3.12e14 * 0.75))


def test_one_tile_has_one_multiprocessor_and_long_sums_are_cut() -> None:
    roofline = Roofline(load_cluster("p3-8"), "bf16")
    rate = 1.25e14 * 0.74
    # 64 x 64 tiles need 64 bytes for each 32 FLOPs: the cache feeds them with 32 * 3.1e12.
    fed = min(rate, 32 * 3.1e12)
    short = roofline.seconds(_rows(_product(64, 64, 100_000)))
    # Cut into 8 parts, each on a multiprocessor; 8 partial sums are written and read.
    partial_s = 2 * 8 * 4 * 64 * 64 / (9e11 * KERNELS.memory_efficiency.product)
    busy_s = 2 * 64 * 64 * 12_500 * 80 / fed + partial_s
    assert short == pytest.approx(KERNELS.start_s.product + busy_s)


def test_efficiency_grows_with_size_up_to_the_ceiling_and_time_never_falls() -> None:
    roofline = Roofline(load_cluster("h100-2"), "bf16")
    sizes = [64 * 2**i for i in range(9)]
    seconds = [roofline.seconds(_rows(_product(n, n, n))) for n in sizes]
    efficiency = [2 * n**3 / s / 9.89e14 for n, s in zip(sizes, seconds, strict=True)]
    assert seconds == sorted(seconds)
    assert efficiency[0] < 0.01
    assert efficiency[-1] == pytest.approx(0.8, rel=0.05)
    assert max(efficiency) <= 0.8 * (1 + 1e-12)
    rows = [roofline.seconds(_rows(_product(m, 4096, 4096))) for m in range(1, 2000, 37)]
    assert rows == sorted(rows)


def test_shapes_of_products_are_counted_in_both_directions(folder: Path) -> None:
    workload = _workload(args={"blocks": 1})
    flow = TaskFlow(workload, folder, resolve_tasks(workload)["default"])
    mlp = flow.count_module("m", tp=1, samples=4)[0]
    rows, products = 4 * TOKENS, mlp.forward.table[:, K] > 0
    assert mlp.forward.table[products][:, M : BATCH + 1].tolist() == [
        [rows, HIDDEN, WIDTH, 1],
        [rows, WIDTH, HIDDEN, 1],
    ]
    for count in (mlp.forward, mlp.backward):
        table = count.table[count.table[:, K] > 0]
        assert (table[:, FLOPS] == 2 * table[:, M : BATCH + 1].prod(axis=1)).all()
    # Inputs' gradients sum over the outputs, weights' gradients over the rows.
    sums = mlp.backward.table[:, K]
    assert sorted(sums[sums > 0].tolist()) == sorted([HIDDEN, WIDTH, rows, rows])


def test_every_shipped_device_is_known_and_cpus_go_by_their_type() -> None:
    hardware = load_hardware()
    for name in ("p3-8", "a800", "a800-8x8", "h100", "cpu"):
        assert hardware.known(load_cluster(name).device) is not hardware.other
    epyc = load_cluster("cpu").device.model_copy(update={"name": "EPYC"})
    assert hardware.known(epyc).multiprocessors is None
    assert hardware.known(load_cluster("a800").device).multiprocessors == 108


def test_the_grid_has_both_ends_and_two_lengths() -> None:
    assert microbatch_sizes(12) == (1, 2, 4, 8, 12)
    assert microbatch_sizes(1) == (1,)
    assert microbatch_sizes(256, quick=True) == (1, 4, 16, 64, 256)
    points = design(6, 12, (2, 1))
    assert points[:8] == [
        *((1, size, 6) for size in (1, 2, 4, 8, 12)),
        *((1, size, 3) for size in (1, 4, 12)),
    ]
    assert {tp for tp, _, _ in points} == {1, 2}
    assert {blocks for _, _, blocks in design(1, 12, (1,))} == {1}
    assert len(design(6, 12, (1,), quick=True)) < len(design(6, 12, (1,)))


def test_sums_of_partial_gradients_are_counted_and_wrong_degrees_left_out(tmp_path: Path) -> None:
    data = {"factory": "tests.matrix_models:Samples", "args": {"length": 64}}
    modules = {
        name: {"factory": f"tests.matrix_models:{name}", "args": {"blocks": 2}, "inputs": ["a"]}
        for name in ("head_norms", "norm_of_all_heads")
    }
    target = {"factory": "tests.matrix_models:Regression", "inputs": ["head_norms", "target"]}
    workload = _workload(modules=modules, losses={"target": target}, data=data)
    profile = analytic_profile(workload, tmp_path, load_cluster("p3-8"))
    assert {p.tp for p in profile.modules["head_norms"].points} == {1, 2, 4}
    assert {p.tp for p in profile.modules["norm_of_all_heads"].points} == {1}
    reason = profile.provenance["tp_left_out"]["norm_of_all_heads tp 2"]
    assert reason.startswith("modules.norm_of_all_heads.1 (WideNorm) at tp 2: mean goes over")
    flow = TaskFlow(workload, tmp_path, resolve_tasks(workload)["default"])
    backward = flow.count_module("head_norms", tp=2, samples=2)[0].backward
    # The input of both cut Linears, and q_norm, k_norm's two, scale, mix's two.
    assert backward.names.count("all_reduce") == 1 + 6
