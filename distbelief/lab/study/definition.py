"""A study: which arms it compares, by which targets and with which seeds; read from a TOML file."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from distbelief.core.settings import option
from distbelief.errors import UsageError, unknown
from distbelief.lab.study.claims import OF, SHAPES, VALUED, Claim

STUDIES = Path(__file__).parent / "studies"
"""The package's own."""
MOST_TRIALS = 100_000
MOST_MEMBERS = 1000
START = "start"
"""The name of what trains the model from which all arms begin."""
PLACES = ("local", "simulated")

Value = str | int | float | bool | list[str | int | float]
Table = Mapping[str, object]


class Arm(msgspec.Struct, frozen=True):
    """One way to train, of those that a study compares."""

    name: str
    task: str
    strategy: str
    place: str
    """local or simulated."""
    words: tuple[str, ...]
    """Its options, as on the command line."""
    tuned: str = ""
    """The option whose best value is looked for first, on other seeds."""
    grid: tuple[float, ...] = ()
    """The values that it may have."""
    members: int = 1
    """Models that it trains one after another, each with its part of the budget; their outputs are averaged."""
    compresses: str = ""
    """The arm whose models it makes smaller; "" where it trains one itself."""
    line: int = 0
    """Where it begins in the file."""

    def with_value(self, value: float | None) -> tuple[str, ...]:
        """Its words, with the tuned option at a value.

        >>> Arm("a", "digits", "single", "local", ("--epochs", "3"), "--lr", (0.1,)).with_value(0.1)
        ('--epochs', '3', '--lr', '0.1')
        """
        return (*self.words, self.tuned, f"{value:g}") if value is not None else self.words


