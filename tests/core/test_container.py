"""What a container gives its processes, of both versions of control groups: by files as the kernel writes them."""

import os
from pathlib import Path

import pytest

from distbelief.record import limits

GB = 1 << 30
VERSION_1 = {
    "proc/self/cgroup": "5:memory:{at}\n2:cpu,cpuacct:{at}\n0::/\n",
    "proc/self/mountinfo": "1 2 0:1 {root} {tmp}/cpu rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "3 2 0:2 {root} {tmp}/memory rw - cgroup cgroup rw,memory\n",
    "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "9000",
    "cpu{below}/cpu.cfs_quota_us": "{quota}", "cpu{below}/cpu.cfs_period_us": "100000",
    "memory{below}/memory.limit_in_bytes": "{limit}", "memory{below}/memory.usage_in_bytes": "{used}",
    "memory{below}/memory.stat": "cache 1\ntotal_inactive_file {cached}\n",
    "memory{below}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
}  # fmt: skip
VERSION_2 = {
    "proc/self/cgroup": "0::{at}\n",
    "proc/self/mountinfo": "1 2 0:1 {root} {tmp}/all rw,nosuid - cgroup2 cgroup rw,nsdelegate\n",
    "all{below}/cpu.max": "{quota} 100000", "all{below}/memory.max": "max", "all{below}/memory.current": "{used}",
    "all{below}/memory.events": "low 0\noom 5\noom_kill 4\n", "all{above}/memory.max": "{limit}",
    "all{above}/memory.current": "{used}", "all{above}/memory.stat": "anon 1\ninactive_file {cached}\n",
}  # fmt: skip
PLACES = {
    "a group of its own": {"at": "/job", "root": "/", "below": "/job", "above": ""},
    "below another": {"at": "/slice/job", "root": "/", "below": "/slice/job", "above": "/slice"},
    "of a container that sees the machine's names": {
        "at": "/docker/a1",
        "root": "/docker/a1",
        "below": "",
        "above": "",
    },
}


def write(tmp_path: Path, files: dict[str, str], **values: object) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * GB >> 10} kB\n")
    (tmp_path / "proc/vmstat").write_text("pgfault 3\noom_kill 7\n")
    for name, text in files.items():
        path = tmp_path / name.format(**values)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(tmp=tmp_path, **values))


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores, of which this process may run on six."""
    monkeypatch.setattr(limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("files", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_what_there_is_is_what_the_groups_leave(tmp_path: Path, files: dict[str, str], place: str) -> None:
    write(tmp_path, files, quota=250_000, limit=3 * GB, used=2 * GB, cached=GB // 2, **PLACES[place])
    assert (limits.cores(), limits.quota()) == (2, 2)
    assert limits.free_memory() == 3 * GB - 2 * GB + GB // 2
    assert limits.memory_kills() == 4


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("quota", "cores"), [("max", 6), ("-1", 6), ("50000", 1), ("700000", 6), ("0", 1)],
)  # fmt: skip
@pytest.mark.parametrize("files", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_a_quota_leaves_one_core_at_least_and_no_more_than_a_process_may_run_on(
    tmp_path: Path, files: dict[str, str], quota: str, cores: int
) -> None:
    write(tmp_path, files, quota=quota, limit=90 * GB, used=2 * GB, cached=0, **PLACES["below another"])
    assert limits.cores() == cores
    assert limits.free_memory() == 8 * GB


@pytest.mark.usefixtures("eight")
def test_without_groups_the_machine_is_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert (limits.cores(), limits.quota(), limits.free_memory(), limits.memory_kills()) == (6, 8, 8 * GB, 7)
