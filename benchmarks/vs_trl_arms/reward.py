"""The reward of the speed benchmarks: trivial to compute, different inside a group so that no gradient vanishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def length_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Characters of each completion modulo 7, over 7."""
    return [len(_text(completion)) % 7 / 7 for completion in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(str(message["content"]) for message in completion)
