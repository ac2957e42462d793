"""Reward functions from their names: 'module:function' or 'path/file.py:function'."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rollplex.errors import ConfigError

RewardFunction = Callable[..., Any]  # TRL's keyword call; returns one float or None per completion, or a coroutine


def resolve_reward(spec: str) -> RewardFunction:
    """The function that `spec` names. A file path is relative to the working directory.

    Raises ConfigError with what exists when the file, module or function does not, when importing it fails (chained),
    or when the name is not callable.
    """
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name.isidentifier():
        raise ConfigError(
            f"rewards.reward_funcs: {spec!r} is not 'module:function' or 'file.py:function'; "
            "example: rollplex.tasks.verify:exact_match"
        )
    module = _module_from_file(spec, Path(source)) if source.endswith(".py") else _module_by_name(spec, source)
    found = getattr(module, name, None)
    if found is None:
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"rewards.reward_funcs: {spec!r}: {source} has no {name!r}{_what_exists(name, functions)}")
    if not callable(found):
        raise ConfigError(f"rewards.reward_funcs: {spec!r} is a {type(found).__name__}, needed a function")
    function: RewardFunction = found
    return function


def reward_name(function: RewardFunction) -> str:
    """Name used in metrics, as in TRL: the function's, that inside a partial, or the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(function: RewardFunction) -> bool:
    """Whether a call gives a coroutine: async functions, partials of them, objects with an async __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # the bound method is inspected, not tested
    )


def unique_names(functions: Sequence[RewardFunction], specs: Sequence[str | None]) -> tuple[str, ...]:
    """One name per function; equal names are told apart by their spec. Raises ConfigError where that is impossible."""
    plain = [reward_name(function) for function in functions]
    names = [
        spec if plain.count(name) > 1 and spec is not None else name for name, spec in zip(plain, specs, strict=True)
    ]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"rewards.reward_funcs: the reward function {name!r} is given {names.count(name)} times; "
                "use reward_weights to weigh it, or give the functions different names"
            )
    return tuple(names)


def _module_by_name(spec: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or source
        if missing == source or source.startswith(f"{missing}."):
            raise ConfigError(
                f"rewards.reward_funcs: {spec!r}: no module {missing!r} on the Python path; "
                "give an installed module, or a file as 'path/file.py:function'"
            ) from error
        raise ConfigError(
            f"rewards.reward_funcs: {spec!r}: importing {source} needs the module {missing!r}, which is missing"
        ) from error
    except Exception as error:
        raise ConfigError(f"rewards.reward_funcs: {spec!r}: importing {source} failed: {error!r}") from error


def _module_from_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        folder = path.parent
        beside = [str(folder / p.name) for p in sorted(folder.glob("*.py"))] if folder.is_dir() else []
        detail = _what_exists(str(path), beside) if folder.is_dir() else f"; the folder {folder} does not exist"
        raise ConfigError(f"rewards.reward_funcs: {spec!r}: the file {path} does not exist{detail}")
    # Named by its full path: two files of one name stay two modules, one file named twice stays one.
    name = f"rollplex_reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ConfigError(f"rewards.reward_funcs: {spec!r}: {path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"rewards.reward_funcs: {spec!r}: importing {path} failed: {error!r}") from error
    return module


def _what_exists(wanted: str, existing: Iterable[str]) -> str:
    names = list(existing)
    if not names:
        return "; there is none"
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{hint} (there are: {shown})"
