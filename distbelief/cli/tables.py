"""Tables and numbers as commands print them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*columns, title=Text(title), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(Text, row))  # a name may look like markup
    console = Console()
    Console(width=console.width if console.is_terminal else 150).print(table)


def count(value: int) -> str:
    """Format a count; "" for none."""
    return f"{value:,}" if value else ""


def number(value: float) -> str:
    """Format a number with three digits that count.

    >>> number(0.45678), number(123456.7), number(12.0)
    ('0.457', '123,457', '12.0')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1 else f"{value:.3g}" if value % 1 else f"{value:.1f}"
