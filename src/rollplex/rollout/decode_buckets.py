"""Which fixed shape a decode step takes: few of them, since each is captured and holds memory. Pure.

A step has `rows` rows in a table of `groups` x `width` cells and reads `prompt` and `suffix` places. What is not needed
is padding. Sizes go up in octaves, prompts (the longest and most read) in quarters of an octave; a shape stays for as
long as it fits and costs at most twice as much as the smallest that would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_PLACES = 64  # of prompts and suffixes, so that neither begins with a capture every few tokens
MOST_WASTE = 2  # times the rows, or the places read, of the smallest fitting bucket


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of one step; as a need, those that are really used."""

    rows: int
    groups: int
    width: int  # most rows of a group
    prompt: int  # places
    suffix: int

    @property
    def cells(self) -> int:
        """Rows that all groups have room for."""
        return self.groups * self.width

    @property
    def places_read(self) -> int:
        """Places whose keys and values a step reads in each layer."""
        return self.groups * self.prompt + self.rows * self.suffix

    def holds(self, need: Bucket) -> bool:
        """Whether `need` fits."""
        return self.joined(need) == self

    def joined(self, other: Bucket) -> Bucket:
        """The smallest that holds both."""
        return Bucket(
            max(self.rows, other.rows),
            max(self.groups, other.groups),
            max(self.width, other.width),
            max(self.prompt, other.prompt),
            max(self.suffix, other.suffix),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What no step of an engine goes beyond, so that no padding does."""

    rows: int
    width: int
    suffix: int


def rounded(count: int, *, least: int = 1, parts: int = 1) -> int:
    """`count` or the next larger size: `parts` equal steps from each power of two to the next, `least` at least.

    Less than (1 + 1 / parts) times a `count` of at least `least`, a power of two.
    """
    if count <= least:
        return least
    octave = 1 << ((count - 1).bit_length() - 1)  # the largest power of two below count
    step = max(1, octave // parts)
    return octave + -(-(count - octave) // step) * step


def fitting(need: Bucket, limits: Limits) -> Bucket:
    """The smallest bucket that holds `need`, which is within `limits`."""
    return Bucket(
        rows=min(rounded(need.rows), limits.rows),
        groups=min(rounded(need.groups), limits.rows),  # a live group has a row
        width=min(rounded(need.width), limits.width),
        prompt=rounded(need.prompt, least=LEAST_PLACES, parts=4),
        suffix=min(rounded(need.suffix, least=LEAST_PLACES), limits.suffix),
    )


def next_bucket(current: Bucket | None, need: Bucket, limits: Limits) -> Bucket:
    """The bucket of the next step."""
    smallest = fitting(need, limits)
    if current is None or not current.holds(need):
        return smallest
    wasteful = current.rows > MOST_WASTE * smallest.rows or current.places_read > MOST_WASTE * smallest.places_read
    return smallest if wasteful else current


def widest(slots: Sequence[int]) -> int:
    """Most rows of one group; slots: the group of each row."""
    return max(Counter(slots).values())


def table(slots: Sequence[int], groups: int, width: int) -> tuple[list[int], list[int]]:
    """(row in each cell, 0 in an empty one; cell of each row) of rows of these groups, line by line."""
    rows, cells, used = [0] * (groups * width), [], [0] * groups
    for row, slot in enumerate(slots):
        cell = slot * width + used[slot]
        used[slot] += 1
        rows[cell] = row
        cells.append(cell)
    return rows, cells
