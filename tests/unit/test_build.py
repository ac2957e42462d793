"""Built models: deterministic, valid, and refused with the option's name where sizes do not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rollplex.config import BuildConfig
from rollplex.errors import ModelError
from rollplex.models.build import _mrope_section, build_model, build_processor
from rollplex.models.shapes import check_build

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
TEXTS = ["How many red circles are in the image?", "I count 3 of them. The answer is 3."] * 3

_DIGEST_SCRIPT = """
import hashlib, sys
from rollplex.config import BuildConfig
from rollplex.models.build import build_model, build_processor
processor = build_processor(sys.argv[1], ["one two three two one", "red green blue red"], 320)
digest = hashlib.sha256(str(sorted(processor.tokenizer.get_vocab().items())).encode())
for name, tensor in build_model(BuildConfig(family=sys.argv[1]), processor, seed=int(sys.argv[2])).named_parameters():
    digest.update(name.encode() + tensor.detach().numpy().tobytes())
print(digest.hexdigest())
"""


def _digest_in_new_process(family: str, seed: int) -> str:
    run = subprocess.run(
        [sys.executable, "-c", _DIGEST_SCRIPT, family, str(seed)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return run.stdout.strip().splitlines()[-1]


def test_same_seed_same_model_in_another_process():
    assert _digest_in_new_process("qwen3_vl", 5) == _digest_in_new_process("qwen3_vl", 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_decides_weights_and_global_rng_is_untouched(family):
    processor = build_processor(family, TEXTS, 320)
    before = torch.get_rng_state()
    first, second, other = (build_model(BuildConfig(family=family), processor, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_rounds_the_same_draw_and_leaves_rotary_frequencies_in_float32(dtype):
    processor = build_processor("qwen2_5_vl", TEXTS, 320)
    reference = build_model(BuildConfig(), processor, seed=1)
    model = build_model(BuildConfig(), processor, seed=1, dtype=dtype)
    assert model.dtype == dtype
    for (name, wanted), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(wanted.to(dtype), found), name
    assert torch.equal(
        model.model.language_model.rotary_emb.inv_freq, reference.model.language_model.rotary_emb.inv_freq
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_model_reads_an_image_and_answers(family, tied):
    processor = build_processor(family, TEXTS, 320)
    config = BuildConfig(
        family=family, vision_depth=4, num_layers=3, num_heads=4, num_kv_heads=2, tie_word_embeddings=tied
    )
    model = build_model(config, processor, seed=0)
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == tied
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    logits = []
    for colour in ("red", "blue"):
        batch = processor(text=[text], images=[Image.new("RGB", (112, 84), colour)], return_tensors="pt")
        merged = int(batch["image_grid_thw"].prod()) // 4
        assert int((batch["input_ids"] == model.config.image_token_id).sum()) == merged
        with torch.no_grad():
            logits.append(model(**batch).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 1e-3  # the picture reaches the answer


def test_qwen3_has_as_many_deepstack_levels_as_its_depth_allows():
    processor = build_processor("qwen3_vl", TEXTS, 320)
    small = build_model(BuildConfig(family="qwen3_vl"), processor, seed=0)
    deep = build_model(BuildConfig(family="qwen3_vl", vision_depth=6, num_layers=4), processor, seed=0)
    assert list(small.config.vision_config.deepstack_visual_indexes) == [0]
    assert list(deep.config.vision_config.deepstack_visual_indexes) == [0, 2, 4]
    assert len(deep.model.visual.deepstack_merger_list) == 3


def test_tokenizer_spells_any_text_and_keeps_special_tokens_whole():
    tokenizer = build_processor("qwen2_5_vl", TEXTS, 320).tokenizer
    text = "A\u00e9\u4e2d \U0001f600\n\n42 <|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id
    assert len(tokenizer) <= 320


def test_arrow_rows_with_none_keys_render_by_type():
    tokenizer = build_processor("qwen2_5_vl", TEXTS, 320).tokenizer
    parts = [{"type": "text", "text": "Hi", "image": None}, {"type": "image", "text": None, "image": None}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"


def test_pixel_limits_are_the_processors():
    processor = build_processor("qwen2_5_vl", TEXTS, 320, min_pixels=28 * 28, max_pixels=4 * 28 * 28)
    grid = processor.image_processor(Image.new("RGB", (280, 280)), return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, 4, 4]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "llava"}, ("family", "'llava'", "qwen3_vl")),
        ({"hidden_size": 66, "num_heads": 4, "num_kv_heads": 2}, ("hidden_size 66", "num_heads 4")),
        ({"num_heads": 4, "num_kv_heads": 3}, ("num_heads 4", "num_kv_heads 3")),
        ({"hidden_size": 64, "num_heads": 16}, ("hidden_size / num_heads is 4", "at least 8")),
        ({"hidden_size": 33, "num_heads": 3}, ("hidden_size / num_heads is 11", "even")),
        ({"vision_hidden_size": 34}, ("vision_hidden_size 34", "multiple of 4")),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, words):
    with pytest.raises(ModelError) as caught:
        check_build(BuildConfig(**options))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unknown_family_and_too_small_vocabulary():
    with pytest.raises(ModelError, match=r"llava.*qwen2_5_vl"):
        build_processor("llava", TEXTS, 320)
    with pytest.raises(ModelError, match=r"vocab_size is 269.*270"):
        build_processor("qwen2_5_vl", TEXTS, 269)


@given(st.sampled_from(FAMILIES), st.integers(4, 128))
def test_mrope_sections_cover_every_pair(family, pairs):
    time, height, width = _mrope_section(family, 2 * pairs)
    assert time + height + width == pairs
    assert min(time, height, width) >= 1
    if family == "qwen3_vl":  # interleaved: the last height and width pair must exist
        assert 3 * height <= pairs + 1
        assert 3 * width <= pairs


@settings(max_examples=10)
@given(st.sampled_from(FAMILIES), st.integers(4, 40), st.integers(1, 5), st.integers(1, 6))
def test_any_accepted_shape_builds(family, vision_quarter, depth, layers):
    config = BuildConfig(
        family=family, vision_hidden_size=4 * vision_quarter, vision_depth=depth, num_layers=layers, hidden_size=32
    )
    processor = build_processor(family, TEXTS, 300)
    model = build_model(config, processor, seed=0)
    batch = processor(text=["<|image_pad|>"], images=[Image.new("RGB", (64, 64))], return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(model(**batch).logits).all()
