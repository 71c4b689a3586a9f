"""Baselines of several tasks, and deepspeed: by hand, against enumeration, and end to end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlaunch.session.session import Session
from mmplan.costs.program_costs import CostModel
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning.planner import BASELINES
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute
from mmplan.schema.base import document_text
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.solvers.baselines.distmm_mt import solve_distmm_mt
from mmplan.solvers.baselines.megatron import solve_deepspeed, solve_megatron
from mmplan.solvers.baselines.spindle import share_out, solve_spindle_optimus, solve_spindle_seq
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.problem import Problem, Request, Solution
from tests.commands import call
from tests.solving import module_profile, profile, run_solve, workload
from tests.stage_costs import fixed_bytes, gradient_bytes, held_bytes, stage_s
from tests.task_sets import job, write_files
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import verify_in_process

OF_TASKS = ("megatron", "deepspeed", "spindle-seq", "spindle-optimus", "distmm-mt")
MODULES: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {}}
SECONDS = {"a": (1.0, 2.0), "b": (3.0, 6.0), "c": (2.0, 4.0)}
LOSSES = {
    "ab": {"factory": "mmplan.zoo.losses:clip", "inputs": ["a", "b"], "cross_sample": True},
    "bc": {"factory": "mmplan.zoo.losses:clip", "inputs": ["b", "c"], "cross_sample": True},
    "fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["c", "y"]},
}
TASKS: dict[str, dict[str, Any]] = {
    "AB": {"modules": ["a", "b"], "losses": ["ab"]},
    "C": {"modules": ["c"], "losses": ["fit"]},
    "BC": {"modules": ["b", "c"], "losses": ["bc"]},
    "AC": {"modules": ["a", "c"], "losses": ["fit"], "inputs": {"c": ["a"]}},
}


def tasks_of(
    *names: str, batches: Mapping[str, int] | None = None, pins: dict[str, Any] | None = None
) -> Workload:
    """Some of the tasks, with batches of 8 if not told otherwise."""
    tasks = {n: {**TASKS[n], "batch": (batches or {}).get(n, 8)} for n in names}
    modules = {n: {**spec, "plan": (pins or {}).get(n, {})} for n, spec in MODULES.items()}
    return workload(modules, batch=8, losses=LOSSES, tasks=tasks)


def costs_of(devices: int, *, cluster: dict[str, Any] | None = None, **modules: Any) -> Profile:
    """The modules' seconds, with what is common to all or, by name, one's own."""
    common = {k: v for k, v in modules.items() if k not in SECONDS}
    return profile(
        {n: module_profile(*s, **{**common, **modules.get(n, {})}) for n, s in SECONDS.items()},
        devices,
        **(cluster or {}),
    )


def request_of(task: Workload, costs: Profile, devices: int, *, zero: Any = 0) -> Request:
    return Request(
        workload=task,
        tasks=resolve_tasks(task),
        costs=CostModel(costs, costs.cluster),
        cluster=costs.cluster,
        devices=devices,
        zero=zero,
    )


def degrees(solution: Solution) -> dict[str, tuple[int, int, int]]:
    """(dp, tp, largest micro-batch) of every unit of the best plan."""
    units = solution.candidates[0].units
    return {u.name: (u.dp, u.tp, max(map(max, u.microbatches))) for u in units}


def grids(solution: Solution) -> dict[str, tuple[int, int]]:
    """(dp, tp) of every unit of the best plan."""
    return {name: own[:2] for name, own in degrees(solution).items()}


# --- by hand -------------------------------------------------------------------------


def test_deepspeed_replicates_everything_and_runs_one_task_after_another() -> None:
    found = solve_deepspeed(request_of(tasks_of("AB", "C"), costs_of(2, fixed_s=1.0), 2))
    # 4 samples a device at once: 4 + 4 * (3 + 9) seconds, then 2 + 4 * 6.
    assert found.candidates[0].objective_s == found.formula_bound_s == pytest.approx(52.0 + 26.0)
    assert degrees(found) == dict.fromkeys(("AB.a", "AB.b", "C.c"), (2, 1, 4))
    assert (found.candidates[0].in_turn, found.candidates[0].zero) == (("AB", "C"), 1)


def test_deepspeed_accumulates_where_the_memory_is_short() -> None:
    task = tasks_of("AB", "C")
    held = {"a": {"activation_bytes": 10.0}, "b": {"activation_bytes": 10.0}}
    held["c"] = {"activation_bytes": 100.0}

    def solved(memory: float) -> Solution:
        cluster = {"memory_bytes": memory}
        costs = costs_of(2, fixed_s=1.0, parameters=8.0, cluster=cluster, **held)
        return solve_deepspeed(request_of(task, costs, 2))

    # 24 parameters of 4 + 4 + 8 / 2 bytes are 288; c's 4 samples at once hold 400 more, 2 hold
    # 200. The contrastive pair needs all 4 of its samples: 4 * 20.
    assert degrees(solved(688.0))["C.c"] == (2, 1, 4)
    two = solved(687.0)
    assert degrees(two) == {"AB.a": (2, 1, 4), "AB.b": (2, 1, 4), "C.c": (2, 1, 2)}
    assert two.candidates[0].objective_s == pytest.approx(52.0 + 2 * (2 + 2 * 6.0))
    one = solved(388.0)
    assert one.candidates[0].objective_s == pytest.approx(52.0 + 4 * (2 + 6.0))
    # ZeRO-2 cuts gradients too: 4 + (4 + 8) / 2 bytes are 240, and 2 samples hold 200.
    assert {solved(memory).candidates[0].zero for memory in (388.0, 688.0)} == {1}
    assert solved(387.0).candidates[0].zero == solved(340.0).candidates[0].zero == 2
    # ZeRO-3 needs 16 / 2 bytes, 192, and has the largest block of each of three modules whole.
    with pytest.raises(
        InfeasibleError, match=r"AB, C one after another, a device has 339 B: 25 B missing"
    ):
        solved(339.0)


def test_deepspeed_where_devices_do_not_divide_the_batch() -> None:
    task = tasks_of("AB", "C")
    three = solve_deepspeed(request_of(task, costs_of(3), 3))
    # Shares of 3, 3 and 2 samples.
    assert three.candidates[0].objective_s == pytest.approx(3 * 12.0 + 3 * 6.0)
    assert three.candidates[0].units[0].samples == (3, 3, 2)
    many = solve_deepspeed(request_of(task, costs_of(16), 16))
    assert many.candidates[0].objective_s == pytest.approx(12.0 + 6.0)
    assert {u.dp for u in many.candidates[0].units} == {8}


def test_deepspeed_leaves_devices_over_where_memory_needs_even_micro_batches(
    tmp_path: Path,
) -> None:
    """Sums after each micro-batch, by which ZeRO-2 cuts gradients, need as many on all devices."""
    loss = {"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["a", "y"]}}
    task = workload({"a": {"plan": {"microbatch": 1}}}, batch=6, losses=loss)
    own = module_profile(parameters=1000.0, activation_bytes=1.0)

    def solved(memory_bytes: float) -> Plan:
        costs = profile({"a": own}, 4, memory_bytes=memory_bytes)
        return run_solve(tmp_path, task, costs, solver="deepspeed")

    # Four devices with ZeRO-1: weights and gradients, and a fourth of the state, 4 + 4 + 8 / 4.
    assert [unit.dp for unit in solved(10_100.0).units] == [4]
    # Three with ZeRO-2: 4 + 12 / 3.
    even = solved(8_100.0)
    assert (even.training.zero, even.units[0].samples) == (2, (2, 2, 2))
    assert max(even.predicted.memory_bytes) < 8_100.0


def test_deepspeed_of_one_task_has_no_turns(tmp_path: Path) -> None:
    task = workload({"a": {}, "b": {}}, batch=8, sync_batch=4)
    given_costs = profile({n: module_profile(*SECONDS[n]) for n in ("a", "b")}, 4)
    plan = run_solve(tmp_path, task, given_costs, solver="deepspeed")
    # Two sync batches of one sample a device.
    assert plan.solver.objective_s == pytest.approx(2 * 12.0)
    assert (plan.in_turn, plan.training.zero) == ((), 1)
    assert [u.name for u in plan.units] == ["a", "b"]


def test_each_task_of_spindle_seq_has_degrees_of_its_own_and_megatron_one_grid() -> None:
    task = tasks_of("AB", "C", batches={"C": 1})
    request = request_of(task, costs_of(2, tp={1: 1.0, 2: 1.5}), 2)
    own = solve_spindle_seq(request)
    # C's only sample is faster on a TP group: 6 / 1.5. The pair's 8 are not: 4 * 12.
    assert own.candidates[0].objective_s == own.formula_bound_s == pytest.approx(48.0 + 4.0)
    assert grids(own) == {"AB.a": (2, 1), "AB.b": (2, 1), "C.c": (1, 2)}
    one = solve_megatron(request)
    # One tp: 48 + 6 without, (96 + 6) / 1.5 with.
    assert one.candidates[0].objective_s == pytest.approx(54.0)
    assert grids(one) == {"AB.a": (2, 1), "AB.b": (2, 1), "C.c": (1, 1)}


def test_tasks_in_turn_hold_and_sum_common_parameters_once() -> None:
    slow = {"latency_s": 0.0, "bandwidth_bytes_per_s": 4.0}
    cluster = {"memory_bytes": 200.0, "intra": slow, "inter": slow}
    costs = costs_of(2, parameters=4.0, cluster=cluster)
    # 12 parameters of 16 bytes, c's in two tasks.
    found = solve_spindle_seq(request_of(tasks_of("AB", "C", "BC"), costs, 2))
    # 4 * 12, 4 * 6, 4 * 15 seconds, and 48 bytes of gradients over a link each way, once:
    # features are free to gather, they have no bytes.
    assert found.candidates[0].objective_s == pytest.approx(48.0 + 24.0 + 60.0 + 48 / 4)
    cluster["memory_bytes"] = 191.0
    with pytest.raises(InfeasibleError, match=r"at least 192 B .* 1 B missing"):
        solve_spindle_seq(
            request_of(tasks_of("AB", "BC"), costs_of(2, parameters=4.0, cluster=cluster), 2)
        )


def test_marginal_gain_by_hand() -> None:
    curves = [[(1, 12.0), (2, 6.0), (4, 3.0)], [(1, 8.0), (2, 5.0), (3, 4.0)]]
    # 6 a device for the first; 3 for the second; then the first would need 2 devices more.
    assert share_out(curves, 5) == [1, 2]
    assert share_out(curves, 2) == [0, 0]
    assert share_out(curves, 3) == [1, 0]
    assert share_out(curves, 6) == [2, 1]
    assert share_out(curves, 100) == [2, 2]


def test_spindle_optimus_runs_tasks_side_by_side() -> None:
    found = solve_spindle_optimus(request_of(tasks_of("AB", "C"), costs_of(4), 4))
    # AB: 96, 48, 36, 24 seconds on 1 to 4 devices, C half of that: the second device gains 48
    # for AB, then 24 for C, while a third would gain AB 12.
    assert grids(found) == dict.fromkeys(("AB.a", "AB.b", "C.c"), (2, 1))
    assert found.candidates[0].objective_s == found.formula_bound_s == pytest.approx(48.0)
    ranks = {u.task: set(u.all_ranks) for u in found.candidates[0].units}
    assert not ranks["AB"] & ranks["C"]
    assert found.candidates[0].in_turn == ()


def test_distmm_mt_is_distmm_task_by_task() -> None:
    request = request_of(tasks_of("AB", "C"), costs_of(4), 4)
    found = solve_distmm_mt(request)
    # a on one device, b on three with shares of 3: 9 s forward, 18 back. c on four: 2 * 6.
    assert found.candidates[0].objective_s == found.formula_bound_s == pytest.approx(27.0 + 12.0)
    assert grids(found) == {"AB.a": (1, 1), "AB.b": (3, 1), "C.c": (4, 1)}


def test_distmm_mt_leaves_room_for_the_modules_of_other_tasks(tmp_path: Path) -> None:
    # a's 100 parameters take 1600 bytes whole, c's too: together they do not fit a device, in
    # stages they do.
    big = {"a": {"parameters": 100.0}, "b": {"parameters": 1.0}, "c": {"parameters": 100.0}}
    task = tasks_of("AB", "C")
    roomy = run_solve(tmp_path, task, costs_of(4, **big), solver="distmm-mt")
    assert max(roomy.predicted.memory_bytes) == pytest.approx(3200.0)
    tight = costs_of(4, **big, cluster={"memory_bytes": 1700.0})
    plan = run_solve(tmp_path, task, tight, solver="distmm-mt")
    assert max(plan.predicted.memory_bytes) <= 1700
    assert max(u.pp for u in plan.units) > 1
    assert plan.predicted.iteration_s > roomy.predicted.iteration_s


@pytest.mark.parametrize("solver", ["spindle-seq", "spindle-optimus", "distmm-mt"])
def test_of_one_task_they_are_what_plans_it_best(solver: str) -> None:
    task = workload({"a": {}, "b": {}}, batch=8, sync_batch=4)
    request = request_of(task, profile({n: module_profile() for n in ("a", "b")}, 4), 4)
    same = solve_distmm if solver == "distmm-mt" else solve_megatron
    found, alone = BASELINES[solver](request), same(request)
    assert (found.candidates, found.formula_bound_s) == (alone.candidates, alone.formula_bound_s)
    assert found.solver == solver


# --- what does not fit ---------------------------------------------------------------


def test_what_is_missing_is_said() -> None:
    task = tasks_of("AB", "C", "BC")
    with pytest.raises(
        InfeasibleError, match=r"each of 3 tasks devices of its own, at least 3 .* 1 missing"
    ):
        solve_spindle_optimus(request_of(task, costs_of(2), 2))
    with pytest.raises(InfeasibleError, match="task AB: distmm gives each of 2 modules"):
        solve_distmm_mt(request_of(task, costs_of(1), 1))
    small = {"memory_bytes": 100.0}
    large = costs_of(4, parameters=10.0, cluster=small)
    with pytest.raises(InfeasibleError, match=r"deepspeed needs at least 210 B"):
        # With ZeRO-3: 30 parameters of 4 bytes, and of each module a block whole.
        solve_deepspeed(request_of(task, large, 4))
    for solver in (solve_spindle_seq, solve_megatron):
        with pytest.raises(InfeasibleError, match=r"at least 480 B .* 380 B missing"):
            solver(request_of(task, large, 4))
    with pytest.raises(InfeasibleError, match=r"spindle-optimus needs at least 320 B"):
        solve_spindle_optimus(request_of(task, large, 4))
    with pytest.raises(InfeasibleError, match=r"distmm-mt: the plans of AB, C, BC hold .* missing"):
        solve_distmm_mt(request_of(task, large, 4))
    larger = costs_of(4, parameters=40.0, cluster=small)
    with pytest.raises(InfeasibleError, match="task AB: module a needs 160 B"):
        solve_distmm_mt(request_of(task, larger, 4))
    pinned = tasks_of("AB", "C", pins={"c": {"tp": 2}})
    with pytest.raises(InfeasibleError, match=r"deepspeed .* {'c': {'tp': 2.* on 4 devices"):
        solve_deepspeed(request_of(pinned, costs_of(4, tp={1: 1.0, 2: 1.5}), 4))


@pytest.mark.parametrize("solver", OF_TASKS)
def test_a_method_is_refused(solver: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"--method paper: {solver} knows exact"):
        run_solve(tmp_path, tasks_of("AB", "C"), costs_of(4), solver=solver, method="paper")


# --- against enumeration -------------------------------------------------------------


class Oracle:
    """Every combination of TP, DP and micro-batch without pipelines, on all devices or halves."""

    def __init__(self, request: Request, *, tps: Sequence[int], halve: bool) -> None:
        self.request, self.tps, self.halve = request, tps, halve
        self.problems = [Problem(request=request, task=t) for t in request.tasks.values()]

    def best_s(self, *, one_grid: bool = False) -> float:
        ways = [list(self.ways(p)) for p in self.problems]
        best = math.inf
        for chosen in itertools.product(*ways):
            if one_grid and not self.same_grid(chosen):
                continue
            if self.fullest(chosen) <= self.problems[0].memory_bytes:
                time_s = sum(self.time_s(p, *w) for p, w in zip(self.problems, chosen, strict=True))
                best = min(best, time_s + self.reduce_s(chosen))
        return best

    def same_grid(self, chosen: Sequence[tuple[int, int, int]]) -> bool:
        """One tp, and one number of replicas, but of tasks with fewer samples than that."""
        dp = max(dp for _, dp, _ in chosen)
        most = [self.most(p, chosen[0][0]) for p in self.problems]
        return len({tp for tp, _, _ in chosen}) == 1 and all(
            own == min(dp, limit) for (_, own, _), limit in zip(chosen, most, strict=True)
        )

    def most(self, problem: Problem, tp: int) -> int:
        return min(problem.devices // tp, problem.round_samples)

    def ways(self, problem: Problem) -> Any:
        for tp in self.tps:
            dp = self.most(problem, tp)
            while dp:
                share = -(-problem.round_samples // dp)
                sizes = range(1, share + 1) if problem.task.sync_batches else (1, 2, 4, 8)
                yield from ((tp, dp, size) for size in sizes if size <= share)
                # Fewer replicas take as long, and may be alike.
                fewest = -(-problem.round_samples // share)
                dp = dp // 2 if self.halve else fewest if fewest < dp else 0

    def cut(self, problem: Problem, dp: int, limit: int) -> tuple[int, int]:
        """(micro-batches, largest) of a round."""
        share = -(-problem.round_samples // dp)
        count = -(-share // limit)
        return count, -(-share // count)

    def is_even(self, problem: Problem, dp: int, limit: int) -> bool:
        """Whether all replicas have as many micro-batches."""
        return problem.round_samples // dp >= self.cut(problem, dp, limit)[0]

    def whole(self, problem: Problem, module: str) -> tuple[str, tuple[int, int]]:
        return module, (0, problem.blocks(module))

    def time_s(self, problem: Problem, tp: int, dp: int, limit: int) -> float:
        count, size = self.cut(problem, dp, limit)
        modules = [self.whole(problem, m) for m in problem.task.modules]
        busy_s = sum(sum(stage_s(problem, *own, tp, size, dp)) for own in modules)
        ranks = tuple(range(tp * dp))
        sync_s = problem.sync_s(dict.fromkeys(problem.task.modules, ranks))
        return problem.rounds * (count * busy_s + sync_s)

    def owners(self, chosen: Sequence[tuple[int, int, int]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for problem, (tp, dp, limit) in zip(self.problems, chosen, strict=True):
            for module in problem.task.modules:
                way = problem, tp, dp, self.is_even(problem, dp, limit)
                found.setdefault(module, []).append(way)
        return found

    def fullest(self, chosen: Sequence[tuple[int, int, int]]) -> float:
        """Of the first device, which is in every replica 0."""
        total = 0.0
        for module, held in self.owners(chosen).items():
            tp = held[0][1] if len({tp for _, tp, _, _ in held}) == 1 else 1
            cut = all(even for *_, even in held) and len({dp for _, _, dp, _ in held}) == 1
            total += max(self.parameter_bytes(p, module, tp, dp, cut=cut) for p, _, dp, _ in held)
        active = [0.0]
        for problem, (tp, dp, limit) in zip(self.problems, chosen, strict=True):
            count, size = self.cut(problem, dp, limit)
            times = count if problem.task.sync_batches else 1
            modules = [self.whole(problem, m) for m in problem.task.modules]
            active.append(sum(times * held_bytes(problem, *m, tp, size) for m in modules))
        return total + max(active)

    def parameter_bytes(
        self, problem: Problem, module: str, tp: int, dp: int, *, cut: bool
    ) -> float:
        own = self.whole(problem, module)
        gathered = problem.gathered_bytes(*own) if dp > 1 and cut else 0.0
        return fixed_bytes(problem, *own, tp, dp, in_rounds=cut) + gathered / tp

    def reduce_s(self, chosen: Sequence[tuple[int, int, int]]) -> float:
        """Each module's longest reduction, one after another on the first device."""
        return sum(
            max(
                problem.costs.all_reduce_s(
                    ranks=list(range(0, dp * tp, tp)),
                    num_bytes=gradient_bytes(problem, *self.whole(problem, module), tp),
                    sharers=tp,
                )
                for problem, tp, dp, _ in held
            )
            for module, held in self.owners(chosen).items()
        )


