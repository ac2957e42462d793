"""Keys and values of live responses in caches of just the size that they need: `LiveRows` without fixed shapes.

Shape letters: B live rows, G live groups, H/K query and key/value heads, D head dim, P longest prompt, R longest suffix
so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from rollplex.models.prefix import PrefixPack
from rollplex.rollout.decode import Caches, DecodeModel
from rollplex.rollout.decode_buckets import table, widest
from rollplex.rollout.two_level import Grid, LayerCaches, Seen, Sight, Written, bias_where
from rollplex.rollout.uninterrupted import held

# Suffix caches grow by this many tokens at a time, so that short responses do not pay for max_completion_length.
SUFFIX_BLOCK = 64


class PromptCache:
    """Keys and values of live prompts, stacked over groups, each held once and read once per step for its group."""

    def __init__(self, model: DecodeModel):
        self.shape, self.device, self.root_scaling = model.shape, model.policy.device, model.root_scaling
        self.parts: dict[int, tuple[PrefixPack, int]] = {}
        self.stale = True
        self.keys: list[torch.Tensor] = []  # per layer (G * K, D, P), scaled
        self.values: list[torch.Tensor] = []  # per layer (G * K, P, D)
        self._held: object = None
        self.seen = Seen(0)  # -inf behind shorter prompts; no bias: equal lengths
        self.grid = Grid(0, 0)

    def __contains__(self, rollout_id: int) -> bool:
        return rollout_id in self.parts

    def add(self, rollout_id: int, pack: PrefixPack, number: int) -> None:
        """A prompt becomes live."""
        self.parts[rollout_id] = (pack, number)
        self.stale = True

    def remove(self, rollout_id: int) -> None:
        """The prompt's last response ended."""
        del self.parts[rollout_id]
        self.stale = True

    def assign(self, owners: list[int]) -> None:
        """Which group each live row belongs to; restacks keys and values when the set of groups changed."""
        if not owners:
            return
        if self.stale:
            self._stack()
        slot_of = {rollout_id: slot for slot, rollout_id in enumerate(self.parts)}
        slots = [slot_of[owner] for owner in owners]
        width = widest(slots)
        rows, cells = table(slots, len(slot_of), width)
        if rows == list(range(len(owners))):
            self.grid = Grid(len(slot_of), width)
        else:
            on_device = (torch.tensor(numbers, device=self.device) for numbers in (rows, cells))
            self.grid = Grid(len(slot_of), width, *on_device)

    def _stack(self) -> None:
        """In few calls (models/norms.py), with one layer's keys or values twice at most."""
        rows = [pack.rows(number) for pack, number in self.parts.values()]
        lengths = [part.stop - part.start for part in rows]
        longest = max(lengths)
        self.keys, self.values, self._held = [], [], None
        for layer in range(self.shape.num_layers):
            keys = [pack.keys[layer][part] for (pack, _), part in zip(self.parts.values(), rows, strict=True)]
            scaled = keys[0].new_empty(len(rows), self.shape.num_kv_heads, self.shape.head_dim, longest)
            padded = pad_sequence(keys, batch_first=True).permute(0, 2, 3, 1)
            self.keys.append(torch.mul(padded, self.root_scaling, out=scaled).flatten(0, 1))
            del padded
            values = [pack.values[layer][part] for (pack, _), part in zip(self.parts.values(), rows, strict=True)]
            self.values.append(pad_sequence(values, batch_first=True).transpose(1, 2).contiguous().flatten(0, 1))
        bias = None
        if min(lengths) < longest:
            behind = torch.arange(longest, device=self.device) >= torch.tensor(lengths, device=self.device)[:, None]
            bias = bias_where(behind, self.keys[0].dtype)
        self.seen = Seen(longest, bias)
        self._held = held(self.keys, self.values)
        self.stale = False


