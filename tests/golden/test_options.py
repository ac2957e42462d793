"""The list of options that `rollplex train --help` prints: its keys, types and defaults are a public interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.cli import option_lines

GOLDEN = Path(__file__).with_name("options.txt")


def _options() -> str:
    return "\n".join(line.plain for line in option_lines()) + "\n"


def test_options(check_golden: Callable[[Path, str], None]) -> None:
    check_golden(GOLDEN, _options())


@pytest.mark.parametrize("change", [("default: 100", "default: 99"), ("train.max_steps", "train.max_step")])
def test_a_wrong_golden_fails(
    change: tuple[str, str], check_golden: Callable[[Path, str], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if request.config.getoption("--update-golden"):
        pytest.skip("golden files are being written")
    assert change[0] in _options()
    wrong = tmp_path / "options.txt"
    wrong.write_text(_options().replace(*change), encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match="--update-golden") as failure:
        check_golden(wrong, _options())
    diff = str(failure.value).split("\n")
    assert any(line.startswith("-") and change[1] in line for line in diff)
    assert any(line.startswith("+") and change[0] in line for line in diff)


def test_a_missing_golden_fails(
    check_golden: Callable[[Path, str], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if request.config.getoption("--update-golden"):
        pytest.skip("golden files are being written")
    with pytest.raises(pytest.fail.Exception):
        check_golden(tmp_path / "absent.txt", "text\n")
