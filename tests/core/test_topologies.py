"""Topologies: graphs against the literature and networkx, walks and routes against counting, and topology.conf."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.errors import UsageError
from distbelief.network.graph import Cable, Routes, Topology, loads, spread
from distbelief.network.shapes import shape
from distbelief.network.slurm import parse_topology
from distbelief.places.topologies import topology as named

SLIM_FLIES = {  # q: ports, routers, cables, hosts, mean distance
    4: (6, 32, 96, 96, 1.8065),
    5: (7, 50, 175, 200, 1.8571),
    7: (11, 98, 539, 588, 1.8866),
    8: (12, 128, 768, 768, 1.9055),
    9: (13, 162, 1053, 1134, 1.9193),
    11: (17, 242, 2057, 2178, 1.9295),
    13: (19, 338, 3211, 3380, 1.9436),
    16: (24, 512, 6144, 6144, None),
    17: (25, 578, 7225, 7514, 1.9567),
    19: (29, 722, 10469, 10830, 1.9598),
}


def between_switches(topology: Topology) -> networkx.Graph:
    graph, hosts = networkx.Graph(), len(topology.hosts)
    graph.add_nodes_from(range(hosts, hosts + len(topology.switches)))
    graph.add_edges_from((c.end, c.other) for c in topology.cables if min(c.end, c.other) >= hosts)
    return graph


def distances(graph: networkx.Graph) -> Counter[int]:
    """Of all ordered pairs."""
    found: Counter[int] = Counter()
    for start in graph:
        seen, near = {start: 0}, deque([start])
        while near:
            at = near.popleft()
            for other in graph[at]:
                if other not in seen:
                    seen[other] = seen[at] + 1
                    near.append(other)
        assert len(seen) == len(graph), "not connected"
        found.update(seen.values())
    del found[0]
    return found


def mean(found: Counter[int]) -> float:
    return sum(distance * count for distance, count in found.items()) / found.total()


@pytest.mark.parametrize("q", [q if q < 16 else pytest.param(q, marks=pytest.mark.long) for q in SLIM_FLIES])
def test_a_slim_fly_is_that_of_the_paper(q: int) -> None:
    ports, routers, cables, hosts, far = SLIM_FLIES[q]
    topology = shape(f"slim-fly:{q}")
    graph = between_switches(topology)
    assert (len(topology.switches), len(topology.hosts), graph.number_of_edges()) == (routers, hosts, cables)
    assert {degree for _, degree in graph.degree()} == {ports}
    found = distances(graph)
    assert max(found) == 2
    assert far is None or round(mean(found), 4) == far
    assert mean(found) == pytest.approx((ports + 2 * (routers - 1 - ports)) / (routers - 1))


@pytest.mark.parametrize(
    ("k", "hosts", "switches", "cables"), [(4, 16, 20, 48), (8, 128, 80, 384), (16, 1024, 320, 3072)]
)
def test_a_fat_tree_is_that_of_k_ports(k: int, hosts: int, switches: int, cables: int) -> None:
    topology = shape(f"fat-tree:{k}")
    assert (len(topology.hosts), len(topology.switches), len(topology.cables)) == (hosts, switches, cables)
    assert {len(topology.around[v]) for v in range(hosts, hosts + switches)} == {k}
    away = Routes(topology).distances(0)
    near, half = Counter(away[1:hosts]), k // 2
    assert near == {2: half - 1, 4: half * (half - 1), 6: hosts - half * half}


@pytest.mark.parametrize(
    ("h", "routers", "hosts", "cables"), [(2, 36, 72, 90), (3, 114, 342, 456), (4, 264, 1056, 1452)]
)
def test_a_dragonfly_is_balanced(h: int, routers: int, hosts: int, cables: int) -> None:
    topology = shape(f"dragonfly:{h}")
    graph = between_switches(topology)
    assert (len(topology.switches), len(topology.hosts), graph.number_of_edges()) == (routers, hosts, cables)
    assert {len(topology.around[vertex]) for vertex in graph} == {4 * h - 1}
    assert max(distances(graph)) == 3


def test_a_torus_is_a_grid_of_rings() -> None:
    topology = shape("torus:4x4x4")
    graph = between_switches(topology)
    assert (len(topology.hosts), graph.number_of_edges()) == (64, 192)
    assert networkx.is_isomorphic(graph, networkx.grid_graph([4, 4, 4], periodic=True))
    found = distances(graph)
    assert max(found) == 6
    assert round(mean(found), 4) == 3.0476
    assert len(shape("torus:2x1").cables) == 2 + 1, "a ring of two is one cable"


@st.composite
def trees_of_switches(draw: st.DrawFn) -> Topology:
    """Any: hosts at any switches, switches and cables in any order."""
    switches = draw(st.integers(1, 9))
    above = [draw(st.integers(0, one - 1)) for one in range(1, switches)]
    at = draw(st.lists(st.integers(0, switches - 1), min_size=2, max_size=20))
    renamed = draw(st.permutations(range(switches)))
    cables = [Cable(host, len(at) + renamed[switch]) for host, switch in enumerate(at)]
    cables += [Cable(len(at) + renamed[one], len(at) + renamed[up]) for one, up in enumerate(above, 1)]
    names = [f"h{host}" for host in range(len(at))]
    return Topology("drawn", names, [f"s{one}" for one in range(switches)], draw(st.permutations(cables)))


def beyond(topology: Topology, link: int) -> set[int]:
    """The hosts on the far side of a link, by cutting it."""
    cable = topology.cables[link // 2]
    graph = networkx.Graph((c.end, c.other) for c in topology.cables if c is not cable)
    graph.add_nodes_from((cable.end, cable.other))
    far = cable.end if link % 2 else cable.other
    return {v for v in networkx.node_connected_component(graph, far) if v < len(topology.hosts)}


@given(trees_of_switches())
def test_a_ring_in_walk_order_takes_each_directed_link_of_a_tree_once(topology: Topology) -> None:
    walk, hosts = topology.walk, len(topology.hosts)
    assert sorted(walk) == list(range(hosts))
    ring = [(walk[i], walk[(i + 1) % hosts], 1.0) for i in range(hosts)]
    found = loads(Routes(topology), ring)
    divided = {link for link in range(2 * len(topology.cables)) if 0 < len(beyond(topology, link)) < hosts}
    assert found == dict.fromkeys(divided, 1.0)


def all_to_all(q: int) -> tuple[float, float, int]:
    """Between one host of each router: the mean and largest load of links between routers, and how many carry."""
    topology = shape(f"slim-fly:{q}")
    one = [next(v for v, _ in topology.around[len(topology.hosts) + s]) for s in range(len(topology.switches))]
    found = loads(Routes(topology), [(a, b, 1.0) for a in one for b in one if a != b])
    inner = [load for link, load in found.items() if not topology.ends_at_host(link)]
    return sum(inner) / len(inner), max(inner), len(inner)


def test_all_to_all_loads_each_link_of_a_slim_fly_alike() -> None:
    assert all_to_all(5) == (13.0, 13.0, 350)


def test_of_equal_routes_one_is_chosen_by_the_seed() -> None:
    carried, most, links = all_to_all(7)
    assert round(carried, 3) == 16.636
    assert 17 <= most <= 24  # paths are not unique, and one of a pair's is taken
    assert links == 2 * 539
    topology = shape("fat-tree:4")
    taken = [[Routes(topology, seed).of(0, host) for host in range(4, 16)] for seed in (0, 0, 1)]
    assert taken[0] == taken[1] != taken[2]
    assert len({routes[0][2] for routes in ([Routes(topology, seed).of(0, 15)] for seed in range(64))}) == 4


def test_a_route_leads_from_its_host_to_the_other() -> None:
    for name in ("tree:2x3x2", "fat-tree:4", "torus:3x3", "dragonfly:2", "slim-fly:4"):
        topology = shape(name)
        routes = Routes(topology, 3)
        for source, target in itertools.permutations(range(len(topology.hosts))[::5], 2):
            at, links = source, routes.of(source, target)
            for link in links:
                cable = topology.cables[link // 2]
                begin, end = (cable.other, cable.end) if link % 2 else (cable.end, cable.other)
                assert begin == at
                at = end
            assert at == target
            assert len(links) == routes.distances(target)[source]


def test_the_first_hosts_of_a_walk_stand_close() -> None:
    topology = shape("slim-fly:5")
    switches = [topology.switch_of(host) for host in topology.first(16, "--hosts")]
    assert len(set(switches)) == 4
    near = between_switches(topology)
    assert all(near.has_edge(a, b) for a, b in itertools.pairwise(dict.fromkeys(switches)))
    with pytest.raises(UsageError, match=r"tree:2x2: has 4 hosts, and --machines 5x1 needs 5: name a larger"):
        shape("tree:2x2").first(5, "--machines 5x1")


@given(trees_of_switches(), st.data())
def test_hosts_spread_over_switches_take_turns(topology: Topology, data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.sampled_from(topology.walk), unique=True, min_size=1))
    order = spread([topology.switch_of(host) for host in hosts])
    assert sorted(order) == list(range(len(hosts)))
    switches = [topology.switch_of(hosts[place]) for place in order]
    count = len(set(switches))
    assert len(set(switches[:count])) == count, "each switch has one before any has two"


CONF = """\
# a cluster of ours
SwitchName=leaf1 Nodes=node[01-03],login LinkSpeed=1000
SwitchName=leaf2 Nodes=node[04-05] \\
    LinkSpeed=1000   # of the links to these nodes
