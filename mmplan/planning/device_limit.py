"""How many devices the search for a plan looks at."""

from __future__ import annotations

from collections.abc import Iterable

from mmplan.costs.program_costs import CostModel
from mmplan.errors import InvalidInputError
from mmplan.schema.cluster import Cluster
from mmplan.schema.workload import TaskView
from mmplan.wording import counted

# Up to so many devices all are looked at; a plan lists what each of its devices holds.
ALL, MOST = 2_048, 1_000_000
# Groups of tensor parallelism leave places on nodes that they do not fill.
NODES_SLACK = 2


def useful_devices(
    tasks: Iterable[TaskView], costs: CostModel, cluster: Cluster, devices: int
) -> int:
    """The devices beyond which every plan leaves some idle, so that nothing is lost without them.

    A device runs a shard of at least one block with at least one sample: no module can use more
    devices than its blocks, times its task's samples, times its largest tensor-parallel group.

    Args:
        tasks: to plan.
        costs: of their modules.
        cluster: of the devices.
        devices: what was asked for.

    Raises:
        InvalidInputError: more than a plan's file could list.
    """
    if devices > MOST:
        raise InvalidInputError(
            f"--devices {devices}: a plan is for at most {counted(MOST, 'device')}",
            hint="ask for fewer devices, or name a smaller --cluster",
        )
    most = sum(
        costs.num_blocks(task=task.name, module=module)
        * task.batch
        * max(costs.tp_options(task=task.name, module=module), default=1)
        for task in tasks
        for module in task.modules
    )
    node = cluster.devices_per_node
    if cluster.nodes > 1:
        most = -(-NODES_SLACK * most // node) * node
    return min(devices, max(most, ALL))
