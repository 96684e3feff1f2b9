"""The commands that run a job or take part in one, and the table of all commands.

Each checks its words before torch is imported, makes a call, and shows its result.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief.cli import ENDED, INTERRUPTED, options, teller
from distbelief.cli.arguments import DataFolder, Quiet, arguments_of, ask_maybe, ask_of, picked
from distbelief.cli.costs import cost, draw, plan, split
from distbelief.cli.results import compress, evaluate, expand, predict, report, runs
from distbelief.cli.study import study
from distbelief.cli.watch import check_page, watch
from distbelief.core.records import Json, Outcome
from distbelief.core.settings import option
from distbelief.errors import JobFailed, UsageError
from distbelief.job import Threaded
from distbelief.places.processes.script import name_of
from distbelief.places.view import View
from distbelief.record.summary import many
from distbelief.references import TASKS, check_task
from distbelief.strategies import STRATEGIES, find

if TYPE_CHECKING:
    from distbelief.job import Job
    from distbelief.places.simulated.simulated import Simulated


def train(args: list[str]) -> int:
    """Run `distbelief train TASK STRATEGY [options]`; the strategy may be `auto`."""
    if args[1:2] == [AUTO] and not args[0].startswith("-"):
        check_task(args[0])
        args = chosen(args[0], args[2:])
    task, strategy, rest = _task_and_strategy("train", args)
    command = options.parse("train", task, strategy, rest)
    job = command.job(task)
    place = command.place()
    if command.dry_run:
        return _dry_run(place, job)
    return _run(lambda: place.run(job, _view(command, f"{strategy} on {task}")), command, ["train", *args])


def launch(args: list[str]) -> int:
    """Run `distbelief launch STRATEGY [options] script.py|-m module [args...]`."""
    if not args or args[0] in ("--help", "-h"):
        return _usage("launch STRATEGY [options] script.py|-m module [args...]", bool(args), "")
    strategy = _strategy("launch", args[0], args)
    mine, script = options.split_script(options.arguments("launch", strategy), args[1:])
    command = options.parse("launch", "", strategy, mine)
    if not script:
        raise UsageError(
            f"distbelief launch {strategy}: which script? Write it after the options: distbelief launch {strategy} "
            "script.py"
        )
    job = command.job("script")
    place = command.place()
    if command.dry_run:
        return _dry_run(place, job)
    view = _view(command, f"{name_of(script)} in the replicas of {strategy}")
    return _run(lambda: place.launch(job, script, view), command, ["launch", *args[: len(mine) + 1]], script)


def _dry_run(place: Any, job: Job) -> int:
    """Show the host of each role."""
    settings = place.settings(job)
    for line in place.preview(settings, job.strategy.roles(measured=settings.evaluates)):
        print(line)
    links = "TLS" if place.encrypted else "plain TCP (--insecure)"
    print(f"links: {links}; each role listens on its host's address, at a port that is chosen when the job starts")
    return 0


def simulate(args: list[str]) -> int:
    """Run `distbelief simulate TASK STRATEGY [options]`."""
    task, strategy, rest = _task_and_strategy("simulate", args)
    command = options.parse("simulate", task, strategy, rest)
    job = command.job(task)
    place, view = command.simulated(), _view(command, f"{strategy} on {task}, simulated")
    if command.virtual.sweep is not None:
        view.show_start()
        return _sweep(place, job, command.virtual.sweep, command, args)
    return _run(lambda: place.run(job, view), command, ["simulate", *args])


def _sweep(place: Simulated, job: Job, count: int, command: options.Options, args: Sequence[str]) -> int:
    """Show each failing seed with its replay, and in the end the spread of the results."""
    from distbelief.places.simulated.sweep import lines, spread, sweep

    ended = []
    for result in sweep(place, job, count):
        ended.append(result)
        replay = replay_command(args, result.seed)
        if command.showing.json:
            line = {**msgspec.to_builtins(result), "replay": replay}
            print(msgspec.json.encode(line).decode(), flush=True)
        elif result.failed:
            print(f"seed {result.seed} failed: {' '.join(result.reason.split())}; replay it: {replay}", flush=True)
    summary = spread(ended)
    if command.showing.json:
        print(msgspec.json.encode(summary).decode())
    elif not command.showing.quiet:
        print("\n".join(lines(summary)))
    return INTERRUPTED if ended[-1].outcome == Outcome.INTERRUPTED else int(any(result.failed for result in ended))


def replay_command(args: Sequence[str], seed: int) -> str:
    """Return the command that runs one seed of a sweep alone.

    >>> replay_command(["digits", "downpour", "--sweep", "9", "--seed=4", "--json", "--lr", "0.1"], 7)
    'distbelief simulate digits downpour --lr 0.1 --seed 7'
    """
    kept = _without(args, ("--sweep", "--seed"), ("--json", "--quiet"))
    return shlex.join(["distbelief", "simulate", *kept, "--seed", str(seed)])


def _without(args: Sequence[str], valued: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Leave off some options, which have a value or are flags."""
    gone = (*valued, *flags)
    words = enumerate(args)
    return [word for at, word in words if word.partition("=")[0] not in gone and not (at and args[at - 1] in valued)]


