"""The house keeps its own rules: what every file of the package must be like, read from the source itself."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

from sources import FILES, nodes_of, trees

STARTED = {
    "__main__.py", "cli/main.py", "lab/study/problems.py", "places/processes/ends_with_parent.py",
}  # fmt: skip
"""Files that a command or the forkserver starts, by name or by a word of the user's, and nobody imports."""
REFERENCES = ("testing/", "transport/inline.py")
"""Files that only tests need to import: ours and those of whoever writes another transport."""
FUNCTION_LINES = 70


def found(pattern: str) -> dict[str, list[str]]:
    matches = {name: re.findall(pattern, text) for name, text in FILES.items()}
    return {name: matched for name, matched in matches.items() if matched}


def test_a_file_says_what_it_is() -> None:
    opened = {name: text.split("\n", 1)[0] for name, text in FILES.items()}
    wrong = {name: first for name, first in opened.items() if not re.match(r'r?"""\S.*', first)}
    assert not wrong, f"open each with one line that says what it is: {wrong}"


def classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for nodes in nodes_of().values():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


CLASSES = classes()


def bases_of(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}


def documented(node: ast.ClassDef) -> set[str]:
    """Methods that a class, or one that it inherits from, documents."""
    methods = {m.name for m in node.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
    bases = [base for name in bases_of(node) - {node.name} for base in CLASSES.get(name, [])]
    return methods.union(*map(documented, bases))


PROTOCOLS = [node for nodes in CLASSES.values() for node in nodes if "Protocol" in bases_of(node)]
OF_PROTOCOLS = set[str]().union(*map(documented, PROTOCOLS))


def undocumented(node: ast.AST) -> set[str]:
    """Public methods that a class adds without a word; those of a base or of a protocol are documented there."""
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return set()
    methods = {m.name for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")}
    return methods - documented(node) - OF_PROTOCOLS


def test_functions_fit_a_screen_and_what_is_public_is_documented() -> None:
    long, silent = [], []
    for name, nodes in nodes_of().items():
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{name}: {node.name} has {lines} lines"] * (lines > FUNCTION_LINES)
        for node in trees()[name].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                silent += [f"{name}: {node.name}"] * (not ast.get_docstring(node))
        silent += [f"{name}: {node.name}.{method}" for node in nodes for method in undocumented(node)]
    assert not long, f"{FUNCTION_LINES} are allowed, cut them: {long}"
    assert not silent, f"they are public and have no docstring: {silent}"


def test_nothing_is_put_off() -> None:
    assert not found(r"\b(?:TODO|FIXME|XXX)\b")


def test_nothing_is_unpickled() -> None:
    """A pickle from a file or a peer runs whatever it likes."""
    assert not found(r"import (?:pickle|marshal|shelve|dill|cloudpickle)\b|from pickle\b|torch\.load\(")


def test_the_text_of_a_role_is_made_and_taken_apart_in_one_place() -> None:
    kind = r"(?:replica|shard|standby)"
    made = rf"""f["'](?:[^"'{{]*[ (:])?{kind} \{{"""
    taken = (
        rf"""\.(?:startswith|removeprefix)\(\(?["']{kind} ?["']|\.(?:r?partition|split)\(["'] ["'](?:, 1)?\)\[[01]\]"""
    )
    done = found(f"{made}|{taken}")
    assert done.keys() <= {"core/roles.py"}, f"they do with a role's text what core/roles.py is for: {done}"


ROOM_FILES = 16


def test_a_room_has_few_files() -> None:
    rooms = Counter(str(Path(name).parent) for name in FILES)
    for room, files in rooms.items():
        told = f"{room} has {files} files, {ROOM_FILES} are allowed: open a room in it for what belongs together"
        assert files <= ROOM_FILES, told


ANYS = {
    "server/shard.py": 1,
    "core/consistency.py": 1,
    "core/conversations/table.py": 1,
    "core/effects.py": 4,
    "core/events.py": 2,
    "core/settings.py": 1,
    "core/values.py": 6,
    "server/layerwise.py": 1,
    "server/optimizers.py": 1,
    "strategies/players.py": 2,
    "strategies/sandblaster/stories.py": 1,
    "strategies/single/loop.py": 1,
    "core/records.py": 1,
    "core/optimizer.py": 1,
}
"""How often files of rooms that know what they handle say `Any`: for payloads that are opaque to them, and where that
is left; may only fall."""


ROOMS = ("coordination/", "core/", "schedules/", "server/", "sharding/", "strategies/")


def test_any_is_for_what_is_opaque() -> None:
    said = {
        name: sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
        for name, nodes in nodes_of().items()
        if name.startswith(ROOMS)
    }
    more = {name: count for name, count in said.items() if count > ANYS.get(name, 0)}
    assert not more, f"they say Any more often than ANYS allows, name the types: {more}"
    less = {name: said.get(name, 0) for name, allowed in ANYS.items() if said.get(name, 0) < allowed}
    assert not less, f"they say Any less often than ANYS has it, lower it: {less}"


def test_what_the_type_checker_is_told_to_ignore_has_its_reason() -> None:
    told = [f"{name}: {line.strip()}" for name, text in FILES.items() for line in text.splitlines() if IGNORE in line]
    bare = [line for line in told if not re.search(IGNORE + r"\[[a-z-]+\]  # \w", line)]
    assert not bare, f"say which error is ignored and why, as `{IGNORE}[code]  # why`, in {bare}"


IGNORE = "# type: ignore"
DECLARING = ("Struct", "NamedTuple", "Protocol", "TypedDict", "Enum", "StrEnum", "IntEnum")
"""Bases whose classes declare their fields."""


TWICE = {"Boundary": "a message of what crosses at such an edge of a pipeline", "Cut": "of a value, and of a model"}
"""Names of two classes, and what they are: messages keep theirs; the others are left, and may only become fewer."""


def test_no_two_classes_have_one_name() -> None:
    twice = {name for name, nodes in CLASSES.items() if len(nodes) > 1}
    assert not (new := twice - TWICE.keys()), f"{sorted(new)} are names of several classes: name each by what it is"
    assert not (more := [name for name, nodes in CLASSES.items() if len(nodes) > 2]), f"{more} stand three times"
    assert not (gone := TWICE.keys() - twice), f"{sorted(gone)} stand once now: take them out of TWICE"


def bases(node: ast.ClassDef) -> list[str]:
    """The names of a class's bases, without their modules and parameters."""
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


def lineage(node: ast.ClassDef) -> list[ast.ClassDef]:
    """A class, and those of the package that it is made from."""
    parents = [parent for base in bases(node) for parent in CLASSES.get(base, ()) if parent is not node]
    return [node, *(one for parent in parents for one in lineage(parent))]


def set_in(function: ast.FunctionDef) -> set[str]:
    """The attributes that a method sets on its object."""
    used = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "self"}


def declared(node: ast.ClassDef) -> set[str]:
    """What a class alone gives its objects: fields, values of the class, slots, properties, what `__init__` sets."""
    fields = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    fields = fields or any(base in DECLARING for one in lineage(node) for base in bases(one))
    found: set[str] = set()
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and (fields or part.value):
            found.add(part.target.id)
        elif isinstance(part, ast.Assign):
            found |= {target.id for target in part.targets if isinstance(target, ast.Name)}
            if ast.unparse(part.targets[0]) == "__slots__":
                found |= set(ast.literal_eval(part.value))
        elif isinstance(part, ast.FunctionDef):
            found |= set_in(part) if part.name == "__init__" or (fields and part.name == "__post_init__") else set()
            found |= {part.name} if part.decorator_list else set()
    return found


def test_every_attribute_is_born_in_init_or_declared() -> None:
    late: list[str] = []
    for name, nodes in nodes_of().items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                own = {one for part in node.body if isinstance(part, ast.FunctionDef) for one in set_in(part)}
                known = {attribute for one in lineage(node) for attribute in declared(one)} if own else set()
                late += [f"{name}: {node.name}.{attribute}" for attribute in sorted(own - known)]
    assert not late, f"{late} are set and declared nowhere: give each a value in __init__"


MODULES = {"distbelief." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name for name in FILES}


def imports(nodes: list[ast.AST]) -> set[str]:
    """The files of the package that a file imports anywhere, for types alone and in functions too."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return {MODULES[module] for module in found if module in MODULES}


def test_no_files_import_each_other_in_a_circle() -> None:
    above = {name: imports(nodes) - {name} for name, nodes in nodes_of().items()}
    while ends := {name for name, needs in above.items() if not needs & above.keys()}:
        above = {name: needs for name, needs in above.items() if name not in ends}
    circle: list[str] = []
    following = min(above, default="")
    while following and following not in circle:
        circle.append(following)
        following = min(above[following] & above.keys())
    told = " -> ".join([*circle[circle.index(following) :], following]) if following else ""
    assert not circle, f"{told}: move what they share into a file below them"


def test_every_file_is_imported_by_another() -> None:
    imported: set[str] = set()
    for name, text in FILES.items():
        for node in nodes_of()[name]:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if name in ("__init__.py", "references.py"):
            imported |= {f"distbelief.{place}" for place in re.findall(r'"([a-z_.]+)"', text)}
    for sinks in tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "entry-points"
    ].values():
        imported |= {place.partition(":")[0] for place in sinks.values()}
    modules = {
        name: "distbelief." + name.removesuffix(".py").replace("/", ".")
        for name in FILES
        if not name.endswith("__init__.py")
    }
    tests = {path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}
    lonely = [name for name, module in modules.items() if module not in imported and name not in STARTED]
    lonely = [
        name for name in lonely if not (name.startswith(REFERENCES) and any(modules[name] in text for text in tests))
    ]
    assert not lonely, f"nobody imports {lonely}: use them or take them away"
