"""One machine's workers, from start to end, attempt after attempt."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess

from mmlaunch.launch.failures import Blame
from mmlaunch.launch.rendezvous import Rendezvous, Trouble
from mmlaunch.launch.watch import Watch
from mmlaunch.launch.worker_main import Job, worker_main
from mmlaunch.process import fork_server
from mmplan.errors import RunFailedError

# Between two looks at the workers: events are to arrive within 0.2 s.
_POLL_S = 0.05
# Between two looks at the other machines, which go over the network; chosen by hand.
_PEERS_POLL_S = 0.5


class Agent:
    """Starts, restarts and ends one machine's workers.

    Args:
        job: the launch; its attempt, store and prefix are set for each attempt.
        watch: judges, and kills.
        rendezvous: with the other machines of the run.
        max_restarts: how often all workers are started anew.
        stops_in_order: whether workers heed a request to stop; otherwise it ends them.
    """

    def __init__(
        self,
        *,
        job: Job,
        watch: Watch,
        rendezvous: Rendezvous,
        max_restarts: int,
        stops_in_order: bool,
    ) -> None:
        self._job, self._watch, self._rendezvous = job, watch, rendezvous
        self._max_restarts = max_restarts
        self._stops_in_order = stops_in_order

    def run(self) -> None:
        """Run attempts until one succeeds on all machines.

        Raises:
            MMPlanError: the last one failed; the verdict on a worker of this machine, or what
                another machine has announced.
            KeyboardInterrupt: a stop was asked for that nobody would have heeded.
        """
        attempt = 0
        while not self._succeeds(attempt):
            attempt += 1

    def _succeeds(self, attempt: int) -> bool:
        prefix = self._rendezvous.join(attempt, self._job.num_local)
        job = replace(
            self._job, attempt=attempt, store=self._rendezvous.address, store_prefix=prefix
        )
        self._watch.begin(job)
        self._watch.adopt(_start(job))
        verdict, remote = self._wait(attempt)
        if verdict is None and remote is None:
            self._watch.release()
            remote = self._rendezvous.leave(attempt)
            if remote is None:
                self._watch.join()
                return True
        self._watch.kill()
        said = remote or self._rendezvous.announce(attempt, self._trouble(attempt, verdict))
        if not said.restart:
            # A lost peer explains nothing where its own machine has spoken.
            if verdict is not None and (said.node == self._job.node_rank or not verdict.lost_peer):
                raise verdict.error()
            raise RunFailedError(
                f"machine {said.node}: {said.line}", hint="look at the launcher there"
            )
        self._watch.announce({"launcher": "restart", "cause": said.line})
        return False

    def _wait(self, attempt: int) -> tuple[Blame | None, Trouble | None]:
        """Until all workers of this machine have finished, or there is trouble somewhere."""
        asked_s = time.monotonic()
        while True:
            time.sleep(_POLL_S)
            if self._watch.stop_requested and not self._stops_in_order:
                # Here, not in the signal's handler: all workers are known, so none is left behind.
                self._watch.kill()
                raise KeyboardInterrupt
            verdict = self._watch.poll()
            if verdict is not None or self._watch.all_done():
                return verdict, None
            if time.monotonic() - asked_s > _PEERS_POLL_S:
                asked_s = time.monotonic()
                remote = self._rendezvous.trouble(attempt)
                if remote is not None:
                    return None, remote

    def _trouble(self, attempt: int, verdict: Blame | None) -> Trouble:
        wrong_input = verdict is not None and verdict.exit_code != RunFailedError.exit_code
        # Wrong input would fail in the same way again.
        again = not wrong_input and not self._watch.stop_requested and attempt < self._max_restarts
        line = verdict.line if verdict else "its workers have ended"
        return Trouble(node=self._job.node_rank, line=line, restart=again)


def _start(job: Job) -> list[BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    fork_server.start(preload=["mmlaunch.launch.launch"])
    processes = [
        context.Process(target=worker_main, args=(job, rank)) for rank in range(job.num_local)
    ]
    for process in processes:
        process.start()
    return list(processes)
