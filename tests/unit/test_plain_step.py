"""A decode step as one call: the bits of the functions that it is made of, and few calls from Python."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.cases import FAMILIES, tiny_rig
from rollplex.models.precision import full_float64
from rollplex.models.prefix import compute_prefix
from rollplex.rollout.decode import DecodeModel
from rollplex.rollout.decode_buckets import table, widest
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.grown_rows import GrownRows
from rollplex.rollout.local_engine import LocalEngine
from rollplex.rollout.plain_step import Fed, LowRank, PlainLayer, PlainModel, Product, Sizes, plain_step
from rollplex.rollout.sampling import Filters, choose
from rollplex.rollout.two_level import Grid, LayerCaches, Seen, Sight, bias_where
from rollplex.rollout.uninterrupted import uninterrupted

CPU = torch.device("cpu")
WIDTH, MLP_WIDTH, HEAD_DIM, VOCAB, LAYERS, POSITIONS = 24, 20, 8, 40, 2, 32
FEW_CALLS = 8  # from Python in an iteration: inputs, the step, the choice, and what was chosen


def _product(new: Any, width: int, size: int, *, biased: bool, rank: int) -> Product:
    adapter = LowRank(new(rank, width).T, new(size, rank).T, 0.5) if rank else None
    return Product(new(size, width).T, new(size) if biased else None, adapter)


def _model(new: Any, kv_heads: int, repeat: int, *, biased: bool, normed: bool, ranks: list[int]) -> PlainModel:
    """ranks: of the adapters of q, k and v, which are one product without any; 0: none."""
    heads = kv_heads * repeat
    parts = [heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM] if any(ranks) else [(heads + 2 * kv_heads) * 8]
    layers = [
        PlainLayer(
            input_norm_C=new(WIDTH),
            qkv=[
                _product(new, WIDTH, size, biased=biased, rank=rank) for size, rank in zip(parts, ranks, strict=False)
            ],
            q_norm_D=new(HEAD_DIM) if normed else None,
            k_norm_D=new(HEAD_DIM) if normed else None,
            output=_product(new, heads * HEAD_DIM, WIDTH, biased=biased, rank=ranks[0]),
            mlp_norm_C=new(WIDTH),
            gate_up=[_product(new, WIDTH, 2 * MLP_WIDTH, biased=False, rank=ranks[1])],
            down=_product(new, MLP_WIDTH, WIDTH, biased=False, rank=ranks[2]),
        )
        for _ in range(LAYERS)
    ]
    sizes = Sizes(heads, kv_heads, HEAD_DIM, MLP_WIDTH, 1e-6, True)
    return PlainModel(sizes, layers, new(VOCAB, WIDTH), new(WIDTH), new(VOCAB, WIDTH))


def _sight(owners: list[int], prompts: list[int], lengths: list[int], dtype: torch.dtype) -> Sight:
    """Of rows of these groups, behind prompts and suffixes of these lengths."""
    width = widest(owners)
    rows, cells = table(owners, len(prompts), width)
    places, used = torch.tensor(lengths), max(lengths) + 1
    behind = torch.arange(max(prompts)) >= torch.tensor(prompts)[:, None]
    is_even = min(lengths) == max(lengths)
    hidden = torch.arange(used) > places[:, None]
    return Sight(
        Seen(max(prompts), bias_where(behind, dtype) if min(prompts) < max(prompts) else None),
        Seen(used, None if is_even else bias_where(hidden, dtype)),
        Grid(len(prompts), width, torch.tensor(rows), torch.tensor(cells)),
        None if is_even else places,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_one_call_has_the_bits_of_its_functions(data: st.DataObject) -> None:
    """All counts of rows, uneven prompts, suffixes and groups, with and without biases and norms of heads."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    kv_heads, repeat = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]))
    groups = data.draw(st.integers(1, 3))
    owners = [*range(groups), *data.draw(st.lists(st.integers(0, groups - 1), max_size=9))]
    prompts = data.draw(st.lists(st.integers(1, 6), min_size=groups, max_size=groups))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=len(owners), max_size=len(owners)))
    draw_from = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw_from).to(dtype)

    biased, normed = data.draw(st.booleans()), data.draw(st.booleans())
    ranks = data.draw(st.sampled_from([[0, 0, 0], [2, 0, 3], [0, 1, 0]]))
    model = _model(new, kv_heads, repeat, biased=biased, normed=normed, ranks=ranks)
    sight = _sight(owners, prompts, lengths, dtype)
    tokens = torch.randint(VOCAB, (len(owners),), generator=draw_from)
    cos, sin = new(POSITIONS, 1, HEAD_DIM), new(POSITIONS, 1, HEAD_DIM)
    fed = Fed(tokens, torch.tensor(lengths) + 5, cos, sin, sight, data.draw(st.booleans()))
    caches = [
        LayerCaches(
            new(groups * kv_heads, HEAD_DIM, max(prompts)),
            new(groups * kv_heads, max(prompts), HEAD_DIM),
            new(len(owners) + 2, kv_heads, 7, HEAD_DIM),
            new(len(owners) + 2, kv_heads, 7, HEAD_DIM),
        )
        for _ in range(LAYERS)
    ]
    copies = [LayerCaches(*(tensor.clone() for tensor in layer)) for layer in caches]
    with torch.inference_mode():
        wanted = plain_step(model, caches, fed)
        found = uninterrupted(plain_step, CPU)(model, copies, fed)
    assert bool(wanted.isfinite().all())
    assert torch.equal(found, wanted)
    for ours, theirs in zip(copies, caches, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(
    "filters", [Filters(1.0, 0, 1.0, 0.0, 1.0, None), Filters(0.7, 5, 0.9, 0.1, 1.2, torch.tensor([3, 4]))]
)
def test_the_choice_has_the_bits_of_its_functions(filters: Filters, greedy: bool, dtype: torch.dtype) -> None:
    draw_from = torch.Generator().manual_seed(3)
    logits = torch.randn(6, VOCAB, generator=draw_from).to(dtype)
    uniforms = None if greedy else torch.rand(6, dtype=torch.float64, generator=draw_from)
    seen = [torch.zeros(6, VOCAB, dtype=torch.bool) for _ in range(2)]
    wanted = choose(logits, filters, seen[0], uniforms)
    found = uninterrupted(choose, CPU)(logits, filters, seen[1], uniforms)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert torch.equal(*seen)
    assert seen[0].sum() == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_sums_over_ranks_between_them_give_the_same_logits(family: str) -> None:
    """As tensor-parallel ranks decode; here the sums are over one rank."""
    made = tiny_rig(family, num_layers=2, num_heads=4, num_kv_heads=2)
    specs = made.specs(("image", "text"))
    owners = [0, 1, 1, 0, 1]
    with full_float64(), torch.inference_mode():
        pack = compute_prefix(made.policy, specs, "none")
        logits = []
        for is_alone in (True, False):
            model = DecodeModel(made.policy)
            assert model.plain.sizes.is_alone
            model.plain = model.plain._replace(sizes=model.plain.sizes._replace(is_alone=is_alone))
            rows = GrownRows(model, 8)
            for number in range(2):
                rows.join(number, pack, number)
            rows.add(owners, [specs[owner].next_position for owner in owners])
            logits.append([rows.forward([7 + step + row for row in range(len(owners))]) for step in range(3)])
    for alone, summed in zip(*logits, strict=True):
        torch.testing.assert_close(summed, alone, rtol=1e-12, atol=1e-13)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="no TorchScript there")
def test_an_iteration_makes_few_calls_from_python() -> None:
    """Each is a chance to wait for the interpreter while passes run beside (docs/lab-notes.md)."""
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=4)
    params = SamplingParams(num_generations=4, max_tokens=9, temperature=0.9, top_p=0.9, repetition_penalty=1.1)
    engine = LocalEngine(made.policy, params, max_rows=8)
    for number, spec in enumerate(made.specs(("image", "text"))):
        engine.admit(number, spec)
    engine.step()
    calls: list[str] = []

    def note(_frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and "torch" in f"{getattr(called, '__module__', '')} {type(called.__self__)}".lower():
            calls.append(called.__qualname__)

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert 0 < len(calls) <= FEW_CALLS, calls


def test_other_devices_call_the_functions_as_they_are() -> None:
    assert uninterrupted(choose, torch.device("cuda")) is choose
