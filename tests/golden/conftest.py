"""Texts that must not change unnoticed. `pytest --update-golden tests/golden` writes them anew; review the diff."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

CheckGolden = Callable[[Path, str], None]


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> CheckGolden:
    """check_golden(path, text): fails with a diff unless the file at `path` holds `text`."""
    update = bool(request.config.getoption("--update-golden"))

    def check(path: Path, text: str) -> None:
        if update:
            path.write_text(text, encoding="utf-8")
            return
        held = path.read_text(encoding="utf-8") if path.is_file() else ""
        if held != text:
            lines = difflib.unified_diff(
                held.splitlines(), text.splitlines(), f"{path.name} (golden)", "found now", lineterm="", n=1
            )
            pytest.fail("\n".join([*lines, "wanted: pytest --update-golden tests/golden"]), pytrace=False)

    return check
