"""The test matrix: the product's update against the textbook step, both families, every kind of prompt, fp64.

Both families x {image, 2 images of different sizes, video, text only, mixed batch} x three activation modes x G in
{1, 2, 8} x response lengths that include 1 token. The KL to a moved reference is part of the loss, so that the
reference path is judged too and G = 1 (advantage 0) still has a gradient.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from numerics.cases import (
    EXAMPLES,
    FAMILIES,
    MIXES,
    MODES,
    Rig,
    config_of,
    groups_of,
    moved,
    oracle_group,
    product_update,
    ragged_lengths,
    relative_error,
    tiny_rig,
)
from numerics.oracle import AdamState, OracleGroup, Settings, all_logps, rollout_update
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.update import Updater
from rollplex.types import ScoredGroup

GRAD_BOUND, LOGP_BOUND = 1e-12, 1e-10
# One Adam step divides by the gradient's own size, so tiny gradients amplify their rounding.
WEIGHT_BOUND = 1e-11
RATE = 1e-3
LOSS = {"beta": 0.1}


@dataclass(frozen=True)
class Judged:
    """A case and what the oracle says about it."""

    rig: Rig
    scored: list[ScoredGroup]
    oracle: list[OracleGroup]
    logps: list[list[torch.Tensor]]
    grads: dict[str, torch.Tensor]
    model_after: Any
    reference: Any


@cache
def judged(family: str, mix: str, num_generations: int) -> Judged:
    """The oracle's step, taken once for all activation modes."""
    rig = tiny_rig(family, num_layers=2)
    names = MIXES[mix]
    lengths = [ragged_lengths(num_generations, seed) for seed in range(len(names))]
    if len(names) > 1:
        lengths[-1] = [1] * num_generations  # a whole group of 1-token responses
    scored = groups_of(rig.specs(names), names, lengths, rig.plain_vocab)
    oracle = [oracle_group(s, family) for s in scored]
    model, reference = copy.deepcopy(rig.policy.model), moved(rig.policy.model)
    with full_float64():
        logps = all_logps(model, oracle, 1.0)
        settings = Settings(learning_rate=RATE, **LOSS)
        grads = rollout_update(model, [oracle], settings, AdamState(), reference=reference)[0]
    return Judged(rig, scored, oracle, logps, grads, model, reference)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_generations", [1, 2, 8])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_update_equals_the_textbook_step(family, mix, num_generations, mode):
    case = judged(family, mix, num_generations)
    policy = Policy(copy.deepcopy(case.rig.policy.model))
    config = config_of(train={"learning_rate": RATE}, algorithm=LOSS)
    with full_float64():
        grads = product_update(policy, case.scored, config, mode, reference=Reference(Policy(case.reference)))[0]
    assert relative_error(grads, case.grads) < GRAD_BOUND
    after = dict(case.model_after.named_parameters())
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter, after[name], rtol=0, atol=WEIGHT_BOUND, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_the_textbook_ones(family, mix, share_prefix):
    case = judged(family, mix, 8)
    policy = Policy(copy.deepcopy(case.rig.policy.model))
    config = config_of(train={"share_prefix": share_prefix})
    updater = Updater(policy, PolicyOptimizer(policy.model, config.train, 1), None, config)
    groups = [s.group for s in case.scored]
    with full_float64():
        book = None
        if share_prefix:
            book = PrefixBook(policy, config.train.micro_batch_tokens)
            book.compute({g.rollout_id: g.spec for g in groups}, "graph")
        got = updater.old_logps(groups, book)
    for number, group in enumerate(groups):
        for found, wanted in zip(got[group.rollout_id], case.logps[number], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=LOGP_BOUND)


@pytest.mark.parametrize("mix", ["mixed", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_sequence_path_equals_the_textbook_step(family, mix):
    case = judged(family, mix, 2)
    policy = Policy(copy.deepcopy(case.rig.policy.model))
    config = config_of(train={"learning_rate": RATE, "share_prefix": False}, algorithm=LOSS)
    with full_float64():
        grads = product_update(policy, case.scored, config, reference=Reference(Policy(case.reference)))[0]
    assert relative_error(grads, case.grads) < GRAD_BOUND


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_one_token_responses_only(family, mode):
    """No response token is ever fed: the whole gradient passes through the prompts' last hidden states."""
    rig = tiny_rig(family, num_layers=2)
    names = ("image", "video", "text")
    scored = groups_of(rig.specs(names), names, [[1] * 4] * 3, rig.plain_vocab)
    model, policy = copy.deepcopy(rig.policy.model), Policy(copy.deepcopy(rig.policy.model))
    with full_float64():
        wanted = rollout_update(model, [[oracle_group(s, family) for s in scored]], Settings(), AdamState())[0]
        grads = product_update(policy, scored, config_of(), mode)[0]
    assert relative_error(grads, wanted) < GRAD_BOUND


SHAPES = {
    "gqa_4_2": {"num_heads": 4, "num_kv_heads": 2},
    "gqa_8_1": {"num_heads": 8, "num_kv_heads": 1},
    "mha": {"num_heads": 4, "num_kv_heads": 4},
    "tied_head": {"tie_word_embeddings": True},
    "one_layer": {"num_layers": 1},
    "deep": {"num_layers": 6, "vision_depth": 6},
    "three_heads": {"hidden_size": 96, "num_heads": 3, "num_kv_heads": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_model_shapes_and_every_kind_of_prompt(family, shape):
    """One batch of all example prompts: images after text, mixed media in any order, odd sizes, equal prompts."""
    rig = tiny_rig(family, **{"num_layers": 2, **SHAPES[shape]})
    names = (*EXAMPLES, "image", "image")  # neighbours of one length share attention calls
    lengths = [ragged_lengths(2, seed) for seed in range(len(names))]
    scored = groups_of(rig.specs(names), names, lengths, rig.plain_vocab)
    model, policy = copy.deepcopy(rig.policy.model), Policy(copy.deepcopy(rig.policy.model))
    with full_float64():
        wanted = rollout_update(model, [[oracle_group(s, family) for s in scored]], Settings(), AdamState())[0]
        grads = product_update(policy, scored, config_of(), "graph")[0]
    assert relative_error(grads, wanted) < GRAD_BOUND
