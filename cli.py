"""The commands ``mmplan`` and ``mmlaunch``: arguments in, library calls, output out.

Commands of ``mmplan`` stand in ``mmplan/commands``. Those of ``mmlaunch`` stand here, where alone
both packages are known: they plan and report with the one and run with the other. Nothing heavy is
imported before a command needs it: ``--help`` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

# While modules load there is nothing to end in order, and no one yet who catches an exception:
# Ctrl-C ends the program there and then. Before all that takes time to load, only where this is
# the program, and where the signal has its usual action (a shell's background jobs ignore it).
if _loading := (
    os.path.basename(sys.argv[0]) in ("mmplan", "mmlaunch")
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmplan.commands import beginning, looking, measuring, planning
from mmplan.commands.options import (
    JsonOption,
    PlanPath,
    Runtime,
    StartTimeoutOption,
    TasksOption,
    TimeoutOption,
    WorkloadOption,
    check_output,
    count_or_auto,
    names,
)
from mmplan.errors import (
    InvalidInputError,
    MMPlanError,
    RunFailedError,
    StoppedError,
    UnfitEnvironmentError,
    require_linux,
)
from mmplan.reporting.terminal.console import Output
from mmplan.wording import counted, size

if TYPE_CHECKING:
    from mmlaunch.launch.hosts import Host
    from mmlaunch.run.options import RunOptions
    from mmlaunch.run.run import Prepared
    from mmlaunch.schedulers.job import SchedulerJob
    from mmlaunch.session.verify import Difference
    from mmplan.program.model import Timings
    from mmplan.schema.plan import Plan

_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}
mmplan_app = typer.Typer(
    help="Plan each module of a multimodal model on its own devices.", **_SETTINGS
)
mmlaunch_app = typer.Typer(help="Train exactly what a plan says.", **_SETTINGS)

for _command in (
    beginning.init,
    measuring.profile,
    planning.solve,
    looking.show,
    looking.check,
    looking.simulate,
    looking.diff,
    planning.compare,
    planning.explain,
    looking.report,
    measuring.doctor,
):
    mmplan_app.command()(_command)


def _version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        Output().text(f"{Path(sys.argv[0]).stem} {version('mmplan')}")
        raise typer.Exit


@mmplan_app.callback()
@mmlaunch_app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="say it and end")
    ] = False,
) -> None:
    """Options before a command."""


def mmplan_main() -> None:
    """Entry point of ``mmplan``."""
    _main(mmplan_app, obj=Runtime(step_seconds=_step_seconds, hold=_hold))


def mmlaunch_main() -> None:
    """Entry point of ``mmlaunch``."""
    _main(mmlaunch_app)


def _main(app: typer.Typer, **given: Any) -> None:
    """Run a command; every failure meant for the user becomes one line and an exit code.

    Args:
        app: whose.
        given: to the command's context.
    """
    out = Output(as_json="--json" in sys.argv)
    # At the end nothing is searched for cycles: of torch's modules that takes most of a second.
    atexit.register(gc.freeze)
    try:
        # Not standalone: typer would word and end wrong command lines in its own way.
        code = app(standalone_mode=False, **given)
    except MMPlanError as error:
        out.error(error)
        sys.exit(error.exit_code)
    except _COMMAND_LINE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            out.error(_command_line_fault(error))
        sys.exit(2)
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        out.text("interrupted")
    sys.exit(code or 0)


# typer carries its own copy of click: the class is found through what typer exports.
_COMMAND_LINE_ERROR: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def _command_line_fault(error: Any) -> InvalidInputError:
    """Typer's own complaint (a missing argument, an unknown option) in our words and form."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else Path(sys.argv[0]).name
    return InvalidInputError(
        f"{message[:1].lower()}{message[1:]}", hint=f"{command} --help lists what there is"
    )


def _step_seconds(plan: Plan, beside: Path, workload: Path) -> float:
    """Seconds of real steps on this machine, for ``solve --measure``."""
    from mmlaunch.run.trial import step_seconds

    return step_seconds(plan, beside, workload=workload)


