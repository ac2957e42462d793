"""Which losses `stream` may sum before all lengths are known: the table of schedule/stream.py against the losses."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest
import torch

from rollplex.config_algorithm import AlgorithmConfig
from rollplex.schedule.stream import SCALES, Scale
from rollplex.train.loss import LossBatch, LossSettings, LossTotals, policy_loss

LENGTHS = [[5, 1, 3], [2, 7, 4]]  # per group; one response of the second is left out of the loss
COUNTS = [[True, True, True], [True, False, True]]


def _settings(loss_type: str) -> LossSettings:
    algorithm = AlgorithmConfig(loss_type=loss_type, beta=0.1, epsilon_high=5.0)
    return LossSettings.from_config(algorithm, max_completion_length=8)


def _summed_gradient(loss_type: str, totals: LossTotals) -> torch.Tensor:
    """Gradient with respect to all log-probs, group by group."""
    generator = torch.Generator().manual_seed(3)
    grads = []
    for lengths, counts in zip(LENGTHS, COUNTS, strict=True):
        tokens = sum(lengths)
        logp_T = (-torch.rand(tokens, generator=generator, dtype=torch.float64)).requires_grad_()
        batch = LossBatch(
            logp_T=logp_T,
            old_logp_T=None,
            ref_logp_T=-torch.rand(tokens, generator=generator, dtype=torch.float64),
            advantage_N=torch.randn(len(lengths), generator=generator, dtype=torch.float64),
            row_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            counts_N=torch.tensor(counts),
        )
        policy_loss(batch, totals, _settings(loss_type)).loss.backward()
        assert logp_T.grad is not None
        grads.append(logp_T.grad)
    return torch.cat(grads)


def _totals() -> LossTotals:
    lengths, counts = [sum(part, []) for part in (LENGTHS, COUNTS)]
    return LossTotals.of_step(lengths, counts)


def test_the_table_names_every_loss() -> None:
    assert set(SCALES) == set(typing.get_args(AlgorithmConfig.model_fields["loss_type"].annotation))


@pytest.mark.parametrize("loss_type", [name for name, scale in SCALES.items() if scale is Scale.KNOWN])
def test_known_scales_read_no_token_count(loss_type: str) -> None:
    totals = _totals()
    ignorant = replace(totals, num_tokens=10**6, mean_step_tokens=1e6)
    assert _summed_gradient(loss_type, totals).equal(_summed_gradient(loss_type, ignorant))


@pytest.mark.parametrize("loss_type", [name for name, scale in SCALES.items() if scale is Scale.AT_END])
def test_scales_at_the_end_are_one_common_factor(loss_type: str) -> None:
    totals = _totals()
    exact = _summed_gradient(loss_type, totals)
    unnormalised = _summed_gradient(loss_type, replace(totals, num_tokens=1, mean_step_tokens=1.0))
    torch.testing.assert_close(unnormalised / totals.num_tokens, exact, rtol=1e-14, atol=0)
    assert not unnormalised.equal(exact)
