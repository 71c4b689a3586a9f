"""Plans of ``--solver convex``: they run, their formula and memory are what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from tests.programs import in_flight
from tests.selection import some
from tests.solving import module_profile, profile, run_solve, workload
from tests.verification import verify_in_process

MODELS = "tests.matrix_models"
REGRESSION = {"factory": f"{MODELS}:Regression", "inputs": ["image", "target"]}
MODULES: dict[str, dict[str, Any]] = {
    "vision": {"inputs": ["a"]},
    "audio": {"inputs": ["b"]},
    "llm": {"inputs": ["vision", "audio"], "backbone": True},
    "image": {"inputs": ["llm"]},
}
BLOCKS = {"vision": 2, "audio": 1, "llm": 4, "image": 2}


def job(pins: dict[str, dict[str, Any]], *, batch: int = 12, **more: Any) -> Workload:
    modules = {
        name: {
            "factory": f"{MODELS}:tower",
            "args": {"blocks": BLOCKS[name]},
            "plan": pins.get(name, {}),
            **spec,
        }
        for name, spec in MODULES.items()
    }
    return workload(
        modules,
        batch=batch,
        losses={"regression": REGRESSION},
        data={"factory": f"{MODELS}:Samples", "args": {"length": 2 * batch}},
        train={"precision": "fp64", "seed": 3},
        **more,
    )


def costs(devices: int, *, sample_bytes: float = 8.0, **cluster: Any) -> Profile:
    """Backward twice the forward everywhere, so that the formula is a bound."""
    seconds = {"vision": 1.0, "audio": 0.5, "llm": 6.0, "image": 2.0}
    modules = {
        name: module_profile(
            s,
            2 * s,
            blocks=BLOCKS[name],
            tp={1: 1.0, 2: 1.6},
            parameters=64.0,
            activation_bytes=120.0,
            output_bytes_per_sample=sample_bytes,
            boundary_bytes_per_sample=sample_bytes,
        )
        for name, s in seconds.items()
    }
    return profile(modules, devices, **cluster)


PINNED: dict[str, dict[str, dict[str, Any]]] = {
    "free": {},
    "dp 3 against 2": {"vision": {"dp": 3}, "llm": {"dp": 2, "vpp": 1}, "image": {"dp": 1}},
    "batch is no multiple": {"llm": {"dp": 5, "vpp": 1, "pp": 1}},
    "tp and pp": {"vision": {"tp": 2}, "llm": {"tp": 2, "pp": 2, "dp": 1, "vpp": 1}},
    "larger micro-batches": {"llm": {"microbatch": 4, "vpp": 1}},
    "interleaved": {"llm": {"pp": 2, "vpp": 2, "dp": 2}},
    "odd interleaved": {"llm": {"pp": 2, "vpp": 2, "dp": 2, "microbatch": 2}},
}


# Algorithm 1 knows no interleaving, and only numbers of replicas that divide.
CASES = [("exact", name) for name in PINNED] + [("cvxpy", "free"), ("cvxpy", "tp and pp")]


@pytest.mark.parametrize(("method", "name"), some(CASES, 2, 4, 7))
def test_a_plan_trains_as_one_process(tmp_path: Path, name: str, method: str) -> None:
    task = job(PINNED[name])
    plan = run_solve(tmp_path, task, costs(9), solver="convex", method=method)
    assert plan.solver.formula_bound_s <= plan.solver.objective_s
    assert check_program(compile_plan(plan)) == []
    verdict = verify_in_process(plan, task)
    assert not verdict.differences, verdict.differences[:3]
    assert verdict.worst <= 1e-12
    for module, pins in PINNED[name].items():
        unit = plan.unit(module)
        for degree in ("tp", "pp", "dp", "vpp"):
            assert pins.get(degree, getattr(unit, degree)) == getattr(unit, degree)


@pytest.mark.parametrize("name", [n for n in PINNED if "interleaved" not in n])
def test_formula_is_never_below_the_simulated_time(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(4)
    for batch in (4, 7, 12):
        pins = {**PINNED[name], "llm": {"vpp": 1, **PINNED[name].get("llm", {})}}
        devices = int(rng.integers(8, 13))
        if (
            pins["llm"].get("dp", 1) > batch
            or pins["vision" if "vision" in pins else "llm"].get("dp", 1) > batch
        ):
            continue
        plan = run_solve(tmp_path, job(pins, batch=batch), costs(devices), solver="convex", top=1)
        assert plan.predicted.iteration_s <= plan.solver.objective_s * (1 + 1e-9)
        assert plan.predicted.iteration_s >= plan.solver.objective_s * 0.8


def test_memory_in_flight_is_the_distance_from_the_end(tmp_path: Path) -> None:
    pins = {
        "vision": {"pp": 2, "dp": 1, "tp": 1},
        "audio": {"dp": 2, "tp": 1},
        "llm": {"pp": 2, "dp": 2, "vpp": 1, "tp": 1},
        "image": {"pp": 2, "dp": 1, "tp": 1},
    }
    plan = run_solve(tmp_path, job(pins), costs(10, sample_bytes=0.0), solver="convex", top=1)
    distance = {"vision": (6, 5), "audio": (5,), "llm": (4, 3), "image": (2, 1)}
    program = compile_plan(plan)
    for unit in plan.units:
        for replica in unit.ranks:
            size = 2 if unit.dp == 1 else 1
            for p, ranks in enumerate(replica):
                held = size * 120.0 / unit.pp * distance[unit.module][p]
                fixed = 64.0 / unit.pp * (8 + 8 + 16)
                assert plan.predicted.memory_bytes[ranks[0]] == pytest.approx(fixed + held)
    held = in_flight(program)
    for stage in program.stages:
        for (rank,) in stage.ranks:
            assert held[rank, stage.index] == distance[stage.module][stage.chunk]


def test_what_the_hint_says_is_enough_and_no_more(tmp_path: Path) -> None:
    task = job({})
    with pytest.raises(InfeasibleError, match="devices of its own") as short:
        run_solve(tmp_path, task, costs(3), solver="convex")
    assert "1 more device," in str(short.value.hint)
    run_solve(tmp_path, task, costs(4), solver="convex")

    def with_memory(memory_bytes: float, devices: int = 6) -> Plan:
        return run_solve(
            tmp_path, task, costs(devices, memory_bytes=memory_bytes), solver="convex", top=1
        )

    with pytest.raises(InfeasibleError, match="memory is the tightest constraint") as lacking:
        with_memory(1500.0)
    found = re.search(r"give it (\d+) more devices? or (\S+) B more", str(lacking.value.hint))
    assert found is not None
    more_devices, more_bytes = int(found[1]), float(found[2])
    with_memory(1500.0, devices=6 + more_devices)
    with pytest.raises(InfeasibleError):
        with_memory(1500.0, devices=5 + more_devices)
    with_memory(1500.0 + more_bytes)
    with pytest.raises(InfeasibleError):
        with_memory(1500.0 + more_bytes * 0.97)
    with pytest.raises(InfeasibleError, match=r"module audio needs 1\.26 kB on a device"):
        with_memory(1000.0)


def test_pins_that_leave_nothing_name_the_module(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match="module vision: no tp, pp and vpp fit"):
        run_solve(tmp_path, job({"vision": {"tp": 8}}), costs(9), solver="convex")
    with pytest.raises(InfeasibleError, match="whatever their memory"):
        run_solve(tmp_path, job({"vision": {"dp": 7}}, batch=6), costs(14), solver="convex")
    with pytest.raises(InvalidInputError, match="only the backbone"):
        run_solve(tmp_path, job({"vision": {"vpp": 2}}), costs(9), solver="convex")


def test_what_convex_is_not_for_goes_to_distmm(tmp_path: Path) -> None:
    pair = workload({"vision": {}, "text": {}}, batch=8)
    given = profile({name: module_profile() for name in ("vision", "text")}, 2)
    with pytest.raises(InvalidInputError, match="per sample; contrastive takes") as refused:
        run_solve(tmp_path, pair, given, solver="convex")
    assert refused.value.exit_code == 2
    assert refused.value.hint == "use --solver distmm"
    assert run_solve(tmp_path, pair, given).solver.name in ("distmm", "colocated")
    with pytest.raises(InvalidInputError, match="--method guess: convex knows exact, cvxpy"):
        run_solve(tmp_path, job({}), costs(9), solver="convex", method="guess")


def test_auto_takes_the_better_of_all(tmp_path: Path) -> None:
    task, given = job({}), costs(9)
    auto = run_solve(tmp_path, task, given)
    convex = run_solve(tmp_path, task, given, solver="convex")
    assert auto.predicted.iteration_s <= convex.predicted.iteration_s * (1 + 1e-9)


def test_more_devices_never_hurt_and_times_scale(tmp_path: Path) -> None:
    def objective(devices: int, **more: Any) -> float:
        plan = run_solve(tmp_path, job({}), costs(devices, **more), solver="convex", top=1)
        assert plan.solver.formula_bound_s <= plan.solver.objective_s
        return plan.solver.objective_s

    values = [objective(n) for n in range(4, 15)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]
    tight = [objective(n, memory_bytes=2600.0) for n in range(8, 13)]
    assert tight == sorted(tight, reverse=True)
    assert all(t >= v for t, v in zip(tight, values[4:], strict=False))


def test_the_exact_method_never_loads_cvxpy(tmp_path: Path) -> None:
    run_solve(tmp_path, job({}), costs(9), solver="convex")
    code = (
        "import sys; from pathlib import Path; from mmplan.planning.planner import solve\n"
        "from mmplan.schema.profile import load_profile\n"
        "from mmplan.schema.workload import load_workload\n"
        f"w, p = Path({str(tmp_path / 'w.json')!r}), Path({str(tmp_path / 'p.json')!r})\n"
        "solve(load_workload(w), workload_path=w, profile=load_profile(p), profile_path=p,\n"
        "      plan_path=w.with_name('plan.json'), solver='convex')\n"
        "sys.exit(sorted({'cvxpy', 'torch'} & set(sys.modules)) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
