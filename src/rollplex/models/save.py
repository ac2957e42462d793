"""A model folder in Hugging Face format that loads back exactly, written with bounded extra memory.

Not `PreTrainedModel.save_pretrained`: parameters may be views of larger fused storages, which it takes for tied
weights, and it would copy them all at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from rollplex.errors import ModelError
from rollplex.models.lora import is_lora
from rollplex.models.tensor_files import SHARD_BYTES, StoredTensor, write_tensors


def save_pretrained(
    model: Any,
    processor: Any,
    folder: str | Path,
    *,
    lora: Literal["adapter", "merged", "base"] = "adapter",
    tensors: Sequence[StoredTensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model` and `processor` to `folder` (made when absent); the plain auto classes load them back exactly.

    A LoRA model is written as a peft adapter, as one ordinary model with the adapters merged into the weights, or as
    its untouched base; for others `lora` has no effect. tensors: those of `stored_state`, where `model` is their names
    and sizes only. The model itself is not changed. A file system error comes through as OSError or SafetensorError.
    Raises ModelError when the config says that input and output embeddings are tied and they are not.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if is_lora(model) and lora == "adapter":
        adapters = [StoredTensor.of(name, tensor) for name, tensor in stored_state(model).items()]
        write_tensors(adapters, folder, weights_stem(model), shard_bytes)
        adapter_config = copy.deepcopy(model.peft_config[model.active_adapter])
        adapter_config.inference_mode = True
        adapter_config.save_pretrained(folder)
    else:
        _save_config(model, folder)
        whole = list(_lora_free(model, merged=lora == "merged")) if tensors is None else tensors
        write_tensors(whole, folder, "model", shard_bytes)
    processor.save_pretrained(folder)


def save_without_weights(model: Any, processor: Any, folder: str | Path) -> None:
    """What `save_pretrained` writes of the ordinary model inside `model`, weights left out: for an engine that gets
    them in another way. Raises as it does."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _save_config(model, folder)
    processor.save_pretrained(folder)


def merged_tensors(model: Any) -> list[StoredTensor]:
    """The weights of the ordinary model that computes what `model` does, LoRA adapters merged when they are read."""
    return list(_lora_free(model, merged=True))


class PlainParameter(NamedTuple):
    """A parameter under its name in the ordinary model. adapted: that model has the sum of it and an adapter."""

    name: str
    parameter: nn.Parameter
    adapted: bool


def plain_parameters(model: Any) -> Iterator[PlainParameter]:
    """The parameters of the ordinary model inside `model`, adapters themselves left out; tied ones once."""
    base = model.get_base_model() if is_lora(model) else model
    adapted = _adapted(base)
    for name, parameter in base.named_parameters():
        if ".lora_" not in name:
            plain = name.replace(".base_layer.", ".")
            layer_name, _, leaf = plain.rpartition(".")
            yield PlainParameter(plain, parameter, leaf == "weight" and layer_name in adapted)


def _save_config(model: Any, folder: Path) -> None:
    base = model.get_base_model() if is_lora(model) else model
    _check_tying(base)
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    config.save_pretrained(folder)
    base.generation_config.save_pretrained(folder)


def weights_stem(model: Any) -> str:
    """Stem of the weight files that `save_pretrained` writes for `model`."""
    return "adapter_model" if is_lora(model) else "model"


def stored_state(model: Any) -> dict[str, torch.Tensor]:
    """What is stored of `model`, by stored name, sharing memory with it: copying into these tensors loads the model.

    Every parameter once (tied ones under their first name) and every persistent buffer; of a LoRA model the adapters.
    """
    if not is_lora(model):
        return dict(_plain_state(model))
    from peft import get_peft_model_state_dict

    # Embeddings never have adapters here; without the argument peft asks the hub about the base model.
    return {name: t.detach() for name, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()}


def _plain_state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    every_parameter = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for name, tensor in model.state_dict().items():
        if name not in every_parameter:
            yield name, tensor


def _check_tying(model: Any) -> None:
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if bool(model.config.tie_word_embeddings) != tied:
        raise ModelError(
            f"the config says tie_word_embeddings={model.config.tie_word_embeddings}, but input and output embeddings "
            f"are {'one tensor' if tied else 'two tensors'}: the folder would not load back to the same model"
        )


def _lora_free(model: Any, *, merged: bool) -> Iterator[StoredTensor]:
    """The tensors of the ordinary model inside `model`, under transformers' names, its adapters merged or left out."""
    if not is_lora(model):
        yield from (StoredTensor.of(name, tensor) for name, tensor in _plain_state(model))
        return
    base = model.get_base_model()
    adapted = _adapted(base)
    for name, tensor in _plain_state(base):
        if ".lora_" in name:
            continue
        stored = StoredTensor.of(name.replace(".base_layer.", "."), tensor)
        layer_name, _, leaf = stored.name.rpartition(".")
        if merged and leaf == "weight" and layer_name in adapted:
            stored = stored._replace(read=_merged_weight(adapted[layer_name]))
        yield stored


def _adapted(base: Any) -> dict[str, Any]:
    """Layers that peft wrapped, by name."""
    return {name: module for name, module in base.named_modules() if hasattr(module, "base_layer")}


def _merged_weight(layer: Any) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        weight = layer.base_layer.weight.detach()
        with torch.no_grad():
            total = weight
            for adapter in layer.active_adapters:
                # Summed in the widest dtype involved and rounded once.
                delta = layer.get_delta_weight(adapter)
                total = total.to(torch.promote_types(total.dtype, delta.dtype)) + delta
        return total.to(weight.dtype)

    return read
