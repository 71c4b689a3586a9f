"""The simulator against small cases and against another simulator that shares no code."""

from __future__ import annotations

import gc
import json
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InvalidInputError
from mmplan.processes import rare_collections
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Op
from mmplan.program.model import Program
from mmplan.program.text import format_program
from mmplan.program.trace import trace_events, write_trace
from mmplan.schema.plan import Plan
from mmplan.simulation.step import Simulation, prediction, simulate
from tests.clocks import FixedCosts, TinySimulator, tower
from tests.plants import not_started
from tests.programs import loss, make_plan, plans, unit
from tests.solving import module_profile, profile

GOLDEN = Path(__file__).parent / "golden"


# --- links, reductions, memory ----------------------------------------------------------


def test_messages_of_one_link_go_one_after_the_other() -> None:
    result = simulate(tower(2, 2, 1, kind="gpipe"), FixedCosts(message=5.0))
    starts = {
        str(result.program.instructions[e.rank][e.position]): e.start_s for e in result.events()
    }
    assert starts["1F0"] == 1 + 5
    assert starts["1F1"] == 6 + 5  # sent at 2, but the link is busy until 6
    assert starts["1B0"] == 12
    assert starts["0B0"] == 14 + 5
    assert starts["0B1"] == 19 + 5  # sent at 16, waits for the first gradient's message
    assert result.iteration_s == 26


def test_a_reduction_starts_with_its_last_rank_and_counts_as_communication() -> None:
    plan = make_plan(
        unit("v", dp=2, shares=(1, 3), k=1), losses=[loss("c", "v", sync_batch=4)], batch=4
    )
    program = compile_plan(plan)
    costs = FixedCosts(per_sample=True, reduce=0.5)
    result = simulate(program, costs)
    num_reductions = len(program.reductions)
    assert num_reductions == 2  # the module's, and the loss's own parameters
    assert result.iteration_s == 3 + 6 + 0.5 * num_reductions
    assert result.communication_s == (1.0, 1.0)
    assert result.idle_s == (2 + 4, 0)
    assert result.communication_fraction == pytest.approx(2 / 20)
    assert result.bubble_fraction == pytest.approx(6 / 20)


def test_a_reduction_is_carried_beside_the_backward_that_it_starts_in_and_slows_it() -> None:
    plan = make_plan(unit("v", dp=2), losses=[loss("l", "v")], batch=2)
    # The loss's own parameters take as long, behind the module's.
    costs = FixedCosts(reduce=1.0, reduce_shares=(0.5, 1.0))
    result = simulate(compile_plan(plan), costs)
    # The first half of the sum takes 0.5 s beside the second half of the backward.
    slow = 0.5 * (1 - 1 / costs.compute_slowdown)
    assert result.busy_s == pytest.approx((3 + slow, 3 + slow))
    assert result.communication_s == pytest.approx((0.5 + 1.0, 0.5 + 1.0))
    assert result.iteration_s == pytest.approx(3 + slow + 0.5 + 1.0)
    late = simulate(not_started(result.program), costs)
    assert late.iteration_s == pytest.approx(3 + 1.0 + 1.0)
    assert late.busy_s == (3, 3)


@pytest.mark.parametrize("shares", [(1, 3), (3, 1)])
def test_a_reduction_that_starts_inside_a_backward_waits_for_the_last_rank(
    shares: tuple[int, ...],
) -> None:
    plan = make_plan(unit("v", dp=2, shares=shares), losses=[loss("l", "v")], batch=4)
    program = compile_plan(plan)
    result = simulate(program, FixedCosts(per_sample=True, reduce=0.5))
    assert sum(item.op is Op.REDUCE_START for row in program.instructions for item in row) == 2
    # The smaller replica's gradients are there at 3, the larger's at 9.
    assert result.iteration_s == pytest.approx(9 + 0.5 + 0.5)


