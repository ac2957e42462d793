"""vLLM in server processes: the same samples, tensor parallelism, deaths, hangs, deadlines."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator, Sequence
from typing import cast

import psutil
import pytest
import torch
from vllm_rig import EXACT, GENERATIONS, NAMES, VllmRig, finish

from rollplex.config import LoraConfig
from rollplex.errors import DeadlineError, StateError
from rollplex.models.tensor_files import StoredTensor
from rollplex.rollout.server import ServerHost
from rollplex.rollout.weight_push import SharedBucket, fill
from rollplex.weights.segment import Segment

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def servers() -> Iterator[VllmRig]:
    """Two servers; all weights go through in many small buckets, nothing is shared."""
    rig = VllmRig(FAMILY, servers=2, bucket_mib=1)
    rig.engines.hosted.lent = None
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[VllmRig]:
    """One server with two tensor-parallel workers, at a temperature."""
    rig = VllmRig(FAMILY, tp=2, servers=1, temperature=0.7)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def adapters() -> Iterator[VllmRig]:
    """One server for a policy with LoRA on the language model and on the vision tower."""
    targets = ("q_proj", "v_proj", "down_proj", "visual.qkv", "visual.down_proj")
    rig = VllmRig(FAMILY, servers=1, bucket_mib=1, lora=LoraConfig(r=4, target_modules=targets))
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


def test_a_killed_worker_counts_as_the_death_of_its_server(
    two_ranks: VllmRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in the middle of a rollout: the other tensor-parallel worker cannot go on alone."""
    undisturbed = two_ranks.sample(max_tokens=24)
    engine = two_ranks.engines.open(two_ranks.params(max_tokens=24))
    name, children = two_ranks.hosts[0].name, psutil.Process(_process(two_ranks, 0)).children()
    workers = [child for child in children if "Worker" in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[1].suspend()  # nothing is done before it is killed, however late that comes
    for rollout_id, spec in enumerate(two_ranks.specs):
        engine.admit(rollout_id, spec)
    workers[1].kill()
    with caplog.at_level(logging.WARNING, "rollplex.rollout"):
        sampled = finish(engine, [])
    lost = rf"{re.escape(name)} lost worker processes: .*\(exit code -9\).*; started again, \d+ responses of rollouts"
    assert re.search(lost, caplog.text), caplog.text
    assert {key: r.token_ids for key, r in sampled.items()} == {k: r.token_ids for k, r in undisturbed.items()}
    assert two_ranks.gap(sampled) < EXACT


def test_a_killed_server_is_named_and_its_groups_are_sampled_again(
    servers: VllmRig, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed in the middle of a rollout, after a training step: the new process must get the new weights."""
    servers.train_on(servers.trainer(), servers.sample())
    undisturbed = servers.sample(max_tokens=24)
    engine = servers.engines.open(servers.params(max_tokens=24))
    name, process = servers.hosts[1].name, _process(servers, 1)
    os.kill(process, signal.SIGSTOP)  # nothing is done before it is killed, however late that comes
    for rollout_id, spec in enumerate(servers.specs):
        engine.admit(rollout_id, spec)
    owed = [len(place.owed) for place in servers.engines.hosted.places]
    assert min(owed) >= 3 * GENERATIONS  # both have work
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


def test_a_server_killed_in_the_middle_of_a_push_leaves_no_mixed_weights(
    servers: VllmRig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server has half of new weights by then; its push begins anew."""
    servers.train_on(servers.trainer(), servers.sample())
    name, process, pushed = servers.hosts[1].name, _process(servers, 1), list[str]()

    def fill_and_kill(memory: Segment, stored: Sequence[StoredTensor]) -> SharedBucket:
        pushed.extend(item.name for item in stored)
        if len(pushed) > 50 and _process(servers, 1) == process:
            os.kill(process, signal.SIGKILL)
        return fill(memory, stored)

    monkeypatch.setattr("rollplex.rollout.hosted_engine.fill", fill_and_kill)
    with caplog.at_level(logging.WARNING, "rollplex.rollout"):
        sampled = servers.sample()
    assert f"{name} was ended by SIGKILL while weights were pushed; started again" in caplog.text
    assert pushed.count(pushed[0]) == 2
    assert servers.gap(sampled) < EXACT


def test_an_interrupted_push_locks_vllm_until_the_next(servers: VllmRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers got new weights, half a fused layer waits for the rest: nothing may be sampled from that."""
    rollout = servers.engines.open(servers.params())
    servers.train_on(servers.trainer(), servers.sample())
    buckets = 0

    def fill_and_stop(memory: Segment, stored: Sequence[StoredTensor]) -> SharedBucket:
        nonlocal buckets
        buckets += 1
        if buckets == 3:
            raise KeyboardInterrupt
        return fill(memory, stored)

    with monkeypatch.context() as patch:
        patch.setattr("rollplex.rollout.hosted_engine.fill", fill_and_stop)
        with pytest.raises(KeyboardInterrupt):
            servers.engines.open(servers.params())
    with pytest.raises(StateError, match="holds weights vNone"):
        rollout.admit(0, servers.specs[0])
    assert servers.gap(servers.sample()) < EXACT


def test_adapters_reach_vllm_merged(adapters: VllmRig) -> None:
    """vLLM gets the ordinary model that computes what the adapters do; only the adapters train."""
    updater = adapters.trainer()
    before = {name: p.clone() for name, p in adapters.policy.model.named_parameters()}
    for step in range(3):
        sampled = adapters.sample()
        assert adapters.gap(sampled) < EXACT, f"step {step}"
        adapters.train_on(updater, sampled)
    moved = {name for name, p in adapters.policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".lora_" in name for name in moved)
    assert any(".visual." in name for name in moved)
    assert adapters.gap(sampled) > 0.01  # the last step alone moves the log-probs by far more than the bound


def test_a_server_that_hangs_ends_the_wait_by_name(servers: VllmRig) -> None:
    """Last: the stopped process does not come back."""
    engine = servers.engines.open(servers.params(max_tokens=400))
    process = _process(servers, 0)
    os.kill(process, signal.SIGSTOP)
    engine.admit(0, servers.specs[0])
    servers.engines.hosted.timeout_s = 2.0
    try:
        with pytest.raises(
            DeadlineError, match=rf"process {process}\) gave no sign of life .*rollouts \[0\].*timeout_s"
        ):
            finish(engine, [])
    finally:
        os.kill(process, signal.SIGCONT)