@dataclass(frozen=True)
class StatusOptions:
    """Members of a running job: the progress of each, and what it waits for, since when and why."""

    watch: bool = False
    """Show the status every second until the job has ended."""
    json: bool = False
    """Show the status as lines of JSON."""


def status(args: list[str]) -> int:
    """Run `distbelief status RUN [options]`."""
    run, settings = ask_of("distbelief status RUN", "run folder", StatusOptions, args)
    from distbelief.places.status import lines
    from distbelief.places.status import status as ask

    while True:
        try:
            state = ask(run)
        except JobFailed as error:
            if not settings.watch:
                raise
            print(f"distbelief: {error}", file=sys.stderr, flush=True)
        else:
            print(msgspec.json.encode(state).decode() if settings.json else "\n".join(lines(state)), flush=True)
            if not (settings.watch and state["running"]):
                return 0
        time.sleep(1.0)


@dataclass(frozen=True)
class JoinOptions(Quiet, Threaded, DataFolder):
    """Add a replica on this machine to a job that runs elsewhere. The job was started with --listen, and wrote the
    ticket.
    """

    strategy: str = ""
    """Strategy of the job as module:Class, if it is one of your own: a ticket alone never imports code."""
    leave_within: float = 0.0
    """Seconds for this replica to finish its work after Ctrl-C or SIGTERM; 0 sets no limit."""


def join(args: list[str]) -> int:
    """Run `distbelief join TICKET [options] [script.py|-m module [args...]]`."""
    flags, script = options.split_script(arguments_of(JoinOptions), args[1:])
    ticket, chosen = ask_of("distbelief join TICKET", "ticket", JoinOptions, [*args[:1], *flags])
    for check_process in chosen.process_checks():
        check_process()
    tell = teller(chosen.quiet)
    tell(f"joining by {ticket}")
    from distbelief.places.join.guest import Guest

    Guest(
        ticket, script, chosen.data_dir, chosen.device, chosen.threads, tell, chosen.strategy, chosen.leave_within
    ).run()
    return 0


def leave(args: list[str]) -> int:
    """Run `distbelief leave TICKET`."""
    if len(args) != 1 or args[0].startswith("-"):
        print(
            "usage: distbelief leave TICKET\n\nThe replicas on this machine that joined with this ticket finish their "
            "work and leave the job."
        )
        return 0 if args and args[0] in ("--help", "-h") else 2
    from distbelief.places.join.guest import leave as ask

    count = ask(args[0])
    asked = f"asked {many(count, 'replica')} to leave"
    print(asked if count else "no replica on this machine has joined with this ticket")
    return 0 if count else 1


