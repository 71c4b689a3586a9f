"""What every scheduler's job is made of: a plan's nodes, and ``mmlaunch run`` on each of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmplan.errors import InvalidInputError
from mmplan.schema.plan import Plan

# Options of ``mmlaunch run`` that a job's script gives itself.
_PLACE = ("--run-dir", "--resume")
_NODES = ("--nnodes", "--node-rank", "--rdzv-endpoint")
# Others that cannot stand beside these: nothing is resumed, or each node has another value.
_EXCLUDED = ("--emulate", "--hostfile", "--local-addr")

# Its exit code where it has saved because it was asked to stop.
SAVED = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerJob:
    """One launcher on each node of a plan.

    Attributes:
        name: of the plan.
        nodes: how many.
        devices_per_node: how many of a node are used.
        on_cpu: whether devices are processes.
        plan: its file, as the nodes know it.
        run_dir: the run's folder, likewise; the nodes share it.
        sources: files that each node's shell reads before: modules, NCCL's and the fabric's
            settings.
        arguments: more options of ``mmlaunch run``.
    """

    name: str
    nodes: int
    devices_per_node: int
    on_cpu: bool
    plan: Path
    run_dir: Path
    sources: Sequence[Path]
    arguments: Sequence[str]

    def script(self, *, node_rank: str, endpoint: str) -> list[str]:
        """Lines of bash for one node; they end by becoming the launcher, so it gets the signals.

        ``--resume`` is always there: a job may be started again before its first checkpoint.

        Args:
            node_rank: shell word for the node's number.
            endpoint: shell word for HOST:PORT of node 0.
        """
        place = [_PLACE[0], str(self.run_dir), _PLACE[1]]
        lines = [["mmlaunch", "run", str(self.plan)], place, self.arguments]
        command = [shlex.join(line) for line in lines if line]
        if self.nodes > 1:
            values = (str(self.nodes), node_rank, endpoint)
            command.append(" ".join(f"{n} {v}" for n, v in zip(_NODES, values, strict=True)))
        return [
            *(f"source {shlex.quote(str(file))}" for file in self.sources),
            "exec " + " \\\n  ".join(command),
        ]


def job_of(
    plan: Plan,
    path: Path,
    *,
    run_dir: Path,
    sources: Sequence[Path],
    arguments: Sequence[str],
) -> SchedulerJob:
    """The job that trains a plan on the nodes of its cluster.

    Args:
        plan: loaded.
        path: its file.
        run_dir: of the run.
        sources: see :class:`SchedulerJob`.
        arguments: options of ``mmlaunch run``, which the caller has parsed.

    Raises:
        InvalidInputError: an option that the script gives itself, or a file that is not there.
    """
    taken = {*_PLACE, *_NODES, *_EXCLUDED}
    for word in arguments:
        if word.partition("=")[0] in taken:
            raise InvalidInputError(
                f"{word}: the job's script says itself which folder is resumed on which nodes",
                hint="leave it out; --run-dir stands before the --",
            )
    for file in sources:
        if not file.is_file():
            raise InvalidInputError(f"--source {file}: no such file", hint="name a file of shell")
    per_node = plan.cluster.devices_per_node
    return SchedulerJob(
        name=plan.name,
        nodes=-(-plan.devices // per_node),
        devices_per_node=min(plan.devices, per_node),
        on_cpu=plan.cluster.device.is_cpu,
        plan=path,
        run_dir=run_dir,
        sources=sources,
        arguments=arguments,
    )
