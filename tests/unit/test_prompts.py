"""PromptSpecs of both families: what the model itself would compute, one processor call, and every refusal."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from rollplex.config import BuildConfig, DataConfig
from rollplex.errors import ModelError, OverlongPromptError, RowError
from rollplex.models.build import build_model, build_processor
from rollplex.models.prompts import PromptBuilder
from rollplex.tasks.rows import example_from_row
from rollplex.tasks.task import build_task
from rollplex.types import Example, VideoClip

FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
TEXT = {"type": "text", "text": "What is it?"}


@cache
def made(family):
    """(processor, whole model) of a family; small enough to run."""
    processor = build_processor(family, ["user assistant What is it? seconds"], 400)
    return processor, build_model(BuildConfig(family=family, hidden_size=32, num_layers=1), processor, seed=0)


def builder(family, **options):
    processor, model = made(family)
    return PromptBuilder(processor, model.config, DataConfig(**options))


def picture(width=64, height=64, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def clip(frames=8, size=(64, 64), fps=2.0, stride=1, seed=0):
    array = np.random.default_rng(seed).integers(0, 255, (frames, *size, 3), dtype=np.uint8)
    indices = tuple(i * stride for i in range(frames))
    return VideoClip(array, fps, indices, frames * stride, "clip", fps * stride)


def example(*parts, images=(), videos=(), index=7):
    return Example(index, [{"role": "user", "content": [*parts]}], tuple(images), tuple(videos))


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
EXAMPLES = {
    "image": example(IMAGE, TEXT, images=[picture()]),
    "two_sizes": example(IMAGE, TEXT, IMAGE, images=[picture(64, 64), picture(130, 90)]),
    "adjacent_images": example(IMAGE, IMAGE, TEXT, images=[picture(64, 96), picture(96, 64)]),
    "video": example(VIDEO, TEXT, videos=[clip()]),
    "odd_video": example(VIDEO, TEXT, videos=[clip(5, (64, 96))]),
    "slow_video": example(VIDEO, TEXT, videos=[clip(4, fps=0.25, stride=3)]),
    "two_videos": example(VIDEO, VIDEO, TEXT, videos=[clip(4), clip(10, (96, 64), fps=4.0)]),
    "video_image": example(VIDEO, TEXT, IMAGE, images=[picture(100, 80)], videos=[clip(6)]),
    "text": example(TEXT),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_ids_and_positions_equal_the_transformers_pipeline(family, kind):
    """The reference: the processor's and the model's own public calls, with frames sampled as we say."""
    row, (processor, model) = EXAMPLES[kind], made(family)
    spec = builder(family).build(row)
    metadata = [
        {"total_num_frames": c.total_frames, "fps": c.source_fps, "frames_indices": list(c.frame_indices)}
        for c in row.videos
    ]
    inputs = processor(
        text=processor.apply_chat_template(row.prompt, add_generation_prompt=True),
        images=list(row.images) or None,
        videos=[c.frames for c in row.videos] or None,
        return_tensors="pt",
        **({"video_metadata": metadata, "do_sample_frames": False} if row.videos else {}),
    )
    assert torch.equal(spec.input_ids, inputs["input_ids"][0])
    assert torch.equal(spec.token_types.long(), inputs["mm_token_type_ids"][0])
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        ours = getattr(spec, key)
        assert (ours is None) == (key not in inputs)
        assert ours is None or torch.equal(ours, inputs[key])
    keys = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "attention_mask")
    positions, _ = model.model.get_rope_index(inputs["input_ids"], **{k: inputs[k] for k in keys if k in inputs})
    assert torch.equal(spec.positions, positions[:, 0])
    assert spec.positions.dtype == torch.int64 and spec.token_types.dtype == torch.int32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_spec_runs_through_the_model_and_depends_on_the_pixels(family, kind):
    row, (_, model) = EXAMPLES[kind], made(family)
    spec = builder(family).build(row)

    def logits(pixel_scale):
        media = {
            key: getattr(spec, key) * (pixel_scale if key.startswith("pixel") else 1)
            for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
            if getattr(spec, key) is not None
        }
        ids = spec.input_ids[None]
        with torch.no_grad():
            return model(input_ids=ids, position_ids=spec.positions[:, None], **media).logits

    out = logits(1.0)
    assert torch.isfinite(out).all()
    assert torch.equal(out, logits(0.5)) == (kind == "text")


@pytest.mark.parametrize("family", FAMILIES)
def test_timestamps_follow_the_clip_rate(family):
    """Twice the seconds between frames: later temporal positions (Qwen2.5-VL), other times in words (Qwen3-VL)."""
    fast, slow = (builder(family).build(example(VIDEO, TEXT, videos=[clip(8, fps=f)])) for f in (2.0, 1.0))
    if family == "qwen2_5_vl":
        # tokens_per_second 2, patches of 2 frames: 2 ids a patch at 2 frames a second, 4 at 1.
        t = [spec.positions[0][spec.token_types == 2].unique() for spec in (fast, slow)]
        assert (t[0] - t[0][0]).tolist() == [0, 2, 4, 6] and (t[1] - t[1][0]).tolist() == [0, 4, 8, 12]
    else:
        decode = made(family)[0].tokenizer.decode
        assert "<0.2 seconds>" in decode(fast.input_ids) and "<3.2 seconds>" in decode(fast.input_ids)
        assert "<0.5 seconds>" in decode(slow.input_ids) and "<6.5 seconds>" in decode(slow.input_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_frame_video_works(family):
    row = {"prompt": [{"role": "user", "content": [VIDEO, TEXT]}], "videos": [[picture()]]}
    spec = builder(family).build(example_from_row(0, row, video_fps=2.0, max_frames=8))
    assert spec.video_grid_thw.tolist()[0][0] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_string_prompt_is_not_templated(family):
    spec = builder(family).build(Example(0, "What is it?"))
    assert made(family)[0].tokenizer.decode(spec.input_ids) == "What is it?"
    assert spec.positions.tolist() == [list(range(spec.num_tokens))] * 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["two_sizes", "video_image"])
def test_g02_overlong_prompt_is_refused_never_cut(family, kind):
    full = builder(family).build(EXAMPLES[kind]).num_tokens
    assert builder(family, max_prompt_tokens=full).build(EXAMPLES[kind]).num_tokens == full
    message = rf"^row 7: the prompt has {full} tokens with its media expanded, data.max_prompt_tokens allows {full - 1}"
    with pytest.raises(OverlongPromptError, match=message):
        builder(family, max_prompt_tokens=full - 1).build(EXAMPLES[kind])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "<|image_pad|>",
        "a<|video_pad|>b",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ],
)
@pytest.mark.parametrize("where", ["part", "string", "plain", "system", "split"])
def test_g03_literal_vision_tokens_in_text_are_refused(family, text, where):
    part = {"type": "text", "text": text}
    prompt = {
        "part": [{"role": "user", "content": [IMAGE, part]}],
        "string": [{"role": "user", "content": text}],
        "plain": text,
        "system": [{"role": "system", "content": [part]}, {"role": "user", "content": [IMAGE, TEXT]}],
        "split": [{"role": "user", "content": [{"type": "text", "text": t} for t in (text[:4], text[4:])]}],
    }[where]
    images = (picture(),) if where in ("part", "system") else ()
    with pytest.raises(RowError, match=r"^row 7: the prompt's text holds the vision token '<\|"):
        builder(family).build(Example(7, prompt, images))


@pytest.mark.parametrize("family", FAMILIES)
def test_g03_already_expanded_prompt_is_refused(family):
    """The ids of a built prompt, decoded and sent again with their picture, must not be expanded twice."""
    first = builder(family).build(EXAMPLES["two_sizes"])
    text = made(family)[0].tokenizer.decode(first.input_ids)
    row = example(IMAGE, IMAGE, {"type": "text", "text": text}, images=EXAMPLES["two_sizes"].images)
    with pytest.raises(RowError, match="vision token"):
        builder(family).build(row)


@pytest.mark.parametrize("family", FAMILIES)
def test_g03_processor_runs_once_per_prompt(family):
    made_builder = builder(family)
    calls = []
    inner = type(made_builder.processor).__call__

    class Counting(type(made_builder.processor)):
        def __call__(self, *args, **kwargs):
            calls.append(kwargs)
            return inner(self, *args, **kwargs)

    made_builder.processor.__class__ = Counting
    for row in EXAMPLES.values():
        made_builder.build(row)
    assert len(calls) == len(EXAMPLES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_g05_pixel_limits_reach_every_grid(family, kind):
    big = {
        "image": example(IMAGE, TEXT, images=[picture(400, 300)]),
        "video": example(VIDEO, videos=[clip(4, (400, 300))]),
    }
    patch = made(family)[0].image_processor.patch_size

    def area(**options):
        spec = builder(family, **options).build(big[kind])
        grid = spec.image_grid_thw if kind == "image" else spec.video_grid_thw
        assert (spec.token_types != 0).sum() == int(grid.prod()) // 4  # tokens and grid agree at every setting
        return int(grid[0, 1] * grid[0, 2]) * patch**2, spec.digest

    free, low = area(), area(max_pixels=10_000)
    assert low[0] <= 10_000 < free[0]
    small = area(min_pixels=150_000, max_pixels=200_000)
    assert 150_000 <= small[0] <= 200_000
    assert len({free[1], low[1], small[1]}) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_g05_settings_are_part_of_the_digest_even_when_the_tensors_agree(family):
    row = EXAMPLES["text"]
    assert builder(family).build(row).digest != builder(family, max_pixels=100_000).build(row).digest


@pytest.mark.parametrize("family", FAMILIES)
def test_digest_identifies_media_order_and_values(family):
    build = builder(family).build
    one, two = picture(64, 64, 1), picture(64, 64, 2)
    changed = one.copy()
    changed.putpixel((5, 5), (0, 0, 0))
    rows = [
        example(IMAGE, IMAGE, TEXT, images=[one, two]),
        example(IMAGE, IMAGE, TEXT, images=[two, one]),
        example(IMAGE, IMAGE, TEXT, images=[changed, two]),
        example(IMAGE, TEXT, IMAGE, images=[one, two]),
        example(VIDEO, TEXT, videos=[clip(4, fps=2.0)]),
        example(VIDEO, TEXT, videos=[clip(4, fps=0.5)]),  # only positions (or the written times) differ
    ]
    digests = [build(row).digest for row in rows]
    assert len(set(digests)) == len(rows)
    assert build(replace(rows[0], index=99)).digest == digests[0]  # the row number is no part of the prefix


@pytest.mark.parametrize("family", FAMILIES)
def test_g08_videos_of_different_length_have_their_own_spans(family):
    rows = [
        example(VIDEO, TEXT, videos=[clip(4)]),
        example(VIDEO, TEXT, VIDEO, videos=[clip(4), clip(10, (96, 64))]),
        example(VIDEO, IMAGE, TEXT, images=[picture(90, 60)], videos=[clip(6)]),
    ]
    for row in rows:
        spec = builder(family).build(row)
        assert spec.video_grid_thw[:, 0].tolist() == [len(c.frames) // 2 for c in row.videos]
        assert int((spec.token_types == 2).sum()) * 4 == len(spec.pixel_values_videos)
        images = spec.image_grid_thw
        assert (0 if images is None else len(images)) == len(row.images)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_g10_prompt_positions_extend_to_those_of_the_full_sequence(family, kind):
    """Positions of prompt + completion, left-padded, equal the prompt's extended from next_position."""
    spec, (_, model) = builder(family).build(EXAMPLES[kind]), made(family)
    completion, pad = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 0, 0])
    ids = torch.cat([pad, spec.input_ids, completion])[None]
    types = torch.cat([torch.zeros(3), spec.token_types, torch.zeros(4)]).int()[None]
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    extra = {}
    if family == "qwen2_5_vl" and EXAMPLES[kind].videos:
        extra["second_per_grid_ts"] = torch.tensor([2 / c.fps for c in EXAMPLES[kind].videos])
    full, _ = model.model.get_rope_index(
        ids, types, spec.image_grid_thw, spec.video_grid_thw, attention_mask=mask, **extra
    )
    ours = torch.cat([spec.positions, spec.next_position + torch.arange(4).expand(3, -1)], dim=1)
    assert torch.equal(full[:, 0, 3:], ours)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_g10_responses_start_where_generate_starts_them(family, kind):
    """Also for the slow video, whose temporal ids on Qwen2.5-VL overtake the text behind it."""
    row, (_, model) = EXAMPLES[kind], made(family)
    spec = builder(family).build(row)
    if (family, kind) == ("qwen2_5_vl", "slow_video"):
        assert int(spec.positions.max()) > int(spec.positions[0, -1])
    media = {
        key: getattr(spec, key)
        for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        if getattr(spec, key) is not None
    }
    if family == "qwen2_5_vl" and row.videos:
        media["second_per_grid_ts"] = torch.tensor([2 / c.fps for c in row.videos])
    seen = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"][-3:, 0]), with_kwargs=True
    )
    model.generate(
        input_ids=spec.input_ids[None],
        attention_mask=torch.ones_like(spec.input_ids)[None],
        mm_token_type_ids=spec.token_types[None],
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        **media,
    )
    hook.remove()
    assert torch.equal(seen[0].expand(3, -1), spec.positions)
    assert seen[1].expand(3, -1).flatten().tolist() == [spec.next_position] * 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["pil", "path", "bytes", "dict_bytes", "dict_path", "array"])
