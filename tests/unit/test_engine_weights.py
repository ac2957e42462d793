"""`rollplex plan --section publish`: how new weights would reach vLLM. tests/real_vllm asks the real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from numerics.cases import tiny_rig
from rollplex.config import Config
from rollplex.errors import ModelError
from rollplex.models.lora_targets import target_layers
from rollplex.models.shapes import shape_of
from rollplex.models.shard_plan import shard_plan
from rollplex.planner.engine_weights import engine_weight_facts, engine_weight_lines
from rollplex.weights.bind import shape_of_model
from rollplex.weights.lending import Way

BUILD = {"vocab_size": 384, "num_heads": 4, "num_kv_heads": 2}


def _facts(*, engine: str = "vllm", device: str = "auto", tp: int = 1, **sections: Any) -> dict[str, Any]:
    vllm = sections.pop("vllm", {"enforce_eager": True})
    model = {"build": {**BUILD, **sections.pop("build", {})}, **sections.pop("model", {})}
    rollout = {"engine": engine, **({"vllm": vllm} if engine == "vllm" else {})}
    tree = {"model": model, "rollout": rollout, "run": {"device": device}, "sharing": {"rollout_tp": tp}}
    return engine_weight_facts(Config.model_validate(tree))


def _whole(facts: dict[str, Any]) -> int:
    return sum(facts[way] for way in Way)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_one_rank_needs_nothing_sent(family: str) -> None:
    facts = _facts(build={"family": family})
    cpu, cuda = facts["cpu"], facts["cuda"]
    assert _whole(cpu) == _whole(cuda) == cuda[Way.ALIASED] and cpu["reasons"] == cuda["reasons"] == {}
    assert 0 < cpu[Way.ALIASED] < cpu[Way.PACKED]
    tied = _facts(build={"family": family, "tie_word_embeddings": True})
    assert tied["cpu"][Way.PACKED] == cpu[Way.PACKED]  # the head's own copy
    assert tied["cuda"][Way.ALIASED] < cuda[Way.ALIASED]  # one matrix less
    text = "\n".join(engine_weight_lines(facts))
    assert f"{cpu[Way.PACKED]:,}  packed" in text and f"{cuda[Way.ALIASED]:,}  aliased" in text


def test_graphs_dtypes_ranks_and_adapters_are_reasons() -> None:
    graphs = _facts(device="cuda", vllm={})
    assert "cpu" not in graphs and graphs["cuda"][Way.PUSHED] == _whole(graphs["cuda"])
    assert list(graphs["cuda"]["reasons"]) == ["captured CUDA graphs hold its address (rollout.vllm.enforce_eager)"]
    half = _facts(device="cpu", vllm={"engine_dtype": "bfloat16"})["cpu"]
    assert half[Way.PUSHED] == _whole(half) and "the engine bfloat16" in next(iter(half["reasons"]))
    two = _facts(device="cpu", tp=2)["cpu"]
    assert min(two[way] for way in Way) > 0 and sum(two["reasons"].values()) == two[Way.PUSHED]
    assert {reason.split(" (")[0] for reason in two["reasons"]} == {
        "one rank's rows of a fused weight are several blocks of training's",
        "columns of a row-parallel weight are no block of training's rows",
        "the engine cuts or lays it out otherwise than training",
    }
    lora = _facts(device="cpu", model={"lora": {"target_modules": ["down_proj", "visual.qkv"]}})["cpu"]
    assert 0 < lora[Way.PUSHED] < lora[Way.PACKED]
    assert list(lora["reasons"]) == ["its adapter is merged into it on the way (model.lora)"]


def test_the_local_engine_is_published_nothing() -> None:
    facts = _facts(engine="local")
    assert facts == {"engine": "local"}
    assert "nothing is published" in "\n".join(engine_weight_lines(facts))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_adapters_are_on_the_layers_that_a_run_finds(family: str) -> None:
    """One rule (models/lora_targets.py) over the same names: those of the real model's linear layers."""
    policy = tiny_rig(family, torch.float32).policy
    linear = {name for name, module in policy.model.named_modules() if isinstance(module, nn.Linear)}
    shape = shape_of_model(policy.model)
    planned = {t.name.removesuffix(".weight") for t in shard_plan(shape).tensors if len(t.shape) == 2}
    assert planned - linear == {n for n in planned if n.endswith(("embed_tokens", "pos_embed"))} and linear <= planned
    # A convolution is called "proj" as well, and the head lies in neither half: neither gets an adapter.
    lora = {"target_modules": ["visual.proj"]}
    facts = _facts(device="cpu", build={"family": family}, model={"lora": lora})["cpu"]
    layers = target_layers(("visual.proj",), linear)
    assert layers and not any("patch_embed" in name for name in layers)
    wanted = {f"{name}.{leaf}" for name in layers for leaf in ("weight", "bias")}
    config = Config.model_validate({"model": {"build": {**BUILD, "family": family}}})
    tensors = shard_plan(shape_of(config.model)).tensors
    assert facts[Way.PUSHED] == sum(4 * t.numel for t in tensors if t.name in wanted)
    with pytest.raises(ModelError, match="'lm_head', which matches no linear layer of the language model"):
        _facts(device="cpu", build={"family": family}, model={"lora": {"target_modules": ["lm_head"]}})
