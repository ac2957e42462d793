"""vLLM on training's storage: what it reads in place, what it packs from there, what is still pushed, and why."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import vllm_rig
from vllm_rig import EXACT, VllmRig

from rollplex.config import LoraConfig
from rollplex.planner.engine_weights import engine_weight_facts
from rollplex.rollout.server import ServerHost
from rollplex.weights.lending import EngineSharing, Way

FAMILY = "qwen2_5_vl"


def _sharing(rig: VllmRig, number: int = 0) -> EngineSharing:
    sharing = rig.engines.hosted.places[number].sharing
    assert sharing is not None
    return sharing


def _vllm_model(rig: VllmRig) -> Any:
    return cast(Any, rig.hosts[0]).engine.model_executor.driver_worker.model_runner.get_model()


def _changed_last_norm(rig: VllmRig) -> float:
    """The gap to our log-probs after a write to the last norm that nobody is told of: no cache depends on it."""
    before = rig.sample()
    assert rig.gap(before) < EXACT
    norm = rig.policy.adapter.final_norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.mul_(torch.linspace(0.5, 1.5, len(norm)))
    after = rig.sample()
    gap, stale = rig.gap(after), rig.gap(before)
    with torch.no_grad():
        norm.copy_(kept)
    assert stale > 0.05  # the write matters
    return gap


def test_the_very_tensors_are_read(rig: VllmRig) -> None:
    rig.sample()
    sharing, model = _sharing(rig), _vllm_model(rig)
    ours = dict(rig.policy.model.named_parameters())
    kinds = {way: [v.layer for v in sharing.ranks[0] if v.way is way] for way in Way}
    assert not kinds[Way.PUSHED] and not sharing.reasons
    for layer in kinds[Way.ALIASED]:
        for tensor in layer.tensors:
            (source,) = tensor.sources
            parameter = model.get_submodule(layer.name).get_parameter(tensor.name)
            assert parameter.data_ptr() == ours[source].data_ptr(), layer.name
            with torch.no_grad():
                ours[source].add_(1)
            assert torch.equal(parameter[: ours[source].shape[0]], ours[source])
    aliased = {tensor.sources[0] for layer in kinds[Way.ALIASED] for tensor in layer.tensors}
    assert aliased >= {
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        "model.visual.patch_embed.proj.weight",
    }
    # vLLM's kernels for the CPU have copies of every matrix that is multiplied by, in float32 too; the plain ones are
    # gone, but for the head's.
    for layer in kinds[Way.PACKED]:
        module = model.get_submodule(layer.name)
        assert module.weight.numel() == 0 or layer.name.endswith("lm_head")
        if module.bias is not None:
            source = next(t.sources[0] for t in layer.tensors if t.name == "bias")
            assert module.bias.data_ptr() == ours[source].data_ptr()


def test_a_write_is_seen_without_a_publish(rig: VllmRig) -> None:
    assert _changed_last_norm(rig) < EXACT


def test_packed_layers_wait_for_the_publish_and_get_nothing_sent(rig: VllmRig) -> None:
    before = rig.sample()
    with torch.no_grad():
        rig.policy.adapter.lm_head.weight.mul_(torch.linspace(0.5, 1.5, vllm_rig.SIZES["hidden_size"]))
    assert rig.sample() == before
    rig.policy.bump()
    after = rig.sample()
    assert rig.gap(after) < EXACT < 0.05 < rig.gap(before)
    metrics = rig.engines.metrics()
    assert metrics["publish/pushed_bytes"] == 0 < metrics["publish/packed_bytes"]


def test_the_plan_knew(rig: VllmRig) -> None:
    """`rollplex plan` decides about the layers that it expects; here are the real ones."""
    rig.sample()
    model = rig.config.model.model_copy(update={"path": str(rig.engines.folder)})
    facts = engine_weight_facts(rig.config.model_copy(update={"model": model}))
    assert {way: facts["cpu"][way] for way in Way} == {way: _sharing(rig).nbytes(way) for way in Way}
    assert facts["cuda"][Way.ALIASED] > facts["cpu"][Way.ALIASED] and facts["cuda"][Way.PACKED] == 0


@pytest.fixture(scope="module")
def server() -> Iterator[VllmRig]:
    """One engine in a process of its own."""
    rig = VllmRig(FAMILY, servers=1)
    yield rig
    rig.close()


def test_a_server_reads_what_training_writes(server: VllmRig) -> None:
    assert _changed_last_norm(server) < EXACT


def test_a_server_follows_training_and_an_identity_publish_changes_nothing(server: VllmRig) -> None:
    updater = server.trainer()
    for step in range(6):
        sampled = server.sample()
        assert server.gap(sampled) < EXACT, f"step {step}"
        with server.engines.writing(f"step {step}"):
            server.train_on(updater, sampled)
        server.engines.begin_publish()
    sampled = server.sample()
    assert server.engines.metrics()["publish/pushed_bytes"] == 0
    server.engines.hosted.publish()
    assert server.sample() == sampled


def test_a_server_that_was_killed_shares_again(server: VllmRig, caplog: pytest.LogCaptureFixture) -> None:
    before = server.sample()
    process = cast(ServerHost, server.hosts[0]).process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    server.policy.bump()
    with caplog.at_level(logging.INFO, "rollplex.rollout"):
        assert server.sample() == before
    assert f"weights of {server.hosts[0].name}: " in caplog.text
    assert str(process.pid) not in server.hosts[0].name and not _sharing(server).pushed_sources
    assert _changed_last_norm(server) < EXACT


def _two_steps(rig: VllmRig) -> None:
    """What vLLM samples in each has our log-probs."""
    updater = rig.trainer()
    for step in range(2):
        sampled = rig.sample()
        assert rig.gap(sampled) < EXACT, f"step {step}"
        rig.train_on(updater, sampled)


def test_a_tied_head_is_packed_anew() -> None:
    """vLLM's reload loads it through the embedding and would leave the head's copy as it was: off by 4 and more."""
    sizes = vllm_rig.SIZES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_rig, "SIZES", {**sizes, "tie_word_embeddings": True})
        rig = VllmRig(FAMILY)
        try:
            _two_steps(rig)
            ways = {v.layer.name.rpartition(".")[2]: v.way for v in _sharing(rig).ranks[0]}
            assert (ways["embed_tokens"], ways["lm_head"]) == (Way.ALIASED, Way.PACKED)
        finally:
            rig.close()
        patch.setattr("rollplex.rollout.engines._lent", lambda *_: None)
        pushed = VllmRig(FAMILY)
        try:
            assert pushed.gap(pushed.sample()) < EXACT
            assert pushed.engines.metrics()["publish/aliased_bytes"] == 0
        finally:
            pushed.close()


def test_layers_with_adapters_are_pushed_and_say_so() -> None:
    rig = VllmRig(FAMILY, lora=LoraConfig(r=4, target_modules=("q_proj", "visual.qkv")))
    try:
        _two_steps(rig)
        sharing = _sharing(rig)
        assert list(sharing.reasons) == ["its adapter is merged into it on the way (model.lora)"]
        pushed = {v.layer.name.rpartition(".")[2] for v in sharing.ranks[0] if v.way is Way.PUSHED}
        assert pushed == {"qkv_proj", "qkv"}  # k_proj, v_proj and biases with them: a layer is loaded as a whole
        assert 0 < rig.engines.metrics()["publish/pushed_bytes"] < sharing.nbytes(Way.PACKED)
    finally:
        rig.close()
