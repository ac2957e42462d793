"""Engines in server processes: the same samples as here, pushes in buckets, deaths, hangs, sleep."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from local_host import LocalHost
from numerics.cases import config_of, sampled_tokens, tiny_rig
from rollplex.errors import ConfigError, DeadlineError, EngineError, PeerError, StateError
from rollplex.models.save import merged_tensors, save_pretrained
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.hosted_engine import MAX_RESTARTS, HostedEngine
from rollplex.rollout.hosting import HostSettings
from rollplex.rollout.local_engine import LocalEngine
from rollplex.rollout.sampling import keyed_seed
from rollplex.rollout.server import ServerHost
from rollplex.rollout.vllm_engine import require_vllm
from rollplex.rollout.weight_push import bucket_bytes, fill, in_buckets
from rollplex.weights.segment import Segment

NAMES = ("image", "text", "two_images")
PARAMS = SamplingParams(3, 24, seed=4)
PATIENCE_S = 200.0  # for processes that answer soon unless something hangs, on a busy machine too


def _settings(folder: Path) -> HostSettings:
    return HostSettings(
        model_folder=str(folder),
        dtype="float32",
        tensor_parallel=1,
        max_model_len=None,
        max_rows=64,
        kv_cache_bytes=0,
        enforce_eager=True,
        temperature=1.0,
        sleep=False,
        timeout_s=PATIENCE_S,
    )


class _Hosted:
    """A model, and two server processes that began with other weights."""

    def __init__(self, folder: Path, target: str = "local_host:LocalHost"):
        self.rig = tiny_rig("qwen2_5_vl", torch.float32)
        self.policy, self.specs = self.rig.policy, self.rig.specs(NAMES)
        self.folder = folder
        save_pretrained(self.policy.model, self.rig.loaded.processor, folder)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.mul_(1.1)
        self.engine = HostedEngine(
            self.policy,
            lambda number: ServerHost(
                target, _settings(folder), f"server {number}", log=folder / f"{number}.log", start_timeout_s=PATIENCE_S
            ),
            2,
            bucket_limit=1 << 18,  # a quarter of the weights
            timeout_s=PATIENCE_S,
            direct=False,
        )

    def stopped(self, *numbers):
        """A rollout of these prompts, and the place whose process stands still in the middle of it."""
        rollout = self.engine.open(PARAMS)
        (self.folder / "stop").touch()
        for number in numbers:
            rollout.admit(number, self.specs[number])
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for place in self.engine.places:
                if psutil.Process(place.host.process.pid).status() == psutil.STATUS_STOPPED:
                    return rollout, place
            time.sleep(0.01)
        raise AssertionError("no process has stopped")

    def sample(self, rollout=None):
        return sampled_tokens(rollout or self.engine.open(PARAMS), self.specs)

    def here(self):
        return sampled_tokens(LocalEngine(self.policy, PARAMS, max_rows=64), self.specs)


@pytest.fixture(scope="module")
def hosted(tmp_path_factory):
    made = _Hosted(tmp_path_factory.mktemp("hosted"))
    yield made
    made.engine.close()


def test_processes_sample_what_this_process_would(hosted):
    assert hosted.sample() == hosted.here()
    with torch.no_grad():
        for parameter in hosted.policy.model.parameters():
            parameter.mul_(1.02)
    hosted.policy.bump()
    assert hosted.sample() == hosted.here()


def test_a_killed_process_is_named_and_what_it_owed_is_sampled_again(hosted, caplog):
    rollout, place = hosted.stopped(0, 1, 2)
    os.kill(place.host.process.pid, signal.SIGKILL)
    name, owed = place.host.name, sorted({rollout_id for rollout_id, _ in place.owed})
    assert owed in ([0, 2], [1])  # the host that owed least got the next prompt
    with caplog.at_level(logging.WARNING, "rollplex.rollout"):
        assert sampled_tokens(rollout) == hosted.here()
    assert f"{name} was ended by SIGKILL; started again" in caplog.text
    assert f"{3 * len(owed)} responses of rollouts {owed} are sampled again" in caplog.text


def test_a_process_that_lost_a_worker_counts_as_dead(hosted, caplog):
    """It still runs and tells so itself; the message crosses the process border."""
    (hosted.folder / "lose-a-worker").touch()
    before = [place.host.process.pid for place in hosted.engine.places]
    with caplog.at_level(logging.WARNING, "rollplex.rollout"):
        assert hosted.sample() == hosted.here()
    assert "lost worker processes: one of the test; started again" in caplog.text
    after = [place.host.process.pid for place in hosted.engine.places]
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1


def test_a_death_in_the_middle_of_a_push_leaves_no_mixed_weights(hosted, caplog):
    """The survivor's half push is begun anew; nothing can be sampled before both have all."""
    (hosted.folder / "die-in-load").touch()
    hosted.policy.bump()
    with caplog.at_level(logging.WARNING, "rollplex.rollout"):
        assert hosted.sample() == hosted.here()
    assert "was ended by SIGKILL while weights were pushed" in caplog.text
    assert not (hosted.folder / "die-in-load").exists()


def test_an_interrupted_push_locks_the_engine(hosted, monkeypatch):
    rollout = hosted.engine.open(PARAMS)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rollplex.rollout.hosted_engine.fill", fail)
        with pytest.raises(KeyboardInterrupt):
            hosted.engine.publish()
    with pytest.raises(StateError, match="holds weights vNone"):
        rollout.admit(0, hosted.specs[0])
    assert hosted.sample() == hosted.here()  # `open` pushed again


