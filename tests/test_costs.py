"""Costs by hand: every number here follows from the text of the file formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.block_ranges import gradient_blocks
from mmplan.costs.fit import fit_profile
from mmplan.costs.links import collective_s
from mmplan.costs.program_costs import CostModel, ProgramCosts, check_cluster
from mmplan.errors import InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Op
from mmplan.schema.cluster import Cluster, CollectiveLinks, Link, Links, load_cluster
from mmplan.schema.plan import Plan, PlannedTraining
from mmplan.schema.profile import LossPoint, LossProfile, Point, Profile
from tests.programs import loss, make_cluster, make_plan, unit

WHERE: dict[str, Any] = {"task": "default", "module": "vision"}


def _profile(cluster: Cluster | None = None, **vision: Any) -> Profile:
    """forward 1 + u/tp, backward 2 + 4u/tp (a third of it for inputs), 4 blocks of work 1 2 3 4."""
    module: dict[str, Any] = {
        "blocks": 4,
        "block_work": (1, 2, 3, 4),
        "parameters": 1000,
        "flops_per_sample": 10,
        "output_bytes_per_sample": 7,
        "boundary_bytes_per_sample": 50,
        "points": [
            {
                "tp": tp,
                "microbatch": u,
                "forward_s": 1 + u / tp,
                "backward_s": 2 + 4 * u / tp,
                "backward_input_s": (2 + 4 * u / tp) / 3,
                "activation_bytes": 400 * u / tp,
            }
            for tp in (1, 2)
            for u in (1, 2, 8)
        ],
    }
    return Profile.model_validate(
        {
            "name": "p",
            "source": "given",
            "cluster": (cluster or make_cluster(8)).model_dump(),
            "modules": {"vision": module | vision, "text": module},
            "losses": {
                "clip": {
                    "points": [{"samples": n, "forward_s": n, "backward_s": 2 * n} for n in (2, 8)]
                }
            },
        }
    )


def _costs(training: PlannedTraining | None = None, **vision: Any) -> CostModel:
    return CostModel(_profile(**vision), training=training)


# --- modules ---------------------------------------------------------------------------


def test_a_stage_costs_its_share_of_the_work_fixed_part_included() -> None:
    costs = _costs()
    assert costs.tp_options(**WHERE) == (1, 2)
    assert costs.num_blocks(**WHERE) == 4
    assert costs.forward_s(**WHERE, tp=1, samples=4) == pytest.approx(5)
    assert costs.forward_s(**WHERE, tp=1, samples=4, blocks=(1, 3)) == pytest.approx(5 * 0.5)
    assert costs.forward_s(**WHERE, tp=2, samples=4, blocks=(3, 4)) == pytest.approx(3 * 0.4)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 64))
def test_stages_add_up_to_the_module(cut: int, samples: int) -> None:
    costs = _costs()
    parts = ((0, cut), (cut, 4))
    for cost in (costs.forward_s, costs.activation_bytes):
        whole = cost(**WHERE, tp=1, samples=samples)
        pieces = sum(cost(**WHERE, tp=1, samples=samples, blocks=part) for part in parts)
        assert pieces == pytest.approx(whole)
    backward = sum(costs.backward_s(**WHERE, tp=1, samples=samples, blocks=p) for p in parts)
    assert backward == pytest.approx(2 + 4 * samples)


@pytest.mark.parametrize(
    ("blocks", "trainable", "input_gradient", "expected"),
    [
        # whole backward at 4 samples: 18, of which 6 for inputs; work 1 2 3 4 of 10
        ((0, 4), [(0, 4)], False, 18),
        ((0, 4), [], False, 0),  # frozen, nothing before it trains
        ((0, 4), [], True, 6),  # frozen, a gradient passes through
        ((0, 4), [(2, 4)], False, 18 * 0.7),  # from block 2 on both
        ((0, 4), [(2, 3)], False, 6 * 0.7 + 12 * 0.3),
        ((0, 4), [(2, 3)], True, 6 + 12 * 0.3),
        ((1, 3), [(0, 2)], False, 6 * 0.5 + 12 * 0.2),  # the first block of the stage trains
        ((2, 4), [(0, 2)], False, 0),
        ((2, 4), [(0, 2)], True, 6 * 0.7),
        ((0, 4), [(0, 1), (3, 4)], False, 6 + 12 * 0.5),
    ],
)
def test_frozen_ranges_have_no_weight_gradient(
    blocks: tuple[int, int],
    trainable: Sequence[tuple[int, int]],
    input_gradient: bool,
    expected: float,
) -> None:
    got = _costs().backward_s(
        **WHERE,
        tp=1,
        samples=4,
        blocks=blocks,
        trainable=trainable,
        input_gradient=input_gradient,
    )
    assert got == pytest.approx(expected)


def test_recomputation_repeats_the_forward_of_what_a_gradient_passes() -> None:
    costs = _costs()
    plain = costs.backward_s(**WHERE, tp=1, samples=4, trainable=[(2, 4)], input_gradient=False)
    again = costs.backward_s(
        **WHERE, tp=1, samples=4, trainable=[(2, 4)], input_gradient=False, recompute="full"
    )
    assert again - plain == pytest.approx(5 * 0.7)
    # Kept: the outputs of two blocks, 50 and 7 bytes a sample, against 4 * 400 * 2/4.
    kept = costs.activation_bytes(**WHERE, tp=1, samples=4, blocks=(2, 4), recompute="full")
    assert kept == 4 * (50 + 7)
    assert costs.activation_bytes(**WHERE, tp=1, samples=4, blocks=(2, 4)) == pytest.approx(800)
    # Two of four blocks: the second and the last.
    half = costs.activation_bytes(**WHERE, tp=1, samples=4, blocks=(2, 4), recompute=2)
    assert half == pytest.approx(
        4 * 7 + costs.activation_bytes(**WHERE, tp=1, samples=4, blocks=(2, 3))
    )


def test_half_of_the_backward_is_for_inputs_when_not_said() -> None:
    points = [Point(microbatch=1, forward_s=1, backward_s=4).model_dump(exclude_none=True)]
    frozen = _costs(points=points).backward_s(**WHERE, tp=1, samples=1, trainable=[])
    assert frozen == pytest.approx(2)


def test_gradients_pass_from_the_first_block_that_needs_one() -> None:
    assert gradient_blocks((2, 6), [(0, 1)], input_gradient=False) is None
    assert gradient_blocks((2, 6), [(4, 5)], input_gradient=False) == (4, 6)
    assert gradient_blocks((2, 6), [(5, 9), (1, 4)], input_gradient=False) == (2, 6)
    assert gradient_blocks((2, 6), [], input_gradient=True) == (2, 6)
    assert gradient_blocks((2, 6), None, input_gradient=False) == (2, 6)


def test_the_profiles_own_lists_share_out_parameters_activations_and_cuts() -> None:
    costs = _costs(
        block_parameters=(4, 1, 1, 4),
        block_activation_bytes=(1, 0, 0, 1),
        block_boundary_bytes=(10, 20, 30, 99),
    )
    assert costs.parameters(**WHERE) == 1000
    assert costs.parameters(**WHERE, blocks=(0, 2)) == pytest.approx(500)
    assert costs.activation_bytes(**WHERE, tp=1, samples=2, blocks=(1, 4)) == pytest.approx(400)
    assert [costs.cut_bytes(**WHERE, after_block=b) for b in range(4)] == [10, 20, 30, 7]
    assert _costs().cut_bytes(**WHERE, after_block=2) == 50


# --- memory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "trained", "frozen"),
    [
        ({}, 4 + 4 + 8, 4),
        ({"zero": 1}, 4 + 4 + 8 / 4, 4),
        ({"precision": "fp64"}, 8 + 8 + 16, 8),
        ({"precision": "bf16"}, 4 + 2 + 4 + 8, 4 + 2),
        ({"precision": "fp16"}, 4 + 2 + 4 + 8, 4 + 2),
        ({"precision": "bf16", "zero": 1}, 2 + 4 + 12 / 4, 4 + 2),
        ({"precision": "bf16", "zero": 1, "narrow_gradients": True}, 2 + 2 + 12 / 4, 4 + 2),
        ({"precision": "bf16", "narrow_gradients": True}, 4 + 2 + 4 + 8, 4 + 2),
        ({"zero": 1, "narrow_gradients": True}, 4 + 4 + 8 / 4, 4),
        ({"precision": "fp16", "zero": 1, "optimizer": "SGD"}, 2 + 4 + 8 / 4, 4 + 2),
        ({"optimizer": "SGD"}, 4 + 4 + 4, 4),
    ],
)
def test_memory_of_a_parameter(training: dict[str, Any], trained: float, frozen: float) -> None:
    costs, zero = _costs(PlannedTraining(**training)), training.get("zero", 0)
    assert costs.bytes_per_parameter(trainable=True, zero=zero, dp=4) == pytest.approx(trained)
    assert costs.bytes_per_parameter(trainable=False, dp=4) == pytest.approx(frozen)


# --- links -----------------------------------------------------------------------------


def _two_nodes(collectives: CollectiveLinks | None = None) -> Cluster:
    base = make_cluster(8, devices_per_node=4)
    links = Links(
        intra_node=Link(latency_s=1, bandwidth_bytes_per_s=100),
        inter_node=Link(latency_s=10, bandwidth_bytes_per_s=10),
        intra_node_collectives=collectives,
    )
    return base.model_copy(update={"links": links})


def test_messages_take_the_link_between_their_ranks() -> None:
    costs = CostModel(_profile(_two_nodes()))
    assert costs.message_s(source=3, target=3, num_bytes=1e9) == 0
    assert costs.message_s(source=0, target=3, num_bytes=500) == 1 + 5
    assert costs.message_s(source=3, target=4, num_bytes=500) == 10 + 50


def test_all_reduce_is_a_ring_for_large_and_a_tree_for_small() -> None:
    costs = CostModel(_profile(_two_nodes()))
    ring = 2 * 3 * 1 + 2 * 3 / 4 * 1e6 / 100
    assert costs.all_reduce_s(ranks=range(4), num_bytes=1e6) == pytest.approx(ring)
    assert costs.all_reduce_s(ranks=range(4), num_bytes=0) == pytest.approx(2 * 2 * 1)
    assert costs.all_reduce_s(ranks=[2], num_bytes=1e6) == 0
    gather = 2 * 1 + 3 / 4 * 1e6 / 100
    assert costs.gather_shares_s(ranks=range(4), num_bytes=1e6) == pytest.approx(gather)


def test_between_nodes_a_node_sends_its_part_once() -> None:
    cluster = _two_nodes()
    one_each = collective_s(cluster, "all_reduce", [0, 4], 1000)
    assert one_each == pytest.approx(2 * 10 + 2 * 1 / 2 * 1000 / 10)
    inside = collective_s(cluster, "all_reduce", [0, 1], 1000)
    both = collective_s(cluster, "all_reduce", [0, 1, 4, 5], 1000)
    assert both == pytest.approx(inside + one_each)
    # Four shards reduced at once share the node's link.
    shared = collective_s(cluster, "all_reduce", [0, 4], 1000, sharers=4)
    assert shared == pytest.approx(2 * 10 + 4 * 1000 / 10)


def test_measured_collectives_decide_where_they_exist() -> None:
    measured = CollectiveLinks(all_reduce=Link(latency_s=3, bandwidth_bytes_per_s=1000))
    cluster = _two_nodes(measured)
    assert collective_s(cluster, "all_reduce", range(4), 2000) == pytest.approx(3 + 1.5 * 2)
    plain = collective_s(_two_nodes(), "all_gather", range(4), 2000)
    assert collective_s(cluster, "all_gather", range(4), 2000) == plain


@settings(deadline=None)
@given(st.sets(st.integers(0, 7), min_size=1), st.floats(0, 1e9), st.integers(0, 7))
def test_more_bytes_or_ranks_never_take_less(ranks: set[int], size: float, more: int) -> None:
    cluster = _two_nodes()
    for kind in ("all_reduce", "all_gather"):
        base = collective_s(cluster, kind, sorted(ranks), size)
        assert collective_s(cluster, kind, sorted(ranks), 2 * size) >= base
        assert collective_s(cluster, kind, sorted(ranks | {more}), size) >= base * (1 - 1e-12)


# --- losses, ranges, errors --------------------------------------------------------------


def test_losses_divide_their_work_only_when_sharded() -> None:
    costs = _costs()
    assert costs.loss_s(loss="clip", samples=4) == pytest.approx((4, 8))
    assert costs.loss_s(loss="clip", samples=4, shards=4) == pytest.approx((1, 2))
    assert costs.loss_s(loss="unknown", samples=4) == (0, 0)
    point = LossPoint(samples=4, forward_s=1, backward_s=1)
    whole = {"clip": LossProfile(sharded=False, points=(point,))}
    fixed = LossPoint(samples=2, forward_s=0.75, backward_s=1), point
    started = {"clip": LossProfile(sharded=True, points=fixed)}
    costs = CostModel(_profile().model_copy(update={"losses": started}))
    # Half of the forward is there without any sample; every rank pays it.
    assert costs.loss_s(loss="clip", samples=4, shards=4) == pytest.approx((0.5 + 0.5 / 4, 1))
    said = {"clip": LossProfile(sharded=True, exchanged_per_row=6, points=fixed)}
    clip, own = (CostModel(_profile().model_copy(update={"losses": x})) for x in (started, said))
    exchange: Any = {"loss": "clip", "holders": [(0, 1)] * 2}
    # Three times as many numbers a row are one sync batch three times as large.
    assert own.statistics_s(samples=4, **exchange) == clip.statistics_s(samples=12, **exchange) > 0
    unsharded = CostModel(_profile().model_copy(update={"losses": whole}))
    assert unsharded.loss_s(loss="clip", samples=4, shards=4) == pytest.approx((1, 1))


def test_questions_beyond_the_measured_range_are_named_once() -> None:
    costs = _costs()
    costs.forward_s(**WHERE, tp=1, samples=8)
    assert costs.extrapolations() == []
    for samples in (9, 32, 16):
        costs.forward_s(**WHERE, tp=2, samples=samples)
    costs.loss_s(loss="clip", samples=1)
    assert costs.extrapolations() == [
        "loss clip: 1 samples (measured from 2 to 8)",
        "vision at tp 2: micro-batch 32 (measured from 1 to 8)",
    ]


def test_each_task_with_costs_of_its_own_has_its_own_measured_range() -> None:
    document = _profile().model_dump(exclude_none=True)
    points = document["modules"]["vision"]["points"]
    few = [point for point in points if point["microbatch"] <= 2]
    document["tasks"] = {"A": {"vision": {"points": few}}}
    costs = CostModel(Profile.model_validate(document))
    for task, samples in (("B", 8), ("A", 1), ("A", 4)):
        costs.forward_s(task=task, module="vision", tp=1, samples=samples)
    assert costs.extrapolations() == ["A.vision at tp 1: micro-batch 4 (measured from 1 to 2)"]


def test_what_the_profile_lacks_is_refused() -> None:
    costs = _costs()
    with pytest.raises(InvalidInputError, match=r"vision has no points at tp 4; .* has tp 1, 2"):
        costs.forward_s(**WHERE, tp=4, samples=1)
    with pytest.raises(InvalidInputError, match="no module 'audio'"):
        costs.num_blocks(task="default", module="audio")


def test_stored_fits_decide_and_what_they_lack_is_fitted() -> None:
    profile = _profile()
    stored = fit_profile(profile)
    slow = stored.modules["vision"]["1"]
    slow = slow.model_copy(update={"forward": slow.forward.model_copy(update={"alpha": 100.0})})
    fits = stored.model_copy(update={"modules": {"vision": {"1": slow}}})
    costs = CostModel(profile.model_copy(update={"fits": fits}))
    assert costs.forward_s(**WHERE, tp=1, samples=4) == pytest.approx(104)
    assert costs.forward_s(**WHERE, tp=2, samples=4) == pytest.approx(3)


def test_a_task_has_costs_of_its_own() -> None:
    points = [{"microbatch": u, "forward_s": 9.0 * u, "backward_s": 0.0} for u in (1, 2)]
    base = _profile()
    changed = base.model_copy(update={"tasks": {"VL": {"vision": {"points": points}}}})
    for profile in (changed, changed.model_copy(update={"fits": fit_profile(changed)})):
        costs = CostModel(profile)
        assert costs.forward_s(task="VL", module="vision", tp=1, samples=4) == pytest.approx(36)
        assert costs.forward_s(task="AL", module="vision", tp=1, samples=4) == pytest.approx(5)
        assert costs.tp_options(task="VL", module="vision") == (1,)


def test_a_profile_stays_with_its_devices() -> None:
    p3 = load_cluster("p3-8")
    measured = _profile(p3).model_copy(update={"source": "measured"})
    check_cluster(measured, None)
    check_cluster(measured, p3.model_copy(update={"nodes": 2}))
    check_cluster(measured.model_copy(update={"source": "given"}), load_cluster("h100"))
    with pytest.raises(InvalidInputError, match=r"measured for devices with name V100-16GB.*H100"):
        check_cluster(measured, load_cluster("h100"))
    small = p3.device.model_copy(update={"memory_bytes": 1e9})
    analytic = measured.model_copy(update={"source": "analytic"})
    with pytest.raises(InvalidInputError, match=r"memory_bytes 16000000000\.0"):
        check_cluster(analytic, p3.model_copy(update={"device": small}))


# --- programs --------------------------------------------------------------------------


def _program_costs(plan: Plan, **vision: Any) -> ProgramCosts:
    costs = CostModel(_profile(plan.cluster, **vision), training=plan.training)
    return ProgramCosts(compile_plan(plan), costs, plan)


def _two_towers(cluster: Cluster | None = None, **changes: Any) -> Plan:
    """vision: pp 2 x dp 2 on ranks 0-3; text: dp 2 x tp 2 on ranks 4-7."""
    return make_plan(
        unit("vision", "image", pp=2, dp=2, k=2, blocks=4, frozen=changes.pop("frozen", False)),
        unit("text", "tokens", dp=2, tp=2, k=1, blocks=4),
        losses=[loss("clip", "vision", "text", sync_batch=8)],
        batch=8,
        cluster=cluster,
        **changes,
    )


def test_a_programs_instructions_cost_what_its_stages_do() -> None:
    got = _program_costs(_two_towers())
    first, last = (s for s in got.program.stages if s.module == "vision")
    assert got.compute_s(first, Op.FORWARD, 2) == pytest.approx(3 * 0.3)
    # No gradient goes to the data: but the first block trains, so one passes all of them.
    assert got.compute_s(first, Op.BACKWARD, 2) == pytest.approx(10 * 0.3)
    assert got.compute_s(last, Op.BACKWARD, 2) == pytest.approx(10 * 0.7)
    assert got.activation_bytes(last, 2) == pytest.approx(400)
    edge = next(e for e in got.program.edges if e.internal)
    assert got.edge_bytes(edge, 3) == 150


def test_a_sync_gathers_the_other_towers_features_and_shares_the_loss() -> None:
    cluster = make_cluster(8, bandwidth=100)
    got = _program_costs(_two_towers(cluster))
    clip = got.program.cross_sample(0)
    assert clip.ranks == (1, 3, 4, 5, 6, 7)
    # Each rank receives the rows of the other tower, once.
    gather = 8 * 7 / 100
    assert got.gather_s(clip) == pytest.approx(gather)
    # A float32 of each of these rows against both.
    statistics = 8 * 2 * 4 / 100
    assert got.sync_s(clip) == pytest.approx(gather + statistics + (8 + 16) / 6)


def test_reductions_move_the_gradients_of_what_trains() -> None:
    cluster = make_cluster(8, devices_per_node=4, bandwidth=1e3)
    got = _program_costs(_two_towers(cluster, frozen=((0, 1),)))
    moved = [(r.owner, got.reduced_bytes(r)) for r in got.program.reductions]
    assert sum(v for owner, v in moved if owner == "vision") == 750 * 4
    assert sum(v for owner, v in moved if owner == "text") == 1000 * 4
    text = next(r for r in got.program.reductions if r.owner == "text")
    assert got.reduce_s(text) == pytest.approx(2 * 1 / 2 * got.reduced_bytes(text) / 1e3)


def test_memory_of_a_rank_by_hand() -> None:
    got = _program_costs(_two_towers(zero=1, frozen=((0, 1),)))
    # Rank 0: blocks 0 (frozen) and 1 of vision; state spread over the two replicas.
    assert got.static_bytes(0) == pytest.approx(250 * 4 + 250 * (4 + 4 + 8 / 2))
    assert got.static_bytes(1) == pytest.approx(500 * (4 + 4 + 8 / 2))
    assert got.static_bytes(4) == pytest.approx(1000 / 2 * (4 + 4 + 8 / 2))


def test_parameters_that_two_stages_of_a_rank_share_are_held_once() -> None:
    plan = make_plan(
        unit("vision", "image", blocks=4, ranks=[[[0]]]),
        unit("text", "vision", blocks=4, share="vision", ranks=[[[0]]]),
        losses=[loss("clip", "text")],
        batch=8,
    )
    assert _program_costs(plan).static_bytes(0) == pytest.approx(1000 * 16)


def test_a_module_trains_where_any_task_trains_it() -> None:
    plan = make_plan(
        unit("vision", "image", task="a", blocks=4, ranks=[[[0]], [[1]]], dp=2),
        unit("vision", "image", task="b", blocks=4, ranks=[[[0]], [[1]]], dp=2, frozen=True),
        losses=[loss("clip", "vision", task="a"), loss("other", "vision", task="b")],
        batch=8,
    )
    got = _program_costs(plan)
    assert got.static_bytes(0) == pytest.approx(1000 * 16)
    moved = [got.reduced_bytes(r) for r in got.program.block_reductions]
    assert moved == [1000 * 4]


def test_nothing_is_kept_before_the_first_block_that_trains() -> None:
    got = _program_costs(_two_towers(frozen=((0, 1),)))
    first = next(s for s in got.program.stages if s.module == "vision")
    assert got.activation_bytes(first, 2) == pytest.approx(200)
    assert got.compute_s(first, Op.BACKWARD, 2) == pytest.approx(10 * 0.2)
    frozen = _program_costs(_two_towers(frozen=True))
    assert frozen.activation_bytes(frozen.program.stages[0], 2) == 0


def test_hosted_losses_are_part_of_their_stage() -> None:
    plan = make_plan(unit("vision", blocks=4), losses=[loss("clip", "vision")], batch=8)
    got = _program_costs(plan)
    stage = got.program.stages[0]
    assert got.compute_s(stage, Op.FORWARD, 8) == pytest.approx(9 + 8)
    assert got.compute_s(stage, Op.BACKWARD, 8) == pytest.approx(34 + 16)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        (False, 8 * 10 * 3),
        (True, 8 * 10),
        (((0, 2),), 8 * 10 * (1 + 0.7 + 0.7)),  # forward, inputs from block 2, weights
    ],
)
def test_flops_count_what_gradients_need(frozen: Any, expected: float) -> None:
    plan = _two_towers(frozen=frozen)
    text = 8 * 10 * 3
    assert _program_costs(plan).flops() == pytest.approx(expected + text)


def test_communicators_are_those_of_the_program() -> None:
    got = _program_costs(_two_towers())
    # Rank 0: everyone, vision's first reduction; activations up, gradients down.
    assert got.communicators(0) == 2 + 2
    # Rank 4: everyone, its tp group, the reduction of its shard, the sync, its readers of the other
    # tower, and a gather of both; no messages.
    assert got.communicators(4) == 7
    alone = make_plan(unit("vision", blocks=4), losses=[loss("clip", "vision")], batch=8)
    assert _program_costs(alone).communicators(0) == 0
