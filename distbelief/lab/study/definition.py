"""Definition of a study: its arms, targets and seeds, read from a TOML file."""

from __future__ import annotations

import contextlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from distbelief.core.records import Json
from distbelief.core.settings import option
from distbelief.errors import UsageError, unknown
from distbelief.lab.study.claims import FIGURES, SHAPES, VALUED, Claim

STUDIES = Path(__file__).parent / "studies"
MOST_TRIALS = 100_000
MOST_MEMBERS = 1000
START = "start"
PLACES = ("local", "simulated")
COMPRESSING = ("name", "compress", "options", "each")

Target = float | str
"""Test accuracy (0 to 1), or a loss in words: "loss=0.1" on the test set, "training-loss=0.1"."""
TARGETS = ("training-loss", "loss", "accuracy")
"""Figures of a target, the hardest last; a study's main target is its last one."""

Seeds = tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...]
Value = str | int | float | bool | list[str | int | float]
Options = dict[str, Value]


class Arm(msgspec.Struct, frozen=True):
    """One of a study's ways to train."""

    name: str
    task: str
    strategy: str
    place: str
    words: tuple[str, ...]
    tuned: str = ""
    """Option whose best value is chosen first, on other seeds."""
    grid: tuple[float, ...] = ()
    members: int = 1
    """Models trained one after another, each with its part of the budget; their outputs are averaged."""
    compresses: str = ""
    """Arm whose models it compresses; "" if it trains them itself."""
    problem: str = ""
    loss: float = 0.0

    def with_value(self, value: float | None) -> tuple[str, ...]:
        """Return its words of the command line, with the tuned option set to a value."""
        return (*self.words, self.tuned, f"{value:g}") if value is not None else self.words


class Study(msgspec.Struct, frozen=True):
    """Comparison of arms, fixed before the first run."""

    title: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    targets: tuple[Target, ...]
    """Targets, reached when two consecutive evaluations meet them; the hardest of a kind come last."""
    baseline: str = ""
    tuning_seeds: tuple[int, ...] = ()
    """Seeds for the search of grids, none of them in `seeds`."""
    question: str = ""
    claims: tuple[Claim, ...] = ()
    starts: tuple[Arm, ...] = ()
    cosine: bool = False
    """True if each trial ends by comparing a minibatch's gradient with that of all data."""
    observed: str = ""
    """Way that is compared with all others on each problem; "" without problems."""

    def start(self, arm: Arm) -> Arm | None:
        """Return the arm that trains the initial model of another, if any."""
        begins = not (arm.compresses or arm in self.starts)
        return next((start for start in self.starts if begins and start.task == arm.task), None)

    def arm(self, name: str) -> Arm:
        """Return an arm by name."""
        return next(arm for arm in self.arms if arm.name == name)


class StartTable(msgspec.Struct):
    """Table `[start]` of a file; without a task it applies to each problem."""

    strategy: str
    task: str = ""
    options: Options = {}


class ProblemTable(msgspec.Struct):
    """Table `[[problems]]` of a file; an arm without a task applies to each problem."""

    name: Annotated[str, Meta(min_length=1)]
    task: str
    loss: Annotated[float, Meta(gt=0)]
    options: Options = {}


class ArmTable(msgspec.Struct):
    """Table `[[arms]]` of a file: one arm, or one for each combination of values in `each`."""

    name: str
    task: str = ""
    strategy: str = ""
    place: str = ""
    members: Annotated[int, Meta(ge=1, le=MOST_MEMBERS)] = 1
    compress: str = ""
    options: Options = {}
    without: tuple[str, ...] = ()
    each: dict[str, list[str | int | float]] = {}
    grid: Annotated[dict[str, list[float]], Meta(max_length=1)] = {}


class StudyFile(msgspec.Struct, kw_only=True):
    """Tables and keys of a file."""

    title: Annotated[str, Meta(min_length=1)]
    arms: Annotated[list[ArmTable], Meta(min_length=1)]
    seeds: Annotated[Seeds, Meta(min_length=1)]
    tuning_seeds: Seeds = ()
    targets: tuple[Target, ...] = ()
    question: str = ""
    baseline: str = ""
    place: str = PLACES[0]
    cosine: bool = False
    start: StartTable | None = None
    problems: list[ProblemTable] = []
    observed: str = ""
    common: Options = {}
    cluster: Options = {}
    claims: tuple[Claim, ...] = ()


def parse_target(target: Target) -> tuple[str, float]:
    """Return the figure of a target, one of `TARGETS`, and its value.

    >>> parse_target(0.97), parse_target("training-loss=0.05")
    (('accuracy', 0.97), ('training-loss', 0.05))
    """
    of, _, value = str(target).rpartition("=")
    number = float(value) if re.fullmatch(r"\d*\.?\d+(e-?\d+)?", value) else 0.0
    of = of or TARGETS[-1]
    if of not in TARGETS or not 0 < number < (1 if of == TARGETS[-1] else float("inf")):
        raise UsageError(
            f"target {target}: is neither a test accuracy from 0 to 1 such as 0.97, nor a loss: loss=0.1 on the test "
            "set, training-loss=0.1"
        )
    return of, number


