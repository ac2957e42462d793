"""Negative controls: the faults that others have shipped, done on purpose, must each show as a large error.

Each fault is a perturbed call made here (a zeroed boundary gradient, another PromptSpec); the product has no switch for
it. Measured on these models: h gradient omitted 0.6-0.7, one layer's boundary omitted 0.3-0.4, boundary in bfloat16
6e-4, constant prefix 0.8-0.9, positions from P 0.45-0.5.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from numerics.cases import FAMILIES, MODES, config_of, groups_of, oracle_group, product_update, relative_error, tiny_rig
from numerics.oracle import AdamState, Settings, rollout_update
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.models.prefix import PrefixPack, backward_prefix, compute_prefix
from rollplex.train.response import GroupTokens, response_logps

NAMES = ("image", "two_images")


def _case(family):
    rig = tiny_rig(family)
    scored = groups_of(rig.specs(NAMES), NAMES, [[1, 4, 3], [2, 5, 1]], rig.plain_vocab)
    with full_float64():
        oracle = [oracle_group(s, family) for s in scored]
        wanted = rollout_update(copy.deepcopy(rig.policy.model), [oracle], Settings(), AdamState())[0]
    return rig, scored, wanted


def _split_grads(policy, scored, disturb=lambda pack: None, *, prefix_backward=True):
    """The two-stage backward by hand, on policy: each token's loss is -ratio * A / tokens with ratio 1."""
    pack = compute_prefix(policy, [s.group.spec for s in scored], "graph")
    groups = [GroupTokens(n, tuple(r.token_ids for r in s.group.responses)) for n, s in enumerate(scored)]
    weights = [
        -torch.full((len(r.token_ids),), a, dtype=torch.float64)
        for s in scored
        for r, a in zip(s.group.responses, s.advantages, strict=True)
    ]
    loss = (response_logps(pack, groups, 1.0, with_grad=True).logps * torch.cat(weights)).sum()
    (loss / sum(len(w) for w in weights)).backward()
    disturb(pack)
    if prefix_backward:
        backward_prefix(pack)
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def _drop_h(pack: PrefixPack) -> None:
    assert pack.grad_hidden_GC is not None
    pack.grad_hidden_GC.zero_()


def _drop_one_layer(pack: PrefixPack) -> None:
    pack.grad_keys[0].zero_()
    pack.grad_values[0].zero_()


def _bf16_boundary(pack: PrefixPack) -> None:
    for gradient in (*pack.grad_keys, *pack.grad_values):
        gradient.copy_(gradient.bfloat16())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hand_written_split_is_exact_when_undisturbed(family):
    rig, scored, wanted = _case(family)
    with full_float64():
        assert relative_error(_split_grads(rig.policy, scored), wanted) < 1e-12


@pytest.mark.parametrize(
    ("fault", "least"), [(_drop_h, 0.1), (_drop_one_layer, 0.1), (_bf16_boundary, 1e-5)], ids=["h", "layer", "bf16"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_boundary_gradients_show(family, fault, least):
    rig, scored, wanted = _case(family)
    with full_float64():
        assert relative_error(_split_grads(rig.policy, scored, fault), wanted) > least


@pytest.mark.parametrize("family", FAMILIES)
def test_a_constant_prefix_shows(family):
    """Stop-gradient: the responses are trained on a prefix that is taken as given."""
    rig, scored, wanted = _case(family)
    with full_float64():
        assert relative_error(_split_grads(rig.policy, scored, prefix_backward=False), wanted) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_that_start_at_the_prompt_length_show(family):
    rig, scored, wanted = _case(family)
    shifted = []
    for item in scored:
        spec = item.group.spec
        assert spec.next_position < spec.num_tokens  # else the fault would be none
        wrong = replace(spec, next_position=spec.num_tokens)
        shifted.append(replace(item, group=replace(item.group, spec=wrong)))
    with full_float64():
        grads = product_update(Policy(rig.policy.model), shifted, config_of())[0]
    assert relative_error(grads, wanted) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_media_in_the_wrong_order_show(family):
    rig, scored, wanted = _case(family)
    spec = scored[1].group.spec
    sizes = [int(n) for n in spec.image_grid_thw.prod(-1)]
    assert sizes[0] != sizes[1]
    swapped = replace(spec, pixel_values=spec.pixel_values.roll(sizes[0], 0))
    scored[1] = replace(scored[1], group=replace(scored[1].group, spec=swapped))
    with full_float64():
        assert relative_error(product_update(rig.policy, scored, config_of())[0], wanted) > 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_a_stale_prefix_would_be_wrong(mode):
    """What StateError prevents: the prefix of older weights, forced into a later step, gives another gradient."""
    rig, scored, _ = _case("qwen2_5_vl")
    policy = rig.policy
    with full_float64():
        pack = compute_prefix(policy, [s.group.spec for s in scored], mode)
        product_update(policy, scored, config_of(train={"learning_rate": 1e-2}))
        oracle = [oracle_group(s, "qwen2_5_vl") for s in scored]
        wanted = rollout_update(copy.deepcopy(policy.model), [oracle], Settings(), AdamState())[0]
        policy.model.zero_grad()
        groups = [GroupTokens(n, tuple(r.token_ids for r in s.group.responses)) for n, s in enumerate(scored)]
        weights = torch.cat(
            [
                -torch.full((len(r.token_ids),), a, dtype=torch.float64)
                for s in scored
                for r, a in zip(s.group.responses, s.advantages, strict=True)
            ]
        )
        pack.weight_version = policy.weight_version  # lie about it
        loss = (response_logps(pack, groups, 1.0, with_grad=True).logps * weights).sum() / len(weights)
        loss.backward()
        response_part = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
        fresh = compute_prefix(policy, [s.group.spec for s in scored], "graph")
        fresh.grad_keys, fresh.grad_values, fresh.grad_hidden_GC = pack.grad_keys, pack.grad_values, pack.grad_hidden_GC
        backward_prefix(fresh)
        stale = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    assert response_part.keys() <= stale.keys()
    assert relative_error(stale, wanted) > 1e-2
