"""Shapes and shard plans against the models that transformers really makes, on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.config import BuildConfig
from rollplex.errors import ModelError
from rollplex.models.build import build_model, build_processor
from rollplex.models.shapes import shape_from_build, shape_from_hf
from rollplex.models.shard_plan import Kind, shard_plan

CLASSES = {
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
}
TEXT_32B = {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8, "vocab_size": 152064,
}  # fmt: skip
VISION_32B = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 5120}


def _meta_model(family: str, text: dict[str, Any], vision: dict[str, Any], tied: bool = False) -> Any:
    config_class, model_class = CLASSES[family]
    with torch.device("meta"):
        return model_class(config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied))


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _planned(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    plan = shard_plan(shape_from_hf({"model_type": family, **config}, "config.json"))
    names = [tensor.name for tensor in plan.tensors]
    assert len(names) == len(set(names))
    return {tensor.name: tensor.shape for tensor in plan.tensors}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_plan_names_every_parameter_of_a_meta_model(family: str, tied: bool) -> None:
    text = {"hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
            "num_key_value_heads": 2, "vocab_size": 501}  # fmt: skip
    if family == "qwen3_vl":
        text["head_dim"] = 24  # not hidden_size / num_attention_heads
    vision: dict[str, Any] = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2}
    vision["out_hidden_size"] = 96
    if family == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 49}
    model = _meta_model(family, text, vision, tied)
    config = {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    assert _planned(family, config) == _shapes(model)


def test_plan_of_the_32b_is_its_meta_model() -> None:
    model = _meta_model("qwen2_5_vl", TEXT_32B, VISION_32B)
    assert _planned("qwen2_5_vl", {"text_config": TEXT_32B, "vision_config": VISION_32B}) == _shapes(model)


@pytest.mark.parametrize("family", CLASSES)
def test_numbers_left_out_are_the_defaults_of_transformers(family: str) -> None:
    config = CLASSES[family][0](text_config={}, vision_config={}).to_dict()
    whole = shape_from_hf(config, "config.json")
    assert shape_from_hf({"model_type": family}, "config.json") == whole
    assert whole.text.num_kv_heads == config["text_config"]["num_key_value_heads"]
    assert whole.vision.depth == config["vision_config"]["depth"]


@settings(max_examples=6)
@given(
    family=st.sampled_from(sorted(CLASSES)), layers=st.integers(1, 3), depth=st.integers(1, 5), heads=st.integers(1, 3),
    tied=st.booleans(), wide=st.sampled_from([None, 20]),
)  # fmt: skip
def test_plan_of_a_built_model(
    *, family: str, layers: int, depth: int, heads: int, tied: bool, wide: int | None
) -> None:
    build = BuildConfig(
        family=family, hidden_size=32 * heads, num_layers=layers, num_heads=2 * heads, num_kv_heads=heads,
        vision_depth=depth, tie_word_embeddings=tied, vision_intermediate_size=wide, intermediate_size=wide,
    )  # fmt: skip
    processor = build_processor(family, ["one two"], 300)
    plan = shard_plan(shape_from_build(build, len(processor.tokenizer)))
    assert {t.name: t.shape for t in plan.tensors} == _shapes(build_model(build, processor, seed=0))


@pytest.mark.parametrize("family", CLASSES)
def test_shape_of_a_saved_model(family: str, tmp_path: Path) -> None:
    build = BuildConfig(family=family, num_heads=4, num_kv_heads=2, tie_word_embeddings=True)
    processor = build_processor(family, ["one two"], 300)
    build_model(build, processor, seed=0).config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert shape_from_hf(saved, "config.json") == shape_from_build(build, len(processor.tokenizer))


def test_flat_file_of_older_versions() -> None:
    flat = {"model_type": "qwen2_5_vl", **TEXT_32B, "vision_config": VISION_32B}
    nested = {"model_type": "qwen2_5_vl", "text_config": TEXT_32B, "vision_config": VISION_32B}
    assert shape_from_hf(flat, "config.json") == shape_from_hf(nested, "config.json")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llava"}, ("llava", "qwen3_vl", "config.json")),
        ({"model_type": "qwen3_vl", "text_config": {"hidden_size": "big"}}, ("hidden_size", "'big'", "text_config")),
        ({"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 63}}, ("hidden_size 63", "64 query heads")),
        ({"model_type": "qwen3_vl", "text_config": {"num_key_value_heads": 5}}, ("32 query heads", "5 key/value")),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 0}}, ("depth", "0", "vision_config")),
        ({"model_type": "qwen3_vl", "vision_config": {"deepstack_visual_indexes": 3}}, ("deepstack", "list")),
    ],
)
def test_config_that_cannot_be_read_is_refused(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        shape_from_hf(config, "config.json")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_kinds_of_one_layer() -> None:
    tensors = shard_plan(shape_from_build(BuildConfig())).tensors
    layer = {t.name.split("layers.0.")[1]: t for t in tensors if "language_model.layers.0." in t.name}
    assert {name for name, t in layer.items() if t.kind is Kind.ROW} == {
        "self_attn.o_proj.weight", "mlp.down_proj.weight"
    }  # fmt: skip
    assert [t.heads for name, t in layer.items() if t.kind is Kind.HEADS] == [2, 1, 1, 2, 1, 1]
    assert all(t.kind is Kind.VISION for t in tensors if "visual" in t.name)