def hardness(target: Target) -> tuple[int, float]:
    """Return a sort key that puts harder targets last."""
    of, value = parse_target(target)
    return TARGETS.index(of), value if of == TARGETS[-1] else -value


def find(name: str) -> Path:
    """Return the file of a study: a path with the suffix .toml, or the name of one of the package's."""
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise UsageError(f"study {name}: there is no such file; the package's own: {', '.join(names())}")
        return Path(name)
    if name not in names():
        raise unknown("study", name, [*names(), "FILE.toml"])
    return STUDIES / f"{name}.toml"


def names() -> list[str]:
    """Return the names of the package's own studies."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


@contextlib.contextmanager
def at(place: object) -> Iterator[None]:
    """Prefix the errors of a block with their place in a file."""
    try:
        yield
    except (UsageError, msgspec.ValidationError) as error:
        raise UsageError(f"{place}: {error}") from error


def read(path: Path, seeds: int = 0, replicas: Sequence[int] = ()) -> Study:
    """Return the study in a file; `seeds` and `replicas`, if given, replace its own numbers of these."""
    try:
        table = tomllib.loads(path.read_text("utf-8-sig"))  # Windows editors begin a file with a byte order mark
    except OSError as error:
        raise UsageError(f"study {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"study {path} is no TOML: {error}") from error
    with at(path):
        _check_keys(table)
        file = msgspec.convert(table, StudyFile)
        file.seeds = tuple(range(file.seeds[0], file.seeds[0] + seeds)) or file.seeds
        scaled = [arm.each for arm in file.arms if "replicas" in arm.each]
        if replicas and not scaled:
            raise UsageError("--replicas: no arm has several numbers of replicas; leave it off")
        for each in scaled:
            each["replicas"] = [*replicas] or each["replicas"]
        return _study(file)


def _check_keys(table: Json) -> None:
    """Refuse unknown keys and name the nearest known one, before missing keys are reported."""
    tables = [("a study", table, StudyFile.__struct_fields__)]
    for name, kind in ((START, StartTable), ("problems", ProblemTable), ("claims", Claim), ("arms", ArmTable)):
        several = table.get(name, [])
        for number, entry in enumerate(several if isinstance(several, list) else [several]):
            known = COMPRESSING if name == "arms" and "compress" in entry else kind.__struct_fields__
            tables.append((f"{name}[{number}]" if several is not entry else name, entry, known))
    for place, entry, known in tables:
        for key in entry if isinstance(entry, dict) else ():
            if key not in known:
                raise unknown(f"key of {place}", key, known)


def _study(file: StudyFile) -> Study:
    file.common, file.cluster = _underscored(file.common), _underscored(file.cluster)
    ways = [table.name for table in file.arms if not (table.task or table.compress)] if file.problems else [""]
    if file.observed not in ways:
        raise unknown("way that is observed", file.observed, ways)
    arms: list[Arm] = []
    for table in file.arms:
        with at(f"arm {table.name!r}"):
            for problem in file.problems if table.name in ways else [None]:
                arms += _expanded(table, file, arms, problem)
    names = [arm.name for arm in arms]
    for key, seeds in (("seeds", file.seeds), ("tuning_seeds", file.tuning_seeds)):
        if len({*seeds}) < len(seeds):
            raise UsageError(f"{key}: one seed is listed twice")
    if both := {*file.seeds} & {*file.tuning_seeds}:
        raise UsageError(f"seed {min(both)} is in seeds and in tuning_seeds: tune on others")
    if len(arms) * len(file.seeds) > MOST_TRIALS:
        raise UsageError(f"{len(arms)} arms with {len(file.seeds)} seeds: at most {MOST_TRIALS} trials")
    starts = _starts(file, arms)
    _check_arms(arms, starts, file)
    baseline = file.baseline or names[0]
    if baseline not in names:
        raise unknown("arm", baseline, names)
    claims = []
    for claim in file.claims:
        with at(f"claim {claim.says!r}"):
            claims.append(_claim(claim, names))
    targets = tuple(sorted(file.targets, key=hardness))
    same = {name: getattr(file, name) for name in ("title", "seeds", "tuning_seeds", "question", "cosine", "observed")}
    return Study(arms=tuple(arms), targets=targets, baseline=baseline, claims=tuple(claims), starts=starts, **same)


def _claim(claim: Claim, names: Sequence[str]) -> Claim:
    """Return a claim with full names of arms; one name may stand for all arms of an `each`."""
    for key, value, known in (("of", claim.of, FIGURES), ("shape", claim.shape, SHAPES)):
        if value not in known:
            raise unknown(key, value, known)
    arms: list[str] = []
    for want in claim.arms or names:
        alike = [want] if want in names else [name for name in names if name.startswith(f"{want}, ")]
        if not alike:
            raise unknown("arm", want, names)
        arms += alike
    if len({*arms}) < len(arms):
        raise UsageError("an arm is named twice: none is compared with itself")
    if claim.shape in VALUED and len(claim.values) != len(arms):
        raise UsageError(f"{len(claim.values)} values for {len(arms)} arms: give one for each")
    if claim.shape not in VALUED and len(arms) < 2:
        raise UsageError(f"{claim.of} {claim.shape}: needs two arms or more")
    return msgspec.structs.replace(claim, arms=tuple(arms))


def _starts(file: StudyFile, arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Return the arms that train initial models; all others must share their tasks and name no start."""
    if (start := file.start) is None:
        return ()
    named = (
        {START: start.task} if start.task else {f"{START}, {problem.name}": problem.task for problem in file.problems}
    )
    for arm in arms:
        if arm.task not in named.values():
            tasks = ", ".join(named.values()) or "which names none"
            raise UsageError(f"arm {arm.name!r}: its task is not that of [start], {tasks}")
        if "--init-from" in arm.words:
            raise UsageError(f"arm {arm.name!r}: init-from: all begin with the model of [start]")
    words = _words({**_cluster(file, file.place), **_underscored(start.options)})
    return tuple(Arm(name, task, start.strategy, file.place, words) for name, task in named.items())


