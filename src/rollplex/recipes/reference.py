"""The list of all options in plain text, for `rollplex train --help`."""

from __future__ import annotations

import textwrap

from rollplex.recipes.options import Option, OptionGroup, all_groups, all_options

_INDENT = "    "


def options_text(width: int = 100) -> str:
    """Every section with every option in it: key, type, default, description; no line longer than `width` unless a
    single word is."""
    blocks = []
    options = list(all_options().values())
    for group in all_groups().values():
        members = [option for option in options if option.section == group.key]
        if members:
            blocks.append("\n".join([*_heading(group, width), *(_entry(option, width) for option in members)]))
    return "\n\n".join(blocks) + "\n"


def _heading(group: OptionGroup, width: int) -> list[str]:
    absent = f" (absent unless given; {group.key}={{}} takes its defaults, null removes it)" if group.optional else ""
    return _wrap(f"{group.key}: {group.description}{absent}", width, "", "  ")


def _entry(option: Option, width: int) -> str:
    facts = f"{option.key}  <{option.type}>  default: {option.default}"
    return "\n".join([*_wrap(facts, width, "  ", _INDENT), *_wrap(option.description, width, _INDENT, _INDENT)])


def _wrap(text: str, width: int, first: str, rest: str) -> list[str]:
    """Whole words only: a key or a value that is cut could not be copied."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