def _hold(workload: Path, original: str) -> beginning.HeldCut:
    """A cut module against the uncut model, for ``init``."""
    from mmlaunch.session.original import compare_original
    from mmplan import api
    from mmplan.program.compile import compile_plan
    from mmplan.schema.workload import load_workload

    stated = load_workload(workload)
    profile = api.profile(workload, cluster="cpu", analytic=True)
    planned = api.solve(workload, profile, devices=1, path=workload.with_name("plan.json"))
    found = compare_original(stated, workload.parent, compile_plan(planned.plan), original)
    lines = [f"differs: {item.what} {item.name}: {item.error_words}" for item in found.differences]
    return beginning.HeldCut(compared=found.compared, share=found.share, differences=tuple(lines))


_SSH = "ssh -o BatchMode=yes"
NodesOption = Annotated[int, typer.Option("--nnodes", metavar="N", min=1, help="machines")]
HostfileOption = Annotated[
    Path | None,
    typer.Option(
        "--hostfile", metavar="FILE", help="start on these hosts over ssh: HOST slots=N a line"
    ),
]
SshOption = Annotated[str, typer.Option("--ssh", metavar="COMMAND", help="with --hostfile")]
HostNamesOption = Annotated[
    str | None,
    typer.Option("--host-names", metavar="A,B,...", help="of all machines, for messages"),
]
NodeRankOption = Annotated[
    int, typer.Option("--node-rank", metavar="R", min=0, help="which machine this is")
]
EndpointOption = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="of machine 0")
]
LocalAddrOption = Annotated[
    str | None,
    typer.Option(
        "--local-addr",
        metavar="ADDRESS",
        help="by which the other machines reach this one; default: its interface to machine 0",
    ),
]
JoinTimeoutOption = Annotated[
    float,
    typer.Option(
        "--join-timeout", metavar="S", min=1, help="seconds for all machines to come together"
    ),
]
SecretFileOption = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="FILE",
        help="secret of several machines, - from stdin; default: MMLAUNCH_SECRET, else made",
    ),
]


