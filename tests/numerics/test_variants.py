"""The update under LoRA, a frozen tower, another temperature, and in 32 and 16 bits; odd responses."""

from __future__ import annotations

import copy
from dataclasses import replace
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
    rig,
    tiny_rig,
)
from numerics.oracle import AdamState, Settings, all_logps, rollout_update
from rollplex.config import LoraConfig
from rollplex.models.build import cast_parameters
from rollplex.models.load import LoadedModel
from rollplex.models.lora import add_lora
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.models.prefix import compute_prefix
from rollplex.train.full_sequence import full_sequence_logps
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.response import GroupTokens, response_logps
from rollplex.train.update import Updater
from rollplex.types import ScoredGroup

BOUND = 1e-12
MIXED = MIXES["mixed"]


def _scored(made: Rig, names: tuple[str, ...] = MIXED, size: int = 3) -> list[ScoredGroup]:
    lengths = [ragged_lengths(size, seed) for seed in range(len(names))]
    return groups_of(made.specs(names), names, lengths, made.plain_vocab)


def _wanted(model: Any, scored: list[ScoredGroup], family: str) -> Any:
    return rollout_update(copy.deepcopy(model), [[oracle_group(s, family) for s in scored]], Settings(), AdamState())[0]


def _lora_rig(family: str, targets: tuple[str, ...], *, freeze_vision: bool = False) -> Rig:
    """Adapters with B away from its initial 0, so that A has a gradient too."""
    base = tiny_rig(family, num_layers=2).loaded
    if freeze_vision:
        base.model.model.visual.requires_grad_(False)
    config = LoraConfig(r=4, target_modules=targets)
    wrapped = add_lora(base.model, config, seed=0, base_path=None, freeze_vision=freeze_vision)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    cast_parameters(wrapped.get_base_model(), torch.float64)
    return rig(LoadedModel(wrapped.eval(), base.processor))


