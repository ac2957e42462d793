"""docs/scale-study.md holds the tables of the committed file, and the file is what the benchmark makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scale_study import CASES, FILE, SCHEDULES, simulate_case, tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale-study.md"


def test_the_page_has_the_tables_of_the_file() -> None:
    facts, page = json.loads(FILE.read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    assert facts["source"] == "simulated" and set(facts["cases"]) <= set(CASES)
    for name, lines in tables(facts):
        assert "\n".join(lines) in page, f"docs/scale-study.md needs {name}:\n" + "\n".join(lines)


def test_the_file_is_what_the_benchmark_makes() -> None:
    held = {
        row["schedule"]: row for row in json.loads(FILE.read_text(encoding="utf-8"))["cases"]["base"][: len(SCHEDULES)]
    }
    for row in simulate_case(CASES["base"], gpus=(32,), schedules=("serial", "stream", "hybrid", "rolloutpipe")):
        wanted = held[row["schedule"]]
        assert wanted["gpus"] == row["gpus"] == 32
        assert row["seconds"] == pytest.approx(wanted["seconds"], rel=1e-6)
        assert row["causes"] == pytest.approx(wanted["causes"], rel=1e-6, abs=1e-9)
        assert sum(row["causes"].values()) == pytest.approx(row["seconds"])
