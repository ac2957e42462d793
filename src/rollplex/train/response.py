"""The response pass: log-probs of all responses of some groups, packed, on top of their shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollplex.models.attention import GroupRows, SharedPrefixAttention, accumulation_dtype
from rollplex.models.logprobs import TokenLogps, token_logps
from rollplex.models.norms import rms_norm
from rollplex.models.prefix import PrefixPack

# Blocks of responses at most this long are joined whatever their lengths: padding them costs less than a call.
SHORT_TOKENS = 8
# Longer ones are joined while padding adds at most this factor to the queries.
MAX_PADDING = 1.25


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
        hidden_TC = rms_norm(adapter.final_norm, hidden_TC)
        return token_logps(hidden_TC, adapter.lm_head.weight, tokens_T, temperature, adapter.vocab_part)


def _hidden(pack: PrefixPack, groups: Sequence[GroupTokens], with_grad: bool) -> torch.Tensor:
    """(T, C) hidden states that predict each response token."""
    adapter, device = pack.policy.adapter, pack.policy.device
    prompt_GC = _prompt_hidden(pack, with_grad)
    fed, picks = _layout(pack, groups)
    picks_T = torch.tensor(picks, device=device)
    from_prompt = prompt_GC.index_select(0, (-1 - picks_T).clamp_min(0)).to(pack.hidden_GC.dtype)
    if not fed.tokens:
        return from_prompt
    x_TC = adapter.embed(torch.tensor(fed.tokens, device=device))
    cos_T1D, sin_T1D = adapter.rotary(torch.tensor(fed.positions, device=device).expand(3, -1), x_TC.dtype)
    runs = _equal_groups(pack, fed.groups)
    rows = [rows for rows, _ in runs]
    for number, layer in enumerate(adapter.layers):
        q_THD, k_TKD, v_TKD = adapter.qkv(layer, x_TC, cos_T1D, sin_T1D)
        prefixes = [pack.kv(number, first, r.num_groups, with_grads=with_grad) for r, first in runs]
        mixed_TC = SharedPrefixAttention.apply(q_THD, k_TKD, v_TKD, prompt_GC, rows, prefixes, adapter.shape.scaling)
        x_TC = adapter.finish(layer, x_TC, mixed_TC)
    from_response = x_TC.index_select(0, picks_T.clamp_min(0))
    return torch.where((picks_T < 0).unsqueeze(-1), from_prompt, from_response)


@dataclass(frozen=True, slots=True)
class _Fed:
    """Response tokens that are fed (all but the last of each response), packed."""

    tokens: list[int]
    positions: list[int]
    groups: list[tuple[int, tuple[int, ...]]]  # (prompt number, lengths of its fed responses), empty ones left out


def _layout(pack: PrefixPack, groups: Sequence[GroupTokens]) -> tuple[_Fed, list[int]]:
    """What is fed, and for each predicted token where its hidden state is: a row of the fed tokens, or
    -1 - number for a prompt's last position."""
    fed = _Fed([], [], [])
    picks: list[int] = []
    for group in groups:
        first = pack.specs[group.number].next_position
        lengths = []
        for response in group.responses:
            count = len(response) - 1
            picks.append(-1 - group.number)
            picks.extend(range(len(fed.tokens), len(fed.tokens) + count))
            fed.tokens.extend(response[:-1])
            fed.positions.extend(range(first, first + count))
            if count:
                lengths.append(count)
        if lengths:
            fed.groups.append((group.number, tuple(lengths)))
    return fed, picks


def _equal_groups(pack: PrefixPack, groups: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[GroupRows, int]]:
    """Neighbouring groups of the same shape (prompt length, number of responses) as one block each, with the number
    of their first prompt; groups stay apart where padding to the longest response would cost more than a call."""
    blocks: list[tuple[GroupRows, int]] = []
    start = 0
    for number, lengths in groups:
        if blocks:
            rows, first = blocks[-1]
            follows = number == first + rows.num_groups and pack.lengths[number] == pack.lengths[first]
            if follows and _worth_joining(rows, lengths):
                blocks[-1] = (GroupRows(rows.start, rows.lengths + lengths, rows.num_groups + 1), first)
                start += sum(lengths)
                continue
        blocks.append((GroupRows(start, lengths, 1), number))
        start += sum(lengths)
    return blocks


def _worth_joining(rows: GroupRows, lengths: tuple[int, ...]) -> bool:
    if len(rows.lengths) != len(lengths) * rows.num_groups:
        return False
    longest = max(max(rows.lengths), max(lengths))
    apart = max(rows.lengths) * len(rows.lengths) + max(lengths) * len(lengths)
    return longest <= SHORT_TOKENS or longest * (len(rows.lengths) + len(lengths)) <= MAX_PADDING * apart


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
