"""A decode step as one call: the bits of the functions that it is made of, and few calls from Python."""

from __future__ import annotations

import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.cases import FAMILIES, tiny_rig
from rollplex.models.precision import full_float64
from rollplex.models.prefix import compute_prefix
from rollplex.rollout.decode import DecodeModel, RanksStep
from rollplex.rollout.decode_buckets import table, widest
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.grown_rows import GrownRows
from rollplex.rollout.local_engine import LocalEngine
from rollplex.rollout.sampling import Filters, choose
from rollplex.rollout.step_functions import DecoderWeights, Fed, LayerWeights, LowRank, Product, Sizes, step_logits
from rollplex.rollout.two_level import Grid, LayerCaches, Seen, Sight, Written, bias_where
from rollplex.rollout.uninterrupted import held, uninterrupted

CPU = torch.device("cpu")
WIDTH, MLP_WIDTH, HEAD_DIM, VOCAB, LAYERS, POSITIONS = 24, 20, 8, 40, 2, 32
WITHOUT_TORCHSCRIPT = pytest.mark.skipif(sys.version_info >= (3, 14), reason="no TorchScript there")
FEW_CALLS = 8  # from Python in an iteration: inputs, the step, the choice, and what was chosen


def _product(new: Any, width: int, size: int, *, biased: bool, rank: int) -> Product:
    """With an adapter of this rank, which is in 32 bits at least; 0: without."""
    wide = torch.promote_types(new(1).dtype, torch.float32)
    adapter = LowRank(new(rank, width).to(wide).T, new(size, rank).to(wide).T, 0.5) if rank else None
    return Product(new(size, width).T, new(size) if biased else None, adapter)


def _model(new: Any, kv_heads: int, repeat: int, *, biased: bool, normed: bool, ranks: list[int]) -> DecoderWeights:
    """ranks: of the adapters of q, k and v, which are one product without any; 0: none."""
    heads = kv_heads * repeat
    parts = [heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM] if any(ranks) else [(heads + 2 * kv_heads) * 8]
    halves = [MLP_WIDTH, MLP_WIDTH] if any(ranks) else [2 * MLP_WIDTH]
    layers = [
        LayerWeights(
            input_norm_C=new(WIDTH),
            qkv=[
                _product(new, WIDTH, size, biased=biased, rank=rank) for size, rank in zip(parts, ranks, strict=False)
            ],
            q_norm_D=new(HEAD_DIM) if normed else None,
            k_norm_D=new(HEAD_DIM) if normed else None,
            output=_product(new, heads * HEAD_DIM, WIDTH, biased=biased, rank=ranks[0]),
            mlp_norm_C=new(WIDTH),
            gate_up=[_product(new, WIDTH, size, biased=False, rank=ranks[1]) for size in halves],
            down=_product(new, MLP_WIDTH, WIDTH, biased=False, rank=ranks[2]),
        )
        for _ in range(LAYERS)
    ]
    sizes = Sizes(heads, kv_heads, HEAD_DIM, MLP_WIDTH, 1e-6)
    return DecoderWeights(sizes, layers, new(VOCAB, WIDTH), new(WIDTH), new(VOCAB, WIDTH))