@mmlaunch_app.command()
def run(
    plan: PlanPath,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=0, help="default: train.steps")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="default: runs/NAME")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint of the run folder")
    ] = False,
    resume_anyway: Annotated[
        bool,
        typer.Option("--resume-anyway", help="also with another batch, seed or learning rate"),
    ] = False,
    save_every: Annotated[
        int,
        typer.Option(
            "--save-every", metavar="N", min=0, help="steps between checkpoints; two stay"
        ),
    ] = 0,
    async_save: Annotated[
        bool,
        typer.Option("--async-save", help="write them while training goes on"),
    ] = False,
    keep_every: Annotated[
        float | None,
        typer.Option(
            "--keep-every",
            metavar="HOURS",
            min=0,
            help="keep one checkpoint of each so many hours beside the two newest",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", metavar="N", min=0, help="within an hour, after failures"),
    ] = 0,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="go on without a device that is lost for good; see mmlaunch resize",
        ),
    ] = False,
    workload: WorkloadOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="another value of a field that is no part of the plan",
        ),
    ] = None,
    tasks: TasksOption = None,
    nnodes: NodesOption = 1,
    hostfile: HostfileOption = None,
    ssh: SshOption = _SSH,
    host_names: HostNamesOption = None,
    node_rank: NodeRankOption = 0,
    rdzv_endpoint: EndpointOption = None,
    local_addr: LocalAddrOption = None,
    join_timeout: JoinTimeoutOption = 900.0,
    secret_file: SecretFileOption = None,
    num_workers: Annotated[
        str,
        typer.Option(
            "--num-workers",
            metavar="N",
            help="data processes of each rank and task; auto: as many as their samples cost",
        ),
    ] = "auto",
    data_address: Annotated[
        str | None,
        typer.Option(
            "--data-address", metavar="HOST:PORT", help="of mmlaunch data --head, which loads data"
        ),
    ] = None,
    data_wait: Annotated[
        float | None,
        typer.Option(
            "--data-wait",
            metavar="S",
            min=0,
            help="seconds without a producer until it stops; 4/5 of --timeout if not given",
        ),
    ] = None,
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate", help="train nothing: computes are waits of the profile's times, on the CPU"
        ),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="A:B",
            help="torch.profiler's trace of steps A to before B, counted from 0",
        ),
    ] = None,
    timeout: TimeoutOption = 300.0,
    start_timeout: StartTimeoutOption = 900.0,
    as_json: JsonOption = False,
) -> None:
    """Train in one process per rank, following the plan's program."""
    require_linux("mmlaunch run")
    from mmlaunch.launch.hosts import Meeting, given_secret
    from mmlaunch.process import fork_server

    secret = given_secret(secret_file)
    if hostfile is not None and not elastic:
        from mmlaunch.launch.hosts import hosts_of_plan, read_hostfile
        from mmplan.schema.load import load_plan

        hosts = hosts_of_plan(read_hostfile(hostfile), load_plan(plan))
        raise typer.Exit(_on_hosts(hosts, ssh, rdzv_endpoint, secret, as_json))
    # What workers need is imported beside what this process does until they start.
    fork_server.start(fork_server.RANK_MODULES)
    from mmlaunch.run.options import RunOptions
    from mmlaunch.run.run import RunSummary, prepare, try_out
    from mmlaunch.run.run import run as start
    from mmlaunch.run.segments import sets_of_run
    from mmplan.reporting.terminal.run_progress import follow, write_run_trace
    from mmplan.schema.settings import parse_settings

    out = Output(as_json=as_json)
    if emulate and (resume or resume_anyway or save_every or tasks):
        raise InvalidInputError(
            "--emulate trains nothing that could be saved or resumed, and runs the plan as it is",
            hint="leave --save-every, --resume and --tasks out",
        )
    if elastic and (emulate or nnodes > 1 or hostfile is not None):
        raise InvalidInputError(
            "--elastic: only for training on one machine so far",
            hint="with several, stop and go on under another plan: --resume",
        )
    chosen, emulation = names("--tasks", tasks), None
    if emulate:
        # Times are those of one plan: the tasks are its own, whatever comes later in the run.
        chosen, emulation = _emulation(out, plan)
    options = RunOptions(
        plan=plan,
        steps=steps,
        run_dir=run_dir,
        resume=resume or resume_anyway,
        resume_anyway=resume_anyway,
        save_every=save_every,
        async_save=async_save,
        keep_every_s=None if keep_every is None else 3600 * keep_every,
        max_restarts=max_restarts,
        workload=workload,
        settings=parse_settings(settings or ()),
        tasks=chosen,
        meeting=Meeting(
            num_nodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
            local_addr=local_addr,
            secret=secret,
            join_s=join_timeout,
            names=tuple(host_names.split(",")) if host_names else (),
        ),
        timeout_s=timeout,
        start_timeout_s=start_timeout,
        num_workers=count_or_auto("--num-workers", num_workers),
        data_address=data_address,
        data_wait_s=0.8 * timeout if data_wait is None else data_wait,
        emulation=emulation,
        profile=None if profile is None else _step_range(profile),
    )
    prepared = prepare(options)
    options = replace(options, predicted=emulation or _predicted(prepared))
    for note in prepared.notes:
        out.hint(note)
    out.text(f"importing {', '.join(prepared.imports)}")
    if not emulate:
        sets = sets_of_run(prepared.plan, prepared.workload, chosen)
        for note in try_out(prepared, {name for item in sets for name in item.tasks}):
            out.hint(note)
    total = prepared.workload.train.steps if steps is None else steps
    with out.progress("emulating" if emulate else "training") as bar:

        def train(
            options: RunOptions, prepared: Prepared, also: Callable[[Any], None] = lambda _: None
        ) -> RunSummary:
            show = follow(out, bar, prepared.plan, total, emulated=emulate)

            def on_event(event: dict[str, Any]) -> None:
                show(event)
                also(event)

            return start(options, prepared, on_event, _planner(out, options, prepared))

        if elastic:
            from mmlaunch.run.elastic import ElasticRun

            summary = ElasticRun(options, prepared, out.text).run(train)
        else:
            summary = train(options, prepared)
    segment = summary.segment
    if node_rank == 0:
        trace = summary.run_dir / "trace.json"
        write_run_trace(out, segment.plan, segment.path, summary.spans, trace)
    out.data({"run_dir": str(summary.run_dir), "steps": summary.steps, "stopped": summary.stopped})
    if summary.stopped:
        why = f"without a producer at {data_address}" if summary.starved else "on request"
        raise StoppedError(
            f"stopped {why} after step {summary.steps}, saved in {summary.run_dir}",
            hint=f"go on with: mmlaunch run {plan} --resume --run-dir {summary.run_dir}",
        )
    done = "emulated, nothing was trained" if emulate else "done"
    if summary.ended_early is not None:
        done = "done, which is early"
    out.text(f"{counted(summary.steps, 'step')} {done}; see {summary.run_dir}")
    out.hint(f"mmplan report {summary.run_dir} -o report.html")


