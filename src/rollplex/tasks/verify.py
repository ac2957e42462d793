"""Verifiable rewards of the built-in tasks, called as TRL calls reward functions.

Each takes `completions` (a list of message lists, or of strings) and the `answer` column, and returns one float per
completion: 1.0 right, 0.0 wrong, None where the row has no answer (the function does not apply).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of one completion: the string itself, or the contents of its messages joined."""
    if isinstance(completion, str):
        return completion
    pieces: list[str] = []
    for message in completion:
        content = message.get("content") or ""
        if isinstance(content, str):
            pieces.append(content)
        else:
            pieces.extend(part["text"] for part in content if part.get("type") == "text")
    return "".join(pieces)


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the completion is the answer, spaces around it and letter case aside."""
    return [
        None if a is None else float(completion_text(c).strip().casefold() == str(a).strip().casefold())
        for c, a in zip(completions, answer, strict=True)
    ]


def number_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the last number in the completion equals the answer; text without a number is wrong."""
    return [
        None if a is None else float(_same_number(completion_text(c), float(a)))
        for c, a in zip(completions, answer, strict=True)
    ]


def words_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """The fraction of the answer's words, in their places, that the completion gets right; extra words make it 0."""
    return [
        None if a is None else _word_score(completion_text(c).casefold().split(), str(a).casefold().split())
        for c, a in zip(completions, answer, strict=True)
    ]


def _same_number(text: str, wanted: float) -> bool:
    found = _NUMBER.findall(text)
    return bool(found) and math.isclose(float(found[-1]), wanted, rel_tol=1e-9, abs_tol=1e-9)


def _word_score(found: list[str], wanted: list[str]) -> float:
    if len(found) > len(wanted) or not wanted:
        return float(found == wanted)
    return sum(f == w for f, w in zip(found, wanted, strict=False)) / len(wanted)
