"""What one rank holds of a full tensor, as runs of rows or columns. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from rollplex.models.shard_plan import Kind, PlanTensor

PADDING = ""  # in place of a tensor's name: rows that no token id has


@dataclass(frozen=True, slots=True)
class Run:
    """Rows (or columns) `start` to `stop` of a full tensor, lying at position `at` of what holds them.

    Example: Run("...k_proj.weight", 128, 256, at=1280): the second head of 128 rows, behind 1280 rows of q.
    """

    tensor: str
    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one rank of an engine: `runs` cover positions `at` to `at + length` of the rank's piece."""

    name: str
    runs: tuple[Run, ...]
    at: int

    @property
    def length(self) -> int:
        """Rows (columns of a row-parallel weight)."""
        return sum(run.length for run in self.runs)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank of one side holds of a unit: its parameters, one after the other."""

    parameters: tuple[Parameter, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, in the order in which they lie."""
        return tuple(run for parameter in self.parameters for run in parameter.runs)

    @property
    def length(self) -> int:
        """Rows (columns of a row-parallel weight)."""
        return sum(parameter.length for parameter in self.parameters)

    def tensor_rows(self) -> int:
        """Rows without padding."""
        return sum(run.length for run in self.runs if run.tensor != PADDING)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that must be placed together, since at least one side fuses them: q, k, v; gate, up; or a single one."""

    name: str
    members: tuple[PlanTensor, ...]

    @property
    def kind(self) -> Kind:
        """Of all members alike."""
        return self.members[0].kind

    @property
    def dim(self) -> int:
        """The dimension that is divided: 1 for a row-parallel weight, else 0."""
        return 1 if self.kind is Kind.ROW else 0

    @property
    def trailing(self) -> tuple[int, ...]:
        """The dimensions of a full tensor that are not divided."""
        shape = self.members[0].shape
        return shape[:1] if self.dim else shape[1:]

    @property
    def cross(self) -> int:
        """Elements of one row (of one column of a row-parallel weight)."""
        return prod(self.trailing)

    @property
    def numel(self) -> int:
        """Elements of the full tensors."""
        return sum(member.numel for member in self.members)


def laid_out(spans: Sequence[tuple[str, int, int]], at: int = 0) -> tuple[Run, ...]:
    """Spans (tensor, start, stop) one after the other from `at` on; empty ones left out, adjoining ones joined."""
    runs: list[Run] = []
    for tensor, start, stop in spans:
        if start == stop:
            continue
        last = runs[-1] if runs else None
        if last is not None and (last.tensor, last.stop) == (tensor, start):
            runs[-1] = Run(tensor, last.start, stop, last.at)
        else:
            runs.append(Run(tensor, start, stop, at))
        at += stop - start
    return tuple(runs)


def common_runs(wanted: Run, held: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """The parts of `wanted` that `held` has: each as a run at its place in wanted's holder, and its place in held."""
    for run in held:
        start, stop = max(wanted.start, run.start), min(wanted.stop, run.stop)
        if run.tensor == wanted.tensor and start < stop:
            yield Run(wanted.tensor, start, stop, wanted.at + start - wanted.start), run.at + start - run.start
