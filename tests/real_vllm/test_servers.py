"""vLLM in server processes: the same samples, tensor parallelism, deaths, hangs, deadlines."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import cast

import pytest
from vllm_rig import GENERATIONS, NAMES, VllmRig, finish

from rollplex.errors import DeadlineError
from rollplex.rollout.server import ServerHost

EXACT = 1e-5
FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def servers() -> Iterator[VllmRig]:
    """Two servers; weights go through in many small buckets."""
    rig = VllmRig(FAMILY, servers=2, bucket_mib=1)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[VllmRig]:
    """One server with two tensor-parallel workers, at a temperature."""
    rig = VllmRig(FAMILY, tp=2, servers=1, temperature=0.7)
    yield rig
    rig.close()


def _process(rig: VllmRig, number: int) -> int:
    return cast(ServerHost, rig.hosts[number]).process.pid


def test_tensor_parallel_log_probs_are_ours_while_training(two_ranks: VllmRig) -> None:
    updater = two_ranks.trainer()
    for step in range(3):
        sampled = two_ranks.sample()
        assert len(sampled) == len(NAMES) * GENERATIONS
        assert two_ranks.gap(sampled) < EXACT, f"step {step}"
        two_ranks.train_on(updater, sampled)


def test_a_killed_server_is_named_and_its_groups_are_sampled_again(
    servers: VllmRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in the middle of a rollout, after a training step: the new process must get the new weights."""
    servers.train_on(servers.trainer(), servers.sample())
    undisturbed = servers.sample(max_tokens=24)
    engine = servers.engines.open(servers.params(max_tokens=24))
    for rollout_id, spec in enumerate(servers.specs):
        engine.admit(rollout_id, spec)
    owed = [len(place.owed) for place in servers.engines.hosted.places]
    assert min(owed) >= 3 * GENERATIONS  # both have work
    name, process = servers.hosts[1].name, _process(servers, 1)
    os.kill(process, signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "rollplex.rollout"):
        sampled = finish(engine, [])
    assert f"process {process}" in name
    assert f"{name} was ended by SIGKILL; started again, {owed[1]} responses" in caplog.text
    assert {key: r.token_ids for key, r in sampled.items()} == {k: r.token_ids for k, r in undisturbed.items()}
    assert servers.gap(sampled) < EXACT
    assert _process(servers, 1) != process


def test_a_server_killed_between_rollouts_is_replaced_with_the_push(servers: VllmRig) -> None:
    before = servers.sample()
    os.kill(_process(servers, 0), signal.SIGKILL)
    servers.policy.bump()  # a push is due
    assert {k: r.token_ids for k, r in servers.sample().items()} == {k: r.token_ids for k, r in before.items()}


def test_a_server_that_hangs_ends_the_wait_by_name(servers: VllmRig) -> None:
    """Last: the stopped process does not come back."""
    engine = servers.engines.open(servers.params(max_tokens=400))
    engine.admit(0, servers.specs[0])
    process = _process(servers, 0)
    os.kill(process, signal.SIGSTOP)
    servers.engines.hosted.timeout_s = 2.0
    try:
        with pytest.raises(
            DeadlineError, match=rf"process {process}\) gave no sign of life .*rollouts \[0\].*timeout_s"
        ):
            finish(engine, [])
    finally:
        os.kill(process, signal.SIGCONT)
