"""The nouns that flow through a step. Frozen data only: no behaviour beyond small derived values, no torch at import.

    Example --models.prompts--> PromptSpec --rollout--> Response x N --> Group --rewards--> ScoredGroup
        --train--> StepReport

Shape letters used in the whole code base: G groups, N responses per group, P prompt (prefix) tokens, R response
tokens, T packed tokens, V visual tokens, L layers, H heads, D head dim, C channels (hidden size).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image


PatchGrid = tuple[int, int, int]
"""One image or video in patches: (frames, rows, columns), as the processors give it (`image_grid_thw`)."""


@dataclass(frozen=True, slots=True)
class VideoClip:
    """Decoded frames of one video, before the processor.

    Example: VideoClip(frames=<uint8 (8, 112, 112, 3)>, fps=2.0, frame_indices=(0, 12, ...), total_frames=96,
    source="a.mp4")
    """

    frames: np.ndarray  # uint8, (frames, height, width, 3), RGB
    fps: float  # frames per second of `frames` as sampled
    frame_indices: tuple[int, ...]  # index of each kept frame in the source
    total_frames: int  # frames in the source
    source: str  # path or a short name, for error messages
    source_fps: float | None = None  # frames per second of the source; None: same as fps


@dataclass(frozen=True, slots=True)
class Example:
    """One data row in TRL's shape: a chat or plain string as prompt, its media in order, further columns for rewards.

    Example: Example(0, [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}],
    (img,), (), {"answer": "3"})
    """

    index: int  # row number in the source; every error about this row names it
    # Structured chat messages with one {"type": "image"|"video"} part per item of the media, or a plain string.
    prompt: list[dict[str, Any]] | str
    images: tuple[Image.Image, ...] = ()
    videos: tuple[VideoClip, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)  # all other columns, passed to the reward functions


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Everything that shapes a prompt's prefix, made once by the processor and read by every consumer.

    `digest` identifies it (token ids, media values and order, grids, positions, processor settings); together with a
    weight version it identifies the prefix. Tensors live on the CPU; consumers move them.
    """

    row: int  # Example.index, for messages
    input_ids: torch.Tensor  # int64 (P,), placeholders expanded
    positions: torch.Tensor  # int64 (3, P), MRoPE ids (t, h, w)
    next_position: int  # one past the last prompt token's id: where every response starts on all three axes (not P)
    token_types: torch.Tensor  # int32 (P,): 0 text, 1 image, 2 video
    pixel_values: torch.Tensor | None  # (patches, patch_dim) of all images
    image_grid_thw: torch.Tensor | None  # int64 (images, 3)
    pixel_values_videos: torch.Tensor | None  # (patches, patch_dim) of all videos
    video_grid_thw: torch.Tensor | None  # int64 (videos, 3)
    digest: str  # sha256 hex

    @property
    def num_tokens(self) -> int:
        """P, the prompt's length with media expanded."""
        return int(self.input_ids.shape[0])


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # a stop id was sampled (it is part of token_ids)
    LENGTH = "length"  # max_completion_length was reached


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled completion.

    Example: Response(index=2, token_ids=(51, 7, 3), logps=(-0.1, -1.2, -0.01), finish=FinishReason.STOP)
    """

    index: int  # position inside its group; with (seed, step, prompt) it keys the randomness
    token_ids: tuple[int, ...]  # at least one; a sampled stop id is included
    logps: tuple[float, ...]  # behaviour log-probs of token_ids at the sampling temperature, before top-k/p/min-p
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Group:
    """All responses to one prompt in one rollout; identified by rollout_id, never by equal tokens."""

    rollout_id: int  # unique within the run: step * prompts_per_step + slot
    example: Example
    spec: PromptSpec
    responses: tuple[Response, ...]  # in index order
    weight_version: int  # policy weights that sampled them


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with rewards and advantages, one per response."""

    group: Group
    rewards: tuple[float | None, ...]  # weighted sum over functions; None when no function applied
    reward_parts: Mapping[str, tuple[float | None, ...]]  # per reward function
    advantages: tuple[float, ...]
    extras: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # log_extra columns of the reward functions


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step or rollout measured. Keys are TRL's metric names plus ours (docs/metrics.md)."""

    step: int
    metrics: Mapping[str, float]
