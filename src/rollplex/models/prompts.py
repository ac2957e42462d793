"""Examples into PromptSpecs: the one place where the processor runs, once per prompt."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import torch
import transformers
from transformers.video_utils import VideoMetadata

from rollplex.config import DataConfig
from rollplex.errors import ModelError, OverlongPromptError, RowError
from rollplex.types import Example, PromptSpec, VideoClip

# Family: the transformers class whose get_rope_index defines the positions.
_ROPE_CLASSES = {"qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel"}
# These families' video processors take a pixel budget for the whole clip, the others one per frame.
_BUDGET_PER_CLIP = {"qwen3_vl"}
# These families' prompts hold one placeholder run per temporal patch (with its time in words), the others one per clip.
_RUN_PER_TIME_STEP = {"qwen3_vl"}

TEXT, IMAGE, VIDEO = 0, 1, 2


class PromptBuilder:
    """Makes PromptSpecs for one model's processor and one data configuration. Safe to call from several threads.

    `processor` is the family's AutoProcessor, `model_config` its configuration (its token ids and grid merge decide
    what a placeholder is). Raises ModelError when the processor and the model do not fit.
    """

    def __init__(self, processor: Any, model_config: Any, data_config: DataConfig) -> None:
        family = model_config.model_type
        if family not in _ROPE_CLASSES:
            raise ModelError(f"no prompt support for model family {family!r}, needed one of {', '.join(_ROPE_CLASSES)}")
        # Own copy: a fast tokenizer keeps padding and truncation as state, which other users of it may switch
        # while a worker thread encodes.
        self._processor = copy.deepcopy(processor)
        self._processor.tokenizer("")  # sets that state once, before any thread encodes
        self._family = family
        self._data = data_config
        self._merge_area = model_config.vision_config.spatial_merge_size**2
        self._token_ids = {IMAGE: model_config.image_token_id, VIDEO: model_config.video_token_id}
        self._vision_tokens = _vision_tokens(self._processor, model_config)
        _check_patches(self._processor, model_config.vision_config)
        self._rope = _rope_without_weights(getattr(transformers, _ROPE_CLASSES[family]), model_config)
        self._settings = _settings(self._processor, data_config, family)
        if self._processor.chat_template is None:
            raise ModelError("the processor has no chat template; save one with it (chat_template.jinja)")

    @property
    def processor(self) -> Any:
        """The builder's own copy of the processor (its tokenizer decodes the same ids)."""
        return self._processor

    def build(self, example: Example) -> PromptSpec:
        """Run the processor once and check that tokens, grids and media agree.

        Raises RowError when the row cannot be a prompt, OverlongPromptError when it is longer than
        data.max_prompt_tokens with its media expanded. Nothing is ever cut.
        """
        self._refuse_vision_tokens(example)
        text = self._render(example)
        inputs = self._process(example, text)
        input_ids = inputs["input_ids"][0]
        limit = self._data.max_prompt_tokens
        if not len(input_ids):
            raise RowError(f"row {example.index}: the prompt has zero tokens, needed at least 1")
        if limit is not None and len(input_ids) > limit:
            raise OverlongPromptError(
                f"row {example.index}: the prompt has {len(input_ids)} tokens with its media expanded, "
                f"data.max_prompt_tokens allows {limit}; raise it, lower data.max_pixels or data.max_frames, "
                "or set data.overlong=drop"
            )
        token_types = self._token_types(input_ids)
        self._check_media(example, token_types, inputs)
        positions = self._positions(input_ids, token_types, inputs)
        tensors = {
            "input_ids": input_ids,
            "positions": positions,
            "token_types": token_types,
            **{k: inputs.get(k) for k in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")},
        }
        digest = _digest(self._settings, tensors)
        # One past the last token (text, so equal on all axes), as generate and get_rope_index on the full sequence go
        # on. It is max(positions) + 1 too, save for long Qwen2.5-VL videos, whose time axis may overtake the text.
        next_position = int(positions[:, -1].max()) + 1
        return PromptSpec(row=example.index, next_position=next_position, digest=digest, **tensors)

    def _refuse_vision_tokens(self, example: Example) -> None:
        """Text that spells a vision token would become a placeholder without media (or with another item's)."""
        for text in _texts(example.prompt):
            found = [token for token in self._vision_tokens if token in text]
            if found:
                raise RowError(
                    f"row {example.index}: the prompt's text holds the vision token {found[0]!r}; "
                    'media are placed by {"type": "image"} and {"type": "video"} parts, remove it from the text'
                )

    def _render(self, example: Example) -> str:
        if isinstance(example.prompt, str):
            return example.prompt
        try:
            text: str = self._processor.apply_chat_template(example.prompt, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise RowError(f"row {example.index}: the chat template refuses the prompt ({error})") from error
        for token, count in (
            (self._processor.image_token, len(example.images)),
            (self._processor.video_token, len(example.videos)),
        ):
            if text.count(token) != count:
                raise RowError(
                    f"row {example.index}: the chat template wrote {text.count(token)} {token} for {count} media; "
                    "every media part must become exactly one placeholder"
                )
        return text

    def _process(self, example: Example, text: str) -> Mapping[str, Any]:
        kwargs: dict[str, Any] = {}
        if example.images:
            kwargs["images"] = list(example.images)
            kwargs["images_kwargs"] = self._image_size()
        if example.videos:
            kwargs["videos"] = [clip.frames for clip in example.videos]
            kwargs["videos_kwargs"] = {
                "do_sample_frames": False,
                "input_data_format": "channels_last",
                "video_metadata": [_metadata(clip) for clip in example.videos],
                **self._video_size(example),
            }
        # A templated chat already has all special tokens; a plain string gets what the tokenizer adds.
        text_kwargs = {"add_special_tokens": isinstance(example.prompt, str)}
        try:
            inputs: Mapping[str, Any] = self._processor(
                text=[text], text_kwargs=text_kwargs, return_tensors="pt", **kwargs
            )
        except (ValueError, RuntimeError, TypeError) as error:
            raise RowError(f"row {example.index}: the processor refuses the prompt ({error})") from error
        return inputs

    def _image_size(self) -> dict[str, Any]:
        return _size(self._processor.image_processor.size, self._data.min_pixels, self._data.max_pixels)

    def _video_size(self, example: Example) -> dict[str, Any]:
        low, high = self._data.min_pixels, self._data.max_pixels
        if self._family in _BUDGET_PER_CLIP:
            # min_pixels and max_pixels are areas of one frame. One call takes one budget: with clips of several
            # lengths the shortest decides, so that no frame exceeds max_pixels.
            frames = min(len(clip.frames) for clip in example.videos)
            low, high = low and low * frames, high and high * frames
        return _size(self._processor.video_processor.size, low, high)

    def _token_types(self, input_ids: torch.Tensor) -> torch.Tensor:
        types = torch.zeros(input_ids.shape, dtype=torch.int32)
        for kind, token_id in self._token_ids.items():
            types[input_ids == token_id] = kind
        return types

    def _check_media(self, example: Example, token_types: torch.Tensor, inputs: Mapping[str, Any]) -> None:
        """Each item's placeholder run has as many tokens as its grid has features, in order."""
        for kind, name, count, key, pixels in (
            (IMAGE, "image", len(example.images), "image_grid_thw", "pixel_values"),
            (VIDEO, "video", len(example.videos), "video_grid_thw", "pixel_values_videos"),
        ):
            grids = inputs[key].tolist() if key in inputs else []
            if len(grids) != count:
                raise RowError(f"row {example.index}: {count} {name}s went in, {len(grids)} {name} grids came out")
            patches = sum(t * h * w for t, h, w in grids)
            if count and len(inputs[pixels]) != patches:
                raise ModelError(
                    f"row {example.index}: {pixels} has {len(inputs[pixels])} patches, its grids {grids} need {patches}"
                )
            wanted: list[int] = []
            for t, h, w in grids:
                if kind == VIDEO and self._family in _RUN_PER_TIME_STEP:
                    wanted += [h * w // self._merge_area] * t
                else:
                    wanted.append(t * h * w // self._merge_area)
            found = _run_lengths(token_types, kind)
            if found != wanted:
                raise RowError(
                    f"row {example.index}: {name} placeholder runs have {found} tokens, the grids need {wanted}; "
                    "the chat template must set every media item apart"
                )

    def _positions(self, input_ids: torch.Tensor, token_types: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        """int64 (3, P), as the family's own get_rope_index gives them; text counts up on all three axes."""
        if not bool(token_types.any()):
            return torch.arange(len(input_ids)).expand(3, -1).clone()
        extra = {"second_per_grid_ts": inputs["second_per_grid_ts"]} if "second_per_grid_ts" in inputs else {}
        positions: torch.Tensor = self._rope.get_rope_index(
            input_ids[None],
            mm_token_type_ids=token_types[None],
            image_grid_thw=inputs.get("image_grid_thw"),
            video_grid_thw=inputs.get("video_grid_thw"),
            **extra,
        )[0]
        return positions[:, 0].contiguous()


def _rope_without_weights(model_class: Any, model_config: Any) -> Any:
    """An instance of the transformers model with a configuration and no weights: get_rope_index reads nothing else."""
    shell = model_class.__new__(model_class)
    torch.nn.Module.__init__(shell)
    shell.config = model_config
    return shell


def _vision_tokens(processor: Any, model_config: Any) -> tuple[str, ...]:
    """The strings of the family's vision tokens; refuses a tokenizer that numbers them differently from the model."""
    tokens = []
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        wanted = getattr(model_config, name)
        token = processor.tokenizer.convert_ids_to_tokens(wanted)
        if token is None:
            raise ModelError(f"the model's {name} {wanted} is not in the tokenizer's {len(processor.tokenizer)} tokens")
        tokens.append(token)
    for attribute, token in (("image_token", tokens[0]), ("video_token", tokens[1])):
        if getattr(processor, attribute) != token:
            raise ModelError(
                f"the processor's {attribute} is {getattr(processor, attribute)!r}, the model's id is {token!r}; "
                "they are not from one checkpoint"
            )
    return tuple(tokens)


def _check_patches(processor: Any, vision_config: Any) -> None:
    """Refuse a processor that cuts pictures into other patches than the vision tower takes."""
    for name, model_name in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ):
        wanted = getattr(vision_config, model_name)
        for kind, part in (("image", processor.image_processor), ("video", processor.video_processor)):
            if getattr(part, name) != wanted:
                raise ModelError(
                    f"the {kind} processor's {name} is {getattr(part, name)}, the model's {model_name} {wanted}; "
                    "they are not from one checkpoint"
                )


def _texts(prompt: list[dict[str, Any]] | str) -> list[str]:
    """All text of a prompt; neighbouring text parts are joined, since the template writes them without a gap."""
    if isinstance(prompt, str):
        return [prompt]
    texts = []
    for message in prompt:
        content = message.get("content") or ""
        if isinstance(content, str):
            texts.append(content)
        else:
            texts += "".join(p["text"] if p["type"] == "text" else "\0" for p in content).split("\0")
    return texts


def _metadata(clip: VideoClip) -> VideoMetadata:
    return VideoMetadata(
        total_num_frames=clip.total_frames,
        fps=clip.fps if clip.source_fps is None else clip.source_fps,
        height=clip.frames.shape[1],
        width=clip.frames.shape[2],
        frames_indices=list(clip.frame_indices),  # a fresh list: the processor appends to it for odd frame counts
    )


def _size(size: Any, low: int | None, high: int | None) -> dict[str, Any]:
    """The processor call's `size` for a pixel range; {} leaves the processor's own."""
    if low is None and high is None:
        return {}
    shortest = size["shortest_edge"] if low is None else low
    longest = size["longest_edge"] if high is None else high
    # A limit on one side wins over the processor's default on the other.
    if shortest > longest:
        shortest, longest = (longest, longest) if low is None else (shortest, shortest)
    return {"size": {"shortest_edge": shortest, "longest_edge": longest}}


def _run_lengths(token_types: torch.Tensor, kind: int) -> list[int]:
    values, lengths = torch.unique_consecutive(token_types, return_counts=True)
    return [int(n) for v, n in zip(values, lengths, strict=True) if int(v) == kind]


def _settings(processor: Any, data_config: DataConfig, family: str) -> bytes:
    """Everything about the processing that the tensors of one prompt do not show, as canonical JSON."""
    settings = {
        "family": family,
        "transformers": transformers.__version__,
        "image": processor.image_processor.to_dict(),
        "video": processor.video_processor.to_dict(),
        "min_pixels": data_config.min_pixels,
        "max_pixels": data_config.max_pixels,
    }
    return json.dumps(settings, sort_keys=True, default=str).encode()


def _digest(settings: bytes, tensors: Mapping[str, torch.Tensor | None]) -> str:
    digest = hashlib.sha256(settings)
    for name, tensor in tensors.items():
        digest.update(name.encode())
        if tensor is not None:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
