"""The ordinary path (`train.share_prefix: false`): every response runs with its own copy of its prompt and media.

This is what runtimes without prefix sharing do, through transformers' own tower and decoder. It exists as the baseline
that users can switch to and as the other side of `rollplex verify`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from rollplex.models.adapter import FullBatch
from rollplex.models.logprobs import TokenLogps, token_logps
from rollplex.models.policy import Policy
from rollplex.types import PromptSpec


def full_sequence_logps(
    policy: Policy, rows: Sequence[tuple[PromptSpec, tuple[int, ...]]], temperature: float, *, with_grad: bool
) -> TokenLogps:
    """Log-probs and entropies of all response tokens of `rows` (prompt, response ids), packed in row order.

    Only prompt tokens receive visual features: a placeholder id inside a response is an ordinary token.
    """
    adapter, device = policy.adapter, policy.device
    ids, positions, visual, picks = [], [], [], []
    for spec, response in rows:
        answer = torch.tensor(response)
        ids.append(torch.cat([spec.input_ids, answer]))
        later = spec.next_position + torch.arange(len(response))
        positions.append(torch.cat([spec.positions, later.expand(3, -1)], dim=1).t())
        visual.append(torch.cat([spec.token_types > 0, torch.zeros(len(response), dtype=torch.bool)]))
        picks.append(torch.arange(spec.num_tokens - 1, spec.num_tokens - 1 + len(response)))
    lengths = torch.tensor([len(row) for row in ids], device=device)
    ids_BS = pad_sequence(ids, batch_first=True).to(device)
    width = ids_BS.shape[1]
    picks_T = torch.cat([number * width + pick for number, pick in enumerate(picks)]).to(device)
    with torch.set_grad_enabled(with_grad):
        batch = FullBatch(
            embeds_BSC=adapter.embed(ids_BS),
            positions_3BS=pad_sequence(positions, batch_first=True).permute(2, 0, 1).to(device),
            mask_BS=(torch.arange(width, device=device) < lengths[:, None]).long(),
            visual_BS=pad_sequence(visual, batch_first=True).to(device),
            vision=policy.encode([spec for spec, _ in rows], ordinary=True),
        )
        hidden_TC = adapter.full_hidden(batch).flatten(0, 1).index_select(0, picks_T)
        tokens_T = torch.cat([torch.tensor(response) for _, response in rows]).to(device)
        return token_logps(hidden_TC, adapter.lm_head.weight, tokens_T, temperature)
