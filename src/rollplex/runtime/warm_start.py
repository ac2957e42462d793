"""A supervised stage before RL, on the same prefix and response passes: one response per prompt, the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rollplex.config import Config, TrainConfig
from rollplex.errors import RowError
from rollplex.models.policy import Policy
from rollplex.models.prefix import backward_prefix
from rollplex.train.microbatch import pack_by_tokens
from rollplex.train.optimizer import PolicyOptimizer
from rollplex.train.prefix_book import PrefixBook
from rollplex.train.response import GroupTokens, response_logps
from rollplex.types import Example, PromptSpec

WARMUP_SHARE = 0.05  # of the steps; small models trained from scratch diverge without it


def warm_start(
    policy: Policy,
    prompts: Iterator[tuple[Example, PromptSpec]],
    encode: Callable[[str], list[int]],
    config: Config,
    on_step: Callable[[int, int, dict[str, float]], None],
) -> None:
    """Train on answers for `warm_start.steps` steps. `encode` turns an answer into ids that end with a stop id."""
    stage = config.warm_start
    schedule = TrainConfig(
        learning_rate=stage.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, int(stage.steps * WARMUP_SHARE)),
        max_grad_norm=1.0,
        weight_decay=0.01,
    )
    optimizer = PolicyOptimizer(policy.model, schedule, stage.steps)
    try:
        for step in range(stage.steps):
            rows = [next(prompts) for _ in range(stage.batch_size)]
            answers = [encode(answer_of(example, stage.answer_column)) for example, _ in rows]
            loss = _step(policy, [spec for _, spec in rows], answers, config)
            done = optimizer.step()
            policy.bump()
            on_step(
                step + 1, stage.steps, {"loss": loss, "grad_norm": done.grad_norm, "learning_rate": done.learning_rate}
            )
    finally:
        optimizer.close()  # RL has an optimizer of its own


def answer_of(example: Example, column: str) -> str:
    """The target text of a row. Raises RowError when the column is missing or not text."""
    value: Any = example.columns.get(column)
    if not isinstance(value, str) or not value:
        raise RowError(
            f"row {example.index}: column {column!r} holds {value!r}, needed non-empty text to warm-start on "
            "(warm_start.answer_column)"
        )
    return value


def _step(policy: Policy, specs: Sequence[PromptSpec], answers: Sequence[list[int]], config: Config) -> float:
    """Mean negative log-likelihood per answer token; gradients are left in the parameters."""
    num_tokens = sum(len(answer) for answer in answers)
    total = 0.0
    for members in pack_by_tokens(
        [s.num_tokens + len(a) for s, a in zip(specs, answers, strict=True)], config.train.micro_batch_tokens
    ):
        book = PrefixBook(policy, config.train.micro_batch_tokens)
        book.compute({m: specs[m] for m in members}, config.train.prefix_activations)
        for use in book.uses(members):
            tokens = [GroupTokens(number, (tuple(answers[m]),)) for m, number in use.numbers.items()]
            loss = -response_logps(use.pack, tokens, 1.0, with_grad=True).logps.sum() / num_tokens
            torch.autograd.backward(loss)
            backward_prefix(use.pack)
            total += float(loss.detach())
    return total