def random_request(
    rng: np.random.Generator, *, tps: Sequence[int], zero: int = 0, pipelines: bool = False
) -> Request:
    """Two or three tasks over common modules; often short of memory."""
    names = list(rng.permutation([*TASKS])[: rng.integers(2, 4)])
    batches = {n: int(rng.choice([1, 2, 5, 8])) for n in names}
    pins = {} if pipelines else {m: {"pp": 1} for m in MODULES}
    task = tasks_of(*names, batches=batches, pins=pins)
    devices = int(rng.choice([2, 3, 4, 6]))
    modules = {
        name: {
            "fixed_s": float(rng.choice([0.0, 1.0])),
            "tp": {tp: float(rng.choice([1.2, 1.7])) if tp > 1 else 1.0 for tp in tps},
            "parameters": float(rng.integers(1, 6)),
            "activation_bytes": float(rng.integers(0, 40)),
            "output_bytes_per_sample": 1.0,
        }
        for name in MODULES
    }
    link = {"latency_s": 0.1, "bandwidth_bytes_per_s": float(rng.choice([2.0, 20.0]))}
    cluster = {
        "intra": link,
        "inter": link,
        "memory_bytes": float(rng.choice([150.0, 250.0, 400.0, 1e6])),
        "per_node": 2 if devices % 2 == 0 else devices,
    }
    return request_of(task, costs_of(devices, cluster=cluster, **modules), devices, zero=zero)


