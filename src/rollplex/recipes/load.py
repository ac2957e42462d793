"""A recipe file and overrides into a Config, and back into text."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollplex.config import Config
from rollplex.config_section import Section
from rollplex.errors import ConfigError
from rollplex.recipes.hints import hint_for
from rollplex.recipes.options import all_options, keys_ending_in, section_type
from rollplex.recipes.yaml_text import parse_mapping, parse_value, write_yaml

_MOST_SHOWN = 120  # characters of a found value


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the recipe at `path` and apply `overrides`, in order, each `key=value` with the value in YAML.

    A key may be the full dotted one or any end of it that only one option has: `model.dtype=float64`, `dtype=float64`.
    A mapping as value is merged into its section; null removes an optional section. Raises ConfigError that lists
    every problem with its key, its place (file and line, or override) and a remedy.
    """
    source = str(path)
    parsed = parse_mapping(_read(Path(path)), source)
    tree = parsed.tree
    places = {key: f"{source} line {line}" for key, line in parsed.lines.items()}
    problems: list[str] = []
    for override in overrides:
        try:
            _apply(tree, override, places)
        except ConfigError as error:
            problems.append(str(error))
    problems += _shape_problems(tree, Config, "", places, source)
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(item, places, source) for item in error.errors())) from error


def dump_config(config: Config) -> str:
    """YAML of every option; `load_config` of it gives an equal Config."""
    return write_yaml(config.model_dump(mode="json"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        names = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
        raise ConfigError(f"recipe {path} does not exist{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from error


def _apply(tree: dict[str, Any], override: str, places: dict[str, str]) -> None:
    """Put one override into the tree. Raises ConfigError for a malformed, unknown or ambiguous one."""
    name, equals, text = override.partition("=")
    place = f"override {override!r}"
    if name.startswith("-"):
        plain = name.lstrip("-").replace("-", "_")
        raise ConfigError(f"{place}: options of a recipe are written without dashes: {plain}={text or '...'}")
    if not equals or not name:
        raise ConfigError(f"{place} is not of the form key=value, for instance max_steps=5")
    keys = keys_ending_in(name)
    if not keys:
        raise ConfigError(f"unknown option {name!r} in {place}; {hint_for(name)}")
    if len(keys) > 1:
        raise ConfigError(f"option {name!r} in {place} may mean {' or '.join(keys)}; write one of them in full")
    value = parse_value(text, place)
    parts = keys[0].split(".")
    for part in parts[:-1]:
        inner = tree.get(part)
        if inner is None:
            inner = tree[part] = {}
        elif not isinstance(inner, dict):
            return  # the file's own mistake, which the check of the tree reports
        tree = inner
    old = tree.get(parts[-1])
    tree[parts[-1]] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    places[keys[0]] = place
    if isinstance(value, dict):
        places |= {f"{keys[0]}.{key}": place for key in value}


def _shape_problems(
    tree: dict[str, Any], section: type[Section], prefix: str, places: dict[str, str], source: str
) -> list[str]:
    """Unknown keys, and values where a section belongs. An empty section that is not optional becomes its defaults."""
    problems: list[str] = []
    for name in list(tree):
        key = f"{prefix}.{name}" if prefix else str(name)
        place = _place(key, places, source)
        info = section.model_fields.get(name) if isinstance(name, str) else None
        if info is None:
            problems.append(f"unknown option {key!r} in {place}; {hint_for(key)}")
            continue
        inner = section_type(info.annotation)
        if inner is None:
            continue
        if tree[name] is None and inner is info.annotation:
            del tree[name]
        elif isinstance(tree[name], dict):
            problems += _shape_problems(tree[name], inner, key, places, source)
        elif tree[name] is not None:
            names = ", ".join(list(inner.model_fields)[:3])
            problems.append(f"{key} in {place} is {_shown(tree[name])}, needed a section with keys such as {names}")
    return problems


def _describe(item: ErrorDetails, places: dict[str, str], source: str) -> str:
    """One pydantic error as: key, place, what was found, what was needed."""
    location = [str(part) for part in item["loc"]]
    context = item.get("ctx", {})
    if item["type"] == "value_error":  # our own checks of several options: complete sentences
        text = str(context["error"])
        return "\n".join(f"{line} ({source} with its overrides)" for line in text.split("\n"))
    key, option = ".".join(location), None
    while location and option is None:  # errors inside a list carry its position
        option = all_options().get(".".join(location))
        location = location if option else location[:-1]
    if item["type"] == "missing":
        return f"{key} is missing in {source}; add the section, for instance `{key}:` with its keys"
    needed = option.type if option else item["msg"]
    key = option.key if option else key
    return f"{key} in {_place(key, places, source)} is {_shown(item['input'])}, needed {needed}"


def _place(key: str, places: dict[str, str], source: str) -> str:
    """Where `key`, or the nearest section around it, was set."""
    while key and key not in places:
        key = key.rpartition(".")[0]
    return places.get(key, source)


def _shown(value: Any) -> str:
    words = {
        dict: "section",
        list: "list",
        tuple: "list",
        str: "text",
        bool: "switch",
        int: "whole number",
        float: "number",
    }
    if value is None:
        return "null"
    text = write_yaml(value).strip() if isinstance(value, (dict, list)) else repr(value)
    text = " ".join(text.split())
    text = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
    return f"the {words.get(type(value), type(value).__name__)} {text}"
