"""YAML as recipes use it: the scalars of YAML 1.2, the line of every key, no key twice.

PyYAML alone reads YAML 1.1, where 1e-6 is a text, `off` is false and 1:30 is ninety.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml

from rollplex.errors import ConfigError

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# In this order: the first that matches wins, so that whole numbers are not floats. Keys are possible first characters.
_RESOLVERS = [
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), ["<"]),
]


@dataclass(frozen=True, slots=True)
class YamlTree:
    """A parsed mapping and the line (from 1) on which each dotted key stands."""

    tree: dict[str, Any]
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own interface

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(str(self.construct_scalar(node)))  # decimal: 010 is ten

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        _refuse_duplicates(node)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own interface

    def ignore_aliases(self, data: Any) -> bool:
        return True  # a value that occurs twice is written twice

    def represent_float(self, data: float) -> yaml.ScalarNode:
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(data), repr(data))
        return self.represent_scalar("tag:yaml.org,2002:float", text)

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # PyYAML's plain and single-quoted styles lose some line breaks (U+0085 comes back as a space).
        style = None if data.isascii() and data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Dumper.add_representer(float, _Dumper.represent_float)
_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def parse_mapping(text: str, source: str) -> YamlTree:
    """Parse a whole file. Raises ConfigError with `source` and the line for bad YAML, a key twice, or no mapping."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return YamlTree({}, {})
        if not isinstance(node, yaml.MappingNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "single value"
            raise ConfigError(f"{source} holds a {kind}, needed sections such as `train:` with `key: value` lines")
        lines = _lines(node, "")
        tree: dict[str, Any] = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_reason(error)}") from error
    finally:
        loader.dispose()
    return YamlTree(tree, lines)


def parse_value(text: str, source: str) -> Any:
    """Parse the right side of an override. Raises ConfigError."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: the value {text!r} is not valid YAML: {_reason(error)}") from error


def write_yaml(tree: dict[str, Any] | list[Any]) -> str:
    """The text that `parse_mapping` reads back to an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _lines(node: yaml.MappingNode, prefix: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    for key, value in node.value:
        dotted = f"{prefix}.{key.value}" if prefix else str(key.value)
        lines[dotted] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and value.start_mark.index > node.start_mark.index:  # no alias of itself
            lines |= _lines(value, dotted)
    return lines


def _refuse_duplicates(node: yaml.MappingNode) -> None:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {name!r} is already on line {seen[name]}; keep one", problem_mark=key.start_mark
            )
        seen[name] = line


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return str(error)