def _sight(owners: list[int], prompts: list[int], lengths: list[int], dtype: torch.dtype) -> Sight:
    """Of rows of these groups, behind prompts and suffixes of these lengths."""
    width = widest(owners)
    rows, cells = table(owners, len(prompts), width)
    places, used = torch.tensor(lengths), max(lengths) + 1
    behind = torch.arange(max(prompts)) >= torch.tensor(prompts)[:, None]
    is_even, in_order = min(lengths) == max(lengths), rows == list(range(len(owners)))
    hidden = torch.arange(used) > places[:, None]
    return Sight(
        Seen(max(prompts), bias_where(behind, dtype) if min(prompts) < max(prompts) else None),
        Seen(used, None if is_even else bias_where(hidden, dtype)),
        Grid(len(prompts), width) if in_order else Grid(len(prompts), width, torch.tensor(rows), torch.tensor(cells)),
        None if is_even else Written(torch.arange(len(owners)), places),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_one_call_has_the_bits_of_its_functions(data: st.DataObject) -> None:
    """All counts of rows, uneven prompts, suffixes and groups, with and without biases and norms of heads."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    kv_heads, repeat = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]))
    groups = data.draw(st.integers(1, 3))
    width = data.draw(st.integers(1, 4))
    even = [group for group in range(groups) for _ in range(width)]  # rows are the cells in order
    uneven = [*range(groups), *data.draw(st.lists(st.integers(0, groups - 1), max_size=9))]
    owners = data.draw(st.sampled_from([even, uneven]))
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
        wanted = step_logits(model, caches, fed)
        found = uninterrupted(step_logits, CPU)(model, copies, fed)
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


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_sums_over_ranks_between_them_give_the_same_logits(
    family: str, dtype: torch.dtype, bound: float
) -> None:
    """As tensor-parallel ranks decode; here the sums are over one rank. Five rows: products of float32 have eight."""
    made = tiny_rig(family, dtype, num_layers=2, num_heads=4, num_kv_heads=2)
    specs = made.specs(("image", "text"))
    owners = [0, 1, 1, 0, 1]
    adapter = made.policy.adapter
    with full_float64(), torch.inference_mode():
        pack = compute_prefix(made.policy, specs, "none")
        logits = []
        for ranks_step in (None, RanksStep(adapter, CPU)):
            model = DecodeModel(made.policy)
            model.step = ranks_step or model.step
            rows = GrownRows(model, 8)
            for number in range(2):
                rows.join(number, pack, number)
            rows.add(owners, [specs[owner].next_position for owner in owners])
            logits.append([rows.forward([7 + step + row for row in range(len(owners))]) for step in range(3)])
    for alone, summed in zip(*logits, strict=True):
        torch.testing.assert_close(summed, alone, rtol=bound, atol=bound)


@WITHOUT_TORCHSCRIPT
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


def test_two_threads_may_be_the_first_to_call() -> None:
    """One of them compiles, both get that, and the process's filters of warnings are what they were."""

    def fresh(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: uninterrupted(fresh, CPU), range(32)))
    assert all(each is found[0] for each in found)
    assert warnings.filters == before
    assert float(found[0](torch.zeros(()))) == 1


def _addresses(kept: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in kept]


@WITHOUT_TORCHSCRIPT
def test_held_tensors_are_the_same_ones() -> None:
    one, two, three = (torch.zeros(number + 1) for number in range(3))
    kept = held([one, None, (two, 3)], three)
    assert _addresses(kept) == _addresses((one, two, three))
    assert held([], None) is None


@WITHOUT_TORCHSCRIPT
def test_weights_and_caches_are_held_and_let_go_as_caches_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What C++ holds are the tensors of the step, and none of the older caches: each goes when its copy is there."""
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2)
    specs = made.specs(("image", "text"))
    rows = GrownRows(DecodeModel(made.policy), 200)
    old: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    zeros = torch.zeros

    def counted(*shape: Any, **options: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in old))
        return zeros(*shape, **options)

    with torch.inference_mode():
        pack = compute_prefix(made.policy, specs, "none")
        rows.join(0, pack, 0)
        rows.add([0, 0], [specs[0].next_position] * 2)
        rows.forward([7, 8])
        old += [weakref.ref(tensor) for tensor in (*rows.suffix.keys, *rows.suffix.values)]
        rows.join(1, pack, 1)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", counted)
            rows.add([1], [specs[1].next_position])
        rows.forward([7, 8, 9])
    assert alive == [4, 4, 3, 2]  # the one that was copied last is still at hand
    assert _addresses(rows.suffix._held) == _addresses((*rows.suffix.keys, *rows.suffix.values))
    assert _addresses(rows.prompts._held) == _addresses((*rows.prompts.keys, *rows.prompts.values))
    weights = rows.model.weights
    assert {layer.output.matrix_CX.data_ptr() for layer in weights.layers} <= set(_addresses(rows.model._held))
    assert weights.head_VC.data_ptr() in _addresses(rows.model._held)


def test_parts_of_layers_have_the_bits_of_their_functions() -> None:
    """As tensor-parallel ranks call them."""
    made = tiny_rig("qwen2_5_vl", torch.float32, num_layers=2, num_heads=4, num_kv_heads=2)
    specs = made.specs(("image",))
    logits = []
    with torch.inference_mode():
        pack = compute_prefix(made.policy, specs, "none")
        for device in (CPU, torch.device("meta")):  # functions as they are on any device but a CPU
            rows = GrownRows(DecodeModel(made.policy), 8)
            rows.model.step = RanksStep(made.policy.adapter, device)
            rows.join(0, pack, 0)
            rows.add([0] * 5, [specs[0].next_position] * 5)
            logits.append([rows.forward([7 + step + row for row in range(5)]) for step in range(3)])
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
