"""Where recipes lie: a path, or the name of one that comes with the package."""

from __future__ import annotations

import difflib
from pathlib import Path

from rollplex.errors import ConfigError

FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")


def packaged_names() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(recipe: str) -> Path:
    """The file that `recipe` means: a path as it is, or a packaged recipe by its bare name ("demo").

    A file in the working folder goes before a packaged one of the same name. Raises ConfigError when there is neither;
    a path that looks like a file name is returned as it is, and reading it says what is wrong.
    """
    path = Path(recipe)
    if path.is_file() or path.suffix in _SUFFIXES or len(path.parts) > 1:
        return path
    if recipe in packaged_names():
        return FOLDER / f"{recipe}.yaml"
    near = difflib.get_close_matches(recipe, packaged_names(), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"recipe {recipe!r} is neither a file nor one of the packaged recipes {', '.join(packaged_names())}{hint}"
    )
