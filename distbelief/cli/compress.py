"""The commands `compress` and `expand`: a run's model made smaller, in a file, and whole again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import msgspec

from distbelief.cli import teller
from distbelief.cli.arguments import ask, ask_of
from distbelief.core.records import Json
from distbelief.lab.compress.options import Compression
from distbelief.places import signals
from distbelief.places.processes import forkserver


@dataclass(frozen=True)
class CompressOptions(Compression):
    """Make the model of a run smaller: prune it (--keep), have its weights share a few values (--bits), code what is
    left (--huffman), and train it on in between. The size of the file is the ratio that is told.
    """

    out: str = "model.dbz"
    """The file to write."""
    quiet: bool = False
    """Show nothing but errors."""
    json: bool = False
    """Show what came of it as JSON."""


def compress(args: list[str]) -> int:
    """`distbelief compress RUN [options]`."""
    run, settings = ask_of("distbelief compress RUN", "run", CompressOptions, args)
    forkserver.start()
    from distbelief.lab.compress.compressing import compress as make

    chosen = Compression(**{field.name: getattr(settings, field.name) for field in fields(Compression)})
    with signals.raised():
        result = make(run, settings.out, chosen, tell=teller(settings.quiet or settings.json))
    if settings.json:
        print(msgspec.json.encode(result).decode())
    elif not settings.quiet:
        print("\n".join(summary(result)))
    return 0


def parse_compression(words: Sequence[str]) -> Compression:
    """The options that words of the command line stand for, without those of where it is written and what is told.

    Raises:
        UsageError: there is no such option, or no such value.
    """
    return ask("distbelief compress RUN", Compression, words)


def summary(result: Json) -> list[str]:
    """Describe a compression, in lines."""
    lines = [f"{'layer':20} {'values':>11} {'kept':>7} {'bits':>5} {'bytes':>11} {'of them gaps':>13}"]
    for layer in result["layers"]:
        size = layer["gap_bytes"] + layer["value_bytes"]
        kept = 100 * layer["kept"] / layer["values"]
        lines.append(
            f"{layer['name']:20} {layer['values']:>11,} {kept:>5.1f} % {layer['bits'] or 32:>5} {size:>11,} "
            f"{layer['gap_bytes']:>13,}"
        )
    lines += [f"{name} shares nothing: {why}" for name, why in result["left_alone"].items()]
    sizes = f"{result['bytes']:,} bytes of {result['dense_bytes']:,}"
    lines.append(f"{result['file']}: {sizes}, {result['ratio']:.1f} times fewer")
    if "test_error" in result:
        lines.append(f"test error {result['test_error']:.2f} %, before it {result['dense_error']:.2f} %")
    return lines


@dataclass(frozen=True)
class ExpandOptions:
    """Write the model of a compressed file as a safetensors file, which plain PyTorch loads."""

    out: str = ""
    """The file to write; else that of the compressed one, with the ending .safetensors."""


def expand(args: list[str]) -> int:
    """`distbelief expand FILE [options]`."""
    file, settings = ask_of("distbelief expand FILE", "file", ExpandOptions, args)
    from distbelief.lab.compress.compressing import expand as write

    print(write(file, settings.out or None))
    return 0
