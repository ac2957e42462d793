"""Weights into hosts in bounded buckets: as the tensors themselves, or through memory that other processes map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rollplex.models.tensor_files import StoredTensor
from rollplex.weights.segment import Handle, Segment

_ALIGNMENT_BYTES = 64  # a tensor's start; every dtype divides it


@dataclass(frozen=True, slots=True)
class DirectBucket:
    """Tensors of this very process: nothing is copied on the way."""

    stored: tuple[StoredTensor, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs. They keep their values as long as the policy is not written to."""
        return ((item.name, item.read()) for item in self.stored)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in shared memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """Tensors in memory that other processes map. Small: it is what crosses the process border."""

    memory: Handle
    places: tuple[Place, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs, copied out: the memory holds the next bucket soon, while layers that are fused of
        several tensors keep what they have until they are complete."""
        memory = Segment.attach(self.memory).memory
        for place in self.places:
            raw = memory[place.start : place.start + place.num_bytes].clone()
            yield place.name, raw.view(place.dtype).view(place.shape)


def fill(segment: Segment, stored: Sequence[StoredTensor]) -> SharedBucket:
    """Overwrite what `segment` holds by `stored`, which must take no more of it than there is (`bucket_bytes`)."""
    places, start = [], 0
    for item in stored:
        tensor = item.read().contiguous()
        raw = tensor.view(-1).view(torch.uint8)
        segment.memory[start : start + len(raw)].copy_(raw)
        places.append(Place(item.name, tensor.dtype, tuple(tensor.shape), start, len(raw)))
        start += _room(len(raw))
    segment.synchronize()
    return SharedBucket(segment.handle, tuple(places))


def in_buckets(tensors: Iterable[StoredTensor], limit_bytes: int) -> Iterator[list[StoredTensor]]:
    """`tensors` in order, in runs that take at most `limit_bytes` of shared memory; a larger tensor is a run alone."""
    bucket: list[StoredTensor] = []
    taken = 0
    for item in tensors:
        if bucket and taken + _room(item.num_bytes) > limit_bytes:
            yield bucket
            bucket, taken = [], 0
        bucket.append(item)
        taken += _room(item.num_bytes)
    if bucket:
        yield bucket


def bucket_bytes(bucket: Sequence[StoredTensor]) -> int:
    """Bytes of shared memory that `bucket` takes."""
    return sum(_room(item.num_bytes) for item in bucket)


def _room(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
