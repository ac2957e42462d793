"""One backing per device under two tensor-parallel degrees: for each tensor alias, transposed view or rebuild.

Of D = max(train_tp, rollout_tp) devices, device g is rank g * n // D of a side of degree n: the ranks whose shards nest
lie on one device, and the side with the smaller degree has D / n replicas in the block. The larger of a device's two
pieces is its storage and the smaller one a view of it, if there is such a view on every device of the block; otherwise
training's piece is stored, and the rollout's is rebuilt from training's pieces into a buffer of its own at publish.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from rollplex.config import SharingConfig
from rollplex.models.shard_plan import Kind, ShardPlan
from rollplex.weights.conventions import Layout, check_degrees, padded_vocabs, piece, units
from rollplex.weights.pieces import Parameter, Piece, Unit
from rollplex.weights.views import Blocks, NoView, View, find, view_of, whole_matrix

ALIGNMENT = (
    128  # elements: each unit starts at a multiple, as allocators and matrix kernels want it (256 bytes in bf16)
)


class Sharing(StrEnum):
    """How a unit's two pieces share memory."""

    ALIGNED = "aligned"  # the smaller piece is rows of the larger one
    TRANSPOSED = "transposed"  # the same, for columns: both are views of a transposed storage
    REBUILT = "rebuilt"  # the pieces are stored apart


class Store(StrEnum):
    """The two storages of a device."""

    BACKING = "backing"
    BUFFER = "rebuild buffer"


@dataclass(frozen=True, slots=True)
class Placed:
    """One parameter of one side on one device: what it holds, and the view of the storage that shows it."""

    parameter: Parameter
    store: Store
    view: View


@dataclass(frozen=True, slots=True)
class Placement:
    """One unit on one device: the parameters of training's rank and of the rollout's."""

    unit: Unit
    sharing: Sharing
    train: tuple[Placed, ...]
    rollout: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """All units on one device. The sizes count elements, gaps of alignment included."""

    device: int
    train_rank: int
    rollout_rank: int
    placements: tuple[Placement, ...]
    backing_numel: int
    buffer_numel: int


@dataclass(frozen=True, slots=True)
class Classified:
    """A unit with its class; `reason` says why it is rebuilt."""

    unit: Unit
    sharing: Sharing
    reason: str = ""


