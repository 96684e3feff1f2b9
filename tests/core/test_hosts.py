"""Hosts as they are written, who is placed where on them, and by which address each is reached."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import sys
from collections import Counter
from itertools import pairwise, permutations, product
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from asking import Ask
from hypothesis import given
from hypothesis import strategies as st
from patience import SLOWNESS

import distbelief as db
from distbelief.core import roles
from distbelief.core.roles import Mesh, servers
from distbelief.errors import JobFailed, UsageError
from distbelief.job import refusals
from distbelief.places.cluster import agent, checking, launched, meeting, network, opening
from distbelief.places.cluster.cluster import Cluster
from distbelief.places.cluster.engines import RemoteShell
from distbelief.places.cluster.hosts import Host, parse_hostfile, parse_hosts
from distbelief.places.cluster.placement import HOME, HostSlots, Placement
from distbelief.places.cluster.ray_cluster import RayInvitation
from distbelief.places.cluster.slurm import is_allocated
from distbelief.places.join import join_server, ticket
from distbelief.places.join.authority import Authority
from distbelief.places.messages import AttendMeeting, Greeting, HostsReached, OpenJob, ReachHosts
from distbelief.places.processes import options
from distbelief.places.processes.processes import Hooks
from distbelief.transport.addresses import joined, own_addresses
from distbelief.transport.secure import MUTE

ROOT = Path(__file__).parents[2]
ALONE = ("coordinator", "evaluator")
MANY = ",".join(f"n{number}" for number in range(4097))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no host"),
        ("# nothing\n\n", "names no host"),
        ("a slots=4\nb slots=four\n", "line 2: 'b slots=four'"),
        ("a\n\n-oProxyCommand=x\n", "line 3: '-oProxyCommand=x'"),
        ("a:2\nb\na slots=2\n", "line 3: host a is named twice, 'line 1' and 'line 3'"),
        ("a slots=0\n", "line 1: a with 0 slots"),
        ("a 4\n", "line 1: 'a 4'"),
    ],
)
def test_an_odd_hostfile_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(UsageError, match="--hostfile F") as caught:
        parse_hostfile(text, "F")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "a,", "a:x", "a,b,a:2", "-a", "a:0", "a:4097", "a b", MANY], ids=lambda text: text[:9]
)
def test_odd_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        parse_hosts(text)


def test_odd_hosts_are_one_of_the_refusals_of_a_job() -> None:
    job = db.Job("digits", "downpour")
    assert [str(error) for error in refusals(job, Cluster(hosts="a:0"))] == [
        "--hosts a:0: a with 0 slots; a host has from 1 to 4096"
    ]


@given(st.dictionaries(st.from_regex(r"\A[a-z0-9][a-z0-9.-]{0,8}\Z"), st.integers(0, 64), min_size=1, max_size=8))
@pytest.mark.long
def test_every_way_of_writing_hosts_means_the_same(named: dict[str, int]) -> None:
    hosts = tuple(Host(name, slots) for name, slots in named.items())
    colons = [f"{name}:{slots}" if slots else name for name, slots in named.items()]
    slots = [f"  {name}  slots = {count} # it\n" if count else name for name, count in named.items()]
    assert parse_hosts(",".join(colons)) == hosts
    assert parse_hostfile("\n\n".join(slots), "F") == parse_hostfile("\n".join(colons), "F") == hosts


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[HostSlots], Mesh, int, int]:
    """Hosts with slots enough, of which some see the run folder; a mesh, shards, and whether there are standbys."""
    slots = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    partitions = draw(st.integers(1, max(1, sum(slots))))
    replicas = draw(st.integers(1, sum(slots) // partitions))
    keeps = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)).filter(any))
    sites = [HostSlots(f"h{at}", *one) for at, one in enumerate(zip(slots, keeps, strict=True))]
    return sites, Mesh(replicas, partitions), draw(st.integers(1, 9)), draw(st.integers(0, 1))


@given(jobs(), st.randoms())
def test_who_is_where_keeps_its_promises_whatever_host_is_lost(
    job: tuple[list[HostSlots], Mesh, int, int], chance: object
) -> None:
    sites, mesh, shards, standby = job
    cast = servers(shards, standby)
    placement = Placement(sites, mesh, cast, ALONE)
    where = placement.where
    assert set(where) == {*roles.replicas(mesh), *cast, *ALONE}
    assert all(where[role] == HOME for role in ALONE)
    _slots_hold(placement)
    keepers = [at for at, site in enumerate(sites) if site.keeps]
    held = Counter(where[role] for role in cast if role.startswith("shard"))
    assert set(held) <= set(keepers)
    assert max(held.values()) - min(held[at] for at in keepers) <= 1, "shards are not spread"
    beside = [role for role in cast if role.startswith("standby") and where[role] == where[roles.shard_of(role)]]
    assert not beside or len(keepers) == 1
    assert len(placement.beside) == len(beside)
    # partitions of a replica are together as long as some host has room for one more whole replica
    apart = [one for one in range(mesh.replicas) if len({where[r] for r in _cells(mesh, one)}) > 1]
    if apart:
        whole = Counter(where[_cells(mesh, one)[0]] for one in range(mesh.replicas) if one not in apart)
        assert all(site.slots - whole[at] * mesh.partitions < mesh.partitions for at, site in enumerate(sites))

    lost = chance.randrange(len(sites))  # type: ignore[attr-defined]
    gone = placement.on(lost)
    stays = {role: at for role, at in where.items() if at != lost}
    placement.lose(lost)
    for role in gone:
        at = placement.again(role)
        assert at != lost
        if at is None and not roles.is_replica(role):
            assert keepers == [lost]
    assert all(placement.where[role] == at == placement.again(role) for role, at in stays.items())
    _slots_hold(placement, lost)
    if len([at for at in keepers if at != lost]) > 1:
        assert not placement.beside


def _cells(mesh: Mesh, replica: int) -> tuple[str, ...]:
    return roles.replicas(mesh)[replica * mesh.partitions :][: mesh.partitions]


def _slots_hold(placement: Placement, lost: int = -2) -> None:
    taken = Counter(at for role, at in placement.where.items() if roles.is_replica(role) and at != lost)
    assert all(taken[at] <= site.slots for at, site in enumerate(placement.sites))


def test_more_replicas_than_slots_are_refused_but_where_that_is_asked_for() -> None:
    sites = [HostSlots("a", 2), HostSlots("b", 1)]
    with pytest.raises(UsageError, match=r"2 of 2 partitions: 4 processes compute, and the hosts have 3 slots"):
        Placement(sites, Mesh(2, 2), (), ALONE)
    placement = Placement(sites, Mesh(7), (), ALONE, oversubscribe=True)
    assert Counter(placement.where[role] for role in roles.replicas(Mesh(7))) == {0: 5, 1: 2}
    placement.lose(0)
    assert placement.again("replica 0") == 1
    with pytest.raises(UsageError, match="no host sees the run folder"):
        Placement([HostSlots("a", 2, keeps=False)], Mesh(1), servers(1, 0), ALONE)


@pytest.mark.parametrize("succeeds", [False, True], ids=["both begin again", "the standby is the shard"])
@pytest.mark.parametrize("hosts", range(2, 6))
def test_a_standby_is_never_on_its_shards_host_where_there_is_another(hosts: int, succeeds: bool) -> None:
    """Whichever hosts are lost, one after the other; and at first no host has two servers more than another."""
    sites = [HostSlots(f"h{at}", 1) for at in range(hosts)]
    for shards, count in product(range(1, 8), range(hosts - 1)):
        cast = servers(shards, 1)
        for lost in permutations(range(hosts), count):
            placement = Placement(sites, Mesh(1), cast, ALONE)
            held = Counter(placement.where[role] for role in cast)
            assert max(held.values()) - min(held[at] for at in range(hosts)) <= 1
            for at in lost:
                gone = [role for role in placement.on(at) if role in cast]
                placement.lose(at)
                begin = [roles.standby_of(role) if succeeds and role.startswith("shard") else role for role in gone]
                for role, again in zip(gone, begin, strict=True):
                    if role != again:
                        placement.rename(again, role)
                for role in begin:
                    assert placement.again(role) not in lost[: lost.index(at) + 1]
                assert not placement.beside, (shards, lost)
                assert all(placement.where[roles.standby_of(one)] != placement.where[one] for one in servers(shards, 0))


def test_shards_and_standbys_are_only_where_the_run_folder_is_seen_and_no_other_host_can_take_them() -> None:
    placement = Placement(
        [HostSlots(name, 2, keeps) for name, keeps in zip("abcd", (True, False, True, True), strict=True)],
        Mesh(2), servers(6, 0), ALONE,
    )  # fmt: skip
    shards = servers(6, 0)
    assert Counter(placement.where[shard] for shard in shards) == {0: 2, 2: 2, 3: 2}
    assert placement.can_replace(0)
    placement.lose(0)
    assert [placement.again(shard) for shard in shards] == [2, 2, 3, 3, 2, 3]
    placement.lose(2)
    assert [placement.again(shard) for shard in shards] == [3] * 6
    assert not placement.can_replace(3)
    placement.lose(3)
    assert [placement.again(shard) for shard in shards] == [None] * 6
    alone = Placement([HostSlots("a", 1), HostSlots("b", 1, keeps=False)], Mesh(1), servers(1, 1), ALONE)
    assert alone.lines()[3:] == [
        "shard 0 and its standby are on one host, since no other sees the run folder: both die with it"
    ]
    assert Placement([HostSlots("a", 2, keeps=False)], Mesh(2), (), ALONE).on(0) == ["replica 0", "replica 1"]


def test_replicas_are_spread_by_slots_and_all_of_one_begins_again_together_where_most_are_left() -> None:
    sites = [HostSlots("a", 2), HostSlots("b", 4), HostSlots("c", 3)]
    assert Counter(Placement(sites, Mesh(3), (), ()).where.values()) == {1: 1, 2: 1, 0: 1}
    placement = Placement(sites, Mesh(1, 2), (), ())
    assert placement.on(1) == ["replica 0.0", "replica 0.1"]
    placement.lose(1)
    assert [placement.again(role) for role in ("replica 0.0", "replica 0.1")] == [2, 2]


def test_a_thousand_hosts_are_planned_in_seconds() -> None:
    text = "\n".join(f"node{number} slots=8" for number in range(1000))
    began = process_time()
    sites = [HostSlots(host.name, host.slots) for host in parse_hostfile(text, "F")]
    placement = Placement(sites, Mesh(8000), servers(500, 1), ALONE)
    assert process_time() - began < 10 * SLOWNESS
    assert set(Counter(at for role, at in placement.where.items() if roles.is_replica(role)).values()) == {8}


def test_a_hostfile_from_windows_is_read(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "hosts").write_bytes("\ufeffa slots=2\r\nb slots=1\r\n".encode())
    shown = ask(f"train digits downpour --hostfile {tmp_path}/hosts --dry-run").out
    assert "host a, 2 slots" in shown
    assert "host b, 1 slot:" in shown


def test_a_dry_run_shows_who_would_be_where_and_asks_nobody(ask: Ask) -> None:
    words = "train mnist downpour --hosts a:3,b:1 --shards 2 --standby 1 --dry-run"
    assert ask(words).out.splitlines() == [
        "here: coordinator, evaluator",
        "host a, 3 slots: replica 0, replica 1, replica 2, shard 0, standby 1",
        "host b, 1 slot: replica 3, shard 1, standby 0",
        "links: TLS; each role listens on its host's address, at a port that is chosen when the job starts",
    ]
    words = "train mnist allreduce --hosts a:1,b:1 --replicas 3 --oversubscribe --dry-run"
    assert ask(words).out.splitlines()[1] == "host a, 1 slot: replica 0, replica 2"
    words = "train mnist allreduce --hosts a:3,b:2 --partitions 2 --dry-run"
    assert ask(words).out.splitlines()[1:3] == [
        "host a, 3 slots: replica 0.0, replica 0.1",
        "host b, 2 slots: replica 1.0, replica 1.1",
    ]


@pytest.mark.parametrize("begin", ["distbelief train mnist downpour", "distbelief train mnist allreduce"])
def test_the_document_shows_what_a_dry_run_of_its_command_shows(begin: str, ask: Ask) -> None:
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)
    command, shown = next(pair for pair in pairwise(blocks) if pair[0].startswith(begin))
    assert ask([*command.split()[1:], "--dry-run"]).out == shown


def test_slurm_is_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(UsageError, match="this is no allocation; get one with salloc"):
        db.run(db.Job("digits", db.Downpour()), on=db.Slurm(interface="eth1"))


def test_a_remote_shell_whose_quote_is_open_is_refused_with_the_option() -> None:
    with pytest.raises(UsageError, match=r"--remote-shell ssh 'a: No closing quotation; write its words"):
        RemoteShell("ssh 'a")


def test_a_remote_shell_that_is_not_installed_is_told_with_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"--remote-shell 'no-such-shell -p 2': no such program here; install"):
        RemoteShell("no-such-shell -p 2")


def test_the_address_that_all_others_reach_is_chosen() -> None:
    told = {"a": ["", ""], "c": ["Connection refused", ""]}
    assert network.choose("b", ["10.0.0.2", "10.1.0.2"], told) == "10.1.0.2"
    with pytest.raises(UsageError, match=r"host c cannot reach host b: 10\.0\.0\.2 \(Connection refused\)"):
        network.choose("b", ["10.0.0.2"], {"a": [""], "c": ["Connection refused"]})
    assert network.order(["127.0.0.1", "10.0.0.2", "10.1.0.2"], ["10.1.0.2"], same=False) == ["10.1.0.2", "10.0.0.2"]
    with pytest.raises(UsageError, match=r"^host a cannot reach this host: 10\.0\.0\.2 \(no answer\)"):
        network.choose(network.HERE, ["10.0.0.2"], {"a": ["no answer"]})
    assert network.order(["10.0.0.2", "127.0.0.1"], [], same=True) == ["127.0.0.1"]
    assert network.order(["fd77::2"], ["fe80::2%eth0"], same=False) == ["fd77::2"], "of one cable"


def test_a_host_listens_where_it_says_and_one_that_does_not_is_told() -> None:
    with contextlib.closing(network.WayServer()) as ways:
        own = [one for one in ("127.0.0.1", "::1") if any(one in several for several in own_addresses().values())]
        where = [joined(one, ways.port) for one in own]
        assert network.try_all({"here": where}) == {"here": [""] * len(where)}
        assert network.measure_all({"here": where[-1]})["here"].bandwidth > 0
    assert set(network.try_all({"here": where})["here"]) == {"Connection refused"}


def test_a_port_that_answers_and_takes_no_bytes_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a proxy, or over a way that loses long packets: the kernel lets call whom nobody serves."""
    monkeypatch.setattr(network, "EXCHANGE_SECONDS", 0.1)
    monkeypatch.setattr(ticket, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        assert network.try_all({"there": [where]}) == {"there": [MUTE]}
        for identity in (Authority("job").issue(ticket.GUEST), None):
            with pytest.raises(JobFailed, match=re.escape(f"does not answer: {where} ({MUTE})")):
                join_server.ask(ticket.Ticket("job", [where], "", identity), join_server.JoinRequest("job", ""))


@pytest.mark.parametrize("bind", ["0.0.0.0:7000", "[::]:7000"])
def test_who_listens_everywhere_tells_the_only_address_there_is_and_no_name(
    bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"eth0": ["10.0.0.1", "fd77::1"], "lo": ["127.0.0.1", "::1"]}
    monkeypatch.setattr(options, "own_addresses", lambda: own)
    monkeypatch.setattr(options, "host_towards", raise_unreachable)
    assert options.told_host(bind, "") == own["eth0"]["::" in bind]
    assert options.told_host(bind, "node7") == "node7"
    own["eth1"] = ["10.1.0.1", "fd78::1"]
    with pytest.raises(UsageError, match=r"It has \S+ \(eth0\), \S+ \(eth1\): name one with --advertise"):
        options.told_host(bind, "")
    del own["eth0"], own["eth1"]
    assert options.told_host(bind, "") == own["lo"]["::" in bind]


def raise_unreachable(*_: object) -> str:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


def test_hosts_without_numbers_have_no_slots_until_they_are_asked() -> None:
    assert (Cluster(hosts="a:2,b:3").slots, Cluster(hosts="a:2,b").slots) == (5, 0)
    assert [Cluster(hosts="a,b", insecure=insecure).encrypted for insecure in (False, True)] == [True, False]


SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of two nodes, whose commands are scripts."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[0-1]" ] && printf "n0\\nn1\\n"\n')
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    for script in tmp_path.iterdir():
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("allocation")
def test_inside_slurm_the_nodes_are_the_hosts(ask: Ask) -> None:
    shown = ask("train mnist downpour --shards 2 --dry-run").out.splitlines()
    assert shown[1] == "host n0, 4 slots: replica 0, replica 1, replica 2, replica 3, shard 0"
    assert shown[2].startswith("host n1, 4 slots: replica 4")
    assert "host a, 2 slots" in ask("train mnist downpour --hosts a:2 --on ssh --dry-run").out


