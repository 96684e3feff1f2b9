"""Our hook in a script with DistributedDataParallel: the same parameters, and an end where a rank is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hooked import play
from patience import SECONDS

import distbelief as db
from benchmarks.parts.peers import Peer, Peers
from distbelief.errors import UsageError

ROOT = Path(__file__).parents[2]
WAYS = {"native": "native", "shared": "shared", "auto": "shared", "apart:auto": "native", "half:auto": "native"}
"""What is asked for, and what is chosen."""
RUN = {2: ("plain", "native", "refused"), 3: ("plain", *WAYS), 4: ("pairs:plain", "pairs:native", "pairs:shared")}
"""By how many ranks, the ways that they go through."""
Saved = Callable[[int], dict[tuple[str, int], tuple[list[torch.Tensor], str]]]


@contextmanager
def ranks(count: int, folder: Path, *words: str) -> Iterator[list[Peer]]:
    """So many processes of the script."""
    with Peers() as peers:
        yield [peers.start(f"rank {rank}", 1, play, str(folder), rank, count, *words) for rank in range(count)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What each of so many ranks ends with, by how they add up, and what was chosen."""

    @cache
    def of(count: int) -> dict[tuple[str, int], tuple[list[torch.Tensor], str]]:
        folder, words = tmp_path_factory.mktemp("hooked"), RUN[count]
        with ranks(count, folder, *words) as started:
            assert [one.hear() for one in started] == ["done"] * count
            for one in started:
                one.process.join(SECONDS)
            assert [one.process.exitcode for one in started] == [0] * count
        trained = [word for word in words if word != "refused"]
        return {(word, rank): torch.load(folder / f"{word} {rank}") for word in trained for rank in range(count)}

    return of


def test_two_ranks_have_the_mean_of_their_gradients(saved: Saved) -> None:
    """As plain DDP does; and what not all ranks can have is refused on all, as often as it is asked for."""
    for rank in range(2):
        ours, plain = (saved(2)[word, rank][0] for word in ("native", "plain"))
        assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_those_of_plain_ddp_and_the_same_bits_on_all_ranks(saved: Saved, way: str) -> None:
    first, _ = saved(3)[way, 0]
    for ours, plain in zip(first, saved(3)["plain", 0][0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    for rank in range(1, 3):
        assert all(map(torch.equal, first, saved(3)[way, rank][0]))


@pytest.mark.parametrize("way", ["native", "shared"])
def test_pairs_of_ranks_with_a_group_of_their_own(saved: Saved, way: str) -> None:
    for rank in range(4):
        for ours, plain in zip(saved(4)[f"pairs:{way}", rank][0], saved(4)["pairs:plain", rank][0], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    assert not torch.equal(saved(4)[f"pairs:{way}", 0][0][0], saved(4)[f"pairs:{way}", 2][0][0])


@pytest.mark.parametrize("way", WAYS)
def test_shared_memory_is_chosen_where_all_ranks_have_it(saved: Saved, way: str) -> None:
    assert [saved(3)[way, rank][1] for rank in range(3)] == [WAYS[way]] * 3


@pytest.mark.parametrize("way", ["native", "shared"])
def test_a_rank_that_is_killed_is_an_error_on_all_others(tmp_path: Path, way: str) -> None:
    """And not when they would give up, which is half an hour later."""
    with ranks(3, tmp_path, way, "forever") as started:
        assert [one.hear() for one in started] == ["it trains"] * 3
        started[2].process.kill()
        for rank, one in enumerate(started[:2]):  # none of which ends before all have been heard
            told = one.hear()
            assert re.search(rf"{way} among 3 ranks: a rank is gone, or unreachable from rank {rank}: ", told), told
        for one in started[:2]:
            one.say()
            one.process.join(SECONDS)
            assert one.process.exitcode == 1


def test_the_script_of_the_document_runs_under_torchrun(tmp_path: Path) -> None:
    [script] = [
        code
        for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "collectives.md").read_text(), re.DOTALL)
        if "comm_hook" in code
    ]
    (tmp_path / "train.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path, capture_output=True,
        text=True, timeout=SECONDS, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    # the ends of two lines may meet in the pipe
    told = re.findall(r"rank (\d): loss [\d.]+, added up by (shared|native)", ended.stdout)
    assert sorted(rank for rank, _ in told) == ["0", "1"]
    assert {way for _, way in told} == {"shared"}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algorithm": "ring"}, "Reduce(algorithm='ring'): must be shared, native, auto; other names of"),
        ({"group": dist.GroupMember.NON_GROUP_MEMBER}, "rank 0 is not in the group"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        db.Reduce(**options)


def test_without_a_process_group_it_says_what_to_call() -> None:
    state = db.Reduce()  # which may be made before it
    with pytest.raises(UsageError, match="init_process_group"):
        state.start(torch.ones(2))


def test_a_sparse_gradient_is_named_at_once_and_no_rank_is_said_to_be_gone() -> None:
    """Before anybody is asked: there is no process group yet."""
    with pytest.raises(UsageError, match=re.escape("is sparse, of a parameter of shape [5, 2]: make it dense")):
        db.Reduce().start(torch.ones(5, 2).to_sparse())


@pytest.mark.usefixtures("alone")
def test_another_device_than_before_is_refused() -> None:
    state = db.Reduce()
    with pytest.raises(UsageError, match="shared: the gradients are on meta"):
        db.Reduce("shared")._begin(torch.device("meta"))
    assert state.start(torch.ones(2)).wait().tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match="gradients on meta, and before on cpu"):
        state.start(torch.zeros(2, device="meta"))


@pytest.mark.usefixtures("alone")
def test_what_is_queued_behind_a_failure_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is begun after it, by its future: DDP makes a RuntimeError of that, and nobody waits for ever."""
    state, go = db.Reduce(), threading.Event()
    state.start(torch.ones(2)).wait()

    def fails(*_: Any, **__: Any) -> None:
        go.wait(SECONDS)
        raise RuntimeError("closed by peer")

    monkeypatch.setattr(dist, "all_reduce", fails)
    futures = [state.start(torch.ones(2)) for _ in range(3)]
    go.set()
    for future in (*futures, state.start(torch.ones(2))):
        with pytest.raises((RuntimeError, db.JobFailed), match="a rank is gone"):
            future.wait()
