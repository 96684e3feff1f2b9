"""The file `.dbz`: what is written is read, what is spoilt is refused, and a model has what the file has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import distbelief as db
from distbelief.codecs import file as files
from distbelief.codecs.file import ModelFile, decoded, read
from distbelief.codecs.stored import Stored
from distbelief.codecs.symbols import Gaps
from distbelief.errors import DataError, LayoutError, UsageError
from distbelief.lab.compress import compressing
from distbelief.places.evaluate import evaluate
from distbelief.tasks.constrained import constrain


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 40), nn.Linear(40, 10))


def compressed(model: nn.Module, keep: float = 0.3, bits: int = 3, huffman: bool = True) -> ModelFile:
    """All forms that a tensor may have: shared and pruned, pruned, shared, in fewer bits, and as it was."""
    tensors, aliases = compressing.stored_tensors(model.state_dict())
    first, second, third = (name for name, one in tensors.items() if len(one.shape) > 1)
    tensors[first] = compressing.prune(tensors[first], keep)
    for name in (second, third):
        if name == second:
            tensors[name] = compressing.prune(tensors[name], keep)
        shared = compressing.share_values(tensors[name], bits, "linear", 0)
        assert isinstance(shared, Stored)
        tensors[name] = shared
    tensors["3.bias"] = dataclasses.replace(tensors["3.bias"], precision="fp16")
    return ModelFile("digits", tensors, huffman, aliases)


@pytest.mark.parametrize("huffman", [True, False])
def test_what_is_written_is_read(huffman: bool, tmp_path: Path) -> None:
    file, path = compressed(small(), huffman=huffman), tmp_path / "small.dbz"
    path.write_bytes(file.encode())
    back = read(path)
    state, again = file.state(), back.state()
    assert list(state) == list(again)
    state["3.bias"] = state["3.bias"].half().float()
    for name, tensor in state.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.dtype == again[name].dtype
    assert back.encode() == path.read_bytes()


def test_dense_is_what_positions_and_ids_say() -> None:
    for stored in compressed(small()).tensors.values():
        positions = range(stored.size) if stored.positions is None else stored.positions.tolist()
        flat = [0.0] * stored.size
        for number, at in enumerate(positions):
            flat[at] = float(stored.values[number if stored.ids is None else int(stored.ids[number])])
        assert stored.dense().flatten().tolist() == flat


def test_what_is_spoilt_is_refused_and_nothing_else_happens() -> None:
    data, chance = compressed(small()).encode(), np.random.default_rng(5)
    for at in range(0, len(data), 7):
        with pytest.raises(DataError):
            decoded(data[:at], "it")
    for _ in range(100):
        spoilt = bytearray(data)
        spoilt[chance.integers(0, len(data))] ^= int(chance.integers(1, 256))
        with pytest.raises(DataError):
            decoded(bytes(spoilt), "it")


def header(*more: dict[str, Any], aliases: dict[str, str] | None = None, **changes: Any) -> bytes:
    """A file of one tensor of two values, its header changed, and perhaps more of them of which nothing is kept."""
    entry = {"name": "a", "dtype": 0, "shape": (2,), "kept": None, "bits": 0, "precision": 0, "where": 0, "what": 8}
    nothing = Gaps(1, huffman=False).encode(np.zeros(0, np.int64))
    own = [{**entry, **changes}, *({**entry, "kept": 0, "where": len(nothing), "what": 0, **one} for one in more)]
    text = msgspec.msgpack.encode(["digits", False, [list(one.values()) for one in own], aliases or {}])
    body = files.MAGIC + len(text).to_bytes(4, "little") + text + bytes(8) + nothing * len(more)
    return body + files.zlib.crc32(body).to_bytes(4, "little")


LARGE = {"shape": (files.VALUES_LIMIT // 2 + 1,)}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (header({"shape": (1,)}), "a tensor is listed twice"),
        (header({**LARGE, "name": "b"}, {**LARGE, "name": "c"}), "its tensors have 17,179,869,188 values; at most 17,"),
        (header(aliases={"b": "c"}), "'b' is another name of a missing tensor"),
        (header(aliases={"a": "a"}), "'a' is another name of a missing tensor"),
    ],
    ids=["twice", "too many values", "a name of none", "a name of two"],
)
def test_tensors_that_cannot_be_together_are_refused(data: bytes, told: str) -> None:
    assert set(decoded(header({**LARGE, "name": "b"}, aliases={"c": "b"}), "it").tensors) == {"a", "b"}
    with pytest.raises(DataError, match=told):
        decoded(data, "it")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shape": (1 << 20, 1 << 20)}, "its tensors have 1,099,511,627,776 values; at most 17,179,869,184"),
        ({"shape": (-1,)}, r"`int` >= 0 - at `\$\[2\]\[0\]\[2\]\[0\]`"),
        ({"shape": (1,) * 17}, r"of length <= 16 - at `\$\[2\]\[0\]\[2\]`"),
        ({"shape": (3,)}, "3 values of float32 is 8 bytes long where it should be 12"),
        ({"dtype": 99}, "`int` <= 9"),
        ({"dtype": -1}, "`int` >= 0"),
        ({"bits": 13}, "`int` <= 12"),
        ({"precision": 4}, "`int` <= 3"),
        ({"bits": 4, "precision": 1}, "no tensor is like"),
        ({"kept": 3}, "no tensor is like"),
        ({"kept": -1}, "`int` >= 0"),
        ({"dtype": files.DTYPES.index("int64"), "bits": 4}, "no tensor is like"),
        ({"where": 4, "what": 4}, "no tensor is like"),
        ({"kept": 2, "where": -8, "what": 16}, "`int` >= 0"),
        ({"where": -8, "what": 16}, "`int` >= 0"),
        ({"what": 9}, "all tensors together is 8 bytes long where it should be 9"),
        ({"what": 7}, "all tensors together is 8 bytes long where it should be 7"),
        ({"shape": (1,), "what": 4}, "all tensors together is 8 bytes long where it should be 4"),
        ({"shape": (1,)}, "1 values of float32 is 8 bytes long where it should be 4"),
        ({"bits": 1, "shape": (9,)}, "9 symbols of 1 bits is 0 bytes long where it should be 2"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_made_of_it(changes: dict[str, Any], told: str) -> None:
    assert decoded(header(), "it").tensors["a"].size == 2
    with pytest.raises(DataError, match=told):
        decoded(header(**changes), "it")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "begins with b''"),
        (b"PK\x03\x04" + bytes(99), "begins with b'PK"),
        (b"DBZ3" + bytes(99), "begins with b'DBZ3'"),
        (b"DBZ1" + bytes(99), "was written by an earlier version"),
        (files.MAGIC + b"\xff\xff\xff\xff" + bytes(99), "a header of 4,294,967,295"),
    ],
)
def test_a_foreign_file_is_refused(data: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "it.dbz").write_bytes(data)
    with pytest.raises(DataError, match=rf"it\.dbz: .*{told}"):
        db.load(tmp_path / "it.dbz")


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it.dbz").write_bytes(header())
    monkeypatch.setattr(files, "FILE_LIMIT", len(header()))
    assert read(tmp_path / "it.dbz").task == "digits"
    monkeypatch.setattr(files, "FILE_LIMIT", len(header()) - 1)
    with pytest.raises(DataError, match="bytes long; at most"):
        read(tmp_path / "it.dbz")
    monkeypatch.setattr(files, "HEADER_LIMIT", 9)
    with pytest.raises(DataError, match="and a header of"):
        decoded(header(), "it")


def test_a_model_is_loaded_plain(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "small.dbz"
    file = compressed(model)
    path.write_bytes(file.encode())
    loaded = db.load(path, small())
    assert [type(part) for part in loaded.modules()] == [type(part) for part in model.modules()]
    for name, tensor in read(path).state().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not loaded.training


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: nn.Sequential(*[*small()][:3], nn.Linear(144, 41), nn.Linear(41, 10)), r"'3\.weight' is \[40, 144\] "),
        (lambda: small().double(), r"'0\.weight' is \[4, 1, 3, 3\] float32 in .*, the model's is .* float64"),
        (lambda: nn.Sequential(*small(), nn.Linear(10, 2)), r"has no tensor '5\.weight', which the model has"),
        (lambda: nn.Sequential(*[*small()][:4]), r"has a tensor '4\.weight', which the model lacks"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_first_difference(other: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "small.dbz"
    path.write_bytes(compressed(small()).encode())
    with pytest.raises(LayoutError, match=told):
        db.load(path, other())


def test_nothing_is_imported_because_a_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "small.dbz"
    path.write_bytes(dataclasses.replace(compressed(small()), task="made:up").encode())
    for call in (lambda: db.load(path), lambda: evaluate(path)):
        with pytest.raises(UsageError, match="'made:up', which is not built in, and no file has code imported"):
            call()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight


def test_what_is_tied_is_written_once_and_tied_again(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "tied.dbz"
    file = ModelFile("digits", *reversed_pair(compressing.stored_tensors(model.state_dict())))
    path.write_bytes(file.encode())
    loaded = db.load(path, Tied())
    assert list(read(path).aliases) == ["second.weight"]
    assert loaded.first.weight is loaded.second.weight
    assert torch.equal(loaded.second.weight, model.first.weight)


def reversed_pair(pair: tuple[dict[str, Stored], dict[str, str]]) -> tuple[Any, ...]:
    return pair[0], True, pair[1]


def test_a_file_is_expanded_to_what_plain_pytorch_loads(tmp_path: Path) -> None:
    path = tmp_path / "small.dbz"
    path.write_bytes(compressed(small()).encode())
    assert db.expand(path) == tmp_path / "small.safetensors"
    for name, tensor in load_file(db.expand(path, tmp_path / "other.safetensors")).items():
        assert torch.equal(tensor, read(path).state()[name])
    with pytest.raises(UsageError, match="is the compressed file itself"):
        db.expand(path, path)


def test_a_constrained_model_has_the_values_of_its_file_and_summed_gradients() -> None:
    file = compressed(small())
    model, plain = constrain(small(), file), small()
    plain.load_state_dict(file.state())
    inputs = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.eval()(inputs), plain.eval()(inputs))
    for one in (model, plain):
        one(inputs).square().sum().backward()
    stored, gradient = file.tensors["3.weight"], plain[3].weight.grad.flatten()
    assert stored.ids is not None
    for entry in range(len(stored.values)):
        members = stored.positions[stored.ids == entry]
        found = model[3].parametrizations.weight.original.grad[entry]
        assert float(found) == pytest.approx(float(gradient[members].sum()), rel=1e-3, abs=1e-5)