def least_s(solve: Callable[[Request], Solution], request: Request) -> float:
    try:
        solution = solve(request)
    except InfeasibleError:
        return math.inf
    best = solution.candidates[0].objective_s
    assert solution.formula_bound_s == pytest.approx(best)
    return best


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 150))]
)
def test_degrees_equal_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    request = random_request(rng, tps=(1, 2), zero=seed % 2)
    usable = [
        tp
        for tp in (1, 2)
        if request.cluster.devices_per_node % tp == 0 or request.cluster.nodes == 1
    ]
    oracle = Oracle(request, tps=usable, halve=True)
    assert least_s(solve_spindle_seq, request) == pytest.approx(oracle.best_s())
    assert least_s(solve_megatron, request) == pytest.approx(oracle.best_s(one_grid=True))
    files = request.workload, request.costs.profile, request.devices
    stages = (Oracle(request_of(*files, zero=z), tps=(1,), halve=False).best_s() for z in (1, 2, 3))
    first_s = next((seconds for seconds in stages if seconds < math.inf), math.inf)
    assert least_s(solve_deepspeed, request) == pytest.approx(first_s)


# --- end to end ----------------------------------------------------------------------


def turns_of(plan: Plan, rank: int) -> list[str]:
    """Tasks of a rank's forwards and backwards, in order, without repetition."""
    program = compile_plan(plan)
    row = (item for item in program.instructions[rank] if isinstance(item, Compute))
    return [task for task, _ in itertools.groupby(row, lambda c: program.stages[c.stage].task)]


