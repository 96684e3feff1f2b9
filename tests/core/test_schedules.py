"""Every schedule, on 1 to 17 ranks and lengths from 0, is an all-reduce with the bytes and steps of its formula."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from proofs import prove

from distbelief.cli import costs
from distbelief.errors import LocalProtocolError, UsageError
from distbelief.schedules.allreduce import ALGORITHMS, FLAT, broadcast, by_host, schedule
from distbelief.schedules.price import LinkModel, cheapest, formula, price
from distbelief.schedules.schedule import Move, Schedule

RANKS = range(1, 18)
LENGTHS = (0, 1, 2, 3, 5, 16, 17, 64, 1000)
HIERARCHICAL = [f"hierarchical:{inner}" for inner in FLAT]


def play(schedule: Schedule, held: list[torch.Tensor]) -> list[torch.Tensor]:
    """All ranks at once, by the rules at the top of schedules/schedule."""
    held = [one.clone() for one in held]
    for step in schedule.steps:
        before = [one.clone() for one in held]
        for source, target, start, stop, adds in step:
            here, there = held[target][start:stop], before[source][start:stop]
            here.add_(there) if adds else here.copy_(there)
    return held


@pytest.mark.parametrize("name", [*FLAT, *HIERARCHICAL])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.long
def test_every_schedule_is_proved_and_moves_the_bytes_of_its_formula(name: str, ranks: int) -> None:
    for per_host in (
        sorted({1, 2, 3, 5, ranks // 2 or 1, ranks} & set(range(1, ranks + 1))) if name in HIERARCHICAL else (0,)
    ):
        hosts = by_host(ranks, per_host)
        for length in LENGTHS if name in FLAT or name == "hierarchical:ring" else (3, 17):
            made = schedule(name, ranks, length, hosts if name in HIERARCHICAL else ())
            prove(made)
            expected = formula(name, ranks, length, hosts)
            assert made.moved == expected.moved
            assert len(made.steps) <= expected.steps
            if length >= ranks:
                assert len(made.steps) == expected.steps


@pytest.mark.parametrize("ranks", RANKS)
def test_a_broadcast_gives_all_what_the_first_has(ranks: int) -> None:
    made = broadcast(ranks, 3)
    prove(made)
    assert made.moved == 3 * (ranks - 1)
    with pytest.raises(LocalProtocolError, match="of which rank 0 are missing"):
        prove(msgspec.structs.replace(made, ranks=max(ranks, 2), steps=((Move(1, 0, 0, 3, False),), *made.steps)))


@given(
    st.sampled_from([*FLAT, *HIERARCHICAL]),
    st.integers(1, 17),
    st.integers(0, 70),
    st.integers(1, 17),
    st.integers(0, 2**31),
)
def test_every_schedule_sums(name: str, ranks: int, length: int, per_host: int, seed: int) -> None:
    made = schedule(name, ranks, length, by_host(ranks, per_host) if name in HIERARCHICAL else ())
    chance = torch.Generator().manual_seed(seed)
    whole = [torch.randint(-(2**40), 2**40, (length,), generator=chance).double() for _ in range(ranks)]
    for ended in play(made, whole):  # whole numbers add up exactly in any order
        assert torch.equal(ended, torch.stack(whole).sum(0))
    single = [torch.randn(length, generator=chance) for _ in range(ranks)]
    exact = torch.stack(single).double().sum(0)
    ended = play(made, single)
    assert all(torch.equal(one, ended[0]) for one in ended)
    torch.testing.assert_close(ended[0].double(), exact, rtol=0, atol=ranks * 2**-22)


SPOILT = {
    "a step is missing": lambda steps: steps[:-1],
    "a transfer is missing": lambda steps: (steps[0][1:], *steps[1:]),
    "a part is added twice": lambda steps: (steps[0], *steps),
    "the sum is given before it is made": lambda steps: (*steps[2:], *steps[:2]),
    "the steps are one": lambda steps: (tuple(t for step in steps for t in step),),
    "a sum is put beside an addition": lambda steps: (*steps[:-1], (*steps[-1], steps[-1][0]._replace(adds=True))),
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_checker_refuses_what_is_no_all_reduce(name: str, how: str) -> None:
    good = schedule(name, 4, 16, by_host(4, 2) if name == "hierarchical" else ())
    prove(good)
    spoilt = SPOILT[how](good.steps)
    if spoilt == good.steps:
        pytest.skip("changes nothing here")
    with pytest.raises(LocalProtocolError):
        prove(msgspec.structs.replace(good, steps=spoilt))


def test_the_checker_refuses_sums_that_differ_in_their_bits() -> None:
    """Each of three ranks adds the two others: (a + b) + c is not a + (b + c)."""
    steps = (tuple(Move(s, t, 0, 1, True) for t in range(3) for s in range(3) if s != t),)
    with pytest.raises(LocalProtocolError, match="other additions"):
        prove(Schedule("mine", 3, 1, steps))


def test_the_checker_refuses_a_part_that_is_put_in_the_place_of_the_sum() -> None:
    steps = ((Move(1, 0, 0, 1, True), Move(0, 1, 0, 1, False)), (Move(0, 1, 0, 1, False),))
    prove(Schedule("mine", 2, 1, (steps[0][:1], steps[1])))
    with pytest.raises(LocalProtocolError, match=r"step 0: .* puts a sum of which rank 1 are missing"):
        prove(Schedule("mine", 2, 1, steps))


def test_the_checker_refuses_a_transfer_to_nobody() -> None:
    with pytest.raises(LocalProtocolError, match="no move between two"):
        prove(Schedule("mine", 2, 1, ((Move(0, 2, 0, 1, True),),)))
    with pytest.raises(LocalProtocolError, match="elements 0 to 2 of 1"):
        prove(Schedule("mine", 2, 1, ((Move(0, 1, 0, 2, True),),)))


@pytest.mark.parametrize("name", ["fast", "ring:tree", "hierarchical:", "hierarchical:fast"])
def test_an_unknown_algorithm_is_refused_with_the_nearest(name: str) -> None:
    if name == "hierarchical:":
        with pytest.raises(UsageError, match="between hosts"):
            schedule(name, 2, 2)
    else:
        with pytest.raises(UsageError, match="Known"):
            schedule(name, 2, 2)


TABLE = {
    # ranks, bytes: ring, halving-doubling, butterfly, tree, one server; milliseconds, papers.md section 8
    (8, 4_000): (0.286, 0.126, 0.070, 0.139, 0.091),
    (8, 1_000_000): (1.68, 1.52, 2.46, 4.92, 12.8),
    (8, 100_000_000): (140, 140, 240, 480, 1280),
    (32, 4_000): (1.25, 0.206, 0.116, 0.232, 0.245),
    (32, 1_000_000): (2.79, 1.75, 4.10, 8.2, 51.2),
    (32, 100_000_000): (156, 155, 400, 800, 5120),
}


@pytest.mark.parametrize(("ranks", "size"), TABLE)
def test_prices_are_those_of_the_table(ranks: int, size: int) -> None:
    link = LinkModel(20e-6, 1.25e9)
    names = ["ring", "halving-doubling", "butterfly", "tree"]
    found = [price(schedule(name, ranks, size // 4), 4, link) for name in names]
    found.append(price(schedule("naive", ranks + 1, size // 4), 4, link))  # the one server is a rank of its own
    assert [1e3 * one for one in found] == pytest.approx(TABLE[ranks, size], rel=0.01)


def closed(name: str, p: int, n: float, link: LinkModel) -> float:
    """The formulas of papers.md section 8, for powers of two."""
    alpha, beta, gamma = link.latency, 1 / link.bandwidth, link.reduction
    log = p.bit_length() - 1
    once = (p - 1) / p * n
    return {
        "naive": 2 * (alpha + (p - 1) * n * beta) + gamma * n,
        "tree": 2 * log * (alpha + n * beta) + log * gamma * n,
        "butterfly": log * (alpha + n * beta + gamma * n),
        "halving-doubling": 2 * log * alpha + 2 * once * beta + once * gamma,
        "ring": 2 * (p - 1) * alpha + 2 * once * beta + once * gamma,
        "direct": 2 * (alpha + once * beta) + gamma * n / p,
    }[name]


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_prices_are_those_of_the_formulas_with_the_cost_of_adding(name: str, ranks: int) -> None:
    link = LinkModel(
        1e-4, 1e8, 1e-9
    )  # adding is faster than receiving, so that of many at once only the last is waited for
    assert price(schedule(name, ranks, 16_000), 4, link) == pytest.approx(closed(name, ranks, 64_000, link), rel=1e-9)


def test_a_hierarchical_all_reduce_costs_what_its_formula_says() -> None:
    g, m, n = 4, 8, 640_000
    inside, outside = LinkModel(2e-6, 1e10), LinkModel(5e-5, 1e8)
    hosts = by_host(g * m, g)
    expected = 2 * ((g - 1) * inside.latency + (g - 1) / g * n / inside.bandwidth)
    expected += 2 * ((m - 1) * outside.latency + (m - 1) / m * (n / g) / outside.bandwidth)
    assert price(schedule("hierarchical", g * m, n // 4, hosts), 4, outside, inside) == pytest.approx(
        expected, rel=1e-9
    )


def test_the_cheapest_changes_with_the_length() -> None:
    among = ("butterfly", "halving-doubling", "ring")
    found = [cheapest(by_host(6, 0), n, 4, LinkModel(20e-6, 1.25e9), among=among) for n in (10, 10_000_000)]
    assert found == ["butterfly", "ring"]
    outside, inside, among = LinkModel(1e-3, 1e8), LinkModel(1e-6, 1e11), ("ring", "naive", "hierarchical")
    assert cheapest(by_host(16, 8), 10_000_000, 4, outside, inside, among) == "hierarchical"


def test_the_document_shows_what_the_command_draws(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text()
    shown = re.findall(r"^\$ distbelief draw (.*)\n((?:.|\n)*?)\n```", text, re.MULTILINE)
    assert shown
    for words, drawn in shown:
        costs.draw(words.split())
        assert capsys.readouterr().out.rstrip() == drawn
    for name in ALGORITHMS:
        costs.draw([name])
        assert capsys.readouterr().out.startswith(f"{name}, 4 ranks")


@pytest.mark.parametrize(
    "words",
    [
        "ring --ranks 0", "ring --ranks 27", "rong", "ring --rank 3", "gpipe --ranks 3", "1f1b --partitions 0",
        "gpipe --microbatches 65", "sequential --microbatches 2",
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(words: str) -> None:
    with pytest.raises(UsageError):
        costs.draw(words.split())
