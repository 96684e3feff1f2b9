"""The idx reader: anything but real bytes is one clear DataError, and memory is for what a file can hold."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.errors import DataError
from distbelief.tasks.data_files import BYTES_LIMIT, read_idx


def idx(*shape: int, data: bytes | None = None, magic: tuple[int, ...] | None = None) -> bytes:
    head = bytes(magic or (0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
    return head + (bytes(i % 251 for i in range(int(np.prod(shape)))) if data is None else data)


IMAGES = idx(5, 2, 3)
PACKED = gzip.compress(IMAGES, mtime=0)


@pytest.mark.parametrize("content", [IMAGES, PACKED], ids=["plain", "gzip"])
def test_a_whole_file_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    read = read_idx(tmp_path / "file", (2, 3))
    assert read.dtype == torch.uint8
    assert read.flatten().tolist() == list(range(30))
    assert read.shape == (5, 2, 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "starts with nothing"),
        (b"\0\0", "starts with 0000"),
        (idx(5, 2, 3, magic=(0, 0, 13, 3)), "starts with 00000d03, not with 00000803"),
        (idx(30), "starts with 00000801"),
        (IMAGES[:9], "ends within its header, after 9 bytes"),
        (idx(5, 3, 2), r"5 samples of shape \(3, 2\), not one or more of \(2, 3\)"),
        (idx(0, 2, 3), "holds 0 samples"),
        (IMAGES[:-1], "promises 30 bytes of data, but a file of its size holds at most 29"),
        (IMAGES + b"\0", "goes on after the 30 bytes"),
        (idx(2**32 - 1, 2, 3, data=b"1"), f"promises 25769803770 bytes of data, but the limit is {BYTES_LIMIT}"),
        (
            gzip.compress(idx(2**27, 2, 3, data=b"1"), mtime=0),
            "promises 805306368 bytes of data, but a file of its size",
        ),
        (gzip.compress(IMAGES[:-1], mtime=0), "promises 30 bytes of data, but holds 29"),
        (gzip.compress(IMAGES + bytes(10**7), mtime=0), "goes on after the 30 bytes"),
        (PACKED[:-9], "EOFError"),
        (PACKED[:12], "EOFError"),
        (PACKED[:-8] + b"\0" * 8, "BadGzipFile: CRC check failed"),
        (PACKED[:10] + b"\xff" * 20, "zlib|error"),
        (PACKED + b"tail", "BadGzipFile"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_idx(tmp_path / "file", (2, 3))
    assert str(tmp_path / "file") in str(caught.value)
    assert "put the original file there" in str(caught.value)


def test_a_file_that_was_packed_small_is_read_and_one_over_the_limit_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(gzip.compress(idx(10**5, 2, 3, data=bytes(6 * 10**5))))
    assert read_idx(tmp_path / "file", (2, 3)).shape == (10**5, 2, 3)
    monkeypatch.setattr("distbelief.tasks.data_files.BYTES_LIMIT", 6 * 10**5 - 1)
    with pytest.raises(DataError, match="promises 600000 bytes of data, but the limit is 599999"):
        read_idx(tmp_path / "file", (2, 3))


def test_no_memory_is_taken_for_a_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("memory taken"))
    for number, content in enumerate(
        (idx(2**27, 2, 3, data=b"1"), gzip.compress(idx(2**27, 2, 3, data=b"1"), mtime=0))
    ):
        (tmp_path / str(number)).write_bytes(content)
        with pytest.raises(DataError, match="promises"):
            read_idx(tmp_path / str(number), (2, 3))


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match="is not a file"):
            read_idx(path, ())

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        read_idx(tmp_path / "file", ())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    content = bytearray(draw(st.sampled_from([IMAGES, PACKED])))
    for _ in range(draw(st.integers(0, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))]) + draw(st.binary(max_size=8))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=64) | damaged() | st.binary(max_size=64).map(gzip.compress))
def test_garbage_is_only_ever_a_data_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    try:
        read = read_idx(tmp_path / "file", (2, 3))
    except DataError:
        return
    assert read.shape[1:] == (2, 3)
    assert read.numel() <= 100
