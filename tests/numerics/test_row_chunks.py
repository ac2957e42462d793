"""Prompt passes in chunks of rows: the textbook's update, products no larger than asked for, and the bits of whole
passes where nothing is cut."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.cases import (
    FAMILIES,
    MIXES,
    MODES,
    config_of,
    groups_of,
    product_update,
    ragged_lengths,
    relative_error,
    tiny_rig,
)
from numerics.test_update_parity import GRAD_BOUND, LOSS, RATE, WEIGHT_BOUND, judged
from rollplex.models.build import cast_parameters
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.models.prefix import PrefixPack, backward_prefix, compute_prefix
from rollplex.train.reference import Reference

BEYOND = 10_000  # tokens: more than any pack here has


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_tokens", [1, 7, BEYOND])
@pytest.mark.parametrize("family", FAMILIES)
def test_update_in_chunks_equals_the_textbook_step(family, chunk_tokens, mode):
    """A token at a time, chunks that divide no prompt and lie across their borders, and one that takes all."""
    case = judged(family, "mixed", 2)
    policy = Policy(copy.deepcopy(case.rig.policy.model), chunk_tokens=chunk_tokens)
    reference = Reference(Policy(case.reference, chunk_tokens=chunk_tokens))
    config = config_of(train={"learning_rate": RATE}, algorithm=LOSS)
    with full_float64():
        grads = product_update(policy, case.scored, config, mode, reference=reference)[0]
    assert relative_error(grads, case.grads) < GRAD_BOUND
    after = dict(case.model_after.named_parameters())
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter, after[name], rtol=0, atol=WEIGHT_BOUND, msg=lambda m, n=name: f"{n}: {m}")


class Products(TorchDispatchMode):
    """Sizes of the operands of matrix products, and rows of the left ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()
        self.most_rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.sizes |= {*left.shape, *right.shape}
            self.most_rows = max(self.most_rows, left.shape[0])
        return func(*args, **(kwargs or {}))


def _passes(policy: Policy, specs: Any, mode: Any) -> tuple[PrefixPack, list[torch.Tensor]]:
    """A pack and, unless nothing is kept for one, its backward: (pack without its tensors then, their copies)."""
    pack = compute_prefix(policy, specs, mode)
    made = [t.clone() for t in (*pack.keys, *pack.values, pack.hidden_GC)]
    if mode != "none":
        pack.want_grads()
        assert pack.grad_hidden_GC is not None
        for number, grad in enumerate((*pack.grad_keys, *pack.grad_values, pack.grad_hidden_GC)):
            grad.copy_(made[number])
        backward_prefix(pack)
    return pack, made


@pytest.mark.parametrize("mode", [*MODES, "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_takes_more_rows_than_a_chunk(family, mode):
    """Forward and backward. Text alone: the vision tower is not cut."""
    made = tiny_rig(family, torch.float32)
    specs = made.specs(("text", "short_text", "text"))
    total = sum(spec.num_tokens for spec in specs)
    for chunk_tokens in (None, BEYOND, 8):
        with Products() as products:
            _passes(Policy(made.policy.model, chunk_tokens=chunk_tokens), specs, mode)
        assert (total in products.sizes) == (chunk_tokens != 8)
        if mode == "none":
            assert products.most_rows == (total if chunk_tokens != 8 else 8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_that_takes_all_has_the_bits_of_a_whole_pass(family, mode):
    made = tiny_rig(family, torch.float32)
    found = []
    for chunk_tokens in (None, BEYOND):
        policy = Policy(copy.deepcopy(made.policy.model), chunk_tokens=chunk_tokens)
        _, tensors = _passes(policy, made.specs(MIXES["mixed"]), mode)
        found.append([*tensors, *(p.grad for p in policy.model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 2 * len(made.policy.adapter.layers) + 1
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_three_ways_to_hold_activations_have_the_same_bits(family):
    """What is run again for the backward is cut as it was the first time."""
    made = tiny_rig(family, torch.float32)
    found = []
    for mode in MODES:
        policy = Policy(copy.deepcopy(made.policy.model), chunk_tokens=13)
        _passes(policy, made.specs(MIXES["mixed"]), mode)
        found.append([p.grad for p in policy.model.parameters() if p.grad is not None])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_dtypes_lose_no_more_than_in_whole_passes(family, dtype):
    """Truth: the same update in fp64 on the same (rounded) weights. Sixteen chunks or so."""
    made = tiny_rig(family, dtype, num_layers=2)
    names = MIXES["mixed"]
    specs = made.specs(names)
    scored = groups_of(specs, names, [ragged_lengths(4, seed) for seed in range(len(names))], made.plain_vocab)
    exact = copy.deepcopy(made.policy.model)
    cast_parameters(exact, torch.float64)
    with full_float64():
        truth = product_update(Policy(exact), scored, config_of())[0]
    chunk_tokens = sum(spec.num_tokens for spec in specs) // 16
    whole, chunked = (
        relative_error(
            product_update(Policy(copy.deepcopy(made.policy.model), chunk_tokens=chunk), scored, config_of())[0], truth
        )
        for chunk in (None, chunk_tokens)
    )
    assert 0 < chunked < 1.25 * whole  # autograd adds the gradients of a weight from the chunks in its own dtype
