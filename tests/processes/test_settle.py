"""How a process of a job settles."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREES_AND_TAKES = """
import ctypes, resource, sys
import torch
from distbelief.cluster import settle

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
        float(subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True, timeout=60).stdout)
        for words in ([], ["settled"])
    )
    assert usual > 1000
    assert settled < 10