def _check_arms(arms: Sequence[Arm], starts: Sequence[Arm], file: StudyFile) -> None:
    names = [*(arm.name for arm in starts), *(arm.name for arm in arms)]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"two arms are called {twice!r}: give each a name of its own")
    tuned = [arm for arm in arms if arm.grid]
    if odd := next((arm for arm in tuned if len(arm.grid) != len(tuned[0].grid)), None):
        raise UsageError(
            f"arm {odd.name!r}: its grid has {len(odd.grid)} values, but that of {tuned[0].name!r} has "
            f"{len(tuned[0].grid)}: give all the same number"
        )
    if tuned and not file.tuning_seeds:
        raise UsageError(f"arm {tuned[0].name!r} has a grid: name tuning_seeds to search it")


def _expanded(
    table: ArmTable, file: StudyFile, before: Sequence[Arm], problem: ProblemTable | None = None
) -> list[Arm]:
    place = table.place or file.place
    if place not in PLACES:
        raise unknown("place", place, PLACES)
    options = _underscored(table.options)
    if table.compress:
        able = {arm.name: arm for arm in before if arm.place == "local" and not arm.compresses and arm.members == 1}
        if table.compress not in able:
            raise unknown("arm to compress", table.compress, able)
        of = able[table.compress]
        arm = Arm(table.name, of.task, of.strategy, of.place, (), compresses=of.name)
    else:
        tuned, grid = next(iter(table.grid.items()), ("", []))
        arm = Arm(
            table.name, table.task, table.strategy, place, (), tuned and option(tuned), tuple(grid), table.members
        )
        shared = dict(file.common)
        if problem:
            arm = msgspec.structs.replace(arm, task=problem.task, problem=problem.name, loss=problem.loss)
            shared.update(_underscored(problem.options))
        for name in table.without:
            if shared.pop(name.replace("-", "_"), None) is None:
                raise UsageError(f"without {name!r}: [common] has no such option")
        if table.members > 1 and (budget := {**shared, **options}.get("budget")):
            options["budget"] = _part(str(budget), table.members)
        options = {**_cluster(file, place), **shared, **options}
    posed = f"{problem.name}: {table.name}" if problem else table.name
    several = [dict(zip(table.each, values, strict=True)) for values in itertools.product(*table.each.values())]
    return [
        msgspec.structs.replace(
            arm,
            name=", ".join([posed, *(f"{key.replace('-', ' ').replace('_', ' ')} {choice[key]}" for key in choice)]),
            words=_words({**options, **_underscored(choice)}),
        )
        for choice in several
    ]


def _cluster(file: StudyFile, place: str) -> Options:
    return file.cluster if place == "simulated" else {}


def _underscored(options: Mapping[str, Value]) -> Options:
    return {name.replace("-", "_"): value for name, value in options.items()}


def _part(budget: str, members: int) -> str:
    """Return one member's part of a budget; an invalid budget stays as it is.

    >>> _part("45s", 4), _part("soon", 4)
    ('11.25s', 'soon')
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(\D*)", budget)
    return f"{float(match[1]) / members:g}{match[2]}" if match else budget


def _words(options: Options) -> tuple[str, ...]:
    """Return options as words of the command line.

    >>> _words({"lr": 0.1, "phantom": True, "keep": False, "optimizer_options": ["eps=1e-8"]})
    ('--lr', '0.1', '--phantom', '--optimizer-options', 'eps=1e-8')
    """
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [option(name), *map(str, values)]
    return tuple(words)