def test_bytes_are_static_plus_micro_batches_in_flight_plus_communicators() -> None:
    costs = FixedCosts(activation=10.0, static=100.0, one_communicator_bytes=3.0)
    program = tower(3, 4, 2)
    result = simulate(program, costs)
    assert result.peak_bytes == (100 + 6 + 60, 100 + 6 + 50, 100 + 6 + 40)


def test_a_stage_without_backward_holds_nothing() -> None:
    plan = make_plan(
        unit("e", k=4, frozen=True), unit("v", "e", k=4), losses=[loss("l", "v")], batch=4
    )
    result = simulate(compile_plan(plan), FixedCosts(activation=10.0))
    assert result.peak_bytes == (0.0, 10.0)


def test_prediction_counts_idle_devices_in_mfu_only() -> None:
    plan = make_plan(
        unit("v", pp=2, k=2), losses=[loss("c", "v", sync_batch=2)], batch=4, devices=3
    )
    result = simulate(compile_plan(plan), FixedCosts())
    predicted = prediction(result, plan)
    assert predicted.iteration_s == 15.0
    assert predicted.samples_per_s == pytest.approx(4 / 15)
    assert predicted.devices_used == 2
    assert predicted.mfu == pytest.approx(6e12 / (15 * 3 * 1e12))
    assert predicted.bubble_fraction == pytest.approx(1 / 5)
    assert predicted.memory_bytes == (3.0, 2.0, 0.0)


def test_a_step_that_takes_no_time_divides_by_nothing() -> None:
    plan = make_plan(unit("v"), losses=[loss("c", "v", sync_batch=8)])
    predicted = prediction(
        simulate(compile_plan(plan), FixedCosts(forward=0.0, backward=0.0)), plan
    )
    assert (predicted.iteration_s, predicted.samples_per_s, predicted.mfu) == (0, 0, 0)


def test_a_deadlock_is_refused_with_its_place() -> None:
    program = tower(2, 2, 1)
    row = tuple(x for x in program.instructions[1] if str(x) != "1SEND_B0:e0>0[0,1)")
    broken = replace(program, instructions=(program.instructions[0], row))
    with pytest.raises(InvalidInputError, match=r"deadlocks: rank 0 .* \(0B0\)"):
        simulate(broken, FixedCosts())


# --- closed forms -----------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 5), (2, 8), (4, 4), (4, 12)])
def test_gpipe_and_1f1b_take_a_ramp_and_their_micro_batches(stages: int, count: int) -> None:
    for kind in ("gpipe", "1f1b"):
        result = simulate(tower(stages, count, 1, kind=kind), FixedCosts())
        assert result.iteration_s == (count + stages - 1) * (1 + 2)
        assert result.bubble_fraction == pytest.approx((stages - 1) / (count + stages - 1))
    # Each way, the ramp passes every link once; the others' messages hide behind computes.
    late = simulate(tower(stages, count, 1, kind="gpipe"), FixedCosts(message=0.5))
    assert late.iteration_s == (count + stages - 1) * (1 + 2) + 2 * (stages - 1) * 0.5


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_interleaving_divides_the_ramp(stages: int, chunks: int) -> None:
    result = simulate(tower(stages, 2 * stages, 1, kind="interleaved", vpp=chunks), FixedCosts())
    assert result.iteration_s == (2 * stages * chunks + stages - 1) * (1 + 2)


def test_recomputing_adds_a_forward_to_every_backward() -> None:
    def step_s(recompute: str) -> float:
        plan = make_plan(unit("v", pp=2, k=4, kind="1f1b"), losses=[loss("l", "v")], batch=4)
        task = plan.tasks["default"]
        module = task.modules["v"].model_copy(update={"recompute": recompute})
        task = task.model_copy(update={"modules": {"v": module}})
        plan = plan.model_copy(update={"tasks": {"default": task}})
        given = profile({"v": module_profile(1.0, 2.0, blocks=2)}, 2)
        program = compile_plan(plan)
        return simulate(program, ProgramCosts(program, CostModel(given), plan)).iteration_s

    forward_s, backward_s = 1.0 / 2, 2.0 / 2
    assert step_s("none") == pytest.approx((4 + 1) * (forward_s + backward_s))
    assert step_s("full") == pytest.approx((4 + 1) * (2 * forward_s + backward_s))


