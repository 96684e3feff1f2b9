"""Checkpoints: what is saved comes back, in any cut; what is broken is a CheckpointError; the last good one stays."""

import dataclasses
import errno
import itertools
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from distbelief.core.effects import SCRIPT
from distbelief.core.optimizer import Optimizer
from distbelief.core.portions import Portion, Position
from distbelief.core.settings import Plan, Settings
from distbelief.errors import CheckpointError, LocalProtocolError
from distbelief.record.checkpoints import FORMAT, Checkpoints, read_manifest
from distbelief.record.model_file import HEADER_LIMIT, stored
from distbelief.record.restore import CheckpointStore, load_part, load_script, load_weights
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Piece, Tensor, lay_out
from distbelief.strategies import Downpour

POSITION = Position(1, 3, (Portion(0, 2, 1),))
TENSORS = (
    Tensor("a.weight", (33, 7), "float32"), Tensor("a.bias", (33,), "float32"), Tensor("b.weight", (40, 5), "bfloat16"),
    Tensor("b.gain", (1,), "float64", group=1), Tensor("norm.count", (), "int64", "buffer"), Tensor("norm.mean", (33,),
        "float32", "buffer"),
    Tensor("embedding", (20, 6), "float32", "frozen"), Tensor("mask", (3,), "bool", "frozen"), Tensor("none", (0,),
        "float32", "buffer"),
)  # fmt: skip
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True, "fused": True}),
    "nadam": (torch.optim.NAdam, {}),
}


def plan_of(shards, tensors=TENSORS, optimizer="sgd", keep=2, aliases=None):
    layout = lay_out(tensors, ({}, {"lr": 0.1}), aliases)
    own = Settings(strategy=Downpour(2, shards, optimizer=Optimizer(optimizer)), keep_checkpoints=keep)
    return Plan(own, layout, cut(layout, 1, shards), 100)


