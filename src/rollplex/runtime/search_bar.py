"""A bar on a terminal while a search goes through its arrangements; nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import track

from rollplex.planner.search import Bounded


def search_bar(items: Sequence[Bounded]) -> Iterator[Bounded]:
    """`items` one by one. The bar is on stderr, since stdout may be read by a program, and goes with the last item."""
    console = Console(stderr=True)
    return iter(track(items, "searching", console=console, transient=True, disable=not console.is_terminal))
