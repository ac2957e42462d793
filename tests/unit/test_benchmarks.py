"""The arithmetic and the tables of the benchmarks, and one short block through the pipe protocol."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vs_trl_arms import process, summary
from vs_trl_arms.curves import agreement, distance, smoothed
from vs_trl_arms.reward import length_reward
from vs_trl_arms.settings import REWARD, SETTINGS, ArmSpec
from vs_trl_arms.summary import (
    UnequalWorkError,
    arm_figures,
    block_order,
    check_clock,
    check_lengths,
    ratios,
)


def step(seconds: float, length: int = 64) -> dict[str, float]:
    return {
        "seconds": seconds,
        "cpu_seconds": seconds / 2,
        "mean_length": length,
        "min_length": length,
        "max_length": length,
        "reward": 0.5,
    }


def test_settings_are_those_of_the_issue():
    shapes = {name: (s.prompts, s.responses, s.images, s.image_size, s.tokens) for name, s in SETTINGS.items()}
    assert shapes == {
        "S1": (4, 8, 4, 224, 64),
        "S2": (4, 8, 1, 112, 32),
        "S3": (4, 8, 16, 224, 64),
        "S4": (4, 8, 4, 224, 256),
    }
    assert {name: s.ratio_target for name, s in SETTINGS.items()} == {"S1": 4.0, "S2": 1.5, "S3": 8.0, "S4": 2.0}
    assert {name for name, s in SETTINGS.items() if s.memory_target == 0.6} == {"S1", "S3"}


def test_ratio_is_peer_over_ours_and_memory_ours_over_peer():
    trl = arm_figures(
        [step(s) for s in (9.0, 8.0, 70.0, 8.0, 7.0)], baseline_rss=100, peak_rss=500, sampled_peak_rss=480
    )
    ours = arm_figures(
        [step(s) for s in (2.0, 1.0, 3.0, 2.0, 2.0)], baseline_rss=50, peak_rss=250, sampled_peak_rss=240
    )
    assert (trl.median_seconds, ours.median_seconds) == (8.0, 2.0)
    assert ratios(trl, ours) == {
        "ratio": 4.0,
        "cpu_ratio": 4.0,
        "memory_ratio": 0.5,
        "step_memory_ratio": 0.5,
    }
    assert (trl.step_rss, ours.step_rss) == (400, 200)


def test_the_higher_of_kernel_and_sampled_peak_counts():
    assert arm_figures([step(1.0)], baseline_rss=0, peak_rss=10, sampled_peak_rss=12).peak_rss == 12
    assert arm_figures([step(1.0)], baseline_rss=0, peak_rss=13, sampled_peak_rss=12).peak_rss == 13


@given(st.integers(1, 9))
def test_blocks_alternate_and_no_arm_is_favoured(rounds: int):
    order = block_order(["a", "b"], rounds)
    assert len(order) == 2 * rounds
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert all(set(pair) == {"a", "b"} for pair in pairs)
    assert abs(pairs.count(("a", "b")) - pairs.count(("b", "a"))) <= 1


def test_shorter_or_longer_responses_are_refused():
    check_lengths("trl", [step(1.0, 64)], 64)
    for bad in ({"min_length": 63}, {"max_length": 65}):
        with pytest.raises(UnequalWorkError, match="needed exactly 64"):
            check_lengths("trl", [step(1.0, 64) | bad], 64)


def test_steps_must_add_up_to_the_parents_clock():
    check_clock("trl", [1.0, 1.0], 2.05)
    with pytest.raises(UnequalWorkError, match=r"add up to 2\.000 s"):
        check_clock("trl", [1.0, 1.0], 3.0)


def test_reward_differs_inside_a_group_and_reads_chats_and_strings():
    assert length_reward(["abc", "abcd"]) == [3 / 7, 4 / 7]
    assert length_reward([[{"role": "assistant", "content": "abc"}]], answer=["1"]) == [3 / 7]


def test_result_file_says_what_was_measured_where(tmp_path: Path):
    result = {"benchmark": "vs_trl", **summary.provenance(), "setting": "S1", "ratio": 4.0}
    path = summary.write_result("vs_trl_S1", result, 2, tmp_path)
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read["source"] == "measured"
    assert read["hardware"]["cores"] >= 1 and read["hardware"]["cpu"]
    assert len(read["commit"]) == 40
    assert path.name == f"vs_trl_S1_{summary.hardware_slug(read['hardware'], 2)}_{read['date'][:10]}.json"
    assert (
        summary.hardware_slug({"cpu": "Intel(R) Xeon(R) Processor", "cores": 2}, 1) == "intel-r-xeon-r-processor-2c-1t"
    )


def test_smoothing_and_distance():
    assert smoothed([1.0, 2.0, 3.0, 6.0], 2) == [1.5, 2.5, 4.5]
    assert distance([[0.0, 0.0], [2.0, 2.0]], [[1.0, 3.0]]) == 1.0
    with pytest.raises(ValueError, match="window 3"):
        smoothed([1.0, 2.0], 3)


def test_agreement_tells_equal_arms_from_different_ones():
    mixed = agreement([[0.0] * 4, [1.0] * 4, [2.0] * 4], [[0.1] * 4, [0.9] * 4, [2.0] * 4], window=2)
    assert mixed.p_value > 0.5
    assert mixed.distance < mixed.noise
    apart = agreement([[0.0] * 4, [0.1] * 4, [0.2] * 4], [[1.0] * 4, [1.1] * 4, [1.2] * 4], window=2)
    assert apart.p_value == pytest.approx(0.1)  # the smallest that ten splits can give
    assert apart.distance == pytest.approx(1.0)
    assert apart.distance > max(apart.split_distances)


FAKE_ARM = """
import json, sys
spec = json.loads(sys.stdin.readline())
print(json.dumps({"event": "ready", "versions": {}}), flush=True)
held = bytearray(1)
for line in sys.stdin:
    if spec["seed"] == 1:
        sys.exit("the arm failed on purpose")
    held = bytearray(b"x" * 64 * 2**20)
    steps = [{"seconds": 0.0}] * json.loads(line)["steps"]
    print(json.dumps({"event": "block", "steps": steps, "peak_rss": 1}), flush=True)
"""


def arm_spec(seed: int) -> ArmSpec:
    return ArmSpec(model="m", rows="r", prompts=4, responses=8, tokens=64, threads=1, reward=REWARD, seed=seed)


@pytest.fixture
def fake_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_arm.py").write_text(FAKE_ARM, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_arm"


def test_an_arm_runs_blocks_on_request_and_its_memory_is_seen_from_outside(fake_arm: str, tmp_path: Path):
    with process.ArmProcess(fake_arm, arm_spec(0), tmp_path / "work", cores=None, timeout_s=120.0) as arm:
        assert arm.name == "fake"
        block = arm.run_block(3)
        assert len(block.steps) == 3
        assert arm.run_block(1).sampled_peak_rss - arm.baseline_rss > 40 * 2**20


def test_an_arm_that_fails_is_reported_with_its_log(fake_arm: str, tmp_path: Path):
    with (
        process.ArmProcess(fake_arm, arm_spec(1), tmp_path / "work", cores=None, timeout_s=120.0) as arm,
        pytest.raises(process.ArmError, match="the arm failed on purpose"),
    ):
        arm.run_block(1)


def test_spec_survives_the_pipe():
    spec = arm_spec(7)
    assert ArmSpec(**json.loads(json.dumps(spec.to_json()))) == spec
    assert asdict(spec)["micro_batch"] is None