def _step_range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise InvalidInputError(
            f"--profile {text}: is no range of steps", hint="--profile 2:4 profiles steps 2 and 3"
        )
    return int(first), int(end)


@mmlaunch_app.command()
def resize(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    devices: Annotated[int, typer.Option("--devices", metavar="N", min=1, help="in place of now")],
    as_json: JsonOption = False,
) -> None:
    """Ask a run with --elastic for another number of devices."""
    from mmlaunch.run.elastic import resize as ask

    out = Output(as_json=as_json)
    before = ask(run_dir, devices)
    out.text(f"{run_dir}: {devices} in place of {counted(before, 'device')}, after planning")
    out.data({"run_dir": str(run_dir), "devices": devices, "before": before})


@mmlaunch_app.command()
def cluster(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="CLUSTER", help="where it is written")
    ] = Path("cluster.json"),
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="devices of a machine; default: all"),
    ] = None,
    nnodes: NodesOption = 1,
    hostfile: HostfileOption = None,
    ssh: SshOption = _SSH,
    host_names: HostNamesOption = None,
    node_rank: NodeRankOption = 0,
    rdzv_endpoint: EndpointOption = None,
    local_addr: LocalAddrOption = None,
    join_timeout: JoinTimeoutOption = 900.0,
    secret_file: SecretFileOption = None,
    run_dir: Annotated[
        Path, typer.Option("--run-dir", metavar="DIR", help="that all machines share")
    ] = Path("runs/cluster"),
    as_json: JsonOption = False,
) -> None:
    """Time machines' devices and links; write a cluster file."""
    require_linux("mmlaunch cluster")
    from mmlaunch.launch.hosts import Meeting, given_secret, read_hostfile
    from mmlaunch.launch.launch import launch
    from mmplan.profiling.measure import LINK_BYTES, choose_devices, measured_cluster
    from mmplan.schema.base import save_document

    secret = given_secret(secret_file)
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
        raise typer.Exit(_on_hosts(hosts, ssh, rdzv_endpoint, secret, as_json))
    out = Output(as_json=as_json)
    check_output("--output", output)
    device, per_node = choose_devices(None, nproc)
    if nnodes * per_node < 2:
        raise InvalidInputError("one device has no links", hint="give --nnodes or --hostfile")
    results = launch(
        entry="mmlaunch.measure.hosts:measure_hosts",
        args=(LINK_BYTES, per_node, "bf16" if device == "cuda" else "fp32"),
        num_ranks=nnodes * per_node,
        per_node=per_node,
        run_dir=run_dir,
        timeout_s=300.0,
        meeting=Meeting(
            num_nodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
            local_addr=local_addr,
            secret=secret,
            join_s=join_timeout,
            names=tuple(host_names.split(",")) if host_names else (),
        ),
        stops_in_order=False,
    )
    if node_rank > 0:
        return
    machine, *links = results[0]
    made = measured_cluster(
        device,
        per_node,
        machine["result"],
        [(point, point["result"]) for point in links],
        nodes=nnodes,
    )
    save_document(made, output)
    out.text(f"wrote {output}")
    out.data({"cluster": str(output), "name": made.name})


