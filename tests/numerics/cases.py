"""Prompts of every kind and sampled groups for the numerics tests, for both families."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from conftest import INITIALIZER_RANGE, TOKENIZER_TEXTS
from numerics.oracle import OracleGroup
from rollplex.config import BuildConfig, Config, DataConfig
from rollplex.models.build import build_model, build_processor, cast_parameters
from rollplex.models.load import LoadedModel
from rollplex.models.policy import Policy
from rollplex.models.prefix import Activations
from rollplex.models.prompts import PromptBuilder
from rollplex.rollout.engine import RolloutEngine
from rollplex.train.advantage import compute_advantages
from rollplex.train.optimizer import OptimizerStep, PolicyOptimizer
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.reference import Reference
from rollplex.train.update import Updater
from rollplex.types import Example, FinishReason, Group, PromptSpec, Response, ScoredGroup, VideoClip

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
MODES = ("graph", "checkpoint", "recompute")
TEMPORAL_PATCH = 2  # frames per temporal patch of both families
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
ASK = {"type": "text", "text": "How many red squares are in the image?"}
SHORT = {"type": "text", "text": "Count."}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise: every patch differs from every other."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def clip(frames: int, size: tuple[int, int], fps: float = 2.0, seed: int = 0) -> VideoClip:
    """Noise video."""
    array = np.random.default_rng(seed).integers(0, 255, (frames, *size, 3), dtype=np.uint8)
    return VideoClip(array, fps, tuple(range(frames)), frames, "clip", fps)


def _example(index: int, *parts: dict[str, str], images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Example:
    return Example(index, [{"role": "user", "content": [*parts]}], tuple(images), tuple(videos))


EXAMPLES: dict[str, Example] = {
    "image": _example(0, IMAGE, ASK, images=[picture(64, 64)]),
    "two_images": _example(1, IMAGE, ASK, IMAGE, images=[picture(64, 96, 1), picture(130, 70, 2)]),
    "video": _example(2, VIDEO, SHORT, videos=[clip(4, (64, 64), 2.0, 3)]),
    "text": _example(3, ASK),
    "short_text": _example(4, SHORT),
    "text_then_images": _example(5, SHORT, ASK, IMAGE, IMAGE, images=[picture(96, 64, 4), picture(64, 64, 5)]),
    "video_image": _example(6, VIDEO, SHORT, IMAGE, images=[picture(100, 60, 6)], videos=[clip(4, (64, 96), 1.0, 7)]),
    "image_video_image": _example(
        7,
        *(IMAGE, VIDEO, SHORT, IMAGE),
        images=[picture(64, 64, 8), picture(70, 120, 9)],
        videos=[clip(3, (64, 64), 2.0, 10)],
    ),
    "two_videos": _example(8, VIDEO, VIDEO, SHORT, videos=[clip(2, (64, 64), 2.0, 11), clip(6, (96, 64), 4.0, 12)]),
    "odd_image": _example(9, IMAGE, ASK, images=[picture(333, 61, 13)]),
    "same_image": _example(10, IMAGE, ASK, images=[picture(64, 64)]),
    "slow_video": _example(11, VIDEO, SHORT, IMAGE, images=[picture(64, 64, 14)], videos=[clip(6, (64, 64), 0.25, 15)]),
}
MIXES: dict[str, tuple[str, ...]] = {
    "image": ("image",),
    "two_images": ("two_images",),
    "video": ("video",),
    "text": ("text",),
    "mixed": ("image", "two_images", "video", "text", "video_image"),
}


@dataclass(frozen=True)
class Rig:
    """A model with what it takes to make prompts for it."""

    loaded: LoadedModel
    policy: Policy
    builder: PromptBuilder

    @property
    def plain_vocab(self) -> int:
        """Ids below this are ordinary tokens (special tokens come last)."""
        return int(self.loaded.processor.tokenizer.convert_tokens_to_ids("<|endoftext|>"))

    def specs(self, names: Sequence[str]) -> list[PromptSpec]:
        """PromptSpecs of the named examples; row numbers as listed."""
        return [replace(self.builder.build(EXAMPLES[name]), row=row) for row, name in enumerate(names)]


@cache
def _weights(family: str, options: tuple[tuple[str, Any], ...]) -> LoadedModel:
    processor = build_processor(family, TOKENIZER_TEXTS, 384)
    sizes = {"hidden_size": 64, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, **dict(options)}
    model = build_model(BuildConfig(family=family, **sizes), processor, seed=7, initializer_range=INITIALIZER_RANGE)
    return LoadedModel(model, processor)


def tiny_rig(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Rig:
    """A tiny model with wide weights (attention far from uniform), its own copy for each call."""
    cached = _weights(family, tuple(sorted(options.items())))
    model = copy.deepcopy(cached.model)
    cast_parameters(model, dtype)
    return rig(LoadedModel(model, cached.processor))


def rig(loaded: LoadedModel) -> Rig:
    """Prompts are kept small: at most 16 visual tokens a picture."""
    config = loaded.model.get_base_model().config if hasattr(loaded.model, "get_base_model") else loaded.model.config
    area = (config.vision_config.patch_size * config.vision_config.spatial_merge_size) ** 2
    builder = PromptBuilder(loaded.processor, config, DataConfig(min_pixels=2 * area, max_pixels=16 * area))
    return Rig(loaded, Policy(loaded.model), builder)


def sampled_tokens(engine: RolloutEngine, specs: Sequence[PromptSpec] = ()) -> dict[tuple[int, int], tuple[int, ...]]:
    """(rollout id, response index) -> tokens of all that `engine` has to sample, `specs` admitted in order before."""
    for number, spec in enumerate(specs):
        engine.admit(number, spec)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    while engine.busy:
        for finished in engine.step():
            key = finished.rollout_id, finished.response.index
            assert key not in found
            found[key] = finished.response.token_ids
    return found


def ragged_lengths(count: int, seed: int, longest: int = 9) -> list[int]:
    """Keyed lengths; the first is always 1."""
    rng = np.random.default_rng(seed)
    return [1, *(int(n) for n in rng.integers(1, longest + 1, size=count - 1))]


def groups_of(
    specs: Sequence[PromptSpec], names: Sequence[str], lengths: Sequence[Sequence[int]], vocab: int, seed: int = 0
) -> list[ScoredGroup]:
    """Groups of keyed random plain tokens with keyed rewards and the product's advantages."""
    rng = np.random.default_rng(seed)
    scored = []
    for number, (spec, name, sizes) in enumerate(zip(specs, names, lengths, strict=True)):
        responses = tuple(
            Response(i, tuple(int(t) for t in rng.integers(0, vocab, size=n)), (0.0,) * n, FinishReason.LENGTH)
            for i, n in enumerate(sizes)
        )
        rewards = tuple(float(r) for r in rng.normal(size=len(sizes)))
        group = Group(number, EXAMPLES[name], spec, responses, 0)
        scored.append(ScoredGroup(group, rewards, {}, _advantages(rewards)))
    return scored