LORA_TARGETS = {
    "language": LoraConfig().target_modules,
    "values_only": ("v_proj",),
    "last_part": ("down_proj",),
    "with_vision": ("q_proj", "visual.qkv"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("targets", LORA_TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora(family, targets, mode):
    """First layers whose inputs depend on no trainable weight still pass gradient back to the prefix."""
    made = _lora_rig(family, LORA_TARGETS[targets])
    scored = _scored(made)
    with full_float64():
        wanted = _wanted(made.policy.model, scored, family)
        found = product_update(made.policy, scored, config_of(), mode)[0]
    assert all("lora" in name for name in found)
    assert relative_error(found, wanted) < BOUND


@pytest.mark.parametrize("targets", LORA_TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_in_chunks_of_rows(family, targets):
    made = _lora_rig(family, LORA_TARGETS[targets])
    scored = _scored(made)
    policy = Policy(made.policy.model, chunk_tokens=11)
    with full_float64():
        wanted = _wanted(policy.model, scored, family)
        found = product_update(policy, scored, config_of(), "graph")[0]
    assert relative_error(found, wanted) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_with_the_base_model_as_reference(family):
    made = _lora_rig(family, LORA_TARGETS["language"], freeze_vision=True)
    scored = _scored(made)
    oracle = [oracle_group(s, family) for s in scored]
    model, base = copy.deepcopy(made.policy.model), copy.deepcopy(made.policy.model)
    reference = Reference(made.policy)
    assert reference.shares_weights
    with full_float64(), base.disable_adapter():
        wanted = rollout_update(model, [oracle], Settings(beta=0.5), AdamState(), reference=base)[0]
    with full_float64():
        found = product_update(made.policy, scored, config_of(algorithm={"beta": 0.5}), reference=reference)[0]
    assert relative_error(found, wanted) < BOUND


@pytest.mark.parametrize(("share_prefix", "mode"), [*((True, mode) for mode in MODES), (False, "graph")])
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_vision(family, share_prefix, mode):
    """No gradient, no optimizer state, each prompt's media encoded once and then read from the cache."""
    made = tiny_rig(family, num_layers=2)
    made.loaded.model.model.visual.requires_grad_(False)
    policy = Policy(made.loaded.model)
    scored = _scored(made)
    config = config_of(train={"share_prefix": share_prefix, "micro_batch_tokens": 100})
    with full_float64():
        wanted = _wanted(policy.model, scored, family)
        found = product_update(policy, scored, config, mode)[0]
        assert policy.encode_calls == sum(bool(EXAMPLES[name].images or EXAMPLES[name].videos) for name in MIXED)
        product_update(policy, scored, config, mode)
    assert policy.encode_calls == 4
    assert not any(".visual." in name for name in found)
    assert relative_error(found, wanted) < BOUND


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_g21_temperature_in_old_reference_and_actor_passes(family, temperature):
    """Two epochs with a KL: each of the three log-probs is taken at the sampling temperature."""
    made = tiny_rig(family, num_layers=2)
    scored = _scored(made, ("image", "text"))
    oracle = [oracle_group(s, family) for s in scored]
    reference = moved(made.policy.model)
    config = config_of(
        rollout={"temperature": temperature},
        algorithm={"beta": 0.2, "num_iterations": 2},
        train={"learning_rate": 1e-3},
    )
    numbers = Settings(temperature=temperature, beta=0.2, learning_rate=1e-3)
    with full_float64():
        model = copy.deepcopy(made.policy.model)
        wanted = rollout_update(model, [oracle], numbers, AdamState(), epochs=2, reference=reference)
        found = product_update(made.policy, scored, config, reference=Reference(Policy(reference)))
    assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < BOUND


# dtype: (gradient against the full-sequence path, log-probs against it). fp32 is the product's contract. bf16: twice
# the largest measured here (1.5e-2 and 2.4e-2 at two layers, 3.0e-2 and 6.2e-2 at six).
NARROW = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (6e-2, 1.5e-1)}


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_dtypes_are_as_near_to_the_truth_as_the_ordinary_path(family, dtype, layers):
    """Truth: the oracle in fp64 on the same (rounded) weights. Sharing may not add error of its own."""
    made = tiny_rig(family, dtype, num_layers=layers)
    scored = _scored(made, size=4)
    groups = [s.group for s in scored]
    exact = copy.deepcopy(made.policy.model)
    cast_parameters(exact, torch.float64)
    with full_float64():
        truth = _wanted(exact, scored, family)
        true_logps = all_logps(exact, [oracle_group(s, family) for s in scored], 1.0)
    grads, logps = {}, {}
    for share in (True, False):
        config = config_of(train={"share_prefix": share})
        policy = Policy(copy.deepcopy(made.policy.model))
        book = PrefixBook(policy, 8192) if share else None
        if book is not None:
            book.compute({g.rollout_id: g.spec for g in groups}, "none")
        updater = Updater(policy, PolicyOptimizer(policy.model, config.train, 1), None, config)
        got = updater.old_logps(groups, book)
        logps[share] = [part.double() for g in groups for part in got[g.rollout_id]]
        grads[share] = product_update(Policy(copy.deepcopy(made.policy.model)), scored, config)[0]
    grad_bound, logp_bound = NARROW[dtype]
    assert relative_error(grads[True], grads[False]) < grad_bound
    assert _largest(logps[True], logps[False]) < logp_bound
    assert relative_error(grads[True], truth) < 1.25 * relative_error(grads[False], truth)
    flat = [part for parts in true_logps for part in parts]
    assert _largest(logps[True], flat) < 2 * _largest(logps[False], flat)


def _largest(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_bf16_boundary_gradients_accumulate_in_fp32():
    """64 micro-batches lose no more than one does; an accumulator in bf16 (control) would."""
    made = tiny_rig("qwen2_5_vl", torch.bfloat16, num_layers=2)
    exact = copy.deepcopy(made.policy.model)
    cast_parameters(exact, torch.float64)
    with full_float64():
        truth = _boundary(Policy(exact), made, size=64)
    once, split, control = (_boundary(made.policy, made, size=n, narrow=narrow) for n, narrow in NARROWINGS)
    assert relative_error(split, truth) < 1.1 * relative_error(once, truth)
    assert relative_error(control, truth) > 1.2 * relative_error(split, truth)


NARROWINGS = ((64, False), (1, False), (1, True))


def _boundary(policy: Policy, made: Rig, *, size: int, narrow: bool = False) -> dict[str, torch.Tensor]:
    """Accumulated boundary gradients of 64 responses in micro-batches of `size`."""
    pack = compute_prefix(policy, made.specs(["image"]), "graph")
    responses = [tuple(range(1 + i, 6 + i)) for i in range(64)]
    for start in range(0, 64, size):
        part = GroupTokens(0, tuple(responses[start : start + size]))
        response_logps(pack, [part], 1.0, with_grad=True).logps.sum().backward()
        for gradient in (*pack.grad_keys, *pack.grad_values):
            if narrow:
                gradient.copy_(gradient.bfloat16())
    return {str(i): g.clone() for i, g in enumerate((*pack.grad_keys, *pack.grad_values))}


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_g01_a_vision_id_inside_a_response_is_an_ordinary_token(family, share_prefix):
    """A replayed rollout may hold one: it is scored and trained by its embedding, and takes no visual feature.

    Judged by a model whose placeholder id is another, unused one, with the same embedding in its place.
    """
    made = tiny_rig(family, num_layers=2)
    ids = made.policy.adapter.vision_token_ids
    scored = _scored(made, ("image", "text"))
    with_ids, with_plain = [], []
    plain = {vision: vision_twin for vision, vision_twin in zip(ids, range(len(ids)), strict=True)}
    with torch.no_grad():
        for table in (made.policy.adapter.embed.weight, made.policy.adapter.lm_head.weight):
            for vision, twin in plain.items():
                table[vision] = table[twin]
    for item in scored:
        tokens = [(5, *ids, 7, *ids), (*ids, 6), (ids[0],)]
        for target, mapping in ((with_ids, {}), (with_plain, plain)):
            responses = tuple(
                replace(r, token_ids=tuple(mapping.get(t, t) for t in row), logps=(0.0,) * len(row))
                for r, row in zip(item.group.responses, tokens, strict=True)
            )
            target.append(replace(item, group=replace(item.group, responses=responses)))
    config = config_of(train={"share_prefix": share_prefix})
    with full_float64():
        wanted = _wanted(made.policy.model, with_plain, family)
        found = product_update(made.policy, with_ids, config)[0]
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):  # rows of an id and its twin are one
        for vision, twin in plain.items():
            for grads in (found, wanted):
                grads[name][twin] += grads[name][vision]
                grads[name][vision] = 0.0
    assert relative_error(found, wanted) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_g10_padding_and_batch_partners_are_neutral(family):
    """Unequal pictures and responses in one padded batch: each row's log-probs are those of the row alone."""
    made = tiny_rig(family, num_layers=2)
    specs = made.specs(("two_images", "text", "odd_image", "video"))
    rows = [(spec, tuple(range(1, 2 + 3 * number))) for number, spec in enumerate(specs)]
    for spec, _ in rows:
        assert spec.positions.shape == (3, spec.num_tokens)
    with full_float64():
        together = full_sequence_logps(made.policy, rows, 1.0, with_grad=False).logps
        alone = [full_sequence_logps(made.policy, [row], 1.0, with_grad=False).logps for row in rows]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scoring", [4096, 20])
@pytest.mark.parametrize("training", [4096, 1])
def test_g20_the_on_policy_ratio_is_one(scoring, training):
    """Scoring and training in micro-batches of different size: ratio 1 and KL 0 to fp32 rounding."""
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    scored = _scored(made)
    groups = [s.group for s in scored]
    policy = made.policy
    config = config_of(algorithm={"beta": 0.1}, train={"micro_batch_tokens": training, "learning_rate": 0.0})
    reference = Reference(policy)
    optimizer = PolicyOptimizer(policy.model, config.train, 1)
    scorer = Updater(policy, optimizer, reference, config_of(train={"micro_batch_tokens": scoring}))
    book = PrefixBook(policy, scoring)
    book.compute({g.rollout_id: g.spec for g in groups}, "graph")
    updater = Updater(policy, optimizer, reference, config)
    frozen = replace(updater.frozen_logps(groups, None), old=scorer.old_logps(groups, book))
    metrics = updater.update(scored, None, frozen)
    assert metrics["ratio/min"] == pytest.approx(1.0, abs=2e-5)
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=2e-5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-8)
    on_policy = updater.update(scored, None, updater.frozen_logps(groups, None))
    assert on_policy["ratio/min"] == on_policy["ratio/max"] == 1.0