def test_sleep_and_wake(hosted):
    rollout = hosted.engine.open(PARAMS)
    rollout.admit(0, hosted.specs[0])
    with pytest.raises(StateError, match="kv cannot become released while .* generate"):
        hosted.engine.sleep()
    sampled_tokens(rollout)
    hosted.engine.sleep()
    with pytest.raises(StateError):
        rollout.admit(1, hosted.specs[1])
    assert hosted.sample() == hosted.here()


def test_a_prompt_or_push_too_many_is_refused_while_sampling(hosted):
    rollout = hosted.engine.open(PARAMS)
    rollout.admit(0, hosted.specs[0])
    with pytest.raises(StateError, match="hold the weights"):
        hosted.engine.publish()
    hosted.policy.bump()
    with pytest.raises(StateError, match="open a new rollout"):
        rollout.admit(1, hosted.specs[1])
    sampled_tokens(rollout)


def test_what_a_dead_process_owed_is_not_sampled_from_newer_weights(hosted):
    rollout, place = hosted.stopped(0)
    hosted.policy.bump()
    place.host.process.kill()
    with pytest.raises(StateError, match="by now, so what it owed cannot be sampled again"):
        sampled_tokens(rollout)
    hosted.policy.weight_version -= 1
    sampled_tokens(rollout)


def test_a_hung_process_ends_the_wait_by_name(hosted):
    rollout, place = hosted.stopped(2)
    process = place.host.process
    hosted.engine.timeout_s = 0.5
    try:
        message = rf"process {process.pid}\) gave no sign of life .* 3 responses of rollouts \[2\].*timeout_s"
        with pytest.raises(DeadlineError, match=message):
            sampled_tokens(rollout)
    finally:
        hosted.engine.timeout_s = PATIENCE_S
        process.send_signal(signal.SIGCONT)
    sampled_tokens(rollout)


def test_a_process_that_dies_again_and_again_ends_the_run(hosted):
    rollout, place = hosted.stopped(0)
    rollout.restarts_left = 0
    place.host.process.kill()
    with pytest.raises(PeerError, match=f"was ended by SIGKILL; it was end {MAX_RESTARTS + 1} in one rollout"):
        sampled_tokens(rollout)


def test_an_error_of_the_process_arrives_here(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    host = ServerHost(
        "local_host:LocalHost", _settings(tmp_path), "server", log=tmp_path / "log", start_timeout_s=PATIENCE_S
    )
    with pytest.raises((ConfigError, EngineError, ValueError), match="config.json|model_type"):
        host.wait_ready()
    host.close()
    assert host.process.poll() is not None


def test_an_answer_is_handed_out_once_whatever_the_order(tmp_path):
    made = _Hosted(tmp_path)
    try:
        host = made.engine.places[0].host
        host.wait_ready()
        first, second = host.call("sleep"), host.call("wake_weights")
        assert second() is None and first() is None
        assert host._results == {}
        with pytest.raises(StateError, match=r"server 0 .* to sleep was taken before"):
            first()
    finally:
        made.engine.close()


def test_a_start_that_takes_too_long_names_the_option(tmp_path):
    host = ServerHost(
        "local_host:NeverReady", _settings(tmp_path), "server 3", log=tmp_path / "log", start_timeout_s=0.01
    )
    with pytest.raises(
        DeadlineError, match=r"server 3 \(process \d+\) did not end its start .*start_timeout_s.*last output: none"
    ):
        host.wait_ready()
    host.close()


def test_buckets_hold_every_tensor_once_and_keep_to_their_limit():
    model = tiny_rig("qwen3_vl", torch.float32).policy.model
    tensors, limit = merged_tensors(model), 1 << 17
    buckets = list(in_buckets(tensors, limit))
    assert [item.name for bucket in buckets for item in bucket] == [item.name for item in tensors]
    assert all(bucket_bytes(bucket) <= limit or len(bucket) == 1 for bucket in buckets)
    assert any(len(bucket) == 1 for bucket in buckets) and len(buckets) > 3
    memory = Segment.create(max(map(bucket_bytes, buckets)), torch.device("cpu"))
    state = model.state_dict()
    for bucket in buckets:
        found = dict(fill(memory, bucket).tensors())
        memory.memory.zero_()  # the next bucket comes
        assert all(torch.equal(found[item.name], state[item.name]) for item in bucket)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"vllm": {"servers": 1}}}, "rollout.vllm does nothing with rollout.engine local"),
        ({"rollout": {"engine": "vllm"}, "model": {"path": "x", "dtype": "float64"}}, "set rollout.vllm.engine_dtype"),
    ],
)
def test_options_that_cannot_work_are_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        config_of(**sections)


def test_seeds_are_keyed():
    keys = [(s, r, i) for s in range(3) for r in range(20) for i in range(8)]
    seeds = {keyed_seed(*key) for key in keys}
    assert len(seeds) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert keyed_seed(1, 2, 3) == keyed_seed(1, 2, 3)


def test_vllm_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("rollplex.rollout.vllm_engine.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install vllm.*rollout.engine=local"):
        require_vllm()


def test_the_host_of_these_tests_is_one(tmp_path):
    """In this process too: begun, loaded and sampled from directly."""
    made = tiny_rig("qwen2_5_vl", torch.float32)
    save_pretrained(made.policy.model, made.loaded.processor, tmp_path)
    engine = HostedEngine(
        made.policy,
        lambda _: LocalHost(_settings(tmp_path)),
        1,
        bucket_limit=1 << 18,
        timeout_s=PATIENCE_S,
        direct=True,
    )
    rollout = engine.open(replace(PARAMS, greedy=True))
    rollout.admit(0, made.specs(("image",))[0])
    count = 0
    while rollout.busy:
        count += len(rollout.step())
    assert count == PARAMS.num_generations
    engine.close()