def _on_hosts(
    hosts: list[Host], ssh: str, endpoint: str | None, secret: bytes | None, as_json: bool
) -> int:
    """This very command on every host, its own options apart."""
    from mmlaunch.launch.ssh import run_on_hosts

    out = Output(as_json=as_json)
    arguments, own = list[str](), ("--hostfile", "--ssh", "--secret-file", "--rdzv-endpoint")
    words = iter(sys.argv[1:])
    for word in words:
        if word in own:
            next(words)
        elif not word.startswith(tuple(f"{name}=" for name in own)):
            arguments.append(word)
    return run_on_hosts(
        hosts,
        arguments,
        ssh=ssh,
        endpoint=endpoint,
        secret=secret,
        on_line=lambda line, as_result: out.relay(line, as_result=as_result),
    )


def _emulation(out: Output, plan: Path) -> tuple[tuple[str, ...], Timings]:
    """A plan's tasks, and what its computes take, for processes that wait instead."""
    from mmplan.schema.load import load_plan
    from mmplan.simulation.predict import compute_timings, plan_costs

    os.environ["MMLAUNCH_DEVICE"] = "cpu"
    out.text("EMULATED: computes are waits of the profile's times; nothing is trained")
    document = load_plan(plan)
    return tuple(document.tasks), compute_timings(plan_costs(document, plan))


def _predicted(prepared: Prepared) -> Timings | None:
    """What computes should take, by a measured profile; None where every rank has peers."""
    from mmplan.simulation.predict import compute_timings, costs_of

    plan, profile = prepared.plan, prepared.profile
    alone = any(unit.dp * unit.tp == 1 for unit in plan.units)
    if not alone or profile is None or profile.source != "measured":
        return None
    try:
        return compute_timings(costs_of(plan, profile))
    except InvalidInputError:
        # Of another plan's modules: that is no reason not to train.
        return None


def _planner(out: Output, options: RunOptions, prepared: Any) -> Callable[..., Plan]:
    """Plans for other tasks with the given plan's profile, devices and solver."""

    def planned(tasks: tuple[str, ...], output: Path) -> Plan:
        from mmplan.planning.what_if import replan

        out.text(f"planning for the tasks {', '.join(tasks)}")
        return replan(
            prepared.plan,
            options.plan,
            workload=prepared.workload,
            workload_path=prepared.workload_path,
            tasks=tasks,
            output=output,
        )

    return planned


