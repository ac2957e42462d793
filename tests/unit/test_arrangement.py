"""Which processes make which run, what several of them refuse and why, and where torchrun's variables come in."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.parallel.arrangement import Arrangement, arrangement
from rollplex.parallel.launch import Launch, launched, voice


def _config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"build": {}}, **sections})


def _degrees(train_tp: int, rollout_tp: int = 1) -> dict[str, Any]:
    return {"sharing": {"train_tp": train_tp, "rollout_tp": rollout_tp}}


@pytest.mark.parametrize(
    ("world", "degrees", "replicas", "groups"),
    [(1, (1, 1), 1, 1), (4, (4, 2), 1, 2), (4, (2, 2), 2, 1), (4, (1, 1), 4, 1)],
)
def test_replicas_and_rollout_groups_fill_the_job(
    world: int, degrees: tuple[int, int], replicas: int, groups: int
) -> None:
    found = arrangement(_config(**_degrees(*degrees)), world)
    assert found == Arrangement(world, *degrees)
    assert (found.replicas, found.rollout_groups) == (replicas, groups)


REFUSED: list[tuple[int, dict[str, Any], tuple[str, ...]]] = [
    (
        1,
        _degrees(4, 2),
        ("sharing.train_tp is 4", "torchrun --nproc-per-node 4 -m rollplex train", "sharing.rollout_tp"),
    ),
    (1, _degrees(1, 2), ("sharing.rollout_tp is 2", "--nproc-per-node 2")),
    (1, {"sharing": {"rollout_layout": "vllm"}}, ("sharing.rollout_layout is vllm", "rollplex plan")),
    (6, _degrees(4), ("6 processes", "sharing.train_tp 4", "--nproc-per-node 4")),
    (4, _degrees(2, 4), ("sharing.rollout_tp 4 does not divide sharing.train_tp 2",)),
    (4, {"rollout": {"prompts_per_step": 6}}, ("rollout.prompts_per_step 6", "4 equal shares", "multiple of 4")),
    (
        2,
        {"rollout": {"prompts_per_step": 6}, "algorithm": {"steps_per_generation": 2}},
        ("algorithm.steps_per_generation", "multiple of 4"),
    ),
    (
        2,
        {"algorithm": {"dynamic_sampling": "resample"}},
        ("algorithm.dynamic_sampling resample", "sharing.train_tp to 2"),
    ),
    (2, {"rollout": {"engine": "vllm"}}, ("rollout.engine vllm", "rollout.engine=local")),
    (2, {"model": {"build": {}, "lora": {}}}, ("model.lora",)),
    (2, {"train": {"share_prefix": False}}, ("train.share_prefix off",)),
    (2, {"rollout": {"decode_graphs": "on"}}, ("rollout.decode_graphs on", "auto or off")),
    (2, {"schedule": {"overlap": "on"}}, ("schedule.overlap on", "auto or off")),
    (2, {"schedule": {"name": "stream"}}, ("schedule.name stream", "serial or rollplex")),
]


@pytest.mark.parametrize(("world", "sections", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_run_cannot_honour_is_refused_with_its_option(
    world: int, sections: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        arrangement(_config(**sections), world)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_every_problem_is_said_at_once() -> None:
    sections = {**_degrees(2), "schedule": {"name": "stream", "overlap": "on"}, "rollout": {"engine": "vllm"}}
    with pytest.raises(ConfigError) as refused:
        arrangement(_config(**sections), 3)
    assert len(str(refused.value).split("\n")) == 4


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_torchrun_says_which_process_this_is() -> None:
    assert launched(TORCHRUN) == Launch(rank=3, world=4, local_rank=1)
    assert voice(TORCHRUN) == "rank 3: "
    assert voice({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) == ""


@pytest.mark.parametrize("absent", sorted(TORCHRUN))
def test_a_single_variable_of_another_tool_makes_no_job(absent: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != absent}
    assert launched(environment) == Launch() and voice(environment) == ""


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "-1"}, {"LOCAL_RANK": "-1"}, {"WORLD_SIZE": "many"}])
def test_variables_that_are_no_ranks_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="start the processes with torchrun"):
        launched({**TORCHRUN, **wrong})
