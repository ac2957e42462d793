"""Full tensors from the parts that training's ranks hold, and parts of full tensors: what checkpoints are made of."""

from __future__ import annotations

import torch

from rollplex.models.shard_plan import Kind
from rollplex.parallel.tensor_ranks import ProcessRanks
from rollplex.weights.conventions import piece
from rollplex.weights.layout import SharingPlan
from rollplex.weights.pieces import Run, Unit


class WholeTensors:
    """The tensors of a plan by name, as training's `ranks` divide them. One tensor is whole at a time.

    Anything of a tensor's shape divides as the tensor does: a weight, its moments in the optimizer, its master.
    """

    def __init__(self, plan: SharingPlan, ranks: ProcessRanks):
        self.plan, self.ranks = plan, ranks
        self._units = {member.name: c.unit for c in plan.units for member in c.unit.members}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the full tensor."""
        unit = self._units[name]
        return next(member.shape for member in unit.members if member.name == name)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The full tensor on the first rank, from its `part` and those of the others, which get their own back. All
        ranks must call it."""
        unit = self._units[name]
        if self.ranks.size == 1 or unit.kind in (Kind.REPLICATED, Kind.VISION):
            return part.detach()
        parts = self.ranks.collected(part, f"gather of {name}")
        if not parts:
            return part.detach()
        full = part.new_empty(self.shape(name))
        for rank, held in enumerate(parts):
            for run, source in self._runs(unit, name, rank, held):
                full.movedim(unit.dim, 0)[run.start : run.stop] = source
        return full

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of `full`, rows of padding as zeros."""
        unit = self._units[name]
        if self.ranks.size == 1 or unit.kind in (Kind.REPLICATED, Kind.VISION):
            return full
        rows = self._length(unit, name, self.ranks.rank)
        own = full.new_zeros(rows, *full.movedim(unit.dim, 0).shape[1:]).movedim(0, unit.dim)
        for run, target in self._runs(unit, name, self.ranks.rank, own):
            target.copy_(full.movedim(unit.dim, 0)[run.start : run.stop])
        return own

    def _runs(self, unit: Unit, name: str, rank: int, part: torch.Tensor) -> list[tuple[Run, torch.Tensor]]:
        """Each run of the tensor that `rank` holds, with its place in the rank's `part`."""
        runs = [run for run in self._piece(unit, rank) if run.tensor == name]
        if not runs:  # a rank of padding alone
            return []
        along, first = part.movedim(unit.dim, 0), runs[0].at
        return [(run, along[run.at - first : run.at - first + run.length]) for run in runs]

    def _length(self, unit: Unit, name: str, rank: int) -> int:
        """Rows (columns) of this rank's part, padding included."""
        return sum(run.length for run in self._piece(unit, rank) if len(unit.members) == 1 or run.tensor == name)

    def _piece(self, unit: Unit, rank: int) -> tuple[Run, ...]:
        return piece(unit, self.plan.layouts[0], rank, self.ranks.size, self.plan.padded[0]).runs