class SuffixCache:
    """Keys and values of generated tokens, one row per live response."""

    def __init__(self, model: DecodeModel, max_tokens: int):
        self.model, self.max_tokens = model, max_tokens
        self.num_rows = 0
        self.lengths: list[int] = []  # tokens fed so far, per row
        self.first: list[int] = []  # position of the first response token, per row
        self.keys: list[torch.Tensor] = []  # per layer (rows, K, capacity, D)
        self.values: list[torch.Tensor] = []
        self._held: object = None
        self.positions_B = torch.empty(0, dtype=torch.long)
        self.seen = Seen(0)
        self.written: Written | None = None  # as `Sight` has it

    def grow_rows(self, num_rows: int, first_positions: list[int]) -> None:
        """Room for `num_rows` rows; the new ones are empty."""
        self.first.extend(first_positions)
        self.lengths.extend([0] * len(first_positions))
        self.num_rows = num_rows
        self.model.ensure_positions(max(self.first) + self.max_tokens)
        capacity = self.keys[0].shape[2] if self.keys else 0
        if not self.keys or self.keys[0].shape[0] < num_rows:
            self._resize(num_rows, max(capacity, min(SUFFIX_BLOCK, self.max_tokens)))

    def drop_row(self, slot: int) -> None:
        """Row `slot` ended; the last row takes its place."""
        last = self.num_rows - 1
        if slot != last:
            for tensors in (self.keys, self.values):
                for tensor in tensors:
                    tensor[slot].copy_(tensor[last])
            self.lengths[slot], self.first[slot] = self.lengths[last], self.first[last]
        self.lengths.pop()
        self.first.pop()
        self.num_rows = last

    def begin_token(self) -> None:
        """Fix where this step's keys and values go and which of them each row may see."""
        device = self.model.policy.device
        used = max(self.lengths) + 1
        if used > self.keys[0].shape[2]:
            capacity = self.keys[0].shape[2]
            self._resize(self.keys[0].shape[0], min(self.max_tokens, max(2 * capacity, used)))
        positions = [first + length for first, length in zip(self.first, self.lengths, strict=True)]
        self.positions_B = torch.tensor(positions, device=device)
        if min(self.lengths) + 1 == used:
            self.written, self.seen = None, Seen(used)
            return
        lengths_B = torch.tensor(self.lengths, device=device)
        self.written = Written(torch.arange(self.num_rows, device=device), lengths_B)
        hidden = torch.arange(used, device=device) > lengths_B[:, None]
        self.seen = Seen(used, bias_where(hidden, self.keys[0].dtype))

    def end_token(self) -> None:
        """This step's token now counts."""
        self.lengths = [length + 1 for length in self.lengths]

    def _resize(self, rows: int, capacity: int) -> None:
        shape = self.model.shape
        self._held = None  # else every layer's old caches stay until the last one's are copied
        for tensors in (self.keys, self.values):
            for layer in range(shape.num_layers):
                # zeros, not empty: masked places must hold finite values, 0 * nan is nan
                fresh = torch.zeros(
                    rows,
                    shape.num_kv_heads,
                    capacity,
                    shape.head_dim,
                    dtype=self.model.policy.dtype,
                    device=self.model.policy.device,
                )
                if layer < len(tensors):
                    old = tensors[layer]
                    fresh[: old.shape[0], :, : old.shape[2]] = old
                    tensors[layer] = fresh
                else:
                    tensors.append(fresh)
        self._held = held(self.keys, self.values)


class GrownRows:
    """LiveRows in caches that are made anew when the set of prompts changes, and grow with the longest suffix."""

    def __init__(self, model: DecodeModel, max_tokens: int):
        self.model, self.prompts, self.suffix = model, PromptCache(model), SuffixCache(model, max_tokens)
        self.owners: list[int] = []
        self._moved = False  # rows belong to other cells than in the last step

    def join(self, rollout_id: int, pack: PrefixPack, number: int) -> None:
        if rollout_id not in self.prompts:
            self.prompts.add(rollout_id, pack, number)

    def leave(self, rollout_id: int) -> None:
        self.prompts.remove(rollout_id)

    def add(self, owners: Sequence[int], first_positions: Sequence[int]) -> None:
        self.owners.extend(owners)
        self.suffix.grow_rows(len(self.owners), list(first_positions))
        self._moved = True

    def drop(self, row: int) -> None:
        last = self.owners.pop()
        if row < len(self.owners):
            self.owners[row] = last
        self.suffix.drop_row(row)
        self._moved = True

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        if self._moved:
            self.prompts.assign(self.owners)
            self._moved = False
        fed_B = torch.tensor(tokens, device=self.model.policy.device)
        self.suffix.begin_token()
        layers = zip(self.prompts.keys, self.prompts.values, self.suffix.keys, self.suffix.values, strict=True)
        caches = Caches(
            [LayerCaches(*tensors) for tensors in layers],
            Sight(self.prompts.seen, self.suffix.seen, self.prompts.grid, self.suffix.written),
        )
        logits_BV = self.model.next_logits(fed_B, self.suffix.positions_B, caches)
        self.suffix.end_token()
        return logits_BV