@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--hosts a:2", "--hosts a:2: inside Slurm the hosts are the nodes of the allocation"),
        ("--hostfile f", "--hostfile f: inside Slurm"),
        ("--replicas 9", "the hosts have 8 slots (n0:4, n1:4)"),
        ("--on rai", "unknown engine 'rai'"),
    ],
)
def test_what_means_nothing_inside_slurm_is_refused(words: str, told: str, ask: Ask) -> None:
    assert told in ask(["train", "mnist", "downpour", *words.split(), "--dry-run"], 2).err


@pytest.mark.usefixtures("allocation")
def test_an_allocation_is_a_place_where_it_has_several_nodes_and_all_are_listed(
    monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    assert is_allocated(SLURM)
    assert not is_allocated(SLURM | {"SLURM_JOB_NUM_NODES": "1"})
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "4(x3)")
    assert "the nodes n[0-1] cannot be listed" in ask("train mnist downpour --dry-run", 2).err


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "1"}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
    "SLURM_CPUS_ON_NODE": "3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (TORCHRUN, ("torchrun", 3, 2, 1, 0)),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, ("torchrun", 3, 2, 1, 2)),
        (MPIRUN, ("mpirun", 2, 0, 0, 0)),
        (SRUN, ("srun", 4, 1, 1, 0)),
        (SRUN | TORCHRUN, ("torchrun", 3, 2, 1, 0)),  # srun has started torchrun, and that this
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"WORLD_SIZE": "3", "RANK": "2"}, None),  # names that others use too
        ({}, None),
    ],
)
def test_a_process_knows_which_one_of_those_of_a_launcher_it_is(
    environment: dict[str, str], found: tuple[str, int, int, int, int] | None
) -> None:
    one = launched.launched(environment)
    assert (one and (one.launcher, one.size, one.rank, one.local_rank, one.restarts)) == found