class Study(msgspec.Struct, frozen=True):
    """What is compared, and how; fixed before anything is run."""

    title: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    targets: tuple[float, ...]
    """Test accuracies (0 to 1), reached when two evaluations in a row hold them."""
    baseline: str = ""
    """The arm that the others are compared with: the first, where none is named."""
    tuning_seeds: tuple[int, ...] = ()
    """On which grids are looked through: other ones than `seeds`."""
    question: str = ""
    claims: tuple[Claim, ...] = ()
    """What is expected of the arms."""
    start: Arm | None = None
    """What trains the model from which all arms begin, with the same seed; none, where each has its own beginning."""
    cosine: bool = False
    """Whether each trial measures how alike a minibatch's gradient and the whole one are, at its end."""

    def arm(self, name: str) -> Arm:
        """The arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)


def find(name: str) -> Path:
    """The file of a study: a path that ends in .toml, or the name of one of the package's.

    Raises:
        UsageError: there is no such one.
    """
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise UsageError(f"study {name}: there is no such file; the package's own: {', '.join(names())}")
        return Path(name)
    if name not in names():
        raise unknown("study", name, [*names(), "FILE.toml"])
    return STUDIES / f"{name}.toml"


def names() -> list[str]:
    """The names of the package's own studies."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def read(path: Path) -> Study:
    """The study in a file.

    Raises:
        UsageError: it is none; with the file, the line, and the nearest right word.
    """
    try:
        text = path.read_text("utf-8-sig")  # editors of Windows begin a file with a mark
        return Reader(str(path), text, tomllib.loads(text)).study()
    except OSError as error:
        raise UsageError(f"study {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"study {path} is no TOML: {error}") from error


class Reader:
    """Makes a study of a table, and says where in the file something is wrong.

    Args:
        file: its name.
        text: what stands in it.
        table: the same, as a table.
    """

    TOP = ("title", "question", "seeds", "tuning_seeds", "targets", "baseline", "place", "cosine", "start", "common",
           "cluster", "claims", "arms")  # fmt: skip
    CLAIM = ("says", "of", "arms", "shape", "values", "within")
    ARM = ("name", "task", "strategy", "place", "members", "compress", "options", "without", "each", "grid")
    BEGINNING = ("task", "strategy", "options")
    SHRINKING = ("name", "compress", "options", "each")
    """What an arm may say that compresses what another has trained."""

    def __init__(self, file: str, text: str, table: Table) -> None:
        self._file, self._lines, self._table = file, text.splitlines(), table

    def study(self) -> Study:
        """The study.

        Raises:
            UsageError: it is none.
        """
        table = self._table
        self._known(table, self.TOP, "a study", 0)
        title = self._text(table, "title", 0)
        arms: list[Arm] = []
        for index, one in enumerate(self._arms()):
            arms += self._compressing(index, one, arms) if "compress" in one else self._expanded(index, one)
        seeds, tuning = self._numbers("seeds"), self._numbers("tuning_seeds") if "tuning_seeds" in table else ()
        if not seeds:
            raise self._wrong("seeds: name one at least, such as seeds = [0, 1, 2, 3, 4]", "seeds")
        if both := sorted({*seeds} & {*tuning}):
            raise self._wrong(f"seed {both[0]} is in seeds and in tuning_seeds: tune on others", "tuning_seeds")
        start = self._start(arms) if "start" in table else None
        self._check_arms(arms, tuning)
        baseline = self._text(table, "baseline", 0) if "baseline" in table else arms[0].name
        if baseline not in [arm.name for arm in arms]:
            raise self._wrong(str(unknown("arm", baseline, [arm.name for arm in arms])), "baseline")
        if len(arms) * len(seeds) > MOST_TRIALS:
            raise self._wrong(f"{len(arms)} arms with {len(seeds)} seeds: at most {MOST_TRIALS} trials", "seeds")
        question = self._text(table, "question", 0) if "question" in table else ""
        claims = tuple(self._claim(one, [arm.name for arm in arms]) for one in self._claims())
        cosine = table.get("cosine", False) is True
        return Study(title, tuple(arms), seeds, self._targets(), baseline, tuning, question, claims, start, cosine)

    def _claims(self) -> list[Table]:
        claims = self._table.get("claims", [])
        if not isinstance(claims, list) or not all(isinstance(one, dict) for one in claims):
            raise self._wrong("claims: begin each with [[claims]]", "claims")
        return claims

    def _claim(self, one: Table, names: Sequence[str]) -> Claim:
        """A claim, whose arms are names, or one name for all of an arm that stands for several."""
        self._known(one, self.CLAIM, "a claim", 0)
        says, of, shape = (self._text(one, key, 0) for key in ("says", "of", "shape"))
        for key, value, known in (("of", of, OF), ("shape", shape, SHAPES)):
            if value not in known:
                raise self._wrong(str(unknown(f"{key} of a claim", value, known)), value)
        asked = [str(name) for name in _several(one.get("arms", list(names)))]
        found: list[str] = []
        for want in asked:
            meant = [want] if want in names else [name for name in names if name.startswith(f"{want}, ")]
            if not meant:
                raise self._wrong(str(unknown("arm", want, names)), want)
            found += meant
        if twice := next((name for name in found if found.count(name) > 1), ""):
            raise self._wrong(f"{twice!r} is named twice: no arm is compared with itself", says)
        values, within = _several(one.get("values", [])), one.get("within", 0.0)
        if not all(isinstance(value, int | float) for value in (*values, within)):
            raise self._wrong("values, within: must be numbers", says)
        if len(found) < 2 and shape not in VALUED:
            raise self._wrong(f"a claim that {of} {shape} is about two arms at least", says)
        if shape in VALUED and len(values) != len(found):
            raise self._wrong(f"{len(values)} values for {len(found)} arms: give one for each", says)
        numbers = tuple(float(value) for value in values)
        return Claim(says, of, tuple(found), shape, numbers, float(within))  # type: ignore[arg-type]  # checked above

    def _start(self, arms: Sequence[Arm]) -> Arm:
        """What all arms begin with, which are of its task and name no other beginning."""
        table, line = self._table["start"], self._line("start")
        if not isinstance(table, dict):
            raise self._wrong("start: must be a table: begin it with [start]", line)
        self._known(table, self.BEGINNING, "a start", 0)
        for key in ("task", "strategy"):
            if not isinstance(table.get(key), str):
                raise self._wrong(f'[start]: {key} is missing: write {key} = "..."', line)
        place = str(self._table.get("place", "local"))
        words = _words({**self._cluster(place), **self._options(table, "options", 0)})
        for arm in arms:
            if arm.task != table["task"]:
                raise self._wrong(f"arm {arm.name!r}: its task is not that of [start], {table['task']}", arm.line)
            if "--init-from" in arm.words:
                raise self._wrong(f"arm {arm.name!r}: init-from: all begin with what [start] trains", arm.line)
        return Arm(START, str(table["task"]), str(table["strategy"]), place, words, line=line)

    def _check_arms(self, arms: Sequence[Arm], tuning: Sequence[int]) -> None:
        names = {START} if "start" in self._table else set[str]()
        for arm in arms:
            if arm.name in names:
                raise self._wrong(f"two arms are called {arm.name!r}: give each a name of its own", arm.line)
            names.add(arm.name)
        tuned = [arm for arm in arms if arm.grid]
        if sizes := {len(arm.grid) for arm in tuned} - {len(arm.grid) for arm in tuned[:1]}:
            odd = next(arm for arm in tuned if len(arm.grid) in sizes)
            told = f"its grid has {len(odd.grid)} values, that of {tuned[0].name!r} {len(tuned[0].grid)}"
            raise self._wrong(f"arm {odd.name!r}: {told}: give all as many", odd.line)
        if tuned and not tuning:
            raise self._wrong(f"arm {tuned[0].name!r} has a grid: name tuning_seeds to look through it", tuned[0].line)

    def _arms(self) -> list[Table]:
        arms = self._table.get("arms")
        if not isinstance(arms, list) or not arms or not all(isinstance(one, dict) for one in arms):
            raise self._wrong("it has no arms: begin each with [[arms]]", 1)
        return arms

    def _expanded(self, index: int, one: Table) -> list[Arm]:
        """The arms that one table stands for: one, or one for each of the values in `each`."""
        self._known(one, self.ARM, "an arm", index + 1)
        name, task, strategy = (self._text(one, key, index + 1) for key in ("name", "task", "strategy"))
        place = one.get("place", self._table.get("place", "local"))
        if place not in PLACES:
            raise self._wrong(str(unknown("place", str(place), PLACES)), "place", index + 1)
        own = self._options(one, "options", index + 1)
        shared = self._options(self._table, "common", 0)
        left_out = one.get("without", [])
        for word in left_out if isinstance(left_out, list) else [left_out]:
            if str(word).replace("-", "_") not in shared:
                raise self._wrong(f"arm {name!r}: without {word!r}: [common] has no such option", "without", index + 1)
            del shared[str(word).replace("-", "_")]
        members, cluster = self._members(one, index + 1), self._cluster(str(place))
        if members > 1 and (budget := {**shared, **own}.get("budget")):
            own["budget"] = _part(str(budget), members)
        grid, line = self._grid(one, index + 1), self._line("", index + 1)
        return [
            Arm(f"{name}{told}", task, strategy, str(place), _words({**cluster, **shared, **own, **chosen}), *grid,
                members, line=line)
            for told, chosen in self._each(one, index + 1)
        ]  # fmt: skip

    def _cluster(self, place: str) -> dict[str, Value]:
        return self._options(self._table, "cluster", 0) if place == "simulated" else {}

    def _members(self, one: Table, arm: int) -> int:
        members = one.get("members", 1)
        if type(members) is not int or not 1 <= members <= MOST_MEMBERS:
            raise self._wrong(f"members: must be a whole number from 1 to {MOST_MEMBERS}", "members", arm)
        return members

    def _compressing(self, index: int, one: Table, before: Sequence[Arm]) -> list[Arm]:
        """The arms that one table stands for which compress what another arm has trained."""
        self._known(one, self.SHRINKING, "an arm that compresses another", index + 1)
        name, other = (self._text(one, key, index + 1) for key in ("name", "compress"))
        able = [arm for arm in before if arm.place == "local" and not arm.compresses and arm.members == 1]
        if other not in [arm.name for arm in able]:
            names = [arm.name for arm in able]
            raise self._wrong(str(unknown("arm to compress", other, names)), "compress", index + 1)
        of = next(arm for arm in able if arm.name == other)
        own, line = self._options(one, "options", index + 1), self._line("", index + 1)
        return [
            Arm(f"{name}{told}", of.task, of.strategy, of.place, _words({**own, **chosen}), compresses=other, line=line)
            for told, chosen in self._each(one, index + 1)
        ]

    def _each(self, one: Table, arm: int) -> list[tuple[str, dict[str, Value]]]:
        """What each of the arms of one table has of its own: how its name goes on, and options."""
        each = self._options(one, "each", arm)
        several = itertools.product(*map(_several, each.values()))
        chosen: list[dict[str, Value]] = [dict(zip(each, values, strict=True)) for values in several]
        return [("".join(f", {key.replace('_', ' ')} {value}" for key, value in own.items()), own) for own in chosen]

    def _grid(self, one: Table, arm: int) -> tuple[str, tuple[float, ...]]:
        grid = self._options(one, "grid", arm)
        if not grid:
            return "", ()
        [(name, values), *more] = grid.items()
        numbers = _several(values)
        if more or not all(isinstance(value, int | float) for value in numbers):
            raise self._wrong("grid: is of one option and its numbers, such as {lr = [0.05, 0.1]}", "grid", arm)
        return option(name), tuple(float(value) for value in numbers)

    def _options(self, table: Table, key: str, arm: int) -> dict[str, Value]:
        found = table.get(key, {})
        if not isinstance(found, dict):
            raise self._wrong(f"{key}: must be a table of options, such as {{lr = 0.1}}", key, arm)
        for name, value in found.items():
            if not isinstance(value, str | int | float | bool | list):
                raise self._wrong(f"{key}: {name} has a value that is no text, number or list", name, arm)
        return {name.replace("-", "_"): value for name, value in found.items()}

    def _targets(self) -> tuple[float, ...]:
        targets = _several(self._table.get("targets", []))
        if not all(isinstance(one, int | float) and 0 < one < 1 for one in targets):
            raise self._wrong("targets: are test accuracies, fractions from 0 to 1", "targets")
        return tuple(sorted(float(one) for one in targets))

    def _numbers(self, key: str) -> tuple[int, ...]:
        values = self._table.get(key)
        if not isinstance(values, list) or not all(type(one) is int and 0 <= one < 2**63 for one in values):
            raise self._wrong(f"{key}: must be a list of whole numbers, such as [0, 1, 2]", key)
        if len({*values}) < len(values):
            raise self._wrong(f"{key}: one of them is there twice", key)
        return tuple(values)

    def _text(self, table: Table, key: str, arm: int) -> str:
        found = table.get(key)
        if not isinstance(found, str) or not found.strip():
            raise self._wrong(f'{"arm" if arm else "study"}: {key} is missing: write {key} = "..."', key, arm)
        return found

    def _known(self, table: Table, names: Sequence[str], what: str, arm: int) -> None:
        for name in table:
            if name not in names:
                raise self._wrong(str(unknown(f"key of {what}", name, names)), name, arm)

    def _line(self, key: str, arm: int = 0) -> int:
        """The line of a key, of the arm of that number (from 1), or outside of all; where that arm begins, where it is
        not found.
        """
        return line_of(self._lines, key, arm)

    def _wrong(self, told: str, where: str | int, arm: int = 0) -> UsageError:
        """The error at a key, or at a line."""
        line = where if isinstance(where, int) else self._line(where, arm)
        if line == 1 and isinstance(where, str):
            line = next((number for number, one in enumerate(self._lines, 1) if where in one), line)
        return UsageError(f"{self._file}:{line}: {told}")


def line_of(lines: Sequence[str], key: str, arm: int = 0) -> int:
    """The line, from 1, of a key in a TOML text, of the arm of a number (from 1); where that begins, where the key is
    not found, or the first line.

    >>> line_of(["title = 'x'", "[[arms]]", "name = 'a'", "[[arms]]", "options = {lr = 1}"], "lr", 2)
    5
    """
    begins = [number for number, line in enumerate(lines, 1) if line.strip().startswith("[[arms]]")]
    start = begins[arm - 1] if 0 < arm <= len(begins) else 1
    later = [number for number in begins if number > start]
    stop = (later or [len(lines) + 1])[0] if arm else len(lines) + 1
    asked = re.compile(rf"""(?:^|[\s{{,\[."']){re.escape(key).replace("_", "[-_]")}["']?\s*[=\].]""")
    return next((number for number in range(start, stop) if key and asked.search(lines[number - 1])), start)


def _part(budget: str, members: int) -> str:
    """The part of a budget that each of several has; what is no time is told of where options are checked.

    >>> _part("45s", 4), _part("soon", 4)
    ('11.25s', 'soon')
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(\D*)", budget)
    return f"{float(found[1]) / members:g}{found[2]}" if found else budget


def _several(value: object) -> list[str | int | float]:
    return value if isinstance(value, list) else [value]  # type: ignore[list-item]  # checked by who asks


def _words(options: Mapping[str, Value]) -> tuple[str, ...]:
    """Options as words of the command line.

    >>> _words({"lr": 0.1, "phantom": True, "keep": False, "optimizer_options": ["eps=1e-8"]})
    ('--lr', '0.1', '--phantom', '--optimizer-options', 'eps=1e-8')
    """
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            words += [option(name), *([] if value is True else map(str, _several(value)))]
    return tuple(words)
