"""The order of hosts by the switches between them, what that puts on each link, and switches that are measured."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
from asking import Ask
from hypothesis import given
from hypothesis import strategies as st

from distbelief.cli import main
from distbelief.core import roles
from distbelief.core.roles import Mesh, servers
from distbelief.errors import UsageError
from distbelief.network.slurm import measured_topology, parse_topology
from distbelief.places.cluster.checking import HostReport, topology_of
from distbelief.places.cluster.cluster import Cluster
from distbelief.places.cluster.placement import HostSlots, Placement
from distbelief.places.messages import Way

TREE = """SwitchName=s0 Nodes=a,c LinkSpeed=1000
SwitchName=s1 Nodes=b,d LinkSpeed=1000
SwitchName=top Switches=s[0-1] LinkSpeed=250
"""
HOSTS = "--hosts a:2,me@b:2,c:2,d:2"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "topology.conf"
    path.write_text(TREE)
    return path


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run([*words.split(), "--dry-run"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def busiest(text: str) -> tuple[str, float]:
    [(link, load)] = re.findall(
        r"^the busiest link is (.*): ([0-9.]+) (?:times the vector|gradients)", text, re.MULTILINE
    )
    return link, float(load)


def test_replicas_follow_each_other_along_the_walk_and_those_of_a_host_stay_together(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(f"train mnist allreduce --algorithm ring {HOSTS} --topology {tree}", capsys)
    assert said.splitlines()[1:6] == [
        "host a, 2 slots: replica 0, replica 1",
        "host c, 2 slots: replica 2, replica 3",
        "host me@b, 2 slots: replica 4, replica 5",
        "host d, 2 slots: replica 6, replica 7",
        f"order of hosts, by {tree}: a, c, me@b, d",
    ]
    assert busiest(said) == ("s0 to top", 1.75), "2 (p - 1) / p, once"
    assert "it would be 3.50 by names" in said
    assert "  s0: a to top 1.75 there, 1.75 back\n  s1: b to top 1.75 there, 1.75 back\n" in said


def test_hierarchical_by_switch_sends_up_what_is_summed_below(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"train mnist allreduce --algorithm hierarchical --per-host 4 {HOSTS} --topology {tree}"
    assert busiest(shown(words, capsys)) == ("s0 to top", 1.0)


def test_a_servers_strategy_has_no_order_and_its_shards_are_spread(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train mnist downpour --shards 2 --standby 1 {HOSTS.replace(':2', ':1')} --topology {tree}"
    said = shown(words, capsys)
    assert said.splitlines()[1:5] == [
        "host a, 1 slot: replica 0, shard 0",
        "host c, 1 slot: replica 1, standby 1",
        "host me@b, 1 slot: replica 2, shard 1",
        "host d, 1 slot: replica 3, standby 0",
    ]
    assert "strategy downpour has no order of hosts: replicas push to shards, and fetch" in said
    # a shard takes 3 halves from others, and sends its standby the 4 halves of all; replica 0 sends a half
    assert "  s0: a 2.00 there, 4.00 back; c " in said
    assert busiest(said)[1] == 1.0 + 1.0 + 2.0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--hosts a:1,x:1 --topology {tree}", "--topology {tree}: unknown host 'x'; "),
        ("--hosts a:1,x:1 --topology {tree}", "add it to the Nodes= of its switch"),
        ("--hosts a:1,b:1 --topology tree:1x2", "--topology tree:1x2: real hosts have names: name a file"),
        ("--hosts a:1,b:1 --topology nowhere", "--topology nowhere: cannot be read"),
        ("--topology {tree}", "--topology {tree}: needs several hosts; name them with --hosts"),
    ],
)
def test_a_topology_that_cannot_be_used_is_refused(tree: Path, ask: Ask, words: str, told: str) -> None:
    assert (
        told.format(tree=tree)
        in ask(["train", "mnist", "allreduce", *words.format(tree=tree).split(), "--dry-run"], 2).err
    )


# what Slurm says


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocation of four nodes, whose switches are in a file; returns that."""
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\ncase "$2" in hostnames) printf "a\\nb\\nc\\nd\\n" ;; *) cat "${0%/*}/switches" ;; esac\n'
    )
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    for script in tmp_path.iterdir():
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "[a-d]")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "1(x4)")
    return tmp_path / "switches"


