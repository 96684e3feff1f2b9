"""The mesh, and a layout split over partitions: each piece lies once, with its partition, where it is counted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.core import roles
from distbelief.core.roles import MOST, Mesh
from distbelief.errors import LayoutError, UsageError
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import (
    ALIGNMENT,
    ITEM_SIZES,
    Layout,
    PartitionRanges,
    Piece,
    Range,
    Tensor,
    check_same,
    lay_out,
    whole,
)

KINDS = ("parameter", "buffer", "frozen")


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_mesh_has_every_partition_of_every_replica_once(replicas: int, partitions: int) -> None:
    mesh = Mesh(replicas, partitions)
    mesh.check()
    assert mesh.size == len(mesh.cells) == len(set(mesh.cells))
    assert set(mesh.cells) == {(r, p) for r in range(replicas) for p in range(partitions)}
    named = [roles.parse(text) for text in roles.replicas(mesh)]
    assert [(role.index, max(role.partition, 0)) for role in named] == list(mesh.cells)
    assert all((role.partition >= 0) == (partitions > 1) and role.kind is roles.Kind.REPLICA for role in named)


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (Mesh(0), "--replicas 0: must be 1 or more"),
        (Mesh(2, 0), "--partitions 0: must be 1 or more"),
        (Mesh(-1, 2), "--replicas -1: must be 1 or more"),
        (Mesh(MOST + 1), "--replicas 65537: must be at most 65536"),
        (Mesh(1, MOST + 1), "--partitions 65537: must be at most 65536"),
        (Mesh(300, 300), "--replicas 300 of 300 partitions are 90000 processes: there may be at most 65536"),
    ],
    ids=["no replica", "no partition", "negative", "replicas", "partitions", "together"],
)
def test_a_mesh_that_cannot_be_is_refused(mesh: Mesh, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mesh.check()


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, list[Piece]], int]:
    """Tensors of a model, the pieces of those that are split or elsewhere than at partition 0, and the number of
    partitions; each partition has a trained parameter.
    """
    partitions = draw(st.integers(1, 4))
    made = [Tensor(f"always{partition}", (draw(st.integers(1, 60)),), "float32") for partition in range(partitions)]
    split = {
        f"always{partition}": [whole(made[partition], partition)]
        for partition in range(partitions)
        if partition or draw(st.booleans())
    }
    for index in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(KINDS))
        dtype = draw(
            st.sampled_from(["float32", "float64", "bfloat16"] if kind == "parameter" else ["int8", "float64"])
        )
        shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        tensor = Tensor(f"t{index}", shape, dtype, kind, draw(st.integers(0, 1)) if kind == "parameter" else 0)
        made.append(tensor)
        if draw(st.booleans()):
            sides = shape or (1,)
            along = draw(st.integers(0, len(sides) - 1))
            inner = (
                sorted(draw(st.sets(st.integers(1, max(1, sides[along] - 1)), max_size=3))) if sides[along] > 1 else []
            )
            edges = [0, *sorted(inner), sides[along]]
            at = st.integers(0, partitions - 1)
            split[tensor.name] = [Piece(along, a, b, draw(at)) for a, b in itertools.pairwise(edges)]
    return draw(st.permutations(made)), split, partitions


@given(models())
def test_every_piece_lies_once_at_its_partition_in_the_order_of_kind_dtype_and_group(
    made: tuple[list[Tensor], dict[str, list[Piece]], int],
) -> None:
    tensors, split, partitions = made
    layout = lay_out(tensors, ({}, {}), split=split)
    assert len(layout.partitions) == partitions
    wanted = [(t.name, piece) for t in tensors for piece in split.get(t.name, [whole(t)])]
    assert sorted(map(repr, wanted)) == sorted(repr((e.tensor.name, e.piece)) for e in layout.entries)
    assert sum(e.elements for e in layout.entries) == sum(t.elements for t in tensors)
    order = [(e.piece.partition, KINDS.index(e.tensor.kind), e.tensor.dtype, e.tensor.group) for e in layout.entries]
    assert order == sorted(order)
    position = 0
    for entry in layout.entries:
        assert position <= entry.start < position + ALIGNMENT
        assert entry.start % ITEM_SIZES[entry.tensor.dtype] == 0
        position = entry.stop
        partition = layout.partitions[entry.piece.partition]
        held = {"parameter": partition.trained, "buffer": partition.moving, "frozen": partition.frozen}[
            entry.tensor.kind
        ]
        assert held.start <= entry.start <= entry.stop <= held.stop
        if entry.tensor.kind == "buffer":
            assert entry.start >= partition.trained.stop
    assert layout.total == position
    for partition, before in zip(layout.partitions, [None, *layout.partitions], strict=False):
        assert (
            partition.trained.start
            == partition.moving.start
            <= partition.trained.stop
            <= partition.moving.stop
            == partition.frozen.start
        )
        assert partition.all.start % ALIGNMENT == 0
        assert before is None or 0 <= partition.all.start - before.all.stop < ALIGNMENT
    assert len({(s.partition, s.kind, s.dtype, s.group) for s in layout.sections}) == len(layout.sections)


def test_two_partitions_lie_where_a_reader_counts_them() -> None:
    made = [Tensor("weight", (4, 10), "float32"), Tensor("mean", (3,), "float64", "buffer")]
    made.append(Tensor("table", (8,), "int8", "frozen"))
    split = {"weight": [Piece(1, 0, 4, 0), Piece(1, 4, 10, 1)], "mean": [Piece(0, 0, 3, 1)]}
    layout = lay_out(made, split=split)
    assert [(e.tensor.name, e.shape, e.start, e.stop) for e in layout.entries] == [
        ("weight", (4, 4), 0, 64),
        ("table", (8,), 128, 136),
        ("weight", (4, 6), 256, 352),
        ("mean", (3,), 384, 408),
    ]
    assert layout.partitions == (
        PartitionRanges(Range(0, 64), Range(0, 64), Range(64, 136)),
        PartitionRanges(Range(256, 352), Range(256, 408), Range(408, 408)),
    )
    with pytest.raises(UsageError, match="the model is split over 2 partitions; this needs a model that is not split"):
        _ = layout.moving


@given(models())
def test_a_model_at_one_partition_lies_as_if_nobody_had_spoken_of_partitions(
    made: tuple[list[Tensor], dict[str, list[Piece]], int],
) -> None:
    tensors, _, _ = made
    named = {t.name: [whole(t)] for t in tensors}
    assert lay_out(tensors, ({}, {}), split=named) == lay_out(tensors, ({}, {}))


W = Tensor("w", (6, 4), "float32")


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([Piece(0, 0, 2, 0), Piece(0, 3, 6, 1)], "does not continue from index 2"),
        ([Piece(0, 0, 3, 0), Piece(0, 2, 6, 1)], "does not continue from index 3"),
        ([Piece(0, 0, 3, 0), Piece(1, 3, 4, 1)], "does not continue from index 3 of one dimension"),
        ([Piece(2, 0, 4, 0)], "does not continue from index 0"),
        ([Piece(-1, 0, 4, 0)], "does not continue from index 0"),
        ([Piece(0, 0, 6, -1)], "partition=-1"),
        ([Piece(0, 0, 5, 0)], "which end at index 5"),
        ([Piece(0, 0, 7, 0)], "which end at index 7"),
        ([Piece(0, 0, -1, 0)], "does not continue from index 0"),
        ([Piece(0, 0, 0, 0), Piece(0, 0, 6, 1)], "does not continue from index 0"),
        ([], "which end at index 0"),
    ],
    ids=[
        "gap",
        "overlap",
        "dimensions",
        "no such",
        "negative",
        "no home",
        "short",
        "long",
        "backwards",
        "empty",
        "none",
    ],
)
def test_pieces_that_are_not_their_tensor_are_refused(pieces: list[Piece], says: str) -> None:
    with pytest.raises(UsageError, match=f"parameter 'w' .* is not whole in its pieces.*{says}"):
        lay_out([W], split={"w": pieces})


def test_a_partition_without_a_trained_parameter_is_refused() -> None:
    with pytest.raises(UsageError, match="partition 1 has no trained parameter: split the model over fewer"):
        lay_out([W], split={"w": [Piece(0, 0, 3, 0), Piece(0, 3, 6, 2)]})


def test_a_model_that_is_split_otherwise_does_not_fit() -> None:
    halves = [lay_out([W], split={"w": [Piece(0, 0, at, 0), Piece(0, at, 6, 1)]}) for at in (2, 3)]
    with pytest.raises(LayoutError, match="its parameters are split differently from the server's"):
        check_same(*halves, "replica 1")


@given(models(), st.data())
def test_every_byte_of_a_partition_belongs_to_one_shard_and_no_shard_has_two_partitions(
    made: tuple[list[Tensor], dict[str, list[Piece]], int], data: st.DataObject
) -> None:
    tensors, split, partitions = made
    layout = lay_out(tensors, ({}, {}), split=split)
    shards = data.draw(st.integers(partitions, max(partitions, min(layout.parameters, 12))))
    found = cut(layout, partitions, shards)
    assert len(found) == shards
    for kind in ("moving", "frozen"):
        ranges = [getattr(one, kind) for one in found if getattr(one, kind).size]
        for partition in layout.partitions:
            held: Range = getattr(partition, kind)
            own = [one for one in ranges if held.start <= one.start and one.stop <= held.stop]
            ranges = ranges[len(own) :]
            assert [one.start for one in own] == [held.start, *(one.stop for one in own)][: len(own)]
            assert not held.size or own[-1].stop == held.stop
            assert all(one.stop % ALIGNMENT == 0 for one in own[:-1])
        assert not ranges, "a range that is of no home, or of two"
    for one in found:
        assert len({e.piece.partition for e in layout.entries for part in (one.moving, one.frozen)
                    if max(e.start, part.start) < min(e.stop, part.stop)}) <= 1  # fmt: skip


def parts(total: int, count: int) -> list[tuple[int, ...]]:
    """Every way to make a number of so many others, each at least 1."""
    if count == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total - count + 2) for rest in parts(total - first, count - 1)]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(0, 6))
def test_no_other_sharing_of_the_partitions_has_a_smaller_largest_shard(sizes: list[int], more: int) -> None:
    tensors = [Tensor(f"w{partition}", (32 * size,), "float32") for partition, size in enumerate(sizes)]
    layout: Layout = lay_out(tensors, split={t.name: [whole(t, partition)] for partition, t in enumerate(tensors)})
    count = len(sizes) + more
    found = cut(layout, len(sizes), count)
    least = min(
        max(size / share for size, share in zip(sizes, shares, strict=True)) for shares in parts(count, len(sizes))
    )
    assert max(a.moving.size for a in found) <= ALIGNMENT * (least + 1)


@pytest.mark.parametrize(
    ("partitions", "shards", "says"),
    [
        (1, 2, "--partitions 1: the model is split over 2"),
        (3, 3, "--partitions 3: the model is split over 2"),
        (2, 1, "--shards 1 of a model in 2 partitions: each has shards of its own; use at least 2"),
        (2, 25, "25 is more than the model's 24 parameters"),
    ],
    ids=["whole", "three", "one shard", "many"],
)
def test_a_cut_that_does_not_fit_the_mesh_is_refused(partitions: int, shards: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cut(lay_out([W], split={"w": [Piece(0, 0, 3, 0), Piece(0, 3, 6, 1)]}), partitions, shards)
