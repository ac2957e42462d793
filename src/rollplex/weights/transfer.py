"""What moves at publish: the rows of each rollout piece that its device lacks, and where they are. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.weights.layout import Sharing, SharingPlan
from rollplex.weights.pieces import PADDING, Run, Unit, common_runs


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows (columns) of one tensor, from training's piece on `source` to the rollout's piece on `target`.

    `source_at` and `target_at` are positions in those pieces. `source == target` happens for rebuilt units only: rows
    that change place on their own device.
    """

    tensor: str
    start: int
    stop: int
    source: int
    source_at: int
    target: int
    target_at: int

    @property
    def length(self) -> int:
        """Rows or columns."""
        return self.stop - self.start


def publish_copies(plan: SharingPlan, unit: Unit, sharing: Sharing, device: int) -> tuple[Copy, ...]:
    """All copies that complete the rollout's piece of `unit` on `device`, in order; rows come from the nearest device.

    Rows that the rollout sees through its view of training's own rows are not copied. Padding is not either.
    """
    rollout = plan.pieces(unit, device)[1]
    copies: list[Copy] = []
    for wanted in rollout.runs:
        if wanted.tensor != PADDING:
            copies += _sources(plan, unit, wanted, device)
    if sharing is not Sharing.REBUILT:
        copies = [copy for copy in copies if copy.source != device]
    return tuple(copies)


def received_numel(plan: SharingPlan, unit: Unit, device: int) -> int:
    """Elements of `unit` that `device` receives from others at publish."""
    train, rollout = plan.pieces(unit, device)
    own = sum(
        part.length
        for wanted in rollout.runs
        if wanted.tensor != PADDING
        for part, _ in common_runs(wanted, train.runs)
    )
    return (rollout.tensor_rows() - own) * unit.cross


def _sources(plan: SharingPlan, unit: Unit, wanted: Run, device: int) -> Iterator[Copy]:
    """`wanted` cut so that each part comes from one device: this one, else the nearest."""
    missing = [wanted]
    for source in sorted(range(plan.num_devices), key=lambda other: (abs(other - device), other)):
        if not missing:
            return
        train, rest = plan.pieces(unit, source)[0], []
        for run in missing:
            at = run.start
            for part, place in sorted(common_runs(run, train.runs), key=lambda pair: pair[0].start):
                yield Copy(part.tensor, part.start, part.stop, source, place, device, part.at)
                if at < part.start:
                    rest.append(Run(run.tensor, at, part.start, run.at + at - run.start))
                at = part.stop
            if at < run.stop:
                rest.append(Run(run.tensor, at, run.stop, run.at + at - run.start))
        missing = rest
    if missing:
        raise AssertionError(f"{unit.name}: no training rank of the block holds {missing}")
