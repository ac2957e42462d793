"""The parts of `rollplex plan`: each a pure function from a recipe to facts, and one from those facts to lines of text.

A new part is one entry of SECTIONS. Its facts are plain data for JSON; parts know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.planner.engine_weights import engine_weight_facts, engine_weight_lines
from rollplex.planner.memory import memory_lines, memory_section
from rollplex.planner.sharing import sharing_facts, sharing_lines

Facts = Mapping[str, Any]


def plain_lines(facts: Facts) -> Iterator[str]:
    """The single values among `facts`, one a line: for a part that has no table of its own."""
    for name, value in facts.items():
        if value is None or isinstance(value, (str, int, float)):
            yield f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}"


@dataclass(frozen=True, slots=True)
class PlanSection:
    """`facts` raises ConfigError or ModelError for a recipe that it cannot count; `lines` prints what it gave."""

    facts: Callable[[Config], Facts]
    lines: Callable[[Facts], Iterator[str]] = plain_lines


SECTIONS: dict[str, PlanSection] = {
    "sharing": PlanSection(sharing_facts, sharing_lines),
    "memory": PlanSection(memory_section, memory_lines),
    "publish": PlanSection(engine_weight_facts, engine_weight_lines),
}


def plan_facts(config: Config, only: Sequence[str] = ()) -> dict[str, Facts]:
    """The facts of every section by its name, or of those in `only`. Raises ConfigError for an unknown name."""
    unknown = [name for name in only if name not in SECTIONS]
    if unknown:
        raise ConfigError(f"--section {unknown[0]} is no part of a plan; parts: {', '.join(SECTIONS)}")
    return {name: section.facts(config) for name, section in SECTIONS.items() if not only or name in only}


def plan_lines(facts: Mapping[str, Facts]) -> Iterator[str]:
    """What `plan_facts` gave, as text: each section under its name."""
    for number, (name, section) in enumerate(facts.items()):
        if number:
            yield ""
        yield name
        yield from (f"  {line}".rstrip() for line in SECTIONS[name].lines(section))
