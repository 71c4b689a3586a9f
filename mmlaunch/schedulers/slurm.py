"""A plan's run as a batch script for Slurm."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from mmlaunch.launch.hosts import SECRET
from mmlaunch.schedulers.job import SAVED, SchedulerJob
from mmplan.errors import InvalidInputError

# Below the ports that Linux gives to programs which ask for any.
_FIRST_PORT = 15000
_NUM_PORTS = 15000
# For the other launchers to say why they end; Slurm's own rule, --kill-on-bad-exit, kills them
# before, and hides that they have saved. Chosen by hand.
_OTHERS_END_S = 120
# Seconds by the number of parts in a time of Slurm's without days; with days they are the last.
_UNITS_S = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}
# Slurm's signal may come so much earlier than it was asked to.
_EARLY_S = 60

_BODY = """\
set -uo pipefail

# One store for the run: on the first node, at a port of this job, with a secret of this start.
endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export endpoint="$endpoint:$(({first_port} + SLURM_JOB_ID % {num_ports}))"
{secret}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {secret}

# shellcheck disable=SC1090,SC1091,SC2317,SC2329
node() {{
{node}
}}

# srun answers SIGTERM with SIGKILL for its tasks. So it gets a process group of its own, and a
# SIGTERM for this script goes to the tasks, which save and end with {saved}.
set -m
trap 'asked=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --kill-on-bad-exit=0 --wait={others_end_s} --cpu-bind=none{image} \\
  bash -c "$(declare -f node); node" &
asked=1
while [ "$asked" ]; do
  asked=
  wait "$!"
  code=$?
done

# A job that was cancelled runs no more by now, and stays cancelled.
if [ "$code" -eq {saved} ] &&
  [ -n "$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING)" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def sbatch_script(
    job: SchedulerJob,
    *,
    folder: Path,
    grace_s: int,
    partition: str | None = None,
    account: str | None = None,
    time: str | None = None,
    image: str | None = None,
    more: Sequence[str] = (),
) -> str:
    """The text of a script for ``sbatch``.

    Args:
        job: with absolute paths, which all nodes know.
        folder: in which the job starts, absolute.
        grace_s: seconds before the time limit at which the job is asked to save.
        partition: of the cluster; None for its default.
        account: that pays.
        time: limit, as Slurm writes it.
        image: of a container, for Slurm's plugin Pyxis.
        more: other options of sbatch, each "--NAME=VALUE" or "--NAME".

    Raises:
        InvalidInputError: a line break in an option, or a limit that leaves no time to train.

    Source:
        https://slurm.schedmd.com/sbatch.html; srun's way with SIGTERM: src/srun/srun_job.c.
    """
    if time is not None and _seconds(time) <= grace_s + _EARLY_S:
        raise InvalidInputError(
            f"--time {time}: the job would be asked to save at once, {grace_s} s before its end",
            hint=f"allow more time, or less to save: --grace, plus {_EARLY_S} s of Slurm's own",
        )
    output = str(job.run_dir).replace("%", "%%") + "/slurm-%j.out"
    devices = (
        [f"--cpus-per-task={job.devices_per_node}"]
        if job.on_cpu
        # All cores and all memory too.
        else [f"--gpus-per-node={job.devices_per_node}", "--exclusive", "--mem=0"]
    )
    named = {"partition": partition, "account": account, "time": time}
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *devices,
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        # To the tasks on every node, not to this script.
        f"--signal=TERM@{grace_s}",
        "--requeue",
        f"--chdir={folder}",
        f"--output={output}",
        "--open-mode=append",
        *more,
    ]
    for option in options:
        if not option.startswith("--") or not option.isprintable():
            raise InvalidInputError(
                f"{option!r:.100} is no option of sbatch", hint="write --NAME=VALUE on one line"
            )
    node = job.script(node_rank='"$SLURM_NODEID"', endpoint='"$endpoint"')
    body = _BODY.format(
        first_port=_FIRST_PORT,
        num_ports=_NUM_PORTS,
        secret=SECRET,
        saved=SAVED,
        others_end_s=_OTHERS_END_S,
        image="" if image is None else _container(image, job, folder),
        node="\n".join(f"  {line}" for text in node for line in text.splitlines()),
    )
    head = ["#!/usr/bin/env bash", *(f"#SBATCH {_quoted(option)}" for option in options)]
    return "\n".join([*head, body])


def _seconds(time: str) -> float:
    """What Slurm understands by a limit; endless where it has no digits (UNLIMITED)."""
    if time.isalpha():
        return math.inf
    days, dash, clock = time.rpartition("-")
    parts = clock.split(":")
    units = _UNITS_S[3] if dash else _UNITS_S.get(len(parts), ())
    if not all(part.isdecimal() for part in [days or "0", *parts]) or len(parts) > len(units):
        raise InvalidInputError(
            f"--time {time}: no time of Slurm's", hint="as in 90 (minutes), 1:30:00 or 2-12:00:00"
        )
    return 86400 * int(days or 0) + sum(int(p) * u for p, u in zip(parts, units, strict=False))


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return name + equals + (shlex.quote(value) if value else "")


def _container(image: str, job: SchedulerJob, folder: Path) -> str:
    """Options of srun: the image sees the folders of the job where they are outside."""
    wanted = {folder, job.run_dir, job.plan.parent, *(file.parent for file in job.sources)}
    seen = [path for path in sorted(wanted) if not wanted & set(path.parents)]
    mounts = ",".join(f"{path}:{path}" for path in seen)
    options = [
        f"--container-image={shlex.quote(image)}",
        f"--container-mounts={shlex.quote(mounts)}",
        f"--container-workdir={shlex.quote(str(folder))}",
    ]
    return "".join(f" \\\n  {option}" for option in options)
