"""Rewards of groups into advantages, and the reward metrics. Pure numbers: no torch, no files.

Three estimators, chosen by `algorithm.loss_type`:
- group-relative (grpo, bnpo, dr_grpo, dapo, cispo, gspo): reward minus the group's mean, divided by
  std + 1e-4 where std is the sample standard deviation of the group or of the batch (`scale_rewards`), or not divided;
- rloo: reward minus the mean of the *other* responses of its group (Ahmadian et al. 2024), not divided;
- reinforce_pp: returns normalised over all counted tokens of the batch (Hu et al. 2025, arXiv 2501.03262, equation of
  the global advantage normalisation): (R - mean) / sqrt(max(var, 1e-8)) with mean and population variance weighted by
  response length, since each token carries its response's return (gamma = 1, reward at the end).

A response without a reward (None: no reward function applied) is left out of every statistic and gets advantage 0.
`scale_rewards` belongs to the group-relative estimator only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

STD_EPSILON = 1e-4  # TRL's, added to the standard deviation
VARIANCE_FLOOR = 1e-8  # of reinforce_pp, as OpenRLHF, the implementation of its authors

Estimator = Literal["group", "rloo", "reinforce_pp"]
ScaleRewards = Literal["group", "batch", "none"]
GroupRewards = Sequence[float | None]  # one entry per response of one group


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch of groups, in the order given."""

    values: tuple[tuple[float, ...], ...]  # per group, per response
    zero_std: tuple[bool, ...]  # per group: no spread (G=1 included) in its rewards, less any KL
    frac_reward_zero_std: float  # TRL's metric: fraction of responses whose deviation (group's or batch's) is zero


def estimator_of(loss_type: str) -> Estimator:
    """The advantage estimator that goes with `algorithm.loss_type`."""
    if loss_type == "rloo":
        return "rloo"
    if loss_type == "reinforce_pp":
        return "reinforce_pp"
    return "group"


def has_spread(rewards: GroupRewards) -> bool:
    """Whether two responses of the group differ in reward; without, a group teaches nothing (dynamic sampling)."""
    present = [r for r in rewards if r is not None]
    return bool(present) and min(present) < max(present)


def compute_advantages(
    rewards: Sequence[GroupRewards],
    *,
    estimator: Estimator,
    scale_rewards: ScaleRewards = "group",
    beta: float = 0.0,
    kl: Sequence[Sequence[float]] | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
) -> Advantages:
    """Advantages of whole groups; statistics never cross a group unless the estimator says "batch".

    rewards: per group, per response; groups may differ in size. kl: KL of each response in nats; given, beta * kl is
    subtracted from the rewards first (`kl_in_reward`). lengths: counted tokens of each response, needed by
    reinforce_pp only. A group of one response has standard deviation 0 and no baseline: its advantage is 0 (group,
    rloo). Rewards that are all equal give advantages of exactly 0.
    """
    returns = _returns(rewards, beta, kl)
    zero_std = tuple(not has_spread(group) for group in returns)
    if estimator == "rloo":
        values = tuple(_leave_one_out(group) for group in returns)
    elif estimator == "reinforce_pp":
        values = _batch_normalised(returns, lengths)
    else:
        values = _group_relative(returns, scale_rewards)
    by_batch = estimator == "reinforce_pp" or (estimator == "group" and scale_rewards == "batch")
    return Advantages(values, zero_std, _frac_zero_std(returns, by_batch))


def reward_metrics(
    rewards: Sequence[GroupRewards], parts: Sequence[Mapping[str, GroupRewards]], advantages: Advantages
) -> dict[str, float]:
    """TRL's reward metrics of one rollout. Both sequences hold one entry per group; `parts` maps function to rewards.

    `reward`, `reward_std`, `frac_reward_zero_std`, `rewards/<func>/mean|std`: over the responses that have a reward,
    before any KL is subtracted. A key whose value is undefined (no reward at all; the deviation of one) is left out.
    """
    metrics = _mean_and_std(_present(rewards), "reward", "reward_std")
    for name in dict.fromkeys(name for part in parts for name in part):
        scores = _present([part[name] for part in parts if name in part])
        metrics |= _mean_and_std(scores, f"rewards/{name}/mean", f"rewards/{name}/std")
    metrics["frac_reward_zero_std"] = advantages.frac_reward_zero_std
    return metrics


