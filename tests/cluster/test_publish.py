"""Hand-overs between real processes: every pair of degrees, the bytes that move, and what a killed process leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.handover import all_pairs, killed_half_way, late, read_on_the_way
from cluster.processes import run_ranks

BUCKET_BYTES = 512  # a few rows of the small model: dozens of rounds


def test_every_pair_of_degrees_hands_over_bitwise() -> None:
    answers = run_ranks(all_pairs, 4, BUCKET_BYTES)
    moved = 0
    for rank, cases in enumerate(answers):
        assert len(cases) == 72
        for case in cases:
            assert case["wrong"] == [], (rank, case)
            assert case["received"] == case["planned"], (rank, case)
            assert case["buffers"] <= 2 * BUCKET_BYTES, (rank, case)
            assert case["version"] == 2, (rank, case)  # 1 was the load
            assert case["dropped"] == [1], (rank, case)  # before anyone could read version 2
            moved += case["received"]
    assert moved > 0 and max(case["rounds"] for case in answers[0]) > 10


def test_training_goes_on_while_the_rollout_waits_for_the_end() -> None:
    for rank, found in enumerate(run_ranks(read_on_the_way, 2)):
        assert found["training"] == [] and found["rollout"], rank  # new here, old or missing there
        refused, why = found["hasty"]
        assert refused == -1 and "rollout waited 0.0 s to read the weights, which publish hold" in why
        assert "publish waited 0.0 s to write the weights, which publish hold" in found["writer"]
        assert found["on the way"] == ([], [], 1)
        assert found["versions"] == (2, 2) and found["patient"] == [(2, "")] and found["dropped"] == [1]


def test_a_publish_that_dies_half_way_leaves_nothing_to_read(tmp_path: Path) -> None:
    answers = run_ranks(killed_half_way, 4, tmp_path, killed=[1])
    survivor, readers = answers[0], answers[2:]
    assert "publish of v2: round" in survivor["error"] and "rank 0 of 2 of the block of devices" in survivor["error"]
    assert survivor["after"][1].startswith("StateError") and survivor["loaded"] == (2, "new")
    for reader in readers:
        versions = [version for version, _ in reader["seen"] if version >= 0]
        assert {what for version, what in reader["seen"] if version >= 0} == {"old"} and set(versions) == {1}
        assert "half written since v1" in reader["seen"][-1][1] and "last checkpoint" in reader["seen"][-1][1]


def test_a_wait_ends_at_its_deadline_and_says_what_for(tmp_path: Path) -> None:
    error = run_ranks(late, 2, 2.0, tmp_path)[0]
    waited = re.match(r"publish of v7: start: rank 0 of 2 of the block of devices waited (\d+\.\d) s", error)
    assert waited and float(waited[1]) >= 2.0, error


def test_a_failing_process_is_reported_by_name() -> None:
    with pytest.raises(AssertionError, match=r"rank 0:[\s\S]*ZeroDivisionError"):
        run_ranks(divide_by, 2, 0)


def divide_by(job: object, number: int) -> float:
    """Work that fails for 0."""
    return 1 / number
