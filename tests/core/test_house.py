"""The house keeps its own rules: what every file of the package must be like, read from the source itself."""

import ast
import re
from pathlib import Path

import pytest

from distbelief.cli.commands import BENCHES

PACKAGE = Path(__file__).parents[2] / "distbelief"
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
STARTED = {"__main__.py", "cli/main.py", *(f"bench/{name}.py" for name in BENCHES)}
"""Files that a command starts, by name or by a word of the user's, and nobody imports."""
REFERENCES = ("testing/", "transport/inline.py")
"""Files that only tests need to import: ours and those of whoever writes another transport."""
FUNCTION_LINES = 70


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_what_it_is(name: str) -> None:
    text = FILES[name]
    first = text.split("\n", 1)[0]
    assert re.match(r'r?"""\S.*', first), f"{name} opens with {first!r}: open it with one line that says what it is"


@pytest.mark.parametrize("name", FILES)
def test_functions_fit_a_screen_and_what_is_public_is_documented(name: str) -> None:
    tree = ast.parse(FILES[name])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{name}: {node.name} has {lines} lines, {FUNCTION_LINES} are allowed: cut it"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}: {node.name} is public and has no docstring"


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_put_off_and_nothing_is_unpickled(name: str) -> None:
    text = FILES[name]
    assert not (found := re.findall(r"\b(?:TODO|FIXME|XXX)\b", text)), f"{name} puts off work: {found}"
    # a pickle from a file or a peer runs whatever it likes
    assert not (found := re.findall(r"import (?:pickle|marshal|shelve|dill|cloudpickle)\b|from pickle\b|torch\.load\(", text)), f"{name}: {found}"


@pytest.mark.parametrize("name", [name for name in FILES if name != "core/roles.py"])
def test_the_text_of_a_role_is_made_and_taken_apart_in_one_place(name: str) -> None:
    kind = r"(?:replica|shard|standby)"
    made = rf"""f["'](?:[^"'{{]*[ (:])?{kind} \{{"""
    taken = rf"""\.(?:startswith|removeprefix)\(\(?["']{kind} ?["']|\.(?:r?partition|split)\(["'] ["'](?:, 1)?\)\[[01]\]"""
    assert not (found := re.findall(f"{made}|{taken}", FILES[name])), f"{name} does with a role's text what core/roles.py is for: {found}"


MODULES = {"distbelief." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): name for name in FILES}


def imports(tree: ast.AST) -> set[str]:
    """The files of the package that a file imports anywhere, for types alone and in functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return {MODULES[module] for module in found if module in MODULES}


def test_no_files_import_each_other_in_a_circle() -> None:
    above = {name: imports(ast.parse(text)) - {name} for name, text in FILES.items()}
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
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if name == "__init__.py":
            imported |= {f"distbelief.{place}" for place in re.findall(r'"([a-z_.]+)"', text)}
    modules = {name: "distbelief." + name.removesuffix(".py").replace("/", ".") for name in FILES if not name.endswith("__init__.py")}
    tests = {path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}
    lonely = [name for name, module in modules.items() if module not in imported and name not in STARTED]
    lonely = [name for name in lonely if not (name.startswith(REFERENCES) and any(modules[name] in text for text in tests))]
    assert not lonely, f"nobody imports {lonely}: use them or take them away"
