"""Tensors made smaller: pruned to their largest values, which then share a few (Han et al. 2016, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from distbelief.codecs.codec import Floats, Symbols, check_finite
from distbelief.codecs.file import ModelFile
from distbelief.codecs.stored import Stored
from distbelief.errors import UsageError
from distbelief.tasks.constrained import trained_name

ROUNDS = 300
"""Most rounds of k-means; it has nearly always come to rest long before."""


def stored(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Give the tensors of a state dict, each once, and the further names of those that are tied.

    >>> weight = torch.ones(1, 2)
    >>> stored({"a": weight, "b": weight})[1]
    {'b': 'a'}
    """
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tensors: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        place = tensor.data_ptr(), tuple(tensor.shape)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = Stored(tuple(tensor.shape), tensor.detach().flatten().clone())
    return tensors, aliases


def shares(keep: Sequence[float], layers: Sequence[str]) -> dict[str, float]:
    """Give the share of each layer that is kept.

    Args:
        keep: one number for all layers, or one for each.
        layers: their names, in the order of the model.

    Raises:
        UsageError: there are more or fewer numbers than layers.

    >>> shares([0.5], ["0.weight", "2.weight"])
    {'0.weight': 0.5, '2.weight': 0.5}
    """
    if len(keep) not in (1, len(layers)):
        raise UsageError(
            f"--keep has {len(keep)} numbers, and the model has {len(layers)} layers ({', '.join(layers)}): write one "
            "for all, or one for each"
        )
    return dict(zip(layers, keep if len(keep) > 1 else [*keep] * len(layers), strict=True))


def pruned(tensor: Stored, share: float) -> Stored:
    """Keep the largest values of a tensor, this share of all, one at least; of two that are as large, the first.

    >>> pruned(Stored((4,), torch.tensor([0.1, -3.0, 0.2, 1.0])), 0.5).dense()
    tensor([ 0., -3.,  0.,  1.])
    """
    most = max(1, min(tensor.kept, round(share * tensor.size)))
    if most == tensor.size:
        return tensor
    largest = np.sort(np.argsort(-tensor.values.abs().numpy(), kind="stable")[:most])
    positions = largest if tensor.positions is None else tensor.positions[largest]
    return Stored(tensor.shape, tensor.values[torch.from_numpy(largest)], positions.astype(np.int64))


def shared(tensor: Stored, bits: int, start: str, seed: int) -> Stored | str:
    """Have the kept values of a tensor share 2**bits, or return why it is left alone.

    Raises:
        UsageError: a value is no finite number.
    """
    check_finite(tensor.values.numpy())
    different = len(torch.unique(tensor.values))
    if tensor.kept <= 1 << bits:
        return f"it has {tensor.kept} values, and a codebook would have {1 << bits}"
    if different < 1 << bits:
        return f"it has {different} different values, fewer than {1 << bits} clusters"
    codebook, ids = cluster(tensor.values.numpy(), 1 << bits, start, seed)
    return Stored(tensor.shape, torch.from_numpy(codebook), tensor.positions, ids, bits)


def cluster(values: Floats, clusters: int, start: str, seed: int) -> tuple[Floats, Symbols]:
    """Give the centers of some numbers, ascending, and the nearest to each: Lloyd's k-means until it comes to rest.

    Args:
        values: finite numbers.
        clusters: number of centers, no more than there are different numbers.
        start: where it begins: linear (evenly from the least number to the largest), density (as many numbers between
            each two), or random (some of the numbers).
        seed: of random.

    >>> cluster(np.array([0.0, 9.0, 1.0, 8.0], dtype=np.float32), 2, "linear", 0)
    (array([0.5, 8.5], dtype=float32), array([0, 1, 0, 1], dtype=uint16))
    """
    ordered = np.sort(values).astype(np.float64)
    sums = np.concatenate([[0.0], ordered.cumsum()])
    if start == "linear":
        centers = np.linspace(ordered[0], ordered[-1], clusters)
    elif start == "density":
        centers = np.quantile(ordered, (np.arange(clusters) + 0.5) / clusters)
    else:
        centers = np.sort(np.random.default_rng(seed).choice(np.unique(ordered), clusters, replace=False))
    for _ in range(ROUNDS):
        edges = np.concatenate([[0], np.searchsorted(ordered, (centers[1:] + centers[:-1]) / 2), [len(ordered)]])
        members = np.diff(edges)
        # a center without members stays where it is
        means = np.where(members > 0, np.diff(sums[edges]) / np.maximum(members, 1), centers)
        if np.array_equal(means, centers):
            break
        centers = np.sort(means)
    codebook = centers.astype(np.float32)
    middles = (codebook[1:].astype(np.float64) + codebook[:-1]) / 2
    return codebook, np.searchsorted(middles, values).astype(np.uint16)


def trained(file: ModelFile, state: Mapping[str, torch.Tensor]) -> ModelFile:
    """Give the file the values that training has left.

    Args:
        file: from which the model of the training was made.
        state: of that model, afterwards.
    """
    tensors = {
        name: replace(tensor, values=state[trained_name(name, tensor)].detach().flatten().clone())
        for name, tensor in file.tensors.items()
    }
    return replace(file, tensors=tensors)


def coarser(file: ModelFile, precision: str) -> ModelFile:
    """Have values of float32 that are not shared be written in fewer bits."""
    tensors = {
        name: replace(tensor, precision=precision)
        if tensor.ids is None and tensor.values.dtype == torch.float32
        else tensor
        for name, tensor in file.tensors.items()
    }
    return replace(file, tensors=tensors)
