"""``--solver convex`` against enumeration from the cost model, and its plans end to end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mmplan.costs.program_costs import CostModel
from mmplan.errors import InfeasibleError
from mmplan.schema.plan import PlannedTraining
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.solvers.communicators import PlacedModule
from mmplan.solvers.convex.module_tables import VPP
from mmplan.solvers.convex.solver import best_pipelines
from mmplan.solvers.messages import stage_messages
from mmplan.solvers.partitioner import cut_everywhere
from mmplan.solvers.problem import Candidate, Problem, Request
from tests.selection import some
from tests.solving import module_profile, profile, workload
from tests.stage_costs import fixed_bytes, gradient_bytes, held_bytes, stage_s

GRAPHS: dict[str, dict[str, list[str]]] = {
    "llm": {"llm": ["llm_data"]},
    "1 + 0": {"vision": ["vision_data"], "llm": ["vision", "llm_data"]},
    "0 + 1": {"llm": ["llm_data"], "image": ["llm"]},
    "1 + 1": {"vision": ["vision_data"], "llm": ["vision"], "image": ["llm"]},
    "2 + 1": {"vision": ["v"], "audio": ["a"], "llm": ["vision", "audio"], "image": ["llm"]},
    "3 + 0": {"vision": ["v"], "audio": ["a"], "depth": ["d"], "llm": ["vision", "audio", "depth"]},
}


def problem_of(job: Workload, costs: Profile, devices: int, *, top: int = 1) -> Problem:
    training = PlannedTraining(
        precision=job.train.precision,
        zero=job.train.zero,
        optimizer=job.train.optimizer,
        reorder=job.train.reorder,
    )
    request = Request(
        workload=job,
        tasks=resolve_tasks(job),
        costs=CostModel(costs, costs.cluster, training),
        cluster=costs.cluster,
        devices=devices,
        top=top,
    )
    return Problem(request=request, task=request.tasks["default"])


# --- the oracle ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    devices: int
    warm_s: float
    stage_s: float
    reduce_s: float
    depth: int
    # Fixed bytes, held, held times stages ahead, and beside those of so many micro-batches.
    needed: tuple[tuple[float, float, float, Callable[[int], float]], ...]


class Oracle:
    """Every plan, from the cost model's scalar answers; shares only the cuts with the solver."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.task = problem, problem.task
        self.cluster = problem.request.cluster
        self.specs = problem.request.workload.modules
        self.modules = list(problem.task.modules)
        named = [m for m in self.modules if self.specs[m].backbone]
        self.backbone = named[0] if named else max(self.modules, key=self._per_sample)
        self.cuts = {m: self._cuts(m) for m in self.modules}

    def _per_sample(self, module: str) -> float:
        tp = min(self.problem.costs.tp_options(task="default", module=module))
        return sum(stage_s(self.problem, module, (0, self.problem.blocks(module)), tp, 1))

    def _cuts(self, module: str) -> list[tuple[tuple[int, int], ...]]:
        blocks = self.problem.blocks(module)
        tp = min(self.problem.costs.tp_options(task="default", module=module))
        work = [sum(stage_s(self.problem, module, (b, b + 1), tp, 1)) for b in range(blocks)]
        return cut_everywhere(tuple(work), blocks)

    def best_s(self) -> float:
        batch, pins = self.task.batch, self.specs[self.backbone].plan
        sizes = [m for m in range(1, batch + 1) if pins.allows("microbatch", m)]
        return min(
            (
                self._best_of(replicas, size)
                for size in sizes
                for replicas in range(1, -(-batch // size) + 1)
                if pins.allows("dp", replicas)
            ),
            default=math.inf,
        )

    def _best_of(self, replicas: int, size: int) -> float:
        batch, devices = self.task.batch, self.problem.devices
        samples, steps = min(batch, replicas * size), -(-batch // (replicas * size))
        last = batch - (steps - 1) * samples
        counts = {steps, steps - (last < replicas)}
        rows = {m: list(self._rows(m, replicas, size, samples, counts)) for m in self.modules}
        best = math.inf
        for choice in itertools.product(*rows.values()):
            if sum(row.devices for row in choice) <= devices:
                best = min(best, self._value(dict(zip(rows, choice, strict=True)), steps))
        return best

    def _value(self, choice: Mapping[str, Row], steps: int) -> float:
        memory = self.problem.memory_bytes
        for module, row in choice.items():
            after = self._after(module, {m: float(r.depth) for m, r in choice.items()})
            for fixed, held, ahead, beside in row.needed:
                active = min(ahead + held * after, held * steps) + beside(steps)
                if fixed + active > memory * (1 + 1e-12):
                    return math.inf
        warm = {m: row.warm_s for m, row in choice.items()}
        longest = max(warm[m] + self._after(m, warm) for m in choice)
        stage = max(row.stage_s for row in choice.values())
        return longest + (steps - 1) * stage + max(row.reduce_s for row in choice.values())

    def _after(self, module: str, weight: Mapping[str, float]) -> float:
        return max(
            (weight[c] + self._after(c, weight) for c in self.problem.consumers(module)), default=0
        )

    def _rows(
        self, module: str, replicas: int, size: int, samples: int, steps: set[int]
    ) -> Iterator[Row]:
        pins, problem = self.specs[module].plan, self.problem
        node, devices = self.cluster.devices_per_node, problem.devices
        counts = [replicas] if module == self.backbone else range(1, samples + 1)
        alone = problem.request.top == 1 and not any(s.plan.vpp for s in self.specs.values())
        vpps = range(1, 9) if pins.vpp else (1,) if alone else VPP
        for tp in problem.costs.tp_options(task="default", module=module):
            if tp > min(node, devices) or (devices > node and node % tp):
                continue
            for dp, pp, vpp in itertools.product(
                counts, range(1, len(self.cuts[module]) + 1), vpps
            ):
                own = size if module == self.backbone else -(-samples // dp)
                if vpp > 1 and (module != self.backbone or pp == 1):
                    continue
                degrees = {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "microbatch": own}
                if tp * pp * dp > devices - len(self.modules) + 1:
                    continue  # the others have none left
                if pp * vpp <= len(self.cuts[module]) and all(
                    pins.allows(name, value) for name, value in degrees.items()
                ):
                    yield self._row(module, tp, pp, vpp, dp, own, steps)

    def _row(
        self, module: str, tp: int, pp: int, vpp: int, dp: int, size: int, steps: set[int]
    ) -> Row:
        problem, cuts = self.problem, self.cuts[module][pp * vpp - 1]
        compute = [sum(stage_s(problem, module, cut, tp, size, dp)) for cut in cuts]
        messages = [self._message_s(module, c, cuts, tp, pp, size) for c in range(len(cuts))]
        ranks = [range(p, len(cuts), pp) for p in range(pp)]
        stage = max(sum(compute[c] + messages[c] for c in own) for own in ranks)
        ramp = sum(compute)
        if vpp > 1:
            # Fewer than pp micro-batches go from chunk to chunk without filling the time between.
            idle = max(ramp - max(steps) * stage, 0) * (vpp - 1) / vpp
            ramp = stage + max(ramp - stage, 0) / vpp + idle
        group = max(len(g) for n in steps for g in groups(n, pp))
        return Row(
            devices=tp * pp * dp,
            warm_s=ramp + sum(messages),
            stage_s=stage,
            reduce_s=self._reduce_s(
                module, tp, pp, dp, [[cuts[c] for c in own] for own in ranks], size
            ),
            depth=2 * group + self._slack(module, group) if vpp > 1 else pp,
            needed=tuple(
                self._bytes(module, cuts, list(own), tp, dp, size, pp, group) for own in ranks
            ),
        )

    def _slack(self, module: str, group: int) -> int:
        """Interleaved chunks take in a group of micro-batches at a time for what comes after."""
        return group - 1 if self.problem.consumers(module) else 0

    def _message_s(
        self, module: str, c: int, cuts: tuple[tuple[int, int], ...], tp: int, pp: int, size: int
    ) -> float:
        problem, node = self.problem, self.cluster.devices_per_node
        together = problem.devices <= node
        if c == len(cuts) - 1:
            if not problem.consumers(module):
                return 0.0
            back = problem.makes_gradient(module)
        else:
            together = together or node % (tp * pp) == 0
            back = problem.stage(module, cuts[c + 1]).input_gradient
        link = self.cluster.links.intra_node if together else self.cluster.links.inter_node
        assert link is not None
        num_bytes = size * problem.output_bytes(module, cuts[c][1] - 1)
        message_s = link.latency_s + num_bytes / link.bandwidth_bytes_per_s
        if not together:
            # Between nodes the ranks of a TP group receive shares, and gather them.
            message_s += problem.costs.gather_shares_s(ranks=range(tp), num_bytes=num_bytes)
        return (1 + back) * message_s

    def _reduce_s(
        self, module: str, tp: int, pp: int, dp: int, ranks: list[list[tuple[int, int]]], size: int
    ) -> float:
        numbers = max(
            sum(gradient_bytes(self.problem, module, cut, tp) for cut in own) for own in ranks
        )
        if not numbers:
            return 0.0
        places = [d * pp * tp for d in range(dp)]
        # A replica's stages on one node share its bandwidth; each ends a backward after the next.
        sharers = min(tp * pp, self.problem.request.cluster.devices_per_node)
        alone_s, together_s = (
            self.problem.costs.all_reduce_s(ranks=places, num_bytes=numbers, sharers=n)
            for n in (tp, sharers)
        )
        cuts = [cut for own in ranks for cut in own]
        backward_s = sum(stage_s(self.problem, module, cut, tp, size)[1] for cut in cuts)
        return max(alone_s, together_s - (sharers // tp - 1) * backward_s / len(cuts))

    def _bytes(
        self,
        module: str,
        cuts: tuple[tuple[int, int], ...],
        own: list[int],
        tp: int,
        dp: int,
        size: int,
        pp: int,
        group: int,
    ) -> tuple[float, float, float, Callable[[int], float]]:
        problem = self.problem
        places = tuple((c % pp, cut) for c, cut in enumerate(cuts))
        placed = {module: PlacedModule(stages=places, tp=tp, dp=dp)}
        messages = [stage_messages(problem, module, cuts[c], placed) for c in own]
        held = {
            c: held_bytes(problem, module, cuts[c], tp, size) + size * m.carried
            for c, m in zip(own, messages, strict=True)
        }
        trains = any(problem.trainable(module, cuts[c]) for c in own)
        hosts = len(cuts) - 1 in own and bool(problem.hosted_losses(module))
        sizes = {(tp, 1), (1, dp if trains else 1), (tp, dp) if hosts else (tp, 1)} - {(1, 1)}
        near: set[object] = {k % pp for c in own for k in (c - 1, c + 1) if 0 <= k < len(cuts)}
        near -= {own[0] % pp}
        if 0 in own:
            near |= {(m, "last") for m in problem.into_first(module)}
        if len(cuts) - 1 in own:
            near |= {(m, "last") for m in problem.into_last(module)}
            for m in problem.task.modules:
                near |= {(m, "first")} if module in problem.into_first(m) else set()
                near |= {(m, "last")} if module in problem.into_last(m) else set()
        # With each neighbour, messages there and back.
        groups = (problem.devices > 1) + len(sizes) + 2 * len(near)
        fixed = sum(fixed_bytes(problem, module, cuts[c], tp, dp) for c in own)
        ahead = sum(h * (len(cuts) - c) for c, h in held.items())
        if len(own) > 1:  # interleaved: what test_schedules sees the ranks hold
            more = (len(own) - 1) * (group + self._slack(module, group))
            ahead = max(held.values()) * (more + 1 + 2 * (pp - 1 - own[0]))
        return (
            fixed + groups * self.cluster.device.communicator_bytes,
            sum(held.values()),
            ahead,
            lambda steps: size * sum(m.bytes_beside(steps) for m in messages),
        )


def groups(count: int, pp: int) -> list[list[int]]:
    """Micro-batches in groups of pp, the first ones longer; one of pp where there are fewer."""
    if count < pp:
        return [list(range(pp))]
    parts = np.array_split(np.arange(count), count // pp)
    return [part.tolist() for part in parts]


# --- random problems -----------------------------------------------------------------


def random_module(rng: np.random.Generator, blocks: int) -> dict[str, Any]:
    tp = {1: 1.0, 2: float(rng.uniform(1.2, 2.0))} if rng.random() < 0.6 else {1: 1.0}
    lists = {
        name: [float(x) for x in rng.integers(1, 4, blocks)]
        for name in ("block_work", "block_parameters", "block_activation_bytes")
        if rng.random() < 0.5
    }
    return module_profile(
        float(rng.integers(1, 9)),
        float(rng.integers(1, 9)),
        fixed_s=float(rng.choice([0.0, 0.5, 3.0])),
        blocks=blocks,
        tp=tp,
        parameters=float(rng.integers(0, 50)),
        activation_bytes=float(rng.integers(0, 200)),
        output_bytes_per_sample=float(rng.integers(0, 5)),
        boundary_bytes_per_sample=float(rng.integers(0, 5)),
        **lists,
    )


def random_problem(rng: np.random.Generator, graph: str) -> Problem:
    names = GRAPHS[graph]
    many = len(names) > 2
    devices = int(rng.integers(max(1, len(names) - 1), 6 if many else 7))
    batch = int(rng.integers(1, 6 if many else 9))
    modules: dict[str, dict[str, Any]] = {}
    for name, inputs in names.items():
        spec: dict[str, Any] = {"inputs": inputs}
        if rng.random() < 0.3:
            spec["frozen"] = True
        elif rng.random() < 0.2:
            spec["frozen"] = [[0, 1]]
        if rng.random() < 0.3:
            spec["recompute"] = "full"
        if rng.random() < 0.25:
            pin = str(rng.choice(["tp", "pp", "dp", "microbatch", "vpp"][: 4 + (name == "llm")]))
            spec["plan"] = {pin: [1, 2] if rng.random() < 0.5 else int(rng.integers(1, 3))}
            spec["backbone"] = pin == "vpp"
        modules[name] = spec
    if rng.random() < 0.3 and not any(spec.get("backbone") for spec in modules.values()):
        modules[str(rng.choice(list(names)))]["backbone"] = True
    last = list(names)[-1]
    job = workload(
        modules,
        batch=batch,
        losses={"loss": {"factory": "mmplan.zoo.losses:clip", "inputs": [last, "y"]}},
        train={
            "zero": int(rng.integers(0, 2)),
            "precision": str(rng.choice(["fp32", "bf16"])),
            "optimizer": str(rng.choice(["AdamW", "SGD"])),
        },
    )
    costs = profile(
        {name: random_module(rng, int(rng.integers(1, 5))) for name in names},
        devices,
        per_node=int(rng.choice([2, 4, 8])),
        memory_bytes=float(rng.choice([300, 600, 1000, 2000, 1e9])),
        inter={"latency_s": 0.25, "bandwidth_bytes_per_s": 16.0},
        intra={"latency_s": 0.0, "bandwidth_bytes_per_s": 64.0},
        losses={"loss": {"points": [{"samples": 1, "forward_s": 0.25, "backward_s": 0.5}]}},
    )
    if rng.random() < 0.3:
        device = costs.cluster.device.model_copy(update={"communicator_bytes": 20.0})
        cluster = costs.cluster.model_copy(update={"device": device})
        costs = costs.model_copy(update={"cluster": cluster})
    # Interleaved plans take part where several are asked for.
    return problem_of(job, costs, devices, top=int(rng.integers(1, 3)))


@pytest.mark.parametrize(
    "count", [10, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("graph", some(GRAPHS, 0, 3, 4))
def test_equals_enumeration(graph: str, count: int) -> None:
    rng = np.random.default_rng(sum(map(ord, graph)) + count)
    solved = 0
    for _ in range(count):
        problem = random_problem(rng, graph)
        values = [c.objective_s for c in candidates(problem)]
        expected = Oracle(problem).best_s()
        assert min(values, default=math.inf) == pytest.approx(expected, rel=1e-9)
        solved += bool(values)
    assert count / 4 < solved < count


def candidates(problem: Problem) -> tuple[Candidate, ...]:
    """What the solver finds, with its certificate checked; nothing where nothing fits."""
    try:
        solution = best_pipelines(problem)
    except InfeasibleError:
        return ()
    assert all(solution.formula_bound_s <= c.objective_s for c in solution.candidates)
    return solution.candidates
