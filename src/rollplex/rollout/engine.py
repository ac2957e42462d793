"""The engine protocol: prompts in, responses out one by one, so that a group is known to be complete the moment it is.

An engine advances by iterations (`step`): the caller interleaves other work (rewards of complete groups, window passes)
between them. Randomness is keyed by (run seed, rollout id, response index): batch composition and completion order
never change a random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rollplex.config import Config
from rollplex.types import PromptSpec, Response


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Log-probs that engines report are those of softmax(logits / temperature), before any filter."""

    num_generations: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    greedy: bool = False  # argmax instead of sampling (evaluation)
    seed: int = 0

    @classmethod
    def from_config(
        cls, config: Config, *, stop_token_ids: Sequence[int], banned_token_ids: Sequence[int]
    ) -> SamplingParams:
        """How a recipe samples, with the ids that its model stops at and must never sample."""
        rollout = config.rollout
        return cls(
            num_generations=rollout.num_generations,
            max_tokens=rollout.max_completion_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p or 0.0,
            repetition_penalty=rollout.repetition_penalty,
            stop_token_ids=tuple(stop_token_ids),
            banned_token_ids=tuple(banned_token_ids),
            seed=config.run.seed,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """One response that just ended."""

    rollout_id: int
    response: Response


class RolloutEngine(Protocol):
    """Samples `params.num_generations` responses for each admitted prompt."""

    def admit(self, rollout_id: int, spec: PromptSpec) -> None:
        """Queue a prompt; its responses appear in later `step` results."""

    def step(self) -> list[Finished]:
        """Advance decoding by one token for every live response; the responses that ended with it."""

    @property
    def busy(self) -> bool:
        """Whether any response is unfinished."""


class NothingToPublish:
    """The part of `rollout.engines.Engines` that is about publishing, for engines on the policy's own weights: who
    samples and who updates them take turns in this process."""

    def begin_publish(self) -> None:
        """New weights are there already."""

    def writing(self, _who: str) -> AbstractContextManager[None]:
        """Nobody else reads."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}
