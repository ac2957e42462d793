"""A decode step over buffers of fixed shape: from one step to the next only their content changes.

The same function is recorded as a CUDA graph and, on a CPU, called (capture.py), so that tests of the one judge the
other. It makes the padding harmless. A row behind the live ones has token and position 0, a suffix of its own that it
writes at place 0, and sees that place. An empty cell has the queries of row 0, and nobody reads what it gets. A group
behind the live ones has a prompt of length 0. So padding makes no NaN and writes to no live row.

Shape letters as in two_level.py, of a bucket or of the caches that hold it; L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollplex.models.prefix import PrefixPack
from rollplex.rollout.decode import Caches, DecodeModel
from rollplex.rollout.decode_buckets import Bucket
from rollplex.rollout.two_level import Grid, LayerCaches, Seen, Sight, Written, bias_where


class FixedCaches:
    """Keys and values of prompts and suffixes in all layers, and the logits. A step sees as much as its bucket says."""

    def __init__(self, model: DecodeModel):
        self.model, self.capacity = model, Bucket(0, 0, 0, 0, 0)
        nothing = torch.empty(0, dtype=model.policy.dtype, device=model.policy.device)
        self.prompt_keys = nothing.view(0, 0, 0, 0, 0)  # (L, G, K, D, P)
        self.prompt_values = nothing.view(0, 0, 0, 0, 0)  # (L, G, K, P, D)
        self.suffix_keys = nothing.view(0, 0, 0, 0, 0)  # (L, B, K, R, D)
        self.suffix_values = nothing.view(0, 0, 0, 0, 0)
        self.logits_BV = nothing.view(0, 0)
        self.counts = torch.empty(0, dtype=torch.long, device=model.policy.device)  # 0, 1, 2, ...

    def make_room(self, bucket: Bucket) -> None:
        """Hold `bucket` too, and keep the content; tensors that had room already stay where they are."""
        size = self.capacity.joined(bucket)
        shape = self.model.shape
        layers, heads, dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        self.prompt_keys = _enlarged(self.prompt_keys, (layers, size.groups, heads, dim, size.prompt))
        self.prompt_values = _enlarged(self.prompt_values, (layers, size.groups, heads, size.prompt, dim))
        self.suffix_keys = _enlarged(self.suffix_keys, (layers, size.rows, heads, size.suffix, dim))
        self.suffix_values = _enlarged(self.suffix_values, (layers, size.rows, heads, size.suffix, dim))
        self.logits_BV = _enlarged(self.logits_BV, (size.rows, shape.vocab_size))
        count = max(size.rows, size.prompt, size.suffix)
        if count > len(self.counts):
            self.counts = torch.arange(count, device=self.counts.device)
        self.capacity = size  # last: out of memory may end this anywhere above

    @property
    def nbytes(self) -> int:
        """Of keys, values and logits."""
        held = (self.prompt_keys, self.prompt_values, self.suffix_keys, self.suffix_values, self.logits_BV)
        return sum(tensor.nbytes for tensor in held)

    def forget(self) -> None:
        """Zero keys and values: a NaN of a failed rollout would be met again, though masked (0 * nan is nan)."""
        for tensor in (self.prompt_keys, self.prompt_values, self.suffix_keys, self.suffix_values):
            tensor.zero_()

    def put_prompt(self, group: int, pack: PrefixPack, number: int) -> None:
        """Prompt `number` of `pack` becomes that of `group`."""
        length = pack.lengths[number]
        for layer in range(self.model.shape.num_layers):
            kv = pack.kv(layer, number, 1, with_grads=False)
            keys_KDP = kv.k_GKPD[0].transpose(1, 2) * self.model.root_scaling
            self.prompt_keys[layer, group, :, :, :length] = keys_KDP
            self.prompt_values[layer, group, :, :length] = kv.v_GKPD[0]

    def layers(self, size: Bucket) -> list[LayerCaches]:
        """So much of the buffers as `size` holds."""
        return [
            LayerCaches(
                keys[: size.groups, :, :, : size.prompt].flatten(0, 1),
                values[: size.groups, :, : size.prompt].flatten(0, 1),
                suffix_keys,
                suffix_values,
            )
            for keys, values, suffix_keys, suffix_values in zip(
                self.prompt_keys, self.prompt_values, self.suffix_keys, self.suffix_values, strict=True
            )
        ]

    def move_prompt(self, source: int, target: int) -> None:
        """The prompt of one group becomes that of another."""
        for tensor in (self.prompt_keys, self.prompt_values):
            tensor[:, target].copy_(tensor[:, source])

    def move_row(self, source: int, target: int) -> None:
        """The suffix of one row becomes that of another."""
        for tensor in (self.suffix_keys, self.suffix_values):
            tensor[:, target].copy_(tensor[:, source])


def _enlarged(old: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`old`, or where `shape` is larger a copy with zeros behind: masked places must be finite."""
    if old.shape == shape:
        return old
    fresh = torch.zeros(shape, dtype=old.dtype, device=old.device)
    fresh[tuple(slice(size) for size in old.shape)] = old
    return fresh


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a step is fed, of live rows and groups."""

    tokens: Sequence[int]  # of each row, as the next three
    positions: Sequence[int]
    places: Sequence[int]  # where the token's keys and values go: behind those of the suffix so far
    cells: Sequence[int]
    rows: Sequence[int]  # in each cell of the bucket
    lengths: Sequence[int]  # tokens of each group's prompt


class FixedStep:
    """The step of one bucket. `feed`, then `compute` or its replay; logits are then in the caches, row by row."""

    def __init__(self, caches: FixedCaches, bucket: Bucket):
        self.caches, self.bucket = caches, bucket
        rows, groups, cells = bucket.rows, bucket.groups, bucket.groups * bucket.width
        self._sizes = (rows, rows, rows, rows, cells, groups)
        self.inputs = torch.zeros(sum(self._sizes), dtype=torch.long, device=caches.counts.device)  # one copy for all
        parts = self.inputs.split(self._sizes)
        self.tokens_B, self.positions_B, self.places_B, self.cells_B, self.rows_GN, self.lengths_G = parts

    def feed(self, numbers: Numbers) -> None:
        """Copy this step's inputs into their buffer; rows and groups behind the live ones get 0."""
        fields = (numbers.tokens, numbers.positions, numbers.places, numbers.cells, numbers.rows, numbers.lengths)
        padded: list[int] = []
        for values, size in zip(fields, self._sizes, strict=True):
            padded += [*values, *[0] * (size - len(values))]
        self.inputs.copy_(torch.tensor(padded))

    def compute(self) -> None:
        """Reads and writes buffers alone, so it may be recorded; a second run changes nothing."""
        caches, bucket = self.caches, self.bucket
        dtype, counts = caches.logits_BV.dtype, caches.counts
        sight = Sight(
            Seen(bucket.prompt, bias_where(counts[: bucket.prompt] >= self.lengths_G[:, None], dtype)),
            Seen(bucket.suffix, bias_where(counts[: bucket.suffix] > self.places_B[:, None], dtype)),
            Grid(bucket.groups, bucket.width, self.rows_GN, self.cells_B),
            Written(counts[: bucket.rows], self.places_B),
        )
        seen = Caches(caches.layers(bucket), sight)
        caches.logits_BV[: bucket.rows] = caches.model.next_logits(self.tokens_B, self.positions_B, seen)