def whole(plan, optimizer, seed=0):
    """A flat vector (its gaps zero) and, for each section of parameters, the arrays after two steps of an optimizer on
    all of it.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(plan.layout.total, dtype=torch.uint8)
    for section in plan.layout.sections:
        part, dtype = flat[section.start : section.stop], getattr(torch, section.dtype)
        if dtype.is_floating_point:
            part.view(dtype).copy_(torch.randn(part.view(dtype).shape, generator=generator))
        else:
            part.copy_(torch.randint(0, 2, part.shape, generator=generator, dtype=torch.uint8))
    kind, options = OPTIMIZERS[optimizer]
    arrays = {}
    for number, section in enumerate(plan.layout.sections):
        if section.kind == "parameter":
            values = flat[section.start : section.stop].view(getattr(torch, section.dtype)).clone()
            parameter = torch.nn.Parameter(values.float() if values.dtype == torch.bfloat16 else values)
            stepper = kind([parameter], **options)
            for _ in range(2):
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                stepper.step()
            if section.dtype == "bfloat16":
                arrays[f"master.{number}"] = parameter.detach()
            for key, value in stepper.state[parameter].items():
                if value is not None:
                    arrays[f"state.{number}.{key}"] = value
    return flat, arrays


def part_of(plan, shard, flat, arrays):
    own = plan.assignments[shard]
    held = {
        "vector.moving": flat[own.moving.start : own.moving.stop],
        "vector.frozen": flat[own.frozen.start : own.frozen.stop],
    }
    for name, array in arrays.items():
        section = plan.layout.sections[int(name.split(".")[1])]
        item = (section.stop - section.start) // array.numel() if array.dim() else 0
        start, stop = max(own.moving.start, section.start), min(own.moving.stop, section.stop)
        if start < stop:
            held[name] = array[(start - section.start) // item : (stop - section.start) // item] if item else array
    return held


def saved(
    run, plan, optimizer="sgd", number=1, seed=0, facts=lambda _: {"updates": 7, "samples": 70, "staleness": {"0": 7}}
):
    store, (flat, arrays) = Checkpoints(run), whole(plan, optimizer, seed)
    for shard in range(len(plan.assignments)):
        store.save_part(number, f"shard-{shard}", part_of(plan, shard, flat, arrays), facts(shard))
    return store.commit(number, plan, POSITION, 70), flat, arrays


def same(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        assert array.shape == other[name].shape
        assert torch.equal(array.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), name


shapes = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "float64"]), st.integers(1, 200), st.integers(0, 1)),
    min_size=1,
    max_size=5,
)


@st.composite
def splits(draw, tensors):
    """By name, how some tensors are cut along a dimension, over as many partitions as each has a parameter at."""
    partitions = draw(st.integers(1, 3))
    found = {}
    for tensor in tensors:
        along = draw(st.integers(0, len(tensor.shape) - 1))
        inner = draw(st.sets(st.integers(1, tensor.shape[along] - 1), max_size=partitions - 1))
        edges = [0, *sorted(inner), tensor.shape[along]]
        order = draw(st.permutations(range(partitions)))
        found[tensor.name] = [
            Piece(along, *edge, partition=order[at]) for at, edge in enumerate(itertools.pairwise(edges))
        ]
    for partition in range(partitions):  # each has to train something
        found[f"own.{partition}"] = [Piece(0, 0, 3, partition)]
    return partitions, found


def numbered(plan):
    """The flat vector of a plan and its arrays, in which each element tells which one of which tensor it is."""
    flat, arrays, names = torch.zeros(plan.layout.total, dtype=torch.uint8), {}, sorted(plan.layout.tensors)
    for number, section in enumerate(plan.layout.sections):
        found = []
        for entry in plan.layout.entries:
            if section.start <= entry.start < section.stop:
                tensor, piece = entry.tensor, entry.piece
                first = 10_000.0 * names.index(tensor.name)
                every = torch.arange(first, first + tensor.elements, dtype=torch.float64).view(tensor.shape)
                own = every.narrow(piece.dimension, piece.start, piece.stop - piece.start).contiguous().flatten()
                here = own.to(getattr(torch, tensor.dtype))
                flat[entry.start : entry.stop] = here.view(torch.uint8)
                found.append(own)
        if section.kind == "parameter":
            values = torch.cat(found)
            arrays |= {f"state.{number}.age": -values, f"state.{number}.step": torch.tensor(5.0)}
            if section.dtype == "bfloat16":
                arrays[f"master.{number}"] = values.float() + 0.5
    return flat, arrays


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.long
def test_a_checkpoint_of_a_split_model_goes_on_with_another_split_or_none(data):
    shape = st.lists(st.integers(2, 30), min_size=1, max_size=3).map(tuple)
    kinds = st.sampled_from([("float32", "parameter"), ("bfloat16", "parameter"), ("float64", "parameter"),
        ("float32", "buffer"), ("float64", "frozen")])  # fmt: skip
    tensors = [
        Tensor(f"t{i}", sides, *kind, group=data.draw(st.integers(0, 1)))
        for i, (sides, kind) in enumerate(data.draw(st.lists(st.tuples(shape, kinds), min_size=1, max_size=4)))
    ]

    def plan():
        partitions, split = data.draw(splits(tensors))
        tensors_of_all = [*tensors, *(Tensor(f"own.{partition}", (3,), "float32") for partition in range(3))]
        for partition in range(partitions, 3):
            split[f"own.{partition}"] = [Piece(0, 0, 3, 0)]
        layout = lay_out(tensors_of_all, ({}, {}), split=split)
        shards = data.draw(st.integers(partitions, partitions + 3))
        return Plan(Settings(strategy=Downpour(2, shards)), layout, cut(layout, partitions, shards), 100)

    before, after = plan(), plan()
    with tempfile.TemporaryDirectory() as run:
        store, written = Checkpoints(run), numbered(before)
        for shard in range(len(before.assignments)):
            store.save_part(1, f"shard-{shard}", part_of(before, shard, *written), {})
        made = store.commit(1, before, POSITION, 70)
        for shard in range(len(after.assignments)):
            same(load_part(made, after, shard)[0], part_of(after, shard, *numbered(after)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_weights_are_a_plain_state_dict(tmp_path, optimizer, shards):
    plan = plan_of(shards, optimizer=optimizer)
    path, flat, _ = saved(tmp_path, plan, optimizer)
    for file in (path / "model.safetensors", tmp_path / "model.safetensors"):
        state = load_file(file)
        assert set(state) == {tensor.name for tensor in TENSORS}
        for entry in plan.layout.entries:
            values = state[entry.tensor.name]
            assert (tuple(values.shape), values.dtype) == (entry.tensor.shape, getattr(torch, entry.tensor.dtype))
            assert torch.equal(
                values.reshape(-1).view(torch.uint8), flat[entry.start : entry.start + entry.tensor.size]
            )
    same(load_weights(tmp_path, plan.layout), state)


def test_the_pieces_of_a_partition_are_read_alone(tmp_path):
    plan = plan_of(1)
    path, _, _ = saved(tmp_path, plan, "sgd")
    state = load_file(path / "model.safetensors")
    whole = max(state, key=lambda name: state[name].ndim * 10**9 + state[name].numel())
    dimension, last = state[whole].ndim - 1, state[whole].shape[-1]
    pieces = {whole: Piece(dimension, 1, last, 1)}
    assert last > 1
    same(load_weights(tmp_path, plan.layout, pieces), {whole: state[whole].narrow(dimension, 1, last - 1)})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.still = torch.nn.Parameter(torch.randn(5), requires_grad=False)


def test_a_model_with_tied_weights_batch_norm_and_frozen_parameters_loads_strictly(tmp_path):
    torch.manual_seed(0)
    model = Net()
    model.norm(torch.randn(16, 8))
    named = {
        name: (value, "parameter" if value.requires_grad else "frozen") for name, value in model.named_parameters()
    }
    named |= {name: (value, "buffer") for name, value in model.named_buffers()}
    tensors = [Tensor(name, tuple(value.shape), str(value.dtype)[6:], kind) for name, (value, kind) in named.items()]
    plan = plan_of(2, tensors, aliases={"head.weight": "embedding.weight"})
    flat = torch.zeros(plan.layout.total, dtype=torch.uint8)
    for entry in plan.layout.entries:
        flat[entry.start : entry.start + entry.tensor.size] = (
            named[entry.tensor.name][0].detach().reshape(-1).view(torch.uint8)
        )
    store = Checkpoints(tmp_path)
    for shard in range(2):
        store.save_part(1, f"shard-{shard}", part_of(plan, shard, flat, {}), {})
    path = store.commit(1, plan, POSITION, 70)
    for state in (load_file(path / "model.safetensors"), load_weights(path, plan.layout)):
        other = Net()
        other.load_state_dict(state, strict=True)
        same(dict(other.state_dict()), dict(model.state_dict()))
    save_file(
        {name: value.clone() for name, value in model.state_dict().items() if name != "embedding.weight"},
        tmp_path / "untied.safetensors",
    )
    assert torch.equal(
        load_weights(tmp_path / "untied.safetensors", plan.layout)["embedding.weight"], model.embedding.weight
    )


def test_the_manifest_and_the_facts_come_back(tmp_path):
    plan = plan_of(3)
    path, _, _ = saved(
        tmp_path, plan, facts=lambda shard: {"updates": 5 + shard % 2, "samples": 50, "staleness": {"0": shard}}
    )
    manifest = read_manifest(path)
    assert (manifest.number, manifest.samples, manifest.position, manifest.plan) == (1, 70, POSITION, plan)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        *(f"shard-{i}.safetensors" for i in range(3)),
    ]
    assert [load_part(path, plan, shard)[1]["staleness"] for shard in range(3)] == [{"0": 0}, {"0": 1}, {"0": 2}]
    assert load_part(path, plan_of(2), 0)[1] == {"updates": 6, "samples": 50, "staleness": {"0": 1}}


def test_state_that_some_shards_had_not_made_yet_is_zero_there(tmp_path):
    then, now = plan_of(2, optimizer="adam"), plan_of(1, optimizer="adam")
    store, (flat, arrays) = Checkpoints(tmp_path), whole(then, "adam")
    for shard, held in enumerate(
        (arrays, {name: array for name, array in arrays.items() if name.startswith("master.")})
    ):
        store.save_part(1, f"shard-{shard}", part_of(then, shard, flat, held), {"updates": 1 - shard})
    number = next(
        i for i, one in enumerate(then.layout.sections) if one.start < then.assignments[0].moving.stop < one.stop
    )
    section, edge = then.layout.sections[number], then.assignments[0].moving.stop
    loaded, _ = load_part(store.commit(1, then, POSITION, 10), now, 0)
    name, made = (
        f"state.{number}.exp_avg",
        (edge - section.start) // ((section.stop - section.start) // arrays[f"state.{number}.exp_avg"].numel()),
    )
    assert torch.equal(loaded[name][:made], arrays[name][:made])
    assert not loaded[name][made:].any()
    assert loaded[f"state.{number}.step"] == arrays[f"state.{number}.step"]


def test_only_the_newest_are_kept_and_those_of_an_abandoned_generation_go(tmp_path):
    plan = plan_of(2, keep=2)
    for number in (1, 2, 3, 10):
        saved(tmp_path, plan, number=number)
    names = lambda: sorted(path.name for path in (tmp_path / "checkpoints").iterdir())  # noqa: E731
    assert names() == ["000003", "000010"]
    (tmp_path / "checkpoints" / ".making-2").mkdir()
    path, flat, arrays = saved(tmp_path, plan, number=3, seed=5)
    assert names() == ["000003"]
    assert Checkpoints(tmp_path).latest() == path
    same(load_part(path, plan, 0)[0], part_of(plan, 0, flat, arrays))


def test_there_is_no_latest_before_the_first(tmp_path):
    assert Checkpoints(tmp_path).latest() is None
    Checkpoints(tmp_path).save_part(1, "shard-0", {}, {})
    assert Checkpoints(tmp_path).latest() is None


@pytest.mark.parametrize("part", ["", "model", "shard-x", "../shard-0", "shard-0/../x"])
def test_a_part_of_another_name_is_our_bug(tmp_path, part):
    with pytest.raises(LocalProtocolError, match="shard-0"):
        Checkpoints(tmp_path).save_part(1, part, {}, {})


def test_a_part_that_is_missing_or_of_another_size_fails_the_commit(tmp_path):
    plan, store = plan_of(2), Checkpoints(tmp_path)
    store.save_part(1, "shard-0", part_of(plan, 0, *whole(plan, "sgd")), {})
    with pytest.raises(CheckpointError, match="part of shard 1 is missing"):
        store.commit(1, plan, POSITION, 0)
    for shard in range(2):
        store.save_part(2, f"shard-{shard}", part_of(plan, 0, *whole(plan, "sgd")), {})
    with pytest.raises(CheckpointError, match="the plan has"):
        store.commit(2, plan, POSITION, 0)
    assert not list(store.folder.iterdir())


def test_another_optimizer_or_model_is_named(tmp_path):
    path, _, _ = saved(tmp_path, plan_of(2, optimizer="adagrad"), "adagrad")
    with pytest.raises(CheckpointError, match=r"made by optimizer adagrad, but this job's is sgd"):
        load_part(path, plan_of(2), 0)
    with pytest.raises(CheckpointError, match=r"lacks parameter 'a.bias'"):
        load_part(path, plan_of(2, [one for one in TENSORS if one.name != "a.bias"], "adagrad"), 0)


@pytest.mark.parametrize(
    ("data", "samples", "replicas", "message"),
    [
        ({}, 101, 2, "was made with 100 training samples, but this job has 101: .* use 100"),
        ({"order": "shuffled"}, 100, 2, "was made with sequential order of the samples, but this job has shuffled"),
        ({"batch_size": 7}, 100, 2, "was made with 64 samples in a minibatch, but this job has 7"),
        ({}, 100, 3, "was made with 2 replicas, each with a part of the data, but this job has 3"),
    ],
)
def test_a_job_whose_data_would_come_in_another_order_does_not_go_on(tmp_path, data, samples, replicas, message):
    def plan(samples, replicas, **data):
        whole, own = plan_of(2), {"order": "sequential", **data}
        settings = dataclasses.replace(whole.settings, strategy=Downpour(replicas), **own)
        return msgspec.structs.replace(whole, settings=settings, samples=samples)

    path, _, _ = saved(tmp_path, plan(100, 2))
    with pytest.raises(CheckpointError, match=message):
        load_part(path, plan(samples, replicas, **data), 0)


def test_other_replicas_go_on_where_the_data_are_not_cut_for_them(tmp_path):
    plan = plan_of(2)
    path, flat, arrays = saved(tmp_path, plan)
    now = msgspec.structs.replace(plan, settings=dataclasses.replace(plan.settings, strategy=Downpour(7)))
    same(load_part(path, now, 0)[0], part_of(now, 0, flat, arrays))


@pytest.mark.parametrize("more", [-16, 16])
@pytest.mark.parametrize("name", ["vector.moving", "vector.frozen"])
def test_a_part_that_is_longer_or_shorter_than_the_plan_fails_the_commit(tmp_path, name, more):
    plan, store = plan_of(1), Checkpoints(tmp_path)
    arrays = part_of(plan, 0, *whole(plan, "sgd"))
    arrays[name] = torch.zeros(len(arrays[name]) + more, dtype=torch.uint8)
    store.save_part(1, "shard-0", arrays, {})
    with pytest.raises(CheckpointError, match=f"{name} of shard-0.safetensors has {len(arrays[name])} bytes where"):
        store.commit(1, plan, POSITION, 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda arrays: {name: one for name, one in arrays.items() if name != "master.0"}, "master.0 is missing in a"),
        (lambda arrays: {**arrays, "state.0.age": torch.zeros(3)}, r"state.0.age has shapes \[\[64\], \[3\]\]"),
    ],
    ids=["a master is missing", "a state is too short"],
)
def test_a_part_that_does_not_hold_what_its_shard_does_is_corrupt(tmp_path, other, message):
    tensors, store = [Tensor("a", (128,), "bfloat16")], Checkpoints(tmp_path)
    plan = plan_of(2, tensors)
    parts = [part_of(plan, shard, *numbered(plan)) for shard in range(2)]
    for shard, arrays in enumerate((parts[0], other(parts[1]))):
        store.save_part(1, f"shard-{shard}", arrays, {})
    path = store.commit(1, plan, POSITION, 0)
    with pytest.raises(CheckpointError, match=message):
        load_part(path, plan_of(1, tensors), 0)


def test_no_header_is_read_that_says_to_be_longer_than_may_be(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((HEADER_LIMIT + 1).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match=f"begins with a header of {HEADER_LIMIT + 1} bytes"):
        stored(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((*TENSORS, Tensor("new", (1,), "float32")), "has no tensor 'new', which the model has; name"),
        (
            (Tensor("layer.weight", (33, 7), "float32"), *TENSORS[1:]),
            "has no tensor 'layer.weight', which the model has, but 'a.weight', which it lacks",
        ),
        (TENSORS[1:], "has a tensor 'a.weight', which the model lacks"),
        (
            (Tensor("a.weight", (7, 33), "float32"), *TENSORS[1:]),
            r"'a.weight' is \[33, 7\] float32 .* the model's is \[7, 33\] float32",
        ),
        ((Tensor("a.weight", (33, 7), "float64"), *TENSORS[1:]), "the model's is .* float64"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(tmp_path, tensors, message):
    saved(tmp_path, plan_of(2))
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path, lay_out(tensors, ({}, {})))


@pytest.mark.parametrize("what", ["nothing", "pickle", "empty folder"])
def test_what_is_no_checkpoint_is_refused_and_never_unpickled(tmp_path, what):
    path = tmp_path / "x.pt"
    if what == "pickle":
        torch.save({"weight": torch.ones(3)}, path)
    elif what == "empty folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"name a run folder"):
        load_weights(path, plan_of(1).layout)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    run = tmp_path_factory.mktemp("good")
    return saved(run, plan_of(2, optimizer="adam"), "adam")[0]


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    file=st.sampled_from(["shard-0.safetensors", "shard-1.safetensors", "model.safetensors", "manifest.json"]),
)
def test_a_flipped_or_cut_off_byte_is_only_ever_a_checkpoint_error(good, data, file):
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copytree(good, Path(folder) / "000001")
        whole = (path / file).read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        bit = data.draw(st.integers(0, 8))
        (path / file).write_bytes(
            whole[:at] if bit == 8 else whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        )
        plan = plan_of(1, optimizer="adam")
        with pytest.raises(CheckpointError, match=str(path)):
            load_weights(path, plan.layout) if file == "model.safetensors" else load_part(path, plan, 0)


@pytest.mark.parametrize("spoil", ["no manifest", "a broken link", "a file", "a manifest of another user"])
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_the_remedy_fits_what_is_wrong_with_a_checkpoint(tmp_path, monkeypatch, spoil, checkpoints):
    for number in range(1, checkpoints + 1):
        path, *_ = saved(tmp_path, plan_of(1), number=number)
    if spoil == "a manifest of another user":
        refused = PermissionError(errno.EACCES, "Permission denied")
        monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=refused))
        says = r"manifest.json cannot be read: Permission denied; fix that, and go on with --resume$"
    else:
        shutil.rmtree(path)
        {"no manifest": path.mkdir, "a broken link": lambda: path.symlink_to("nowhere"), "a file": path.touch}[spoil]()
        older = f"delete {path} to go on from {path.parent}/000001, the previous one, or" if checkpoints > 1 else ""
        says = f"manifest.json is missing; {older or 'there is none before it:'} train anew into another folder$"
    with pytest.raises(CheckpointError, match=says):
        read_manifest(Checkpoints(tmp_path).latest())


def test_another_format_and_a_shard_file_gone_are_told(tmp_path, good):
    path = shutil.copytree(good, tmp_path / "000001")
    (path / "shard-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard-1.safetensors is missing; there is none before"):
        load_part(path, plan_of(2, optimizer="adam"), 1)
    for version in (FORMAT - 1, FORMAT + 1):
        body = msgspec.json.encode({"format": version})
        (path / "manifest.json").write_bytes(b'{"crc32":%d,"manifest":%s}' % (zlib.crc32(body), body))
        with pytest.raises(CheckpointError, match=f"format {version}"):
            read_manifest(path)


def fill_disk(monkeypatch, call):
    """Have no room left on the disk at this call of fsync."""
    calls, sync = iter(range(1000)), os.fsync

    def full(descriptor):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("call", range(8))
def test_a_disk_that_fills_at_any_sync_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, call):
    """Four syncs are of the part, four of the commit before the rename."""
    plan = plan_of(1)
    path, flat, arrays = saved(tmp_path, plan)
    fill_disk(monkeypatch, call)
    with pytest.raises(CheckpointError, match=r"No space left on device; .*000001 stays the last good one; make room"):
        saved(tmp_path, plan, number=2, seed=9)
    monkeypatch.undo()
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["000001"]
    same(load_part(path, plan, 0)[0], part_of(plan, 0, flat, arrays))
    assert (path / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    again, flat, arrays = saved(tmp_path, plan, number=2, seed=9)
    same(load_part(again, plan, 0)[0], part_of(plan, 0, flat, arrays))


@pytest.mark.parametrize(
    ("call", "message"),
    [(8, "may not survive a power cut.*older checkpoints are kept"), (9, "model.safetensors could not be replaced")],
)
def test_a_disk_that_fails_after_the_rename_leaves_the_new_checkpoint(tmp_path, monkeypatch, call, message):
    saved(tmp_path, plan_of(1))
    fill_disk(monkeypatch, call)
    with pytest.raises(CheckpointError, match=message):
        saved(tmp_path, plan_of(1), number=2)
    assert Checkpoints(tmp_path).latest().name == "000002"
    assert read_manifest(tmp_path / "checkpoints" / "000001").number == 1


def test_a_file_system_without_hard_links_gets_a_copy(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path, _, _ = saved(tmp_path, plan_of(2))
    assert (path / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("count", [1, 3])
def test_a_manifest_that_names_other_parts_than_its_shards_is_corrupt(tmp_path: Path, count: int) -> None:
    store, plan = Checkpoints(tmp_path), plan_of(2)
    arrays = [{"vector.moving": torch.zeros(own.moving.size, dtype=torch.uint8),
        "vector.frozen": torch.zeros(own.frozen.size, dtype=torch.uint8)}
              for own in plan.assignments]  # fmt: skip
    for index, own in enumerate(arrays):
        store.save_part(1, f"shard-{index}", own, {})
    manifest = store.commit(1, plan, POSITION, 0) / "manifest.json"
    inner = msgspec.json.decode(manifest.read_bytes())["manifest"]
    inner["parts"] = [*inner["parts"], inner["parts"][0]][:count]
    body = msgspec.json.encode(inner)
    manifest.write_bytes(b'{"crc32":%d,"manifest":%s}' % (zlib.crc32(body), body))
    with pytest.raises(CheckpointError, match=f"names {count} parts of 2 shards"):
        load_part(manifest.parent, plan, 0)


def test_what_a_coordinator_did_as_it_died_the_next_one_may_do_again(tmp_path: Path) -> None:
    """It had put the checkpoint into its place, and perhaps no more: the model is placed, older ones are cleared away,
    and none is lost.
    """
    store, plan = Checkpoints(tmp_path), plan_of(2, keep=1)
    for number in (1, 2):
        final, *_ = saved(tmp_path, plan, number=number, seed=number)
    model = tmp_path / "model.safetensors"
    newest = model.read_bytes()
    model.unlink()
    left = tmp_path / "checkpoints" / "000001"
    left.mkdir()
    assert store.commit(2, plan, POSITION, 70) == final
    assert (model.read_bytes(), left.exists()) == (newest, False)
    assert read_manifest(final).number == 2
    with pytest.raises(CheckpointError, match="checkpoint 2 was not written"):
        store.commit(2, plan, POSITION, 71)  # another one has parts of its own


def test_a_checkpoint_has_what_a_script_keeps_as_it_was_saved_last(tmp_path):
    """Also in those after it; one in which nobody kept anything has none."""
    store, plan, found = CheckpointStore(tmp_path), plan_of(2, keep=9), []
    for number in (1, 2, 3, 4):
        flat, arrays = whole(plan, "sgd", number)
        for shard in range(2):
            store.save_part(number, f"shard-{shard}", part_of(plan, shard, flat, arrays), {})
        if number in (2, 4):
            store.save_part(number - 1, SCRIPT, {SCRIPT: torch.tensor([number], dtype=torch.uint8)}, {})
        found.append(load_script(store.commit(number, plan, POSITION, 70, script=number > 1)))
    assert [{name: one.tolist() for name, one in part.items()} for part in found] == [
        {}, {SCRIPT: [2]}, {SCRIPT: [2]}, {SCRIPT: [4]},
    ]  # fmt: skip
    assert load_script(tmp_path / "checkpoints" / "000002")[SCRIPT].tolist() == [2]


@pytest.mark.parametrize(("change", "says"), [(b"", "2 were written|bytes"), (None, "missing")])
def test_what_a_script_keeps_is_read_back_whole_or_refused(tmp_path, change, says):
    store, plan = CheckpointStore(tmp_path), plan_of(1)
    flat, arrays = whole(plan, "sgd", 1)
    store.save_part(1, "shard-0", part_of(plan, 0, flat, arrays), {})
    store.save_part(1, SCRIPT, {SCRIPT: torch.zeros(2, dtype=torch.uint8)}, {})
    file = store.commit(1, plan, POSITION, 70, script=True) / "script.safetensors"
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change)
    with pytest.raises(CheckpointError, match=f"script.safetensors is (corrupt: .*)?({says})"):
        load_script(file.parent)
