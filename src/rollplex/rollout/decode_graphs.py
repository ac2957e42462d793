"""Decoding with captured steps: which are kept, what they may rely on, and the rows that they decode.

A captured step reads the training weights in place and knows them by address. An optimizer step writes them where they
are, so nothing is captured anew; a weight that moved (fused, re-laid, loaded into other memory) is noticed when the
next engine opens, and all is captured again. Buffers and captures outlive engines, unless they are large (`rest`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollplex.config import Config
from rollplex.errors import ConfigError, StateError
from rollplex.models.policy import Policy
from rollplex.models.prefix import PrefixPack
from rollplex.rollout.capture import Capturer, Work, capturer_of
from rollplex.rollout.decode import DecodeModel
from rollplex.rollout.decode_buckets import Bucket, Limits, next_bucket, rounded, table, widest
from rollplex.rollout.fixed_step import FixedCaches, FixedStep, Numbers

logger = logging.getLogger(__name__)

MOST_KEPT = 2 << 30  # bytes of buffers while nothing decodes; recording anew costs less than an update without room
MOST_STEPS = 64  # captured; the one that was longest unused goes first
LEAST_POSITIONS = 1024  # of the rotary tables, which steps know by address too


def decode_graphs(config: Config, policy: Policy, *, processes: int = 1) -> DecodeGraphs | None:
    """Those of a run of so many processes, None where it decodes without. Raises ConfigError for
    rollout.decode_graphs=on where that cannot be done or would hold memory which is counted."""
    choice = config.rollout.decode_graphs
    if choice == "off" or (choice == "auto" and policy.device.type != "cuda"):
        return None
    reasons = {
        "memory.cap_gib is set, and padded caches that stay between rollouts are in no plan": (
            config.memory.cap_gib is not None
        ),
        "run.memory_steps is set, and padded caches that stay between rollouts are in no plan": (
            bool(config.run.memory_steps)
        ),
        f"{processes} processes share the work: a step has sums over them in it, or reads gathered weights": (
            processes > 1
        ),
    }
    found = "; ".join(reason for reason, holds in reasons.items() if holds)
    if not found:
        return DecodeGraphs(policy)
    if choice == "on":
        raise ConfigError(f"rollout.decode_graphs is on, but {found}; leave one of them out")
    logger.info("decoding without CUDA graphs (rollout.decode_graphs is auto): %s", found)
    return None


class DecodeGraphs:
    """Buffers and captured steps of one policy. One engine at a time decodes with them: the last to open."""

    def __init__(self, policy: Policy, capturer: Capturer | None = None):
        """capturer: absent, the one of the policy's device. Raises ConfigError for a policy divided among ranks."""
        if policy.adapter.ranks.size > 1:
            raise ConfigError(
                f"a decode step of {policy.adapter.ranks.size} tensor-parallel ranks has sums over processes in it, "
                "which are not captured; set rollout.decode_graphs=off"
            )
        self.policy = policy
        self.steps: OrderedDict[Bucket, tuple[FixedStep, Work]] = OrderedDict()
        self.caches: FixedCaches | None = None
        self.turn = 0  # of the engine that may decode; older ones may not
        self._capturer = capturer or capturer_of(policy.device)
        self._addresses: tuple[int, ...] = ()

    def open(self, limits: Limits) -> FixedRows:
        """Rows for one engine. What was captured before still serves it if no weight has moved. Raises ModelError for a
        decoder that a step cannot read."""
        if self.caches is None or _addresses(self.policy) != self._addresses:
            self.release()
            self.caches = FixedCaches(DecodeModel(self.policy))
            self._addresses = _addresses(self.policy)  # the model fuses what is not yet
        self.turn += 1
        return FixedRows(self, self.caches, limits)

    def step(self, bucket: Bucket, numbers: Numbers) -> torch.Tensor:
        """(bucket.rows, V) logits of one step, in memory that the next one overwrites. `make_room` was called."""
        assert self.caches is not None  # opened
        if bucket in self.steps:
            self.steps.move_to_end(bucket)
            step, replay = self.steps[bucket]
            step.feed(numbers)
        else:
            step = FixedStep(self.caches, bucket)
            step.feed(numbers)
            replay = self._capturer.captured(step.compute)
            self.steps[bucket] = step, replay
            logger.debug("decode step captured: %s, %d in all", bucket, len(self.steps))
            if len(self.steps) > MOST_STEPS:
                self.steps.popitem(last=False)
        replay()
        return self.caches.logits_BV[: bucket.rows]

    def make_room(self, bucket: Bucket) -> None:
        """Let the caches hold `bucket`; if they move, whatever was captured over them goes."""
        assert self.caches is not None  # opened
        if not self.caches.capacity.holds(bucket):
            self.steps.clear()
            self.caches.make_room(bucket)

    def reach(self, positions: int) -> None:
        """Rotary tables for that many positions; if they move, whatever was captured over them goes."""
        assert self.caches is not None  # opened
        model = self.caches.model
        if positions > model.cos_M1D.shape[0]:
            self.steps.clear()
            model.ensure_positions(rounded(positions, least=LEAST_POSITIONS))

    def rest(self, most_kept: int = MOST_KEPT) -> None:
        """Nothing decodes for a while: buffers of more than `most_kept` bytes are given back, with all steps."""
        if self.caches is not None and self.caches.nbytes > most_kept:
            logger.debug("decode buffers of %d bytes given back until the next rollout", self.caches.nbytes)
            self.release()

    def release(self) -> None:
        """Give all memory back. An engine that decodes cannot go on; the next one captures anew."""
        self.turn += 1
        self.steps.clear()
        self._capturer.release()
        self.caches = None


