"""The two papers' tables: simulated anew, against what is written down, and against what was published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden import papers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
# Figures outside 15 % of the published range, each explained on the page. A model that comes nearer ends in a failure
# here too: the page is then to be written anew.
MISSES = {
    ("rollplex", "rollout at TP 8 over TP 4"),
}


def _tables() -> dict[str, list[dict[str, float | str]]]:
    return {name: json.loads(papers.golden(name).read_text(encoding="utf-8"))["rows"] for name in papers.TABLES}


@pytest.mark.parametrize("name", papers.TABLES)
def test_rows_are_those_written_down(name: str) -> None:
    """Changed on purpose: `python tests/golden/papers.py`, and the page with it."""
    facts = json.loads(papers.golden(name).read_text(encoding="utf-8"))
    assert facts["source"] == "simulated"
    for found, wanted in zip(papers.TABLES[name](), facts["rows"], strict=True):
        assert {key: pytest.approx(value, rel=1e-6) for key, value in wanted.items() if key != "workload"} == {
            key: value for key, value in found.items() if key != "workload"
        }
        assert found["workload"] == wanted["workload"]


def test_published_figures_within_15_percent_or_explained() -> None:
    tables = _tables()
    far = {
        (claim.paper, claim.what)
        for claim in papers.CLAIMS
        for row in claim.rows(tables[claim.paper])
        if abs(claim.miss(float(row[claim.value]))) > 0.15
    }
    assert far == MISSES


def test_orders_of_the_papers() -> None:
    for row in _tables()["rolloutpipe"]:
        assert row["slime_s"] > row["cgp_s"] > row["cgp_fgd_s"]
    shares = {r: [row["cgp_share"] for row in _tables()["rolloutpipe"] if row["R"] == r] for r in (32, 64, 96)}
    assert max(shares[32]) < min(shares[64]) and max(shares[64]) < min(shares[96])  # CGP's share rises with R
    for row in _tables()["rollplex"]:
        assert row["disaggregated_s"] > row["serial_s"] > row["rollplex_s"]
        assert row["shared_serial_s"] > row["shared_rollplex_s"] > row["shared_stream_s"]


def test_tables_on_the_page_are_the_simulated_ones() -> None:
    page, tables = PAGE.read_text(encoding="utf-8"), _tables()
    wanted = [papers.claim_lines(tables), *(papers.row_lines(tables[n], papers.COLUMNS[n]) for n in papers.TABLES)]
    for lines in wanted:
        text = "\n".join(lines)
        assert text in page, f"docs/papers.md needs:\n{text}"
