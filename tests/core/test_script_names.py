"""What a user's script may be called: a file, or a module of a package as `python -m` has it."""

import sys
from pathlib import Path

import pytest

from distbelief.cli import options
from distbelief.cli.arguments import arguments_of
from distbelief.cli.commands import JoinOptions
from distbelief.errors import UsageError
from distbelief.places.processes.script import check_file, file_of, hint, module_spec

RELATIVE = ImportError("attempted relative import with no known parent package")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: with a package, folders without an `__init__.py`, and a notebook."""
    for name in ("whole/__init__.py", "whole/train.py", "whole/__main__.py", "plain/inner/train.py", "cells.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise AssertionError('it is imported')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [("whole.train", "whole/train.py"), ("whole", "whole/__main__.py"), ("plain.inner.train", "plain/inner/train.py")],
)
def test_a_module_is_known_by_its_name_and_nothing_of_its_package_is_imported(
    folder: Path, name: str, file: str
) -> None:
    before = set(sys.modules)
    spec = module_spec(name)
    assert (spec.origin, spec.parent) == (str(folder / file), name.removesuffix(".train"))
    assert file_of(["-m", name, "--lr"]) == str(folder / file)
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["-m"], r"-m: which module\? Write its name after it"),
        (["-m", "whoel.train"], r"-m whoel.train: there is no module 'whoel' in .*, nor among what is installed"),
        (["-m", "whole.trian"], "-m whole.trian: there is no module 'trian' in whole; name it as python -m does"),
        (["-m", "plain"], "-m plain.__main__: there is no module '__main__' in plain"),
        (["-m", "whole/train.py"], "takes the name of a module, not of a file: -m whole.train, or whole/train.py"),
        (["-m", "whole..train"], "there is no module '' in whole"),
        (["-m", "_ctypes"], "is no Python source"),
        (["cells.ipynb"], r"is a notebook, .*: jupyter nbconvert --to script cells.ipynb, and launch cells.py"),
        (["train.py"], "script 'train.py' is no file; name the Python script that every replica runs"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_a_script_that_cannot_be_run_is_refused_before_anything_is_started(script: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_file(script)


def test_a_file_of_a_package_that_was_run_by_itself_is_named_as_a_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hint(["whole/train.py"], RELATIVE).endswith("launched by its name: -m whole.train")
    assert hint(["whole/inner/train.py"], RELATIVE).endswith(": -m whole.inner.train")
    assert hint(["plain/inner/train.py"], RELATIVE).endswith(f", in the folder {folder}/plain: -m inner.train")
    monkeypatch.chdir("whole")
    assert hint(["train.py"], RELATIVE).endswith(f"by its name, in the folder {folder}: -m whole.train")
    assert not hint(["train.py"], ImportError("no module"))
    assert not hint(["-m", "whole.train"], RELATIVE)


def test_options_end_where_a_module_is_named() -> None:
    script = ["-m", "whole.train", "--replicas", "9"]
    launched, joins = options.arguments("launch", "downpour"), arguments_of(JoinOptions)
    words = ["--replicas", "3", "--json"]
    assert options.split_script(launched, [*words, *script]) == (words, script)
    assert options.split_script(joins, ["--device", "cpu", *script]) == (["--device", "cpu"], script)
