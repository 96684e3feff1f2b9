"""`distbelief train TASK auto`: the way of training that was measured to be the fastest on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from distbelief.cli import options
from distbelief.core.settings import option
from distbelief.errors import UsageError

AUTO = "auto"
CHOSEN = ("--replicas", "--partitions", "--shards")
"""Options that the plan chooses."""
PLAIN = {"device": "cpu", "threads": 1, "precision": "float32", "fixed_point": ""}
"""Options with which the candidates of a plan are run."""


def chosen(task: str, rest: Sequence[str]) -> list[str]:
    """The words of `train` for what is fastest here: task, strategy and options; it is told why.

    Args:
        task: what is trained.
        rest: the options that were given, which every strategy must have.

    Raises:
        UsageError: an option that not every strategy has, or that a plan knows nothing of.
    """
    for word in rest:
        if word.partition("=")[0] in CHOSEN:
            raise UsageError(f"{word}: auto chooses it; leave it off, or name a strategy")
        if word == "--resume":
            raise UsageError("--resume goes on with what was chosen: name the strategy that job.json of the run names")
    single = options.parse("train", task, "single", rest)
    single.job(task).settings()
    for name, value in PLAIN.items():
        if single.values[name] != value:
            raise UsageError(
                f"{option(name)} {single.values[name]}: auto plans for {value or 'none'}; name a strategy, or leave it "
                "off"
            )
    from distbelief.cli.cost_tables import progress
    from distbelief.lab.cost.options import PlanRequest
    from distbelief.lab.plan import plan as planning

    with progress(f"planning {task}") as show:
        data = {name: single.values[name] for name in ("batch_size", "data_dir")}
        plan = planning.plan(task, PlanRequest(optimizer=single.optimizer(), **data), show)
    if not (single.showing.quiet or single.showing.json):
        command = f"distbelief train {task} {plan.first.command}"
        print(f"{plan.why}\nplanned in {plan.seconds:.0f} s\n{command}", flush=True)
    return [task, *plan.first.command.split(), *rest]
