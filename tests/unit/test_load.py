"""Loading and saving: exact round trips, and every model that cannot be used exactly is refused by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollplex.config import BuildConfig, LoraConfig, ModelConfig
from rollplex.errors import ModelError
from rollplex.models.exactness import check_exact
from rollplex.models.load import LoadedModel, load_model
from rollplex.models.lora import add_lora
from rollplex.models.save import save_pretrained

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
TEXTS = ["How many red circles are in the image?", "The answer is 3."]


def _plain_load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    auto: Any = AutoModelForImageTextToText
    model, info = auto.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not any(info.values()), info
    return model


def _assert_equal_weights(found: nn.Module, wanted: nn.Module) -> None:
    found_state, wanted_state = found.state_dict(), wanted.state_dict()
    assert found_state.keys() == wanted_state.keys()
    for name, tensor in wanted_state.items():
        assert found_state[name].dtype == tensor.dtype, name
        assert torch.equal(found_state[name], tensor), name


def _edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


@pytest.fixture
def folder(tiny_vlm: LoadedModel, tmp_path: Path) -> Path:
    """A saved tiny model of each family."""
    save_pretrained(tiny_vlm.model, tiny_vlm.processor, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_round_trip_through_the_plain_auto_classes(tiny_model, tmp_path, family, dtype):
    loaded = tiny_model(family, dtype)
    save_pretrained(loaded.model, loaded.processor, tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".bin", ".pt", ".pkl"))]
    _assert_equal_weights(_plain_load(tmp_path, dtype), loaded.model)
    processor: Any = AutoProcessor.from_pretrained(tmp_path)
    assert type(processor) is type(loaded.processor)
    assert processor.tokenizer.get_vocab() == loaded.processor.tokenizer.get_vocab()
    assert processor.chat_template == loaded.processor.chat_template
    assert processor.image_processor.to_dict() == loaded.processor.image_processor.to_dict()
    assert processor.video_processor.to_dict() == loaded.processor.video_processor.to_dict()
    again = load_model(ModelConfig(path=str(tmp_path), dtype=str(dtype).removeprefix("torch.")))
    _assert_equal_weights(again.model, loaded.model)
    assert again.model.generation_config.eos_token_id == loaded.model.generation_config.eos_token_id


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_head_is_stored_once_and_stays_tied(tmp_path, family):
    config = ModelConfig(build=BuildConfig(family=family, tie_word_embeddings=True))
    loaded = load_model(config, texts=TEXTS, seed=3)
    save_pretrained(loaded.model, loaded.processor, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    again = _plain_load(tmp_path)
    assert again.lm_head.weight is again.model.language_model.embed_tokens.weight
    _assert_equal_weights(again, loaded.model)


def test_parameters_that_are_views_of_one_storage_are_stored_apart(tiny_vlm, tmp_path):
    for layer in tiny_vlm.model.model.language_model.layers:
        projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        fused = torch.cat([p.weight.detach() for p in projections])
        for projection, view in zip(projections, fused.split([len(p.weight) for p in projections]), strict=True):
            projection.weight.data = view
        # Row-parallel weights are kept transposed: the view is not contiguous.
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.detach().T.contiguous().T
    save_pretrained(tiny_vlm.model, tiny_vlm.processor, tmp_path)
    wanted_bytes = sum(p.numel() * p.element_size() for p in tiny_vlm.model.parameters())
    assert wanted_bytes < (tmp_path / "model.safetensors").stat().st_size < wanted_bytes + 20_000
    _assert_equal_weights(_plain_load(tmp_path), tiny_vlm.model)


def test_shards_and_their_index_load_back(tiny_qwen3_vl, tmp_path):
    save_pretrained(tiny_qwen3_vl.model, tiny_qwen3_vl.processor, tmp_path, shard_bytes=300_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 320_000 for shard in shards)
    _assert_equal_weights(_plain_load(tmp_path), tiny_qwen3_vl.model)
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"no {shards[1].name}"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_embeddings_tied_against_the_config_are_not_saved(tiny_qwen2_5_vl, tmp_path):
    model = tiny_qwen2_5_vl.model
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    with pytest.raises(ModelError, match="tie_word_embeddings=False"):
        save_pretrained(model, tiny_qwen2_5_vl.processor, tmp_path)


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _add_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"stray.weight": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _reshape_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.zeros(5, 5)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _set_patch(tree: dict[str, Any]) -> None:
    tree["image_processor"]["patch_size"] = 12


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (lambda f: (f / "config.json").unlink(), r"no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda f: _edit_json(f / "config.json", lambda t: t.pop("model_type")), r"config\.json has no model_type"),
        (
            lambda f: _edit_json(f / "config.json", lambda t: t.update(model_type="llava")),
            r"'llava' has no adapter.*qwen3",
        ),
        (
            lambda f: _edit_json(f / "config.json", lambda t: t.update(model_type="qwen3_vl_moe")),
            r"'qwen3_vl_moe' is a mixture of experts",
        ),
        (lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (
            lambda f: os.truncate(f / "model.safetensors", 60_000),
            r"model\.safetensors is cut short.*has 60000 bytes.*for \d{6}",
        ),
        (lambda f: os.truncate(f / "model.safetensors", 900), r"model\.safetensors is cut short.*has 900 bytes"),
        (lambda f: os.truncate(f / "model.safetensors", 3), r"model\.safetensors is cut short.*has 3 bytes"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"not json"), r"not a safetensors file"),
        (_drop_tensor, r"missing: lm_head\.weight"),
        (_add_tensor, r"unexpected: stray\.weight"),
        (_reshape_tensor, r"weights of .* do not load"),
        (lambda f: (f / "tokenizer.json").unlink(), r"processor"),
        (lambda f: (f / "chat_template.jinja").unlink(), r"chat template"),
        (
            lambda f: _edit_json(f / "processor_config.json", _set_patch),
            r"image_processor\.patch_size is 12.*has 1[46]",
        ),
        (
            lambda f: _edit_json(f / "config.json", lambda t: t.update(image_token_id=5)),
            r"image_token_id is \d+.*has 5",
        ),
    ],
)
def test_damaged_folders_are_refused(folder, damage, pattern):
    damage(folder)
    with pytest.raises(ModelError, match=pattern):
        load_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("path", ["{tmp}/nowhere", "./nowhere", "../no/where", "~/nowhere", "nowhere/", "runs/a/model"])
def test_a_folder_that_does_not_exist_is_never_looked_for_on_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    asked = _asked_hosts(monkeypatch)
    with pytest.raises(
        ModelError, match=r"model\.path .*where.* does not exist|model\.path 'runs/a/model' does not exist"
    ):
        load_model(ModelConfig(path=path.format(tmp=tmp_path)))
    assert asked == []


def _asked_hosts(monkeypatch):
    """Names that anybody looks up from now on; none is found."""
    asked = []

    def look_up(host, *_, **__):
        asked.append(host)
        raise socket.gaierror("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def test_a_file_is_no_model_folder(folder):
    with pytest.raises(ModelError, match=r"config\.json' is a file, needed the folder"):
        load_model(ModelConfig(path=str(folder / "config.json")))


def test_a_hub_id_that_cannot_be_read(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model\.path 'no-such/model' is neither a model folder nor a hub id"):
        load_model(ModelConfig(path="no-such/model"))


def test_tokenizer_larger_than_the_model(folder):
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.add_tokens([f"<extra{i}>" for i in range(3)])
    processor.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"tokenizer has \d+ tokens, the model \d+"):
        load_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda t: t["text_config"].update(attention_dropout=0.1), r"text_config\.attention_dropout is 0\.1"),
        (lambda t: t["vision_config"].update(attn_dropout=0.2), r"vision_config\.attn_dropout is 0\.2"),
        (lambda t: t["text_config"].update(num_experts=8), r"mixture of 8 experts"),
        (
            lambda t: t["text_config"].update(use_sliding_window=True, sliding_window=4, max_window_layers=0),
            r"sliding-window",
        ),
        (
            lambda t: t["text_config"]["rope_parameters"].update(rope_type="dynamic", factor=2.0),
            r"rope_type is 'dynamic'",
        ),
    ],
)
def test_configs_that_break_exactness_are_refused(folder, change, pattern):
    _edit_json(folder / "config.json", change)
    with pytest.raises(ModelError, match=pattern):
        load_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("kind", ["module", "attribute", "batch norm", "lora"])
def test_modules_that_break_exactness_are_refused(tiny_vlm, kind):
    model = tiny_vlm.model
    layer = model.model.language_model.layers[1]
    check_exact(model)
    if kind == "module":
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.05))
    elif kind == "attribute":
        model.model.visual.blocks[1].attn.attention_dropout = 0.05
    elif kind == "batch norm":
        layer.mlp.act_fn = nn.BatchNorm1d(4)
    else:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.05))
    with pytest.raises(
        ModelError, match=r"batch" if kind == "batch norm" else r"(layers\.\d|blocks\.1).* has dropout 0\.05"
    ):
        check_exact(model)


def test_frozen_vision_has_no_gradient_and_the_rest_has(folder):
    model = load_model(ModelConfig(path=str(folder), freeze_vision=True)).model
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name for name, on in grads.items() if not on} == {name for name in grads if "visual." in name}
    assert any(grads.values())


def test_dtype_is_applied_on_load(folder):
    model = load_model(ModelConfig(path=str(folder), dtype="bfloat16")).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.language_model.rotary_emb.inv_freq.dtype == torch.float32
    assert not model.training


def _noisy_lora(loaded: LoadedModel, **options: Any) -> Any:
    """LoRA whose B matrices are not zero, so that the adapters matter."""
    model = add_lora(loaded.model, LoraConfig(**options), seed=1, base_path=None)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1
    return model


def test_lora_trains_the_language_model_only(folder):
    model = load_model(ModelConfig(path=str(folder), lora=LoraConfig())).model
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 3 * 7 * 2  # layers x projections x (A, B); the Qwen2.5-VL tower has gate_proj too
    assert all("language_model.layers" in name and "lora_" in name for name in trained)
    again = load_model(ModelConfig(path=str(folder), lora=LoraConfig())).model
    other = load_model(ModelConfig(path=str(folder), lora=LoraConfig()), seed=9).model
    _assert_equal_weights(again, model)
    name = next(name for name in trained if "lora_A" in name)
    assert not torch.equal(other.state_dict()[name], model.state_dict()[name])


def test_lora_on_the_tower_only_when_asked_and_not_when_frozen(tiny_vlm):
    config = LoraConfig(target_modules=("q_proj", "visual.qkv"))
    with pytest.raises(ModelError, match=r"'visual\.qkv'.*freeze_vision"):
        add_lora(tiny_vlm.model, config, seed=0, base_path=None, freeze_vision=True)
    model = add_lora(tiny_vlm.model, config, seed=0, base_path=None)
    trained = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "qkv"}


@pytest.mark.parametrize("target", ["query", "visual.q_proj"])
def test_lora_target_that_matches_nothing(tiny_vlm, target):
    with pytest.raises(ModelError, match=rf"'{target}'.*matches no linear layer.*it has"):
        add_lora(tiny_vlm.model, LoraConfig(target_modules=(target,)), seed=0, base_path=None)


def test_lora_merged_export_is_an_ordinary_model_and_leaves_ours_unchanged(tiny_vlm, tmp_path):
    base = {name: tensor.clone() for name, tensor in tiny_vlm.model.state_dict().items()}
    model = _noisy_lora(tiny_vlm)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_pretrained(model, tiny_vlm.processor, tmp_path, lora="merged")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    merged = _plain_load(tmp_path)
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, base[name])}
    assert len(changed) == 3 * 7
    _assert_equal_weights(merged, model.merge_and_unload())  # peft's own merge is the judge


def test_lora_adapter_loads_on_its_base(tiny_vlm, tmp_path):
    peft = pytest.importorskip("peft")
    save_pretrained(tiny_vlm.model, tiny_vlm.processor, tmp_path / "before")
    model = _noisy_lora(tiny_vlm)
    save_pretrained(model, tiny_vlm.processor, tmp_path / "base", lora="base")
    _assert_equal_weights(_plain_load(tmp_path / "base"), _plain_load(tmp_path / "before"))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    save_pretrained(model, tiny_vlm.processor, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    wrapped = peft.PeftModel.from_pretrained(_plain_load(tmp_path / "base"), tmp_path / "adapter")
    _assert_equal_weights(wrapped, model)
    auto: Any = AutoModelForImageTextToText
    plain = auto.from_pretrained(tmp_path / "adapter")  # finds the base through adapter_config.json
    ids = torch.arange(20, 30)[None]
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, model(input_ids=ids).logits)


def test_missing_peft_is_named():
    script = (
        "import sys; sys.modules['peft'] = None\n"
        "from rollplex.config import BuildConfig, LoraConfig, ModelConfig\n"
        "from rollplex.models.load import load_model\n"
        "load_model(ModelConfig(build=BuildConfig(), lora=LoraConfig()), texts=['a b'])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert "ModelError: model.lora needs the package peft: pip install 'rollplex[peft]'" in run.stderr
