"""Metrics of a rollout from its groups, in TRL's names. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.types import FinishReason, Group


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """completions/*: lengths of all responses and of those that ended by a stop id, and the share that was cut."""
    lengths = [len(r.token_ids) for g in groups for r in g.responses]
    ended = [len(r.token_ids) for g in groups for r in g.responses if r.finish is FinishReason.STOP]
    metrics = {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
    }
    if ended:
        metrics |= {
            "completions/mean_terminated_length": sum(ended) / len(ended),
            "completions/min_terminated_length": float(min(ended)),
            "completions/max_terminated_length": float(max(ended)),
        }
    return metrics


def token_counts(groups: Sequence[Group]) -> tuple[int, int]:
    """(tokens of all sequences with every prompt counted once per response, tokens with every prompt counted once)."""
    responses = sum(len(r.token_ids) for g in groups for r in g.responses)
    repeated = sum(g.spec.num_tokens * len(g.responses) for g in groups)
    return responses + repeated, responses + sum(g.spec.num_tokens for g in groups)
