"""The in-process rollout engine: continuous batched decoding on the training weights themselves.

Responses of all prompts decode together. Each prompt's keys and values come from its prefix pass and are held once per
group; every decode step reads them once for the whole group (two-level attention). A response that ends leaves the
batch at once: the last live row takes its slot, so that nothing else is copied. Weights are read in place
(models/fused.py), so there is nothing to publish after an optimizer step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollplex.errors import EngineError, StateError
from rollplex.models.policy import Policy
from rollplex.models.prefix import PrefixPack, compute_prefix
from rollplex.rollout.decode import DecodeModel, LiveRows
from rollplex.rollout.decode_buckets import Limits
from rollplex.rollout.decode_graphs import DecodeGraphs
from rollplex.rollout.engine import Finished, SamplingParams
from rollplex.rollout.grown_rows import GrownRows
from rollplex.rollout.sampling import Filters, choose, keyed_uniforms
from rollplex.rollout.uninterrupted import uninterrupted
from rollplex.types import FinishReason, PromptSpec, Response

PrefixSource = Callable[[int, PromptSpec], tuple[PrefixPack, int]]
"""(rollout id, prompt) -> the pack that holds its prefix, and the prompt's number in that pack."""


@dataclass(slots=True)
class _Row:
    """A live response."""

    rollout_id: int
    index: int
    tokens: list[int]
    logps: list[float]
    uniforms: list[float]  # one per token
    prompt: _Prompt


@dataclass(slots=True)
class _Prompt:
    """A prompt with live or waiting responses."""

    rollout_id: int
    spec: PromptSpec
    pack: PrefixPack
    number: int
    remaining: int


