"""The part of `rollplex plan` about publishing into vLLM: which layers read training's storage, and what is pushed.

It asks the decision that a run takes (weights/lending.py) about the layers that vLLM will have, which are known from
the model's sizes. A run reports what it found in the log and in the metrics publish/*_bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rollplex.config import Config, ModelConfig
from rollplex.models.lora_targets import target_layers
from rollplex.models.shapes import shape_of
from rollplex.models.shard_plan import Kind, shard_plan
from rollplex.planner.memory import refuse_experts
from rollplex.weights.conventions import Layout, piece
from rollplex.weights.layout import Placement, plan_sharing
from rollplex.weights.lending import (
    ADAPTED,
    CAPTURED,
    WHOLE,
    EngineLayer,
    EngineSharing,
    EngineTensor,
    LoanTerms,
    Way,
    cut_otherwise,
    decide,
)

_LOOKED_UP = ("embed_tokens", "pos_embed")  # tables: nothing multiplies by them
_TABLES = tuple(f"{name}.weight" for name in _LOOKED_UP)


def engine_weight_facts(config: Config) -> dict[str, Any]:
    """Bytes of one engine by the way that new weights reach them, for the device of the run, or for both kinds.

    Example: {"engine": "vllm", "rollout_tp": 1, "cpu": {"aliased": 557056, "packed": 9000, "pushed": 0, "reasons": {}}}
    Raises ModelError for a model whose sizes are not known.
    """
    if config.rollout.engine != "vllm":
        return {"engine": config.rollout.engine}
    shape = shape_of(config.model)
    refuse_experts(shape, "publish")
    layout, degree = plan_sharing(shard_plan(shape), WHOLE).device(0), config.sharing.rollout_tp
    members = (member for placement in layout.placements for member in placement.unit.members)
    matrices = [member.name for member in members if len(member.shape) == 2]
    facts: dict[str, Any] = {"engine": "vllm", "rollout_tp": degree, "servers": config.rollout.vllm.servers}
    for device in ("cpu", "cuda") if config.run.device == "auto" else (config.run.device,):
        terms = LoanTerms(layout, config.model.dtype, device, _adapted(config.model, matrices))
        layers = list(_layers(config, layout.placements, degree, device, tied=shape.tied))
        sharing = EngineSharing((tuple(decide(layer, terms, rank=0, degree=degree) for layer in layers),))
        ways = {str(way): sharing.nbytes(way) for way in Way}
        facts[device] = {**ways, "reasons": sharing.reasons}
    return facts


def engine_weight_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """A line for each way and each reason."""
    if facts["engine"] != "vllm":
        yield f"rollout.engine {facts['engine']} reads the training weights themselves: nothing is published"
        return
    for device in ("cpu", "cuda"):
        if device in facts:
            yield f"vLLM on {device}, bytes of one rank at rollout TP {facts['rollout_tp']}"
            for way in Way:
                yield f"  {facts[device][way]:>16,}  {_MEANING[way]}"
            for reason, nbytes in facts[device]["reasons"].items():
                yield f"  {nbytes:>16,}  of those: {reason}"


_MEANING = {
    Way.ALIASED: "aliased: training's storage itself",
    Way.PACKED: "packed for vLLM's kernels at each publish, straight from training's storage",
    Way.PUSHED: "pushed at each publish",
}


def _layers(
    config: Config, placements: tuple[Placement, ...], degree: int, device: str, *, tied: bool
) -> Iterator[EngineLayer]:
    """vLLM's layers on its first rank."""
    dtype = config.rollout.vllm.engine_dtype or config.model.dtype
    fixed = CAPTURED if device == "cuda" and not config.rollout.vllm.enforce_eager else ""
    for name, group in groupby(placements, lambda placement: placement.unit.name.rpartition(".")[0]):
        parts = list(group)
        matrix = any(len(part.unit.members[0].shape) == 2 for part in parts)
        table = name.endswith(_LOOKED_UP)
        cut = matrix and not table and degree > 1 and parts[0].unit.kind is Kind.VISION
        tensors = tuple(_tensor(part, degree, dtype) for part in parts)
        packed = device == "cpu" and matrix and not table
        yield EngineLayer(name, device, tensors, packed, fixed or (cut_otherwise(degree) if cut else ""))
        if tied and device == "cpu" and name.endswith("embed_tokens"):
            yield EngineLayer("lm_head", device, tensors, True, fixed)


def _tensor(placement: Placement, degree: int, dtype: str) -> EngineTensor:
    unit, (placed,) = placement.unit, placement.rollout
    rows = piece(unit, Layout.VLLM, 0, degree, placed.parameter.length).length
    shape = (unit.cross, rows) if unit.dim else (rows, *unit.trailing)
    strides, numel = list[int](), 1
    for size in reversed(shape):
        strides.insert(0, numel)
        numel *= size
    sources = tuple(member.name for member in unit.members)
    return EngineTensor(unit.name.rpartition(".")[2], sources, dtype, shape, tuple(strides))


def _adapted(model: ModelConfig, matrices: list[str]) -> dict[str, str]:
    """Weights that adapters are merged into."""
    if model.lora is None:
        return {}
    linear = [name.removesuffix(".weight") for name in matrices if not name.endswith(_TABLES)]
    layers = target_layers(model.lora.target_modules, linear, freeze_vision=model.freeze_vision)
    return {f"{layer}.weight": ADAPTED for layer in layers}
