"""The baselines by hand, against enumeration, and end to end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning.measured_trials import SHARED
from mmplan.planning.planner import BASELINES, SOLVERS
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.base import document_text
from mmplan.solvers.baselines.megatron import solve_megatron, solve_megatron_rigid
from mmplan.solvers.baselines.ratio import proportional, solve_ratio
from mmplan.solvers.communicators import PlacedModule
from mmplan.solvers.convex.solver import solve_convex
from mmplan.solvers.messages import stage_messages
from mmplan.solvers.partitioner import backbone_of, cut_everywhere
from mmplan.solvers.problem import Blocks, NotApplicableError, Problem, Request, Solution
from mmplan.solvers.registry import OF_SEVERAL_TASKS
from tests.commands import call
from tests.selection import some
from tests.solving import module_profile, profile, run_solve, workload
from tests.stage_costs import fixed_bytes, gradient_bytes, held_bytes, stage_s
from tests.test_convex import GRAPHS, problem_of, random_problem
from tests.test_convex_plans import MODELS, costs, job
from tests.verification import verify_in_process

LOSS = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["llm", "y"]}}
CHAIN: dict[str, dict[str, Any]] = {"vision": {}, "llm": {"inputs": ["vision"], "backbone": True}}
Places = dict[str, tuple[int, tuple[Blocks, ...], bool]]


def chain_profile(devices: int, llm: dict[str, Any] | None = None, **cluster: Any) -> Any:
    """1 + 2 and 3 + 6 seconds a sample."""
    modules = {
        "vision": module_profile(1.0, 2.0, blocks=2),
        "llm": module_profile(3.0, 6.0, blocks=2, **(llm or {})),
    }
    return profile(modules, devices, **cluster)


def request_of(pins: dict[str, dict[str, Any]], given: Any, devices: int, batch: int) -> Request:
    modules = {name: {**spec, "plan": pins.get(name, {})} for name, spec in CHAIN.items()}
    return problem_of(workload(modules, batch=batch, losses=LOSS), given, devices).request


# --- by hand -------------------------------------------------------------------------


def test_megatron_without_pipeline_is_every_module_in_turn() -> None:
    (best,) = solve_megatron(request_of({}, chain_profile(2), 2, 4)).candidates
    # 2 samples on each device, 3 + 9 seconds each.
    assert best.objective_s == pytest.approx(24.0)
    assert [u.ranks for u in best.units] == [(((0,),), ((1,),))] * 2
    assert all(u.schedule.lead == 0 for u in best.units)


def test_megatron_pipeline_runs_a_chunk_of_every_module_at_each_position() -> None:
    # 64 parameters of 16 bytes do not fit one device: two positions of (3 + 9) / 2 seconds.
    given = chain_profile(2, {"parameters": 64.0}, memory_bytes=800.0)
    (best,) = solve_megatron(request_of({}, given, 2, 4)).candidates
    assert best.objective_s == pytest.approx(12.0 + 3 * 6.0)
    assert [u.ranks for u in best.units] == [(((0,), (1,)),)] * 2
    assert [u.blocks for u in best.units] == [((0, 1), (1, 2))] * 2
    assert [u.microbatches for u in best.units] == [((1, 1, 1, 1),)] * 2


def test_megatron_of_a_contrastive_pair_has_no_pipeline() -> None:
    # Two blocks of 64 bytes a device hold no whole module; a pipeline would, and is not used.
    modules = {n: module_profile(blocks=2, parameters=8.0) for n in ("a", "b")}
    pair = workload({"a": {}, "b": {}}, batch=8, sync_batch=4)
    with pytest.raises(InfeasibleError, match=r"256 B on a device \(tp 1, 1 pipeline pos"):
        solve_megatron(problem_of(pair, profile(modules, 4, memory_bytes=200.0), 4).request)
    (best,) = solve_megatron(problem_of(pair, profile(modules, 4), 4).request).candidates
    # 2 rounds, 1 sample a device, 3 seconds in each module.
    assert best.objective_s == pytest.approx(12.0)
    assert [(u.dp, u.pp, u.schedule.kind) for u in best.units] == [(4, 1, "batch-sync")] * 2


def test_rigid_shares_out_the_samples_inside_a_tp_group() -> None:
    given = chain_profile(6, {"tp": {1: 1.0, 2: 1.5}})
    pins = {"llm": {"tp": 2, "pp": 2, "dp": 1, "microbatch": 2}}
    (best,) = solve_megatron_rigid(request_of(pins, given, 6, 8)).candidates
    # A micro-batch of 2: one sample on each of 2 encoder ranks, 3 s; 2 * 9 / 1.5 / 2 = 6 s a stage.
    assert best.objective_s == pytest.approx(3.0 + 12.0 + 3 * 6.0)
    vision, llm = best.units
    assert (vision.tp, vision.dp, vision.ranks) == (1, 2, (((0,),), ((1,),)))
    assert vision.microbatches == ((1, 1, 1, 1),) * 2
    assert (llm.tp, llm.dp, llm.ranks) == (2, 1, (((2, 3), (4, 5)),))
    assert llm.microbatches == ((2, 2, 2, 2),)


def test_rigid_gives_modules_before_and_after_a_position_each(tmp_path: Path) -> None:
    pins = {"llm": {"pp": 2, "tp": 1, "vpp": 1, "dp": 2}}
    plan = run_solve(tmp_path, job(pins), costs(10), solver="megatron-rigid", top=1)
    places = {u.module: [replica[0][0] for replica in u.ranks] for u in plan.units}
    # Replicas of five positions: vision, audio, two of the llm, image.
    assert places == {"vision": [0, 5], "audio": [1, 6], "llm": [2, 7], "image": [4, 9]}


def test_rigid_holds_many_modules_alike() -> None:
    """By combinations there are 2 to the power of 19 ways for each depth."""
    names = [f"m{number}" for number in range(20)]
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": [names[-1], "y"]}}
    specs: dict[str, dict[str, Any]] = {name: {"plan": {"tp": 1}} for name in names}
    for name, then in itertools.pairwise(names):
        specs[then]["inputs"] = [name]
    specs["m9"] |= {"backbone": True, "plan": {"tp": 2}}
    own = module_profile(tp={1: 1.0, 2: 1.5})
    given = profile(dict.fromkeys(names, own), 40)
    problem = problem_of(workload(specs, batch=8, losses=loss), given, 40)
    (best, *_) = solve_megatron_rigid(problem.request).candidates
    assert [unit.tp for unit in best.units] == [1] * 9 + [2] + [1] * 10


def test_ratio_keeps_to_the_shares_of_flops() -> None:
    modules = {
        "a": module_profile(flops_per_sample=1.0),
        "b": module_profile(flops_per_sample=3.0),
    }
    pair = workload({"a": {}, "b": {}}, batch=6)
    solution = solve_ratio(problem_of(pair, profile(modules, 4), 4).request)
    a, b = solution.candidates[0].units
    # One device for a: 6 samples of 1 + 2 seconds; two each would need 9.
    assert solution.candidates[0].objective_s == pytest.approx(18.0)
    assert (len(a.all_ranks), len(b.all_ranks) <= 3) == (1, True)
    assert "in proportion to FLOPs: a 1, b 3" in solution.notes[0]


def test_ratio_says_why_it_leaves_devices_over(tmp_path: Path) -> None:
    modules = {
        "vision": module_profile(flops_per_sample=1.0),
        "llm": module_profile(flops_per_sample=3.0),
    }
    pins = {"llm": {**CHAIN["llm"], "plan": {"pp": 1, "dp": 1}}, "vision": CHAIN["vision"]}
    task = workload(pins, batch=8, losses=LOSS)
    plan = run_solve(tmp_path, task, profile(modules, 4), solver="ratio")
    (note,) = (n for n in plan.solver.notes if "stay idle" in n)
    assert note.endswith(
        "2 of 4 devices stay idle (ranks 2-3): " + "their modules cannot use all of their shares"
    )


def test_ratio_counts_gradients_where_they_are_computed() -> None:
    modules = {n: module_profile(flops_per_sample=2.0) for n in ("vision", "llm")}
    frozen = {**CHAIN, "vision": {"frozen": True}}
    given = profile(modules, 8)
    solution = solve_ratio(problem_of(workload(frozen, batch=8, losses=LOSS), given, 8).request)
    # A forward against a forward and two gradients: 1 to 3.
    assert "vision 2, llm 6" in solution.notes[0]


@pytest.mark.parametrize(
    ("weights", "total", "parts"),
    [
        ([1, 1, 6], 8, [1, 1, 6]),
        ([1, 1, 98], 10, [1, 1, 8]),
        ([0, 0], 5, [3, 2]),
        ([2, 1], 2, [1, 1]),
        ([0, 3, 3], 6, [1, 3, 2]),
    ],
)
def test_shares_by_largest_remainder(weights: list[float], total: int, parts: list[int]) -> None:
    assert proportional(weights, total) == parts


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=6), st.integers(0, 50))
def test_shares_use_every_device_once(weights: list[float], more: int) -> None:
    parts = proportional(weights, len(weights) + more)
    assert sum(parts) == len(weights) + more
    assert min(parts) >= 1


def test_ratio_with_the_optimum_s_own_shares_is_the_optimum() -> None:
    task, given = job({}), costs(9)
    free = solve_convex(problem_of(task, given, 9).request)
    taken = {u.module: len(u.all_ranks) for u in free.candidates[0].units}
    assert sum(taken.values()) == 9
    same = {
        name: own.model_copy(update={"parameters": 64.0, "flops_per_sample": float(taken[name])})
        for name, own in given.modules.items()
    }
    solution = solve_ratio(problem_of(task, given.model_copy(update={"modules": same}), 9).request)
    assert solution.formula_bound_s == pytest.approx(free.formula_bound_s)
    equal = solve_ratio(problem_of(task, given, 9).request)
    assert equal.formula_bound_s > free.formula_bound_s


# --- against enumeration -------------------------------------------------------------


class Oracle:
    """Every split of given layouts, from the cost model's scalar answers."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.modules = problem, list(problem.task.modules)
        self.specs = problem.request.workload.modules
        self.cluster = problem.request.cluster

    def cuts(self, module: str) -> list[tuple[Blocks, ...]]:
        tp = min(self.problem.costs.tp_options(task="default", module=module))
        blocks = self.problem.blocks(module)
        work = [sum(stage_s(self.problem, module, (b, b + 1), tp, 1)) for b in range(blocks)]
        return cut_everywhere(tuple(work), blocks)

    def tps(self, module: str) -> set[int]:
        node, devices = self.cluster.devices_per_node, self.problem.devices
        known = self.problem.costs.tp_options(task="default", module=module)
        return {t for t in known if t <= min(node, devices) and not (devices > node and node % t)}

    def colocated(self) -> Iterator[tuple[int, int, Places]]:
        cuts = {m: self.cuts(m) for m in self.modules}
        for tp in set.intersection(*map(self.tps, self.modules)):
            for count in range(1, max(map(len, cuts.values())) + 1):
                places: Places = {}
                for m, own in cuts.items():
                    stages = min(count, len(own))
                    late = bool(self.problem.producers(m))
                    places[m] = (count - stages if late else 0, own[stages - 1], False)
                yield tp, count, places

    def rigid(self) -> Iterator[tuple[int, int, Places]]:
        backbone = backbone_of(self.problem)
        for tp in self.tps(backbone):
            ways = [
                [False] if m == backbone else [w for w in (False, True) if self._held(m, tp, w)]
                for m in self.modules
            ]
            for own, whole in itertools.product(self.cuts(backbone), itertools.product(*ways)):
                places: Places = {}
                first = 0
                for m, w in zip(self.modules, whole, strict=True):
                    stages = own if m == backbone else ((0, self.problem.blocks(m)),)
                    places[m] = (first, stages, w)
                    first += len(stages)
                yield tp, first, places

    def _held(self, module: str, tp: int, whole: bool) -> bool:
        known = self.problem.costs.tp_options(task="default", module=module)
        return (1 in known and tp > 1) if whole else tp in known

    def best_s(self, layouts: Iterator[tuple[int, int, Places]]) -> float:
        batch, best = self.problem.task.batch, math.inf
        pinned = any(self.specs[m].plan.microbatch for m in self.modules)
        for tp, count, places in layouts:
            for dp in range(1, min(self.problem.devices // (tp * count), batch) + 1):
                share = -(-batch // dp)
                sizes = range(1, share + 1) if pinned else [2**i for i in range(7)]
                for size in (s for s in sizes if s <= share):
                    best = min(best, self._value(tp, count, places, dp, size, pinned))
        return best

    def _value(
        self, tp: int, count: int, places: Places, dp: int, limit: int, pinned: bool
    ) -> float:
        problem, big, small = self.problem, -(-problem_batch(self) // dp), problem_batch(self) // dp
        steps = -(-big // limit)
        size = limit if pinned else -(-big // steps)
        least = max(1, small // steps)
        if pinned:
            least = min(share % limit or limit for share in (big, small))
        ways = {m: min(tp, least) if w else 1 for m, (_, _, w) in places.items()}
        own = {m: -(-size // ways[m]) for m in places}
        degree = {m: 1 if w else tp for m, (_, _, w) in places.items()}
        busy, fixed, reduce = [0.0] * count, [0.0] * count, [0.0] * count
        placed = {
            m: PlacedModule(stages=tuple(enumerate(cuts, first)), tp=degree[m], dp=dp * ways[m])
            for m, (first, cuts, _) in places.items()
        }
        through: dict[str, float] = {}
        for m, (first, cuts, _) in places.items():
            pins = self.specs[m].plan
            degrees = {"tp": degree[m], "pp": len(cuts), "dp": dp * ways[m], "vpp": 1}
            degrees["microbatch"] = own[m]
            if not all(pins.allows(name, value) for name, value in degrees.items()):
                return math.inf
            through[m] = 0.0
            for i, cut in enumerate(cuts):
                q = first + i
                own_s = sum(stage_s(problem, m, cut, degree[m], own[m], dp * ways[m]))
                busy[q] += own_s
                through[m] += own_s
                if i + 1 < len(cuts):
                    through[m] += self._message_s(
                        (q * tp, (q + 1) * tp),
                        own[m] * problem.output_bytes(m, cut[1] - 1),
                        [degree[m]] * (1 + problem.stage(m, cuts[i + 1]).input_gradient),
                    )
                fixed[q] += fixed_bytes(problem, m, cut, degree[m], dp * ways[m])
                flight = min(steps, 1 + self._after(m, places) + len(cuts) - 1 - i)
                messages = stage_messages(problem, m, cut, placed)
                held = held_bytes(problem, m, cut, degree[m], own[m]) + own[m] * messages.carried
                fixed[q] += held * (1 if count == 1 else flight)
                fixed[q] += own[m] * messages.bytes_beside(steps)
                if problem.trainable(m, cut):
                    reduce[q] += problem.costs.all_reduce_s(
                        ranks=[(d * count + q) * tp + w for d in range(dp) for w in range(ways[m])],
                        num_bytes=gradient_bytes(problem, m, cut, degree[m]),
                        sharers=degree[m],
                    )
        if max(fixed) > problem.memory_bytes:
            return math.inf
        path = max(self._from(m, places, through, own, tp) for m in places)
        return max(path, *busy) + (steps - 1) * max(busy) + max(reduce)

    def _after(self, module: str, places: Places) -> int:
        return max(
            (len(places[c][1]) + self._after(c, places) for c in self.problem.consumers(module)),
            default=0,
        )

    def _from(
        self, m: str, places: Places, through: dict[str, float], own: dict[str, int], tp: int
    ) -> float:
        later = [0.0]
        for c in self.problem.consumers(m):
            message_s = self._message_s(
                ((places[m][0] + len(places[m][1]) - 1) * tp, places[c][0] * tp),
                own[m] * self.problem.output_bytes(m, self.problem.blocks(m) - 1),
                [1 if places[x][2] else tp for x in (c, m)[: 1 + self.problem.makes_gradient(m)]],
            )
            later.append(message_s + self._from(c, places, through, own, tp))
        return through[m] + max(later)

    def _message_s(self, ranks: tuple[int, int], num_bytes: float, takers: list[int]) -> float:
        """There and, with two takers (the TP of their groups), back; gathered from other nodes."""
        costs, node = self.problem.costs, self.problem.request.cluster.devices_per_node
        seconds = len(takers) * costs.message_s(
            source=ranks[0], target=ranks[1], num_bytes=num_bytes
        )
        if ranks[0] // node != ranks[1] // node:
            seconds += sum(
                costs.gather_shares_s(ranks=range(tp), num_bytes=num_bytes) for tp in takers
            )
        return seconds


def problem_batch(oracle: Oracle) -> int:
    return oracle.problem.task.batch


def least_s(solve: Callable[[Request], Solution], problem: Problem) -> float:
    try:
        solution = solve(problem.request)
    except InfeasibleError:
        return math.inf
    values = [c.objective_s for c in solution.candidates]
    assert values == sorted(values)
    assert solution.formula_bound_s == values[0]
    return values[0]


@pytest.mark.parametrize("graph", some(GRAPHS, 3, 4))
def test_degrees_equal_enumeration(graph: str) -> None:
    rng = np.random.default_rng(sum(map(ord, graph)))
    solved = {"megatron": 0, "rigid": 0}
    for _ in range(24):
        problem = without_communicators(random_problem(rng, graph))
        oracle = Oracle(problem)
        found = least_s(solve_megatron, problem)
        assert found == pytest.approx(oracle.best_s(oracle.colocated()), rel=1e-9)
        solved["megatron"] += found < math.inf
        if problem.chained():
            found = least_s(solve_megatron_rigid, problem)
            assert found == pytest.approx(oracle.best_s(oracle.rigid()), rel=1e-9)
            solved["rigid"] += found < math.inf
    assert 2 < solved["megatron"] < 24
    assert (solved["rigid"] > 0) == (graph != "llm")


def without_communicators(problem: Problem) -> Problem:
    """Their number is a bound of its own; the oracle leaves it out."""
    costs, request = problem.costs.profile, problem.request
    device = costs.cluster.device.model_copy(update={"communicator_bytes": 0.0})
    cluster = costs.cluster.model_copy(update={"device": device})
    return problem_of(
        request.workload,
        costs.model_copy(update={"cluster": cluster}),
        request.devices,
        top=request.top,
    )


# --- end to end ----------------------------------------------------------------------


PINNED: list[tuple[str, int, dict[str, dict[str, Any]]]] = [
    ("megatron", 4, {}),
    ("megatron", 4, {"llm": {"pp": 2, "tp": 1}}),
    ("megatron", 8, {"llm": {"pp": 4, "tp": 2}}),
    ("megatron-rigid", 5, {"llm": {"pp": 2, "tp": 1}}),
    ("megatron-rigid", 8, {"vision": {"tp": 1}, "llm": {"tp": 2, "microbatch": 3}}),
    ("ratio", 9, {}),
]


@pytest.mark.parametrize(("solver", "devices", "pins"), some(PINNED, 0, 4))
def test_a_baseline_trains_as_one_process(
    tmp_path: Path, solver: str, devices: int, pins: dict[str, dict[str, Any]]
) -> None:
    task = job(pins, batch=7)
    plan = run_solve(tmp_path, task, costs(devices), solver=solver, top=1)
    assert plan.solver.name == solver
    assert plan.solver.formula_bound_s <= plan.solver.objective_s
    assert check_program(compile_plan(plan)) == []
    verdict = verify_in_process(plan, task)
    assert not verdict.differences, verdict.differences[:3]
    for module, degrees in pins.items():
        for name in set(degrees) & {"tp", "pp"}:
            assert getattr(plan.unit(module), name) == degrees[name]


def test_a_contrastive_pair_trains_as_one_process(tmp_path: Path) -> None:
    loss = {
        "factory": f"{MODELS}:Contrastive",
        "inputs": ["vision", "audio"],
        "cross_sample": True,
        "sync_batch": 6,
    }
    modules = {
        name: {"factory": f"{MODELS}:tower", "args": {"blocks": 2}, "inputs": [field]}
        for name, field in (("vision", "a"), ("audio", "b"))
    }
    task = workload(
        modules,
        batch=12,
        losses={"contrastive": loss},
        data={"factory": f"{MODELS}:Samples", "args": {"length": 24}},
        train={"precision": "fp64", "seed": 3},
    )
    given = profile({name: module_profile(blocks=2) for name in modules}, 4)
    for solver in ("megatron", "ratio"):
        plan = run_solve(tmp_path, task, given, solver=solver)
        assert check_program(compile_plan(plan)) == []
        assert verify_in_process(plan, task).differences == ()


@pytest.mark.parametrize("solver", ["megatron", "megatron-rigid"])
def test_simulated_bytes_are_within_the_formula_s(tmp_path: Path, solver: str) -> None:
    """A plan that the formula lets pass never fails the planner's check of its memory."""
    for pp, memory in itertools.product((1, 2, 4), (1800.0, 2600.0, 4000.0)):
        pins = {"llm": {"pp": pp}}
        given = costs(8, memory_bytes=memory)
        problem = problem_of(job(pins), given, 8)
        if least_s(BASELINES[solver], problem) < math.inf:
            plan = run_solve(tmp_path, job(pins), given, solver=solver, top=1)
            assert max(plan.predicted.memory_bytes) <= memory


def simulated_s(folder: Path, problem: Problem, solver: str) -> float:
    """Of the plan that a solver makes; infinite where it makes none."""
    task, given = problem.request.workload, problem.costs.profile
    try:
        return run_solve(folder, task, given, solver=solver).predicted.iteration_s
    except (InfeasibleError, NotApplicableError):
        return math.inf


@pytest.mark.parametrize("seed", some(range(60), 1))
def test_no_baseline_is_better_than_auto(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = list(GRAPHS)
    problem = random_problem(rng, names[seed % len(names)])
    auto_s = simulated_s(tmp_path, problem, "auto")
    theirs = [simulated_s(tmp_path, problem, solver) for solver in (*BASELINES, "convex")]
    assert auto_s <= min(theirs) * (1 + 1e-9)


@pytest.mark.parametrize("seed", some(range(3), 2))
def test_no_baseline_is_better_than_auto_where_losses_couple(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = workload({"a": {}, "b": {}}, batch=12, sync_batch=int(rng.choice([4, 6, 12])))
    modules = {n: module_profile(float(rng.integers(1, 9)), blocks=3) for n in ("a", "b")}
    problem = problem_of(pair, profile(modules, int(rng.integers(2, 7))), 2)
    auto_s = simulated_s(tmp_path, problem, "auto")
    assert auto_s <= min(simulated_s(tmp_path, problem, s) for s in BASELINES) * (1 + 1e-9)


def test_auto_shares_devices_where_that_is_faster_and_convex_never(tmp_path: Path) -> None:
    # Two modules of equal work and a micro-batch each: a pipeline of two devices has a ramp.
    task, given = workload(CHAIN, batch=2, losses=LOSS), chain_profile(2)
    apart = run_solve(tmp_path, task, given, solver="convex")
    assert [unit.ranks for unit in apart.units] == [(((0,),),), (((1,),),)]
    shared = run_solve(tmp_path, task, given)
    assert [unit.dp for unit in shared.units] == [2, 2]
    assert apart.predicted.iteration_s > shared.predicted.iteration_s
    labels = [r.label for r in shared.solver.runners_up]
    assert any(label.startswith("convex: vision 1x1x1, llm 1x1x1, ") for label in labels)
    assert any(label.endswith(SHARED) for label in labels)


def test_without_time_the_first_plan_of_each_solver_is_simulated(tmp_path: Path) -> None:
    task, given = workload(CHAIN, batch=2, losses=LOSS), chain_profile(2)
    plan = run_solve(tmp_path, task, given, budget_s=0.0)
    assert [unit.dp for unit in plan.units] == [2, 2]
    labels = [r.label for r in plan.solver.runners_up]
    assert any(label.startswith("convex: vision 1x1x1, llm 1x1x1, ") for label in labels)
    assert any("were not simulated for lack of time" in note for note in plan.solver.notes)


def test_compare_shows_the_baselines(tmp_path: Path) -> None:
    task, given = job({}), costs(4)
    run_solve(tmp_path, task, given, solver="convex", top=1)
    assert not set(SOLVERS) & set(BASELINES)
    (tmp_path / "w.yaml").write_text(document_text(task))
    shown = call(
        "mmplan", "compare", tmp_path / "w.yaml", "--profile", tmp_path / "p.json", "--json"
    )
    assert {p["solver"]["name"] for p in shown.document} >= set(BASELINES) - OF_SEVERAL_TASKS


# --- what does not apply or fit ------------------------------------------------------


def test_what_rigid_is_not_for() -> None:
    modules = {n: module_profile() for n in ("a", "b")}
    pair = problem_of(workload({"a": {}, "b": {}}, batch=8), profile(modules, 4), 4).request
    with pytest.raises(NotApplicableError, match="a, b are no such chain") as refused:
        solve_megatron_rigid(pair)
    assert refused.value.hint == "use --solver megatron"


@pytest.mark.parametrize("solver", BASELINES)
def test_a_method_is_refused(solver: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"--method paper: {solver} knows exact"):
        run_solve(tmp_path, job({}), costs(4), solver=solver, method="paper")


def test_what_is_missing_is_said() -> None:
    few = request_of({"llm": {"pp": 2}}, chain_profile(2), 2, 4)
    with pytest.raises(
        InfeasibleError, match=r"needs at least 3 devices .* there are 2: 1 missing"
    ):
        solve_megatron_rigid(few)
    solve_megatron_rigid(request_of({"llm": {"pp": 2}}, chain_profile(3), 3, 4))

    given = chain_profile(2, {"parameters": 64.0}, memory_bytes=500.0)
    with pytest.raises(InfeasibleError, match=r"512 B .* has 500 B: 12 B missing"):
        solve_megatron(request_of({}, given, 2, 4))
    solve_megatron(request_of({}, chain_profile(2, {"parameters": 64.0}, memory_bytes=512.0), 2, 4))

    with pytest.raises(InfeasibleError, match="one tp for vision, llm"):
        solve_megatron(request_of({"vision": {"tp": 2}}, chain_profile(2), 2, 4))
    apart = {"vision": {"dp": 1}, "llm": {"dp": 2}}
    with pytest.raises(InfeasibleError, match="no degrees and micro-batch fit all"):
        solve_megatron(request_of(apart, chain_profile(2), 2, 4))

    with pytest.raises(
        InfeasibleError, match=r"each of 2 modules devices of its own.*1: 1 missing"
    ):
        solve_ratio(request_of({}, chain_profile(1), 1, 4))
    pins = {"vision": {"dp": 3}}
    with pytest.raises(InfeasibleError, match=r"vision 2, llm 2.* free shares takes vision 3"):
        solve_ratio(request_of(pins, chain_profile(4), 4, 4))
