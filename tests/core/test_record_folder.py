"""The run folder: what is refused, and that a file is whole or untouched."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distbelief.core.effects import SCRIPT
from distbelief.core.portions import START
from distbelief.core.settings import Plan, Settings
from distbelief.errors import CheckpointError, UsageError
from distbelief.job import Job
from distbelief.places.attempt import Attempt
from distbelief.record.checkpoints import Checkpoints
from distbelief.record.folder import OWNER_ALONE, RunFolder, write_atomically, written_whole
from distbelief.record.recorder import Recorder
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.strategies import Downpour


def test_a_folder_with_something_in_it_is_refused_with_both_remedies(tmp_path):
    (tmp_path / "old").write_text("something")
    with pytest.raises(UsageError, match=r"not empty; name another folder.*--resume"):
        RunFolder.create(tmp_path, "mnist-downpour")


def test_an_empty_folder_and_a_new_one_in_new_folders_are_taken(tmp_path):
    assert RunFolder.create(tmp_path, "x").path == tmp_path
    assert RunFolder.create(tmp_path / "a" / "b", "x").path.is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_file_is_refused(tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunFolder.create(tmp_path / out, "x")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, number):
    def refuse(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(UsageError, match=f"cannot be written: {os.strerror(number)}.*--out"):
        RunFolder.create(tmp_path, "x")


def test_default_folders_carry_the_name_and_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _format: "20260101-000000")
    names = [RunFolder.create(None, "mnist-downpour").path.as_posix() for _ in range(3)]
    first = "runs/mnist-downpour-20260101-000000"
    assert names == [first, f"{first}-2", f"{first}-3"]


@pytest.mark.parametrize("make", [lambda _: None, lambda path: path.mkdir()])
def test_what_is_no_run_cannot_be_opened(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder.open(tmp_path / "run")


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b'{"task": "mn'])
def test_a_corrupt_job_is_one_clear_error(tmp_path, text):
    (tmp_path / "job.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"job\.json is corrupt.*train anew"):
        RunFolder.open(tmp_path).read_job()


def test_a_job_is_read_back_as_it_was_written(tmp_path):
    folder = RunFolder.create(tmp_path, "x")
    job = {"task": "mnist", "settings": {"replicas": 2, "lr": 0.05}, "seed": 3, "versions": {"torch": "2"}}
    folder.write_job(job)
    assert RunFolder.open(tmp_path).read_job() == job
    folder.job.unlink()
    with pytest.raises(CheckpointError, match="got that far"):
        folder.read_job()


def test_one_job_at_a_time_has_a_folder(tmp_path: Path) -> None:
    folder, other = RunFolder(tmp_path), RunFolder(tmp_path)
    assert not other.locked
    folder.lock()
    assert other.locked
    with pytest.raises(
        UsageError, match=r"is the run folder of a job that is running: .*--resume; or name another folder with --out"
    ):
        other.lock()
    folder.unlock()
    assert not other.locked
    other.lock()
    del other
    assert not folder.locked, "a folder that nobody has any more is let go of"


def test_a_job_that_comes_second_takes_nothing_away(tmp_path: Path) -> None:
    """Two began at once in one folder: the second removed the folder of the first, which had locked it and not yet
    written to it.
    """
    first = RunFolder.create(tmp_path / "run", "digits-downpour")
    first.lock()
    job = Job("digits", out=str(first.path))
    with pytest.raises(UsageError, match="is the run folder of a job that is running"):
        Attempt(job, job.settings(), None, 0.0)
    assert not first.gone


@pytest.mark.parametrize("taken", [False, True], ids=["deleted", "another job's"])
def test_a_folder_that_is_gone_is_seen_and_made_again_where_no_other_job_has_made_it(
    tmp_path: Path, taken: bool
) -> None:
    folder, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.lock()
    assert not folder.gone
    folder.path.rename(tmp_path / "aside")
    assert folder.gone
    if taken:
        other.path.mkdir()
        other.lock()
        assert folder.gone
        with pytest.raises(UsageError, match="is the run folder of a job that is running"):
            folder.make_again({})
    else:
        folder.make_again({"seed": 3})
        assert (folder.gone, other.locked, other.read_job()) == (False, True, {"seed": 3})


HOLDER = """
import os, pathlib, sys
from distbelief.record.folder import RunFolder
folder = RunFolder(pathlib.Path(sys.argv[1]))
folder.lock()
if sys.argv[2] == "forks" and os.fork() == 0:
    sys.exit()  # an end in peace, with whatever Python does at exit
if sys.argv[2] == "forks":
    os.wait()
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["alone", "forks"])
@pytest.mark.long
def test_a_lock_dies_with_its_process_and_not_with_a_child_of_it(tmp_path: Path, how: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), how], **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        assert RunFolder(tmp_path).locked
        process.kill()
        process.wait()
        assert not RunFolder(tmp_path).locked


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch, broken):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022, 0o002], ids=oct)
def test_all_files_of_a_run_are_for_whom_the_umask_says(tmp_path: Path, umask: int, monkeypatch) -> None:
    """And nothing of theirs is changed afterwards: there are file systems that refuse it."""
    monkeypatch.setattr(os, "chmod", None)
    before = os.umask(umask)
    try:
        layout = lay_out([Tensor("w", (40,), "float32")])
        plan, store = (
            Plan(Settings(strategy=Downpour()), layout, cut(layout, 1, 1), 10),
            Checkpoints(tmp_path / "run"),
        )
        folder = RunFolder.create(tmp_path / "run", "x")
        folder.write_job({})
        part = torch.zeros(layout.moving, dtype=torch.uint8)
        store.save_part(1, "shard-0", {"vector.moving": part, "vector.frozen": part[:0]}, {})
        store.save_part(1, SCRIPT, {SCRIPT: torch.zeros(1, dtype=torch.uint8)}, {})
        store.commit(1, plan, START, 0, script=True)
        Recorder(folder, {}).finish()
    finally:
        os.umask(before)
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert len([path for path in made if path.is_file()]) == 9
    assert {path.name for path, mode in made.items() if mode != (0o777 if path.is_dir() else 0o666) & ~umask} == set()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EPERM])
def test_a_file_system_that_does_not_sync_is_none_that_cannot_be_written(tmp_path: Path, monkeypatch, number) -> None:
    def refuse(_descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    write_atomically(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"new")]


def test_what_is_for_its_owner_alone_is_so_from_its_first_byte(tmp_path: Path) -> None:
    with written_whole(tmp_path / "file", OWNER_ALONE) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == OWNER_ALONE
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == OWNER_ALONE
