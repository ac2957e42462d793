"""A transformers model whose parameters are one rank's views of a backing: nothing is copied, nothing held twice."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rollplex.errors import ModelError
from rollplex.models.fused import mark_backed
from rollplex.models.shapes import ModelShape, shape_from_hf


def shape_of_model(model: Any) -> ModelShape:
    """Sizes of a transformers model of a known family."""
    return shape_from_hf(model.config.to_dict(), "the model's config")


def bound(model: Any, tensors: Mapping[str, torch.Tensor], *, trainable: bool) -> Any:
    """A second module tree of `model` with `tensors` (Backing.tensors) as its parameters; buffers are shared.

    `model` may lie on the meta device: only its structure and buffers are used. trainable: parameters of `model` that
    require a gradient do so here too. Raises ModelError for parameters that a shard plan does not know, such as LoRA's.
    """
    twin = _twin(model)
    vocab_size = model.config.get_text_config().vocab_size
    unknown = sorted({name for name, _ in model.named_parameters()} - set(tensors))
    if unknown:
        raise ModelError(
            f"parameters without a place among tensor-parallel ranks: {', '.join(unknown[:3])}; tensor parallelism "
            "takes full models only: leave out model.lora, or set sharing.train_tp and sharing.rollout_tp to 1"
        )
    for name, parameter in list(model.named_parameters()):
        view = tensors[name]
        if _is_vocab(name) and view.shape[0] > vocab_size:
            view = view[:vocab_size]  # one rank has all rows: its padding is never read
        replacement = nn.Parameter(view, requires_grad=trainable and parameter.requires_grad)
        mark_backed(replacement)
        module_name, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(module_name), leaf, replacement)
    if model.config.tie_word_embeddings:
        twin.lm_head.weight = twin.model.language_model.embed_tokens.weight
    return twin.eval()


def store(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the parameters of `model`, where they are copies (parallel/data_shards.py), into `tensors` of a backing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensors[name][: parameter.shape[0]].copy_(parameter)


def _is_vocab(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))


def _twin(model: Any) -> Any:
    """The module tree again, on the same tensors."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