def test_starts_are_told_apart_and_processes_of_one_are_not() -> None:
    first, second = launched.launched(SRUN), launched.launched(SRUN | {"SLURM_PROCID": "3"})
    other = launched.launched(SRUN | {"SLURM_STEP_ID": "1"})
    assert (first.name, first.cores) == (second.name, 3)
    assert first.name != other.name
    assert meeting.ticket_path(first, "a") == meeting.ticket_path(second, "a") != meeting.ticket_path(other, "a")


def test_roles_see_nothing_of_the_process_that_a_launcher_has_started() -> None:
    environment = TORCHRUN | {"MASTER_ADDR": "a", "PATH": "/bin", "TORCH_HOME": "/t"}
    launched.forget(environment)
    assert environment == {"PATH": "/bin", "TORCH_HOME": "/t"}


def test_a_launcher_that_is_not_known_is_refused_where_it_starts_several() -> None:
    with pytest.raises(UsageError, match=r"mpiexec has started this command 4 times .*: use Open MPI's mpirun"):
        launched.launched({"PMI_SIZE": "4", "PMI_RANK": "1"})
    assert launched.launched({"PMI_SIZE": "1", "PMI_RANK": "0"}) is None


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torchrun says that there are 3 processes .*, and that this is number '3'"):
        launched.launched(TORCHRUN | {"RANK": "3"})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("downpour --hosts a:2", "--hosts a:2: mpirun has started this command 2 times, on the hosts of the job"),
        ("downpour --on ssh", "--on ssh: mpirun has started this command 2 times"),
        ("single", "single runs in one process: start it once, without mpirun"),
        ("downpour --tickets {folder}/nowhere", "no ticket can be written to"),
    ],
)
def test_what_means_nothing_to_a_command_that_was_started_several_times_is_refused(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, ask: Ask, tmp_path: Path
) -> None:
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert told in ask(["train", "mnist", *words.format(folder=tmp_path).split()], 2).err


