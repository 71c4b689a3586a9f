"""A workload with another batch."""

from __future__ import annotations

from mmplan.errors import InvalidInputError
from mmplan.schema.base import parse_document
from mmplan.schema.workload import Workload


def with_batch(workload: Workload, batch: int, *, scale_sync: bool = False) -> Workload:
    """The workload with another batch; batches of tasks change in the same ratio.

    Args:
        workload: to change.
        batch: samples per step.
        scale_sync: also change sync batches that would not divide their batch, in that ratio.

    Raises:
        InvalidInputError: a task's batch would be no whole number, or a sync batch does not
            divide its batch.
    """
    document = workload.model_dump(mode="json", exclude_unset=True)
    now, source = workload.batch, f"batch {batch}"
    owners = [(None, document), *document.get("tasks", {}).items()]
    with_own = [(name, owner) for name, owner in owners if owner.get("batch")]
    for name, owner in with_own:
        owner["batch"] = _scaled(owner["batch"], batch, now, source, f"task {name}'s batch")
    for name, loss in document["losses"].items():
        sync_batch = loss.get("sync_batch")
        if scale_sync and sync_batch and any(o["batch"] % sync_batch for _, o in with_own):
            what = f"loss {name}'s sync batch"
            loss["sync_batch"] = _scaled(sync_batch, batch, now, source, what)
    return parse_document(Workload, document, source=source)


def _scaled(value: int, batch: int, now: int, source: str, what: str) -> int:
    scaled, rest = divmod(value * batch, now)
    if rest or scaled < 1:
        raise InvalidInputError(
            f"{source}: {what} of {value} times {batch}/{now} is no whole number",
            hint="choose a batch that divides evenly",
        )
    return scaled
