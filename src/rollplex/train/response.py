"""The response pass: log-probs of all responses of some groups, packed, on top of their shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollplex.models.attention import GroupRows, SharedPrefixAttention, accumulation_dtype
from rollplex.models.logprobs import TokenLogps, token_logps
from rollplex.models.prefix import PrefixPack


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """Responses of one prompt of a pack: `number` is the prompt's place in the pack."""

    number: int
    responses: tuple[tuple[int, ...], ...]  # token ids, each at least one


def response_logps(
    pack: PrefixPack, groups: Sequence[GroupTokens], temperature: float, *, with_grad: bool
) -> TokenLogps:
    """Log-probs and entropies of every response token, packed in order (group, response, token).

    y_1 is predicted by the prompt's last hidden state, y_2.. by the response's own positions, which start at
    `PromptSpec.next_position` on all three axes. With gradient, the backward adds the boundary gradients into the
    pack's accumulators; parameters used by the response pass get theirs through autograd.
    """
    pack.check_current()
    if with_grad:
        pack.want_grads()
    with torch.set_grad_enabled(with_grad):
        hidden_TC = _hidden(pack, groups, with_grad)
        adapter = pack.policy.adapter
        tokens = [token for group in groups for response in group.responses for token in response]
        tokens_T = torch.tensor(tokens, device=hidden_TC.device)
        return token_logps(adapter.final_norm(hidden_TC), adapter.lm_head.weight, tokens_T, temperature)


def _hidden(pack: PrefixPack, groups: Sequence[GroupTokens], with_grad: bool) -> torch.Tensor:
    """(T, C) hidden states that predict each response token."""
    adapter, device = pack.policy.adapter, pack.policy.device
    prompt_GC = _prompt_hidden(pack, with_grad)
    inputs, positions, rows, attending = [], [], [], []
    pieces: list[int] = []  # for each predicted token: -1 - group for the prompt's last state, else its input row
    start = 0
    for group in groups:
        first = pack.specs[group.number].next_position
        lengths = []
        for response in group.responses:
            fed = response[:-1]
            pieces.append(-1 - group.number)
            pieces.extend(range(len(inputs), len(inputs) + len(fed)))
            inputs.extend(fed)
            positions.extend(range(first, first + len(fed)))
            if fed:
                lengths.append(len(fed))
        if lengths:
            rows.append(GroupRows(start, tuple(lengths)))
            attending.append(group.number)
            start += sum(lengths)
    picks_T = torch.tensor(pieces, device=device)
    from_prompt = prompt_GC.index_select(0, (-1 - picks_T).clamp_min(0)).to(pack.hidden_GC.dtype)
    if not inputs:
        return from_prompt
    x_TC = adapter.embed(torch.tensor(inputs, device=device))
    cos_TD, sin_TD = adapter.rotary(torch.tensor(positions, device=device).expand(3, -1), x_TC.dtype)
    for number, layer in enumerate(adapter.layers):
        q_THD, k_TKD, v_TKD = adapter.qkv(layer, x_TC, cos_TD, sin_TD)
        prefixes = [pack.kv(number, prompt, with_grad) for prompt in attending]
        mixed_TC = SharedPrefixAttention.apply(
            q_THD, k_TKD, v_TKD, prompt_GC, rows, prefixes, adapter.shape.scaling
        )
        x_TC = adapter.finish(layer, x_TC, mixed_TC)
    from_response = x_TC.index_select(0, picks_T.clamp_min(0))
    return torch.where((picks_T < 0).unsqueeze(-1), from_prompt, from_response)


def _prompt_hidden(pack: PrefixPack, with_grad: bool) -> torch.Tensor:
    """Last hidden states of the pack; with gradient, a leaf that adds its gradient into the pack in fp32."""
    if not with_grad:
        return pack.hidden_GC
    leaf = pack.hidden_GC.to(accumulation_dtype(pack.hidden_GC.dtype)).detach().requires_grad_()
    target = pack.grad_hidden_GC
    assert target is not None  # want_grads ran

    def add(gradient: torch.Tensor) -> None:
        target.add_(gradient)

    leaf.register_hook(add)
    return leaf
