"""When one piece is a view of another, and which: offset, shape and strides in elements. Imports no torch.

A view is what torch.as_strided or numpy's makes of a flat storage. A matrix product takes a view of rows in one block
as it is, a transposed one through its transposed operand, and blocks of rows at one stride as a product for each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rollplex.weights.pieces import Parameter, Piece, Unit, common_runs


@dataclass(frozen=True, slots=True)
class View:
    """`shape` and `strides` in elements from `offset` of a flat storage.

    Three forms: rows in one block, shape (rows, ...); several blocks of as many rows, (blocks, rows, ...); and a
    row-parallel weight stored transposed, shape (out, columns) with strides (1, out).
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements that the view shows."""
        return prod(self.shape)

    def moved(self, by: int) -> View:
        """The same view in a storage where its unit begins `by` elements later."""
        return View(self.offset + by, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where a parameter lies inside a holder: `count` blocks of `length` rows, the first at `start`, `stride` apart."""

    start: int
    length: int
    count: int = 1
    stride: int = 0


@dataclass(frozen=True, slots=True)
class NoView:
    """Why there is no view. `missing`: rows that the holder has not; otherwise they lie in `blocks` uneven blocks."""

    missing: bool
    blocks: int = 0


def find(parameter: Parameter, holder: Piece) -> Blocks | NoView:
    """`parameter` inside `holder`, when its rows are there in order, in one block or in equal blocks at one stride."""
    rows, found = 0, list[tuple[int, int]]()  # blocks as (place in holder, rows)
    for wanted in parameter.runs:
        for run, place in sorted(common_runs(wanted, holder.runs), key=lambda part: part[0].at):
            rows += run.length
            if found and sum(found[-1]) == place:
                found[-1] = (found[-1][0], found[-1][1] + run.length)
            else:
                found.append((place, run.length))
    if rows < parameter.length:
        return NoView(missing=True)
    (start, length), count = found[0], len(found)
    stride = found[1][0] - start if count > 1 else 0
    even = all(block == (start + index * stride, length) for index, block in enumerate(found))
    return Blocks(start, length, count, stride) if even and stride >= 0 else NoView(missing=False, blocks=count)


def view_of(unit: Unit, blocks: Blocks) -> View:
    """The view of `blocks` in a storage of `unit`'s rows (of its columns as rows, for a row-parallel weight)."""
    if unit.dim == 1:
        return View(blocks.start * unit.cross, (unit.cross, blocks.length), (1, unit.cross))
    inner = tuple(prod(unit.trailing[place + 1 :]) for place in range(len(unit.trailing)))
    shape, strides = (blocks.length, *unit.trailing), (unit.cross, *inner)
    if blocks.count > 1:
        shape, strides = (blocks.count, *shape), (blocks.stride * unit.cross, *strides)
    return View(blocks.start * unit.cross, shape, strides)


def whole_matrix(unit: Unit, columns: int) -> View:
    """A row-parallel piece stored as it is: (out, columns), row after row."""
    return View(0, (unit.cross, columns), (columns, 1))
