"""What a step is fed, as numbers: prompts with their media, and the lengths of the responses to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from rollplex.models.shapes import VisionShape
from rollplex.types import PatchGrid


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's length, media expanded, and the patches behind its visual tokens.

    Example: Prompt(40, ((1, 8, 12),)) has 24 visual tokens where a token is 2 x 2 patches.
    """

    tokens: int
    grids: tuple[PatchGrid, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1 or any(size < 1 for grid in self.grids for size in grid):
            raise ValueError(f"a prompt has tokens and media of at least one patch, found {self}")

    @property
    def patches(self) -> int:
        """Patches of all media."""
        return sum(t * h * w for t, h, w in self.grids)


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One prompt and the lengths of its responses, each at least 1."""

    prompt: Prompt
    responses: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.responses or min(self.responses) < 1:
            raise ValueError(f"a group has responses of at least one token, found {self.responses}")

    @property
    def response_tokens(self) -> int:
        """Of all responses."""
        return sum(self.responses)


def video_prompt(tokens: int, visual_tokens: int, vision: VisionShape, tokens_per_frame: int = 256) -> Prompt:
    """A prompt whose visual tokens are one video of nearly square frames of about `tokens_per_frame` tokens each.

    For plans, which know how many visual tokens a prompt has but not their pictures. The grid has at most one frame's
    rest fewer tokens than asked for: whole frames only.
    """
    if visual_tokens == 0:
        return Prompt(tokens)
    if not 0 < visual_tokens <= tokens:
        raise ValueError(f"visual_tokens is {visual_tokens}, needed 0 to the prompt's {tokens}")
    height = max(1, isqrt(min(tokens_per_frame, visual_tokens)))
    width = min(tokens_per_frame, visual_tokens) // height
    merge = vision.spatial_merge_size
    return Prompt(tokens, ((max(1, visual_tokens // (height * width)), height * merge, width * merge),))


def window_sizes(grid: PatchGrid, vision: VisionShape) -> Iterator[tuple[int, int]]:
    """(patches in a window, how many such windows) of one frame; those at the right and lower edge are cut."""
    side = vision.window_size // vision.patch_size // vision.spatial_merge_size * vision.spatial_merge_size
    _, height, width = grid
    for rows, tall in ((side, height // side), (height % side, 1)):
        for columns, wide in ((side, width // side), (width % side, 1)):
            if rows and columns and tall and wide:
                yield rows * columns, tall * wide