def resume_command(args: Sequence[str], run: str, script: Sequence[str] = ()) -> str:
    """Return the command that resumes a run: the same command with its run folder and `--resume`.

    >>> resume_command(["train", "digits", "single", "--out", "x", "--epochs", "3"], "x")
    'distbelief train digits single --epochs 3 --out x --resume'
    """
    kept = _without(args, ("--out",), ("--resume",))
    return shlex.join(["distbelief", *kept, "--out", run, "--resume", *script])


def _usage(words: str, wanted: bool, more: str = f"; tasks: {', '.join(TASKS)}, or module:function of your own") -> int:
    named = ", ".join((*STRATEGIES, *[f"{AUTO} (the first of a plan)"] * words.startswith("train ")))
    print(f"usage: distbelief {words}\n\nstrategies: {named}, or module:Class of your own{more}")
    return 0 if wanted else 2


def _task_and_strategy(command: str, args: Sequence[str]) -> tuple[str, str, list[str]]:
    if not args or args[0] in ("--help", "-h") or list(args[1:]) in (["--help"], ["-h"]):
        _usage(
            f"{command} TASK STRATEGY [options]\n\n  distbelief {command} TASK STRATEGY --help shows the options of a "
            "strategy",
            True,
        )
        raise SystemExit(0 if args else 2)
    task = args[0]
    if task.startswith("-"):
        raise UsageError(f"{task}: write the task and the strategy first: distbelief {command} TASK STRATEGY [options]")
    check_task(task)
    if len(args) < 2:
        raise UsageError(
            f"distbelief {command} {task}: which strategy? Write it after the task: {', '.join(STRATEGIES)}, or "
            "module:Class of your own"
        )
    return task, _strategy(command, args[1], args), list(args[2:])


def _strategy(command: str, name: str, args: Sequence[str]) -> str:
    if name.startswith("-"):
        raise UsageError(
            f"{name}: write the strategy before the options: distbelief {command} "
            f"{' '.join([*args[:-1][:1], 'STRATEGY'])} [options]"
        )
    find(name)
    return name


def _view(command: options.Options, title: str) -> View:
    showing = command.showing
    if showing.page is not False:
        check_page(showing.page)
    return View(
        quiet=showing.quiet,
        json=showing.json and not showing.quiet,
        title=title,
        metrics=showing.metrics,
        track=showing.track,
        page=showing.page,
    )


def _run(run_job: Callable[[], Json], command: options.Options, args: Sequence[str], script: Sequence[str] = ()) -> int:
    """Run a job and print its result, and how to resume an interrupted one."""
    try:
        result = run_job()
    except JobFailed as error:
        if error.run:
            error.args = (f"{error}: {resume_command(args, error.run, script)}",)
        raise
    finally:
        ENDED.set()
    run = result.get("run")
    if command.showing.json:
        print(msgspec.json.encode(result).decode())
    elif command.showing.quiet:
        print(run or "")
    else:
        from distbelief.record.live import summary

        print(summary(result, run))
        if run and result.get("replicas", 1) > 1:
            from distbelief.lab.study.runs import efficiency_of

            if efficiency := efficiency_of(Path(run)):
                print(f"{'efficiency':<12}{efficiency}")
    if result["outcome"] != Outcome.INTERRUPTED:
        return 0
    go_on = ""
    if run and (Path(run) / "checkpoints").is_dir():  # a phantom keeps no checkpoints
        go_on = f"; go on with: {resume_command(args, run, script)}"
    print(f"distbelief: interrupted{go_on}", file=sys.stderr)
    return INTERRUPTED


AUTO = "auto"
CHOSEN = ("--replicas", "--partitions", "--shards")
"""Options that the plan chooses."""
PLAIN = {"device": "cpu", "threads": 1, "precision": "float32", "fixed_point": ""}
"""Options with which the candidates of a plan are run."""


