"""Products give the same bits on any number of threads: MKL is asked for it on the processors where it can."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rollplex.mkl import STRICT, VARIABLE, ask_for_steady_bits, is_intel


@pytest.mark.parametrize(
    ("before", "intel", "after"),
    [
        ({}, True, {VARIABLE: STRICT}),
        ({}, False, {}),
        ({VARIABLE: "COMPATIBLE"}, True, {VARIABLE: "COMPATIBLE"}),
    ],
)
def test_only_intel_processors_are_asked_and_only_where_the_user_said_nothing(
    before: dict[str, str], intel: bool, after: dict[str, str]
) -> None:
    environment = dict(before)
    ask_for_steady_bits(environment, intel=intel)
    assert environment == after


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.skipif(not is_intel(), reason="only Intel's processors are asked; others: numerics/test_thread_bits.py")
@pytest.mark.parametrize("first", ["rollplex", "torch"])
def test_products_have_the_same_bits_on_one_thread_and_on_two(first: str) -> None:
    """In a process of its own, whichever is imported first: MKL reads its setting at the first product. Batches as
    decoding has them, written into scores of several parts."""
    code = f"""
import {first}, rollplex, torch
from torch.nn import functional as F
def product(threads):
    torch.set_num_threads(threads)
    return F.linear(x, weight)
def batched(threads):
    torch.set_num_threads(threads)
    scores = torch.zeros(batch, rows, places + 8)[..., :places]
    torch.bmm(left, right, out=scores)
    return torch.bmm(scores, right.mT)
for batch, rows, places in ((1, 56, 1084), (2, 32, 292), (8, 32, 1084), (64, 4, 200)):
    torch.manual_seed(rows)
    left, right = torch.randn(batch, rows, 64), torch.randn(batch, 64, places)
    assert torch.equal(batched(1), batched(2)), (batch, rows, places)
for rows, width in ((16, 1408), (32, 1408), (64, 448), (12, 448), (128, 1408)):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, width), torch.randn(512, width)
    assert torch.equal(product(1), product(2)), (rows, width)
"""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_this_process_is_asked_too() -> None:
    assert not is_intel() or os.environ[VARIABLE]