def _addresses(policy: Policy) -> tuple[int, ...]:
    """Where each weight is that decoding reads."""
    adapter = policy.adapter
    modules = (*adapter.layers, adapter.final_norm, adapter.embed, adapter.lm_head)
    return tuple(parameter.data_ptr() for module in modules for parameter in module.parameters())


@dataclass(slots=True)
class _Group:
    """A live prompt."""

    rollout_id: int
    pack: PrefixPack
    number: int
    placed: bool = False  # its keys and values are in the caches


class FixedRows:
    """LiveRows in the buffers of `graphs`. Groups too have no gaps: the last takes the place of one that ends."""

    def __init__(self, graphs: DecodeGraphs, caches: FixedCaches, limits: Limits):
        self.graphs, self.caches, self.limits = graphs, caches, limits
        self._turn = graphs.turn
        self.owners: list[int] = []
        self.lengths: list[int] = []  # tokens fed so far, per row
        self.first: list[int] = []  # position of the first response token, per row
        self.groups: list[_Group] = []
        self.bucket: Bucket | None = None

    def join(self, rollout_id: int, pack: PrefixPack, number: int) -> None:
        if all(group.rollout_id != rollout_id for group in self.groups):
            self.groups.append(_Group(rollout_id, pack, number))

    def leave(self, rollout_id: int) -> None:
        self._check_open()
        place = [group.rollout_id for group in self.groups].index(rollout_id)
        last = self.groups.pop()
        if place < len(self.groups):
            if last.placed:
                self.caches.move_prompt(len(self.groups), place)
            self.groups[place] = last

    def add(self, owners: Sequence[int], first_positions: Sequence[int]) -> None:
        self._check_open()
        self.owners.extend(owners)
        self.first.extend(first_positions)
        self.lengths.extend([0] * len(owners))
        self.graphs.reach(max(self.first) + self.limits.suffix)

    def drop(self, row: int) -> None:
        self._check_open()
        last = len(self.owners) - 1
        if row != last:
            if self.lengths[last]:
                self.caches.move_row(last, row)
            for values in (self.owners, self.lengths, self.first):
                values[row] = values[last]
        for values in (self.owners, self.lengths, self.first):
            values.pop()

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        self._check_open()
        slot_of = {group.rollout_id: slot for slot, group in enumerate(self.groups)}
        slots = [slot_of[owner] for owner in self.owners]
        prompts = [group.pack.lengths[group.number] for group in self.groups]
        need = Bucket(len(slots), len(prompts), widest(slots), max(prompts), max(self.lengths) + 1)
        is_first, self.bucket = self.bucket is None, next_bucket(self.bucket, need, self.limits)
        self.graphs.make_room(self.bucket)
        if is_first:
            self.caches.forget()
        for slot, group in enumerate(self.groups):
            if not group.placed:
                self.caches.put_prompt(slot, group.pack, group.number)
                group.placed = True
        rows, cells = table(slots, self.bucket.groups, self.bucket.width)
        positions = [first + length for first, length in zip(self.first, self.lengths, strict=True)]
        logits_BV = self.graphs.step(
            self.bucket, Numbers(tokens, positions, tuple(self.lengths), cells, rows, lengths=prompts)
        )
        self.lengths = [length + 1 for length in self.lengths]
        return logits_BV[: len(slots)]

    def _check_open(self) -> None:
        if self.graphs.turn != self._turn:
            raise StateError(
                "the decode buffers of this engine were given to one that opened later, or released; let an engine "
                "finish before the next one opens"
            )
