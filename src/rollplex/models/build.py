"""Small Qwen-VL models from a configuration: tokenizer, processor and weights, without a model hub.

The result is an ordinary transformers model and processor of the family; saved, it loads with the plain auto classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from rollplex.config import BuildConfig
from rollplex.errors import ModelError
from rollplex.models.shapes import TextShape, VisionShape, patch_size, shape_from_build

# Order and names of the Qwen2/Qwen3 tokenizers; the pad and the end of a turn are the same there.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Chat markup of Qwen. Parts are told apart by their type only: rows that came through Arrow carry all keys in all
# parts, with None where they do not apply.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}{{ raise_exception('unknown content part type: ' ~ part['type']) }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Pre-tokenization of Qwen: contractions, words, single digits, punctuation, line breaks, blanks.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MERGE_SIZE = 2
_MAX_POSITIONS = 32768


def build_processor(
    family: str,
    tokenizer_texts: Iterable[str],
    vocab_size: int,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> Any:
    """Processor of `family` with a byte-level BPE tokenizer trained on `tokenizer_texts`.

    The tokenizer has at most `vocab_size` entries (fewer when the texts have fewer merges), special tokens included,
    and can spell any text. `min_pixels` and `max_pixels` bound the area of an image; absent: 4 and 256 visual tokens.
    Raises ModelError for an unknown family.
    """
    token_area = (patch_size(family) * _MERGE_SIZE) ** 2
    tokenizer = _train_tokenizer(tokenizer_texts, vocab_size)
    size = {"shortest_edge": min_pixels or 4 * token_area, "longest_edge": max_pixels or 256 * token_area}
    if family == "qwen2_5_vl":
        return Qwen2_5_VLProcessor(
            image_processor=Qwen2VLImageProcessor(patch_size=14, size=size),
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False),
            chat_template=CHAT_TEMPLATE,
        )
    # Qwen3-VL bounds the area of a whole video, not of one frame.
    video_size = {"shortest_edge": size["shortest_edge"], "longest_edge": 16 * size["longest_edge"]}
    half = [0.5] * 3
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, size=size, image_mean=half, image_std=half),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=video_size, cap_pixels_per_frame=False),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    config: BuildConfig,
    processor: Any,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    initializer_range: float | None = None,
) -> Any:
    """Randomly initialised model of `config.family` whose vocabulary is that of `processor`.

    The weights depend on `config`, the vocabulary size and `seed` only; the global random state is left as it was.
    `initializer_range` is the standard deviation of all matrices; absent: config.init_scale / sqrt(width). Raises
    ModelError for sizes that do not fit together.
    """
    tokenizer = processor.tokenizer
    shape = shape_from_build(config, len(tokenizer))
    text = _text_config(shape.text, config.family, tokenizer.eos_token_id)
    vision = _vision_config(shape.vision, config.family)
    for part, width in ((text, shape.text.hidden_size), (vision, shape.vision.hidden_size)):
        part["initializer_range"] = initializer_range or config.init_scale * float(width) ** -0.5
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    config_class: Any = Qwen2_5_VLConfig if config.family == "qwen2_5_vl" else Qwen3VLConfig
    model_class: Any = (
        Qwen2_5_VLForConditionalGeneration if config.family == "qwen2_5_vl" else Qwen3VLForConditionalGeneration
    )
    full = config_class(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=config.tie_word_embeddings,
        dtype=torch.float32,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(full)
    cast_parameters(model, dtype)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    return model.eval()


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast all parameters in place and note it in the config.

    Unlike `model.to(dtype)` it leaves buffers alone: rotary frequencies stay float32, as `from_pretrained` has them.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for config in (model.config, model.config.text_config, model.config.vision_config):
        config.dtype = dtype


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
        raise ModelError(
            f"model.build.vocab_size is {vocab_size}; bytes and special tokens alone need "
            f"{len(alphabet) + len(SPECIAL_TOKENS)}"
        )
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        padding_side="left",
        model_max_length=_MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _text_config(shape: TextShape, family: str, eos_token_id: int) -> dict[str, Any]:
    text: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": _MAX_POSITIONS,
        "eos_token_id": eos_token_id,
        # As in the published models: with a pad id the embedding would give that row no gradient.
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": _mrope_section(family, shape.head_dim),
        },
    }
    if family == "qwen3_vl":
        text["head_dim"] = shape.head_dim
        text["rope_parameters"]["mrope_interleaved"] = True
    else:
        text["bos_token_id"] = None
    return text


def _mrope_section(family: str, head_dim: int) -> list[int]:
    """Rotary pairs of the time, height and width axes, in the proportions of the published models."""
    pairs = head_dim // 2
    # Qwen3-VL interleaves the axes (t h w t h w ...), so height and width may have a third each at most.
    spatial = max(1, 5 * pairs // 16) if family == "qwen3_vl" else 3 * pairs // 8
    return [pairs - 2 * spatial, spatial, spatial]


def _vision_config(shape: VisionShape, family: str) -> dict[str, Any]:
    vision: dict[str, Any] = {
        "depth": shape.depth,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_heads": shape.num_heads,
        "patch_size": shape.patch_size,
        "spatial_merge_size": shape.spatial_merge_size,
        "temporal_patch_size": shape.temporal_patch_size,
        "in_channels": shape.in_channels,
        "out_hidden_size": shape.out_hidden_size,
    }
    if family == "qwen3_vl":
        vision["num_position_embeddings"] = shape.num_position_embeddings
        vision["deepstack_visual_indexes"] = list(shape.deepstack_layers)
    else:
        vision |= {
            "window_size": shape.window_size,
            "fullatt_block_indexes": list(shape.full_attention_blocks),
            "tokens_per_second": 2,
        }
    return vision
