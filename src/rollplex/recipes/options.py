"""The options of the configuration tree as a flat list, read from the schema: for help, look-up and messages."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rollplex.config import Config
from rollplex.config_section import Section

_TYPE_WORDS: dict[Any, str] = {int: "whole number", float: "number", bool: "on | off", str: "text"}


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf. Example: Option("train.max_steps", "train", "whole number >= 0", "100", "Rollouts to train on.")"""

    key: str  # full dotted key
    section: str  # dotted key of the section that holds it
    type: str  # in words, with its bounds and choices
    default: str  # as YAML; "null" for absent
    description: str

    @property
    def leaf(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """One section. Example: OptionGroup("model.lora", "Low-rank adapters; absent: full fine-tuning.", True)"""

    key: str
    description: str
    optional: bool  # absent unless the recipe names it


@cache
def all_options() -> dict[str, Option]:
    """Every leaf by its full key, in the order of the schema."""
    return {item.key: item for item in _walk(Config, "") if isinstance(item, Option)}


@cache
def all_groups() -> dict[str, OptionGroup]:
    """Every section by its full key, in the order of the schema."""
    return {item.key: item for item in _walk(Config, "") if isinstance(item, OptionGroup)}


def keys_ending_in(name: str) -> list[str]:
    """Full keys of options and sections that `name` may mean: itself, or those that end with `.name`."""
    known = [*all_options(), *all_groups()]
    return [name] if name in known else [key for key in known if key.endswith(f".{name}")]


def section_type(annotation: Any) -> type[Section] | None:
    """The section that a field holds, also when it may be absent; None for a leaf."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _walk(section: type[Section], prefix: str) -> Iterator[Option | OptionGroup]:
    for name, info in section.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        inner = section_type(info.annotation)
        if inner is None:
            yield Option(key, prefix, _type_words(info), _default(info), info.description or "")
        else:
            yield OptionGroup(key, info.description or "", inner is not info.annotation)
            yield from _walk(inner, key)


def _type_words(info: FieldInfo) -> str:
    bounds = []
    for item in info.metadata:
        for kind, sign in ((Ge, ">="), (Gt, ">"), (Le, "<="), (Lt, "<")):
            if isinstance(item, kind):
                bounds.append(f"{sign} {getattr(item, kind.__name__.lower())}")
    plain, *alternatives = _alternatives(info.annotation)
    words = " ".join([plain, " and ".join(bounds)]) if bounds else plain
    return " or ".join([words, *alternatives])


def _alternatives(annotation: Any) -> list[str]:
    """The type in words; a second entry when it may be null."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [" | ".join(_alternatives(a)[0] for a in args if a is not type(None)), "null"]
    if origin is Literal:
        return [" | ".join(str(a) for a in args)]
    if origin is tuple:
        return [f"list of ({_alternatives(args[0])[0]})"]
    return [_TYPE_WORDS[annotation]]


def _default(info: FieldInfo) -> str:
    value = info.get_default()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"[{', '.join(str(v) for v in value)}]"
    return str(value)
