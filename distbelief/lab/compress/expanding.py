"""From a compressed file to one that plain PyTorch loads."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save

from distbelief.codecs.file import read
from distbelief.core.values import admit, shown
from distbelief.errors import UsageError
from distbelief.record.folder import write_atomically


def expand(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the dense state dict of a compressed file as safetensors; tied names as copies.

    Args:
        path: of the file.
        out: the file to write; None for one beside it that ends in .safetensors.

    Returns:
        The file that was written.

    Raises:
        DataError: there is no such file, or it is truncated, foreign or spoilt.
        UsageError: it would be written over itself, or cannot be written there.
    """
    source = Path(admit(path, str | os.PathLike, f"expand({shown(path)})"))
    target = Path(out) if out else source.with_suffix(".safetensors")
    if target == source:
        raise UsageError(f"--out {target}: is the compressed file itself; name another")
    state = {name: tensor.clone() for name, tensor in read(source).state().items()}
    try:
        write_atomically(target, save(state, metadata={"format": "pt"}))
    except OSError as error:
        remedy = "name a file in a folder of yours"
        raise UsageError(f"--out {target}: cannot be written ({error.strerror}); {remedy}") from error
    return target
