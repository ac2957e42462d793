"""The textbook GRPO step: every sequence whole, alone, through transformers' own model(...), every formula written out.

It judges the product, so it shares no code with it: no split, no cache, no packing; positions come from transformers'
get_rope_index on the full sequence, media go through the processor's tensors. Only PromptSpec's tensors are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class OracleGroup:
    """One prompt's tensors as the processor gave them, its responses, and an advantage or a reward for each."""

    inputs: dict[str, torch.Tensor]  # input_ids (1, P), mm_token_type_ids, and the media tensors there are
    responses: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True)
class Settings:
    """The GRPO step's numbers; token-mean loss (dapo), k3 KL, group-normalised advantages."""

    temperature: float = 1.0
    epsilon: float = 0.2
    beta: float = 0.0
    kl_by_ratio: bool = True
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass
class AdamState:
    """Steps and moments by parameter name: a parameter that gets no gradient in a step does not move in it."""

    steps: dict[str, int] = field(default_factory=dict)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    second: dict[str, torch.Tensor] = field(default_factory=dict)


def response_logps(model: Any, group: OracleGroup, index: int, temperature: float) -> torch.Tensor:
    """(R,) log-probs of one response's tokens, from one full forward of prompt + response."""
    answer = torch.tensor([group.responses[index]])
    inputs = dict(group.inputs)
    prompt = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
    types = inputs.pop("mm_token_type_ids")
    if types.any():
        inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(answer, dtype=types.dtype)], dim=1)
    logits = model(**inputs, use_cache=False).logits[0, prompt - 1 : -1] / temperature
    math = logits if logits.dtype == torch.float64 else logits.float()
    return math.log_softmax(-1).gather(1, answer[0, :, None]).squeeze(1)


def advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (sample std + 1e-4) inside one group; a lone response has no baseline."""
    values = torch.tensor(rewards, dtype=torch.float64)
    if len(values) == 1 or bool((values == values[0]).all()):
        return [0.0] * len(values)
    return ((values - values.mean()) / (values.std() + 1e-4)).tolist()


def loss_gradient(
    model: Any,
    groups: Sequence[OracleGroup],
    settings: Settings,
    *,
    old: Sequence[Sequence[torch.Tensor]],
    ref: Sequence[Sequence[torch.Tensor]] | None,
    tokens_per_step: float,
) -> dict[str, torch.Tensor]:
    """Gradient of the sum over tokens of -min(r A, clip(r) A) + beta r (exp(d) - d - 1), divided by tokens_per_step.

    d = ref - logp, r = exp(logp - old); the second r only with `kl_by_ratio`.
    """
    total: dict[str, torch.Tensor] = {}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for number, group in enumerate(groups):
        for index, advantage in enumerate(advantages(group.rewards)):
            logp = response_logps(model, group, index, settings.temperature)
            ratio = torch.exp(logp - old[number][index])
            clipped = torch.clamp(ratio, 1 - settings.epsilon, 1 + settings.epsilon)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
            if ref is not None:
                d = ref[number][index] - logp
                loss = loss + settings.beta * (torch.exp(d) - d - 1) * (ratio if settings.kl_by_ratio else 1)
            grads = torch.autograd.grad(loss.sum() / tokens_per_step, list(trainable.values()), allow_unused=True)
            for name, grad in zip(trainable, grads, strict=True):
                if grad is not None:
                    total[name] = total.get(name, 0) + grad.to(torch.float64)
    return total


@torch.no_grad()
def all_logps(model: Any, groups: Sequence[OracleGroup], temperature: float) -> list[list[torch.Tensor]]:
    """Log-probs of all responses of all groups."""
    return [[response_logps(model, g, i, temperature) for i in range(len(g.responses))] for g in groups]


@torch.no_grad()
def clip_and_adamw(model: Any, grads: dict[str, torch.Tensor], state: AdamState, settings: Settings) -> float:
    """Clip to max_grad_norm, one AdamW update in place (decay on matrices only); the norm before clipping."""
    norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))
    scale = torch.clamp(settings.max_grad_norm / (norm + 1e-6), max=1.0)
    beta1, beta2 = settings.betas
    for name, parameter in model.named_parameters():
        if name not in grads:
            continue
        grad = grads[name] * scale
        step = state.steps[name] = state.steps.get(name, 0) + 1
        state.first[name] = beta1 * state.first.get(name, torch.zeros_like(grad)) + (1 - beta1) * grad
        state.second[name] = beta2 * state.second.get(name, torch.zeros_like(grad)) + (1 - beta2) * grad**2
        first = state.first[name] / (1 - beta1**step)
        second = state.second[name] / (1 - beta2**step)
        decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
        value = parameter.double() * (1 - settings.learning_rate * decay)
        parameter.copy_(value - settings.learning_rate * first / (second.sqrt() + settings.adam_epsilon))
    return float(norm)


def rollout_update(
    model: Any,
    minibatches: Sequence[Sequence[OracleGroup]],
    settings: Settings,
    state: AdamState,
    *,
    epochs: int = 1,
    reference: Any = None,
) -> list[dict[str, torch.Tensor]]:
    """All optimizer steps of one rollout, in place; the gradient (before clipping) of each."""
    old = [all_logps(model, groups, settings.temperature) for groups in minibatches]
    ref = [None if reference is None else all_logps(reference, g, settings.temperature) for g in minibatches]
    tokens = sum(len(r) for groups in minibatches for g in groups for r in g.responses)
    steps = []
    for _ in range(epochs):
        for groups, old_part, ref_part in zip(minibatches, old, ref, strict=True):
            scale = tokens / len(minibatches)
            grads = loss_gradient(model, groups, settings, old=old_part, ref=ref_part, tokens_per_step=scale)
            clip_and_adamw(model, grads, state, settings)
            steps.append(grads)
    return steps