@mmlaunch_app.command()
def verify(
    plan: PlanPath,
    workload: WorkloadOption = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="ranks as threads of this process")
    ] = False,
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="optimizer steps to compare")
    ] = 3,
    original: Annotated[
        list[str] | None,
        typer.Option(
            "--original",
            metavar="[MODULE=]PACKAGE.MODULE:CALLABLE",
            help="the uncut model, to hold the cut against, without dropout; again for another",
        ),
    ] = None,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="a small plan with every class of alike ranks, as threads of this process",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="ranks as threads of this process, under the rules of GPUs and NCCL"
        ),
    ] = False,
    timeout: TimeoutOption = 300.0,
    start_timeout: StartTimeoutOption = 900.0,
    as_json: JsonOption = False,
) -> None:
    """Planned steps and a reload against one process, by name."""
    require_linux("mmlaunch verify")
    from mmlaunch.process import fork_server

    if not (in_process or shrink or strict):
        fork_server.start(fork_server.RANK_MODULES)
    from mmlaunch.run.options import RunOptions
    from mmlaunch.run.run import prepare, shrunk, try_out
    from mmlaunch.run.run import verify as start

    out = Output(as_json=as_json)
    options: RunOptions = RunOptions(
        plan=plan, workload=workload, timeout_s=timeout, start_timeout_s=start_timeout
    )
    prepared = prepare(options)
    for note in prepared.notes:
        out.hint(note)
    out.text(f"importing {', '.join(prepared.imports)}")
    for note in try_out(prepared, prepared.plan.tasks):
        out.hint(note)
    if shrink:
        whole, prepared = prepared.plan, shrunk(prepared)
        out.text(
            f"--shrink: {prepared.plan.devices} of {counted(whole.devices, 'rank')}, every class "
            "of alike ranks among them"
        )
    devices = prepared.plan.devices
    threads = "threads" if in_process or shrink else "processes"
    found = start(
        options,
        prepared,
        steps=steps,
        workers="strict" if strict else threads,
        originals=original or (),
    )
    verdict, uncut, rules = found.verdict, found.uncut, found.rules
    broken, faults = found.broken_rules, found.faults
    # Of differences, the largest ones say enough.
    shown = len(broken) + min(len(faults) - len(broken), 20)
    for fault in faults[:shown]:
        out.text(fault)
    if found.failure is not None:
        raise found.failure
    if broken or verdict is None:
        raise RunFailedError(
            f"{counted(len(broken), 'fault')} on GPUs",
            hint="mmplan check PLAN; a device's fault names a line of the code that it is in",
            documented=True,
        )
    out.data(
        {
            "compared": verdict.compared,
            "updates": verdict.updates,
            "steps": verdict.steps,
            "worst": _number(verdict.worst),
            "share": _number(verdict.share),
            "loss": _number(verdict.loss),
            "reference_loss": _number(verdict.reference_loss),
            "differences": [_row(item) for item in verdict.differences],
            "original": uncut
            and {
                "compared": uncut.compared,
                "share": _number(uncut.share),
                "differences": [_row(item) for item in uncut.differences],
            },
        }
    )
    if not math.isfinite(verdict.reference_loss):
        raise RunFailedError(
            f"one process's own loss is {verdict.reference_loss:g}: no gradient can be compared",
            hint="look for bad samples in the first batch, or a division by zero in a module",
            documented=True,
        )
    if uncut and uncut.differences:
        raise RunFailedError(
            f"{len(uncut.differences)} of {counted(uncut.compared, 'value')} differ from "
            f"{found.original}",
            hint="compare the factory's before, each and after with the model's own forward",
            documented=True,
        )
    if verdict.differences:
        raise RunFailedError(
            f"{len(verdict.differences)} of {verdict.compared + verdict.updates} values differ "
            f"from one process's; a gradient by {verdict.worst:.3g} of the largest one",
            hint="mmplan check PLAN; a module whose forward is not deterministic differs too",
            documented=True,
        )
    if rules and (device := found.device):
        out.text(
            f"an accelerator takes a step of {counted(device.ranks, 'distinct rank')}; the host "
            f"waits for it {counted(device.most_synchronisations, 'time')} at most"
        )
        out.text(
            f"NCCL's rules hold on {counted(devices, 'rank')}: no hang, no message in another's "
            "place, no buffer in use while it is sent or received, no communicator made in a "
            f"step, at most {rules.most_blocks} of {rules.multiprocessors} multiprocessors in use; "
            f"at most {size(max(rules.most_bytes))} of messages on a rank"
        )
    if uncut:
        out.text(
            f"{counted(uncut.compared, 'value')} of the cut modules equal {found.original}'s, both "
            "in evaluation mode, without dropout: at most "
            f"{uncut.share:.0%} of what rounding allows"
        )
    out.text(
        f"{counted(verdict.compared, 'gradient')} and {counted(verdict.updates, 'updated value')} "
        f"of {counted(steps, 'step')} on {counted(prepared.plan.devices, 'rank')}, and of one "
        f"after a reload on 1 rank, equal one process's: worst difference {verdict.worst:.2g} of "
        f"the largest gradient, at most {verdict.share:.0%} of what rounding allows"
    )