SCONTROL = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=b,d
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=c,e
SwitchName=left Level=1 LinkSpeed=1 Nodes=a,c,e Switches=s0,s2
SwitchName=top Level=2 LinkSpeed=1 Nodes=a,b,c,d,e Switches=left,s1
"""


@pytest.mark.parametrize(
    ("switches", "hosts", "told"),
    [
        (SCONTROL, "acbd", "order of hosts, by scontrol show topology: a, c, b, d"),
        ("No topology information available\n", "abcd", ""),
        (SCONTROL.replace("Nodes=b,d", "Nodes=b"), "abcd", "hosts are in Slurm's order: --topology scontrol"),
        (SCONTROL.rpartition("SwitchName")[0], "abcd", "nothing joins switches s1 and left"),
    ],
)
def test_inside_slurm_the_order_is_that_of_its_switches_where_it_has_a_tree(
    slurm: Path, capsys: pytest.CaptureFixture[str], switches: str, hosts: str, told: str
) -> None:
    slurm.write_text(switches)
    said = shown("train mnist allreduce", capsys)
    assert re.findall(r"^host (\S+), ", said, re.MULTILINE) == list(hosts)
    assert told in said
    assert told or "rder" not in said


# placement


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[HostSlots], int]:
    """Hosts at switches, two or more of these, and shards."""
    switches = draw(st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda one: len(set(one)) > 1))
    return [HostSlots(f"h{at}", 1, True, switch) for at, switch in enumerate(switches)], draw(st.integers(1, 12))


@given(jobs())
def test_shards_take_turns_at_switches_and_each_standby_is_at_another(job: tuple[list[HostSlots], int]) -> None:
    sites, shards = job
    placement = Placement(sites, Mesh(1), servers(shards, 1), ())
    at = {role: sites[where].switch for role, where in placement.where.items()}
    first = [at[roles.shard(number)] for number in range(min(shards, len({site.switch for site in sites})))]
    assert len(set(first)) == len(first)
    assert all(at[roles.shard(one)] != at[roles.standby(one)] for one in range(shards))


def test_who_begins_again_does_so_at_his_switch_and_a_shard_away_from_its_standby() -> None:
    sites = [HostSlots(name, 2, True, switch) for name, switch in zip("abcd", (0, 1, 1, 0), strict=True)]
    placement = Placement(sites, Mesh(4), servers(1, 1), ())
    assert (placement.where["replica 0"], placement.where["shard 0"], placement.where["standby 0"]) == (0, 0, 1)
    placement.lose(0)
    assert (placement.again("replica 0"), placement.again("shard 0")) == (3, 3)


# measured


@given(st.permutations(range(9)), st.integers(0, 2**32), st.floats(1.0, 1.2))
def test_the_tree_of_hosts_is_found_by_what_is_measured(names: list[int], seed: int, noise: float) -> None:
    """Three switches of three hosts, of which two are under one of their own: 1000, 400 and 100 Mbit/s."""
    hosts = [f"h{name}" for name in names]
    bandwidths = {}
    for number, (one, other) in enumerate(itertools.combinations(hosts, 2)):
        a, b = int(one[1:]) // 3, int(other[1:]) // 3
        real = 1000 if a == b else 400 if max(a, b) == 1 else 100
        bandwidths[one, other] = real * 125e3 / (noise if (seed >> number % 32) & 1 else 1.0)
    tree = parse_topology(measured_topology(hosts, bandwidths), "F")
    walk = [int(tree.hosts[host][1:]) // 3 for host in tree.walk]
    assert [key for key, _ in itertools.groupby(walk)] in ([0, 1, 2], [1, 0, 2], [2, 0, 1], [2, 1, 0])
    assert len(tree.switches) == 5


def test_the_faster_way_counts_and_a_pair_that_was_not_measured_is_named() -> None:
    a, b = HostReport("me@a", ways={"b": Way(0.0, 3e7)}), HostReport("b", ways={"me@a": Way(0.0, 1.25e8)})
    assert "SwitchName=s0 LinkSpeed=1000 Nodes=a,b" in topology_of([a, b])
    with pytest.raises(UsageError, match=r"no bandwidth was measured between hosts b and c"):
        topology_of([b, HostReport("c", ways={})])
    with pytest.raises(UsageError, match="between one host and itself there is nothing to measure"):
        topology_of([a])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--hosts a,b --topology-out {tree}", "--topology-out {tree}: exists already"),
        ("--hosts a,b --topology-out .", "--topology-out .: exists already"),
        ("--hosts a,b --topology-out /nowhere/f", "--topology-out /nowhere/f: exists already, or has no folder"),
        (f"--hosts {','.join(f'n{one}' for one in range(65))} --topology-out {{tree}}2", "65 hosts: of at most 64"),
    ],
)
def test_a_file_that_cannot_be_measured_is_refused_before(tree: Path, ask: Ask, words: str, told: str) -> None:
    assert told.format(tree=tree) in ask(["check", *words.format(tree=tree).split(), "--remote-shell", "true"], 2).err


def test_what_was_measured_is_shown_where_it_cannot_be_written(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [HostReport("a", ways={"b": Way(0.0, 1.25e8)}), HostReport("b")]
    monkeypatch.setattr(Cluster, "check", lambda *_: reports)
    said = ask("check --hosts a,b --topology-out /proc/self/fdinfo/none", 2)
    assert "SwitchName=s0 LinkSpeed=1000 Nodes=a,b" in said.out
    assert "--topology-out /proc/self/fdinfo/none: cannot be written (" in said.err