def test_g26_length_limit_counts_expanded_media_of_every_form(family, form, tmp_path):
    """Short text, huge picture: the text alone is far below the limit."""
    image = picture(900, 900)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(buffer.getvalue())
    value = {
        "pil": image,
        "path": str(path),
        "bytes": buffer.getvalue(),
        "dict_bytes": {"bytes": buffer.getvalue(), "path": None},
        "dict_path": {"bytes": None, "path": str(path)},
        "array": np.asarray(image),
    }[form]
    row = {"prompt": [{"role": "user", "content": "Hi"}], "images": [value]}
    read = example_from_row(3, row, video_fps=2.0, max_frames=8)
    with pytest.raises(OverlongPromptError, match=r"^row 3: the prompt has 2\d\d tokens"):
        builder(family, max_prompt_tokens=100).build(read)
    assert builder(family, max_prompt_tokens=100, max_pixels=100 * 100).build(read).num_tokens < 100


@pytest.mark.parametrize("family", FAMILIES)
def test_impossible_pictures_name_the_row(family):
    with pytest.raises(RowError, match=r"^row 7: the processor refuses the prompt \(absolute aspect ratio"):
        builder(family).build(example(IMAGE, TEXT, images=[picture(900, 2)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_template_that_loses_or_merges_media_is_refused(family):
    made_builder = builder(family)
    made_builder.processor.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(RowError, match=r"^row 7: the chat template wrote 0 <\|image_pad\|> for 1 media"):
        made_builder.build(EXAMPLES["image"])
    made_builder.processor.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}<|image_pad|>{% endfor %}{% endfor %}"
    )
    row = example(IMAGE, IMAGE, images=[picture(), picture()])
    with pytest.raises(
        RowError,
        match=r"^row 7: image placeholder runs have \[\d+\] tokens, the grids need \[(\d+), \1\]",
    ):
        made_builder.build(row)
    made_builder.processor.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(RowError, match=r"^row 7: the chat template refuses the prompt \(no system role\)"):
        made_builder.build(EXAMPLES["text"])


def test_processor_of_another_model_is_refused():
    qwen25, qwen3 = made("qwen2_5_vl"), made("qwen3_vl")
    with pytest.raises(ModelError, match="patch_size is 14, the model's patch_size 16"):
        PromptBuilder(qwen25[0], qwen3[1].config, DataConfig())
    config = type(qwen3[1].config)(**{**qwen3[1].config.to_dict(), "image_token_id": 5})
    with pytest.raises(ModelError, match="image_token is"):
        PromptBuilder(qwen3[0], config, DataConfig())
    config.model_type = "llava"
    with pytest.raises(ModelError, match="'llava', needed one of qwen2_5_vl, qwen3_vl"):
        PromptBuilder(qwen3[0], config, DataConfig())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", ["counting", "colour_shape", "motion", "mixed"])
def test_synthetic_tasks_become_prompts(family, task):
    options = {"task": task, "num_rows": 4, "num_images": 2}
    made_task = build_task(DataConfig(**options), "train", 0)
    specs = [builder(family, **options).build(made_task.example(i)) for i in range(4)]
    assert all(spec.next_position == int(spec.positions[:, -1].max()) + 1 for spec in specs)
    assert len({spec.digest for spec in specs}) == 4