# --- the network ------------------------------------------------------------------------


def two_pairs(per_node: int) -> Simulation:
    """Ranks 0 and 1 send to 2 and 3, at the same time; five seconds each when alone."""
    plan = make_plan(
        unit("a", dp=2, kind="1f1b"),
        unit("b", "a", dp=2, kind="1f1b"),
        losses=[loss("l", "b")],
        batch=2,
    )
    return simulate(compile_plan(plan), FixedCosts(message=5.0, per_node=per_node))


def test_two_messages_on_one_interface_take_twice_as_long() -> None:
    assert two_pairs(1).iteration_s == 1 + 5 + 1 + 2 + 5 + 2
    assert two_pairs(0).iteration_s == 1 + 5 + 1 + 2 + 5 + 2
    both = two_pairs(2)
    assert both.iteration_s == 1 + 10 + 1 + 2 + 10 + 2
    assert both.communication_s == (10, 10, 10, 10)
    assert both.idle_s == (13, 13, 13, 13)


def replicas_s(tp: int, *, latency_s: float = 0.0) -> float:
    """A module on eight nodes of two ranks, its parameters reduced over all nodes."""
    ranks = [[range(2 * d, 2 * d + tp)] for d in range(8)]
    plan = make_plan(
        unit("v", dp=8, tp=tp, kind="1f1b", ranks=ranks), losses=[loss("l", "v")], batch=8
    )
    given = profile(
        {"v": module_profile(blocks=1, parameters=1000.0, tp={1: 1.0, 2: 1.0})},
        16,
        per_node=2,
        inter={"latency_s": latency_s, "bandwidth_bytes_per_s": 100.0},
    )
    plan = plan.model_copy(update={"cluster": given.cluster, "devices": 16})
    program = compile_plan(plan)
    return simulate(program, ProgramCosts(program, CostModel(given), plan)).iteration_s


def test_an_all_reduce_is_a_ring_and_shards_on_one_node_share_its_interface() -> None:
    ring_s = 2 * 7 / 8 * 4000 / 100
    assert replicas_s(1) == pytest.approx(3 + ring_s)
    # Two shards of half the bytes at the same time.
    assert replicas_s(2) == pytest.approx(3 + ring_s)
    # Each takes its latency first, at the same time; so does a tree for the loss, without bytes.
    assert replicas_s(2, latency_s=0.25) == pytest.approx(3 + 14 * 0.25 + ring_s)


# --- against another simulator ----------------------------------------------------------


times = st.sampled_from([0.0, 0.5, 1.0, 3.0])
costs = st.builds(
    FixedCosts,
    forward=times,
    backward=times,
    message=times,
    latency=times,
    per_node=st.integers(0, 3),
    gather=times,
    loss=times,
    reduce=times,
    reduce_shares=st.sampled_from([(1.0,), (0.25, 1.0), (0.5, 0.5, 0.75)]),
    per_sample=st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), costs)
def test_agrees_with_a_discrete_event_simulation(plan: Plan, costs: FixedCosts) -> None:
    program = compile_plan(plan)
    result = simulate(program, costs)
    assert result.iteration_s == pytest.approx(TinySimulator(program, costs).run(), rel=1e-9)
    for busy, communication, idle in zip(
        result.busy_s, result.communication_s, result.idle_s, strict=True
    ):
        assert min(busy, communication, idle) >= 0
        assert busy + communication + idle == pytest.approx(result.iteration_s)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), costs, st.sampled_from([0.25, 0.5, 1.0]))