def chosen(task: str, rest: Sequence[str]) -> list[str]:
    """Plan a job for this machine, print why, and return its words for `train`: task, strategy and options.

    Raises:
        UsageError: an option that a planned strategy lacks, or that a plan cannot take into account.
    """
    for word in rest:
        if word.partition("=")[0] in CHOSEN:
            raise UsageError(f"{word}: auto chooses it; leave it off, or name a strategy")
        if word == "--resume":
            raise UsageError("--resume: name the strategy that auto chose for this run; its job.json has it")
    single = options.parse("train", task, "single", rest)
    single.job(task).settings()
    for name, value in PLAIN.items():
        if single.values[name] != value:
            raise UsageError(
                f"{option(name)} {single.values[name]}: auto plans for {value or 'none'} only; leave it off, or name a "
                "strategy"
            )
    from distbelief.cli.tables import progress
    from distbelief.lab.cost.options import PlanRequest
    from distbelief.lab.plan import plan as planning
    from distbelief.lab.plan.candidates import PLANNED

    for name in PLANNED:
        options.parse("train", task, name, rest)
    with progress(f"planning {task}") as show:
        data = {name: single.values[name] for name in ("batch_size", "data_dir")}
        plan = planning.plan(task, PlanRequest(optimizer=single.optimizer(), **data), show)
    if not (single.showing.quiet or single.showing.json):
        command = f"distbelief train {task} {plan.first.command}"
        print(f"{plan.why}\nplanned in {plan.seconds:.0f} s\n{command}", flush=True)
    return [task, *plan.first.command.split(), *rest]


@dataclass(frozen=True)
class CheckOptions(DataFolder):
    """Check whether hosts are ready for a job: logins, versions, clocks, cores and memory, the data of a task, and
    latency and bandwidth between each two. Problems are shown with their remedies.
    """

    hosts: str = ""
    """The hosts (a:4,b:4)."""
    hostfile: str = ""
    """File that names the hosts instead."""
    on: str = ""
    """Engine that starts processes there: ssh, or slurm inside an allocation."""
    remote_shell: str = "ssh"
    """Command that logs in to a host, with its options."""
    interface: str = ""
    """Network interface of the hosts whose address is used, such as eth1."""
    topology_out: str = ""
    """Write a file for --topology: a tree of switches that fits the measured bandwidths."""
    json: bool = False
    """Show the report as JSON."""


def check(args: list[str]) -> int:
    """Run `distbelief check [TASK] --hosts a:4,b:4 [options]`; return 1 if there are problems."""
    task, settings = ask_maybe("distbelief check [TASK]", CheckOptions, args)
    if task:
        check_task(task)
    elif settings.data_dir:
        raise UsageError(f"--data-dir {settings.data_dir}: for which task? Write it first: distbelief check mnist ...")
    out = Path(settings.topology_out)
    if settings.topology_out and (out.exists() or not out.absolute().parent.is_dir()):
        raise UsageError(f"--topology-out {out}: exists already, or has no folder; name a new file")
    from distbelief.places.cluster.checking import lines, topology_of
    from distbelief.places.cluster.cluster import Cluster

    place = Cluster(**picked(settings, "hosts", "hostfile", "on", "remote_shell", "interface"))
    reports = place.check(task, settings.data_dir or "", bool(settings.topology_out))
    print(msgspec.json.encode(reports).decode() if settings.json else "\n".join(lines(reports)))
    if settings.topology_out:
        text = topology_of(reports)
        try:
            out.write_text(text)
        except OSError as error:
            print(text)  # measuring it took minutes
            raise UsageError(f"--topology-out {out}: cannot be written ({error.strerror}): it is shown above") from None
    return int(any(report.problems for report in reports))


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    command.__name__: command
    for command in (
        train,
        launch,
        simulate,
        check,
        study,
        report,
        runs,
        evaluate,
        predict,
        compress,
        expand,
        join,
        leave,
        status,
        watch,
        cost,
        plan,
        split,
        draw,
    )
}
