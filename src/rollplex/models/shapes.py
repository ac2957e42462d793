"""Sizes of a model as plain numbers, from a recipe's `model.build` or a Hugging Face config.json. Imports no torch.

`models/build.py` makes its models from these numbers, and plans count with them, so the two cannot drift apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.config import BuildConfig, ModelConfig
from rollplex.errors import ModelError


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in every decoder layer: `active` of `count` gated MLPs per token, and a linear router.

    `TextShape.intermediate_size` is then the width of one expert. Routing is taken to be uniform.
    """

    count: int
    active: int

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ValueError(f"{self.active} of {self.count} experts are active, needed 1 to all of them")

    def touched(self, tokens: float) -> float:
        """Experts whose weights `tokens` tokens need, on average: E (1 - (1 - a/E)^T)."""
        return self.count * (1.0 - math.pow(1.0 - self.active / self.count, tokens))


@dataclass(frozen=True, slots=True)
class TextShape:
    """Sizes of the language model. `num_heads * head_dim` need not be `hidden_size` (Qwen3-VL).

    experts: of a mixture, which plans can count and no adapter can train; None: a dense model.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding, before any padding
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of the vision tower and of the mergers that end it."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    in_channels: int
    num_position_embeddings: int  # rows of the learned table; 0 where the family has none
    deepstack_layers: tuple[int, ...]  # blocks whose output goes into the language model; empty where there are none
    window_size: int  # pixels per side of the windows that attention stays in; 0: every block sees its whole frame
    full_attention_blocks: tuple[int, ...]  # where there are windows: blocks that see the whole frame all the same


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. `tied`: the output head is the embedding."""

    family: str
    text: TextShape
    vision: VisionShape
    tied: bool


# What the configuration classes of transformers 5.24 take for a number that a config.json leaves out.
_TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "qwen2_5_vl": {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3_vl": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}
_VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
}
FAMILIES = tuple(_TEXT_DEFAULTS)
# A mixture: the sizes of its family but for the MLP, with the defaults of its own configuration class.
_MIXTURES = {"qwen3_vl_moe": "qwen3_vl"}
_MIXTURE_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_KINDS = {False: "positive whole number", True: "list of whole numbers"}
_BUILT_POSITION_GRID = 16  # learned positions per side of a built Qwen3-VL tower, resampled to each image's grid


def patch_size(family: str) -> int:
    """Pixels per side of a patch. Raises ModelError for an unknown family."""
    _check_family(family, "model.build.family")
    return int(_VISION_DEFAULTS[family]["patch_size"])


def shape_of(model: ModelConfig) -> ModelShape:
    """Sizes of a recipe's model, weights left aside: of `model.build`, or from the config.json in `model.path`.

    Raises ModelError when that folder has none that can be read.
    """
    if model.build is not None:
        return shape_from_build(model.build)
    file = Path(str(model.path)) / "config.json"
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the sizes of model.path {model.path!r} are not known: {file} cannot be read ({error}); name a folder on "
            "this machine, or give the sizes as model.build (model.path=null)"
        ) from error
    if not isinstance(tree, dict):
        raise ModelError(f"{file} holds no mapping (model.path)")
    return shape_from_hf(tree, str(file))