@mmlaunch_app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Say how a run does, from its folder: while it goes on, and after."""
    from dataclasses import asdict

    from mmlaunch.run.status import launch_status
    from mmplan.reporting.source import load_run
    from mmplan.reporting.terminal.run_status import status_document, status_grids

    out, found = Output(as_json=as_json), load_run(run_dir)
    if not found.record:
        why = next((fault for fault in found.faults if "run.json" in fault), "run.json has nothing")
        raise InvalidInputError(
            f"{run_dir}: no run's folder: {why}", hint="give the folder that mmlaunch run wrote"
        )
    for fault in found.faults:
        out.hint(fault)
    document = status_document(found, asdict(launch_status(run_dir, found.record)))
    out.grids(*status_grids(document))
    out.data(document)


@mmlaunch_app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="new, or empty")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="a run's checkpoint; default: the last"),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="transformers|dcp",
            help="for from_pretrained, or torch.distributed.checkpoint with the optimizer's state",
        ),
    ] = "transformers",
    workload: WorkloadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's weights as their models are loaded elsewhere."""
    from dataclasses import asdict

    from mmlaunch.run.export import check_kind, check_output, find_source
    from mmlaunch.run.export import export as write

    check_kind(kind)
    check_output(output)
    out, source = Output(as_json=as_json), find_source(path, step=step, workload=workload)
    out.text(f"importing {', '.join(source.imports)}")
    models = write(source, output, kind=kind)
    for model in models:
        what = " + ".join(model.modules) or "of losses"
        named = f" ({model.architecture})" if model.architecture else ""
        held = f"{counted(model.tensors, 'tensor')}, {size(model.size_bytes)}"
        out.text(f"{what}{named}: {held} in {model.folder}")
        for note in model.notes:
            out.hint(note)
    for name in source.without(models):
        out.hint(f"{source.path} holds nothing of modules.{name}")
    out.data(
        {
            "from": str(source.path),
            "step": source.step,
            "format": kind,
            "models": [{**asdict(model), "folder": str(model.folder)} for model in models],
        }
    )