SwitchName=root  Switches=leaf[1-2] LinkSpeed=250
"""


def test_topology_conf_is_read() -> None:
    topology = parse_topology(CONF, "topology.conf")
    assert [topology.hosts[host] for host in topology.walk] == [
        "node01",
        "node02",
        "node03",
        "login",
        "node04",
        "node05",
    ]
    speeds = {topology.link_name(2 * n): cable.bandwidth for n, cable in enumerate(topology.cables)}
    assert speeds["node04 to leaf2"] == 125e6
    assert speeds["leaf2 to root"] == 31.25e6
    route = Routes(topology).of(*topology.named(["login", "node05"]))
    assert [topology.link_name(link) for link in route] == [
        "login to leaf1", "leaf1 to root", "root to leaf2", "leaf2 to node05",
    ]  # fmt: skip


def test_what_scontrol_writes_is_read() -> None:
    topology = parse_topology(
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a[0-1]\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=a[2-3]\n"
        "SwitchName=s2 Level=1 LinkSpeed=1 Nodes=a[0-3] Switches=s[0-1]\n",
        "f",
    )
    assert len(topology.cables) == 6
    assert {cable.bandwidth for cable in topology.cables} == {0.0}, "Slurm writes 1 where nobody has said anything"


def test_a_last_line_that_is_continued_counts() -> None:
    assert parse_topology("SwitchName=s \\\r\n Nodes=a \\", "f").hosts == ("a",)


def test_names_of_several_brackets_are_read() -> None:
    assert parse_topology("SwitchName=s Nodes=r[1-2]n[08-10,3]x", "f").hosts == (
        "r1n08x", "r1n09x", "r1n10x", "r1n3x", "r2n08x", "r2n09x", "r2n10x", "r2n3x",
    )  # fmt: skip


WRONG = {
    "a cycle": (
        "SwitchName=a Switches=b\nSwitchName=b Switches=c\nSwitchName=c Switches=a Nodes=n1",
        r"line \d: a cycle, \w under \w under \w under \w; remove \w from its Switches=",
    ),
    "a host on two switches": (
        "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n2\nSwitchName=c Switches=a,b",
        r"line 2: host n2 is under b, and under a by .*line 1; leave it under one of them",
    ),
    "a switch under two": (
        "SwitchName=a Nodes=n\nSwitchName=b Switches=a\nSwitchName=c Switches=a",
        r"line 3: switch a is under c, and under b by .*line 2; leave it under one of them",
    ),
    "two trees": ("SwitchName=a Nodes=n\nSwitchName=b Nodes=m", r"line 2: nothing joins .* add .* Switches=a,b"),
    "a switch that is not there": ("SwitchName=a Switches=b", r"line 1: there is no line SwitchName=b; add one"),
    "a switch twice": ("SwitchName=a Nodes=n\n\nSwitchName=a Nodes=m", r"line 3: switch a is listed twice"),
    "no host": ("# nothing\n", r"names no host; write lines such as SwitchName="),
    "a block": ("BlockName=b Nodes=n", r"line 1: 'BlockName=b' belongs to no tree of switches; write"),
    "nothing under it": ("SwitchName=a LinkSpeed=3", r"line 1: must name one switch, and what is under it"),
    "two nodes": ("SwitchName=a Nodes=n Nodes=m", r"line 1: must name one switch"),
    "a speed that is none": ("SwitchName=a Nodes=n LinkSpeed=10G", r"LinkSpeed=10G is no whole number of Mbit/s"),
    "an open bracket": ("SwitchName=a Nodes=n[1-2", r"'n\[1-2' are no names; write them as"),
    "numbers that fall": ("SwitchName=a Nodes=n[2-1]", r"\[2-1\] are no numbers, or too many"),
    "a million": ("SwitchName=a Nodes=n[0-999999999]", r"are no numbers, or too many"),
    "a million by brackets": ("SwitchName=a Nodes=n[0-9999]m[0-9999]", r"are more than 16384 names"),
    "a name that an option is": ("SwitchName=a Nodes=-rf", r"'-rf' is no name"),
    "several at once": ("SwitchName=a[1-2] Nodes=n", r"line 1: names 2 switches; write a line for each"),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_file_that_is_no_tree_is_refused_with_its_line(why: str) -> None:
    text, message = WRONG[why]
    with pytest.raises(UsageError, match=message):
        parse_topology(text, "topology.conf")


@given(st.text(st.sampled_from("SwitchName=Nodes Switches LinkSpeed[]-,0123ab\\\n#"), max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_topology(text, "f")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing: cannot be read .*No such file.*; name a topology\.conf"):
        named(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match=r"topology\.yaml: YAML is not read; have .* scontrol show topology"):
        named("topology.yaml")
    (tmp_path / "topology.conf").write_text(CONF)
    assert len(named(str(tmp_path / "topology.conf")).hosts) == 6
    (tmp_path / "long").write_text("#" * (1 << 22) + "\n")
    with pytest.raises(UsageError, match="is longer than 4,194,304 characters"):
        named(str(tmp_path / "long"))


def test_hosts_that_a_file_lacks_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"topology\.conf: .*'node06'; add it to the Nodes= of its switch, as node01, "
    ):
        parse_topology(CONF, "topology.conf").named(["node01", "node06"])
    with pytest.raises(UsageError, match=r"unknown host 'b'; .*, as a0, a1, a2, a3, a4, a5, a6, a7, \.\.\.$"):
        parse_topology("SwitchName=s Nodes=a[0-9999]", "f").named(["b"])


def words() -> Iterator[tuple[str, str]]:
    for q in (2, 6, 10, 12, 15, 18):
        yield (
            f"slim-fly:{q}",
            f"slim-fly:{q}: q must be the power of a prime, and more than 2; write one of 3, 4, 5, 7, 8",
        )
    yield "fat-tree:5", "fat-tree:5: a switch's ports are halved; write an even number, such as 6"
    yield "tree", "write it as tree:8x8"
    yield "tree:0x3", "write it as tree:8x8"
    yield "tree:axb", "write it as tree:8x8"
    yield "slim-fly:5x5", "write it as tree:8x8"
    yield "trie:2x2", "tree"
    yield "tree:99999x99999", "there may be at most 16384"
    yield "torus:99999", "there may be at most 16384"
    yield "slim-fly:99998", "there may be at most 16384 hosts; write at most slim-fly:19"
    yield "dragonfly:8", "there may be at most 16384 hosts; write at most dragonfly:7"
    yield "fat-tree:42", "there may be at most 16384 hosts; write at most fat-tree:40"


@pytest.mark.parametrize(("text", "message"), [*words()])
def test_shapes_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shape(text)