def _advantages(rewards: tuple[float, ...]) -> tuple[float, ...]:
    return compute_advantages([rewards], estimator="group").values[0]


def oracle_group(scored: ScoredGroup, family: str) -> OracleGroup:
    """The same group as the oracle wants it. Qwen2.5-VL spaces the time axis of videos by the clip's own seconds."""
    spec, example = scored.group.spec, scored.group.example
    inputs: dict[str, torch.Tensor] = {
        "input_ids": spec.input_ids[None],
        "mm_token_type_ids": spec.token_types[None],
    }
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        value = getattr(spec, key)
        if value is not None:
            inputs[key] = value
    if family == "qwen2_5_vl" and example.videos:
        inputs["second_per_grid_ts"] = torch.tensor([TEMPORAL_PATCH / video.fps for video in example.videos])
    rewards = tuple(float(r) for r in scored.rewards if r is not None)
    return OracleGroup(inputs, tuple(r.token_ids for r in scored.group.responses), rewards)


def moved(model: Any, scale: float = 0.01) -> Any:
    """A copy with slightly other weights: a reference that the policy has drifted from."""
    other = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.add_(scale * noise.to(parameter.dtype))
    return other


class RecordingOptimizer(PolicyOptimizer):
    """Keeps each step's gradient (before clipping) by parameter name."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.steps: list[dict[str, torch.Tensor]] = []

    def step(self) -> OptimizerStep:
        self.steps.append({n: m.grad.clone() for n, m in self.masters.items() if m.grad is not None})
        return super().step()


def config_of(**sections: dict[str, Any]) -> Config:
    """A configuration for Updater: dapo, no clipping of the gradient norm unless asked."""
    return Config.model_validate({"model": {"path": "unused"}, **sections})


def product_update(
    policy: Policy,
    scored: Sequence[ScoredGroup],
    config: Config,
    mode: Activations = "graph",
    *,
    reference: Reference | None = None,
    optimizer: RecordingOptimizer | None = None,
) -> list[dict[str, torch.Tensor]]:
    """One rollout's optimizer steps as the learner takes them; the gradient of each."""
    steps = config.algorithm.num_iterations * config.algorithm.steps_per_generation
    optimizer = optimizer or RecordingOptimizer(policy.model, config.train, steps)
    updater = Updater(policy, optimizer, reference, config)
    groups = [s.group for s in scored]
    book = None
    if config.train.share_prefix:
        book = PrefixBook(policy, config.train.micro_batch_tokens)
        first = len(groups) // config.algorithm.steps_per_generation
        book.compute({g.rollout_id: g.spec for g in groups[:first]}, mode)
        if first < len(groups):
            book.compute({g.rollout_id: g.spec for g in groups[first:]}, "none")
    updater.update(scored, book, updater.frozen_logps(groups, book))
    return optimizer.steps


def relative_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Relative L2 error over the whole parameter vector; a tensor that only one side has counts in full."""
    wrong = norm = 0.0
    for name in wanted.keys() | found.keys():
        a, b = found.get(name), wanted.get(name)
        if b is not None:
            norm += float((b.double() ** 2).sum())
        difference = a.double() - b.double() if a is not None and b is not None else (a if b is None else b)
        wrong += float((difference.double() ** 2).sum())
    return (wrong / norm) ** 0.5 if norm else float(wrong > 0)