@dataclass(frozen=True)
class SharingPlan:
    """The classes of all units, and the layout of any device of the block.

    Raises ConfigError (from `plan_sharing`) for degrees, or a vocabulary, that do not divide.
    """

    plan: ShardPlan
    sharing: SharingConfig
    padded: tuple[int, int]  # rows of the vocabulary with padding: training, rollout

    @property
    def num_devices(self) -> int:
        """Devices of a block: the larger degree."""
        return max(self.sharing.train_tp, self.sharing.rollout_tp)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Of training and of the rollout."""
        return Layout(self.sharing.train_layout), Layout(self.sharing.rollout_layout)

    @cached_property
    def units(self) -> tuple[Classified, ...]:
        """Every unit, in the order of the model."""
        return tuple(self._classify(unit) for unit in units(self.plan, self.layouts))

    def ranks(self, device: int) -> tuple[int, int]:
        """Training's and the rollout's rank on `device`."""
        count = self.num_devices
        return device * self.sharing.train_tp // count, device * self.sharing.rollout_tp // count

    def pieces(self, unit: Unit, device: int) -> tuple[Piece, Piece]:
        """What training's and the rollout's rank on `device` hold of `unit`."""
        degrees = (self.sharing.train_tp, self.sharing.rollout_tp)
        sides = zip(self.layouts, self.ranks(device), degrees, self.padded, strict=True)
        train, rollout = (piece(unit, layout, rank, degree, vocab) for layout, rank, degree, vocab in sides)
        return train, rollout

    def device(self, device: int) -> DeviceLayout:
        """Where everything lies on `device`."""
        sizes, placements = {store: 0 for store in Store}, []
        for classified in self.units:
            placements.append(self._place(classified, device, sizes))
        return DeviceLayout(device, *self.ranks(device), tuple(placements), sizes[Store.BACKING], sizes[Store.BUFFER])

    def _classify(self, unit: Unit) -> Classified:
        same = True
        for device in range(self.num_devices):
            train, rollout = self.pieces(unit, device)
            same &= train.runs == rollout.runs
            for found in _views(*_held_in(train, rollout)):
                problem = self._problem(unit, found, rollout_is_view=rollout.length < train.length)
                if problem:
                    return Classified(unit, Sharing.REBUILT, problem)
        transposed = unit.kind is Kind.ROW and not same
        return Classified(unit, Sharing.TRANSPOSED if transposed else Sharing.ALIGNED)

    def _problem(self, unit: Unit, found: Blocks | NoView, *, rollout_is_view: bool) -> str:
        """Why `found` cannot be used; "" when it can."""
        if isinstance(found, Blocks):
            side = self.layouts[1 if rollout_is_view else 0]
            if found.count == 1 or side is Layout.MEGATRON:  # which takes gate_up as (2, rows, columns)
                return ""
            larger = "training" if rollout_is_view else "rollout"
            return f"{side} multiplies it as one matrix; its rows are {found.count} blocks of the larger {larger} shard"
        (train, rollout), sharing = self.layouts, self.sharing
        if unit.kind is Kind.VOCAB:
            return (
                f"rows padded to {self.padded[0]} for training at TP {sharing.train_tp}, to {self.padded[1]} for "
                f"rollout at TP {sharing.rollout_tp}: shards do not nest (sharing.vocab_padding=shared pads both alike)"
            )
        heads = self.plan.num_kv_heads
        if found.missing and max(sharing.train_tp, sharing.rollout_tp) > heads:
            orders = f"{_KV_ORDER[train]} in training, {_KV_ORDER[rollout]} in rollout"
            return f"{heads} key/value heads on more ranks: {orders}"
        if found.missing:
            return "a training rank's rows lie in shards of several rollout ranks"
        return f"rows in another order: {_ORDER[train]} in training, {_ORDER[rollout]} in rollout"

    def _place(self, classified: Classified, device: int, sizes: dict[Store, int]) -> Placement:
        """Views of one unit; takes its room from the end of the storages, whose `sizes` it advances."""
        unit, sharing = classified.unit, classified.sharing
        train, rollout = self.pieces(unit, device)
        if sharing is Sharing.REBUILT:
            stored = ((train, train, Store.BACKING), (rollout, rollout, Store.BUFFER))
        else:
            _, holder = _held_in(train, rollout)
            stored = ((train, holder, Store.BACKING), (rollout, holder, Store.BACKING))
        placed = [
            tuple(
                Placed(parameter, store, _view(unit, sharing, parameter, holder).moved(sizes[store]))
                for parameter in side.parameters
            )
            for side, holder, store in stored
        ]
        for store, length in {store: holder.length for _, holder, store in stored}.items():
            sizes[store] = _aligned(sizes[store] + length * unit.cross)
        return Placement(unit, sharing, placed[0], placed[1])


_ORDER = {
    Layout.HF: "each matrix apart",
    Layout.MEGATRON: "[q.. k v] per key/value head",
    Layout.VLLM: "packed [Q; K; V]",
}
_KV_ORDER = {
    Layout.HF: "whole heads",
    Layout.MEGATRON: "rows of [q.. k v] cut evenly, also inside a head,",
    Layout.VLLM: "whole heads",
}


def plan_sharing(plan: ShardPlan, sharing: SharingConfig) -> SharingPlan:
    """The sharing of `plan`'s weights. Raises ConfigError, naming the option, for degrees that do not divide."""
    check_degrees(plan, sharing)
    return SharingPlan(plan, sharing, padded_vocabs(plan, sharing))


def _held_in(train: Piece, rollout: Piece) -> tuple[Piece, Piece]:
    """(the smaller piece, the larger one that should hold it)"""
    return (train, rollout) if train.length <= rollout.length else (rollout, train)


def _views(inner: Piece, holder: Piece) -> Iterator[Blocks | NoView]:
    for parameter in inner.parameters:
        yield find(parameter, holder)


def _view(unit: Unit, sharing: Sharing, parameter: Parameter, holder: Piece) -> View:
    """`parameter` as a view of a storage that holds `holder`, which was found to have one."""
    if unit.dim == 1 and sharing is not Sharing.TRANSPOSED:
        return whole_matrix(unit, parameter.length)
    blocks = find(parameter, holder)
    if isinstance(blocks, NoView):
        raise AssertionError(f"{unit.name}: classified as {sharing}, yet {parameter.name} has no view ({blocks})")
    return view_of(unit, blocks)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
