"""Runs of the trainer in several real processes are those of one: metrics, weights, optimizer state, resumed or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster import train_runs
from cluster.processes import run_ranks
from cluster.train_runs import STEPS, ended_by, metrics_of, refused_on, run_alone, run_config, run_on, tensors_of

BOUND = 1e-9  # float64; a gradient's sum over ranks has another order than one process'

BATCH: dict[str, Any] = {
    # Advantages from all rewards of the step, several optimizer steps on old log-probs, a reference in the rewards.
    "algorithm": {"scale_rewards": "batch", "beta": 0.05, "kl_in_reward": True, "steps_per_generation": 2},
    "train": {"prefix_activations": "recompute", "warmup_steps": 2, "weight_decay": 0.1},
}
PLAIN: dict[str, Any] = {}
QWEN3: dict[str, Any] = {
    "model": {"build": {"family": "qwen3_vl", "num_heads": 4, "num_kv_heads": 2, "tie_word_embeddings": True}},
    "algorithm": {"loss_type": "grpo", "beta": 0.04},
    "data": {"eval_split": "test"},
    "run": {"eval_rows": 70},  # more than one batch, so that both replicas have one
}


def _degrees(train_tp: int, rollout_tp: int, **more: Any) -> dict[str, Any]:
    return {"sharing": {"train_tp": train_tp, "rollout_tp": rollout_tp, **more}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of the one-process run of some sections, made once."""
    made: dict[str, Path] = {}

    def folder(sections: dict[str, Any]) -> Path:
        if (key := repr(sections)) not in made:
            made[key] = tmp_path_factory.mktemp("alone") / "run"
            run_alone(run_config(made[key], **sections))
        return made[key]

    return folder


def _same_run(found: Path, wanted: Path, first_step: int = 1) -> None:
    """Raises AssertionError naming what differs."""
    lines, truth = metrics_of(found), metrics_of(wanted)
    evaluations = [json.loads((folder / "summary.json").read_text())["evaluation"] for folder in (found, wanted)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=BOUND, abs=BOUND)
    assert [line["step"] for line in lines] == [line["step"] for line in truth] == list(range(1, STEPS + 1))
    for line, other in zip(lines[first_step - 1 :], truth[first_step - 1 :], strict=True):
        assert line.keys() == other.keys()
        for key, value in other.items():
            bound = 1e-6 if key.startswith("sampling/") else BOUND  # differences of nearly equal log-probs
            assert line[key] == pytest.approx(value, rel=bound, abs=bound), (line["step"], key)
    tensors, others = tensors_of(found), tensors_of(wanted)
    assert tensors.keys() == others.keys()
    for key, tensor in others.items():
        assert tensors[key].shape == tensor.shape and tensors[key].dtype == tensor.dtype, key
        assert float((tensors[key] - tensor).abs().max()) < BOUND, key


@pytest.mark.parametrize(
    ("world", "degrees", "sections"),
    [
        (2, _degrees(2, 2), PLAIN),
        (2, _degrees(2, 1, rollout_layout="vllm"), BATCH),
        (2, _degrees(1, 1), BATCH),
        (4, _degrees(2, 2), QWEN3),
        (4, _degrees(2, 1), PLAIN),
        (4, _degrees(4, 2), PLAIN),
        (2, _degrees(2, 2), {"train": {"share_prefix": False, "unshared_prefix": "per_response"}}),
    ],
    ids=[
        "tp2",
        "tp2-rollout1",
        "data2",
        "data2-tp2-qwen3",
        "data2-tp2-rollout1",
        "tp4-rollout2",
        "tp2-unshared",
    ],
)
def test_a_run_is_that_of_one_process(
    world: int, degrees: dict[str, Any], sections: dict[str, Any], alone: Any, tmp_path: Path
) -> None:
    config = run_config(tmp_path / "run", **degrees, **sections)
    answers = run_ranks(run_on, world, config)
    _same_run(tmp_path / "run", alone(sections))
    assert all(answer == answers[0] for answer in answers) and len(answers[0]["rewards"]) == STEPS
    assert min(line["grad_norm"] for line in metrics_of(tmp_path / "run")) > 0.1  # every step moves the weights
    assert list((tmp_path / "run" / "completions").glob("step-*.html"))


RESUMED: dict[str, Any] = {"train": {"weight_decay": 0.1}}