@mmlaunch_app.command()
def data(
    head: Annotated[bool, typer.Option("--head", help="begin a cluster")] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="of the head; with --head where it listens, default: port 6379",
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option("--cpus", metavar="N", min=0, help="that load data; default: all of them"),
    ] = None,
    store: Annotated[
        int | None,
        typer.Option(
            "--object-store-memory",
            metavar="BYTES",
            min=80_000_000,
            help="of samples that wait; default: 30% of the memory",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Load data for runs elsewhere, as a Ray node, until SIGTERM."""
    require_linux("mmlaunch data")
    from mmlaunch.data.ray_node import RayNode, serve, take_settings
    from mmlaunch.launch.addresses import parse_endpoint
    from mmplan.processes import num_cores

    if address is not None:
        parse_endpoint(address, "--address")
    elif not head:
        raise InvalidInputError(
            "mmlaunch data begins a cluster or joins one",
            hint="give --head, or --address HOST:PORT of a head",
        )
    token = take_settings("mmlaunch data", make_token=head)
    out, cores = Output(as_json=as_json), num_cores() if cpus is None else cpus
    node = RayNode(address=address, head=head, cpus=cores, store_bytes=store)

    def up() -> None:
        out.text(f"{counted(cores, 'core')} for data at {node.address()}, token in {token}")
        out.data({"address": node.address(), "cores": cores, "token": token})
        if head:
            out.hint(f"mmlaunch data --address {node.address()}, with the same token")

    serve(node, on_up=up)


RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="that all nodes share; default: runs/NAME"),
]
SourceOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--source",
        metavar="FILE",
        help="shell that every node reads first: modules, NCCL's and the fabric's settings",
    ),
]
GraceOption = Annotated[
    int, typer.Option("--grace", metavar="SECONDS", min=1, help="time to save before the end")
]
ScriptOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="default: standard output")
]
RunArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- RUN_OPTIONS]", help="of mmlaunch run, as in -- --save-every 100"),
]


@mmlaunch_app.command()
def slurm(
    plan: PlanPath,
    run_options: RunArguments = None,
    output: ScriptOption = None,
    run_dir: RunDirOption = None,
    partition: Annotated[
        str | None, typer.Option("--partition", metavar="NAME", help="default: the cluster's")
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", metavar="NAME", help="that pays")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="D-HH:MM:SS", help="limit of the job")
    ] = None,
    grace: GraceOption = 300,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="container, by Slurm's Pyxis")
    ] = None,
    source: SourceOption = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="more for sbatch: --sbatch=--qos=high"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a batch script for Slurm that runs a plan."""
    from mmlaunch.schedulers.slurm import sbatch_script

    job, _ = _scheduler_job(plan, run_dir, source, run_options, Path.absolute)
    try:
        # Slurm makes no folder for a job's output.
        job.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnfitEnvironmentError(
            f"{job.run_dir}: cannot be made: {error.strerror}", hint="name another --run-dir"
        ) from None
    text = sbatch_script(
        job,
        folder=Path.cwd(),
        grace_s=grace,
        partition=partition,
        account=account,
        time=time,
        image=image,
        more=sbatch or (),
    )
    _write_script(text, output, job, f"sbatch {output}", as_json=as_json)


@mmlaunch_app.command()
def k8s(
    plan: PlanPath,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="with mmlaunch and the workload's code")
    ],
    claim: Annotated[
        str, typer.Option("--claim", metavar="NAME", help="of the volume that has this folder")
    ],
    run_options: RunArguments = None,
    output: ScriptOption = None,
    run_dir: RunDirOption = None,
    mount: Annotated[
        str, typer.Option("--mount", metavar="PATH", help="where pods find the volume")
    ] = "/shared",
    grace: GraceOption = 300,
    secret: Annotated[
        str | None,
        typer.Option("--secret", metavar="NAME", help="of the rendezvous; default: NAME-secret"),
    ] = None,
    source: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a JobSet for Kubernetes that runs a plan."""
    from pathlib import PurePosixPath

    from mmlaunch.schedulers.jobset import jobset_manifest

    job, given = _scheduler_job(plan, run_dir, source, run_options, _below_here)
    text = jobset_manifest(
        job,
        image=image,
        claim=claim,
        mount=PurePosixPath(mount),
        grace_s=grace,
        max_restarts=given["max_restarts"],
        secret=secret,
    )
    _write_script(text, output, job, f"kubectl apply -f {output}", as_json=as_json)


def _scheduler_job(
    plan: Path,
    run_dir: Path | None,
    source: list[Path] | None,
    run_options: list[str] | None,
    as_nodes_see: Callable[[Path], Path],
) -> tuple[SchedulerJob, dict[str, Any]]:
    """The job, and its options as ``mmlaunch run`` reads them: mistakes are found before it waits.

    Raises:
        InvalidInputError: a wrong option, plan or path.
    """
    from mmlaunch.schedulers.job import job_of
    from mmplan.schema.load import load_plan

    arguments = run_options or []
    group: Any = typer.main.get_command(mmlaunch_app)
    given = group.commands["run"].make_context("mmlaunch run", [str(plan), *arguments]).params
    document = load_plan(plan)
    job = job_of(
        document,
        as_nodes_see(plan),
        run_dir=as_nodes_see(run_dir or Path("runs") / document.name),
        sources=[as_nodes_see(file) for file in source or ()],
        arguments=arguments,
    )
    return job, given


def _below_here(path: Path) -> Path:
    """Relative to this folder, which is the volume's root."""
    here = Path.cwd()
    if not path.resolve().is_relative_to(here.resolve()):
        raise InvalidInputError(
            f"{path} is not below this folder, which is to be the volume's root",
            hint="go to the folder that the volume has, and name files from there",
        )
    return path.resolve().relative_to(here.resolve())


def _write_script(
    text: str, output: Path | None, job: SchedulerJob, then: str, *, as_json: bool
) -> None:
    out = Output(as_json=as_json)
    if (job.run_dir / "run.json").exists():
        out.hint(f"{job.run_dir} holds a run already: the job goes on with that one")
    if output is None:
        for line in text.splitlines():
            out.text(line)
    else:
        from mmplan.schema.base import write_text

        check_output("--output", output)
        write_text(output, text)
        out.text(f"wrote {output}")
        out.hint(then)
    out.data({"output": None if output is None else str(output), "text": text})


def _row(item: Difference) -> list[Any]:
    return [item.name, item.rank, _number(item.error), item.what, item.step, item.allowed]


def _number(value: float) -> float | None:
    """As JSON has it: no infinity, and null for what is no number."""
    return None if math.isnan(value) else max(-1e308, min(value, 1e308))


if _loading:
    signal.signal(signal.SIGINT, signal.default_int_handler)
