"""A bar on a terminal while something long goes through many items; nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def watched(items: Sequence[T]) -> Iterator[T]:
    """`items` one by one. The bar is on stderr, since stdout may be read by a program, and goes with the last item."""
    console = Console(stderr=True)
    return iter(track(items, "searching", console=console, transient=True, disable=not console.is_terminal))
