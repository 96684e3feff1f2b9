"""Tasks of handwritten digits: `digits`, scikit-learn's, which need no download; `mnist` and `mnist-lenet`.

MNIST's files come from a folder, the cache, or a download.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import queue
import tempfile
import threading
import time
import urllib.request
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from torch import Tensor, nn

from distbelief.errors import DataError
from distbelief.tasks.data_files import CHUNK, NO_HOME, cache_folder, read_idx
from distbelief.tasks.task import Task, TensorData

TEST_SAMPLES = 360


def digits() -> Task:
    """Make the task of an MLP 64-64-10 on scikit-learn's digits of 8x8 pixels: 1437 to train on, 360 to test.

    Inputs are float32 of shape (n, 64) in [0, 1], targets int64 of shape (n,).

    >>> [len(part()) for part in (digits().train, digits().test)]
    [1437, 360]
    """
    return Task(
        model=lambda: sequential(fc1=nn.Linear(64, 64), relu1=nn.ReLU(), fc2=nn.Linear(64, 10)),
        train=partial(_load_digits, test=False),
        test=partial(_load_digits, test=True),
    ).named("digits")


def sequential(**layers: nn.Module) -> nn.Sequential:
    """Build a model of layers with these names, one after the other."""
    return nn.Sequential(OrderedDict(layers))


def _load_digits(test: bool) -> TensorData:
    table = np.loadtxt(_digits_file(), delimiter=",", dtype=np.float32)
    images, labels = torch.from_numpy(table[:, :-1] / 16), torch.from_numpy(table[:, -1]).long()
    # the file is ordered by writer: without a permutation the test set would have other writers
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = order[-TEST_SAMPLES:] if test else order[:-TEST_SAMPLES]
    return TensorData(images[part], labels[part])


def _digits_file() -> Path:
    """Find the file inside scikit-learn without importing it, which would take seconds in each process."""
    package = importlib.util.find_spec("sklearn")
    path = Path(*(package.submodule_search_locations or [""] if package else [""]), "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise DataError(
            "task 'digits' needs the data of scikit-learn, which is not installed: pip install 'distbelief[digits]'"
        )
    return path


FILES: Mapping[str, str] = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
"""The four files, and the MD5 of each unpacked, since mirrors may compress them anew."""
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
ANSWER_SECONDS = 4.0
"""Longest wait for a mirror's answer, and for each piece after it."""
DOWNLOAD_SECONDS = 120.0
"""Longest download of one file."""
FILE_LIMIT = 64 << 20
"""Most bytes of one unpacked file."""
CLASSES = 10
IMAGE = (1, 28, 28)


def mnist(data_dir: str | None = None) -> Task:
    """Make the task of an MLP 784-300-100-10 on MNIST (266,610 parameters): float32 (n, 784) to int64 (n,).

    Args:
        data_dir: folder of the four idx files. The default is `$DISTBELIEF_DATA`, then the cache folder, into which
            missing files are downloaded. Only `train()` and `test()` read them, and raise `DataError` without them.

    >>> sum(p.numel() for p in mnist().model().parameters())
    266610
    """
    return mnist_task(
        "mnist",
        lambda: sequential(
            fc1=nn.Linear(784, 300),
            relu1=nn.ReLU(),
            fc2=nn.Linear(300, 100),
            relu2=nn.ReLU(),
            fc3=nn.Linear(100, CLASSES),
        ),
        data_dir,
        (784,),
    )


def mnist_lenet(data_dir: str | None = None) -> Task:
    """Make the task of Caffe's LeNet-5 on MNIST (431,080 parameters): float32 (n, 1, 28, 28) to int64 (n,).

    `data_dir` is as for `mnist`.

    >>> sum(p.numel() for p in mnist_lenet().model().parameters())
    431080
    """
    return mnist_task("mnist-lenet", lenet, data_dir, IMAGE)


def mnist_task(reference: str, model: Callable[[], nn.Module], data_dir: str | None, shape: tuple[int, ...]) -> Task:
    """Make the task of classifying MNIST by a model whose input has a shape."""
    load = partial(load_mnist, data_dir, shape)
    return Task(data_dir=data_dir, model=model, train=partial(load, "train"), test=partial(load, "t10k")).named(
        reference
    )


