"""The contract between a run and the launcher of its workers.

:func:`mmlaunch.launch.launch.launch` starts them as processes of this machine. A launcher for a
batch system (Slurm, a Kubernetes JobSet) is another function like it, in a file beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

# Called in every worker with its context, then with the arguments of the launch.
WorkerEntry = Callable[..., Any]
OnEvent = Callable[[dict[str, Any]], None]


class Launcher(Protocol):
    """Starts the workers of a plan, watches them, and ends them all together.

    No worker outlives the call. A failure is an :class:`mmplan.errors.MMPlanError`, whose
    ``exit_code`` is that of the command.
    """

    def __call__(
        self,
        *,
        entry: WorkerEntry | str,
        args: tuple[Any, ...] = (),
        num_ranks: int,
        run_dir: Path,
        timeout_s: float,
        max_restarts: int = 0,
        nnodes: int = 1,
        node_rank: int = 0,
        ranks_per_node: int | None = None,
        rdzv_endpoint: str | None = None,
        on_event: OnEvent | None = None,
        stops_in_order: bool = True,
    ) -> list[Any]:
        """Run ``entry(ctx, *args)`` in one process per rank, and wait for all.

        The first SIGINT, SIGTERM or SIGHUP makes ``ctx.should_stop()`` true; the second ends
        everything at once. In the main thread only: elsewhere signals are the caller's.

        Args:
            entry: function that a fresh process can import, or "package.module:function".
            args: its arguments after the context, picklable.
            num_ranks: ranks in the whole run.
            run_dir: made if absent; one launch at a time may use it on a machine.
            timeout_s: seconds without any progress after which the run ends.
            max_restarts: how often all workers are started anew after a failure.
            nnodes: machines; each makes this call with the same arguments but ``node_rank``.
            node_rank: number of this machine; rank r runs on machine r div ``ranks_per_node``.
            ranks_per_node: default ``num_ranks`` / ``nnodes``, rounded up.
            rdzv_endpoint: HOST:PORT of machine 0, with several machines.
            on_event: gets the events of ``ctx.report``, within 0.2 s, and the launcher's own:
                ``{"launcher": "stop-requested"}`` and ``{"launcher": "restart", "cause": line}``.
            stops_in_order: whether the entry asks ``ctx.should_stop()``; where it does not, the
                first signal ends everything.

        Returns:
            Results of the entries of this machine, in rank order.

        Raises:
            WorkerFailedError: a worker died or hung; names it, ``detail`` is its traceback.
            InvalidInputError: the arguments contradict each other, or the folder is in use.
            KeyboardInterrupt: a second signal came, or one that nobody would have heeded.
        """
        ...
