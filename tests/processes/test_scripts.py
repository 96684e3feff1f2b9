"""What a user's script finds under `launch`: its own main module, its arguments, and workers as it would have them."""

import multiprocessing
import os
from pathlib import Path

import jobs
import pytest

from distbelief.core import records
from distbelief.errors import UsageError
from distbelief.places.processes.local import Local
from distbelief.strategies import Downpour

SCRIPT = """
import multiprocessing, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import distbelief as db
import jobs

class Pairs(Dataset):
    def __len__(self):
        return jobs.SAMPLES
    def __getitem__(self, number):
        {item}
        return torch.randn(8), number % 4

def main():
    replica = db.join()
    {before}
    model = jobs.net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(jobs.data(), jobs.BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

{main}
"""
GUARDED = 'if __name__ == "__main__": main()'
LOADS = "assert len(list(DataLoader(Pairs(), jobs.BATCH, num_workers=1{}))) == 21"


def launch(folder: Path, *arguments: str, replicas: int = 2, epochs: int = 1, **fields: str) -> object:
    (folder / "script.py").write_text(SCRIPT.format(**{"before": "", "item": "", "main": "main()", **fields}))
    job = jobs.job(folder / "run", Downpour(replicas=replicas), task="script", epochs=epochs)
    return Local().launch(job, [str(folder / "script.py"), *arguments])["outcome"]


def test_a_script_is_the_main_program_with_workers_as_its_platform_has_them(tmp_path: Path) -> None:
    default = multiprocessing.get_all_start_methods()[0]
    found = f"assert (multiprocessing.get_start_method(), sys.argv) == ({default!r}, [__file__, '--rate', '3'])"
    own = "assert multiprocessing.current_process().name == 'MainProcess' and sys.modules['__main__'].main is main"
    assert launch(tmp_path, "--rate", "3", before=f"{found}; {own}; {LOADS.format('')}") == "done"


def test_workers_that_import_the_main_module_find_it(tmp_path: Path) -> None:
    assert launch(tmp_path, before=LOADS.format(", multiprocessing_context='spawn'"), main=GUARDED) == "done"


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_worker_that_joins_is_told_what_it_is(tmp_path: Path, how: str) -> None:
    before = LOADS.format(f", multiprocessing_context={how!r}")
    with pytest.raises(UsageError, match=r"replica \d has joined already, .* started by its script .*__main__"):
        launch(tmp_path, replicas=1, item="db.join()", before=before, main=GUARDED)


def test_what_a_script_has_forked_ends_with_its_replica(tmp_path: Path, watch: jobs.Watch) -> None:
    children: list[int] = []

    def die() -> None:
        victim = next(pid for pid, name in jobs.descendants(os.getpid()).items() if name == "distbelief: replica 1")
        children.extend(jobs.descendants(victim))
        jobs.kill("replica 1")

    watch.once(records.Stepped, die, role="replica 1")
    forks = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,), daemon=True).start()"
    assert launch(tmp_path, before=forks, epochs=jobs.LONG) == "done"  # that nothing is left, the fixture looks
    assert children
