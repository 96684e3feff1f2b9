"""How a process of a job settles."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from patience import SECONDS

FREES_AND_TAKES = """
import ctypes, resource, sys
import torch
from distbelief.places.processes import settle

for threshold in (settle.M_TRIM_THRESHOLD, settle.M_MMAP_THRESHOLD):
    ctypes.CDLL(None).mallopt(threshold, 1 << 17)  # glibc's first, and fixed by this
if sys.argv[1:]:
    settle.settle_process("test", 1, {pid})

def faults():
    tensors = [torch.ones(1 << 16) for _ in range(40)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

first = [faults() for _ in range(5)][-1]
print(([faults() for _ in range(10)][-1] - first) / 10)
"""


@pytest.mark.skipif("linux" not in sys.platform, reason="glibc's malloc")
def test_what_a_step_frees_the_next_one_has_without_asking_the_kernel() -> None:
    script = FREES_AND_TAKES.replace("{pid}", "__import__('os').getppid()")
    usual, settled = (
        float(
            subprocess.run(
                [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True, timeout=SECONDS
            ).stdout
        )
        for words in ([], ["settled"])
    )
    assert usual > 1000
    assert settled < 10


SETTLES = """
import signal, sys
from distbelief.places.processes import settle

settle.settle_process("test", 1, *map(int, sys.argv[1:]))
print("settled", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("dies", [0, 1], ids=["the supervisor", "the forkserver"])
def test_a_process_ends_with_either_of_those_above_it(dies: int) -> None:
    with ExitStack() as stack:
        above = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
            for _ in range(2)
        ]
        for one in above:
            stack.callback(one.kill)
        words = [sys.executable, "-c", SETTLES, *(str(one.pid) for one in above)]
        process = stack.enter_context(
            subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        )
        stack.callback(process.kill)
        assert process.stdout
        assert process.stdout.readline() == b"settled\n"
        assert process.poll() is None
        above[dies].kill()
        assert process.wait(SECONDS) == 1