def untied(task: Workload) -> Workload:
    """Parameters that stand in two blocks cannot be held as two different shards."""
    data = task.model_dump(mode="json", exclude_none=True)
    data["modules"]["t"]["factory"] = data["modules"]["v"]["factory"]
    return Workload.model_validate(data)


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("solver", OF_TASKS)
def test_a_baseline_of_tasks_trains_as_one_process(
    tmp_path: Path, solver: str, devices: int
) -> None:
    task = untied(job(tasks_from_step={0: ["VT", "UT", "TR"]}))
    _, costs = write_files(tmp_path, task, devices)
    tasks = ["VT", "UT"] if solver == "spindle-optimus" else None
    plan = run_solve(tmp_path, task, load_profile(costs), solver=solver, top=1, tasks=tasks)
    assert check_program(compile_plan(plan)) == []
    verdict = verify_in_process(plan, task)
    assert not verdict.differences, verdict.differences[:3]
    if solver == "spindle-optimus":
        assert all(len(turns_of(plan, rank)) == 1 for rank in range(devices))
    else:
        order = list(plan.tasks)
        for rank in range(devices):
            assert turns_of(plan, rank) == [name for name in order if name in turns_of(plan, rank)]


def test_deepspeed_spreads_its_state_where_the_workload_does_not_ask(tmp_path: Path) -> None:
    task = job(tasks_from_step={0: ["VT", "UT", "TR"]})
    assert task.train.zero == 0
    _, costs = write_files(tmp_path, task, 3)
    plan = run_solve(tmp_path, task, load_profile(costs), solver="deepspeed")
    held: list[int] = []

    def count(session: Session) -> None:
        state = session.update.optimizer.state if session.update.optimizer else {}
        held.append(sum(own["exp_avg"].numel() for own in state.values()))

    together = train_planned(plan, task, 3, after=count)
    alone = train_alone(plan, task, 3, plain(task))
    trained = {name: alone.weights[name] for name in together.weights}
    assert worst_difference(together.weights, trained) < 1e-9
    # Each rank has a third of the moments, rounded up a little.
    total = sum(tensor.numel() for tensor in trained.values())
    assert max(held) < 0.4 * total


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1), st.sampled_from(OF_TASKS))
def test_programs_of_random_tasks_have_no_faults(
    tmp_path_factory: pytest.TempPathFactory, seed: int, solver: str
) -> None:
    request = random_request(np.random.default_rng(seed), tps=(1, 2), pipelines=True)
    folder = tmp_path_factory.mktemp("random")
    try:
        plan = run_solve(folder, request.workload, request.costs.profile, solver=solver)
    except InfeasibleError:
        return
    assert plan_faults(plan) == []
    assert check_program(compile_plan(plan)) == []
    assert max(plan.predicted.memory_bytes) <= plan.cluster.device.memory_bytes
    assert plan.solver.formula_bound_s <= plan.solver.objective_s * (1 + 1e-12)
    for rank in range(plan.devices if plan.in_turn else 0):
        assert turns_of(plan, rank) == sorted(turns_of(plan, rank), key=plan.in_turn.index)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]
)
def test_no_baseline_of_tasks_is_better_than_auto(tmp_path: Path, seed: int) -> None:
    request = random_request(np.random.default_rng(seed), tps=(1, 2), pipelines=True)

    def simulated_s(solver: str) -> float:
        task, costs = request.workload, request.costs.profile
        try:
            return run_solve(tmp_path, task, costs, solver=solver).predicted.iteration_s
        except InfeasibleError:
            return math.inf

    assert simulated_s("auto") <= min(map(simulated_s, OF_TASKS)) * (1 + 1e-9)


def test_a_task_that_is_not_there_has_no_turn(tmp_path: Path) -> None:
    plan = run_solve(tmp_path, tasks_of("AB", "C"), costs_of(2), solver="deepspeed")
    assert plan_faults(plan) == []

    def faults(*in_turn: str) -> list[str]:
        return plan_faults(plan.model_copy(update={"in_turn": in_turn}))

    assert faults("AB", "D") == ["in_turn: there is no task 'D'"]
    assert faults("C", "C") == ["in_turn: task C stands there 2 times"]
    (tmp_path / "plan.json").write_text(
        document_text(plan.model_copy(update={"in_turn": ("AB", "D")}))
    )
    command = ("mmplan", "simulate", tmp_path / "plan.json", "--profile", tmp_path / "p.json")
    refused = call(*command)
    assert (refused.code, bool(refused.hint)) == (2, True)
    assert "in_turn: there is no task 'D'" in refused.message
    waves = run_solve(tmp_path, tasks_of("AB", "C"), costs_of(2), solver="mpsp")
    mixed = waves.model_copy(update={"in_turn": ("AB", "C")})
    assert plan_faults(mixed) == [
        "in_turn: task AB has slices in waves, which have an order of their own"
    ]
