"""The command `distbelief`: from words to calls, from errors to one line and an exit code; it decides nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from distbelief.cli import INTERRUPTED
from distbelief.errors import DataError, DistbeliefError, Interrupted, Refusals, UsageError, limit, unknown
from distbelief.places import signals

INTERRUPTED_BEFORE = "interrupted before the job began"
USAGE = """\
usage: distbelief COMMAND ...

Train deep networks on many machines: DistBelief on today's PyTorch.

  train TASK STRATEGY [options]                    train a task on this machine
  train TASK auto [options]                        the same, with what `plan` finds fastest on this machine
  launch STRATEGY [options] script.py [args...]    run your own training loop in every replica; -m module in the place
                                                   of script.py runs a module of a package, as python -m does
  simulate TASK STRATEGY [options]                 the same job on a virtual cluster
  check [TASK] --hosts a:4,b:4 [options]           whether hosts are ready for a job, and what to do where not
  study NAME|FILE.toml [options]                   compare ways to train: medians of several seeds, time to a target
  report RUN ... [options]                         put runs beside each other, on one page
  runs [DIR] [options]                             list runs: task, strategy, state, accuracy, time
  evaluate RUN|FILE [options]                      measure the model of a run, or of a compressed file, on a test set
  predict RUN... TASK|FILE --out FILE [options]    what trained models answer to samples: one file
  compress RUN [options]                           make the model of a run smaller: one file
  expand FILE [options]                            write the model of a compressed file as safetensors
  join TICKET [options] [script.py [args...]]      add a replica on this machine to a job that was started with --listen
  leave TICKET                                     let the replicas that joined from this machine finish, and go
  status RUN [options]                             who takes part in a running job, how far, and what each waits for
  cost TASK [options]                              what a step takes and holds, layer by layer; what epochs cost
  plan TASK [options]                              which strategy, with how many replicas, is fastest on some machines
  split TASK [options]                             what goes where in a split model, what crosses, whether it pays
  draw ALGORITHM [options]                         what an all-reduce sends, or a pipeline runs, step by step

tasks:       {tasks}, or module:function of your own; TASK@FILE begins with the
             model of a compressed file, and keeps what is pruned and shared in it
strategies:  {strategies},
             or module:Class of your own

distbelief train mnist downpour --replicas 2 --shards 2 --optimizer adagrad --lr 0.02 --epochs 5
distbelief train mnist downpour --help [all]       the options of a command with a strategy
distbelief --version"""


def main() -> NoReturn:
    """Run the command of this process, and end it."""
    with signals.handled(_end):
        signals.leave_process_1()
        from distbelief.places.processes.output import open_streams

        open_streams()
        status = run(sys.argv[1:])
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # at once: all is written and every process ended, and Python would take half a second to tear torch down
            os._exit(status)


def _interrupted(args: Sequence[str]) -> str:
    """Say how far a command was that was interrupted.

    >>> _interrupted(["train", "mnist"]), _interrupted(["status"])
    ('interrupted before the job began', 'interrupted')
    """
    match args[:1]:
        case ["train" | "launch" | "simulate" | "join"]:
            return INTERRUPTED_BEFORE
        case ["cost" | "plan" | "split"]:
            return "interrupted: half of a measurement says nothing, and nothing is kept; --seconds N makes it shorter"
    return "interrupted"


def _end(*_: object) -> NoReturn:
    """End this process, which has nothing to lose before a job begins; an import under way could catch an exception."""
    with contextlib.suppress(OSError):
        alone = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""  # of the line and cursor that showed what was done
        os.write(2, f"{alone}distbelief: {_interrupted(sys.argv[1:])}\n".encode())
    os._exit(INTERRUPTED)


def run(args: Sequence[str], command: Callable[[list[str]], int] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a failure, 2 for a wrong word, 130 for an interruption.

    Args:
        args: its words.
        command: what they are for; that of distbelief which they begin with, where it is left off.
    """
    from distbelief.core.values import check_text

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
        # whoever read our output has gone; Python must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # of this machine: a full disk behind our output, no more descriptors, a folder that was deleted under us
        return _complain("; ".join(filter(None, [str(error), limit(error)])), 1)
    except Exception as error:
        return _complain(f"{type(error).__name__}: {error} ({_place(error)})", 1)


def _place(error: Exception) -> str:
    """The last line of ours that an unexpected error came through."""
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
