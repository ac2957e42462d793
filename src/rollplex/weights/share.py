"""One device's weights, held once: training's and the rollout's parameters are views of the same storage.

`weights/layout.py` says where everything lies; a `Backing` is that layout with memory under it. What has no view of
training's storage (Sharing.REBUILT) lies in a second, small storage that publish fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from rollplex.errors import ConfigError
from rollplex.weights.layout import DeviceLayout, Placed, Placement, SharingPlan, Store
from rollplex.weights.pieces import PADDING, Unit
from rollplex.weights.segment import Handle, Segment
from rollplex.weights.versions import SharedVersion, VersionHandle


class Side(StrEnum):
    """Whose parameters."""

    TRAIN = "training"
    ROLLOUT = "rollout"


class Sliceable(Protocol):
    """A full tensor of which parts can be read: a torch.Tensor, or a slice of a safetensors file."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class BackingHandle:
    """What another process of this host needs to map a device's weights; it can be pickled."""

    layout: DeviceLayout
    dtype: torch.dtype
    stores: dict[Store, Handle]
    version: VersionHandle


class Backing:
    """The storages of one device, and the version of what they hold."""

    def __init__(
        self, layout: DeviceLayout, dtype: torch.dtype, segments: Mapping[Store, Segment], version: SharedVersion
    ):
        self.layout, self.dtype, self.segments, self.version = layout, dtype, dict(segments), version
        self.stores = {store: segment.memory.view(dtype) for store, segment in self.segments.items()}

    @classmethod
    def create(cls, plan: SharingPlan, device_index: int, dtype: torch.dtype, device: torch.device) -> Backing:
        """Memory for device `device_index` of the block, zeros: padding rows stay so. `load` makes it readable."""
        layout = plan.device(device_index)
        sizes = {Store.BACKING: layout.backing_numel, Store.BUFFER: layout.buffer_numel}
        segments = {store: Segment.create(max(1, n) * dtype.itemsize, device) for store, n in sizes.items()}
        return cls(layout, dtype, segments, SharedVersion.create())

    @property
    def handle(self) -> BackingHandle:
        """For `attach` in another process, while this one lives."""
        stores = {store: segment.handle for store, segment in self.segments.items()}
        return BackingHandle(self.layout, self.dtype, stores, self.version.handle)

    @classmethod
    def attach(cls, handle: BackingHandle) -> Backing:
        """The same weights in this process. Raises StateError when their owner is gone."""
        segments = {store: Segment.attach(part) for store, part in handle.stores.items()}
        return cls(handle.layout, handle.dtype, segments, SharedVersion.attach(handle.version))

    @property
    def nbytes(self) -> int:
        """Of both storages."""
        return sum(store.nbytes for store in self.stores.values())

    def placements(self, side: Side) -> Iterator[tuple[Unit, tuple[Placed, ...]]]:
        """Each unit with the parameters of one side, in the order of the model."""
        for placement in self.layout.placements:
            yield placement.unit, _of(placement, side)

    def view(self, placed: Placed) -> torch.Tensor:
        """A parameter: writing to it writes to the storage."""
        return self.stores[placed.store].as_strided(placed.view.shape, placed.view.strides, placed.view.offset)

    def parameters(self, side: Side) -> dict[str, torch.Tensor]:
        """The parameters of one side by name, as that side's layout has them."""
        return {placed.parameter.name: self.view(placed) for _, part in self.placements(side) for placed in part}

    def tensors(self, side: Side) -> dict[str, torch.Tensor]:
        """This rank's rows (columns) of each tensor of the model, as a view. Padding of the vocabulary is included.

        Raises ConfigError, naming the option, for a layout that does not keep a tensor's rows together.
        """
        found: dict[str, torch.Tensor] = {}
        for unit, part in self.placements(side):
            for placed in part:
                for member in unit.members:
                    view = self._member(unit, placed, member.name, side)
                    if view is not None:
                        found[member.name] = view
        return found

    def rows(self, unit: Unit, part: tuple[Placed, ...], start: int, stop: int) -> Iterator[torch.Tensor]:
        """Positions `start` to `stop` of a side's piece of `unit`, as views with positions first, in order.

        Several where they do not lie in one block.
        """
        for placed in part:
            first, last = max(start, placed.parameter.at), min(stop, placed.parameter.at + placed.parameter.length)
            if first < last:
                yield from self._blocks(unit, placed, first - placed.parameter.at, last - placed.parameter.at)

    def fill(self, side: Side, full: Mapping[str, Sliceable]) -> None:
        """Write one side's parameters from full tensors. Only the slices that this device holds are read."""
        for unit, part in self.placements(side):
            self.fill_unit(unit, part, full)

    def fill_unit(self, unit: Unit, part: tuple[Placed, ...], full: Mapping[str, Sliceable]) -> None:
        """Write one side's parameters of `unit` from its full tensors."""
        for placed in part:
            for run in placed.parameter.runs:
                if run.tensor == PADDING:
                    continue
                at = run.at
                for view in self.rows(unit, (placed,), run.at, run.at + run.length):
                    first = run.start + at - run.at
                    where = slice(first, first + view.shape[0])
                    source = full[run.tensor][:, where].t() if unit.dim else full[run.tensor][where]
                    view.copy_(source)
                    at += view.shape[0]

    def load(self, full: Mapping[str, Sliceable], who: str, *, wait_s: float = 0.0) -> None:
        """Replace all weights, of both sides, by those of `full` (tensor name -> full tensor): a new version."""
        with torch.no_grad(), self.version.writing(who, wait_s=wait_s, replaces_all=True):
            self.fill(Side.TRAIN, full)
            self.fill(Side.ROLLOUT, full)
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until everything written is there for other processes to see."""
        for segment in self.segments.values():
            segment.synchronize()

    def _blocks(self, unit: Unit, placed: Placed, start: int, stop: int) -> Iterator[torch.Tensor]:
        view = self.view(placed)
        if unit.dim:
            yield view.t()[start:stop]
            return
        if len(placed.view.shape) == 1 + len(unit.trailing):
            yield view[start:stop]
            return
        length = view.shape[1]  # (blocks, rows, ...)
        for block in range(start // length, -(-stop // length)):
            yield view[block, max(0, start - block * length) : stop - block * length]

    def _member(self, unit: Unit, placed: Placed, name: str, side: Side) -> torch.Tensor | None:
        """`name`'s part of a parameter that may hold several tensors; None when it holds none of it."""
        runs = [run for run in placed.parameter.runs if run.tensor == name]
        if not runs:
            return None
        start, stop = runs[0].at, runs[-1].at + runs[-1].length
        if len(unit.members) == 1:  # with its padding
            start, stop = placed.parameter.at, placed.parameter.at + placed.parameter.length
        elif stop - start != sum(run.length for run in runs):
            raise ConfigError(_scattered(name, side))
        blocks = list(self.rows(unit, (placed,), start, stop))
        if len(blocks) > 1:
            raise ConfigError(_scattered(name, side))
        return blocks[0].t() if unit.dim else blocks[0]


def _of(placement: Placement, side: Side) -> tuple[Placed, ...]:
    return placement.train if side is Side.TRAIN else placement.rollout


def _scattered(name: str, side: Side) -> str:
    option = "train_layout" if side is Side.TRAIN else "rollout_layout"
    return (
        f"rows of {name} do not lie together in {side}'s layout, and the modules here hold each matrix apart; set "
        f"sharing.{option} to hf or vllm"
    )
