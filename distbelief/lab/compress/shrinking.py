"""What is done to tensors: pruned to their largest values, and shared among a few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from distbelief.codecs.clusters import cluster
from distbelief.codecs.file import ModelFile
from distbelief.codecs.stored import Stored
from distbelief.errors import UsageError
from distbelief.tasks.files.constrained import trained_name


def stored(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a state dict, each once, and the further names of those that are tied.

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
    """Which share of each layer is kept.

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
    """The tensor with the largest of its kept values, so many that they are this share of all, one at least; of two
    that are as large, the first.

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
    """The tensor whose kept values share 2**bits, or why it is left alone."""
    different = len(torch.unique(tensor.values))
    if tensor.kept <= 1 << bits:
        return f"it has {tensor.kept} values, and a codebook would have {1 << bits}"
    if different < 1 << bits:
        return f"it has {different} different values, fewer than {1 << bits} clusters"
    codebook, ids = cluster(tensor.values.numpy(), 1 << bits, start, seed)
    return Stored(tensor.shape, torch.from_numpy(codebook), tensor.positions, ids, bits)


def trained(file: ModelFile, state: Mapping[str, torch.Tensor]) -> ModelFile:
    """The file with the values that training has left.

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
    """The file whose values of float32 that are not shared are written in fewer bits."""
    tensors = {
        name: replace(tensor, precision=precision)
        if tensor.ids is None and tensor.values.dtype == torch.float32
        else tensor
        for name, tensor in file.tensors.items()
    }
    return replace(file, tensors=tensors)