def _returns(
    rewards: Sequence[GroupRewards], beta: float, kl: Sequence[Sequence[float]] | None
) -> list[list[float | None]]:
    if kl is None:
        return [list(group) for group in rewards]
    return [
        [None if r is None else r - beta * k for r, k in zip(group, penalties, strict=True)]
        for group, penalties in zip(rewards, kl, strict=True)
    ]


def _group_relative(returns: Sequence[GroupRewards], scale_rewards: ScaleRewards) -> tuple[tuple[float, ...], ...]:
    batch_std = _sample_std(_present(returns))
    values = []
    for group in returns:
        present = [r for r in group if r is not None]
        # One scored response alone has no spread to learn from; equal ones must not turn rounding into a signal.
        if len(present) < 2 or min(present) == max(present):
            values.append((0.0,) * len(group))
            continue
        mean = _mean(present)
        std = {"group": _sample_std(present), "batch": batch_std, "none": None}[scale_rewards]
        divisor = 1.0 if std is None else std + STD_EPSILON
        values.append(tuple(0.0 if r is None else (r - mean) / divisor for r in group))
    return tuple(values)


def _leave_one_out(group: GroupRewards) -> tuple[float, ...]:
    present = [r for r in group if r is not None]
    if len(present) < 2 or min(present) == max(present):
        return (0.0,) * len(group)
    total, others = math.fsum(present), len(present) - 1
    return tuple(0.0 if r is None else r - (total - r) / others for r in group)


def _batch_normalised(
    returns: Sequence[GroupRewards], lengths: Sequence[Sequence[int]] | None
) -> tuple[tuple[float, ...], ...]:
    if lengths is None:
        raise ValueError("reinforce_pp normalises over tokens: needs the counted length of each response")
    pairs = [
        (r, n)
        for group, counts in zip(returns, lengths, strict=True)
        for r, n in zip(group, counts, strict=True)
        if r is not None and n > 0
    ]
    if not pairs or min(r for r, _ in pairs) == max(r for r, _ in pairs):
        return tuple((0.0,) * len(group) for group in returns)
    tokens = sum(n for _, n in pairs)
    mean = math.fsum(r * n for r, n in pairs) / tokens
    variance = math.fsum((r - mean) ** 2 * n for r, n in pairs) / tokens
    scale = 1.0 / math.sqrt(max(variance, VARIANCE_FLOOR))
    return tuple(tuple(0.0 if r is None else (r - mean) * scale for r in group) for group in returns)


def _present(groups: Sequence[GroupRewards]) -> list[float]:
    return [r for group in groups for r in group if r is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _sample_std(values: Sequence[float]) -> float | None:
    """Standard deviation with n - 1; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _frac_zero_std(returns: Sequence[GroupRewards], by_batch: bool) -> float:
    """TRL's convention: an undefined deviation (one scored response of several) does not count as zero."""
    pools = [_flatten(returns)] if by_batch else list(returns)
    responses = sum(len(pool) for pool in pools)
    zero = 0
    for pool in pools:
        std = 0.0 if len(pool) == 1 else _sample_std([r for r in pool if r is not None])
        if std is not None and std <= 1e-8:
            zero += len(pool)
    return zero / responses if responses else 0.0


def _flatten(groups: Sequence[GroupRewards]) -> list[float | None]:
    return [r for group in groups for r in group]


def _mean_and_std(values: Sequence[float], mean_key: str, std_key: str) -> dict[str, float]:
    metrics = {mean_key: _mean(values)} if values else {}
    std = _sample_std(values)
    return metrics if std is None else {**metrics, std_key: std}
