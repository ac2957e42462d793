"""The bar of a search where nobody looks: all arrangements pass, and nothing is written."""

from __future__ import annotations

import pytest

from rollplex.runtime.search_bar import search_bar


def test_no_terminal_gets_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    items = [(1.5, 2), (2.0, 0), (2.5, 1)]
    assert list(search_bar(items)) == items
    assert capfd.readouterr() == ("", "")
