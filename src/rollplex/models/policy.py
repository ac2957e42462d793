"""A model with its adapter and its weight version: what rollout and training hold on to."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rollplex.models.adapter import VisionFeatures, VlmAdapter, adapter_for
from rollplex.models.ranks import ALONE, TensorRanks
from rollplex.types import PromptSpec

# Features of a frozen tower that are kept, in bytes; the oldest go first.
VISION_CACHE_BYTES = 1 << 30


@dataclass
class VisionCache:
    """Features of a frozen vision tower by prompt digest and path, least recently used first, bounded in bytes.
    Thread-safe: a reference shares it, whose passes may run beside the policy's."""

    limit_bytes: int = VISION_CACHE_BYTES
    num_bytes: int = 0
    entries: OrderedDict[tuple[str, bool], VisionFeatures] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def get(self, key: tuple[str, bool]) -> VisionFeatures | None:
        """The cached features, now most recently used."""
        with self._lock:
            if key in self.entries:
                self.entries.move_to_end(key)
            return self.entries.get(key)

    def clear(self) -> None:
        """Forget all features."""
        with self._lock:
            self.entries.clear()
            self.num_bytes = 0

    def put(self, key: tuple[str, bool], features: VisionFeatures) -> None:
        """Keep `features`, dropping the least recently used ones beyond the limit."""
        with self._lock:
            if key in self.entries:  # two threads missed it
                self.num_bytes -= _num_bytes(self.entries.pop(key))
            self.entries[key] = features
            self.num_bytes += _num_bytes(features)
            while self.num_bytes > self.limit_bytes and self.entries:
                _, old = self.entries.popitem(last=False)
                self.num_bytes -= _num_bytes(old)


def _num_bytes(features: VisionFeatures) -> int:
    return sum(t.numel() * t.element_size() for t in (features.embeds, *features.deepstack))


class Policy:
    """The model, its family adapter, and the version of its weights (bumped by each optimizer step).

    `encode_calls` counts prompts whose media went through the vision tower (metric vision/encode_calls).
    `chunk_tokens`: rows that one kernel of a prompt pass takes, None: all (row_chunks.py). It decides the order of
    sums, so that it is one for all passes and never changes.
    """

    def __init__(self, model: Any, ranks: TensorRanks = ALONE, *, chunk_tokens: int | None = None):
        self.model = model
        self.adapter: VlmAdapter = adapter_for(model, ranks)
        self.chunk_tokens: Final = chunk_tokens
        self.weight_version = 0
        self.encode_calls = 0
        self.vision_frozen = not any(p.requires_grad for p in self.adapter.visual.parameters())
        self.vision_cache = VisionCache()

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.adapter.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and compute."""
        return self.adapter.lm_head.weight.dtype

    def bump(self) -> None:
        """The weights changed: everything computed from older ones is stale from here on."""
        self.weight_version += 1

    def published(self) -> None:
        """New weights arrived through a backing, from a trainer that may train the tower which stands still here."""
        self.bump()
        self.vision_cache = VisionCache(self.vision_cache.limit_bytes)

    def encode(self, specs: Sequence[PromptSpec], *, ordinary: bool = False) -> VisionFeatures | None:
        """Vision features of `specs` in order. A frozen tower runs once per prompt digest and path, never under
        autograd. ordinary: as VlmAdapter.encode."""
        if not self.vision_frozen:
            self.encode_calls += sum(_has_media(spec) for spec in specs)
            return self.adapter.encode(specs, ordinary=ordinary)
        parts = [self._encode_frozen(spec, ordinary) for spec in specs if _has_media(spec)]
        if not parts:
            return None
        embeds = torch.cat([part.embeds for part in parts])
        deepstack = tuple(torch.cat(level) for level in zip(*(part.deepstack for part in parts), strict=True))
        return VisionFeatures(embeds, deepstack)

    def _encode_frozen(self, spec: PromptSpec, ordinary: bool) -> VisionFeatures:
        features = self.vision_cache.get((spec.digest, ordinary))
        if features is None:
            self.encode_calls += 1
            with torch.no_grad():
                encoded = self.adapter.encode([spec], ordinary=ordinary)
            assert encoded is not None  # only called for prompts with media
            self.vision_cache.put((spec.digest, ordinary), encoded)
            features = encoded
        return features


def _has_media(spec: PromptSpec) -> bool:
    return spec.pixel_values is not None or spec.pixel_values_videos is not None
