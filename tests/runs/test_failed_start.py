"""A run that fails before its first step leaves no thread behind: one that is still in native code when the
interpreter ends aborts the process, and the user sees exit code 134 instead of the message's own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.errors import CheckpointError, ConfigError, RollplexError
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.runtime.trainer import train


def _config(folder: Path, *overrides: str) -> Config:
    output = f"output_dir={folder / 'out'}"
    return load_config(packaged_recipe("tiny_qwen2_5_vl"), [output, "max_steps=1", *overrides])


class FailingObserver:
    """Observes like a broken display: every event raises."""

    def __getattr__(self, event: str) -> Any:
        def fail(*_: Any) -> None:
            raise RuntimeError(event)

        return fail


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("reward_funcs=[no_such_module:function]", ConfigError),
        ("output_dir={folder}/file/out", CheckpointError),
    ],
)
def test_no_media_thread_is_left(tmp_path: Path, override: str, error: type[RollplexError]) -> None:
    (tmp_path / "file").write_text("no folder")
    before = _media_threads()
    with pytest.raises(error):
        train(_config(tmp_path, override.format(folder=tmp_path)))
    assert _media_threads() <= before


def test_no_media_thread_is_left_by_a_broken_observer(tmp_path: Path) -> None:
    before = _media_threads()
    with pytest.raises(RuntimeError, match="on_run_start"):
        train(_config(tmp_path), observer=FailingObserver())
    assert _media_threads() <= before


def _media_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rollplex-media")}