def _begun(folder: Path, run: Path) -> Path:
    """A copy of a run that ended after its second step."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / f"checkpoint-{STEPS}")
    (folder / "summary.json").unlink()
    return folder


def _resumed(folder: Path, **sections: Any) -> Any:
    return run_config(folder, **{**RESUMED, **sections, "run": {"resume_from_checkpoint": "auto"}})


def test_one_process_goes_on_where_four_have_stopped(alone: Any, tmp_path: Path) -> None:
    config = run_config(tmp_path / "four", **RESUMED, **_degrees(2, 1))
    run_ranks(run_on, 4, config)
    run_alone(_resumed(_begun(tmp_path / "one", tmp_path / "four")))
    _same_run(tmp_path / "one", alone(RESUMED))


@pytest.mark.parametrize(("world", "degrees"), [(2, (2, 1)), (4, (2, 2))], ids=["tp2-rollout1", "data2-tp2"])
def test_several_processes_go_on_where_one_has_stopped(
    world: int, degrees: tuple[int, int], alone: Any, tmp_path: Path
) -> None:
    folder = _begun(tmp_path / "several", alone(RESUMED))
    run_ranks(run_on, world, _resumed(folder, **_degrees(*degrees)))
    _same_run(folder, alone(RESUMED))


def test_a_warm_start_is_taken_once_and_seen_by_all(tmp_path: Path) -> None:
    stage = {"warm_start": {"steps": 2, "batch_size": 2}, "train": {"max_steps": 1}}
    run_alone(run_config(tmp_path / "one", **stage))
    run_ranks(run_on, 2, run_config(tmp_path / "two", **stage, **_degrees(2, 2)))
    found, wanted = (metrics_of(tmp_path / name) for name in ("two", "one"))
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=BOUND, abs=BOUND)
    assert found[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=BOUND)


def test_dynamic_sampling_of_one_replica(tmp_path: Path) -> None:
    sections = {
        "algorithm": {"dynamic_sampling": "resample"},
        "rewards": {"reward_funcs": [f"{train_runs.__file__}:rare_reward"]},
    }
    run_alone(run_config(tmp_path / "one", **sections))
    run_ranks(run_on, 2, run_config(tmp_path / "two", **sections, **_degrees(2, 2)))
    assert max(line["dynamic_sampling/rounds"] for line in metrics_of(tmp_path / "one")) > 0
    _same_run(tmp_path / "two", tmp_path / "one")


def test_a_frozen_tower_stays_as_it_was_on_all_replicas(alone: Any, tmp_path: Path) -> None:
    build = {"family": "qwen2_5_vl", "num_heads": 4, "num_kv_heads": 2}
    sections = {"model": {"build": build, "freeze_vision": True}, "data": {"task": "counting"}}
    run_ranks(run_on, 2, run_config(tmp_path / "run", **sections))
    _same_run(tmp_path / "run", alone(sections))


def test_masters_of_16_bit_weights_go_on_bitwise(tmp_path: Path) -> None:
    sections = {"model": {"build": {"num_heads": 4, "num_kv_heads": 2}, "dtype": "bfloat16"}, **_degrees(2, 2)}
    run_ranks(run_on, 2, run_config(tmp_path / "whole", **sections))
    folder = _begun(tmp_path / "resumed", tmp_path / "whole")
    run_ranks(run_on, 2, run_config(folder, **sections, run={"resume_from_checkpoint": "auto"}))
    found, wanted = tensors_of(folder), tensors_of(tmp_path / "whole")
    assert any(key.startswith("optimizer/master/") for key in wanted)
    assert found.keys() == wanted.keys() and all(found[key].equal(tensor) for key, tensor in wanted.items())


def test_options_that_differ_between_processes_are_named(tmp_path: Path) -> None:
    own = [run_config(tmp_path, train={"max_steps": steps}, **_degrees(2, 2)) for steps in (3, 4)]
    said = run_ranks(refused_on, 2, own)
    assert said[0] == said[1] and "rank 1 has other options than rank 0: train.max_steps was 3, is 4" in said[0]


def test_a_degree_that_does_not_divide_the_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    said = run_ranks(refused_on, 3, [run_config(tmp_path, **_degrees(3, 1))] * 3)
    assert all(
        "sharing.train_tp 3 does not divide the 4 query heads; set sharing.train_tp to one of" in s for s in said
    )


def test_an_error_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    """Rank 1 asks no reward function itself and raises what rank 0 found; ranks 2 and 3, of another replica, lose them
    and say why."""
    rewards = {"reward_funcs": [f"{train_runs.__file__}:broken_reward"]}
    said = run_ranks(ended_by, 4, run_config(tmp_path / "run", **_degrees(2, 2), rewards=rewards))
    cause = "reward function 'broken_reward' raised ZeroDivisionError"
    assert all(text.startswith("RewardError") and cause in text for text in said[:2]), said
    assert all(text.startswith("PeerError") and cause in text for text in said[2:]), said
    assert all("rank 0 ended with RewardError" in text or "rank 1 ended with RewardError" in text for text in said[2:])
