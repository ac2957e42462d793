"""The prompt pass against transformers' own forward, its three ways to hold activations, its life cycle."""

from __future__ import annotations

import copy

import pytest
import torch

from numerics.cases import EXAMPLES, FAMILIES, MODES, tiny_rig
from rollplex.errors import StateError
from rollplex.models.adapter import VisionFeatures
from rollplex.models.policy import Policy, VisionCache
from rollplex.models.precision import full_float64
from rollplex.models.prefix import backward_prefix, compute_prefix

NAMES = ("image", "text", "two_images", "image_video_image", "text")


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_values_and_hidden_states_equal_transformers_cache(family):
    """Each prompt alone through the family's own model with a cache: K and V of every layer, and h."""
    made = tiny_rig(family)
    specs = made.specs(NAMES)
    with full_float64():
        pack = compute_prefix(made.policy, specs, "none")
        for number, spec in enumerate(specs):
            media = {
                key: getattr(spec, key)
                for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
                if getattr(spec, key) is not None
            }
            with torch.no_grad():
                out = made.policy.model.model(
                    input_ids=spec.input_ids[None], position_ids=spec.positions[:, None], use_cache=True, **media
                )
            for layer, cached in enumerate(out.past_key_values.layers):
                kv = pack.kv(layer, number, 1, with_grads=False)
                torch.testing.assert_close(kv.k_GKPD, cached.keys, rtol=0, atol=1e-12)
                torch.testing.assert_close(kv.v_GKPD, cached.values, rtol=0, atol=1e-12)
            normed = made.policy.adapter.final_norm(pack.hidden_GC[number])
            torch.testing.assert_close(normed, out.last_hidden_state[0, -1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_is_neutral(family):
    """A prompt's prefix does not depend on the prompts beside it."""
    made = tiny_rig(family, num_layers=2)
    names = tuple(EXAMPLES)
    specs = made.specs(names)
    with full_float64():
        together = compute_prefix(made.policy, specs, "none")
        for number, spec in enumerate(specs):
            alone = compute_prefix(made.policy, [spec], "none")
            torch.testing.assert_close(together.hidden_GC[number], alone.hidden_GC[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_modes_hold_what_they_say(family):
    """graph keeps the most, checkpoint layer inputs, recompute nothing; no boundary tensor requires gradient."""
    made = tiny_rig(family)
    specs = made.specs(NAMES)
    saved = {}
    for mode in MODES:
        count = 0

        def pack_hook(tensor):
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
            pack = compute_prefix(made.policy, specs, mode)
        saved[mode] = count
        assert not any(t.requires_grad for t in (*pack.keys, *pack.values, pack.hidden_GC))
        assert (pack.graph is None) == (mode == "recompute")
    assert saved["recompute"] == 0
    assert saved["checkpoint"] < saved["graph"] / 3


def test_accumulators_are_float32_under_bfloat16_and_float64_under_float64():
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        made = tiny_rig("qwen2_5_vl", dtype, num_layers=1)
        pack = compute_prefix(made.policy, made.specs(("text",)), "graph")
        pack.want_grads()
        assert {g.dtype for g in (*pack.grad_keys, *pack.grad_values, pack.grad_hidden_GC)} == {wide}
        first = pack.grad_keys[0]
        pack.want_grads()
        assert pack.grad_keys[0] is first  # a second micro-batch adds to the first one's


def test_a_released_pack_holds_nothing_and_refuses_use():
    made = tiny_rig("qwen2_5_vl", num_layers=1)
    pack = compute_prefix(made.policy, made.specs(("text",)), "graph")
    pack.want_grads()
    backward_prefix(pack)
    assert pack.graph is None and not pack.keys and not pack.grad_keys and pack.grad_hidden_GC is None
    with pytest.raises(StateError, match="consumed"):
        pack.check_current()


def test_a_scoring_pack_has_no_backward():
    made = tiny_rig("qwen2_5_vl", num_layers=1)
    pack = compute_prefix(made.policy, made.specs(("text",)), "none")
    pack.want_grads()
    with pytest.raises(StateError, match="no boundary gradients"):
        backward_prefix(pack)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_frozen_but_the_head_needs_no_prefix_backward(family, mode):
    made = tiny_rig(family, num_layers=2)
    made.loaded.model.requires_grad_(False)
    made.policy.adapter.lm_head.weight.requires_grad_(True)
    policy = Policy(made.loaded.model)
    pack = compute_prefix(policy, made.specs(("image",)), mode)
    pack.want_grads()
    backward_prefix(pack)
    assert policy.adapter.lm_head.weight.grad is None


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_features_are_encoded_once_per_prompt_and_bounded(family):
    made = tiny_rig(family, num_layers=1)
    made.loaded.model.model.visual.requires_grad_(False)
    policy = Policy(made.loaded.model)
    specs = made.specs(("image", "two_images", "text", "same_image"))
    fresh = Policy(copy.deepcopy(made.loaded.model)).adapter.encode(specs)
    for _ in range(2):
        features = policy.encode(specs)
        torch.testing.assert_close(features.embeds, fresh.embeds)
        for got, wanted in zip(features.deepstack, fresh.deepstack, strict=True):
            torch.testing.assert_close(got, wanted)
    assert policy.encode_calls == 2  # the last prompt equals the first, token by token and pixel by pixel
    size = policy.vision_cache.num_bytes
    for _ in range(2):  # the ordinary path has features of its own: else it would be held against itself
        ordinary = policy.encode(specs, ordinary=True)
        torch.testing.assert_close(ordinary.embeds, fresh.embeds)
        assert policy.encode_calls == 4 and policy.vision_cache.num_bytes == 2 * size
    policy.vision_cache = VisionCache(limit_bytes=size - 1)
    policy.encode(specs)
    assert len(policy.vision_cache.entries) == 1
    assert policy.vision_cache.num_bytes < size


def test_features_that_two_threads_missed_count_once():
    cache, features = VisionCache(), VisionFeatures(torch.zeros(5, 2))
    for _ in range(2):
        cache.put(("digest", False), features)
    assert cache.num_bytes == 40 and cache.get(("digest", False)) is features
    cache.limit_bytes = 0
    cache.put(("another", False), features)
    assert cache.num_bytes == 0 and not cache.entries