class LocalEngine:
    """RolloutEngine on the policy's own weights. One engine serves one rollout's sampling parameters at a time."""

    def __init__(
        self,
        policy: Policy,
        params: SamplingParams,
        *,
        max_rows: int,
        prefix_source: PrefixSource | None = None,
        graphs: DecodeGraphs | None = None,
    ):
        """graphs: buffers and captured steps to decode with; absent, lean steps in caches of this engine's own. Raises
        ModelError for a decoder that a step cannot read (decoder_weights.py)."""
        self.policy, self.params, self.max_rows = policy, params, max_rows
        self.prefix_source = prefix_source or self._own_prefix
        self.weight_version = policy.weight_version
        self.waiting: deque[_Row] = deque()
        self.rows: list[_Row] = []
        self.live: LiveRows
        if graphs is None:
            self.model = DecodeModel(policy)
            self.live = GrownRows(self.model, params.max_tokens)
        else:
            rows = graphs.open(Limits(rows=max_rows, width=params.num_generations, suffix=params.max_tokens))
            self.model, self.live = rows.caches.model, rows
        self.logits_BV: torch.Tensor | None = None
        self.seen_BV: torch.Tensor | None = None
        self.stop_ids = frozenset(params.stop_token_ids)
        banned = torch.tensor(params.banned_token_ids, dtype=torch.long, device=policy.device)
        self.filters = Filters(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            banned if params.banned_token_ids else None,
        )
        self._choose = uninterrupted(choose, policy.device)

    @property
    def busy(self) -> bool:
        """Whether any response is unfinished."""
        return bool(self.rows or self.waiting)

    def admit(self, rollout_id: int, spec: PromptSpec) -> None:
        """Queue all responses of a prompt. Its prefix is taken (or computed) now."""
        if not self.busy:
            self.weight_version = self.policy.weight_version
        pack, number = self.prefix_source(rollout_id, spec)
        pack.check_current()
        prompt = _Prompt(rollout_id, spec, pack, number, self.params.num_generations)
        for index in range(self.params.num_generations):
            draws = keyed_uniforms(self.params.seed, rollout_id, index, self.params.max_tokens)
            self.waiting.append(_Row(rollout_id, index, [], [], draws.tolist(), prompt))

    def step(self) -> list[Finished]:
        """One token for every live response. Raises StateError when the weights changed since they were admitted."""
        if self.busy and self.policy.weight_version != self.weight_version:
            raise StateError(
                f"responses admitted under weights v{self.weight_version} are still being sampled, the policy now has "
                f"v{self.policy.weight_version}; take an optimizer step only when the engine is not busy"
            )
        with torch.inference_mode():
            self._fill()
            if not self.rows:
                return []
            self._sample()
            finished = self._retire()
            self.logits_BV = None
            if self.rows:
                self.logits_BV = self.live.forward([row.tokens[-1] for row in self.rows])
        return finished

    def limit(self, _rollout_id: int, _index: int) -> int:
        """Most tokens of a response, at most `params.max_tokens`; benchmarks override it to fix how lengths spread."""
        return self.params.max_tokens

    def _own_prefix(self, _rollout_id: int, spec: PromptSpec) -> tuple[PrefixPack, int]:
        return compute_prefix(self.policy, [spec], "none"), 0

    def _fill(self) -> None:
        """Let waiting responses take free rows; their first logits come from their prompt's last hidden state."""
        fresh: list[_Row] = []
        while self.waiting and len(self.rows) + len(fresh) < self.max_rows:
            fresh.append(self.waiting.popleft())
        if not fresh:
            return
        for row in fresh:
            self.live.join(row.rollout_id, row.prompt.pack, row.prompt.number)
        hidden_BC = torch.stack([row.prompt.pack.hidden_GC[row.prompt.number] for row in fresh])
        logits_BV = self.model.logits(hidden_BC)
        self.logits_BV = logits_BV if self.logits_BV is None else torch.cat([self.logits_BV, logits_BV])
        if self.params.repetition_penalty != 1.0:
            seen = torch.zeros_like(logits_BV, dtype=torch.bool)
            for number, row in enumerate(fresh):
                seen[number, row.prompt.spec.input_ids.to(seen.device)] = True
            self.seen_BV = seen if self.seen_BV is None else torch.cat([self.seen_BV, seen])
        self.rows.extend(fresh)
        self.live.add([row.rollout_id for row in fresh], [row.prompt.spec.next_position for row in fresh])

    def _sample(self) -> None:
        """Append one token and its log-prob to every row. Raises EngineError when a row's logits are not finite."""
        assert self.logits_BV is not None  # every live row has logits
        uniforms_B = None
        if not self.params.greedy:
            uniforms = [row.uniforms[len(row.tokens)] for row in self.rows]
            uniforms_B = torch.tensor(uniforms, dtype=torch.float64).to(self.policy.device, non_blocking=True)
        tokens_B, chosen_B = self._choose(self.logits_BV, self.filters, self.seen_BV, uniforms_B)
        tokens, logps = tokens_B.tolist(), chosen_B.tolist()
        for row, token, logp in zip(self.rows, tokens, logps, strict=True):
            if not math.isfinite(logp):  # one NaN among the logits is enough
                raise EngineError(
                    f"row {row.prompt.spec.row}: the model's logits are not finite at response token "
                    f"{len(row.tokens) + 1} (weights v{self.weight_version}); go on from an earlier checkpoint with a "
                    "lower train.learning_rate, or check the model's weights (model.path, model.dtype)"
                )
            row.tokens.append(token)
            row.logps.append(logp)

    def _retire(self) -> list[Finished]:
        """Take ended rows out; the last live row fills each hole."""
        finished: list[Finished] = []
        for slot in range(len(self.rows) - 1, -1, -1):
            row = self.rows[slot]
            stopped = row.tokens[-1] in self.stop_ids
            if not stopped and len(row.tokens) < self.limit(row.rollout_id, row.index):
                continue
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            response = Response(row.index, tuple(row.tokens), tuple(row.logps), reason)
            finished.append(Finished(row.rollout_id, response))
            row.prompt.remaining -= 1
            if row.prompt.remaining == 0:
                self.live.leave(row.rollout_id)
            self._swap_out(slot)
        finished.reverse()
        return finished

    def _swap_out(self, slot: int) -> None:
        last = self.rows.pop()
        if slot < len(self.rows):
            self.rows[slot] = last
        self.live.drop(slot)
        if self.seen_BV is not None:
            if slot < len(self.rows):
                self.seen_BV[slot] = self.seen_BV[len(self.rows)].clone()
            self.seen_BV = self.seen_BV[: len(self.rows)]
