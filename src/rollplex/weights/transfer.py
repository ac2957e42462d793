"""What moves at publish: the rows of each rollout piece that its device lacks, and where they are. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Move:
    """A copy together with its unit's number in `SharingPlan.units`."""

    unit: int
    copy: Copy
    numel: int


def local_moves(plan: SharingPlan, device: int) -> tuple[Move, ...]:
    """Rows of rebuilt units that change place on `device` itself."""
    return tuple(move for move in _moves(plan, device) if move.copy.source == device)


def publish_rounds(plan: SharingPlan, bucket_numel: int) -> tuple[tuple[Move, ...], ...]:
    """All moves between devices of the block, in rounds in which no device sends or receives more than a bucket.

    Every device works the same rounds out, so they need not be agreed on. A copy that is larger than a bucket is cut
    between rows; a single row always goes through. Example: two devices that exchange 5 rows of 10 elements each, with
    buckets of 20: three rounds, of 2, 2 and 1 rows each way.
    """
    rounds: list[list[Move]] = []
    filled: list[tuple[Counter[int], Counter[int]]] = []  # per round: elements that each device sends, receives
    opened = {device: 0 for device in range(plan.num_devices)}  # round that a target is at
    for move in (move for device in range(plan.num_devices) for move in _moves(plan, device)):
        if move.copy.source == move.copy.target:
            continue
        for part in _cut(move, bucket_numel):
            source, target, at = part.copy.source, part.copy.target, opened[part.copy.target]
            while True:
                if at == len(rounds):
                    rounds.append([])
                    filled.append((Counter(), Counter()))
                sent, received = filled[at]
                largest = max(sent[source], received[target])
                if not largest or largest + part.numel <= bucket_numel:
                    break
                at += 1
            opened[target] = at
            rounds[at].append(part)
            sent[source] += part.numel
            received[target] += part.numel
    return tuple(tuple(moves) for moves in rounds)


def _moves(plan: SharingPlan, device: int) -> Iterator[Move]:
    for number, classified in enumerate(plan.units):
        for copy in publish_copies(plan, classified.unit, classified.sharing, device):
            yield Move(number, copy, copy.length * classified.unit.cross)


def _cut(move: Move, bucket_numel: int) -> Iterator[Move]:
    """`move` in parts of at most a bucket, at least a row each."""
    copy, cross = move.copy, move.numel // move.copy.length
    rows = max(1, bucket_numel // cross)
    for at in range(0, copy.length, rows):
        length = min(rows, copy.length - at)
        part = replace(
            copy,
            start=copy.start + at,
            stop=copy.start + at + length,
            source_at=copy.source_at + at,
            target_at=copy.target_at + at,
        )
        yield Move(move.unit, part, length * cross)


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
