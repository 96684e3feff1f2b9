"""The command `distbelief`: calls the command that its words name, and turns errors into a line and an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from distbelief.cli import ENDED, INTERRUPTED
from distbelief.errors import DataError, DistbeliefError, Interrupted, Refusals, UsageError, limit, unknown
from distbelief.places import signals

INTERRUPTED_BEFORE = "interrupted before the job began"
USAGE = """\
usage: distbelief COMMAND ...

Train deep networks on many machines: DistBelief on today's PyTorch.

  train TASK STRATEGY [options]                    train a task on this machine
  train TASK auto [options]                        the same, with the strategy that `plan` finds fastest
  launch STRATEGY [options] script.py [args...]    run your own training loop in every replica; for a module of a
                                                   package write -m module instead of script.py
  simulate TASK STRATEGY [options]                 the same job on a virtual cluster
  check [TASK] --hosts a:4,b:4 [options]           check whether hosts are ready for a job
  study NAME|FILE.toml [options]                   compare ways to train: medians of several seeds, time to a target
  report RUN ... [options]                         compare runs on one page
  runs [DIR] [options]                             list runs: task, strategy, state, accuracy, time
  evaluate RUN|FILE [options]                      measure the model of a run, or of a compressed file, on a test set
  predict RUN... TASK|FILE --out FILE [options]    write the outputs of trained models for samples
  compress RUN [options]                           make the model of a run smaller
  expand FILE [options]                            write the model of a compressed file as safetensors
  join TICKET [options] [script.py [args...]]      add a replica on this machine to a job that was started with --listen
  leave TICKET                                     let the replicas that joined from this machine finish and leave
  status RUN [options]                             show the members of a running job, and what each waits for
  watch [RUN] [options]                            show a run in a browser while it trains, or afterwards
  cost TASK [options]                              measure time and memory of a step, layer by layer
  plan TASK [options]                              find the fastest strategy and number of replicas for some machines
  split TASK [options]                             show how a model would be split, and whether it pays
  draw ALGORITHM [options]                         draw an all-reduce or a pipeline, step by step

tasks:       {tasks}, or module:function of your own; TASK@FILE begins with the
             model of a compressed file, and keeps its weights pruned and shared
strategies:  {strategies},
             or module:Class of your own

distbelief train mnist downpour --replicas 2 --shards 2 --optimizer adagrad --lr 0.02 --epochs 5
distbelief train mnist downpour --help [all]       the options of a command with a strategy
distbelief --version

exit status: 0 done; 1 failed, or not ready (check); 2 refused: change a word, a file or the data; 130 interrupted"""


def main() -> NoReturn:
    """Run the command of this process, and end the process."""
    with signals.handled(_end):
        signals.leave_process_1()
        from distbelief.places.processes.output import open_streams

        open_streams()
        status = run(sys.argv[1:])
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # all is written and every process has ended; Python would take half a second to tear torch down
            os._exit(status)


def _interrupted(args: Sequence[str]) -> str:
    """Describe an interruption by how far the command was.

    >>> _interrupted(["train", "mnist"]), _interrupted(["status"])
    ('interrupted before the job began', 'interrupted')
    """
    match args[:1]:
        case ["train" | "launch" | "simulate" | "join"]:
            return "interrupted" if ENDED.is_set() else INTERRUPTED_BEFORE
        case ["cost" | "plan" | "split"]:
            return "interrupted: an unfinished measurement is not kept; --seconds N makes it shorter"
    return "interrupted"


def _end(*_: object) -> NoReturn:
    """End this process without an exception, which an import could catch; before a job begins nothing is lost."""
    with contextlib.suppress(OSError):
        clear = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""  # clear a line of progress, and show the cursor
        os.write(2, f"{clear}distbelief: {_interrupted(sys.argv[1:])}\n".encode())
    os._exit(INTERRUPTED)


def run(args: Sequence[str], command: Callable[[list[str]], int] | None = None) -> int:
    """Run `command` with the words of a command line, or the one of distbelief that the first word names.

    Return its exit status, as `USAGE` says.
    """
    from distbelief.core.values import check_text

    ENDED.clear()
    try:
        for word in args:
            check_text(word, repr(word))
        return (command or _command)(list(args))
    except SystemExit as end:  # help was shown
        return end.code if isinstance(end.code, int) else 0
    except (UsageError, DataError) as error:
        return _complain(error, 2)
    except DistbeliefError as error:
        return _complain(error, INTERRUPTED if isinstance(error, Interrupted) else 1)
    except KeyboardInterrupt:
        return _complain(_interrupted(args), INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output is gone; Python must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # of this machine: a full disk, no more descriptors, a folder that was deleted
        return _complain("; ".join(filter(None, [str(error), limit(error)])), 1)
    except Exception as error:
        return _complain(f"{type(error).__name__}: {error} ({_place(error)})", 1)


def _place(error: Exception) -> str:
    """Return the last line of this package in the traceback of an unexpected error."""
    import traceback

    package = str(Path(__file__).parents[1])
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


def _complain(error: object, status: int) -> int:
    for note in getattr(error, "__notes__", ()):  # the traceback of what the user's own code raised
        print(note, file=sys.stderr)
    for line in str(error).splitlines() if isinstance(error, Refusals) else (str(error),):
        print(f"distbelief: {' '.join(line.split())}", file=sys.stderr)
    return status


def _command(args: list[str]) -> int:
    if args[:1] == ["agent"]:  # a job's engine starts the agent on each host, which needs none of the other commands
        from distbelief.places.cluster import agent

        return agent.main(args[1:])
    from distbelief.cli import commands

    if not args or args[0] in ("--help", "-h", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("--version", "-V"):
        from importlib.metadata import version

        print(f"distbelief {version('distbelief')}")
        return 0
    known: Mapping[str, Callable[[list[str]], int]] = commands.COMMANDS
    if args[0] not in known:
        raise unknown("command", args[0], [*known, "--help", "--version"] if args[0].startswith("-") else known)
    return known[args[0]](args[1:])


def usage() -> str:
    """Return the text of `distbelief --help`."""
    from distbelief.references import TASKS
    from distbelief.strategies import STRATEGIES

    return USAGE.format(tasks=", ".join(TASKS), strategies=", ".join(STRATEGIES))