def test_shorter_times_never_lengthen_a_program_and_sharing_never_shortens_it(
    plan: Plan, costs: FixedCosts, factor: float
) -> None:
    """Without sharing all waits are for the latest of some times; with it none flows faster."""
    program = compile_plan(plan)
    shared = simulate(program, costs).iteration_s
    alone = simulate(program, costs, contention=False).iteration_s
    assert shared >= alone * (1 - 1e-12)
    for name in ("forward", "backward", "message", "latency", "gather", "loss", "reduce"):
        faster = replace(costs, **{name: getattr(costs, name) * factor})
        assert simulate(program, faster, contention=False).iteration_s <= alone * (1 + 1e-12)


# --- text and traces --------------------------------------------------------------------


def small_program() -> Program:
    """A case worked by hand: vision with two stages, text with two replicas, two sync batches."""
    return compile_plan(
        make_plan(
            unit("vision", "image", pp=2, k=2),
            unit("text", "tokens", dp=2, k=1),
            losses=[loss("contrastive", "vision", "text", sync_batch=8)],
            batch=16,
            name="prototype",
        )
    )


def test_program_text_is_golden() -> None:
    text = format_program(small_program())
    path = GOLDEN / "program-prototype.txt"
    if os.environ.get("MMPLAN_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_trace_has_a_row_per_rank_and_slices_that_do_not_overlap(tmp_path: Path) -> None:
    result = simulate(small_program(), FixedCosts(message=0.25, gather=0.5, loss=0.5, reduce=1.0))
    write_trace(
        tmp_path / "trace.json",
        trace_events(result.program, result.events(), process_name="predicted"),
        trace_events(
            result.program, result.events(), process_name="measured", process=1, offset_s=2.0
        ),
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(p, r): f"rank {r}" for p in (0, 1) for r in range(4)}
    assert {e["cat"] for e in slices} == {"F", "B", "SEND", "RECV", "SYNC", "REDUCE"}
    by_row: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in slices:
        by_row[event["pid"], event["tid"]].append(event)
    for row in by_row.values():
        solid = [e for e in row if e["cat"] in ("F", "B", "SYNC", "REDUCE")]
        for first, second in pairwise(solid):
            assert first["ts"] + first["dur"] <= second["ts"]
    last = max(e["ts"] + e["dur"] for e in slices if e["pid"] == 0)
    assert last == pytest.approx(result.iteration_s * 1e6)
    forward = next(e for e in slices if e["name"] == "1F1")
    assert forward["args"] == {
        "unit": "vision",
        "blocks": [1, 2],
        "microbatch": 1,
        "samples": [4, 8],
    }
    assert forward["dur"] == 1e6


def test_sixty_four_ranks_by_128_micro_batches_take_well_under_a_second(
    benchmark_seconds: Callable[[Callable[[], Simulation]], float],
) -> None:
    plan = make_plan(
        unit("vision", pp=8, dp=4, k=128),
        unit("text", pp=8, dp=4, k=128),
        losses=[loss("clip", "vision", "text", sync_batch=1024)],
        batch=1024,
    )
    program = compile_plan(plan)
    assert sum(map(len, program.instructions)) > 40_000
    assert benchmark_seconds(lambda: simulate(program, FixedCosts())) < 1.0


@pytest.fixture
def benchmark_seconds() -> Callable[[Callable[[], Simulation]], float]:
    """CPU seconds of the best of three calls: other processes share the machine."""
    import time

    def measure(call: Callable[[], Simulation]) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            call()
            best = min(best, time.process_time() - start)
        return best

    return measure


def test_collections_of_garbage_are_as_before_afterwards() -> None:
    """What a caller has frozen stays so, and inside an outer one nothing changes."""
    before = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_threshold()[0] > before[0][0]
        frozen = gc.get_freeze_count()
        assert frozen > 1_000
        with rare_collections():
            assert gc.get_freeze_count() == frozen
        assert gc.get_freeze_count() == frozen
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
    gc.freeze()
    try:
        own = gc.get_freeze_count()
        with rare_collections():
            pass
        # Some may have been freed meanwhile, but none is let go.
        assert own - 1_000 < gc.get_freeze_count() <= own
    finally:
        gc.unfreeze()