def lenet() -> nn.Module:
    """Build Caffe's LeNet-5; input float32 (n, 1, 28, 28), output (n, 10)."""
    return sequential(
        conv1=nn.Conv2d(1, 20, 5),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(20, 50, 5),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(800, 500),
        relu1=nn.ReLU(),
        fc2=nn.Linear(500, CLASSES),
    )


def _standardised(images: Tensor) -> Tensor:
    """Convert bytes to float32 of mean 0 and deviation 1; MNIST's are 0.1307 and 0.3081 of 255."""
    return images.float().mul_(1 / (0.3081 * 255)).sub_(0.1307 / 0.3081)


def load_mnist(data_dir: str | None, shape: tuple[int, ...], part: Literal["train", "t10k"]) -> TensorData:
    """Load MNIST's images in a shape of 784 numbers, with their digits.

    Files that cannot be had, or are not MNIST's, raise a `DataError`.
    """
    folder = folder_of(data_dir)
    paths = [_file(folder, name) or folder / name for name in FILES if name.startswith(part)]
    images, labels = read_idx(paths[0], (28, 28)), read_idx(paths[1], ())
    if len(images) != len(labels):
        raise DataError(
            f"{paths[0]} holds {len(images)} images, but {paths[1]} {len(labels)} labels; put the original files there"
        )
    if labels.max() >= CLASSES:
        raise DataError(
            f"{paths[1]} holds the label {int(labels.max())}, but MNIST's are 0 to {CLASSES - 1}; put the original "
            "file there"
        )
    return TensorData(images.view(-1, *shape), labels.long(), _standardised)


def folder_of(data_dir: str | None) -> Path:
    """Return the folder of the four files, which are downloaded to the cache if no folder is named."""
    named = data_dir or os.environ.get("DISTBELIEF_DATA")
    if (home := Path(os.path.expanduser(named)) if named else cache_folder()) is None:
        raise DataError(f"no MNIST: {NO_HOME}, or one that has the files, by --data-dir or $DISTBELIEF_DATA")
    folder = home if named else home / "mnist"
    try:
        missing = [name for name in FILES if not _file(folder, name)]
        if not named:
            for name in missing:
                _download(name, folder)
        elif missing:
            raise OSError(f"it lacks {', '.join(missing)}")
    except OSError as error:
        raise DataError(
            f"no MNIST in {folder}: {error}; put {', '.join(FILES)} (plain or .gz) there or into a folder named by "
            "--data-dir or $DISTBELIEF_DATA,"
            " or train 'digits', which needs no download"
        ) from error
    return folder


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _download(name: str, folder: Path) -> None:
    """Download one file into a folder, complete and verified, or raise an `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for mirror in MIRRORS:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as file:
            try:
                _copy(f"{mirror}{name}.gz", file, FILES[name])
                # several processes may do this at once: each writes the same complete file
                os.replace(file.name, folder / name)
                return
            except (OSError, EOFError, HTTPException, zlib.error) as error:
                failures.append(f"{mirror}: {error}")
            finally:
                Path(file.name).unlink(missing_ok=True)
    raise OSError(f"{name} cannot be downloaded ({'; '.join(failures)})")


def _copy(url: str, file: IO[bytes], md5: str) -> None:
    """Download and unpack a URL into a file, within `FILE_LIMIT` and `DOWNLOAD_SECONDS`."""
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    digest = hashlib.md5(usedforsecurity=False)
    with _open(url) as answer, gzip.GzipFile(fileobj=answer) as unpacked:
        while piece := unpacked.read(CHUNK):
            digest.update(piece)
            file.write(piece)
            if file.tell() > FILE_LIMIT:
                raise OSError(f"more than {FILE_LIMIT} bytes")
            if time.monotonic() > deadline:
                raise OSError(f"not done after {DOWNLOAD_SECONDS:g} s")
    file.flush()
    if digest.hexdigest() != md5:
        raise OSError(f"its content has MD5 {digest.hexdigest()}, not {md5}")


def _open(url: str) -> IO[bytes]:
    """Open a URL, or raise an `OSError` within `ANSWER_SECONDS`."""
    answers: queue.SimpleQueue[IO[bytes] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=ANSWER_SECONDS))
        except Exception as error:
            answers.put(error)

    # in a thread: without a network, looking up the name can take far longer than the socket's timeout
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        raise OSError(f"no answer within {ANSWER_SECONDS:g} s") from None
    if isinstance(answer, Exception):
        raise OSError(str(answer)) from answer
    return answer
