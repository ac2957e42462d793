"""The planner's operation counts against what torch counts while the real tiny models run, within 1 %.

FlopCounterMode has no formula for the fused CPU attention kernels that our passes and transformers use, so it gets them
here: two products forward, five backward (the scores are computed again), causal pairs only. A kernel that is given a
mask instead of the causal flag (padded whole sequences) masks causally as well and is counted alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from numerics.cases import FAMILIES, MIXES, MODES, Rig, tiny_rig
from rollplex.models.prefix import Activations, PrefixPack, backward_prefix, compute_prefix
from rollplex.models.shapes import Experts, ModelShape, shape_from_hf
from rollplex.planner.flops import ModelCounts
from rollplex.planner.load import GroupLoad, Prompt
from rollplex.planner.work import Work
from rollplex.rollout.decode import DecodeModel
from rollplex.rollout.grown_rows import GrownRows
from rollplex.train.full_sequence import full_sequence_logps
from rollplex.train.response import GroupTokens, response_logps
from rollplex.types import PromptSpec

LENGTHS = ((1, 7, 12, 5), (40, 33, 1, 1), (1, 1, 1, 1), (9, 9, 9, 9), (2, 30, 3, 4))
_ATEN = torch.ops.aten


def _fused(q: Any, k: Any, _v: Any, _dropout: float = 0.0, causal: bool = False, **options: Any) -> int:
    batch, heads, queries, width = q
    keys = k[2]
    masked = causal or options.get("attn_mask") is not None
    pairs = queries * (queries + 1) // 2 if masked else queries * keys
    return int(2 * 2 * batch * heads * width * pairs)


def _fused_backward(_grad: Any, q: Any, k: Any, v: Any, _out: Any, _lse: Any, *rest: Any, **options: Any) -> int:  # noqa: PLR0917
    return _fused(q, k, v, rest[0], rest[1], **options) * 5 // 2


FUSED = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *a, out_shape=None, **o: _fused(*a, **o),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda *a, out_shape=None, **o: _fused_backward(
        *a, **o
    ),
}


def counted(run: Callable[[], Any]) -> tuple[int, Any]:
    """(operations by torch's count, what `run` returned)."""
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        result = run()
    return counter.get_total_flops(), result


def _shape(rig: Rig) -> ModelShape:
    return shape_from_hf(rig.loaded.model.config.to_dict(), "tiny")


def load_of(spec: PromptSpec) -> Prompt:
    """A PromptSpec as the planner sees it."""
    grids = [g for g in (spec.image_grid_thw, spec.video_grid_thw) if g is not None]
    return Prompt(spec.num_tokens, tuple(tuple(map(int, row)) for grid in grids for row in grid))


def _answers(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(3 + (i * 7 + j) % 40 for j in range(n)) for i, n in enumerate(lengths))


@pytest.fixture(scope="module", params=FAMILIES)
def rig(request: pytest.FixtureRequest) -> Rig:
    # In float64, whose products get no rows added however few they have (models/steady.py).
    return tiny_rig(request.param, torch.float64, num_heads=4, num_kv_heads=2, vision_depth=4)


def _close(ours: Work, torchs: int) -> None:
    assert torchs > 0
    assert ours.flops == pytest.approx(torchs, rel=0.01)


# Wider than a window of the tower: cut ones beside whole ones.
WIDE = {"wide": ("odd_image",), "wide_and_videos": ("odd_image", "two_videos")}


@pytest.mark.parametrize("mix", [*MIXES, *WIDE])
def test_prefix_forward(rig: Rig, mix: str) -> None:
    specs = rig.specs((MIXES | WIDE)[mix])
    if mix in WIDE:
        assert max(max(grid[1:]) for spec in specs for grid in load_of(spec).grids) > 8  # patches a window's side
    prompts = [load_of(spec) for spec in specs]
    counts = ModelCounts(_shape(rig), 4)
    _close(
        counts.vision(prompts) + counts.prefix(prompts), counted(lambda: compute_prefix(rig.policy, specs, "none"))[0]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mix", MIXES)
def test_prefix_backward(rig: Rig, mix: str, mode: Activations) -> None:
    specs = rig.specs(MIXES[mix])
    pack = compute_prefix(rig.policy, specs, mode)
    _with_boundary_gradients(pack)
    ours = ModelCounts(_shape(rig), 4).prefix_backward([load_of(spec) for spec in specs], mode)
    _close(ours, counted(lambda: backward_prefix(pack))[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_tower_has_no_backward(rig: Rig, mode: Activations) -> None:
    specs = rig.specs(MIXES["image"])
    for parameter in rig.policy.adapter.visual.parameters():
        parameter.requires_grad_(False)
    try:
        pack = compute_prefix(rig.policy, specs, mode)
        _with_boundary_gradients(pack)
        ours = ModelCounts(_shape(rig), 4, vision_trained=False).prefix_backward([load_of(s) for s in specs], mode)
        _close(ours, counted(lambda: backward_prefix(pack))[0])
    finally:
        for parameter in rig.policy.adapter.visual.parameters():
            parameter.requires_grad_(True)


def _with_boundary_gradients(pack: PrefixPack) -> None:
    pack.want_grads()
    assert pack.grad_hidden_GC is not None
    for tensor in (*pack.grad_keys, *pack.grad_values, pack.grad_hidden_GC):
        tensor.fill_(1e-3)


@pytest.mark.parametrize("mix", MIXES)
def test_response_passes(rig: Rig, mix: str) -> None:
    specs = rig.specs(MIXES[mix])
    groups = [GroupLoad(load_of(spec), LENGTHS[i % len(LENGTHS)]) for i, spec in enumerate(specs)]
    tokens = [GroupTokens(i, _answers(group.responses)) for i, group in enumerate(groups)]
    pack = compute_prefix(rig.policy, specs, "graph")
    counts = ModelCounts(_shape(rig), 4)
    scoring, _ = counted(lambda: response_logps(pack, tokens, 1.0, with_grad=False))
    _close(counts.response(groups), scoring)
    forward, logps = counted(lambda: response_logps(pack, tokens, 1.0, with_grad=True))
    assert forward == scoring
    backward, _ = counted(lambda: logps.logps.sum().backward())
    _close(counts.response_backward(groups), backward)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("lengths", [(6, 6, 6), (1, 20, 4)])
def test_full_sequences(rig: Rig, mix: str, lengths: tuple[int, ...]) -> None:
    specs = rig.specs(MIXES[mix])
    groups = [GroupLoad(load_of(spec), lengths) for spec in specs]
    rows = [(spec, answer) for spec in specs for answer in _answers(lengths)]
    counts = ModelCounts(_shape(rig), 4)
    forward, logps = counted(lambda: full_sequence_logps(rig.policy, rows, 1.0, with_grad=True))
    _close(counts.full(groups), forward)
    backward, _ = counted(lambda: logps.logps.sum().backward())
    _close(counts.full_backward(groups), backward)


def test_decode_step(rig: Rig) -> None:
    specs = rig.specs(("image", "image"))
    model, rows_each, earlier = DecodeModel(rig.policy), 4, 5
    with torch.no_grad():
        pack = compute_prefix(rig.policy, specs, "none")
        live, owners = GrownRows(model, 16), [row // rows_each for row in range(2 * rows_each)]
        for number in range(2):
            live.join(number, pack, number)
        live.add(owners, [specs[0].next_position] * len(owners))
        for _ in range(earlier):
            live.forward(range(len(owners)))
        found, _ = counted(lambda: live.forward(range(len(owners))))
    context = specs[0].num_tokens + earlier + 1
    ours = ModelCounts(_shape(rig), 4).decode_step(2 * rows_each, 2 * rows_each * context, 0)
    _close(ours, found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_meta_model(family: str, tied: bool) -> None:
    config_class, model_class = {
        "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
        "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    }[family]
    config = config_class(text_config={}, vision_config={}, tie_word_embeddings=tied)  # sizes of the published classes
    with torch.device("meta"):
        model = model_class(config)
    counts = ModelCounts(shape_from_hf(config.to_dict(), family))
    assert counts.parameters == sum(p.numel() for p in model.parameters())
    assert counts.vision_parameters == sum(p.numel() for p in model.model.visual.parameters())


def _moe() -> tuple[Any, ModelCounts]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "vocab_size": 300}  # fmt: skip
    config = transformers.Qwen3VLMoeTextConfig(
        **sizes, moe_intermediate_size=48, intermediate_size=99, num_experts=6, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextModel(config)
    dense = {"model_type": "qwen3_vl", "text_config": sizes | {"intermediate_size": 48}, "tie_word_embeddings": True}
    return model, ModelCounts(shape_from_hf(dense, "moe"), 4, Experts(count=6, active=2))


def test_a_mixture_of_experts() -> None:
    model, counts = _moe()
    assert counts.text_parameters == sum(p.numel() for p in model.parameters())
    tokens = 50
    with torch.no_grad():
        found, _ = counted(lambda: model(input_ids=torch.arange(tokens)[None], use_cache=False))
    _close(counts.decoder(tokens, tokens * (tokens + 1) / 2), found)
