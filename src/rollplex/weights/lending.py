"""What an engine with weights of its own may take from training's storage, layer by layer. Imports no torch.

Such an engine (vLLM) allocates its parameters itself. One that is, number for number, a view of training's storage can
be that view: the optimizer's writes are then the engine's. A layer is what engines load, and turn into the format of
their kernels, as a whole; so it is taken as a whole or pushed as a whole:

    aliased  all its parameters are views of training's storage: publishing moves none of its bytes
    packed   views as well, but its kernel multiplies by a copy in a format of its own, which is made anew at publish,
             straight from the storage: nothing travels
    pushed   neither, and the verdict says why
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from rollplex.config import SharingConfig
from rollplex.weights.conventions import Layout, piece
from rollplex.weights.layout import DeviceLayout, Placement
from rollplex.weights.pieces import Piece
from rollplex.weights.views import Blocks, View, find, view_of

# How training lays out what it lends: whole, each matrix apart, in rows of the blocks that vLLM multiplies at once.
WHOLE = SharingConfig(train_tp=1, rollout_tp=1, train_layout="hf", rollout_layout="vllm")
# Reasons that a run finds in its model and engine, and `rollplex plan` in its options.
ADAPTED = "its adapter is merged into it on the way (model.lora)"
CAPTURED = "captured CUDA graphs hold its address (rollout.vllm.enforce_eager)"
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def cut_otherwise(degree: int) -> str:
    """A reason as well: no cut of training's rows and columns is the engine's."""
    return f"the engine cuts or lays it out otherwise than training (rollout TP {degree})"


class Way(StrEnum):
    """How new weights reach a layer of an engine."""

    ALIASED = "aliased"
    PACKED = "packed"
    PUSHED = "pushed"


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One parameter of an engine, as it is loaded: a kernel's own format may be another.

    sources: the tensors of the model, under transformers' names, that it takes its values from; of a fused one several.
    strides in elements, dtype as in "float32".
    """

    name: str
    sources: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """A module of an engine with parameters of its own, as one worker has it.

    packed: its kernel multiplies by a copy. fixed: why its parameters must stay where they are; "" when they need not.
    """

    name: str
    device: str
    tensors: tuple[EngineTensor, ...]
    packed: bool = False
    fixed: str = ""

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class LoanTerms:
    """What training's storage holds: `layout` is that of one device under WHOLE.

    withheld: tensors of the model that an engine cannot have in place, each with the reason.
    """

    layout: DeviceLayout
    dtype: str
    device: str
    withheld: Mapping[str, str]

    @cached_property
    def by_members(self) -> dict[frozenset[str], Placement]:
        """Units by the tensors that they hold."""
        return {frozenset(m.name for m in p.unit.members): p for p in self.layout.placements}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a layer gets its weights. views: one for each of its parameters, by name, unless it is pushed."""

    layer: EngineLayer
    way: Way
    views: tuple[tuple[str, View], ...] = ()
    reason: str = ""

    def refused(self, reason: str) -> Verdict:
        """The same layer, pushed."""
        return Verdict(self.layer, Way.PUSHED, reason=reason)


@dataclass(frozen=True, slots=True)
class EngineSharing:
    """The verdicts on all layers of an engine, by tensor-parallel rank."""

    ranks: tuple[tuple[Verdict, ...], ...]

    def nbytes(self, way: Way) -> int:
        """Bytes of the engine's parameters that go that way, all ranks together."""
        return sum(verdict.layer.nbytes for verdict in self._verdicts if verdict.way is way)

    @property
    def pushed_sources(self) -> frozenset[str]:
        """The tensors of the model that must be sent at each publish."""
        pushed = [v.layer for v in self._verdicts if v.way is Way.PUSHED]
        return frozenset(source for layer in pushed for tensor in layer.tensors for source in tensor.sources)

    @property
    def reasons(self) -> dict[str, int]:
        """Why layers are pushed, with the bytes that are for that reason; most bytes first."""
        found: dict[str, int] = {}
        for verdict in self._verdicts:
            if verdict.way is Way.PUSHED:
                found[verdict.reason] = found.get(verdict.reason, 0) + verdict.layer.nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def _verdicts(self) -> Iterable[Verdict]:
        return (verdict for rank in self.ranks for verdict in rank)


def decide(layer: EngineLayer, terms: LoanTerms, *, rank: int, degree: int) -> Verdict:
    """How `layer` of tensor-parallel rank `rank` of `degree` gets its weights."""
    if layer.fixed:
        return Verdict(layer, Way.PUSHED, reason=layer.fixed)
    if layer.device != terms.device:
        return Verdict(
            layer, Way.PUSHED, reason=f"training's weights lie on {terms.device}, the engine's on {layer.device}"
        )
    views: list[tuple[str, View]] = []
    for tensor in layer.tensors:
        found = _view(tensor, terms, rank, degree)
        if isinstance(found, str):
            return Verdict(layer, Way.PUSHED, reason=found)
        views.append((tensor.name, found))
    return Verdict(layer, Way.PACKED if layer.packed else Way.ALIASED, tuple(views))


def _view(tensor: EngineTensor, terms: LoanTerms, rank: int, degree: int) -> View | str:
    """Where `tensor` lies in training's storage, or why it does not."""
    for source in tensor.sources:
        if source in terms.withheld:
            return terms.withheld[source]
    placement = terms.by_members.get(frozenset(tensor.sources))
    if placement is None:
        return "training holds no tensor, or no block of tensors, that it is made of"
    if tensor.dtype != terms.dtype:
        return f"training holds {terms.dtype}, the engine {tensor.dtype} (rollout.vllm.engine_dtype)"
    found = _rows(placement, rank, degree)
    if isinstance(found, View) and (found.shape, found.strides) != (tensor.shape, tensor.strides):
        return cut_otherwise(degree)
    return found


def _rows(placement: Placement, rank: int, degree: int) -> View | str:
    """A rank's part of a unit, inside the whole unit."""
    unit, (placed,) = placement.unit, placement.rollout
    wanted = piece(unit, Layout.VLLM, rank, degree, placed.parameter.length).parameters[0]
    if wanted.length == placed.parameter.length:
        return placed.view
    if unit.dim == 1:
        return f"columns of a row-parallel weight are no block of training's rows (rollout TP {degree})"
    blocks = find(wanted, Piece((placed.parameter,)))
    if not isinstance(blocks, Blocks) or blocks.count > 1:
        return f"one rank's rows of a fused weight are several blocks of training's (rollout TP {degree})"
    return view_of(unit, blocks).moved(placed.view.offset)