def begin(start: launched.Launched, run: Path) -> None:
    run.mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"start": launched.told_of(start)}))


def test_a_start_goes_on_only_with_the_run_of_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher has started may be a script with several commands, which have one parent."""
    monkeypatch.chdir(tmp_path)
    start = launched.launched(TORCHRUN)
    assert start
    commands = [["python", "-m", "distbelief", "train", "mnist", one] for one in ("downpour", "allreduce")]
    for command in commands:
        monkeypatch.setattr(sys, "orig_argv", command)
        assert [launched.run_before(start, None, counted) for counted in (0, 1)] == [None, None]
        begin(start, Path("runs") / command[-1])
    for command in commands:
        monkeypatch.setattr(sys, "orig_argv", command)
        assert launched.run_before(start, None, 0) == Path("runs") / command[-1]
        assert launched.run_before(start, f"runs/{command[-1]}", 0) == Path("runs") / command[-1]
    monkeypatch.setattr(launched, "parent_process", lambda: "another")
    assert launched.run_before(start, None, 0) is None
    assert launched.run_before(start, None, 1) == Path("runs/allreduce")
    for outcome, gone_on in (("interrupted", True), ("failed", True), ("done", False), ("target", False)):
        Path("runs/allreduce/result.json").write_text(json.dumps({"outcome": outcome}))
        assert (launched.run_before(start, None, 1) is not None) is gone_on, outcome
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("environment", [SRUN, MPIRUN])
def test_what_a_launcher_that_starts_nothing_again_has_started_goes_on_with_no_run(
    environment: dict[str, str], tmp_path: Path
) -> None:
    start = launched.launched(environment)
    assert start
    begin(start, tmp_path / "run")
    assert launched.run_before(start, str(tmp_path / "run"), 0) is None


def test_a_start_that_is_over_leaves_the_ticket_of_the_one_after_it(tmp_path: Path) -> None:
    start = launched.launched(TORCHRUN | {"RANK": "0"})
    assert start
    first, second = (meeting.TicketFile(start, str(tmp_path)) for _ in range(2))
    authority = Authority("a start")
    for one in (first, second):
        one.send(ticket.Ticket("a start", ["127.0.0.1:1"], "", authority.issue(ticket.GUEST)))
    text = second.path.read_bytes()
    first.withdraw()
    assert second.path.read_bytes() == text
    second.withdraw()
    assert not list(tmp_path.iterdir())
    second.withdraw()


def test_who_finds_no_ticket_or_nobody_who_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_SECONDS", 0.2)
    first, other = launched.launched(MPIRUN), launched.launched(MPIRUN | {"OMPI_COMM_WORLD_RANK": "1"})
    assert first
    assert other
    with pytest.raises(JobFailed, match=r"process 1 of the 2 .* does not find the first one: there is no .*--tickets"):
        meeting.attend(other, str(tmp_path))
    with pytest.raises(
        JobFailed, match=r"within .*1 of the 2 processes that mpirun has started have not come, by rank 1: is "
    ):
        meeting.Meeting(meeting.TicketFile(first, str(tmp_path)), "")
    assert not list(tmp_path.iterdir()), "a ticket is left"


def test_ray_that_is_not_installed_is_told_with_what_to_install(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert (
        "Ray is not installed for this Python; pip install 'distbelief[ray]'"
        in ask("train mnist downpour --on ray", 2).err
    )


class Greeted:
    def __init__(self, version: str, memory: int, clock_ahead: float) -> None:
        self.greeting = Greeting(4, 0, memory, {}, [], 0, 0.0, False)
        self.attend = AttendMeeting(0, 0, "", "a", [], 0, 9, version, 0)
        self.clock_ahead = clock_ahead


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        (Greeted(opening.VERSION, 1 << 30, 5.0), []),
        (Greeted("0.0.1", 2 << 30, 0.1), ["it runs distbelief 0.0.1, this is .*: install the same on all hosts"]),
        (Greeted(opening.VERSION, 2 << 30, 3600), ["its clock is 3600 s ahead: have it set by the network"]),
        (Greeted(opening.VERSION, 2 << 30, -5.1), ["its clock is 5 s behind"]),
        (Greeted(opening.VERSION, (1 << 30) - 1, 0.1), ["1023 MB of memory are free: end what else runs there"]),
    ],
)
def test_what_is_wrong_with_a_host_is_told_with_what_to_do(agent: Any, told: list[str]) -> None:
    report = checking.HostReport("a", problems=[])
    checking._describe(agent, report)
    assert len(report.problems) == len(told)
    for problem, pattern in zip(report.problems, told, strict=True):
        assert re.match(pattern, problem)


class Speaks:
    """An agent, or another process of a start, that keeps what it is told."""

    def __init__(self, name: str, attend: AttendMeeting | None = None, greeting: Greeting | None = None) -> None:
        self.name, self.attend, self.greeting = name, attend, greeting
        self.told: list[Any] = []
        self.line = self
        self.processors: list[int] = []
        self.gone, self.told_to_end, self.address, self.reached = "", "", "", None

    def say(self, word: Any) -> None:
        self.told.append(word)
        if isinstance(word, ReachHosts):
            self.reached = HostsReached({name: ["" for _ in where] for name, where in word.others.items()})


def test_no_host_of_another_version_takes_part() -> None:
    woken: Any = None
    opened: Any = opening.Opened(woken)
    opened.agents = [Speaks(name, Greeted(name, 0, 0).attend) for name in (opening.VERSION, "0.1")]
    with pytest.raises(UsageError, match=r"host 0\.1 runs distbelief 0\.1, this is .*: install the same on all"):
        opened.greet(OpenJob("", {}, []))
    assert not any(one.told for one in opened.agents)


@pytest.mark.parametrize(("hosts", "others"), [(16, 15), (17, 2)])
def test_each_host_is_tried_by_all_others_or_of_more_than_16_by_two_and_by_this_one(
    hosts: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "try_all", lambda where: {name: ["" for _ in one] for name, one in where.items()})
    woken: Any = None
    opened: Any = opening.Opened(woken)
    agents = [
        Speaks(f"h{at}", greeting=Greeting(1, 0, 0, {"eth1": [f"10.0.0.{at}"]}, [], 1, 0, True)) for at in range(hosts)
    ]
    opened.agents = agents
    monkeypatch.setattr(opening, "own_addresses", lambda: {"eth1": ["10.0.1.1"]})
    opened.find_addresses("eth1")
    tries = Counter(name for one in agents for name in one.told[0].others)
    assert tries == {opening.HERE: hosts, **{one.name: others for one in agents}}
    assert not any(one.name in one.told[0].others for one in agents)
    with pytest.raises(UsageError, match="--interface eth0: this host has none of that name"):
        opened.find_addresses("eth0")


def test_a_host_sees_the_run_folder_where_it_sees_a_file_there(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    jobs = [OpenJob(str(tmp_path / name), {}, []) for name in ("mark", "none")]
    assert [agent.greeting(1, job).keeps for job in jobs] == [True, False]


@pytest.mark.parametrize(("device", "slots"), [("cpu", 3), ("cuda", 5)])
def test_a_host_without_a_number_has_as_many_slots_as_cores_or_gpus(device: str, slots: int) -> None:
    job, cluster = db.Job("digits", db.Downpour(replicas=2), device=device), Cluster(hosts="a,b:2")
    attempt: Any = SimpleNamespace(folder=None, job=job, settings=job.settings())
    make = cluster.make_processes(attempt, False)
    greeting = Greeting(3, 5, 0, {}, [], 0, 0, False)
    opened: Any = SimpleNamespace(
        agents=[
            SimpleNamespace(greeting=greeting),
            SimpleNamespace(greeting=msgspec.structs.replace(greeting, keeps=True)),
        ]
    )
    nobody: Any = Hooks(*[lambda *_: None] * 6, listens=False)
    sites = make(nobody)._place(opened).sites
    assert sites == (HostSlots("a", slots, False), HostSlots("b", 2, True))


def attending(
    rank: int, local: int, network: str, processors: list[int], cores: int = 0, quota: int = 9
) -> AttendMeeting:
    return AttendMeeting(rank, local, network, "n", processors, cores, quota, ticket.VERSION, 0)


@pytest.mark.parametrize(
    ("several", "hosts", "agents"),
    [
        ([attending(1, 1, "x", [1]), attending(2, 0, "x", [0])], {"n": 2}, {2: [0, 1]}),
        ([attending(1, 0, "x", [0, 1]), attending(2, 1, "x", [0, 1])], {"n": 2}, {1: [0, 1]}),
        ([attending(1, 0, "x", [0, 1], 3), attending(2, 1, "x", [0, 1], 3)], {"n": 3}, {1: [0, 1]}),
        ([attending(1, 0, "x", [0, 1], quota=1), attending(2, 1, "x", [0, 1], 3, quota=1)], {"n": 1}, {1: [0, 1]}),
        ([attending(1, 0, "y", [7]), attending(2, 0, "x", [0, 1])], {"n": 1, "n.2": 2}, {1: [7], 2: [0, 1]}),
    ],
    ids=["bound to one each", "several with the same", "slurm says how many", "a quota", "hosts of one name"],
)
def test_one_process_of_each_host_is_its_agent_and_more_of_them_offer_no_more(
    several: list[AttendMeeting], hosts: dict[str, int], agents: dict[int, list[int]]
) -> None:
    gathered = gathering(*reversed(several))
    gathered._name_hosts()
    assert gathered.hosts == tuple(Host(*one) for one in hosts.items())
    assert {gathered.start(name).attend.rank: gathered.start(name).processors for name in hosts} == agents


def gathering(*several: AttendMeeting, here: launched.Launched | None = None) -> Any:
    made: Any = object.__new__(meeting.Meeting)
    made._invitation, made._agents, made.restarts = SimpleNamespace(here=here), {}, 0
    made._others = {one.rank: Speaks("", one) for one in several}
    return made


def test_the_first_process_is_of_the_first_host_and_starts_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "network_identity", lambda: "x")
    gathered = gathering(attending(1, 0, "y", [0]), attending(2, 0, "x", [0]), here=launched.launched(MPIRUN))
    gathered._name_hosts()
    assert [one for one, _ in gathered._agents.values()] == [None, gathered._others[1]]


def test_one_start_runs_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = launched.launched(MPIRUN)
    monkeypatch.setattr(meeting, "_HELD", {start.name: SimpleNamespace(is_over=True)})
    with pytest.raises(UsageError, match="for one job, and that is over: start it again for the next one"):
        meeting.meet(start, str(tmp_path), "")


def test_the_hosts_of_ray_are_the_nodes_that_have_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    task = SimpleNamespace(remote=lambda _, told: sent.append(told))
    nodes = [
        {
            "NodeID": name,
            "NodeManagerHostname": name,
            "Alive": name != "dead",
            "Resources": {"CPU": cores} if cores else {},
        }
        for name, cores in (("b", 2.0), ("dead", 4.0), ("a", 3.0), ("none", 0))
    ]
    ray: Any = SimpleNamespace(
        init=lambda **_: None, nodes=lambda: nodes, put=lambda told: told, remote=lambda **_: lambda _: task
    )
    strategies: Any = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    for name, module in (("ray", ray), ("ray.util", ray), ("ray.util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    invitation = RayInvitation("")
    invitation.send(ticket.Ticket("a start", [], "", Authority("a start").issue(ticket.GUEST)))
    holders = [msgspec.json.decode(told, type=ticket.Ticket).holder for told in sent]
    assert [(one.rank, one.cores) for one in holders if one] == [(1, 3), (2, 2)]
    assert invitation.late([1, 2]).startswith("2 of the 2 nodes of Ray have not come (a, b)")
    nodes[:] = [{**node, "Alive": False} for node in nodes]
    with pytest.raises(UsageError, match="none of the cluster's nodes has processors"):
        RayInvitation("")


@pytest.mark.parametrize(("mode", "uid"), [(0o600, 1), (0o640, 0), (0o604, 0)])
def test_a_ticket_that_is_not_its_readers_alone_is_refused(
    tmp_path: Path, mode: int, uid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, own = tmp_path / "ticket", os.getuid()
    path.touch(mode)
    monkeypatch.setattr(os, "getuid", lambda: own + uid)
    with pytest.raises(UsageError, match=rf"is of user {own}, mode {mode:o}; a ticket is of user {own + uid} alone"):
        ticket.read_ticket(path, private=True)


def test_a_ticket_is_written_for_its_owner_alone_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opens = tmp_path / "ticket", os.open
    meeting._write(path, b"{}")
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()

    def shared(path: Any, flags: int, mode: int = 0) -> int:
        made = opens(path, flags, mode)
        os.fchmod(made, 0o640)
        return made

    monkeypatch.setattr(os, "open", shared)
    with pytest.raises(UsageError, match="keeps no file for its owner alone, and a ticket must be one"):
        meeting._write(path, b"{}")
    assert not list(tmp_path.iterdir())
