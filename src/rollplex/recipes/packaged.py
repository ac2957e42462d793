"""Where a recipe lies: a path, or the name of one that comes with the package."""

from __future__ import annotations

import difflib
from pathlib import Path

from rollplex.errors import ConfigError

FOLDER = Path(__file__).parent  # in a source checkout `recipes` at the top is a link to it


def packaged_names() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def packaged_recipe(name: str) -> Path:
    """The file of the packaged recipe `name` ("demo"). Raises ConfigError that lists the names there are."""
    names = packaged_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"recipe {name!r} is neither a file nor one that comes along ({', '.join(names)}){hint}")
    return FOLDER / f"{name}.yaml"


def recipe_path(recipe: str) -> Path:
    """The file that a user's `recipe` means. A bare name is a packaged recipe, unless a file has that name.

    Anything that looks like a file name is returned as it is: reading it says what is wrong. Raises ConfigError for a
    bare name that is neither.
    """
    path = Path(recipe)
    looks_like_file = path.is_file() or path.suffix in (".yaml", ".yml") or len(path.parts) != 1
    return path if looks_like_file else packaged_recipe(recipe)
