"""A model folder in Hugging Face format that loads back exactly, written with bounded extra memory.

Not `PreTrainedModel.save_pretrained`: parameters may be views of larger fused storages, which it takes for tied
weights. Here each tensor is copied out of its storage when its shard is written, so the extra memory is one shard.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from rollplex.errors import ModelError
from rollplex.models.lora import is_lora

SHARD_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """A tensor as it will be written: its size is known before it is read (or merged)."""

    name: str
    num_bytes: int
    read: Callable[[], torch.Tensor]


def save_pretrained(
    model: Any,
    processor: Any,
    folder: str | Path,
    *,
    lora: Literal["adapter", "merged", "base"] = "adapter",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model` and `processor` to `folder` (made when absent) so that the plain auto classes load them back exactly.

    A LoRA model is written as a peft adapter, as one ordinary model with the adapters merged into the weights, or as
    its untouched base; for others `lora` has no effect. The model itself is not changed. A file system error comes
    through as OSError or SafetensorError. Raises ModelError when the config says that input and output embeddings are
    tied and they are not.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if is_lora(model) and lora == "adapter":
        _save_adapter(model, folder)
    else:
        base = model.get_base_model() if is_lora(model) else model
        _check_tying(base)
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        config.save_pretrained(folder)
        base.generation_config.save_pretrained(folder)
        _write_shards(list(_stored_tensors(model, merged=lora == "merged")), folder, shard_bytes)
    processor.save_pretrained(folder)


def _check_tying(model: Any) -> None:
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if bool(model.config.tie_word_embeddings) != tied:
        raise ModelError(
            f"the config says tie_word_embeddings={model.config.tie_word_embeddings}, but input and output embeddings "
            f"are {'one tensor' if tied else 'two tensors'}: the folder would not load back to the same model"
        )


def _stored_tensors(model: Any, *, merged: bool) -> Iterator[StoredTensor]:
    """Every parameter once (tied ones under their first name) and every persistent buffer, under transformers' names."""
    if not is_lora(model):
        yield from _plain_tensors(model, rename=lambda name: name)
        return
    layers = {name: module for name, module in model.get_base_model().named_modules() if hasattr(module, "base_layer")}
    for stored in _plain_tensors(model.get_base_model(), rename=lambda name: name.replace(".base_layer.", ".")):
        layer_name, _, leaf = stored.name.rpartition(".")
        if ".lora_" in stored.name:
            continue
        if merged and leaf == "weight" and layer_name in layers:
            yield stored._replace(read=_merged_weight(layers[layer_name]))
        else:
            yield stored


def _plain_tensors(model: nn.Module, rename: Callable[[str], str]) -> Iterator[StoredTensor]:
    parameters = dict(model.named_parameters())
    every_parameter = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every_parameter}
    for name, tensor in (*parameters.items(), *buffers.items()):
        yield StoredTensor(rename(name), tensor.numel() * tensor.element_size(), tensor.detach)


def _merged_weight(layer: Any) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        weight = layer.base_layer.weight.detach()
        with torch.no_grad():
            # Summed in the widest dtype involved and rounded once.
            total = weight
            for adapter in layer.active_adapters:
                delta = layer.get_delta_weight(adapter)
                total = total.to(torch.promote_types(total.dtype, delta.dtype)) + delta
        return total.to(weight.dtype)

    return read


def _save_adapter(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    # Embeddings never have adapters here; without the argument peft asks the hub about the base model.
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    copies = {name: _detached_copy(tensor) for name, tensor in tensors.items()}
    save_file(copies, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter_config = copy.deepcopy(model.peft_config[model.active_adapter])
    adapter_config.inference_mode = True
    adapter_config.save_pretrained(folder)


def _write_shards(tensors: list[StoredTensor], folder: Path, shard_bytes: int) -> None:
    shards: list[list[StoredTensor]] = [[]]
    for tensor in tensors:
        filled = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        copies = {tensor.name: _detached_copy(tensor.read()) for tensor in shard}
        save_file(copies, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(copies, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous CPU tensor with a storage of its own."""
    return tensor.detach().to("cpu", copy=True).contiguous()
