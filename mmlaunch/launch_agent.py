"""torch's elastic agent, with the watch's judgement and with machines in the user's order."""

# torch wraps what is overridden here in a decorator that hides the signatures.
# pyright: reportIncompatibleVariableOverride=false, reportCallIssue=false

from __future__ import annotations

import json
import signal
import uuid
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from mmlaunch.failures import Verdict
from mmlaunch.launch_watch import Watch
from mmlaunch.launch_worker import Job
from mmplan.errors import InvalidInputError, RunFailedError

_EXIT_BARRIER_S = 60.0


class Agent(LocalElasticAgent):
    """Starts, restarts and ends one machine's workers.

    Args:
        spec: torch's description of the workers; its arguments are set for each attempt.
        job: the launch.
        watch: judges, and kills.
        node_rank: this machine's place in the user's order.

    Attributes:
        verdict: why the run failed; None while it has not.
    """

    def __init__(
        self, *, spec: WorkerSpec, job: Job, watch: Watch, node_rank: int, stops_in_order: bool
    ) -> None:
        super().__init__(
            spec=spec,
            logs_specs=DefaultLogsSpecs(log_dir=str(job.control_dir / "logs")),
            start_method="forkserver",
            exit_barrier_timeout=_EXIT_BARRIER_S,
        )
        self._job = job
        self._watch = watch
        self._node_rank = node_rank
        self._stops_in_order = stops_in_order
        self._num_starts = 0
        self.verdict: Verdict | None = None

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number workers machine by machine, as ``node_rank`` says.

        The rendezvous orders machines by name, which says nothing about the plan's ranks.
        """
        mine = {"num_local": spec.local_world_size, "node_rank": self._node_rank}
        store.set(f"mmlaunch/node/{group_rank}", json.dumps(mine))
        nodes = [json.loads(store.get(f"mmlaunch/node/{n}")) for n in range(group_world_size)]
        _check_distinct([node["node_rank"] for node in nodes])
        world_size = sum(node["num_local"] for node in nodes)
        ranks = range(self._job.base_rank, self._job.base_rank + spec.local_world_size)
        return [
            Worker(
                local_rank=local_rank,
                global_rank=rank,
                role_rank=rank,
                world_size=world_size,
                role_world_size=world_size,
            )
            for local_rank, rank in enumerate(ranks)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        job = replace(self._job, **self._agree_on_attempt(worker_group))
        worker_group.spec.args = (job,)
        self._watch.begin(job)
        pids = super()._start_workers(worker_group)
        self._watch.adopt(pids)
        return pids

    def _agree_on_attempt(self, worker_group: WorkerGroup) -> dict[str, Any]:
        """One number and one store prefix per attempt, the same on every machine.

        All attempts share the agent's store; without a prefix of its own the second one
        reads the addresses of the first one's dead workers.
        """
        store: Any = worker_group.store
        key = "mmlaunch/attempt"
        if worker_group.group_rank == 0:
            mine = {"attempt": self._num_starts, "store_prefix": uuid.uuid4().hex}
            store.set(key, json.dumps(mine))
        agreed: dict[str, Any] = json.loads(store.get(key))
        self._num_starts = agreed["attempt"] + 1
        return agreed

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._watch.stop_requested and not self._stops_in_order:
            # Here, not in the signal's handler: all workers are known, so none is left behind.
            self._watch.kill()
            raise KeyboardInterrupt
        verdict = self._watch.poll()
        if verdict is None and not self._watch.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        if verdict is None:
            self._watch.release()
            result = super()._monitor_workers(worker_group)
            if not result.is_failed():
                return result
            verdict = self._watch.poll()
        return self._fail(verdict)

    def _fail(self, verdict: Verdict | None) -> RunResult:
        self._watch.kill()
        wrong_input = verdict is not None and verdict.exit_code != RunFailedError.exit_code
        if self._watch.stop_requested or wrong_input:
            self._remaining_restarts = 0  # it would fail in the same way again
        if verdict is not None and self._remaining_restarts > 0:
            self._watch.announce({"launcher": "restart", "cause": verdict.line})
        else:
            self.verdict = verdict
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._watch.kill()
        super()._shutdown(death_sig, timeout)


def _check_distinct(node_ranks: list[int]) -> None:
    if sorted(node_ranks) != list(range(len(node_ranks))):
        raise InvalidInputError(
            f"the machines say they are nodes {sorted(node_ranks)}",
            hint=f"give each machine its own --node-rank, from 0 to {len(node_ranks) - 1}",
        )
