"""``mmlaunch run --elastic``: one run on changing numbers of devices, under a plan for each.

A device is lost for good where the restarts are used up over it; another number is asked for by
``mmlaunch resize``. The plans come from ``mmplan solve`` in a process of its own: that for one
device less before it is needed, others while training goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmlaunch.launch.failures import WorkerFailedError
from mmlaunch.launch.watch import OnEvent
from mmlaunch.process.process_tree import ProcessId
from mmlaunch.run.options import RunOptions
from mmlaunch.run.run import Prepared, RunSummary, add_to_record, prepare, run_folder
from mmlaunch.run.segments import PLANS
from mmplan.errors import InvalidInputError, MMPlanError, StoppedError
from mmplan.schema.base import save_document, write_text
from mmplan.wording import counted

DEVICES = "devices.json"
# Between two looks for another number; chosen by hand.
_LOOK_S = 0.3
# mmplan, which ends with the launcher, and before which training comes.
_SOLVE = """
import os, cli
from mmlaunch.process.process_tree import die_with_parent
die_with_parent()
os.nice(15)
cli.mmplan_main()
"""

# A launch of the run under one plan.
Train = Callable[[RunOptions, Prepared, OnEvent], RunSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """``devices.json`` of an elastic run's folder.

    Attributes:
        devices: that the run is to have.
        launcher: the process that heeds it.
    """

    devices: int
    launcher: ProcessId

    @classmethod
    def read(cls, run_dir: Path) -> Wanted | None:
        """What is wanted now; None where no file says so."""
        try:
            return TypeAdapter(cls).validate_json((run_dir / DEVICES).read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, run_dir: Path) -> None:
        """Say it."""
        write_text(run_dir / DEVICES, json.dumps(asdict(self)) + "\n")


def resize(run_dir: Path, devices: int) -> int:
    """Ask an elastic run for another number of devices; the number that it has.

    Raises:
        InvalidInputError: no elastic run is under way there on this machine.
    """
    found = Wanted.read(run_dir)
    if found is None or not found.launcher.alive():
        raise InvalidInputError(
            f"{run_dir}: no run with --elastic is under way there",
            hint="start one on this machine: mmlaunch run PLAN --elastic --run-dir DIR",
        )
    replace(found, devices=devices).write(run_dir)
    return found.devices


class ElasticRun:
    """A run that goes on with the devices that there are.

    Args:
        options: of the first launch.
        prepared: its plan and workload.
        tell: gets lines for the user.
    """

    def __init__(
        self, options: RunOptions, prepared: Prepared, tell: Callable[[str], None]
    ) -> None:
        self._folder = run_folder(options, prepared.plan)
        self._options = replace(options, run_dir=self._folder)
        self._prepared, self._tell = prepared, tell
        self._plans = _Plans(options, prepared, self._folder.absolute() / PLANS)
        self._looked_s = self._stepped_s = time.monotonic()
        self._steps = self._steps_before = 0
        self._next: int | None = None
        self._user_stops = False
        self._change: dict[str, Any] | None = None

    @property
    def _devices(self) -> int:
        return self._prepared.plan.devices

    def run(self, train: Train) -> RunSummary:
        """Train to the end, or until the user stops it.

        Raises:
            StoppedError: no plan for the devices that are left; the checkpoints stay.
            MMPlanError: a failure that is not a device's.
        """
        try:
            while True:
                self._next = None
                self._want(self._devices)
                if self._devices > 1:
                    self._plans.begin(self._devices - 1)
                try:
                    summary = train(self._options, self._prepared, self._on_event)
                    why = "asked for"
                except WorkerFailedError as error:
                    # Where the run has not come further since the last change, it is no device.
                    stuck = self._steps == self._steps_before
                    if self._user_stops or self._devices == 1 or stuck:
                        raise
                    self._next, why = self._devices - 1, error.message
                    _hide(error.rank, self._prepared)
                except KeyboardInterrupt:
                    if self._next is None:
                        raise
                    why = "asked for"
                else:
                    if self._next is None or not summary.stopped:
                        return summary
                self._go_to(self._next, why)
        finally:
            self._plans.close()
            (self._folder / DEVICES).unlink(missing_ok=True)

    def _go_to(self, devices: int, why: str) -> None:
        ended_s = time.monotonic()
        path = self._plans.get(devices)
        if isinstance(path, str):
            raise StoppedError(
                f"no plan for {counted(devices, 'device')}: {path}",
                hint=f"go on with: mmlaunch run PLAN --resume --run-dir {self._folder}",
            )
        planned_s = time.monotonic()
        self._change = {
            "from": self._devices,
            "to": devices,
            "why": why,
            "stopped_s": ended_s - self._stepped_s,
            "planned_s": planned_s - ended_s,
            "began_s": planned_s,
        }
        self._steps_before = self._steps
        self._options = self._under(path)
        self._prepared = prepare(self._options)

    def _under(self, plan: Path) -> RunOptions:
        return replace(self._options, plan=plan, resume=True, skip_damaged=True)

    def _on_event(self, event: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if event.get("launcher") == "stop-requested":
            self._user_stops = self._next is None
        if event.get("kind") == "segment" and self._change is not None:
            self._change["started_s"] = now_s - self._change.pop("began_s")
            self._stepped_s = now_s
        if event.get("kind") != "step":
            return
        if self._change is not None:
            self._say_change(first_step_s=now_s - self._stepped_s)
        self._stepped_s, self._steps = now_s, max(self._steps, event["step"] + 1)
        if now_s > self._looked_s + _LOOK_S:
            self._looked_s = now_s
            self._look()

    def _say_change(self, *, first_step_s: float) -> None:
        change, self._change = {**(self._change or {}), "first_step_s": first_step_s}, None
        took = {name: round(took_s, 3) for name, took_s in change.items() if name.endswith("_s")}
        phases = {"stopped_s": "stopped", "planned_s": "plan", "started_s": "start"}
        said = [f"{word} {took[name]:.1f} s" for name, word in phases.items()]
        now = f"{counted(int(change['to']), 'device')} in place of {change['from']}"
        self._tell(f"{now} ({change['why']}): {', '.join(said)}, first step {first_step_s:.1f} s")
        add_to_record(self._folder, "resizes", {**change, **took})

    def _look(self) -> None:
        """Plan for the number that is wanted, then stop for it; where there is no plan, go on."""
        found = Wanted.read(self._folder)
        if found is None or found.devices == self._devices or self._next is not None:
            return
        self._plans.begin(found.devices)
        path = self._plans.look(found.devices)
        if isinstance(path, Path):
            try:
                prepare(self._under(path))
            except MMPlanError as error:
                path = error.message
        if isinstance(path, str):
            self._tell(f"no plan for {counted(found.devices, 'device')}: {path}")
            self._plans.forget(found.devices)
            self._want(self._devices)
        elif path is not None:
            self._next = found.devices
            # As from a batch system: ranks stop after their step, and save.
            signal.raise_signal(signal.SIGTERM)

    def _want(self, devices: int) -> None:
        Wanted(devices=devices, launcher=ProcessId.of(os.getpid())).write(self._folder)


class _Plans:
    """Plans of a run by number of devices, each from a process of its own."""

    def __init__(self, options: RunOptions, prepared: Prepared, folder: Path) -> None:
        self._prepared, self._folder = prepared, folder
        self._profile = options.plan.absolute().parent / prepared.plan.profile.path
        known, planned = prepared.profile, prepared.plan.cluster
        # The profile's own may be larger than the part that a plan is for.
        self._cluster = None if known is None or known.cluster.name == planned.name else planned
        self._made = {prepared.plan.devices: options.plan.absolute()}
        self._solving: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self, devices: int) -> None:
        """Start to plan for so many devices, where that is neither done nor under way."""
        if devices in self._made or devices in self._solving:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        plan = self._prepared.plan
        command: list[str | Path] = ["solve", self._prepared.workload_path.absolute()]
        command += ["--profile", self._profile, "--devices", str(devices)]
        command += ["-o", self._path(devices)]
        if self._cluster is not None:
            save_document(self._cluster, self._folder / "cluster.json")
            command += ["--cluster", self._folder / "cluster.json"]
        if self._prepared.workload.tasks:
            command += ["--tasks", ",".join(plan.tasks)]
        if (asked := plan.solver.asked) is not None:
            command += ["--solver", asked.solver, "--top", str(asked.top)]
            command += ["--budget", str(asked.budget_s)]
            command += ["--method", asked.method] if asked.method else []
        with self._said(devices).open("wb") as said:
            self._solving[devices] = subprocess.Popen(
                [sys.executable, "-P", "-c", _SOLVE, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def look(self, devices: int) -> Path | str | None:
        """The plan's file, or why there is none; None as long as it is made."""
        if devices in self._made:
            return self._made[devices]
        code = self._solving[devices].poll()
        if code is None:
            return None
        if code == 0:
            self._made[devices] = self._path(devices)
            return self._made[devices]
        lines = self._said(devices).read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"mmplan solve ended with code {code}"])[-1]

    def get(self, devices: int) -> Path | str:
        """As :meth:`look`, once it is made."""
        self.begin(devices)
        while (found := self.look(devices)) is None:
            self._solving[devices].wait()
        return found

    def forget(self, devices: int) -> None:
        """A plan that could not be made, or used, may be asked for again."""
        self._solving.pop(devices, None)
        self._made.pop(devices, None)

    def close(self) -> None:
        """End what is under way."""
        for devices, process in self._solving.items():
            process.kill()
            process.wait()
            self._said(devices).unlink(missing_ok=True)

    def _said(self, devices: int) -> Path:
        return self._folder / f"devices-{devices}.log"

    def _path(self, devices: int) -> Path:
        return self._folder / f"devices-{devices}.json"


def _hide(rank: int, prepared: Prepared) -> None:
    """Leave a GPU out of what workers see from now on; cores of a CPU are all the same."""
    if prepared.plan.cluster.device.is_cpu or os.environ.get("MMLAUNCH_DEVICE") == "cpu":
        return
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(i) for i in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(n for i, n in enumerate(names) if i != rank)
