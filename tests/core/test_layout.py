"""The layout and its shards: everything lies somewhere, once, aligned; and a difference between two models is named."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.errors import LayoutError, UsageError
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import ALIGNMENT, ITEM_SIZES, TRAINABLE, Range, Tensor, check_same, lay_out

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
kinds = st.sampled_from(["parameter", "buffer", "frozen"])


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """A model's tensors, in any order, with at least one trained element."""
    made = [Tensor("always", (draw(st.integers(1, 300)),), draw(st.sampled_from(TRAINABLE)))]
    for index in range(draw(st.integers(0, 8))):
        kind = draw(kinds)
        dtype = draw(st.sampled_from(TRAINABLE if kind == "parameter" else sorted(ITEM_SIZES)))
        made.append(
            Tensor(f"t{index}", draw(shapes), dtype, kind, draw(st.integers(0, 2)) if kind == "parameter" else 0)
        )
    return draw(st.permutations(made))


@given(tensors(), st.data())
def test_every_byte_belongs_to_one_shard_and_every_cut_is_at_sixteen_elements(
    made: list[Tensor], data: st.DataObject
) -> None:
    layout = lay_out(made, groups=({}, {}, {}))
    shards = data.draw(st.integers(1, min(layout.parameters, 40)))
    assignments = cut(layout, 1, shards)
    assert len(assignments) == shards
    for ranges, start, stop in (
        ([a.moving for a in assignments], 0, layout.moving),
        ([a.frozen for a in assignments], layout.moving, layout.total),
    ):
        assert (ranges[0].start, ranges[-1].stop) == (start, stop)
        assert all(a.stop == b.start and a.size >= 0 for a, b in itertools.pairwise(ranges))
        fair = (stop - start) / shards
        assert all(abs(r.size - fair) <= 2 * ALIGNMENT for r in ranges)
    edges = {a.moving.stop for a in assignments} - {layout.moving}
    for edge in edges:
        for section in layout.sections:
            if section.start < edge < section.stop:
                assert (edge - section.start) % (16 * ITEM_SIZES[section.dtype]) == 0
    pieces = [piece for a in assignments for piece in layout.sections_in(a.moving)]
    covered = sorted((p.start, p.stop) for p in pieces if p.stop > p.start)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(covered))
    assert sum(stop - start for start, stop in covered) == sum(
        s.stop - s.start for s in layout.sections if s.kind != "frozen"
    )


def test_pieces_are_what_lies_within() -> None:
    layout = lay_out(
        [Tensor("a", (64,), "float32"), Tensor("b", (64,), "float64"), Tensor("c", (8,), "float32", "frozen")]
    )
    assert [(p.dtype, p.start, p.stop) for p in layout.sections_in(Range(128, 384))] == [
        ("float32", 128, 256),
        ("float64", 256, 384),
    ]
    assert layout.sections_in(Range(256, 256)) == ()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            [Tensor("w", (3,), "int64")],
            "parameter 'w' has dtype int64; a parameter may have float64, float32, bfloat16, float16",
        ),
        ([Tensor("b", (3,), "complex64", "buffer")], "buffer 'b' has dtype complex64"),
        ([Tensor("w", (3,), "float32", "frozen")], "nothing to train"),
        ([Tensor("w", (0, 3), "float32")], "nothing to train"),
        ([], "nothing to train"),
    ],
    ids=["integers", "complex", "frozen", "empty", "none"],
)
def test_what_cannot_be_trained_is_refused(made: list[Tensor], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        lay_out(made)


@pytest.mark.parametrize(
    ("shards", "says"),
    [(0, "--shards 0: at least one"), (-1, "--shards -1"), (11, "11 is more than the model's 10 parameters")],
)
def test_a_number_of_shards_that_cannot_be_is_refused(shards: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cut(lay_out([Tensor("w", (10,), "float32"), Tensor("b", (99,), "float32", "buffer")]), 1, shards)


MODEL = [Tensor("w", (3, 4), "float32"), Tensor("b", (4,), "float32"), Tensor("mean", (4,), "float32", "buffer")]


@pytest.mark.parametrize(
    ("joining", "options", "says"),
    [
        (MODEL[:2], {}, r"it lacks buffer 'mean', which the server has with shape \(4,\)"),
        (
            [Tensor("w", (4, 3), "float32"), *MODEL[1:]],
            {},
            r"its 'w' is parameter \[4, 3\] float32 in group 0, the server's is parameter \[3, 4\]",
        ),
        ([Tensor("w", (3, 4), "float64"), *MODEL[1:]], {}, "float64 in group 0, the server's is parameter .* float32"),
        ([Tensor("w", (3, 4), "float32", "frozen"), *MODEL[1:]], {}, "its 'w' is frozen"),
        ([*MODEL, Tensor("more", (), "int64", "buffer")], {}, "its buffer 'more' is unknown to the server"),
        ([Tensor("layer.w", (3, 4), "float32"), *MODEL[1:]], {}, "it calls 'layer.w' what the server calls 'w'"),
        ([MODEL[1], MODEL[0], MODEL[2]], {}, "the order of its parameters differ"),
        (MODEL, {"groups": ({"lr": 0.1},)}, "parameter groups, their options"),
        (MODEL, {"aliases": {"tied": "w"}}, "parameter groups, their options or the order"),
    ],
    ids=["lacks", "shape", "dtype", "kind", "extra", "renamed", "order", "groups", "tied"],
)
def test_a_model_that_differs_is_refused_with_its_first_difference(
    joining: list[Tensor], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(
        LayoutError,
        match=f"replica 3 does not fit the server's model: .*{says}.*; build the same model in every replica",
    ):
        check_same(lay_out(MODEL), lay_out(joining, **options), "replica 3")
