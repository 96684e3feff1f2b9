"""What crosses each host's line: AlexNet in two columns, two replicas of it on four hosts with 1 Gbit/s each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
from commands import Command, Record, roles_of
from hosts import Hosts, run

SAMPLES, BATCH, FLOAT = 1024, 64, 4
PART = 60_965_224 // 2 * FLOAT
"""Bytes of the parameters of a partition."""
CROSSES = 128 * 13 * 13 + 128 * 6 * 6 + 2048 + 2048
"""Numbers that one column sends the other for a sample, before the third convolution and each fully connected layer;
as many gradients come back.
"""
LOGITS = 500
"""That the second sends the first, of a sample, and whose gradient comes back."""
HEADERS = 0.01
"""Of Ethernet, IP, TCP, TLS and of messages that have no bytes, on a line of packets that are put together."""
SHAPED = ("rate", "1gbit", "burst", "256kb", "latency", "50ms")
WORDS = ("alexnet", "downpour", "--replicas", "2", "--partitions", "2", "--shards", "2", "--split", "groups")
WORDS += ("--batch-size", str(BATCH), "--lr", "0.001", "--checkpoint-every", "0", "--snapshot-every", "0")
WORDS += ("--evaluate-every", "0")


class Run(NamedTuple):
    """A job that has ended."""

    lines: dict[str, tuple[int, int]]
    """Bytes that each host has sent and received since it is there."""
    steps: list[int]
    """Of each replica."""
    begun: dict[str, int]
    """How often each partition has sent its shard the initial parameters: those of the replica that is ready first."""


def shaped(hosts: Hosts) -> None:
    """Let no more than 1 Gbit/s through each line, both ways."""
    for name in hosts.names:
        for host, device in ((hosts["home"], name), (hosts[name], "eth0")):
            inside = ("nsenter", "--target", str(host.init), "--net")
            run(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *SHAPED)


def lines(hosts: Hosts) -> dict[str, tuple[int, int]]:
    """What has gone over each host's line, out and in."""
    found = {}
    for name in hosts.names:
        [told] = json.loads(hosts[name].ip("-s", "-j", "link", "show", "eth0"))
        found[name] = told["stats64"]["tx"]["bytes"], told["stats64"]["rx"]["bytes"]
    return found


def begun(records: list[Record]) -> dict[str, int]:
    """Count the initial parameters that each partition has sent, which are the only large part of `control`."""
    counted = [one for one in records if one.get("event") == "BytesCounted" and one["role"].startswith("replica")]
    return {one["role"]: round(one["sent"].get("control", 0) / PART) for one in counted}


def expected(at: dict[str, str], steps: list[int], begun: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The bytes that each host sends and receives, by who is on which: for each step of a replica, each partition
    pushes its gradient to the shard of its own and fetches its parameters from there, and what crosses goes to the
    other one. The first replica sends its parameters too.
    """
    found = {name: [0, 0] for name in at.values()}

    def goes(source: str, target: str, size: int) -> None:
        if at[source] != at[target]:
            found[at[source]][0] += size
            found[at[target]][1] += size

    for replica, count in enumerate(steps):
        for part in (0, 1):
            own, other, shard = f"replica {replica}.{part}", f"replica {replica}.{1 - part}", f"shard {part}"
            goes(own, shard, (count + begun[own]) * PART)
            goes(shard, own, count * PART)
            goes(own, other, count * BATCH * FLOAT * (2 * CROSSES + LOGITS))
    return {name: (out, into) for name, (out, into) in found.items()}


@pytest.mark.timeout(900)
def test_each_line_carries_the_bytes_of_the_formula(hosts: Hosts, start: Callable[..., Command]) -> None:
    shaped(hosts)
    at: dict[str, str] = {}

    def play(epochs: int) -> Run:
        before = lines(hosts)
        job = start(*WORDS, "--epochs", str(epochs))
        job.until(lambda record: record.get("event") == "Stepped" and record["steps"], seconds=300)
        at.update({role: name for name in hosts.names for role in roles_of(hosts, name)})
        result = job.until(lambda record: "per_replica" in record, seconds=600)
        assert result["outcome"] == "done", job.errors()
        assert set(job.wait()) == {0}
        after = lines(hosts)
        gone = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in before}
        return Run(gone, [one["steps"] for one in result["per_replica"]], begun(job.records))

    short, long = play(1), play(2)
    assert sum(long.steps) - sum(short.steps) == SAMPLES // BATCH
    due = expected(
        at,
        [more - less for more, less in zip(long.steps, short.steps, strict=True)],
        {role: count - short.begun[role] for role, count in long.begun.items()},
    )
    assert {role.split(".")[0] for role in at} == {"replica 0", "replica 1", "shard 0", "shard 1"}
    assert len({name for role, name in at.items() if role.startswith("replica")}) == len(hosts.names)
    for name, (out, into) in due.items():
        for seen, wanted in zip(
            (more - less for more, less in zip(long.lines[name], short.lines[name], strict=True)), (out, into),
            strict=True,
        ):  # fmt: skip
            print(f"{name}: {seen:,} bytes, {wanted:,} by the formula, {seen / wanted - 1:+.2%}")
            assert wanted <= seen <= wanted * (1 + HEADERS)
