"""Several optimizer steps per rollout against the textbook, stale prefixes, and any partition into micro-batches."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.cases import (
    FAMILIES,
    MODES,
    RecordingOptimizer,
    config_of,
    groups_of,
    moved,
    oracle_group,
    product_update,
    ragged_lengths,
    relative_error,
    tiny_rig,
)
from numerics.oracle import AdamState, Settings, rollout_update
from rollplex.errors import StateError
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.models.prefix import backward_prefix, compute_prefix
from rollplex.train.reference import Reference
from rollplex.train.response import GroupTokens, response_logps

NAMES = ("image", "two_images", "video", "text")
RATE = 3e-3
# The chain of steps amplifies rounding: Adam divides by the gradient's own size.
GRAD_BOUND, WEIGHT_BOUND = 1e-12, 1e-11
MULTI_STEP = {
    "two_minibatches": {"steps_per_generation": 2, "num_iterations": 1},
    "two_epochs": {"steps_per_generation": 1, "num_iterations": 2},
    "two_by_two": {"steps_per_generation": 2, "num_iterations": 2},
}


def _grads(policy: Policy) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("steps", MULTI_STEP)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_steps_per_rollout_equal_the_textbook(family, steps, share_prefix):
    """Old log-probs from before the first step; ratios move and clip; later prefixes are computed again."""
    rig = tiny_rig(family, num_layers=2)
    scored = groups_of(rig.specs(NAMES), NAMES, [ragged_lengths(3, i) for i in range(4)], rig.plain_vocab)
    oracle = [oracle_group(s, family) for s in scored]
    algorithm = MULTI_STEP[steps] | {"beta": 0.1}
    cut = algorithm["steps_per_generation"]
    minibatches = [oracle[len(oracle) * i // cut : len(oracle) * (i + 1) // cut] for i in range(cut)]
    model, policy = copy.deepcopy(rig.policy.model), Policy(copy.deepcopy(rig.policy.model))
    reference = moved(model)
    numbers = {"learning_rate": RATE, "weight_decay": 0.1, "max_grad_norm": 0.5}
    with full_float64():
        wanted = rollout_update(
            model,
            minibatches,
            Settings(beta=0.1, **numbers),
            AdamState(),
            epochs=algorithm["num_iterations"],
            reference=reference,
        )
        config = config_of(train=numbers | {"share_prefix": share_prefix}, algorithm=algorithm)
        found = product_update(policy, scored, config, reference=Reference(Policy(reference)))
    assert len(found) == len(wanted) == cut * algorithm["num_iterations"]
    assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < GRAD_BOUND
    for (name, got), expected in zip(policy.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=WEIGHT_BOUND, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("share_prefix", [True, False])
def test_groups_that_teach_nothing_still_move_adams_moments(share_prefix):
    """Rollout 1 teaches on an image; in rollout 2 only the text group has an advantage, the image group's is 0.

    A budget of one token keeps the two apart, so that nothing passes back through the image.
    """
    rig = tiny_rig("qwen2_5_vl", num_layers=2)
    names = ("image", "text")
    first = groups_of(rig.specs(names), names, [[3, 2], [4, 1]], rig.plain_vocab)
    flat = groups_of(rig.specs(names), names, [[1, 1], [4, 1]], rig.plain_vocab)
    flat[0] = type(flat[0])(flat[0].group, (1.0, 1.0), {}, (0.0, 0.0))
    model, policy = copy.deepcopy(rig.policy.model), Policy(copy.deepcopy(rig.policy.model))
    numbers = {"learning_rate": RATE, "weight_decay": 0.1}
    config = config_of(train=numbers | {"micro_batch_tokens": 1, "share_prefix": share_prefix})
    state, optimizer = AdamState(), RecordingOptimizer(policy.model, config.train, 2)
    with full_float64():
        for scored in (first, flat):
            oracle = [oracle_group(s, "qwen2_5_vl") for s in scored]
            rollout_update(model, [oracle], Settings(**numbers), state)
            product_update(policy, scored, config, optimizer=optimizer)
    for (name, got), expected in zip(policy.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=WEIGHT_BOUND, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stale_prefix_is_refused_everywhere(family, mode):
    rig = tiny_rig(family)
    policy = rig.policy
    pack = compute_prefix(policy, rig.specs(["image"]), mode)
    group = [GroupTokens(0, ((1, 2, 3),))]
    response_logps(pack, group, 1.0, with_grad=True).logps.sum().backward()
    policy.bump()
    with pytest.raises(StateError, match=r"rows \[0\].*v0.*v1"):
        response_logps(pack, group, 1.0, with_grad=False)
    with pytest.raises(StateError, match="v0"):
        backward_prefix(pack)


def test_a_prefix_is_consumed_once_and_needs_gradients():
    rig = tiny_rig("qwen2_5_vl")
    pack = compute_prefix(rig.policy, rig.specs(["text"]), "graph")
    with pytest.raises(StateError, match="no boundary gradients"):
        backward_prefix(pack)
    group = [GroupTokens(0, ((1, 2, 3),))]
    response_logps(pack, group, 1.0, with_grad=True).logps.sum().backward()
    backward_prefix(pack)
    with pytest.raises(StateError, match="consumed"):
        backward_prefix(pack)
    with pytest.raises(StateError, match="consumed"):
        response_logps(pack, group, 1.0, with_grad=False)


@cache
def _partition_case(family: str):
    rig = tiny_rig(family, num_layers=2)
    specs = rig.specs(["image", "two_images", "short_text", "image"])
    rng = np.random.default_rng(3)
    responses = [
        (number, tuple(int(t) for t in rng.integers(0, rig.plain_vocab, size=size)), float(rng.normal()))
        for number, sizes in enumerate(([1, 4, 9, 2], [3, 1], [1, 1, 1], [6, 4, 9, 1]))
        for size in sizes
    ]
    return rig, specs, responses


def _partition_grads(family: str, parts: list[list[int]], mode: str) -> dict[str, torch.Tensor]:
    rig, specs, responses = _partition_case(family)
    policy = Policy(copy.deepcopy(rig.policy.model))
    pack = compute_prefix(policy, specs, mode)
    for part in parts:
        by_prompt: dict[int, list[int]] = {}
        for item in part:
            by_prompt.setdefault(responses[item][0], []).append(item)
        groups = [GroupTokens(n, tuple(responses[i][1] for i in items)) for n, items in by_prompt.items()]
        order = [i for items in by_prompt.values() for i in items]
        weights = torch.cat([torch.full((len(responses[i][1]),), responses[i][2], dtype=torch.float64) for i in order])
        (response_logps(pack, groups, 1.0, with_grad=True).logps * weights).sum().backward()
    backward_prefix(pack)
    return _grads(policy)


@cache
def _whole(family: str) -> dict[str, torch.Tensor]:
    return _partition_grads(family, [list(range(13))], "graph")


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, derandomize=True)
@given(
    labels=st.lists(st.integers(0, 4), min_size=13, max_size=13),
    order=st.permutations(range(13)),
    mode=st.sampled_from(MODES),
)
def test_any_partition_into_micro_batches_gives_the_same_gradient(family, labels, order, mode):
    """Micro-batches may hold any responses of any prompts of a pack, in any order."""
    with full_float64():
        parts = [[i for i in order if labels[i] == label] for label in sorted(set(labels))]
        assert relative_error(_partition_grads(family, parts, mode), _whole(family)) < 1e-13


@pytest.mark.parametrize("budget", [1, 7, 40, 90])
def test_token_budget_never_changes_the_update(budget):
    rig = tiny_rig("qwen3_vl", num_layers=2)
    names = ("image", "text", "video_image", "image")
    scored = groups_of(rig.specs(names), names, [ragged_lengths(3, i) for i in range(4)], rig.plain_vocab)
    grads = []
    with full_float64():
        for tokens in (8192, budget):
            policy = Policy(copy.deepcopy(rig.policy.model))
            grads.append(product_update(policy, scored, config_of(train={"micro_batch_tokens": tokens}))[0])
    assert relative_error(grads[1], grads[0]) < 1e-13
