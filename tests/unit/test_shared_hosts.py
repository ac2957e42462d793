"""Hosts in server processes that read training's storage in place, and publishes that run beside other work."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from numerics.cases import sampled_tokens, tiny_rig
from rollplex.errors import DeadlineError, EngineError, StateError
from rollplex.models.save import save_pretrained
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.hosted_engine import HostedEngine
from rollplex.rollout.hosting import HostSettings
from rollplex.rollout.local_engine import LocalEngine
from rollplex.rollout.server import ServerHost
from rollplex.weights.loan import LentWeights

NAMES = ("image", "text")
PARAMS = SamplingParams(3, 24, seed=4)
PATIENCE_S = 200.0


class _Shared:
    """A model whose storage two server processes read, as far as they can."""

    def __init__(self, folder: Path, timeout_s: float = PATIENCE_S):
        self.rig = tiny_rig("qwen2_5_vl", torch.float32)
        self.policy, self.specs, self.folder = self.rig.policy, self.rig.specs(NAMES), folder
        save_pretrained(self.policy.model, self.rig.loaded.processor, folder)
        settings = HostSettings(
            model_folder=str(folder), dtype="float32", tensor_parallel=1, max_model_len=None, max_rows=64,
            kv_cache_bytes=0, enforce_eager=True, temperature=1.0, sleep=False, timeout_s=timeout_s,
        )  # fmt: skip
        self.engine = HostedEngine(
            self.policy,
            lambda number: ServerHost(
                "sharing_host:SharingHost", settings, f"server {number}", log=folder / f"{number}.log",
                start_timeout_s=PATIENCE_S,
            ),
            2,
            bucket_limit=1 << 18,
            timeout_s=PATIENCE_S,
            direct=False,
            lent=LentWeights(self.policy.model),
        )  # fmt: skip

    def sample(self):
        return sampled_tokens(self.engine.open(PARAMS), self.specs)

    def here(self):
        return sampled_tokens(LocalEngine(self.policy, PARAMS, max_rows=64), self.specs)

    def train(self, factor: float = 1.02):
        """All weights change in place, as an optimizer changes them."""
        with torch.no_grad(), self.engine.writing("optimizer step 1"):
            for parameter in self.policy.model.parameters():
                parameter.mul_(factor)
        self.policy.bump()

    def order(self, name: str):
        (self.folder / name).touch()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    made = _Shared(tmp_path_factory.mktemp("shared"))
    yield made
    made.engine.close()


def test_what_is_shared_is_not_sent(shared):
    assert shared.sample() == shared.here()
    first = shared.engine.metrics()
    whole = sum(p.numel() * 4 for p in shared.policy.model.parameters())
    assert first["publish/pushed_bytes"] == 2 * whole  # a host that is new gets all
    shared.train()
    assert shared.sample() == shared.here()
    then = shared.engine.metrics()
    assert then["publish/aliased_bytes"] + then["publish/pushed_bytes"] == 2 * whole
    assert then["publish/aliased_bytes"] > whole / 2 and then["publish/seconds"] > 0


def test_a_write_is_seen_by_another_process_at_once(shared):
    """The last norm is shared, and no cache of an engine depends on it: other samples without a publish."""
    before = shared.sample()
    norm = shared.policy.adapter.final_norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.copy_(torch.linspace(-2, 2, len(kept)))
    assert shared.sample() == shared.here() != before
    with torch.no_grad():
        norm.copy_(kept)
    assert shared.sample() == before


def test_a_new_process_shares_again(shared, caplog):
    shared.train(0.99)
    before = shared.sample()
    os.kill(shared.engine.places[1].host.process.pid, signal.SIGKILL)
    shared.policy.bump()
    with caplog.at_level(logging.INFO, "rollplex.rollout"):
        assert shared.sample() == before
    name = shared.engine.places[1].host.name
    assert f"weights of {name}: " in caplog.text and " bytes aliased" in caplog.text
    assert f"pushed into {name}" in caplog.text and "no block of tensors" in caplog.text  # with the reason
    shared.train(0.99)
    assert shared.sample() == shared.here()


def test_metrics_are_of_the_publish_and_not_of_a_host_that_was_started_again(shared):
    """Rounds of resampling open several rollouts under one publish."""
    shared.train(0.99)
    shared.sample()
    published = shared.engine.metrics()
    rollout = shared.engine.open(PARAMS)
    process = shared.engine.places[0].host.process
    os.kill(process.pid, signal.SIGSTOP)  # nothing is done before it is killed
    rollout.admit(0, shared.specs[0])
    os.kill(process.pid, signal.SIGKILL)
    while rollout.busy:
        rollout.step()
    assert shared.engine.places[0].host.process is not process
    assert shared.sample() == shared.here()
    assert shared.engine.metrics() == published


def test_weights_stand_still_while_hosts_sample(shared):
    rollout = shared.engine.open(PARAMS)
    rollout.admit(0, shared.specs[0])
    name = shared.engine.places[0].host.name
    with pytest.raises(StateError, match=r"optimizer step 7 cannot start while server 0 .* hold the weights"):
        with shared.engine.writing("optimizer step 7"):
            raise AssertionError("written to while a host reads")
    assert name.startswith("server 0")
    while rollout.busy:
        rollout.step()
    with shared.engine.writing("optimizer step 7"):
        with pytest.raises(StateError, match="while optimizer step 7 writes"):
            rollout.admit(1, shared.specs[1])
    assert shared.sample() == shared.here()


def test_an_update_that_fails_half_way_leaves_nothing_to_sample_from(shared):
    with pytest.raises(KeyboardInterrupt):
        with shared.engine.writing("optimizer step 8"):
            raise KeyboardInterrupt
    with pytest.raises(StateError, match="half written"):
        shared.sample()
    shared.engine.publish()  # whoever knows that the weights are whole
    assert shared.sample() == shared.here()


def test_a_publish_runs_beside_other_work_and_the_next_rollout_waits_for_it(shared):
    shared.train()
    shared.order("hold-load")
    shared.engine.begin_publish()  # comes back though no load can end
    begun_s = time.monotonic()
    with pytest.raises(StateError, match=r"cannot start while the push of v\d+ into server . .* writes the weights"):
        with shared.engine.writing("optimizer step 9"):
            raise AssertionError("written to while hosts take weights")
    held_s = time.monotonic() - begun_s
    (shared.folder / "hold-load").unlink()
    assert shared.sample() == shared.here()
    assert shared.engine.metrics()["publish/seconds"] >= held_s


def test_a_death_in_a_publish_beside_other_work_is_survived(shared, caplog):
    shared.train(0.99)
    shared.order("die-in-load")
    with caplog.at_level(logging.WARNING, "rollplex.rollout"):
        shared.engine.begin_publish()
        assert shared.sample() == shared.here()
    assert "was ended by SIGKILL while weights were pushed; started again" in caplog.text


def test_a_publish_that_failed_is_raised_at_the_next_use_and_leaves_no_mixed_weights(shared):
    shared.train()
    rollout = shared.engine.open(PARAMS)
    shared.train(0.99)
    shared.order("refuse-load")
    shared.engine.begin_publish()
    with pytest.raises(EngineError, match=r"process \d+ refuses the load") as caught:
        shared.engine.open(PARAMS)
    assert "beside the work after the optimizer step" in caught.value.__notes__[0]
    with pytest.raises(StateError, match="holds weights vNone"):
        rollout.admit(0, shared.specs[0])
    assert shared.sample() == shared.here()


def test_a_parameter_that_left_the_shared_memory_is_refused_by_name(tmp_path):
    """Hosts would go on with what it was: nothing of it is sent."""
    made = _Shared(tmp_path)
    made.sample()
    norm = made.policy.adapter.final_norm.weight
    norm.data = norm.data.clone()
    made.train()
    with pytest.raises(StateError, match=r"language_model\.norm\.weight is no longer in the memory .* build engines"):
        made.sample()
    LentWeights(made.rig.loaded.model)  # as a second engine on this policy would: now none is where hosts look
    with pytest.raises(StateError, match=r"is no longer in the memory .* a second engine on the same policy"):
        made.sample()
    made.engine.close()


def test_a_publish_that_hangs_names_its_host_and_closing_does_not_wait(tmp_path):
    made = _Shared(tmp_path, timeout_s=15.0)
    made.sample()
    hosts = [place.host for place in made.engine.places]
    made.train()
    made.order("hang-in-load")
    made.engine.begin_publish()
    with pytest.raises(DeadlineError, match=r"server . .* did not end its begin_load within 15 s .*call_timeout_s"):
        made.engine.open(PARAMS)
    made.engine.begin_publish()  # the same host hangs still
    made.engine.close()  # the load would take an hour
    assert all(host.process.poll() is not None for host in hosts)


def test_closing_does_not_wait_for_the_start_of_a_host_in_place_of_a_dead_one(tmp_path):
    """It takes vLLM minutes, and `close` has ended the hosts that it sees before this one is there."""
    made, started, asked, ended = _Shared(tmp_path), list[ServerHost](), threading.Event(), threading.Event()
    made.sample()
    start, shutdown = made.engine.start, made.engine._thread.shutdown

    def start_late(number):
        asked.set()
        assert ended.wait(PATIENCE_S)
        started.append(start(number))
        return started[-1]

    def end_thread():
        ended.set()
        shutdown()

    made.engine.start, made.engine._thread.shutdown = start_late, end_thread
    made.train()
    made.order("die-in-load")
    made.engine.begin_publish()
    assert asked.wait(PATIENCE_S)
    made.engine.close()
    (late,) = started
    assert not late.ready and late.process.poll() is not None