def shape_from_build(build: BuildConfig, vocab_size: int | None = None) -> ModelShape:
    """Sizes of the model that `model.build` makes; `vocab_size` is the tokenizer's (absent: the most it may have).

    Raises ModelError, naming the option, for sizes that do not fit together.
    """
    check_build(build)
    defaults, width, depth = _VISION_DEFAULTS[build.family], build.vision_hidden_size, build.vision_depth
    grid, levels = 0, 0
    windows = "window_size" in defaults
    if build.family == "qwen3_vl":
        grid, levels = _BUILT_POSITION_GRID, max(1, min(3, depth // 2, build.num_layers))
    return ModelShape(
        family=build.family,
        text=TextShape(
            hidden_size=build.hidden_size,
            intermediate_size=build.intermediate_size or 2 * build.hidden_size,
            num_layers=build.num_layers,
            num_heads=build.num_heads,
            num_kv_heads=build.num_kv_heads,
            head_dim=build.hidden_size // build.num_heads,
            vocab_size=build.vocab_size if vocab_size is None else vocab_size,
        ),
        vision=VisionShape(
            depth=depth,
            hidden_size=width,
            intermediate_size=build.vision_intermediate_size or 2 * width,
            num_heads=_vision_heads(width),
            out_hidden_size=build.hidden_size,
            patch_size=defaults["patch_size"],
            spatial_merge_size=defaults["spatial_merge_size"],
            temporal_patch_size=defaults["temporal_patch_size"],
            in_channels=defaults["in_channels"],
            num_position_embeddings=grid**2,
            deepstack_layers=tuple(level * depth // levels for level in range(levels)),
            window_size=defaults.get("window_size", 0),
            full_attention_blocks=(depth - 1,) if windows else (),
        ),
        tied=build.tie_word_embeddings,
    )


def shape_from_hf(config: Mapping[str, Any], source: str) -> ModelShape:
    """Sizes from the tree of a config.json; `source` names it in errors.

    A number that is left out is the default of the family's configuration class, as in transformers. Older Qwen2.5-VL
    files hold the language model's numbers at the top. Raises ModelError for an unknown family or what is no number.
    """
    named = str(config.get("model_type"))
    family = _MIXTURES.get(named, named)
    _check_family(family, f"model_type of {source}")
    found, defaults = config.get("text_config") or config, _TEXT_DEFAULTS[family]
    experts = None
    if named in _MIXTURES:
        found, experts, defaults = _mixture(found, f"{source} text_config")
    text = _numbers(found, defaults, f"{source} text_config")
    vision = _numbers(config.get("vision_config") or {}, _VISION_DEFAULTS[family], f"{source} vision_config")
    hidden, heads, kv_heads = (text[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads % kv_heads or ("head_dim" not in text and hidden % heads):
        raise ModelError(
            f"{source} text_config has hidden_size {hidden}, {heads} query heads and {kv_heads} key/value heads; "
            "needed whole heads, and as many query heads for each key/value head"
        )
    # Files written before transformers 5 may have the switch in text_config only.
    inner = (config.get("text_config") or {}).get("tie_word_embeddings", False)
    return ModelShape(
        family=family,
        text=TextShape(
            hidden_size=hidden,
            intermediate_size=text["intermediate_size"],
            num_layers=text["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=text.get("head_dim", hidden // heads),
            vocab_size=text["vocab_size"],
            experts=experts,
        ),
        vision=VisionShape(
            depth=vision["depth"],
            hidden_size=vision["hidden_size"],
            intermediate_size=vision["intermediate_size"],
            num_heads=vision["num_heads"],
            out_hidden_size=vision["out_hidden_size"],
            patch_size=vision["patch_size"],
            spatial_merge_size=vision["spatial_merge_size"],
            temporal_patch_size=vision["temporal_patch_size"],
            in_channels=vision["in_channels"],
            num_position_embeddings=vision.get("num_position_embeddings", 0),
            deepstack_layers=tuple(vision.get("deepstack_visual_indexes", ())),
            window_size=vision.get("window_size", 0),
            full_attention_blocks=tuple(vision.get("fullatt_block_indexes", ())),
        ),
        tied=bool(config.get("tie_word_embeddings", False) or (family == "qwen2_5_vl" and inner)),
    )


def _mixture(found: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], Experts, dict[str, int]]:
    """The numbers of one expert as those of a dense model, the experts, and the defaults of what is left out."""
    sparse = found.get("decoder_sparse_step") or 1, found.get("mlp_only_layers") or []
    if sparse != (1, []):
        raise ModelError(
            f"{source} has dense layers among its experts (decoder_sparse_step {sparse[0]}, mlp_only_layers "
            f"{sparse[1]}); counted are models with experts in every layer"
        )
    numbers = _numbers({"num_experts": found.get("num_local_experts"), **found}, _MIXTURE_DEFAULTS, source)
    try:
        experts = Experts(numbers["num_experts"], numbers["num_experts_per_tok"])
    except ValueError as error:
        raise ModelError(f"{source}: {error} (num_experts, num_experts_per_tok)") from error
    one = {"intermediate_size": numbers["moe_intermediate_size"]}
    heads = {"head_dim": found["head_dim"]} if found.get("head_dim") is not None else {}
    return {**found, **one}, experts, {**numbers, **one, **heads}


def check_build(config: BuildConfig) -> None:
    """Raises ModelError, naming the option, for sizes that do not fit together."""
    where = "model.build."
    _check_family(config.family, f"{where}family")
    if config.hidden_size % config.num_heads:
        raise ModelError(f"{where}hidden_size {config.hidden_size} is not a multiple of num_heads {config.num_heads}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}")
    head_dim = config.hidden_size // config.num_heads
    if head_dim % 2 or head_dim < 8:
        raise ModelError(
            f"{where}hidden_size / num_heads is {head_dim}; rotary positions on three axes need an even head size of "
            "at least 8"
        )
    if config.vision_hidden_size % 4:
        raise ModelError(
            f"{where}vision_hidden_size {config.vision_hidden_size} is not a multiple of 4, which rotary positions on "
            "two axes need"
        )


def _check_family(family: str, option: str) -> None:
    if family not in FAMILIES:
        raise ModelError(f"{option} is {family!r}; families that can be built: {', '.join(FAMILIES)}")


def _numbers(found: Mapping[str, Any], defaults: Mapping[str, Any], source: str) -> dict[str, Any]:
    numbers = {key: default if found.get(key) is None else found[key] for key, default in defaults.items()}
    for key, value in numbers.items():
        listed = isinstance(defaults[key], tuple)
        good = isinstance(value, (list, tuple)) if listed else type(value) is int and value > 0
        if not good or (listed and any(type(item) is not int or item < 0 for item in value)):
            raise ModelError(f"{source} has {key} {value!r}, needed a {_KINDS[listed]}")
    if "num_key_value_heads" in found and found["num_key_value_heads"] is None:
        numbers["num_key_value_heads"] = numbers["num_attention_heads"]  # transformers: null means one for each
    return numbers


def _vision_heads(width: int) -> int:
    """Most heads of size 32 or more (16 at least, for narrow towers) whose size is a multiple of 4."""
    most = max(2, width // 32)
    return next(heads for heads in range(most, 0, -1) if width % (4 * heads) == 0)
